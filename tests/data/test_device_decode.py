"""Tests of JPEGs decoded on the model's device: by torchcodec on the CPU, and by nvJPEG on a GPU."""

import builtins
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from clipkit.errors import ConfigError
from clipkit.model.tokenizer import ClipTokenizer
from clipkit.samples.decode import plain_jpeg_size
from data.augment import (
    Augmentation,
    draw_recipe,
    empty_batch,
    follow_recipe,
    jpeg_decoder,
    random_of,
    require_nvjpeg,
    training_pixels,
)
from data.loader import Loader, LoaderBatch
from data.order import Order
from data.shards.samples import Shards, find_shards
from data.shards.writer import DatasetWriter, Record
from tests.clipkit.made_images import IMAGES, encoded, image_file, scene

CHANGED = Augmentation(
    crop_scale=0.4,
    crop_aspect=2.0,
    flip=0.5,
    vertical_flip=0.5,
    rotate90=0.5,
    color_jitter=0.4,
    grayscale=0.2,
    blur=0.3,
)
CPU = torch.device("cpu")


def image_files() -> list[tuple[str, bytes]]:
    photograph = Image.fromarray(scene(90, 120))
    return [
        ("jpg", encoded(photograph, "JPEG", quality=90)),
        ("jpg", encoded(photograph, "JPEG", progressive=True)),
        ("jpg", encoded(photograph.convert("L"), "JPEG")),
        ("jpg", encoded(photograph, "JPEG", subsampling=0)),
        ("png", encoded(photograph, "PNG")),
        ("jpg", encoded(photograph.rotate(90, expand=True), "JPEG", quality=75)),
        ("jpg", encoded(photograph.convert("CMYK"), "JPEG")),
    ]


def loader_of(folder: Path, added: list[tuple[str, bytes]], **more: Any) -> Loader:
    with DatasetWriter(folder, samples_per_shard=10) as writer:
        for number, (extension, image) in enumerate(image_files() * 4 + added):
            record = Record(key=f"{number:04d}", image=image, extension=extension, caption=f"number {number}")
            writer.write("train", record)
        writer.finish({})
    shards = Shards.of(find_shards(str(folder)))
    order = Order(shards.counts, seed=1, batch_size=8)
    return Loader(
        shards=shards,
        order=order,
        image_size=32,
        tokenize=ClipTokenizer(context_length=8),
        augmentation=CHANGED,
        **more,
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path / "cache"))


def both(loader: Loader, steps: int, device: torch.device = CPU) -> list[tuple[LoaderBatch, LoaderBatch]]:
    """Return each batch decoded by the loader and decoded on the device."""
    later = replace(loader, decode_later=True)
    return [
        (batch, later.on_device(undecoded, step, device))
        for step, (batch, undecoded) in enumerate(
            zip(loader.batches(0, steps), later.batches(0, steps), strict=True)
        )
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_equal_those_of_the_loader(tmp_path: Path, workers: int) -> None:
    loader = loader_of(tmp_path / "set", [], num_workers=workers)
    left = [batch.undecoded for batch in replace(loader, decode_later=True).batches(0, 6)]
    assert sum(len(one.jpegs) for one in left if one is not None) > 20  # most of 48
    for batch, later in both(loader, 6):
        assert later.undecoded is None
        assert torch.equal(batch.images, later.images) and torch.equal(batch.tokens, later.tokens)
        assert torch.equal(batch.ids, later.ids) and later.bad == ()


def test_broken_jpegs_are_replaced_as_in_the_loader(tmp_path: Path) -> None:
    whole = image_files()[0][1]
    at = whole.index(b"\xff\xda") + 40  # within the coded data: it decodes to another image or fails
    wrong_size = bytearray(whole)
    wrong_size[whole.index(b"\xff\xc0") + 5] += 1  # 256 rows more than coded
    broken = [
        ("jpg", whole[: len(whole) // 2]),
        ("jpg", whole[: len(whole) // 2] + b"\xff\xd9"),
        ("jpg", bytes(wrong_size)),
        ("jpg", whole[:at] + b"\xff\xd9"),
        ("jpg", whole[:at] + b"\xff\x01\xff\x77" * 9 + whole[at:]),
        ("png", b"nothing"),
    ]
    loader = loader_of(tmp_path / "set", broken)
    bad = 0
    for batch, later in both(loader, 20):
        assert torch.equal(batch.ids, later.ids) and batch.bad == later.bad
        assert torch.equal(batch.images, later.images)
        bad += len(batch.bad)
    assert bad > 5


@pytest.mark.parametrize("name", list(IMAGES))
def test_only_baseline_complete_jpegs_are_decoded_later(name: str) -> None:
    data = image_file(name)
    size = plain_jpeg_size(data)
    if size is not None:
        with Image.open(io.BytesIO(data)) as image:
            assert image.format == "JPEG" and (image.height, image.width) == size
            assert image.mode in ("RGB", "L") and "progression" not in image.info
        assert plain_jpeg_size(data[:-2]) is None


def test_recipe_equals_training_pixels() -> None:
    content = scene(200, 300)
    data = encoded(Image.fromarray(content), "PNG")
    for seed in range(20):
        out = empty_batch(1, 48)[0]
        training_pixels(data, image_size=48, augmentation=CHANGED, random=random_of(seed), out=out)
        recipe = draw_recipe(200, 300, CHANGED, random_of(seed))
        again = empty_batch(1, 48)[0]
        follow_recipe(torch.from_numpy(content).permute(2, 0, 1), recipe, again)
        assert torch.equal(out, again)


def test_missing_torchcodec_raises_error(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("torchcodec"):
            raise ImportError(name)
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"data\.nvjpeg = true requires torchcodec"):
        jpeg_decoder()


def test_nvjpeg_requires_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"data\.nvjpeg = true requires a GPU"):
        require_nvjpeg(CPU)


@pytest.mark.gpu
def test_gpu_decoding_is_close_to_the_loader(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    loader = loader_of(tmp_path / "set", [])
    for batch, later in both(loader, 6, torch.device("cuda")):
        assert torch.equal(batch.ids, later.ids)
        apart = (batch.images.int() - later.images.cpu().int()).abs().float()
        assert apart.mean() < 1 and np.quantile(apart.numpy(), 0.99) < 8

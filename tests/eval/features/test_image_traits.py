"""Tests of transparent and rotated images in evaluations: warnings, backgrounds and rotation."""

import os
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from clipkit import CLIP
from clipkit.config import Config
from clipkit.errors import DataError
from clipkit.samples.traits import TraitCounts
from clipkit.training.checkpoint import LoopState, save_checkpoint
from eval import Encoder, Ranks, evaluate, open_dataset
from tests.clipkit.deep_images import color_png
from tests.forked import Forked

CLEAR = (
    "images are transparent and without a background: the colors hidden under the transparent parts are used, as "
    "open_clip does; set"
)
TURNED = "images are rotated by an EXIF tag that is not applied, as in open_clip; set"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An image folder with 2 transparent, 3 rotated and 4 plain images, next to their rendered versions."""
    random = np.random.default_rng(0)
    exif = Image.Exif()
    exif[0x0112] = 8
    for number in range(9):
        pixels = Image.fromarray(random.integers(0, 256, (20, 30, 4), dtype=np.uint8))
        photo, name = pixels.convert("RGB"), f"class {number % 2}/{number}.png"
        for kind in ("raw", "seen"):
            (tmp_path / kind / name).parent.mkdir(parents=True, exist_ok=True)
        raw, seen = tmp_path / "raw" / name, tmp_path / "seen" / name
        if number < 2:
            pixels.save(raw)
            white = Image.new("RGBA", pixels.size, "white")
            Image.alpha_composite(white, pixels).convert("RGB").save(seen)
        elif number < 5:
            photo.save(raw, exif=exif)
            photo.transpose(Image.Transpose.ROTATE_90).save(seen)
        else:
            photo.save(raw)
            photo.save(seen)
    return tmp_path / "raw"


@pytest.mark.long
def test_evaluation_reports_traits_also_with_stored_features(
    forked: Forked, model: CLIP, folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    state = LoopState(step=1, data="none")
    save_checkpoint(run, model, torch.optim.AdamW(model.parameters()), state, Config(), keep=1)
    environment = {"CLIPKIT_CACHE": os.environ["CLIPKIT_CACHE"]}

    def score(data: Path, *options: str) -> tuple[list[str], list[str]]:
        arguments = [
            "zero-shot",
            "--model",
            run,
            "--data",
            data,
            "--features",
            tmp_path / "features",
            *options,
        ]
        done = forked.run("eval/__main__.py", list(map(str, arguments)), environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        table = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if " acc1 " in line]
        return table, [line for line in done.stderr.splitlines() if "images" in line]

    told = [
        f"dataset raw, split test: 2 of 9 {CLEAR} --background white",
        f"dataset raw, split test: 3 of 9 {TURNED} --upright",
    ]
    plain = score(folder)
    assert plain[1] == told
    assert score(folder) == plain  # from stored features
    assert score(folder, "--upright")[1] == told[:1]
    assert score(folder, "--background", "none", "--no-upright") == (plain[0], [])
    table, lines = score(folder, "--background", "white", "--upright")
    assert (table, lines) == score(folder.parent / "seen")
    assert lines == []


def test_features_of_another_background_or_orientation_are_not_reused(
    model: CLIP, folder: Path, tmp_path: Path
) -> None:
    def features(data: Path, **options: object) -> Tensor:
        chosen = CLIP(model.architecture, preprocess=model.preprocess.replace_decoding(**options))  # type: ignore[arg-type]
        chosen.load_state_dict(model.state_dict())
        return Encoder(chosen, store=tmp_path / "features").images(open_dataset(data)).projected.clone()

    plain = features(folder)
    laid = features(folder, background="white")
    both = features(folder, background="white", upright=True)
    seen = features(folder.parent / "seen")
    assert torch.equal(features(folder), plain) and torch.equal(features(folder, background="white"), laid)
    assert torch.equal(both, seen)
    # in the order of classes: 0 2 4 6 8, 1 3 5 7
    changed = [not torch.equal(a, b) for a, b in zip(plain, laid, strict=True)]
    assert [number for number, one in zip((0, 2, 4, 6, 8, 1, 3, 5, 7), changed, strict=True) if one] == [0, 1]
    changed = [not torch.equal(a, b) for a, b in zip(laid, both, strict=True)]
    assert [number for number, one in zip((0, 2, 4, 6, 8, 1, 3, 5, 7), changed, strict=True) if one] == [
        2,
        4,
        3,
    ]


def test_deep_images_stop_an_evaluation_without_a_range(model: CLIP, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for number in range(4):
        gray = random.integers(0, 256, (20, 30), dtype=np.uint8)
        for kind, pixels in (("plain", gray), ("deep", gray.astype(np.uint16) * 200 + 8000)):
            path = tmp_path / kind / f"class {number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    with pytest.raises(DataError, match=r"image .*: 16-bit grayscale image with values from 8\d*000? to 5"):
        evaluate(model, tmp_path / "deep")
    plain = Encoder(model).images(open_dataset(tmp_path / "plain")).projected
    preprocess = model.preprocess.replace_decoding(pixel_range="8000,59000")
    ranged = CLIP(model.architecture, preprocess=preprocess)
    ranged.load_state_dict(model.state_dict())
    assert torch.equal(Encoder(ranged).images(open_dataset(tmp_path / "deep")).projected, plain)
    ranged.preprocess = model.preprocess.replace_decoding(pixel_range="8000,9000")
    with pytest.warns(UserWarning, match="4 of 4 images have values outside the pixel range 8000,9000"):
        evaluate(ranged, tmp_path / "deep")


def test_deep_colors_are_told_also_from_stored_features(model: CLIP, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for number in range(4):
        folder = tmp_path / "data" / f"class {number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(color_png(random.integers(0, 65536, (20, 30, 3))))
    with pytest.warns(
        UserWarning, match="4 of 4 images have 16 bits per color, of which the upper 8 are used"
    ):
        evaluate(model, tmp_path / "data")
    for _ in range(2):
        encoder = Encoder(model, store=tmp_path / "features")
        encoder.images(open_dataset(tmp_path / "data"))
        (counts,) = encoder.counts.values()
        assert (counts.images, counts.deep_colors, counts.clamped) == (4, 4, 0)


def test_evaluate_warns_about_traits(model: CLIP, folder: Path) -> None:
    with pytest.warns(UserWarning) as told:
        evaluate(model, folder)
    assert [str(one.message) for one in told] == [
        f"dataset raw, split test: 2 of 9 {CLEAR} background='white' in clipkit.load",
        f"dataset raw, split test: 3 of 9 {TURNED} upright=True in clipkit.load",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate(model, folder.parent / "seen")


def test_each_of_two_ranks_counts_traits_of_all_images(model: CLIP, folder: Path, tmp_path: Path) -> None:
    dataset, barrier, given = open_dataset(folder), threading.Barrier(2), [torch.zeros(1)] * 2
    found: list[object] = [None, None]

    def work(rank: int) -> None:
        def gather(values: Tensor) -> Tensor:
            given[rank] = values.detach().clone()
            barrier.wait(60)
            total = given[0] + given[1]
            barrier.wait(60)
            return total

        # separate stores, as on two hosts
        ranks = Ranks(rank=rank, world=2, gather=gather)
        for _ in range(2):  # the second time from the store
            encoder = Encoder(model, store=tmp_path / f"host{rank}", ranks=ranks, batch_size=2)
            encoder.images(dataset)
            found[rank] = encoder.counts

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for one in threads:
        one.join(60)
    assert found == [{("raw", "test"): TraitCounts(images=9, transparent=2, rotated=3)}] * 2

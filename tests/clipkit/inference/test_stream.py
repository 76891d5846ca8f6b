"""Tests of the feature stream: batches, training mode, precision, bounded read-ahead."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import clipkit
from clipkit.inference.inputs import Item, Stream
from clipkit.inference.stream import Failure, Features, FeatureStream, pick_device
from clipkit.model.clip import CLIP


@pytest.fixture(scope="module")
def model() -> CLIP:
    return clipkit.create("ViT-Ti-4-16", seed=0).eval()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten images, of which numbers 2 and 5 are broken."""
    for number in range(10):
        noise = np.random.default_rng(number).integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{number}.png")
    for number in (2, 5):
        (tmp_path / f"{number}.png").write_bytes(b"broken")
    return tmp_path


def test_batches_are_full_within_a_part_despite_failures(photos: Path, model: CLIP) -> None:
    items = ((number // 6, item) for number, item in enumerate(Stream([str(photos)])))
    features = FeatureStream(model, batch_size=3, workers=2)
    outcomes = list(features.run(items, kind="image"))
    batches = [outcome for outcome in outcomes if isinstance(outcome, Features)]
    names = [(batch.part, [Path(item.key).stem for item in batch.items]) for batch in batches]
    assert names == [(0, ["0", "1", "3"]), (0, ["4"]), (1, ["6", "7", "8"]), (1, ["9"])]
    failed = [
        (outcome.part, Path(outcome.item.key).stem) for outcome in outcomes if isinstance(outcome, Failure)
    ]
    assert failed == [(0, "2"), (0, "5")]
    assert features.empty("image").shape == features.empty("caption").shape == (0, 128)
    assert FeatureStream(model).batch_size == 32


def test_training_mode_is_restored(photos: Path) -> None:
    model = clipkit.create("ViT-Ti-4-16", seed=0).train()
    run = FeatureStream(model, batch_size=2).run(((0, item) for item in Stream([str(photos)])), kind="image")
    next(run)
    assert not model.training
    list(run)
    assert model.training


def test_device_names() -> None:
    assert (pick_device("cpu"), pick_device("cuda"), pick_device("cuda:3")) == ("cpu", "cuda:0", "cuda:3")


def test_bf16_features_are_close_and_float32(photos: Path, model: CLIP) -> None:
    rows = {}
    for precision in ("fp32", "bf16"):
        features = FeatureStream(model, batch_size=8, precision=precision)
        items = ((0, item) for item in Stream([str(photos)]))
        outcomes = list(features.run(items, kind="image"))
        rows[precision] = np.concatenate(
            [outcome.rows for outcome in outcomes if isinstance(outcome, Features)]
        )
        assert rows[precision].dtype == np.float32
        assert np.abs(np.linalg.norm(rows[precision], axis=1) - 1).max() < 1e-5
    cosine = (rows["fp32"] * rows["bf16"]).sum(axis=1)
    assert 0.99 < cosine.min() < cosine.max() <= 1.00001
    assert not np.array_equal(rows["fp32"], rows["bf16"])


def test_read_ahead_is_bounded(model: CLIP, photos: Path) -> None:
    """With an endless generator."""
    taken = 0

    def endless() -> Iterator[tuple[int, Item]]:
        nonlocal taken
        while True:
            taken += 1
            yield 0, Item(source="", key=str(taken), image=photos / "0.png")

    outcomes = FeatureStream(model, batch_size=4, workers=2).run(endless(), kind="image")
    for number in range(30):
        one = next(outcomes)
        assert isinstance(one, Features)
        assert one.items[0].key == str(4 * number + 1)
        assert taken <= 4 * (number + 1) + 4 + 2 * 4  # one batch in progress, two read ahead
    outcomes.close()  # type: ignore[attr-defined]
    assert torch.get_num_threads() == 1

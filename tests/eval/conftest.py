"""Fixtures of the evaluation tests: small datasets and models."""

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from clipkit import CLIP
from clipkit.model.architectures import Architecture, TextTower, VisionTower
from data.shards.writer import DatasetWriter, Record
from eval import Encoder, EvalDataset, Subject, open_dataset
from eval.tasks import subject

WriteDataset = Callable[..., Path]
CLASSES = ("red", "green", "blue", "yellow", "black", "white", "grey")


def png(seed: int) -> bytes:
    """Return a random PNG image; its height depends on the seed."""
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (20 + seed % 7, 24, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep shard indexes out of the user's cache, and repeat warnings in each test."""
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    subject.warn_once.cache_clear()


@pytest.fixture
def write_dataset(tmp_path: Path) -> WriteDataset:
    """Return a function that writes random images with labels, captions or both, and returns their folder."""

    def write(
        name: str = "colours",
        *,
        labels: Sequence[int | None] = tuple(i % 7 for i in range(23)),
        captions: Sequence[str | None] | None = None,
        class_names: Sequence[str] | None = CLASSES,
        templates: Sequence[str] | None = ("a photo of something {c}.", "{c}"),
        card: dict[str, Any] | None = None,
        split: str = "test",
        samples_per_shard: int = 10,
    ) -> Path:
        out = tmp_path / name
        texts = [None] * len(labels) if captions is None else captions
        with DatasetWriter(out, samples_per_shard=samples_per_shard) as writer:
            for i, (label, caption) in enumerate(zip(labels, texts, strict=True)):
                record = Record(key=f"s{i:07d}", image=png(i), extension="png", caption=caption, label=label)
                writer.write(split, record)
            writer.finish(card or {}, class_names=class_names, templates=templates)
        return out

    return write


@pytest.fixture(scope="session")
def model() -> CLIP:
    """A very small CLIP with random weights."""
    import torch

    shape = Architecture(
        embed_dim=16,
        vision=VisionTower(image_size=16, patch_size=8, width=32, layers=1, heads=2),
        text=TextTower(width=32, layers=1, heads=2),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CLIP(shape).initialize()


def subject_of(
    model: CLIP, write: WriteDataset, splits: Mapping[str, Sequence[int]], *, metrics: tuple[str, ...] = ()
) -> Subject:
    """Return a subject with splits of these labels; the i-th image is the same in all splits."""
    folders = {
        split: write(f"set-{split}-{len(labels)}", labels=labels, split=split)
        for split, labels in splits.items()
    }

    def open_split(split: str) -> EvalDataset:
        return open_dataset(folders.get(split) or next(iter(folders.values())), split=split)

    return Subject(
        Encoder(model),
        open_split("test" if "test" in splits else "train"),
        metrics=metrics,
        open_split=open_split,
    )

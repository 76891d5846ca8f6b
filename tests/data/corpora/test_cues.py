"""Tests of the dataset `cues`: shapes and textures agree in training and never in the test split."""

from pathlib import Path

import pytest
import torch

from data.corpora import cues
from data.corpora.builtin import BUILTIN
from eval.readers import open_dataset


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, count in (("_TRAIN", 40), ("_VAL", 20), ("_PER_PAIR", 2)):
        monkeypatch.setattr(cues, name, count)
    cues.make(tmp_path / "cues")
    return tmp_path / "cues"


def test_cues_agree_in_training_and_never_in_the_test_split(folder: Path) -> None:
    test = open_dataset(folder, metadata_names=["texture"])
    assert test.labels is not None
    pairs = torch.stack((test.labels, test.metadata["texture"]), dim=1)
    distinct, counts = pairs.unique(dim=0, return_counts=True)
    assert len(distinct) == 90 and (counts == 2).all() and (distinct[:, 0] != distinct[:, 1]).all()
    for split, count in (("train", 40), ("val", 20)):
        own = open_dataset(folder, split=split, metadata_names=["texture"])
        assert own.labels is not None and len(own) == count
        assert torch.equal(own.labels, own.metadata["texture"])


def test_files_are_reproducible(folder: Path, tmp_path: Path) -> None:
    cues.make(tmp_path / "again")
    for path in folder.rglob("*.tar"):
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(folder)).read_bytes()
    assert BUILTIN["cues"].revision == cues.REVISION

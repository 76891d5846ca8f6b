"""Tests of the evaluation set `digits`: scikit-learn's images and labels, unchanged."""

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from clipkit.errors import DataError
from data.corpora.builtin import BUILTIN, make_digits


def test_images_and_labels_equal_scikit_learn(tmp_path: Path) -> None:
    make_digits(tmp_path / "digits")
    bunch = load_digits()
    images, labels = [], []
    with tarfile.open(tmp_path / "digits" / "test" / "0.tar") as tar:
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            if member.name.endswith(".png"):
                images.append(np.asarray(Image.open(content)))
            elif member.name.endswith(".cls"):
                labels.append(int(content.read()))
    assert labels == bunch.target.tolist()
    assert np.array_equal(np.rint(np.stack(images) * (16 / 255)), bunch.images)


def test_only_a_test_split_and_metadata_exist(tmp_path: Path) -> None:
    make_digits(tmp_path / "digits")
    names = sorted(path.name for path in (tmp_path / "digits").iterdir())
    assert names == ["card.json", "classnames.txt", "test", "zeroshot_classification_templates.txt"]
    card = json.loads((tmp_path / "digits" / "card.json").read_text())
    assert (
        card["samples"] == {"test": 1797}
        and card["license"]
        and card["revision"] == BUILTIN["digits"].revision
    )
    names = (tmp_path / "digits" / "classnames.txt").read_text().split()
    assert names == ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    templates = (tmp_path / "digits" / "zeroshot_classification_templates.txt").read_text().splitlines()
    assert len(templates) == 7 and all("{c}" in template for template in templates)


def test_missing_scikit_learn_raises_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install -e '\.\[eval\]'"):
        make_digits(tmp_path / "digits")
    assert not (tmp_path / "digits").exists()


def test_images_are_small_grayscale_pngs(tmp_path: Path) -> None:
    make_digits(tmp_path / "digits")
    with tarfile.open(tmp_path / "digits" / "test" / "0.tar") as tar:
        content = tar.extractfile("00000000.png")
        assert content is not None
        with Image.open(io.BytesIO(content.read())) as image:
            assert (image.format, image.mode, image.size) == ("PNG", "L", (8, 8))

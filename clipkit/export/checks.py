"""Samples to compare a model with its export, and the folder of an export.

The images have exactly the model's size, so that no library resizes them and only the models are compared.
Letters: N images or texts, S image side, O embedding dimension.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit import __version__
from clipkit.errors import ConfigError
from clipkit.model.clip import CLIP
from clipkit.model.preprocess import batch_of
from clipkit.model.tokenizer import ClassTokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "CARD",
    "MANIFEST",
    "NEW_CARD",
    "TEXTS",
    "Earlier",
    "Samples",
    "complete",
    "difference",
    "draw_samples",
    "earlier_export",
    "normalized",
    "place",
    "recover",
    "texts_of",
]

TEXTS = (
    "a photo of a cat",
    "two red circles on a blue ground",
    "x",
    "The quick brown fox doesn't jump over 13 lazy dogs.",
    "price: 12.50 $, 3 for 30 (today only!)",
    "eine Straße in der Abenddämmerung",
    "猫の写真",
    "many words, more than fit: " + "a long road with trees on both sides, " * 30,
)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Inputs and the model's outputs for them.

    Attributes:
        images: N of S x S pixels.
        texts: N, one of which exceeds every context length; for a head of classes, class names.
        pixels: the preprocessed images, normalized float32 (N, 3, S, S).
        image_features: (N, O) float32, not normalized.
        text_features: likewise.
    """

    images: tuple["Image", ...]
    texts: tuple[str, ...]
    pixels: Tensor
    image_features: Tensor
    text_features: Tensor

    @property
    def image_embeddings(self) -> Tensor:
        """(N, O), unit norm."""
        return F.normalize(self.image_features, dim=-1)

    @property
    def text_embeddings(self) -> Tensor:
        """(N, O), unit norm."""
        return F.normalize(self.text_features, dim=-1)


@torch.no_grad()
def draw_samples(model: CLIP) -> Samples:
    """Draw images and encode them and ``texts_of`` the model, which is in evaluation mode."""
    texts = texts_of(model)
    images = tuple(_image(number, model.preprocess.image_size) for number in range(len(TEXTS)))
    pixels = normalized(batch_of(images, model.preprocess), model)
    return Samples(
        images=images,
        texts=texts,
        pixels=pixels,
        image_features=model.encode_image(pixels, normalize=False),
        text_features=model.encode_text(model.tokenizer(texts), normalize=False),
    )


def texts_of(model: CLIP) -> tuple[str, ...]:
    """``TEXTS``, or as many class names for a head of classes, which reads nothing else."""
    if not isinstance(model.tokenizer, ClassTokenizer):
        return TEXTS
    names = model.tokenizer.names
    return tuple(names[number % len(names)] for number in range(len(TEXTS)))


def normalized(pixels: Tensor, model: CLIP) -> Tensor:
    """(N, 3, S, S) uint8 → float32 with the model's mean and standard deviation."""
    mean, std = (torch.tensor(one).view(3, 1, 1) for one in (model.preprocess.mean, model.preprocess.std))
    return (pixels.float() / 255 - mean) / std


def difference(found: object, expected: Tensor) -> float:
    """The largest difference of two arrays of one shape; NaN counts as infinite."""
    other = torch.as_tensor(found, dtype=torch.float32)
    assert other.shape == expected.shape, (tuple(other.shape), tuple(expected.shape))
    return float((other - expected).abs().max().nan_to_num(nan=torch.inf))


def _image(number: int, size: int) -> "Image":
    """Draw a gradient with a rectangle and noise, different for each number."""
    from PIL import Image

    random = np.random.default_rng(number)
    ends = random.uniform(0, 255, (2, 3))
    slope = np.linspace(0, 1, size)[:, None, None] * random.uniform(0.2, 1, (1, size, 1))
    canvas = ends[0] + (ends[1] - ends[0]) * slope  # (S, S, 3)
    (top, left), (high, wide) = random.integers(0, max(1, size // 2), 2), random.integers(1, size // 2 + 2, 2)
    canvas[top : top + high, left : left + wide] = random.uniform(0, 255, 3)
    canvas += random.normal(0, 12, canvas.shape)
    return Image.fromarray(canvas.clip(0, 255).astype(np.uint8))


# --------------------------------------------------------------------------------------------------------------
# The folder of an export: which files belong to which library, what of an earlier one stays.
#
# ``clipkit_export.json`` lists the files of each library and has a digest of the weights, so that a folder
# never holds two models. What a user has added or changed (a license, the card) is kept.

MANIFEST, CARD, NEW_CARD = "clipkit_export.json", "README.md", "README.new.md"
_FORMAT = 1
_LARGEST = 2**20  # bytes of a manifest


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """What an earlier export left in the folder.

    Attributes:
        kept: records of the targets that stay, by name.
        stale: files that go, as their target is written anew.
        card: digest of the model card as it was written.
    """

    kept: Mapping[str, Any] = field(default_factory=dict)
    stale: frozenset[str] = frozenset()
    card: str = ""


def earlier_export(out: Path, wanted: Sequence[str], weights: str) -> Earlier:
    """What is in ``out`` already.

    Args:
        out: the folder.
        wanted: targets that will be written.
        weights: digest of the model's.

    Raises:
        ConfigError: it holds something else, or targets that would stay and are of another model.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return Earlier()
    try:
        path = out / MANIFEST
        manifest = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size <= _LARGEST else {}
        targets: dict[str, Any] = dict(manifest["targets"])
        files = {name: frozenset(map(str, record["files"])) for name, record in targets.items()}
        known, card = manifest["weights"], str(manifest["card"])
        ours = manifest["format"] == _FORMAT
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        ours = False
    if not ours:
        raise ConfigError(f"{out} is not empty and no earlier export: give another folder")
    kept = {name: record for name, record in targets.items() if name not in wanted}
    if kept and known != weights:
        raise ConfigError(f"{out} holds another model for {', '.join(kept)}: give another folder")
    staying = frozenset().union(*(files[name] for name in kept))
    return Earlier(kept=kept, stale=frozenset().union(*files.values()) - staying, card=card)


def complete(
    inner: Path, out: Path, earlier: Earlier, records: Mapping[str, Any], *, card: str, weights: str
) -> None:
    """Add to the newly written files what stays of ``out``, the model card and the manifest.

    Args:
        inner: where the new files are.
        out: the folder that they will replace.
        earlier: what is in it.
        records: of the targets written, by name.
        card: the model card.
        weights: digest of the model's.
    """
    digest = hashlib.sha256(card.encode()).hexdigest()
    former = out / CARD
    edited = former.is_file() and hashlib.sha256(former.read_bytes()).hexdigest() != earlier.card
    (inner / (NEW_CARD if edited else CARD)).write_text(card, encoding="utf-8")
    manifest = {
        "format": _FORMAT,
        "clipkit": __version__,
        "weights": weights,
        "card": earlier.card if edited else digest,
        "targets": {**earlier.kept, **records},
    }
    (inner / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    mode = (inner / MANIFEST).stat().st_mode & 0o777
    for path in inner.rglob("*"):  # safetensors makes files that only their owner can read
        if path.is_file():
            path.chmod(mode)
    if out.is_dir():
        _keep(out, inner, skip=earlier.stale)


def _keep(out: Path, inner: Path, *, skip: Iterable[str]) -> None:
    """Everything of ``out`` that is not written anew; files are linked, not copied, where that is possible."""
    gone = set(skip)
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        target = inner / name
        if path.is_dir() and not path.is_symlink():
            if not any(file.startswith(f"{name}/") for file in gone):
                target.mkdir(exist_ok=True)
        elif name not in gone and not os.path.lexists(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, target, follow_symlinks=False)
            except OSError:  # a file system without links
                shutil.copy2(path, target, follow_symlinks=False)


def place(inner: Path, out: Path) -> None:
    """Rename the finished folder to ``out``; a former one goes only when that is done."""
    former = _former(out)
    if out.exists():
        out.rename(former)
    inner.rename(out)
    shutil.rmtree(former, ignore_errors=True)


def recover(out: Path) -> None:
    """Undo the half of ``place`` that a killed export may have left."""
    former = _former(out)
    if former.exists() and not out.exists():
        former.rename(out)
    shutil.rmtree(former, ignore_errors=True)


def _former(out: Path) -> Path:
    return out.with_name(f".{out.name}.former")

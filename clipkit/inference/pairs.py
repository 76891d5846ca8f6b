"""Encode image–caption pairs for scoring, and find the most similar images.

Letters: B pairs, O embedding dimension, T pixels of a thumbnail, N and M images.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipkit.cli import ModelOptions
from clipkit.formats.checkpoint import model_hash
from clipkit.inference.inputs import Item, Kind
from clipkit.inference.stream import THUMBNAIL, Failure, FeatureStream, pick_device

Images = npt.NDArray[Any]  # (N,) of the dtype ``PairEncoder.dtype``
_FLAT = (
    32.0  # added to the norm of thumbnails: noise of less than 2 gray levels (32 / sqrt(T)) is not compared
)


@dataclass(frozen=True, kw_only=True, eq=False)
class PairFeatures:
    """Features of B pairs.

    Attributes:
        images: (B,) records of ``PairEncoder.dtype``; zero for images that could not be encoded.
        scores: (B,) float32 cosine similarity of image and caption; NaN if either could not be encoded.
        causes: B reasons why an image or a caption could not be encoded; empty if both were.
    """

    images: Images
    scores: npt.NDArray[np.float32]
    causes: list[str]


class PairEncoder:
    """Encode pairs with a model.

    Args:
        options: as for ``FeatureStream.from_options``.

    Attributes:
        identity: 16 hexadecimal digits that change with the weights, the preprocessing and the precision.
        dtype: record of an image: ``embedding`` (O) float16, unit norm, and ``thumbnail`` (T) uint8.
    """

    def __init__(self, options: ModelOptions) -> None:
        self._stream = FeatureStream.from_options(options)
        identity = f"{model_hash(self._stream.model)} {self._stream.precision}"
        self.identity = hashlib.sha256(identity.encode()).hexdigest()[:16]
        width = self._stream.empty("image").shape[1]
        self.dtype = np.dtype(
            [("embedding", np.float16, (width,)), ("thumbnail", np.uint8, (THUMBNAIL * THUMBNAIL,))]
        )
        self._options = options

    def encode(self, items: Sequence[Item]) -> PairFeatures:
        """Encode B pairs."""
        numbered = [replace(item, key=str(i)) for i, item in enumerate(items)]
        images = np.zeros(len(items), dtype=self.dtype)
        rows = np.full((2, len(items), self.dtype["embedding"].shape[0]), np.nan, dtype=np.float32)
        causes = [""] * len(items)
        kinds: tuple[Kind, ...] = ("image", "caption")
        for row, kind in enumerate(kinds):
            todo = ((0, item) for item in numbered if not causes[int(item.key)])
            for outcome in self._stream.run(todo, kind=kind, thumbnails=kind == "image"):
                if isinstance(outcome, Failure):
                    causes[int(outcome.item.key)] = outcome.cause
                    continue
                indices = [int(item.key) for item in outcome.items]
                rows[row, indices] = outcome.rows
                if outcome.thumbnails is not None:
                    images["embedding"][indices] = outcome.rows
                    images["thumbnail"][indices] = outcome.thumbnails
        return PairFeatures(images=images, scores=(rows[0] * rows[1]).sum(-1), causes=causes)

    def notes(self) -> list[str]:
        """Return notes about encoded images whose transparency or orientation was ignored."""
        return self._stream.lines(self._options)


def closest(
    queries: Images, others: Iterator[Images], device: str | None = None
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Find the most similar of other images for each query.

    The similarity of two images is the smaller of the cosine similarity of their embeddings and the correlation of
    their thumbnails: a model may embed all images of a class alike, and different images may have similar
    thumbnails. All pairs are compared, at 2 (O + T) floating-point operations each.

    Args:
        queries: (N,) records of ``PairEncoder.dtype``.
        others: blocks of images; the queries themselves, as the same object, are compared only with those before
            them.
        device: where to compute, by default a GPU if there is one.

    Returns:
        (N,) float32 similarity and (N,) int64 number of the image in all blocks; both -1 without any other image.
    """
    target = torch.device(pick_device(device))
    embeddings, thumbnails = _unit(queries, target)
    best = torch.full((len(queries),), -1.0, device=target)
    matches = torch.full((len(queries),), -1, dtype=torch.int64, device=target)
    start = 0
    for block in others:
        other_embeddings, other_thumbnails = (
            (embeddings, thumbnails) if block is queries else _unit(block, target)
        )
        similarity = torch.minimum(embeddings @ other_embeddings.T, thumbnails @ other_thumbnails.T)  # (N, M)
        if block is queries:
            earlier = torch.ones_like(similarity, dtype=torch.bool).tril(-1)
            similarity.masked_fill_(~earlier, -1.0)
        value, nearest = similarity.max(dim=1)
        matches = torch.where(value > best, nearest + start, matches)
        best = torch.maximum(value, best)
        start += len(block)
    return best.cpu().numpy(), matches.cpu().numpy()


def _unit(images: Images, device: torch.device) -> tuple[Tensor, Tensor]:
    embeddings = torch.from_numpy(np.ascontiguousarray(images["embedding"])).to(device).float()
    gray = torch.from_numpy(np.ascontiguousarray(images["thumbnail"])).to(device).float()
    gray = torch.cat([gray - gray.mean(dim=1, keepdim=True), torch.full_like(gray[:, :1], _FLAT)], dim=1)
    return normalize(embeddings, dim=1), normalize(gray, dim=1)

"""Common parts of losses over the global batch: rows of all ranks, logits in tiles, and gradients of features.

Only some rows of the N × N logits exist at a time: sums for softmax are accumulated by row and by column over tiles
of rows, and the backward pass computes each tile again (as FlashAttention does, Dao et al. 2022; for the
contrastive loss Cheng et al. 2024, https://arxiv.org/abs/2410.17243). Memory grows with N instead of its square.

Every loss is a mean over the N rows of all ranks. A rank computes the derivatives by the logits of its own images
with all texts, times the number of ranks: the mean over ranks, which DistributedDataParallel and FSDP take, is then
the gradient of the whole batch, however the rows are distributed.

Letters: B rows of this rank, N rows of all ranks, O embedding dimension, R rows of a tile, K identities of a pair.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipkit.distributed import (
    gather_row_counts,
    gather_rows,
    max_over_ranks,
    rank,
    scatter_row_sums,
    start_gathering,
    sum_over_ranks,
    world_size,
)
from clipkit.model.towers import widest_dtype

_TILE = 1 << 22  # logits that exist at a time,
_LEAST_ROWS = 128  # but no fewer rows than these: each tile reads and writes all texts' gradients


class GlobalBatch:
    """The rows of all ranks, in the order of ranks; all ranks create it together.

    Args:
        rows: (B, …) this rank's rows; B may differ from rank to rank.
        precision: that of products of features, see ``product_precision``.
    """

    def __init__(self, rows: Tensor, *, precision: str = "float32") -> None:
        self.precision = precision
        self._counts = gather_row_counts(len(rows))
        self.size = sum(self._counts)  # N
        first = sum(self._counts[: rank()])
        self.local_rows = slice(first, first + len(rows))  # this rank's among all

    def gather(self, rows: Tensor) -> Tensor:
        """Return all ranks' (N, …) rows from each rank's (B, …)."""
        gathered: Tensor = _Gathered.apply(rows, partial(gather_rows, rows, self._counts), self._counts)
        return gathered

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over all rows of a (B,) value of each, a scalar that is the same on all ranks."""
        return sum_over_ranks(values.sum()) / self.size

    def fraction(self, holds: Tensor) -> float:
        """Return the fraction of all rows for which a (B,) bool holds."""
        return float(sum_over_ranks(holds.sum()).item() / self.size)

    @property
    def weight(self) -> float:
        """Weight of a row in this rank's gradient."""
        return world_size() / self.size


class _Gathered(torch.autograd.Function):
    """Rows of all ranks; the gradient of a rank's rows is the sum of what all ranks computed for them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, wait: Callable[[], Tensor], counts: list[int]) -> Tensor:
        ctx.counts = counts
        return wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return scatter_row_sums(gradients[0], ctx.counts), None, None


class CaptionGathering:
    """Gathers the text features of captions from all ranks, once for all losses of a step.

    All ranks use it together.

    Args:
        has_negatives: whether as many wrong captions follow, which are not gathered.
    """

    def __init__(self, *, has_negatives: bool) -> None:
        self._has_negatives = has_negatives
        self._wait: Callable[[], Tensor] | None = None
        self._counts: list[int] = []

    def start(self, texts: Tensor) -> None:
        """Send this rank's features; does not wait."""
        captions = self._captions(texts)
        self._counts = gather_row_counts(len(captions))
        self._wait = start_gathering(captions, self._counts)

    def finish(self, texts: Tensor) -> Tensor:
        """Return the (N, O) features of all ranks; starts with this rank's unless it has started.

        Ranks exchange gradients once, however many losses use the features.
        """
        if self._wait is None:
            self.start(texts)
        gathered: Tensor = _Gathered.apply(self._captions(texts), self._wait, self._counts)
        return gathered

    def _captions(self, texts: Tensor) -> Tensor:
        return texts.chunk(2)[0] if self._has_negatives else texts


def mean_over_rows(losses: Tensor, features: Tensor) -> Tensor:
    """Return the mean of (B,) losses over the rows of all ranks, given the (B, O) features.

    The mean over ranks of its gradients is the global batch's.
    """
    batch = GlobalBatch(features)
    local = losses.sum() * batch.weight
    return local + (batch.mean(losses.detach()) - local.detach())


def tile_height(rows: int, columns: int) -> int:
    """Return the number of rows of a tile, R."""
    return min(rows, max(_LEAST_ROWS, _TILE // max(1, columns)))


@contextmanager
def product_precision(precision: str) -> Iterator[None]:
    """Compute products of float32 matrices on NVIDIA GPUs exactly in "float32", or in "tf32" by tensor cores."""
    backend: Any = torch.backends.cuda.matmul
    before = backend.fp32_precision
    backend.fp32_precision = {"float32": "ieee", "tf32": "tf32"}[precision]
    try:
        yield
    finally:
        backend.fp32_precision = before


def compute_tiles(
    rows: Tensor, columns: Tensor, scale: Tensor, precision: str = "float32"
) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the (B, O) rows and their products with all (N, O) columns, times a scale.

    The (R, N) products may be overwritten; the next ones use the same memory.
    """
    height = tile_height(len(rows), len(columns))
    memory = rows.new_empty(height, len(columns))
    for start in range(0, len(rows), max(1, height)):
        tile = slice(start, min(start + height, len(rows)))
        with product_precision(precision):
            products = torch.mm(rows[tile] * scale, columns.T, out=memory[: tile.stop - start])
        yield tile, products


def row_sums(logits: Tensor) -> Tensor:
    """Return (2, R) by row of an (R, N) tile: the greatest logit, and the sum of exponentials divided by its exp.

    They are separate because rounding their logarithm would be an error of softmax.
    """
    greatest = logits.amax(1)
    return torch.stack([greatest, (logits - greatest[:, None]).exp_().sum(1)])


class ColumnSums:
    """Sums of exponentials by column, over consecutive tiles and over all ranks.

    Args:
        columns: number of columns, N.
        like: a tensor of the dtype and on the device.
        means: number of further values that are averaged by column with the weights of softmax.
    """

    def __init__(self, columns: int, like: Tensor, *, means: int = 0) -> None:
        self._greatest = like.new_full((columns,), -torch.inf)
        self._totals = like.new_zeros(1 + means, columns)  # divided by exp(greatest)

    def add(self, logits: Tensor, *values: Tensor) -> None:
        """Add an (R, N) tile, which is overwritten, and values of the same shape."""
        before = self._greatest
        self._greatest = torch.maximum(before, logits.amax(0))
        self._totals.mul_((before - self._greatest).exp_())
        exponentials = logits.sub_(self._greatest).exp_()
        self._totals[0] += exponentials.sum(0)
        for total, value in zip(self._totals[1:], values, strict=True):
            total += (exponentials * value).sum(0)

    def combine_ranks(self) -> tuple[Tensor, Tensor]:
        """Return (2, N) sums by column, as ``row_sums`` by row, and the (means, N) means."""
        greatest = max_over_ranks(self._greatest)
        totals = sum_over_ranks(self._totals * (self._greatest - greatest).exp_())
        return torch.stack([greatest, totals[0]]), totals[1:] / totals[0]


def sum_softmaxes(logits: Tensor, by_row: Tensor, by_column: Tensor) -> Tensor:
    """Return softmax by row plus softmax by column of an (R, N) tile, which is overwritten.

    Args:
        logits: (R, N).
        by_row: (2, R) from ``row_sums``.
        by_column: (2, N) from ``ColumnSums``.
    """
    total = (logits - by_row[0, :, None]).exp_().mul_(by_row[1, :, None].reciprocal())
    return total.addcmul_(logits.sub_(by_column[0]).exp_(), by_column[1].reciprocal())


class FeatureGradients:
    """Computes gradients of features and scale from derivatives by logits, scale · images · texts, tile by tile.

    Args:
        batch: the rows.
        images: (B, O) this rank's.
        all_texts: (N, O).
        scale: scalar.
        needed: which of images, texts and scale require a gradient; a locked tower saves a product.
    """

    def __init__(
        self, batch: GlobalBatch, images: Tensor, all_texts: Tensor, scale: Tensor, needed: tuple[bool, ...]
    ) -> None:
        self._batch, self._images, self._all_texts, self._scale = batch, images, all_texts, scale
        self._needed = needed
        # the gradient of the scale follows from either one
        self._grad_images = torch.empty_like(images) if needed[0] or not needed[1] else None
        self._grad_texts = torch.zeros_like(all_texts) if needed[1] else None

    def add(self, slopes: Tensor, tile: slice) -> None:
        """Add the (R, N) derivatives by a tile's logits."""
        with product_precision(self._batch.precision):
            if self._grad_images is not None:
                torch.mm(slopes, self._all_texts, out=self._grad_images[tile])
            if self._grad_texts is not None:
                self._grad_texts.addmm_(slopes.T, self._images[tile])

    def finish(self, factor: Tensor | float) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Return this rank's gradients of images (B, O), all texts (N, O) and scale, times a factor."""
        if self._grad_images is not None:
            grad_scale = (self._grad_images * self._images).sum()
        else:
            assert self._grad_texts is not None
            grad_scale = (self._grad_texts * self._all_texts).sum()
        grad_images = grad_texts = None
        if self._needed[0] and self._grad_images is not None:
            grad_images = self._grad_images.mul_(factor * self._scale)
        if self._grad_texts is not None:
            grad_texts = self._grad_texts.mul_(factor * self._scale)
        return grad_images, grad_texts, (factor * grad_scale).reshape(self._scale.shape)


def split_negatives(
    texts: Tensor, has_negative: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Split (2B, O) features into those of captions and of wrong captions, with (B,) whether an image has one.

    Without ``has_negative``, all are captions.
    """
    if has_negative is None:
        return texts, None
    captions, wrong = texts.chunk(2)
    return captions, (wrong, has_negative)


def check_features(image_features: Tensor, text_features: Tensor) -> None:
    """Raise ValueError unless both are matrices of one shape."""
    if image_features.shape != text_features.shape or image_features.ndim != 2:
        raise ValueError(
            f"features must be two matrices of one shape, not {tuple(image_features.shape)} and "
            f"{tuple(text_features.shape)}"
        )


SAME = ("negatives", "positives", "ignored")  # how to treat pairs that show the same thing, see ``clip_loss``


def positive_pairs(
    batch: GlobalBatch, features: Tensor, identities: Tensor | None, same: str
) -> "PositivePairs":
    """Build the positive pairs, which losses read one tile at a time.

    Args:
        batch: the rows.
        features: (B, O), for dtype and device.
        identities: (B, K) int64, see ``clip_loss``; None: only an image's own text is positive.
        same: one of ``SAME``.

    Raises:
        ValueError: identities are not (B, K) integers, or ``same`` is unknown.
    """
    if same not in SAME:
        raise ValueError(f"same must be one of {', '.join(SAME)}, not {same!r}")
    if identities is None or same == "negatives":
        return PositivePairs(batch, features)
    if identities.ndim != 2 or len(identities) != len(features) or not identities.shape[1]:
        raise ValueError(
            f"identities must be (rows, numbers) of {len(features)} rows, not {tuple(identities.shape)}"
        )
    if identities.dtype != torch.int64:
        raise ValueError(f"identities must be int64, not {identities.dtype}")
    return PositivePairs(batch, features, identities.to(features.device), same)


class PositivePairs:
    """The texts that belong to each image: its own, and with "positives" all that are the same, with equal weights.

    A loss calls ``record_logits`` for all tiles, then ``mean_targets``, and only then ``subtract_targets``.
    """

    _all_weights: Tensor  # (N,)

    def __init__(
        self,
        batch: GlobalBatch,
        features: Tensor,
        identities: Tensor | None = None,
        same: str = "negatives",
    ) -> None:
        self._batch = batch
        self._same = same
        self._row_sums = features.new_empty(len(features))
        if identities is not None:
            self._identities = identities
            self._all_identities = batch.gather(identities)
        if same == "positives":
            self._column_sums = features.new_zeros(batch.size)
            # number of an image's texts, later its reciprocal
            self._weights = torch.empty_like(self._row_sums)

    def mask(self, tile: slice) -> Tensor:
        """Return (R, N) whether an image and a text show the same thing."""
        same = self._identities[tile, 0, None] == self._all_identities[:, 0]
        for k in range(1, self._identities.shape[1]):
            same |= self._identities[tile, k, None] == self._all_identities[:, k]
        return same

    def fill_ignored(self, logits: Tensor, tile: slice, filling: float) -> None:
        """Write ``filling`` where an image and a text are neither positive nor negative."""
        if self._same == "ignored":
            alike = self.mask(tile)
            self._diagonal(alike, tile).fill_(False)
            logits.masked_fill_(alike, filling)

    def negate_positives_(self, values: Tensor, tile: slice) -> None:
        """Change the sign of positive pairs in place."""
        if self._same == "positives":
            values.addcmul_(values, self.mask(tile).to(values.dtype), value=-2)
        else:
            self._diagonal(values, tile).neg_()

    def record_logits(self, logits: Tensor, tile: slice) -> None:
        """Record the sums of the logits of positive pairs by row and column."""
        if self._same != "positives":
            self._row_sums[tile] = self._diagonal(logits, tile)
            return
        same = self.mask(tile).to(logits.dtype)
        self._weights[tile] = same.sum(1)
        positives = same.mul_(logits)
        self._row_sums[tile] = positives.sum(1)
        self._column_sums += positives.sum(0)

    def mean_targets(self) -> Tensor:
        """Return (B,) the mean of an image's positive logits plus that of its text's."""
        if self._same != "positives":
            return self._row_sums * 2
        self._all_weights = self._batch.gather(self._weights.reciprocal_())
        column_sums = sum_over_ranks(self._column_sums)[self._batch.local_rows]
        return (self._row_sums + column_sums) * self._weights  # as many images as texts are the same

    def subtract_targets(self, slopes: Tensor, tile: slice, weights: "PairWeights | None") -> None:
        """Subtract the targets' probabilities by row and by column, times the weights of the pairs."""
        if self._same != "positives":
            self._diagonal(slopes, tile).sub_(2 if weights is None else 2 * weights.rows[tile])
            return
        same = self.mask(tile).to(slopes.dtype)
        rows, columns = self._weights[tile, None], self._all_weights
        if weights is not None:
            rows, columns = rows * weights.rows[tile, None], columns * weights.columns
        slopes.addcmul_(same, rows, value=-1)
        slopes.addcmul_(same, columns, value=-1)

    def _diagonal(self, values: Tensor, tile: slice) -> Tensor:
        return values.diagonal(self._batch.local_rows.start + tile.start)


class PairWeights(NamedTuple):
    """Weights of pairs in means over the batch. Their own mean is 1.

    Attributes:
        rows: (B,) of this rank's pairs.
        columns: (N,) of all pairs.
    """

    rows: Tensor
    columns: Tensor

    @classmethod
    def gather(cls, batch: GlobalBatch, weights: Tensor | None, like: Tensor) -> "PairWeights | None":
        """Return the weights of all ranks from (B,) of each, of a dtype and on a device; None for none."""
        if weights is None:
            return None
        columns = gather_weights(weights, like)
        return cls(columns[batch.local_rows], columns)

    def mean(self, tile: slice) -> Tensor:
        """Return (R, N) the mean of the weights of an image and a text."""
        return (self.rows[tile, None] + self.columns) / 2


def gather_weights(weights: Tensor, like: Tensor) -> Tensor:
    """Return (N,) the weights of all ranks from (B,) of each, divided by their mean; all ranks call it together.

    If all are 0, they stay 0.
    """
    gathered = gather_rows(weights.to(like), gather_row_counts(len(weights)))
    return gathered / gathered.mean().clamp(min=torch.finfo(gathered.dtype).tiny)


def target_entropy(positives: Tensor, compared: Tensor, smoothing: float) -> Tensor:
    """Return the entropy of targets, (N,) of the dtype of ``compared``.

    Args:
        positives: (N,) over how many texts each target is uniform.
        compared: (N,) number of texts, of the ``widest_dtype``.
        smoothing: probability that is spread evenly over all texts.
    """
    rest = smoothing / compared
    positive = (1 - smoothing) / positives + rest
    return -(positives * positive.xlogy(positive) + (compared - positives) * rest.xlogy(rest))


def count_alike(identities: Tensor, same: str) -> tuple[Tensor, Tensor]:
    """Count, for each pair of the global batch, the pairs that are the same and the pairs it is compared with.

    All ranks call it together. No N × N table is created.

    Args:
        identities: (B, K) int64, see ``clip_loss``.
        same: "negatives", "positives" or "ignored".

    Returns:
        (N,) int64 pairs that agree with each in at least one identity, including itself (1 with "negatives"), and
        (N,) pairs that it is compared with, of the ``widest_dtype``.
    """
    counts = gather_row_counts(len(identities))
    alike = identities.new_ones(sum(counts))
    if same != "negatives":
        everywhere = gather_rows(identities, counts)  # (N, K)
        alike.zero_()
        for size in range(1, identities.shape[1] + 1):  # agreeing in one, minus those agreeing in two, plus …
            for chosen in combinations(range(identities.shape[1]), size):
                _, group, times = everywhere[:, chosen].unique(dim=0, return_inverse=True, return_counts=True)
                alike += times[group] * (-1) ** (size + 1)
    rows = len(alike)
    left = rows - alike + 1 if same == "ignored" else torch.full_like(alike, rows)
    return alike, left.to(widest_dtype(left.device))

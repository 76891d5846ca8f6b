"""Data selection: choose the pairs of a batch that a step trains, and divide them among the ranks.

Joint example selection (JEST, Evans et al. 2024, https://arxiv.org/abs/2406.17711) prefers learnable pairs: those
with a high loss of the model in training and a low loss of a reference. Losses depend on the other pairs of a
batch, so pairs are chosen in chunks. The first chunk is drawn by the losses among all pairs that were read, to
which each further chunk adds the losses among the pairs that were chosen before. A pair is drawn with a probability
proportional to the exponential of its learnability, without replacement, and pairs that show the same thing are not
compared. The losses are cross-entropies, as in ``clipkit.objectives.compare_pairs``.

All ranks order the same scores, so they agree without a message about it. The chosen pairs are divided evenly, and
move to the ranks that train them: with chosen pairs where they were read, a step would take as long as on the rank
with the most, and some ranks might have none.

Letters: B pairs that this rank has read, N pairs that all ranks have read, C pairs of a chunk, R rows of a tile, O
embedding dimension of the model or of the reference, K identities of a pair.
"""

from dataclasses import replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.batch import Batch
from clipkit.distributed import exchange_rows, gather_row_counts, max_over_ranks, rank, world_size
from clipkit.model.towers import at_least_float32, draw_uniform
from clipkit.objectives import compare_pairs
from clipkit.objectives.distill import Teaching
from clipkit.objectives.tiles import GlobalBatch, compute_tiles
from clipkit.training.parallel import split_evenly

BatchKind = TypeVar("BatchKind", bound=Batch)


_CHUNKS = 16  # in which pairs are chosen, as in JEST


@torch.no_grad()
def choose_pairs(
    model: Teaching,
    reference: Teaching,
    identities: Tensor,
    *,
    count: int,
    chunks: int = _CHUNKS,
    seed: int,
    rows: Tensor,
) -> tuple[Tensor, Tensor]:
    """Choose pairs of the global batch; all ranks call this together.

    Args:
        model: features of this rank's pairs by the model in training.
        reference: their features by the reference.
        identities: (B, K) int64, see ``clip_loss``.
        count: number of pairs to choose, at most N.
        chunks: number of parts in which they are chosen.
        seed: any integer, different in each step.
        rows: (B,) int64, positions of the pairs in the global batch.

    Returns:
        (count,) int64 ascending, positions in the global batch, and (2,) the mean learnability of all pairs and of
        the chosen ones; the same on all ranks.
    """
    batch = GlobalBatch(rows)
    by_model, by_reference = (_Context(batch, features, identities) for features in (model, reference))
    chunks = min(chunks, count)
    among_all = by_model.compare_all() - by_reference.compare_all()  # (B,)
    learnability = batch.gather(among_all)
    scores = among_all
    noise = -(-draw_uniform(seed=seed, rows=rows, count=chunks).log()).log()  # Gumbel's distribution
    is_chosen = torch.zeros(batch.size, dtype=torch.bool, device=rows.device)
    for i, chunk in enumerate(split_evenly(count, chunks)):
        # the largest sums with such noise are draws without replacement
        draws = batch.gather(scores + noise[:, i]).masked_fill_(is_chosen, -torch.inf)  # (N,)
        chosen = draws.argsort(descending=True, stable=True)[: chunk.stop - chunk.start]
        is_chosen[chosen] = True
        if i + 1 < chunks:
            by_model.add(chosen)
            by_reference.add(chosen)
            scores = among_all + by_model.losses() - by_reference.losses()
    indices = is_chosen.nonzero().flatten()
    return indices, torch.stack([learnability.mean(), learnability[indices].mean()])


class _Context:
    """The losses of this rank's pairs among the pairs that were chosen so far, by one model.

    The loss of a pair is the sum of the cross-entropies of its image over texts and of its text over images.
    """

    def __init__(self, batch: GlobalBatch, features: Teaching, identities: Tensor) -> None:
        self._identities = identities
        self._images = at_least_float32(features.images)  # (B, O)
        self._texts = at_least_float32(features.texts)
        self._scale = features.scale.to(self._images.dtype)
        self._all_images = batch.gather(self._images)  # (N, O)
        self._all_texts = batch.gather(self._texts)
        self._all_identities = batch.gather(identities)
        self._logits = self._scale * (self._images * self._texts).sum(1)  # (B,)
        # logarithms of sums of exponentials over texts and over images
        self._sums = self._images.new_full((2, len(self._images)), -torch.inf)

    def compare_all(self) -> Tensor:
        """Return (B,) the losses among all pairs."""
        return compare_pairs(self._images, self._texts, self._scale, self._identities)[:2].sum(0)

    def add(self, chosen: Tensor) -> None:
        """Add (C,) pairs of the global batch."""
        identities = self._all_identities[chosen]
        sides = ((self._images, self._all_texts[chosen]), (self._texts, self._all_images[chosen]))
        for sums, (local, others) in zip(self._sums, sides, strict=True):
            for tile, logits in compute_tiles(local, others, self._scale):
                same = (self._identities[tile, None] == identities).any(-1)  # (R, C)
                logits.masked_fill_(same, -torch.inf)
                sums[tile] = torch.logaddexp(sums[tile], logits.logsumexp(1))

    def losses(self) -> Tensor:
        """Return (B,) the losses among the pairs that were added."""
        return F.softplus(self._sums - self._logits).sum(0)


def take_pairs(batch: BatchKind, chosen: Tensor, *, padding: int) -> BatchKind:
    """Return this rank's part of the chosen pairs, which ranks exchange; all ranks call this together.

    Args:
        batch: the pairs that this rank has read.
        chosen: (C,) int64 on the host, positions in the global batch, ascending.
        padding: the token behind the end of shorter texts.
    """
    world = world_size()
    counts = torch.tensor(gather_row_counts(len(batch.ids)))
    ends = counts.cumsum(0)
    parts = split_evenly(len(chosen), world)
    sizes = [part.stop - part.start for part in parts]
    readers = torch.bucketize(chosen, ends, right=True)  # (C,) the rank that has read each pair
    trainers = torch.arange(world).repeat_interleave(torch.tensor(sizes))  # and the one that trains it
    is_local = readers == rank()
    local = chosen[is_local] - (ends - counts)[rank()]
    sent = trainers[is_local].bincount(minlength=world).tolist()
    received = readers[parts[rank()]].bincount(minlength=world).tolist()

    def take(rows: Tensor) -> Tensor:
        return exchange_rows(rows[local.to(rows.device)], sent, received)

    width = int(max_over_ranks(torch.tensor(batch.width)))
    taken = batch.take_rows(take, width=width, padding=padding)
    return replace(taken, first_row=parts[rank()].start, rank_rows=tuple(sizes))

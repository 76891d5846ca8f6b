"""The loss that a configuration asks for, of one batch: contrastive, and a teacher's part where there is one."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from clipkit.config import DistillConfig, LossConfig
from clipkit.distributed import counts_of_rows, gather_rows
from clipkit.objectives.clip import clip_loss, distillation_loss, siglip_loss

__all__ = ["Teaching", "batch_loss", "chance_level"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Teaching:
    """A teacher's features of one batch; of any dimension of its own."""

    images: Tensor  # (B, T)
    texts: Tensor  # (B, T)
    scale: Tensor  # exp(t)


def chance_level(loss: LossConfig, distill: DistillConfig, identities: Tensor) -> float | None:
    """The least loss of a model that gives all pictures and texts of this global batch the same logit.

    With m texts left to a picture, softmax gives each a share of 1 / m: ln m, however many of them are right, and m
    is N unless the same ones are ignored. The sigmoid's best guess is p, the share of the right ones among the
    M questions that are left: M / N times the entropy of p, which a bias of logit(p) comes to. It begins at −10, so
    that this loss begins above the level of chance. All ranks call this together.

    Args:
        loss: what is minimized.
        distill: with a teacher there is no such level: None, as it depends on what the teacher says.
        identities: (B, K) int64 of this rank's rows, see ``clip_loss``.
    """
    if distill.wanted:
        return None
    rows = counts_of_rows(len(identities))
    alone = loss.same == "negatives"
    same = identities.new_ones(sum(rows)) if alone else _same_as(gather_rows(identities, rows))  # (N,)
    count = len(same)
    left = (count - same + 1 if loss.same == "ignored" else torch.full_like(same, count)).double()  # (N,)
    if loss.name == "clip":
        return left.log().mean().item()
    right = count if loss.same == "ignored" else same.sum().item()
    questions = left.sum().item()
    p = right / questions
    return questions / count * sum(-q * math.log(q) for q in (p, 1 - p) if q > 0)


def _same_as(identities: Tensor) -> Tensor:
    """(N,) how many of the (N, K) rows agree with each in at least one number, without an N × N table."""
    numbers = range(identities.shape[1])
    found = identities.new_zeros(len(identities))
    for size in range(1, len(numbers) + 1):  # those that agree in a number, less those that agree in two, …
        for chosen in combinations(numbers, size):
            _, group, counts = identities[:, chosen].unique(dim=0, return_inverse=True, return_counts=True)
            found += counts[group] * (-1) ** (size + 1)
    return found


def batch_loss(
    loss: LossConfig, distill: DistillConfig, identities: Tensor, teaching: Teaching | None
) -> Callable[..., Tensor]:
    """The loss of this batch as a function of image features, text features, exp(t), and a bias where there is one.

    Args:
        loss: which loss.
        distill: how much of it is the teacher's.
        identities: (B, K) int64, see ``clip_loss``.
        teaching: what the teacher says of the batch.
    """
    same: dict[str, Any] = {} if loss.same == "negatives" else {"identities": identities, "same": loss.same}
    either: Callable[..., Tensor] = siglip_loss if loss.name == "siglip" else clip_loss
    contrastive = partial(either, **same)
    if teaching is None:
        return contrastive

    def with_teacher(images: Tensor, texts: Tensor, scale: Tensor, *bias: Tensor) -> Tensor:
        taught = distillation_loss(images, texts, scale, teaching.images, teaching.texts, teaching.scale)
        if distill.weight == 1:
            # the temperature's and the bias's parts stay in the graph: every parameter has a gradient
            return taught + 0 * sum((one.sum() for one in bias), torch.zeros_like(taught))
        return distill.weight * taught + (1 - distill.weight) * contrastive(images, texts, scale, *bias)

    return with_teacher

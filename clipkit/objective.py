"""The loss that a configuration asks for, of one batch: contrastive, and a teacher's part where there is one."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clipkit.config import DistillConfig, LossConfig
from clipkit.loss import clip_loss, distillation_loss, siglip_loss

__all__ = ["Teaching", "batch_loss", "chance_level"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Teaching:
    """A teacher's features of one batch; of any dimension of its own."""

    images: Tensor  # (B, T)
    texts: Tensor  # (B, T)
    scale: Tensor  # exp(t)


def chance_level(loss: LossConfig, rows: int) -> float:
    """The loss of a model that tells nothing apart, over a global batch of ``rows`` pairs without a teacher."""
    softmax = math.log(rows)
    if loss.name == "clip":
        return softmax
    # each pair is taken for one that belongs together by 1 in N
    return softmax + (rows - 1) * math.log(rows / (rows - 1))


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

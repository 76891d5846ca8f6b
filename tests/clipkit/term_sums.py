"""The sum of a local term over the rows of a batch, as a step computes it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from clipkit.model.clip import CLIP
from clipkit.objectives import Term

__all__ = ["sum_term"]


def sum_term(
    model: CLIP,
    term: Term,
    images: Tensor,
    tokens: Tensor,
    *,
    lengths: Sequence[int] | None = None,
    **inputs: Any,
) -> Tensor:
    """Encode pairs and sum the term over them: a scalar."""
    outputs = model(images, tokens, lengths=lengths, return_tokens=term.reads_tokens)
    features = 3 if model.logit_bias is None else 4
    return term.total(model, images, outputs[features:], **inputs)

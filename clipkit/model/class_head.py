"""A CLIP with a classification head in place of the text tower, to be trained on labelled images."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clipkit.model.architectures import ClassTable
from clipkit.model.clip import CLIP

__all__ = ["with_class_head"]


@torch.no_grad()
def with_class_head(model: CLIP, names: Sequence[str], rows: Tensor) -> CLIP:
    """Copy the model's image tower and temperature and add a row for each class.

    With the rows of a zero-shot classifier it starts with that classifier's predictions, as WiSE-FT does (Wortsman
    et al. 2022, https://arxiv.org/abs/2109.01903).

    Args:
        model: is not changed.
        names: of C classes, see ``ClassTable``.
        rows: (C, O), such as the columns of a zero-shot classifier.

    Raises:
        ConfigError: two names are alike, or one is empty.
    """
    shape = replace(model.architecture, text=ClassTable(names=tuple(names)), logit_bias=False)
    head = CLIP(shape, name=model.name, preprocess=model.preprocess)
    values = {name: value for name, value in model.state_dict().items() if name.startswith("visual.")}
    head.load_state_dict({**values, "logit_scale": model.logit_scale, "text.weight": rows})
    return head.to(model.logit_scale.device).eval()

"""LAMB (You et al. 2020, https://arxiv.org/abs/1904.00962), as timm has it, with its whole state by parameter.

It is for very large batches. On the quickstart's of 128, at a rate of 1e-2: handwriting 52.8% and unseen fonts
47.2%, where AdamW gives 62.3% and 84.5% (bench/options.py, one seed, no other rate tried). Loads timm: import it
where it is chosen.
"""

from collections.abc import Callable
from typing import Any

import torch
from timm.optim.lamb import Lamb as TimmLamb

__all__ = ["Lamb"]


class Lamb(TimmLamb):
    """timm's LAMB: Adam's step for each tensor, made as long as its weights times the rate.

    Tensors without weight decay (gains, biases) take Adam's step as it is. The gradient is clipped outside.

    State of each parameter: ``exp_avg`` and ``exp_avg_sq``, of its shape and dtype, and ``step``, float32 on the
    CPU. timm counts steps in the group, where they are not saved with the parameters: the count is kept in both,
    and begins with the group's first gradient.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=None)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; returns what ``closure`` gives."""
        for group in self.param_groups:
            counts = [self.state[one]["step"] for one in group["params"] if self.state.get(one)]
            if counts:
                group["step"] = counts[0].to("cpu", copy=True)
            else:
                group.pop("step", None)
        loss = super().step(closure)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            for parameter in group["params"]:
                if state := self.state.get(parameter):
                    state["step"] = group["step"].clone()
        return loss

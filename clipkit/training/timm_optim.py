"""Optimizers of timm. They have a file of their own because importing timm takes longer than importing torch."""

from collections.abc import Callable
from typing import Any

import torch
from timm.optim.adafactor_bv import AdafactorBigVision
from timm.optim.lamb import Lamb as TimmLamb
from torch import Tensor
from torch.optim import Optimizer

from clipkit.config import OptimConfig
from clipkit.model.clip import CLIP
from clipkit.training.optim import StateShapes, parameter_groups
from clipkit.training.parallel import is_sharded, zeros_of


def lamb(model: CLIP, config: OptimConfig) -> Optimizer:
    """Build ``Lamb``; gradients are clipped outside."""
    groups = parameter_groups(model, config)
    betas = (config.beta1, config.beta2)
    return Lamb(groups, lr=config.lr, betas=betas, eps=config.eps, max_grad_norm=None)


def adafactor(model: CLIP, config: OptimConfig) -> Optimizer:
    """Build ``Adafactor``; its second moments have a schedule and a constant of their own."""
    groups = parameter_groups(model, config)
    momentum = config.beta1 or None
    return Adafactor(groups, lr=config.lr, momentum=momentum)


class Adafactor(AdafactorBigVision):
    """timm's AdaFactor as in Scaling ViT (Zhai et al. 2022, https://arxiv.org/abs/2106.04560).

    The second moment of a matrix is the product of the means of its rows and columns, and the first moment is in
    bfloat16, so the state takes a quarter of AdamW's memory. β2 = min(0.999, 1 − t^−0.8), and ``optim.beta2`` and
    ``optim.eps`` have no effect. Of sharded parameters, means over a dimension that is not sharded are sharded too,
    and those over the sharded one are averaged over ranks and held by every rank.

    State of each parameter: ``step``, float32 on the CPU; ``exp_avg`` in bfloat16, with a momentum;
    ``exp_avg_sq_r`` and ``exp_avg_sq_c`` of a tensor whose two largest dimensions are at least 16, otherwise
    ``exp_avg_sq``.
    """

    def expected_state(self, parameter: Tensor) -> StateShapes:
        """See the function of this name."""
        shape = list(parameter.shape)
        shapes = {"step": (torch.Size(), torch.float32)}
        if self.defaults["momentum"] is not None:
            shapes["exp_avg"] = (parameter.shape, self.defaults["momentum_dtype"])
        order = sorted(range(len(shape)), key=lambda dim: (shape[dim], dim))
        if len(order) < 2 or shape[order[-2]] < self.defaults["min_dim_size_to_factor"]:
            return {**shapes, "exp_avg_sq": (parameter.shape, parameter.dtype)}
        for name, dim in (("exp_avg_sq_r", order[-1]), ("exp_avg_sq_c", order[-2])):
            reduced = torch.Size(1 if i == dim else size for i, size in enumerate(shape))
            shapes[name] = (reduced, parameter.dtype)
        return shapes

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update and return the result of ``closure``."""
        for parameter in (candidate for group in self.param_groups for candidate in group["params"]):
            if state := self.state.get(
                parameter
            ):  # read in each step: on a GPU each reading would wait for it
                state["step"] = state["step"].cpu()
            if is_sharded(parameter) and parameter.grad is not None and parameter not in self.state:
                expected = self.expected_state(parameter)
                step = torch.zeros((), dtype=torch.float32)
                moments = {name: zeros_of(parameter, *of) for name, of in expected.items() if name != "step"}
                self.state[parameter] = {"step": step, **moments}
        return super().step(closure)  # type: ignore[no-untyped-call]


class Lamb(TimmLamb):
    """timm's LAMB (You et al. 2020, https://arxiv.org/abs/1904.00962), with all its state by parameter.

    Adam's step for each tensor, scaled to the norm of its weights times the rate; tensors without weight decay
    (gains, biases) take Adam's step. Meant for very large batches.

    State of each parameter: ``exp_avg`` and ``exp_avg_sq``, of its shape and dtype, and ``step``, float32 on the
    CPU. timm counts steps in the group, where they are not saved with the parameters: the count is kept in both,
    and starts with the group's first gradient.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update and return the result of ``closure``."""
        for group in self.param_groups:
            counts = [
                self.state[parameter]["step"] for parameter in group["params"] if self.state.get(parameter)
            ]
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

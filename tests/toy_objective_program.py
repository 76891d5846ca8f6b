"""``train.py`` with an objective registered from outside the package; run by test_train_toy_objective.py."""

from dataclasses import dataclass

from torch import Tensor

import train
from clipkit import distributed
from clipkit.cli import setting
from clipkit.config import above
from clipkit.errors import run_command
from clipkit.objectives import OBJECTIVES, Objective, Outputs, Targets
from clipkit.options import parse_arguments


@dataclass(frozen=True, kw_only=True)
class Margin(Objective):
    """Squared hinge loss: the cosine with other captions should be lower than with the own caption."""

    section = "margin."
    summary = "a toy"
    initial_scale = 2.0
    initial_bias = 0.0
    max_scale = 2.5
    has_divergence = False
    note = "this is a toy"

    margin: float = setting(0.2, "How much lower.", above(0))

    def loss(self, outputs: Outputs, targets: Targets) -> Tensor:
        """Compute the loss."""
        images, texts, scale, bias = outputs
        assert bias is not None and targets.identities.shape == (len(images), 2)
        cosines = images.float() @ texts.float().T
        beyond = (self.margin + bias + cosines - cosines.diagonal()[:, None]).clamp(min=0)
        return scale * beyond.square().mean()

    def figures(self, images: Tensor, texts: Tensor, targets: Targets) -> dict[str, float]:
        """Mean cosine of the pairs, as an additional metric."""
        return {"cosine": (images * texts).sum(1).mean().item()}

    def chance(self, targets: Targets, text_rows: int) -> float:
        """Loss of equal logits."""
        return self.margin**2


if __name__ == "__main__":
    OBJECTIVES["margin"] = Margin
    arguments = parse_arguments()
    run_command(distributed.together(lambda: train.main(arguments)))

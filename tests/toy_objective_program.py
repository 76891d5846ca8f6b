"""``train.py`` with an objective registered from outside the package; run by test_train_toy_objective.py."""

from torch import Tensor

import train
from clipkit import distributed
from clipkit.errors import run_command
from clipkit.objectives import OBJECTIVES, Objective, Targets
from clipkit.training.arguments import parse_arguments


def margin_loss(
    images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor | None = None, *, targets: Targets
) -> Tensor:
    """Squared hinge loss: the cosine with other captions should be 0.2 lower than with the own caption."""
    assert bias is not None and targets.identities.shape == (len(images), 2)
    cosines = images.float() @ texts.float().T
    beyond = (0.2 + bias + cosines - cosines.diagonal()[:, None]).clamp(min=0)
    return scale * beyond.square().mean()


def cosine_of_pairs(images: Tensor, texts: Tensor, targets: Targets) -> dict[str, float]:
    """Mean cosine of the pairs, as an additional metric."""
    return {"cosine": (images * texts).sum(1).mean().item()}


if __name__ == "__main__":
    OBJECTIVES["margin"] = Objective(
        summary="a toy",
        loss=margin_loss,
        figures=cosine_of_pairs,
        chance=lambda targets, text_rows: 0.04,
        initial_scale=2.0,
        initial_bias=0.0,
        max_scale=2.5,
        divergence=None,
        note="this is a toy",
    )
    arguments = parse_arguments()
    run_command(distributed.together(lambda: train.main(arguments)))

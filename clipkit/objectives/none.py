"""The objective without a comparison of images with texts, for trainings with local terms alone."""

from torch import Tensor

from clipkit.config import Config, require
from clipkit.objectives.base import Objective, Outputs, Targets


class NoComparison(Objective):
    """No loss of the features."""

    summary = "no comparison of images with texts: only terms, such as caption.weight"
    tiled = True
    uses_same = False
    smooths = False
    has_divergence = False
    note = "loss.name=none trains no text features; lock.text=all saves time unless caption.feed=text"

    def loss(self, outputs: Outputs, targets: Targets) -> Tensor:
        """Return 0 as a function of all features, so that each parameter has a gradient."""
        return 0.0 * (outputs.images.sum() + outputs.texts.sum())

    def figures(self, images: Tensor, texts: Tensor, targets: Targets) -> dict[str, float]:
        return {}

    def check(self, config: Config) -> None:
        super().check(config)
        at_once = any(not term.after for term in config.terms.values())
        expected = "requires a term from the first step, such as caption.weight=1"
        require(at_once, "loss.name", config.loss.name, expected)

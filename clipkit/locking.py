"""Which parameters are trained: whole towers or their lower depths locked, for good or for a while.

Depths are counted from the top: 1 is what makes features of the last block's output, 2 the last block too, and so
on, see clipkit/depth.py. The temperature is always trained. Everything follows from the settings and the step.
"""

from collections.abc import Mapping

from torch import nn

from clipkit.depth import TOWERS, Place, places, tower_of
from clipkit.errors import ConfigError
from clipkit.model import CLIP
from clipkit.setting import require

__all__ = ["Unfreezing", "free_depths", "lock", "still_statistics"]

ALL = "all"
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def lock(model: CLIP, *, image: str | int = "", text: str | int = "") -> None:
    """Lock towers or parts of them, for good: their parameters get no gradient and no update.

    With a trained image tower locked, the text tower learns to read it out (LiT; Zhai et al. 2022,
    https://arxiv.org/abs/2111.07991). Fine-tuned on handwriting with its image tower locked, the quickstart's
    model learns less and forgets less: 71.4%, and 82.7% of unseen fonts, where all that is free gives 89.1% and
    79.9%; with the text tower locked 85.3% and 79.7% (bench/finetuning.py, one seed).

    Args:
        model: a CLIP, before its optimizer is made.
        image: "" locks nothing; "all" the image tower; a number, 2 or "2", all but that many of its top depths.
        text: the same of the text tower.

    Raises:
        ConfigError: a tower has not so many depths, they are not known, or nothing but the temperature is left.
    """
    kept: dict[str, int] = {}
    for tower, setting in zip(TOWERS, (image, text), strict=True):
        wanted = str(setting)
        fits = wanted in ("", ALL) or (wanted.isascii() and wanted.isdecimal())
        require(fits, f"lock.{tower}", setting, 'empty, "all" or a number of depths')
        if wanted:
            kept[tower] = 0 if wanted == ALL else int(wanted)
    where: Mapping[str, Place] = places(model) if any(kept.values()) else {}
    for tower, depths in kept.items():
        if depths:
            count = 1 + max(place.top for place in where.values() if place.tower == tower)
            require(
                depths <= count,
                f"lock.{tower}",
                depths,
                f"at most {count}, the tower's layers, both ends counted",
            )
    for name, parameter in model.named_parameters():
        depths = kept.get(tower_of(name), -1)
        if depths == 0 or (depths > 0 and where[name].above >= depths):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for name, p in model.named_parameters() if tower_of(name)):
        raise ConfigError(
            f"lock.image = {image!r} and lock.text = {text!r} leave nothing to train: unlock a tower"
        )
    still_statistics(model)


def still_statistics(model: nn.Module) -> None:
    """Put batch norms whose parameters are all locked into evaluation mode; after each ``model.train()``.

    Otherwise their running statistics, and with them a locked tower's features, would change.
    """
    for module in model.modules():
        if isinstance(module, _BATCH_NORMS):
            own = list(module.parameters(recurse=False))
            if own and not any(parameter.requires_grad for parameter in own):
                module.eval()


def free_depths(step: int, *, every: int, first: int = 1) -> int:
    """How many of the top depths of each tower are trained in update ``step`` = 0, 1, … under ``Unfreezing``.

    Args:
        step: updates made before.
        every: steps until the next lower depth is trained too.
        first: how many are trained from the start.
    """
    return first + step // every


class Unfreezing:
    """Gradual unfreezing (ULMFiT; Howard & Ruder 2018, https://arxiv.org/abs/1801.06146): from the top down.

    A fine-tuning begins with the top depths of both towers, and every so many steps the next lower ones join. What
    was locked for good stays so. On the quickstart's model, fine-tuned on handwriting, it changes nothing to speak
    of: 88.5%, and 79.7% of unseen fonts, where all layers from the start give 89.1% and 79.9%
    (bench/finetuning.py).
    """

    def __init__(self, model: CLIP, *, every: int, first: int = 1) -> None:
        """Of a model whose free parameters are those that are to be trained in the end.

        Args:
            model: a CLIP, after ``lock``.
            every: steps between two depths, at least 1.
            first: depths that are trained from the start, at least 1.

        Raises:
            ConfigError: a number is too small, or a tower's depths are not known.
        """
        require(every >= 1, "lock.unfreeze_every", every, "at least 1")
        require(first >= 1, "lock.unfreeze_first", first, "at least 1")
        self.every, self.first = every, first
        self._model = model
        where = places(model)
        self._above = [
            (parameter, where[name].above if tower_of(name) else 0)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    @property
    def layers(self) -> int:
        """How many are trained in the end, of the tower with the most of them."""
        return 1 + max((above for _, above in self._above), default=0)

    def lock_for_step(self, step: int) -> bool:
        """Set what is trained in update ``step``; returns whether that differs from what it was.

        What was built around the model's trainable parameters, such as DistributedDataParallel, must then be built
        anew. The optimizer need not: it has all of them from the start, and skips those without a gradient.
        """
        depths = free_depths(step, every=self.every, first=self.first)
        changed = False
        for parameter, above in self._above:
            free = above < depths
            changed |= parameter.requires_grad != free
            parameter.requires_grad_(free)
            if not free:
                parameter.grad = None
        if changed:
            self._model.train(self._model.training)
            still_statistics(self._model)
        return changed

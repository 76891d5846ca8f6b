"""How deep in its tower each parameter of a CLIP lies: what layer-wise rates and locking go by.

A tower of n blocks has n + 2 depths: 0 is what makes tokens of the input (embeddings, stem), i + 1 is block i, and
n + 1 is what makes features of the last block's output (norm, pooling, projection). The temperature and the bias
of the loss belong to no tower.

Each kind of tower tells the layer of its parameters, see ``TowerArchitecture.layer_of``.
"""

from dataclasses import dataclass

from clipkit.errors import ConfigError
from clipkit.model.architectures import STEM
from clipkit.model.clip import CLIP

__all__ = ["TOWERS", "Place", "places", "tower_of"]

TOWERS = ("image", "text")
_IMAGE, _TEXT = "visual.", "text."
_LOSS = ("logit_scale", "logit_bias")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a parameter lies.

    Attributes:
        tower: "image", "text", or "" for the temperature and the bias of the loss.
        depth: 0 (nearest to the input) to ``top``.
        top: the tower's last depth.
    """

    tower: str
    depth: int
    top: int

    @property
    def above(self) -> int:
        """How many depths lie between the parameter and the features."""
        return self.top - self.depth


def tower_of(name: str) -> str:
    """The tower of a CLIP's parameter: "image", "text", or "" for none."""
    if name in _LOSS:
        return ""
    return "image" if name.startswith(_IMAGE) else "text"


def places(model: CLIP) -> dict[str, Place]:
    """The place of every parameter, by name.

    Raises:
        ConfigError: a library's tower has no blocks that are recognised.
    """
    names = [name for name, _ in model.named_parameters()]
    found = {name: Place(tower="", depth=0, top=0) for name in names if not tower_of(name)}
    shape = model.architecture
    text_module = model if model.text is None else model.text
    for tower, kind, module in (("image", shape.vision, model.visual), ("text", shape.text, text_module)):
        layer = kind.layer_of(module)
        own = (
            {} if layer is None else {name: layer(_local(name)) for name in names if tower_of(name) == tower}
        )
        blocks = sorted({one for one in own.values() if one is not None and one != STEM})
        if layer is None or (kind.has_blocks and not blocks):
            raise ConfigError(
                f"the {tower} tower has no blocks that are recognised, so that its depths are not known: "
                "lock it whole or not at all, and set optim.layer_decay=1"
            )
        depths = {STEM: 0, **{block: number for number, block in enumerate(blocks, start=1)}}
        top = len(blocks) + 1
        for name, one in own.items():
            found[name] = Place(tower=tower, depth=top if one is None else depths[one], top=top)
    return {name: found[name] for name in names}


def _local(name: str) -> str:
    return name.removeprefix(_IMAGE if name.startswith(_IMAGE) else _TEXT)

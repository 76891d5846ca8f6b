"""How deep in its tower each parameter of a CLIP lies: what layer-wise rates and locking go by.

A tower of n blocks has n + 2 depths: 0 is what makes tokens of the input (embeddings, stem), i + 1 is block i, and
n + 1 is what makes features of the last block's output (norm, pooling, projection). The temperature and the bias
of the loss belong to no tower.

Towers of clipkit and of open_clip, and encoders of transformers, are known by the names of their parameters.
Backbones of timm say themselves, by ``group_matcher``, what is a block.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from clipkit.errors import ConfigError
from clipkit.model.architectures import BagOfWords, ClassTable, OpenClipVision, TimmVision, TransformersText
from clipkit.model.clip import CLIP

__all__ = ["TOWERS", "Place", "places", "tower_of"]

TOWERS = ("image", "text")
_IMAGE, _TEXT, _TRUNK = "visual.", "text.", "trunk."
_LOSS = ("logit_scale", "logit_bias")
_AS_PREVIOUS = 99999  # timm's mark of what it counts to the last block, such as the last norm: our head

# (-1,) for the stem, (number, …) for a block, None for the head
_Layer = tuple[int, ...] | None
_STEM = (-1,)


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


@dataclass(frozen=True, kw_only=True)
class _Names:
    """How a kind of tower names its parameters; what is neither block nor head is stem."""

    block: re.Pattern[str]  # its groups are the block's numbers
    head: re.Pattern[str]

    def layer(self, name: str) -> _Layer:
        if block := self.block.match(name):
            return tuple(int(number) for number in block.groups())
        return None if self.head.match(name) else _STEM


_TRANSFORMER = _Names(
    block=re.compile(r"transformer\.resblocks\.(\d+)\."),
    head=re.compile(r"ln_post|ln_final|proj|text_projection|attn_pool"),
)
_RESNET = _Names(block=re.compile(r"layer(\d+)\.(\d+)\."), head=re.compile(r"attnpool"))
_ENCODER = _Names(
    block=re.compile(r"transformer\.(?:.*?\.)??(?:layers?|blocks?|h)\.(\d+)\."),
    head=re.compile(r"proj\.|transformer\.(?:encoder\.)?(?:pooler|final_layer_norm|final_norm|ln_f|norm)\."),
)


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
    for tower, layer in (("image", _image_layers(model)), ("text", _text_layers(model))):
        own = {name: layer(_local(name)) for name in names if tower_of(name) == tower}
        blocks = sorted({one for one in own.values() if one is not None and one != _STEM})
        if not blocks and not isinstance(
            model.architecture.text, BagOfWords | ClassTable if tower == "text" else ()
        ):
            raise _unknown(tower)
        depths = {_STEM: 0, **{block: number for number, block in enumerate(blocks, start=1)}}
        top = len(blocks) + 1
        for name, one in own.items():
            found[name] = Place(tower=tower, depth=top if one is None else depths[one], top=top)
    return {name: found[name] for name in names}


def _local(name: str) -> str:
    return name.removeprefix(_IMAGE if name.startswith(_IMAGE) else _TEXT)


def _image_layers(model: CLIP) -> Callable[[str], _Layer]:
    vision = model.architecture.vision
    timms = isinstance(vision, OpenClipVision) and bool(vision.config.get("timm_model_name"))
    if isinstance(vision, TimmVision) or timms:
        return _backbone_layers(model.visual.get_submodule("trunk"))
    stages = isinstance(vision, OpenClipVision) and isinstance(vision.config.get("layers"), list | tuple)
    return _RESNET.layer if stages else _TRANSFORMER.layer


def _text_layers(model: CLIP) -> Callable[[str], _Layer]:
    return _ENCODER.layer if isinstance(model.architecture.text, TransformersText) else _TRANSFORMER.layer


def _backbone_layers(trunk: nn.Module) -> Callable[[str], _Layer]:
    """By the patterns that a backbone of timm gives of its stem and its blocks."""
    matcher: Any = getattr(trunk, "group_matcher", None)
    groups = matcher(coarse=False) if callable(matcher) else None
    if not isinstance(groups, dict):
        raise _unknown("image")
    patterns = [
        (re.compile(pattern), number, suffix)
        for number, given in enumerate(groups.values())
        if given is not None
        for pattern, suffix in ([(given, None)] if isinstance(given, str) else given)
    ]

    def layer(name: str) -> _Layer:
        if not name.startswith(_TRUNK):
            return None
        for pattern, number, suffix in patterns:
            if match := pattern.match(name.removeprefix(_TRUNK)):
                return _backbone_layer(number, match.groups(), suffix or ())
        return None

    return layer


def _backbone_layer(group: int, numbers: Iterable[str | None], suffix: tuple[int, ...]) -> _Layer:
    if group == 0:
        return _STEM
    if _AS_PREVIOUS in suffix:
        return None
    return (group, *(int(number) for number in numbers if number is not None), *suffix)


def _unknown(tower: str) -> ConfigError:
    return ConfigError(
        f"the {tower} tower has no blocks that are recognised, so that its depths are not known: "
        "lock it whole or not at all, and set optim.layer_decay=1"
    )

"""What a CLIP is made of, without torch, so that a config can be checked before anything heavy loads.

An architecture is two towers and the dimension they project to. Plain ViT towers and plain text transformers
are clipkit's own; any other tower is described by what the library that builds it needs to know.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeAlias

from clipkit.errors import CheckpointError, ConfigError, nearest

__all__ = [
    "ARCHITECTURES", "QUICKGELU", "Architecture", "BagOfWords", "ClassTable", "OpenClipText", "OpenClipVision",
    "TextTower", "TimmVision", "TransformersText", "VisionTower", "named",
]  # fmt: skip

_MAX, _MAX_LAYERS, _MAX_RATIO = 1_000_000, 1000, 64  # a stored architecture may be anybody's
QUICKGELU = "-quickgelu"  # behind a name
POOLINGS = ("mean", "cls", "pooler")
PROJECTIONS = ("linear", "mlp", "none")


@dataclass(frozen=True, kw_only=True)
class VisionTower:
    """Shape of a ViT. ``image_size`` and ``patch_size`` in pixels, square."""

    image_size: int
    patch_size: int
    width: int
    layers: int
    heads: int
    mlp_ratio: float = 4.0

    def __post_init__(self) -> None:
        _check(self)
        if self.image_size % self.patch_size:
            raise ConfigError(
                f"image_size = {self.image_size} is no multiple of patch_size = {self.patch_size}"
            )


@dataclass(frozen=True, kw_only=True)
class TextTower:
    """Shape of a causal text transformer over CLIP's 49,408 byte-pair tokens."""

    width: int
    layers: int
    heads: int
    context_length: int = 77
    vocab_size: int = 49408
    mlp_ratio: float = 4.0

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class BagOfWords:
    """CLIP's other text encoder (Radford et al. 2021, section 2.4): the tokens' mean embedding, projected."""

    width: int = 512
    context_length: int = 77
    vocab_size: int = 49408

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class ClassTable:
    """A classifier's head in the text tower's place: a learned row for each class, which its name stands for."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        names = self.names
        if not isinstance(names, tuple | list) or not all(isinstance(one, str) for one in names):
            raise ConfigError("names is no list of class names")
        object.__setattr__(self, "names", tuple(names))  # a stored one is a list
        _check_number("number of classes", len(names), _MAX)
        for one in names:
            if not one or one != " ".join(one.split()):
                raise ConfigError(f"class name {one[:80]!r} is empty, or has spaces that a caption loses")
        if len(set(names)) < len(names):
            twice = next(one for one in names if names.count(one) > 1)
            raise ConfigError(f"class name {twice[:80]!r} stands there twice: each class needs its own")

    @property
    def context_length(self) -> int:
        """A class is one token."""
        return 1


@dataclass(frozen=True, kw_only=True)
class OpenClipVision:
    """An image tower that open_clip builds from ``config``, its ``vision_cfg``."""

    image_size: int
    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class TimmVision:
    """A backbone of timm, ``name``, with its own pooling, and a linear projection; ``options`` go to timm."""

    image_size: int
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class OpenClipText:
    """A text tower that open_clip builds from ``config``, its ``text_cfg``."""

    context_length: int
    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class TransformersText:
    """An encoder of the transformers library, pooled and projected.

    Attributes:
        model: where its weights and tokenizer come from, a folder or a name on the Hugging Face hub.
        config: its whole configuration, so that it can be built again without that place.
        pooling: "mean" over the tokens; "cls", the first one; "pooler", what the encoder itself makes of it.
        projection: "linear", "mlp" (one hidden layer), or "none".
    """

    context_length: int
    model: str
    config: Mapping[str, Any]
    pooling: str = "mean"
    projection: str = "linear"

    def __post_init__(self) -> None:
        _check(self)
        for name, known in (("pooling", POOLINGS), ("projection", PROJECTIONS)):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name} = {value!r} is unknown: {nearest(str(value), known)}")


Vision: TypeAlias = VisionTower | OpenClipVision | TimmVision
Text: TypeAlias = TextTower | BagOfWords | ClassTable | OpenClipText | TransformersText
_KINDS: dict[str, type[Any]] = {  # as stored; the first of each group needs no mention
    "vit": VisionTower,
    "open_clip_vision": OpenClipVision,
    "timm": TimmVision,
    "transformer": TextTower,
    "bag_of_words": BagOfWords,
    "class_table": ClassTable,
    "open_clip_text": OpenClipText,
    "transformers": TransformersText,
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shape of a CLIP: two towers and the dimension they project to."""

    embed_dim: int
    vision: Vision
    text: Text
    quick_gelu: bool = False
    small_data: bool = False  # how fresh weights are drawn, see CLIP.initialize
    logit_bias: bool = False  # SigLIP's second number beside the temperature

    def __post_init__(self) -> None:
        _check_number("embed_dim", self.embed_dim, _MAX)
        for name in ("quick_gelu", "small_data", "logit_bias"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} = {value!r} is neither true nor false")

    @property
    def is_own(self) -> bool:
        """Whether both towers are clipkit's."""
        return isinstance(self.vision, VisionTower) and isinstance(
            self.text, TextTower | BagOfWords | ClassTable
        )

    def own_towers(self) -> tuple[VisionTower, TextTower]:
        """Both, where they are the plain ViT and the plain text transformer."""
        assert isinstance(self.vision, VisionTower) and isinstance(self.text, TextTower)
        return self.vision, self.text

    def resized(self, *, image_size: int = 0, context_length: int = 0) -> "Architecture":
        """The same for other pictures or longer texts; 0 leaves as it is."""
        vision, text = self.vision, self.text
        if image_size:
            vision = replace(vision, image_size=image_size)
        if context_length > 1 and isinstance(text, ClassTable):
            raise ConfigError(f"context_length = {context_length} does not fit: a class is one token")
        if context_length and not isinstance(text, ClassTable):
            text = replace(text, context_length=context_length)
        return replace(self, vision=vision, text=text)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, as stored beside weights."""
        kinds = {kind: name for name, kind in _KINDS.items()}
        towers = {
            "vision": {"kind": kinds[type(self.vision)], **asdict(self.vision)},
            "text": {"kind": kinds[type(self.text)], **asdict(self.text)},
        }
        return {**asdict(self), **towers}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Architecture":
        """The inverse of ``to_dict``.

        Raises:
            CheckpointError: a field is unknown, missing or of the wrong kind.
        """
        try:
            vision = _tower(values["vision"], "vit", Vision)
            return cls(**{**values, "vision": vision, "text": _tower(values["text"], "transformer", Text)})
        except (AttributeError, KeyError, TypeError, ConfigError) as error:
            raise CheckpointError(
                f"the stored architecture is not one this version knows: {error}"
            ) from error


def _tower(values: Mapping[str, Any], default: str, allowed: Any) -> Any:
    kind = _KINDS[values.get("kind", default)]
    if kind not in allowed.__args__:
        raise TypeError(f"{kind.__name__} is the other tower's")
    return kind(**{name: value for name, value in values.items() if name != "kind"})


def _check(tower: Vision | Text) -> None:
    for one in fields(tower):
        value = getattr(tower, one.name)
        if one.type is int:
            _check_number(one.name, value, _MAX_LAYERS if one.name == "layers" else _MAX)
        elif one.type is float:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_RATIO:
                raise ConfigError(f"{one.name} = {value!r} is not a number above 0, at most {_MAX_RATIO}")
        elif not isinstance(value, str if one.type is str else Mapping):
            raise ConfigError(f"{one.name} = {value!r} is of another kind than a tower has")
    if isinstance(tower, VisionTower | TextTower) and tower.width % tower.heads:
        raise ConfigError(f"width = {tower.width} is no multiple of heads = {tower.heads}")


def _check_number(name: str, value: object, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"{name} = {value!r} is not a whole number from 1 to {most}")


def _vit(
    embed_dim: int,
    image_size: int,
    patch_size: int,
    image: tuple[int, int, int],
    text: tuple[int, int, int],
    *,
    quick_gelu: bool = False,
    small_data: bool = False,
) -> Architecture:
    """The towers as (width, layers, heads)."""
    vision_names, text_names = ("width", "layers", "heads"), ("width", "layers", "heads")
    return Architecture(
        embed_dim=embed_dim,
        vision=VisionTower(
            image_size=image_size, patch_size=patch_size, **dict(zip(vision_names, image, strict=True))
        ),
        text=TextTower(**dict(zip(text_names, text, strict=True))),
        quick_gelu=quick_gelu,
        small_data=small_data,
    )


_BASE, _LARGE, _HUGE = (768, 12, 12), (1024, 24, 16), (1280, 32, 16)  # image towers
_TEXT_512, _TEXT_768, _TEXT_1024 = (512, 12, 8), (768, 12, 12), (1024, 24, 16)

# The first group as published (Radford et al. 2021, table 20; ViT-H-14 by LAION), named as open_clip names
# them; OpenAI's own weights are of the quickgelu kind. The second group is ours, for small data and CPUs.
ARCHITECTURES: dict[str, Architecture] = {
    "ViT-B-32": _vit(512, 224, 32, _BASE, _TEXT_512),
    "ViT-B-32-quickgelu": _vit(512, 224, 32, _BASE, _TEXT_512, quick_gelu=True),
    "ViT-B-16": _vit(512, 224, 16, _BASE, _TEXT_512),
    "ViT-B-16-quickgelu": _vit(512, 224, 16, _BASE, _TEXT_512, quick_gelu=True),
    "ViT-L-14": _vit(768, 224, 14, _LARGE, _TEXT_768),
    "ViT-L-14-quickgelu": _vit(768, 224, 14, _LARGE, _TEXT_768, quick_gelu=True),
    "ViT-L-14-336": _vit(768, 336, 14, _LARGE, _TEXT_768),
    "ViT-L-14-336-quickgelu": _vit(768, 336, 14, _LARGE, _TEXT_768, quick_gelu=True),
    "ViT-H-14": _vit(1024, 224, 14, _HUGE, _TEXT_1024),
    "ViT-H-14-quickgelu": _vit(1024, 224, 14, _HUGE, _TEXT_1024, quick_gelu=True),
    "ViT-S-32": _vit(384, 224, 32, (384, 12, 6), (384, 12, 6)),
    "ViT-S-16": _vit(384, 224, 16, (384, 12, 6), (384, 12, 6)),
    "ViT-Ti-8-48": _vit(192, 48, 8, (192, 4, 3), (192, 3, 3), small_data=True),
    "ViT-Ti-4-16": _vit(128, 16, 4, (192, 3, 3), (128, 2, 4), small_data=True),
}


def named(name: str, *, called: str = "model.name") -> Architecture:
    """An architecture of clipkit's own family, by name; with ``-quickgelu`` behind it, any of them with QuickGELU.

    Args:
        name: a key of ``ARCHITECTURES``, or one with that ending.
        called: what the name is called where it was given, for a message.

    Raises:
        ConfigError: the name is unknown.
    """
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    plain = name.removesuffix(QUICKGELU)
    if plain != name and plain in ARCHITECTURES and not ARCHITECTURES[plain].quick_gelu:
        return replace(ARCHITECTURES[plain], quick_gelu=True)
    raise ConfigError(f"{called} = {name!r} is unknown: {nearest(name, ARCHITECTURES)}")

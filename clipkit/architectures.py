"""The named architectures, without torch, so that a config can be checked before anything heavy loads."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from clipkit.errors import CheckpointError, ConfigError, nearest

__all__ = ["ARCHITECTURES", "Architecture", "TextTower", "VisionTower", "architecture"]

_MAX, _MAX_LAYERS = 1_000_000, 1000  # a stored architecture may be anybody's


@dataclass(frozen=True, kw_only=True)
class VisionTower:
    """Shape of a ViT. ``image_size`` and ``patch_size`` in pixels, square."""

    image_size: int
    patch_size: int
    width: int
    layers: int
    heads: int

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

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shape of a CLIP: two towers and the dimension they project to."""

    embed_dim: int
    vision: VisionTower
    text: TextTower
    quick_gelu: bool = False
    small_data: bool = False  # how fresh weights are drawn, see CLIP.initialize

    def __post_init__(self) -> None:
        _check_number("embed_dim", self.embed_dim, _MAX)
        for name in ("quick_gelu", "small_data"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} = {value!r} is neither true nor false")

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, as stored beside weights."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Architecture":
        """The inverse of ``to_dict``.

        Raises:
            CheckpointError: a field is unknown, missing or of the wrong kind.
        """
        try:
            own = {**values, "vision": VisionTower(**values["vision"]), "text": TextTower(**values["text"])}
            return cls(**own)
        except (KeyError, TypeError, ConfigError) as error:
            raise CheckpointError(
                f"the stored architecture is not one this version knows: {error}"
            ) from error


def _check(tower: VisionTower | TextTower) -> None:
    for field in fields(tower):
        _check_number(field.name, getattr(tower, field.name), _MAX_LAYERS if field.name == "layers" else _MAX)
    if tower.width % tower.heads:
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


def architecture(name: str) -> Architecture:
    """Look up an architecture by name.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in ARCHITECTURES:
        raise ConfigError(f"model.name = {name!r} is unknown: {nearest(name, ARCHITECTURES)}")
    return ARCHITECTURES[name]

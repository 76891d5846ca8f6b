"""Architectures of CLIP models, described without torch so that configurations are checked before it is imported.

An ``Architecture`` is an image tower, a text tower, and the dimension of the space both project to. Each kind of
tower is a frozen dataclass derived from ``ImageArchitecture`` or ``TextArchitecture`` and registered in
``clipkit.model.IMAGE_TOWERS`` or ``TEXT_TOWERS``. It provides everything other code needs to know about the tower;
the defaults of the base classes are right for a tower of another library that needs nothing special.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, TypeVar

from clipkit.errors import CheckpointError, ConfigError, nearest
from clipkit.model.flops import Flops, transformer_activation_bytes, transformer_flops

if TYPE_CHECKING:
    from torch import nn

    from clipkit.model.tokenizer import Tokenizer

__all__ = [
    "ARCHITECTURES", "QUICKGELU", "STEM", "Architecture", "BagOfWords", "ClassTable", "ImageArchitecture", "Layer",
    "LayerNames", "TextArchitecture", "TextTower", "TowerArchitecture", "VisionTower", "named", "selected",
]  # fmt: skip

_MAX, _MAX_LAYERS, _MAX_RATIO = (
    1_000_000,
    1000,
    64,
)  # bounds on stored architectures, which may come from anybody
_LARGEST_NAMES = 64 * 2**20  # bytes of a file of class names
_FLOAT = 4
QUICKGELU = "-quickgelu"  # suffix of a name

Layer: TypeAlias = tuple[int, ...] | None  # STEM, the number of a block, or None for the head
STEM = (-1,)


@dataclass(frozen=True, kw_only=True)
class LayerNames:
    """Assign a tower's parameters to its stem, blocks and head by name; what matches neither pattern is stem."""

    block: re.Pattern[str]  # its groups are the block's number
    head: re.Pattern[str]

    def __call__(self, name: str) -> Layer:
        if block := self.block.match(name):
            return tuple(int(number) for number in block.groups())
        return None if self.head.match(name) else STEM


_TRANSFORMER = LayerNames(
    block=re.compile(r"transformer\.resblocks\.(\d+)\."),
    head=re.compile(r"ln_post|ln_final|proj|text_projection|attn_pool"),
)


@dataclass(frozen=True)
class TowerArchitecture:
    """Base of all towers.

    Attributes:
        setting: how ``model.image`` or ``model.text`` selects this kind, such as "timm:NAME"; "" if they cannot.
        own: whether clipkit implements it: built without values (on the meta device) and initialized later, nothing
            random in the forward pass, can be sharded.
        has_blocks: whether it has blocks to lock or recompute.
    """

    setting: ClassVar[str] = ""
    own: ClassVar[bool] = False
    has_blocks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type is int:
                _check_number(one.name, value, _MAX_LAYERS if one.name == "layers" else _MAX)
            elif one.type is float:
                if (
                    isinstance(value, bool)
                    or not isinstance(value, int | float)
                    or not 0 < value <= _MAX_RATIO
                ):
                    raise ConfigError(f"{one.name} = {value!r} is not a number above 0, at most {_MAX_RATIO}")
            elif not isinstance(value, str if one.type is str else Mapping):
                raise ConfigError(f"{one.name} = {value!r} is of another type than the tower expects")

    @classmethod
    def from_setting(cls, value: str, *, embed_dim: int) -> Self:
        """The tower that a value of ``model.image`` or ``model.text`` selects, without its prefix."""
        raise NotImplementedError

    @property
    def description(self) -> str:
        """A few words for a model card."""
        return type(self).__name__

    @property
    def block_count(self) -> int:
        """Number of blocks called ``transformer.resblocks.N``; 0 for a tower trained as a whole or not at all."""
        return 0

    def build(self, embed_dim: int, *, quick_gelu: bool) -> "nn.Module":
        """The module that computes features (B, O), not normalized.

        Raises:
            ConfigError: the tower cannot be built.
        """
        raise NotImplementedError

    def initialize(self, module: "nn.Module", *, small_data: bool) -> None:
        """Draw fresh weights after ``reset_parameters`` of its layers; called for own towers only."""

    def layer_of(self, module: "nn.Module") -> Callable[[str], Layer] | None:
        """The layer of each of the tower's parameters by name; None where that is not known."""
        return _TRANSFORMER

    def activation_bytes(
        self, count: int | None, *, blocks: int | None = None, bf16: bool, recompute: int = 0
    ) -> int | None:
        """Bytes that autograd keeps of one sample, its features left out; None where that is not known.

        Args:
            count: patches that are kept, or tokens; None for all.
            blocks: number of last blocks that are trained; None for the whole tower.
            bf16: whether products are in bfloat16; the residual stream is in float32, as under autocast.
            recompute: every ``recompute``-th block keeps only its input and is computed again in the backward pass.
        """
        return None

    def open_clip_config(self) -> dict[str, Any]:
        """open_clip's ``vision_cfg`` or ``text_cfg`` of the same tower.

        Raises:
            ConfigError: open_clip has no such tower.
        """
        raise ConfigError(f"open_clip has no tower like this one ({self.description})")


@dataclass(frozen=True)
class ImageArchitecture(TowerArchitecture):
    """Base of image towers: normalized float images (B, 3, S, S) → features (B, O)."""

    if TYPE_CHECKING:

        @property
        def image_size(self) -> int:
            """Side of the images in pixels."""
            raise NotImplementedError

    @property
    def plain(self) -> "VisionTower | None":
        """Itself where it is the plain ViT, which other formats know; else None."""
        return None

    @property
    def patches(self) -> int | None:
        """Number of patches of an image, for a tower that can compute some of them and normalizes images itself.

        Its module is called as ``(images, patches, colours=…)``, see ``VisionTransformer``. None for other towers.
        """
        return None

    @property
    def size_step(self) -> int:
        """Images of any multiple of this size can be encoded; 0: only images of ``image_size``."""
        return 0

    @property
    def outline(self) -> tuple[Any, ...] | None:
        """What the shapes of its tensors reveal, to recognize weights; None where they are not recognized."""
        return None

    @property
    def position_values(self) -> int:
        """How many values the constructor computes for a table of positions, to limit what a stored file claims."""
        return 0

    def resized(self, image_size: int) -> Self:
        """The same tower for images of another size."""
        return replace(self, **{"image_size": image_size})

    def flops(self, embed_dim: int, *, patches: int | None = None, blocks: int | None = None) -> Flops | None:
        """FLOPs of one image; None where torch has to count them.

        Args:
            embed_dim: width of the features.
            patches: number of patches that are kept; None for all.
            blocks: number of last blocks that are trained, 0 for a frozen tower; None for the whole tower.
        """
        return None

    def smooth_positions(self, module: "nn.Module", image_size: int) -> None:
        """Remove from fresh position embeddings what images of ``image_size`` cannot train; see ``smooth_grid``."""

    def timm_model(self) -> tuple[str, dict[str, Any]] | None:
        """Name and arguments with which timm builds the submodule ``trunk``; None where timm did not build it."""
        return None


@dataclass(frozen=True)
class TextArchitecture(TowerArchitecture):
    """Base of text towers: int64 tokens (B, L) → features (B, O).

    Attributes:
        any_length: whether L may be less than the context length.
    """

    any_length: ClassVar[bool] = True

    if TYPE_CHECKING:

        @property
        def context_length(self) -> int:
            """The longest text in tokens."""
            raise NotImplementedError

    @property
    def plain(self) -> "TextTower | None":
        """Itself where it is the plain transformer, whose parameters lie at the top of a CLIP; else None."""
        return None

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names of a classification head; empty for towers that read texts."""
        return ()

    def resized(self, context_length: int) -> Self:
        """The same tower for texts of another length."""
        return replace(self, **{"context_length": context_length})

    def tokenizer(self) -> "Tokenizer":
        """The tokenizer of a model that is stored with none."""
        from clipkit.model.tokenizer import ClipTokenizer

        return ClipTokenizer(context_length=self.context_length, trim=self.any_length)

    def with_tokenizer_in(self, folder: Path) -> Self:
        """The same tower with the tokenizer stored in a folder of open_clip, if there is one.

        Raises:
            ConfigError: the tokenizer's settings are unknown.
        """
        return self

    def flops(self, embed_dim: int, length: int, *, blocks: int | None = None) -> Flops | None:
        """FLOPs of one text of ``length`` tokens, start and end included; otherwise as for images."""
        return None


@dataclass(frozen=True, kw_only=True)
class VisionTower(ImageArchitecture):
    """Shape of a ViT. ``image_size`` and ``patch_size`` in pixels, square."""

    image_size: int
    patch_size: int
    width: int
    layers: int
    heads: int
    mlp_ratio: float = 4.0
    own = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_heads(self.width, self.heads)
        if self.image_size % self.patch_size:
            raise ConfigError(
                f"image_size = {self.image_size} is not a multiple of patch_size = {self.patch_size}"
            )

    @property
    def plain(self) -> "VisionTower":
        return self

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def size_step(self) -> int:
        return self.patch_size

    @property
    def block_count(self) -> int:
        return self.layers

    @property
    def hidden(self) -> int:
        """Width inside the MLPs."""
        return int(self.mlp_ratio * self.width)

    @property
    def outline(self) -> tuple[Any, ...]:
        return (self.patch_size, self.width, self.layers, self.hidden)

    @property
    def description(self) -> str:
        return (
            f"ViT with patches of {self.patch_size} pixels, {self.layers} layers, width {self.width}, "
            f"{self.heads} heads"
        )

    def build(self, embed_dim: int, *, quick_gelu: bool) -> "nn.Module":
        from clipkit.model.towers import VisionTransformer

        return VisionTransformer(
            image_size=self.image_size, patch_size=self.patch_size, width=self.width, layers=self.layers,
            heads=self.heads, mlp_ratio=self.mlp_ratio, output_dim=embed_dim, quick_gelu=quick_gelu,
        )  # fmt: skip

    def initialize(self, module: "nn.Module", *, small_data: bool) -> None:
        from clipkit.model.towers import VisionTransformer

        assert isinstance(module, VisionTransformer)
        module.initialize(small_data=small_data)

    def smooth_positions(self, module: "nn.Module", image_size: int) -> None:
        from clipkit.model.resample import smooth_grid

        smooth_grid(module.get_parameter("positional_embedding"), image_size // self.patch_size)

    def flops(self, embed_dim: int, *, patches: int | None = None, blocks: int | None = None) -> Flops:
        length = (self.patches if patches is None else patches) + 1
        embedding = 2 * (length - 1) * 3 * self.patch_size**2 * self.width
        projection = 2 * self.width * embed_dim
        forward = embedding + transformer_flops(self.width, self.hidden, length, self.layers) + projection
        if blocks is None:
            return Flops(forward=forward, backward=2 * forward - embedding)
        trained = transformer_flops(self.width, self.hidden, length, blocks) + projection if blocks else 0
        return Flops(forward=forward, backward=2 * trained)

    def activation_bytes(
        self, count: int | None, *, blocks: int | None = None, bf16: bool, recompute: int = 0
    ) -> int:
        count = self.patches if count is None else count
        kept, before = transformer_activation_bytes(
            self.width,
            self.hidden,
            self.heads,
            count + 1,
            blocks or self.layers,
            bf16=bf16,
            recompute=recompute,
        )
        if blocks is not None:
            return kept
        # the patches, and the norm before the blocks
        return kept + count * 3 * self.patch_size**2 * (2 if bf16 else _FLOAT) + before

    def open_clip_config(self) -> dict[str, Any]:
        return {
            "image_size": self.image_size,
            "patch_size": self.patch_size,
            "width": self.width,
            "layers": self.layers,
            "head_width": self.width // self.heads,
            "mlp_ratio": self.mlp_ratio,
        }


@dataclass(frozen=True, kw_only=True)
class TextTower(TextArchitecture):
    """Shape of a causal text transformer over CLIP's 49,408 byte-pair tokens."""

    width: int
    layers: int
    heads: int
    context_length: int = 77
    vocab_size: int = 49408
    mlp_ratio: float = 4.0
    own = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_heads(self.width, self.heads)

    @property
    def plain(self) -> "TextTower":
        return self

    @property
    def block_count(self) -> int:
        return self.layers

    @property
    def hidden(self) -> int:
        """Width inside the MLPs."""
        return int(self.mlp_ratio * self.width)

    @property
    def description(self) -> str:
        return f"causal transformer, {self.layers} layers, width {self.width}, {self.heads} heads"

    def flops(self, embed_dim: int, length: int, *, blocks: int | None = None) -> Flops:
        projection = 2 * self.width * embed_dim
        forward = transformer_flops(self.width, self.hidden, length, self.layers) + projection
        if blocks is None:
            return Flops(forward=forward, backward=2 * forward)
        trained = transformer_flops(self.width, self.hidden, length, blocks) + projection if blocks else 0
        return Flops(forward=forward, backward=2 * trained)

    def activation_bytes(
        self, count: int | None, *, blocks: int | None = None, bf16: bool, recompute: int = 0
    ) -> int:
        count = self.context_length if count is None else count
        kept, _ = transformer_activation_bytes(
            self.width, self.hidden, self.heads, count, blocks or self.layers, bf16=bf16, recompute=recompute
        )
        return kept if blocks is not None else kept + count * 8  # the tokens

    def open_clip_config(self) -> dict[str, Any]:
        names = ("context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class BagOfWords(TextArchitecture):
    """CLIP's other text encoder (Radford et al. 2021, section 2.4): the tokens' mean embedding, projected."""

    width: int = 512
    context_length: int = 77
    vocab_size: int = 49408
    setting = "cbow"
    own = True
    has_blocks = False

    @classmethod
    def from_setting(cls, value: str, *, embed_dim: int) -> Self:
        return cls(width=embed_dim)

    @property
    def description(self) -> str:
        return f"mean of token embeddings, width {self.width}"

    def build(self, embed_dim: int, *, quick_gelu: bool) -> "nn.Module":
        from clipkit.model.towers import BagOfWordsTower

        return BagOfWordsTower(vocab_size=self.vocab_size, width=self.width, output_dim=embed_dim)

    def initialize(self, module: "nn.Module", *, small_data: bool) -> None:
        from clipkit.model.towers import BagOfWordsTower

        assert isinstance(module, BagOfWordsTower)
        module.initialize()

    def flops(self, embed_dim: int, length: int, *, blocks: int | None = None) -> Flops:
        projection = 2 * self.width * embed_dim
        return Flops(forward=projection, backward=0 if blocks == 0 else 2 * projection)

    def activation_bytes(
        self, count: int | None, *, blocks: int | None = None, bf16: bool, recompute: int = 0
    ) -> int:
        return (self.context_length if count is None else count) * self.width * _FLOAT


@dataclass(frozen=True, kw_only=True)
class ClassTable(TextArchitecture):
    """A classification head in place of a text tower: a learned row for each class, selected by its name."""

    names: tuple[str, ...]
    setting = "classes:FILE"
    own = True
    has_blocks = False
    any_length = False

    def __post_init__(self) -> None:
        names = self.names
        if not isinstance(names, tuple | list) or not all(isinstance(one, str) for one in names):
            raise ConfigError("names is not a list of class names")
        object.__setattr__(self, "names", tuple(names))  # JSON stores a list
        _check_number("number of classes", len(names), _MAX)
        for one in names:
            if not one or one != " ".join(one.split()):
                raise ConfigError(f"class name {one[:80]!r} is empty, or has spaces that a caption loses")
        if len(set(names)) < len(names):
            twice = next(one for one in names if names.count(one) > 1)
            raise ConfigError(f"class name {twice[:80]!r} occurs twice: each class needs its own name")

    @classmethod
    def from_setting(cls, value: str, *, embed_dim: int) -> Self:
        file = Path(value)
        try:
            if file.stat().st_size > _LARGEST_NAMES:
                raise ConfigError(f"model.text: {file} is too large for a file of class names")
            return cls(names=tuple(file.read_text(encoding="utf-8").splitlines()))
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.text: cannot read class names from {file}: {error}") from error

    @property
    def context_length(self) -> int:
        """A class is one token."""
        return 1

    @property
    def classes(self) -> tuple[str, ...]:
        return self.names

    @property
    def description(self) -> str:
        return f"a row for each of {len(self.names)} classes"

    def resized(self, context_length: int) -> Self:
        if context_length > 1:
            raise ConfigError(f"context_length = {context_length} does not fit: a class is one token")
        return self

    def tokenizer(self) -> "Tokenizer":
        from clipkit.model.tokenizer import ClassTokenizer

        return ClassTokenizer(names=self.names)

    def build(self, embed_dim: int, *, quick_gelu: bool) -> "nn.Module":
        from clipkit.model.towers import ClassTableTower

        return ClassTableTower(classes=len(self.names), output_dim=embed_dim)

    def initialize(self, module: "nn.Module", *, small_data: bool) -> None:
        from clipkit.model.towers import ClassTableTower

        assert isinstance(module, ClassTableTower)
        module.initialize()

    def flops(self, embed_dim: int, length: int, *, blocks: int | None = None) -> Flops:
        return Flops(forward=0, backward=0)  # a lookup

    def activation_bytes(
        self, count: int | None, *, blocks: int | None = None, bf16: bool, recompute: int = 0
    ) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shape of a CLIP: two towers and the dimension they project to."""

    embed_dim: int
    vision: ImageArchitecture
    text: TextArchitecture
    quick_gelu: bool = False
    small_data: bool = False  # how fresh weights are drawn, see CLIP.initialize
    logit_bias: bool = False  # SigLIP's bias beside the temperature

    def __post_init__(self) -> None:
        _check_number("embed_dim", self.embed_dim, _MAX)
        for name in ("quick_gelu", "small_data", "logit_bias"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} = {value!r} is neither true nor false")

    @property
    def is_own(self) -> bool:
        """Whether both towers are clipkit's."""
        return self.vision.own and self.text.own

    def own_towers(self) -> tuple[VisionTower, TextTower]:
        """Both towers of an architecture that has the plain ViT and the plain text transformer."""
        vision, text = self.vision.plain, self.text.plain
        assert vision is not None and text is not None
        return vision, text

    def resized(self, *, image_size: int = 0, context_length: int = 0) -> "Architecture":
        """The same architecture for another image size or context length; 0 keeps the current one."""
        vision = self.vision.resized(image_size) if image_size else self.vision
        text = self.text.resized(context_length) if context_length else self.text
        return replace(self, vision=vision, text=text)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, as stored beside weights."""
        from clipkit.model import IMAGE_TOWERS, TEXT_TOWERS

        kinds = {kind: name for name, kind in (*IMAGE_TOWERS.items(), *TEXT_TOWERS.items())}
        towers = {
            "vision": {"kind": kinds[type(self.vision)], **asdict(self.vision)},
            "text": {"kind": kinds[type(self.text)], **asdict(self.text)},
        }
        return {**asdict(self), **towers}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Architecture":
        """The inverse of ``to_dict``.

        Raises:
            CheckpointError: a field is unknown, missing or of the wrong type.
        """
        from clipkit.model import IMAGE_TOWERS, TEXT_TOWERS

        try:
            vision = _stored_tower(values["vision"], "vit", IMAGE_TOWERS)
            text = _stored_tower(values["text"], "transformer", TEXT_TOWERS)
            return cls(**{**values, "vision": vision, "text": text})
        except (AttributeError, KeyError, TypeError, ConfigError) as error:
            raise CheckpointError(
                f"the stored architecture is invalid or from another version: {error}"
            ) from error


def _stored_tower(values: Mapping[str, Any], default: str, kinds: Mapping[str, Any]) -> Any:
    name = values.get("kind", default)
    if name not in kinds:
        raise ConfigError(f"kind = {name!r} is unknown: {nearest(str(name), kinds)}")
    return kinds[name](**{key: value for key, value in values.items() if key != "kind"})


Kind = TypeVar("Kind", bound=TowerArchitecture)


def selected(setting: str, kinds: Mapping[str, type[Kind]]) -> tuple[type[Kind], str] | None:
    """Find the kind of tower selected by ``model.image`` or ``model.text``, and the value after its prefix."""
    for kind in kinds.values():
        prefix, colon, _ = kind.setting.partition(":")
        if prefix and (setting.startswith(prefix + colon) if colon else setting == prefix):
            return kind, setting.removeprefix(prefix + colon)
    return None


def _check_heads(width: int, heads: int) -> None:
    if width % heads:
        raise ConfigError(f"width = {width} is not a multiple of heads = {heads}")


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

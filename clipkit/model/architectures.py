"""Architectures of CLIP models: sizes of towers, which build their modules.

An ``Architecture`` is an image tower, a text tower, and the dimension of the space both project to. Each kind of
tower is a frozen dataclass derived from ``ImageArchitecture`` or ``TextArchitecture`` and registered in
``IMAGE_TOWERS`` or ``TEXT_TOWERS`` of ``clipkit.model.names``. It provides everything other code needs to know
about the tower; the defaults of the base classes are right for a tower of another library that needs nothing
special.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, TypeVar

from clipkit.errors import CheckpointError, ConfigError, nearest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from clipkit.model.naflex import PatchBudget
    from clipkit.model.preprocess import Preprocess

# limits for stored architectures, which are not trusted
_MAX = 1_000_000
_MAX_LAYERS = 1000
_MAX_RATIO = 64
QUICKGELU = "-quickgelu"  # suffix of a name

Layer: TypeAlias = tuple[int, ...] | None  # STEM, the number of a block, or None for the head
STEM = (-1,)


@dataclass(frozen=True, kw_only=True)
class LayerNames:
    """Map names of parameters to layers; a name that matches neither pattern belongs to the stem."""

    block: re.Pattern[str]  # its groups are the numbers of the block
    head: re.Pattern[str]

    def __call__(self, name: str) -> Layer:
        block = self.block.match(name)
        if block is not None:
            return tuple(map(int, block.groups()))
        return None if self.head.match(name) else STEM


_TRANSFORMER = LayerNames(
    block=re.compile(r"transformer\.resblocks\.(\d+)\."),
    head=re.compile(r"ln_post|ln_final|proj|text_projection|attn_pool"),
)
_PIXELS = LayerNames(block=re.compile(r"blocks\.(\d+)\."), head=re.compile(r"ln_post|proj"))  # of Image GPT


@dataclass(frozen=True)
class TowerArchitecture:
    """Base of all towers.

    Attributes:
        setting: how ``model.image`` or ``model.text`` selects this kind, such as "timm:NAME"; "" if they cannot.
        native: whether clipkit implements it: it can be built on the meta device and initialized later, is
            deterministic in the forward pass, and can be sharded.
        has_blocks: whether it has blocks to lock or recompute.
        sizes: fields of the tower by the settings of [shape] that select them; empty if there are none.
    """

    setting: ClassVar[str] = ""
    native: ClassVar[bool] = False
    has_blocks: ClassVar[bool] = True
    sizes: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.type is int:
                most = _MAX_LAYERS if entry.name == "layers" else _MAX
                _check_integer(entry.name, value, most, least=entry.metadata.get("least", 1))
            elif entry.name == "dropout":
                if type(value) not in (int, float) or not 0 <= value < 1:
                    raise ConfigError(f"dropout = {value!r} is not at least 0 and below 1")
            elif entry.type is float:
                if type(value) not in (int, float) or not 0 < value <= _MAX_RATIO:
                    raise ConfigError(
                        f"{entry.name} = {value!r} is not a number above 0, at most {_MAX_RATIO}"
                    )
            elif not isinstance(value, entry.type if entry.type in (str, bool) else Mapping):
                raise ConfigError(f"{entry.name} = {value!r} has the wrong type")

    @classmethod
    def from_setting(cls, value: str, *, embed_dim: int) -> Self:
        """Create the tower selected by ``model.image`` or ``model.text``, given the value without its prefix."""
        raise NotImplementedError

    @property
    def description(self) -> str:
        """Short description for a model card."""
        return type(self).__name__

    @property
    def block_count(self) -> int:
        """Number of blocks named ``transformer.resblocks.N``; 0 for a tower trained completely or not at all."""
        return 0

    @property
    def is_clips(self) -> bool:
        """Whether transformers' ``CLIPModel`` has such a tower."""
        return False

    @property
    def variant(self) -> str:
        """Line that distinguishes the tower from others of the same ``repr``, for the hash of a model."""
        return ""

    @property
    def outline(self) -> tuple[Any, ...] | None:
        """Properties that follow from tensor shapes, to recognize weights; None if they are not recognized."""
        return None

    def replace_sizes(self, settings: Mapping[str, Any]) -> Self:
        """Return the tower with settings of [shape]; without another number of heads, they stay as wide."""
        values = {self.sizes[name]: value for name, value in settings.items()}
        if "width" in values and "heads" not in values:
            sizes = vars(self)
            head = sizes["width"] // sizes["heads"]
            if values["width"] % head:
                raise ConfigError(
                    f"width = {values['width']} is not a multiple of {head}, the width of a head"
                )
            values["heads"] = values["width"] // head
        return replace(self, **values)

    def replace_options(self, options: Mapping[str, Any]) -> Self:
        """Return the tower with arguments for its library; ConfigError if it takes none."""
        if options:
            raise ConfigError(f"a tower like this one ({self.description}) takes no options")
        return self

    def build(self, embed_dim: int, *, quick_gelu: bool) -> "nn.Module":
        """Build the module that computes features (B, O), not normalized; ConfigError if that is not possible."""
        raise NotImplementedError

    def initialize(self, module: "nn.Module", *, small_data: bool) -> None:
        """Draw fresh weights after ``reset_parameters`` of its layers; called for native towers only.

        By default by the module's method ``initialize``, if it has one.
        """
        tower: Any = module
        if hasattr(tower, "initialize"):
            tower.initialize()

    def map_layers(self, module: "nn.Module") -> Callable[[str], Layer] | None:
        """Return a function from the name of a parameter to its layer; None if the layers are unknown.

        A tower without blocks overrides it, so that nothing is locked by mistake.
        """
        return _TRANSFORMER if self.has_blocks else None

    @property
    def projection_prefix(self) -> str:
        """How the names of the projection's parameters begin in the module; "" if the tower cannot be split there.

        A tower is then a backbone, ``pool_inputs``, followed by a projection, ``project``.
        """
        return ""

    @property
    def backbone_settings(self) -> dict[str, Any]:
        """All fields that the pooled features of the tower depend on; ``repr`` lacks some."""
        return {"kind": type(self).__name__, **asdict(self)}

    def pool_inputs(self, module: "nn.Module", inputs: "Tensor") -> "Tensor":
        """Compute pooled features (B, W) of the inputs of the tower."""
        tower: Any = module
        pooled: Tensor = tower.pool(inputs)
        return pooled

    def project(self, module: "nn.Module", pooled: "Tensor") -> "Tensor":
        """Compute features (B, O), not normalized, of pooled features (B, W)."""
        tower: Any = module
        features: Tensor = tower.project(pooled)
        return features

    def open_clip_config(self) -> dict[str, Any]:
        """Return open_clip's ``vision_cfg`` or ``text_cfg`` of the tower; ConfigError if open_clip lacks it."""
        raise ConfigError(f"open_clip has no tower like this one ({self.description})")


@dataclass(frozen=True)
class ImageArchitecture(TowerArchitecture):
    """Base of image towers: normalized float images (B, C, S, S) → features (B, O).

    Attributes:
        channels: C, 3 for RGB.
    """

    channels: int = field(default=3, repr=False, kw_only=True)  # not in the hash of models of RGB images

    if TYPE_CHECKING:

        @property
        def image_size(self) -> int:
            """Side of the images in pixels."""
            raise NotImplementedError

    @property
    def plain(self) -> "VisionTower | None":
        """The tower itself if it is a plain ViT, which other formats know; otherwise None."""
        return None

    @property
    def patches(self) -> int | None:
        """Number of patches per image, for a tower that can skip patches and normalizes images itself.

        Such a module is called as ``(images, patches, colors=…)``, see ``VisionTransformer``. None for others.
        """
        return None

    @property
    def budget(self) -> "PatchBudget | None":
        """How images of variable size become strips, see ``clipkit.model.naflex``; None for square images."""
        return None

    @property
    def image_tokens(self) -> int:
        """Most patches of an image of variable size; 0 for square images."""
        return 0 if self.budget is None else self.budget.count

    def replace_tokens(self, tokens: int) -> "ImageArchitecture":
        """Return the tower for images of variable size, of at most so many patches."""
        raise ConfigError(
            f"image_tokens = {tokens} requires clipkit's ViT as the image tower, not {self.description}"
        )

    def fit_preprocess(self, preprocess: "Preprocess") -> "Preprocess":
        """Return a preprocessing that makes images of the tower's size."""
        return replace(preprocess, image_size=self.image_size, patches=self.budget)

    @property
    def size_step(self) -> int:
        """Image sizes that are multiples of this number can be encoded; 0 if only ``image_size`` can."""
        return 0

    def check_size(self, image_size: int) -> None:
        """Raise ConfigError if a library's tower cannot encode images of a multiple of ``size_step``."""

    @property
    def distilled(self) -> bool:
        """Whether it has a distillation token."""
        return False

    def masked_outputs(self, target: str) -> int:
        """Return the number of outputs that predict a masked patch, see ``MASKED``; 0 if it cannot mask patches."""
        return 0

    @property
    def position_values(self) -> int:
        """Number of values that the constructor computes for position embeddings, checked for stored towers."""
        return 0

    def replace_channels(self, channels: int) -> Self:
        """Return the tower for images of another number of channels; ConfigError if it encodes only RGB."""
        if channels == self.channels:
            return self
        raise ConfigError(
            f"pixels.channels = {channels} requires another image tower than {self.description}"
        )

    @property
    def color_range(self) -> tuple[float, float] | None:
        """Mean and standard deviation of all channels of images, for fresh weights; None for CLIP's."""
        return None

    @property
    def hub_repository(self) -> str:
        """A repository on the Hugging Face hub with weights for ``take_weights``; "" if there is none."""
        return ""

    def take_weights(
        self, module: "nn.Module", tensors: Mapping[str, "Tensor"], preprocess: "Preprocess"
    ) -> "tuple[Preprocess, list[str]]":
        """Copy weights of the tower's library into a built tower.

        Args:
            tensors: weights in the library's names. A classifier is left out; position embeddings are resampled.

        Returns:
            ``preprocess`` with the normalization of the library, and the names of tensors that are not used.
        """
        raise ConfigError(f"{self.description} has no weights of its own")

    def replace_size(self, image_size: int) -> Self:
        """Return the tower for images of another size."""
        return replace(self, **{"image_size": image_size})

    def token_shape(self, embed_dim: int) -> tuple[int, int] | None:
        """Return the number and width of an image's tokens that a decoder reads; None if it has none."""
        return None

    def encode_with_tokens(self, module: "nn.Module", images: "Tensor") -> "tuple[Tensor, Tensor]":
        """Compute features (B, O) and tokens (B, M, W) of normalized images."""
        tower: Any = module
        features, tokens = tower.encode_with_tokens(images)
        return features, tokens

    def smooth_positions(self, module: "nn.Module", image_size: int) -> None:
        """Smooth fresh position embeddings for training on images of ``image_size``, see ``smooth_grid``."""

    def timm_model(self) -> tuple[str, dict[str, Any]] | None:
        """Return timm's name and arguments for building the submodule ``trunk``; None if timm did not build it."""
        return None


@dataclass(frozen=True)
class TextArchitecture(TowerArchitecture):
    """Base of text towers: int64 tokens (B, L) → features (B, O).

    Attributes:
        any_length: whether L may be shorter than the context length.
        part_of_clip: whether it is the transformer whose parameters are part of ``CLIP`` itself.
        over_classes: whether it is a classification head, see ``classes``.
        over_words: whether images can predict its tokens, see ``WordTable``.
    """

    any_length: ClassVar[bool] = True
    part_of_clip: ClassVar[bool] = False
    over_classes: ClassVar[bool] = False
    over_words: ClassVar[bool] = False

    if TYPE_CHECKING:

        @property
        def context_length(self) -> int:
            """Maximum number of tokens in a text."""
            raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Number of tokens that have an embedding; 0 if that is unknown."""
        return 0

    @property
    def plain(self) -> "TextTower | None":
        """The tower itself if it is the plain transformer, a part of ``CLIP`` itself; otherwise None."""
        return None

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names of a classification head; empty for towers that encode texts."""
        return ()

    @property
    def reads_padding(self) -> bool:
        """Whether features depend on the padding, so that another context length changes those of all texts."""
        return False

    @property
    def is_causal(self) -> bool:
        """Whether tokens attend to previous ones only; True for towers of other libraries."""
        return True

    def replace_attention(self, *, causal: bool) -> Self:
        """Return the tower with another attention mask, if it is the transformer of ``CLIP``."""
        return self

    def replace_vocabulary(self, size: int) -> Self:
        """Return the tower for a tokenizer of ``size`` tokens; ConfigError if its tokenizer is its own."""
        raise ConfigError(
            f"model.tokenizer requires clipkit's text transformer, not this one ({self.description})"
        )

    @property
    def hub_source(self) -> str:
        """The folder or the name on the Hugging Face hub with weights for ``take_weights``; "" if there is none."""
        return ""

    @property
    def local_config(self) -> Mapping[str, Any] | None:
        """Configuration of a library's encoder that is known only by a local folder, to be copied into exports."""
        return None

    def take_weights(self, module: "nn.Module", tensors: Mapping[str, "Tensor"]) -> None:
        """Copy weights of the tower's library, in its names, into a built tower."""
        raise ConfigError(f"{self.description} has no weights of its own")

    @property
    def token_width(self) -> int:
        """Width of the tokens that a decoder of captions can read; 0 if there are none."""
        return 0

    def encode_with_tokens(self, module: "nn.Module", tokens: "Tensor") -> "tuple[Tensor, Tensor]":
        """Compute features (B, O) and tokens (B, L, W), for towers of other libraries."""
        raise NotImplementedError

    @property
    def caption_vocabulary(self) -> int:
        """Size of the vocabulary of the tokens that a decoder of captions predicts; 0 if there are none."""
        return self.vocab_size if self.native and not self.over_classes else 0

    def replace_size(self, context_length: int) -> Self:
        """Return the tower for texts of another length."""
        return replace(self, **{"context_length": context_length})

    @property
    def library_tokenizer(self) -> Mapping[str, Any] | None:
        """Arguments of ``LibraryTokenizer`` for a model stored without a tokenizer; None for clipkit's own."""
        return None

    def use_tokenizer(self, folder: Path) -> Self:
        """Return the tower with the tokenizer in a folder of open_clip, if any; ConfigError if it is unknown."""
        return self


class _TransformerTower:
    width: int
    layers: int
    heads: int
    mlp_ratio: float

    @property
    def block_count(self) -> int:
        return self.layers

    @property
    def hidden(self) -> int:
        """Width inside the MLPs."""
        return int(self.mlp_ratio * self.width)

    def _check_heads(self) -> None:
        if self.width % self.heads:
            raise ConfigError(f"width = {self.width} is not a multiple of heads = {self.heads}")


POOLS = ("class", "mean", "mean_norm", "map", "distilled")  # what is projected to an image's features
NORM_EPS = {"clip": 1e-5, "vit": 1e-6}  # of layer norms, by ``VisionTower.norms``
_MOST_PIXELS = 512  # along a side
_MOST_TOKENS = 65_536  # patches of an image, whose rows and columns are stored in two bytes each
_LEAST_PATCH = 4  # pixels along a side, so that the grid of an image fits into a row of pixels
POSITIONS = ("learned", "learned_2d", "sincos_2d", "none")


@dataclass(frozen=True, kw_only=True)
class VisionTower(_TransformerTower, ImageArchitecture):
    """A ViT. ``image_size`` and ``patch_size`` are sides in pixels.

    Attributes:
        pool: what is projected to features: "class", the class token; "mean", the mean of the normalized patch
            tokens (open_clip's "avg"); "mean_norm", the norm of their mean instead (timm's ``fc_norm``); "map",
            attention of a learned token to them (Zhai et al. 2022, 2106.04560); "distilled", the class token and
            a distillation token, each to half of them, see ``normalize_halves``.
        positions: position embeddings: "learned"; "learned_2d", a row's and a column's of half the width each; or
            fixed: "sincos_2d", or "none".
        norms: "clip", a norm before the blocks and an epsilon of 1e-5; "vit", none and 1e-6, as in ViT, DINO, MAE
            and most of timm's ViTs.
    """

    image_size: int
    patch_size: int
    width: int
    layers: int
    heads: int
    mlp_ratio: float = 4.0
    pool: str = field(default="class", repr=False)  # not in the hash of models with the defaults
    positions: str = field(default="learned", repr=False)
    norms: str = field(default="clip", repr=False)
    native = True
    sizes: ClassVar[Mapping[str, str]] = {
        "image_width": "width", "image_layers": "layers", "image_heads": "heads", "image_mlp": "mlp_ratio",
        "patch": "patch_size", "pool": "pool", "positions": "positions", "norms": "norms",
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_heads()
        for name, allowed in (("pool", POOLS), ("positions", POSITIONS), ("norms", NORM_EPS)):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} = {value!r} is unknown: {nearest(value, allowed)}")
        parts = {"sincos_2d": 4, "learned_2d": 2}.get(self.positions, 1)
        if self.width % parts:
            raise ConfigError(
                f"positions = {self.positions!r} requires a width divisible by {parts}, not {self.width}"
            )
        if self.image_size % self.patch_size:
            raise ConfigError(
                f"image_size = {self.image_size} is not a multiple of patch_size = {self.patch_size}"
            )

    def token_shape(self, embed_dim: int) -> tuple[int, int] | None:
        further = 2 if self.distilled else 1
        return (self.image_size // self.patch_size) ** 2 + further, self.width

    @property
    def projection_prefix(self) -> str:
        return "" if self.distilled else "proj"

    @property
    def plain(self) -> "VisionTower | None":
        return self

    @property
    def patches(self) -> int | None:
        return (self.image_size // self.patch_size) ** 2

    @property
    def size_step(self) -> int:
        return self.patch_size

    @property
    def outline(self) -> tuple[Any, ...] | None:
        return (self.patch_size, self.width, self.layers, self.hidden)

    @property
    def description(self) -> str:
        parts = [f"{self.layers} layers", f"width {self.width}", f"{self.heads} heads"]
        if self.pool == "distilled":
            parts.append("a distillation token")
        elif self.pool != "class":
            parts.append(f"{self.pool} pooling")
        if self.positions != "learned":
            parts.append(f"{self.positions} positions")
        if self.norms == "vit":
            parts.append("no norm before the blocks")
        return f"ViT with patches of {self.patch_size} pixels, {', '.join(parts)}"

    @property
    def is_clips(self) -> bool:
        """Whether it has CLIP's norms and reads the class token alone; position embeddings may be fixed."""
        return self.pool == "class" and self.norms == "clip"

    @property
    def variant(self) -> str:
        norms = "" if self.norms == "clip" else f"norms {self.norms}\n"
        return norms if self.pool == "class" else f"pool {self.pool}\n{norms}"

    @property
    def distilled(self) -> bool:
        return self.pool == "distilled"

    def masked_outputs(self, target: str) -> int:
        return MASKED[target](self)

    def build(self, embed_dim: int, *, quick_gelu: bool) -> "nn.Module":
        from clipkit.model.towers import VisionTransformer

        return VisionTransformer(**self.get_arguments(embed_dim, quick_gelu=quick_gelu))

    def get_arguments(self, embed_dim: int, *, quick_gelu: bool) -> dict[str, Any]:
        """Return the arguments of ``VisionTransformer``."""
        return {
            "image_size": self.image_size, "patch_size": self.patch_size, "width": self.width,
            "layers": self.layers, "heads": self.heads, "mlp_ratio": self.mlp_ratio, "output_dim": embed_dim,
            "quick_gelu": quick_gelu, "pool": self.pool, "positions": self.positions,
            "pre_norm": self.norms == "clip", "eps": NORM_EPS[self.norms], "channels": self.channels,
        }  # fmt: skip

    def replace_channels(self, channels: int) -> Self:
        return replace(self, channels=channels)

    def replace_tokens(self, tokens: int) -> "NaFlexTower":
        return NaFlexTower(**vars(self), tokens=tokens)

    def initialize(self, module: "nn.Module", *, small_data: bool) -> None:
        tower: Any = module
        tower.initialize(small_data=small_data)

    def smooth_positions(self, module: "nn.Module", image_size: int) -> None:
        from clipkit.model.towers import smooth_grid, tie_grid

        table = module.get_parameter("positional_embedding")
        side = image_size // self.patch_size
        if self.positions.startswith("learned"):
            smooth_grid(table, side)
        if self.positions == "learned_2d":
            tie_grid(table, drawn=side)

    def open_clip_config(self) -> dict[str, Any]:
        if self.pool in ("map", "distilled") or self.budget is not None:
            return super().open_clip_config()
        names = ("image_size", "patch_size", "width", "layers", "mlp_ratio")
        config: dict[str, Any] = {name: getattr(self, name) for name in names}
        config["head_width"] = self.width // self.heads
        if self.pool != "class":
            config["pool_type"] = "avg"
        if self.pool == "mean_norm":
            config["final_ln_after_pool"] = True
        if self.norms == "vit":
            config |= {"no_ln_pre": True, "norm_kwargs": {"eps": NORM_EPS["vit"]}}
        return config

    def take_weights(
        self, module: "nn.Module", tensors: Mapping[str, "Tensor"], preprocess: "Preprocess"
    ) -> "tuple[Preprocess, list[str]]":
        from clipkit.model.state_dicts import convert_vit
        from clipkit.model.towers import QuickGELU

        if self.positions != "learned":
            raise ConfigError(
                f"positions = {self.positions!r}: the weights have learned positions, use 'learned'"
            )
        if self.norms == "vit" and any(isinstance(layer, QuickGELU) for layer in module.modules()):
            raise ConfigError("weights with norms = 'vit' need GELU: use an architecture without QuickGELU")
        weights, unused = convert_vit(tensors, module.state_dict(), pool=self.pool)
        module.load_state_dict(weights, strict=False)  # complete but for the head
        return preprocess, unused


@dataclass(frozen=True, kw_only=True)
class NaFlexTower(VisionTower):
    """A ViT for images of variable size and aspect ratio, see clipkit/model/naflex.py.

    ``image_size`` is the side of the grid of position embeddings, in pixels; grids of images are interpolated.

    Attributes:
        tokens: most patches of an image.
        tanh_gelu: whether it has SigLIP's approximation of GELU.
    """

    tokens: int
    tanh_gelu: bool = False
    # what needs a grid of fixed size, or a square image
    plain = None
    patches = None
    size_step = 0
    outline = None
    is_clips = False

    def __post_init__(self) -> None:
        _check_integer("image_tokens", self.tokens, _MOST_TOKENS)
        super().__post_init__()
        label = f"image_tokens = {self.tokens}"
        if self.pool not in ("class", "map"):
            raise ConfigError(f"{label} requires pool = 'class' or 'map', not {self.pool!r}")
        if self.patch_size < _LEAST_PATCH:
            raise ConfigError(f"{label} requires patches of at least {_LEAST_PATCH} pixels")

    @property
    def budget(self) -> "PatchBudget":
        from clipkit.model.naflex import PatchBudget

        return PatchBudget(side=self.patch_size, count=self.tokens)

    @property
    def description(self) -> str:
        return f"{super().description}, at most {self.tokens} patches of any aspect ratio"

    def build(self, embed_dim: int, *, quick_gelu: bool) -> "nn.Module":
        from clipkit.model.naflex import PackedVisionTransformer

        arguments = self.get_arguments(embed_dim, quick_gelu=quick_gelu)
        return PackedVisionTransformer(budget=self.budget, tanh_gelu=self.tanh_gelu, **arguments)

    def replace_size(self, image_size: int) -> Self:
        if image_size != self.image_size:
            raise ConfigError(
                f"image_size = {image_size}: this model reads images of variable size: set image_tokens instead"
            )
        return self

    def replace_tokens(self, tokens: int) -> Self:
        return replace(self, tokens=tokens)

    def token_shape(self, embed_dim: int) -> None:
        return None

    def masked_outputs(self, target: str) -> int:
        return 0


PIXEL_SIZES = {"Ti": (128, 6, 4), "S": (512, 24, 8), "M": (1024, 36, 8), "L": (1536, 48, 16)}


@dataclass(frozen=True, kw_only=True)
class PixelTower(ImageArchitecture):
    """Image GPT, see clipkit/model/pixels.py. ``image_size`` is also the side of its grid of pixels.

    Attributes:
        colors: number of colors of the palette.
        causal: whether it predicts the next pixel; otherwise it predicts masked ones.
    """

    image_size: int
    width: int
    layers: int
    heads: int
    colors: int = 512
    causal: bool = True
    setting = "pixels:SIZE with the sizes Ti, S, M and L (Image GPT)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise ConfigError(f"width = {self.width} is not a multiple of heads = {self.heads}")
        if self.image_size > _MOST_PIXELS:
            raise ConfigError(f"image_size = {self.image_size} is too large for a tower of pixels")

    @classmethod
    def from_setting(cls, value: str, *, embed_dim: int) -> Self:
        if value not in PIXEL_SIZES:
            raise ConfigError(f"model.image = 'pixels:{value}' is unknown: {nearest(value, PIXEL_SIZES)}")
        width, layers, heads = PIXEL_SIZES[value]
        return cls(image_size=32, width=width, layers=layers, heads=heads)

    def replace_options(self, options: Mapping[str, Any]) -> Self:
        if unknown := options.keys() - {"colors", "causal"}:
            raise ConfigError(f"image option {min(unknown)!r} is unknown: known: causal, colors")
        return replace(self, **options)

    @property
    def color_range(self) -> tuple[float, float] | None:
        return 0.5, 0.5  # to [-1, 1], the range of palettes

    @property
    def description(self) -> str:
        prediction = "the next pixel" if self.causal else "masked pixels"
        return f"Image GPT of {self.layers} layers, width {self.width}, {self.colors} colors, predicts {prediction}"

    def build(self, embed_dim: int, *, quick_gelu: bool) -> "nn.Module":
        from clipkit.model.pixels import PixelTransformer

        return PixelTransformer(
            side=self.image_size, width=self.width, layers=self.layers, heads=self.heads, colors=self.colors,
            causal=self.causal, output_dim=embed_dim,
        )  # fmt: skip

    def take_weights(
        self, module: "nn.Module", tensors: Mapping[str, "Tensor"], preprocess: "Preprocess"
    ) -> "tuple[Preprocess, list[str]]":
        palette = tensors.get("palette")
        if palette is None or palette.shape != (self.colors, 3) or not palette.is_floating_point():
            shape = "none" if palette is None else str(tuple(palette.shape))
            raise CheckpointError(f"expected a palette of shape ({self.colors}, 3), found {shape}")
        module.get_buffer("palette").copy_(palette)
        return preprocess, sorted(tensors.keys() - {"palette"})

    def token_shape(self, embed_dim: int) -> tuple[int, int]:
        return self.image_size**2, self.width

    def map_layers(self, module: "nn.Module") -> Callable[[str], Layer]:
        return _PIXELS


@dataclass(frozen=True, kw_only=True)
class TextTower(_TransformerTower, TextArchitecture):
    """A text transformer over CLIP's 49,408 byte-pair tokens.

    Attributes:
        causal: whether tokens attend to previous ones only, as in CLIP; if not, to all up to the end of text.
    """

    width: int
    layers: int
    heads: int
    context_length: int = 77
    vocab_size: int = 49408
    mlp_ratio: float = 4.0
    causal: bool = field(default=True, repr=False)  # not in the hash of causal models
    native = True
    part_of_clip = True
    sizes: ClassVar[Mapping[str, str]] = {"text_width": "width", "text_layers": "layers"}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_heads()

    @property
    def token_width(self) -> int:
        return self.width

    @property
    def projection_prefix(self) -> str:
        return "text_projection"

    @property
    def plain(self) -> "TextTower":
        return self

    @property
    def is_causal(self) -> bool:
        return self.causal

    @property
    def is_clips(self) -> bool:
        return self.causal

    @property
    def variant(self) -> str:
        return "" if self.causal else "bidirectional\n"

    @property
    def outline(self) -> tuple[Any, ...]:
        return (self.width, self.layers, self.context_length, self.vocab_size, self.hidden)

    def replace_attention(self, *, causal: bool) -> Self:
        return replace(self, causal=causal)

    def replace_vocabulary(self, size: int) -> Self:
        return replace(self, vocab_size=size)

    @property
    def description(self) -> str:
        kind = "causal" if self.causal else "bidirectional"
        return f"{kind} transformer, {self.layers} layers, width {self.width}, {self.heads} heads"

    def open_clip_config(self) -> dict[str, Any]:
        if not self.causal:  # open_clip's would attend to padding
            return super().open_clip_config()
        names = ("context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio")
        return {name: getattr(self, name) for name in names}


class _LookupTower(TextArchitecture):
    """Base of text towers without blocks, which look up learned rows."""

    native = True
    has_blocks = False

    def map_layers(self, module: "nn.Module") -> Callable[[str], Layer]:
        return _TRANSFORMER


@dataclass(frozen=True, kw_only=True)
class BagOfWords(_LookupTower):
    """CLIP's continuous bag of words (Radford et al. 2021, section 2.4): the projected mean token embedding."""

    width: int = 512
    context_length: int = 77
    vocab_size: int = 49408
    setting = "cbow"

    @classmethod
    def from_setting(cls, value: str, *, embed_dim: int) -> Self:
        return cls(width=embed_dim)

    @property
    def description(self) -> str:
        return f"mean of token embeddings, width {self.width}"

    def build(self, embed_dim: int, *, quick_gelu: bool) -> "nn.Module":
        from clipkit.model.towers import BagOfWordsTower

        return BagOfWordsTower(vocab_size=self.vocab_size, width=self.width, output_dim=embed_dim)


@dataclass(frozen=True, kw_only=True)
class WordTable(_LookupTower):
    """The mean of learned unit vectors, one per token: the text side of bag-of-words prediction.

    Predicting the words of captions from images (Joulin et al. 2016, https://arxiv.org/abs/1511.02251) is CLIP's
    baseline in figure 2 of Radford et al. 2021.
    """

    context_length: int = 77
    vocab_size: int = 49408
    setting = "words"
    over_words = True

    @classmethod
    def from_setting(cls, value: str, *, embed_dim: int) -> Self:
        return cls()

    @property
    def description(self) -> str:
        return f"mean of {self.vocab_size:,} word vectors"

    def build(self, embed_dim: int, *, quick_gelu: bool) -> "nn.Module":
        from clipkit.model.towers import WordTableTower

        return WordTableTower(words=self.vocab_size, output_dim=embed_dim)


@dataclass(frozen=True, kw_only=True)
class ClassTable(_LookupTower):
    """A classification head in place of a text tower: one learned row per class, selected by the class name."""

    names: tuple[str, ...]
    setting = "classes:FILE"
    any_length = False
    over_classes = True

    def __post_init__(self) -> None:
        names = self.names
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
            raise ConfigError("names is not a list of class names")
        object.__setattr__(self, "names", tuple(names))  # JSON stores a list
        _check_integer("number of classes", len(names), _MAX)
        for name, count in Counter(names).items():
            if not name or name != " ".join(name.split()):
                raise ConfigError(
                    f"class name {name[:80]!r} is empty or has repeated, leading or trailing spaces"
                )
            if count > 1:
                raise ConfigError(f"class name {name[:80]!r} occurs twice: each class needs its own name")

    @classmethod
    def from_setting(cls, value: str, *, embed_dim: int) -> Self:
        file = Path(value)
        try:
            if file.stat().st_size > 64 * 2**20:
                raise ConfigError(f"model.text: {file} is too large for a file of class names")
            lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
            return cls(names=tuple(lines))
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.text: cannot read class names from {file}: {error}") from error

    @property
    def context_length(self) -> int:
        """A class is one token."""
        return 1

    @property
    def vocab_size(self) -> int:
        return len(self.names)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.names

    @property
    def description(self) -> str:
        return f"classification head, {len(self.names)} classes"

    def replace_size(self, context_length: int) -> Self:
        if context_length > 1:
            raise ConfigError(f"context_length = {context_length} must be 1: a class is one token")
        return self

    def build(self, embed_dim: int, *, quick_gelu: bool) -> "nn.Module":
        from clipkit.model.towers import ClassTableTower

        return ClassTableTower(classes=len(self.names), output_dim=embed_dim)


@dataclass(frozen=True, kw_only=True)
class Decoder(_TransformerTower, TowerArchitecture):
    """A causal transformer that predicts captions; each layer attends to the image's tokens too (CoCa, CapPa).

    Attributes:
        context_length: most tokens of a caption that are predicted, including the end.
        feed: its input: "tokens", with an embedding of its own, or "text", the text tower's tokens; with "shared",
            it is the text tower, of which every ``text.layers / layers``-th block is followed by cross-attention.
        parallel: whether it has an embedding of [mask], to predict all tokens at once.
        queries: number of tokens into which it pools those of an image by attention; 0: none, it reads all.
    """

    width: int
    layers: int
    heads: int
    context_length: int
    vocab_size: int = 49408
    mlp_ratio: float = 4.0
    feed: str = "tokens"
    parallel: bool = False
    # not in the hash of models, which the names of their tensors determine
    queries: int = field(default=0, repr=False, metadata={"least": 0})

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_heads()
        if self.feed not in FEEDS or (self.parallel and self.feed != "tokens"):
            raise ConfigError(f"feed = {self.feed!r} and parallel = {self.parallel} are not a decoder")


FEEDS = ("tokens", "text", "shared")  # inputs of a decoder
COLORS = 512  # classes of a color, three bits a channel
# heads of local terms, which only training and captioning use: how the names of their parameters begin
HEADS = {
    "caption": "text_decoder.",
    "masked": "masked_head.",
    "image_gpt": "visual.proj_colors.",
    "words": "words_head.",
}
# targets of masked patches, see clipkit.model.masked: the image tower → number of outputs for a patch
MASKED: dict[str, Callable[[VisionTower], int]] = {
    "color": lambda tower: COLORS,
    "small": lambda tower: 16 * COLORS,
    "pixels": lambda tower: tower.channels * tower.patch_size**2,
    "features": lambda tower: tower.width,
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Architecture of a CLIP: two towers and the dimension they project to, and maybe heads of local terms.

    Attributes:
        masked: the target of masked patches, or None.
        words: number of words that a head predicts from the features of images, or None.
        projections: sources of training images that have an image projection of their own. Images of other
            sources, and all images after training, have the image tower's.
    """

    embed_dim: int
    vision: ImageArchitecture
    text: TextArchitecture
    quick_gelu: bool = False
    small_data: bool = False  # selects the initialization, see CLIP.initialize
    logit_bias: bool = False  # whether the model has SigLIP's bias
    # not in ``repr``, which is part of the hash of models without one
    decoder: Decoder | None = field(default=None, repr=False)
    masked: str | None = field(default=None, repr=False)
    words: int | None = field(default=None, repr=False)
    projections: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        _check_integer("embed_dim", self.embed_dim, _MAX)
        for name in ("quick_gelu", "small_data", "logit_bias"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name} = {value!r} must be true or false")
        if self.distilled and (self.embed_dim % 2 or not self.text.over_classes):
            raise ConfigError(
                "a distillation token requires a classification head and an even embedding dimension, not "
                f"{self.text.description} and embed_dim = {self.embed_dim}"
            )
        if self.masked not in (None, *MASKED):
            raise ConfigError(f"masked = {self.masked!r} is unknown: {nearest(str(self.masked), MASKED)}")
        if self.words is not None:
            _check_integer("words", self.words, _MAX)
        if not isinstance(self.projections, tuple) or not all(
            isinstance(name, str) for name in self.projections
        ):
            raise ConfigError(f"projections = {self.projections!r} has the wrong type")
        if self.projections and (self.vision.plain is None or self.distilled):
            raise ConfigError(
                f"projections = {list(self.projections)} require clipkit's ViT as the image tower, not "
                f"{self.vision.description}"
            )
        side = self.vision.size_step
        if self.masked == "small" and side % 4:
            raise ConfigError(
                f"masked.target = 'small' cuts patches in 4 × 4 cells, and they are {side} pixels wide"
            )

    @property
    def distilled(self) -> bool:
        """Whether the image tower has a distillation token."""
        return self.vision.distilled

    @property
    def is_native(self) -> bool:
        """Whether clipkit implements both towers."""
        return self.vision.native and self.text.native

    def get_plain_towers(self) -> tuple[VisionTower, TextTower]:
        """Return both towers of an architecture with the plain ViT and the plain text transformer."""
        vision = self.vision.plain
        text = self.text.plain
        assert vision is not None and text is not None
        return vision, text

    def replace_size(
        self, *, image_size: int = 0, image_tokens: int = 0, context_length: int = 0
    ) -> "Architecture":
        """Return the architecture for other sizes of images and texts; 0 keeps the current one."""
        vision = self.vision.replace_size(image_size) if image_size else self.vision
        vision = vision.replace_tokens(image_tokens) if image_tokens else vision
        text = self.text.replace_size(context_length) if context_length else self.text
        return replace(self, vision=vision, text=text)


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """A model's low-rank adapters, see ``clipkit.model.lora``.

    Attributes:
        rank: r.
        alpha: s · r.
        image, text: whether the tower has adapters.
        source, hash: the model that they adapt, and its ``model_hash``.
    """

    rank: int
    alpha: float
    image: bool
    text: bool
    source: str
    hash: str


Kind = TypeVar("Kind", bound=TowerArchitecture)


def select_tower(setting: str, kinds: Mapping[str, type[Kind]]) -> tuple[type[Kind], str] | None:
    """Find the kind of tower selected by ``model.image`` or ``model.text``, and the value after its prefix."""
    for kind in kinds.values():
        prefix, colon, _ = kind.setting.partition(":")
        if prefix and (setting.startswith(prefix + colon) if colon else setting == prefix):
            return kind, setting.removeprefix(prefix + colon)
    return None


def list_choices(kinds: Mapping[str, type[Kind]]) -> str:
    """List how ``model.image`` or ``model.text`` selects kinds of towers, such as "cbow, or timm:NAME"."""
    *choices, last = [kind.setting for kind in kinds.values() if kind.setting]
    return f"{', '.join(choices)}, or {last}" if choices else last


def _check_integer(name: str, value: object, most: int, *, least: int = 1) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{name} = {value!r} is not an integer from {least} to {most}")


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
    width, layers, heads = image
    return Architecture(
        embed_dim=embed_dim,
        vision=VisionTower(
            image_size=image_size, patch_size=patch_size, width=width, layers=layers, heads=heads
        ),
        text=TextTower(width=text[0], layers=text[1], heads=text[2]),
        quick_gelu=quick_gelu,
        small_data=small_data,
    )


# towers as (width, layers, heads)
_BASE, _LARGE, _HUGE = (768, 12, 12), (1024, 24, 16), (1280, 32, 16)
_TEXT_512, _TEXT_768, _TEXT_1024 = (512, 12, 8), (768, 12, 12), (1024, 24, 16)

# Published architectures (Radford et al. 2021, table 20; ViT-H-14 by LAION) under open_clip's names; OpenAI's
# weights need QuickGELU. The last four are clipkit's, for small data and CPUs.
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


def get_architecture(name: str, *, called: str = "model.name") -> Architecture:
    """Return an architecture of ``ARCHITECTURES``; the suffix ``-quickgelu`` selects any of them with QuickGELU."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    plain = name.removesuffix(QUICKGELU)
    if plain != name and plain in ARCHITECTURES and not ARCHITECTURES[plain].quick_gelu:
        return replace(ARCHITECTURES[plain], quick_gelu=True)
    raise ConfigError(f"{called} = {name!r} is unknown: {nearest(name, ARCHITECTURES)}")

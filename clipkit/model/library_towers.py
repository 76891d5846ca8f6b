"""Towers built by other libraries: open_clip, timm and transformers.

Parameter names are those of open_clip's models with the same tower. A library is imported when a tower is built.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from clipkit.errors import CheckpointError, ConfigError, nearest
from clipkit.files import counted
from clipkit.files.open_clip import build_towers, default_pooler
from clipkit.model.architectures import STEM, ImageArchitecture, Layer, LayerNames, TextArchitecture

if TYPE_CHECKING:
    from torch import Tensor, nn

    from clipkit.model.preprocess import Preprocess

# minimal towers, built when only the other one is needed
_NO_VISION: dict[str, Any] = {"image_size": 2, "patch_size": 2, "width": 64, "layers": 1}
_NO_TEXT: dict[str, Any] = {"context_length": 2, "vocab_size": 2, "width": 64, "heads": 1, "layers": 1}
_POOLINGS = {"mean_pooler": "mean", "cls_pooler": "pooler", "cls_last_hidden_state_pooler": "cls"}
_PROJECTIONS = ("linear", "mlp", "none")
# arguments of timm that the tower sets itself, and those that read files or change what it returns
_FIXED_OPTIONS = {
    "cache_dir", "checkpoint_path", "exportable", "features_only", "img_size", "in_chans", "num_classes",
    "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "scriptable",
}  # fmt: skip
_LARGEST, _MOST_VALUES = 100_000, 64  # of values of these arguments
_TOKENIZER_OPTIONS = {"clean", "strip_sep_token", "language"}  # settings that run no code
# exceptions that libraries raise for invalid configurations
_REFUSALS = (TypeError, ValueError, KeyError, AssertionError, RuntimeError, ArithmeticError)
_RESNET = LayerNames(block=re.compile(r"layer(\d+)\.(\d+)\."), head=re.compile(r"attnpool"))
_ENCODER = LayerNames(
    block=re.compile(r"transformer\.(?:.*?\.)??(?:layers?|blocks?|h)\.(\d+)\."),
    head=re.compile(r"proj\.|transformer\.(?:encoder\.)?(?:pooler|final_layer_norm|final_norm|ln_f|norm)\."),
)


@dataclass(frozen=True, kw_only=True)
class OpenClipVision(ImageArchitecture):
    """An image tower built by open_clip from ``config``, its ``vision_cfg``."""

    image_size: int
    config: Mapping[str, Any]

    @property
    def backbone(self) -> str:
        """Name of the timm model inside; "" for other towers of open_clip."""
        return str(self.config.get("timm_model_name") or "")

    @property
    def description(self) -> str:
        return f"timm's `{self.backbone}`" if self.backbone else "a tower of open_clip"

    @property
    def outline(self) -> tuple[Any, ...] | None:
        layers = self.config.get("layers")
        return (layers, self.config.get("width")) if isinstance(layers, list) else None

    @property
    def position_values(self) -> int:
        patch = self.config.get("patch_size")
        width = self.config.get("width")
        if isinstance(patch, int) and isinstance(width, int) and patch > 0:
            return (self.image_size // patch) ** 2 * width
        return 0

    def build(self, embed_dim: int, *, quick_gelu: bool) -> "nn.Module":
        from torch import nn

        if self.backbone:
            _check_timm(self.backbone)
        config = {**self.config, "image_size": self.image_size}
        try:
            visual, _ = build_towers(embed_dim, config, _NO_TEXT, quick_gelu=quick_gelu)
        except _REFUSALS as error:
            raise ConfigError(f"open_clip rejects the tower's configuration: {error!r}") from error
        if not self.backbone:
            if self.channels != 3:
                first: Any = visual.conv1
                options = {name: getattr(first, name) for name in ("kernel_size", "stride", "padding")}
                visual.conv1 = nn.Conv2d(self.channels, first.out_channels, bias=False, **options)
            return visual
        # open_clip builds timm's towers for their default size, and some accept no other
        trunk = visual.get_submodule("trunk")
        size = (self.image_size, self.image_size)
        patches: Any = getattr(trunk, "patch_embed", None)
        resize: Any = getattr(trunk, "set_input_size", None)
        strict = getattr(patches, "strict_img_size", False) and getattr(patches, "img_size", None) != size
        if strict and resize:
            try:
                resize(size)
            except _REFUSALS as error:
                raise ConfigError(
                    f"the tower does not accept images of {self.image_size} pixels: {error!r}"
                ) from error
        return visual

    def replace_channels(self, channels: int) -> Self:
        return super().replace_channels(channels) if self.backbone else replace(self, channels=channels)

    def token_shape(self, embed_dim: int) -> tuple[int, int] | None:
        patch = self.config.get("patch_size", 16)
        layers = self.config.get("layers", 12)
        if self.backbone or not isinstance(patch, int) or not isinstance(layers, int):
            return None  # not a ViT of open_clip
        if self.config.get("attentional_pool") is True:
            return self.config.get("attn_pooler_queries", 256) - 1, embed_dim
        return (self.image_size // patch) ** 2, self.config.get("width", 768)

    def encode_with_tokens(self, module: "nn.Module", images: "Tensor") -> "tuple[Tensor, Tensor]":
        return _call_with_output_tokens(module, images)

    @property
    def projection_prefix(self) -> str:
        projects_vectors = self.config.get("timm_pool") not in ("abs_attn", "rot_attn")
        return "head." if self.backbone and projects_vectors else ""

    def pool_inputs(self, module: "nn.Module", inputs: "Tensor") -> "Tensor":
        return _call_submodule(module, "trunk", inputs)

    def project(self, module: "nn.Module", pooled: "Tensor") -> "Tensor":
        return _call_submodule(module, "head", pooled)

    def map_layers(self, module: "nn.Module") -> Callable[[str], Layer] | None:
        if self.backbone:
            return _map_backbone_layers(module.get_submodule("trunk"))
        return _RESNET if isinstance(self.config.get("layers"), list | tuple) else super().map_layers(module)

    def open_clip_config(self) -> dict[str, Any]:
        return {"image_size": self.image_size, **self.config}

    def timm_model(self) -> tuple[str, dict[str, Any]] | None:
        if not self.backbone:
            return None
        pool = self.config.get("timm_pool", "avg")
        return self.backbone, {"global_pool": pool} if pool else {}


@dataclass(frozen=True, kw_only=True)
class TimmVision(ImageArchitecture):
    """A backbone of timm with its own pooling and a projection, whose names are open_clip's.

    Attributes:
        options: arguments with which timm builds it, such as ``{"depth": 4, "global_pool": "map"}``: numbers,
            strings and lists of them, none that read files.
        projection: "linear", or "mlp" (one hidden layer, twice as wide as the embedding).
        dropout: probability with which values of the hidden layer of "mlp" are dropped in training.
    """

    image_size: int
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    projection: str = field(default="linear", repr=False)  # not in the hash of models with the default
    dropout: float = field(default=0.0, repr=False)
    setting = "timm:NAME, such as timm:resnet50"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.projection not in ("linear", "mlp"):
            raise ConfigError(f"projection = {self.projection!r} is unknown: linear or mlp")
        _check_dropout(self.dropout, self.projection)
        for key, value in self.options.items():
            if key in _FIXED_OPTIONS:
                raise ConfigError(f"image option {key!r} cannot be set")
            values = value if isinstance(value, list | tuple) else [value]
            if len(values) > _MOST_VALUES or not all(map(_is_plain_option, values)):
                raise ConfigError(
                    f"image option {key!r} must be a number of at most {_LARGEST:,}, a short string, or at most "
                    f"{_MOST_VALUES} of them"
                )

    def replace_options(self, options: Mapping[str, Any]) -> Self:
        further = dict(options)
        head = {name: further.pop(name) for name in ("projection", "dropout") if name in further}
        return replace(self, options=further, **head)

    @property
    def variant(self) -> str:
        return "" if self.projection == "linear" else f"{self.projection} projection\n"

    @property
    def backbone_settings(self) -> dict[str, Any]:
        return super(TimmVision, replace(self, projection="linear", dropout=0.0)).backbone_settings

    @classmethod
    def from_setting(cls, value: str, *, embed_dim: int) -> Self:
        return cls(image_size=_get_timm_size(value), name=value)

    @property
    def description(self) -> str:
        return f"timm's `{self.name}`"

    def build(self, embed_dim: int, *, quick_gelu: bool) -> "nn.Module":
        import timm
        from torch import nn

        _check_timm(self.name)
        _, options = self.timm_model()
        try:
            trunk = timm.create_model(self.name, pretrained=False, num_classes=0, **options)
        except _REFUSALS as error:
            raise ConfigError(f"timm rejects {self.name} at {self.image_size} pixels: {error!r}") from error
        width = getattr(trunk, "head_hidden_size", None) or trunk.num_features
        assert isinstance(width, int)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if self.projection == "mlp":
            from timm.layers.mlp import Mlp

            layers["mlp"] = Mlp(width, 2 * embed_dim, embed_dim, drop=(self.dropout, 0.0), bias=(True, False))
        else:
            layers["proj"] = nn.Linear(width, embed_dim, bias=False)
        return nn.Sequential(OrderedDict(trunk=trunk, head=nn.Sequential(layers)))

    @property
    def projection_prefix(self) -> str:
        return "head."

    def pool_inputs(self, module: "nn.Module", inputs: "Tensor") -> "Tensor":
        return _call_submodule(module, "trunk", inputs)

    def project(self, module: "nn.Module", pooled: "Tensor") -> "Tensor":
        return _call_submodule(module, "head", pooled)

    def replace_channels(self, channels: int) -> Self:
        return replace(self, channels=channels)

    @property
    def hub_repository(self) -> str:
        config = _get_timm_config(self.name)
        return "" if config is None else config.hf_hub_id or ""

    def take_weights(
        self, module: "nn.Module", tensors: Mapping[str, "Tensor"], preprocess: "Preprocess"
    ) -> "tuple[Preprocess, list[str]]":
        import timm

        from clipkit.model.preprocess import INTERPOLATIONS

        _, options = self.timm_model()
        config = _get_timm_config(self.name)
        classifier = () if config is None else config.classifier or ()
        heads = [classifier] if isinstance(classifier, str) else classifier
        classifier_prefixes = tuple(f"{head}." for head in heads)
        weights = {name: value for name, value in tensors.items() if not name.startswith(classifier_prefixes)}
        # as many classes as the overlay has, none: timm checks that the names are complete
        overlay = {"state_dict": weights, "num_classes": 0, "label_offset": 0}
        try:
            trunk = timm.create_model(
                self.name, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=0, **options
            )
        except _REFUSALS as error:
            cause = " ".join(str(error).split())[:200]
            raise CheckpointError(f"not the weights of timm's {self.name}: {cause}") from error
        module.get_submodule("trunk").load_state_dict(trunk.state_dict())
        unused = sorted(tensors.keys() - weights.keys())
        if config is None:
            return preprocess, unused
        if config.interpolation in INTERPOLATIONS:
            preprocess = replace(preprocess, interpolation=config.interpolation)
        return replace(preprocess, mean=config.mean, std=config.std), unused

    def map_layers(self, module: "nn.Module") -> Callable[[str], Layer] | None:
        return _map_backbone_layers(module.get_submodule("trunk"))

    def open_clip_config(self) -> dict[str, Any]:
        if self.options or self.image_size != _get_timm_size(self.name):
            raise ConfigError(f"open_clip can build timm's {self.name} only with the default options")
        return {
            "image_size": self.image_size,
            "timm_model_name": self.name,
            "timm_model_pretrained": False,
            "timm_pool": "",
            "timm_proj": self.projection,
        }

    @property
    def size_step(self) -> int:
        return 0 if self._has_fixed_size else 1

    @property
    def _has_fixed_size(self) -> bool:
        config = _get_timm_config(self.name)
        return config is not None and config.fixed_input_size

    def check_size(self, image_size: int) -> None:
        import torch

        with torch.device("meta"):
            module = replace(self, image_size=image_size).build(8, quick_gelu=False).eval()
            try:
                module(torch.empty(1, self.channels, image_size, image_size))
            except _REFUSALS as error:
                raise ConfigError(f"timm rejects {self.name} at {image_size} pixels: {error!r}") from error

    def timm_model(self) -> tuple[str, dict[str, Any]]:
        sizes = {"img_size": self.image_size} if self._has_fixed_size else {}
        if self.channels != 3:
            sizes["in_chans"] = self.channels
        return self.name, {**self.options, **sizes}


@dataclass(frozen=True, kw_only=True)
class OpenClipText(TextArchitecture):
    """A text tower built by open_clip from ``config``, its ``text_cfg``."""

    context_length: int
    config: Mapping[str, Any]
    any_length = False

    @property
    def description(self) -> str:
        return "a tower of open_clip"

    @property
    def library_tokenizer(self) -> Mapping[str, Any] | None:
        source = self.config.get("hf_tokenizer_name")
        if not source:
            return None
        options = dict(self.config.get("tokenizer_kwargs") or {})
        if self.config.get("tokenizer_mode"):
            options["tokenizer_mode"] = self.config["tokenizer_mode"]
        return {"source": source, "context_length": self.context_length, "options": options}

    def use_tokenizer(self, folder: Path) -> Self:
        source = self.config.get("hf_tokenizer_name")
        mode = self.config.get("tokenizer_mode")
        options = self.config.get("tokenizer_kwargs") or {}
        if not isinstance(options, dict) or options.keys() - _TOKENIZER_OPTIONS:
            raise ConfigError(
                f"tokenizer_kwargs = {options!r} may only have {', '.join(sorted(_TOKENIZER_OPTIONS))}"
            )
        if not source:
            if options:
                raise ConfigError(f"tokenizer_kwargs = {options!r} needs hf_tokenizer_name")
            return self
        if not isinstance(source, str) or mode not in (None, "", "clips"):
            raise ConfigError(f"hf_tokenizer_name = {source!r} or tokenizer_mode = {mode!r} is unknown")
        if not _holds_tokenizer(folder):
            return self
        return replace(self, config={**self.config, "hf_tokenizer_name": str(folder)})

    def build(self, embed_dim: int, *, quick_gelu: bool) -> "nn.Module":
        config = {**self.config, "context_length": self.context_length}
        try:
            _, text = build_towers(embed_dim, _NO_VISION, config, quick_gelu=quick_gelu)
        except _REFUSALS as error:
            raise ConfigError(f"open_clip rejects the tower's configuration: {error!r}") from error
        return _disable_layerdrop(text)

    @property
    def vocab_size(self) -> int:
        return int(self.config.get("vocab_size", 49408))

    @property
    def token_width(self) -> int:
        return int(self.config.get("width", 512))

    @property
    def reads_padding(self) -> bool:
        if self.config.get("embed_cls"):  # a class token, with a mask of the padding
            return False
        return bool(self.config.get("no_causal_mask")) or self.config.get("pool_type") == "last"

    def encode_with_tokens(self, module: "nn.Module", tokens: "Tensor") -> "tuple[Tensor, Tensor]":
        return _call_with_output_tokens(module, tokens)

    def open_clip_config(self) -> dict[str, Any]:
        return {"context_length": self.context_length, **self.config}


@dataclass(frozen=True, kw_only=True)
class TransformersText(TextArchitecture):
    """An encoder of the transformers library, pooled and projected.

    Attributes:
        model: origin of its weights and tokenizer, a folder or a name on the Hugging Face hub.
        config: complete configuration, with which the encoder can be built without ``model``.
        pooling: "mean" over the tokens, "cls" for the first one, "last" for the last one, or "pooler" for the
            encoder's own.
        projection: "linear", "mlp" (one hidden layer), or "none".
        dropout: probability with which values of the hidden layer of "mlp" are dropped in training.
    """

    context_length: int
    model: str
    config: Mapping[str, Any]
    pooling: str = "mean"
    projection: str = "linear"
    dropout: float = field(default=0.0, repr=False)  # not in the hash of a model
    setting = "transformers:FOLDER or NAME"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (("pooling", (*_POOLINGS.values(), "last")), ("projection", _PROJECTIONS)):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} = {value!r} is unknown: {nearest(str(value), allowed)}")
        _check_dropout(self.dropout, self.projection)

    @classmethod
    def from_setting(cls, value: str, *, embed_dim: int) -> Self:
        encoder = describe_encoder(value)
        return cls(
            context_length=encoder.context_length,
            model=encoder.model,
            config=encoder.config,
            pooling=_read_pooling(value),
        )

    def replace_options(self, options: Mapping[str, Any]) -> Self:
        if unknown := options.keys() - {"pooling", "projection", "dropout"}:
            raise ConfigError(
                f"text option {min(unknown)!r} is unknown: known are pooling, projection and dropout"
            )
        return replace(self, **options)

    @property
    def description(self) -> str:
        return f"transformers' `{self.config.get('model_type', 'encoder')}`"

    @property
    def vocab_size(self) -> int:
        return int(self.config.get("vocab_size") or 0)

    @property
    def library_tokenizer(self) -> Mapping[str, Any]:
        return {"source": self.model, "context_length": self.context_length, "trim": True}

    def use_tokenizer(self, folder: Path) -> Self:
        return replace(self, model=str(folder)) if _holds_tokenizer(folder) else self

    def _build_library_model(self) -> Any:
        from transformers import AutoConfig, AutoModel

        values = dict(self.config)
        try:
            config = AutoConfig.for_model(values.pop("model_type"), **values)
            return AutoModel.from_config(config)
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OSError) as error:
            raise ConfigError(f"transformers rejects the encoder of {self.model}: {error!r}") from error

    def build(self, embed_dim: int, *, quick_gelu: bool) -> "nn.Module":
        from clipkit.model.towers import PooledEncoder

        model = self._build_library_model()
        config = model.config
        width = _get_encoder_width(config)
        if self.projection == "none" and width != embed_dim:
            raise ConfigError(f"without a projection {self.model} has dimension {width}, not {embed_dim}")
        encoder = _select_encoder(model)
        if self.pooling == "pooler" and getattr(encoder, "pooler", None) is None:
            raise ConfigError(f"the encoder of {self.model} has no pooler: choose another pooling")
        return PooledEncoder(
            _disable_layerdrop(encoder),
            width,
            embed_dim,
            pad_id=config.pad_token_id,
            pooling=self.pooling,
            projection=self.projection,
            dropout=self.dropout,
        )

    @property
    def projection_prefix(self) -> str:
        return "proj."

    @property
    def backbone_settings(self) -> dict[str, Any]:
        return super(TransformersText, replace(self, projection="linear", dropout=0.0)).backbone_settings

    @property
    def hub_source(self) -> str:
        return self.model

    @property
    def local_config(self) -> Mapping[str, Any] | None:
        folder = Path(self.model)  # may be gone
        return self.config if folder.is_absolute() or folder.exists() else None

    def take_weights(self, module: "nn.Module", tensors: Mapping[str, "Tensor"]) -> None:
        from transformers.utils import logging

        like = self._build_library_model()
        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.CRITICAL)  # what is missing is an error below
        logging.disable_progress_bar()
        try:
            model, report = type(like).from_pretrained(
                None,
                config=like.config,
                state_dict=dict(tensors),
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                dtype="float32",
            )
        except _REFUSALS as error:
            raise CheckpointError(f"not the weights of the encoder {self.model}: {error!r}") from error
        finally:
            logging.set_verbosity(verbosity)
        tower = module.get_submodule("transformer")
        names = tower.state_dict().keys()
        absent = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
        encoder = _select_encoder(model)
        if encoder is not model:
            absent = {name.removeprefix("encoder.") for name in absent}
        if absent := absent & names:
            count = counted(len(absent), "tensor")
            raise CheckpointError(
                f"not the weights of the encoder {self.model}: {count} missing or of another size, such "
                f"as {min(absent)}"
            )
        weights = encoder.state_dict()
        tower.load_state_dict({name: weights[name] for name in names})

    def open_clip_config(self) -> dict[str, Any]:
        names = {pooling: name for name, pooling in _POOLINGS.items()}
        if self.pooling not in names:
            raise ConfigError(f"open_clip has no pooling {self.pooling!r}")
        return {
            "context_length": self.context_length,
            "hf_model_name": self.model,
            "hf_tokenizer_name": self.model,
            "hf_model_pretrained": False,
            "hf_pooler_type": names[self.pooling],
            "hf_proj_type": None if self.projection == "none" else self.projection,
        }

    def map_layers(self, module: "nn.Module") -> Callable[[str], Layer] | None:
        return _ENCODER


def _check_dropout(dropout: float, projection: str) -> None:
    if dropout and projection != "mlp":
        raise ConfigError(f"dropout = {dropout} has no effect without projection = 'mlp'")


def _call_submodule(module: "nn.Module", name: str, inputs: "Tensor") -> "Tensor":
    outputs: Tensor = module.get_submodule(name)(inputs)
    return outputs


def _is_plain_option(value: object) -> bool:
    if isinstance(value, int | float):
        return abs(value) <= _LARGEST
    return value is None or (isinstance(value, str) and len(value) <= 100)


def _call_with_output_tokens(tower: "nn.Module", inputs: "Tensor") -> "tuple[Tensor, Tensor]":
    """Call a transformer of open_clip, which returns its tokens too while ``output_tokens`` is set."""
    tower.output_tokens = True  # type: ignore[assignment]
    try:
        features, tokens = tower(inputs)
    finally:
        tower.output_tokens = False  # type: ignore[assignment]
    return features, tokens


def _disable_layerdrop(tower: "nn.Module") -> "nn.Module":
    """Disable LayerDrop, as in NLLB: ranks that skip different layers wait for each other's gradients."""
    for module in tower.modules():
        if hasattr(module, "layerdrop"):
            module.layerdrop = 0.0  # type: ignore[assignment]
    return tower


def _map_backbone_layers(trunk: "nn.Module") -> Callable[[str], Layer] | None:
    """Map parameters to layers by the patterns that timm's backbone defines."""
    matcher: Any = getattr(trunk, "group_matcher", None)
    groups = matcher(coarse=False) if callable(matcher) else None
    if not isinstance(groups, dict):
        return None
    patterns: list[tuple[re.Pattern[str], int, tuple[int, ...]]] = []
    for group, entry in enumerate(groups.values()):
        if isinstance(entry, str):
            entry = [(entry, None)]
        for pattern, suffix in entry or ():
            patterns.append((re.compile(pattern), group, suffix or ()))

    def find_layer(name: str) -> Layer:
        if not name.startswith("trunk."):
            return None
        for pattern, group, suffix in patterns:
            match = pattern.match(name.removeprefix("trunk."))
            if match is None:
                continue
            if group == 0:
                return STEM
            if 99999 in suffix:  # timm's mark for the last block's layer, such as the last norm: our head
                return None
            return (group, *(int(digits) for digits in match.groups() if digits is not None), *suffix)
        return None

    return find_layer


def _check_timm(name: str, message: str = "timm has no model {0!r}") -> None:
    import timm

    # a name with a schema would be fetched from the hub
    if not timm.is_model(name):
        raise ConfigError(f"{message.format(name)}: {nearest(name, timm.list_models())}")


def _get_timm_config(name: str) -> Any:
    import timm

    return timm.get_pretrained_cfg(name)


def _get_timm_size(name: str) -> int:
    _check_timm(name, "model.image = 'timm:{0}' is unknown")
    config = _get_timm_config(name)
    return 224 if config is None else int(config.input_size[-1])


def _holds_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def describe_encoder(model: str, *, context_length: int = 77) -> TransformersText:
    """Read the configuration of an encoder from a folder or the Hugging Face hub."""
    from transformers import AutoConfig

    from clipkit.files.hub import convert_hub_errors

    with convert_hub_errors(model):
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    _get_encoder_width(config)
    values = json.loads(config.to_json_string(use_diff=False))  # plain values, as they are stored
    return TransformersText(context_length=context_length, model=model, config=values)


def _select_encoder(model: Any) -> Any:
    """Return the encoder of a model with encoder and decoder, otherwise the model."""
    return model.get_encoder() if hasattr(model, "encoder") and hasattr(model, "decoder") else model


def _read_pooling(model: str) -> str:
    """Return the pooling that sentence-transformers stores in the folder of an encoder; "mean" without one."""
    file = Path(model) / "1_Pooling" / "config.json"
    if not file.is_file():
        return "mean"
    modes = {
        "pooling_mode_cls_token": "cls",
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_lasttoken": "last",
    }
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        chosen = [
            name for name, value in stored.items() if name.startswith("pooling_mode_") and value is True
        ]
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    if len(chosen) != 1 or chosen[0] not in modes:
        raise ConfigError(
            f"{file} states the pooling {', '.join(chosen) or 'none'}, which clipkit lacks: set model.text_options"
        )
    return modes[chosen[0]]


def describe_open_clip_encoder(config: Mapping[str, Any]) -> TransformersText:
    """Read the configuration of the encoder of an open_clip ``text_cfg``."""
    for name in ("tokenizer_kwargs", "tokenizer_mode"):
        if config.get(name):
            raise ConfigError(f"{name} = {config[name]!r} is not supported with hf_model_name")
    tower = describe_encoder(config["hf_model_name"], context_length=config.get("context_length", 77))
    pooler = config.get("hf_pooler_type", "mean_pooler")
    if pooler is None:
        pooler = default_pooler(str(tower.config.get("model_type")))
    if pooler not in _POOLINGS:
        raise ConfigError(f"hf_pooler_type = {pooler!r} is unknown: {nearest(str(pooler), _POOLINGS)}")
    pooling = _POOLINGS[pooler]
    if pooling == "pooler" and tower.config.get("is_encoder_decoder"):
        pooling = "cls"  # an encoder of this kind has no pooler
    return TransformersText(
        context_length=tower.context_length,
        model=config.get("hf_tokenizer_name") or tower.model,
        config=tower.config,
        pooling=pooling,
        projection=config.get("hf_proj_type", "mlp") or "none",
    )


def _get_encoder_width(config: Any) -> int:
    for name in ("hidden_size", "d_model", "dim"):
        width = getattr(config, name, None)
        if isinstance(width, int):
            return width
    raise ConfigError(f"the width of an encoder of kind {config.model_type!r} is unknown")

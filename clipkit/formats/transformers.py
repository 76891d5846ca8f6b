"""Convert plain ViT CLIPs between clipkit and transformers' ``CLIPModel``: parameter names and configuration.

transformers has separate projections for queries, keys and values, clipkit a single one. transformers transposes
the projections to the embedding space. ``Siglip2Model`` (SigLIP 2's models for images of variable size) is read
too, as a ``NaFlexTower`` and open_clip's text tower of SigLIP.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.errors import CheckpointError, ConfigError
from clipkit.formats.open_clip import compute_mlp_ratio
from clipkit.model.architectures import (
    Architecture,
    NaFlexTower,
    TextTower,
    VisionTower,
)
from clipkit.model.library_towers import OpenClipText
from clipkit.model.preprocess import Preprocess
from clipkit.model.tokenizer import END_OF_TEXT, START_OF_TEXT
from clipkit.samples.traits import Decoding

# (clipkit's name, transformers' name); names that end with a dot are prefixes
_NAMES = (
    ("logit_scale", "logit_scale"),
    ("visual.class_embedding", "vision_model.embeddings.class_embedding"),
    ("visual.conv1.weight", "vision_model.embeddings.patch_embedding.weight"),
    ("visual.positional_embedding", "vision_model.embeddings.position_embedding.weight"),
    ("visual.ln_pre.", "vision_model.pre_layrnorm."),
    ("visual.transformer.resblocks.", "vision_model.encoder.layers."),
    ("visual.ln_post.", "vision_model.post_layernorm."),
    ("visual.proj", "visual_projection.weight"),
    ("token_embedding.weight", "text_model.embeddings.token_embedding.weight"),
    ("positional_embedding", "text_model.embeddings.position_embedding.weight"),
    ("transformer.resblocks.", "text_model.encoder.layers."),
    ("ln_final.", "text_model.final_layer_norm."),
    ("text_projection", "text_projection.weight"),
)
_BLOCK = (
    ("ln_1.", "layer_norm1."),
    ("ln_2.", "layer_norm2."),
    ("attn.in_proj_", "self_attn."),
    ("attn.out_proj.", "self_attn.out_proj."),
    ("mlp.c_fc.", "mlp.fc1."),
    ("mlp.c_proj.", "mlp.fc2."),
)
_FROM_TRANSFORMERS = [(theirs, ours) for ours, theirs in _NAMES]
_FROM_SIGLIP2 = (
    ("vision_model.embeddings.patch_embedding.weight", "visual.conv1.weight"),
    ("vision_model.embeddings.patch_embedding.bias", "patch_bias"),
    ("vision_model.embeddings.position_embedding.weight", "visual.positional_embedding"),
    ("vision_model.encoder.layers.", "visual.transformer.resblocks."),
    ("vision_model.post_layernorm.", "visual.ln_post."),
    ("vision_model.head.probe", "visual.attn_pool.probe"),
    ("vision_model.head.attention.", "visual.attn_pool.attn."),
    ("vision_model.head.layernorm.", "visual.attn_pool.norm."),
    ("vision_model.head.mlp.fc1.", "visual.attn_pool.mlp.c_fc."),
    ("vision_model.head.mlp.fc2.", "visual.attn_pool.mlp.c_proj."),
    ("text_model.embeddings.token_embedding.weight", "text.token_embedding.weight"),
    ("text_model.embeddings.position_embedding.weight", "text.positional_embedding"),
    ("text_model.encoder.layers.", "text.transformer.resblocks."),
    ("text_model.final_layer_norm.", "text.ln_final."),
    ("text_model.head.", "text.text_projection."),
)
_BLOCK_FROM_TRANSFORMERS = [(theirs, ours) for ours, theirs in reversed(_BLOCK)]
_TRANSPOSED = {"visual.proj", "text_projection"}
_RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
# CLIPImageProcessor's defaults
_SIZES = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}
_PROCESSOR = "preprocessor_config.json"
# Siglip2ImageProcessor's defaults
_SIGLIP2_PROCESSOR = {"patch_size": 16, "max_num_patches": 256, "resample": 2}
_OWN = "clipkit"  # key of clipkit's settings in preprocessor_config.json, which transformers ignores
_QKV = ("q_proj", "k_proj", "v_proj")
_ACTIVATIONS = {"quick_gelu": True, "gelu": False}
# defaults of CLIPVisionConfig and CLIPTextConfig, which a config.json may omit
_VISION: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_channels": 3, "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip
_TEXT: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8,
    "vocab_size": 49408, "max_position_embeddings": 77, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
    "eos_token_id": END_OF_TEXT,
}  # fmt: skip
# those of both towers of Siglip2Config
_SIGLIP2: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
_SIGLIP2_VISION: dict[str, Any] = {
    **_SIGLIP2, "num_channels": 3, "patch_size": 16, "num_patches": 256, "vision_use_head": True,
}  # fmt: skip
_SIGLIP2_TEXT: dict[str, Any] = {
    **_SIGLIP2, "vocab_size": 32000, "max_position_embeddings": 64, "projection_size": None,
}  # fmt: skip


def from_transformers(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], processor: Mapping[str, Any] | None = None
) -> tuple[Architecture, dict[str, Tensor]]:
    """Convert a ``CLIPModel`` or ``Siglip2Model`` to an architecture and tensors with clipkit's names.

    ``processor`` is the content of preprocessor_config.json, which has the number of patches of a ``Siglip2Model``.
    """
    if config.get("model_type") not in ("clip", "siglip2"):
        raise CheckpointError(
            f"config.json describes a {config.get('model_type')!r} model, not a CLIPModel or Siglip2Model"
        )
    if config.get("auto_map"):
        raise CheckpointError("config.json requires custom code (auto_map), which clipkit does not run")
    if config["model_type"] == "siglip2":
        shape = _read_siglip2(config, processor or {})
        return shape, _convert_siglip2(_rename_tensors(tensors, _FROM_SIGLIP2), shape)
    try:
        vision = _read_tower(config, "vision", _VISION)
        text = _read_tower(config, "text", _TEXT)
        activation = vision["hidden_act"]
        if activation != text["hidden_act"] or activation not in _ACTIVATIONS:
            raise ConfigError(
                f"activations {activation!r} and {text['hidden_act']!r} must be the same, quick_gelu or gelu"
            )
        shape = Architecture(
            embed_dim=config.get("projection_dim", 512),
            vision=VisionTower(
                channels=vision["num_channels"],
                image_size=vision["image_size"],
                patch_size=vision["patch_size"],
                width=vision["hidden_size"],
                layers=vision["num_hidden_layers"],
                heads=vision["num_attention_heads"],
                mlp_ratio=compute_mlp_ratio(vision["intermediate_size"], vision["hidden_size"]),
            ),
            text=TextTower(
                width=text["hidden_size"],
                layers=text["num_hidden_layers"],
                heads=text["num_attention_heads"],
                context_length=text["max_position_embeddings"],
                vocab_size=text["vocab_size"],
                mlp_ratio=compute_mlp_ratio(text["intermediate_size"], text["hidden_size"]),
            ),
            quick_gelu=_ACTIVATIONS[activation],
        )
    except (TypeError, ValueError, ArithmeticError, ConfigError) as error:
        raise CheckpointError(f"config.json is invalid: {error}") from error
    return shape, _rename_tensors(tensors, _FROM_TRANSFORMERS)


def _rename_tensors(tensors: Mapping[str, Tensor], names: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    converted: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for theirs, value in tensors.items():
        if theirs.endswith(".position_ids"):  # written by old versions of transformers
            continue
        name = _rename_tensor(theirs, names, _BLOCK_FROM_TRANSFORMERS)
        split = re.fullmatch(r"(.*\.attn\.in_proj_)(q_proj|k_proj|v_proj)\.(weight|bias)", name)
        if split:
            parts.setdefault(split[1] + split[3], {})[split[2]] = value
        else:
            converted[name] = value.T if name in _TRANSPOSED and value.ndim == 2 else value
    for name, three in parts.items():
        if set(three) == set(_QKV) and len({part.shape for part in three.values()}) == 1:
            converted[name] = torch.cat([three[part] for part in _QKV])
    return converted


def _read_siglip2(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Architecture:
    try:
        vision = {**_SIGLIP2_VISION, **config.get("vision_config", {})}
        text = {**_SIGLIP2_TEXT, **config.get("text_config", {})}
        for tower in (vision, text):
            for name in ("hidden_act", "layer_norm_eps"):
                if tower[name] != _SIGLIP2[name]:
                    raise ConfigError(f"{name} = {tower[name]!r} is not supported, only {_SIGLIP2[name]!r}")
        width = vision["hidden_size"]
        embed_dim = text["projection_size"] or text["hidden_size"]
        if embed_dim != width or vision["vision_use_head"] is not True:
            raise ConfigError(
                "the image tower must have a head, and both towers must have features of one size"
            )
        patches = {**_SIGLIP2_PROCESSOR, **processor}
        side = vision["patch_size"]
        if patches["patch_size"] != side:
            raise ConfigError(f"patch_size = {side!r} is not that of {_PROCESSOR}, {patches['patch_size']!r}")
        return Architecture(
            embed_dim=embed_dim,
            vision=NaFlexTower(
                channels=vision["num_channels"],
                image_size=math.isqrt(vision["num_patches"]) * side,
                patch_size=side,
                tokens=patches["max_num_patches"],
                width=width,
                layers=vision["num_hidden_layers"],
                heads=vision["num_attention_heads"],
                mlp_ratio=compute_mlp_ratio(vision["intermediate_size"], width),
                pool="map",
                norms="vit",
                tanh_gelu=True,
            ),
            text=OpenClipText(
                context_length=text["max_position_embeddings"],
                config={
                    "width": text["hidden_size"],
                    "layers": text["num_hidden_layers"],
                    "heads": text["num_attention_heads"],
                    "mlp_ratio": compute_mlp_ratio(text["intermediate_size"], text["hidden_size"]),
                    "vocab_size": text["vocab_size"],
                    "no_causal_mask": True,
                    "proj_bias": True,
                    "pool_type": "last",
                    "norm_kwargs": {"eps": _SIGLIP2["layer_norm_eps"]},
                    "act_kwargs": {"approximate": "tanh"},
                },
            ),
            logit_bias=True,
        )
    except (TypeError, ValueError, ArithmeticError, ConfigError) as error:
        raise CheckpointError(f"config.json is invalid: {error}") from error


def _convert_siglip2(tensors: dict[str, Tensor], shape: Architecture) -> dict[str, Tensor]:
    """Convert tensors that have clipkit's names to clipkit's parameters; missing ones are reported later.

    Patches are cut with channels last. The bias of their projection becomes part of the position embeddings, whose
    interpolation has weights that sum to 1. Features are not projected, so the projection is the identity.
    """
    assert shape.vision.budget is not None
    side = shape.vision.budget.side
    try:
        bias = tensors.pop("patch_bias")
        patches = tensors["visual.conv1.weight"].unflatten(1, (side, side, -1))
        tensors["visual.conv1.weight"] = patches.permute(0, 3, 1, 2).contiguous()
        # the first position is that of a class token, which this tower does not have
        positions = F.pad(tensors["visual.positional_embedding"] + bias, (0, 0, 1, 0))
        tensors["visual.positional_embedding"] = positions
    except (LookupError, RuntimeError) as error:
        raise CheckpointError(
            "the embeddings of patches and of their positions are missing, or of other sizes"
        ) from error
    tensors["visual.proj"] = torch.eye(shape.embed_dim)
    if "visual.attn_pool.probe" in tensors:
        tensors["visual.attn_pool.probe"] = tensors["visual.attn_pool.probe"].flatten()
    return tensors


def read_end_of_text(config: Mapping[str, Any]) -> int:
    """Return the token at which a ``CLIPModel`` reads text features; see ``clipkit.model.tokenizer``."""
    text = _read_tower(config, "text", _TEXT)
    end = text["eos_token_id"]
    size = text["vocab_size"]
    if type(end) is not int or not 0 <= end < size:
        raise CheckpointError(
            f"config.json: eos_token_id = {end!r} is not in the vocabulary of {size} tokens"
        )
    return end


def _read_tower(config: Mapping[str, Any], kind: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of one tower; as in transformers, ``*_config_dict`` in old files takes precedence."""
    settings = config.get(f"{kind}_config_dict")
    if settings is None:
        settings = config.get(f"{kind}_config") or {}
    tower = {**defaults, **settings}
    if tower.get("layer_norm_eps", 1e-5) != 1e-5:
        raise ConfigError(f"{kind}: layer_norm_eps = {tower['layer_norm_eps']!r} is not supported, only 1e-5")
    return tower


def to_transformers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert clipkit's state dict to the names of ``CLIPModel``."""
    theirs: dict[str, Tensor] = {}
    for name_in_clipkit, value in tensors.items():
        name = _rename_tensor(name_in_clipkit, _NAMES, _BLOCK)
        if ".attn.in_proj_" in name_in_clipkit:
            stem, kind = name.rsplit(".", 1)
            for part, rows in zip(_QKV, value.chunk(3), strict=True):
                theirs[f"{stem}.{part}.{kind}"] = rows.contiguous()
        else:
            theirs[name] = (value.T if name_in_clipkit in _TRANSPOSED else value).contiguous()
    return theirs


def _rename_tensor(name: str, names: Any, block: Any) -> str:
    for source, target in names:
        if name == source or (source.endswith(".") and name.startswith(source)):
            name = target + name[len(source) :]
            index, dot, rest = name[len(target) :].partition(".")
            if dot and index.isdecimal():
                for inner, outer in block:
                    if rest.startswith(inner):
                        return f"{target}{index}.{outer}{rest[len(inner) :]}"
            break
    return name


def build_configs(shape: Architecture, preprocess: Preprocess) -> dict[str, dict[str, Any]]:
    """Return the configuration files of ``CLIPModel`` and ``CLIPImageProcessor``, by name."""
    vision, text = shape.get_plain_towers()
    activation = "quick_gelu" if shape.quick_gelu else "gelu"
    both = {"hidden_act": activation, "layer_norm_eps": 1e-5, "projection_dim": shape.embed_dim}
    size = preprocess.image_size
    decoding = preprocess.decoding.to_dict()
    own_settings = {_OWN: decoding} if decoding else {}
    return {
        "config.json": {
            "architectures": ["CLIPModel"],
            "model_type": "clip",
            "projection_dim": shape.embed_dim,
            "vision_config": {
                **both,
                "model_type": "clip_vision_model",
                "hidden_size": vision.width,
                "intermediate_size": int(vision.mlp_ratio * vision.width),
                "num_hidden_layers": vision.layers,
                "num_attention_heads": vision.heads,
                "num_channels": vision.channels,
                "image_size": vision.image_size,
                "patch_size": vision.patch_size,
            },
            "text_config": {
                **both,
                "model_type": "clip_text_model",
                "hidden_size": text.width,
                "intermediate_size": int(text.mlp_ratio * text.width),
                "num_hidden_layers": text.layers,
                "num_attention_heads": text.heads,
                "max_position_embeddings": text.context_length,
                "vocab_size": text.vocab_size,
                "bos_token_id": START_OF_TEXT,
                "eos_token_id": END_OF_TEXT,
                "pad_token_id": END_OF_TEXT,
            },
        },
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "do_convert_rgb": vision.channels == 3,
            "do_resize": True,
            "size": {"shortest_edge": size},
            "resample": 3,  # bicubic
            "do_center_crop": True,
            "crop_size": {"height": size, "width": size},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(preprocess.mean),
            "image_std": list(preprocess.std),
            **own_settings,
        },
    }


def preprocess_from_transformers(
    config: Mapping[str, Any], image_size: int, channels: int = 3, *, is_siglip2: bool = False
) -> Preprocess:
    """Convert preprocessor_config.json for a model of the given image size; {} means the default preprocessing."""
    values: dict[str, Any]
    if is_siglip2:
        values = {name: value for name, value in config.items() if value is not None}
        config = _SIGLIP2_PROCESSOR | {"image_mean": [0.5] * channels, "image_std": [0.5] * channels} | values
    where = _PROCESSOR
    for step in ("do_resize", "do_rescale", "do_normalize"):
        if config.get(step) not in (None, True):
            raise CheckpointError(
                f"{where}: {step} = {config[step]!r} is not supported: CLIP requires this step"
            )
    if config.get("rescale_factor") not in (None, 1 / 255):
        raise CheckpointError(f"{where}: rescale_factor = {config['rescale_factor']!r} is not 1/255")
    resample = config.get("resample")
    if resample is None:
        resample = 3
    if not isinstance(resample, int) or resample not in _RESAMPLE:
        raise CheckpointError(f"{where}: resample = {resample!r} is neither bilinear nor bicubic")
    values = {"interpolation": _RESAMPLE[resample]}
    if not is_siglip2:
        values["resize_mode"] = _read_resize_mode(config)
    for theirs, ours in (("image_mean", "mean"), ("image_std", "std")):
        if config.get(theirs) is not None:
            values[ours] = config[theirs]
    own_settings = config.get(_OWN, {})
    allowed = [field.name for field in fields(Decoding) if field.name != "channels"]
    if not isinstance(own_settings, Mapping) or own_settings.keys() - set(allowed):
        raise CheckpointError(f"{where}: {_OWN} = {own_settings!r} has keys other than {', '.join(allowed)}")
    values.update(own_settings)
    clips = Preprocess(image_size=image_size).replace_channels(channels)
    return Preprocess.from_dict({**clips.to_dict(), **values})


def _read_resize_mode(config: Mapping[str, Any]) -> str:
    sizes = []
    for name, default in _SIZES.items():
        edges = config.get(name) or default  # a single number in old files
        sizes.append(dict(edges) if isinstance(edges, Mapping) else {"shortest_edge": edges})
    size, crop = sizes
    cropped = config.get("do_center_crop") in (None, True)
    sides = [*size.values(), *(crop.values() if cropped else ())]
    shortest = size.keys() == {"shortest_edge"} and cropped
    squash = size.keys() == {"height", "width"}
    if not (shortest or squash) or any(side != sides[0] for side in sides):
        raise CheckpointError(
            f"{_PROCESSOR}: size {size} and crop_size {crop if cropped else None} do not describe one square: "
            "expected the shortest edge and a crop of it, or height and width"
        )
    return "squash" if squash else "shortest"

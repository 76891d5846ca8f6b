"""Convert plain ViT CLIPs between clipkit and transformers' ``CLIPModel``: parameter names and configuration.

transformers has separate projections for queries, keys and values, clipkit a single one. transformers transposes
the projections to the embedding space.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from clipkit.errors import CheckpointError, ConfigError
from clipkit.formats.open_clip import compute_mlp_ratio
from clipkit.model.architectures import Architecture, TextTower, VisionTower
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
_BLOCK_FROM_TRANSFORMERS = [(theirs, ours) for ours, theirs in reversed(_BLOCK)]
_TRANSPOSED = {"visual.proj", "text_projection"}
_RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
# CLIPImageProcessor's defaults
_SIZES = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}
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


def from_transformers(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[Architecture, dict[str, Tensor]]:
    """Convert the configuration and state dict of a ``CLIPModel`` to an architecture and clipkit's names."""
    if config.get("model_type") != "clip":
        raise CheckpointError(f"config.json describes a {config.get('model_type')!r} model, not a CLIPModel")
    if config.get("auto_map"):
        raise CheckpointError("config.json requires custom code (auto_map), which clipkit does not run")
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
    converted: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for theirs, value in tensors.items():
        if theirs.endswith(".position_ids"):  # written by old versions of transformers
            continue
        name = _rename_tensor(theirs, _FROM_TRANSFORMERS, _BLOCK_FROM_TRANSFORMERS)
        split = re.fullmatch(r"(.*\.attn\.in_proj_)(q_proj|k_proj|v_proj)\.(weight|bias)", name)
        if split:
            parts.setdefault(split[1] + split[3], {})[split[2]] = value
        else:
            converted[name] = value.T if name in _TRANSPOSED and value.ndim == 2 else value
    for name, three in parts.items():
        if set(three) == set(_QKV) and len({part.shape for part in three.values()}) == 1:
            converted[name] = torch.cat([three[part] for part in _QKV])
    return shape, converted


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


def preprocess_from_transformers(config: Mapping[str, Any], image_size: int, channels: int = 3) -> Preprocess:
    """Convert preprocessor_config.json for a model of the given image size; {} means CLIP's preprocessing."""
    where = "preprocessor_config.json"
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
            f"{where}: size {size} and crop_size {crop if cropped else None} do not describe one square: expected "
            "the shortest edge and a crop of it, or height and width"
        )
    values: dict[str, Any] = {
        "interpolation": _RESAMPLE[resample],
        "resize_mode": "squash" if squash else "shortest",
    }
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

"""Architectures by name: clipkit's, and those of open_clip, timm and transformers.

    ViT-B-32                       clipkit's
    open_clip:RN50                 any configuration of open_clip
    NAME-quickgelu                 either of these with QuickGELU
    timm:resnet50                  image tower: any backbone of timm
    transformers:FOLDER or NAME    text tower: any encoder of transformers
    cbow                           text tower: CLIP's continuous bag of words
    words                          text tower: mean of word vectors, for bag-of-words prediction
    classes:FILE                   in place of the text tower: a classification head, with one class name per line

open_clip's configurations become clipkit's own towers if possible: these have the same parameters and features and
are faster.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from clipkit.errors import ConfigError, nearest
from clipkit.files.open_clip import config_files, lacks_image_tower
from clipkit.model.architectures import (
    ARCHITECTURES,
    NORM_EPS,
    QUICKGELU,
    Architecture,
    BagOfWords,
    ClassTable,
    Decoder,
    ImageArchitecture,
    NaFlexTower,
    PixelTower,
    TextArchitecture,
    TextTower,
    VisionTower,
    WordTable,
    get_architecture,
    list_choices,
    select_tower,
)
from clipkit.model.library_towers import (
    OpenClipText,
    OpenClipVision,
    TimmVision,
    TransformersText,
    describe_open_clip_encoder,
)

OPEN_CLIP = "open_clip:"

# Kinds of towers by the name that is stored with weights. An entry is the class of the tower's architecture, which
# provides all that other code needs to know (``ImageArchitecture``, ``TextArchitecture``).
IMAGE_TOWERS: dict[str, type[ImageArchitecture]] = {
    "vit": VisionTower,
    "naflex": NaFlexTower,
    "open_clip_vision": OpenClipVision,
    "timm": TimmVision,
    "pixels": PixelTower,
}
TEXT_TOWERS: dict[str, type[TextArchitecture]] = {
    "transformer": TextTower,
    "bag_of_words": BagOfWords,
    "word_table": WordTable,
    "class_table": ClassTable,
    "open_clip_text": OpenClipText,
    "transformers": TransformersText,
}

# open_clip's fields that clipkit's towers support, with open_clip's defaults; and fields that must have the default
_VISION_SIZES: dict[str, Any] = {
    "layers": 12, "width": 768, "head_width": 64, "mlp_ratio": 4.0, "patch_size": 16, "image_size": 224,
}  # fmt: skip
_PLAIN_VISION: dict[str, Any] = {
    "ls_init_value": None, "attentional_pool": False, "no_ln_pre": False, "pos_embed_type": "learnable",
    "final_ln_after_pool": False, "pool_type": "tok", "act_kwargs": None, "norm_kwargs": None, "block_type": None,
    "qk_norm": False, "scaled_cosine_attn": False, "scale_heads": False, "scale_attn_inner": False,
    "scale_attn": False, "scale_fc": False, "timm_model_name": None,
}  # fmt: skip
_DECODER = {"context_length": 77, "width": 512, "heads": 8, "layers": 12}
_TEXT_SIZES: dict[str, Any] = {
    "context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12, "mlp_ratio": 4.0,
}  # fmt: skip
_PLAIN_TEXT: dict[str, Any] = {
    "ls_init_value": None, "embed_cls": False, "pad_id": 0, "no_causal_mask": False, "final_ln_after_pool": False,
    "pool_type": "argmax", "proj_bias": False, "proj_type": "linear", "act_kwargs": None, "norm_kwargs": None,
    "block_type": None, "qk_norm": False, "scaled_cosine_attn": False, "scale_heads": False,
    "scale_attn_inner": False, "scale_attn": False, "scale_fc": False, "hf_model_name": None,
    "hf_tokenizer_name": None, "tokenizer_mode": None, "tokenizer_kwargs": None,
}  # fmt: skip
# fields that do not change features
_IDLE_VISION = {
    "patch_dropout", "output_tokens", "attn_pooler_queries", "attn_pooler_heads", "timm_model_pretrained",
    "timm_pool", "timm_proj", "timm_proj_bias", "timm_drop", "timm_drop_path",
}  # fmt: skip
_IDLE_TEXT = {"output_tokens", "eos_id", "hf_model_pretrained", "hf_proj_type", "hf_pooler_type"}
# names of fields in earlier versions of open_clip, and fields that it has removed with the value they must have
_RENAMED = {"pooler_type": "hf_pooler_type", "proj": "hf_proj_type", "n_queries": "attn_pooler_queries"}
_REMOVED = {"global_average_pool": False, "input_patchnorm": False}
_TOP = {
    "embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "custom_text", "multimodal_cfg", "init_logit_scale",
    "init_logit_bias", "nonscalar_logit_scale",
}  # fmt: skip


def create_architecture(
    name: str | Architecture,
    *,
    image: str = "",
    image_options: Mapping[str, Any] | None = None,
    text: str = "",
    text_options: Mapping[str, Any] | None = None,
    image_size: int = 0,
    image_tokens: int = 0,
    context_length: int = 0,
) -> Architecture:
    """Create an architecture from the values of settings.

    Args:
        name: a name of clipkit, ``open_clip:NAME``, or an architecture to change.
        image: selects one of ``IMAGE_TOWERS`` in place of the architecture's own, such as ``timm:NAME``; or "".
        image_options: its arguments, see ``TowerArchitecture.replace_options``.
        text: selects one of ``TEXT_TOWERS``, such as ``cbow``; or "".
        text_options: its options, see ``TowerArchitecture.replace_options``.
        image_size: side of the images in pixels; 0 for the default.
        image_tokens: most patches of an image of variable size; 0 for square images.
        context_length: maximum number of tokens; 0 for the default.
    """
    if isinstance(name, Architecture):
        check_names("", image, text)
        shape = name
    else:
        check_names(name, image, text, called="name")
        is_open_clip = name.startswith(OPEN_CLIP)
        shape = from_open_clip(open_clip_config(name)) if is_open_clip else get_architecture(name)
    image_selection = select_tower(image, IMAGE_TOWERS)
    if image_selection is not None:
        image_kind, value = image_selection
        vision = image_kind.from_setting(value, embed_dim=shape.embed_dim)
        shape = replace(shape, vision=vision.replace_options(image_options or {}))
    elif image_options:
        raise ConfigError("image_options require model.image, such as timm:NAME")
    text_selection = select_tower(text, TEXT_TOWERS)
    if text_selection is not None:
        text_kind, value = text_selection
        tower = text_kind.from_setting(value, embed_dim=shape.embed_dim)
        shape = replace(shape, text=tower.replace_options(text_options or {}))
    elif text_options:
        raise ConfigError("text_options require model.text, such as transformers:NAME")
    return shape.replace_size(image_size=image_size, image_tokens=image_tokens, context_length=context_length)


def check_names(name: str, image: str = "", text: str = "", *, called: str = "model.name") -> None:
    """Check names, each of which may be empty, without loading a library."""
    if name.startswith(OPEN_CLIP):
        base = _remove_quickgelu(name.removeprefix(OPEN_CLIP))
        if lacks_image_tower(base):
            raise ConfigError(
                f"{called} = {name!r} is not a CLIP architecture: open_clip's configuration has no image tower or "
                "no text tower"
            )
        if base not in config_files():
            hint = nearest(name.removeprefix(OPEN_CLIP), config_files())
            raise ConfigError(f"{called} = {name!r} is not an architecture of open_clip: {hint}")
    elif name:
        has_name = name in ARCHITECTURES or name.removesuffix(QUICKGELU) in ARCHITECTURES
        if not has_name and _remove_quickgelu(name) in config_files():
            raise ConfigError(
                f"{called} = {name!r} is an architecture of open_clip: write {OPEN_CLIP + name!r}"
            )
        get_architecture(name, called=called)
    for tower, setting, kinds in (("image", image, IMAGE_TOWERS), ("text", text, TEXT_TOWERS)):
        if setting and select_tower(setting, kinds) is None:
            raise ConfigError(f"model.{tower} = {setting!r} is unknown: give {list_choices(kinds)}")


def open_clip_config(name: str) -> dict[str, Any]:
    """Return open_clip's configuration of ``open_clip:NAME``."""
    name = name.removeprefix(OPEN_CLIP)
    base = _remove_quickgelu(name)
    config = json.loads(config_files()[base].read_text(encoding="utf-8"))
    assert isinstance(config, dict)
    if name != base:
        config["quick_gelu"] = True
    return config


def _remove_quickgelu(name: str) -> str:
    return name if name in config_files() else name.removesuffix(QUICKGELU)


def from_open_clip(config: Mapping[str, Any]) -> Architecture:
    """Convert a configuration of open_clip (``model_cfg``).

    CoCa's decoder of captions is left out if its text tower is one of transformers.
    """
    unknown = sorted(config.keys() - _TOP)
    if unknown:
        raise ConfigError(f"the open_clip configuration has unknown fields: {', '.join(unknown)}")
    try:
        vision = _rename_fields(config, "vision_cfg", {*_VISION_SIZES, *_PLAIN_VISION, *_IDLE_VISION})
        text = _rename_fields(config, "text_cfg", {*_TEXT_SIZES, *_PLAIN_TEXT, *_IDLE_TEXT})
        shape = Architecture(
            embed_dim=config["embed_dim"],
            vision=_convert_vision(vision),
            text=_convert_text(text),
            quick_gelu=config.get("quick_gelu", False),
            logit_bias=config.get("init_logit_bias") is not None,
        )
        decoder = dict(config.get("multimodal_cfg") or {})
        if not decoder or decoder.get("ls_init_value") is not None:
            return shape
        decoder = {**_DECODER, **{key: value for key, value in decoder.items() if key in _DECODER}}
        decoder["vocab_size"] = text.get("vocab_size", 49408)
        _, width = shape.vision.token_shape(shape.embed_dim) or (0, 0)
        if not width == shape.text.token_width == decoder["width"]:
            return shape
        return replace(shape, decoder=Decoder(feed="text", **decoder))
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"the open_clip configuration is not supported: {error!r}") from error


def _rename_fields(config: Mapping[str, Any], tower: str, allowed: set[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in dict(config[tower]).items():
        if name in _REMOVED and value == _REMOVED[name]:
            continue
        current = _RENAMED.get(name, name)
        if current not in allowed:
            raise ConfigError(
                f"{tower} has the unknown field {name[:80]!r} = {str(value)[:80]!r}: {nearest(name[:80], allowed)}"
            )
        if fields.setdefault(current, value) != value:
            raise ConfigError(f"{tower} has two values of {current}: {fields[current]!r} and {value!r}")
    return fields


def _convert_vision(config: dict[str, Any]) -> ImageArchitecture:
    size = config.get("image_size", 224)
    if isinstance(size, list | tuple):
        if len(set(size)) != 1:
            raise ConfigError(f"image_size = {size} is not square")
        size = size[0]
    norms = {"no_ln_pre": True, "norm_kwargs": {"eps": NORM_EPS["vit"]}}
    is_vit = {name: config.get(name) for name in norms} == norms
    clips = {name: value for name, value in config.items() if name not in norms} if is_vit else config
    is_plain = _is_plain(clips, _VISION_SIZES, _PLAIN_VISION, _IDLE_VISION)
    if not is_plain or isinstance(config.get("layers"), list | tuple):
        further = {key: value for key, value in config.items() if key not in ("image_size", "output_tokens")}
        return OpenClipVision(image_size=size, config={**further, "timm_model_pretrained": False})
    sizes = {**_VISION_SIZES, **config}
    return VisionTower(
        image_size=size,
        patch_size=sizes["patch_size"],
        width=sizes["width"],
        layers=sizes["layers"],
        heads=sizes["width"] // sizes["head_width"],
        mlp_ratio=sizes["mlp_ratio"],
        norms="vit" if is_vit else "clip",
    )


def _convert_text(config: dict[str, Any]) -> TextArchitecture:
    if config.get("hf_model_name"):
        return describe_open_clip_encoder(config)
    if not _is_plain(config, _TEXT_SIZES, _PLAIN_TEXT, _IDLE_TEXT):
        further = {
            key: value for key, value in config.items() if key not in ("context_length", "output_tokens")
        }
        return OpenClipText(context_length=config.get("context_length", 77), config=further)
    return TextTower(**{key: config.get(key, default) for key, default in _TEXT_SIZES.items()})


def _is_plain(
    config: Mapping[str, Any], supported: Mapping[str, Any], plain: Mapping[str, Any], idle: set[str]
) -> bool:
    further = config.keys() - supported.keys() - idle
    return all(key in plain and config[key] == plain[key] for key in further)


def to_open_clip(shape: Architecture) -> dict[str, Any]:
    """Invert ``from_open_clip``; ConfigError if open_clip has no such tower."""
    if shape.vision.channels != 3:
        raise ConfigError(f"open_clip has no image towers of {shape.vision.channels} channels")
    config: dict[str, Any] = {
        "embed_dim": shape.embed_dim,
        "vision_cfg": shape.vision.open_clip_config(),
        "text_cfg": shape.text.open_clip_config(),
    }
    if not shape.text.part_of_clip:
        config["custom_text"] = True
    if shape.quick_gelu:
        config["quick_gelu"] = True
    if shape.logit_bias:
        config["init_logit_bias"] = 0.0
    decoder = shape.decoder
    if decoder is not None and decoder.feed == "text" and not shape.is_native:
        config["multimodal_cfg"] = {name: getattr(decoder, name) for name in (*_DECODER, "vocab_size")}
        config["vision_cfg"] |= {"output_tokens": True}
        config["text_cfg"] |= {"output_tokens": True}
    return config

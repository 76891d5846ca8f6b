"""From what a config line says to an architecture: clipkit's own names, open_clip's, timm's and transformers'.

    ViT-B-32                       clipkit's own
    open_clip:RN50                 whatever open_clip has a config for
    NAME-quickgelu                 either of these with QuickGELU, whether or not it is listed
    timm:resnet50                  as the image tower: any backbone of timm
    transformers:FOLDER or NAME    as the text tower: any encoder of transformers
    cbow                           as the text tower: CLIP's continuous bag of words
    classes:FILE                   in the text tower's place: a classifier's head, a class name a line

What open_clip describes and clipkit's own towers can do becomes own towers: they have the same parameters and
give the same features, faster.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from clipkit.errors import ConfigError, nearest
from clipkit.files.open_clip import config_files, without_image_tower
from clipkit.model import IMAGE_TOWERS, TEXT_TOWERS
from clipkit.model.architectures import (
    ARCHITECTURES,
    QUICKGELU,
    Architecture,
    ImageArchitecture,
    TextArchitecture,
    TextTower,
    TowerArchitecture,
    VisionTower,
    named,
    selected,
)
from clipkit.model.library_towers import OpenClipText, OpenClipVision, describe_open_clip_encoder

__all__ = ["architecture", "check_names", "from_open_clip", "open_clip_config", "to_open_clip"]

OPEN_CLIP = "open_clip:"

# open_clip's fields that our own towers have, with open_clip's defaults; and those that must be at their default
_OWN_VISION: dict[str, Any] = {
    "layers": 12, "width": 768, "head_width": 64, "mlp_ratio": 4.0, "patch_size": 16, "image_size": 224,
}  # fmt: skip
_PLAIN_VISION: dict[str, Any] = {
    "ls_init_value": None, "attentional_pool": False, "no_ln_pre": False, "pos_embed_type": "learnable",
    "final_ln_after_pool": False, "pool_type": "tok", "act_kwargs": None, "norm_kwargs": None, "block_type": None,
    "qk_norm": False, "scaled_cosine_attn": False, "scale_heads": False, "scale_attn_inner": False,
    "scale_attn": False, "scale_fc": False, "timm_model_name": None,
}  # fmt: skip
_OWN_TEXT: dict[str, Any] = {
    "context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12, "mlp_ratio": 4.0,
}  # fmt: skip
_PLAIN_TEXT: dict[str, Any] = {
    "ls_init_value": None, "embed_cls": False, "pad_id": 0, "no_causal_mask": False, "final_ln_after_pool": False,
    "pool_type": "argmax", "proj_bias": False, "proj_type": "linear", "act_kwargs": None, "norm_kwargs": None,
    "block_type": None, "qk_norm": False, "scaled_cosine_attn": False, "scale_heads": False,
    "scale_attn_inner": False, "scale_attn": False, "scale_fc": False, "hf_model_name": None,
    "hf_tokenizer_name": None, "tokenizer_mode": None, "tokenizer_kwargs": None,
}  # fmt: skip
# without a part in the features: dropout in training, what else is returned, where weights come from
_IDLE = {
    "patch_dropout", "output_tokens", "attn_pooler_queries", "attn_pooler_heads", "timm_model_pretrained",
    "timm_pool", "timm_proj", "timm_proj_bias", "timm_drop", "timm_drop_path", "eos_id", "hf_model_pretrained",
    "hf_proj_type", "hf_pooler_type",
}  # fmt: skip
_TOP = {
    "embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "custom_text", "multimodal_cfg", "init_logit_scale",
    "init_logit_bias", "nonscalar_logit_scale",
}  # fmt: skip


def architecture(
    name: str, *, image: str = "", text: str = "", image_size: int = 0, context_length: int = 0
) -> Architecture:
    """What a config line means.

    Args:
        name: one of clipkit's own, or ``open_clip:NAME``.
        image: ``timm:NAME`` for another image tower, or "".
        text: ``transformers:FOLDER or NAME``, ``cbow`` or ``classes:FILE`` for another text tower, or "".
        image_size: side of the images in pixels, 0 for the name's own.
        context_length: longest text in tokens, 0 for the name's own.

    Raises:
        ConfigError: a name is unknown, or its library or configuration cannot be had.
    """
    check_names(name, image, text, called="name")
    shape = from_open_clip(open_clip_config(name)) if name.startswith(OPEN_CLIP) else named(name)
    if vision := selected(image, IMAGE_TOWERS):
        shape = replace(shape, vision=vision[0].from_setting(vision[1], embed_dim=shape.embed_dim))
    if words := selected(text, TEXT_TOWERS):
        shape = replace(shape, text=words[0].from_setting(words[1], embed_dim=shape.embed_dim))
    return shape.resized(image_size=image_size, context_length=context_length)


def check_names(name: str, image: str = "", text: str = "", *, called: str = "model.name") -> None:
    """Refuse names that cannot be right, without loading a library.

    Args:
        name: as for ``architecture``; ``image`` and ``text`` likewise.
        called: what the name is called where it was given, for a message.

    Raises:
        ConfigError: says what is known.
    """
    known = config_files()
    if name.startswith(OPEN_CLIP):
        theirs = _listed(name.removeprefix(OPEN_CLIP))
        if without_image_tower(theirs):
            raise ConfigError(
                f"{called} = {name!r} is no CLIP architecture: open_clip's configuration of that name lacks "
                "an image tower or a text tower"
            )
        if theirs not in known:
            hint = nearest(name.removeprefix(OPEN_CLIP), known)
            raise ConfigError(f"{called} = {name!r} is no architecture of open_clip: {hint}")
    elif _listed(name) in known and {name, name.removesuffix(QUICKGELU)}.isdisjoint(ARCHITECTURES):
        raise ConfigError(f"{called} = {name!r} is an architecture of open_clip: write {OPEN_CLIP + name!r}")
    else:
        named(name, called=called)
    if image and selected(image, IMAGE_TOWERS) is None:
        raise ConfigError(f"model.image = {image!r} is unknown: give {_usage(IMAGE_TOWERS)}")
    if text and selected(text, TEXT_TOWERS) is None:
        raise ConfigError(f"model.text = {text!r} is unknown: give {_usage(TEXT_TOWERS)}")


def _usage(kinds: Mapping[str, type[TowerArchitecture]]) -> str:
    *others, last = [kind.setting for kind in kinds.values() if kind.setting]
    return f"{', '.join(others)}, or {last}" if others else last


def open_clip_config(name: str) -> dict[str, Any]:
    """The configuration that open_clip has for ``open_clip:NAME``, as it is stored in that package."""
    name = name.removeprefix(OPEN_CLIP)
    config = json.loads(config_files()[_listed(name)].read_text(encoding="utf-8"))
    assert isinstance(config, dict)
    return config if name == _listed(name) else {**config, "quick_gelu": True}


def _listed(name: str) -> str:
    """The name under which open_clip has an architecture that may have been asked for with QuickGELU."""
    return name if name in config_files() else name.removesuffix(QUICKGELU)


def from_open_clip(config: Mapping[str, Any]) -> Architecture:
    """The architecture that one of open_clip's configurations (``model_cfg``) describes.

    CoCa's caption decoder is left out: the two towers are what CLIP has.

    Raises:
        ConfigError: a field is unknown, missing, or of another kind.
    """
    if unknown := sorted(config.keys() - _TOP):
        raise ConfigError(f"the open_clip configuration has unknown fields: {', '.join(unknown)}")
    try:
        vision, text = dict(config["vision_cfg"]), dict(config["text_cfg"])
        return Architecture(
            embed_dim=config["embed_dim"],
            vision=_vision(vision),
            text=_text(text),
            quick_gelu=config.get("quick_gelu", False),
            logit_bias=config.get("init_logit_bias") is not None,
        )
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"the open_clip configuration is not one this version knows: {error!r}") from error


def _vision(config: dict[str, Any]) -> ImageArchitecture:
    size = config.get("image_size", 224)
    if isinstance(size, list | tuple):
        if len(set(size)) != 1:
            raise ConfigError(f"image_size = {size} is not square")
        size = size[0]
    if not _is_plain(config, _OWN_VISION, _PLAIN_VISION) or isinstance(config.get("layers"), list | tuple):
        kept = {key: value for key, value in config.items() if key not in ("image_size", "output_tokens")}
        return OpenClipVision(image_size=size, config={**kept, "timm_model_pretrained": False})
    own = {**_OWN_VISION, **config, "image_size": size}
    return VisionTower(
        image_size=size,
        patch_size=own["patch_size"],
        width=own["width"],
        layers=own["layers"],
        heads=own["width"] // own["head_width"],
        mlp_ratio=own["mlp_ratio"],
    )


def _text(config: dict[str, Any]) -> TextArchitecture:
    if config.get("hf_model_name"):
        return describe_open_clip_encoder(config)
    if not _is_plain(config, _OWN_TEXT, _PLAIN_TEXT):
        kept = {key: value for key, value in config.items() if key not in ("context_length", "output_tokens")}
        return OpenClipText(context_length=config.get("context_length", 77), config=kept)
    return TextTower(**{key: config.get(key, default) for key, default in _OWN_TEXT.items()})


def _is_plain(config: Mapping[str, Any], own: Mapping[str, Any], plain: Mapping[str, Any]) -> bool:
    return all(key in own or key in _IDLE or (key in plain and config[key] == plain[key]) for key in config)


def to_open_clip(shape: Architecture) -> dict[str, Any]:
    """The inverse of ``from_open_clip``: the ``model_cfg`` with which open_clip builds the same model.

    Raises:
        ConfigError: open_clip has no such tower.
    """
    config: dict[str, Any] = {
        "embed_dim": shape.embed_dim,
        "vision_cfg": shape.vision.open_clip_config(),
        "text_cfg": shape.text.open_clip_config(),
    }
    if shape.text.plain is None:
        config["custom_text"] = True
    if shape.quick_gelu:
        config["quick_gelu"] = True
    if shape.logit_bias:
        config["init_logit_bias"] = 0.0
    return config

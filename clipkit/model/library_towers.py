"""Towers that other libraries build, behind the same calls as our own.

An image tower takes normalized float images (B, 3, S, S), a text tower int64 tokens (B, L); both give features
(B, O), not normalized. Parameter names are those of open_clip's models with the same tower.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from clipkit.errors import ConfigError, nearest
from clipkit.files.hub import from_hub
from clipkit.files.open_clip import build_towers
from clipkit.model.architectures import OpenClipText, OpenClipVision, TimmVision, TransformersText

__all__ = [
    "TransformersTower", "build_text", "build_vision", "describe_encoder",
    "describe_open_clip_encoder",
]  # fmt: skip

# the smallest of each tower, built where only the other one is wanted
_NO_VISION: dict[str, Any] = {"image_size": 2, "patch_size": 2, "width": 64, "layers": 1}
_NO_TEXT: dict[str, Any] = {"context_length": 2, "vocab_size": 2, "width": 64, "heads": 1, "layers": 1}
_POOLINGS = {"mean_pooler": "mean", "cls_pooler": "pooler", "cls_last_hidden_state_pooler": "cls"}


def build_vision(tower: OpenClipVision | TimmVision, *, embed_dim: int, quick_gelu: bool) -> nn.Module:
    """An image tower with fresh weights of its library's own drawing.

    Raises:
        ConfigError: the library does not know the tower, or refuses its configuration.
    """
    if isinstance(tower, TimmVision):
        return _timm_tower(tower, embed_dim)
    backbone = tower.config.get("timm_model_name")
    if backbone:
        _check_timm(str(backbone))
    config = {**tower.config, "image_size": tower.image_size}
    visual, _ = _open_clip(embed_dim, config, _NO_TEXT, quick_gelu=quick_gelu)
    if backbone:
        _fit_size(visual, tower.image_size)
    return visual


def _fit_size(visual: nn.Module, size: int) -> None:
    """open_clip builds timm's towers for the size that belongs to their name, and some take no other."""
    trunk = visual.get_submodule("trunk")
    patches = getattr(trunk, "patch_embed", None)
    if not getattr(patches, "strict_img_size", False) or getattr(patches, "img_size", None) == (size, size):
        return
    if (resize := getattr(trunk, "set_input_size", None)) is not None:
        try:
            resize((size, size))
        except (TypeError, ValueError, KeyError, AssertionError, RuntimeError, ArithmeticError) as error:
            raise ConfigError(f"the tower does not take pictures of {size} pixels: {error!r}") from error


def build_text(tower: OpenClipText | TransformersText, *, embed_dim: int, quick_gelu: bool) -> nn.Module:
    """A text tower with fresh weights of its library's own drawing.

    Raises:
        ConfigError: the library refuses its configuration.
    """
    if isinstance(tower, TransformersText):
        return TransformersTower(tower, embed_dim)
    config = {**tower.config, "context_length": tower.context_length}
    _, text = _open_clip(embed_dim, _NO_VISION, config, quick_gelu=quick_gelu)
    return text


def _open_clip(
    embed_dim: int, vision: Mapping[str, Any], text: Mapping[str, Any], *, quick_gelu: bool
) -> tuple[nn.Module, nn.Module]:
    try:
        return build_towers(embed_dim, vision, text, quick_gelu=quick_gelu)
    except (TypeError, ValueError, KeyError, AssertionError, RuntimeError, ArithmeticError) as error:
        raise ConfigError(f"open_clip refuses the tower's configuration: {error!r}") from error


def _check_timm(name: str) -> None:
    import timm

    # a name with a schema would be fetched from the hub
    if not timm.is_model(name):
        raise ConfigError(f"timm has no model {name!r}: {nearest(name, timm.list_models())}")


def _timm_tower(tower: TimmVision, embed_dim: int) -> nn.Module:
    import timm

    _check_timm(tower.name)
    options = dict(tower.options)
    known = timm.get_pretrained_cfg(tower.name)
    if known is not None and known.fixed_input_size:
        options["img_size"] = tower.image_size  # others take pictures of any size
    try:
        trunk = timm.create_model(tower.name, pretrained=False, num_classes=0, **options)
    except (TypeError, ValueError, KeyError, AssertionError, RuntimeError, ArithmeticError) as error:
        raise ConfigError(f"timm refuses {tower.name} at {tower.image_size} pixels: {error!r}") from error
    width = getattr(trunk, "head_hidden_size", None) or trunk.num_features
    assert isinstance(width, int)
    head = nn.Sequential(OrderedDict(proj=nn.Linear(width, embed_dim, bias=False)))
    return nn.Sequential(OrderedDict(trunk=trunk, head=head))


class TransformersTower(nn.Module):
    """An encoder of transformers with random weights, pooled and projected.

    Of a model with an encoder and a decoder, the encoder. Positions that hold the padding token are masked.
    """

    def __init__(self, tower: TransformersText, output_dim: int) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModel

        values = dict(tower.config)
        try:
            config = AutoConfig.for_model(values.pop("model_type"), **values)
            model = AutoModel.from_config(config)
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OSError) as error:
            raise ConfigError(f"transformers refuses the encoder of {tower.model}: {error!r}") from error
        width = _width(config)
        self.transformer = model.get_encoder() if config.is_encoder_decoder else model
        if tower.pooling != "pooler" and getattr(self.transformer, "pooler", None) is not None:
            self.transformer.pooler = None
        self.pad_id, self.pooling = config.pad_token_id, tower.pooling
        self.proj: nn.Module = nn.Identity()
        if tower.projection == "linear":
            self.proj = nn.Linear(width, output_dim, bias=False)
        elif tower.projection == "mlp":
            hidden = (width + output_dim) // 2
            layers = (
                nn.Linear(width, hidden, bias=False),
                nn.GELU(),
                nn.Linear(hidden, output_dim, bias=False),
            )
            self.proj = nn.Sequential(*layers)
        elif width != output_dim:
            raise ConfigError(f"without a projection {tower.model} gives {width} numbers, not {output_dim}")

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, L) int64 → (B, O)."""
        visible = torch.ones_like(tokens) if self.pad_id is None else (tokens != self.pad_id).long()
        out = self.transformer(input_ids=tokens, attention_mask=visible)
        hidden = out.last_hidden_state  # (B, L, D)
        if self.pooling == "mean":
            pooled = (hidden * visible[..., None]).sum(dim=1) / visible.sum(dim=-1, keepdim=True)
        else:
            pooled = hidden[:, 0] if self.pooling == "cls" else out.pooler_output
        features: Tensor = self.proj(pooled)
        return features


def describe_encoder(model: str, *, context_length: int = 77) -> TransformersText:
    """What a checkpoint must record of an encoder, read from a folder or the Hugging Face hub.

    Raises:
        ConfigError: there is none, no network, or it would need code of its own to run.
    """
    from transformers import AutoConfig

    with from_hub(model):
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    _width(config)
    values = json.loads(config.to_json_string(use_diff=False))  # as it will be stored
    return TransformersText(context_length=context_length, model=model, config=values)


def describe_open_clip_encoder(config: Mapping[str, Any]) -> TransformersText:
    """The same from the ``text_cfg`` of an open_clip architecture that has such a text tower."""
    tower = describe_encoder(config["hf_model_name"], context_length=config.get("context_length", 77))
    pooler = config.get("hf_pooler_type", "mean_pooler")
    if pooler not in _POOLINGS:
        raise ConfigError(f"hf_pooler_type = {pooler!r} is unknown: {nearest(str(pooler), _POOLINGS)}")
    pooling = _POOLINGS[pooler]
    if pooling == "pooler" and tower.config.get("is_encoder_decoder"):
        pooling = "cls"  # an encoder of that kind has no pooler
    return TransformersText(
        context_length=tower.context_length,
        model=config.get("hf_tokenizer_name") or tower.model,
        config=tower.config,
        pooling=pooling,
        projection=config.get("hf_proj_type", "mlp"),
    )


def _width(config: Any) -> int:
    for name in ("hidden_size", "d_model", "dim"):
        if isinstance(width := getattr(config, name, None), int):
            return width
    raise ConfigError(f"an encoder of the kind {config.model_type!r} does not say how wide it is")

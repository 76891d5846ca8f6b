"""Measure published values, also with other settings, of which some may reach values that a model does not reach.

Letters: N images or texts, L tokens.
"""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from clipkit import CLIP, encode_image, encode_text
from clipkit.errors import ClipkitError
from clipkit.model import Preprocess
from eval.vectors.published import PublishedValues

_CLIPS = Preprocess(image_size=1)
_CLIP = {"mean": _CLIPS.mean, "std": _CLIPS.std}
_HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
# settings of each part of a model; those of one row are set together
_TABLE: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "preprocessing": (
        *(_CLIP, _HALF, {"mean": (0.0,) * 3, "std": (1.0,) * 3}),
        {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},  # ImageNet's
        *({"interpolation": name} for name in ("bicubic", "bilinear")),
        *({"resize_mode": name} for name in ("shortest", "longest", "squash")),
        *(_CLIP | {"resize_mode": "shortest", "interpolation": name} for name in ("bicubic", "bilinear")),
        *(_HALF | {"resize_mode": "squash", "interpolation": name} for name in ("bicubic", "bilinear")),
    ),
    "images": ({"channels": "blue, green, red"},),
    "tokenizer": (
        *({"letters": name} for name in ("lower case", "lower case without punctuation")),
        *({"start token": "none"}, {"end token": "none"}),
        *({"padding": token} for token in (0, 1, "end token")),
        *({"padding after the first": token} for token in (0, 1)),
        *({"context length": length} for length in ("longest text", 16, 32, 40, 52, 64, 72, 77, 256)),
    ),
    "weights": (
        *({"logit_scale.exp()": scale} for scale in (1.0, 100.0)),
        *({"logit_bias": bias} for bias in (0.0, -10.0)),
    ),
    "image tower": (
        *({"pool": name} for name in ("class", "mean", "mean_norm")),
        *({"pool_type": name} for name in ("tok", "avg")),
        *({"timm_pool": name} for name in ("", "avg", "map", "token")),
    ),
    "text tower": (
        *({"pool_type": name} for name in ("first", "last", "argmax", "eos")),
        *({"pooling": name} for name in ("mean", "cls", "last", "pooler")),
    ),
    "architecture": ({"quick_gelu": True}, {"quick_gelu": False}),
}
# errors of settings that do not fit a model
_MISFITS = (ClipkitError, RuntimeError, AssertionError, TypeError, ValueError, LookupError, AttributeError)


def measure_values(
    model: CLIP,
    published: PublishedValues,
    images: Sequence[Any],
    part: str = "",
    settings: Mapping[str, Any] | None = None,
) -> list[Tensor]:
    """Return the values of each table of expected values, with other settings of one part of the model."""
    changes = settings or {}
    preprocess, tokenizer = model.preprocess, model.tokenizer
    try:
        if part == "preprocessing":
            model.preprocess = replace(preprocess, **changes)
            model.reset_constants()
        elif part == "images":
            images = [np.asarray(image.convert("RGB"))[..., ::-1].copy() for image in images]
        elif part == "tokenizer":
            varied: Any = partial(_tokenize, tokenizer, changes)
            model.tokenizer = varied
        changed = _rebuild_model(model, part, changes)
        image_features = encode_image(images, changed)
        text_features = encode_text(published.texts, changed)
    finally:
        model.preprocess, model.tokenizer = preprocess, tokenizer
        model.reset_constants()
    with torch.autocast("cpu", enabled=False):  # features are on the CPU
        cosines = image_features @ text_features.T  # (N, T)
    model_bias = 0.0 if model.logit_bias is None else model.logit_bias.item()
    bias = changes.get("logit_bias", model_bias)
    measured = []
    for expected in published.expected:
        scale = expected.scale
        if scale is None:
            scale = changes.get("logit_scale.exp()", model.logit_scale.exp().item())
        logits = scale * cosines + bias
        values = {
            "cosines": cosines,
            "logits": logits,
            "probabilities": logits.softmax(dim=-1),
            "sigmoids": logits.sigmoid(),
            "image features": image_features,
            "text features": text_features,
        }
        measured.append(values[expected.kind][:, : len(expected.values[0])])
    return measured


def explain_failure(model: CLIP, published: PublishedValues, images: Sequence[Image.Image]) -> list[str]:
    """Describe the settings that reach the published values, of which NaN are unknown."""
    explanations = []
    for part, rows in _TABLE.items():
        reached: list[Mapping[str, Any]] = []
        for settings in rows:
            if part == "preprocessing":  # leave out what the model has
                current = asdict(model.preprocess)
                settings = {name: value for name, value in settings.items() if current[name] != value}
            if not settings or any(fewer.items() <= settings.items() for fewer in reached):
                continue
            # warnings about images are those of the model's own settings
            with suppress(*_MISFITS), warnings.catch_warnings(action="ignore"):
                measured = measure_values(model, published, images, part, settings)
                if values_agree(measured, published):
                    reached.append(settings)
        for settings in reached:
            named = ", ".join(f"{name} = {value}" for name, value in settings.items())
            explanations.append(f"{named} in the {part}")
    return explanations


def values_agree(measured: Sequence[Tensor], published: PublishedValues) -> bool:
    """Return whether all values are within the tolerances."""
    for values, expected in zip(measured, published.expected, strict=True):
        published_values = torch.tensor(expected.values)
        agrees = (values - published_values).abs() <= expected.tolerance
        if not (agrees | published_values.isnan()).all():
            return False
    return True


def _rebuild_model(model: CLIP, part: str, changes: Mapping[str, Any]) -> CLIP:
    """Return a model with the same weights and other settings of its towers; the same model for other parts."""
    shape = model.architecture
    if part == "architecture":
        shape = replace(shape, **changes)
    elif part in ("image tower", "text tower"):
        name = "vision" if part == "image tower" else "text"
        tower: Any = getattr(shape, name)
        if not changes.keys() <= {field.name for field in fields(tower)}:
            changes = {"config": {**tower.config, **changes}}  # of the library that builds the tower
        shape = replace(shape, **{name: replace(tower, **changes)})
    if shape == model.architecture:
        return model
    changed = CLIP(shape, preprocess=model.preprocess, tokenizer=model.tokenizer)
    changed.load_state_dict(model.state_dict())
    return changed.to(model.logit_scale.device).eval()


def _tokenize(tokenizer: Callable[[Any], Tensor], changes: Mapping[str, Any], texts: Sequence[str]) -> Tensor:
    """Return tokens (N, L) that differ from those of a tokenizer."""
    if "letters" in changes:
        texts = [text.lower() for text in texts]
    if changes.get("letters") == "lower case without punctuation":
        texts = [re.sub(r"[^\w\s]", "", text.replace("_", " ")) for text in texts]
    tokens = tokenizer([*texts, ""])
    padding = int(tokens[-1, -1])
    positions = torch.arange(1, tokens.shape[1] + 1)
    lengths = ((tokens != padding) * positions).amax(dim=1, keepdim=True)[:-1]
    tokens = tokens[:-1]
    if "start token" in changes:
        return F.pad(tokens[:, 1:], (0, 1), value=padding)
    if "end token" in changes:
        return tokens.scatter(1, lengths - 1, padding)
    for name, first in (("padding", 0), ("padding after the first", 1)):
        if name in changes:
            token = tokens[0, lengths[0] - 1] if changes[name] == "end token" else changes[name]
            return torch.where(positions <= lengths + first, tokens, token)
    length = changes.get("context length", tokens.shape[1])
    if length == "longest text":
        length = int(lengths.max())
    return F.pad(tokens, (0, length - tokens.shape[1]), value=padding)

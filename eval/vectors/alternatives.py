"""Measure published values, also with other settings, of which one or two may reach values that a model misses.

Letters: N images or texts, L tokens.
"""

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import fields, replace
from functools import partial
from itertools import combinations
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
# mean and std of all channels
_NORMALIZATIONS = {
    "CLIP's": (_CLIPS.mean, _CLIPS.std),
    "ImageNet's": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "0.5 and 0.5": ((0.5,) * 3, (0.5,) * 3),
    "0 and 1": ((0.0,) * 3, (1.0,) * 3),
}
# part of the model, setting and values
_TABLE: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("preprocessing", "mean and std", tuple(_NORMALIZATIONS)),
    ("preprocessing", "interpolation", ("bicubic", "bilinear")),
    ("preprocessing", "resize_mode", ("shortest", "longest", "squash")),
    ("preprocessing", "channels", ("blue, green, red",)),
    ("tokenizer", "letters", ("lower case", "lower case without punctuation")),
    ("tokenizer", "start token", ("none",)),
    ("tokenizer", "end token", ("none",)),
    ("tokenizer", "padding", (0, 1, "end token")),
    ("tokenizer", "padding after the first", (0, 1)),
    ("tokenizer", "context length", ("longest text", 16, 32, 40, 52, 64, 72, 77, 256)),
    ("scores", "logit_scale.exp()", (1.0, 100.0)),
    ("scores", "logit_bias", (0.0, -10.0)),
    ("image tower", "pool", ("class", "mean", "mean_norm")),
    ("image tower", "pool_type", ("tok", "avg")),
    ("image tower", "timm_pool", ("", "avg", "map", "token")),
    ("text tower", "pool_type", ("first", "last", "argmax", "eos")),
    ("text tower", "pooling", ("mean", "cls", "last", "pooler")),
    ("architecture", "quick_gelu", (True, False)),
)
Alternative = tuple[str, str, Any]
ALTERNATIVES: list[Alternative] = [(part, name, value) for part, name, values in _TABLE for value in values]
_TOWERS = {"image tower": "vision", "text tower": "text"}
# errors of alternatives that do not fit a model
_MISFITS = (ClipkitError, RuntimeError, AssertionError, TypeError, ValueError, LookupError, AttributeError)


class Measurement:
    """The values of a model for published inputs, with its own settings or with alternatives."""

    def __init__(self, model: CLIP, published: PublishedValues, images: Sequence[Image.Image]) -> None:
        self.model, self.published, self.images = model, published, images
        self._preprocess, self._tokenizer = model.preprocess, model.tokenizer
        self._features: dict[Any, Tensor] = {}

    def measure(self, alternatives: Sequence[Alternative] = ()) -> list[Tensor]:
        """Return the values of each table of expected values."""
        images = self._encode(encode_image, self.images, alternatives, "preprocessing", "image tower")
        texts = self._encode(encode_text, self.published.texts, alternatives, "tokenizer", "text tower")
        cosines = images @ texts.T  # (N, T)
        bias = self.model.logit_bias
        changes = _select_values(alternatives, "scores")
        shift = changes.get("logit_bias", 0.0 if bias is None else bias.item())
        measured = []
        for expected in self.published.expected:
            scale = expected.scale or self.model.logit_scale.exp().item()
            logits = changes.get("logit_scale.exp()", scale) * cosines + shift
            values = {
                "cosines": cosines,
                "logits": logits,
                "probabilities": logits.softmax(dim=-1),
                "sigmoids": logits.sigmoid(),
                "image features": images,
                "text features": texts,
            }
            measured.append(values[expected.kind][:, : len(expected.values[0])])
        return measured

    def reaches_values(self, alternatives: Sequence[Alternative]) -> bool:
        """Return whether all values agree with the published ones, of which NaN are unknown."""
        for values, expected in zip(self.measure(alternatives), self.published.expected, strict=True):
            published = torch.tensor(expected.values)
            agrees = (values - published).abs() <= expected.tolerance
            if not (agrees | published.isnan()).all():
                return False
        return True

    def explain_failure(self) -> Sequence[tuple[Alternative, ...]]:
        """Return the alternatives that reach the published values; if there are none, pairs for the same towers."""
        singles = [(alternative,) for alternative in ALTERNATIVES]
        if reached := [single for single in singles if self.reaches_values(single)]:
            return reached
        own = self.measure()
        effective: list[Alternative] = []
        for single in singles:
            same_towers = single[0][0] in ("preprocessing", "tokenizer", "scores")
            if same_towers and not all(map(torch.equal, own, self.measure(single))):
                effective += single
        return [pair for pair in combinations(effective, 2) if self.reaches_values(pair)]

    def _encode(
        self, encode: Callable[..., Tensor], inputs: Any, alternatives: Sequence[Alternative], *parts: str
    ) -> Tensor:
        relevant = tuple(one for one in alternatives if one[0] in (*parts, "architecture"))
        if (encode, relevant) not in self._features:
            features = torch.full((len(inputs), self.model.dim), math.nan)
            with warnings.catch_warnings(), suppress(*_MISFITS) if relevant else nullcontext():
                if relevant:  # the model's own settings have given the same warnings
                    warnings.simplefilter("ignore")
                model = self._vary_model(relevant)
                if ("preprocessing", "channels", "blue, green, red") in relevant:
                    inputs = [np.asarray(image.convert("RGB"))[..., ::-1].copy() for image in inputs]
                features = encode(inputs, model)
            self._features[encode, relevant] = features
        return self._features[encode, relevant]

    def _vary_model(self, alternatives: Sequence[Alternative]) -> CLIP:
        """Return the model with other preprocessing or tokens, or one of another architecture with its weights."""
        model, shape = self.model, self.model.architecture
        shape = replace(shape, **_select_values(alternatives, "architecture"))
        for part, name in _TOWERS.items():
            tower: Any = getattr(shape, name)
            values = _select_values(alternatives, part)
            if not values.keys() <= {field.name for field in fields(tower)}:
                values = {"config": {**tower.config, **values}}  # of the library that builds the tower
            shape = replace(shape, **{name: replace(tower, **values)})
        if shape != model.architecture:
            model = CLIP(shape)
            model.load_state_dict(self.model.state_dict())
            model.to(self.model.logit_scale.device).eval()
        changes = _select_values(alternatives, "preprocessing")
        changes.pop("channels", None)
        if "mean and std" in changes:
            changes["mean"], changes["std"] = _NORMALIZATIONS[changes.pop("mean and std")]
        model.preprocess = replace(self._preprocess, **changes)
        model.reset_constants()
        tokenize: Any = self._tokenizer
        if changes := _select_values(alternatives, "tokenizer"):
            tokenize = partial(_tokenize, self._tokenizer, changes)
        model.tokenizer = tokenize
        return model


def _select_values(alternatives: Sequence[Alternative], part: str) -> dict[str, Any]:
    return {name: value for changed, name, value in alternatives if changed == part}


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
    if "end token" in changes:
        tokens = tokens.scatter(1, lengths - 1, padding)
    for name, first in (("padding", 0), ("padding after the first", 1)):
        if name in changes:
            padding = changes[name]
            if padding == "end token":
                padding = int(tokens[0, lengths[0] - 1])
            tokens = torch.where(positions <= lengths + first, tokens, padding)
    if "start token" in changes:
        tokens = F.pad(tokens[:, 1:], (0, 1), value=padding)
    length = changes.get("context length", tokens.shape[1])
    if length == "longest text":
        length = int(lengths.max())
    return F.pad(tokens, (0, length - tokens.shape[1]), value=padding)

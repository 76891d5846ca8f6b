"""The configuration of a run: frozen dataclasses, validated on construction. Does not import torch.

``setting(…)`` defines each field with its documentation and valid values.
"""

import json
import math
import re
import sys
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from clipkit.errors import ConfigError, nearest
from clipkit.files.terminal import shown as shown_url, without_secrets
from clipkit.model.architectures import TextArchitecture, selected
from clipkit.model.names import TEXT_TOWERS, check_names
from clipkit.samples.depth import parse_pixel_range
from clipkit.samples.traits import color_of

__all__ = [
    "MOST", "RENAMED", "CaptionConfig", "CheckpointConfig", "Config", "DataConfig", "DistillConfig", "EvalConfig",
    "ImageGptConfig", "LockConfig", "LogConfig", "LossConfig", "MaskedConfig", "ModelConfig", "OptimConfig",
    "PixelsConfig", "Section", "SmallConfig", "ViewsConfig", "Within", "changes", "fits", "imported", "late",
    "load_config", "require", "setting", "settings_reference", "shown", "shown_settings", "text_of", "to_toml",
]  # fmt: skip


MOST = 2**40  # larger than any sensible count, small enough to compute indices with
_SHOWN = 200  # characters of a value in a message
_MANY_EPOCHS = 50  # print a note above this number of epochs
_TEXT, _WITHIN, _REGISTRY = "text", "within", "registry"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Within:
    """The valid values of a setting, as text and as a predicate."""

    words: str
    holds: Callable[[Any], bool]


def _at_least(least: float) -> Within:
    return Within(words=f"at least {least}", holds=lambda value: value >= least)


def _above(bound: float, *, at_most: float = math.inf) -> Within:
    words = f"above {bound}" + ("" if at_most == math.inf else f", at most {at_most:,}")
    return Within(words=words, holds=lambda value: bound < value <= at_most)


def _between(least: float, most: float) -> Within:
    shown_most = "2^40" if most == MOST else str(most)
    return Within(words=f"{least} to {shown_most}", holds=lambda value: least <= value <= most)


_POSITIVE = Within(words="at least 1", holds=lambda value: all(one >= 1 for one in value))
_WEIGHTS = Within(words="above 0", holds=lambda value: all(one > 0 for one in value))
_BELOW_ONE = Within(words="at least 0 and below 1", holds=lambda value: 0 <= value < 1)


def _one_of(*names: str) -> Within:
    *others, last = (name or '""' for name in names)
    words = f"{', '.join(others)} or {last}"
    return Within(words=words, holds=lambda value: value in names)


def imported(path: str) -> Any:
    """Import "module:name".

    Registries are looked up each time a setting is checked: their modules are in higher layers than this one, and
    entries may be added at run time.
    """
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def late(path: str) -> Callable[..., Any]:
    """Return a function that imports "module:name" when called, so that registries do not import torch."""

    def call(*arguments: Any, **named: Any) -> Any:
        return imported(path)(*arguments, **named)

    return call


def setting(default: T, text: str, within: Within | None = None, *, registry: str = "") -> T:
    """Define a field of a configuration.

    Args:
        default: default value.
        text: description for ``train.py --settings``, without the valid values.
        within: the valid values; None for all values of the type.
        registry: "module:NAME" of a dict whose keys are the valid values; the entries' summaries are appended to
            the text.
    """
    return field(default=default, metadata={_TEXT: text, _WITHIN: within, _REGISTRY: registry})


def text_of(one: Field[Any]) -> str:
    """Return the description of a field; "" if it has none."""
    text = cast(str, one.metadata.get(_TEXT, ""))
    if path := one.metadata.get(_REGISTRY):
        entries = [(name, getattr(entry, "summary", "")) for name, entry in imported(path).items()]
        text = " ".join([text, *(f"{name}: {summary}." for name, summary in entries if summary)])
    return text


def fits(one: Field[Any]) -> Within | None:
    """Return the valid values of a field; None if all values of its type are valid."""
    if path := one.metadata.get(_REGISTRY):
        return _one_of(*imported(path))
    return cast(Within | None, one.metadata.get(_WITHIN))


class Section:
    """Base class of configuration sections; validates settings on construction."""

    section: ClassVar[str] = ""  # name of the section followed by a dot

    def __post_init__(self) -> None:
        for one in fields(cast(Any, self)):
            name, value = self.section + one.name, getattr(self, one.name)
            path = one.metadata.get(_REGISTRY)
            if path and value not in (known := imported(path)):
                raise ConfigError(f"{name} = {shown(value)} is unknown: {nearest(value, known)}")
            if (within := fits(one)) is not None:
                require(within.holds(value), name, value, f"expected {within.words}")

    def _is_default(self, name: str) -> bool:
        return bool(getattr(self, name) == getattr(type(self), name))


def require(holds: bool, name: str, value: object, wanted: str) -> None:
    """Raise ConfigError with the message ``wanted`` unless ``holds``."""
    if not holds:
        raise ConfigError(f"{name} = {shown(value)} is invalid: {wanted}")


def _require_use(name: str, value: object, other: str, used: bool) -> None:
    """Raise ConfigError unless ``used``: the setting has no effect without ``other``."""
    if not used:
        raise ConfigError(f"{name} = {shown(value)} has no effect unless {other} is set")


def shown(value: object) -> str:
    """Format a value for a message; TOML may contain integers (0xff…) with more digits than Python prints."""
    try:
        text = _literal(value) if isinstance(value, tuple) else repr(value)
    except ValueError:
        return "a number with thousands of digits"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Training data and how it is loaded."""

    section = "data."
    train: str | tuple[str, ...] = setting(
        "glyphs",
        "Image–caption pairs: a built-in corpus (glyphs, emoji or cues), folder, tar, brace pattern, table or URL, "
        "or a list of these.",
    )
    weights: tuple[float, ...] = setting(
        (), "Fraction of each batch drawn from each source; empty: sources are concatenated."
    )
    image: str = setting(
        "",
        'Member of each sample with the image, such as "img_content"; empty: the first with an image\'s extension.',
    )
    captions: tuple[str, ...] = setting(
        ("txt",),
        'Sources of captions: "txt" for the caption file, other members such as "sci.txt", or JSON fields, such as '
        '"syn.text" of KEY.syn.json; "captions" alone: all captions of an image.',
    )
    caption_choice: str = setting(
        "first",
        "Which caption to use: the first one present, one at random, one drawn by data.caption_weights, or all, "
        "each as a separate sample.",
        _one_of("first", "random", "weighted", "all"),
    )
    caption_count: int = setting(
        1,
        "Number of captions of each image in a step, with data.caption_choice=first or random; the image is "
        "encoded once, and compared as if it were in the batch with each. Images with fewer captions repeat them.",
        _between(1, 1000),
    )
    caption_weights: tuple[float, ...] = setting(
        (), "Relative frequency of each of data.captions, with data.caption_choice=weighted."
    )
    caption_templates: tuple[str, ...] = setting(
        (), 'Templates applied to captions, such as "a photo of {}"; one is chosen at random.'
    )
    caption_prefix: str = setting("", "Text added before each caption.")
    negatives: str = setting(
        "",
        "JSON field with wrong captions of an image, one or a list, as negatives of this image alone (NegCLIP); "
        "one is chosen at random.",
    )
    filters: tuple[str, ...] = setting(
        (), 'Conditions on JSON fields, such as "width >= 256"; samples must satisfy all of them.'
    )
    scores: str = setting(
        "", "Name of the scores that filters refer to as score.COLUMN, printed by python -m data score."
    )
    fraction: float = setting(
        1.0,
        "Fraction of the samples to use, chosen by a hash of shard names and keys; a smaller fraction is a subset "
        "of a larger one.",
        Within(words="above 0 and at most 1", holds=lambda value: 0 < value <= 1),
    )
    last: str = setting(
        "drop",
        "Samples that do not fill a batch at the end of an epoch: drop them, or wrap them into the next epoch.",
        _one_of("drop", "wrap"),
    )
    resample: bool = setting(False, "Draw samples with replacement instead of each sample once per epoch.")
    cache_gb: float = setting(
        100.0,
        "Gigabytes of remote shards that each machine caches on disk; 0 reads samples over the network.",
        _between(0, MOST),
    )
    workers: int = setting(
        2, "Loader processes of each rank; 0 loads in the training process.", _between(0, 512)
    )
    window: int = setting(64, "Number of shards whose samples are shuffled together.", _between(1, MOST))
    crop_scale: float = setting(
        0.9,
        "Minimum area of a random crop as a fraction of the image; 1: center crop.",
        _above(0, at_most=1),
    )
    flip: float = setting(
        0.0,
        "Probability of a horizontal flip; unsuitable if captions distinguish left from right.",
        _between(0, 1),
    )
    color_jitter: float = setting(
        0.0,
        "Maximum relative change of brightness, contrast and saturation; hue changes by up to a quarter of it.",
        _between(0, 2),
    )
    grayscale: float = setting(0.0, "Probability of converting an image to grayscale.", _between(0, 1))
    scaled_decode: bool = setting(
        False, "Decode large JPEGs at reduced size: faster; pixel values change by about 0.7 of 255."
    )
    nvjpeg: bool = setting(
        False, "Decode plain JPEGs on the GPU with torchcodec; pixel values differ by rounding."
    )
    truncated: str = setting(
        "error",
        "Truncated shards: raise an error before training, or use the samples of the intact part.",
        _one_of("error", "use"),
    )
    max_bad: float = setting(
        0.05,
        "Fraction of samples drawn, counting repeats, that may be bad before the run saves and stops; 0 allows "
        "none. It applies to at least 1,000 samples: 0.05 always allows 50 bad samples.",
        _between(0, 1),
    )

    def __post_init__(self) -> None:
        sources, captions = self.sources, self.captions
        require(bool(sources) and all(sources), "data.train", self.train, "expected at least one source")
        for name, weights, of, count in (
            ("data.weights", self.weights, "data.train", len(sources)),
            ("data.caption_weights", self.caption_weights, "data.captions", len(captions)),
        ):
            require(len(weights) in (0, count), name, weights, f"expected one for each of {of}: {count}")
            require(all(weight > 0 for weight in weights), name, weights, "expected numbers above 0")
        require(bool(captions) and all(captions), "data.captions", captions, "expected at least one name")
        for name in captions:
            field = f"{name.removesuffix('.json')}.FIELD"
            require(
                not name.endswith(".json"), "data.captions", name, f"expected a field of it, such as {field}"
            )
        weighted, name = self.caption_choice == "weighted", "data.caption_weights"
        if weighted:
            require(bool(self.caption_weights), name, (), "expected one for each of data.captions")
        elif self.caption_weights:
            _require_use(name, self.caption_weights, "data.caption_choice=weighted", weighted)
        for one in self.caption_templates:
            require("{}" in one, "data.caption_templates", one, "expected {} in place of the caption")
        several = f"cannot be combined with data.caption_count = {self.caption_count}"
        single = self.caption_count == 1
        choices = single or self.caption_choice in ("first", "random")
        require(choices, "data.caption_choice", self.caption_choice, several)
        require(single or not self.negatives, "data.negatives", self.negatives, several)
        changed = bool(self.negatives and self.caption_templates)
        require(
            not changed, "data.caption_templates", self.caption_templates, "expected none with data.negatives"
        )
        super().__post_init__()
        both = self.nvjpeg and self.scaled_decode
        require(not both, "data.nvjpeg", True, "cannot be combined with data.scaled_decode")

    @property
    def sources(self) -> tuple[str, ...]:
        """``train`` as a tuple, whichever way it was given."""
        return (self.train,) if isinstance(self.train, str) else self.train

    @property
    def shown_sources(self) -> tuple[str, ...]:
        """``sources`` without secrets in URLs."""
        return tuple(map(shown_url, self.sources))


@dataclass(frozen=True, kw_only=True)
class PixelsConfig(Section):
    """From image files to pixels: recorded with the model, and applied by everything that loads it."""

    section = "pixels."
    range: str | tuple[float, ...] | tuple[tuple[float, ...], ...] = setting(
        "auto",
        "Values of 16-bit, 32-bit and float images that become black and white, such as 0,4095, or a list of such "
        "pairs, one for each channel; dtype: the full range of 16 bits. auto: as in model.weights, else training "
        "stops at such an image. `python -m data inspect` reports the values.",
    )
    channels: int = setting(
        3,
        "Channels of images: 3 for RGB, other numbers for multispectral images. With RGB weights, the first three "
        "channels must be red, green and blue.",
        _between(1, 1024),
    )
    background: str = setting(
        "",
        "Color behind transparent images, such as white or #ffffff; none drops the alpha channel. Empty: as the "
        "data was packed, else as in model.weights, else none.",
    )
    upright: bool | str = setting(
        "auto",
        "Apply the EXIF orientation of images. auto: as the data was packed, else as in model.weights, else "
        "false.",
        Within(words="auto, true or false", holds=lambda value: value in (True, False, "auto")),
    )
    mean: tuple[float, ...] = setting(
        (),
        "Mean of each channel, from 0 to 1. Empty: that of model.weights, else CLIP's; further channels have the "
        "mean of these.",
    )
    std: tuple[float, ...] = setting((), "Standard deviation of each channel, as pixels.mean.", _WEIGHTS)
    extend: str = setting(
        "zeros",
        "With RGB weights, initial weights of further channels: zeros, so that the embeddings are those of RGB, or "
        "the mean of the weights of red, green and blue.",
        _one_of("zeros", "mean"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.background:
            color_of(self.background, setting="pixels.background")
        pixel_range = parse_pixel_range(self.range, setting="pixels.range")
        count, each = self.channels, f"expected one for each of pixels.channels: {self.channels}"
        is_list = isinstance(pixel_range, tuple) and isinstance(pixel_range[0], tuple)
        require(not is_list or len(pixel_range) == count, "pixels.range", self.range, each)
        for name in ("mean", "std"):
            values = getattr(self, name)
            require(len(values) in (0, count), f"pixels.{name}", values, each)
        if count != 3:
            rgb = "expected none, because pixels.channels is not 3"
            require(self.background in ("", "none"), "pixels.background", self.background, rgb)
        if not self._is_default("extend"):
            _require_use("pixels.extend", self.extend, "pixels.channels", count != 3)


def _json_object(name: str, text: str) -> dict[str, Any]:
    """Parse a setting that is a JSON object, or empty."""
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{name} = {text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f'{name} = {text!r} is not a JSON object, such as {{"depth": 4}}')
    return value


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The model and its initial weights."""

    section = "model."
    name: str = setting(
        "ViT-B-32", "Architecture: one of clipkit's, such as ViT-B-32 or ViT-L-14, or open_clip:NAME."
    )
    image: str = setting("", "Another image tower: timm:NAME, or pixels:SIZE (Image GPT).")
    image_options: str = setting(
        "",
        'Arguments with which timm builds it, as JSON, such as {"depth": 4, "global_pool": "map"}; for pixels: '
        '{"colors": 512, "causal": true}.',
    )
    text: str = setting(
        "",
        "Another text tower: cbow, words, or transformers:FOLDER or NAME; or, for loss.name=classes, classes:FILE, "
        "a classification head with one row per line of a file of class names.",
    )
    tokenizer: str = setting(
        "",
        "Folder of a tokenizer from `python -m data tokenizer`, for clipkit's text transformer; it is stored with "
        "the weights. Empty: the text tower's own, or that of model.weights.",
    )
    image_size: int = setting(0, "Image side in pixels; 0: the architecture's default.", _at_least(0))
    context_length: int = setting(
        0, "Maximum caption length in tokens; 0: the architecture's default.", _at_least(0)
    )
    weights: str = setting(
        "", "Initial weights: any source that clipkit.load accepts, such as the folder of another run."
    )
    image_weights: str = setting(
        "",
        "Initial weights of a timm tower, for example to lock it (LiT): a file in timm's names, "
        "hf-hub:OWNER/REPOSITORY, or timm for those that timm publishes. Images are normalized as timm does. For "
        "pixels, the file of `python -m data palette`.",
    )
    new_head: bool = setting(
        False,
        "Take only the image tower of model.weights; the rest, such as a classification head, starts with random "
        "weights.",
    )
    patch_dropout: float = setting(
        0.0,
        "Fraction of each image's patches to drop in training, chosen at random in each step (FLIP).",
        _BELOW_ONE,
    )

    def __post_init__(self) -> None:
        check_names(self.name, self.image, self.text)
        super().__post_init__()
        both = bool(self.tokenizer and self.weights and not self.new_head)
        require(not both, "model.tokenizer", self.tokenizer, "model.weights have their own tokenizer")
        _json_object("model.image_options", self.image_options)
        if self.image_weights:
            image = "model.image=timm:NAME or pixels:SIZE and no model.weights"
            usable = self.image.startswith(("timm:", "pixels:")) and not self.weights
            _require_use("model.image_weights", self.image_weights, image, usable)
        if self.new_head:
            _require_use("model.new_head", self.new_head, "model.weights", bool(self.weights))

    @property
    def label(self) -> str:
        """The model's name."""
        tower = self._text_tower
        # omit the path of the file of class names
        text = tower.setting.partition(":")[0] if tower is not None and tower.over_classes else self.text
        return " + ".join(filter(None, (self.name, self.image, text)))

    @property
    def tower_options(self) -> dict[str, Any]:
        """``image_options`` as values."""
        return _json_object("model.image_options", self.image_options)

    @property
    def over_classes(self) -> bool:
        """Whether ``text`` selects a classification head."""
        return self._text_tower is not None and self._text_tower.over_classes

    @property
    def over_words(self) -> bool:
        """Whether ``text`` selects a table of words."""
        return self._text_tower is not None and self._text_tower.over_words

    @property
    def _text_tower(self) -> type[TextArchitecture] | None:
        found = selected(self.text, TEXT_TOWERS)
        return None if found is None else found[0]


@dataclass(frozen=True, kw_only=True)
class ShapeConfig(Section):
    """Sizes of clipkit's own towers that differ from those of model.name."""

    section = "shape."
    image_width: int = setting(
        0, "Width of the image tower; 0: that of model.name, as for all sizes.", _at_least(0)
    )
    image_layers: int = setting(0, "Its number of blocks.", _at_least(0))
    image_heads: int = setting(
        0, "Its attention heads; 0: heads as wide as those of model.name.", _at_least(0)
    )
    image_mlp: float = setting(0.0, "Width inside its MLPs, relative to its width.", _at_least(0))
    patch: int = setting(0, "Side of a patch in pixels.", _at_least(0))
    pool: str = setting(
        "",
        "What is projected to an image's features. class: the class token. mean: the mean of the patches. map: "
        "attention of a learned token to the patches. Empty: that of model.name.",
        _one_of("", "class", "mean", "map"),
    )
    positions: str = setting(
        "",
        "Position embeddings of patches: learned; learned_2d: one for each row and each column, of half the width; "
        "sincos_2d: fixed sines and cosines of row and column; none. Empty: those of model.name.",
        _one_of("", "learned", "learned_2d", "sincos_2d", "none"),
    )
    distilled: bool = setting(
        False,
        "Add a distillation token (DeiT): one half of the embedding belongs to it and learns from distill.teacher, "
        "the other half belongs to the class token and learns the labels. Both are averaged for evaluation.",
    )
    text_width: int = setting(
        0, "Width of the text tower, with heads as wide as those of model.name.", _at_least(0)
    )
    text_layers: int = setting(0, "Its number of blocks.", _at_least(0))
    embed: int = setting(0, "Dimension of the embedding.", _at_least(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        both = self.distilled and self.pool not in ("", "class")
        require(not both, "shape.pool", self.pool, "expected class with shape.distilled")

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that differ from ``model.name``; the distillation token is a kind of pooling."""
        found = {one.name: value for one in fields(self) if (value := getattr(self, one.name))}
        if found.pop("distilled", False):
            found["pool"] = "distilled"
        return found


@dataclass(frozen=True, kw_only=True)
class LossConfig(Section):
    """The objective, computed over the global batch; see clipkit/objectives/__init__.py."""

    section = "loss."
    name: str = setting(
        "clip",
        "Objective.",
        registry="clipkit.objectives:OBJECTIVES",
    )
    same: str = setting(
        "negatives",
        "How to treat other pairs in the batch with the same caption or image. With positives, the loss cannot "
        "reach 0, and a confident model's loss may exceed chance.",
        _one_of("negatives", "positives", "ignored"),
    )
    smoothing: float = setting(
        0.0,
        "Label smoothing: probability that a target spreads evenly over the batch or the classes.",
        _BELOW_ONE,
    )
    dims: tuple[int, ...] = setting(
        (),
        "Sizes of prefixes of the embedding that are trained to be embeddings of their own (Matryoshka). The loss "
        "is the mean of the losses of these prefixes and of the whole embedding.",
        _POSITIVE,
    )
    dim_weights: tuple[float, ...] = setting(
        (), "Weights of loss.dims, the last one for the whole embedding; empty for equal weights.", _WEIGHTS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rising = list(self.dims) == sorted(set(self.dims))
        require(rising, "loss.dims", self.dims, "expected rising sizes")
        if self.dim_weights:
            _require_use("loss.dim_weights", self.dim_weights, "loss.dims", bool(self.dims))
            count = len(self.dims) + 1
            one_each = f"expected {count} weights: one for each of loss.dims and one for the whole embedding"
            require(len(self.dim_weights) == count, "loss.dim_weights", self.dim_weights, one_each)


@dataclass(frozen=True, kw_only=True)
class CaptionConfig(Section):
    """Predict captions from images, in addition to ``loss.name``; see clipkit/model/decoder.py.

    The term is the mean over all predicted tokens of −log p(token | previous tokens, image).
    """

    section = "caption."
    weight: float = setting(
        0.0, "Weight of the term, which is added to the loss; 0: no decoder.", _at_least(0)
    )
    layers: int = setting(0, "Layers of the decoder; 0: half of the text tower's.", _at_least(0))
    feed: str = setting(
        "tokens",
        "The decoder's input: tokens, with an embedding of its own (Cap), or text, the text tower's tokens (CoCa); "
        "shared: the text tower is the decoder, in a second pass with cross-attention (MaMMUT).",
        _one_of("tokens", "text", "shared"),
    )
    parallel: float = setting(
        0.0,
        "Fraction of the captions whose tokens are all predicted at once, from the image alone; CapPa: 0.75.",
        Within(words="0 to 1", holds=lambda value: 0 <= value <= 1),
    )
    length: int = setting(
        64, "Maximum number of tokens of a caption to predict, including end of text.", _at_least(1)
    )
    after: int = setting(
        0, "Number of first steps without the term; its weights are locked until then.", _at_least(0)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layers", "feed", "parallel", "length", "after"):
            if not self._is_default(name):
                _require_use(f"caption.{name}", getattr(self, name), "caption.weight", bool(self.weight))
        alone = f"expected 0 with caption.feed={self.feed}"
        require(not self.parallel or self.feed == "tokens", "caption.parallel", self.parallel, alone)


@dataclass(frozen=True, kw_only=True)
class MaskedConfig(Section):
    """Predict masked patches of images, in addition to ``loss.name``; see clipkit/model/masked.py.

    Images with masked patches are encoded in a further pass. The term is the mean over the chosen patches.
    """

    section = "masked."
    weight: float = setting(0.0, "Weight of the term, which is added to the loss; 0: none.", _at_least(0))
    fraction: float = setting(
        0.5,
        "Fraction of the patches that is chosen: 80% of them are masked, 10% replaced by another patch of the "
        "image, and 10% kept.",
        Within(words="more than 0, at most 1", holds=lambda value: 0 < value <= 1),
    )
    target: str = setting(
        "color",
        "Prediction target: the class of a patch's mean color among 512, those of its 4 × 4 cells (small), its "
        "normalized pixels, or its token with averaged weights (features).",
        registry="clipkit.model.architectures:MASKED",
    )
    after: int = setting(
        0, "Number of first steps without the term; its weights are locked until then.", _at_least(0)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("fraction", "target", "after"):
            if not self._is_default(name):
                _require_use(f"masked.{name}", getattr(self, name), "masked.weight", bool(self.weight))


@dataclass(frozen=True, kw_only=True)
class ImageGptConfig(Section):
    """Predict pixels, in addition to ``loss.name``, with ``model.image=pixels:SIZE``; see clipkit/model/pixels.py.

    The term is the mean over the predicted pixels of −log p.
    """

    section = "image_gpt."
    weight: float = setting(0.0, "Weight of the term, which is added to the loss; 0: none.", _at_least(0))
    fraction: float = setting(
        0.15,
        "Fraction of the pixels that is masked and predicted if the tower is not causal.",
        Within(words="more than 0, at most 1", holds=lambda value: 0 < value <= 1),
    )
    after: int = setting(
        0, "Number of first steps without the term; its weights are locked until then.", _at_least(0)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("fraction", "after"):
            if not self._is_default(name):
                _require_use(f"image_gpt.{name}", getattr(self, name), "image_gpt.weight", bool(self.weight))


@dataclass(frozen=True, kw_only=True)
class ViewsConfig(Section):
    """Self-distillation by crops of images (SILC, SigLIP 2).

    Features of small crops are compared with those that averaged weights compute for the whole image. Requires
    ``optim.average``. See clipkit/objectives/views.py.
    """

    section = "views."
    weight: float = setting(0.0, "Weight of the term, which is added to the loss; 0: none.", _at_least(0))
    count: int = setting(8, "Number of crops of each image.", _at_least(1))
    area: tuple[float, ...] = setting(
        (0.05, 0.4),
        "Least and greatest area of a crop, as fractions of the image's.",
        Within(
            words="two increasing fractions, more than 0 and at most 1",
            holds=lambda value: len(value) == 2 and 0 < value[0] <= value[1] <= 1,
        ),
    )
    size: int = setting(
        0, "Side of a crop in pixels, after resizing; 0: half of the image's, in whole patches.", _at_least(0)
    )
    after: int = setting(0, "Number of first steps without the term.", _at_least(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("count", "area", "size", "after"):
            if not self._is_default(name):
                _require_use(f"views.{name}", getattr(self, name), "views.weight", bool(self.weight))


@dataclass(frozen=True, kw_only=True)
class DistillConfig(Section):
    """Distillation from a teacher's similarities within the batch, or from its classification of images."""

    section = "distill."
    teacher: str = setting(
        "",
        "Teacher that encodes each batch during training: any source that clipkit.load accepts; or average, the "
        "averaged weights of this training, see optim.average (a folder of this name is ./average). With "
        'loss.name=classes, a model with a head of the same classes, or a CLIP, with prompts such as "a photo '
        'of a cat".',
    )
    features: str = setting(
        "",
        "Alternatively, the folder with a teacher's features of the training images, from `clipkit encode`.",
    )
    text_features: str = setting(
        "", "With distill.features, the teacher's features of the captions, from `clipkit encode --text`."
    )
    scale: float = setting(
        100.0,
        "With distill.features, the teacher's exp(t), by which its similarities are multiplied.",
        _above(0, at_most=10_000),
    )
    weight: float = setting(
        0.5, "Weight of the distillation loss; the objective has 1 minus this weight.", _above(0, at_most=1)
    )
    temperature: float = setting(
        1.0,
        "With loss.name=classes, the number by which the logits of teacher and student are divided; the loss is "
        "multiplied by its square.",
        _above(0, at_most=1000),
    )
    hard: bool = setting(
        False, "With loss.name=classes, learn the teacher's most likely class, not its distribution (DeiT)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features and not self.text_features:
            require(False, "distill.text_features", "", "required by distill.features")
        if self.text_features:
            _require_use("distill.text_features", self.text_features, "distill.features", bool(self.features))
        both = bool(self.teacher and self.features)
        require(not both, "distill.features", self.features, "cannot be combined with distill.teacher")
        if not self._is_default("weight"):
            where = "distill.teacher or distill.features"
            _require_use("distill.weight", self.weight, where, self.wanted)
        if not self._is_default("scale"):
            _require_use("distill.scale", self.scale, "distill.features", bool(self.features))
        for name in ("temperature", "hard"):
            if not self._is_default(name):
                _require_use(f"distill.{name}", getattr(self, name), "distill.teacher", bool(self.teacher))
        if self.hard and not self._is_default("temperature"):
            require(False, "distill.temperature", self.temperature, "expected 1 with distill.hard")
        alone = "expected below 1 with distill.teacher=average, from which alone nothing is learned"
        require(not self.averages or self.weight < 1, "distill.weight", self.weight, alone)

    @property
    def wanted(self) -> bool:
        """Whether there is a teacher."""
        return bool(self.teacher or self.features)

    @property
    def averages(self) -> bool:
        """Whether the averaged weights of the training are the teacher."""
        return self.teacher == "average"


_LOCKS = Within(
    words='empty, "all", or the number of top layers to train',
    holds=lambda value: value >= 0 if isinstance(value, int) else value in ("", "all"),
)


@dataclass(frozen=True, kw_only=True)
class LockConfig(Section):
    """Locked (frozen) parameters; see clipkit/training/build.py. The temperature is always trained."""

    section = "lock."
    image: str | int = setting(
        "",
        '"all" locks the image tower (LiT); a number locks all but that many top layers. From the top, layers are '
        "the projection with the last norm, the blocks in reverse order, and the embeddings.",
        _LOCKS,
    )
    text: str | int = setting("", "The same for the text tower.", _LOCKS)
    unfreeze_every: int = setting(
        0,
        "Steps after which the next lower layer of each tower is unlocked, starting with the top layer; 0: train "
        "all layers from the start.",
        _at_least(0),
    )


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section):
    """Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) of ``model.weights``, which are locked."""

    section = "lora."
    rank: int = setting(
        0,
        "Rank of the adapters of all matrices in the towers' blocks; everything else but the temperature is "
        "locked. 0: train the weights themselves.",
        _at_least(0),
    )
    alpha: float = setting(0.0, "Adapters are multiplied by alpha / rank. 0: by 1.", _at_least(0))
    image: bool = setting(True, "Whether the image tower has adapters; otherwise it is locked.")
    text: bool = setting(True, "The same for the text tower.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha", "image", "text"):
            if not self._is_default(name):
                _require_use(f"lora.{name}", getattr(self, name), "lora.rank", bool(self.rank))
        require(self.image or self.text, "lora.text", self.text, "expected true with lora.image=false")


@dataclass(frozen=True, kw_only=True)
class SmallConfig(Section):
    """Train small, finish large (CLIPA, Li et al. 2023, https://arxiv.org/abs/2305.07017)."""

    section = "small."
    steps: int = setting(0, "Number of initial steps with smaller images or shorter captions.", _at_least(0))
    image_size: int = setting(0, "Image side in pixels in these steps; 0: the model's.", _at_least(0))
    context_length: int = setting(0, "Maximum caption length in these steps; 0: the model's.", _at_least(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps:
            sizes = "small.image_size or small.context_length"
            _require_use("small.steps", self.steps, sizes, bool(self.image_size or self.context_length))
        for name, size in (("image_size", self.image_size), ("context_length", self.context_length)):
            if size:
                _require_use(f"small.{name}", size, "small.steps", bool(self.steps))


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """The optimizer and its schedule: linear warm-up, then decay to optim.min_lr."""

    section = "optim."
    name: str = setting("adamw", "The optimizer.", registry="clipkit.training:OPTIMIZERS")
    lr: float = setting(5e-4, "Peak learning rate, reached at the end of the warm-up.", _above(0))
    min_lr: float = setting(0.0, "Final learning rate; at most optim.lr.", _at_least(0))
    warmup: int = setting(2000, "Steps in which the learning rate rises to optim.lr.", _at_least(0))
    schedule: str = setting(
        "cosine", "Schedule of the learning rate after the warm-up.", registry="clipkit.training:SCHEDULES"
    )
    cooldown: int = setting(
        0,
        "With optim.schedule=constant or rsqrt, number of final steps in which the learning rate decays.",
        _at_least(0),
    )
    weight_decay: float = setting(
        0.2,
        "Decoupled weight decay of matrices; not applied to biases, gains and the temperature.",
        _at_least(0),
    )
    head_decay: float = setting(
        -1.0,
        "Weight decay of the matrices of the last layers: projections and rows of classes; -1: optim.weight_decay.",
        Within(words="-1, or at least 0", holds=lambda value: value == -1 or value >= 0),
    )
    layer_decay: float = setting(
        1.0,
        "Factor by which the learning rate decreases from each layer to the one below.",
        _above(0, at_most=1),
    )
    image_lr_scale: float = setting(1.0, "Multiplier for the image tower's learning rate.", _at_least(0))
    text_lr_scale: float = setting(1.0, "Multiplier for the text tower's learning rate.", _at_least(0))
    beta1: float = setting(0.9, "Decay of the running mean of the gradients (momentum).", _BELOW_ONE)
    beta2: float = setting(0.98, "Decay of the running mean of the squared gradients.", _BELOW_ONE)
    eps: float = setting(1e-6, "Added to the denominator of the update for numerical stability.", _above(0))
    sam: float = setting(
        0.0,
        "Sharpness-aware minimization: gradients are those at weights moved by this distance along the gradient, "
        "which doubles the time of a step; 0: off.",
        _at_least(0),
    )
    clip_norm: float = setting(
        1.0, "Maximum norm to which the whole gradient is clipped; 0: no clipping.", _at_least(0)
    )
    skip_above: float = setting(
        0.0,
        "Skip updates with a gradient norm above this multiple of the usual norm; 0: never.",
        Within(words="0, or above 1", holds=lambda value: value == 0 or value > 1),
    )
    average: float = setting(
        0.0,
        "Decay of the moving average of weights (EMA), which is used for evaluation and loading; 0: no average. It "
        "spans about 1 / (1 - decay) steps: use 0.9999 for a long run, 0.99 for hundreds of steps.",
        _BELOW_ONE,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.min_lr <= self.lr, "optim.min_lr", self.min_lr, "expected 0 to optim.lr")
        decays = imported("clipkit.training:SCHEDULES")[self.schedule].decays
        if self.min_lr and not decays:
            _require_use(
                "optim.min_lr", self.min_lr, "optim.cooldown or a schedule that decays", self.cooldown > 0
            )
        if self.cooldown:
            _require_use("optim.cooldown", self.cooldown, "optim.schedule=constant or rsqrt", not decays)
        alone = "expected at least 1 with optim.schedule=rsqrt, whose unit of time it is"
        require(self.schedule != "rsqrt" or self.warmup > 0, "optim.warmup", self.warmup, alone)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """When to save checkpoints; the run is also saved at its end and on Ctrl-C or SIGTERM."""

    section = "checkpoint."
    every_steps: int = setting(1000, "Steps between checkpoints; 0: disabled.", _at_least(0))
    every_minutes: float = setting(30.0, "Minutes between checkpoints; 0: disabled.", _at_least(0))
    keep: int = setting(3, "Number of newest checkpoints to keep; 0: all.", _at_least(0))


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section):
    """Evaluation during training and at the end."""

    section = "eval."
    data: tuple[str, ...] = setting((), "Built-in sets (digits, emoji, glyphs, cues) or dataset folders.")
    every_steps: int = setting(1000, "Steps between evaluations; 0: only at the end.", _at_least(0))
    batch_size: int = setting(256, "Images encoded at a time on each rank.", _between(1, MOST))


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    """Logging of metrics, in addition to metrics.jsonl in the run folder."""

    section = "log."
    every_steps: int = setting(
        10,
        "Steps between lines in metrics.jsonl and updates of the progress bar. Without a terminal, a line is "
        "printed at most every ten seconds and for the last step.",
        _at_least(1),
    )
    tensorboard: bool = setting(
        True, "Also write metrics to tensorboard/ in the run folder, if tensorboard is installed."
    )
    wandb: str = setting(
        "",
        "Weights & Biases project to log metrics and scores to; empty: none. Requires `wandb login` once, or "
        "WANDB_MODE=offline, which needs no account.",
    )


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    """The settings of a run."""

    out: str = setting("", "Run folder; empty: runs/NAME for a config file NAME.toml.")
    seed: int = setting(
        0,
        "Seed for the initial weights, the data order and all other random numbers.",
        Within(words="0 to 2^63", holds=lambda value: 0 <= value < 2**63),
    )
    steps: int = setting(10_000, "Number of updates; may be increased later.", _at_least(1))
    batch_size: int = setting(
        256,
        "Pairs per step, over all ranks.",
        Within(
            words="at least 2, since each pair is compared with the others of its batch",
            holds=lambda value: value >= 2,
        ),
    )
    accumulate: int = setting(
        1,
        "Number of parts in which each rank processes its rows of the batch, to save memory; the loss and its "
        "gradients do not change.",
        _at_least(1),
    )
    precision: str = setting(
        "auto",
        "Precision of the towers; auto: bf16 on GPUs and CPUs that compute it natively, else fp32. Losses are "
        "always float32.",
        _one_of("auto", "fp32", "bf16"),
    )
    sharding: str = setting(
        "none",
        "Shard weights, gradients and optimizer state, for models too large for one GPU: full, over all GPUs; "
        "hybrid, over the GPUs of each host.",
        _one_of("none", "full", "hybrid"),
    )
    reshard: bool = setting(
        True,
        "With sharding, free gathered weights after the forward pass; false is faster but needs more memory.",
    )
    recompute: int = setting(
        0,
        "Activation checkpointing: recompute every n-th block in the backward pass to save memory; 1: all blocks, "
        "2: every second block, 0: none.",
        _at_least(0),
    )
    compile: bool = setting(
        False, "Compile blocks with torch.compile: steps are faster, but the start takes a minute or more."
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pixels: PixelsConfig = field(default_factory=PixelsConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    caption: CaptionConfig = field(default_factory=CaptionConfig)
    masked: MaskedConfig = field(default_factory=MaskedConfig)
    image_gpt: ImageGptConfig = field(default_factory=ImageGptConfig)
    views: ViewsConfig = field(default_factory=ViewsConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    lock: LockConfig = field(default_factory=LockConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    small: SmallConfig = field(default_factory=SmallConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        require("\0" not in self.out, "out", self.out, "a path cannot contain NUL")
        super().__post_init__()
        most = f"expected at most batch_size = {self.batch_size}"
        require(self.accumulate <= self.batch_size, "accumulate", self.accumulate, most)
        if not self.reshard:
            _require_use("reshard", False, "sharding=full or sharding=hybrid", self.sharding != "none")

        optimizers = imported("clipkit.training:OPTIMIZERS")
        optimizer, never = optimizers[self.optim.name], f"expected 0 with optim.name={self.optim.name}"
        terms = {one: getattr(self, one) for one in imported("clipkit.objectives:TERMS")}
        terms = {one: settings for one, settings in terms.items() if settings.weight}
        late_ones = {"lock.unfreeze_every": self.lock.unfreeze_every}
        late_ones |= {f"{one}.after": settings.after for one, settings in terms.items()}
        for name, value in late_ones.items():
            require(optimizer.parameters_join_late or not value, name, value, never)

        objectives = imported("clipkit.objectives:OBJECTIVES")
        name, objective = self.loss.name, objectives[self.loss.name]
        if objective.over_classes and not self.model.over_classes:
            require(False, "loss.name", name, "requires model.text=classes:FILE")
        if self.model.over_classes and not objective.over_classes:
            names = " or ".join(f"loss.name={one}" for one in objectives if objectives[one].over_classes)
            require(False, "model.text", self.model.text, f"requires {names}")
        if objective.over_words:
            require(self.model.over_words, "loss.name", name, "requires model.text=words")
        negatives = objective.uses_same or self.loss.same == "negatives"
        require(negatives, "loss.same", self.loss.same, f"expected negatives with loss.name={name}")
        smooths = objective.smooths and self.loss.same != "ignored"
        alone = f"expected 0 with {'loss.same=ignored' if objective.smooths else f'loss.name={name}'}"
        require(smooths or not self.loss.smoothing, "loss.smoothing", self.loss.smoothing, alone)
        for setting, given in (
            ("negatives", self.data.negatives),
            ("caption_count", self.data.caption_count - 1),
        ):
            for refused, cause in (
                (not objective.more_texts, f"loss.name={name}"),
                (self.distill.wanted, "distillation"),
                (
                    bool(self.caption.weight) and self.caption.feed != "tokens",
                    f"caption.feed={self.caption.feed}",
                ),
            ):
                value, alone = getattr(self.data, setting), f"cannot be combined with {cause}"
                require(not (given and refused), f"data.{setting}", value, alone)
        if self.data.caption_count > 1 and self.loss.same == "negatives":
            same = "expected positives or ignored with data.caption_count above 1"
            require(False, "loss.same", self.loss.same, same)
        teacher = self.distill.teacher or self.distill.features
        where = "distill.teacher" if self.distill.teacher else "distill.features"
        alone = f"cannot be combined with loss.name={name}"
        require(objective.divergence is not None or not teacher, where, teacher, alone)
        if self.distill.averages:
            _require_use(where, teacher, "optim.average", bool(self.optim.average))
        if objective.over_classes:
            require(not self.distill.features, where, teacher, f"{alone}; use distill.teacher")
        else:
            for setting in ("hard", "temperature"):
                if not self.distill._is_default(setting):
                    value = getattr(self.distill, setting)
                    _require_use(f"distill.{setting}", value, "loss.name=classes", False)
        if self.shape.distilled:
            learns = bool(self.distill.teacher or self.model.weights)
            _require_use("shape.distilled", True, "distill.teacher or model.weights", learns)
            require(objective.over_classes, "shape.distilled", True, "requires loss.name=classes")
            least = "expected below 1 with shape.distilled, whose class token would learn nothing"
            require(self.distill.weight < 1, "distill.weight", self.distill.weight, least)
            whole = "cannot be combined with shape.distilled"
            require(not self.loss.dims, "loss.dims", self.loss.dims, whole)
        for term, settings in terms.items():
            alone = f"expected 0 with loss.name={name}"
            refused = objective.over_classes and term != "image_gpt"
            require(not refused, f"{term}.weight", settings.weight, alone)
        target = self.masked.target if self.masked.weight else ""
        if target == "features":
            _require_use("masked.target", target, "optim.average", bool(self.optim.average))
        if self.image_gpt.weight:
            image = self.model.image.startswith("pixels:")
            _require_use("image_gpt.weight", self.image_gpt.weight, "model.image=pixels:SIZE", image)
        if self.pixels.channels != 3:
            of_colors: dict[str, object] = {
                "data.color_jitter": self.data.color_jitter,
                "data.grayscale": self.data.grayscale,
                "data.nvjpeg": self.data.nvjpeg,
                "masked.target": target if target in ("color", "small") else "",
            }
            for setting, choice in of_colors.items():
                require(not choice, setting, choice, "requires RGB images: pixels.channels = 3")
        for term in ("image_gpt", "views"):
            locked = f"cannot be combined with {term}.weight, which trains the image tower"
            require(
                not (getattr(self, term).weight and self.lock.image == "all"), "lock.image", "all", locked
            )
        if self.lora.rank:
            _require_use("lora.rank", self.lora.rank, "model.weights", bool(self.model.weights))
            for setting in ("image", "text", "unfreeze_every"):
                locked, alone = getattr(self.lock, setting), "cannot be combined with lora.rank"
                require(not locked, f"lock.{setting}", locked, alone)
            require(not self.model.new_head, "model.new_head", True, "cannot be combined with lora.rank")
        if self.optim.name == "adafactor":
            tied = "cannot be combined with optim.name=adafactor, whose second moments belong to rows and columns"
            require(self.shape.positions != "learned_2d", "shape.positions", self.shape.positions, tied)
        if self.views.weight:
            _require_use("views.weight", self.views.weight, "optim.average", bool(self.optim.average))
        at_once = any(not settings.after for settings in terms.values())
        if not objective.compares:
            require(
                at_once, "loss.name", name, "requires a term from the first step, such as caption.weight=1"
            )

    def notes(self, *, step: int, samples: int, layers: int) -> list[str]:
        """Return notes on settings that may be unintentional, and the objective's note.

        Args:
            step: number of updates so far.
            samples: number of pairs in an epoch.
            layers: number of layers that ``lock.unfreeze_every`` unlocks in the tower with the most layers.
        """
        steps, optim, every, found = self.steps, self.optim, self.lock.unfreeze_every, []
        if step >= steps:
            return []
        if optim.warmup >= steps:
            last = imported("clipkit.training:learning_rate")(steps - 1, steps, optim)
            found.append(
                f"optim.warmup = {optim.warmup} is not shorter than the run of {steps} steps: the learning rate "
                f"rises to {last:.2g} (optim.lr = {optim.lr:g}) and does not decay"
            )
        if self.small.steps >= steps:
            found.append(
                f"small.steps = {self.small.steps} is not shorter than the run of {steps} steps: no step is made "
                "at the model's full size"
            )
        terms = ((name, getattr(self, name)) for name in imported("clipkit.objectives:TERMS"))
        found += [
            f"{name}.after = {one.after} is not shorter than the run of {steps} steps: the term never begins"
            for name, one in terms
            if one.weight and one.after >= steps
        ]
        if every and every * (layers - 1) >= steps:
            found.append(
                f"lock.unfreeze_every = {every} unlocks {1 + (steps - 1) // every} of {layers} layers in {steps} "
                "steps; the others stay locked"
            )
        seen = steps * self.batch_size / samples
        if seen > _MANY_EPOCHS and not self.data.weights and not self.data.resample:
            ten = max(1, 10 * samples // self.batch_size)
            found.append(
                f"each of the {samples:,} pairs is seen {seen:,.0f} times; steps={ten} would be 10 times"
            )
        if not step and not self.model.weights:
            found.append(imported("clipkit.objectives:OBJECTIVES")[self.loss.name].note)
        return [f"note: {one}" for one in found if one]


# Settings that may differ when a run is resumed. They affect neither the order of the data nor the result, except
# ``steps``, which extends a run; train.py then reports the learning rates. Sources may change because checkpoints
# contain all weights and the manifest identifies the data. ``pixels.range`` may be set later because without it
# training stops at the first image that it affects.
RESUMABLE = {
    "out", "steps", "accumulate", "sharding", "reshard", "recompute", "compile", "model.weights", "data.train",
    "data.workers", "data.max_bad", "data.truncated", "data.cache_gb", "checkpoint", "eval", "log",
}  # fmt: skip
_SHORT_FRACTION = re.compile(r"[+-]?(\.[0-9]+|[0-9]+\.)([eE][+-]?[0-9]+)?")  # .5 and 5., invalid in TOML


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply ``dotted.key=value`` overrides.

    Raises:
        ConfigError: the file is missing or not TOML, a key is unknown or given twice, or a value is invalid.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # with or without a BOM
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # invalid TOML or UTF-8, or numbers with too many digits
        raise ConfigError(f"config {path} is not TOML: {error}") from error
    _apply(values, overrides)
    _rename(values)
    config = _build(Config, values, "")
    assert isinstance(config, Config)
    return config if config.out else replace(config, out=str(Path("runs") / path.stem))


# former names of settings, in the configurations of earlier runs
RENAMED = {
    "data.background": "pixels.background", "data.upright": "pixels.upright", "data.pixel_range": "pixels.range",
    "pixels.weight": "image_gpt.weight", "pixels.fraction": "image_gpt.fraction", "pixels.after": "image_gpt.after",
}  # fmt: skip


def _rename(values: dict[str, Any]) -> None:
    for former, name in RENAMED.items():
        (section, key), (new_section, new_key) = former.split("."), name.split(".")
        settings = values.get(section)
        if isinstance(settings, dict) and key in settings:
            values.setdefault(new_section, {}).setdefault(new_key, settings.pop(key))


def to_toml(config: Config, *, differing_from: Config | None = None) -> str:
    """Return a configuration as TOML for ``load_config``: all settings, or those that differ from another's."""
    lines: list[str] = []
    sections: list[str] = []
    for name, value in _items(config):
        other = getattr(differing_from, name) if differing_from is not None else None
        if is_dataclass(value):
            settings = [(k, v) for k, v in _items(value) if other is None or v != getattr(other, k)]
            if settings:
                sections.append("\n".join([f"\n[{name}]", *(f"{k} = {_literal(v)}" for k, v in settings)]))
        elif differing_from is None or value != other:
            lines.append(f"{name} = {_literal(value)}")
    return "\n".join([*lines, *sections]) + "\n"


def shown_settings(config: Config) -> str:
    """Return the settings that differ from the defaults as TOML, without secrets in URLs."""
    return without_secrets(to_toml(config, differing_from=Config()))


def changes(before: Config, after: Config) -> list[str]:
    """List changed settings that must not change when a run is resumed, as ``key: before → after``."""
    old, new = _flat(before), _flat(after)
    return [
        f"{key}: {_literal(old[key])} → {_literal(new[key])}"
        for key in old
        if old[key] != new[key]
        and key not in RESUMABLE
        and key.split(".")[0] not in RESUMABLE
        and (key, old[key]) != ("pixels.range", "auto")
    ]


def _items(config: Any) -> list[tuple[str, Any]]:
    return [(one.name, getattr(config, one.name)) for one in fields(config)]


def _flat(config: Config) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in _items(config):
        if is_dataclass(value):
            flat.update({f"{name}.{key}": inner for key, inner in _items(value)})
        else:
            flat[name] = value
    return flat


def _literal(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value)
        return f'"{escaped}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value)


def _list_form(key: str, values: Sequence[Any]) -> str:
    """Format a list for a command line."""
    return f"{key}='[{','.join(map(_literal, values))}]'"


def _apply(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply ``dotted.key=value`` overrides; values are parsed as TOML if possible, otherwise used as strings."""
    given: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"{override!r} is not of the form key=value, such as optim.lr=1e-3")
        if key in given and key == "data.train":
            raise ConfigError(
                "data.train is given twice: quote brace patterns to prevent shell expansion, and write several "
                f"sources as {_list_form(key, ['a', 'b'])}"
            )
        if key in given:
            takes_list = isinstance(_flat(Config()).get(key), tuple)
            instead = f"pass one list, {_list_form(key, ['a', 'b'])}" if takes_list else "remove one"
            first, second = (shown(shown_url(one)) for one in (given[key], text))
            raise ConfigError(f"{key} is given twice: {first} and {second}; {instead}")
        given[key] = text
        try:
            parsed = tomllib.loads(f"value = {text}")
        except (ValueError, RecursionError):
            parsed = {}
        # values with several lines, and dates, are strings
        is_value = parsed.keys() == {"value"} and isinstance(
            parsed["value"], bool | int | float | str | list | dict
        )
        if not is_value and text.startswith("[") and text.endswith("]"):
            raise ConfigError(
                f"{override!r} is not a list: write strings in quotes, as in {_list_form(key, ['a', 'b'])}, "
                "and numbers as 0.5"
            )
        *sections, name = key.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{key} is unknown: {section} is not a section")
        inner[name] = parsed["value"] if is_value else text


def _build(kind: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(kind)
    for key, value in values.items():
        if key not in hints:
            unknown = prefix + key
            while isinstance(value, Mapping) and value:  # name the setting in an unknown section
                inner, value = next(iter(value.items()))
                unknown += f".{inner}"
            raise ConfigError(f"{unknown} is unknown: {_nearest_key(unknown)}")
    given = {key: _fit(hints[key], value, prefix + key) for key, value in values.items()}
    return kind(**given)


# names of settings in other training programs
_ALSO_CALLED = {
    "learning_rate": "optim.lr", "wd": "optim.weight_decay", "warmup_steps": "optim.warmup",
    "num_workers": "data.workers", "train_data": "data.train", "max_steps": "steps", "epochs": "steps",
    "local_batch_size": "batch_size", "accum_freq": "accumulate", "amp": "precision", "output": "out",
    "output_dir": "out", "pretrained": "model.weights", "dataset_resampled": "data.resample",
}  # fmt: skip


def _nearest_key(key: str) -> str:
    """Return a hint for an unknown setting: the closest known one."""
    known = list(_flat(Config()))
    if also := _ALSO_CALLED.get(key.rsplit(".", 1)[-1]):
        return f"did you mean {also!r}?"
    last = {one.rsplit(".", 1)[-1]: one for one in reversed(known)}
    name = key.rsplit(".", 1)[-1]
    hint = f"did you mean {last[name]!r}?" if name in last else nearest(key, known)
    return hint if hint.startswith("did") else "`train.py --settings` lists all settings"


def _fit(hint: Any, value: Any, key: str) -> Any:
    """Convert a TOML value to the field's type."""
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{key} = {shown(value)} is invalid: {key} is a section; set {key}.<name> instead"
            )
        return _build(typing.cast(type[Any], hint), value, key + ".")
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in kinds and isinstance(value, str) and _SHORT_FRACTION.fullmatch(value):
        value = float(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and not abs(value) <= sys.float_info.max:  # infinity, NaN, or an integer too large for float
        raise ConfigError(f"{key} = {shown(value)} is invalid: expected a finite number")
    if float in kinds and is_number:
        return float(value)
    if int in kinds and is_number and value == int(value):  # 1e4 is an integer too
        require(abs(value) < 2**63, key, value, "expected less than 2^63")
        return int(value)
    for kind in (bool, str):
        if kind in kinds and isinstance(value, kind):
            return _text(value, key) if isinstance(value, str) else value
    if any(typing.get_origin(kind) is tuple for kind in kinds):
        of = next(typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) is tuple)
        many = value if isinstance(value, list | tuple) else [value]
        if isinstance(value, str) and (several := _several(value, of, key)):
            raise ConfigError(
                f"{key} = {shown(value)} is invalid: write several as {_list_form(key, several)}"
            )
        if (
            tuple[tuple[float, ...], ...] in kinds
            and many
            and all(isinstance(one, list | tuple) for one in many)
        ):
            return tuple(_fit(tuple[float, ...], one, key) for one in many)
        if all(isinstance(one, str) for one in many) and of is str:
            return tuple(_text(one, key) for one in many)
        if of is not str and not any(isinstance(one, str | Mapping | list | tuple) for one in many):
            return tuple(_fit(of, one, key) for one in many)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    lists = {
        tuple[str, ...]: "a list of strings", tuple[float, ...]: "a list of numbers",
        tuple[int, ...]: "a list of whole numbers", tuple[tuple[float, ...], ...]: "a list of pairs of numbers",
    }  # fmt: skip
    wanted = " or ".join((names | lists)[kind] for kind in kinds)
    raise ConfigError(f"{key} = {shown(value)} is invalid: expected {wanted}")


def _several(value: str, of: type, key: str) -> list[Any]:
    """Split a comma-separated string that cannot be a single value; return [] for any other string."""
    parts = [part.strip() for part in value.split(",")]
    if len(parts) < 2 or not all(parts):
        return []
    if of is str:  # commas may be part of templates, filters and paths
        return parts if key == "data.captions" else []
    try:
        return [of(part) for part in parts]
    except ValueError:
        return []


def _text(value: str, key: str) -> str:
    """Check that a string is valid Unicode: arguments may contain bytes that are not UTF-8."""
    require(not any("\ud800" <= c <= "\udfff" for c in value), key, value, "expected valid Unicode")
    return value


_WIDTH = 80


def settings_reference(prefix: str = "") -> list[str]:
    """List settings with default, description and valid values, in lines of at most 80 columns.

    Args:
        prefix: list only names that start with it, such as "optim" or "optim.l", or one name without its section,
            such as "lr".

    Raises:
        ConfigError: no name matches.
    """
    hints = typing.get_type_hints(Config)
    # heading and settings of each section, starting with settings outside sections
    sections = [("", {one.name: one for one in fields(Config) if not is_dataclass(hints[one.name])})]
    for section in fields(Config):
        if is_dataclass(kind := hints[section.name]):
            heading = f"[{section.name}] {' '.join((kind.__doc__ or '').split())}"
            sections.append((heading, {f"{section.name}.{one.name}": one for one in fields(kind)}))
    lines: list[str] = []
    for heading, settings in sections:
        chosen = [
            (name, one)
            for name, one in settings.items()
            if name.startswith(prefix) or name.rpartition(".")[2] == prefix
        ]
        if chosen and heading:
            lines += ["", *textwrap.wrap(heading, _WIDTH, break_long_words=False)]
        for name, one in chosen:
            within = fits(one)
            words = "true or false" if isinstance(one.default, bool) else within.words if within else ""
            text = text_of(one) + (f" ({words})" if words else "")
            lines += ["", f"{name} = {_literal(one.default)}"]
            lines += textwrap.wrap(
                text, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
            )
    if not lines:
        raise ConfigError(f"--settings {prefix}: no setting starts with {prefix}: {_nearest_key(prefix)}")
    return lines[1:]

"""The configuration of a run: frozen dataclasses, validated on construction.

``setting(…)`` defines each field with its documentation and valid values. Objectives and local terms declare
sections of their own.
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
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec

from clipkit.cli import Within, import_attribute, one_of, setting
from clipkit.errors import ConfigError, DataError, nearest
from clipkit.files.terminal import redact_secrets, redact_url
from clipkit.model.architectures import TextArchitecture, list_choices, select_tower
from clipkit.model.names import IMAGE_TOWERS, TEXT_TOWERS, check_names
from clipkit.samples.depth import parse_pixel_range
from clipkit.samples.remote import is_remote
from clipkit.samples.traits import color_of

MOST = 2**40  # larger than any sensible count, small enough to compute indices with
_SHOWN = 200  # characters of a value in a message
_MANY_EPOCHS = 50  # print a note above this number of epochs


def at_least(least: float) -> Within:
    """Return the values from ``least`` on."""
    return Within(words=f"at least {least}", holds=lambda value: value >= least)


def above(bound: float, *, at_most: float = math.inf) -> Within:
    """Return the values above ``bound``, up to ``at_most``."""
    words = f"above {bound}"
    if at_most != math.inf:
        words += f", at most {at_most:,}"
    return Within(words=words, holds=lambda value: bound < value <= at_most)


def between(least: float, most: float) -> Within:
    """Return the values from ``least`` to ``most``."""
    shown_most = "2^40" if most == MOST else str(most)
    return Within(words=f"{least} to {shown_most}", holds=lambda value: least <= value <= most)


_POSITIVE = Within(words="at least 1", holds=lambda value: all(size >= 1 for size in value))
_WEIGHTS = Within(words="above 0", holds=lambda value: all(weight > 0 for weight in value))
_IMAGE_PROJECTION = "image:"
_BALANCE = re.compile(r".+:(equal|[1-9][0-9]{0,11})", flags=re.ASCII)
_BELOW_ONE = Within(words="at least 0 and below 1", holds=lambda value: 0 <= value < 1)


def _is_separator(text: str) -> bool:
    with suppress(re.error):
        return not text or (re.compile(text).groups == 0 and not re.fullmatch(text, ""))
    return False


def lazy_import(path: str) -> Callable[..., Any]:
    """Return a function that imports "module:name" when called, so that registries import no layer above."""

    def call(*arguments: Any, **named: Any) -> Any:
        return import_attribute(path)(*arguments, **named)

    return call


def describe_setting(entry: Field[Any]) -> str:
    """Return the description of a field; "" if it has none."""
    text = cast(str, entry.metadata.get("text", ""))
    path = entry.metadata.get("registry")
    if path:
        for name, registered in import_attribute(path).items():
            summary = getattr(registered, "summary", "")
            if summary:
                text += f" {name}: {summary}."
    return text


def get_valid_values(entry: Field[Any]) -> Within | None:
    """Return the valid values of a field; None if all values of its type are valid."""
    path = entry.metadata.get("registry")
    if path:
        return one_of(*import_attribute(path))
    return cast(Within | None, entry.metadata.get("within"))


class Section:
    """Base class of configuration sections; validates settings on construction."""

    section: ClassVar[str] = ""  # name of the section followed by a dot

    def __post_init__(self) -> None:
        for entry in fields(cast(Any, self)):
            name = self.section + entry.name
            value = getattr(self, entry.name)
            within = get_valid_values(entry)
            if within is not None and not within.holds(value):
                if entry.metadata["registry"]:
                    hint = nearest(value, within.names)
                    raise ConfigError(f"{name} = {format_value(value)} is unknown: {hint}")
                require(False, name, value, f"expected {within.words}")
            needs = entry.metadata.get("needs")
            if needs and value != entry.default:
                alternatives = needs.split(" or ")
                others = " or ".join(self.section + other for other in alternatives)
                require_use(name, value, others, any(self._is_set(other) for other in alternatives))

    def _is_set(self, other: str) -> bool:
        """Return whether a setting has a given value, as in "sharding=full", or one that is not its default."""
        name, equals, value = other.partition("=")
        if equals:
            return str(getattr(self, name)) == value
        return bool(getattr(self, name) != getattr(type(self), name))


def require(holds: bool, name: str, value: object, expectation: str) -> None:
    """Raise ConfigError unless ``holds``: the value of the setting ``name`` is invalid."""
    if not holds:
        raise ConfigError(f"{name} = {format_value(value)} is invalid: {expectation}")


def require_use(name: str, value: object, other: str, used: bool) -> None:
    """Raise ConfigError unless ``used``: the setting has no effect without ``other``."""
    if not used:
        raise ConfigError(f"{name} = {format_value(value)} has no effect unless {other} is set")


def format_value(value: object) -> str:
    """Format a value for a message; TOML may contain integers (0xff…) with more digits than Python prints."""
    try:
        text = repr(value)
        if isinstance(value, tuple):
            text = _format_literal(value)
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
        (), "Fraction of each batch drawn from each source; empty: sources are concatenated.", _WEIGHTS
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
        one_of("first", "random", "weighted", "all"),
    )
    caption_split: str = setting(
        "",
        "Regular expression that separates several captions in one text, such as _medicat_; with "
        "data.caption_choice=random or all.",
        Within(words="a regular expression without groups", holds=_is_separator),
    )
    caption_count: int = setting(
        1,
        "Number of captions of each image in a step, with data.caption_choice=first or random; the image is "
        "encoded once, and compared as if it were in the batch with each. Images with fewer captions repeat them.",
        between(1, 1000),
    )
    caption_weights: tuple[float, ...] = setting(
        (),
        "Relative frequency of each of data.captions, with data.caption_choice=weighted; a sample draws from those "
        "that it has.",
        _WEIGHTS,
        needs="caption_choice=weighted",
    )
    caption_templates: tuple[str, ...] = setting(
        (), 'Templates applied to captions, such as "a photo of {}"; one is chosen at random.'
    )
    caption_prefix: str = setting("", "Text added before each caption.")
    text_dropout: float = setting(
        0.0,
        "Probability of leaving out each word of a caption in training, but not all of them nor those of "
        "data.caption_prefix. Captions count as equal (loss.same) by all of their words.",
        _BELOW_ONE,
    )
    negatives: str = setting(
        "",
        "JSON field with wrong captions of an image, one or a list, as negatives of this image alone (NegCLIP); "
        "one is chosen at random.",
    )
    weight: str = setting(
        "",
        "JSON field with the weight of a pair in the losses clip and siglip, such as the score of a product for a "
        "query (GCL): a number from 0, or one for each caption of an image. Samples without one are bad. Terms, "
        "such as caption.weight, are not weighted.",
    )
    image_fields: tuple[str, ...] = setting(
        (),
        "The image side of a pair as a weighted mean of features, which is normalized again (GCL): those of the "
        'image and of texts in JSON fields, such as ["image:0.9", "title:0.1"]. Evaluation encodes images alone '
        "unless the card of a dataset has image_fields too.",
    )
    text_fields: tuple[str, ...] = setting(
        (), 'The text side, such as ["caption:0.8", "category:0.2"], as data.image_fields.'
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
    balance: str = setting(
        "",
        'Balance samples by a field or text member: "category:20000" uses at most 20,000 samples of each category '
        'in an epoch of a source, in turns, "category:equal" equally many of each, repeated where there are fewer.',
        Within(
            words="empty, FIELD:COUNT or FIELD:equal",
            holds=lambda value: not value or _BALANCE.fullmatch(value) is not None,
        ),
    )
    adjacent: int = setting(
        1,
        "Samples with the same value of data.balance next to each other in each batch, such as the four pairs of a "
        "group of KEEP; a divisor of batch_size and of the number in data.balance. In an epoch, a value has a "
        "multiple of them, and repeats its samples if it has fewer.",
        at_least(1),
        needs="balance",
    )
    last: str = setting(
        "drop",
        "Samples that do not fill a batch at the end of an epoch: drop them, or wrap them into the next epoch.",
        one_of("drop", "wrap"),
    )
    resample: bool = setting(False, "Draw samples with replacement instead of each sample once per epoch.")
    cache_gb: float = setting(
        100.0,
        "Gigabytes of remote shards that each machine caches on disk; 0 reads samples over the network.",
        between(0, MOST),
    )
    workers: int = setting(
        2, "Loader processes of each rank; 0 loads in the training process.", between(0, 512)
    )
    window: int = setting(
        64,
        "Number of shards whose samples are shuffled together; data.groups divides them.",
        between(1, MOST),
    )
    groups: int = setting(
        1,
        "Parts of the data that are read at the same time, each for its own rows of every batch, so that a machine "
        "reads only the shards of its rows; a multiple of the number of machines, and a divisor of batch_size.",
        at_least(1),
    )
    crop_scale: float = setting(
        0.9, "Minimum area of a random crop as a fraction of the image; 1: center crop.", above(0, at_most=1)
    )
    crop_aspect: float = setting(
        4 / 3,
        "Largest ratio of the sides of a random crop, width to height and height to width.",
        between(1, 100),
    )
    flip: float = setting(
        0.0,
        "Probability of a horizontal flip; unsuitable if captions distinguish left from right.",
        between(0, 1),
    )
    vertical_flip: float = setting(
        0.0,
        "Probability of a vertical flip; for images without a natural orientation, such as aerial photographs.",
        between(0, 1),
    )
    rotate90: float = setting(
        0.0,
        "Probability of a rotation by 90, 180 or 270 degrees, which are equally likely; with 0.75, all four "
        "orientations are.",
        between(0, 1),
    )
    color_jitter: float = setting(
        0.0,
        "Maximum relative change of brightness, contrast and saturation; hue changes by up to a quarter of it.",
        between(0, 2),
    )
    grayscale: float = setting(0.0, "Probability of converting an image to grayscale.", between(0, 1))
    blur: float = setting(
        0.0, "Probability of a Gaussian blur with a standard deviation of 0.1 to 2 pixels.", between(0, 1)
    )
    affine: float = setting(
        0.0,
        "Strength of random affine transformations (PLIP: 1): at 1, rotations by up to 10 degrees, shifts by up to "
        "a tenth of the side, sizes of 0.8 to 1.2 and shears by up to 15 degrees; gray beyond the crop.",
        between(0, 2),
    )
    scaled_decode: bool = setting(
        False, "Decode large JPEGs at reduced size: faster; pixel values change by about 0.7 of 255."
    )
    nvjpeg: bool = setting(
        False,
        "Decode plain JPEGs on the GPU with torchcodec. Colors that are stored at a lower resolution are repeated "
        "there and interpolated on the CPU, so pixels at edges of colors differ.",
    )
    truncated: str = setting(
        "error",
        "Truncated shards: raise an error before training, or use the samples of the intact part.",
        one_of("error", "use"),
    )
    max_bad: float = setting(
        0.05,
        "Fraction of samples drawn, counting repeats, that may be bad before the run saves and stops; 0 allows "
        "none. It applies to at least 1,000 samples: 0.05 always allows 50 bad samples.",
        between(0, 1),
    )

    def __post_init__(self) -> None:
        sources = self.sources
        captions = self.captions
        require(bool(sources) and all(sources), "data.train", self.train, "expected at least one source")
        for name, weights, of, count in (
            ("data.weights", self.weights, "data.train", len(sources)),
            ("data.caption_weights", self.caption_weights, "data.captions", len(captions)),
        ):
            require(len(weights) in (0, count), name, weights, f"expected one for each of {of}: {count}")
        require(bool(captions) and all(captions), "data.captions", captions, "expected at least one name")
        for name in captions:
            field = f"{name.removesuffix('.json')}.FIELD"
            require(
                not name.endswith(".json"), "data.captions", name, f"expected a field of it, such as {field}"
            )
        if self.caption_choice == "weighted":
            weights = self.caption_weights
            require(bool(weights), "data.caption_weights", weights, "expected one for each of data.captions")
        for template in self.caption_templates:
            require(
                "{}" in template, "data.caption_templates", template, "expected {} in place of the caption"
            )
        several = f"cannot be combined with data.caption_count = {self.caption_count}"
        single = self.caption_count == 1
        choices = single or self.caption_choice in ("first", "random")
        require(choices, "data.caption_choice", self.caption_choice, several)
        require(single or not self.negatives, "data.negatives", self.negatives, several)
        changed = bool(self.negatives and self.caption_templates)
        require(
            not changed, "data.caption_templates", self.caption_templates, "expected none with data.negatives"
        )
        alone = "cannot be combined with data.negatives or data.caption_count"
        combined = bool(self.text_fields and (self.negatives or not single))
        require(not combined, "data.text_fields", self.text_fields, alone)
        self.parse_fields("image")
        self.parse_fields("text")
        super().__post_init__()
        if self.balance:
            again = "cannot be combined with data.balance, which draws each sample once in turn"
            require(not self.resample, "data.resample", self.resample, again)
            divisor = f"expected a divisor of the number in data.balance = {self.balance}"
            require(self.balance_by[1] % self.adjacent == 0, "data.adjacent", self.adjacent, divisor)
        both = self.nvjpeg and self.scaled_decode
        require(not both, "data.nvjpeg", True, "cannot be combined with data.scaled_decode")

    def parse_fields(self, side: str) -> dict[str, float]:
        """Return the weights of ``image_fields`` or ``text_fields`` by name, that of the image or caption first."""
        name, first = f"data.{side}_fields", {"image": "image", "text": "caption"}[side]
        weights: dict[str, float] = {}
        for entry in getattr(self, f"{side}_fields") or (f"{first}:1",):
            field, _, number = entry.rpartition(":")
            try:
                weight = float(number)
            except ValueError:
                weight = math.nan
            valid = bool(field) and field not in weights and 0 < weight < math.inf
            require(valid, name, entry, "expected NAME:WEIGHT with a weight above 0, each name once")
            weights[field] = weight
        alone = f'expected {first}:WEIGHT and other fields, such as ["{first}:0.9", "title:0.1"]'
        holds = first in weights and (len(weights) > 1 or not getattr(self, f"{side}_fields"))
        require(holds, name, getattr(self, f"{side}_fields"), alone)
        return {first: weights.pop(first), **weights}

    @property
    def balance_by(self) -> tuple[str, int]:
        """The field of ``balance`` and its number; 0 for equal. ("", 0) without it."""
        name, _, count = self.balance.rpartition(":")
        return name, int(count) if count.isdecimal() else 0

    @property
    def sources(self) -> tuple[str, ...]:
        """``train`` as a tuple, whichever way it was given."""
        return (self.train,) if isinstance(self.train, str) else self.train

    @property
    def redacted_sources(self) -> tuple[str, ...]:
        """``sources`` without secrets in URLs."""
        return tuple(map(redact_url, self.sources))


@dataclass(frozen=True, kw_only=True)
class PixelsConfig(Section):
    """From image files to pixels: recorded with the model, and applied by everything that loads it."""

    section = "pixels."
    range: str | tuple[float, ...] | tuple[tuple[float, ...], ...] = setting(
        "auto",
        "Values of 16-bit, 32-bit and float images that become black and white, such as 0,4095, or such a pair for "
        "each channel, separated by semicolons: '0,255;0,4095;0,1000'; dtype: the full range of 16 bits. auto: as "
        "in model.weights, else training stops at such an image. `python -m data inspect` suggests a range.",
    )
    channels: int = setting(
        3,
        "Channels of images: 3 for RGB, other numbers for multispectral images. With RGB weights, the first three "
        "channels must be red, green and blue.",
        between(1, 1024),
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
        "mean of these. `python -m data inspect` suggests mean and std for other channels than RGB.",
    )
    std: tuple[float, ...] = setting((), "Standard deviation of each channel, as pixels.mean.", _WEIGHTS)
    extend: str = setting(
        "zeros",
        "With RGB weights, initial weights of further channels: zeros, so that the embeddings are those of RGB, or "
        "the mean of the weights of red, green and blue.",
        one_of("zeros", "mean"),
        needs="channels",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.background:
            color_of(self.background, setting="pixels.background")
        pixel_range = parse_pixel_range(self.range, setting="pixels.range")
        count = self.channels
        each = f"expected one for each of pixels.channels: {count}"
        is_list = isinstance(pixel_range, tuple) and isinstance(pixel_range[0], tuple)
        require(not is_list or len(pixel_range) == count, "pixels.range", self.range, each)
        source = (
            f"such as `python -m data inspect SOURCE pixels.channels={count}` suggests, or [], with which further "
            "channels have the average of RGB's"
        )
        for name in ("mean", "std"):
            values = getattr(self, name)
            require(len(values) in (0, count), f"pixels.{name}", values, f"{each}, {source}")
        if count != 3:
            rgb = "expected none, because pixels.channels is not 3"
            require(self.background in ("", "none"), "pixels.background", self.background, rgb)


def _parse_object(name: str, text: str) -> dict[str, Any]:
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
        "ViT-B-32",
        "Architecture: one of clipkit's, such as ViT-B-32 or ViT-L-14, or open_clip:NAME. Empty: that of "
        "model.weights, which are then read when a run resumes too.",
    )
    image: str = setting("", f"Another image tower: {list_choices(IMAGE_TOWERS)}.")
    image_options: str = setting(
        "",
        'Arguments of the tower of model.image, as JSON, such as {"depth": 4, "global_pool": "map"} with timm, or '
        '{"colors": 512, "causal": true} with pixels. With timm, {"projection": "mlp", "dropout": 0.5} makes the '
        "projection two layers, with dropout in training.",
    )
    text: str = setting(
        "",
        f"Another text tower: {list_choices(TEXT_TOWERS)}. classes:FILE, for loss.name=classes, is a "
        "classification head with one row per line of a file of class names.",
    )
    text_options: str = setting(
        "",
        'Options of a text tower of transformers, as JSON: {"pooling": "cls"} (the first token), "mean", "last" or '
        '"pooler" (the encoder\'s own), by default what sentence-transformers stores with the encoder, or mean; '
        '{"projection": "linear"}, "mlp" (two layers, with "dropout": 0.5 between them in training) or "none".',
    )
    tokenizer: str = setting(
        "",
        "Folder of a tokenizer from `python -m data tokenizer`, for clipkit's text transformer; it is stored with "
        "the weights. Empty: the text tower's own, or that of model.weights.",
    )
    image_size: int = setting(0, "Image side in pixels; 0: the architecture's default.", at_least(0))
    image_tokens: int = setting(
        0,
        "Most patches of an image of variable size and aspect ratio (NaFlex), such as 256, for clipkit's ViT with "
        "shape.pool=class or map: images are resized to a grid of whole patches, keep their aspect ratio and are "
        "cropped only by data.crop_scale. Position embeddings are interpolated to each grid. 0: square images.",
        between(0, 65_536),
    )
    context_length: int = setting(
        0, "Maximum caption length in tokens; 0: the architecture's default.", at_least(0)
    )
    weights: str = setting(
        "", "Initial weights: any source that clipkit.load accepts, such as the folder of another run."
    )
    image_weights: str = setting(
        "",
        "Initial weights of the image tower, for example to lock it (LiT): a file or folder with timm's names, or "
        "hf-hub:OWNER/REPOSITORY. For clipkit's ViT those of a ViT of timm, DINO, iBOT or MAE with a class token, "
        "mostly with shape.norms=vit; set pixels.mean and pixels.std to those of the weights. For a tower of timm, "
        "also timm, for those that timm publishes; its images are normalized as timm does. For pixels, the file "
        "of `python -m data palette`.",
    )
    text_weights: str = setting(
        "",
        "Initial weights of a text tower of transformers: transformers for those of model.text, or a folder or "
        "hf-hub:OWNER/REPOSITORY with other weights of this encoder. The projection starts with random weights.",
    )
    new_head: bool = setting(
        False,
        "Take only the image tower of model.weights; the rest, such as a classification head, starts with random "
        "weights.",
        needs="weights",
    )
    projections: tuple[str, ...] = setting(
        (),
        'Sources whose images have a projection of their own in training, such as "image:laion" for the source of '
        "data.train with laion in its path; for replayed pairs of another kind (BioCLIP 2). They start as copies "
        "of the image tower's projection, with which all images are encoded after training.",
    )
    patch_dropout: float = setting(
        0.0,
        "Fraction of each image's patches to drop in training, chosen at random in each step (FLIP).",
        _BELOW_ONE,
    )

    def __post_init__(self) -> None:
        check_names(self.name, self.image, self.text)
        super().__post_init__()
        require(bool(self.name or self.weights), "model.name", "", "requires model.weights")
        both = bool(self.tokenizer and self.weights and not self.new_head)
        require(not both, "model.tokenizer", self.tokenizer, "model.weights have their own tokenizer")
        _parse_object("model.image_options", self.image_options)
        _parse_object("model.text_options", self.text_options)
        if self.text_weights:
            usable = self.text.startswith("transformers:") and (self.new_head or not self.weights)
            other = "model.text=transformers:FOLDER or NAME, without model.weights or with model.new_head,"
            require_use("model.text_weights", self.text_weights, other, usable)
        if self.image_weights:
            alone = "model.weights have their own image tower"
            require(not self.weights, "model.image_weights", self.image_weights, alone)

    @property
    def projected_sources(self) -> tuple[str, ...]:
        """The names of sources in ``projections``."""
        return tuple(name.removeprefix(_IMAGE_PROJECTION) for name in self.projections)

    @property
    def label(self) -> str:
        """The model's name."""
        tower = self._text_tower
        # omit the path of the file of class names
        text = tower.setting.partition(":")[0] if tower is not None and tower.over_classes else self.text
        patches = f"{self.image_tokens} patches" if self.image_tokens else ""
        name = self.name or "the model of model.weights"
        return " + ".join(filter(None, (name, patches, self.image, text)))

    @property
    def tower_options(self) -> dict[str, Any]:
        """``image_options`` as values."""
        return _parse_object("model.image_options", self.image_options)

    @property
    def text_tower_options(self) -> dict[str, Any]:
        """``text_options`` as values."""
        return _parse_object("model.text_options", self.text_options)

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
        selection = select_tower(self.text, TEXT_TOWERS)
        return None if selection is None else selection[0]


@dataclass(frozen=True, kw_only=True)
class ShapeConfig(Section):
    """Sizes of clipkit's own towers that differ from those of model.name."""

    section = "shape."
    image_width: int = setting(
        0, "Width of the image tower; 0: that of model.name, as for all sizes.", at_least(0)
    )
    image_layers: int = setting(0, "Its number of blocks.", at_least(0))
    image_heads: int = setting(
        0, "Its attention heads; 0: heads as wide as those of model.name.", at_least(0)
    )
    image_mlp: float = setting(0.0, "Width inside its MLPs, relative to its width.", at_least(0))
    patch: int = setting(0, "Side of a patch in pixels.", at_least(0))
    pool: str = setting(
        "",
        "What is projected to an image's features. class: the class token. mean: the mean of the patches. "
        "mean_norm: the same, but normalized after the mean, not before it. map: attention of a learned token to "
        "the patches. Empty: that of model.name.",
        one_of("", "class", "mean", "mean_norm", "map"),
    )
    positions: str = setting(
        "",
        "Position embeddings of patches: learned; learned_2d: one for each row and each column, of half the width; "
        "sincos_2d: fixed sines and cosines of row and column; none. Empty: those of model.name.",
        one_of("", "learned", "learned_2d", "sincos_2d", "none"),
    )
    norms: str = setting(
        "",
        "Layer norms of the image tower. clip: one more before the blocks, epsilon 1e-5. vit: as in ViT, DINO, MAE "
        "and most of timm's ViTs: none before the blocks, 1e-6. Empty: those of model.name, clip.",
        one_of("", "clip", "vit"),
    )
    distilled: bool = setting(
        False,
        "Add a distillation token (DeiT): one half of the embedding belongs to it and learns from distill.teacher, "
        "the other half belongs to the class token and learns the labels. Both are averaged for evaluation.",
    )
    text_width: int = setting(
        0, "Width of the text tower, with heads as wide as those of model.name.", at_least(0)
    )
    text_layers: int = setting(0, "Its number of blocks.", at_least(0))
    embed: int = setting(0, "Dimension of the embedding.", at_least(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        both = self.distilled and self.pool not in ("", "class")
        require(not both, "shape.pool", self.pool, "expected class with shape.distilled")

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that differ from ``model.name``; the distillation token is a kind of pooling."""
        sizes = {name: value for name, value in vars(self).items() if value}
        if sizes.pop("distilled", False):
            sizes["pool"] = "distilled"
        return sizes


@dataclass(frozen=True, kw_only=True)
class LossConfig(Section):
    """The objective, computed over the global batch; see clipkit/objectives/__init__.py."""

    section = "loss."
    name: str = setting("clip", "Objective.", registry="clipkit.objectives:OBJECTIVES")
    same: str = setting(
        "negatives",
        "How to treat other pairs in the batch with the same caption or image. With positives, the loss cannot "
        "reach 0, and a confident model's loss may exceed chance.",
        one_of("negatives", "positives", "ignored"),
    )
    same_field: str = setting(
        "",
        "JSON field with the group of a pair, such as concept: loss.same applies to pairs with an equal value too. "
        "Lists are equal if all their elements are; a pair without a value has a group of its own.",
        needs="same=positives or same=ignored",
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
        (),
        "Weights of loss.dims, the last one for the whole embedding; empty for equal weights.",
        _WEIGHTS,
        needs="dims",
    )
    precision: str = setting(
        "float32",
        "Precision of the products of features in the losses clip and siglip, and of their gradients, on NVIDIA "
        "GPUs. With tf32, which is meant for 65,536 pairs and more, cosines differ by up to 0.0001 and gradients "
        "by up to 0.2%, less than with bf16 towers. The error was emulated, and no speed was measured.",
        one_of("float32", "tf32"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rising = list(self.dims) == sorted(set(self.dims))
        require(rising, "loss.dims", self.dims, "expected rising sizes")
        if self.same == "ignored":
            alone = "expected 0 with loss.same=ignored"
            require(not self.smoothing, "loss.smoothing", self.smoothing, alone)
        if self.dim_weights:
            count = len(self.dims) + 1
            one_each = f"expected {count} weights: one for each of loss.dims and one for the whole embedding"
            require(len(self.dim_weights) == count, "loss.dim_weights", self.dim_weights, one_each)


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
        "",
        "With distill.features, the teacher's features of the captions, from `clipkit encode --text`.",
        needs="features",
    )
    scale: float = setting(
        0.0,
        "With distill.features, the teacher's exp(t), by which its similarities are multiplied; 0: that which "
        "`clipkit encode` has stored.",
        between(0, 10_000),
        needs="features",
    )
    weight: float = setting(
        0.5,
        "Weight of the distillation loss; the objective has 1 minus this weight. 0 with select.fraction: the "
        "teacher is only the reference of data selection.",
        between(0, 1),
        needs="teacher or features",
    )
    temperature: float = setting(
        1.0,
        "With loss.name=classes, the number by which the logits of teacher and student are divided; the loss is "
        "multiplied by its square.",
        above(0, at_most=1000),
        needs="teacher",
    )
    hard: bool = setting(
        False,
        "With loss.name=classes, learn the teacher's most likely class, not its distribution (DeiT).",
        needs="teacher",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features and not self.text_features:
            require(False, "distill.text_features", "", "required by distill.features")
        both = bool(self.teacher and self.features)
        require(not both, "distill.features", self.features, "cannot be combined with distill.teacher")
        soft = not self.hard or self.temperature == 1
        require(soft, "distill.temperature", self.temperature, "expected 1 with distill.hard")
        alone = "expected below 1 with distill.teacher=average, from which alone nothing is learned"
        require(not self.is_average or self.weight < 1, "distill.weight", self.weight, alone)

    @property
    def teaches(self) -> bool:
        """Whether there is a teacher whose distribution is learned."""
        return bool(self.teacher or self.features) and self.weight > 0

    @property
    def has_reference(self) -> bool:
        """Whether there is a teacher with weights of its own, which can be the reference of data selection."""
        return bool(self.teacher or self.features) and not self.is_average

    @property
    def loads_teacher(self) -> bool:
        """Whether a model is loaded that encodes each batch."""
        return bool(self.teacher) and not self.is_average

    @property
    def is_average(self) -> bool:
        """Whether the averaged weights of the training are the teacher."""
        return self.teacher == "average"


@dataclass(frozen=True, kw_only=True)
class SelectConfig(Section):
    """Data selection: train on some pairs of each batch, those that are learnable (JEST).

    See Evans et al. 2024, https://arxiv.org/abs/2406.17711, and clipkit/training/selection.py. Each step reads
    ``batch_size`` pairs, scores them without gradients, and trains ``select.fraction`` of them: pairs with a high
    loss of the model and a low loss of the reference, which is the teacher of [distill], such as a model trained on
    fewer and cleaner pairs.
    """

    section = "select."
    fraction: float = setting(
        1.0,
        "Fraction of the batch_size pairs of a step that are trained; 1: all. To train on as many pairs as without "
        "selection, divide batch_size by it: each step then reads and scores more. Epochs and the metric samples "
        "count the pairs that are read. Requires distill.teacher or distill.features; distill.weight=0 selects "
        "without distilling.",
        above(0, at_most=1),
    )
    image_size: int = setting(
        0,
        "Side in pixels to which the model resizes images for scoring, which makes it cheaper; 0: none. Requires "
        "an image tower of clipkit or a convolutional one of timm.",
        at_least(0),
        needs="fraction",
    )

    def count_pairs(self, batch_size: int) -> int:
        """Return the number of pairs of a batch that are trained."""
        return round(self.fraction * batch_size)


_LOCKS = Within(
    words='empty, "all", "backbone", or the number of top layers to train',
    holds=lambda value: value >= 0 if isinstance(value, int) else value in ("", "all", "backbone"),
)


@dataclass(frozen=True, kw_only=True)
class LockConfig(Section):
    """Locked (frozen) parameters; see clipkit/training/build.py. The temperature is always trained.

    Locked layers compute as in evaluation, without dropout. While a tower has locked layers, all its batch norms
    use their running statistics.
    """

    section = "lock."
    image: str | int = setting(
        "",
        '"all" locks the image tower (LiT), "backbone" all but its projection to the embedding; a number locks all '
        "but that many top layers. From the top, layers are the projection with the last norm, the blocks in "
        "reverse order, and the embeddings.",
        _LOCKS,
    )
    text: str | int = setting("", "The same for the text tower.", _LOCKS)
    unfreeze_every: int = setting(
        0,
        "Steps after which the next lower layer of each tower is unlocked, starting with the top layer; 0: train "
        "all layers from the start.",
        at_least(0),
    )
    image_until: int = setting(
        0,
        "Steps during which only the top layer of the image tower is trained, its projection with the last norm.",
        at_least(0),
    )
    text_until: int = setting(0, "The same for the text tower.", at_least(0))
    store: bool = setting(
        False,
        'Encode all images or texts once before training, by the towers locked with "all" or "backbone", and train '
        "on the stored features: many times faster, with the same result. Other runs with these data, weights and "
        "crops find them in clipkit's cache folder.",
    )
    views: int = setting(
        1,
        "Crops of each image to store: those of the first epochs, used in turn. With as many views as epochs, an "
        "image tower sees the crops that it sees without lock.store, unless each caption is a sample.",
        between(1, 1000),
        needs="store",
    )

    def stores(self, tower: str) -> bool:
        """Whether features of the tower "image" or "text" are stored."""
        return self.store and getattr(self, tower) in ("all", "backbone")

    def __post_init__(self) -> None:
        super().__post_init__()
        stores_any = self.stores("image") or self.stores("text")
        towers = 'lock.image or lock.text is "all" or "backbone"'
        require_use("lock.store", self.store, towers, stores_any or not self.store)
        images = 'lock.image is "all" or "backbone"'
        require_use("lock.views", self.views, images, self.views == 1 or self.stores("image"))
        alone = "cannot be combined with lock.store"
        require(not (self.store and self.unfreeze_every), "lock.unfreeze_every", self.unfreeze_every, alone)
        for tower, locked, until in (
            ("image", self.image, self.image_until),
            ("text", self.text, self.text_until),
        ):
            require(
                locked not in ("all", "backbone") or not until,
                f"lock.{tower}_until",
                until,
                f"has no effect with lock.{tower}={locked}",
            )


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section):
    """Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) of ``model.weights``, which are locked."""

    section = "lora."
    rank: int = setting(
        0,
        "Rank of the adapters of all matrices in the towers' blocks; everything else but the temperature is "
        "locked. 0: train the weights themselves.",
        at_least(0),
    )
    alpha: float = setting(
        0.0, "Adapters are multiplied by alpha / rank. 0: by 1.", at_least(0), needs="rank"
    )
    image: bool = setting(True, "Whether the image tower has adapters; otherwise it is locked.", needs="rank")
    text: bool = setting(True, "The same for the text tower.", needs="rank")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.image or self.text, "lora.text", self.text, "expected true with lora.image=false")


@dataclass(frozen=True, kw_only=True)
class SmallConfig(Section):
    """Train small, finish large (CLIPA, Li et al. 2023, https://arxiv.org/abs/2305.07017)."""

    section = "small."
    steps: int = setting(
        0,
        "Number of initial steps with smaller images or shorter captions.",
        at_least(0),
        needs="image_size or context_length",
    )
    image_size: int = setting(
        0, "Image side in pixels in these steps; 0: the model's.", at_least(0), needs="steps"
    )
    context_length: int = setting(
        0, "Maximum caption length in these steps; 0: the model's.", at_least(0), needs="steps"
    )


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """The optimizer and its schedule: linear warm-up, then decay to optim.min_lr."""

    section = "optim."
    name: str = setting("adamw", "The optimizer.", registry="clipkit.training:OPTIMIZERS")
    lr: float = setting(5e-4, "Peak learning rate, reached at the end of the warm-up.", above(0))
    min_lr: float = setting(0.0, "Final learning rate; at most optim.lr.", at_least(0))
    warmup: int = setting(2000, "Steps in which the learning rate rises to optim.lr.", at_least(0))
    schedule: str = setting(
        "cosine", "Schedule of the learning rate after the warm-up.", registry="clipkit.training:SCHEDULES"
    )
    cooldown: int = setting(
        0,
        "With optim.schedule=constant or rsqrt, number of final steps in which the learning rate decays.",
        at_least(0),
    )
    weight_decay: float = setting(
        0.2,
        "Decoupled weight decay of matrices; not applied to biases, gains and the temperature.",
        at_least(0),
    )
    head_decay: float = setting(
        -1.0,
        "Weight decay of the matrices of the last layers: projections and rows of classes; -1: optim.weight_decay.",
        Within(words="-1, or at least 0", holds=lambda value: value == -1 or value >= 0),
    )
    layer_decay: float = setting(
        1.0,
        "Factor by which the learning rate decreases from each layer to the one below.",
        above(0, at_most=1),
    )
    image_lr_scale: float = setting(1.0, "Multiplier for the image tower's learning rate.", at_least(0))
    text_lr_scale: float = setting(1.0, "Multiplier for the text tower's learning rate.", at_least(0))
    beta1: float = setting(0.9, "Decay of the running mean of the gradients (momentum).", _BELOW_ONE)
    beta2: float = setting(
        0.98, "Decay of the running mean of the squared gradients; with lion, of the gradients.", _BELOW_ONE
    )
    eps: float = setting(
        1e-6,
        "Added to the denominator of the update for numerical stability. sgd and lion have no denominator, and "
        "adafactor a constant of its own.",
        above(0),
    )
    sam: float = setting(
        0.0,
        "Sharpness-aware minimization: gradients are those at weights moved by this distance along the gradient, "
        "which doubles the time of a step; 0: off.",
        at_least(0),
    )
    clip_norm: float = setting(
        1.0, "Maximum norm to which the whole gradient is clipped; 0: no clipping.", at_least(0)
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
        import_attribute("clipkit.training:SCHEDULES")[self.schedule].check(self)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """When to save checkpoints; the run is also saved at its end and on Ctrl-C or SIGTERM."""

    section = "checkpoint."
    every_steps: int = setting(1000, "Steps between checkpoints; 0: disabled.", at_least(0))
    every_minutes: float = setting(30.0, "Minutes between checkpoints; 0: disabled.", at_least(0))
    keep: int = setting(3, "Number of newest checkpoints to keep; 0: all.", at_least(0))
    best: str = setting(
        "",
        "DATASET/METRIC, such as flickr8k/mean_R@1, or METRIC on the first dataset of eval.data: also keep the "
        'checkpoint with the best score on this dataset, which clipkit.load("RUN@best") loads.',
    )
    compare_every_steps: int = setting(
        100,
        "Steps between two comparisons of the weights of all ranks, which also precede each checkpoint. A "
        "difference, as when memory is faulty, stops the run. 0: disabled.",
        at_least(0),
    )


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section):
    """Evaluation during training and at the end."""

    section = "eval."
    data: tuple[str, ...] = setting(
        (),
        "Built-in sets (digits, emoji, glyphs, cues) or dataset folders, whose images and captions are found by "
        "data.image and data.captions where samples have them.",
    )
    every_steps: int = setting(1000, "Steps between evaluations; 0: only at the end.", at_least(0))
    batch_size: int = setting(256, "Images encoded at a time on each rank.", between(1, MOST))
    guard: tuple[str, ...] = setting(
        (),
        "Datasets or suites, such as builtin, that show what model.weights could do. At the end of the run, the "
        "last and the best checkpoint and interpolations with model.weights are compared with model.weights on "
        "these and on the held-out pairs (the dataset of checkpoint.best, or the first of eval.data): is one "
        "better, and what was lost? Without guard sets this happens only if checkpoint.best is set. Rank 0 "
        "computes it.",
    )
    patience: int = setting(
        0,
        "Stop after this many evaluations in a row without a score of checkpoint.best above the 95% interval of an "
        "earlier one; 0: never.",
        at_least(0),
    )


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    """Logging of metrics, in addition to metrics.jsonl in the run folder."""

    section = "log."
    every_steps: int = setting(
        10,
        "Steps between lines in metrics.jsonl and updates of the progress bar. Without a terminal, a line is "
        "printed at most every ten seconds and for the last step.",
        at_least(1),
    )
    tensorboard: bool = setting(
        True, "Also write metrics to tensorboard/ in the run folder, if tensorboard is installed."
    )
    samples: bool = setting(
        False,
        "Store the losses and margins of each pair in each step in samples/ in the run folder, 28 bytes per pair; "
        "python -m data dynamics RUN shows which pairs are never learned.",
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
    steps: int = setting(
        10_000,
        'Number of updates; may be increased later. "10 epochs" is converted by the number of pairs when training '
        "starts, also in optim.warmup, optim.cooldown, lock.unfreeze_every, checkpoint.every_steps and "
        "eval.every_steps.",
        at_least(1),
    )
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
        at_least(1),
    )
    precision: str = setting(
        "auto",
        "Precision of the towers; auto: bf16 on GPUs and CPUs that compute it natively, else fp32. Losses are "
        "float32, see loss.precision.",
        one_of("auto", "fp32", "bf16"),
    )
    sharding: str = setting(
        "none",
        "Shard weights, gradients and optimizer state, for models too large for one GPU: full, over all GPUs; "
        "hybrid, over the GPUs of each host.",
        one_of("none", "full", "hybrid"),
    )
    reshard: bool = setting(
        True,
        "With sharding, free gathered weights after the forward pass; false is faster but needs more memory.",
        needs="sharding=full or sharding=hybrid",
    )
    recompute: int = setting(
        0,
        "Activation checkpointing: recompute every n-th block in the backward pass to save memory; 1: all blocks, "
        "2: every second block, 0: none.",
        at_least(0),
    )
    compile: bool = setting(
        False, "Compile blocks with torch.compile: steps are faster, but the start takes a minute or more."
    )
    deterministic: bool = setting(
        True,
        "On GPUs, use algorithms that repeat bit for bit, so that a resumed run equals one that never stopped. "
        "CPUs always do.",
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pixels: PixelsConfig = field(default_factory=PixelsConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    # the sections that objectives and terms declare, by name; see clipkit/objectives/__init__.py
    objectives: Mapping[str, Any] = field(default_factory=dict)
    distill: DistillConfig = field(default_factory=DistillConfig)
    select: SelectConfig = field(default_factory=SelectConfig)
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
        least = f"leaves {self.trained_pairs} of batch_size = {self.batch_size} pairs: expected at least 2"
        require(self.trained_pairs >= 2, "select.fraction", self.select.fraction, least)
        divides = self.batch_size % self.data.groups == 0
        divisor = f"expected a divisor of batch_size = {self.batch_size}"
        require(divides, "data.groups", self.data.groups, divisor)
        rows = self.batch_size // self.data.groups
        divisor = f"expected a divisor of batch_size / data.groups = {rows}"
        require(rows % self.data.adjacent == 0, "data.adjacent", self.data.adjacent, divisor)
        kinds = import_attribute("clipkit.objectives:objective_sections")()
        assert self.objectives.keys() <= kinds.keys(), self.objectives
        sections = {name: self.objectives.get(name) or kind() for name, kind in kinds.items()}
        object.__setattr__(self, "objectives", sections)
        self._check_captions()
        self._check_teacher()
        self._check_selection()
        if self.checkpoint.best:
            require_use("checkpoint.best", self.checkpoint.best, "eval.data", bool(self.eval.data))
        if self.eval.guard:
            require_use("eval.guard", self.eval.guard, "model.weights", self.is_fine_tune)
            require_use("eval.guard", self.eval.guard, "eval.data", bool(self.eval.data))
        waits = not self.eval.patience or bool(self.checkpoint.best)
        require_use("eval.patience", self.eval.patience, "checkpoint.best", waits)
        if self.pixels.channels != 3:
            rgb = "requires RGB images: pixels.channels = 3"
            for name in ("color_jitter", "grayscale", "nvjpeg"):
                value = getattr(self.data, name)
                require(not value, f"data.{name}", value, rgb)
        if self.lora.rank:
            require_use("lora.rank", self.lora.rank, "model.weights", bool(self.model.weights))
            alone = "cannot be combined with lora.rank"
            for name in ("image", "text", "unfreeze_every", "image_until", "text_until"):
                locked = getattr(self.lock, name)
                require(not locked, f"lock.{name}", locked, alone)
            require(not self.model.new_head, "model.new_head", True, alone)
        self._check_projections()
        self._check_stored_features()
        self._check_image_tokens()
        import_attribute("clipkit.training:OPTIMIZERS")[self.optim.name].check(self)
        import_attribute("clipkit.objectives:check_objectives")(self)

    @property
    def is_fine_tune(self) -> bool:
        """Whether the whole model starts with given weights."""
        return bool(self.model.weights) and not self.model.new_head

    def _check_stored_features(self) -> None:
        """Refuse what needs images or tokens in each step if features are stored instead."""
        if not self.lock.store:
            return
        alone = "cannot be combined with lock.store"
        settings = {
            "small.steps": self.small.steps,
            "distill.teacher": self.distill.teacher,
            "sharding": "" if self.sharding == "none" else self.sharding,
            **{f"{name}.weight": term.weight for name, term in self.terms.items() if term.reads_images},
        }
        if self.lock.stores("image"):
            settings["model.patch_dropout"] = self.model.patch_dropout
            settings["select.image_size"] = self.select.image_size
            settings["model.projections"] = self.model.projections
            settings["data.nvjpeg"] = self.data.nvjpeg
        if self.lock.stores("text"):
            settings["data.text_dropout"] = self.data.text_dropout
        for name, value in settings.items():
            require(not value, name, value, alone)

    def _check_image_tokens(self) -> None:
        """Refuse what needs images of one size if images are of variable size."""
        if not self.model.image_tokens:
            return
        settings = {
            "select.fraction": self.select.fraction if self.select.fraction < 1 else 0,
            "compile": self.compile,
            "data.affine": self.data.affine,  # moves long images out of their frame
            "data.nvjpeg": self.data.nvjpeg,
            "distill.teacher": "" if self.distill.is_average else self.distill.teacher,
            "lock.store": self.lock.stores("image"),
            "model.image_size": self.model.image_size,
            "model.image_weights": self.model.image_weights,
        }
        for name, value in settings.items():
            require(not value, name, value, "cannot be combined with model.image_tokens")

    def _check_projections(self) -> None:
        sources = self.data.sources
        for projection, name in zip(self.model.projections, self.model.projected_sources, strict=True):
            label = f"model.projections = {projection!r}"
            if name == projection or not name:
                raise ConfigError(f"{label}: expected image:NAME with a part of the path of a source")
            matches = sum(name in source for source in sources)
            if matches != 1:
                raise ConfigError(f"{label}: {matches} sources of data.train contain {name!r}: expected one")
        numbers = self.projection_numbers
        if self.model.projections and (0 not in numbers or len(set(numbers)) <= len(self.model.projections)):
            raise ConfigError(
                f"model.projections = {list(self.model.projections)}: expected a source of data.train for each, "
                "and at least one without a projection of its own"
            )

    @property
    def projection_numbers(self) -> tuple[int, ...]:
        """The projection of each source of the training data, see ``CLIP.encode_image``."""
        numbers = [0] * len(self.data.sources)
        for i, name in enumerate(self.model.projected_sources, start=1):
            for j, source in enumerate(self.data.sources):
                if name in source:
                    numbers[j] = i
        return tuple(numbers)

    def _check_captions(self) -> None:
        data = self.data
        if self.distill.teaches:
            alone = "cannot be combined with distillation"
            require(not data.negatives, "data.negatives", data.negatives, alone)
            require(data.caption_count == 1, "data.caption_count", data.caption_count, alone)
            for name in ("weight", "image_fields", "text_fields"):
                require(not getattr(data, name), f"data.{name}", getattr(data, name), alone)
        if data.text_dropout:
            for name, other in (
                ("model.text", self.model.text if self.model.over_classes else ""),
                ("distill.text_features", self.distill.text_features),
                ("data.negatives", data.negatives),
            ):
                require(not other, name, other, "cannot be combined with data.text_dropout")

    def _check_teacher(self) -> None:
        distill = self.distill
        if distill.is_average:
            require_use("distill.teacher", distill.teacher, "optim.average", bool(self.optim.average))
        if self.shape.distilled:
            learns = bool(distill.teacher or self.model.weights)
            require_use("shape.distilled", True, "distill.teacher or model.weights", learns)
            least = "expected below 1 with shape.distilled, whose class token would learn nothing"
            require(distill.weight < 1, "distill.weight", distill.weight, least)
            refusal = "cannot be combined with shape.distilled"
            require(not self.loss.dims, "loss.dims", self.loss.dims, refusal)

    def _check_selection(self) -> None:
        fraction, distill = self.select.fraction, self.distill
        if fraction < 1:
            other = "distill.teacher (a model) or distill.features"
            require_use("select.fraction", fraction, other, distill.has_reference)
        else:
            require_use("distill.weight", distill.weight, "select.fraction", distill.weight > 0)

    @property
    def trained_pairs(self) -> int:
        """Number of pairs that a step trains on, over all ranks."""
        return self.select.count_pairs(self.batch_size)

    @property
    def terms(self) -> dict[str, Any]:
        """The local terms with a weight, by name; see ``clipkit.objectives.select_terms``."""
        terms: dict[str, Any] = import_attribute("clipkit.objectives:select_terms")(self)
        return terms

    def notes(self, *, step: int, samples: int, layers: int, hosts: int = 1) -> list[str]:
        """Return notes on settings that may be unintentional, and the objective's note.

        Args:
            layers: number of layers that ``lock.unfreeze_every`` unlocks in the tower with the most layers.
        """
        steps = self.steps
        optim = self.optim
        every = self.lock.unfreeze_every
        notes: list[str] = []
        if step >= steps:
            return []
        if optim.warmup >= steps:
            last = import_attribute("clipkit.training:learning_rate")(steps - 1, steps, optim)
            notes.append(
                f"optim.warmup = {optim.warmup} is not shorter than the run of {steps} steps: the learning rate "
                f"rises to {last:.2g} (optim.lr = {optim.lr:g}) and does not decay"
            )
        notes.append(import_attribute("clipkit.training:OPTIMIZERS")[optim.name].note(optim))
        if self.small.steps >= steps:
            notes.append(
                f"small.steps = {self.small.steps} is not shorter than the run of {steps} steps: no step is made "
                "at the model's full size"
            )
        for name, term in self.terms.items():
            if term.after >= steps:
                notes.append(
                    f"{name}.after = {term.after} is not shorter than the run of {steps} steps: the term never "
                    "begins"
                )
        if every and every * (layers - 1) >= steps:
            notes.append(
                f"lock.unfreeze_every = {every} unlocks {1 + (steps - 1) // every} of {layers} layers in {steps} "
                "steps; the others stay locked"
            )
        seen = steps * self.batch_size / samples
        if seen > _MANY_EPOCHS and not self.data.weights and not self.data.resample:
            ten = max(1, 10 * samples // self.batch_size)
            notes.append(
                f"each of the {samples:,} pairs is seen {seen:,.0f} times; steps={ten} would be 10 times"
            )
        if not step and self.data.groups % hosts:
            remote = any(map(is_remote, self.data.sources))
            better = next((n for n in (64, hosts) if n % hosts == 0 and self.batch_size % n == 0), None)
            if remote and better:
                notes.append(
                    f"data.groups = {self.data.groups} is not a multiple of the {hosts} machines, so they download "
                    f"the same shards; with data.groups={better}, each downloads its own part"
                )
        if not step and not self.model.weights:
            notes.append(import_attribute("clipkit.objectives:select_objective")(self).note)
        return [f"note: {note}" for note in notes if note]


# Settings that may differ when a run is resumed. They affect neither the order of the data nor the result, except
# ``steps``, which extends a run; train.py then reports the learning rates. Sources may change because checkpoints
# contain all weights and the manifest identifies the data. ``pixels.range`` may be set later because without it
# training stops at the first image that it affects.
RESUMABLE = {
    "out", "steps", "accumulate", "sharding", "reshard", "recompute", "compile", "model.weights", "data.train",
    "data.workers", "data.max_bad", "data.truncated", "data.cache_gb", "checkpoint", "eval", "log",
}  # fmt: skip
_SHORT_FRACTION = re.compile(r"[+-]?(\.[0-9]+|[0-9]+\.)([eE][+-]?[0-9]+)?")  # .5 and 5., invalid in TOML


# settings in steps that may be given in epochs, such as "10 epochs"; a configuration has numbers of steps
IN_EPOCHS = (
    "steps", "optim.warmup", "optim.cooldown", "lock.unfreeze_every", "checkpoint.every_steps", "eval.every_steps",
)  # fmt: skip
_EPOCHS = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*epochs?\s*", re.ASCII | re.IGNORECASE)
_MOST_EPOCHS = 1_000_000


def load_config(
    path: Path, overrides: Sequence[str] = (), *, count_epoch: Callable[[Config], float] | None = None
) -> Config:
    """Read a TOML file and apply ``dotted.key=value`` overrides.

    Args:
        count_epoch: returns the number of steps in an epoch of the data of a configuration, in which settings in
            epochs are 1; None if no setting may be given in epochs.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # with or without a BOM
    except OSError as error:
        hint = "" if path.suffix else "; settings are written key=value"
        raise ConfigError(f"config {path}: {error.strerror}{hint}") from error
    except (ValueError, RecursionError) as error:  # invalid TOML or UTF-8, or numbers with too many digits
        raise ConfigError(f"config {path} is not TOML: {error}") from error
    _apply_overrides(values, overrides)
    _rename_former_settings(values)
    epochs = _take_epochs(values)
    config = _build_config(values)
    if epochs:
        _set_steps(values, epochs, partial(count_epoch, config) if count_epoch else None)
        config = _build_config(values)
    if config.out:
        return config
    return replace(config, out=str(Path("runs") / path.stem))


# former names of settings, in the configurations of earlier runs
RENAMED = {
    "data.background": "pixels.background", "data.upright": "pixels.upright", "data.pixel_range": "pixels.range",
    "pixels.weight": "image_gpt.weight", "pixels.fraction": "image_gpt.fraction", "pixels.after": "image_gpt.after",
}  # fmt: skip


def _take_epochs(values: dict[str, Any]) -> dict[str, float]:
    """Return the settings that are given in epochs by name, and set them to 1 step."""
    epochs = {}
    for key in IN_EPOCHS:
        section, _, name = key.rpartition(".")
        settings = values.get(section) if section else values
        if not isinstance(settings, dict):
            continue
        value = str(settings.get(name))
        if match := _EPOCHS.fullmatch(value):
            epochs[key] = float(match[1])
            most = f"expected at most {_MOST_EPOCHS:,} epochs"
            require(epochs[key] <= _MOST_EPOCHS, key, value, most)
            settings[name] = 1
    return epochs


def _set_steps(
    values: dict[str, Any], epochs: Mapping[str, float], count_epoch: Callable[[], float] | None
) -> None:
    """Set the settings that are given in epochs to numbers of steps, at least 1 unless they are 0."""
    name, count = next(iter(epochs.items()))
    stated_epochs = f"{name} = '{count:g} epochs'"
    if count_epoch is None:
        raise ConfigError(f"{stated_epochs}: only train.py converts epochs to steps: set a number of steps")
    try:
        steps = count_epoch()
    except DataError as error:
        raise DataError(f"{error}; {stated_epochs} depends on the number of pairs") from error
    for key, count in epochs.items():
        section, _, name = key.rpartition(".")
        settings = values[section] if section else values
        settings[name] = max(1, round(count * steps)) if count else 0


def _rename_former_settings(values: dict[str, Any]) -> None:
    for former, name in RENAMED.items():
        section, key = former.split(".")
        new_section, new_key = name.split(".")
        settings = values.get(section)
        if isinstance(settings, dict) and key in settings:
            values.setdefault(new_section, {}).setdefault(new_key, settings.pop(key))


def to_toml(config: Config, *, differing_from: Config | None = None) -> str:
    """Return a configuration as TOML for ``load_config``: all settings, or those that differ from another's."""
    others = None
    if differing_from is not None:
        others = _collect_values(differing_from)
    parts = []
    for section, values in _collect_values(config).items():
        lines = []
        for name, value in values.items():
            if others is None or value != others[section][name]:
                lines.append(f"{name} = {_format_literal(value)}")
        if lines and section:
            parts.append(f"\n[{section}]")
        parts += lines
    return "\n".join(parts) + "\n"


def redact_settings(config: Config) -> str:
    """Return the settings that differ from the defaults as TOML, without secrets in URLs."""
    return redact_secrets(to_toml(config, differing_from=Config()))


def list_changes(before: Config, after: Config) -> list[str]:
    """List changed settings that must not change when a run is resumed, as ``key: before → after``."""
    old, new = _flatten_config(before), _flatten_config(after)
    return [
        f"{key}: {_format_literal(old[key])} → {_format_literal(new[key])}"
        for key in old
        if old[key] != new[key]
        and key not in RESUMABLE
        and key.split(".")[0] not in RESUMABLE
        and (key, old[key]) != ("pixels.range", "auto")
    ]


def section_kinds() -> dict[str, type[Section]]:
    """Return the sections of a configuration by name; those of objectives and terms follow ``loss``."""
    hints = typing.get_type_hints(Config)
    kinds: dict[str, type[Section]] = {}
    for entry in fields(Config):
        if entry.name == "objectives":
            kinds |= import_attribute("clipkit.objectives:objective_sections")()
        elif is_dataclass(hints[entry.name]):
            kinds[entry.name] = hints[entry.name]
    return kinds


def section_fields() -> dict[str, list[Field[Any]]]:
    """Return the settings of each section by name; those outside sections come first, as ""."""
    kinds = section_kinds()
    entries = {"": [entry for entry in fields(Config) if entry.name not in (*kinds, "objectives")]}
    for name, kind in kinds.items():
        entries[name] = list(fields(cast(Any, kind)))
    return entries


def _collect_values(config: Config) -> dict[str, dict[str, Any]]:
    values = {}
    for name, entries in section_fields().items():
        section: Any = config
        if name:
            section = config.objectives.get(name) or getattr(config, name)
        values[name] = {entry.name: getattr(section, entry.name) for entry in entries}
    return values


def _flatten_config(config: Config) -> dict[str, Any]:
    flat = {}
    for section, values in _collect_values(config).items():
        for name, value in values.items():
            flat[f"{section}.{name}" if section else name] = value
    return flat


def _escape_character(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else f"\\U{ord(character):08x}"


def _format_literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{"".join(map(_escape_character, value))}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_format_literal, value)) + "]"
    return repr(value)


def _format_list(key: str, values: Sequence[Any]) -> str:
    return f"{key}='[{','.join(map(_format_literal, values))}]'"


def _apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply ``dotted.key=value`` overrides; values are parsed as TOML if possible, otherwise used as strings."""
    texts: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"{override!r} is not of the form key=value, such as optim.lr=1e-3")
        if key in texts and key == "data.train":
            raise ConfigError(
                "data.train is given twice: quote brace patterns to prevent shell expansion, and write several "
                f"sources as {_format_list(key, ['a', 'b'])}"
            )
        if key in texts:
            takes_list = isinstance(_flatten_config(Config()).get(key), tuple)
            instead = f"pass one list, {_format_list(key, ['a', 'b'])}" if takes_list else "remove one"
            first, second = format_value(redact_url(texts[key])), format_value(redact_url(text))
            raise ConfigError(f"{key} is given twice: {first} and {second}; {instead}")
        texts[key] = text
        try:
            parsed = tomllib.loads(f"value = {text}")
        except (ValueError, RecursionError):
            parsed = {}
        # values with several lines, and dates, are strings
        value = parsed["value"] if parsed.keys() == {"value"} else None
        is_value = isinstance(value, bool | int | float | str | list | dict)
        if not is_value and text.startswith("[") and text.endswith("]"):
            raise ConfigError(
                f"{override!r} is not a list: write strings in quotes, as in {_format_list(key, ['a', 'b'])}, "
                "and numbers as 0.5"
            )
        *sections, name = key.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{key} is unknown: {section} is not a section")
        inner[name] = value if is_value else text


def _build_config(values: Mapping[str, Any]) -> Config:
    kinds = section_kinds()
    hints = _get_hints(Config) | kinds
    del hints["objectives"]
    arguments = _convert_values(hints, values, "")
    declared = [name for name in kinds if name not in Config.__dataclass_fields__]
    objectives = {name: arguments.pop(name) for name in declared if name in arguments}
    return Config(**arguments, objectives=objectives)


def _get_hints(kind: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _convert_values(hints: Mapping[str, Any], values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    for key, value in values.items():
        if key not in hints:
            unknown = prefix + key
            while isinstance(value, Mapping) and value:  # name the setting in an unknown section
                inner, value = next(iter(value.items()))
                unknown += f".{inner}"
            raise ConfigError(f"{unknown} is unknown: {_suggest_setting(unknown)}")
    return {key: _convert(hints[key], value, prefix + key) for key, value in values.items()}


def _suggest_setting(key: str) -> str:
    names = list(_flatten_config(Config()))
    name = key.rpartition(".")[2]
    for setting_name in names:
        if setting_name.rpartition(".")[2] == name:
            return f"did you mean {setting_name!r}?"
    hint = nearest(key, names)
    if hint.startswith("did"):
        return hint
    return "`train.py --settings` lists all settings"


def _convert(hint: Any, value: Any, key: str) -> Any:
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{key} = {format_value(value)} is invalid: {key} is a section; set {key}.<name> instead"
            )
        return cast(type[Any], hint)(**_convert_values(_get_hints(cast(Any, hint)), value, key + "."))
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in kinds and isinstance(value, str) and _SHORT_FRACTION.fullmatch(value):
        value = float(value)
    _check_value(value, key)
    if int in kinds and isinstance(value, float) and value.is_integer():  # 1e4 is an integer too
        require(abs(value) < 2**63, key, value, "expected less than 2^63")
        value = int(value)
    candidates = [value]
    if typing.get_origin(kinds[-1]) is tuple:
        candidates.append([value])
    for candidate in candidates:
        for kind in kinds:
            with suppress(msgspec.ValidationError):
                return msgspec.convert(candidate, kind)
    expected = " or ".join(_KIND_WORDS[kind] for kind in kinds)
    raise ConfigError(f"{key} = {format_value(value)} is invalid: expected {expected}")


_KIND_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    tuple[str, ...]: "a list of strings",
    tuple[float, ...]: "a list of numbers",
    tuple[int, ...]: "a list of whole numbers",
    tuple[tuple[float, ...], ...]: "a list of pairs of numbers",
}


def _check_value(value: Any, key: str) -> None:
    """Refuse numbers that are not finite or too large, and text that is not Unicode, as arguments may contain."""
    if isinstance(value, list | tuple):
        for item in value:
            _check_value(item, key)
    elif isinstance(value, str):
        require(not any("\ud800" <= c <= "\udfff" for c in value), key, value, "expected valid Unicode")
    elif isinstance(value, int | float):
        require(abs(value) <= sys.float_info.max, key, value, "expected a finite number")


_WIDTH = 80


def settings_reference(text: str = "") -> list[str]:
    """List settings with default, description and valid values, in lines of at most 80 columns.

    Args:
        text: part of a name, such as "optim.l" or "crop". Only settings with it in their name are listed, or, if
            there are none, those with it in their description.
    """
    lines = _list_settings(lambda name, entry: text in name)
    lines = lines or _list_settings(lambda name, entry: text.lower() in describe_setting(entry).lower())
    if not lines:
        raise ConfigError(
            f"--settings {text}: {text} is in no name and no description of a setting: {_suggest_setting(text)}"
        )
    return lines[1:]


def _list_settings(selects: Callable[[str, Field[Any]], bool]) -> list[str]:
    kinds = section_kinds()
    lines: list[str] = []
    for section, entries in section_fields().items():
        name_prefix = f"{section}." if section else ""
        chosen = [entry for entry in entries if selects(name_prefix + entry.name, entry)]
        if chosen and section:
            summary = " ".join((kinds[section].__doc__ or "").replace("``", "").split())
            heading = f"[{section}] {summary}"
            lines += ["", *textwrap.wrap(heading, _WIDTH, break_long_words=False)]
        for entry in chosen:
            lines += ["", f"{name_prefix}{entry.name} = {_format_literal(entry.default)}"]
            text = describe_setting(entry)
            if isinstance(entry.default, bool):
                text += " (true or false)"
            elif (within := get_valid_values(entry)) is not None:
                text += f" ({within.words})"
            lines += textwrap.wrap(
                text, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
            )
    return lines

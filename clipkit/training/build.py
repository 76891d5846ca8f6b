"""Build the model that training starts with, and choose which layers are trained."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from clipkit.api import load
from clipkit.config import (
    Config,
    LockConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    PixelsConfig,
    ShapeConfig,
    SmallConfig,
    require,
)
from clipkit.errors import CheckpointError, ConfigError, UnnamedArchitecture
from clipkit.files.hub import HUB, fetch_repository
from clipkit.files.terminal import counted
from clipkit.formats.checkpoint import model_hash, read_preprocess
from clipkit.formats.load import (
    check_base,
    find_transformers_weights,
    load_checkpoint,
    outline_checkpoint,
    read_architecture,
)
from clipkit.formats.weights import read_weights
from clipkit.model.architectures import (
    HEADS,
    STEM,
    Adapters,
    Architecture,
    Layer,
    TowerArchitecture,
)
from clipkit.model.clip import CLIP, create
from clipkit.model.lora import add_adapters
from clipkit.model.names import create_architecture
from clipkit.model.state_dicts import list_tensors
from clipkit.model.tokenizer import open_stored_tokenizer, open_trained_tokenizer
from clipkit.objectives import OBJECTIVES, Term, select_terms
from clipkit.training.ema import AveragedWeights, RunningStatistics
from clipkit.training.parallel import gathered


def check_split(config: Config, *, world: int) -> None:
    """Raise ConfigError if a step trains too few pairs for ``world`` ranks that compute them in parts."""
    parts = config.accumulate
    if config.trained_pairs < world * parts:
        fraction = config.select.fraction
        selected = f" × select.fraction = {fraction}" if fraction < 1 else ""
        raise ConfigError(
            f"batch_size = {config.batch_size}{selected} cannot be split over {world} processes × "
            f"accumulate = {parts}"
        )


def _check_image_size(name: str, size: int, shape: Architecture, label: str) -> None:
    """Raise ConfigError if the image tower cannot encode images of another size than its own."""
    misfit = f"{name} = {size} does not fit {label}"
    step = shape.vision.size_step
    largest = shape.vision.image_size
    if not step:
        raise ConfigError(f"{misfit}: it requires an image tower that encodes other sizes")
    if size % step or size > largest:
        multiple = f"a multiple of its patch size, {step}, and " if step > 1 else ""
        raise ConfigError(f"{misfit}: expected {multiple}at most its image size, {largest}")
    shape.vision.check_size(size)


def shape_of(
    model: ModelConfig,
    loss: LossConfig,
    small: SmallConfig,
    *,
    terms: Mapping[str, Term] | None = None,
    sizes: ShapeConfig | None = None,
    pixels: PixelsConfig | None = None,
    checkpoint: Path | None = None,
) -> Architecture:
    """Return the architecture that settings select, with a bias or heads if the objective or terms need them.

    Without ``model.name`` it is that of ``checkpoint``, by default of ``model.weights``.
    """
    options = {name: f"model.image_options: {name}" for name in model.tower_options}
    options |= {name: f"model.text_options: {name}" for name in model.text_tower_options}
    with _name_settings({**_MODEL_SIZES, **options}):
        shape = create_architecture(
            model.name or read_architecture(str(checkpoint or model.weights)),
            image=model.image,
            image_options=model.tower_options,
            text=model.text,
            text_options=model.text_tower_options,
            image_size=model.image_size,
            image_tokens=model.image_tokens,
            context_length=model.context_length,
        )
    if shape.vision.image_tokens and not model.image_tokens:
        raise ConfigError(
            f"model.image_tokens = 0: model.weights = {model.weights!r} reads images of variable size: set "
            f"model.image_tokens={shape.vision.image_tokens}"
        )
    if sizes is not None and sizes.changed:
        shape = _apply_sizes(shape, sizes, model)
    if model.tokenizer:
        tokenizer = open_trained_tokenizer(model.tokenizer, shape.text.context_length)
        shape = replace(shape, text=shape.text.replace_vocabulary(tokenizer.vocab_size))
    if pixels is not None and pixels.channels != shape.vision.channels:
        shape = replace(shape, vision=shape.vision.replace_channels(pixels.channels))
    if model.patch_dropout and shape.vision.patches is None:
        raise ConfigError(
            f"model.patch_dropout = {model.patch_dropout} requires clipkit's own image towers, not {model.label}"
        )
    if small.steps and small.image_size:
        _check_image_size("small.image_size", small.image_size, shape, model.label)
    if small.steps and small.context_length:
        name = f"small.context_length = {small.context_length} does not fit {model.label}"
        if shape.text.classes:
            raise ConfigError(f"{name}: a class is one token")
        if not 2 <= small.context_length <= shape.text.context_length:
            raise ConfigError(f"{name}: expected 2 to {shape.text.context_length}")
    dims = loss.dims
    below = f"expected sizes below {shape.embed_dim}, the embedding dimension of {model.label}"
    require(max(dims, default=0) < shape.embed_dim, "loss.dims", dims, below)
    heads: dict[str, Any] = {"decoder": None, "masked": None, "words": None}
    for term in (terms or {}).values():
        heads |= term.heads(shape, model)
    with _name_settings({"projections": "model.projections"}):
        shape = replace(shape, **heads, projections=model.projected_sources)
    has_bias = OBJECTIVES[loss.name].initial_bias is not None
    return replace(shape, logit_bias=True) if has_bias else shape


def select_shape(
    config: Config, terms: Mapping[str, Term] | None = None, *, newest: Path | None = None
) -> Architecture:
    """Return the architecture that the settings of a run select with some of its local terms, see ``shape_of``.

    ``newest`` is the checkpoint at which the run resumes.
    """
    shape = shape_of(
        config.model,
        config.loss,
        config.small,
        terms=select_terms(config) if terms is None else terms,
        sizes=config.shape,
        pixels=config.pixels,
        checkpoint=None if config.lora.rank else newest,  # a checkpoint of adapters requires model.weights
    )
    if size := config.select.image_size:
        _check_image_size("select.image_size", size, shape, config.model.label)
    return shape


Tower = TypeVar("Tower", bound=TowerArchitecture)
_SAME_FEATURES = 1e-3  # difference of unit-norm features that is rounding
_MODEL_SIZES = {name: f"model.{name}" for name in ("image_size", "image_tokens", "context_length")}


@contextmanager
def _name_settings(settings: Mapping[str, str]) -> Iterator[None]:
    """Name settings instead of an architecture's fields in errors such as "layers = 0 is not an integer"."""
    try:
        yield
    except ConfigError as error:
        text = re.sub(r"(?<![.\w])\w+(?= = )", lambda found: settings.get(found[0], found[0]), str(error))
        raise ConfigError(text) from error


def _apply_sizes(shape: Architecture, sizes: ShapeConfig, model: ModelConfig) -> Architecture:
    changed = sizes.changed
    embed_dim = changed.pop("embed", shape.embed_dim)
    text_sizes = {name: changed.pop(name) for name in list(changed) if name.startswith("text_")}
    vision = _apply_tower_sizes(
        shape.vision, changed, f"image tower must be clipkit's ViT, not {model.label}"
    )
    transformer = f"text tower must be clipkit's transformer, not {model.label}"
    text = _apply_tower_sizes(shape.text, text_sizes, transformer)
    with _name_settings({"embed_dim": "shape.embed"}):
        return replace(shape, embed_dim=embed_dim, vision=vision, text=text)


def _apply_tower_sizes(tower: Tower, sizes: Mapping[str, Any], setting: str) -> Tower:
    if sizes.keys() - tower.sizes.keys():
        raise ConfigError(f"to set {' and '.join(f'shape.{name}' for name in sizes)}, the {setting}")
    with _name_settings(_MODEL_SIZES | {field: f"shape.{name}" for name, field in tower.sizes.items()}):
        return tower.replace_sizes(sizes)


def first_model(
    config: Config,
    shape: Architecture,
    *,
    checkpoint: Path | None = None,
    add_note: Callable[[str], object] = lambda line: None,
) -> CLIP:
    """Return a model with fresh weights or those of ``model.weights``, in training mode on the CPU.

    A run that resumes takes tokenizer and preprocessing from its ``checkpoint``; ``model.weights`` may no longer
    exist, unless the run trains adapters of them. Models of clipkit's own towers are then on the meta device:
    their weights are read by ``clipkit.training.checkpoint.load_training``. ``add_note`` gets a line if
    ``model.weights`` is not read, and if the decoder of captions starts with fresh weights, because those given
    have none or another one.
    """
    model, small, lora, seed = config.model, config.small, config.lora, config.seed
    extend = config.pixels.extend
    objective = OBJECTIVES[config.loss.name]
    fresh = False  # whether temperature and bias start with the objective's values
    adapted = lora.rank > 0
    adapters: Adapters | None = None
    if checkpoint is not None and not adapted:
        first = outline_checkpoint(checkpoint) if shape.is_native else load_checkpoint(checkpoint)
        if model.weights:
            add_note(f"the checkpoint contains all weights: model.weights = {model.weights!r} is not read")
        if not _fits(first, shape):
            cause = f"of another architecture than {model.label}"
            if other := _describe_other_classes(first, shape):
                cause = f"of {other}: set {model.text} as it was when the run began, or out=… for a new run"
            raise CheckpointError(f"{checkpoint} is {cause}")
        if model.tokenizer:
            vocabulary = (
                open_trained_tokenizer(model.tokenizer, shape.text.context_length).load_library().get_vocab()
            )
            if open_stored_tokenizer(checkpoint).load_library().get_vocab() != vocabulary:
                raise CheckpointError(
                    f"{checkpoint} has another tokenizer than model.tokenizer = {model.tokenizer!r}: restore "
                    "that, or set out=… for a new run"
                )
        if not shape.text.classes:
            first.tokenizer(
                ["a"]
            )  # reads its files now: the checkpoint is deleted when newer ones replace it
    elif model.weights and not model.new_head:
        first = load_start_weights(
            config,
            shape,
            image_size=model.image_size,
            image_tokens=model.image_tokens,
            context_length=model.context_length,
        )
        if adapted:
            path = Path(model.weights).expanduser()
            source = str(path.resolve()) if path.exists() else model.weights
            adapters = adapters_of(lora, source=source, weights=model_hash(first))
            if checkpoint is not None:
                check_base(checkpoint, adapters.hash)
        if first.architecture.decoder != shape.decoder:
            has = "another" if first.architecture.decoder else "no"
            anew = "is not used" if shape.decoder is None else "starts with fresh weights"
            if first.set_decoder(shape.decoder, seed=seed):
                add_note(f"note: model.weights = {model.weights!r} has {has} decoder of captions; it {anew}")
        if first.architecture.masked != shape.masked:
            first.set_masked(shape.masked, seed=seed)
        # anew, because the words are numbered in the order in which they occur in this run
        first.set_words(shape.words, seed=seed)
        if first.architecture.projections != shape.projections:
            first.set_projections(shape.projections)
        if fresh := shape.logit_bias and first.logit_bias is None:
            first.reset_bias()
        if not _fits(first, shape):
            raise ConfigError(
                f"model.weights: the weights in {model.weights!r} {_misfit(first, shape, model)}"
            )
    else:
        rgb = shape
        if model.image_weights and shape.vision.channels != 3:
            rgb = replace(shape, vision=shape.vision.replace_channels(3))
        first = create(rgb, seed=seed)
        fresh = True
        if model.tokenizer:
            first.tokenizer = open_trained_tokenizer(model.tokenizer, shape.text.context_length)
        if model.new_head:
            _take_image_tower(first, model, extend)
        elif model.image_weights:
            _load_image_weights(first, model, add_note)
            if first.architecture.vision.native and not config.pixels.mean:
                add_note(
                    "note: model.image_weights: images are normalized as for CLIP: set pixels.mean and pixels.std "
                    "if the weights were trained otherwise"
                )
            if _lacks_channels(first, shape):
                first.extend_channels(shape.vision.channels, extend=extend)
        elif small.steps and small.image_size:
            shape.vision.smooth_positions(first.visual, small.image_size)
        if model.text_weights:
            _load_text_weights(first, model)
    with torch.no_grad():
        if fresh and objective.initial_scale is not None:
            first.logit_scale.fill_(math.log(objective.initial_scale))
        if fresh and objective.initial_bias is not None and first.logit_bias is not None:
            first.logit_bias.fill_(objective.initial_bias)
    if model.name:
        first.name = first.name or model.label
    if adapters is not None:
        if checkpoint is not None:
            first.preprocess = read_preprocess(checkpoint)
            first.reset_constants()
        add_adapters(first, adapters, seed=seed)
    if first.logit_bias is not None:
        first.logit_bias.requires_grad_(objective.initial_bias is not None)
    name = next(name for name in ("text", "weights", "name") if getattr(model, name))
    check_texts(first, called=f"model.{name} = {getattr(model, name)!r}")
    return first.train()


def check_texts(model: CLIP, *, called: str) -> None:
    """Encode a text of the context length and a short one, together and alone, if a library made the text tower.

    Tokenizer and encoder may not belong together, which would be noticed only in training, or not at all.

    Args:
        model: the model on the CPU.
        called: the setting of the text tower, for error messages.
    """
    text = model.architecture.text
    tokenizer = model.tokenizer
    if text.vocab_size and tokenizer.vocab_size > text.vocab_size:
        raise ConfigError(
            f"{called}: the tokenizer has {tokenizer.vocab_size:,} tokens and the text tower embeddings of only "
            f"{text.vocab_size:,}: set model.tokenizer to the one with which the tower was trained, or model.name "
            "to an architecture with more embeddings"
        )
    if text.native:
        return
    training = model.training
    model.eval()
    tokens = tokenizer(["a " * text.context_length, "a"])
    what = "a short text"
    try:
        with torch.no_grad():
            alone = model.encode_text(tokenizer(["a"]))
            what = f"a text of {tokens.shape[1]} tokens, model.context_length"
            together = model.encode_text(tokens)
    except (RuntimeError, AssertionError, LookupError, TypeError, ValueError) as error:
        cause = " ".join(str(error).split())[:200]
        advice = ": set a smaller one" if "context_length" in what else ""
        raise ConfigError(f"{called} cannot encode {what}{advice} ({cause})") from error
    finally:
        model.train(training)
    if not (alone.isfinite().all() and together.isfinite().all()):
        raise ConfigError(
            f"{called}: the features of a text are NaN or infinity, alone or beside a longer one"
        )
    if (together[1] - alone[0]).abs().max() > _SAME_FEATURES:
        raise ConfigError(
            f"{called}: the features of a text depend on the padding to the length of other texts: set "
            "pad_token_id in config.json to the token with which the tokenizer pads"
        )


def adapters_of(lora: LoraConfig, *, source: str = "", weights: str = "") -> Adapters:
    """Return the adapters that settings select, of a model and its hash."""
    alpha = lora.alpha or float(lora.rank)
    return Adapters(
        rank=lora.rank, alpha=alpha, image=lora.image, text=lora.text, source=source, hash=weights
    )


def _lacks_channels(first: CLIP, shape: Architecture) -> bool:
    return first.architecture.vision.channels == 3 != shape.vision.channels


def load_start_weights(config: Config, shape: Architecture, **sizes: Any) -> CLIP:
    """Load ``model.weights`` with all channels of the architecture that the run trains.

    ``sizes`` are those of ``clipkit.load``.
    """
    first = _load_weights(config.model, **sizes)
    if _lacks_channels(first, shape):
        if config.lora.rank:
            raise ConfigError("lora.rank: adapters require model.weights with all of pixels.channels")
        first.extend_channels(shape.vision.channels, extend=config.pixels.extend)
    return first


def _load_weights(model: ModelConfig, **sizes: Any) -> CLIP:
    """Load ``model.weights``; a file without an architecture is of ``model.name``."""
    load_as = partial(load, model.weights, **sizes)
    try:
        source = load_as()
    except UnnamedArchitecture:
        return load_as(name=model.name)
    if next(source.visual.parameters(), None) is None:
        raise ConfigError(
            f"model.weights: {source.origin} cannot be trained: use the weights it was made from"
        )
    return source


def _take_image_tower(first: CLIP, model: ModelConfig, extend: str) -> None:
    source = _load_weights(model, image_size=model.image_size, image_tokens=model.image_tokens)
    if _lacks_channels(source, first.architecture):
        source.extend_channels(first.architecture.vision.channels, extend=extend)
    architecture = first.architecture
    other = source.architecture
    if any(
        getattr(architecture, name) != getattr(other, name) for name in ("vision", "embed_dim", "quick_gelu")
    ):
        raise ConfigError(
            f"model.weights: the weights in {model.weights!r} are of {source.name or 'another architecture'}, "
            f"whose image tower is not that of {model.label}: set model.name, model.image or model.image_options"
        )
    first.visual.load_state_dict(source.visual.state_dict())
    first.set_projections(first.architecture.projections)  # copies of the tower's
    first.preprocess = source.preprocess
    first.reset_constants()


def _load_image_weights(first: CLIP, model: ModelConfig, add_note: Callable[[str], object]) -> None:
    vision = first.architecture.vision
    source = model.image_weights
    if source == "timm":
        if not vision.hub_repository:
            raise ConfigError(f"timm publishes no weights for {model.image or model.name}")
        source = HUB + vision.hub_repository
    try:
        path = fetch_repository(source) if source.startswith(HUB) else Path(source)
        if path.is_dir():
            path = find_transformers_weights(path)
        tensors = read_weights(path).tensors
        with _name_settings({name: f"shape.{setting}" for setting, name in vision.sizes.items()}):
            first.preprocess, unused = vision.take_weights(first.visual, tensors, first.preprocess)
    except CheckpointError as error:
        raise CheckpointError(f"model.image_weights = {model.image_weights!r}: {error}") from error
    if unused:
        count = counted(len(unused), "tensor")
        add_note(f"note: model.image_weights: {count} not used: {list_tensors(unused)}")


def _load_text_weights(first: CLIP, model: ModelConfig) -> None:
    text = first.architecture.text
    module = first.text
    assert module is not None
    source = model.text_weights
    if source == "transformers":
        source = text.hub_source
    try:
        folder = Path(source.removeprefix(HUB))
        if not folder.exists():
            folder = fetch_repository(source if source.startswith(HUB) else HUB + source)
        file = folder if folder.is_file() else find_transformers_weights(folder)
        text.take_weights(module, read_weights(file).tensors)
    except CheckpointError as error:
        raise CheckpointError(f"model.text_weights = {model.text_weights!r}: {error}") from error


def _fits(first: CLIP, shape: Architecture) -> bool:
    """Compare architectures, except for what weights bring along.

    That is a bias, which softmax ignores, the initialization, and whether text attention is causal.
    """
    converted = replace(first.architecture, logit_bias=shape.logit_bias, small_data=shape.small_data)
    return replace(converted, text=converted.text.replace_attention(causal=shape.text.is_causal)) == shape


def _misfit(first: CLIP, shape: Architecture, model: ModelConfig) -> str:
    if other := _describe_other_classes(first, shape):
        return f"are of {other}: set {model.text} as it was for them, or model.new_head=true"
    if shape.text.classes and not first.architecture.text.classes:
        return (
            f"have a text tower instead of the class head {model.text}: `python -m eval fine-tune` makes such a "
            "head and trains it; model.new_head=true starts with a random one"
        )
    if first.architecture.text.classes and not shape.text.classes:
        return (
            f"have a class head instead of the text tower of {model.label}: set other weights, or "
            "loss.name=classes and the model.text=classes:FILE of these"
        )
    if (channels := first.architecture.vision.channels) != shape.vision.channels:
        return f"are of images of {counted(channels, 'channel')}: set pixels.channels={channels}"
    size = first.architecture.text.vocab_size
    detail = f" (a vocabulary of {size:,} tokens)" if size != shape.text.vocab_size else ""
    return (
        f"are of {first.name or 'another architecture'}{detail}, which is not that of the settings: model.name= "
        "(empty), without settings of towers such as model.image or [shape], takes the architecture of the weights"
    )


def _describe_other_classes(first: CLIP, shape: Architecture) -> str:
    names = first.architecture.text.classes
    expected = shape.text.classes
    if (
        not names
        or not expected
        or names == expected
        or not _fits(first, replace(shape, text=first.architecture.text))
    ):
        return ""
    if len(names) != len(expected):
        return f"{len(names):,} classes, not of {len(expected):,}"
    pairs = enumerate(zip(names, expected, strict=True), start=1)
    index, (old, new) = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
    order = "classes in another order" if sorted(names) == sorted(expected) else "other classes"
    return f"{order}, number {index} is {old[:80]!r} and not {new[:80]!r}"


def patch_counts(shape: Architecture, patch_dropout: float, image_size: int) -> tuple[int, int] | None:
    """Return the number of patches of an image and how many are kept; None without patch dropout."""
    if not patch_dropout:
        return None
    patches = shape.vision.replace_size(image_size).patches
    assert patches is not None
    return patches, max(1, round(patches * (1 - patch_dropout)))


@contextmanager
def scored_weights(model: CLIP, averaged: AveragedWeights | None, *, reshard: bool = True) -> Iterator[None]:
    """Give the model the weights to score: averaged if the run averages them, whole and equal on all ranks."""
    RunningStatistics(model).broadcast()
    with nullcontext() if averaged is None else averaged.applied(), gathered(model, reshard=reshard):
        yield


# Layers of the towers, for layer-wise learning rates and locking.
#
# A tower of n blocks has n + 2 depths: 0 is the stem, which makes tokens (embeddings), i + 1 is block i, and n + 1
# is the head, which makes features (norm, pooling, projection). Settings count layers from the top: the head is 1.


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a parameter is.

    Attributes:
        tower: see ``tower_of``.
        depth: 0 (nearest to the input) to ``top``.
        top: the tower's last depth.
    """

    tower: str
    depth: int
    top: int

    @property
    def above(self) -> int:
        """Number of depths between the parameter and the features."""
        return self.top - self.depth


def tower_of(name: str) -> str:
    """Return the tower of a CLIP's parameter: "image", "text", "decoder", or "" for none.

    The temperature, the bias of the loss, the heads of masked patches and of words, and the projections of sources
    are part of no tower.
    """
    if name.startswith(("logit_", "masked_head.", "words_head.", "image_projections.")):
        return ""
    if name.startswith("text_decoder."):
        return "decoder"
    return "image" if name.startswith("visual.") else "text"


def places(model: CLIP) -> dict[str, Place]:
    """Return the place of every parameter by name, see ``TowerArchitecture.map_layers``."""
    names = [name for name, _ in model.named_parameters()]
    # nothing is below the decoder: it is never locked, and has the full rate
    single = ("", "decoder")
    positions = {
        name: Place(tower=tower_of(name), depth=0, top=0) for name in names if tower_of(name) in single
    }
    shape = model.architecture
    text_module = model if model.text is None else model.text
    for tower, kind, module in (("image", shape.vision, model.visual), ("text", shape.text, text_module)):
        layer = kind.map_layers(module)
        layers: dict[str, Layer] = {}
        if layer is not None:
            prefix = "visual." if tower == "image" else "text."
            layers = {name: layer(name.removeprefix(prefix)) for name in names if tower_of(name) == tower}
        blocks = sorted({block for block in layers.values() if block is not None and block != STEM})
        if layer is None or (kind.has_blocks and not blocks):
            raise ConfigError(
                f"the blocks of the {tower} tower are not recognized, so its layers are not known: "
                "lock it whole or not at all, set optim.layer_decay=1, and use another optim.name than muon"
            )
        depths = {STEM: 0, **{block: i for i, block in enumerate(blocks, start=1)}}
        top = len(blocks) + 1
        for name, block in layers.items():
            positions[name] = Place(tower=tower, depth=top if block is None else depths[block], top=top)
    return {name: positions[name] for name in names}


def lock(
    model: CLIP, *, image: str | int = "", text: str | int = "", terms: Collection[str] = tuple(HEADS)
) -> None:
    """Lock towers or their lower layers permanently: their parameters get no gradient and no update.

    With a trained image tower locked, the text tower learns to match it (LiT; Zhai et al. 2022,
    https://arxiv.org/abs/2111.07991).

    Args:
        model: a CLIP, before its optimizer is made.
        image: "" locks nothing; "all" the image tower; "backbone" all but its projection; a number all but that
            many top layers.
        text: the same for the text tower.
        terms: local terms that are trained; the heads of others are locked, since they get no gradient.
    """
    settings = {"image": image, "text": text}
    projections = {
        tower: projection_prefix(model, tower) for tower, value in settings.items() if value == "backbone"
    }
    unlocked = {
        tower: 0 if value in ("all", "backbone") else int(value)
        for tower, value in settings.items()
        if value != ""
    }
    where = places(model) if any(unlocked.values()) else {}
    for tower, depths in unlocked.items():
        if depths:
            count = 1 + max(place.top for place in where.values() if place.tower == tower)
            most = f"expected at most {count}, the tower's layers including stem and head"
            require(depths <= count, f"lock.{tower}", depths, most)
    for name, parameter in model.named_parameters():
        tower = tower_of(name)
        depths = unlocked.get(tower, -1)
        if tower in projections and name.startswith(projections[tower]):
            continue
        unused = any(name.startswith(head) for term, head in HEADS.items() if term not in terms)
        if unused or depths == 0 or (depths > 0 and where[name].above >= depths):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for name, p in model.named_parameters() if tower_of(name)):
        raise ConfigError(
            f"lock.image = {image!r} and lock.text = {text!r} leave nothing to train: unlock a tower"
        )
    evaluate_locked_modules(model)


def projection_prefix(model: CLIP, tower: str) -> str:
    """Return how the names of the projection of the tower "image" or "text" begin.

    Raises:
        ConfigError: it is not known.
    """
    shape = model.architecture.vision if tower == "image" else model.architecture.text
    if not shape.projection_prefix:
        raise ConfigError(
            f"lock.{tower}=backbone and lock.store need a tower with a known projection; that of this {tower} "
            f"tower, which is built as {shape.description}, is not known: lock it whole or by layers, without "
            "lock.store"
        )
    module = "visual." if tower == "image" else "text."
    return shape.projection_prefix if shape.plain and tower == "text" else module + shape.projection_prefix


def locked_backbones(model: CLIP, settings: LockConfig) -> list[str]:
    """Return the towers "image" and "text" of which at most a known projection is trained."""
    shapes = {"image": model.architecture.vision, "text": model.architecture.text}
    return [
        tower
        for tower, shape in shapes.items()
        if shape.projection_prefix and getattr(settings, tower) in ("all", "backbone")
    ]


def evaluate_locked_modules(model: nn.Module) -> None:
    """Put what is locked into evaluation mode; call it after each ``model.train()``.

    These are modules whose parameters are all locked, and the batch norms of towers of which layers are locked.
    Otherwise a locked tower's features would change with the running statistics of batch norms, and with dropout.
    Trained batch norms above locked layers would replace statistics of the pretraining by those of small batches.
    """
    locked_towers = {tower_of(name) for name, value in model.named_parameters() if not value.requires_grad}
    for name, module in model.named_modules():
        parameters = list(module.parameters())
        is_locked = bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
        if is_locked or (isinstance(module, _BatchNorm) and tower_of(name) in locked_towers):
            module.eval()


class Unfreezing:
    """Parameters that are trained only from a later step on.

    Gradual unfreezing (ULMFiT; Howard & Ruder 2018, https://arxiv.org/abs/1801.06146) starts with the top layer of
    both towers, and lower layers follow one after another, or all of a tower at once. Heads of local terms join
    when their term begins. Permanently locked parameters stay locked.

    Args:
        model: a CLIP, after ``lock``.
        settings: ``unfreeze_every``, steps until the next lower layer is trained too, and ``image_until`` and
            ``text_until``.
        after: number of steps before a term begins, by its name.

    Attributes:
        has_locked_layers: whether any parameter is trained only later.
        layers: number of layers that are trained in the end, of the tower with the most; 1 without
            ``unfreeze_every``.

    Raises:
        ConfigError: a tower's layers are not known.
    """

    def __init__(
        self, model: CLIP, settings: LockConfig | None = None, *, after: Mapping[str, int] | None = None
    ) -> None:
        settings = settings or LockConfig()
        every = settings.unfreeze_every
        until = {"image": settings.image_until, "text": settings.text_until}
        self._model = model
        self.layers = 1
        where = places(model) if every or any(until.values()) else {}
        heads = {HEADS[name]: steps for name, steps in (after or {}).items() if name in HEADS}
        self._first: list[tuple[nn.Parameter, int]] = []  # the first step in which each is trained
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                above = where[name].above if where else 0
                head = next((steps for prefix, steps in heads.items() if name.startswith(prefix)), 0)
                locked = until.get(tower_of(name), 0) if above else 0
                self._first.append((parameter, max(above * every, locked, head)))
                if every:
                    self.layers = max(self.layers, 1 + above)
        self.has_locked_layers = any(first for _, first in self._first)

    def lock_for_step(self, step: int) -> bool:
        """Set what is trained in update ``step`` = 0, 1, …; return whether that has changed.

        After a change, wrappers around the trained parameters, such as DistributedDataParallel, must be built
        again. The optimizer holds all of them from the start and skips those without a gradient.
        """
        changed = False
        for parameter, first in self._first:
            free = step >= first
            changed |= parameter.requires_grad != free
            parameter.requires_grad_(free)
            if not free:
                parameter.grad = None
        if changed:
            self._model.train(self._model.training)
            evaluate_locked_modules(self._model)
        return changed

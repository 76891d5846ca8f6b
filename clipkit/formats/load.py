"""Load a model from any supported source without running code from it.

    a clipkit run or checkpoint       model.json + model.safetensors
    a hub-style folder of open_clip   open_clip_config.json + open_clip_model.safetensors
    a folder of transformers          config.json of a CLIPModel or Siglip2Model + model.safetensors
    a folder of sentence-transformers modules.json and such a folder, often 0_CLIPModel
    an ONNX export of clipkit         onnx_config.json + visual.onnx, textual.onnx, in no folder of another kind
    an OpenVINO export of clipkit     openvino_config.json + visual.xml, textual.xml, likewise
    a training folder of open_clip    params.txt + checkpoints/epoch_N.pt
    a weights file                    .pt, .bin, .safetensors: open_clip's, OpenAI's, TorchScript archives
    open_clip:NAME[/TAG]              open_clip's registry of published weights
    hf-hub:OWNER/REPOSITORY           a repository on the Hugging Face hub

The activation function is read from the source. If the source does not record it, the caller must specify GELU or
QuickGELU: the tensors are the same, and the wrong activation lowers scores without an error.
"""

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from clipkit.errors import CheckpointError, ClipkitError, ConfigError, UnnamedArchitecture
from clipkit.files.hub import HUB, fetch_published, fetch_repository
from clipkit.files.open_clip import published_tags, published_weights
from clipkit.formats.checkpoint import (
    FORMAT,
    check_checksum,
    model_hash,
    parse_architecture,
    read_json,
    resolve_checkpoint,
    select_best,
)
from clipkit.formats.graph import find_graph_config, load_graphs
from clipkit.formats.open_clip import (
    ASSUMED_PREPROCESS,
    OPENAI_MARKS,
    TrainingRecord,
    convert_names,
    find_architectures,
    find_common_preprocess,
    find_newest_epoch,
    infer_architecture,
    read_folder_config,
    read_training_record,
)
from clipkit.formats.transformers import from_transformers, preprocess_from_transformers, read_end_of_text
from clipkit.formats.weights import read_weights
from clipkit.model.architectures import ARCHITECTURES, QUICKGELU, Adapters, Architecture
from clipkit.model.clip import CLIP, build
from clipkit.model.lora import add_adapters, merge_adapters
from clipkit.model.names import OPEN_CLIP, check_names, create_architecture, from_open_clip, open_clip_config
from clipkit.model.preprocess import Preprocess
from clipkit.model.state_dicts import describe_misfit
from clipkit.model.tokenizer import (
    LibraryTokenizer,
    Tokenizer,
    create_tokenizer,
    has_tokenizer,
    open_folder_tokenizer,
)

_OPEN_CLIP_WEIGHTS = (
    "open_clip_model.safetensors", "open_clip_pytorch_model.safetensors", "open_clip_pytorch_model.bin",
)  # fmt: skip
_TRANSFORMERS_WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
# configurations of folders of other kinds, which may contain an ONNX or OpenVINO export as well
_FOLDER_CONFIGS = ("open_clip_config.json", "modules.json", "config.json")
_NO_WEIGHTS = (torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128)
_CHECKED_VALUES = 2**18  # per tensor
_MAX_LAYERS = 256
# limit for values of position embeddings, which some towers compute even on the meta device
_MAX_POSITIONS = 2**26
# of a ViT, of a ResNet's pooling, of a ViT of timm
_IMAGE = ("visual.positional_embedding", "visual.attnpool.positional_embedding", "visual.trunk.pos_embed")
_TEXT = ("positional_embedding", "text.positional_embedding")
_CLASS_AT_THE_END = "text.cls_emb"  # of CoCa's text tower, whose last position belongs to a class token
_KEPT = 20  # text positions that are kept in a longer table
_MAX_PREFIXES = 5  # tokens before a grid: class, distillation, registers
# exceptions that libraries raise for invalid configurations
_REFUSALS = (
    ArithmeticError, AssertionError, AttributeError, ConfigError, ImportError, LookupError, MemoryError, OSError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """The caller's requests other than the source; ``tag`` is that of published weights of the architecture."""

    name: str = ""
    tag: str = ""
    image_size: int = 0
    image_tokens: int = 0
    context_length: int = 0

    @property
    def is_resized(self) -> bool:
        """Whether another size of images or texts is requested."""
        return bool(self.image_size or self.image_tokens or self.context_length)

    def architecture(self) -> Architecture:
        """Return the architecture of the name."""
        shape = create_architecture(self.name)
        return replace(shape, quick_gelu=True) if self.published.get("quick_gelu") else shape

    @property
    def published(self) -> Mapping[str, Any]:
        """The registry's entry of the tag; empty without one."""
        return published_weights(self.name.removeprefix(OPEN_CLIP), self.tag) if self.tag else {}


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model as a source stores it.

    Attributes:
        file: the file or folder of the weights, for error messages.
        shape: the stored architecture, or the requested one if none is stored.
        tensors: a state dict with clipkit's names.
        tokenizer: the tokenizer; None for that of the architecture.
        warning: what is assumed because the source does not record it, or "".
    """

    file: Path
    shape: Architecture
    tensors: Mapping[str, Tensor]
    origin: str
    preprocess: Preprocess
    name: str = ""
    tokenizer: Tokenizer | None = None
    warning: str = ""


def open_source(
    source: str, *, name: str = "", image_size: int = 0, image_tokens: int = 0, context_length: int = 0
) -> CLIP:
    """Load a model on the CPU in float32, in evaluation mode; ``origin`` describes what was found.

    Args:
        source: see above.
        name: the architecture, for weights stored without one; must agree with a stored one. ``open_clip:NAME/TAG``
            also selects the preprocessing of published weights.
        image_size: side of the images in pixels; position embeddings are resampled. 0 keeps the stored size.
        image_tokens: most patches of an image of variable size. 0 keeps the stored number, or square images.
        context_length: longest text in tokens. 0 keeps the stored length.
    """
    if not source:  # would be the current folder
        raise CheckpointError("no model is named: the path is empty")
    tag = ""
    if name.startswith(OPEN_CLIP):
        name, _, tag = name.partition("/")
    if name:
        check_names(name, called="name")
    request = LoadRequest(
        name=name, tag=tag, image_size=image_size, image_tokens=image_tokens, context_length=context_length
    )
    if tag and not request.published:
        tags = ", ".join(published_tags(name.removeprefix(OPEN_CLIP))) or "none"
        raise ConfigError(f"name = '{name}/{tag}': known tags of {name}: {tags}")
    stored = _read_source(source, request)
    if isinstance(stored, Path):
        if request != LoadRequest():
            raise ConfigError(
                f"{stored.parent}: an ONNX or OpenVINO export has a fixed architecture, image size and context "
                "length"
            )
        return load_graphs(stored)
    _check_agreement(stored, request)
    return build_stored(stored, request)


@lru_cache(maxsize=1)
def read_architecture(source: str) -> Architecture:
    """Return the architecture of a model that stores it, or of published weights; see ``open_source``."""
    if source.startswith(OPEN_CLIP):
        return _find_published(source)[0]
    stored = _read_source(source, LoadRequest())
    if isinstance(stored, Path):
        raise ConfigError(f"{stored.parent}: an ONNX or OpenVINO export cannot be trained")
    return stored.shape


def _read_source(source: str, request: LoadRequest) -> StoredModel | Path:
    """Read a source, or return the configuration of an ONNX or OpenVINO export."""
    if source.startswith(OPEN_CLIP):
        return _read_published(source)
    path = fetch_repository(source) if source.startswith(HUB) else select_best(Path(source).expanduser())
    graph_config = find_graph_config(path)
    if graph_config is not None and not any((path / name).is_file() for name in _FOLDER_CONFIGS):
        return graph_config
    stored = _read_local(path, request)
    return replace(stored, origin=f"{source}: {stored.origin}") if source.startswith(HUB) else stored


def load_checkpoint(folder: Path) -> CLIP:
    """Load the model of a checkpoint folder on the CPU, in float32 and evaluation mode."""
    return build_stored(_read_checkpoint(folder), LoadRequest())


def outline_checkpoint(folder: Path) -> CLIP:
    """Build the model of a checkpoint folder on the meta device; its weights are not read."""
    stored = _read_card(folder)
    with torch.device("meta"):
        return CLIP(stored.shape, name=stored.name, preprocess=stored.preprocess, tokenizer=stored.tokenizer)


def build_stored(stored: StoredModel, request: LoadRequest) -> CLIP:
    """Build a model at the requested sizes."""
    shape = stored.shape.replace_size(
        image_size=request.image_size,
        image_tokens=request.image_tokens,
        context_length=request.context_length,
    )
    length = shape.text.context_length
    if length != stored.shape.text.context_length and shape.text.reads_padding:
        warnings.warn(
            f"{stored.file}: context_length = {length} changes the features of all texts, because this text tower "
            f"reads the padding up to {stored.shape.text.context_length} tokens: fine-tune the model before use",
            stacklevel=4,  # the caller of clipkit.load
        )
    tokenizer = stored.tokenizer
    if tokenizer is not None and request.context_length:
        tokenizer = tokenizer.replace_length(length)
    model = build_from_tensors(
        shape,
        stored.tensors,
        origin=stored.file,
        name=stored.name,
        preprocess=shape.vision.fit_preprocess(stored.preprocess),
        tokenizer=tokenizer,
        resample=request.is_resized,
    )
    model.origin = stored.origin
    if stored.warning:
        warnings.warn(stored.warning, stacklevel=4)  # the caller of clipkit.load
    # After diverged training every tensor contains NaN. Checking all values of ViT-L would take a sixth of the
    # loading time.
    for key, value in model.named_parameters():
        if not value.detach().reshape(-1)[:_CHECKED_VALUES].isfinite().all():
            raise CheckpointError(
                f"{model.origin}: {key} contains NaN or infinity, as after diverged training"
            )
    if request.is_resized and not model.architecture.is_native:
        _try_sizes(model)
    return model


# sources


def _read_local(path: Path, request: LoadRequest) -> StoredModel:
    if path.is_file():
        return _read_file(path, request)
    if not path.is_dir():
        raise CheckpointError(
            f"no model at {path}: expected a run, a checkpoint, a weights file, a folder of open_clip, "
            f"transformers, ONNX or OpenVINO, {OPEN_CLIP}NAME/TAG or {HUB}OWNER/REPOSITORY"
        )
    # such a folder may also have the weights that the adapters belong to, which alone are another model
    if (path / "adapter_config.json").is_file():
        base = read_json(path / "adapter_config.json").get("base_model_name_or_path")
        raise CheckpointError(
            f"{path} has adapters of peft for {base!r}, not a model: merge them with merge_and_unload() of peft"
        )
    if (path / "open_clip_config.json").is_file():
        return _read_open_clip_folder(path)
    if (path / "modules.json").is_file():
        return _read_transformers_folder(_find_sentence_model(path))
    if (path / "config.json").is_file():
        return _read_transformers_folder(path)
    if any(path.glob("epoch_*.pt")) or any(path.glob("checkpoints/epoch_*.pt")):
        newest = find_newest_epoch(path)
        if newest is not None:
            return _read_file(newest, request)
    return _read_checkpoint(resolve_checkpoint(path))


def _read_published(source: str) -> StoredModel:
    shape, published = _find_published(source)
    file = fetch_published(source, published)
    name, _, tag = source.removeprefix(OPEN_CLIP).partition("/")
    return convert_open_clip(
        StoredModel(
            file=file,
            shape=shape,
            tensors=read_weights(file).tensors,
            name=OPEN_CLIP + name,
            preprocess=_parse_preprocess(published, shape, file),
            origin=f"open_clip's published weights {name}/{tag or published_tags(name)[0]}",
        )
    )


def _find_published(source: str) -> tuple[Architecture, Mapping[str, Any]]:
    """Return the architecture of published weights, and their entry in the registry."""
    name, _, tag = source.removeprefix(OPEN_CLIP).partition("/")
    check_names(OPEN_CLIP + name, called="model")
    tags = published_tags(name)
    if not tag and len(tags) == 1:
        tag = tags[0]
    published = published_weights(name, tag)
    if not published:
        raise CheckpointError(
            f"{source}: specify published weights as {OPEN_CLIP}{name}/TAG; known tags: {', '.join(tags) or 'none'}"
        )
    config = open_clip_config(name)
    quick_gelu = bool(config.get("quick_gelu") or published.get("quick_gelu"))
    return from_open_clip({**config, "quick_gelu": quick_gelu}), published


def _read_open_clip_folder(folder: Path, file: Path | None = None) -> StoredModel:
    with _prefix_errors(folder):
        shape, preprocess = read_folder_config(folder)
        shape = replace(shape, text=shape.text.use_tokenizer(folder))
    file = file or _find_file(folder, _OPEN_CLIP_WEIGHTS)
    return convert_open_clip(
        StoredModel(
            file=file,
            shape=shape,
            tensors=read_weights(file).tensors,
            preprocess=_parse_preprocess(preprocess, shape, file),
            origin=f"open_clip folder {folder}",
        )
    )


def _read_transformers_folder(folder: Path, file: Path | None = None) -> StoredModel:
    config = read_json(folder / "config.json")
    processor: Any = None
    if (folder / "processor_config.json").is_file():  # this file also describes the tokenizer
        processor = read_json(folder / "processor_config.json").get("image_processor")
    if processor is None and (folder / "preprocessor_config.json").is_file():
        processor = read_json(folder / "preprocessor_config.json")
    file = file or find_transformers_weights(folder)
    with _prefix_errors(folder):
        if not isinstance(processor, dict | None):
            raise CheckpointError("processor_config.json: image_processor is not an object")
        shape, tensors = from_transformers(config, read_weights(file).tensors, processor)
        is_siglip2 = shape.text.plain is None
        if is_siglip2:
            length = shape.text.context_length
            tokenizer: Tokenizer = LibraryTokenizer(source=str(folder), context_length=length)
        else:
            _, text = shape.get_plain_towers()
            tokenizer = open_folder_tokenizer(folder, text, read_end_of_text(config))
        preprocess = shape.vision.fit_preprocess(
            preprocess_from_transformers(
                processor or {}, shape.vision.image_size, shape.vision.channels, is_siglip2=is_siglip2
            )
        )
    return convert_open_clip(
        StoredModel(
            file=file,
            shape=shape,
            tensors=tensors,
            preprocess=preprocess,
            tokenizer=tokenizer,
            origin=f"transformers folder {folder}"
            + ("" if has_tokenizer(folder) or is_siglip2 else " without a tokenizer (using CLIP's)"),
            warning=f"{folder} has no preprocessor_config.json: {ASSUMED_PREPROCESS}"
            if processor is None and not is_siglip2
            else "",
        )
    )


def _find_sentence_model(folder: Path) -> Path:
    """Return the folder of the model in a folder of sentence-transformers, which applies no further modules."""
    kind = f"{folder} is a folder of sentence-transformers"
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        name = str(modules[0]["path"])
        further = [str(module["type"]).rpartition(".")[2] for module in modules[1:]]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{kind} with an invalid modules.json: expected a list of modules, each with path and type"
        ) from error
    if name and name not in {path.name for path in folder.iterdir()}:
        raise CheckpointError(f"{kind} that does not contain the model's folder {name[:120]!r}")
    model = folder / name
    if not (model / "config.json").is_file():
        raise CheckpointError(
            f"{kind} without a config.json in {model}, the folder of the model according to modules.json"
        )
    model_type = read_json(model / "config.json").get("model_type")
    if model_type != "clip":
        raise CheckpointError(f"{kind} with a {model_type!r} model, not a CLIPModel")
    if further not in ([], ["Normalize"]):
        raise CheckpointError(
            f"{kind} whose model is followed by {', '.join(further)}, which clipkit does not apply"
        )
    return model


def _read_file(path: Path, request: LoadRequest) -> StoredModel:
    """Read a weights file; the architecture is given by name, read from params.txt, or inferred (OpenAI)."""
    folder = path.parent
    if path.name == "model.safetensors" and (folder / "model.json").is_file():
        return _read_checkpoint(folder)
    if path.name in _OPEN_CLIP_WEIGHTS and (folder / "open_clip_config.json").is_file():
        return _read_open_clip_folder(folder, path)
    if path.name in _TRANSFORMERS_WEIGHTS and (folder / "config.json").is_file():
        return _read_transformers_folder(folder, path)
    weights = read_weights(path)
    if any(key.startswith(("vision_model.", "text_model.")) for key in weights.tensors):
        raise CheckpointError(
            f"{path} has transformers' parameter names: use the folder with its config.json"
        )
    if all(mark in weights.tensors or mark in weights.notes for mark in OPENAI_MARKS):
        with _prefix_errors(path):
            openai = replace(infer_architecture(weights.tensors), quick_gelu=True)
        record = TrainingRecord(architecture=openai, preprocess={})
        origin = f"OpenAI's weights {path}"
    else:
        record = read_training_record(path)
        origin = f"open_clip checkpoint {path}"
    shape = record.architecture
    if shape is None and request.name:
        shape = request.architecture()
    if shape is None:
        names = [name.removesuffix(QUICKGELU) for name in find_architectures(weights.tensors)]
        examples = f", such as {' or '.join(map(repr, dict.fromkeys(names)))}" if names else ""
        raise UnnamedArchitecture(
            f"{path}: {record.lacking}: specify the architecture by --name NAME on the command line, "
            f"clipkit.load(…, name=NAME) or, in training, model.name=NAME{examples}; add {QUICKGELU} to the name "
            "if the model has QuickGELU"
        )
    preprocess = record.preprocess
    warning = ""
    if preprocess is None and request.tag:
        preprocess = request.published
    elif preprocess is None:
        preprocess, assumption = find_common_preprocess(request.name)
        if assumption:
            warning = f"{path}: the preprocessing of these weights is not stored: {assumption}"
    progress = [f"{key} {weights.notes[key]}" for key in ("epoch", "step") if key in weights.notes]
    if progress:
        origin += f" ({', '.join(progress)})"
    return convert_open_clip(
        StoredModel(
            file=path,
            shape=shape,
            tensors=weights.tensors,
            name=request.name or record.name,
            preprocess=_parse_preprocess(preprocess, shape, path),
            origin=origin,
            warning=warning,
        )
    )


def _read_card(folder: Path) -> StoredModel:
    card = read_json(folder / "model.json")
    if card.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: this version cannot read the format of model.json")
    shape = parse_architecture(card.get("architecture", {}))
    preprocess = Preprocess.from_dict(card.get("preprocess", {}))
    if preprocess != shape.vision.fit_preprocess(preprocess):
        raise CheckpointError(f"{folder}: the image sizes of architecture and preprocessing differ")
    return StoredModel(
        file=folder,
        shape=shape,
        tensors={},
        name=str(card.get("name", "")),
        preprocess=preprocess,
        tokenizer=create_tokenizer(shape, stored=card.get("tokenizer", "none"), folder=folder),
        origin=f"clipkit checkpoint {folder}",
    )


def _read_checkpoint(folder: Path) -> StoredModel:
    stored = _read_card(folder)
    weights = folder / "model.safetensors"
    try:
        tensors = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {weights}: {error}") from error
    check_checksum(weights)
    if read_json(folder / "model.json").get("adapters"):
        tensors = _merge_with_base(folder, stored.shape, tensors)
    return replace(stored, tensors=tensors)


def _merge_with_base(folder: Path, shape: Architecture, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    adapters = _stored_adapters(folder)
    try:
        base = open_source(
            adapters.source,
            image_size=shape.vision.image_size,
            image_tokens=shape.vision.image_tokens,
            context_length=shape.text.context_length,
        )
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(
            f"{folder} has adapters of {adapters.source}, which cannot be loaded: {error}"
        ) from error
    check_base(folder, model_hash(base))
    base.set_decoder(shape.decoder, seed=0)
    base.set_masked(shape.masked, seed=0)
    base.set_words(shape.words, seed=0)
    base.set_projections(shape.projections)
    if shape.logit_bias and base.logit_bias is None:
        base.reset_bias()
    add_adapters(base, adapters)
    check_weights(base, {**base.state_dict(), **tensors}, origin=folder)
    base.load_state_dict(tensors, strict=False)
    merge_adapters(base)
    return base.state_dict()


def check_base(folder: Path, weights: str) -> None:
    """Check that the adapters of a checkpoint belong to the model with this hash."""
    adapters = _stored_adapters(folder)
    if adapters.hash != weights:
        raise CheckpointError(
            f"{folder} has adapters of {adapters.source}, whose weights have changed since: restore them"
        )


def _stored_adapters(folder: Path) -> Adapters:
    try:
        return msgspec.convert(read_json(folder / "model.json").get("adapters"), Adapters)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{folder}: model.json describes no adapters: {error}") from error


def _parse_preprocess(settings: Mapping[str, Any], shape: Architecture, file: Path) -> Preprocess:
    values: dict[str, Any] = {}
    for field in fields(Preprocess):
        if settings.get(field.name) is not None:
            values[field.name] = settings[field.name]
    with _prefix_errors(file):
        return Preprocess.from_dict({**values, "image_size": shape.vision.image_size})


def find_transformers_weights(folder: Path) -> Path:
    """Return the file with the weights of a folder of transformers."""
    return _find_file(folder, _TRANSFORMERS_WEIGHTS)


def _find_file(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder} has no weights: expected {' or '.join(names)}")


def convert_open_clip(stored: StoredModel) -> StoredModel:
    """Convert open_clip's names of tensors, and complete the architecture by what they show."""
    for key, value in stored.tensors.items():
        if value.dtype in _NO_WEIGHTS:
            raise CheckpointError(
                f"{stored.file}: {key} is {value.dtype}; quantized weights are not supported"
            )
    names = [key for key, shape in ARCHITECTURES.items() if replace(shape, small_data=False) == stored.shape]
    shape = replace(stored.shape, logit_bias="logit_bias" in stored.tensors)
    if "text_decoder.text_projection" not in stored.tensors:
        shape = replace(shape, decoder=None)
    tensors = convert_names(stored.tensors, flat=shape.text.part_of_clip, decoder=shape.decoder is not None)
    return replace(stored, shape=shape, tensors=tensors, name=names[0] if names else stored.name)


def _check_agreement(stored: StoredModel, request: LoadRequest) -> None:
    if not request.name:
        return
    stored_shape = replace(stored.shape, logit_bias=False, small_data=False, decoder=None)
    expected = replace(request.architecture(), logit_bias=False, small_data=False, decoder=None)
    # fails if the size is not a multiple of the patch size: another architecture
    with suppress(ConfigError):
        expected = expected.replace_size(
            image_size=stored_shape.vision.image_size, context_length=stored_shape.text.context_length
        )
    if expected == stored_shape:
        return
    if replace(expected, quick_gelu=stored_shape.quick_gelu) == stored_shape:
        activations = {True: "QuickGELU", False: "GELU"}
        raise CheckpointError(
            f"{stored.file}: the weights are for {activations[stored_shape.quick_gelu]}, {request.name} is for "
            f"{activations[expected.quick_gelu]}"
        )
    raise CheckpointError(f"{stored.file}: the weights have another architecture than {request.name}")


# models


def build_from_tensors(
    shape: Architecture,
    tensors: Mapping[str, Tensor],
    *,
    origin: Path,
    name: str = "",
    preprocess: Preprocess | None = None,
    tokenizer: Tokenizer | None = None,
    resample: bool = False,
) -> CLIP:
    """Build a float32 model in evaluation mode with the given weights; all names and shapes must match.

    They are compared before memory for the architecture is allocated.

    Args:
        tensors: a state dict with the model's names.
        origin: where the tensors come from, for error messages.
        resample: whether to resample position embeddings of another size.
    """
    skeleton = _build_skeleton(shape, name, origin)
    if skeleton is not None:
        _fit_tensors(skeleton, tensors, origin=origin, resample=resample)
    try:
        model = build(shape, name=name, preprocess=preprocess, tokenizer=tokenizer)
    except ConfigError as error:
        raise CheckpointError(f"{origin}: {error}") from error
    model.load_state_dict(_fit_tensors(model, tensors, origin=origin, resample=resample))
    return model.eval()


def _build_skeleton(shape: Architecture, name: str, origin: Path) -> CLIP | None:
    """Build a stored, possibly manipulated architecture without memory; None if a library's tower needs it."""
    try:
        for tower in (shape.vision, shape.text):
            _check_depth(getattr(tower, "config", {}))
        count = shape.vision.position_values
        if count > _MAX_POSITIONS:
            raise ConfigError(f"image_size, patch_size and width give {count} values of position embeddings")
        with torch.device("meta"):
            return CLIP(shape, name=name)
    except _REFUSALS as error:
        if isinstance(error, RuntimeError) and "meta" in str(error):
            return None
        raise CheckpointError(f"{origin}: cannot build the configured tower: {error}") from error


def _check_depth(value: object, name: str = "") -> None:
    """Limit the number of layers: modules take memory even on the meta device."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_depth(inner, str(key))
    elif "layers" in name:
        counts = value if isinstance(value, list | tuple) else [value]
        if sum(count for count in counts if isinstance(count, int)) > _MAX_LAYERS:
            raise ConfigError(f"{name} = {value} is more than {_MAX_LAYERS}")


def fit_positions(tensors: dict[str, Tensor], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Resample the position embeddings to the wanted shapes; others of another shape are kept.

    Image positions: the class token's is kept, the square grid is resized by antialiased bicubic interpolation
    (Dosovitskiy et al. 2021, section 3.2). Text positions: a shorter length keeps the first ones. A longer one
    keeps the first 20, the best trained ones, and stretches the others linearly (Long-CLIP, Zhang et al. 2024,
    https://arxiv.org/abs/2403.15378). In both cases short texts keep their features, unless the text tower reads
    padding (see ``TextArchitecture.reads_padding``).
    """
    fitted = dict(tensors)
    for name in (*_IMAGE, *_TEXT):
        if name not in tensors or name not in shapes or tensors[name].shape == shapes[name]:
            continue
        old = tensors[name]
        shape = shapes[name]
        same_kind = old.ndim == len(shape) and (old.shape[:-2], old.shape[-1]) == (shape[:-2], shape[-1])
        if not same_kind or shape[:-2].numel() != 1:  # timm's have a first dimension of 1
            continue  # for example another width, which the check of shapes reports
        rows = old.flatten(0, -2)
        length = shape[-2]
        last = int(name in _TEXT and _CLASS_AT_THE_END in tensors)
        if min(len(rows), length) <= last:
            continue
        if name in _IMAGE:
            new = _resize_image_positions(rows, length)
        else:
            words = _resize_text_positions(rows[: len(rows) - last], length - last)
            new = torch.cat([words, rows[len(rows) - last :]])
        fitted[name] = new.view(shape)
    return fitted


def _resize_text_positions(old: Tensor, length: int) -> Tensor:
    """Keep the first positions, and stretch those after the first 20 if there are too few."""
    if length <= len(old):
        return old[:length]
    first = min(_KEPT, len(old) - 1)
    stretched = F.interpolate(old[first:].float().T[None], length - first, mode="linear", align_corners=True)
    return torch.cat([old[:first], stretched[0].T.to(old.dtype)])


def _resize_image_positions(old: Tensor, length: int) -> Tensor:
    """Resize a grid after k other tokens: (k + g², D) → (length, D)."""
    for prefixes in range(_MAX_PREFIXES + 1):
        side = math.isqrt(max(0, len(old) - prefixes))
        new_side = math.isqrt(max(0, length - prefixes))
        if side and new_side and side**2 + prefixes == len(old) and new_side**2 + prefixes == length:
            break
    else:
        raise CheckpointError(f"{len(old)} image positions are not a class token and a square grid")
    grid = old[prefixes:].float().T.unflatten(1, (side, side))[None]  # (1, D, g, g)
    size = (new_side, new_side)
    resized = F.interpolate(grid, size, mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([old[:prefixes], resized[0].flatten(1).T.to(old.dtype)])


def _fit_tensors(
    model: CLIP, tensors: Mapping[str, Tensor], *, origin: Path, resample: bool
) -> Mapping[str, Tensor]:
    if resample:
        shapes = {name: value.shape for name, value in model.state_dict().items()}
        tensors = fit_positions(dict(tensors), shapes)
    try:
        check_weights(model, tensors, origin=origin)
    except CheckpointError as error:
        names = find_architectures(tensors)
        if not names:
            raise
        raise CheckpointError(f"{error}; their shapes match {' or '.join(map(repr, names))}") from error
    return tensors


def check_weights(model: CLIP, tensors: Mapping[str, Tensor], *, origin: Path) -> None:
    """Check that tensors match a model's names, shapes and kinds of dtype; the model may be on the meta device."""
    misfit = describe_misfit(model.state_dict(), tensors)
    if misfit:
        raise CheckpointError(f"{origin}: the weights do not match {model.name or 'the model'}: {misfit}")


def _try_sizes(model: CLIP) -> None:
    """Encode once at the new sizes, since some libraries build towers for sizes that they cannot encode."""
    length = model.architecture.text.context_length
    token = 0 if model.architecture.text.classes else 3  # a head may have only one class
    what = f"images of {model.preprocess.image_size} pixels"
    try:
        with torch.no_grad():
            model.encode_image(torch.zeros(1, *model.preprocess.input_shape, dtype=torch.uint8))
            what = f"texts of {length} tokens"
            model.encode_text(torch.full((1, length), token))
    except (RuntimeError, AssertionError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{model.origin}: the model cannot encode {what}: {error}") from error


@contextmanager
def _prefix_errors(origin: object) -> Iterator[None]:
    try:
        yield
    except ClipkitError as error:
        raise CheckpointError(f"{origin}: {error}") from error

"""Load a model from any supported source without running code from it.

    a clipkit run or checkpoint       model.json + model.safetensors
    a hub-style folder of open_clip   open_clip_config.json + open_clip_model.safetensors
    a folder of transformers          config.json of a CLIPModel + model.safetensors
    a folder of sentence-transformers modules.json and such a folder, often 0_CLIPModel
    an ONNX export of clipkit         onnx_config.json + visual.onnx, textual.onnx, in no folder of another kind
    a training folder of open_clip    params.txt + checkpoints/epoch_N.pt
    a weights file                    .pt, .bin, .safetensors: open_clip's, OpenAI's, TorchScript archives
    open_clip:NAME[/TAG]              open_clip's registry of published weights
    hf-hub:OWNER/REPOSITORY           a repository on the Hugging Face hub

The activation function is read from the source. If the source does not record it, the caller must specify GELU or
QuickGELU: the tensors are the same, and the wrong activation lowers scores without an error.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipkit.errors import CheckpointError, ClipkitError, ConfigError
from clipkit.files.hub import HUB, fetch_published, fetch_repository
from clipkit.files.open_clip import published_tags, published_weights
from clipkit.formats.checkpoint import (
    load_model,
    read_json,
    resolve_checkpoint,
    warn_of_padding,
    with_weights,
)
from clipkit.formats.onnx import ONNX_CONFIG, load_onnx
from clipkit.formats.open_clip import (
    ASSUMED_PREPROCESS,
    OPENAI_MARKS,
    TrainingRecord,
    check_claims,
    common_preprocess,
    fitting_names,
    folder_config,
    inferred,
    newest_epoch,
    own_names,
    training_record,
)
from clipkit.formats.transformers import end_of_text, from_transformers, preprocess_from_transformers
from clipkit.formats.weights import MERGING, read_weights
from clipkit.model.architectures import ARCHITECTURES, QUICKGELU, Architecture
from clipkit.model.clip import CLIP
from clipkit.model.names import OPEN_CLIP, architecture, check_names, from_open_clip, open_clip_config
from clipkit.model.preprocess import Preprocess
from clipkit.model.tokenizer import Tokenizer, folder_tokenizer, has_tokenizer

__all__ = ["from_open_clip_tensors", "open_source"]

_OPEN_CLIP_WEIGHTS = (
    "open_clip_model.safetensors", "open_clip_pytorch_model.safetensors", "open_clip_pytorch_model.bin",
)  # fmt: skip
_TRANSFORMERS_WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
_NO_WEIGHTS = (torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128)
_CHECKED_VALUES = 2**18  # per tensor


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """The caller's requests other than the source; ``tag`` is that of published weights of the architecture."""

    name: str = ""
    tag: str = ""
    image_size: int = 0
    context_length: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        return {"image_size": self.image_size, "context_length": self.context_length}

    def architecture(self) -> Architecture:
        shape = architecture(self.name)
        return replace(shape, quick_gelu=True) if self.published.get("quick_gelu") else shape

    @property
    def published(self) -> Mapping[str, Any]:
        """The registry's entry of the tag; empty without one."""
        return published_weights(self.name.removeprefix(OPEN_CLIP), self.tag) if self.tag else {}


def open_source(source: str, *, name: str = "", image_size: int = 0, context_length: int = 0) -> CLIP:
    """Load a model on the CPU in float32, in evaluation mode; ``origin`` describes what was found.

    Args:
        source: see above.
        name: the architecture, for weights stored without one; must agree with a stored one. ``open_clip:NAME/TAG``
            also selects the preprocessing of published weights.
        image_size: side of the images in pixels; position embeddings are resampled. 0 keeps the stored size.
        context_length: longest text in tokens. 0 keeps the stored length.

    Raises:
        CheckpointError: the source does not exist, is damaged or inconsistent.
        ConfigError: a name is unknown, or needs a network.
    """
    tag = ""
    if name.startswith(OPEN_CLIP):
        name, _, tag = name.partition("/")
    if name:
        check_names(name, called="name")
    wanted = _Wanted(name=name, tag=tag, image_size=image_size, context_length=context_length)
    if tag and not wanted.published:
        tags = ", ".join(published_tags(name.removeprefix(OPEN_CLIP))) or "none"
        raise ConfigError(f"name = '{name}/{tag}': known tags of {name}: {tags}")
    if source.startswith(OPEN_CLIP):
        model = _published(source, wanted)
    elif source.startswith(HUB):
        model = _local(fetch_repository(source), wanted)
        model.origin = f"{source}: {model.origin}"
    else:
        model = _local(Path(source).expanduser(), wanted)
    # After diverged training every tensor contains NaN. Checking all values of ViT-L would take a sixth of the
    # loading time.
    for key, value in model.named_parameters():
        if not value.detach().reshape(-1)[:_CHECKED_VALUES].isfinite().all():
            raise CheckpointError(
                f"{model.origin}: {key} contains NaN or infinity, as after diverged training"
            )
    if any(wanted.sizes.values()) and not model.architecture.is_own:
        _try_sizes(model)
    return model


def _local(path: Path, wanted: _Wanted) -> CLIP:
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if is_file:
        return _file(path, wanted)
    if not is_folder:
        raise CheckpointError(
            f"no model at {path}: expected a run, a checkpoint, a weights file, a folder of open_clip or "
            f"transformers, "
            f"{OPEN_CLIP}NAME/TAG or {HUB}OWNER/REPOSITORY"
        )
    if (path / "adapter_config.json").is_file():
        base = read_json(path / "adapter_config.json").get("base_model_name_or_path")
        raise CheckpointError(f"{path} has adapters of peft for {base!r}, not a model: {MERGING}")
    if (path / "open_clip_config.json").is_file():
        return _open_clip_folder(path, wanted)
    if (path / "modules.json").is_file():
        return _transformers_folder(_sentence_model(path), wanted)
    if (path / "config.json").is_file():
        return _transformers_folder(path, wanted)
    if (path / ONNX_CONFIG).is_file():
        if wanted != _Wanted():
            raise ConfigError(
                f"{path}: an ONNX export has a fixed architecture, image size and context length"
            )
        return load_onnx(path)
    if (newest := newest_epoch(path)) is not None:
        return _file(newest, wanted)
    if (path / "params.txt").is_file():
        raise CheckpointError(f"{path} is a training folder of open_clip without a checkpoints/epoch_N.pt")
    folder = resolve_checkpoint(path)
    model = load_model(folder, **wanted.sizes)
    _agree(wanted, model.architecture, folder)
    model.origin = f"clipkit checkpoint {folder}"
    return model


def _published(source: str, wanted: _Wanted) -> CLIP:
    """Load published weights of open_clip's registry."""
    name, _, tag = source.removeprefix(OPEN_CLIP).partition("/")
    check_names(OPEN_CLIP + name, called="model")
    tags = published_tags(name)
    if not tag and len(tags) == 1:
        tag = tags[0]
    published = published_weights(name, tag)
    if not published:
        known = ", ".join(tags) or "none"
        raise CheckpointError(
            f"{source}: specify published weights as {OPEN_CLIP}{name}/TAG; known tags: {known}"
        )
    file = fetch_published(source, published)
    config = open_clip_config(name)
    quick_gelu = bool(config.get("quick_gelu") or published.get("quick_gelu"))
    shape = from_open_clip({**config, "quick_gelu": quick_gelu})
    _agree(wanted, shape, source)
    tensors = read_weights(file).tensors
    model = _built(shape, tensors, file, wanted, name=OPEN_CLIP + name, preprocess=published)
    model.origin = f"open_clip's published weights {name}/{tag}"
    return model


def _open_clip_folder(folder: Path, wanted: _Wanted, file: Path | None = None) -> CLIP:
    with _naming(folder):
        shape, preprocess = folder_config(folder)
        _agree(wanted, shape, folder)
        shape = replace(shape, text=shape.text.with_tokenizer_in(folder))
    file = file or _first(folder, _OPEN_CLIP_WEIGHTS)
    model = _built(shape, read_weights(file).tensors, file, wanted, preprocess=preprocess)
    model.origin = f"open_clip folder {folder}"
    return model


def _transformers_folder(folder: Path, wanted: _Wanted, file: Path | None = None) -> CLIP:
    config = read_json(folder / "config.json")
    processor: Any = None
    if (folder / "processor_config.json").is_file():  # this file also describes the tokenizer
        processor = read_json(folder / "processor_config.json").get("image_processor")
    if processor is None and (folder / "preprocessor_config.json").is_file():
        processor = read_json(folder / "preprocessor_config.json")
    file = file or _first(folder, _TRANSFORMERS_WEIGHTS)
    with _naming(folder):
        if not isinstance(processor, dict | None):
            raise CheckpointError("processor_config.json: image_processor is not an object")
        shape, tensors = from_transformers(config, read_weights(file).tensors)
        _, text = shape.own_towers()
        tokenizer = folder_tokenizer(folder, text, end_of_text(config))
        preprocess = preprocess_from_transformers(
            processor or {}, shape.vision.image_size, shape.vision.channels
        )
    _agree(wanted, shape, folder)
    model = _built(shape, tensors, file, wanted, preprocess=preprocess.to_dict(), tokenizer=tokenizer)
    if processor is None:
        note = f"{folder} has no preprocessor_config.json: {ASSUMED_PREPROCESS}"
        warnings.warn(note, stacklevel=5)  # the caller of clipkit.load
    model.origin = f"transformers folder {folder}"
    if not has_tokenizer(folder):
        model.origin += " without a tokenizer (using CLIP's)"
    return model


def _sentence_model(folder: Path) -> Path:
    """Return the folder of the model in a folder of sentence-transformers.

    Raises:
        CheckpointError: the folder has no CLIPModel, or its embeddings are computed by further modules.
    """
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


def _file(path: Path, wanted: _Wanted) -> CLIP:
    """Load a weights file; the architecture is given by name, read from params.txt, or inferred (OpenAI)."""
    folder = path.parent
    if path.name == "model.safetensors" and (folder / "model.json").is_file():
        return _local(folder, wanted)
    if path.name in _OPEN_CLIP_WEIGHTS and (folder / "open_clip_config.json").is_file():
        return _open_clip_folder(folder, wanted, path)
    if path.name in _TRANSFORMERS_WEIGHTS and (folder / "config.json").is_file():
        return _transformers_folder(folder, wanted, path)
    stored = read_weights(path)
    if any(key.startswith(("vision_model.", "text_model.")) for key in stored.tensors):
        raise CheckpointError(
            f"{path} has transformers' parameter names: use the folder with its config.json"
        )
    if all(mark in stored.tensors or mark in stored.notes for mark in OPENAI_MARKS):
        with _naming(path):
            openai = replace(inferred(stored.tensors), quick_gelu=True)
        record = TrainingRecord(architecture=openai, preprocess={})
        kind = "OpenAI's weights"
    else:
        record, kind = training_record(path), "open_clip checkpoint"
    _agree(wanted, record.architecture, path)
    shape = record.architecture or (wanted.architecture() if wanted.name else None)
    if shape is None:
        names = list(dict.fromkeys(one.removesuffix(QUICKGELU) for one in fitting_names(stored.tensors)))
        examples = f", such as {' or '.join(map(repr, names))}" if names else ""
        raise CheckpointError(
            f"{path}: {record.lacking}: specify the architecture by --name NAME on the command line or "
            f"clipkit.load(…, name=NAME){examples}; add {QUICKGELU} to the name if the model has QuickGELU"
        )
    preprocess, assumption = record.preprocess, ""
    if preprocess is None and wanted.tag:
        preprocess = wanted.published
    elif preprocess is None:
        preprocess, assumption = common_preprocess(wanted.name)
    model = _built(
        shape, stored.tensors, path, wanted, name=wanted.name or record.name, preprocess=preprocess
    )
    if assumption:
        note = f"{path}: the preprocessing of these weights is not stored: {assumption}"
        warnings.warn(note, stacklevel=5)  # the caller of clipkit.load
    progress = [f"{key} {stored.notes[key]}" for key in ("epoch", "step") if key in stored.notes]
    model.origin = f"{kind} {path}" + (f" ({', '.join(progress)})" if progress else "")
    return model


def _agree(wanted: _Wanted, found: Architecture | None, origin: object) -> None:
    """Raise CheckpointError if the architecture or activation is not the requested one; sizes may differ."""
    if not wanted.name or found is None:
        return
    asked = wanted.architecture()
    asked = replace(asked, small_data=found.small_data, logit_bias=found.logit_bias)
    with suppress(
        ConfigError
    ):  # raised if the size is not a multiple of the patch size: another architecture
        asked = asked.resized(image_size=found.vision.image_size, context_length=found.text.context_length)
    if asked == found:
        return
    if replace(asked, quick_gelu=found.quick_gelu) == found:
        activations = {True: "QuickGELU", False: "GELU"}
        raise CheckpointError(
            f"{origin}: the weights are for {activations[found.quick_gelu]}, {wanted.name} is for "
            f"{activations[asked.quick_gelu]}"
        )
    raise CheckpointError(f"{origin}: the weights have another architecture than {wanted.name}")


def _built(
    shape: Architecture,
    tensors: Mapping[str, Tensor],
    origin: Path,
    wanted: _Wanted,
    *,
    name: str = "",
    preprocess: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
) -> CLIP:
    original, shape = shape, shape.resized(**wanted.sizes)
    warn_of_padding(original, shape, origin=origin)
    known = {one.name for one in fields(Preprocess)}
    given = {key: value for key, value in (preprocess or {}).items() if key in known and value is not None}
    with _naming(origin):
        made = Preprocess.from_dict({**given, "image_size": shape.vision.image_size})
    plain = [key for key, own in ARCHITECTURES.items() if replace(own, small_data=False) == original]
    try:
        return from_open_clip_tensors(
            shape,
            tensors,
            origin=origin,
            name=plain[0] if plain else name,
            preprocess=made,
            tokenizer=tokenizer and tokenizer.of_length(shape.text.context_length),
            resample=any(wanted.sizes.values()),
        )
    except CheckpointError as error:
        if not (names := fitting_names(tensors)):
            raise
        raise CheckpointError(f"{error}; their shapes match {' or '.join(map(repr, names))}") from error


def from_open_clip_tensors(
    shape: Architecture,
    tensors: Mapping[str, Tensor],
    *,
    origin: Path,
    name: str = "",
    preprocess: Preprocess | None = None,
    tokenizer: Tokenizer | None = None,
    resample: bool = False,
) -> CLIP:
    """Build a model from a state dict of open_clip; see ``clipkit.formats.checkpoint.with_weights``.

    Raises:
        CheckpointError: the weights do not match.
    """
    for key, value in tensors.items():
        if value.dtype in _NO_WEIGHTS:
            raise CheckpointError(f"{origin}: {key} is {value.dtype}; quantized weights are not supported")
    shape = replace(shape, logit_bias="logit_bias" in tensors)
    if shape.decoder is not None and "text_decoder.text_projection" not in tensors:
        shape = replace(shape, decoder=None)
    own = own_names(tensors, flat=shape.text.part_of_clip, decoder=shape.decoder is not None)
    check_claims(shape, own, origin=origin, resample=resample)
    return with_weights(
        shape, own, origin=origin, name=name, preprocess=preprocess, tokenizer=tokenizer, resample=resample
    )


def _try_sizes(model: CLIP) -> None:
    """Encode once at the new sizes, since some libraries build towers for sizes that they cannot encode."""
    size, length = model.architecture.vision.image_size, model.architecture.text.context_length
    token = 0 if model.architecture.text.classes else 3  # a head may have only one class
    what = f"images of {size} pixels"
    try:
        with torch.no_grad():
            model.encode_image(torch.zeros(1, model.preprocess.channels, size, size))
            what = f"texts of {length} tokens"
            model.encode_text(torch.full((1, length), token))
    except (RuntimeError, AssertionError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{model.origin}: the model cannot encode {what}: {error}") from error


@contextmanager
def _naming(origin: object) -> Iterator[None]:
    """Prefix errors about stored values with their origin."""
    try:
        yield
    except ClipkitError as error:
        raise CheckpointError(f"{origin}: {error}") from error


def _first(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder} has no weights: expected {' or '.join(names)}")

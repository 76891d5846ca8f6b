"""What ``clipkit.load`` takes: finds out what a source is, reads its weights without running anything of it.

    a clipkit run or checkpoint       model.json + model.safetensors
    a hub-style folder of open_clip   open_clip_config.json + open_clip_model.safetensors
    a folder of transformers          config.json of a CLIPModel + model.safetensors
    a training folder of open_clip    params.txt + checkpoints/epoch_N.pt
    a weights file                    .pt, .bin, .safetensors: open_clip's, OpenAI's, TorchScript archives
    open_clip:NAME[/TAG]              open_clip's registry of published weights
    hf-hub:OWNER/REPOSITORY           a repository on the Hugging Face hub

The activation follows what is stored with the weights. Where nothing says whether it is GELU or QuickGELU, the
caller has to: the two have the same tensors, and the wrong one is a worse score and no error.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from clipkit.architectures import (
    ARCHITECTURES,
    Architecture,
    OpenClipText,
    TextTower,
    TransformersText,
    VisionTower,
)
from clipkit.checkpoint import load_model, resolve_checkpoint, with_weights
from clipkit.errors import CheckpointError, ConfigError
from clipkit.family import OPEN_CLIP, architecture, from_open_clip, open_clip_config
from clipkit.huggingface import from_transformers, preprocess_from_transformers
from clipkit.model import CLIP
from clipkit.preprocess import Preprocess
from clipkit.weights import StoredWeights, read_weights

__all__ = ["from_open_clip_tensors", "open_source"]

_HUB = "hf-hub:"
_HUB_FILES = (
    "*.json",
    "*.txt",
    "*.model",
    "*.safetensors",
    "open_clip_pytorch_model.bin",
    "pytorch_model.bin",
)
_OPEN_CLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
_TRANSFORMERS_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
# of OpenAI's state dicts; nobody else writes these beside the weights
_OPENAI_MARKS = ("input_resolution", "context_length", "vocab_size")
_LARGEST_JSON = 16 * 2**20


def open_source(source: str, *, name: str = "", image_size: int = 0, context_length: int = 0) -> CLIP:
    """The model that a source holds, on the CPU in float32, in evaluation mode; ``origin`` says what was found.

    Args:
        source: see above.
        name: the architecture, for weights that come without one; it must agree with what is stored.
        image_size: side of the pictures; 0 leaves it. Position embeddings are resampled.
        context_length: longest text in tokens; 0 leaves it.

    Raises:
        CheckpointError: nothing is there, it is damaged, or does not fit together.
        ConfigError: a name is unknown, or cannot be had without a network.
    """
    sizes = {"image_size": image_size, "context_length": context_length}
    wanted = architecture(name) if name else None
    if source.startswith(OPEN_CLIP):
        return _published(source, wanted, sizes)
    path = _from_hub(source.removeprefix(_HUB)) if source.startswith(_HUB) else Path(source).expanduser()
    if not path.exists():
        raise CheckpointError(
            f"no model at {path}: give a run, a checkpoint, a weights file, a folder of open_clip or transformers, "
            f"{OPEN_CLIP}NAME/TAG or {_HUB}OWNER/REPOSITORY"
        )
    if path.is_file():
        return _file(path, name, wanted, sizes)
    if (path / "open_clip_config.json").is_file():
        return _open_clip_folder(path, wanted, sizes)
    if (path / "config.json").is_file():
        return _transformers_folder(path, wanted, sizes)
    if (path / "params.txt").is_file():
        return _file(_newest_epoch(path), name, wanted, sizes)
    folder = resolve_checkpoint(path)
    model = load_model(folder, **sizes)
    _agree(wanted, model.architecture, sizes, folder)
    model.origin = f"clipkit checkpoint {folder}"
    return model


def _published(source: str, wanted: Architecture | None, sizes: Mapping[str, int]) -> CLIP:
    """Weights of open_clip's registry."""
    import open_clip

    name, _, tag = source.removeprefix(OPEN_CLIP).partition("/")
    config = open_clip_config(name)
    tags = open_clip.list_pretrained_tags_by_model(name)
    if not tag and len(tags) == 1:
        tag = tags[0]
    if tag not in tags:
        known = ", ".join(tags) or "none"
        raise CheckpointError(
            f"{source}: give one of the published weights as {OPEN_CLIP}{name}/TAG; known: {known}"
        )
    published = open_clip.get_pretrained_cfg(name, tag)
    shape = from_open_clip({**config, "quick_gelu": bool(published.get("quick_gelu", False))})
    _agree(wanted, shape, {}, source)
    from clipkit.library_towers import from_hub

    with from_hub(source):
        file = Path(open_clip.download_pretrained(published))
    model = _built(
        shape, read_weights(file).tensors, file, sizes, name=OPEN_CLIP + name, preprocess=published
    )
    model.origin = f"open_clip's published weights {name}/{tag}"
    return model


def _from_hub(repository: str) -> Path:
    from huggingface_hub import snapshot_download

    from clipkit.library_towers import from_hub

    with from_hub(repository):
        return Path(snapshot_download(repository, allow_patterns=list(_HUB_FILES)))


def _open_clip_folder(folder: Path, wanted: Architecture | None, sizes: Mapping[str, int]) -> CLIP:
    config = _read_json(folder / "open_clip_config.json")
    if not isinstance(model_config := config.get("model_cfg"), dict):
        raise CheckpointError(f"{folder}/open_clip_config.json has no model_cfg")
    shape = _shape(model_config, folder)
    text = shape.text
    if (
        isinstance(text, OpenClipText)
        and text.config.get("hf_tokenizer_name")
        and (folder / "tokenizer.json").is_file()
    ):
        shape = replace(shape, text=replace(text, config={**text.config, "hf_tokenizer_name": str(folder)}))
    elif isinstance(text, TransformersText) and (folder / "tokenizer.json").is_file():
        shape = replace(shape, text=replace(text, model=str(folder)))
    _agree(wanted, shape, {}, folder)
    file = _first(folder, _OPEN_CLIP_WEIGHTS)
    preprocess = config.get("preprocess_cfg") or {}
    model = _built(shape, read_weights(file).tensors, file, sizes, preprocess=preprocess)
    model.origin = f"open_clip folder {folder}"
    return model


def _transformers_folder(folder: Path, wanted: Architecture | None, sizes: Mapping[str, int]) -> CLIP:
    config = _read_json(folder / "config.json")
    file = _first(folder, _TRANSFORMERS_WEIGHTS)
    shape, tensors = from_transformers(config, read_weights(file).tensors)
    _agree(wanted, shape, {}, folder)
    processor: Mapping[str, Any] = {}
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            processor = _read_json(folder / name)
            processor = processor.get("image_processor", processor)
            break
    preprocess = preprocess_from_transformers(processor, shape.vision.image_size)
    model = _built(shape, tensors, file, sizes, preprocess=preprocess.to_dict())
    model.origin = f"transformers folder {folder}"
    return model


def _newest_epoch(folder: Path) -> Path:
    epochs = {
        int(match[1]): path
        for path in (folder / "checkpoints").glob("epoch_*.pt")
        if (match := re.fullmatch(r"epoch_(\d+)\.pt", path.name))
    }
    latest = folder / "checkpoints" / "epoch_latest.pt"
    if not epochs and not latest.is_file():
        raise CheckpointError(f"{folder} is a training folder of open_clip without a checkpoints/epoch_N.pt")
    return epochs[max(epochs)] if epochs else latest


def _file(path: Path, name: str, wanted: Architecture | None, sizes: Mapping[str, int]) -> CLIP:
    """Weights alone: the architecture is asked for, recorded beside them, or OpenAI's by its marks."""
    if (path.parent / "model.json").is_file():
        return open_source(str(path.parent), name=name, **sizes)
    if (path.parent / "open_clip_config.json").is_file() and path.name in _OPEN_CLIP_WEIGHTS:
        return _open_clip_folder(path.parent, wanted, sizes)
    stored = read_weights(path)
    if any(key.startswith(("vision_model.", "text_model.")) for key in stored.tensors):
        raise CheckpointError(f"{path} has transformers' names: give the folder with its config.json")
    is_openai = all(mark in stored.tensors or mark in stored.notes for mark in _OPENAI_MARKS)
    recorded, label = None, name
    if is_openai:
        recorded = replace(_inferred(stored.tensors, path), quick_gelu=True)
        kind = "OpenAI's weights"
    else:
        recorded, params = _from_params(path)
        kind, label = "open_clip checkpoint", name or params
    _agree(wanted, recorded, {}, path)
    shape = recorded or wanted
    if shape is None:
        raise CheckpointError(
            f"{path}: nothing beside these weights tells their architecture, nor whether it has QuickGELU: "
            f"give its name{_suggestion(stored.tensors)}"
        )
    model = _built(shape, stored.tensors, path, sizes, name=label)
    model.origin = f"{kind} {path}{_told(stored)}"
    return model


def _told(stored: StoredWeights) -> str:
    told = [f"{key} {stored.notes[key]}" for key in ("epoch", "step") if key in stored.notes]
    return f" ({', '.join(told)})" if told else ""


def _from_params(path: Path) -> tuple[Architecture | None, str]:
    """The architecture that open_clip's trainer wrote to params.txt, beside the file or a folder above."""
    for folder in (path.parent, path.parent.parent):
        params = folder / "params.txt"
        if not params.is_file():
            continue
        lines = params.read_text(encoding="utf-8", errors="replace")[:_LARGEST_JSON].splitlines()
        values = dict(line.split(": ", 1) for line in lines if ": " in line)
        name = values.get("model", "")
        try:
            shape = from_open_clip(open_clip_config(name)) if name else None
        except KeyError:
            raise CheckpointError(f"{params}: model {name!r} is no architecture of open_clip") from None
        if shape is not None and values.get("force_quick_gelu") == "True":
            shape = replace(shape, quick_gelu=True)
        for key in ("force_image_size", "force_context_length"):
            if (size := values.get(key, "None")).isdecimal() and shape is not None:
                shape = shape.resized(**{key.removeprefix("force_"): int(size)})
        return shape, f"{OPEN_CLIP}{name}"
    return None, ""


def _agree(
    wanted: Architecture | None, found: Architecture | None, sizes: Mapping[str, int], origin: object
) -> None:
    """An architecture that was asked for must be the one that was found; a wrong activation is no detail."""
    if (
        wanted is None
        or found is None
        or wanted.resized(**sizes) == replace(found, small_data=wanted.small_data)
    ):
        return
    if replace(wanted, quick_gelu=found.quick_gelu) == found:
        activations = {True: "QuickGELU", False: "GELU"}
        raise CheckpointError(
            f"{origin}: the weights are for {activations[found.quick_gelu]}, the name given is for "
            f"{activations[wanted.quick_gelu]}"
        )
    raise CheckpointError(f"{origin}: the weights are of another architecture than the name given")


def _built(
    shape: Architecture,
    tensors: Mapping[str, Tensor],
    origin: Path,
    sizes: Mapping[str, int],
    *,
    name: str = "",
    preprocess: Mapping[str, Any] | None = None,
) -> CLIP:
    shape = shape.resized(**sizes)
    known = Preprocess(image_size=shape.vision.image_size).to_dict()
    given = {key: value for key, value in (preprocess or {}).items() if key in known and key != "image_size"}
    made = Preprocess.from_dict({**known, **given})
    if not name:
        plain = [key for key, own in ARCHITECTURES.items() if replace(own, small_data=False) == shape]
        name = plain[0] if plain else ""
    return from_open_clip_tensors(
        shape, tensors, origin=origin, name=name, preprocess=made, resample=any(sizes.values())
    )


def from_open_clip_tensors(
    shape: Architecture,
    tensors: Mapping[str, Tensor],
    *,
    origin: Path,
    name: str = "",
    preprocess: Preprocess | None = None,
    resample: bool = False,
) -> CLIP:
    """A model that holds a state dict of open_clip's; see ``with_weights``."""
    shape = replace(shape, logit_bias="logit_bias" in tensors)
    own = _own_names(tensors, shape)
    return with_weights(shape, own, origin=origin, name=name, preprocess=preprocess, resample=resample)


def _own_names(tensors: Mapping[str, Tensor], shape: Architecture) -> dict[str, Tensor]:
    """open_clip's names as ours: our own text tower lies at the top, another one under ``text.``."""
    flat = isinstance(shape.text, TextTower)
    top = ("positional_embedding", "text_projection", "token_embedding.", "transformer.", "ln_final.")
    own = {}
    for name, value in tensors.items():
        if name in _OPENAI_MARKS or name == "attn_mask" or name.startswith("text_decoder."):
            continue
        if name.endswith("embeddings.position_ids"):  # written by old versions of transformers
            continue
        if flat and name.startswith("text."):
            name = name.removeprefix("text.")
        elif not flat and name.startswith(top):
            name = "text." + name
        own[name] = (
            value.reshape(()) if name in ("logit_scale", "logit_bias") and value.numel() == 1 else value
        )
    return own


def _inferred(tensors: Mapping[str, Tensor], origin: object) -> Architecture:
    """The architecture of a plain ViT CLIP, or a ResNet one, from the shapes of its tensors.

    Heads are 64 wide, as in every published one of OpenAI's.
    """
    try:
        text_width = len(tensors["ln_final.weight"])
        text = TextTower(
            width=text_width,
            layers=_layers(tensors, "transformer.resblocks."),
            heads=max(1, text_width // 64),
            context_length=len(tensors["positional_embedding"]),
            vocab_size=len(tensors["token_embedding.weight"]),
        )
        embed_dim = tensors["text_projection"].shape[1]
        if "visual.conv1.weight" in tensors and "visual.proj" in tensors:
            width, _, patch, _ = tensors["visual.conv1.weight"].shape
            side = round((len(tensors["visual.positional_embedding"]) - 1) ** 0.5)
            layers = _layers(tensors, "visual.transformer.resblocks.")
            vision = VisionTower(
                image_size=patch * side,
                patch_size=patch,
                width=width,
                layers=layers,
                heads=max(1, width // 64),
            )
            return Architecture(embed_dim=embed_dim, vision=vision, text=text)
        blocks = [_layers(tensors, f"visual.layer{stage}.") for stage in (1, 2, 3, 4)]
        side = round((len(tensors["visual.attnpool.positional_embedding"]) - 1) ** 0.5)
        config = {"width": len(tensors["visual.layer1.0.conv1.weight"]), "layers": blocks, "patch_size": None}
        text_config = {
            key: getattr(text, key) for key in ("width", "layers", "heads", "context_length", "vocab_size")
        }
        return from_open_clip(
            {
                "embed_dim": embed_dim,
                "vision_cfg": {**config, "image_size": 32 * side},
                "text_cfg": text_config,
            }
        )
    except (KeyError, ValueError, IndexError, ConfigError) as error:
        raise CheckpointError(
            f"{origin}: these are not the weights of a ViT or ResNet CLIP ({error})"
        ) from error


def _layers(tensors: Mapping[str, Tensor], prefix: str) -> int:
    numbers = {name[len(prefix) :].split(".")[0] for name in tensors if name.startswith(prefix)}
    return len(numbers)


def _suggestion(tensors: Mapping[str, Tensor]) -> str:
    """The names of the architectures that these tensors fit."""
    try:
        found = _inferred(tensors, "")
    except CheckpointError:
        return ""
    names = [
        name
        for name, shape in ARCHITECTURES.items()
        if replace(shape, quick_gelu=False, small_data=False) == found
    ]
    return f", {' or '.join(map(repr, names))}" if names else ""


def _shape(config: Mapping[str, Any], origin: Path) -> Architecture:
    try:
        return from_open_clip(config)
    except ConfigError as error:
        raise CheckpointError(f"{origin}: {error}") from error


def _first(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder} has no weights: expected {' or '.join(names)}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise CheckpointError(f"{path} is too large for a configuration")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold an object")
    return value

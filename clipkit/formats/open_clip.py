"""Read the output of open_clip and OpenAI: state dicts, and the folders of open_clip's trainer.

LOGS/NAME/params.txt                  all settings, as "name: value"
LOGS/NAME/checkpoints/epoch_N.pt      state dict, optimizer and scaler after N epochs
LOGS/NAME/checkpoints/epoch_latest.pt the same for the latest epoch, with --save-most-recent

Weights often come without their architecture. The tensor shapes of a plain ViT or ResNet determine it, except for
the number of heads and the activation.
"""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipkit.errors import CheckpointError, ConfigError
from clipkit.files.hub import HUB, fetch_repository
from clipkit.files.open_clip import ENCODER, config_files, published_tags, published_weights
from clipkit.formats.checkpoint import read_json
from clipkit.formats.weights import read_weights
from clipkit.model.architectures import ARCHITECTURES, QUICKGELU, Architecture, TextTower, VisionTower
from clipkit.model.names import OPEN_CLIP, check_names, from_open_clip, open_clip_config
from clipkit.model.preprocess import Preprocess

# extra entries that occur only in OpenAI's state dicts
OPENAI_MARKS = ("input_resolution", "context_length", "vocab_size")
ASSUMED_PREPROCESS = "assuming CLIP's mean, std, bicubic interpolation and center crop"
_MAX_PARAMS = 2**20  # characters read from params.txt, which normally has about a hundred lines
_MAX_SHOWN = 4
_LOCAL = "local-dir:"  # open_clip's prefix of a folder in place of a name
_PREPROCESS = ("mean", "std", "interpolation", "resize_mode")


def convert_names(tensors: Mapping[str, Tensor], *, flat: bool, decoder: bool = False) -> dict[str, Tensor]:
    """Convert a state dict of open_clip or OpenAI to clipkit's names.

    Args:
        flat: whether the text tower is clipkit's transformer, whose names have no prefix; others start with
            ``text.``.
        decoder: whether to keep CoCa's decoder of captions.
    """
    top = ("positional_embedding", "text_projection", "token_embedding.", "transformer.", "ln_final.")
    converted = {}
    for name, value in tensors.items():
        if name in (*OPENAI_MARKS, "attn_mask") or (name.startswith("text_decoder.") and not decoder):
            continue
        if name.endswith("embeddings.position_ids"):  # written by old versions of transformers
            continue
        if flat:
            name = name.removeprefix("text.")
        elif name.startswith(top):
            name = "text." + name
        converted[name] = value.reshape(()) if name.startswith("logit_") and value.numel() == 1 else value
    for name in list(converted):
        # open_clip's frozen batch norms lack the count, which nothing reads
        if name.endswith(".running_var"):
            count = f"{name.removesuffix('running_var')}num_batches_tracked"
            converted.setdefault(count, torch.zeros((), dtype=torch.int64))
    return converted


def infer_architecture(tensors: Mapping[str, Tensor]) -> Architecture:
    """Infer the architecture of a plain ViT or ResNet CLIP from the shapes of its tensors.

    Assumes GELU and a head width of 64, as in all of OpenAI's models.
    """

    def count_layers(prefix: str) -> int:
        return len({name[len(prefix) :].split(".")[0] for name in tensors if name.startswith(prefix)})

    def side(positions: str) -> int:
        return math.isqrt(len(tensors[positions]) - 1)

    try:
        text_width = len(tensors["ln_final.weight"])
        text = TextTower(
            width=text_width,
            layers=count_layers("transformer.resblocks."),
            heads=max(1, text_width // 64),
            context_length=len(tensors["positional_embedding"]),
            vocab_size=len(tensors["token_embedding.weight"]),
            mlp_ratio=compute_mlp_ratio(len(tensors["transformer.resblocks.0.mlp.c_fc.weight"]), text_width),
        )
        embed_dim = tensors["text_projection"].shape[1]
        if "visual.layer1.0.conv1.weight" in tensors:
            resnet = {
                "image_size": 32 * side("visual.attnpool.positional_embedding"),
                "layers": [count_layers(f"visual.layer{stage}.") for stage in (1, 2, 3, 4)],
                "width": len(tensors["visual.layer1.0.conv1.weight"]),
                "patch_size": None,
            }
            return from_open_clip(
                {"embed_dim": embed_dim, "vision_cfg": resnet, "text_cfg": text.open_clip_config()}
            )
        width, _, patch, _ = tensors["visual.conv1.weight"].shape
        vision = VisionTower(
            image_size=patch * side("visual.positional_embedding"),
            patch_size=patch,
            width=len(tensors["visual.ln_pre.weight"]),
            layers=count_layers("visual.transformer.resblocks."),
            heads=max(1, width // 64),
            mlp_ratio=compute_mlp_ratio(
                len(tensors["visual.transformer.resblocks.0.mlp.c_fc.weight"]), width
            ),
        )
        return Architecture(embed_dim=embed_dim, vision=vision, text=text)
    except (LookupError, TypeError, ValueError, ArithmeticError, ConfigError) as error:
        raise CheckpointError(f"these are not the weights of a plain ViT or ResNet CLIP ({error})") from error


def compute_mlp_ratio(inner: int, width: int) -> float:
    """Return a ratio with ``int(ratio * width) == inner``; due to rounding, ``inner / width`` may be off by one."""
    ratio = inner / width
    return ratio if int(ratio * width) == inner else math.nextafter(ratio, math.inf)


def find_architectures(tensors: Mapping[str, Tensor]) -> list[str]:
    """List the plain ViT and ResNet architectures that match a state dict of open_clip.

    If none matches the image size and context length, list those that match in everything else.
    """

    def outline(shape: Architecture) -> tuple[Any, ...] | None:
        """Return the properties that tensor shapes determine; None for other kinds of towers."""
        vision, text = shape.vision.outline, shape.text.outline
        if vision is None or text is None:
            return None
        return (shape.embed_dim, shape.vision.image_size, vision, text)

    try:
        inferred = infer_architecture(convert_names(tensors, flat=True))
    except CheckpointError:
        return []
    candidates = dict(ARCHITECTURES)
    for name in sorted(config_files().keys() - candidates.keys()):
        config = open_clip_config(name)
        if config["embed_dim"] == inferred.embed_dim and not config["text_cfg"].get("hf_model_name"):
            candidates[OPEN_CLIP + name] = from_open_clip(config)
    inferred_outline = outline(inferred)
    sizes = {
        "image_size": inferred.vision.image_size, "context_length": inferred.text.context_length,
    }  # fmt: skip
    names = []
    for name, shape in candidates.items():
        with suppress(ConfigError):  # not a multiple of its patch size
            if outline(shape) is not None and outline(shape.replace_size(**sizes)) == inferred_outline:
                names.append(name)
    exact = [name for name in names if outline(candidates[name]) == inferred_outline]
    return (exact or names)[:_MAX_SHOWN]


def find_newest_epoch(folder: Path) -> Path | None:
    """Find the newest checkpoint in a training folder or its ``checkpoints`` folder; None if there is none."""
    for checkpoints in (folder / "checkpoints", folder):
        epochs: dict[int, Path] = {}
        for path in checkpoints.glob("epoch_*.pt"):
            match = re.fullmatch(r"epoch_(\d+)\.pt", path.name)
            if match:
                epochs[int(match[1])] = path
        latest = checkpoints / "epoch_latest.pt"
        if latest.is_file():
            epoch = read_weights(latest).notes.get("epoch", 0) if epochs else 0
            if not epochs or (isinstance(epoch, int) and epoch > max(epochs)):
                return latest
        if epochs:
            return epochs[max(epochs)]
    return None


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """Settings recorded in params.txt.

    Attributes:
        architecture: the architecture; None if the record does not determine it.
        lacking: why the architecture is unknown, for an error message.
        preprocess: preprocessing settings that differ from CLIP's; None if they are not recorded.
    """

    architecture: Architecture | None = None
    name: str = ""
    lacking: str = "no file next to these weights records their architecture and whether it uses QuickGELU"
    preprocess: Mapping[str, Any] | None = None


def read_training_record(file: Path) -> TrainingRecord:
    """Read params.txt in a checkpoint's folder or its parent."""
    paths = [folder / "params.txt" for folder in (file.parent, file.parent.parent)]
    params = next((path for path in paths if path.is_file()), None)
    if params is None:
        return TrainingRecord()
    with params.open(encoding="utf-8", errors="replace") as content:
        lines = content.read(_MAX_PARAMS).splitlines()
    values = {
        name: _parse_value(value) for name, value in (line.split(": ", 1) for line in lines if ": " in line)
    }
    name = str(values.get("model", ""))
    scheme = next((scheme for scheme in (HUB, _LOCAL) if name.startswith(scheme)), "")
    try:
        if scheme:
            folder = fetch_repository(name) if scheme == HUB else Path(name.removeprefix(_LOCAL))
            shape, preprocess = read_folder_config(folder)
            shape = replace(shape, text=shape.text.use_tokenizer(folder))
        else:
            name = OPEN_CLIP + name.replace("/", "-")  # as open_clip does
            check_names(name)
            shape = from_open_clip(open_clip_config(name))
    except (CheckpointError, ConfigError) as error:
        cause = str(error) if scheme else "which is unknown to open_clip"
        return TrainingRecord(lacking=f"{params} names the architecture {values.get('model')!r}, {cause}")
    tag = values.get("pretrained")  # the weights that training started from
    if not scheme:
        published = published_weights(name.removeprefix(OPEN_CLIP), tag) if isinstance(tag, str) else {}
        preprocess = {key: published.get(key) for key in _PREPROCESS}
    for key in _PREPROCESS:
        if values.get(f"image_{key}") is not None:
            preprocess[key] = values[f"image_{key}"]
    if values.get("force_quick_gelu") is True:
        shape = replace(shape, quick_gelu=True)
    elif tag == "openai" and not shape.quick_gelu:
        return TrainingRecord(
            preprocess=preprocess,
            lacking=f"{params}: training started from OpenAI's weights, which open_clip used with QuickGELU before "
            "version 3 and with GELU since",
        )
    try:
        for key in ("image_size", "context_length"):
            size = values.get(f"force_{key}")
            if isinstance(size, list) and size and all(side == size[0] for side in size):
                size = size[0]  # height and width
            if size is not None:
                shape = shape.replace_size(**{key: size})
    except ConfigError as error:
        raise CheckpointError(f"{params}: {error}") from error
    return TrainingRecord(architecture=shape, name="" if scheme else name, preprocess=preprocess)


def read_folder_config(folder: Path) -> tuple[Architecture, dict[str, Any]]:
    """Read the architecture and the preprocessing settings in open_clip_config.json."""
    file = folder / "open_clip_config.json"
    config = read_json(file)
    model_config = config.get("model_cfg")
    if not isinstance(model_config, dict):
        raise CheckpointError(f"{file} has no model_cfg")
    preprocess = config.get("preprocess_cfg") or {}
    if not isinstance(preprocess, dict):
        raise CheckpointError(f"{file}: preprocess_cfg is not an object")
    encoder = folder / ENCODER
    text = model_config.get("text_cfg")
    if isinstance(text, dict) and text.get("hf_model_name") and (encoder / "config.json").is_file():
        model_config = {**model_config, "text_cfg": {**text, "hf_model_name": str(encoder)}}
    return from_open_clip(model_config), preprocess


def find_common_preprocess(name: str) -> tuple[dict[str, Any], str]:
    """Return the preprocessing settings that all published weights of an architecture have.

    If they differ or there are none, the settings are CLIP's, and the second value says so; otherwise it is "".
    """
    registered = name.removeprefix(OPEN_CLIP)
    tags = published_tags(registered)
    if not tags:
        registered = registered.removesuffix(QUICKGELU)
        tags = published_tags(registered)
    clips = Preprocess(image_size=1)
    others = []
    settings: dict[str, Any] = {}
    kinds = set()
    for tag in tags:
        published = published_weights(registered, tag)
        settings = {key: published[key] for key in _PREPROCESS if published.get(key) is not None}
        preprocess = Preprocess.from_dict({"image_size": 1, **settings})
        kinds.add(preprocess)
        if preprocess != clips:
            others.append(tag)
    if len(kinds) == 1:
        return settings, ""
    if not tags:
        return {}, (
            f"{ASSUMED_PREPROCESS}, because there are no published weights of {registered}; a folder with "
            "open_clip_config.json can record others"
        )
    names = " or ".join(f"{OPEN_CLIP}{registered}/{tag}" for tag in others)
    return {}, (
        f"{ASSUMED_PREPROCESS}, as {len(tags) - len(others)} of {len(tags)} published weights of {registered} "
        f"have; for the others, give the name {names}"
    )


def _parse_value(text: str) -> Any:
    """Parse a value as printed by Python: None, a bool, a number, a list of numbers, or a string."""
    words = {"None": None, "True": True, "False": False}
    if text in words:
        return words[text]
    try:
        return json.loads(text.replace("(", "[").replace(")", "]"))
    except (ValueError, RecursionError):
        return text

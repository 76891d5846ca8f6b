"""Infer architectures from the shapes of tensors, and check stored configurations against them.

Weights often come without their architecture. The tensor shapes of a plain ViT or ResNet determine it, except for
the number of heads and the activation.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipkit.errors import CheckpointError, ConfigError
from clipkit.files.open_clip import config_files
from clipkit.formats.checkpoint import check_weights
from clipkit.model.architectures import ARCHITECTURES, Architecture, TextTower, VisionTower
from clipkit.model.clip import CLIP
from clipkit.model.names import OPEN_CLIP, from_open_clip, open_clip_config
from clipkit.model.resample import fit_positions

__all__ = ["OPENAI_MARKS", "check_claims", "fitting_names", "inferred", "mlp_ratio", "own_names"]

# extra entries of OpenAI's state dicts, which no other program writes
OPENAI_MARKS = ("input_resolution", "context_length", "vocab_size")
_MAX_LAYERS = 256
_MAX_POSITIONS = 2**26  # values in a table of positions, which some towers compute even on the meta device
_SHOWN = 4
# exceptions that libraries raise for invalid configurations
_REFUSALS = (
    ArithmeticError, AssertionError, AttributeError, ConfigError, ImportError, LookupError, MemoryError, OSError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


def own_names(tensors: Mapping[str, Tensor], *, flat: bool) -> dict[str, Tensor]:
    """Convert a state dict of open_clip or OpenAI to clipkit's names.

    Args:
        tensors: the state dict.
        flat: whether the text tower is clipkit's transformer, at the top level; others are prefixed ``text.``.
    """
    top = ("positional_embedding", "text_projection", "token_embedding.", "transformer.", "ln_final.")
    own = {}
    for name, value in tensors.items():
        if name in OPENAI_MARKS or name == "attn_mask" or name.startswith("text_decoder."):
            continue
        if name.endswith("embeddings.position_ids"):  # written by old versions of transformers
            continue
        if flat and name.startswith("text."):
            name = name.removeprefix("text.")
        elif not flat and name.startswith(top):
            name = "text." + name
        number = name in ("logit_scale", "logit_bias") and value.numel() == 1
        own[name] = value.reshape(()) if number else value
    return own


def inferred(tensors: Mapping[str, Tensor]) -> Architecture:
    """Infer the architecture of a plain ViT or ResNet CLIP from the shapes of its tensors.

    Assumes GELU, and heads of width 64 as in all of OpenAI's models.

    Raises:
        CheckpointError: the tensors are of neither kind.
    """
    try:
        text_width = len(tensors["ln_final.weight"])
        text = TextTower(
            width=text_width,
            layers=_layers(tensors, "transformer.resblocks."),
            heads=max(1, text_width // 64),
            context_length=len(tensors["positional_embedding"]),
            vocab_size=len(tensors["token_embedding.weight"]),
            mlp_ratio=mlp_ratio(len(tensors["transformer.resblocks.0.mlp.c_fc.weight"]), text_width),
        )
        embed_dim = tensors["text_projection"].shape[1]
        if "visual.layer1.0.conv1.weight" in tensors:
            return _inferred_resnet(tensors, embed_dim, text)
        width, _, patch, _ = tensors["visual.conv1.weight"].shape
        vision = VisionTower(
            image_size=patch * _side(tensors["visual.positional_embedding"]),
            patch_size=patch,
            width=len(tensors["visual.ln_pre.weight"]),
            layers=_layers(tensors, "visual.transformer.resblocks."),
            heads=max(1, width // 64),
            mlp_ratio=mlp_ratio(len(tensors["visual.transformer.resblocks.0.mlp.c_fc.weight"]), width),
        )
        return Architecture(embed_dim=embed_dim, vision=vision, text=text)
    except (LookupError, TypeError, ValueError, ArithmeticError, ConfigError) as error:
        raise CheckpointError(f"these are not the weights of a plain ViT or ResNet CLIP ({error})") from error


def _inferred_resnet(tensors: Mapping[str, Tensor], embed_dim: int, text: TextTower) -> Architecture:
    vision = {
        "image_size": 32 * _side(tensors["visual.attnpool.positional_embedding"]),
        "layers": [_layers(tensors, f"visual.layer{stage}.") for stage in (1, 2, 3, 4)],
        "width": len(tensors["visual.layer1.0.conv1.weight"]),
        "patch_size": None,
    }
    fields = ("width", "layers", "heads", "context_length", "vocab_size", "mlp_ratio")
    words = {name: getattr(text, name) for name in fields}
    return from_open_clip({"embed_dim": embed_dim, "vision_cfg": vision, "text_cfg": words})


def mlp_ratio(inner: int, width: int) -> float:
    """Return a ratio such that ``int(ratio * width) == inner``, which the rounded quotient may miss by one."""
    ratio = inner / width
    return ratio if int(ratio * width) == inner else math.nextafter(ratio, math.inf)


def _side(positions: Tensor) -> int:
    return math.isqrt(len(positions) - 1)


def _layers(tensors: Mapping[str, Tensor], prefix: str) -> int:
    return len({name[len(prefix) :].split(".")[0] for name in tensors if name.startswith(prefix)})


def fitting_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """List the plain ViT and ResNet architectures that match a state dict of open_clip.

    If none matches its image size and context length, list those that match otherwise.
    """
    try:
        found = inferred(own_names(tensors, flat=True))
    except CheckpointError:
        return []
    known = dict(ARCHITECTURES)
    for name in sorted(config_files().keys() - known.keys()):
        config = open_clip_config(name)
        if config["embed_dim"] == found.embed_dim and not config["text_cfg"].get("hf_model_name"):
            known[OPEN_CLIP + name] = from_open_clip(config)
    exact = [name for name, shape in known.items() if _outline(shape) == _outline(found)]
    sizes = {"image_size": found.vision.image_size, "context_length": found.text.context_length}
    names = exact or [
        name
        for name, shape in known.items()
        if _outline(shape) is not None and _outline(_resized(shape, sizes)) == _outline(found)
    ]
    return names[:_SHOWN]


def _resized(shape: Architecture, sizes: Mapping[str, int]) -> Architecture | None:
    try:
        return shape.resized(**sizes)
    except ConfigError:  # not a multiple of its patch size
        return None


def _outline(shape: Architecture | None) -> tuple[Any, ...] | None:
    """Return the part of an architecture that tensor shapes reveal; None if it is of another kind."""
    if shape is None or (text := shape.text.plain) is None or (seen := shape.vision.outline) is None:
        return None
    words = (text.width, text.layers, text.context_length, text.vocab_size, text.hidden)
    return (shape.embed_dim, shape.vision.image_size, seen, words)


def check_claims(
    shape: Architecture, tensors: dict[str, Tensor], *, origin: Path, resample: bool = False
) -> None:
    """Check weights against an architecture before another library allocates memory for it.

    Raises:
        CheckpointError: the weights do not match.
    """
    if shape.is_own:
        return  # checked by clipkit.formats.checkpoint
    try:
        for tower in (shape.vision, shape.text):
            _check_depth(getattr(tower, "config", {}))
        if (count := shape.vision.position_values) > _MAX_POSITIONS:
            raise ConfigError(f"image_size, patch_size and width give a table of {count} position values")
        with torch.device("meta"):
            model = CLIP(shape)
    except _REFUSALS as error:
        if isinstance(error, RuntimeError) and "meta" in str(error):
            return  # a tower that cannot be built on the meta device
        raise CheckpointError(f"{origin}: cannot build the configured tower: {error}") from error
    if resample:
        tensors = fit_positions(tensors, {name: value.shape for name, value in model.state_dict().items()})
    check_weights(model, tensors, origin=origin)


def _check_depth(value: object, name: str = "") -> None:
    """Limit the number of layers: modules take memory even on the meta device."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_depth(inner, str(key))
    elif "layers" in name:
        counts = value if isinstance(value, list | tuple) else [value]
        count = sum(count for count in counts if isinstance(count, int))
        if count > _MAX_LAYERS:
            raise ConfigError(f"{name} = {value} is more than {_MAX_LAYERS}")

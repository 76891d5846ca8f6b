"""What stored tensors tell about the model they are of, and what a stored configuration may claim about them.

Weights often come without a word about their architecture. The shapes of a plain ViT's or ResNet's tensors give
it away, but for the number of heads and the activation, which leave no trace.
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

# of OpenAI's state dicts; nobody else writes these beside the weights
OPENAI_MARKS = ("input_resolution", "context_length", "vocab_size")
_MOST_LAYERS = 256
_MOST_POSITIONS = (
    2**26
)  # numbers in a table of positions, which some towers compute before they hold anything
_NAMES_TOLD = 4
# what libraries were seen to raise on configurations that are none
_REFUSALS = (
    ArithmeticError, AssertionError, AttributeError, ConfigError, ImportError, LookupError, MemoryError, OSError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


def own_names(tensors: Mapping[str, Tensor], *, flat: bool) -> dict[str, Tensor]:
    """A state dict of open_clip's or OpenAI's with our names.

    Args:
        tensors: the state dict.
        flat: whether the text tower is our own transformer, which lies at the top; another lies under ``text.``.
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
    """The architecture of a plain ViT CLIP, or a ResNet one, from the shapes of its tensors, with GELU.

    Heads are taken to be 64 wide, as in every published one of OpenAI's.

    Raises:
        CheckpointError: it is of neither kind.
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
    """What gives the inner width again when multiplied by the width and cut; a quotient may be rounded down."""
    ratio = inner / width
    return ratio if int(ratio * width) == inner else math.nextafter(ratio, math.inf)


def _side(positions: Tensor) -> int:
    return math.isqrt(len(positions) - 1)


def _layers(tensors: Mapping[str, Tensor], prefix: str) -> int:
    return len({name[len(prefix) :].split(".")[0] for name in tensors if name.startswith(prefix)})


def fitting_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the plain ViT and ResNet architectures that a state dict of open_clip's fits.

    Where its number of image positions or its context length is nobody's, those that it fits but for these.
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
    return names[:_NAMES_TOLD]


def _resized(shape: Architecture, sizes: Mapping[str, int]) -> Architecture | None:
    try:
        return shape.resized(**sizes)
    except ConfigError:  # no multiple of its patches
        return None


def _outline(shape: Architecture | None) -> tuple[Any, ...] | None:
    """What of an architecture the shapes of its tensors show; None where it is of another kind."""
    if shape is None or (text := shape.text.plain) is None or (seen := shape.vision.outline) is None:
        return None
    words = (text.width, text.layers, text.context_length, text.vocab_size, text.hidden)
    return (shape.embed_dim, shape.vision.image_size, seen, words)


def check_claims(
    shape: Architecture, tensors: dict[str, Tensor], *, origin: Path, resample: bool = False
) -> None:
    """Refuse weights that do not fit an architecture before another library takes memory for what it claims.

    Raises:
        CheckpointError: says what does not fit.
    """
    if shape.is_own:
        return  # clipkit.formats.checkpoint does the same for these
    try:
        for tower in (shape.vision, shape.text):
            _check_depth(getattr(tower, "config", {}))
        if (count := shape.vision.position_values) > _MOST_POSITIONS:
            raise ConfigError(f"image_size, patch_size and width make a table of {count} positions")
        with torch.device("meta"):
            model = CLIP(shape)
    except _REFUSALS as error:
        if isinstance(error, RuntimeError) and "meta" in str(error):
            return  # a tower that cannot be made without its values
        raise CheckpointError(f"{origin}: no tower can be built as configured: {error}") from error
    if resample:
        tensors = fit_positions(tensors, {name: value.shape for name, value in model.state_dict().items()})
    check_weights(model, tensors, origin=origin)


def _check_depth(value: object, name: str = "") -> None:
    """Layers are objects, which take memory even without values."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_depth(inner, str(key))
    elif "layers" in name:
        counts = value if isinstance(value, list | tuple) else [value]
        count = sum(count for count in counts if isinstance(count, int))
        if count > _MOST_LAYERS:
            raise ConfigError(f"{name} = {value} is more than {_MOST_LAYERS}")

"""What a user of a model calls: load or create one, encode pictures and texts, classify.

Letters: N pictures or texts, C classes, O embedding dimension.
"""

import warnings
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clipkit.errors import CheckpointError, ConfigError
from clipkit.files.traits import Color, TraitCounts, color_of
from clipkit.model.clip import CLIP
from clipkit.model.preprocess import ImageLike, pixels_and_traits
from clipkit.model.zero_shot import (
    DEFAULT_TEMPLATES,
    check_batch_size,
    encode_prompts,
    evaluating,
    list_of_strings,
    zero_shot_classifier,
)

__all__ = ["classify", "encode_image", "encode_text", "load"]

_SHOWN = 200  # characters of a path in a message


def load(
    source: str | PathLike[str],
    *,
    name: str = "",
    image_size: int = 0,
    context_length: int = 0,
    device: str | torch.device = "cpu",
    background: str | Color | None = None,
    upright: bool | None = None,
) -> CLIP:
    """A trained model, in float32 and evaluation mode; its ``origin`` says what was found.

    Args:
        source: a clipkit run or checkpoint; a weights file or training folder of open_clip, or OpenAI's weights;
            a folder of open_clip's or transformers' hub layout; ``open_clip:NAME/TAG`` or
            ``hf-hub:OWNER/REPOSITORY``.
        name: the architecture, for weights that are stored without it, such as "ViT-B-32-quickgelu".
        image_size: another side of the pictures, in pixels: the position embeddings are resampled. 0 keeps it.
        context_length: another longest text, in tokens, at least 2; 0 keeps it.
        device: where to put it, such as "cuda:1".
        background: color that transparent images are laid on, by name, as "#rrggbb" or as red, green and blue, each
            0–255; "none" drops their alpha channel, as open_clip does. None is what the model was trained with.
        upright: whether the EXIF orientation of images is applied, which open_clip does not do. None likewise.

    Raises:
        CheckpointError: nothing is there, it is damaged, would have to run code, or does not fit the name.
        ConfigError: the name is unknown, the network that a name needs is not there, a size or the device
            cannot be had, or ``background`` is no color.
        TypeError: an argument is of another kind.
    """
    from clipkit.formats.load import open_source

    for what, given, kinds in (("source", source, (str, PathLike)), ("name", name, (str,))):
        if not isinstance(given, kinds):
            wanted = "a string or a path" if PathLike in kinds else "a string"
            raise TypeError(f"{what} must be {wanted}, not {type(given).__name__}")
    if context_length == 1:
        raise ConfigError("context_length = 1 does not fit: at least 2, for the start and the end of a text")
    place = _device(device)
    if background is not None:
        color_of(background)  # fails before weights are read
    _check_path(str(source))
    model = open_source(str(source), name=name, image_size=image_size, context_length=context_length)
    model.preprocess = model.preprocess.with_decoding(background=background, upright=upright)
    return model.to(place)


def _device(device: str | torch.device) -> torch.device:
    """Known before weights are read.

    Raises:
        ConfigError: this machine has not such a device, or it holds no values.
    """
    try:
        place = torch.device(device)
        if place.type == "meta":
            raise ConfigError("device = 'meta' holds no values: give cpu, cuda or cuda:1")
        if place.type == "cuda" and (place.index or 0) >= (count := torch.cuda.device_count()):
            raise ConfigError(f"device = {str(device)!r}: this machine has {count} CUDA devices")
        torch.empty(0, device=place)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"device = {device!r} is none that this machine has: give cpu, cuda or cuda:1"
        ) from error
    return place


def _check_path(source: str) -> None:
    """See that a source can be asked for, whether or not something is there.

    Raises:
        CheckpointError: no file can have that name, or it may not be looked for.
    """
    shown = source if len(source) <= _SHOWN else source[:_SHOWN] + "…"
    if "\0" in source:
        raise CheckpointError(f"no model at {shown!r}: a path holds no NUL")
    try:
        Path(source).expanduser().exists()
    except RuntimeError as error:  # of a user that there is not
        raise CheckpointError(f"no model at {shown}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"no model at {shown}: {error.strerror}") from error


@torch.no_grad()  # not inference_mode: a probe may be trained on what comes out
def encode_image(images: ImageLike | Sequence[ImageLike], model: CLIP, *, batch_size: int = 64) -> Tensor:
    """Pictures → (N, O) float32 unit-norm features on the CPU.

    Args:
        images: one or many paths, encoded bytes, PIL images, uint8 arrays (H, W, 3) or tensors (3, H, W); a
            uint8 array or tensor of four dimensions is many.
        model: a CLIP.
        batch_size: pictures held decoded at a time.

    Warns:
        UserWarning: images are transparent or have an EXIF orientation, and the model's preprocessing has neither a
            background nor ``upright`` (see ``load``).

    Raises:
        DataError: a picture cannot be read or decoded.
        ConfigError: ``batch_size`` is no positive whole number.
        TypeError: ``model`` is none.
    """
    _check_model(model)
    check_batch_size(batch_size)
    many = _as_list(images)
    device = model.logit_scale.device
    parts = [torch.zeros(0, model.architecture.embed_dim)]
    counts = TraitCounts()
    with evaluating(model):
        for start in range(0, len(many), batch_size):
            read = [pixels_and_traits(one, model.preprocess) for one in many[start : start + batch_size]]
            counts.add(*(traits for _, traits in read))
            pixels = torch.stack([pixels for pixels, _ in read])
            parts.append(model.encode_image(pixels.to(device)).float().cpu())
    for line in counts.lines(
        model.preprocess.decoding,
        background="background='white' in clipkit.load",
        upright="upright=True in clipkit.load",
    ).values():
        warnings.warn(line, stacklevel=3)  # beyond no_grad's frame
    return torch.cat(parts)


def encode_text(texts: str | Sequence[str], model: CLIP, *, batch_size: int = 256) -> Tensor:
    """Texts → (N, O) float32 unit-norm features on the CPU.

    Raises:
        DataError: a text is no string, or too long.
        ConfigError: ``batch_size`` is no positive whole number.
        TypeError: ``model`` is none.
    """
    _check_model(model)
    many = [texts] if isinstance(texts, str) else list_of_strings(texts, "texts")
    return encode_prompts(model, many, batch_size=batch_size).cpu()


def classify(
    images: ImageLike | Sequence[ImageLike],
    class_names: Sequence[str],
    model: CLIP,
    *,
    templates: Sequence[str] = DEFAULT_TEMPLATES,
) -> Tensor:
    """Probabilities of classes by zero-shot: (N, C) float32, rows sum to 1, on the CPU.

    Args:
        images: as for ``encode_image``.
        class_names: C names.
        model: a CLIP.
        templates: prompts in which ``{c}`` (or ``{}``) stands for the class.
    """
    _check_model(model)
    weights = zero_shot_classifier(model, class_names, templates).cpu()  # (O, C)
    scale = model.logit_scale.detach().float().exp().cpu()
    return (scale * encode_image(images, model) @ weights).softmax(dim=-1)


def _check_model(model: object) -> None:
    """Arguments are easily swapped."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "tokenizer"):
        raise TypeError(f"model must be a CLIP, as clipkit.load gives it, not {type(model).__name__}")


def _as_list(images: ImageLike | Sequence[ImageLike]) -> Sequence[ImageLike]:
    if isinstance(images, np.ndarray | Tensor):
        return list(images) if images.ndim == 4 else [images]
    if isinstance(images, Sequence) and not isinstance(images, str | bytes | bytearray | memoryview):
        return images
    return [images]  # what it is not, eval_pixels says

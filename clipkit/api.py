"""The Python API: load a model, encode images and texts, classify, describe and explain images.

Letters: N images or texts, C classes, O embedding dimension, T prompts, g patches along a side.
"""

import warnings
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clipkit.distributed import select_device
from clipkit.errors import CheckpointError, ConfigError
from clipkit.model.attention import text_heatmaps
from clipkit.model.clip import CLIP
from clipkit.model.cpu import run_parallel
from clipkit.model.generate import check_generation, generate_captions
from clipkit.model.preprocess import ImageLike, pixels_and_traits
from clipkit.model.tokenizer import convert_strings
from clipkit.model.zero_shot import (
    DEFAULT_TEMPLATES,
    check_batch_size,
    encode_prompts,
    evaluation_mode,
    zero_shot_classifier,
)
from clipkit.samples.depth import PixelRange, parse_pixel_range
from clipkit.samples.traits import Color, TraitCounts, color_of

_SHOWN = 200  # characters of a path in a message


def load(
    source: str | PathLike[str],
    *,
    name: str = "",
    image_size: int = 0,
    image_tokens: int = 0,
    context_length: int = 0,
    dim: int = 0,
    device: str | torch.device = "cpu",
    background: str | Color | None = None,
    upright: bool | None = None,
    pixel_range: PixelRange | None = None,
) -> CLIP:
    """Load a model in float32 and evaluation mode; its ``origin`` describes the source.

    Args:
        source: a clipkit run or checkpoint; a weights file or training folder of open_clip, or OpenAI's weights;
            a folder in the hub layout of open_clip or transformers; ``open_clip:NAME/TAG`` or
            ``hf-hub:OWNER/REPOSITORY``.
        name: the architecture, for weights that are stored without it, such as "ViT-B-32-quickgelu". Images are
            preprocessed as by its published weights, or by those of a tag, ``open_clip:NAME/TAG``.
        image_size: side of the images in pixels, by default the stored one; position embeddings are resampled.
        image_tokens: most patches of an image, which keeps its aspect ratio and is not cropped (NaFlex), at most
            65,536; 0: the stored number, or square images. Other models than those with clipkit's ViT have only
            the latter.
        context_length: maximum length of texts in tokens, at least 2, by default the stored one.
        dim: size of the embeddings, at least 1: their first elements, scaled to unit norm; by default all. For
            models that were trained with ``loss.dims``.
        device: "auto" for an accelerator (CUDA, MPS, XPU) if there is one, or a device such as "cuda:1".
        background: color behind transparent images: a name, "#rrggbb", or red, green and blue, each 0–255; "none"
            drops the alpha channel, as open_clip does. None: as in the model's training.
        upright: whether to apply the EXIF orientation of images, which open_clip ignores. None: as in the model's
            training.
        pixel_range: the values of deep grayscale images (16-bit, 32-bit or float) that become black and white:
            two numbers, or "dtype" for the full range of 16-bit integers. With "auto", such images raise an error,
            because their range is not known. None: as in the model's training.

    Warns:
        UserWarning: the preprocessing is not stored, the published weights of the architecture have several or
            there are none, and CLIP's is used; or ``context_length`` changes the features of all texts.

    Raises:
        CheckpointError: the source does not exist, is damaged, would require running code, or does not match the
            name.
        ConfigError: the name, device or color is unknown, a size or range is invalid, or there is no network.
        TypeError: an argument has the wrong type.
    """
    from clipkit.formats.load import open_source

    if not isinstance(source, str | PathLike):
        raise TypeError(f"source must be a string or a path, not {type(source).__name__}")
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, not {type(name).__name__}")
    if context_length == 1:
        raise ConfigError("context_length = 1 is invalid: expected at least 2, for the start and end tokens")
    target = _resolve_device(device)
    if background is not None:
        color_of(background)  # fails before weights are read
    if pixel_range is not None:
        parse_pixel_range(pixel_range)
    path = str(source)
    shortened = path if len(path) <= _SHOWN else path[:_SHOWN] + "…"
    if "\0" in path:
        raise CheckpointError(f"no model at {shortened!r}: a path cannot contain NUL")
    try:
        Path(path).expanduser().exists()
    except (RuntimeError, OSError) as error:  # an unknown user, or a path that is too long
        cause = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"no model at {shortened}: {cause}") from error
    model = open_source(
        path, name=name, image_size=image_size, image_tokens=image_tokens, context_length=context_length
    )
    model.preprocess = model.preprocess.replace_decoding(
        background=background, upright=upright, pixel_range=pixel_range
    )
    if dim:
        if not 1 <= dim <= model.dim:
            raise ConfigError(
                f"dim = {dim} is invalid: expected 1 to {model.dim}, the model's embedding dimension"
            )
        if model.architecture.distilled and dim != model.dim:
            raise ConfigError(
                f"dim = {dim} is invalid: the embedding has a half for the class token and one for the "
                "distillation token"
            )
        model.dim = dim
    return model.to(target)


def _resolve_device(device: str | torch.device) -> torch.device:
    try:
        target = select_device() if device == "auto" else torch.device(device)
        if target.type == "meta":
            raise ConfigError("device = 'meta' stores no values: use cpu, cuda or cuda:1")
        count = torch.cuda.device_count()
        if target.type == "cuda" and (target.index or 0) >= count:
            raise ConfigError(f"device = {str(device)!r}: this machine has {count} CUDA devices")
        torch.empty(0, device=target)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"Unknown device {device!r}: use auto, cpu, cuda, cuda:1, mps or xpu") from error
    return target


@torch.no_grad()  # not inference_mode: the features may be used in training
def encode_image(images: ImageLike | Sequence[ImageLike], model: CLIP, *, batch_size: int = 64) -> Tensor:
    """Encode images: (N, O) float32 unit-norm features on the CPU.

    Args:
        images: one image or several: paths, encoded bytes, PIL images, uint8 arrays (H, W, 3) or tensors (3, H, W);
            a uint8 array or tensor of four dimensions is a batch. Arrays and tensors (H, W) may have other integer
            types or floats, like deep grayscale images (see ``pixel_range`` in ``load``).
        model: a CLIP.
        batch_size: number of images decoded at a time.

    Warns:
        UserWarning: images are transparent or have an EXIF orientation that the model's preprocessing ignores (see
            ``background`` and ``upright`` in ``load``), or have values outside the model's pixel range.

    Raises:
        DataError: an image cannot be read or decoded.
        ConfigError: ``batch_size`` is not a positive integer.
        TypeError: ``model`` is not a model.
    """
    _check_model(model)
    empty = torch.zeros(0, model.dim)
    with evaluation_mode(model):
        features = [*run_parallel(model, model.encode_image, _iterate_pixels(images, model, batch_size))]
        return torch.cat([empty, *(rows.float().cpu() for rows in features)])


@torch.no_grad()
def caption(
    images: ImageLike | Sequence[ImageLike],
    model: CLIP,
    *,
    beams: int = 1,
    top_p: float = 0.0,
    prefix: str = "",
    length: int = 0,
    seed: int = 0,
    batch_size: int = 64,
) -> list[str]:
    """Describe images with a model that was trained with ``caption.weight``: N captions.

    Args:
        images: as for ``encode_image``.
        model: a CLIP with a decoder of captions.
        beams: number of hypotheses of a beam search; 1: the most probable token at each step.
        top_p: samples each token among the most probable ones with this total probability, 0 to 1; 0: no samples.
        prefix: start of all captions, which is part of the result.
        length: maximum number of tokens, including the prefix and the end of text; 0: the model's maximum.
        seed: seed of the samples; the caption of an image depends on its place in ``images`` too.
        batch_size: number of images decoded and described at a time.

    Warns:
        UserWarning: see ``encode_image``.

    Raises:
        ConfigError: the model has no decoder, or a setting is out of range.
        DataError: an image cannot be read or decoded, or the prefix is too long.
        TypeError: ``model`` is not a model.
    """
    _check_model(model)
    check_generation(model, beams=beams, top_p=top_p, prefix=prefix, length=length)
    captions: list[str] = []
    for pixels in _iterate_pixels(images, model, batch_size):
        rows = range(len(captions), len(captions) + len(pixels))
        captions += generate_captions(
            model, pixels, beams=beams, top_p=top_p, prefix=prefix, length=length, seed=seed, rows=rows
        )
    return captions


def explain(
    images: ImageLike | Sequence[ImageLike], prompts: str | Sequence[str], model: CLIP, *, batch_size: int = 8
) -> Tensor:
    """Compute where in images prompts are: LeGrad (Bousselham et al. 2024, https://arxiv.org/abs/2404.03214).

    Args:
        images: as for ``encode_image``.
        prompts: T texts, or one.
        model: a CLIP with a ViT of clipkit, open_clip or timm.
        batch_size: number of images at a time; memory grows with it.

    Returns:
        (N, T, g, g) float32 on the CPU, a value for each patch of the image that the model gets, which may be
        cropped. Each map is scaled to 0 … 1: it says where a prompt would be, not whether the image shows it.

    Warns:
        UserWarning: see ``encode_image``.

    Raises:
        ConfigError: the image tower is no ViT.
        DataError: an image cannot be read or decoded, or a text cannot be encoded.
        TypeError: ``model`` is not a model.
    """
    texts = encode_text([prompts] if isinstance(prompts, str) else prompts, model)  # checks the model
    heatmaps = [torch.zeros(0, len(texts), 1, 1)]
    with evaluation_mode(model):
        for pixels in _iterate_pixels(images, model, batch_size):
            heat = text_heatmaps(model, pixels, torch.as_tensor(texts).to(pixels.device)).cpu()
            heat = heat - heat.amin(dim=(2, 3), keepdim=True)
            heatmaps.append(heat / heat.amax(dim=(2, 3), keepdim=True).clamp(min=1e-30))
    return torch.cat(heatmaps[1:] or heatmaps)


def _iterate_pixels(
    images: ImageLike | Sequence[ImageLike], model: CLIP, batch_size: int
) -> Iterator[Tensor]:
    """Yield batches (B, 3, S, S) uint8 on the model's device, then warn about what preprocessing ignored."""
    check_batch_size(batch_size)
    many: Sequence[ImageLike]
    if isinstance(images, np.ndarray | Tensor):
        many = list(images) if images.ndim == 4 else [images]
    elif isinstance(images, Sequence) and not isinstance(images, str | bytes | bytearray | memoryview):
        many = images
    else:
        many = [images]  # unknown types are reported when decoding
    counts = TraitCounts()
    for start in range(0, len(many), batch_size):
        batch = []
        for image in many[start : start + batch_size]:
            pixels, traits = pixels_and_traits(image, model.preprocess)
            batch.append(pixels)
            counts.add(traits)
        yield torch.stack(batch).to(model.logit_scale.device)
    for line in counts.lines(
        model.preprocess.decoding,
        background="background='white' in clipkit.load",
        upright="upright=True in clipkit.load",
    ).values():
        warnings.warn(line, stacklevel=5)  # skips the frames of the caller and of no_grad


def encode_text(texts: str | Sequence[str], model: CLIP, *, batch_size: int = 256) -> Tensor:
    """Encode texts: (N, O) float32 unit-norm features on the CPU.

    Raises:
        DataError: a text is not a string, or too long.
        ConfigError: ``batch_size`` is not a positive integer.
        TypeError: ``model`` is not a model.
    """
    _check_model(model)
    many = [texts] if isinstance(texts, str) else convert_strings(texts, "texts")
    return encode_prompts(model, many, batch_size=batch_size).cpu()


def classify(
    images: ImageLike | Sequence[ImageLike],
    class_names: Sequence[str],
    model: CLIP,
    *,
    templates: Sequence[str] = DEFAULT_TEMPLATES,
) -> Tensor:
    """Classify images zero-shot: (N, C) float32 probabilities, rows sum to 1, on the CPU.

    Args:
        images: as for ``encode_image``.
        class_names: C names.
        model: a CLIP.
        templates: prompts in which ``{c}`` (or ``{}``) is replaced by the class name.
    """
    _check_model(model)
    weights = zero_shot_classifier(model, class_names, templates).cpu()  # (O, C)
    scale = model.logit_scale.detach().float().exp().cpu()
    return (scale * encode_image(images, model) @ weights).softmax(dim=-1)


def _check_model(model: object) -> None:
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "tokenizer"):
        raise TypeError(f"model must be a CLIP, as returned by clipkit.load, not {type(model).__name__}")

"""Model FLOPs of CLIP by formula. Torch is imported only to count those of towers without a formula.

The convention is that of model FLOPs utilization (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311,
appendix B): only matrix products count, a multiply-add is two operations, the backward pass is twice the forward
pass; recomputation, padding, and tokens of the last block that are not read do not count. Attention counts the
full square of a caption's length although the mask hides half of it, as in PaLM's formula and torch's counter.
Images have no gradient, so the backward pass of the patch embedding counts once.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from clipkit.errors import ConfigError
from clipkit.model.architectures import Architecture, Flops, PixelTower

if TYPE_CHECKING:
    from torch import Tensor, nn

    from clipkit.model.clip import CLIP

__all__ = [
    "HEADS", "Flops", "caption_flops", "counted_flops", "image_flops", "loss_flops", "masked_flops", "pixel_flops",
    "step_flops",
    "text_flops", "trained_blocks", "view_flops",
]  # fmt: skip


_BEFORE_BLOCKS = (
    "conv1.", "class_embedding", "distillation_embedding", "positional_embedding", "ln_pre.", "token_embedding.",
)  # fmt: skip
# heads of local terms, which only training and captioning use: how the names of their parameters begin
HEADS = {"caption": "text_decoder.", "masked": "masked_head.", "image_gpt": "visual.proj_colors."}
_UNKNOWN = "the FLOPs by formula are known only for clipkit's own towers"


def image_flops(shape: Architecture, *, patches: int | None = None, blocks: int | None = None) -> Flops:
    """FLOPs of one image by the formula of its tower, see ``ImageArchitecture.flops``.

    Raises:
        ConfigError: there is no formula, see ``counted_flops``.
    """
    flops = shape.vision.flops(shape.embed_dim, patches=patches, blocks=blocks)
    if flops is None:
        raise ConfigError(_UNKNOWN)
    return flops


def text_flops(shape: Architecture, length: int, *, blocks: int | None = None) -> Flops:
    """FLOPs of one text of ``length`` tokens by the formula of its tower, see ``TextArchitecture.flops``.

    Raises:
        ConfigError: there is no formula, see ``counted_flops``.
    """
    flops = shape.text.flops(shape.embed_dim, length, blocks=blocks)
    if flops is None:
        raise ConfigError(_UNKNOWN)
    return flops


def caption_flops(shape: Architecture, length: int, *, patches: int | None = None) -> Flops:
    """FLOPs that predicting a caption of ``length`` tokens, including start and end, adds.

    These are the decoder's, and those of the towers' last blocks, which compute all tokens.
    """
    decoder, vision, text = shape.decoder, shape.vision.plain, shape.text.plain
    tokens = shape.vision.tokens(shape.embed_dim)
    assert decoder is not None and tokens is not None
    image_tokens, width = tokens if patches is None else (1 + patches, tokens[1])
    found = [decoder.flops(min(length - 1, decoder.context_length), image_tokens, width)]
    if vision is not None:
        found.append(vision.whole_flops(image_tokens))
    if decoder.feed == "text" and text is not None:
        found.append(text.whole_flops(length))
    if decoder.feed == "shared" and text is not None:
        length = min(length - 1, decoder.context_length)
        found += [text.flops(0, length), text.whole_flops(length)]
    return Flops(forward=sum(one.forward for one in found), backward=sum(one.backward for one in found))


def masked_flops(shape: Architecture, fraction: float, *, blocks: int | None = None) -> Flops:
    """FLOPs that predicting a fraction of an image's patches adds: a pass over all of them, and the head."""
    vision = shape.vision.plain
    assert vision is not None
    head = 2 * max(1, round(fraction * vision.patches)) * vision.width * shape.masked_outputs
    image, whole = image_flops(shape, blocks=blocks), vision.whole_flops(1 + vision.patches)
    return Flops(
        forward=image.forward + whole.forward + head, backward=image.backward + whole.backward + 2 * head
    )


def pixel_flops(shape: Architecture) -> Flops:
    """FLOPs that predicting the pixels of an image adds: the table of colors, and a pass if they are masked."""
    vision = shape.vision
    assert isinstance(vision, PixelTower)
    head, own = 2 * vision.image_size**2 * vision.width * vision.colors, image_flops(shape)
    alone = 0 if vision.causal else 1
    return Flops(forward=alone * own.forward + head, backward=alone * own.backward + 2 * head)


def view_flops(shape: Architecture, count: int, side: int, *, blocks: int | None = None) -> Flops:
    """FLOPs of ``count`` crops of an image, ``side`` pixels wide."""
    one = image_flops(shape.resized(image_size=side), blocks=blocks)
    return Flops(forward=count * one.forward, backward=count * one.backward)


def loss_flops(rows: int, columns: int, embed_dim: int) -> Flops:
    """FLOPs of a contrastive loss's logits, (rows, columns), which both directions of the softmax share."""
    forward = 2 * rows * columns * embed_dim
    return Flops(forward=forward, backward=2 * forward)


def step_flops(
    shape: Architecture,
    *,
    rows: int,
    lengths: Iterable[int] | Mapping[int, int],
    text_rows: int,
    patches: int | None = None,
    image_blocks: int | None = None,
    text_blocks: int | None = None,
    counted: Mapping[str, Flops] | None = None,
    loss_dims: Sequence[int] = (),
    masked: float = 0.0,
    pixels: bool = False,
    views: tuple[int, int] | None = None,
    averaged: bool = False,
    further: Iterable[int] = (),
) -> int:
    """FLOPs of one rank in a training step: both passes and the loss.

    Args:
        shape: the architecture.
        rows: number of images of this rank.
        lengths: lengths of this rank's captions in tokens, as a list or with counts.
        text_rows: number of text features with which the loss compares an image.
        patches: number of patches kept of each image; None for all.
        image_blocks: number of last blocks of the image tower that are trained, see ``trained_blocks``;
            ``text_blocks`` likewise.
        counted: FLOPs of towers without a formula, see ``counted_flops``.
        loss_dims: the setting ``loss.dims``.
        masked: fraction of the patches that are predicted, for an architecture with a head for this.
        pixels: whether pixels are predicted, see ``pixel_flops``.
        views: number of crops of each image and their side, which are compared with averaged weights.
        averaged: whether averaged weights encode the batch, as they always do for views and masked features.
        further: lengths of further texts, with ``data.negatives`` or ``data.caption_count``.

    Raises:
        ConfigError: a tower has no formula and is not in ``counted``.
    """
    image, text = ((counted or {}).get(name) for name in ("image", "text"))
    if image is None:
        image = image_flops(shape, patches=patches, blocks=image_blocks)
    step = rows * (image.forward if image_blocks == 0 else image.both)
    if shape.masked is not None:
        step += rows * masked_flops(shape, masked, blocks=image_blocks).both
    if pixels:
        step += rows * pixel_flops(shape).both
    averaged |= views is not None or shape.masked == "features"
    if averaged:
        step += rows * ((counted or {}).get("image") or image_flops(shape)).forward
    if views is not None:
        step += rows * view_flops(shape, *views, blocks=image_blocks).both
    if shape.decoder is not None:
        lengths = lengths if isinstance(lengths, Mapping) else Counter(lengths)
        for length, times in lengths.items():
            step += times * caption_flops(shape, length, patches=patches).both
    for length, times in (lengths if isinstance(lengths, Mapping) else Counter(lengths)).items():
        of_caption = text or text_flops(shape, length, blocks=text_blocks)
        step += times * (of_caption.forward if text_blocks == 0 else of_caption.both)
        step += times * averaged * of_caption.forward
    for length, times in Counter(further).items():
        of_caption = text or text_flops(shape, length, blocks=text_blocks)
        step += times * (of_caption.forward if text_blocks == 0 else of_caption.both)
    loss = loss_flops(rows, text_rows, shape.embed_dim + sum(loss_dims))
    return step + (loss.forward if image_blocks == text_blocks == 0 else loss.both)


def trained_blocks(model: "CLIP") -> tuple[int | None, int | None]:
    """Count the last blocks of the image tower and of the text tower that are trained.

    Returns:
        for each tower None if anything before its blocks is trained, and 0 if no block is. A frozen block above a
        trained one counts, as the gradient passes through it. A tower without ``block_count`` is trained as a whole
        or not at all.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    image = {name.removeprefix("visual.") for name in trained if name.startswith("visual.")}
    shape = model.architecture
    if model.text is None:
        text = {name for name in trained if not name.startswith(("visual.", "logit_", *HEADS.values()))}
    else:
        text = {name for name in trained if name.startswith("text.")}
    return _last_blocks(image, shape.vision.block_count), _last_blocks(text, shape.text.block_count)


def _last_blocks(trained: set[str], layers: int) -> int | None:
    if not layers:
        return None if trained else 0
    if any(name.startswith(_BEFORE_BLOCKS) for name in trained):
        return None
    numbers = [int(name.split(".")[2]) for name in trained if name.startswith("transformer.resblocks.")]
    return layers - min(numbers, default=layers)


def counted_flops(model: "CLIP") -> dict[str, Flops] | None:
    """Count FLOPs of one image and one caption in towers without a formula, for ``step_flops``.

    Torch counts them while the tower runs on the meta device, which costs neither time nor memory. A caption counts
    at the full context length, as these towers compute the padding too.

    Returns:
        by "image" and "text", without towers that have a formula; None if a tower cannot run on the meta device.
    """
    import torch

    shape, found = model.architecture, {}
    size, length = shape.vision.image_size, shape.text.context_length
    try:
        if shape.vision.flops(shape.embed_dim) is None:
            found["image"] = _counted(
                model.visual, torch.empty(1, shape.vision.channels, size, size, device="meta")
            )
        if model.text is not None and shape.text.flops(shape.embed_dim, length) is None:
            tokens = torch.ones(1, length, dtype=torch.int64, device="meta")
            found["text"] = _counted(model.text, tokens)
    except (RuntimeError, TypeError, ValueError):  # it reads values, or creates tensors on another device
        return None
    return found


def _counted(tower: "nn.Module", given: "Tensor") -> Flops:
    import torch
    from torch.func import functional_call
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    shadows: dict[str, Tensor] = {}
    for name, value in (*tower.named_parameters(), *tower.named_buffers()):
        needs = isinstance(value, torch.nn.Parameter)
        shadows[name] = torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=needs)
    # plain attention, as fused kernels recompute a part in the backward pass
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        with FlopCounterMode(display=False) as forward:
            features = functional_call(tower, shadows, (given,))
        with FlopCounterMode(display=False) as backward:
            torch.autograd.backward(features.sum())
    return Flops(forward=forward.get_total_flops(), backward=backward.get_total_flops())

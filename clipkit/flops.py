"""How many floating-point operations a step of CLIP needs, by formula. Torch loads only where it must count.

Counted is what the mathematics needs, in the convention of model FLOPs utilization (Chowdhery et al. 2022,
https://arxiv.org/abs/2204.02311, appendix B): matrix products alone, two operations for a multiplication with its
addition, the backward pass twice the forward one, and nothing for what is computed again to save memory. So
padding, other tokens in a last block of which one is read, and recomputation make a program slower, not more useful.

Two points where readers of that convention differ:

* Attention counts the whole square of a caption's length although the mask hides half of it, as PaLM's own formula
  does and torch's counter too, so that figures can be compared. Of ViT-B/32's text tower that half is 1.2% at 77
  tokens and 0.3% at 16.
* The gradient at the pictures themselves is wanted by nobody: the backward pass of the patch embedding is as large
  as its forward pass, not twice.

Letters: L tokens, D width, H width inside a block's MLP, O embedding dimension, N rows of the global batch.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipkit.architectures import Architecture, BagOfWords, TextTower, VisionTower
from clipkit.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from clipkit.model import CLIP

__all__ = ["Flops", "counted_flops", "image_flops", "loss_flops", "patches_of", "step_flops", "text_flops"]


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Operations of one sample, or of one loss."""

    forward: int
    backward: int

    def of(self, *, trained: bool) -> int:
        """Of both passes; a frozen tower has only the first one."""
        return self.forward + (self.backward if trained else 0)


def patches_of(vision: VisionTower) -> int:
    """How many patches a picture has."""
    return (vision.image_size // vision.patch_size) ** 2


def image_flops(shape: Architecture, *, patches: int | None = None) -> Flops:
    """One picture through the image tower.

    Args:
        shape: an architecture whose image tower is the plain ViT.
        patches: how many are kept by patch dropout; None is all of them.

    Raises:
        ConfigError: another library builds the tower, see ``counted_flops``.
    """
    vision = shape.vision
    if not isinstance(vision, VisionTower):
        raise ConfigError("FLOPs by formula are known for clipkit's own towers alone")
    kept = patches_of(vision) if patches is None else patches
    embedding = 2 * kept * 3 * vision.patch_size**2 * vision.width
    rest = _transformer(vision, kept + 1) + 2 * vision.width * shape.embed_dim
    return Flops(forward=embedding + rest, backward=embedding + 2 * rest)


def text_flops(shape: Architecture, length: int) -> Flops:
    """One caption of ``length`` tokens, start and end included, through the text tower.

    Raises:
        ConfigError: another library builds the tower, see ``counted_flops``.
    """
    text = shape.text
    if not isinstance(text, TextTower | BagOfWords):
        raise ConfigError("FLOPs by formula are known for clipkit's own towers alone")
    forward = 2 * text.width * shape.embed_dim
    if isinstance(text, TextTower):
        forward += _transformer(text, length)
    return Flops(forward=forward, backward=2 * forward)


def loss_flops(rows: int, columns: int, embed_dim: int) -> Flops:
    """A contrastive loss's logits, (rows, columns), once: both directions of softmax read the same ones."""
    forward = 2 * rows * columns * embed_dim
    return Flops(forward=forward, backward=2 * forward)


def step_flops(
    shape: Architecture,
    *,
    rows: int,
    lengths: Iterable[int] | Mapping[int, int],
    global_rows: int,
    patches: int | None = None,
    train_image: bool = True,
    train_text: bool = True,
    counted: Mapping[str, Flops] | None = None,
) -> int:
    """One rank's share of a training step, both passes and the loss.

    Args:
        shape: the architecture.
        rows: pictures of this rank.
        lengths: of this rank's captions in tokens, each one, or how often each occurs.
        global_rows: pairs of all ranks.
        patches: kept of each picture; None is all.
        train_image: False for a frozen image tower; ``train_text`` likewise.
        counted: of the towers that other libraries build, see ``counted_flops``.

    Raises:
        ConfigError: another library builds a tower, and ``counted`` does not have it.
    """
    known = counted or {}
    image = known.get("image") or image_flops(shape, patches=patches)
    step = rows * image.of(trained=train_image)
    for length, times in (lengths if isinstance(lengths, Mapping) else Counter(lengths)).items():
        text = known.get("text") or text_flops(shape, length)
        step += times * text.of(trained=train_text)
    loss = loss_flops(rows, global_rows, shape.embed_dim)
    return step + loss.of(trained=train_image or train_text)


def _transformer(tower: VisionTower | TextTower, length: int) -> int:
    """The forward pass of a stack of blocks over L tokens, one of which is read at the end."""
    width, hidden = tower.width, int(tower.mlp_ratio * tower.width)
    body = length * (8 * width**2 + 4 * width * hidden) + 4 * length**2 * width
    # keys and values of all tokens; the query, the sum over values, the output and the MLP of one
    last = 4 * length * width**2 + 4 * width**2 + 4 * width * hidden + 4 * length * width
    return (tower.layers - 1) * body + last


def counted_flops(model: "CLIP") -> dict[str, Flops] | None:
    """Of one picture and one caption, in the towers that other libraries build, for ``step_flops``.

    Counted once by torch while a tower runs on tensors without values, so that neither time nor memory goes to it.
    A caption counts at the whole context length: those towers compute the padding, too.

    Returns:
        by "image" and "text", empty for clipkit's own towers; None where a tower cannot run without values, so that
        no figure is shown rather than a wrong one.
    """
    import torch

    shape, found = model.architecture, {}
    size, length = shape.vision.image_size, shape.text.context_length
    try:
        if not isinstance(shape.vision, VisionTower):
            found["image"] = _counted(model.visual, torch.empty(1, 3, size, size, device="meta"))
        if model.text is not None and not isinstance(shape.text, BagOfWords):
            tokens = torch.ones(1, length, dtype=torch.int64, device="meta")
            found["text"] = _counted(model.text, tokens)
    except (RuntimeError, TypeError, ValueError):  # it looks at values, or makes tensors on another device
        return None
    return found


def _counted(tower: "nn.Module", given: "Tensor") -> Flops:
    import torch
    from torch.func import functional_call
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    shadows: dict[str, Tensor] = {}
    for name, value in tower.named_parameters():
        shadows[name] = torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=True)
    for name, value in tower.named_buffers():
        shadows[name] = torch.empty_like(value, device="meta")
    # the plain formula of attention: fused kernels compute a part again in the backward pass
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        with FlopCounterMode(display=False) as forward:
            features = functional_call(tower, shadows, (given,))
        with FlopCounterMode(display=False) as backward:
            torch.autograd.backward(features.sum())
    return Flops(forward=forward.get_total_flops(), backward=backward.get_total_flops())

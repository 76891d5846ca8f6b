"""Attention maps, heatmaps of texts, and intermediate representations, for ViTs of clipkit, open_clip and timm.

Towers call torch's ``scaled_dot_product_attention``, which does not return its weights. It is temporarily replaced
by its formula, so that no tower needs code of its own.

Letters in shape comments: B images, T texts, H heads, N tokens of an image, g patches along a side, S image side,
W width of the image tower, O embedding dimension.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipkit.errors import ConfigError
from clipkit.model import towers
from clipkit.model.clip import CLIP

_attention_lock = threading.Lock()  # held while torch's function is replaced, in all threads
_projection_lock = threading.Lock()  # held while the projection of a tower of open_clip is removed


def attention_blocks(model: CLIP) -> list[nn.Module]:
    """Return the blocks of a ViT in order: the longest list of modules of one class that have an ``attn``."""
    if model.architecture.vision.budget is not None:
        raise ConfigError(
            f"{model.name or 'the model'} reads images of variable size, for which there are no attention maps"
        )
    blocks: list[nn.Module] = []
    for modules in model.visual.modules():
        if not isinstance(modules, nn.ModuleList | nn.Sequential) or len(modules) <= len(blocks):
            continue
        have_attention = all(isinstance(getattr(module, "attn", None), nn.Module) for module in modules)
        if have_attention and len(set(map(type, modules))) == 1:
            blocks = list(modules)
    if not blocks:
        if next(model.visual.parameters(), None) is None:
            raise ConfigError(
                "an ONNX or OpenVINO export cannot be explained: use the model it was made from"
            )
        raise ConfigError(
            f"{model.name or 'the model'} has no ViT as its image tower, so there are no attention maps"
        )
    return blocks


def patch_grid(tokens: int) -> tuple[int, int]:
    """Return the number of patches along a side, and of tokens before them, such as the class token."""
    side = math.isqrt(tokens)
    return side, tokens - side**2


def reads_class_token(model: CLIP) -> bool:
    """Return whether a ViT's features are those of its class token, rather than pooled from its patches."""
    visual: Any = model.visual
    if getattr(visual, "attn_pool", None) is not None:  # of clipkit and open_clip
        return False
    trunk = getattr(visual, "trunk", visual)  # of timm
    pool = getattr(trunk, "global_pool", getattr(trunk, "pool_type", "token"))
    return pool in ("token", "tok")


@contextmanager
def watch_attention(model: CLIP, use: Callable[[int, Tensor], Tensor | None]) -> Iterator[None]:
    """Call ``use`` with the attention weights of each block while this thread runs the image tower.

    Args:
        model: see ``attention_blocks``. The last block of clipkit's own tower computes a single token, except with
            ``encode_all_tokens``.
        use: a function of the number of the block and its weights (B, H, N, N), after the softmax; if it returns
            weights, these are used instead.
    """
    blocks = attention_blocks(model)
    thread = threading.get_ident()
    running: int | None = None  # the block

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if running is None or threading.get_ident() != thread or is_causal or dropout_p or enable_gqa:
            return plain(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        weights = towers.attention_weights(q, k, mask=attn_mask, scale=scale)
        replacement = use(running, weights)
        return (weights if replacement is None else replacement) @ v

    with ExitStack() as after:
        after.enter_context(_attention_lock)
        plain: Callable[..., Tensor] = F.scaled_dot_product_attention
        fast = torch.backends.mha.get_fastpath_enabled()
        after.callback(setattr, F, "scaled_dot_product_attention", plain)
        after.callback(torch.backends.mha.set_fastpath_enabled, fast)
        setattr(F, "scaled_dot_product_attention", attend)  # noqa: B010
        after.enter_context(towers.fused_attention())  # so that clipkit's towers call torch's function too
        torch.backends.mha.set_fastpath_enabled(False)  # of nn.MultiheadAttention, which calls no function
        for i, block in enumerate(blocks):

            def enter_block(*_: object, i: int = i) -> None:
                nonlocal running
                running = i

            def leave_block(*_: object) -> None:
                nonlocal running
                running = None

            after.callback(block.register_forward_pre_hook(enter_block).remove)
            after.callback(block.register_forward_hook(leave_block).remove)
        yield


def text_heatmaps(model: CLIP, images: Tensor, texts: Tensor) -> Tensor:
    """Compute heatmaps of texts in images by LeGrad (Bousselham et al. 2024, https://arxiv.org/abs/2404.03214).

    The tokens after each block are read as if it were the last one. The positive part of the gradient of their
    similarity to the text with respect to the block's attention is averaged over heads, and summed over queries and
    blocks.

    Args:
        model: see ``attention_blocks``; used in evaluation mode, and its parameters get no gradient.
        images: (B, 3, S, S) as for ``encode_image``.
        texts: (T, O) float32, unit norm; (B, T, O) if each image has its own.

    Returns:
        (B, T, g, g) float32, at least 0, without an upper bound.
    """
    blocks = attention_blocks(model)
    weights: list[Tensor] = []

    def keep_weights(_: int, attention: Tensor) -> Tensor:
        weights[:] = [attention.detach().requires_grad_()]
        return weights[0]

    total: Tensor | None = None
    with _lock_parameters(model):
        for block, (arguments, options) in zip(blocks, _record_inputs(model, blocks, images), strict=True):
            with torch.enable_grad():
                with watch_attention(model, keep_weights):
                    tokens = block(*arguments, **options)
                if not weights or weights[0].shape[0] != len(images) or weights[0].shape[-2] < 2:
                    raise ConfigError(
                        f"{model.name or 'the model'} does not attend to all patches at once: no heatmaps"
                    )
                with _replace_last_tokens(blocks, tokens):
                    features = F.normalize(encode_all_tokens(model, images), dim=-1)  # (B, O)
                by_image = texts.to(features.dtype).expand(len(images), -1, -1)  # (B, T, O)
                scores = torch.einsum("bo,bto->t", features, by_image)
                gradients = [torch.autograd.grad(score, weights, retain_graph=True)[0] for score in scores]
            positive = [gradient.clamp_(min=0).mean(dim=1).sum(dim=1) for gradient in gradients]
            heat = torch.stack(positive, dim=1).float()  # (B, T, N)
            if heat.shape[0] != len(images):
                raise ConfigError(f"{model.name or 'the model'} attends within windows: no heatmaps")
            total = heat if total is None else total + heat
    assert total is not None
    side, before = patch_grid(total.shape[-1])
    grid: Tensor = total[..., before:].unflatten(-1, (side, side))
    return grid


@contextmanager
def _lock_parameters(model: CLIP) -> Iterator[None]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@torch.no_grad()
def _record_inputs(model: CLIP, blocks: list[nn.Module], images: Tensor) -> list[tuple[Any, Any]]:
    inputs: list[tuple[Any, Any]] = []
    with ExitStack() as after:
        for block in blocks:
            hook = block.register_forward_pre_hook(
                lambda _, arguments, options: inputs.append((arguments, options)), with_kwargs=True
            )
            after.callback(hook.remove)
        encode_all_tokens(model, images)
    return inputs


def encode_all_tokens(model: CLIP, images: Tensor) -> Tensor:
    """Encode images (B, 3, S, S) as ``CLIP.encode_image`` does, computing all tokens in the last block too."""
    if model.architecture.vision.patches is not None:
        return model.image_tokens(images)[0]
    return model.encode_image(images)


@contextmanager
def _replace_last_tokens(blocks: list[nn.Module], tokens: Tensor) -> Iterator[None]:
    """Replace the tokens after the last block, and compute no block."""
    forwards = [block.forward for block in blocks]
    for block in blocks[:-1]:
        block.forward = lambda x, *_, **__: x
    blocks[-1].forward = lambda *_, **__: tokens
    try:
        yield
    finally:
        for block, forward in zip(blocks, forwards, strict=True):
            block.forward = forward


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageRepresentations:
    """Representations of B images.

    Attributes:
        projected: (B, O) float32, unit norm, as from ``encode_image``.
        before_projection: (B, W) float32, input of the last linear layer, not normalized.
        layers: (B, W) float32, by the block's number from 1: the class token after the block, or the mean of the
            patch tokens if the features do not come from a class token.
    """

    projected: Tensor
    before_projection: Tensor
    layers: Mapping[int, Tensor]


def layer_count(model: CLIP) -> int:
    """Return the number of blocks of an image tower that is a transformer; 0 for others."""
    try:
        return len(attention_blocks(model))
    except ConfigError:
        return 0


def image_representations(model: CLIP, images: Tensor, *, layers: Sequence[int] = ()) -> ImageRepresentations:
    """Encode images and keep intermediate representations, in one pass.

    If pooling and projection are one (a ResNet's attention pooling), ``before_projection`` is the features before
    normalization, as in the CLIP paper.

    Args:
        layers: numbers of blocks, from 1 to ``layer_count(model)``.
    """
    count = layer_count(model)
    for layer in layers:
        if not 1 <= layer <= count:
            raise ConfigError(f"the image tower has no layer {layer}: expected 1 to {count}")
    outputs: dict[int, list[Tensor]] = {}
    with ExitStack() as hooks:
        for layer in layers:
            outputs[layer] = hooks.enter_context(_collect_outputs(attention_blocks(model)[layer - 1]))
        raw, pooled = _encode_with_pooled(model, images)
    by_layer = {layer: _pool_tokens(model, tensors[-1]).float() for layer, tensors in outputs.items()}
    before = raw if pooled is None else pooled.float()
    if any(out.shape != before.shape for out in by_layer.values()):
        raise ConfigError(
            "the image tower's blocks have another width than its output: they cannot be probed"
        )
    return ImageRepresentations(projected=F.normalize(raw, dim=-1), before_projection=before, layers=by_layer)


def _pool_tokens(model: CLIP, tokens: Tensor) -> Tensor:
    if tokens.dim() == 2:  # the last block of clipkit's own tower returns only the class token
        return tokens
    tokens = tokens.flatten(1, -2)  # windows keep the grid
    _, before = patch_grid(tokens.shape[1])
    if before and reads_class_token(model):
        return tokens[:, 0]
    return tokens[:, before:].mean(dim=1)


def _encode_with_pooled(model: CLIP, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return features before normalization (B, O), and before projection (B, W) or None."""
    visual: Any = model.visual
    if model.architecture.vision.projection_prefix:
        pooled = model.pool_images(images)
        return model.encode_image(pooled, normalize=False), pooled
    if model.architecture.vision.plain is not None:  # with a distillation token
        with _collect_outputs(visual.ln_post) as outs:
            raw = model.encode_image(images, normalize=False)
        return raw, _pool_tokens(model, outs[-1])
    with _projection_lock:  # another thread may have removed it
        proj = getattr(visual, "proj", None)
    if isinstance(proj, nn.Parameter):
        # open_clip's ViT pools inside its forward function: without a projection it returns the pooled features
        with _projection_lock:
            visual.proj = None
            try:
                pooled = model.encode_image(images, normalize=False)
            finally:
                visual.proj = proj
        return pooled @ proj.float(), pooled
    return model.encode_image(images, normalize=False), None


@contextmanager
def _collect_outputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the outputs of a module in this thread, as others may run the same model."""
    outs: list[Tensor] = []
    here = threading.get_ident()

    def hook(_: nn.Module, __: object, out: object) -> None:
        if isinstance(out, Tensor) and threading.get_ident() == here:
            outs.append(out)

    handle = module.register_forward_hook(hook)
    try:
        yield outs
    finally:
        handle.remove()

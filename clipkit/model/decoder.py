"""The decoder that predicts captions from an image's tokens, and the head that predicts their words.

As in CoCa (Yu et al. 2022, https://arxiv.org/abs/2205.01917) each layer is a block of causal self-attention and
one of cross-attention. Parameters have open_clip's names. Its input is the text tower's tokens (CoCa), or tokens
embedded by the decoder itself (Cap; Tschannen et al. 2023, https://arxiv.org/abs/2306.07915), which can also be
predicted in parallel: all inputs are [mask], without a causal mask (CapPa). Or it has only the cross-attention, and
the blocks of the text tower between it, in a second, causal pass (MaMMUT; Kuo et al. 2023,
https://arxiv.org/abs/2303.16839).

Letters in shape comments: B captions, L tokens of a caption, N predicted tokens of all captions, M tokens of an
image, D the decoder's width, V words of the vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from clipkit.model.architectures import Decoder
from clipkit.model.towers import (
    Attention,
    Mlp,
    Padded,
    Recompute,
    ResidualAttentionBlock,
    Rows,
    Transformer,
    at_least_float32,
    copy_to_device,
    initialize_block,
    reset_layers,
)

LOGITS = 1 << 24  # of the vocabulary in memory at a time
# tokens of images (B, M, D), or their keys and values (B, M, H, E)
ImageTokens = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class TextInput:
    """The input of a decoder without an embedding of its own.

    Attributes:
        x: (B, L, D), the text tower's tokens, or with ``stack`` its embedded tokens.
        stack: the blocks and the last norm of the text tower, for a decoder without blocks of its own.
    """

    x: Tensor
    stack: tuple[list[ResidualAttentionBlock], nn.Module] | None = None


class CrossAttentionBlock(nn.Module):
    """A pre-norm block whose tokens attend to those of an image; without an MLP if ``mlp_ratio`` is 0."""

    def __init__(self, width: int, heads: int, *, mlp_ratio: float, quick_gelu: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.ln_1_kv = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = None
        if mlp_ratio:
            self.ln_2 = nn.LayerNorm(width)
            self.mlp = Mlp(width, ratio=mlp_ratio, quick_gelu=quick_gelu)
        self.recompute: Recompute | None = None

    def forward(self, x: Tensor, image: ImageTokens) -> Tensor:
        """Compute tokens that attend to those of images: (B, L, D) → (B, L, D).

        With the ``keys_values`` of images, x may have several rows for each of them, in their order.
        """
        if self.recompute is not None and torch.is_grad_enabled():
            return self.recompute(CrossAttentionBlock.compute_block, self, x, image)
        return self.compute_block(x, image)

    def compute_block(self, x: Tensor, image: ImageTokens) -> Tensor:
        """Compute the block without recomputation."""
        k, v = self.keys_values(image) if isinstance(image, Tensor) else image
        queries = self.ln_1(x).reshape(len(k), -1, x.shape[-1])  # all rows of an image attend to it at once
        x = x + self.attn.attend_keys(k, v, queries, Padded()).view_as(x)
        return x if self.mlp is None else x + self.mlp(self.ln_2(x))

    def keys_values(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the keys and values of tokens (B, M, D): two of (B, M, H, E)."""
        return self.attn.keys_values(self.ln_1_kv(image))


class AttentionalPooler(nn.Module):
    """Learned queries that attend to an image's tokens: the decoder reads their outputs (CoCa)."""

    def __init__(self, queries: int, width: int, heads: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(queries, width))
        self.ln_q = nn.LayerNorm(width)
        self.ln_k = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln_post = nn.LayerNorm(width)

    def forward(self, image: Tensor) -> Tensor:
        """(B, M, D) → (B, queries, D)."""
        queries = self.ln_q(self.query.to(image.dtype)).expand(len(image), -1, -1)
        pooled: Tensor = self.ln_post(self.attn.attend_query(self.ln_k(image), queries, Padded()))
        return pooled

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw queries with std 1, and the other weights as in a block."""
        nn.init.normal_(self.query)
        initialize_block(self.attn, None, layers=1)


class CaptionDecoder(Transformer):
    """Predict captions, see the module's description.

    Args:
        image_width: width of the image's tokens; another one than the decoder's is mapped linearly.
    """

    def __init__(self, shape: Decoder, *, image_width: int, quick_gelu: bool) -> None:
        width = shape.width
        shared = shape.feed == "shared"
        layers = 0 if shared else shape.layers
        super().__init__(width, layers, shape.heads, mlp_ratio=shape.mlp_ratio, quick_gelu=quick_gelu)
        self.shape = shape
        ratio = 0 if shared else shape.mlp_ratio
        self.cross_attn = nn.ModuleList(
            CrossAttentionBlock(width, shape.heads, mlp_ratio=ratio, quick_gelu=quick_gelu)
            for _ in range(shape.layers)
        )
        self.ln_final = None if shared else nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.empty(width, shape.vocab_size))
        self.image_projection = None if image_width == width else nn.Linear(image_width, width)
        self.image_pool = AttentionalPooler(shape.queries, width, shape.heads) if shape.queries else None
        if shape.feed == "tokens":
            self.token_embedding = nn.Embedding(
                shape.vocab_size, width, _weight=torch.empty(shape.vocab_size, width)
            )
            self.positional_embedding = nn.Parameter(torch.empty(shape.context_length, width))
        if shape.parallel:
            self.mask_embedding = nn.Parameter(torch.empty(width))

    @property
    def cross_blocks(self) -> list[CrossAttentionBlock]:
        """The blocks of cross-attention in order."""
        return [block for block in self.cross_attn if isinstance(block, CrossAttentionBlock)]

    def compute_hidden(
        self, image: Tensor, x: Tensor, parallel: Tensor | None = None, text: TextInput | None = None
    ) -> Tensor:
        """Compute inputs (B, L, D) to (B, L, D), of which ``text_projection`` makes logits of the next token.

        Args:
            image: (B, M, W), the image's tokens.
            x: (B, L, D), embedded tokens, or the text tower's.
            parallel: (B,) bool, rows without a causal mask.
            text: see ``CLIP.decoder_input``.
        """
        length = x.shape[1]
        mask = None
        if parallel is not None:
            causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            mask = causal | parallel[:, None, None, None]  # (B, 1, L, L)
        rows = Padded(ends=torch.empty(0), mask=mask)
        return self.apply_blocks(x, repeat(rows), repeat(self.project_image(image)), text)

    def project_image(self, image: Tensor) -> Tensor:
        """Map the image's tokens to the decoder's width, and pool them: (B, M, W) → (B, M or queries, D)."""
        if self.image_projection is not None:
            image = self.image_projection(image)
        return image if self.image_pool is None else self.image_pool(image)

    def apply_blocks(
        self, x: Tensor, rows: Iterable[Rows], images: Iterable[ImageTokens], text: TextInput | None = None
    ) -> Tensor:
        """Apply all blocks, given the layout for each, and the image for each block of cross-attention."""
        blocks: list[ResidualAttentionBlock] = self.blocks
        norm: nn.Module | None = self.ln_final
        if text is not None and text.stack is not None:
            blocks, norm = text.stack
        assert norm is not None
        spacing = len(blocks) // len(self.cross_attn)
        cross_attention = zip(self.cross_attn, images, strict=False)
        for count, (block, layout) in enumerate(zip(blocks, rows, strict=False), 1):
            x = block(x, layout)
            if count % spacing == 0:
                cross_block, image = next(cross_attention)
                x = cross_block(x, image)
        out: Tensor = norm(x)
        return out

    def embed(self, tokens: Tensor, parallel: Tensor | None = None, *, first: int = 0) -> Tensor:
        """Embed tokens (B, L) int64, and [mask] in ``parallel`` rows (B,) bool, → (B, L, D).

        ``first`` is the position of the first token.
        """
        x: Tensor = self.token_embedding(tokens)
        if parallel is not None:
            x = torch.where(parallel[:, None, None], self.mask_embedding.to(x.dtype), x)
        return x + self.positional_embedding[first : first + tokens.shape[1]]

    def nll(
        self,
        image: Tensor,
        captions: Tensor,
        *,
        text: TextInput | None = None,
        lengths: Sequence[int] | None = None,
        parallel: Tensor | None = None,
    ) -> Tensor:
        """Sum −log p(token | previous tokens, image) over all tokens but the start: a scalar, at least float32.

        Args:
            image: (B, M, W), the image's tokens.
            captions: (B, L) int64; each row ends at its largest id.
            text: see ``CLIP.decoder_input``.
            lengths: B numbers of tokens, see ``CLIP.encode_text``.
            parallel: (B,) bool, rows that are predicted in parallel, for a decoder that can.
        """
        hidden, targets, _ = self._predict(image, captions, text, lengths, parallel)
        return caption_nll(hidden, self.text_projection, targets)

    @torch.no_grad()
    def nll_by_caption(
        self,
        image: Tensor,
        captions: Tensor,
        *,
        text: TextInput | None = None,
        lengths: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the sum of ``nll`` for each caption.

        Returns:
            (B,) at least float32, and (B,) int64, the number of predicted tokens of each caption.
        """
        hidden, targets, rows = self._predict(image, captions, text, lengths, None)
        hidden = at_least_float32(hidden)
        sums = hidden.new_zeros(len(captions))
        height = max(1, LOGITS // self.text_projection.shape[1])
        for start in range(0, len(hidden), height):
            tile = slice(start, start + height)
            logits = self.logits(hidden[tile])  # F.cross_entropy would round more
            losses = logits.logsumexp(dim=1) - logits.gather(1, targets[tile, None])[:, 0]
            sums.index_add_(0, rows[tile], losses)
        return sums, rows.bincount(minlength=len(captions))

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits of the next token: (…, D) → (…, V), at least float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = at_least_float32(hidden)
            return hidden @ self.text_projection.to(hidden.dtype)

    def _predict(
        self,
        image: Tensor,
        captions: Tensor,
        text: TextInput | None,
        lengths: Sequence[int] | None,
        parallel: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the N predictions of ``nll``: (N, D), their targets (N,) and captions (N,)."""
        shape = self.shape
        device = captions.device
        count = min(shape.context_length, captions.shape[1] - 1)
        targets = captions[:, 1 : count + 1]  # (B, L)
        if text is not None:
            x = text.x[:, :count]
        else:
            inputs = captions[:, :count]
            if shape.parallel:  # always as many, since parallel rows attend to all
                count = shape.context_length
                inputs = F.pad(inputs, (0, count - inputs.shape[1]))
                targets = F.pad(targets, (0, count - targets.shape[1]))
                if parallel is None:
                    parallel = torch.zeros(len(captions), dtype=torch.bool, device=device)
            x = self.embed(inputs, parallel)
        # on the host if lengths are given, to avoid a synchronization
        ends = captions.argmax(dim=-1).cpu().numpy() if lengths is None else np.array(lengths) - 1
        predicted = np.flatnonzero(np.arange(count) < ends[:, None])
        index = copy_to_device(torch.from_numpy(predicted), device)  # (N,)
        hidden = self.compute_hidden(image, x, parallel, text).flatten(0, 1)[index]  # (N, D)
        return hidden, targets.flatten()[index], index // count

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw weights as the text tower's; the vocabulary's projection with std D^-½, [mask] with std 0.02."""
        width = self.shape.width
        reset_layers(self)
        super().initialize()
        for block in self.cross_blocks:
            initialize_block(block.attn, block.mlp, layers=self.shape.layers)
        if self.image_pool is not None:
            self.image_pool.initialize()
        nn.init.normal_(self.text_projection, std=width**-0.5)
        if self.shape.feed == "tokens":
            nn.init.normal_(self.token_embedding.weight, std=0.02)
            nn.init.normal_(self.positional_embedding, std=0.01)
        if self.shape.parallel:
            nn.init.normal_(self.mask_embedding, std=0.02)


class CaptionWordHead(nn.Module):
    """Predict the words of captions from the features of images: a norm and a linear layer, as in SuperCLIP.

    The linear layer has no bias: that of the norm adds a logit of its own to each word.
    """

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Parameter(torch.empty(width, vocab_size))

    def sum_losses(self, features: Tensor, words: Tensor, weights: Tensor) -> Tensor:
        """Sum the cross-entropy of the softmax over the vocabulary: a scalar, at least float32.

        Args:
            features: (N, D).
            words: (N, K) int64, the target words of each image.
            weights: (N, K), the probability of each of them; 0 for rows without words.
        """
        return caption_nll(self.norm(features), self.projection, words, weights)

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw weights with std D^-½."""
        self.norm.reset_parameters()
        nn.init.normal_(self.projection, std=self.projection.shape[0] ** -0.5)


def caption_nll(
    hidden: Tensor, weight: Tensor, targets: Tensor, target_weights: Tensor | None = None
) -> Tensor:
    """Sum the cross-entropy of logits ``hidden @ weight``, of which only a tile is in memory at a time.

    The forward pass computes the gradients too, so logits are computed once.

    Args:
        hidden: (N, D).
        weight: (D, V).
        targets: (N,) int64, or (N, K) several for each row.
        target_weights: (N, K) probabilities of several targets; None: 1.

    Returns:
        a scalar in float32 (float64 for float64).
    """
    targets = targets.reshape(len(hidden), -1)
    if not torch.is_grad_enabled():  # a function without gradients would compute those of the weights
        hidden, weight = hidden.detach(), weight.detach()
    with torch.autocast(hidden.device.type, enabled=False):  # losses are computed in at least float32
        hidden, weight = at_least_float32(hidden), at_least_float32(weight)
        if target_weights is None:
            target_weights = torch.ones_like(targets, dtype=hidden.dtype)
        total: Tensor = _TiledCrossEntropy.apply(hidden, weight, targets, target_weights.to(hidden.dtype))
        return total


class _TiledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, targets: Tensor, target_weights: Tensor
    ) -> Tensor:
        needs_grad = ctx.needs_input_grad  # type: ignore[attr-defined]
        total = hidden.new_zeros(())
        grad_hidden = torch.empty_like(hidden) if needs_grad[0] else None
        grad_weight = torch.zeros_like(weight) if needs_grad[1] else None
        rows = max(1, LOGITS // weight.shape[1])
        for start in range(0, len(hidden), rows):
            part = hidden[start : start + rows]
            target = targets[start : start + rows]
            probability = target_weights[start : start + rows]
            logits = part @ weight  # (rows, V)
            level = logits.logsumexp(dim=1, keepdim=True)
            total += (probability * (level - logits.gather(1, target))).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            # softmax times the sum of the probabilities, which is 0 in rows without targets
            gradient = logits.sub_(level - probability.sum(dim=1, keepdim=True).log()).exp_()
            gradient.scatter_add_(1, target, -probability)
            if grad_hidden is not None:
                grad_hidden[start : start + rows] = gradient @ weight.T
            if grad_weight is not None:
                grad_weight += part.T @ gradient
        ctx.save_for_backward(grad_hidden, grad_weight)  # type: ignore[arg-type]  # torch allows None
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, scale: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        saved = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_hidden, grad_weight = [None if grad is None else grad * scale for grad in saved]
        return grad_hidden, grad_weight, None, None

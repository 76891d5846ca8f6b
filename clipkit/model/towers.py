"""The transformer of both towers, the ViT, and the other towers that are built by clipkit.

Letters in shape comments: B images or texts, L tokens of a row, T tokens of a packed batch, D width, H heads, E
width of a head, P patches, K of them that are kept, S image side in pixels, p patch side, g patches along a
side, O output dimension. Parameter names are those of OpenAI's CLIP and of open_clip, so that state dicts load
without renaming.
"""

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipkit.files.splitmix import MASK, STEP, mix, mix_tensor, to_signed
from clipkit.model.processor import uses_onednn_for_float32

# Layouts of a batch of tokens: padded rows, or texts packed into one row. Nothing after end of text reaches a
# text's features, so a packed batch contains each text up to there. All layers except attention work on single
# tokens. Attention over a packed row is torch's ``varlen_attn`` on CUDA in half precision, otherwise plain
# attention over all texts of one length at a time. Images of variable size are packed as texts are.


@dataclass(frozen=True, kw_only=True, eq=False)
class Padded:
    """Rows of equal length (B, L, …); one token of each is read at the end.

    Attributes:
        ends: (B,) int64, the token that is read, with causal attention; None reads the first, which attends to all.
        mask: bool, of the shape (B, 1, L, L) or one that broadcasts to it, the tokens that each token attends to,
            instead of all previous ones.
    """

    ends: Tensor | None = None
    mask: Tensor | None = None

    @classmethod
    def from_texts(cls, tokens: Tensor, *, causal: bool) -> "Padded":
        """Return the layout of texts (B, L), rows that end at their largest id."""
        ends = tokens.argmax(dim=-1)
        if causal:
            return cls(ends=ends)
        visible = torch.arange(tokens.shape[1], device=tokens.device) <= ends[:, None]  # (B, L)
        return cls(ends=ends, mask=visible[:, None, None])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with all tokens: (B, L, H, E) each → (B, L, H, E)."""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, L, E)
        causal = self.ends is not None and self.mask is None
        return attend(q, k, v, mask=self.mask, causal=causal).transpose(1, 2)

    def attend_readout(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with the tokens that are read: q (B, 1, H, E), k and v (B, L, H, E) → (B, 1, H, E)."""
        mask = None
        if self.ends is not None:
            visible = torch.arange(k.shape[1], device=k.device) <= self.ends[:, None]  # (B, L)
            mask = visible[:, None, None, :]  # (B, 1, 1, L)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return attend(q, k, v, mask=mask).transpose(1, 2)

    def select_readout(self, x: Tensor) -> Tensor:
        """Select the tokens that are read: (B, L, D) → (B, 1, D)."""
        if self.ends is None:
            return x[:, :1]
        return x.gather(1, self.ends[:, None, None].expand(-1, 1, x.shape[-1]))


@dataclass(frozen=True, kw_only=True, eq=False)
class Cached(Padded):
    """Rows with causal attention to which one block appends tokens, with the keys and values of earlier tokens.

    Attributes:
        keys_values: keys and values (B, T, H, E) of the tokens so far; empty before the first.
    """

    keys_values: list[Tensor] = field(default_factory=list)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append tokens (B, L, H, E) and attend with them → (B, L, H, E); L is 1 except in the first call."""
        if self.keys_values:
            assert q.shape[1] == 1, q.shape
            k = torch.cat([self.keys_values[0], k], dim=1)
            v = torch.cat([self.keys_values[1], v], dim=1)
        self.keys_values[:] = (k, v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, L or T, E)
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1).transpose(1, 2)

    def select(self, rows: Tensor) -> None:
        """Replace the rows by those with the numbers ``rows`` (B',), which may repeat."""
        self.keys_values[:] = [tensor[rows] for tensor in self.keys_values]


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """Concatenated texts (T, …), shortest first, each read at its last token.

    A filler, a copy of the first tokens of row 0, may be among them.

    Attributes:
        texts: (T,) int64, the text of each token in the packed batch.
        rows: (T,) int64, its row in the padded batch.
        positions: (T,) int64, its position in the row.
        starts: (B + 1,) int32, where each text begins, and the end of the last.
        order: (B,) int64, the row of each text of the packed batch; of a filler a further row.
        size: number of rows of the padded batch.
        counts: (texts, length) for each length that occurs, ascending.
    """

    texts: Tensor
    rows: Tensor
    positions: Tensor
    starts: Tensor
    order: Tensor
    size: int
    counts: tuple[tuple[int, int], ...]
    longest: int
    causal: bool
    attention: "AttentionFunction"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend within each text: (T, H, E) each → (T, H, E)."""
        return self.attention(q, k, v, self, ends_only=False)

    def attend_readout(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with the last tokens: q (B, H, E), k and v (T, H, E) → (B, H, E)."""
        return self.attention(q, k, v, self, ends_only=True)

    def select_readout(self, x: Tensor) -> Tensor:
        """Select the last token of each text: (T, D) → (B, D)."""
        return x[self.starts[1:].long() - 1]

    def unpack(self, tokens: Tensor, length: int) -> Tensor:
        """Lay out tokens (T, D) as in the padded batch, (B, L, D), with 0 behind the texts."""
        padded = tokens.new_zeros(len(self.order), length, tokens.shape[-1])
        return padded.index_put((self.order[self.texts], self.positions), tokens)[: self.size]

    def restore_order(self, features: Tensor) -> Tensor:
        """Sort features (B, O) of the packed batch into the order of the padded one."""
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(len(self.order), device=self.order.device)
        return features[inverse[: self.size]]


AttentionFunction: TypeAlias = Callable[..., Tensor]  # (q, k, v, packed, *, ends_only) → (T or B, H, E)


def pack(
    lengths: Sequence[int],
    *,
    longest: int,
    causal: bool = True,
    attention: AttentionFunction,
    device: torch.device,
    multiple: int = 1,
) -> Packed:
    """Pack texts of the given lengths.

    Args:
        lengths: number of tokens of each row including end of text; on the host, to avoid a synchronization.
        longest: upper bound of the lengths; constant, so that compiled kernels are reused between batches.
        causal, attention: see ``Packed``.
        multiple: a filler makes the number of tokens a multiple of this; at most the length of the padded rows.
    """
    size = len(lengths)
    if filler := -sum(lengths) % multiple:
        lengths = [*lengths, filler]
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    ascending = sorted(lengths)
    counts = tuple((len(list(texts)), length) for length, texts in groupby(ascending))
    assert not ascending or (ascending[0] >= 1 and ascending[-1] <= longest), (ascending, longest)
    rows = [row if row < size else 0 for row in order]
    source_rows, read_rows, sizes = copy_to_device(
        torch.tensor([order, rows, ascending], dtype=torch.int64), device
    )  # (B,) each
    total = sum(ascending)
    starts = F.pad(sizes.cumsum(0), (1, 0))  # (B + 1,)
    texts = torch.arange(len(order), device=device)
    text = texts.repeat_interleave(sizes, output_size=total)  # (T,); the size avoids a synchronization
    return Packed(
        texts=text,
        rows=read_rows[text],
        positions=torch.arange(total, device=device) - starts[text],
        starts=starts.to(torch.int32),
        order=source_rows,
        size=size,
        counts=counts,
        longest=longest,
        causal=causal,
        attention=attention,
    )


def dtype_of_products(weight: Tensor) -> torch.dtype:
    """Return the dtype in which products with a weight are computed, considering ``torch.autocast``."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def supports_varlen(weight: Tensor, *, head_width: int) -> bool:
    """Return whether ``attention_varlen`` supports a tower with such weights."""
    device = weight.device
    if device.type != "cuda" or head_width % 8 or torch.cuda.get_device_capability(device) < (8, 0):
        return False  # flash attention needs Ampere
    if dtype_of_products(weight) not in (torch.bfloat16, torch.float16):
        return False
    # registers operators, which must not happen for the first time while a block is compiled
    importlib.import_module("torch.nn.attention.varlen")
    return True


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, packed: Packed, *, ends_only: bool) -> Tensor:
    """Attend by ``torch.nn.attention.varlen``, on CUDA in float16 or bfloat16."""
    from torch.nn.attention.varlen import varlen_attn

    starts = packed.starts
    longest = packed.longest
    if ends_only:  # one query per text, which attends to all of it
        query_starts = torch.arange(len(starts), dtype=starts.dtype, device=starts.device)
        out = varlen_attn(q, k, v, query_starts, starts, 1, longest)
    else:
        window = (-1, 0 if packed.causal else -1)
        out = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=window)
    assert isinstance(out, Tensor)
    return out


# tokens of a row, up to which products can be faster
_FEW_TOKENS = {torch.float32: 64, torch.bfloat16: 320}
# the same if oneDNN multiplies float32
_FEW_TOKENS_WITH_GRADIENTS = 320
_FEW_TOKENS_WITHOUT_GRADIENTS = 224
_GROUPED = 16  # texts of up to the same multiple of so many tokens are one group
_FILL_TO = 64  # tokens
_is_fused = ContextVar("_is_fused", default=False)


@contextmanager
def fused_attention() -> Iterator[None]:
    """In this thread, compute attention on CPUs by torch's function and pack texts without a filler, as on GPUs."""
    before = _is_fused.set(True)
    try:
        yield
    finally:
        _is_fused.reset(before)


def _is_computed_by_onednn(weight: Tensor) -> bool:
    """Return whether oneDNN computes products with a weight: on CPUs in bfloat16, and maybe in float32."""
    if weight.device.type != "cpu":
        return False
    dtype = dtype_of_products(weight)
    return dtype == torch.bfloat16 or (dtype == torch.float32 and uses_onednn_for_float32())


def choose_multiple(weight: Tensor, *, longest: int) -> int:
    """Return the number of which the tokens of packed texts should be a multiple, at most ``longest``.

    oneDNN compiles each product again for another number of tokens, which takes up to 3 ms.
    """
    if _is_fused.get() or not _is_computed_by_onednn(weight):
        return 1
    return min(_FILL_TO, 1 << (longest.bit_length() - 1))


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Attend with all tokens: q (B, H, L, E), k and v (B, H, N, E) → (B, H, L, E).

    Args:
        mask: bool, broadcastable to (B, H, L, N), the tokens that each token attends to.
        causal: whether each token attends to itself and those before it; not with a mask.
    """
    if not _is_faster_by_products(k, tokens=max(q.shape[-2], k.shape[-2])):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    out: Tensor = attention_weights(q, k, mask=mask) @ v
    return out


def attention_weights(
    q: Tensor, k: Tensor, *, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Return the weights with which queries (B, H, L, E) attend to keys (B, H, N, E): (B, H, L, N), of sum 1.

    Args:
        mask: broadcastable to (B, H, L, N): bool, the keys that are attended to, or numbers that are added.
        scale: factor of the products, by default 1 / √E.
    """
    logits = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, -math.inf)
    elif mask is not None:
        logits = logits + mask
    return logits.softmax(dim=-1)


def _is_faster_by_products(k: Tensor, *, tokens: int) -> bool:
    """Return whether batched products are faster than torch's attention for rows of so many tokens.

    On several cores of a CPU, torch's attention is not faster than on one if each row has few tokens, and its
    gradients in bfloat16 take several times as long as those of products. In float32 it uses MKL, even where that
    is slow, but has no weights in memory. Compiled blocks always use it: a decision by the number of tokens would
    compile several graphs.
    """
    if torch.compiler.is_compiling() or _is_fused.get() or k.device.type != "cpu":
        return False
    if k.dtype == torch.float32 and uses_onednn_for_float32():
        return tokens <= (_FEW_TOKENS_WITH_GRADIENTS if k.requires_grad else _FEW_TOKENS_WITHOUT_GRADIENTS)
    faster_in_training = k.dtype == torch.bfloat16 and k.requires_grad
    faster_on_cores = k.dtype == torch.float32 and torch.get_num_threads() > 1
    return (faster_in_training or faster_on_cores) and tokens <= _FEW_TOKENS[k.dtype]


def attention_by_length(q: Tensor, k: Tensor, v: Tensor, packed: Packed, *, ends_only: bool) -> Tensor:
    """Attend by plain attention over all texts of one length at a time, on any device.

    Texts of one length are contiguous, so each group is a view of the packed row without padding. Where products
    are faster, texts of similar lengths are one group, padded to the longest.
    """
    if not packed.counts:
        return q
    multiple = _GROUPED if _is_faster_by_products(k, tokens=packed.counts[-1][1]) else 1
    outputs: list[Tensor] = []
    text = token = 0  # where the group begins
    for _, group in groupby(packed.counts, key=lambda count: -(-count[1] // multiple)):
        counts = list(group)
        longest = counts[-1][1]
        text_count = sum(count for count, _ in counts)
        token_count = sum(count * length for count, length in counts)
        group_texts, group_tokens = slice(text, text + text_count), slice(token, token + token_count)
        places, mask = None, None
        if len(counts) > 1:
            places = packed.texts[group_tokens] - text, packed.positions[group_tokens]
            if ends_only or not packed.causal:
                lengths = packed.starts.diff()[group_texts, None, None, None]
                mask = torch.arange(longest, device=k.device) < lengths  # (B, 1, 1, L)
        text, token = group_texts.stop, group_tokens.stop
        shape = text_count, longest
        key, value = _pad(k[group_tokens], shape, places), _pad(v[group_tokens], shape, places)
        if ends_only:
            query = q[group_texts][:, :, None]  # (B, H, 1, E)
            outputs.append(attend(query, key, value, mask=mask).squeeze(2))
        else:
            query = _pad(q[group_tokens], shape, places)
            out = attend(query, key, value, mask=mask, causal=packed.causal).transpose(1, 2)
            outputs.append(out.flatten(0, 1) if places is None else out[places])
    return torch.cat(outputs)


def _pad(tokens: Tensor, shape: tuple[int, int], places: tuple[Tensor, Tensor] | None) -> Tensor:
    """Lay out tokens (T, H, E) as rows (B, H, L, E) of the shape (B, L), at the given places or without padding."""
    rows: Tensor
    if places is None:
        rows = tokens.unflatten(0, shape)
    else:
        rows = tokens.new_zeros(*shape, *tokens.shape[1:]).index_put(places, tokens)
    return rows.transpose(1, 2)


Rows: TypeAlias = Padded | Packed
Kernel: TypeAlias = Callable[["ResidualAttentionBlock", Tensor, Rows], Tensor]
Recompute: TypeAlias = Callable[..., Tensor]


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host without waiting for the device, which needs page-locked memory."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


_WITHOUT_FLOAT64 = {"mps"}  # devices


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on Apple GPUs, which have no float64."""
    return torch.float32 if device.type in _WITHOUT_FLOAT64 else torch.float64


def at_least_float32(values: Tensor) -> Tensor:
    """Convert values of lower precision to float32."""
    return values if values.dtype == torch.float64 else values.float()


class QuickGELU(nn.Module):
    """x · sigmoid(1.702 x), the approximation of GELU in OpenAI's models."""

    def forward(self, x: Tensor) -> Tensor:
        gates = (1.702 * x).sigmoid_()
        return x * gates if torch.is_grad_enabled() else gates.mul_(x)


class Attention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """(B, L, D) or packed (T, D) → the same shape."""
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)  # (…, 3D)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).unbind(-3)  # three of (…, H, E)
        out: Tensor = self.out_proj(rows.attend(q, k, v).flatten(-2))
        return out

    def attend_query(self, x: Tensor, query: Tensor, rows: Rows) -> Tensor:
        """Compute the output of the tokens ``query``, one of each row of ``x``."""
        return self.attend_keys(*self.keys_values(x), query, rows)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the keys and values of tokens: (…, D) → two of (…, H, E)."""
        width = x.shape[-1]
        weight, bias = self.in_proj_weight[width:], self.in_proj_bias[width:]
        k, v = F.linear(x, weight, bias).unflatten(-1, (2, self.heads, -1)).unbind(-3)
        return k, v

    def attend_keys(self, k: Tensor, v: Tensor, query: Tensor, rows: Rows) -> Tensor:
        """Compute ``attend_query`` with the keys and values of ``x``."""
        width = query.shape[-1]
        q = F.linear(query, self.in_proj_weight[:width], self.in_proj_bias[:width])
        out: Tensor = self.out_proj(rows.attend_readout(q.unflatten(-1, (self.heads, -1)), k, v).flatten(-2))
        return out


class Mlp(nn.Module):
    """Two linear layers, ``ratio`` times as wide inside."""

    def __init__(self, width: int, *, ratio: float, quick_gelu: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, int(ratio * width))
        self.gelu = QuickGELU() if quick_gelu else nn.GELU()
        self.c_proj = nn.Linear(int(ratio * width), width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(self.gelu(self.c_fc(x)))
        return out


class ResidualAttentionBlock(nn.Module):
    """A pre-norm transformer block.

    Attributes:
        kernels: compiled functions for training, for all tokens and for those that are read, or None; see
            clipkit/training/parallel.py.
        recompute: a function that calls another with arguments, and recomputes its activations in the backward pass
            instead of keeping them; or None.
    """

    def __init__(
        self, width: int, heads: int, *, mlp_ratio: float, quick_gelu: bool, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=eps)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width, eps=eps)
        self.mlp = Mlp(width, ratio=mlp_ratio, quick_gelu=quick_gelu)
        self.kernels: tuple[Kernel, Kernel] | None = None
        self.recompute: Recompute | None = None

    def forward(self, x: Tensor, rows: Rows, *, readout: bool = False) -> Tensor:
        """Compute all tokens, (B, L, D) → (B, L, D), or with ``readout`` one of each row, (B, L, D) → (B, D).

        Packed rows are (T, D).
        """
        # functions, not bound methods: a copy of the block must not compute with the original
        kernel: Kernel = ResidualAttentionBlock.compute_tokens
        if readout:
            kernel = ResidualAttentionBlock.compute_readout
        if self.kernels is not None and self.training:
            kernel = self.kernels[readout]
        if self.recompute is not None and torch.is_grad_enabled():
            return self.recompute(kernel, self, x, rows)
        return kernel(self, x, rows)

    def compute_tokens(self, x: Tensor, rows: Rows) -> Tensor:
        """Compute all tokens."""
        x = x + self.attn(self.ln_1(x), rows)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out

    def compute_readout(self, x: Tensor, rows: Rows) -> Tensor:
        """Compute one token of each row."""
        normed = self.ln_1(x)
        out = rows.select_readout(x) + self.attn.attend_query(
            normed, rows.select_readout(normed), rows
        )  # (B, 1, D), or packed (B, D)
        out = out.flatten(0, -2)  # before the sum, because the output must not be a view for FSDP
        readout: Tensor = out + self.mlp(self.ln_2(out))
        return readout


class Transformer(nn.Module):
    """A stack of blocks; one token of each row is read at the end."""

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        *,
        mlp_ratio: float = 4.0,
        quick_gelu: bool,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(
            ResidualAttentionBlock(width, heads, mlp_ratio=mlp_ratio, quick_gelu=quick_gelu, eps=eps)
            for _ in range(layers)
        )

    @property
    def blocks(self) -> list[ResidualAttentionBlock]:
        """The blocks in order."""
        return [block for block in self.resblocks if isinstance(block, ResidualAttentionBlock)]

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """Compute the token that is read of each row: (B, L, D), or packed (T, D) → (B, D)."""
        *body, last = self.resblocks
        for block in body:
            x = block(x, rows)
        out: Tensor = last(x, rows, readout=True)
        return out

    def compute_tokens(self, x: Tensor, rows: Rows) -> Tensor:
        """Compute all tokens: (B, L, D), or packed (T, D) → the same shape."""
        for block in self.resblocks:
            x = block(x, rows)
        return x

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw weights by width; those that add to the residual stream are scaled by depth too."""
        for block in self.blocks:
            initialize_block(block.attn, block.mlp, layers=len(self.blocks))


def reset_layers(tower: nn.Module) -> None:
    """Draw the weights of linear layers, norms and convolutions as torch does."""
    for module in tower.modules():
        if isinstance(module, nn.LayerNorm | nn.Linear | nn.Conv2d):
            module.reset_parameters()


@torch.no_grad()
def initialize_block(attn: Attention, mlp: "Mlp | None", *, layers: int) -> None:
    """Draw a block's weights, see ``Transformer.initialize``."""
    width = attn.out_proj.in_features
    out_std = width**-0.5 * (2 * layers) ** -0.5
    nn.init.normal_(attn.in_proj_weight, std=width**-0.5)
    nn.init.zeros_(attn.in_proj_bias)
    nn.init.normal_(attn.out_proj.weight, std=out_std)
    nn.init.zeros_(attn.out_proj.bias)
    if mlp is not None:
        nn.init.normal_(mlp.c_fc.weight, std=(2 * width) ** -0.5)
        nn.init.normal_(mlp.c_proj.weight, std=out_std)


class MeanPooling(nn.Module):
    """The mean of the patch tokens, which may not be normalized yet."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, 1 + K, D) with the class token first → (B, D)."""
        return tokens[:, 1:].mean(dim=1)


class AttentionPooling(nn.Module):
    """Attention of a learned token to the patch tokens, then an MLP (MAP; Zhai et al. 2022, 2106.04560)."""

    def __init__(self, width: int, heads: int, *, mlp_ratio: float, quick_gelu: bool) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.empty(width))
        self.attn = Attention(width, heads)
        self.norm = nn.LayerNorm(width)
        self.mlp = Mlp(width, ratio=mlp_ratio, quick_gelu=quick_gelu)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, 1 + K, D) with the class token first → (B, D)."""
        return self.pool_rows(tokens[:, 1:], Padded())

    def pool_rows(self, tokens: Tensor, rows: Rows) -> Tensor:
        """Pool all tokens of each image: (B, K, D), or packed (T, D) → (B, D)."""
        probe = self.probe.to(tokens.dtype).expand_as(rows.select_readout(tokens))
        x = self.attn.attend_query(tokens, probe, rows).flatten(0, -2)
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class SourceProjections(NamedTuple):
    """Projections of images by their source, see ``Architecture.projections``.

    Attributes:
        projections: P matrices (D, O).
        numbers: (B,) int64, 0 for the tower's own projection, i for the i-th of these.
    """

    projections: Sequence[Tensor]
    numbers: Tensor


class VisionTransformer(nn.Module):
    """A ViT (Dosovitskiy et al. 2021), with CLIP's norm before the blocks or not; see ``VisionTower``."""

    def __init__(
        self,
        *,
        image_size: int,
        patch_size: int,
        width: int,
        layers: int,
        heads: int,
        mlp_ratio: float = 4.0,
        output_dim: int,
        quick_gelu: bool,
        pool: str = "class",
        positions: str = "learned",
        pre_norm: bool = True,
        eps: float = 1e-5,
        channels: int = 3,
    ) -> None:
        super().__init__()
        self.image_size, self.patch_size = image_size, patch_size
        self.pooling, self.positions = pool, positions
        patches = (image_size // patch_size) ** 2
        # a convolution for the parameter's name and shape; applied as a matrix product
        self.conv1 = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size, bias=False)
        self.class_embedding = nn.Parameter(torch.empty(width))
        if pool == "distilled":  # includes the token's position
            self.distillation_embedding = nn.Parameter(torch.empty(width))
        table = torch.empty(patches + 1, width)
        self.positional_embedding = nn.Parameter(table, requires_grad=positions.startswith("learned"))
        self.ln_pre = nn.LayerNorm(width, eps=eps) if pre_norm else nn.Identity()
        self.transformer = Transformer(
            width, layers, heads, mlp_ratio=mlp_ratio, quick_gelu=quick_gelu, eps=eps
        )
        self.ln_post = nn.LayerNorm(width, eps=eps)
        self.attn_pool: nn.Module | None = None  # None: the class token is read
        if pool in ("mean", "mean_norm"):
            self.attn_pool = MeanPooling()
        elif pool == "map":
            self.attn_pool = AttentionPooling(width, heads, mlp_ratio=mlp_ratio, quick_gelu=quick_gelu)
        self.proj = nn.Parameter(torch.empty(width, output_dim))

    def forward(
        self,
        images: Tensor,
        patches: Tensor | None = None,
        *,
        colors: tuple[Tensor, Tensor] | None = None,
        by_source: SourceProjections | None = None,
    ) -> Tensor:
        """Compute features (B, O), not normalized; arguments as for ``encode_with_tokens``."""
        if self.pooling == "distilled":
            return self.encode_with_tokens(images, patches, colors=colors)[0]
        return self.project(self.pool(images, patches, colors=colors), by_source)

    def pool(
        self,
        images: Tensor,
        patches: Tensor | None = None,
        *,
        colors: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Compute pooled features (B, D); arguments as for ``stem``."""
        x = self.stem(images, patches, colors=colors)
        if self.pooling == "class":
            pooled: Tensor = self.ln_post(self.transformer(x, Padded()))
            return pooled
        return self._pool_tokens(self.transformer.compute_tokens(x, Padded()))[0]

    def _pool_tokens(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Pool the tokens of the last block (B, 1 + K, D) to (B, D), and return them normalized too."""
        tokens: Tensor = self.ln_post(x)
        if self.attn_pool is None:
            return tokens[:, 0], tokens
        if self.pooling == "mean_norm":
            return self.ln_post(self.attn_pool(x)), tokens
        return self.attn_pool(tokens), tokens

    def project(self, pooled: Tensor, by_source: SourceProjections | None = None) -> Tensor:
        """Compute features (B, O) of pooled features (B, D)."""
        features: Tensor = pooled @ self.proj
        if by_source is not None:
            for i, projection in enumerate(by_source.projections, start=1):
                selected = (by_source.numbers == i)[:, None]  # (B, 1)
                features = torch.where(selected, pooled @ projection, features)
        return features

    def encode_with_tokens(
        self,
        images: Tensor,
        patches: Tensor | None = None,
        *,
        colors: tuple[Tensor, Tensor] | None = None,
        replaced: tuple[Tensor, Tensor] | None = None,
        by_source: SourceProjections | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute features (B, O) and the normalized tokens (B, 1 + K, D), the class token first.

        A distillation token is the second of 2 + K; each of the two is projected to half of the features.

        Args:
            images, patches, colors, replaced: see ``stem``.
            by_source: projections that some images have instead of ``proj``; not with a distillation token.
        """
        x = self.stem(images, patches, colors=colors, replaced=replaced)
        x = self.transformer.compute_tokens(x, Padded())
        if self.pooling == "distilled":
            tokens: Tensor = self.ln_post(x)
            pair = zip(tokens[:, :2].unbind(dim=1), self.proj.chunk(2, dim=1), strict=True)
            return normalize_halves(torch.cat([token @ proj for token, proj in pair], dim=-1)), tokens
        pooled, tokens = self._pool_tokens(x)
        return self.project(pooled, by_source), tokens

    def stem(
        self,
        images: Tensor,
        patches: Tensor | None = None,
        *,
        colors: tuple[Tensor, Tensor] | None = None,
        replaced: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Compute the tokens (B, 1 + K, D) before the blocks.

        Args:
            images: (B, C, S, S), normalized float, or uint8 with ``colors``. S must be a multiple of the patch
                size; position embeddings are resized to it.
            patches: (B, K) int64, ascending, the patches of each image to compute, numbered along rows; None
                for all.
            colors: mean and standard deviation, (C, 1, 1) each, with which images / 255 are normalized.
            replaced: (B, K) int64, the number of the patch to be used in place of each patch, and the embedding
                (D,) of patch K.
        """
        side = images.shape[-1]
        assert images.shape[1:] == (self.conv1.in_channels, side, side) and side % self.patch_size == 0, (
            tuple(images.shape)
        )
        grid = side // self.patch_size
        cut = cut_patches(images, self.patch_size)
        if patches is None:
            cut = cut.flatten(1, 2)
        else:
            rows = torch.arange(len(images), device=images.device)[:, None]
            cut = cut[rows, patches // grid, patches % grid]
        if colors is not None:  # cut is (B, K, C, p, p) here, with fewer pixels than the images
            mean, std = colors
            cut = cut.to(mean.dtype, copy=True).div_(255).sub_(mean).div_(std)
        weight = self.conv1.weight.flatten(1)  # (D, Cpp)
        x = F.linear(cut.flatten(2).to(weight.dtype), weight)  # (B, K, D)
        if replaced is not None:
            sources, replacement = replaced
            x = torch.cat([x, replacement.to(x.dtype).expand(len(x), 1, -1)], dim=1)
            x = x.gather(1, sources[..., None].expand(-1, -1, x.shape[-1]))
        positions: Tensor = self.positional_embedding
        if self.positions == "learned_2d":
            positions = average_grid(positions)
        if side != self.image_size:
            positions = resize_grid(positions, grid)
        positions = positions.to(x.dtype)  # (P + 1, D)
        first = (self.class_embedding.to(x.dtype) + positions[0]).expand(x.shape[0], 1, -1)
        x = x + (positions[1:] if patches is None else F.embedding(patches, positions[1:]))
        if self.pooling == "distilled":
            second = self.distillation_embedding.to(x.dtype).expand(x.shape[0], 1, -1)
            first = torch.cat([first, second], dim=1)
        out: Tensor = self.ln_pre(torch.cat([first, x], dim=1))
        return out

    @torch.no_grad()
    def initialize(self, *, small_data: bool) -> None:
        """Draw fresh weights, see ``CLIP.initialize``."""
        std = self.class_embedding.shape[0] ** -0.5
        for parameter in (self.class_embedding, self.proj):
            nn.init.normal_(parameter, std=std)
        if self.pooling == "distilled":
            nn.init.normal_(self.distillation_embedding, std=std)
        if self.positions.startswith("learned"):
            nn.init.normal_(self.positional_embedding, std=0.8 if small_data else std)
            if self.positions == "learned_2d":
                tie_grid(self.positional_embedding, drawn=self.image_size // self.patch_size)
        elif self.positions == "none":
            nn.init.zeros_(self.positional_embedding)
        else:
            self.positional_embedding.copy_(
                sincos_grid(self.image_size // self.patch_size, len(self.class_embedding))
            )
        if isinstance(self.attn_pool, AttentionPooling):
            nn.init.normal_(self.attn_pool.probe, std=std)
            initialize_block(self.attn_pool.attn, self.attn_pool.mlp, layers=1)
        if small_data:
            self.transformer.initialize()
            return
        for block in self.transformer.blocks:
            nn.init.xavier_uniform_(block.attn.in_proj_weight)
            nn.init.zeros_(block.attn.in_proj_bias)
            nn.init.zeros_(block.attn.out_proj.bias)


def normalize_halves(features: Tensor) -> Tensor:
    """Scale both halves of features (…, O) to unit norm, in at least float32.

    With a distillation token (DeiT, Touvron et al. 2021, https://arxiv.org/abs/2012.12877), the first half belongs
    to the class token and the second to the distillation token. Similarities of such features, scaled to unit norm
    as a whole, are the average of those of both halves, so averaging at test time needs no further code.
    """
    return F.normalize(at_least_float32(features).unflatten(-1, (2, -1)), dim=-1).flatten(-2)


def combine_features(features: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the normalized weighted sum of features (…, O) of several fields, in at least float32."""
    total = weights[0] * at_least_float32(features[0])
    for field_features, weight in zip(features[1:], weights[1:], strict=True):
        total = total + weight * at_least_float32(field_features)
    return F.normalize(total, dim=-1)


def average_grid(positions: Tensor) -> Tensor:
    """Project position embeddings (1 + side², width) to ViT's "2-D": a row's and a column's of half the width each.

    The first half is averaged along rows and the second half along columns, and so are the gradients. A tied table
    therefore stays tied, and an optimizer that does not depend on the gradients' scale updates it as it would one
    embedding for each row and column. The stored table is complete, so any format can hold it.
    """
    side, half = math.isqrt(len(positions) - 1), positions.shape[1] // 2
    grid = positions[1:].unflatten(0, (side, side))  # (g, g, D)
    rows = grid[..., :half].mean(dim=1, keepdim=True).expand(-1, side, -1)
    columns = grid[..., half:].mean(dim=0, keepdim=True).expand(side, -1, -1)
    return torch.cat([positions[:1], torch.cat([rows, columns], dim=-1).flatten(0, 1)])


def resize_grid(positions: Tensor, side: int) -> Tensor:
    """Resize position embeddings of a class token and a square grid, (1 + P, D) → (1 + side², D).

    Differentiable, for training on smaller images (as in FlexiViT, Beyer et al. 2023,
    https://arxiv.org/abs/2212.08013).
    """
    stored_side = math.isqrt(len(positions) - 1)
    weights = grid_weights(stored_side, side, positions.device).to(positions.dtype)
    with torch.autocast(positions.device.type, enabled=False):
        return torch.cat([positions[:1], weights @ positions[1:]])


@torch.no_grad()
def smooth_grid(positions: Tensor, side: int) -> None:
    """Replace fresh position embeddings by the interpolation of a grid of ``side``, in place.

    Otherwise the details that training on smaller images cannot reach would remain noise at the full size.
    """
    full_side = math.isqrt(len(positions) - 1)
    small = positions[1 : 1 + side**2].clone()
    positions[1:] = grid_weights(side, full_side, positions.device).to(positions.dtype) @ small


@lru_cache(maxsize=16)
def grid_weights(side: int, new_side: int, device: torch.device) -> Tensor:
    """Return the matrix (new_side², side²) of antialiased bicubic resizing, which is equal on all devices."""
    size = (new_side, new_side)
    with torch.inference_mode(False):  # the cached matrix is used in training too
        units = torch.eye(side**2).view(side**2, 1, side, side)
        resized = F.interpolate(units, size, mode="bicubic", antialias=True, align_corners=False)
        return resized.flatten(1).T.contiguous().to(device)


@torch.no_grad()
def tie_grid(positions: Tensor, *, drawn: int) -> None:
    """Tie random position embeddings in place and keep their deviation; ``drawn`` of a row's are independent."""
    positions.copy_(average_grid(positions))
    positions[1:] *= drawn**0.5


def sincos_grid(side: int, width: int) -> Tensor:
    """Return fixed position embeddings (1 + side², width) float32, 0 for the class token (ViT's "sincos_2d").

    A patch at row y and column x has sin(x ω), cos(x ω), sin(y ω) and cos(y ω) for width / 4 frequencies ω from 1
    down to 10,000⁻¹.
    """
    frequencies = 10_000 ** -torch.linspace(0, 1, width // 4, dtype=torch.float64)
    angles = torch.arange(side, dtype=torch.float64)[:, None] * frequencies  # (g, D / 4)
    x, y = angles.expand(side, -1, -1), angles[:, None].expand(-1, side, -1)  # (g, g, D / 4) each
    grid = torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=-1).flatten(0, 1)
    return F.pad(grid, (0, 0, 1, 0)).float()


def cut_patches(images: Tensor, side: int) -> Tensor:
    """Cut images (B, C, S, S) into a grid of patches (B, S / side, S / side, C, side, side)."""
    cut: Tensor = images.unflatten(3, (-1, side)).unflatten(2, (-1, side)).permute(0, 2, 4, 1, 3, 5)
    return cut


class BagOfWordsTower(nn.Module):
    """Projected mean of a text's token embeddings without start, end and padding."""

    def __init__(self, *, vocab_size: int, width: int, output_dim: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.text_projection = nn.Parameter(torch.empty(width, output_dim))

    def forward(self, tokens: Tensor) -> Tensor:
        """Encode (B, L) int64, rows of start of text, words, end of text (the largest id), padding → (B, O)."""
        weights = mask_words(tokens).to(self.token_embedding.weight.dtype)
        mean = torch.einsum("bl,bld->bd", weights, self.token_embedding(tokens))
        out: Tensor = (mean / weights.sum(dim=-1, keepdim=True)) @ self.text_projection
        return out

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw embeddings with std 0.02 as in the transformer, and the projection with std width^-½."""
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.text_projection, std=self.text_projection.shape[0] ** -0.5)


def mask_words(tokens: Tensor) -> Tensor:
    """Return (B, L) whether each token is a word: not start, end or padding; an empty text has its start."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    words = (positions > 0) & (positions < tokens.argmax(dim=-1, keepdim=True))
    words[:, 0] |= ~words.any(dim=-1)
    return words


def select_distinct(tokens: Tensor, selected: Tensor) -> Tensor:
    """Return (B, L) the selected tokens of each text, each once; -1 elsewhere. ``selected`` is (B, L) bool."""
    ordered = tokens.masked_fill(~selected, -1).sort(dim=1).values
    again = ordered[:, 1:] == ordered[:, :-1]
    ordered[:, 1:].masked_fill_(again, -1)
    return ordered


class WordTableTower(nn.Module):
    """The mean of a text's unit word vectors."""

    def __init__(self, *, words: int, output_dim: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(words, output_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Encode (B, L) int64 as ``BagOfWordsTower`` does, or single words (B, 1) → (B, O)."""
        weights = mask_words(tokens).to(self.token_embedding.weight.dtype)
        vectors = F.normalize(self.token_embedding(tokens), dim=-1)  # (B, L, O)
        return torch.einsum("bl,blo->bo", weights, vectors) / weights.sum(dim=-1, keepdim=True)

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw vectors with std output_dim^-½."""
        nn.init.normal_(self.token_embedding.weight, std=self.token_embedding.weight.shape[1] ** -0.5)


class ClassTableTower(nn.Module):
    """A learned row per class, in place of an encoded text."""

    def __init__(self, *, classes: int, output_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, output_dim))

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up class numbers (B, 1) int64 → (B, O)."""
        return F.embedding(tokens[:, 0], self.weight)

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw rows with std output_dim^-½."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)


class PooledEncoder(nn.Module):
    """An encoder of transformers with pooling and projection; padding tokens are masked."""

    def __init__(
        self,
        encoder: nn.Module,
        width: int,
        output_dim: int,
        *,
        pad_id: int | None,
        pooling: str,
        projection: str,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.transformer = encoder
        self.pad_id = pad_id
        self.pooling = pooling
        if pooling != "pooler" and getattr(encoder, "pooler", None) is not None:
            encoder.register_module("pooler", None)
        self.proj: nn.Module = nn.Identity()
        if projection == "linear":
            self.proj = nn.Linear(width, output_dim, bias=False)
        elif projection == "mlp":
            hidden = (width + output_dim) // 2
            activation = nn.Sequential(nn.GELU(), nn.Dropout(dropout))
            self.proj = nn.Sequential(
                nn.Linear(width, hidden, bias=False), activation, nn.Linear(hidden, output_dim, bias=False)
            )

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, L) int64 → (B, O)."""
        return self.project(self.pool(tokens))

    def project(self, pooled: Tensor) -> Tensor:
        """Compute features (B, O) of pooled features (B, D)."""
        features: Tensor = self.proj(pooled)
        return features

    def pool(self, tokens: Tensor) -> Tensor:
        """Compute pooled features: (B, L) int64 → (B, D)."""
        visible = torch.ones_like(tokens) if self.pad_id is None else (tokens != self.pad_id).long()
        out = self.transformer(input_ids=tokens, attention_mask=visible)
        hidden = out.last_hidden_state  # (B, L, D)
        if self.pooling == "mean":
            pooled: Tensor = (hidden * visible[..., None]).sum(dim=1) / visible.sum(dim=-1, keepdim=True)
        elif self.pooling == "cls":
            pooled = hidden[:, 0]
        elif self.pooling == "last":
            positions = torch.arange(tokens.shape[1], device=tokens.device) * visible  # (B, L)
            pooled = hidden[torch.arange(len(hidden), device=tokens.device), positions.argmax(dim=1)]
        else:
            pooled = out.pooler_output
        return pooled


# Patch dropout of FLIP (Li et al. 2022, arXiv 2212.00794): a ViT trained on half of the patches costs about half.
# The patches are a function of a seed and an image's position in the global batch, in integer arithmetic: equal
# on all devices, for any number of ranks and accumulation, and in a second pass over the same images.


def draw_patches(*, seed: int, rows: Tensor, patches: int, keep: int) -> Tensor:
    """Draw ``keep`` of ``patches`` patches for each image uniformly.

    Args:
        seed: any integer, different in each step.
        rows: (B,) int64, positions of the images in the global batch, on any device.
        patches: P.
        keep: K, from 1 to P.

    Returns:
        (B, K) int64, ascending along K, from 0 to P - 1, on the device of ``rows``, without synchronization.
    """
    assert rows.dtype == torch.int64 and rows.ndim == 1, (rows.dtype, rows.shape)
    assert 1 <= keep <= patches, (keep, patches)
    # stable, so that all devices break ties alike
    smallest = draw_numbers(seed=seed, rows=rows, count=patches).argsort(dim=1, stable=True)[:, :keep]
    return smallest.sort(dim=1).values


def draw_numbers(*, seed: int, rows: Tensor, count: int) -> Tensor:
    """Draw ``count`` numbers for each row: (B, count) int64 of all values; arguments as for ``draw_patches``."""
    numbers = torch.arange(1, count + 1, device=rows.device) * to_signed(STEP)  # as SplitMix64 counts
    return mix_tensor(_hash_rows(seed, rows)[:, None] + numbers)


def draw_uniform(*, seed: int, rows: Tensor, count: int) -> Tensor:
    """Draw ``count`` numbers from 0 to below 1 for each row: (B, count) of the ``widest_dtype``."""
    numbers = draw_numbers(seed=seed, rows=rows, count=count)
    return ((numbers >> 11) & (2**53 - 1)).to(widest_dtype(rows.device)).div_(2**53)


def draw_rows(*, seed: int, rows: Tensor, fraction: float) -> Tensor:
    """Choose each row with a probability: (B,) bool; arguments as for ``draw_patches``."""
    return _hash_rows(seed, rows) < min(int((fraction - 0.5) * 2**64), 2**63 - 1)


def _hash_rows(seed: int, rows: Tensor) -> Tensor:
    """Hash a seed and rows to (B,) int64."""
    # mix a seed of any size to an int64, so that seeds and rows with the same sum give different keys
    key = mix((seed + STEP) & MASK)
    seed >>= 64
    while seed not in (0, -1):
        key = mix((key + seed + STEP) & MASK)
        seed >>= 64
    return mix_tensor(rows + to_signed(key))

"""How a batch of tokens lies in memory, and which token sees which: padded rows, or texts packed into one row.

Under a causal mask nothing behind end-of-text reaches a text's features, so a packed batch holds each text to its
true length and nothing else: every layer but attention works on single tokens and does not see where texts begin.
Attention over a packed row is torch's ``varlen_attn`` on CUDA in half precision, and elsewhere plain attention
over all texts of one length at a time; both give what the padded tower gives.

Letters in shape comments: B texts or pictures, L tokens of a row, T tokens of all texts, D width, H heads,
E width of a head.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Attention", "Packed", "Padded", "attention_by_length", "attention_varlen", "pack", "varlen_runs"]

_HALF = (torch.bfloat16, torch.float16)
_AMPERE = (8, 0)  # the oldest GPUs that flash attention runs on


@dataclass(frozen=True, kw_only=True, eq=False)
class Padded:
    """Rows of equal length (B, L, …), of which one token each is read in the end.

    Attributes:
        ends: (B,) int64, the token that is read, in a causal batch; None reads the first one, which sees all.
    """

    ends: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Three of (B, L, H, E) → what each token gathers (B, L, H, E)."""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, L, E)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.ends is not None).transpose(1, 2)

    def attend_read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, 1, H, E) of the tokens that are read, and all keys and values → (B, 1, H, E)."""
        mask = None
        if self.ends is not None:
            visible = torch.arange(k.shape[1], device=k.device) <= self.ends[:, None]  # (B, L)
            mask = visible[:, None, None, :]  # (B, 1, 1, L)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    def read(self, x: Tensor) -> Tensor:
        """(B, L, D) → (B, 1, D), the tokens that are read."""
        if self.ends is None:
            return x[:, :1]
        return x.gather(1, self.ends[:, None, None].expand(-1, 1, x.shape[-1]))


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """Texts one behind the other (T, …), shortest first, each of which is read at its last token.

    Attributes:
        rows: (T,) int64, the row of the padded batch that each token is from.
        places: (T,) int64, its place there.
        starts: (B + 1,) int32, where each text begins, and the end of the last.
        order: (B,) int64, the row of each text of the packed batch; its inverse puts features back.
        counts: (texts, length) for each length that occurs, ascending.
        longest: no text is longer.
        attention: how tokens see each other.
    """

    rows: Tensor
    places: Tensor
    starts: Tensor
    order: Tensor
    counts: tuple[tuple[int, int], ...]
    longest: int
    attention: "Attention"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Three of (T, H, E) → what each token gathers from those of its text up to itself (T, H, E)."""
        return self.attention(q, k, v, self, ends_only=False)

    def attend_read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, E) of the last tokens, and all keys and values (T, H, E) → (B, H, E)."""
        return self.attention(q, k, v, self, ends_only=True)

    def read(self, x: Tensor) -> Tensor:
        """(T, D) → (B, D), the last token of each text."""
        return x[self.starts[1:].long() - 1]

    def in_order(self, features: Tensor) -> Tensor:
        """(B, O) of the packed batch → (B, O) in the order of the padded one."""
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(len(self.order), device=self.order.device)
        return features[inverse]


Attention: TypeAlias = Callable[..., Tensor]  # (q, k, v, packed, *, ends_only) → (T or B, H, E)


def pack(lengths: Sequence[int], *, longest: int, attention: Attention, device: torch.device) -> Packed:
    """The layout of texts of the given lengths.

    Args:
        lengths: of each row, from 1, end of text included; known here, so that the device is not waited for.
        longest: a bound of them. The same number for each batch spares a compiled kernel for each of its own.
        attention: see ``Packed``.
        device: of the tensors.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    ascending = [lengths[row] for row in order]
    counts = tuple((len(list(same)), length) for length, same in groupby(ascending))
    assert not ascending or (ascending[0] >= 1 and ascending[-1] <= longest), (ascending, longest)
    both = torch.tensor([order, ascending], dtype=torch.int64)
    both = (both.pin_memory() if device.type == "cuda" else both).to(device, non_blocking=True)
    rows_of, sizes = both  # (B,) each
    total = sum(ascending)
    starts = F.pad(sizes.cumsum(0), (1, 0))  # (B + 1,)
    texts = torch.arange(len(order), device=device)
    text = texts.repeat_interleave(
        sizes, output_size=total
    )  # (T,); the size given spares a wait for the device
    return Packed(
        rows=rows_of[text],
        places=torch.arange(total, device=device) - starts[text],
        starts=starts.to(torch.int32),
        order=rows_of,
        counts=counts,
        longest=longest,
        attention=attention,
    )


def varlen_runs(device: torch.device, dtype: torch.dtype, *, head_width: int) -> bool:
    """Whether ``attention_varlen`` has a kernel there, for weights of the given type."""
    if device.type != "cuda" or head_width % 8 or torch.cuda.get_device_capability(device) < _AMPERE:
        return False
    if (torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else dtype) not in _HALF:
        return False
    # it registers operators, which should not happen first while a block is compiled
    importlib.import_module("torch.nn.attention.varlen")
    return True


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, packed: Packed, *, ends_only: bool) -> Tensor:
    """By ``torch.nn.attention.varlen``: CUDA, float16 or bfloat16."""
    from torch.nn.attention.varlen import varlen_attn

    starts, longest = packed.starts, packed.longest
    if ends_only:  # one query a text, which sees it all
        each = torch.arange(len(starts), dtype=starts.dtype, device=starts.device)
        out = varlen_attn(q, k, v, each, starts, 1, longest)
    else:
        out = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out


def attention_by_length(q: Tensor, k: Tensor, v: Tensor, packed: Packed, *, ends_only: bool) -> Tensor:
    """By plain attention over all texts of one length at a time: any device and type.

    Texts of one length lie together, so each of these is a view of the packed row and nothing is padded.
    """
    if not packed.counts:
        return q
    sizes = [texts * length for texts, length in packed.counts]
    queries = q.split([texts for texts, _ in packed.counts] if ends_only else sizes)
    parts = []
    for (texts, _), *three in zip(packed.counts, queries, k.split(sizes), v.split(sizes), strict=True):
        a, b, c = (one.unflatten(0, (texts, -1)).transpose(1, 2) for one in three)  # (texts, H, length, E)
        mixed = F.scaled_dot_product_attention(a, b, c, is_causal=not ends_only)
        parts.append(mixed.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)

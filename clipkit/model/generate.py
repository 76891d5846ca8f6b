"""Generate captions of images: greedy, nucleus sampling (Holtzman et al. 2020), and beam search.

Letters in shape comments: B images, K beams, L tokens so far, M tokens of an image, V words of the vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from clipkit.errors import ConfigError, DataError
from clipkit.files.splitmix import MASK, mix
from clipkit.model.clip import CLIP
from clipkit.model.zero_shot import evaluating

__all__ = ["check_generation", "generate_captions"]

_Logits = Callable[[Tensor, Tensor], Tensor]  # (B, M, W) and tokens (B, L) → (B, V) of the next token


@torch.no_grad()
def generate_captions(
    model: CLIP,
    pixels: Tensor,
    *,
    beams: int = 1,
    top_p: float = 0.0,
    prefix: str = "",
    length: int = 0,
    seed: int = 0,
    rows: Sequence[int] | None = None,
) -> list[str]:
    """Describe images: B captions.

    By default the most probable token is taken at each step. All tokens so far are computed again for each token.

    Args:
        model: a CLIP with a decoder of captions, used in evaluation mode.
        pixels: (B, 3, S, S) uint8, or normalized float, on the model's device.
        beams: number of hypotheses per image; of those that ended, the one with the highest mean log-likelihood per
            generated token is returned.
        top_p: samples each token among the most probable ones whose probabilities add up to this, 0 to 1; 0: the
            most probable token.
        prefix: start of all captions, which is part of the result.
        length: maximum number of tokens, including the prefix and the end of text; 0: the decoder's.
        seed: seed of the samples.
        rows: B numbers that distinguish the samples of images; by default 0, 1, …

    Raises:
        ConfigError: the model has no decoder, or a setting is out of range.
        DataError: the prefix is too long, or the model's logits are not finite.
    """
    start, end, most = check_generation(model, beams=beams, top_p=top_p, prefix=prefix, length=length)
    with evaluating(model):
        _, seen = model.image_tokens(pixels)
        logits = partial(_next_logits, model)
        tokens = start.to(pixels.device).expand(len(pixels), -1)  # (B, L)
        if beams > 1:
            found = _beam_search(logits, seen, tokens, end=end, most=most, beams=beams)
        else:
            keys = [mix((seed + mix(row)) & MASK) for row in (range(len(pixels)) if rows is None else rows)]
            found = _sample(logits, seen, tokens, end=end, most=most, top_p=top_p, keys=keys)
    return [" ".join(model.tokenizer.decode(row[1:]).split()) for row in found]


def check_generation(
    model: CLIP, *, beams: int, top_p: float, prefix: str, length: int
) -> tuple[Tensor, int, int]:
    """Check the arguments of ``generate_captions``.

    Returns:
        (1, L) int64 the start of text and the prefix, the id of end of text, and the maximum number of tokens after
        the start.

    Raises:
        ConfigError, DataError: see ``generate_captions``.
    """
    if (decoder := model.text_decoder) is None:
        raise ConfigError("the model cannot describe images: it was trained without caption.weight")
    if beams < 1 or length < 0:
        raise ConfigError(f"beams = {beams} or length = {length} is invalid: expected at least 1 and 0")
    if not 0 <= top_p <= 1 or (top_p and beams > 1):
        raise ConfigError(f"top_p = {top_p} with {beams} beams is invalid: expected 0 to 1, and 0 with beams")
    row = model.tokenizer([prefix])[0]
    place = int(row.argmax())
    longest = decoder.shape.context_length
    most = min(length or longest, longest)
    if place > most:  # the prefix and the end
        raise DataError(f"the prefix has {place - 1} tokens, but captions have at most {most} with the end")
    return row[None, :place], int(row[place]), most


def _next_logits(model: CLIP, seen: Tensor, tokens: Tensor) -> Tensor:
    decoder = model.text_decoder
    assert decoder is not None
    text = model.decoder_input(tokens, lengths=[tokens.shape[1]] * len(tokens))
    logits = decoder.next_logits(seen, tokens, text)
    if not logits.isfinite().all():
        raise DataError("the model's logits of captions are not finite: its weights are damaged")
    return logits


def _sample(
    logits: _Logits, seen: Tensor, tokens: Tensor, *, end: int, most: int, top_p: float, keys: Sequence[int]
) -> list[list[int]]:
    """Extend each row by one token at a time until all have ended; return the rows without the end."""
    first = tokens.shape[1]
    running = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
    for place in range(first, most + 1):
        scores = logits(seen, tokens)  # (B, V)
        if top_p:
            uniform = torch.tensor([(mix((key + place) & MASK) >> 11) * 2.0**-53 for key in keys])
            chosen = _nucleus(scores, uniform.to(scores.device, torch.float32), top_p)
        else:
            chosen = scores.argmax(dim=-1)
        tokens = torch.cat([tokens, torch.where(running, chosen, end)[:, None]], dim=1)
        running &= chosen != end
        if not running.any():
            break
    return [_before(row, end) for row in tokens.tolist()]


def _nucleus(logits: Tensor, uniform: Tensor, top_p: float) -> Tensor:
    """Draw one of the most probable tokens of each row, (B, V) and (B,) in 0 … 1 → (B,)."""
    values, order = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    sums = values.cumsum(dim=-1)
    kept = values * (sums - values < top_p)  # the first is always kept
    sums = kept.cumsum(dim=-1)
    place = torch.searchsorted(sums, (uniform * sums[:, -1])[:, None], right=True)
    place = place.minimum((kept > 0).sum(dim=-1, keepdim=True) - 1)
    return order.gather(1, place)[:, 0]


def _before(row: list[int], end: int) -> list[int]:
    return row[: row.index(end)] if end in row else row


@dataclass
class _Best:
    """The best hypothesis of an image that has ended."""

    score: float = -math.inf
    tokens: tuple[int, ...] = ()


def _beam_search(
    logits: _Logits, seen: Tensor, tokens: Tensor, *, end: int, most: int, beams: int
) -> list[list[int]]:
    """Keep the most probable unfinished hypotheses of each image, until none can exceed the best finished one."""
    count, first = tokens.shape
    tokens = tokens[:, None].expand(-1, beams, -1)  # (B, K, L)
    seen = seen.repeat_interleave(beams, dim=0)
    sums = torch.full((count, beams), -math.inf, device=seen.device, dtype=torch.float64)
    sums[:, 0] = 0.0
    best = [_Best() for _ in range(count)]
    for place in range(first, most + 1):
        generated = place - first + 1
        scores = logits(seen, tokens.flatten(0, 1)).double().log_softmax(dim=-1)
        words = scores.shape[-1]
        scores = sums[..., None] + scores.unflatten(0, (count, beams))  # (B, K, V)
        for number, (value, beam) in enumerate(
            zip(*map(Tensor.tolist, scores[..., end].max(1)), strict=True)
        ):
            if value / generated > best[number].score:
                best[number] = _Best(value / generated, tuple(tokens[number, beam].tolist()))
        scores[..., end] = -math.inf
        sums, index = scores.flatten(1).topk(min(beams, beams * words), dim=-1)  # (B, K)
        parents = index.div(words, rounding_mode="floor")[..., None].expand(-1, -1, place)
        tokens = torch.cat([tokens.gather(1, parents), (index % words)[..., None]], dim=-1)
        # log-likelihoods only fall, and are divided by at most the maximum length
        bounds = (sums[:, 0] / (most - first + 1)).tolist()
        if all(one.score >= bound for one, bound in zip(best, bounds, strict=True)):
            break
    else:
        for number, value in enumerate((sums[:, 0] / (most - first + 1)).tolist()):  # without an end
            if value > best[number].score:
                best[number] = _Best(value, tuple(tokens[number, 0].tolist()))
    return [list(one.tokens) for one in best]

"""Generate captions of images (greedy, nucleus sampling, beam search), and compare captions by likelihood.

Letters in shape comments: B images, K rows of each image, such as beams, L new tokens, T tokens so far, M tokens of
an image, P captions, V words of the vocabulary.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from clipkit.errors import ConfigError, DataError
from clipkit.files.splitmix import MASK, mix
from clipkit.model.clip import CLIP
from clipkit.model.towers import Cached, at_least_float32, widest_dtype
from clipkit.model.zero_shot import evaluation_mode


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

    Settings are those of ``clipkit.caption``. By default the most probable token is taken at each step; of the
    hypotheses of a beam search that ended, the one with the highest mean log-likelihood per generated token is
    returned. Nucleus sampling is that of Holtzman et al. 2020
    (https://arxiv.org/abs/1904.09751).

    Args:
        model: a CLIP with a decoder of captions, used in evaluation mode.
        pixels: (B, 3, S, S) uint8, or normalized float, on the model's device.
        rows: B numbers that distinguish the samples of images; by default 0, 1, …
    """
    start, end, most = check_generation(model, beams=beams, top_p=top_p, prefix=prefix, length=length)
    if not len(pixels):
        return []
    with evaluation_mode(model):
        prefixes = Prefixes(model, model.image_tokens(pixels)[1])
        tokens = start.to(pixels.device).expand(len(pixels), -1)  # (B, L)
        if beams > 1:
            sequences = _search_beams(prefixes, tokens, end=end, most=most, beams=beams)
        else:
            if rows is None:
                rows = range(len(pixels))
            keys = [mix((seed + mix(row)) & MASK) for row in rows]
            sequences = _sample_tokens(prefixes, tokens, end=end, most=most, top_p=top_p, keys=keys)
    return [" ".join(model.tokenizer.decode(row[1:]).split()) for row in sequences]


@torch.no_grad()
def caption_likelihoods(model: CLIP, image_tokens: Tensor, captions: Tensor) -> Tensor:
    """Compute log p of each caption given each image: (B, P), at least float32.

    Distinct prefixes are computed once, so captions with a common beginning cost less.

    Args:
        image_tokens: (B, M, W), see ``CLIP.image_tokens``.
        captions: (P, T) int64, see ``CLIP.forward``; tokens beyond the decoder's context length are left out.
    """
    assert model.text_decoder is not None
    prefixes = Prefixes(model, image_tokens)
    longest = model.text_decoder.shape.context_length
    captions = captions.to(image_tokens.device)
    images = torch.arange(len(image_tokens), device=captions.device)[:, None]  # (B, 1)
    counts = captions.argmax(dim=1).clamp(max=longest)  # (P,) predicted tokens
    width = 1  # number of distinct prefixes
    nodes = torch.zeros_like(counts)  # (P,) index of each caption's prefix
    total = at_least_float32(image_tokens.new_zeros(len(image_tokens), len(captions)))
    for position in range(int(counts.max())):
        active = (counts > position).nonzero()[:, 0]
        pairs = torch.stack([nodes[active], captions[active, position]])
        (parents, tokens), nodes[active] = pairs.unique(dim=1, return_inverse=True)  # (K,) each
        rows = (images * width + parents).flatten()  # (BK,)
        width = len(tokens)
        logits = prefixes.extend(tokens.repeat(len(image_tokens))[:, None], rows)  # (BK, V)
        levels = logits.logsumexp(dim=1).view(-1, width)
        token_logits = logits.view(-1, width, logits.shape[1])[
            :, nodes[active], captions[active, position + 1]
        ]
        total[:, active] += token_logits - levels[:, nodes[active]]
    return total


class Prefixes:
    """Beginnings of captions of images, extended by one token at a time, each of which is computed once.

    Keys and values of all tokens in the blocks of self-attention are kept, and those of the images in the blocks of
    cross-attention.

    Args:
        image_tokens: (B, M, W), see ``CLIP.image_tokens``.

    Attributes:
        tokens: (BK, T) int64, the beginnings; B without tokens at first.
    """

    def __init__(self, model: CLIP, image_tokens: Tensor) -> None:
        assert model.text_decoder is not None
        self._model, self._decoder = model, model.text_decoder
        image_tokens = self._decoder.project_image(image_tokens)
        self._images = [block.keys_values(image_tokens) for block in self._decoder.cross_blocks]
        text_blocks = model.transformer.blocks if model.text is None else []
        # of a text tower before the decoder
        self._text = [Cached() for _ in text_blocks]
        self._cached = [Cached() for _ in self._decoder.blocks or text_blocks]
        self.tokens = torch.empty(len(image_tokens), 0, dtype=torch.int64, device=image_tokens.device)

    def extend(self, tokens: Tensor, rows: Tensor | None = None) -> Tensor:
        """Append tokens, and compute the logits of the next one.

        Args:
            tokens: (BK, L) int64, where L may be above 1 in the first call only, and BK other than before only with
                ``rows``.
            rows: (BK,) int64, the row to which each is appended, of the same image; None for the same rows.

        Returns:
            (BK, V), at least float32.
        """
        before = self.tokens
        first = before.shape[1]
        if rows is not None:
            before = before[rows]
            for cached in (*self._cached, *self._text):
                cached.select(rows)
        self.tokens = torch.cat([before, tokens], dim=1)
        text = self._model.decoder_input(self.tokens, first=first, cached=self._text)
        x = self._decoder.embed(tokens, first=first) if text is None else text.x
        hidden = self._decoder.apply_blocks(x, self._cached, self._images, text)[:, -1]
        logits = self._decoder.logits(hidden)
        if not logits.sum().isfinite():
            raise DataError("the model's logits of captions are not finite: its weights are damaged")
        return logits


def check_generation(
    model: CLIP, *, beams: int, top_p: float, prefix: str, length: int
) -> tuple[Tensor, int, int]:
    """Check the arguments of ``generate_captions``.

    Returns:
        (1, L) int64 the start of text and the prefix, the id of end of text, and the maximum number of tokens after
        the start.
    """
    decoder = model.text_decoder
    if decoder is None:
        raise ConfigError("the model cannot describe images: it was trained without caption.weight")
    if beams < 1 or length < 0:
        raise ConfigError(f"beams = {beams} or length = {length} is invalid: expected at least 1 and 0")
    if not 0 <= top_p <= 1:
        raise ConfigError(f"top_p = {top_p} is invalid: expected 0 to 1")
    if top_p and beams > 1:
        raise ConfigError("top_p (--top-p) cannot be combined with beams (--beams)")
    # long enough for all of its tokens, of which there are at most as many as bytes
    row = model.tokenizer.replace_length(len(prefix.encode()) + 8)([prefix])[0]
    end = int(row.argmax())
    longest = decoder.shape.context_length
    most = min(length or longest, longest)
    if (row[1:end] == row[0]).any() or (row[end + 1 :] != row[-1]).any():  # the rest is padding
        raise DataError(f"the prefix {prefix[:40]!r} contains the start or the end of a text: leave it out")
    if end > most:  # the prefix and the end
        raise DataError(f"the prefix has {end - 1} tokens, but captions have at most {most} with the end")
    return row[None, :end], int(row[end]), most


def _sample_tokens(
    prefixes: Prefixes, tokens: Tensor, *, end: int, most: int, top_p: float, keys: Sequence[int]
) -> list[list[int]]:
    """Extend each row (B, L) by one token at a time until all have ended; return the rows without the end."""
    running = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
    for position in range(tokens.shape[1], most + 1):
        scores = prefixes.extend(tokens)  # (B, V)
        if top_p:
            uniform = torch.tensor([(mix((key + position) & MASK) >> 11) * 2.0**-53 for key in keys])
            chosen = _draw_from_nucleus(scores, uniform.to(scores.device, torch.float32), top_p)
        else:
            chosen = scores.argmax(dim=-1)
        tokens = torch.where(running, chosen, end)[:, None]
        running &= chosen != end
        if not running.any():
            break
    rows: list[list[int]] = torch.cat([prefixes.tokens, tokens], dim=1).tolist()
    return [row[: row.index(end)] if end in row else row for row in rows]


def _draw_from_nucleus(logits: Tensor, uniform: Tensor, top_p: float) -> Tensor:
    """Draw one of the most probable tokens of each row, (B, V) and (B,) in 0 … 1 → (B,)."""
    values, order = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    sums = values.cumsum(dim=-1)
    nucleus = values * (sums - values < top_p)  # the first is always kept
    sums = nucleus.cumsum(dim=-1)
    index = torch.searchsorted(sums, (uniform * sums[:, -1])[:, None], right=True)
    index = index.minimum((nucleus > 0).sum(dim=-1, keepdim=True) - 1)
    return order.gather(1, index)[:, 0]


def _search_beams(prefixes: Prefixes, tokens: Tensor, *, end: int, most: int, beams: int) -> list[list[int]]:
    """Keep the most probable unfinished hypotheses of each image, until none can exceed the best finished one."""
    count, first = tokens.shape
    longest = most - first + 1
    # the best finished hypothesis of each image: mean of log p, and tokens
    best: list[tuple[float, list[int]]] = [(-math.inf, [])] * count
    wide = widest_dtype(tokens.device)
    sums = torch.zeros(count, 1, dtype=wide, device=tokens.device)  # (B, K) of log p
    rows: Tensor | None = None
    for generated in range(1, longest + 1):
        logits = prefixes.extend(tokens, rows)  # (BK, V)
        width = sums.shape[1]
        sums = sums - logits.logsumexp(dim=-1).to(wide).view(count, width)
        ended = sums + logits[:, end].view(count, width)
        values, winners = ended.max(dim=1)  # (B,) each
        for i, (value, beam) in enumerate(zip(values.tolist(), winners.tolist(), strict=True)):
            if value / generated > best[i][0]:
                best[i] = value / generated, prefixes.tokens[i * width + beam].tolist()
        logits[:, end] = -math.inf
        values, words = logits.topk(min(beams, logits.shape[1]), dim=-1)  # (BK, K')
        scores = (sums.view(-1, 1) + values).view(count, -1)
        sums, indices = scores.topk(min(beams, scores.shape[1]), dim=-1)  # (B, K)
        tokens = words.view(count, -1).gather(1, indices).view(-1, 1)
        starts = torch.arange(0, count * width, width, device=indices.device)[:, None]
        rows = (starts + indices.div(values.shape[1], rounding_mode="floor")).flatten()
        # log-likelihoods only fall, and are divided by at most the maximum length
        bounds = (sums[:, 0] / longest).tolist()
        if all(score >= bound for (score, _), bound in zip(best, bounds, strict=True)):
            break
    else:
        assert rows is not None
        for i, value in enumerate(bounds):  # without an end
            if value > best[i][0]:
                row = i * sums.shape[1]
                best[i] = value, [*prefixes.tokens[rows[row]].tolist(), int(tokens[row])]
    return [sequence for _, sequence in best]

"""Samples as the model sees them: the picture after the training's crop, the caption up to where it is cut."""

import io

import torch

from clipkit.tokenizer import CONTEXT_LENGTH
from data.inspect.caption_survey import token_counts
from data.inspect.findings import SheetEntry
from data.inspect.one_sample import Trial

__all__ = ["sheet_entry"]

_MAX_SIDE = 224  # pixels of a picture on the page
_QUALITY = 80
_MAX_CAPTION, _MAX_REST = 500, 160  # characters


def sheet_entry(trial: Trial) -> SheetEntry:
    """A good sample, with its crop, as a page shows it."""
    assert trial.crop is not None and trial.caption is not None
    caption = trial.caption[: 10 * _MAX_CAPTION]
    tokens = token_counts([caption])[0]
    seen = _seen(caption) if tokens > CONTEXT_LENGTH else caption
    rest = caption[len(seen) :]
    return SheetEntry(
        picture=_webp(trial.crop),
        caption=seen[:_MAX_CAPTION] + "…" * (len(seen) > _MAX_CAPTION),
        rest=rest[:_MAX_REST] + "…" * (len(rest) > _MAX_REST),
        tokens=tokens,
        place=trial.place,
    )


def _seen(caption: str) -> str:
    """The longest beginning of a caption that the model sees whole, by bisection."""
    low, high = 0, len(caption)
    while low < high:
        middle = (low + high + 1) // 2
        if token_counts([caption[:middle]])[0] <= CONTEXT_LENGTH:
            low = middle
        else:
            high = middle - 1
    return caption[:low]


def _webp(crop: torch.Tensor) -> bytes:
    """(3, S, S) uint8 → a WebP file."""
    from PIL import Image

    image = Image.fromarray(crop.permute(1, 2, 0).contiguous().numpy())
    if image.width > _MAX_SIDE:
        image = image.resize((_MAX_SIDE, _MAX_SIDE), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "WEBP", quality=_QUALITY)
    return file.getvalue()

"""The page of ``clipkit classify --review``: the least certain images, to correct their labels.

Corrections are saved by the browser as a table with the columns image_path and caption, which
``python -m data pack`` reads.
"""

import base64
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from clipkit.errors import DataError
from clipkit.files.pages import write_page

if TYPE_CHECKING:
    from clipkit.inference.classify import Classification

__all__ = ["Uncertain", "note_uncertain", "write_review"]

MOST = 200  # images on a page


@dataclass(order=True, frozen=True)
class Uncertain:
    """An image, ordered so that the most certain one is the least."""

    negative_margin: float
    found: "Classification" = field(compare=False)


def note_uncertain(kept: list[Uncertain], found: "Classification") -> None:
    """Keep an image, on a heap, if it is among the least certain ones."""
    one = Uncertain(-found.margin, found)
    if len(kept) < MOST:
        heapq.heappush(kept, one)
    else:
        heapq.heappushpop(kept, one)


def write_review(out: Path, kept: Sequence[Uncertain], labels: Sequence[str]) -> Path:
    """Write the page, the least certain images first.

    Raises:
        DataError: it cannot be written.
    """
    from clipkit.inference.search import TEMPLATES, Hit, thumbnail  # needs the extra pack

    images = []
    for one in sorted(kept, reverse=True):
        hit = Hit(id="", similarity=0.0, path=one.found.image, source=one.found.source, metadata={})
        try:
            data = base64.b64encode(thumbnail(hit, 240)).decode()
        except DataError:
            continue
        images.append({"found": one.found, "image": Markup("data:image/jpeg;base64,") + data})
    title = "Labels to review"
    lead = (
        "The least certain images first. Choose the right label where it is wrong, then save the corrections."
    )
    page = TEMPLATES.get_template("review.html").render(
        title=title, lead=lead, notes=[], images=images, labels=labels
    )
    return write_page(out, page)

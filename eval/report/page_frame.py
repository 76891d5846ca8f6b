"""The frame of every page: one file that carries styles, script and pictures in itself, and asks for nothing.

The page's own security policy forbids what is not inside. All text that comes from data is escaped by those who
make the sections.
"""

import base64
import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path

from clipkit.errors import DataError
from eval.report.pictures import PictureBook

__all__ = ["Section", "page", "scrolling", "write_page"]

_HERE = Path(__file__).parent
_SHOWN = 200  # characters of a path in a message


@dataclass(frozen=True, kw_only=True)
class Section:
    """A titled part of the page; one without content is left out."""

    name: str
    title: str
    content: str
    lead: str = ""

    def html(self) -> str:
        """The section as an element."""
        lead = f'<p class="lead">{self.lead}</p>' if self.lead else ""
        return f'<section id="{self.name}"><h2>{self.title}</h2>{lead}{self.content}</section>\n'


def page(
    title: str, head: str, sections: Sequence[Section], book: PictureBook, *, styles: Sequence[str] = ()
) -> str:
    """A whole page.

    Args:
        title: plain text; "clipkit" is added.
        head: what stands above the links to the sections, as HTML.
        sections: in order.
        book: the pictures that head and sections show.
        styles: style sheets beside ``page.css``, by their file names.
    """
    shown = [section for section in sections if section.content]
    links = "".join(f'<a href="#{section.name}">{section.title}</a>' for section in shown)
    body = "".join(section.html() for section in shown)
    style = "\n".join((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", *styles))
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)} – clipkit</title>\n"
        f"<style>\n{style}\n{book.style()}\n</style></head>\n"
        f'<body><main>{head}<nav aria-label="Sections">{links}</nav>\n{body}</main>\n'
        f"<script>{script}</script></body></html>\n"
    )


def write_page(out: Path, text: str) -> Path:
    """Write a page or table, which appears whole or not at all; into a pipe or device it goes as it comes.

    Raises:
        DataError: it cannot be written.
    """
    # a caption may hold half of a surrogate pair, which UTF-8 cannot carry
    data = text.encode("utf-8", errors="replace")
    aside = None
    try:
        real = out.resolve()  # what a link leads to is written, and the link stays
        if real.exists() and not real.is_file():  # such as /dev/null, in whose place no file may come
            real.write_bytes(data)
            return out
        aside = real.with_name(f".{os.getpid()}.partial")  # short, as the name may be as long as any can be
        real.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(data)
        aside.replace(real)
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself; a null character
        if aside is not None:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"cannot write {str(out)[:_SHOWN]}: {said}") from error
    return out


def scrolling(label: str, content: str, *, kind: str = "") -> str:
    """Something wide, in a frame that scrolls sideways and that the keyboard reaches."""
    name = f"scroll {kind}".strip()
    return f'<div class="{name}" tabindex="0" role="region" aria-label="{escape(label)}">{content}</div>'

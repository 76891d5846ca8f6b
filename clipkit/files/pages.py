"""Render jinja2 templates, among them self-contained HTML pages: one file, no network, light and dark.

The frame shared by all pages is ``templates/page.html`` with ``templates/page.css``. Everything that a template
prints is escaped, and the security policy in the page forbids anything outside the file.
"""

import base64
import hashlib
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

from clipkit.errors import DataError

__all__ = ["templates", "write_page"]

_SHARED = Path(__file__).with_name("templates")


@cache
def templates(folder: Path, *, html: bool = True) -> jinja2.Environment:
    """Load templates from a folder, and from the one shared by all pages.

    Args:
        folder: contains templates, style sheets and scripts.
        html: escape what templates print; false for Markdown.
    """
    loader = jinja2.FileSystemLoader([folder, _SHARED])
    environment = jinja2.Environment(
        loader=loader,
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    # style sheets and scripts are included as they are, and hashed for the security policy
    environment.globals["source"] = lambda name: Markup(loader.get_source(environment, name)[0])
    environment.filters["sha256"] = lambda text: base64.b64encode(
        hashlib.sha256(text.encode()).digest()
    ).decode()
    return environment


def write_page(out: Path, text: str) -> Path:
    """Write a page or table atomically; into a pipe or device, directly.

    Raises:
        DataError: it cannot be written.
    """
    data = text.encode("utf-8", errors="replace")  # half of a surrogate pair in a caption has no UTF-8
    partial = None
    try:
        real = out.resolve()  # the target of a link is written, and the link stays
        if real.exists() and not real.is_file():  # such as /dev/null, which must not be replaced
            real.write_bytes(data)
            return out
        partial = real.with_name(
            f".{os.getpid()}.partial"
        )  # short: the name may have the maximal length already
        real.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(real)
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself; a null character
        if partial is not None:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"cannot write {str(out)[:200]}: {reason}") from error
    return out

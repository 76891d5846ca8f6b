"""Render jinja2 templates, such as self-contained HTML pages with a light and a dark theme.

All pages extend ``templates/page.html`` with ``templates/page.css``. Output is escaped, and the content security
policy forbids loading anything from outside the file.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from clipkit.errors import ConfigError, DataError
from clipkit.files.writing import write_atomic

if TYPE_CHECKING:
    import jinja2

_SHARED = Path(__file__).with_name("templates")


@cache
def templates(folder: Path, *, html: bool = True) -> "jinja2.Environment":
    """Load templates from a folder and from the folder shared by all pages."""
    import base64
    import hashlib

    import jinja2
    from markupsafe import Markup

    loader = jinja2.FileSystemLoader([folder, _SHARED])
    environment = jinja2.Environment(
        loader=loader,
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    # style sheets and scripts are included unescaped; scripts are hashed for the security policy
    environment.globals["source"] = lambda name: Markup(loader.get_source(environment, name)[0])
    environment.filters["sha256"] = lambda text: base64.b64encode(
        hashlib.sha256(text.encode()).digest()
    ).decode()
    return environment


def check_page(option: str, out: Path | None) -> None:
    """Check that the file name of a page ends in .html, so that a slip replaces no other file."""
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{option} {out} must be a file name ending in .html")


def write_page(out: Path, text: str) -> Path:
    """Write a page or table atomically, creating its folder; pipes and devices are written directly."""
    try:
        real = out.resolve()  # replace the target of a link, not the link
        if real.exists() and not real.is_file():  # such as /dev/null, which must not be replaced
            real.write_bytes(text.encode("utf-8", "replace"))
        else:
            real.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(real, text)
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself, or a null character
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"cannot write {str(out)[:200]}: {reason}") from error
    return out

"""Render jinja2 templates, among them self-contained HTML pages: one file, no network, light and dark.

The frame shared by all pages is ``templates/page.html`` with ``templates/page.css``. Everything that a template
prints is escaped, and the security policy in the page forbids anything outside the file.
"""

import base64
import hashlib
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

__all__ = ["templates"]

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

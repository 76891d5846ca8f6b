"""Where clipkit keeps what it can make again: built-in corpora and shard indexes."""

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """``$CLIPKIT_CACHE``, else ``$XDG_CACHE_HOME/clipkit``, else ``~/.cache/clipkit``; not created here."""
    if own := os.environ.get("CLIPKIT_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "clipkit"
    return Path.home() / ".cache" / "clipkit"

"""Where clipkit keeps what it can make again: built-in corpora, indexes of shards, copies of remote ones."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clipkit.errors import ConfigError
from data.remote.shard_file import is_remote

if TYPE_CHECKING:
    from data.remote.cache import ShardCache

__all__ = ["cache_folder", "shard_cache"]


def cache_folder() -> Path:
    """``$CLIPKIT_CACHE``, else ``$XDG_CACHE_HOME/clipkit``, else ``~/.cache/clipkit``; not created here."""
    if own := os.environ.get("CLIPKIT_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "clipkit"
    return Path.home() / ".cache" / "clipkit"


def shard_cache(sources: Sequence[str], gigabytes: float) -> "ShardCache | None":
    """Where this machine keeps up to so much of remote shards; None if there are none, or nothing is to be kept."""
    if not gigabytes and any(source.startswith("pipe:") for source in sources):
        raise ConfigError(
            "what a pipe: writes can be read only once: it needs a cache, data.cache_gb (or --cache-gb) above 0"
        )
    if not gigabytes or not any(map(is_remote, sources)):
        return None
    from data.remote.cache import ShardCache

    return ShardCache(cache_folder() / "shards", int(gigabytes * 1e9))

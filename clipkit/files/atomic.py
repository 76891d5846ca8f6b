"""Write files that appear complete or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["replacing", "sync", "temporary_path", "write_atomic"]


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to ``path`` and rename it to ``path`` when the block ends.

    If the block fails, the temporary file is removed, so that a full disk does not stay full.

    Args:
        path: the file to create or replace; its folder exists.
        durable: whether the content and the new name survive a power failure (``fsync``).
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        if durable:
            sync(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        sync(path.parent)


def write_atomic(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file as ``replacing`` does; half a surrogate pair in a text becomes a question mark."""
    with replacing(path, durable=durable) as temporary:
        temporary.write_bytes(content.encode("utf-8", "replace") if isinstance(content, str) else content)


def temporary_path(path: Path) -> Path:
    """Return a hidden name next to ``path`` that no other process on any host uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

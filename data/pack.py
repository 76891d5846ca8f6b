"""Packs anyone's own pictures, listed in a table with a path and a caption column, into a dataset folder.

The table is CSV, TSV, JSONL or Parquet; paths in it are relative to its folder. JPEG, PNG and WebP files are
stored byte for byte, whatever their suffix says; other pictures (GIF, BMP, TIFF, PPM; AVIF where Pillow reads
it) are stored as PNG, of an animation the first frame. ``max_side`` makes larger pictures smaller.

Every row is accounted for: a row that cannot be used is counted by cause and listed in ``bad_rows.jsonl`` of
the folder. Every picture is decoded once, so that a broken one is found now and not in the middle of a
training. Memory does not grow with the table.
"""

import io
import json
import os
import stat
import struct
import warnings
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from PIL import Image, ImageOps, UnidentifiedImageError
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from clipkit.errors import ConfigError, DataError
from clipkit.table import Row, Table
from data.writer import DatasetWriter, Record

__all__ = ["PackReport", "pack"]

LARGEST_FILE = 64 * 2**20  # bytes
MOST_PIXELS = 100_000_000
LONGEST_CAPTION = 10_000  # characters
STORED_AS_IS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}
READ = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")  # none of them runs a program
# all that Pillow's decoders raise on broken bytes; MemoryError for sizes that a header only claims
BROKEN = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError, MemoryError,
    NotImplementedError, AttributeError, struct.error, zlib.error,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PackReport:
    """What became of a table's rows: how many were packed, and how many were bad, by cause."""

    packed: int
    bad: Mapping[str, int]
    image_column: str
    caption_column: str
    bad_rows: Path | None  # where the bad rows are listed; None if there are none


class _BadRow(Exception):
    """The cause for which a row cannot be used, in words that are the same for all rows of that cause."""


def pack(
    table: Path,
    out: Path,
    *,
    image_column: str | None = None,
    caption_column: str | None = None,
    samples_per_shard: int = 10_000,
    max_side: int | None = None,
    progress: bool = True,
) -> PackReport:
    """Write the pictures and captions of ``table`` as split "train" of a new dataset folder ``out``.

    A sample's key is its row number, which starts at 1 behind the header, in nine digits.

    Args:
        table: a .csv, .tsv, .tab, .jsonl, .ndjson, .parquet or .pq file.
        out: the folder to make; it must not exist, or be empty.
        image_column: the column with the paths; guessed from the usual names if not given.
        caption_column: the column with the captions; guessed likewise.
        samples_per_shard: samples of each tar.
        max_side: pictures with a longer side than this many pixels are reduced to it and encoded anew (JPEG
            and WebP at quality 95, everything else as PNG).
        progress: show a progress bar on stderr.

    Raises:
        ConfigError: ``samples_per_shard`` or ``max_side`` is not positive.
        DataError: the table cannot be read, its columns cannot be told, or no row of it can be used.
    """
    for name, value in (("samples_per_shard", samples_per_shard), ("max_side", max_side)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} = {value}: it must be 1 or more")
    source = Table(table, image_column=image_column, caption_column=caption_column)
    bad: Counter[str] = Counter()
    firsts: dict[str, str] = {}
    with DatasetWriter(out, samples_per_shard=samples_per_shard) as writer, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, on broken pictures: they end in the list of bad rows
        listing = writer.extra_file("bad_rows.jsonl")
        with listing.open("w", encoding="utf-8") as file, _Bar(progress) as bar:
            for row, outcome in _in_order(source, max_side):
                if isinstance(outcome, Record):
                    writer.write("train", outcome)
                else:
                    bad[outcome] += 1
                    firsts.setdefault(outcome, f"row {row.number}{_shown(row.path)}")
                    _list(file, row, outcome)
                bar.show(row.progress, row.number, bad.total())
        packed = writer.counts.get("train", 0)
        if not packed:
            causes = "; ".join(f"{count} × {cause} ({firsts[cause]})" for cause, count in bad.most_common())
            raise DataError(f"no row of {table} can be packed: {causes or 'it has no rows'}")
        if not bad:
            listing.unlink()
        writer.finish(
            {
                "name": table.stem,
                "description": "pictures and captions of a table",
                "made_by": "python -m data pack",
                "source": table.name,
                "columns": {"image": source.image_column, "caption": source.caption_column},
                "max_side": max_side,
                "bad_rows": dict(bad.most_common()),
                "license": "not known: that of the pictures",
            }
        )
    return PackReport(
        packed=packed,
        bad=dict(bad.most_common()),
        image_column=source.image_column,
        caption_column=source.caption_column,
        bad_rows=out / "bad_rows.jsonl" if bad else None,
    )


def _in_order(source: Table, max_side: int | None) -> Iterator[tuple[Row, Record | str]]:
    """Each row with its sample, or with the cause for which there is none, in the order of the table."""
    Image.init()
    workers = min(8, os.cpu_count() or 1)  # threads: files are read and decoded outside the interpreter lock
    waiting: deque[tuple[Row, Future[Record | str]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for row in source:
            waiting.append((row, pool.submit(_sample, row, source.path.parent, max_side)))
            if len(waiting) > 2 * workers:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()


def _sample(row: Row, folder: Path, max_side: int | None) -> Record | str:
    try:
        caption = _caption(row)
        image, extension = _picture(_bytes(row, folder), max_side)
    except _BadRow as cause:
        return str(cause)
    return Record(key=f"{row.number:09d}", image=image, extension=extension, caption=caption)


def _caption(row: Row) -> str:
    if row.cause:
        raise _BadRow(row.cause)
    if row.caption is None or (isinstance(row.caption, str) and not row.caption.strip()):
        raise _BadRow("empty caption")
    if not isinstance(row.caption, str):
        raise _BadRow("caption is not text")
    if len(row.caption) > LONGEST_CAPTION:
        raise _BadRow(f"caption of more than {LONGEST_CAPTION:,} characters")
    if any(mark == "\ufffd" or "\ud800" <= mark <= "\udfff" for mark in row.caption):
        raise _BadRow("caption is not UTF-8")
    return row.caption.strip()


def _bytes(row: Row, folder: Path) -> bytes:
    """The picture file of a row, whole."""
    given = row.path
    if given is None or given == "":
        raise _BadRow("no path")
    if not isinstance(given, str):
        raise _BadRow("path is not text")
    if given.startswith(("http://", "https://", "s3://", "gs://", "ftp://")):
        raise _BadRow("a web address, not a file: download it first")
    try:
        path = folder / given.removeprefix("file://")
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device might never end
            raise _BadRow("not a file")
        if status.st_size > LARGEST_FILE:
            raise _BadRow(f"file of more than {LARGEST_FILE // 2**20} MiB")
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE)
    except (FileNotFoundError, NotADirectoryError):
        raise _BadRow("missing file") from None
    except (OSError, ValueError):  # ValueError: a path with a null byte, or letters the system lacks
        raise _BadRow("file cannot be read") from None
    if not data:
        raise _BadRow("empty file")
    return data


def _picture(data: bytes, max_side: int | None) -> tuple[bytes, str]:
    """A picture's bytes as they are stored, and their extension; the picture is decoded to see that it is whole."""
    known = tuple(name for name in READ if name in Image.OPEN)
    try:
        with Image.open(io.BytesIO(data), formats=known) as image:
            if image.width * image.height > MOST_PIXELS:
                raise _BadRow(f"picture of more than {MOST_PIXELS:,} pixels")
            too_large = max_side is not None and max(image.size) > max_side
            extension = STORED_AS_IS.get(image.format or "")
            if extension and not too_large:
                # an eighth of the size is enough to run through all bytes of a JPEG, and faster
                image.draft(None, (max(1, image.width // 8), max(1, image.height // 8)))
                image.load()
                return data, extension
            return _encoded(image, max_side if too_large else None)
    except Image.DecompressionBombError:
        raise _BadRow(f"picture of more than {MOST_PIXELS:,} pixels") from None
    except UnidentifiedImageError:
        raise _BadRow("not a picture of a known format") from None
    except BROKEN:
        raise _BadRow("broken or truncated picture") from None


def _encoded(image: Image.Image, max_side: int | None) -> tuple[bytes, str]:
    """A picture reduced to ``max_side``, if given, upright, and encoded anew."""
    extension = STORED_AS_IS.get(image.format or "", "png")
    if image.mode.startswith(("I", "F")):
        raise _BadRow("more than 8 bits a pixel: convert it first")
    if max_side is not None:
        image.draft("RGB", (2 * max_side, 2 * max_side))
    upright = ImageOps.exif_transpose(image)
    mode = "RGBA" if upright.has_transparency_data else "RGB"
    upright = upright.convert("L" if upright.mode in ("1", "L") else mode)
    if max_side is not None:
        upright.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    upright.save(buffer, {"jpg": "JPEG", "webp": "WEBP"}.get(extension, "PNG"), quality=95)
    return buffer.getvalue(), extension


def _list(file: TextIO, row: Row, cause: str) -> None:
    path = row.path if isinstance(row.path, str) else None
    line = {"row": row.number, "path": path and path[:4096], "cause": cause}
    file.write(json.dumps(line) + "\n")  # ASCII, so that a path that is no UTF-8 can be listed too


def _shown(path: object) -> str:
    return f": {path[:80]!r}" if isinstance(path, str) and path else ""


class _Bar:
    """A progress bar on stderr, with how many rows were read and how many were bad."""

    def __init__(self, visible: bool) -> None:
        self._progress = Progress(
            TextColumn("packing"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[rows]:,} rows, {task.fields[bad]:,} bad"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not visible,
            expand=True,
        )
        self._task = self._progress.add_task("", total=1.0, rows=0, bad=0)

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, done: float, rows: int, bad: int) -> None:
        self._progress.update(self._task, completed=done, rows=rows, bad=bad)

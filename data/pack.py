"""Packs anyone's own pictures, listed in a table with a path and a caption column, into a dataset folder.

The table is CSV, TSV, JSONL or Parquet; paths in it are relative to its folder. JPEG, PNG and WebP files are
stored byte for byte, whatever their suffix says, but for those that an EXIF tag says to turn: CLIP's
preprocessing does not heed that tag, so they are turned upright and encoded anew (JPEG at quality 95 with all
colours, PNG without loss, WebP as it was encoded), unless ``keep_orientation`` is set. Other formats are stored
as PNG. ``background`` lays partly transparent pictures on a colour, of which CLIP would see what is hidden
beneath; ``max_side`` makes larger pictures smaller.

``test`` holds a share of the pairs out as split "test". A picture's bytes decide, so equal pictures are all in
one split, and every machine makes the same splits of the same pictures, in whatever order. A larger share takes
more pictures than a smaller one, and all of its pictures.

A row of JSONL may have several captions, as a list. The first is the sample's own, which training takes; all of
them are listed in its json, from where evaluation reads them.

The table's other columns become fields of each sample's json, for ``data.filters`` and ``data.captions``. Numbers,
nested values and texts of JSONL and Parquet stay what they are; what JSON cannot hold is converted as
``data.captions.json_value`` says, and columns of bytes are left out. The cells of CSV and TSV are texts, which
filters compare as numbers where both sides are numbers; empty ones are null. Names that a filter could not spell
are changed (``alt text`` to ``alt_text``), and one that has another meaning here gets a ``_`` (``captions_``,
``caption_``). A column has the same name in every row. Of several columns with the same name the first is used.

Every row is accounted for: a row that cannot be used is counted by cause and listed in ``bad_rows.jsonl`` of
the folder. Every picture is decoded once, so that a broken one is found now and not in the middle of a
training. Memory does not grow with the table.
"""

import hashlib
import json
import os
import stat
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from clipkit.errors import ConfigError, DataError
from clipkit.files.table import Row, Table
from clipkit.files.traits import color_of
from data.captions import field_name, json_value
from data.shards.images import BadImage, Resize, Storing, store_image
from data.shards.writer import DatasetWriter, Record

__all__ = ["BadRow", "FieldNames", "PackReport", "captions_of", "fields_of", "pack"]


LARGEST_FILE = 64 * 2**20  # bytes
LONGEST_CAPTION = 10_000  # characters
MOST_CAPTIONS = 100  # of a picture
LARGEST_JSON = 2**20  # bytes of a sample's json
_OWN_FIELDS = ("caption", "captions")  # of the json, which have a meaning to readers
_MOST_TOLD = 1000  # columns of JSONL, of which any line may have others
_MOST_FIELDS = 100_000  # of a table, so that memory is bounded


@dataclass(frozen=True, kw_only=True)
class PackReport:
    """What became of a table's rows.

    Attributes:
        splits: how many were packed into "train" and into "test".
        bad: how many could not be, by cause.
        image_column: where the paths were.
        caption_column: where the captions were.
        bad_rows: where the bad rows are listed; None if there are none.
        not_upright: packed pictures that an EXIF tag says to turn, as was done unless they were to be kept.
        transparent: packed pictures that are partly transparent, or were before they were laid on a background.
        several_captions: packed pictures with more than one caption.
        fields: the other columns that were kept, with their names in the json.
        left_out: why others were not, by name.
    """

    splits: Mapping[str, int]
    bad: Mapping[str, int]
    image_column: str
    caption_column: str
    bad_rows: Path | None
    not_upright: int
    transparent: int
    several_captions: int
    fields: Mapping[str, str]
    left_out: Mapping[str, str]

    @property
    def packed(self) -> int:
        """How many rows were packed."""
        return sum(self.splits.values())


class BadRow(Exception):
    """The cause for which a row cannot be used, in words that are the same for all rows of that cause."""


@dataclass(frozen=True, kw_only=True)
class _Packed:
    """A row that can be used."""

    split: str
    record: Record
    marks: tuple[str, ...]  # what of the report it counts for
    fields: Mapping[str, str]  # the names in the json of the table's other columns


def pack(
    table: Path,
    out: Path,
    *,
    image_column: str | None = None,
    caption_column: str | None = None,
    fields: Sequence[str] | None = None,
    test: float = 0.0,
    samples_per_shard: int = 10_000,
    max_side: int | None = None,
    keep_orientation: bool = False,
    background: str | None = None,
    progress: bool = True,
) -> PackReport:
    """Write the pictures and captions of ``table`` as a new dataset folder ``out``.

    A sample's key is its row number, which starts at 1 behind the header, in nine digits.

    Args:
        table: a .csv, .tsv, .tab, .jsonl, .ndjson, .parquet or .pq file.
        out: the folder to make; it must not exist, or be empty.
        image_column: the column with the paths; guessed from the usual names if not given.
        caption_column: the column with the captions; guessed likewise.
        fields: other columns that become fields of the samples' json; None for all of them.
        test: the share of the pairs, 0 to 1, that goes to split "test"; the others go to "train".
        samples_per_shard: samples of each tar.
        max_side: pictures with a longer side than this many pixels are reduced to it and encoded anew (JPEG
            and WebP at quality 95, everything else as PNG).
        keep_orientation: leave pictures as they lie in their files, also where an EXIF tag says to turn them.
        background: a colour, by name or as "#rrggbb", on which partly transparent pictures are laid.
        progress: show a progress bar on stderr.

    Raises:
        ConfigError: ``samples_per_shard`` or ``max_side`` is not positive, ``test`` is no share, or
            ``background`` no colour.
        DataError: the table cannot be read, its columns cannot be told, or no row of it can be used.
    """
    for name, value in (("samples_per_shard", samples_per_shard), ("max_side", max_side)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} = {value}: it must be 1 or more")
    if not 0 <= test <= 1:
        raise ConfigError(f"test = {test}: it must be a share from 0 to 1, such as 0.1")
    ground = None if background is None else color_of(background)
    how = Storing(
        resize=Resize(mode="keep_ratio_largest", size=max_side) if max_side else None,
        keep_orientation=keep_orientation,
        background=ground,
    )
    source = Table(table, image_column=image_column, caption_column=caption_column, others=fields)
    with DatasetWriter(out, samples_per_shard=samples_per_shard) as writer, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, on broken pictures: they end in the list of bad rows
        report = _write(source, writer, how, test=test, progress=progress)
        card = {
            "name": table.stem,
            "description": "pictures and captions of a table",
            "made_by": "python -m data pack",
            "source": table.name,
            "columns": {"image": source.image_column, "caption": source.caption_column},
            "fields": report.fields,
            "test": test,
            "max_side": max_side,
            "keep_orientation": keep_orientation,
            "background": background,
            "bad_rows": report.bad,
            "license": "not known: that of the pictures",
        }
        writer.finish(card | ({"tasks": ["retrieval"]} if "test" in report.splits else {}))
    return report


def _write(source: Table, writer: DatasetWriter, how: Storing, *, test: float, progress: bool) -> PackReport:
    """Write what can be used of a table, list the rest, and count both."""
    bad: Counter[str] = Counter()
    marks: Counter[str] = Counter()
    firsts: dict[str, str] = {}
    fields: dict[str, str] = {}
    listing = writer.extra_file("bad_rows.jsonl")
    with listing.open("w", encoding="utf-8") as file, _Bar(progress) as bar:
        for row, outcome in _in_order(source, how, test):
            if isinstance(outcome, _Packed):
                writer.write(outcome.split, outcome.record)
                marks.update(outcome.marks)
                if len(fields) < _MOST_TOLD:
                    fields.update(outcome.fields)
            else:
                bad[outcome] += 1
                firsts.setdefault(outcome, f"row {row.number}{_shown(row.path)}")
                _list(file, row, outcome)
            bar.show(row.progress, row.number, bad.total())
    if not writer.counts:
        causes = "; ".join(f"{count} × {cause} ({firsts[cause]})" for cause, count in bad.most_common())
        raise DataError(f"no row of {source.path} can be packed: {causes or 'it has no rows'}")
    if not bad:
        listing.unlink()
    return PackReport(
        splits=dict(writer.counts),
        bad=dict(bad.most_common()),
        image_column=source.image_column,
        caption_column=source.caption_column,
        bad_rows=writer.out / listing.name if bad else None,
        not_upright=marks["not upright"],
        transparent=marks["transparent"],
        several_captions=marks["several captions"],
        fields=fields,
        left_out=source.left_out,
    )


def _in_order(source: Table, how: Storing, test: float) -> Iterator[tuple[Row, _Packed | str]]:
    """Each row with its sample, or with the cause for which there is none, in the order of the table."""
    Image.init()
    workers = min(8, os.cpu_count() or 1)  # threads: files are read and decoded outside the interpreter lock
    waiting: deque[tuple[Row, Future[_Packed | str]]] = deque()
    names = FieldNames(source.others)
    with ThreadPoolExecutor(workers) as pool:
        for row in source:
            waiting.append(
                (row, pool.submit(_sample, row, names.of(row.others), source.path.parent, how, test))
            )
            if len(waiting) > 2 * workers:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()


def _sample(row: Row, names: Mapping[str, str], folder: Path, how: Storing, test: float) -> _Packed | str:
    try:
        captions = captions_of(row)
        data = _bytes(row, folder)
        picture = store_image(data, how)
        meta = fields_of(row.others, names, captions)
    except (BadRow, BadImage) as cause:
        return str(cause)
    record = Record(
        key=f"{row.number:09d}",
        image=picture.data,
        extension=picture.extension,
        caption=captions[0],
        meta=meta,
    )
    marks = (
        ("not upright", not picture.upright),
        ("transparent", picture.transparent),
        ("several captions", len(captions) > 1),
    )
    return _Packed(
        split=_split(data, test),
        record=record,
        marks=tuple(name for name, there in marks if there),
        fields={json_value(column): name for column, name in names.items()},
    )


class FieldNames:
    """Names of fields in the json for a table's columns, the same in all rows.

    They differ from one another and from fields with a meaning. Of columns that are first seen together, those
    whose own name can be used keep it. At most ``_MOST_FIELDS`` columns get a name.
    """

    def __init__(self, columns: Iterable[str], *, taken: Iterable[str] = ()) -> None:
        self._names: dict[str, str] = {}
        self._own = {*_OWN_FIELDS, *taken}
        self._taken = set(self._own)
        self.of(columns)

    def of(self, columns: Iterable[str]) -> dict[str, str]:
        """The names of these columns, in their order; call it in the order of the table."""
        columns = list(columns)
        new = [column for column in columns if column not in self._names]
        for column in sorted(new, key=lambda column: field_name(column) != column or column in self._own):
            if len(self._names) == _MOST_FIELDS:
                break
            name = field_name(column)
            while name in self._taken:
                name += "_"
            self._taken.add(name)
            self._names[column] = name
        return {column: self._names[column] for column in columns if column in self._names}


def fields_of(
    others: Mapping[str, object], names: Mapping[str, str], captions: Sequence[str]
) -> dict[str, Any]:
    """A sample's json, of a size that training reads."""
    if len(names) < len(others):
        raise BadRow(f"more than {_MOST_FIELDS:,} different columns in the table (--fields chooses some)")
    try:
        meta = {names[column]: json_value(value) for column, value in others.items()}
        size = len(json.dumps(meta, ensure_ascii=False).encode())
    except RecursionError:
        raise BadRow("other columns have too many lists in one another") from None
    if size > LARGEST_JSON:
        raise BadRow(f"other columns of more than {LARGEST_JSON // 2**20} MiB (--fields chooses some)")
    # a line break would make several captions of one, so that is told in the list too
    if len(captions) > 1 or "\n" in captions[0]:
        meta["captions"] = list(captions)
    return meta


def _split(data: bytes, test: float) -> str:
    """The split of a picture file, by its bytes alone."""
    if not test:
        return "train"
    number = int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
    return "test" if number < test * 2**64 else "train"


def captions_of(row: Row) -> list[str]:
    """The captions of a row, at least one; blank ones of several are left out."""
    if row.cause:
        raise BadRow(row.cause)
    given = row.caption if isinstance(row.caption, list) else [row.caption]
    texts = [one for one in given if isinstance(one, str)]
    if len(texts) + given.count(None) < len(given):
        raise BadRow("caption is not text, nor a list of texts")
    captions = [text.strip() for text in texts if text.strip()]
    if not captions:
        raise BadRow("empty caption")
    if len(captions) > MOST_CAPTIONS:
        raise BadRow(f"more than {MOST_CAPTIONS} captions")
    for one in captions:
        if len(one) > LONGEST_CAPTION:
            raise BadRow(f"caption of more than {LONGEST_CAPTION:,} characters")
        if any(mark == "\ufffd" or "\ud800" <= mark <= "\udfff" for mark in one):
            raise BadRow("caption is not UTF-8")
    return captions


def _bytes(row: Row, folder: Path) -> bytes:
    """The picture file of a row, whole."""
    given = row.path
    if given is None or given == "":
        raise BadRow("no path")
    if not isinstance(given, str):
        raise BadRow("path is not text")
    if given.startswith(("http://", "https://", "s3://", "gs://", "ftp://")):
        raise BadRow("a web address, not a file: download it first")
    try:
        path = folder / given.removeprefix("file://")
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device might never end
            raise BadRow("not a file")
        if status.st_size > LARGEST_FILE:
            raise BadRow(f"file of more than {LARGEST_FILE // 2**20} MiB")
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE)
    except (FileNotFoundError, NotADirectoryError):
        raise BadRow("missing file") from None
    except (OSError, ValueError):  # ValueError: a path with a null byte, or letters the system lacks
        raise BadRow("file cannot be read") from None
    if not data:
        raise BadRow("empty file")
    return data


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

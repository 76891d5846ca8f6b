"""Pack images and captions of a table or a folder into a dataset folder.

A table lists paths of images, or holds encoded images (Parquet). In a folder, each image has its captions in a file
of the same name (see ``clipkit.samples.caption_files``); or a table directly in the folder lists them, such as
``captions.csv``; or there are no captions and a subfolder for each class, whose name is the caption. The table
``metadata.csv`` of the Hugging Face hub precedes files of captions.

Images: JPEG, PNG and WebP files are stored byte for byte, except those with an EXIF orientation, which CLIP's
preprocessing ignores; they are stored upright (JPEG at quality 95 without chroma subsampling, PNG without loss,
WebP as it was encoded). Other formats become PNG. Every image is decoded once, to find broken ones before training.

Splits: the hash of an image's bytes decides between train and test, so that equal images are in one split and the
splits are the same on all machines. A larger test fraction is a superset of a smaller one.

Captions: a row may have a list of captions, and rows of the same image become one sample with the captions of all.
Equal captions of an image are stored once. By default training uses the first; ``data.captions=captions`` with
``data.caption_choice=random`` draws one of them. Evaluation reads all from the json.

Rows have the same image if their paths are equal, except for "./", "//", "\\" and "file://", or if their encoded
images have the same bytes. The sample has the key and the image of the first of these rows. Columns with different
values become lists with the value of each row.

Other columns become fields of the json, for ``data.filters`` and ``data.captions``. Values of JSONL and Parquet
keep their types (see ``data.captions.json_value``); cells of CSV and TSV are strings, empty ones null. Names that
are invalid in filters are changed (``alt text`` to ``alt_text``), and reserved names get a ``_`` (``captions_``).
Binary columns are left out.
"""

import hashlib
import json
import os
import shlex
import shutil
import stat
import sys
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from clipkit.errors import ConfigError, DataError, nearest
from clipkit.files import counted, size_of
from clipkit.samples import (
    CLASS_NAMES,
    NAMED_SUFFIXES,
    SPLIT_WORDS,
    SUFFIXES,
    Row,
    Table,
    color_of,
    files_below,
    find_captions,
    images_below,
    is_table,
    listed_path,
    open_caption_tables,
    pair_captions,
    read_captions,
    read_class_names,
)
from clipkit.samples.remote import ShardFile, cache_folder, created_once, download_all
from data.captions import field_name, json_value
from data.groups import MOST_ROWS, TOO_MANY_ROWS, RowsByKey, digest_key, merge_rows
from data.shards.images import BadImage, Resize, Storing, store_image
from data.shards.writer import DatasetWriter, Record

__all__ = [
    "BadRow", "FieldNames", "PackReport", "captions_of", "fields_of", "metadata_of", "pack",
    "packed",
]  # fmt: skip


LARGEST_FILE = 64 * 2**20  # bytes
LONGEST_CAPTION = 10_000  # characters
MOST_CAPTIONS = 100  # per image
LARGEST_JSON = 2**20  # bytes per sample
_MISSING = "missing file"
_OWN_FIELDS = ("caption", "captions")  # json fields with a special meaning
_MAX_REPORTED = 1000  # columns in the report; in JSONL each line may have different ones
_MOST_FIELDS = 100_000  # columns of a table, to bound memory


@dataclass(frozen=True, kw_only=True)
class PackReport:
    """The result of packing a table.

    Attributes:
        splits: number of packed images per split.
        rows: number of rows that they come from.
        bad: number of bad rows per cause.
        bad_rows: file that lists the bad rows; None if there are none.
        not_upright: packed images with an EXIF orientation.
        deep: packed grayscale images with more than 8 bits.
        transparent: packed images that are partly transparent, or were before blending onto a background.
        several_captions: packed images with more than one caption.
        captions: the fewest and the most captions of a packed image.
        equal_captions: captions that were left out because their image has the same one already.
        other_images: rows whose image was not used because the first row of their group has another.
        fields: other columns that were stored, with their json field names.
        left_out: columns that were left out, with the reason.
        classes: names of classes that are the captions, if the images are in a folder per class.
        hint: why subfolders are not read as classes if most images have no caption, otherwise "".
    """

    splits: Mapping[str, int]
    rows: int
    bad: Mapping[str, int]
    image_column: str
    caption_column: str
    bad_rows: Path | None
    not_upright: int
    deep: int
    transparent: int
    several_captions: int
    captions: tuple[int, int]
    equal_captions: int
    other_images: int
    fields: Mapping[str, str]
    left_out: Mapping[str, str]
    classes: Sequence[str]
    hint: str

    @property
    def packed(self) -> int:
        """Number of packed images."""
        return sum(self.splits.values())

    @property
    def summary(self) -> str:
        """The numbers of rows, images and captions, in words."""
        fewest, most = self.captions
        if most == 1 and self.rows == self.packed:
            return counted(self.packed, "pair")
        if fewest == most:
            captions = counted(most, "caption") + (" each" if self.packed > 1 else "")
        else:
            captions = f"{fewest} to {most} captions"
        return f"{counted(self.rows, 'row')}, {counted(self.packed, 'image')} with {captions}"


class BadRow(Exception):
    """The reason why a row cannot be used; rows with the same cause have the same message."""


@dataclass(frozen=True, kw_only=True)
class _Packed:
    split: str
    record: Record
    captions: int
    marks: Mapping[str, int]  # counters of the report
    fields: Mapping[str, str]  # json field names of the table's other columns


def pack(
    source: Path | Sequence[Path],
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
    group: bool = True,
    group_by: str | None = None,
    progress: bool = True,
) -> PackReport:
    """Write the images and captions of ``source`` as a new dataset folder ``out``.

    A sample's key is the number of its first row in nine digits, counted from 1 without the header. Bad rows are
    listed in ``bad_rows.jsonl`` of the folder, and so are images of a folder that the table in it does not
    list. Memory does not grow with the table.

    Args:
        source: a .csv, .tsv, .tab, .jsonl, .ndjson, .parquet or .pq file, several with the same columns, or a
            folder of images, whose captions are in a table in the folder, in files beside the images, or are the
            names of its subfolders; these names are written to ``classes.txt``.
        out: the folder to create; it must not exist, or be empty.
        image_column: column with the paths, relative to the table's folder; guessed from usual names by default.
        caption_column: column with the captions; guessed likewise.
        fields: other columns that become fields of the json; None for all.
        test: fraction of the pairs in the test split.
        samples_per_shard: samples per tar.
        max_side: largest side in pixels; larger images are shrunk (JPEG and WebP at quality 95, others as PNG).
        keep_orientation: do not rotate images upright according to their EXIF orientation.
        background: color behind partly transparent images, by name or as "#rrggbb".
        group: make one sample of the rows of an image; False makes a sample of each row.
        group_by: column whose value is the same in the rows of an image; by default these have the same path or the
            same encoded image. It also becomes a field of the json.
        progress: show a progress bar on stderr.

    Raises:
        ConfigError: ``samples_per_shard``, ``max_side`` or ``test`` is out of range, or ``background`` or
            ``group_by`` is invalid.
        DataError: a table cannot be read, lacks a column, or there is no usable row.
    """
    for name, value in (("samples_per_shard", samples_per_shard), ("max_side", max_side)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} = {value}: expected at least 1")
    if not 0 <= test <= 1:
        raise ConfigError(f"test = {test}: expected a fraction from 0 to 1, such as 0.1")
    if group_by is not None and not group:
        raise ConfigError("--group-by and --no-group exclude each other")
    how = Storing(
        resize=Resize(mode="keep_ratio_largest", size=max_side) if max_side else None,
        keep_orientation=keep_orientation,
        background=None if background is None else color_of(background),
    )
    paths = [source] if isinstance(source, Path) else list(source)
    read: Table | _ImageFolder
    unlisted_in: Path | None = None  # a folder whose table should list all images in it
    listed: Path | None = None
    if paths[0].is_dir():
        listed = caption_table_of(paths[0], image_column=image_column, caption_column=caption_column)
    if paths[0].is_dir() and listed is None:
        read, tables = _ImageFolder(paths[0]), []
        if group_by is not None:
            raise ConfigError(f"--group-by {group_by}: {paths[0]} is a folder of images, not a table")
    else:
        if paths[0].is_dir() and listed is not None:
            unlisted_in, paths = paths[0], [listed]
        others = fields
        if fields is not None and group_by is not None:
            others = [*fields, group_by]  # Table reads a column once
        tables = [
            Table(path, image_column=image_column, caption_column=caption_column, encoded=True, others=others)
            for path in paths
        ]
        read = tables[0]
    if group_by == read.image_column:
        group_by = None
    if group_by is not None:
        _check_group_by(tables, group_by)
    bad, marks = Counter[str](), Counter[str]()
    caption_counts = Counter[int]()
    packed_rows = 0
    firsts, kept = dict[str, str](), dict[str, str]()
    with (
        DatasetWriter(out, samples_per_shard=samples_per_shard) as writer,
        RowsByKey() as groups,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # Pillow's, on broken images, which are listed as bad rows
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[rows]:,} rows, {task.fields[bad]:,} bad"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not progress,
            expand=True,
        )
        task = bar.add_task("reading", total=1.0, rows=0, bad=0)
        listing = writer.extra_file("bad_rows.jsonl")
        with listing.open("w", encoding="utf-8") as file, bar:
            if group:
                for row in _add_rows(tables, groups, group_by):
                    bar.update(task, completed=row.progress, rows=row.number)
            bar.update(task, description="packing")
            for rows, outcome in _in_order(tables or [read], groups, how, test):
                if isinstance(outcome, _Packed):
                    writer.write(outcome.split, outcome.record)
                    packed_rows += len(rows)
                    caption_counts[outcome.captions] += 1
                    marks.update(outcome.marks)
                    if len(kept) < _MAX_REPORTED:
                        kept.update(outcome.fields)
                else:
                    for row in rows:
                        path = row.path if isinstance(row.path, str) else None
                        cause = outcome
                        if group_by is not None and row.path != rows[0].path:
                            cause = f"{outcome} in the first row of the group"
                        bad[cause] += 1
                        firsts.setdefault(cause, f"row {row.number}" + (f": {path[:80]!r}" if path else ""))
                        line = {"row": row.number, "path": path and path[:4096], "cause": cause}
                        file.write(json.dumps(line) + "\n")  # ASCII, because a path may not be UTF-8
                used = packed_rows + bad.total()
                bar.update(task, completed=rows[0].progress, rows=used, bad=bad.total())
            if unlisted_in is not None:
                for image, cause in _unlisted_images(unlisted_in, tables[0]):
                    bad[cause] += 1
                    firsts.setdefault(cause, repr(image[:80]))
                    file.write(json.dumps({"row": None, "path": image[:4096], "cause": cause}) + "\n")
        if not writer.counts:
            causes = "; ".join(f"{count} × {cause} ({firsts[cause]})" for cause, count in bad.most_common())
            expected = ""
            if isinstance(read, _ImageFolder):
                expected = f"; expected {_LAYOUTS}{read.hint}{_table_hint(read.path)}"
            elif _MISSING in bad:
                expected = f"; paths are relative to the folder of the table, {read.path.parent}"
            raise DataError(f"no row of {read.path} can be packed: {causes or 'it has no rows'}{expected}")
        if not bad:
            listing.unlink()
        splits = dict(writer.counts)
        captions = (min(caption_counts), max(caption_counts))
        card = {
            "name": read.path.stem,
            "description": "images and captions from a table or folder",
            "made_by": "python -m data pack",
            "source": ", ".join(path.name for path in paths[:_SHOWN]),
            "columns": {"image": read.image_column, "caption": read.caption_column},
            "fields": kept,
            "test": test,
            "max_side": max_side,
            "keep_orientation": keep_orientation,
            "background": background,
            **({"captions_per_image": captions} if captions[1] > 1 else {}),
            "bad_rows": dict(bad.most_common()),
            "license": "unknown: that of the images",
        }
        if isinstance(read, _ImageFolder) and read.classes:
            lines = "".join(f"{name}\n" for name in read.classes)
            writer.extra_file("classes.txt").write_text(lines, "utf-8", "replace")
        writer.finish(card | ({"tasks": ["retrieval"]} if "test" in splits else {}))
    return PackReport(
        splits=splits,
        rows=packed_rows,
        bad=dict(bad.most_common()),
        image_column=read.image_column,
        caption_column=read.caption_column,
        bad_rows=writer.out / listing.name if bad else None,
        not_upright=marks["not upright"],
        deep=marks["deep"],
        transparent=marks["transparent"],
        several_captions=sum(count for size, count in caption_counts.items() if size > 1),
        captions=captions,
        equal_captions=marks["equal captions"],
        other_images=groups.other_images,
        fields=kept,
        left_out=read.left_out,
        classes=read.classes if isinstance(read, _ImageFolder) else (),
        hint=read.hint if isinstance(read, _ImageFolder) and bad["no caption"] > sum(splits.values()) else "",
    )


_LONGEST_NAME = 80
_LAYOUTS = "a .txt file for each image, a table named metadata, or a subfolder for each class"
_SHOWN = 8  # names of tables in the card
_LOOKED_AT = 1000  # names in a folder without captions


def metadata_of(folder: Path) -> Path | None:
    """Return the table of a folder of images in the layout of the Hugging Face hub, None if there is none.

    Raises:
        DataError: there are several, such as ``metadata.csv`` and ``metadata.jsonl``.
    """
    tables = [folder / f"metadata{suffix}" for suffix in SUFFIXES]
    tables = [table for table in tables if table.is_file()]
    if len(tables) > 1:
        raise DataError(f"{folder} contains {_names_of(tables, folder)}: remove all of them but one")
    return tables[0] if tables else None


def caption_table_of(folder: Path, *, image_column: str | None, caption_column: str | None) -> Path | None:
    """Return the table in a folder that lists captions of images in it, None if there is none.

    A table named metadata is preferred. Files with captions beside the images precede other tables, unless a column
    is named.

    Raises:
        DataError: there are several.
    """
    if (metadata := metadata_of(folder)) is not None:
        return metadata
    opened = open_caption_tables(
        sorted(folder.iterdir()), SUFFIXES, image_column=image_column, caption_column=caption_column
    )
    tables = [table.path for table in opened]
    if tables and image_column is None and caption_column is None:
        images = (path for path, cause in images_below(folder) if not cause)
        if find_captions(images) is not None:
            return None
    if len(tables) > 1:
        raise DataError(
            f"{folder} contains several tables of images and captions, {_names_of(tables, folder)}: name one of "
            "them instead of the folder"
        )
    return tables[0] if tables else None


def _names_of(tables: Sequence[Path], folder: Path) -> str:
    """Return the paths of tables in a folder for a message."""
    names = [str(table.relative_to(folder)) for table in tables[:_SHOWN]]
    if len(tables) > _SHOWN:
        return f"{', '.join(names)} and {len(tables) - _SHOWN} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _check_no_caption_tables(folder: Path) -> None:
    """Check that names of subfolders do not replace the captions of a table.

    Raises:
        DataError: the folder contains a table that has no usual suffix, or a subfolder contains a table.
    """
    opened = open_caption_tables(sorted(folder.iterdir()), NAMED_SUFFIXES)
    opened += open_caption_tables((path for path, _ in files_below(folder)), SUFFIXES)
    if opened:
        tables = [table.path for table in opened]
        raise DataError(
            f"{folder}: the names of its subfolders are not read as captions, because it contains tables of images "
            f"and captions ({_names_of(tables, folder)}): pack a table instead of the folder, or write the names "
            f"of classes into {folder / CLASS_NAMES}"
        )


def _unlisted_images(folder: Path, table: Table) -> Iterator[tuple[str, str]]:
    """Yield the images below a folder that its table does not list, relative to the folder, with the cause."""
    root = folder.absolute()
    listed = set[str]()
    for row in table:
        if isinstance(row.path, str):
            with suppress(DataError):  # a web address
                listed.add(os.path.normpath(listed_path(root, row.path)))
    for path, cause in images_below(root):
        if os.path.normpath(path) not in listed:
            yield str(path.relative_to(root)), cause or f"not listed in {table.path.name}"


def _table_hint(folder: Path) -> str:
    """Name a table directly in a folder of images, such as Flickr8k's ``captions.txt``, or a Parquet file."""
    for path in islice(folder.iterdir(), _LOOKED_AT):
        if path.suffix.lower() != ".json" and is_table(path):  # many .json files belong to one image
            return f"; {path} is a table: pack that instead of its folder"
    for path, _ in islice(files_below(folder), _LOOKED_AT):
        if path.suffix == ".parquet":
            return (
                f"; it contains Parquet files: pack one of them instead, such as {path}, or train on the folder, "
                "which reads all of a split"
            )
    return ""


class _ImageFolder:
    """The images below a folder as rows of a table, with the captions in files beside them.

    If there are no files that may contain captions and all images are in subfolders, these are classes. Their names
    or, if there is a file ``classnames.txt``, the names in it are the captions.

    Attributes:
        classes: names of the classes, if there are any.
        hint: why several subfolders are not read as classes, otherwise "".
    """

    image_column = "files"

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.others: dict[str, int] = {}
        self.left_out: dict[str, str] = {}
        self._images = list(images_below(folder))
        found = [path for path, cause in self._images if not cause]
        subfolders = sorted({path.relative_to(folder).parts[0] for path in found if path.parent != folder})
        captioned = find_captions(found)
        why = ""
        if outside := next((path for path in found if path.parent == folder), None):
            why = f"{outside.name} is outside them"
        elif captioned and not (folder / CLASS_NAMES).is_file():
            why = f"{captioned.relative_to(folder)} may contain captions"
        elif splits := sorted({*subfolders} & SPLIT_WORDS):
            why = f"{splits[0]!r} is the name of a split: pack the splits one by one, or rename it"
        self._class_names = _class_names(folder, subfolders) if len(subfolders) > 1 and not why else {}
        if self._class_names and not (folder / CLASS_NAMES).is_file():
            _check_no_caption_tables(folder)
        self.classes = sorted(self._class_names.values())
        self.hint = ""
        if len(subfolders) > 1 and why:
            self.hint = f"; subfolders are not read as classes because {why}"
        suffix = captioned.suffix.lower() if captioned else ".txt"
        self.caption_column = f"{suffix} files"
        if self.classes:
            self.caption_column = CLASS_NAMES if (folder / CLASS_NAMES).is_file() else "names of folders"

    def __iter__(self) -> Iterator[Row]:
        pairs = pair_captions(path for path, _ in self._images)
        for number, ((path, cause), (_, file)) in enumerate(zip(self._images, pairs, strict=True), 1):
            captions: list[str] = []
            if self.classes and not cause:
                captions = [self._class_names[path.relative_to(self.path).parts[0]]]
            elif file is not None:
                captions = read_captions(file)
            yield Row(
                number=number,
                path=str(path.relative_to(self.path)),
                caption=captions,
                cause=cause,
                progress=number / len(self._images),
            )


def _class_names(folder: Path, subfolders: Sequence[str]) -> dict[str, str]:
    """Return the names of classes by subfolder: from ``classnames.txt`` if there is one.

    Raises:
        DataError: ``classnames.txt`` does not match the subfolders, or two of them have the same name.
    """
    names = {subfolder: " ".join(subfolder.split()) for subfolder in subfolders}
    if (listed := read_class_names(folder, subfolders)) is not None:
        lines, labels = listed
        names = {subfolder: " ".join(lines[label].split()) for subfolder, label in labels.items()}
    subfolder_of: dict[str, str] = {}
    for subfolder, name in names.items():
        if name in subfolder_of:
            raise DataError(
                f"{folder}: the classes {subfolder_of[name]!r} and {subfolder!r} would have the same name without "
                f"additional spaces, {name!r}: rename one of them"
            )
        subfolder_of[name] = subfolder
    return names


_REVISION = 6  # of packed folders in the cache; increased when the same input is packed differently


def packed(sources: Sequence[Path] | Sequence[ShardFile]) -> Path:
    """Return a dataset folder in the cache with the images and captions of a source, packed on first use.

    A source is packed again if the path, size, modification time or permissions of a table or of a file in a folder
    of images, or the version of a remote table, have changed. Remote tables are deleted when they are packed.

    Args:
        sources: tables, a folder of images (see ``pack``), or remote Parquet files.

    Raises:
        DataError: as for ``pack``, or a remote table cannot be downloaded.
    """
    digest = hashlib.sha256(f"{_REVISION}".encode())
    remote = [one for one in sources if isinstance(one, ShardFile)]
    paths = [one for one in sources if isinstance(one, Path)]
    facts = [f"{one.url}\0{one.size} {one.version}" for one in remote]
    for path in map(Path.absolute, paths):
        for file, _ in files_below(path) if path.is_dir() else [(path, "")]:
            try:
                status = file.stat()
            except OSError as error:
                facts.append(f"{file}\0{error.strerror}")
            else:  # with the permissions: a file may have been unreadable
                facts.append(f"{file}\0{status.st_size} {status.st_mtime_ns} {status.st_mode}")
    digest.update("".join(f"{one}\n" for one in facts).encode("utf-8", "surrogateescape"))
    shown = remote[0].shown if remote else str(sources[0])
    what = shown if len(sources) == 1 else f"{len(sources)} tables such as {shown}"
    name = field_name(Path(sources[0].name).stem)[:_LONGEST_NAME]
    folder = cache_folder() / "packed" / f"{name}-{digest.hexdigest()[:16]}"
    copies = folder.with_name(f".{folder.name}.tables")  # kept after an interruption, to resume

    def make(out: Path) -> None:
        tables = download_all(remote, copies) if remote else paths
        report = pack(tables[0] if len(tables) == 1 else tables, out, progress=sys.stderr.isatty())
        shutil.rmtree(copies, ignore_errors=True)
        size = sum(one.stat().st_size for one in out.rglob("*.tar"))
        bad = sum(report.bad.values())
        left_out = f"; {counted(bad, 'bad row')} left out, see bad_rows.jsonl there" if bad else ""
        print(
            f"packed {report.summary} of {what} into {out} ({size_of(size)}){left_out}; "
            "`python -m data pack` writes them to another folder",
            file=sys.stderr,
        )

    try:
        created_once(folder, make, name=f"the shards of {shown}")
    except DataError as error:
        if "which column is" not in str(error):
            raise
        table = shlex.quote(shown)
        raise DataError(
            f"{error}. Write shards with `python -m data pack {table} OUT`, or, if it lists URLs, with "
            f"`python -m data download {table} OUT`"
        ) from error
    return folder


def _check_group_by(tables: Sequence[Table], column: str) -> None:
    """Check that rows can be grouped by a column of tables."""
    for table in tables:
        if column == table.caption_column:
            raise ConfigError(
                f"--group-by {column}: this is the column with the captions; name one that has the same value in "
                "all rows of an image"
            )
        if column in table.others:
            continue
        if column in table.left_out:
            raise ConfigError(f"--group-by {column}: {table.left_out[column]}")
        raise DataError(f"{table.path} has no column {column!r} ({nearest(column, list(table.others)[:30])})")


def _add_rows(tables: Sequence[Table], groups: RowsByKey, group_by: str | None) -> Iterator[Row]:
    """Add the usable rows of tables to groups, and yield every thousandth row of them."""
    for row, folder in _rows_of(tables):
        if row.number % 1000 == 0:
            yield row
        try:
            captions_of(row)
        except BadRow:
            continue
        image = _image_key(row, folder)
        key = image
        if group_by is not None:
            value = json_value(row.others.get(group_by))
            key = b"" if value in (None, "") else digest_key(json.dumps(value, sort_keys=True).encode())
        if key:
            groups.add(row.number, row, key, image=image)


def _image_key(row: Row, folder: Path) -> bytes:
    """Return what rows with the same image have in common; empty if a row has no image."""
    content = _image_of(row)
    if isinstance(content, bytes):
        return digest_key(b"bytes" + content)
    if not isinstance(content, str) or not content:
        return b""
    try:
        path = listed_path(folder.absolute(), content)
    except (DataError, ValueError):  # not a file, which the reader of the image reports
        return b""
    return digest_key(b"path" + str(path).encode("utf-8", "surrogatepass"))


def _in_order(
    sources: Sequence["Table | _ImageFolder"], groups: RowsByKey, how: Storing, test: float
) -> Iterator[tuple[list[Row], _Packed | str]]:
    """Yield the rows of each group with their sample or the cause of failure, in the order of their first rows."""
    Image.init()
    workers = min(8, os.cpu_count() or 1)  # threads, because reading and decoding release the GIL
    waiting: deque[tuple[list[Row], Future[_Packed | str]]] = deque()
    names = FieldNames(sources[0].others)
    with ThreadPoolExecutor(workers) as pool:
        for row, folder in _rows_of(sources):
            position = groups.position(row.number)
            if 0 < position < MOST_ROWS:
                continue
            rows = [row] if position else [row, *groups.later_rows(row.number)]
            merged = replace(row, cause=TOO_MANY_ROWS) if position else merge_rows(rows)
            waiting.append((rows, pool.submit(_sample, merged, names.of(merged.others), folder, how, test)))
            if len(waiting) > 2 * workers:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()


def _rows_of(sources: Sequence["Table | _ImageFolder"]) -> Iterator[tuple[Row, Path]]:
    """Yield rows, numbered across all tables, with the folder that their paths are relative to."""
    before = 0
    for part, source in enumerate(sources):
        folder = source.path if isinstance(source, _ImageFolder) else source.path.parent
        number = 0
        for row in source:
            number = row.number
            progress = (part + row.progress) / len(sources)
            yield replace(row, number=before + number, progress=progress), folder
        before += number


def _sample(row: Row, names: Mapping[str, str], folder: Path, how: Storing, test: float) -> _Packed | str:
    try:
        captions = captions_of(row)
        data = _file_of(row, folder)
        image = store_image(data, how)
        meta = fields_of(row.others, names, captions)
    except (BadRow, BadImage) as cause:
        return str(cause)
    texts = row.caption if isinstance(row.caption, list) else [row.caption]
    texts = [text for text in texts if isinstance(text, str) and text.strip()]
    marks = {
        "not upright": int(not image.upright),
        "deep": int(image.deep),
        "transparent": int(image.transparent),
        "equal captions": len(texts) - len(captions),
    }
    return _Packed(
        split=_split(data, test),
        record=Record(
            key=f"{row.number:09d}",
            image=image.data,
            extension=image.extension,
            caption=captions[0],
            meta=meta,
        ),
        captions=len(captions),
        marks=marks,
        fields={json_value(column): name for column, name in names.items()},
    )


class FieldNames:
    """Assign json field names to the columns of a table, the same in all rows.

    Names are unique and differ from fields with a special meaning. Among columns that first occur together, those
    with a valid name keep it. At most ``_MOST_FIELDS`` columns get a name.
    """

    def __init__(self, columns: Iterable[str], *, taken: Iterable[str] = ()) -> None:
        self._names: dict[str, str] = {}
        self._own = {*_OWN_FIELDS, *taken}
        self._taken = set(self._own)
        self.of(columns)

    def of(self, columns: Iterable[str]) -> dict[str, str]:
        """Return the field names of columns; must be called in the order of the table."""
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
    """Return a sample's json.

    Raises:
        BadRow: it is too large, nested too deeply, or has columns without a name.
    """
    if len(names) < len(others):
        raise BadRow(f"more than {_MOST_FIELDS:,} different columns in the table (select some with --fields)")
    try:
        meta = {names[column]: json_value(value) for column, value in others.items()}
        size = len(json.dumps(meta, ensure_ascii=False).encode())
    except RecursionError:
        raise BadRow("other columns are nested too deeply") from None
    if size > LARGEST_JSON:
        raise BadRow(f"other columns of more than {LARGEST_JSON // 2**20} MiB (select some with --fields)")
    # a caption file with a line break would be read as several captions
    if len(captions) > 1 or any("\n" in caption for caption in captions):
        meta["captions"] = list(captions)
    return meta


def _split(data: bytes, test: float) -> str:
    number = int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
    return "test" if test and number < test * 2**64 else "train"


def captions_of(row: Row) -> list[str]:
    """Return the non-blank captions of a row, each once, at least one.

    Raises:
        BadRow: the row or one of its captions cannot be used.
    """
    if row.cause:
        raise BadRow(row.cause)
    given = row.caption if isinstance(row.caption, list) else [row.caption]
    texts = [one for one in given if isinstance(one, str)]
    if len(texts) + given.count(None) < len(given):
        raise BadRow("caption is neither a string nor a list of strings")
    captions = list(dict.fromkeys(text.strip() for text in texts if text.strip()))
    if not captions:
        raise BadRow("empty caption" if texts else "no caption")
    if len(captions) > MOST_CAPTIONS:
        raise BadRow(f"more than {MOST_CAPTIONS} captions")
    for one in captions:
        if len(one) > LONGEST_CAPTION:
            raise BadRow(f"caption of more than {LONGEST_CAPTION:,} characters")
        if any(mark == "\ufffd" or "\ud800" <= mark <= "\udfff" for mark in one):
            raise BadRow("caption is not UTF-8")
    return captions


def _image_of(row: Row) -> object:
    """Return the path or the encoded image of a row."""
    if isinstance(row.path, dict):  # an image as the Hugging Face hub stores it
        return row.path.get("bytes") or row.path.get("path")
    return row.path


def _file_of(row: Row, folder: Path) -> bytes:
    """Return the encoded image of a row."""
    given = _image_of(row)
    if isinstance(given, bytes):
        if len(given) > LARGEST_FILE:
            raise BadRow(f"image of more than {LARGEST_FILE // 2**20} MiB")
        return given
    if given is None or given == "":
        raise BadRow("no path")
    if not isinstance(given, str):
        raise BadRow("path is not a string")
    try:
        path = listed_path(folder, given)
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or device may never end
            raise BadRow("not a file")
        if status.st_size > LARGEST_FILE:
            raise BadRow(f"file of more than {LARGEST_FILE // 2**20} MiB")
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE)
    except DataError as error:
        raise BadRow(str(error)) from None
    except (FileNotFoundError, NotADirectoryError):
        raise BadRow(_MISSING) from None
    except (OSError, ValueError):  # ValueError: a path with a null byte or unencodable characters
        raise BadRow("file cannot be read") from None
    if not data:
        raise BadRow("empty file")
    return data

"""Pack images and captions of a table or a folder into a dataset folder.

A table lists paths of images, or holds encoded images (Parquet). In a folder, each image has its captions in a file
of the same name (see ``clipkit.samples.image_folder``); or a table directly in the folder lists them, such as
``captions.csv``; or there are no captions and a subfolder for each class, whose name is the caption. The table
``metadata.csv`` of the Hugging Face hub precedes files of captions.

Images: JPEG, PNG and WebP files are stored byte for byte, except those with an EXIF orientation, which CLIP's
preprocessing ignores; they are stored upright (JPEG at quality 95 without chroma subsampling, PNG without loss,
WebP as it was encoded). Other formats become PNG. Every image is decoded once, to find broken ones before training.

Splits: tables or folders named like splits, such as ``test.csv`` and ``train/``, or else a column ``split``, decide
which split an image belongs to. Otherwise the hash of its bytes decides between train and test, so that equal
images are in one split and the splits are the same on all machines. A larger test fraction is a superset of a
smaller one.

Captions: a row may have a list of captions, and rows of the same image become one sample with the captions of all.
Equal captions of an image are stored once. By default training uses the first; ``data.captions=captions`` with
``data.caption_choice=random`` draws one of them. Evaluation reads all from the json.

Rows have the same image if their paths are equal, except for "./", "//", "\\" and "file://", or if their encoded
images have the same bytes. The sample has the key and the image of the first of these rows. Columns with different
values become lists with the value of each row.

Other columns become fields of the json, for ``data.filters`` and ``data.captions``. Values of JSONL and Parquet
keep their types (see ``clipkit.samples.json_value``); cells of CSV and TSV are strings, empty ones null. Names that
are invalid in filters are changed (``alt text`` to ``alt_text``), and reserved names get a ``_`` (``captions_``).
Binary columns are left out.
"""

import hashlib
import json
import os
import shlex
import shutil
import sys
import textwrap
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from PIL import Image

from clipkit.errors import ConfigError, DataError
from clipkit.files import CountProgress, counted, format_bytes
from clipkit.samples import (
    CLASS_NAMES,
    HDF5_SUFFIXES,
    SPLIT_NAMES,
    FolderSamples,
    Table,
    TableSamples,
    are_ids,
    check_captions,
    color_of,
    files_below,
    find_caption_table,
    find_splits,
    images_below,
    json_value,
    plain_name,
    read_split,
)
from clipkit.samples.remote import ShardFile, cache_folder, created_once, download_all
from data.captions import DRAW_CAPTIONS, field_name, join_names
from data.options import PackCommand, PackOptions
from data.shards.images import BadImage, Resize, Storing, store_image
from data.shards.writer import DatasetWriter, Record

LARGEST_FILE = 64 * 2**20  # bytes
LARGEST_JSON = 2**20  # bytes per sample
_OWN_FIELDS = ("caption", "captions")  # json fields with a special meaning
_MAX_REPORTED = 1000  # columns in the report; in JSONL each line may have different ones
_MOST_FIELDS = 100_000  # columns of a table, to bound memory
_LAYOUTS = "a .txt file for each image, a table named metadata, or a subfolder for each class"
_SHOWN = 8  # names of tables in the card
_LONGEST_NAME = 80


@dataclass(frozen=True, kw_only=True)
class PackReport:
    """The result of packing a table.

    Attributes:
        splits: number of packed images per split.
        rows: number of rows that they come from.
        bad: number of bad rows per cause.
        bad_rows: file that lists the bad rows; None if there are none.
        marks: number of packed images that are "not upright" by EXIF, "deep" (more than 8 bits per channel),
            "transparent" in part (or were before blending onto a background), or with "several captions"; of
            "equal captions" that were left out because their image has the same one; and of rows with "other
            images" than the first row of their group.
        captions: the fewest and the most captions of a packed image.
        fields: other columns that were stored, with their json field names.
        left_out: columns that were left out, with the reason.
        classes: names of classes that are the captions, if the images are in a folder per class.
        parts: names of the tables or folders by the split that they are; "" for one whose rows or images decide.
    """

    splits: Mapping[str, int]
    rows: int
    bad: Mapping[str, int]
    image_column: str
    caption_column: str
    bad_rows: Path | None
    marks: Mapping[str, int]
    captions: tuple[int, int]
    fields: Mapping[str, str]
    left_out: Mapping[str, str]
    classes: Sequence[str]
    parts: Mapping[str, str]

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


@dataclass(frozen=True, kw_only=True)
class _Packed:
    split: str
    record: Record
    captions: int
    marks: Mapping[str, int]  # counters of the report
    fields: Mapping[str, str]  # json field names of the table's other columns


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Tables, or a folder of images, whose rows are packed together.

    Attributes:
        path: the first table, or the folder.
        tables: with the same columns; none for a folder of images with captions or by class.
        split: of all rows; "" if a column, or the hash of an image, decides.
    """

    path: Path
    tables: Sequence[Table]
    split: str


class _BadRows:
    """Bad rows, counted by cause and listed in a file."""

    def __init__(self, file: TextIO) -> None:
        self.counts = Counter[str]()
        self._firsts: dict[str, str] = {}
        self._file = file

    def add(self, cause: str, *, row: int | None, path: str | None, split: str = "") -> None:
        self.counts[cause] += 1
        if cause not in self._firsts:
            words = [] if row is None else [f"row {row}"]
            if path:
                words.append(repr(path[:80]))
            self._firsts[cause] = ": ".join(words)
        line = {"row": row, "path": path and path[:4096], "cause": cause}
        if split:
            line["split"] = split
        self._file.write(json.dumps(line) + "\n")  # ASCII, because a path may not be UTF-8

    def describe_causes(self) -> str:
        causes = [f"{count} × {cause} ({self._firsts[cause]})" for cause, count in self.counts.most_common()]
        return "; ".join(causes) or "it has no rows"


def pack(
    source: Path | Sequence[Path],
    out: Path,
    options: PackOptions = PackOptions(),
    *,
    split: str | None = None,
    progress: bool = True,
) -> PackReport:
    """Write the images and captions of ``source`` as a new dataset folder ``out``.

    A sample's key is the number of its first row in nine digits, counted from 1 without the header, in each split
    that names of files or folders state. Bad rows are listed in ``bad_rows.jsonl`` of the folder, and so are images
    of a folder that no table in it lists. Memory does not grow with the table.

    Args:
        source: a .csv, .tsv, .tab, .jsonl, .ndjson, .parquet or .pq file, several with the same columns, or a
            folder of images, whose captions are in a table in the folder, in files beside the images, or are the
            names of its subfolders; these names are written to ``classes.txt``, and labels for evaluation to
            ``cls`` members and ``classnames.txt``.
        out: the folder to create; it must not exist, or be empty.
        options: paths in ``image_column`` are relative to the table's folder. ``max_side`` shrinks JPEG and WebP at
            quality 95, others as PNG. Without ``group``, each row becomes a sample; ``group_by`` also becomes a
            field of the json.
        split: the split of all rows, "" if a column or a hash decides; by default, names of files and folders in a
            folder may state splits, of which all are packed.
        progress: show a progress bar on stderr.
    """
    assert options.samples_per_shard >= 1 and 0 <= options.test <= 1
    if options.group_by is not None and not options.group:
        raise ConfigError("--group-by and --no-group exclude each other")
    resize = None
    if options.max_side is not None:
        resize = Resize(mode="keep_ratio_largest", size=options.max_side)
    how = Storing(
        resize=resize,
        keep_orientation=options.keep_orientation,
        background=None if options.background is None else color_of(options.background),
    )
    paths = [source] if isinstance(source, Path) else list(source)
    parts = _find_parts(paths, options, split)
    origin = parts[0].path if len(parts) == 1 else paths[0]
    opened: list[TableSamples | FolderSamples] = []
    marks = Counter[str]()
    caption_counts = Counter[int]()
    packed_rows = 0
    stored_fields: dict[str, str] = {}
    class_names: list[str] = []  # by label
    with DatasetWriter(out, samples_per_shard=options.samples_per_shard) as writer, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, on broken images, which are listed as bad rows
        listing = writer.extra_file_path("bad_rows.jsonl")
        names = FieldNames(())
        with listing.open("w", encoding="utf-8") as file:
            bad = _BadRows(file)
            for part in parts:
                samples = _open_part(part, options, progress=progress)
                opened.append(samples)
                names.assign(samples.others)
                if class_names and samples.classes[0] not in ([], class_names):
                    raise DataError(
                        f"{part.path} has other classes than {parts[0].path}: write the names of all "
                        f"into one file, {paths[0] / CLASS_NAMES}"
                    )
                class_names = class_names or samples.classes[0]
                with CountProgress("packing", total=len(samples), shown=progress) as bar:
                    for i, outcome in _pack_in_order(samples, part.split, names, how, options.test):
                        rows = samples.rows(i)
                        if isinstance(outcome, _Packed):
                            writer.write(outcome.split, outcome.record)
                            packed_rows += len(rows)
                            caption_counts[outcome.captions] += 1
                            marks.update(outcome.marks)
                            if len(stored_fields) < _MAX_REPORTED:
                                stored_fields.update(outcome.fields)
                        else:
                            for row in rows:
                                path = row.path if isinstance(row.path, str) else None
                                bad.add(outcome, row=row.number, path=path, split=part.split)
                        bar.show(i + 1, bad.counts.total())
            if paths[0].is_dir():
                for image, cause in _unlisted_images(paths[0], parts):
                    bad.add(cause, row=None, path=image)
        if not writer.counts:
            expected = ""
            if not parts[0].tables:
                expected = f"; expected {_LAYOUTS}"
            elif "missing file" in bad.counts:
                expected = f"; paths are relative to the folder of the table, {origin.parent}"
            raise DataError(f"no row of {origin} can be packed: {bad.describe_causes()}{expected}")
        if not bad.counts:
            listing.unlink()
        splits = dict(writer.counts)
        captions = (min(caption_counts), max(caption_counts))
        marks["several captions"] = sum(count for size, count in caption_counts.items() if size > 1)
        marks["other images"] = sum(samples.other_images for samples in opened)
        classes: dict[str, str] = {}
        left_out: dict[str, str] = {}
        for samples in opened:
            classes |= samples.class_names
            left_out |= samples.left_out
        report = PackReport(
            splits=splits,
            rows=packed_rows,
            bad=dict(bad.counts.most_common()),
            image_column=", ".join(dict.fromkeys(samples.image_column for samples in opened)),
            caption_column=", ".join(dict.fromkeys(samples.captions_from for samples in opened)),
            bad_rows=writer.out / listing.name if bad.counts else None,
            marks=marks,
            captions=captions,
            fields=stored_fields,
            left_out=left_out,
            classes=sorted(set(classes.values())),
            parts={part.split: os.path.relpath(part.path, paths[0]) for part in parts},
        )
        tables = [table.path for part in parts for table in part.tables]
        card = {
            "name": origin.stem,
            "description": "images and captions from a table or folder",
            "made_by": "python -m data pack",
            "source": ", ".join(path.name for path in (tables or [origin])[:_SHOWN]),
            "columns": {"image": report.image_column, "caption": report.caption_column},
            "fields": stored_fields,
            "test": options.test,
            "max_side": options.max_side,
            "keep_orientation": options.keep_orientation,
            "background": options.background,
            **({"captions_per_image": captions} if captions[1] > 1 else {}),
            "bad_rows": report.bad,
            "license": "unknown: that of the images",
        }
        if not classes:
            writer.finish(card | ({"tasks": ["retrieval"]} if "test" in splits else {}))
        else:
            lines = "".join(f"{name}\n" for name in report.classes)
            writer.extra_file_path("classes.txt").write_text(lines, "utf-8", "replace")
            spaced = [" ".join(name.replace("_", " ").split()) for name in class_names]
            writer.finish(card, class_names=[json_value(name) for name in spaced])
    return report


def _find_parts(paths: Sequence[Path], options: PackOptions, split: str | None) -> list[_Part]:
    folder = paths[0]
    if not folder.is_dir():
        return [_Part(path=folder, tables=_open_tables(paths, options), split=split or "")]
    parts: list[_Part] = []
    splits = find_splits(folder) if split is None else {}
    if [*splits] == ["train"]:  # of which some may be held out
        splits = {"": splits["train"]}
    for name, source in splits.items():
        inner = [Path(file.url) for file in source.files]
        if source.folder is not None:
            inner = [source.folder]
        parts += _find_parts(inner, options, name)
    if parts:
        return parts
    table = find_caption_table(
        folder, image_column=options.image_column, caption_column=options.caption_column
    )
    if table is None and options.group_by is not None:
        raise ConfigError(f"--group-by {options.group_by}: {folder} is a folder of images, not a table")
    if table is None:
        return [_Part(path=folder, tables=[], split=split or "")]
    return _find_parts([table], options, split)


def _open_tables(paths: Sequence[Path], options: PackOptions) -> list[Table]:
    if options.captions is not None and not paths[0].name.lower().endswith(HDF5_SUFFIXES):
        raise ConfigError(f"--captions {options.captions}: expected an HDF5 file (.h5), not {paths[0]}")
    open_table = partial(
        Table,
        image_column=options.image_column,
        caption_column=options.caption_column,
        encoded=True,
        captions=options.captions,
    )
    others = options.fields
    if others is not None:
        if options.group_by is not None:
            others = (*others, options.group_by)  # Table reads a column once
        columns = open_table(paths[0], others=None).others
        others = (*others, *(name for name in columns if plain_name(name) == "split" and name not in others))
    return [open_table(path, others=others) for path in paths]


def _open_part(part: _Part, options: PackOptions, *, progress: bool) -> TableSamples | FolderSamples:
    if not part.tables:
        return FolderSamples(part.path)
    group_by = options.group_by
    if group_by == part.tables[0].image_column:
        group_by = None
    with CountProgress("reading rows", total=None, shown=progress) as bar:
        samples = TableSamples(
            part.tables, group=options.group, group_by=group_by, progress=lambda _, rows: bar.show(rows)
        )
    if samples.damage:
        raise DataError(samples.damage)
    return samples


def _pack_in_order(
    samples: TableSamples | FolderSamples, split: str, names: "FieldNames", how: Storing, test: float
) -> Iterator[tuple[int, _Packed | str]]:
    Image.init()
    workers = min(8, os.cpu_count() or 1)  # threads, because reading and decoding release the GIL
    waiting: deque[tuple[int, Future[_Packed | str]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for i in range(len(samples)):
            future: Future[_Packed | str]
            try:
                fields = samples.fields(i)
                texts = check_captions(fields.pop(samples.caption_column))
            except DataError as error:
                future = pool.submit(str, error)
            else:
                future = pool.submit(
                    _pack_sample, samples, i, texts, fields, names.assign(fields), how, split, test
                )
            waiting.append((i, future))
            if len(waiting) > 2 * workers:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()


def _pack_sample(
    samples: TableSamples | FolderSamples,
    i: int,
    texts: Sequence[str],
    fields: Mapping[str, Any],
    names: Mapping[str, str],
    how: Storing,
    split: str,
    test: float,
) -> _Packed | str:
    captions = list(dict.fromkeys(texts))
    try:
        split = read_split(fields, file_split=split)
        data = samples.read(i, "")
        if len(data) > LARGEST_FILE:
            raise DataError(f"file of more than {LARGEST_FILE // 2**20} MiB")
        image = store_image(data, how)
        meta = make_meta(fields, names, captions)
    except (DataError, BadImage) as cause:
        return str(cause)
    marks = {
        "not upright": int(not image.upright),
        "deep": int(image.deep),
        "transparent": int(image.transparent),
        "equal captions": len(texts) - len(captions),
    }
    return _Packed(
        split=split if split in SPLIT_NAMES else _draw_split(data, test),
        record=Record(
            key=f"{samples.rows(i)[0].number:09d}",
            image=image.data,
            extension=image.extension,
            caption=captions[0],
            label=samples.label(i),
            meta=meta,
        ),
        captions=len(captions),
        marks=marks,
        fields={json_value(column): name for column, name in names.items()},
    )


def _draw_split(data: bytes, test: float) -> str:
    hash_value = int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
    return "test" if test and hash_value < test * 2**64 else "train"


def _unlisted_images(folder: Path, parts: Sequence[_Part]) -> Iterator[tuple[str, str]]:
    """Yield the images below a folder that no table lists and that are in no packed folder, and why not."""
    root = folder.absolute()
    folders: list[Path] = []
    listed = set[str]()
    for part in parts:
        if not part.tables:
            folders.append(part.path.absolute())
        for table in part.tables:
            if table.contains_images:
                return
            for row in table:
                if isinstance(row.path, str):
                    with suppress(DataError):  # a web address
                        listed.add(os.path.normpath(table.find_image(row.path).absolute()))
    names = ", ".join(os.path.relpath(part.path, folder) for part in parts)
    outside = f"not in {names}" if folders else f"not listed in {names}"
    for path, cause in images_below(root):
        if os.path.normpath(path) not in listed and not any(map(path.is_relative_to, folders)):
            yield str(path.relative_to(root)), cause or outside


class FieldNames:
    """Assign json field names to the columns of a table, the same in all rows.

    Names are unique and differ from fields with a special meaning. Among columns that first occur together, those
    with a valid name keep it. At most ``_MOST_FIELDS`` columns get a name.
    """

    def __init__(self, columns: Iterable[str], *, taken: Iterable[str] = ()) -> None:
        self._names: dict[str, str] = {}
        self._own = {*_OWN_FIELDS, *taken}
        self._taken = set(self._own)
        self.assign(columns)

    def assign(self, columns: Iterable[str]) -> dict[str, str]:
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


def make_meta(
    others: Mapping[str, object], names: Mapping[str, str], captions: Sequence[str]
) -> dict[str, Any]:
    """Return a sample's json."""
    if len(names) < len(others):
        raise DataError(
            f"more than {_MOST_FIELDS:,} different columns in the table (select some with --fields)"
        )
    try:
        meta = {names[column]: json_value(value) for column, value in others.items()}
        size = len(json.dumps(meta, ensure_ascii=False).encode())
    except RecursionError:
        raise DataError("other columns are nested too deeply") from None
    if size > LARGEST_JSON:
        raise DataError(f"other columns of more than {LARGEST_JSON // 2**20} MiB (select some with --fields)")
    # a caption file with a line break would be read as several captions
    if len(captions) > 1 or any("\n" in caption for caption in captions):
        meta["captions"] = list(captions)
    return meta


# of packed folders in the cache; increased when the samples for training of the same input are packed differently
_REVISION = 9


def pack_into_cache(sources: Sequence[Path] | Sequence[ShardFile], split: str = "") -> Path:
    """Return a dataset folder in the cache with the images and captions of a source, packed on first use.

    All rows belong to ``split``, unless it is "".

    A source is packed again if the path, size, modification time or permissions of a table or of a file in a folder
    of images, or the version of a remote table, have changed. Remote tables are deleted when they are packed.
    """
    digest = hashlib.sha256(f"{_REVISION} {split}".encode())
    remote = [source for source in sources if isinstance(source, ShardFile)]
    paths = [source for source in sources if isinstance(source, Path)]
    facts = [f"{file.url}\0{file.size} {file.version}" for file in remote]
    for path in map(Path.absolute, paths):
        files = [(path, "")]
        if path.is_dir():
            files = [*files_below(path)]
            class_names = path.parent / CLASS_NAMES  # of all splits
            if class_names.is_file():
                files.append((class_names, ""))
        for file, _ in files:
            try:
                status = file.stat()
            except OSError as error:
                facts.append(f"{file}\0{error.strerror}")
            else:  # with the permissions: a file may have been unreadable
                facts.append(f"{file}\0{status.st_size} {status.st_mtime_ns} {status.st_mode}")
    digest.update("".join(f"{fact}\n" for fact in facts).encode("utf-8", "surrogateescape"))
    title = remote[0].shown if remote else str(sources[0])
    what = title if len(sources) == 1 else f"{len(sources)} tables such as {title}"
    name = field_name(Path(sources[0].name).stem)[:_LONGEST_NAME]
    folder = cache_folder() / "packed" / f"{name}-{digest.hexdigest()[:16]}"
    copies = folder.with_name(f".{folder.name}.tables")  # kept after an interruption, to resume

    def make(out: Path) -> None:
        tables = download_all(remote, copies) if remote else paths
        report = pack(tables, out, split=split, progress=sys.stderr.isatty())
        shutil.rmtree(copies, ignore_errors=True)
        size = sum(path.stat().st_size for path in out.rglob("*.tar"))
        bad = sum(report.bad.values())
        left_out = ""
        if bad:
            left_out = f"; {counted(bad, 'bad row')} left out, see bad_rows.jsonl there"
        print(
            f"packed {report.summary} of {what} into {out} ({format_bytes(size)}){left_out}; "
            "`python -m data pack` writes them to another folder",
            file=sys.stderr,
        )
        if are_ids(report.classes):
            print(_warn_of_ids(report), file=sys.stderr)

    try:
        created_once(folder, make, name=f"the shards of {title}")
    except DataError as error:
        if "which column is" not in str(error):
            raise
        table = shlex.quote(title)
        raise DataError(
            f"{error}. Write shards with `python -m data pack {table} OUT`, or, if it lists URLs, with "
            f"`python -m data download {table} OUT`"
        ) from error
    return folder


def has_split_column(folder: Path) -> bool:
    """Whether the rows of a folder from ``pack_into_cache`` state their splits."""
    card = json.loads((folder / "card.json").read_text("utf-8"))
    return any(plain_name(column) == "split" for column in card["fields"])


def run_pack(options: PackCommand) -> int:
    """Run ``python -m data pack``."""
    start = time.monotonic()
    report = pack(options.table, options.out, options, progress=not options.quiet)
    print(f"created {options.out} in {time.monotonic() - start:.1f} s")
    print(f"  columns  {report.image_column} (image), {report.caption_column} (caption)")
    if len(report.parts) > 1:
        print("  splits   " + ", ".join(f"{name} ({split})" for split, name in report.parts.items()))
    for line in _list_remarks(
        report, keep_orientation=options.keep_orientation, background=options.background
    ):
        print(textwrap.fill(line, 79, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
    if report.bad:
        print("  bad rows, by cause:")
        for cause, count in report.bad.items():
            print(f"  {count:>9,}  {cause}")
    bad = sum(report.bad.values())
    counts = {"train": 0, **({"test": 0} if options.test else {}), **report.splits}
    pairs = report.summary == counted(report.packed, "pair")
    if not pairs:
        print(report.summary)
    noun = "pair" if pairs else "image"
    into = " and ".join(f"{count:,} into {split}" for split, count in counts.items() if split != "train")
    print(f"packed {counted(counts['train'], noun)} into train" + (f" and {into}" if into else ""))
    if bad:
        mostly = "warning: " if bad >= report.rows else ""
        print(f"{mostly}{bad:,} bad of {counted(bad + report.rows, 'row')}: see {report.bad_rows}")
    return 0


def _warn_of_ids(report: PackReport) -> str:
    return (
        f"warning: the captions are names of folders that look like ids, such as {report.classes[0]!r}: write "
        f"names of classes into {CLASS_NAMES} in the folder, one per line in the order of the folders"
    )


def _list_remarks(report: PackReport, *, keep_orientation: bool, background: str | None) -> Iterator[str]:
    if are_ids(report.classes):
        yield _warn_of_ids(report)
    if report.fields:
        names = [name if name == column else f"{column} as {name}" for column, name in report.fields.items()]
        yield f"stored as fields for data.filters and data.captions: {join_names(names)}"
    if report.left_out:
        left_out = [f"{name!r} ({why})" for name, why in report.left_out.items()]
        yield f"columns left out: {', '.join(left_out[:8])}{', …' if len(left_out) > 8 else ''}"
    orientation = "upright (unless --keep-orientation is given)"
    if keep_orientation:
        orientation = "unchanged, and CLIP ignores it"
    colors = "CLIP sees the colors hidden below them; --background white blends them onto white"
    if background:
        colors = f"blended onto {background}"
    remarks = {
        "several captions": f"several captions: training uses the first, or draws one with {DRAW_CAPTIONS}; "
        "evaluation uses all",
        "not upright": f"an EXIF orientation: stored {orientation}",
        "deep": "more than 8 bits per channel: stored with all bits; training needs pixels.range, for which "
        "`python -m data inspect` suggests a value",
        "transparent": f"transparent parts: {colors}",
    }
    for mark, remark in remarks.items():
        count = report.marks[mark]
        if count:
            have = "1 image has" if count == 1 else f"{count:,} images have"
            yield f"{have} {remark}"
    count = report.marks["equal captions"]
    if count:
        yield f"{counted(count, 'caption')} left out: equal to another caption of the same image"
    count = report.marks["other images"]
    if count:
        rows = counted(count, "row")
        yield f"{rows} with another image than the first row of the group: only the first row's image is stored"

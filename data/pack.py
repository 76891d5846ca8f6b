"""Pack images and captions of a table or a folder into a dataset folder.

A table lists paths of images, or holds encoded images (Parquet). In a folder, each image has its captions in a file
of the same name (see ``clipkit.samples.image_folder``); or a table directly in the folder lists them, such as
``captions.csv``; or there are no captions and a subfolder for each class, whose name is the caption. The table
``metadata.csv`` of the Hugging Face hub precedes files of captions.

Images: JPEG, PNG and WebP files are stored byte for byte, except those with an EXIF orientation, which CLIP's
preprocessing ignores; they are stored upright (JPEG at quality 95 without chroma subsampling, PNG without loss,
WebP as it was encoded). Other formats become PNG. Every image is decoded once, to find broken ones before training.

Splits: a column ``split``, or folders named like splits, decide which split an image belongs to. Otherwise the hash
of its bytes decides between train and test, so that equal images are in one split and the splits are the same on
all machines. A larger test fraction is a superset of a smaller one.

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
from typing import Any

from PIL import Image

from clipkit.errors import ConfigError, DataError
from clipkit.files import CountProgress, counted, format_bytes
from clipkit.samples import (
    CLASS_NAMES,
    SPLIT_NAMES,
    FolderSamples,
    Table,
    TableSamples,
    are_ids,
    caption_table_of,
    check_captions,
    color_of,
    files_below,
    images_below,
    json_value,
    plain_name,
    read_split,
    select_split,
)
from clipkit.samples.remote import ShardFile, cache_folder, created_once, download_all
from data.captions import DRAW_CAPTIONS, field_name, listed
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
        marks: number of packed images that are "not upright" by EXIF, "deep" (gray of more than 8 bits),
            "transparent" in part (or were before blending onto a background), or with "several captions"; of
            "equal captions" that were left out because their image has the same one; and of rows with "other
            images" than the first row of their group.
        captions: the fewest and the most captions of a packed image.
        fields: other columns that were stored, with their json field names.
        left_out: columns that were left out, with the reason.
        classes: names of classes that are the captions, if the images are in a folder per class.
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


def pack(
    source: Path | Sequence[Path],
    out: Path,
    options: PackOptions = PackOptions(),
    *,
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
        options: paths in ``image_column`` are relative to the table's folder. ``max_side`` shrinks JPEG and WebP at
            quality 95, others as PNG. Without ``group``, each row becomes a sample; ``group_by`` also becomes a
            field of the json.
        progress: show a progress bar on stderr.

    Raises:
        ConfigError: ``background``, ``group_by`` or ``max_side`` is invalid.
        DataError: a table cannot be read, lacks a column, or there is no usable row.
    """
    assert options.samples_per_shard >= 1 and 0 <= options.test <= 1
    group_by = options.group_by
    max_side = options.max_side
    if group_by is not None and not options.group:
        raise ConfigError("--group-by and --no-group exclude each other")
    how = Storing(
        resize=Resize(mode="keep_ratio_largest", size=max_side) if max_side is not None else None,
        keep_orientation=options.keep_orientation,
        background=None if options.background is None else color_of(options.background),
    )
    paths = [source] if isinstance(source, Path) else list(source)
    folder: FolderSamples | None = None
    root: Path | None = None  # a folder whose table should list all images in it
    if paths[0].is_dir():
        table = caption_table_of(
            paths[0], image_column=options.image_column, caption_column=options.caption_column
        )
        if table is not None:
            root = paths[0]
            paths = [table]
        elif group_by is not None:
            raise ConfigError(f"--group-by {group_by}: {paths[0]} is a folder of images, not a table")
        else:
            folder = FolderSamples(paths[0])
    others = options.fields
    if others is not None and group_by is not None:
        others = (*others, group_by)  # Table reads a column once
    open_table = partial(
        Table, image_column=options.image_column, caption_column=options.caption_column, encoded=True
    )
    if others is not None and folder is None:
        columns = open_table(paths[0], others=None).others
        others = (*others, *(name for name in columns if plain_name(name) == "split" and name not in others))
    tables = [open_table(path, others=others) for path in paths] if folder is None else []
    if tables and group_by == tables[0].image_column:
        group_by = None
    bad = Counter[str]()
    marks = Counter[str]()
    caption_counts = Counter[int]()
    packed_rows = 0
    firsts: dict[str, str] = {}
    stored_fields: dict[str, str] = {}
    with DatasetWriter(out, samples_per_shard=options.samples_per_shard) as writer, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, on broken images, which are listed as bad rows
        samples: TableSamples | FolderSamples
        if folder is not None:
            samples = folder
        else:
            with CountProgress("reading rows", total=None, shown=progress) as bar:
                samples = TableSamples(
                    tables, group=options.group, group_by=group_by, progress=lambda _, rows: bar.show(rows)
                )
        if samples.damage:
            raise DataError(samples.damage)
        listing = writer.extra_file("bad_rows.jsonl")
        with (
            listing.open("w", encoding="utf-8") as file,
            CountProgress("packing", total=len(samples), shown=progress) as bar,
        ):
            for i, outcome in _pack_in_order(samples, how, options.test):
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
                        bad[outcome] += 1
                        firsts.setdefault(outcome, f"row {row.number}" + (f": {path[:80]!r}" if path else ""))
                        line = {"row": row.number, "path": path and path[:4096], "cause": outcome}
                        file.write(json.dumps(line) + "\n")  # ASCII, because a path may not be UTF-8
                bar.show(i + 1, bad.total())
            if root is not None:
                for image, cause in _unlisted_images(root, tables[0]):
                    bad[cause] += 1
                    firsts.setdefault(cause, repr(image[:80]))
                    file.write(json.dumps({"row": None, "path": image[:4096], "cause": cause}) + "\n")
        if not writer.counts:
            causes = "; ".join(f"{count} × {cause} ({firsts[cause]})" for cause, count in bad.most_common())
            expected = ""
            if folder is not None:
                expected = f"; expected {_LAYOUTS}"
            elif "missing file" in bad:
                expected = f"; paths are relative to the folder of the table, {paths[0].parent}"
            raise DataError(f"no row of {paths[0]} can be packed: {causes or 'it has no rows'}{expected}")
        if not bad:
            listing.unlink()
        splits = dict(writer.counts)
        captions = (min(caption_counts), max(caption_counts))
        marks["several captions"] = sum(count for size, count in caption_counts.items() if size > 1)
        marks["other images"] = samples.other_images
        classes: list[str] = []
        caption_source = samples.caption_column
        if folder is not None:
            classes = sorted(set(folder.class_names.values()))
            caption_source = folder.captions_from
        card = {
            "name": paths[0].stem,
            "description": "images and captions from a table or folder",
            "made_by": "python -m data pack",
            "source": ", ".join(path.name for path in paths[:_SHOWN]),
            "columns": {"image": samples.image_column, "caption": caption_source},
            "fields": stored_fields,
            "test": options.test,
            "max_side": max_side,
            "keep_orientation": options.keep_orientation,
            "background": options.background,
            **({"captions_per_image": captions} if captions[1] > 1 else {}),
            "bad_rows": dict(bad.most_common()),
            "license": "unknown: that of the images",
        }
        if classes:
            lines = "".join(f"{name}\n" for name in classes)
            writer.extra_file("classes.txt").write_text(lines, "utf-8", "replace")
        writer.finish(card | ({"tasks": ["retrieval"]} if "test" in splits else {}))
    return PackReport(
        splits=splits,
        rows=packed_rows,
        bad=dict(bad.most_common()),
        image_column=samples.image_column,
        caption_column=caption_source,
        bad_rows=writer.out / listing.name if bad else None,
        marks=marks,
        captions=captions,
        fields=stored_fields,
        left_out=tables[0].left_out if tables else {},
        classes=classes,
    )


def _pack_in_order(
    samples: TableSamples | FolderSamples, how: Storing, test: float
) -> Iterator[tuple[int, _Packed | str]]:
    Image.init()
    workers = min(8, os.cpu_count() or 1)  # threads, because reading and decoding release the GIL
    waiting: deque[tuple[int, Future[_Packed | str]]] = deque()
    names = FieldNames(samples.others)
    with ThreadPoolExecutor(workers) as pool:
        for i in range(len(samples)):
            try:
                fields = samples.fields(i)
                texts = check_captions(fields.pop(samples.caption_column))
            except DataError as error:
                waiting.append((i, pool.submit(str, error)))
            else:
                waiting.append(
                    (i, pool.submit(_pack_sample, samples, i, texts, fields, names.of(fields), how, test))
                )
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
    test: float,
) -> _Packed | str:
    captions = list(dict.fromkeys(texts))
    try:
        split = read_split(fields)
        if isinstance(samples, FolderSamples):
            split = select_split(samples.locate(i)[1].partition("/")[0])
        data = samples.read(i, "")
        if len(data) > LARGEST_FILE:
            raise DataError(f"file of more than {LARGEST_FILE // 2**20} MiB")
        image = store_image(data, how)
        meta = fields_of(fields, names, captions)
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
            meta=meta,
        ),
        captions=len(captions),
        marks=marks,
        fields={json_value(column): name for column, name in names.items()},
    )


def _draw_split(data: bytes, test: float) -> str:
    number = int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
    return "test" if test and number < test * 2**64 else "train"


def _unlisted_images(folder: Path, table: Table) -> Iterator[tuple[str, str]]:
    root = folder.absolute()
    listed = set[str]()
    for row in table:
        if isinstance(row.path, str):
            with suppress(DataError):  # a web address
                listed.add(os.path.normpath(table.find_image(row.path).absolute()))
    for path, cause in images_below(root):
        if os.path.normpath(path) not in listed:
            yield str(path.relative_to(root)), cause or f"not listed in {table.path.name}"


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


_REVISION = 8  # of packed folders in the cache; increased when the same input is packed differently


def packed(sources: Sequence[Path] | Sequence[ShardFile]) -> Path:
    """Return a dataset folder in the cache with the images and captions of a source, packed on first use.

    A source is packed again if the path, size, modification time or permissions of a table or of a file in a folder
    of images, or the version of a remote table, have changed. Remote tables are deleted when they are packed.
    """
    digest = hashlib.sha256(f"{_REVISION}".encode())
    remote = [source for source in sources if isinstance(source, ShardFile)]
    paths = [source for source in sources if isinstance(source, Path)]
    facts = [f"{file.url}\0{file.size} {file.version}" for file in remote]
    for path in map(Path.absolute, paths):
        for file, _ in files_below(path) if path.is_dir() else [(path, "")]:
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
        report = pack(tables[0] if len(tables) == 1 else tables, out, progress=sys.stderr.isatty())
        shutil.rmtree(copies, ignore_errors=True)
        size = sum(path.stat().st_size for path in out.rglob("*.tar"))
        bad = sum(report.bad.values())
        left_out = f"; {counted(bad, 'bad row')} left out, see bad_rows.jsonl there" if bad else ""
        print(
            f"packed {report.summary} of {what} into {out} ({format_bytes(size)}){left_out}; "
            "`python -m data pack` writes them to another folder",
            file=sys.stderr,
        )

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


def run_pack(options: PackCommand) -> int:
    """Run ``python -m data pack``."""
    start = time.monotonic()
    report = pack(options.table, options.out, options, progress=not options.quiet)
    print(f"created {options.out} in {time.monotonic() - start:.1f} s")
    print(f"  columns  {report.image_column} (image), {report.caption_column} (caption)")
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


def _list_remarks(report: PackReport, *, keep_orientation: bool, background: str | None) -> Iterator[str]:
    if are_ids(report.classes):
        yield (
            f"warning: the captions are names of folders that look like ids, such as {report.classes[0]!r}: write "
            f"names of classes into {CLASS_NAMES} in the folder, one per line in the order of the folders"
        )
    if report.fields:
        names = [name if name == column else f"{column} as {name}" for column, name in report.fields.items()]
        yield f"stored as fields for data.filters and data.captions: {listed(names)}"
    if report.left_out:
        left_out = [f"{name!r} ({why})" for name, why in report.left_out.items()]
        yield f"columns left out: {', '.join(left_out[:8])}{', …' if len(left_out) > 8 else ''}"
    orientation = (
        "unchanged, and CLIP ignores it"
        if keep_orientation
        else "upright (unless --keep-orientation is given)"
    )
    colors = "CLIP sees the colors hidden below them; --background white blends them onto white"
    if background:
        colors = f"blended onto {background}"
    remarks = {
        "several captions": f"several captions: training uses the first, or draws one with {DRAW_CAPTIONS}; "
        "evaluation uses all",
        "not upright": f"an EXIF orientation: stored {orientation}",
        "deep": "more than 8 bits of gray: stored with all bits; training needs pixels.range, for which "
        "`python -m data inspect` suggests a value",
        "transparent": f"transparent parts: {colors}",
    }
    for mark, remark in remarks.items():
        if count := report.marks[mark]:
            have = "1 image has" if count == 1 else f"{count:,} images have"
            yield f"{have} {remark}"
    if count := report.marks["equal captions"]:
        yield f"{counted(count, 'caption')} left out: equal to another caption of the same image"
    if count := report.marks["other images"]:
        rows = counted(count, "row")
        yield f"{rows} with another image than the first row of the group: only the first row's image is stored"

"""Download the images of a table of URLs into WebDataset shards with img2dataset's layout.

    OUT/00000.tar           samples in the table's order: KEY.jpg, KEY.txt (caption), KEY.json (fields)
    OUT/00000.parquet       all rows of the shard with status, cause, sizes and SHA-256
    OUT/00000_stats.json    counts of the shard; written last, so a shard with this file is complete
    OUT/download.json       the table and the options

Shard i contains rows i · N to (i + 1) · N - 1 of the table. Of identical images, the one in the earliest row is
kept. Shards therefore do not depend on the order of responses, and an interrupted download resumes at its first
incomplete shard.
"""

import argparse
import asyncio
import hashlib
import io
import json
import math
import os
import sqlite3
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import webdataset
from PIL import ExifTags, Image

from clipkit.errors import ConfigError, DataError
from clipkit.files import (
    SUFFIXES,
    CountProgress,
    FileLock,
    Row,
    Table,
    counted,
    printable,
    replacing,
    size_of,
    write_atomic,
)
from data.captions import json_value
from data.pack import BadRow, FieldNames, captions_of
from data.remote.web import Fetcher, FetchError, FetchOptions
from data.shards.images import BROKEN, BadImage, Resize, StoredImage, Storing, store_image

__all__ = ["URL_COLUMNS", "DownloadOptions", "DownloadReport", "download"]

URL_COLUMNS = ("url", "image_url", "img_url", "image_link", "link", "uri", "src")
_OWN_FIELDS = (
    "key", "status", "error_message", "width", "height", "original_width", "original_height", "exif", "sha256",
    "url", "caption", "captions",
)  # fmt: skip
_OPEN_SHARDS = 8  # shards in progress; bounds memory while one waits for its slowest response


@dataclass(frozen=True, kw_only=True)
class DownloadOptions:
    """Which columns and images are stored, and how; must be the same for all parts and restarts.

    Attributes:
        url_column: None to detect it.
        caption_column: None to detect it; a table may have none.
        fields: other columns that become fields of each sample's json; None for all.
        samples_per_shard: rows of each shard.
        deduplicate: skip a row whose URL or image is in an earlier row.
        exif: store the EXIF tags in the json.
        image: how images are resized and stored.
    """

    url_column: str | None = None
    caption_column: str | None = None
    fields: Sequence[str] | None = None
    samples_per_shard: int = 10_000
    deduplicate: bool = True
    exif: bool = False
    image: Storing = field(default_factory=Storing)


@dataclass(frozen=True, kw_only=True)
class DownloadReport:
    """Counts over all shards in the folder.

    Attributes:
        shards: complete shards.
        written: of these by this call.
        rows: their rows.
        kept: rows with an image in a tar.
        downloaded: bytes.
        failures: rows without an image, by cause.
    """

    shards: int
    written: int
    rows: int
    kept: int
    downloaded: int
    failures: Mapping[str, int]


@dataclass(slots=True)
class _Sample:
    """A row and the result of its download."""

    row: Row
    captions: list[str] = field(default_factory=list)
    cause: str = ""
    status: str = ""
    sha256: str = ""
    downloaded: int = 0
    place: tuple[int, int] = (0, 0)  # of the stored image in the spool: offset, length
    extension: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass
class _Shard:
    number: int
    spool: BinaryIO
    samples: list[_Sample] = field(default_factory=list)
    waiting: int = 0
    last: bool = False  # no further rows will come
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    began: float = field(default_factory=time.time)

    def check(self) -> None:
        if self.last and not self.waiting:
            self.complete.set()


class _FirstRows:
    """The row in which each URL or image occurred first, in a temporary file."""

    def __init__(self) -> None:
        self._data = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._data.execute("CREATE TABLE first (digest BLOB PRIMARY KEY, row INTEGER) WITHOUT ROWID")
        self._data.execute("BEGIN")  # never committed

    def claim(self, digest: bytes, row: int) -> bool:
        """Return whether no other row has this digest, and record it."""
        if self._data.execute("INSERT OR IGNORE INTO first VALUES (?, ?)", (digest, row)).rowcount:
            return True
        (first,) = self._data.execute("SELECT row FROM first WHERE digest = ?", (digest,)).fetchone()
        return bool(first == row)


def command(parsed: argparse.Namespace) -> int:
    """Run ``python -m data download``."""
    import torch

    torch.set_num_threads(1)  # images are resized by several threads already
    place, _, parts = parsed.part.partition("/")
    if not (place.isdecimal() and parts.isdecimal() and 1 <= int(place) <= int(parts)):
        raise ConfigError(f"--part {parsed.part}: expected I/N with 1 ≤ I ≤ N, such as 3/16")
    resize = None
    if parsed.resize != "no":
        resize = Resize(mode=parsed.resize, size=parsed.image_size, enlarge=parsed.enlarge)
    options = DownloadOptions(
        url_column=parsed.url_column,
        caption_column=parsed.caption_column,
        fields=None if parsed.fields is None else [one for one in parsed.fields.split(",") if one],
        samples_per_shard=parsed.samples_per_shard,
        deduplicate=not parsed.keep_duplicates,
        exif=parsed.exif,
        image=Storing(resize=resize),
    )
    fetch = FetchOptions(
        connections=parsed.connections,
        per_host=parsed.per_host,
        timeout=parsed.timeout,
        retries=parsed.retries,
        max_bytes=parsed.max_mb * 2**20,
        allow_private=parsed.allow_private,
        ignore_robots=parsed.ignore_robots,
    )
    began = time.monotonic()
    with CountProgress("downloading", total=None, shown=not parsed.quiet) as progress:
        found = download(
            parsed.table, parsed.out, options, fetch=fetch, part=(int(place), int(parts)), show=progress.show
        )
    fraction = found.kept / max(1, found.rows)
    new = f"{time.monotonic() - began:.1f} s" if found.written else "already complete"
    print(f"{parsed.out}: {counted(found.shards, 'shard')}, {new}")
    print(f"  {found.kept:>11,}  of {counted(found.rows, 'row')} kept ({fraction:.1%})")
    for cause, count in found.failures.items():
        print(f"  {count:>11,}  {printable(cause)}")
    print(f"  {size_of(found.downloaded)} downloaded")
    if found.rows and not found.kept:
        raise DataError(f"none of the {counted(found.rows, 'row')} of {parsed.table} gave an image")
    return 0


def download(
    tables: Path | Sequence[Path],
    out: Path,
    options: DownloadOptions,
    *,
    fetch: FetchOptions,
    part: tuple[int, int] = (1, 1),
    show: Callable[[int, int], None] = lambda rows, failed: None,
) -> DownloadReport:
    """Download the images of a table; resume an interrupted download.

    Args:
        tables: .csv, .tsv, .jsonl or .parquet files, or a folder of them, read as one table.
        out: the folder of the shards.
        options: what to store; must be the same in all calls for this folder.
        fetch: limits for requests.
        part: ``(i, n)``: download only every n-th shard, starting at the i-th, 1 ≤ i ≤ n.
        show: called with the number of rows so far, and of those without an image.

    Raises:
        ConfigError: ``out`` was started with other options.
        DataError: a table cannot be read, ``out`` cannot be written, or another process downloads this part.
    """
    paths = _tables(tables)
    readers = [
        Table(
            path,
            image_column=options.url_column,
            caption_column=options.caption_column,
            image_columns=URL_COLUMNS,
            image_name="url",
            need=("image",),
            others=options.fields,
        )
        for path in paths
    ]
    try:
        out.mkdir(parents=True, exist_ok=True)
        _check_options(out, paths, options, fetch)
        lock = FileLock(out / f".part-{part[0]}-of-{part[1]}.lock")
        if not lock.try_acquire():
            raise DataError(f"{out}: {lock.holder or 'another process'} is downloading this part")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's, for damaged images
                written = asyncio.run(_Download(readers, out, options, fetch, part, show).run())
        finally:
            lock.release()
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror or error}") from error
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, OSError):
            raise DataError(f"cannot write {out}: {first.strerror or first}") from first
        raise first from None
    return _report(out, written)


def _report(out: Path, written: int) -> DownloadReport:
    """Add up the counts of all complete shards in a folder."""
    failures = Counter[str]()
    totals = Counter(shards=0, rows=0, kept=0, downloaded=0)
    for path in sorted(out.glob("*_stats.json")):
        stats = json.loads(path.read_bytes())
        totals.update(
            shards=1, rows=stats["count"], kept=stats["successes"], downloaded=stats["bytes_downloaded"]
        )
        failures.update({cause: count for cause, count in stats["status_dict"].items() if cause != "success"})
    return DownloadReport(**totals, written=written, failures=dict(failures.most_common()))


def _tables(tables: Path | Sequence[Path]) -> list[Path]:
    given = [tables] if isinstance(tables, Path) else list(tables)
    found: list[Path] = []
    for path in given:
        inside = sorted(one for one in path.iterdir() if one.suffix in SUFFIXES) if path.is_dir() else [path]
        if not inside:
            raise DataError(f"{path} contains no table ({', '.join(SUFFIXES)})")
        found += inside
    return found


def _check_options(out: Path, paths: Sequence[Path], options: DownloadOptions, fetch: FetchOptions) -> None:
    """Store the options in a new folder; for an existing one, check that they are the same."""
    now = json.loads(
        json.dumps({"tables": [[path.name, path.stat().st_size] for path in paths], **asdict(options)})
    )
    now |= {"allow_private": fetch.allow_private, "ignore_robots": fetch.ignore_robots}
    file = out / "download.json"
    if file.exists():
        before = json.loads(file.read_bytes())
        for name, value in now.items():
            if before.get(name) != value:
                raise ConfigError(
                    f"{out} was started with {name} = {before.get(name)}, not {value}: use the same options, or "
                    "a new folder"
                )
    elif any(path for path in out.iterdir() if not path.name.startswith(".")):
        raise DataError(f"{out} is not empty: use a new folder")
    else:
        write_atomic(file, json.dumps(now, indent=2) + "\n", durable=True)


class _Download:
    """State of one call of ``download`` in the event loop."""

    def __init__(
        self,
        tables: Sequence[Table],
        out: Path,
        options: DownloadOptions,
        fetch: FetchOptions,
        part: tuple[int, int],
        show: Callable[[int, int], None],
    ) -> None:
        self._tables, self._out, self._options, self._part, self._show = tables, out, options, part, show
        self._fetch = fetch
        self._names = FieldNames(chain.from_iterable(table.others for table in tables), taken=_OWN_FIELDS)
        self._first_images = _FirstRows()
        self._has_captions = any(table.caption_column for table in tables)
        self._digits = max(1, math.ceil(math.log10(options.samples_per_shard)))
        self._rows = self._failed = self._written = 0

    async def run(self) -> int:
        """Download the incomplete shards of this part; return their number."""
        Image.init()  # not thread-safe
        connections = self._fetch.connections
        for path in self._out.glob(".*.partial"):  # of a killed process
            if path.name[1:6].isdecimal() and int(path.name[1:6]) % self._part[1] == self._part[0] - 1:
                path.unlink(missing_ok=True)
        window = asyncio.Semaphore(4 * connections)  # rows in progress, most of them waiting for their host
        places = asyncio.Semaphore(_OPEN_SHARDS)
        shards: asyncio.Queue[_Shard | None] = asyncio.Queue()
        with ThreadPoolExecutor(os.cpu_count() or 1, "decode") as pool:
            async with Fetcher(self._fetch) as fetcher, asyncio.TaskGroup() as group:
                group.create_task(self._write_shards(shards, places))

                async def one(sample: _Sample, shard: _Shard) -> None:
                    try:
                        await self._sample(sample, shard, fetcher, pool)
                    finally:
                        window.release()
                    shard.waiting -= 1
                    shard.check()

                shard: _Shard | None = None
                for found in self._rows_of_part():
                    if found is None:
                        await asyncio.sleep(0)
                        continue
                    number, row, is_first = found
                    if shard is None or shard.number != number:
                        if shard is not None:
                            shard.last = True
                            shard.check()
                        await places.acquire()
                        shard = _Shard(number, tempfile.TemporaryFile(dir=self._out))  # noqa: SIM115
                        shards.put_nowait(shard)
                    sample = _Sample(row)
                    shard.samples.append(sample)
                    if not is_first:
                        sample.status, sample.cause = "duplicate", "URL of an earlier row"
                        continue
                    shard.waiting += 1
                    await window.acquire()
                    group.create_task(one(sample, shard))
                if shard is not None:
                    shard.last = True
                    shard.check()
                shards.put_nowait(None)
        return self._written

    def _rows_of_part(self) -> Iterator[tuple[int, Row, bool] | None]:
        """Yield the rows of incomplete shards of this part: shard number, row, whether its URL is new.

        After each thousand rows that are skipped, yield None, so that responses can be read meanwhile.
        """
        first_urls = _FirstRows()
        place, parts = self._part
        number, complete = -1, False
        at = 0
        for table in self._tables:
            for row in table:
                shard, at = divmod(at, self._options.samples_per_shard)[0], at + 1
                is_first = True
                if self._options.deduplicate and isinstance(row.path, str) and row.path:
                    is_first = first_urls.claim(hashlib.sha256(row.path.encode()).digest()[:16], at)
                own = shard % parts == place - 1
                if own and shard != number:
                    number, complete = shard, self._path(shard, "_stats.json").exists()
                    if complete and self._options.deduplicate:
                        self._recall(shard)
                if own and not complete:
                    yield shard, row, is_first
                elif at % 1000 == 0:
                    yield None

    def _recall(self, number: int) -> None:
        """Record which images a complete shard contains."""
        import pyarrow.parquet

        columns = pyarrow.parquet.read_table(
            self._path(number, ".parquet"), columns=["key", "status", "sha256"]
        )
        for key, status, digest in zip(*(column.to_pylist() for column in columns.columns), strict=True):
            if status == "success":
                self._first_images.claim(bytes.fromhex(digest)[:16], int(key))

    def _path(self, number: int, ending: str) -> Path:
        return self._out / f"{number:05d}{ending}"

    async def _sample(
        self, sample: _Sample, shard: _Shard, fetcher: Fetcher, pool: ThreadPoolExecutor
    ) -> None:
        """Download and store the image of one row."""

        async def use(data: bytes) -> None:
            sample.downloaded = len(data)
            stored = await asyncio.get_running_loop().run_in_executor(pool, self._stored, data)
            if isinstance(stored, str):
                sample.status, sample.cause = "failed_to_resize", stored
                return
            image, sample.facts, sample.sha256 = stored
            sample.place = shard.spool.tell(), len(image.data)
            shard.spool.write(image.data)
            sample.extension = image.extension
            sample.status = "success"

        row = sample.row
        try:
            if self._has_captions or row.cause:
                sample.captions = captions_of(row)
            if not isinstance(row.path, str) or not row.path:
                raise FetchError("no URL")
            await fetcher.fetch(row.path.strip(), use)
        except (BadRow, FetchError) as error:
            sample.status, sample.cause = "failed_to_download", str(error)
        self._rows += 1
        self._failed += sample.status != "success"
        self._show(self._rows, self._failed)

    def _stored(self, data: bytes) -> "tuple[StoredImage, dict[str, object], str] | str":
        """Decode and resize an image in a thread; return it, its json fields and digest, or a cause of failure."""
        try:
            image = store_image(data, self._options.image)
        except BadImage as error:
            return str(error)
        facts: dict[str, object] = {
            "width": image.size[0],
            "height": image.size[1],
            "original_width": image.original_size[0],
            "original_height": image.original_size[1],
        }
        if self._options.exif:
            with suppress(*BROKEN), Image.open(io.BytesIO(data)) as opened:
                tags = {
                    ExifTags.TAGS.get(tag, str(tag)): str(value) for tag, value in opened.getexif().items()
                }
                facts["exif"] = json.dumps(tags)
        return image, facts, hashlib.sha256(data).hexdigest()

    async def _write_shards(self, shards: "asyncio.Queue[_Shard | None]", places: asyncio.Semaphore) -> None:
        """Write shards in order, each when it is complete."""
        while (shard := await shards.get()) is not None:
            await shard.complete.wait()
            await asyncio.to_thread(self._write, shard)
            shard.spool.close()
            self._written += 1
            places.release()

    def _write(self, shard: _Shard) -> None:
        options = self._options
        listing: list[dict[str, object]] = []
        causes = Counter[str]()
        with (
            replacing(self._path(shard.number, ".tar"), durable=True) as temporary,
            # a whole-number mtime makes equal shards equal on all machines
            webdataset.TarWriter(str(temporary), mtime=0, user="", group="", encoder=False) as writer,
        ):
            for i, sample in enumerate(shard.samples):
                key = f"{shard.number:05d}{i:0{self._digits}d}"
                if (
                    sample.status == "success"
                    and options.deduplicate
                    and not self._first_images.claim(bytes.fromhex(sample.sha256)[:16], int(key))
                ):
                    sample.status, sample.cause = "duplicate", "image of an earlier row"
                meta = self._meta(sample, key)
                if sample.status == "success":
                    shard.spool.seek(sample.place[0])
                    members = {
                        "__key__": key,
                        sample.extension: shard.spool.read(sample.place[1]),
                        "json": json.dumps(meta, ensure_ascii=False).encode(),
                    }
                    if sample.captions:
                        members["txt"] = sample.captions[0].encode()
                    writer.write(members)
                causes[sample.cause or "success"] += 1
                listing.append(meta)
        with replacing(self._path(shard.number, ".parquet"), durable=True) as temporary:
            _write_parquet(temporary, listing)
        statuses = Counter(sample.status for sample in shard.samples)
        ended = time.time()
        stats = {
            "count": len(shard.samples),
            "successes": statuses["success"],
            "failed_to_download": statuses["failed_to_download"],
            "failed_to_resize": statuses["failed_to_resize"],
            "duplicates": statuses["duplicate"],
            "duration": ended - shard.began,
            "bytes_downloaded": sum(sample.downloaded for sample in shard.samples),
            "start_time": shard.began,
            "end_time": ended,
            "status_dict": dict(causes),
        }
        write_atomic(
            self._path(shard.number, "_stats.json"), json.dumps(stats, indent=2) + "\n", durable=True
        )

    def _meta(self, sample: _Sample, key: str) -> dict[str, Any]:
        """Return the json of a sample, which is also its row in the Parquet file."""
        names = self._names.of(sample.row.others)
        meta = {
            names[column]: json_value(value) for column, value in sample.row.others.items() if column in names
        }
        if len(sample.captions) > 1:
            meta["captions"] = sample.captions
        return meta | {
            "caption": sample.captions[0] if sample.captions else None,
            "url": sample.row.path if isinstance(sample.row.path, str) else None,
            "key": key,
            "status": sample.status,
            "error_message": sample.cause or None,
            "width": None,
            "height": None,
            "original_width": None,
            "original_height": None,
            **sample.facts,
            "sha256": sample.sha256 or None,
        }


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a table; columns of mixed types become JSON strings."""
    import pyarrow
    from pyarrow import parquet

    columns: dict[str, Any] = {}
    for name in dict.fromkeys(chain.from_iterable(rows)):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pyarrow.array(values)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError):
            columns[name] = pyarrow.array([None if value is None else json.dumps(value) for value in values])
    parquet.write_table(pyarrow.table(columns), path)

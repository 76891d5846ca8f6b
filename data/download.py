"""Download the images of a table of URLs into WebDataset shards with img2dataset's layout.

    OUT/00000.tar           samples in the table's order: KEY.jpg, KEY.txt (caption), KEY.json (fields)
    OUT/00000.parquet       all rows of the shard with status, cause, sizes and SHA-256
    OUT/00000_stats.json    counts of the shard; written last, so a shard with this file is complete
    OUT/download.json       the table and the options

Shard i contains rows i · N to (i + 1) · N - 1 of the table. Of rows with the same URL, the first has the captions
of all; the table is read once before the first request to find them. Of identical images with different URLs, the
one in the earliest row is kept. Shards therefore do not depend on the order of responses, and an interrupted
download resumes at its first incomplete shard.

Complete shards are never changed. Rows that are tried again are in additional shards, whose rows have the key of
the first attempt as ``retry_of``. The last attempt of a row is valid. ``00003-retry2.tar`` is the second one that
begins with a row of ``00003.tar``.
"""

import asyncio
import hashlib
import io
import json
import math
import os
import sqlite3
import sys
import tempfile
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow
import webdataset
from PIL import ExifTags, Image
from pyarrow import parquet

import clipkit
from clipkit.errors import ConfigError, DataError
from clipkit.files import (
    CountProgress,
    FileLock,
    counted,
    format_bytes,
    name_order,
    printable,
    ray_cluster,
    redact_url,
    replacing,
    write_atomic,
)
from clipkit.samples import (
    MOST_ROWS,
    NAMED_SUFFIXES,
    PILLOW_ERRORS,
    SUFFIXES,
    Row,
    RowsByKey,
    Table,
    check_captions,
    digest_key,
    list_files,
    merge_rows,
)
from clipkit.samples.remote import describe_files, download_all, is_remote, list_folder
from data.captions import DRAW_CAPTIONS
from data.options import DownloadCommand, DownloadOptions, FetchOptions
from data.pack import FieldNames, make_meta
from data.shards.images import BadImage, Resize, ResizeMode, StoredImage, Storing, store_image
from data.web import Fetcher, FetchError

URL_COLUMNS = ("url", "image_url", "img_url", "image_link", "link", "uri", "src", "coco_url")
_OWN_FIELDS = (
    "key", "status", "error_message", "width", "height", "original_width", "original_height", "exif", "sha256",
    "url", "caption", "captions", "retry_of",
)  # fmt: skip
_ADDED = "URL of an earlier row, which has the caption"
_NOT_ADDED = f"URL of more than {MOST_ROWS} rows: the caption is left out"
_RETRY = "-retry"  # in the names of shards of failed rows
_OPEN_SHARDS = 8  # shards in progress; bounds memory while one waits for its slowest response
_MOST_FAILED = 0.99  # fraction of the last rows from which a download stops
# what causes of most failures usually mean
_PROXY = "if this machine reaches the internet through a proxy, set HTTP_PROXY and HTTPS_PROXY"
_LIKELY_CAUSES = {
    "unknown host": f"this machine resolves no names: check its DNS server; {_PROXY}",
    "no connection": f"the servers or a firewall refuse connections; {_PROXY}",
    "no complete response in time": f"the network is slow, or a firewall drops packets; {_PROXY}",
    "no connection to the proxy": "HTTP_PROXY or HTTPS_PROXY names a proxy that does not answer",
    "invalid certificate": "this clock is wrong, or a proxy signs certificates: set SSL_CERT_FILE to the proxy's",
    "no TLS connection": "the servers, or a proxy before them, do not speak TLS on this port",
}
# rows of which this fraction is computed
_LEAST_WATCHED = 200
_MOST_WATCHED = 1000


@dataclass(frozen=True, kw_only=True)
class DownloadReport:
    """Counts over all shards in the folder.

    Attributes:
        shards: complete shards.
        written: of these by this call.
        rows: their rows.
        kept: rows with an image in a tar.
        downloaded: bytes.
        failures: rows without an image, by the cause of the last attempt.
        caption_column: column with the captions; "" if the table has none.
    """

    shards: int
    written: int
    rows: int
    kept: int
    downloaded: int
    failures: Mapping[str, int]
    caption_column: str


@dataclass(slots=True)
class _Sample:
    row: Row
    fields: Mapping[str, object] = field(default_factory=dict)  # of the json, from other columns
    captions: list[str] = field(default_factory=list)
    cause: str = ""
    status: str = ""
    sha256: str = ""
    downloaded: int = 0
    place: tuple[int, int] = (0, 0)  # of the stored image in the spool: offset, length
    extension: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)
    retry_of: str = ""  # key of the first attempt
    earlier_cause: str = ""  # of the attempt before this one
    row_digest: bytes = b""


@dataclass
class _Shard:
    name: str
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
    def __init__(self, complete: Sequence[Path] = ()) -> None:
        """Begin with the images in these listings (Parquet) of complete shards."""
        self._data = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._data.execute("CREATE TABLE first (digest BLOB PRIMARY KEY, key TEXT) WITHOUT ROWID")
        self._data.execute("BEGIN")  # never committed
        for path in complete:
            rows = parquet.read_table(path, columns=["status", "sha256", "key"]).to_pylist()
            self.claim([(row["sha256"], row["key"]) for row in rows if row["status"] == "success"])

    def claim(self, rows: Iterable[tuple[str, str]]) -> list[bool]:
        """Record digests with the keys of their rows; return for each whether no other row has it."""
        is_first: list[bool] = []
        for sha256, key in rows:
            digest = bytes.fromhex(sha256)[:16]
            if self._data.execute("INSERT OR IGNORE INTO first VALUES (?, ?)", (digest, key)).rowcount:
                is_first.append(True)
            else:
                (first,) = self._data.execute("SELECT key FROM first WHERE digest = ?", (digest,)).fetchone()
                is_first.append(first == key)
        return is_first


def run_download(options: DownloadCommand) -> int:
    """Run ``python -m data download``."""
    import torch

    torch.set_num_threads(1)  # images are resized by several threads already
    i, _, parts = options.part.partition("/")
    if not (i.isdecimal() and parts.isdecimal() and 1 <= int(i) <= int(parts)):
        raise ConfigError(f"--part {options.part}: expected I/N with 1 ≤ I ≤ N, such as 3/16")
    began = time.monotonic()
    with CountProgress("downloading", total=None, shown=not options.quiet) as progress:
        report = download(
            options.table,
            options.out,
            options.stored,
            fetch=options.fetch,
            part=(int(i), int(parts)),
            retry_failed=options.retry_failed,
            ray_address=options.ray,
            show=progress.show,
        )
    fraction = report.kept / max(1, report.rows)
    seconds = time.monotonic() - began
    print(
        f"{options.out}: {counted(report.shards, 'shard')}, {report.written:,} of them new, {seconds:.1f} s"
    )
    print(f"  {report.kept:>11,}  of {counted(report.rows, 'row')} kept ({fraction:.1%})")
    for cause, count in report.failures.items():
        print(f"  {count:>11,}  {printable(cause)}")
    print(f"  {format_bytes(report.downloaded)} downloaded")
    if not report.caption_column:
        print("  no captions: the table has no caption column (--caption-column names one)")
    if _ADDED in report.failures:
        print(f"  images with several captions: training uses the first, or draws one with {DRAW_CAPTIONS}")
    if not report.kept and (report.rows or parts == "1"):
        rows = f"{counted(report.rows, 'row')} of {redact_url(options.table)}"
        raise DataError(f"none of the {rows} gave an image; --retry-failed tries these rows again")
    return 0


def download(
    tables: str | Path | Sequence[str | Path],
    out: Path,
    options: DownloadOptions,
    *,
    fetch: FetchOptions,
    part: tuple[int, int] = (1, 1),
    retry_failed: bool = False,
    ray_address: str | None = None,
    show: Callable[[int, int], None] = lambda rows, failed: None,
) -> DownloadReport:
    """Download the images of a table; resume an interrupted download.

    Args:
        tables: tables (see ``clipkit.files.Table``), .txt files with a URL per line, or folders of tables, local or
            remote, read as one table. Remote tables are downloaded to ``out/.tables`` first, and again when they
            have changed.
        out: the folder of the shards.
        options: what to store; must be the same in all calls for this folder.
        fetch: limits for requests.
        part: ``(i, n)``: download only every n-th shard, starting at the i-th, 1 ≤ i ≤ n.
        retry_failed: also try the rows again that failed in shards that are complete.
        ray_address: of a Ray cluster, each of whose tasks downloads a shard. ``out`` must be on a file system that
            its machines share.
        show: called with the number of rows so far, and of those without an image.
    """
    out = out.absolute()
    if any(out.glob("[!.]*")) and not (out / "download.json").exists():
        raise DataError(f"{out} is not empty: use a new folder")
    paths = _list_tables([tables] if isinstance(tables, str | Path) else tables, out / ".tables")
    readers = []
    for path in paths:
        reader = Table(
            path,
            image_column=options.url_column,
            caption_column=options.caption_column,
            image_columns=URL_COLUMNS,
            image_name="url",
            need=("image",),
            others=options.fields,
        )
        readers.append(reader)
    try:
        out.mkdir(parents=True, exist_ok=True)
        _check_options(out, paths, options, fetch)
        lock = FileLock(out / f".part-{part[0]}-of-{part[1]}.lock", optional=True)
        if not lock.try_acquire():
            raise DataError(f"{out}: {lock.holder or 'another process'} is downloading this part")
        try:
            _check_other_parts(out, part[1])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's, for damaged images
                caption_column = next((table.caption_column for table in readers if table.caption_column), "")
                samples = _samples_of(readers, out, options, part, bool(caption_column), retry_failed)
                if ray_address is not None:
                    written = _download_on_ray(samples, out, options, fetch, part, ray_address, show)
                else:
                    claim = _FirstRows(_listings(out, part)).claim
                    written = asyncio.run(_Download(out, options, fetch, claim, show).run(samples))
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
    return _report(out, written, caption_column)


def _report(out: Path, written: int, caption_column: str) -> DownloadReport:
    failures = Counter[str]()
    totals = Counter(shards=0, rows=0, kept=0, downloaded=0)
    for path in sorted(out.glob("*_stats.json")):
        stats = json.loads(path.read_bytes())
        retried = Counter[str](stats.get("retried", {}))
        totals.update(
            shards=1,
            rows=stats["count"] - retried.total(),
            kept=stats["successes"],
            downloaded=stats["bytes_downloaded"],
        )
        failures.update(stats["status_dict"])
        failures.subtract(retried)
    del failures["success"]
    return DownloadReport(
        **totals, written=written, failures=dict((+failures).most_common()), caption_column=caption_column
    )


def _list_tables(tables: Sequence[str | Path], copies: Path) -> list[Path]:
    paths: list[Path] = []
    for table in map(str, tables):
        if is_remote(table):
            name = table.partition("?")[0].lower()
            is_file = name.endswith((*SUFFIXES, *NAMED_SUFFIXES))
            in_any_case = (*SUFFIXES, *map(str.upper, SUFFIXES))
            files = describe_files([table]) if is_file else list_folder(table, in_any_case)
            inside = download_all(files, copies)
        elif (path := Path(table)).is_dir():
            inside = [Path(file.url) for file in list_files(path, SUFFIXES)]
            print(f"{path}: reads the {counted(len(inside), 'table')} directly in it", file=sys.stderr)
        else:
            inside = [path]
        if not inside:
            raise DataError(f"{redact_url(table)} contains no table ({', '.join(SUFFIXES)})")
        paths += inside
    return paths


# options that decide only which rows fail; --retry-failed tries these rows again
_MAY_CHANGE = ("allow_private", "ignore_robots")


def _check_options(out: Path, paths: Sequence[Path], options: DownloadOptions, fetch: FetchOptions) -> None:
    stored = asdict(options)
    stored["keep_duplicates"] = not stored.pop("deduplicate")
    # how training treats the images, as recorded by pack
    stored |= {"keep_orientation": False, "background": None}
    if options.resize == "no":
        stored["image_size"] = None
        del stored["enlarge"]
    stored |= {"allow_private": fetch.allow_private, "ignore_robots": fetch.ignore_robots}
    now = json.loads(json.dumps(stored))
    file = out / "download.json"
    if not file.exists():
        table = [path.name for path in paths]
        write_atomic(file, json.dumps({"table": table, **now}, indent=2) + "\n", durable=True)
        return
    before = json.loads(file.read_bytes())
    changed = []
    for name, value in now.items():
        if before.get(name) != value and name not in _MAY_CHANGE:
            changed.append(f"--{name.replace('_', '-')} {json.dumps(before.get(name))} → {json.dumps(value)}")
    if changed:
        raise ConfigError(
            f"{out} was started with other options ({', '.join(changed)}): use the same options, or a new folder"
        )


def _check_other_parts(out: Path, parts: int) -> None:
    for path in out.glob(".part-*-of-*.lock"):
        index, _, others = path.stem.removeprefix(".part-").partition("-of-")
        if others == str(parts):
            continue
        lock = FileLock(path, optional=True)
        if not lock.try_acquire():
            raise ConfigError(
                f"{out}: {lock.holder or 'another process'} is downloading part {index}/{others}: use the same "
                "number of parts, or wait for the end"
            )
        lock.release()


def _shard_name(index: int) -> str:
    return f"{index:05d}"


def _stats_path(out: Path, shard: str) -> Path:
    return out / f"{shard}_stats.json"


def _listing_path(out: Path, shard: str) -> Path:
    return out / f"{shard}.parquet"


def _digest_row(row: Row) -> bytes:
    try:
        text = json.dumps([row.path, row.caption, row.others], default=str)
    except RecursionError:  # such a row is a bad row
        text = json.dumps([row.path])
    return hashlib.sha256(text.encode()).digest()


def _check_rows(rows: Iterable[Row], out: Path, samples_per_shard: int) -> Iterator[Row]:
    """Yield the rows of a table, and check that those of each complete shard are the rows it was made of."""
    shard = -1
    for shard, shard_rows in groupby(enumerate(rows), key=lambda item: item[0] // samples_per_shard):
        path = _stats_path(out, _shard_name(shard))
        stats = json.loads(path.read_bytes()) if path.exists() else {}
        digest = hashlib.sha256()
        for _, row in shard_rows:
            if stats:
                digest.update(_digest_row(row))
            yield row
        if stats.get("table_sha256", digest.hexdigest()) != digest.hexdigest():
            raise _other_table(out, _shard_name(shard))
    for stored in _complete_shards(out):
        if not _is_retry(stored) and int(stored) > shard:
            raise _other_table(out, stored)


def _other_table(out: Path, shard: str) -> ConfigError:
    return ConfigError(
        f"{out / f'{shard}.tar'} was made of other rows of the table (number, order or values of the rows have "
        "changed): use the table that the download began with, or a new folder"
    )


def _complete_shards(out: Path) -> list[str]:
    return sorted(
        (path.name.removesuffix("_stats.json") for path in out.glob("*_stats.json")), key=name_order
    )


def _is_retry(shard: str) -> bool:
    return _RETRY in shard


def _is_in_part(shard: str, part: tuple[int, int]) -> bool:
    return int(shard.partition(_RETRY)[0]) % part[1] == part[0] - 1


def _listings(out: Path, part: tuple[int, int]) -> list[Path]:
    return [_listing_path(out, shard) for shard in _complete_shards(out) if _is_in_part(shard, part)]


def _samples_of(
    tables: Sequence[Table],
    out: Path,
    options: DownloadOptions,
    part: tuple[int, int],
    keep_captions: bool,
    retry_failed: bool,
) -> Iterator[tuple[str, _Sample] | None]:
    """Yield the samples of incomplete shards of a part: name of the shard and sample.

    With ``retry_failed``, the failed rows of complete shards follow, in new shards. After each thousand rows that
    are skipped, yield None, so that responses can be read meanwhile.
    """
    groups = RowsByKey()
    if options.deduplicate:
        yield from _add_rows(tables, groups, keep_captions)
    complete_before = _complete_shards(out)
    names = FieldNames(chain.from_iterable(table.others for table in tables), taken=_OWN_FIELDS)
    first_part, parts = part
    current = -1
    complete = False
    rows = _check_rows(_merge_groups(tables, groups), out, options.samples_per_shard)
    for at, row in enumerate(rows):
        shard = at // options.samples_per_shard
        fields = names.assign(row.others)
        in_this_part = shard % parts == first_part - 1
        if in_this_part and shard != current:
            current = shard
            complete = _stats_path(out, _shard_name(shard)).exists()
        if in_this_part and not complete:
            sample = _make_sample(row, fields, keep_captions)
            position = groups.position(at)
            if position:
                sample.status = "duplicate"
                sample.cause = "URL of an earlier row"
                if keep_captions:
                    sample.cause = _ADDED if position < MOST_ROWS else _NOT_ADDED
            yield _shard_name(shard), sample
        elif at % 1000 == 0:
            yield None
    if not (retry_failed and complete_before):
        return
    in_part = {shard for shard in complete_before if _is_in_part(shard, part)}
    for path in out.glob(f"*{_RETRY}*.tar"):  # of a killed process; the same rows may be in another shard now
        if path.stem not in in_part and _is_in_part(path.stem, part):
            path.unlink()
    last_attempts = _read_retries(out, filter(_is_retry, in_part))
    attempts: list[dict[str, str]] = []
    retry_shard = ""
    retried = 0
    for at, row in enumerate(_merge_groups(tables, groups)):
        if at % 1000 == 0:
            yield None
        i = at % options.samples_per_shard
        if i == 0:
            table_shard = _shard_name(at // options.samples_per_shard)
            attempts = _read_attempts(out, table_shard) if table_shard in in_part else []
        if not attempts:
            continue
        key = attempts[i]["key"]
        last = last_attempts.get(key, attempts[i])
        if last["status"].startswith("failed"):
            sample = _make_sample(row, names.assign(row.others), keep_captions)
            sample.retry_of = key
            sample.earlier_cause = last["error_message"]
            if retried % options.samples_per_shard == 0:
                turn = 1
                while (retry_shard := f"{table_shard}{_RETRY}{turn}") in in_part:
                    turn += 1
            yield retry_shard, sample
            retried += 1


def _add_rows(tables: Sequence[Table], groups: RowsByKey, keep_captions: bool) -> Iterator[None]:
    for at, row in enumerate(chain.from_iterable(tables)):
        if at % 1000 == 0:
            yield
        if row.cause or not isinstance(row.path, str) or not row.path.strip():
            continue
        try:
            if keep_captions:
                check_captions(row.caption)
        except DataError:
            continue
        groups.add(at, row, digest_key(row.path.strip().encode("utf-8", "surrogatepass")))


def _merge_groups(tables: Sequence[Table], groups: RowsByKey) -> Iterator[Row]:
    for at, row in enumerate(chain.from_iterable(tables)):
        yield row if groups.position(at) else merge_rows([row, *groups.stored_rows(at)])


def _read_attempts(out: Path, shard: str, *more_columns: str) -> list[dict[str, str]]:
    columns = ["key", "status", "error_message", *more_columns]
    rows: list[dict[str, str]] = parquet.read_table(_listing_path(out, shard), columns=columns).to_pylist()
    return rows


def _read_retries(out: Path, shards: Iterable[str]) -> dict[str, dict[str, str]]:
    def end_time(shard: str) -> float:
        return float(json.loads(_stats_path(out, shard).read_bytes())["end_time"])

    retries: dict[str, dict[str, str]] = {}
    for shard in sorted(shards, key=end_time):
        for attempt in _read_attempts(out, shard, "retry_of"):
            retries[attempt["retry_of"]] = attempt
    return retries


def _make_sample(row: Row, names: Mapping[str, str], keep_captions: bool) -> _Sample:
    sample = _Sample(replace(row, others={}), row_digest=_digest_row(row))
    try:
        if row.cause:
            raise DataError(row.cause)
        if keep_captions:
            sample.captions = list(dict.fromkeys(check_captions(row.caption)))
        sample.fields = make_meta(row.others, names, sample.captions)
    except DataError as error:
        sample.status = "failed_to_download"
        sample.cause = str(error)
    return sample


class _Download:
    """Downloads samples into shards, in one event loop.

    Args:
        claim: called with the digests and keys of a shard's images, in the order of shards; returns for each
            whether it is the first.
        threads: for decoding.
    """

    def __init__(
        self,
        out: Path,
        options: DownloadOptions,
        fetch: FetchOptions,
        claim: Callable[[Sequence[tuple[str, str]]], Sequence[bool]],
        show: Callable[[int, int], None],
        threads: int = os.cpu_count() or 1,
    ) -> None:
        self._out = out
        self._options = options
        self._fetch = fetch
        self._claim = claim
        self._show = show
        resize = None
        if options.resize != "no":
            resize = Resize(
                mode=cast(ResizeMode, options.resize), size=options.image_size, enlarge=options.enlarge
            )
        self._storing = Storing(resize=resize)
        self._threads = threads
        self._unfinished: deque[_Sample] = deque()
        self._outcomes: deque[_Sample] = deque(maxlen=_MOST_WATCHED)
        self._digits = max(1, math.ceil(math.log10(options.samples_per_shard)))
        self.rows = self.failed = self._written = 0

    async def run(self, samples: Iterable[tuple[str, _Sample] | None]) -> int:
        """Download samples with the names of their shards, in order; return the number of shards."""
        Image.init()  # not thread-safe
        connections = self._fetch.connections
        window = asyncio.Semaphore(4 * connections)  # rows in progress, most of them waiting for their host
        open_shards = asyncio.Semaphore(_OPEN_SHARDS)
        shards: asyncio.Queue[_Shard | None] = asyncio.Queue()
        with ExitStack() as spools, ThreadPoolExecutor(self._threads, "decode") as pool:
            async with Fetcher(self._fetch) as fetcher, asyncio.TaskGroup() as group:
                group.create_task(self._write_shards(shards, open_shards, pool))

                async def one(sample: _Sample, shard: _Shard) -> None:
                    try:
                        await self._sample(sample, shard, fetcher, pool)
                    finally:
                        window.release()
                    shard.waiting -= 1
                    shard.check()

                shard: _Shard | None = None
                for item in samples:
                    if item is None:
                        await asyncio.sleep(0)
                        continue
                    name, sample = item
                    if shard is None or shard.name != name:
                        if shard is not None:
                            shard.last = True
                            shard.check()
                        await open_shards.acquire()
                        shard = _Shard(name, tempfile.TemporaryFile(dir=self._out))  # noqa: SIM115
                        spools.enter_context(shard.spool)
                        shards.put_nowait(shard)
                    shard.samples.append(sample)
                    self._unfinished.append(sample)
                    if sample.status:
                        self._count(sample)
                        continue
                    shard.waiting += 1
                    await window.acquire()
                    group.create_task(one(sample, shard))
                if shard is not None:
                    shard.last = True
                    shard.check()
                shards.put_nowait(None)
        return self._written

    def _key(self, shard: str, i: int) -> str:
        return f"{shard}{i:0{self._digits}d}"

    async def _sample(
        self, sample: _Sample, shard: _Shard, fetcher: Fetcher, pool: ThreadPoolExecutor
    ) -> None:
        async def use(data: bytes) -> None:
            sample.downloaded = len(data)
            stored = await asyncio.get_running_loop().run_in_executor(pool, self._stored, data)
            if isinstance(stored, str):
                sample.status = "failed_to_resize"
                sample.cause = stored
                return
            image, sample.facts, sample.sha256 = stored
            sample.place = shard.spool.tell(), len(image.data)
            shard.spool.write(image.data)
            sample.extension = image.extension
            sample.status = "success"

        row = sample.row
        try:
            if not isinstance(row.path, str) or not row.path:
                raise FetchError("no URL")
            await fetcher.fetch(row.path.strip(), use)
        except FetchError as error:
            sample.status = "failed_to_download"
            sample.cause = str(error)
        self._count(sample)

    def _count(self, sample: _Sample) -> None:
        self.rows += 1
        self.failed += sample.status != "success"
        self._show(self.rows, self.failed)
        self._stop_if_nearly_all_fail()

    def _stop_if_nearly_all_fail(self) -> None:
        # in the order of the table, because failures are faster than downloads
        while self._unfinished and self._unfinished[0].status:
            sample = self._unfinished.popleft()
            # a row that fails again as before is no sign of trouble
            fails_again = sample.cause != "" and sample.cause == sample.earlier_cause
            if sample.status != "duplicate" and not fails_again:
                self._outcomes.append(sample)
        rows = len(self._outcomes)
        if self._fetch.keep_going or rows < _LEAST_WATCHED or not self._outcomes[-1].cause:
            return
        failed = [sample for sample in self._outcomes if sample.cause]
        if len(failed) < _MOST_FAILED * rows:
            return
        [(cause, count)] = Counter(sample.cause for sample in failed).most_common(1)
        likely = ""
        if cause in _LIKELY_CAUSES:
            likely = f" (likely cause: {_LIKELY_CAUSES[cause]})"
        raise DataError(
            f"{self._out}: stopped, because {len(failed)} of the last {rows} rows failed, {count} of them "
            f"with {cause!r}{likely}; run the same command again to continue, with --retry-failed to try failed "
            "rows again, or with --keep-going not to stop"
        )

    def _stored(self, data: bytes) -> "tuple[StoredImage, dict[str, object], str] | str":
        try:
            image = store_image(data, self._storing)
        except BadImage as error:
            return str(error)
        facts: dict[str, object] = {
            "width": image.size[0],
            "height": image.size[1],
            "original_width": image.original_size[0],
            "original_height": image.original_size[1],
        }
        if self._options.exif:
            with suppress(*PILLOW_ERRORS), Image.open(io.BytesIO(data)) as opened:
                tags = {}
                for tag, value in opened.getexif().items():
                    tags[ExifTags.TAGS.get(tag, str(tag))] = str(value)
                facts["exif"] = json.dumps(tags)
        return image, facts, hashlib.sha256(data).hexdigest()

    async def _write_shards(
        self, shards: "asyncio.Queue[_Shard | None]", open_shards: asyncio.Semaphore, pool: ThreadPoolExecutor
    ) -> None:
        while (shard := await shards.get()) is not None:
            await shard.complete.wait()
            if self._options.deduplicate:
                images = []
                for i, sample in enumerate(shard.samples):
                    if sample.status == "success":
                        images.append((sample, (sample.sha256, self._key(shard.name, i))))
                for (sample, _), first in zip(images, self._claim([row for _, row in images]), strict=True):
                    if not first:
                        sample.status = "duplicate"
                        sample.cause = "image of an earlier row"
            fail_again = (  # for the same causes
                sample.retry_of
                and sample.status.startswith("failed")
                and sample.cause == sample.earlier_cause
                for sample in shard.samples
            )
            if not all(fail_again):
                await asyncio.get_running_loop().run_in_executor(pool, self._write, shard)
                self._written += 1
            shard.spool.close()
            open_shards.release()

    def _write(self, shard: _Shard) -> None:
        for path in self._out.glob(f".{shard.name}[._]*.partial"):  # of a killed process
            path.unlink(missing_ok=True)
        listing: list[dict[str, object]] = []
        causes = Counter[str]()
        digest = hashlib.sha256()
        with (
            replacing(self._out / f"{shard.name}.tar", durable=True) as temporary,
            # a whole-number mtime makes equal shards equal on all machines
            webdataset.TarWriter(str(temporary), mtime=0, user="", group="", encoder=False) as writer,
        ):
            for i, sample in enumerate(shard.samples):
                key = self._key(shard.name, i)
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
                digest.update(sample.row_digest)
                listing.append(meta)
        with replacing(_listing_path(self._out, shard.name), durable=True) as temporary:
            _write_parquet(temporary, listing)
        statuses = Counter(sample.status for sample in shard.samples)
        ended = time.time()
        stats = {
            "count": len(shard.samples),
            "successes": statuses["success"],
            "failed_to_download": statuses["failed_to_download"],
            "failed_to_resize": statuses["failed_to_resize"],
            "duplicates": statuses["duplicate"],
            "table_sha256": digest.hexdigest(),
            "duration": ended - shard.began,
            "bytes_downloaded": sum(sample.downloaded for sample in shard.samples),
            "start_time": shard.began,
            "end_time": ended,
            "status_dict": dict(causes),
        }
        retried = Counter(sample.earlier_cause for sample in shard.samples if sample.retry_of)
        if retried:
            stats["retried"] = dict(retried)
        write_atomic(_stats_path(self._out, shard.name), json.dumps(stats, indent=2) + "\n", durable=True)

    def _meta(self, sample: _Sample, key: str) -> dict[str, Any]:
        meta = dict(sample.fields)
        if sample.retry_of:
            meta["retry_of"] = sample.retry_of
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


def _download_on_ray(
    samples: Iterable[tuple[str, _Sample] | None],
    out: Path,
    options: DownloadOptions,
    fetch: FetchOptions,
    part: tuple[int, int],
    address: str,
    show: Callable[[int, int], None],
) -> int:
    packages = [Path(__file__).parents[1], Path(clipkit.__file__).parent]
    with ray_cluster(address, packages) as ray:
        claims = ray.remote(num_cpus=0)(_Claims).remote(_listings(out, part))
        task = ray.remote(num_cpus=1, max_retries=3)(_download_shard)
        pending: dict[Any, str] = {}
        written = rows = failed = 0

        def wait() -> None:
            nonlocal written, rows, failed
            [done], _ = ray.wait(list(pending), num_returns=1)
            shard = pending.pop(done)
            try:
                counts = ray.get(done)
            except ray.exceptions.RayTaskError as error:  # whose text contains a traceback
                if isinstance(error.cause, DataError):
                    raise DataError(str(error.cause)) from None
                raise
            if counts[0] > counts[1] and not _stats_path(out, shard).exists():
                raise DataError(f"{out} is not on a file system that the machines of the Ray cluster share")
            written = written + 1
            rows = rows + counts[0]
            failed = failed + counts[1]
            show(rows, failed)

        for turn, (name, group) in enumerate(groupby(filter(None, samples), key=itemgetter(0))):
            tasks = max(1, int(ray.cluster_resources().get("CPU", 1)))
            while len(pending) >= 2 * tasks:
                wait()
            limits = replace(fetch, per_host=max(1, fetch.per_host // tasks))
            pending[
                task.remote([sample for _, sample in group], name, turn, out, options, limits, claims)
            ] = name
        while pending:
            wait()
    return written


class _Claims:
    """Ray actor that answers the claims of shards in order, because their tasks end in any order."""

    def __init__(self, complete: Sequence[Path]) -> None:
        self._first_images = _FirstRows(complete)
        self._turn = 0
        self._changed = asyncio.Condition()

    async def claim(self, turn: int, rows: Sequence[tuple[str, str]]) -> list[bool]:
        async with self._changed:
            await self._changed.wait_for(lambda: turn <= self._turn)  # less in a task that runs again
            is_first = self._first_images.claim(rows)
            self._turn = max(self._turn, turn + 1)
            self._changed.notify_all()
        return is_first


def _download_shard(
    samples: Sequence[_Sample],
    name: str,
    turn: int,
    out: Path,
    options: DownloadOptions,
    fetch: FetchOptions,
    claims: Any,
) -> tuple[int, int]:
    import ray

    shard = _Download(
        out,
        options,
        fetch,
        # waits in the main thread, so that Ray gives this task's core to another
        lambda rows: ray.get(claims.claim.remote(turn, rows)),
        lambda rows, failed: None,
        threads=1,
    )
    asyncio.run(shard.run((name, sample) for sample in samples))
    return shard.rows, shard.failed


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a table; columns of mixed types become JSON strings."""

    columns: dict[str, Any] = {}
    for name in dict.fromkeys(chain.from_iterable(rows)):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pyarrow.array(values)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError):
            columns[name] = pyarrow.array([None if value is None else json.dumps(value) for value in values])
    parquet.write_table(pyarrow.table(columns), path)

"""``clipkit encode``: pictures or texts to a folder of embeddings, from where a former run of it stopped.

The items of all sources are numbered. Part p holds items p·n to (p + 1)·n - 1 and is encoded by process p mod the
number of processes, batch by batch from its beginning: which process does it, and after how many stops, changes
no bit of its file. A part is encoded again if the names of its items have changed, or the content of one.
Content is read again only where the size, a time or the inode of a file has changed:
see ``clipkit.inference.folder``.
"""

import errno
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from clipkit.api import load
from clipkit.distributed import rank_and_world
from clipkit.errors import ConfigError, DataError
from clipkit.files.progress import CountProgress
from clipkit.files.text import counted
from clipkit.files.traits import hex_of
from clipkit.formats.checkpoint import model_hash
from clipkit.inference.folder import (
    ContentDigest,
    EmbeddingFolder,
    Manifest,
    Part,
    PartDigest,
    Totals,
    only_writer,
)
from clipkit.inference.inputs import Item, Member, Stream
from clipkit.inference.stream import Failure, FeatureStream, pick_device

__all__ = ["EncodeOptions", "Encoded", "encode", "run"]


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """What the command line says; see ``clipkit encode --help``."""

    sources: Sequence[str]
    model: str
    out: Path
    text: bool
    batch_size: int | None
    rows_per_file: int
    workers: int | None
    device: str | None
    precision: str
    name: str
    image_column: str | None
    caption_column: str | None
    background: str | None
    upright: bool | None
    retry_failed: bool
    quiet: bool


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What one process has done.

    Attributes:
        folder: where the embeddings lie, such as OUT/img_emb.
        files: how many there are in all.
        written: how many of them this process wrote.
        found: how many of them were there before.
        stale: how many of its own were there too, but made of what has changed since.
        unknown: how many of these were made by an earlier version, which did not record the content.
        compared: how many of its own were kept because their content is the same, though times or inodes differ.
        empty_lines: lines of a list of texts that are empty, which are encoded like any other.
        done: items that this process took in.
        failed: those of them that could not be encoded.
        seconds: that this took.
        totals: of all files, if all are complete.
    """

    folder: Path
    files: int
    written: int
    found: int
    stale: int
    unknown: int
    compared: int
    empty_lines: int
    done: int
    failed: int
    seconds: float
    totals: Totals | None


@dataclass(frozen=True, kw_only=True)
class _Survey:
    """What a look through the sources has shown."""

    items: int
    digests: list[PartDigest]
    captions: bool
    empty_lines: int


def encode(
    stream: Stream,
    out: Path,
    features: FeatureStream,
    *,
    model_name: str = "",
    sources: Sequence[str] = (),
    rows_per_file: int,
    process: int = 0,
    processes: int = 1,
    retry_failed: bool = False,
    progress: bool = True,
) -> Encoded:
    """Encode the pictures, or the captions, of a stream into a folder; see ``clipkit.inference.folder``.

    Args:
        stream: what to encode.
        out: the folder; a former run of the same sources, or fewer of them, with the same settings is gone on with.
        features: the model and how it is used.
        model_name: for the manifest.
        sources: as they were named, for the manifest.
        rows_per_file: items of a part.
        process: this one's number; each does its own parts.
        processes: how many there are.
        retry_failed: whether files with failures are encoded again.
        progress: whether to show how far it has come, on stderr.

    Raises:
        ConfigError: a setting is out of range, the folder holds embeddings made from or by something else, or
            another process is writing there.
        DataError: a source is missing or empty, or has changed while it was read, or the model gives no finite
            numbers.
    """
    if rows_per_file < 1:
        raise ConfigError(f"rows_per_file = {rows_per_file}: it must be 1 or more")
    _check_pyarrow()
    with CountProgress("counting", total=None, shown=progress) as bar:
        survey = _look_through(stream, rows_per_file, bar.show)
    decoding = features.model.preprocess.decoding
    manifest = Manifest(
        kind=stream.kind,
        model=model_name,
        weights=model_hash(features.model),
        background=hex_of(decoding.background),
        upright=decoding.upright,
        sources=list(sources),
        items=survey.items,
        digest=hashlib.sha256(repr(survey.digests).encode()).hexdigest()[:32],
        captions=survey.captions,
        rows_per_file=rows_per_file,
        batch_size=features.batch_size,
        precision=features.precision,
        device=features.device.type,
    )
    with only_writer(out, process):
        folder = EmbeddingFolder(
            out,
            manifest,
            survey.digests,
            process=process,
            processes=processes,
            retry_failed=retry_failed,
            contents=partial(
                _contents, stream=stream, manifest=manifest, features=features, progress=progress
            ),
        )
        own = _Own(folder, process, processes)
        return _encode_parts(stream, folder, features, own, survey.empty_lines, progress)


def _check_pyarrow() -> None:
    """Say now, not when the first file is full, that it cannot be written."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "metadata are Parquet files, which need pyarrow: pip install 'pyarrow>=18'"
        ) from error


def _encode_parts(
    stream: Stream,
    folder: EmbeddingFolder,
    features: FeatureStream,
    own: "_Own",
    empty_lines: int,
    progress: bool,
) -> Encoded:
    """Encode this process's parts that are not there yet."""
    manifest = folder.manifest
    found = sum(folder.is_done(part) for part in range(manifest.files))
    done = failed = written = 0
    began = time.monotonic()
    parts: dict[int, Part] = {}  # that are begun: at most two
    with CountProgress("encoding", total=own.count(), shown=progress) as bar:
        for outcome in features.run(own.items(stream), kind=stream.kind, captions=manifest.captions):
            part = parts.setdefault(outcome.part, Part(outcome.part))
            part.add(outcome)
            if isinstance(outcome, Failure):
                done, failed = done + 1, failed + 1
            else:
                done += len(outcome.items)
            if len(part) == manifest.items_of(part.number):
                if not part.rows:
                    part.rows.append(features.nothing(stream.kind).astype(np.float16))
                folder.write(parts.pop(part.number))
                written += 1
            bar.show(done, failed)
    if parts:
        raise DataError("the sources have changed while they were read: run the same command again")
    return Encoded(
        folder=folder.out / folder.embeddings,
        files=manifest.files,
        written=written,
        found=found,
        stale=folder.stale,
        unknown=folder.unknown,
        compared=folder.compared,
        empty_lines=empty_lines,
        done=done,
        failed=failed,
        seconds=time.monotonic() - began,
        totals=folder.finish(),
    )


class _Own:
    """The parts that one process has to do: every so many of them, if they are not complete yet."""

    def __init__(self, folder: EmbeddingFolder, process: int, processes: int) -> None:
        self._folder, self._process, self._processes = folder, process, processes

    def _parts(self) -> Iterator[int]:
        for part in range(self._process, self._folder.manifest.files, self._processes):
            if not self._folder.is_done(part):
                yield part

    def count(self) -> int:
        """How many items they have."""
        return sum(map(self._folder.manifest.items_of, self._parts()))

    def items(self, stream: Stream) -> Iterator[tuple[int, Item]]:
        """Each of their items with its part's number."""
        return _items_of(stream, self._parts(), self._folder.manifest.rows_per_file)


def _items_of(stream: Stream, parts: Iterator[int], length: int) -> Iterator[tuple[int, Item]]:
    """The items of some parts of ``length`` items each, in rising order, with the part's number."""
    wanted = next(parts, None)
    for number, item in enumerate(stream):
        part = number // length
        while wanted is not None and part > wanted:
            wanted = next(parts, None)
        if wanted is None:
            return
        if part == wanted:
            yield part, item


def _contents(
    parts: Sequence[int], *, stream: Stream, manifest: Manifest, features: FeatureStream, progress: bool
) -> dict[int, str]:
    """Read the items of some parts (rising); the digest of each part's content."""
    found = {part: ContentDigest() for part in parts}
    items = _items_of(stream, iter(parts), manifest.rows_per_file)
    with CountProgress("comparing", total=sum(map(manifest.items_of, parts)), shown=progress) as bar:
        read = features.contents(items, kind=stream.kind, captions=manifest.captions)
        for done, (part, item, content) in enumerate(read, 1):
            found[part].add(item, content)
            bar.show(done)
    return {part: digest.hexdigest() for part, digest in found.items()}


def _look_through(stream: Stream, length: int, show: Callable[[int], None]) -> _Survey:
    """Count the items, and take a digest of every ``length`` of them, by which a change will be known."""
    digests: list[tuple[str, str]] = []
    names, files, count, captions, empty = hashlib.sha256(), hashlib.sha256(), 0, False, 0
    stamps = _Stamps(stream)
    for count, item in enumerate(stream, 1):
        text = item.caption if isinstance(item.caption, str) else ""
        for part in (item.source, item.key, text):
            names.update(part.encode("utf-8", "surrogatepass") + b"\0")
        files.update(stamps.of(item).encode() + b"\0")
        captions = captions or item.caption is not None
        empty += isinstance(item.caption, str) and not text.strip()
        if count % length == 0:
            digests.append((names.hexdigest(), files.hexdigest()))
            names, files = hashlib.sha256(), hashlib.sha256()
        if count % 1000 == 0:
            show(count)
    if count % length:
        digests.append((names.hexdigest(), files.hexdigest()))
    # whether there are captions says which columns all files have
    return _Survey(
        items=count,
        digests=[PartDigest(names=f"{name[:31]}{captions:d}", files=file[:32]) for name, file in digests],
        captions=captions,
        empty_lines=empty if stream.kind == "caption" else 0,
    )


class _Stamps:
    """Sizes, times and inodes of the files that hold the items of a stream."""

    def __init__(self, stream: Stream) -> None:
        self._kind = stream.kind
        self._last: tuple[Path | None, str] = (None, "")

    def of(self, item: Item) -> str:
        """That of one item; "" where there is no such file, or the item's text is all there is of it."""
        held = item.image if self._kind == "image" else item.caption
        path = held.shard if isinstance(held, Member) else held
        if not isinstance(path, Path):
            return ""
        if path != self._last[0]:  # a shard holds many
            try:
                found = path.stat()
                # renaming and unpacking keep sizes and modification times, or set them to what they like
                stamp = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
                self._last = path, " ".join(map(str, stamp))
            except (OSError, ValueError):
                self._last = path, ""
        return self._last[1]


def run(options: EncodeOptions) -> int:
    """The command; returns the exit status: 1 where nothing at all could be encoded.

    Raises:
        ClipkitError: a mistake that the user can mend.
    """
    process, processes = rank_and_world()
    if "-" in options.sources and processes > 1:
        raise ConfigError("standard input goes to one process only: save the texts in a .txt file")
    stream = Stream(
        options.sources,
        kind="caption" if options.text else "image",
        image_column=options.image_column,
        caption_column=options.caption_column,
    )
    model = load(
        options.model,
        name=options.name,
        device=pick_device(options.device),
        background=options.background,
        upright=options.upright,
    )
    features = FeatureStream(
        model, batch_size=options.batch_size, precision=options.precision, workers=options.workers
    )
    try:
        encoded = encode(
            stream,
            options.out,
            features,
            model_name=options.model,
            sources=options.sources,
            rows_per_file=options.rows_per_file,
            process=process,
            processes=processes,
            retry_failed=options.retry_failed,
            progress=not options.quiet and process == 0,
        )
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"cannot write {options.out}: the disk is full; with more room the same command goes on"
            ) from error
        raise DataError(f"cannot write {options.out}: {error.strerror or error}") from error
    who = f"process {process + 1} of {processes}: " if processes > 1 else ""
    _report(encoded, options, who)
    for line in features.lines(background=options.background, upright=options.upright):
        print(f"{who}{line}", file=sys.stderr)
    return 1 if encoded.totals and not encoded.totals.rows else 0


def _report(encoded: Encoded, options: EncodeOptions, who: str) -> None:
    """What was done; the last line says what the whole folder holds, once it is complete."""
    totals, listing = encoded.totals, options.out / "failures.jsonl"
    compared = ""
    if encoded.compared:
        compared = (
            f"; {encoded.compared:,} compared by content, because times or inodes of their files changed"
        )
    if not encoded.written:
        there = ""
        if totals is not None:
            failed = f", {totals.failures:,} failed before ({listing})" if totals.failures else ""
            are = "is" if totals.rows == 1 else "are"
            there = f": {counted(totals.rows, 'embedding')} {are} there{failed}"
        print(f"{who}nothing to do{there}{compared}")
        return
    what = counted(encoded.done, "text" if options.text else "picture")
    rate = f"{encoded.done / max(encoded.seconds, 1e-9):,.1f}/s"
    found = f"; {encoded.found:,} were there" if encoded.found else ""
    why = "" if options.retry_failed else ", because what they are made of has changed"
    if encoded.unknown:
        why = (
            ", because they were made by an earlier version, which did not record the content of their files"
        )
    stale = f"; {encoded.stale:,} of them again{why}" if encoded.stale else ""
    print(
        f"{who}{what} in {encoded.seconds:,.1f} s ({rate}), "
        f"wrote {encoded.written:,} of {counted(encoded.files, 'file')}{stale}{found}{compared}"
    )
    if totals is None:
        return
    if encoded.empty_lines:
        print(f"{counted(encoded.empty_lines, 'empty line')} encoded like any other text")
    if totals.failures:
        print(f"{totals.failures:,} failed, listed in {listing}")
    print(
        f"{counted(totals.rows, 'embedding')} of {totals.width} numbers "
        f"in {counted(encoded.files, 'file')} of {encoded.folder}"
    )

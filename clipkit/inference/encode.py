"""``clipkit encode``: encode images or texts into a folder of embeddings, resuming an interrupted run.

The items of all sources are numbered. Part p contains items p·n to (p + 1)·n - 1 and is encoded by process p modulo
the number of processes, always from the start, so its file is bit-identical regardless of which process writes it
and how often the run is interrupted. A part is written again if the names or content of its items have changed.
Content is read again only if the size, a time stamp or the inode of a file has changed; see
``clipkit.inference.folder``. Rows of images with the same content are reused. Batches of images are padded to
one size, so that these rows equal those of a new folder.

On a Ray cluster each part is encoded by a task, whose result the calling process writes. A part that is lost with
its worker or node is encoded again. Tasks do not reuse rows.
"""

import errno
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt

import clipkit
from clipkit.cli import ModelOptions
from clipkit.distributed import rank_and_world
from clipkit.errors import ConfigError, DataError
from clipkit.files.processes import ray_cluster, ray_tasks
from clipkit.files.terminal import CountProgress, counted, printable
from clipkit.formats.checkpoint import model_hash
from clipkit.inference.folder import EmbeddingFolder, Manifest, Part, Totals, only_writer
from clipkit.inference.inputs import Item, Sample, Stream, recorded_members
from clipkit.inference.storage import STORAGE, ReusableRows, recall, unpacked
from clipkit.inference.stream import Failure, FeatureStream
from clipkit.options import EncodeOptions
from clipkit.samples.depth import format_pixel_range
from clipkit.samples.traits import TraitCounts, format_color

Parts = Generator[Part, None, None]
EncodeParts = Callable[
    [Iterator[tuple[int, Item]], Manifest, FeatureStream, Callable[[int, int], None]], Parts
]
_CHANGED = "the sources changed while they were being read: run the same command again"

# rows that the recall is measured among
_SAMPLE = 2000
_LEAST_SAMPLE = 20
_MANY = 1000  # items of which a faster precision is worth a note


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Summary of one process's work.

    Attributes:
        written: number of files written by this process.
        complete_files: number of files that were already complete.
        empty_lines: number of empty lines in lists of texts; they are encoded like any other.
        done: number of items processed by this process.
        reused: number of those whose rows were taken from outdated files.
        failed: number of those that could not be encoded.
        seconds: duration.
        totals: totals over all files; None if some are incomplete.
        sampled: number of rows in the sample of this process's rows.
        recall: recall@10 of the sample as it is stored, against float32; None if it is too small.
    """

    folder: EmbeddingFolder
    written: int
    complete_files: int
    empty_lines: int
    done: int
    failed: int
    seconds: float
    totals: Totals | None
    reused: int = 0
    sampled: int = 0
    recall: float | None = None


def encode(
    stream: Stream,
    features: FeatureStream,
    options: EncodeOptions,
    *,
    process: int = 0,
    processes: int = 1,
    encode_parts: EncodeParts | None = None,
) -> Encoded:
    """Encode the images or captions of a stream into a folder; see ``clipkit.inference.folder``.

    Args:
        options: ``out`` may be the folder of an earlier run with the same settings and the same or fewer sources,
            which is resumed. The manifest records ``model`` and ``sources``.
        process: index of this process, which encodes only its own parts.
        encode_parts: encodes parts elsewhere, in any order, see ``encode_on_ray``; None encodes in this process.
    """
    assert options.rows_per_file >= 1
    rows_per_file = options.rows_per_file
    progress = process == 0 and not options.quiet
    storage = STORAGE[options.dtype]
    storage.check(features.model.dim)
    try:
        import pyarrow  # noqa: F401 (fail now, not when the first file is written)
    except ImportError as error:
        raise ConfigError("writing Parquet metadata needs pyarrow: pip install 'pyarrow>=18'") from error
    with CountProgress("counting", total=None, shown=progress) as bar:
        items, digests, captions, empty_lines = _survey(stream, rows_per_file, bar.show)
    decoding = features.model.preprocess.decoding
    manifest = Manifest(
        kind=stream.kind,
        model=options.model,
        weights=model_hash(features.model),
        background=format_color(decoding.background),
        directory=str(Path.cwd()),
        upright=decoding.upright,
        pixel_range=format_pixel_range(decoding.pixel_range),
        sources=list(options.sources),
        items=items,
        digest=hashlib.sha256(repr(digests).encode()).hexdigest()[:32],
        captions=captions,
        rows_per_file=rows_per_file,
        batch_size=features.batch_size,
        precision=features.precision,
        device=features.device.type,
        dtype=options.dtype,
        dim=features.model.dim if features.model.dim < features.model.architecture.embed_dim else 0,
        scale=features.model.logit_scale.detach().float().exp().item(),
    )

    with only_writer(options.out, process, processes):
        folder = EmbeddingFolder(
            options.out,
            manifest,
            digests,
            process=process,
            processes=processes,
            retry_failed=options.retry_failed,
        )
        complete = [part for part in range(manifest.files) if folder.is_done(part)]
        assigned = sorted({*range(process, manifest.files, processes)} - {*complete})
        done = failed = written = reused = 0
        sample: list[npt.NDArray[np.float32]] = []
        began = time.monotonic()
        total = sum(map(manifest.items_of, assigned))
        if progress and total >= _MANY and features.is_faster_in_bf16:
            print("note: --precision bf16 is much faster on this CPU", file=sys.stderr)
        with CountProgress("encoding", total=total, shown=progress) as bar:
            todo = _refreshing(folder.reusable, _items_of(stream, assigned, rows_per_file))
            encode_parts = encode_parts or partial(_parts_of, reusable=folder.reusable)
            with closing(encode_parts(todo, manifest, features, bar.show)) as parts:
                for part in parts:
                    folder.write(part)
                    sample += part.sample
                    done += len(part)
                    failed += len(part.failures)
                    written += 1
                    reused += part.reused
                    bar.show(done, failed)
        if written < len(assigned):
            raise DataError(_CHANGED)
        sampled = np.concatenate(sample) if sample else np.zeros((0, 1), np.float32)
        enough = len(sampled) >= _LEAST_SAMPLE
        return Encoded(
            folder=folder,
            written=written,
            complete_files=len(complete),
            empty_lines=empty_lines,
            done=done,
            failed=failed,
            seconds=time.monotonic() - began,
            totals=folder.finish(),
            reused=reused,
            sampled=len(sampled),
            recall=recall(sampled, unpacked(storage.pack(sampled))) if enough else None,
        )


def _parts_of(
    items: Iterator[tuple[int, Item]],
    manifest: Manifest,
    features: FeatureStream,
    show: Callable[[int, int], None] = lambda done, failed: None,
    *,
    reusable: ReusableRows | None = None,
) -> Parts:
    parts: dict[int, Part] = {}
    every = max(1, manifest.items // _SAMPLE)
    pack = STORAGE[manifest.dtype].pack
    done = failed = 0
    outcomes = features.run(
        items, kind=manifest.kind, captions=manifest.captions, pad=True, reusable=reusable
    )
    for outcome in outcomes:
        part = parts.setdefault(outcome.part, Part(outcome.part, dtype=manifest.dtype, every=every))
        part.add(outcome)
        if isinstance(outcome, Failure):
            done += 1
            failed += 1
        else:
            done += len(outcome.items)
        show(done, failed)
        if len(part) == manifest.items_of(part.number):
            if not part.rows:
                part.rows.append(pack(features.empty(manifest.kind)))
            yield parts.pop(part.number)


def encode_on_ray(
    items: Iterator[tuple[int, Item]],
    manifest: Manifest,
    features: FeatureStream,
    show: Callable[[int, int], None],
    *,
    address: str,
    options: ModelOptions,
) -> Parts:
    """Encode each part in a task of a Ray cluster, on one CPU or, if the model is on one here, one GPU.

    Args:
        address: the cluster, see ``ray_cluster``.
        options: those of ``FeatureStream.from_options``.

    Yields:
        parts in the order in which they are complete.
    """
    on_gpu = features.device.type == "cuda"
    options = replace(options, batch_size=features.batch_size, device=features.device.type)
    if options.workers is None and not on_gpu:
        options = replace(options, workers=1)

    def arguments() -> Iterator[tuple[object, ...]]:
        for _, group in groupby(items, key=itemgetter(0)):
            task_parts = list(group)
            yield task_parts, manifest, options, _a_file_of(task_parts)

    with ray_cluster(address, [Path(clipkit.__file__).parent]) as ray:
        resource = "GPU" if on_gpu else "CPU"
        for part, counts in ray_tasks(ray, _encode_part, arguments(), resource=resource):
            features.counts.merge(counts)
            yield part


_here: dict[str, FeatureStream] = {}  # the model of this worker of Ray, by its options


def _encode_part(
    items: Sequence[tuple[int, Item]], manifest: Manifest, options: ModelOptions, file: Path | None
) -> tuple[Part, TraitCounts]:
    try:
        os.chdir(manifest.directory)
        if file is not None:
            file.stat()
    except OSError as error:
        raise DataError(
            f"{error.filename} is not visible on the node {os.uname().nodename}: --ray needs sources on a file "
            "system that all nodes share"
        ) from error
    key = repr(options)
    if key not in _here:
        _here.clear()
        features = FeatureStream.from_options(options)
        weights = model_hash(features.model)
        if weights != manifest.weights:
            raise DataError(f"{options.model} on the node {os.uname().nodename} is another model ({weights})")
        _here[key] = features
    features = _here[key]
    features.counts = TraitCounts()
    part = next(_parts_of(iter(items), manifest, features), None)
    if part is None:
        raise DataError(_CHANGED)
    return part, features.counts


def _a_file_of(items: Sequence[tuple[int, Item]]) -> Path | None:
    for _, item in items:
        path = Path(item.source) if isinstance(item.image, Sample) else item.image
        with suppress(OSError, ValueError):
            if path is not None and path.exists():
                return path
    return None


def _refreshing(reusable: ReusableRows, items: Iterator[tuple[int, Item]]) -> Iterator[tuple[int, Item]]:
    for _, part in groupby(items, key=itemgetter(0)):
        reusable.refresh()
        yield from part


def _items_of(stream: Stream, parts: Iterable[int], length: int) -> Iterator[tuple[int, Item]]:
    rest = iter(parts)
    next_part = next(rest, None)
    for i, item in enumerate(stream):
        part = i // length
        while next_part is not None and part > next_part:
            next_part = next(rest, None)
        if next_part is None:
            return
        if part == next_part:
            yield part, item


def _survey(stream: Stream, length: int, show: Callable[[int], None]) -> tuple[int, list[str], bool, int]:
    """Read the names of all items without their content.

    Returns:
        The number of items, a digest of each part of ``length`` items, whether there are captions, and the number
        of empty lines in lists of texts.
    """
    digests: list[str] = []
    part_digest = hashlib.sha256()
    count = 0
    captions = False
    empty = 0
    for count, item in enumerate(stream, 1):
        text = item.caption if isinstance(item.caption, str) else ""
        stamp = item.stamp
        if stream.kind == "image" and isinstance(item.image, Path):
            with suppress(OSError, ValueError):
                status = item.image.stat()
                # with ctime and inode, because renaming and unpacking can preserve size and modification time
                stamp = f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
        for value in (item.source, item.key, text, stamp):
            part_digest.update(value.encode("utf-8", "surrogatepass") + b"\0")
        captions = captions or item.caption is not None
        empty += isinstance(item.caption, str) and not text.strip()
        if count % length == 0:
            digests.append(part_digest.hexdigest())
            part_digest = hashlib.sha256()
        if count % 1000 == 0:
            show(count)
    if count % length:
        digests.append(part_digest.hexdigest())
    # the digest depends on whether there are captions, since that determines the columns of all files
    digests = [f"{digest[:31]}{captions:d}" for digest in digests]
    return count, digests, captions, empty if stream.kind == "caption" else 0


def run_encode(options: EncodeOptions) -> int:
    """Run the command and return its exit status: 1 if no item could be encoded."""
    process, processes = rank_and_world()
    if "-" in options.sources and processes > 1:
        raise ConfigError("only one process can read standard input: save the texts in a .txt file")
    if options.ray and processes > 1:
        raise ConfigError("--ray distributes the work itself: start it without torchrun")
    captions = options.captions
    if not captions and options.caption_column is not None:
        captions = (options.caption_column,)
    stream = Stream(
        options.sources,
        kind="caption" if options.text else "image",
        image=options.image or options.image_column or "",
        captions=captions,
        cache_gb=options.cache_gb,
    )
    features = FeatureStream.from_options(options)
    stream.recorded = recorded_members(features.model.origin)
    try:
        encoded = encode(
            stream,
            features,
            options,
            process=process,
            processes=processes,
            encode_parts=partial(encode_on_ray, address=options.ray, options=options)
            if options.ray
            else None,
        )
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"cannot write {options.out}: the disk is full; free some space and run the same command to resume"
            ) from error
        raise DataError(f"cannot write {options.out}: {error.strerror or error}") from error
    who = f"process {process + 1} of {processes}: " if processes > 1 else ""
    _report(encoded, options, who)
    for note in stream.notes:
        print(f"{who}{note}")
    for line in features.lines(options):
        print(f"{who}{line}", file=sys.stderr)
    return 1 if encoded.totals and not encoded.totals.rows else 0


def _report(encoded: Encoded, options: EncodeOptions, who: str) -> None:
    totals = encoded.totals
    folder = encoded.folder
    files = counted(folder.manifest.files, "file")
    listing = options.out / "failures.jsonl"
    if not encoded.written:
        there = ""
        if totals is not None:
            failed = f", {totals.failures:,} failed before ({listing})" if totals.failures else ""
            there = f": {counted(totals.rows, 'embedding')} already complete{failed}"
        print(f"{who}nothing to do{there}")
        return
    what = counted(encoded.done, "text" if options.text else "image")
    rate = f"{encoded.done / max(encoded.seconds, 1e-9):,.1f}/s"
    already_complete = f"; {encoded.complete_files:,} already complete" if encoded.complete_files else ""
    why = "" if options.retry_failed else " because of changed sources"
    stale = f"; {counted(folder.stale, 'file')} replaced{why}" if folder.stale else ""
    reused = f"; {encoded.reused:,} of them unchanged and not encoded again" if encoded.reused else ""
    print(
        f"{who}{what} in {encoded.seconds:,.1f} s ({rate}){reused}; "
        f"wrote {encoded.written:,} of {files}{stale}{already_complete}"
    )
    if encoded.recall is not None and options.dtype != "float32":
        dimension = f" of dimension {options.dim}" if options.dim else ""
        print(
            f"{who}recall@10 {encoded.recall:.3f} of {options.dtype} against float32{dimension}, among a sample of "
            f"{encoded.sampled:,}"
        )
    if totals is None:
        return
    if encoded.empty_lines:
        print(f"{counted(encoded.empty_lines, 'empty line')} encoded like any other text")
    if totals.failures:
        with listing.open(encoding="utf-8") as file:
            failure = json.loads(file.readline())
        first = f"{printable(failure['key'])}: {failure['cause']}"
        print(f"{totals.failures:,} failed, listed in {listing}; the first: {first}")
    where = folder.out / folder.embeddings
    print(f"{counted(totals.rows, 'embedding')} of dimension {totals.width} in {files} in {where}")

"""``python -m data speed``: how fast the training's loader makes batches here, by number of workers."""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from clipkit.cli import MOST_WORKERS
from clipkit.errors import ConfigError
from data.remote.store import shown

if TYPE_CHECKING:
    from data.loader import Loader

__all__ = ["Measured", "make_loader", "measure", "speed"]

_STEPS = 1 << 40  # more than anybody waits for
_MEMORY_EVERY = 0.5  # seconds


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the loader gave with so many workers.

    Attributes:
        workers: processes, 0 for the main one alone.
        samples_per_second: after the first batch.
        per_worker: of these.
        bytes_per_second: of shards.
        first_batch: seconds until it was there, the start of the workers included.
        samples: that were counted, in so many ``seconds``.
        bad: share of samples that another one replaced.
        memory: greatest sum, in bytes, of what all processes held, memory that they share counted once; 0 where the
            system does not tell.
    """

    workers: int
    samples_per_second: float
    per_worker: float
    bytes_per_second: float
    first_batch: float
    samples: int
    seconds: float
    bad: float
    memory: int


def speed(parsed: argparse.Namespace) -> int:
    numbers = _worker_numbers(_own_words(parsed))
    if not parsed.sources:
        raise ConfigError("no SOURCE is given: python -m data speed SOURCE")
    loader, bytes_per_sample = make_loader(parsed)
    found = []
    for workers in numbers:
        if not parsed.quiet:
            print(f"measuring with {workers} workers for {parsed.seconds:g} s", file=sys.stderr, flush=True)
        found.append(measure(loader, workers, seconds=parsed.seconds, bytes_per_sample=bytes_per_sample))
    batch_size = loader.order.batch_size
    if parsed.json:
        about = {
            "sources": list(map(shown, parsed.sources)),
            "image_size": parsed.image_size,
            "batch_size": batch_size,
        }
        print(json.dumps({**about, "cores": _cores(), "measured": [asdict(one) for one in found]}))
    else:
        _print(found, parsed.image_size, batch_size)
    return 0


def _own_words(parsed: argparse.Namespace) -> str:
    """What --workers was given; words behind it that are no numbers are sources."""
    first, *more = parsed.workers
    numbers = [word for word in more if word.replace(",", "").isdecimal() and not Path(word).exists()]
    if numbers:
        given = [first, *numbers]
        raise ConfigError(f"workers = {' '.join(given)}: with commas: --workers {','.join(given)}")
    parsed.sources += more
    return str(first)


def _worker_numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 5 and int(part) <= MOST_WORKERS for part in parts):
        raise ConfigError(f"workers = {text!r} does not fit: numbers from 0 to {MOST_WORKERS}, with commas")
    return list(dict.fromkeys(map(int, parts)))


def make_loader(parsed: argparse.Namespace) -> "tuple[Loader, float]":
    """The loader as a training would make it, and the bytes of a sample in its shard."""
    from clipkit.files.terminal import CountProgress
    from clipkit.model.tokenizer import ClipTokenizer
    from data.augment import Augmentation
    from data.captions import Selection
    from data.loader import Loader
    from data.order import Order
    from data.remote.cache import shard_cache
    from data.shards.manifest import make_manifest
    from data.shards.samples import Shards
    from data.shards.sources import find_shards

    augmentation, names = Augmentation.given(parsed.sources)
    sources = [find_shards(source, split=parsed.split) for source in names]
    cache = shard_cache(names, parsed.cache_gb)
    selection = Selection()
    with CountProgress("counting shards", total=sum(map(len, sources)), shown=not parsed.quiet) as progress:
        manifest = make_manifest(sources, selection, cache=cache, progress=progress.show)
    shards = Shards(manifest, selection, cache=cache)
    loader = Loader(
        shards=shards,
        order=Order(shards.counts, seed=0, batch_size=max(1, min(parsed.batch_size, len(shards)))),
        image_size=parsed.image_size,
        tokenize=ClipTokenizer(),
        augmentation=replace(augmentation, scaled_decode=augmentation.scaled_decode or parsed.scaled_decode),
    )
    return loader, float(manifest.sizes.clip(min=0).sum()) / max(1, len(shards))


def measure(loader: "Loader", workers: int, *, seconds: float, bytes_per_sample: float = 0.0) -> Measured:
    """Run a loader with so many workers for so long after its first batch, one batch more at least.

    Raises:
        DataError: as the loader does.
    """
    began = time.perf_counter()
    batches = replace(loader, workers=workers).batches(0, _STEPS)
    assert isinstance(batches, Generator)  # so that it can be closed now, and its workers with it
    samples = bad = memory = 0
    try:
        first = next(batches)
        start = now = time.perf_counter()
        every, bad, looked = len(first.ids), len(first.bad), 0.0
        while samples == 0 or now - start < seconds:
            batch = next(batches)
            now = time.perf_counter()
            samples, every, bad = samples + len(batch.ids), every + len(batch.ids), bad + len(batch.bad)
            if now - looked > _MEMORY_EVERY:
                memory, looked = max(memory, _memory()), now
    finally:
        batches.close()
    rate = samples / (now - start)
    return Measured(
        workers=workers,
        samples_per_second=rate,
        per_worker=rate / max(1, workers),
        bytes_per_second=rate * bytes_per_sample,
        first_batch=start - began,
        samples=samples,
        seconds=now - start,
        bad=bad / every,
        memory=memory,
    )


def _memory() -> int:
    """Bytes that this process and its workers hold, memory shared by several divided among them."""
    total = 0
    for process in chain([os.getpid()], (child.pid for child in multiprocessing.active_children())):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:  # not Linux, or it has just ended
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _print(found: list[Measured], image_size: int, batch_size: int) -> None:
    lines = [("workers", "samples/s", "a worker", "MB/s", "first batch", "bad", "memory")]
    lines += [
        (
            f"{one.workers}",
            f"{one.samples_per_second:,.0f}",
            f"{one.per_worker:,.0f}",
            f"{one.bytes_per_second / 1e6:,.1f}",
            f"{one.first_batch:.1f} s",
            f"{100 * one.bad:.2g}%",
            f"{one.memory / 1e9:.2f} GB" if one.memory else "not known",
        )
        for one in found
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print(f"{image_size} pixels, batches of {batch_size}, {_cores()} cores")

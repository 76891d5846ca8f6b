"""``python -m data speed``: measure the speed of the training loader by number of workers."""

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

from clipkit.cli import MOST_WORKERS
from clipkit.errors import ConfigError
from clipkit.files import CountProgress, counted, shown
from clipkit.model import ClipTokenizer
from clipkit.samples.remote import shard_cache
from data.augment import image_settings
from data.loader import Loader
from data.order import Order
from data.selection import Selection
from data.shards.manifest import make_manifest
from data.shards.samples import Shards
from data.sources import find_shards

__all__ = ["Measured", "make_loader", "measure", "speed"]

_STEPS = 1 << 40  # never reached
_MEMORY_INTERVAL = 0.5  # seconds


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The speed of a loader.

    Attributes:
        workers: number of processes; 0 for the main process alone.
        samples_per_second: after the first batch.
        bytes_per_second: of shards.
        first_batch: seconds until the first batch, including the start of the workers.
        samples: number of samples in ``seconds``.
        bad: fraction of samples that were replaced.
        memory: peak bytes of all processes, shared memory counted once; 0 if the system does not report it.
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
    """Run the command."""
    parts = [part.strip() for part in parsed.workers.split(",")]
    if not all(part.isdecimal() and len(part) < 5 and int(part) <= MOST_WORKERS for part in parts):
        raise ConfigError(
            f"workers = {parsed.workers!r} is invalid: expected numbers from 0 to {MOST_WORKERS}, "
            "separated by commas"
        )
    if not parsed.sources:
        raise ConfigError("SOURCE is missing: python -m data speed SOURCE")
    loader, bytes_per_sample = make_loader(parsed)
    found = []
    for workers in dict.fromkeys(map(int, parts)):
        if not parsed.quiet:
            print(
                f"measuring with {counted(workers, 'worker')} for {parsed.seconds:g} s",
                file=sys.stderr,
                flush=True,
            )
        found.append(measure(loader, workers, seconds=parsed.seconds, bytes_per_sample=bytes_per_sample))
    batch_size, cores = loader.order.batch_size, len(os.sched_getaffinity(0))
    if parsed.json:
        about = {
            "sources": list(map(shown, parsed.sources)),
            "image_size": parsed.image_size,
            "batch_size": batch_size,
        }
        print(json.dumps({**about, "cores": cores, "measured": [asdict(one) for one in found]}))
        return 0
    lines = [("workers", "samples/s", "per worker", "MB/s", "first batch", "bad", "memory")]
    lines += [
        (
            f"{one.workers}",
            f"{one.samples_per_second:,.0f}",
            f"{one.per_worker:,.0f}",
            f"{one.bytes_per_second / 1e6:,.1f}",
            f"{one.first_batch:.1f} s",
            f"{100 * one.bad:.2g}%",
            f"{one.memory / 1e9:.2f} GB" if one.memory else "unknown",
        )
        for one in found
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print(f"{parsed.image_size} pixels, batches of {batch_size}, {cores} cores")
    return 0


def make_loader(parsed: argparse.Namespace) -> tuple[Loader, float]:
    """Return the loader that training would use, and the bytes per sample in the shards."""
    augmentation, decoding, names = image_settings(parsed.sources)
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
        decoding=decoding,
    )
    return loader, float(manifest.sizes.clip(min=0).sum()) / max(1, len(shards))


def measure(loader: Loader, workers: int, *, seconds: float, bytes_per_sample: float = 0.0) -> Measured:
    """Measure a loader for ``seconds`` after its first batch, over at least one further batch.

    Raises:
        DataError: raised by the loader.
    """
    began = time.perf_counter()
    batches = replace(loader, num_workers=workers).batches(0, _STEPS)
    assert isinstance(batches, Generator)  # so that closing it below ends the workers
    samples = bad = memory = 0
    try:
        first = next(batches)
        start = now = time.perf_counter()
        every, bad, looked = len(first.ids), len(first.bad), 0.0
        while samples == 0 or now - start < seconds:
            batch = next(batches)
            now = time.perf_counter()
            samples, every, bad = samples + len(batch.ids), every + len(batch.ids), bad + len(batch.bad)
            if now - looked > _MEMORY_INTERVAL:
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
    """Return the bytes of memory of this process and its workers, counting shared memory once."""
    total = 0
    for process in chain([os.getpid()], (child.pid for child in multiprocessing.active_children())):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:  # not Linux, or the process has just ended
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total

"""``python -m data speed``: measure the speed of the training loader by number of workers."""

import json
import os
import sys
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace

from clipkit.files import CountProgress, counted, redact_url
from clipkit.model import ClipTokenizer
from clipkit.samples.remote import shard_cache
from data.augment import image_settings
from data.loader import Loader
from data.options import SpeedOptions
from data.order import Order
from data.selection import Selection
from data.shards.manifest import make_manifest
from data.shards.samples import Shards, find_shards

_STEPS = 1 << 40  # never reached


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
    """

    workers: int
    samples_per_second: float
    bytes_per_second: float
    first_batch: float
    samples: int
    seconds: float
    bad: float


def run_speed(options: SpeedOptions) -> int:
    """Run the command."""
    loader, bytes_per_sample = make_loader(options)
    batch_size = loader.order.batch_size
    cores = len(os.sched_getaffinity(0))
    if not options.json:
        print(f"{options.image_size} pixels, batches of {batch_size}, {cores} cores")
        print("workers  samples/s     MB/s  first batch   bad")
    measured = []
    for workers in options.workers:
        if not options.quiet:
            print(f"measuring with {counted(workers, 'worker')} for {options.seconds:g} s", file=sys.stderr)
        row = measure_loader(loader, workers, seconds=options.seconds, bytes_per_sample=bytes_per_sample)
        measured.append(asdict(row))
        if not options.json:
            megabytes = row.bytes_per_second / 1e6
            print(
                f"{workers:>7}  {row.samples_per_second:>9,.0f}  {megabytes:>7,.1f}  {row.first_batch:>9.1f} s"
                f"  {row.bad:>4.0%}"
            )
    if options.json:
        about = {"sources": list(map(redact_url, options.sources)), "image_size": options.image_size}
        print(json.dumps({**about, "batch_size": batch_size, "cores": cores, "measured": measured}))
    return 0


def make_loader(options: SpeedOptions) -> tuple[Loader, float]:
    """Return the loader that training would use, and the bytes per sample in the shards."""
    augmentation, decoding, names = image_settings(options.sources)
    sources = [find_shards(source, split=options.split) for source in names]
    cache = shard_cache(names, options.cache_gb)
    selection = Selection(image=options.image)
    with CountProgress("counting shards", total=sum(map(len, sources)), shown=not options.quiet) as progress:
        manifest = make_manifest(sources, selection, cache=cache, progress=progress.show)
    shards = Shards(manifest, selection, cache=cache)
    loader = Loader(
        shards=shards,
        order=Order(shards.counts, seed=0, batch_size=max(1, min(options.batch_size, len(shards)))),
        image_size=options.image_size,
        tokenize=ClipTokenizer(),
        augmentation=augmentation,
        decoding=decoding,
    )
    return loader, float(manifest.sizes.clip(min=0).sum()) / max(1, len(shards))


def measure_loader(
    loader: Loader, workers: int, *, seconds: float, bytes_per_sample: float = 0.0
) -> Measured:
    """Measure a loader for ``seconds`` after its first batch, over at least one further batch."""
    began = time.perf_counter()
    batches = replace(loader, num_workers=workers).batches(0, _STEPS)
    assert isinstance(batches, Generator)  # so that closing it below ends the workers
    samples = 0
    try:
        first = next(batches)
        start = now = time.perf_counter()
        bad = len(first.bad)
        while samples == 0 or now - start < seconds:
            batch = next(batches)
            now = time.perf_counter()
            samples += len(batch.ids)
            bad += len(batch.bad)
    finally:
        batches.close()
    rate = samples / (now - start)
    return Measured(
        workers=workers,
        samples_per_second=rate,
        bytes_per_second=rate * bytes_per_sample,
        first_batch=start - began,
        samples=samples,
        seconds=now - start,
        bad=bad / (len(first.ids) + samples),
    )

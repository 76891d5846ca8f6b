"""Measure memory and time of the sample order for two billion samples on 4,096 ranks.

    python -m bench.order_scale [--shards 200000] [--samples 10000] [--world 4096] [--groups 512]

No data is read: the manifest and the order are created for nonexistent shards, in a process that imports
nothing else. Measured: the memory they add; the seconds to the first batch at the first step, in the middle
of an epoch and in epoch 10,000; the microseconds per sample that one rank spends on its part of a batch,
alone and together with the loader's query for the next shards; and how many shards a node of 8 ranks reads
for as many samples as a window has, with the samples it uses, counted in shards.

Bounds: the order of shards in an epoch (sorting one hash per shard, once per epoch) and, because a rank's
part of a batch is small, the overhead of numpy calls.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from clipkit.samples import Strings
from data.order import Order
from data.selection import Selection
from data.shards.manifest import Manifest

RESULTS = Path(__file__).parent / "results"


def resident() -> int:
    """Return the private memory of this process in bytes."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def one_manifest(shards: int, samples: int) -> Manifest:
    """Return a manifest of nonexistent shards with about ``samples`` samples each."""
    counts = np.random.default_rng(0).integers(samples - samples // 20, samples + samples // 20 + 1, shards)
    counts[-1] += shards * samples - counts.sum()  # so that the total is exact
    return Manifest(
        urls=Strings.of([f"s3://a-bucket/laion2B-en/{shard_index:06d}.tar" for shard_index in range(shards)]),
        versions=Strings.of([f"{shard_index:032x}" for shard_index in range(shards)]),
        sizes=np.full(shards, 300_000_000),
        counts=counts,
        digests=Strings.of([f"{shard_index:016x}" for shard_index in range(shards)]),
        contents=Strings.of([f"{shard_index:016x}" for shard_index in range(shards)]),
        sources=(shards,),
        selection=Selection().identity,
        dropped={},
    )


def one_rank(content: bytes, options: argparse.Namespace, answer: Connection) -> None:
    """Measure on rank 77."""
    before = resident()
    content = bytes(bytearray(content))  # a private copy, as received over the network
    began = time.perf_counter()
    manifest = Manifest.from_bytes(content)
    assert manifest is not None
    order = Order(manifest.counts, seed=0, batch_size=options.batch_size, groups=options.groups)
    made = time.perf_counter() - began
    starts = {}
    for name, step in (
        ("first", 0),
        ("half an epoch", order.batches_per_epoch // 2),
        ("epoch 10,000", 10_000 * order.batches_per_epoch + 12_345),
    ):
        began = time.perf_counter()
        order.batch(step, rank=77, world_size=options.world)
        starts[name] = made + time.perf_counter() - began
    first = order.batches_per_epoch // 3
    part = options.batch_size // options.world
    times = {}
    for name in ("batch", "batch and shards ahead"):
        began = time.process_time()
        for step in range(first, first + options.steps):
            order.batch(step, rank=77, world_size=options.world)
            if name != "batch":
                order.shards_ahead(step, rank=77, world_size=options.world)
        times[name] = (time.process_time() - began) / options.steps / part * 1e6
    megabytes = (resident() - before) / 1e6
    ends = np.cumsum(order.counts)
    shards = max(64, options.groups)  # of a window
    steps = range(first, first + shards * options.samples // options.batch_size)
    read: set[int] = set()
    used = 0
    for step in steps:
        for rank in range(72, 80):  # of rank 77's node
            ids = order.batch(step, rank=rank, world_size=options.world).ids
            read.update(np.searchsorted(ends, ids, side="right").tolist())
            used += len(ids)
    answer.send(
        {
            "megabytes": megabytes,
            "seconds_to_start": starts,
            "microseconds_a_sample": times,
            "steps_of_a_window": len(steps),
            "shards_read_by_a_node": len(read),
            "shards_used_by_a_node": used / options.samples,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shards", type=int, default=200_000)
    parser.add_argument("--samples", type=int, default=10_000, help="mean number of samples per shard")
    parser.add_argument("--world", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=65_536)
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    manifest = one_manifest(options.shards, options.samples)
    began = time.perf_counter()
    fingerprint = manifest.fingerprint
    result = {
        **vars(options),
        "manifest_bytes": len(manifest.to_bytes()),
        "seconds_to_fingerprint": time.perf_counter() - began,
        "machine": platform.machine(),
        "load": os.getloadavg()[0],
    }
    receiver, sender = multiprocessing.Pipe()
    rank = multiprocessing.get_context("fork").Process(
        target=one_rank, args=(manifest.to_bytes(), options, sender)
    )
    rank.start()
    result |= receiver.recv()
    rank.join()
    print(f"{len(manifest):,} shards, {int(manifest.counts.sum()):,} samples ({fingerprint})")
    print(json.dumps(result, indent=2))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "order_scale.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

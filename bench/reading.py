"""Compare random access to a plain tar with streaming it.

    python -m bench.reading [--samples 10000] [--bytes 20000] [--rounds 5]

A shard like img2dataset's (jpg, txt and json) is in the page cache: one from webdataset's writer, with PAX
headers, and one without them. Each round measures in turn, in samples per second of CPU time on one core:

    tarfile      list the members with Python's tarfile
    index        list them with clipkit's header scan, packed into the arrays of an index
    content      the same with a digest of the content, as on the first use of a shard
    webdataset   stream the samples with webdataset, without decoding
    read         read the same number of samples through clipkit's index, in random order, image and caption

Ratios are medians over rounds. Bounds: tarfile and webdataset create a TarInfo object for each header, while
the scan parses headers in memory; a random read is a lookup and one ``pread`` per member, which copies the
bytes (a ``memcpy`` of the same bytes is also measured).
"""

import argparse
import json
import os
import platform
import random
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import webdataset

from clipkit.samples import add_content_digest, index_members, list_tar_files
from clipkit.samples.remote import ShardFile
from data.shards.samples import Shards

RESULTS = Path(__file__).parent / "results"


def write_shard(path: Path, samples: int, size: int, *, pax: bool) -> None:
    """Write a shard of images of about ``size`` random bytes."""
    drawn = random.Random(0)
    with webdataset.TarWriter(str(path), encoder=False, mtime=None if pax else 1) as tar:
        for i in range(samples):
            meta = {"caption": f"caption {i}", "url": "https://example.org/" + "x" * 80, "width": 256}
            tar.write(
                {
                    "__key__": f"{i:09d}",
                    "jpg": drawn.randbytes(int(size * drawn.uniform(0.5, 1.5))),
                    "txt": f"a caption of some words, number {i}".encode(),
                    "json": json.dumps(meta).encode(),
                }
            )


def times(path: Path, samples: int) -> dict[str, Callable[[], int]]:
    """Return the measured functions; each returns the number of samples it processed."""
    shards = Shards.of([ShardFile.at(path)])
    order = list(range(samples))
    random.Random(1).shuffle(order)
    held = [shards.read(i).image for i in order[:200]]

    def by_tarfile() -> int:
        with tarfile.open(path) as tar:
            return sum(member.name.endswith(".jpg") for member in tar)

    def by_index() -> int:
        return len(index_members(str(path), list_tar_files(path)))

    def by_content() -> int:
        return len(add_content_digest(index_members(str(path), list_tar_files(path)), path))

    def by_webdataset() -> int:
        return sum(1 for _ in webdataset.WebDataset(str(path), shardshuffle=False))

    def by_read() -> int:
        return sum(shards.read(i).image is not None for i in order)

    def by_copy() -> int:
        return sum(len(bytes(bytearray(held[i % 200]))) > 0 for i in order)

    return {
        "tarfile": by_tarfile, "index": by_index, "content": by_content, "webdataset": by_webdataset,
        "read": by_read, "copy": by_copy,
    }  # fmt: skip


def measure(path: Path, samples: int, rounds: int) -> dict[str, list[float]]:
    """Measure samples per second of each function, by round."""
    rates: dict[str, list[float]] = {}
    measured = times(path, samples)
    for turn in range(rounds + 1):
        names = list(measured) if turn % 2 else list(measured)[::-1]
        for name in names:
            began = time.process_time()
            assert measured[name]() == samples
            if turn:  # the first round warms up
                rates.setdefault(name, []).append(samples / (time.process_time() - began))
    return rates


def ratios(rates: dict[str, list[float]], own: str, reference: str) -> dict[str, float]:
    """Return median, lowest and highest ratio over rounds."""
    each = [a / b for a, b in zip(rates[own], rates[reference], strict=True)]
    return {"median": statistics.median(each), "least": min(each), "greatest": max(each)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--bytes", type=int, default=20_000, help="mean size of an image")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    result: dict[str, object] = {
        "samples": options.samples,
        "bytes": options.bytes,
        "machine": platform.machine(),
        "webdataset": webdataset.__version__,
        "load": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CLIPKIT_CACHE"] = f"{folder}/cache"
        for name, pax in (("pax", True), ("plain", False)):
            path = Path(folder) / f"{name}.tar"
            write_shard(path, options.samples, options.bytes, pax=pax)
            rates = measure(path, options.samples, options.rounds)
            pairs = (("index", "tarfile"), ("content", "tarfile"), ("read", "webdataset"))
            found = {f"{own} to {reference}": ratios(rates, own, reference) for own, reference in pairs}
            medians = {one: statistics.median(all_of) for one, all_of in rates.items()}
            result[name] = {"samples_per_second": medians, **found}
            shown = ", ".join(f"{one} {statistics.median(all_of):,.0f}/s" for one, all_of in rates.items())
            print(f"{name}: {shown}")
            for what, of in found.items():
                print(f"  {what} {of['median']:.1f} ({of['least']:.1f} to {of['greatest']:.1f})")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "reading.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

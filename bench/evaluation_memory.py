"""Measure the peak memory of a task on synthetic features in the feature store, in its own process.

    python -m bench.evaluation_memory TASK IMAGES COLUMNS DIM

Letters in shape comments: N images, D embedding dimension, C classes or captions.
"""

import json
import resource
import sys
import tempfile
import threading
import time
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from clipkit.model.tokenizer import ClipTokenizer
from clipkit.samples import Samples
from eval.datasets.dataset import DEFAULT_TEMPLATES, EvalDataset, SampleImages
from eval.features.encoder import ImageFeatures
from eval.features.store import FeatureFile, digest_content
from eval.tasks import TASKS, Options

__all__ = ["SyntheticSubject", "peak_of"]


class RepeatedImage(Samples):
    """``count`` samples, all with the same small image."""

    content_id = "0" * 16

    def __init__(self, count: int) -> None:
        self._count, file = count, BytesIO()
        Image.new("RGB", (16, 16), "red").save(file, "png")
        self._image = file.getvalue()

    def __len__(self) -> int:
        return self._count

    def key(self, i: int) -> str:
        return str(i)

    def locate(self, i: int) -> tuple[str, str]:
        return "made up", str(i)

    def members(self, i: int) -> list[str]:
        return ["png"]

    def fields(self, i: int) -> dict[str, Any]:
        return {}

    def read(self, i: int, member: str) -> bytes:
        return self._image


class SyntheticSubject:
    """A model and a dataset for a task, with synthetic features in the store.

    Args:
        place: folder for the store.
        task: "zero-shot" or "retrieval".
        rows: number of images.
        columns: number of classes or captions.
        dim: embedding dimension.
    """

    def __init__(self, place: Path, task: str, rows: int, columns: int, dim: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.device, self.logit_scale, self.metrics = torch.device("cpu"), 100.0, ()
        self._columns = F.normalize(torch.randn(columns, dim, generator=generator), dim=1)  # (C, D)
        labels = torch.arange(rows) % columns
        path = place / "rows.safetensors"
        file = FeatureFile(path, {"projected": dim}, rows, create=True)
        for start in range(0, rows, 16_384):  # features of a model that is correct for some images
            block = labels[start : start + 16_384]
            noise = torch.randn(len(block), dim, generator=generator)
            indices = np.arange(start, start + len(block))
            digests = [digest_content(b"%d" % number) for number in indices]
            file.write(indices, digests, {"projected": F.normalize(3 * self._columns[block] + noise, dim=1)})
        labels[-1] = 0
        self._images = ImageFeatures(FeatureFile(path, {"projected": dim}, rows).columns.__getitem__)
        self.encoder = SimpleNamespace(model=SimpleNamespace(tokenizer=ClipTokenizer()))
        self.stored = rows * dim * 4
        classes = task == "zero-shot"
        self.dataset = EvalDataset(
            name="made up",
            class_names=tuple(f"class {i}" for i in range(columns)) if classes else (),
            templates=DEFAULT_TEMPLATES,
            images=SampleImages(RepeatedImage(rows)),
            labels=labels if classes else None,
            captions=None if classes else tuple((f"caption {i}",) for i in range(rows)),
            revision="",
            tasks=(task,),
        )

    def images(self) -> ImageFeatures:
        return self._images

    def class_weights(self) -> Tensor:
        return self._columns.T.contiguous()

    def texts(self, texts: Any) -> Tensor:
        return self._columns[: len(texts)]


def peak_of(task: str, rows: int, columns: int, dim: int) -> dict[str, Any]:
    """Measure the peak resident memory of a task, with and without mapped files."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            lines = Path("/proc/self/status").read_text().splitlines()
            own = next(line for line in lines if line.startswith("RssAnon"))
            peak[0] = max(peak[0], int(own.split()[1]) << 10)

    with tempfile.TemporaryDirectory(prefix="clipkit-bench-") as scratch:
        subject: Any = SyntheticSubject(Path(scratch), task, rows, columns, dim)
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        began = time.perf_counter()
        outcome = TASKS[task].run(subject, Options())
        seconds = time.perf_counter() - began
        done.set()
        watcher.join()
        stored = subject.stored
    return {
        "rows": rows,
        "columns": columns,
        "dim": dim,
        "seconds": seconds,
        "scores": len(outcome.scores),
        "bytes of stored features": stored,
        "peak bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "peak bytes without what is mapped": peak[0],
    }


if __name__ == "__main__":
    print(json.dumps(peak_of(sys.argv[1], *map(int, sys.argv[2:]))))

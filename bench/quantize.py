"""Compare an ONNX export with int8 weights with the one in float32: size, embeddings, accuracy and speed.

    python -m bench.quantize MODEL [DATASET …] [--rounds 9]

Both exports are loaded with ``clipkit.load`` and encode the images of the datasets (default: digits and glyphs).
Batches of both and of torch alternate, with the same number of threads.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

import clipkit
import eval as evaluation
from clipkit.export import export
from clipkit.model import CLIP

RESULT = Path(__file__).parent / "results" / "quantize.json"
BATCHES = (1, 32)


def accuracy(model: CLIP, dataset: str) -> tuple[float, torch.Tensor]:
    """Return zero-shot accuracy and the embeddings of the images, (N, O)."""
    subject = evaluation.Subject(evaluation.Encoder(model), evaluation.open_dataset(dataset))
    scores = evaluation.evaluate(subject, tasks=["zero-shot"])
    return next(score.value for score in scores if score.metric == "acc1"), subject.images().projected


def speeds(models: dict[str, CLIP], rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds per batch by kind of input, its size and model."""
    size, found = next(iter(models.values())).preprocess.image_size, {}
    for batch in BATCHES:
        images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8)
        tokens = clipkit.tokenize(["a photo of the capital letter A, a kind of character"] * batch)
        for kind, inputs in (("images", images), ("texts", tokens)):
            times: dict[str, list[float]] = {name: [] for name in models}
            for _ in range(rounds + 1):
                for name, model in models.items():
                    begun = time.perf_counter()
                    with torch.inference_mode():
                        (model.encode_image if kind == "images" else model.encode_text)(inputs)
                    times[name].append(1e3 * (time.perf_counter() - begun))
            found[f"{kind}, batch {batch}"] = {name: median(own[1:]) for name, own in times.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("datasets", nargs="*", default=["digits", "glyphs"])
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        models = {"torch": clipkit.load(given.model)}
        sizes: dict[str, dict[str, float]] = {}
        for name, target in (("float32", "onnx"), ("int8", "onnx-int8")):
            out = Path(work) / name
            export(models["torch"], out, to=[target])
            sizes[name] = {file.name: file.stat().st_size / 1e6 for file in sorted(out.glob("*.onnx*"))}
            models[name] = clipkit.load(out)
        result = {
            "model": given.model,
            "threads": torch.get_num_threads(),
            "megabytes": sizes,
            "datasets": {},
            "milliseconds": speeds(models, given.rounds),
        }
        for dataset in given.datasets:
            found = {name: accuracy(models[name], dataset) for name in ("float32", "int8")}
            cosine = (found["float32"][1] * found["int8"][1]).sum(dim=1)
            result["datasets"][dataset] = {
                "images": len(cosine),
                "accuracy": {name: own[0] for name, own in found.items()},
                "cosine": {"lowest": float(cosine.min()), "mean": float(cosine.mean())},
            }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

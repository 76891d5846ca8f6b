"""Compare ONNX and OpenVINO exports with int8 weights with those in float32: size, embeddings, accuracy and speed.

    python -m bench.quantize MODEL [DATASET …] [--calibrate SOURCE] [--rounds 9]

The exports are loaded with ``clipkit.load`` and encode images of the datasets (default: digits and glyphs). With
SOURCE, images on which ranges of activations are measured, there are exports to OpenVINO too. Batches of all and of
torch alternate, with the same number of threads.
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
from clipkit.export.write import read_calibration_images
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
    parser.add_argument("--calibrate", metavar="SOURCE")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        models = {"torch": clipkit.load(given.model)}
        sizes: dict[str, dict[str, float]] = {}
        targets = ["onnx", "onnx-int8"]
        images = None
        if given.calibrate:
            targets += ["openvino", "openvino-int8"]
            images, _ = read_calibration_images(given.calibrate, models["torch"])
        for target in targets:
            out = Path(work) / target
            export(models["torch"], out, to=[target], images=images)
            graphs = sorted([*out.glob("visual.*"), *out.glob("textual.*")])
            sizes[target] = {file.name: file.stat().st_size / 1e6 for file in graphs}
            models[target] = clipkit.load(out)
        result = {
            "model": given.model,
            "threads": torch.get_num_threads(),
            "megabytes": sizes,
            "datasets": {},
            "milliseconds": speeds(models, given.rounds),
        }
        for dataset in given.datasets:
            _, expected = accuracy(models["torch"], dataset)
            result["datasets"][dataset] = {"images": len(expected)}
            for target in targets:
                score, embeddings = accuracy(models[target], dataset)
                cosine = (expected * embeddings).sum(dim=1)
                result["datasets"][dataset][target] = {
                    "accuracy": score,
                    "lowest_cosine": float(cosine.min()),
                    "mean_cosine": float(cosine.mean()),
                }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""Calibrate zero-shot labels on a few images of each class and test them on the others.

    python -m bench.calibration MODEL DATASET [MODEL DATASET …] [--images 20]

Only scores are recorded, so other load on the machine does not matter.
"""

import argparse
import json
from pathlib import Path

import torch

import clipkit
import eval as evaluation
from clipkit.formats.checkpoint import model_hash
from clipkit.inference.calibrate import calibrate
from eval.features.encoder import Encoder
from eval.metrics import intervals
from eval.metrics.classes import expected_calibration_error

RESULT = Path(__file__).parent / "results" / "calibration.json"


def measured(source: str, name: str, images: int) -> dict[str, object]:
    """Calibrate on the first images of each class and return scores of the others."""
    model = clipkit.load(source)
    (dataset,) = evaluation.open_datasets([name])
    assert dataset.labels is not None
    labels = dataset.labels
    features = Encoder(model).images(dataset).projected
    weights = clipkit.zero_shot_classifier(model, dataset.class_names, dataset.templates)
    similarities = features @ weights.cpu()
    learn = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(len(dataset.class_names)):
        learn[(labels == label).nonzero()[:images, 0]] = True
    targets = torch.nn.functional.one_hot(labels, len(dataset.class_names)).bool()
    scale = float(model.logit_scale.detach().exp())
    found = calibrate(
        similarities[learn], targets[learn], labels=dataset.class_names, templates=dataset.templates,
        weights=model_hash(model), scale=scale, several=False,
    )  # fmt: skip
    held, truth = similarities[~learn], labels[~learn]
    before, after = (scale * held).softmax(dim=1), found.probabilities(held)
    errors = {}
    for when, probabilities in (("before", before), ("after", after)):
        confidence, best = probabilities.max(dim=1)
        errors[when] = expected_calibration_error(confidence, best == truth).value
    confidence, best = after.max(dim=1)
    accepted = confidence >= torch.tensor(found.thresholds)[best]
    precision = intervals.estimate_proportion(
        int((best == truth)[accepted].sum()), max(1, int(accepted.sum()))
    )
    return {
        "images": [int(learn.sum()), len(truth)],
        "accuracy": float((best == truth).double().mean()),
        "ece": errors,
        "promised": [found.held_out.precision, found.held_out.low, found.held_out.high],
        "precision": precision.value,
        "accepted": float(accepted.double().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("pairs", nargs="+", metavar="MODEL DATASET")
    parser.add_argument("--images", type=int, default=20, help="images of each class to learn from")
    given = parser.parse_args()
    found = {
        name: measured(source, name, given.images)
        for source, name in zip(given.pairs[::2], given.pairs[1::2], strict=True)
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

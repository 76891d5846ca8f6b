"""Synthetic datasets and models for bench/evaluation.py."""

import random
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
from PIL import Image

from clipkit import CLIP
from clipkit.model.architectures import Architecture, TextTower, VisionTower
from data.shards.writer import DatasetWriter, Record

__all__ = ["FAMILY", "photo", "publish", "publish_family", "templates", "tiny_twins"]

CLASSES, TEMPLATES, CAPTIONS = 20, 8, 5  # of the dataset for three_tasks
WORDS = (
    "a", "the", "man", "woman", "dog", "red", "small", "street", "with", "and", "standing", "sitting", "on", "near",
    "table", "water", "holding", "in", "front", "of", "green", "large", "old", "young", "people", "group", "ball",
    "field", "house", "white", "car",
)  # fmt: skip
# five datasets: (first image, number of images, class names)
FAMILY = {
    "imagenet": (0, 60, slice(0, 40)),
    "other pictures of the same classes": (1000, 60, slice(0, 40)),
    "sketches of the same classes": (2000, 60, slice(0, 40)),
    "some of the classes": (3000, 40, slice(10, 20)),
    "the same pictures by other classes": (0, 60, slice(500, 510)),
}


def templates(count: int) -> list[str]:
    """Return the first ``count`` of OpenAI's templates for ImageNet."""
    return [template("{c}") for template in open_clip.OPENAI_IMAGENET_TEMPLATES[:count]]


def photo(number: int, label: int, side: int | None = None) -> bytes:
    """Return a JPEG with sides of 256 to 500 pixels: a crop of a photograph, tinted with the color of its class."""
    from sklearn.datasets import load_sample_images

    draw = np.random.default_rng(number)
    photos = load_sample_images().images
    whole = Image.fromarray(photos[number % len(photos)])
    part = int(draw.integers(200, min(whole.size)))
    left, top = (int(draw.integers(0, length - part + 1)) for length in whole.size)
    width, height = (side, side) if side else draw.integers(256, 501, 2).tolist()
    cut = np.asarray(
        whole.crop((left, top, left + part, top + part)).resize((width, height)), dtype=np.float32
    )
    tint = np.random.default_rng(label).uniform(0, 255, 3)
    file = BytesIO()
    Image.fromarray((0.6 * cut + 0.4 * tint).astype(np.uint8)).save(file, "jpeg", quality=90)
    return file.getvalue()


def sentence(draw: random.Random) -> str:
    """Return 8 to 13 words, about the length of human captions of photographs."""
    return " ".join(draw.choices(WORDS, k=draw.randint(8, 13)))


def publish(place: Path, images: int) -> dict[str, Any]:
    """Write ``set`` with labels and captions, half train and half test, and ``captions`` for CLIP_benchmark."""
    draw = random.Random(0)
    count = images // 2
    names = list(open_clip.IMAGENET_CLASSNAMES[:CLASSES])
    with DatasetWriter(place / "set", samples_per_shard=max(1, count // 8)) as writer:
        for split, first in (("train", 10_000), ("test", 0)):
            for i in range(count):
                image = photo(first + i, i % CLASSES)
                captions = "\n".join(sentence(draw) for _ in range(CAPTIONS))
                key = f"s{i:07d}"
                writer.write(
                    split, Record(key=key, image=image, extension="jpg", caption=captions, label=i % CLASSES)
                )
        writer.finish({}, class_names=names, templates=templates(TEMPLATES))
    (place / "captions").mkdir()
    (place / "captions" / "dataset_type.txt").write_text("retrieval\n")
    (place / "captions" / "test").symlink_to(place / "set" / "test")
    return {
        "train": count,
        "test": count,
        "classes": CLASSES,
        "templates": TEMPLATES,
        "captions a picture": CAPTIONS,
    }


def publish_family(place: Path) -> dict[str, int]:
    """Write five datasets; return the number of distinct images and prompts."""
    prompts: set[str] = set()
    images: set[bytes] = set()
    for name, (first, count, chosen) in FAMILY.items():
        names = list(open_clip.IMAGENET_CLASSNAMES[chosen])
        prompts.update(template.replace("{c}", one) for template in templates(TEMPLATES) for one in names)
        with DatasetWriter(place / name) as writer:
            for i in range(count):
                image = photo(first + i, 0, side=64)
                images.add(image)
                label = i % len(names)
                writer.write("test", Record(key=f"s{i:07d}", image=image, extension="jpg", label=label))
            writer.finish({}, class_names=names, templates=templates(TEMPLATES))
    return {"images": len(images), "texts": len(prompts)}


def tiny_twins() -> tuple[CLIP, Any, Any, Any]:
    """Return a clipkit model, open_clip's model with the same weights, and open_clip's transform and tokenizer."""
    shape = Architecture(
        embed_dim=16,
        vision=VisionTower(image_size=32, patch_size=16, width=32, layers=1, heads=2),
        text=TextTower(width=32, layers=1, heads=2),
    )
    own = CLIP(shape).initialize().eval()
    reference = open_clip.CLIP(
        embed_dim=16,
        vision_cfg={"image_size": 32, "patch_size": 16, "width": 32, "layers": 1, "head_width": 16},
        text_cfg={"width": 32, "layers": 1, "heads": 2},
    ).eval()
    reference.load_state_dict(own.state_dict())
    mean, std = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
    transform = open_clip.image_transform(32, is_train=False, mean=mean, std=std)
    return own, reference, transform, open_clip.get_tokenizer("ViT-B-32")

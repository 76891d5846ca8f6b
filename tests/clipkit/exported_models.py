"""Small models of several kinds and image files, for the export tests."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from clipkit.export import export
from clipkit.model import (
    ARCHITECTURES,
    Architecture,
    BagOfWords,
    TextTower,
    TimmVision,
    VisionTower,
)
from clipkit.model.clip import CLIP, build
from clipkit.model.names import from_open_clip
from clipkit.model.preprocess import Preprocess

TEXT = TextTower(width=32, layers=1, heads=2, context_length=20)
RESNET = from_open_clip(
    {
        "embed_dim": 32,
        "quick_gelu": True,
        "vision_cfg": {
            "image_size": 64,
            "layers": [1, 1, 1, 1],
            "width": 16,
            "patch_size": None,
            "head_width": 32,
        },
        "text_cfg": {"context_length": 20, "width": 32, "heads": 2, "layers": 1},
    }
)
MODELS: dict[str, Architecture] = {
    "own": ARCHITECTURES["ViT-Ti-4-16"],
    "quick_gelu": Architecture(
        embed_dim=48,
        vision=VisionTower(image_size=32, patch_size=8, width=64, layers=2, heads=2, mlp_ratio=3.0),
        text=replace(TEXT, layers=2),
        quick_gelu=True,
    ),
    "resnet": RESNET,
    "timm": Architecture(embed_dim=32, vision=TimmVision(image_size=160, name="test_resnet"), text=TEXT),
    "timm_mlp": Architecture(
        embed_dim=32,
        vision=TimmVision(image_size=160, name="test_resnet", projection="mlp", dropout=0.1),
        text=TEXT,
    ),
    "distilled": Architecture(  # two classifiers, and timm options
        embed_dim=32,
        vision=TimmVision(image_size=32, name="deit_tiny_distilled_patch16_224", options={"depth": 1}),
        text=BagOfWords(width=32),
    ),
}
ASCII = ["a photo of a cat", "It's 3 o'clock!", "", "one " * 50, "x y  z\tw", "PRICE: $12.50 (now)"]
REPAIRED = ["“curly” quotes &amp; entities", "schÃ¶n", "ﬁne ﬀ"]  # by ftfy, in clipkit and in open_clip


def draw_images(folder: Path) -> list[Path]:
    """Draw image files as users have them: wide, tall, small, with a palette, with an alpha channel."""
    paths = []
    for i, (size, name) in enumerate(
        [
            ((300, 200), "a.jpg"),
            ((97, 411), "b.png"),
            ((23, 17), "c.png"),
            ((128, 128), "d.png"),
            ((90, 60), "e.png"),
        ]
    ):
        image = Image.new("RGB", size, ((40 * i) % 256, 90, 200))
        draw = ImageDraw.Draw(image)
        draw.ellipse((5, 3, size[0] // 2, size[1] - 4), fill=(230, 30 * i, 20))
        draw.line((0, 0, *size), fill=(255, 255, 0), width=3)
        image = {"d.png": image.convert("P"), "e.png": image.convert("RGBA")}.get(name, image)
        image.save(folder / name)
        paths.append(folder / name)
    return paths


def in_rgb(paths: list[Path]) -> list[Image.Image]:
    """Open as RGB, for libraries that convert before they resize; clipkit and open_clip resize first."""
    return [image.convert("RGB") for image in opened(paths)]


def opened(paths: list[Path]) -> list[Image.Image]:
    images: list[Image.Image] = []
    for path in paths:
        with Image.open(path) as image:
            image.load()
            images.append(image)
    return images


def model_of(kind: str) -> CLIP:
    """A model with random weights large enough to show in the embeddings, and a changed temperature."""
    shape = MODELS[kind]
    preprocess = Preprocess(image_size=shape.vision.image_size)
    if kind == "quick_gelu":
        preprocess = replace(preprocess, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3), interpolation="bilinear")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build(shape, preprocess=preprocess).initialize()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval()


def exported(kind: str, out: Path, *to: str) -> CLIP:
    model = model_of(kind)
    for one in export(model, out, to=to):
        assert one.library and one.difference is not None and one.difference <= 1e-5
        assert all((out / file).is_file() for file in one.files)
    return model


def apart(found: Any, expected: Tensor) -> float:
    return float((torch.as_tensor(found).detach() - expected).abs().max())


def same_model(a: CLIP, b: CLIP) -> None:
    if isinstance(b.architecture.vision, TimmVision):  # open_clip reads it back as a tower of its own
        b.architecture = replace(b.architecture, vision=a.architecture.vision)
    assert a.architecture == replace(b.architecture, small_data=False)
    assert a.preprocess == b.preprocess and a.tokenizer == b.tokenizer
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

"""Tests of towers as a backbone and a projection: pooled features take the place of images and texts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clipkit.errors import ConfigError
from clipkit.model import Architecture, OpenClipVision, TextTower, TimmVision, VisionTower
from clipkit.model.architectures import ImageArchitecture
from clipkit.model.clip import create
from clipkit.model.names import create_architecture
from clipkit.training.build import lock, projection_prefix
from tests.clipkit.training.test_text_towers import write_encoder

TEXT = TextTower(width=32, layers=1, heads=2, context_length=12)
VIT = VisionTower(image_size=16, patch_size=8, width=32, layers=2, heads=2)
OPEN_CLIP = {
    "timm_model_name": "test_vit",
    "timm_model_pretrained": False,
    "timm_pool": "",
    "timm_proj": "mlp",
}
IMAGE_TOWERS: dict[str, ImageArchitecture] = {
    **{pool: replace(VIT, pool=pool) for pool in ("class", "mean", "mean_norm", "map")},
    "timm": TimmVision(image_size=64, name="test_resnet"),
    "timm mlp": TimmVision(image_size=64, name="test_resnet", projection="mlp", dropout=0.5),
    "open_clip": OpenClipVision(image_size=160, config=OPEN_CLIP),
}


@pytest.mark.parametrize("vision", IMAGE_TOWERS.values(), ids=IMAGE_TOWERS)
@torch.no_grad()
def test_pooled_features_take_the_place_of_images_and_texts(vision: ImageArchitecture) -> None:
    model = create(Architecture(embed_dim=24, vision=vision, text=TEXT), seed=0).eval()
    images = torch.randint(0, 256, (5, 3, vision.image_size, vision.image_size), dtype=torch.uint8)
    pooled = model.pool_images(images)
    assert pooled.ndim == 2
    torch.testing.assert_close(model.encode_image(pooled), model.encode_image(images), atol=1e-6, rtol=1e-5)
    tokens = model.tokenizer(["a", "two words", "three short words"])
    pooled_texts = model.pool_texts(tokens)
    torch.testing.assert_close(model.encode_text(pooled_texts), model.encode_text(tokens))
    _, text, *_ = model(pooled, pooled_texts)
    torch.testing.assert_close(text, model.encode_text(tokens))


@pytest.mark.parametrize("pooling", ["mean", "cls", "last", "pooler"])
@pytest.mark.parametrize("projection", ["linear", "mlp"])
@torch.no_grad()
def test_pooled_texts_of_an_encoder(pooling: str, projection: str, tmp_path: Path) -> None:
    write_encoder(tmp_path)
    options = {"pooling": pooling, "projection": projection}
    shape = create_architecture("ViT-Ti-4-16", text=f"transformers:{tmp_path}", text_options=options)
    model = create(shape, seed=0).eval()
    tokens = model.tokenizer(["a", "two words", "three short words"])
    torch.testing.assert_close(model.encode_text(model.pool_texts(tokens)), model.encode_text(tokens))


@pytest.mark.parametrize("name", ["timm", "timm mlp", "class"])
def test_only_projections_are_trained_with_locked_backbones(name: str) -> None:
    vision = IMAGE_TOWERS[name]
    model = create(Architecture(embed_dim=24, vision=vision, text=TEXT), seed=0)
    lock(model, image="backbone", text="backbone")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    expected = {key for key in model.state_dict() if key.startswith(projection_prefix(model, "image"))}
    assert expected and trained == {*expected, "text_projection", "logit_scale"}
    model.train()


def test_locked_backbones_compute_without_dropout() -> None:
    vision = TimmVision(image_size=64, name="test_resnet", options={"drop_rate": 0.5}, projection="mlp")
    model = create(Architecture(embed_dim=24, vision=vision, text=TEXT), seed=0)
    lock(model, image="backbone")
    images = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8)
    assert torch.equal(model.pool_images(images), model.pool_images(images))
    assert model.visual.get_submodule("head").training


def test_towers_without_a_known_projection() -> None:
    shape = create_architecture("ViT-Ti-4-16", image="pixels:Ti")
    with pytest.raises(
        ConfigError, match=r"lock.image=backbone and lock.store need a tower with a known projection"
    ):
        lock(create(shape, seed=0), image="backbone")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projection": "none"}, "projection = 'none' is unknown: linear or mlp"),
        ({"projection": "mlp", "dropout": 1.0}, "dropout = 1.0 is not at least 0 and below 1"),
        ({"projection": "mlp", "dropout": "x"}, "dropout = 'x' is not at least 0"),
        ({"dropout": 0.5}, "dropout = 0.5 has no effect without projection = 'mlp'"),
    ],
)
def test_options_of_projections_that_do_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TimmVision(image_size=64, name="test_resnet").replace_options(options)

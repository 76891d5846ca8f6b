"""Models of images with other than three channels."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clipkit
from clipkit.config import Config, LoraConfig, LossConfig, ModelConfig, PixelsConfig, SmallConfig
from clipkit.errors import CheckpointError, ConfigError
from clipkit.formats.checkpoint import save_model
from clipkit.model.clip import CLIP, create
from clipkit.model.names import create_architecture
from clipkit.model.preprocess import OPENAI_MEAN, Preprocess, eval_pixels
from clipkit.samples import PixelRangeError
from clipkit.training.build import first_model, shape_of
from tests.clipkit.format_images import bands_of, npy_of

SIDE, BANDS = 16, 12
RANGES = ((0.0, 255.0),) * 3 + ((0.0, 10000.0),) * (BANDS - 3)
TIMM = "timm:vit_tiny_patch16_224"


def first(*, channels: int = BANDS, extend: str = "zeros", lora: int = 0, **settings: Any) -> CLIP:
    model = ModelConfig(**{"name": "ViT-Ti-4-16", **settings})
    shape = shape_of(model, LossConfig(), SmallConfig(), pixels=PixelsConfig(channels=channels))
    return first_model(
        Config(
            model=model,
            seed=1,
            pixels=PixelsConfig(channels=channels, extend=extend),
            lora=LoraConfig(rank=lora),
        ),
        shape,
    ).eval()


def bands(seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (20, 24, BANDS)).astype(np.uint16)


@pytest.fixture(scope="module")
def rgb(tmp_path_factory: pytest.TempPathFactory) -> tuple[CLIP, Path]:
    model = create("ViT-Ti-4-16", seed=0).eval()
    folder = tmp_path_factory.mktemp("rgb") / "model"
    save_model(model, folder)
    return model, folder


def test_weights_extended_with_zeros_give_the_embeddings_of_rgb(
    rgb: tuple[CLIP, Path], tmp_path: Path
) -> None:
    model, folder = rgb
    values = bands()
    (tmp_path / "bands.tif").write_bytes(bands_of(values, compression="zlib"))
    extended = first(weights=str(folder))
    extended.preprocess = extended.preprocess.replace_decoding(pixel_range=RANGES)
    pixels = eval_pixels(tmp_path / "bands.tif", extended.preprocess)
    colors = eval_pixels(values[..., :3].astype(np.uint8), model.preprocess)
    assert torch.equal(pixels[:3], colors) and pixels.shape == (BANDS, SIDE, SIDE)
    for images, of_rgb in ((pixels[None], colors[None]), (torch.rand(8, BANDS, SIDE, SIDE), None)):
        of_rgb = images[:, :3] if of_rgb is None else of_rgb
        with torch.no_grad():
            assert torch.equal(extended.encode_image(images), model.encode_image(of_rgb))
    assert torch.equal(
        extended.encode_text(extended.tokenizer(["a"])), model.encode_text(model.tokenizer(["a"]))
    )
    assert extended.preprocess.mean[:3] == OPENAI_MEAN
    assert extended.preprocess.mean[3:] == (sum(OPENAI_MEAN) / 3,) * 9
    mean = first(weights=str(folder), extend="mean").visual.get_parameter("conv1.weight")
    assert torch.equal(mean[:, 5], model.visual.get_parameter("conv1.weight").mean(dim=1))


@pytest.mark.parametrize("image", ["open_clip", TIMM, "timm:resnet18"])
def test_towers_of_libraries(image: str, tmp_path: Path) -> None:
    if image == "open_clip":
        shape = create_architecture("open_clip:RN50")
        vision: Any = shape.vision
        small = replace(vision, image_size=64, config={**vision.config, "layers": [1, 1, 1, 1], "width": 16})
        model = create(replace(shape, vision=small), seed=0).eval()
        images = torch.rand(2, BANDS, 64, 64)
    else:
        model = create(create_architecture("ViT-Ti-4-16", image=image, image_size=224), seed=0).eval()
        images = torch.rand(2, BANDS, 224, 224)
    with torch.no_grad():
        expected = model.encode_image(images[:, :3])
        model.extend_channels(BANDS, extend="zeros")
        assert (model.encode_image(images) - expected).abs().max() < 1e-5
        save_model(model, tmp_path / "model")
        assert torch.equal(clipkit.load(tmp_path / "model").encode_image(images), model.encode_image(images))


def test_models_are_stored_and_used_with_their_channels(tmp_path: Path) -> None:
    model = first()
    mean = tuple(number / BANDS for number in range(BANDS))
    model.preprocess = replace(model.preprocess, mean=mean, pixel_range=RANGES)
    model.reset_constants()
    save_model(model, tmp_path / "model")
    loaded = clipkit.load(tmp_path / "model")
    assert loaded.preprocess == model.preprocess and loaded.architecture == model.architecture
    values = bands()
    (tmp_path / "a.tif").write_bytes(bands_of(values))
    (tmp_path / "a.npy").write_bytes(npy_of(values.transpose(2, 0, 1)))
    of_file = clipkit.encode_image(tmp_path / "a.tif", loaded)
    for source in (tmp_path / "a.npy", values, torch.from_numpy(values.astype(np.int32)).permute(2, 0, 1)):
        assert torch.equal(clipkit.encode_image([source], loaded), of_file)
    assert clipkit.classify([values], ["a", "b"], loaded).shape == (1, 2)
    with pytest.raises(PixelRangeError, match="image with 3 channels, and the model has 12"):
        (tmp_path / "b.npy").write_bytes(npy_of(values[..., :3].astype(np.uint8)))
        clipkit.encode_image(tmp_path / "b.npy", loaded)
    with pytest.raises(PixelRangeError, match="image with 12 channels, and the model has 3"):
        clipkit.encode_image(tmp_path / "a.tif", first(channels=3))
    assert first(weights=str(tmp_path / "model")).preprocess == model.preprocess  # nothing to extend
    with pytest.raises(ConfigError, match=r"are of images of 12 channels: set pixels.channels=12"):
        first(weights=str(tmp_path / "model"), channels=3)


def test_one_channel() -> None:
    model = first(channels=1)
    gray = bands()[..., 0].astype(np.uint8)
    assert eval_pixels(gray, model.preprocess).shape == (1, SIDE, SIDE)
    assert clipkit.encode_image([gray], model).isfinite().all()


def test_what_has_no_further_channels_is_refused(rgb: tuple[CLIP, Path]) -> None:
    weights = str(rgb[1])
    for settings, message in (
        ({"image": "pixels:Ti"}, "requires another image tower than Image GPT"),
        ({"weights": weights, "channels": 2}, "weights of RGB images have three channels"),
        ({"weights": weights, "lora": 4}, "adapters require model.weights with all of pixels.channels"),
    ):
        with pytest.raises(ConfigError, match=message):
            first(**settings)
    with pytest.raises(ConfigError, match="mean and std are of 3 channels, and the image tower of 12"):
        CLIP(first().architecture, preprocess=Preprocess(image_size=SIDE))
    with pytest.raises(CheckpointError):
        Preprocess.from_dict({**first().preprocess.to_dict(), "std": [1.0] * 11})

"""Tests of exports to transformers and sentence-transformers: token ids and embeddings equal clipkit's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from torch import Tensor

import clipkit
from clipkit.errors import ConfigError
from clipkit.export import export
from clipkit.export.checks import normalize_pixels
from clipkit.export.transformers import write_clip_tokenizer
from clipkit.model.clip import CLIP
from clipkit.model.preprocess import preprocess_images
from clipkit.model.tokenizer import END_OF_TEXT
from tests.clipkit.exported_models import (
    ASCII,
    REPAIRED,
    apart,
    draw_images,
    exported,
    in_rgb,
    model_of,
    same_model,
)


@pytest.fixture(scope="module")
def rgb(tmp_path_factory: pytest.TempPathFactory) -> list[Image.Image]:
    return in_rgb(draw_images(tmp_path_factory.mktemp("images")))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[CLIP, Path]:
    """A model exported to one folder for sentence-transformers, transformers and open_clip."""
    out = tmp_path_factory.mktemp("export") / "own"
    return exported("own", out, "open_clip", "transformers", "sentence-transformers"), out


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[CLIP, Path]:
    """A model with QuickGELU and its own preprocessing, exported to the default targets."""
    out = tmp_path_factory.mktemp("export") / "quick"
    return exported("quick_gelu", out), out


@pytest.fixture(params=["own", "quick"])
def plain(request: pytest.FixtureRequest) -> tuple[CLIP, Path]:
    found: tuple[CLIP, Path] = request.getfixturevalue(request.param)
    return found


# --- transformers -------------------------------------------------------------------------------------------


@torch.no_grad()
def test_transformers_export(plain: tuple[CLIP, Path], rgb: list[Image.Image]) -> None:
    from transformers import AutoModel, AutoProcessor, AutoTokenizer, CLIPModel, CLIPProcessor

    model, out = plain
    theirs = CLIPModel.from_pretrained(out).eval()
    processor = AutoProcessor.from_pretrained(out)
    assert isinstance(processor, CLIPProcessor) and isinstance(AutoModel.from_pretrained(out), CLIPModel)
    inputs = processor(text=ASCII, images=rgb, return_tensors="pt", padding=True, truncation=True)
    pixels = normalize_pixels(preprocess_images(rgb, model.preprocess), model)
    found = theirs(**{**inputs, "pixel_values": pixels})
    images, texts = clipkit.encode_image(rgb, model), clipkit.encode_text(ASCII, model)
    assert apart(found.image_embeds, images) <= 1e-5
    assert apart(found.text_embeds, texts) <= 1e-5
    scale = model.logit_scale.exp()
    assert apart(found.logits_per_image / scale, images @ texts.T) <= 1e-5
    steps = torch.tensor(model.preprocess.std).view(3, 1, 1) * 255
    crops = beside(rgb, model)
    assert ((inputs["pixel_values"] - crops) * steps).abs().mean() <= 0.1  # of 255: another library's resize
    assert apart(theirs(**inputs).image_embeds, model.encode_image(crops)) <= 2e-3
    length = model.architecture.text.context_length
    padded = AutoTokenizer.from_pretrained(out)(
        ASCII, padding="max_length", truncation=True, return_tensors="pt"
    )
    assert torch.equal(unpadded(padded["input_ids"]), clipkit.tokenize(ASCII, length))


def beside(images: list[Image.Image], model: CLIP) -> Tensor:
    """Preprocess as transformers does: a crop that cannot be centered is rounded up and left."""
    size = model.preprocess.image_size
    resample = Image.Resampling[model.preprocess.interpolation.upper()]
    crops = []
    for image in images:
        wide, high = (max(size, int(size * side / min(image.size))) for side in image.size)
        left, top = (wide - size) // 2, (high - size) // 2
        crops.append(image.resize((wide, high), resample).crop((left, top, left + size, top + size)))
    return normalize_pixels(preprocess_images(crops, model.preprocess), model)


def unpadded(ids: Tensor) -> Tensor:
    """Replace padding with end of text by clipkit's padding."""
    behind = torch.arange(ids.shape[1]) > (ids == END_OF_TEXT).int().argmax(dim=1, keepdim=True)
    return ids.masked_fill(behind, 0)


@given(text=st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="&<"), max_size=60))
@settings(deadline=None, max_examples=200)
def test_token_ids_equal_clipkit(clip_tokenizer: Any, text: str) -> None:
    """Any printable ASCII without "&" (may begin an HTML entity) and "<" (may begin a special token)."""
    assert clip_tokenizer.encode(text).ids == clipkit.tokenize(text, 200, trim=True)[0].tolist()


@pytest.fixture(scope="module")
def clip_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tokenizers import Tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write_clip_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_transformers_does_not_apply_ftfy(clip_tokenizer: Any) -> None:
    for text in REPAIRED:
        assert clip_tokenizer.encode(text).ids != clipkit.tokenize(text, trim=True)[0].tolist()
    for text in ("猫の写真", "über die Straße", "naïve café №5", "привет, мир!"):
        assert clip_tokenizer.encode(text).ids == clipkit.tokenize(text, trim=True)[0].tolist()


def test_transformers_folder_round_trips(plain: tuple[CLIP, Path], tmp_path: Path) -> None:
    model, out = plain
    for name in ("config.json", "model.safetensors", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    same_model(clipkit.load(tmp_path), model)
    assert clipkit.load(out).origin.startswith("open_clip folder")  # needs no renaming of tensors


def test_squash_resize_is_exported(rgb: list[Image.Image], tmp_path: Path) -> None:
    from transformers import AutoProcessor

    model = model_of("quick_gelu")
    model.preprocess = replace(model.preprocess, resize_mode="squash")
    export(model, tmp_path / "out", to=["transformers"])
    found = AutoProcessor.from_pretrained(tmp_path / "out")(images=rgb, return_tensors="pt")
    steps = torch.tensor(model.preprocess.std).view(3, 1, 1) * 255
    expected = normalize_pixels(preprocess_images(rgb, model.preprocess), model)
    assert apart(found["pixel_values"] * steps, expected * steps) <= 1 + 1e-3


@pytest.fixture(scope="module")
def without_options(
    rgb: list[Image.Image], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, list[Tensor]]]:
    """By target: a folder of the model as it is, and the pixels that each loader makes of the images."""
    made = {}
    for target in ("transformers", "sentence-transformers"):
        out = tmp_path_factory.mktemp("plain") / "out"
        export(model_of("quick_gelu"), out, to=[target])
        made[target] = out, pixels_of(out, rgb)
    return made


def pixels_of(folder: Path, images: list[Image.Image]) -> list[Tensor]:
    from transformers import AutoImageProcessor, AutoProcessor, CLIPImageProcessor

    loaders = (AutoProcessor, AutoImageProcessor, CLIPImageProcessor)
    return [
        loader.from_pretrained(folder)(images=images, return_tensors="pt")["pixel_values"]
        for loader in loaders
    ]


@pytest.mark.parametrize("target", ["transformers", "sentence-transformers"])
@pytest.mark.parametrize(
    "chosen",
    [{"background": "#010203", "upright": True}, {"upright": True}, {"pixel_range": (0, 4095)}, {}],
)
def test_background_and_orientation_round_trip(
    target: str,
    chosen: dict[str, Any],
    rgb: list[Image.Image],
    without_options: dict[str, tuple[Path, list[Tensor]]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from transformers import AutoImageProcessor
    from transformers.utils import logging

    model = model_of("quick_gelu")
    model.preprocess = model.preprocess.replace_decoding(**chosen)
    export(model, tmp_path / "out", to=[target])
    same_model(clipkit.load(tmp_path / "out"), model)
    plain, expected = without_options[target]
    files = [(folder / "preprocessor_config.json").read_bytes() for folder in (plain, tmp_path / "out")]
    assert (files[0] == files[1]) == (not chosen)  # without options, the file is unchanged
    # transformers ignores the options without a warning, keeps them, and computes the same as without
    logger = logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    try:
        assert all(map(torch.equal, pixels_of(tmp_path / "out", rgb), expected))
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records
    AutoImageProcessor.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "out")
    assert clipkit.load(tmp_path / "out").preprocess == model.preprocess


# --- sentence-transformers ----------------------------------------------------------------------------------


def test_sentence_transformers_export(own: tuple[CLIP, Path], rgb: list[Image.Image]) -> None:
    from sentence_transformers import SentenceTransformer

    model, out = own
    theirs = SentenceTransformer(str(out), device="cpu")
    texts = theirs.encode(ASCII, show_progress_bar=False)
    assert apart(texts, clipkit.encode_text(ASCII, model)) <= 1e-5
    size = model.preprocess.image_size
    small = [image.resize((size, size)) for image in rgb]
    images = theirs.encode(small, show_progress_bar=False)
    assert apart(images, clipkit.encode_image(small, model)) <= 1e-5
    images = theirs.encode(rgb, show_progress_bar=False)
    with torch.no_grad():
        assert apart(images, model.encode_image(beside(rgb, model))) <= 2e-3  # resized as in transformers
    assert theirs.similarity_fn_name == "cosine"


def test_models_of_other_channels_are_exported_to_transformers_alone(tmp_path: Path) -> None:
    model = model_of("own")
    model.extend_channels(12, extend="mean")
    ranges = ((0.0, 255.0),) * 3 + ((0.0, 4095.0),) * 9
    model.preprocess = model.preprocess.replace_decoding(pixel_range=ranges)
    assert [one.target for one in export(model, tmp_path / "out")] == ["transformers"]
    loaded = clipkit.load(tmp_path / "out")
    assert loaded.preprocess == model.preprocess
    same_model(loaded, model)
    for target, display in (
        ("open_clip", "open_clip"), ("timm", "timm (the image encoder)"), ("onnx", "onnxruntime"),
        ("sentence-transformers", "sentence-transformers"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            export(model, tmp_path / target, to=[target])
        assert str(caught.value).startswith(
            f"{display} supports images of 3 channels, and those of this model have 12"
        )

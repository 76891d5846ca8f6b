"""Tests of images of variable size: strips, positions, towers, and transformers' SigLIP 2."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from PIL import Image
from torch import Tensor

import clipkit
from clipkit.errors import CheckpointError, ConfigError, DataError
from clipkit.export import export
from clipkit.formats.checkpoint import save_model
from clipkit.model.architectures import Architecture, NaFlexTower, TextTower, VisionTower
from clipkit.model.clip import CLIP, create
from clipkit.model.naflex import PackedVisionTransformer, PatchBudget, weigh_grid_lines
from clipkit.model.names import create_architecture
from clipkit.model.preprocess import Preprocess, eval_pixels, preprocess_images

# height and width, with aspect ratios from 1:40 to 20:1
SIZES = ((40, 70), (90, 30), (64, 64), (10, 200), (300, 7), (5, 5), (33, 32))


def random_image(height: int, width: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@given(
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    side=st.integers(4, 32),
    count=st.integers(1, 400),
)
def test_sizes_are_those_of_transformers(height: int, width: int, side: int, count: int) -> None:
    from transformers.models.siglip2.image_processing_siglip2 import get_image_size_for_max_num_patches

    budget = PatchBudget(side=side, count=count)
    assert budget.fit_size(height, width) == get_image_size_for_max_num_patches(height, width, side, count)


def test_images_that_no_scale_fits_are_refused() -> None:
    with pytest.raises(DataError, match="60000000 x 1 pixels is too long for 12 patches"):
        PatchBudget(side=4, count=12).fit_size(1, 60_000_000)


@pytest.mark.parametrize("mode", ["P", "1", "L", "LA", "RGBA", "CMYK"])
def test_colors_are_resized_and_not_palettes_or_alpha(mode: str) -> None:
    """Training and transformers convert images to RGB first."""
    preprocess = Preprocess(image_size=20, patches=PatchBudget(side=4, count=30))
    image = random_image(60, 90).convert(mode)
    if "A" in mode:
        image.putalpha(random_image(60, 90, seed=1).convert("L"))
    assert torch.equal(eval_pixels(image, preprocess), eval_pixels(image.convert("RGB"), preprocess))


@given(rows=st.integers(1, 600), columns=st.integers(1, 5), channels=st.integers(1, 4), layout=st.booleans())
def test_strips_hold_patches_in_raster_order(rows: int, columns: int, channels: int, layout: bool) -> None:
    budget = PatchBudget(side=4, count=rows * columns + 3)
    pixels = (
        torch.arange(channels * rows * columns * 16).view(channels, rows * 4, columns * 4).to(torch.uint8)
    )
    format = torch.channels_last if layout else torch.contiguous_format
    strips = torch.empty(1, *budget.strip_shape(channels), dtype=torch.uint8).contiguous(memory_format=format)
    budget.write_strip(pixels, strips[0])
    assert budget.read_grids(strips) == [(rows, columns)]
    number = rows * columns - 1  # the last patch
    top, left = number // columns * 4, number % columns * 4
    patch = strips[0, :, number * 4 : number * 4 + 4]
    assert torch.equal(patch, pixels[:, top : top + 4, left : left + 4])
    assert not strips[0, :, (number + 1) * 4 : -1].any()


@given(stored=st.integers(1, 20), counts=st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_position_weights_are_those_of_torch(stored: int, counts: list[int]) -> None:
    lines = torch.cat([torch.arange(count) for count in counts])
    sizes = torch.cat([torch.full((count,), count) for count in counts])
    expected = [
        F.interpolate(
            torch.eye(stored)[None, :, None], (1, count), mode="bilinear", antialias=True, align_corners=False
        )[0, :, 0].T
        for count in counts
    ]
    torch.testing.assert_close(weigh_grid_lines(lines, sizes, stored), torch.cat(expected), atol=1e-5, rtol=0)


def make_model(*, dtype: torch.dtype = torch.float32, **changes: Any) -> CLIP:
    vision = VisionTower(image_size=20, patch_size=4, width=32, layers=2, heads=2)
    vision = replace(vision, **changes).replace_tokens(30)
    text = TextTower(width=32, layers=1, heads=2, context_length=8)
    shape = Architecture(embed_dim=16, vision=vision, text=text)
    return create(shape, seed=0).to(dtype)


def strips_of(model: CLIP) -> Tensor:
    return preprocess_images([random_image(*size) for size in SIZES], model.preprocess)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pool": "map", "norms": "vit"},
        {"positions": "sincos_2d"},
        {"positions": "learned_2d", "pool": "map"},
        {"positions": "none"},
    ],
    ids=str,
)
def test_packed_gradients_are_those_of_one_image_at_a_time(changes: Any, dtype: torch.dtype) -> None:
    close = 4e-6 if dtype == torch.float32 else 1e-12
    model = make_model(dtype=dtype, **changes)
    strips = strips_of(model)
    weights = torch.randn(len(strips), 16, dtype=dtype, generator=torch.Generator().manual_seed(0))
    together = model.encode_image(strips)
    (together * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert {name for name, p in model.visual.named_parameters() if p.requires_grad} == {
        name.removeprefix("visual.") for name in gradients
    }
    model.zero_grad()
    for i in range(len(strips)):
        alone = model.encode_image(strips[i : i + 1])
        assert (alone - together[i]).abs().max() < 1e-6  # features are float32
        (alone * weights[i]).sum().backward()
    for name, parameter in model.named_parameters():
        if name in gradients:
            assert parameter.grad is not None
            difference = (parameter.grad - gradients[name]).abs().max()
            assert difference <= close * max(1.0, float(gradients[name].abs().max())), name


def test_a_square_image_has_the_features_of_a_square_tower() -> None:
    model = make_model()
    assert isinstance(model.architecture.vision, NaFlexTower)
    square = VisionTower(image_size=20, patch_size=4, width=32, layers=2, heads=2)
    other = create(replace(model.architecture, vision=square), seed=0)
    assert other.state_dict().keys() == model.state_dict().keys()
    other.load_state_dict(model.state_dict())
    exact = replace(model.preprocess, patches=PatchBudget(side=4, count=25))
    image = random_image(20, 20)
    strip = preprocess_images([image], exact)
    assert isinstance(model.visual, PackedVisionTransformer) and exact.patches is not None
    model.visual.budget = exact.patches
    pixels = preprocess_images([image], other.preprocess)
    assert (model.encode_image(strip) - other.encode_image(pixels)).abs().max() < 1e-6


def test_models_are_saved_and_loaded(tmp_path: Path) -> None:
    model = make_model(pool="map").eval()
    save_model(model, tmp_path / "model")
    loaded = clipkit.load(tmp_path / "model")
    assert loaded.architecture == model.architecture and loaded.preprocess == model.preprocess
    assert Preprocess.from_dict(json.loads(json.dumps(model.preprocess.to_dict()))) == model.preprocess
    images = [random_image(*size) for size in SIZES]
    with torch.no_grad():
        assert torch.equal(clipkit.encode_image(images, loaded), model.encode_image(strips_of(model)))
    smaller = clipkit.load(tmp_path / "model", image_tokens=12)
    assert smaller.preprocess.patches == PatchBudget(side=4, count=12)
    for invalid in (-1, 1.5, "a", True, 10**9):
        with pytest.raises(
            ConfigError, match=rf"image_tokens = {invalid!r} is not an integer from 1 to 65536"
        ):
            clipkit.load(tmp_path / "model", image_tokens=invalid)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="image_size = 40: this model reads images of variable size"):
        clipkit.load(tmp_path / "model", image_size=40)


def test_models_of_square_images_can_read_variable_sizes(tmp_path: Path) -> None:
    square = VisionTower(image_size=20, patch_size=4, width=32, layers=2, heads=2)
    save_model(create(replace(make_model().architecture, vision=square), seed=0), tmp_path / "model")
    model = clipkit.load(tmp_path / "model", image_tokens=25)
    features = clipkit.encode_image([random_image(*size) for size in SIZES], model)
    assert features.shape == (len(SIZES), 16) and features.isfinite().all()
    expected = clipkit.encode_image(random_image(20, 20), clipkit.load(tmp_path / "model"))
    assert (clipkit.encode_image(random_image(20, 20), model) - expected).abs().max() < 1e-6


def test_what_needs_square_images_is_refused() -> None:
    model = make_model()
    with pytest.raises(ConfigError, match="reads images of variable size"):
        clipkit.explain(random_image(20, 20), "a", model)
    with pytest.raises(ConfigError, match=r"must be uint8 of the shape \('B', 3, 121, 4\)"):
        model.encode_image(torch.zeros(1, 3, 20, 20))
    with pytest.raises(ConfigError, match="image_tokens = 30 requires pool = 'class' or 'map'"):
        make_model(pool="mean")
    with pytest.raises(ConfigError, match="requires clipkit's ViT"):
        create_architecture("open_clip:RN50", image_tokens=64)


def test_exports_are_refused(tmp_path: Path) -> None:
    for targets, obstacle in (
        ((), "open_clip has no tower like this one"),
        (("onnx",), "an ONNX graph has images"),
    ):
        with pytest.raises(ConfigError, match=rf"^{obstacle}.*: use this model with clipkit.load"):
            export(make_model(), tmp_path / "out", to=targets)


# SigLIP 2


@pytest.fixture(scope="module")
def siglip2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a model of transformers with random weights, its processor and a tokenizer; and the model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Siglip2Config, Siglip2Model
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    folder = tmp_path_factory.mktemp("siglip2")
    sizes = {
        "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 3,
    }  # fmt: skip
    words = {word: i for i, word in enumerate(("<pad>", "<eos>", "<unk>", "a", "cat", "dog"))}
    config = Siglip2Config(
        vision_config={**sizes, "num_patches": 25, "patch_size": 8},
        text_config={
            **sizes, "vocab_size": len(words) + 2, "max_position_embeddings": 12,
            "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0,
        },
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Siglip2Model(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    Siglip2ImageProcessorPil(patch_size=8, max_num_patches=40).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder, model


def test_siglip2_features_are_those_of_transformers(siglip2: tuple[Path, Any]) -> None:
    from transformers import AutoTokenizer
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    folder, theirs = siglip2
    ours = clipkit.load(folder)
    processor = Siglip2ImageProcessorPil.from_pretrained(folder)
    images = [random_image(*size) for size in SIZES]
    texts = ["a cat", "a dog a dog", ""]
    tokens = AutoTokenizer.from_pretrained(folder)(
        texts, padding="max_length", max_length=12, truncation=True, return_tensors="pt"
    )["input_ids"]
    with torch.no_grad():
        expected = theirs.get_image_features(**processor(images=images, return_tensors="pt")).pooler_output
        expected_texts = theirs.get_text_features(tokens).pooler_output
    assert torch.equal(ours.tokenizer(texts), tokens) and set(ours.tokenizer.special_tokens) - {6, 7} == {
        0,
        1,
        2,
    }
    assert (clipkit.encode_image(images, ours) - F.normalize(expected, dim=-1)).abs().max() < 1e-5
    assert (clipkit.encode_text(texts, ours) - F.normalize(expected_texts, dim=-1)).abs().max() < 1e-5
    assert ours.logit_scale == theirs.logit_scale.item() and ours.logit_bias == theirs.logit_bias.item()


def test_siglip2_models_are_stored_as_clipkit_models(siglip2: tuple[Path, Any], tmp_path: Path) -> None:
    ours = clipkit.load(siglip2[0], image_tokens=60)
    assert ours.preprocess.patches == PatchBudget(side=8, count=60)
    save_model(ours, tmp_path / "model")
    again = clipkit.load(tmp_path / "model")
    image = random_image(40, 200)
    assert torch.equal(clipkit.encode_image(image, again), clipkit.encode_image(image, ours))
    assert torch.equal(clipkit.encode_text("a cat", again), clipkit.encode_text("a cat", ours))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("preprocessor_config.json", {"patch_size": 16}, "patch_size = 8 is not that of preproc.*, 16"),
        ("preprocessor_config.json", {"do_rescale": False}, "do_rescale = False is not supported"),
        ("config.json", {"text_config": {"hidden_act": "gelu"}}, "hidden_act = 'gelu' is not supported"),
        ("config.json", {"vision_config": {"vision_use_head": False}}, "the image tower must have a head"),
    ],
)
def test_other_siglip2_models_are_refused(
    siglip2: tuple[Path, Any], tmp_path: Path, file: str, changes: dict[str, Any], message: str
) -> None:
    for path in siglip2[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content = json.loads((tmp_path / file).read_text())
    for key, value in changes.items():
        content[key] = content[key] | value if isinstance(value, dict) else value
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        clipkit.load(tmp_path)

"""Tests of loading with another image size or text length: position embeddings from every kind of source."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor

import clipkit
from clipkit.config import Config
from clipkit.errors import CheckpointError, ConfigError
from clipkit.formats.checkpoint import save_model
from clipkit.formats.load import fit_positions
from clipkit.formats.transformers import build_configs, to_transformers
from clipkit.model.clip import create
from clipkit.model.names import create_architecture, from_open_clip
from clipkit.model.preprocess import preprocess_images
from clipkit.training.checkpoint import LoopState, save_checkpoint
from clipkit.training.optim import adamw
from tests.clipkit.stored_models import (
    CONFIGS,
    TEXT,
    VIT,
    random_images,
    register,
    their_model,
    write_hub_folder,
)

# most tests use small architectures
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*no published weights of"),
    pytest.mark.filterwarnings("ignore:.*has no preprocessor_config.json"),
]
SHORT, LONG = ["a red hat"], ["a red hat on a grey cat, two dogs and a very long train in the snow"]


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    register(monkeypatch, tmp_path_factory.mktemp("model_configs"), "ViT-tiny", CONFIGS["ViT"])


def store(model: clipkit.CLIP, folder: Path) -> Path:
    optimizer = adamw(model, Config().optim)
    return save_checkpoint(folder, model, optimizer, LoopState(step=1, data="x"), Config(), keep=1)


def training_checkpoint(folder: Path) -> tuple[Path, str]:
    torch.save({"epoch": 1, "state_dict": their_model("ViT").state_dict()}, folder / "epoch_1.pt")
    return folder / "epoch_1.pt", "open_clip:ViT-tiny"


def hub_folder(folder: Path) -> tuple[Path, str]:
    write_hub_folder(folder, "ViT")
    return folder, ""


def own_checkpoint(folder: Path) -> tuple[Path, str]:
    file, name = training_checkpoint(folder)
    return store(clipkit.load(file, name=name), folder / "run"), ""


def transformers_folder(folder: Path) -> tuple[Path, str]:
    from transformers import CLIPConfig, CLIPModel

    file, name = training_checkpoint(folder)
    ours = clipkit.load(file, name=name)
    theirs = CLIPModel(CLIPConfig(**build_configs(ours.architecture, ours.preprocess)["config.json"]))
    theirs.load_state_dict(to_transformers(ours.state_dict()))
    theirs.save_pretrained(folder / "theirs")
    return folder / "theirs", ""


def openai_file(folder: Path) -> tuple[Path, str]:
    marks = {"input_resolution": 32, "context_length": 16, "vocab_size": 49408}
    tensors = {**openai_like().state_dict(), **{name: torch.tensor(value) for name, value in marks.items()}}
    torch.save(tensors, folder / "weights.pt")
    return folder / "weights.pt", ""


def openai_like(**changes: int) -> Any:
    """OpenAI's models, whose attention heads have width 64."""
    vision = {"image_size": changes.get("image_size", 32), "patch_size": 8, "width": 64, "layers": 2}
    text = {**CONFIGS["ViT"]["text_cfg"], "heads": 1, "context_length": changes.get("context_length", 16)}
    return their_model("ViT", vision_cfg=vision, text_cfg=text, quick_gelu=True)


def stretched(positions: Tensor, length: int) -> Tensor:
    """Text positions of another length: the first 20 are kept, the others are interpolated linearly."""
    if length <= len(positions):
        return positions[:length]
    kept = min(20, len(positions) - 1)
    at = np.linspace(kept, len(positions) - 1, length - kept)
    columns = [np.interp(at, np.arange(len(positions)), column) for column in positions.T.double().numpy()]
    return torch.cat([positions[:kept], torch.from_numpy(np.stack(columns, axis=1)).float()])


SOURCES = (training_checkpoint, hub_folder, own_checkpoint, transformers_folder, openai_file)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("image_size", "context_length"), [(16, 7), (56, 40), (64, 0)])
def test_own_towers_resize_as_open_clip(
    source: Callable[[Path], tuple[Path, str]], image_size: int, context_length: int, tmp_path: Path
) -> None:
    """Image positions equal open_clip's resampling; short texts keep their embeddings."""
    from open_clip.model import resize_pos_embed

    path, name = source(tmp_path)
    before = clipkit.load(path, name=name)
    ours = clipkit.load(path, name=name, image_size=image_size, context_length=context_length)
    size, length = image_size or 32, context_length or 16
    assert ours.preprocess == replace(before.preprocess, image_size=size) and ours.origin == before.origin
    assert ours.architecture == before.architecture.replace_size(image_size=size, context_length=length)

    if source is openai_file:
        theirs = openai_like(image_size=size, context_length=length)
    else:
        vision = {**CONFIGS["ViT"]["vision_cfg"], "image_size": size}
        text = {**CONFIGS["ViT"]["text_cfg"], "context_length": length}
        theirs = their_model("ViT", vision_cfg=vision, text_cfg=text)
    tensors = dict(before.state_dict())
    resize_pos_embed(tensors, theirs)
    tensors["positional_embedding"] = stretched(tensors["positional_embedding"], length)
    theirs.load_state_dict(tensors)
    pixels = preprocess_images(random_images(), ours.preprocess)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (ours.preprocess.mean, ours.preprocess.std))
    with torch.no_grad():
        images = theirs.encode_image((pixels / 255 - mean) / std, normalize=True)
        texts = theirs.encode_text(clipkit.tokenize(LONG, length), normalize=True)
    assert (clipkit.encode_image(random_images(), ours) - images).abs().max() <= 1e-5
    assert (clipkit.encode_text(LONG, ours) - texts).abs().max() <= 1e-5
    assert torch.equal(clipkit.encode_text(SHORT, ours), clipkit.encode_text(SHORT, before))

    again = clipkit.load(store(ours, tmp_path / "again"))
    assert again.architecture == ours.architecture and again.preprocess == ours.preprocess
    assert torch.equal(
        clipkit.encode_image(random_images(), again), clipkit.encode_image(random_images(), ours)
    )
    assert torch.equal(clipkit.encode_text(LONG, again), clipkit.encode_text(LONG, ours))


@pytest.mark.parametrize("size", [32, 96, 128])
def test_resnet_attention_pool_positions_are_interpolated(size: int, tmp_path: Path) -> None:
    theirs = write_hub_folder(tmp_path, "ResNet")
    ours = clipkit.load(tmp_path, image_size=size)
    old = theirs.visual.attnpool.positional_embedding.detach()  # (1 + 2 * 2, C)
    grid = F.interpolate(old[1:].T.view(1, -1, 2, 2), size // 32, mode="bicubic", antialias=True)
    expected = torch.cat([old[:1], grid.flatten(2)[0].T])
    assert torch.equal(ours.visual.get_parameter("attnpool.positional_embedding"), expected)
    assert clipkit.encode_image(random_images(), ours).isfinite().all()
    again = clipkit.load(store(ours, tmp_path / "again"))
    assert torch.equal(
        clipkit.encode_image(random_images(), again), clipkit.encode_image(random_images(), ours)
    )


@pytest.mark.parametrize("kind", ["ConvNeXt", "timm's ViT"])
def test_towers_without_fixed_positions_equal_open_clip(kind: str, tmp_path: Path) -> None:
    """ConvNeXt has no positions; timm's ViT resamples them for each batch."""
    theirs = write_hub_folder(tmp_path, kind)
    ours = clipkit.load(tmp_path, image_size=96)
    pixels = torch.rand(2, 3, 96, 96)
    with torch.no_grad():
        assert (ours.encode_image(pixels) - theirs.encode_image(pixels, normalize=True)).abs().max() <= 1e-5


@pytest.mark.parametrize("size", [96, 224])
def test_timm_vit_positions_equal_timm(size: int, tmp_path: Path) -> None:
    from timm.layers.pos_embed import resample_abs_pos_embed

    shape = create_architecture("ViT-Ti-4-16", image="timm:test_vit", image_size=160)
    before = clipkit.create(shape, seed=0).eval()
    ours = clipkit.load(store(before, tmp_path), image_size=size)
    old = before.visual.get_parameter("trunk.pos_embed").detach()
    grid, count = size // 16, ours.visual.get_parameter("trunk.pos_embed").shape[1]
    expected = resample_abs_pos_embed(old, [grid, grid], num_prefix_tokens=count - grid**2)
    assert (ours.visual.get_parameter("trunk.pos_embed") - expected).abs().max() <= 1e-6
    assert clipkit.encode_image(random_images(), ours).isfinite().all()


def test_timm_towers_of_fixed_size_are_resized(tmp_path: Path) -> None:
    """open_clip builds them at the size in their name; timm can change it."""
    theirs = write_hub_folder(tmp_path, "timm's ViT of one size")
    assert clipkit.load(tmp_path, image_size=160).preprocess.image_size == 160
    ours = clipkit.load(tmp_path, image_size=96)
    assert ours.preprocess.image_size == 96
    theirs.visual.trunk.set_input_size((96, 96))
    pixels = torch.rand(2, 3, 96, 96)
    with torch.no_grad():
        expected = theirs.eval().encode_image(pixels, normalize=True)
        assert (ours.encode_image(pixels) - expected).abs().max() <= 1e-5
    with pytest.raises(CheckpointError) as caught:
        clipkit.load(tmp_path, image_size=9)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_class_token_after_the_text_keeps_its_position(tmp_path: Path) -> None:
    """CoCa embeds texts at a token after the padding, which has its own position."""
    theirs = write_hub_folder(tmp_path, "CoCa")
    ours = clipkit.load(tmp_path, context_length=9)
    with torch.no_grad():
        texts = theirs.encode_text(clipkit.tokenize(SHORT, 16), normalize=True)
    assert (clipkit.encode_text(SHORT, ours) - texts).abs().max() <= 1e-5
    longer = clipkit.load(tmp_path, context_length=20)
    assert clipkit.encode_text(LONG, longer).isfinite().all()
    assert (clipkit.encode_text(SHORT, longer) - texts).abs().max() <= 1e-5


@given(old=st.integers(1, 90), new=st.integers(1, 300))
def test_longer_texts_keep_the_first_positions(old: int, new: int) -> None:
    positions = torch.randn(old, 3, generator=torch.Generator().manual_seed(old))
    name = "positional_embedding"
    fitted = fit_positions({name: positions}, {name: torch.Size((new, 3))})[name]
    kept = min(old, new, 20)
    assert torch.equal(fitted[:kept], positions[:kept])
    torch.testing.assert_close(fitted, stretched(positions, new), rtol=0, atol=1e-4)


def test_short_captions_keep_their_features_in_a_longer_context(tmp_path: Path) -> None:
    """Of up to 20 tokens, with start and end of text; longer ones change."""
    save_model(clipkit.create("ViT-Ti-4-16", seed=0), tmp_path / "model")
    before = clipkit.load(tmp_path / "model")
    captions = ["hat " * words for words in range(40)]
    for length in (78, 248):
        longer = clipkit.load(tmp_path / "model", context_length=length)
        same = [
            torch.equal(clipkit.encode_text([caption], longer), clipkit.encode_text([caption], before))
            for caption in captions
        ]
        assert all(same[:19]) and not any(same[20:])
        assert longer.tokenizer(["hat " * 300]).shape == (1, length)


def short_features(model: clipkit.CLIP) -> Tensor:
    """Features of four tokens and padding."""
    tokens = torch.zeros(1, model.architecture.text.context_length, dtype=torch.int64)
    tokens[0, :4] = torch.tensor([200, 210, 220, 299])
    with torch.no_grad():
        return model.encode_text(tokens)


@pytest.mark.parametrize(
    ("text", "warns"),
    [
        ({"no_causal_mask": True}, True),
        ({"pool_type": "last"}, True),
        ({"no_causal_mask": True, "pool_type": "last", "proj_bias": True}, True),  # SigLIP
        ({"pool_type": "first"}, False),
        ({"embed_cls": True, "no_causal_mask": True}, False),
        ({"embed_cls": True}, False),
        ({"proj_bias": True}, False),
        ({}, False),
    ],
)
@pytest.mark.parametrize("length", [9, 16, 40])
@pytest.mark.parametrize("stored", ["hub", "checkpoint"])
def test_another_context_length_of_towers_that_read_padding_warns(
    text: dict[str, Any], warns: bool, length: int, stored: str, tmp_path: Path
) -> None:
    config = {"embed_dim": 32, "vision_cfg": VIT, "text_cfg": {**TEXT, "layers": 2, **text}}
    first = create(from_open_clip(config), seed=0)
    folder = tmp_path / "model"
    if stored == "checkpoint":
        save_model(first, folder)
    else:
        folder.mkdir()
        (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
        torch.save(first.state_dict(), folder / "open_clip_pytorch_model.bin")
    expected = short_features(clipkit.load(folder))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        features = short_features(clipkit.load(folder, context_length=length))
    messages = [str(one.message) for one in caught]
    if not warns or length == 16:
        assert messages == [] and (features - expected).abs().max() <= 1e-5
        return
    assert (features - expected).abs().max() > 1e-5
    assert len(messages) == 1 and str(folder) in messages[0] and "\n" not in messages[0]
    assert f"context_length = {length} changes the features of all texts" in messages[0]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"image_size": 33}, "image_size = 33 is not a multiple of patch_size = 8"),
        ({"image_size": -8}, "image_size = -8"),
        ({"image_size": 8192}, "image_size must be from 1 to 4096"),
        ({"context_length": -1}, "context_length = -1"),
        ({"context_length": 10**7}, "context_length = 10000000"),
    ],
)
def test_invalid_sizes_are_rejected(sizes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path, name = training_checkpoint(tmp_path)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        clipkit.load(path, name=name, **sizes)


@given(
    old=st.integers(1, 9),
    new=st.integers(1, 9),
    prefixes=st.integers(0, 5),
    width=st.integers(1, 5),
    text=st.booleans(),
)
def test_fit_positions_preserves_constants_at_any_size(
    old: int, new: int, prefixes: int, width: int, text: bool
) -> None:
    """A constant table stays constant, with any number of prefix tokens."""
    name = "positional_embedding" if text else "visual.trunk.pos_embed"
    count, wanted = (side**2 + prefixes for side in (old, new))
    shape: Callable[[int], tuple[int, ...]] = (lambda n: (n, width)) if text else (lambda n: (1, n, width))
    tensors = {name: torch.full(shape(count), 0.5)}
    try:
        fitted = fit_positions(tensors, {name: torch.Size(shape(wanted))})[name]
    except CheckpointError:
        raise AssertionError("a square grid was not seen as one") from None
    assert fitted.shape == shape(wanted)
    torch.testing.assert_close(fitted, torch.full_like(fitted, 0.5), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "stored",
    [
        torch.zeros(0, 4),
        torch.zeros(4),
        torch.zeros(()),
        torch.zeros(5, 3),
        torch.zeros(2, 5, 4),
        torch.zeros(1, 4),
    ],
)
def test_unusable_positions_are_left_to_the_shape_check(stored: Tensor) -> None:
    for name in ("positional_embedding", "visual.positional_embedding"):
        if stored.shape == (1, 4) and name.startswith("visual"):
            with pytest.raises(CheckpointError, match="not a class token and a square grid"):
                fit_positions({name: stored}, {name: torch.Size((7, 4))})
        elif stored.shape != (1, 4):
            assert fit_positions({name: stored}, {name: torch.Size((10, 4))})[name] is stored


def test_non_square_grid_is_rejected(tmp_path: Path) -> None:
    tensors = their_model("ViT").state_dict()
    tensors["visual.positional_embedding"] = tensors["visual.positional_embedding"][:13]
    torch.save(tensors, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="13 image positions are not a class token and a square grid"):
        clipkit.load(tmp_path / "weights.pt", name="open_clip:ViT-tiny", image_size=64)

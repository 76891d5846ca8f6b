"""Tests of exports to open_clip and timm: embeddings equal clipkit's, loaded as users of the libraries do."""

from pathlib import Path
from typing import Any

import pytest
import torch

import clipkit
from clipkit.errors import ConfigError
from clipkit.export import export
from clipkit.export.checks import normalize_pixels
from clipkit.export.timm import select_timm_model
from clipkit.model.architectures import ARCHITECTURES
from clipkit.model.clip import create
from clipkit.model.names import from_open_clip
from clipkit.model.preprocess import preprocess_images
from tests.clipkit.exported_models import (
    ASCII,
    REPAIRED,
    apart,
    exported,
    in_rgb,
    model_of,
    opened,
    same_model,
)

# --- open_clip ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["own", "quick_gelu", "resnet", "timm", "timm_mlp"])
@torch.no_grad()
def test_open_clip_export(kind: str, paths: list[Path], tmp_path: Path) -> None:
    import open_clip

    model = exported(kind, tmp_path / "out", "open_clip")
    source = f"local-dir:{tmp_path / 'out'}"
    theirs, _, transform = open_clip.create_model_and_transforms(source)
    theirs.eval()
    texts = [*ASCII, *REPAIRED]
    pixels = torch.stack([transform(image) for image in opened(paths)])
    images = theirs.encode_image(pixels, normalize=True)
    tokens = open_clip.get_tokenizer(source)(texts)
    assert apart(images, clipkit.encode_image(paths, model)) <= 1e-5
    assert apart(theirs.encode_text(tokens, normalize=True), clipkit.encode_text(texts, model)) <= 1e-5
    assert torch.equal(theirs.logit_scale, model.logit_scale)
    again = clipkit.load(tmp_path / "out")
    same_model(again, model)


def test_open_clip_export_with_a_library_tokenizer(tmp_path: Path) -> None:
    import open_clip
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<unk>", "a", "cat", "dog"]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", unk_token="<unk>").save_pretrained(
        tmp_path / "words"
    )
    text = {
        "context_length": 8, "vocab_size": 5, "width": 32, "heads": 2, "layers": 1, "pool_type": "last",
        "no_causal_mask": True, "hf_tokenizer_name": str(tmp_path / "words"),
        "tokenizer_kwargs": {"clean": "lower"},
    }  # fmt: skip
    vision = {"image_size": 16, "patch_size": 8, "width": 64, "layers": 1}
    shape = from_open_clip(
        {
            "embed_dim": 32,
            "vision_cfg": vision,
            "text_cfg": text,
            "custom_text": True,
            "init_logit_bias": -5.0,
        }
    )
    model = create(shape, seed=0)
    assert model.logit_bias is not None
    model.logit_bias.data.fill_(-3.0)
    export(model, tmp_path / "out", to=["open_clip"])
    texts = ["a cat", "A  Dog runs"]
    config = (tmp_path / "out" / "open_clip_config.json").read_text()
    assert str(tmp_path) not in config
    (tmp_path / "words").rename(tmp_path / "gone")
    source = f"local-dir:{tmp_path / 'out'}"
    tokens = open_clip.get_tokenizer(source)(texts)
    assert tokens[1].tolist() == [2, 4, 1, 0, 0, 0, 0, 0]
    theirs = open_clip.create_model(source)
    assert theirs.logit_bias.item() == -3.0
    again = clipkit.load(tmp_path / "out")
    assert torch.equal(again.tokenizer(texts), tokens)
    with torch.no_grad():
        ours = again.encode_text(tokens)
        assert apart(theirs.eval().encode_text(tokens, normalize=True), ours) <= 1e-5


# --- timm ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["own", "quick_gelu", "timm", "distilled"])
@torch.no_grad()
def test_timm_export(kind: str, paths: list[Path], tmp_path: Path) -> None:
    import timm

    model = exported(kind, tmp_path / "out", "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    rgb = in_rgb(paths)
    data: Any = timm.data
    transform = data.create_transform(**data.resolve_model_data_config(theirs), is_training=False)
    pixels = torch.stack([transform(image) for image in rgb])
    expected = normalize_pixels(preprocess_images(rgb, model.preprocess), model)
    assert apart(pixels, expected) <= 1e-6
    features = model.encode_image(pixels, normalize=False)
    assert apart(theirs(pixels), features) <= 1e-5 * max(1.0, float(features.norm(dim=-1).max()))


def test_published_shapes_have_timm_names() -> None:
    for name, wanted in (
        ("ViT-B-32", "vit_base_patch32_clip_224"),
        ("ViT-B-16-quickgelu", "vit_base_patch16_clip_quickgelu_224"),
        ("ViT-L-14-336", "vit_large_patch14_clip_336"),
        ("ViT-H-14", "vit_huge_patch14_clip_224"),
    ):
        assert select_timm_model(ARCHITECTURES[name]) == (wanted, {})
    name, arguments = select_timm_model(ARCHITECTURES["ViT-S-32"])
    assert name == "vit_base_patch32_clip_224" and arguments["embed_dim"] == 384


# --- errors and defaults ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "to", "told"),
    [
        (
            "resnet",
            ["transformers"],
            "a tower of open_clip): this model supports --to open_clip, onnx",
        ),
        ("resnet", ["timm"], "timm has no image tower like this"),
        ("timm", ["sentence-transformers"], "no tower like this one (timm's"),
        ("distilled", ["open_clip"], "this model supports --to timm, onnx"),
        ("distilled", [], "this model supports --to timm, onnx"),
        ("own", ["timm", "transformers"], "cannot share a folder"),
        ("own", ["tensorflow"], "unknown export target 'tensorflow': known: onnx, onnx-int8, open_clip, "),
    ],
)
def test_unsupported_targets_raise_one_line_error(
    kind: str, to: list[str], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        export(model_of(kind), tmp_path / "out", to=to)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_default_targets_are_those_that_support_the_model(tmp_path: Path) -> None:
    assert [one.target for one in export(model_of("resnet"), tmp_path / "a")] == ["open_clip"]


def test_export_leaves_the_model_unchanged(tmp_path: Path) -> None:
    model = model_of("own").to(torch.bfloat16).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.get_rng_state()
    export(model, tmp_path / "out", to=["open_clip"])
    assert model.training and torch.equal(torch.get_rng_state(), drawn)
    after = model.state_dict()
    assert all(
        after[name].dtype == torch.bfloat16 and torch.equal(after[name], before[name]) for name in before
    )
    again = clipkit.load(tmp_path / "out")
    assert all(torch.equal(again.state_dict()[name], before[name].float()) for name in before)

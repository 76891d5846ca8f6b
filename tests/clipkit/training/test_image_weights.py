"""Tests of image towers initialized with weights in timm's names: features, normalization and errors."""

import argparse
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

import clipkit
from clipkit.config import Config, LossConfig, ModelConfig, ShapeConfig, SmallConfig
from clipkit.errors import CheckpointError, ConfigError
from clipkit.export import export
from clipkit.formats.checkpoint import model_hash, save_model
from clipkit.model.attention import image_representations
from clipkit.model.clip import CLIP, create
from clipkit.training.build import first_model, select_shape, shape_of
from tests.small_trainings import Trainings, pairs, trainings

__all__ = ["pairs", "trainings"]

VIT, RESNET = "test_vit", "test_resnet"  # timm's smallest models


def timms(backbone: str) -> Any:
    import timm

    return timm.create_model(backbone).eval()


def begin(backbone: str, weights: Path | str, *, size: int = 0) -> CLIP:
    model = ModelConfig(
        name="ViT-Ti-8-48", image=f"timm:{backbone}", image_weights=str(weights), image_size=size
    )
    shape = shape_of(model, LossConfig(), SmallConfig())
    return first_model(Config(model=model), shape)


@pytest.mark.parametrize("backbone", [VIT, RESNET])
@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_trunk_features_equal_timm(backbone: str, suffix: str, tmp_path: Path) -> None:
    theirs, file = timms(backbone), tmp_path / f"weights.{suffix}"
    save_file(theirs.state_dict(), file) if suffix == "safetensors" else torch.save(theirs.state_dict(), file)
    ours = begin(backbone, file).eval()
    images = torch.randn(2, 3, *theirs.pretrained_cfg["input_size"][1:])
    theirs.reset_classifier(0)
    assert torch.equal(ours.visual.get_submodule("trunk")(images), theirs(images))
    for name in ("mean", "std", "interpolation"):
        assert getattr(ours.preprocess, name) == theirs.pretrained_cfg[name]
    assert ours.preprocess.mean != begin(backbone, "").preprocess.mean


def test_positions_are_resampled_as_in_timm(tmp_path: Path) -> None:
    theirs = timms(VIT)
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    ours = begin(VIT, tmp_path / "weights.safetensors", size=64)
    theirs.set_input_size((64, 64))
    assert torch.equal(ours.visual.get_parameter("trunk.pos_embed"), theirs.get_parameter("pos_embed"))
    assert ours.preprocess.image_size == 64


def test_wrong_weights_raise_one_line_errors(tmp_path: Path) -> None:
    save_file(timms(VIT).state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="not the weights of timm's test_resnet: Error") as caught:
        begin(RESNET, tmp_path / "weights.safetensors")
    assert "\n" not in str(caught.value)
    tensors = timms(VIT).state_dict()
    del tensors["blocks.3.norm1.bias"]
    save_file(tensors, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"not the weights of timm's test_vit: .*blocks\.3.norm1.bias"):
        begin(VIT, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"model.image_weights = '.*': .*none: no such file"):
        begin(RESNET, tmp_path / "none")
    with pytest.raises(ConfigError, match="timm publishes no weights for timm:convnextv2_small"):
        begin("convnextv2_small", "timm")
    with pytest.raises(ConfigError, match="timm publishes no weights for ViT-Ti-4-16"):
        begin_vit("timm")
    with pytest.raises(ConfigError, match=r"model.image_weights = 'x' .*: model.weights have their own"):
        ModelConfig(image_weights="x", weights="y")


# --- clipkit's ViT ------------------------------------------------------------------------------------------

WIDTH = 64
SIZES: dict[str, Any] = {"image_width": WIDTH, "image_layers": 2, "patch": 8, "embed": WIDTH, "norms": "vit"}
StateDict = dict[str, Any]


def vit(size: int = 32, **options: Any) -> Any:
    """A ViT of timm with random weights, LayerScale's and the norms' included."""
    import timm

    tower = timm.create_model(
        "vit_base_patch16_224", img_size=size, patch_size=8, embed_dim=WIDTH, depth=2, num_heads=1,
        num_classes=5, **options,
    ).eval()  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            parameter.normal_(std=0.2, generator=generator)
            if "norm" in name or "gamma" in name:
                parameter.add_(0.7)
    return tower


def begin_vit(weights: Path | str, *, size: int = 0, notes: list[str] | None = None, **sizes: Any) -> CLIP:
    config = Config(
        model=ModelConfig(name="ViT-Ti-4-16", image_weights=str(weights), image_size=size or 32),
        shape=ShapeConfig(**SIZES | sizes),
    )
    note = (lambda line: None) if notes is None else notes.append
    model = first_model(config, select_shape(config), add_note=note).eval()
    with torch.no_grad():
        model.visual.get_parameter("proj").copy_(torch.eye(WIDTH))  # features before the projection
    return model


@torch.no_grad()
def assert_same_features(model: CLIP, theirs: Any) -> None:
    size = model.architecture.vision.image_size
    images = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))
    expected = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
    assert expected.std(dim=0).mean() > 1e-2  # the images differ
    assert torch.allclose(model.visual(images), expected, atol=1e-5)
    before = image_representations(model, images).before_projection
    assert torch.allclose(before, expected, atol=1e-5)


def as_dino(tensors: StateDict) -> StateDict:
    """A checkpoint of the training of DINO or iBOT, with the student's and the teacher's head."""
    names = {name: value for name, value in tensors.items() if not name.startswith("head.")}
    teacher = {f"backbone.{name}": value for name, value in names.items()} | {
        "head.mlp.0.weight": torch.ones(3)
    }
    student = {f"module.{name}": 2 * value for name, value in teacher.items()}
    others = {"epoch": 7, "args": argparse.Namespace(arch="vit"), "dino_loss": {"center": torch.ones(1, 4)}}
    return {"student": student, "teacher": teacher, **others}


def as_mae(tensors: StateDict) -> StateDict:
    decoder = {
        "mask_token": torch.ones(1, 1, 8), "decoder_pos_embed": torch.ones(1, 17, 8),
        "decoder_blocks.0.attn.qkv.weight": torch.ones(24, 8), "decoder_pred.bias": torch.ones(192),
    }  # fmt: skip
    return {"model": {**tensors, **decoder}, "optimizer": {"state": {}}}


def as_ibot(tensors: StateDict) -> StateDict:
    """LayerScale has BEiT's names there."""
    renamed = {re.sub(r"ls([12])\.gamma", r"gamma_\1", name): value for name, value in tensors.items()}
    renamed["masked_embed"] = torch.ones(1)
    return {"state_dict": {f"module.{name}": value for name, value in renamed.items()}}


@pytest.mark.parametrize(
    ("options", "stored", "sizes", "unused"),
    [
        ({}, dict, {}, "2 tensors not used: head.bias, head.weight"),
        ({"init_values": 1e-5, "dynamic_img_size": True}, dict, {}, "2 tensors"),  # UNI
        ({"init_values": 1.0, "no_embed_class": True}, dict, {}, "2 tensors"),  # DeiT III
        ({"global_pool": "avg"}, dict, {"pool": "mean_norm"}, "2 tensors"),
        ({"global_pool": "avg", "fc_norm": False}, dict, {"pool": "mean"}, "2 tensors"),
        (
            {"pre_norm": True, "norm_layer": partial(nn.LayerNorm, eps=1e-5)}, dict,
            {"norms": "clip"}, "2 tensors",
        ),
        ({}, as_dino, {}, "1 tensor not used: head.mlp.0.*"),
        ({}, as_mae, {}, "6 tensors not used: decoder_blocks.0.*, decoder_pos_embed, decoder_pred.bias"),
        ({"init_values": 0.1}, as_ibot, {}, "3 tensors not used: head.bias, head.weight, masked_embed"),
    ],
)  # fmt: skip
def test_features_of_own_vits_equal_timm(
    options: Any, stored: Callable[[StateDict], StateDict], sizes: Any, unused: str, tmp_path: Path
) -> None:
    theirs = vit(**options)
    torch.save(stored(theirs.state_dict()), tmp_path / "pytorch_model.bin")
    notes: list[str] = []
    model = begin_vit(tmp_path, notes=notes, **sizes)  # a folder
    assert_same_features(model, theirs)
    assert len(notes) == 2 and f"note: model.image_weights: {unused}" in notes[0]
    assert "images are normalized as for CLIP: set pixels.mean and pixels.std" in notes[1]
    save_model(model, tmp_path / "saved")
    again = clipkit.load(tmp_path / "saved")
    assert_same_features(again, theirs)
    assert again.architecture == model.architecture


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stored=st.integers(2, 6),
    side=st.integers(2, 6),
    has_class=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_positions_of_own_vits_are_resized_as_in_timm(
    stored: int, side: int, has_class: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    theirs = vit(8 * stored, dynamic_img_size=True, no_embed_class=not has_class)
    theirs.to(dtype).float()
    file = tmp_path / "weights.safetensors"
    save_file({name: value.to(dtype) for name, value in theirs.state_dict().items()}, file)
    assert_same_features(begin_vit(file, size=8 * side), theirs)


def change(**changes: Tensor | None) -> Callable[[StateDict], StateDict]:
    def changed(tensors: StateDict) -> StateDict:
        values = {**tensors, **{name.replace("__", "."): value for name, value in changes.items()}}
        return {name: value for name, value in values.items() if value is not None}

    return changed


@pytest.mark.parametrize(
    ("stored", "sizes", "message"),
    [
        (dict, {"norms": "clip"}, r"the file lacks norm_pre\.weight: set shape\.norms=vit"),
        (change(norm_pre__weight=torch.ones(64)), {}, r"the file has norm_pre\.weight: set shape\.norms=clip"),
        (dict, {"pool": "mean_norm"}, r"lacks fc_norm\.weight: set shape\.pool=class, mean or map"),
        (change(fc_norm__weight=torch.ones(64)), {}, r"has fc_norm\.weight: set shape\.pool=mean_norm"),
        (dict, {"image_layers": 3}, r"12 missing \(blocks\.2\.\* ×12\)"),
        (dict, {"image_layers": 1}, r"12 unexpected \(blocks\.1\.\* ×12\)"),
        (dict, {"patch": 4}, r"1 with another shape \(patch_embed\.proj\.weight \(64, 3, 8, 8\) instead of"),
        (dict, {"image_width": 128}, r"blocks\.0\.attn\.proj\.bias \(64,\) instead of \(128,\)"),
        (change(reg_token=torch.ones(1, 4, 64)), {}, "no register tokens like reg_token of the file"),
        (change(cls_token=None), {}, r"1 missing \(cls_token\)"),
        (change(norm__bias=torch.full((64,), torch.nan)), {}, r"norm\.bias contains NaN or infinity"),
        (change(pos_embed=None), {}, r"1 missing \(pos_embed\); 1 unexpected \(patch_embed\.proj\.bias\)"),
        (change(pos_embed=torch.ones(1, 12, 64)), {}, r"pos_embed \(12, 64\) instead of \(17, 64\)"),
        (change(pos_embed=torch.tensor(1.0)), {}, r"pos_embed \(\) instead of"),
        (change(blocks__0__ls1__gamma=torch.ones(3)), {}, r"1 unexpected \(blocks\.0\.\*|blocks\.0\.ls1"),
        (change(blocks__0__attn__q_norm__weight=torch.ones(64)), {}, r"1 unexpected \(blocks\.0\."),
        (change(norm__bias=torch.ones(64, dtype=torch.int8)), {}, r"norm\.bias is torch\.int8, not torch\.float32"),
        (change(patch_embed__proj__weight=None), {}, r"0 ViTs with .*, there is no patch_embed\.proj\.weight"),
        (change(ema__patch_embed__proj__weight=torch.ones(1)), {}, r"2 ViTs .* prefixes '', 'ema\.': keep"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_own_vits_raise_one_line(
    stored: Callable[[StateDict], StateDict], sizes: Any, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(stored(vit().state_dict()), file)
    with pytest.raises(CheckpointError, match=message) as caught:
        begin_vit(file, **sizes)
    assert str(caught.value).startswith(f"model.image_weights = '{file}': ") and "\n" not in str(caught.value)


def test_settings_that_no_vit_has_are_refused(tmp_path: Path) -> None:
    save_file(vit().state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(
        ConfigError, match=r"shape\.positions = 'sincos_2d': the weights have learned positions"
    ):
        begin_vit(tmp_path / "weights.safetensors", positions="sincos_2d")
    model = ModelConfig(name="ViT-Ti-4-16-quickgelu", image_weights=str(tmp_path / "weights.safetensors"))
    config = Config(model=model, shape=ShapeConfig(**SIZES))
    with pytest.raises(
        ConfigError, match=r"shape\.norms = 'vit' need GELU: use an architecture without QuickGELU"
    ):
        first_model(config, select_shape(config))
    begin_vit(tmp_path / "weights.safetensors", pool="map")  # its attention starts with random weights


@pytest.mark.filterwarnings("ignore")  # warnings of open_clip at import
@pytest.mark.parametrize("pool", ["class", "mean_norm"])
def test_own_vits_without_clips_norms_are_exported_to_open_clip(pool: str, tmp_path: Path) -> None:
    config = Config(model=ModelConfig(name="ViT-Ti-4-16"), shape=ShapeConfig(norms="vit", pool=pool))
    model = create(select_shape(config), seed=0).eval()
    export(model, tmp_path / "out", to=["open_clip"])  # compares embeddings with open_clip's
    again = clipkit.load(tmp_path / "out")
    if pool == "class":
        assert again.architecture.vision == model.architecture.vision
    for target in ("transformers", "timm"):
        with pytest.raises(
            ConfigError, match=r"has no (image )?tower like this one .*no norm before the blocks"
        ):
            export(model, tmp_path / "other", to=[target])
    other = create(shape_of(ModelConfig(name="ViT-Ti-4-16"), LossConfig(), SmallConfig()), seed=0)
    assert model_hash(other) != model_hash(model)


@pytest.mark.parametrize("norms", ["clip", "vit"])
def test_epsilon_is_part_of_the_hash(norms: str) -> None:
    """With pooling, weights of both kinds have other names; without a norm before the blocks, they have not."""
    config = Config(model=ModelConfig(name="ViT-Ti-4-16"), shape=ShapeConfig(norms=norms))
    model = create(select_shape(config), seed=0)
    epsilons = {module.eps for module in model.visual.modules() if isinstance(module, nn.LayerNorm)}
    assert epsilons == {{"clip": 1e-5, "vit": 1e-6}[norms]}
    assert model.architecture.vision.variant == ("" if norms == "clip" else "norms vit\n")


@pytest.mark.parametrize("term", ["caption", "masked"])
def test_own_vits_from_timm_train_with_local_terms(term: str, trainings: Trainings, tmp_path: Path) -> None:
    theirs = vit(init_values=0.1)
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    sizes = [f"shape.{name}={value}" for name, value in SIZES.items()]
    printed = trainings.run(
        tmp_path / "run", *sizes, f"model.image_weights={tmp_path / 'weights.safetensors'}",
        "model.image_size=32", "steps=2", f"{term}.weight=0.5", "model.patch_dropout=0.25",
        "pixels.mean=[0.5,0.5,0.5]", "pixels.std=[0.5,0.5,0.5]",
    )  # fmt: skip
    assert "2 tensors not used: head.bias, head.weight" in printed and "as for CLIP" not in printed
    trained = clipkit.load(tmp_path / "run")
    assert trained.architecture.vision == begin_vit("").architecture.vision
    assert trained.visual.get_parameter("class_embedding").sub(theirs.cls_token.flatten()).abs().max() < 0.1

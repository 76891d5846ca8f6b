"""Tests of image towers initialized with timm's weights: features, normalization and errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from clipkit.config import Config, LossConfig, ModelConfig, SmallConfig
from clipkit.errors import CheckpointError, ConfigError
from clipkit.model.clip import CLIP
from clipkit.training.build import first_model, shape_of

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
    with pytest.raises(
        ConfigError, match=r"model.image_weights = 'timm' has no effect unless model.image, without"
    ):
        ModelConfig(image_weights="timm")

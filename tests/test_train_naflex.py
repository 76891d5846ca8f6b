"""Tests of training on images of variable size, from the architecture and weights of another library's model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import clipkit
from clipkit.config import Config, ModelConfig
from clipkit.errors import ConfigError
from clipkit.formats.checkpoint import save_model
from clipkit.model.architectures import get_architecture
from clipkit.model.clip import create
from clipkit.training.build import first_model, select_shape
from tests.clipkit.model.test_naflex import random_image, siglip2
from tests.small_trainings import Trainings, digests, error_of, go_back, metrics, pairs, trainings

__all__ = ["pairs", "siglip2", "trainings"]  # fixtures


def test_siglip2_model_is_trained_and_resumed_bit_for_bit(
    siglip2: tuple[Path, Any], trainings: Trainings, tmp_path: Path
) -> None:
    folder, _ = siglip2
    out = tmp_path / "run"
    settings = (
        "model.name=", f"model.weights={folder}", "model.image_tokens=30", "loss.name=siglip", "steps=4",
        "checkpoint.every_steps=2", "optim.average=0.9", "distill.teacher=average",
    )  # fmt: skip
    trainings.run(out, *settings)
    losses, end = [line["loss"] for line in metrics(out)], digests(out, 4)
    go_back(out, 2)
    trainings.run(out, *settings)
    assert [line["loss"] for line in metrics(out)] == losses
    assert digests(out, 4) == end

    start, trained = clipkit.load(folder, image_tokens=30), clipkit.load(out)
    assert trained.architecture == start.architecture
    assert not trained.name  # not the path of the weights
    assert trained.preprocess == start.preprocess
    image = random_image(40, 90)
    assert not torch.equal(clipkit.encode_image(image, trained), clipkit.encode_image(image, start))


def test_number_of_patches_is_a_setting(
    siglip2: tuple[Path, Any], trainings: Trainings, tmp_path: Path
) -> None:
    folder, _ = siglip2
    stderr = trainings.run(tmp_path / "run", "model.name=", f"model.weights={folder}", status=1)
    assert "reads images of variable size: set model.image_tokens=40" in error_of(stderr)


def test_weights_with_another_vocabulary_name_the_setting(tmp_path: Path) -> None:
    shape = get_architecture("ViT-Ti-8-48")
    small = create(replace(shape, text=shape.text.replace_vocabulary(300)), seed=0)
    small.name = "ViT-Ti-8-48"
    save_model(small, tmp_path / "model")
    config = Config(model=ModelConfig(name="ViT-Ti-8-48", weights=str(tmp_path / "model")))
    with pytest.raises(
        ConfigError, match=r"\(a vocabulary of 300 tokens\), which .*: model\.name= \(empty\)"
    ):
        first_model(config, select_shape(config))


def test_empty_name_is_that_of_the_weights(tmp_path: Path) -> None:
    shape = get_architecture("ViT-Ti-8-48")
    save_model(create(shape, seed=0), tmp_path / "model")
    model = ModelConfig(name="", weights=str(tmp_path / "model"), image_size=32)
    assert select_shape(Config(model=model)) == shape.replace_size(image_size=32)
    with pytest.raises(ConfigError, match=r"requires model\.weights"):
        ModelConfig(name="")

"""Tests of architectures: names and shapes of parameters equal open_clip's, stored ones are checked."""

from pathlib import Path
from typing import Any

import pytest
import torch

from clipkit.api import load
from clipkit.errors import CheckpointError, ConfigError
from clipkit.formats.checkpoint import parse_architecture, save_model, serialize_architecture
from clipkit.model.architectures import ARCHITECTURES, TextTower, VisionTower
from clipkit.model.clip import CLIP, create
from clipkit.model.names import create_architecture

OWN = {"ViT-Ti-8-48", "ViT-Ti-4-16", "ViT-test"}  # the last is of the tests


@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - OWN))
def test_parameter_names_and_shapes_equal_open_clip(name: str) -> None:
    import open_clip

    config = open_clip.get_model_config(name)
    with torch.device("meta"):  # allocates no memory
        ours, theirs = CLIP(create_architecture(name), name=name), open_clip.CLIP(**config)
    shapes = {key: value.shape for key, value in ours.state_dict().items()}
    assert shapes == {key: value.shape for key, value in theirs.state_dict().items()}
    assert list(shapes) == list(theirs.state_dict())
    assert dict(ours.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    assert ours.preprocess.image_size == config["vision_cfg"]["image_size"]
    assert ours.architecture.quick_gelu == config.get("quick_gelu", False)
    heads = [tower.transformer.resblocks[0].attn.num_heads for tower in (theirs.visual, theirs)]
    assert [tower.heads for tower in ours.architecture.get_plain_towers()] == heads


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_round_trips_through_a_dict(name: str) -> None:
    shape = ARCHITECTURES[name]
    assert parse_architecture(serialize_architecture(shape)) == shape


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("vision", "width", 0), ("vision", "width", -64), ("vision", "width", 64.0), ("vision", "width", True),
        ("vision", "width", "64"), ("vision", "heads", 7), ("vision", "patch_size", 5), ("vision", "more", 1),
        ("text", "context_length", None), ("text", "vocab_size", 10**12), ("text", "layers", 10**6),
        ("text", "more", 1),
        ("", "embed_dim", "512"), ("", "embed_dim", 0), ("", "embed_dim", None), ("", "quick_gelu", "false"),
        ("", "vision", None), ("", "text", []), ("", "vision", "x"), ("", "more", 1),
    ],
)  # fmt: skip
def test_invalid_stored_architecture_is_rejected(where: str, name: str, value: Any) -> None:
    values = serialize_architecture(ARCHITECTURES["ViT-B-32"])
    (values[where] if where else values)[name] = value
    with pytest.raises(CheckpointError, match="invalid or from another version"):
        parse_architecture(values)


def test_indivisible_sizes_are_rejected() -> None:
    with pytest.raises(ConfigError, match="image_size = 30 is not a multiple of patch_size = 8"):
        VisionTower(image_size=30, patch_size=8, width=64, layers=1, heads=1)
    with pytest.raises(ConfigError, match="width = 64 is not a multiple of heads = 3"):
        TextTower(width=64, layers=1, heads=3)
    mistakes: list[Any] = [[], None, "x", 5, {}]
    for wrong in mistakes:
        with pytest.raises(CheckpointError):
            parse_architecture(wrong)


def test_timm_options_are_stored_and_checked(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    options = {"depth": 3, "global_pool": "map", "class_token": False}
    shape = create_architecture("ViT-Ti-4-16", image="timm:test_vit", image_options=options, image_size=32)
    model = create(shape, seed=0)
    assert len(list(model.visual.get_submodule("trunk.blocks").children())) == 3
    save_model(model, tmp_path / "model")
    again = load(tmp_path / "model").architecture
    assert again == shape and parse_architecture(serialize_architecture(shape)) == shape
    stored = serialize_architecture(shape)
    stored["vision"]["options"] = {"checkpoint_path": "/etc/passwd"}
    with pytest.raises(CheckpointError, match="image option 'checkpoint_path' cannot be set"):
        parse_architecture(stored)
    refused: list[dict[str, Any]] = [
        {"depth": float("nan")}, {"depth": 10**9}, {"a": {"b": 1}}, {"a": [0] * 65}, {"a": "b" * 101},
    ]  # fmt: skip
    for wrong in refused:
        with pytest.raises(ConfigError, match="must be a number of at most"):
            create_architecture("ViT-Ti-4-16", image="timm:test_vit", image_options=wrong)
    with pytest.raises(ConfigError, match="image_options require model"):
        create_architecture("ViT-Ti-4-16", image_options=options)


def test_library_towers_get_images_in_the_layout_of_fast_convolutions() -> None:
    pytest.importorskip("timm")
    model = create(create_architecture("ViT-Ti-4-16", image="timm:resnet10t", image_size=32), seed=0).eval()
    seen: list[torch.Tensor] = []
    model.visual.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        features = [model.encode_image(one) for one in (pixels, pixels.to(memory_format=torch.channels_last))]
        features.append(model.encode_image(seen[0].contiguous()))
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in seen)
    assert len(seen) == 3 and all(feature.equal(features[0]) for feature in features)

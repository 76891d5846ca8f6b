"""Tests of image representations: features before the projection and features of each layer."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import clipkit
from clipkit import CLIP
from clipkit.errors import ConfigError
from clipkit.model.architectures import Architecture
from clipkit.model.attention import image_representations, layer_count, reads_class_token
from clipkit.model.clip import create
from clipkit.model.names import create_architecture
from tests.clipkit.stored_models import write_hub_folder


def random_images(model: CLIP, count: int = 3) -> torch.Tensor:
    size = model.preprocess.image_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("kind", ["ViT", "ResNet", "timm's ViT", "ConvNeXt", "SigLIP", "CoCa"])
@pytest.mark.filterwarnings("ignore")  # warnings of open_clip at import
def test_projected_representation_equals_features_for_every_tower(kind: str, tmp_path: Path) -> None:
    write_hub_folder(tmp_path, kind)
    model = clipkit.load(tmp_path)
    images = random_images(model)
    with torch.inference_mode():
        out = image_representations(model, images)
        raw = model.encode_image(images, normalize=False)
        torch.testing.assert_close(out.projected, model.encode_image(images))
        maps = [
            value for name, value in model.visual.named_parameters() if name in ("proj", "head.proj.weight")
        ]
        before = out.before_projection  # (B, W)
        across = [one if one.shape[0] == before.shape[1] else one.T for one in maps]
        by_hand = before @ across[0] if maps else before  # pooling includes the projection
    assert bool(maps) == (kind not in ("ResNet", "SigLIP"))
    torch.testing.assert_close(by_hand, raw, atol=1e-5, rtol=1e-5)


def test_last_layer_equals_the_representation_before_projection() -> None:
    model = clipkit.create("ViT-Ti-4-16", seed=0).eval()
    images = random_images(model)
    count = layer_count(model)
    with torch.inference_mode():
        out = image_representations(model, images, layers=range(1, count + 1))
        norm = model.visual.get_submodule("ln_post")
        torch.testing.assert_close(norm(out.layers[count]), out.before_projection)
        torch.testing.assert_close(out.projected, model.encode_image(images))
        # reference: the output of the first block
        seen: list[torch.Tensor] = []
        block = model.visual.get_submodule("transformer.resblocks.0")
        handle = block.register_forward_hook(lambda _, __, result: seen.append(result))
        model.encode_image(images)
        handle.remove()
    torch.testing.assert_close(out.layers[1], seen[0][:, 0])
    assert {tuple(values.shape) for values in out.layers.values()} == {(3, out.before_projection.shape[1])}
    with pytest.raises(ConfigError, match=f"no layer {count + 1}: expected 1 to {count}"):
        image_representations(model, images, layers=[count + 1])


def pooled_shape(pool: str) -> Architecture:
    shape = create_architecture("ViT-Ti-4-16")
    assert shape.vision.plain is not None
    return replace(shape, vision=replace(shape.vision.plain, pool=pool))


@pytest.mark.parametrize("pool", ["class", "mean", "map"])
def test_layers_of_each_pooling(pool: str) -> None:
    model = create(pooled_shape(pool), seed=0).eval()
    images, count = random_images(model), layer_count(model)
    assert reads_class_token(model) is (pool == "class")
    with torch.inference_mode():
        out = image_representations(model, images, layers=[1, count])
        tokens = model.image_tokens(images)[1]  # (B, 1 + K, D) after the last block, normalized
        seen: list[torch.Tensor] = []
        block = model.visual.get_submodule("transformer.resblocks.0")
        handle = block.register_forward_hook(lambda _, __, result: seen.append(result))
        model.encode_image(images)
        handle.remove()
    expected = seen[0][:, 0] if pool == "class" else seen[0][:, 1:].mean(dim=1)
    torch.testing.assert_close(out.layers[1], expected)
    if pool == "class":
        torch.testing.assert_close(out.before_projection, tokens[:, 0])
    if pool == "mean":
        torch.testing.assert_close(out.before_projection, tokens[:, 1:].mean(dim=1))


@pytest.mark.parametrize(
    ("tower", "class_token"),
    [
        ("vit_tiny_patch16_224", True),
        ("deit_tiny_distilled_patch16_224", True),
        ("vit_base_patch16_siglip_224", False),
        ("vit_base_patch16_reg4_gap_256", False),  # registers, but no class token
        ("beit_base_patch16_224", False),  # a class token that average pooling leaves out
    ],
)
def test_layers_of_timm_poolings(tower: str, class_token: bool) -> None:
    options = {"depth": 2, "embed_dim": 48, "num_heads": 3}
    model = create(
        create_architecture("ViT-Ti-4-16", image=f"timm:{tower}", image_options=options), seed=0
    ).eval()
    assert reads_class_token(model) is class_token
    blocks, seen = model.visual.get_submodule("trunk.blocks"), list[torch.Tensor]()
    handle = blocks.get_submodule("0").register_forward_hook(lambda _, __, result: seen.append(result))
    with torch.inference_mode():
        out = image_representations(model, random_images(model), layers=[1])
    handle.remove()
    prefix = seen[0].shape[1] - round(seen[0].shape[1] ** 0.5 - 0.5) ** 2
    expected = seen[0][:, 0] if class_token else seen[0][:, prefix:].mean(dim=1)
    torch.testing.assert_close(out.layers[1], expected)


@pytest.mark.parametrize("kind", ["timm", "pixels"])
def test_layers_of_timm_and_pixel_towers(kind: str) -> None:
    image = "timm:vit_tiny_patch16_224" if kind == "timm" else "pixels:Ti"
    options = {"depth": 2, "embed_dim": 48, "num_heads": 3} if kind == "timm" else {"colors": 8}
    shape = create_architecture(
        "ViT-Ti-4-16", image=image, image_options=options, image_size=0 if kind == "timm" else 8
    )
    model = create(shape, seed=0).eval()
    last, images = layer_count(model), random_images(model)
    blocks = model.visual.get_submodule("trunk.blocks" if kind == "timm" else "blocks")
    seen: list[torch.Tensor] = []
    handle = blocks.get_submodule("0").register_forward_hook(lambda _, __, result: seen.append(result))
    with torch.inference_mode():
        out = image_representations(model, images, layers=[1, last])
    handle.remove()
    assert last == (2 if kind == "timm" else 6)
    torch.testing.assert_close(out.layers[1], seen[0][:, 0] if kind == "timm" else seen[0].mean(dim=1))
    assert out.layers[last].shape == out.before_projection.shape
    wide = create(create_architecture("ViT-Ti-4-16", image="timm:swin_tiny_patch4_window7_224"), seed=0)
    with torch.inference_mode(), pytest.raises(ConfigError, match="another width than its output"):
        image_representations(wide, random_images(wide, 1), layers=[1])


@pytest.mark.parametrize("kind", ["ViT", "CoCa"])
@pytest.mark.filterwarnings("ignore")  # warnings of open_clip at import
def test_image_representations_are_thread_safe(kind: str, tmp_path: Path) -> None:
    write_hub_folder(tmp_path, kind)
    model = clipkit.load(tmp_path)

    def look(count: int) -> bool:
        images = random_images(model, count)
        with torch.inference_mode():
            outs = [image_representations(model, images) for _ in range(30)]
        return all(torch.equal(out.before_projection, outs[0].before_projection) for out in outs) and all(
            len(out.before_projection) == len(out.projected) == count for out in outs
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(look, [1, 2, 3, 4]))

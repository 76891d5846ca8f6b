"""Tests of attention maps and heatmaps, against transformers, timm and finite differences."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import clipkit
from clipkit.errors import ConfigError, DataError
from clipkit.export.write import export
from clipkit.inference.explain import check_files
from clipkit.model import Architecture, OpenClipVision
from clipkit.model.attention import attention_blocks, patch_grid, text_heatmaps, watch_attention
from clipkit.model.clip import CLIP, create
from clipkit.model.names import create_architecture
from clipkit.model.towers import Padded, ResidualAttentionBlock

FULL = Padded()


def random_images(model: CLIP, count: int = 2) -> Tensor:
    side = model.architecture.vision.image_size
    random = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=random)


def maps_of(model: CLIP, images: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    own = model.architecture.vision.plain is not None
    with torch.no_grad(), watch_attention(model, lambda _, weights: found.append(weights)):
        _ = model.image_tokens(images) if own else model.encode_image(images)
    return found


def test_maps_equal_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = create("ViT-Ti-8-48", seed=0).double().eval()
    export(create("ViT-Ti-8-48", seed=0), tmp_path / "out", to=["transformers"])
    theirs = transformers.CLIPModel.from_pretrained(tmp_path / "out", attn_implementation="eager").double()
    images = random_images(model)
    mean, std = model.colors
    pixels = (images.double() / 255 - mean) / std
    wanted = theirs.vision_model(pixels, output_attentions=True).attentions
    found = maps_of(model, images)
    assert len(found) == len(wanted) == 4
    for ours, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-6)  # transformers computes softmax in float32


def test_maps_do_not_depend_on_cores() -> None:
    model = create("ViT-Ti-4-16", seed=0).eval()
    images = random_images(model)
    one = maps_of(model, images)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        two = maps_of(model, images)
    finally:
        torch.set_num_threads(threads)
    assert len(one) == len(two) == len(attention_blocks(model))
    for ours, other in zip(two, one, strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-6)


def test_maps_equal_timm() -> None:
    utilities = pytest.importorskip("timm.utils.attention_extract")
    model = create(create_architecture("ViT-Ti-8-48", image="timm:test_vit"), seed=0).eval()
    images = random_images(model)
    trunk = deepcopy(model.visual.get_submodule("trunk"))
    mean, std = model.colors
    for block in trunk.blocks:  # type: ignore[union-attr]  # a ModuleList
        block.attn.fused_attn = False  # its graph then has a softmax
    extract = utilities.AttentionExtract(trunk, method="fx")
    wanted = extract((images.float() / 255 - mean) / std)
    found = maps_of(model, images)
    assert len(found) == len(wanted) > 1
    for ours, other in zip(found, wanted.values(), strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-6)


COCA = {
    "layers": 2, "width": 64, "head_width": 32, "patch_size": 8, "attentional_pool": True, "attn_pooler_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        (create_architecture("ViT-Ti-8-48"), 37),
        (
            replace(create_architecture("ViT-Ti-8-48"), vision=OpenClipVision(image_size=32, config=COCA)),
            17,
        ),
    ],
    ids=["own", "coca"],
)
def test_attention_maps_leave_features_and_global_state_unchanged(shape: Architecture, tokens: int) -> None:
    model, plain = create(shape, seed=0).eval(), F.scaled_dot_product_attention
    images = random_images(model)
    with torch.no_grad():
        before = model.encode_image(images)
        with watch_attention(model, lambda _, weights: weights):
            torch.testing.assert_close(model.encode_image(images), before, rtol=0, atol=1e-5)
    texts = F.normalize(torch.randn(3, before.shape[1]), dim=1)
    heat = text_heatmaps(model, images, texts)
    side, _ = patch_grid(tokens)
    assert heat.shape == (2, 3, side, side) and (heat >= 0).all() and heat.std() > 0
    own = text_heatmaps(model, images, texts[:2, None])  # one text for each image
    torch.testing.assert_close(own[:, 0], heat[[0, 1], [0, 1]], rtol=1e-4, atol=1e-8)
    assert F.scaled_dot_product_attention is plain and torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        assert torch.equal(model.encode_image(images), before)
    assert all(one.requires_grad for key, one in model.named_parameters() if key != "logit_bias")


def test_heatmaps_equal_finite_differences() -> None:
    model = create("ViT-Ti-8-48", seed=0).double().eval()
    images, texts = random_images(model, 1), F.normalize(torch.randn(2, 192, dtype=torch.float64), dim=1)
    blocks = [block for block in attention_blocks(model) if isinstance(block, ResidualAttentionBlock)]
    visual, step, total = model.visual, 1e-6, torch.zeros(2, 37, dtype=torch.float64)
    with torch.no_grad():
        for number in range(len(blocks)):

            def says(change: tuple[int, int, int] | None, number: int = number) -> Tensor:
                def nudged(at: int, weights: Tensor) -> Tensor:
                    if at == number and change is not None:
                        weights = weights.clone()
                        weights[(0, *change)] += step
                    return weights

                x = visual.stem(images, colors=model.colors)  # type: ignore[operator]
                with watch_attention(model, nudged):
                    for block in blocks[: number + 1]:
                        x = block(x, FULL)
                read = visual.ln_post(x[:, 0]) @ visual.proj  # type: ignore[operator]
                return F.normalize(read, dim=-1)[0] @ texts.T  # (T,)

            base = says(None)
            for head in range(3):
                for key in range(37):  # only the class token is read, so other queries have no gradient
                    total[:, key] += ((says((head, 0, key)) - base) / step).clamp(min=0) / 3
    heat = text_heatmaps(model, images, texts)
    torch.testing.assert_close(heat[0].flatten(1).double(), total[:, 1:], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("test_resnet", "has no ViT as its image tower"),
        ("swin_tiny_patch4_window7_224", "not attend to all patches at once"),
    ],
)
def test_towers_without_global_attention_are_rejected(name: str, message: str) -> None:
    model = create(create_architecture("ViT-Ti-8-48", image=f"timm:{name}"), seed=0).eval()
    with pytest.raises(ConfigError, match=message):
        clipkit.explain(torch.zeros(48, 48, 3, dtype=torch.uint8), "a cat", model)


def test_explain_rejects_overwriting_the_image_and_missing_files(tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    Image.new("RGB", (8, 8)).save(image)
    before = image.read_bytes()
    link = tmp_path / "link.png"
    link.symlink_to(image)
    for out in (image, link):
        with pytest.raises(ConfigError, match="is the image itself: name another file"):
            check_files(image, out)
    with pytest.raises(DataError, match=r"none\.png: no such file"):
        check_files(tmp_path / "none.png", tmp_path / "out.png")
    assert image.read_bytes() == before

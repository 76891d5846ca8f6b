"""Tests of FLOP formulas, against torch's FLOP counter."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from clipkit.errors import ConfigError
from clipkit.model import (
    ARCHITECTURES,
    Architecture,
    BagOfWords,
    ClassTable,
    OpenClipVision,
    TextTower,
    VisionTower,
)
from clipkit.model.clip import CLIP, create
from clipkit.model.flops import (
    Flops,
    counted_flops,
    image_flops,
    loss_flops,
    step_flops,
    text_flops,
    trained_blocks,
)
from clipkit.model.names import architecture

TOLERANCE = 1e-3  # relative; the formula omits nothing that torch counts


def counted(features: Tensor, forward: FlopCounterMode, rows: int) -> Flops:
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward(features.sum())
    return Flops(forward=forward.get_total_flops() // rows, backward=backward.get_total_flops() // rows)


def of_towers(shape: Architecture, length: int) -> tuple[Flops, Flops]:
    """Count forward and backward FLOPs of clipkit's model with torch, using the math attention backend."""
    with torch.device("meta"):
        model, size = CLIP(shape), shape.vision.image_size
        images, tokens = torch.empty(2, 3, size, size), torch.ones(2, length, dtype=torch.int64)
        with sdpa_kernel(SDPBackend.MATH):
            with FlopCounterMode(display=False) as forward:
                features = model.encode_image(images)
            image = counted(features, forward, 2)
            with FlopCounterMode(display=False) as forward:
                features = model.encode_text(tokens)
            return image, counted(features, forward, 2)


def same(formula: Flops, torchs: Flops) -> None:
    assert formula.forward == pytest.approx(torchs.forward, rel=TOLERANCE)
    assert formula.backward == pytest.approx(torchs.backward, rel=TOLERANCE)


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B-16", "ViT-L-14"])
@pytest.mark.parametrize("length", [16, 77])
def test_formula_equals_torch_for_published_models(name: str, length: int) -> None:
    shape = ARCHITECTURES[name]
    image, text = of_towers(shape, length)
    same(image_flops(shape), image)
    same(text_flops(shape, length), text)


@given(
    image=st.tuples(st.integers(1, 3), st.sampled_from([1, 2]), st.sampled_from([16, 24])),
    text=st.tuples(st.integers(1, 3), st.integers(1, 9)),
    grid=st.integers(1, 4),
    ratio=st.sampled_from([1.0, 2.5, 4.0]),
    pool=st.sampled_from(["class", "mean", "map", "distilled"]),
)
@settings(max_examples=12, deadline=None)
def test_formula_equals_torch_for_any_shape(
    image: tuple[int, int, int], text: tuple[int, int], grid: int, ratio: float, pool: str
) -> None:
    layers, heads, width = image
    shape = Architecture(
        embed_dim=10,
        vision=VisionTower(
            image_size=4 * grid,
            patch_size=4,
            width=width,
            layers=layers,
            heads=heads,
            mlp_ratio=ratio,
            pool=pool,
        ),
        text=ClassTable(names=("a",))
        if pool == "distilled"
        else TextTower(width=12, layers=text[0], heads=3, context_length=9, vocab_size=20),
    )
    counts = of_towers(shape, text[1] if pool != "distilled" else 1)  # a table of classes has one token
    same(image_flops(shape), counts[0])
    if pool != "distilled":
        same(text_flops(shape, text[1]), counts[1])


def test_step_flops_equal_torch() -> None:
    shape = ARCHITECTURES["ViT-Ti-4-16"]
    model = create(shape, seed=0)
    images, tokens = torch.randn(6, 3, 16, 16), torch.zeros(6, 12, dtype=torch.int64)
    tokens[:, 11] = 1  # equal lengths, so that nothing is padded
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as both:
        first, second, scale = model(images, tokens)
        targets = torch.arange(6)
        logits = scale * first @ second.T
        loss = nn.functional.cross_entropy(logits, targets) + nn.functional.cross_entropy(logits.T, targets)
        torch.autograd.backward(loss)
    ours = step_flops(shape, rows=6, lengths=[12] * 6, text_rows=6)
    assert ours == pytest.approx(both.get_total_flops(), rel=TOLERANCE)


def test_step_flops_count_kept_patches_and_true_lengths() -> None:
    shape = ARCHITECTURES["ViT-B-32"]
    vision, _ = shape.own_towers()
    assert vision.patches == 49
    smaller = replace(shape, vision=replace(vision, image_size=160))  # 25 patches
    assert image_flops(shape, patches=25) == image_flops(smaller)

    texts = sum(text_flops(shape, length).both for length in (9, 9, 20, 7))
    step = 4 * image_flops(shape).both + texts + loss_flops(4, 16, shape.embed_dim).both
    assert step_flops(shape, rows=4, lengths=(9, 9, 20, 7), text_rows=16) == step
    assert step_flops(shape, rows=4, lengths={9: 2, 20: 1, 7: 1}, text_rows=16) == step


def test_frozen_towers_and_first_blocks_have_no_backward_flops() -> None:
    shape = ARCHITECTURES["ViT-Ti-4-16"]
    model = create(shape, seed=0)
    whole = step_flops(shape, rows=2, lengths=[5, 9], text_rows=2)
    assert trained_blocks(model) == (None, None)
    model.visual.requires_grad_(False)
    assert trained_blocks(model) == (0, None)
    frozen = step_flops(shape, rows=2, lengths=[5, 9], text_rows=2, image_blocks=0)
    assert whole - frozen == 2 * image_flops(shape).backward
    for name, parameter in model.visual.named_parameters():
        if name.startswith(("transformer.resblocks.1", "transformer.resblocks.2", "ln_post", "proj")):
            parameter.requires_grad_()
    assert trained_blocks(model) == (2, None)

    with sdpa_kernel(SDPBackend.MATH):
        features = model.encode_image(torch.randn(2, 3, 16, 16))
        with FlopCounterMode(display=False) as backward:
            torch.autograd.backward(features.sum())
    ours = image_flops(shape, blocks=2).backward
    assert ours == pytest.approx(backward.get_total_flops() / 2, rel=TOLERANCE)

    model.requires_grad_(False)
    assert trained_blocks(model) == (0, 0)
    loss = loss_flops(2, 2, shape.embed_dim)
    forward = 2 * image_flops(shape).forward + sum(text_flops(shape, length).forward for length in (5, 9))
    step = step_flops(shape, rows=2, lengths=[5, 9], text_rows=2, image_blocks=0, text_blocks=0)
    assert step == forward + loss.forward


def test_bag_of_words_flops_are_those_of_its_projection() -> None:
    shape = replace(ARCHITECTURES["ViT-Ti-4-16"], text=BagOfWords(width=32))
    assert text_flops(shape, 5) == text_flops(shape, 50) == Flops(forward=2 * 32 * 128, backward=4 * 32 * 128)
    assert counted_flops(create(shape, seed=0)) == {}


def test_library_tower_is_counted_on_the_meta_device() -> None:
    """open_clip's ViT as a library tower: all tokens of its last block count."""
    config = {"layers": 3, "width": 64, "head_width": 32, "patch_size": 8}
    own = Architecture(
        embed_dim=32,
        vision=VisionTower(image_size=32, patch_size=8, width=64, layers=3, heads=2),
        text=ARCHITECTURES["ViT-Ti-4-16"].text,
    )
    shape = replace(own, vision=OpenClipVision(image_size=32, config=config))
    found = counted_flops(create(shape, seed=0))
    assert found is not None and found.keys() == {"image"}
    vision, _ = own.own_towers()
    four, one = (image_flops(replace(own, vision=replace(vision, layers=n))).forward for n in (4, 1))
    whole = four - one  # three blocks, none of them pruned as the last
    embedding, projection = 2 * 16 * 3 * 64 * 64, 2 * 64 * 32
    assert found["image"].forward == pytest.approx(whole + embedding + projection, rel=TOLERANCE)
    step = step_flops(shape, rows=2, lengths=[5, 6], text_rows=2, counted=found)
    assert step > 2 * found["image"].both
    with pytest.raises(ConfigError, match="own towers"):
        step_flops(shape, rows=2, lengths=[5, 6], text_rows=2)


def test_value_dependent_tower_has_no_count() -> None:
    class Looking(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.mean((1, 2)) * float(images.sum())

    model = create(replace(architecture("ViT-Ti-4-16"), vision=OpenClipVision(image_size=16, config={
        "layers": 1, "width": 64, "head_width": 32, "patch_size": 8,
    })), seed=0)  # fmt: skip
    model.visual = Looking()
    assert counted_flops(model) is None


def test_formulas_import_no_torch() -> None:
    program = (
        "import sys; from clipkit.model.flops import image_flops; "
        "from clipkit.model.architectures import named; "
        "image_flops(named('ViT-B-32')); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

"""Tests of the views term, which compares crops with averaged weights' features of the whole image."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from clipkit.config import load_config
from clipkit.errors import ConfigError
from clipkit.model.architectures import Architecture
from clipkit.model.clip import CLIP, create
from clipkit.model.measure import image_flops, text_flops
from clipkit.objectives import select_terms, views as module
from clipkit.objectives.views import Views, cut_views, draw_boxes, select_view_side, sum_view_divergence
from clipkit.training.build import shape_of
from clipkit.training.costs import measure_step, workloads_of
from clipkit.training.ema import AveragedWeights
from clipkit.training.step import encode_pairs

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 200), st.integers(1, 9), st.floats(0.01, 1), st.floats(0, 1), st.integers(0, 2**64))
def test_boxes_are_within_images(rows: int, count: int, least: float, more: float, seed: int) -> None:
    area = (least, least + (1 - least) * more)
    boxes = draw_boxes(seed=seed, rows=torch.arange(rows), count=count, area=area)
    assert boxes.shape == (rows, count, 4) and boxes.dtype == torch.float32
    left, top, width, height = boxes.double().unbind(-1)
    assert min(left.min(), top.min()) >= 0 and max((left + width).max(), (top + height).max()) <= 1 + 1e-6
    sizes = width * height
    clipped = (width > 1 - 1e-6) | (height > 1 - 1e-6)
    assert (sizes <= area[1] + 1e-6).all() and (sizes[~clipped] >= area[0] - 1e-6).all()
    assert torch.equal(
        draw_boxes(seed=seed, rows=torch.tensor([rows - 1]), count=count, area=area), boxes[-1:]
    )


def test_boxes_are_uniform() -> None:
    boxes = draw_boxes(seed=1, rows=torch.arange(20_000), count=2, area=(0.1, 0.4)).double()
    left, top, width, height = boxes.unbind(-1)
    assert float((width * height).mean()) == pytest.approx(0.25, abs=0.002)
    assert float((width / height).log().mean()) == pytest.approx(0, abs=0.005)
    assert float((left / (1 - width)).mean()) == pytest.approx(0.5, abs=0.005)
    assert float((top / (1 - height)).mean()) == pytest.approx(0.5, abs=0.005)
    flat = torch.stack([width * height, width / height, left / (1 - width), top / (1 - height)]).flatten(1)
    assert (flat.corrcoef() - torch.eye(4)).abs().max() < 0.02
    assert abs(float(torch.stack([width[:, 0], width[:, 1]]).corrcoef()[0, 1])) < 0.02


def test_crops_equal_the_pixels_in_the_box() -> None:
    images = torch.randint(
        0, 256, (2, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    boxes = torch.tensor([[0, 0, 1, 1], [0.25, 0.5, 0.25, 0.25]]).expand(2, -1, -1)
    assert torch.allclose(cut_views(images, boxes, side=16)[:, 0], images.float(), atol=1e-3)
    crops = cut_views(images, boxes, side=4)
    assert crops.shape == (2, 2, 3, 4, 4)
    assert torch.allclose(crops[:, 1], images[:, :, 8:12, 4:8].float(), atol=1e-3)
    twice = cut_views(images, boxes, side=8)[:, 1]  # inner pixels equal bilinear interpolation
    inner = F.interpolate(images[:, :, 8:12, 4:8].float(), (8, 8), mode="bilinear")
    assert torch.allclose(twice[..., 1:-1, 1:-1], inner[..., 1:-1, 1:-1], atol=1e-3)


def test_divergence_and_gradient_equal_plain_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)
    found, seen, texts = (
        F.normalize(torch.randn(*size, 8, generator=random, dtype=torch.float64), dim=-1)
        for size in ((5, 3), (5,), (11,))
    )
    scale = torch.tensor(7.0)
    student = (scale * found.requires_grad_() @ texts.T).log_softmax(-1)
    teacher = (scale * seen @ texts.T).log_softmax(-1)[:, None].expand_as(student)
    expected = F.kl_div(student, teacher, reduction="sum", log_target=True) / 3
    (wanted,) = torch.autograd.grad(2 * expected, found)
    for logits in (1 << 22, 70, 1):  # tiles of all images, two and one
        monkeypatch.setattr(module, "_LOGITS", logits)
        total = sum_view_divergence(found, seen, texts, scale)
        (gradient,) = torch.autograd.grad(2 * total, found)
        assert total.item() == pytest.approx(expected.item(), rel=1e-12)
        assert (gradient - wanted).abs().max() < 1e-12
    assert sum_view_divergence(seen[:, None], seen, texts, scale).item() == pytest.approx(0, abs=1e-12)


def test_averaged_weights_teach_and_the_model_keeps_its_own() -> None:
    model, other = create("ViT-Ti-4-16", seed=0), create("ViT-Ti-4-16", seed=1)
    averaged = AveragedWeights(model, 0.9)
    averaged.restore(other.state_dict(), origin="test")
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8, generator=random)
    texts = model.tokenizer(["a", "b", "c", "d"])
    inputs = {"images": images, "tokens": texts}
    taught = encode_pairs(model, inputs, averaged=averaged, bf16=False, tokens=True)
    with torch.no_grad():
        expected = (*other.image_tokens(images), other.encode_text(texts))
    for found, wanted in zip((taught.images, taught.tokens, taught.texts), expected, strict=True):
        assert found is not None and torch.allclose(found, wanted, atol=1e-5)
    assert model.training and all(
        torch.equal(value, kept[name]) for name, value in model.state_dict().items()
    )


def test_views_settings_and_flops() -> None:
    def shape(*given: str) -> Architecture:
        config = load_config(QUICKSTART, given)
        return shape_of(config.model, config.loss, config.small, terms=select_terms(config))

    on = ("views.weight=1", "optim.average=0.9")
    assert shape(*on) == shape()
    assert select_view_side(Views(), shape(), image_size=16) == 8
    assert select_view_side(Views(weight=1, size=12), shape(), image_size=8) == 8  # in small steps
    with pytest.raises(ConfigError, match=r"lock.image = .all. .*views.weight"):
        shape("views.weight=1", "optim.average=0.9", "lock.image=all")
    with pytest.raises(ConfigError, match=r"views.weight = 1.0 .*optim.average"):
        shape("views.weight=1")
    with pytest.raises(
        ConfigError, match=r"views.size = 6 is invalid: expected a multiple of the patch size, 4"
    ):
        shape(*on, "views.size=6")
    with pytest.raises(ConfigError, match=r"views.area = .* is invalid"):
        shape(*on, "views.area=[0.4,0.1]")
    with pytest.raises(ConfigError, match=r"views.weight requires an image tower that encodes other sizes"):
        shape(*on, "model.name=open_clip:RN50")
    config = load_config(QUICKSTART, [*on, "views.count=3", "views.after=900"])
    works = workloads_of(config, world=1, shard_ranks=1, bf16=False)
    assert [(work.steps, list(work.terms)) for work in works] == [(900, []), (100, ["views"])]
    model, small = works[1].model, CLIP(shape().replace_size(image_size=8))
    with_term, without = (measure_step(work, 2, length=6).flops for work in reversed(works))
    encoding = 2 * (image_flops(model).forward + text_flops(model, 6).forward)
    comparing = 2 * 2 * 2 * 128 * (1 + 2 * 3)  # products of images and crops with both texts
    # and the position embeddings of crops are resized
    expected = encoding + 6 * image_flops(small).both + comparing
    assert with_term - without == pytest.approx(expected, rel=1e-3)

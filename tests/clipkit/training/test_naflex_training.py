"""Tests of training on images of variable size: batches, crops, exact gradients, and costs by tokens."""

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from clipkit.batch import Batch
from clipkit.config import Config, ModelConfig, ShapeConfig, load_config
from clipkit.errors import ConfigError
from clipkit.model import PatchBudget, eval_pixels, image_gflops
from clipkit.model.architectures import Architecture
from clipkit.model.clip import CLIP, create
from clipkit.model.tokenizer import ClipTokenizer
from clipkit.objectives import OBJECTIVES
from clipkit.training.build import select_shape
from clipkit.training.costs import Workload, flops_of_steps, measure_step, memory_of
from clipkit.training.step import TrainingStep
from data.augment import Augmentation, draw_recipe, empty_batch, random_of, training_pixels
from data.loader import Loader
from data.order import Order
from data.shards.samples import Shards, find_shards
from data.shards.writer import DatasetWriter, Record

# width and height, from 4:1 to 1:4
SIZES = ((160, 40), (64, 64), (40, 160), (100, 50), (30, 45), (16, 16), (90, 33), (33, 90))
CONFIG = Config(model=ModelConfig(name="ViT-Ti-4-16", image_tokens=20), batch_size=8)
OVERRIDES = ("model.name=ViT-Ti-4-16", "model.image_tokens=20")
WHOLE = Augmentation(crop_scale=1.0)


def encode_png(number: int) -> bytes:
    width, height = SIZES[number % len(SIZES)]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def shape() -> Architecture:
    return select_shape(CONFIG)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    folder = tmp_path_factory.mktemp("shards") / "set"
    with DatasetWriter(folder, samples_per_shard=10) as writer:
        for number in range(16):
            record = Record(
                key=f"{number:04d}", image=encode_png(number), extension="png", caption=f"a {number}"
            )
            writer.write("train", record)
        writer.finish({})
    return Shards.of(find_shards(str(folder)))


def make_loader(shards: Shards, shape: Architecture, **more: Any) -> Loader:
    order = Order(shards.counts, seed=0, batch_size=8, window=2)
    tokenizer = ClipTokenizer(context_length=20)
    budget = shape.vision.budget
    return Loader(shards=shards, order=order, image_size=16, tokenize=tokenizer, patches=budget, **more)


def test_batches_have_whole_images_and_their_grids(shards: Shards, shape: Architecture) -> None:
    loader = make_loader(shards, shape, augmentation=WHOLE)
    batch = loader.batch(0)
    assert (
        batch.images.shape == (8, *create(shape).preprocess.input_shape) and shape.vision.budget is not None
    )
    for image, number, grid in zip(batch.images, batch.ids.tolist(), batch.grids or (), strict=True):
        width, height = SIZES[number % len(SIZES)]
        assert grid == tuple(side // 4 for side in shape.vision.budget.fit_size(height, width))
        expected = eval_pixels(encode_png(number), create(shape, seed=0).preprocess)
        difference = (
            image[:, : grid[0] * grid[1] * 4].int() - expected[:, : grid[0] * grid[1] * 4].int()
        ).abs()
        assert difference.max() <= 1 and torch.equal(image[:, -1], expected[:, -1])
    parts = [make_loader(shards, shape, augmentation=WHOLE, rank=i, world_size=2).batch(0) for i in range(2)]
    assert torch.equal(torch.cat([part.images for part in parts]), batch.images)
    assert sum((part.grids or () for part in parts), ()) == batch.grids
    (ahead,) = make_loader(shards, shape, augmentation=WHOLE, num_workers=1).batches(0, 1)
    assert torch.equal(ahead.images, batch.images) and ahead.grids == batch.grids


@given(
    height=st.integers(20, 400),
    width=st.integers(20, 400),
    aspect=st.floats(1, 2),
    seed=st.integers(0, 2**32),
)
def test_crops_have_nearly_the_aspect_ratio_of_the_image(
    height: int, width: int, aspect: float, seed: int
) -> None:
    augmentation = Augmentation(crop_scale=0.5, crop_aspect=aspect)
    recipe = draw_recipe(height, width, augmentation, random_of(seed), is_square=False)
    _, _, crop_height, crop_width = recipe.box
    ratio = crop_width / crop_height / (width / height)
    assert 0.9 / aspect <= ratio <= 1.1 * aspect


@pytest.mark.parametrize("turns", [0.0, 1.0])
def test_flips_and_rotations_act_before_images_are_cut(turns: float) -> None:
    budget = PatchBudget(side=4, count=12)
    augmentation = replace(WHOLE, flip=1.0, rotate90=turns)
    strip = empty_batch(1, 0, patches=budget)[0]
    for seed in range(5):
        random = random_of(seed)
        training_pixels(
            encode_png(0), image_size=0, augmentation=augmentation, random=random, out=strip, patches=budget
        )
        (rows, columns), *_ = budget.read_grids(strip[None])
        recipe = draw_recipe(40, 160, augmentation, random_of(seed), is_square=False)
        assert (rows, columns) == ((6, 2) if recipe.turns % 2 else (2, 6)) and recipe.mirrored


def compute_gradients(model: CLIP, batch: Batch, shape: Architecture, **more: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    step = TrainingStep(shape=shape, objective=OBJECTIVES["clip"](), loss=CONFIG.loss, **more)
    step.gradients(model, batch, 0)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("pool", ["class", "map"])
def test_gradients_of_parts_are_those_of_the_batch(shards: Shards, pool: str) -> None:
    shape = select_shape(replace(CONFIG, shape=ShapeConfig(pool=pool)))
    model = create(shape, seed=0).double()
    batch = make_loader(shards, shape).batch(0)
    whole = compute_gradients(model, batch, shape)
    assert len(whole) == sum(parameter.requires_grad for parameter in model.parameters())
    for other in (
        compute_gradients(model, batch, shape, accumulate=3),
        compute_gradients(model, batch, shape, accumulate=8),  # one image at a time
        compute_gradients(model, replace(batch, grids=None), shape),  # grids are read from the images
    ):
        for name, gradient in whole.items():
            assert (other[name] - gradient).abs().max() < 1e-6, name


def test_costs_are_by_patches(shape: Architecture) -> None:
    model = create(shape, seed=0)
    work = Workload(model=model, config=CONFIG)
    count = flops_of_steps(work)
    assert count is not None
    most = count([20] * 8, 4, (), [(4, 5)] * 8)
    assert most == count([20] * 8, 4)
    smaller = create(shape.replace_size(image_tokens=6), seed=0)
    exact = measure_step(replace(work, model=smaller), 2, length=20).flops / 2
    loss = count([20] * 8, 4) - 8 * measure_step(work, 2, length=20).flops / 2
    assert count([20] * 8, 4, (), [(2, 3)] * 8) == pytest.approx(8 * exact + loss, rel=1e-3)
    costs = measure_step(work, 8)
    assert memory_of(work, costs).images == 2 * 8 * 3 * (20 * 4 + 1) * 4
    square = create("ViT-Ti-4-16")
    gflops, square_gflops = image_gflops(create(shape.replace_size(image_tokens=16))), image_gflops(square)
    assert gflops is not None and gflops == pytest.approx(square_gflops, rel=0.01)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("compile=true", "compile = True is invalid: cannot be combined with model.image_tokens"),
        ("model.patch_dropout=0.5", "model.patch_dropout = 0.5 requires clipkit.s own image towers"),
        ("model.image_size=32", "model.image_size = 32 is invalid: cannot be combined"),
        ("data.nvjpeg=true", "data.nvjpeg = True is invalid: cannot be combined"),
        ("shape.pool=mean", "image_tokens = 20 requires shape.pool = 'class' or 'map', not 'mean'"),
        ("model.image=timm:resnet18", "model.image_tokens = 20 requires clipkit's ViT"),
        ("masked.weight=1", "not ViT-Ti-4-16 . 20 patches|needs clipkit's ViT"),
        ("caption.weight=1", "not ViT-Ti-4-16 . 20 patches"),
    ],
)
def test_settings_that_need_squares_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_shape(load_config(Path(os.devnull), [*OVERRIDES, setting]))

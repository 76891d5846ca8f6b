"""Tests of data selection: which pairs are chosen, and that all that belongs to a pair moves with it."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from scipy.special import logsumexp
from torch import Tensor

from clipkit.batch import Batch, TeacherFeatures
from clipkit.config import Config, DataConfig, DistillConfig, LockConfig, OptimConfig, SelectConfig
from clipkit.errors import ConfigError
from clipkit.model.clip import create
from clipkit.objectives.clip import Clip
from clipkit.objectives.distill import Teaching
from clipkit.training.costs import Workload, flops_of_steps, measure_workload, memory_of, step_flops
from clipkit.training.selection import choose_pairs, take_pairs
from clipkit.training.step import TrainingStep

PAIRS, WIDTH = 40, 8
REFERENCE = DistillConfig(features="images", text_features="texts", weight=0.0)


def draw_features(seed: int, *, scale: float = 10.0) -> Teaching:
    generator = torch.Generator().manual_seed(seed)
    images, texts = (
        F.normalize(torch.randn(PAIRS, WIDTH, generator=generator, dtype=torch.float64), dim=1)
        for _ in range(2)
    )
    return Teaching(images=images, texts=texts, scale=torch.tensor(scale, dtype=torch.float64))


def choose(
    model: Teaching, reference: Teaching, identities: Tensor | None = None, *, count: int = 10, **options: int
) -> tuple[list[int], Tensor]:
    if identities is None:
        identities = torch.arange(PAIRS)[:, None]
    options = {"chunks": 4, "seed": 7, **options}
    rows = torch.arange(PAIRS)
    chosen, learnability = choose_pairs(model, reference, identities, count=count, rows=rows, **options)
    return chosen.tolist(), learnability


EQUAL = draw_features(9, scale=1e-9)  # by which all pairs have the same loss


def sum_losses(features: Teaching, among: list[int], pair: int) -> float:
    """Both cross-entropies of a pair among others and itself, by numpy."""
    logits = float(features.scale) * (features.images @ features.texts.T).numpy()
    others = [other for other in among if other != pair]
    total = 0.0
    for table in (logits, logits.T):
        total += logsumexp(table[pair, [pair, *others]]) - table[pair, pair]
    return total


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**70), count=st.integers(2, PAIRS), chunks=st.integers(1, 60))
def test_as_many_pairs_as_asked_for_are_chosen_once(seed: int, count: int, chunks: int) -> None:
    models = draw_features(0), draw_features(1)
    chosen, _ = choose(*models, count=count, chunks=chunks, seed=seed)
    assert len(chosen) == count and sorted(set(chosen)) == chosen and set(chosen) <= set(range(PAIRS))
    assert choose(*models, count=count, chunks=chunks, seed=seed)[0] == chosen


def test_mean_learnability_is_that_of_cross_entropies() -> None:
    model, reference = draw_features(0), draw_features(1)
    chosen, (mean, of_chosen) = choose(model, reference)
    everyone = list(range(PAIRS))
    expected = [sum_losses(model, everyone, i) - sum_losses(reference, everyone, i) for i in everyone]
    assert mean.item() == pytest.approx(np.mean(expected))
    assert of_chosen.item() == pytest.approx(np.mean([expected[i] for i in chosen]))


def test_later_chunks_are_drawn_by_losses_among_chosen_pairs() -> None:
    """With a large scale the noise hardly matters, so the order is that of the losses."""
    model = draw_features(0, scale=3000.0)
    first, _ = choose(model, EQUAL, count=5, chunks=1)
    both, _ = choose(model, EQUAL, count=10, chunks=2)
    assert set(first) < set(both)
    rest = [i for i in range(PAIRS) if i not in first]
    everyone = list(range(PAIRS))
    losses = {i: sum_losses(model, first, i) + sum_losses(model, everyone, i) for i in rest}
    assert set(both) - set(first) == set(sorted(rest, key=losses.__getitem__)[-5:])


def test_draws_follow_the_exponential_of_the_learnability() -> None:
    """A pair is drawn first as often as the softmax of the scores tells."""
    model = draw_features(0, scale=2.0)
    everyone = list(range(PAIRS))
    losses = np.array([sum_losses(model, everyone, i) for i in everyone])
    expected = np.exp(losses - logsumexp(losses))
    counts = np.zeros(PAIRS)
    for seed in range(3000):
        counts[choose(model, EQUAL, count=1, chunks=1, seed=seed)[0]] += 1
    assert np.abs(counts / 3000 - expected).max() < 4 * np.sqrt(expected.max() / 3000)


def test_wrong_captions_are_avoided_with_a_reference_and_preferred_without() -> None:
    features = draw_features(0)
    right = replace(features, texts=features.images.clone(), scale=torch.tensor(300.0))
    order = torch.arange(PAIRS)
    order[:8] = order[:8].roll(1)  # captions of other images
    reference = replace(right, texts=right.texts[order])
    model = draw_features(1, scale=1.0)
    learnable, _ = choose(model, reference, count=32)
    assert learnable == list(range(8, PAIRS))
    assert choose(EQUAL, reference, count=32)[0] == learnable
    assert set(choose(reference, EQUAL, count=8, chunks=1)[0]) == set(range(8))


def test_pairs_that_show_the_same_are_not_compared() -> None:
    model = replace(draw_features(0), images=draw_features(1).images)
    same = torch.zeros(PAIRS, 1, dtype=torch.int64)
    _, learnability = choose(model, EQUAL, same)
    assert learnability.abs().max() < 1e-6


def make_batch(rows: int, *, blocks: int = 1) -> Batch:
    """A batch in which all values of a sample tell its number."""
    ids = torch.arange(rows)
    texts = ids[:, None].repeat(1, 3)
    images = ids.to(torch.uint8)[:, None, None, None].repeat(1, 3, 4, 4)
    numbers = tuple(range(rows))
    return Batch(
        images=images.contiguous(memory_format=torch.channels_last),
        tokens=texts,
        lengths=numbers,
        ids=ids,
        identities=ids[:, None].repeat(1 + blocks, 2),
        more=texts.repeat(blocks, 1) + 100,
        more_lengths=numbers * blocks,
        negatives=texts + 200,
        negative_lengths=numbers,
        fields=texts.repeat(blocks, 1) + 300,
        field_lengths=numbers * blocks,
        weights=ids.float(),
        words=texts[:, :2],
        teacher=TeacherFeatures(texts.half(), texts.half(), 50.0),
        substitutes=(1, rows - 1),
        rank_rows=(rows,),
    )


@settings(deadline=None, max_examples=20)
@given(
    rows=st.integers(2, 12),
    blocks=st.integers(1, 3),
    chosen=st.sets(st.integers(0, 11), min_size=1),
)
def test_everything_of_a_pair_is_taken(rows: int, blocks: int, chosen: set[int]) -> None:
    expected = sorted({row % rows for row in chosen})
    batch = make_batch(rows, blocks=blocks)
    taken = take_pairs(batch, torch.tensor(expected), padding=9)
    assert taken.ids.tolist() == expected and taken.rank_rows == (len(expected),)
    assert taken.images.is_contiguous(memory_format=torch.channels_last)
    assert taken.substitutes == tuple(i for i, row in enumerate(expected) if row in (1, rows - 1))
    kept = {
        "first_row", "fault", "bad", "traits", "cut_captions", "without_group", "read_seconds", "make_seconds",
        "rank_rows", "substitutes", "learnability", "grids",
    }  # fmt: skip
    offsets = {"more": 100, "negatives": 200, "fields": 300}
    for field in fields(Batch):
        if field.name in kept:
            continue
        value = getattr(taken, field.name)
        parts = value[:2] if isinstance(value, TeacherFeatures) else [value]
        for part in parts:
            values = torch.as_tensor(part).double()
            if field.name == "words":
                assert (values[:, 2] == -1).all()
                values = values[:, :2]
            numbers = values.reshape(len(values), -1)
            count = len(numbers) // len(expected)
            assert count * len(expected) == len(numbers)
            assert (numbers == numbers[:, :1]).all()
            assert (numbers[:, 0] - offsets.get(field.name, 0)).tolist() == expected * count, field.name


def test_scoring_of_resized_images_in_parts_equals_that_at_once() -> None:
    model = create("ViT-Ti-4-16", seed=0).train()
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (12, 3, 16, 16), dtype=torch.uint8, generator=generator)
    images, texts = torch.randn(2, 12, 4, generator=generator)  # of the reference
    batch = Batch(
        images=pixels,
        tokens=model.tokenizer([f"a photo of {i} cats" for i in range(12)]),
        lengths=(7,) * 12,
        ids=torch.arange(12),
        identities=torch.arange(12)[:, None],
        rank_rows=(12,),
        teacher=TeacherFeatures(images, texts, 0.01),
    )
    step = TrainingStep(
        shape=model.architecture, objective=Clip(), loss=Config().loss, distill=REFERENCE,
        select=SelectConfig(fraction=0.5, image_size=8), logs_samples=True,
    )  # fmt: skip
    once, parts = (replace(step, accumulate=count).select_pairs(model, batch, 3) for count in (1, 3))
    assert once.ids.tolist() == parts.ids.tolist() and len(once.ids) == 6
    others = [replace(step, seed=1).select_pairs(model, batch, 3)]
    others += [step.select_pairs(model, batch, i) for i in range(4, 9)]
    assert any(other.ids.tolist() != once.ids.tolist() for other in others)
    figures = step.figures(once, step.gradients(model, once, 3))
    assert figures["learnability_trained"] > figures["learnability_read"]
    assert model.training


def test_costs_count_scoring_and_training() -> None:
    model = create("ViT-Ti-4-16", seed=0)
    config = Config(batch_size=64)
    selecting = replace(config, select=SelectConfig(fraction=0.25), distill=REFERENCE)
    small = replace(config, batch_size=16)
    works = [Workload(model=model, config=settings) for settings in (config, selecting, small)]
    costs = [measure_workload(work) for work in works]
    assert all(costs)
    flops = [step_flops(work, cost) for work, cost in zip(works, costs, strict=True) if cost is not None]
    whole, selected, few = flops
    assert few + 0.3 * whole < selected < few + 0.36 * whole  # the forward pass of all pairs
    reference = replace(selecting, distill=DistillConfig(teacher="run", weight=0.0))
    taught = Workload(model=model, config=reference, teacher=model)
    assert costs[1] is not None
    assert step_flops(taught, costs[1]) - few == pytest.approx(2 * (selected - few), rel=0.01)
    assert Workload(model=model, config=reference).lacks_teacher
    lock = LockConfig(image="backbone", text="backbone", store=True)
    stored, few_stored = (
        step_flops(Workload(model=model, config=replace(settings, lock=lock)), costs[1])
        for settings in (selecting, small)
    )
    assert stored == few_stored  # the backbones of scored pairs do not compute
    memories = [memory_of(work, cost) for work, cost in zip(works, costs, strict=True)]
    assert memories[1].images == memories[0].images and memories[1].activations == memories[2].activations
    count = flops_of_steps(works[1])  # for the MFU, without scoring
    assert count is not None
    size, length = model.architecture.vision.image_size, model.architecture.text.context_length
    assert count((length,) * 16, size) == pytest.approx(few, rel=0.01)
    resized = (
        replace(selecting, select=SelectConfig(fraction=0.25, image_size=size)) for size in (8, 16, 32)
    )
    costs_by_size = [step_flops(replace(works[1], config=settings), costs[1]) for settings in resized]
    assert costs_by_size[0] < costs_by_size[1] == costs_by_size[2] == selected


def test_settings_that_do_not_fit_are_refused() -> None:
    select = SelectConfig(fraction=0.5)
    average = DistillConfig(teacher="average")
    for distill in (DistillConfig(), average):
        with pytest.raises(
            ConfigError, match=r"select.fraction = 0.5 has no effect unless distill.teacher \(a m"
        ):
            Config(select=select, distill=distill, optim=OptimConfig(average=0.9))
    with pytest.raises(
        ConfigError, match=r"distill.weight = 0.0 has no effect unless select.fraction is set"
    ):
        Config(distill=REFERENCE)
    with pytest.raises(
        ConfigError, match=r"select.image_size = 8 has no effect unless select.fraction is set"
    ):
        SelectConfig(image_size=8)
    with pytest.raises(ConfigError, match=r"select.fraction = 0.1 is invalid: leaves 1 of batch_size = 8"):
        Config(batch_size=8, select=SelectConfig(fraction=0.1), distill=REFERENCE)
    weighted = DataConfig(weight="score")  # not with distillation
    assert Config(data=weighted, select=select, distill=REFERENCE).trained_pairs

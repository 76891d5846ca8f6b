"""Tests of the term that predicts words: against a plain formula, its state, loading, rejected settings."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor

from clipkit.batch import Batch
from clipkit.config import ModelConfig, load_config
from clipkit.errors import ConfigError
from clipkit.export.interpolation import interpolate, load_interpolatable
from clipkit.formats.checkpoint import model_hash, save_model
from clipkit.model.architectures import Architecture, TextTower, VisionTower
from clipkit.model.clip import create
from clipkit.model.towers import select_distinct
from clipkit.model.zero_shot import attach_class_head
from clipkit.objectives import ObjectiveState, TermBatch, select_objective, select_terms
from clipkit.objectives.caption_words import CaptionWords
from clipkit.objectives.distill import Teaching
from clipkit.objectives.words import Words
from clipkit.training.build import first_model, places, select_shape
from clipkit.training.costs import measure_step, workloads_of

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"
TOKENS = 11
SHAPE = Architecture(
    embed_dim=6,
    vision=VisionTower(image_size=8, patch_size=4, width=16, layers=1, heads=1),
    text=TextTower(width=16, layers=1, heads=1, context_length=8, vocab_size=TOKENS),
)


def no_teacher() -> Teaching:
    raise AssertionError


def draw(texts: list[list[int]], state: ObjectiveState, shape: Architecture) -> TermBatch:
    """A batch with captions of these tokens, of which 0 is left out."""
    tokens = torch.zeros(len(texts), 9, dtype=torch.int64)
    for row, words in enumerate(texts):
        tokens[row, : len(words)] = torch.tensor(words)
    ids = torch.arange(len(texts))
    batch = Batch(
        images=torch.empty(len(texts), 3, 8, 8),
        tokens=tokens,
        lengths=(9,) * len(texts),
        ids=ids,
        identities=ids[:, None],
        words=select_distinct(tokens, tokens > 0),
    )
    return TermBatch(batch=batch, seed=0, shape=shape, teach=no_teacher, state=state)


def plain_sum(logs: Tensor, texts: list[list[int]], seen: list[list[int]], numbers: dict[int, int]) -> Tensor:
    """The sum over images of the cross-entropy, given all captions so far, those of the step included."""
    total = logs.sum() * 0
    for row, words in enumerate(texts):
        frequencies = {word: sum(word in caption for caption in seen) for word in set(words) & numbers.keys()}
        rarity = {word: math.log((len(seen) + 1) / (n + 1)) for word, n in frequencies.items()}
        for word, value in rarity.items():
            total = total - value / (sum(rarity.values()) or 1) * logs[row, numbers[word]]
    return total


@settings(deadline=None)
@given(
    batches=st.lists(
        st.lists(st.lists(st.integers(1, TOKENS - 1), max_size=7), min_size=1, max_size=5),
        min_size=1,
        max_size=3,
    ),
    vocabulary=st.integers(0, TOKENS + 2),
    seed=st.integers(0, 99),
)
def test_term_equals_plain_formula_over_several_steps(
    batches: list[list[list[int]]], vocabulary: int, seed: int
) -> None:
    term = CaptionWords(weight=1, vocabulary=vocabulary)
    heads = term.heads(SHAPE, ModelConfig())
    assert heads == {"words": min(vocabulary, TOKENS) or TOKENS}
    shape = replace(SHAPE, **heads)
    model = create(shape, seed=seed).double()
    head = model.words_head
    assert head is not None
    state = ObjectiveState(term.create_state(shape))
    seen: list[list[int]] = []
    known: dict[int, int] = {}
    random = torch.Generator().manual_seed(seed)
    for step, texts in enumerate(batches):
        inputs, count = term.inputs(draw(texts, state, shape))
        assert count == len(texts)
        features = torch.randn(len(texts), 6, dtype=torch.float64, generator=random)
        features = F.normalize(features, dim=1).requires_grad_()
        found = term.total(model, torch.empty(0), (), features=features, **inputs)
        numbers = dict(known)
        for word in sorted({word for words in texts for word in words} - numbers.keys()):
            if len(numbers) < heads["words"]:
                numbers[word] = len(numbers)
        logs = (head.norm(features) @ head.projection).log_softmax(1)
        wanted = plain_sum(logs, texts, seen + texts, numbers)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
        leaves = (features, *head.parameters())
        for own, other in zip(
            torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves), strict=True
        ):
            torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)
        skip = step == 1  # a skipped update does not count
        state.update(skip=torch.tensor(skip))
        seen += [] if skip else texts
        known = known if skip else numbers
        assert state.tensors["words.frequencies"][-1] == len(seen)


def test_weights_without_the_head_load_and_the_head_can_be_dropped(tmp_path: Path) -> None:
    config = load_config(QUICKSTART, ["words.weight=1"])
    shape = select_shape(config)
    assert shape.words == 49408
    save_model(create(replace(shape, words=None), seed=1), tmp_path / "plain")
    config = load_config(QUICKSTART, ["words.weight=1", f"model.weights={tmp_path / 'plain'}"])
    model = first_model(config, shape)
    assert model.words_head is not None
    assert torch.equal(model.words_head.norm.weight, torch.ones(128))
    assert model.words_head.projection.std().item() == pytest.approx(128**-0.5, rel=0.01)
    torch.nn.init.ones_(model.logit_scale)
    save_model(model, tmp_path / "with")
    config = load_config(QUICKSTART, [f"model.weights={tmp_path / 'with'}"])
    again = first_model(config, select_shape(config))
    assert again.words_head is None
    assert model_hash(again) != model_hash(model)
    assert places(model)["words_head.projection"].tower == ""
    classifier = attach_class_head(model, ["a", "b"], torch.eye(2, 128))
    assert classifier.words_head is None
    first, second = load_interpolatable([str(tmp_path / name) for name in ("plain", "with")])
    mean = interpolate(first, second, 0.5)
    assert mean.words_head is None
    assert mean.logit_scale.item() == pytest.approx((1 + math.log(1 / 0.07)) / 2)


def test_head_is_part_of_measured_costs() -> None:
    def count_flops(*changed: str) -> int:
        config = load_config(QUICKSTART, changed)
        work = workloads_of(config, world=1, shard_ranks=1, bf16=False)[-1]
        return measure_step(work, 2, length=8).flops

    # a product and its two gradients, of two images
    assert count_flops("words.weight=1", "words.vocabulary=500") - count_flops() == 3 * 2 * 2 * 128 * 500


def test_objective_and_term_of_one_name_are_told_apart() -> None:
    config = load_config(QUICKSTART, ["loss.name=words", "model.text=words"])
    assert isinstance(select_objective(config), Words) and not select_terms(config)
    config = load_config(QUICKSTART, ["words.weight=0.5", "words.after=3"])
    assert select_terms(config) == {"words": CaptionWords(weight=0.5, after=3)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["words.vocabulary=9"], "words.vocabulary = 9 has no effect unless words.weight is set"),
        (["words.after=3"], "words.after = 3 has no effect unless words.weight is set"),
        (
            ["words.weight=1", "lock.image=all"],
            "cannot be combined with words.weight, which trains the image",
        ),
        (
            ["words.weight=1", "lock.text=all", "lock.image=backbone", "lock.store=true", "caption.weight=1"],
            "caption.weight = 1.0 is invalid: cannot be combined with lock.store",
        ),
    ],
)
def test_invalid_settings_are_rejected(changed: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, changed)
    assert message in str(caught.value)

"""Tests of bag-of-words prediction: loss against a plain formula, text features, settings."""

import math
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

import clipkit
import clipkit.objectives.tiles
from clipkit.config import load_config
from clipkit.errors import ConfigError
from clipkit.model.names import create_architecture
from clipkit.model.tokenizer import ClipTokenizer
from clipkit.objectives import Outputs, Targets
from clipkit.objectives.words import Words

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"


@given(
    texts=st.lists(st.lists(st.integers(1, 8), max_size=6), min_size=1, max_size=5),
    rows=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_word_loss_is_the_mean_over_distinct_words(texts: list[list[int]], rows: int, seed: int) -> None:
    """Words 1 to 8 between start (0) and end (9); the word of an empty caption is the start token."""
    tokens = torch.zeros(len(texts), 9, dtype=torch.int64)
    for row, words in enumerate(texts):
        tokens[row, 1 : len(words) + 2] = torch.tensor([*words, 9])
    random = torch.Generator().manual_seed(seed)
    images, table = (
        F.normalize(torch.randn(n, 5, generator=random, dtype=torch.float64), dim=1).requires_grad_()
        for n in (len(texts), 10)
    )
    scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    targets = Targets(identities=tokens[:, :2], tokens=tokens, same="negatives")
    with patch.multiple(clipkit.objectives.tiles, _TILE=1, _LEAST_ROWS=rows):
        found = Words().loss(Outputs(images, table, scale), targets)
    logs = (scale * images @ table.T).log_softmax(1)
    each = [-logs[row, sorted(set(words) or {0})].mean() for row, words in enumerate(texts)]
    wanted = torch.stack(each).mean()
    torch.testing.assert_close(found, wanted)
    leaves = (images, table, scale)
    for own, other in zip(
        torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves), strict=True
    ):
        torch.testing.assert_close(own, other)
    best = logs.argmax(1).tolist()
    right = sum(one in (set(words) or {0}) for one, words in zip(best, texts, strict=True))
    assert Words().figures(images, table, targets) == {"word_acc1": right / len(texts)}
    blind = Words().loss(Outputs(torch.zeros_like(images), table, scale), targets)
    assert blind.item() == pytest.approx(math.log(10))


def test_text_feature_is_the_mean_of_its_word_vectors() -> None:
    model = clipkit.create(create_architecture("ViT-Ti-4-16", text="words"), seed=0)
    assert model.text is not None
    table = F.normalize(model.text.get_parameter("token_embedding.weight").detach(), dim=1)
    (ids,) = ClipTokenizer(context_length=77)(["red bicycle"])
    words = ids[1 : int(ids.argmax())]
    (found,) = clipkit.encode_text(["red bicycle"], model)
    torch.testing.assert_close(found, F.normalize(table[words].mean(0), dim=0))
    everything = torch.arange(len(table))[:, None]
    torch.testing.assert_close(model.encode_text(everything).detach(), table)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["loss.name=words"], "loss.name = 'words' is invalid: requires model.text=words"),
        (["loss.name=words", "model.text=cbow"], "requires model.text=words"),
        (["loss.name=words", "model.text=words", "loss.smoothing=0.1"], "expected 0 with loss.name=words"),
        (["loss.name=words", "model.text=words", "distill.teacher=x"], "cannot be combined"),
    ],
)
def test_invalid_settings_are_rejected(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(QUICKSTART, settings)

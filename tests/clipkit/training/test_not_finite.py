"""Tests of non-finite steps: the first non-finite tensor is reported, and the samples are listed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clipkit.config import Config
from clipkit.errors import DataError
from clipkit.model.clip import CLIP
from clipkit.objectives.clip import clip_loss
from clipkit.training.guards import Outcome, diagnose_failed_step, find_not_finite, list_not_finite
from clipkit.training.step import Features, backward

TOKENS = torch.tensor([[1, 2, 49407], [3, 4, 49407], [5, 6, 49407], [7, 8, 49407]])
NAMES = [("a.tar", "0001"), ("b.tar", 'an "odd" näme\n')]


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4, 3, 32, 32), generator=random, dtype=torch.uint8)
    tokens = torch.randint(1, 99, (4, 9), generator=random)
    tokens[:, 8] = 49407
    return {"images": images, "tokens": tokens}


def compute(model: CLIP, inputs: dict[str, Tensor], parts: int = 1) -> Features:
    return backward(model, inputs, loss=clip_loss, parts=parts, autocast=False)


def test_finite_step_finds_nothing(tiny: CLIP, inputs: dict[str, Tensor]) -> None:
    before = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    finding = find_not_finite(tiny, lambda: compute(tiny, inputs))
    assert (finding.where, finding.rows) == ("", []) and finding.loss > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in tiny.state_dict().items())
    assert not any(module._forward_hooks for module in tiny.modules())


@pytest.mark.parametrize("captions", [1, 2, 3])
def test_rows_have_several_captions_or_none(captions: int, tiny: CLIP) -> None:
    features = compute(tiny, {"images": torch.zeros(4, 3, 32, 32, dtype=torch.uint8), "tokens": TOKENS})
    texts = features.texts.repeat(captions, 1)
    texts[4 * (captions - 1) + 2, 0] = torch.nan
    finding = find_not_finite(tiny, lambda: replace(features, texts=texts))
    assert finding.rows == [2]
    finding = find_not_finite(tiny, lambda: replace(features, texts=texts), has_captions=False)
    assert finding.rows == []


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("weight", "value", "where"),
    [
        ("visual.conv1.weight", torch.nan, "the weight visual.conv1.weight"),
        ("logit_scale", torch.inf, "the weight logit_scale"),
        (
            "visual.transformer.resblocks.1.mlp.c_fc.weight",
            3e38,
            "the output of visual.transformer.resblocks.1",
        ),
        ("visual.conv1.weight", 3e38, "the output of visual.ln_pre"),
    ],
)
def test_first_nonfinite_tensor_is_reported(
    parts: int, weight: str, value: float, where: str, tiny: CLIP, inputs: dict[str, Tensor]
) -> None:
    tiny.state_dict()[weight].fill_(value)
    finding = find_not_finite(tiny, lambda: compute(tiny, inputs, parts))
    assert finding.where.startswith(where), finding.where
    assert not any(module._forward_hooks for module in tiny.modules())


def test_nonfinite_rows_are_reported(tiny: CLIP, inputs: dict[str, Tensor]) -> None:
    inputs["tokens"][2, 3] = 77
    tiny.state_dict()["token_embedding.weight"][77] = 3e38  # a word that one text has
    finding = find_not_finite(tiny, lambda: compute(tiny, inputs))
    assert finding.rows == [2] and "transformer" in finding.where


def test_nonfinite_gradient_is_found(tiny: CLIP, inputs: dict[str, Tensor]) -> None:
    def spoilt() -> Features:
        features = compute(tiny, inputs)
        assert tiny.text_projection.grad is not None
        tiny.text_projection.grad[0, 0] = torch.nan
        return features

    assert find_not_finite(tiny, spoilt).where == "the gradient of text_projection"


def test_samples_are_listed_by_rank_and_replaced(tmp_path: Path) -> None:
    list_not_finite(tmp_path, NAMES, step=4, rank=0)
    list_not_finite(tmp_path, NAMES[1:], step=4, rank=3)
    list_not_finite(tmp_path, NAMES, step=7, rank=0)
    records = [json.loads(line) for line in (tmp_path / "not_finite.jsonl").read_text().splitlines()]
    assert records == [{"step": 8, "shard": shard, "key": key} for shard, key in NAMES]
    assert len((tmp_path / "not_finite-3.jsonl").read_text().splitlines()) == 1


def test_unwritable_list_raises_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "not_finite.jsonl").mkdir()
    with pytest.raises(DataError, match=r"not_finite.jsonl cannot be written: Is a directory"):
        list_not_finite(tmp_path, NAMES, step=4, rank=0)


def test_message_reports_the_nonfinite_value(tmp_path: Path) -> None:
    config = Config(out=str(tmp_path), accumulate=3)

    def message(loss: float, norm: float) -> str:
        outcome = Outcome(
            totals={"faults": 0}, loss=loss, norm=norm, is_finite=False, is_spike=False, usual_norm=1.0,
            ids=torch.arange(2),
        )  # fmt: skip
        return str(diagnose_failed_step(config, outcome, "", step=4, names=lambda ids: [NAMES[i] for i in ids]))

    assert message(torch.nan, 1.0).startswith("the loss of step 5 is nan; step 4 is saved")
    assert message(torch.nan, torch.nan).startswith("the loss of step 5 is nan")
    assert message(2.5, torch.inf).startswith("the gradient of step 5 is inf")
    assert "\n" not in message(torch.nan, 1.0)
    assert "the same command with --replay accumulate=3, in one process, " in message(torch.nan, 1.0)
    assert len((tmp_path / "not_finite.jsonl").read_text().splitlines()) == len(NAMES)

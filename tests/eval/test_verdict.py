"""Tests of the verdict on a fine-tune: what it says of made-up rows, and how often its intervals are right."""

import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import clipkit
from clipkit.__main__ import main
from clipkit.formats import save_model
from clipkit.model import create_architecture
from clipkit.model.clip import create
from eval.metrics import Comparison, compare_correct, compare_means
from eval.results.records import VerdictRow
from eval.verdict import FineTune, _decide, _list_sizes, _sign_gain, _write_command, format_verdict

MODELS = ("last, step 9", "best, step 5", "alpha 0.5, step 5")
COMMANDS = {name: f"write {name}" for name in MODELS}


def build_rows(gains: dict[str, list[tuple[float, float]]]) -> list[VerdictRow]:
    """Return rows of (gain, half width) of each model, by dataset."""
    rows = []
    for dataset, pairs in gains.items():
        start = VerdictRow(dataset=dataset, metric="acc1", model="start weights", value=0.5, text="50.0%")
        rows.append(start)
        for model, (gain, half) in zip(MODELS, pairs, strict=True):
            rows.append(
                VerdictRow(
                    dataset=dataset, metric="acc1", model=model, value=0.5 + gain, text="x",
                    change=f"{100 * gain:+.1f}", gain=gain, low=gain - half, high=gain + half,
                )
            )  # fmt: skip
    return rows


PAIRS = st.lists(st.tuples(st.floats(-0.4, 0.4), st.floats(0.001, 0.3)), min_size=3, max_size=3)


@given(PAIRS, st.lists(PAIRS, max_size=2))
def test_better_is_said_only_of_an_interval_above_zero(
    held_out: list[tuple[float, float]], guards: list[list[tuple[float, float]]]
) -> None:
    gains = {"pairs": held_out, **{f"guard{i}": pairs for i, pairs in enumerate(guards)}}
    verdict = _decide(build_rows(gains), "pairs", "best, step 5", COMMANDS)
    better = [name for name, (gain, half) in zip(MODELS, held_out, strict=True) if gain - half > 0]
    assert verdict.sentences[0].startswith(f"{verdict.kind.capitalize()}: ")
    assert (verdict.kind == "better") == bool(better)
    if better:
        sums = {
            name: gain + (sum(pairs[i][0] for pairs in guards) / len(guards) if guards else 0)
            for i, (name, (gain, _)) in enumerate(zip(MODELS, held_out, strict=True))
            if name in better
        }
        assert verdict.command == f"write {max(sums, key=sums.__getitem__)}"
    else:
        assert not verdict.command and verdict.sentences[-1] == "Recommended: the start weights."
        gain, half = held_out[1]
        assert (verdict.kind == "worse") == (gain + half < 0)
    told = verdict.command.removeprefix("write ") or "best, step 5"
    lost = any(pairs[MODELS.index(told)][0] + pairs[MODELS.index(told)][1] < 0 for pairs in guards)
    assert any(text.startswith(f"Lost by {told}: ") for text in verdict.sentences) == lost
    assert len(format_verdict(verdict)) >= len(verdict.rows) + len(verdict.sentences)


def test_losses_are_unknown_without_guard_sets_above_chance() -> None:
    rows = build_rows({"pairs": [(0.1, 0.05)] * 3})
    told = _decide(rows, "pairs", "best, step 5", COMMANDS, ["digits", "emoji"]).sentences[1]
    assert told.endswith(
        "on all datasets of eval.guard (digits, emoji) the start weights are not above chance."
    )


def test_gains_of_ranks_are_relative_and_positive_if_lower() -> None:
    assert _sign_gain("image_to_text_mean_rank", -10, 40) == pytest.approx(0.25)
    assert _sign_gain("acc1", -0.1, 0.5) == pytest.approx(-0.1)


def draw_models(random: np.random.Generator, items: int, models: int) -> Tensor:
    """Draw which items the start weights (the first row) and other models have right, all with accuracy 1/2.

    Models agree on most items, as checkpoints of one training do.
    """
    easy = random.uniform(0, 1, items) < 0.5
    return torch.from_numpy(easy ^ (random.uniform(0, 1, (1 + models, items)) < 0.15))


@pytest.mark.parametrize(
    ("items", "models", "compare", "trials"),
    [(100, 20, compare_correct, 1000), (400, 80, compare_correct, 1000), (200, 12, compare_means, 150)],
)
def test_intervals_hold_for_the_model_that_is_chosen(
    items: int, models: int, compare: Callable[..., Comparison], trials: int
) -> None:
    """No model is better than the start weights, and the one with the best score is chosen."""
    random = np.random.default_rng(7)
    wrong = single = 0
    for _ in range(trials):
        rows = draw_models(random, items, models)
        best = 1 + int(rows[1:].sum(dim=1).argmax())
        single += compare(rows[0], rows[best]).low > 0
        wrong += compare(rows[0], rows[best], tests=models).low > 0
    assert single > 0.1 * trials  # the interval of one difference is wrong too often
    assert wrong <= 0.025 * trials


def test_models_without_exports_are_written_by_interpolation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = create(create_architecture("ViT-Ti-4-16"), name="ViT-Ti-4-16", seed=0)
    trained = create(create_architecture("ViT-Ti-4-16", image_tokens=9), name="ViT-Ti-4-16", seed=1)
    save_model(start, tmp_path / "start")
    save_model(trained, tmp_path / "run")
    last = tmp_path / "run"
    tune = FineTune(
        run=tmp_path / "run", weights=str(tmp_path / "start"), architecture="", load_start=clipkit.load, last=last,
        best=None, checkpoints=1,
    )  # fmt: skip
    command = _write_command(tune, last, sizes=_list_sizes(trained), has_export=False)
    monkeypatch.setattr("sys.argv", shlex.split(command))
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    written = clipkit.load(tmp_path / "run" / "recommended")
    assert written.architecture == trained.architecture
    for name, value in trained.state_dict().items():
        assert torch.equal(written.state_dict()[name], value)

"""Tests of CLIP's loss over all samples: against plain formulas and CLIP's loss, its state and settings."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from clipkit.config import load_config
from clipkit.errors import ConfigError
from clipkit.objectives import ObjectiveState, Outputs, Targets, select_objective
from clipkit.objectives.clip import clip_loss
from clipkit.objectives.global_clip import GlobalClip, global_clip_loss
from clipkit.training.costs import Machine, cost_table, run_costs, workloads_of
from tests.clipkit.plain_losses import error, given as given_batch, gradients, new_estimates, plain_global

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"


@settings(deadline=None)
@given(rows=st.integers(2, 9), seed=st.integers(0, 99), scale=st.sampled_from([0.0, 1.0, 14.3, 100.0]))
def test_without_memory_it_is_clips_loss(rows: int, seed: int, scale: float) -> None:
    batch = given_batch(rows, seed=seed, scale=scale)
    former = torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed))
    student = (batch.images, batch.texts, batch.scale)
    found = global_clip_loss(*student, former, gamma=1.0, pairs=rows).loss
    wanted = clip_loss(*student)
    assert error(found, wanted, floor=1e-3) < 1e-10
    for own, other in zip(gradients(found, batch), gradients(wanted, batch), strict=True):
        assert error(own, other, floor=1e-3) < 1e-10


@settings(deadline=None)
@given(
    draws=st.lists(st.lists(st.integers(0, 11), min_size=5, max_size=5), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    gamma=st.floats(0.01, 1),
    samples=st.integers(12, 10**5),
)
def test_steps_equal_plain_formula(draws: list[list[int]], seed: int, gamma: float, samples: int) -> None:
    """Draws with replacement: of a sample that is several times in a batch, the last estimate counts."""
    objective = GlobalClip(gamma=gamma)
    state = ObjectiveState(objective.create_state(samples))
    estimates = state.tensors["global_clip.estimates"]
    expected = estimates.clone()
    for step, numbers in enumerate(draws):
        batch = given_batch(5, seed=seed + step)
        outputs = Outputs(batch.images, batch.texts, batch.scale)
        former = expected[numbers]
        targets = Targets(
            identities=batch.identities,
            tokens=batch.identities,
            same="negatives",
            state=state,
            numbers=torch.tensor(numbers),
            progress=1.0,
        )
        found = objective.loss(outputs, targets)
        logits = batch.scale * batch.images @ batch.texts.T
        wanted = plain_global(logits, former, gamma=gamma, pairs=samples)
        assert error(found, wanted) < 1e-10
        for own, other in zip(gradients(found, batch), gradients(wanted, batch), strict=True):
            assert error(own, other, floor=1e-6) < 1e-10
        before = estimates.clone()
        skip = step == 1
        state.update(skip=torch.tensor(skip))
        if skip:
            assert torch.equal(estimates, before)
            continue
        _, new = new_estimates(logits.detach(), former, gamma)
        for row, number in enumerate(numbers):
            expected[number] = new[row].log()
        torch.testing.assert_close(estimates, expected, rtol=0, atol=1e-5)
        state.update(skip=torch.tensor(False))  # proposals are taken once
        torch.testing.assert_close(estimates, expected, rtol=0, atol=1e-5)
        expected.copy_(estimates)


def test_estimates_beyond_float32_stay_finite() -> None:
    images = torch.eye(2, 8).requires_grad_()
    texts = -torch.eye(2, 8).requires_grad_()  # cosine -1 with the own text, 0 with the other one
    scale = torch.tensor(100.0, requires_grad=True)
    loss, estimates = global_clip_loss(
        images, texts, scale, torch.full((2, 2), 100.0), gamma=0.5, pairs=10**6
    )
    torch.testing.assert_close(estimates, torch.full((2, 2), 100.0))
    assert loss.item() == pytest.approx(100 + math.log(10**6 - 1))
    loss.backward()
    assert images.grad is not None and images.grad.isfinite().all()


def test_weight_falls_by_a_cosine_to_gamma() -> None:
    objective = GlobalClip(gamma=0.2)
    found = [objective.weight_at(progress) for progress in (0, 0.125, 0.25, 0.5, 1)]
    assert found == pytest.approx([1, 0.6 + 0.4 / math.sqrt(2), 0.6, 0.2, 0.2])


def test_chance_is_the_loss_of_equal_logits() -> None:
    objective = GlobalClip()
    state = ObjectiveState(objective.create_state(300))
    features = torch.eye(1, 4).expand(3, 4)
    numbers = torch.arange(3)
    targets = Targets(
        identities=numbers[:, None], tokens=numbers[:, None], same="negatives", state=state, numbers=numbers
    )
    loss = objective.loss(Outputs(features, features, torch.tensor(9.0)), targets)
    assert loss.item() == pytest.approx(math.log(300)) == objective.chance(targets, 3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["loss.dims=[32]"], "loss.dims = [32] is invalid: cannot be combined with loss.name=global_clip"),
        (["loss.same=positives"], "expected negatives with loss.name=global_clip: set loss.same=negatives"),
        (["data.negatives=wrong"], "data.negatives = 'wrong' is invalid: cannot be combined with"),
        (["global_clip.gamma=0"], "global_clip.gamma = 0.0 is invalid: expected above 0, at most 1"),
    ],
)
def test_invalid_settings_are_rejected(changed: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, ["loss.name=global_clip", *changed])
    assert message in str(caught.value)


def test_estimate_states_the_bytes_of_the_state() -> None:
    config = load_config(QUICKSTART, ["loss.name=global_clip"])
    machine = Machine(gpu="", memory=None, peak=None, measured=True)
    works = workloads_of(config, world=1, shard_ranks=1, bf16=False)
    table = "\n".join(cost_table(run_costs(works, machine)))
    assert "8 bytes for each pair of data.train: state of loss.name=global_clip" in table
    assert GlobalClip.sample_bytes == GlobalClip().create_state(1)["global_clip.estimates"].nbytes


def test_settings_select_the_objective() -> None:
    config = load_config(QUICKSTART, ["loss.name=global_clip", "global_clip.gamma=0.5"])
    assert select_objective(config) == GlobalClip(gamma=0.5)
    with pytest.raises(ConfigError, match=r"has no effect unless loss\.name=global_clip is set"):
        load_config(QUICKSTART, ["global_clip.gamma=0.5"])

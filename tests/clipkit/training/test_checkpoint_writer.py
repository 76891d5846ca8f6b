"""Tests of the checkpoint writer, which copies the state and writes it in the background.

test_checkpoint.py covers the content of checkpoints and write failures.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from clipkit.config import to_toml
from clipkit.errors import CheckpointError
from clipkit.formats.checkpoint import latest_checkpoint
from clipkit.model.clip import CLIP
from clipkit.training.checkpoint import CheckpointWriter, load_training
from clipkit.training.ema import AveragedWeights
from clipkit.training.optim import adamw
from tests.clipkit.saved_runs import CONFIG, bits, same_bits, small, state, step
from tests.forked import Forked

__all__ = ["small"]  # a fixture


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[CheckpointWriter]:
    made = CheckpointWriter(tmp_path, to_toml(CONFIG), keep=2)
    yield made
    made.close()


@pytest.fixture
def optimizer(small: CLIP) -> torch.optim.Optimizer:
    made = adamw(small, CONFIG.optim)
    step(small, made, 0)
    return made


class SlowDisk:
    """Blocks writes until ``may_write`` is set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.may_write = threading.Event()

        def save(tensors: dict[str, Tensor], path: Path) -> None:
            assert self.may_write.wait(20)
            save_file(tensors, path)

        patch.setattr("clipkit.training.checkpoint.save_file", save)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return SlowDisk(monkeypatch)


def folder(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step_{number:08d}"


def test_training_continues_while_its_copy_is_written(
    small: CLIP, optimizer: torch.optim.Optimizer, writer: CheckpointWriter, disk: SlowDisk, tmp_path: Path
) -> None:
    then = {name: tensor.clone() for name, tensor in bits(small, optimizer).items()}
    writer.begin(small, optimizer, state(1))
    writer.wait_until_copied()
    step(small, optimizer, 1)
    with torch.no_grad():
        small.logit_scale.add_(1)
    writer.finish_if_done()
    assert writer.saved_step == 0 and latest_checkpoint(tmp_path) is None
    disk.may_write.set()
    writer.finish()
    assert writer.saved_step == 1 and latest_checkpoint(tmp_path) == folder(tmp_path, 1)
    again = CLIP(small.architecture, preprocess=small.preprocess).initialize()
    its_optimizer = adamw(again, CONFIG.optim)
    load_training(folder(tmp_path, 1), again, its_optimizer)
    assert same_bits(bits(again, its_optimizer), then)


def test_next_checkpoint_waits_for_the_previous_one(
    small: CLIP, optimizer: torch.optim.Optimizer, writer: CheckpointWriter, disk: SlowDisk, tmp_path: Path
) -> None:
    writer.begin(small, optimizer, state(1))
    with ThreadPoolExecutor(1) as other:
        second = other.submit(writer.begin, small, optimizer, state(2))
        with pytest.raises(TimeoutError):
            second.result(timeout=0.2)
        assert not folder(tmp_path, 1).exists()
        disk.may_write.set()
        second.result(timeout=20)
    assert writer.saved_step == 1 and folder(tmp_path, 1).is_dir()
    writer.finish()
    assert writer.saved_step == 2
    writer.begin(small, optimizer, state(3))
    writer.finish()
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*")) == [
        "step_00000002", "step_00000003",
    ]  # fmt: skip


def test_averaged_weights_are_the_model_and_trained_weights_are_stored_separately(
    small: CLIP, optimizer: torch.optim.Optimizer, writer: CheckpointWriter, tmp_path: Path
) -> None:
    averaged = AveragedWeights(small, 0.9)
    step(small, optimizer, 1)
    averaged.update(1)
    writer.begin(small, optimizer, state(2), averaged)
    writer.finish()
    stored, trained = (
        load_file(folder(tmp_path, 2) / f"{name}.safetensors") for name in ("model", "trained")
    )
    assert stored.keys() == small.state_dict().keys()
    for name, weight in small.named_parameters():
        assert torch.equal(trained[f"{name}/trained"], weight)
        assert torch.equal(stored[name], averaged.tensors()[name])
    assert not torch.equal(stored["visual.proj"], trained["visual.proj/trained"])

    other = CLIP(small.architecture, preprocess=small.preprocess).initialize()
    its = AveragedWeights(other, 0.9)
    load_training(folder(tmp_path, 2), other, adamw(other, CONFIG.optim), its)
    assert same_bits(bits(other), bits(small)) and same_bits(its.tensors(), averaged.tensors())
    with pytest.raises(CheckpointError, match=r"its weights are averaged; set optim\.average"):
        load_training(folder(tmp_path, 2), other, adamw(other, CONFIG.optim))


def test_background_failure_is_raised_by_finish(
    small: CLIP, optimizer: torch.optim.Optimizer, writer: CheckpointWriter, disk: SlowDisk, tmp_path: Path
) -> None:
    disk.may_write.set()
    writer.begin(small, optimizer, state(1))
    writer.finish()
    disk.may_write.clear()
    writer.begin(small, optimizer, state(2))
    half = tmp_path / "checkpoints" / ".step_00000002.partial"
    for path in half.iterdir():
        path.unlink()
    half.rmdir()  # as if the disk had been removed
    disk.may_write.set()
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 2 was not written: .*"):
        writer.finish()
    assert writer.saved_step == 1 and latest_checkpoint(tmp_path) == folder(tmp_path, 1)
    writer.begin(small, optimizer, state(3))  # the disk works again
    writer.finish()
    assert latest_checkpoint(tmp_path) == folder(tmp_path, 3)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("weight", ["logit_scale", "token_embedding.weight"])
def test_nonfinite_weights_never_replace_good_ones(
    value: float, weight: str, small: CLIP, optimizer: torch.optim.Optimizer, tmp_path: Path
) -> None:
    writer = CheckpointWriter(tmp_path, to_toml(CONFIG), keep=1)
    good = small.state_dict()[weight].clone()
    small.state_dict()[weight].view(-1)[-1] = value
    with pytest.raises(CheckpointError, match=f"initial weights of .* are not finite, first {weight}: set"):
        writer.save_now(small, optimizer, state(0))
    assert not (tmp_path / "checkpoints").exists()
    small.state_dict()[weight].copy_(good)
    writer.save_now(small, optimizer, state(1))

    averaged = AveragedWeights(small, 0.9)
    small.state_dict()[weight].view(-1)[-1] = value
    for average in (None, averaged):
        with pytest.raises(CheckpointError) as caught:
            writer.save_now(small, optimizer, state(2), average)
        message = str(caught.value)
        assert message.startswith(f"the weights after step 2 are not finite, first {weight}")
        assert ", and are not saved; the newest checkpoint is step 1: " in message and "\n" not in message
        assert latest_checkpoint(tmp_path) == folder(tmp_path, 1) and writer.saved_step == 1
    small.state_dict()[weight].copy_(good.fill_(3e38))  # large but finite
    writer.save_now(small, optimizer, state(2), averaged)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_00000002"]
    writer.close()


def test_optimizer_state_is_optional_at_step_0_only(
    small: CLIP, writer: CheckpointWriter, tmp_path: Path
) -> None:
    fresh = adamw(small, CONFIG.optim)
    writer.begin(small, fresh, state(0))
    writer.finish()
    assert load_training(folder(tmp_path, 0), small, fresh) == state(0)
    writer.begin(small, fresh, state(1))
    writer.finish()
    with pytest.raises(CheckpointError, match="the optimizer's state is for other parameters"):
        load_training(folder(tmp_path, 1), small, fresh)


def test_ranks_of_one_host_write_hybrid_models(forked: Forked, tmp_path: Path) -> None:
    """If one of them cannot write, all of them notice."""
    ended = forked.ranks("tests/clipkit/hybrid_program.py", str(tmp_path), world=4)
    failed = "True,the checkpoint of step 4 was not written: no space left"
    assert [process.stdout.strip() for process in ended] == [failed, failed, "False,", "False,"]

"""Tests of distributed training over gloo: gradients, broadcasts, launch variables, devices."""

import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import clipkit
from clipkit import distributed
from clipkit.distributed import check_launch, rank_and_world
from clipkit.errors import ConfigError
from clipkit.inference.stream import pick_device
from tests.forked import Forked

GRADIENTS = "tests/clipkit/gradient_program.py"
UNSCALED = ("none",)  # objectives that do not use the temperature


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, forked: Forked) -> dict[str, torch.Tensor]:
    out = tmp_path_factory.mktemp("one") / "gradients.safetensors"
    forked.ranks(GRADIENTS, str(out), world=1)
    return load_file(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "world", [1, 2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)]
)
def test_gradients_equal_single_process_full_batch(
    one_process: dict[str, torch.Tensor], tmp_path: Path, forked: Forked, world: int
) -> None:
    """Any number of ranks and parts, whole or sharded, each loss, patch dropout, locking, packed captions."""
    out = tmp_path / "many.safetensors"
    if world > 1:
        forked.ranks(GRADIENTS, str(out), world=world, timeout=540)
    many = load_file(out) if world > 1 else one_process
    assert world == 1 or any(" sharded " in name for name in many)
    for name, gradient in many.items():
        what, how, parameter = name.split("/")
        reference = one_process[f"{what}/1 float64/{parameter}"]
        floor = 1e-7 * float(one_process[f"{what}/1 float64/norm"])  # for gradients of only rounding error
        difference = float((gradient.double() - reference).norm() / reference.norm().clamp_min(floor))
        assert difference < (1e-10 if how.endswith("float64") else 1e-4), (name, difference)
    for what in {name.split("/")[0] for name in one_process}:
        if not what.startswith(UNSCALED):  # the temperature has a gradient
            assert float(one_process[f"{what}/1 float64/logit_scale"].abs()) > 1e-6
    assert float(one_process["siglip/1 float64/logit_bias"].abs()) > 1e-6


@pytest.mark.slow
def test_broadcast_bytes_reaches_every_rank(tmp_path: Path, forked: Forked) -> None:
    forked.ranks("tests/clipkit/bytes_program.py", str(tmp_path), world=2)
    contents = (b"x", bytes(range(256)) * 5000 + b"end", b"", b"\0" * 7)
    expected = [hashlib.sha256(content).hexdigest() for content in contents]
    assert [(tmp_path / str(rank)).read_text().split() for rank in range(2)] == [expected] * 2
    assert [distributed.broadcast_bytes(content) for content in (*contents, b"")] == [*contents, b""]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, None),
        ({"WORLD_SIZE": "4"}, "RANK, MASTER_ADDR, MASTER_PORT not set: start with torchrun"),
        ({"WORLD_SIZE": "four", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "WORLD_SIZE = 'four'"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK = 'x'"),
    ],
)
def test_incomplete_launch_variables_are_rejected(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], message: str | None
) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setitem(os.environ, name, value)
    if message is None:
        check_launch()
        return
    with pytest.raises(ConfigError) as caught:
        check_launch()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("rank", "world", "found"),
    [
        (None, None, (0, 1)),
        ("0", None, (0, 1)),
        (None, "1", (0, 1)),
        ("2", "3", (2, 3)),
        ("x", "2", "RANK = x and WORLD_SIZE = 2"),
        ("0", "0", "RANK = 0 and WORLD_SIZE = 0"),
        ("3", None, "RANK = 3 and WORLD_SIZE = not set"),
        ("3", "3", "RANK = 3 and WORLD_SIZE = 3"),
        (None, "2", "RANK = not set and WORLD_SIZE = 2"),
        ("-1", "2", "RANK = -1"),
    ],
)
def test_rank_and_world_reads_the_environment(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, world: str | None, found: tuple[int, int] | str
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if isinstance(found, tuple):
        assert rank_and_world() == found
        return
    with pytest.raises(ConfigError, match=found):
        rank_and_world()


@pytest.mark.parametrize(
    ("found", "device"), [("cuda", "cuda:1"), ("xpu", "xpu:1"), ("mps", "mps"), (None, "cpu")]
)
def test_auto_selects_the_accelerator_of_the_process(
    found: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = None if found is None else torch.device(found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: accelerator)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert str(distributed.select_device()) == pick_device(None) == pick_device("auto") == device
    if found != "cuda":  # not available on this machine
        assert str(distributed.start()) == device
    if found not in ("cuda", None):
        with pytest.raises(ConfigError, match="Unknown device 'auto'"):  # torch is built without it
            clipkit.load("no", device="auto")

"""A step between logged ones waits for no message and reads nothing from the device, on any number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forked import Forked
from tests.small_trainings import SETTINGS, write_pairs

RANKS = 256
# read two steps later, when they are known
LATER = {"tolist in guards.next_outcome": 1, "tolist in distributed.wait": 1}
# of data on the CPU: captions that were cut, and a decision that DeviceGated reads only on a CPU
ON_CPU = {"item in tokenizer.count_cut", "item in optim.step"}
MESSAGE = {"allreduce in distributed.start_totals": 1}  # started before the forward pass
CASES = {
    "adamw": ("optim.name=adamw", "optim.skip_above=3", "optim.average=0.9"),
    "lion": ("optim.name=lion",),
    "muon": ("optim.name=muon",),
    "siglip": ("optim.name=adamw", "loss.name=siglip", "loss.same=positives"),
    "prefixes": ("optim.name=adamw", "loss.dims=[8,16]"),
    "parts": ("optim.name=adamw", "accumulate=2"),
    "captions": ("optim.name=adamw", "caption.weight=1"),
    "masked": ("optim.name=adamw", "masked.weight=1"),
    "views": ("optim.name=adamw", "views.weight=1", "optim.average=0.9"),
    "samples": ("optim.name=adamw", "log.samples=true"),
    "patch dropout": ("optim.name=adamw", "model.patch_dropout=0.5"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("data") / "pairs", 2 * RANKS)


def run_step(forked: Forked, data: Path, out: Path, ranks: int, *settings: str) -> Any:
    """Return the counts and the order of what happens in a step, see tests/step_program.py."""
    chosen = {setting.partition("=")[0]: setting for setting in SETTINGS}
    more = (
        f"data.train={data}", f"out={out}", f"batch_size={2 * ranks}", "log.every_steps=100", "steps=6",
        "checkpoint.compare_every_steps=0",  # messages of simulated ranks have any content
    )  # fmt: skip
    chosen |= {setting.partition("=")[0]: setting for setting in (*more, *settings)}
    environment = {"CLIPKIT_CACHE": str(data.parent / "cache")}
    ended = forked.run("tests/step_program.py", [str(ranks), *chosen.values()], environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def events(forked: Forked, data: Path, out: Path, ranks: int, *settings: str) -> dict[str, int]:
    """Return how often a step sends each message and reads tensors."""
    counts: dict[str, int] = run_step(forked, data, out, ranks, *settings)["counts"]
    return {name: count for name, count in counts.items() if name not in ON_CPU}


@pytest.mark.parametrize("ranks", [1, 8, RANKS])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_all_messages_of_a_step(
    optimizer: str, ranks: int, forked: Forked, data: Path, tmp_path: Path
) -> None:
    expected = dict(LATER)
    if ranks > 1:
        shapes = 8 if optimizer == "muon" else 0  # of matrices, whose updates ranks exchange
        expected |= {
            **MESSAGE,
            "allgather_base in distributed.start_gathering": 1 + shapes,
            "allreduce in distributed.max_over_ranks": 1,
            "allreduce in distributed.sum_over_ranks": 2,
            "reduce_scatter_base in distributed.scatter_row_sums": 1,
            "gradients": 1 if ranks > 64 else 2,  # larger parts among many ranks
        }
    assert events(forked, data, tmp_path / "run", ranks, f"optim.name={optimizer}") == expected


@pytest.mark.parametrize("case", list(CASES))
def test_no_step_waits(case: str, forked: Forked, data: Path, tmp_path: Path) -> None:
    counts = events(forked, data, tmp_path / "run", RANKS, *CASES[case])
    reads = {name: count for name, count in counts.items() if name.startswith(("item", "tolist"))}
    assert reads == LATER
    messages = {name: count for name, count in counts.items() if "start_totals" in name}
    assert messages == MESSAGE
    assert not any("gather_row_counts" in name for name in counts)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_prefixes_exchange_texts_once(name: str, forked: Forked, data: Path, tmp_path: Path) -> None:
    """Ranks exchange the features of captions and their gradients once for the whole embedding and all prefixes."""
    settings = (*CASES["prefixes"], f"loss.name={name}")
    counts = events(forked, data, tmp_path / "run", RANKS, *settings)
    assert counts["allgather_base in distributed.start_gathering"] == 1
    assert counts["reduce_scatter_base in distributed.scatter_row_sums"] == 1


@pytest.mark.parametrize("settings", [(), ("loss.name=siglip", "loss.dims=[8,16]"), ("caption.weight=1",)])
def test_texts_are_sent_while_images_are_encoded(
    settings: tuple[str, ...], forked: Forked, data: Path, tmp_path: Path
) -> None:
    """Captions are gathered once, and the gradient of the large token embedding is sent before those of images."""
    order = run_step(forked, data, tmp_path / "run", RANKS, "optim.name=adamw", *settings)["order"]
    assert order == ["gather starts", "image tower", "wait", "token embedding", "first convolution"]

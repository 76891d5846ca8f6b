"""Tests of metric files and progress output, including killed and resumed runs."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from clipkit.batch import BadSample
from clipkit.config import load_config
from clipkit.errors import DataError
from clipkit.samples.traits import Decoding, TraitCounts
from clipkit.training import log as module
from clipkit.training.checkpoint import LoopState
from clipkit.training.log import Log, ProgressLine, _clock

FIGURES = {
    "loss": 1.25, "chance": 5.5, "samples_per_second": 100.0, "data_time": 0.05, "batch_time": 0.5, "scale": 14.3,
}  # fmt: skip
QUIET = ("log.tensorboard=false",)
QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.toml"


def open_log(run: Path, state: LoopState, *settings: str, opening: Sequence[str] = ()) -> Log:
    run.mkdir(exist_ok=True)
    config = load_config(QUICKSTART, [f"out={run}", *(settings or QUIET)])
    return Log(config, state, opening, device=torch.device("cpu"), decoding=Decoding())


def after(step: int, *, bad_samples: int = 0, transparent: int = 0, cut_captions: int = 0) -> LoopState:
    return LoopState(
        step=step, data="", bad_samples=bad_samples, transparent=transparent, cut_captions=cut_captions
    )


def write_state(log: Log, state: LoopState, loss: float) -> None:
    log.record_step(state, loss=loss, grad_norm=1.0)
    log.write({"scale": 14.3})


def write(log: Log, step: int, loss: float) -> None:
    write_state(log, after(step), loss)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_resume_removes_figures_after_the_checkpoint(tmp_path: Path) -> None:
    log = open_log(tmp_path, after(0))
    for step in (10, 20, 30):
        write(log, step, 1.0 / step)
    log.close()
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 40, "lo')  # truncated by a kill
    log = open_log(tmp_path, after(20))
    write(log, 30, 5.0)
    log.write_scores(30, {"digits/acc1": 0.5})
    log.close()
    assert [(line["step"], line["loss"]) for line in lines(path)] == [(10, 0.1), (20, 0.05), (30, 5.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_lines_after_the_checkpoint_are_removed_from_the_files_of_all_former_ranks(tmp_path: Path) -> None:
    names = (
        "metrics.jsonl",
        "results.jsonl",
        "bad_samples.jsonl",
        "bad_samples-1.jsonl",
        "bad_samples-12.jsonl",
    )
    for name in names:
        (tmp_path / name).write_text("".join(f'{{"step": {step}}}\n' for step in (4, 5, 6)))
    open_log(tmp_path, after(5)).close()
    for name in names:
        assert [line["step"] for line in lines(tmp_path / name)] == [4, 5]


def test_tensorboard_has_the_same_figures(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = open_log(tmp_path, after(0), "log.tensorboard=true")
    write(log, 10, 2.0)
    log.write_scores(10, {"digits/zero-shot/acc1": 0.25})
    log.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (line,) = lines(tmp_path / "metrics.jsonl")
    written = {f"train/{name}" for name in line if name != "step"}
    assert set(events.Tags()["scalars"]) == {*written, "digits/zero-shot/acc1"}
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(10, 2.0)]


def test_progress_prints_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (True, False):
        progress = ProgressLine(steps=100, done=0, shown=shown)
        progress.print_line("[bold]starting[/bold] runs/x")
        progress.print_line("bad sample replaced: a\x1b[2Jb\nc")
        progress.advance(1)
        progress.update(1, FIGURES)
        progress.update(2, FIGURES)  # too soon after the previous
        progress.close()
        printed = capsys.readouterr()
        assert printed.out == ""
        if not shown:
            assert printed.err == ""
            continue
        first, hostile, second, last = printed.err.splitlines()
        assert first == "[bold]starting[/bold] runs/x"
        assert hostile == "bad sample replaced: a\\x1b[2Jb\\nc"
        assert second == "step 1/100 loss 1.250 (chance 5.50) 100/s data 10% scale 14.3"
        assert last == second.replace(
            "step 1/", "step 2/"
        )  # the last figures are printed even if the run ends early


def test_last_step_and_remaining_time_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = ProgressLine(steps=50, done=20, shown=True)
    now += 300  # wait before the first step
    progress.update(21, FIGURES)
    for step in range(22, 51):
        now += 4
        progress.update(step, FIGURES)
    progress.close()
    told = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert [line[1] for line in told] == ["21/50", *(f"{step}/50" for step in range(24, 50, 3)), "50/50"]
    assert [line[-2:] for line in told[1:3]] == [["left", "1m44s"], ["left", "1m32s"]]
    assert "left" not in told[0] and "left" not in told[-1]


def test_terminal_keeps_the_last_figures_and_wraps_lines_between_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    progress = ProgressLine(steps=3, done=0, shown=True)
    progress.print_line("a line of words that is longer than the terminal is wide")
    progress.update(1, FIGURES)
    progress.update(2, FIGURES)
    progress.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err).replace("\r", "\n")
    assert "a line of words that is longer than the\n  terminal is wide" in shown
    assert shown.rstrip().endswith("step 2/3 loss 1.250 (chance 5.50) 100/s\n  data 10% scale 14.3")
    assert shown.count("step 2/3") == 1


def test_slow_rank_follows_the_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressLine(steps=9, done=0, shown=True)
    progress.update(1, FIGURES, "rank 3 +31% forward")
    assert capsys.readouterr().err.endswith("scale 14.3 rank 3 +31% forward\n")


def test_no_chance_level_is_shown_if_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressLine(steps=9, done=0, shown=True)
    progress.update(1, {name: value for name, value in FIGURES.items() if name != "chance"})
    assert "loss 1.250 100/s" in capsys.readouterr().err


def test_floor_is_shown_beside_chance(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressLine(steps=1, done=0, shown=True)
    progress.update(1, FIGURES | {"floor": 2.5494})
    assert "loss 1.250 (chance 5.50, floor 2.55) 100/s" in capsys.readouterr().err


def test_only_some_bad_samples_are_printed_and_the_rest_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path, after(0, bad_samples=10))
    capsys.readouterr()
    for i in range(3):
        bad = [BadSample(shard="0.tar", key=f"{i}{k}", cause="empty caption") for k in range(4)]
        log.add_bad_samples(
            i + 1, [*bad, BadSample(shard="0.tar", key="x", cause=f"caption of {i} characters")]
        )
    write_state(log, after(1, bad_samples=25), 1.0)  # too soon
    monkeypatch.setattr(module, "_BAD_EVERY_SECONDS", 0.0)
    for step, bad_samples in ((2, 25), (3, 25), (4, 1_026)):
        write_state(log, after(step, bad_samples=bad_samples), 1.0)
    log.close()
    printed = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("step ")]
    assert printed[0] == "bad sample replaced: 00 in 0.tar: empty caption"
    assert [line.split()[3] for line in printed[:5]] == ["00", "01", "02", "03", "x"]
    assert printed[5:] == [
        f"{many} bad samples so far, all in {tmp_path}/bad_samples*.jsonl; most often: empty caption"
        for many in ("25", "1,026")
    ]
    assert [line["step"] for line in lines(tmp_path / "bad_samples.jsonl")] == [1] * 5 + [2] * 5 + [3] * 5


def test_bad_samples_of_other_ranks_are_counted_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for before, printed in ((2, ""), (0, f"2 bad samples so far, all in {tmp_path}/bad_samples*.jsonl\n")):
        log = open_log(tmp_path, after(0, bad_samples=before))
        log.record_step(after(1, bad_samples=2), loss=1.0, grad_norm=1.0)
        log.close()
        assert capsys.readouterr().err == printed


def test_facts_of_a_step_may_arrive_after_the_next_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several = ("data.caption_count=3", "loss.same=ignored")
    log = open_log(tmp_path, after(0), *several, *QUIET, opening=["first", "", "second"])
    log.leave_out()
    for step in range(1, 6):
        log.add_bad_samples(step, [BadSample(shard="a", key=str(step), cause="empty")])
        if step > 2:
            log.record_step(after(step - 2, transparent=1), loss=0.5, grad_norm=1.0)
    log.write({"scale": 14.3})
    log.record_step(after(5, bad_samples=5, transparent=1, cut_captions=2), loss=0.5, grad_norm=1.0)
    log.close()
    log.print_data_summary(context_length=7)
    assert [(line["step"], line["loss"]) for line in lines(tmp_path / "metrics.jsonl")] == [(3, 0.5)]
    printed = capsys.readouterr().err.splitlines()
    batch_size = load_config(QUICKSTART).batch_size
    assert printed[:2] == ["first", "second"]
    (note,) = [line for line in printed if line.startswith("note: drawn so far")]
    assert f"1 of {batch_size} images is transparent" in note and printed.index(note) == 5
    assert f"2 of {5 * batch_size * 3:,} captions drawn in all" in printed[-1]
    assert printed[-3].startswith(
        f"{100 * 5 / (5 * batch_size + 5):.3g}% of the {5 * batch_size + 5} samples"
    )


def test_a_trait_is_noted_once_for_each_kind_of_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = open_log(tmp_path, after(0), "pixels.background=white", *QUIET)
    for images in ("drawn", "drawn", "dataset digits"):
        log.note_traits(images, TraitCounts(images=9, transparent=2, rotated=3))
    log.close()
    printed = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in printed] == ["drawn", "dataset digits"]
    assert all("EXIF" in line and "transparent" not in line for line in printed)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0m00s"), (59.7, "1m00s"), (101.3, "1m41s"), (119.6, "2m00s"), (7300, "121m40s")],
)
def test_remaining_time_is_in_minutes_and_seconds(seconds: float, text: str) -> None:
    assert _clock(seconds) == text


@pytest.mark.parametrize("end", ["nobody reads", "a full disk"])
def test_unwritable_stderr_does_not_stop_the_training(end: str) -> None:
    program = (
        "from clipkit.training.log import ProgressLine\nfrom clipkit.errors import run_command\n"
        "def main():\n"
        "    progress = ProgressLine(steps=9, done=0, shown=True)\n"
        "    for _ in range(3): progress.print_line('a line – ö')\n"
        "    progress.close()\n"
        "    print('went on')\n"
        "run_command(main)\n"
    )
    if end == "nobody reads":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open("/dev/full", os.O_WRONLY)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writing, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stdout) == (0, "went on\n")


def test_wandb_without_login_raises_one_line_error(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    program = (
        "import sys\nfrom pathlib import Path\n"
        "import torch\nfrom clipkit.config import load_config\nfrom clipkit.errors import run_command\n"
        "from clipkit.samples.traits import Decoding\n"
        "from clipkit.training.checkpoint import LoopState\nfrom clipkit.training.log import Log\n"
        "settings = ['out=' + sys.argv[1], 'log.tensorboard=false', 'log.wandb=mine']\n"
        "config, state = load_config(Path(sys.argv[2]), settings), LoopState(step=0, data='')\n"
        "run_command(lambda: Log(config, state, device=torch.device('cpu'), decoding=Decoding()))\n"
    )
    left_out = {name for name in os.environ if name.startswith("WANDB_")}
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path, QUICKSTART], capture_output=True, text=True, check=False,
        env={**environment, "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")},
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: log.wandb = 'mine', but wandb does not start: ")
    assert "run `wandb login`, or set WANDB_MODE=offline" in last


def test_unwritable_metrics_raise_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = open_log(tmp_path, after(0))
    with pytest.raises(DataError, match=r"metrics\.jsonl cannot be written: No space left on device"):
        write(log, 1, 1.0)
    log.close()

"""Tests of metric files and progress output, including killed and resumed runs."""

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clipkit.config import LogConfig
from clipkit.errors import DataError
from clipkit.training import metrics as module
from clipkit.training.metrics import BadSampleLines, MetricsLog, ProgressLine, _clock, drop_lines_after

FIGURES = {
    "loss": 1.25, "chance": 5.5, "samples_per_second": 100.0, "data_time": 0.05, "batch_time": 0.5, "scale": 14.3,
}  # fmt: skip
QUIET = LogConfig(tensorboard=False)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_resume_removes_figures_after_the_checkpoint(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, QUIET, "", step=0)
    for step in (10, 20, 30):
        log.write(step, {"loss": 1.0 / step})
    log.close()
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 40, "lo')  # truncated by a kill
    log = MetricsLog(tmp_path, QUIET, "", step=20)
    log.write(30, {"loss": 5.0})
    log.write_scores(30, {"digits/acc1": 0.5})
    log.close()
    assert lines(path) == [{"step": 10, "loss": 0.1}, {"step": 20, "loss": 0.05}, {"step": 30, "loss": 5.0}]
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_kept_lines_are_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    kept = [
        json.dumps({"step": 5, "dataset": "line\u2028separators\x85 \x0b and é"}, ensure_ascii=False),
        json.dumps({"step": None, "dataset": "of no step"}),
        json.dumps({"dataset": "without"}),
        json.dumps({"step": 7, "value": math.inf}),
    ]
    dropped = ['{"step": 8}', "[1]", "5", '"step"', '{"step": "7"}', "{", "", "null"]
    path.write_text("\n".join([*kept, *dropped]), encoding="utf-8")
    drop_lines_after(path, 7)
    assert path.read_text(encoding="utf-8") == "".join(line + "\n" for line in kept)
    drop_lines_after(tmp_path / "missing.jsonl", 7)
    assert not (tmp_path / "missing.jsonl").exists()


def test_tensorboard_has_the_same_figures(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = MetricsLog(tmp_path, LogConfig(), "", step=0)
    log.write(10, {"loss": 2.0})
    log.write_scores(10, {"digits/zero-shot/acc1": 0.25})
    log.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "digits/zero-shot/acc1"}
    assert [(one.step, one.value) for one in events.Scalars("train/loss")] == [(10, 2.0)]


def test_progress_prints_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (True, False):
        progress = ProgressLine(steps=100, done=0, shown=shown)
        progress.say("[bold]starting[/bold] runs/x")
        progress.say("bad sample replaced: a\x1b[2Jb\nc")
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
    progress.say("a line of words that is longer than the terminal is wide")
    progress.update(1, FIGURES)
    progress.update(2, FIGURES)
    progress.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err).replace("\r", "\n")
    assert "a line of words that is longer than the\n  terminal is wide" in shown
    assert shown.rstrip().endswith("step 2/3 loss 1.250 (chance 5.50) 100/s\n  data 10% scale 14.3")
    assert shown.count("step 2/3") == 1


def test_no_chance_level_is_shown_if_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressLine(steps=9, done=0, shown=True)
    progress.update(1, {name: value for name, value in FIGURES.items() if name != "chance"})
    assert "loss 1.250 100/s" in capsys.readouterr().err


def test_floor_is_shown_beside_chance(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressLine(steps=1, done=0, shown=True)
    progress.update(1, FIGURES | {"floor": 2.5494})
    assert "loss 1.250 (chance 5.50, floor 2.55) 100/s" in capsys.readouterr().err


def test_only_some_bad_samples_are_printed_and_the_rest_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = BadSampleLines(ProgressLine(steps=9, done=0, shown=True), Path("runs/x"), total=10)
    lines.sum_up(10, at_once=True)  # all were printed before
    for number in range(3):
        lines.found([{"shard": "0.tar", "key": f"{number}{k}", "cause": "empty caption"} for k in range(4)])
        lines.found([{"shard": "0.tar", "key": "x", "cause": f"caption of {number} characters"}])
    lines.sum_up(25)  # too soon
    monkeypatch.setattr(module, "_BAD_EVERY_SECONDS", 0.0)
    lines.sum_up(25)
    lines.sum_up(25)
    lines.sum_up(1_026)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "bad sample replaced: 00 in 0.tar: empty caption"
    assert [line.split()[3] for line in said[:5]] == ["00", "01", "02", "03", "x"]
    assert said[5:] == [
        f"{many} bad samples so far, all in runs/x/bad_samples*.jsonl; most often: empty caption"
        for many in ("25", "1,026")
    ]


def test_bad_samples_of_other_ranks_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    lines = BadSampleLines(ProgressLine(steps=9, done=0, shown=True), Path("run"), total=0)
    lines.sum_up(2, at_once=True)
    assert capsys.readouterr().err == "2 bad samples so far, all in run/bad_samples*.jsonl\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0m00s"), (59.7, "1m00s"), (101.3, "1m41s"), (119.6, "2m00s"), (7300, "121m40s")],
)
def test_remaining_time_is_in_minutes_and_seconds(seconds: float, text: str) -> None:
    assert _clock(seconds) == text


@pytest.mark.parametrize("end", ["nobody reads", "a full disk"])
def test_unwritable_stderr_does_not_stop_the_training(end: str) -> None:
    program = (
        "from clipkit.training.metrics import ProgressLine\nfrom clipkit.errors import run_command\n"
        "def main():\n"
        "    progress = ProgressLine(steps=9, done=0, shown=True)\n"
        "    for _ in range(3): progress.say('a line – ö')\n"
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
        "from clipkit.config import LogConfig\nfrom clipkit.errors import run_command\n"
        "from clipkit.training.metrics import MetricsLog\n"
        "log = LogConfig(tensorboard=False, wandb='mine')\n"
        "run_command(lambda: MetricsLog(Path(sys.argv[1]), log, '', step=0).close())\n"
    )
    left_out = {name for name in os.environ if name.startswith("WANDB_")}
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=False,
        env={**environment, "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")},
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: log.wandb = 'mine', but wandb does not start: ")
    assert "run `wandb login`, or set WANDB_MODE=offline" in last


def test_unwritable_metrics_raise_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = MetricsLog(tmp_path, QUIET, "", step=0)
    with pytest.raises(DataError, match=r"metrics\.jsonl cannot be written: No space left on device"):
        log.write(1, {"loss": 1.0})
    log.close()

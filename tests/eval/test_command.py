"""Tests of eval commands: tables, results files, messages and exit status."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clipkit import CLIP
from clipkit.config import Config
from clipkit.errors import CheckpointError, DataError, run_command
from clipkit.model.clip import create
from clipkit.training.checkpoint import LoopState, save_checkpoint
from eval import read_results, weights_id
from eval.__main__ import main
from tests.forked import Forked

WriteDataset = Callable[..., Path]


@pytest.fixture
def run(model: CLIP, tmp_path: Path) -> Path:
    """A run folder with one checkpoint."""
    state = LoopState(step=40, data="none")
    save_checkpoint(tmp_path / "run", model, torch.optim.AdamW(model.parameters()), state, Config(), keep=1)
    return tmp_path / "run"


class Command:
    """Run ``python -m eval`` in a folder."""

    def __init__(self, forked: Forked) -> None:
        self.forked = forked

    def __call__(self, *arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
        environment = {"COLUMNS": "80", "CLIPKIT_CACHE": os.environ["CLIPKIT_CACHE"]}
        return self.forked.run("eval/__main__.py", [*map(str, arguments)], environment, cwd=folder)


@pytest.fixture
def command(forked: Forked) -> Command:
    return Command(forked)


def test_zero_shot_prints_a_table_and_writes_lines(
    command: Command, run: Path, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    colours, shades = write_dataset("A/test"), write_dataset("B/test")
    done = command("zero-shot", "--model", run, "--data", colours, "--data", shades, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.strip().splitlines()
    assert lines[0].split() == ["dataset", "metric", "value", "%", "95%", "interval", "chance", "%", "n"]
    assert max(map(len, lines[:-1])) <= 80 and "\x1b" not in done.stdout and "…" not in done.stdout
    assert re.search(r"A-test +acc1 +\d+\.\d +\d+\.\d–\d+\.\d +14\.29 +23\b", done.stdout)
    assert lines[-1] == f"wrote 8 lines to {run / 'results.jsonl'}"
    results = read_results(run / "results.jsonl")
    assert [(line["dataset"], line["step"]) for line in results] == [("A-test", 40)] * 4 + [
        ("B-test", 40)
    ] * 4
    checkpoint = run / "checkpoints" / "step_00000040"
    assert results[0]["weights"] == weights_id(str(checkpoint))[0]


def test_unavailable_tasks_are_reported_and_others_are_scored(
    run: Path, write_dataset: WriteDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_dataset(), tmp_path / "r.jsonl"
    tasks = ["--task", "few-shot", "--task", "zero-shot", "--task", "retrieval"]
    asked = ["run", "--model", str(run), "--data", str(data), "--out", str(out), *tasks]
    assert main([*asked, "--shots", "2", "1"]) == 0
    assert {line["task"] for line in read_results(out)} == {"zero-shot"}
    said = capsys.readouterr().err.splitlines()
    assert sorted(line.partition(": ")[0] for line in said) == ["not scored"] * 2
    assert "no captions" in "".join(said) and "no train split" in "".join(said)
    assert main([*asked, "--shots", "1", "2", "--model", f"{run}/checkpoints", "--skip-existing"]) == 0
    assert capsys.readouterr().err.splitlines()[0] == f"some scores of {run} are missing:"
    assert len(read_results(out)) == 4


def test_retrieval_of_checkpoint_is_written_to_out(
    command: Command, run: Path, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    data = write_dataset(labels=[None] * 12, captions=[f"thing {i}" for i in range(12)], class_names=None)
    checkpoint = run / "checkpoints" / "step_00000040"
    done = command("retrieval", "--model", checkpoint, "--data", data, "--out", "own.jsonl", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line["metric"] for line in read_results(tmp_path / "own.jsonl")] == [
        f"{way}_{metric}"
        for way in ("image_to_text", "text_to_image")
        for metric in ("R@1", "R@5", "R@10", "mean_rank", "median_rank")
    ] + ["mean_R@1"]


def test_open_clip_training_folder_is_scored(
    model: CLIP, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    """With and without params.txt, as a run folder and as its checkpoints folder."""
    theirs, data = create("ViT-S-32", seed=0), write_dataset()
    run = tmp_path / "logs" / "run"
    (run / "checkpoints").mkdir(parents=True)
    for epoch in (2, 10):
        torch.save(
            {"epoch": epoch, "state_dict": theirs.state_dict()}, run / "checkpoints" / f"epoch_{epoch}.pt"
        )
    with pytest.raises(CheckpointError, match="specify the architecture by --name"):
        main(["zero-shot", "--model", str(run), "--data", str(data)])
    with pytest.warns(UserWarning, match="assuming CLIP's mean, std, .* no published weights of ViT-S-32"):
        main(["zero-shot", "--model", str(run), "--data", str(data), "--name", "ViT-S-32"])
    (run / "params.txt").write_text("model: ViT-S-32\n")
    main(["zero-shot", "--model", str(run / "checkpoints"), "--data", str(data)])
    results = read_results(run / "results.jsonl")
    assert len(results) == 8
    newest = run / "checkpoints" / "epoch_10.pt"
    assert {line["weights"] for line in results} == {weights_id(str(newest))[0]}


def test_unwritable_out_fails_before_scoring(
    run: Path, write_dataset: WriteDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.run.run_model", lambda *_, **__: pytest.fail("it was scored"))
    (tmp_path / "file").write_text("")
    data = write_dataset()
    for out, cause in ((tmp_path / "file" / "x.jsonl", "Not a directory"), (tmp_path, "Is a directory")):
        with pytest.raises(DataError, match=f"^cannot write {out}: {cause}$"):
            main(["zero-shot", "--model", str(run), "--data", str(data), "--out", str(out)])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_scores_that_cannot_be_written_are_printed(
    run: Path, write_dataset: WriteDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_dataset("set[red]")
    with pytest.raises(DataError, match="cannot write /dev/full: No space left"):
        main(["zero-shot", "--model", str(run), "--data", str(data), "--out", "/dev/full"])
    assert re.search(r"set\[red\] +acc1 +\d+\.\d ", capsys.readouterr().out)


def test_invalid_arguments_print_one_line_and_exit_1(
    command: Command,
    run: Path,
    write_dataset: WriteDataset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write_dataset()
    for arguments, message in (
        (["zero-shot", "--model", "none", "--data", data], "no model at none"),
        (["zero-shot", "--model", run, "--data", data, "--data", "nowhere"], "no dataset 'nowhere'"),
        (["retrieval", "--model", run, "--data", data], "dataset colours has no captions"),
        (
            ["zero-shot", "--model", run, "--data", data, "--batch-size", "0"],
            "'0' is not a whole number from 1 to",
        ),
        (
            ["zero-shot", "--model", run, "--data", data, "--batch-size", "9" * 5000],
            "' is not a whole number",
        ),
        (["zero-shot", "--model", "~nouser/x", "--data", data], "no model at '~nouser/x'"),
        (["zero-shot", "--model", "x" * 5000, "--data", data], "File name too long"),
        (["zero-shot", "--model", run, "--data", "~nouser/x"], "no dataset '~nouser/x'"),
        (["zero-shot", "--model", run, "--data", data, "--device", "toaster"], "unknown --device 'toaster'"),
        (["zero-shot", "--data", data], "required: --model"),
    ):
        with pytest.raises(SystemExit) as left:
            run_command(lambda given=arguments: main([str(one) for one in given]))  # type: ignore[misc]
        assert left.value.code == 1
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and message in err and err.count("\n") == 1
    assert not (run / "results.jsonl").exists()
    done = command("zero-shot", "--model", "none", "--data", data, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)


def test_ctrl_c_while_torch_loads_prints_one_line() -> None:
    command = [sys.executable, "-m", "eval", "run", "--suite", "builtin", "--model", "runs/none"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while "torch" not in Path(f"/proc/{process.pid}/maps").read_text():  # takes seconds from here
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1] == "stopped; nothing was done\n"
    assert process.returncode == 130

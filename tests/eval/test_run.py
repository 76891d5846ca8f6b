"""Tests of the command run: many datasets and tasks in one call, skipped scores and failures."""

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from clipkit import CLIP
from clipkit.config import Config
from clipkit.errors import ConfigError, DataError
from clipkit.model.zero_shot import attach_class_head
from clipkit.training.checkpoint import LoopState, save_checkpoint
from eval import read_results
from eval.__main__ import main
from eval.datasets.targets import find_targets
from eval.results.table import read_table
from tests.eval.conftest import CLASSES, png
from tests.forked import Forked

WriteDataset = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[2]
LABELS = tuple(i % 7 for i in range(60))


@pytest.fixture
def run(model: CLIP, tmp_path: Path) -> Path:
    """A run folder with one checkpoint."""
    state = LoopState(step=40, data="none")
    save_checkpoint(tmp_path / "run", model, torch.optim.AdamW(model.parameters()), state, Config(), keep=1)
    return tmp_path / "run"


@pytest.fixture
def probed(write_dataset: WriteDataset) -> Path:
    """A dataset with train and test splits, labels and captions, without a card."""
    folder = write_dataset("probed", labels=LABELS, captions=[f"thing {i}" for i in range(60)], split="train")
    test = write_dataset("aside", labels=LABELS[:23], captions=[f"thing {i}" for i in range(23)])
    shutil.copytree(test / "test", folder / "test")
    (folder / "card.json").unlink()
    return folder


def values(path: Path) -> dict[tuple[str, ...], float]:
    """Map each score in a results file to its value, and check that no score occurs twice."""
    lines = read_results(path)
    found = {
        tuple(line[key] for key in ("dataset", "task", "setting", "metric")): line["value"] for line in lines
    }
    assert len(found) == len(lines)
    return found


def test_all_tasks_are_scored_and_existing_scores_skipped(
    run: Path, probed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.jsonl"
    tasks = ["zero-shot", "retrieval", "linear-probe", "few-shot", "knn"]
    named = [argument for task in tasks for argument in ("--task", task)]
    arguments = ["run", "--model", str(run), "--data", str(probed), "--out", str(out), *named]
    assert main([*arguments, "--shots", "1", "2", "--layers"]) == 0
    found = values(out)
    assert {task for _, task, _, _ in found} == set(tasks)
    assert {setting for _, task, setting, _ in found if task == "linear-probe"} == {"", "layer 1"}
    for line in read_results(out):
        assert line["model"] == str(run) and line["step"] == 40 and line["seconds"] >= 0
        assert len(line["model_hash"]) == 32 and line["gflops"] > 0
    assert list((tmp_path / "r.details").glob("*.json"))
    before = out.read_bytes()
    capsys.readouterr()
    assert main([*arguments, "--shots", "1", "2", "--layers", "--skip-existing"]) == 0
    assert out.read_bytes() == before
    assert f"wrote 0 lines to {out}, skipped {len(found)} existing" in capsys.readouterr().out
    assert main([*arguments, "--shots", "1", "--layers", "--skip-existing"]) == 0  # different shots
    added = read_results(out)[len(found) :]
    assert {line["task"] for line in added} == {"few-shot"}


@pytest.mark.long
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no kill -9")
def test_rerun_after_kill_gives_same_scores(
    run: Path, probed: Path, write_dataset: WriteDataset, forked: Forked, tmp_path: Path
) -> None:
    other = write_dataset("other", labels=[i % 7 for i in range(40)])
    named = ["--data", str(probed), "--data", str(other), "--task", "zero-shot", "--skip-existing"]

    def arguments(name: str) -> list[str]:
        return ["run", "--model", str(run), *named, "--out", str(tmp_path / f"{name}.jsonl")]

    def to_the_end(name: str) -> None:
        done = forked.run("eval/__main__.py", arguments(name), {"CLIPKIT_CACHE": str(tmp_path / name)})
        assert done.returncode == 0, done.stderr

    to_the_end("whole")
    environment = {**os.environ, "CLIPKIT_CACHE": str(tmp_path / "again"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "eval", *arguments("again")]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while process.poll() is None and not (tmp_path / "again" / "features").exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(random.uniform(0, 0.3))
    process.kill()
    process.wait()
    to_the_end("again")
    assert values(tmp_path / "again.jsonl") == values(tmp_path / "whole.jsonl")


@pytest.mark.parametrize("ranks", [False, pytest.param(True, marks=pytest.mark.long)])
def test_concurrent_processes_give_same_scores(
    run: Path,
    probed: Path,
    forked: Forked,
    tmp_path: Path,
    ranks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Independent processes with one cache, and two ranks that share the work."""
    alone = [
        "run",
        "--model",
        str(run),
        "--data",
        str(probed),
        "--task",
        "zero-shot",
        "--task",
        "knn",
        "--out",
    ]
    main([*alone, str(tmp_path / "alone.jsonl"), "--features", ""])
    if ranks:
        monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path / "cache"))
        forked.ranks("eval/__main__.py", *alone, str(tmp_path / "both.jsonl"), "--features", "", world=2)
        assert values(tmp_path / "both.jsonl") == values(tmp_path / "alone.jsonl")
        return

    def one(name: str) -> None:
        out, cache = tmp_path / f"{name}.jsonl", {"CLIPKIT_CACHE": str(tmp_path / "cache")}
        done = forked.run("eval/__main__.py", [*alone, str(out)], cache)
        assert done.returncode == 0, done.stderr
        assert values(out) == values(tmp_path / "alone.jsonl")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, ["one", "two"]))


def test_suite_continues_without_missing_or_incomplete_datasets(
    run: Path, write_dataset: WriteDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    out = tmp_path / "r.jsonl"
    names = [f"pet {i}" for i in range(37)]
    pets = write_dataset("pets", labels=[i % 37 for i in range(50)], class_names=names)
    shutil.copytree(pets, root / "wds_vtab-pets")
    arguments = ["run", "--suite", "clip27", "--data-root", str(root), "--model", str(run), "--out", str(out)]
    assert main([*arguments, "--data", str(write_dataset("mine"))]) == 1  # pets has too few images
    said = capsys.readouterr().err
    assert "not scored: dataset pets: split 'test' has 50 images, its card says 3,669" in said
    assert f"not found: mnist: not under {root}; published at hf://datasets/clip-benchmark/wds_mnist" in said
    assert {line["dataset"] for line in read_results(out)} == {"mine"}


def test_verify_compares_scores_with_expected_ones(
    run: Path, probed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "Things in colours", "--data", str(probed)]) == 0
    assert main(["run", "--model", str(run), "--data", str(probed), "--out", str(tmp_path / "r.jsonl")]) == 0
    measured = {line["metric"]: line["value"] for line in read_results(tmp_path / "r.jsonl")}
    assert list(measured)[:3] == ["acc1", "acc5", "mean_per_class_recall"]

    def expect(value: float, tolerance: float) -> int:
        card = (probed / "card.toml").read_text().split("\n[[expected]]")[0]
        (probed / "card.toml").write_text(
            f'{card}\n[[expected]]\ntask = "zero-shot"\nmetric = "acc1"\nprompts = "own"\n'
            f'tolerance = {tolerance}\nsource = "a test"\n\n[expected.values]\n"open_clip:stand/in" = {value}\n'
        )
        capsys.readouterr()
        arguments = ["verify", "--model", str(run), "--as", "open_clip:stand/in", "--data", str(probed)]
        return main([*arguments, "--out", str(tmp_path / "r.jsonl")])

    assert expect(measured["acc1"] + 0.009, 0.01) == 0
    assert "holds" in capsys.readouterr().out
    assert expect(measured["acc1"] + 0.011, 0.01) == 1
    told = capsys.readouterr().out
    assert "FAILS" in told and "expected by a test" in told
    with pytest.raises(ConfigError, match="no scores are known for 'somebody'"):
        main(["verify", "--model", str(run), "--as", "somebody", "--data", str(probed)])


def test_new_card_is_not_overwritten_and_is_validated(run: Path, probed: Path, tmp_path: Path) -> None:
    main(["new", "Things in colours", "--data", str(probed)])
    with pytest.raises(ConfigError, match="already exists"):
        main(["new", "Again", "--data", str(probed)])
    card = (probed / "card.toml").read_text()
    assert 'title = "Things in colours"' in card
    (probed / "card.toml").write_text(card.replace('metric = "acc1"', 'metric = "ece"'))
    with pytest.raises(DataError, match=r"card.toml: metric"):
        main(["run", "--model", str(run), "--data", str(probed), "--out", str(tmp_path / "r.jsonl")])


def test_results_of_run_are_reported(
    run: Path, probed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.jsonl"
    main(
        [
            "run",
            "--model",
            str(run),
            "--data",
            str(probed),
            "--task",
            "zero-shot",
            "--task",
            "retrieval",
            "--out",
            str(out),
        ]
    )
    assert (
        main(["report", str(out), "--csv", str(tmp_path / "t.csv"), "--out", str(tmp_path / "page.html")])
        == 0
    )
    assert "<title>" in (tmp_path / "page.html").read_text()
    assert "probed" in (tmp_path / "t.csv").read_text()
    capsys.readouterr()
    main(["report", str(out), "--markdown", "-"])
    assert capsys.readouterr().out.startswith("| Dataset |")
    with pytest.raises(ConfigError, match="are the same model"):
        main(["compare", str(out), str(out)])
    with pytest.raises(ConfigError, match="no results at"):
        main(["report", str(tmp_path / "none.jsonl")])
    capsys.readouterr()
    main(["list"])
    assert "clip27" in capsys.readouterr().out
    assert json.loads(out.read_text().splitlines()[0])["prompt_set"] == "own"


def test_superclasses_of_card_are_scored(run: Path, probed: Path, tmp_path: Path) -> None:
    """Confusing classes of one superclass is no error; the page shows the confusion of superclasses."""
    main(["new", "Things in colours", "--data", str(probed)])
    card = probed / "card.toml"
    grouped = (
        '\n[superclasses]\nlight = ["yellow", "white", "grey"]\ndark = ["red", "green", "blue", "black"]\n'
    )
    card.write_text(card.read_text() + grouped)
    out = tmp_path / "r.jsonl"
    main(["run", "--model", str(run), "--data", str(probed), "--out", str(out)])
    found = {metric: value for (_, _, _, metric), value in values(out).items()}
    details = json.loads(next((tmp_path / "r.details").glob("*.json")).read_text())
    assert details["superclass_names"] == ["dark", "light"]
    assert found["acc1"] < found["superclass_acc1"] <= 1
    main(["report", str(out)])
    assert "By superclass" in (tmp_path / "scores.html").read_text()


def rewrite(folder: Path, change: Callable[[str, bytes], bytes]) -> None:
    """Change members of a split's tars without changing their sizes."""
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            members = [(member, tar.extractfile(member).read()) for member in tar.getmembers()]  # type: ignore[union-attr]
        with tarfile.open(path, "w") as tar:
            for member, data in members:
                changed = change(member.name, data)
                assert len(changed) == len(data)
                tar.addfile(member, io.BytesIO(changed))


def test_scores_are_computed_again_after_their_inputs_change(
    run: Path, probed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.jsonl"
    tasks = ["--task", "zero-shot", "--task", "knn", "--neighbours", "3"]
    arguments = [
        "run",
        "--model",
        str(run),
        "--data",
        str(probed),
        *tasks,
        "--out",
        str(out),
        "--skip-existing",
    ]

    def scored() -> set[str]:
        before = len(read_results(out))
        assert main(arguments) == 0
        capsys.readouterr()
        return {line["task"] for line in read_results(out)[before:]}

    assert scored() == {"zero-shot", "knn"}
    assert scored() == set()
    turned = {"0": b"1", "1": b"0"}

    def other_labels(name: str, data: bytes) -> bytes:
        return turned.get(data.decode(), data) if name.endswith(".cls") else data

    rewrite(probed / "train", other_labels)
    assert scored() == {"knn"}
    rewrite(probed / "test", other_labels)
    assert scored() == {"zero-shot", "knn"}
    (probed / "zeroshot_classification_templates.txt").write_text("a thing of {c} colour\n")
    assert scored() == {"zero-shot"}
    lines = out.read_text().splitlines()  # as after a full disk during the last task
    out.write_text("\n".join(lines[:-2]) + "\n" + lines[-2][:30])
    assert scored() == {"zero-shot"}
    assert scored() == set()


def test_folder_named_like_suite_dataset_is_rejected_with_the_suite(
    run: Path, write_dataset: WriteDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = write_dataset("digits")
    arguments = ["--model", str(run), "--out", str(tmp_path / "r.jsonl")]
    with monkeypatch.context() as patch:  # only the fastest dataset of the suite
        patch.setattr("eval.run.open_suites", lambda *_, **__: (find_targets(["digits"]), []))
        with pytest.raises(
            DataError, match=r"two datasets would both be named digits \(yours and the suite's"
        ):
            main(["run", "--data", str(mine), "--suite", "builtin", *arguments])
    assert main(["run", "--data", str(mine), *arguments]) == 0
    main(["report", str(tmp_path / "r.jsonl"), "--csv", str(tmp_path / "t.csv")])
    assert "builtin" not in (tmp_path / "t.csv").read_text()


def test_missing_model_or_layer_does_not_stop_other_scores(
    run: Path, probed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.jsonl"
    other = tmp_path / "other"
    shutil.copytree(run, other)
    models = ["--model", str(run), "--model", str(tmp_path / "none"), "--model", str(other)]
    tasks = ["--task", "linear-probe", "--task", "zero-shot", "--layers", "9"]
    assert main(["run", *models, "--data", str(probed), *tasks, "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert "not scored: no model at" in said
    assert "not scored: no layer 9: the image tower has 1 that can be probed" in said
    assert {line["model"] for line in read_results(out)} == {str(run), str(other)}
    with pytest.raises(ConfigError, match="--prompts opeani: no dataset has this prompt set"):
        main(["run", *models, "--data", str(probed), "--prompts", "opeani", "--out", str(out)])


def test_invalid_card_does_not_stop_other_datasets(
    run: Path, write_dataset: WriteDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.jsonl"
    wrong, good = write_dataset("wrong"), write_dataset("good")
    (wrong / "card.toml").write_text('tasks = ["zero-shot"]\nmetric = "acc1"\nsplit = 1\n')
    arguments = ["run", "--model", str(run), "--out", str(out), "--data", str(wrong)]
    assert main([*arguments, "--data", str(good)]) == 1
    told = f"not scored: {wrong}/card.toml: Object contains unknown field `split`\n"
    assert capsys.readouterr().err == told
    assert {line["dataset"] for line in read_results(out)} == {"good"}
    other = write_dataset("other")
    (other / "card.toml").write_text("tasks = [")
    with pytest.raises(DataError, match="unknown field `split`"):
        main([*arguments, "--data", str(other)])
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"not scored: {other}/card.toml is not TOML")
    assert len(read_results(out)) == 4


def test_task_without_train_split_does_not_stop_other_tasks(
    run: Path, write_dataset: WriteDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.jsonl"
    arguments = ["run", "--model", str(run), "--data", str(write_dataset()), "--out", str(out)]
    assert main([*arguments, "--task", "knn", "--task", "zero-shot"]) == 0
    assert "not scored: dataset colours has no train split, which knn learns from" in capsys.readouterr().err
    assert {line["task"] for line in read_results(out)} == {"zero-shot"}
    assert main([*arguments, "--task", "knn"]) == 1


@pytest.mark.parametrize("task", ["knn", "linear-probe"])
def test_digits_have_no_split_to_learn_from(
    task: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([task, "--model", str(run), "--data", "digits", "--out", str(tmp_path / "r.jsonl")]) == 1
    assert (
        f"not scored: dataset digits has no train split, which {task} learns from: of the built-in datasets, emoji "
        "and cues have a train split with labels\n"
    ) in capsys.readouterr().err


def test_train_split_without_labels_is_refused_before_its_images_are_encoded(
    run: Path, write_dataset: WriteDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_dataset()
    unlabeled = write_dataset("more", labels=[None] * 4, captions=["a"] * 4, split="train")
    shutil.copytree(unlabeled / "train", folder / "train")
    arguments = ["knn", "--model", str(run), "--data", str(folder), "--out", str(tmp_path / "r.jsonl")]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "split train of dataset colours has no labels, which knn learns from: add a label to each" in error


def test_class_head_is_scored_on_datasets_of_its_classes(
    model: CLIP, write_dataset: WriteDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = attach_class_head(model, ["red", "green", "blue"], torch.randn(3, model.architecture.embed_dim))
    state = LoopState(step=1, data="none")
    save_checkpoint(tmp_path / "head", head, torch.optim.AdamW(head.parameters()), state, Config(), keep=1)
    fitting = write_dataset("fitting", labels=[0, 1, 2], class_names=["blue", "green", "red"])
    others = write_dataset("others", labels=[0, 1, 2], class_names=["blue", "green", "purple"])
    captions = write_dataset("captions", labels=[None] * 3, captions=["a", "b", "c"], class_names=None)
    given = [part for folder in (others, captions, fitting) for part in ("--data", str(folder))]
    command = ["run", *given, "--model", str(tmp_path / "head"), "--features", ""]
    assert main(command) == 0
    told = capsys.readouterr().err
    assert (
        "dataset others cannot be scored by zero-shot: 'purple' is not one of the model's 3 classes" in told
    )
    assert "dataset captions cannot be scored by retrieval: 'a' is not one of the model's 3 classes" in told
    assert told.count("linear-probe, few-shot, knn and fine-tune need no names") == 2
    assert {line["dataset"] for line in read_results(tmp_path / "head/results.jsonl")} == {"fitting"}


def test_images_in_both_splits_are_reported(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(24):
        folders = ["train"] if number < 12 else ["test"]
        for split in folders if number % 6 else ["train", "test"]:
            path = tmp_path / "photos" / split / CLASSES[number % 2] / f"{split}{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(number))
    out = tmp_path / "r.jsonl"
    given = ["run", "--model", str(run), "--data", str(tmp_path / "photos"), "--out", str(out)]
    tasks = ["zero-shot", "knn", "linear-probe"]
    assert main([*given, *(part for task in tasks for part in ("--task", task)), "--neighbours", "3"]) == 0
    said = "dataset photos: 4 of 14 test images are also in train"
    assert caplog.text.count(said) == 1
    found = {line["task"]: line.get("train_overlap") for line in read_results(out)}
    assert found == {"zero-shot": None, "knn": 4, "linear-probe": 4}
    assert main([*given, "--task", "zero-shot"]) == 0  # its lines have no train_overlap
    assert any("photos: 4 scored images also in" in note for note in read_table([out]).notes)


@pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="mounting needs more rights",
)
def test_read_only_cache_does_not_stop_evaluation(run: Path, probed: Path, tmp_path: Path) -> None:
    cache, out = tmp_path / "read-only", tmp_path / "r.jsonl"
    cache.mkdir()
    command = [sys.executable, "-m", "eval", "knn", "--neighbours", "3", "--model", str(run)]
    command += ["--data", str(probed), "--out", str(out)]
    mounted = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    environment = {**os.environ, "CLIPKIT_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mounted, str(cache), *command],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "Read-only file system" in line]
    why = "Read-only file system; evaluation continues without storing features (see --features)"
    assert said == [f"cannot write {cache}/features: {why}"]
    main([*command[3:-1], str(tmp_path / "other.jsonl")])
    assert values(out) == values(tmp_path / "other.jsonl")

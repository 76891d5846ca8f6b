"""Tests of the commands report and compare: files, messages and exit status."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clipkit.errors import ConfigError, DataError
from eval.__main__ import main
from eval.report import as_csv
from eval.results.records import read_details, read_results
from tests.eval.made_up_results import add_details, line, write


def test_report_writes_page_and_prints_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "results.jsonl", [line(0, "digits", "acc1", 0.5), line(1, "digits", "acc1", 0.6)])
    path.write_text(path.read_text().replace("\n", "\n{damaged\n", 1))
    (tmp_path / "report.html").write_text("the page of a run")
    assert main(["report", str(path)]) == 0
    said = capsys.readouterr()
    assert (tmp_path / "report.html").read_text() == "the page of a run"
    assert said.out == f"wrote {tmp_path / 'scores.html'}\n"
    assert said.err == "note: results.jsonl: one line cut short or broken, and left out.\n"
    assert main(["report", str(path), "--csv", "-", "--out", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr()
    assert said.out == as_csv([path])
    assert said.err.startswith(f"wrote {tmp_path / 'page.html'}\nnote: results.jsonl: one line")
    with pytest.raises(ConfigError, match="--csv - and --latex - both write to standard output"):
        main(["report", str(path), "--csv", "-", "--latex", "-"])


def test_runs_are_compared_by_their_last_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [tmp_path / name for name in "ab"]
    results = [run / "results.jsonl" for run in runs]
    for i, run in enumerate(runs):
        run.mkdir()
        add_details(results[i], i + 1, ["digits"])
        same: dict[str, Any] = {"model": str(run), "n": 600}
        first = {**line(i, "digits", "acc1", 0.2), **same}
        trained = [{**first, "step": step, "weights": f"{run.name} at step {step}"} for step in (10, 20)]
        (own,) = (detail for detail in read_details(results[i])[0] if detail.weights.endswith(str(i)))
        value = own.right["acc1"].tensor().float().mean().item()
        scored = {**first, "value": value, "step": 20}
        few = {**scored, "task": "few-shot", "setting": "4-shot"}
        write(results[i], [*trained, scored, few])
    assert main(["compare", *map(str, runs)]) == 0
    said = capsys.readouterr()
    assert "of 1 differences are beyond chance" in " ".join(said.out.split())
    assert said.err.splitlines() == [
        f"note: {path} has scores for steps 10, 20; using the last" for path in results
    ]
    asked = [part for run in runs for part in ("--results", str(run))]  # run folders instead of results files
    assert main(["compare", "a", "b", *asked]) == 0
    assert "of 1 differences are beyond chance" in " ".join(capsys.readouterr().out.split())
    copied = tmp_path / "copied.jsonl"  # without its details, and with a damaged line
    copied.write_text("{damaged\n" + results[1].read_text())
    assert main(["compare", str(runs[0]), str(copied)]) == 1
    said = capsys.readouterr()
    out = " ".join(said.out.split())
    assert (
        "nothing could be compared" in out
        and "not compared: few-shot on digits: few-shot scores are means" in out
        and "0 of 0" not in out
    )
    assert f"copied.details/ is missing next to copied.jsonl in {tmp_path}" in said.err
    assert "copied.jsonl: one line cut short or broken" in said.err


def test_compare_uses_the_named_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Comparing checkpoints prints no note; for a run, a note names the step that is used."""
    run = tmp_path / "a"
    run.mkdir()
    results = run / "results.jsonl"
    trained = [
        {**line(0, "digits", "acc1", 0.2), "model": str(run), "step": step, "weights": f"a at step {step}"}
        for step in (10, 20, 30)
    ]
    scored = []
    for i, step in ((1, 20), (2, 30)):
        add_details(results, i + 1, ["digits"])
        (own,) = (detail for detail in read_details(results)[0] if detail.weights.endswith(str(i)))
        value = own.right["acc1"].tensor().float().mean().item()
        name = str(run / "checkpoints" / f"step_{step:08d}")
        whose = {"model": name, "step": step, "architecture": "ViT-B-32"}
        scored.append({**line(i, "digits", "acc1", value, n=600), **whose})
    write(results, [*trained, *scored])
    first, last = (str(one["model"]) for one in scored)
    for more in ([], ["--results", str(results)]):  # scores are found in the checkpoint's run
        assert main(["compare", first, last, *more]) == 0
        said = capsys.readouterr()
        assert "A: a at step 20 B: a at step 30" in " ".join(said.out.split())
        assert said.err == ""
    assert main(["compare", first, str(run)]) == 0
    assert capsys.readouterr().err == f"note: {results} has scores for steps 10, 20, 30; using the last\n"
    other = str(run / "checkpoints" / "step_00000010")  # scored only during training
    with pytest.raises(ConfigError, match=r"no scores for checkpoint '.*step_00000010': score it with"):
        main(["compare", other, last])


@pytest.mark.parametrize("option", ["--out", "--csv", "--latex", "--markdown"])
def test_report_never_overwrites_results_or_run_files(tmp_path: Path, option: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    results, config = write(run / "results.jsonl", [line(0, "digits", "acc1", 0.5)]), run / "config.toml"
    config.write_text("steps = 3\n")
    linked, plain = tmp_path / "linked.html", tmp_path / "plain"
    linked.symlink_to(results)
    plain.hardlink_to(config)
    for source in (run, results):
        for place in (results, run / ".." / "run" / "results.jsonl", linked, tmp_path / "other.jsonl"):
            with pytest.raises(
                ConfigError, match=f"^{option} .* is a results file or belongs to a run: choose another"
            ):
                main(["report", str(source), option, str(place)])
    with pytest.raises(ConfigError, match="is a results file or belongs to a run"):
        main(["report", str(run), option, str(plain)])
    with pytest.raises(
        ConfigError, match=f"^{option} .: expected the name of a file to write, such as scores"
    ):
        main(["report", str(results), option, "."])
    with pytest.raises(ConfigError, match=f"{option}: the path is empty"):
        main(["report", str(results), option, ""])
    other = "--markdown" if option == "--latex" else "--latex"
    with pytest.raises(ConfigError, match=r"would overwrite the output of --.*: choose different files"):
        main(["report", str(results), option, str(tmp_path / "a"), other, str(tmp_path / "a")])
    assert read_results(results) and config.read_text() == "steps = 3\n" and linked.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["linked.html", "plain", "run"]


@pytest.mark.parametrize("option", ["--out", "--csv"])
def test_report_writes_through_links_and_pipes(tmp_path: Path, option: str) -> None:
    results = write(tmp_path / "results.jsonl", [line(0, "digits", "acc1", 0.5)])
    linked, target, pipe = tmp_path / "latest", tmp_path / "deep" / "page", tmp_path / "pipe"
    linked.symlink_to(target)
    assert main(["report", str(results), option, str(linked)]) == 0  # creates the target's folder
    assert linked.is_symlink() and b"ViT-B-32/openai" in target.read_bytes()
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    assert main(["report", str(results), option, str(pipe)]) == 0
    assert reader.communicate(timeout=20)[0] == target.read_bytes()
    assert pipe.is_fifo()
    looped = tmp_path / "looped"
    looped.symlink_to(looped)
    for place, cause in ((looped, "[Ll]oop|symbolic links"), (tmp_path / ("n" * 300), "File name too long")):
        with pytest.raises(DataError, match=f"^cannot write .*({cause})"):
            main(["report", str(results), option, str(place)])


@pytest.mark.parametrize("count", [[], {}, "600", None, True, -3, 1e400, 10**400])
def test_report_accepts_any_count(tmp_path: Path, count: object) -> None:
    lines = [line(0, "digits", "acc1", 0.5, n=count), line(0, "glyphs", "acc1", 0.25, n=600)]
    results = write(tmp_path / "results.jsonl", lines)
    assert (
        main(["report", str(results), "--csv", str(tmp_path / "scores.csv"), "--out", str(tmp_path / "p")])
        == 0
    )
    rows = (tmp_path / "scores.csv").read_text().splitlines()
    assert [row.split(",")[8] for row in rows if row.startswith("score,")] == ["0.5", "0.25"]


@pytest.mark.parametrize("gflops", [1.7e308, 1e12, 1e11, 5e-324, 0, -1, "4", []])
def test_report_accepts_any_gflops(tmp_path: Path, gflops: object) -> None:
    lines = [line(0, "digits", "acc1", 0.5), line(8, "digits", "acc1", 0.25, gflops=gflops)]
    results = write(tmp_path / "results.jsonl", [*lines, line(3, "digits", "acc1", 0.75)])
    assert main(["report", str(results)]) == 0
    page = (tmp_path / "scores.html").read_text()
    assert ("1 of 3 models not shown: their cost is unknown" in page) == (
        gflops not in (1e11, 5e-324, "4", [])
    )

"""The commands report and compare: what they write where, what they say, and how they end."""

from pathlib import Path
from typing import Any

import pytest

from clipkit.errors import ConfigError
from eval.__main__ import main
from eval.details import read_details
from eval.report import as_csv
from tests.eval.made_up_results import add_details, line, write


def test_what_the_report_command_writes_and_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    with pytest.raises(ConfigError, match="--csv - and --latex - would mix"):
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
        (own,) = (one for one in read_details(results[i])[0] if one.weights.endswith(str(i)))
        value = own.right["acc1"].tensor().float().mean().item()
        scored = {**first, "value": value, "step": 20}
        few = {**scored, "task": "few-shot", "setting": "4-shot"}
        write(results[i], [*trained, scored, few])
    assert main(["compare", *map(str, runs)]) == 0
    said = capsys.readouterr()
    assert "of 1 differences are beyond chance" in " ".join(said.out.split())
    assert said.err.splitlines() == [
        f"note: {path} has scores of steps 10, 20: the last is compared" for path in results
    ]
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
    assert f"copied.details/ must lie beside copied.jsonl, and is not in {tmp_path}" in said.err
    assert "copied.jsonl: one line cut short or broken" in said.err

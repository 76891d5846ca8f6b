"""Tests of grouping result lines by model, and of model labels."""

from pathlib import Path
from typing import Any

from eval.results.table import read_table
from tests.eval.made_up_results import line, write


def test_lines_with_the_same_weights_are_one_model(tmp_path: Path) -> None:
    """With any spelling of the path, and including scores of the training in old and new formats."""
    run = tmp_path / "runs" / "X"
    run.mkdir(parents=True)

    def told(
        model: str, value: float, *, at: int = 20, dataset: str = "digits", **more: Any
    ) -> dict[str, Any]:
        own = {"model": model, "weights": f"sha256:{at:016x}", "model_hash": f"{at:032x}"}
        if not model:  # the first format of trainings
            own |= {"weights": f"X at step {at}", "model_hash": ""}
        return {**line(10, dataset, "acc1", value, step=at), **own, **more}

    ways = [
        "runs/X",
        "./runs/X",
        "runs/X/",
        str(run),
        "runs/X/checkpoints",
        "runs/X/checkpoints/step_00000020",
    ]
    lines = [told("", 0.1, at=10), told("", 0.2)]
    lines += [told(way, 0.3, dataset=f"d{i}") for i, way in enumerate(ways)]
    new = told("runs/X", 0.25, dataset="glyphs", model_hash=None)  # identified by its file alone
    found = read_table([write(run / "results.jsonl", [*lines, new, told("runs/X", 0.4)])])
    (model,) = found.models
    assert (model.label, model.name, model.step, model.earlier_steps) == ("X", "runs/X", 20, (10,))
    assert model.weights == f"sha256:{20:016x}" and {*ways} <= {*model.names}
    scores = {row.dataset: row.value for row in found.rows}
    assert (scores["digits"], scores["glyphs"], scores["d0"]) == (0.4, 0.25, 0.3)  # the last line counts
    # a named checkpoint is a separate model; so are other weights of the same step
    asked = [*lines, told("runs/X/checkpoints/step_00000010", 0.1, at=10, dataset="glyphs")]
    found = read_table([write(run / "results.jsonl", asked)])
    assert [one.label for one in found.models] == ["X at step 10", "X at step 20"]
    assert sum(row.dataset == "digits" for row in found.rows) == 2
    again = {**told("runs/X", 0.5), "weights": "sha256:ff", "model_hash": "ff"}
    found = read_table([write(run / "results.jsonl", [*lines[2:], again])])
    assert [one.label for one in found.models] == ["X (000000000000)", "X (ff)"]
    # two runs with the same name and different steps
    other = tmp_path / "others" / "X"
    other.mkdir(parents=True)
    both = [write(run / "results.jsonl", lines[:2]), write(other / "results.jsonl", [told("", 0.9, at=5)])]
    assert [one.step for one in read_table(both).models] == [20, 5]


def test_runs_with_the_same_folder_name_are_labelled_with_their_parents(tmp_path: Path) -> None:
    """Also if each run was scored as ``run`` from its parent folder."""
    files = []
    for i, name in enumerate(("a", "b")):
        run = tmp_path / name / "run"
        run.mkdir(parents=True)
        own = {**line(i, "digits", "acc1", 0.1 * i), "model": ("run", "./run/")[i]}
        files.append(write(run / "results.jsonl", [own]))
    found = read_table(files)
    assert [model.label for model in found.models] == ["a/run", "b/run"]
    assert [row.value for row in found.rows] == [0.0, 0.1]
    (alone,) = read_table(files[:1]).models
    assert alone.label == "run"


def test_one_model_with_two_names_is_one_column_with_a_note(tmp_path: Path) -> None:
    """Tensors and preprocessing identify a model: an export is another file without a step."""

    def told(model: str, value: float, *, dataset: str, **more: Any) -> dict[str, Any]:
        own = {"model": model, "model_hash": "ab", "weights": f"sha256:{len(model):016x}"}
        return {**line(10, dataset, "acc1", value), **own, **more}

    run = [told("runs/X/checkpoints/step_00000020", 0.4, dataset=name, step=20) for name in ("a", "b")]
    export = [told("hub/pets", 0.4, dataset=name) for name in ("b", "c")]
    for lines, label, other in ((run + export, "X", "hub/pets"), (export + run, "pets", "runs/X")):
        found = read_table([write(tmp_path / "r.jsonl", lines)])
        (model,) = found.models
        assert model.label == label  # the first name is the label
        assert [row.dataset for row in found.rows] == [*dict.fromkeys(str(one["dataset"]) for one in lines)]
        assert found.notes == (f"{other} has the same weights as {label}: they share one column.",)
    # also in separate files with other models; other spellings of a path are not other names
    paths = [
        write(tmp_path / "1.jsonl", run),
        write(tmp_path / "2.jsonl", [*export, line(0, "a", "acc1", 0.3)]),
    ]
    assert [one.label for one in read_table(paths).models] == ["X", "ViT-B-32/openai"]
    same = [
        told(way, 0.4, dataset="a") for way in ("runs/X", "./runs/X/", "runs/X/checkpoints/step_00000020")
    ]
    assert read_table([write(tmp_path / "r.jsonl", same)]).notes == ()
    differ = [told("runs/X", 0.4, dataset="a"), told("hub/pets", 0.4, dataset="a", model_hash="cd")]
    found = read_table([write(tmp_path / "r.jsonl", differ)])
    assert [one.label for one in found.models] == ["X", "pets"] and found.notes == ()

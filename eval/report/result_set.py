"""Reads results files of any number of models as one set: the last score of every key, and which models there are.

A model is a column of the tables. Lines that name no model go by their weights. Of a model that was scored at
several steps of its training the last step counts. Models of one name are told apart by their weights.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clipkit.architectures import ARCHITECTURES, QUICKGELU
from clipkit.errors import DataError
from clipkit.flops import image_flops
from eval.dataset import some
from eval.report.json_lines import finite, json_lines, whole

__all__ = ["Model", "ResultSet", "Row", "read_result_set"]

_MAX_TEXT = 300
_REVISION = 16  # characters of one that are shown
_SCORE = (
    "step", "dataset", "split", "task", "prompt_set", "setting", "metric", "value", "n", "low", "high", "chance",
    "seconds",
)  # fmt: skip
_STEP = re.compile(r" at step \d+$")
_SCHEME = re.compile(r"^[a-z_]{2,20}:(?=.)")  # "open_clip:" before the name


@dataclass(frozen=True, kw_only=True)
class Model:
    """A column of the tables.

    Attributes:
        label: what it is called on the page; no two are the same.
        name: as the user named it.
        weights: as in the scores.
        step: of its training, or None.
        architecture: or "".
        gflops: that its image tower needs for a picture, or None where that is not known.
        provenance: what else its last line says.
    """

    label: str
    name: str
    weights: str
    step: int | None
    architecture: str
    gflops: float | None
    provenance: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One score of one model (by its number); ``low`` and ``high`` bound its 95% interval."""

    model: int
    dataset: str
    split: str
    task: str
    prompt_set: str
    setting: str
    metric: str
    value: float
    n: int | None
    low: float | None
    high: float | None
    chance: float | None
    seconds: float | None
    data_revision: str
    prompts: str

    @property
    def what(self) -> tuple[str, str, str, str, str, str]:
        """What was measured, whoever it was measured of."""
        return self.dataset, self.split, self.task, self.prompt_set, self.setting, self.metric


@dataclass(frozen=True, kw_only=True)
class ResultSet:
    """The models in the order of the files, their scores in the order of the lines, and notes on the reading."""

    models: tuple[Model, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def having(self, *tasks: str) -> list[Row]:
        """The scores of some tasks."""
        return [row for row in self.rows if row.task in tasks]


@dataclass(frozen=True, kw_only=True)
class _Line:
    """A line that is a score, and whose it is."""

    name: str
    weights: str
    step: int | None
    row: Row
    provenance: Mapping[str, Any]


def read_result_set(results: Sequence[Path]) -> ResultSet:
    """Read results files.

    Raises:
        DataError: a file is missing or cannot be read, or there is no score in all of them.
    """
    notes: list[str] = []
    lines: list[_Line] = []
    for path in results:
        try:
            if not path.is_file():
                raise DataError(f"no results file at {path}")
            lines += _lines(path, notes)
        except OSError as error:
            raise DataError(f"cannot read {str(path)[:200]}: {error.strerror}") from error
    if not lines:
        named = ", ".join(str(path)[:200] for path in results[:3])
        raise DataError(f"there are no scores in {named or 'the results, as no file is given'}")
    lines = _last_steps(lines, notes)
    numbers: dict[tuple[str, str], int] = {}
    last: dict[tuple[int, tuple[str, ...]], Row] = {}
    newest: dict[int, _Line] = {}
    replaced: dict[tuple[str, str], None] = {}
    for line in lines:
        number = numbers.setdefault((line.name, line.weights), len(numbers))
        newest[number] = line
        before = last.get((number, line.row.what))
        if before is not None and _are_other_data(before, line.row):
            replaced[before.dataset, before.data_revision[:_REVISION]] = None
        last[number, line.row.what] = line.row
    rows = tuple(replace(row, model=number) for (number, _), row in last.items())
    notes += _different_data(rows)
    if replaced:
        names = some([f"{name} (revision {revision})" for name, revision in replaced])
        notes.append(f"Scores on other pictures of the same name left out, since later ones count: {names}.")
    return ResultSet(models=_models(newest), rows=rows, notes=tuple(notes))


def _lines(path: Path, notes: list[str]) -> Iterable[_Line]:
    odd = 0
    for line in json_lines(path, notes, ""):
        value = finite(line.get("value"))
        named = [line.get(key) for key in ("dataset", "task", "metric")]
        if value is None or not all(isinstance(name, str) and name for name in named):
            odd += 1
            continue
        weights = _text(line, "weights")
        name = _text(line, "model") or _STEP.sub("", weights) or path.resolve().parent.name
        row = Row(
            model=0,
            dataset=_text(line, "dataset"),
            split=_text(line, "split") or "test",
            task=_text(line, "task"),
            prompt_set=_text(line, "prompt_set"),
            setting=_text(line, "setting"),
            metric=_text(line, "metric"),
            value=value,
            n=whole(line.get("n")),
            low=finite(line.get("low")),
            high=finite(line.get("high")),
            chance=finite(line.get("chance")),
            seconds=finite(line.get("seconds")),
            data_revision=_text(line, "data_revision"),
            prompts=_text(line, "prompts"),
        )
        rest = {key: one for key, one in line.items() if key not in _SCORE}
        yield _Line(name=name, weights=weights, step=whole(line.get("step")), row=row, provenance=rest)
    if odd:
        notes.append(
            f"{path.name}: {_count(odd, 'line')} without a dataset, task, metric or finite value left out."
        )


def _text(line: Mapping[str, Any], key: str) -> str:
    value = line.get(key)
    return value[:_MAX_TEXT] if isinstance(value, str) else ""


def _last_steps(lines: Sequence[_Line], notes: list[str]) -> list[_Line]:
    """Of each name the lines of its last step, where all its weights are of some step."""
    steps: dict[str, dict[str, int | None]] = {}
    for line in lines:
        of_name = steps.setdefault(line.name, {})
        of_name[line.weights] = line.step if line.step is not None else of_name.get(line.weights)
    kept, dropped = [], 0
    for line in lines:
        known = [step for step in steps[line.name].values() if step is not None]
        own = steps[line.name][line.weights]
        if len(known) == len(steps[line.name]) and own != max(known):
            dropped += 1
        else:
            kept.append(line)
    if dropped:
        notes.append(
            f"{_count(dropped, 'score')} of earlier steps of a training left out; the page of its run has them."
        )
    return kept


def _are_other_data(one: Row, other: Row) -> bool:
    return bool(one.data_revision and other.data_revision) and one.data_revision != other.data_revision


def _different_data(rows: Sequence[Row]) -> list[str]:
    """Datasets whose pictures or prompts are known not to be the same for all models."""
    found: dict[tuple[str, str], dict[tuple[str, ...], dict[str, None]]] = {}
    for row in rows:
        kinds = {
            ("pictures", "revisions"): ((row.dataset, row.split), row.data_revision),
            ("pictures", "n ="): (row.what, "" if row.n is None else f"{row.n:,}"),
            ("prompts", "revisions"): (
                (row.dataset, row.split, row.prompt_set),
                row.prompts if row.task == "zero-shot" else "",
            ),
        }
        for kind, (key, value) in kinds.items():
            if value:
                found.setdefault(kind, {}).setdefault(key, {})[value] = None
    where: dict[str, dict[str, dict[str, None]]] = {}
    for (what, called), seen in found.items():
        for key, values in seen.items():
            if len(values) > 1:
                cut = [value[:_REVISION] for value in values]
                told = f"{called} {' and '.join(cut) if len(cut) < 4 else some(cut)}"
                where.setdefault(what, {}).setdefault(key[0], {})[told] = None
    notes = []
    for what, datasets in where.items():
        named = some([f"{name} ({'; '.join(told)})" for name, told in datasets.items()])
        notes.append(
            f"Not all models were scored with the same {what} on {named}: these scores do not compare."
        )
    return notes


def _models(newest: Mapping[int, _Line]) -> tuple[Model, ...]:
    lines = [newest[number] for number in sorted(newest)]
    names = [line.name for line in lines]
    short = {name: _SCHEME.sub("", name) for name in names}
    if len(set(short.values())) < len(short):
        short = {name: name for name in names}
    # a folder that all runs are in says nothing; the architecture before a tag does
    shared = _shared_start(set(names)) if all(name == short[name] for name in names) else 0
    labels: dict[str, None] = {}
    models = []
    for line in lines:
        label = short[line.name][shared:]
        if names.count(line.name) > 1:
            label += f" ({line.weights.removeprefix('sha256:')[:12] or 'unnamed weights'})"
        while label in labels:
            label += "′"
        labels[label] = None
        models.append(
            Model(
                label=label,
                name=line.name,
                weights=line.weights,
                step=line.step,
                architecture=_text(line.provenance, "architecture"),
                gflops=_gflops(line.provenance),
                provenance=line.provenance,
            )
        )
    return tuple(models)


def _gflops(provenance: Mapping[str, Any]) -> float | None:
    """As the lines say it, else by formula for the architectures that clipkit itself builds."""
    known = finite(provenance.get("gflops"))
    name = _text(provenance, "architecture").removesuffix(QUICKGELU)
    if known is None and name in ARCHITECTURES:
        return image_flops(ARCHITECTURES[name]).forward / 1e9
    return known


def _shared_start(names: set[str]) -> int:
    """How many characters all names begin with, up to a separator behind which each goes on."""
    if len(names) < 2:
        return 0
    first, last = min(names), max(names)
    same = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )
    return max(first.rfind(mark, 0, same) for mark in "/:") + 1


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

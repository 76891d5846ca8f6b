"""Reads results files of any number of models as one set: the last score of every key, and which models there are.

A model is a column of the tables; which lines are of one, see eval/report/model_identity.py. Of a run that was
scored at several steps of its training the last step counts, and checkpoints that a user has named one by one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clipkit.architectures import ARCHITECTURES, QUICKGELU
from clipkit.errors import DataError
from clipkit.flops import image_flops
from eval.dataset import some
from eval.report.json_lines import finite, json_lines, whole
from eval.report.model_identity import Named, Origin, name_models, same_models

__all__ = ["Model", "ResultSet", "Row", "read_result_set"]

_MAX_TEXT = 300
_REVISION = 16  # characters of one that are shown
_SCORE = (
    "step", "dataset", "split", "task", "prompt_set", "setting", "metric", "value", "n", "low", "high", "chance",
    "seconds",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Model:
    """A column of the tables.

    Attributes:
        label: what it is called on the page; no two are the same.
        name: as the user named it, a run without its checkpoint.
        names: all that it goes by.
        run: the same for several models of one training.
        weights: as in the scores and their details.
        step: of its training, or None.
        earlier_steps: of the same training, whose scores were left out.
        files: whose lines are its own.
        architecture: or "".
        gflops: that its image tower needs for a picture, or None where that is not known.
        provenance: what else its last line says.
    """

    label: str
    name: str
    names: tuple[str, ...]
    run: str
    weights: str
    step: int | None
    earlier_steps: tuple[int, ...]
    files: tuple[Path, ...]
    architecture: str
    gflops: float | None
    provenance: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One score of one model (by its number); ``low`` and ``high`` bound its 95% interval.

    ``prompts`` is a fingerprint of what classes are told by; of retrieval, of the captions as the model read them.
    """

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
    """The models in the order of the files, their scores in the order of the lines, and notes on the reading.

    ``unread`` are those of the notes that tell of lines that are no scores.
    """

    models: tuple[Model, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    unread: tuple[str, ...] = ()

    def having(self, *tasks: str) -> list[Row]:
        """The scores of some tasks."""
        return [row for row in self.rows if row.task in tasks]


@dataclass(frozen=True, kw_only=True)
class _Line:
    """A line that is a score, and whose it is."""

    file: Path
    origin: Origin
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
        why = "".join(f"; {note}" for note in notes)
        raise DataError(f"there are no scores in {named or 'the results, as no file is given'}{why}")
    unread = tuple(notes)
    numbers = same_models(line.origin for line in lines)
    lines, earlier = _last_steps(lines, numbers, notes)
    last: dict[tuple[int, tuple[str, ...]], Row] = {}
    replaced: dict[tuple[str, str], None] = {}
    of_model: dict[int, list[_Line]] = {}
    for line in lines:
        of_model.setdefault(numbers[line.origin], []).append(line)
    places = {number: place for place, number in enumerate(of_model)}
    for line in lines:
        number = places[numbers[line.origin]]
        before = last.get((number, line.row.what))
        if before is not None and _are_other_data(before, line.row):
            replaced[before.dataset, before.data_revision[:_REVISION]] = None
        last[number, line.row.what] = line.row
    rows = tuple(replace(row, model=number) for (number, _), row in last.items())
    notes += _different_data(rows)
    overlaps = {
        line.row.dataset: whole(line.provenance["train_overlap"])
        for line in lines
        if "train_overlap" in line.provenance  # of tasks that learn
    }
    notes += [
        f"{name}: {_count(count, 'scored image')} also in train (identical files): tasks that learn score too high."
        for name, count in overlaps.items()
        if count
    ]
    if replaced:
        names = some([f"{name} (revision {revision})" for name, revision in replaced])
        notes.append(f"Scores on other pictures of the same name left out, since later ones count: {names}.")
    columns = name_models([[line.origin for line in own] for own in of_model.values()])
    notes += _other_names(columns)
    return ResultSet(models=_models(columns, of_model, earlier), rows=rows, notes=tuple(notes), unread=unread)


def _lines(path: Path, notes: list[str]) -> Iterable[_Line]:
    odd, folder = 0, str(path.resolve().parent)
    for line in json_lines(path, notes, ""):
        value = finite(line.get("value"))
        named = [line.get(key) for key in ("dataset", "task", "metric")]
        if value is None or not all(isinstance(name, str) and name for name in named):
            odd += 1
            continue
        origin = Origin(
            file=str(path),
            folder=folder,
            typed=_text(line, "model"),
            weights=_text(line, "weights"),
            model_hash=_text(line, "model_hash"),
            architecture=_text(line, "architecture"),
            step=whole(line.get("step")),
        )
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
            prompts=_text(line, "captions" if line["task"] == "retrieval" else "prompts"),
        )
        rest = {key: one for key, one in line.items() if key not in _SCORE}
        yield _Line(file=path, origin=origin, row=row, provenance=rest)
    if odd:
        notes.append(
            f"{path.name}: {_count(odd, 'line')} without a dataset, task, metric or finite value left out."
        )


def _text(line: Mapping[str, Any], key: str) -> str:
    value = line.get(key)
    return value[:_MAX_TEXT] if isinstance(value, str) else ""


def _last_steps(
    lines: Sequence[_Line], numbers: Mapping[Origin, int], notes: list[str]
) -> tuple[list[_Line], dict[int, tuple[int, ...]]]:
    """Of each run in a file the lines of its last step, where all its weights are of some step.

    Returns:
        The lines, and by model the earlier steps of its run that were left out.
    """
    steps: dict[tuple[str, str], dict[int, int | None]] = {}
    kept: set[int] = set()
    for one, number in numbers.items():
        of_run = steps.setdefault((one.file, one.run), {})
        of_run[number] = one.step if one.step is not None else of_run.get(number)
        if one.checkpoint:  # somebody asked for this one
            kept.add(number)
    for of_run in steps.values():
        known = [step for step in of_run.values() if step is not None]
        kept |= {n for n, step in of_run.items() if len(known) < len(of_run) or step == max(known)}
    earlier: dict[int, set[int]] = {}
    for of_run in steps.values():
        left = {step for number, step in of_run.items() if number not in kept and step is not None}
        for number in kept & of_run.keys():
            earlier.setdefault(number, set()).update(left)
    dropped = sum(numbers[line.origin] not in kept for line in lines)
    if dropped:
        notes.append(
            f"{_count(dropped, 'score')} of earlier steps of a training left out; the page of its run has them."
        )
    found = [line for line in lines if numbers[line.origin] in kept]
    return found, {number: tuple(sorted(left)) for number, left in earlier.items()}


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
                (row.dataset, row.split, row.task, row.prompt_set),
                row.prompts if row.task in ("zero-shot", "retrieval") else "",
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


def _other_names(models: Sequence[Named]) -> list[str]:
    """Which names have no column of their own."""
    return [
        f"{some(list(one.others))} {'has' if len(one.others) == 1 else 'have'} the same weights as {one.label}: "
        "they are one column."
        for one in models
        if one.others
    ]


def _models(
    named: Sequence[Named], lines: Mapping[int, Sequence[_Line]], earlier: Mapping[int, tuple[int, ...]]
) -> tuple[Model, ...]:
    return tuple(
        Model(
            label=one.label,
            name=one.name,
            names=one.names,
            run=one.run,
            weights=one.weights,
            step=one.step,
            earlier_steps=earlier.get(number, ()),
            files=tuple(dict.fromkeys(line.file for line in own)),
            architecture=_text(own[-1].provenance, "architecture"),
            gflops=_gflops(own),
            provenance=own[-1].provenance,
        )
        for one, (number, own) in zip(named, lines.items(), strict=True)
    )


def _gflops(lines: Sequence[_Line]) -> float | None:
    """As the last line that knows says it, else by formula for the architectures that clipkit itself builds."""
    told = (finite(line.provenance.get("gflops")) for line in reversed(lines))
    known = next((one for one in told if one is not None), None)
    name = _text(lines[-1].provenance, "architecture").removesuffix(QUICKGELU)
    if known is None and name in ARCHITECTURES:
        return image_flops(ARCHITECTURES[name]).forward / 1e9
    return known


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

"""Reads results files of any number of models as one set: the last score of every key, and which models there are.

A model is a column of the tables; which lines are of one, see eval/report/result_set.py. Of a run that was
scored at several steps of its training the last step counts, and checkpoints that a user has named one by one.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from clipkit.errors import DataError
from clipkit.files.terminal import counted
from clipkit.model.architectures import ARCHITECTURES, QUICKGELU
from clipkit.model.flops import image_flops
from eval.datasets.dataset import some
from eval.results.records import finite, whole
from eval.results.scores import Record, read_records, text_of

__all__ = [
    "DataGroup",
    "Model",
    "Named",
    "Origin",
    "ResultSet",
    "Row",
    "by_data",
    "is_of_checkpoint",
    "name_models",
    "named_checkpoint",
    "normal_name",
    "read_result_set",
    "same_data",
    "same_models",
]


# --------------------------------------------------------------------------------------------------------------
# Whose a score is: which lines of results are of the same weights, and what that model is called.
#
# A model is what its weights are, however it was named when it was scored: by its run, a checkpoint of it, an
# export, or another way to write the path. Lines of a training join those of ``python -m eval run`` on the same
# weights.

_FILE_HASH = "sha256:"
_STEP = re.compile(r" at step \d+$")
_SCHEME = re.compile(r"^[a-z_]{2,20}:(?=.)")  # "open_clip:" before the name
_CHECKPOINT = re.compile(r"(?:(?P<run>.*)/)?checkpoints(?:/(?P<one>step_\d+|epoch_\w+\.pt))?")
_DIGITS = 12  # of a hash, in a label


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a line of results says of the model.

    Attributes:
        file: the results file.
        folder: that it lies in, from the root.
        typed: what the user called the model; "" where the line does not say it.
        weights: as in the scores.
        model_hash: as in the scores, or "".
        architecture: or "".
        step: of its training, or None.
    """

    file: str
    folder: str
    typed: str
    weights: str
    model_hash: str
    architecture: str
    step: int | None

    @cached_property
    def name(self) -> str:
        """The model without its checkpoint, its path in the shortest way to write it."""
        words = "" if self.is_of_file else _STEP.sub("", self.weights)
        name = _split(self.typed)[0] if self.typed else words
        return (PurePosixPath(self.folder).name if name in ("", ".") else name) or self.weights or "a model"

    @cached_property
    def run(self) -> str:
        """The same for all models of one run, and for names of one model: a run's own results know its folder."""
        return self.folder if self.short == PurePosixPath(self.folder).name else self.name

    @cached_property
    def checkpoint(self) -> str:
        """The checkpoint that the user named, if it was one of several."""
        return _split(self.typed)[1]

    @cached_property
    def short(self) -> str:
        """The last part of a path; else the name."""
        return self.name if _SCHEME.match(self.name) else PurePosixPath(self.name).name or self.name

    @property
    def is_of_file(self) -> bool:
        """Whether the weights are known by the hash of their file."""
        return self.weights.startswith(_FILE_HASH)

    @property
    def is_known(self) -> bool:
        """Whether there is any hash of the weights."""
        return bool(self.is_of_file or self.model_hash)


@dataclass(frozen=True, kw_only=True)
class Named:
    """A model's names.

    Attributes:
        label: what it is called on a page; no two are the same.
        name: the best that a user has given.
        names: all that it goes by.
        others: what else it was called, not counting other ways to write its path.
        run: the same for several models of one training.
        weights: the hash of their file where it is known.
        step: of its training, or None.
    """

    label: str
    name: str
    names: tuple[str, ...]
    others: tuple[str, ...]
    run: str
    weights: str
    step: int | None


def normal_name(typed: str) -> str:
    """A name without what does not matter in a path: ``./runs/a/`` is ``runs/a``, as are its checkpoints."""
    return _split(typed)[0]


def named_checkpoint(typed: str) -> str:
    """Which checkpoint of a run is named, such as ``step_00000600``; "" where the run itself is."""
    return _split(typed)[1]


def is_of_checkpoint(checkpoint: str, step: int | None, names: Iterable[str]) -> bool:
    """Whether weights of some step, or that go by some names, are those of a checkpoint of their run."""
    number = checkpoint.removeprefix("step_")
    if step is not None and number.isdecimal():
        return int(number) == step
    return checkpoint in map(named_checkpoint, names)


def _split(typed: str) -> tuple[str, str]:
    """The model, and which checkpoint of it."""
    if _SCHEME.match(typed):
        return typed, ""
    path = PurePosixPath(typed)
    text = str(path.parent if path.name == "model.safetensors" else path)
    found = _CHECKPOINT.fullmatch(text)
    return (found["run"] or ".", found["one"] or "") if found else (text, "")


def same_models(origins: Iterable[Origin]) -> dict[Origin, int]:
    """Number the models in the order in which they appear; what is of the same weights has the same number."""
    distinct = list(dict.fromkeys(origins))
    parents = list(range(len(distinct)))

    def root(i: int) -> int:
        while parents[i] != i:
            i = parents[i]
        return i

    def join(i: int, j: int) -> None:
        one, other = sorted((root(i), root(j)))
        parents[other] = one

    first: dict[Hashable, int] = {}
    for i, origin in enumerate(distinct):
        for key in _keys(origin):
            join(i, first.setdefault(key, i))
    _join_training(distinct, root, join)
    numbers: dict[int, int] = {}
    return {one: numbers.setdefault(root(i), len(numbers)) for i, one in enumerate(distinct)}


def _keys(origin: Origin) -> list[Hashable]:
    """Who shares one is the same model."""
    keys: list[Hashable] = []
    if origin.model_hash:
        keys.append(("model", origin.model_hash))
    if origin.is_of_file:  # which may be loaded as another architecture
        keys += [("file", origin.weights, origin.architecture), ("named", origin.run, origin.weights)]
    elif origin.weights or not origin.model_hash:
        keys.append(("named", origin.run, origin.checkpoint, origin.weights))
    return keys


def _join_training(
    origins: Sequence[Origin], root: Callable[[int], int], join: Callable[[int, int], None]
) -> None:
    """A training's own scores know the run and the step, not the weights: they are of the one model that does."""
    known: dict[Hashable, list[int]] = {}
    for i, one in enumerate(origins):
        if one.step is not None and one.is_known:
            known.setdefault((one.file, one.short, one.step, one.architecture), []).append(i)
    for i, one in enumerate(origins):
        if one.step is not None and not one.is_known:
            there = known.get((one.file, one.short, one.step, one.architecture), [])
            if len({root(j) for j in there}) == 1:
                join(i, there[0])


def name_models(models: Sequence[Sequence[Origin]]) -> list[Named]:
    """Name models that ``same_models`` has told apart, each by what the lines say of it."""
    heads = [_head(own) for own in models]
    of_run: dict[str, list[int]] = {}
    for i, head in enumerate(heads):
        of_run.setdefault(head.run, []).append(i)
    short = _short_names({run: heads[own[0]] for run, own in of_run.items()})
    steps = [next((one.step for one in reversed(own) if one.step is not None), None) for own in models]
    weights = [
        next((one.weights for one in reversed(own) if one.is_of_file), own[-1].weights) for own in models
    ]
    labels: dict[str, None] = {}
    named = []
    for i, (own, head) in enumerate(zip(models, heads, strict=True)):
        label, others = short[head.run], of_run[head.run]
        if len(others) > 1:
            if None not in (of := [steps[j] for j in others]) and len(set(of)) == len(of):
                label += f" at step {steps[i]}"
            elif all(cuts := [heads[j].checkpoint for j in others]) and len(set(cuts)) == len(cuts):
                label += f" {head.checkpoint}"
            else:
                told = weights[i].removeprefix(_FILE_HASH) or head.model_hash or "unnamed weights"
                label += f" ({told[:_DIGITS] if told != 'unnamed weights' else told})"
        while label in labels:
            label += "′"
        labels[label] = None
        names = dict.fromkeys(name for one in own for name in (one.name, one.typed) if name)
        named.append(
            Named(
                label=label,
                name=head.name,
                names=tuple(names),
                others=tuple(dict.fromkeys(one.name for one in own if one.typed and one.short != head.short)),
                run=head.run,
                weights=weights[i],
                step=steps[i],
            )
        )
    return named


def _head(origins: Sequence[Origin]) -> Origin:
    """Whose name a model bears: the first that a user has given, of a run rather than of its checkpoint."""
    first = min(origins, key=lambda one: not one.typed)
    of_name = [one for one in origins if one.short == first.short]
    return min(of_name, key=lambda one: (not one.typed, bool(one.checkpoint)))


def _short_names(heads: Mapping[str, Origin]) -> dict[str, str]:
    """As short as they can be while no two are the same.

    The folder that a run lies in says nothing, but the architecture before a tag does.
    """
    ways: dict[str, list[str]] = {}
    for run, head in heads.items():
        name, path = head.name, PurePosixPath(head.name)
        if _SCHEME.match(name):
            ways[run] = [_SCHEME.sub("", name), name]
        elif head.is_of_file or run == head.folder:
            # two folders may be of one name, each scored by that name from the folder above it
            parts = PurePosixPath(head.folder).parts if run == head.folder else path.parts
            ways[run] = [str(PurePosixPath(*parts[-k:])) for k in range(1, len(parts) + 1)] or [name]
        else:
            ways[run] = [name]
    longer = True
    while longer:
        longer = False
        shown = [own[0] for own in ways.values()]
        for own, now in zip(ways.values(), shown, strict=True):
            if len(own) > 1 and shown.count(now) > 1:
                own.pop(0)
                longer = True
    return {run: own[0] for run, own in ways.items()}


# --------------------------------------------------------------------------------------------------------------

_REVISION = 16  # characters of one that are shown


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
class Row(Record):
    """A score of a model, by its number."""

    model: int

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
        line.row.dataset: whole(line.row.line["train_overlap"])
        for line in lines
        if "train_overlap" in line.row.line  # of tasks that learn
    }
    notes += [
        f"{name}: {counted(count, 'scored image')} also in train (identical files): tasks that learn score too "
        "high."
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
    folder = str(path.resolve().parent)
    for record in read_records(path, notes):
        origin = Origin(
            file=str(path),
            folder=folder,
            typed=text_of(record.line, "model"),
            weights=text_of(record.line, "weights"),
            model_hash=text_of(record.line, "model_hash"),
            architecture=text_of(record.line, "architecture"),
            step=record.step,
        )
        yield _Line(file=path, origin=origin, row=Row(**vars(record), model=0))


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
            f"{counted(dropped, 'score')} of earlier steps of a training left out; the page of its run has them."
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
            architecture=text_of(own[-1].row.line, "architecture"),
            gflops=_gflops(own),
            provenance=own[-1].row.provenance,
        )
        for one, (number, own) in zip(named, lines.items(), strict=True)
    )


def _gflops(lines: Sequence[_Line]) -> float | None:
    """As the last line that knows says it, else by formula for the architectures that clipkit itself builds."""
    told = (finite(line.row.line.get("gflops")) for line in reversed(lines))
    known = next((one for one in told if one is not None), None)
    name = text_of(lines[-1].row.line, "architecture").removesuffix(QUICKGELU)
    if known is None and name in ARCHITECTURES:
        return image_flops(ARCHITECTURES[name]).forward / 1e9
    return known


# --------------------------------------------------------------------------------------------------------------
# Which scores compare: those of the same pictures; what goes by one name may be other data, or a part of them.

_SHOWN = 16  # characters of a revision


@dataclass(kw_only=True, eq=False)
class DataGroup:
    """Scores that compare.

    Attributes:
        revision: of their pictures; "" where no line says it.
        n: how many things they are the mean of; None where no line says it.
        rows: the scores.
        note: in what this group differs from the others; "" where there is one alone.
    """

    revision: str
    n: int | None
    rows: list[Row] = field(default_factory=list)
    note: str = ""

    def takes(self, row: Row) -> bool:
        """Whether a score may be of the same data: what is not known does not tell it apart."""
        same = not (self.revision and row.data_revision) or self.revision == row.data_revision
        return same and (self.n is None or row.n is None or self.n == row.n)

    def add(self, row: Row) -> None:
        """Take in a score, and what it knows of the data."""
        self.rows.append(row)
        self.revision = self.revision or row.data_revision
        self.n = row.n if self.n is None else self.n


def by_data(rows: Iterable[Row]) -> list[DataGroup]:
    """Scores of one metric by their data; first the group of the most models, of several such the first."""
    groups: list[DataGroup] = []
    # those that know their data first, so that the others find all groups there are
    for row in sorted(rows, key=lambda row: (not row.data_revision, row.n is None)):
        group = next((one for one in groups if one.takes(row)), None)
        if group is None:
            group = DataGroup(revision=row.data_revision, n=row.n)
            groups.append(group)
        group.add(row)
    groups.sort(key=lambda group: -len({row.model for row in group.rows}))
    several = [
        len(known - {"", None}) > 1
        for known in ({group.revision for group in groups}, {group.n for group in groups})
    ]
    for group in groups:
        parts = [f"data {group.revision[:_SHOWN]}"] if several[0] and group.revision else []
        parts += [f"n = {group.n:,}"] if several[1] and group.n is not None else []
        group.note = ", ".join(parts)
    return groups


def same_data(*rows: Row) -> bool:
    """Whether scores of one metric compare."""
    return len(by_data(rows)) == 1

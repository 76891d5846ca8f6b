"""Read results files of any number of models: a column per model, a row per score.

Lines with the same weights belong to one model, named as a run, a checkpoint, an export, or by another spelling
of its path. Scores recorded by a training belong to the model that ``python -m eval run`` scored at that
step. Of several steps of a training the last counts, besides checkpoints that were named explicitly.
"""

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from clipkit.errors import DataError
from clipkit.files import counted
from clipkit.model import ARCHITECTURES, QUICKGELU, image_flops
from eval.datasets.dataset import some
from eval.results.records import finite, whole
from eval.results.scores import Record, read_records, text_of

__all__ = ["DataGroup", "Model", "ResultSet", "by_data", "read_result_set", "same_data", "split_checkpoint"]

_FILE_HASH = "sha256:"
_SCHEME = re.compile(r"^[a-z_]{2,20}:(?=.)")  # "open_clip:" before the name
_CHECKPOINT = re.compile(r"(?:(?P<run>.*)/)?checkpoints(?:/(?P<one>step_\d+|epoch_\w+\.pt))?")
_DIGITS = 12  # of a hash, in a label
_REVISION = 16  # characters of a data revision, in a note


@dataclass(frozen=True, kw_only=True)
class Model:
    """A column of the tables.

    Attributes:
        label: unique name on the page.
        name: as the user named it, a run without its checkpoint.
        names: all names it was scored by.
        others: names besides ``name``, not counting other spellings of its path.
        run: the same for several models of one training.
        weights: as in the scores and their details; the hash of the file if it is known.
        step: its training step, or None.
        earlier_steps: earlier steps of the same training, which have no rows of their own.
        files: the files with its lines.
        architecture: name of the architecture, or "".
        gflops: GFLOPs of the image tower for one image, or None if unknown.
        provenance: the other fields of its last line.
    """

    label: str
    name: str
    names: tuple[str, ...]
    others: tuple[str, ...] = ()
    run: str
    weights: str
    step: int | None
    earlier_steps: tuple[int, ...]
    files: tuple[Path, ...]
    architecture: str
    gflops: float | None
    provenance: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ResultSet:
    """Models in the order of the files, scores in the order of the lines, and notes for the reader.

    ``unread`` are the notes on lines that are not scores.
    """

    models: tuple[Model, ...]
    rows: tuple[Record, ...]
    notes: tuple[str, ...]
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Origin:
    """A line's fields about its model, with the file and its absolute folder; missing text is ""."""

    file: Path
    folder: str
    typed: str
    weights: str
    model_hash: str
    architecture: str
    step: int | None

    @cached_property
    def name(self) -> str:
        """The model without its checkpoint, with the shortest spelling of its path."""
        weights = "" if self.is_of_file else re.sub(r" at step \d+$", "", self.weights)
        name = split_checkpoint(self.typed)[0] if self.typed else weights
        return (PurePosixPath(self.folder).name if name in ("", ".") else name) or self.weights or "a model"

    @cached_property
    def run(self) -> str:
        """Identifies the run of a model: the folder if the results are in it, otherwise the name."""
        return self.folder if self.short == PurePosixPath(self.folder).name else self.name

    @cached_property
    def checkpoint(self) -> str:
        return split_checkpoint(self.typed)[1]

    @cached_property
    def short(self) -> str:
        """The last part of a path, or the name."""
        return self.name if _SCHEME.match(self.name) else PurePosixPath(self.name).name or self.name

    @property
    def is_of_file(self) -> bool:
        return self.weights.startswith(_FILE_HASH)


_Line = tuple[_Origin, Record]


def split_checkpoint(typed: str) -> tuple[str, str]:
    """Split the name of a model into the model and the checkpoint, ("runs/a", "step_00000600").

    ``./runs/a/`` and the folder of its checkpoints are ``runs/a``. The checkpoint is "" if none is named.
    """
    if _SCHEME.match(typed):
        return typed, ""
    path = PurePosixPath(typed)
    text = str(path.parent if path.name == "model.safetensors" else path)
    found = _CHECKPOINT.fullmatch(text)
    return (found["run"] or ".", found["one"] or "") if found else (text, "")


def read_result_set(results: Sequence[Path]) -> ResultSet:
    """Read results files.

    Raises:
        DataError: a file is missing or cannot be read, or there are no scores in any of them.
    """
    notes: list[str] = []
    lines: list[_Line] = []
    for path in results:
        try:
            if not path.is_file():
                raise DataError(f"no results file at {path}")
            folder = str(path.resolve().parent)
            for record in read_records(path, notes):
                origin = _Origin(
                    file=path,
                    folder=folder,
                    typed=text_of(record.line, "model"),
                    weights=text_of(record.line, "weights"),
                    model_hash=text_of(record.line, "model_hash"),
                    architecture=text_of(record.line, "architecture"),
                    step=record.step,
                )
                lines.append((origin, record))
        except OSError as error:
            raise DataError(f"cannot read {str(path)[:200]}: {error.strerror}") from error
    if not lines:
        named = ", ".join(str(path)[:200] for path in results[:3])
        why = "".join(f"; {note}" for note in notes)
        raise DataError(f"there are no scores in {named or 'the results, as no file is given'}{why}")
    unread = tuple(notes)
    numbers = _same_models(list(dict.fromkeys(origin for origin, _ in lines)))
    kept, earlier = _last_steps(numbers)
    if dropped := sum(numbers[origin] not in kept for origin, _ in lines):
        notes.append(
            f"{counted(dropped, 'score')} of earlier steps of a training left out; the run's own page shows them."
        )
    lines = [(origin, record) for origin, record in lines if numbers[origin] in kept]
    of_model: dict[int, list[_Line]] = {}
    for origin, record in lines:
        of_model.setdefault(numbers[origin], []).append((origin, record))
    columns = {number: column for column, number in enumerate(of_model)}
    last: dict[tuple[int, tuple[str, ...]], Record] = {}
    replaced: dict[str, None] = {}
    overlaps: dict[str, int | None] = {}
    equal_images: dict[str, int | None] = {}
    for origin, record in lines:
        column = columns[numbers[origin]]
        before = last.get((column, record.what))
        if (
            before is not None
            and before.data_revision
            and record.data_revision not in ("", before.data_revision)
        ):
            replaced[f"{before.dataset} (revision {before.data_revision[:_REVISION]})"] = None
        last[column, record.what] = replace(record, model=column)
        if "train_overlap" in record.line:  # of tasks that learn
            overlaps[record.dataset] = whole(record.line["train_overlap"])
        if "equal_images" in record.line:  # of retrieval
            equal_images[record.dataset] = whole(record.line["equal_images"])
    rows = tuple(last.values())
    notes += _different_data(rows)
    notes += [
        f"{name}: {counted(count, 'scored image')} also in train (identical files), so scores of tasks that learn "
        "are too high."
        for name, count in overlaps.items()
        if count
    ]
    notes += [
        f"{name}: {counted(count, 'image')} equal to another with other captions (identical files), so recall is "
        "too low."
        for name, count in equal_images.items()
        if count
    ]
    if replaced:
        notes.append(
            f"Replaced by later scores on different images with the same name: {some(list(replaced))}."
        )
    models = _models([*of_model.values()], [earlier.get(number, ()) for number in of_model])
    notes += [
        f"{some(list(one.others))} {'has' if len(one.others) == 1 else 'have'} the same weights as {one.label}: "
        "they share one column."
        for one in models
        if one.others
    ]
    return ResultSet(models=models, rows=rows, notes=tuple(notes), unread=unread)


def _same_models(origins: Sequence[_Origin]) -> dict[_Origin, int]:
    """Number the models in the order of appearance; origins of the same weights get the same number."""
    groups = list(range(len(origins)))

    def join(i: int, j: int) -> None:
        one, other = sorted((groups[i], groups[j]))
        if one != other:
            groups[:] = [one if group == other else group for group in groups]

    first: dict[Hashable, int] = {}
    known: dict[Hashable, list[int]] = {}  # with the hash of the weights
    for i, one in enumerate(origins):
        keys: list[Hashable] = [("model", one.model_hash)] if one.model_hash else []
        if one.is_of_file:  # which may be loaded as different architectures
            keys += [("file", one.weights, one.architecture), ("named", one.run, one.weights)]
        elif one.weights or not one.model_hash:
            keys.append(("named", one.run, one.checkpoint, one.weights))
        for key in keys:
            join(i, first.setdefault(key, i))
        if one.step is not None and (one.is_of_file or one.model_hash):
            known.setdefault((one.file, one.short, one.step, one.architecture), []).append(i)
    # a training's own scores have no hash: they belong to the one model scored at their step
    for i, one in enumerate(origins):
        if one.step is not None and not (one.is_of_file or one.model_hash):
            same = known.get((one.file, one.short, one.step, one.architecture), [])
            if len({groups[j] for j in same}) == 1:
                join(i, same[0])
    numbers: dict[int, int] = {}
    return {one: numbers.setdefault(groups[i], len(numbers)) for i, one in enumerate(origins)}


def _last_steps(numbers: Mapping[_Origin, int]) -> tuple[set[int], dict[int, tuple[int, ...]]]:
    """Of each run in a file, keep the last step if the steps of all its weights are known.

    Returns:
        The models to keep, and by model the earlier steps of its run that are left out.
    """
    runs: dict[tuple[Path, str], dict[int, int | None]] = {}
    kept: set[int] = set()
    for origin, number in numbers.items():
        steps = runs.setdefault((origin.file, origin.run), {})
        steps[number] = origin.step if origin.step is not None else steps.get(number)
        if origin.checkpoint:  # named explicitly
            kept.add(number)
    for steps in runs.values():
        known = [step for step in steps.values() if step is not None]
        kept |= {number for number, step in steps.items() if len(known) < len(steps) or step == max(known)}
    earlier: dict[int, set[int]] = {}
    for steps in runs.values():
        left = {step for number, step in steps.items() if number not in kept and step is not None}
        for number in kept & steps.keys():
            earlier.setdefault(number, set()).update(left)
    return kept, {number: tuple(sorted(left)) for number, left in earlier.items()}


def _different_data(rows: Sequence[Record]) -> list[str]:
    """Note datasets whose images or prompts are known to differ between models."""
    found: dict[tuple[str, str], dict[tuple[str, ...], dict[str, None]]] = {}
    for row in rows:
        values = {
            ("images", "revisions"): ((row.dataset, row.split), row.data_revision),
            ("images", "n ="): (row.what, "" if row.n is None else f"{row.n:,}"),
            ("prompts", "revisions"): (
                (row.dataset, row.split, row.task, row.prompt_set),
                row.prompts if row.task in ("zero-shot", "likelihood", "retrieval", "captioning") else "",
            ),
        }
        for kind, (key, value) in values.items():
            if value:
                found.setdefault(kind, {}).setdefault(key, {})[value] = None
    differing: dict[str, dict[str, dict[str, None]]] = {}
    for (what, label), by_key in found.items():
        for key, seen in by_key.items():
            if len(seen) > 1:
                cut = [value[:_REVISION] for value in seen]
                text = f"{label} {' and '.join(cut) if len(cut) < 4 else some(cut)}"
                differing.setdefault(what, {}).setdefault(key[0], {})[text] = None
    notes = []
    for what, datasets in differing.items():
        named = some([f"{name} ({'; '.join(texts)})" for name, texts in datasets.items()])
        notes.append(
            f"Not all models were scored with the same {what} on {named}: these scores are not comparable."
        )
    return notes


def _models(lines: Sequence[Sequence[_Line]], earlier: Sequence[tuple[int, ...]]) -> tuple[Model, ...]:
    """Build the models, each from its lines; labels are as short as they can be while they differ."""
    heads = []  # the first origin that a user named, a run rather than its checkpoint
    for own in lines:
        first = min((origin for origin, _ in own), key=lambda one: not one.typed)
        same = [origin for origin, _ in own if origin.short == first.short]
        heads.append(min(same, key=lambda one: (not one.typed, bool(one.checkpoint))))
    of_run: dict[str, list[int]] = {}
    for i, head in enumerate(heads):
        of_run.setdefault(head.run, []).append(i)
    short = _short_names({run: heads[own[0]] for run, own in of_run.items()})
    steps = [next((one.step for one, _ in reversed(own) if one.step is not None), None) for own in lines]
    models: dict[str, Model] = {}
    for i, (own, head) in enumerate(zip(lines, heads, strict=True)):
        origins, last = [origin for origin, _ in own], own[-1][1].line
        weights = next((one.weights for one in reversed(origins) if one.is_of_file), origins[-1].weights)
        label, others = short[head.run], of_run[head.run]
        if len(others) > 1:
            step_of, checkpoint_of = [steps[j] for j in others], [heads[j].checkpoint for j in others]
            digits = (weights.removeprefix(_FILE_HASH) or head.model_hash)[:_DIGITS]
            if None not in step_of and len(set(step_of)) == len(others):
                label += f" at step {steps[i]}"
            elif all(checkpoint_of) and len(set(checkpoint_of)) == len(others):
                label += f" {head.checkpoint}"
            else:
                label += f" ({digits or 'unnamed weights'})"
        while label in models:
            label += "′"
        architecture = text_of(last, "architecture")
        # from the last line that has it, or else by formula for clipkit's own architectures
        recorded = (finite(record.line.get("gflops")) for _, record in reversed(own))
        gflops = next((one for one in recorded if one is not None), None)
        if gflops is None and (built_in := architecture.removesuffix(QUICKGELU)) in ARCHITECTURES:
            gflops = image_flops(ARCHITECTURES[built_in]).forward / 1e9
        models[label] = Model(
            label=label,
            name=head.name,
            names=tuple(dict.fromkeys(name for one in origins for name in (one.name, one.typed) if name)),
            others=tuple(dict.fromkeys(one.name for one in origins if one.typed and one.short != head.short)),
            run=head.run,
            weights=weights,
            step=steps[i],
            earlier_steps=earlier[i],
            files=tuple(dict.fromkeys(one.file for one in origins)),
            architecture=architecture,
            gflops=gflops,
            provenance={key: one for key, one in last.items() if key not in Record.__dataclass_fields__},
        )
    return tuple(models.values())


def _short_names(heads: Mapping[str, _Origin]) -> dict[str, str]:
    """Shorten the names of runs: leave out a scheme, or folders of a path, while all names differ."""
    ways: dict[str, list[str]] = {}  # by run, from short to long
    for run, head in heads.items():
        name = head.name
        if _SCHEME.match(name):
            ways[run] = [_SCHEME.sub("", name), name]
        elif head.is_of_file or run == head.folder:
            parts = PurePosixPath(head.folder if run == head.folder else name).parts
            ways[run] = [str(PurePosixPath(*parts[-k:])) for k in range(1, len(parts) + 1)] or [name]
        else:
            ways[run] = [name]
    while True:
        shown = [own[0] for own in ways.values()]
        ambiguous = [own for own in ways.values() if len(own) > 1 and shown.count(own[0]) > 1]
        if not ambiguous:
            return {run: own[0] for run, own in ways.items()}
        for own in ambiguous:
            own.pop(0)


@dataclass(kw_only=True, eq=False)
class DataGroup:
    """Comparable scores: of the same images, as far as the lines say.

    Attributes:
        revision: the revision of their images; "" if unknown.
        n: number of items averaged over; None if unknown.
        rows: the scores.
        note: how this group differs from the others; "" for a single group.
    """

    revision: str = ""
    n: int | None = None
    rows: list[Record] = field(default_factory=list)
    note: str = ""


def by_data(rows: Iterable[Record]) -> list[DataGroup]:
    """Group scores of one metric by their data, the group with the most models first."""
    groups: list[DataGroup] = []
    # rows of known data first; the others then join the first group
    for row in sorted(rows, key=lambda row: (not row.data_revision, row.n is None)):
        for group in groups:
            if group.revision and row.data_revision not in ("", group.revision):
                continue
            if group.n is None or row.n in (None, group.n):
                break
        else:
            group = DataGroup()
            groups.append(group)
        group.rows.append(row)
        group.revision = group.revision or row.data_revision
        group.n = row.n if group.n is None else group.n
    groups.sort(key=lambda group: -len({row.model for row in group.rows}))
    revisions, sizes = ({group.revision for group in groups} - {""}, {group.n for group in groups} - {None})
    for group in groups:
        parts = [f"data {group.revision[:_REVISION]}"] if len(revisions) > 1 and group.revision else []
        parts += [f"n = {group.n:,}"] if len(sizes) > 1 and group.n is not None else []
        group.note = ", ".join(parts)
    return groups


def same_data(*rows: Record) -> bool:
    """Whether scores of one metric are comparable."""
    return len(by_data(rows)) == 1

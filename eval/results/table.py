"""One table of the scores in results files: a row per score, and the models that the rows are of.

Lines with the same weights belong to one model, named as a run, a checkpoint, an export, or by another spelling
of its path. Scores recorded by a training belong to the model that ``python -m eval run`` scored at that
step. Of several steps of a training the last counts, besides checkpoints that were named explicitly.
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter, itemgetter
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from clipkit.errors import DataError
from clipkit.files import counted
from clipkit.model import ARCHITECTURES, QUICKGELU, architecture_gflops
from eval.datasets.dataset import TEST, list_some
from eval.results.records import PREFIX, json_lines, parse_finite, parse_integer

_FILE_HASH = "sha256:"
_SCHEME = re.compile(r"^[a-z_]{2,20}:(?=.)")  # "open_clip:" before the name
_CHECKPOINT = re.compile(r"(?:(?P<run>.*)/)?checkpoints(?:/(?P<checkpoint>step_\d+|epoch_\w+\.pt))?")
_MAX_TEXT = 300
_DIGITS = 12  # of a hash, in a label
_REVISION = 16  # characters of a data revision, in a note
PROMPTED = ("zero-shot", "likelihood", "retrieval", "captioning", "judgments")

Series = tuple[str, str, str, str, str]  # dataset, split, task, prompt set, setting
_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


def group_by(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Group items by a key, in the order of first appearance."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@dataclass(frozen=True, kw_only=True)
class Record:
    """A row: a score, when it was measured and of which model.

    Except for the first four, a field that is missing or of another type is None, or "" for text.

    Attributes:
        dataset: as in ``Score``, as are the next ones.
        step: the training step.
        seconds: duration of the task.
        line: all fields as written.
        file: the results file.
        folder: the absolute path of its folder.
        model: the index of the model in a ``ResultTable``.
    """

    dataset: str
    task: str
    metric: str
    value: float
    n: int | None
    low: float | None
    high: float | None
    chance: float | None
    split: str
    prompt_set: str
    setting: str
    step: int | None
    seconds: float | None
    line: Mapping[str, Any]
    file: Path
    folder: str
    model: int = 0

    def text(self, key: str) -> str:
        """A text field of the line; "" if it is missing or of another type."""
        return get_text(self.line, key)

    @property
    def scored_in_training(self) -> bool:
        """Whether it was measured during the training, not by evaluating a checkpoint."""
        return "model_hash" not in self.line

    @property
    def series(self) -> Series:
        """The key shared by scores of one metric at several steps."""
        return self.dataset, self.split, self.task, self.prompt_set, self.setting

    @property
    def what(self) -> tuple[str, ...]:
        """What was measured: the series and the metric."""
        return *self.series, self.metric

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval, if there is one."""
        if self.low is None or self.high is None:
            return None
        return self.low, self.high

    @property
    def dim_and_setting(self) -> tuple[int, str]:
        """The number of elements of the embedding, 0 if unknown, and the setting without it."""
        match = PREFIX.fullmatch(self.setting)
        if match:
            return int(match[1]), match[2]
        return parse_integer(self.line.get("dim")) or 0, self.setting

    @property
    def data_revision(self) -> str:
        """The fingerprint of the images, or ""."""
        return self.text("data_revision")

    @property
    def prompts(self) -> str:
        """The fingerprint of the prompts (for retrieval, of the captions as encoded), or ""."""
        return self.text("captions" if self.task in ("retrieval", "captioning", "judgments") else "prompts")

    @property
    def weights(self) -> str:
        return self.text("weights")

    @property
    def names_file(self) -> bool:
        """Whether ``weights`` is the hash of a file."""
        return self.weights.startswith(_FILE_HASH)

    @property
    def is_hashed(self) -> bool:
        """Whether the line says which tensors were scored; the lines that a training writes may not."""
        return self.names_file or bool(self.text("model_hash"))

    @property
    def checkpoint(self) -> str:
        """The checkpoint that the user named, or ""."""
        return split_checkpoint(self.text("model"))[1]

    @cached_property
    def name(self) -> str:
        """The model as the user named it, without its checkpoint and in the shortest spelling of its path."""
        if self.text("model"):
            name = split_checkpoint(self.text("model"))[0]
        elif self.names_file:
            name = ""
        else:
            name = re.sub(r" at step \d+$", "", self.weights)
        if name in ("", "."):
            name = PurePosixPath(self.folder).name
        return name or self.weights or "a model"

    @cached_property
    def last_part(self) -> str:
        """The last part of the name if it is a path, or the whole name."""
        if _SCHEME.match(self.name):
            return self.name
        return PurePosixPath(self.name).name or self.name

    @cached_property
    def run(self) -> str:
        """Identifies the run of the model: the folder if the results are in it, otherwise the name."""
        if self.last_part == PurePosixPath(self.folder).name:
            return self.folder
        return self.name

    @cached_property
    def model_keys(self) -> tuple[Hashable, ...]:
        """Keys of the model, of which rows of one model share at least one."""
        model_hash, weights = self.text("model_hash"), self.weights
        keys: list[Hashable] = []
        if model_hash:
            keys.append(("model", model_hash))
        if self.names_file:
            # one file may be loaded as different architectures
            keys += [("file", weights, self.text("architecture")), ("named", self.run, weights)]
        elif weights or not model_hash:
            keys.append(("named", self.run, self.checkpoint, weights))
        return tuple(keys)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the table; ``label`` is unique.

    Attributes:
        name: as the user named it, a run without its checkpoint; ``names`` are all names it was scored by.
        run: the same for several models of one training.
        weights: as in the scores and their details; the hash of the file if it is known.
        earlier_steps: earlier steps of the same training, which have no rows of their own.
        files: the files with its lines.
        gflops: GFLOPs of the image tower for one image, or None if unknown.
        provenance: the other fields of its last line.
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
class ResultTable:
    """Models in the order of the files, rows in the order of the lines, and notes for the reader.

    ``unread`` are the notes on lines that are not scores.
    """

    models: tuple[Model, ...]
    rows: tuple[Record, ...]
    notes: tuple[str, ...]
    unread: tuple[str, ...] = ()


def get_text(line: Mapping[str, Any], key: str) -> str:
    """Return a text field of a line, cut to 300 characters; "" if it is missing or of another type."""
    value = line.get(key)
    return value[:_MAX_TEXT] if isinstance(value, str) else ""


def split_checkpoint(typed: str) -> tuple[str, str]:
    """Split the name of a model into the model and the checkpoint, ("runs/a", "step_00000600").

    ``./runs/a/`` and the folder of its checkpoints are ``runs/a``. The checkpoint is "" if none is named.
    """
    if _SCHEME.match(typed):
        return typed, ""
    path = PurePosixPath(typed)
    text = str(path.parent if path.name == "model.safetensors" else path)
    match = _CHECKPOINT.fullmatch(text)
    if match is None:
        return text, ""
    return match["run"] or ".", match["checkpoint"] or ""


def read_records(path: Path, notes: list[str], consequence: str = "") -> Iterator[Record]:
    """Read the records of a results file in order; ``notes`` receives what is left out or missing."""
    skipped = 0
    folder = str(path.resolve().parent)
    for line in json_lines(path, notes, consequence):
        value = parse_finite(line.get("value"))
        dataset = get_text(line, "dataset")
        task = get_text(line, "task")
        metric = get_text(line, "metric")
        if value is None or not (dataset and task and metric):
            skipped += 1
            continue
        yield Record(
            dataset=dataset,
            task=task,
            metric=metric,
            split=get_text(line, "split") or TEST,
            prompt_set=get_text(line, "prompt_set"),
            setting=get_text(line, "setting"),
            value=value,
            n=parse_integer(line.get("n")),
            low=parse_finite(line.get("low")),
            high=parse_finite(line.get("high")),
            chance=parse_finite(line.get("chance")),
            step=parse_integer(line.get("step")),
            seconds=parse_finite(line.get("seconds")),
            line=line,
            file=path,
            folder=folder,
        )
    if skipped:
        notes.append(
            f"{path.name}: {counted(skipped, 'line')} without a dataset, task, metric or finite value left out."
        )


def read_table(results: Sequence[Path]) -> ResultTable:
    """Read results files."""
    notes: list[str] = []
    records: list[Record] = []
    for path in results:
        try:
            if not path.is_file():
                raise DataError(f"no results file at {path}")
            records += read_records(path, notes)
        except OSError as error:
            raise DataError(f"cannot read {str(path)[:200]}: {error.strerror}") from error
    if not records:
        names = ", ".join(str(path)[:200] for path in results[:3])
        reasons = "".join(f"; {note}" for note in notes)
        raise DataError(f"there are no scores in {names or 'the results, as no file is given'}{reasons}")
    unread = tuple(notes)
    records = _assign_models(records)
    selected, earlier = _select_last_steps(records)
    shown = [record for record in records if record.model in selected]
    if len(shown) < len(records):
        left_out = counted(len(records) - len(shown), "score")
        notes.append(f"{left_out} of earlier steps of a training left out; the run's own page shows them.")
    groups = group_by(shown, attrgetter("model"))
    columns = {model: column for column, model in enumerate(groups)}
    latest: dict[tuple[int, tuple[str, ...]], Record] = {}
    replaced: dict[str, None] = {}
    for record in shown:
        key = record.model, record.what
        before = latest[key].data_revision if key in latest else ""
        if before and record.data_revision not in ("", before):
            replaced[f"{record.dataset} (revision {before[:_REVISION]})"] = None
        latest[key] = replace(record, model=columns[record.model])
    rows = tuple(latest.values())
    notes += _note_different_data(rows)
    notes += _note_equal_images(rows)
    if replaced:
        notes.append(
            f"Replaced by later scores on different images with the same name: {list_some(list(replaced))}."
        )
    models = _build_models(groups, earlier, notes)
    return ResultTable(models=models, rows=rows, notes=tuple(notes), unread=unread)


def _assign_models(records: Sequence[Record]) -> list[Record]:
    models: dict[int, int] = {}
    model_of_key: dict[Hashable, int] = {}
    scored_at: dict[Hashable, set[int]] = {}
    # records with hashes first: they tell which names are of one model
    for i in sorted(range(len(records)), key=lambda i: not records[i].is_hashed):
        record = records[i]
        step_key = record.file, record.last_part, record.step, record.text("architecture")
        scored = scored_at.setdefault(step_key, set())
        if not record.is_hashed and record.step is not None and len(scored) == 1:
            # scores of a training without a hash belong to the one model scored at their step
            (models[i],) = scored
        else:
            models[i] = next((model_of_key[key] for key in record.model_keys if key in model_of_key), i)
        for key in record.model_keys:
            model_of_key.setdefault(key, models[i])
        if record.is_hashed:
            scored.add(models[i])
    return [replace(record, model=models[i]) for i, record in enumerate(records)]


def _select_last_steps(records: Sequence[Record]) -> tuple[set[int], dict[int, set[int]]]:
    """Of each run in a file, select the last step if the steps of all its weights are known.

    Returns:
        The selected models, and by model the earlier steps of its run that are left out.
    """
    runs: dict[tuple[Path, str], dict[int, int | None]] = {}
    selected: set[int] = set()
    for record in records:
        steps = runs.setdefault((record.file, record.run), {})
        if record.step is not None or record.model not in steps:
            steps[record.model] = record.step
        # named explicitly
        if record.checkpoint:
            selected.add(record.model)
    for steps in runs.values():
        last = max((step for step in steps.values() if step is not None), default=None)
        for model, step in steps.items():
            if None in steps.values() or step == last:
                selected.add(model)
    earlier: dict[int, set[int]] = {}
    for steps in runs.values():
        left_out = {step for model, step in steps.items() if model not in selected and step is not None}
        for model in selected & steps.keys():
            earlier.setdefault(model, set()).update(left_out)
    return selected, earlier


def _note_equal_images(rows: Sequence[Record]) -> list[str]:
    problems = {
        "train_overlap": "{} also in train (identical files), so scores of tasks that learn are too high.",
        "equal_images": "{} equal to another with other captions (identical files), so recall is too low.",
    }
    nouns = {"train_overlap": "scored image", "equal_images": "image"}
    notes = []
    for key, problem in problems.items():
        counts = {row.dataset: parse_integer(row.line[key]) for row in rows if key in row.line}
        for dataset, count in counts.items():
            if count:
                notes.append(f"{dataset}: {problem.format(counted(count, nouns[key]))}")
    return notes


def _note_different_data(rows: Sequence[Record]) -> list[str]:
    splits = group_by(rows, attrgetter("dataset", "split"))
    scores = group_by(rows, attrgetter("what"))
    prompted = [row for row in rows if row.task in PROMPTED]
    prompt_sets = group_by(prompted, attrgetter("dataset", "split", "task", "prompt_set"))
    images = [
        *_list_differences(splits, "revisions", attrgetter("data_revision")),
        *_list_differences(scores, "n =", lambda row: "" if row.n is None else f"{row.n:,}"),
    ]
    prompts = _list_differences(prompt_sets, "revisions", attrgetter("prompts"))
    notes = []
    for noun, differences in (("images", images), ("prompts", prompts)):
        names = []
        for dataset, pairs in group_by(differences, itemgetter(0)).items():
            texts = dict.fromkeys(text for _, text in pairs)
            names.append(f"{dataset} ({'; '.join(texts)})")
        if names:
            notes.append(
                f"Not all models were scored with the same {noun} on {list_some(names)}: these scores are not "
                "comparable."
            )
    return notes


def _list_differences(
    groups: Mapping[Any, Sequence[Record]], label: str, get_value: Callable[[Record], str]
) -> list[tuple[str, str]]:
    """List the dataset and the values of each group whose values, as far as there are any, differ."""
    differences = []
    for rows in groups.values():
        values = dict.fromkeys(filter(None, map(get_value, rows)))
        if len(values) > 1:
            texts = [value[:_REVISION] for value in values]
            text = " and ".join(texts) if len(texts) < 4 else list_some(texts)
            differences.append((rows[0].dataset, f"{label} {text}"))
    return differences


def _build_models(
    groups: Mapping[int, Sequence[Record]], earlier: Mapping[int, set[int]], notes: list[str]
) -> tuple[Model, ...]:
    """Build the models, each from its records; labels are as short as they can be while they differ."""
    heads = {model: _select_head(records) for model, records in groups.items()}
    steps = {model: _find_last(record.step for record in records) for model, records in groups.items()}
    run_labels = _label_runs({head.run: head for head in reversed(heads.values())})
    models: dict[str, Model] = {}
    for index, records in groups.items():
        head = heads[index]
        last = records[-1]
        weights = _find_last(record.weights for record in records if record.names_file)
        if weights is None:
            weights = last.weights
        label = run_labels[head.run]
        siblings = [other for other in heads if heads[other].run == head.run]
        if len(siblings) > 1:
            sibling_steps = {steps[other] for other in siblings}
            checkpoints = {heads[other].checkpoint for other in siblings}
            if None not in sibling_steps and len(sibling_steps) == len(siblings):
                label += f" at step {steps[index]}"
            elif "" not in checkpoints and len(checkpoints) == len(siblings):
                label += f" {head.checkpoint}"
            else:
                digits = (weights.removeprefix(_FILE_HASH) or head.text("model_hash"))[:_DIGITS]
                label += f" ({digits or 'unnamed weights'})"
        while label in models:
            label += "′"
        names: dict[str, None] = {}
        others: dict[str, None] = {}
        for record in records:
            names |= dict.fromkeys(filter(None, (record.name, record.text("model"))))
            if record.text("model") and record.last_part != head.last_part:
                others[record.name] = None
        if others:
            verb = "has" if len(others) == 1 else "have"
            notes.append(
                f"{list_some(list(others))} {verb} the same weights as {label}: they share one column."
            )
        models[label] = Model(
            label=label,
            name=head.name,
            names=tuple(names),
            run=head.run,
            weights=weights,
            step=steps[index],
            earlier_steps=tuple(sorted(earlier.get(index, ()))),
            files=tuple(dict.fromkeys(record.file for record in records)),
            architecture=last.text("architecture"),
            gflops=_find_gflops(records),
            provenance={key: last.line[key] for key in last.line if key not in Record.__dataclass_fields__},
        )
    return tuple(models.values())


def _find_gflops(records: Sequence[Record]) -> float | None:
    """Find the cost of the image tower in the records, or else count that of a built-in architecture."""
    gflops = _find_last(parse_finite(record.line.get("gflops")) for record in records)
    architecture = records[-1].text("architecture").removesuffix(QUICKGELU)
    if gflops is None and architecture in ARCHITECTURES:
        return architecture_gflops(ARCHITECTURES[architecture])
    return gflops


def _select_head(records: Sequence[Record]) -> Record:
    """Select the record that names the model: the first one that a user named, a run rather than a checkpoint."""
    first = min(records, key=lambda record: not record.text("model"))
    same = [record for record in records if record.last_part == first.last_part]
    return min(same, key=lambda record: (not record.text("model"), bool(record.checkpoint)))


def _find_last(values: Iterable[_Item | None]) -> _Item | None:
    return next((value for value in reversed([*values]) if value is not None), None)


def _label_runs(heads: Mapping[str, Record]) -> dict[str, str]:
    """Shorten the names of runs: leave out a scheme, or folders of a path, while all names differ."""
    # by run, from short to long
    spellings: dict[str, list[str]] = {}
    for run, head in heads.items():
        if _SCHEME.match(head.name):
            spellings[run] = [_SCHEME.sub("", head.name), head.name]
        elif head.names_file or run == head.folder:
            parts = PurePosixPath(head.folder if run == head.folder else head.name).parts
            spellings[run] = [str(PurePosixPath(*parts[-k:])) for k in range(1, len(parts) + 1)]
        else:
            spellings[run] = [head.name]
    while True:
        labels = {run: names[0] for run, names in spellings.items()}
        counts = Counter(labels.values())
        ambiguous = [names for names in spellings.values() if len(names) > 1 and counts[names[0]] > 1]
        if not ambiguous:
            return labels
        for names in ambiguous:
            names.pop(0)


@dataclass(kw_only=True, eq=False)
class DataGroup:
    """Comparable scores, of images of one revision and number as far as the lines say.

    ``note`` says how this group differs from the others; "" for a single group.
    """

    revision: str = ""
    n: int | None = None
    rows: list[Record] = field(default_factory=list)
    note: str = ""

    def accepts(self, row: Record) -> bool:
        if self.revision and row.data_revision not in ("", self.revision):
            return False
        return self.n is None or row.n in (None, self.n)


def group_by_data(rows: Iterable[Record]) -> list[DataGroup]:
    """Group scores of one metric by their data, the group with the most models first."""
    groups: list[DataGroup] = []
    # rows with a revision and a number first; the others then join the first group
    for row in sorted(rows, key=lambda row: (not row.data_revision, row.n is None)):
        group = next((group for group in groups if group.accepts(row)), None)
        if group is None:
            group = DataGroup()
            groups.append(group)
        group.rows.append(row)
        group.revision = group.revision or row.data_revision
        if group.n is None:
            group.n = row.n
    groups.sort(key=lambda group: -len({row.model for row in group.rows}))
    revisions = {group.revision for group in groups} - {""}
    sizes = {group.n for group in groups} - {None}
    for group in groups:
        parts = []
        if len(revisions) > 1 and group.revision:
            parts.append(f"data {group.revision[:_REVISION]}")
        if len(sizes) > 1 and group.n is not None:
            parts.append(f"n = {group.n:,}")
        group.note = ", ".join(parts)
    return groups


def is_same_data(*rows: Record) -> bool:
    """Whether scores of one metric are comparable."""
    return len(group_by_data(rows)) == 1

"""Whether one model is better than another beyond chance: paired tests on what each item got, dataset by dataset.

Accuracies and recalls are tested by McNemar's exact test, means and other metrics by a paired bootstrap (see
eval/metrics/intervals.py). What does not compare is refused with a line that says why: other images, other
prompts, another number of items. Testing many datasets finds differences by chance alone, so p is corrected by
Holm's procedure (1979, "A simple sequentially rejective multiple test procedure") over the datasets of each
task, setting and metric: in such a family, the chance of naming any difference that is none stays below 5%.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from clipkit.errors import ConfigError, DataError, nearest
from clipkit.files.terminal import counted
from eval.datasets import Card, Expected, card_names, load_card, read_card
from eval.datasets.dataset import some
from eval.datasets.targets import OWN_CARD, Target, Trouble, find_targets
from eval.metrics import METRICS, Comparison, compare_correct, compare_means, compare_statistics
from eval.report.result_set import (
    Model,
    ResultSet,
    read_result_set,
    split_checkpoint,
)
from eval.results.records import Details, details_folder, read_details
from eval.results.scores import Record, Score

__all__ = [
    "LEVEL",
    "Check",
    "Difference",
    "Known",
    "ModelComparison",
    "checks_of",
    "compare",
    "expected_of",
    "find_known",
    "find_models",
    "known_tasks",
    "nothing_checked",
    "print_checks",
]


# --------------------------------------------------------------------------------------------------------------
# Which two models of some results a user means: by name, label, hash, results file, run folder or checkpoint.

_LEAST_DIGITS = 6  # of a hash, to name weights by how they begin
_FORM = "`compare MODEL_A MODEL_B --results FILE`"
_HOW = f"name one as {_FORM}"


def find_models(
    results: Sequence[Path], first: str, second: str
) -> tuple[list[Path], ResultSet, tuple[int, int], list[str]]:
    """Read the scores of two models.

    Args:
        results: ``results.jsonl`` files; what the names themselves say comes to them.
        first: a model, as ``compare`` takes it.
        second: another.

    Returns:
        All files, what is in them, the numbers of the two models, and notes for who reads the comparison.

    Raises:
        ConfigError: there is no such model or file, several have the name, or both are the same.
        DataError: a file cannot be read, or has no scores.
    """
    known = read_result_set(results).models if results else ()
    paths: list[Path | None] = []
    files = list(results)
    for name in (first, second):
        there = any(_goes_by(model, name) for model in known)
        of_run = _results_of_run(name)
        # a checkpoint is scored into the results of its run, which has others too
        paths.append(None if there or of_run else _file(name))
        files += [] if there else [one for one in (of_run, paths[-1]) if one is not None]
    files = list(dict.fromkeys(files))
    if not files:
        raise ConfigError(f"{first!r} is no results file and no run folder: for a model's name say {_FORM}")
    found = read_result_set(files)
    notes = list(found.unread)
    one, other = (_model(found, *pair, notes) for pair in zip((first, second), paths, strict=True))
    if one == other:
        raise ConfigError(f"{first!r} and {second!r} are the same model: name two")
    return files, found, (one, other), notes


def _results_of_run(name: str) -> Path | None:
    """The results file of the run whose checkpoint is named; None where it is none, or has no results."""
    path = Path(split_checkpoint(name)[0]) / "results.jsonl"
    try:
        return path if split_checkpoint(name)[1] and path.is_file() else None
    except (OSError, ValueError):
        return None


def _file(name: str) -> Path | None:
    """The results file that is named, or that lies in the run folder that is named; None where it is neither.

    Raises:
        ConfigError: it should be there, and is not.
    """
    path = Path(name)
    try:
        if path.is_dir():
            path = path / "results.jsonl"
            if not path.is_file():
                raise ConfigError(f"no results at {path}: score the model by `python -m eval run`")
            return path
        if path.suffix != ".jsonl":
            return None
        if not path.is_file():
            raise ConfigError(f"there is no file {name[:200]}")
    except OSError as error:
        raise ConfigError(f"cannot read {name[:200]}: {error.strerror}") from error
    return path


def _model(found: ResultSet, name: str, path: Path | None, notes: list[str]) -> int:
    """The number of a model; of several steps of one training the last.

    Raises:
        ConfigError: there is none, or several.
    """
    models = found.models
    if path is not None:
        matches = [i for i, model in enumerate(models) if path in model.files]
    else:
        matches = [i for i, model in enumerate(models) if name in (model.label, model.weights, *model.names)]
        matches = matches or [i for i, model in enumerate(models) if _goes_by(model, name)]
    labels = ", ".join(models[i].label for i in matches)
    if len({models[i].run for i in matches}) == 1 and not split_checkpoint(name)[1]:
        steps = {step for i in matches for step in (models[i].step, *models[i].earlier_steps)}
        of = sorted(step for step in steps if step is not None)
        last = [i for i in matches if None not in steps and models[i].step == of[-1]]
        if len(last) == 1 and len(of) > 1:
            shown = some([f"{step:,}" for step in of])
            notes.append(f"{path or name} has scores of steps {shown}: the last is compared")
        matches = last or matches
    if len(matches) == 1:
        return matches[0]
    if path is not None and not matches:
        raise DataError(f"there are no scores in {path}")
    if path is not None:
        how = _HOW.replace("FILE", str(path))
        raise ConfigError(f"{path} holds several models ({labels}): {how}")
    if matches:
        raise ConfigError(f"{name!r} is several models: name one of {labels}, as {_FORM}")
    if split_checkpoint(name)[1] and any(split_checkpoint(name)[0] in model.names for model in models):
        raise ConfigError(
            f"no scores of the checkpoint {name!r}: score it by `python -m eval run --model {name}`"
        )
    known = nearest(name, [model.label for model in models])
    raise ConfigError(f"no results of a model {name!r}, and no such file or run folder: {known}")


def _goes_by(model: Model, name: str) -> bool:
    """Whether a name means a model; that of a checkpoint means it alone, not others of its run."""
    plain, checkpoint = split_checkpoint(name)
    if checkpoint:
        number = checkpoint.removeprefix("step_")
        if model.step is not None and number.isdecimal():
            if int(number) != model.step:
                return False
        elif all(split_checkpoint(one)[1] != checkpoint for one in model.names):
            return False
    start = name.removeprefix("sha256:")
    begins = len(start) >= _LEAST_DIGITS and model.weights.removeprefix("sha256:").startswith(start)
    return name == model.label or plain in model.names or begins


# --------------------------------------------------------------------------------------------------------------

LEVEL = 0.05
_ROUNDING = 1e-4  # between a score and the mean of what each item got
_NO_DETAILS = "there are no details of what each item got"
_Kind = tuple[str, str, str, str]  # dataset, split, task, setting


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One metric of two models on one dataset.

    Attributes:
        dataset: its name.
        task: as in the scores.
        setting: as in the scores.
        prompt_set: that both were scored with.
        metric: as in the scores.
        first: the first model's value.
        second: the second model's value.
        test: the second less the first, with its 95% interval and the uncorrected p.
        p: corrected by Holm's procedure.
    """

    dataset: str
    task: str
    setting: str
    prompt_set: str
    metric: str
    first: float
    second: float
    test: Comparison
    p: float

    @property
    def beyond_chance(self) -> bool:
        """Whether there is a difference, at 5%."""
        return self.p < LEVEL


@dataclass(frozen=True, kw_only=True)
class ModelComparison:
    """Two models by their labels, what was tested, a line for each thing that was not, and notes on the files."""

    first: str
    second: str
    differences: tuple[Difference, ...]
    refused: tuple[str, ...]
    notes: tuple[str, ...] = ()


def compare(results: Sequence[Path], first: str, second: str) -> ModelComparison:
    """Test which differences between two models are beyond chance.

    Args:
        results: ``results.jsonl`` files with their details beside them.
        first: a model by its name, its label on the page, or its weights (or how these begin); or a results file
            that holds one model, or a run folder for its ``results.jsonl``. Of several steps of one training the
            last is meant, unless the name is a checkpoint's.
        second: another.

    Raises:
        ConfigError: there is no such model or file, several have the name, or both are the same.
        DataError: a file cannot be read, or the models have no dataset and task in common.
    """
    files, found, (one, other), notes = find_models(results, first, second)
    details: dict[tuple[str, ...], Details] = {}
    refused: list[str] = []
    for path in files:
        read, trouble = read_details(path)
        details.update({each.key: each for each in read})
        refused += trouble
    rows = [_by_kind(found, model) for model in (one, other)]
    shared = [kind for kind in rows[0] if kind in rows[1]]
    labels = found.models[one].label, found.models[other].label
    if not shared:
        raise DataError(
            f"{labels[0]} and {labels[1]} have no dataset and task in common, so nothing compares"
        )
    weights = found.models[one].weights, found.models[other].weights
    findings = _Findings(differences=[], refused={})
    for kind in shared:
        _compare_kind(kind, (rows[0][kind], rows[1][kind]), weights, details, findings)
    for label, own, others in ((labels[0], rows[0], rows[1]), (labels[1], rows[1], rows[0])):
        for kind in own:
            if kind not in others:
                findings.refuse(kind, f"only {label} has scores")
    if any(why == _NO_DETAILS for _, why in findings.refused):
        missing = [folder for folder in map(details_folder, files) if not folder.is_dir()]
        notes += [
            f"{one.name}/ must lie beside {one.stem}.jsonl, and is not in {one.parent}" for one in missing
        ]
    refused += [f"{task} on {some(list(names))}: {why}" for (task, why), names in findings.refused.items()]
    return ModelComparison(
        first=labels[0],
        second=labels[1],
        differences=tuple(_holm(findings.differences)),
        refused=tuple(refused),
        notes=tuple(notes),
    )


@dataclass(frozen=True, kw_only=True)
class _Findings:
    """What is gathered kind by kind; ``refused`` gives the datasets by task and reason."""

    differences: list[Difference]
    refused: dict[tuple[str, str], dict[str, None]]

    def refuse(self, kind: _Kind, why: str) -> None:
        dataset, split, task, _ = kind
        name = dataset if split == "test" else f"{dataset} {split}"
        self.refused.setdefault((task, why), {})[name] = None


def _by_kind(found: ResultSet, model: int) -> dict[_Kind, list[Record]]:
    kinds: dict[_Kind, list[Record]] = {}
    for row in found.rows:
        if row.model == model:
            kinds.setdefault((row.dataset, row.split, row.task, row.setting), []).append(row)
    return kinds


def _compare_kind(
    kind: _Kind,
    rows: tuple[Sequence[Record], Sequence[Record]],
    weights: tuple[str, str],
    details: Mapping[tuple[str, ...], Details],
    findings: _Findings,
) -> None:
    """Test one dataset, task and setting, with every prompt set that both models were scored with."""
    dataset, split, task, setting = kind
    if task == "few-shot":
        findings.refuse(kind, "few-shot scores are means over draws of images, without details of each")
        return
    prompts = [list(dict.fromkeys(row.prompt_set for row in own)) for own in rows]
    common = [one for one in prompts[0] if one in prompts[1]]
    if not common:
        differ = f"{prompts[0][0] or 'none'} and {prompts[1][0] or 'none'}"
        findings.refuse(kind, f"the prompt sets differ ({differ})")
    for prompt_set in common:
        first, second = ({row.metric: row for row in own if row.prompt_set == prompt_set} for own in rows)
        scores = [(row, second[metric]) for metric, row in first.items() if metric in second]
        pair = [details.get((one, dataset, split, task, prompt_set, setting)) for one in weights]
        why = _incomparable(scores)
        if why is not None:
            findings.refuse(kind, why)
        elif pair[0] is None or pair[1] is None:
            findings.refuse(kind, _NO_DETAILS)
        elif (why := _different_items(pair[0], pair[1])) is not None:
            findings.refuse(kind, why)
        else:
            _compare_scores(kind, scores, pair[0], pair[1], findings)


def _compare_scores(
    kind: _Kind, scores: Sequence[tuple[Record, Record]], first: Details, second: Details, findings: _Findings
) -> None:
    for row, other in scores:
        try:
            test = _test(row.metric, first, second)
        except DataError as error:
            findings.refuse(kind, f"{row.metric}: {error}")
            continue
        if test is not None and abs(test.difference - (other.value - row.value)) > _ROUNDING * max(
            1.0, row.value
        ):
            findings.refuse(kind, f"{row.metric}: the details are not those of these scores")
            continue
        if test is None:
            findings.refuse(kind, f"no test of {row.metric}, which the details do not hold item by item")
            continue
        findings.differences.append(
            Difference(
                dataset=row.dataset,
                task=row.task,
                setting=row.setting,
                prompt_set=row.prompt_set,
                metric=row.metric,
                first=row.value,
                second=other.value,
                test=test,
                p=test.p,
            )
        )


def _incomparable(pairs: Sequence[tuple[Record, Record]]) -> str | None:
    """Why scores of two models do not compare; None if they do."""
    for first, second in pairs:
        if first.data_revision and second.data_revision and first.data_revision != second.data_revision:
            return f"the data revisions differ ({first.data_revision} and {second.data_revision})"
        if first.n != second.n:
            return f"the numbers of items differ ({first.n or 0:,} and {second.n or 0:,})"
        of_set = f" of set {first.prompt_set}" if first.prompt_set else ""
        texts = {"zero-shot": f"prompts{of_set or ' of set own'}", "retrieval": f"captions{of_set}"}
        if first.task in texts and first.prompts and second.prompts and first.prompts != second.prompts:
            return f"the {texts[first.task]} differ ({first.prompts} and {second.prompts})"
    return None if pairs else "there is no metric that both have"


def _different_items(first: Details, second: Details) -> str | None:
    """Why details are not of the same items."""
    if first.data_revision and second.data_revision and first.data_revision != second.data_revision:
        return f"the details are of other data ({first.data_revision} and {second.data_revision})"
    if first.n != second.n:
        return f"the details are of other numbers of items ({first.n:,} and {second.n:,})"
    if (first.labels is None) != (second.labels is None):
        return "only one model's details hold the labels"
    try:
        same = first.labels is None or _labels(first).equal(_labels(second))
    except DataError as error:
        return str(error)
    return None if same else "the details are of items in another order, or with other labels"


def _test(metric: str, first: Details, second: Details) -> Comparison | None:
    """The paired test of a metric; None if the details do not hold what it needs.

    Raises:
        DataError: what they hold does not unpack, or is of different lengths.
    """
    if metric in first.right and metric in second.right:
        bits = _pair(first.right[metric].tensor(), second.right[metric].tensor())
        return compare_correct(bits[0], bits[1])
    known = METRICS.get("mean_top1_top5" if metric == "mean_of_top1_and_top5" else metric)  # an older name
    if metric in first.values and metric in second.values:
        pair = _pair(first.values[metric].tensor(), second.values[metric].tensor())
        if known is None or known.item_statistic is None:
            return compare_means(pair[0], pair[1])
        labels = _of(_labels(first), pair[0])
        statistics = [known.item_statistic(values, labels) for values in pair]
        return compare_statistics(statistics[0], statistics[1], len(labels))
    if (
        known is None
        or known.items is None
        or first.labels is None
        or not all({*known.items_from} <= {*one.right} for one in (first, second))
    ):
        return None
    items = []
    for details in (first, second):
        right = {name: details.right[name].tensor() for name in known.items_from}
        labels = _labels(first)
        for values in right.values():
            _of(values, labels)
        items.append(known.items(right, labels))
    return compare_means(items[0], items[1])


def _pair(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    return first, _of(second, first)


def _of(values: Tensor, like: Tensor) -> Tensor:
    if len(values) != len(like) or not len(values):
        raise DataError(f"the details are of {len(like):,} and {len(values):,} items")
    return values


def _labels(details: Details) -> Tensor:
    assert details.labels is not None
    return details.labels.tensor()


def _holm(differences: Sequence[Difference]) -> list[Difference]:
    """Corrected over the datasets of each task, setting and metric."""
    families: dict[tuple[str, str, str], list[int]] = {}
    for i, one in enumerate(differences):
        families.setdefault((one.task, one.setting, one.metric), []).append(i)
    corrected = list(differences)
    for family in families.values():
        least = 0.0
        for place, i in enumerate(sorted(family, key=lambda i: differences[i].p)):
            least = max(least, min(1.0, (len(family) - place) * differences[i].p))
            corrected[i] = replace(differences[i], p=least)
    return corrected


# --------------------------------------------------------------------------------------------------------------
# ``python -m eval verify``: does this machine reach the scores that are known for a model?
#
# Cards state scores as ``expected``, by the model's name, with a tolerance and a source. Whoever has the
# weights and the data learns by one command whether preprocessing, prompts, data and metrics are as they should
# be.


@dataclass(frozen=True, kw_only=True)
class Check:
    """A score that is known, beside the measured one; None where it was not measured."""

    dataset: str
    expected: Expected
    measured: float | None

    @property
    def holds(self) -> bool | None:
        """Whether it is within the tolerance; None where it was not measured."""
        if self.measured is None:
            return None
        return abs(self.measured - self.expected.value) <= self.expected.tolerance


@dataclass(frozen=True, kw_only=True)
class Known:
    """The datasets on which scores of a model are known.

    Attributes:
        targets: those that are here, each once for every prompt set in which a score is known.
        trouble: why others are not here, or cannot be opened.
        datasets: how many there are, here or not.
    """

    targets: list[Target]
    trouble: list[DataError]
    datasets: int


def known_tasks(names: Sequence[str], model: str) -> tuple[str, ...]:
    """The tasks of which scores of a model are known, by the cards alone: nothing is opened.

    Args:
        names: datasets, as a user names them; none for all that there are cards of.
        model: by the name that its scores are known under.

    Raises:
        ConfigError: none is known.
    """
    of_cards = [one for card in _cards(names).values() for one in card.expected]
    if known := tuple(dict.fromkeys(one.task for one in of_cards if one.model == model)):
        return known
    models = sorted({one.model for one in of_cards})
    where = f" on {some(names)}" if names else ""
    if not models:
        raise ConfigError(
            f"nothing is known of {model!r}{where}, nor of any model: a card has to state scores, as [[expected]]"
        )
    hint = nearest(model, models) if len(models) > 1 else f"only of {models[0]}"
    raise ConfigError(
        f"nothing is known of {model!r}{where}, {hint}; --as NAME says under which name the scores of --model are "
        "known"
    )


def find_known(names: Sequence[str], model: str, *, root: Path | str | None) -> Known:
    """Open the datasets whose cards state scores of a model.

    Args:
        names: datasets, as a user names them; none for all that there are cards of.
        model: by the name that its scores are known under.
        root: where datasets are looked for by their cards' names.

    Raises:
        ConfigError: no score of it is known; or there is no folder ``root``.
    """
    known_tasks(names, model)
    wanted = [
        name for name, card in _cards(names).items() if any(one.model == model for one in card.expected)
    ]
    targets: list[Target] = []
    trouble = Trouble(root)
    for name in wanted:
        try:
            for prompts in _prompt_sets(_cards([name])[name], model):
                targets += find_targets([name], root=root, prompts=prompts)
        except DataError as error:
            trouble.add(name, error)
    return Known(targets=targets, trouble=trouble.lines(), datasets=len(wanted))


def _prompt_sets(card: Card, model: str) -> list[str]:
    """Those in which scores of a model are known; "" where none is named, or captions have to stand as they are."""
    known = [one for one in card.expected if one.model == model]
    named = list(dict.fromkeys(one.prompts for one in known if one.prompts))
    plain = any(one.task == "retrieval" and not one.prompts for one in known)
    return [*named, ""] if not named or (plain and set(named) <= set(card.caption_prompts)) else named


def _cards(names: Sequence[str]) -> dict[str, Card]:
    """By dataset its card; some have none."""
    found = {}
    for name in names or card_names():
        own = Path(name).expanduser() / OWN_CARD
        if own.is_file():
            found[name] = read_card(own)
        elif name in card_names() and not Path(name).is_dir():
            found[name] = load_card(name)
    return found


def expected_of(target: Target, model: str) -> list[Expected]:
    """What a dataset's card expects of a model in the prompts that the dataset has been given."""
    if target.card is None:
        return []
    of_classes, of_captions = ("", target.dataset.prompt_set), (target.dataset.caption_prompt_set,)
    return [
        one
        for one in target.card.expected
        if one.model == model and one.prompts in (of_captions if one.task == "retrieval" else of_classes)
    ]


def checks_of(target: Target, model: str, scores: Sequence[Score]) -> list[Check]:
    """Each expected score beside what was measured."""
    found = {
        (score.task, score.metric): score.value
        for score in scores
        if score.dataset == target.dataset.name and not score.setting
    }
    return [
        Check(dataset=target.dataset.name, expected=one, measured=found.get((one.task, one.metric)))
        for one in expected_of(target, model)
    ]


def nothing_checked(known: Known, model: str) -> str:
    """What to say where there is no check."""
    of = counted(known.datasets, "dataset")
    why = "can be scored" if known.targets else "is here"
    return f"nothing could be checked: none of the {of} that {model} is known on {why}"


def print_checks(checks: Sequence[Check]) -> int:
    """A table, a line a check; the exit status: 1 if one does not hold or was not measured."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("dataset", overflow="fold")
    table.add_column("task and metric", overflow="fold")
    for heading in ("measured %", "expected %", "±", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    verdicts = {True: "holds", False: "FAILS", None: "not measured"}
    for check in checks:
        known = check.expected
        table.add_row(
            check.dataset,
            f"{known.task} {known.metric}",
            "" if check.measured is None else f"{100 * check.measured:.2f}",
            f"{100 * known.value:.2f}",
            f"{100 * known.tolerance:.2f}",
            verdicts[check.holds],
        )
    console = Console(highlight=False)
    console.print(table)
    for source in dict.fromkeys(check.expected.source for check in checks):
        console.print(f"expected by {source}", markup=False)
    return 0 if all(check.holds for check in checks) else 1

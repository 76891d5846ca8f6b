"""Whether one model is better than another beyond chance: paired tests on what each item got, dataset by dataset.

Accuracies and recalls are tested by McNemar's exact test, means and other metrics by a paired bootstrap (see
eval/metrics/compare.py). What does not compare is refused with a line that says why: other pictures, other prompts,
another number of items. Testing many datasets finds differences by chance alone, so p is corrected by Holm's
procedure (1979, "A simple sequentially rejective multiple test procedure") over the datasets of each task, setting
and metric: in such a family, the chance of naming any difference that is none stays below 5%.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from clipkit.errors import DataError
from eval.compared_models import find_models
from eval.dataset import some
from eval.details import Details, details_folder, read_details
from eval.metrics import (
    Comparison,
    compare_correct,
    compare_means,
    compare_statistics,
    roc_auc_statistic,
)
from eval.report.result_set import ResultSet, Row

__all__ = ["LEVEL", "Difference", "ModelComparison", "compare"]

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


def _by_kind(found: ResultSet, model: int) -> dict[_Kind, list[Row]]:
    kinds: dict[_Kind, list[Row]] = {}
    for row in found.rows:
        if row.model == model:
            kinds.setdefault((row.dataset, row.split, row.task, row.setting), []).append(row)
    return kinds


def _compare_kind(
    kind: _Kind,
    rows: tuple[Sequence[Row], Sequence[Row]],
    weights: tuple[str, str],
    details: Mapping[tuple[str, ...], Details],
    findings: _Findings,
) -> None:
    """Test one dataset, task and setting, with every prompt set that both models were scored with."""
    dataset, split, task, setting = kind
    if task == "few-shot":
        findings.refuse(kind, "few-shot scores are means over draws of pictures, without details of each")
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
    kind: _Kind, scores: Sequence[tuple[Row, Row]], first: Details, second: Details, findings: _Findings
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


def _incomparable(pairs: Sequence[tuple[Row, Row]]) -> str | None:
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
    if metric in first.values and metric in second.values:
        pair = _pair(first.values[metric].tensor(), second.values[metric].tensor())
        if metric != "roc_auc":
            return compare_means(pair[0], pair[1])
        labels = _of(_labels(first), pair[0])
        areas = roc_auc_statistic(pair[0], labels), roc_auc_statistic(pair[1], labels)
        return compare_statistics(areas[0], areas[1], len(labels))
    if (
        metric == "mean_per_class_recall"
        and first.labels
        and "acc1" in first.right
        and "acc1" in second.right
    ):
        pair = _pair(first.right["acc1"].tensor(), second.right["acc1"].tensor())
        weights = _weights(_of(_labels(first), pair[0]))
        return compare_means(pair[0] * weights, pair[1] * weights)
    if metric in ("mean_of_top1_and_top5", "mean_top1_top5") and all(
        {"acc1", "acc5"} <= set(one.right) for one in (first, second)
    ):
        tops = _pair(_mean_of_tops(first), _mean_of_tops(second))
        return compare_means(tops[0], tops[1])
    return None


def _weights(labels: Tensor) -> Tensor:
    """(N,) float64, with which the mean over pictures is the mean over classes: those of a small class weigh more.

    As values of the pictures, they make the bootstrap as fast as that of a mean.
    """
    counts = labels.bincount()  # (C,)
    return (len(labels) / (int((counts > 0).sum()) * counts.double()))[labels]


def _mean_of_tops(details: Details) -> Tensor:
    one, five = _pair(details.right["acc1"].tensor(), details.right["acc5"].tensor())
    return (one.double() + five.double()) / 2


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

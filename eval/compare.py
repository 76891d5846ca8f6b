"""Compare two models by paired tests.

Accuracies and recalls are tested by McNemar's exact test, means and other metrics by a paired bootstrap (see
eval/metrics/intervals.py). Scores that are not comparable are skipped with a reason. As testing many datasets
finds differences by chance, p is corrected by Holm's procedure (1979, "A simple sequentially rejective multiple
test procedure") over the datasets of each task, setting and metric: the probability of any false finding among them
stays below 5%.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from clipkit.errors import ConfigError, DataError, nearest
from clipkit.files import printable
from eval.datasets.dataset import TEST, list_some
from eval.metrics import (
    Comparison,
    compare_correct,
    compare_means,
    compare_statistics,
    get_metric,
    is_fraction,
    lower_is_better,
)
from eval.options import CompareOptions
from eval.report.command import print_notes
from eval.report.tables import format_setting, join_words
from eval.report.terminal import GAP, LEAST_NAME, WIDTH, Fitted, break_name, format_metric
from eval.results.records import PREFIX, Details, details_folder, read_all_details
from eval.results.table import PROMPTED, Model, Record, ResultTable, group_by, read_table, split_checkpoint

LEVEL = 0.05
_ROUNDING = 1e-4  # between a score and the mean over its items
_LEAST_DIGITS = 6  # of a hash, to name weights by its start
_USAGE = "`compare MODEL_A MODEL_B --results FILE`"
_NO_DETAILS = "there are no per-item details: `python -m eval run --model M --data D` writes them"
_Kind = tuple[str, str, str, str]  # dataset, split, task, setting


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One metric of two models on one dataset.

    ``test`` is the second value minus the first, with its 95% interval and the uncorrected p; ``p`` is corrected by
    Holm's procedure.
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
        """Whether the difference is significant at 5%."""
        return self.p < LEVEL


@dataclass(frozen=True, kw_only=True)
class ModelComparison:
    """Labels of two models, the tested differences, a line for each untested one, and notes on the files."""

    first: str
    second: str
    differences: tuple[Difference, ...]
    refused: tuple[str, ...]
    notes: tuple[str, ...] = ()


def compare(results: Sequence[Path], first: str, second: str) -> ModelComparison:
    """Test which differences between two models are significant.

    Args:
        results: ``results.jsonl`` files with their details next to them.
        first: a model by its name, its label on the page, or its weights (or their first digits); or a results file
            of one model, or a run folder. Of several steps of one training the last is used, unless a checkpoint is
            named.
        second: the second model, likewise.

    Raises:
        ConfigError: there is no such model or file, several have the name, or both are the same.
        DataError: a file cannot be read, or the models have no dataset and task in common.
    """
    files, table, indices, notes = _find_models(results, first, second)
    models = table.models[indices[0]], table.models[indices[1]]
    rows_of = group_by(table.rows, attrgetter("model"))
    first_rows, second_rows = (
        group_by(rows_of.get(i, ()), attrgetter("dataset", "split", "task", "setting")) for i in indices
    )
    common = first_rows.keys() & second_rows.keys()
    if not common:
        labels = f"{models[0].label} and {models[1].label}"
        raise DataError(f"{labels} have no dataset and task in common, so nothing can be compared")
    details, unread = read_all_details(files)
    differences: list[Difference] = []
    # datasets by task and reason
    refused: dict[tuple[str, str], dict[str, None]] = {}
    # those that both models have first
    kinds = sorted(
        {**first_rows, **second_rows}, key=lambda kind: kind not in first_rows or kind not in second_rows
    )
    for kind in kinds:
        pair = first_rows.get(kind, []), second_rows.get(kind, [])
        for outcome in _test_metrics(kind, pair, models, details):
            if isinstance(outcome, Difference):
                differences.append(outcome)
            else:
                dataset, split, task, _ = kind
                refused.setdefault((task, outcome), {})[
                    dataset if split == TEST else f"{dataset} {split}"
                ] = None
    if any(reason == _NO_DETAILS for _, reason in refused):
        for path in files:
            folder = details_folder(path)
            if not folder.is_dir():
                notes.append(f"{folder.name}/ is missing next to {path.name} in {path.parent}")
    lines = [f"{task} on {list_some(list(names))}: {reason}" for (task, reason), names in refused.items()]
    return ModelComparison(
        first=models[0].label,
        second=models[1].label,
        differences=_correct_p(differences),
        refused=(*unread, *lines),
        notes=tuple(notes),
    )


def _correct_p(differences: Sequence[Difference]) -> tuple[Difference, ...]:
    corrected: dict[int, Difference] = {}
    family_of = attrgetter("task", "setting", "metric")
    families = group_by(range(len(differences)), lambda i: family_of(differences[i]))
    for family in families.values():
        p = 0.0
        for rank, i in enumerate(sorted(family, key=lambda i: differences[i].test.p)):
            p = max(p, min(1.0, (len(family) - rank) * differences[i].test.p))
            corrected[i] = replace(differences[i], p=p)
    return tuple(corrected[i] for i in range(len(differences)))


def _find_models(
    results: Sequence[Path], first: str, second: str
) -> tuple[list[Path], ResultTable, list[int], list[str]]:
    """Read the scores of two models; returns all files, their table, the two models, and notes for the user."""
    models = read_table(results).models if results else ()
    files = list(results)
    file_of: dict[str, Path | None] = {}
    for name in (first, second):
        file_of[name] = None
        if not any(_matches_name(model, name) for model in models):
            path = _find_results(name)
            run, checkpoint = split_checkpoint(name)
            if path is not None:
                files.append(path)
                # a run has other checkpoints than the named one
                if not (checkpoint and path == Path(run) / "results.jsonl"):
                    file_of[name] = path
    if not files:
        raise ConfigError(
            f"{first!r} is neither a results file nor a run folder: to name a model, use {_USAGE}"
        )
    files = list(dict.fromkeys(files))
    table = read_table(files)
    notes = list(table.unread)
    indices = [_select_model(table.models, name, file_of[name], notes) for name in (first, second)]
    if indices[0] == indices[1]:
        raise ConfigError(f"{first!r} and {second!r} are the same model: choose two different ones")
    return files, table, indices, notes


def _find_results(name: str) -> Path | None:
    """Find the results file of a name: the file itself, that of a run folder, or that of a checkpoint's run."""
    run, checkpoint = split_checkpoint(name)
    path = Path(name)
    run_path = Path(run) / "results.jsonl"
    try:
        if checkpoint and run_path.is_file():
            return run_path
        if path.is_dir():
            path = path / "results.jsonl"
            if not path.is_file():
                raise ConfigError(f"no results at {path}: score the model with `python -m eval run`")
        elif path.suffix != ".jsonl":
            return None
        elif not path.is_file():
            raise ConfigError(f"there is no file {name[:200]}")
    except OSError as error:
        raise ConfigError(f"cannot read {name[:200]}: {error.strerror}") from error
    return path


def _matches_name(model: Model, name: str) -> bool:
    """Whether a name refers to a model; a checkpoint's name does not match other checkpoints of its run."""
    plain, checkpoint = split_checkpoint(name)
    if checkpoint:
        digits = checkpoint.removeprefix("step_")
        if model.step is not None and digits.isdecimal():
            if int(digits) != model.step:
                return False
        elif all(split_checkpoint(other)[1] != checkpoint for other in model.names):
            return False
    start = name.removeprefix("sha256:")
    begins = len(start) >= _LEAST_DIGITS and model.weights.removeprefix("sha256:").startswith(start)
    return name == model.label or plain in model.names or begins


def _select_model(models: Sequence[Model], name: str, path: Path | None, notes: list[str]) -> int:
    """Find the model of a file or name; of several steps of one training the last."""
    run, checkpoint = split_checkpoint(name)
    if path is not None:
        matches = [i for i, model in enumerate(models) if path in model.files]
    else:
        matches = [i for i, model in enumerate(models) if name in (model.label, model.weights, *model.names)]
        matches = matches or [i for i, model in enumerate(models) if _matches_name(model, name)]
    labels = ", ".join(models[i].label for i in matches)
    if len({models[i].run for i in matches}) == 1 and not checkpoint:
        all_steps = {step for i in matches for step in (models[i].step, *models[i].earlier_steps)}
        steps = sorted(step for step in all_steps if step is not None)
        last = [i for i in matches if None not in all_steps and models[i].step == steps[-1]]
        if len(last) == 1 and len(steps) > 1:
            shown = list_some([f"{step:,}" for step in steps])
            notes.append(f"{path or name} has scores for steps {shown}; using the last")
        matches = last or matches
    if len(matches) == 1:
        return matches[0]
    if path is not None and not matches:
        raise DataError(f"there are no scores in {path}")
    if path is not None:
        form = _USAGE.replace("FILE", str(path))
        raise ConfigError(f"{path} contains several models ({labels}): choose one with {form}")
    if matches:
        raise ConfigError(f"{name!r} matches several models: choose one of {labels} with {_USAGE}")
    if checkpoint and any(run in model.names for model in models):
        raise ConfigError(
            f"no scores for checkpoint {name!r}: score it with `python -m eval run --model {name}`"
        )
    hint = nearest(name, [model.label for model in models])
    raise ConfigError(f"no results for model {name!r}, and no such file or run folder: {hint}")


def _test_metrics(
    kind: _Kind,
    rows: tuple[Sequence[Record], Sequence[Record]],
    models: tuple[Model, Model],
    details: Mapping[tuple[str, ...], Details],
) -> Iterator[Difference | str]:
    """Test all metrics of a dataset, task and setting, with every prompt set of both models; or say why not."""
    dataset, split, task, setting = kind
    if not rows[0] or not rows[1]:
        yield f"only {models[0].label if rows[0] else models[1].label} has scores"
        return
    if task == "few-shot":
        yield "few-shot scores are means over draws, without details of each draw"
        return
    if PREFIX.fullmatch(setting):
        yield "scores of prefixes of the embedding have no details"
        return
    first_rows, second_rows = (group_by(model_rows, attrgetter("prompt_set")) for model_rows in rows)
    if not first_rows.keys() & second_rows.keys():
        first, second = (next(iter(prompt_sets)) or "none" for prompt_sets in (first_rows, second_rows))
        yield f"the prompt sets differ ({first} and {second})"
    for prompt_set in first_rows:
        if prompt_set not in second_rows:
            continue
        others = {row.metric: row for row in second_rows[prompt_set]}
        scores = [(row, others[row.metric]) for row in first_rows[prompt_set] if row.metric in others]
        keys = [(model.weights, dataset, split, task, prompt_set, setting) for model in models]
        first_details, second_details = (details.get(key) for key in keys)
        if (reason := _explain_incomparable_scores(scores)) is not None:
            yield reason
        elif first_details is None or second_details is None:
            yield _NO_DETAILS
        elif (reason := _explain_different_items(first_details, second_details)) is not None:
            yield reason
        else:
            for row, other in scores:
                yield _test_score(row, other, first_details, second_details)


def _test_score(row: Record, other: Record, first: Details, second: Details) -> Difference | str:
    try:
        test = compare_items(row.metric, first, second)
    except DataError as error:
        return f"{row.metric}: {error}"
    if test is None:
        return f"{row.metric} cannot be tested: the details have no per-item values of it"
    if abs(test.difference - (other.value - row.value)) > _ROUNDING * max(1.0, row.value):
        return f"{row.metric}: the details do not match the scores"
    return Difference(
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


def _explain_incomparable_scores(scores: Sequence[tuple[Record, Record]]) -> str | None:
    """Return why scores of two models are not comparable, or None."""
    for first, second in scores:
        if first.data_revision and second.data_revision not in ("", first.data_revision):
            return f"the data revisions differ ({first.data_revision} and {second.data_revision})"
        if first.n != second.n:
            return f"the numbers of items differ ({first.n or 0:,} and {second.n or 0:,})"
        if first.task in PROMPTED and first.prompts and second.prompts not in ("", first.prompts):
            if first.task in ("zero-shot", "likelihood"):
                texts = f"prompts of set {first.prompt_set or 'own'}"
            else:
                texts = f"captions of set {first.prompt_set}" if first.prompt_set else "captions"
            return f"the {texts} differ ({first.prompts} and {second.prompts})"
    return None if scores else "the models have no metric in common"


def _explain_different_items(first: Details, second: Details) -> str | None:
    if first.data_revision and second.data_revision not in ("", first.data_revision):
        return f"the details come from different data ({first.data_revision} and {second.data_revision})"
    if first.n != second.n:
        return f"the details have different numbers of items ({first.n:,} and {second.n:,})"
    if first.labels is None or second.labels is None:
        return None if first.labels is second.labels else "only one model's details have labels"
    try:
        same = first.labels.tensor().equal(second.labels.tensor())
    except DataError as error:
        return str(error)
    return None if same else "the items in the details differ in order or labels"


def compare_items(name: str, first: Details, second: Details, *, tests: int = 1) -> Comparison | None:
    """Test a metric item by item, perhaps as one of several tests; None if the details lack the required values."""

    def align(values: Tensor, others: Tensor) -> Tensor:
        if len(values) != len(others) or not len(values):
            raise DataError(f"the details have {len(others):,} and {len(values):,} items")
        return values

    if name in first.right and name in second.right:
        correct = first.right[name].tensor()
        return compare_correct(correct, align(second.right[name].tensor(), correct), tests=tests)
    metric = get_metric("mean_top1_top5" if name == "mean_of_top1_and_top5" else name)  # an older name
    labels = None if first.labels is None else _split_items(first.labels.tensor(), first.n)
    if name in first.values and name in second.values:
        flat = first.values[name].tensor()
        other_flat = align(second.values[name].tensor(), flat)
        if metric is None or metric.item_statistic is None:
            return compare_means(flat, other_flat, tests=tests)
        if labels is None and metric.kind in ("one-label", "multi-label"):
            return None
        statistic = metric.item_statistic(_split_items(flat, first.n), labels)
        other_statistic = metric.item_statistic(_split_items(other_flat, first.n), labels)
        cost = len(flat) // first.n
        return compare_statistics(statistic, other_statistic, first.n, cost=cost, tests=tests)
    if metric is None or metric.items is None or labels is None:
        return None
    if not {*metric.items_from} <= first.right.keys() & second.right.keys():
        return None
    items = []
    for details in (first, second):
        right = {source: align(details.right[source].tensor(), labels) for source in metric.items_from}
        items.append(metric.items(right, labels))
    return compare_means(*items, tests=tests)


def _split_items(flat: Tensor, n: int) -> Tensor:
    """Return (n,) values, or (n, K) if there are several of each item."""
    if not n or len(flat) % n:
        raise DataError(f"the details have {len(flat):,} values of {n:,} items")
    return flat if len(flat) == n else flat.view(n, -1)


# --------------------------------------------------------------------------------------------------------------
# The command, and its table for the terminal.

_HEADS = ("A", "B", "B − A [95%]", "p", "better")
_LEFT_OUT = ("p", "A", "B", "better")  # in this order on a narrow terminal


def run_compare(options: CompareOptions) -> int:
    """Test which differences between two models are statistically significant."""
    files = [path / "results.jsonl" if path.is_dir() else path for path in options.results]
    comparison = compare(files, options.first, options.second)
    console = Console(highlight=False)
    if comparison.differences:
        console.print(tabulate_comparison(comparison))
    else:
        print(f"{printable(comparison.first)} and {printable(comparison.second)}: nothing could be compared")
    for line in comparison.refused:
        console.print(f"not compared: {printable(line)}", markup=False)
    print_notes(comparison.notes)
    return 0 if comparison.differences else 1


def tabulate_comparison(comparison: ModelComparison) -> RenderableType:
    """Show the differences of two models; A is the first and B the second.

    A section has the datasets over which p was corrected (one task, setting and metric), or all metrics of a single
    dataset. Narrow terminals show fewer columns; the difference is the last to be left out.
    """
    return Fitted(lambda width: _tabulate_differences(comparison, min(width, WIDTH)))


def _tabulate_differences(comparison: ModelComparison, width: int) -> Group:
    differences = comparison.differences
    columns = {
        head: max(len(row[i]) for row in (_HEADS, *map(_format_cells, differences)))
        for i, head in enumerate(_HEADS)
    }
    for head in _LEFT_OUT:
        if LEAST_NAME + sum(column + GAP for column in columns.values()) > width:
            del columns[head]
    shown_columns = [i for i, head in enumerate(_HEADS) if head in columns]

    def build_grid(rows: Sequence[tuple[Text, Sequence[str], str]]) -> Table:
        """Show rows of name, texts and style, with columns aligned with those of other grids."""
        table = Table.grid(padding=(0, 2, 0, 0))
        name_width = max(LEAST_NAME, width - sum(columns.values()) - GAP * len(columns))
        table.add_column(overflow="fold", width=name_width)
        for column in columns.values():
            table.add_column(justify="right", no_wrap=True, width=column)
        for name, texts, style in rows:
            table.add_row(name, *(Text(texts[i]) for i in shown_columns), style=style)
        return table

    sections: dict[str, list[tuple[Text, Difference]]] = {}
    for kind, same_kind in group_by(differences, _describe_kind).items():
        single = len({difference.dataset for difference in same_kind}) == 1
        for metric, same_metric in group_by(same_kind, lambda difference: difference.metric).items():
            title = f"{kind} on {same_kind[0].dataset}" if single else f"{kind}: {format_metric(metric)}"
            for difference in same_metric:
                name = Text(format_metric(metric)) if single else break_name(difference.dataset)
                sections.setdefault(title, []).append((name, difference))
    shown: list[RenderableType] = []
    for title, rows in sections.items():
        shown.append(Text(("\n" if shown else "") + printable(title), style="bold"))
        texts = []
        for name, difference in rows:
            texts.append((name, _format_cells(difference), "bold" if difference.beyond_chance else ""))
        shown.append(build_grid(texts))
    count = sum(difference.beyond_chance for difference in differences)
    return Group(
        Text(f"A: {printable(comparison.first)}\nB: {printable(comparison.second)}\n"),
        build_grid([(Text(""), _HEADS, "")]),
        Text("─" * width),
        *shown,
        Text(
            f"\n{count} of {len(differences)} differences are beyond chance (p < {LEVEL:g}, corrected\n"
            "by Holm's procedure over the datasets of each task, setting and metric).\n"
            "Intervals, in percentage points or ranks, are of one difference each, uncorrected."
        ),
    )


def _describe_kind(difference: Difference) -> str:
    return join_words(
        difference.task,
        format_setting(difference.task, difference.setting),
        f"prompts {difference.prompt_set}" if difference.prompt_set else "",
    )


def _format_cells(difference: Difference) -> tuple[str, ...]:
    factor, unit = 1, ""
    if is_fraction(difference.metric, difference.first, difference.second):
        factor, unit = 100, "%"
    test = difference.test
    low, high = factor * test.low, factor * test.high
    better = "–"
    if difference.beyond_chance:
        better = "B" if (test.difference > 0) != lower_is_better(difference.metric) else "A"
    return (
        f"{factor * difference.first:,.1f}{unit}",
        f"{factor * difference.second:,.1f}{unit}",
        f"{factor * test.difference:+,.1f} [{low:+,.1f}, {high:+,.1f}]".replace("-", "−"),
        "<0.001" if difference.p < 0.001 else f"{difference.p:.3f}",
        better,
    )

"""Compare two models by paired tests, and one model with its known scores.

Accuracies and recalls are tested by McNemar's exact test, means and other metrics by a paired bootstrap (see
eval/metrics/intervals.py). Scores that are not comparable are skipped with a reason. As testing many datasets
finds differences by chance, p is corrected by Holm's procedure (1979, "A simple sequentially rejective multiple
test procedure") over the datasets of each task, setting and metric: the probability of any false finding among them
stays below 5%.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from clipkit.errors import ConfigError, DataError, nearest
from clipkit.files import counted
from eval.datasets import Card, Expected, card_names, load_card, read_card
from eval.datasets.dataset import TEST, some
from eval.datasets.targets import OWN_CARD, Target, Trouble, find_targets
from eval.metrics import METRICS, Comparison, compare_correct, compare_means, compare_statistics
from eval.results.records import Details, details_folder, read_details
from eval.results.scores import PREFIX, Score
from eval.results.table import Model, Record, ResultTable, read_table, split_checkpoint

LEVEL = 0.05
_ROUNDING = 1e-4  # between a score and the mean over its items
_LEAST_DIGITS = 6  # of a hash, to name weights by its start
_FORM = "`compare MODEL_A MODEL_B --results FILE`"
_NO_DETAILS = "there are no per-item details: `python -m eval run --model M --data D` writes them"
_Kind = tuple[str, str, str, str]  # dataset, split, task, setting


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One metric of two models on one dataset.

    Attributes:
        dataset: its name.
        task: as in the scores.
        setting: as in the scores.
        prompt_set: the prompt set of both models.
        metric: as in the scores.
        first: the first model's value.
        second: the second model's value.
        test: the second minus the first, with its 95% interval and the uncorrected p.
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
    files, found, models, notes = _find_models(results, first, second)
    labels = found.models[models[0]].label, found.models[models[1]].label
    details: dict[tuple[str, ...], Details] = {}
    unread: list[str] = []
    for path in files:
        read, trouble = read_details(path)
        details.update({each.key: each for each in read})
        unread += trouble
    rows: tuple[dict[_Kind, list[Record]], dict[_Kind, list[Record]]] = ({}, {})
    for row in found.rows:
        if row.model in models:
            kind = row.dataset, row.split, row.task, row.setting
            rows[models.index(row.model)].setdefault(kind, []).append(row)
    if not rows[0].keys() & rows[1].keys():
        raise DataError(
            f"{labels[0]} and {labels[1]} have no dataset and task in common, so nothing can be compared"
        )
    differences: list[Difference] = []
    refused: dict[tuple[str, str], dict[str, None]] = {}  # datasets by task and reason
    outcomes: list[tuple[_Kind, Difference | str]] = []
    weights = found.models[models[0]].weights, found.models[models[1]].weights
    for kind in rows[0]:
        if kind in rows[1]:
            pair = rows[0][kind], rows[1][kind]
            outcomes += [(kind, one) for one in _differences(kind, pair, weights, details)]
    for label, own, others in ((labels[0], rows[0], rows[1]), (labels[1], rows[1], rows[0])):
        outcomes += [(kind, f"only {label} has scores") for kind in own if kind not in others]
    for (dataset, split, task, _), outcome in outcomes:
        if isinstance(outcome, str):
            name = dataset if split == TEST else f"{dataset} {split}"
            refused.setdefault((task, outcome), {})[name] = None
        else:
            differences.append(outcome)
    families: dict[tuple[str, str, str], list[int]] = {}
    for i, one in enumerate(differences):
        families.setdefault((one.task, one.setting, one.metric), []).append(i)
    for family in families.values():
        p = 0.0
        for place, i in enumerate(sorted(family, key=lambda i: differences[i].test.p)):
            p = max(p, min(1.0, (len(family) - place) * differences[i].test.p))
            differences[i] = replace(differences[i], p=p)
    if any(why == _NO_DETAILS for _, why in refused):
        missing = [path for path in files if not details_folder(path).is_dir()]
        notes += [
            f"{details_folder(path).name}/ is missing next to {path.name} in {path.parent}"
            for path in missing
        ]
    lines = [f"{task} on {some(list(names))}: {why}" for (task, why), names in refused.items()]
    return ModelComparison(
        first=labels[0],
        second=labels[1],
        differences=tuple(differences),
        refused=(*unread, *lines),
        notes=tuple(notes),
    )


def _find_models(
    results: Sequence[Path], first: str, second: str
) -> tuple[list[Path], ResultTable, tuple[int, int], list[str]]:
    """Read the scores of two models; returns all files, their content, the two models, and notes for the user."""
    known = read_table(results).models if results else ()
    paths: list[Path | None] = []
    files = list(results)
    for name in (first, second):
        path = None
        if not any(_goes_by(model, name) for model in known) and (path := _results_file(name)) is not None:
            files.append(path)
            run, checkpoint = split_checkpoint(name)
            if checkpoint and path == Path(run) / "results.jsonl":
                path = None  # the run has other checkpoints too
        paths.append(path)
    files = list(dict.fromkeys(files))
    if not files:
        raise ConfigError(
            f"{first!r} is neither a results file nor a run folder: to name a model, use {_FORM}"
        )
    found = read_table(files)
    notes = list(found.unread)
    one, other = (_model(found, *pair, notes) for pair in zip((first, second), paths, strict=True))
    if one == other:
        raise ConfigError(f"{first!r} and {second!r} are the same model: choose two different ones")
    return files, found, (one, other), notes


def _results_file(name: str) -> Path | None:
    """Find the results file of a name: the file itself, that of a run folder, or that of a checkpoint's run.

    Raises:
        ConfigError: it does not exist.
    """
    run, checkpoint = split_checkpoint(name)
    path, of_run = Path(name), Path(run) / "results.jsonl"
    try:
        if checkpoint and of_run.is_file():
            return of_run
        if path.is_dir():
            path = path / "results.jsonl"
            if not path.is_file():
                raise ConfigError(f"no results at {path}: score the model with `python -m eval run`")
            return path
        if path.suffix != ".jsonl":
            return None
        if not path.is_file():
            raise ConfigError(f"there is no file {name[:200]}")
    except OSError as error:
        raise ConfigError(f"cannot read {name[:200]}: {error.strerror}") from error
    return path


def _goes_by(model: Model, name: str) -> bool:
    """Whether a name refers to a model; a checkpoint's name does not match other checkpoints of its run."""
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


def _model(found: ResultTable, name: str, path: Path | None, notes: list[str]) -> int:
    """Find the model of a file or name; of several steps of one training the last.

    Raises:
        ConfigError: there is none, or several.
    """
    models = found.models
    run, checkpoint = split_checkpoint(name)
    if path is not None:
        matches = [i for i, model in enumerate(models) if path in model.files]
    else:
        matches = [i for i, model in enumerate(models) if name in (model.label, model.weights, *model.names)]
        matches = matches or [i for i, model in enumerate(models) if _goes_by(model, name)]
    labels = ", ".join(models[i].label for i in matches)
    if len({models[i].run for i in matches}) == 1 and not checkpoint:
        all_steps = {step for i in matches for step in (models[i].step, *models[i].earlier_steps)}
        steps = sorted(step for step in all_steps if step is not None)
        last = [i for i in matches if None not in all_steps and models[i].step == steps[-1]]
        if len(last) == 1 and len(steps) > 1:
            shown = some([f"{step:,}" for step in steps])
            notes.append(f"{path or name} has scores for steps {shown}; using the last")
        matches = last or matches
    if len(matches) == 1:
        return matches[0]
    if path is not None and not matches:
        raise DataError(f"there are no scores in {path}")
    if path is not None:
        form = _FORM.replace("FILE", str(path))
        raise ConfigError(f"{path} contains several models ({labels}): choose one with {form}")
    if matches:
        raise ConfigError(f"{name!r} matches several models: choose one of {labels} with {_FORM}")
    if checkpoint and any(run in model.names for model in models):
        raise ConfigError(
            f"no scores for checkpoint {name!r}: score it with `python -m eval run --model {name}`"
        )
    known = nearest(name, [model.label for model in models])
    raise ConfigError(f"no results for model {name!r}, and no such file or run folder: {known}")


def _differences(
    kind: _Kind,
    rows: tuple[Sequence[Record], Sequence[Record]],
    weights: tuple[str, str],
    details: Mapping[tuple[str, ...], Details],
) -> Iterator[Difference | str]:
    """Test all metrics of a dataset, task and setting, with every prompt set of both models; or say why not."""
    dataset, split, task, setting = kind
    if task == "few-shot":
        yield "few-shot scores are means over draws, without details of each draw"
        return
    if PREFIX.fullmatch(setting):
        yield "scores of prefixes of the embedding have no details"
        return
    prompts = [list(dict.fromkeys(row.prompt_set for row in own)) for own in rows]
    common = [one for one in prompts[0] if one in prompts[1]]
    if not common:
        yield f"the prompt sets differ ({prompts[0][0] or 'none'} and {prompts[1][0] or 'none'})"
    for prompt_set in common:
        first, second = ({row.metric: row for row in own if row.prompt_set == prompt_set} for own in rows)
        scores = [(row, second[metric]) for metric, row in first.items() if metric in second]
        one, two = (details.get((model, dataset, split, task, prompt_set, setting)) for model in weights)
        if (reason := _incomparable(scores)) is None:
            reason = _NO_DETAILS if one is None or two is None else _different_items(one, two)
        if reason is not None:
            yield reason
            continue
        assert one is not None and two is not None
        for row, other in scores:
            metric = row.metric
            try:
                test = _test(metric, one, two)
            except DataError as error:
                yield f"{metric}: {error}"
                continue
            change = other.value - row.value
            if test is None:
                yield f"{metric} cannot be tested: the details have no per-item values of it"
            elif abs(test.difference - change) > _ROUNDING * max(1.0, row.value):
                yield f"{metric}: the details do not match the scores"
            else:
                yield Difference(
                    dataset=dataset,
                    task=task,
                    setting=setting,
                    prompt_set=prompt_set,
                    metric=metric,
                    first=row.value,
                    second=other.value,
                    test=test,
                    p=test.p,
                )


def _incomparable(scores: Sequence[tuple[Record, Record]]) -> str | None:
    """Return why scores of two models are not comparable, or None."""
    for first, second in scores:
        if first.data_revision and second.data_revision not in ("", first.data_revision):
            return f"the data revisions differ ({first.data_revision} and {second.data_revision})"
        if first.n != second.n:
            return f"the numbers of items differ ({first.n or 0:,} and {second.n or 0:,})"
        of_set = f" of set {first.prompt_set}" if first.prompt_set else ""
        texts = dict.fromkeys(("zero-shot", "likelihood"), f"prompts{of_set or ' of set own'}")
        texts |= dict.fromkeys(("retrieval", "captioning"), f"captions{of_set}")
        if first.task in texts and first.prompts and second.prompts not in ("", first.prompts):
            return f"the {texts[first.task]} differ ({first.prompts} and {second.prompts})"
    return None if scores else "the models have no metric in common"


def _different_items(first: Details, second: Details) -> str | None:
    """Return why details are not of the same items, or None."""
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


def _test(metric: str, first: Details, second: Details) -> Comparison | None:
    """Test a metric item by item; None if the details lack the required values.

    Raises:
        DataError: their values cannot be unpacked, or have different lengths.
    """

    def aligned(values: Tensor, like: Tensor) -> Tensor:
        if len(values) != len(like) or not len(values):
            raise DataError(f"the details have {len(like):,} and {len(values):,} items")
        return values

    if metric in first.right and metric in second.right:
        correct = first.right[metric].tensor()
        return compare_correct(correct, aligned(second.right[metric].tensor(), correct))
    known = METRICS.get("mean_top1_top5" if metric == "mean_of_top1_and_top5" else metric)  # an older name
    labels = None if first.labels is None else first.labels.tensor()
    if metric in first.values and metric in second.values:
        values = first.values[metric].tensor()
        others = aligned(second.values[metric].tensor(), values)
        if known is not None and known.row_statistic is not None:
            if len(values) % first.n:
                raise DataError(f"the details have {len(values):,} values of {first.n:,} items")
            rows, other_rows = (own.view(first.n, -1).double().numpy() for own in (values, others))
            return compare_statistics(known.row_statistic(rows), known.row_statistic(other_rows), first.n)
        if known is None or known.item_statistic is None:
            return compare_means(values, others)
        if labels is None:
            return None
        one, two = (known.item_statistic(own, aligned(labels, values)) for own in (values, others))
        return compare_statistics(one, two, len(labels))
    if known is None or known.items is None or labels is None:
        return None
    if not all({*known.items_from} <= {*one.right} for one in (first, second)):
        return None
    items = []
    for details in (first, second):
        right = {name: aligned(details.right[name].tensor(), labels) for name in known.items_from}
        items.append(known.items(right, labels))
    return compare_means(items[0], items[1])


@dataclass(frozen=True, kw_only=True)
class Check:
    """A known score and the measured one, None if it was not measured."""

    dataset: str
    expected: Expected
    measured: float | None

    @property
    def holds(self) -> bool | None:
        """Whether it is within the tolerance; None if it was not measured."""
        if self.measured is None:
            return None
        return abs(self.measured - self.expected.value) <= self.expected.tolerance


@dataclass(frozen=True, kw_only=True)
class Known:
    """The datasets with known scores for a model.

    Attributes:
        targets: available datasets, each once for every prompt set with a known score.
        trouble: why others are not available, or cannot be opened.
        datasets: their number, available or not.
    """

    targets: list[Target]
    trouble: list[DataError]
    datasets: int


def known_tasks(names: Sequence[str], model: str) -> tuple[str, ...]:
    """List the tasks with known scores for a model from the cards alone, without opening a dataset.

    Args:
        names: datasets, as a user names them; empty for all with cards.
        model: the model's name in the cards.

    Raises:
        ConfigError: there are none.
    """
    expected = [one for card in _cards(names).values() for one in card.expected]
    if known := tuple(dict.fromkeys(one.task for one in expected if one.model == model)):
        return known
    models = sorted({one.model for one in expected})
    where = f" on {some(names)}" if names else ""
    if not models:
        raise ConfigError(
            f"no scores are known for {model!r}{where}, or for any other model: add them to a card as [[expected]]"
        )
    hint = nearest(model, models) if len(models) > 1 else f"only for {models[0]}"
    raise ConfigError(
        f"no scores are known for {model!r}{where}, {hint}; use --as NAME to set the name under which cards list "
        "the scores of --model"
    )


def find_known(names: Sequence[str], model: str, *, root: Path | str | None) -> Known:
    """Open the datasets whose cards list scores of a model.

    Args:
        names: datasets, as a user names them; empty for all with cards.
        model: the model's name in the cards.
        root: folder of datasets, by the names of their cards.

    Raises:
        ConfigError: no scores are known, or there is no folder ``root``.
    """
    known_tasks(names, model)
    targets: list[Target] = []
    trouble = Trouble(root)
    datasets = 0
    for name, card in _cards(names).items():
        known = [one for one in card.expected if one.model == model]
        datasets += bool(known)
        prompt_sets = list(dict.fromkeys(one.prompts for one in known if one.prompts))
        # "": no set is named, or captions are used as they are
        plain = any(one.task == "retrieval" and not one.prompts for one in known)
        if known and (not prompt_sets or (plain and set(prompt_sets) <= set(card.caption_prompts))):
            prompt_sets.append("")
        try:
            for prompts in prompt_sets:
                targets += find_targets([name], root=root, prompts=prompts)
        except DataError as error:
            trouble.add(name, error)
    return Known(targets=targets, trouble=trouble.lines(), datasets=datasets)


def _cards(names: Sequence[str]) -> dict[str, Card]:
    """Return the cards of datasets that have one, by dataset."""
    found = {}
    for name in names or card_names():
        own = Path(name).expanduser() / OWN_CARD
        if own.is_file():
            found[name] = read_card(own)
        elif name in card_names() and not Path(name).is_dir():
            found[name] = load_card(name)
    return found


def expected_of(target: Target, model: str) -> list[Expected]:
    """List the scores that a dataset's card expects from a model with the prompts that the dataset uses."""
    if target.card is None:
        return []
    of_classes, of_captions = ("", target.dataset.prompt_set), (target.dataset.caption_prompt_set,)
    return [
        one
        for one in target.card.expected
        if one.model == model and one.prompts in (of_captions if one.task == "retrieval" else of_classes)
    ]


def checks_of(target: Target, model: str, scores: Sequence[Score]) -> list[Check]:
    """Pair each expected score with the measured one."""
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
    """Explain why there is no check."""
    why = "can be scored" if known.targets else "is available"
    datasets = counted(known.datasets, "dataset")
    return f"nothing could be checked: none of the {datasets} with known scores for {model} {why}"


def print_checks(checks: Sequence[Check]) -> int:
    """Print a table and return the exit status: 1 if a check fails or was not measured."""
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

"""``python -m eval verify``: compare scores with those that dataset cards expect, or values with published ones."""

import math
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from clipkit import distributed
from clipkit.errors import ConfigError, DataError, nearest
from clipkit.files import counted
from eval.datasets.card import OWN_CARD, Card, Expected, card_names, load_card, read_card
from eval.datasets.dataset import list_some
from eval.datasets.targets import Target, find_targets, unite_errors
from eval.options import VerifyOptions
from eval.results.records import Score
from eval.run import (
    Results,
    check_towers,
    compute_exit_status,
    find_model,
    join_ranks,
    load_scored,
    print_errors,
    score_model,
    tower_autocast,
)
from eval.vectors.alternatives import explain_failure, measure_values, values_agree
from eval.vectors.published import PublishedValues, read_published


def run_verify(options: VerifyOptions) -> int:
    """Measure what cards or a file of published values expect, and compare."""
    with join_ranks(options.device) as device:
        if len(options.model) > 1:
            raise ConfigError("verify checks one --model at a time")
        if options.vectors:
            return 0 if distributed.rank() > 0 else _verify_values(options, device)
        model = find_model(options.model[0], options.out)
        name = options.known_as or model.name
        check_towers([model.source], list_expected_tasks(options.data, name))
        expected = open_expected_datasets(options.data, name, root=options.data_root)
        results = Results()
        checks: list[Check] = []
        for target in expected.targets:
            tasks = tuple(dict.fromkeys(score.task for score in list_expected_scores(target, name)))
            before = len(results.scores)
            score_model(model, [target], tasks, options, device, results)
            checks += _check_scores(target, name, results.scores[before:])
        errors = [*expected.errors, *results.errors]
        print_errors(errors)
        status = compute_exit_status(errors, results)
        if distributed.rank() > 0:
            return status
        if not checks:
            print(explain_no_checks(expected, name), file=sys.stderr)
            return status
        headings = ("dataset", "task and metric", "measured %", "expected %")
        return max(status, _print_checks(checks, headings))


def _verify_values(options: VerifyOptions, device: str) -> int:
    """Compare the values of a model with published ones, and name settings with which it reaches them."""
    if options.data or options.suite or options.known_as or options.out:
        raise ConfigError("--data, --suite, --as and --out have no effect with --vectors: leave them out")
    source = find_model(options.model[0], options.out)
    check_towers([source.source], ())
    published = read_published(options.vectors)
    images = [image.open(options.image_root) for image in published.images]
    model = load_scored(source, options, device, writes=False)
    for table in published.expected:
        width = len(table.values[0])
        if "features" in table.kind and width > model.dim:
            raise DataError(
                f"{table.kind} have {width} values, but the embedding of {source.name} {model.dim}"
            )
    with tower_autocast(options, device):
        measured = measure_values(model, published, images)
    headings = ("input", "value", "measured", "expected")
    status = _print_checks(_list_values(published, measured), headings, digits=5)
    if published.note:
        _print_wrapped(published.note)
    if not status:
        return status
    if options.precision != "fp32" and values_agree(measure_values(model, published, images), published):
        print(f"the published values are reached with --precision fp32, not with {options.precision}")
        return status
    print("looking for settings that reach the published values in fp32", file=sys.stderr)
    explanations = explain_failure(model, published, images)
    for settings in explanations:
        _print_wrapped(f"the published values are reached with {settings}: set this for the model")
    if not explanations:
        print("no other setting reaches the published values: compare the weights and the architecture")
    return status


def _print_wrapped(text: str) -> None:
    """Print a paragraph in the width of the terminal, without breaking URLs."""
    columns = shutil.get_terminal_size().columns
    print(textwrap.fill(text, columns, break_long_words=False, break_on_hyphens=False))


def _list_values(published: PublishedValues, measured: Sequence[Tensor]) -> "list[Check]":
    checks = []
    for values, table in zip(measured, published.expected, strict=True):
        rows = [image.file for image in published.images]
        columns: Sequence[str] = published.texts
        if table.kind == "text features":
            rows = list(published.texts)
        if "features" in table.kind:
            columns = [str(i) for i in range(values.shape[1])]
        for row, row_values, row_expected in zip(rows, values.tolist(), table.values, strict=True):
            for column, value, expected in zip(columns, row_values, row_expected, strict=True):
                if not math.isnan(expected):
                    name = f"{table.kind} {column}"
                    source = f"{published.source} ({published.date})"
                    checks.append(Check(row, name, value, expected, table.tolerance, source))
    return checks


class Check(NamedTuple):
    """An expected value of a subject, a dataset or an input, and the measured one or None."""

    subject: str
    name: str
    measured: float | None
    expected: float
    tolerance: float
    source: str


@dataclass(frozen=True, kw_only=True)
class ExpectedDatasets:
    """The datasets with expected scores for a model.

    Attributes:
        targets: available datasets, each once for every prompt set with an expected score.
        errors: why others are not available, or cannot be opened.
        count: number of datasets, available or not.
    """

    targets: list[Target]
    errors: list[DataError]
    count: int


def list_expected_tasks(names: Sequence[str], model: str) -> tuple[str, ...]:
    """List the tasks with expected scores for a model from the cards alone, without opening a dataset."""
    tasks: dict[str, None] = {}
    models: set[str] = set()
    for card in _find_cards(names).values():
        for score in card.expected:
            models.add(score.model)
            if score.model == model:
                tasks[score.task] = None
    if tasks:
        return tuple(tasks)
    where = f" on {list_some(names)}" if names else ""
    if not models:
        raise ConfigError(
            f"no scores are known for {model!r}{where}, or for any other model: add them to a card as [[expected]]"
        )
    hint = nearest(model, models) if len(models) > 1 else f"only for {models.pop()}"
    raise ConfigError(
        f"no scores are known for {model!r}{where}, {hint}; use --as NAME to set the name under which cards list "
        "the scores of --model"
    )


def open_expected_datasets(names: Sequence[str], model: str, *, root: Path | str | None) -> ExpectedDatasets:
    """Open the datasets whose cards list scores of a model."""
    list_expected_tasks(names, model)
    targets: list[Target] = []
    errors: list[tuple[str, DataError]] = []
    count = 0
    for name, card in _find_cards(names).items():
        scores = [score for score in card.expected if score.model == model]
        if not scores:
            continue
        count += 1
        prompt_sets = list(dict.fromkeys(score.prompts for score in scores if score.prompts))
        # "": no set is named, or captions are used as they are
        plain_captions = any(score.task == "retrieval" and not score.prompts for score in scores)
        if not prompt_sets or (plain_captions and set(prompt_sets) <= set(card.caption_prompts)):
            prompt_sets.append("")
        try:
            for prompts in prompt_sets:
                targets += find_targets([name], root=root, prompts=prompts)
        except DataError as error:
            errors.append((name, error))
    return ExpectedDatasets(targets=targets, errors=unite_errors(errors, root), count=count)


def _find_cards(names: Sequence[str]) -> dict[str, Card]:
    cards = {}
    for name in names or card_names():
        path = Path(name).expanduser() / OWN_CARD
        if path.is_file():
            cards[name] = read_card(path)
        elif name in card_names() and not Path(name).is_dir():
            cards[name] = load_card(name)
    return cards


def list_expected_scores(target: Target, model: str) -> list[Expected]:
    """List the scores that a dataset's card expects from a model with the prompts that the dataset uses."""
    scores: list[Expected] = []
    if target.card is None:
        return scores
    for score in target.card.expected:
        prompt_sets = ["", target.dataset.prompt_set]
        if score.task == "retrieval":
            prompt_sets = [target.dataset.caption_prompt_set]
        if score.model == model and score.prompts in prompt_sets:
            scores.append(score)
    return scores


def _check_scores(target: Target, model: str, scores: Sequence[Score]) -> list[Check]:
    """List expected and measured scores in percent."""
    measured = {}
    for score in scores:
        if score.dataset == target.dataset.name and not score.setting:
            measured[score.task, score.metric] = 100 * score.value
    checks = []
    for expected in list_expected_scores(target, model):
        value = measured.get((expected.task, expected.metric))
        name = f"{expected.task} {expected.metric}"
        limits = (100 * expected.value, 100 * expected.tolerance)
        checks.append(Check(target.dataset.name, name, value, *limits, expected.source))
    return checks


def explain_no_checks(expected: ExpectedDatasets, model: str) -> str:
    """Explain why there is no check."""
    why = "can be scored" if expected.targets else "is available"
    datasets = counted(expected.count, "dataset")
    return f"nothing could be checked: none of the {datasets} with known scores for {model} {why}"


def _print_checks(checks: Sequence[Check], headings: Sequence[str], *, digits: int = 2) -> int:
    """Print a table and return the exit status: 1 if a check fails or was not measured."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings[:2]:
        table.add_column(heading, overflow="fold")
    for heading in (*headings[2:], "±", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    status = 0
    for check in checks:
        value = ""
        decimals = max(digits, math.ceil(-math.log10(check.tolerance or 1)))
        verdict = "not measured"
        if check.measured is not None:
            value = f"{check.measured:.{decimals}f}"
            holds = abs(check.measured - check.expected) <= check.tolerance
            verdict = "holds" if holds else "FAILS"
        if verdict != "holds":
            status = 1
        limits = (f"{check.expected:.{decimals}f}", f"{check.tolerance:.{decimals}f}")
        table.add_row(check.subject, check.name, value, *limits, verdict)
    console = Console(highlight=False, markup=False)
    console.print(table)
    for source in dict.fromkeys(check.source for check in checks):
        _print_wrapped(f"expected by {source}")
    return status

"""``python -m eval verify``: compare a model's scores with those that dataset cards expect."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

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
    print_errors,
    score_model,
)


def run_verify(options: VerifyOptions) -> int:
    """Measure the scores for which cards list expected values, and compare."""
    with join_ranks(options.device) as device:
        if len(options.model) > 1:
            raise ConfigError("verify checks one --model at a time")
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
        return max(status, _print_checks(checks))


# a dataset, an expected score, and the measured one or None
Check = tuple[str, Expected, float | None]


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
    measured = {}
    for score in scores:
        if score.dataset == target.dataset.name and not score.setting:
            measured[score.task, score.metric] = score.value
    return [
        (target.dataset.name, expected, measured.get((expected.task, expected.metric)))
        for expected in list_expected_scores(target, model)
    ]


def explain_no_checks(expected: ExpectedDatasets, model: str) -> str:
    """Explain why there is no check."""
    why = "can be scored" if expected.targets else "is available"
    datasets = counted(expected.count, "dataset")
    return f"nothing could be checked: none of the {datasets} with known scores for {model} {why}"


def _print_checks(checks: Sequence[Check]) -> int:
    """Print a table and return the exit status: 1 if a check fails or was not measured."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("dataset", overflow="fold")
    table.add_column("task and metric", overflow="fold")
    for heading in ("measured %", "expected %", "±", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    status = 0
    for dataset, expected, measured in checks:
        value = ""
        verdict = "not measured"
        if measured is not None:
            value = f"{100 * measured:.2f}"
            holds = abs(measured - expected.value) <= expected.tolerance
            verdict = "holds" if holds else "FAILS"
        if verdict != "holds":
            status = 1
        name = f"{expected.task} {expected.metric}"
        limits = (f"{100 * expected.value:.2f}", f"{100 * expected.tolerance:.2f}")
        table.add_row(dataset, name, value, *limits, verdict)
    console = Console(highlight=False)
    console.print(table)
    for source in dict.fromkeys(expected.source for _, expected, _ in checks):
        console.print(f"expected by {source}", markup=False)
    return status

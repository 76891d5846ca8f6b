"""``python -m eval verify``: does this machine reach the scores that are known for a model?

Cards state scores as ``expected``, by the model's name, with a tolerance and a source. Whoever has the weights and
the data learns by one command whether preprocessing, prompts, data and metrics are as they should be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from clipkit.count_progress import counted
from clipkit.errors import ConfigError, DataError, nearest
from eval.cards import Card, Expected, card_names, load_card, read_card
from eval.dataset import some
from eval.results import Score
from eval.targets import OWN_CARD, Target, Trouble, find_targets

__all__ = [
    "Check",
    "Known",
    "checks_of",
    "expected_of",
    "find_known",
    "known_tasks",
    "nothing_checked",
    "print_checks",
]


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

"""``python -m eval verify``: does this machine reach the scores that are known for a model?

Cards state scores as ``expected``, by the model's name, with a tolerance and a source. Whoever has the weights and
the data learns by one command whether preprocessing, prompts, data and metrics are as they should be.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from eval.cards import Expected
from eval.results import Score
from eval.targets import Target

__all__ = ["Check", "checks_of", "expected_of", "print_checks"]


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


def expected_of(target: Target, model: str) -> list[Expected]:
    """What a dataset's card expects of a model in the prompts that the dataset has been given."""
    if target.card is None:
        return []
    given = target.dataset.prompt_set
    return [one for one in target.card.expected if one.model == model and one.prompts in ("", given)]


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

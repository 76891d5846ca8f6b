"""Which scores compare: those of the same pictures; what goes by one name may be other data, or a part of them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from eval.report.result_set import Row

__all__ = ["DataGroup", "by_data", "same_data"]

_SHOWN = 16  # characters of a revision


@dataclass(kw_only=True, eq=False)
class DataGroup:
    """Scores that compare.

    Attributes:
        revision: of their pictures; "" where no line says it.
        n: how many things they are the mean of; None where no line says it.
        rows: the scores.
        note: in what this group differs from the others; "" where there is one alone.
    """

    revision: str
    n: int | None
    rows: list[Row] = field(default_factory=list)
    note: str = ""

    def takes(self, row: Row) -> bool:
        """Whether a score may be of the same data: what is not known does not tell it apart."""
        same = not (self.revision and row.data_revision) or self.revision == row.data_revision
        return same and (self.n is None or row.n is None or self.n == row.n)

    def add(self, row: Row) -> None:
        """Take in a score, and what it knows of the data."""
        self.rows.append(row)
        self.revision = self.revision or row.data_revision
        self.n = row.n if self.n is None else self.n


def by_data(rows: Iterable[Row]) -> list[DataGroup]:
    """Scores of one metric by their data; first the group of the most models, of several such the first."""
    groups: list[DataGroup] = []
    # those that know their data first, so that the others find all groups there are
    for row in sorted(rows, key=lambda row: (not row.data_revision, row.n is None)):
        group = next((one for one in groups if one.takes(row)), None)
        if group is None:
            group = DataGroup(revision=row.data_revision, n=row.n)
            groups.append(group)
        group.add(row)
    groups.sort(key=lambda group: -len({row.model for row in group.rows}))
    several = [
        len(known - {"", None}) > 1
        for known in ({group.revision for group in groups}, {group.n for group in groups})
    ]
    for group in groups:
        parts = [f"data {group.revision[:_SHOWN]}"] if several[0] and group.revision else []
        parts += [f"n = {group.n:,}"] if several[1] and group.n is not None else []
        group.note = ", ".join(parts)
    return groups


def same_data(*rows: Row) -> bool:
    """Whether scores of one metric compare."""
    return len(by_data(rows)) == 1

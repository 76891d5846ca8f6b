"""One model on one dataset in detail: retrieval ranks, calibration, confusion, weakest classes, examples."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from markupsafe import Markup

from clipkit.errors import DataError
from eval.report.charts import Chart, ChartLine, draw, macro, number
from eval.report.images import Thumbnails
from eval.report.result_set import Model
from eval.report.scores import setting_name
from eval.results.details import Details, Packed

__all__ = ["Block", "blocks_html"]

_SHADES = 6
_LISTED = 8  # mistakes and classes
_DIRECTIONS = {"image_to_text_mean_rank": "image to text", "text_to_image_mean_rank": "text to image"}
_FIRST = tuple(factor * 10**power for power in range(8) for factor in (1, 3))  # ranks on the x axis


@dataclass(frozen=True, kw_only=True)
class _Confusion:
    """A confusion matrix, rows true; None where it cannot be read."""

    title: str
    names: Sequence[str]
    counts: Sequence[Sequence[int]] | None

    @property
    def diagonal(self) -> int:
        return sum(row[i] for i, row in enumerate(self.counts or ()))

    @property
    def squares(self) -> list[tuple[bool, float, str]]:
        """For many classes: whether on the diagonal, opacity, and path of all squares of one shade."""
        paths: dict[tuple[bool, int], list[str]] = {}
        for i, row in enumerate(self.counts or ()):
            total = sum(row)
            for j, count in enumerate(row):
                if count:
                    shade = min(_SHADES, 1 + int(_SHADES * count / total))
                    paths.setdefault((i == j, shade), []).append(f"M{j} {i}h1v1h-1z")
        return [
            (own, 0.1 + 0.9 * shade / _SHADES, "".join(path)) for (own, shade), path in sorted(paths.items())
        ]


@dataclass(frozen=True, kw_only=True)
class Block:
    """The details of one model on one dataset; ``score`` is its main score as text."""

    model: Model
    details: Details
    score: str

    @property
    def heading(self) -> str:
        """Task, prompts, setting, hyperparameters and score."""
        details = self.details
        prompts = f"prompts {details.prompt_set}" if details.prompt_set else ""
        parts = [details.task, prompts, setting_name(details.task, details.setting)]
        parts += [f"C = {number(details.chosen_c)}"] if details.chosen_c is not None else []
        parts += [f"learning rate {details.chosen_rate:g}"] if details.chosen_rate is not None else []
        text = ", ".join(filter(None, parts))
        text += f" (chosen on {details.tuned_on})" if details.tuned_on else ""
        return text + (f", {self.score}" if self.score else "")

    @property
    def recall(self) -> Markup | None:
        """For retrieval, a chart of the fraction of queries with a match among the first k; None if unreadable."""
        ranks = {}
        for name, label in _DIRECTIONS.items():
            if name in self.details.values:
                try:
                    ranks[label] = sorted(self.details.values[name].tensor().tolist())
                except DataError:
                    return None
        ranks = {label: own for label, own in ranks.items() if own}
        if not ranks:
            return Markup()
        last = max(own[-1] for own in ranks.values())
        first = [*(k for k in _FIRST if 1.5 * k < last), last]
        lines = [
            ChartLine(
                name=label,
                points=[(float(i), 100 * bisect_right(own, k) / len(own)) for i, k in enumerate(first)],
                tone=1 + i,
                dots=True,
                summary=f"median rank {number(median(own))}",
            )
            for i, (label, own) in enumerate(ranks.items())
        ]
        return draw(
            Chart(
                title="Found among the first k",
                note="fraction of queries with a match among them",
                lines=lines,
                unit="%",
                floor=0,
                ceiling=100,
                wide=True,
                x_name="among the first",
                x_ticks=[(float(i), number(k)) for i, k in enumerate(first)],
            )
        )

    @property
    def confusions(self) -> list[_Confusion]:
        """The confusion matrices of classes and superclasses."""
        details = self.details
        given = [
            ("Confusion", details.class_names, details.matrix),
            ("By superclass", details.superclass_names, details.superclass_matrix),
        ]
        return [
            _Confusion(title=title, names=names, counts=_counts(packed, len(names)))
            for title, names, packed in given
            if packed is not None and names
        ]

    @property
    def mistakes(self) -> list[tuple[str, str, int]]:
        """The most frequent mistakes: true class, predicted class, count."""
        frequent = self.details.mistakes[:_LISTED]
        return [(self._class(label), self._class(taken), count) for label, taken, count in frequent]

    @property
    def weakest(self) -> list[tuple[str, float]]:
        """The classes of the lowest accuracy, if there are several classes."""
        pairs = zip(self.details.class_right, self.details.class_counts, strict=True)
        known = [(right / count, i) for i, (right, count) in enumerate(pairs) if count]
        worst = sorted(known)[: _LISTED // 2] if len(known) > 1 else []
        return [(self._class(i), accuracy) for accuracy, i in worst]

    def _class(self, label: int) -> str:
        return self.details.class_names[label] or f"class {label}"


def _counts(packed: Packed, size: int) -> list[list[int]] | None:
    try:
        counts: list[list[int]] = packed.tensor().view(size, size).tolist()
    except (DataError, RuntimeError):
        return None
    return counts


def blocks_html(blocks: Sequence[Block], thumbnails: Thumbnails) -> Markup:
    """Render the blocks of one dataset."""
    return macro("blocks.html", "blocks")(blocks, thumbnails)

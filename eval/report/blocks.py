"""Details of models on datasets: ranks, calibration, confusion, frequent mistakes and examples."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from markupsafe import Markup

from clipkit.errors import DataError
from eval.metrics import is_fraction, metric_title
from eval.report.charts import ChartLine, Thumbnails, draw_chart, format_number, format_value, load_macro
from eval.report.tables import AS_TRAINED, format_setting, join_words
from eval.results.records import Details, Packed
from eval.results.table import Model, ResultTable, group_by

_BLOCKS = 96  # models on datasets that are shown in detail
_SHADES = 6  # of a confusion matrix
_LISTED = 8  # mistakes and classes


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
        text = join_words(
            details.task,
            f"prompts {details.prompt_set}" if details.prompt_set else "",
            format_setting(details.task, details.setting),
            f"C = {format_number(details.chosen_c)}" if details.chosen_c is not None else "",
            f"learning rate {details.chosen_rate:g}" if details.chosen_rate is not None else "",
        )
        if details.tuned_on:
            text += f" (chosen on {details.tuned_on})"
        return join_words(text, self.score)

    @property
    def recall(self) -> Markup | None:
        """For retrieval, a chart of the fraction of queries with a match among the first k; None if unreadable."""
        ranks: dict[str, list[int]] = {}
        for direction in ("image_to_text", "text_to_image"):
            packed = self.details.values.get(f"{direction}_mean_rank")
            if packed is not None and packed.n:
                try:
                    ranks[direction.replace("_", " ")] = sorted(packed.tensor().tolist())
                except DataError:
                    return None
        if not ranks:
            return Markup()
        last = max(own_ranks[-1] for own_ranks in ranks.values())
        steps = [factor * 10**power for power in range(8) for factor in (1, 3)]
        first = [*(k for k in steps if 1.5 * k < last), last]
        lines = []
        for tone, (direction, own_ranks) in enumerate(ranks.items(), start=1):
            recalls = [100 * bisect_right(own_ranks, k) / len(own_ranks) for k in first]
            lines.append(
                ChartLine(
                    name=direction,
                    points=[(float(i), recall) for i, recall in enumerate(recalls)],
                    tone=tone,
                    dots=True,
                    summary=f"median rank {format_number(median(own_ranks))}",
                )
            )
        return draw_chart(
            "Found among the first k",
            lines,
            note="fraction of queries with a match among them",
            unit="%",
            floor=0,
            ceiling=100,
            wide=True,
            x_name="among the first",
            x_ticks=[(float(i), format_number(k)) for i, k in enumerate(first)],
        )

    @property
    def confusions(self) -> list[dict[str, Any]]:
        """The confusion matrices of classes and superclasses."""
        details = self.details
        matrices = (
            ("Confusion", details.class_names, details.matrix),
            ("By superclass", details.superclass_names, details.superclass_matrix),
        )
        return [
            _confusion(title, names, packed)
            for title, names, packed in matrices
            if packed is not None and names
        ]

    @property
    def mistakes(self) -> list[tuple[str, str, int]]:
        """The most frequent mistakes: true class, predicted class, count."""
        frequent = self.details.mistakes[:_LISTED]
        return [(self._class(label), self._class(predicted), count) for label, predicted, count in frequent]

    @property
    def weakest(self) -> list[tuple[str, float]]:
        """The classes of the lowest accuracy, if there are several classes."""
        pairs = zip(self.details.class_right, self.details.class_counts, strict=True)
        accuracies = sorted((right / count, i) for i, (right, count) in enumerate(pairs) if count)
        if len(accuracies) < 2:
            return []
        return [(self._class(i), accuracy) for accuracy, i in accuracies[: _LISTED // 2]]

    def _class(self, label: int) -> str:
        return self.details.class_names[label] or f"class {label}"


def _confusion(title: str, names: Sequence[str], packed: Packed) -> dict[str, Any]:
    """Prepare a confusion matrix; rows are true, ``counts`` None if unreadable.

    ``squares`` draws many classes: whether on the diagonal, opacity, and path of all squares of one shade.
    """
    try:
        counts = packed.tensor().view(len(names), len(names)).tolist()
    except (DataError, RuntimeError):
        return {"title": title, "names": names, "counts": None, "diagonal": 0, "squares": []}
    paths: dict[tuple[bool, int], str] = {}
    for i, row in enumerate(counts):
        for j, count in enumerate(row):
            if count:
                key = i == j, min(_SHADES, 1 + int(_SHADES * count / sum(row)))
                paths[key] = paths.get(key, "") + f"M{j} {i}h1v1h-1z"
    squares = [
        (on_diagonal, 0.1 + 0.9 * shade / _SHADES, paths[on_diagonal, shade])
        for on_diagonal, shade in sorted(paths)
    ]
    diagonal = sum(row[i] for i, row in enumerate(counts))
    return {"title": title, "names": names, "counts": counts, "diagonal": diagonal, "squares": squares}


def blocks_html(blocks: Sequence[Block], thumbnails: Thumbnails) -> Markup:
    """Render the blocks of one dataset."""
    return load_macro("blocks.html", "blocks")(blocks, thumbnails)


def detail_sections(
    scores: ResultTable, details: Sequence[Details], thumbnails: Thumbnails
) -> tuple[str, list[tuple[str, str, Markup]]]:
    """Render details by dataset; of many models only the first few, so that the page stays small.

    Returns:
        An introduction, and by dataset its name, models and content.
    """
    datasets = {}
    for dataset, blocks in group_by(
        _sort_blocks(scores, details), lambda block: block.details.dataset
    ).items():
        # first one task of every model, then the others
        first = {block.model.label: block for block in reversed(blocks)}
        datasets[dataset] = sorted(blocks, key=lambda block: first[block.model.label] is not block)
    most = max(map(len, datasets.values()), default=0)
    while most > 1 and sum(min(most, len(blocks)) for blocks in datasets.values()) > _BLOCKS:
        most -= 1
    left_out = sum(map(len, datasets.values()))
    has_examples = False
    sections = []
    for dataset, blocks in datasets.items():
        has_examples |= any(block.details.examples for block in blocks[:most])
        content = blocks_html(blocks[:most], thumbnails)
        if content.strip():
            left_out -= len(blocks[:most])
            labels = list(dict.fromkeys(block.model.label for block in blocks))
            sections.append((dataset, f"{len(labels)} models" if len(labels) > 1 else labels[0], content))
    lead = []
    if has_examples:
        lead.append(
            "Examples alternate between random correct and random wrong predictions, whatever the accuracy. ✓ "
            "marks correct ones."
        )
    if left_out and most > 1:
        lead.append(f"The first {most} models of each dataset are shown.")
    elif left_out:
        lead.append("One model of each dataset is shown.")
    return " ".join(lead), sections


def _sort_blocks(scores: ResultTable, details: Sequence[Details]) -> list[Block]:
    """Sort the details of the scores' models by dataset and model, those of trained tasks last."""
    models = {model.weights: i for i, model in reversed(list(enumerate(scores.models)))}
    order = {name: i for i, name in enumerate(dict.fromkeys(row.dataset for row in scores.rows))}
    rows = {(row.model, *row.series): row for row in reversed(scores.rows)}
    shown = [each for each in details if each.weights in models and each.dataset in order]
    shown.sort(
        key=lambda each: (order[each.dataset], models[each.weights], each.task not in AS_TRAINED, each.key)
    )
    blocks = []
    for each in shown:
        model = models[each.weights]
        row = rows.get((model, each.dataset, each.split, each.task, each.prompt_set, each.setting))
        score = ""
        if row is not None:
            value = (
                format_value(100 * row.value, "%")
                if is_fraction(row.metric, row.value)
                else format_number(row.value)
            )
            score = f"{metric_title(row.metric)} {value}"
        blocks.append(Block(model=scores.models[model], details=each, score=score))
    return blocks

"""Rank models among the models of ``published.json``, which ``bench/import_published.py`` writes.

Scores are compared if dataset, split, number of images, task, metric and prompt set are equal. A model with the
score of a published one has its rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec

from clipkit.files import counted
from eval.datasets.card import Card, Published, load_card
from eval.datasets.dataset import TEST, list_some
from eval.results.table import Record, ResultTable

_NEIGHBORS = 5  # above a model, and below it


class _PublishedTable(msgspec.Struct, frozen=True, kw_only=True):
    """Published scores: by model, a value for each column (dataset, task, metric, prompt set)."""

    source: str
    commit: str
    date: str
    columns: tuple[tuple[str, str, str, str], ...]
    models: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of a model by the mean over the datasets that it shares with the published ones.

    ``scores`` are the score on each dataset, its rank, and the best published value; ``neighbors`` the rank, the
    name and the mean of the models around it and of itself.
    """

    model: str
    place: str
    scores: Sequence[tuple[Record, int, float]]
    neighbors: Sequence[tuple[int, tuple[str, float]]]


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Placements, an introduction, and by dataset the published scores of the neighbors."""

    lead: str
    placements: Sequence[Placement]
    published: Mapping[str, Sequence[Published]]


def list_test_counts(card: Card) -> set[int]:
    """Return the numbers of images and of items that scores of a card's test split may state; empty if unknown."""
    return {counts[TEST] for counts in (card.splits, card.items) if TEST in counts}


def rank_models(results: ResultTable) -> Ranking:
    """Rank models among published ones."""
    path = Path(__file__).with_name("published.json")
    table = msgspec.json.decode(path.read_bytes(), type=_PublishedTable)
    columns = {column[:3]: i for i, column in enumerate(table.columns)}
    rows: dict[int, dict[int, Record]] = {}  # by model and column
    others: dict[str, None] = {}
    for row in results.rows:
        i = columns.get((row.dataset, row.task, row.metric))
        if i is None:
            continue
        counts = list_test_counts(load_card(row.dataset))
        if row.split != TEST:
            others[f"{row.dataset} on split {row.split}"] = None
        elif row.setting:
            others[f"{row.dataset} with {row.setting}"] = None
        elif counts and row.n not in counts:
            others[f"{row.dataset} with another number of images"] = None
        elif row.prompt_set != table.columns[i][3]:
            others[f"{row.dataset} with prompts {row.prompt_set or 'none'}, not {table.columns[i][3]}"] = None
        else:
            rows.setdefault(row.model, {})[i] = row
    placements = [_place_model(results.models[model].label, rows[model], table) for model in sorted(rows)]
    names = {name for placement in placements for _, (name, _) in placement.neighbors}
    values = {name: model_values for name, model_values in table.models.items() if name in names}
    published = {}
    shared = sorted({i for model_rows in rows.values() for i in model_rows})
    for i in shared:
        dataset, task, metric, prompts = table.columns[i]
        column = {name: model_values[i] for name, model_values in values.items()}
        scores = Published(source=table.source, task=task, metric=metric, prompts=prompts, values=column)
        published[dataset] = [scores]
    lead = (
        f"{len(table.models)} models of {table.source}, {table.date} (commit {table.commit[:8]}), on the datasets "
        "with the same metric and prompts."
    )
    if others:
        lead += f" Left out: {list_some([*others], 8)}."
    return Ranking(lead=lead, placements=placements, published=published)


def _place_model(label: str, rows: Mapping[int, Record], table: _PublishedTable) -> Placement:
    scores = []
    for i, row in sorted(rows.items()):
        column = [values[i] for values in table.models.values()]
        scores.append((row, 1 + sum(value > row.value for value in column), max(column)))
    means = [(name, fmean(values[i] for i in rows)) for name, values in table.models.items()]
    mean = fmean(row.value for row in rows.values())
    rank = 1 + sum(other > mean for _, other in means)
    ordered = sorted(means, key=lambda item: -item[1])
    ordered.insert(rank - 1, (label, mean))
    ranked = list(enumerate(ordered, start=1))
    place = f"rank {rank} of {len(ordered)} by the mean over {counted(len(rows), 'dataset')}"
    return Placement(
        model=label,
        place=f"{place}, {100 * mean:.1f}%; mean of the ranks: {fmean(score[1] for score in scores):.1f}",
        scores=scores,
        neighbors=ranked[max(0, rank - 1 - _NEIGHBORS) : rank + _NEIGHBORS],
    )

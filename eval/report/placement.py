"""Rank models among the models of ``published.json``, which ``bench/import_published.py`` writes.

Scores are compared if dataset, split, task, metric and prompt set are equal.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec

from clipkit.files import counted
from eval.datasets.card import Published
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


def rank_models(results: ResultTable, datasets: Collection[str]) -> Ranking:
    """Rank models among published ones; ``datasets`` are those whose number of images is that of their card."""
    path = Path(__file__).with_name("published.json")
    table = msgspec.json.decode(path.read_bytes(), type=_PublishedTable)
    columns = {column[:3]: i for i, column in enumerate(table.columns)}
    rows: dict[int, dict[int, Record]] = {}  # by model and column
    others: dict[str, None] = {}
    for row in results.rows:
        i = columns.get((row.dataset, row.task, row.metric))
        if i is None or row.split != TEST or row.setting:
            continue
        if row.dataset not in datasets:
            others[f"{row.dataset} with another number of images"] = None
        elif row.prompt_set != table.columns[i][3]:
            others[f"{row.dataset} with prompts {row.prompt_set or 'none'}, not {table.columns[i][3]}"] = None
        else:
            rows.setdefault(row.model, {})[i] = row
    placements = [_place_model(results.models[model].label, rows[model], table) for model in sorted(rows)]
    names = {name for placement in placements for _, (name, _) in placement.neighbors}
    values = {name: model_values for name, model_values in table.models.items() if name in names}
    published = {}
    for i, (dataset, task, metric, prompts) in enumerate(table.columns if values else ()):
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
    means = {name: fmean(values[i] for i in rows) for name, values in table.models.items()}
    means[label] = fmean(row.value for row in rows.values())
    ordered = list(enumerate(sorted(means.items(), key=lambda item: -item[1]), start=1))
    rank = next(rank for rank, (name, _) in ordered if name == label)
    place = f"rank {rank} of {len(means)} by the mean over {counted(len(rows), 'dataset')}"
    return Placement(
        model=label,
        place=f"{place}, {100 * means[label]:.1f}%; mean of the ranks: {fmean(score[1] for score in scores):.1f}",
        scores=scores,
        neighbors=ordered[max(0, rank - 1 - _NEIGHBORS) : rank + _NEIGHBORS],
    )

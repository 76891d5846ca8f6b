"""Builds the page over many models and datasets from results files and the details beside them.

One file that carries everything in itself; all text that comes from data is escaped. The same results give the same
bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from eval.details import Details, read_details
from eval.image_models import TIMM
from eval.report.charts import figure, number
from eval.report.comparison_charts import cost, few_shot, layers, leaders, probe_differences, said_of
from eval.report.comparison_tables import all_scores, model_facts, score_table_html
from eval.report.dataset_blocks import Block, blocks_html
from eval.report.json_lines import json_lines
from eval.report.page_frame import Section, page, write_page
from eval.report.pictures import PictureBook
from eval.report.result_set import ResultSet
from eval.report.score_table import (
    AS_TRAINED,
    SEVERAL_TASKS,
    Published,
    ScoreTable,
    Suites,
    read_scores,
    score_table,
    task_tables,
)
from eval.report.scores import is_share, metric_name

__all__ = ["build_comparison"]

_BLOCKS = 96  # models on datasets that are shown in detail
_HEADLINES = 4
_OPTIONS_OF = ("task", "dataset", "model", "weights")
_MAX_OPTIONS = 300
_SHORT = 12  # lines of a table that needs no unfolding
_TITLES = {
    SEVERAL_TASKS: "Suites of several tasks",
    "zero-shot": "Zero-shot",
    "retrieval": "Retrieval",
    "compositional": "Compositional",
    "linear-probe": "Linear probe",
    "knn": "Nearest neighbours",
    "fine-tune": "Fine-tuned",
    "few-shot": "Few-shot",
}


def build_comparison(
    results: Sequence[Path],
    out: Path,
    *,
    published: Published | None = None,
    suites: Suites | None = None,
    primary: Mapping[str, str] | None = None,
) -> Path:
    """Write the page over all models and datasets of some results files, and give its path.

    Args:
        results: ``results.jsonl`` files, each perhaps with details beside it.
        out: the page. It appears whole or not at all.
        published: by dataset, then model or architecture, what others measured, in 0 … 1. Those of the
            architectures that are shown stand beside them; if there are none, the first few.
        suites: by name, the datasets to take averages over.
        primary: by dataset, its primary metric; by default the first that was recorded.

    Raises:
        DataError: a results file cannot be read, there are no scores, or the page cannot be written.
    """
    found = read_scores(results)
    details, notes = _details(results)
    facts: dict[str, Any] = {"suites": suites or {}, "primary": primary or {}, "published": published or {}}
    tables = task_tables(found, **facts)
    told = _Told(details=details, notes=[*found.notes, *notes], options=_options(results))
    return write_page(out, _page(found, score_table(found, **facts), tables, told))


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What the page tells beside the scores: details, notes, and by task its options with their datasets."""

    details: Sequence[Details]
    notes: Sequence[str]
    options: Mapping[str, Mapping[str, Sequence[str]]]


def _options(results: Sequence[Path]) -> dict[str, dict[str, list[str]]]:
    """What the last lines of each model, task and dataset say of them."""
    last: dict[tuple[str, ...], str] = {}
    for path in dict.fromkeys(results):
        for line in json_lines(path, [], ""):
            text, key = line.get("options"), tuple(str(line.get(name)) for name in _OPTIONS_OF)
            if isinstance(text, str) and text:
                last[key] = text[:_MAX_OPTIONS]
    options: dict[str, dict[str, list[str]]] = {}
    for (task, dataset, *_), text in last.items():
        datasets = options.setdefault(task, {}).setdefault(text, [])
        if dataset not in datasets:
            datasets.append(dataset)
    return options


def _details(results: Sequence[Path]) -> tuple[list[Details], list[str]]:
    found: dict[tuple[str, ...], Details] = {}
    notes: list[str] = []
    for path in dict.fromkeys(results):
        read, own = read_details(path)
        notes += own
        found.update({one.key: one for one in read})
    return list(found.values()), notes


def _page(found: ResultSet, whole: ScoreTable, tables: Mapping[str, ScoreTable], told: _Told) -> str:
    """The page; ``whole`` is of all that is not trained on a dataset, ``tables`` are of each task."""
    book = PictureBook()
    zero_shot = tables.get("zero-shot") or replace(whole, lines=(), averages=())
    shown = _section_of_blocks(found, told.details, book)
    sections = [
        Section(
            name="scores",
            title="Scores",
            lead=_lead([*tables.values()]),
            content=leaders(whole) + _tables(tables),
        ),
        _section_of_probes(found, zero_shot, tables.get("linear-probe")),
        Section(name="cost", title="Score against cost", content=cost(whole)),
        Section(name="few-shot", title="Few-shot", content=few_shot(found, zero_shot)),
        Section(name="layers", title="Layer by layer", content=layers(found)),
        shown,
        Section(name="all", title="All scores", content=all_scores(found)),
        Section(name="about", title="Where the scores come from", content=model_facts(found, told.options)),
    ]
    return page(_title(found), _head(found, whole, told.notes), sections, book, styles=["comparison.css"])


def _title(found: ResultSet) -> str:
    datasets = len({row.dataset for row in found.rows})
    on = f"{datasets} datasets" if datasets > 1 else found.rows[0].dataset
    models = len(found.models)
    return f"{f'{models} models' if models > 1 else found.models[0].label} on {on}"


def _head(found: ResultSet, table: ScoreTable, notes: Sequence[str]) -> str:
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    aside = f'<aside class="notes" aria-label="Notes"><ul>{listed}</ul></aside>' if notes else ""
    headlines = "".join(_headlines(table)[:_HEADLINES])
    scores = f'<div class="scores">{headlines}</div>' if headlines else ""
    return (
        f'<header class="top"><p class="kind">clipkit evaluation report</p><h1>{escape(_title(found))}</h1>'
        f'<p class="lead">{_sentence(found)}</p>{scores}</header>{aside}'
    )


def _sentence(found: ResultSet) -> str:
    tasks = dict.fromkeys(row.task for row in found.rows)
    text = f"{number(len(found.rows))} scores: {escape(', '.join(tasks))}."
    # all lines of a task tell the same, which is of them together, whatever their settings are
    seconds = {(row.model, *row.what[:4], row.seconds) for row in found.rows if row.seconds is not None}
    total = sum(one for *_, one in seconds if isinstance(one, float))
    if total >= 1:  # less says only that features were there already
        told = (
            f"{number(round(total, 1))} seconds" if total < 120 else f"{number(round(total / 60, 1))} minutes"
        )
        text += f" All tasks together took {told}."
    return text


def _headlines(table: ScoreTable) -> list[str]:
    """The best model of each average; without averages, of each dataset."""
    several = len(table.models) > 1
    headlines = []
    for average in table.averages:
        known = [(value, -i) for i, value in enumerate(average.cells) if value is not None]
        if known:
            value, i = max(known)
            who = table.models[-i].label if several else ""
            headlines.append(_headline(average.title, who, value, said_of(average)))
    if headlines:
        return headlines
    for line in table.lines:
        cells = [
            (cell.value, -i)
            for i, cell in enumerate(line.cells)
            if cell and is_share(cell.metric, cell.value)
        ]
        if cells and line.counted:
            value, i = max(cells)
            cell = line.cells[-i]
            interval = (
                f"95% interval {100 * cell.low:.1f}% to {100 * cell.high:.1f}%"
                if cell and cell.low is not None and cell.high is not None
                else ""
            )
            who = table.models[-i].label if several else ""
            headlines.append(_headline(f"{line.dataset} {metric_name(line.metric)}", who, value, interval))
    return headlines


def _headline(what: str, who: str, value: float, said: str) -> str:
    best = f"<span>best: {escape(who)}</span>" if who else ""
    more = f"<span>{escape(said)}</span>" if said else ""
    return (
        f'<div class="score"><p class="what">{escape(what)}</p>'
        f'<p class="figure">{100 * value:.1f}<small>%</small></p>'
        f'<div class="gauge" aria-hidden="true"><i class="bar" style="width:{100 * value:.2f}%"></i></div>'
        f'<p class="details">{best}{more}</p></div>'
    )


def _lead(tables: Sequence[ScoreTable]) -> str:
    averages = [average for table in tables for average in table.averages]
    parts = ["Percent."]
    if any(len(table.models) > 1 for table in tables):
        parts.append("The best model of each line in bold.")
    if averages:
        mean = "A mean is taken over the datasets that all models have, so that its columns compare"
        blank = any(None in average.cells for average in averages)
        parts.append(
            f"{mean}; models that have none of its datasets are left out of it (–)." if blank else f"{mean}."
        )
    if any(len(average.tasks) > 1 for average in averages):
        parts.append("A mean over several tasks is of the main task of each dataset.")
    if any(table.published for table in tables):
        parts.append("Published numbers are others' measurements, of their weights and prompts.")
    return " ".join(parts)


def _tables(tables: Mapping[str, ScoreTable]) -> str:
    """The means over several tasks and the first task's table are open, the others unfold."""
    parts: list[str] = []
    shown = False
    for task, table in tables.items():
        title = _TITLES.get(task, task)
        html = score_table_html(title, table)
        if not shown:
            parts.append((f"<h3>{escape(title)}</h3>" if [*tables] != ["zero-shot"] else "") + html)
        else:
            opened = " open" if len(table.lines) <= _SHORT else ""
            parts.append(f"<details{opened}><summary><b>{escape(title)}</b></summary>{html}</details>")
        shown = shown or bool(table.lines)
    return "".join(parts)


def _section_of_probes(found: ResultSet, zero_shot: ScoreTable, probe: ScoreTable | None) -> Section:
    """Zero-shot of each model against a linear probe: of an image model of timm if there is one, else its own."""
    whose, of_what = "linear probe", "a classifier trained on their pictures"
    content = ""
    baseline = _baseline(found, probe)
    if probe is not None and baseline is not None:
        # every model is held beside the one probe
        lines = [replace(line, cells=(line.cells[baseline],) * len(line.cells)) for line in probe.lines]
        content = probe_differences(found, zero_shot, replace(probe, lines=tuple(lines)))
    if content and baseline is not None:
        name = escape(found.models[baseline].label)
        whose, of_what = f"the linear probe of {name}", f"{of_what} with the features of {name}"
    return Section(
        name="probe",
        title="Zero-shot against linear probe",
        lead=f"Zero-shot less {whose}, in points. On datasets with a bar to the right, the names of the classes do "
        f"better than {of_what}.",
        content=content or probe_differences(found, zero_shot, probe),
    )


def _baseline(found: ResultSet, probe: ScoreTable | None) -> int | None:
    """Which model is an image model of timm: that with the most probes, the first of several."""
    if probe is None:
        return None
    counts = {
        i: sum(line.cells[i] is not None for line in probe.lines if line.counted)
        for i, model in enumerate(found.models)
        if model.name.startswith(TIMM)
    }
    return max((i for i in counts if counts[i]), key=lambda i: (counts[i], -i), default=None)


def _section_of_blocks(found: ResultSet, details: Sequence[Details], book: PictureBook) -> Section:
    """Dataset by dataset; of many models the first few, so that the page stays small."""
    by_dataset = _blocks(found, details)
    left = sum(len(blocks) for blocks in by_dataset.values())
    most = max((len(blocks) for blocks in by_dataset.values()), default=0)
    while most > 1 and sum(min(most, len(blocks)) for blocks in by_dataset.values()) > _BLOCKS:
        most -= 1
    parts: list[str] = []
    for dataset, blocks in by_dataset.items():
        content = blocks_html(blocks[:most], book)
        if content:
            left -= len(blocks[:most])
            opened = "" if parts else " open"
            labels = list(dict.fromkeys(block.model.label for block in blocks))
            names = f"{len(labels)} models" if len(labels) > 1 else labels[0]
            parts.append(
                f'<details class="dataset"{opened}><summary><b>{escape(dataset)}</b> '
                f"<small>{escape(names)}</small></summary>{content}</details>"
            )
    lead = []
    if any(block.details.examples for blocks in by_dataset.values() for block in blocks[:most]):
        lead.append(
            "Examples are random right and random wrong predictions in turn, whatever the accuracy is. ✓ marks "
            "what is right."
        )
    if left:
        lead.append(
            f"Of each dataset the first {most} are shown." if most > 1 else "Of each dataset one is shown."
        )
    return Section(name="datasets", title="Dataset by dataset", lead=" ".join(lead), content="".join(parts))


def _blocks(found: ResultSet, details: Sequence[Details]) -> dict[str, list[Block]]:
    """Details by dataset in the order of the results; the first task of each model and dataset that has any."""
    numbers = {model.weights: i for i, model in reversed(list(enumerate(found.models)))}
    datasets = {name: i for i, name in enumerate(dict.fromkeys(row.dataset for row in found.rows))}
    scores = {(row.model, *row.what[:5]): row for row in reversed(found.rows)}
    blocks: dict[str, dict[int, list[Block]]] = {}
    ordered = sorted(
        (one for one in details if one.weights in numbers and one.dataset in datasets),
        key=lambda one: (datasets[one.dataset], numbers[one.weights], one.task not in AS_TRAINED, one.key),
    )
    for one in ordered:
        model = numbers[one.weights]
        row = scores.get((model, one.dataset, one.split, one.task, one.prompt_set, one.setting))
        score = ""
        if row is not None:
            value = figure(100 * row.value, "%") if is_share(row.metric, row.value) else number(row.value)
            score = f"{metric_name(row.metric)} {value}"
        block = Block(model=found.models[model], details=one, score=score)
        blocks.setdefault(one.dataset, {}).setdefault(model, []).append(block)
    return {
        dataset: [own[0] for own in by_model.values()]
        + [more for own in by_model.values() for more in own[1:]]
        for dataset, by_model in blocks.items()
    }

"""Builds ``report.html``, the page a person looks at after a training: one file that carries everything in itself.

All text that comes from data is escaped. The same run folder gives the same bytes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from clipkit.urls import without_secrets
from eval.report.charts import number
from eval.report.curves import curves
from eval.report.page_frame import Section, page, scrolling, write_page
from eval.report.pictures import PictureBook, examples, matrices, queries
from eval.report.run_folder import BadSamples, Result, RunFolder, read_run_folder
from eval.report.scores import headline_scores, of_training, results_table
from eval.snapshot_file import Snapshot

__all__ = ["build_report"]


def build_report(run: Path, out: Path | None = None) -> Path:
    """Write the report of a run folder and give its path.

    Args:
        run: the run folder. Each of its files may be missing or cut short; the page says what it lacks.
        out: the file to write; by default ``report.html`` in the run folder. It appears whole or not at all.

    Raises:
        DataError: there is no run folder, or the page cannot be written.
    """
    folder = read_run_folder(run)
    out = run / "report.html" if out is None else out
    return write_page(out, _page(folder))


def _page(run: RunFolder) -> str:
    book = PictureBook()
    sections = [
        Section(name="curves", title="Curves", content=curves(run)),
        *_picture_sections(run, book),
        Section(name="results", title="All results", content=results_table(run.results)),
        Section(name="about", title="About this run", content=_about(run)),
    ]
    return page(run.name, _head(run), sections, book)


def _head(run: RunFolder) -> str:
    notes = list(run.notes)
    if run.bad_samples and run.bad_samples.count:
        count = number(run.bad_samples.count)
        notes.append(f"{count} samples could not be used and were replaced; the end of the page says why.")
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    aside = f'<aside class="notes" aria-label="Notes"><ul>{listed}</ul></aside>' if notes else ""
    scores = headline_scores(run.results, run.step) or _unscored(run)
    return (
        f'<header class="top"><p class="kind">clipkit training report</p><h1>{escape(run.name)}</h1>'
        f'<p class="lead">{_sentence(run)}</p>{scores}</header>{aside}'
    )


def _sentence(run: RunFolder) -> str:
    """The run in one sentence."""
    model, planned = run.config.get("model"), run.planned
    name = model.get("name") if isinstance(model, Mapping) else None
    parts = [f"<b>{escape(str(name))}</b>" if name else "A model"]
    if run.metrics and run.step is not None:
        of = f" of {number(planned)}" if planned is not None and planned > run.step else ""
        parts.append(f"trained for {number(run.step)}{of} steps")
    elif run.step is not None:
        parts.append(f"at step {number(run.step)}")
    else:
        parts.append("of which nothing is recorded yet")
    samples, seconds, loss, chance = (run.last(key) for key in ("samples", "seconds", "loss", "chance"))
    if samples:
        parts.append(f"on {number(samples)} samples")
    if seconds:
        parts.append(f"in {_duration(seconds)}")
    text = " ".join(parts)
    if loss is not None:
        text += f". The last loss is {number(loss)}"
        text += f", where guessing gives {number(chance)}" if chance else ""
    return text + "."


def _unscored(run: RunFolder) -> str:
    """Why there are no scores, and how to get some; "" if they are due, as a note tells that already."""
    if run.config and not run.scored_on:
        ways = (
            ("While it trains:", "python train.py … eval.data=FOLDER"),
            ("What is trained already:", "python -m eval retrieval --model RUN --data FOLDER"),
            ("Then this page anew:", "python -m eval report RUN"),
        )
        listed = "".join(f"<li>{escape(when)} <code>{escape(command)}</code></li>" for when, command in ways)
        return (
            '<div class="unscored"><p>Nothing is scored in this run, because its config names no '
            f"<code>eval.data</code>. To score it:</p><ul>{listed}</ul>"
            "<p>RUN is the folder of this run. FOLDER is a dataset that holds pairs out as split "
            "<code>test</code>, as <code>python -m data pack TABLE FOLDER --test 0.1</code> makes one. "
            "For a built-in one with class names, such as <code>digits</code>, say <code>zero-shot</code> in "
            "place of <code>retrieval</code>.</p></div>"
        )
    if run.config and (run.step or 0) < run.first_score:
        named = escape(", ".join(run.scored_on))
        return f'<p class="unscored">No scores yet: {named}, first at step {number(run.first_score)}.</p>'
    return ""


def _duration(seconds: float) -> str:
    for limit, length, unit in ((90, 1, "seconds"), (5400, 60, "minutes"), (172_800, 3600, "hours")):
        if seconds < limit:
            return f"{number(round(seconds / length, 1))} {unit}"
    return f"{number(round(seconds / 86_400, 1))} days"


def _picture_sections(run: RunFolder, book: PictureBook) -> list[Section]:
    def by_dataset(build: Callable[[Sequence[Snapshot], PictureBook], str]) -> str:
        parts = [(name, build(snapshots, book)) for name, snapshots in run.snapshots.items()]
        return "".join(
            f'<div class="dataset"><h3>{escape(name)}</h3>{part}</div>' for name, part in parts if part
        )

    return [
        Section(
            name="examples",
            title="Example predictions",
            lead="Held-out pictures picked by chance, with the five likeliest labels. ✓ marks the true one.",
            content=by_dataset(examples),
        ),
        Section(
            name="similarity",
            title="Similarity of a held-out batch",
            lead="Rows are pictures, columns their captions. The pairs lie on the diagonal, which stands out more "
            "and more as the model learns.",
            content=by_dataset(matrices),
        ),
        Section(
            name="queries",
            title="Nearest pictures",
            lead="The held-out pictures nearest to a text, nearest first, as the training went on. ✓ marks those "
            "of the right class.",
            content=by_dataset(queries),
        ),
    ]


def _about(run: RunFolder) -> str:
    parts = [_provenance(of_training(run.results)), _bad_samples(run.bad_samples)]
    if run.config_text:
        parts.append(f"<h3>Configuration</h3><pre>{escape(without_secrets(run.config_text).strip())}</pre>")
    return "".join(parts)


def _provenance(results: Sequence[Result]) -> str:
    """Where the scores at the top come from; what differs between datasets is told for each."""
    values: dict[str, dict[str, str]] = {}
    for result in results:
        for key, value in result.provenance.items():
            if value is not None:
                values.setdefault(key, {})[result.dataset] = _told(value)
    datasets = {result.dataset for result in results}
    rows = []
    for key, by_dataset in values.items():
        if len(set(by_dataset.values())) == 1 and len(by_dataset) == len(datasets):
            told = escape(next(iter(by_dataset.values())))
        else:
            told = "<br>".join(f"{escape(name)}: {escape(value)}" for name, value in by_dataset.items())
        rows.append(f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{told}</dd>")
    return (
        f'<h3>Where the scores at the top come from</h3><dl class="facts">{"".join(rows)}</dl>'
        if rows
        else ""
    )


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_told(one)}" for key, one in value.items())
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _bad_samples(bad: BadSamples | None) -> str:
    if bad is None or bad.count == 0:
        return ""
    rows = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in one)}</tr>" for one in bad.first)
    said = f"{number(bad.count)} samples could not be used and were replaced by others. The first of them:"
    table = (
        '<table><thead><tr><th scope="col">Shard</th><th scope="col">Key</th><th scope="col">Cause</th></tr>'
        f"</thead><tbody>{rows}</tbody></table>"
    )
    return f"<h3>Bad samples</h3><p>{said}</p>{scrolling('Bad samples', table)}"

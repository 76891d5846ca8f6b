"""Try findings of papers in small on built-in data, and write what came out into one page.

    python -m bench.papers NAME [NAME …] [--seeds 3] [--jobs 2] [--folder runs/papers]

Trainings and scores are kept in the folder; a repeated command continues. Every study writes
``bench/results/papers_NAME.json``, and the page ``bench/results/papers.md`` is made from these files.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bench.papers.labels import STUDIES, study
from bench.papers.objectives import objectives
from bench.papers.pixels import pixels
from bench.papers.runs import RESULTS
from bench.papers.transfer import TRANSFERS, transfer

ALL: dict[str, Callable[..., dict[str, Any]]] = {
    "objectives": objectives,
    **{name: partial(transfer, name) for name in TRANSFERS},
    "pixels": pixels,
    **{name: partial(study, name) for name in STUDIES},
}


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Plot each score of each variant: a dot for the mean, a line for the standard deviation over seeds.

    Scores that are ``ordered``, such as those of a tower's blocks, are one panel with a line for each variant.
    """
    from matplotlib.figure import Figure

    rows = found["rows"]
    scores = list(dict.fromkeys(score for row in rows.values() for score in row))
    if found.get("ordered"):
        figure = Figure(figsize=(6, 3.5), layout="constrained")
        panel = figure.subplots()
        for name, row in rows.items():
            points = [[100 * value for value in row[score]] for score in scores]
            spread = [stdev(point) if len(point) > 1 else 0.0 for point in points]
            panel.errorbar(scores, [mean(point) for point in points], yerr=spread, fmt="o-", label=name)
        panel.set_ylabel("accuracy, %")
        panel.legend(frameon=False, fontsize=8)
        figure.savefig(path, dpi=120)
        return
    figure = Figure(figsize=(1.5 + 1.5 * len(scores), 0.8 + 0.3 * len(rows)), layout="constrained")
    for panel, score in zip(figure.subplots(1, len(scores), squeeze=False)[0], scores, strict=True):
        for place, row in enumerate(rows.values()):
            values = [100 * value for value in row[score]]
            panel.errorbar(
                mean(values),
                -place,
                xerr=stdev(values) if len(values) > 1 else None,
                fmt="o",
                color="tab:blue",
            )
        panel.set_title(f"{score}, %", fontsize=9)
        panel.set_yticks(
            [-place for place in range(len(rows))], list(rows) if panel is figure.axes[0] else []
        )
        panel.grid(axis="x", lw=0.5)
    figure.savefig(path, dpi=120)


def page(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the studies' results as Markdown."""
    lines = [
        "# Findings of papers, tried in small", "",
        "Written by `python -m bench.papers NAME`. Small models on built-in data may differ from the papers', so a",
        "direction that was not found says little about large ones. Scores are means and standard deviations over",
        "seeds.",
    ]  # fmt: skip
    for name, one in found.items():
        agrees = one["agrees"] if isinstance(one["agrees"], dict) else {"": one["agrees"]}
        verdict = ", ".join(f"{claim} {'yes' if so else 'no'}".strip() for claim, so in agrees.items())
        columns = list(dict.fromkeys(score for row in one["rows"].values() for score in row))
        lines += [
            "", f"## {one['title']}", "",
            f"{one['source']}: {one['finding']} Direction reproduced: **{verdict}**.", "",
            f"`python -m bench.papers {name}`: {one['scale']}.", "",
            "| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns),
        ]  # fmt: skip
        for variant, row in one["rows"].items():
            lines.append(f"| {variant} | " + " | ".join(_shown(row[score]) for score in columns) + " |")
        if one.get("fit"):
            lines += ["", one["fit"]]
        if (RESULTS / f"papers_{name}.png").is_file():
            lines += ["", f"![{one['title']}](papers_{name}.png)"]
    return "\n".join(lines) + "\n"


def _shown(values: list[float]) -> str:
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.1f}{spread}%"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=ALL, metavar="NAME", help=", ".join(ALL))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (default: 1)")
    parser.add_argument("--folder", type=Path, default=Path("runs/papers"))
    given = parser.parse_args()
    if given.seeds < 1 or given.jobs < 1:
        parser.error("expected --seeds and --jobs of at least 1")
    for name in given.names:
        found = ALL[name](seeds=given.seeds, jobs=given.jobs, folder=given.folder.absolute())
        path = RESULTS / f"papers_{name}.json"
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if name != "objectives":  # which has its own figure
            plot(found, path.with_suffix(".png"))
        print(page({name: found}))
    paths = {name: RESULTS / f"papers_{name}.json" for name in ALL}
    every = {name: json.loads(path.read_text("utf-8")) for name, path in paths.items() if path.is_file()}
    (RESULTS / "papers.md").write_text(page(every), encoding="utf-8")


if __name__ == "__main__":
    main()

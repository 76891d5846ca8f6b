"""``python -m eval report``, ``compare`` and ``list``: what came out, and what there is, to be looked at."""

import argparse
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from clipkit.errors import ConfigError, nearest
from eval.card_facts import (
    card_lines,
    cards_in_no_suite,
    is_of_card,
    primary_metrics,
    published_scores,
    suites_of,
)
from eval.cards import Card, card_names, load_card, load_suite, suite_names
from eval.results import read_results

__all__ = ["add_page_commands"]

_FORMS = ("csv", "latex", "markdown")
_EXAMPLES = {"out": "scores.html", "csv": "scores.csv", "latex": "scores.tex", "markdown": "scores.md"}
_OF_RUN = ("results.jsonl", "metrics.jsonl", "config.toml")  # what the page of a run is made of
_SHOWN = 200  # characters of a path in a message


def add_page_commands(commands: Any) -> None:
    """Add them to the command line; each sets ``run``."""
    what = "build a run's report.html, or a page or table over the results of many models"
    report = commands.add_parser("report", help=what, description=what[0].upper() + what[1:] + ".")
    report.add_argument(
        "source",
        type=Path,
        nargs="+",
        metavar="RUN|RESULTS",
        help="one run folder; or results.jsonl files, or several run folders",
    )
    report.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="default: RUN/report.html of one run; else scores.html beside the first results",
    )
    for form in _FORMS:
        report.add_argument(
            f"--{form}",
            type=Path,
            metavar="FILE",
            help="write the table of results there as well; - prints it",
        )
    report.set_defaults(run=_report)
    what = "tell which differences between two models are beyond chance"
    compare = commands.add_parser("compare", help=what, description=what[0].upper() + what[1:] + ".")
    compare.add_argument(
        "first",
        metavar="A",
        help="a run folder or a results file of one model; or a model's name in --results",
    )
    compare.add_argument("second", metavar="B", help="another")
    compare.add_argument(
        "--results",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="where both are; may be repeated",
    )
    compare.set_defaults(run=_compare)
    what = "list the suites and their datasets"
    listing = commands.add_parser("list", help=what, description=what[0].upper() + what[1:] + ".")
    listing.add_argument(
        "suite",
        nargs="?",
        metavar="SUITE|DATASET",
        help="the datasets of one suite, or what is known of one dataset",
    )
    listing.set_defaults(run=_list)


def _report(options: argparse.Namespace) -> int:
    tables = {form: getattr(options, form) for form in _FORMS if getattr(options, form) is not None}
    _check_places(options.source, {"out": options.out, **tables})
    if len(options.source) == 1 and options.source[0].is_dir() and not tables:
        from eval.report import build_report
        from eval.report.json_lines import json_lines

        print(f"wrote {build_report(options.source[0], options.out)}")
        unread: list[str] = []
        deque(json_lines(options.source[0] / "results.jsonl", unread, ""), maxlen=0)
        _tell(unread)
        return 0
    from eval.report.comparison_page import build_comparison
    from eval.report.page_frame import write_page
    from eval.report.result_set import read_result_set
    from eval.report.tables import as_csv, as_latex, as_markdown

    printed = [form for form, path in tables.items() if str(path) == "-"]
    if len(printed) > 1:
        raise ConfigError(
            f"--{printed[0]} - and --{printed[1]} - would mix: print one, and name a file for the other"
        )
    files = [source / "results.jsonl" if source.is_dir() else source for source in options.source]
    if missing := [file for file in files if not file.is_file()]:
        raise ConfigError(
            f"no results at {str(missing[0])[:_SHOWN]}: name a results.jsonl or the folder of a run"
        )
    facts = _facts(files)
    told = sys.stderr if printed else sys.stdout  # what is printed may be on its way into another program
    if options.out is not None or not tables:
        out = options.out or files[0].with_name("scores.html")  # report.html is the page of a run
        print(f"wrote {build_comparison(files, out, **facts)}", file=told)
    writers: Mapping[str, Callable[..., str]] = {"csv": as_csv, "latex": as_latex, "markdown": as_markdown}
    for form, path in tables.items():
        text = writers[form](files, **facts)
        if form in printed:
            print(text, end="" if text.endswith("\n") else "\n")
        else:
            print(f"wrote {write_page(path, text)}", file=told)
    _tell(read_result_set(files).notes)
    return 0


def _check_places(sources: Sequence[Path], places: Mapping[str, Path | None]) -> None:
    """Make sure that what is written takes the place of nothing that a page is made of, nor of another output.

    Raises:
        ConfigError: it would.
    """
    kept = [one for source in sources for one in (source, *(source / name for name in _OF_RUN))]
    taken: dict[Path, str] = {}
    for option, path in places.items():
        if path is None or (str(path) == "-" and option in _FORMS):
            continue
        named = f"--{option} {str(path)[:_SHOWN]}"
        if str(path) in ("-", "."):  # the latter is what an empty name is
            raise ConfigError(f"{named}: name the file to write, such as {_EXAMPLES[option]}")
        if path.suffix == ".jsonl" or any(_is_same(path, one) for one in kept):
            raise ConfigError(
                f"{named} is a file of results or of a run: name another, such as {_EXAMPLES[option]}"
            )
        if (other := taken.setdefault(path.absolute(), option)) != option:
            raise ConfigError(f"{named} would replace what --{other} writes there: name two files")


def _is_same(path: Path, other: Path) -> bool:
    with suppress(OSError, ValueError):  # one of them is not there, or can be none
        return path.is_file() and path.samefile(other)
    return False


def _tell(notes: Sequence[str]) -> None:
    """What a page's reader finds on it, told to who builds it."""
    from eval.terminal_table import printable

    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)


def _facts(files: Sequence[Path]) -> dict[str, Any]:
    """What cards say of the datasets in the results."""
    from eval.report.json_lines import whole

    counts: dict[str, set[object]] = {}
    for file in files:
        for line in read_results(file):
            counts.setdefault(str(line["dataset"]), set()).add(whole(line.get("n")))
    datasets = [name for name, own in counts.items() if is_of_card(name, own)]
    return {
        "published": published_scores(datasets),
        "suites": suites_of(datasets),
        "primary": primary_metrics(datasets),
    }


def _compare(options: argparse.Namespace) -> int:
    from eval.comparison import compare
    from eval.terminal_table import comparison_table, printable

    results = [one / "results.jsonl" if one.is_dir() else one for one in options.results]
    found = compare(results, options.first, options.second)
    console = Console(highlight=False)
    if found.differences:
        console.print(comparison_table(found))
    else:
        print(f"{printable(found.first)} and {printable(found.second)}: nothing could be compared")
    for line in found.refused:
        console.print(f"not compared: {printable(line)}", markup=False)
    _tell(found.notes)
    return 0 if found.differences else 1


def _list(options: argparse.Namespace) -> int:
    console = Console(highlight=False)
    if options.suite in card_names():
        for line in card_lines(options.suite):
            console.print(line, markup=False, soft_wrap=True)
        return 0
    if options.suite is not None and options.suite not in suite_names():
        known = [*suite_names(), *card_names()]
        raise ConfigError(f"there is no suite or dataset {options.suite!r}: {nearest(options.suite, known)}")
    for name in suite_names() if options.suite is None else (options.suite,):
        suite = load_suite(name)
        rows = [(card, suite.metrics_for(card)[0]) for card in map(load_card, suite.cards)]
        console.print(_cards_table(f"{name}: {suite.title}", rows))
    if options.suite is None:
        rows = [(card, card.metric) for card in map(load_card, cards_in_no_suite())]
        console.print(_cards_table("in no suite", rows))
    return 0


def _cards_table(title: str, rows: Sequence[tuple[Card, str]]) -> Table:
    """Datasets with their main task and a metric; names stay whole, to be copied."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("dataset", no_wrap=True)
    table.add_column("task", no_wrap=True)
    table.add_column("metric", overflow="fold")
    table.add_column("classes", justify="right", no_wrap=True)
    table.add_column("test", justify="right", no_wrap=True)
    for card, metric in rows:
        size, classes = card.splits.get("test"), card.classes
        table.add_row(
            card.name,
            card.tasks[0] if card.tasks else "not scored",
            metric,
            "" if classes is None else f"{classes:,}",
            "" if size is None else f"{size:,}",
        )
    return table

"""The commands ``report`` and ``compare`` of ``python -m eval``, which read results."""

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from clipkit.errors import ConfigError
from clipkit.files import printable, write_page
from eval.compare import compare
from eval.datasets.catalog import (
    matches_card,
    paper_differences,
    primary_metrics,
    published_scores,
    select_suites,
)
from eval.options import CompareOptions, ReportOptions
from eval.report import as_csv, as_latex, as_markdown, build_comparison, build_report
from eval.report.tables import Facts
from eval.report.terminal import comparison_table
from eval.results.records import json_lines, parse_integer
from eval.results.scores import read_results
from eval.results.table import read_table

_EXAMPLES = {"out": "scores.html", "csv": "scores.csv", "latex": "scores.tex", "markdown": "scores.md"}
_MAX_SHOWN = 200  # characters of a path in a message


def run_report(options: ReportOptions) -> int:
    """Build the page of a run, or a page and tables of the results of several models."""
    tables: dict[str, Path] = {}
    for form in ("csv", "latex", "markdown"):
        path = getattr(options, form)
        if path is not None:
            tables[form] = path
    _check_outputs(options.source, {"out": options.out, **tables})
    if len(options.source) == 1 and options.source[0].is_dir() and not tables:
        print(f"wrote {build_report(options.source[0], options.out)}")
        unread: list[str] = []
        deque(json_lines(options.source[0] / "results.jsonl", unread, ""), maxlen=0)
        _print_notes(unread)
        return 0

    printed = [form for form, path in tables.items() if str(path) == "-"]
    if len(printed) > 1:
        raise ConfigError(
            f"--{printed[0]} - and --{printed[1]} - both write to standard output: choose a file for one of them"
        )
    files = [source / "results.jsonl" if source.is_dir() else source for source in options.source]
    counts: dict[str, set[object]] = {}
    for file in files:
        if not file.is_file():
            raise ConfigError(
                f"no results at {str(file)[:_MAX_SHOWN]}: expected a results.jsonl file or a run folder"
            )
    for file in files:
        for line in read_results(file):
            counts.setdefault(str(line["dataset"]), set()).add(parse_integer(line.get("n")))
    datasets = [name for name in counts if matches_card(name, counts[name])]
    published = published_scores(datasets)
    suites = select_suites(datasets)
    primary = primary_metrics(datasets)
    log = sys.stderr if printed else sys.stdout  # a printed table may be piped into another program
    if options.out is not None or not tables:
        out = options.out or files[0].with_name("scores.html")  # report.html is the page of a run
        facts = Facts(published=published, suites=suites, primary=primary, paper=paper_differences(datasets))
        page = build_comparison(files, out, **facts)
        print(f"wrote {page}", file=log)
    writers: Mapping[str, Callable[..., str]] = {"csv": as_csv, "latex": as_latex, "markdown": as_markdown}
    for form, path in tables.items():
        text = writers[form](files, published=published, suites=suites, primary=primary)
        if form in printed:
            print(text, end="" if text.endswith("\n") else "\n")
        else:
            print(f"wrote {write_page(path, text)}", file=log)
    _print_notes(read_table(files).notes)
    return 0


def _check_outputs(sources: Sequence[Path], outputs: Mapping[str, Path | None]) -> None:
    """Raise ConfigError if an output would overwrite results, a file of a run, or another output."""
    inputs = list(sources)
    for source in sources:
        inputs += [source / "results.jsonl", source / "metrics.jsonl", source / "config.toml"]
    options: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is None or (str(path) == "-" and option != "out"):
            continue
        output = f"--{option} {str(path)[:_MAX_SHOWN]}"
        if str(path) in ("-", "."):  # the latter is an empty argument
            raise ConfigError(f"{output}: expected the name of a file to write, such as {_EXAMPLES[option]}")
        is_input = path.suffix == ".jsonl"
        with suppress(OSError, ValueError):  # a path that does not exist, or is invalid
            if path.is_file() and any(file.exists() and path.samefile(file) for file in inputs):
                is_input = True
        if is_input:
            raise ConfigError(
                f"{output} is a results file or belongs to a run: choose another name, such as {_EXAMPLES[option]}"
            )
        other = options.setdefault(path.absolute(), option)
        if other != option:
            raise ConfigError(f"{output} would overwrite the output of --{other}: choose different files")


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)


def run_compare(options: CompareOptions) -> int:
    """Test which differences between two models are statistically significant."""
    files = [path / "results.jsonl" if path.is_dir() else path for path in options.results]
    comparison = compare(files, options.first, options.second)
    console = Console(highlight=False)
    if comparison.differences:
        console.print(comparison_table(comparison))
    else:
        print(f"{printable(comparison.first)} and {printable(comparison.second)}: nothing could be compared")
    for line in comparison.refused:
        console.print(f"not compared: {printable(line)}", markup=False)
    _print_notes(comparison.notes)
    return 0 if comparison.differences else 1

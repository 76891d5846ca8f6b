"""The command ``report``: the page of a run, or a page and tables of the results of many models."""

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from clipkit.errors import ConfigError
from clipkit.files import printable, write_page
from eval.datasets.card import Card, Published, card_names, load_card, load_suite, suite_names
from eval.options import ReportOptions
from eval.report.comparison_page import build_comparison
from eval.report.placement import Ranking, list_test_counts, rank_models
from eval.report.run_page import build_report
from eval.report.tables import Facts, as_csv, as_latex, as_markdown, read_scores
from eval.results.records import json_lines, parse_integer, read_results
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
    if len(options.source) == 1 and options.source[0].is_dir() and not tables and not options.beside:
        print(f"wrote {build_report(options.source[0], options.out)}")
        unread: list[str] = []
        deque(json_lines(options.source[0] / "results.jsonl", unread, ""), maxlen=0)
        print_notes(unread)
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
    facts = _find_facts(counts)
    if options.beside:
        ranking = rank_models(read_scores(files))
        if not ranking.placements:
            raise ConfigError(f"--beside published: no score can be compared with the {ranking.lead}")
        facts |= {"ranking": ranking, "published": {**facts["published"], **ranking.published}}
    log = sys.stderr if printed else sys.stdout  # a printed table may be piped into another program
    if options.out is not None or not tables:
        out = options.out or files[0].with_name("scores.html")  # report.html is the page of a run
        page = build_comparison(files, out, **facts)
        print(f"wrote {page}", file=log)
    writers: Mapping[str, Callable[..., str]] = {"csv": as_csv, "latex": as_latex, "markdown": as_markdown}
    for form, path in tables.items():
        text = writers[form](files, **facts)
        if form in printed:
            print(text, end="" if text.endswith("\n") else "\n")
        else:
            print(f"wrote {write_page(path, text)}", file=log)
    if options.beside:
        _print_ranking(facts["ranking"], log)
    print_notes(read_table(files).notes)
    return 0


def _print_ranking(ranking: Ranking, log: TextIO) -> None:
    print(printable(ranking.lead), file=log)
    for placement in ranking.placements:
        print(printable(f"{placement.model}: {placement.place}"), file=log)
        for row, rank, _ in placement.scores:
            print(f"  {row.dataset:32}{row.metric:24}{100 * row.value:6.1f}  rank {rank}", file=log)


def _find_facts(counts: Mapping[str, Collection[object]]) -> Facts:
    """Return what clipkit's cards and suites say about datasets.

    Args:
        counts: by dataset, the numbers of images in its scores, by which a folder with a card's name is told apart.
    """
    cards = []
    for name, dataset_counts in counts.items():
        if name in card_names():
            card = load_card(name)
            card_counts = list_test_counts(card)
            if not card_counts or card_counts & set(dataset_counts):
                cards.append(card)
    datasets = {card.name for card in cards}
    suites = {name: load_suite(name).cards for name in suite_names()}
    return Facts(
        published=list_published(cards),
        suites={name: members for name, members in suites.items() if len(datasets.intersection(members)) > 1},
        primary={card.name: card.metric for card in cards},
        paper={card.name: card.paper.zero_shot_minus_resnet50 for card in cards if card.paper is not None},
    )


def list_published(cards: Iterable[Card]) -> dict[str, Mapping[str, float] | Sequence[Published]]:
    """Return published scores by dataset and model: the first ones for the main task and primary metric.

    Of captions, all are returned, since scores with and without a prompt before captions are not comparable.
    """
    published: dict[str, Mapping[str, float] | Sequence[Published]] = {}
    for card in cards:
        scores = [scores for scores in card.published if scores.task in card.tasks[:1]]
        if card.caption_prompts or "retrieval" in card.tasks[:1]:
            published[card.name] = scores
        else:
            primary = [same.values for same in scores if same.metric == card.metric]
            published[card.name] = primary[0] if primary else {}
    return published


def _check_outputs(sources: Sequence[Path], outputs: Mapping[str, Path | None]) -> None:
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


def print_notes(notes: Sequence[str]) -> None:
    """Print notes on the results files that were read."""
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)

"""The commands of ``python -m eval`` that score models, and that build pages and tables of the results."""

import argparse
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import clipkit
from clipkit import CLIP, distributed
from clipkit.errors import ClipkitError, ConfigError, DataError, nearest
from clipkit.files.terminal import counted, printable
from clipkit.formats.checkpoint import resolve_checkpoint
from clipkit.formats.open_clip import newest_epoch
from data.remote.cache import cache_folder
from eval.compare import (
    Check,
    checks_of,
    expected_of,
    find_known,
    known_tasks,
    nothing_checked,
    print_checks,
)
from eval.datasets import Card, card_names, load_card, load_suite, suite_names
from eval.datasets.dataset import EvalDataset, Lacks
from eval.datasets.new import (
    card_lines,
    cards_in_no_suite,
    is_of_card,
    primary_metrics,
    published_scores,
    suites_of,
)
from eval.datasets.targets import Missing, Target, find_named, find_suites
from eval.features.encoder import Ranks
from eval.features.image_models import TIMM, load_image_model, no_text_tower
from eval.report.terminal import score_table
from eval.results.scores import check_appendable, read_results, weights_id
from eval.run import Scored, check_tasks, run_model
from eval.tasks import TASKS, options_of

__all__ = ["compare_models", "list_datasets", "report", "score", "verify"]


_TABLES = ("csv", "latex", "markdown")
_EXAMPLES = {"out": "scores.html", "csv": "scores.csv", "latex": "scores.tex", "markdown": "scores.md"}
_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_RUN_FILES = ("results.jsonl", "metrics.jsonl", "config.toml")  # what the page of a run is made of
_SHOWN = 200  # characters of a path in a message


def report(options: argparse.Namespace) -> int:
    tables = {form: getattr(options, form) for form in _TABLES if getattr(options, form) is not None}
    _check_places(options.source, {"out": options.out, **tables})
    if len(options.source) == 1 and options.source[0].is_dir() and not tables:
        from eval.report import build_report
        from eval.results.records import json_lines

        print(f"wrote {build_report(options.source[0], options.out)}")
        unread: list[str] = []
        deque(json_lines(options.source[0] / "results.jsonl", unread, ""), maxlen=0)
        _tell(unread)
        return 0
    from clipkit.files.pages import write_page
    from eval.report.comparison_page import build_comparison
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
    kept = [one for source in sources for one in (source, *(source / name for name in _RUN_FILES))]
    taken: dict[Path, str] = {}
    for option, path in places.items():
        if path is None or (str(path) == "-" and option in _TABLES):
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

    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)


def _facts(files: Sequence[Path]) -> dict[str, Any]:
    """What cards say of the datasets in the results."""
    from eval.results.records import whole

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


def compare_models(options: argparse.Namespace) -> int:
    from eval.compare import compare
    from eval.report.terminal import comparison_table

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


def list_datasets(options: argparse.Namespace) -> int:
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


def score(options: argparse.Namespace) -> int:
    """Score every model on every dataset; whatever ends it, the scores so far are printed."""
    with _all_ranks(options.device) as device:
        return _score(options, device)


@contextmanager
def _all_ranks(name: str) -> Iterator[str]:
    """Join the ranks that torchrun has started; gives the device of this rank."""
    started = distributed.start()
    try:
        yield _device(name, started)
    finally:
        distributed.stop()


def _score(options: argparse.Namespace, place: str) -> int:
    tasks = tuple(options.task)
    if not options.data and not options.suite:
        raise ConfigError("nothing to score on: name a dataset with --data or a suite with --suite")
    check_image_tasks(options.model, tasks)
    named, broken = find_named(options.data, root=options.data_root, prompts=options.prompts)
    if not named and not options.suite:
        _tell_trouble(broken[1:])
        raise broken[0]
    _tell_trouble(broken)
    if not options.suite:
        _check_something_fits(named, tasks)
    others, trouble = find_suites(options.suite, root=options.data_root, prompts=options.prompts)
    targets = _together(named, others, options.prompts)
    models = [_Model.of(name, options.out) for name in dict.fromkeys(options.model)]
    scored = Scored()
    for model in models:
        if len(models) > 1 and distributed.rank() == 0:
            print(f"\n{model.name}")
        before = len(scored.trouble)
        try:
            _score_model(model, targets, tasks, options, place, scored)
        except ClipkitError as error:  # of several models, one that does not load costs its own scores
            if len(models) == 1:
                raise
            scored.trouble.append(error)
        if len(models) > 1 and len(scored.trouble) > before and distributed.rank() == 0:
            print(f"{model.name} has not all of its scores:", file=sys.stderr)
        _tell_trouble(scored.trouble[before:])
    _tell_trouble(trouble)
    return _status([*broken, *trouble, *scored.trouble], scored)


def check_image_tasks(models: Sequence[str], tasks: Sequence[str]) -> None:
    """Make sure that models can do all tasks, as far as their names tell, before any model is loaded.

    Args:
        models: as the user names them.
        tasks: empty for the datasets' own.

    Raises:
        ConfigError: a model has no text tower, and a task needs one.
    """
    for model in models:
        if model.startswith(TIMM) and (not tasks or any(TASKS[task].needs_text for task in tasks)):
            raise no_text_tower(model)


def _check_something_fits(targets: Sequence[Target], tasks: Sequence[str]) -> None:
    """Fail before a model is loaded where nothing can be done; else what cannot is told later.

    Raises:
        DataError: why the first of them cannot.
        ConfigError: a task is unknown.
    """
    refused: list[ClipkitError] = []
    for target in targets:
        for task in tasks or target.dataset.tasks:
            try:
                check_tasks(target.dataset, [task])
            except DataError as error:
                refused.append(error)
            else:
                return
    if refused:
        raise refused[0]


def _together(named: Sequence[Target], others: Sequence[Target], prompts: str) -> list[Target]:
    """Datasets that are named and those of suites, each once.

    Raises:
        DataError: two would have one name.
        ConfigError: none of them has the prompt set that is asked for.
    """
    targets = {target.dataset.name: target for target in named}
    for target in others:
        there = targets.setdefault(target.dataset.name, target)
        if there.card is not target.card:
            raise DataError(
                f"two datasets would both be named {target.dataset.name}, yours and the suite's: rename the folder"
            )
    datasets = [one.dataset for one in targets.values()]
    given = {name for one in datasets for name in (one.prompt_set, one.caption_prompt_set)}
    if prompts and targets and prompts not in given:
        cards = [one.card for one in targets.values() if one.card]
        known = sorted({name for card in cards for name in (*card.prompt_sets, *card.caption_prompts)})
        how = "a card states prompts as [prompts.NAME], those of captions in [caption_prompts]"
        hint = nearest(prompts, known) if known else how
        raise ConfigError(f"--prompts {prompts}: none of the datasets has it ({hint})")
    return list(targets.values())


def verify(options: argparse.Namespace) -> int:
    """Measure the scores that cards expect of a model, and compare."""
    with _all_ranks(options.device) as device:
        return _verify(options, device)


def _verify(options: argparse.Namespace, place: str) -> int:
    if len(options.model) > 1:
        raise ConfigError("verify checks one --model at a time")
    model = _Model.of(options.model[0], options.out)
    known_as = options.known_as or model.name
    check_image_tasks([model.source], known_tasks(options.data, known_as))
    known = find_known(options.data, known_as, root=options.data_root)
    scored, checks = Scored(), list[Check]()
    for target in known.targets:
        tasks = tuple(dict.fromkeys(one.task for one in expected_of(target, known_as)))
        before = len(scored.scores)
        _score_model(model, [target], tasks, options, place, scored)
        checks += checks_of(target, known_as, scored.scores[before:])
    _tell_trouble(everything := [*known.trouble, *scored.trouble])
    status = _status(everything, scored)
    if distributed.rank() == 0 and not checks:
        print(nothing_checked(known, known_as), file=sys.stderr)
    return max(status, print_checks(checks) if checks and distributed.rank() == 0 else 0)


@dataclass(frozen=True, kw_only=True)
class _Model:
    """A model as the user names it, the one checkpoint that is meant, and where its scores go."""

    name: str
    source: str
    out: Path

    @classmethod
    def of(cls, name: str, out: Path | None) -> "_Model":
        source, run = _checkpoint(name)
        return cls(name=name, source=source, out=out or (run or Path()) / "results.jsonl")


def _score_model(
    wanted: _Model,
    targets: Sequence[Target],
    tasks: Sequence[str],
    options: argparse.Namespace,
    device: str,
    scored: Scored,
) -> None:
    model = _load(wanted.source, options.name, device)
    model.preprocess = model.preprocess.with_decoding(background=options.background, upright=options.upright)
    check_appendable(wanted.out)  # while nothing is lost yet
    weights, step = weights_id(wanted.source)
    ranks = Ranks(rank=distributed.rank(), world=distributed.world_size(), gather=distributed.sum_over_ranks)
    own = Scored(trouble=scored.trouble)
    try:
        with _progress(ranks) as progress, _autocast(device, options.precision):

            def started(dataset: EvalDataset) -> Callable[[int], None]:
                bar = progress.add_task(dataset.name, total=len(dataset))
                return lambda pictures: progress.advance(bar, pictures * ranks.world)

            run_model(
                model,
                targets,
                out=wanted.out,
                tasks=tasks,
                options=options_of(options),
                skip_existing=options.skip_existing,
                store=_store(options.features),
                ranks=ranks,
                batch_size=options.batch_size,
                origin={"model": wanted.name, "weights": weights},
                step=step,
                started=started,
                scored=own,
            )
    finally:
        scored.scores += own.scores
        scored.found += own.found
        if own.scores and ranks.rank == 0:
            Console(highlight=False).print(score_table(own.scores))
    if ranks.rank == 0:
        for (name, split), counts in own.counts.items():
            for line in counts.lines(
                model.preprocess.decoding,
                background="--background white" if options.background is None else "",
                upright="--upright" if options.upright is None else "",
            ).values():
                print(printable(f"dataset {name}, split {split}: {line}"), file=sys.stderr)
        there = f", {own.found} were there already" if options.skip_existing else ""
        print(f"wrote {counted(len(own.scores), 'line')} to {wanted.out.absolute()}{there}")


def _load(source: str, name: str, device: str) -> CLIP:
    if source.startswith(TIMM):
        return load_image_model(source, device=device)
    return clipkit.load(source, name=name, device=device)


def _tell_trouble(trouble: Sequence[ClipkitError]) -> None:
    """Every dataset, or task on one, without scores, a line each; what several tasks lack is one."""
    if distributed.rank() == 0:
        lines = (f"{'not here' if isinstance(one, Missing) else 'not scored'}: {one}" for one in trouble)
        for line in dict.fromkeys(lines):
            print(printable(line), file=sys.stderr)


def _status(trouble: Sequence[ClipkitError], scored: Scored) -> int:
    """The exit status: 1 where something was broken, or there is no score at all."""
    broken = any(not isinstance(one, Missing | Lacks) for one in trouble)
    return 1 if broken or not (scored.scores or scored.found) else 0


def _store(features: str | None) -> Path | None:
    if features is None:
        return cache_folder() / "features"
    return Path(features).expanduser() if features else None


def _autocast(device: str, precision: str) -> AbstractContextManager[Any]:
    dtype = _PRECISIONS[precision]
    return nullcontext() if dtype is None else torch.autocast(torch.device(device).type, dtype)


def _checkpoint(source: str) -> tuple[str, Path | None]:
    """Settle on one checkpoint of a run, which may be writing another meanwhile; and that run's folder.

    A run is clipkit's or open_clip's.
    """
    try:
        path = Path(source).expanduser()
        if path.is_dir() and (path.name == "checkpoints" or (path / "checkpoints").is_dir()):
            path = newest_epoch(path) or resolve_checkpoint(path)
            source = str(path)
    except RuntimeError as error:
        raise ConfigError(f"no model at {source[:200]!r}: there is no such user") from error
    except OSError as error:
        raise ConfigError(f"no model at {source[:200]!r}: {error.strerror}") from error
    folder = path.absolute().parent
    return source, path.parent.parent if folder.name == "checkpoints" else None


def _device(name: str, started: torch.device) -> str:
    if name == "auto":
        return str(started)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is not a device: give auto, cpu or cuda") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return name


def _progress(ranks: Ranks) -> Progress:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    hidden = not sys.stderr.isatty() or ranks.rank > 0
    return Progress(*columns, console=console, transient=True, disable=hidden)

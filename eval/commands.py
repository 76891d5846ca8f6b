"""The commands of ``python -m eval``: score models, and build pages and tables of the results."""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import clipkit
from clipkit import CLIP, distributed
from clipkit.errors import ClipkitError, ConfigError, DataError, Unavailable, nearest
from clipkit.files import counted, output_folder, printable
from clipkit.formats import check_free, newest_epoch, resolve_checkpoint, save_model
from clipkit.model import keep_memory
from clipkit.samples.remote import cache_folder
from eval.compare import (
    Check,
    check_scores,
    explain_no_checks,
    list_expected,
    list_expected_tasks,
    open_expected,
    print_checks,
)
from eval.datasets import Card, card_names, load_card, load_suite, suite_names
from eval.datasets.catalog import (
    cards_in_no_suite,
    describe_card,
    matches_card,
    paper_differences,
    primary_metrics,
    published_scores,
    select_suites,
)
from eval.datasets.dataset import EvalDataset
from eval.datasets.targets import Target, open_available, open_suites, select_languages
from eval.features.encoder import Ranks
from eval.features.image_models import TIMM, load_image_model, text_tower_error
from eval.options import (
    CompareOptions,
    ListOptions,
    ReportOptions,
    ScoreOptions,
    ScoringOptions,
    SoupOptions,
    VerifyOptions,
)
from eval.readers import Members
from eval.report.terminal import score_table
from eval.results.scores import check_appendable, read_results, weights_id
from eval.run import Scored, check_tasks, run_model
from eval.soup import greedy_soup, select_held_out
from eval.tasks import TASKS

_OUTPUTS = {
    "out": "scores.html",
    "csv": "scores.csv",
    "latex": "scores.tex",
    "markdown": "scores.md",
}  # examples
_SHOWN = 200  # characters of a path in a message


def report(options: ReportOptions) -> int:
    """Build the page of a run, or a page and tables of the results of several models."""
    tables = {
        form: path for form in _OUTPUTS if form != "out" and (path := getattr(options, form)) is not None
    }
    _check_outputs(options.source, {"out": options.out, **tables})
    if len(options.source) == 1 and options.source[0].is_dir() and not tables:
        from eval.report import build_report
        from eval.results.records import json_lines

        print(f"wrote {build_report(options.source[0], options.out)}")
        unread: list[str] = []
        deque(json_lines(options.source[0] / "results.jsonl", unread, ""), maxlen=0)
        _print_notes(unread)
        return 0
    from clipkit.files import write_page
    from eval.report.comparison_page import build_comparison
    from eval.report.tables import Facts, as_csv, as_latex, as_markdown
    from eval.results.records import parse_integer
    from eval.results.table import read_table

    printed = [form for form, path in tables.items() if str(path) == "-"]
    if len(printed) > 1:
        raise ConfigError(
            f"--{printed[0]} - and --{printed[1]} - both write to standard output: choose a file for one of them"
        )
    files = [source / "results.jsonl" if source.is_dir() else source for source in options.source]
    if missing := [file for file in files if not file.is_file()]:
        raise ConfigError(
            f"no results at {str(missing[0])[:_SHOWN]}: expected a results.jsonl file or a run folder"
        )
    counts: dict[str, set[object]] = {}
    for line in (line for file in files for line in read_results(file)):
        counts.setdefault(str(line["dataset"]), set()).add(parse_integer(line.get("n")))
    datasets = [name for name, own in counts.items() if matches_card(name, own)]
    published, suites, primary = (
        published_scores(datasets),
        select_suites(datasets),
        primary_metrics(datasets),
    )
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
    run_files = ("results.jsonl", "metrics.jsonl", "config.toml")
    kept = [one for source in sources for one in (source, *(source / name for name in run_files))]
    taken: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is None or (str(path) == "-" and option != "out"):
            continue
        named = f"--{option} {str(path)[:_SHOWN]}"
        if str(path) in ("-", "."):  # the latter is an empty argument
            raise ConfigError(f"{named}: expected the name of a file to write, such as {_OUTPUTS[option]}")
        same = False
        with suppress(OSError, ValueError):  # a path that does not exist, or is invalid
            same = path.is_file() and any(one.exists() and path.samefile(one) for one in kept)
        if path.suffix == ".jsonl" or same:
            raise ConfigError(
                f"{named} is a results file or belongs to a run: choose another name, such as {_OUTPUTS[option]}"
            )
        if (other := taken.setdefault(path.absolute(), option)) != option:
            raise ConfigError(f"{named} would overwrite the output of --{other}: choose different files")


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)


def compare_models(options: CompareOptions) -> int:
    """Test which differences between two models are statistically significant."""
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
    _print_notes(found.notes)
    return 0 if found.differences else 1


def list_datasets(options: ListOptions) -> int:
    """List suites and their datasets, or print a dataset's card."""
    console = Console(highlight=False)
    if options.suite in card_names():
        for line in describe_card(options.suite):
            console.print(line, markup=False, soft_wrap=True)
        return 0
    if options.suite is not None and options.suite not in suite_names():
        known = [*suite_names(), *card_names()]
        raise ConfigError(f"unknown suite or dataset {options.suite!r}: {nearest(options.suite, known)}")
    for name in suite_names() if options.suite is None else (options.suite,):
        suite = load_suite(name)
        rows = [(card, suite.metrics_for(card)[0]) for card in map(load_card, suite.cards)]
        console.print(_cards_table(f"{name}: {suite.title}", rows))
    if options.suite is None:
        rows = [(card, card.metric) for card in map(load_card, cards_in_no_suite())]
        console.print(_cards_table("in no suite", rows))
    return 0


def _cards_table(title: str, rows: Sequence[tuple[Card, str]]) -> Table:
    """Tabulate datasets with their main task and a metric; names are never wrapped, so that they can be copied."""
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


def score(options: ScoreOptions) -> int:
    """Score every model on every dataset, and print the scores even if the run ends early."""
    with _ranks(options.device) as device:
        tasks = options.task
        if not options.data and not options.suite:
            raise ConfigError("no dataset given: use --data or --suite")
        _check_towers(options.model, tasks)
        members = Members(image=options.image, captions=options.captions)
        named, broken = open_available(
            options.data, root=options.data_root, prompts=options.prompts, members=members
        )
        if not named and not options.suite:
            _print_trouble(broken[1:])
            raise broken[0]
        _print_trouble(broken)
        if not options.suite:
            _check_something_fits(named, tasks)
        others, trouble = open_suites(options.suite, root=options.data_root, prompts=options.prompts)
        targets = []
        for target in _merged(named, others, options.prompts):
            try:
                targets.append(select_languages(target, options.language))
            except DataError as error:
                trouble.append(error)
        if trouble and not targets and named:
            raise trouble[0]
        models = [_Model.of(name, options.out) for name in dict.fromkeys(options.model)]
        scored = Scored()
        for model in models:
            if len(models) > 1 and distributed.rank() == 0:
                print(f"\n{model.name}")
            before = len(scored.trouble)
            try:
                _score_model(model, targets, tasks, options, device, scored)
            except ClipkitError as error:  # continue with the other models
                if len(models) == 1:
                    raise
                scored.trouble.append(error)
            if len(models) > 1 and len(scored.trouble) > before and distributed.rank() == 0:
                print(f"some scores of {model.name} are missing:", file=sys.stderr)
            _print_trouble(scored.trouble[before:])
        _print_trouble(trouble)
        return _status([*broken, *trouble, *scored.trouble], scored)


def verify(options: VerifyOptions) -> int:
    """Measure the scores for which cards list expected values, and compare."""
    with _ranks(options.device) as device:
        if len(options.model) > 1:
            raise ConfigError("verify checks one --model at a time")
        model = _Model.of(options.model[0], options.out)
        known_as = options.known_as or model.name
        _check_towers([model.source], list_expected_tasks(options.data, known_as))
        known = open_expected(options.data, known_as, root=options.data_root)
        scored, checks = Scored(), list[Check]()
        for target in known.targets:
            tasks = tuple(dict.fromkeys(one.task for one in list_expected(target, known_as)))
            before = len(scored.scores)
            _score_model(model, [target], tasks, options, device, scored)
            checks += check_scores(target, known_as, scored.scores[before:])
        trouble = [*known.trouble, *scored.trouble]
        _print_trouble(trouble)
        status = _status(trouble, scored)
        if distributed.rank() == 0 and not checks:
            print(explain_no_checks(known, known_as), file=sys.stderr)
        return max(status, print_checks(checks) if checks and distributed.rank() == 0 else 0)


def soup(options: SoupOptions) -> int:
    """Write the greedy soup of models."""
    with _ranks(options.device) as device:
        out, leads = output_folder(options.out), distributed.rank() == 0
        if leads:
            check_free(out)
        targets, broken = open_available(options.data, root=options.data_root, prompts=options.prompts)
        if broken:
            raise broken[0]
        targets = [select_held_out(target, options.split) for target in targets]
        sources = [_Model.of(source, None).source for source in options.model]
        ours = Ranks(
            rank=distributed.rank(), world=distributed.world_size(), gather=distributed.sum_over_ranks
        )
        made = greedy_soup(
            sources,
            targets,
            name=options.name,
            device=device,
            ranks=ours,
            batch_size=options.batch_size,
            say=print if leads else lambda line: None,
        )
        if leads:
            data = [f"{one.dataset.name}, split {one.dataset.split}" for one in targets]
            facts = {"mean": made.selected, "score": made.score, "scores": made.scores, "data": data}
            save_model(made.model, out, made_from=facts)
            print(
                f"wrote {out}: the mean of {len(made.selected)} of {len(sources)} models, {made.score:.4f} on "
                f"{' and '.join(data)}; the best model alone {max(made.scores.values()):.4f}"
            )
        return 0


@contextmanager
def _ranks(name: str) -> Iterator[str]:
    """Join the ranks that torchrun started, and yield this rank's device."""
    started = distributed.start()
    try:
        if name != "auto":
            try:
                device = torch.device(name)
            except RuntimeError as error:
                raise ConfigError(
                    f"unknown --device {name!r}: expected auto, cpu, cuda, mps or xpu"
                ) from error
            if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
                raise ConfigError(
                    f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices"
                )
        yield str(started) if name == "auto" else name
    finally:
        distributed.stop()


def _check_towers(models: Sequence[str], tasks: Sequence[str]) -> None:
    """Raise ConfigError if a task needs a text tower and a model's name shows that it has none.

    Without ``tasks`` the datasets' own tasks run, which need texts.
    """
    for model in models:
        if model.startswith(TIMM) and (not tasks or any(TASKS[task].needs_text for task in tasks)):
            raise text_tower_error(model)


def _check_something_fits(targets: Sequence[Target], tasks: Sequence[str]) -> None:
    """Raise the first error, before a model is loaded, if no task fits any dataset."""
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


def _merged(named: Sequence[Target], others: Sequence[Target], prompts: str) -> list[Target]:
    """Merge named datasets and those of suites.

    Raises:
        DataError: two would have the same name.
        ConfigError: none of them has the requested prompt set.
    """
    targets = {target.dataset.name: target for target in named}
    for target in others:
        known = targets.setdefault(target.dataset.name, target)
        if known.card is not target.card:
            raise DataError(
                f"two datasets would both be named {target.dataset.name} (yours and the suite's): rename the folder"
            )
    datasets = [one.dataset for one in targets.values()]
    given = {name for one in datasets for name in (one.prompt_set, one.caption_prompt_set)}
    if prompts and targets and prompts not in given:
        cards = [one.card for one in targets.values() if one.card]
        known_sets = sorted({name for card in cards for name in (*card.prompt_sets, *card.caption_prompts)})
        how = "cards define prompt sets in [prompts.NAME], and for captions in [caption_prompts]"
        hint = nearest(prompts, known_sets) if known_sets else how
        raise ConfigError(f"--prompts {prompts}: no dataset has this prompt set ({hint})")
    return list(targets.values())


@dataclass(frozen=True, kw_only=True)
class _Model:
    """A model as the user names it, its checkpoint, and the results file."""

    name: str
    source: str
    out: Path

    @classmethod
    def of(cls, name: str, out: Path | None) -> "_Model":
        """Resolve a run of clipkit or open_clip to one checkpoint; training may write another meanwhile."""
        source = name
        try:
            path = Path(source).expanduser()
            if path.is_dir() and (path.name == "checkpoints" or (path / "checkpoints").is_dir()):
                path = newest_epoch(path) or resolve_checkpoint(path)
                source = str(path)
        except RuntimeError as error:
            raise ConfigError(f"no model at {source[:_SHOWN]!r}: there is no such user") from error
        except OSError as error:
            raise ConfigError(f"no model at {source[:_SHOWN]!r}: {error.strerror}") from error
        in_run = path.absolute().parent.name == "checkpoints"
        folder = path.parent.parent if in_run else Path()
        return cls(name=name, source=source, out=out or folder / "results.jsonl")


def _score_model(
    wanted: _Model,
    targets: Sequence[Target],
    tasks: Sequence[str],
    options: ScoringOptions,
    device: str,
    scored: Scored,
) -> None:
    keep_memory()
    if wanted.source.startswith(TIMM):
        if options.dims:
            raise ConfigError(f"--dim requires a CLIP, not {wanted.source}")
        model: CLIP = load_image_model(wanted.source, device=device)
    else:
        model = clipkit.load(wanted.source, name=options.name, device=device)
    if max(options.dims, default=0) >= model.dim:
        raise ConfigError(
            f"--dim {options.dims[-1]}: expected numbers below {model.dim}, the whole embedding"
        )
    model.preprocess = model.preprocess.with_decoding(
        background=options.background, upright=options.upright, pixel_range=options.pixel_range
    )
    check_appendable(wanted.out)  # before anything is computed
    weights, step = weights_id(wanted.source)
    ranks = Ranks(rank=distributed.rank(), world=distributed.world_size(), gather=distributed.sum_over_ranks)
    if options.features is None:
        store: Path | None = cache_folder() / "features"
    else:
        store = Path(options.features).expanduser() if options.features else None
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty() or ranks.rank > 0,
    )

    def started(dataset: EvalDataset) -> Callable[[int], None]:
        bar = progress.add_task(dataset.name, total=len(dataset))
        return lambda images: progress.advance(bar, images * ranks.world)

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[options.precision]
    low = dtype is not torch.float32
    own = Scored(trouble=scored.trouble)
    try:
        with progress, torch.autocast(torch.device(device).type, dtype) if low else nullcontext():
            run_model(
                model,
                targets,
                out=wanted.out,
                tasks=tasks,
                options=options,
                skip_existing=options.skip_existing,
                store=store,
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
    if ranks.rank > 0:
        return
    for (name, split), counts in own.counts.items():
        for line in counts.lines(
            model.preprocess.decoding,
            background="--background white" if options.background is None else "",
            upright="--upright" if options.upright is None else "",
        ).values():
            print(printable(f"dataset {name}, split {split}: {line}"), file=sys.stderr)
    skipped = f", skipped {own.found} existing" if options.skip_existing else ""
    print(f"wrote {counted(len(own.scores), 'line')} to {wanted.out.absolute()}{skipped}")


def _print_trouble(trouble: Sequence[ClipkitError]) -> None:
    """Print each distinct reason why a dataset or task has no scores."""
    if distributed.rank() == 0:
        lines = []
        for error in trouble:
            is_missing = isinstance(error, Unavailable) and error.cause == "missing"
            lines.append(f"{'not found' if is_missing else 'not scored'}: {error}")
        for line in dict.fromkeys(lines):
            print(printable(line), file=sys.stderr)


def _status(trouble: Sequence[ClipkitError], scored: Scored) -> int:
    """Return the exit status: 1 if something was damaged, or there is no score at all."""
    broken = not all(isinstance(error, Unavailable) for error in trouble)
    return 1 if broken or not (scored.scores or scored.found) else 0

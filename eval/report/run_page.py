"""Build ``report.html``, the self-contained page of a training run; the same folder gives the same bytes."""

import math
import shlex
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median_high
from typing import Any

import torch

from clipkit.config import Config, load_config
from clipkit.errors import ConfigError, DataError
from clipkit.expected import CURVES, describe_nearest_curve, expected_score, find_curves, format_samples
from clipkit.files import redact_secrets, write_page
from clipkit.formats import best_checkpoint, parse_step
from clipkit.samples.remote import cache_folder
from data.corpora.builtin import BUILTIN
from eval.datasets.dataset import TEST
from eval.metrics import metric_title
from eval.report.charts import (
    TEMPLATES,
    TONES,
    ChartLine,
    Headline,
    Point,
    Thumbnails,
    choose_log_ticks,
    downsample_points,
    format_field,
    format_number,
    format_value,
    smooth_points,
)
from eval.report.tables import TableRow, build_row, format_setting, join_words
from eval.results.records import (
    PREFIX,
    Snapshot,
    Verdict,
    find_snapshots,
    json_lines,
    parse_finite,
    parse_integer,
    read_snapshot,
    read_verdict,
)
from eval.results.table import Record, Series, group_by, read_records

# --------------------------------------------------------------------------------------------------------------
# What the page shows of a run folder: config, metrics, scores, snapshots and bad samples.

_METRICS = (
    "loss", "chance", "floor", "scale", "lr", "samples_per_second", "data_time", "batch_time", "image_to_text_R@1",
    "text_to_image_R@1", "mfu", "seconds", "samples", "samples_trained", "epoch", "grad_norm", "learnability_read",
    "learnability_trained",
)  # fmt: skip
_TERM = "loss_"  # prefix of the metrics of local terms, such as loss_caption
_LOSS_TIME = "loss_time"  # seconds of a step that the loss takes
_SNAPSHOTS = 5  # per dataset
_BAD_SAMPLES = 5
_RANKS = 8  # the slowest ones
_MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Result(Record):
    """A score at a step of a training."""

    step: int


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The contents of a run folder that the page shows.

    Attributes:
        name: the folder's name.
        config_text: the text of ``config.toml``, or "".
        config: parsed, {} if that fails.
        steps: number of steps in the config.
        scored_on: the datasets of ``eval.data`` in the config.
        first_score: the step of the first scores according to the config, or 0.
        metrics: by name, the finite (step, value) points of a curve in order of steps.
        results: scores in order of steps.
        snapshots: at most five per dataset, evenly spaced, with the first and the last.
        bad_samples: number of samples that could not be used.
        first_bad: shard, key and cause of the first few.
        best: dataset and step of the checkpoint with the best score, see ``checkpoint.best``; None without one.
        verdict: the comparison with the start weights, if there is one.
        ranks: milliseconds per step of the slowest ranks at the end, by the name of the rank and of the phase.
        notes: notes on missing or broken files.
    """

    name: str
    config_text: str
    config: Mapping[str, Any]
    steps: int | None
    scored_on: Sequence[str]
    first_score: int
    metrics: Mapping[str, Sequence[tuple[int, float]]]
    results: Sequence[Result]
    snapshots: Mapping[str, Sequence[Snapshot]]
    bad_samples: int
    first_bad: Sequence[tuple[str, str, str]]
    best: tuple[str, int] | None
    verdict: Verdict | None
    ranks: Mapping[str, Mapping[str, float]]
    notes: Sequence[str]

    def curve(self, metric: str) -> Sequence[tuple[float, float]]:
        return self.metrics.get(metric, ())

    @property
    def architecture(self) -> str:
        """Name of the architecture that was scored last; "" without scores. ``model.name`` may be empty."""
        return str(self.results[-1].line.get("architecture") or "") if self.results else ""

    @property
    def terms(self) -> dict[str, Sequence[tuple[float, float]]]:
        """The local terms of the loss."""
        return {
            name.removeprefix(_TERM).replace("_", " ").capitalize(): points
            for name, points in self.metrics.items()
            if name.startswith(_TERM)
        }

    def last(self, metric: str) -> float | None:
        """The last value of a curve."""
        points = self.curve(metric)
        return points[-1][1] if points else None

    @property
    def step(self) -> int | None:
        """The last step with any record."""
        steps = [points[-1][0] for points in self.metrics.values()]
        steps += [result.step for result in self.results]
        return max(steps, default=None)


def read_run_folder(run: Path) -> RunFolder:
    """Read a run folder; any file may be missing, and the last line of any may be cut short."""
    try:
        if not run.is_dir():
            raise DataError(f"no run folder at {run}")
        return _read_files(run)
    except OSError as error:
        raise DataError(f"cannot read the run folder {str(run)[:200]}: {error.strerror}") from error


def _read_files(run: Path) -> RunFolder:
    notes: list[str] = []
    config_text, config = _read_config(run / "config.toml", notes)
    metrics, ranks = _read_metrics(run / "metrics.jsonl", notes)
    section = config.get("eval")
    if not isinstance(section, Mapping):
        section = {}
    datasets = section.get("data")
    if not isinstance(datasets, list):
        datasets = []
    steps = parse_integer(config.get("steps"))
    due_steps = [due for due in (parse_integer(section.get("every_steps")), steps) if due and due > 0]
    first_score = min(due_steps, default=0)
    # scores are missed only if the config asks for them, and by the last step
    step = max((points[-1][0] for points in metrics.values()), default=None)
    due = not config or (bool(datasets) and (step is None or step >= first_score))
    results = _read_results(run / "results.jsonl", notes, "there are no scores to show" if due else "")
    snapshots = _read_snapshots(run, notes)
    if not snapshots and due:
        notes.append("There are no snapshots, so predictions and images are not shown.")
    if not (config_text or metrics or results or snapshots):
        raise DataError(f"{run} is not a run folder: it has no config.toml, metrics, results or snapshots")
    bad_samples, first_bad = _read_bad_samples(run, notes)
    verdict = None
    try:
        verdict = read_verdict(run)
    except DataError as error:
        notes.append(f"The verdict is not shown: {error}.")
    return RunFolder(
        name=run.resolve().name,
        config_text=config_text,
        config=config,
        steps=steps,
        scored_on=list(map(str, datasets)),
        first_score=first_score,
        metrics=metrics,
        results=results,
        snapshots=snapshots,
        bad_samples=bad_samples,
        first_bad=first_bad,
        best=_find_best(run, config, results),
        verdict=verdict,
        ranks=ranks,
        notes=notes,
    )


def _find_best(run: Path, config: Mapping[str, Any], results: Sequence[Result]) -> tuple[str, int] | None:
    section = config.get("checkpoint")
    best = best_checkpoint(run)
    if best is None or not results or not isinstance(section, Mapping):
        return None
    dataset = str(section.get("best")).rpartition("/")[0]
    return dataset or results[0].dataset, parse_step(best.name)


def _read_config(path: Path, notes: list[str]) -> tuple[str, dict[str, Any]]:
    if not path.is_file():
        notes.append("config.toml is missing, so the settings of this run are not shown.")
        return "", {}
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        notes.append("config.toml is too large to be a config, and is not shown.")
        return "", {}
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return text, tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for numbers of thousands of digits
        notes.append(f"config.toml is not valid TOML ({error}); it is shown as plain text.")
        return text, {}


def _read_metrics(
    path: Path, notes: list[str]
) -> tuple[dict[str, list[tuple[int, float]]], dict[str, dict[str, float]]]:
    """Return the points of each curve, and the last times of the slowest ranks."""
    columns: dict[str, dict[int, float]] = {name: {} for name in _METRICS}
    not_finite: set[str] = set()
    ranks: dict[str, dict[str, float]] = {}
    for line in json_lines(path, notes, "the curves of the training are not shown"):
        step = parse_integer(line.get("step"))
        if step is None:
            continue
        ranks = _find_slowest_ranks(line.get("ranks")) or ranks
        for name, value in line.items():
            if name not in columns:
                if not name.startswith(_TERM) or name == _LOSS_TIME:
                    continue
                columns[name] = {}
            finite = parse_finite(value)
            # a resumed training repeats steps: the last value counts
            if finite is not None:
                columns[name][step] = finite
            elif isinstance(value, float):
                not_finite.add(name)
    if not_finite:
        names = ", ".join(sorted(not_finite))
        notes.append(f"Some values of {names} are not finite numbers and are left out.")
    return {name: sorted(column.items()) for name, column in columns.items() if column}, ranks


def _find_slowest_ranks(record: object) -> dict[str, dict[str, float]]:
    """Return what a line of metrics.jsonl says about ranks, slowest first; {} if it says nothing usable."""
    if not isinstance(record, Mapping):
        return {}
    names = record.get("names")
    if not isinstance(names, list):
        return {}
    phases: dict[str, list[float]] = {}
    for phase, values in record.items():
        if isinstance(values, list) and phase != "names" and len(values) == len(names):
            phases[str(phase)] = [parse_finite(value) or 0.0 for value in values]
    waiting = phases.get("waiting", [0.0] * len(names))
    order = sorted(range(len(names)), key=waiting.__getitem__)
    return {str(names[i]): {phase: values[i] for phase, values in phases.items()} for i in order[:_RANKS]}


def _read_results(path: Path, notes: list[str], consequence: str) -> list[Result]:
    scores: dict[tuple[int, tuple[str, ...]], Result] = {}
    for record in read_records(path, notes, consequence):
        if record.step is not None:
            result = Result(**vars(record))
            before = scores.get((result.step, result.what))
            # the training's own score counts
            if before is None or result.scored_in_training or not before.scored_in_training:
                scores[result.step, result.what] = result
    # stable: within a step, as written
    return sorted(scores.values(), key=lambda result: result.step)


def _read_snapshots(run: Path, notes: list[str]) -> dict[str, list[Snapshot]]:
    snapshots: dict[str, list[Snapshot]] = {}
    for path_of_step in find_snapshots(run).values():
        paths = list(path_of_step.values())
        if len(paths) > _SNAPSHOTS:
            paths = [paths[round(i * (len(paths) - 1) / (_SNAPSHOTS - 1))] for i in range(_SNAPSHOTS)]
        for path in paths:
            try:
                snapshot = read_snapshot(path)
            except DataError:
                notes.append(f"snapshots/{path.name} cannot be read and is left out.")
            else:
                snapshots.setdefault(snapshot.dataset, []).append(snapshot)
    return snapshots


def _read_bad_samples(run: Path, notes: list[str]) -> tuple[int, list[tuple[str, str, str]]]:
    """Return their number, and shard, key and cause of the first few."""
    count = 0
    first: list[tuple[str, str, str]] = []
    for path in sorted(run.glob("bad_samples*.jsonl")):
        for line in json_lines(path, notes, ""):
            count += 1
            if len(first) < _BAD_SAMPLES:
                cause = line.get("cause", line.get("error", line.get("reason", "")))
                first.append((str(line.get("shard", "")), str(line.get("key", "")), str(cause)))
    if count:
        notes.append(
            f"{count:,} samples could not be used and were replaced; the causes are at the end of the page."
        )
    return count, first


# --------------------------------------------------------------------------------------------------------------
# The page.

_IN_BATCH = {"image_to_text_R@1": "image → text", "text_to_image_R@1": "text → image"}
_MEAN = "mean_R@1"  # of both directions of retrieval
_BESIDE = {  # metrics drawn together
    "acc1": ("acc5",),
    _MEAN: tuple(_IN_BATCH),
    "image_to_text_R@1": ("text_to_image_R@1",),
}
_SCORE_FIELDS = ("step", "dataset", "task", "metric", "value", "n", "low", "high", "chance", "dim")
_IMAGENET = ("imagenet1k", "zero-shot", "acc1")  # dataset, task and metric of public learning curves
_CAP = 100.0  # the published bound of exp(t)
_HEADLINES = 4
_CHARTS = 16  # of scores; the table has all of them
_SMOOTHED = 50  # about how many independent values a smoothed curve keeps
_MANY = 2 * _SMOOTHED  # shorter curves are drawn as they are
_LEAST_RANGE = 0.2  # of cosines over the color scale, so that the noise of an untrained model stays pale


def build_report(run: Path, out: Path | None = None) -> Path:
    """Write the page of a run folder and return its path.

    Args:
        run: the run folder. Any of its files may be missing or cut short; the page says which.
        out: the file to write, atomically; by default ``report.html`` in the run folder.
    """
    folder = read_run_folder(run)
    config = _load_run_config(run)
    last = [snapshots[-1] for snapshots in folder.snapshots.values()]
    queries = [query for snapshot in last for query in snapshot.queries]
    page = TEMPLATES.get_template("run.html").render(
        title=folder.name,
        run=folder,
        notes=folder.notes,
        headlines=select_headlines(folder.results, folder.step),
        lines=_draw_training(folder),
        terms={
            name: _smooth_line("loss", points, format_number(points[-1][1]))
            for name, points in folder.terms.items()
        },
        utilization=_draw_utilization(folder.curve("mfu")),
        score_charts=_chart_scores(folder),
        thumbnails=Thumbnails(),
        has_heatmaps=any(example.heat for snapshot in last for example in snapshot.examples),
        has_classes=any(hit.right is not None for query in queries for hit in query.hits),
        similarities=_compare_similarities,
        newest=select_newest(folder.results, folder.best),
        row=_build_row,
        series_name=partial(_name_series, all_series={result.series for result in folder.results}),
        provenance=_list_provenance(_select_headlined(folder.results)),
        config=redact_secrets(folder.config_text).strip(),
        search=_search_commands(run, folder.scored_on),
        expected=expected_score(config) if config else "",
        nearest_curve=describe_nearest_curve(config) if config else "",
        public_curves=_draw_public_curves(config, folder.results) if config else {},
    )
    return write_page(run / "report.html" if out is None else out, page)


def _load_run_config(run: Path) -> Config | None:
    try:
        return load_config(run / "config.toml")
    except ConfigError:  # missing, or of another version
        return None


def _draw_public_curves(config: Config, results: Sequence[Result]) -> dict[str, Any]:
    """Return the arguments of the chart of this run among public runs of its architecture; {} without such runs."""
    lines = []
    for i, curve in enumerate(find_curves(config)):
        points = [(math.log10(seen), score) for seen, score in zip(curve.samples, curve.scores, strict=True)]
        tone, dashed = i % (TONES - 1) + 2, i >= TONES - 1
        lines.append(ChartLine(name=curve.name, points=points, tone=tone, dashed=dashed, thin=True))
    if not lines:
        return {}
    measured = [
        result
        for result in results
        if (result.dataset, result.task, result.metric, result.setting, result.split)
        == (*_IMAGENET, "", TEST)
        and result.step
    ]
    # other prompts or images are other scores: those of the first one are drawn
    scores = {
        result.step: 100 * result.value
        for result in measured
        if (result.prompt_set, result.n) == (measured[0].prompt_set, measured[0].n)
    }
    points = [(math.log10(step * config.batch_size), score) for step, score in scores.items()]
    lines.append(ChartLine(name="this run", points=points, dots=True))
    xs = [x for line in lines for x, _ in line.points]
    seen = config.steps * config.batch_size
    ticks = choose_log_ticks(min(*xs, math.log10(seen)), max(*xs, math.log10(seen)))
    x_ticks = [(math.log10(tick), format_samples(tick)) for tick in ticks]
    x_ticks[-1] = x_ticks[-1][0], f"{x_ticks[-1][1]} samples"
    return {
        "lines": lines,
        "x_ticks": x_ticks,
        "x_labels": {x: format_samples(10**x) for x in xs},
        "x_mark": (math.log10(seen), f"this run: {format_samples(seen)}"),
        "note": f"public runs ({CURVES}), the nearest first, whose learning rates fall until their own ends",
    }


def _search_commands(run: Path, datasets: Sequence[str]) -> str:
    """Return the commands that open a page to search the first dataset on this disk; "" if there is none."""
    for name in datasets:
        folder = Path(name)
        if name in BUILTIN:
            folder = cache_folder() / f"{name}-{BUILTIN[name].revision}"
        if folder.is_dir():
            out = shlex.quote(str(run / "search"))
            return (
                f"clipkit encode {shlex.quote(str(folder))} --model {shlex.quote(str(run))} --out {out}\n"
                f"clipkit serve {out}"
            )
    return ""


def select_newest(results: Sequence[Result], best: tuple[str, int] | None = None) -> list[Result]:
    """Select the last score of each metric, series by series; series scored in training come first.

    The scores of the best checkpoint on its dataset are selected too.
    """
    last = {result.what: result for result in results}
    best_results = {result.what: result for result in results if (result.dataset, result.step) == best}
    selected = []
    for what, result in last.items():
        selected.append(result)
        if best_results.get(what, result) is not result:
            selected.append(best_results[what])
    trained = {result.series for result in results if result.scored_in_training}
    by_series: list[Result] = []
    for results_of_series in group_by(selected, attrgetter("series")).values():
        by_series += results_of_series
    return sorted(by_series, key=lambda result: result.series not in trained)


def _select_headlined(results: Sequence[Result]) -> list[Result]:
    """Select the last scores taken in training; without any, the latest of all.

    The selection does not change when a checkpoint is scored later.
    """
    trained = [result for result in results if result.scored_in_training] or list(results)
    last = max((result.step for result in trained), default=0)
    return [result for result in trained if result.step == last]


def _build_row(result: Result) -> TableRow:
    return build_row(result.metric, [result])


def _name_series(result: Result, all_series: Collection[Series]) -> str:
    """Name the task and setting, and what distinguishes the series from others of these."""
    splits: set[str] = set()
    prompt_sets: set[str] = set()
    for dataset, split, task, prompt_set, setting in all_series:
        if (dataset, task, setting) == (result.dataset, result.task, result.setting):
            splits.add(split)
            prompt_sets.add(prompt_set)
    words = [result.task, format_setting(result.task, result.setting)]
    if len(prompt_sets) > 1:
        words.append(f"prompts {result.prompt_set}" if result.prompt_set else "no prompts")
    if len(splits) > 1 or result.split != TEST:
        words.append(f"split {result.split}")
    return join_words(*words)


def _group_metrics(results: Iterable[Result]) -> dict[Series, dict[str, list[Result]]]:
    """Group scores by series and metric, the mean of both directions of retrieval first."""
    groups = {}
    for series, series_results in group_by(results, attrgetter("series")).items():
        metrics = group_by(series_results, attrgetter("metric"))
        groups[series] = dict(sorted(metrics.items(), key=lambda item: item[0] != _MEAN))
    return groups


def select_headlines(results: Sequence[Result], step: int | None) -> list[Headline]:
    """Select the main metric of each dataset scored in training; scores of another step than ``step`` say so."""
    all_series = {result.series for result in results}
    shown = [result for result in _select_headlined(results) if not PREFIX.fullmatch(result.setting)]
    selected = []
    for metrics in list(_group_metrics(shown).values())[:_HEADLINES]:
        result = next(iter(metrics.values()))[-1]
        row = _build_row(result)
        details = []
        if result.step != step:
            details.append(f"step {format_number(result.step)}")
        if result.interval is not None:
            low, high = result.interval
            details.append(f"95% interval {row.format_value(low)} to {row.format_value(high)}")
        if result.chance is not None:
            details.append(f"chance {row.format_value(result.chance)}")
        if result.n is not None:
            details.append(f"n = {format_number(result.n)}")
        unit = "%" if row.in_percent else ""
        selected.append(
            Headline(
                dataset=result.dataset,
                what=f"{_name_series(result, all_series)} {metric_title(result.metric)}".strip(),
                figure=row.format_value(result.value).removesuffix(unit),
                unit=unit,
                details=details,
                value=result.value if unit else None,
                interval=result.interval,
                chance=result.chance,
            )
        )
    return selected


def _list_provenance(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """List what the scores depend on, by dataset if datasets differ."""
    values: dict[str, dict[str, str]] = {}
    for result in results:
        for key, value in result.line.items():
            if value is not None and key not in _SCORE_FIELDS:
                values.setdefault(key, {})[result.dataset] = format_field(value)
    datasets = {result.dataset for result in results}
    facts = []
    for key, by_dataset in values.items():
        lines = list(dict.fromkeys(by_dataset.values()))
        if len(lines) > 1 or len(by_dataset) < len(datasets):
            lines = [f"{name}: {value}" for name, value in by_dataset.items()]
        facts.append((key.replace("_", " "), lines))
    return facts


def _compare_similarities(snapshots: Sequence[Snapshot]) -> dict[str, Any] | None:
    """Prepare the first and the last similarity matrix; None if there are none.

    The mean cosine of images with the captions of others (``level``) drifts in training without any effect on the
    loss, so colors are relative to it: they span cosines from ``low`` to ``high`` above the level.
    """
    having = [snapshot for snapshot in snapshots if snapshot.matrix]
    if not having:
        return None
    shown = []
    above: list[float] = []
    for snapshot in having if len(having) == 1 else (having[0], having[-1]):
        assert snapshot.matrix
        cosines = torch.tensor(snapshot.matrix.cosines, dtype=torch.float64)  # (M, M)
        size = len(cosines)
        pairs = cosines.diagonal()
        hits = int((pairs >= cosines.amax(dim=1)).sum())
        summary = (
            f"{hits} of {size} images are nearest to their own caption; mean cosine {float(pairs.mean()):.2f}"
        )
        level = 0.0
        if size > 1:
            level = float((cosines.sum() - pairs.sum()) / (size * size - size))
            summary += f" for pairs, {level:.2f} for others"
        above += (cosines - level).flatten().tolist()
        shown.append({"snapshot": snapshot, "level": level, "summary": summary})
    low = min(above)
    return {"shown": shown, "low": low, "high": max(*above, low + _LEAST_RANGE), "last": having[-1]}


def _draw_training(run: RunFolder) -> dict[str, list[ChartLine]]:
    loss = run.curve("loss")
    losses = [_smooth_line("loss", loss, format_number(loss[-1][1]) if loss else None)]
    chance = run.curve("chance")
    if chance:
        losses.append(
            ChartLine(name=_name_chance(run, chance[-1][1]), points=_thin_points(chance), reference=True)
        )
    floor = run.curve("floor")
    if floor:
        name = f"floor, entropy of the targets, {format_number(fmean(value for _, value in floor))}"
        losses.append(ChartLine(name=name, points=_thin_points(floor), reference=True))
    in_batch = []
    for tone, (key, name) in enumerate(_IN_BATCH.items(), start=1):
        in_batch.append(ChartLine(name=name, points=_thin_points(_to_percent(run.curve(key))), tone=tone))
    learnability = []
    for tone, name in enumerate(("read", "trained"), start=1):
        points = _thin_points(run.curve(f"learnability_{name}"))
        learnability.append(ChartLine(name=f"{name} pairs", points=points, tone=tone))
    scale = run.curve("scale")
    scales = [ChartLine(name="exp(t)", points=_thin_points(scale))]
    if scale:
        scales.append(
            ChartLine(name=f"cap {format_number(_CAP)}", points=[(scale[0][0], _CAP)], reference=True)
        )
    rate = run.curve("lr")
    highest = f"highest logged {format_number(max(value for _, value in rate))}" if rate else ""
    speed = run.curve("samples_per_second")
    batch_time = dict(run.curve("batch_time"))
    waiting = [
        (step, 100 * seconds / batch_time[step])
        for step, seconds in run.curve("data_time")
        if batch_time.get(step)
    ]
    return {
        "loss": losses,
        "in_batch": [line for line in in_batch if line.points],
        "learnability": [line for line in learnability if line.points],
        "scale": scales,
        "rate": [ChartLine(name="learning rate", points=_thin_points(rate), summary=highest)],
        "speed": [_smooth_line("speed", speed, _describe_median(speed, " samples/s"))],
        "waiting": [_smooth_line("time waiting for data", waiting, _describe_median(waiting, "%"))],
    }


def _name_chance(run: RunFolder, value: float) -> str:
    config = run.config.get("loss")
    if not isinstance(config, Mapping):
        config = {}
    # ln(batch), except for the sigmoid loss and if equal pairs are ignored
    if config.get("name", "clip") == "clip" and config.get("same", "negatives") != "ignored":
        return f"chance, ln {format_number(round(math.exp(min(value, 40.0))))} = {format_number(value)}"
    return f"chance {format_number(value)}"


def _draw_utilization(mfu: Sequence[Point]) -> tuple[ChartLine, bool]:
    """Return the utilization of the device, and whether it is that of the fastest step.

    No step can exceed the device's peak: if one does, the measured peak is too low, and the fastest step is closer.
    """
    most = max((fraction for _, fraction in mfu), default=0.0)
    if most > 1:
        points = [(step, 100 * fraction / most) for step, fraction in mfu]
        return _smooth_line(
            "device utilization", points, _describe_median(points, "% of the fastest step")
        ), True
    points = _to_percent(mfu)
    return _smooth_line("device utilization (mfu)", points, _describe_median(points, "%")), False


def _chart_scores(run: RunFolder) -> list[dict[str, Any]]:
    """Describe a chart of each series of several steps: a few metrics, the first with its interval, and chance.

    Prefixes of the embedding follow the whole in a chart of its first metric.
    """
    groups = _group_metrics(run.results)
    charts = []
    for series, metrics in groups.items():
        main = next(iter(metrics))
        first = metrics[main]
        if len(first) < 2 or PREFIX.fullmatch(series[-1]):
            continue
        percent = _are_in_percent(first)
        factor, unit = (100.0, "%") if percent else (1.0, "")
        lines = [_draw_scores(metric_title(main), first, factor)]
        for name in _BESIDE.get(main, [name for name in metrics if name != main][:1]):
            if name in metrics and _are_in_percent(metrics[name]) == percent:
                lines.append(_draw_scores(metric_title(name), metrics[name], factor, tone=len(lines) + 1))
        band = []
        for result in first:
            if result.interval is not None:
                low, high = result.interval
                band.append((result.step, factor * low, factor * high))
        mark = None
        notes = [] if first[-1].step == run.step else [f"at step {format_number(first[-1].step)}"]
        if run.best is not None and first[0].dataset == run.best[0]:
            values = {result.step: factor * result.value for result in first}
            if run.best[1] in values:
                mark = run.best[1], values[run.best[1]]
                notes.append(f"○ best checkpoint, step {format_number(run.best[1])}")
        lines[0] = replace(lines[0], band=band, mark=mark)
        highest = max(y for line in lines for _, y in line.points)
        chance = first[-1].chance
        if chance is not None:
            name = f"chance {format_value(factor * chance, unit)}"
            lines.append(ChartLine(name=name, points=[(first[0].step, factor * chance)], reference=True))
            highest = max(highest, factor * chance)
        chart = {
            "scored_in_training": any(result.scored_in_training for result in chain(*metrics.values())),
            "title": join_words(first[0].dataset, _name_series(first[0], groups)),
            "note": "; ".join(notes),
            "lines": lines,
            "unit": unit,
            "ceiling": 100.0 if percent and highest > 75 else None,
        }
        charts.append(chart)
        prefixes: dict[int, list[Result]] = {}
        for (*others, setting), other_metrics in groups.items():
            match = PREFIX.fullmatch(setting)
            if match and (*others, match[2]) == series and main in other_metrics:
                prefixes[int(match[1])] = other_metrics[main]
        if prefixes:
            curves = [_draw_scores("all", first, factor)]
            for dim in sorted(prefixes, reverse=True):
                curves.append(_draw_scores(str(dim), prefixes[dim], factor, tone=len(curves) + 1))
            title = f"{chart['title']}: {metric_title(main)} by dimension"
            note = "of the first elements of the embedding (loss.dims)"
            charts.append({**chart, "title": title, "note": note, "lines": curves})
    return charts[:_CHARTS]


def _are_in_percent(results: Sequence[Result]) -> bool:
    return all(_build_row(result).in_percent for result in results)


def _draw_scores(name: str, results: Sequence[Result], factor: float, tone: int = 1) -> ChartLine:
    points = [(result.step, factor * result.value) for result in results]
    return ChartLine(name=name, points=points, tone=tone, dots=True)


def _smooth_line(name: str, points: Sequence[Point], summary: str | None) -> ChartLine:
    """Draw many points as a smoothed line before a band from the minimum to the maximum raw value."""
    if len(points) < _MANY:
        return ChartLine(name=name, points=points, summary=summary)
    buckets = downsample_points(points)
    band = []
    for i, bucket in enumerate(buckets):
        # joined with its neighbours, so that a band of single values still has a width
        _, _, lows, highs = zip(*buckets[max(0, i - 1) : i + 2], strict=True)
        band.append((bucket[0], min(lows), max(highs)))
    smoothed = smooth_points(points, len(points) / _SMOOTHED)
    return ChartLine(name=name, points=_thin_points(smoothed), band=band, summary=summary)


def _to_percent(points: Sequence[Point]) -> list[Point]:
    return [(step, 100 * fraction) for step, fraction in points]


def _thin_points(points: Sequence[Point]) -> list[Point]:
    return [(x, last) for x, last, _, _ in downsample_points(points)]


def _describe_median(points: Sequence[Point], unit: str) -> str | None:
    if not points:
        return None
    return f"median {format_value(median_high(value for _, value in points), unit)}"

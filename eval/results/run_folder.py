"""What a run's page shows of a run folder: config, metrics, scores, snapshots and bad samples."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipkit.errors import DataError
from eval.results.records import (
    Snapshot,
    find_snapshots,
    json_lines,
    parse_finite,
    parse_integer,
    read_snapshot,
)
from eval.results.table import Record, read_records

_METRICS = (
    "loss", "chance", "floor", "scale", "lr", "samples_per_second", "data_time", "batch_time", "image_to_text_R@1",
    "text_to_image_R@1", "mfu", "seconds", "samples", "epoch", "grad_norm",
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
    ranks: Mapping[str, Mapping[str, float]]
    notes: Sequence[str]

    def curve(self, metric: str) -> Sequence[tuple[float, float]]:
        return self.metrics.get(metric, ())

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
        ranks=ranks,
        notes=notes,
    )


def _read_config(path: Path, notes: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the text, and the settings as far as it can be parsed."""
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

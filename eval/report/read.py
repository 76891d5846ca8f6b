"""Reads JSON Lines that a kill may have cut short or anybody may have written."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipkit.errors import DataError
from eval.results.records import Snapshot, find_snapshots, json_lines, read_snapshot, whole
from eval.results.scores import Record, Series, read_records

__all__ = ["BadSamples", "Result", "RunFolder", "Series", "read_run_folder"]

# --------------------------------------------------------------------------------------------------------------
# Reads what a training left in its run folder, however far it came.
#
# Any file may be missing, and a kill may have cut its last line short: what is there is read, and ``notes``
# says what is not, but not of scores that the run's config does not ask for, or not yet. A resumed training
# repeats some steps; the last word on a step counts, but the training's own before one on its checkpoint.

METRICS = (
    "loss",
    "chance",
    "scale",
    "lr",
    "samples_per_second",
    "data_time",
    "batch_time",
    "image_to_text_R@1",
    "text_to_image_R@1",
    "mfu",
    "seconds",
    "samples",
    "epoch",
    "grad_norm",
)
SNAPSHOTS = 5  # moments shown of each dataset
_MAX_CONFIG_BYTES = 1 << 20
_SHOWN_BAD = 5


@dataclass(frozen=True, kw_only=True)
class Result(Record):
    """A score at a step of a training."""

    step: int


@dataclass(frozen=True, kw_only=True)
class BadSamples:
    """How many samples could not be used, and the first few as (shard, key, cause)."""

    count: int
    first: Sequence[tuple[str, str, str]]


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Everything the report shows.

    ``metrics`` gives for each name of a curve its finite (step, value) points in order of steps; ``snapshots`` at
    most five of each dataset, evenly chosen, the first and the last among them.
    """

    name: str
    config_text: str
    config: Mapping[str, Any]
    metrics: Mapping[str, Sequence[tuple[int, float]]]
    results: Sequence[Result]
    snapshots: Mapping[str, Sequence[Snapshot]]
    bad_samples: BadSamples | None
    notes: Sequence[str]

    def last(self, metric: str) -> float | None:
        """The last value of a curve."""
        points = self.metrics.get(metric)
        return points[-1][1] if points else None

    @property
    def step(self) -> int | None:
        """The last step that anything was written at."""
        steps = [points[-1][0] for points in self.metrics.values() if points]
        steps += [result.step for result in self.results]
        return max(steps, default=None)

    @property
    def scored_on(self) -> Sequence[str]:
        """The datasets that the config names to be scored on."""
        return _scored_on(self.config)

    @property
    def planned(self) -> int | None:
        """How many steps the config asks for; None if it does not say."""
        return whole(self.config.get("steps"))

    @property
    def first_score(self) -> int:
        """The step at which the first scores are due; 0 if the config does not say."""
        return _first_score(self.config)


def read_run_folder(run: Path) -> RunFolder:
    """Read a run folder.

    Raises:
        DataError: there is no such folder, it cannot be read, or it holds nothing that a training writes.
    """
    try:
        if not run.is_dir():
            raise DataError(f"no run folder at {run}")
        return _read(run)
    except OSError as error:
        raise DataError(f"cannot read the run folder {str(run)[:200]}: {error.strerror}") from error


def _read(run: Path) -> RunFolder:
    notes: list[str] = []
    config_text, config = _read_config(run / "config.toml", notes)
    metrics = _read_metrics(run / "metrics.jsonl", notes)
    step = max((points[-1][0] for points in metrics.values()), default=None)
    due = not config or (bool(_scored_on(config)) and (step is None or step >= _first_score(config)))
    results = _read_results(run / "results.jsonl", notes, due=due)
    snapshots = _read_snapshots(run, notes, due=due)
    if not (config_text or metrics or results or snapshots):
        raise DataError(f"{run} is not a run folder: it has no config.toml, metrics, results or snapshots")
    return RunFolder(
        name=run.resolve().name,
        config_text=config_text,
        config=config,
        metrics=metrics,
        results=results,
        snapshots=snapshots,
        bad_samples=_read_bad_samples(run, notes),
        notes=notes,
    )


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
    except (ValueError, RecursionError) as error:  # ValueError too of numbers with thousands of digits
        notes.append(f"config.toml does not parse ({error}); it is shown as it is.")
        return text, {}


def _scored_on(config: Mapping[str, Any]) -> list[str]:
    section = config.get("eval")
    names = section.get("data") if isinstance(section, Mapping) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def _first_score(config: Mapping[str, Any]) -> int:
    section, last = config.get("eval"), whole(config.get("steps"))
    every = whole(section.get("every_steps")) if isinstance(section, Mapping) else None
    return min((step for step in (every, last) if step and step > 0), default=0)


def _read_metrics(path: Path, notes: list[str]) -> dict[str, list[tuple[int, float]]]:
    columns: dict[str, dict[int, float]] = {name: {} for name in METRICS}
    not_finite: set[str] = set()
    for line in json_lines(path, notes, "the curves of the training are not shown"):
        step = whole(line.get("step"))
        if step is None:
            continue
        for name, column in columns.items():
            value = line.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                if math.isfinite(value):
                    column[step] = float(value)
                else:
                    not_finite.add(name)
    if not_finite:
        notes.append(
            f"Some values of {', '.join(sorted(not_finite))} are not finite numbers and are left out."
        )
    return {name: sorted(column.items()) for name, column in columns.items() if column}


def _read_results(path: Path, notes: list[str], *, due: bool) -> list[Result]:
    found: dict[tuple[int, Series, str], Result] = {}
    for record in read_records(path, notes, "there are no scores to show" if due else ""):
        if record.step is None:
            continue
        result = Result(**vars(record))
        key = (result.step, result.series, result.metric)
        if key not in found or result.own or not found[key].own:
            found[key] = result
    return sorted(found.values(), key=lambda result: result.step)  # stable: within a step, as written


def _read_snapshots(run: Path, notes: list[str], *, due: bool) -> dict[str, list[Snapshot]]:
    chosen: dict[str, list[Snapshot]] = {}
    for steps in find_snapshots(run).values():
        for path in _evenly(list(steps.values()), SNAPSHOTS):
            try:
                snapshot = read_snapshot(path)
            except DataError:
                notes.append(f"snapshots/{path.name} cannot be read and is left out.")
                continue
            chosen.setdefault(snapshot.dataset, []).append(snapshot)
    if not chosen and due:
        notes.append("There are no snapshots, so predictions and pictures are not shown.")
    return chosen


def _read_bad_samples(run: Path, notes: list[str]) -> BadSamples | None:
    paths = sorted(run.glob("bad_samples*.jsonl"))
    count = 0
    first: list[tuple[str, str, str]] = []
    for path in paths:
        for line in json_lines(path, notes, ""):
            count += 1
            if len(first) < _SHOWN_BAD:
                cause = line.get("cause", line.get("error", line.get("reason", "")))
                first.append((str(line.get("shard", "")), str(line.get("key", "")), str(cause)))
    return BadSamples(count=count, first=first) if paths else None


def _evenly(paths: list[Path], count: int) -> list[Path]:
    if len(paths) <= count:
        return paths
    return [paths[round(i * (len(paths) - 1) / (count - 1))] for i in range(count)]

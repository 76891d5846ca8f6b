"""A run's folder while it is trained: who may write to it, which configuration it belongs to, its bad samples.

RUN/.lock                     held by the process that trains; contains its ID and host
RUN/config.toml               the configuration
RUN/data.manifest             what it is trained on, see data/manifest.py
RUN/truncated_shards.jsonl    shards of which only the intact part is used, a line each
RUN/bad_samples.jsonl         samples that were replaced, a line each; of rank 3: bad_samples-3.jsonl
"""

import fcntl
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from clipkit.checkpoint import latest_checkpoint
from clipkit.config import Config
from clipkit.config_file import changes, load_config, to_toml
from clipkit.errors import ConfigError, DataError
from clipkit.progress import drop_lines_after
from clipkit.setting import shown

__all__ = [
    "append_bad_samples", "bad_share", "check_bad_samples", "drop_bad_samples_after", "hint_of_moved_data",
    "list_truncated", "manifest_file", "only_trainer_of", "too_many_bad",
]  # fmt: skip

_LOCK, _CONFIG, _MANIFEST = ".lock", "config.toml", "data.manifest"
_FIGURES = "metrics.jsonl"
_TRUNCATED = "truncated_shards.jsonl"
_SHOWN = 5  # truncated shards that are printed one by one
_STARTED = (_LOCK, _CONFIG, _MANIFEST, _FIGURES, _TRUNCATED, "tensorboard")  # there before a step
_FIRST_SAMPLES = 1000  # draws
_LONGEST_NAME = 200  # characters of a process's name
_LOCK_SECONDS = 10.0  # to wait for a lock: ranks of a launcher that was killed end within a second
_POLL_SECONDS = 0.1
_LOCK_PID = re.compile(r"process ([0-9]+)(?!.*process)")  # the last one: a launcher, if there is one


@contextmanager
def only_trainer_of(run: Path, config: Config, *, chief: bool, launcher: int | None = None) -> Iterator[None]:
    """Make or reopen the run folder, and hold it while training; another training there is refused.

    A folder made here that a mistake or Ctrl-C has left without a step, score or checkpoint is removed:
    it would look like a run.

    Args:
        run: the folder.
        config: which it is to be of.
        chief: whether this process is the one that writes; the others do nothing here.
        launcher: process ID of the torchrun that started this process, if one did.

    Raises:
        ConfigError: it cannot be made or written, another training holds it, it is of something else, or it has
            made more steps.
        CheckpointError: its checkpoints are gone or damaged.
    """
    if not chief:
        yield
        return
    doing = "made"
    try:
        made = [folder for folder in (run, *run.parents) if not folder.exists()]
        run.mkdir(parents=True, exist_ok=True)
        doing = "written"
        lock = (run / _LOCK).open("a+", encoding="utf-8", errors="replace")  # "w" would take the name out
    except OSError as error:
        raise ConfigError(f"out = {shown(str(run))} cannot be {doing}: {error.strerror}") from error
    ended = False
    try:
        with lock:
            _hold(lock, run, launcher)
            try:
                _claim(run, config)
            except OSError as error:
                raise ConfigError(f"the run folder {run} cannot be written: {error.strerror}") from error
            yield
        ended = True
    finally:
        if made and not ended:
            _take_back(run, made)


def _take_back(run: Path, made: Sequence[Path]) -> None:
    """Remove folders, the innermost first, if the run's holds nothing but what every start writes."""
    left = [path for path in run.iterdir() if not _is_aside(path)]
    if any(path.name not in _STARTED or (path.name == _FIGURES and path.stat().st_size) for path in left):
        return
    shutil.rmtree(run, ignore_errors=True)
    with suppress(OSError):  # someone else has put something there
        for folder in made[1:]:
            folder.rmdir()


def _hold(lock: TextIO, run: Path, launcher: int | None) -> None:
    """Take the lock; wait some seconds for a process that is about to end."""
    until = time.monotonic() + _LOCK_SECONDS
    waiting = False
    while not _try_lock(lock, run):
        lock.seek(0)
        name = lock.read(_LONGEST_NAME).strip()
        who = f" ({name})" if name else ""
        if time.monotonic() >= until:
            # a rank that ends alone may be started again by its torchrun
            pid = _LOCK_PID.search(name)
            stop = f"`kill -TERM {pid[1]}` saves and stops it; " if pid else ""
            raise ConfigError(
                f"another training{who} is writing to {run}: {stop}wait for it, or set another out="
            )
        if not waiting:
            print(f"waiting for another training{who} to leave {run}", file=sys.stderr, flush=True)
            waiting = True
        time.sleep(_POLL_SECONDS)
    with suppress(OSError):  # the name only helps; a full disk is reported where it matters
        os.ftruncate(lock.fileno(), 0)
        under = f" under torchrun, process {launcher}" if launcher else ""
        name = f"process {os.getpid()} on {socket.gethostname()}{under}\n"
        os.write(lock.fileno(), name.encode())


def _try_lock(lock: TextIO, run: Path) -> bool:
    try:
        # of the process, unlike flock's: a loader process that outlives a kill -9 for a moment does not hold it
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        raise ConfigError(f"the run folder {run} cannot be locked: {error.strerror}") from error
    return True


def _claim(run: Path, config: Config) -> None:
    """Write the run's configuration, or compare it with the one that the folder was trained with."""
    stored, aside = run / _CONFIG, run / f".{_CONFIG}.partial"
    if stored.is_file() and (
        (run / "checkpoints").exists() or (run / ".saved").exists()
    ):  # else nothing is lost
        differing = changes(load_config(stored), config)
        if differing:
            raise ConfigError(
                f"{run} holds a run of another configuration ({'; '.join(differing)}): "
                f"set out=… for a new run (model.weights={run} starts from this one's weights), "
                "or remove that folder"
            )
        if config.steps < (made := _steps_made(run)):
            raise ConfigError(
                f"steps = {config.steps}, but {run} has made {made}: set steps={made} or more, "
                "or out=… for a new run"
            )
    elif not stored.is_file() and any(path.name != _LOCK and not _is_aside(path) for path in run.iterdir()):
        raise ConfigError(f"{run} exists and is no run folder: set another out=")
    try:
        aside.write_text(to_toml(config), encoding="utf-8")
        aside.replace(stored)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _steps_made(run: Path) -> int:
    checkpoint = latest_checkpoint(run)
    step = checkpoint.name.removeprefix("step_") if checkpoint is not None else "0"
    return int(step) if step.isdecimal() else 0  # a name of its own that LATEST was given by hand


def _is_aside(path: Path) -> bool:
    """Whether a file was being written when its writer was killed, or the disk was full."""
    return path.name.startswith(".") and path.name.endswith(".partial")


def manifest_file(run: Path) -> Path:
    """Where it is written what the run is trained on."""
    return run / _MANIFEST


@contextmanager
def hint_of_moved_data(run: Path) -> Iterator[None]:
    """Add to a DataError, where data are looked for, what to do if they were moved since the run began."""
    try:
        yield
    except DataError as error:
        if latest_checkpoint(run) is None:
            raise
        raise DataError(
            f"{error}; if the data of {run} were moved, give data.train= the new place: it is checked that they "
            "are the same"
        ) from error


def drop_bad_samples_after(run: Path, step: int) -> None:
    """Take the bad samples of steps beyond ``step`` out of the lists, also of ranks that are no more.

    The chief does this for all, before any rank appends to its own.
    """
    for path in run.glob("bad_samples*.jsonl"):
        drop_lines_after(path, step)


def append_bad_samples(run: Path, bad: Sequence[Mapping[str, Any]], step: int, *, rank: int) -> None:
    """List the bad samples of a step, a line each.

    Raises:
        DataError: the file cannot be written.
    """
    if not bad:
        return
    path = run / (f"bad_samples-{rank}.jsonl" if rank else "bad_samples.jsonl")
    lines = "".join(json.dumps({"step": step, **one}) + "\n" for one in bad)
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(lines)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from error


def list_truncated(run: Path, shards: Sequence[tuple[str, int]]) -> list[str]:
    """List truncated shards in the run folder, each with how many samples were kept; returns lines for the user.

    Raises:
        DataError: the list cannot be written.
    """
    path = run / _TRUNCATED
    try:
        if not shards:
            path.unlink(missing_ok=True)
            return []
        lines = [json.dumps({"shard": shard, "samples_kept": kept}) + "\n" for shard, kept in shards]
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from error
    first = [f"note: shard {shard} is truncated: {kept:,} samples kept" for shard, kept in shards[:_SHOWN]]
    more = len(shards) - len(first)
    return [*first, f"note: {more:,} more truncated shards are listed in {path}"] if more else first


def too_many_bad(bad: int, used: int, share: float) -> bool:
    """Whether more than a share of the samples that were drawn is bad, or more than that of a thousand.

    Draws are counted, not different samples: a bad sample that comes again in each epoch counts again, as each
    good one does, so that the share does not depend on how long the run is.

    Args:
        bad: draws that could not be used, those in place of others too.
        used: draws that were trained on; steps times the size of a batch.
        share: 0 to 1, ``data.max_bad``.
    """
    return bad > share * max(bad + used, _FIRST_SAMPLES)  # a few early ones are no measure of the whole


def bad_share(bad: int, used: int, share: float) -> str:
    """The share of bad samples beside its limit, as a line tells it; arguments as of ``too_many_bad``."""
    drawn = bad + used
    least = f", taken of at least {_FIRST_SAMPLES:,}" if drawn < _FIRST_SAMPLES else ""
    return (
        f"{100 * bad / drawn:.3g}% of the {drawn:,} samples drawn were bad "
        f"(limit: data.max_bad = {100 * share:.3g}%{least})"
    )


def check_bad_samples(bad: int, used: int, share: float, run: Path) -> None:
    """End a run that is saved and has ``too_many_bad``.

    Raises:
        DataError: it has.
    """
    if too_many_bad(bad, used, share):
        raise DataError(
            f"{bad:,} of {bad + used:,} samples drawn so far are bad, more than data.max_bad = {share:g} allows: "
            f"see {run}/bad_samples*.jsonl; all steps are saved: raise data.max_bad, and the same command goes on"
        )

"""Writes the checkpoints of a run while it trains on; what is in one, clipkit/formats/checkpoint.py says.

The state is copied at once (on a GPU: while the next step is computed), written aside by a thread, synced and
renamed, and only then LATEST moves: whatever ends the process, the former checkpoint stays whole. Weights that are
not finite are not written, so that they never take the place of good ones. A model on one rank or replicated is
written by rank 0; of a sharded one every rank writes its shards to the folder, which all share, and rank 0
joins them to the same files, so that it does not matter later how many ranks there were.
"""

import json
import re
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from clipkit.config import Config, changes, load_config, shown, to_toml
from clipkit.distributed import background_group, barrier, broadcast_bytes, rank, sum_over_ranks
from clipkit.errors import CheckpointError, ConfigError, DataError
from clipkit.files.atomic import FileLock, sync, write_atomic
from clipkit.files.traits import TraitCounts
from clipkit.formats.checkpoint import (
    COMPLETE,
    FORMAT,
    LATEST,
    SAVED,
    STEP_FOLDER,
    TRAINED,
    check_weights,
    is_complete,
    latest_checkpoint,
    listing,
    model_card,
    passed_over,
    read_json,
    step_folders,
    step_of,
    weights_of,
)
from clipkit.model.clip import CLIP
from clipkit.training.ema import AveragedWeights
from clipkit.training.guards import line_of_weights, spoilt_weight
from clipkit.training.metrics import drop_lines_after
from clipkit.training.optim import expected_state
from clipkit.training.parallel import put

__all__ = [
    "CheckpointWriter",
    "LoopState",
    "append_bad_samples",
    "as_replayed",
    "bad_share",
    "check_bad_samples",
    "damaged_notes",
    "drop_bad_samples_after",
    "list_truncated",
    "load_training",
    "loop_state",
    "manifest_file",
    "newest_checkpoint",
    "only_trainer_of",
    "optimizer_tensors",
    "planned_steps",
    "restore_optimizer",
    "save_checkpoint",
    "too_many_bad",
]


# --------------------------------------------------------------------------------------------------------------
# A run's folder while it is trained: who may write to it, which configuration it belongs to, its bad samples.
#
# RUN/.lock                     held by the process that trains; contains its ID and host
# RUN/config.toml               the configuration
# RUN/data.manifest             what it is trained on, see data/shards/manifest.py
# RUN/truncated_shards.jsonl    shards of which only the intact part is used, a line each
# RUN/bad_samples.jsonl         samples that were replaced, a line each; of rank 3: bad_samples-3.jsonl

_LOCK, _CONFIG, _MANIFEST = ".lock", "config.toml", "data.manifest"
_FIGURES = "metrics.jsonl"
_TRUNCATED = "truncated_shards.jsonl"
_SHOWN = 5  # truncated shards that are printed one by one
_STARTED = (_LOCK, _CONFIG, _MANIFEST, _FIGURES, _TRUNCATED, "tensorboard")  # there before a step
_FIRST_SAMPLES = 1000  # draws
_LOCK_SECONDS = 10.0  # to wait for a lock: ranks of a launcher that was killed end within a second
_POLL_SECONDS = 0.1
_LOCK_PID = re.compile(r"process ([0-9]+)(?!.*process)")  # the last one: a launcher, if there is one


@contextmanager
def only_trainer_of(run: Path, config: Config, *, rank0: bool, launcher: int | None = None) -> Iterator[None]:
    """Make or reopen the run folder, and hold it while training; another training there is refused.

    A folder made here that a mistake or Ctrl-C has left without a step, score or checkpoint is removed:
    it would look like a run.

    Args:
        run: the folder.
        config: which it is to be of.
        rank0: whether this process is rank 0, which writes; the others do nothing here.
        launcher: process ID of the torchrun that started this process, if one did.

    Raises:
        ConfigError: it cannot be made or written, another training holds it, it is of something else, or it has
            made more steps.
        CheckpointError: its checkpoints are gone or damaged.
    """
    if not rank0:
        yield
        return
    doing = "made"
    try:
        made = [folder for folder in (run, *run.parents) if not folder.exists()]
        run.mkdir(parents=True, exist_ok=True)
        doing = "written"
        lock = FileLock(run / _LOCK, note=f" under torchrun, process {launcher}" if launcher else "")
        _hold(lock, run)
    except OSError as error:
        raise ConfigError(f"out = {shown(str(run))} cannot be {doing}: {error.strerror}") from error
    ended = False
    try:
        try:
            _claim(run, config)
        except OSError as error:
            raise ConfigError(f"the run folder {run} cannot be written: {error.strerror}") from error
        yield
        ended = True
    finally:
        with suppress(OSError):
            lock.release()
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


def _hold(lock: FileLock, run: Path) -> None:
    """Take the lock; wait some seconds for a process that is about to end.

    Raises:
        ConfigError: another process still holds it.
        OSError: the file cannot be made or locked.
    """
    until = time.monotonic() + _LOCK_SECONDS
    waiting = False
    while not lock.try_acquire():
        who = f" ({lock.holder})" if lock.holder else ""
        if time.monotonic() >= until:
            # a rank that ends alone may be started again by its torchrun
            pid = _LOCK_PID.search(lock.holder)
            stop = f"`kill -TERM {pid[1]}` saves and stops it; " if pid else ""
            raise ConfigError(
                f"another training{who} is writing to {run}: {stop}wait for it, or set another out="
            )
        if not waiting:
            print(f"waiting for another training{who} to leave {run}", file=sys.stderr, flush=True)
            waiting = True
        time.sleep(_POLL_SECONDS)


def _claim(run: Path, config: Config) -> None:
    """Write the run's configuration, or compare it with the one that the folder was trained with."""
    stored = run / _CONFIG
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
    write_atomic(stored, to_toml(config))


def _steps_made(run: Path) -> int:
    checkpoint = latest_checkpoint(run)
    step = checkpoint.name.removeprefix("step_") if checkpoint is not None else "0"
    return int(step) if step.isdecimal() else 0  # a name of its own that LATEST was given by hand


def _is_aside(path: Path) -> bool:
    """Whether a file was being written when its writer was killed, or the disk was full."""
    return path.name.startswith(".") and path.name.endswith(".partial")


def manifest_file(run: Path) -> Path:
    """Return the file that records the manifest of the run's training data."""
    return run / _MANIFEST


def drop_bad_samples_after(run: Path, step: int) -> None:
    """Take the bad samples of steps beyond ``step`` out of the lists, also of ranks that are no more.

    Rank 0 does this for all, before any rank appends to its own.
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


# --------------------------------------------------------------------------------------------------------------
# What a training carries on with besides its weights: the loop's state, and the optimizer's tensors by name.
#
# Both are checked when they are read: a count that is none, or a tensor of another shape that would be
# broadcast, would go on as another run.

_MOST = 2**63  # of a count, or of seconds


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """All state of the training loop besides weights and the optimizer's tensors.

    Order, augmentation and random draws are functions of the seed and the step, so the number of batches
    consumed is all that the data need, and no generator is saved.
    """

    step: int  # updates made = global batches consumed
    data: str  # fingerprint of the training samples
    teacher: str = (
        ""  # of the model or the stored features that are learned from; "" also where it was not kept
    )
    seconds: float = 0.0  # of training so far
    bad_samples: int = 0
    transparent: int = 0  # images drawn that are transparent
    rotated: int = 0  # images drawn that have an EXIF orientation other than upright
    skipped: int = 0  # updates left out, as their gradient was far above the usual
    usual_norm: float = 0.0  # of gradients, see clipkit/training/guards.py

    def trait_counts(self, images: int) -> TraitCounts:
        """How many of the images drawn so far are transparent or rotated by EXIF."""
        return TraitCounts(images=images, transparent=self.transparent, rotated=self.rotated)


def loop_state(stored: Mapping[str, Any], *, origin: Path) -> LoopState:
    """The state that state.json holds.

    Raises:
        CheckpointError: something is missing, unknown, of another kind, or out of range.
    """
    try:
        state = LoopState(**stored)
    except TypeError as error:
        raise CheckpointError(f"{origin}: state.json does not fit: {error}") from error
    for name, kinds, what in (
        ("step", (int,), "a count"),
        ("data", (str,), "a string"),
        ("teacher", (str,), "a string"),
        ("seconds", (int, float), "a number of seconds"),
        ("bad_samples", (int,), "a count"),
        ("transparent", (int,), "a count"),
        ("rotated", (int,), "a count"),
        ("skipped", (int,), "a count"),
        ("usual_norm", (int, float), "a norm"),
    ):
        value = getattr(state, name)
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        if not fits or (isinstance(value, int | float) and not 0 <= value < _MOST):  # nor is it NaN
            raise CheckpointError(f"{origin}: state.json does not fit: {name} = {value!r} is not {what}")
    return state


def newest_checkpoint(run: Path) -> Path | None:
    """Return the newest checkpoint that rank 0 sees, on every rank; None if there is none.

    Raises:
        CheckpointError: another rank does not see it.
    """
    newest = latest_checkpoint(run) if rank() == 0 else None
    name = broadcast_bytes(newest.name.encode() if newest else b"").decode()
    if not name:
        return None
    checkpoint = run / "checkpoints" / name
    if not (checkpoint / "state.json").is_file():
        raise CheckpointError(f"{checkpoint} is not visible on this host: put {run} on a shared filesystem")
    return checkpoint


def damaged_notes(newest: Path) -> list[str]:
    """Return a line on newer checkpoints that cannot be used, if there are any."""
    bad = passed_over(newest)
    return [f"note: {', '.join(bad)} is damaged or missing; {newest.name} was taken instead"] if bad else []


def planned_steps(folder: Path, *, otherwise: int) -> int:
    """How many steps the run was to make when a checkpoint was written; ``otherwise`` where that cannot be read.

    A line that is shown depends on it, and nothing else: no reason to leave the checkpoint.
    """
    try:
        return load_config(folder / "config.toml").steps
    except ConfigError:
        return otherwise


def optimizer_tensors(model: CLIP, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as ``<parameter name>/<state name>``, so that it does not depend on group order."""
    return {
        f"{name}/{key}": torch.as_tensor(value).contiguous()
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for key, value in optimizer.state[parameter].items()
    }


def restore_optimizer(
    model: CLIP,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    *,
    origin: Path,
    partly: bool = False,
) -> None:
    """Give an optimizer the state that ``optimizer_tensors`` took; model and optimizer may be sharded.

    Args:
        model: whose parameters the optimizer has.
        optimizer: one of ``clipkit.training.optim``.
        tensors: what was taken.
        origin: where they come from, for messages.
        partly: whether some parameters may have no state, as they had no gradient yet.

    Raises:
        CheckpointError: it is for other parameters, incomplete, or of other shapes or dtypes.
    """
    wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = dict(model.named_parameters())
    stored: dict[str, list[str]] = {}
    for key in tensors:
        name, _, what = key.rpartition("/")
        stored.setdefault(name, []).append(what)
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    missing = wanted.keys() - stored.keys()
    if (missing and not partly) or any(id(parameters.get(name)) not in held for name in stored):
        raise CheckpointError(f"{origin}: the optimizer's state is for other parameters than the model has")
    for name, kinds in stored.items():
        _check(expected_state(optimizer, parameters[name]), kinds, tensors, name, origin)
    for name, kinds in stored.items():
        optimizer.state[parameters[name]] = {
            what: _like(parameters[name], tensors[f"{name}/{what}"]) for what in kinds
        }


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """A state's tensor as the optimizer has it: spread as its parameter is, and a count beside it."""
    if not value.ndim:
        return value.to(parameter.device, copy=True)
    held = torch.empty_like(parameter)
    put(held, value)
    return held


def _check(
    expected: Mapping[str, tuple[torch.Size, torch.dtype]],
    kinds: Sequence[str],
    tensors: Mapping[str, Tensor],
    name: str,
    origin: Path,
) -> None:
    whose = f"{origin}: the optimizer's state of {name}"
    if sorted(kinds) != sorted(expected):
        raise CheckpointError(f"{whose} holds {', '.join(sorted(kinds))} instead of {', '.join(expected)}")
    for what, (shape, dtype) in expected.items():
        value = tensors[f"{name}/{what}"]
        if value.shape != shape or value.dtype != dtype:
            raise CheckpointError(
                f"{whose}: {what} is {tuple(value.shape)} {value.dtype} instead of {tuple(shape)} {dtype}"
            )


# --------------------------------------------------------------------------------------------------------------

Files = dict[str, dict[str, Tensor]]  # tensors of each file


@dataclass(frozen=True, kw_only=True)
class _Saving:
    """A checkpoint that is being written."""

    staged: "Future[Any] | None"  # when the model may change again
    written: "Future[Any]"


class CheckpointWriter:
    """The checkpoints of one run, one at a time.

    Args:
        run: the run folder.
        config: of the run.
        keep: how many of the newest stay; 0 keeps all.
        saved: the step of the newest checkpoint so far; None where there is none.
    """

    def __init__(self, run: Path, config: Config, *, keep: int, saved: int | None = None) -> None:
        self._saved = saved
        self._run, self._config, self._keep = run, config, keep
        self._root = run / "checkpoints"
        newest = None if saved is None else self._root / f"step_{saved:08d}"
        self._damaged = set() if newest is None else set(passed_over(newest))  # none of those that are kept
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: _Saving | None = None
        self._step = saved or 0
        self._stager: DefaultStager | None = None
        self._group: Any = None

    @property
    def saved_step(self) -> int:
        """Of the newest checkpoint; 0 where there is none."""
        return self._saved or 0

    def save_now(
        self,
        model: CLIP,
        optimizer: torch.optim.Optimizer,
        state: LoopState,
        averaged: AveragedWeights | None = None,
    ) -> None:
        """See that this step is saved, before any rank goes on; all ranks call this.

        Raises:
            CheckpointError: as ``begin`` and ``finish`` do.
        """
        self.finish()
        if self._saved != state.step:
            self.begin(model, optimizer, state, averaged)
            self.finish()
        barrier()

    def begin(
        self,
        model: CLIP,
        optimizer: torch.optim.Optimizer,
        state: LoopState,
        averaged: AveragedWeights | None = None,
    ) -> None:
        """Write ``checkpoints/step_<8 digits>``; all ranks call this. The former one is waited for.

        Raises:
            CheckpointError: the former one was not written, or this one cannot be begun, or its weights are not
                finite; others are untouched.
        """
        self.finish()
        files = _files(model, optimizer, averaged)
        if spoilt := spoilt_weight({**files["model.safetensors"], **files.get("trained.safetensors", {})}):
            raise CheckpointError(line_of_weights(self._run, state.step, spoilt, saved=self._saved))
        self._step = state.step
        sharded = any(isinstance(tensor, DTensor) for tensor in files["model.safetensors"].values())
        if rank() and not sharded:
            self._saved = state.step
            return
        folder = self._root / f"step_{state.step:08d}"
        aside = self._root / f".{folder.name}.partial"
        try:
            if not rank():
                for left in self._root.glob(".step_*"):  # by a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
                aside.mkdir(parents=True)
                _write_cards(aside, model, state, self._config)
        except OSError as error:
            raise self._failed(aside, error) from error
        if sharded:
            barrier()
            self._check_shared(aside)
            self._saving = self._begin_shards(files, aside, folder)
        else:
            self._saving = self._begin_whole(files, aside, folder)

    def wait_until_copied(self) -> None:
        """Before weights change: wait until the last ``begin`` has its copy."""
        if self._saving is not None and self._saving.staged is not None:
            self._saving.staged.result()

    def finish(self) -> None:
        """Wait until all is written.

        Raises:
            CheckpointError: it could not be written, for example for want of space; those before are untouched.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                saving.written.result()
            except (OSError, SafetensorError, CheckpointException) as error:
                raise self._failed(self._root / f".step_{self._step:08d}.partial", error) from error
            finally:
                if self._stager is not None and not torch.cuda.is_available():  # keeps a copy of the state
                    self._stager.close()
                    self._stager = None
            self._saved = self._step

    def finish_if_done(self) -> None:
        """``finish`` where that takes no time."""
        if self._saving is not None and self._saving.written.done():
            self.finish()

    def close(self) -> None:
        """End the thread; what it writes is written."""
        self._thread.shutdown()

    def _check_shared(self, aside: Path) -> None:
        """Every rank writes its shards to one folder, or rank 0 would join only those that it sees."""
        blind = sum_over_ranks(torch.tensor(int(not (aside / "state.json").exists())))
        if blind:
            raise CheckpointError(
                f"{int(blind)} ranks do not see {aside}: with sharding, put the run folder on a filesystem shared "
                "by all hosts"
            )

    def _begin_whole(self, files: Files, aside: Path, folder: Path) -> _Saving:
        staged = self._staging().stage(files)

        def write() -> None:
            tensors = staged.result() if isinstance(staged, Future) else staged
            for name, content in tensors.items():
                save_file(content, aside / name)
            self._commit(aside, folder)

        return _Saving(
            staged=staged if isinstance(staged, Future) else None, written=self._thread.submit(write)
        )

    def _begin_shards(self, files: Files, aside: Path, folder: Path) -> _Saving:
        if self._group is None:
            self._group = background_group()
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (max(soft, hard), hard)
            )  # all shards are joined at once
        names = [name for name in files if files[name]]  # an optimizer that made no update has no state
        numbers = {  # copies: they are written when the training has gone on
            key: one.to("cpu", copy=True)
            for content in files.values()
            for key, one in content.items()
            if not one.ndim
        }
        response = async_save(
            {name: tensor for content in files.values() for name, tensor in content.items()},
            storage_writer=HuggingFaceStorageWriter(
                str(aside),
                {tensor: number for number, name in enumerate(names, 1) for tensor in files[name]},
                save_distributed=True,
                enable_consolidation=True,
                thread_count_consolidation=len(names),
            ),
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            process_group=self._group,
            async_stager=self._staging(),
        )
        staged, uploaded = (
            (None, response)
            if isinstance(response, Future)
            else (response.staging_completion, response.upload_completion)
        )

        def write() -> None:
            uploaded.result()
            if rank() == 0:
                for number, name in enumerate(names, 1):
                    joined = aside / f"model-{number:05d}-of-{len(names):05d}.safetensors"
                    _write_numbers(joined, numbers)
                    joined.rename(aside / name)
                for name in files.keys() - names:
                    save_file({}, aside / name)
                shutil.rmtree(aside / "sharded")
                (aside / "model.safetensors.index.json").unlink(missing_ok=True)
                self._commit(aside, folder)

        return _Saving(staged=staged, written=self._thread.submit(write))

    def _staging(self) -> DefaultStager:
        if self._stager is None:
            cuda = torch.cuda.is_available()
            self._stager = DefaultStager(StagingOptions(cuda, False, cuda, cuda))
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # its own stream does not wait for the last update
        return self._stager

    def _commit(self, aside: Path, folder: Path) -> None:
        """What is written becomes a checkpoint, and the newest one."""
        (aside / COMPLETE).write_text(listing(aside))
        files = [path for path in aside.rglob("*") if path.is_file()]
        for path in files:  # safetensors makes files that only their owner can read
            path.chmod((aside / COMPLETE).stat().st_mode & 0o777)
        for path in (*aside.rglob("*"), aside):
            sync(path)
        self._damaged.discard(folder.name)
        replaced = folder.with_name(f".{folder.name}.replaced")
        if folder.exists():
            folder.rename(replaced)
        aside.rename(folder)
        sync(self._root)
        shutil.rmtree(replaced, ignore_errors=True)
        _point_at(self._root, folder.name)
        (self._run / SAVED).touch()
        if self._keep:
            # the one just written stays, even where someone has gone back to an older step
            others = [
                other
                for other in step_folders(self._root)
                if other != folder and other.name not in self._damaged and is_complete(other)
            ]
            for old in others[self._keep - 1 :]:
                removed = old.with_name(
                    f".{old.name}.removed"
                )  # at once: no half of one is left as a checkpoint
                old.rename(removed)
                shutil.rmtree(removed, ignore_errors=True)

    def _failed(self, aside: Path, error: BaseException) -> CheckpointError:
        shutil.rmtree(aside, ignore_errors=True)
        cause: BaseException = error
        if isinstance(error, CheckpointException):  # of several ranks, each with its own
            cause = next(
                (one[0] for one in error.failures.values() if isinstance(one[0], BaseException)), error
            )
        return CheckpointError(f"the checkpoint of step {self._step} was not written: {cause}")


def save_checkpoint(
    run: Path, model: CLIP, optimizer: torch.optim.Optimizer, state: LoopState, config: Config, *, keep: int
) -> Path:
    """Write one checkpoint and wait for it, see ``CheckpointWriter``; returns its folder."""
    writer = CheckpointWriter(run, config, keep=keep)
    try:
        writer.begin(model, optimizer, state)
        writer.finish()
    finally:
        writer.close()
    return run / "checkpoints" / f"step_{state.step:08d}"


def _files(model: CLIP, optimizer: torch.optim.Optimizer, averaged: AveragedWeights | None) -> Files:
    """What is written: with averaged weights, these are the model, and those in training stand beside."""
    weights = weights_of(model)
    files = {"model.safetensors": weights, "optimizer.safetensors": optimizer_tensors(model, optimizer)}
    if averaged is not None:
        average = averaged.tensors()
        files["model.safetensors"] = {**weights, **average}
        files["trained.safetensors"] = {f"{name}{TRAINED}": weights[name] for name in average}
    return files


def _write_cards(folder: Path, model: CLIP, state: LoopState, config: Config) -> None:
    (folder / "model.json").write_text(json.dumps(model_card(model, folder), indent=2) + "\n")
    (folder / "state.json").write_text(json.dumps({"format": FORMAT, **asdict(state)}, indent=2) + "\n")
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")


def _write_numbers(path: Path, numbers: Mapping[str, Tensor]) -> None:
    """Fill in a file's single numbers: what joins shards (torch 2.15) leaves room for them, and zeros."""
    with path.open("r+b") as file:
        header_length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_length))
        for name in numbers.keys() & header.keys():
            start, end = header[name]["data_offsets"]
            content = numbers[name].contiguous().view(1).view(torch.uint8).numpy().tobytes()
            assert header[name]["shape"] == [] and end - start == len(content), name
            file.seek(8 + header_length + start)
            file.write(content)


def _point_at(root: Path, name: str) -> None:
    write_atomic(root / LATEST, name + "\n", durable=True)


# --------------------------------------------------------------------------------------------------------------
# Puts a checkpoint's weights and optimizer state into what a run has built, on any number of ranks.


def as_replayed(config: Config, run: Path) -> Config:
    """The configuration of a step that one process computes again: in as many pieces as all ranks had together.

    How many ranks there were is told by the lists of samples that each has left, see clipkit/training/guards.py.

    Raises:
        ConfigError: the run was never saved.
    """
    checkpoint = latest_checkpoint(run)
    if checkpoint is None:
        raise ConfigError(f"--replay needs a run that was saved: there is no checkpoint in {run}")
    failed = step_of(checkpoint.name) + 1
    ranks = max(1, sum(_first_step(path) == failed for path in run.glob("not_finite*.jsonl")))
    parts = load_config(checkpoint / "config.toml").accumulate * ranks
    return replace(config, accumulate=min(max(parts, config.accumulate), config.batch_size))


def _first_step(path: Path) -> int | None:
    try:
        with path.open(encoding="utf-8") as file:
            step = json.loads(file.readline()).get("step")
    except (OSError, ValueError, AttributeError):
        return None
    return step if isinstance(step, int) else None


def load_training(
    folder: Path,
    model: CLIP,
    optimizer: torch.optim.Optimizer,
    averaged: AveragedWeights | None = None,
    *,
    partly: bool = False,
) -> LoopState:
    """Put a checkpoint's weights and optimizer state into what a run has built; returns the loop's state.

    Args:
        folder: of the checkpoint.
        model: on its device, sharded or not, whatever the checkpoint was written by.
        optimizer: over the model's parameters.
        averaged: of the model, where the run averages weights.
        partly: whether some parameters may have no optimizer state yet, as they are unfrozen one after the other.

    Raises:
        CheckpointError: a file is missing or damaged, or does not fit the model.
    """
    stored = read_json(folder / "state.json")
    if stored.pop("format", None) != FORMAT:
        raise CheckpointError(f"{folder}: state.json is of another format than this version writes")
    state = loop_state(stored, origin=folder)
    if STEP_FOLDER.fullmatch(folder.name) and state.step != step_of(folder.name):
        raise CheckpointError(f"{folder}: state.json is of step {state.step}")
    weights: Mapping[str, Tensor] = _Stored(folder / "model.safetensors")
    _check_weights(model, weights, folder)
    if averaged is not None:
        averaged.restore(weights, origin=folder)
        trained = _Stored(folder / "trained.safetensors")
        weights = {**weights, **{name.removesuffix(TRAINED): trained[name] for name in trained}}
        _check_weights(model, weights, folder)
    elif (folder / "trained.safetensors").exists():
        raise CheckpointError(f"{folder}: the weights are averaged ones; set optim.average as it was")
    for name, own in model.state_dict().items():
        put(own, weights[name])
    partly = partly or not state.step  # before the first update an optimizer has no state
    restore_optimizer(
        model, optimizer, _Stored(folder / "optimizer.safetensors"), origin=folder, partly=partly
    )
    return state


def _check_weights(model: CLIP, weights: Mapping[str, Tensor], folder: Path) -> None:
    check_weights(model, weights, origin=folder)
    for name, own in model.state_dict().items():
        if weights[name].dtype != own.dtype:  # it would be converted, and the run not be the same
            raise CheckpointError(f"{folder}: {name} is {weights[name].dtype}, not {own.dtype}")


class _Stored(Mapping[str, Tensor]):
    """The tensors of a file, each read when it is asked for.

    Raises:
        CheckpointError: the file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any
        try:
            self._file = safe_open(path, framework="pt")
            self._names = list(self._file.keys())  # no mapping: iterating gives nothing
        except (OSError, SafetensorError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def __getitem__(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._path} cannot be read: {error}") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

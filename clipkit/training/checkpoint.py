"""Write the checkpoints of a run in the background, and resume from them; see clipkit/formats/checkpoint.py.

The state is copied first (on a GPU while the next step is computed), then a thread writes it to a temporary folder,
syncs and renames it, and updates LATEST: a process that is killed leaves the previous checkpoint intact. Rank 0
writes replicated models. The ranks that together hold a sharded model once write their rows to the shared folder,
and rank 0 joins them into the same files, one after another: checkpoints do not depend on the number of ranks.
"""

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from clipkit.config import Config, format_value, list_changes, load_config, to_toml
from clipkit.distributed import (
    background_group,
    barrier,
    broadcast_bytes,
    rank,
    sum_over_ranks,
)
from clipkit.errors import CheckpointError, ConfigError
from clipkit.files.writing import FileLock, sync_to_disk, write_atomic
from clipkit.formats.checkpoint import (
    BEST,
    COMPLETE,
    FORMAT,
    LATEST,
    SAVED,
    STEP_FOLDER,
    TRAINED,
    best_checkpoint,
    collect_tensors,
    describe_model,
    is_complete,
    latest_checkpoint,
    list_checksums,
    list_skipped_checkpoints,
    parse_step,
    read_json,
    step_folders,
)
from clipkit.formats.load import check_weights
from clipkit.model.clip import CLIP
from clipkit.model.lora import adapter_tensors
from clipkit.model.state_dicts import describe_misfit
from clipkit.samples.traits import TraitCounts, Traits
from clipkit.training.ema import AveragedWeights
from clipkit.training.guards import describe_bad_weights, find_first_not_finite
from clipkit.training.optim import expected_state
from clipkit.training.parallel import is_divided, local_part, put, ranks_of_replica, zeros_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.staging import DefaultStager

# The run folder while it is trained:
#
# RUN/.lock                     held by the training process; contains its ID and host
# RUN/config.toml               the configuration
# RUN/data.manifest             the training data, see data/shards/manifest.py

_LOCK = ".lock"
_CONFIG = "config.toml"
_MANIFEST = "data.manifest"
# written before the first step
_AT_START = {_LOCK, _CONFIG, _MANIFEST, "metrics.jsonl", "truncated_shards.jsonl", "tensorboard"}
_LOCK_SECONDS = 10.0  # to wait for a lock: ranks of a killed launcher end within a second
_LOCK_PID = re.compile(r"process ([0-9]+)(?!.*process)")  # the last one: a launcher, if there is one
_MAX_COUNT = 2**63


@contextmanager
def only_trainer_of(run: Path, config: Config, *, rank0: bool, launcher: int | None = None) -> Iterator[None]:
    """Create or reopen a run folder and hold its lock while training.

    A folder created here is removed if the block fails before it has written a step, score or checkpoint.

    Args:
        run: the folder.
        config: configuration of the run.
        rank0: whether this process is rank 0; other ranks do nothing here.
        launcher: process ID of the torchrun that started this process, if any.

    Raises:
        ConfigError: the folder cannot be created or written, another training holds it, it contains something else
            or a run of another configuration, or that run has made more steps.
        CheckpointError: its checkpoints are missing or damaged.
    """
    if not rank0:
        yield
        return
    action = "created"
    try:
        created = [folder for folder in (run, *run.parents) if not folder.exists()]
        run.mkdir(parents=True, exist_ok=True)
        action = "written"
        note = f" under torchrun, process {launcher}" if launcher else ""
        lock = FileLock(run / _LOCK, note=note, optional=True)
        _acquire(lock, run)
    except OSError as error:
        raise ConfigError(f"out = {format_value(str(run))} cannot be {action}: {error.strerror}") from error
    finished = False
    try:
        try:
            _claim(run, config)
        except OSError as error:
            raise ConfigError(f"the run folder {run} cannot be written: {error.strerror}") from error
        yield
        finished = True
    finally:
        with suppress(OSError):
            lock.release()
        if created and not finished:
            left = [path for path in run.iterdir() if not _is_partial(path)]
            unused = {path.name for path in left if path.name != "metrics.jsonl" or not path.stat().st_size}
            if len(unused) == len(left) and unused <= _AT_START:
                shutil.rmtree(run, ignore_errors=True)
                with suppress(OSError):  # another process has put something there
                    for folder in created[1:]:
                        folder.rmdir()


def _acquire(lock: FileLock, run: Path) -> None:
    def holder() -> str:
        return f" ({lock.holder})" if lock.holder else ""

    def waiting() -> None:
        print(f"waiting for another training{holder()} to leave {run}", file=sys.stderr, flush=True)

    if not lock.acquire(waiting, timeout=_LOCK_SECONDS):
        # the launcher's process ID: torchrun may restart a rank that ends alone
        pid = _LOCK_PID.search(lock.holder)
        stop = f"`kill -TERM {pid[1]}` saves and stops it; " if pid else ""
        raise ConfigError(
            f"another training{holder()} is writing to {run}: {stop}wait for it, or set another out="
        )


def _claim(run: Path, config: Config) -> None:
    stored = run / _CONFIG
    if stored.is_file() and ((run / "checkpoints").exists() or (run / SAVED).exists()):
        if differing := list_changes(load_config(stored), config):
            raise ConfigError(
                f"{run} holds a run of another configuration ({'; '.join(differing)}): "
                f"set out=… for a new run (model.weights={run} starts from this one's weights), "
                "or remove that folder"
            )
        checkpoint = latest_checkpoint(run)
        if checkpoint is not None and config.steps < (step := parse_step(checkpoint.name)):
            raise ConfigError(
                f"steps = {config.steps}, but {run} has made {step}: set steps={step} or more, "
                "or out=… for a new run"
            )
    elif not stored.is_file() and any(path.name != _LOCK and not _is_partial(path) for path in run.iterdir()):
        raise ConfigError(f"{run} exists and is not a run folder: set another out=")
    write_atomic(stored, to_toml(config))


def _is_partial(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".partial")


def manifest_file(run: Path) -> Path:
    """Return the file that records the manifest of the run's training data."""
    return run / _MANIFEST


_SUMS = ("bad_samples", *Traits._fields, "cut_captions", "without_group")  # of the steps so far


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """All state of the training loop besides weights and the optimizer's tensors.

    Sample order, augmentation and random draws are functions of the seed and the step, so the data need nothing but
    the step, and no generator is saved.
    """

    step: int  # updates made = global batches consumed
    data: str  # fingerprint of the training samples
    teacher: str = ""  # fingerprint of the teacher or its features; "" without one, and in old checkpoints
    seconds: float = 0.0  # of training so far
    bad_samples: int = 0
    transparent: int = 0  # transparent images drawn
    rotated: int = 0  # images drawn with an EXIF orientation other than upright
    clamped: int = 0  # deep images drawn with values outside the pixel range
    deep_colors: int = 0  # images drawn with 16 bits per color
    frames: int = 0  # images drawn with several frames
    cmyk: int = 0  # images drawn with CMYK colors
    pages: int = 0  # images drawn with several pages of one channel each
    extra_channels: int = 0  # images drawn with channels that are not used
    file_channels: int = 0  # sum of the channels of these images
    cut_captions: int = 0  # captions drawn that were longer than the context length
    without_group: int = 0  # samples drawn without a value of ``loss.same_field``
    skipped: int = 0  # updates skipped because the gradient was a spike
    usual_norm: float = 0.0  # of gradients, see clipkit/training/guards.py

    def next(
        self, counts: Mapping[str, int], *, seconds: float, is_spike: bool, usual_norm: float
    ) -> "LoopState":
        """Return the state after one more step, with its sums over ranks (``bad_samples``, …)."""
        sums = {name: getattr(self, name) + counts[name] for name in _SUMS}
        skipped = self.skipped + is_spike
        return replace(
            self, step=self.step + 1, seconds=seconds, skipped=skipped, usual_norm=usual_norm, **sums
        )

    @property
    def updates(self) -> int:
        """The number of steps whose update was made."""
        return self.step - self.skipped

    def figures(self) -> dict[str, float]:
        """Return what is recorded with the metrics."""
        return {name: getattr(self, name) for name in (*_SUMS, "skipped", "seconds")}

    def trait_counts(self, images: int) -> TraitCounts:
        """Return how many of the images drawn so far have each trait."""
        return TraitCounts(images=images, **{name: getattr(self, name) for name in Traits._fields})


def loop_state(stored: Mapping[str, Any], *, origin: Path) -> LoopState:
    """Build the state from the content of state.json."""
    try:
        state = LoopState(**stored)
    except TypeError as error:
        raise CheckpointError(f"{origin}: state.json is invalid: {error}") from error
    for field in fields(state):
        value = getattr(state, field.name)
        valid = type(value) is str if field.type is str else type(value) in (int, field.type)
        if not valid or (field.type is not str and not 0 <= value < _MAX_COUNT):  # NaN fails too
            raise CheckpointError(f"{origin}: state.json is invalid: {field.name} = {format_value(value)}")
    return state


def newest_checkpoint(run: Path) -> Path | None:
    """Return the newest checkpoint that rank 0 sees, on every rank; None if there is none."""
    newest = latest_checkpoint(run) if rank() == 0 else None
    name = broadcast_bytes(newest.name.encode() if newest else b"").decode()
    if not name:
        return None
    checkpoint = run / "checkpoints" / name
    if not (checkpoint / "state.json").is_file():
        raise CheckpointError(f"{checkpoint} is not visible on this host: put {run} on a shared filesystem")
    return checkpoint


def damaged_notes(newest: Path) -> list[str]:
    """Return a note on newer checkpoints that are skipped because they are damaged, if any."""
    bad = list_skipped_checkpoints(newest)
    return [f"note: {', '.join(bad)} is damaged or missing; using {newest.name} instead"] if bad else []


def planned_steps(folder: Path, *, otherwise: int) -> int:
    """Return ``steps`` of a checkpoint's configuration; ``otherwise`` if that cannot be read."""
    try:
        return load_config(folder / "config.toml").steps
    except ConfigError:  # only a note depends on it
        return otherwise


def optimizer_tensors(model: CLIP, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as ``<parameter name>/<state name>``, independent of the order of groups."""
    return {
        f"{name}/{key}": torch.as_tensor(value).contiguous()
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for key, value in optimizer.state[parameter].items()
    }


def restore_optimizer(
    model: CLIP, optimizer: Optimizer, tensors: Mapping[str, Tensor], *, origin: Path, partly: bool = False
) -> None:
    """Set an optimizer's state to what ``optimizer_tensors`` returned; both may be sharded.

    Args:
        model: the model, with the optimizer's parameters.
        optimizer: an optimizer of ``clipkit.training.optim``.
        tensors: the state.
        origin: source of the tensors, for error messages.
        partly: whether parameters may lack state because they have had no gradient yet.
    """
    parameters = dict(model.named_parameters())
    stored: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, kind = key.rpartition("/")
        stored.setdefault(name, {})[kind] = value
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = {name for name, parameter in parameters.items() if parameter.requires_grad} - stored.keys()
    if (missing and not partly) or any(id(parameters.get(name)) not in held for name in stored):
        raise CheckpointError(f"{origin}: the optimizer's state is for other parameters than the model has")
    for name, state in stored.items():
        expected = expected_state(optimizer, parameters[name])
        where = f"{origin}: the optimizer's state of {name}"
        if state.keys() != expected.keys():
            raise CheckpointError(
                f"{where} holds {', '.join(sorted(state))} instead of {', '.join(expected)}"
            )
        for kind, (shape, dtype) in expected.items():
            value = state[kind]
            if value.shape != shape or value.dtype != dtype:
                raise CheckpointError(
                    f"{where}: {kind} is {tuple(value.shape)} {value.dtype} instead of {tuple(shape)} {dtype}"
                )
    for name, state in stored.items():
        parameter = parameters[name]
        restored = {}
        for kind, value in state.items():
            if value.ndim:
                restored[kind] = zeros_of(parameter, value.shape, value.dtype)
                put(restored[kind], value)
            else:
                restored[kind] = value.to(parameter.device, copy=True)
        optimizer.state[parameter] = restored


def step_folder(run: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return run / "checkpoints" / f"step_{step:08d}"


Files = dict[str, dict[str, Tensor]]  # tensors of each file
_OBJECTIVE_STATE = "objective.safetensors"  # if the objective or a term has state


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time.

    Args:
        run: the run folder.
        settings: the run's configuration as TOML, stored with each checkpoint.
        keep: number of newest checkpoints to keep; 0 keeps all.
        newest: the newest checkpoint so far; None if there is none.
        objective_state: the tensors of ``ObjectiveState``, which updates change in place.
    """

    def __init__(
        self,
        run: Path,
        settings: str,
        *,
        keep: int,
        newest: Path | None = None,
        objective_state: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._objective_state = objective_state
        self._run = run
        self._settings = settings
        self._keep = keep
        self._root = run / "checkpoints"
        # damaged checkpoints do not count as kept
        self._damaged = set() if newest is None else set(list_skipped_checkpoints(newest))
        self._step = 0 if newest is None else read_json(newest / "state.json")["step"]
        self._saved = None if newest is None else self._step
        self._saved_at = time.monotonic()
        best = best_checkpoint(run)
        self._best = None if best is None else parse_step(best.name)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._copied: Future[Any] | None = None  # when the model may change again
        self._written: Future[Any] | None = None
        self._stager: DefaultStager | None = None
        # of the ranks that write a sharded model, once it is needed; None on other ranks
        self._group: ProcessGroup | None = None
        self._has_group = False

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint; 0 if there is none."""
        return self._saved or 0

    @property
    def minutes_since_save(self) -> float:
        """Minutes since the newest checkpoint was begun, or since the start."""
        return (time.monotonic() - self._saved_at) / 60

    def mark_best(self, step: int | None) -> None:
        """Make BEST name the checkpoint of a step, which is kept; remove BEST if there is none."""
        if rank():
            return
        pointer = self._root / BEST
        try:
            if step is not None and is_complete(self._folder(step)):
                write_atomic(pointer, self._folder(step).name + "\n", durable=True)
            else:
                pointer.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"{pointer} was not written: {error}") from error

    def save_now(
        self, model: CLIP, optimizer: Optimizer, state: LoopState, averaged: AveragedWeights | None = None
    ) -> None:
        """Save this step unless it is saved, and wait until every rank has done so; all ranks call this."""
        self.finish()
        if self._saved != state.step:
            self.begin(model, optimizer, state, averaged, best=self._best)
            self.finish()
        barrier()

    def begin(
        self,
        model: CLIP,
        optimizer: Optimizer,
        state: LoopState,
        averaged: AveragedWeights | None = None,
        *,
        best: int | None = None,
    ) -> None:
        """Start writing ``checkpoints/step_<8 digits>``, after the previous one is written; all ranks call this.

        Averaged weights become model.safetensors, and the weights in training trained.safetensors. ``best`` is the
        step with the best score so far, see ``mark_best``.

        Raises:
            CheckpointError: the previous checkpoint was not written, this one cannot be started, or its weights are
                not finite; existing checkpoints are unchanged.
        """
        self.finish()
        weights = adapter_tensors(model, collect_tensors(model))
        files = {"model.safetensors": weights, "optimizer.safetensors": optimizer_tensors(model, optimizer)}
        if averaged is not None:
            average = averaged.tensors()
            files["model.safetensors"] = {**weights, **average}
            files["trained.safetensors"] = {f"{name}{TRAINED}": weights[name] for name in average}
        if self._objective_state:
            files[_OBJECTIVE_STATE] = dict(self._objective_state)
        if name := find_first_not_finite(
            {**files["model.safetensors"], **files.get("trained.safetensors", {})}
        ):
            raise CheckpointError(describe_bad_weights(self._run, state.step, name, saved=self._saved))
        self._step = state.step
        self._saved_at = time.monotonic()
        self._best = best
        holders = ranks_of_replica(weights.values())
        if rank() and holders is None:
            self._saved = state.step
            return
        folder = self._folder(state.step)
        temporary = self._temporary()
        try:
            if not rank():
                for left in self._root.glob(".step_*"):  # by a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
                temporary.mkdir(parents=True)
                card = json.dumps(describe_model(model, temporary), indent=2)
                (temporary / "model.json").write_text(card + "\n")
                content = json.dumps({"format": FORMAT, **asdict(state)}, indent=2)
                (temporary / "state.json").write_text(content + "\n")
                (temporary / "config.toml").write_text(self._settings, encoding="utf-8")
        except OSError as error:
            raise self._failed(error) from error
        if holders is not None:
            barrier()
            # otherwise rank 0 would join only the shards that it sees
            if blind := int(sum_over_ranks(torch.tensor(int(not (temporary / "state.json").exists())))):
                raise CheckpointError(
                    f"{blind} ranks do not see {temporary}: with sharding, put the run folder on a filesystem "
                    "shared by all hosts"
                )
            if not self._has_group:
                self._group = background_group(holders)
                self._has_group = True
            if self._group is None:
                self._saved = state.step
                return
        staged = self._staging().stage({name: self._rows(tensors) for name, tensors in files.items()})
        self._copied = staged if isinstance(staged, Future) else None

        def write() -> None:
            contents = staged.result() if isinstance(staged, Future) else staged
            if holders is None:
                for name, tensors in contents.items():
                    save_file(tensors, temporary / name)
                self._commit(temporary, folder)
                return
            assert self._group is not None
            with _all_succeed(self._group):
                for name, tensors in contents.items():
                    save_file(tensors, temporary / f"{rank()}.{name}")
            with _all_succeed(self._group):
                if rank() == 0:
                    for name in contents:
                        _join_rows([temporary / f"{holder}.{name}" for holder in holders], temporary / name)
                    self._commit(temporary, folder)

        self._written = self._thread.submit(write)

    def wait_until_copied(self) -> None:
        """Wait until the last ``begin`` has its copy; call this before weights change."""
        if self._copied is not None:
            self._copied.result()

    def finish(self) -> None:
        """Wait until everything is written."""
        written = self._written
        self._written = None
        self._copied = None
        if written is None:
            return
        try:
            written.result()
        except (OSError, SafetensorError) as error:
            raise self._failed(error) from error
        finally:
            if self._stager is not None:
                # it holds a copy of the state, and in torch 2.11 it can be used only once
                self._stager.close()
                self._stager = None
        self._saved = self._step

    def finish_if_done(self) -> None:
        """Call ``finish`` if it does not have to wait."""
        if self._written is not None and self._written.done():
            self.finish()

    def close(self) -> None:
        """Finish writing and end the thread."""
        self._thread.shutdown()

    def _folder(self, step: int) -> Path:
        return step_folder(self._run, step)

    def _temporary(self) -> Path:
        return self._root / f".step_{self._step:08d}.partial"

    def _rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's rows of divided tensors, and on rank 0 the others."""
        return {
            name: local_part(tensor) for name, tensor in tensors.items() if rank() == 0 or is_divided(tensor)
        }

    def _staging(self) -> "DefaultStager":
        # imported by the first checkpoint, not before the first step: it takes half as long as importing torch
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        cuda = torch.cuda.is_available()
        if self._stager is None:
            self._stager = DefaultStager(StagingOptions(cuda, False, cuda, cuda))
        if cuda:
            torch.cuda.current_stream().synchronize()  # its own stream does not wait for the last update
        return self._stager

    def _commit(self, temporary: Path, folder: Path) -> None:
        (temporary / COMPLETE).write_text(list_checksums(temporary))
        for path in (path for path in temporary.rglob("*") if path.is_file()):
            path.chmod((temporary / COMPLETE).stat().st_mode & 0o777)  # safetensors makes files private
        for path in (*temporary.rglob("*"), temporary):
            sync_to_disk(path)
        self._damaged.discard(folder.name)
        replaced = folder.with_name(f".{folder.name}.replaced")
        if folder.exists():
            folder.rename(replaced)
        temporary.rename(folder)
        sync_to_disk(self._root)
        shutil.rmtree(replaced, ignore_errors=True)
        write_atomic(self._root / LATEST, folder.name + "\n", durable=True)
        self.mark_best(self._best)
        (self._run / SAVED).touch()
        if self._keep:
            # the one just written stays, even if training was resumed from an older step
            others = [
                other
                for other in step_folders(self._root)
                if other != folder and other.name not in self._damaged and is_complete(other)
            ]
            best = best_checkpoint(self._run)
            for old in others[self._keep - 1 :]:
                if old == best:
                    continue
                removed = old.with_name(f".{old.name}.removed")  # a partly deleted folder is no checkpoint
                old.rename(removed)
                shutil.rmtree(removed, ignore_errors=True)

    def _failed(self, error: BaseException) -> CheckpointError:
        shutil.rmtree(self._temporary(), ignore_errors=True)
        return CheckpointError(f"the checkpoint of step {self._step} was not written: {error}")


@contextmanager
def _all_succeed(group: "ProcessGroup") -> Iterator[None]:
    """Wait until all ranks of a group have left the block; raise the error of one of them on all."""
    error = ""
    try:
        yield
    except (OSError, SafetensorError) as caught:
        error = str(caught)
    errors = [error] * dist.get_world_size(group)
    dist.all_gather_object(errors, error, group=group)
    if first := next(filter(None, errors), ""):
        raise OSError(first)


def _join_rows(parts: list[Path], path: Path) -> None:
    """Join files with the rows of tensors, in the order of rows; the first file has the undivided tensors too.

    The host needs memory for the joined file.
    """
    contents = [load_file(part) for part in parts]
    joined = {}
    for name, tensor in contents[0].items():
        rows = [content[name] for content in contents if name in content]
        joined[name] = tensor if len(rows) == 1 else torch.cat(rows)
    save_file(joined, path)
    for part in parts:
        part.unlink()


def save_checkpoint(
    run: Path, model: CLIP, optimizer: Optimizer, state: LoopState, config: Config, *, keep: int
) -> Path:
    """Write one checkpoint, see ``CheckpointWriter``, and return its folder."""
    writer = CheckpointWriter(run, to_toml(config), keep=keep)
    try:
        writer.begin(model, optimizer, state)
        writer.finish()
    finally:
        writer.close()
    return step_folder(run, state.step)


def load_training(
    folder: Path,
    model: CLIP,
    optimizer: Optimizer,
    averaged: AveragedWeights | None = None,
    *,
    partly: bool = False,
    objective_state: Mapping[str, Tensor] | None = None,
) -> LoopState:
    """Load a checkpoint's weights and optimizer state, and return the loop's state.

    Args:
        folder: the checkpoint.
        model: the model on its device, sharded or not, independent of how the checkpoint was written.
        optimizer: optimizer of the model.
        averaged: averaged weights, if the run averages them.
        partly: whether parameters may lack optimizer state because they are unfrozen later.
        objective_state: tensors that get the values of the objective's state, see ``ObjectiveState``.
    """
    stored = read_json(folder / "state.json")
    if stored.pop("format", None) != FORMAT:
        raise CheckpointError(f"{folder}: this version cannot read the format of state.json")
    state = loop_state(stored, origin=folder)
    if STEP_FOLDER.fullmatch(folder.name) and state.step != parse_step(folder.name):
        raise CheckpointError(f"{folder}: state.json is of step {state.step}")
    own_names = adapter_tensors(model, model.state_dict()).keys()
    base = {name: tensor for name, tensor in model.state_dict().items() if name not in own_names}
    weights = {**base, **_load(folder / "model.safetensors")}
    _check(model, weights, folder)
    if averaged is not None:
        averaged.restore(weights, origin=folder)
        trained = _load(folder / "trained.safetensors")
        weights |= {name.removesuffix(TRAINED): tensor for name, tensor in trained.items()}
        _check(model, weights, folder)
    elif (folder / "trained.safetensors").exists():
        raise CheckpointError(f"{folder}: its weights are averaged; set optim.average as before")
    for name, adapter in adapter_tensors(model, model.state_dict()).items():
        put(adapter, weights[name])
    partly = partly or not state.step  # before the first update an optimizer has no state
    restore_optimizer(model, optimizer, _load(folder / "optimizer.safetensors"), origin=folder, partly=partly)
    if objective_state:
        path = folder / _OBJECTIVE_STATE
        values = _load(path)
        if misfit := describe_misfit(objective_state, values):
            raise CheckpointError(f"{path}: {misfit}")
        for name, tensor in objective_state.items():
            tensor.copy_(values[name])
    return state


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _check(model: CLIP, weights: Mapping[str, Tensor], folder: Path) -> None:
    check_weights(model, weights, origin=folder)
    for name, tensor in model.state_dict().items():
        if weights[name].dtype != tensor.dtype:  # a conversion would change the run
            raise CheckpointError(f"{folder}: {name} is {weights[name].dtype}, not {tensor.dtype}")

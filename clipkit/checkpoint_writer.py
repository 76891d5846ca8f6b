"""Writes the checkpoints of a run while it trains on; what is in one, clipkit/checkpoint.py says.

The state is copied at once (on a GPU: while the next step is computed), written aside by a thread, synced and
renamed, and only then LATEST moves: whatever ends the process, the former checkpoint stays whole. Weights that are
not finite are not written, so that they never take the place of good ones. A model on one rank or replicated is
written by the chief; of a sharded one every rank writes its shards to the folder, which all share, and the chief
joins them to the same files, so that it does not matter later how many ranks there were.
"""

import json
import os
import resource
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from clipkit.averaging import AveragedWeights
from clipkit.checkpoint import (
    COMPLETE,
    FORMAT,
    LATEST,
    SAVED,
    TRAINED,
    is_complete,
    listing,
    passed_over,
    step_folders,
)
from clipkit.config import Config
from clipkit.config_file import to_toml
from clipkit.distributed import background_group, barrier, rank, sum_over_ranks
from clipkit.errors import CheckpointError
from clipkit.model import CLIP
from clipkit.model_folder import model_card, weights_of
from clipkit.not_finite import line_of_weights, spoilt_weight
from clipkit.training_state import LoopState, optimizer_tensors

__all__ = ["CheckpointWriter", "save_checkpoint"]

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
        """Every rank writes its shards to one folder, or the chief would join only those that it sees."""
        blind = sum_over_ranks(torch.tensor(int(not (aside / "state.json").exists())))
        if blind:
            raise CheckpointError(
                f"{int(blind)} ranks do not see {aside}: with sharding, the run folder must lie on a disk that all "
                "hosts share"
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
            _sync(path)
        self._damaged.discard(folder.name)
        replaced = folder.with_name(f".{folder.name}.replaced")
        if folder.exists():
            folder.rename(replaced)
        aside.rename(folder)
        _sync(self._root)
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
    aside = root / f".{LATEST}.partial"
    aside.write_text(name + "\n")
    _sync(aside)
    aside.replace(root / LATEST)
    _sync(root)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

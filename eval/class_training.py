"""Trains classifiers by ``train.py``: labelled pictures as shards, a head that it begins with, and its runs.

Everything lies in one folder and is made once, whichever process comes first. A run that was stopped goes on.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch

from clipkit.architectures import ARCHITECTURES, QUICKGELU
from clipkit.checkpoint import latest_checkpoint, step_of
from clipkit.decode import decode_image
from clipkit.errors import CheckpointError, ConfigError, DataError
from clipkit.family import architecture
from clipkit.model import CLIP
from clipkit.model_folder import save_model
from data.remote.node_lock import NodeLock
from data.writer import DatasetWriter, Record
from eval.dataset import TEST, EvalDataset
from eval.results import latest_results

__all__ = ["ClassTraining", "Diverged", "Picture", "only_one"]

_PROGRAM = Path(__file__).parents[1] / "train.py"
_CONFIG = _PROGRAM.parent / "configs" / "finetune.toml"
_FORMATS = {b"\x89P": "png", b"RI": "webp", b"GI": "gif", b"BM": "bmp", b"II": "tif", b"MM": "tif"}
_PICTURES, _HEAD, _NAMES = "pictures", "head", "classnames.txt"
_HELD = "another training"  # says train.py of a run that an orphan of a killed process still trains
_WAIT = 1.0  # seconds between two looks at what another process does
_MINUTES = 10  # between two checkpoints
_THREADS, _PIECE = 4, 256  # that read pictures, and how many of these at a time
_KEPT = "what was trained is kept, and the same command goes on from there"

_NOT_FINITE = "not_finite*.jsonl"  # that a training leaves whose loss or gradient is no number

Picture: TypeAlias = tuple[EvalDataset, int, int]  # a dataset, the number in it, the class


class Diverged(DataError):
    """The loss or the gradient of a training became a number that is not finite."""


@dataclass(frozen=True, kw_only=True)
class ClassTraining:
    """A folder of trainings of one model on one set of labelled pictures.

    Attributes:
        folder: where they lie.
        epochs: times that each picture is seen.
        batch_size: pictures of a step over all devices; fewer where there are fewer.
        seed: of the order and the crops.
        device: where to train; on CUDA, all GPUs of this machine.
    """

    folder: Path
    epochs: float
    batch_size: int
    seed: int
    device: torch.device

    def prepare(
        self,
        head: CLIP,
        names: Sequence[str],
        learn: Sequence[Picture],
        tune: Sequence[Picture],
    ) -> None:
        """Write the head and the pictures, unless they are there.

        Args:
            head: what trainings begin with, see ``with_class_head``.
            names: of its classes.
            learn: the pictures to learn from.
            tune: those to choose a learning rate on.

        Raises:
            DataError: a picture cannot be read or decoded.
            CheckpointError: the head cannot be written.
        """
        if not (self.folder / _HEAD).exists():
            save_model(head, self.folder / _HEAD)
        if (self.folder / _PICTURES).exists():
            return
        for left in self.folder.glob(f".{_PICTURES}.partial-*"):  # by one that was killed
            shutil.rmtree(left, ignore_errors=True)
        with DatasetWriter(self.folder / _PICTURES) as writer:
            for split, pictures in (("train", learn), (TEST, tune)):
                for place, (image, label) in enumerate(_read(pictures)):
                    record = Record(
                        key=f"{place:08d}",
                        image=image,
                        extension=_FORMATS.get(image[:2], "jpg"),
                        caption=names[label],
                        label=label,
                    )
                    writer.write(split, record)
            writer.finish({"name": "val"}, class_names=names, templates=["{c}"])

    def tuned(self, head: CLIP, rate: float, say: str) -> Mapping[str, float]:
        """Train on the pictures to learn from; the metrics of those to tune on at the end."""
        run = self.folder / f"rate_{rate!r}"
        steps = self._train(
            head, run, rate, ("train",), say, "eval.data=" + json.dumps([str(self.folder / _PICTURES)])
        )
        lines = [line for line in latest_results(run / "results.jsonl") if line.get("step") == steps]
        return {line["metric"]: float(line["value"]) for line in lines}

    def final(self, head: CLIP, rate: float, say: str) -> Path:
        """Train on all pictures; the run."""
        run = self.folder / f"final_{rate!r}"
        splits = [one for one in ("train", TEST) if (self.folder / _PICTURES / one).is_dir()]
        self._train(head, run, rate, splits, say, "eval.data=[]")
        return run

    def _train(self, head: CLIP, run: Path, rate: float, splits: Sequence[str], say: str, *more: str) -> int:
        """Train to the end, whatever was made before; how many steps that are."""
        pictures, log = self.folder / _PICTURES, run.with_name(f"{run.name}.log")
        counts: dict[str, int] = json.loads((pictures / "card.json").read_text(encoding="utf-8"))["samples"]
        samples = sum(counts[one] for one in splits)
        batch_size = max(2, min(self.batch_size, samples))
        steps = max(1, round(self.epochs * samples / batch_size))
        given: Mapping[str, object] = {
            **_model_settings(head), "model.weights": str(self.folder / _HEAD),
            "model.text": f"classes:{pictures / _NAMES}", "loss.name": "classes", "loss.same": "negatives",
            "data.train": [str(pictures / one) for one in splits], "data.last": "wrap", "data.max_bad": 0.0,
            "data.workers": min(4, os.cpu_count() or 1), "out": str(run), "seed": self.seed, "steps": steps,
            "batch_size": batch_size, "optim.lr": rate, "optim.warmup": steps // 10, "optim.average": 0.0,
            "lock.unfreeze_every": 0, "checkpoint.every_steps": 0, "checkpoint.every_minutes": _MINUTES,
            "checkpoint.keep": 1, "eval.every_steps": 0, "log.tensorboard": False,
        }  # fmt: skip
        settings = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items()]
        print(f"{say}; follow it in {log}", file=sys.stderr, flush=True)
        told = False
        while error := self._run([*settings, *more], log, batch_size):
            if _HELD not in error:
                kind = Diverged if any(run.glob(_NOT_FINITE)) else DataError
                raise kind(f"{say}: {error.removeprefix('error: ')} (all of it: {log})")
            if not told:
                print(f"{error.removeprefix('error: ')}; waiting for it", file=sys.stderr, flush=True)
                told = True
            time.sleep(_WAIT)
        made = latest_checkpoint(run)
        if made is None or step_of(made.name) < steps:  # train.py was asked to stop, and not by us
            at = f" at step {step_of(made.name)} of {steps}" if made is not None else ""
            raise DataError(f"{say}: it was stopped{at}; {_KEPT}")
        return steps

    def _run(self, settings: Sequence[str], log: Path, batch_size: int) -> str:
        """Its last line where it fails; nothing where it ends well or was asked to stop."""
        # normalization by batches needs two pictures on each
        gpus = min(torch.cuda.device_count(), batch_size // 2) if self.device.type == "cuda" else 0
        launch = (
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)] if gpus > 1 else []
        )
        environment = {**os.environ, **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})}
        command = [sys.executable, *launch, str(_PROGRAM), str(_CONFIG), *settings]
        with log.open("w", encoding="utf-8") as file, _stopped_like_ctrl_c():
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
            try:
                status = process.wait()
            except KeyboardInterrupt as stop:
                process.terminate()  # it saves, and goes on from there the next time
                process.wait()
                raise KeyboardInterrupt(_KEPT) from stop
        if status == 0 or status > 128:  # 128 + the signal that has asked it to stop
            return ""
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line for line in lines if line.startswith("error: ")), f"it ended with status {status}")


def _read(pictures: Sequence[Picture]) -> Iterator[tuple[bytes, int]]:
    """The bytes and the class of each, in order; a training would find one that does not decode much later."""

    def read(picture: Picture) -> tuple[bytes, int]:
        dataset, number, label = picture
        try:
            image = dataset.shards.read(number).image
            decode_image(image)
        except DataError as error:
            raise DataError(f"{dataset.where(number)}: {error}; mend or remove it") from error
        return image, label

    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(pictures), _PIECE):
            yield from pool.map(read, pictures[start : start + _PIECE])


def _model_settings(head: CLIP) -> dict[str, object]:
    """The settings with which train.py builds the same image tower; its text tower is not looked at.

    A model has lost its name where it has a bias (of the sigmoid loss) or pictures of another size.

    Raises:
        ConfigError: it has none, as train.py knows no such image tower by a name.
    """
    name, *others = head.name.split(" + ")
    image = next((one for one in others if one.startswith("timm:")), "")
    wanted = head.architecture
    size = wanted.vision.image_size
    for known in (name, *ARCHITECTURES, *(one + QUICKGELU for one in ARCHITECTURES)):
        shape = None
        with suppress(ConfigError):
            shape = architecture(known, image=image, image_size=size)
        if shape is not None:  # how fresh weights would be drawn does not count: exports do not tell of it
            shape = replace(shape, logit_bias=wanted.logit_bias, small_data=wanted.small_data)
        if shape is not None and replace(shape, text=wanted.text) == wanted:
            return {"model.name": known, "model.image": image, "model.image_size": size}
    raise ConfigError(
        "fine-tuning needs a model whose architecture has a name that train.py knows, "
        f"{f'not {head.name!r}' if head.name else 'and this one has none'}: train one by model.name and model.image"
    )


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Wait until no other process trains in a folder, which is made if it is not there.

    Raises:
        ConfigError: its name cannot be a training's.
        DataError: it cannot be made or written, or what lies there is damaged.
    """
    if "{" in str(folder) or "}" in str(folder):
        raise ConfigError(
            f"{folder} has braces, which would stand for several names: give another folder by --runs"
        )
    made = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = True
        lock, told = NodeLock(folder / ".lock"), False
        while not lock.try_acquire():
            if not told:
                print(f"another process trains in {folder}: waiting for that", file=sys.stderr, flush=True)
                told = True
            time.sleep(_WAIT)
        try:
            yield
        finally:
            lock.release()
    except CheckpointError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        if made and not folder.is_dir():
            raise DataError(f"{folder} was removed meanwhile: the same command begins again") from error
        what = f"{error.filename or folder}: {error.strerror or error}"
        raise DataError(f"{what}: make room there, or give another folder by --runs; {_KEPT}") from error


@contextmanager
def _stopped_like_ctrl_c() -> Iterator[None]:
    """Have SIGTERM, and SIGHUP unless nohup ignores it, raise KeyboardInterrupt: no training is left alone."""
    numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    try:
        for number in numbers:
            signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)

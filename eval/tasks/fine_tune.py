"""Fine-tuning: the image tower and a head of classes trained together on the training split, by ``train.py``.

The head begins as the zero-shot classifier of the dataset's prompts, so that the training begins with its answers
(WiSE-FT, Wortsman et al. 2022, arXiv 2109.01903), and images are told apart by their cosine with its rows. Of
several learning rates the one is taken that is best on validation images; then the model is trained once more, on
training and validation images together, and tested once. Validation images are those of the split ``val``, or a
fifth of each class of ``train``, as for the linear probe. With one rate there is nothing to choose.

Trainings are ``train.py``'s own, by configs/finetune.toml with all layers trained from the start and no averages.
They, the rates that were tried and a copy of the images lie in a folder that their inputs name: what was stopped
goes on, and nothing is trained twice.

Letters in shape comments: N images, O embedding dimension, C classes.
"""

import hashlib
import json
import logging
import math
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

import clipkit
from clipkit.errors import CheckpointError, ConfigError, DataError
from clipkit.files.atomic import FileLock, write_atomic
from clipkit.files.decode import decode_image
from clipkit.formats.checkpoint import latest_checkpoint, model_hash, save_model, step_of
from clipkit.model.architectures import ARCHITECTURES, QUICKGELU
from clipkit.model.class_head import with_class_head
from clipkit.model.clip import CLIP
from clipkit.model.names import architecture
from data.remote.cache import cache_folder
from data.shards.writer import DatasetWriter, Record
from eval.datasets.dataset import TEST, EvalDataset, distinct_names, labels_of
from eval.features.encoder import Encoder, dtype_name
from eval.metrics import Answers
from eval.results.details import prediction_details
from eval.results.scores import Score, latest_results
from eval.tasks import RATES, Options
from eval.tasks.classify import classification_scores, fitting_metrics
from eval.tasks.logistic import carve
from eval.tasks.probe import check_carved, check_classes, learned, tuning_metric
from eval.tasks.subject import Outcome, Subject

__all__ = ["ClassTraining", "Diverged", "FineTuned", "Picture", "fine_tune", "only_one", "run_fine_tune"]


# --------------------------------------------------------------------------------------------------------------
# Trains classifiers by ``train.py``: labelled images as shards, a head that it begins with, and its runs.
#
# Everything lies in one folder and is made once, whichever process comes first. A run that was stopped goes on.

_PROGRAM = Path(__file__).parents[2] / "train.py"
_CONFIG = _PROGRAM.parent / "configs" / "finetune.toml"
_FORMATS = {b"\x89P": "png", b"RI": "webp", b"GI": "gif", b"BM": "bmp", b"II": "tif", b"MM": "tif"}
_PICTURES, _HEAD, _NAMES = "pictures", "head", "classnames.txt"
_HELD = "another training"  # says train.py of a run that an orphan of a killed process still trains
_WAIT = 1.0  # seconds between two looks at what another process does
_MINUTES = 10  # between two checkpoints
_THREADS, _PIECE = 4, 256  # that read images, and how many of these at a time
_KEPT = "what was trained is kept, and the same command goes on from there"

_NOT_FINITE = "not_finite*.jsonl"  # that a training leaves whose loss or gradient is no number

Picture: TypeAlias = tuple[EvalDataset, int, int]  # a dataset, the number in it, the class


class Diverged(DataError):
    """The loss or the gradient of a training became a number that is not finite."""


@dataclass(frozen=True, kw_only=True)
class ClassTraining:
    """A folder of trainings of one model on one set of labelled images.

    Attributes:
        folder: where they lie.
        epochs: times that each image is seen.
        batch_size: images of a step over all devices; fewer where there are fewer.
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
        """Write the head and the images, unless they are there.

        Args:
            head: what trainings begin with, see ``with_class_head``.
            names: of its classes.
            learn: the images to learn from.
            tune: those to choose a learning rate on.

        Raises:
            DataError: an image cannot be read or decoded.
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
        """Train on the images to learn from; the metrics of those to tune on at the end."""
        run = self.folder / f"rate_{rate!r}"
        steps = self._train(
            head, run, rate, ("train",), say, "eval.data=" + json.dumps([str(self.folder / _PICTURES)])
        )
        lines = [line for line in latest_results(run / "results.jsonl") if line.get("step") == steps]
        return {line["metric"]: float(line["value"]) for line in lines}

    def final(self, head: CLIP, rate: float, say: str) -> Path:
        """Train on all images; the run."""
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
        # normalization by batches needs two images on each
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
            image = dataset.images.read(number)
            decode_image(image)
        except DataError as error:
            raise DataError(f"{dataset.where(number)}: {error}; mend or remove it") from error
        return image, label

    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(pictures), _PIECE):
            yield from pool.map(read, pictures[start : start + _PIECE])


def _model_settings(head: CLIP) -> dict[str, object]:
    """The settings with which train.py builds the same image tower; its text tower is not looked at.

    A model has lost its name where it has a bias (of the sigmoid loss) or images of another size.

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
        lock, told = FileLock(folder / ".lock"), False
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


# --------------------------------------------------------------------------------------------------------------

_RATES = "rates.json"
_log = logging.getLogger("eval")
_DIGITS = 16

_Pictures = list[Picture]


@dataclass(frozen=True, kw_only=True, eq=False)
class FineTuned:
    """What came of it.

    Attributes:
        scores: of the test images.
        answers: the model's.
        setting: as in the scores.
        run: the training whose model it is; ``clipkit.load`` takes it.
        rate: its learning rate.
        tuned_on: the images that it was chosen on; "" where there was one.
    """

    scores: tuple[Score, ...]
    answers: Answers
    setting: str
    run: Path
    rate: float
    tuned_on: str


def fine_tune(
    subject: Subject,
    *,
    epochs: float = 10,
    rates: Sequence[float] = RATES,
    batch_size: int = 128,
    seed: int = 0,
    runs: Path | None = None,
) -> FineTuned:
    """The subject's metrics of the model fine-tuned to the dataset.

    Args:
        subject: with a split ``train`` of one label per image, and ``val`` or not.
        epochs: times that each image is seen.
        rates: learning rates to choose from.
        batch_size: images of a step.
        seed: of the images to tune on where the dataset has none for it, and of the order of the others.
        runs: where the trainings lie; "fine-tune" in the cache folder if not given.

    Raises:
        DataError: nothing to learn from, or a training has failed.
        ConfigError: the model cannot be trained by name, or several processes are at this.
    """
    if subject.encoder.ranks.world > 1:
        raise ConfigError("fine-tune starts processes of its own on all GPUs: run it without torchrun")
    rates = tuple(map(float, rates))
    _check_options(epochs, rates, batch_size)
    dataset = subject.dataset
    metrics = fitting_metrics(dataset, subject.metrics)
    learn, tune, tuned_on = _splits(subject, seed, choose=len(rates) > 1)
    names = distinct_names(dataset.class_names)
    head = with_class_head(subject.encoder.model, names, subject.class_weights().T)
    folder = _runs_folder(runs) / _name(subject, head, learn, tune, (epochs, batch_size, seed))
    training = ClassTraining(
        folder=folder, epochs=epochs, batch_size=batch_size, seed=seed, device=subject.device
    )
    metric = tuning_metric(metrics if subject.metrics else (), labels_of(dataset))
    with only_one(folder):
        training.prepare(head, names, learn, tune)
        rate = rates[0] if len(rates) == 1 else _best(training, head, rates, metric, dataset.name)
        run = training.final(head, rate, f"fine-tuning on {dataset.name} at rate {rate:g}, for the test")
        model = clipkit.load(run, device=str(subject.device))
    answers = _answers(subject, model, names)
    setting = f"{epochs:g} epochs"
    scores = classification_scores(answers, task="fine-tune", metrics=metrics, setting=setting)
    return FineTuned(
        scores=tuple(scores), answers=answers, setting=setting, run=run, rate=rate,
        tuned_on=tuned_on,
    )  # fmt: skip


def _splits(subject: Subject, seed: int, *, choose: bool) -> tuple[_Pictures, _Pictures, str]:
    """Images to learn from, images to tune on, and what the latter are called."""
    dataset = subject.dataset
    train = learned(subject, "train", "fine-tuning", unseen="which prompts alone tell of")
    labels = labels_of(train)
    if labels.ndim != 1:
        raise DataError(f"dataset {dataset.name} has several labels per image, fine-tuning takes one")
    # images that are scored are not tuned on
    val = subject.split("val") if dataset.split != "val" else None
    if val is not None:
        check_classes(dataset, val)
        return _pictures(train), _pictures(val), "val" if choose else ""
    if not choose:
        return _pictures(train), [], ""
    kept, tuned = carve(labels, revision=train.revision, seed=seed)
    try:
        check_carved(train, labels, tuned)
    except DataError as error:
        raise DataError(f"{error}; one rate, by --rates, needs none") from error
    return _pictures(train, kept.tolist()), _pictures(train, tuned.tolist()), "a fifth of train"


def _pictures(dataset: EvalDataset, chosen: Sequence[int] | None = None) -> _Pictures:
    labels = labels_of(dataset).tolist()
    return [
        (dataset, number, labels[number]) for number in (range(len(labels)) if chosen is None else chosen)
    ]


def _check_options(epochs: float, rates: Sequence[float], batch_size: int) -> None:
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise ConfigError(f"rates = {list(rates)} does not fit: one learning rate above 0, or several")
    if not 0 < epochs < math.inf or batch_size < 1:
        raise ConfigError(f"epochs = {epochs} and batch_size = {batch_size} do not fit: both must be above 0")


def _runs_folder(given: Path | None) -> Path:
    try:
        return cache_folder() / "fine-tune" if given is None else given.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"--runs {given}: {error}") from error


def _name(subject: Subject, head: CLIP, learn: _Pictures, tune: _Pictures, options: tuple[float, ...]) -> str:
    """Of the folder: the dataset's, and a digest of all that trainings depend on but the rate.

    The head's rows are named by what they are made of: their last bits depend on which texts were encoded together.
    """
    model, dataset = subject.encoder.model, subject.dataset
    of_head = [model_hash(model), dtype_name(model), dataset.prompts(), head.architecture.to_dict()]
    digest = hashlib.sha256(json.dumps([*of_head, *options]).encode())
    for pictures in (learn, tune):
        of = [[one.split, one.stamp, number, label] for one, number, label in pictures]
        digest.update(json.dumps(of).encode())
    plain = "".join(c if c.isalnum() or c in "-_" else "_" for c in dataset.name)[:40]
    return f"{plain}-{digest.hexdigest()[:_DIGITS]}"


def _best(training: ClassTraining, head: CLIP, rates: Sequence[float], metric: str, name: str) -> float:
    """The rate that gives most on the images to tune on; of equals the first.

    Raises:
        DataError: all diverge, or a training has failed.
    """
    tried = _tried(training, head, rates, f"fine-tuning on {name}")
    values = {rate: tried[f"{rate!r}"] for rate in rates}
    if wild := [f"{rate:g}" for rate, value in values.items() if not value]:
        if len(wild) == len(rates):
            every = ", ".join(wild)
            raise DataError(f"fine-tuning on {name} diverges at all of the rates {every}: give lower --rates")
        _log.warning("dataset %s: at the rates %s the training diverges", name, ", ".join(wild))
    rate = max(rates, key=lambda one: values[one].get(metric, values[one].get("acc1", -math.inf)))
    if rate in (min(rates), max(rates)):
        _log.warning(
            "dataset %s: of the rates %s, the %s is best: others beyond it may be better",
            name,
            ", ".join(f"{one:g}" for one in sorted(rates)),
            "lowest" if rate == min(rates) else "highest",
        )
    return rate


def _tried(
    training: ClassTraining, head: CLIP, rates: Sequence[float], what: str
) -> Mapping[str, Mapping[str, float]]:
    """What each rate gives on the images to tune on, nothing where it diverges; kept, the trainings are not."""
    file = training.folder / _RATES
    tried = _read_tried(file)
    for number, rate in enumerate(rates, start=1):
        if f"{rate!r}" not in tried:
            say = f"{what} at rate {rate:g}, {number} of {len(rates)}"
            try:
                tried[f"{rate!r}"] = training.tuned(head, rate, say)
            except Diverged:
                tried[f"{rate!r}"] = {}
            write_atomic(file, json.dumps(tried))
        shutil.rmtree(training.folder / f"rate_{rate!r}", ignore_errors=True)
    return tried


def _read_tried(file: Path) -> dict[str, Mapping[str, float]]:
    """What was kept; a file that is damaged holds nothing, and its trainings are made again."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    kept = found.items() if isinstance(found, dict) else ()
    return {rate: values for rate, values in kept if isinstance(values, dict)}


@torch.no_grad()
def _answers(subject: Subject, model: CLIP, names: Sequence[str]) -> Answers:
    encoder = Encoder(model, store=subject.encoder.store, batch_size=subject.encoder.batch_size)
    return Answers(
        subject.dataset,
        encoder.images(subject.dataset).projected,
        torch.as_tensor(clipkit.encode_text(names, model)).T.contiguous(),
        float(model.logit_scale.exp()),
        subject.device,
    )


def run_fine_tune(subject: Subject, options: Options) -> Outcome:
    """The task ``fine-tune``."""
    found = fine_tune(
        subject,
        epochs=options.epochs,
        rates=options.rates,
        batch_size=options.fine_tune_batch,
        seed=options.seed,
        runs=options.runs,
    )
    _log.warning("dataset %s: the fine-tuned model is %s", subject.dataset.name, found.run)
    if not options.details:
        return Outcome(scores=list(found.scores))
    top = found.answers.top
    details = prediction_details(
        subject.dataset,
        top.classes[:, 0],
        task="fine-tune",
        setting=found.setting,
        confidence=top.probabilities[:, 0],
    )
    details = replace(details, tuned_on=found.tuned_on, chosen_rate=found.rate)
    return Outcome(scores=list(found.scores), details=[details])

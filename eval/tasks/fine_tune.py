"""The task ``fine-tune``: train the image tower and a classification head on the training split with ``train.py``.

The head starts as the zero-shot classifier (WiSE-FT, Wortsman et al. 2022, arXiv 2109.01903), or with random rows
if the model has a head of other classes; logits are cosines with its rows. Of several learning rates the best on
validation images is chosen; the model is then trained again, on training and validation images, and tested once.
Trainings follow configs/finetune.toml with all layers trained from the start and no weight averages.

The trainings, the scores by rate and a copy of the images are stored in a folder named after a digest of their
inputs: interrupted trainings resume, and nothing is trained twice.
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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import clipkit
from clipkit.errors import CheckpointError, ConfigError, DataError
from clipkit.files import FileLock, write_atomic
from clipkit.formats import latest_checkpoint, model_hash, parse_step, save_model, serialize_architecture
from clipkit.model import CLIP, attach_class_head
from clipkit.samples import decode_image
from clipkit.samples.remote import cache_folder
from data.shards.writer import DatasetWriter, Record
from eval.datasets.dataset import TEST, EvalDataset, make_distinct, require_labels
from eval.features.encoder import Encoder, dtype_name
from eval.metrics import Answers
from eval.results.details import prediction_details
from eval.results.records import read_results
from eval.tasks import Options
from eval.tasks.classify import add_items, classification_scores, fitting_metrics
from eval.tasks.probe import NothingToTuneOn, draw_examples, learn_and_tune, training_split, tuning_metric
from eval.tasks.subject import Outcome, Subject

_log = logging.getLogger("eval")
_PROGRAM = Path(__file__).parents[2] / "train.py"
_CONFIG = _PROGRAM.parent / "configs" / "finetune.toml"
_FORMATS = {b"\x89P": "png", b"RI": "webp", b"GI": "gif", b"BM": "bmp", b"II": "tif", b"MM": "tif"}
_IMAGES = "pictures"
_HEAD = "head"
_HELD = "another training"  # in train.py's error about a run that an orphaned process still trains
_WAIT = 1.0  # seconds between two checks of another process
_KEPT = "progress is saved; run the same command again to continue"

LabelledImage = tuple[EvalDataset, int, int]  # a dataset, the number of the image, its class


class Diverged(DataError):
    """The loss or the gradient of a training became NaN or infinite."""


@dataclass(frozen=True, kw_only=True)
class ClassTraining:
    """A folder of trainings of one model on one set of images.

    Attributes:
        folder: the folder.
        epochs: number of epochs.
        batch_size: over all devices; reduced to the number of images.
        seed: seed of the order and the crops.
        device: device of the trainings; on CUDA, all GPUs of this machine are used.
        image_size: side of the images in pixels; 0: the model's.
    """

    folder: Path
    epochs: float
    batch_size: int
    seed: int
    device: torch.device
    image_size: int = 0

    def prepare(
        self,
        head: CLIP,
        names: Sequence[str],
        learn: Sequence[LabelledImage],
        tune: Sequence[LabelledImage],
    ) -> None:
        """Write the head and the images unless they exist."""
        if not (self.folder / _HEAD).exists():
            save_model(head, self.folder / _HEAD)
        if (self.folder / _IMAGES).exists():
            return
        # of a killed process
        for partial in self.folder.glob(f".{_IMAGES}.partial-*"):
            shutil.rmtree(partial, ignore_errors=True)
        with DatasetWriter(self.folder / _IMAGES) as writer:
            for split, images in (("train", learn), (TEST, tune)):
                for i, (image, label) in enumerate(_read_images(images)):
                    record = Record(
                        key=f"{i:08d}",
                        image=image,
                        extension=_FORMATS.get(image[:2], "jpg"),
                        caption=names[label],
                        label=label,
                    )
                    writer.write(split, record)
            writer.finish({"name": "val"}, class_names=names, templates=["{c}"])

    def train_to_tune(self, head: CLIP, rate: float, title: str) -> Mapping[str, float]:
        """Train on the images to learn from; return the metrics of the images to tune on."""
        run = self.folder / f"rate_{rate!r}"
        steps = self._train(head, run, rate, ("train",), title, [str(self.folder / _IMAGES)])
        lines = read_results(run / "results.jsonl")
        # a resumed training may have scored the last step twice: the last line counts
        return {line["metric"]: float(line["value"]) for line in lines if line.get("step") == steps}

    def train_final(self, head: CLIP, rate: float, title: str) -> Path:
        """Train on all images; return the run folder."""
        run = self.folder / f"final_{rate!r}"
        splits = [split for split in ("train", TEST) if (self.folder / _IMAGES / split).is_dir()]
        self._train(head, run, rate, splits, title, [])
        return run

    def _train(
        self, head: CLIP, run: Path, rate: float, splits: Sequence[str], title: str, scored: Sequence[str]
    ) -> int:
        """Train, or resume, to the end, and score on some datasets; return the number of steps."""
        images = self.folder / _IMAGES
        log = run.with_name(f"{run.name}.log")
        counts: dict[str, int] = json.loads((images / "card.json").read_text(encoding="utf-8"))["samples"]
        samples = sum(counts[split] for split in splits)
        batch_size = max(2, min(self.batch_size, samples))
        steps = max(1, round(self.epochs * samples / batch_size))
        vision = head.architecture.vision
        values: Mapping[str, object] = {
            "model.name": "", "model.weights": str(self.folder / _HEAD), "model.image_size": self.image_size,
            "model.image_tokens": vision.image_tokens, "pixels.channels": vision.channels,
            "model.text": f"classes:{images}/classnames.txt", "loss.name": "classes", "loss.same": "negatives",
            "data.train": [str(images / split) for split in splits], "data.last": "wrap", "data.max_bad": 0.0,
            "data.workers": min(4, os.cpu_count() or 1), "out": str(run), "seed": self.seed, "steps": steps,
            "batch_size": batch_size, "optim.lr": rate, "optim.warmup": steps // 10, "optim.average": 0.0,
            "lock.unfreeze_every": 0, "checkpoint.every_steps": 0, "checkpoint.every_minutes": 10,
            "checkpoint.keep": 1, "checkpoint.best": "", "eval.every_steps": 0, "eval.data": scored,
            "eval.patience": 0, "eval.guard": [], "log.tensorboard": False,
        }  # fmt: skip
        settings = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
        print(f"{title}; follow it in {log}", file=sys.stderr, flush=True)
        is_waiting = False
        while error := self._run_training_script(settings, log, batch_size):
            if _HELD not in error:
                kind = Diverged if any(run.glob("not_finite*.jsonl")) else DataError
                raise kind(f"{title}: {error.removeprefix('error: ')} (full log: {log})")
            if not is_waiting:
                print(f"{error.removeprefix('error: ')}; waiting for it", file=sys.stderr, flush=True)
                is_waiting = True
            time.sleep(_WAIT)
        checkpoint = latest_checkpoint(run)
        if checkpoint is None:
            raise DataError(f"{title}: it was stopped; {_KEPT}")
        # another process stopped train.py
        if parse_step(checkpoint.name) < steps:
            raise DataError(
                f"{title}: it was stopped at step {parse_step(checkpoint.name)} of {steps}; {_KEPT}"
            )
        return steps

    def _run_training_script(self, settings: Sequence[str], log: Path, batch_size: int) -> str:
        """Run train.py; return its error, or "" if it ended normally or was stopped."""
        # batch normalization needs two images on each
        gpus = min(torch.cuda.device_count(), batch_size // 2) if self.device.type == "cuda" else 0
        environment = dict(os.environ)
        launch: list[str] = []
        if not gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        elif gpus > 1:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
        command = [sys.executable, *launch, str(_PROGRAM), str(_CONFIG), *settings]
        with log.open("w", encoding="utf-8") as file, _interrupt_on_signals():
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
            try:
                status = process.wait()
            except KeyboardInterrupt as stop:
                process.terminate()  # it saves a checkpoint
                process.wait()
                raise KeyboardInterrupt(_KEPT) from stop
        if status == 0 or status > 128:  # 128 + the signal that stopped it
            return ""
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line for line in lines if line.startswith("error: ")), f"it exited with status {status}")


def _read_images(images: Sequence[LabelledImage]) -> Iterator[tuple[bytes, int]]:
    def read_image(labelled: LabelledImage) -> tuple[bytes, int]:
        dataset, i, label = labelled
        try:
            image = dataset.images.read(i)
            decode_image(image)
        except DataError as error:
            raise DataError(f"{dataset.describe_image(i)}: {error}; repair or remove it") from error
        return image, label

    with ThreadPoolExecutor(4) as pool:
        for start in range(0, len(images), 256):
            yield from pool.map(read_image, images[start : start + 256])


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Wait until no other process trains in a folder; create it if it does not exist."""
    if "{" in str(folder) or "}" in str(folder):
        raise ConfigError(f"{folder} has braces, which would be expanded: choose another folder with --runs")
    created = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        created = True
        lock = FileLock(folder / ".lock")
        lock.acquire(lambda: print(f"another process trains in {folder}: waiting for it", file=sys.stderr))
        try:
            yield
        finally:
            lock.release()
    except CheckpointError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        if created and not folder.is_dir():
            raise DataError(f"{folder} was removed meanwhile: run the same command to start over") from error
        what = f"{error.filename or folder}: {error.strerror or error}"
        raise DataError(f"{what}: free space there, or choose another folder with --runs; {_KEPT}") from error


@contextmanager
def _interrupt_on_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, and SIGHUP unless nohup ignores it, so that no training is orphaned."""
    signals = []
    if threading.current_thread() is threading.main_thread():
        signals = [
            name for name in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(name) == signal.SIG_DFL
        ]
    try:
        for name in signals:
            signal.signal(name, signal.default_int_handler)
        yield
    finally:
        for name in signals:
            signal.signal(name, signal.SIG_DFL)


def fine_tune(subject: Subject, options: Options) -> Outcome:
    """Run the task ``fine-tune``."""
    if subject.encoder.ranks.world > 1:
        raise ConfigError("fine-tune starts its own processes on all GPUs: run it without torchrun")
    dataset = subject.dataset
    rates = tuple(map(float, options.rates))
    metrics = fitting_metrics(dataset, subject.metrics)
    train = training_split(subject, "train", "fine-tuning", unseen="initialized only from their prompts")
    if require_labels(train).ndim != 1:
        raise DataError(f"dataset {dataset.name} has several labels per image, but fine-tuning needs one")
    if len(rates) > 1 or (dataset.split != "val" and subject.split("val") is not None):
        try:
            chosen, held, tuned_on = learn_and_tune(subject, train, options.seed, options.examples)
        except NothingToTuneOn as error:
            raise DataError(f"{error}; a single value of --rates needs none") from error
        learn = _list_images(*chosen)
        tune = _list_images(*held)
    else:
        drawn = draw_examples(train, options.examples, options.seed) if options.examples else None
        learn = _list_images(train, drawn)
        tune = []
        tuned_on = ""
    names = make_distinct(dataset.class_names)
    head = attach_class_head(subject.encoder.model, names, _initial_rows(subject, names, options.seed))
    epochs = options.epochs
    batch_size = options.fine_tune_batch
    try:
        runs = cache_folder() / "fine-tune" if options.runs is None else options.runs.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"--runs {options.runs}: {error}") from error
    folder = runs / _name_folder(
        subject, head, learn, tune, (epochs, batch_size, options.seed, options.image_size)
    )
    training = ClassTraining(
        folder=folder,
        epochs=epochs,
        batch_size=batch_size,
        seed=options.seed,
        image_size=options.image_size,
        device=subject.device,
    )
    metric = tuning_metric(metrics if subject.metrics else (), require_labels(dataset))
    with lock_folder(folder):
        training.prepare(head, names, learn, tune)
        rate = rates[0] if len(rates) == 1 else _select_rate(training, head, rates, metric, dataset.name)
        run = training.train_final(
            head, rate, f"fine-tuning on {dataset.name} at rate {rate:g}, for the test"
        )
        model = clipkit.load(run, device=str(subject.device))
    encoder = Encoder(model, store=subject.encoder.store, batch_size=subject.encoder.batch_size)
    with torch.no_grad():
        answers = Answers(
            dataset,
            encoder.images(dataset).projected,
            torch.as_tensor(clipkit.encode_text(names, model)).T.contiguous(),
            float(model.logit_scale.exp()),
            subject.device,
        )
    examples = f"{options.examples:,} examples, " if options.examples else ""
    setting = f"{examples}{epochs:g} epochs"
    scores = classification_scores(answers, task="fine-tune", metrics=metrics, setting=setting)
    _log.warning("dataset %s: the fine-tuned model is %s", dataset.name, run)
    if not options.details:
        return Outcome(scores=scores)
    details = prediction_details(
        dataset,
        answers.top.classes[:, 0],
        task="fine-tune",
        setting=setting,
        confidence=answers.top.probabilities[:, 0],
    )
    details = add_items(details, answers, [score.metric for score in scores])
    tuned_on = tuned_on if len(rates) > 1 else ""
    return Outcome(scores=scores, details=[replace(details, tuned_on=tuned_on, chosen_rate=rate)])


def _initial_rows(subject: Subject, names: Sequence[str], seed: int) -> Tensor:
    """Return the zero-shot classifier, (C, O), or random rows if the model has a head of other classes."""
    shape = subject.encoder.model.architecture
    if shape.text.classes and not set(names) <= set(shape.text.classes):
        rows = torch.randn(len(names), shape.embed_dim, generator=torch.Generator().manual_seed(seed))
        return torch.nn.functional.normalize(rows, dim=1).to(subject.device)
    return subject.class_weights().T


def _list_images(dataset: EvalDataset, chosen: Tensor | None) -> list[LabelledImage]:
    labels = require_labels(dataset).tolist()
    indices = range(len(labels)) if chosen is None else chosen.tolist()
    return [(dataset, i, labels[i]) for i in indices]


def _name_folder(
    subject: Subject,
    head: CLIP,
    learn: Sequence[LabelledImage],
    tune: Sequence[LabelledImage],
    options: tuple[float, ...],
) -> str:
    """Name the folder after the dataset and a digest of all that trainings depend on except the rate.

    The head is identified by its inputs, because the last bits of its rows depend on which texts were encoded
    together.
    """
    model = subject.encoder.model
    dataset = subject.dataset
    head_inputs = [
        "model.name=",  # trainings of earlier versions named the architecture
        model_hash(model),
        dtype_name(model),
        dataset.prompts(),
        serialize_architecture(head.architecture),
    ]
    digest = hashlib.sha256(json.dumps([*head_inputs, *options]).encode())
    for images in (learn, tune):
        stamps = [[source.split, source.stamp, i, label] for source, i, label in images]
        digest.update(json.dumps(stamps).encode())
    plain = "".join(c if c.isalnum() or c in "-_" else "_" for c in dataset.name)[:40]
    return f"{plain}-{digest.hexdigest()[:16]}"


def _select_rate(
    training: ClassTraining, head: CLIP, rates: Sequence[float], metric: str, name: str
) -> float:
    """Return the rate with the best metric on the images to tune on; of equal ones, the first.

    The metrics of each rate are stored in a file, its training is not.
    """
    file = training.folder / "rates.json"
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # a damaged file is rewritten
        stored = {}
    tried: dict[str, Mapping[str, float]] = {}
    if isinstance(stored, dict):
        tried = {key: values for key, values in stored.items() if isinstance(values, dict)}
    for i, rate in enumerate(rates, start=1):
        if f"{rate!r}" not in tried:
            try:
                title = f"fine-tuning on {name} at rate {rate:g}, {i} of {len(rates)}"
                tried[f"{rate!r}"] = training.train_to_tune(head, rate, title)
            except Diverged:
                tried[f"{rate!r}"] = {}
            write_atomic(file, json.dumps(tried))
        shutil.rmtree(training.folder / f"rate_{rate!r}", ignore_errors=True)
    values = {rate: tried[f"{rate!r}"] for rate in rates}
    diverged = [f"{rate:g}" for rate, value in values.items() if not value]
    if len(diverged) == len(rates):
        raise DataError(
            f"fine-tuning on {name} diverges at all of the rates {', '.join(diverged)}: use lower --rates"
        )
    if diverged:
        _log.warning("dataset %s: training diverges at the rates %s", name, ", ".join(diverged))
    best = max(rates, key=lambda rate: values[rate].get(metric, values[rate].get("acc1", -math.inf)))
    message = "dataset %s: of the rates %s, the %s is best; %s rates may be better"
    listed = ", ".join(f"{rate:g}" for rate in sorted(rates))
    if best == min(rates):
        _log.warning(message, name, listed, "lowest", "lower")
    elif best == max(rates):
        _log.warning(message, name, listed, "highest", "higher")
    return best

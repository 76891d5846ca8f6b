"""Fine-tuning: the image tower and a head of classes trained together on the training split, by ``train.py``.

The head begins as the zero-shot classifier of the dataset's prompts, so that the training begins with its answers
(WiSE-FT, Wortsman et al. 2022, arXiv 2109.01903), and pictures are told apart by their cosine with its rows. Of
several learning rates the one is taken that is best on validation pictures; then the model is trained once more, on
training and validation pictures together, and tested once. Validation pictures are those of the split ``val``, or a
fifth of each class of ``train``, as for the linear probe. With one rate there is nothing to choose.

Trainings are ``train.py``'s own, by configs/finetune.toml with all layers trained from the start and no averages.
They, the rates that were tried and a copy of the pictures lie in a folder that their inputs name: what was stopped
goes on, and nothing is trained twice.

Letters in shape comments: N pictures, O embedding dimension, C classes.
"""

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import clipkit
from clipkit.class_head import with_class_head
from clipkit.encode import model_hash
from clipkit.errors import ConfigError, DataError
from clipkit.model import CLIP
from data.cache import cache_folder
from eval.class_training import ClassTraining, Diverged, Picture, only_one
from eval.dataset import EvalDataset, distinct_names
from eval.encode import Encoder, dtype_name
from eval.results import Score
from eval.subject import Subject
from eval.tasks.classification import Answers, classification_scores, fitting_metrics, labels_of
from eval.tasks.linear_probe import check_carved, check_classes, learned, tuning_metric
from eval.tasks.sampling import carve

__all__ = ["RATES", "FineTuned", "fine_tune"]

RATES = (1e-5, 3e-5, 1e-4)
_RATES = "rates.json"
_log = logging.getLogger("eval")
_DIGITS = 16

_Pictures = list[Picture]


@dataclass(frozen=True, kw_only=True, eq=False)
class FineTuned:
    """What came of it.

    Attributes:
        scores: of the test pictures.
        answers: the model's.
        setting: as in the scores.
        run: the training whose model it is; ``clipkit.load`` takes it.
        rate: its learning rate.
        tuned_on: the pictures that it was chosen on; "" where there was one.
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
        subject: with a split ``train`` of one label a picture, and ``val`` or not.
        epochs: times that each picture is seen.
        rates: learning rates to choose from.
        batch_size: pictures of a step.
        seed: of the pictures to tune on where the dataset has none for it, and of the order of the others.
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
    """Pictures to learn from, pictures to tune on, and what the latter are called."""
    dataset = subject.dataset
    train = learned(subject, "train", "fine-tuning", unseen="which prompts alone tell of")
    labels = labels_of(train)
    if labels.ndim != 1:
        raise DataError(f"dataset {dataset.name} has several labels a picture, fine-tuning takes one")
    # pictures that are scored are not tuned on
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
    """The rate that gives most on the pictures to tune on; of equals the first.

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
    """What each rate gives on the pictures to tune on, nothing where it diverges; kept, the trainings are not."""
    file = training.folder / _RATES
    tried = _read_tried(file)
    for number, rate in enumerate(rates, start=1):
        if f"{rate!r}" not in tried:
            say = f"{what} at rate {rate:g}, {number} of {len(rates)}"
            try:
                tried[f"{rate!r}"] = training.tuned(head, rate, say)
            except Diverged:
                tried[f"{rate!r}"] = {}
            aside = file.with_suffix(".partial")
            aside.write_text(json.dumps(tried))
            aside.replace(file)
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

"""Tasks: what a model can be scored on with a dataset.

``TASKS`` holds every task by name. A task's module is imported when the task runs, so this one stays light.

classify.py       zero-shot classification, and the classification metrics of any classifier
retrieval.py      captions by images and images by captions
probe.py          linear probe, few-shot classification, k nearest neighbours
logistic.py       logistic regression
compositional.py  the right caption among wrong ones
fine_tune.py      fine-tuning by train.py
subject.py        one model on one dataset
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from clipkit.cli import MOST_BATCH, MOST_SEED, number, whole
from clipkit.errors import ConfigError, nearest

if TYPE_CHECKING:
    from eval.datasets.dataset import EvalDataset
    from eval.tasks.subject import Outcome, Subject

__all__ = ["ESTIMATORS", "KS", "RATES", "SHOTS", "TASKS", "Options", "Task", "options_of", "task_of"]

SHOTS = (1, 2, 4, 8, 16)
ESTIMATORS = ("ridge", "logistic")
KS = (10, 20)
RATES = (1e-5, 3e-5, 1e-4)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Task options that a user may choose.

    Attributes:
        seed: for drawing example images, and validation images from the training split.
        layers: blocks of the image tower whose class token is probed too, counted from 1; True for all.
        shots: images per class for few-shot learning.
        seeds: for its draws.
        estimators: that it trains.
        tuned: whether C of its logistic regression is chosen on all validation images, as in the CLIP paper.
        neighbours: numbers of neighbours that vote.
        epochs: of fine-tuning.
        rates: learning rates that fine-tuning chooses from.
        fine_tune_batch: its batch size.
        runs: folder of its training runs; None for the cache folder.
        details: whether to collect what a page shows besides the scores.
    """

    seed: int = 0
    layers: bool | tuple[int, ...] = False
    shots: tuple[int, ...] = SHOTS
    seeds: tuple[int, ...] = (0, 1, 2)
    estimators: tuple[str, ...] = ESTIMATORS
    tuned: bool = False
    neighbours: tuple[int, ...] = KS
    epochs: float = 10
    rates: tuple[float, ...] = RATES
    fine_tune_batch: int = 128
    runs: Path | None = None
    details: bool = True

    def text_of(self, task: str) -> str:
        """The options that the scores of a task depend on, for its result lines."""
        return " ".join(f"{name}={getattr(self, name)}" for name in TASKS[task].depends_on)


def options_of(parsed: argparse.Namespace) -> Options:
    """The task options of a parsed command line; lists are sorted, so their order makes no difference."""
    given = {one.name: getattr(parsed, one.name) for one in fields(Options) if hasattr(parsed, one.name)}
    if "layers" in given:
        layers = given["layers"]
        given["layers"] = False if layers is None else tuple(sorted(layers)) or True
    if "estimators" in given:
        given["estimators"] = tuple(one for one in ESTIMATORS if one in given["estimators"])
    for name in {"shots", "seeds", "neighbours"} & {*given}:
        given[name] = tuple(sorted(given[name]))
    if "rates" in given:
        given["rates"] = tuple(sorted(set(given["rates"])))
    return Options(**given)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What clipkit knows about a task.

    Attributes:
        summary: one line for ``--help``.
        function: "module:name" of the function that scores a subject with options.
        fits: what a dataset must have.
        texts: the method of the dataset that returns the texts to encode; "" if the task encodes none.
        metric: the primary metric of a dataset without a card.
        by_prompts: whether ``--prompts`` has an effect.
        learns: whether it needs the training split.
        gives_probabilities: whether its answers can be logits, as calibration needs; votes are not.
        add_options: declares its command-line options; their names are fields of ``Options``.
        depends_on: the options that its scores depend on.
    """

    summary: str
    function: str
    fits: Literal["labels", "captions", "choices"]
    texts: Literal["prompts", "caption_prompts", "all_captions", ""] = ""
    metric: str
    by_prompts: bool = False
    learns: bool = False
    gives_probabilities: bool = True
    add_options: Callable[[argparse.ArgumentParser], None] = lambda _: None
    depends_on: tuple[str, ...] = ()

    @property
    def needs_text(self) -> bool:
        """Whether the model must have a text tower."""
        return bool(self.texts)

    def run(self, subject: "Subject", options: Options) -> "Outcome":
        """Score a model on a dataset.

        Raises:
            DataError: the dataset is broken or does not have what the task needs.
            ConfigError: the options do not fit the model.
        """
        module, _, name = self.function.partition(":")
        function: Callable[[Subject, Options], Outcome] = getattr(import_module(module), name)
        return function(subject, options)

    def check(self, dataset: "EvalDataset") -> None:
        """Make sure that a dataset has what the task needs.

        Raises:
            DataError: it has not.
        """
        from eval.datasets import dataset as kinds

        {"labels": kinds.labels_of, "captions": kinds.captions_of, "choices": kinds.choices_of}[self.fits](
            dataset
        )

    def texts_of(self, dataset: "EvalDataset") -> Iterable[Sequence[str]]:
        """The texts of a dataset that the task encodes, by class or by image."""
        texts: Iterable[Sequence[str]] = getattr(dataset, self.texts)() if self.texts else ()
        return texts


_positive = whole(1, MOST_BATCH)


def _linear_probe_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layers",
        nargs="*",
        type=_positive,
        metavar="K",
        help="linear-probe: also probe the image tower after these blocks (no value: after every block)",
    )


def _few_shot_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shots",
        nargs="+",
        type=_positive,
        default=SHOTS,
        metavar="N",
        help=f"few-shot: images per class (default: {' '.join(map(str, SHOTS))})",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=whole(0, MOST_SEED),
        default=(0, 1, 2),
        metavar="S",
        help="few-shot: seeds of the draws (default: 0 1 2)",
    )
    parser.add_argument(
        "--estimators", nargs="+", choices=ESTIMATORS, default=ESTIMATORS, help="few-shot: default: both"
    )
    parser.add_argument(
        "--tuned",
        action="store_true",
        help="few-shot: choose C on the validation split, as in the CLIP paper",
    )


def _knn_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--neighbours", nargs="+", type=_positive, default=KS, metavar="K", help="knn: default: 10 20"
    )


def _fine_tune_options(parser: argparse.ArgumentParser) -> None:
    positive = number(0, 1e6, above=True)
    parser.add_argument("--epochs", type=positive, default=10.0, metavar="E", help="fine-tune: default: 10")
    parser.add_argument(
        "--rates",
        nargs="+",
        type=positive,
        default=RATES,
        metavar="LR",
        help="fine-tune: learning rates, of which the best on the validation split is used "
        f"(default: {' '.join(f'{rate:g}' for rate in RATES)})",
    )
    parser.add_argument(
        "--fine-tune-batch",
        type=_positive,
        default=128,
        metavar="N",
        help="fine-tune: batch size (default: 128)",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        metavar="FOLDER",
        help="fine-tune: folder of training runs and their models (default: fine-tune in the cache)",
    )


TASKS: Mapping[str, Task] = {
    "zero-shot": Task(
        summary="classify images by the prompts of their class names",
        function="eval.tasks.classify:run_zero_shot",
        fits="labels",
        texts="prompts",
        metric="acc1",
        by_prompts=True,
    ),
    "linear-probe": Task(
        summary="logistic regression on the image tower's features, as in the CLIP paper",
        function="eval.tasks.probe:run_linear_probe",
        fits="labels",
        metric="acc1",
        learns=True,
        add_options=_linear_probe_options,
        depends_on=("seed", "layers"),
    ),
    "few-shot": Task(
        summary="learn classes from 1, 2, 4, 8 and 16 images each",
        function="eval.tasks.probe:run_few_shot",
        fits="labels",
        metric="acc1",
        learns=True,
        add_options=_few_shot_options,
        depends_on=("shots", "seeds", "estimators", "tuned"),
    ),
    "knn": Task(
        summary="classify images by their nearest neighbours in the training split",
        function="eval.tasks.probe:run_knn",
        fits="labels",
        metric="acc1",
        learns=True,
        gives_probabilities=False,
        add_options=_knn_options,
        depends_on=("neighbours",),
    ),
    "retrieval": Task(
        summary="find captions by images and images by captions",
        function="eval.tasks.retrieval:run_retrieval",
        fits="captions",
        texts="caption_prompts",
        metric="mean_R@1",
        by_prompts=True,
    ),
    "compositional": Task(
        summary="choose the right caption among wrong ones (Winoground, SugarCrepe, ARO, WinoGAViL)",
        function="eval.tasks.compositional:run_compositional",
        fits="choices",
        texts="all_captions",
        metric="accuracy",
    ),
    "fine-tune": Task(
        summary="train the whole image tower and a classification head on the training split, by train.py",
        function="eval.tasks.fine_tune:run_fine_tune",
        fits="labels",
        texts="prompts",
        metric="acc1",
        by_prompts=True,
        learns=True,
        add_options=_fine_tune_options,
        depends_on=("seed", "epochs", "rates", "fine_tune_batch"),
    ),
}


def task_of(name: str) -> Task:
    """The task of a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}: {nearest(name, TASKS)}")
    return TASKS[name]

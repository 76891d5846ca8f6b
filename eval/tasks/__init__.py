"""Tasks that a model can be scored on.

``TASKS`` maps names to entries. The module of a task is imported when it runs.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from clipkit.cli import MOST_BATCH, MOST_SEED, number, whole
from clipkit.errors import ConfigError, nearest
from clipkit.files import user_path

if TYPE_CHECKING:
    from clipkit import CLIP
    from eval.datasets.dataset import EvalDataset
    from eval.tasks.subject import Outcome, Subject

__all__ = ["TASKS", "Options", "Task", "options_of", "task_of"]

_ESTIMATORS = ("ridge", "logistic")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the tasks, validated on construction.

    Attributes:
        seed: seed for drawing example images, and validation images from the training split.
        layers: linear-probe: blocks of the image tower to probe too, from 1; True for all.
        examples: linear-probe and fine-tune: number of training images that are used, at random; 0 for all.
        shots: few-shot: images per class. Numbers that the smallest class does not have are skipped.
        seeds: few-shot: one draw for each.
        estimators: few-shot: "ridge" and "logistic".
        tuned: few-shot: whether C of the logistic regression is chosen on all validation images, as in the CLIP
            paper.
        neighbours: knn: numbers of voting neighbors.
        epochs: fine-tune: number of epochs.
        rates: fine-tune: learning rates to choose from.
        fine_tune_batch: fine-tune: batch size.
        image_size: fine-tune: side of the images in pixels, to which the model is adapted; 0: its own.
        runs: fine-tune: folder of training runs; by default in the cache folder.
        beams: captioning: hypotheses of beam search; 1 takes the most probable token at each step.
        dims: zero-shot, retrieval and compositional: sizes of prefixes of the embedding that are scored besides the
            whole, for models trained with ``loss.dims``.
        details: whether to collect what a page shows besides the scores.

    Raises:
        ConfigError: a value is invalid.
    """

    seed: int = 0
    layers: bool | tuple[int, ...] = False
    examples: int = 0
    shots: tuple[int, ...] = (1, 2, 4, 8, 16)
    seeds: tuple[int, ...] = (0, 1, 2)
    estimators: tuple[str, ...] = _ESTIMATORS
    tuned: bool = False
    neighbours: tuple[int, ...] = (10, 20)
    epochs: float = 10.0
    rates: tuple[float, ...] = (1e-5, 3e-5, 1e-4)
    fine_tune_batch: int = 128
    image_size: int = 0
    runs: Path | None = None
    beams: int = 1
    dims: tuple[int, ...] = ()
    details: bool = True

    def __post_init__(self) -> None:
        for name, valid, expected in (
            ("shots", min(self.shots, default=0) >= 1, "one or more whole numbers from 1"),
            ("seeds", 0 < len(self.seeds) == len(set(self.seeds)), "one or more different numbers"),
            ("neighbours", min(self.neighbours, default=0) >= 1, "one or more whole numbers from 1"),
            ("epochs", 0 < self.epochs < math.inf, "a number above 0"),
            ("rates", bool(self.rates) and all(0 < one < math.inf for one in self.rates), "numbers above 0"),
            ("fine_tune_batch", self.fine_tune_batch >= 1, "a number above 0"),
            ("examples", self.examples >= 0, "0, or a number of images"),
            ("image_size", self.image_size >= 0, "0, or a number of pixels"),
            ("beams", self.beams >= 1, "a whole number from 1"),
            ("dims", min(self.dims, default=1) >= 1, "whole numbers from 1"),
        ):
            if not valid:
                raise ConfigError(f"invalid value {name} = {getattr(self, name)}: expected {expected}")
        for one in self.estimators:
            if one not in _ESTIMATORS:
                raise ConfigError(f"unknown estimator {one!r}: {nearest(one, _ESTIMATORS)}")

    def text_of(self, task: str) -> str:
        """Return the options that the scores of a task depend on, for its result lines."""
        names = [
            name for name in TASKS[task].depends_on if name not in ("dims", "examples") or getattr(self, name)
        ]
        return " ".join(f"{name}={getattr(self, name)}" for name in names)


def options_of(parsed: argparse.Namespace) -> Options:
    """Return the task options of a parsed command line, with lists in a fixed order."""
    given = {one.name: getattr(parsed, one.name) for one in fields(Options) if hasattr(parsed, one.name)}
    if "layers" in given:
        layers = given["layers"]
        given["layers"] = False if layers is None else tuple(sorted(layers)) or True
    if "estimators" in given:
        given["estimators"] = tuple(one for one in _ESTIMATORS if one in given["estimators"])
    for name in {"shots", "seeds", "neighbours", "dims"} & {*given}:
        given[name] = tuple(sorted(given[name]))
    if "rates" in given:
        given["rates"] = tuple(sorted(set(given["rates"])))
    return Options(**given)


@dataclass(frozen=True, kw_only=True)
class Task:
    """The registry entry of a task.

    Attributes:
        summary: one line for ``--help``.
        function: "module:name" of the function that scores a subject with options.
        fits: what a dataset must have.
        texts: the method of the dataset that returns the texts to encode; "" if the task encodes none.
        metric: the primary metric of a dataset without a card.
        by_prompts: whether ``--prompts`` has an effect.
        learns: whether it needs the training split.
        makes_head: whether a model with a head of other classes gets a new one, so that it needs no texts.
        describes: whether the model must have a decoder of captions.
        gives_probabilities: whether its predictions can be logits, as calibration needs; votes are not.
        add_options: declares its command-line options, named after fields of ``Options``.
        depends_on: the options that its scores depend on.
    """

    summary: str
    function: str
    fits: Literal["labels", "captions", "choices"]
    texts: Literal["prompts", "caption_prompts", "all_captions", ""] = ""
    metric: str
    by_prompts: bool = False
    learns: bool = False
    makes_head: bool = False
    describes: bool = False
    gives_probabilities: bool = True
    add_options: Callable[[argparse.ArgumentParser], None] = lambda _: None
    depends_on: tuple[str, ...] = ()

    @property
    def in_languages(self) -> bool:
        """Whether it is scored in each language of a dataset."""
        return self.by_prompts and not self.learns

    @property
    def needs_text(self) -> bool:
        """Whether the model must have a text tower or decoder."""
        return bool(self.texts) or self.describes

    @property
    def of_prefixes(self) -> bool:
        """Whether prefixes of the embedding have scores of their own."""
        return "dims" in self.depends_on

    def check_model(self, model: "CLIP") -> None:
        """Raise ConfigError if a model lacks what the task needs."""
        if self.describes and model.text_decoder is None:
            raise ConfigError(
                f"{model.name or 'the model'} cannot describe images: train it with caption.weight above 0"
            )

    def run(self, subject: "Subject", options: Options) -> "Outcome":
        """Score a model on a dataset.

        Raises:
            DataError: the dataset is damaged or lacks what the task needs.
            ConfigError: the model lacks what the task needs, or the options do not fit it.
        """
        self.check_model(subject.encoder.model)
        module, _, name = self.function.partition(":")
        function: Callable[[Subject, Options], Outcome] = getattr(import_module(module), name)
        return function(subject, options)

    def check(self, dataset: "EvalDataset") -> None:
        """Raise DataError if a dataset lacks what the task needs."""
        from eval.datasets import dataset as kinds

        {"labels": kinds.labels_of, "captions": kinds.captions_of, "choices": kinds.choices_of}[self.fits](
            dataset
        )

    def texts_of(self, dataset: "EvalDataset", classes: Sequence[str] = ()) -> Iterable[Sequence[str]]:
        """Return the texts of a dataset that the task encodes, by class or by image.

        Args:
            dataset: the dataset.
            classes: all texts that the model can read; empty for any text.
        """
        texts: Iterable[Sequence[str]] = getattr(dataset, self.texts)() if self.texts else ()
        if self.makes_head and classes and not all(set(own) <= set(classes) for own in texts):
            return ()
        return texts


_positive = whole(1, MOST_BATCH)


def _listed(values: Iterable[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


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
        default=Options.shots,
        metavar="N",
        help=f"few-shot: images per class (default: {_listed(Options.shots)})",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=whole(0, MOST_SEED),
        default=Options.seeds,
        metavar="S",
        help=f"few-shot: seeds of the draws (default: {_listed(Options.seeds)})",
    )
    parser.add_argument(
        "--estimators",
        nargs="+",
        choices=_ESTIMATORS,
        default=_ESTIMATORS,
        help="few-shot: classifiers (default: both)",
    )
    parser.add_argument(
        "--tuned",
        action="store_true",
        help="few-shot: choose C on the validation split, as in the CLIP paper",
    )


def _knn_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--neighbours",
        nargs="+",
        type=_positive,
        default=Options.neighbours,
        metavar="K",
        help=f"knn: numbers of neighbors (default: {_listed(Options.neighbours)})",
    )


def _fine_tune_options(parser: argparse.ArgumentParser) -> None:
    positive = number(0, 1e6, above=True)
    epochs = Options.epochs
    parser.add_argument(
        "--epochs",
        type=positive,
        default=epochs,
        metavar="E",
        help=f"fine-tune: number of epochs (default: {epochs:g})",
    )
    parser.add_argument(
        "--rates",
        nargs="+",
        type=positive,
        default=Options.rates,
        metavar="LR",
        help="fine-tune: learning rates; the best on the validation split is used "
        f"(default: {_listed(Options.rates)})",
    )
    parser.add_argument(
        "--fine-tune-batch",
        type=_positive,
        default=Options.fine_tune_batch,
        metavar="N",
        help=f"fine-tune: batch size (default: {Options.fine_tune_batch})",
    )
    parser.add_argument(
        "--image-size",
        type=_positive,
        default=Options.image_size,
        metavar="S",
        help="fine-tune: side of the images in pixels; position embeddings are resampled (default: the model's)",
    )
    parser.add_argument(
        "--runs",
        type=user_path,
        metavar="FOLDER",
        help="fine-tune: folder of training runs and their models (default: fine-tune in the cache)",
    )


def _captioning_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--beams",
        type=whole(1, 64),
        default=Options.beams,
        metavar="K",
        help=f"captioning: hypotheses of beam search (default: {Options.beams}, no search)",
    )


TASKS: Mapping[str, Task] = {
    "zero-shot": Task(
        summary="classify images by the prompts of their class names",
        function="eval.tasks.classify:zero_shot",
        fits="labels",
        texts="prompts",
        metric="acc1",
        by_prompts=True,
        depends_on=("dims",),
    ),
    "linear-probe": Task(
        summary="logistic regression on the image tower's features, as in the CLIP paper",
        function="eval.tasks.probe:linear_probe",
        fits="labels",
        metric="acc1",
        learns=True,
        add_options=_linear_probe_options,
        depends_on=("seed", "layers", "examples"),
    ),
    "few-shot": Task(
        summary="train classifiers on 1, 2, 4, 8 and 16 images per class",
        function="eval.tasks.probe:few_shot",
        fits="labels",
        metric="acc1",
        learns=True,
        add_options=_few_shot_options,
        depends_on=("shots", "seeds", "estimators", "tuned"),
    ),
    "knn": Task(
        summary="classify images by their nearest neighbors in the training split",
        function="eval.tasks.probe:knn",
        fits="labels",
        metric="acc1",
        learns=True,
        gives_probabilities=False,
        add_options=_knn_options,
        depends_on=("neighbours",),
    ),
    "retrieval": Task(
        summary="retrieve captions by image and images by caption",
        function="eval.tasks.retrieval:retrieval",
        fits="captions",
        texts="caption_prompts",
        metric="mean_R@1",
        by_prompts=True,
        depends_on=("dims",),
    ),
    "captioning": Task(
        summary="describe images and compare with their captions (CIDEr-D, BLEU-4, exact matches, perplexity)",
        function="eval.tasks.captioning:captioning",
        fits="captions",
        metric="cider_d",
        describes=True,
        add_options=_captioning_options,
        depends_on=("beams",),
    ),
    "likelihood": Task(
        summary="classify images by the likelihood of the prompts of their class names as captions",
        function="eval.tasks.captioning:likelihood",
        fits="labels",
        metric="acc1",
        by_prompts=True,
        describes=True,
    ),
    "compositional": Task(
        summary="choose the right caption among wrong ones (Winoground, SugarCrepe, ARO, WinoGAViL)",
        function="eval.tasks.compositional:compositional",
        fits="choices",
        texts="all_captions",
        metric="accuracy",
        depends_on=("dims",),
    ),
    "fine-tune": Task(
        summary="train the whole image tower and a classification head on the training split, with train.py",
        function="eval.tasks.fine_tune:fine_tune",
        fits="labels",
        texts="prompts",
        metric="acc1",
        by_prompts=True,
        learns=True,
        makes_head=True,
        add_options=_fine_tune_options,
        depends_on=("seed", "epochs", "rates", "fine_tune_batch", "image_size", "examples"),
    ),
}


def task_of(name: str) -> Task:
    """Return the entry of a task; ConfigError if there is none."""
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}: {nearest(name, TASKS)}")
    return TASKS[name]

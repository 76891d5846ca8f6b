"""Tasks that a model can be scored on.

``TASKS`` maps names to entries. The module of a task is imported when it runs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from clipkit.cli import MOST_BATCH, MOST_SEED, Within, integers, numbers, one_of, setting
from clipkit.errors import ConfigError, nearest

if TYPE_CHECKING:
    from clipkit import CLIP
    from eval.datasets.dataset import EvalDataset
    from eval.tasks.subject import Outcome, Subject

__all__ = ["TASKS", "Options", "Task", "get_task"]

_ESTIMATORS = ("ridge", "logistic")
_POSITIVE = integers(1, MOST_BATCH)


def _sort_values(values: bool | tuple[int, ...]) -> bool | tuple[int, ...]:
    return values if isinstance(values, bool) else tuple(sorted(values))


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the tasks, validated on construction.

    ``details`` is whether to collect what a page shows besides the scores. Few-shot skips numbers of images that
    the smallest class does not have.

    Raises:
        ConfigError: a value is invalid.
    """

    seed: int = setting(0, "random seed", integers(0, MOST_SEED))
    layers: bool | tuple[int, ...] = setting(
        False,
        "linear-probe: also probe the image tower after these blocks (no value: after every block)",
        _POSITIVE,
        listed=True,
        convert=_sort_values,
    )
    examples: int = setting(
        0,
        "linear-probe, fine-tune: use N random training images, a fifth of them to tune on, as VTAB-1k with 1000",
        integers(0, MOST_SEED),
        default_text="all",
    )
    shots: tuple[int, ...] = setting(
        (1, 2, 4, 8, 16), "few-shot: images per class", _POSITIVE, listed=True, convert=_sort_values
    )
    seeds: tuple[int, ...] = setting(
        (0, 1, 2), "few-shot: seeds of the draws", integers(0, MOST_SEED), listed=True, convert=_sort_values
    )
    estimators: tuple[str, ...] = setting(
        _ESTIMATORS,
        "few-shot: classifiers, ridge or logistic",
        one_of(*_ESTIMATORS),
        metavar="NAME",
        default_text="both",
        listed=True,
        convert=lambda names: tuple(sorted(set(names), key=_ESTIMATORS.index)),
    )
    tuned: bool = setting(False, "few-shot: choose C on the validation split, as in the CLIP paper")
    neighbours: tuple[int, ...] = setting(
        (10, 20), "knn: numbers of neighbors", _POSITIVE, listed=True, convert=_sort_values
    )
    epochs: float = setting(10.0, "fine-tune: number of epochs", numbers(0, 1e6, above=True))
    rates: tuple[float, ...] = setting(
        (1e-5, 3e-5, 1e-4),
        "fine-tune: learning rates; the best on the validation split is used",
        numbers(0, 1e6, above=True),
        listed=True,
        convert=lambda rates: tuple(sorted(set(rates))),
    )
    fine_tune_batch: int = setting(128, "fine-tune: batch size", _POSITIVE)
    image_size: int = setting(
        0,
        "fine-tune: side of the images in pixels; position embeddings are resampled",
        _POSITIVE,
        default_text="the model's",
    )
    runs: Path | None = setting(
        None,
        "fine-tune: folder of training runs and their models",
        metavar="FOLDER",
        default_text="fine-tune in the cache",
    )
    beams: int = setting(
        1, "captioning: hypotheses of beam search", integers(1, 64), default_text="1, no search"
    )
    dims: tuple[int, ...] = setting(
        (),
        "zero-shot, retrieval, compositional and judgments: also score the first N elements of each embedding, for "
        "models trained with loss.dims",
        integers(1, 1_000_000),
        flag="--dim",
        listed=True,
        convert=_sort_values,
    )
    details: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value == () and field.default:  # nothing would be scored
                raise ConfigError(f"invalid value {field.name} = (): expected one or more")
            within: Within | None = field.metadata.get("within")
            if within is None or value == field.default or isinstance(value, bool):
                continue
            for item in value if isinstance(value, tuple) else (value,):
                if not within.holds(item):
                    raise ConfigError(f"invalid value {field.name} = {value}: expected {within.words}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"invalid value seeds = {self.seeds}: expected different numbers")

    def describe_options(self, task: str) -> str:
        """Return the options that the scores of a task depend on, for its result lines."""
        texts = []
        for name in TASKS[task].depends_on:
            value = getattr(self, name)
            if value or name not in ("dims", "examples"):
                texts.append(f"{name}={value}")
        return " ".join(texts)


@dataclass(frozen=True, kw_only=True)
class Task:
    """The registry entry of a task.

    Attributes:
        summary: one line for ``--help``.
        function: "module:name" of the function that scores a subject with options.
        fits: what a dataset must have.
        texts: the method of the dataset that returns the texts to encode; "" if the task encodes none.
        metric: the primary metric of a dataset without a card.
        uses_prompts: whether ``--prompts`` has an effect.
        learns: whether it needs the training split.
        makes_head: whether a model with a head of other classes gets a new one, so that it needs no texts.
        describes: whether the model must have a decoder of captions.
        gives_probabilities: whether its predictions can be logits, as calibration needs; votes are not.
        depends_on: the options that its scores depend on.
        other_options: its other options.
    """

    summary: str
    function: str
    fits: Literal["labels", "captions", "choices", "ratings"]
    texts: Literal["prompts", "all_prompts", "caption_prompts", "all_captions", ""] = ""
    metric: str
    uses_prompts: bool = False
    learns: bool = False
    makes_head: bool = False
    describes: bool = False
    gives_probabilities: bool = True
    depends_on: tuple[str, ...] = ()
    other_options: tuple[str, ...] = ()

    @property
    def scores_languages(self) -> bool:
        """Whether it is scored in each language of a dataset."""
        return self.uses_prompts and not self.learns

    @property
    def needs_text(self) -> bool:
        """Whether the model must have a text tower or decoder."""
        return bool(self.texts) or self.describes

    @property
    def scores_prefixes(self) -> bool:
        """Whether prefixes of the embedding have scores of their own."""
        return "dims" in self.depends_on

    def check_model(self, model: "CLIP") -> None:
        """Raise ConfigError if a model lacks what the task needs."""
        if self.describes and model.text_decoder is None:
            raise ConfigError(
                f"{model.name or 'the model'} cannot describe images: train it with caption.weight above 0"
            )

    def run(self, subject: "Subject", options: Options) -> "Outcome":
        """Score a model on a dataset."""
        self.check_model(subject.encoder.model)
        module, _, name = self.function.partition(":")
        function: Callable[[Subject, Options], Outcome] = getattr(import_module(module), name)
        return function(subject, options)

    def check(self, dataset: "EvalDataset") -> None:
        """Raise DataError if a dataset lacks what the task needs."""
        from eval.datasets import dataset as kinds

        checks = {
            "labels": kinds.require_labels,
            "captions": kinds.require_captions,
            "choices": kinds.require_choices,
            "ratings": kinds.require_ratings,
        }
        checks[self.fits](dataset)

    def select_texts(self, dataset: "EvalDataset", classes: Sequence[str] = ()) -> Iterable[Sequence[str]]:
        """Return the texts of a dataset that the task encodes, by class or by image."""
        texts: Iterable[Sequence[str]] = getattr(dataset, self.texts)() if self.texts else ()
        if (
            self.makes_head
            and classes
            and not all(set(classes).issuperset(class_texts) for class_texts in texts)
        ):
            return ()
        return texts


TASKS: Mapping[str, Task] = {
    "zero-shot": Task(
        summary="classify images by the prompts of their class names",
        function="eval.tasks.classify:zero_shot",
        fits="labels",
        texts="all_prompts",
        metric="acc1",
        uses_prompts=True,
        depends_on=("dims",),
    ),
    "linear-probe": Task(
        summary="logistic regression on the image tower's features, as in the CLIP paper",
        function="eval.tasks.probe:linear_probe",
        fits="labels",
        metric="acc1",
        learns=True,
        depends_on=("seed", "layers", "examples"),
    ),
    "few-shot": Task(
        summary="train classifiers on 1, 2, 4, 8 and 16 images per class",
        function="eval.tasks.probe:few_shot",
        fits="labels",
        metric="acc1",
        learns=True,
        depends_on=("shots", "seeds", "estimators", "tuned"),
    ),
    "knn": Task(
        summary="classify images by their nearest neighbors in the training split",
        function="eval.tasks.probe:knn",
        fits="labels",
        metric="acc1",
        learns=True,
        gives_probabilities=False,
        depends_on=("neighbours",),
    ),
    "retrieval": Task(
        summary="retrieve captions by image and images by caption",
        function="eval.tasks.retrieval:retrieval",
        fits="captions",
        texts="caption_prompts",
        metric="mean_R@1",
        uses_prompts=True,
        depends_on=("dims",),
    ),
    "captioning": Task(
        summary="describe images and compare with their captions (CIDEr-D, BLEU-4, exact matches, perplexity)",
        function="eval.tasks.captioning:captioning",
        fits="captions",
        metric="cider_d",
        describes=True,
        depends_on=("beams",),
    ),
    "likelihood": Task(
        summary="classify images by the likelihood of the prompts of their class names as captions",
        function="eval.tasks.captioning:likelihood",
        fits="labels",
        metric="acc1",
        uses_prompts=True,
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
    "judgments": Task(
        summary="correlate the similarity of images and captions with human judgments (Kendall's tau)",
        function="eval.tasks.judgments:judgments",
        fits="ratings",
        texts="caption_prompts",
        metric="kendall_tau_c",
        uses_prompts=True,
        depends_on=("dims",),
    ),
    "fine-tune": Task(
        summary="train the whole image tower and a classification head on the training split, with train.py",
        function="eval.tasks.fine_tune:fine_tune",
        fits="labels",
        texts="prompts",
        metric="acc1",
        uses_prompts=True,
        learns=True,
        makes_head=True,
        depends_on=("seed", "epochs", "rates", "fine_tune_batch", "image_size", "examples"),
        other_options=("runs",),
    ),
}


def get_task(name: str) -> Task:
    """Return the entry of a task; ConfigError if there is none."""
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}: {nearest(name, TASKS)}")
    return TASKS[name]

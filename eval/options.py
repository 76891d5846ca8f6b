"""The commands of ``python -m eval``: their options and ``--help``. Does not import torch."""

from dataclasses import dataclass, fields
from pathlib import Path

from clipkit.cli import (
    MOST_BATCH,
    REQUIRED,
    CaptionOptions,
    Command,
    DecodingOptions,
    DeviceOptions,
    ImageOptions,
    NameOptions,
    integers,
    one_of,
    setting,
)
from eval.tasks import TASKS, Options, Task

_MODEL = "a run folder, a checkpoint, or any other argument of clipkit.load"


@dataclass(frozen=True, kw_only=True)
class ScoringOptions(Options, DecodingOptions, DeviceOptions, NameOptions):
    """Options of commands that score models."""

    model: tuple[str, ...] = setting(REQUIRED, f"{_MODEL}, or timm:NAME")
    data: tuple[str, ...] = setting(
        (),
        "dataset name, folder or URL, table of images and captions, or folder of images",
        metavar="NAME|FOLDER",
    )
    suite: tuple[str, ...] = setting((), "the datasets of a suite")
    data_root: str | None = setting(
        None,
        "folder or store with datasets by name; hf://datasets/clip-benchmark for the published ones",
        metavar="FOLDER",
    )
    out: Path | None = setting(
        None,
        "results file to append to",
        default_text="results.jsonl in the model's run folder or the current folder",
    )
    skip_existing: bool = setting(False, "skip results already in FILE")
    features: str | None = setting(
        None,
        "folder to cache image and text features in; '' disables caching",
        metavar="FOLDER",
        default_text="features in the cache",
    )
    batch_size: int = setting(256, "images or texts per batch", integers(1, MOST_BATCH))
    precision: str = setting("fp32", "dtype of the towers", one_of("fp32", "bf16", "fp16"))


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(CaptionOptions, ImageOptions, ScoringOptions):
    """Options of ``python -m eval run``, and of the commands named after tasks."""

    task: tuple[str, ...] = setting(
        (),
        f"{', '.join(TASKS)}",
        one_of(*TASKS),
        metavar="TASK",
        default_text="each dataset's own",
    )
    prompts: str = setting(
        "", "prompt set, for datasets that have it (openai, clip_benchmark …)", metavar="SET"
    )
    language: tuple[str, ...] = setting(
        (),
        "zero-shot and retrieval in these languages, such as de,fr, or all",
        metavar="LANGUAGES",
        separated=True,
    )


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(ScoringOptions):
    """Check that a model reaches published scores, or published values (--vectors), and find the cause if not."""

    vectors: str = setting(
        "",
        "published values instead of scores: a file, or a name that eval list prints, such as openai-vit-b-32",
        metavar="FILE|NAME",
    )
    image_root: Path = setting(Path(), "folder with the images of --vectors", metavar="FOLDER")
    known_as: str = setting(
        "",
        "model name under which cards list the expected scores",
        flag="--as",
        metavar="NAME",
        default_text="MODEL",
    )


@dataclass(frozen=True, kw_only=True)
class SoupOptions(DeviceOptions, NameOptions):
    """Average the weights of those models that do not lower the score on a dataset (greedy soup)."""

    model: tuple[str, ...] = setting(REQUIRED, f"{_MODEL}; two or more models")
    data: tuple[str, ...] = setting(
        REQUIRED,
        "dataset name, folder or URL, or folder of images by class; several are averaged",
        metavar="NAME|FOLDER",
    )
    data_root: str | None = setting(None, "folder or store with datasets by name", metavar="FOLDER")
    split: str = setting(
        "",
        "split to select on",
        default_text="val if the dataset has it, else test, whose scores are then too high",
    )
    prompts: str = setting("", "prompt set, for datasets that have it", metavar="SET")
    out: Path = setting(REQUIRED, "folder of the model to write", metavar="FOLDER")
    batch_size: int = setting(256, "images or texts per batch", integers(1, MOST_BATCH))


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Build a run's report.html, or a page or table of the results of many models."""

    source: tuple[Path, ...] = setting(
        REQUIRED,
        "one run folder, or any number of results.jsonl files and run folders",
        metavar="RUN|RESULTS",
        positional=True,
    )
    out: Path | None = setting(
        None,
        "the page",
        default_text="RUN/report.html for one run, else scores.html next to the first results file",
    )
    beside: str = setting(
        "", "published: rank the models in open_clip's table", one_of("", "published"), metavar="TABLE"
    )
    csv: Path | None = setting(None, "also write the results table as CSV; - prints it")
    latex: Path | None = setting(None, "also write the results table as LaTeX; - prints it")
    markdown: Path | None = setting(None, "also write the results table as Markdown; - prints it")


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Test which differences between two models are statistically significant."""

    first: str = setting(
        REQUIRED,
        "a run folder or a results file of one model; or a model's name in --results",
        positional=True,
    )
    second: str = setting(REQUIRED, "another", positional=True)
    results: tuple[Path, ...] = setting((), "results file with both models")


@dataclass(frozen=True, kw_only=True)
class InternalsOptions(DecodingOptions, DeviceOptions, NameOptions):
    """Build a page that analyzes an image tower: filters, attention, similarity of layers."""

    model: tuple[str, ...] = setting(REQUIRED, f"{_MODEL}, or timm:NAME; two models are compared")
    data: str = setting(REQUIRED, "dataset name, folder or URL", metavar="NAME|FOLDER")
    data_root: str | None = setting(None, "folder or store with datasets by name", metavar="FOLDER")
    images: int = setting(128, "number of images, evenly spaced in the dataset", integers(4, 10_000))
    device: str = setting("cpu", "auto, cpu, cuda, cuda:1, mps, xpu")
    out: Path = setting(REQUIRED, "the page to write, a .html file")


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """List the suites and their datasets, and the published values of verify --vectors."""

    suite: str | None = setting(
        None,
        "list the datasets of one suite, or print the card of one dataset",
        metavar="SUITE|DATASET",
        positional=True,
    )


@dataclass(frozen=True, kw_only=True)
class NewOptions:
    """Create a card for your own dataset from its folder."""

    title: str = setting(REQUIRED, "title of the dataset", metavar="NAME", positional=True)
    data: str = setting(REQUIRED, "the dataset", metavar="FOLDER")


_TASK_OPTIONS = frozenset(field.name for field in fields(Options)) - {"seed"}


def _options_of_others(task: Task) -> frozenset[str]:
    """Return the options that have no effect on a task."""
    others = _TASK_OPTIONS - {*task.depends_on, *task.other_options}
    if not task.uses_prompts:
        others |= {"prompts"}
    if not task.scores_languages:
        others |= {"language"}
    return others


COMMANDS = {
    "run": Command(
        summary="score models on datasets and suites, on each dataset's main task or the given tasks",
        options=ScoreOptions,
        run="eval.run:run_evaluation",
    ),
    **{
        name: Command(
            summary=task.summary,
            options=ScoreOptions,
            without=_options_of_others(task),
            fixed={"task": (name,)},
            run="eval.run:run_evaluation",
        )
        for name, task in TASKS.items()
    },
    "verify": Command(
        options=VerifyOptions, without=_TASK_OPTIONS | {"skip_existing"}, run="eval.verify:run_verify"
    ),
    "report": Command(options=ReportOptions, run="eval.report.command:run_report"),
    "compare": Command(options=CompareOptions, run="eval.compare:run_compare"),
    "ensemble": Command(
        summary="score the mean of several models' zero-shot predictions, such as of the best checkpoints of a run",
        options=ScoreOptions,
        without=_TASK_OPTIONS | {"task", "suite", "language", "skip_existing"},
        run="eval.ensemble:run_ensemble",
    ),
    "soup": Command(options=SoupOptions, run="eval.soup:run_soup"),
    "internals": Command(options=InternalsOptions, run="eval.internals:run_internals"),
    "list": Command(options=ListOptions, run="eval.datasets.catalog:run_list"),
    "new": Command(options=NewOptions, run="eval.datasets.catalog:run_new"),
}

"""``python -m eval``: score models on datasets and build pages of the results. Imports torch only after parsing."""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial

from clipkit.cli import (
    MOST_BATCH,
    MOST_SEED,
    Command,
    Parser,
    add_decoding_options,
    chosen_command,
    command_parser,
    whole,
)
from clipkit.errors import run_command
from clipkit.files import user_path
from eval.tasks import TASKS, Task

__all__ = ["COMMANDS", "main"]

_EPILOG = """examples:
  python -m eval zero-shot --model runs/quickstart --data digits --data glyphs
  python -m eval retrieval --model runs/emoji --data emoji --data my_folder
  python -m eval run --suite builtin --model runs/quickstart
  python -m eval run --suite clip27 --data-root hf://datasets/clip-benchmark \\
      --model open_clip:ViT-B-32/openai --model runs/mine --skip-existing
  python -m eval report runs/quickstart
  python -m eval report A/results.jsonl B/results.jsonl --out compared.html
  python -m eval compare A/results.jsonl B/results.jsonl
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status; raises ClipkitError for user errors."""
    return chosen_command(COMMANDS, _parser().parse_args(arguments))()


def _parser() -> Parser:
    return command_parser(
        COMMANDS,
        prog="python -m eval",
        description="Score models on datasets and build pages of the results.",
        epilog=_EPILOG,
    )


def _program() -> int:
    """Run the command, together with all ranks that torchrun started."""
    command = chosen_command(COMMANDS, _parser().parse_args())
    from clipkit import distributed

    return distributed.together(command)()


def _scoring_options(parser: argparse.ArgumentParser, *, several: bool) -> None:
    add = parser.add_argument
    what = "a run folder, a checkpoint, any other argument of clipkit.load, or timm:NAME"
    add(
        "--data",
        action="append",
        default=[],
        metavar="NAME|FOLDER",
        help="dataset name, folder or URL, table of images and captions, or folder of images; may be repeated",
    )
    add(
        "--suite",
        action="append",
        default=[],
        metavar="SUITE",
        help="the datasets of a suite; may be repeated",
    )
    add(
        "--data-root",
        metavar="FOLDER",
        help="folder or store with datasets by name; hf://datasets/clip-benchmark for the published ones",
    )
    add("--model", required=True, action="append", help=f"{what}; may be repeated" if several else what)
    add(
        "--name",
        default="",
        metavar="ARCHITECTURE",
        help="architecture, if not stored with the weights; NAME-quickgelu for QuickGELU",
    )
    add(
        "--out",
        type=user_path,
        metavar="FILE",
        help="results file to append to (default: results.jsonl in the model's run folder or the current folder)",
    )
    if several:
        add("--skip-existing", action="store_true", help="skip results already in FILE")
    add(
        "--features",
        metavar="FOLDER",
        help="folder to cache image and text features in (default: features in the cache); '' disables caching",
    )
    add("--batch-size", type=whole(1, MOST_BATCH), default=256, metavar="N", help="default: 256")
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps, xpu (default: auto, an accelerator if any)")
    add(
        "--precision",
        default="fp32",
        choices=["fp32", "bf16", "fp16"],
        help="dtype of the towers (default: fp32)",
    )
    add("--seed", type=whole(0, MOST_SEED), default=0, help="random seed (default: 0)")
    add_decoding_options(parser, default="as in the model's training")


def _task_arguments(tasks: Mapping[str, Task], parser: argparse.ArgumentParser) -> None:
    """Declare the options of a command that runs one task, or any of several."""
    _scoring_options(parser, several=True)
    parser.add_argument(
        "--image",
        default="",
        metavar="MEMBER",
        help="member of shards with the image (default: by extension)",
    )
    parser.add_argument(
        "--captions",
        default="txt",
        metavar="NAMES",
        help="texts or json fields of shards with the captions, separated by commas (default: txt)",
    )
    if len(tasks) == 1:
        parser.set_defaults(prompts="", task=[*tasks])
    else:
        parser.add_argument(
            "--task",
            action="append",
            default=[],
            choices=[*tasks],
            metavar="TASK",
            help=f"{', '.join(tasks)}; may be repeated (default: each dataset's own)",
        )
    if any(task.by_prompts for task in tasks.values()):
        parser.add_argument(
            "--prompts",
            default="",
            metavar="SET",
            help="prompt set, for datasets that have it (openai, clip_benchmark …)",
        )
    if any(task.in_languages for task in tasks.values()):
        parser.add_argument(
            "--language",
            action="append",
            default=[],
            metavar="LANGUAGES",
            help="zero-shot and retrieval in these languages, such as de,fr, or all",
        )
    else:
        parser.set_defaults(language=[])
    if any(task.of_prefixes for task in tasks.values()):
        parser.add_argument(
            "--dim",
            dest="dims",
            nargs="+",
            type=whole(1, 1_000_000),
            default=(),
            metavar="N",
            help="zero-shot, retrieval and compositional: also score the first N elements of each embedding, for "
            "models trained with loss.dims",
        )
    if any("examples" in task.depends_on for task in tasks.values()):
        parser.add_argument(
            "--examples",
            type=whole(0, MOST_SEED),
            default=0,
            metavar="N",
            help="linear-probe, fine-tune: use N random training images, a fifth of them to tune on, as VTAB-1k "
            "with 1000 (default: all)",
        )
    for task in tasks.values():
        task.add_options(parser)


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    _scoring_options(parser, several=False)
    parser.add_argument(
        "--as",
        dest="known_as",
        default="",
        metavar="NAME",
        help="model name under which cards list the expected scores (default: MODEL)",
    )
    parser.set_defaults(skip_existing=False)


def _soup_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    what = "a run folder, a checkpoint, or any other argument of clipkit.load"
    add("--model", required=True, action="append", help=f"{what}; given twice or more")
    add("--name", default="", metavar="ARCHITECTURE", help="architecture, if not stored with the weights")
    add(
        "--data",
        required=True,
        action="append",
        metavar="NAME|FOLDER",
        help="dataset name, folder or URL, or folder of images by class; several are averaged",
    )
    add("--data-root", metavar="FOLDER", help="folder or store with datasets by name")
    add(
        "--split",
        default="",
        metavar="SPLIT",
        help="split to select on (default: val if the dataset has it, else test, whose scores are then too high)",
    )
    add("--prompts", default="", metavar="SET", help="prompt set, for datasets that have it")
    add("--out", type=user_path, required=True, metavar="FOLDER", help="folder of the model to write")
    add("--batch-size", type=whole(1, MOST_BATCH), default=256, metavar="N", help="default: 256")
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps, xpu (default: auto, an accelerator if any)")


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=user_path,
        nargs="+",
        metavar="RUN|RESULTS",
        help="one run folder, or any number of results.jsonl files and run folders",
    )
    parser.add_argument(
        "--out",
        type=user_path,
        metavar="FILE",
        help="default: RUN/report.html for one run, else scores.html next to the first results file",
    )
    for table in ("csv", "latex", "markdown"):
        parser.add_argument(
            f"--{table}",
            type=user_path,
            metavar="FILE",
            help="also write the results table to FILE; - prints it",
        )


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "first",
        metavar="A",
        help="a run folder or a results file of one model; or a model's name in --results",
    )
    parser.add_argument("second", metavar="B", help="another")
    parser.add_argument(
        "--results",
        type=user_path,
        action="append",
        default=[],
        metavar="FILE",
        help="results file with both models; may be repeated",
    )


def _internals_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        required=True,
        action="append",
        help="a run folder, a checkpoint, any other argument of clipkit.load, or timm:NAME; twice to compare",
    )
    add("--name", default="", metavar="ARCHITECTURE", help="architecture, if not stored with the weights")
    add("--data", required=True, metavar="NAME|FOLDER", help="dataset name, folder or URL")
    add("--data-root", metavar="FOLDER", help="folder or store with datasets by name")
    add(
        "--images",
        type=whole(4, 10_000),
        default=128,
        metavar="N",
        help="number of images, evenly spaced in the dataset (default: 128)",
    )
    add_decoding_options(parser, default="as in the model's training")
    add("--device", default="cpu", help="auto, cpu, cuda, cuda:1, mps, xpu (default: cpu)")
    add("--out", type=user_path, required=True, metavar="FILE", help="the page to write, a .html file")


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "suite",
        nargs="?",
        metavar="SUITE|DATASET",
        help="list the datasets of one suite, or print the card of one dataset",
    )


def _new_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("title", metavar="NAME", help="title of the dataset")
    parser.add_argument("--data", required=True, metavar="FOLDER", help="the dataset")


COMMANDS = {
    "run": Command(
        summary="score models on datasets and suites, on each dataset's main task or the given tasks",
        arguments=partial(_task_arguments, TASKS),
        run="eval.commands:score",
    ),
    **{
        name: Command(
            summary=task.summary,
            arguments=partial(_task_arguments, {name: task}),
            run="eval.commands:score",
        )
        for name, task in TASKS.items()
    },
    "verify": Command(
        summary="check that a model reaches the expected scores in the dataset cards",
        arguments=_verify_arguments,
        run="eval.commands:verify",
    ),
    "report": Command(
        summary="build a run's report.html, or a page or table of the results of many models",
        arguments=_report_arguments,
        run="eval.commands:report",
    ),
    "compare": Command(
        summary="test which differences between two models are statistically significant",
        arguments=_compare_arguments,
        run="eval.commands:compare_models",
    ),
    "soup": Command(
        summary="average the weights of those models that do not lower the score on a dataset (greedy soup)",
        arguments=_soup_arguments,
        run="eval.commands:soup",
    ),
    "internals": Command(
        summary="build a page that analyzes an image tower: filters, attention, similarity of layers",
        arguments=_internals_arguments,
        run="eval.report.internals_page:run",
    ),
    "list": Command(
        summary="list the suites and their datasets",
        arguments=_list_arguments,
        run="eval.commands:list_datasets",
    ),
    "new": Command(
        summary="create a card for your own dataset from its folder",
        arguments=_new_arguments,
        run="eval.datasets.new:run",
    ),
}

if __name__ == "__main__":
    run_command(_program)

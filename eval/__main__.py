"""``python -m eval``: score models on datasets, and build pages of the results.

The modules that do the work, and with them torch, are imported after the command line has been parsed.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

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
from eval.tasks import TASKS, Task

__all__ = ["COMMANDS", "main"]

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # by option, torch's name
TABLES = {
    "csv": "scores.csv",
    "latex": "scores.tex",
    "markdown": "scores.md",
}  # by option, an example of a file
_EPILOG = """examples:
  python -m eval zero-shot --model runs/quickstart --data digits --data glyphs
  python -m eval retrieval --model runs/icons --data icons --data my_folder
  python -m eval run --suite builtin --model runs/quickstart
  python -m eval run --suite clip27 --data-root hf://datasets/clip-benchmark \\
      --model open_clip:ViT-B-32/openai --model runs/mine --skip-existing
  python -m eval report runs/quickstart
  python -m eval report A/results.jsonl B/results.jsonl --out compared.html
  python -m eval compare A/results.jsonl B/results.jsonl
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    Raises:
        ClipkitError: the user made a mistake, or data are broken.
    """
    return chosen_command(COMMANDS, _parser().parse_args(arguments))()


def _parser() -> Parser:
    return command_parser(
        COMMANDS,
        prog="python -m eval",
        description="Score models on datasets, and build pages of the results.",
        epilog=_EPILOG,
    )


def _program() -> int:
    """The command that the process was started with, among all ranks that torchrun has started."""
    command = chosen_command(COMMANDS, _parser().parse_args())
    from clipkit import distributed

    return distributed.together(command)()


# --------------------------------------------------------------------------------------------------------------
# Options that several commands share.


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="NAME|FOLDER",
        help="a dataset's name, a dataset folder or URL, or a folder of images by class; may be repeated",
    )
    parser.add_argument(
        "--suite",
        action="append",
        default=[],
        metavar="SUITE",
        help="the datasets of a suite; may be repeated",
    )
    parser.add_argument(
        "--data-root",
        metavar="FOLDER",
        help="folder or store that holds datasets by name; hf://datasets/clip-benchmark for the published ones",
    )


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts",
        default="",
        metavar="SET",
        help="prompt set, for datasets that have it (openai, clip_benchmark …)",
    )


def _add_model(parser: argparse.ArgumentParser, *, several: bool = True) -> None:
    add = parser.add_argument
    what = "a run folder, a checkpoint, anything else that clipkit.load takes, or timm:NAME"
    again = "; may be repeated" if several else ""
    add("--model", required=True, action="append", help=what + again)
    add(
        "--name",
        default="",
        metavar="ARCHITECTURE",
        help="its architecture, if that is not stored with the weights; NAME-quickgelu with QuickGELU",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="results file to append to (default: results.jsonl in the run folder of the model, else here)",
    )
    if several:
        add("--skip-existing", action="store_true", help="skip results already in FILE")
    add(
        "--features",
        metavar="FOLDER",
        help="where features of images and texts are cached (default: features in the cache); '' caches none",
    )
    add("--batch-size", type=whole(1, MOST_BATCH), default=256, metavar="N", help="default: 256")
    add("--device", default="auto", help="auto (CUDA if there is a GPU), cpu, cuda, cuda:1 …")
    add(
        "--precision",
        default="fp32",
        choices=["fp32", "bf16", "fp16"],
        help="number format of the towers (default: fp32)",
    )
    add("--seed", type=whole(0, MOST_SEED), default=0, help="seed of random draws (default: 0)")
    add_decoding_options(parser, default="as in the model's training")


# --------------------------------------------------------------------------------------------------------------
# The commands.


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    _add_data(parser)
    _add_model(parser)
    parser.add_argument(
        "--task",
        action="append",
        default=[],
        choices=[*TASKS],
        metavar="TASK",
        help=f"{', '.join(TASKS)}; may be repeated (default: each dataset's own)",
    )
    _add_prompts(parser)
    for task in TASKS.values():
        task.add_options(parser)


def _task_arguments(name: str, task: Task, parser: argparse.ArgumentParser) -> None:
    _add_data(parser)
    _add_model(parser)
    parser.set_defaults(prompts="", task=[name])
    if task.by_prompts:
        _add_prompts(parser)
    task.add_options(parser)


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    _add_data(parser)
    _add_model(parser, several=False)
    parser.add_argument(
        "--as",
        dest="known_as",
        default="",
        metavar="NAME",
        help="the name under which cards list its scores (default: MODEL)",
    )
    parser.set_defaults(skip_existing=False)  # what is checked is measured


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        nargs="+",
        metavar="RUN|RESULTS",
        help="one run folder; or results.jsonl files, or several run folders",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="default: RUN/report.html for one run; else scores.html beside the first results",
    )
    for table in ("csv", "latex", "markdown"):
        parser.add_argument(
            f"--{table}", type=Path, metavar="FILE", help="also write the results table to FILE; - prints it"
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
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="results file with both models; may be repeated",
    )


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
        summary="score models on datasets and suites, by each dataset's main task or by the tasks given",
        arguments=_run_arguments,
        run="eval.commands:score",
    ),
    **{
        name: Command(
            summary=task.summary,
            arguments=partial(_task_arguments, name, task),
            run="eval.commands:score",
        )
        for name, task in TASKS.items()
    },
    "verify": Command(
        summary="check that a model reaches the scores that cards expect of it",
        arguments=_verify_arguments,
        run="eval.commands:verify",
    ),
    "report": Command(
        summary="build a run's report.html, or a page or table over the results of many models",
        arguments=_report_arguments,
        run="eval.commands:report",
    ),
    "compare": Command(
        summary="test which differences between two models are statistically significant",
        arguments=_compare_arguments,
        run="eval.commands:compare_models",
    ),
    "list": Command(
        summary="list the suites and their datasets",
        arguments=_list_arguments,
        run="eval.commands:list_datasets",
    ),
    "new": Command(
        summary="make a card for a dataset of your own from its folder",
        arguments=_new_arguments,
        run="eval.datasets.new:run",
    ),
}

if __name__ == "__main__":
    run_command(_program)

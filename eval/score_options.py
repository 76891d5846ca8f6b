"""What the scoring commands take on the command line."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from clipkit.arguments import MOST_BATCH, MOST_SEED, number, whole
from clipkit.image_traits import add_decoding_options
from eval.tasks import Options
from eval.tasks.few_shot import ESTIMATORS, SHOTS
from eval.tasks.fine_tune import RATES
from eval.tasks.knn import KS

__all__ = ["PRECISIONS", "add_data", "add_model", "add_prompts", "add_task_options", "task_options"]

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_MOST = 1e6
_positive = whole(1, MOST_BATCH)
_number = number(0, _MOST, above=True)


def add_data(command: argparse.ArgumentParser) -> None:
    """What to score on."""
    add = command.add_argument
    add(
        "--data",
        action="append",
        default=[],
        metavar="NAME|FOLDER",
        help="a dataset's name, a dataset folder or URL, or a folder of pictures by class; may be repeated",
    )
    add(
        "--suite",
        action="append",
        default=[],
        metavar="SUITE",
        help="datasets by their suite's name; may be repeated",
    )
    add(
        "--data-root",
        metavar="FOLDER",
        help="where datasets are looked for by name; hf://datasets/clip-benchmark for the published ones",
    )


def add_prompts(command: argparse.ArgumentParser) -> None:
    """By which prompts."""
    command.add_argument(
        "--prompts",
        default="",
        metavar="SET",
        help="prompt set, where a dataset has it (openai, clip_benchmark …)",
    )


def add_model(command: argparse.ArgumentParser, *, several: bool = True) -> None:
    """What to score, and how; one model or several, of which some may have scores already."""
    add = command.add_argument
    what = "a run folder, a checkpoint, what clipkit.load takes, or timm:NAME"
    again = "; may be repeated" if several else ""
    add("--model", required=True, action="append", help=what + again)
    add(
        "--name",
        default="",
        metavar="ARCHITECTURE",
        help="its architecture, where that is not stored with the weights; NAME-quickgelu with QuickGELU",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to append lines (default: results.jsonl in the run folder of the model, else here)",
    )
    if several:
        add("--skip-existing", action="store_true", help="leave alone what FILE has scores of")
    add(
        "--features",
        metavar="FOLDER",
        help="where encoded pictures and texts are kept (default: features in the cache); '' keeps none",
    )
    add("--batch-size", type=_positive, default=256, metavar="N", help="default: 256")
    add("--device", default="auto", help="auto (CUDA where there is one), cpu, cuda, cuda:1 …")
    add("--precision", default="fp32", choices=[*PRECISIONS], help="what the towers run in (default: fp32)")
    add("--seed", type=whole(0, MOST_SEED), default=0, help="of whatever is drawn (default: 0)")
    add_decoding_options(command, default="as in the model's training")


def add_task_options(command: argparse.ArgumentParser, tasks: Sequence[str]) -> None:
    """Options that some tasks have."""
    add = command.add_argument
    if "linear-probe" in tasks:
        add(
            "--layers",
            nargs="*",
            type=_positive,
            metavar="K",
            help="linear-probe: probe the image tower behind these blocks too (all where none is named)",
        )
    if "few-shot" in tasks:
        shots = " ".join(map(str, SHOTS))
        add(
            "--shots",
            nargs="+",
            type=_positive,
            default=SHOTS,
            metavar="N",
            help=f"few-shot: default {shots}",
        )
        add(
            "--seeds",
            nargs="+",
            type=whole(0, MOST_SEED),
            default=(0, 1, 2),
            metavar="S",
            help="few-shot: draws (default: 0 1 2)",
        )
        add("--estimators", nargs="+", choices=ESTIMATORS, default=ESTIMATORS, help="few-shot: default both")
        add("--tuned", action="store_true", help="few-shot: choose C on the val split, as the CLIP paper did")
    if "knn" in tasks:
        add("--neighbours", nargs="+", type=_positive, default=KS, metavar="K", help="knn: default 10 20")
    if "fine-tune" in tasks:
        _add_fine_tuning(add)


def _add_fine_tuning(add: Callable[..., object]) -> None:
    rates = " ".join(f"{rate:g}" for rate in RATES)
    add("--epochs", type=_number, default=10.0, metavar="E", help="fine-tune: default 10")
    add(
        "--rates",
        nargs="+",
        type=_number,
        default=RATES,
        metavar="LR",
        help=f"fine-tune: learning rates, of which the best on val is taken (default {rates})",
    )
    add(
        "--fine-tune-batch",
        type=_positive,
        default=128,
        metavar="N",
        help="fine-tune: pictures of a step (default 128)",
    )
    add(
        "--runs",
        type=Path,
        metavar="FOLDER",
        help="fine-tune: where trainings and their models lie (default: fine-tune in the cache)",
    )


def task_options(options: argparse.Namespace) -> Options:
    """Of the command line, for the tasks that it has; the same ones in another order are the same."""
    layers = getattr(options, "layers", None)
    return Options(
        seed=options.seed,
        layers=False if layers is None else tuple(sorted(layers)) or True,
        shots=tuple(sorted(getattr(options, "shots", SHOTS))),
        seeds=tuple(sorted(getattr(options, "seeds", (0, 1, 2)))),
        estimators=tuple(one for one in ESTIMATORS if one in getattr(options, "estimators", ESTIMATORS)),
        tuned=getattr(options, "tuned", False),
        neighbours=tuple(sorted(getattr(options, "neighbours", KS))),
        epochs=getattr(options, "epochs", 10.0),
        rates=tuple(sorted(set(getattr(options, "rates", RATES)))),
        fine_tune_batch=getattr(options, "fine_tune_batch", 128),
        runs=getattr(options, "runs", None),
    )

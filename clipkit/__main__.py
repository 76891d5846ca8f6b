"""``python -m clipkit``, for where the command ``clipkit`` is not on the path."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from clipkit.errors import MOST_BATCH, MOST_WORKERS, Parser, leaving_at_once, number, run_command, whole
from clipkit.files.traits import add_decoding_options

__all__ = ["dispatch", "main"]


# --------------------------------------------------------------------------------------------------------------
# The command line: what can be said, and which module does it. That module is imported when it is chosen.

SOURCES = """\
SOURCE is
  a folder        every picture below it, and the shards directly in it
  a picture       .jpg, .png, .webp, .gif, .tif, .bmp, .avif, ...
  shards          WebDataset tars: one, a folder or data set, or a pattern
                  'pairs/{00000..00041}.tar'
  a table         .csv, .tsv, .jsonl or .parquet with a column of paths
"""
TEXTS = """\
and with --text
  lines.txt, -    a text a line; - is standard input
  a table         its column of captions
  shards          their captions
"""
MODEL = "a run, a checkpoint, or anything else that clipkit.load takes"


@dataclass(frozen=True, kw_only=True)
class _Command:
    """One sub-command."""

    summary: str
    epilog: str
    module: str  # which does it
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    stopped: str  # what Ctrl-C leaves behind


def main() -> NoReturn:
    """Run the command that the program was started with."""
    run_command(partial(dispatch, sys.argv[1:]))


def dispatch(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit status.

    Raises:
        ClipkitError: a mistake that the user can mend.
    """
    parser = Parser(
        prog="clipkit",
        description="Put a CLIP model to use.",
        epilog="clipkit COMMAND --help says more about a command.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, command in COMMANDS.items():
        one = commands.add_parser(
            name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.arguments(one)
    parsed = parser.parse_args(arguments)
    chosen = COMMANDS[parsed.command]
    with leaving_at_once(chosen.stopped):
        import_module(chosen.module)
    try:
        return chosen.run(parsed)
    except KeyboardInterrupt:
        print(f"stopped; {chosen.stopped}", file=sys.stderr)
        return 130


def _encode_arguments(parser: argparse.ArgumentParser) -> None:
    _shared_arguments(parser)
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="the folder to write")
    parser.add_argument("--text", action="store_true", help="encode texts, not pictures")
    parser.add_argument(
        "--rows-per-file",
        metavar="N",
        type=whole(1, 10_000_000),
        default=10_000,
        help="pictures of a file; what a stop can lose (default: 10000)",
    )
    parser.add_argument("--caption-column", metavar="C", help="column of tables (default: guessed)")
    parser.add_argument(
        "--retry-failed", action="store_true", help="encode files again in which something failed"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _encode(parsed: argparse.Namespace) -> int:
    from clipkit.inference.encode import EncodeOptions, run

    return run(EncodeOptions(**_options(parsed)))


def _classify_arguments(parser: argparse.ArgumentParser) -> None:
    _shared_arguments(parser)
    parser.add_argument(
        "--labels", required=True, metavar="LABELS", help='"cat,dog,...", or a file with a label a line'
    )
    parser.add_argument(
        "--templates",
        metavar="T",
        nargs="+",
        action="extend",
        help='prompts with {c} for the label, or a file of them (default: "a photo of a {c}.")',
    )
    parser.add_argument(
        "--top", metavar="K", type=whole(1, 1_000_000), default=3, help="labels a picture (default: 3)"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="write a .csv, .json or .jsonl file too")


def _classify(parsed: argparse.Namespace) -> int:
    from clipkit.inference.classify import ClassifyOptions, run

    return run(ClassifyOptions(**_options(parsed)))


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument(
        "out", metavar="OUT", type=Path, help="a new folder, or an earlier export to add a library to"
    )
    parser.add_argument(
        "--to",
        action="append",
        choices=("open_clip", "transformers", "onnx", "sentence-transformers", "timm"),
        default=[],
        metavar="LIBRARY",
        help="what is to load it: open_clip, transformers, onnx, sentence-transformers or timm; "
        "may be repeated (default: open_clip and transformers)",
    )
    parser.add_argument(
        "--name",
        metavar="NAME",
        default="",
        help="its architecture, where that is not stored with the weights",
    )


def _export(parsed: argparse.Namespace) -> int:
    from clipkit.export import ExportOptions, run

    return run(ExportOptions(**_options(parsed)))


def _interpolate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="FIRST", help=f"{MODEL}, such as what a fine-tuning began from")
    parser.add_argument("second", metavar="SECOND", help="the same model trained further")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--alpha",
        metavar="A",
        nargs="+",
        type=number(0, 1),
        default=[0.5],
        help="share of SECOND, 0 to 1; of several, each is written to DIR/alpha_A (default: 0.5)",
    )
    parser.add_argument(
        "--name",
        metavar="NAME",
        default="",
        help="their architecture, where that is not stored with the weights",
    )


def _interpolate(parsed: argparse.Namespace) -> int:
    from clipkit.export import InterpolateOptions
    from clipkit.export import run_interpolate as run

    return run(InterpolateOptions(**_options(parsed)))


def _shared_arguments(parser: argparse.ArgumentParser) -> None:
    """What every command has that runs pictures through a model."""
    parser.add_argument("sources", metavar="SOURCE", nargs="+", help="what to read; see below")
    parser.add_argument("--model", metavar="M", required=True, help=MODEL)
    parser.add_argument(
        "--name",
        metavar="NAME",
        default="",
        help="its architecture, where that is not stored with the weights",
    )
    parser.add_argument(
        "--batch-size", metavar="N", type=whole(1, MOST_BATCH), help="(default: 32 on a CPU, else 256)"
    )
    parser.add_argument(
        "--device", metavar="D", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)"
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="what the towers compute in (default: fp32)",
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        type=whole(0, MOST_WORKERS),
        help="threads that read and decode (default: one a core)",
    )
    parser.add_argument("--image-column", metavar="C", help="column of tables (default: guessed)")
    add_decoding_options(parser, default="as in the model's training")


def _options(parsed: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(parsed).items() if name != "command"}


# further commands are further entries
COMMANDS = {
    "encode": _Command(
        summary="turn pictures or texts into embeddings (clip-retrieval's layout)",
        epilog=SOURCES
        + TEXTS
        + """
DIR gets
  img_emb/img_emb_0.npy        (N, D) float16, each row of length 1
  metadata/metadata_0.parquet  a row for each: image_path, caption if there are
                               any, source
  failures.jsonl               what could not be encoded: source, key, cause
  manifest.json                what it was made from, and how
and with --text text_emb/text_emb_0.npy and the columns caption, key, source.
Files are numbered _0, _1, ...; with more than 9 of them _00, _01, ...
To read them:
  import numpy as np, pyarrow.parquet as pq
  from pathlib import Path
  files = sorted(Path("DIR/img_emb").glob("*.npy"))
  rows = np.concatenate([np.load(file) for file in files])   # (N, D) float16
  names = pq.read_table("DIR/metadata")["image_path"]        # N, same order

The same command goes on where it was stopped. When there are more pictures or
sources, or files have another size or time than before, it encodes those files
of embeddings again that hold what has changed. Over several processes:
  torchrun --nproc-per-node 8 -m clipkit encode ...""",
        module="clipkit.inference.encode",
        arguments=_encode_arguments,
        run=_encode,
        stopped="the same command goes on where it was",
    ),
    "classify": _Command(
        summary="find the best of your labels for each picture (zero-shot)",
        epilog=SOURCES
        + """
  clipkit classify photos/ --labels "cat,dog,a bird" --model runs/pets
  clipkit classify a.jpg --labels names.txt --templates "a sketch of a {c}."
    "a {c}" --model runs/pets --out labels.csv""",
        module="clipkit.inference.classify",
        arguments=_classify_arguments,
        run=_classify,
        stopped="no file was written",
    ),
    "export": _Command(
        summary="store a model as other libraries load it",
        epilog="""\
Each is loaded back and its embeddings are compared before it is done.

  clipkit export runs/pets pets-clip
  clipkit export runs/pets pets-onnx --to onnx""",
        module="clipkit.export",
        arguments=_export_arguments,
        run=_export,
        stopped="no file was written",
    ),
    "interpolate": _Command(
        summary="make a model whose weights lie between those of two (WiSE-FT)",
        epilog="""\
Both have the same architecture, tokenizer and preprocessing. DIR is then a
model as any other.

  clipkit interpolate open_clip:ViT-B-32/openai runs/pets --out between
  clipkit interpolate runs/a runs/b --alpha 0.25 0.5 0.75 --out between""",
        module="clipkit.export",
        arguments=_interpolate_arguments,
        run=_interpolate,
        stopped="what was finished is written",
    ),
}


# --------------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    main()

"""The command ``clipkit``, also available as ``python -m clipkit``.

Each sub-command is an entry of ``COMMANDS``; its module is imported only when the command is run.
"""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from clipkit.cli import (
    MODEL,
    MOST_SEED,
    Command,
    add_decoding_options,
    add_dim,
    add_model_options,
    add_name,
    chosen_command,
    command_parser,
    number,
    whole,
)
from clipkit.errors import run_command
from clipkit.export import EXPORTS
from clipkit.files import user_path

__all__ = ["COMMANDS", "dispatch", "main"]


SOURCES = """\
SOURCE is
  a folder        all images below it, and the shards directly in it
  an image        .jpg, .png, .webp, .gif, .tif, .bmp, .avif, ...
  shards          WebDataset tars: one, a folder or dataset, or a pattern
                  'pairs/{00000..00041}.tar'
  a table         .csv, .tsv, .jsonl or .parquet with a column of paths
  Parquet files   with encoded images, as on the Hugging Face hub
Shards and Parquet files may be in a store: s3://, gs://, https://, hf://; or
'pipe:COMMAND' writes a tar.
"""
TEXTS = """\
and with --text
  lines.txt, -    one text per line; - is standard input
  a table         the column of captions
  shards          the captions
"""


def main() -> NoReturn:
    """Run the sub-command given on the command line."""
    run_command(dispatch)


def dispatch(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command, by default the one on the process's command line; return the exit status.

    Raises:
        ClipkitError: a user error.
    """
    parser = command_parser(
        COMMANDS,
        prog="clipkit",
        description="Use CLIP models on images and texts, export and interpolate them.",
        epilog="Run clipkit COMMAND --help for the options of a command.",
    )
    return chosen_command(COMMANDS, parser.parse_args(arguments))()


def _encode_arguments(parser: argparse.ArgumentParser) -> None:
    _shared_arguments(parser)
    parser.add_argument("--out", metavar="DIR", type=user_path, required=True, help="output folder")
    parser.add_argument("--text", action="store_true", help="encode texts instead of images")
    parser.add_argument(
        "--rows-per-file",
        metavar="N",
        type=whole(1, 10_000_000),
        default=10_000,
        help="rows per output file; an interrupted file is encoded again (default: 10000)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "int8", "binary"),
        default="float16",
        help="how embeddings are stored; int8 takes a byte per element, binary a bit (default: float16)",
    )
    parser.add_argument("--caption-column", metavar="C", help="column of tables (default: guessed)")
    parser.add_argument(
        "--retry-failed", action="store_true", help="encode files that contain failures again"
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        default="",
        help="encode on a Ray cluster, such as 10.0.0.1:6379, or local (default: in this process)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _classify_arguments(parser: argparse.ArgumentParser) -> None:
    _shared_arguments(parser)
    parser.add_argument("--labels", metavar="LABELS", help='"cat,dog,...", or a file with one label per line')
    parser.add_argument(
        "--templates",
        metavar="T",
        nargs="+",
        action="extend",
        help='prompts with {c} as a placeholder for the label, or a file of them (default: "a photo of a {c}.")',
    )
    parser.add_argument(
        "--top", metavar="K", type=whole(1, 1_000_000), default=3, help="labels per image (default: 3)"
    )
    parser.add_argument(
        "--calibrate",
        metavar="FOLDER",
        help="fit probabilities and thresholds on images in one folder per label; in a folder none, images of no "
        "label",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="file that --calibrate writes (default: calibration.json), or that is used without it",
    )
    parser.add_argument(
        "--least-precision",
        metavar="P",
        type=number(0, 1),
        help="precision that the thresholds of --calibrate must reach (default: 0.9)",
    )
    parser.add_argument("--none", action="store_true", help="give no label below the threshold")
    parser.add_argument(
        "--multi-label", action="store_true", help="give all labels that reach their thresholds"
    )
    parser.add_argument(
        "--review", metavar="FILE", type=user_path, help="write a page of the least certain images to correct"
    )
    parser.add_argument(
        "--out", metavar="FILE", type=user_path, help="write a .csv, .json or .jsonl file instead of printing"
    )


def _caption_arguments(parser: argparse.ArgumentParser) -> None:
    _shared_arguments(parser)
    parser.add_argument("--prefix", metavar="TEXT", default="", help="start of all captions")
    parser.add_argument(
        "--beams",
        metavar="K",
        type=whole(1, 1000),
        default=1,
        help="hypotheses of a beam search (default: 1)",
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=number(0, 1),
        default=0.0,
        help="sample among the most probable tokens with this total probability (default: take the best)",
    )
    parser.add_argument("--seed", metavar="N", type=whole(0, MOST_SEED), help="seed of --top-p (default: 0)")
    parser.add_argument(
        "--length",
        metavar="N",
        type=whole(1, 1_000_000),
        default=0,
        help="maximum number of tokens with prefix and end (default: the model's)",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=user_path, help="write a .csv or .jsonl file instead of printing"
    )


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("image", metavar="IMAGE", type=user_path, help="an image file")
    parser.add_argument("prompts", metavar="PROMPT", nargs="+", help="texts such as 'a photo of a cat'")
    parser.add_argument("--model", metavar="M", required=True, help=MODEL)
    add_name(parser)
    parser.add_argument(
        "--device", metavar="D", help="cpu, cuda, cuda:1, mps, xpu (default: auto, an accelerator if any)"
    )
    add_dim(parser)
    add_decoding_options(parser, default="as in the model's training")
    parser.add_argument("--out", metavar="FILE", type=user_path, required=True, help="the .png file to write")


def _complete_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("image", metavar="IMAGE", type=user_path, help="an image file")
    parser.add_argument("--model", metavar="M", required=True, help=MODEL)
    parser.add_argument(
        "--keep",
        metavar="F",
        type=number(0, 1),
        default=0.5,
        help="upper part of the image that is given (default: 0.5)",
    )
    parser.add_argument(
        "--samples", metavar="N", type=whole(1, 100), default=6, help="completions (default: 6)"
    )
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=number(0.01, 100),
        default=1.0,
        help="divides the logits; below 1 prefers likely colors (default: 1)",
    )
    parser.add_argument("--seed", metavar="S", type=whole(0, MOST_SEED), default=0, help="(default: 0)")
    parser.add_argument(
        "--device", metavar="D", help="cpu, cuda, cuda:1, mps, xpu (default: auto, an accelerator if any)"
    )
    add_decoding_options(parser, default="as in the model's training")
    parser.add_argument("--out", metavar="FILE", type=user_path, required=True, help="the .png file to write")


def _search_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("embeddings", metavar="EMBEDDINGS", help="a folder that clipkit encode wrote")
    parser.add_argument("text", metavar="TEXT", nargs="?", default="", help="what to search for")
    parser.add_argument(
        "--image", metavar="FILE", type=user_path, action="append", default=[], help="an image to search for"
    )
    parser.add_argument(
        "--not", dest="unwanted", metavar="TEXT", action="append", default=[], help="what is not wanted"
    )
    parser.add_argument("-k", metavar="N", type=whole(1, 100_000), default=20, help="results (default: 20)")
    parser.add_argument(
        "--html", metavar="FILE", type=user_path, help="write a page with thumbnails instead of printing"
    )
    _add_exact(parser)
    parser.add_argument("--model", metavar="M", help="(default: that of the embeddings)")
    add_name(parser)
    parser.add_argument(
        "--device", metavar="D", help="cpu, cuda, cuda:1, mps, xpu (default: auto, an accelerator if any)"
    )


def _index_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("embeddings", metavar="EMBEDDINGS", help="a folder that clipkit encode wrote")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _add_exact(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--exact", action="store_true", help="compare all rows, although the folder has an index"
    )


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "embeddings",
        metavar="EMBEDDINGS",
        nargs="+",
        help="folders that clipkit encode wrote, shown side by side",
    )
    _add_exact(parser)
    parser.add_argument(
        "--model", metavar="M", action="append", help="for each folder (default: those of the embeddings)"
    )
    add_name(parser)
    parser.add_argument(
        "--device", metavar="D", help="cpu, cuda, cuda:1, mps, xpu (default: auto, an accelerator if any)"
    )
    parser.add_argument(
        "--port", metavar="N", type=whole(0, 65_535), default=8000, help="(default: 8000; 0: any)"
    )
    parser.add_argument(
        "--host",
        metavar="H",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, this machine)",
    )
    parser.add_argument(
        "--token", metavar="T", help="token that other addresses require (default: a random one)"
    )


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument(
        "out", metavar="OUT", type=user_path, help="a new folder, or an existing export to extend"
    )
    parser.add_argument(
        "--to",
        action="append",
        choices=tuple(EXPORTS),
        default=[],
        metavar="LIBRARY",
        help=f"library to export to: {', '.join(EXPORTS)}; may be repeated (default: "
        f"{' and '.join(name for name, target in EXPORTS.items() if target.default)})",
    )
    parser.add_argument(
        "--quantize",
        choices=("int8",),
        help="with --to onnx: store int8 weights (the same as --to onnx-int8)",
    )
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="upload OUT to this repository of the Hugging Face hub, with the token of HF_TOKEN or `hf auth login`",
    )
    parser.add_argument(
        "--public", action="store_true", help="with --push: a new repository is public (default: private)"
    )
    add_name(parser)


def _interpolate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="FIRST", help=f"{MODEL}, such as the model before fine-tuning")
    parser.add_argument("second", metavar="SECOND", help="the same model after further training")
    parser.add_argument(
        "more", metavar="MORE", nargs="*", default=[], help="further ones: the mean of all is written"
    )
    parser.add_argument("--out", metavar="DIR", type=user_path, required=True, help="output folder")
    parser.add_argument(
        "--alpha",
        metavar="A",
        nargs="+",
        type=number(0, 1),
        help="weight of SECOND, 0 to 1; several values write one model each, to DIR/alpha_A (default: 0.5)",
    )
    add_name(parser)


def _shared_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that run a model."""
    parser.add_argument("sources", metavar="SOURCE", nargs="+", help="input; see below")
    add_model_options(parser)
    parser.add_argument("--image-column", metavar="C", help="column of tables (default: guessed)")
    parser.add_argument(
        "--cache-gb",
        metavar="GB",
        type=number(0, 1e6),
        default=100.0,  # as ``data.cache_gb``
        help="size of the cache of files in stores (default: %(default)g; 0 reads shards over the network)",
    )


COMMANDS = {
    "encode": Command(
        summary="encode images or texts (in clip-retrieval's layout)",
        epilog=SOURCES
        + TEXTS
        + """
DIR will contain
  img_emb/img_emb_0.npy        (N, D) float16 or --dtype, unit-norm rows
  metadata/metadata_0.parquet  image_path, caption (if any), source and digest
                               of each row
  failures.jsonl               inputs that failed: source, key, cause, digest
  manifest.json                the inputs and settings
With --text, it contains text_emb/text_emb_0.npy, and the metadata columns are
caption, key, source and digest. The digest is the first 64 bits of the SHA-256
of the image file or text. Files are numbered _0, _1, ..., zero-padded if there
are more than ten.
To read them:
  import numpy as np, pyarrow.parquet as pq
  from pathlib import Path
  files = sorted(Path("DIR/img_emb").glob("*.npy"))
  rows = np.concatenate([np.load(file) for file in files])   # (N, D) float16
  names = pq.read_table("DIR/metadata")["image_path"]        # N, same order

int8 rows stand for the unit vector in their direction. binary rows are the
signs of the elements, packed by numpy.packbits (1 is positive). Both are
scored with queries in float32; their recall against float32 is printed.

Running the same command again resumes it, with the same --batch-size, --device
and --precision, which affect rounding. If inputs were added, removed or
changed, only images with new content are encoded. To use several processes:
  torchrun --nproc-per-node 8 -m clipkit encode ...
or a Ray cluster whose nodes see the sources and the model at the same paths:
  clipkit encode ... --ray 10.0.0.1:6379 --rows-per-file 1000""",
        run="clipkit.inference.encode:run",
        arguments=_encode_arguments,
        stopped="run the same command again to resume",
    ),
    "classify": Command(
        summary="find the best labels for each image (zero-shot)",
        epilog=SOURCES
        + """
  clipkit classify photos/ --labels "cat,dog,a bird" --model runs/pets
  clipkit classify a.jpg --labels names.txt --templates "a sketch of a {c}." \\
    "a {c}" --model runs/pets --out labels.csv
With a few labelled images in labelled/cat, labelled/dog, labelled/none:
  clipkit classify photos/ --calibrate labelled --none --model runs/pets \\
    --review review.html""",
        run="clipkit.inference.classify:run",
        arguments=_classify_arguments,
        stopped="no file was written",
    ),
    "caption": Command(
        summary="describe images, with a model trained with caption.weight",
        epilog=SOURCES
        + """
  clipkit caption photos/ --model runs/captions
  clipkit caption photos/ --model runs/captions --beams 4 --out captions.csv

With --out, running the same command again resumes it; a complete file is not
replaced.""",
        run="clipkit.inference.caption:run",
        arguments=_caption_arguments,
        stopped="with --out, run the same command again to resume",
    ),
    "explain": Command(
        summary="write heatmaps of texts in an image (LeGrad)",
        epilog="""\
FILE shows the preprocessed image, and a heatmap of each PROMPT from black to
yellow, scaled to its maximum: a heatmap shows where a text would be, not
whether the image contains it.

  clipkit explain photo.jpg "a cat" "a dog" --model runs/pets --out heat.png""",
        run="clipkit.inference.explain:run",
        arguments=_explain_arguments,
        stopped="no file was written",
    ),
    "complete": Command(
        summary="complete an image with Image GPT",
        epilog="""\
FILE shows the image in the model's palette, its given part, and samples.

  clipkit complete photo.jpg --model runs/pixels --out completed.png""",
        run="clipkit.inference.complete:run",
        arguments=_complete_arguments,
        stopped="no file was written",
    ),
    "search": Command(
        summary="search embeddings for texts and images",
        epilog="""\
The text and the images are combined to the mean of their embeddings; half the
mean of what is not wanted is subtracted. All rows are compared, unless
`clipkit index` has indexed them.

  clipkit encode photos/ --model runs/pets --out embeddings
  clipkit search embeddings "a red bicycle" --not "a person"
  clipkit search embeddings --image cat.jpg -k 100 --html cats.html""",
        run="clipkit.inference.search:run",
        arguments=_search_arguments,
        stopped="nothing was found",
        extra="pack",
    ),
    "index": Command(
        summary="index embeddings, to search millions in milliseconds",
        epilog="""\
Needs the extra `index`. The index is stored in EMBEDDINGS/index; search and
serve use it, except with filters or --exact. It selects candidates, whose
similarities are exact, and may miss some of the nearest rows: the recall is
printed. Embeddings that are added later are compared one by one until this
command adds them.

  clipkit index embeddings""",
        run="clipkit.inference.search:run_index",
        arguments=_index_arguments,
        stopped="the earlier index, if any, is unchanged",
        extra="pack",
    ),
    "serve": Command(
        summary="search embeddings on a web page, with a JSON API",
        epilog="""\
Needs the extra `serve`. New embeddings are found without a restart. The API is
described at /openapi.json:
  curl 'http://127.0.0.1:8000/api/search?text=a+red+bicycle&k=20'
  curl -F file=@cat.jpg 'http://127.0.0.1:8000/api/search?k=20'

  clipkit serve embeddings
  clipkit serve embeddings other --port 8001""",
        run="clipkit.inference.serve:run",
        arguments=_serve_arguments,
        stopped="the server has ended",
        extra="serve",
    ),
    "export": Command(
        summary="export a model for other libraries",
        epilog="""\
Each export is loaded with its library to check that it gives the same
embeddings.

  clipkit export runs/pets pets-clip
  clipkit export runs/pets pets-clip --push me/pets
  clipkit export runs/pets pets-onnx --to onnx
  clipkit export runs/pets pets-int8 --to onnx --quantize int8
  python -m eval zero-shot --model runs/pets --model pets-int8 --data FOLDER""",
        run="clipkit.export.write:run",
        arguments=_export_arguments,
        stopped="no file was written",
    ),
    "interpolate": Command(
        summary="interpolate or average the weights of models (WiSE-FT, soups)",
        epilog="""\
The models must have the same architecture, tokenizer and preprocessing. Every
command accepts the result as a model. `python -m eval soup` averages those
models that do not lower the score on a dataset.

  clipkit interpolate open_clip:ViT-B-32/openai runs/pets --out between
  clipkit interpolate runs/a runs/b --alpha 0.25 0.5 0.75 --out between
  clipkit interpolate runs/a runs/b runs/c --out soup""",
        run="clipkit.export.interpolation:run",
        arguments=_interpolate_arguments,
        stopped="models finished so far were written",
    ),
}


if __name__ == "__main__":
    main()

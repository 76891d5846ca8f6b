"""The options of ``clipkit`` and of ``train.py``. Imports no torch, so --help and errors are printed at once.

``COMMANDS`` has the sub-commands of ``clipkit``; the module of a command is imported when the command runs.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clipkit.cli import (
    MODEL,
    MOST_SEED,
    REQUIRED,
    Command,
    DeviceOptions,
    ImageOptions,
    LoadOptions,
    ModelOptions,
    NameOptions,
    Parser,
    add_options,
    build_options,
    group,
    integers,
    numbers,
    one_of,
    setting,
)
from clipkit.errors import ConfigError

# the names of ``clipkit.export.EXPORTS``, whose package imports torch
EXPORT_TARGETS = (
    "open_clip", "transformers", "sentence-transformers", "timm", "onnx", "onnx-int8", "openvino", "openvino-int8",
)  # fmt: skip
_EMBEDDINGS = "a folder that clipkit encode wrote"
_DEFAULT_CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.toml"
_MOST = 1_000_000
_EXACT = "compare all rows, even if the folder has an index"
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


@dataclass(frozen=True, kw_only=True)
class SourceOptions(ImageOptions, ModelOptions):
    """Images, and the model that reads them."""

    sources: tuple[str, ...] = setting(REQUIRED, "input; see below", positional=True)
    image_column: str | None = setting(None, "column of tables", default_text="guessed")
    # as data.cache_gb
    cache_gb: float = setting(
        100.0, "size of the cache of files in stores; 0 reads shards over the network", numbers(0, 1e6)
    )


@dataclass(frozen=True, kw_only=True)
class EncodeOptions(SourceOptions):
    """Encode images or texts (in clip-retrieval's layout)."""

    out: Path = setting(REQUIRED, "output folder", metavar="DIR")
    text: bool = setting(False, "encode texts instead of images")
    rows_per_file: int = setting(
        10_000, "rows per output file; an interrupted file is encoded again", integers(1, 10_000_000)
    )
    dtype: str = setting(
        "float16",
        "how embeddings are stored; int8 takes a byte per element, binary a bit",
        one_of("float32", "float16", "int8", "binary"),
    )
    caption_column: str | None = setting(None, "column of tables", default_text="guessed")
    captions: tuple[str, ...] = setting(
        (),
        "sources of captions as in data.captions: txt, other members or json fields, separated by commas; the "
        "first of them with a caption is used",
        metavar="NAMES",
        separated=True,
        default_text="guessed",
    )
    retry_failed: bool = setting(False, "encode files that contain failures again")
    ray: str = setting(
        "",
        "encode on a Ray cluster, such as 10.0.0.1:6379, or local",
        metavar="ADDRESS",
        default_text="in this process",
    )
    quiet: bool = setting(False, "print no progress")


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions(SourceOptions):
    """Find the best labels for each image (zero-shot)."""

    labels: str | None = setting(None, '"cat,dog,...", or a file with one label per line')
    templates: tuple[str, ...] = setting(
        (),
        "prompts with {c} as a placeholder for the label, or a file of them",
        default_text='"a photo of a {c}."',
        listed=True,
    )
    top: int = setting(3, "labels per image", integers(1, 1_000_000))
    calibrate: Path | None = setting(
        None,
        "fit probabilities and thresholds on images in one folder per label; in a folder none, images of no label",
        metavar="FOLDER",
    )
    calibration: Path | None = setting(
        None, "file that --calibrate writes (default: calibration.json), or that is used without it"
    )
    least_precision: float | None = setting(
        None, "precision that the thresholds of --calibrate must reach", numbers(0, 1), default_text="0.9"
    )
    none: bool = setting(False, "give no label below the threshold")
    multi_label: bool = setting(False, "give all labels that reach their thresholds")
    review: Path | None = setting(None, "write a page of the least certain images to correct")
    out: Path | None = setting(None, "write a .csv, .json or .jsonl file instead of printing")


@dataclass(frozen=True, kw_only=True)
class CaptionOptions(SourceOptions):
    """Describe images, with a model trained with caption.weight."""

    prefix: str = setting("", "start of all captions", metavar="TEXT")
    beams: int = setting(1, "hypotheses of a beam search", integers(1, 1000))
    top_p: float = setting(
        0.0,
        "sample among the most probable tokens with this total probability",
        numbers(0, 1),
        default_text="take the best",
    )
    seed: int | None = setting(None, "seed of --top-p", integers(0, MOST_SEED), default_text="0")
    length: int = setting(
        0, "maximum number of tokens with prefix and end", integers(1, 1_000_000), default_text="the model's"
    )
    out: Path | None = setting(None, "write a .csv or .jsonl file instead of printing")


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(LoadOptions):
    """Write heatmaps of texts in an image (LeGrad)."""

    image: Path = setting(REQUIRED, "an image file", positional=True)
    prompts: tuple[str, ...] = setting(REQUIRED, "texts such as 'a photo of a cat'", positional=True)
    out: Path = setting(REQUIRED, "the .png file to write")


@dataclass(frozen=True, kw_only=True)
class CompleteOptions(LoadOptions):
    """Complete an image with Image GPT."""

    image: Path = setting(REQUIRED, "an image file", positional=True)
    keep: float = setting(0.5, "fraction of the image that is given, from the top", numbers(0, 1))
    samples: int = setting(6, "number of completions", integers(1, 100))
    temperature: float = setting(1.0, "divides the logits; below 1 prefers likely colors", numbers(0.01, 100))
    seed: int = setting(0, "random seed", integers(0, MOST_SEED))
    out: Path = setting(REQUIRED, "the .png file to write")


@dataclass(frozen=True, kw_only=True)
class SearchOptions(DeviceOptions, NameOptions):
    """Search embeddings for texts and images."""

    embeddings: Path = setting(REQUIRED, _EMBEDDINGS, metavar="EMBEDDINGS", positional=True)
    text: str = setting("", "what to search for", metavar="TEXT", positional=True)
    image: tuple[Path, ...] = setting((), "an image to search for")
    unwanted: tuple[str, ...] = setting((), "what images should not show", flag="--not", metavar="TEXT")
    k: int = setting(20, "number of results", integers(1, 100_000), flag="-k")
    html: Path | None = setting(None, "write a page with thumbnails instead of printing")
    exact: bool = setting(False, _EXACT)
    model: str = setting("", MODEL, default_text="that of the embeddings")


@dataclass(frozen=True, kw_only=True)
class IndexOptions:
    """Index embeddings, to search millions in milliseconds."""

    embeddings: Path = setting(REQUIRED, _EMBEDDINGS, metavar="EMBEDDINGS", positional=True)
    quiet: bool = setting(False, "print no progress")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(DeviceOptions, NameOptions):
    """Search embeddings on a web page, with a JSON API."""

    embeddings: tuple[Path, ...] = setting(
        REQUIRED,
        "folders that clipkit encode wrote, shown side by side",
        metavar="EMBEDDINGS",
        positional=True,
    )
    exact: bool = setting(False, _EXACT)
    model: tuple[str, ...] = setting((), "one for each folder", default_text="those of the embeddings")
    port: int = setting(8000, "port; 0 for any that is free", integers(0, 65_535))
    host: str = setting("127.0.0.1", "address to listen on", default_text="127.0.0.1, this machine")
    token: str | None = setting(None, "token that other addresses require", default_text="a random one")


@dataclass(frozen=True, kw_only=True)
class ExportOptions(NameOptions):
    """Export a model for other libraries."""

    model: str = setting(REQUIRED, MODEL, positional=True)
    out: Path = setting(REQUIRED, "a new folder, or an existing export to extend", positional=True)
    to: tuple[str, ...] = setting(
        (),
        f"library to export to: {', '.join(EXPORT_TARGETS)}",
        one_of(*EXPORT_TARGETS),
        metavar="LIBRARY",
        default_text="open_clip and transformers",
    )
    quantize: str | None = setting(
        None,
        "with --to onnx or openvino: store int8 weights (the same as --to onnx-int8, openvino-int8)",
        one_of("int8"),
    )
    calibrate: str | None = setting(
        None,
        "with --to openvino --quantize int8: images like those to encode, to measure ranges of activations on",
        metavar="SOURCE",
    )
    push: str | None = setting(
        None,
        "upload OUT to this repository of the Hugging Face hub, with the token of HF_TOKEN or `hf auth login`",
        metavar="OWNER/NAME",
    )
    public: bool = setting(False, "with --push: a new repository is public", default_text="private")


@dataclass(frozen=True, kw_only=True)
class InterpolateOptions(NameOptions):
    """Interpolate or average the weights of models (WiSE-FT, soups)."""

    first: str = setting(REQUIRED, f"{MODEL}, such as the model before fine-tuning", positional=True)
    second: str = setting(REQUIRED, "the same model after further training", positional=True)
    more: tuple[str, ...] = setting((), "further models; the mean of all weights is written", positional=True)
    out: Path = setting(REQUIRED, "output folder", metavar="DIR")
    alpha: tuple[float, ...] = setting(
        (),
        "weight of SECOND, 0 to 1; several values write one model each, to DIR/alpha_A",
        numbers(0, 1),
        default_text="0.5",
        listed=True,
    )
    image_size: int = setting(
        0,
        "load all models at this image side, as with model.image_size in training",
        integers(0, _MOST),
        default_text="their own",
    )
    image_tokens: int = setting(
        0,
        "load all models for images of at most so many patches, as with model.image_tokens",
        integers(0, _MOST),
        default_text="their own",
    )
    context_length: int = setting(
        0,
        "load all models at this text length, as with model.context_length",
        integers(0, _MOST),
        default_text="their own",
    )


COMMANDS = {
    "encode": Command(
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
        run="clipkit.inference.encode:run_encode",
        options=EncodeOptions,
        stopped="run the same command again to resume",
    ),
    "classify": Command(
        epilog=SOURCES
        + """
  clipkit classify photos/ --labels "cat,dog,a bird" --model runs/pets
  clipkit classify a.jpg --labels names.txt --templates "a sketch of a {c}." \\
    "a {c}" --model runs/pets --out labels.csv
With a few labelled images in labelled/cat, labelled/dog, labelled/none:
  clipkit classify photos/ --calibrate labelled --none --model runs/pets \\
    --review review.html""",
        run="clipkit.inference.classify:run_classify",
        options=ClassifyOptions,
        stopped="no file was written",
    ),
    "caption": Command(
        epilog=SOURCES
        + """
  clipkit caption photos/ --model runs/captions
  clipkit caption photos/ --model runs/captions --beams 4 --out captions.csv

With --out, running the same command again resumes it; a complete file is not
replaced.""",
        run="clipkit.inference.caption:run_caption",
        options=CaptionOptions,
        stopped="with --out, run the same command again to resume",
    ),
    "explain": Command(
        epilog="""\
FILE shows the preprocessed image, and a heatmap of each PROMPT from black to
yellow, scaled to its maximum: a heatmap shows where a text would be, not
whether the image contains it.

  clipkit explain photo.jpg "a cat" "a dog" --model runs/pets --out heat.png""",
        run="clipkit.inference.explain:run_explain",
        options=ExplainOptions,
        stopped="no file was written",
    ),
    "complete": Command(
        epilog="""\
FILE shows the image in the model's palette, its given part, and samples.

  clipkit complete photo.jpg --model runs/pixels --out completed.png""",
        run="clipkit.inference.explain:run_complete",
        options=CompleteOptions,
        without=frozenset({"name", "dim"}),
        stopped="no file was written",
    ),
    "search": Command(
        epilog="""\
The text and the images are combined to the mean of their embeddings; half the
mean of those of --not is subtracted. All rows are compared, unless
`clipkit index` has indexed them.

  clipkit encode photos/ --model runs/pets --out embeddings
  clipkit search embeddings "a red bicycle" --not "a person"
  clipkit search embeddings --image cat.jpg -k 100 --html cats.html""",
        run="clipkit.inference.search:run_search",
        options=SearchOptions,
        stopped="nothing was found",
        extra="pack",
    ),
    "index": Command(
        epilog="""\
Needs the extra `index`. The index is stored in EMBEDDINGS/index; search and
serve use it, except with filters or --exact. It selects candidates, whose
similarities are exact, and may miss some of the nearest rows: the recall is
printed. Embeddings that are added later are compared one by one until this
command adds them.

  clipkit index embeddings""",
        run="clipkit.inference.search:run_index",
        options=IndexOptions,
        stopped="the earlier index, if any, is unchanged",
        extra="pack",
    ),
    "serve": Command(
        epilog="""\
Needs the extra `serve`. New embeddings are found without a restart. The API is
described at /openapi.json:
  curl 'http://127.0.0.1:8000/api/search?text=a+red+bicycle&k=20'
  curl -F file=@cat.jpg 'http://127.0.0.1:8000/api/search?k=20'

  clipkit serve embeddings
  clipkit serve embeddings other --port 8001""",
        run="clipkit.inference.serve:run_serve",
        options=ServeOptions,
        stopped="the server has ended",
        extra="serve",
    ),
    "export": Command(
        epilog="""\
Each export is loaded with its library to check that it gives the same
embeddings.

  clipkit export runs/pets pets-clip
  clipkit export runs/pets pets-clip --push me/pets
  clipkit export runs/pets pets-onnx --to onnx
  clipkit export runs/pets pets-int8 --to onnx --quantize int8
  clipkit export runs/pets pets-fast --to openvino --quantize int8 \\
    --calibrate photos
  python -m eval zero-shot --model runs/pets --model pets-int8 --data FOLDER""",
        run="clipkit.export.write:run_export",
        options=ExportOptions,
        stopped="no file was written",
    ),
    "interpolate": Command(
        epilog="""\
The models must have the same architecture, tokenizer and preprocessing. Every
command accepts the result as a model. `python -m eval soup` averages those
models that do not lower the score on a dataset.

  clipkit interpolate open_clip:ViT-B-32/openai runs/pets --out between
  clipkit interpolate runs/a runs/b --alpha 0.25 0.5 0.75 --out between
  clipkit interpolate runs/a runs/b runs/c --out soup""",
        run="clipkit.export.interpolation:run_interpolate",
        options=InterpolateOptions,
        stopped="models finished so far were written",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """The machines that a dry run is for; by default this process's device and the processes of this job."""

    gpu: str | None = setting(None, "kind of GPU, such as H100 or A100-40GB", metavar="NAME")
    gpus: int = setting(0, "total number of GPUs", integers(1, _MOST), default_text="this machine's")
    gpus_per_host: int = setting(0, "for sharding=hybrid", integers(1, _MOST), default_text="8")
    mfu: float | None = setting(
        None,
        "fraction of the GPU's peak FLOP/s that the run reaches",
        numbers(0, 1, above=True),
        metavar="FRACTION",
        default_text="0.1, on a CPU 0.4",
    )


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The command line of ``train.py``; see its --help."""

    config: str = setting(
        str(_DEFAULT_CONFIG),
        "a complete configuration",
        metavar="CONFIG.toml",
        default_text="configs/quickstart.toml",
        positional=True,
    )
    overrides: tuple[str, ...] = setting(
        (),
        "settings that override the file's; --settings lists them all",
        metavar="key=value",
        positional=True,
    )
    settings: bool | str = setting(
        False,
        "print every setting, or those with TEXT in their name (such as optim or crop) or, without any, in their "
        "description, with its default, meaning and valid values, and exit",
        metavar="TEXT",
    )
    dry_run: bool = setting(
        False, "print the run's settings and estimated costs, and exit; data is read only to convert epochs"
    )
    replay: bool = setting(
        False, "compute the next step without changing anything, and report values that are not finite"
    )
    profile: int = setting(0, "record N steps with torch's profiler", integers(0, _MOST))
    target: Target = group(Target, "with --dry-run", "default: this machine's processes and device")


def parse_arguments(arguments: Sequence[str] | None = None) -> Arguments:
    """Parse a command line, by default this process's; print --help or --settings and exit if asked."""
    parser = Parser(
        prog="train.py",
        description="Train a CLIP model. The same command again resumes a run that was stopped.",
        epilog="example:\n  torchrun --nproc-per-node 8 train.py configs/vit_b_32.toml data.train=DIR",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, Arguments)
    parsed = build_options(Arguments, vars(parser.parse_intermixed_args(arguments)))
    target = parsed.target
    if not parsed.dry_run and (target.gpu or target.gpus or target.gpus_per_host):
        parser.error("--gpu, --gpus and --gpus-per-host require --dry-run")
    # the first word is a setting if there is no file
    words = list(parsed.overrides)
    if parsed.config != Arguments.config:
        words.insert(0, parsed.config)
    files = [word for word in words if "=" not in word and (word == words[0] or word.endswith(".toml"))]
    if len(files) > 1:
        raise ConfigError(
            f"{' and '.join(files)} are given: pass one config file, which is complete, and settings as key=value"
        )
    if parsed.settings:
        from clipkit.config import settings_reference

        text = parsed.settings if isinstance(parsed.settings, str) else ""
        print(*settings_reference(text), sep="\n", flush=True)
        raise SystemExit(0)
    overrides = tuple(word for word in words if word not in files)
    return replace(parsed, config=files[0] if files else Arguments.config, overrides=overrides)

"""The commands of ``python -m data``: their options and ``--help``. Imports neither torch nor numpy."""

from dataclasses import dataclass
from pathlib import Path

from clipkit.cli import (
    MOST_BATCH,
    MOST_WORKERS,
    REQUIRED,
    CaptionOptions,
    Command,
    DecodingOptions,
    ImageOptions,
    ModelOptions,
    group,
    integers,
    numbers,
    one_of,
    setting,
)

SOURCES = """\
SOURCE is any value that data.train accepts: a folder, a tar, a brace pattern,
a table of images and captions, a built-in dataset, or a URL (s3://, gs://,
https://, hf://)."""
INDEX_TEXT = f"""\
{SOURCES}

The index is stored in the cache folder ($CLIPKIT_CACHE, or
$CLIPKIT_INDEX_CACHE if that is set), not next to the data.
Training indexes shards that have no index; this command does so in advance, on
all cores.
"""
INSPECT_TEXT = f"""\
{SOURCES}

Shards that cannot be read are reported and skipped. If there are many shards,
an evenly spread subset is inspected. Augmentation and decoding settings change
the crops.

  python -m data inspect pairs --html pairs.html
  python -m data inspect pairs data.crop_scale=0.4 data.color_jitter=0.4
  python -m data inspect 'shards/{{00000..00331}}.tar' --samples 10000
  python -m data inspect pairs --filters 'width >= 256' --filters 'lang = en'
"""
MAKE_TEXT = """\
  glyphs   characters from matplotlib's fonts, for training; some font
           families are held out as the test split
  digits   8 x 8 handwritten digits from scikit-learn, for evaluation only
  emoji    emoji by seven artists, with names in 27 languages; two artists and
           a tenth of the concepts are held out. Downloads 32 MB with npm pack
           unless --packages names a folder with the .tgz files
  cues     digits filled with textures; in the test split shape and texture
           are of different digits, which measures shape bias
"""
SPEED_TEXT = f"""\
Runs the training loader without a model: reads shards, decodes and crops
images, tokenizes captions, and collates batches. Accepts augmentation and
decoding settings.

{SOURCES}

  python -m data speed pairs --workers 0,2,4,8
  python -m data speed pairs data.crop_scale=0.4 data.color_jitter=0.4
"""
TOKENIZER_TEXT = f"""\
The tokenizer is a byte-level BPE, which encodes any language. A small
vocabulary saves memory and time of a small model.

{SOURCES}

  python -m data tokenizer pairs --out tokenizer --vocab 8192
  python train.py CONFIG model.tokenizer=tokenizer
"""
PALETTE_TEXT = f"""\
The colors are found by k-means over pixels of the images.

{SOURCES}

  python -m data palette glyphs --colors 16 --out palette.safetensors
  python train.py CONFIG model.image=pixels:Ti loss.name=none \\
    image_gpt.weight=1 model.image_weights=palette.safetensors \\
    model.image_options='{{"colors": 16}}'
"""
PACK_TEXT = """\
The first line of the table names its columns, or has the path of an image;
then columns are called 'column 1' and so on. Paths are relative to the table's
folder. Other columns become fields of each sample's json, for data.filters and
data.captions in training (--fields selects columns). Rows of the same image
become one sample with a list of captions (see --group-by and --no-group);
training uses the first, or draws one with data.captions=captions
data.caption_choice=random. Rows that cannot be used (a missing file, a broken
image, an empty caption) are counted and listed in OUT/bad_rows.jsonl.

  python -m data pack photos.csv photos
  python -m data pack photos.csv photos --test 0.1
  python -m data pack table.parquet out --image-column file --caption-column alt
  python -m data pack cxr.h5 out --image-column cxr --captions impressions.csv

With --test, train on one split and evaluate on the other:
  python train.py data.train=photos eval.data=photos
"""

DOWNLOAD_TEXT = """\
TABLE is a .csv, .tsv, .jsonl, .json or .parquet file with a column of URLs, or
a folder of them, or a .txt file with a URL per line. Writes WebDataset shards
in img2dataset's layout to OUT, for data.train and other programs. Run the same
command again to resume an interrupted download, with --retry-failed to try
failed rows again. Hosts with private addresses and images that their server
marks as noai are skipped.

  python -m data download table.parquet images --image-size 384
  python -m data download hf://datasets/OWNER/NAME/table.parquet images
  python -m data download table.csv images --retry-failed
  python -m data download table.csv images --part 3/16
  python -m data download table.csv /shared/images --ray auto
"""


SCORE_TEXT = f"""\
{SOURCES}

Scores are stored in the cache folder ($CLIPKIT_CACHE); the data is not changed.
Run the same command again to resume. Training reads only the selected samples:

  python -m data score pairs --model open_clip:ViT-B-32/laion2b_s34b_b79k
  python train.py data.train=pairs data.scores=NAME \\
      data.filters='["score.clip >= top 30%","score.duplicate = false"]'

Presets: preset:datacomp_basic, preset:datacomp_clip_score, preset:laion2b and
preset:datacomp_text_based. data/README.md describes the columns.
"""


DYNAMICS_TEXT = """\
RUN is a run that was trained with log.samples=true. Writes a page with the
pairs that were never learned, forgotten, or learned last, many of which have
wrong captions, and a score of each sample, learnability, from 0 to 1:

  python train.py log.samples=true data.train=pairs out=runs/first
  python -m data dynamics runs/first
  python train.py data.train=pairs data.scores=NAME \\
      data.filters='["score.learnability >= top 95%"]'
"""


def _cache_setting(default: float, without: str) -> float:
    return setting(default, f"size of the disk cache for remote shards; 0 {without}", numbers(0, 1e9))


@dataclass(frozen=True, kw_only=True)
class SourcesOptions:
    """The samples that a command reads."""

    sources: tuple[str, ...] = setting(REQUIRED, "see above", positional=True)
    split: str = setting("train", "split of a dataset folder", metavar="NAME")
    quiet: bool = setting(False, "print no progress")


@dataclass(frozen=True, kw_only=True)
class MakeOptions:
    """Create a built-in dataset."""

    name: str = setting(REQUIRED, "glyphs, digits, emoji or cues", metavar="NAME", positional=True)
    out: Path = setting(REQUIRED, "the folder to create", positional=True)
    packages: Path | None = setting(
        None, "for emoji: .tgz files made by npm pack", metavar="FOLDER", default_text="download"
    )
    quiet: bool = setting(False, "print no progress")


@dataclass(frozen=True, kw_only=True)
class StoredOptions:
    """What is stored besides images."""

    caption_column: str | None = setting(None, "column with the captions", default_text="guessed")
    fields: tuple[str, ...] | None = setting(
        None,
        "other columns to store in the samples' json, '' for none",
        metavar="A,B",
        default_text="all except binary columns",
        separated=True,
    )
    samples_per_shard: int = setting(10_000, "rows or samples per shard", integers(1, 10_000_000))


@dataclass(frozen=True, kw_only=True)
class PackOptions(StoredOptions):
    """How images and captions are packed."""

    image_column: str | None = setting(None, "column with the paths", default_text="guessed")
    test: float = setting(
        0.0,
        "fraction of the pairs to hold out as the test split, such as 0.1",
        numbers(0, 1),
        metavar="FRACTION",
    )
    max_side: int | None = setting(
        None,
        "shrink images whose longer side exceeds this",
        integers(1, 1_000_000),
        metavar="PIXELS",
        default_text="keep the size",
    )
    keep_orientation: bool = setting(
        False, "do not rotate images upright", default_text="apply the EXIF orientation"
    )
    captions: Path | None = setting(
        None,
        "table with a row for each image of an HDF5 file, in the same order",
        metavar="TABLE",
        default_text="captions are in the file",
    )
    background: str | None = setting(
        None,
        "blend transparent images onto this color, such as white",
        metavar="COLOR",
        default_text="keep transparency",
    )
    group_by: str | None = setting(
        None,
        "column that is the same in all rows of an image, which become one sample with several captions",
        metavar="COLUMN",
        default_text="the image column",
    )
    group: bool = setting(True, "make a sample of each row", flag="--no-group")


@dataclass(frozen=True, kw_only=True)
class PackCommand(PackOptions):
    """Pack images and captions from a table or a folder into shards."""

    table: Path = setting(
        REQUIRED,
        "a .csv, .tsv, .jsonl, .json, .parquet or .h5 file, or a folder of images with captions or by class",
        positional=True,
    )
    out: Path = setting(REQUIRED, "the folder to create", positional=True)
    quiet: bool = setting(False, "print no progress")


@dataclass(frozen=True, kw_only=True)
class DownloadOptions(StoredOptions):
    """Which columns and images are stored, and how; must be the same for all parts and restarts."""

    url_column: str | None = setting(None, "column with the URLs", default_text="guessed")
    resize: str = setting(
        "keep_ratio",
        "as in img2dataset: resize the shorter (keep_ratio) or the longer side (keep_ratio_largest) to "
        "--image-size, crop a square (center_crop), add a white border (border), or keep the size (no)",
        one_of("keep_ratio", "keep_ratio_largest", "center_crop", "border", "no"),
        metavar="MODE",
    )
    image_size: int = setting(256, "target size", integers(1, 100_000), metavar="PIXELS")
    enlarge: bool = setting(False, "also enlarge smaller images")
    exif: bool = setting(False, "store EXIF tags in the json")
    deduplicate: bool = setting(
        True,
        "keep an image for each row, even if its URL or bytes are in an earlier row",
        flag="--keep-duplicates",
        default_text="rows with the same URL become one image with several captions",
    )


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """Limits of requests.

    ``timeout`` is from the connection to the last byte. ``retries`` are made after temporary errors: timeouts, lost
    connections, HTTP 429 and 5xx.
    """

    connections: int = setting(256, "concurrent requests", integers(1, 10_000))
    per_host: int = setting(16, "concurrent requests per host", integers(1, 10_000))
    timeout: float = setting(20.0, "timeout of a response", numbers(0.1, 3600), metavar="SECONDS")
    retries: int = setting(2, "retries after temporary errors", integers(0, 20))
    max_mb: int = setting(64, "maximum file size in MiB", integers(1, 1024))
    allow_private: bool = setting(False, "also download from hosts with private addresses")
    ignore_robots: bool = setting(False, "ignore the header X-Robots-Tag (noai, noindex)")
    keep_going: bool = setting(False, "do not stop when nearly all of the last rows failed")


@dataclass(frozen=True, kw_only=True)
class DownloadCommand:
    """Download images from a table of URLs into shards."""

    table: str = setting(
        REQUIRED,
        "a table with a column of URLs, or a folder, local or remote (hf://, s3://)",
        positional=True,
    )
    out: Path = setting(REQUIRED, "the folder for the shards", positional=True)
    part: str = setting("1/1", "download every N-th shard, starting at the I-th", metavar="I/N")
    retry_failed: bool = setting(
        False,
        "also try the rows again that failed in an earlier run; images that are found are added in new shards",
    )
    ray: str | None = setting(
        None, "download on a Ray cluster, a shard per task; OUT must be on a shared disk", metavar="ADDRESS"
    )
    quiet: bool = setting(False, "print no progress")
    stored: DownloadOptions = group(DownloadOptions, "what is stored")
    fetch: FetchOptions = group(FetchOptions, "requests")


@dataclass(frozen=True, kw_only=True)
class IndexOptions(CaptionOptions, ImageOptions, SourcesOptions):
    """Index shards in advance, so that training starts immediately."""

    filters: tuple[str, ...] = setting(
        (),
        "count the samples that pass a filter such as 'width >= 256', for training with it (as data.filters)",
    )
    balance: str = setting(
        "", "read the values of a field, for training with data.balance=FIELD:COUNT", metavar="FIELD"
    )
    cache_gb: float = _cache_setting(0.0, "reads only their headers")
    truncated: str = setting(
        "error",
        "stop at a truncated shard, or index its intact part for data.truncated=use",
        one_of("error", "use"),
    )


@dataclass(frozen=True, kw_only=True)
class InspectOptions(DecodingOptions, CaptionOptions, ImageOptions, SourcesOptions):
    """Report missing, broken, duplicate and slow data."""

    samples: int = setting(2000, "samples to decode", integers(1, 1_000_000))
    shards: int = setting(
        0, "shards to inspect", integers(0, 1_000_000), default_text="64, or 32 remote ones"
    )
    image_size: int = setting(224, "side of the crops", integers(1, 10_000), metavar="PIXELS")
    batch_size: int = setting(256, "pairs per step, to compute the steps per epoch", integers(1, 1 << 30))
    filters: tuple[str, ...] = setting(
        (), "report how many samples pass a filter such as 'width >= 256' (as data.filters)"
    )
    cache_gb: float = _cache_setting(0.0, "reads parts of them")
    html: Path | None = setting(None, "also write a page with images")
    json: Path | None = setting(None, "also write all results as JSON")


@dataclass(frozen=True, kw_only=True)
class SpeedOptions(ImageOptions, SourcesOptions):
    """Measure the speed of the loader."""

    image_size: int = setting(224, "side of the crops", integers(1, 10_000), metavar="PIXELS")
    batch_size: int = setting(256, "samples per batch", integers(1, MOST_BATCH))
    workers: tuple[int, ...] = setting(
        (0, 1, 2),
        "numbers of workers to compare",
        integers(0, MOST_WORKERS),
        metavar="N,…",
        default_text="0,1,2",
        separated=True,
    )
    seconds: float = setting(
        10.0, "duration of each measurement after its first batch", numbers(0, 1e6, above=True)
    )
    cache_gb: float = _cache_setting(100.0, "reads over the network")
    json: bool = setting(False, "print one line of JSON instead of a table")


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions(CaptionOptions, SourcesOptions):
    """Train a tokenizer on captions, for model.tokenizer."""

    out: Path = setting(REQUIRED, "the folder to create", metavar="FOLDER")
    vocab: int = setting(8192, "number of tokens", integers(258, 1_000_000))
    filters: tuple[str, ...] = setting(
        (), "use only samples that pass a filter such as 'lang = de' (as data.filters)"
    )
    cache_gb: float = _cache_setting(100.0, "reads them over the network")


@dataclass(frozen=True, kw_only=True)
class PaletteOptions(ImageOptions, SourcesOptions):
    """Choose the colors of Image GPT from images."""

    out: Path = setting(REQUIRED, "the .safetensors file to write")
    colors: int = setting(512, "number of colors", integers(2, 4096))
    images: int = setting(2000, "number of images to read", integers(1, 1_000_000))
    cache_gb: float = _cache_setting(100.0, "reads them over the network")


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(ModelOptions, CaptionOptions, ImageOptions, SourcesOptions):
    """Score samples with a model, to filter them in training."""

    against: tuple[str, ...] = setting(
        (),
        "find the images of this evaluation set (its split test) among the samples",
        metavar="SOURCE",
    )
    threshold: float = setting(
        0.95, "similarity from which two images count as near-duplicates", numbers(0, 1)
    )
    duplicates: bool = setting(
        True,
        "do not compare all images with each other, which takes time in proportion to their number squared",
        flag="--no-duplicates",
    )
    cache_gb: float = _cache_setting(100.0, "is not possible for them")
    html: Path | None = setting(None, "also write a page about filters")
    filters: tuple[str, ...] = setting(
        (), "filter to show on the page, as in data.filters", default_text="some common ones"
    )


@dataclass(frozen=True, kw_only=True)
class DynamicsOptions:
    """Find wrong pairs by how a training run learned them."""

    run: Path = setting(REQUIRED, "folder of a run with log.samples=true", positional=True)
    html: Path | None = setting(None, "the page to write", default_text="RUN/dynamics.html")
    quiet: bool = setting(False, "print no progress")


COMMANDS = {
    "make": Command(
        description=MAKE_TEXT,
        options=MakeOptions,
        run="data.corpora.builtin:run_make",
        stopped="nothing was written",
    ),
    "pack": Command(
        epilog=PACK_TEXT, options=PackCommand, run="data.pack:run_pack", stopped="nothing was written"
    ),
    "download": Command(
        description=DOWNLOAD_TEXT,
        options=DownloadCommand,
        run="data.download:run_download",
        extra="pack,remote",
        stopped="complete shards are kept; run the same command to resume",
    ),
    "index": Command(
        description=INDEX_TEXT,
        options=IndexOptions,
        run="data.shards.samples:run_index",
        stopped="nothing was written",
    ),
    "tokenizer": Command(
        description=TOKENIZER_TEXT,
        options=TokenizerOptions,
        run="data.tokenizer:run_tokenizer",
        stopped="nothing was written",
    ),
    "palette": Command(
        description=PALETTE_TEXT,
        options=PaletteOptions,
        run="data.palette:run_palette",
        extra="eval",
        stopped="nothing was written",
    ),
    "inspect": Command(
        description=INSPECT_TEXT,
        usage="python -m data inspect [OPTIONS] SOURCE [SOURCE ...] [KEY=VALUE ...]",
        options=InspectOptions,
        run="data.inspect.report:run_inspect",
        stopped="nothing was written",
    ),
    "score": Command(
        description=SCORE_TEXT,
        usage="python -m data score [OPTIONS] --model MODEL SOURCE [SOURCE ...]",
        options=ScoreOptions,
        run="data.scores.command:run_score",
        extra="score",
        stopped="scored shards are kept; run the same command to resume",
    ),
    "dynamics": Command(
        description=DYNAMICS_TEXT,
        options=DynamicsOptions,
        run="data.scores.dynamics:run_dynamics",
        extra="pack",
        stopped="nothing was written",
    ),
    "speed": Command(
        description=SPEED_TEXT,
        usage="python -m data speed [OPTIONS] SOURCE [SOURCE ...] [KEY=VALUE ...]",
        options=SpeedOptions,
        run="data.inspect.speed:run_speed",
        stopped="nothing was written",
    ),
}

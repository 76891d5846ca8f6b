"""What a page and a paired test need beside the scores: one JSON file a (weights, dataset, task).

``runs/a/results.jsonl`` has its details in ``runs/a/results.details/``. A file is named after the dataset, the task
and a hash of what else tells it from others (weights, split, prompt set, setting); writing it again replaces it.

Letters in shape comments: N images, D embedding dimension, C classes, E examples.
"""

import base64
import binascii
import hashlib
import json
import math
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from clipkit.errors import DataError
from clipkit.files.atomic import write_atomic
from eval.datasets.dataset import TEST

__all__ = [
    "Bin",
    "Details",
    "Example",
    "Guess",
    "Hit",
    "Matrix",
    "Packed",
    "Picture",
    "Query",
    "Snapshot",
    "details_folder",
    "find_snapshots",
    "finite",
    "json_lines",
    "pack",
    "parse_json",
    "read_details",
    "read_snapshot",
    "read_snapshots",
    "whole",
    "write_details",
    "write_snapshot",
]


_MAX_WHOLE = 2**53  # the largest whole number up to which a float tells all apart
_MAX_ITEMS = 1 << 26
Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_WHOLE)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


# --------------------------------------------------------------------------------------------------------------
# JSON that anybody may have written: what parses is small enough in every way to be worked with.

_MAX_DEPTH = 64
_MAX_DIGITS = 300  # what is longer has no place in a float


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; whole numbers of more than 300 digits are infinite.

    Raises:
        ValueError: it is no JSON, is not UTF-8, or lists stand in lists more than 64 deep.
    """
    try:
        value = _decoder.decode(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    # whoever walks through the value may do so by recursion
    level = [value]
    for _ in range(_MAX_DEPTH):
        inside = [one for one in level if isinstance(one, list | dict)]
        if not inside:
            return value
        level = [child for one in inside for child in (one.values() if isinstance(one, dict) else one)]
    raise ValueError("it is nested too deeply")


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)


_decoder = json.JSONDecoder(parse_int=_integer)  # to make one takes longer than a line of results


_MAX_LINE = 1 << 20


def json_lines(path: Path, notes: list[str], consequence: str) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file; lines that do not parse are counted and noted.

    A missing file is noted with its ``consequence``, if it has one.
    """
    if not path.is_file():
        if consequence:
            notes.append(f"{path.name} is missing, so {consequence}.")
        return
    broken = 0
    with path.open("rb") as file:
        while line := file.readline(_MAX_LINE):
            try:
                value = parse_json(line.decode("utf-8", "replace").removeprefix("\ufeff"))
            except ValueError:
                broken += bool(line.strip())
                continue
            if isinstance(value, dict):
                yield value
            else:
                broken += 1
    if broken:
        notes.append(
            f"{path.name}: {'one line' if broken == 1 else f'{broken} lines'} cut short or broken, and left out."
        )


def finite(value: object) -> float | None:
    """A number that is one, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def whole(value: object) -> int | None:
    """A number cut to a whole one of at most 2⁵³, else None."""
    number = finite(value)
    return None if number is None or abs(number) > _MAX_WHOLE else int(number)


# --------------------------------------------------------------------------------------------------------------
# The snapshots of a run folder: what one is, and how it is written and read.
#
# A snapshot is one JSON file, ``snapshots/step_<8 digits>.<dataset>.json``. It holds three things: example
# predictions, the similarity matrix of a held-out batch, and the images nearest to fixed text queries; and
# small copies of every image they refer to.

_MAX_SNAPSHOT_BYTES = 16 << 20
_FILE = re.compile(r"step_(\d{8,})\.(.+)\.json")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A small copy of an image: a base64 PNG ("" if it does not decode), and words for those who cannot see it."""

    png: str
    alt: str


@dataclass(frozen=True, kw_only=True)
class Guess:
    """A label that the model considers, with its probability in [0, 1], and whether it is the true one.

    In details of retrieval it is a caption, and the number its cosine similarity.
    """

    label: str
    probability: float
    right: bool


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prediction: the likeliest labels, likeliest first, and where the true one stands (rank 1 is best)."""

    picture: str
    guesses: tuple[Guess, ...]
    truth: str | None
    rank: Count | None
    probability: float | None


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Cosines of M images (rows) and their M captions (columns); the pairs are on the diagonal."""

    pictures: tuple[str, ...]
    captions: tuple[str, ...]
    cosines: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        size = len(self.pictures)
        if len(self.captions) != size or [len(row) for row in self.cosines] != [size] * size:
            raise ValueError("the similarity matrix is not square")


@dataclass(frozen=True, kw_only=True)
class Hit:
    """An image near a query; ``right`` is None where nobody knows."""

    picture: str
    cosine: float
    right: bool | None


@dataclass(frozen=True, kw_only=True)
class Query:
    """A text and the images nearest to it, nearest first."""

    text: str
    hits: tuple[Hit, ...]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One moment in training on one dataset. Images are named by their number in the dataset."""

    step: Count
    dataset: str
    samples: Count
    classes: Count
    examples: tuple[Example, ...]
    matrix: Matrix | None
    queries: tuple[Query, ...]
    pictures: Mapping[str, Picture]


def write_snapshot(run: Path, snapshot: Snapshot) -> Path:
    """Write a snapshot into a run folder and return its path."""
    folder = run / "snapshots"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{snapshot.step:08d}.{_snapshot_name(snapshot.dataset)}.json"
    text = json.dumps(asdict(snapshot), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    write_atomic(path, text + "\n")
    return path


def _snapshot_name(dataset: str) -> str:
    """The dataset's name where it may stand in a file name; else what may, and a hash that tells it from others."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", dataset).strip("-")[-80:]
    if plain == dataset:
        return plain
    return f"{plain or 'data'}-{hashlib.sha256(dataset.encode('utf-8', 'replace')).hexdigest()[:8]}"


def find_snapshots(run: Path) -> dict[str, dict[int, Path]]:
    """The snapshot files of a run folder by dataset (as its file name spells it) and step, both in order."""
    found: dict[str, dict[int, Path]] = {}
    for path in sorted((run / "snapshots").glob("step_*.json")):
        match = _FILE.fullmatch(path.name)
        if match:
            found.setdefault(match[2], {})[int(match[1])] = path
    return {name: dict(sorted(steps.items())) for name, steps in sorted(found.items())}


def read_snapshots(run: Path) -> list[Snapshot]:
    """Every snapshot of a run folder, by dataset and step.

    Raises:
        DataError: one of them is not a snapshot.
    """
    return [read_snapshot(path) for steps in find_snapshots(run).values() for path in steps.values()]


def read_snapshot(path: Path) -> Snapshot:
    """Read one snapshot.

    Raises:
        DataError: the file cannot be read, is too large, cut short, or not a snapshot.
    """
    return _read(path, Snapshot, "a snapshot", _MAX_SNAPSHOT_BYTES)


_Value = TypeVar("_Value", "Snapshot", "Details")


def _read(path: Path, kind: type[_Value], what: str, largest: int) -> _Value:
    """Read a JSON file as the dataclass that it was written from; its types and bounds are checked.

    Raises:
        DataError: the file cannot be read, is too large, or its content does not fit.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{path} is not a regular file")
        if found.st_size > largest:
            raise DataError(f"{path} is too large to be {what}: expected at most {largest:,} bytes")
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    try:
        return msgspec.json.decode(text.removeprefix(b"\xef\xbb\xbf"), type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is not {what} ({error})") from error


# --------------------------------------------------------------------------------------------------------------

_MAX_FILE_BYTES = 32 << 20
_MAX_FILES = 50_000
_NAMED = 3  # broken files that a note names

Kind = Literal["bits", "uint32", "float32"]


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A value of each of ``n`` items as text.

    Attributes:
        kind: "bits" for true and false (eight to a byte, the first in the highest bit), else little-endian numbers,
            deflated.
        n: items.
        data: in base64.
    """

    kind: Kind
    n: Annotated[int, msgspec.Meta(ge=0, le=_MAX_ITEMS)]
    data: str

    def tensor(self) -> Tensor:
        """(n,) bool, int64 or float32.

        Raises:
            DataError: the text does not hold n values.
        """
        try:
            raw = base64.b64decode(self.data, validate=True)
            if self.kind == "bits":
                values = np.unpackbits(np.frombuffer(raw, dtype=np.uint8), count=self.n).astype(bool)
                held = len(raw) == (self.n + 7) // 8
            else:
                # never more than n numbers, whatever the text would unfold to
                whole = zlib.decompressobj().decompress(raw, 4 * self.n + 1)
                values = np.frombuffer(whole, dtype=np.dtype(self.kind).newbyteorder("<"))
                held = len(values) == self.n
        except (binascii.Error, zlib.error, ValueError) as error:
            raise DataError(f"values of {self.n:,} items do not unpack ({error})") from error
        if not held:
            raise DataError(f"values of {self.n:,} items do not unpack: they are of another number")
        return torch.from_numpy(values.astype(np.int64) if self.kind == "uint32" else values.copy())


def pack(values: Tensor) -> Packed:
    """Pack (n,) values: bool as bits, whole numbers of 0 … 2³²-1, or floats as float32."""
    array = values.detach().cpu().numpy()
    kind: Kind = "bits" if array.dtype == np.bool_ else "float32" if array.dtype.kind == "f" else "uint32"
    if kind == "bits":
        raw = np.packbits(array).tobytes()
    else:
        raw = zlib.compress(array.astype(np.dtype(kind).newbyteorder("<")).tobytes())
    return Packed(kind=kind, n=len(array), data=base64.b64encode(raw).decode("ascii"))


@dataclass(frozen=True, kw_only=True)
class Bin:
    """A bar of the reliability diagram: ``count`` images, their mean confidence and the share that is right."""

    low: Fraction
    high: Fraction
    count: Count
    confidence: Fraction
    accuracy: Fraction


@dataclass(frozen=True, kw_only=True)
class Details:
    """What one model did on one dataset in one task, beside its scores.

    Attributes:
        dataset: its name.
        task: as in the scores.
        n: items.
        weights: as in the scores; ``write_details`` sets it.
        split: as in the scores.
        prompt_set: as in the scores.
        setting: as in the scores.
        data_revision: as in the scores.
        class_names: of the C classes.
        class_counts: (C,) images of each class; () where an image has no class or several.
        class_right: (C,) those of them whose class came first.
        mistakes: (class, taken for, how often), the most frequent first.
        matrix: the (C · C) cells of the whole confusion, row by row, a row a true class, where the classes are few.
        bins: of the reliability diagram.
        examples: predictions to look at; which ones follows from a seed. Of retrieval they are captions, equal ones
            together, and their cosine similarities to the image stand as probabilities.
        candidates: how many captions there are of these; 0 where the task is another.
        pictures: by the name that ``examples`` use.
        right: by metric, whether each item is right, for paired tests. Items of retrieval metrics are images or
            captions, whichever is asked about.
        values: by metric, a number of each item whose mean it is; of ``roc_auc`` the score that ranks it.
        labels: the class of each item, where it has one.
        superclass_names: of groups of classes, where the dataset has such.
        superclass_matrix: the confusion of these, packed by rows.
        chosen_rate: of a fine-tuned model, its learning rate.
        tuned_on: of what was chosen, the images that it was chosen on: "val", or "a fifth of train".
        chosen_c: of a probe, the C that validation chose (the inverse of the strength of its regularization).
    """

    dataset: str
    task: str
    n: Count
    weights: str = ""
    split: str = TEST
    prompt_set: str = ""
    setting: str = ""
    data_revision: str = ""
    class_names: tuple[str, ...] = ()
    class_counts: tuple[Count, ...] = ()
    class_right: tuple[Count, ...] = ()
    mistakes: tuple[tuple[Count, Count, Count], ...] = ()
    matrix: Packed | None = None
    bins: tuple[Bin, ...] = ()
    examples: tuple[Example, ...] = ()
    candidates: Count = 0
    pictures: Mapping[str, Picture] = field(default_factory=dict)
    right: Mapping[str, Packed] = field(default_factory=dict)
    values: Mapping[str, Packed] = field(default_factory=dict)
    labels: Packed | None = None
    chosen_c: float | None = None
    chosen_rate: float | None = None
    tuned_on: str = ""
    superclass_names: tuple[str, ...] = ()
    superclass_matrix: Packed | None = None

    def __post_init__(self) -> None:
        classes = len(self.class_names)
        if len(self.class_counts) not in (0, classes) or len(self.class_right) != len(self.class_counts):
            raise ValueError(f"expected counts of {classes} classes")
        if self.matrix is not None and self.matrix.n != classes**2:
            raise ValueError(f"expected a confusion matrix of {classes} classes")
        if any(max(label, predicted) >= classes for label, predicted, _ in self.mistakes):
            raise ValueError(f"a mistake is of a class beyond the {classes} classes")

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from others; the same key again replaces it."""
        return self.weights, self.dataset, self.split, self.task, self.prompt_set, self.setting

    @property
    def calibration_error(self) -> float | None:
        """The expected calibration error that the bins show, as ``expected_calibration_error`` has it."""
        total = sum(one.count for one in self.bins)
        apart = sum(one.count * abs(one.confidence - one.accuracy) for one in self.bins)
        return apart / total if total else None


def details_folder(results: Path) -> Path:
    """Where the details of a results file lie."""
    return results.with_name(results.name.removesuffix(".jsonl") + ".details")


def write_details(results: Path, details: Details, *, weights: str) -> Path:
    """Write details beside a results file and return their path.

    Args:
        results: the file that the scores are appended to.
        details: of one dataset and task.
        weights: as in the scores.

    Raises:
        DataError: they cannot be written, or are larger than ``read_details`` takes.
    """
    details = replace(details, weights=weights)
    text = json.dumps(asdict(details), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    data = (text + "\n").encode("utf-8", "replace")  # class names may hold halves of characters
    folder = details_folder(results)
    path = folder / _file_name(details)
    if len(data) > _MAX_FILE_BYTES:
        raise DataError(
            f"{path}: details of {details.n:,} items are larger than the {_MAX_FILE_BYTES:,} bytes kept"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
    return path


def _file_name(details: Details) -> str:
    """Plain letters, whatever the dataset is called; the hash tells apart what looks alike then."""
    plain = [
        re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[-60:] for name in (details.dataset, details.task)
    ]
    digest = hashlib.sha256(json.dumps(details.key).encode()).hexdigest()[:16]
    return f"{plain[0] or 'data'}.{plain[1] or 'task'}.{digest}.json"


def read_details(results: Path) -> tuple[list[Details], list[str]]:
    """Read the details beside a results file.

    Returns:
        Those that could be read, in the order of their file names, and notes on what could not.
    """
    folder = details_folder(results)
    try:
        paths = sorted(path for path in folder.glob("*.json") if not path.name.startswith("."))
    except OSError as error:
        return [], [f"{folder.name} cannot be read ({error.strerror}), so details are not shown."]
    read, broken = [], []
    for path in paths[:_MAX_FILES]:
        try:
            read.append(_read(path, Details, "a details file", _MAX_FILE_BYTES))
        except DataError:
            broken.append(path.name)
    notes = []
    if broken:
        more = f" and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
        notes.append(f"{folder.name}: {', '.join(broken[:_NAMED])}{more} cannot be read and are left out.")
    if len(paths) > _MAX_FILES:
        notes.append(f"{folder.name}: only the first {_MAX_FILES:,} of {len(paths):,} files are read.")
    return read, notes

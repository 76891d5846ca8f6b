"""Records of snapshots and details, and their files.

A snapshot is what the report of a training run shows for one step and dataset; it is stored in
``snapshots/step_<8 digits>.<dataset>.json`` of the run folder. Details are what a page and a paired test need
besides the scores of one model, dataset and task; ``runs/a/results.jsonl`` has them in ``runs/a/results.details/``.
"""

import base64
import binascii
import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from clipkit.errors import DataError
from clipkit.files import write_atomic
from eval.datasets.dataset import TEST

_MAX_WHOLE = 2**53  # beyond it, floats skip integers
_MAX_DEPTH = 64  # of nested JSON
_MAX_LINE = 1 << 20  # bytes
_MAX_SNAPSHOT_BYTES = 16 << 20
_MAX_DETAILS_BYTES = 32 << 20
_MAX_DETAILS_FILES = 50_000
_NAMED = 3  # unreadable files that a note names

Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_WHOLE)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


def parse_json(text: str | bytes) -> Any:
    """Parse untrusted JSON.

    Raises:
        ValueError: it is not JSON, not UTF-8, or nested more than 64 levels deep.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    containers = [value]
    for _ in range(_MAX_DEPTH):
        children: list[Any] = []
        for container in containers:
            if isinstance(container, dict):
                children += container.values()
            elif isinstance(container, list):
                children += container
        if not children:
            return value
        containers = children
    raise ValueError("it is nested too deeply")


def json_lines(path: Path, notes: list[str], consequence: str) -> Iterator[dict[str, Any]]:
    """Read the objects of a JSON Lines file; lines that do not parse are counted in a note.

    A missing file is noted with its ``consequence``, unless that is "".
    """
    if not path.is_file():
        if consequence:
            notes.append(f"{path.name} is missing, so {consequence}.")
        return
    broken = 0
    with path.open("rb") as file:
        while line := file.readline(_MAX_LINE):
            value = None
            with suppress(ValueError):
                value = parse_json(line.decode("utf-8", "replace").removeprefix("\ufeff"))
            if isinstance(value, dict):
                yield value
            elif line.strip():
                broken += 1
    if broken:
        count = "one line" if broken == 1 else f"{broken} lines"
        notes.append(f"{path.name}: {count} cut short or broken, and left out.")


def parse_finite(value: object) -> float | None:
    """Return a finite number as a float, anything else as None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def parse_integer(value: object) -> int | None:
    """Return a number of at most 2⁵³ truncated to an integer, anything else as None."""
    number = parse_finite(value)
    return None if number is None or abs(number) > _MAX_WHOLE else int(number)


@dataclass(frozen=True, kw_only=True)
class Thumbnail:
    """A small copy of an image as a base64 PNG ("" if it does not decode), and its alternative text."""

    png: str
    alt: str


@dataclass(frozen=True, kw_only=True)
class Guess:
    """A label with its predicted probability in [0, 1], and whether it is the true one.

    In details of retrieval the label is a caption, and the probability its cosine similarity.
    """

    label: str
    probability: float
    right: bool


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prediction: the most likely labels in order, the true label, and its rank (1 is best).

    Attributes:
        heat: where the model sees the true label.
    """

    picture: str
    guesses: tuple[Guess, ...]
    truth: str | None
    rank: Count | None
    probability: float | None
    heat: Thumbnail | None = None


@dataclass(frozen=True, kw_only=True)
class Description:
    """A generated caption, the true ones, whether it is one of them, and its CIDEr-D."""

    picture: str
    generated: str
    captions: tuple[str, ...]
    exact: bool
    cider: float


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
    """An image near a query; ``right`` is None if unknown."""

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
    """One step of a training on one dataset. Images are named by their number in the dataset."""

    step: Count
    dataset: str
    samples: Count
    classes: Count
    examples: tuple[Example, ...]
    matrix: Matrix | None
    queries: tuple[Query, ...]
    pictures: Mapping[str, Thumbnail]


Kind = Literal["bits", "uint32", "float32"]


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One value for each of ``n`` items, as text.

    Attributes:
        kind: "bits" for booleans (eight to a byte, the first in the highest bit), otherwise little-endian numbers,
            deflated.
        n: number of items.
        data: base64.
    """

    kind: Kind
    n: Annotated[int, msgspec.Meta(ge=0, le=1 << 26)]
    data: str

    def tensor(self) -> Tensor:
        """Return the values as (n,) bool, int64 or float32.

        Raises:
            DataError: the text does not hold n values.
        """
        try:
            raw = base64.b64decode(self.data, validate=True)
            if self.kind == "bits":
                values = np.unpackbits(np.frombuffer(raw, dtype=np.uint8), count=self.n).astype(bool)
                complete = len(raw) == (self.n + 7) // 8
            else:  # inflates at most n numbers
                raw = zlib.decompressobj().decompress(raw, 4 * self.n + 1)
                values = np.frombuffer(raw, dtype=np.dtype(self.kind).newbyteorder("<"))
                complete = len(values) == self.n
        except (binascii.Error, zlib.error, ValueError) as error:
            raise DataError(f"cannot unpack the values of {self.n:,} items ({error})") from error
        if not complete:
            raise DataError(f"cannot unpack the values of {self.n:,} items: there are more or fewer")
        return torch.from_numpy(values.astype(np.int64) if self.kind == "uint32" else values.copy())


def pack_values(values: Tensor) -> Packed:
    """Pack (n,) values: booleans as bits, integers in [0, 2³² − 1], or floats as float32."""
    array = values.detach().cpu().numpy()
    kind: Kind = "bits" if array.dtype == np.bool_ else "float32" if array.dtype.kind == "f" else "uint32"
    if kind == "bits":
        raw = np.packbits(array).tobytes()
    else:
        raw = zlib.compress(array.astype(np.dtype(kind).newbyteorder("<")).tobytes())
    return Packed(kind=kind, n=len(array), data=base64.b64encode(raw).decode("ascii"))


@dataclass(frozen=True, kw_only=True)
class Bin:
    """A bar of the reliability diagram: number of images, their mean confidence and accuracy."""

    low: Fraction
    high: Fraction
    count: Count
    confidence: Fraction
    accuracy: Fraction


@dataclass(frozen=True, kw_only=True)
class Details:
    """What one model predicted on one dataset in one task.

    Attributes:
        dataset: as in the scores, as are ``task``, ``weights`` (set by ``write_details``), ``split``,
            ``prompt_set``, ``setting`` and ``data_revision``.
        n: number of items; those of retrieval are the queries.
        class_counts: (C,) images of each class; () if an image has no class or several.
        class_right: (C,) those of them predicted correctly.
        mistakes: (true class, predicted class, count), the most frequent first.
        matrix: the (C · C) cells of the confusion matrix by rows, one for each true class, if there are few.
        bins: bins of the reliability diagram.
        examples: predictions to show. For retrieval, captions with their cosine similarities; equal captions
            count once.
        descriptions: for captioning, generated captions of random images.
        candidates: for retrieval, the number of captions; otherwise 0.
        pictures: thumbnails by the names that ``examples`` and ``descriptions`` use.
        right: by metric, whether each item is right, for paired tests.
        values: by metric, a value of each item whose mean is the metric; for ``roc_auc``, the item's score; for
            metrics with a ``row_statistic``, several values of each item.
        labels: the class of each item, if there are classes.
        chosen_c: for a probe, C (the inverse of the regularization strength) chosen on validation images.
        chosen_rate: for a fine-tuned model, its learning rate.
        tuned_on: images that a hyperparameter was chosen on: "val", or "a fifth of train".
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
    descriptions: tuple[Description, ...] = ()
    candidates: Count = 0
    pictures: Mapping[str, Thumbnail] = field(default_factory=dict)
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
            raise ValueError(f"a mistake has a class beyond the {classes} classes")

    @property
    def key(self) -> tuple[str, ...]:
        """The key of the details; writing the same key again replaces them."""
        return self.weights, self.dataset, self.split, self.task, self.prompt_set, self.setting

    @property
    def calibration_error(self) -> float | None:
        """The expected calibration error over ``bins``, if there are any."""
        total = sum(bin.count for bin in self.bins)
        gaps = sum(bin.count * abs(bin.confidence - bin.accuracy) for bin in self.bins)
        return gaps / total if total else None


_Value = TypeVar("_Value", Snapshot, Details)


def _to_json(value: Snapshot | Details) -> bytes:
    text = json.dumps(asdict(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return (text + "\n").encode("utf-8", "replace")  # names may hold halves of surrogate pairs


def _read_file(path: Path, kind: type[_Value], what: str, largest: int) -> _Value:
    try:
        if path.stat().st_size > largest or not path.is_file():
            raise DataError(f"{path} is not {what}: expected a file of at most {largest:,} bytes")
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    try:
        return msgspec.json.decode(text.removeprefix(b"\xef\xbb\xbf"), type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is not {what} ({error})") from error


def _file_name(text: str, most: int) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[-most:]


def write_snapshot(run: Path, snapshot: Snapshot) -> Path:
    """Write a snapshot into a run folder and return its path."""
    dataset = _file_name(snapshot.dataset, 80)
    if dataset != snapshot.dataset:
        digest = hashlib.sha256(snapshot.dataset.encode("utf-8", "replace")).hexdigest()[:8]
        dataset = f"{dataset or 'data'}-{digest}"
    path = run / "snapshots" / f"step_{snapshot.step:08d}.{dataset}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, _to_json(snapshot))
    return path


def find_snapshots(run: Path) -> dict[str, dict[int, Path]]:
    """Find the snapshots of a run folder by dataset (as spelled in file names) and step, both in order."""
    snapshots: dict[str, dict[int, Path]] = {}
    for path in sorted((run / "snapshots").glob("step_*.json")):
        if match := re.fullmatch(r"step_(\d{8,})\.(.+)\.json", path.name):
            snapshots.setdefault(match[2], {})[int(match[1])] = path
    return {name: dict(sorted(steps.items())) for name, steps in sorted(snapshots.items())}


def read_snapshot(path: Path) -> Snapshot:
    """Read one snapshot.

    Raises:
        DataError: the file cannot be read, is too large, cut short, or not a snapshot.
    """
    return _read_file(path, Snapshot, "a snapshot", _MAX_SNAPSHOT_BYTES)


def details_folder(results: Path) -> Path:
    """The folder with the details of a results file."""
    return results.with_name(results.name.removesuffix(".jsonl") + ".details")


def write_details(results: Path, details: Details, *, weights: str) -> Path:
    """Write details next to a results file and return their path.

    Args:
        results: the file that the scores are appended to.
        details: the details of one dataset and task.
        weights: as in the scores.
    """
    details = replace(details, weights=weights)
    dataset, task = _file_name(details.dataset, 60), _file_name(details.task, 60)
    digest = hashlib.sha256(json.dumps(details.key).encode()).hexdigest()[:16]
    path = details_folder(results) / f"{dataset or 'data'}.{task or 'task'}.{digest}.json"
    data = _to_json(details)
    if len(data) > _MAX_DETAILS_BYTES:
        raise DataError(
            f"{path}: details of {details.n:,} items are larger than the limit of {_MAX_DETAILS_BYTES:,} bytes"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
    return path


def read_details(results: Path) -> tuple[list[Details], list[str]]:
    """Read the details next to a results file.

    Returns:
        Details in the order of their file names, and notes on those that cannot be read.
    """
    folder = details_folder(results)
    try:
        paths = sorted(path for path in folder.glob("*.json") if not path.name.startswith("."))
    except OSError as error:
        return [], [f"{folder.name} cannot be read ({error.strerror}), so details are not shown."]
    read, broken, notes = [], [], []
    for path in paths[:_MAX_DETAILS_FILES]:
        try:
            read.append(_read_file(path, Details, "a details file", _MAX_DETAILS_BYTES))
        except DataError:
            broken.append(path.name)
    if broken:
        more = f" and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
        notes.append(f"{folder.name}: {', '.join(broken[:_NAMED])}{more} cannot be read and are left out.")
    if len(paths) > _MAX_DETAILS_FILES:
        notes.append(
            f"{folder.name}: only the first {_MAX_DETAILS_FILES:,} of {len(paths):,} files are read."
        )
    return read, notes


def read_all_details(results: Iterable[Path]) -> tuple[dict[tuple[str, ...], Details], list[str]]:
    """Read the details next to several results files, by their keys, and notes on those that cannot be read."""
    details: dict[tuple[str, ...], Details] = {}
    notes: list[str] = []
    for path in dict.fromkeys(results):
        file_details, unread = read_details(path)
        details |= {each.key: each for each in file_details}
        notes += unread
    return details, notes

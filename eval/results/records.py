"""Results and their files: scores in ``results.jsonl``, which is only ever appended to, details and snapshots.

A snapshot is what the report of a training run shows for one step and dataset; it is stored in
``snapshots/step_<8 digits>.<dataset>.json`` of the run folder. Details are what a page and a paired test need
besides the scores of one model, dataset and task; ``runs/a/results.jsonl`` has them in ``runs/a/results.details/``.
"""

import base64
import binascii
import fcntl
import hashlib
import json
import math
import os
import platform
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from clipkit import CLIP
from clipkit.errors import DataError
from clipkit.files import write_atomic
from eval.datasets.dataset import TEST, EvalDataset
from eval.features.encoder import dtype_name

_MAX_WHOLE = 2**53  # beyond it, floats skip integers
_MAX_DEPTH = 64  # of nested JSON
_MAX_LINE = 1 << 20  # bytes
_MAX_SNAPSHOT_BYTES = 16 << 20
_MAX_DETAILS_BYTES = 32 << 20
_MAX_DETAILS_FILES = 50_000
_VERDICT = "verdict.json"
_NAMED = 3  # unreadable files that a note names

Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_WHOLE)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


def parse_json(text: str | bytes) -> Any:
    """Parse untrusted JSON."""
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
        """Return the values as (n,) bool, int64 or float32."""
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
        values: by metric, a value of each item whose mean is the metric; or, for metrics with an
            ``item_statistic``, one or several values of each item.
        labels: the class of each item, or whether it has each class, if there are classes.
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


@dataclass(frozen=True, kw_only=True)
class VerdictRow:
    """The score of a model on a dataset, and the difference to that of the start weights.

    Attributes:
        text: the value, formatted.
        change: the difference and its interval, formatted; "" for the start weights.
        gain: the difference, above 0 if better, and relative to the start if the metric is not a fraction.
        low: lower end of the interval of the gain; None if it was not tested.
        high: upper end.
    """

    dataset: str
    metric: str
    model: str
    value: float
    text: str
    change: str = ""
    gain: float = 0.0
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a fine-tune is better than its start weights, see ``eval.verdict``.

    Attributes:
        kind: "better", "no evidence" or "worse".
        sentences: the verdict in words, the kind first.
        rows: by dataset, the start weights first.
        command: writes the recommended model; "" if that is the start weights.
        notes: what to know about the rows.
        inputs: a hash of what was compared.
    """

    kind: str
    sentences: tuple[str, ...]
    rows: tuple[VerdictRow, ...]
    command: str = ""
    notes: tuple[str, ...] = ()
    inputs: str = ""


_Value = TypeVar("_Value", Snapshot, Details, Verdict)


def _to_json(value: Snapshot | Details | Verdict) -> bytes:
    text = json.dumps(asdict(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return (text + "\n").encode("utf-8", "replace")  # names may hold halves of surrogate pairs


def _read_json_object(path: Path, kind: type[_Value], what: str, largest: int) -> _Value:
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
    """Read one snapshot."""
    return _read_json_object(path, Snapshot, "a snapshot", _MAX_SNAPSHOT_BYTES)


def write_verdict(run: Path, verdict: Verdict) -> None:
    """Write the verdict on a fine-tune into its run folder."""
    write_atomic(run / _VERDICT, _to_json(verdict))


def read_verdict(run: Path) -> Verdict | None:
    """Read the verdict of a run folder; None if there is none, DataError if it cannot be read."""
    path = run / _VERDICT
    return _read_json_object(path, Verdict, "a verdict", _MAX_SNAPSHOT_BYTES) if path.is_file() else None


def details_folder(results: Path) -> Path:
    """The folder with the details of a results file."""
    return results.with_name(results.name.removesuffix(".jsonl") + ".details")


def write_details(results: Path, details: Details, *, weights: str) -> Path:
    """Write details next to a results file and return their path."""
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
            read.append(_read_json_object(path, Details, "a details file", _MAX_DETAILS_BYTES))
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
        details |= {record.key: record for record in file_details}
        notes += unread
    return details, notes


# --------------------------------------------------------------------------------------------------------------
# Scores.

PREFIX = re.compile(r"dim ([1-9]\d{0,6})\b[ ,]*(.*)")  # setting of a prefix of the embedding
_HASH_DIGITS = 16


@dataclass(frozen=True, kw_only=True)
class Score:
    """One measured number.

    Attributes:
        dataset: its name.
        task: such as "zero-shot" or "retrieval".
        metric: such as "acc1" or "image_to_text_R@1".
        value: in [0, 1], except ranks and perplexity, which start at 1, and CIDEr-D, in [0, 10].
        n: number of images (or captions) averaged over.
        low: lower end of the 95% interval, if there is one.
        high: upper end.
        chance: mean of random guessing; None if that is not one number.
        split: the dataset's split.
        prompt_set: name of the prompts, "own" for those stored with the images; "" if none are used, and for
            retrieval with unchanged captions.
        setting: the task's setting, such as "4-shot", or "dim 64" for a prefix of the embedding; "" if it has none.
    """

    dataset: str
    task: str
    metric: str
    value: float
    n: int
    low: float | None = None
    high: float | None = None
    chance: float | None = None
    split: str = TEST
    prompt_set: str = ""
    setting: str = ""


def append_results(
    path: Path,
    scores: Sequence[Score],
    *,
    step: int | None,
    provenance: Mapping[str, Any],
    seconds: float | None = None,
) -> None:
    """Append one line per score: step, the score's fields, the duration of its task, and the provenance.

    The file is locked while writing, so that lines of concurrent programs do not mix. An incomplete line at the end
    of the file, left by a killed program, is terminated first.
    """
    lines = [
        json.dumps({"step": step, **asdict(score), "seconds": seconds, **provenance}, ensure_ascii=False)
        for score in scores
    ]
    data = "".join(line + "\n" for line in lines).encode()
    file = _open_to_append(path)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            data = b"\n" + data
        if os.write(file, data) != len(data):
            raise DataError(f"cannot write {path}: no space left")
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
    finally:
        os.close(file)


def check_appendable(path: Path) -> None:
    """Check that results can be appended to a file, creating it if it does not exist."""
    os.close(_open_to_append(path))


def _open_to_append(path: Path) -> int:
    try:
        with suppress(FileExistsError):  # if the parent is a file, os.open has the better message
            path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error


def read_results(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a results file in order; none if there is no file.

    Returns:
        Lines whose dataset, task and metric are text and whose step is an integer or None. Others are skipped.
    """
    try:
        return [
            line
            for line in json_lines(path, [], "")
            if (line.get("step") is None or type(line["step"]) is int)
            and all(isinstance(line.get(key), str) for key in ("dataset", "task", "metric"))
        ]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def provenance(model: CLIP, dataset: EvalDataset, *, weights: str) -> dict[str, Any]:
    """Describe where a score comes from: versions, weights, data, prompts, dtype, preprocessing, time.

    Call it under the autocast that the model was scored with. ``weights`` is as ``weights_id`` names them.
    """
    prompts = dataset.all_prompts()
    choices = [caption for several in dataset.choices or () for caption in several]
    captions = [caption for several in dataset.caption_prompts() for caption in several]
    try:
        installed = version("clipkit")
    except PackageNotFoundError:  # a checkout that is not installed
        installed = "unknown"
    return {
        "weights": weights,
        "architecture": model.name,
        "dim": model.dim,
        "data_revision": dataset.revision,
        "prompts": _digest(prompt for class_prompts in prompts for prompt in ("", *class_prompts)),
        "prompt_count": sum(map(len, prompts)),
        "captions": _digest(captions) if captions else None,
        "choices": _digest(choices) if choices else None,
        "dtype": dtype_name(model),
        "preprocessing": model.preprocess.to_dict(),
        "clipkit": installed,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "time": time_now(),
    }


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()[:_HASH_DIGITS]


def time_now() -> str:
    """The current time in UTC, as in results."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def weights_id(source: str) -> tuple[str, int | None]:
    """Return the id of the weights that ``clipkit.load(source)`` loads, and their training step if known.

    For a checkpoint folder or a ``.safetensors`` file it is ``sha256:`` and the first 16 digits of the file's hash,
    otherwise ``source`` itself.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.is_file():
        return source, None
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:_HASH_DIGITS]
    step = path.resolve().parent.name.removeprefix("step_")
    return f"sha256:{digest}", int(step) if step.isdecimal() else None

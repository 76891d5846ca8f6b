"""Scores and the file that keeps them: ``results.jsonl``, appended to and never rewritten."""

import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import torch

from clipkit import CLIP
from clipkit.errors import DataError
from clipkit.files.terminal import counted
from eval.datasets.dataset import TEST, EvalDataset
from eval.features.encoder import dtype_name
from eval.results.records import finite, json_lines, whole

__all__ = [
    "Record",
    "Score",
    "Series",
    "append_results",
    "check_appendable",
    "latest_results",
    "provenance",
    "read_records",
    "read_results",
    "text_of",
    "time_now",
    "weights_id",
]

_HASH_DIGITS = 16
_MAX_TEXT = 300
_KEY = {
    "model": "",
    "step": None,
    "dataset": "",
    "split": "test",
    "task": "",
    "prompt_set": "",
    "setting": "",
    "metric": "",
}  # what tells scores apart, and what older lines mean by leaving it out


@dataclass(frozen=True, kw_only=True)
class Score:
    """One measured number.

    Attributes:
        dataset: its name.
        task: such as "zero-shot" or "retrieval".
        metric: such as "acc1" or "image_to_text_R@1".
        value: 0–1, but for ranks, which begin at 1.
        n: how many images (or captions) it is the mean of.
        low: lower end of the 95% interval; None where there is none.
        high: upper end.
        chance: what random guessing gives on average; None where that is not one number.
        split: of the dataset.
        prompt_set: whose prompts, "own" for those that lie beside the images; "" where none are used, and of
            retrieval where captions stand as they are.
        setting: of the task, such as "4-shot"; "" where it has none.
    """

    dataset: str
    task: str
    metric: str
    value: float
    n: int
    low: float | None = None
    high: float | None = None
    chance: float | None = None
    split: str = "test"
    prompt_set: str = ""
    setting: str = ""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A line of a results file: a score, when it was measured and of which model.

    A field that is missing or of another type is None, or "" for text, except the first four.

    Attributes:
        dataset: as in ``Score``, as are the next ones.
        step: of the training.
        seconds: that the task took.
        line: all fields as they were written.
    """

    dataset: str
    task: str
    metric: str
    value: float
    n: int | None
    low: float | None
    high: float | None
    chance: float | None
    split: str
    prompt_set: str
    setting: str
    step: int | None
    seconds: float | None
    line: Mapping[str, Any]

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Self | None:
        """The record of a line; None if it has no dataset, task, metric or finite value."""
        value = finite(line.get("value"))
        if value is None or not all(text_of(line, key) for key in ("dataset", "task", "metric")):
            return None
        return cls(
            dataset=text_of(line, "dataset"),
            task=text_of(line, "task"),
            metric=text_of(line, "metric"),
            value=value,
            n=whole(line.get("n")),
            low=finite(line.get("low")),
            high=finite(line.get("high")),
            chance=finite(line.get("chance")),
            split=text_of(line, "split") or TEST,
            prompt_set=text_of(line, "prompt_set"),
            setting=text_of(line, "setting"),
            step=whole(line.get("step")),
            seconds=finite(line.get("seconds")),
            line=line,
        )

    @property
    def own(self) -> bool:
        """Whether the training itself took the score, not an evaluation of a checkpoint."""
        return "model_hash" not in self.line

    @property
    def series(self) -> "Series":
        """What scores of one metric at several steps have in common."""
        return self.dataset, self.split, self.task, self.prompt_set, self.setting

    @property
    def data_revision(self) -> str:
        """The fingerprint of the images, or ""."""
        return text_of(self.line, "data_revision")

    @property
    def prompts(self) -> str:
        """The fingerprint of the prompts, of retrieval that of the captions as the model read them, or ""."""
        return text_of(self.line, "captions" if self.task == "retrieval" else "prompts")

    @property
    def provenance(self) -> Mapping[str, Any]:
        """The fields of the line besides the score."""
        return {key: one for key, one in self.line.items() if key not in self.__dataclass_fields__}


Series = tuple[str, str, str, str, str]  # dataset, split, task, prompt set, setting


def text_of(line: Mapping[str, Any], key: str) -> str:
    """A text field of a line, at most 300 characters; "" if it is missing or of another type."""
    value = line.get(key)
    return value[:_MAX_TEXT] if isinstance(value, str) else ""


def read_records(path: Path, notes: list[str], consequence: str = "") -> Iterator[Record]:
    """Read the records of a results file in order.

    Args:
        path: the file.
        notes: receives a line about lines that are broken or no scores, or about a missing file.
        consequence: of a missing file, for its note; "" for none.
    """
    odd = 0
    for line in json_lines(path, notes, consequence):
        record = Record.of(line)
        odd += record is None
        if record is not None:
            yield record
    if odd:
        notes.append(
            f"{path.name}: {counted(odd, 'line')} without a dataset, task, metric or finite value left out."
        )


def append_results(
    path: Path,
    scores: Sequence[Score],
    *,
    step: int | None,
    provenance: Mapping[str, Any],
    seconds: float | None = None,
) -> None:
    """Append one line a score: step, the score's fields, the seconds that its task took, then the provenance.

    The file is locked while the lines are appended, so that lines of programs which append at the same time do
    not mix. If a killed program has left an incomplete line at the end, it is terminated first.

    Raises:
        DataError: the file cannot be written.
    """
    lines = [
        json.dumps({"step": step, **asdict(score), "seconds": seconds, **provenance}, ensure_ascii=False)
        for score in scores
    ]
    data = "".join(line + "\n" for line in lines).encode()
    try:
        file = _open_to_append(path)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                data = b"\n" + data
            written = os.write(file, data)
        finally:
            os.close(file)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
    if written != len(data):
        raise DataError(f"cannot write {path}: no space left")


def check_appendable(path: Path) -> None:
    """Make sure that results can be appended to a file, which may then be there without a line.

    Raises:
        DataError: they cannot.
    """
    try:
        os.close(_open_to_append(path))
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error


def _open_to_append(path: Path) -> int:
    with suppress(FileExistsError):  # where a file lies in its place, opening says it better
        path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def read_results(path: Path) -> list[dict[str, Any]]:
    """The lines of a results file in order; none if there is no file.

    Each has a dataset, task and metric that are text, and a step that is a whole number or None. A line that a
    killed program has left unfinished, or that is no score, is passed over: no score was recorded.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        return [line for line in json_lines(path, [], "") if _is_score(line)]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _is_score(line: Mapping[str, Any]) -> bool:
    step = line.get("step")
    return (step is None or type(step) is int) and all(
        isinstance(line.get(key), str) for key in ("dataset", "task", "metric")
    )


def latest_results(path: Path) -> list[dict[str, Any]]:
    """The last line of each score of each model, in the order of their first appearance.

    A training that was stopped and resumed may score the same step twice.
    """
    latest: dict[tuple[str, ...], dict[str, Any]] = {}
    for line in read_results(path):
        latest[tuple(str(line.get(key, default)) for key, default in _KEY.items())] = line
    return list(latest.values())


def provenance(model: CLIP, dataset: EvalDataset, *, weights: str) -> dict[str, Any]:
    """Where a score comes from: versions, weights, data, prompts, number format, preprocessing, time.

    Args:
        model: as it was when it encoded (and called under the same autocast).
        dataset: what it was scored on.
        weights: which weights they are, as ``weights_id`` names them or in own words.
    """
    prompts = dataset.prompts()
    choices = [caption for several in dataset.choices or () for caption in several]
    captions = [caption for several in dataset.caption_prompts() for caption in several]
    return {
        "weights": weights,
        "architecture": model.name,
        "data_revision": dataset.revision,
        "prompts": _digest(prompt for own in prompts for prompt in ("", *own)),
        "prompt_count": sum(map(len, prompts)),
        "captions": _digest(captions) if captions else None,
        "choices": _digest(choices) if choices else None,
        "dtype": dtype_name(model),
        "preprocessing": model.preprocess.to_dict(),
        "clipkit": _version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "time": time_now(),
    }


def time_now() -> str:
    """The time of a line, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def weights_id(source: str) -> tuple[str, int | None]:
    """Name the weights that ``clipkit.load(source)`` loads, and the training step they are of.

    A checkpoint folder or a ``.safetensors`` file gives ``sha256:`` and the first 16 digits of the file's hash;
    anything else is named by ``source`` itself.
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


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()[:_HASH_DIGITS]


def _version() -> str:
    try:
        return version("clipkit")
    except PackageNotFoundError:  # a checkout that was not installed
        return "unknown"

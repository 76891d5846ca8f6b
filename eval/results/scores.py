"""Scores, and ``results.jsonl``, which is only ever appended to."""

import fcntl
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from clipkit import CLIP
from clipkit.errors import DataError
from eval.datasets.dataset import TEST, EvalDataset
from eval.features.encoder import dtype_name
from eval.results.records import json_lines

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

    Raises:
        DataError: the file cannot be written.
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
    """Check that results can be appended to a file, creating it if it does not exist.

    Raises:
        DataError: they cannot.
    """
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

    Raises:
        DataError: the file cannot be read.
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


def latest_results(path: Path) -> list[dict[str, Any]]:
    """Read the last line of each score of each model, in the order of first appearance.

    A resumed training may have scored the same step twice.
    """
    defaults = {
        "model": "",
        "step": None,
        "dataset": "",
        "split": TEST,
        "task": "",
        "prompt_set": "",
        "setting": "",
    }
    latest: dict[tuple[str, ...], dict[str, Any]] = {}
    for line in read_results(path):
        key = (*(str(line.get(name, default)) for name, default in defaults.items()), line["metric"])
        latest[key] = line
    return list(latest.values())


def provenance(model: CLIP, dataset: EvalDataset, *, weights: str) -> dict[str, Any]:
    """Describe where a score comes from: versions, weights, data, prompts, dtype, preprocessing, time.

    Args:
        model: the model (call this under the autocast that it was scored with).
        dataset: the dataset that it was scored on.
        weights: as ``weights_id`` names them, or any other description.
    """
    prompts = dataset.prompts()
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
        "prompts": _digest(prompt for own in prompts for prompt in ("", *own)),
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

"""``clipkit classify``: the best labels of pictures by zero-shot, as a table on the terminal and as CSV or JSON.

Pictures stream through: what is printed or written goes out batch by batch, and nothing is kept.

    .csv      a line per image: picture, source, label_1, probability_1, label_2, …; a name or label that a
              spreadsheet would run as a formula (=, +, -, @ first) has an apostrophe before it, which
              clipkit takes off where it reads such a file
    .json     an array with a line a picture:
              {"picture": …, "source": …, "labels": [{"label": …, "probability": …}, …]}
    .jsonl    the same objects, a line each, without the array

Where a file is written the terminal gets failures and a summary; else it gets the table.

Letters: B batch, C classes, O embedding dimension.
"""

import csv
import io
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

import torch
from rich.cells import cell_len, set_cell_size
from torch import Tensor

from clipkit.api import load
from clipkit.errors import ConfigError, DataError
from clipkit.files.atomic import replacing
from clipkit.files.patterns import user_path
from clipkit.files.progress import CountProgress
from clipkit.files.table import safe_cell
from clipkit.files.text import counted, printable
from clipkit.inference.inputs import Stream
from clipkit.inference.stream import Failure, FeatureStream, pick_device
from clipkit.model.zero_shot import DEFAULT_TEMPLATES, fill_template, zero_shot_classifier

__all__ = ["ClassifyOptions", "Guess", "guesses", "labels_of", "run", "templates_of"]

_WIDTH = 80
_LABEL, _PROBABILITY = 30, len("probability")
_PICTURE = _WIDTH - _LABEL - _PROBABILITY - 4  # two blanks between columns
_LARGEST_LIST = 16 << 20  # bytes of a file of labels or templates


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions:
    """What the command line says; see ``clipkit classify --help``."""

    sources: Sequence[str]
    model: str
    labels: str
    templates: Sequence[str] | None
    top: int
    out: Path | None
    batch_size: int | None
    workers: int | None
    device: str | None
    precision: str
    name: str
    image_column: str | None
    background: str | None
    upright: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Guess:
    """The best labels of one picture, the most probable first; probabilities are over all labels."""

    picture: str
    source: str  # the folder, file, shard or table that it comes from
    labels: list[tuple[str, float]]


def guesses(
    stream: Stream, features: FeatureStream, labels: Sequence[str], weights: Tensor, *, top: int
) -> Iterator[Guess | Failure]:
    """Classify the pictures of a stream.

    Args:
        stream: pictures.
        features: the model and how it is used.
        labels: C names.
        weights: (O, C), see ``clipkit.zero_shot_classifier``.
        top: how many labels of each picture.

    Raises:
        DataError: the model gives numbers that are not finite.
    """
    weights = weights.float().cpu()
    scale = features.model.logit_scale.detach().float().exp().cpu()
    if not (math.isfinite(scale.item()) and weights.isfinite().all()):
        raise DataError("the model gives no finite numbers for the labels: its weights are damaged")
    for outcome in features.run(((0, item) for item in stream), kind="image"):
        if isinstance(outcome, Failure):
            yield outcome
            continue
        probabilities = (scale * torch.from_numpy(outcome.rows) @ weights).softmax(dim=-1)  # (B, C)
        best = probabilities.topk(min(top, len(labels)), dim=-1)
        for item, values, places in zip(
            outcome.items, best.values.tolist(), best.indices.tolist(), strict=True
        ):
            named = [(labels[place], value) for place, value in zip(places, values, strict=True)]
            yield Guess(picture=item.key, source=item.source, labels=named)


def labels_of(given: str) -> list[str]:
    """The labels of a file, one a line, or of a list separated by commas.

    Raises:
        DataError: there are fewer than two, one is there twice or is no UTF-8, or the file cannot be read.
    """
    path = user_path(given)
    if _is_file(path):
        found = _lines(path)
    elif "," not in given:
        raise DataError(f"{given!r} is no file, and a list of labels has commas: --labels 'cat,dog'")
    else:
        found = [label.strip() for label in given.split(",")]
    labels = [label for label in found if label]
    if len(labels) < 2:
        raise DataError(
            f"{given!r} has {counted(len(labels), 'label')}: at least two are needed to choose from"
        )
    seen: set[str] = set()
    for label in labels:
        if label in seen:
            raise DataError(f"label {label!r} is there twice")
        _check_text(label, "label")
        seen.add(label)
    return labels


def templates_of(given: Sequence[str] | None) -> list[str]:
    """Templates as given, or the lines of a file of them.

    Raises:
        DataError: one has no ``{c}`` or is no UTF-8, or the file is not there, cannot be read or is empty.
    """
    if not given:
        return list(DEFAULT_TEMPLATES)
    templates: list[str] = []
    for one in given:
        path = user_path(one)
        if "{" in one:
            templates.append(one)
        elif _is_file(path):
            templates += [line for line in _lines(path) if line]
        else:
            raise DataError(f"{one!r} is no file of templates, and has no {{c}} where the label would stand")
    for template in templates:
        _check_text(template, "template")
        fill_template(template, "")
    if not templates:
        raise DataError("the file of templates is empty")
    return templates


def run(options: ClassifyOptions) -> int:
    """The command; returns the exit status: 0 where at least one picture could be classified.

    Raises:
        ClipkitError: a mistake that the user can mend.
    """
    if options.top < 1:
        raise ConfigError(f"top = {options.top}: it must be 1 or more")
    labels, templates = labels_of(options.labels), templates_of(options.templates)
    stream = Stream(options.sources, image_column=options.image_column)
    top = min(options.top, len(labels))
    with _opened(options.out, top) as writer:
        model = load(
            options.model,
            name=options.name,
            device=pick_device(options.device),
            background=options.background,
            upright=options.upright,
        )
        features = FeatureStream(
            model, batch_size=options.batch_size, precision=options.precision, workers=options.workers
        )
        weights = zero_shot_classifier(model, labels, templates)
        done, failed = _classified(guesses(stream, features, labels, weights, top=top), writer)
    for line in features.lines(background=options.background, upright=options.upright):
        print(line, file=sys.stderr)
    if failed:
        print(f"{failed:,} of {counted(done + failed, 'picture')} failed", file=sys.stderr)
    if options.out is not None:
        _say(f"{counted(done, 'picture')} in {options.out}")
    return 0 if done else 1


def _classified(outcomes: Iterator[Guess | Failure], writer: "_Writer | None") -> tuple[int, int]:
    """Write each guess, or print it where nothing is written; how many there were, and how many failures."""
    done = failed = 0
    if writer is None:
        _say(_line("picture", "label", "probability"))
    with CountProgress("classifying", total=None, shown=writer is not None) as bar:
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                failed += 1
                where = f" (in {outcome.item.source})" if outcome.item.source not in outcome.item.key else ""
                print(f"failed: {printable(outcome.item.key + where)}: {outcome.cause}", file=sys.stderr)
            else:
                done += 1
                if writer is not None:
                    writer.write(outcome)
                else:
                    _say(_rows_of(outcome))
            bar.show(done + failed, failed)
    return done, failed


def _say(text: str) -> None:
    """Print, and say so where that is not possible: there may be another file in play."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise DataError(f"cannot write to standard output: {error.strerror}") from error


def _rows_of(guess: Guess) -> str:
    pictures = [guess.picture] + [""] * (len(guess.labels) - 1)
    return "\n".join(
        _line(picture, label, f"{probability:.1%}")
        for picture, (label, probability) in zip(pictures, guess.labels, strict=True)
    )


def _line(picture: str, label: str, probability: str) -> str:
    """A line of the table, at most 80 columns; of a path the end tells most, of a label the beginning."""
    picture, label = printable(picture), printable(label)
    if cell_len(picture) > _PICTURE:
        while cell_len(picture) > _PICTURE - 1:
            picture = picture[1:]
        picture = "…" + picture
    if cell_len(label) > _LABEL:
        label = set_cell_size(label, _LABEL - 1).rstrip() + "…"
    cells = (set_cell_size(picture, _PICTURE), set_cell_size(label, _LABEL), f"{probability:>{_PROBABILITY}}")
    return "  ".join(cells).rstrip()


class _Writer(Protocol):
    def write(self, guess: Guess) -> None:
        """Add one picture."""

    def end(self) -> None:
        """Add what closes the file."""


class _Csv:
    def __init__(self, file: TextIO, top: int) -> None:
        self._file = file
        names = (f"{name}_{i}" for i in range(1, top + 1) for name in ("label", "probability"))
        self._write_row("picture", "source", *names)

    def write(self, guess: Guess) -> None:
        cells = (cell for label, value in guess.labels for cell in (safe_cell(label), f"{value:.6f}"))
        self._write_row(safe_cell(guess.picture), safe_cell(guess.source), *cells)

    def _write_row(self, *cells: str) -> None:
        # with a line terminator of "\n" Python before 3.13 does not quote a carriage return
        row = io.StringIO()
        csv.writer(row).writerow(cells)
        self._file.write(row.getvalue().removesuffix("\r\n") + "\n")

    def end(self) -> None:
        """Nothing closes a CSV file."""


class _Json:
    def __init__(self, file: TextIO, *, array: bool) -> None:
        self._file, self._array, self._first = file, array, True

    def write(self, guess: Guess) -> None:
        labels = [{"label": label, "probability": round(value, 6)} for label, value in guess.labels]
        if self._array:
            self._file.write("[\n" if self._first else ",\n")
        one = {"picture": guess.picture, "source": guess.source, "labels": labels}
        self._file.write(json.dumps(one, ensure_ascii=False, allow_nan=False))
        self._file.write("" if self._array else "\n")
        self._first = False

    def end(self) -> None:
        if self._array:
            self._file.write("[]\n" if self._first else "\n]\n")


@contextmanager
def _opened(path: Path | None, top: int) -> Iterator[_Writer | None]:
    """A writer of the kind that the suffix names, beside the file: it appears when it is complete."""
    if path is None:
        yield None
        return
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".json", ".jsonl"):
        raise ConfigError(f"--out {path}: it must end in .csv, .json or .jsonl")
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder: name a file")
    try:
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            writer: _Writer = _Csv(file, top) if suffix == ".csv" else _Json(file, array=suffix == ".json")
            yield writer
            writer.end()
    except BrokenPipeError:  # of the terminal
        raise
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error


def _check_text(text: str, what: str) -> None:
    """Refuse now what could not be written in the end: arguments hold other bytes than UTF-8 as half pairs."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} {text!r} is not UTF-8") from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a list of labels is too long for a file name
        return False


def _lines(path: Path) -> list[str]:
    try:
        if path.stat().st_size > _LARGEST_LIST:
            raise DataError(f"{path} has more than {_LARGEST_LIST >> 20} MiB")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as a list of lines: {error}") from error
    return [line.strip() for line in text.split("\n")]

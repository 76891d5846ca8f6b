"""Tables in JSON: an object per row.

- JSON Lines: objects, one or several per line.
- A list of objects has a row for each. If the document is an object with only one list of objects, as Karpathy's
  splits (``images``), that list is used.
- COCO's ``images`` are the rows, with the captions of their ``annotations``.

Documents are read whole, so their size is limited.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

from clipkit.errors import DataError
from clipkit.samples.table.base import LONGEST, ColumnRequest, Format, Record, open_text

LARGEST = 2**29  # characters
_JOINED = "captions"  # column of the captions of COCO's annotations
_NOT_LISTED = "captions of an image that is not in the list of images"

_SEPARATORS = re.compile(r"[\s,]*")
NOT_AN_OBJECT = "not a JSON object"
_TOO_LONG = f"an object longer than {LONGEST:,} characters"
_DETECTED = 100  # objects whose keys are the columns


class JsonLines(Format):
    """A file of JSON objects; later ones may have other keys than the first ones."""

    any_column = True

    def __init__(self, path: Path, requests: Sequence[ColumnRequest]) -> None:
        super().__init__(path)
        with open_text(path, newline="\n") as (text, _):
            self.names = keys_of(islice(_read_objects(text), _DETECTED))
        if not self.names:
            raise DataError(f"{path} has no JSON object in its first {_DETECTED} lines")

    def records(self, required: Sequence[str], others: Sequence[str]) -> Iterator[Record]:
        with open_text(self.path, newline="\n") as (text, progress):
            for value in _read_objects(text):
                yield record_of(value, progress())


def keys_of(values: Iterator[object]) -> list[str]:
    """Return the keys of objects in the order in which they occur."""
    keys: dict[str, None] = {}
    for value in values:
        if isinstance(value, dict):
            keys.update(dict.fromkeys(value))
    return list(keys)


def record_of(value: dict[str, object] | str, progress: float) -> Record:
    """Return the row of an object; a string is the cause of a bad row."""
    if isinstance(value, str):
        return Record(cells={}, cause=value, progress=progress)
    return Record(cells=value, progress=progress)


def _read_objects(text: TextIO) -> Iterator[dict[str, object] | str]:
    decoder = json.JSONDecoder()
    buffer = ""
    while piece := text.readline(LONGEST):
        buffer += piece
        line_ends = piece.endswith("\n") or len(piece) < LONGEST
        position = 0
        while (position := _end_of_separators(buffer, position)) < len(buffer):
            try:
                value, end = decoder.raw_decode(buffer, position)
            except (ValueError, RecursionError):
                if line_ends:
                    yield "not JSON"
                    position = len(buffer)
                break
            if end - position > LONGEST:
                yield _TOO_LONG
            else:
                yield value if isinstance(value, dict) else NOT_AN_OBJECT
            position = end
        buffer = buffer[position:]
        if len(buffer) > LONGEST and not line_ends:
            yield f"{_TOO_LONG}, or not JSON: the rest of the line is not read"
            while piece and not piece.endswith("\n"):
                piece = text.readline(LONGEST)
            buffer = ""
    if buffer:
        yield "not JSON"


def _end_of_separators(text: str, position: int) -> int:
    match = _SEPARATORS.match(text, position)
    assert match is not None
    return match.end()


@dataclass(frozen=True, slots=True)
class _MissingImage:
    """An image that COCO's annotations have captions of, but that is not in the list of images."""

    image_id: str
    captions: int


# an object, or why there is none
_Value = dict[str, object] | str | _MissingImage


def open_json(path: Path, requests: Sequence[ColumnRequest]) -> Format:
    """Open a JSON file, which is a document or, if an object is followed by more text, JSON Lines."""
    with open_text(path) as (text, _):
        lines = (line for line in iter(lambda: text.readline(LONGEST), "") if line.strip())
        first = next(lines, "")
        following = next(lines, "")
    try:
        value, end = json.JSONDecoder().raw_decode(first.lstrip())
    except (ValueError, RecursionError):
        return JsonDocument(path, requests)
    if isinstance(value, dict) and (first.lstrip()[end:] + following).strip():
        return JsonLines(path, requests)
    return JsonDocument(path, requests)


class JsonDocument(Format):
    """A JSON file that is one document."""

    any_column = True

    def __init__(self, path: Path, requests: Sequence[ColumnRequest]) -> None:
        super().__init__(path)
        with open_text(path) as (text, _):
            content = text.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise DataError(
                f"{path} is larger than {LARGEST >> 20} MiB: write it as .jsonl, an object per line"
            )
        try:
            document = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not JSON: {error}") from error
        self._values = _select_rows(path, document)
        # joined captions, although images may have a column with a more specific name, such as "title"
        self.guesses = {"caption": _JOINED} if _is_coco(document) else {}
        self.names = keys_of(iter(self._values[:_DETECTED]))
        if not self.names:
            raise DataError(f"{path} has no JSON object in its first {_DETECTED} rows")

    def records(self, required: Sequence[str], others: Sequence[str]) -> Iterator[Record]:
        for row_number, value in enumerate(self._values, 1):
            progress = row_number / len(self._values)
            if isinstance(value, _MissingImage):
                name = f"image_id {value.image_id} (captions: {value.captions})"
                yield Record(cells={required[0]: name}, cause=_NOT_LISTED, progress=progress)
            else:
                yield record_of(value, progress)


def _select_rows(path: Path, document: object) -> list[_Value]:
    if isinstance(document, list):
        return [value if isinstance(value, dict) else NOT_AN_OBJECT for value in document]
    if isinstance(document, dict):
        lists = {name: value for name, value in document.items() if _is_list_of_objects(value)}
        if _is_coco(document):
            return _join_captions(path, lists["images"], lists["annotations"])
        if len(lists) == 1:
            rows = _select_rows(path, next(iter(lists.values())))
            for row in rows:
                # Karpathy's split of COCO has the folder of an image in another field than the name
                if isinstance(row, dict) and "sentences" in row and "filepath" in row and "filename" in row:
                    row["filepath"] = f"{row['filepath']}/{row['filename']}"
            return rows
    raise DataError(f"{path}: expected a list of objects, or an object with COCO's images and annotations")


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _is_coco(document: object) -> bool:
    return isinstance(document, dict) and all(
        _is_list_of_objects(document.get(name)) for name in ("images", "annotations")
    )


def _join_captions(path: Path, images: Sequence[object], annotations: Sequence[object]) -> list[_Value]:
    captions: dict[str, list[object]] = {}
    for annotation in annotations:
        if isinstance(annotation, dict) and "caption" in annotation:
            captions.setdefault(str(annotation.get("image_id")), []).append(annotation["caption"])
    if not captions:
        raise DataError(f"{path}: its annotations have no captions (COCO's are in captions_*.json)")
    rows: list[_Value] = []
    for image in images:
        if isinstance(image, dict):
            rows.append({**image, _JOINED: captions.pop(str(image.get("id")), None)})
        else:
            rows.append(NOT_AN_OBJECT)
    rows += [_MissingImage(image_id, len(texts)) for image_id, texts in captions.items()]
    return rows

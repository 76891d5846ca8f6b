"""JSON files that are one document: a list of objects, or the annotations of COCO.

- A list of objects has a row for each. If the document is an object with only one list of objects, as Karpathy's
  splits (``images``), that list is used.
- COCO's ``images`` are the rows, with the captions of their ``annotations``.

Documents are read whole, so their size is limited.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clipkit.errors import DataError
from clipkit.samples.table.formats import ColumnRequest, Format, Record, TextFormat
from clipkit.samples.table.json_lines import NOT_AN_OBJECT, JsonLines, keys_of, record_of
from clipkit.samples.table.text import LONGEST, open_text

LARGEST = 2**29  # characters
_DETECTED = 100  # objects whose keys are the columns
_JOINED = "captions"  # column of the captions of COCO's annotations
_NOT_LISTED = "captions of an image that is not in the list of images"


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
        first, following = next(lines, ""), next(lines, "")
    try:
        value, end = json.JSONDecoder().raw_decode(first.lstrip())
    except (ValueError, RecursionError):
        return JsonDocument(path, requests)
    if isinstance(value, dict) and (first.lstrip()[end:] + following).strip():
        return JsonLines(path, requests)
    return JsonDocument(path, requests)


class JsonDocument(TextFormat):
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
        self.guesses: Mapping[str, str] = {"caption": _JOINED} if _is_coco(document) else {}
        self.names = keys_of(iter(self._values[:_DETECTED]))
        if not self.names:
            raise DataError(f"{path} has no JSON object in its first {_DETECTED} rows")

    def records(self, required: Sequence[str], others: Sequence[str]) -> Iterator[Record]:
        """Return all objects in order, see ``Format``."""
        for number, value in enumerate(self._values, 1):
            progress = number / len(self._values)
            if isinstance(value, _MissingImage):
                name = f"image_id {value.image_id} (captions: {value.captions})"
                yield Record(cells={required[0]: name}, cause=_NOT_LISTED, progress=progress)
            else:
                yield record_of(value, progress)


def _select_rows(path: Path, document: object) -> list[_Value]:
    """Return the rows of a document: objects, or strings with the cause why there is none."""
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
    """Return COCO's images with the captions of their annotations."""
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

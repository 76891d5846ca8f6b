"""What all readers of samples have in common: their interface, the image among the members, fields from json."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from clipkit.errors import DataError
from clipkit.samples.formats import ARRAY_MEMBERS, IMAGE_EXTENSIONS

_IMAGES = frozenset(IMAGE_EXTENSIONS)


class Samples(Protocol):
    """A source as a random-access list of samples.

    Thread-safe; can be pickled. Memory does not grow with the size of the samples. A sample that cannot be used
    raises DataError, whose message is a short cause without the sample's name.

    Attributes:
        repeated: number of rows of tables that are not the first of their image.
        caption_column: the field with the list of captions; "" if captions are members or other fields.
    """

    repeated: int = 0
    caption_column: str = ""

    def __len__(self) -> int: ...

    @property
    def faults(self) -> Sequence[str]:
        """Why samples are missing at the end of a file, or members from a sample."""
        return ()

    def cause(self, i: int) -> str:
        """Return why a sample cannot be used, "" if no reason is known before it is read."""
        return ""

    def path(self, i: int) -> Path | None:
        """Return the file of the image; None if it is in a file with other images."""
        return None

    def key(self, i: int) -> str:
        """Return the name of a sample: its WebDataset key, the path of its image, or its row."""
        ...

    def locate(self, i: int) -> tuple[str, str]:
        """Return the file or folder of a sample, and its key, for messages."""
        ...

    def members(self, i: int) -> Sequence[str]:
        """Return the names of a sample's members without the key, such as "jpg" and "sci.txt"."""
        ...

    def fields(self, i: int) -> dict[str, Any]:
        """Return the fields of a sample's json members and table columns."""
        ...

    def read(self, i: int, member: str) -> bytes:
        """Return the content of a member; "" stands for the image."""
        ...

    @property
    def content_id(self) -> str:
        """16 hexadecimal digits that change with the samples or their order."""
        ...


def find_image(members: Iterable[str]) -> str:
    """Return the first member of a sample that is an image by its name; "" without one.

    Arrays are often features: only one called ``image.npy`` or ``image.npz`` counts, in a sample without another
    image.
    """
    array = ""
    for name in members:
        if name in _IMAGES:
            return name
        if name in ARRAY_MEMBERS:
            array = array or name
    return array


def decode_text(data: bytes) -> str:
    """Decode a text member; bytes that are not UTF-8 become lone surrogates."""
    return data.decode("utf-8", "surrogateescape")


def is_json(member: str) -> bool:
    """Return whether a member contains JSON by its name."""
    return member == "json" or member.endswith(".json")


def parse_fields(members: Mapping[str, bytes]) -> dict[str, Any]:
    """Parse the json members of a sample into one mapping: ``json`` itself, and ``x.json`` as the field ``x``.

    Other members are skipped, and a ``json`` that is not an object.
    """
    fields: dict[str, Any] = {}
    for name, data in members.items():
        if not is_json(name):
            continue
        try:
            value = json.loads(decode_text(data))
        except (ValueError, RecursionError) as error:
            raise DataError(f"its {name} does not parse: {error}") from error
        if name != "json":
            fields[name.removesuffix(".json")] = value
        elif isinstance(value, dict):
            fields = {**value, **fields}
    return fields


def value_at(fields: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field, None if it does not exist; ``a.b`` is field b of the object in field a."""
    value: Any = fields
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value

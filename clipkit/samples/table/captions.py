"""Captions in the cells of a table."""

import ast
import json
import re
from contextlib import suppress

from clipkit.errors import DataError

LONGEST_CAPTION = 10_000  # characters
MOST_CAPTIONS = 100  # per image
# elements of lists that are written as text: strings with the escapes of ``repr``, and None or numbers
_ELEMENT = re.compile(
    r"""'(?:[^'\\]|\\[\\'"nrtxuU])*'|"(?:[^"\\]|\\[\\'"nrtxuU])*"|None|null|nan|-?[0-9]+(?:\.[0-9]+)?"""
)
_LIST = re.compile(rf"\[\s*(?:{_ELEMENT.pattern})(?:[\s,]+(?:{_ELEMENT.pattern}))*[\s,]*\]")
_QUOTED_LIST = re.compile(r"""\[\s*(['"]).*\1\s*\]""", re.DOTALL)
_INVALID = re.compile("[\ufffd\ud800-\udfff]")  # where text is not UTF-8
_ANSWERING = ("gpt", "assistant", "model")  # who answers in conversations


def find_texts(value: object) -> object:
    """Return the captions in a list that is written as text, or that contains objects; other values unchanged."""
    if isinstance(value, str):
        return _read_list(value) if value.lstrip()[:1] == "[" else value
    if not isinstance(value, list) or not all(isinstance(element, dict) for element in value):
        return value
    for element in value:
        if element.get("from") in _ANSWERING:
            return element.get("value")
    return [element.get("raw", element.get("caption")) for element in value]


def _read_list(text: str) -> object:
    """Return the list that a text is, as JSON, Python or NumPy write it; the text itself if it is another one.

    Elements are strings or None, or also numbers if there are strings.
    """
    stripped = text.strip()
    elements: object = None
    try:
        elements = json.loads(stripped)
    except (ValueError, RecursionError):
        if _LIST.fullmatch(stripped):
            words = [match[0] for match in _ELEMENT.finditer(stripped, 1)]
            with suppress(ValueError, SyntaxError):
                # each by itself, because Python joins strings without a comma between them
                elements = [None if word in ("null", "nan") else ast.literal_eval(word) for word in words]
    if isinstance(elements, list):
        has_text = any(isinstance(element, str) for element in elements)
        if has_text or all(element is None for element in elements):
            return elements
        return text
    if _QUOTED_LIST.fullmatch(stripped):
        raise DataError('a list that cannot be read: write it as JSON, ["a cat", "a pet"]')
    return text


def parse_captions(value: object) -> list[str]:
    """Return the captions in a cell as its format reads it, see ``find_texts`` and ``usable_texts``.

    Raises:
        DataError: it is a list that cannot be read.
    """
    return usable_texts(find_texts(value))


def usable_texts(value: object) -> list[str]:
    """Return the texts in a cell that are not blank, without spaces around them."""
    values = value if isinstance(value, list) else [value]
    return [text.strip() for text in values if isinstance(text, str) and text.strip()]


def check_captions(value: object) -> list[str]:
    """Return the captions in a cell without blank ones, at least one; equal captions are kept."""
    values = value if isinstance(value, list) else [value]
    texts = [text for text in values if isinstance(text, str)]
    if len(texts) + values.count(None) < len(values):
        raise DataError("caption is neither a string nor a list of strings")
    captions = usable_texts(value)
    if not captions:
        raise DataError("empty caption" if texts else "no caption")
    if len(set(captions)) > MOST_CAPTIONS:
        raise DataError(f"more than {MOST_CAPTIONS} captions")
    for caption in captions:
        if len(caption) > LONGEST_CAPTION:
            raise DataError(f"caption of more than {LONGEST_CAPTION:,} characters")
        if _INVALID.search(caption):
            raise DataError("caption is not UTF-8")
    return captions

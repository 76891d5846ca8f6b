"""Binds a dataset's classes to those of its card by their keys, never by their order.

A key is what a dataset calls a class: a folder's name, a line of ``classnames.txt``, one of torchvision's
classes. It is looked for as it stands among the card's keys and aliases, then by its letters and digits alone
(``apple_pie``, ``Apple Pie``; ``00014``, ``14``), then in the same two ways among the class names of the card's
prompts. What would stand for two classes stands for none.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from clipkit.errors import DataError, nearest

__all__ = ["Words", "bind_keys", "loose_form", "unique_words"]

Words = dict[str, int]  # what stands for a class → its number
_SHOWN = 3


def loose_form(key: str) -> str:
    """Its letters and digits alone, without case and accents; of a number also without leading zeros."""
    plain = "".join(one for one in unicodedata.normalize("NFKD", key).casefold() if one.isalnum())
    return (plain.lstrip("0") or "0") if plain.isdecimal() else plain


def unique_words(words: Iterable[tuple[str, int]], *, loose: bool) -> Words:
    """The words that stand for one class only; loosely compared, none without a letter or digit."""
    found: dict[str, int | None] = {}
    for word, number in words:
        form = loose_form(word) if loose else word
        if found.setdefault(form, number) != number:
            found[form] = None
    return {form: number for form, number in found.items() if number is not None and (form or not loose)}


def bind_keys(
    card: str, given: Sequence[str], keys: Sequence[str], books: Iterator[tuple[bool, Words]], *, lines: bool
) -> tuple[int, ...]:
    """Which of the card's classes each of the dataset's is.

    Args:
        card: its name, for messages.
        given: the dataset's own keys, in the order of its labels.
        keys: the card's.
        books: what stands for its classes, and whether loosely; the first that has a key decides.
        lines: whether keys of which some cannot be bound are the card's line by line, if most say so and none
            contradicts it.

    Returns:
        By label, the number of the class on the card.

    Raises:
        DataError: a key is unknown or there twice, or a class has none.
    """
    found: list[int | None] = [None] * len(given)
    for loose, words in books:
        for label, key in enumerate(given):
            if found[label] is None:
                found[label] = words.get(loose_form(key) if loose else key)
        if None not in found:
            break
    bound = [number for number in found if number is not None]
    if len(bound) == len(given) == len(keys) == len(set(bound)):
        return tuple(bound)
    if lines and len(given) == len(keys) and 2 * len(bound) >= len(keys):
        for label, one in enumerate(found):
            if one not in (None, label):
                raise DataError(
                    f"card {card}: line {label + 1} of the class names is {given[label]!r}, which is class {one}: "
                    "they are not in the order that the card states"
                )
        return tuple(range(len(keys)))
    raise _unbound(card, given, keys, found)


def _unbound(card: str, given: Sequence[str], keys: Sequence[str], found: Sequence[int | None]) -> DataError:
    seen: dict[int, int] = {}
    for label, number in enumerate(found):
        if number is None:
            hint = nearest(given[label], keys)
            return DataError(f"card {card}: no class goes by {given[label]!r} (label {label}), {hint}")
        if number in seen:
            first, second = given[seen[number]], given[label]
            return DataError(
                f"card {card}: labels {seen[number]} and {label} are one class, {first!r} and {second!r}"
            )
        seen[number] = label
    missing = [repr(key) for number, key in enumerate(keys) if number not in seen]
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    return DataError(
        f"card {card}: of its {len(keys)} classes the dataset lacks {', '.join(missing[:_SHOWN])}{more}"
    )

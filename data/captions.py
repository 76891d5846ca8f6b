"""Which caption a picture is trained with: where captions are, which is taken, and what is written around it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from clipkit.errors import DataError
from data.json_fields import value_at

__all__ = ["CHOICES", "NOT_UTF8", "TEXT", "CaptionRule", "is_utf8"]

CHOICES = ("first", "random", "weighted", "all")
NOT_UTF8 = "caption is not UTF-8"
TEXT = "txt"  # the caption file; where a sample has none, the "caption" of its json


@dataclass(frozen=True, kw_only=True)
class CaptionRule:
    """How a sample's caption is made.

    Attributes:
        fields: where captions are: ``txt`` or a field of the sample's json, whose value is a text or a list of
            texts; ``a.b`` is field b of the object in field a.
        choice: "first" takes the first one of the first field that has any; "random" any of all, equally likely;
            "weighted" draws a field that has any by ``weights``, then one of it; "all" makes each pair of picture
            and caption a sample of its own.
        weights: of each field, for "weighted".
        templates: what the caption is written into, in place of ``{}``; one is drawn each time.
        prefix: what is written before it.
    """

    fields: tuple[str, ...] = (TEXT,)
    choice: str = "first"
    weights: tuple[float, ...] = ()
    templates: tuple[str, ...] = ()
    prefix: str = ""

    def which(self) -> str:
        """What decides how many captions a sample has, as a line that identifies it."""
        return json.dumps({"fields": self.fields, "choice": self.choice})

    @property
    def draws(self) -> bool:
        """Whether chance has a part in it."""
        return self.choice in ("random", "weighted") or len(self.templates) > 1

    @property
    def reads_json(self) -> bool:
        """Whether every sample's json is needed."""
        return self.fields != (TEXT,)

    def by_field(self, text: str | None, meta: Mapping[str, Any]) -> list[list[str]]:
        """The captions in each field, without empty ones."""
        if text is None and isinstance(meta.get("caption"), str):
            text = meta["caption"]
        return [
            [one for one in _texts(text if name == TEXT else value_at(meta, name)) if one.strip()]
            for name in self.fields
        ]

    def caption(
        self, text: str | None, meta: Mapping[str, Any], number: int, random: np.random.Generator | None
    ) -> str | None:
        """The caption of a sample, None if it has none.

        Args:
            text: of the caption file.
            meta: the sample's json.
            number: of "all", which one.
            random: needed where ``draws``.

        Raises:
            DataError: it is not UTF-8.
        """
        captions = self._chosen(self.by_field(text, meta), number, random)
        if captions is None:
            return None
        if self.templates:
            drawn = int(random.integers(len(self.templates))) if random and len(self.templates) > 1 else 0
            captions = self.templates[drawn].replace("{}", captions)
        if not is_utf8(captions):
            raise DataError(NOT_UTF8)
        return self.prefix + captions

    def _chosen(
        self, by_field: list[list[str]], number: int, random: np.random.Generator | None
    ) -> str | None:
        flat = [caption for captions in by_field for caption in captions]
        if not flat:
            return None
        if self.choice == "all":
            return flat[number] if number < len(flat) else None
        if self.choice == "first":
            return flat[0]
        assert random is not None
        if self.choice == "random":
            return flat[int(random.integers(len(flat)))]
        weights = np.array([weight if of else 0 for weight, of in zip(self.weights, by_field, strict=True)])
        if not weights.any():
            return None
        among = by_field[int(random.choice(len(weights), p=weights / weights.sum()))]
        return among[int(random.integers(len(among)))]

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def is_utf8(text: str) -> bool:
    """Whether a text is all of UTF-8: without the lone surrogates that stand for other bytes, or JSON may spell."""
    if text.isascii():  # known without looking at the characters
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []

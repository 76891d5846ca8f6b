"""How texts become a model's tokens: CLIP's byte-pair encoding, or a tokenizer of the transformers library.

open_clip cleans texts before it hands them to such a tokenizer, transformers itself does not: there is a kind for
each, so that a model gets the tokens that it was trained with.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from clipkit.architectures import (
    Architecture,
    BagOfWords,
    ClassTable,
    OpenClipText,
    TextTower,
    TransformersText,
)
from clipkit.errors import CheckpointError, ConfigError, DataError, nearest
from clipkit.open_clip_package import make_tokenizer
from clipkit.tokenizer import VOCABULARY, tokenize

__all__ = [
    "ClassTokenizer",
    "ClipTokenizer",
    "LibraryTokenizer",
    "Tokenizer",
    "TransformersTokenizer",
    "tokenizer_of",
]

_FOLDER = "tokenizer"  # of a checkpoint
_PLAIN = "transformers without cleaning"
_CLASSES = "class names"
_SHOWN = 200  # characters of a library's message


class Tokenizer(Protocol):
    """Turns texts into token ids, and can be stored beside the weights."""

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """N texts → (N, L) int64."""

    def store(self, folder: Path) -> Any:
        """Write the files it needs into a checkpoint folder; returns what the model card records."""

    def of_length(self, context_length: int) -> "Tokenizer":
        """The same for texts of up to that many tokens."""


@dataclass(frozen=True, kw_only=True)
class ClipTokenizer:
    """CLIP's own, see ``clipkit.tokenize``; with ``trim`` a batch is as long as its longest text."""

    context_length: int = 77
    trim: bool = True

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """N texts → (N, L) int64."""
        return tokenize(texts, self.context_length, trim=self.trim)

    def store(self, folder: Path) -> Any:
        """Nothing to write: the vocabulary comes with open_clip_torch."""
        return VOCABULARY

    def of_length(self, context_length: int) -> "ClipTokenizer":
        """The same for texts of up to that many tokens."""
        return replace(self, context_length=context_length)


@dataclass(frozen=True, kw_only=True)
class ClassTokenizer:
    """The number of the class that a text is the name of; for a head in the text tower's place."""

    names: tuple[str, ...]

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """N class names → (N, 1) int64.

        Raises:
            DataError: a text is no class's name.
        """
        try:
            return torch.tensor([self._numbers[" ".join(text.split())] for text in texts]).view(-1, 1).long()
        except KeyError as error:
            name = str(error.args[0])
            raise DataError(
                f"{name[:80]!r} is none of the model's {len(self.names)} classes: {nearest(name, self.names)} "
                "(its head reads no other text)"
            ) from error

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def store(self, folder: Path) -> Any:
        """Nothing to write: the names are in the architecture."""
        return _CLASSES

    def of_length(self, context_length: int) -> "ClassTokenizer":
        """Itself: a name is one token."""
        return self


@dataclass(kw_only=True)
class LibraryTokenizer:
    """A tokenizer of transformers with open_clip's cleaning of texts before it.

    Attributes:
        source: a folder, or a name on the Hugging Face hub; read at the first text.
        context_length: L; texts are padded to it, or cut.
        options: open_clip's ``tokenizer_kwargs``.
        trim: cut what is padding in all rows off.
    """

    source: str
    context_length: int
    options: dict[str, Any] = field(default_factory=dict)
    trim: bool = False
    _made: Any = None

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """N texts → (N, L) int64.

        Raises:
            ConfigError: the tokenizer cannot be had.
        """
        if not texts:
            return torch.zeros(0, self.context_length, dtype=torch.int64)
        library = self._library()
        ids: Tensor = library(list(texts))
        padding = library.tokenizer.pad_token_id
        if self.trim and library.tokenizer.padding_side == "right":
            used = (ids != padding).any(dim=0).nonzero()
            ids = ids[:, : int(used[-1]) + 1 if len(used) else 1]
        return ids

    def _library(self) -> Any:
        if self._made is None:
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # loader processes are forked
            from clipkit.hub import from_hub

            with from_hub(self.source):
                self._made = make_tokenizer(self.source, self.context_length, **self.options)
        return self._made

    def store(self, folder: Path) -> Any:
        """Write the tokenizer's files, so that the checkpoint needs no network."""
        self._library().tokenizer.save_pretrained(folder / _FOLDER)
        return {
            "kind": "transformers",
            "context_length": self.context_length,
            "options": self.options,
            "trim": self.trim,
        }

    def of_length(self, context_length: int) -> "LibraryTokenizer":
        """The same for texts of up to that many tokens."""
        return replace(self, context_length=context_length, _made=None)


@dataclass(kw_only=True)
class TransformersTokenizer:
    """The tokenizer of a folder as transformers itself runs it: texts are not cleaned before.

    Rows end where their text does, with zeros behind. For a tower that reads a text at its largest token and sees
    nothing behind it, that is the same as any padding.

    Attributes:
        source: the folder; read at the first text.
        context_length: L, of the longest text; more is cut.
    """

    source: str
    context_length: int
    _made: Any = field(default=None, compare=False, repr=False)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """N texts → (N, L) int64, L that of the longest.

        Raises:
            ConfigError: the tokenizer cannot be had.
        """
        if not texts:
            return torch.zeros(0, self.context_length, dtype=torch.int64)
        rows = self.rows(texts)
        longest = max(1, *map(len, rows))
        return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])

    def rows(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, cut, without padding; errors as for a call."""
        rows: list[list[int]] = self.library()(
            list(texts), truncation=True, max_length=self.context_length, return_attention_mask=False
        )["input_ids"]
        return rows

    def library(self) -> Any:
        """transformers' object.

        Raises:
            ConfigError: it cannot be had, or has not enough in it.
        """
        if self._made is None:
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # loader processes are forked
            from transformers import AutoTokenizer

            try:
                made = AutoTokenizer.from_pretrained(
                    self.source, trust_remote_code=False, local_files_only=True
                )
            except Exception as error:  # the Rust library raises nothing more special
                cause = " ".join(str(error).split())[:_SHOWN]
                raise ConfigError(
                    f"transformers does not read the tokenizer in {self.source}: {cause}"
                ) from error
            made.model_max_length = self.context_length  # as other libraries will cut texts after an export
            if made.pad_token is None:
                made.pad_token = made.eos_token
            self._made = made
        return self._made

    def store(self, folder: Path) -> Any:
        """Write the tokenizer's files into a checkpoint."""
        self.library().save_pretrained(folder / _FOLDER)
        return {"kind": _PLAIN, "context_length": self.context_length}

    def of_length(self, context_length: int) -> "TransformersTokenizer":
        """The same for texts of up to that many tokens."""
        return replace(self, context_length=context_length, _made=None)


def tokenizer_of(shape: Architecture, *, stored: Any = None, folder: Path | None = None) -> Tokenizer:
    """The tokenizer that goes with an architecture.

    Args:
        shape: the architecture.
        stored: what ``Tokenizer.store`` returned when the checkpoint ``folder`` was written; None for none.
        folder: that checkpoint.

    Raises:
        CheckpointError: this version cannot make the stored one.
    """
    if isinstance(stored, dict) and stored.get("kind") in ("transformers", _PLAIN) and folder is not None:
        try:
            if stored["kind"] == _PLAIN:
                length = int(stored["context_length"])
                return TransformersTokenizer(source=str(folder / _FOLDER), context_length=length)
            return LibraryTokenizer(
                source=str(folder / _FOLDER),
                context_length=int(stored["context_length"]),
                options=dict(stored["options"]),
                trim=bool(stored["trim"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder}: the stored tokenizer does not fit: {error!r}") from error
    if isinstance(shape.text, ClassTable) and stored in (None, _CLASSES):
        return ClassTokenizer(names=shape.text.names)
    if stored not in (None, VOCABULARY):
        raise CheckpointError(f"{folder}: tokenizer {stored!r} is unknown to this version")
    text = shape.text
    if stored is None and isinstance(text, TransformersText):
        return LibraryTokenizer(source=text.model, context_length=text.context_length, trim=True)
    if stored is None and isinstance(text, OpenClipText) and text.config.get("hf_tokenizer_name"):
        options = dict(text.config.get("tokenizer_kwargs") or {})
        if text.config.get("tokenizer_mode"):
            options["tokenizer_mode"] = text.config["tokenizer_mode"]
        return LibraryTokenizer(
            source=text.config["hf_tokenizer_name"], context_length=text.context_length, options=options
        )
    # open_clip's text towers take texts of one length only
    return ClipTokenizer(context_length=text.context_length, trim=isinstance(text, TextTower | BagOfWords))

"""Streams of images and texts from sources of samples, and from lists of texts.

    photos/, pairs.tar, s3://bucket/pairs, …   see ``clipkit.samples.sources``; a dataset with all its splits
    cat.jpg                                    one image
    lines.txt, -                               texts, one per line; "-" is standard input

A stream yields one item at a time. It can be iterated again in the same order as long as its sources do not change.
Reading an item's bytes is a separate step, which may run in any thread.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, Literal

from clipkit.config import DataConfig, load_config
from clipkit.errors import ConfigError, DataError, nearest
from clipkit.files.writing import user_path
from clipkit.samples.base import Samples, is_json, value_at
from clipkit.samples.folders import read_file
from clipkit.samples.remote import shard_cache
from clipkit.samples.sources import CACHE_GB, FORMATS, OpenOptions, Source, find_sources
from clipkit.samples.table import CAPTION_COLUMNS, find_column, is_table
from clipkit.samples.table.base import usable_texts

MAX_LINE = 2**20  # limit for a line of a list of texts, in characters
_EXAMINED = 100  # samples in which named members are looked for
_AHEAD = 4  # remote files downloaded at a time

Kind = Literal["image", "caption"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A sample whose content is read from an opened source.

    Attributes:
        samples: the source.
        i: index of the sample.
        image: name of the image among its members; "" for the one that is an image by its name.
        captions: names of members and fields with captions; () for the text member or a field with a common name.
    """

    samples: Samples
    i: int
    image: str = ""
    captions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One image or text of a stream, not read yet.

    Attributes:
        source: the folder, file, shard or table that contains it.
        key: the image's path; in a shard the sample's key; in a list of texts the number of the line or row.
        image: where the image is read from.
        caption: the text, or where it is read from.
        cause: why the item cannot be used; "" if no problem is known.
        stamp: size and version of the file that contains a ``Sample``.
    """

    source: str
    key: str
    image: Path | Sample | None = None
    caption: str | Sample | None = None
    cause: str = ""
    stamp: str = ""


class Stream:
    """All items of some sources, in order; can be iterated any number of times.

    Args:
        image: member, or column of tables, with images or their paths; found by common names if not given.
        captions: members, fields or columns with captions, of which the first that a sample has is used; found by
            common names if not given.

    Attributes:
        recorded: member with images, and members and fields with captions, of the model's training. They are used
            for shards that have them, if no others are given.
        repeated: number of rows of tables whose image is that of an earlier row.
    """

    def __init__(
        self,
        sources: Sequence[str],
        *,
        kind: Kind = "image",
        image: str = "",
        captions: Sequence[str] = (),
        cache_gb: float = CACHE_GB,
    ) -> None:
        self.kind: Kind = kind
        self.repeated = 0
        self.recorded: tuple[str, tuple[str, ...]] = ("", ())
        self._recorded_names: dict[str, None] = {}  # that were used
        self._image = image
        self._captions = tuple(captions)
        self._options = OpenOptions(
            cache=shard_cache(sources, cache_gb),
            image_column=image or None,
            caption_column=captions[0] if captions else None,
            need=(kind,),
            others=self._captions[1:],
            group=kind == "image",
            truncated="use",
        )
        self._parts: list[tuple[str, Callable[[], Iterator[Item]]]] = []
        for source in sources:
            lines = self._open_lines(source)
            if lines is not None:
                self._parts.append((source, lines))
                continue
            formats = find_sources(source)
            if kind == "caption" and len(formats) > 1:
                formats = [part for part in formats if part.format != "images"]
            self._parts += [(source, self._open(part, source)) for part in formats]

    @property
    def notes(self) -> list[str]:
        """What to print about names of members that were not given, and rows with the same image."""
        notes = []
        if self._recorded_names:
            notes.append(f"read from {' and '.join(self._recorded_names)}, as in the model's training")
        if self.repeated:
            rows = "row has" if self.repeated == 1 else "rows have"
            notes.append(f"{self.repeated:,} {rows} the image of an earlier row: each image is read once")
        return notes

    def __iter__(self) -> Iterator[Item]:
        empty = {source for source, _ in self._parts}
        for source, items in self._parts:
            for item in items():
                empty.discard(source)
                yield item
        if empty:
            raise DataError(f"{min(empty)} contains no {'image' if self.kind == 'image' else 'text'}")

    def _open_lines(self, source: str) -> Callable[[], Iterator[Item]] | None:
        path = user_path(source)
        if source != "-" and not (path.suffix.lower() == ".txt" and path.is_file() and not is_table(path)):
            return None
        if self.kind == "image":
            raise DataError(f"{source} contains texts: add --text")
        if source != "-":
            return lambda: _lines(path, readable(source))
        # standard input can be read only once: copy it to a file that can be read again
        spool: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the stream)
        shutil.copyfileobj(sys.stdin.buffer, spool)
        spool.flush()
        return lambda: _lines(spool, "-")

    def _open(self, source: Source, text: str) -> Callable[[], Iterator[Item]]:
        if self.kind == "caption" and source.format == "images":
            raise DataError(f"{text}: texts are read from a .txt file, a table, shards or - (standard input)")
        files = source.files
        if not user_path(text).is_absolute():  # in names of items, a path is as the user wrote it
            files = tuple(
                file if file.is_remote else replace(file, url=os.path.relpath(file.url)) for file in files
            )
        if source.format == "images" and source.folder is None:
            names = [readable(file.url) for file in files]
            return lambda: (
                Item(source=name, key=name, image=Path(file.url))
                for name, file in zip(names, files, strict=True)
            )
        format = FORMATS[source.format]
        parts = [replace(source, files=(file,)) for file in files] or [source]
        if format.many_files:
            return lambda: self._items_in_files(parts)
        opened = [format.open(part, self._options) for part in parts]
        if self.kind == "image":
            self.repeated += sum(samples.repeated for samples in opened)
        has_captions = source.format != "images"
        return lambda: (
            item
            for samples in opened
            for item in self._items(samples, self._captions, has_captions=has_captions)
        )

    def _items_in_files(self, parts: Sequence[Source]) -> Iterator[Item]:
        cache = self._options.cache
        if cache is not None:
            cache.prefetch([part.files[0] for part in parts], threads=_AHEAD, were_counted=False)
        names = None  # of members, once there is a sample
        has_several = False  # whether samples have several captions, which are read before they are encoded
        for part in parts:
            file = part.files[0]
            source = readable(file.shown)
            try:
                samples = FORMATS[part.format].open(part, self._options)
            except DataError as error:
                yield Item(source=source, key="", cause=str(error))
                continue
            if names is None and len(samples):
                _check_names(samples, source, self._image, self._captions)
                names = self._select_names(samples)
                has_several = self.kind == "caption" and _have_several_captions(samples, names[1])
            image, captions = names or (self._image, self._captions)
            stamp = f"{file.size} {file.version}"
            if image or captions:
                stamp = f"{stamp} {image} {captions}"
            if has_several:
                yield from self._items(samples, captions, has_captions=True)
            else:
                for i in range(len(samples)):
                    sample = Sample(samples=samples, i=i, image=image, captions=captions)
                    has_caption = bool(samples.caption_column) or _may_have_caption(
                        samples.members(i), captions
                    )
                    yield Item(
                        source=readable(samples.locate(i)[0]),
                        key=readable(samples.key(i)),
                        image=sample,
                        caption=sample if has_caption else None,
                        stamp=stamp,
                    )
            for fault in samples.faults:
                yield Item(source=source, key="", cause=fault)

    def _select_names(self, samples: Samples) -> tuple[str, tuple[str, ...]]:
        """Return the names to read: the given ones, or else those of the model's training that samples have."""
        image, captions = self.recorded
        has_image, has_caption, _ = _find_names(samples, image, captions)
        if self._image or not has_image:
            image = self._image
        elif image and self.kind == "image":
            self._recorded_names[image] = None
        if self._captions or not has_caption:
            captions = self._captions
        elif self.kind == "caption":
            self._recorded_names |= dict.fromkeys(captions)
        return image, captions

    def _items(self, samples: Samples, names: Sequence[str], *, has_captions: bool) -> Iterator[Item]:
        stamp = ""
        for i in range(len(samples)):
            source = readable(samples.locate(i)[0])
            key = readable(samples.key(i))
            cause = samples.cause(i)
            image: Path | Sample | None = None
            captions: list[str] = []
            try:
                if not cause and self.kind == "image":
                    image = samples.path(i)
                    if image is None:
                        image = Sample(samples=samples, i=i)
                        stamp = stamp or samples.content_id
                if not cause and has_captions:
                    captions = _read_captions(samples, i, names)
            except DataError as error:
                cause = str(error)
            if cause or self.kind == "image":
                caption = captions[0] if captions else None
                yield Item(source=source, key=key, image=image, caption=caption, cause=cause, stamp=stamp)
                continue
            for caption in captions:
                yield Item(source=source, key=key, caption=caption)


def recorded_members(origin: str) -> tuple[str, tuple[str, ...]]:
    """Return ``data.image`` and ``data.captions`` of a model's training by its origin; "" and () if unknown."""
    checkpoint = origin.removeprefix("clipkit checkpoint ")
    try:
        data = load_config(Path(checkpoint) / "config.toml").data
    except ConfigError:  # not a checkpoint, or one of an earlier version
        return "", ()
    return data.image.lower(), () if data.captions == DataConfig().captions else data.captions


def _check_names(samples: Samples, source: str, image: str, captions: Sequence[str]) -> None:
    has_image, has_caption, names = _find_names(samples, image, captions)
    if not has_image:
        raise DataError(f"{source} has no image {image!r} ({nearest(image, names)})")
    if not has_caption:
        raise DataError(f"{source} has no caption {', '.join(captions)!r} ({nearest(captions[0], names)})")


def _find_names(samples: Samples, image: str, captions: Sequence[str]) -> tuple[bool, bool, dict[str, None]]:
    """Return whether one of the first samples has the image, and one of the captions, and the names of members."""
    names: dict[str, None] = {}
    has_image = not image
    has_caption = not captions
    for i in range(min(_EXAMINED, len(samples))):
        if has_image and has_caption:
            break
        members = samples.members(i)
        has_image = has_image or image.partition("[")[0] in members
        has_caption = has_caption or any(name.lower() in members for name in captions)
        names |= dict.fromkeys(members)
        if not has_caption:
            with suppress(DataError):
                fields = samples.fields(i)
                names |= dict.fromkeys(fields)
                has_caption = any(name in fields or value_at(fields, name) is not None for name in captions)
    return has_image, has_caption, names


def _have_several_captions(samples: Samples, names: Sequence[str]) -> bool:
    """Return whether one of the first samples has several captions."""
    for i in range(min(_EXAMINED, len(samples))):
        with suppress(DataError):
            if len(_read_captions(samples, i, names)) > 1:
                return True
    return False


def _may_have_caption(members: Sequence[str], names: Sequence[str]) -> bool:
    if names:
        return any(name.lower() in members for name in names) or any(map(is_json, members))
    return "txt" in members or "json" in members


def _read_captions(samples: Samples, i: int, names: Sequence[str]) -> list[str]:
    """Return the captions of a sample in the first of these members and fields that has one, without blank ones.

    Without names, these are the text member or a field with a common name. As in ``data.captions``, ``txt`` is also
    the field ``caption``, and ``captions`` also ``txt``.
    """
    members = samples.members(i)
    if not names and samples.caption_column:
        names = (samples.caption_column,)
    elif not names and "txt" in members:
        names = ("txt",)
    elif not names:
        names = (find_column(CAPTION_COLUMNS, list(samples.fields(i))),)
    elif "captions" in names and "txt" not in names:
        names = (*names, "txt")
    is_blank = False
    for name in names:
        if name.lower() in members and not is_json(name.lower()):
            try:
                value: Any = samples.read(i, name.lower()).decode()
            except UnicodeDecodeError as error:
                raise DataError("caption is not UTF-8") from error
        else:
            fields = samples.fields(i)
            value = fields.get("caption" if name == "txt" and name not in fields else name)
            if value is None:
                value = value_at(fields, name)
        if not isinstance(value, str):
            if texts := usable_texts(value):
                return texts
        elif value.strip():
            return [value]
        else:
            is_blank = True
    if is_blank:
        raise DataError("empty caption")
    return []


def read_image(item: Item) -> bytes:
    """Read the encoded image of an item; DataError with a short cause, without the item's name, if that fails."""
    if item.cause:
        raise DataError(item.cause)
    assert item.image is not None
    if isinstance(item.image, Path):
        return read_file(item.image)
    data = item.image.samples.read(item.image.i, item.image.image)
    if not data:
        raise DataError("empty file")
    return data


def read_caption(item: Item) -> str:
    """Read the caption of an item.

    If there is none, raises DataError with a short cause that does not name the item.

    A blank line in a list of texts is a valid text, so that row numbers equal line numbers; a blank caption of a
    sample is an error.
    """
    if item.cause:
        raise DataError(item.cause)
    if item.caption is None:
        raise DataError("no caption")
    if isinstance(item.caption, str):
        return readable(item.caption)
    captions = _read_captions(item.caption.samples, item.caption.i, item.caption.captions)
    if not captions:
        raise DataError("no caption")
    return readable(captions[0])


def readable(text: str) -> str:
    """Convert text or a path to valid Unicode: bytes that are not UTF-8 become escapes (``\\xe9``)."""
    try:
        content = text.encode("utf-8", "surrogateescape")  # how paths represent such bytes
    except UnicodeEncodeError:  # an unpaired surrogate, from JSON
        content = text.encode("utf-8", "surrogatepass")
    return content.decode("utf-8", "backslashreplace")


def _lines(origin: Path | BinaryIO, source: str) -> Iterator[Item]:
    """Yield every line, including blank ones, so that row numbers equal line numbers if nothing fails."""
    with origin.open("rb") if isinstance(origin, Path) else os.fdopen(os.dup(origin.fileno()), "rb") as file:
        file.seek(0)  # a duplicated descriptor shares its position with the original
        encoding = "utf-16" if file.read(2) in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        file.seek(0)
        text = TextIOWrapper(file, encoding=encoding, errors="replace", newline="\n")
        line_number = 0
        while line := text.readline(MAX_LINE + 1):
            line_number += 1
            cause = "" if len(line) <= MAX_LINE else f"line of more than {MAX_LINE:,} characters"
            while cause and not line.endswith("\n") and (line := text.readline(MAX_LINE)):
                pass
            caption = None if cause else line.removesuffix("\n").removesuffix("\r")
            yield Item(source=source, key=str(line_number), caption=caption, cause=cause)

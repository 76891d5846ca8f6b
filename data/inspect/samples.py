"""One shard looked into: which samples it has, how its members are named, or why it cannot be read."""

import hashlib
import os
import re
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.errors import DataError
from clipkit.files.decode import decode_image, jpeg_size, open_image, pillow_errors
from clipkit.files.patterns import IMAGE_EXTENSIONS, expand_braces, path_order
from clipkit.files.tar import Content, TruncatedError, sample_name, tar_files, tar_files_of
from clipkit.files.traits import Decoding, Traits
from clipkit.model.tokenizer import CONTEXT_LENGTH, MAX_CHARACTERS, tokenize
from data.augment import Augmentation, empty_batch, random_of, training_pixels
from data.captions import CaptionRule, Selection
from data.inspect.findings import Place
from data.remote.store import ShardFile, is_remote
from data.shards.index import (
    CAPTION,
    IMAGE,
    LABEL,
    META,
    ShardIndex,
    index_of_members,
    keep_index,
    stored_index,
    with_content,
)
from data.shards.shard import OpenShard, meta_of, text_of
from data.shards.sources import find_shards

if TYPE_CHECKING:
    from data.remote.cache import ShardCache

__all__ = [
    "BEGINNING",
    "EMPTY_CAPTION",
    "MOST_COMPARED",
    "Look",
    "Making",
    "MemberNames",
    "OpenBeginning",
    "Picture",
    "ShardList",
    "Texts",
    "Trial",
    "check_ends",
    "groups_alike",
    "groups_equal",
    "list_shards",
    "look_code",
    "look_into",
    "missing_numbers",
    "no_pair",
    "read_all",
    "read_texts",
    "seen",
    "try_sample",
]

BEGINNING = 8 << 20  # bytes that are looked at of a remote shard of which there is no index
_BLOCK = 512
_CHECK_EVERY = 16_384  # members between looks at the clock
_MOST_NOTED = 200_000  # pictures of a shard whose extension is remembered
_MOST_HASHES = 50_000  # of a shard's keys
_MOST_REPEATED = 3  # examples of samples with two members of one kind
_PICTURE = "picture"
_KINDS = (
    (_PICTURE, IMAGE_EXTENSIONS, IMAGE), ("txt", ("txt",), CAPTION), ("cls", ("cls",), LABEL),
    ("json", ("json",), META),
)  # fmt: skip
_CODES = {extension: code for code, extension in enumerate(IMAGE_EXTENSIONS)}


@dataclass(kw_only=True)
class MemberNames:
    """What only the names themselves tell, which an index does not keep.

    Attributes:
        extensions: members by extension, also of a shard that breaks off.
        upper_case: extensions written in capitals.
        hidden: members that belong to no sample.
        repeated: members whose sample already has one of that kind ("picture", or the extension), by kind.
        repeated_keys: keys of the first samples with one.
        blocks: where the first pictures' data begin, in blocks of 512 bytes, rising.
        codes: number of the extension of each.
    """

    extensions: Counter[str] = field(default_factory=Counter)
    upper_case: Counter[str] = field(default_factory=Counter)
    hidden: int = 0
    repeated: Counter[str] = field(default_factory=Counter)
    repeated_keys: list[str] = field(default_factory=list)
    blocks: "array[int]" = field(default_factory=lambda: array("Q"))
    codes: "array[int]" = field(default_factory=lambda: array("B"))

    def noted(
        self, shard: str, members: Iterable[tuple[str, int, int]], until: float
    ) -> Iterator[tuple[str, int, int]]:
        """The same members, noted on their way; a DataError if there is no end, nor a pair, at that time."""
        key, seen, some_pair = "", set[str](), False
        for count, member in enumerate(members, start=1):
            yield member
            found = sample_name(member[0])
            if found is None:
                self.hidden += 1
                continue
            if found[0] != key:
                key, seen = found[0], set()
            extension = found[1]
            self.extensions[extension] += 1
            code = _CODES.get(extension)
            kind = extension if code is None else _PICTURE
            if kind in seen:
                self.repeated[kind] += 1
                if len(self.repeated_keys) < _MOST_REPEATED and key not in self.repeated_keys:
                    self.repeated_keys.append(key)
            elif code is not None and len(self.blocks) < _MOST_NOTED:
                self.blocks.append(member[1] // _BLOCK)
                self.codes.append(code)
            seen.add(kind)
            if not member[0].endswith(extension):
                self.upper_case[member[0][-len(extension) :]] += 1
            some_pair = some_pair or (bool(seen & {"txt", "json"}) and _PICTURE in seen)
            if count % _CHECK_EVERY == 0 and not some_pair and time.monotonic() > until:
                raise DataError(f"shard {shard} has no pair among its first {count} members")


@dataclass(kw_only=True)
class Look:
    """What was seen of a shard.

    Attributes:
        number: in the list of shards.
        file: the shard.
        cause: why it cannot be read; empty if it can.
        truncated: whether that is because it is truncated.
        rows: (M,) uint32, of its index: samples that count.
        groups: samples, whether they count or not.
        dropped: those that do not count, by reason.
        names: of its members.
        key_hashes: (K,) int64 of its samples' keys, rising; the lowest ones of many.
        keys: some of them.
        apart: keys that come twice in it, and one of them.
        beginning: the index, where it is of the first samples only.
        bytes_seen: of the shard, in which these samples lie.
        stated: samples that the ``_stats.json`` beside it says it has; None if there is none.
    """

    number: int
    file: ShardFile
    cause: str = ""
    truncated: bool = False
    rows: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    groups: int = 0
    without_picture: int = 0
    without_caption: int = 0
    names: MemberNames = field(default_factory=MemberNames)
    key_hashes: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    keys: list[str] = field(default_factory=list)
    apart: int = 0
    apart_example: Place | None = None
    beginning: ShardIndex | None = None
    bytes_seen: int = 0
    stated: int | None = None
    _blocks: npt.NDArray[np.int64] | None = None

    def extension_at(self, block: int) -> str:
        """The extension of the picture whose data begin there, empty if nobody noted it."""
        if self._blocks is None:
            self._blocks = np.frombuffer(self.names.blocks, dtype=np.uint64).astype(np.int64)
        at = int(np.searchsorted(self._blocks, block))
        if at < len(self._blocks) and self._blocks[at] == block:
            return IMAGE_EXTENSIONS[self.names.codes[at]]
        kinds = [one for one in self.names.extensions if one in _CODES]
        return kinds[0] if len(kinds) == 1 else ""


def look_into(
    number: int,
    file: ShardFile,
    selection: Selection,
    *,
    cache: "ShardCache | None",
    keys: int,
    until: float,
) -> Look:
    """Look into a shard; what is wrong with it is told, not raised.

    Args:
        number: of the shard in the list.
        file: the shard.
        selection: which samples count.
        cache: for remote shards.
        keys: how many keys to keep, spread over the shard.
        until: time (monotonic) after which a scan that has met no pair ends.
    """
    look = Look(number=number, file=file)
    try:
        index = _index(look, selection, cache, until)
    except DataError as error:
        look.cause, look.truncated = str(error), isinstance(error, TruncatedError)
        return look
    has = index.has()
    chosen = selection.choose(index, lambda row: (None, {}))
    look.rows, look.groups = chosen.rows, len(index)
    ends = index.blocks.astype(np.int64) * _BLOCK + index.sizes
    look.bytes_seen = file.size if look.beginning is None else int(ends.max(initial=0))
    picture = has[:, IMAGE]
    usable = np.zeros(len(index), dtype=np.bool_)
    usable[chosen.rows] = True
    look.without_caption = int((picture & ~usable).sum())
    look.without_picture = int((~picture & has[:, 1:].any(axis=1)).sum())
    if not look.names.extensions:
        look.names.extensions = Counter(index.extensions)
        for kind, extensions, column in _KINDS:
            members = sum(index.extensions.get(one, 0) for one in extensions)
            if (more := members - int(has[:, column].sum())) > 0:
                look.names.repeated[kind] = more
    _note_keys(look, index, keys)
    return look


def _index(look: Look, selection: Selection, cache: "ShardCache | None", until: float) -> ShardIndex:
    """The shard's index; a local one is scanned even if its index is stored, as that lacks the names."""
    file = look.file
    if file.is_remote:
        if cache is None and file.size > BEGINNING and stored_index(file) is None:
            look.beginning = _beginning(look, until)
            return look.beginning
        return OpenShard(file, selection, cache).index
    try:
        members = tar_files(Path(file.url))
        index = index_of_members(file.shown, look.names.noted(file.shown, members, until))
        index = with_content(index, Path(file.url))
    except OSError as error:
        raise DataError(f"shard {file.shown}: {error.strerror}") from error
    keep_index(file, index)
    return index


def _beginning(look: Look, until: float) -> ShardIndex:
    """The index of a remote shard's first samples: a walk through all its headers may take minutes."""
    from data.remote.store import RangedBytes

    file = look.file
    members = _whole_samples(tar_files_of(file.shown, _Beginning(RangedBytes(file))))
    return index_of_members(file.shown, look.names.noted(file.shown, members, until))


class _Beginning:
    """The first bytes of a shard, as if there were no more."""

    def __init__(self, content: Content) -> None:
        self._content = content

    def __len__(self) -> int:
        return min(len(self._content), BEGINNING)

    def __getitem__(self, part: slice, /) -> bytes:
        start, stop, _ = part.indices(len(self))
        return self._content[start:stop]


def _whole_samples(members: Iterable[tuple[str, int, int]]) -> Iterator[tuple[str, int, int]]:
    """The members of all samples but the last, which may be cut; a DataError of any other fault."""
    held: list[tuple[str, int, int]] = []
    key = ""
    try:
        for member in members:
            found = sample_name(member[0])
            if found is not None and found[0] != key:
                yield from held
                held, key = [], found[0]
            held.append(member)
    except TruncatedError:
        pass


class OpenBeginning:
    """Reads the samples at the beginning of a remote shard, as ``OpenShard`` those of a whole one."""

    def __init__(self, file: ShardFile, index: ShardIndex) -> None:
        self.file, self.index = file, index

    def read(self, row: int, columns: tuple[int, ...]) -> list[bytes | None]:
        """The members of a row, None for one that it lacks, by one request.

        Raises:
            DataError: they cannot be read.
        """
        from data.remote.store import read_range

        starts, sizes = self.index.blocks[row].tolist(), self.index.sizes[row].tolist()
        wanted = [(starts[column] * _BLOCK, sizes[column]) for column in columns]
        there = [span for span in wanted if span[0]]
        first = min((offset for offset, _ in there), default=0)
        last = max((offset + size for offset, size in there), default=0)
        content = read_range(self.file, first, last) if there else b""
        return [content[at - first : at - first + size] if at else None for at, size in wanted]


def _note_keys(look: Look, index: ShardIndex, keys: int) -> None:
    content, ends = index.key_bytes.tobytes(), index.key_ends.tolist()
    starts = [0, *ends][:-1]
    hashes = [hash(content[start:end]) for start, end in zip(starts, ends, strict=True)]
    # of many the lowest: the same keys in all shards, so that those that come twice are found among them
    look.key_hashes = np.unique(np.array(hashes, dtype=np.int64))[:_MOST_HASHES]
    step = max(1, len(index) // max(1, keys))
    look.keys = [index.key(row) for row in range(0, len(index), step)][:keys]
    first_at: dict[int, int] = {}
    for row, one in enumerate(hashes):
        if one in first_at and content[starts[row] : ends[row]] == index.key(first_at[one]).encode(
            "utf-8", "replace"
        ):
            look.apart += 1
            look.apart_example = look.apart_example or Place(shard=look.file.shown, key=index.key(row))
        first_at.setdefault(one, row)


# --------------------------------------------------------------------------------------------------------------
# Which pictures are the same: by their bytes, or by how they look.
#
# How a picture looks is told by the signs of the differences between neighbours among 17 x 16 mean grey values.
# A difference near zero counts for nothing, so that the noise of an encoder does not tell two copies apart.
#
# Letters: N pictures, C = 256 differences of each.

MOST_COMPARED = 10_000  # pictures that are compared by their look, each with each
_SIDE = 16
_NEAR_ZERO = 6  # of 255
_LEAST_SIGNS = 40  # of 256: a picture with fewer is too plain to be told from others
_AGREE = 0.92  # share of the signs that two copies have in common
_ROWS = 512  # compared at a time


def look_code(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """(H, W, 3) uint8 → (C,) int8, each -1, 0 or 1."""
    from PIL import Image

    small = Image.fromarray(pixels).resize((_SIDE + 1, _SIDE), Image.Resampling.BOX).convert("L")
    grey = np.asarray(small, dtype=np.int16)
    steps = np.diff(grey, axis=1).ravel()
    return (np.sign(steps) * (np.abs(steps) > _NEAR_ZERO)).astype(np.int8)


def groups_equal(hashes: Sequence[bytes]) -> list[list[int]]:
    """The numbers of those that are equal, by groups of two and more, the largest first."""
    by_hash: defaultdict[bytes, list[int]] = defaultdict(list)
    for number, one in enumerate(hashes):
        by_hash[one].append(number)
    return sorted((group for group in by_hash.values() if len(group) > 1), key=len, reverse=True)


def groups_alike(codes: Sequence[npt.NDArray[np.int8]]) -> list[list[int]]:
    """The numbers of those that look the same, by groups of two and more, the largest first."""
    if not codes:
        return []
    signs = np.stack(codes[:MOST_COMPARED]).astype(np.float32)  # (N, C)
    count = np.abs(signs).sum(axis=1)
    parent = list(range(len(signs)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    for start in range(0, len(signs), _ROWS):
        agreement = signs[start : start + _ROWS] @ signs.T
        most = np.maximum(count[start : start + _ROWS, None], count[None])
        rows, columns = np.nonzero((agreement >= _AGREE * most) & (most >= _LEAST_SIGNS))
        for row, column in zip((rows + start).tolist(), columns.tolist(), strict=True):
            if column > row:
                parent[root(column)] = root(row)
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for number in range(len(signs)):
        groups[root(number)].append(number)
    return sorted((group for group in groups.values() if len(group) > 1), key=len, reverse=True)


# --------------------------------------------------------------------------------------------------------------
# One sample read and made ready as a training would, with what is to be known of its picture on the way.

EMPTY_CAPTION = "empty caption"
_GREY = ("1", "L", "LA", "I", "F")
_FORMATS = {"MPO": "JPEG", "JPEG2000": "JPEG 2000", "DIB": "BMP"}  # what Pillow calls them
_LEAST_SIDE = 64  # pixels that are enough to tell how a picture looks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Picture:
    """What is known of a decoded picture."""

    format: str
    extension: str
    width: int
    height: int
    file_bytes: int
    marks: tuple[str, ...]
    traits: Traits
    digest: bytes
    code: npt.NDArray[np.int8]


@dataclass(kw_only=True, slots=True, eq=False)
class Trial:
    """A sample that was tried.

    Attributes:
        place: where it is.
        shard, row: the same by numbers: of the shard in the list, of the sample in its index.
        cause: why it is bad; empty if it is good.
        caption: None where it was not read.
        meta: its json; None where it has none that can be read.
        has_text: whether it has a caption file.
        picture: None where it was not decoded.
        crop: (3, S, S) uint8 as the model sees it.
        make, text: seconds of a core's time for the picture, from file to crop, and for its caption.
    """

    place: Place
    shard: int = 0
    row: int = 0
    cause: str = ""
    caption: str | None = None
    meta: dict[str, Any] | None = None
    has_text: bool = False
    picture: Picture | None = None
    crop: Tensor | None = None
    make: float = 0.0
    text: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """All but the image of a sample.

    Attributes:
        place: where it is.
        caption: "" if it has none that can be used.
        meta: its json, None if it has none that can be read.
        cause: why the caption cannot be used; "" if it can.
    """

    place: Place
    caption: str
    meta: dict[str, Any] | None
    cause: str


def read_texts(shard: OpenShard | OpenBeginning, row: int, rule: CaptionRule) -> Texts:
    """All but the picture of a sample."""
    return read_all(shard, row, rule, columns=(CAPTION, META))[1]


def read_all(
    shard: OpenShard | OpenBeginning,
    row: int,
    rule: CaptionRule,
    *,
    columns: tuple[int, ...] = (CAPTION, META, IMAGE),
) -> tuple[bytes, Texts]:
    """A sample's picture, b"" where it cannot be read, and the rest of it."""
    caption, meta, picture, cause = "", None, b"", ""
    try:
        members = shard.read(row, columns)
        picture = b"".join(one or b"" for one in members[2:])
        meta = _meta(members[1])
        caption = _caption(rule, members)
    except DataError as error:
        cause = str(error)
    place = Place(shard=shard.file.shown, key=shard.index.key(row))
    return picture, Texts(place=place, caption=caption, meta=meta, cause=cause)


def _meta(data: bytes | None) -> dict[str, Any] | None:
    if data is not None:
        with suppress(DataError):
            return meta_of(data)
    return None


def _caption(rule: CaptionRule, members: list[bytes | None]) -> str:
    """The caption that a training would take of caption file and json; DataError if there is none."""
    text, meta = text_of(members[0]), {}
    if rule.reads_json or text is None:
        meta = meta_of(members[1])
    caption = rule.caption(text, meta, 0, None)
    if caption is None:
        raise DataError(EMPTY_CAPTION)
    if len(caption) > MAX_CHARACTERS:
        raise DataError(f"caption of {len(caption)} characters")
    return caption


@dataclass(frozen=True, kw_only=True)
class Making:
    """How samples are made: side of the crop in pixels, augmentation, decoding, caption fields, seed."""

    image_size: int
    augmentation: Augmentation = field(default_factory=Augmentation)
    decoding: Decoding = field(default_factory=Decoding)
    captions: CaptionRule
    seed: int = 0


def try_sample(shard: OpenShard | OpenBeginning, row: int, how: Making, *, extension: str = "") -> Trial:
    """Read, decode, crop and tokenize one sample; what is wrong with it is told in ``cause``."""
    trial = Trial(place=Place(shard=shard.file.shown, key=shard.index.key(row)), row=row)
    try:
        data, *rest = shard.read(row, (IMAGE, CAPTION, META))
        _prepare(trial, data or b"", rest, how, extension)
    except DataError as error:
        trial.cause = str(error)
    return trial


def _prepare(trial: Trial, data: bytes, rest: list[bytes | None], how: Making, extension: str) -> None:
    """The sample's way through a loader, by steps whose time is taken; DataError where it ends."""
    trial.meta, trial.has_text, trial.caption = _meta(rest[1]), rest[0] is not None, ""
    begin = time.thread_time()
    trial.caption = _caption(how.captions, rest)
    tokenize([trial.caption], CONTEXT_LENGTH)
    trial.text = time.thread_time() - begin
    crop = empty_batch(1, how.image_size)[0]
    begin = time.thread_time()
    with torch.inference_mode():
        traits = training_pixels(
            data,
            image_size=how.image_size,
            augmentation=how.augmentation,
            random=random_of(how.seed, trial.row),
            out=crop,
            decoding=how.decoding,
        )
    trial.make = time.thread_time() - begin
    trial.crop = crop
    trial.picture = _picture(data, extension, traits)


def _picture(data: bytes, extension: str, traits: Traits) -> Picture:
    """What is known of a picture that decodes."""
    kind, size, marks = _header(data)
    reduce = next((by for by in (8, 4, 2) if min(size) >= by * _LEAST_SIDE), 1)
    return Picture(
        format=kind,
        extension=extension,
        height=size[0],
        width=size[1],
        file_bytes=len(data),
        marks=marks,
        traits=traits,
        digest=hashlib.blake2b(data, digest_size=16).digest(),
        code=look_code(decode_image(data, reduce=reduce)),
    )


def _header(data: bytes) -> tuple[str, tuple[int, int], tuple[str, ...]]:
    """A picture's format by its bytes, its height and width, and what is special about it."""
    try:
        with pillow_errors(), open_image(data) as image:
            kind = _FORMATS.get(image.format or "", image.format or "")
            mode, size = image.mode, (image.height, image.width)
    except DataError:  # simplejpeg reads some that Pillow does not
        return "JPEG", jpeg_size(data) or decode_image(data).shape[:2], ()
    grey16 = mode.startswith("I;16")
    told = {
        "grey": mode in _GREY or grey16,
        "CMYK": mode in ("CMYK", "YCCK"),
        "16 bits": grey16 or (kind == "PNG" and data[24:25] == b"\x10"),
    }
    return kind, size, tuple(mark for mark, there in told.items() if there)


# --------------------------------------------------------------------------------------------------------------
# What is said where no pair of picture and caption turns up: which extensions were seen, what is expected.

_TEXTS = ("txt", "json")
_OTHER_TEXTS = ("caption", "text", "cap", "captions", "tags", "description")  # what others name captions


def no_pair(looks: Sequence[Look], selection: Selection) -> str:
    """Why a training on these shards could not begin, and what would be needed."""
    sound = [look for look in looks if not look.cause]
    extensions: Counter[str] = Counter()
    hidden = 0
    for look in looks:
        extensions.update(look.names.extensions)
        hidden += look.names.hidden
    if not sound and (looks[0].truncated or not extensions):
        more = f" (and {len(looks) - 1} more cannot be read)" if len(looks) > 1 else ""
        hint = "; data.truncated=use trains on the intact part" if looks[0].truncated else ""
        return f"{looks[0].cause}{more}{hint}"
    first = looks[0].file.shown
    where = f"shard {first} holds" if len(looks) == 1 else f"the first {len(looks)} shards looked into hold"
    nameless = f"; {hidden} files have no extension" if hidden else ""
    return (
        f"{where} no pair of picture and caption; extensions seen: {seen(extensions)}{nameless}; expected are "
        f"KEY.{'/'.join(IMAGE_EXTENSIONS[:4])}/… with {_expected(selection)}{_hint(extensions)}"
    )


def seen(extensions: Counter[str]) -> str:
    """Extensions and how many files have each, on one line."""
    named = [f"{name[:40]!r} ({count:,})" for name, count in extensions.most_common(8)]
    rest = len(extensions) - len(named)
    return ", ".join(named + [f"{rest} more"] * (rest > 0)) or "none"


def _expected(selection: Selection) -> str:
    fields = selection.captions.fields
    if "txt" in fields:
        return 'KEY.txt, or KEY.json with a field "caption"'
    return f"KEY.json with {', '.join(fields)}"


def _hint(extensions: Counter[str]) -> str:
    """What the names that were seen suggest to do."""
    known = (*IMAGE_EXTENSIONS, *_TEXTS)
    for one in extensions:
        if "." in one and one.rpartition(".")[2] in known:
            return (
                f": of a name, all behind its first dot is the extension, so {one[:40]!r} is none of these: "
                "leave no other dots in names"
            )
    if other := next((one for one in _OTHER_TEXTS if one in extensions), ""):
        return f": name the .{other} files .txt"
    if not extensions.keys().isdisjoint(IMAGE_EXTENSIONS) and not extensions.keys().isdisjoint(_TEXTS):
        return ": a picture and its caption need the same name up to the dot, and to follow one another"
    return ""


# --------------------------------------------------------------------------------------------------------------
# Which shards there are, and which lack: as training lists them, but where it would refuse this goes on.

_NUMBER = re.compile(r"[0-9]+(?=[^0-9]*$)")  # the last one of a name
_MAX_DIGITS = 18
_FAR_APART = 10  # missing shards for each that is there: beyond, numbers are not meant to be without gaps
_MANY = 32  # requests at a time
_COMPRESSED = (b"\x1f\x8b", b"BZ", b"\xfd7", b"(\xb5", b"<", b"PK")  # the last ones: an HTML page, a zip


@dataclass(frozen=True, kw_only=True)
class ShardList:
    """Shards in order.

    Attributes:
        files: those that are there.
        refused: for what a training would refuse the list.
        missing: numbers that lack, as ranges such as ``00003–00007``.
        missing_count: how many.
    """

    files: list[ShardFile]
    refused: tuple[str, ...]
    missing: tuple[str, ...]
    missing_count: int


def list_shards(sources: Sequence[str], *, split: str) -> ShardList:
    """The shards of all sources.

    Raises:
        DataError: one of them has none, or cannot be listed.
    """
    files: list[ShardFile] = []
    refused = []
    absent: list[str] = []
    for source in sources:
        try:
            files += find_shards(source, split=split)
        except DataError as error:
            there, lacking = _those_there(source, split, str(error))
            if not there:
                raise
            files += there
            absent += lacking
            refused.append(str(error))
    ranges, count = missing_numbers([file.url for file in files], absent)
    return ShardList(files=files, refused=tuple(refused), missing=tuple(ranges), missing_count=count)


def _those_there(source: str, split: str, refusal: str) -> tuple[list[ShardFile], list[str]]:
    """The shards of a source that training refuses, and the names of those that should be there."""
    if "shards are missing" in refusal:  # so its braces stand for no more than are allowed
        names = list(expand_braces(source))
        if is_remote(source):
            with ThreadPoolExecutor(_MANY) as pool:
                found = list(pool.map(_remote, names))
        else:
            found = [_local(name) for name in names]
        there = [one for one in found if one is not None]
        return there, [name for name, one in zip(names, found, strict=True) if one is None]
    if "nshards.txt says" in refusal:
        return _of_folder(source, split), []
    return [], []


def _remote(url: str) -> ShardFile | None:
    from data.remote import store

    try:
        return store.describe([url])[0]
    except DataError:
        return None


def _local(name: str) -> ShardFile | None:
    path = Path(name).expanduser()
    return ShardFile.at(path) if path.is_file() else None


def _of_folder(source: str, split: str) -> list[ShardFile]:
    if is_remote(source):
        from data.remote import store

        base = source.rstrip("/")
        return store.list_folder(f"{base}/{split}") or store.list_folder(base)
    folder = Path(source).expanduser()
    here = folder / split if (folder / split).is_dir() else folder
    return [ShardFile.at(path) for path in sorted(here.glob("*.tar"), key=path_order)]


def missing_numbers(urls: Iterable[str], absent: Iterable[str] = ()) -> tuple[list[str], int]:
    """The numbers that lack in names that differ by a number, as ranges, and how many they are.

    Args:
        urls: of what is there.
        absent: of what is known to lack; it counts too where it lies before the first or behind the last one.
    """
    series: defaultdict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    lacking: defaultdict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for into, names in ((series, urls), (lacking, absent)):
        for url in names:
            folder, _, name = url.partition("?")[0].rpartition("/")
            match = _NUMBER.search(name)
            if match is not None and len(match[0]) <= _MAX_DIGITS:
                where = os.path.abspath(folder) if not is_remote(folder) else folder  # noqa: PTH100
                into[f"{where}/{name[: match.start()]}", name[match.end() :]][int(match[0])] = match[0]
    ranges: list[str] = []
    count = 0
    for key, there in series.items():
        known = {**lacking.get(key, {}), **there}
        gaps = _gaps(sorted(there), sorted(lacking.get(key, {})))
        missing = sum(last - first + 1 for first, last in gaps)
        if missing > _FAR_APART * len(there) and not lacking.get(key):
            continue
        width = len(next(iter(known.values()))) if any(one[0] == "0" for one in known.values()) else 0
        count += missing
        for first, last in gaps:
            begin = f"{first:0{width}d}"
            ranges.append(begin if first == last else f"{begin}–{last:0{width}d}")
    return ranges, count


def _gaps(there: list[int], lacking: list[int]) -> list[tuple[int, int]]:
    """Stretches of numbers between the first and the last one that are not there."""
    begin, end = min([there[0], *lacking[:1]]), max([there[-1], *lacking[-1:]])
    fence = [begin - 1, *there, end + 1]
    return [(low + 1, high - 1) for low, high in pairwise(fence) if high - low > 1]


def check_ends(files: Sequence[ShardFile], *, seconds: float) -> tuple[int, list[int]]:
    """How many local shards were looked at in that time, and which do not begin or end as a tar does.

    A tar that was cut short lacks the zeros at its end: this tells it without a walk through its headers.
    """
    deadline = time.monotonic() + seconds
    checked, suspicious = 0, []
    for number, file in enumerate(files):
        if file.is_remote:
            continue
        if time.monotonic() > deadline:
            break
        checked += 1
        if not _ends_well(file):
            suspicious.append(number)
    return checked, suspicious


def _ends_well(file: ShardFile) -> bool:
    if file.size < 2 * _BLOCK or file.size % _BLOCK:
        return False
    try:
        descriptor = os.open(file.url, os.O_RDONLY)
    except OSError:
        return False
    try:
        begin = os.pread(descriptor, 2, 0)
        return not (begin.startswith(_COMPRESSED) or any(os.pread(descriptor, _BLOCK, file.size - _BLOCK)))
    except OSError:
        return False
    finally:
        os.close(descriptor)

"""One shard looked into: which samples it has, how its members are named, or why it cannot be read."""

import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError
from clipkit.tar import Content, TruncatedError, sample_name, tar_files, tar_files_of
from data.index import (
    CAPTION,
    IMAGE,
    IMAGE_EXTENSIONS,
    LABEL,
    META,
    ShardIndex,
    index_of_members,
    keep_index,
    stored_index,
    with_content,
)
from data.inspect.shard_findings import Place
from data.open_shard import OpenShard
from data.selection import Selection
from data.shard_file import ShardFile

if TYPE_CHECKING:
    from data.remote.shard_cache import ShardCache

__all__ = ["BEGINNING", "Look", "MemberNames", "OpenBeginning", "look_into"]

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

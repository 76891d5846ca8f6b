"""Shards as one random-access list of samples."""

import os
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clipkit.errors import DataError
from data.captions import CaptionRule, Selection
from data.remote.store import ShardFile
from data.shards.index import CAPTION, IMAGE, LABEL, META, stored_index
from data.shards.manifest import Manifest, make_manifest
from data.shards.shard import OpenShard, label_of, meta_of, text_of

if TYPE_CHECKING:
    from data.remote.cache import ShardCache

__all__ = ["Sample", "Shards"]

_MAX_OPEN = 256
_FETCHING = 4  # shards that one process fetches at a time


class Sample(NamedTuple):
    """One sample as it lies in its shard, nothing decoded.

    ``id`` is its number in the list of shards it was read from. A caption, label or json that nobody asked for
    (see ``Shards``) is left out. ``caption`` is the caption file's text or, where there is none, the json's
    "caption"; ``caption_number`` says which of several captions makes this sample, where each is one.
    """

    id: int
    shard: str
    key: str
    image: bytes
    caption: str | None
    label: int | None
    meta: dict[str, Any]
    caption_number: int


class Shards:
    """Random access to the samples of a list of tars that count.

    Reading is safe from several threads; a copy in another process opens files of its own. Nothing is read that
    nobody needs, so what is wrong with it does no harm; but where only the picture is needed, all that a sample
    has is read along.

    Args:
        manifest: the shards and how many samples each gives.
        selection: which samples count, as the manifest was made with.
        cache: where copies of remote shards are kept; None reads their samples over the network.

    Attributes:
        counts: (S,) int64, samples that count by shard.
    """

    def __init__(
        self, manifest: Manifest, selection: Selection, *, cache: "ShardCache | None" = None
    ) -> None:
        assert manifest.selection == selection.identity
        self.manifest, self.selection, self.cache = manifest, selection, cache
        self.counts = manifest.counts
        self._starts: array[int] = array("q", [0, *np.cumsum(self.counts).tolist()])
        self._total = self._starts[-1]
        need = set(selection.need)
        read_all = need <= {"image"}
        self._caption = read_all or "caption" in need
        self._meta = read_all or ("caption" in need and selection.captions.reads_json)
        label = read_all or "label" in need
        self._columns = (IMAGE, *([CAPTION] * self._caption), *([LABEL] * label), *([META] * self._meta))
        self._forget_open()

    @classmethod
    def of(
        cls,
        shards: Sequence[ShardFile],
        *,
        need: Sequence[str] = ("image", "caption"),
        captions: CaptionRule | None = None,
        cache: "ShardCache | None" = None,
    ) -> "Shards":
        """The samples of tars that have everything in ``need``: "image", "caption" and "label".

        Raises:
            DataError: a shard is missing, truncated or not a tar, or none holds a sample with what is needed.
        """
        selection = Selection(need=tuple(need), captions=captions or CaptionRule())
        return cls(make_manifest([shards], selection, cache=cache), selection, cache=cache)

    def __len__(self) -> int:
        return self._total

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_open", "_open_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_open()

    def _forget_open(self) -> None:
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._open_lock = Lock()
        self._open_in = os.getpid()

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change when the set of samples or its order does."""
        return self.manifest.fingerprint

    @property
    def skipped(self) -> int:
        """How many samples do not count."""
        return sum(self.manifest.dropped.values())

    def locate(self, number: int) -> tuple[str, str]:
        """The shard and key of a sample, without reading it; the key is empty where nothing tells it."""
        shard, within = self._position(number)
        file = self.manifest.shard(shard)
        try:
            return file.shown, self._opened(shard).key(within)
        except DataError:  # the shard is gone; its index may still be there
            index = stored_index(file, truncated=self.selection.truncated)
            if index is None or self.selection.reads_json:
                return file.shown, ""
            rows = self.selection.choose(index, lambda row: (None, {})).rows
            return file.shown, index.key(int(rows[within])) if within < len(rows) else ""

    def read(self, number: int) -> Sample:
        """Read sample ``number`` (0 ≤ number < len).

        Raises:
            DataError: the file cannot be read or has shrunk since it was indexed, a member is over the size
                limit, or a label is not a whole number.
        """
        shard, within = self._position(number)
        opened = self._opened(shard)
        row = opened.row(within)
        found = dict(zip(self._columns, opened.read(row, self._columns), strict=True))
        caption, meta = text_of(found.get(CAPTION)), meta_of(found.get(META))
        if self._caption and caption is None:
            if not self._meta:
                meta = meta_of(opened.read(row, (META,))[0])
            if isinstance(meta.get("caption"), str):
                caption = meta["caption"]
        return Sample(
            id=number,
            shard=opened.shown,
            key=opened.index.key(row),
            image=found[IMAGE] or b"",
            caption=caption,
            label=label_of(found.get(LABEL)),
            meta=meta,
            caption_number=opened.caption_number(within),
        )

    def fetch_ahead(self, shards: Sequence[int]) -> None:
        """Have copies of these shards fetched in the background, in this order, and no others any more."""
        if self.cache is not None:
            remote = [file for file in map(self.manifest.shard, shards) if file.is_remote]
            if remote:
                self.cache.prefetch(remote, threads=_FETCHING)

    def _position(self, number: int) -> tuple[int, int]:
        if not 0 <= number < self._total:
            raise IndexError(f"sample {number} of {self._total}")
        shard = bisect_right(self._starts, number) - 1
        return shard, number - self._starts[shard]

    def _opened(self, shard: int) -> OpenShard:
        if self._open_in != os.getpid():  # a forked worker opens its own
            self._forget_open()
        with self._open_lock:
            if (opened := self._open.get(shard)) is not None:
                self._open.move_to_end(shard)
                return opened
        opened = OpenShard(self.manifest.shard(shard), self.selection, self.cache)
        with self._open_lock:
            self._open[shard] = opened
            while len(self._open) > _MAX_OPEN:  # whoever still reads one of these holds it
                self._open.popitem(last=False)
        return opened

"""The shards of an inspection: which are looked into, how many samples all have, which samples are read."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError
from data.augment import random_of
from data.captions import CaptionRule
from data.census import stated_count
from data.index import stored_index
from data.inspect.look import Look, OpenBeginning, look_into
from data.inspect.one_sample import Texts, read_texts
from data.inspect.refusal import no_pair
from data.inspect.shard_list import ShardList, check_ends
from data.open_shard import OpenShard
from data.selection import Selection

if TYPE_CHECKING:
    from data.remote.shard_cache import ShardCache

__all__ = ["Course", "Progress", "Spot"]

_SHARDS = 64  # looked into, if there are more
_REMOTE_SHARDS = 32
_FIRST_SHARDS = 8  # among which a pair must be found
_PATIENCE = 20.0  # seconds for that
_ENDS_SECONDS = 5.0
_COUNT_SECONDS = 5.0
_SUSPICIOUS = 20  # shards that seem broken and are opened beside the others
_MORE_TEXTS = 20_000  # captions that are read beside those of decoded samples, where reading is cheap
_KEYS = 20_000  # whose form is looked at, in all
_OPEN = 4  # shards that stay open
_SEED = 0

Progress = Callable[[str, int, int, int], None]


@dataclass(kw_only=True)
class Spot:
    """A sample that is to be read: which look saw it, and its row there."""

    look: Look
    row: int


class Course:
    """The shards of an inspection and what was seen of them."""

    def __init__(self, listed: ShardList, captions: Sequence[str], cache: "ShardCache | None") -> None:
        self.listed, self.cache = listed, cache
        self.selection = Selection(captions=CaptionRule(fields=tuple(captions)))
        self.until = time.monotonic() + _PATIENCE
        self.files = listed.files
        self.remote = any(file.is_remote for file in self.files)
        self.looks: list[Look] = []
        self.counts: npt.NDArray[np.int64] = np.full(len(self.files), -1, dtype=np.int64)
        self.ends: tuple[int, int] = (0, 0)
        self._open: OrderedDict[int, OpenShard] = OrderedDict()

    def look(self, most: int, progress: Progress | None) -> None:
        """Look into ``most`` shards spread over all, and some that seem broken; DataError if there is no pair."""
        count = len(self.files)
        most = most or (_REMOTE_SHARDS if self.remote else _SHARDS)
        wanted = sorted({number * count // min(most, count) for number in range(min(most, count))})
        order = [wanted[number] for number in _coarse_first(len(wanted))]
        found = 0
        for done, number in enumerate(order, start=1):
            look = self._look(number, keys=max(1, _KEYS // len(order)))
            found += len(look.rows)
            if progress is not None:
                progress("looking into shards", done, sum(bool(one.cause) for one in self.looks), len(order))
            late = time.monotonic() > self.until
            if not found and (done >= min(_FIRST_SHARDS, len(order)) or late):
                raise DataError(no_pair(self.looks, self.selection))
        self.ends = self._check_ends({*wanted})
        self.looks.sort(key=lambda look: look.number)
        self._count_others()

    def _look(self, number: int, *, keys: int) -> Look:
        look = look_into(
            number, self.files[number], self.selection, cache=self.cache, keys=keys, until=self.until
        )
        self.looks.append(look)
        with suppress(DataError):  # a store that does not answer says so elsewhere
            look.stated = stated_count(look.file)
        if look.beginning is None:
            self.counts[number] = len(look.rows)
        elif look.stated is not None:
            self.counts[number] = look.stated
        return look

    def _check_ends(self, looked: set[int]) -> tuple[int, int]:
        checked, suspicious = check_ends(self.files, seconds=_ENDS_SECONDS)
        for number in [one for one in suspicious if one not in looked][:_SUSPICIOUS]:
            self._look(number, keys=1)
        return checked, len(suspicious)

    def _count_others(self) -> None:
        """Take counts from where they are stored, for as long as that is quick."""
        until = time.monotonic() + _COUNT_SECONDS
        unknown = np.flatnonzero(self.counts < 0).tolist()
        for at in _coarse_first(len(unknown)):  # if time runs out they are spread over all
            if time.monotonic() > until:
                return
            file = self.files[unknown[at]]
            if (index := stored_index(file)) is not None:
                rows = self.selection.choose(index, lambda row: (None, {})).rows
                self.counts[unknown[at]] = len(rows)
            elif not file.is_remote and (stated := stated_count(file)) is not None:
                self.counts[unknown[at]] = stated

    def spread(self, samples: int) -> list[Spot]:
        """So many samples, spread evenly over the shards looked into, by a fixed seed; all if there are no more."""
        ends = np.cumsum([len(look.rows) for look in self.looks])
        total = int(ends[-1])
        if samples >= total:
            places = np.arange(total)
        else:
            edges = np.arange(samples + 1) * total // samples  # one of each stretch, so that none comes twice
            places = random_of(_SEED).integers(edges[:-1], edges[1:])
        spots = []
        for place in places.tolist():
            at = int(np.searchsorted(ends, place, side="right"))
            look = self.looks[at]
            spots.append(Spot(look=look, row=int(look.rows[place - int(ends[at])])))
        return spots

    def opened(self, look: Look) -> OpenShard | OpenBeginning:
        """The shard, opened; a few stay open."""
        if look.beginning is not None:
            return OpenBeginning(look.file, look.beginning)
        opened = self._open.get(look.number)
        if opened is None:
            opened = self._open[look.number] = OpenShard(look.file, self.selection, self.cache)
            while len(self._open) > _OPEN:
                self._open.popitem(last=False)
        return opened

    def more_texts(self, read: list[Spot]) -> Iterator[Texts]:
        """Captions and json of other samples too, where that costs no request each."""
        known = {(spot.look.number, spot.row) for spot in read}
        for spot in [] if self.remote else self.spread(_MORE_TEXTS):
            if (spot.look.number, spot.row) in known:
                continue
            shard = self.opened(spot.look)
            yield read_texts(shard, spot.row, self.selection.captions)

    def shard(self, number: int) -> OpenShard | OpenBeginning:
        """One of those looked into, opened."""
        return self.opened(next(look for look in self.looks if look.number == number))


def _coarse_first(count: int) -> list[int]:
    """0 to count - 1, so that each beginning of the list is spread over all: numbers by their reversed bits."""
    bits = max(1, (count - 1).bit_length())
    turned = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return [number for number in turned if number < count]

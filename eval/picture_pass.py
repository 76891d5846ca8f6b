"""One pass over a dataset's pictures: read, digest, decode, encode, keep.

Pictures are split over ranks, read and decoded ahead of the model by a few threads, and encoded in pieces of some
thousand; each piece is kept as soon as it is there, so that whatever interrupts the work, no piece is done twice.
A picture whose features are known is not decoded.

Letters in shape comments: N pictures, B batch, S image side in pixels.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit import CLIP
from clipkit.errors import DataError
from clipkit.image_traits import NO_TRAITS, Traits
from clipkit.preprocess import eval_pixels, pixels_and_traits
from clipkit.representations import image_representations
from clipkit.zero_shot import evaluating
from eval.dataset import EvalDataset
from eval.feature_store import DIGEST_BYTES, FeatureTable, digest_of
from eval.ranks import Ranks

__all__ = ["PicturePass", "check_finite"]

_MAX_THREADS = 8
_BATCHES_AHEAD = 3
_PIECE = 1024  # pictures, about, that an interruption may cost


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loaded:
    """A picture that was read, and decoded if its features were not known."""

    number: int
    digest: bytes
    pixels: Tensor | None  # (3, S, S) uint8
    traits: Traits = NO_TRAITS


class _BrokenPicture(Exception):
    """Carries the number of a picture that does not decode to the end of this rank's work."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class PicturePass:
    """One pass over the pictures of a dataset, by all ranks.

    Args:
        model: the model.
        dataset: the N pictures.
        table: where features are looked for and kept; its columns say which features of a picture
        layers: blocks of the image tower to look behind, for columns ``layer_K``.
        ranks: who shares the work.
        batch_size: pictures that the model takes at a time.
        progress: called with the number of this rank's pictures after each batch.

    Attributes:
        encoded: how many pictures the model was given by this rank.
    """

    def __init__(
        self,
        model: CLIP,
        dataset: EvalDataset,
        table: FeatureTable,
        *,
        layers: Sequence[int],
        ranks: Ranks,
        batch_size: int,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.model, self.dataset, self.table, self.layers, self.ranks = model, dataset, table, layers, ranks
        self.progress = progress
        self.batch_size = min(batch_size, max(1, len(dataset)))
        batches = max(1, _PIECE // (self.batch_size * ranks.world))
        self.piece = batches * self.batch_size * ranks.world
        self.encoded = 0

    def run(self) -> npt.NDArray[np.int64]:
        """Encode what is not known yet; the row of each picture, (N,)."""
        count = len(self.dataset)
        own = range(self.ranks.rank, count, self.ranks.world)
        found: list[int] = []
        loaded = self._loaded(own)
        try:
            with evaluating(self.model), torch.inference_mode():
                for start in range(0, count, self.piece):
                    numbers = range(start, min(start + self.piece, count))
                    found += self._piece(numbers, loaded)
        finally:
            loaded.close()
        return np.array(found, dtype=np.int64)

    def _piece(self, numbers: range, loaded: Iterator[_Loaded]) -> list[int]:
        """Encode and keep some consecutive pictures; their rows."""
        own = numbers[self.ranks.rank :: self.ranks.world]
        failed = torch.zeros(self.ranks.world, dtype=torch.int64)  # by rank: 1 + the number of the picture
        digests: list[bytes] = []
        fresh: dict[bytes, dict[str, Tensor]] = {}
        try:
            digests = self._encode(islice(loaded, len(own)), fresh)
        except _BrokenPicture as error:
            failed[self.ranks.rank] = error.number + 1
        # ranks that succeeded must not wait for features that will never come
        broken = [number - 1 for number in self.ranks.gather(failed).tolist() if number]
        if broken:
            raise self._broken(min(broken))
        if self.ranks.world > 1:
            digests, fresh = self._of_all(numbers, own, digests, fresh)
        if fresh:
            columns = {name: torch.stack([row[name] for row in fresh.values()]) for name in self.table.widths}
            for values in columns.values():
                check_finite(values, f"dataset {self.dataset.name}")
            self.table.append(list(fresh), columns)
        rows = [self.table.find(digest) for digest in digests]
        assert None not in rows
        return [row for row in rows if row is not None]

    def _encode(self, loaded: Iterable[_Loaded], fresh: dict[bytes, dict[str, Tensor]]) -> list[bytes]:
        """The digests of pictures; the features of those that no one has encoded come into ``fresh``."""
        digests: list[bytes] = []
        waiting: dict[bytes, tuple[Tensor, Traits]] = {}
        told = 0
        for one in loaded:
            digests.append(one.digest)
            known = one.digest in fresh or self.table.find(one.digest) is not None
            if not known and one.digest not in waiting:
                assert one.pixels is not None
                waiting[one.digest] = one.pixels, one.traits
            if len(waiting) == self.batch_size:
                self._run_model(waiting, fresh)
                self._told(len(digests) - told)
                told = len(digests)
        self._run_model(waiting, fresh)
        self._told(len(digests) - told)
        return digests

    def _run_model(
        self, waiting: dict[bytes, tuple[Tensor, Traits]], fresh: dict[bytes, dict[str, Tensor]]
    ) -> None:
        if not waiting:
            return
        images, traits = zip(*waiting.values(), strict=True)
        pixels = torch.stack(images).to(self.model.logit_scale.device)  # (B, 3, S, S)
        out = image_representations(self.model, pixels, layers=self.layers)
        columns = {"projected": out.projected, "before_projection": out.before_projection}
        columns["traits"] = torch.tensor(traits)  # (B, 2)
        columns |= {f"layer_{layer}": values for layer, values in out.layers.items()}
        host = {name: columns[name].float().cpu() for name in self.table.widths}
        for place, digest in enumerate(waiting):
            fresh[digest] = {name: values[place] for name, values in host.items()}
        self.encoded += len(waiting)
        waiting.clear()

    def _of_all(
        self,
        numbers: range,
        own: range,
        digests: Sequence[bytes],
        fresh: Mapping[bytes, Mapping[str, Tensor]],
    ) -> tuple[list[bytes], dict[bytes, dict[str, Tensor]]]:
        """What all ranks have found; a host whose store lacks what another's has gets it, too."""
        gather, device = self.ranks.gather, self.model.logit_scale.device
        places = [number - numbers.start for number in own]
        words = torch.zeros(len(numbers), DIGEST_BYTES, dtype=torch.int64)
        words[places] = torch.tensor([list(digest) for digest in digests], dtype=torch.int64).view(
            -1, DIGEST_BYTES
        )
        every = [bytes(row) for row in gather(words).tolist()]
        columns: dict[str, Tensor] = {}
        for name, width in self.table.widths.items():
            values = torch.zeros(len(numbers), width, device=device)
            for place, digest in zip(places, digests, strict=True):
                row = fresh[digest][name] if digest in fresh else self._known(name, digest)
                values[place] = row.to(device)
            columns[name] = gather(values).cpu()
        lacking = {digest: place for place, digest in enumerate(every) if self.table.find(digest) is None}
        return every, {
            digest: {name: values[place] for name, values in columns.items()}
            for digest, place in lacking.items()
        }

    def _known(self, name: str, digest: bytes) -> Tensor:
        row = self.table.find(digest)
        assert row is not None
        return self.table.column(name, np.array([row]))[0]

    def _loaded(self, numbers: Sequence[int]) -> Generator[_Loaded, None, None]:
        """The numbered pictures in order, the next ones read and decoded meanwhile."""
        preprocess = self.model.preprocess

        def load(number: int) -> _Loaded:
            try:
                content = self.dataset.shards.read(number).image
                digest = digest_of(content)
                if self.table.find(digest) is not None:
                    return _Loaded(number=number, digest=digest, pixels=None)
                pixels, traits = pixels_and_traits(content, preprocess)
                return _Loaded(number=number, digest=digest, pixels=pixels, traits=traits)
            except DataError as error:
                raise _BrokenPicture(number) from error

        remaining = iter(numbers)
        pool = ThreadPoolExecutor(_threads(), thread_name_prefix="eval-decode")
        try:
            waiting: deque[Future[_Loaded]] = deque(
                pool.submit(load, number) for number in islice(remaining, self.batch_size * _BATCHES_AHEAD)
            )
            while waiting:
                one = waiting.popleft().result()
                waiting.extend(pool.submit(load, number) for number in islice(remaining, 1))
                yield one
        finally:
            pool.shutdown(cancel_futures=True)

    def _told(self, pictures: int) -> None:
        if self.progress is not None and pictures:
            self.progress(pictures)

    def _broken(self, number: int) -> DataError:
        """What to say about a picture that failed, perhaps on another rank: it is read again for the cause."""
        where = self.dataset.where(number)
        try:
            eval_pixels(self.dataset.shards.read(number).image, self.model.preprocess)
        except DataError as error:
            return DataError(f"{where}: {error}; mend or remove it, a score is never of fewer pictures")
        return DataError(f"{where} could not be read at first, and could at second try: check the disk")


def check_finite(features: Tensor, whose: str) -> None:
    """Refuse features that would be scored as if they were merely bad; gathered ones, so that all ranks agree."""
    if not bool(torch.isfinite(features).all()):
        raise DataError(
            f"the features of {whose} are not finite: the training of this model has diverged, or its weights "
            "are damaged"
        )


def _threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MAX_THREADS, cores)

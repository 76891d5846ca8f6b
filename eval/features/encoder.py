"""One model and what it has encoded: every image and text goes through its towers once, for all tasks.

``ImagePass`` encodes images; store.py keeps the features.

Letters in shape comments: N images or texts, D embedding dimension, W width before the projection.
"""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit import CLIP
from clipkit.errors import DataError
from clipkit.files.atomic import FileLock
from clipkit.files.traits import NO_TRAITS, TraitCounts, Traits
from clipkit.formats.checkpoint import model_hash
from clipkit.model.preprocess import eval_pixels, pixels_and_traits
from clipkit.model.probes import image_representations, layer_count
from clipkit.model.zero_shot import encode_prompts, evaluating
from eval.datasets.dataset import EvalDataset
from eval.features.image_models import ImageModel, no_text_tower
from eval.features.store import DIGEST_BYTES, FeatureTable, digest_of

__all__ = [
    "ONE_RANK",
    "Encoder",
    "Gather",
    "ImageFeatures",
    "ImagePass",
    "Ranks",
    "check_finite",
    "dtype_name",
]


# --------------------------------------------------------------------------------------------------------------
# How processes share the work of an evaluation: process groups themselves are known elsewhere.

Gather = Callable[[Tensor], Tensor]  # the elementwise sum of every rank's tensor, on each rank


def _alone(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """How many processes share the work, which one this is, and how they add up tensors.

    Attributes:
        rank: this process's number, below ``world``.
        world: how many processes there are.
        gather: sums a tensor over ranks; ``clipkit.distributed.sum_over_ranks`` where there are several.
    """

    rank: int = 0
    world: int = 1
    gather: Gather = _alone


ONE_RANK = Ranks()


# --------------------------------------------------------------------------------------------------------------
# One pass over a dataset's images: read, digest, decode, encode, keep.
#
# Images are split over ranks, read and decoded ahead of the model by a few threads, and encoded in pieces of
# some thousand; each piece is kept as soon as it is there, so that whatever interrupts the work, no piece is
# done twice. An image whose features are known is not decoded.
#
# Letters in shape comments: N images, B batch, S image side in pixels.

_MAX_THREADS = 8
_BATCHES_AHEAD = 3
_PIECE = 1024  # images, about, that an interruption may cost


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loaded:
    """An image that was read, and decoded if its features were not known."""

    number: int
    digest: bytes
    pixels: Tensor | None  # (3, S, S) uint8
    traits: Traits = NO_TRAITS


class _BrokenImage(Exception):
    """Carries the number of an image that does not decode to the end of this rank's work."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class ImagePass:
    """One pass over the images of a dataset, by all ranks.

    Args:
        model: the model.
        dataset: the N images.
        table: where features are looked for and kept; its columns say which features of an image
        layers: blocks of the image tower to look behind, for columns ``layer_K``.
        ranks: who shares the work.
        batch_size: images that the model takes at a time.
        progress: called with the number of this rank's images after each batch.

    Attributes:
        encoded: how many images the model was given by this rank.
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
        """Encode what is not known yet; the row of each image, (N,)."""
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
        """Encode and keep some consecutive images; their rows."""
        own = numbers[self.ranks.rank :: self.ranks.world]
        failed = torch.zeros(self.ranks.world, dtype=torch.int64)  # by rank: 1 + the number of the image
        digests: list[bytes] = []
        fresh: dict[bytes, dict[str, Tensor]] = {}
        try:
            digests = self._encode(islice(loaded, len(own)), fresh)
        except _BrokenImage as error:
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
        """The digests of images; the features of those that no one has encoded come into ``fresh``."""
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
        """The numbered images in order, the next ones read and decoded meanwhile."""
        preprocess = self.model.preprocess

        def load(number: int) -> _Loaded:
            try:
                content = self.dataset.images.read(number)
                digest = digest_of(content)
                if self.table.find(digest) is not None:
                    return _Loaded(number=number, digest=digest, pixels=None)
                pixels, traits = pixels_and_traits(content, preprocess)
                return _Loaded(number=number, digest=digest, pixels=pixels, traits=traits)
            except DataError as error:
                raise _BrokenImage(number) from error

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
        """What to say about an image that failed, perhaps on another rank: it is read again for the cause."""
        where = self.dataset.where(number)
        try:
            eval_pixels(self.dataset.images.read(number), self.model.preprocess)
        except DataError as error:
            return DataError(f"{where}: {error}; mend or remove it, a score is never of fewer images")
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


# --------------------------------------------------------------------------------------------------------------

_FORMAT = 3  # of what is kept; another number where the same model and image give other features
_TEXT_PIECE = 8192
_WAIT = 0.5  # seconds between two looks at what another process does
_log = logging.getLogger("eval")


class ImageFeatures:
    """Features of all N images of a split, in the dataset's order; on the CPU, perhaps memory-mapped.

    Args:
        column: returns the tensor of a name below, when it is first asked for.
        digests: returns the digest of each image's bytes.
    """

    def __init__(self, column: Callable[[str], Tensor], digests: Callable[[], list[bytes]] = list) -> None:
        self._column, self.digests = column, digests

    @cached_property
    def projected(self) -> Tensor:
        """(N, D) float32, unit norm."""
        return self._column("projected")

    @cached_property
    def before_projection(self) -> Tensor:
        """(N, W) float32, what the image tower gives before its last linear map, not normalized."""
        return self._column("before_projection")


class Encoder:
    """One model, and what it has encoded so far.

    With several ranks, all of them make the same calls in the same order and all get the whole. The model is used
    in evaluation mode and given back in the mode it had; no random numbers are drawn.

    Args:
        model: as it is. Under autocast its towers run in that type; features are float32 in any case.
        store: the folder where features of all models are kept; None keeps them in memory, for as long as this
            object lives.
        ranks: who shares the work.
        batch_size: images that the model takes at a time.
        progress: called with the number of images after each batch, and of those that are found in the store.

    Attributes:
        encoded: how many images and texts this rank's model has been given, by "images" and "texts".
        counts: how many images are transparent or rotated by EXIF, by dataset and split, of all asked for so far.
    """

    def __init__(
        self,
        model: CLIP,
        *,
        store: Path | None = None,
        ranks: Ranks = ONE_RANK,
        batch_size: int = 256,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.model, self.store, self.ranks, self.batch_size = model, store, ranks, batch_size
        self.progress = progress
        self.encoded = {"images": 0, "texts": 0}
        self.counts: dict[tuple[str, str], TraitCounts] = {}
        self._tables: dict[str, FeatureTable] = {}
        self._classifiers: dict[bytes, Tensor] = {}
        self._said_not_kept = False

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.logit_scale.device

    def images(self, dataset: EvalDataset) -> ImageFeatures:
        """The features of every image of a dataset.

        Raises:
            DataError: an image cannot be read or decoded; it is named, on every rank. Or the features are not
                finite, or cannot be kept.
        """
        widths = {
            "projected": self.model.architecture.embed_dim,
            "before_projection": self._width,
            "traits": 2,
        }
        table = self._table("images", widths)
        rows = self._rows(dataset, table, layers=())
        transparent, rotated = table.column("traits", rows).sum(dim=0).int().tolist()
        self.counts[dataset.name, dataset.split] = TraitCounts(
            images=len(rows), transparent=transparent, rotated=rotated
        )
        return ImageFeatures(lambda name: table.column(name, rows), lambda: table.digests(rows))

    def layers(self, dataset: EvalDataset) -> Mapping[int, Tensor]:
        """By the number of each block of the image tower, from 1: (N, W) float32, the class token behind it.

        All of them are encoded in one pass. An image tower of another library has none.

        Raises:
            DataError: as for ``images``.
        """
        layers = range(1, layer_count(self.model) + 1)
        if not layers:
            return {}
        table = self._table("layers", {f"layer_{layer}": self._width for layer in layers})
        rows = self._rows(dataset, table, layers=layers)
        return {layer: table.column(f"layer_{layer}", rows) for layer in layers}

    def texts(self, texts: Sequence[str], *, whose: str = "the captions") -> Tensor:
        """(N, D) float32, unit norm, on the model's device; each distinct text is encoded once ever.

        Raises:
            DataError: the features are not finite, or cannot be kept.
            ConfigError: the model has no text tower.
        """
        if texts and isinstance(self.model, ImageModel):
            raise no_text_tower(self.model.name)
        table = self._table("texts", {"projected": self.model.architecture.embed_dim})
        digests = {text: digest_of(text.encode("utf-8", "surrogatepass")) for text in texts}
        # by length: a batch is computed to its longest
        missing = sorted(
            (one for one in digests if table.find(digests[one]) is None), key=lambda one: (len(one), one)
        )
        missing = self._wanted_by_all(missing, digests)
        for start in range(0, len(missing), _TEXT_PIECE):
            piece = missing[start : start + _TEXT_PIECE]
            features = torch.zeros(len(piece), self.model.architecture.embed_dim, device=self.device)
            own = slice(self.ranks.rank, len(piece), self.ranks.world)
            with torch.inference_mode():
                features[own] = encode_prompts(self.model, piece[own])
                features = self.ranks.gather(features)
            self.encoded["texts"] += len(piece[own])
            check_finite(features, whose)
            table.append([digests[one] for one in piece], {"projected": features})
        rows = [table.find(digests[text]) for text in texts]
        return table.column("projected", np.array(rows, dtype=np.int64)).to(self.device)

    def classifier(self, prompts: Sequence[Sequence[str]], *, whose: str) -> Tensor:
        """One weight vector a class: its prompts' unit embeddings are averaged, and the mean is made unit norm.

        Args:
            prompts: of C classes, each at least one.
            whose: they are, for a message.

        Returns:
            (D, C) float32, unit columns, on the model's device.

        Raises:
            DataError: the features are not finite, or cannot be kept.
        """
        key = digest_of(json.dumps(prompts).encode())
        if key not in self._classifiers:
            every = self.texts([prompt for own in prompts for prompt in own], whose=whose)
            ends = np.cumsum([len(own) for own in prompts]).tolist()
            means = [every[end - len(own) : end].mean(dim=0) for own, end in zip(prompts, ends, strict=True)]
            self._classifiers[key] = F.normalize(torch.stack(means), dim=-1).T.contiguous()
        return self._classifiers[key]

    def _wanted_by_all(self, missing: list[str], digests: Mapping[str, bytes]) -> list[str]:
        """The texts that any rank lacks; ranks on other hosts may have other stores."""
        if self.ranks.world == 1:
            return missing
        every = sorted(digests, key=lambda one: (len(one), one))
        lacking = set(missing)
        count = self.ranks.gather(torch.tensor([float(one in lacking) for one in every]))
        return [one for one, lacked in zip(every, count.tolist(), strict=True) if lacked]

    @cached_property
    def _width(self) -> int:
        """W, found by an image of zeros."""
        size = self.model.preprocess.image_size
        with evaluating(self.model), torch.inference_mode():
            nothing = torch.zeros(1, 3, size, size, dtype=torch.uint8, device=self.device)
            return image_representations(self.model, nothing).before_projection.shape[1]

    @cached_property
    def _folder(self) -> Path | None:
        if self.store is None:
            return None
        return self.store / f"{model_hash(self.model)}-{dtype_name(self.model)}-{_FORMAT}"

    def _table(self, name: str, widths: Mapping[str, int]) -> FeatureTable:
        if name not in self._tables:
            folder = self._folder and self._folder / name
            self._tables[name] = FeatureTable(folder, widths, not_kept=self._not_kept)
        return self._tables[name]

    def _not_kept(self, error: OSError) -> None:
        if self.ranks.rank == 0 and not self._said_not_kept:
            why = f"cannot write {self.store}: {error.strerror}"
            _log.warning("%s; evaluation continues without keeping features (see --features)", why)
        self._said_not_kept = True

    def _rows(
        self, dataset: EvalDataset, table: FeatureTable, *, layers: Sequence[int]
    ) -> npt.NDArray[np.int64]:
        """The rows of a dataset's images in a table, (N,); those that are missing are encoded first."""
        key = f"{dataset.stamp}-{len(dataset)}"
        rows = table.rows_of(key, len(dataset))
        everywhere = self.ranks.gather(torch.tensor(float(rows is not None)))
        if rows is None or int(everywhere) < self.ranks.world:
            with self._alone_with(dataset, table, key):
                rows = table.rows_of(key, len(dataset)) if self.ranks.world == 1 else None
                if rows is None:  # and no other process has encoded them meanwhile
                    work = ImagePass(
                        self.model,
                        dataset,
                        table,
                        layers=layers,
                        ranks=self.ranks,
                        batch_size=self.batch_size,
                        progress=self.progress,
                    )
                    rows = work.run()
                    self.encoded["images"] += work.encoded
                    table.keep_rows(key, rows)
                    return rows
        if self.progress is not None:
            self.progress(len(dataset))
        return rows

    @contextmanager
    def _alone_with(self, dataset: EvalDataset, table: FeatureTable, key: str) -> Iterator[None]:
        """Wait while another process encodes the same images with the same model, which is faster."""
        if table.folder is None or self.ranks.world > 1:  # ranks wait for each other already
            yield
            return
        lock = FileLock(table.folder / "rows" / f"{key}.lock")
        waits = False
        try:
            while not lock.try_acquire():
                if not waits:
                    _log.warning("dataset %s: another process is encoding it, waiting for that", dataset.name)
                    waits = True
                time.sleep(_WAIT)
        except OSError:  # the folder cannot be written, which the table reports
            yield
            return
        try:
            table.refresh()
            yield
        finally:
            lock.release()


def dtype_name(model: CLIP) -> str:
    """The number format that the towers run in, such as "float32" or "bfloat16"."""
    parameter = next(model.parameters())
    kind = parameter.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else parameter.dtype
    return str(dtype).removeprefix("torch.")

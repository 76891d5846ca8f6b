"""Encode each image and text once for all tasks; store.py stores the features.

Letters in shape comments: N images or texts, B batch, D embedding dimension, W width before the projection, S image
side.
"""

import json
import logging
import os
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit import CLIP
from clipkit.errors import ConfigError, DataError
from clipkit.files import FileLock
from clipkit.formats import model_hash
from clipkit.model import (
    Preprocess,
    encode_prompts,
    eval_pixels,
    evaluating,
    image_representations,
    in_parallel,
    layer_count,
    pixels_and_traits,
)
from clipkit.samples import NO_TRAITS, PixelRangeError, TraitCounts, Traits
from eval.datasets.dataset import EvalDataset
from eval.features.image_models import ImageModel, no_text_tower
from eval.features.store import DIGEST_BYTES, FeatureTable, digest_of

__all__ = ["ONE_RANK", "Encoder", "ImageFeatures", "Ranks", "check_image", "dtype_name"]

_FORMAT = 5  # of stored features; increased when the same model and image give other features
_TEXT_PIECE = 8192
_MAX_THREADS = 8
_BATCHES_AHEAD = 3
_LEAST_SHARE = 16  # images of a core; with fewer, all cores share each matrix product
_PIECE = 1024  # approximate number of images between two writes to the store
_log = logging.getLogger("eval")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes that share an evaluation.

    Attributes:
        rank: this process's number, below ``world``.
        world: number of processes.
        gather: returns the elementwise sum of every rank's tensor, on each rank;
            ``clipkit.distributed.sum_over_ranks`` for several ranks.
    """

    rank: int = 0
    world: int = 1
    gather: Callable[[Tensor], Tensor] = lambda values: values


ONE_RANK = Ranks()


class ImageFeatures:
    """Features of all N images of a split, in the dataset's order, on the CPU and possibly memory-mapped.

    Args:
        column: returns the tensor of a name below on first use.
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
        """(N, W) float32, the image tower's output before its last linear map, not normalized."""
        return self._column("before_projection")


class Encoder:
    """A model and its features.

    With several ranks, all ranks make the same calls in the same order and get the complete results. The model runs
    in evaluation mode and returns to its previous mode; no random numbers are drawn.

    Args:
        model: the model. Under autocast its towers run in that dtype; features are always float32.
        store: the folder for features of all models; None keeps them in memory for the lifetime of the encoder.
        ranks: the processes that share the work.
        batch_size: images per forward pass.
        progress: called with the number of images after each batch, and with the number found in the store.

    Attributes:
        dim: D; smaller than the model's after ``of_prefix``.
        encoded: number of images and texts that this rank has encoded, by "images" and "texts".
        counts: by dataset and split, how many of the encoded images have each trait.
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
        self.dim = model.dim
        self.progress = progress
        self.encoded = {"images": 0, "texts": 0}
        self.counts: dict[tuple[str, str], TraitCounts] = {}
        self._tables: dict[str, FeatureTable] = {}
        self._classifiers: dict[bytes, Tensor] = {}
        self._warned = False

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.logit_scale.device

    def of_prefix(self, dim: int) -> "Encoder":
        """Return an encoder of the same features of which only the first ``dim`` elements are used.

        Raises:
            ConfigError: they have fewer.
        """
        if not 1 <= dim <= self.model.dim:
            raise ConfigError(
                f"dims: {dim} is invalid: expected 1 to {self.model.dim}, the embedding dimension"
            )
        one = copy(self)
        one.dim, one._classifiers = dim, {}
        return one

    def _prefix(self, features: Tensor) -> Tensor:
        return features if self.dim == self.model.dim else F.normalize(features[:, : self.dim], dim=-1)

    def images(self, dataset: EvalDataset) -> ImageFeatures:
        """Return the features of all images of a dataset.

        Raises:
            DataError: an image cannot be read or decoded (it is named, on every rank); or the features are not
                finite, or cannot be stored.
        """
        widths = {
            "projected": self.model.dim,
            "before_projection": self._width,
            "traits": len(NO_TRAITS),
        }
        table = self._table("images", widths)
        rows = self._rows(dataset, table, layers=())
        totals = table.column("traits", rows).sum(dim=0).int().tolist()
        self.counts[dataset.name, dataset.split] = TraitCounts(
            images=len(rows), **dict(zip(Traits._fields, totals, strict=True))
        )

        def column(name: str) -> Tensor:
            values = table.column(name, rows)
            return self._prefix(values) if name == "projected" else values

        return ImageFeatures(column, lambda: table.digests(rows))

    def layers(self, dataset: EvalDataset) -> Mapping[int, Tensor]:
        """Return the class token or the mean patch token after each block of the image tower, numbered from 1.

        They are (N, W) float32, encoded in one pass; see ``clipkit.model.ImageRepresentations``. Towers that are no
        transformers have none.

        Raises:
            DataError: as for ``images``.
        """
        layers = range(1, layer_count(self.model) + 1)
        if not layers:
            return {}
        # not "layers", where earlier versions stored a class token that pooling does not read
        table = self._table("blocks", {f"layer_{layer}": self._width for layer in layers})
        rows = self._rows(dataset, table, layers=layers)
        return {layer: table.column(f"layer_{layer}", rows) for layer in layers}

    def texts(self, texts: Sequence[str], *, description: str = "the captions") -> Tensor:
        """Return (N, D) float32 with unit norm on the model's device; each distinct text is encoded once.

        Args:
            texts: N texts.
            description: description of the texts, for messages.

        Raises:
            DataError: the features are not finite, or cannot be stored.
            ConfigError: the model has no text tower.
        """
        if texts and isinstance(self.model, ImageModel):
            raise no_text_tower(self.model.name)
        table = self._table("texts", {"projected": self.model.dim})
        digests = {text: digest_of(text.encode("utf-8", "surrogatepass")) for text in texts}
        missing = sorted(digests, key=lambda one: (len(one), one))  # batches are padded to their longest text
        lacking = torch.tensor([float(table.find(digests[one]) is None) for one in missing])
        if self.ranks.world > 1:  # ranks on other hosts may have other stores
            lacking = self.ranks.gather(lacking)
        missing = [one for one, lacked in zip(missing, lacking.tolist(), strict=True) if lacked]
        for start in range(0, len(missing), _TEXT_PIECE):
            piece = missing[start : start + _TEXT_PIECE]
            features = torch.zeros(len(piece), self.model.dim, device=self.device)
            own = slice(self.ranks.rank, len(piece), self.ranks.world)
            with torch.inference_mode():
                features[own] = encode_prompts(self.model, piece[own])
                features = self.ranks.gather(features)
            self.encoded["texts"] += len(piece[own])
            _check_finite(features, description)
            table.append([digests[one] for one in piece], {"projected": features})
        rows = [table.find(digests[text]) for text in texts]
        return self._prefix(table.column("projected", np.array(rows, dtype=np.int64)).to(self.device))

    def classifier(self, prompts: Sequence[Sequence[str]], *, description: str) -> Tensor:
        """Return a weight vector per class: the normalized mean of its prompts' embeddings.

        Args:
            prompts: by class, at least one prompt.
            description: description of the prompts, for messages.

        Returns:
            (D, C) float32 for C classes, unit columns, on the model's device.

        Raises:
            DataError: the features are not finite, or cannot be stored.
        """
        key = digest_of(json.dumps(prompts).encode())
        if key not in self._classifiers:
            every = self.texts([prompt for own in prompts for prompt in own], description=description)
            means = [own.mean(dim=0) for own in every.split([len(own) for own in prompts])]
            self._classifiers[key] = F.normalize(torch.stack(means), dim=-1).T.contiguous()
        return self._classifiers[key]

    @cached_property
    def _width(self) -> int:
        """W."""
        size = self.model.preprocess.image_size
        with evaluating(self.model), torch.inference_mode():
            channels = self.model.preprocess.channels
            zeros = torch.zeros(1, channels, size, size, dtype=torch.uint8, device=self.device)
            return image_representations(self.model, zeros).before_projection.shape[1]

    @cached_property
    def _folder(self) -> Path | None:
        if self.store is None:
            return None
        return self.store / f"{model_hash(self.model)}-{dtype_name(self.model)}-{_FORMAT}"

    def _table(self, name: str, widths: Mapping[str, int]) -> FeatureTable:
        if name not in self._tables:
            folder = self._folder and self._folder / name
            self._tables[name] = FeatureTable(folder, widths, on_unwritable=self._warn_not_stored)
        return self._tables[name]

    def _warn_not_stored(self, error: OSError) -> None:
        if self.ranks.rank == 0 and not self._warned:
            why = f"cannot write {self.store}: {error.strerror}"
            _log.warning("%s; evaluation continues without storing features (see --features)", why)
        self._warned = True

    def _rows(
        self, dataset: EvalDataset, table: FeatureTable, *, layers: Sequence[int]
    ) -> npt.NDArray[np.int64]:
        """Return the rows of a dataset's images in a table, (N,), after encoding what is missing."""
        key = f"{dataset.stamp}-{len(dataset)}"
        rows = table.rows_of(key, len(dataset))
        everywhere = self.ranks.gather(torch.tensor(float(rows is not None)))
        if rows is None or int(everywhere) < self.ranks.world:
            with self._locked(dataset, table, key):
                rows = table.rows_of(key, len(dataset)) if self.ranks.world == 1 else None
                if rows is None:  # and no other process has encoded the images meanwhile
                    rows = _ImagePass(self, dataset, table, layers).run()
                    table.keep_rows(key, rows)
                    return rows
        if self.progress is not None:
            self.progress(len(dataset))
        return rows

    @contextmanager
    def _locked(self, dataset: EvalDataset, table: FeatureTable, key: str) -> Iterator[None]:
        """Wait while another process encodes the same images with the same model."""
        if table.folder is None or self.ranks.world > 1:  # ranks wait for each other already
            yield
            return
        lock = FileLock(table.folder / "rows" / f"{key}.lock")
        waiting = f"dataset {dataset.name}: waiting for another process that is encoding it"
        try:
            lock.acquire(lambda: _log.warning("%s", waiting))
        except OSError:  # the folder cannot be written; the table reports it
            yield
            return
        try:
            table.refresh()
            yield
        finally:
            lock.release()


# --------------------------------------------------------------------------------------------------------------
# One pass over a dataset's images.
#
# Images are split over ranks, read and decoded ahead of the model by a few threads, and encoded in pieces, each of
# which is stored at once, so that an interruption costs little. An image with known features is not decoded.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loaded:
    """An image, decoded if its features are not known."""

    digest: bytes
    pixels: Tensor | None  # (3, S, S) uint8
    traits: Traits = NO_TRAITS


class _BrokenImage(Exception):
    """Raised with the number of an image that does not decode."""


_Rows = dict[bytes, dict[str, Tensor]]  # by digest, the image's row of each column


class _ImagePass:
    """One pass of all ranks over the images of a dataset."""

    def __init__(
        self, encoder: Encoder, dataset: EvalDataset, table: FeatureTable, layers: Sequence[int]
    ) -> None:
        self.encoder, self.model, self.ranks = encoder, encoder.model, encoder.ranks
        self.dataset, self.table, self.layers = dataset, table, layers
        self.batch_size = min(encoder.batch_size, max(1, len(dataset)))

    def run(self) -> npt.NDArray[np.int64]:
        """Encode the images without known features and return the row of each image, (N,)."""
        count, world = len(self.dataset), self.ranks.world
        piece = max(1, _PIECE // (self.batch_size * world)) * self.batch_size * world
        found: list[int] = []
        loaded = self._loaded(range(self.ranks.rank, count, world))
        try:
            with evaluating(self.model), torch.inference_mode():
                for start in range(0, count, piece):
                    found += self._piece(range(start, min(start + piece, count)), loaded)
        finally:
            loaded.close()
        return np.array(found, dtype=np.int64)

    def _piece(self, numbers: range, loaded: Iterator[_Loaded]) -> list[int]:
        """Encode and store consecutive images; return their rows."""
        own = numbers[self.ranks.rank :: self.ranks.world]
        failed = torch.zeros(self.ranks.world, dtype=torch.int64)  # by rank: 1 + the number of the image
        digests: list[bytes] = []
        fresh: _Rows = {}
        try:
            digests = self._encode(islice(loaded, len(own)), fresh)
        except _BrokenImage as error:
            failed[self.ranks.rank] = error.args[0] + 1
        # ranks that succeeded must not wait for features that will never come
        broken = [number - 1 for number in self.ranks.gather(failed).tolist() if number]
        if broken:  # perhaps on another rank: read the image again for the cause
            check_image(self.dataset, min(broken), self.model.preprocess)
            where = self.dataset.where(min(broken))
            raise DataError(f"{where} could be read only at the second attempt: check the disk")
        if self.ranks.world > 1:
            digests, fresh = self._of_all(numbers, own, digests, fresh)
        if fresh:
            columns = {name: torch.stack([row[name] for row in fresh.values()]) for name in self.table.widths}
            for values in columns.values():
                _check_finite(values, f"dataset {self.dataset.name}")
            self.table.append(list(fresh), columns)
        rows = [self.table.find(digest) for digest in digests]
        assert None not in rows
        return [row for row in rows if row is not None]

    def _encode(self, loaded: Iterator[_Loaded], fresh: _Rows) -> list[bytes]:
        """Return the digests of images; add the features of those without known features to ``fresh``."""
        digests: list[bytes] = []
        waiting: dict[bytes, _Loaded] = {}
        reported = 0
        for one in loaded:
            digests.append(one.digest)
            if one.digest not in fresh and self.table.find(one.digest) is None:
                waiting.setdefault(one.digest, one)
            if len(waiting) == self.batch_size:
                self._run_model(waiting, fresh, len(digests) - reported)
                reported = len(digests)
        self._run_model(waiting, fresh, len(digests) - reported)
        return digests

    def _run_model(self, waiting: dict[bytes, _Loaded], fresh: _Rows, images: int) -> None:
        """Encode the waiting images and report ``images`` as progress."""
        if waiting:
            decoded = [one.pixels for one in waiting.values() if one.pixels is not None]
            pixels = torch.stack(decoded).to(self.encoder.device)  # (B, 3, S, S)
            represent = partial(image_representations, self.model, layers=self.layers)
            pieces = in_parallel(self.model, represent, pixels.split(images_per_pass(pixels)))
            columns: defaultdict[str, list[Tensor]] = defaultdict(list)
            columns["traits"] = [torch.tensor([one.traits for one in waiting.values()])]  # (B, traits)
            for out in pieces:
                columns["projected"].append(out.projected)
                columns["before_projection"].append(out.before_projection)
                for layer, values in out.layers.items():
                    columns[f"layer_{layer}"].append(values)
            host = {name: torch.cat(columns[name]).float().cpu() for name in self.table.widths}
            for place, digest in enumerate(waiting):
                fresh[digest] = {name: values[place] for name, values in host.items()}
            self.encoder.encoded["images"] += len(waiting)
            waiting.clear()
        if self.encoder.progress is not None and images:
            self.encoder.progress(images)

    def _of_all(
        self, numbers: range, own: range, digests: Sequence[bytes], fresh: _Rows
    ) -> tuple[list[bytes], _Rows]:
        """Return the digests of all ranks, and the rows that this host's store lacks."""
        gather, device, table = self.ranks.gather, self.encoder.device, self.table
        places = [number - numbers.start for number in own]
        words = torch.zeros(len(numbers), DIGEST_BYTES, dtype=torch.int64)
        words[places] = torch.tensor([list(digest) for digest in digests], dtype=torch.int64).view(
            -1, DIGEST_BYTES
        )
        every = [bytes(row) for row in gather(words).tolist()]
        columns: dict[str, Tensor] = {}
        for name, width in table.widths.items():
            values = torch.zeros(len(numbers), width, device=device)
            for place, digest in zip(places, digests, strict=True):
                if digest in fresh:
                    row = fresh[digest][name]
                else:
                    row = table.column(name, np.array([table.find(digest)], dtype=np.int64))[0]
                values[place] = row.to(device)
            columns[name] = gather(values).cpu()
        lacking = {digest: place for place, digest in enumerate(every) if table.find(digest) is None}
        return every, {
            digest: {name: values[place] for name, values in columns.items()}
            for digest, place in lacking.items()
        }

    def _loaded(self, numbers: Sequence[int]) -> Generator[_Loaded, None, None]:
        """Yield the numbered images in order while threads read and decode the next ones."""

        def load(number: int) -> _Loaded:
            try:
                content = self.dataset.images.read(number)
                digest = digest_of(content)
                if self.table.find(digest) is not None:
                    return _Loaded(digest=digest, pixels=None)
                pixels, traits = pixels_and_traits(content, self.model.preprocess)
                return _Loaded(digest=digest, pixels=pixels, traits=traits)
            except DataError as error:
                raise _BrokenImage(number) from error

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        remaining = iter(numbers)
        pool = ThreadPoolExecutor(min(_MAX_THREADS, cores), thread_name_prefix="eval-decode")
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


def images_per_pass(pixels: Tensor) -> int:
    """Return how many of a batch of images are encoded together: all, or on a CPU those of one core."""
    if pixels.device.type != "cpu":
        return len(pixels)
    share = -(-len(pixels) // torch.get_num_threads())
    return max(share, _LEAST_SHARE)


def check_image(dataset: EvalDataset, number: int, preprocess: Preprocess) -> None:
    """Raise DataError if an image of a dataset cannot be read, decoded or mapped to 8 bits."""
    try:
        eval_pixels(dataset.images.read(number), preprocess)
    except PixelRangeError as error:
        raise DataError(f"{dataset.where(number)}: {error}") from error
    except DataError as error:
        raise DataError(
            f"{dataset.where(number)}: {error}; fix or remove it (images are never skipped)"
        ) from error


def _check_finite(features: Tensor, description: str) -> None:
    """Raise DataError for features that are not finite; they are gathered, so that all ranks agree."""
    if not bool(torch.isfinite(features).all()):
        raise DataError(
            f"the features of {description} are not finite: the training of this model has diverged, or its "
            "weights are damaged"
        )


def dtype_name(model: CLIP) -> str:
    """Return the dtype in which the towers run, such as "float32" or "bfloat16"."""
    parameter = next(model.parameters())
    kind = parameter.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else parameter.dtype
    return str(dtype).removeprefix("torch.")

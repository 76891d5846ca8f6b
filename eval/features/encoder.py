"""Encode each image and text once for all tasks; store.py stores the features.

Letters in shape comments: N images or texts, B batch, D embedding dimension, W width before the projection, S image
side.
"""

import json
import logging
import os
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

import numpy as np
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
    evaluation_mode,
    image_representations,
    layer_count,
    pixels_and_traits,
    run_parallel,
)
from clipkit.samples import NO_TRAITS, PixelRangeError, TraitCounts, Traits
from eval.datasets.dataset import EvalDataset
from eval.features.adapters import ImageModel, text_tower_error
from eval.features.store import DIGEST_BYTES, FeatureFile, TextFeatures, digest_content

_FORMAT = 6  # of stored features; increased when the same model and image give other features
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


@dataclass(frozen=True, kw_only=True)
class PooledFeatures:
    """Pooled features of locked backbones, in memory: they stay the same while a training changes projections.

    Attributes:
        images: by dataset and revision.
        texts: (W,) by text.
    """

    images: dict[str, FeatureFile] = field(default_factory=dict)
    texts: dict[str, Tensor] = field(default_factory=dict)


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
        pooled: pooled features of images and texts that have been encoded with the same locked backbones.
        locked: the towers with these backbones, "image" and "text".

    Attributes:
        dim: D; smaller than the model's after ``select_prefix``.
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
        pooled: PooledFeatures | None = None,
        locked: Collection[str] = (),
    ) -> None:
        self.model, self.store, self.ranks, self.batch_size = model, store, ranks, batch_size
        self.dim = model.dim
        self.progress = progress
        self._pooled = pooled or PooledFeatures()
        self._locked_towers = locked
        self.encoded = {"images": 0, "texts": 0}
        self.counts: dict[tuple[str, str], TraitCounts] = {}
        self._memory: dict[str, FeatureFile] = {}  # of images, if they are not stored
        self._classifiers: dict[bytes, Tensor] = {}
        self._warned = False

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.logit_scale.device

    def select_prefix(self, dim: int) -> "Encoder":
        """Return an encoder of the same features of which only the first ``dim`` elements are used."""
        if not 1 <= dim <= self.model.dim:
            raise ConfigError(
                f"dims: {dim} is invalid: expected 1 to {self.model.dim}, the embedding dimension"
            )
        encoder = copy(self)
        encoder.dim = dim
        encoder._classifiers = {}
        encoder._text_features = self._text_features
        return encoder

    def _prefix(self, features: Tensor) -> Tensor:
        return features if self.dim == self.model.dim else F.normalize(features[:, : self.dim], dim=-1)

    def images(self, dataset: EvalDataset) -> ImageFeatures:
        """Return the features of all images of a dataset."""
        widths = {
            "projected": self.model.dim,
            "before_projection": self._width,
            "traits": len(NO_TRAITS),
        }
        file = self._pooled.images.get(dataset.stamp)
        projected = None
        if file is None:
            file = self._encode_images(dataset, "images", widths)
        else:
            with torch.inference_mode(), evaluation_mode(self.model):
                rows = file.columns["before_projection"].split(self.batch_size)
                encode = self.model.encode_image
                projected = torch.cat([encode(pooled.to(self.device)).cpu() for pooled in rows])
        if "image" in self._locked_towers:
            self._pooled.images[dataset.stamp] = file
        totals = file.columns["traits"].sum(dim=0).int().tolist()
        self.counts[dataset.name, dataset.split] = TraitCounts(
            images=len(file), **dict(zip(Traits._fields, totals, strict=True))
        )

        def column(name: str) -> Tensor:
            if name != "projected":
                return file.columns[name]
            return self._prefix(file.columns[name] if projected is None else projected)

        return ImageFeatures(column, lambda: [digest.tobytes() for digest in file.digests])

    def layers(self, dataset: EvalDataset) -> Mapping[int, Tensor]:
        """Return the class token or the mean patch token after each block of the image tower, numbered from 1.

        They are (N, W) float32, encoded in one pass; see ``clipkit.model.ImageRepresentations``. Towers that are no
        transformers have none.
        """
        layers = range(1, layer_count(self.model) + 1)
        if not layers:
            return {}
        widths = {f"layer_{layer}": self._width for layer in layers}
        file = self._encode_images(dataset, "blocks", widths, layers=layers)
        return {layer: file.columns[f"layer_{layer}"] for layer in layers}

    def texts(self, texts: Sequence[str], *, description: str = "the captions") -> Tensor:
        """Return (N, D) float32 with unit norm on the model's device; each distinct text is encoded once."""
        if texts and isinstance(self.model, ImageModel):
            raise text_tower_error(self.model.name)
        # batches are padded to their longest text
        unique = sorted(set(texts), key=lambda text: (len(text), text))
        digests = [digest_content(text.encode("utf-8", "surrogatepass")) for text in unique]
        features, stored = self._text_features.read(digests)
        lacking = torch.from_numpy(~stored).float()
        if self.ranks.world > 1:  # ranks on other hosts may have other stores
            lacking = self.ranks.gather(lacking)
        missing = lacking.nonzero().flatten().tolist()
        for start in range(0, len(missing), _TEXT_PIECE):
            piece = missing[start : start + _TEXT_PIECE]
            encoded = torch.zeros(len(piece), self.model.dim, device=self.device)
            local = slice(self.ranks.rank, len(piece), self.ranks.world)
            with torch.inference_mode():
                encoded[local] = self._encode_texts([unique[i] for i in piece[local]])
                encoded = self.ranks.gather(encoded)
            self.encoded["texts"] += len(piece[local])
            _check_finite(encoded, description)
            features[piece] = encoded.cpu()
            new = [i for i in piece if not stored[i]]
            self._text_features.append([digests[i] for i in new], features[new])
        position = {text: i for i, text in enumerate(unique)}
        return self._prefix(features[[position[text] for text in texts]].to(self.device))

    def _encode_texts(self, texts: Sequence[str]) -> Tensor:
        if "text" not in self._locked_towers or not texts:
            return encode_prompts(self.model, texts)
        pooled = self._pooled.texts
        missing = [text for text in texts if text not in pooled]
        pooled.update(zip(missing, encode_prompts(self.model, missing, pooled=True), strict=True))
        with evaluation_mode(self.model):
            return self.model.encode_text(torch.stack([pooled[text] for text in texts]))

    def classifier(self, prompts: Sequence[Sequence[str]], *, description: str) -> Tensor:
        """Return a weight vector per class: the normalized mean of its prompts' embeddings.

        Returns:
            (D, C) float32 for C classes, unit columns, on the model's device.
        """
        key = digest_content(json.dumps(prompts).encode())
        if key not in self._classifiers:
            features = self.texts([text for texts in prompts for text in texts], description=description)
            by_class = features.split([len(texts) for texts in prompts])
            means = [class_features.mean(dim=0) for class_features in by_class]
            self._classifiers[key] = F.normalize(torch.stack(means), dim=-1).T.contiguous()
        return self._classifiers[key]

    @cached_property
    def _width(self) -> int:
        """W."""
        with evaluation_mode(self.model), torch.inference_mode():
            shape = self.model.preprocess.input_shape
            zeros = torch.zeros(1, *shape, dtype=torch.uint8, device=self.device)
            return image_representations(self.model, zeros).before_projection.shape[1]

    @cached_property
    def _folder(self) -> Path | None:
        if self.store is None:
            return None
        return self.store / f"{model_hash(self.model)}-{dtype_name(self.model)}-{_FORMAT}"

    @cached_property
    def _text_features(self) -> TextFeatures:
        folder = self._folder and self._folder / "texts"
        key = self._folder.name if self._folder is not None else ""
        return TextFeatures(folder, self.model.dim, key=key, on_unwritable=self._warn_not_stored)

    def _warn_not_stored(self, error: OSError) -> None:
        if self.ranks.rank == 0 and not self._warned:
            why = f"cannot write {self.store}: {error.strerror}"
            _log.warning("%s; evaluation continues without storing features (see --features)", why)
        self._warned = True

    def _encode_images(
        self, dataset: EvalDataset, kind: str, widths: Mapping[str, int], *, layers: Sequence[int] = ()
    ) -> FeatureFile:
        name = f"{dataset.stamp}-{len(dataset)}"
        path = None
        key = f"{kind}/{name}"
        if self._folder is not None:
            path = self._folder / kind / f"{name}.safetensors"
            key = f"{self._folder.name}/{key}"

        def open_complete() -> FeatureFile | None:
            if path is None or key in self._memory:
                return self._memory.get(key)
            with suppress(OSError):
                file = FeatureFile(path, widths, len(dataset), key=key)
                return file if file.intact().all() else None
            return None

        file = open_complete()
        if int(self.ranks.gather(torch.tensor(float(file is not None)))) == self.ranks.world:
            assert file is not None
            if self.progress is not None:
                self.progress(len(dataset))
            return file
        with self._locked(dataset, path) as locked:
            if self.ranks.world == 1:
                file = open_complete()  # another process may have encoded the images meanwhile
            if file is None or self.ranks.world > 1:
                file = file or self._create_file(path if locked else None, widths, len(dataset), key)
                _ImagePass(self, dataset, file, layers).run()
        self.ranks.gather(torch.tensor(0.0))  # a rank of this host has written the file for all
        complete = open_complete()
        if complete is not None:
            return complete
        if not file.intact().all():
            raise DataError(f"features in {self.store} were changed while in use: run the command again")
        self._memory[key] = file
        return file

    def _create_file(self, path: Path | None, widths: Mapping[str, int], count: int, key: str) -> FeatureFile:
        if path is not None:
            try:
                return FeatureFile(path, widths, count, key=key, create=True)
            except OSError as error:
                self._warn_not_stored(error)
        return FeatureFile(None, widths, count, key=key)

    @contextmanager
    def _locked(self, dataset: EvalDataset, path: Path | None) -> Iterator[bool]:
        """Let one process encode images with a model, while others wait; yield whether this one may write.

        Ranks wait for each other already: the first one on a host writes.
        """
        if path is None:
            yield False
            return
        waiting = f"dataset {dataset.name}: waiting for another process that is encoding it"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path.with_suffix(".lock"), optional=True)
            if self.ranks.world > 1:
                locked = lock.try_acquire()
            else:
                locked = lock.acquire(lambda: _log.warning("%s", waiting))
        except OSError as error:
            self._warn_not_stored(error)
            yield False
            return
        try:
            yield locked
        finally:
            if locked:
                lock.release()


# --------------------------------------------------------------------------------------------------------------
# One pass over a dataset's images.
#
# Images are split over ranks, read and decoded ahead of the model by a few threads, and encoded in pieces, each of
# which is written at once, so that an interruption costs little. Of equal images only the first is decoded.


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
    """One pass of all ranks over the images of a dataset whose features some rank lacks."""

    def __init__(
        self, encoder: Encoder, dataset: EvalDataset, file: FeatureFile, layers: Sequence[int]
    ) -> None:
        self.encoder, self.model, self.ranks = encoder, encoder.model, encoder.ranks
        self.dataset, self.file, self.layers = dataset, file, layers
        self.batch_size = min(encoder.batch_size, max(1, len(dataset)))
        self.stored = file.intact()  # (N,)
        # a row with the same image, by digest
        self.rows = {file.digests[row].tobytes(): row for row in self.stored.nonzero()[0].tolist()}

    def run(self) -> None:
        """Encode the images and write their features."""
        world = self.ranks.world
        piece = max(1, _PIECE // (self.batch_size * world)) * self.batch_size * world
        missing = self.ranks.gather(torch.from_numpy(~self.stored).float()).nonzero().flatten().tolist()
        if self.encoder.progress is not None and len(missing) < len(self.dataset):
            self.encoder.progress((len(self.dataset) - len(missing)) // world)
        loaded = self._loaded(missing[self.ranks.rank :: world])
        try:
            with evaluation_mode(self.model), torch.inference_mode():
                for start in range(0, len(missing), piece):
                    self._encode_piece(missing[start : start + piece], loaded)
        finally:
            loaded.close()

    def _encode_piece(self, indices: Sequence[int], loaded: Iterator[_Loaded]) -> None:
        local = indices[self.ranks.rank :: self.ranks.world]
        failed = torch.zeros(self.ranks.world, dtype=torch.int64)  # by rank: 1 + the number of the image
        digests: list[bytes] = []
        fresh: _Rows = {}
        try:
            digests = self._encode(islice(loaded, len(local)), fresh)
        except _BrokenImage as error:
            failed[self.ranks.rank] = error.args[0] + 1
        # ranks that succeeded must not wait for features that will never come
        broken = [index - 1 for index in self.ranks.gather(failed).tolist() if index]
        if broken:  # perhaps on another rank: read the image again for the cause
            check_image(self.dataset, min(broken), self.model.preprocess)
            where = self.dataset.describe_image(min(broken))
            raise DataError(f"{where} could be read only at the second attempt: check the disk")
        digests, columns = self._gather(len(indices), digests, fresh)
        for values in columns.values():
            _check_finite(values, f"dataset {self.dataset.name}")
        new = [i for i, index in enumerate(indices) if not self.stored[index]]
        self.file.write(
            np.array([indices[i] for i in new], dtype=np.int64),
            [digests[i] for i in new],
            {name: values[new] for name, values in columns.items()},
        )
        for digest, index in zip(digests, indices, strict=True):
            self.rows.setdefault(digest, index)

    def _encode(self, loaded: Iterator[_Loaded], fresh: _Rows) -> list[bytes]:
        """Return the digests of images; add the features of those without known features to ``fresh``."""
        digests: list[bytes] = []
        waiting: dict[bytes, _Loaded] = {}
        reported = 0
        for image in loaded:
            digests.append(image.digest)
            if image.digest not in fresh and image.digest not in self.rows:
                waiting.setdefault(image.digest, image)
            if len(waiting) == self.batch_size:
                self._run_model(waiting, fresh, len(digests) - reported)
                reported = len(digests)
        self._run_model(waiting, fresh, len(digests) - reported)
        return digests

    def _run_model(self, waiting: dict[bytes, _Loaded], fresh: _Rows, images: int) -> None:
        """Encode the waiting images and report ``images`` as progress."""
        if waiting:
            decoded = [image.pixels for image in waiting.values() if image.pixels is not None]
            pixels = torch.stack(decoded).to(self.encoder.device)  # (B, 3, S, S)
            represent = partial(image_representations, self.model, layers=self.layers)
            pieces = run_parallel(self.model, represent, pixels.split(images_per_pass(pixels)))
            columns: defaultdict[str, list[Tensor]] = defaultdict(list)
            columns["traits"] = [torch.tensor([image.traits for image in waiting.values()])]  # (B, traits)
            for out in pieces:
                columns["projected"].append(out.projected)
                columns["before_projection"].append(out.before_projection)
                for layer, values in out.layers.items():
                    columns[f"layer_{layer}"].append(values)
            host = {name: torch.cat(columns[name]).float().cpu() for name in self.file.columns}
            for i, digest in enumerate(waiting):
                fresh[digest] = {name: values[i] for name, values in host.items()}
            self.encoder.encoded["images"] += len(waiting)
            waiting.clear()
        if self.encoder.progress is not None and images:
            self.encoder.progress(images)

    def _gather(
        self, count: int, digests: Sequence[bytes], fresh: _Rows
    ) -> tuple[list[bytes], dict[str, Tensor]]:
        """Return the digests and features of all ranks' images; equal images have equal features."""
        local = range(self.ranks.rank, count, self.ranks.world)
        words = torch.zeros(count, DIGEST_BYTES, dtype=torch.int64)
        columns = {
            name: torch.zeros(count, values.shape[1]) for name, values in self.file.columns.items()
        }  # (P, W) for P images
        for i, digest in zip(local, digests, strict=True):
            words[i] = torch.tensor(list(digest))
            for name, values in columns.items():
                if digest in fresh:
                    values[i] = fresh[digest][name]
                else:
                    values[i] = self.file.columns[name][self.rows[digest]]
        if self.ranks.world > 1:
            words = self.ranks.gather(words)
            columns = {
                name: self.ranks.gather(values.to(self.encoder.device)).cpu()
                for name, values in columns.items()
            }
        every = [bytes(word) for word in words.tolist()]
        first: dict[bytes, int] = {}
        sources = [first.setdefault(digest, i) for i, digest in enumerate(every)]
        return every, {name: values[sources] for name, values in columns.items()}

    def _loaded(self, indices: Sequence[int]) -> Generator[_Loaded, None, None]:
        """Yield the numbered images in order while threads read and decode the next ones."""

        def load(index: int) -> _Loaded:
            try:
                content = self.dataset.images.read(index)
                digest = digest_content(content)
                if digest in self.rows:
                    return _Loaded(digest=digest, pixels=None)
                pixels, traits = pixels_and_traits(content, self.model.preprocess)
                return _Loaded(digest=digest, pixels=pixels, traits=traits)
            except DataError as error:
                raise _BrokenImage(index) from error

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        remaining = iter(indices)
        pool = ThreadPoolExecutor(min(_MAX_THREADS, cores), thread_name_prefix="eval-decode")
        try:
            waiting: deque[Future[_Loaded]] = deque(
                pool.submit(load, index) for index in islice(remaining, self.batch_size * _BATCHES_AHEAD)
            )
            while waiting:
                image = waiting.popleft().result()
                waiting.extend(pool.submit(load, index) for index in islice(remaining, 1))
                yield image
        finally:
            pool.shutdown(cancel_futures=True)


def images_per_pass(pixels: Tensor) -> int:
    """Return how many of a batch of images are encoded together: all, or on a CPU those of one core."""
    if pixels.device.type != "cpu":
        return len(pixels)
    share = -(-len(pixels) // torch.get_num_threads())
    return max(share, _LEAST_SHARE)


def check_image(dataset: EvalDataset, index: int, preprocess: Preprocess) -> None:
    """Raise DataError if an image of a dataset cannot be read, decoded or mapped to 8 bits."""
    try:
        eval_pixels(dataset.images.read(index), preprocess)
    except PixelRangeError as error:
        raise DataError(f"{dataset.describe_image(index)}: {error}") from error
    except DataError as error:
        raise DataError(
            f"{dataset.describe_image(index)}: {error}; fix or remove it (images are never skipped)"
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

"""Features of locked backbones, stored before training (``lock.store``).

The backbone of a locked tower computes the same features of an image or a text in each epoch, so they are computed
once. A store is a folder of parts, each with the features of consecutive samples of the training data: of images by
the number of the sample and the view, of texts by their hash. Parts are written atomically, so that an interrupted
store is continued. View v of an image has the crop that the image has in epoch v.

Letters: B samples, N texts, I images of a part, T texts of a part, V views, W width of pooled features.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from clipkit.errors import DataError
from clipkit.files import CountProgress, counted
from clipkit.model import MAX_CHARACTERS
from clipkit.samples import NO_TRAITS, Decoding, PixelRangeError, Traits, read_arrays, write_arrays
from clipkit.samples.remote import cache_folder
from data.augment import CROP, Augmentation, empty_batch, random_of, training_pixels
from data.captions import hash_text, texts_at
from data.shards.samples import Shards
from data.workers import Workers, ignore_signals

_SAMPLES = 256  # of a part, more for large data
_MOST_PARTS = 4096
_FORMAT = 1  # of the files

Floats = npt.NDArray[np.float32]
# of images (N, C, S, S) uint8 or of texts: their pooled features (N, W) float32 on the host
EncodeImages = Callable[[Tensor], Tensor]
EncodeTexts = Callable[[Sequence[str]], tuple[Tensor, Sequence[bool]]]  # and whether each was cut


class Part(NamedTuple):
    """The images and texts of consecutive samples.

    Attributes:
        images: (I V, C, S, S) uint8, the views of an image next to each other.
        numbers: I numbers of the samples that they are of.
        traits: traits of the images that have any, by number.
        failures: why other images cannot be used, by number.
        unread: why other samples could not be read, by number; perhaps they can be later.
        texts: T different texts.
    """

    images: Tensor
    numbers: list[int]
    traits: dict[int, Traits]
    failures: dict[int, str]
    unread: dict[int, str]
    texts: list[str]


class ViewOfImage(NamedTuple):
    """A view of the image with a number, and the traits of the image."""

    number: int
    view: int
    traits: Traits


@dataclass(frozen=True, kw_only=True)
class FeatureStore:
    """What the features of a training set are computed from, and where they are stored.

    Attributes:
        shards: the samples.
        image_size: S.
        augmentation: random crops and colors.
        decoding: handling of depth, transparency and orientation.
        seed: seed of the run.
        backbones: all that the features depend on besides the data, such as the weights.
        images, texts: whether features of images and of texts are stored.
        views: V.
    """

    shards: Shards
    image_size: int
    augmentation: Augmentation
    decoding: Decoding
    seed: int
    backbones: str
    images: bool
    texts: bool
    views: int = 1

    @property
    def samples_per_part(self) -> int:
        """Number of samples of each part but the last."""
        return max(_SAMPLES, -(-len(self.shards) // _MOST_PARTS))

    @property
    def parts(self) -> int:
        """Number of parts."""
        return -(-len(self.shards) // self.samples_per_part)

    @property
    def folder(self) -> Path:
        """The folder in the cache, named by a hash of all that the features depend on."""
        selection = self.shards.selection
        # ``asdict``, because ``repr`` lacks some fields
        settings: list[Any] = [_FORMAT, self.shards.fingerprint(), self.backbones, self.samples_per_part]
        if self.images:
            settings += [selection.image, self.image_size, asdict(self.decoding)]
            settings += [self.views, asdict(self.augmentation), self.seed * self.augmentation.is_random]
        if self.texts:
            settings += [asdict(selection.captions), asdict(selection.fields)]
        return cache_folder() / "backbone" / hashlib.sha256(repr(settings).encode()).hexdigest()[:32]

    def path(self, i: int) -> Path:
        """Return the file of part ``i``."""
        return self.folder / f"{i:06d}"

    def read_part(self, i: int) -> Part:
        """Read and decode the samples of part ``i``; images that cannot be decoded are bad in training, too."""
        first = i * self.samples_per_part
        views: list[Tensor] = []
        numbers: list[int] = []
        traits: dict[int, Traits] = {}
        failures: dict[int, str] = {}
        unread: dict[int, str] = {}
        texts: dict[str, None] = {}  # in order, each once
        for number in range(first, min(first + self.samples_per_part, len(self.shards))):
            try:
                sample = self.shards.read(number)
            except DataError as error:
                unread[number] = str(error)
                continue
            if sample.caption_number > 0:  # its image and texts are those of an earlier sample
                continue
            if self.texts:
                sample_texts = self.shards.selection.captions.all_texts(sample.fields)
                fields = self.shards.selection.fields
                for name in (*fields.image, *fields.text):
                    sample_texts += texts_at(sample.fields, name)[:1]
                texts.update(dict.fromkeys(text[:MAX_CHARACTERS] for text in sample_texts))
            if self.images:
                try:
                    pixels, traits_of_image = self._read_views(sample.image, number)
                    views.append(pixels)
                    numbers.append(number)
                    if traits_of_image != NO_TRAITS:
                        traits[number] = traits_of_image
                except PixelRangeError:
                    raise
                except DataError as error:
                    failures[number] = str(error)
        empty = empty_batch(0, self.image_size, self.decoding.channels)
        return Part(torch.cat([empty, *views]), numbers, traits, failures, unread, list(texts))

    def _read_views(self, image: bytes, number: int) -> tuple[Tensor, Traits]:
        traits = NO_TRAITS
        views = empty_batch(self.views, self.image_size, self.decoding.channels)
        for view in range(self.views):
            traits = training_pixels(
                image,
                image_size=self.image_size,
                augmentation=self.augmentation,
                random=random_of(self.seed, CROP, view, number),
                out=views[view],
                decoding=self.decoding,
            )
        return views, traits

    def write(
        self,
        encode_images: EncodeImages,
        encode_texts: EncodeTexts,
        *,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
    ) -> None:
        """Compute and write the parts of this rank that are not stored yet, or of which samples were not read."""
        missing = []
        for i in range(rank, self.parts, world_size):
            stored = read_arrays(self.path(i))
            if stored is None or stored[0]["unread"]:
                missing.append(i)
        if not missing:
            return
        loader: DataLoader[Part | DataError] = DataLoader(
            _Parts(self),
            batch_size=None,
            sampler=missing,
            num_workers=workers,
            prefetch_factor=1 if workers else None,
            worker_init_fn=ignore_signals,
            generator=torch.Generator(),  # otherwise it would consume the training's random numbers
        )
        what = "encoding " + " and ".join(["images"] * self.images + ["texts"] * self.texts)
        parts = Workers(loader)
        try:
            with CountProgress(what, total=len(missing) * self.samples_per_part, shown=rank == 0) as progress:
                for done, i in enumerate(missing):
                    part = parts.next()
                    assert part is not None
                    if isinstance(part, DataError):
                        raise part
                    self._write_part(i, part, encode_images, encode_texts)
                    progress.show((done + 1) * self.samples_per_part)
        finally:
            parts.close()

    def _write_part(self, i: int, part: Part, encode_images: EncodeImages, encode_texts: EncodeTexts) -> None:
        arrays: dict[str, npt.NDArray[Any]] = {}
        if part.numbers:
            pooled = encode_images(part.images)
            arrays["images"] = pooled.numpy().reshape(len(part.numbers), self.views, -1)
            arrays["numbers"] = np.array(part.numbers)
        if part.texts:
            pooled, cut = encode_texts(part.texts)
            arrays["texts"] = pooled.numpy()
            arrays["cut"] = np.array(cut, dtype=np.uint8)
            arrays["hashes"] = np.array([hash_text(text) for text in part.texts])
        about = {
            "failures": {str(number): cause for number, cause in part.failures.items()},
            "unread": {str(number): cause for number, cause in part.unread.items()},
            "traits": {str(number): list(traits) for number, traits in part.traits.items()},
        }
        try:
            write_arrays(self.path(i), about, arrays)
        except OSError as error:
            raise DataError(f"{self.path(i)} cannot be written: {error.strerror}") from error

    def open(self) -> "BackboneFeatures":
        """Open the store, all parts of which have been written."""
        return BackboneFeatures(
            paths=[self.path(i) for i in range(self.parts)],
            samples_per_part=self.samples_per_part,
            views=self.views,
            stores_images=self.images,
            stores_texts=self.texts,
        )


class _Parts(Dataset[Part | DataError]):
    def __init__(self, store: FeatureStore) -> None:
        self._store = store

    def __getitem__(self, i: int) -> Part | DataError:
        try:
            return self._store.read_part(i)
        except DataError as error:
            return error  # raised in the main process, where its message stays one line


@dataclass(kw_only=True)
class BackboneFeatures:
    """The features of a store, which stay on the disk and are memory-mapped; 16 bytes of each text are in memory.

    Attributes:
        paths: the files of all parts.
        samples_per_part: number of samples of each part but the last.
        views: V.
        stores_images, stores_texts: whether it has features of images and of texts.
    """

    paths: Sequence[Path]
    samples_per_part: int
    views: int
    stores_images: bool
    stores_texts: bool
    _parts: dict[int, tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]] = field(default_factory=dict)
    _hashes: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # sorted
    _rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # of all texts
    _ends: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # of parts

    def __post_init__(self) -> None:
        if self.stores_texts:
            hashes = [self._part(i)[1].get("hashes", self._hashes) for i in range(len(self.paths))]
            self._ends = np.cumsum([len(part) for part in hashes])
            self._hashes, self._rows = np.unique(np.concatenate(hashes), return_index=True)

    def __getstate__(self) -> Mapping[str, Any]:
        return vars(self) | {"_parts": {}}  # another process maps the files itself

    @property
    def image_width(self) -> int:
        """W of images."""
        return self._find_width("images")

    @property
    def text_width(self) -> int:
        """W of texts."""
        return self._find_width("texts")

    def _find_width(self, name: str) -> int:
        for i in range(len(self.paths)):
            if name in (arrays := self._part(i)[1]):
                return int(arrays[name].shape[-1])
        raise DataError(f"lock.store: none of the {name} of data.train can be used")

    def describe(self) -> str:
        """Describe the store in one line."""
        parts = []
        if self.stores_images:
            images = sum(len(self._part(i)[1].get("numbers", ())) for i in range(len(self.paths)))
            views = f" in {counted(self.views, 'view')}" if self.views > 1 else ""
            parts.append(counted(images, "image") + views)
        if self.stores_texts:
            parts.append(counted(len(self._hashes), "text"))
        return f"lock.store: features of {' and '.join(parts)} in {self.paths[0].parent}"

    def check_sample(self, number: int) -> None:
        """Raise DataError if the sample of the image with a number could not be read when it was encoded."""
        about, _ = self._part(number // self.samples_per_part)
        if cause := about["unread"].get(str(number)):
            raise DataError(cause)

    def find_view(self, number: int, turn: int) -> ViewOfImage:
        """Return the view of an image for its use number ``turn``; DataError if the image cannot be used."""
        about, _ = self._part(number // self.samples_per_part)
        if cause := about["failures"].get(str(number)):
            raise DataError(cause)
        traits = Traits(*about["traits"].get(str(number), ()))
        return ViewOfImage(number=number, view=turn % self.views, traits=traits)

    def read_images(self, views: Sequence[ViewOfImage]) -> Tensor:
        """Return (B, W) float32."""
        rows = np.empty((len(views), self.image_width), dtype=np.float32)
        for i, (number, view, _) in enumerate(views):
            arrays = self._part(number // self.samples_per_part)[1]
            row = int(np.searchsorted(arrays["numbers"], number))
            assert arrays["numbers"][row] == number
            rows[i] = arrays["images"][row, view]
        return torch.from_numpy(rows)

    def read_texts(self, texts: Sequence[str]) -> tuple[Tensor, list[bool]]:
        """Return (N, W) float32, and which of the texts were cut to the context length."""
        rows = np.empty((len(texts), self.text_width), dtype=np.float32)
        hashes = np.array([hash_text(text) for text in texts])
        positions = np.searchsorted(self._hashes, hashes)
        cut = []
        for i, position in enumerate(positions):
            if position == len(self._hashes) or self._hashes[position] != hashes[i]:
                raise DataError(f"no stored feature of the text {texts[i][:80]!r}: the data have changed")
            row = self._rows[position]
            part = int(np.searchsorted(self._ends, row, side="right"))
            within = row - self._ends[part]  # relative to the end of the part
            arrays = self._part(part)[1]
            rows[i] = arrays["texts"][within]
            cut.append(bool(arrays["cut"][within]))
        return torch.from_numpy(rows), cut

    def _part(self, i: int) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        if i not in self._parts:
            stored = read_arrays(self.paths[i])
            if stored is None:
                raise DataError(f"{self.paths[i]} is missing or damaged: run the same command again")
            self._parts[i] = stored
        return self._parts[i]

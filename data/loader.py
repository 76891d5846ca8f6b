"""Batches for one rank: read, decode, crop, tokenize, collate, in worker processes that run ahead.

What a batch holds is in ``data/batch.py``.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from clipkit.decode import jpeg_orientation, plain_jpeg_size
from clipkit.errors import DataError
from clipkit.image_traits import Decoding, TraitCounts, Traits
from clipkit.tokenizer import MAX_CHARACTERS
from data.augment import Augmentation, draw_recipe, empty_batch, preload, random_of, training_pixels
from data.batch import BadSample, Batch, numbers_of, token_lengths
from data.device_decode import JpegOfRow, Undecoded, decode_into
from data.order import Order
from data.shards import Sample, Shards
from data.stages import Stage, check_stages, stage_at
from data.stored_features import FoundRow, StoredFeatures
from data.workers import Workers, leave_signals_to_the_trainer

__all__ = ["BatchError", "Loader"]

_SUBSTITUTES = 32  # tries for one bad sample before the data are called broken
_CROP, _SUBSTITUTE, _CAPTION = range(3)  # what a stream of random numbers is for; part of its seed


class BatchError(DataError):
    """No usable sample was found for a row of a batch.

    Args:
        message: what is wrong with the last one.
        bad: all bad samples of the batch up to there.
    """

    def __init__(self, message: str, bad: tuple[BadSample, ...] = ()) -> None:
        super().__init__(message, bad)  # both, so that it can be pickled
        self.bad = bad

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, kw_only=True)
class Loader:
    """The batches of one rank from a step on.

    The content of a batch follows from (seed, step, rank, world) alone, so the loader has no state: iterating
    from step n gives what a run would have seen that never stopped.

    With ``decode_later`` plain JPEGs are decoded by ``on_device``, but for those that are to be turned upright.

    Args:
        decoding: what is done about transparency and orientation.
        stages: smaller sizes for the first steps; then ``image_size`` and ``tokenize`` as they are. A sample is cut
            out in the same place whatever its size. Such a tokenizer has ``of_length``, as those of models have.
        teacher: stored features that each sample is given along with.

    Raises:
        ConfigError: there are more ranks than samples in a batch, or stages do not follow one another.
    """

    shards: Shards
    order: Order
    image_size: int
    tokenize: Callable[[Sequence[str]], Tensor]
    augmentation: Augmentation = field(default_factory=Augmentation)
    decoding: Decoding = field(default_factory=Decoding)
    rank: int = 0
    world: int = 1
    workers: int = 0
    pin: bool = False
    decode_later: bool = False
    stages: tuple[Stage, ...] = ()
    teacher: StoredFeatures | None = None
    _tokenizers: dict[int, Callable[[Sequence[str]], Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self.order.part(self.rank, self.world)
        check_stages(self.stages)
        for stage in self.stages:  # made once: some take long to load
            tokenizer: Any = self.tokenize
            self._tokenizers[stage.context_length] = tokenizer.of_length(stage.context_length)

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """The batches of steps ``start`` to ``stop - 1``.

        Raises:
            BatchError: no usable sample was found in place of a bad one.
            DataError: a worker was killed.
        """
        if self.workers:
            preload(self.augmentation)
        with warnings.catch_warnings():  # of more workers than cores: their number is the user's choice
            warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
            loader: DataLoader[Batch | DataError] = DataLoader(
                _Batches(self),
                batch_size=None,
                sampler=range(start, stop),
                num_workers=self.workers,
                pin_memory=self.pin,
                prefetch_factor=4 if self.workers else None,
                worker_init_fn=leave_signals_to_the_trainer,
                generator=torch.Generator(),  # else it would draw from the training's random numbers
            )
            workers = Workers(loader)
        try:
            while (batch := workers.next()) is not None:
                if isinstance(batch, DataError):
                    raise batch
                yield batch
        finally:
            workers.close()

    def batch(self, step: int) -> Batch:
        """This rank's part of the batch after ``step`` others."""
        began = time.perf_counter()
        stage = stage_at(self.stages, step)
        draw = self.order.batch(step, rank=self.rank, world=self.world)
        part = _Part(images=empty_batch(len(draw.ids), stage.image_size if stage else self.image_size))
        with _one_thread():
            for row, (number, epoch) in enumerate(zip(draw.ids.tolist(), draw.epochs.tolist(), strict=True)):
                self._take(number, epoch, row, part)
        tokens = (self._tokenizers[stage.context_length] if stage else self.tokenize)(part.captions)
        ids, identities = numbers_of(draw.ids, part.pictures, part.captions)
        return Batch(
            images=part.images,
            tokens=tokens,
            lengths=token_lengths(tokens),
            ids=ids,
            identities=identities,
            first_row=draw.first_row,
            bad=tuple(part.bad),
            traits=part.traits,
            undecoded=Undecoded.of(part.later) if part.later else None,
            teacher=None if self.teacher is None else self.teacher.read(part.taught),
            reading=part.reading,
            making=time.perf_counter() - began,
        )

    def placeholder(self, step: int, error: DataError) -> Batch:
        """A batch of zeros for a step whose batch cannot be made.

        A rank computes on it until all ranks have agreed to stop: one that left earlier would let the others wait.
        The result must not be used.

        Args:
            step: batches before this one.
            error: why the batch cannot be made; its bad samples are the batch's.
        """
        stage = stage_at(self.stages, step)
        draw = self.order.batch(step, rank=self.rank, world=self.world)
        count, ids = len(draw.ids), torch.from_numpy(draw.ids)
        return Batch(
            images=empty_batch(count, stage.image_size if stage else self.image_size).zero_(),
            tokens=torch.zeros(count, 1, dtype=torch.int64),
            lengths=(1,) * count,
            ids=ids,
            identities=torch.stack([ids, ids], dim=1),
            first_row=draw.first_row,
            bad=error.bad if isinstance(error, BatchError) else (),
            teacher=None if self.teacher is None else self.teacher.zeros(count),
        )

    def names(self, ids: Tensor | Sequence[int]) -> list[tuple[str, str]]:
        """The shard and key of samples by their numbers; the key is empty where nothing tells it any more."""
        return [self.shards.locate(int(number)) for number in ids]

    def on_device(self, batch: Batch, step: int, device: torch.device) -> Batch:
        """The batch after ``step`` others on a device, all its pictures decoded.

        Where one does not decode there, the whole batch is made again without ``decode_later``, so that what is bad
        is found and replaced as ever.

        Raises:
            DataError: as for ``batches``.
        """
        if batch.undecoded is None:
            return batch if batch.images.device == device else batch.to(device)
        moved = batch.to(device)
        try:
            decode_into(moved.images, batch.undecoded)
        except DataError:
            return replace(self, decode_later=False).batch(step).to(device)
        return replace(moved, undecoded=None)

    def _take(self, number: int, epoch: int, row: int, part: "_Part") -> None:
        """Put sample ``number`` into a row, or if it is bad another one that (seed, epoch, number) determines."""
        substitutes = None
        chosen = number
        for _ in range(_SUBSTITUTES):
            try:
                self._put(chosen, epoch, row, part)
                return
            except DataError as error:
                shard, key = self.shards.locate(chosen)
                part.bad.append(BadSample(shard=shard, key=key, cause=str(error)))
            substitutes = substitutes or random_of(self.order.seed, _SUBSTITUTE, epoch, number)
            chosen = int(substitutes.integers(len(self.shards)))
        last = part.bad[-1]
        raise BatchError(
            f"{_SUBSTITUTES} samples in a row are bad, the last is {last.key} in {last.shard}: {last.cause}",
            tuple(part.bad),
        )

    def _put(self, number: int, epoch: int, row: int, part: "_Part") -> None:
        """Put a sample into a row; its picture may be left for later. Nothing of a bad one is left behind."""
        began = time.perf_counter()
        sample = self.shards.read(number)
        part.reading += time.perf_counter() - began
        caption = self._caption(sample, epoch)
        taught = self.teacher.find(sample.shard, sample.key) if self.teacher is not None else None
        random = random_of(self.order.seed, _CROP, epoch, number)
        size = plain_jpeg_size(sample.image) if self.decode_later else None
        traits = Traits() if size is None else Traits(rotated=jpeg_orientation(sample.image) != 1)
        if size is not None and not (traits.rotated and self.decoding.upright):
            recipe = draw_recipe(*size, self.augmentation, random)
            part.later.append(JpegOfRow(row=row, data=sample.image, size=size, recipe=recipe))
        else:
            traits = training_pixels(
                sample.image,
                image_size=part.images.shape[-1],
                augmentation=self.augmentation,
                random=random,
                out=part.images[row],
                decoding=self.decoding,
            )
        part.traits.add(traits)
        part.captions.append(caption)
        part.pictures.append(number - sample.caption_number)  # the first of the samples that share it
        if taught is not None:
            part.taught.append(taught)

    def _caption(self, sample: Sample, epoch: int) -> str:
        rule = self.shards.selection.captions
        random = random_of(self.order.seed, _CAPTION, epoch, sample.id) if rule.draws else None
        caption = rule.caption(sample.caption, sample.meta, sample.caption_number, random)
        if caption is None:
            raise DataError(
                f"no caption in {' or '.join(rule.fields)}" if rule.reads_json else "empty caption"
            )
        if len(caption) > MAX_CHARACTERS:
            raise DataError(f"caption of {len(caption)} characters")
        return caption


@dataclass(kw_only=True, slots=True)
class _Part:
    """A batch in the making."""

    images: Tensor
    captions: list[str] = field(default_factory=list)
    pictures: list[int] = field(default_factory=list)
    taught: list[FoundRow] = field(default_factory=list)
    bad: list[BadSample] = field(default_factory=list)
    traits: TraitCounts = field(default_factory=TraitCounts)
    later: list[JpegOfRow] = field(default_factory=list)
    reading: float = 0.0  # seconds


@contextmanager
def _one_thread() -> Iterator[None]:
    """Without workers torch would wake all cores for each picture, which takes longer than resizing it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Batches(Dataset["Batch | DataError"]):
    """Steps as a map-style dataset: a worker makes whole batches."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._ahead: tuple[list[int], list[int]] = [], []

    def __getitem__(self, step: int) -> "Batch | DataError":
        try:
            self._fetch_ahead(step)
            return self.loader.batch(step)
        except DataError as error:
            return error  # raised in the main process, where its message stays one line

    def _fetch_ahead(self, step: int) -> None:
        """Have the shards fetched that are read next; the processes of a machine share them and begin apart."""
        if self.loader.shards.cache is None:
            return
        ahead = self.loader.order.shards_ahead(step)
        if ahead != self._ahead:
            self._ahead = ahead
            worker = get_worker_info()
            apart = self.loader.rank * 7 + (worker.id if worker else 0)
            self.loader.shards.fetch_ahead([one for part in ahead for one in _rotated(part, apart)])


def _rotated(shards: list[int], by: int) -> list[int]:
    first = by % len(shards)
    return shards[first:] + shards[:first]

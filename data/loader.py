"""Batches of one rank: read, decode, crop, tokenize and collate samples in worker processes.

Letters: B samples of a rank's part of a batch, S image side in pixels, L tokens of the longest caption.
"""

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from clipkit.batch import BadSample, Batch
from clipkit.config import SmallConfig
from clipkit.errors import DataError
from clipkit.model import MAX_CHARACTERS, PatchBudget, select_distinct
from clipkit.samples import (
    Decoding,
    PixelRangeError,
    TraitCounts,
    Traits,
    jpeg_orientation,
    plain_jpeg_size,
)
from data.augment import (
    CAPTION,
    CROP,
    NEGATIVE,
    SUBSTITUTE,
    WORDS,
    Augmentation,
    JpegOfRow,
    Undecoded,
    decode_into,
    draw_recipe,
    empty_batch,
    preload,
    random_of,
    training_pixels,
)
from data.backbone import BackboneFeatures, ViewOfImage
from data.captions import TEXT, drop_words, hash_text
from data.order import Order
from data.shards.samples import Shards
from data.shards.teacher import FoundRow, StoredFeatures
from data.workers import Workers, ignore_signals


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderBatch(Batch):
    """A batch some of whose images may be left to ``Loader.on_device`` to decode.

    Attributes:
        undecoded: JPEGs whose rows of ``images`` are undefined, None if there are none.
    """

    undecoded: Undecoded | None = None


@dataclass(kw_only=True, slots=True)
class BatchPart:
    """A batch under construction."""

    images: Tensor
    captions: list[str] = field(default_factory=list)  # all of an image next to each other
    texts: list[str] = field(default_factory=list)  # the captions after ``text_dropout``
    negatives: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)  # with ``PairFields.same``; negative for none
    weights: list[float] = field(default_factory=list)
    further_texts: list[list[str]] = field(default_factory=list)  # of each sample
    features: list[FoundRow] = field(default_factory=list)
    views: list[ViewOfImage] = field(default_factory=list)  # whose features are stored
    bad: list[BadSample] = field(default_factory=list)
    substitutes: list[int] = field(default_factory=list)  # rows
    traits: TraitCounts = field(default_factory=TraitCounts)
    undecoded: list[JpegOfRow] = field(default_factory=list)
    read_seconds: float = 0.0


class BatchError(DataError):
    """No usable sample was found for a row of a batch."""

    def __init__(self, message: str, bad: tuple[BadSample, ...] = ()) -> None:
        super().__init__(message, bad)  # both, for pickling
        self.bad = bad

    def __str__(self) -> str:
        return str(self.args[0])


def caption_hash(caption: str) -> int:
    """Return 63 bits of a caption, equal in every process; white space and case are ignored."""
    return hash_text(" ".join(caption.casefold().split()))


def ids_and_identities(ids: npt.NDArray[np.int64], *columns: list[int]) -> tuple[Tensor, Tensor]:
    """Return a batch's ``ids`` and ``identities`` in one storage, because each storage sent to another
    process takes a file descriptor."""
    count = len(ids)
    numbers = np.empty(count + len(columns) * len(columns[0]), dtype=np.int64)
    numbers[:count] = ids
    for i, column in enumerate(columns):
        numbers[count + i :: len(columns)] = column
    both = torch.from_numpy(numbers)
    return both[:count], both[count:].view(-1, len(columns))


def token_lengths(tokens: Tensor) -> tuple[int, ...]:
    """(B, L) int64 on the host → tokens of each row up to and including its largest one."""
    return tuple((tokens.numpy().argmax(axis=1) + 1).tolist())


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Sizes of the steps before ``until_step``, from the end of the previous stage.

    Training at a small size and finishing at the full one costs a fraction of the compute for nearly the same
    model (CLIPA, Li et al. 2023, https://arxiv.org/abs/2305.07017).

    Attributes:
        until_step: steps since the start of training.
        image_size: side of the images in pixels.
        context_length: maximum tokens of a text; longer texts are truncated and keep their end-of-text token.
    """

    until_step: int
    image_size: int
    context_length: int


def small_stages(small: SmallConfig, *, image_size: int, context_length: int) -> tuple[Stage, ...]:
    """Return the stage of the settings, if any; unset sizes are those of the model."""
    if not small.steps:
        return ()
    size = small.image_size or image_size
    length = small.context_length or context_length
    return (Stage(until_step=small.steps, image_size=size, context_length=length),)


def stage_at(stages: Sequence[Stage], step: int) -> Stage | None:
    """Return the stage of a step; None after the last stage."""
    return next((stage for stage in stages if step < stage.until_step), None)


_SUBSTITUTES = 32  # attempts to replace a bad sample
_NEARBY = 2  # of these, with groups, those that read the shard of the bad sample
_AHEAD = 4  # batches that each worker makes ahead, unless the memory below would not hold them
_AHEAD_BYTES = 2 << 30  # of the batches that the workers of a rank make ahead; at least one batch each
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class Loader:
    """The batches of one rank.

    A batch is a function of (seed, step, rank, world_size), so the loader has no state: starting at step n gives
    the same batches as an uninterrupted run.

    Args:
        shards: the samples.
        order: their order.
        image_size: S.
        tokenize: captions → (B, L) int64; with stages it must have ``replace_length``, and to count captions that
            are cut, ``count_cut``, like the tokenizers of models; with ``lists_words`` also
            ``special_tokens``.
        augmentation: random crops and colors.
        decoding: handling of depth, transparency and orientation.
        rank: of this process.
        world_size: number of ranks.
        num_workers: processes that prefetch batches; 0 creates batches in this process.
        pin_memory: copy batches to page-locked memory.
        decode_later: leave plain JPEGs to ``on_device``, except those that must be rotated.
        stages: smaller sizes for the first steps; the crops are the same at every size.
        patches: sizes of strips, which images of variable size become instead of squares of side S.
        teacher: stored features of the samples.
        backbone: features that take the place of images or tokens; None: all are made.
        text_dropout: probability that a word of a caption is left out, except those of the prefix.
        lists_words: whether batches have the distinct tokens of captions, ``Batch.words``.
    """

    shards: Shards
    order: Order
    image_size: int
    tokenize: Callable[[Sequence[str]], Tensor]
    augmentation: Augmentation = field(default_factory=Augmentation)
    decoding: Decoding = field(default_factory=Decoding)
    rank: int = 0
    world_size: int = 1
    num_workers: int = 0
    pin_memory: bool = False
    decode_later: bool = False
    stages: tuple[Stage, ...] = ()
    patches: PatchBudget | None = None
    teacher: StoredFeatures | None = None
    backbone: BackboneFeatures | None = None
    text_dropout: float = 0.0
    lists_words: bool = False
    _tokenizers: dict[int, Callable[[Sequence[str]], Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self.order.part(self.rank, self.world_size)
        for stage in self.stages:
            tokenizer: Any = self.tokenize  # loaded once, because some load slowly
            self._tokenizers[stage.context_length] = tokenizer.replace_length(stage.context_length)

    @property
    def notes(self) -> list[str]:
        """Lines about the stored features to print before a run."""
        return [] if self.backbone is None else [self.backbone.describe()]

    def batches(self, start: int, stop: int) -> Iterator[LoaderBatch]:
        """Yield the batches of steps ``start`` to ``stop - 1``."""
        if self.num_workers:
            preload(self.augmentation)
        with warnings.catch_warnings():  # the user may choose more workers than cores
            warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
            loader: DataLoader[LoaderBatch | DataError] = DataLoader(
                _Batches(self),
                batch_size=None,
                sampler=range(start, stop),
                num_workers=self.num_workers,
                pin_memory=self.pin_memory,
                prefetch_factor=self.batches_ahead() if self.num_workers else None,
                worker_init_fn=ignore_signals,
                generator=torch.Generator(),  # otherwise it would consume the training's random numbers
            )
            workers = Workers(loader)
        try:
            while (batch := workers.next()) is not None:
                if isinstance(batch, DataError):
                    raise batch
                yield batch
        finally:
            workers.close()

    def batches_ahead(self) -> int:
        """Return how many batches each worker makes ahead, fewer if they are large."""
        rows = len(self.order.part(self.rank, self.world_size))
        batch = rows * self.decoding.channels * self.image_size**2
        if self.patches is not None:
            batch = rows * math.prod(self.patches.strip_shape(self.decoding.channels))
        if self.backbone is not None and self.backbone.stores_images:
            batch = rows * self.backbone.image_width * 4
        one_of_each = batch * self.num_workers
        most = _AHEAD_BYTES
        if _SHARED_MEMORY.is_dir():
            disk = os.statvfs(_SHARED_MEMORY)
            free = disk.f_bavail * disk.f_frsize
            if one_of_each > free:
                raise DataError(
                    f"data.workers = {self.num_workers} with batches of {batch >> 20:,} MiB need "
                    f"{one_of_each >> 20:,} MiB of shared memory ({_SHARED_MEMORY}), and {free >> 20:,} are free: "
                    "enlarge it, or lower data.workers or batch_size"
                )
            most = min(most, free)
        return max(1, min(_AHEAD, most // one_of_each))

    def batch(self, step: int) -> LoaderBatch:
        """Return this rank's part of the batch of a step (from 0)."""
        began = time.perf_counter()
        stage = stage_at(self.stages, step)
        draw = self.order.batch(step, rank=self.rank, world_size=self.world_size)
        part = BatchPart(images=self._empty_batch(len(draw.ids), stage))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # waking all cores for each image takes longer than resizing it
        try:
            for row, (sample_id, epoch) in enumerate(
                zip(draw.ids.tolist(), draw.epochs.tolist(), strict=True)
            ):
                self._fill(row, sample_id, epoch, part)
        finally:
            torch.set_num_threads(threads)
        count = self.shards.selection.captions.count
        captions = [caption for i in range(count) for caption in part.captions[i::count]]
        further_texts = [*chain.from_iterable(zip(*part.further_texts, strict=True))]
        texts = [text for i in range(count) for text in part.texts[i::count]] + part.negatives + further_texts
        rows = len(draw.ids)
        if self.backbone is not None and self.backbone.stores_texts:
            tokens, were_cut = self.backbone.read_texts(texts)
            lengths = (1,) * len(texts)
            cut = sum(were_cut[: len(captions)])
        else:
            tokenize = self._tokenizers[stage.context_length] if stage else self.tokenize
            tokens = tokenize(texts)
            lengths = token_lengths(tokens)
            count_cut = getattr(self.tokenize, "count_cut", None)
            cut = count_cut(texts[: len(captions)], tokens[: len(captions)]) if count_cut and not stage else 0
        words = None
        if self.lists_words:
            stored = tokens.is_floating_point()
            words = self._list_words(self.tokenize(texts[:rows]) if stored else tokens[:rows])
        sizes = [rows, len(captions) - rows, len(part.negatives), len(further_texts)]
        tokens, more, negatives, further = tokens.split(sizes)
        columns = [part.numbers * count, [caption_hash(caption) for caption in captions]]
        if self.shards.selection.fields.same:
            columns.append(part.groups * count)
        ids, identities = ids_and_identities(draw.ids, *columns)
        return LoaderBatch(
            images=self.backbone.read_images(part.views) if self.backbone and part.views else part.images,
            grids=tuple(self.patches.read_grids(part.images)) if self.patches else None,
            tokens=tokens,
            lengths=lengths[:rows],
            ids=ids,
            identities=identities,
            first_row=draw.first_row,
            rank_rows=self.order.rank_rows(self.world_size),
            bad=tuple(part.bad),
            substitutes=tuple(part.substitutes),
            traits=part.traits,
            cut_captions=cut,
            without_group=sum(group < 0 for group in part.groups),
            undecoded=Undecoded.of(part.undecoded) if part.undecoded else None,
            teacher=None if self.teacher is None else self.teacher.read(part.features),
            more=more if count > 1 else None,
            more_lengths=lengths[rows : len(captions)],
            negatives=negatives if self._has_negatives else None,
            negative_lengths=lengths[len(captions) : len(texts) - len(further_texts)],
            fields=further if further_texts else None,
            field_lengths=lengths[len(texts) - len(further_texts) :],
            weights=torch.tensor(part.weights) if self.shards.selection.fields.weight else None,
            words=words,
            read_seconds=part.read_seconds,
            make_seconds=time.perf_counter() - began,
        )

    def placeholder(self, step: int, error: DataError) -> LoaderBatch:
        """Return a batch of zeros for a step whose batch cannot be created.

        A rank computes on it because the others wait for it in collectives; the loss is not a number, so that no
        rank makes an update.
        """
        stage = stage_at(self.stages, step)
        draw = self.order.batch(step, rank=self.rank, world_size=self.world_size)
        count = len(draw.ids)
        ids = torch.from_numpy(draw.ids)
        more = self.shards.selection.captions.count - 1
        fields = self.shards.selection.fields
        columns = 3 if fields.same else 2
        further = fields.count_texts * count
        tokens = torch.zeros(count, 1, dtype=torch.int64)
        if self.backbone is not None and self.backbone.stores_texts:
            tokens = torch.zeros(count, self.backbone.text_width)
        return LoaderBatch(
            images=self._empty_batch(count, stage).zero_(),
            tokens=tokens,
            lengths=(1,) * count,
            ids=ids,
            identities=ids[:, None].repeat(more + 1, columns),
            first_row=draw.first_row,
            rank_rows=self.order.rank_rows(self.world_size),
            fault=str(error),
            bad=error.bad if isinstance(error, BatchError) else (),
            teacher=None if self.teacher is None else self.teacher.zeros(count),
            more=tokens.repeat(more, 1) if more else None,
            more_lengths=(1,) * (more * count),
            negatives=tokens if self._has_negatives else None,
            negative_lengths=(1,) * count if self._has_negatives else (),
            fields=tokens.repeat(fields.count_texts, 1) if further else None,
            field_lengths=(1,) * further,
            weights=torch.ones(count) if fields.weight else None,
            words=torch.full((count, 1), -1) if self.lists_words else None,
        )

    def _list_words(self, tokens: Tensor) -> Tensor:
        """Return ``Batch.words`` of captions (B, L)."""
        tokenizer: Any = self.tokenize
        special = torch.tensor(tokenizer.special_tokens, dtype=tokens.dtype)
        # zeros at the end are padding; elsewhere, 0 is a word of many vocabularies, such as "!" of CLIP's
        in_text = tokens.flip(1).cumsum(1).flip(1) > 0
        return select_distinct(tokens, in_text & ~torch.isin(tokens, special))

    def _empty_batch(self, count: int, stage: Stage | None) -> Tensor:
        if self.backbone is not None and self.backbone.stores_images:
            return torch.empty(count, self.backbone.image_width)
        size = stage.image_size if stage else self.image_size
        return empty_batch(count, size, self.decoding.channels, patches=self.patches)

    @property
    def _has_negatives(self) -> bool:
        return bool(self.shards.selection.captions.negatives)

    def names(self, ids: Tensor | Sequence[int]) -> list[tuple[str, str]]:
        """Return shard and key of samples; the key is empty if it is no longer known."""
        return [self.shards.locate(int(sample_id)) for sample_id in ids]

    def on_device(self, batch: LoaderBatch, step: int, device: torch.device) -> LoaderBatch:
        """Copy the batch of a step to a device and decode its remaining JPEGs there.

        If one fails to decode, the whole batch is created again without ``decode_later``, which replaces the bad
        sample.
        """
        if batch.undecoded is None:
            return batch if batch.images.device == device else batch.to(device)
        moved = batch.to(device)
        try:
            decode_into(moved.images, batch.undecoded)
        except DataError:
            return replace(self, decode_later=False).batch(step).to(device)
        return replace(moved, undecoded=None)

    def _fill(self, row: int, sample_id: int, epoch: int, part: BatchPart) -> None:
        """Add a sample; a bad one is replaced by a sample determined by (seed, epoch, number).

        Deep images without a pixel range are not replaced, because none of them can be used.
        """
        substitutes = None
        chosen = sample_id
        for attempt in range(_SUBSTITUTES):
            try:
                self._add_sample(row, chosen, epoch, part)
                if attempt:
                    part.substitutes.append(row)
                return
            except PixelRangeError as error:
                shard, key = self.shards.locate(chosen)
                raise BatchError(f"{key} in {shard}: {error}", tuple(part.bad)) from error
            except DataError as error:
                shard, key = self.shards.locate(chosen)
                part.bad.append(BadSample(shard=shard, key=key, cause=str(error)))
            substitutes = substitutes or random_of(self.order.seed, SUBSTITUTE, epoch, sample_id)
            choices = range(len(self.shards))
            if (
                self.order.groups > 1 and attempt < _NEARBY
            ):  # another shard would be downloaded for one sample
                choices = self.shards.find_shard_samples(sample_id)
            chosen = choices[int(substitutes.integers(len(choices)))]
        last = part.bad[-1]
        raise BatchError(
            f"{_SUBSTITUTES} samples in a row are bad, the last is {last.key} in {last.shard}: {last.cause}",
            tuple(part.bad),
        )

    def _add_sample(self, row: int, sample_id: int, epoch: int, part: BatchPart) -> None:
        """Add a sample; if this raises DataError, the lists of the part are unchanged."""
        began = time.perf_counter()
        sample = self.shards.read(sample_id)
        part.read_seconds += time.perf_counter() - began
        rule = self.shards.selection.captions
        random = random_of(self.order.seed, CAPTION, epoch, sample_id) if rule.draws else None
        if rule.count > 1:
            captions = rule.several(sample.fields, random)
        else:
            caption = rule.caption(sample.fields, sample.caption_number, random)
            captions = [] if caption is None else [caption]
        if not captions:
            raise DataError(
                f"no caption in {' or '.join(rule.fields)}" if rule.fields != (TEXT,) else "empty caption"
            )
        if (longest := max(map(len, captions))) > MAX_CHARACTERS:
            raise DataError(f"caption of {longest} characters")
        fields = self.shards.selection.fields
        weight = fields.weigh(sample.fields, rule, sample.caption_number) if fields.weight else 1.0
        further_texts = fields.further_texts(sample.fields)
        features = self.teacher.find(sample.image, captions[0]) if self.teacher is not None else None
        number = sample_id - sample.caption_number  # of the first sample with this image
        if self.backbone is not None:
            self.backbone.check_sample(number)
        if self.backbone is not None and self.backbone.stores_images:
            part.views.append(self.backbone.find_view(number, epoch + sample.caption_number))
            part.traits.add(part.views[-1].traits)
        else:
            self._add_image(row, sample.image, random_of(self.order.seed, CROP, epoch, sample_id), part)
        part.captions += captions
        part.texts += self._drop_words(captions, epoch, sample_id)
        if self._has_negatives:
            wrong = rule.wrong_captions(sample.fields) or captions
            random = random_of(self.order.seed, NEGATIVE, epoch, sample_id)
            part.negatives.append(wrong[int(random.integers(len(wrong)))][:MAX_CHARACTERS])
        part.numbers.append(number)
        part.further_texts.append([text[:MAX_CHARACTERS] for text in further_texts])
        if fields.weight:
            part.weights.append(weight)
        if fields.same:
            group = fields.group(sample.fields)
            part.groups.append(hash_text(group) if group else -1 - number)
        if features is not None:
            part.features.append(features)

    def _add_image(self, row: int, image: bytes, random: np.random.Generator, part: BatchPart) -> None:
        size = plain_jpeg_size(image) if self.decode_later else None
        traits = Traits() if size is None else Traits(rotated=jpeg_orientation(image) != 1)
        if size is not None and not (traits.rotated and self.decoding.upright):
            recipe = draw_recipe(*size, self.augmentation, random)
            part.undecoded.append(JpegOfRow(row=row, data=image, size=size, recipe=recipe))
        else:
            traits = training_pixels(
                image,
                image_size=part.images.shape[-1],
                augmentation=self.augmentation,
                random=random,
                out=part.images[row],
                decoding=self.decoding,
                patches=self.patches,
            )
        part.traits.add(traits)

    def _drop_words(self, captions: Sequence[str], epoch: int, sample_id: int) -> Sequence[str]:
        if not self.text_dropout:
            return captions
        random = random_of(self.order.seed, WORDS, epoch, sample_id)
        prefix = self.shards.selection.captions.prefix
        return [
            prefix + drop_words(caption.removeprefix(prefix), self.text_dropout, random)
            for caption in captions
        ]


class _Batches(Dataset[LoaderBatch | DataError]):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._ahead: tuple[list[int], list[int]] = [], []

    def __getitem__(self, step: int) -> LoaderBatch | DataError:
        shards = self.loader.shards
        try:
            if shards.cache is not None:
                self._fetch_ahead(step)
            return self.loader.batch(step)
        except DataError as error:
            return error  # raised in the main process, where its message stays one line

    def _fetch_ahead(self, step: int) -> None:
        loader = self.loader
        ahead = loader.order.shards_ahead(step, rank=loader.rank, world_size=loader.world_size)
        if ahead == self._ahead:
            return
        self._ahead = ahead
        worker = get_worker_info()
        first = loader.rank * 7 + (worker.id if worker else 0)  # processes start at different shards
        rotated = [part[first % len(part) :] + part[: first % len(part)] for part in ahead]
        loader.shards.fetch_ahead([*rotated[0], *rotated[1]])


# --------------------------------------------------------------------------------------------------------------
# Batches on the device, prefetched by one step: once the computation of a step is launched, ``prefetch`` takes the
# next batch from the loader and starts to copy it on a separate stream. No threads are used. On a CPU, batches are
# not copied.


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSeconds:
    """Time spent on batches.

    Attributes:
        waiting: waiting for the loader.
        transfer: copying from host to device, including decoding JPEGs there. On a GPU this overlaps with the
            computation.
    """

    waiting: float = 0.0
    transfer: float = 0.0


class DeviceBatches(Iterator[LoaderBatch]):
    """The batches of a loader on a device, for steps ``start`` to ``stop - 1``.

    On a GPU two batches exist at a time: the last one returned and, after ``prefetch``, the next one. An error of
    the loader takes effect at its own step, not at the previous one: if the data are at fault, that batch is a
    placeholder, as are all later ones; other errors are raised.
    """

    def __init__(self, loader: Loader, start: int, stop: int, device: torch.device) -> None:
        self._loader = loader
        self._device = device
        self._step = start  # of the next batch that is returned
        self._loaded_step = start  # of the next batch from the loader
        self._batches = loader.batches(start, stop)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: tuple[LoaderBatch, torch.cuda.Event] | Exception | None = None
        self._placeholder: LoaderBatch | None = None  # once there was an error
        self._waiting = self._transfer = 0.0
        self._timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # start and end of transfers

    def __next__(self) -> LoaderBatch:
        if self._placeholder is not None:
            return self._placeholder
        try:
            batch = self._take()
        except DataError as error:
            batch = self._loader.placeholder(self._step, error).to(self._device)
            self._placeholder = replace(batch, bad=())  # bad samples count once
        self._step += 1
        return batch

    def _take(self) -> LoaderBatch:
        if self._stream is None:
            batch = self._next()
            began = time.perf_counter()
            batch = self._loader.on_device(batch, self._loaded_step - 1, self._device)
            self._transfer += time.perf_counter() - began
            return batch
        now = self._ahead or self._fetch(self._stream)
        self._ahead = None
        if isinstance(now, Exception):
            raise now
        batch, arrived = now
        current = torch.cuda.current_stream(batch.images.device)
        current.wait_event(arrived)
        for tensor in batch.tensors():
            tensor.record_stream(current)  # otherwise its memory could be reused while it is read
        return batch

    def prefetch(self) -> None:
        """Take the next batch from the loader and start to copy it to the GPU, decoding JPEGs there.

        Call this when the work of the current step is launched: the GPU is busy while the host waits here.
        """
        if self._stream is not None and self._ahead is None and self._placeholder is None:
            self._ahead = self._fetch(self._stream)

    def close(self) -> None:
        """End the loader's workers and drop the next batch."""
        self._ahead = None
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()

    def seconds(self) -> InputSeconds:
        """Return the time spent since the last call.

        The GPU times transfers, without synchronization; a transfer still in progress is included in the next call.
        """
        running = []
        for began, ended in self._timed:
            if ended.query():
                self._transfer += began.elapsed_time(ended) / 1000
            else:
                running.append((began, ended))
        spent = InputSeconds(waiting=self._waiting, transfer=self._transfer)
        self._timed = running
        self._waiting = 0.0
        self._transfer = 0.0
        return spent

    def _next(self) -> LoaderBatch:
        began = time.perf_counter()
        try:
            batch = next(self._batches)
        finally:
            self._waiting += time.perf_counter() - began
        self._loaded_step += 1
        return batch

    def _fetch(self, stream: torch.cuda.Stream) -> tuple[LoaderBatch, torch.cuda.Event] | Exception:
        """Take a batch from the loader and start copying it; errors are returned, because the previous
        batch is valid."""
        try:
            batch = self._next()
            with torch.cuda.stream(stream):
                began, arrived = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record(stream)
                batch = self._loader.on_device(batch, self._loaded_step - 1, self._device)
                arrived.record(stream)
        except Exception as error:
            return error
        self._timed.append((began, arrived))
        return batch, arrived

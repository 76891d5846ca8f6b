"""Batches of one rank: read, decode, crop, tokenize and collate samples in worker processes."""

import atexit
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from clipkit.config import DataConfig, DistillConfig, SmallConfig
from clipkit.errors import CheckpointError, ConfigError, DataError
from clipkit.files import CountProgress
from clipkit.model import MAX_CHARACTERS, Preprocess
from clipkit.samples import (
    Color,
    Decoding,
    PixelRangeError,
    TraitCounts,
    Traits,
    TruncatedError,
    color_of,
    format_pixel_range,
    jpeg_orientation,
    parse_pixel_range,
    plain_jpeg_size,
)
from clipkit.samples.remote import is_remote, read_text, shard_cache
from data.augment import (
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
from data.captions import DRAW_CAPTIONS, TEXT, CaptionRule, Selection
from data.corpora.builtin import BUILTIN, end_with_parent
from data.order import Order
from data.scores.table import scored_filters
from data.shards.manifest import Manifest, make_manifest, reject_unknown_negatives
from data.shards.samples import Shards
from data.shards.sources import find_shards
from data.shards.teacher import FoundRow, StoredFeatures, TeacherFeatures

__all__ = [
    "BadSample",
    "Batch",
    "BatchError",
    "DeviceBatches",
    "InputSeconds",
    "Loader",
    "Packed",
    "Stage",
    "Starvation",
    "Workers",
    "caption_hash",
    "ids_and_identities",
    "ignore_signals",
    "open_training_data",
    "other_data",
    "other_teacher",
    "packed_images",
    "resumed_preprocess",
    "small_stages",
    "stage_at",
    "teacher_features",
    "token_lengths",
    "trained_preprocess",
]


# --------------------------------------------------------------------------------------------------------------
# Training data: its manifest, a teacher's stored features, and how ``python -m data pack`` processed its images.

_CARD_BYTES = 1 << 20


def open_training_data(
    settings: DataConfig,
    recorded: Path,
    *,
    rank0: bool,
    resumed: bool,
    broadcast: Callable[[bytes], bytes],
) -> Shards:
    """Open the shards of a training run; must be called on all ranks.

    Args:
        settings: sources and selection of samples.
        recorded: file in the run folder where rank 0 stores the manifest.
        rank0: whether this is rank 0, which reads the indexes of the shards.
        resumed: whether the run has a checkpoint; the data must then equal the recorded data.
        broadcast: returns the bytes of rank 0 on every rank.

    Raises:
        DataError: there are no shards, or they cannot be read.
        CheckpointError: the run was started with other data.
    """
    filters, scores = scored_filters(settings.filters, settings.scores)
    selection = Selection(
        filters=filters,
        scores=scores,
        captions=CaptionRule(
            fields=settings.captions,
            choice=settings.caption_choice,
            weights=settings.caption_weights,
            templates=settings.caption_templates,
            prefix=settings.caption_prefix,
            count=settings.caption_count,
            negatives=settings.negatives,
        ),
        truncated=settings.truncated,
        fraction=settings.fraction,
    )
    cache = shard_cache(settings.sources, settings.cache_gb)
    content = b""
    if rank0:
        run = recorded.parent
        try:
            sources = [find_shards(source) for source in settings.sources]
        except DataError as error:
            if not resumed:
                raise
            raise DataError(
                f"{error}; if the data of {run} was moved, set data.train to its new location; it is compared with "
                "the recorded data"
            ) from error
        with CountProgress("counting shards", total=sum(map(len, sources)), shown=True) as progress:
            try:
                manifest = make_manifest(sources, selection, cache=cache, progress=progress.show)
            except TruncatedError as error:
                raise DataError(f"{error}, or set data.truncated=use to train on its intact part") from error
        reject_unknown_negatives([shard for source in sources for shard in source], selection, cache)
        earlier = Manifest.load(recorded)
        if earlier is not None and resumed:
            if changes := manifest.changes_since(earlier):
                raise other_data(run, "; ".join(changes))
            if unknown := manifest.not_compared(earlier):
                print(
                    f"note: {unknown:,} of {len(manifest):,} shards have a different or no modification time, "
                    "inode or etag, and no recorded digest of their content: only keys and sizes of their "
                    "samples were compared with the recorded data",
                    file=sys.stderr,
                )
            manifest = manifest.with_counts_of(earlier)
        manifest.save(recorded)
        content = manifest.to_bytes()
    shared = Manifest.from_bytes(broadcast(content))
    assert shared is not None
    return Shards(shared, selection, cache=cache)


def teacher_features(settings: DistillConfig, shards: Shards, *, rank0: bool) -> StoredFeatures | None:
    """Open a teacher's stored features, if any are configured; rank 0 checks that samples have features.

    Raises:
        DataError: features are missing, or the files are invalid.
    """
    if not settings.features:
        return None
    features = StoredFeatures(Path(settings.features), Path(settings.text_features))
    if rank0:
        features.check(shards)
    return features


@dataclass(frozen=True, kw_only=True)
class Packed:
    """How ``python -m data pack`` or ``download`` processed the images of a training set, if all sources agree.

    Attributes:
        background: color behind transparent images.
        upright: whether EXIF orientations were applied.
        notes: differences between sources and captions that are not used, with the settings that change this.
    """

    background: Color | None = None
    upright: bool = False
    notes: tuple[str, ...] = ()


def packed_images(
    settings: DataConfig, manifest: Manifest, *, rank0: bool, broadcast: Callable[[bytes], bytes]
) -> Packed:
    """Read how ``data pack`` or ``download`` stored the images. Must be called on all ranks.

    Built-in datasets are skipped.

    Args:
        settings: the sources.
        manifest: their shards.
        rank0: whether this is rank 0, which reads the records.
        broadcast: returns the bytes of rank 0 on every rank.
    """
    found: list[tuple[Color | None, bool, int]] = []
    if rank0:
        folders: dict[str, None] = {}  # in order, each once
        ends = accumulate(manifest.sources)
        for source, count, end in zip(settings.sources, manifest.sources, ends, strict=True):
            for shard in () if source in BUILTIN else map(manifest.urls.__getitem__, range(end - count, end)):
                is_stream = shard.startswith("pipe:") or "?" in shard
                folders["" if is_stream else shard.rpartition("/")[0]] = None
        found = [_packed(folder) for folder in folders]
    stated = json.loads(broadcast(json.dumps(found).encode()))
    backgrounds = {None if color is None else (color[0], color[1], color[2]) for color, _, _ in stated}
    uprights = {upright for _, upright, _ in stated}
    most_captions = max((captions for _, _, captions in stated), default=1)
    notes = []
    if len(backgrounds) > 1 and not settings.background:
        notes.append(
            "note: the sources of data.train were packed with different backgrounds: transparent images are used "
            "unchanged, with their hidden colors; data.background=white blends all of them onto white"
        )
    if len(uprights) > 1 and settings.upright == "auto":
        notes.append(
            "note: some sources of data.train were packed upright and others not: the EXIF orientation of the "
            "others is not applied; data.upright=true applies it"
        )
    if most_captions > 1 and settings.captions == (TEXT,):
        notes.append(
            f"note: images of data.train have up to {most_captions} captions, and training uses only the first of "
            f"each; {DRAW_CAPTIONS} draws one"
        )
    return Packed(
        background=backgrounds.pop() if len(backgrounds) == 1 else None,
        upright=uprights.pop() if len(uprights) == 1 else False,
        notes=tuple(notes),
    )


def _packed(folder: str) -> tuple[Color | None, bool, int]:
    """Return background, orientation and most captions of an image that ``data pack`` or ``download`` recorded.

    Without a record of a folder of shards they are None, False and 1.
    """
    dataset, _, split = folder.rpartition("/")
    record = _read_record(f"{folder}/download.json") if folder else {}
    if not record and split in ("train", "test"):
        record = _read_record(f"{dataset}/card.json")
        if record.get("made_by") != "python -m data pack":
            return None, False, 1
    try:
        background = record.get("background")
        color = color_of(str(background)) if background else None
        most_captions = int(record.get("captions_per_image", [1])[-1])
        return color, record.get("keep_orientation") is False, most_captions
    except (ConfigError, ValueError, TypeError, LookupError):
        return None, False, 1


def _read_record(path: str) -> dict[str, Any]:
    """Read a JSON object; an empty one if that fails."""
    try:
        text = (
            read_text(path, limit=_CARD_BYTES) if is_remote(path) else Path(path).read_text(encoding="utf-8")
        )
        record = json.loads(text or "{}")
    except (OSError, ValueError, RecursionError, DataError):
        return {}
    return record if isinstance(record, dict) else {}


def trained_preprocess(preprocess: Preprocess, settings: DataConfig, packed: Packed) -> Preprocess:
    """Return the preprocessing that a new run trains with and records.

    Args:
        preprocess: of the initial weights.
        settings: background, orientation and pixel range given here take precedence.
        packed: applied otherwise, so that other images are processed like the training images.
    """
    chosen = preprocess.with_decoding(
        background=settings.background or None,
        upright=settings.upright if isinstance(settings.upright, bool) else None,
        pixel_range=None if settings.pixel_range == "auto" else parse_pixel_range(settings.pixel_range),
    )
    if not settings.background and packed.background is not None:
        chosen = replace(chosen, background=packed.background)
    if settings.upright == "auto" and packed.upright:
        chosen = replace(chosen, upright=True)
    return chosen


def resumed_preprocess(preprocess: Preprocess, settings: DataConfig) -> Preprocess:
    """Return the preprocessing of a resumed run, to which a pixel range may be added.

    Args:
        preprocess: of the checkpoint.
        settings: the current settings.

    Raises:
        CheckpointError: the run was trained with another pixel range.
    """
    pixel_range = parse_pixel_range(settings.pixel_range, setting="data.pixel_range")
    if pixel_range in ("auto", preprocess.pixel_range):
        return preprocess
    if preprocess.pixel_range != "auto":
        raise CheckpointError(
            f"data.pixel_range = {format_pixel_range(pixel_range)}, but the run was trained with "
            f"{format_pixel_range(preprocess.pixel_range)}: restore it, or set out=… for a new run"
        )
    return preprocess.with_decoding(pixel_range=pixel_range)


def other_data(run: Path, difference: str) -> CheckpointError:
    """Return the error for resuming a run with other data."""
    return CheckpointError(
        f"{run} was trained on other data: {difference}; restore the data, or set out=… for a new run"
    )


def other_teacher(run: Path, settings: DistillConfig) -> CheckpointError:
    """Return the error for resuming a run with another teacher."""
    setting = "teacher" if settings.teacher else "features"
    source = settings.teacher or settings.features
    return CheckpointError(
        f"{run} was trained with another teacher: distill.{setting} = {source!r} has changed since; restore it, or "
        "set out=… for a new run"
    )


# --------------------------------------------------------------------------------------------------------------
# Batches. Letters: B samples of a rank's part of a batch, S image side in pixels, L tokens of the longest
# caption.

_SUBSTITUTES = 32  # attempts to replace a bad sample
_CROP, _SUBSTITUTE, _CAPTION, _NEGATIVE = range(4)  # purposes of random numbers; part of their seed


@dataclass(frozen=True, kw_only=True, slots=True)
class BadSample:
    """A sample that could not be used, and why."""

    shard: str
    key: str
    cause: str


class BatchError(DataError):
    """No usable sample was found for a row of a batch.

    Args:
        message: the problem of the last sample.
        bad: all bad samples of the batch so far.
    """

    def __init__(self, message: str, bad: tuple[BadSample, ...] = ()) -> None:
        super().__init__(message, bad)  # both, for pickling
        self.bad = bad

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One rank's part of a global batch.

    Attributes:
        images: (B, 3, S, S) uint8, channels last in memory; rows of undecoded images are undefined.
        tokens: (B, L) int64, trimmed to the longest caption of this part.
        lengths: B token counts, including the end of text.
        more: ((K - 1) B, L) int64, the second captions of all images, the third, …, with ``data.caption_count`` K;
            then there are KB ``identities``. ``more_lengths`` are as ``lengths``.
        negatives: (B, L) int64, a wrong caption of each image, or again the caption of an image that has none; None
            without ``data.negatives``. ``negative_lengths`` are as ``lengths``.
        ids: (B,) int64, sample numbers, always on the host; a substitute has the number of the sample it
            replaces.
        identities: (B, 2) int64, number of the image and hash of the caption (see ``caption_hash``): equal for
            samples that share one; a substitute has its own.
        first_row: index of the first sample in the global batch.
        bad: the samples that were replaced.
        traits: how many images are transparent or have an EXIF orientation.
        cut_captions: how many captions are longer than the context length; not counted in a smaller stage.
        undecoded: JPEGs for ``Loader.on_device`` to decode, None if there are none.
        teacher: stored features of the samples, None without a teacher.
        read_seconds: time to read the samples.
        make_seconds: time to make the batch, including reading.
    """

    images: Tensor
    tokens: Tensor
    lengths: tuple[int, ...]
    ids: Tensor
    identities: Tensor
    first_row: int = 0
    bad: tuple[BadSample, ...] = ()
    traits: TraitCounts = field(default_factory=TraitCounts)
    cut_captions: int = 0
    undecoded: Undecoded | None = None
    teacher: TeacherFeatures | None = None
    more: Tensor | None = None
    more_lengths: tuple[int, ...] = ()
    negatives: Tensor | None = None
    negative_lengths: tuple[int, ...] = ()
    read_seconds: float = 0.0
    make_seconds: float = 0.0

    @property
    def rows(self) -> Tensor:
        """(B,) int64, indices of the samples in the global batch."""
        return torch.arange(self.first_row, self.first_row + len(self.ids))

    def pin_memory(self) -> "Batch":
        """Copy to page-locked memory; torch's loader calls this."""
        return self._moved(Tensor.pin_memory)

    def to(self, device: torch.device) -> "Batch":
        """Copy everything but ``ids`` to a device, asynchronously from page-locked memory."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that ``to`` copies."""
        features = () if self.teacher is None else tuple(one for one in self.teacher if one is not None)
        further = (one for one in (self.more, self.negatives) if one is not None)
        return (self.images, self.tokens, self.identities, *further, *features)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> "Batch":
        images, tokens, identities, *features = map(move, self.tensors())
        more = None if self.more is None else features.pop(0)
        negatives = None if self.negatives is None else features.pop(0)
        teacher = TeacherFeatures(*features) if features else None
        return replace(
            self,
            images=images,
            tokens=tokens,
            identities=identities,
            more=more,
            negatives=negatives,
            teacher=teacher,
        )


def caption_hash(caption: str) -> int:
    """Return 63 bits of a caption, equal in every process; white space and case are ignored."""
    folded = " ".join(caption.casefold().split()).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(folded, digest_size=8).digest(), "little") >> 1


def ids_and_identities(
    ids: npt.NDArray[np.int64], images: list[int], captions: list[str]
) -> tuple[Tensor, Tensor]:
    """Return a batch's ``ids`` and ``identities`` in one storage, because each storage sent to another
    process takes a file descriptor."""
    count = len(ids)
    numbers = np.empty(count + 2 * len(captions), dtype=np.int64)
    numbers[:count] = ids
    numbers[count::2] = images
    numbers[count + 1 :: 2] = [caption_hash(caption) for caption in captions]
    both = torch.from_numpy(numbers)
    return both[:count], both[count:].view(-1, 2)


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
    size, length = small.image_size or image_size, small.context_length or context_length
    return (Stage(until_step=small.steps, image_size=size, context_length=length),)


def stage_at(stages: Sequence[Stage], step: int) -> Stage | None:
    """Return the stage of a step; None after the last stage."""
    return next((stage for stage in stages if step < stage.until_step), None)


@dataclass(frozen=True, kw_only=True)
class Loader:
    """The batches of one rank.

    A batch is a function of (seed, step, rank, world_size), so the loader has no state: starting at step n gives
    the same batches as an uninterrupted run.

    Args:
        shards: the samples.
        order: their order.
        image_size: S.
        tokenize: captions → (B, L) int64; with stages it must have ``of_length``, and to count captions that
            are cut, ``count_cut``, like the tokenizers of models.
        augmentation: random crops and colors.
        decoding: handling of depth, transparency and orientation.
        rank: of this process.
        world_size: number of ranks.
        num_workers: processes that prefetch batches; 0 creates batches in this process.
        pin_memory: copy batches to page-locked memory.
        decode_later: leave plain JPEGs to ``on_device``, except those that must be rotated.
        stages: smaller sizes for the first steps; the crops are the same at every size.
        teacher: stored features of the samples.

    Raises:
        ConfigError: there are more ranks than samples in a batch, or stages are invalid.
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
    teacher: StoredFeatures | None = None
    _tokenizers: dict[int, Callable[[Sequence[str]], Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self.order.part(self.rank, self.world_size)
        before = 0
        for stage in self.stages:
            if stage.until_step <= before:
                raise ConfigError(
                    f"stages: a stage ends at step {stage.until_step}, not after step {before}: each must end "
                    "after the previous one"
                )
            if stage.image_size < 1 or stage.context_length < 1:
                raise ConfigError(
                    f"stages: image_size = {stage.image_size}, context_length = {stage.context_length}: expected "
                    "at least 1 pixel and 1 token"
                )
            before = stage.until_step
            tokenizer: Any = self.tokenize  # loaded once, because some load slowly
            self._tokenizers[stage.context_length] = tokenizer.of_length(stage.context_length)

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield the batches of steps ``start`` to ``stop - 1``.

        Raises:
            BatchError: no usable replacement was found for a bad sample, or a deep image has no pixel range.
            DataError: a worker was killed.
        """
        if self.num_workers:
            preload(self.augmentation)
        with warnings.catch_warnings():  # the user may choose more workers than cores
            warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
            loader: DataLoader[Batch | DataError] = DataLoader(
                _Batches(self),
                batch_size=None,
                sampler=range(start, stop),
                num_workers=self.num_workers,
                pin_memory=self.pin_memory,
                prefetch_factor=4 if self.num_workers else None,
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

    def batch(self, step: int) -> Batch:
        """Return this rank's part of the batch of a step (from 0)."""
        began = time.perf_counter()
        stage = stage_at(self.stages, step)
        draw = self.order.batch(step, rank=self.rank, world_size=self.world_size)
        part = _Part(images=empty_batch(len(draw.ids), stage.image_size if stage else self.image_size))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # waking all cores for each image takes longer than resizing it
        try:
            for row, (number, epoch) in enumerate(zip(draw.ids.tolist(), draw.epochs.tolist(), strict=True)):
                self._fill(row, number, epoch, part)
        finally:
            torch.set_num_threads(threads)
        count = self.shards.selection.captions.count
        captions = [one for number in range(count) for one in part.captions[number::count]]
        texts = captions + part.negatives
        tokens = (self._tokenizers[stage.context_length] if stage else self.tokenize)(texts)
        lengths = token_lengths(tokens)
        count_cut = getattr(self.tokenize, "count_cut", None)
        cut = count_cut(captions, tokens[: len(captions)]) if count_cut and not stage else 0
        rows = len(draw.ids)
        tokens, more, negatives = tokens.split([rows, len(captions) - rows, len(part.negatives)])
        ids, identities = ids_and_identities(draw.ids, part.numbers * count, captions)
        return Batch(
            images=part.images,
            tokens=tokens,
            lengths=lengths[:rows],
            ids=ids,
            identities=identities,
            first_row=draw.first_row,
            bad=tuple(part.bad),
            traits=part.traits,
            cut_captions=cut,
            undecoded=Undecoded.of(part.undecoded) if part.undecoded else None,
            teacher=None if self.teacher is None else self.teacher.read(part.features),
            more=more if count > 1 else None,
            more_lengths=lengths[rows : len(captions)],
            negatives=negatives if self._with_negatives else None,
            negative_lengths=lengths[len(captions) :],
            read_seconds=part.read_seconds,
            make_seconds=time.perf_counter() - began,
        )

    def placeholder(self, step: int, error: DataError) -> Batch:
        """Return a batch of zeros for a step whose batch cannot be created.

        A rank computes on it until all ranks have agreed to stop, because the others wait for it in collectives.
        The result must not be used.

        Args:
            step: number of the batch, from 0.
            error: why the batch cannot be created; may list its bad samples.
        """
        stage = stage_at(self.stages, step)
        draw = self.order.batch(step, rank=self.rank, world_size=self.world_size)
        count, ids = len(draw.ids), torch.from_numpy(draw.ids)
        more = self.shards.selection.captions.count - 1
        return Batch(
            images=empty_batch(count, stage.image_size if stage else self.image_size).zero_(),
            tokens=torch.zeros(count, 1, dtype=torch.int64),
            lengths=(1,) * count,
            ids=ids,
            identities=torch.stack([ids, ids], dim=1).repeat(more + 1, 1),
            first_row=draw.first_row,
            bad=error.bad if isinstance(error, BatchError) else (),
            teacher=None if self.teacher is None else self.teacher.zeros(count),
            more=torch.zeros(more * count, 1, dtype=torch.int64) if more else None,
            more_lengths=(1,) * (more * count),
            negatives=torch.zeros(count, 1, dtype=torch.int64) if self._with_negatives else None,
            negative_lengths=(1,) * count if self._with_negatives else (),
        )

    @property
    def _with_negatives(self) -> bool:
        return bool(self.shards.selection.captions.negatives)

    def names(self, ids: Tensor | Sequence[int]) -> list[tuple[str, str]]:
        """Return shard and key of samples; the key is empty if it is no longer known."""
        return [self.shards.locate(int(number)) for number in ids]

    def on_device(self, batch: Batch, step: int, device: torch.device) -> Batch:
        """Copy the batch of a step to a device and decode its remaining JPEGs there.

        If one fails to decode, the whole batch is created again without ``decode_later``, which replaces the bad
        sample.

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

    def _fill(self, row: int, number: int, epoch: int, part: "_Part") -> None:
        """Add a sample; a bad one is replaced by a sample determined by (seed, epoch, number).

        Deep images without a pixel range are not replaced, because none of them can be used.
        """
        substitutes = None
        chosen = number
        for _ in range(_SUBSTITUTES):
            try:
                self._add(row, chosen, epoch, part)
                return
            except PixelRangeError as error:
                shard, key = self.shards.locate(chosen)
                raise BatchError(f"{key} in {shard}: {error}", tuple(part.bad)) from error
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

    def _add(self, row: int, number: int, epoch: int, part: "_Part") -> None:
        """Add a sample; if this raises DataError, the lists of the part are unchanged."""
        began = time.perf_counter()
        sample = self.shards.read(number)
        part.read_seconds += time.perf_counter() - began
        rule = self.shards.selection.captions
        random = random_of(self.order.seed, _CAPTION, epoch, sample.id) if rule.draws else None
        if rule.count > 1:
            captions = rule.several(sample.caption, sample.meta, random)
        else:
            caption = rule.caption(sample.caption, sample.meta, sample.caption_number, random)
            captions = [] if caption is None else [caption]
        if not captions:
            raise DataError(
                f"no caption in {' or '.join(rule.fields)}" if rule.reads_json else "empty caption"
            )
        if (longest := max(map(len, captions))) > MAX_CHARACTERS:
            raise DataError(f"caption of {longest} characters")
        features = self.teacher.find(sample.image, captions[0]) if self.teacher is not None else None
        random = random_of(self.order.seed, _CROP, epoch, number)
        size = plain_jpeg_size(sample.image) if self.decode_later else None
        traits = Traits() if size is None else Traits(rotated=jpeg_orientation(sample.image) != 1)
        if size is not None and not (traits.rotated and self.decoding.upright):
            recipe = draw_recipe(*size, self.augmentation, random)
            part.undecoded.append(JpegOfRow(row=row, data=sample.image, size=size, recipe=recipe))
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
        part.captions += captions
        if self._with_negatives:
            wrong = rule.wrong_captions(sample.meta) or captions
            random = random_of(self.order.seed, _NEGATIVE, epoch, sample.id)
            part.negatives.append(wrong[int(random.integers(len(wrong)))][:MAX_CHARACTERS])
        part.numbers.append(number - sample.caption_number)  # of the first sample with this image
        if features is not None:
            part.features.append(features)


@dataclass(kw_only=True, slots=True)
class _Part:
    """A batch under construction."""

    images: Tensor
    captions: list[str] = field(default_factory=list)  # all of an image next to each other
    negatives: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    features: list[FoundRow] = field(default_factory=list)
    bad: list[BadSample] = field(default_factory=list)
    traits: TraitCounts = field(default_factory=TraitCounts)
    undecoded: list[JpegOfRow] = field(default_factory=list)
    read_seconds: float = 0.0


class _Batches(Dataset["Batch | DataError"]):
    """Batches as a map-style dataset: a worker makes whole batches."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._ahead: tuple[list[int], list[int]] = [], []

    def __getitem__(self, step: int) -> "Batch | DataError":
        shards = self.loader.shards
        try:
            if shards.cache is not None and (ahead := self.loader.order.shards_ahead(step)) != self._ahead:
                self._ahead = ahead
                worker = get_worker_info()
                first = self.loader.rank * 7 + (
                    worker.id if worker else 0
                )  # processes start at different shards
                rotated = [part[first % len(part) :] + part[: first % len(part)] for part in ahead]
                shards.fetch_ahead([*rotated[0], *rotated[1]])
            return self.loader.batch(step)
        except DataError as error:
            return error  # raised in the main process, where its message stays one line


# --------------------------------------------------------------------------------------------------------------
# Worker processes: how they start, end, and are killed.
#
# Workers ignore Ctrl-C and SIGTERM, which may reach the whole process group while the trainer still needs
# batches for the current step. Only SIGKILL ends them early.

T = TypeVar("T")
_LIKELY_CAUSE = {
    int(signal.SIGKILL): ", probably out of memory: lower data.workers or batch_size",
    int(
        signal.SIGBUS
    ): ", probably out of shared memory (/dev/shm): enlarge it, or lower data.workers or batch_size",
}
# Iterators with a killed worker. Torch takes locks when it ends an iterator, and the killed worker may have held
# one, so these are kept until Python exits.
_abandoned: list[Iterator[Any]] = []


def ignore_signals(worker: int) -> None:
    """Initialize a worker: ignore signals, and exit when the trainer exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()


class Workers(Generic[T]):
    """One iteration over a ``DataLoader`` that ends its workers and never waits for a killed one.

    Torch detects a killed worker by SIGCHLD and raises wherever the main thread is. Here the signal raises only in
    ``next``, and not while torch cleans up after an error of its own, which ``next`` raises soon after.
    """

    def __init__(self, loader: DataLoader[T]) -> None:
        self._iterator: Iterator[T] | None = None
        self._waiting = False
        self._owner = os.getpid()
        self._earlier = signal.getsignal(signal.SIGCHLD)
        self._processes: list[BaseProcess] = []
        others = set(multiprocessing.active_children())
        try:
            self._iterator = iter(loader)
        finally:
            self._processes = [one for one in multiprocessing.active_children() if one not in others]
            if self._iterator is None:  # a worker was killed already, or Ctrl-C
                try:
                    self._check()
                finally:
                    self._kill()
        if self._processes:
            self._handle(self._on_child)
        atexit.register(self.close)  # runs before multiprocessing's own hook, which waits for the workers

    def next(self) -> T | None:
        """Return the next batch, None after the last.

        Raises:
            DataError: a worker was killed, or ended by itself.
        """
        assert self._iterator is not None
        self._waiting = True
        try:
            self._check()
            return next(self._iterator, None)
        except Exception:  # a broken connection raises various errors in torch and multiprocessing
            # the connections of a killed worker break before its exit status is known
            sentinels = {one.sentinel: one for one in self._processes}
            for broken in wait(list(sentinels), timeout=1) if sentinels else []:
                assert type(broken) is int
                sentinels[broken].join(timeout=5)
            self._check()
            raise
        finally:
            self._waiting = False

    def close(self) -> None:
        """End the workers; kill those that do not end by themselves."""
        atexit.unregister(self.close)
        if self._iterator is None or os.getpid() != self._owner:
            return
        if self._processes:
            self._handle(self._earlier)
        if any(one.exitcode for one in self._processes):
            _abandoned.append(self._iterator)
        still = weakref.ref(self._iterator)
        self._iterator = None  # torch ends the workers with it
        if (held := still()) is not None:  # a traceback refers to it, too
            _abandoned.append(held)
        self._kill()

    def _on_child(self, number: int, frame: FrameType | None) -> None:
        if self._waiting and sys.exception() is None:
            self._check()
        if callable(self._earlier):
            with suppress(RuntimeError):  # torch's handler, which also knows our workers
                self._earlier(number, frame)

    def _check(self) -> None:
        killed = [one for one in self._processes if one.exitcode]  # None while alive, 0 if torch ended it
        if killed:
            for one in self._processes:  # at once: they would print errors about broken connections
                one.kill()
            status = killed[0].exitcode or 0
            how = f"was killed (signal {-status})" if status < 0 else f"ended (status {status})"
            raise DataError(f"a loader process {how}{_LIKELY_CAUSE.get(-status, '')}") from None

    def _kill(self) -> None:
        for one in self._processes:
            one.kill()
        for one in self._processes:
            one.join(timeout=10)

    @staticmethod
    def _handle(handler: Any) -> None:
        # only in the main thread, and only a handler known to Python can be restored
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGCHLD, handler)


# --------------------------------------------------------------------------------------------------------------
# Batches on the device, prefetched by one step: returning a batch takes the next one from the loader and starts to
# copy it on a separate stream while the model computes. No threads are used. On a CPU, batches are not copied.


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


class DeviceBatches(Iterator[Batch]):
    """The batches of a loader on a device, for steps ``start`` to ``stop - 1``.

    On a GPU two batches exist at a time: the last one returned and the next one. An error of the loader is
    raised at its own step, not at the previous one.

    Args:
        loader: makes the batches; page-locked ones (``pin_memory``) are copied asynchronously.
        start: first step.
        stop: the step after the last.
        device: of the model.

    Raises:
        DataError: from ``next``, as ``Loader.batches``.
    """

    def __init__(self, loader: Loader, start: int, stop: int, device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._step = start  # of the next batch from the loader
        self._batches = loader.batches(start, stop)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: tuple[Batch, torch.cuda.Event] | Exception | None = None
        self._waiting = self._transfer = 0.0
        self._timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # start and end of transfers

    def __next__(self) -> Batch:
        if self._stream is None:
            batch = self._next()
            began = time.perf_counter()
            batch = self._loader.on_device(batch, self._step - 1, self._device)
            self._transfer += time.perf_counter() - began
            return batch
        now, self._ahead = self._ahead or self._fetch(self._stream), None
        if isinstance(now, Exception):
            raise now
        self._ahead = self._fetch(self._stream)
        batch, arrived = now
        current = torch.cuda.current_stream(batch.images.device)
        current.wait_event(arrived)
        for tensor in batch.tensors():
            tensor.record_stream(current)  # otherwise its memory could be reused while it is read
        return batch

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
        self._timed, self._waiting, self._transfer = running, 0.0, 0.0
        return spent

    def _next(self) -> Batch:
        began = time.perf_counter()
        try:
            batch = next(self._batches)
        finally:
            self._waiting += time.perf_counter() - began
        self._step += 1
        return batch

    def _fetch(self, stream: torch.cuda.Stream) -> tuple[Batch, torch.cuda.Event] | Exception:
        """Take a batch from the loader and start copying it; errors are returned, because the previous
        batch is valid."""
        try:
            batch = self._next()
            with torch.cuda.stream(stream):
                began, arrived = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record(stream)
                batch = self._loader.on_device(batch, self._step - 1, self._device)
                arrived.record(stream)
        except Exception as error:
            return error
        self._timed.append((began, arrived))
        return batch, arrived


class Starvation:
    """Explain why training waits for batches.

    Args:
        workers: loader processes per rank.
        sources: names of the data sources, without credentials.
    """

    def __init__(self, workers: int, sources: str) -> None:
        self._workers, self._sources = workers, sources
        self._read = self._made = 0.0

    def count(self, batch: Batch) -> None:
        """Count a batch that training waited for."""
        self._read += batch.read_seconds
        self._made += batch.make_seconds

    def cause(self) -> str:
        """Return the slowest part of the input pipeline, and how to speed it up."""
        reading = self._read / self._made if self._made else 0.0
        if reading > 0.5:
            return (
                f"reading from {self._sources} takes {reading:.0%} of the time per batch: use faster storage, set "
                "data.cache_gb large enough for all shards, or raise data.workers"
            )
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        more = f"raise data.workers = {self._workers} ({cores} cores here)"
        if self._workers >= cores:
            more = f"all {cores} cores are in use; store smaller images"
        return (
            f"decoding and cropping images takes {1 - reading:.0%} of the time per batch: {more}, or set "
            "data.scaled_decode, or with a GPU data.nvjpeg"
        )

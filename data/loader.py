"""Batches for one rank: read, decode, crop, tokenize, collate, in worker processes that run ahead.

What a batch holds is in ``data/loader.py``.
"""

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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from clipkit.files.decode import jpeg_orientation, plain_jpeg_size
from clipkit.files.tar import TruncatedError
from clipkit.files.terminal import CountProgress
from clipkit.files.traits import Color, Decoding, TraitCounts, Traits, color_of
from clipkit.model.preprocess import Preprocess
from clipkit.model.tokenizer import MAX_CHARACTERS
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
from data.captions import CaptionRule, Filter, Selection
from data.corpora.builtin import BUILTIN, end_with_parent
from data.order import Order
from data.remote.cache import ShardCache, shard_cache
from data.remote.store import is_remote
from data.shards.manifest import Manifest, make_manifest
from data.shards.samples import Sample, Shards
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
    "check_stages",
    "leave_signals_to_the_trainer",
    "numbers_of",
    "open_training_data",
    "other_data",
    "other_teacher",
    "packed_images",
    "small_stages",
    "stage_at",
    "teacher_features",
    "token_lengths",
    "trained_preprocess",
]


# --------------------------------------------------------------------------------------------------------------
# What a batch holds, and how its samples are told apart.
#
# Letters: B samples of a rank's part of a batch, S image side in pixels, L tokens of the longest caption.


@dataclass(frozen=True, kw_only=True, slots=True)
class BadSample:
    """A sample that could not be used, and why."""

    shard: str
    key: str
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One rank's part of a global batch.

    Attributes:
        images: (B, 3, S, S) uint8, channels last in memory; rows of what is yet to be decoded are undefined.
        tokens: (B, L) int64, trimmed to the longest caption of this part.
        lengths: B token counts, up to a text's largest token and with it; for CLIP's tokenizer, its end of text.
        ids: (B,) int64, sample numbers, always on the host; a bad sample's substitute stands under its own number.
        identities: (B, 2) int64, the number of the picture that is seen and a hash of the caption that is read (see
            ``caption_hash``): equal where two samples share one, of a substitute its own.
        first_row: the place of this part's first sample in the global batch.
        bad: the samples that were replaced.
        traits: how many images are transparent or rotated by EXIF.
        undecoded: JPEGs that ``Loader.on_device`` is to decode; None where there are none.
        teacher: stored features of the same samples, where the loader was given any.
        reading: seconds that its samples' bytes took.
        making: seconds that all of it took.
    """

    images: Tensor
    tokens: Tensor
    lengths: tuple[int, ...]
    ids: Tensor
    identities: Tensor
    first_row: int = 0
    bad: tuple[BadSample, ...] = ()
    traits: TraitCounts = field(default_factory=TraitCounts)
    undecoded: Undecoded | None = None
    teacher: TeacherFeatures | None = None
    reading: float = 0.0
    making: float = 0.0

    @property
    def rows(self) -> Tensor:
        """(B,) int64, the samples' places in the global batch."""
        return torch.arange(self.first_row, self.first_row + len(self.ids))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory; torch's loader calls this."""
        return self._moved(Tensor.pin_memory)

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device, all but ``ids``; a copy from page-locked memory is not waited for."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def tensors(self) -> tuple[Tensor, ...]:
        """All that ``to`` moves."""
        taught = () if self.teacher is None else tuple(one for one in self.teacher if one is not None)
        return (self.images, self.tokens, self.identities, *taught)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> "Batch":
        images, tokens, identities, *taught = map(move, self.tensors())
        teacher = TeacherFeatures(*taught) if taught else None
        return replace(self, images=images, tokens=tokens, identities=identities, teacher=teacher)


def caption_hash(caption: str) -> int:
    """63 bits of a caption, the same in every process; blanks and the case of letters do not count."""
    folded = " ".join(caption.casefold().split()).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(folded, digest_size=8).digest(), "little") >> 1


def numbers_of(ids: npt.NDArray[np.int64], pictures: list[int], captions: list[str]) -> tuple[Tensor, Tensor]:
    """A batch's ``ids`` and ``identities``.

    They share one storage: each takes a file descriptor on its way from a loader process.
    """
    count = len(ids)
    numbers = np.empty(3 * count, dtype=np.int64)
    numbers[:count] = ids
    numbers[count::2] = pictures
    numbers[count + 1 :: 2] = [caption_hash(caption) for caption in captions]
    both = torch.from_numpy(numbers)
    return both[:count], both[count:].view(count, 2)


def token_lengths(tokens: Tensor) -> tuple[int, ...]:
    """(B, L) int64 on the host → how many tokens each row has, up to its largest one and with it."""
    return tuple((tokens.numpy().argmax(axis=1) + 1).tolist())


# --------------------------------------------------------------------------------------------------------------
# Smaller pictures and shorter texts for the first steps of a training.
#
# Training at a small size and finishing at the full one costs a fraction of the compute for nearly the same
# model (CLIPA, Li et al. 2023, https://arxiv.org/abs/2305.07017; its finish is arXiv 2306.15658). On the
# quickstart it costs much: with 900 of 1,200 steps on pictures of 8 pixels, 4 patches, handwriting 45.2% and
# unseen fonts 56.5%, where all at 16 pixels give 62.3% and 84.5% (bench/options.py, one seed).


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """The sizes of the steps before ``until_step``, from the end of the stage before it.

    Attributes:
        until_step: how many steps are made by then, from the beginning of the training.
        image_size: side of the pictures in pixels.
        context_length: longest text in tokens; a longer one is cut and still ends with its end of text.
    """

    until_step: int
    image_size: int
    context_length: int


def small_stages(small: SmallConfig, *, image_size: int, context_length: int) -> tuple[Stage, ...]:
    """The stage that settings name, if any; the sizes that it leaves open are the model's own."""
    if not small.steps:
        return ()
    return (
        Stage(
            until_step=small.steps,
            image_size=small.image_size or image_size,
            context_length=small.context_length or context_length,
        ),
    )


def stage_at(stages: Sequence[Stage], step: int) -> Stage | None:
    """The stage of the batch after ``step`` others; None for the full sizes, once all stages are over."""
    return next((stage for stage in stages if step < stage.until_step), None)


def check_stages(stages: Sequence[Stage]) -> None:
    """See that stages follow one another and have sizes.

    Raises:
        ConfigError: they do not.
    """
    before = 0
    for stage in stages:
        if stage.until_step <= before:
            raise ConfigError(
                f"stages: one ends at step {stage.until_step}, which is not after step {before}: each must end "
                "later than the one before it"
            )
        if stage.image_size < 1 or stage.context_length < 2:
            raise ConfigError(
                f"stages: image_size = {stage.image_size} and context_length = {stage.context_length} do not fit: "
                "at least 1 pixel and 2 tokens"
            )
        before = stage.until_step


# --------------------------------------------------------------------------------------------------------------
# Why a training waits for its batches, in words: from where the processes that make them spend their time.

_MOSTLY = 0.5  # share of the time that is a cause


class Starvation:
    """What batches have cost their makers so far.

    Args:
        workers: loader processes of a rank.
        sources: where the data lie, as they may be shown.
    """

    def __init__(self, workers: int, sources: str) -> None:
        self._workers, self._sources = workers, sources
        self._reading = self._making = 0.0

    def count(self, batch: Batch) -> None:
        """One more batch was waited for."""
        self._reading += batch.reading
        self._making += batch.making

    def cause(self) -> str:
        """What takes longest, and what helps."""
        if self._reading > _MOSTLY * self._making:
            return (
                f"reading from {self._sources} is {self._reading / self._making:.0%} of making a batch: bring them "
                "nearer, give data.cache_gb room for all of them, or raise data.workers"
            )
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        more = f"raise data.workers = {self._workers} ({cores} cores here)"
        if self._workers >= cores:
            more = f"all {cores} cores are in use; store smaller pictures"
        made = 1 - self._reading / self._making if self._making else 1.0
        return (
            f"decoding and cropping pictures is {made:.0%} of making a batch: {more}, or set "
            "data.scaled_decode, or with a GPU data.nvjpeg"
        )


# --------------------------------------------------------------------------------------------------------------
# What a training reads: counted once, the same on all ranks, and as it was when the run began.

_CARD_BYTES = 1 << 20
_OPEN_CLIP = (None, False)  # no background, as it lies in the file


def open_training_data(
    settings: DataConfig, recorded: Path, *, chief: bool, begun: bool, share: Callable[[bytes], bytes]
) -> Shards:
    """Open the shards of a training; all ranks call this.

    Args:
        settings: which shards, and what of them counts.
        recorded: file of the run folder in which rank 0 records the manifest.
        chief: whether this is rank 0, which reads the shards' indexes.
        begun: whether the run has a checkpoint: its data must then be those recorded.
        share: gives the chief's bytes on every rank.

    Raises:
        DataError: there are none, or they cannot be read.
        CheckpointError: the run was begun on other data.
    """
    selection = Selection(
        filters=tuple(map(Filter.of, settings.filters)),
        captions=CaptionRule(
            fields=settings.captions,
            choice=settings.caption_choice,
            weights=settings.caption_weights,
            templates=settings.caption_templates,
            prefix=settings.caption_prefix,
        ),
        truncated=settings.truncated,
    )
    cache = shard_cache(settings.sources, settings.cache_gb)
    content = b""
    if chief:
        content = _counted(settings, selection, cache, recorded, begun=begun).to_bytes()
    manifest = Manifest.from_bytes(share(content))
    assert manifest is not None
    return Shards(manifest, selection, cache=cache)


def _counted(
    settings: DataConfig, selection: Selection, cache: ShardCache | None, recorded: Path, *, begun: bool
) -> Manifest:
    run = recorded.parent
    try:
        sources = [find_shards(source) for source in settings.sources]
    except DataError as error:
        if not begun:
            raise
        raise DataError(
            f"{error}; if the data of {run} were moved, give data.train= the new place: it is checked that they "
            "are the same"
        ) from error
    with CountProgress("counting shards", total=sum(map(len, sources)), shown=True) as progress:
        try:
            manifest = make_manifest(sources, selection, cache=cache, progress=progress.show)
        except TruncatedError as error:
            raise DataError(f"{error}, or set data.truncated=use to train on its intact part") from error
    earlier = Manifest.load(recorded)
    if earlier is not None and begun:
        if changes := manifest.changes_since(earlier):
            raise other_data(run, "; ".join(changes))
        if unknown := manifest.not_compared(earlier):
            print(
                f"note: {unknown:,} of {len(manifest):,} shards have another time, inode or etag than before, or "
                "none, and no digest of their content was recorded: only keys and sizes of their samples were "
                "compared with those that the run began with",
                file=sys.stderr,
            )
        manifest = manifest.with_counts_of(earlier)
    manifest.save(recorded)
    return manifest


def teacher_features(settings: DistillConfig, shards: Shards, *, chief: bool) -> StoredFeatures | None:
    """A teacher's stored features, if settings name any; the chief sees that all samples have some.

    Raises:
        DataError: some have none, or the files are no such features.
    """
    if not settings.features:
        return None
    features = StoredFeatures(Path(settings.features), Path(settings.text_features))
    if chief:
        features.check(shards)
    return features


@dataclass(frozen=True, kw_only=True)
class Packed:
    """What ``python -m data pack`` did to the images of a training set, as far as all sources agree.

    Attributes:
        background: color that transparent images were laid on.
        upright: whether images were turned as an EXIF orientation says.
        notes: what the sources do not agree on, and the setting that decides.
    """

    background: Color | None = None
    upright: bool = False
    notes: tuple[str, ...] = ()


def packed_images(
    settings: DataConfig, manifest: Manifest, *, chief: bool, share: Callable[[bytes], bytes]
) -> Packed:
    """What the cards of packed sets say of their images; built-in sets need nothing. All ranks call this.

    Args:
        settings: the sources.
        manifest: their shards.
        chief: whether this process reads the cards.
        share: gives the chief's bytes on every rank.
    """
    found: list[tuple[Color | None, bool]] = []
    if chief:
        ends = list(accumulate(manifest.sources))
        folders = {
            _packed_folder(manifest.urls[number]): None  # in order, each once
            for source, count, end in zip(settings.sources, manifest.sources, ends, strict=True)
            if source not in BUILTIN
            for number in range(end - count, end)
        }
        found = [_packed(folder) for folder in folders]
    stated = json.loads(share(json.dumps(found).encode()))
    backgrounds = {None if ground is None else (ground[0], ground[1], ground[2]) for ground, _ in stated}
    uprights = {upright for _, upright in stated}
    notes = []
    if len(backgrounds) > 1 and not settings.background:
        notes.append(
            "note: the sources of data.train were packed with different backgrounds: transparent images are used "
            "as they are, with their hidden colors; data.background=white lays all of them on white"
        )
    if len(uprights) > 1 and settings.upright == "auto":
        notes.append(
            "note: some sources of data.train were packed upright and others not: an EXIF orientation is not "
            "applied to the others; data.upright=true applies it"
        )
    return Packed(
        background=backgrounds.pop() if len(backgrounds) == 1 else None,
        upright=uprights.pop() if len(uprights) == 1 else False,
        notes=tuple(notes),
    )


def _packed_folder(shard: str) -> str:
    """The folder whose card describes a shard's images; "" where there is none."""
    folder, _, split = shard.rpartition("/")[0].rpartition("/")
    named = split in ("train", "test") and not shard.startswith("pipe:") and "?" not in shard
    return folder if named else ""


def _packed(folder: str) -> tuple[Color | None, bool]:
    """Background and orientation by the card of a packed set; as open_clip elsewhere."""
    if not folder:
        return _OPEN_CLIP
    try:
        text = _card(f"{folder}/card.json")
        card: Any = json.loads(text or "{}")
        if not isinstance(card, dict) or card.get("made_by") != "python -m data pack":
            return _OPEN_CLIP
        background = card.get("background")
        return color_of(str(background)) if background else None, card.get("keep_orientation") is False
    except (OSError, ValueError, RecursionError, ConfigError, DataError):  # no card, or none that says it
        return _OPEN_CLIP


def _card(url: str) -> str | None:
    if is_remote(url):
        from data.remote.store import read_text

        return read_text(url, limit=_CARD_BYTES)
    return Path(url).read_text(encoding="utf-8")


def trained_preprocess(preprocess: Preprocess, settings: DataConfig, packed: Packed) -> Preprocess:
    """The preprocessing that a new run trains with and records.

    Args:
        preprocess: of the weights that it begins with.
        settings: a background and an orientation that are set win.
        packed: what was done to the images already comes next: it is done to other images of the model, too.
    """
    chosen = preprocess.with_decoding(
        background=settings.background or None,
        upright=settings.upright if isinstance(settings.upright, bool) else None,
    )
    if not settings.background and packed.background is not None:
        chosen = replace(chosen, background=packed.background)
    if settings.upright == "auto" and packed.upright:
        chosen = replace(chosen, upright=True)
    return chosen


def other_data(run: Path, what: str) -> CheckpointError:
    """The error of a run that is to go on with data it was not begun on."""
    return CheckpointError(
        f"{run} was trained on other data: {what}; bring the data back, or set out=… for a new run"
    )


def other_teacher(run: Path, settings: DistillConfig) -> CheckpointError:
    """The error of a run that is to go on with a teacher it was not begun with."""
    setting = "teacher" if settings.teacher else "features"
    source = settings.teacher or settings.features
    return CheckpointError(
        f"{run} was taught by another model: distill.{setting} = {source!r} has changed since; bring back what it "
        "was, or set out=… for a new run"
    )


# --------------------------------------------------------------------------------------------------------------
# The worker processes of a loader: how they start, what happens when one is killed, and how they end.
#
# Workers ignore Ctrl-C and SIGTERM, which may reach the whole process group while the trainer still needs
# batches for the step it is in. So nothing but SIGKILL ends them against their will, and it has to come from
# here.

T = TypeVar("T")
_LIKELY_CAUSE = {
    int(signal.SIGKILL): ", often for want of memory: lower data.workers or batch_size",
    int(
        signal.SIGBUS
    ): ", often for want of shared memory (/dev/shm): enlarge it, or lower data.workers or batch_size",
}
# Iterators of which a worker was killed. Torch takes locks when it ends one, and the killed worker may have left
# with such a lock, so they are never ended: they stay here until Python leaves without ending anything.
_abandoned: list[Iterator[Any]] = []


def leave_signals_to_the_trainer(worker: int) -> None:
    """What each worker does first: ignore signals, and end when the trainer does, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()


class Workers(Generic[T]):
    """One iteration over a ``DataLoader``, whose workers never outlive it nor make it wait for ever.

    Torch notices by SIGCHLD that a worker was killed, and raises wherever the main thread is. Here the same
    signal raises in ``next`` only, at once or when it is called, and not where torch clears up after an error
    of its own, which soon comes to ``next``; without a worker all is as in torch.
    """

    def __init__(self, loader: DataLoader[T]) -> None:
        self._iterator: Iterator[T] | None = None
        self._processes: list[BaseProcess] = []
        self._waiting = False
        self._owner = os.getpid()
        self._earlier = signal.getsignal(signal.SIGCHLD)
        others = set(multiprocessing.active_children())
        try:
            self._iterator = iter(loader)
        except BaseException:  # one was killed already, or Ctrl-C
            self._processes = _new_processes(others)
            self._check()
            raise
        finally:
            if self._iterator is None:
                self._kill()
        self._processes = _new_processes(others)
        if self._processes:
            self._handle(self._on_child)
        atexit.register(self.close)  # before multiprocessing's own hook, which waits for the workers

    def next(self) -> T | None:
        """The next batch, None after the last.

        Raises:
            DataError: a worker was killed, or has ended without being asked to.
        """
        assert self._iterator is not None
        self._waiting = True
        try:
            self._check()
            return next(self._iterator, None)
        except Exception:  # whatever a broken connection makes of torch's and multiprocessing's code
            self._wait_for_the_dying()
            self._check()
            raise
        finally:
            self._waiting = False

    def close(self) -> None:
        """End the workers; those that do not end by themselves are killed."""
        atexit.unregister(self.close)
        if self._iterator is None or os.getpid() != self._owner:
            return
        if self._processes:
            self._handle(self._earlier)
        if self._killed():
            _abandoned.append(self._iterator)
        still = weakref.ref(self._iterator)
        self._iterator = None  # torch ends the workers when it goes
        if (held := still()) is not None:  # a traceback holds it too
            _abandoned.append(held)
        self._kill()

    def _on_child(self, number: int, frame: FrameType | None) -> None:
        if self._waiting and sys.exception() is None:
            self._check()
        if callable(self._earlier):
            with suppress(RuntimeError):  # torch's own handler, which knows our workers too
                self._earlier(number, frame)

    def _check(self) -> None:
        if killed := self._killed():
            for one in self._processes:  # at once: they would complain of connections that break
                one.kill()
            status = killed[0].exitcode or 0
            what = f"was killed (signal {-status})" if status < 0 else f"ended (status {status})"
            raise DataError(f"a loader process {what}{_LIKELY_CAUSE.get(-status, '')}") from None

    def _wait_for_the_dying(self) -> None:
        # connections of a worker that is killed break first, and its exit status is known some time later
        sentinels = {one.sentinel: one for one in self._processes}
        for broken in wait(list(sentinels), timeout=1) if sentinels else []:
            assert type(broken) is int
            sentinels[broken].join(timeout=5)

    def _killed(self) -> list[BaseProcess]:
        return [one for one in self._processes if one.exitcode]  # None of the living, 0 of those torch ended

    def _kill(self) -> None:
        for one in self._processes:
            one.kill()
        for one in self._processes:
            one.join(timeout=10)

    @staticmethod
    def _handle(handler: Any) -> None:
        # only the main thread may, and only a handler that Python knows can be put back
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGCHLD, handler)


def _new_processes(others: Collection[BaseProcess]) -> list[BaseProcess]:
    return [one for one in multiprocessing.active_children() if one not in others]


# --------------------------------------------------------------------------------------------------------------

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


# --------------------------------------------------------------------------------------------------------------
# Batches on the device one step ahead: copied on a stream of their own while the model computes.
#
# Nothing here has a thread: when a batch is handed over, the one after it is taken from the loader, so that it
# is copied beside the computation of the step. On a CPU batches come as they are.


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSeconds:
    """What batches have cost.

    Attributes:
        waiting: that the training waited for its loader.
        transfer: that batches took from the host to the device, JPEGs decoded there included. Where there is a
            stream for it, this runs beside the computation and costs no time of its own.
    """

    waiting: float = 0.0
    transfer: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ahead:
    """A batch on its way, or why there is none."""

    batch: Batch | None
    arrived: torch.cuda.Event | None = None
    error: Exception | None = None


class DeviceBatches(Iterator[Batch]):
    """The batches of a loader on a device, for steps ``start`` to ``stop - 1``.

    On a GPU two batches are there at a time: the one that was handed over last, which is the caller's, and the next
    one. An error of the loader comes with the step whose batch it is about, not with the one before.

    Args:
        loader: makes the batches; page-locked ones (``pin``) are copied without waiting.
        start: first step.
        stop: the step after the last.
        device: where the model is.

    Raises:
        DataError: as ``Loader.batches`` does, from ``next``.
    """

    def __init__(self, loader: Loader, start: int, stop: int, device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._step = start  # of the batch that the loader gives next
        self._batches = loader.batches(start, stop)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: _Ahead | None = None
        self._waiting = self._transfer = 0.0
        self._timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # beginnings and ends of transfers

    def __next__(self) -> Batch:
        if self._stream is None:
            batch = self._next()
            began = time.perf_counter()
            batch = self._loader.on_device(batch, self._step - 1, self._device)
            self._transfer += time.perf_counter() - began
            return batch
        now = self._ahead or self._fetch(self._stream)
        self._ahead = None
        if now.error is not None:
            raise now.error
        if now.batch is None:
            raise StopIteration
        self._ahead = self._fetch(self._stream)
        return _received(now)

    def close(self) -> None:
        """End the loader's workers, and let go of the batch that was on its way."""
        self._ahead = None
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()

    def seconds(self) -> InputSeconds:
        """What batches have cost since this was last asked.

        Transfers are timed by the GPU itself and nothing is waited for: one that still runs counts the next time.
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

    def _fetch(self, stream: torch.cuda.Stream) -> _Ahead:
        """Take a batch from the loader and begin to copy it."""
        try:
            batch = self._next()
            with torch.cuda.stream(stream):
                began, arrived = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record(stream)
                batch = self._loader.on_device(batch, self._step - 1, self._device)
                arrived.record(stream)
        except StopIteration:
            return _Ahead(batch=None)
        except Exception as error:  # of whatever kind: the step before has its batch, and is to be finished
            return _Ahead(batch=None, error=error)
        self._timed.append((began, arrived))
        return _Ahead(batch=batch, arrived=arrived)


def _received(ahead: _Ahead) -> Batch:
    """The batch for the stream that computes, which waits until it is there."""
    assert ahead.batch is not None and ahead.arrived is not None
    current = torch.cuda.current_stream(ahead.batch.images.device)
    current.wait_event(ahead.arrived)
    for tensor in ahead.batch.tensors():
        tensor.record_stream(
            current
        )  # else its memory might be taken for another batch while it is still read
    return ahead.batch

"""Encode a stream of items in batches, reading and decoding ahead of the model.

Each item is returned once: in a batch of features, or as a failure with its cause. The content of a batch depends
only on the items, and on a CPU each batch is computed by one core, several batches at a time. Results are therefore
bit-identical for any number of cores, threads and processes. (A matrix product shared by several cores rounds
differently for each number of cores, and waits for the slowest, which is often busy decoding.)

Each item comes with a SHA-256 digest of the bytes read for it, so that a later run can detect whether a file with a
new time or inode has new content. The digest takes about 1% of the time of decoding.

Dimensions: B batch, O embedding dimension, S image side in pixels.
"""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.api import encode_text
from clipkit.errors import ConfigError, DataError
from clipkit.files.traits import NO_TRAITS, TraitCounts, Traits
from clipkit.inference.inputs import Item, Kind, read_caption, read_image
from clipkit.model.clip import CLIP
from clipkit.model.preprocess import Preprocess, pixels_and_traits
from clipkit.model.tokenizer import MAX_CHARACTERS, ClassTokenizer
from clipkit.model.zero_shot import evaluating

__all__ = [
    "PRECISIONS",
    "Failure",
    "FeatureStream",
    "Features",
    "default_workers",
    "one_core_each",
    "pick_device",
    "read_ahead",
]


_MAX_WORKERS = 16

Given = TypeVar("Given")
Made = TypeVar("Made")


def default_workers() -> int:
    """Return the number of threads for this process: its fraction of the cores, at most 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    here = os.environ.get("LOCAL_WORLD_SIZE", "1")  # set by torchrun
    return max(1, min(_MAX_WORKERS, cores // max(1, int(here) if here.isdecimal() else 1)))


def read_ahead(
    work: Callable[[Given], Made], items: Iterable[Given], *, workers: int, ahead: int
) -> Iterator[tuple[Given, Made]]:
    """Yield each item with ``work(item)``, in order.

    Args:
        work: called in threads; its exceptions are raised here, in the order of the items.
        items: consumed as results are consumed, at most ``ahead`` items early.
        workers: number of threads; 0 runs ``work`` in the calling thread.
        ahead: maximum number of results that are pending or ready.
    """
    if workers == 0:
        for item in items:
            yield item, work(item)
        return
    waiting: deque[tuple[Given, Future[Made]]] = deque()
    with one_core_each(workers) as pool:
        for item in items:
            waiting.append((item, pool.submit(work, item)))
            if len(waiting) >= ahead:
                first, made = waiting.popleft()
                yield first, made.result()
        while waiting:
            first, made = waiting.popleft()
            yield first, made.result()


@contextmanager
def one_core_each(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Create a pool of threads that use one core each; by default torch starts a thread per core in each of them.

    Pending work is cancelled on exit.
    """
    threads = torch.get_num_threads()
    # torch applies the number to the calling thread and to all threads started later
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_CPU_BATCH, _GPU_BATCH = 32, 256
_GPU_LANES = 2  # one batch is assembled and copied while the other is computed

Content = TypeVar("Content")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An item that could not be encoded.

    Attributes:
        part: number of its part.
        item: the item.
        cause: why it could not be encoded.
        content: digest of the bytes read, see ``FeatureStream.contents``.
    """

    part: int
    item: Item
    cause: str
    content: bytes


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Features:
    """The features of consecutive items of one part.

    Attributes:
        part: number of the part.
        items: B items.
        captions: B texts; None where there is none or captions were not requested.
        contents: B digests of the bytes read, see ``FeatureStream.contents``.
        rows: (B, O) float32, unit norm.
    """

    part: int
    items: list[Item]
    captions: list[str | None]
    contents: list[bytes]
    rows: npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ready(Generic[Content]):
    """An item prepared for the model."""

    part: int
    item: Item
    content: Content  # (3, S, S) uint8 pixels, or a text
    caption: str | None
    digest: bytes
    traits: Traits = NO_TRAITS


class FeatureStream:
    """Encode images and texts with a model.

    Args:
        model: used in evaluation mode, on its current device.
        batch_size: B; None means 32 on a CPU and 256 elsewhere.
        precision: a key of ``PRECISIONS``, used inside the towers; features are always float32.
        workers: number of threads that read and decode; None means one per core.

    Attributes:
        counts: how many of the images encoded so far are transparent or rotated by EXIF.

    Raises:
        ConfigError: a setting is out of range.
    """

    def __init__(
        self,
        model: CLIP,
        *,
        batch_size: int | None = None,
        precision: str = "fp32",
        workers: int | None = None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"batch_size = {batch_size} must be at least 1")
        if workers is not None and workers < 0:
            raise ConfigError(f"workers = {workers} must not be negative")
        if precision not in PRECISIONS:
            raise ConfigError(f"precision = {precision!r} is not one of {', '.join(PRECISIONS)}")
        self.model, self.precision = model, precision
        self.counts = TraitCounts()
        self.device = next(model.parameters()).device
        on_cpu = self.device.type == "cpu"
        self.batch_size = batch_size or (_CPU_BATCH if on_cpu else _GPU_BATCH)
        self._lanes = torch.get_num_threads() if on_cpu else _GPU_LANES
        self._workers = default_workers() if workers is None else workers

    def run(
        self, items: Iterable[tuple[int, Item]], *, kind: Kind, captions: bool = False
    ) -> Iterator[Features | Failure]:
        """Encode the images or captions of items.

        Args:
            items: each with the number of its part; a batch never spans two parts.
            kind: whether to encode images or captions.
            captions: also return the captions of images.

        Raises:
            ConfigError: a batch does not fit in memory.
            DataError: the model's output is not finite.
        """
        if kind == "caption":
            self.empty(
                kind
            )  # some tokenizers initialize at the first text, which two threads must not do at once
            return self._run(_ready_text, items, self._encode_texts)
        ready = partial(_ready_image, preprocess=self.model.preprocess, captions=captions)
        return self._run(ready, items, self._encode_images)

    def contents(
        self, items: Iterable[tuple[int, Item]], *, kind: Kind, captions: bool = False
    ) -> Iterator[tuple[int, Item, bytes]]:
        """Read items without encoding them, to compare them with those of an earlier run.

        Takes the arguments of ``run``.

        Yields:
            The number of the part, the item, and its digest, which equals that of ``run`` as long as the bytes
            read, or the error, are the same.
        """
        read = partial(_read, kind=kind, captions=captions)
        ahead = self.batch_size * (self._lanes + 1)
        for (part, item), found in read_ahead(read, items, workers=self._workers, ahead=ahead):
            yield part, item, found.digest

    def lines(self, *, background: str | None, upright: bool | None) -> list[str]:
        """Format notes about images encoded so far whose transparency or orientation is ignored.

        Args:
            background: the option given by the user, or None.
            upright: likewise.
        """
        lines = self.counts.lines(
            self.model.preprocess.decoding,
            background="--background white" if background is None else "",
            upright="--upright" if upright is None else "",
        )
        return list(lines.values())

    def empty(self, kind: Kind) -> npt.NDArray[np.float32]:
        """Return features of no item, (0, O); encodes a dummy item to find O."""
        size = self.model.preprocess.image_size
        with evaluating(self.model):
            if kind == "caption":
                tokenizer = self.model.tokenizer
                text = tokenizer.names[0] if isinstance(tokenizer, ClassTokenizer) else ""
                return self._rows(self._encode_texts, [text])[:0]
            return self._rows(self._encode_images, [torch.zeros(3, size, size, dtype=torch.uint8)])[:0]

    def _run(
        self,
        ready: Callable[[tuple[int, Item]], _Ready[Content] | Failure],
        items: Iterable[tuple[int, Item]],
        encode: Callable[[list[Content]], Tensor],
    ) -> Iterator[Features | Failure]:
        ahead = self.batch_size * (self._lanes + 1)
        outcomes = (made for _, made in read_ahead(ready, items, workers=self._workers, ahead=ahead))
        computing: deque[tuple[list[_Ready[Content]], Future[npt.NDArray[np.float32]]]] = deque()
        with evaluating(self.model), one_core_each(self._lanes) as pool:
            for outcome in _batches(outcomes, self.batch_size):
                if isinstance(outcome, Failure):
                    yield outcome
                    continue
                self.counts.add(*(one.traits for one in outcome))
                content = [one.content for one in outcome]
                computing.append((outcome, pool.submit(self._rows, encode, content)))
                if len(computing) > self._lanes:
                    yield _features(*computing.popleft())
            while computing:
                yield _features(*computing.popleft())

    def _rows(
        self, encode: Callable[[list[Content]], Tensor], content: list[Content]
    ) -> npt.NDArray[np.float32]:
        """Encode one batch: B contents → (B, O)."""
        dtype = PRECISIONS[self.precision]
        autocast = torch.autocast(self.device.type, dtype or torch.bfloat16, enabled=dtype is not None)
        try:
            with torch.inference_mode(), autocast:
                rows: npt.NDArray[np.float32] = encode(content).float().cpu().numpy()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"out of memory with --batch-size {self.batch_size}: use a smaller batch size"
            ) from error
        if not np.isfinite(rows).all():
            advice = (
                "its weights are damaged" if dtype is None else "try --precision fp32, or check its weights"
            )
            raise DataError(f"the model's features are not finite in {self.precision}: {advice}")
        return rows

    def _encode_images(self, pixels: list[Tensor]) -> Tensor:
        """(3, S, S) uint8 each → (B, O)."""
        batch = torch.stack(pixels)
        if self.device.type == "cuda":
            batch = batch.pin_memory().to(self.device, non_blocking=True)
        return self.model.encode_image(batch.to(self.device))

    def _encode_texts(self, texts: list[str]) -> Tensor:
        return encode_text(texts, self.model, batch_size=len(texts))


def _batches(
    outcomes: Iterable[_Ready[Content] | Failure], batch_size: int
) -> Iterator[list[_Ready[Content]] | Failure]:
    """Group items of one part until a batch is full or the part ends; failures are yielded immediately."""
    batch: list[_Ready[Content]] = []
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            yield outcome
            continue
        if batch and outcome.part != batch[0].part:
            yield batch
            batch = []
        batch.append(outcome)
        if len(batch) == batch_size:
            yield batch
            batch = []
    if batch:
        yield batch


def _features(batch: list[_Ready[Content]], rows: Future[npt.NDArray[np.float32]]) -> Features:
    return Features(
        part=batch[0].part,
        items=[one.item for one in batch],
        captions=[one.caption for one in batch],
        contents=[one.digest for one in batch],
        rows=rows.result(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """Content of an item: its encoded image or its text, or the cause why it cannot be read."""

    image: bytes = b""
    caption: str | None = None
    cause: str = ""
    digest: bytes


def _read(given: tuple[int, Item], *, kind: Kind, captions: bool) -> _Read:
    _, item = given
    image, caption, cause = b"", None, ""
    try:
        if kind == "image":
            image = read_image(item)
        else:
            caption = read_caption(item)
    except DataError as error:
        cause = str(error)
    if kind == "image" and captions and not cause:
        with suppress(DataError):  # the image is encoded without one
            caption = read_caption(item)
    digest = hashlib.sha256(image)
    digest.update(f"\0{caption}\0{cause}".encode("utf-8", "surrogatepass"))
    return _Read(image=image, caption=caption, cause=cause, digest=digest.digest())


def _ready_image(
    given: tuple[int, Item], *, preprocess: Preprocess, captions: bool
) -> _Ready[Tensor] | Failure:
    part, item = given
    found = _read(given, kind="image", captions=captions)
    cause = found.cause
    if not cause:
        try:
            pixels, traits = pixels_and_traits(found.image, preprocess)
            return _Ready(
                part=part,
                item=item,
                content=pixels,
                caption=found.caption,
                digest=found.digest,
                traits=traits,
            )
        except DataError as error:
            cause = str(error)
    return Failure(part=part, item=item, cause=cause, content=found.digest)


def _ready_text(given: tuple[int, Item]) -> _Ready[str] | Failure:
    part, item = given
    found = _read(given, kind="caption", captions=False)
    text, cause = found.caption or "", found.cause
    if len(text) > MAX_CHARACTERS:
        cause = f"text of more than {MAX_CHARACTERS:,} characters"
    if cause:
        return Failure(part=part, item=item, cause=cause, content=found.digest)
    return _Ready(part=part, item=item, content=text, caption=text, digest=found.digest)


def pick_device(asked: str | None) -> torch.device:
    """Return the requested device, or by default a GPU if there is one; each process of a node gets its own GPU.

    Raises:
        ConfigError: the device is unknown or unavailable.
    """
    name = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.zeros(1, device=device).cpu()  # fails on "meta", whose tensors have no values
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ConfigError(f"cannot use device {name!r}: {str(error).splitlines()[0]}") from error
    return device

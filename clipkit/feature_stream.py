"""From a stream of items to a stream of features, in batches, with reading and decoding ahead of the model.

Every item comes out once: in a batch of features, or as a failure with its cause. What a batch holds follows from
the items alone, and on a CPU each batch is computed by one core, several batches at a time: the same items give the
same bits, whatever the number of cores, threads and processes. (A product of matrices that cores share is rounded
differently by another number of them, and waits for the slowest: while some cores decode, that is all the time.)

Letters: B batch, O embedding dimension, S image side in pixels.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.api import encode_text
from clipkit.errors import ConfigError, DataError
from clipkit.model import CLIP
from clipkit.pictures import Item, Kind, read_caption, read_image
from clipkit.preprocess import Preprocess, batch_of
from clipkit.read_ahead import default_workers, one_core_each, read_ahead
from clipkit.text_input import ClassTokenizer
from clipkit.tokenizer import MAX_CHARACTERS
from clipkit.zero_shot import evaluating

__all__ = ["PRECISIONS", "Failure", "FeatureStream", "Features", "pick_device"]

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_CPU_BATCH, _GPU_BATCH = 32, 256
_GPU_LANES = 2  # one batch is put together and copied while the other is computed

Content = TypeVar("Content")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An item that has no features, and why."""

    part: int
    item: Item
    cause: str


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Features:
    """The features of consecutive items of one part.

    Attributes:
        part: the number that came with the items.
        items: B of them.
        captions: B texts; None where there is none, or none was wanted.
        rows: (B, O) float32, unit norm.
    """

    part: int
    items: list[Item]
    captions: list[str | None]
    rows: npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ready(Generic[Content]):
    """An item that is ready for the model."""

    part: int
    item: Item
    content: Content  # (1, 3, S, S) uint8 of a picture, the text of a text
    caption: str | None


class FeatureStream:
    """Encodes pictures and texts with a model.

    Args:
        model: used in evaluation mode, on the device where it is.
        batch_size: B, items that the model takes at a time; None is 32 on a CPU and 256 elsewhere.
        precision: a key of ``PRECISIONS``, in which the towers run; features are float32 in any case.
        workers: threads that read and decode; None is one a core.

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
            raise ConfigError(f"batch_size = {batch_size}: it must be 1 or more")
        if workers is not None and workers < 0:
            raise ConfigError(f"workers = {workers}: it must be 0 or more")
        if precision not in PRECISIONS:
            raise ConfigError(f"precision = {precision!r}: known are {', '.join(PRECISIONS)}")
        self.model, self.precision = model, precision
        self.device = next(model.parameters()).device
        on_cpu = self.device.type == "cpu"
        self.batch_size = batch_size or (_CPU_BATCH if on_cpu else _GPU_BATCH)
        self._lanes = torch.get_num_threads() if on_cpu else _GPU_LANES
        self._workers = default_workers() if workers is None else workers

    def run(
        self, items: Iterable[tuple[int, Item]], *, kind: Kind, captions: bool = False
    ) -> Iterator[Features | Failure]:
        """Encode the pictures, or the captions, of items.

        Raises:
            ConfigError: a batch does not fit into the memory.
            DataError: the model gives numbers that are not finite.

        Args:
            items: with the number of the part that each belongs to; a batch never spans two parts.
            kind: which of the two.
            captions: whether to give the pictures' captions too.
        """
        if kind == "caption":
            self.nothing(
                kind
            )  # some tokenizers set themselves up at the first text: not in two threads at once
            return self._run(_ready_text, items, self._encode_texts)
        ready = partial(_ready_image, preprocess=self.model.preprocess, captions=captions)
        return self._run(ready, items, self._encode_images)

    def nothing(self, kind: Kind) -> npt.NDArray[np.float32]:
        """Features of no item: (0, O). The model is asked, who alone knows O."""
        size = self.model.preprocess.image_size
        with evaluating(self.model):
            if kind == "caption":
                tokenizer = self.model.tokenizer
                text = tokenizer.names[0] if isinstance(tokenizer, ClassTokenizer) else ""
                return self._rows(self._encode_texts, [text])[:0]
            return self._rows(self._encode_images, [torch.zeros(1, 3, size, size, dtype=torch.uint8)])[:0]

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
                content = [one.content for one in outcome]
                computing.append((outcome, pool.submit(self._rows, encode, content)))
                if len(computing) > self._lanes:
                    yield _arrived(*computing.popleft())
            while computing:
                yield _arrived(*computing.popleft())

    def _rows(
        self, encode: Callable[[list[Content]], Tensor], content: list[Content]
    ) -> npt.NDArray[np.float32]:
        """One batch: B contents → (B, O)."""
        dtype = PRECISIONS[self.precision]
        autocast = torch.autocast(self.device.type, dtype or torch.bfloat16, enabled=dtype is not None)
        try:
            with torch.inference_mode(), autocast:
                rows: npt.NDArray[np.float32] = encode(content).float().cpu().numpy()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"out of memory with --batch-size {self.batch_size}: take a smaller one"
            ) from error
        if not np.isfinite(rows).all():
            raise DataError(
                f"the model gives no finite numbers in {self.precision}: "
                + (
                    "its weights are damaged"
                    if dtype is None
                    else "try --precision fp32, or see to its weights"
                )
            )
        return rows

    def _encode_images(self, pixels: list[Tensor]) -> Tensor:
        """(1, 3, S, S) uint8 each → (B, O)."""
        batch = torch.cat(pixels)
        if self.device.type == "cuda":
            batch = batch.pin_memory().to(self.device, non_blocking=True)
        return self.model.encode_image(batch.to(self.device))

    def _encode_texts(self, texts: list[str]) -> Tensor:
        return encode_text(texts, self.model, batch_size=len(texts))


def _batches(
    outcomes: Iterable[_Ready[Content] | Failure], batch_size: int
) -> Iterator[list[_Ready[Content]] | Failure]:
    """Items of one part put together until a batch is full or the part ends; failures pass at once."""
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


def _arrived(batch: list[_Ready[Content]], rows: Future[npt.NDArray[np.float32]]) -> Features:
    return Features(
        part=batch[0].part,
        items=[one.item for one in batch],
        captions=[one.caption for one in batch],
        rows=rows.result(),
    )


def _ready_image(
    given: tuple[int, Item], *, preprocess: Preprocess, captions: bool
) -> _Ready[Tensor] | Failure:
    part, item = given
    caption = None
    try:
        pixels = batch_of([read_image(item)], preprocess)
    except DataError as error:
        return Failure(part=part, item=item, cause=str(error))
    if captions:
        with suppress(DataError):  # a picture is no worse without
            caption = read_caption(item)
    return _Ready(part=part, item=item, content=pixels, caption=caption)


def _ready_text(given: tuple[int, Item]) -> _Ready[str] | Failure:
    part, item = given
    try:
        text = read_caption(item)
    except DataError as error:
        return Failure(part=part, item=item, cause=str(error))
    if len(text) > MAX_CHARACTERS:
        return Failure(part=part, item=item, cause=f"a text of more than {MAX_CHARACTERS:,} characters")
    return _Ready(part=part, item=item, content=text, caption=text)


def pick_device(asked: str | None) -> torch.device:
    """The device to compute on: what was asked for, else a GPU if there is one; each process of a node its own.

    Raises:
        ConfigError: there is no such device.
    """
    name = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.zeros(1, device=device).cpu()  # "meta" makes tensors, but holds nothing
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device

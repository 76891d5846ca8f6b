"""Encode a stream of items in batches, reading and decoding ahead of the model; and score image–caption pairs.

Each item is returned once: in a batch of features, or as a failure with its cause. The content of a batch depends
only on the items, and on a CPU each batch is computed by one core, with several batches in parallel. Results are
therefore bit-identical for any number of cores, threads and processes. (If several cores share a matrix product,
rounding depends on their number.)

Rounding also depends on the size of a batch. If batches of images are padded to one size, the features of an image
do not depend on the others, and can be taken from an earlier run whose batches were composed differently.

Dimensions: B batch or pairs, O embedding dimension, S image side in pixels, T pixels of a thumbnail, N and M
images.
"""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, normalize

from clipkit.api import encode_text, load
from clipkit.cli import DecodingOptions, LoadOptions, ModelOptions
from clipkit.distributed import select_device
from clipkit.errors import ConfigError, DataError
from clipkit.formats.checkpoint import model_hash
from clipkit.inference.inputs import Item, Kind, read_caption, read_image
from clipkit.inference.storage import ReusableRows, content_digest
from clipkit.model.clip import CLIP
from clipkit.model.cpu import PackedWeights, apply_cpu_settings, open_core_pool
from clipkit.model.preprocess import pixels_and_traits
from clipkit.model.processor import is_faster_in_bfloat16
from clipkit.model.tokenizer import MAX_CHARACTERS, ClassTokenizer
from clipkit.model.zero_shot import evaluation_mode
from clipkit.samples.traits import NO_TRAITS, TraitCounts, Traits

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_CPU_BATCH = 32
_GPU_BATCH = 256
_GPU_LANES = 2  # one batch is prepared and copied while the other is computed
_MAX_WORKERS = 16
THUMBNAIL = 16  # side of the gray thumbnail of the preprocessed image, T = 16 · 16
_LUMA = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)  # ITU-R BT.601

# added to the norm of thumbnails: noise of less than 2 gray levels (32 / sqrt(T)) is not compared
_FLAT = 32.0

Images = npt.NDArray[Any]  # (N,) of the dtype ``PairEncoder.dtype``
T = TypeVar("T")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An item that could not be encoded.

    Attributes:
        digest: ``content_digest`` of the image or text; of no bytes if it cannot be read.
    """

    part: int
    item: Item
    cause: str
    digest: str


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Features:
    """The features of consecutive items of one part.

    Attributes:
        items: B items.
        captions: B texts; None for items without one, or if captions were not requested.
        digests: B values of ``content_digest``, of each image or text.
        rows: (B, O) float32, unit norm.
        thumbnails: (B, T) uint8 of images, if requested; see ``THUMBNAIL``.
        reused: (B,) whether a row is from ``ReusableRows``, whose norm may differ from 1.
    """

    part: int
    items: list[Item]
    captions: list[str | None]
    digests: list[str]
    rows: npt.NDArray[np.float32]
    reused: npt.NDArray[np.bool_]
    thumbnails: npt.NDArray[np.uint8] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ready:
    """An item prepared for the model."""

    part: int = 0
    item: Item
    pixels: Tensor | None = None  # (3, S, S) uint8, of an image
    caption: str | None = None
    digest: str = ""
    traits: Traits = NO_TRAITS
    thumbnail: npt.NDArray[np.uint8] | None = None
    reusable: int | None = None  # number of a row of ``ReusableRows``, instead of pixels


class FeatureStream:
    """Encode images and texts with a model.

    Args:
        model: used in evaluation mode, on its current device; its weights must not change afterwards.
        batch_size: B; None means 32 on a CPU and 256 elsewhere.
        precision: a key of ``PRECISIONS``, used inside the towers; features are always float32.

    Attributes:
        counts: how many of the images encoded so far are transparent or rotated by EXIF.
    """

    def __init__(
        self,
        model: CLIP,
        *,
        batch_size: int | None = None,
        precision: str = "fp32",
        workers: int | None = None,
    ) -> None:
        assert precision in PRECISIONS, precision
        self.model = model
        self.precision = precision
        self._weights = PackedWeights(model)
        self.counts = TraitCounts()
        self.device = next(model.parameters()).device
        on_cpu = self.device.type == "cpu"
        self.batch_size = batch_size or (_CPU_BATCH if on_cpu else _GPU_BATCH)
        self._lanes = torch.get_num_threads() if on_cpu else _GPU_LANES
        if workers is None:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            here = os.environ.get("LOCAL_WORLD_SIZE", "1")  # set by torchrun
            workers = max(1, min(_MAX_WORKERS, cores // max(1, int(here) if here.isdecimal() else 1)))
        self._workers = workers

    @property
    def is_faster_in_bf16(self) -> bool:
        """Whether this CPU would encode much faster in bfloat16; False for ONNX and OpenVINO exports."""
        has_weights = next(self.model.visual.parameters(), None) is not None
        on_cpu = self.device.type == "cpu"
        return has_weights and on_cpu and self.precision == "fp32" and is_faster_in_bfloat16()

    @classmethod
    def from_options(cls, options: ModelOptions) -> "FeatureStream":
        """Load the model and settings given on the command line."""
        apply_cpu_settings()
        model = load_for_inference(options)
        return cls(model, batch_size=options.batch_size, precision=options.precision, workers=options.workers)

    def run(
        self,
        items: Iterable[tuple[int, Item]],
        *,
        kind: Kind,
        captions: bool = False,
        thumbnails: bool = False,
        pad: bool = False,
        reusable: ReusableRows | None = None,
    ) -> Iterator[Features | Failure]:
        """Encode the images or captions of items.

        Args:
            items: items with the numbers of their parts; a batch never spans two parts.
            pad: compute incomplete batches of images at the full size, so that rows do not depend on other images.
        """
        if kind == "caption":  # some tokenizers are initialized by the first text, which is not thread-safe
            self.empty(kind)
        computing: deque[tuple[list[_Ready], Future[npt.NDArray[np.float32]]]] = deque()

        def first_computed() -> Features:
            batch, rows = computing.popleft()
            images = [ready.thumbnail for ready in batch if ready.thumbnail is not None]
            return Features(
                part=batch[0].part,
                items=[ready.item for ready in batch],
                captions=[ready.caption for ready in batch],
                digests=[ready.digest for ready in batch],
                rows=rows.result(),
                reused=np.array([ready.reusable is not None for ready in batch]),
                thumbnails=np.stack(images) if thumbnails else None,
            )

        prepare = partial(
            self._prepare, kind=kind, captions=captions, thumbnails=thumbnails, reusable=reusable
        )
        with evaluation_mode(self.model), open_core_pool(self._lanes) as pool:
            for outcome in _batches(self._read_ahead(prepare, items), self.batch_size):
                if isinstance(outcome, Failure):
                    yield outcome
                    continue
                self.counts.add(*(ready.traits for ready in outcome))
                computing.append((outcome, pool.submit(self._all_rows, outcome, kind, pad, reusable)))
                if len(computing) > self._lanes:
                    yield first_computed()
            while computing:
                yield first_computed()

    def pixel_batches(self, items: Iterable[Item]) -> Iterator[tuple[list[Item], Tensor] | Failure]:
        """Read and preprocess images: batches of items with (B, 3, S, S) uint8 on the model's device."""
        prepare = partial(self._prepare, kind="image", captions=False, thumbnails=False)
        for outcome in _batches(self._read_ahead(prepare, ((0, item) for item in items)), self.batch_size):
            if isinstance(outcome, Failure):
                yield outcome
                continue
            self.counts.add(*(ready.traits for ready in outcome))
            pixels = torch.stack([ready.pixels for ready in outcome if ready.pixels is not None])
            yield [ready.item for ready in outcome], pixels.to(self.device)

    def lines(self, options: DecodingOptions) -> list[str]:
        """Return notes about encoded images that lost information, such as their orientation."""
        lines = self.counts.lines(
            self.model.preprocess.decoding,
            background="--background white" if options.background is None else "",
            upright="--upright" if options.upright is None else "",
        )
        return list(lines.values())

    def empty(self, kind: Kind) -> npt.NDArray[np.float32]:
        """Return an empty array of features, (0, O); encodes a dummy item to determine O."""
        tokenizer = self.model.tokenizer
        text = tokenizer.names[0] if isinstance(tokenizer, ClassTokenizer) else ""
        pixels = torch.zeros(self.model.preprocess.input_shape, dtype=torch.uint8)
        with evaluation_mode(self.model):
            return self._rows([_Ready(item=Item(source="", key=""), pixels=pixels, caption=text)], kind)[:0]

    def _read_ahead(self, work: Callable[[T], Result], items: Iterable[T]) -> Iterator[Result]:
        """Yield ``work(item)`` of each item in order, computed by threads a few batches ahead."""
        if self._workers == 0:
            yield from map(work, items)
            return
        waiting: deque[Future[Result]] = deque()
        with open_core_pool(self._workers) as pool:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= self.batch_size * (self._lanes + 1):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _prepare(
        self,
        numbered: tuple[int, Item],
        *,
        kind: Kind,
        captions: bool,
        thumbnails: bool,
        reusable: ReusableRows | None = None,
    ) -> _Ready | Failure:
        part, item = numbered
        image, caption, cause = _read(item, kind, captions=captions)
        digest = content_digest(image if kind == "image" else (caption or "").encode())
        if reusable is not None and not cause:
            row = reusable.find(digest)
            if row is not None:
                return _Ready(part=part, item=item, caption=caption, digest=digest, reusable=row)
        pixels = None
        traits = NO_TRAITS
        if kind == "image" and not cause:
            try:
                pixels, traits = pixels_and_traits(image, self.model.preprocess)
            except DataError as error:
                cause = str(error)
        elif kind == "caption" and len(caption or "") > MAX_CHARACTERS:
            cause = f"text of more than {MAX_CHARACTERS:,} characters"
        if cause:
            return Failure(part=part, item=item, cause=cause, digest=digest)
        thumbnail = None
        if thumbnails and pixels is not None:
            gray = (pixels.float() * _LUMA).sum(0, keepdim=True)  # (1, S, S)
            thumbnail = adaptive_avg_pool2d(gray, THUMBNAIL).round().to(torch.uint8).flatten().numpy()
        return _Ready(
            part=part,
            item=item,
            pixels=pixels,
            caption=caption,
            digest=digest,
            traits=traits,
            thumbnail=thumbnail,
        )

    def _all_rows(
        self, batch: Sequence[_Ready], kind: Kind, pad: bool, reusable: ReusableRows | None
    ) -> npt.NDArray[np.float32]:
        """Encode the items of a batch that have no reusable row → (B, O) of all."""
        numbers = [ready.reusable for ready in batch if ready.reusable is not None]
        if reusable is None or not numbers:
            return self._rows(batch, kind, pad=pad)
        reused = reusable.read(numbers)
        rows = np.empty((len(batch), reused.shape[1]), np.float32)
        is_reused = np.array([ready.reusable is not None for ready in batch])
        rows[is_reused] = reused
        if len(numbers) < len(batch):
            rows[~is_reused] = self._rows([ready for ready in batch if ready.reusable is None], kind, pad=pad)
        return rows

    def _rows(self, batch: Sequence[_Ready], kind: Kind, *, pad: bool = False) -> npt.NDArray[np.float32]:
        dtype = PRECISIONS[self.precision]
        autocast = torch.autocast(self.device.type, dtype or torch.bfloat16, enabled=dtype is not None)
        try:
            with torch.inference_mode(), autocast, self._weights.activate():
                if kind == "caption":
                    texts = [ready.caption or "" for ready in batch]
                    encoded = encode_text(texts, self.model, batch_size=len(texts))
                else:
                    images = [ready.pixels for ready in batch if ready.pixels is not None]
                    pixels = torch.stack(images)  # (B, 3, S, S)
                    if pad and len(pixels) < self.batch_size:
                        copies = pixels[-1:].expand(self.batch_size - len(pixels), -1, -1, -1)
                        pixels = torch.cat([pixels, copies])
                    if self.device.type == "cuda":
                        pixels = pixels.pin_memory().to(self.device, non_blocking=True)
                    encoded = self.model.encode_image(pixels.to(self.device))
                rows: npt.NDArray[np.float32] = encoded[: len(batch)].float().cpu().numpy()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"out of memory with --batch-size {self.batch_size}: use a smaller batch size"
            ) from error
        if not np.isfinite(rows).all():
            advice = "try --precision fp32, or check its weights"
            if dtype is None:
                advice = "its weights are damaged"
            raise DataError(f"the model's features are not finite in {self.precision}: {advice}")
        return rows


def _batches(outcomes: Iterable[_Ready | Failure], batch_size: int) -> Iterator[list[_Ready] | Failure]:
    """Group items of one part until a batch is full or the part ends; failures are yielded immediately.

    Reusable rows do not count, so the other items form full batches.
    """
    batch: list[_Ready] = []
    computed = 0
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            yield outcome
            continue
        if batch and outcome.part != batch[0].part:
            yield batch
            batch = []
            computed = 0
        batch.append(outcome)
        computed += outcome.reusable is None
        if computed == batch_size:
            yield batch
            batch = []
            computed = 0
    if batch:
        yield batch


def _read(item: Item, kind: Kind, *, captions: bool) -> tuple[bytes, str | None, str]:
    image = b""
    caption = None
    cause = ""
    try:
        if kind == "image":
            image = read_image(item)
        else:
            caption = read_caption(item)
    except DataError as error:
        cause = str(error)
    if kind == "image" and captions and not cause:
        with suppress(DataError):  # encode the image without a caption
            caption = read_caption(item)
    return image, caption, cause


def load_for_inference(options: LoadOptions) -> CLIP:
    """Load the model that the options of a command name."""
    return load(
        options.model,
        name=options.name,
        dim=options.dim,
        device=pick_device(options.device),
        background=options.background,
        upright=options.upright,
        pixel_range=options.pixel_range,
    )


def pick_device(requested: str | None) -> str:
    """Return the requested device, by default ``select_device``; each process gets its own GPU."""
    if requested in (None, "auto"):
        return str(select_device())
    if requested == "cuda":
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return requested


@dataclass(frozen=True, kw_only=True, eq=False)
class PairFeatures:
    """Features of B pairs.

    Attributes:
        images: (B,) records of ``PairEncoder.dtype``; zero for images that could not be encoded.
        scores: (B,) float32 cosine similarity of image and caption; NaN if either could not be encoded.
        causes: B reasons why an image or a caption could not be encoded; empty if both were.
    """

    images: Images
    scores: npt.NDArray[np.float32]
    causes: list[str]


class PairEncoder:
    """Encode pairs with a model.

    Attributes:
        identity: 16 hexadecimal digits that change with the weights, the preprocessing and the precision.
        dtype: record of an image: ``embedding`` (O) float16, unit norm, and ``thumbnail`` (T) uint8.
    """

    def __init__(self, options: ModelOptions) -> None:
        self._stream = FeatureStream.from_options(options)
        identity = f"{model_hash(self._stream.model)} {self._stream.precision}"
        self.identity = hashlib.sha256(identity.encode()).hexdigest()[:16]
        width = self._stream.empty("image").shape[1]
        self.dtype = np.dtype(
            [("embedding", np.float16, (width,)), ("thumbnail", np.uint8, (THUMBNAIL * THUMBNAIL,))]
        )
        self._options = options

    def encode(self, items: Sequence[Item]) -> PairFeatures:
        """Encode B pairs."""
        numbered = [replace(item, key=str(i)) for i, item in enumerate(items)]
        images = np.zeros(len(items), dtype=self.dtype)
        rows = np.full((2, len(items), self.dtype["embedding"].shape[0]), np.nan, dtype=np.float32)
        causes = [""] * len(items)
        kinds: tuple[Kind, ...] = ("image", "caption")
        for row, kind in enumerate(kinds):
            todo = ((0, item) for item in numbered if not causes[int(item.key)])
            for outcome in self._stream.run(todo, kind=kind, thumbnails=kind == "image"):
                if isinstance(outcome, Failure):
                    causes[int(outcome.item.key)] = outcome.cause
                    continue
                indices = [int(item.key) for item in outcome.items]
                rows[row, indices] = outcome.rows
                if outcome.thumbnails is not None:
                    images["embedding"][indices] = outcome.rows
                    images["thumbnail"][indices] = outcome.thumbnails
        return PairFeatures(images=images, scores=(rows[0] * rows[1]).sum(-1), causes=causes)

    def notes(self) -> list[str]:
        """Return notes about encoded images whose transparency or orientation was ignored."""
        return self._stream.lines(self._options)


def closest(
    queries: Images, others: Iterator[Images], device: str | None = None
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Find the most similar of other images for each query.

    The similarity of two images is the smaller of the cosine similarity of their embeddings and the correlation of
    their thumbnails: a model may embed all images of a class alike, and different images may have similar
    thumbnails. All pairs are compared, at 2 (O + T) floating-point operations each.

    Args:
        queries: (N,) records of ``PairEncoder.dtype``.
        others: blocks of images; the queries themselves, as the same object, are compared only with those before
            them.
        device: where to compute, by default a GPU if there is one.

    Returns:
        (N,) float32 similarity and (N,) int64 number of the image in all blocks; both -1 without any other image.
    """
    target = torch.device(pick_device(device))
    embeddings, thumbnails = _unit(queries, target)
    best = torch.full((len(queries),), -1.0, device=target)
    matches = torch.full((len(queries),), -1, dtype=torch.int64, device=target)
    start = 0
    for block in others:
        other_embeddings, other_thumbnails = (
            (embeddings, thumbnails) if block is queries else _unit(block, target)
        )
        similarity = torch.minimum(embeddings @ other_embeddings.T, thumbnails @ other_thumbnails.T)  # (N, M)
        if block is queries:
            earlier = torch.ones_like(similarity, dtype=torch.bool).tril(-1)
            similarity.masked_fill_(~earlier, -1.0)
        value, nearest = similarity.max(dim=1)
        matches = torch.where(value > best, nearest + start, matches)
        best = torch.maximum(value, best)
        start += len(block)
    return best.cpu().numpy(), matches.cpu().numpy()


def _unit(images: Images, device: torch.device) -> tuple[Tensor, Tensor]:
    embeddings = torch.from_numpy(np.ascontiguousarray(images["embedding"])).to(device).float()
    gray = torch.from_numpy(np.ascontiguousarray(images["thumbnail"])).to(device).float()
    gray = torch.cat([gray - gray.mean(dim=1, keepdim=True), torch.full_like(gray[:, :1], _FLAT)], dim=1)
    return normalize(embeddings, dim=1), normalize(gray, dim=1)

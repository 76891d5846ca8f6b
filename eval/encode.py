"""Runs a dataset through a model once; every task reads the features from here.

The pictures are split over ranks, and each is decoded ahead of the model by a few threads.

Letters in shape comments: N pictures, B batch, D embedding dimension, S image side in pixels.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from clipkit import CLIP
from clipkit.errors import DataError
from clipkit.preprocess import Preprocess, eval_pixels
from clipkit.zero_shot import encode_prompts, evaluating
from eval.dataset import EvalDataset

__all__ = ["ONE_RANK", "Encoded", "Gather", "Ranks", "check_finite", "encode_dataset", "encode_texts"]

Gather = Callable[[Tensor], Tensor]  # the elementwise sum of every rank's tensor, on each rank
_MAX_THREADS = 8
_BATCHES_AHEAD = 3


def _alone(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """How many processes share the work, which one this is, and how they add up tensors."""

    rank: int = 0
    world: int = 1
    gather: Gather = _alone


ONE_RANK = Ranks()


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """A dataset with its pictures' features.

    Attributes:
        dataset: with labels and captions.
        image_features: (N, D) float32, unit norm, in the order of the dataset, on the model's device.
    """

    dataset: EvalDataset
    image_features: Tensor


def encode_dataset(
    model: CLIP,
    dataset: EvalDataset,
    *,
    batch_size: int = 256,
    rank: int = 0,
    world: int = 1,
    gather: Gather = _alone,
    progress: Callable[[int], None] | None = None,
) -> Encoded:
    """Encode every picture of a dataset; with several ranks, all of them call this and all get the whole.

    Args:
        model: used in evaluation mode and given back in the mode it had.
        dataset: what to encode.
        batch_size: pictures that the model takes at a time.
        rank: this process's number; it encodes pictures ``rank``, ``rank + world``, …
        world: how many processes there are.
        gather: sums a tensor over ranks. ``clipkit.distributed.sum_over_ranks`` where there are several.
        progress: called with the number of pictures after each batch.

    Raises:
        DataError: a picture cannot be read or decoded; it is named, on every rank. Or the features are not finite.
    """
    batch_size = min(batch_size, max(1, len(dataset)))
    device = model.logit_scale.device
    features = torch.zeros(len(dataset), model.architecture.embed_dim, device=device)  # (N, D)
    failed = torch.full((world,), 0, dtype=torch.int64)  # by rank: 1 + the number of the picture
    own = range(rank, len(dataset), world)
    try:
        with evaluating(model), torch.inference_mode():
            done = 0
            for pixels in _batches(dataset, own, batch_size, model.preprocess):
                numbers = torch.tensor(own[done : done + len(pixels)], device=device)
                features[numbers] = model.encode_image(pixels.to(device)).float()
                done += len(pixels)
                if progress is not None:
                    progress(len(pixels))
    except _BrokenPicture as error:
        failed[rank] = error.number + 1
    # ranks that succeeded must not wait for features that will never come
    broken = [number - 1 for number in gather(failed).tolist() if number]
    if broken:
        raise _broken_picture(dataset, min(broken), model.preprocess)
    features = gather(features)
    check_finite(features, f"dataset {dataset.name}")
    return Encoded(dataset=dataset, image_features=features)


def encode_texts(model: CLIP, texts: Sequence[str], *, ranks: Ranks = ONE_RANK) -> Tensor:
    """Texts → (N, D) float32 unit-norm features on the model's device, the work split over ranks.

    Raises:
        DataError: they are not finite.
    """
    features = torch.zeros(len(texts), model.architecture.embed_dim, device=model.logit_scale.device)
    own = slice(ranks.rank, len(texts), ranks.world)
    with torch.inference_mode():
        features[own] = encode_prompts(model, texts[own])
        features = ranks.gather(features)
    check_finite(features, "the captions")
    return features


def check_finite(features: Tensor, whose: str) -> None:
    """Refuse features that would be scored as if they were merely bad; gathered ones, so that all ranks agree.

    Raises:
        DataError: some are not finite.
    """
    if not bool(torch.isfinite(features).all()):
        raise DataError(
            f"the features of {whose} are not finite: the training of this model has diverged, or its weights "
            "are damaged"
        )


class _BrokenPicture(Exception):
    """Carries the number of a picture that does not decode to the end of this rank's work."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _broken_picture(dataset: EvalDataset, number: int, preprocess: Preprocess) -> DataError:
    """What to say about a picture that failed, perhaps on another rank: it is read again for the cause."""
    try:
        eval_pixels(dataset.shards.read(number).image, preprocess)
    except DataError as error:
        return DataError(
            f"{dataset.where(number)}: {error}; mend or remove it, a score is never of fewer pictures"
        )
    return DataError(
        f"{dataset.where(number)} could not be read at first, and could at second try: check the disk"
    )


def _batches(
    dataset: EvalDataset, numbers: Sequence[int], batch_size: int, preprocess: Preprocess
) -> Iterator[Tensor]:
    """(B, 3, S, S) uint8 batches of the numbered pictures in order, the next ones decoded meanwhile."""

    def load(number: int) -> Tensor:
        try:
            return eval_pixels(dataset.shards.read(number).image, preprocess)
        except DataError as error:
            raise _BrokenPicture(number) from error

    remaining = iter(numbers)
    pool = ThreadPoolExecutor(_threads(), thread_name_prefix="eval-decode")
    try:
        waiting: deque[Future[Tensor]] = deque(
            pool.submit(load, number) for number in islice(remaining, batch_size * _BATCHES_AHEAD)
        )
        while waiting:
            batch = [waiting.popleft().result() for _ in range(min(batch_size, len(waiting)))]
            waiting.extend(pool.submit(load, number) for number in islice(remaining, len(batch)))
            yield torch.stack(batch)
    finally:
        pool.shutdown(cancel_futures=True)


def _threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MAX_THREADS, cores)

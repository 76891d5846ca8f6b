"""Batches on the device one step ahead: copied on a stream of their own while the model computes.

Nothing here has a thread: when a batch is handed over, the one after it is taken from the loader, so that it is
copied beside the computation of the step. On a CPU batches come as they are.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from data.batch import Batch
from data.loader import Loader

__all__ = ["DeviceBatches", "InputSeconds"]


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

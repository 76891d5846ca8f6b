"""Why a training waits for its batches, in words: from where the processes that make them spend their time."""

import os

from data.batch import Batch

__all__ = ["Starvation"]

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

"""Tests of the memory of metrics: similarities in blocks, and memory-mapped half-precision features."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eval.metrics import intervals, ranks
from eval.metrics.ranks import class_ranks, class_scores, match_ranks, top_classes


class Largest(TorchDispatchMode):
    """Record the number of elements of the largest result of any operation."""

    elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor):
                self.elements = max(self.elements, one.numel())
        return result


N, CLASSES = 3000, 50


@pytest.mark.parametrize(
    "metric",
    [
        lambda features, classifier, labels: class_ranks(features, classifier, labels),
        lambda features, classifier, labels: top_classes(features, classifier, k=5).classes,
        lambda features, classifier, labels: match_ranks(
            features, classifier.T, torch.stack([torch.arange(N), labels], dim=1)
        ),
    ],
    ids=["class_ranks", "top_classes", "match_ranks"],
)
def test_similarities_are_computed_in_blocks(
    metric: Callable[[Tensor, Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    features, classifier = (
        torch.randn(N, 2, generator=generator),
        torch.randn(2, CLASSES, generator=generator),
    )
    labels = torch.randint(CLASSES, (N,), generator=generator)
    whole = metric(features, classifier, labels)
    monkeypatch.setattr(ranks, "_BLOCK", 1000)
    with Largest() as largest:  # type: ignore[no-untyped-call]
        found = metric(features, classifier, labels)
    assert torch.equal(found, whole)
    assert largest.elements <= 5 * N < N * CLASSES  # the size of inputs and results


def test_resamples_are_drawn_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "_DRAWN", 5000)
    for counts in (np.ones(1000, np.int64), np.full(1000, 7)):
        blocks = list(intervals.draw_resamples(counts, most=12))
        assert [block.shape for block in blocks] == [(5, 1000), (5, 1000), (2, 1000)]
        assert all((block.sum(axis=1) == counts.sum()).all() for block in blocks)


def test_memory_mapped_half_precision_features_equal_float32(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    path = tmp_path / "features.bin"
    stored = np.memmap(path, np.float16, mode="w+", shape=(500, 8))
    stored[:] = random.standard_normal((500, 8))
    features = torch.from_numpy(stored)
    classifier = torch.from_numpy(random.standard_normal((8, 30), dtype=np.float32))
    labels = torch.from_numpy(random.integers(30, size=500))
    place = class_ranks(features, classifier, labels, device=torch.device("cpu"))
    assert torch.equal(place, class_ranks(features.float(), classifier, labels))
    scores = class_scores(features, classifier)
    assert scores.dtype == torch.float32 and torch.equal(scores, features.float() @ classifier)

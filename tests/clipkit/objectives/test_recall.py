"""Tests of recall within a batch."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import clipkit.objectives.tiles
from clipkit.objectives.base import compare_pairs, compute_recall
from tests.clipkit.plain_losses import given as given_batch


@settings(deadline=None)
@given(
    rows=st.integers(1, 40),
    tile=st.integers(1, 400),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    numbers=st.none() | st.integers(1, 40),
)
def test_recall_counts_nearest_neighbors(
    rows: int, tile: int, seed: int, dtype: torch.dtype, numbers: int | None
) -> None:
    batch = given_batch(rows, seed=seed, dtype=dtype)
    cosines, own = batch.images @ batch.texts.T, torch.arange(rows)
    identities = None
    if numbers is not None:
        identities = torch.randint(numbers, (rows, 2), generator=torch.Generator().manual_seed(seed))
        same = (identities[:, None] == identities).any(2) & (own[:, None] != own)
        cosines[same] = -torch.inf
    want = torch.stack([(cosines.argmax(by) == own).to(dtype).mean() for by in (1, 0)])
    with patch.multiple(clipkit.objectives.tiles, _TILE=tile, _LEAST_ROWS=1):
        found = compute_recall(batch.images, batch.texts, identities)
        compared = compare_pairs(batch.images, batch.texts, torch.tensor(7.0), identities)
    torch.testing.assert_close(found, want)
    assert not found.requires_grad
    losses = [F.cross_entropy(7 * table, own, reduction="none") for table in (cosines, cosines.T)]
    torch.testing.assert_close(compared[:2], torch.stack(losses), atol=1e-5, rtol=1e-5)
    others = cosines.clone().fill_diagonal_(-torch.inf)
    margins = torch.stack([cosines.diagonal() - others.amax(by) for by in (1, 0)])
    is_compared = margins.isfinite()
    torch.testing.assert_close(compared[2:][is_compared], margins[is_compared], atol=1e-6, rtol=1e-5)
    assert (compared[2:][~is_compared] > 1e29).all()


@pytest.mark.parametrize("rows", [2, 3, 17, 100])
def test_ties_count_as_wrong(rows: int) -> None:
    """Equal features, whose products may round differently; and each pair twice."""
    alike = F.normalize(torch.linspace(0.1, 1, 31), dim=0).expand(rows, 31)
    assert compute_recall(alike, alike).tolist() == [0, 0]
    images, texts = (F.normalize(torch.randn(rows, 31), dim=-1).repeat(2, 1) for _ in range(2))
    assert compute_recall(images, texts).tolist() == [0, 0]


def test_image_and_text_recall_are_separate() -> None:
    """All images are nearest to text 0; each text is nearest to its own image."""
    images = F.normalize(torch.tensor([[3.0, 0.0, 0.0], [3.0, 1.0, 0.0], [3.0, 0.0, 1.0]]), dim=-1)
    texts = F.normalize(torch.tensor([[3.0, -0.1, -0.1], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), dim=-1)
    assert compute_recall(images, texts).tolist() == pytest.approx([1 / 3, 1])
    assert compute_recall(texts, images).tolist() == pytest.approx([1, 1 / 3])


def test_nan_features_have_zero_recall() -> None:
    lost = torch.full((4, 8), torch.nan)
    assert compute_recall(lost, lost).tolist() == [0, 0]
    assert compute_recall(torch.eye(4).bfloat16(), torch.eye(4).bfloat16()).tolist() == [1, 1]

"""Tests of knn: neighbors and votes against scikit-learn, ties, blocks, and scores of a dataset."""

import importlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

import eval as evaluation
from clipkit import CLIP
from clipkit.errors import DataError
from eval import Encoder, Subject
from eval.tasks import Options
from eval.tasks.probe import count_votes, knn, nearest_neighbours

module = importlib.import_module("eval.tasks.probe")
WriteDataset = Callable[..., Path]


@given(
    n=st.integers(5, 60),
    k=st.integers(1, 5),
    temperature=st.sampled_from([None, 0.07, 1.0]),
    seed=st.integers(0, 99),
)
def test_votes_equal_scikit_learn(n: int, k: int, temperature: float | None, seed: int) -> None:
    from sklearn.neighbors import KNeighborsClassifier

    g = torch.Generator().manual_seed(seed)
    training, queries = (F.normalize(torch.randn(m, 6, generator=g), dim=1) for m in (n, 20))
    labels = torch.cat([torch.arange(4), torch.randint(4, (n - 4,), generator=g)])

    def weights(distance: np.ndarray) -> np.ndarray:
        weight: np.ndarray = (
            np.ones_like(distance) if temperature is None else np.exp((1 - distance) / temperature)
        )
        return weight

    theirs = KNeighborsClassifier(k, metric="cosine", algorithm="brute", weights=weights)
    theirs.fit(training.double().numpy(), labels.numpy())
    similarity, index = nearest_neighbours(queries, training, k)
    shares = count_votes(similarity, labels[index], 4, temperature=temperature)
    expected = torch.from_numpy(theirs.predict_proba(queries.double().numpy()))
    torch.testing.assert_close(shares.double(), expected, atol=1e-4, rtol=0)
    assert torch.equal(shares.argmax(dim=1), torch.from_numpy(theirs.predict(queries.double().numpy())))


@given(n=st.integers(3, 40), k=st.integers(1, 3), seed=st.integers(0, 999))
def test_ties_are_ordered_by_index_for_any_block_size(n: int, k: int, seed: int) -> None:
    """Features have three values, so that nearly all similarities are tied."""
    g = torch.Generator().manual_seed(seed)
    training, queries = (torch.randint(-1, 2, (m, 3), generator=g).float() for m in (n, 7))
    expected = (queries @ training.T).sort(dim=1, descending=True, stable=True)
    with pytest.MonkeyPatch.context() as patch:
        for rows, columns in ((512, 1 << 14), (3, 4)):
            patch.setattr(module, "_ROWS", rows)
            patch.setattr(module, "_COLUMNS", columns)
            similarity, index = nearest_neighbours(queries, training, k)
            assert torch.equal(index, expected.indices[:, :k])
            assert torch.equal(similarity, expected.values[:, :k])


def test_tied_votes_choose_the_lower_class() -> None:
    training = torch.tensor([[0.6, 0.8], [0.6, -0.8]])
    similarity, index = nearest_neighbours(torch.tensor([[1.0, 0.0]]), training, 2)
    shares = count_votes(similarity, torch.tensor([2, 1])[index], 3)
    assert shares.tolist() == [[0.0, 0.5, 0.5]] and int(shares.argmax()) == 1


def test_memory_mapped_features_are_accepted(tmp_path: Path) -> None:
    file = np.memmap(tmp_path / "features", np.float16, "w+", shape=(50, 4))
    file[:] = np.random.default_rng(0).normal(size=(50, 4))
    mapped = torch.from_numpy(file)
    similarity, index = nearest_neighbours(mapped[:10], mapped, 3)
    assert similarity.dtype == torch.float32
    assert torch.equal(index, nearest_neighbours(mapped[:10].float(), mapped.float(), 3)[1])


def test_knn_scores_of_dataset(
    model: CLIP, write_dataset: WriteDataset, caplog: pytest.LogCaptureFixture
) -> None:
    labels = [i % 4 for i in range(16)]
    folders = {
        "test": write_dataset("t", labels=labels[:9]),
        "train": write_dataset("l", labels=labels, split="train"),
    }
    subject = Subject(
        Encoder(model),
        evaluation.open_dataset(folders["test"]),
        metrics=("acc1", "ece"),
        open_split=lambda split: evaluation.open_dataset(folders[split], split=split),
    )
    scores = knn(subject, Options(neighbours=(1, 3, 20))).scores
    assert [(score.setting, score.metric, score.n) for score in scores] == [
        (f"k={k}{kind}", "acc1", 9) for k in (1, 3) for kind in ("", " plain")
    ]
    assert scores[0].value == scores[1].value == 1.0  # each image is its own nearest neighbor
    assert scores[2].low is not None and scores[2].task == "knn" and scores[2].chance == 1 / 7
    assert "skipping 20 neighbors, there are 16 images to learn from" in caplog.text
    assert "9 of 9 test images are also in train" in caplog.text
    assert knn(subject, Options(neighbours=(1, 3))).scores == scores
    with pytest.raises(DataError, match="16 images"):
        knn(subject, Options(neighbours=(20,)))

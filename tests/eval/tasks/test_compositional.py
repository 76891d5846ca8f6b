"""Tests of the compositional task: against CLIP_benchmark, by hand, and with a model."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
import torch
from hypothesis import given, strategies as st
from pyarrow import parquet as pq
from torch import Tensor

from clipkit import CLIP
from clipkit.errors import DataError
from clipkit.model.tokenizer import ClipTokenizer
from eval.datasets.dataset import DEFAULT_TEMPLATES, EvalDataset, require_choices
from eval.features.encoder import Encoder, ImageFeatures
from eval.readers import open_dataset
from eval.results.records import Score
from eval.tasks import Options
from eval.tasks.compositional import compositional
from eval.tasks.subject import Subject
from tests.eval.conftest import png


class Given:
    """A subject with fixed features; the number at the start of a text selects its features."""

    def __init__(self, dataset: EvalDataset, images: Tensor, texts: Tensor) -> None:
        self.dataset, self._images, self._texts = dataset, images, texts
        self.device = torch.device("cpu")
        self.encoder = SimpleNamespace(model=SimpleNamespace(tokenizer=ClipTokenizer()))
        self.asked: list[str] = []

    def images(self) -> ImageFeatures:
        return ImageFeatures(lambda _: self._images)

    def texts(self, texts: Sequence[str]) -> Tensor:
        self.asked += texts
        return self._texts[[int(text.split()[0]) for text in texts]]


class Images:
    """``count`` images that are never read."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def locate(self, number: int) -> tuple[str, str]:
        return "made", str(number)


def dataset_of(count: int, **parts: Any) -> EvalDataset:
    return EvalDataset(
        name="made",
        class_names=(),
        templates=DEFAULT_TEMPLATES,
        images=cast(Any, Images(count)),
        labels=None,
        revision="",
        tasks=("compositional",),
        **({"captions": None} | parts),
    )


def scored(dataset: EvalDataset, images: Tensor, texts: Tensor) -> dict[str, Score]:
    subject = Given(dataset, images, texts)
    scores = compositional(cast(Subject, subject), Options()).scores
    assert len(subject.asked) == len(set(subject.asked))  # nothing is encoded twice
    assert all(
        (score.task, score.dataset, score.split) == ("compositional", "made", "test") for score in scores
    )
    return {score.metric: score for score in scores}


def unit(*shape: int, seed: int) -> Tensor:
    return torch.nn.functional.normalize(
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1
    )


@pytest.mark.parametrize("per_item", [1, 2])
@pytest.mark.filterwarnings("ignore")  # warnings of CLIP_benchmark
def test_scores_equal_clip_benchmark(per_item: int) -> None:
    """Without ties. With one image per item, ``text_acc`` is the accuracy of SugarCrepe."""
    theirs = pytest.importorskip("clip_benchmark.metrics.image_caption_selection")
    items = 40
    images, texts = unit(items * per_item, 4, seed=0), unit(items * 2, 4, seed=1)

    class Model:
        def encode_image(self, numbers: Tensor) -> Tensor:
            return images[numbers.flatten().long()]

        def encode_text(self, numbers: Tensor) -> Tensor:
            return texts[numbers]

    batches = []
    for item in range(items):
        own = torch.arange(item * per_item, (item + 1) * per_item).float().reshape(1, per_item, 1, 1, 1)
        batches.append((own, [[str(2 * item), str(2 * item + 1)]]))
    expected = theirs.evaluate(
        Model(), batches, lambda ones: torch.tensor(list(map(int, ones))), "cpu", amp=False
    )

    pairs = [(str(2 * item), str(2 * item + 1)) for item in range(items)]
    if per_item == 2:
        choices = tuple(own for pair in pairs for own in (pair, pair[::-1]))
        dataset = dataset_of(2 * items, choices=choices, items=torch.arange(items).repeat_interleave(2))
        found = scored(dataset, images, texts)
        assert {name: one.value for name, one in found.items()} == pytest.approx(
            {
                "text": expected["text_acc"],
                "image": expected["image_acc"],
                "group": expected["acc"],
            }
        )
        assert [round(one.chance or 0, 4) for one in found.values()] == [0.25, 0.25, 0.1667]
        mixed = torch.randperm(2 * items, generator=torch.Generator().manual_seed(2))
        dataset = replace(
            dataset,
            choices=tuple(choices[i] for i in mixed.tolist()),
            items=torch.arange(items).repeat_interleave(2)[mixed],
        )
        assert scored(dataset, images[mixed], texts) == found
    else:
        found = scored(dataset_of(items, choices=tuple(pairs)), images, texts)
        assert found["accuracy"].value == pytest.approx(expected["text_acc"])
        assert (found["accuracy"].n, found["accuracy"].chance) == (items, 0.5)


def test_ties_are_wrong_and_numbers_of_choices_may_differ() -> None:
    images = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    texts = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [1.0, 0.0]])
    choices = (("0 right", "1", "2"), ("0 right", "3 the same"), ("1", "0 right", "2"))
    found = scored(dataset_of(3, choices=choices), images, texts)
    assert found["accuracy"].value == pytest.approx(2 / 3)
    assert found["accuracy"].chance == pytest.approx((1 / 3 + 1 / 2 + 1 / 3) / 3)
    assert scored(dataset_of(1, choices=(("0 a", "0 a"),)), images[:1], texts)["accuracy"].value == 0


def test_mean_per_group_accuracy() -> None:
    images = torch.tensor([[1.0, 0.0]] * 4)
    texts = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    choices = (("0", "1"), ("0", "1"), ("0", "1"), ("1", "0"))
    metadata = {"relation": torch.tensor([5, 5, 5, 2])}
    found = scored(dataset_of(4, choices=choices, metadata=metadata), images, texts)
    assert (found["accuracy"].value, found["mean_per_group_accuracy"].value) == (0.75, 0.5)
    assert found["mean_per_group_accuracy"].n == 2


@given(data=st.data())
def test_macro_accuracy_is_the_mean_over_counted_groups(data: st.DataObject) -> None:
    by_relation = data.draw(st.booleans())
    sizes = data.draw(st.lists(st.sampled_from([1, 24, 25, 26]), min_size=1, max_size=4))
    marked = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    right = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(group), max_size=len(group))))
    metadata = {"relation": group, "symmetric": torch.tensor(marked).long()[group]}
    choices = tuple(("0", "1") if one else ("1", "0") for one in right.tolist())
    dataset = dataset_of(
        len(group), choices=choices, metadata=metadata if by_relation else {"attribute": group}
    )
    found = scored(dataset, torch.tensor([[1.0, 0.0]] * len(group)), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    counts = [not mark if by_relation else size >= 25 for mark, size in zip(marked, sizes, strict=True)]
    shares = [float(right[group == number].double().mean()) for number, count in enumerate(counts) if count]
    if shares:
        assert found["macro_accuracy"].value == pytest.approx(sum(shares) / len(shares))
        assert found["macro_accuracy"].n == len(shares)
    else:
        assert "macro_accuracy" not in found


def test_jaccard_of_associations_and_its_chance() -> None:
    images = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    texts = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    dataset = dataset_of(
        5,
        captions=(("0 night",),) * 3 + (("0 night",),) * 2,
        items=torch.tensor([4, 4, 4, 9, 9]),
        metadata={"association": torch.tensor([1, 0, 1, 1, 0])},
    )
    found = scored(dataset, images, texts)
    assert {name: one.value for name, one in found.items()} == pytest.approx(
        {"jaccard": (1 / 3 + 0) / 2, "jaccard_3": 1 / 3, "jaccard_2": 0.0}
    )
    assert found["jaccard_2"].chance == pytest.approx(0.5)  # one of two, picked at random
    assert found["jaccard_3"].chance == pytest.approx((1 + 1 / 3 + 1 / 3) / 3)  # two of three


def test_jaccard_10_12_counts_the_cases_of_datacomp() -> None:
    sizes = [5, 10, 12, 11, 6]
    right = [[1] + [0] * (size - 1) for size in sizes]
    scores = {5: 0.0, 10: 1.0, 12: 0.0, 11: 1.0, 6: 0.0}  # similarity of the right candidate; others have 0.5
    images = torch.cat([torch.tensor([[scores[size], 1.0]] + [[0.5, 1.0]] * (size - 1)) for size in sizes])
    items = torch.arange(5).repeat_interleave(torch.tensor(sizes))
    association = torch.tensor([one for own in right for one in own])
    captions = (("0",),) * len(items)
    dataset = dataset_of(len(items), captions=captions, items=items, metadata={"association": association})
    found = scored(dataset, images, torch.tensor([[1.0, 0.0]]))
    assert (found["jaccard"].value, found["jaccard_10-12"].value) == pytest.approx((2 / 5, 2 / 3))
    assert (found["jaccard_10-12"].n, found["jaccard_10"].value, found["jaccard_5"].value) == (3, 1, 0)


@given(st.lists(st.integers(0, 1), min_size=2, max_size=6).filter(any))
def test_chance_of_jaccard_is_its_mean_over_all_orders(right: list[int]) -> None:
    """The reported chance equals the mean of the index over all orders of the candidates."""
    import itertools

    from eval.metrics import jaccard_index
    from eval.tasks.compositional import _jaccard_of_chance

    count = len(right)
    orders = list(itertools.permutations(range(count)))
    similarity = torch.tensor(orders, dtype=torch.float32).flatten()
    case = torch.arange(len(orders)).repeat_interleave(count)
    mean = jaccard_index(similarity, torch.tensor(right * len(orders)).bool(), case).mean()
    told = _jaccard_of_chance(torch.tensor([count]), torch.tensor([sum(right)]))
    assert float(told) == pytest.approx(mean, abs=1e-6)


def test_missing_choices_and_invalid_items_are_rejected() -> None:
    with pytest.raises(DataError, match="dataset made has no captions to choose between"):
        require_choices(dataset_of(1))
    odd = dataset_of(3, choices=(("0", "1"),) * 3, items=torch.tensor([0, 0, 1]))
    with pytest.raises(DataError, match="its items are not two images with each other's captions"):
        scored(odd, unit(3, 2, seed=0), unit(2, 2, seed=1))
    own = dataset_of(2, choices=(("0", "1"), ("0", "1")), items=torch.tensor([0, 0]))
    with pytest.raises(DataError, match="its items are not two images"):
        scored(own, unit(2, 2, seed=0), unit(2, 2, seed=1))


def test_model_is_scored_on_winoground_and_winogavil(model: CLIP, tmp_path: Any) -> None:
    images = [{"bytes": png(seed), "path": None} for seed in range(4)]
    table = {
        "image_0": images[:2],
        "image_1": images[2:],
        "caption_0": ["a dog on a cat", "red"],
        "caption_1": ["a cat on a dog", "blue"],
    }
    (tmp_path / "pairs").mkdir()
    pq.write_table(pa.table(table), tmp_path / "pairs/test.parquet")
    cues = {
        "cue": ["night", "day"],
        "candidates": [["a", "b", "c"], ["d", "a"]],
        "associations": [["a"], ["d"]],
        "candidates_images": [images[:3], [images[3], images[0]]],
    }
    (tmp_path / "cues").mkdir()
    pq.write_table(pa.table(cues), tmp_path / "cues/test.parquet")
    encoder = Encoder(model)
    found = [
        score
        for name in ("pairs", "cues")
        for score in compositional(Subject(encoder, open_dataset(tmp_path / name)), Options()).scores
    ]
    assert [score.metric for score in found] == [
        "text",
        "image",
        "group",
        "jaccard",
        "jaccard_2",
        "jaccard_3",
    ]
    assert all(0 <= (score.low or 0) <= score.value <= (score.high or 0) <= 1 for score in found)
    assert encoder.encoded == {"images": 8, "texts": 6}  # four images of each dataset

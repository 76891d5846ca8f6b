"""Tests of fields that training uses besides captions: groups, weights and further texts of pairs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import given, strategies as st

from clipkit.config import load_config
from clipkit.errors import ConfigError, DataError
from clipkit.model.tokenizer import ClipTokenizer
from clipkit.training.step import Sides
from data.captions import CaptionRule, PairFields
from data.loader import Loader
from data.order import Order
from data.selection import Selection
from data.shards.manifest import make_manifest, reject_unknown_pair_fields
from data.shards.samples import Shards, find_shards
from data.shards.writer import DatasetWriter, Record
from tests.small_trainings import Trainings, error_of, metrics, pairs, trainings

__all__ = ["pairs", "trainings"]

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
IMAGE = simplejpeg.encode_jpeg(np.zeros((20, 20, 3), dtype=np.uint8))


def write_samples(folder: Path, metas: Sequence[dict[str, Any]]) -> Path:
    with DatasetWriter(folder, samples_per_shard=20) as writer:
        for i, meta in enumerate(metas):
            record = Record(key=f"{i:04d}", image=IMAGE, extension="jpg", caption=f"text {i}", meta=meta)
            writer.write("train", record)
        writer.finish({"name": "samples"})
    return folder


def open_loader(folder: Path, fields: PairFields, *, captions: CaptionRule | None = None) -> Loader:
    selection = Selection(captions=captions or CaptionRule(), fields=fields)
    shards = Shards(make_manifest([find_shards(str(folder))], selection), selection)
    order = Order(shards.counts, seed=2, batch_size=len(shards))
    return Loader(shards=shards, order=order, image_size=16, tokenize=ClipTokenizer())


VALUES = [
    "cat",
    " cat ",
    "Cat",
    "3",
    3,
    True,
    "true",
    ["a", "b"],
    ["b", "a"],
    {"x": 1, "y": 2},
    {"y": 2, "x": 1},
]


def test_groups_of_values() -> None:
    groups = [PairFields(same="a.b").group({"a": {"b": value}}) for value in VALUES]
    assert groups == [
        *("cat", "cat", "Cat", "3", "3", "true", "true", '["a", "b"]', '["b", "a"]'),
        *['{"x": 1, "y": 2}'] * 2,
    ]
    nothing: list[Any] = [None, "", "  ", [], {}, float("nan")]
    assert not any(PairFields(same="a").group({"a": value}) for value in nothing)
    assert not PairFields(same="a").group({"b": 1}) and PairFields(same="a").group({"a": 0}) == "0"


@given(st.lists(st.sampled_from(["x", "y", 7, ["x"], None, ""]), min_size=2, max_size=12), st.booleans())
def test_pairs_of_a_group_have_equal_identities(
    tmp_path_factory: pytest.TempPathFactory, concepts: list[Any], several: bool
) -> None:
    metas = [{"concept": concept} if concept is not None else {"other": 1} for concept in concepts]
    folder = write_samples(tmp_path_factory.mktemp("data") / "samples", metas)
    rule = CaptionRule(count=1 + several)
    loader = open_loader(folder, PairFields(same="concept"), captions=rule)
    batch = loader.batch(0)
    missing = [concept in (None, "") for concept in concepts]
    assert batch.without_group == batch.counts["without_group"] == sum(missing)
    groups = batch.identities[:, 2]
    assert (
        batch.identities.shape
        == ((1 + several) * len(concepts), 3)
        == loader.placeholder(0, DataError("no")).identities.shape
    )
    values = [i if missing[i] else str(concepts[i]) for i in batch.ids.tolist()] * (1 + several)
    expected = torch.tensor([[one == other for other in values] for one in values])
    assert torch.equal(groups[:, None] == groups, expected)
    plain = open_loader(folder, PairFields(), captions=rule).batch(0)
    assert torch.equal(plain.identities, batch.identities[:, :2]) and not plain.without_group


def refusals(*settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, settings)
    return str(caught.value)


def test_refused_settings() -> None:
    unused = (
        "loss.same_field = 'concept' has no effect unless loss.same=positives or loss.same=ignored is set"
    )
    assert refusals("loss.same_field=concept") == unused
    for other in ("loss.name=none", "loss.name=words", "distill.teacher=another"):
        more = ["caption.weight=1"] if other == "loss.name=none" else []
        assert "data.weight = 'score' is invalid: cannot be combined with" in refusals(
            "data.weight=score", other, *more
        )


BOTH = 'data.image_fields=["image:0.9","title:0.1"]'


def test_refused_fields() -> None:
    wrong = ("title:0.1", "image:1", "image:0.9,title", 'image:0.9","title:0', 'image:1","title:1","title:2')
    for entries in (
        *wrong,
        'image:1","title:nan',
        'image:1","title:inf',
        'image:1","title:-1',
        'image:1",":1',
    ):
        assert "data.image_fields" in refusals(f'data.image_fields=["{entries}"]')
    assert "expected caption:WEIGHT and other" in refusals('data.text_fields=["image:1","title:1"]')
    for other in ("data.negatives=wrong", "data.caption_count=2"):
        said = refusals('data.text_fields=["caption:1","title:1"]', other, "loss.same=ignored")
        assert said.endswith("cannot be combined with data.negatives or data.caption_count")
    for more in (
        ["loss.name=none", "caption.weight=1"],
        ["distill.teacher=another"],
        ["caption.weight=1", "caption.feed=text"],
    ):
        assert "data.image_fields = " in refusals(BOTH, *more)
    data = load_config(QUICKSTART, [BOTH]).data
    assert data.parse_fields("image") == {"image": 0.9, "title": 0.1} and data.parse_fields("text") == {
        "caption": 1
    }
    swapped = load_config(QUICKSTART, ['data.image_fields=["a:b:2","image:0.5"]']).data
    assert list(swapped.parse_fields("image").items()) == [("image", 0.5), ("a:b", 2)]


BAD: list[Any] = [-1, "-0.5", "high", float("nan"), float("inf"), 1e40, 10**400, None, "", True, {"a": 1}]


def test_weights_of_pairs() -> None:
    fields, rule = PairFields(weight="a.b"), CaptionRule()
    weights = [fields.weigh({"a": {"b": value}}, rule, 0) for value in (3, 0, 0.25, "7", " 1e2 ", 10**20)]
    assert weights == [3, 0, 0.25, 7, 100, 1e20]
    for value in BAD:
        with pytest.raises(DataError, match=r"^a\.b = .* is no weight from 0$"):
            fields.weigh({"a": {"b": value}}, rule, 0)
    every = CaptionRule(fields=("captions",), choice="all")
    sample = {"captions": ["x", "", "y"], "a": {"b": [4, "5"]}}
    assert [fields.weigh(sample, every, index) for index in range(2)] == [4, 5]
    for other, message in (
        (rule, "a.b has 2 values: set data.captions"),
        (replace(every, fields=("txt",)), "2 weights of 0"),
    ):
        with pytest.raises(DataError, match=message):
            fields.weigh(sample, other, 0)


def test_bad_weights_are_replaced_and_counted(tmp_path: Path) -> None:
    metas: list[dict[str, Any]] = [{"score": i} for i in range(30)]
    metas[4:7] = [{"score": -2}, {}, {"score": "none"}]
    loader = open_loader(write_samples(tmp_path / "samples", metas), PairFields(weight="score"))
    batch = loader.batch(0)
    causes = sorted(bad.cause for bad in batch.bad)
    assert causes == [f"score = {value} is no weight from 0" for value in ("-2", "None", "none")]
    assert batch.weights is not None and batch.weights.dtype == torch.float32
    assert batch.weights.tolist() == batch.identities[:, 0].tolist()  # of substitutes too
    moved = batch.to(torch.device("meta"))
    assert moved.weights is not None and moved.weights.device.type == "meta" and len(batch.tensors()) == 4
    zeros = loader.placeholder(0, DataError("no"))
    assert zeros.weights is not None and zeros.weights.shape == (30,)


@pytest.mark.slow
def test_training_with_groups(trainings: Trainings, tmp_path: Path) -> None:
    metas = [{"concept": f"c{i % 2}"} if i % 4 else {"other": "c0"} for i in range(40)]
    data = write_samples(tmp_path / "data", metas)
    settings = (f"data.train={data}", "loss.same=positives", "batch_size=8", "steps=4", "data.workers=1")
    runs = {
        name: trainings.start(tmp_path / name, *settings, f"loss.same_field={name}")
        for name in ("concept", "concepts")
    }
    message = (
        "loss.same_field names the json field 'concepts', which has a value in none of 40 samples examined"
    )
    error = error_of(runs["concepts"].result().stderr)
    assert message in error and "did you mean 'concept'?" in error
    said = runs["concept"].result().stderr
    lines = metrics(tmp_path / "concept")
    note = f"note: {lines[-1]['without_group']} of 32 samples drawn in all, repeats counted, had no value of"
    assert note in said
    assert all(line["floor"] > 0.3 for line in lines)  # of batches without groups: 0


@pytest.mark.slow
def test_training_with_weights(trainings: Trainings, tmp_path: Path) -> None:
    """Weights of 0 and 2 give the loss of the other pairs with all as negatives; bad fields end before step 0."""
    metas = [{"score": 2 * (i % 2), "rank": -i - 1, "zero": 0} for i in range(40)]
    data = write_samples(tmp_path / "data", metas)
    settings = (f"data.train={data}", "batch_size=8", "steps=2", "accumulate=2", "loss.dims=[8]")
    names = ("score", "scores", "rank", "zero")
    runs = {name: trainings.start(tmp_path / name, *settings, f"data.weight={name}") for name in names}
    lines = [error_of(runs[name].result().stderr) for name in names[1:]]
    assert "data.weight names the json field 'scores', which has a number above 0 in none of 40" in lines[0]
    assert "data.weight = 'rank': rank = -1 is no weight from 0" in lines[1]
    assert "data.weight names the json field 'zero', which has a number above 0 in none of 40" in lines[2]
    assert runs["score"].result().returncode == 0, runs["score"].result().stderr
    trainings.run(tmp_path / "plain", *settings)
    weighted, plain = (metrics(tmp_path / name) for name in ("score", "plain"))
    assert weighted[0]["chance"] == plain[0]["chance"] and weighted[0]["loss"] != plain[0]["loss"]


@pytest.mark.parametrize("negatives", [False, True])
def test_further_texts_of_batches(tmp_path: Path, negatives: bool) -> None:
    metas: list[dict[str, Any]] = [
        {"title": f"title {i}", "a": {"b": ["", f"b {i}"]}, "wrong": "no"} for i in range(12)
    ]
    metas[3:5] = [{"title": " ", "a": {"b": "x"}}, {"title": "x", "a": {"b": []}}]
    fields = PairFields(image=("title",), text=("a.b",))
    rule = CaptionRule(negatives="wrong" if negatives else "")
    loader = open_loader(write_samples(tmp_path / "samples", metas), fields, captions=rule)
    batch = loader.batch(0)
    assert sorted(bad.cause for bad in batch.bad) == ["no text in a.b", "no text in title"]
    numbers = batch.identities[:, 0].tolist()
    tokens = ClipTokenizer()([f"title {i}" for i in numbers] + [f"b {i}" for i in numbers])
    assert batch.fields is not None and batch.field_lengths == tuple((batch.fields.argmax(1) + 1).tolist())
    longest = max(batch.field_lengths)
    assert torch.equal(batch.fields[:, :longest], tokens[:, :longest])
    assert len(batch.negative_lengths) == 12 * negatives
    zeros = loader.placeholder(0, DataError("no"))
    assert zeros.fields is not None and zeros.fields.shape == (24, 1) and len(zeros.field_lengths) == 24
    assert len(batch.tensors()) == 4 + negatives


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2), st.integers(0, 2), st.integers(0, 9))
def test_combined_features_equal_the_weighted_mean(
    rows: int, size: int, images: int, texts: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    features = torch.randn(2 + images + texts, rows, size, dtype=torch.float64, generator=random)
    weights = (torch.rand(2 + images + texts, generator=random) + 0.1).tolist()
    sides = Sides(
        images=(*weights[:1], *weights[2 : 2 + images]), texts=(*weights[1:2], *weights[2 + images :])
    )
    found = sides.combine(features[0], features[1:].flatten(0, 1))
    parts = ([0, *range(2, 2 + images)], [1, *range(2 + images, len(features))])
    for side, part in zip(found, parts, strict=True):
        total = sum(weights[i] * features[i] for i in part)
        assert isinstance(total, torch.Tensor)
        expected = total / total.norm(dim=1, keepdim=True) if len(part) > 1 else features[part[0]]
        torch.testing.assert_close(side, expected)


@pytest.mark.slow
def test_training_with_fields(trainings: Trainings, tmp_path: Path) -> None:
    """Images are equal and only titles differ, so that nothing is learned without them."""
    metas = [{"title": f"the title {i}", "kind": "thing"} for i in range(40)]
    data = write_samples(tmp_path / "data", metas)
    settings = (
        f"data.train={data}",
        "batch_size=20",
        "steps=12",
        "optim.lr=1e-3",
        "data.workers=1",
        "accumulate=2",
    )
    sides = {
        "image": 'data.image_fields=["image:0.5","title:0.5"]',
        "both": 'data.text_fields=["caption:0.8","title:0.2"]',
        "typed": 'data.text_fields=["caption:0.8","titel:0.2"]',
    }
    runs = {
        "image": trainings.start(tmp_path / "image", *settings, sides["image"], "loss.dims=[16]"),
        "both": trainings.start(
            tmp_path / "both", *settings, sides["image"], sides["both"], "loss.name=siglip"
        ),
        "typed": trainings.start(tmp_path / "typed", *settings, sides["image"], sides["typed"]),
    }
    error = error_of(runs["typed"].result().stderr)
    assert (
        "data.text_fields names the json field 'titel', which has text in none of 40 samples examined"
        in error
    )
    for name in ("image", "both"):
        assert runs[name].result().returncode == 0, runs[name].result().stderr
        assert metrics(tmp_path / name)[-1]["image_to_text_R@1"] > 0.3, metrics(tmp_path / name)[-1]


def test_table_with_several_queries_of_a_product(tmp_path: Path) -> None:
    """Rows of an image become one sample: its scores are a list, from which each caption takes its own."""
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jpg").write_bytes(IMAGE)
    rows = ["a.jpg,red,A,5", "b.jpg,red,B,1", "a.jpg,blue,A,2", "c.jpg,tall,C,7", "c.jpg,wide,C,7"]
    table = tmp_path / "pairs.csv"
    table.write_text("\n".join(["filepath,caption,title,score", *rows]) + "\n")
    rule = CaptionRule(fields=("captions",), choice="all")
    batch = open_loader(table, PairFields(weight="score", image=("title",)), captions=rule).batch(0)
    assert not batch.bad and batch.weights is not None and batch.fields is not None
    expected = {
        ("red", "A"): 5.0,
        ("red", "B"): 1.0,
        ("blue", "A"): 2.0,
        ("tall", "C"): 7.0,
        ("wide", "C"): 7.0,
    }
    tokenize = ClipTokenizer()
    texts = [pair[i] for i in range(2) for pair in expected]
    by_tokens = {tuple(row[row > 0].tolist()): text for row, text in zip(tokenize(texts), texts, strict=True)}
    found = {}
    for i, weight in enumerate(batch.weights.tolist()):
        pair = [by_tokens[tuple(row[row > 0].tolist())] for row in (batch.tokens[i], batch.fields[i])]
        found[tuple(pair)] = weight
    assert found == expected
    first = Selection(fields=PairFields(weight="score"))
    message = r"data.weight = 'score': score has 2 values: set data.captions=captions data.caption_choice=all"
    with pytest.raises(DataError, match=message):
        reject_unknown_pair_fields(find_shards(str(table)), first, None)

"""Tests of fields of a sample that training uses besides its captions: groups of pairs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import given, strategies as st

from clipkit.config import load_config
from clipkit.errors import ConfigError
from clipkit.model.tokenizer import ClipTokenizer
from data.captions import CaptionRule, PairFields
from data.loader import Loader
from data.order import Order
from data.selection import Selection
from data.shards.manifest import make_manifest
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
        == loader.placeholder(
            0,
            ValueError("no"),  # type: ignore[arg-type]
        ).identities.shape
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

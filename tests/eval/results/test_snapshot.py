"""Tests of snapshots of a model on shards, and of snapshot files."""

import base64
import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import clipkit
from clipkit import CLIP, DataError
from eval import Encoder, Subject, open_dataset
from eval.datasets.dataset import EvalDataset
from eval.features.encoder import ImageFeatures
from eval.results.details import take_snapshot
from eval.results.records import Snapshot, find_snapshots, read_snapshot, write_snapshot
from eval.tasks import Options
from eval.tasks.classify import zero_shot


@pytest.fixture
def subject(model: CLIP, write_dataset: Callable[..., Path]) -> Subject:
    return Subject(Encoder(model), open_dataset(write_dataset()))


def read_snapshots(run: Path) -> list[Snapshot]:
    return [read_snapshot(path) for steps in find_snapshots(run).values() for path in steps.values()]


class Given(Subject):
    """A subject with given image features."""

    def __init__(self, subject: Subject, projected: torch.Tensor, dataset: EvalDataset | None = None) -> None:
        super().__init__(subject.encoder, dataset or subject.dataset)
        self.projected = projected

    def images(self, split: str | None = None, *, layer: int | None = None) -> ImageFeatures:
        return ImageFeatures(lambda _: self.projected)


def test_examples_agree_with_classify(model: CLIP, subject: Subject) -> None:
    dataset = subject.dataset
    snapshot = take_snapshot(subject, step=7)
    assert (snapshot.step, snapshot.dataset, snapshot.samples, snapshot.classes) == (7, "colours", 23, 7)
    assert len(snapshot.examples) == 8
    for example in snapshot.examples:
        number = int(example.picture)
        assert dataset.labels is not None
        label = int(dataset.labels[number])
        expected = clipkit.classify(
            dataset.images.read(number), dataset.class_names, model, templates=dataset.templates
        )[0]
        assert example.truth == dataset.class_names[label]
        assert example.probability == pytest.approx(float(expected[label]), rel=1e-3)
        assert [guess.probability for guess in example.guesses] == pytest.approx(
            expected.sort(descending=True).values[:5].tolist(), rel=1e-3
        )
        for place, guess in enumerate(example.guesses, start=1):
            assert guess.right == (guess.label == example.truth) == (example.rank == place)
        assert example.heat is not None
        assert example.heat.alt == f"where the model sees {example.truth}"
        assert Image.open(io.BytesIO(base64.b64decode(example.heat.png))).size == (96, 96)


def test_ranks_of_examples_agree_with_scores(subject: Subject) -> None:
    assert subject.dataset.labels is not None
    few = torch.arange(8)
    dataset = replace(subject.dataset, labels=subject.dataset.labels[few])
    some = Given(subject, subject.images().projected[few], dataset)
    ranks = [example.rank for example in take_snapshot(some, step=0).examples]  # all eight images
    score = {score.metric: score.value for score in zero_shot(some, Options(details=False)).scores}
    assert score["acc1"] == sum(rank == 1 for rank in ranks) / 8
    assert score["acc5"] == sum(rank is not None and rank <= 5 for rank in ranks) / 8


def test_matrix_has_pairs_with_distinct_texts(model: CLIP, subject: Subject) -> None:
    matrix = take_snapshot(subject, step=0).matrix
    assert matrix is not None
    assert matrix.captions == tuple(f"a photo of something {name}." for name in subject.dataset.class_names)
    images = subject.images().projected[[int(name) for name in matrix.pictures]]
    expected = images @ clipkit.encode_text(matrix.captions, model).T
    assert torch.allclose(torch.tensor(matrix.cosines), expected, atol=1e-4)


def test_captions_are_preferred_to_class_prompts(model: CLIP, write_dataset: Callable[..., Path]) -> None:
    captions = [f"number {i // 2}\nanother" for i in range(40)]
    folder = write_dataset(labels=[None] * 40, captions=captions, class_names=None, templates=None)
    snapshot = take_snapshot(Subject(Encoder(model), open_dataset(folder)), step=0)
    assert snapshot.examples == ()
    assert snapshot.matrix is not None
    assert len(set(snapshot.matrix.captions)) == len(snapshot.matrix.captions) == 16
    assert all(caption.startswith("number ") for caption in snapshot.matrix.captions)
    assert 1 <= len(snapshot.queries) <= 6
    assert all(hit.right is None for query in snapshot.queries for hit in query.hits)


def test_queries_find_the_nearest_images(model: CLIP, subject: Subject) -> None:
    found = take_snapshot(subject, step=0).queries
    assert subject.dataset.labels is not None
    labels = [subject.dataset.class_names.index(query.text.split()[-1].rstrip(".")) for query in found]
    assert len(set(labels)) == 6
    for query, label in zip(found, labels, strict=True):
        similarity = (subject.images().projected @ clipkit.encode_text(query.text, model).T)[:, 0]
        expected = similarity.sort(descending=True).values[:8].tolist()
        assert [hit.cosine for hit in query.hits] == pytest.approx(expected, abs=1e-4)
        for hit in query.hits:
            assert hit.right == (int(subject.dataset.labels[int(hit.picture)]) == label)


def test_default_queries_are_spread_over_classes_with_images(
    model: CLIP, write_dataset: Callable[..., Path]
) -> None:
    names = [f"thing {i}" for i in range(100)]
    folder = write_dataset(labels=list(range(0, 100, 4)), class_names=names, templates=["{c}"])
    found = take_snapshot(Subject(Encoder(model), open_dataset(folder)), step=0).queries
    assert [query.text for query in found] == [f"thing {i}" for i in (0, 20, 40, 56, 76, 96)]


def test_snapshots_are_reproducible_and_show_the_same_images_later(model: CLIP, subject: Subject) -> None:
    first = take_snapshot(subject, step=1)
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    assert take_snapshot(subject, step=1) == first
    assert torch.equal(torch.random.get_rng_state(), before)
    other = Given(subject, subject.images().projected.flip(0))
    later = take_snapshot(other, step=2)
    assert [example.picture for example in later.examples] == [example.picture for example in first.examples]
    assert later.matrix is not None
    assert first.matrix is not None
    assert later.matrix.pictures == first.matrix.pictures
    assert take_snapshot(subject, step=1, seed=1) != first


def test_autocast_does_not_change_similarities(subject: Subject) -> None:
    plain = take_snapshot(subject, step=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert take_snapshot(subject, step=0) == plain  # everything was encoded before


def test_thumbnails_are_small_pngs(model: CLIP, subject: Subject) -> None:
    snapshot = take_snapshot(subject, step=0)
    named = {example.picture for example in snapshot.examples}
    named |= {hit.picture for query in snapshot.queries for hit in query.hits}
    assert named <= set(snapshot.pictures)
    for thumbnail in snapshot.pictures.values():
        with Image.open(io.BytesIO(base64.b64decode(thumbnail.png))) as image:
            assert image.format == "PNG"
            assert max(image.size) <= 96
        assert thumbnail.alt.startswith("a photo of something ")


def test_features_that_are_not_finite_are_rejected(model: CLIP, subject: Subject) -> None:
    broken = Given(subject, subject.images().projected / 0)
    with pytest.raises(DataError, match="colours are not finite"):
        take_snapshot(broken, step=0)


def test_round_trip_through_files(model: CLIP, subject: Subject, tmp_path: Path) -> None:
    snapshots = [take_snapshot(subject, step=step) for step in (20, 3)]
    paths = [write_snapshot(tmp_path, snapshot) for snapshot in snapshots]
    assert [path.name for path in paths] == ["step_00000020.colours.json", "step_00000003.colours.json"]
    assert {path.name for path in (tmp_path / "snapshots").iterdir()} == {path.name for path in paths}
    assert read_snapshots(tmp_path) == [snapshots[1], snapshots[0]]
    assert list(find_snapshots(tmp_path)["colours"]) == [3, 20]
    assert read_snapshots(tmp_path / "nothing") == []


def test_unpaired_surrogates_are_replaced(model: CLIP, subject: Subject, tmp_path: Path) -> None:
    snapshot = replace(take_snapshot(subject, step=0), dataset="half \ud800")
    write_snapshot(tmp_path, snapshot)
    assert [one.dataset for one in read_snapshots(tmp_path)] == ["half ?"]


def test_every_dataset_has_its_own_file(model: CLIP, subject: Subject, tmp_path: Path) -> None:
    snapshot = take_snapshot(subject, step=20)
    names = ["a-b", "a.b", "a b", "猫", "狗", "/data/ünusual: name", "x" * 200, "x" * 201]
    paths = [write_snapshot(tmp_path, replace(snapshot, dataset=name)) for name in names]
    assert len(set(paths)) == len(names) and all(path.name.isascii() for path in paths)
    assert paths[0].name == "step_00000020.a-b.json"
    assert sorted(one.dataset for one in read_snapshots(tmp_path)) == sorted(names)


def test_broken_files_are_named(model: CLIP, subject: Subject, tmp_path: Path) -> None:
    path = write_snapshot(tmp_path, take_snapshot(subject, step=0))
    whole = path.read_text()
    value = json.loads(whole)
    value["matrix"]["cosines"].pop()
    for text in (
        whole[: len(whole) // 2],
        "[]",
        "{}",
        json.dumps(value),
        whole.replace('"rank":', '"rank":1e999,"x":'),
        whole.replace('"rank":', f'"rank":{"9" * 400},"x":'),
        whole.replace('"rank":', f'"rank":{"9" * 5000},"x":'),
        whole.replace('"rank":', f'"rank":{"[" * 100_000},"x":'),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=r"step_00000000\.colours\.json is not a snapshot"):
            read_snapshot(path)
    path.unlink()
    path.symlink_to("nothing")
    with pytest.raises(DataError, match=r"cannot read .*step_00000000\.colours\.json: No such file"):
        read_snapshots(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="is not a snapshot: expected a file of at most"):
        read_snapshot(path)

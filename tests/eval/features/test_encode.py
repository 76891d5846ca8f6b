"""Tests of the encoder: images and texts are encoded once across datasets, tasks and processes."""

import copy
import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

import clipkit
from clipkit import CLIP
from clipkit.errors import DataError
from clipkit.samples import Samples
from eval import Encoder, EvalDataset, Ranks, Score, Subject, evaluate, open_dataset
from eval.datasets.dataset import SampleImages
from eval.features.encoder import images_per_pass
from tests.eval.conftest import png

WriteDataset = Callable[..., Path]


def test_tasks_and_runs_share_images_and_texts(
    model: CLIP, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    folders = [
        write_dataset("one"),
        write_dataset("two", labels=[i % 3 for i in range(11)], class_names=("red", "green", "blue")),
        write_dataset("three", templates=("{c}", "a drawing of {c}")),
        write_dataset(
            "four", captions=[f"a photo of something {'red' if i else 'blue'}." for i in range(23)]
        ),
    ]
    encoder = Encoder(model, store=tmp_path / "features")
    for folder in folders:
        tasks = ["zero-shot", "retrieval"] if folder.name == "four" else ["zero-shot"]
        for _ in range(2):
            evaluate(Subject(encoder, open_dataset(folder)), tasks=tasks)
    # 7 colours in three templates, one of which gives the captions
    assert encoder.encoded == {"images": 3 * 23 + 11, "texts": 21}
    again = Encoder(model, store=tmp_path / "features")
    for folder in folders:
        subject = Subject(again, open_dataset(folder))
        scores = evaluate(subject, tasks=["zero-shot"])
        assert scores == evaluate(model, folder, tasks=["zero-shot"])
        images = [subject.dataset.images.read(i) for i in range(len(subject.dataset))]
        expected = clipkit.encode_image(images, model)
        torch.testing.assert_close(subject.images().projected, expected, atol=1e-6, rtol=0)
    assert again.encoded == {"images": 0, "texts": 0}


def test_filesystem_without_locks_is_a_warning(
    model: CLIP,
    write_dataset: WriteDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    dataset = write_dataset("one")
    for images in (23, 0):
        encoder = Encoder(model, store=tmp_path / "features")
        evaluate(Subject(encoder, open_dataset(dataset)), tasks=["zero-shot"])
        assert encoder.encoded["images"] == images
    assert "is on a filesystem without file locks" in capsys.readouterr().err


def test_other_weights_or_dtype_share_no_features(
    model: CLIP, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    dataset = open_dataset(write_dataset())
    Encoder(model, store=tmp_path / "features").images(dataset)
    other = copy.deepcopy(model)
    next(other.parameters()).data += 1e-3
    encoder = Encoder(other, store=tmp_path / "features")
    encoder.images(dataset)
    assert encoder.encoded["images"] == 23
    with torch.autocast("cpu", dtype=torch.bfloat16):
        encoder = Encoder(model, store=tmp_path / "features")
        encoder.images(dataset)
    assert encoder.encoded["images"] == 23


def test_features_from_before_an_interruption_are_kept(
    model: CLIP, write_dataset: WriteDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.features.encoder._PIECE", 8)
    dataset = open_dataset(write_dataset())
    whole = Encoder(model, batch_size=4).images(dataset)

    class Stop(Exception):
        pass

    done: list[int] = []

    def progress(images: int) -> None:
        done.append(images)
        if sum(done) >= 12:
            raise Stop

    encoder = Encoder(model, store=tmp_path / "features", batch_size=4, progress=progress)
    with pytest.raises(Stop):
        encoder.images(dataset)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("eval-decode")]
    after = Encoder(model, store=tmp_path / "features", batch_size=4)
    features = after.images(dataset)
    assert after.encoded["images"] == 23 - 8
    assert torch.equal(features.projected, whole.projected)
    assert torch.equal(features.before_projection, whole.before_projection)


@pytest.mark.parametrize("first", [True, False])
def test_ranks_with_separate_stores_share_the_work(
    model: CLIP,
    write_dataset: WriteDataset,
    tmp_path: Path,
    first: bool,
) -> None:
    dataset = open_dataset(write_dataset())
    stores = [tmp_path / "a", tmp_path / "b"]
    Encoder(model, store=stores[0 if first else 1]).images(dataset)  # only one of the ranks has them
    barrier, values = threading.Barrier(2, timeout=120), [torch.empty(0)] * 2

    def gather(rank: int) -> Callable[[Tensor], Tensor]:
        def add(own: Tensor) -> Tensor:
            values[rank] = own.clone()
            barrier.wait()
            total = values[0] + values[1]
            barrier.wait()
            return total

        return add

    encoders = [
        Encoder(model, store=store, batch_size=4, ranks=Ranks(rank=rank, world=2, gather=gather(rank)))
        for rank, store in enumerate(stores)
    ]
    found: list[Tensor] = [torch.empty(0)] * 2
    texts: list[Tensor] = [torch.empty(0)] * 2

    def work(rank: int) -> None:
        found[rank] = encoders[rank].images(dataset).projected
        texts[rank] = encoders[rank].texts(["one", "two", "one", "three"])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = Encoder(model).images(dataset).projected
    for rank, encoder in enumerate(encoders):
        torch.testing.assert_close(found[rank], expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(
            texts[rank], clipkit.encode_text(["one", "two", "one", "three"], model), atol=1e-6, rtol=0
        )
        own = Encoder(model, store=encoder.store)
        assert torch.equal(own.images(dataset).projected, found[rank])
        assert own.encoded == {"images": 0, "texts": 0}
    # an image is encoded by one rank, unless that rank has its features
    assert sum(encoder.encoded["images"] for encoder in encoders) in (11, 12)
    assert sum(encoder.encoded["texts"] for encoder in encoders) == 3


class Images(Samples):
    """Encoded images in memory."""

    def __init__(self, numbers: range) -> None:
        self.contents = [png(number) for number in numbers]

    def __len__(self) -> int:
        return len(self.contents)

    def key(self, i: int) -> str:
        return str(i)

    def locate(self, i: int) -> tuple[str, str]:
        return "memory", str(i)

    def members(self, i: int) -> list[str]:
        return ["png"]

    def fields(self, i: int) -> dict[str, Any]:
        return {}

    def read(self, i: int, member: str) -> bytes:
        return self.contents[i]

    @property
    def content_id(self) -> str:
        return hashlib.sha256(b"".join(self.contents)).hexdigest()[:16]


def damage(files: Sequence[Path], kind: str, chosen: int, other: int, place: int) -> None:
    """Delete, truncate, swap or reverse one of the files, or flip one of its bits."""
    path, second = files[chosen % len(files)], files[other % len(files)]
    content = bytearray(path.read_bytes())
    if kind == "delete":
        path.unlink()
    elif kind == "truncate":
        path.write_bytes(content[: place % (len(content) + 1)])
    elif kind == "swap":
        path.write_bytes(second.read_bytes())
        second.write_bytes(content)
    elif kind == "reverse":  # reverses the numbers of an int64 file
        path.write_bytes(b"".join(content[i : i + 8] for i in range(len(content), -8, -8) if i >= 0))
    elif content:
        content[place % len(content)] ^= 1 << place % 8
        path.write_bytes(content)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("score"), st.integers(0, 2), st.integers(0, 1), st.booleans()),
        st.tuples(
            st.sampled_from(["delete", "truncate", "swap", "reverse", "flip"]),
            st.integers(0, 40),
            st.integers(0, 40),
            st.integers(0, 2**12),
        ),
    ),
    min_size=4,
    max_size=14,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_a_damaged_store_gives_the_same_scores_or_an_error(
    model: CLIP, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, ...]]
) -> None:
    """Evaluate three datasets with two models while files of the store are damaged in between."""
    store = tmp_path_factory.mktemp("store")
    models, datasets, expected = scored_models(model)
    kept = [Encoder(one, store=store, batch_size=4) for one in models]
    for step in [*steps, *(("score", number, number % 2, True) for number in range(3))]:
        if step[0] == "score":
            _, number, which, reopen = step
            if reopen:
                kept[which] = Encoder(models[which], store=store, batch_size=4)
            subject = Subject(kept[which], datasets[number])
            try:
                features, scores = subject.images().projected, evaluate(subject)
            except DataError as error:
                assert "run the command again" in str(error)
            else:
                right = expected[which, number]
                torch.testing.assert_close(features, right[0], atol=1e-6, rtol=0)
                assert scores == right[1]
        elif files := sorted(path for path in store.rglob("*") if path.is_file()):
            damage(files, *step)


@cache
def scored_models(
    model: CLIP,
) -> tuple[list[CLIP], list[EvalDataset], dict[tuple[int, int], tuple[Tensor, list[Score]]]]:
    """Return two models, three datasets (two share images), and features and scores without a store."""
    other = copy.deepcopy(model)
    next(other.parameters()).data += 1e-2
    datasets = [
        EvalDataset(
            name=name,
            class_names=("red", "green", "blue"),
            templates=templates,
            images=SampleImages(images),
            labels=torch.arange(len(images)) % 3,
            captions=None,
            revision=images.content_id,
            tasks=("zero-shot",),
        )
        for name, images, templates in (
            ("a", Images(range(6)), ("{c}",)),
            ("b", Images(range(3, 9)), ("a {c} thing", "{c}")),
            ("c", Images(range(20, 26)), ("something {c}",)),
        )
    ]
    expected = {}
    for which, one in enumerate((model, other)):
        for number, dataset in enumerate(datasets):
            subject = Subject(Encoder(one, batch_size=4), dataset)
            expected[which, number] = subject.images().projected, evaluate(subject)
    return [model, other], datasets, expected


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_only_batches_on_a_cpu_are_split(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    batch = torch.zeros(256, 3, 1, 1, dtype=torch.uint8)
    assert images_per_pass(batch.to("meta")) == 256
    assert images_per_pass(batch) == 256 // threads
    assert images_per_pass(batch[:20]) == max(16, -(-20 // threads))

"""Pictures and texts go through a model once, whichever datasets, tasks and processes ask for them."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import clipkit
from clipkit import CLIP
from eval import Encoder, Ranks, Subject, evaluate, open_dataset

WriteDataset = Callable[..., Path]


def test_five_datasets_that_share_pictures_and_classes_encode_nothing_twice(
    model: CLIP, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    # pictures are told by their number: the first 23, fewer of them, with other labels, doubled in themselves
    folders = [
        write_dataset("one"),
        write_dataset("two", labels=[i % 3 for i in range(11)], class_names=("red", "green", "blue")),
        write_dataset("three", templates=("{c}", "a drawing of {c}")),
        write_dataset("four", labels=[0] * 30),
        write_dataset(
            "five", captions=[f"a photo of something {'red' if i else 'blue'}." for i in range(23)]
        ),
    ]
    encoder = Encoder(model, store=tmp_path / "features")
    for folder in folders:
        tasks = ["zero-shot", "retrieval"] if folder.name == "five" else ["zero-shot"]
        evaluate(Subject(encoder, open_dataset(folder)), tasks=tasks)
    # 30 pictures in all; 7 colours in three templates, of which captions use one
    assert encoder.encoded == {"images": 30, "texts": 21}
    again = Encoder(model, store=tmp_path / "features")
    for folder in folders:
        subject = Subject(again, open_dataset(folder))
        scores = evaluate(subject, tasks=["zero-shot"])
        assert scores == evaluate(model, folder, tasks=["zero-shot"])
        pictures = [subject.dataset.shards.read(i).image for i in range(len(subject.dataset))]
        expected = clipkit.encode_image(pictures, model)
        torch.testing.assert_close(subject.images().projected, expected, atol=1e-6, rtol=0)
    assert again.encoded == {"images": 0, "texts": 0}


def test_other_weights_or_another_number_format_share_nothing(
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


def test_what_was_encoded_before_an_interruption_stays(
    model: CLIP, write_dataset: WriteDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.picture_pass._PIECE", 8)
    dataset = open_dataset(write_dataset())
    whole = Encoder(model, batch_size=4).images(dataset)

    class Stop(Exception):
        pass

    done: list[int] = []

    def progress(pictures: int) -> None:
        done.append(pictures)
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
def test_ranks_with_stores_of_their_own_share_what_one_of_them_has(
    model: CLIP,
    write_dataset: WriteDataset,
    tmp_path: Path,
    first: bool,
) -> None:
    dataset = open_dataset(write_dataset())
    stores = [tmp_path / "a", tmp_path / "b"]
    Encoder(model, store=stores[0 if first else 1]).images(
        open_dataset(write_dataset("some", labels=[0] * 9))
    )
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
    # a rank without a picture's features encodes it, one with them gives them to the other
    assert 14 <= sum(encoder.encoded["images"] for encoder in encoders) < 23
    assert sum(encoder.encoded["texts"] for encoder in encoders) == 3

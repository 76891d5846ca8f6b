"""Tests of tables of images and captions, and of folders with captions beside images, as evaluation data."""

import json
import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from clipkit import CLIP
from clipkit.errors import DataError
from clipkit.samples import MissingSplit
from data.__main__ import main as pack_main
from eval import Encoder, Subject, evaluate
from eval.datasets.targets import find_targets
from eval.readers import open_dataset
from tests.eval.conftest import png


def fill(folder: Path, *names: str) -> Path:
    for seed, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png(seed))
    return folder


def test_rows_of_an_image_are_one_image_with_all_captions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, "a.png", "b.png")
    table = tmp_path / "pairs.csv"
    table.write_text("image,caption\nb.png,one\na.png,two\n./b.png,three\ngone.png,x\nb.png,one\na.png,\n")
    (target,) = find_targets([str(table)])
    dataset = target.dataset
    assert (dataset.name, dataset.tasks) == ("pairs", ("retrieval",))
    assert dataset.captions == (("one", "three"), ("two",))
    assert [dataset.images.read(i) for i in (0, 1)] == [png(1), png(0)]
    assert dataset.images.locate(0) == (str(tmp_path), "b.png")
    assert caplog.messages == ["dataset pairs: 2 images cannot be used: 1 × missing file, 1 × empty caption"]
    with pytest.raises(MissingSplit, match=r"dataset pairs has no split 'train': .*pairs.csv has test"):
        open_dataset(table, split="train")
    table.write_text("image,caption\ngone.png,x\n")
    with pytest.raises(DataError, match=r"no image of .*pairs.csv can be used: 1 × missing file"):
        open_dataset(table)


def test_karpathys_splits_are_read(tmp_path: Path) -> None:
    images = [
        {"filename": f"{i}.jpg", "split": split, "sentences": [{"raw": f"{i} {n}"} for n in range(5)]}
        for i, split in enumerate(["train", "test", "val", "test", "restval"])
    ]
    fill(tmp_path / "Images", *(str(image["filename"]) for image in images))
    table = tmp_path / "dataset_flickr8k.json"
    table.write_text(json.dumps({"images": images, "dataset": "flickr8k"}))
    captions = {split: open_dataset(table, split=split).captions for split in ("train", "val", "test")}
    assert {split: [own[0] for own in texts or ()] for split, texts in captions.items()} == {
        "train": ["0 0"],
        "val": ["2 0"],
        "test": ["1 0", "3 0"],
    }
    assert len((captions["test"] or ())[0]) == 5


def test_labels_in_a_table_are_classes(tmp_path: Path) -> None:
    fill(tmp_path, "1.png", "2.png", "3.png")
    (tmp_path / "t.tsv").write_text("path\tlabel\n1.png\tdog\n2.png\tcat\n3.png\tdog\n")
    dataset = open_dataset(tmp_path / "t.tsv")
    assert (dataset.tasks, dataset.class_names, dataset.captions) == (("zero-shot",), ("cat", "dog"), None)
    assert dataset.labels is not None and dataset.labels.tolist() == [1, 0, 1]
    (tmp_path / "t.tsv").write_text("path\tlabel\n1.png\tdog\n1.png\tcat\n3.png\tdog\n")
    with pytest.raises(DataError, match=r"1\.png has several labels"):
        open_dataset(tmp_path / "t.tsv")


@pytest.mark.parametrize("beside", [True, False])
def test_folders_of_splits_with_captions_are_read(tmp_path: Path, beside: bool) -> None:
    for split in ("train", "test"):
        folder = fill(tmp_path / "set" / split, f"{split}0.png", f"{split}1.png")
        lines = ["file_name,text"]
        for i in range(2):
            lines.append(f"{split}{i}.png,{split} caption {i}")
            if beside:
                (folder / f"{split}{i}.txt").write_text(f"{split} caption {i}")
        if not beside:
            (folder / "metadata.csv").write_text("\n".join(lines))
    for split in ("test", "train"):
        dataset = open_dataset(tmp_path / "set", split=split)
        assert dataset.captions == ((f"{split} caption 0",), (f"{split} caption 1",))
        assert dataset.split == split


def test_folders_with_captions_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = fill(tmp_path / "photos", "a.png", "b.png", "in/c.png")
    (folder / "a.txt").write_text("one\ntwo\n")
    (folder / "in/c.txt").write_text("three\n")
    with caplog.at_level(logging.WARNING, "eval"):
        dataset = open_dataset(folder)
    assert (dataset.name, dataset.captions) == ("photos", (("one", "two"), ("three",)))
    assert caplog.messages == ["dataset photos: 1 image cannot be used: 1 × no caption"]
    (folder / "captions.csv").write_text("file,caption\nb.png,other\n")
    (folder / "a.txt").unlink()
    (folder / "in/c.txt").unlink()
    assert open_dataset(folder).captions == (("other",),)


@pytest.mark.filterwarnings("ignore")  # warnings of CLIP_benchmark
@pytest.mark.parametrize("form", ["captions.txt", "Flickr8k.token.txt"])
def test_recall_of_flickr8k_equals_clip_benchmark(
    model: CLIP, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both forms of Flickr8k are packed and scored over all images with five captions each."""
    theirs = pytest.importorskip("clip_benchmark.metrics.zeroshot_retrieval")
    names = [f"{seed}.jpg" for seed in range(60)]
    fill(tmp_path / "Images", *names)
    rows = [(name, number, f"{name[:-4]}, text {number}") for name in names for number in range(5)]
    if form == "captions.txt":
        lines = ["image,caption", *(f'{name},"{text}"' for name, _, text in rows)]
    else:
        lines = [f"{name}#{number}\t{text}" for name, number, text in rows]
    (tmp_path / form).write_text("\n".join(lines) + "\n")
    assert pack_main(["pack", str(tmp_path / form), str(tmp_path / "packed"), "--quiet"]) == 0

    subject = Subject(Encoder(model), open_dataset(tmp_path / "packed", split="train"))
    captions = subject.dataset.captions
    assert captions is not None and [len(texts) for texts in captions] == [5] * 60
    images = subject.images().projected
    # texts that are more or less like their image, so that recall is far from chance
    noise = 0.05 * torch.randn(300, model.dim, generator=torch.Generator().manual_seed(0))
    texts = F.normalize(images.repeat_interleave(5, dim=0) + noise, dim=1)
    row = {text: i for i, text in enumerate(text for own in captions for text in own)}
    monkeypatch.setattr(subject.encoder, "texts", lambda texts_, **_: texts[[row[text] for text in texts_]])
    scores = {score.metric: score.value for score in evaluate(subject, tasks=["retrieval"])}

    class Stored(torch.nn.Module):
        def encode_image(self, numbers: torch.Tensor) -> torch.Tensor:
            return images[numbers]

        def encode_text(self, numbers: torch.Tensor) -> torch.Tensor:
            return texts[numbers]

    batches = [(torch.arange(i, i + 20), [[row[text] for text in own] for own in captions[i : i + 20]])
               for i in range(0, 60, 20)]  # fmt: skip
    expected = theirs.evaluate(Stored(), batches, torch.tensor, "cpu", amp=False, recall_k_list=[1, 5, 10])
    for k in (1, 5, 10):
        assert scores[f"image_to_text_R@{k}"] == pytest.approx(expected[f"text_retrieval_recall@{k}"])
        assert scores[f"text_to_image_R@{k}"] == pytest.approx(expected[f"image_retrieval_recall@{k}"])
    assert 0.1 < scores["text_to_image_R@1"] < 0.9

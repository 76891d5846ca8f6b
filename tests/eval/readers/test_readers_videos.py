"""Tests of datasets of video frames: their readers, and pm0 and pm10 against the authors' counting."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from clipkit import CLIP
from eval import Encoder, Subject, evaluate
from eval.metrics.classes import anchor_accuracy
from eval.readers import open_dataset
from tests.eval.readers.test_readers_folders import fill, refusal

CLASSES = {"0": ["n1", "fox"], "1": ["n2", "red_panda"], "2": ["n3", "zebra"]}
SETS = {"val/a/5.png": ["val/a/4.png", "val/a/6.png"], "val/b/1.png": []}
LABELS = {"val/a/4.png": [1], "val/a/5.png": [0, 1], "val/a/6.png": [2], "val/b/1.png": [2]}


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def vid(folder: Path) -> Path:
    fill(folder, *LABELS)
    write(folder / "metadata", pmsets=SETS, labels=LABELS)
    write(folder / "misc", imagenet_vid_class_index=CLASSES)
    return folder


def marks(keys: dict[str, str]) -> dict[str, object]:
    """Reviews as the authors store them: ``{key: "mark, mark"}`` with marks numbered."""
    labels = sorted({one for text in keys.values() for one in text.split(", ")})
    return {
        "labels": labels,
        "annotations": [
            {"key": key, "notes": "", "labels": [labels.index(one) for one in text.split(", ")]}
            for key, text in keys.items()
        ],
    }


def test_imagenet_vid_robust_is_read(tmp_path: Path) -> None:
    found = open_dataset(vid(tmp_path))
    assert found.class_names == ("fox", "red panda", "zebra") and found.labels is not None
    assert [found.images.locate(i)[1] for i in range(4)] == [
        "val/a/5.png",
        *SETS["val/a/5.png"],
        "val/b/1.png",
    ]
    assert found.labels.nonzero().tolist() == [[0, 0], [0, 1], [1, 1], [2, 2], [3, 2]]
    assert found.metadata["anchor"].tolist() == [0, 0, 0, 3]
    write(tmp_path / "metadata", labels={key: own for key, own in LABELS.items() if "4" not in key})
    assert "'val/a/4.png'" in refusal(tmp_path)
    for text in ("[]", "{", "", '{"val/a/5.png": []}', '{"val/a/5.png": [true]}', '{"val/a/5.png": [0.5]}'):
        (tmp_path / "metadata" / "labels.json").write_text(text)
        assert "labels.json is not as published" in refusal(tmp_path)
    write(tmp_path / "metadata", labels=LABELS | {"val/a/4.png": [9]})
    assert "frame val/a/4.png has label 9 of 3 classes" in refusal(tmp_path)
    write(tmp_path / "metadata", labels=LABELS | {"val": [0], "a\0b": [0]})
    for frame in ("val", "a\0b"):
        write(tmp_path / "metadata", pmsets={frame: []})
        assert "not a frame" in refusal(tmp_path)
    write(tmp_path / "metadata", labels=LABELS | {"../x.png": [0]}, pmsets={"../x.png": []})
    assert "not a frame" in refusal(tmp_path)
    write(tmp_path / "metadata", labels=LABELS, pmsets=SETS)
    write(tmp_path / "misc", imagenet_vid_class_index={"0": "fox"})
    assert "imagenet_vid_class_index.json is not as published" in refusal(tmp_path)
    (tmp_path / "misc" / "imagenet_vid_class_index.json").unlink()
    assert "imagenet_vid_class_index.json" in refusal(tmp_path)


def test_ytbb_robust_is_read(tmp_path: Path) -> None:
    near = {12: "similar, correct", 11: "similar, occlusion-increased", 9: "dissimilar", 30: "similar"}
    anchors = {
        "v_100/frame-10.png": "good, cat",
        "w_5/frame-3.png": "good, unsure",
        "x_5/frame-3.png": "good",
    }
    pairs = {f"v_100/frame-10.png,v_100/frame-{i}.png": mark for i, mark in near.items()}
    pairs["x_5/frame-3.png,x_5/frame-4.png"] = "bad-anchor"
    fill(tmp_path, *anchors, *(pair.split(",")[1] for pair in pairs))
    write(
        tmp_path, anchor_labels=marks(anchors), pmk_labels=marks(pairs),
        ytbb_class_index=dict(enumerate(["person", "cat", *map(str, range(2, 22)), "none", "car"])),
    )  # fmt: skip
    (tmp_path / "ytbb_robustness_test_anchors_full.csv").write_text(
        "ytid,time_ms,label\nv,100,22\nw,5,0\nx,5,0\n"
    )
    found = open_dataset(tmp_path)
    assert len(found.class_names) == 23 and "none" not in found.class_names and found.labels is not None
    assert [found.images.locate(i)[1] for i in range(len(found))] == [
        "v_100/frame-10.png",
        "v_100/frame-12.png",
    ]
    assert [found.class_names[i] for i in found.labels[0].nonzero()[:, 0]] == ["cat", "car"]  # its label: 23
    for text in ("ytid,label\nv,1\n", "ytid,time_ms,label\nv,100,99\n", "ytid,time_ms,label\nv,100\n"):
        (tmp_path / "ytbb_robustness_test_anchors_full.csv").write_text(text)
        assert "each row" in refusal(tmp_path)
    (tmp_path / "ytbb_robustness_test_anchors_full.csv").unlink()
    assert "ytbb_robustness_test_anchors_full.csv" in refusal(tmp_path)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_anchor_accuracy_equals_counting_of_the_authors(sizes: list[int], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    anchors = torch.tensor([first for first, size in zip(firsts, sizes, strict=True) for _ in range(size)])
    labels = torch.rand(len(anchors), 3, generator=draw) < 0.5
    predicted = torch.randint(3, (len(anchors),), generator=draw)
    right = [bool(labels[i, predicted[i]]) for i in range(len(anchors))]
    plain = sum(right[first] for first in firsts) / len(sizes)
    robust = sum(all(right[first : first + size]) for first, size in zip(firsts, sizes, strict=True)) / len(
        sizes
    )
    for nearby, value in ((False, plain), (True, robust)):
        estimate = anchor_accuracy(predicted, labels, anchors, nearby=nearby)
        assert estimate.n == len(sizes) and estimate.value == pytest.approx(value)


def test_model_is_scored_on_frames(tmp_path: Path, model: CLIP) -> None:
    subject = Subject(Encoder(model, batch_size=2), open_dataset(vid(tmp_path)))
    scores = {one.metric: one for one in evaluate(subject, tasks=["zero-shot"])}
    assert scores["pm0"].n == scores["pm10"].n == 2 and scores["pm10"].value <= scores["pm0"].value

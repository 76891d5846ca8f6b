"""Tests of evaluation on shards whose images and captions are in members of any name."""

import json
import tarfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import torch

from clipkit import CLIP
from clipkit.config import Config
from clipkit.errors import DataError
from clipkit.training.checkpoint import LoopState, save_checkpoint
from eval.__main__ import main
from eval.readers import open_dataset
from eval.readers.shards import Members
from tests.data.published_tars import SETTINGS, sample_of, write_published
from tests.eval.conftest import WriteDataset


@pytest.mark.parametrize("layout", SETTINGS)
def test_captions_of_published_layouts_are_opened_for_retrieval(layout: str, tmp_path: Path) -> None:
    image, captions = SETTINGS[layout]
    write_published(layout, tmp_path / layout / "0.tar", 5)
    dataset = open_dataset(tmp_path / layout, members=Members(image=image, captions=captions))
    assert (len(dataset), dataset.tasks) == (5, ("retrieval",))
    assert dataset.captions is not None
    for number in range(5):
        members = sample_of(layout, number)
        assert dataset.images.read(number) == members[image or "jpg"]
        expected = [members[name] for name in captions if name in members]
        if layout == "datacompdr":
            expected += [f"synthetic {i} of {number}" for i in range(5)]
        assert dataset.captions[number] == tuple(expected)
    other = open_dataset(tmp_path / layout, members=Members(image=image, captions=captions[:1]))
    assert other.revision != dataset.revision or captions[:1] == captions


@pytest.mark.parametrize("layout", SETTINGS)
def test_members_of_a_training_are_used_where_a_dataset_has_them(
    layout: str, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    image, captions = SETTINGS[layout]
    write_published(layout, tmp_path / layout / "0.tar", 5)
    members = Members(image=image, captions=captions, optional=True)
    named = open_dataset(tmp_path / layout, members=replace(members, optional=False))
    opened = open_dataset(tmp_path / layout, members=members)
    assert (opened.captions, opened.revision, opened.stamp) == (named.captions, named.revision, named.stamp)
    usual = write_dataset("usual", captions=["a cat", "two dogs", "a hat"], labels=[None] * 3)
    classes = write_dataset("classes")
    for folder in (usual, classes):
        plain, opened = open_dataset(folder), open_dataset(folder, members=members)
        assert (opened.captions, opened.revision, opened.stamp) == (
            plain.captions,
            plain.revision,
            plain.stamp,
        )
    missing = Members(image="photo", captions=("text",), optional=True)
    write_published("rs5m", tmp_path / "other" / "0.tar", 5)
    with pytest.raises(
        DataError, match=r"no sample has an image; .*: add data\.image=img_content data\.captions=cap"
    ):
        open_dataset(tmp_path / "other", members=missing)


def test_captions_that_pack_lists_have_the_revision_of_the_usual_names(
    write_dataset: WriteDataset,
) -> None:
    folder = write_dataset("pairs", captions=["a cat\na small cat", "two dogs"], labels=[None] * 2)
    plain = open_dataset(folder)
    assert plain.captions == (("a cat", "a small cat"), ("two dogs",))
    listed = open_dataset(folder, members=Members(captions=("captions",), optional=True))
    assert (listed.captions, listed.revision) == (plain.captions, plain.revision)


def test_error_lists_members_and_the_options_to_add(tmp_path: Path) -> None:
    write_published("rs5m", tmp_path / "rs5m" / "0.tar", 5)
    with pytest.raises(DataError) as caught:
        open_dataset(tmp_path / "rs5m")
    assert str(caught.value) == (
        "dataset rs5m: no sample has an image; members: caption (5), img_content (5), img_name (5): "
        "add --image img_content --captions caption"
    )
    with pytest.raises(DataError, match=r"has a label \(\.cls\) or a caption; members: .*: add --captions"):
        open_dataset(tmp_path / "rs5m", members=Members(image="img_content"))


def test_commands_read_members_by_name(model: CLIP, tmp_path: Path) -> None:
    run = tmp_path / "run"
    state = LoopState(step=40, data="none")
    save_checkpoint(run, model, torch.optim.AdamW(model.parameters()), state, Config(), keep=1)
    write_published("rs5m", tmp_path / "rs5m" / "0.tar", 6)
    members = ["--image", "img_content", "--captions", "caption", "--model", str(run)]
    out = ["--out", str(tmp_path / "r.jsonl"), "--features", ""]
    assert main(["retrieval", *members, "--data", str(tmp_path / "rs5m"), *out]) == 0
    with tarfile.open(tmp_path / "rs5m" / "0.tar", "w") as tar:
        for number in range(6):
            photo = sample_of("rs5m", number)["img_content"]
            for name, data in (("img_content", photo), ("cls", b"%d" % (number % 2))):
                about = tarfile.TarInfo(f"{number}.{name}")
                about.size = len(data)
                tar.addfile(about, BytesIO(data))
    (tmp_path / "rs5m" / "classnames.txt").write_text("field\nforest\n")
    assert main(["zero-shot", *members, "--data", str(tmp_path / "rs5m"), *out]) == 0
    tasks = {json.loads(line)["task"] for line in (tmp_path / "r.jsonl").read_text().splitlines()}
    assert tasks == {"retrieval", "zero-shot"}

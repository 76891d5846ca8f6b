"""Tests of evaluation on shards whose images and captions are in members of any name."""

import json
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
import torch

from clipkit import CLIP
from clipkit.config import Config
from clipkit.errors import DataError
from clipkit.training.checkpoint import LoopState, save_checkpoint
from eval.__main__ import main
from eval.readers import Members, open_dataset
from tests.data.published_tars import SETTINGS, sample_of, write_published


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

"""Tests of `python -m data tokenizer`, and of training with model.tokenizer."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from tokenizers import Tokenizer

from clipkit import load
from clipkit.config import LossConfig, ModelConfig, SmallConfig
from clipkit.errors import ConfigError
from clipkit.export.open_clip import find_obstacle
from clipkit.training.build import shape_of
from data.shards.writer import DatasetWriter, Record
from data.tokenizer import train_tokenizer
from tests.forked import Ended, Forked

TEXTS = [
    "woman scientist",
    "Frau im Labor",
    "女性科学者",
    "นักวิทยาศาสตร์",
    "flag: Åland Islands",
    "Keycap 5",
] * 20


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pairs") / "pairs"
    with DatasetWriter(out) as writer:
        for number, text in enumerate(TEXTS):
            buffer = io.BytesIO()
            Image.new("RGB", (16, 16), (number, 2 * number, 0)).save(buffer, "png")
            meta = {"more": [f"{text} again", f"zyx{text}"], "kind": number % 2}
            record = Record(
                key=f"{number:03}", image=buffer.getvalue(), extension="png", caption=text, meta=meta
            )
            writer.write("train", record)
        writer.finish({"name": "pairs"})
    return out


def run(forked: Forked, program: str, *arguments: object) -> Ended:
    return forked.run(program, [*map(str, arguments)], {"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def folder(pairs: Path, forked: Forked) -> Path:
    out = pairs.parent / "tokenizer"
    done = run(forked, "data/__main__.py", "tokenizer", pairs, "--out", out, "--vocab", 300)
    assert done.returncode == 0 and "300 tokens from 120 captions" in done.stdout, done.stderr
    return out


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1, max_size=5))
def test_every_text_is_encoded_without_loss(texts: list[str]) -> None:
    made = train_tokenizer([*texts, "a b"], 280)
    end = made.get_vocab_size() - 1
    for text in [*texts, "other ünicode 🙂"]:
        ids = made.encode(text).ids
        assert ids[0] == end - 1 and ids[-1] == end and end not in ids[:-1]
        assert made.decode(ids).removeprefix(" ") == made.normalizer.normalize_str(text).removeprefix(" ")


def test_command_options_and_errors(pairs: Path, folder: Path, tmp_path: Path, forked: Forked) -> None:
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert (
        made.get_vocab_size() == 300
        and made.encode("Woman SCIENTIST").ids == made.encode("woman scientist").ids
    )
    fields = ("tokenizer", pairs, "--captions", "more", "--filters", "kind = 0", "--quiet")
    done = run(forked, "data/__main__.py", *fields, "--out", tmp_path / "more", "--vocab", 400)
    assert done.returncode == 0 and "from 120 captions" in done.stdout, (
        done.stderr
    )  # two captions of every second sample
    assert "zyx" in "".join(Tokenizer.from_file(str(tmp_path / "more" / "tokenizer.json")).get_vocab())
    for arguments, message in (
        ((pairs, "--out", folder), "is not empty"),
        ((pairs, "--out", tmp_path / "x", "--captions", "none"), "samples examined has a caption in none"),
        ((pairs, "--out", tmp_path / "x", "--vocab", "100"), "258"),
        ((pairs / "none", "--out", tmp_path / "x"), "no data at"),
        ((pairs, "--out", "/proc/none/x"), "/proc/none"),
    ):
        done = run(forked, "data/__main__.py", "tokenizer", *arguments)
        assert done.returncode and message in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "x").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["more"]


@pytest.mark.long
def test_training_stores_and_exports_the_tokenizer(
    pairs: Path, folder: Path, tmp_path: Path, forked: Forked
) -> None:
    training = [
        "model.name=ViT-Ti-4-16", "model.context_length=20", f"model.tokenizer={folder}", f"data.train={pairs}",
        "data.workers=0", "batch_size=8", "optim.warmup=1", f"out={tmp_path / 'run'}", "checkpoint.every_steps=2",
    ]  # fmt: skip
    done = run(forked, "train.py", *training, "steps=2")
    assert done.returncode == 0, done.stderr
    moved = folder.rename(folder.with_name("moved"))
    try:
        missing = run(forked, "train.py", *training, "steps=4")
        assert missing.returncode == 1 and "no tokenizer there" in missing.stderr
        model = load(tmp_path / "run")  # the tokenizer is stored with the weights
    finally:
        moved.rename(folder)
    assert model.token_embedding.weight.shape[0] == 300
    expected = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = model.tokenizer(TEXTS[:6])
    for row, text in zip(tokens.tolist(), TEXTS, strict=False):
        ids = expected.encode(text).ids
        assert row == [
            *(ids if len(ids) <= 20 else [*ids[:19], 299]),
            *[0] * (tokens.shape[1] - min(20, len(ids))),
        ]
    assert run(forked, "train.py", *training, "steps=4").returncode == 0  # resumes
    (tmp_path / "other").mkdir()
    other = train_tokenizer(["something else entirely " * 5], 300)
    other.save(str(tmp_path / "other" / "tokenizer.json"))
    (tmp_path / "other" / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    changed = run(forked, "train.py", *training, "steps=6", f"model.tokenizer={tmp_path / 'other'}")
    assert changed.returncode == 1 and changed.stderr.count("\n") == 1, changed.stderr
    assert "tokenizer" in (find_obstacle(model) or "")
    arguments = ["export", tmp_path / "run", tmp_path / "exported", "--to", "transformers"]
    done = run(forked, "clipkit/__main__.py", *arguments)
    assert done.returncode == 0, done.stderr
    model = load(tmp_path / "run")
    again = load(tmp_path / "exported")
    assert torch.equal(again.tokenizer(TEXTS[:6]), model.tokenizer(TEXTS[:6]))
    with torch.no_grad():
        torch.testing.assert_close(again.encode_text(tokens), model.encode_text(tokens))


def test_model_uses_tokenizer_and_rejects_invalid_ones(folder: Path, tmp_path: Path) -> None:
    def shape(**given: Any) -> int:
        return shape_of(ModelConfig(name="ViT-Ti-4-16", **given), LossConfig(), SmallConfig()).text.vocab_size

    assert shape(tokenizer=str(folder)) == 300 and shape() == 49408
    with pytest.raises(ConfigError, match="no tokenizer there; python -m data tokenizer"):
        shape(tokenizer=str(tmp_path))
    with pytest.raises(ConfigError, match="requires clipkit's text transformer"):
        shape(tokenizer=str(folder), text="cbow")
    with pytest.raises(ConfigError, match="have their own tokenizer"):
        ModelConfig(tokenizer=str(folder), weights="runs/other")
    settings_file = json.loads((folder / "tokenizer.json").read_text())
    settings_file["post_processor"] = None  # without end of text
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings_file))
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    with pytest.raises(ConfigError, match="must end every text with its largest token"):
        shape(tokenizer=str(tmp_path))

"""Tests of tokenizers in folders of transformers: CLIP's is recognized, others run with transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import clipkit
from clipkit.errors import CheckpointError, ConfigError
from clipkit.export import export
from clipkit.export.transformers import write_clip_tokenizer
from clipkit.formats.load import load_checkpoint
from clipkit.model.tokenizer import ClipTokenizer, TransformersTokenizer, create_tokenizer
from data.tokenizer import train_tokenizer, write_tokenizer

TEXTS = ["a photo of a cat", "a photo of a quite unknown Cat &amp; “dog”", "of " * 100, ""]
END = "<|endoftext|>"

pytestmark = pytest.mark.filterwarnings("ignore:.*has no preprocessor_config.json")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def write_model(folder: Path, **text: Any) -> None:
    """Write a CLIPModel with transformers, without a tokenizer."""
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**tower, "max_position_embeddings": 20, **text}
    config = CLIPConfig(
        vision_config={**tower, "image_size": 32, "patch_size": 16}, text_config=text, projection_dim=16
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        CLIPModel(config).save_pretrained(folder)


def write_words(folder: Path, *, start: int = 49406, end: int = 49407) -> None:
    """Write a tokenizer of whole words with its own ids and CLIP's two special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"<|startoftext|>": start, END: end, "a": 5, "photo": 6, "of": 7, "cat": 8}
    plain = Tokenizer(models.WordLevel(words, unk_token=END))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing(
        single=f"<|startoftext|> $A {END}", special_tokens=[("<|startoftext|>", start), (END, end)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<|startoftext|>", eos_token=END, pad_token=END
    )
    made.save_pretrained(folder)


def their_embeddings(folder: Path) -> Tensor:
    """Embed each text alone with transformers."""
    from transformers import AutoTokenizer, CLIPModel

    model, tokenizer = CLIPModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in TEXTS:
        inputs = tokenizer([text], return_tensors="pt", truncation=True, max_length=20)
        with torch.no_grad():
            rows.append(model.get_text_features(input_ids=inputs["input_ids"]).pooler_output)
    return F.normalize(torch.cat(rows), dim=-1)


@pytest.mark.parametrize(
    ("text", "end"),
    [({}, 49407), ({"eos_token_id": 2}, 49407), ({"vocab_size": 49500, "eos_token_id": 49499}, 49499)],
)
def test_tokenizer_of_the_folder_is_used(text: dict[str, int], end: int, tmp_path: Path) -> None:
    write_model(tmp_path, **text)
    write_words(tmp_path, end=end)
    model = clipkit.load(tmp_path)
    assert isinstance(model.tokenizer, TransformersTokenizer)
    assert model.tokenizer(TEXTS[:1]).tolist() == [[49406, 5, 6, 7, 5, 8, end]]
    assert model.tokenizer(TEXTS).shape == (4, 20) and model.tokenizer([]).shape[0] == 0
    assert (clipkit.encode_text(TEXTS, model) - their_embeddings(tmp_path)).abs().max() <= 1e-5
    shorter = clipkit.load(tmp_path, context_length=5)
    assert shorter.tokenizer(TEXTS).shape == (4, 5) and shorter.tokenizer(TEXTS)[2, -1] == end


@pytest.mark.long
def test_folder_tokenizer_is_stored_and_exported(tmp_path: Path) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    write_model(source)
    write_words(source)
    model = clipkit.load(source)
    for one in export(model, out, to=["transformers", "sentence-transformers", "onnx"]):
        assert one.difference is not None and one.difference <= 1e-5
    expected = their_embeddings(source)
    assert (their_embeddings(out) - expected).abs().max() <= 1e-5
    assert (clipkit.encode_text(TEXTS, clipkit.load(out)) - expected).abs().max() <= 1e-5
    with pytest.raises(ConfigError, match="open_clip uses CLIP's tokenizer for this kind of text tower"):
        export(model, tmp_path / "other", to=["open_clip"])
    assert [one.target for one in export(model, tmp_path / "default")] == ["transformers"]
    stored = json.loads(json.dumps(model.tokenizer.store(tmp_path)))
    again = create_tokenizer(model.architecture, stored=stored, folder=tmp_path)
    assert torch.equal(again(TEXTS), model.tokenizer(TEXTS))
    with pytest.raises(CheckpointError, match="the stored tokenizer is invalid"):
        create_tokenizer(model.architecture, stored={"kind": stored["kind"]}, folder=tmp_path)


@pytest.mark.parametrize("form", ["all", "old", "json", "pairs as text", "none"])
def test_clip_tokenizer_is_recognized(form: str, tmp_path: Path) -> None:
    write_model(tmp_path)
    if form != "none":
        write_clip_tokenizer(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CLIPTokenizer"}')
    if form == "old":
        (tmp_path / "tokenizer.json").unlink()
    elif form in ("json", "pairs as text"):
        (tmp_path / "vocab.json").unlink()
        (tmp_path / "merges.txt").unlink()
    if form == "pairs as text":
        content = json.loads((tmp_path / "tokenizer.json").read_text())
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    model = clipkit.load(tmp_path)
    assert model.tokenizer == ClipTokenizer(context_length=20)
    assumed = " without a tokenizer (using CLIP's)"
    assert model.origin == f"transformers folder {tmp_path}{assumed if form == 'none' else ''}"


@pytest.mark.parametrize(
    "change",
    [
        lambda stored: stored["model"]["merges"].pop(),
        lambda stored: stored["model"]["vocab"].update({"a</w>": 321, "b</w>": 320}),
        lambda stored: stored["normalizer"]["normalizers"].pop(),  # no lowercasing
        lambda stored: stored["added_tokens"].append({**stored["added_tokens"][0], "id": 0, "content": "!"}),
    ],
)
def test_modified_clip_tokenizer_runs_with_transformers(change: Any, tmp_path: Path) -> None:
    write_model(tmp_path)
    write_clip_tokenizer(tmp_path)
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).unlink()
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    change(stored)
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "bos_token": "<|startoftext|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    model = clipkit.load(tmp_path)
    assert isinstance(model.tokenizer, TransformersTokenizer)
    assert (clipkit.encode_text(TEXTS, model) - their_embeddings(tmp_path)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("text", "files", "message"),
    [
        ({"vocab_size": 49500, "eos_token_id": 49499}, {}, "read at token 49499, and CLIP's tokenizer ends them"),
        ({}, {"vocab.json": '{"a": 0}', "merges.txt": "#v\n"}, "transformers cannot read the tokenizer in"),
        (
            {},
            {
                "tokenizer_config.json": '{"tokenizer_class": "BertTokenizer"}',
                "vocab.txt": "[UNK]\n[CLS]\n[SEP]\n[PAD]\na\n",
            },
            "read at token 49407, which does not end its tokenizer's texts",
        ),
        ({}, {"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["x.X", null]}}'}, "tokenizer"),
        ({}, {"tokenizer.json": "[" * 100_000}, "transformers cannot read the tokenizer in"),
    ],
)  # fmt: skip
def test_inexact_tokenizers_are_rejected(
    text: dict[str, int], files: dict[str, str], message: str, tmp_path: Path
) -> None:
    write_model(tmp_path, **text)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        clipkit.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_tokens_beyond_the_vocabulary_are_rejected(tmp_path: Path) -> None:
    write_model(tmp_path, vocab_size=49408, eos_token_id=49407)
    write_words(tmp_path, end=60_000)
    with pytest.raises(
        CheckpointError, match=r"has tokens up to 60000, and config\.json says vocab_size = 49408"
    ):
        clipkit.load(tmp_path)


def test_checkpoint_keeps_the_folder_tokenizer(tmp_path: Path) -> None:
    from clipkit.config import Config
    from clipkit.training.checkpoint import LoopState, save_checkpoint

    source = tmp_path / "model"
    write_model(source)
    write_words(source)
    model = clipkit.load(source)
    state = LoopState(step=1, data="none")
    folder = save_checkpoint(
        tmp_path / "run", model, torch.optim.AdamW(model.parameters()), state, Config(), keep=1
    )
    assert torch.equal(load_checkpoint(folder).tokenizer(TEXTS), model.tokenizer(TEXTS))


def test_stored_tokenizer_cuts_texts_at_its_length(tmp_path: Path) -> None:
    """Also with transformers, which stores the length at which texts were cut last."""
    from transformers import AutoTokenizer

    tokenizer = TransformersTokenizer(source=str(tmp_path / "made"), context_length=9)
    write_tokenizer(train_tokenizer(["noise"], vocab=300), tmp_path / "made")
    for length in (9, 20, 15):
        tokenizer = tokenizer.replace_length(length)
        folder = tmp_path / str(length)
        folder.mkdir()
        tokenizer.store(folder)
        tokenizer = replace(tokenizer, source=str(folder / "tokenizer"), _loaded=None)
        theirs = AutoTokenizer.from_pretrained(folder / "tokenizer")
        assert len(theirs("of " * 100, truncation=True)["input_ids"]) == length
        assert theirs.init_kwargs.get("max_length", length) == length  # at which processors cut
        assert tokenizer(["of " * 100]).shape == (1, length)

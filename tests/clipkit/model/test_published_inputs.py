"""Inputs and outputs in the tests and examples of other libraries: token ids, cleaned texts and patches.

Sources, read on 2026-11-27: google-research/big_vision at 0127fb6 (2025-05-19), openai/CLIP at e58d494
(2022-04-10), huggingface/transformers at 02d5415, and elixir-nx/bumblebee.
"""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from clipkit.model.tokenizer import LibraryTokenizer, TransformersTokenizer, tokenize
from clipkit.model.towers import cut_patches
from tests.clipkit.stored_models import write_word_tokenizer


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        # openai/CLIP, notebooks/Interacting_with_CLIP.ipynb
        ("Hello World!", [49406, 3306, 1002, 256, 49407]),
        # bumblebee, test/bumblebee/text/clip_tokenizer_test.exs
        ("a photo of a cat", [49406, 320, 1125, 539, 320, 2368, 49407]),
        ("a photo of a dog", [49406, 320, 1125, 539, 320, 1929, 49407]),
    ],
)
def test_token_ids_of_clip(text: str, ids: list[int]) -> None:
    assert tokenize(text).tolist() == [ids + [0] * (77 - len(ids))]


def test_token_ids_of_another_vocabulary(tmp_path: Path) -> None:
    # transformers, tests/models/clip/test_tokenization_clip.py
    symbols = ["l", "o", "w", "e", "r", "s", "t", "i", "d", "n", "lo", "l</w>", "w</w>", "r</w>", "t</w>"]
    words = [
        "low</w>",
        "er</w>",
        "lowest</w>",
        "newer</w>",
        "wider",
        "<unk>",
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    vocabulary = {word: i for i, word in enumerate([*symbols, *words])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nl o\nlo w</w>\ne r</w>")
    config = {"tokenizer_class": "CLIPTokenizer", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = TransformersTokenizer(source=str(tmp_path), context_length=16)
    assert tokenizer(["lower newer"]).tolist() == [[21, 10, 2, 16, 9, 3, 2, 16, 22]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # big_vision, evaluators/proj/image_text/prompt_engineering_test.py
        ("test_test", "test test"),
        ("test___test", "test test"),
        ("test", "test"),
        ("test.", "test"),
        (" test ", "test"),
        ("test\ntest", "test test"),
        ("test  test", "test test"),
        ("test {}", "test"),
        # pp/ops_text_test.py
        ("Hello world ScAlAr!", "hello world scalar"),
    ],
)
def test_texts_of_siglip_are_canonicalized(text: str, expected: str, tmp_path: Path) -> None:
    write_word_tokenizer(tmp_path)
    tokenizer = LibraryTokenizer(source=str(tmp_path), context_length=16, options={"clean": "canonicalize"})
    assert tokenizer._load_library().clean_fn(text) == expected


@given(side=st.integers(1, 5), grid=st.integers(1, 4), channels=st.integers(1, 4))
def test_patches_are_numbered_along_rows(side: int, grid: int, channels: int) -> None:
    # big_vision, pp/proj/image_text/ops_naflex_test.py, whose patches have channels last
    image = torch.arange(channels * (grid * side) ** 2).view(channels, grid * side, grid * side)
    patches = cut_patches(image[None], side)[0].flatten(0, 1)
    for i, patch in enumerate(patches):
        top, left = i // grid * side, i % grid * side
        assert torch.equal(patch, image[:, top : top + side, left : left + side])

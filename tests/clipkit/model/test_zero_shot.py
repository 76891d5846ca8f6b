"""Tests of zero-shot classifiers: weights equal open_clip's, names with equal tokens are rejected."""

import unicodedata
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

import clipkit
from clipkit.errors import DataError
from clipkit.model.clip import CLIP
from clipkit.model.tokenizer import ClipTokenizer, tokenize
from clipkit.model.zero_shot import (
    DEFAULT_TEMPLATES,
    encode_prompts,
    fill_template,
    find_indistinguishable_classes,
    zero_shot_classifier,
)

NAMES = ["cat", "golden retriever", "T-shirt", "é", "very " * 40 + "long", "a"]
TEMPLATES = ["a photo of a {}.", "{}", "a drawing of the {}, on paper"]


@pytest.mark.parametrize("batch_size", [1, 4, 256])
def test_weights_equal_open_clip(tiny: CLIP, batch_size: int) -> None:
    from open_clip import build_zero_shot_classifier

    names = [*NAMES, "cat"]  # a duplicate, as in published lists
    theirs = build_zero_shot_classifier(tiny, tokenize, names, TEMPLATES)
    ours = zero_shot_classifier(tiny, names, TEMPLATES, batch_size=batch_size, allow_indistinguishable=True)
    assert ours.shape == (48, len(names))
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().max() <= 1e-6
    torch.testing.assert_close(ours.norm(dim=0), torch.ones(len(names)))
    assert torch.equal(ours[:, 0], ours[:, -1])
    assert ours.is_contiguous()


def test_placeholder_is_c_or_empty_braces(tiny: CLIP) -> None:
    lettered = [template.replace("{}", "{c}") for template in TEMPLATES]
    assert torch.equal(
        zero_shot_classifier(tiny, NAMES, TEMPLATES), zero_shot_classifier(tiny, NAMES, lettered)
    )
    assert fill_template("a {c} and a {c}", "cat") == "a cat and a cat"
    assert fill_template("a {} in {braces}", "cat") == "a cat in {braces}"
    assert fill_template("a {c}, not {}", "cat") == "a cat, not {}"
    for name in ("{}", "{c}", "{0}", "{", "%s", "\\1", "{c}{}"):
        assert fill_template("a {c}.", name) == f"a {name}."
        assert fill_template("a {}.", name) == f"a {name}."
    with pytest.raises(DataError, match=r"has no \{c\} where the class name goes"):
        fill_template("a photo", "cat")


def test_duplicate_template_counts_twice(tiny: CLIP) -> None:
    weights = zero_shot_classifier(tiny, ["cat"], ["{c}", "{c}", "a {c}"])
    prompts = encode_prompts(tiny, ["cat", "cat", "a cat"])
    torch.testing.assert_close(weights[:, 0], F.normalize(prompts.mean(dim=0), dim=-1))
    assert torch.equal(prompts[0], prompts[1])


def test_prompt_order_is_kept(tiny: CLIP) -> None:
    prompts = ["a long prompt about cats and dogs", "x", "y z", "x", "", "a b c d"]
    together = encode_prompts(tiny, prompts, batch_size=2)
    alone = torch.cat([encode_prompts(tiny, [prompt]) for prompt in prompts])
    assert (together - alone).abs().max() <= 1e-6
    assert encode_prompts(tiny, []).shape == (0, 48)
    assert encode_prompts(tiny, []).dtype == torch.float32


@pytest.mark.parametrize("training", [True, False])
def test_training_mode_is_restored_also_after_errors(tiny: CLIP, training: bool) -> None:
    tiny.train(training)
    zero_shot_classifier(tiny, NAMES)
    assert tiny.training is training
    with pytest.raises(DataError):
        encode_prompts(tiny, ["a" * 1_000_000])
    assert tiny.training is training
    assert tiny.visual.training is training


@pytest.mark.parametrize(
    ("names", "templates", "message"),
    [
        ([], DEFAULT_TEMPLATES, "at least one class name and one template"),
        (["cat"], [], "at least one class name and one template"),
        ("cat", DEFAULT_TEMPLATES, "class_names must be a list, not the one string 'cat'"),
        (["cat"], "a {c}", "templates must be a list, not the one string 'a {c}'"),
        (["cat"], ["a {c}", "a photo"], r"template 'a photo' has no {c}"),
    ],
)
def test_invalid_names_and_templates_raise_errors(
    tiny: CLIP, names: list[str], templates: list[str], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        zero_shot_classifier(tiny, names, templates)
    assert message in str(caught.value)


LONG = "word " * 100
SAME = [
    ("digit one", "Digit One"),
    ("digit one", "digit  one "),
    ("caf\u00e9", unicodedata.normalize("NFD", "caf\u00e9")),
    ("cat", "cat"),
    (f"{LONG} cat", f"{LONG} dog"),
]


@pytest.mark.parametrize(("first", "second"), SAME)
def test_class_names_with_the_same_tokens_are_rejected(tiny: CLIP, first: str, second: str) -> None:
    names = ["digit two", first, "digit three", second]
    message = (
        f"class names {first[:80]!r} and {second[:80]!r} have the same tokens in every prompt, so the model "
        "cannot tell them apart: remove one, or rename it"
    )
    with pytest.raises(DataError) as caught:
        zero_shot_classifier(tiny, names, TEMPLATES)
    assert str(caught.value) == message
    with pytest.raises(DataError) as caught:
        clipkit.classify([], names, tiny)
    assert str(caught.value) == message
    columns = zero_shot_classifier(tiny, names, TEMPLATES, allow_indistinguishable=True)
    torch.testing.assert_close(columns[:, 1], columns[:, 3], atol=1e-6, rtol=0)


def test_error_counts_further_indistinguishable_names(tiny: CLIP) -> None:
    with pytest.raises(DataError, match=r"'c' and 'C' have .* \(so do 3 more names\), so"):
        zero_shot_classifier(tiny, ["c", "a b", "C", "d", "A b", "a B"])


def test_one_distinguishing_template_is_enough(tiny: CLIP) -> None:
    names = ["cat", "dog"]
    with pytest.raises(DataError, match="'cat' and 'dog' have the same tokens in every prompt"):
        zero_shot_classifier(tiny, names, [f"{LONG} {{c}}"])
    assert zero_shot_classifier(tiny, names, [f"{LONG} {{c}}", "{c}"]).shape == (48, 2)


class ByteTokenizer(ClipTokenizer):
    """A tokenizer that keeps letter case and spacing, and counts its texts."""

    asked = 0

    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        ByteTokenizer.asked += len(texts)
        rows = [[1 + byte for byte in text.encode()][:75] for text in texts]
        return torch.tensor([[49406, *row, 49407, *[0] * (75 - len(row))] for row in rows])


def test_names_are_compared_with_the_tokenizer_of_the_model(tiny: CLIP) -> None:
    tiny.tokenizer = ByteTokenizer()
    assert zero_shot_classifier(tiny, ["digit one", "Digit One", "digit  one"]).shape == (48, 3)
    with pytest.raises(DataError, match="have the same tokens in every prompt"):
        zero_shot_classifier(tiny, [f"{LONG} cat", f"{LONG} dog"])


def test_further_templates_are_compared_only_for_equal_names() -> None:
    templates = [f"a photo of a {{c}}, number {i}" for i in range(80)]
    names = [f"class {i}" for i in range(1000)] + ["class 7"]
    prompts = [[fill_template(template, name) for template in templates] for name in names]
    ByteTokenizer.asked = 0
    assert find_indistinguishable_classes(ByteTokenizer(), prompts) == [(7, 1000)]
    assert ByteTokenizer.asked == 1001 + 2 * 80


def test_classes_with_several_names_are_compared_name_by_name() -> None:
    prompts = [["crane", "bird"], ["crane"], ["Crane", "machine"], ["CRANE", "bird "], ["crane "], ["x", "y"]]
    assert find_indistinguishable_classes(ClipTokenizer(), prompts) == [(0, 3), (1, 4)]
    assert find_indistinguishable_classes(ClipTokenizer(), []) == []

"""Classifiers are open_clip's: every prompt of unit norm, their mean of unit norm."""

import pytest
import torch
import torch.nn.functional as F

from clipkit.errors import DataError
from clipkit.model import CLIP
from clipkit.tokenizer import tokenize
from clipkit.zero_shot import DEFAULT_TEMPLATES, encode_prompts, fill_template, zero_shot_classifier

NAMES = ["cat", "golden retriever", "T-shirt", "é", "cat", "very " * 40 + "long", "a"]
TEMPLATES = ["a photo of a {}.", "{}", "a drawing of the {}, on paper"]


@pytest.mark.parametrize("batch_size", [1, 4, 256])
def test_weights_are_open_clips(tiny: CLIP, batch_size: int) -> None:
    from open_clip import build_zero_shot_classifier

    theirs = build_zero_shot_classifier(tiny, tokenize, NAMES, TEMPLATES)
    ours = zero_shot_classifier(tiny, NAMES, TEMPLATES, batch_size=batch_size)
    assert ours.shape == (48, len(NAMES))
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().max() <= 1e-6
    torch.testing.assert_close(ours.norm(dim=0), torch.ones(len(NAMES)))
    assert torch.equal(ours[:, 0], ours[:, 4])
    assert ours.is_contiguous()


def test_the_place_of_the_class_is_written_either_way(tiny: CLIP) -> None:
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


def test_a_duplicate_template_counts_twice(tiny: CLIP) -> None:
    weights = zero_shot_classifier(tiny, ["cat"], ["{c}", "{c}", "a {c}"])
    prompts = encode_prompts(tiny, ["cat", "cat", "a cat"])
    torch.testing.assert_close(weights[:, 0], F.normalize(prompts.mean(dim=0), dim=-1))
    assert torch.equal(prompts[0], prompts[1])


def test_the_order_of_prompts_is_kept(tiny: CLIP) -> None:
    prompts = ["a long prompt about cats and dogs", "x", "y z", "x", "", "a b c d"]
    together = encode_prompts(tiny, prompts, batch_size=2)
    alone = torch.cat([encode_prompts(tiny, [prompt]) for prompt in prompts])
    assert (together - alone).abs().max() <= 1e-6
    assert encode_prompts(tiny, []).shape == (0, 48)
    assert encode_prompts(tiny, []).dtype == torch.float32


@pytest.mark.parametrize("training", [True, False])
def test_the_model_keeps_its_mode_even_after_a_mistake(tiny: CLIP, training: bool) -> None:
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
def test_mistakes_are_named(tiny: CLIP, names: list[str], templates: list[str], message: str) -> None:
    with pytest.raises(DataError) as caught:
        zero_shot_classifier(tiny, names, templates)
    assert message in str(caught.value)

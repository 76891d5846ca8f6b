"""Tests of caption metrics: BLEU-4 and CIDEr-D against COCO's code, perplexity, exact match and chance."""

import math
import random
import shutil
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from eval.metrics import METRICS, Descriptions, Metric, caption_tokens
from eval.metrics.captions import (
    bleu_4,
    bleu_statistic,
    cider_d,
    mean_cider_d,
    perplexity,
    perplexity_statistic,
)

Tokens = tuple[str, ...]
# few words, so that long n-grams repeat; a caption of only punctuation has no words
texts = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=9).map(tuple)
corpora = st.lists(st.tuples(texts, st.lists(texts, min_size=1, max_size=3)), min_size=1, max_size=6)


def descriptions(corpus: Sequence[tuple[Tokens, Sequence[Tokens]]]) -> Descriptions:
    ones = np.ones(len(corpus))
    return Descriptions(
        generated=[mine for mine, _ in corpus], captions=[own for _, own in corpus], nll=ones, predicted=ones
    )


def grams(tokens: Tokens, n: int) -> list[Tokens]:
    return [tokens[i : i + n] for i in range(len(tokens) - n + 1)]


def plain_bleu(corpus: Sequence[tuple[Tokens, Sequence[Tokens]]]) -> float:
    """Compute BLEU-4 by the formula of Papineni et al. with pycocoevalcap's two small constants."""
    product = 1.0
    for n in (1, 2, 3, 4):
        right = total = 0
        for mine, own in corpus:
            for gram in set(grams(mine, n)):
                right += min(grams(mine, n).count(gram), max(grams(one, n).count(gram) for one in own))
            total += len(grams(mine, n))
        product *= (right + 1e-15) / (total + 1e-9)
    length = sum(len(mine) for mine, _ in corpus) + 1e-15
    closest = sum(
        sorted((len(one) for one in own), key=lambda size: (abs(size - len(mine)), size))[0]
        for mine, own in corpus
    )
    return float(product**0.25) * min(1.0, math.exp(1 - (closest + 1e-9) / length))


def plain_cider(corpus: Sequence[tuple[Tokens, Sequence[Tokens]]]) -> list[float]:
    """Compute CIDEr-D by equation 4 of Vedantam et al., one n-gram at a time."""
    values = []
    for mine, own in corpus:
        total = 0.0
        for n in (1, 2, 3, 4):
            for one in own:
                every = sorted({*grams(mine, n), *grams(one, n)})
                rarity = []
                for gram in every:
                    images = sum(any(gram in grams(other, n) for other in others) for _, others in corpus)
                    rarity.append(math.log(len(corpus) / max(1, images)))
                first = np.array([grams(mine, n).count(gram) for gram in every]) * rarity
                second = np.array([grams(one, n).count(gram) for gram in every]) * rarity
                norms = float(np.linalg.norm(first) * np.linalg.norm(second))
                apart = len(grams(mine, 2)) - len(grams(one, 2))
                if norms:
                    cosine = float(np.minimum(first, second) @ second) / norms
                    total += 10 / 4 / len(own) * math.exp(-(apart**2) / (2 * 6**2)) * cosine
        values.append(total)
    return values


@settings(max_examples=60, deadline=None)
@given(corpora)
def test_bleu_and_cider_equal_formulas(corpus: list[tuple[Tokens, list[Tokens]]]) -> None:
    found = descriptions(corpus)
    assert bleu_4(found).value == pytest.approx(plain_bleu(corpus), rel=1e-9, abs=1e-15)
    assert found.cider == pytest.approx(plain_cider(corpus), rel=1e-9, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(corpora)
def test_bleu_and_cider_equal_coco_code(corpus: list[tuple[Tokens, list[Tokens]]]) -> None:
    bleus = pytest.importorskip("pycocoevalcap.bleu.bleu_scorer")
    ciders = pytest.importorskip("pycocoevalcap.cider.cider_scorer")
    bleu, cider = bleus.BleuScorer(n=4), ciders.CiderScorer(n=4, sigma=6.0)
    for mine, own in corpus:
        pair = " ".join(mine), [" ".join(one) for one in own]
        bleu += pair
        cider += pair
    found = descriptions(corpus)
    (*_, expected), _ = bleu.compute_score(option="closest")
    assert bleu_4(found).value == pytest.approx(expected, abs=1e-9)
    if not any(one for _, own in corpus for one in own):  # COCO's code fails without any word
        assert not found.cider.any()
        return
    mean, each = cider.compute_score()
    assert found.cider == pytest.approx(each, abs=1e-9)
    assert mean_cider_d(found).value == pytest.approx(mean, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(corpora, st.integers(0, 2**32))
def test_statistics_of_draws_equal_values_of_drawn_images(
    corpus: list[tuple[Tokens, list[Tokens]]], seed: int
) -> None:
    drawn = random.Random(seed).choices(range(len(corpus)), k=len(corpus))
    counts = np.array([[drawn.count(i) for i in range(len(corpus))]])
    every, some = descriptions(corpus), descriptions([corpus[i] for i in drawn])
    assert bleu_statistic(every.bleu_counts)(counts)[0] == pytest.approx(bleu_4(some).value, rel=1e-9)
    rows = np.random.default_rng(seed).uniform(1, 9, (len(corpus), 2))
    expected = math.exp(sum(rows[i, 0] for i in drawn) / sum(rows[i, 1] for i in drawn))
    assert perplexity_statistic(rows)(counts)[0] == pytest.approx(expected)


def test_perfect_captions_have_the_highest_values() -> None:
    words = [tuple(f"word{i} of image {i} which is unlike others".split()) for i in range(5)]
    found = descriptions([(word, [word]) for word in words])
    assert bleu_4(found).value == pytest.approx(1) and found.exact.all()
    assert cider_d(found.generated, found.captions) == pytest.approx([10.0] * 5)
    for name in ("cider_d", "bleu_4", "exact_match", "perplexity"):
        metric: Metric[Descriptions] = METRICS[name]  # type: ignore[assignment]
        value = metric.function(found)
        assert value is not None and value.n == 5 and value.low <= value.value <= value.high
        assert value.value == pytest.approx(metric.highest or math.e)
        assert (chance := metric.chance(found)) is None or 0 <= chance < value.value


def test_chance_is_that_of_random_captions() -> None:
    one, two, three = ("a", "cat"), ("a", "dog"), ("two", "dogs")
    captions = [[one, one, two], [two, three], [one]]
    found = Descriptions(
        generated=[one, one, three],
        captions=captions,
        nll=np.array([4.0, 2.0, 6.0]),
        predicted=np.full(3, 2.0),
    )
    assert found.exact.tolist() == [True, False, False]
    # of six captions, three are the first, two the second, and one the third
    assert found.exact_chance == pytest.approx(((3 + 2) / 6 + (2 + 1) / 6 + 3 / 6) / 3)
    assert all(drawn in (one, two, three) for drawn in found.chance.generated)
    assert perplexity(found).value == pytest.approx(math.exp(12 / 6))
    many = [[(str(i), "and", str(j))] for i in range(40) for j in range(25)]
    drawn = Descriptions(
        generated=[()] * 1000, captions=many, nll=np.ones(1000), predicted=np.ones(1000)
    ).chance
    assert len({*drawn.generated}) > 600 and drawn.exact.mean() < 0.01


def test_tokens_are_words_numbers_and_symbols() -> None:
    expected = {
        "A black-and-white dog, isn't it?": "a black-and-white dog is n't it",
        "The dog’s owner CAN'T pay $3.50 (or 1,000)!": "the dog 's owner ca n't pay $ 3.50 or 1,000",
        'Two "dogs" -- one, two... "; ': "two dogs one two",
        "Straße café हिन्दी 2x4 A&W": "straße café हिन्दी 2x4 a & w",
        " ... ": "",
    }
    for text, tokens in expected.items():
        assert " ".join(caption_tokens(text)) == tokens


@pytest.mark.skipif(shutil.which("java") is None, reason="Stanford's tokenizer needs Java")
def test_tokens_equal_stanford_tokenizer_for_plain_captions() -> None:
    # without parentheses, which COCO's code keeps as -lrb- and -rrb-
    tokenizer = pytest.importorskip("pycocoevalcap.tokenizer.ptbtokenizer")
    captions = [
        "A man riding a wave on top of a surfboard.",
        "Two dogs -- one black-and-white, one brown -- don't play; they're asleep!",
        "The man's red hat isn't his: it's a child's, he'd say.",
        'A sign says "stop" & a bus waits at 3.5 m, 1,000 people can\'t pass.',
        "We'll see 2 cats, a t-shirt and some rock & roll?",
    ]
    given_captions = {i: [{"caption": caption}] for i, caption in enumerate(captions)}
    theirs = tokenizer.PTBTokenizer().tokenize(given_captions)
    assert Counter(" ".join(caption_tokens(one)) for one in captions) == Counter(
        own[0] for own in theirs.values()
    )

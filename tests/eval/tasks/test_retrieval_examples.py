"""Tests of retrieval examples: captions against a plain sort, memory, and their display on pages."""

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from eval.datasets.dataset import EvalDataset
from eval.metrics import match_ranks
from eval.report import build_comparison
from eval.report.charts import Thumbnails, load_macro
from eval.results.details import retrieval_details
from eval.results.records import Details, read_details, write_details
from tests.eval.made_up_results import EVIL, line, write
from tests.eval.results.test_details import NoImages
from tests.eval.web_page import Page

N, T, D = 40, 60, 8


def dataset(captions: int) -> EvalDataset:
    return EvalDataset(
        name="pairs", class_names=(), templates=(), images=NoImages(), labels=None,  # type: ignore[arg-type]
        captions=tuple((f"caption {i}",) for i in range(captions)), revision="0123", tasks=("retrieval",),
        caption_prompt_set="mine",
    )  # fmt: skip


def made(seed: int, *, ties: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return features and pairs of images and captions: one to three captions per image, some shared."""
    generator = torch.Generator().manual_seed(seed)
    images, texts = torch.randn(N, D, generator=generator), torch.randn(T, D, generator=generator)
    own = [torch.randperm(T, generator=generator)[: 1 + i % 3].sort().values for i in range(N)]
    pairs = torch.tensor([(i, int(text)) for i, of in enumerate(own) for text in of])
    for i in range(0, N, 2):
        images[i] += 2 * texts[own[i][-1]]
    if ties:  # integers: sums are exact and many are equal
        return images.round().clamp(-1, 1), texts.round().clamp(-1, 1), pairs
    return torch.nn.functional.normalize(images, dim=1), torch.nn.functional.normalize(texts, dim=1), pairs


def details(seed: int = 0, *, ties: bool = False, shown: int = 0) -> tuple[Details, Tensor, Tensor, Tensor]:
    images, texts, pairs = made(seed, ties=ties)
    ranks = match_ranks(images, texts, pairs)
    found = retrieval_details(
        dataset(N),
        images,
        [f"caption {i}\t{EVIL if i % 2 else ''}" for i in range(T)],
        texts,
        pairs,
        right={"image_to_text_R@1": ranks < 1},
        values={"image_to_text_mean_rank": ranks + 1.0},
        seed=shown,
    )
    return found, images @ texts.T, pairs, ranks


@given(seed=st.integers(0, 2**32 - 1), ties=st.booleans())
@settings(max_examples=30, deadline=None)
def test_captions_of_examples_equal_plain_sort(seed: int, ties: bool) -> None:
    found, similarity, pairs, ranks = details(seed, ties=ties, shown=seed)
    assert (found.candidates, found.prompt_set, len(found.examples)) == (T, "mine", 6)
    for example in found.examples:
        number = int(example.picture)
        own = {text for image, text in pairs.tolist() if image == number}
        row = similarity[number].tolist()
        order = sorted(range(T), key=lambda text: (-row[text], text in own, text))
        assert example.rank == ranks[number] + 1 == 1 + min(map(order.index, own))
        assert [guess.right for guess in example.guesses] == [text in own for text in order[:5]]
        assert [guess.probability for guess in example.guesses] == pytest.approx(
            [row[text] for text in order[:5]], rel=1e-3, abs=1e-6
        )
        if not ties:  # with ties, any of the equal captions may be shown
            labels = [f"caption {text} {EVIL if text % 2 else ''}".strip() for text in order]
            assert [guess.label for guess in example.guesses] == labels[:5]
            assert example.truth == labels[example.rank - 1]
        assert example.guesses[0].right == (example.rank == 1)


def test_examples_alternate_between_right_and_wrong() -> None:
    shown = {}
    for seed in range(8):
        found = details(shown=seed)[0]
        kinds = [example.rank == 1 for example in found.examples]
        assert kinds[0::2] == [kinds[0]] * 3 and kinds[1::2] == [not kinds[0]] * 3
        assert details(shown=seed)[0] == found
        shown[seed] = tuple(example.picture for example in found.examples)
    assert len(set(shown.values())) == 8


def test_examples_of_few_captions_are_written_and_read(tmp_path: Path) -> None:
    images, texts = torch.eye(3), torch.eye(3)[:2]
    pairs = torch.tensor([(0, 0), (1, 1), (2, 1)])
    right = {"image_to_text_R@1": match_ranks(images, texts, pairs) < 1}
    found = retrieval_details(dataset(3), images, ["", "x" * 999], texts, pairs, right=right, values={})
    assert sorted((example.picture, example.rank) for example in found.examples) == [
        ("0", 1),
        ("1", 1),
        ("2", 2),
    ]
    assert {example.truth for example in found.examples} == {"(empty)", "x" * 299 + "…"}
    assert all(len(example.guesses) == 2 for example in found.examples)
    results = tmp_path / "r.jsonl"
    path = write_details(results, found, weights="w")
    assert read_details(results) == ([replace(found, weights="w")], [])
    old = {key: value for key, value in json.loads(path.read_text()).items() if key != "candidates"}
    path.write_text(json.dumps(old))
    assert read_details(results)[0][0].candidates == 0


def test_memory_per_caption_is_small() -> None:
    many = 100_000
    images, texts = torch.randn(many, 4), torch.randn(many, 4)
    pairs = torch.arange(many)[:, None].expand(-1, 2)
    captions = [f"caption {i}" for i in range(many)]
    right = {"image_to_text_R@1": torch.arange(many) % 2 == 0}
    with torch.profiler.profile(profile_memory=True) as profile:
        tracemalloc.start()
        found = retrieval_details(dataset(6), images, captions, texts, pairs, right=right, values={})
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    used = (key_average.self_cpu_memory_usage for key_average in profile.key_averages())
    assert len(found.examples) == 6 and found.candidates == many
    assert most < 10e6  # Python objects
    assert sum(max(0, one) for one in used) < 6 * many * 200  # bytes, counting no deallocations


def test_page_shows_cosine_similarities(tmp_path: Path) -> None:
    found = details()[0]
    common = {"task": "retrieval", "prompt_set": "mine", "weights": "w", "data_revision": "0123"}
    path = write(tmp_path / "r.jsonl", [line(0, "pairs", "mean_R@1", 0.5, **common)])
    write_details(path, found, weights="w")
    html = build_comparison([path], tmp_path / "page.html").read_text()
    page = Page(html)
    assert "cosine similarities, not probabilities" in page.words and "retrieval, prompts mine" in page.words
    (one, *_) = found.examples
    assert f"rank {one.rank} of {T}" in page.words
    told = f"{one.guesses[0].probability:.3f}".replace("-", "−")
    assert told in page.words and f"{100 * one.guesses[0].probability:.1f}%" not in page.words
    assert "the true label" not in html and html.count("a caption of the image") >= 6
    assert [tag for tag, _ in page.tags].count("script") == 1  # captions are escaped


def test_card_shows_negative_similarity_and_large_rank() -> None:
    found = next(example for example in details()[0].examples if (example.rank or 0) > 5)
    changed = replace(found, rank=12_345, probability=-0.25)
    card = load_macro("images.html", "example")(Thumbnails(), changed, 25_010, {}, cosines=True)
    assert "rank <b>12,345</b> of 25,010" in card and ">−0.250<" in card and card.count("✓") == 1

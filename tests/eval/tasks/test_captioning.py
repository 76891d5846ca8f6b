"""Tests of the tasks captioning and likelihood on a model that memorized a few captions."""

import json
import math
import threading
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clipkit import CLIP
from clipkit.errors import ConfigError, DataError
from clipkit.formats import save_model
from clipkit.model import eval_pixels
from clipkit.model.architectures import Architecture, Decoder, TextTower, VisionTower
from clipkit.objectives.caption import Caption
from eval import Encoder, EvalDataset, Subject, evaluate, open_dataset
from eval.__main__ import main
from eval.compare import compare
from eval.features.encoder import Ranks
from eval.report.comparison_page import build_comparison
from eval.results.records import read_details
from eval.tasks import TASKS, Options, captioning
from tests.clipkit.term_sums import sum_term
from tests.eval.conftest import WriteDataset, png

WORDS = ("cat", "dog", "cup", "hat", "sun", "car", "bus", "cow", "pig", "fox", "bed", "pen")
CAPTIONS = [f"a {word} on top" for word in WORDS]
COUNT = len(WORDS)
STEPS = (8, 50)


@cache
def trained(feed: str = "tokens") -> tuple[CLIP, CLIP]:
    """Return a very small model after a few steps, and the same model when it has memorized the captions."""
    shape = Architecture(
        embed_dim=16,
        vision=VisionTower(image_size=16, patch_size=8, width=32, layers=1, heads=2),
        text=TextTower(width=32, layers=1, heads=2),
        decoder=Decoder(width=32, layers=1, heads=2, context_length=8, feed=feed),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CLIP(shape).initialize()
    images = torch.stack([eval_pixels(png(i), model.preprocess) for i in range(COUNT)])
    tokens = model.tokenizer(CAPTIONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    found = []
    for step in range(1, STEPS[-1] + 1):
        loss = sum_term(model, Caption(), images, tokens, captions=tokens)
        optimizer.zero_grad()
        (loss / tokens.numel()).backward()
        optimizer.step()
        if step in STEPS:
            found.append(deepcopy(model).eval())
    less, more = found
    return less, more


@pytest.fixture
def dataset(write_dataset: WriteDataset) -> EvalDataset:
    return open_dataset(write_dataset("things", labels=[None] * COUNT, captions=CAPTIONS, class_names=None))


def by_metric(outcome_scores: Any) -> dict[str, Any]:
    return {score.metric: score for score in outcome_scores}


@pytest.mark.parametrize("feed", ["tokens", "text"])
def test_model_with_memorized_captions_has_best_scores(dataset: EvalDataset, feed: str) -> None:
    _, model = trained(feed)
    outcome = TASKS["captioning"].run(Subject(Encoder(model, batch_size=5), dataset), Options())
    found = by_metric(outcome.scores)
    assert found["exact_match"].value == 1.0 and found["exact_match"].chance == pytest.approx(1 / COUNT)
    assert found["bleu_4"].value == pytest.approx(1) and found["cider_d"].value == pytest.approx(10)
    assert found["cider_d"].chance < 5 and found["perplexity"].chance is None
    total, count = 0.0, 0
    for i, caption in enumerate(CAPTIONS):  # one caption at a time
        pixels = eval_pixels(dataset.images.read(i), model.preprocess)[None]
        tokens = model.tokenizer([caption])
        with torch.no_grad():
            total += float(sum_term(model, Caption(), pixels, tokens, captions=tokens))
        count += int(tokens.argmax())
    assert found["perplexity"].value == pytest.approx(math.exp(total / count), rel=1e-5)
    (details,) = outcome.details
    assert {description.picture for description in details.descriptions} == {str(i) for i in range(COUNT)}
    for description in details.descriptions:
        assert (
            description.exact
            and description.generated == description.captions[0] == CAPTIONS[int(description.picture)]
        )
    assert all(details.pictures[description.picture].png for description in details.descriptions)


def test_likelihood_of_prompts_equals_plain_loop(
    write_dataset: WriteDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = trained()
    folder = write_dataset(
        "named", labels=[*range(COUNT)], class_names=WORDS, templates=["a {c} on top", "the {c}"]
    )
    dataset = open_dataset(folder)
    outcome = TASKS["likelihood"].run(Subject(Encoder(model, batch_size=5), dataset), Options())
    scores = torch.zeros(COUNT, COUNT)
    for i in range(COUNT):  # one prompt at a time
        pixels = eval_pixels(png(i), model.preprocess)[None]
        for j, word in enumerate(WORDS):
            for prompt in (f"a {word} on top", f"the {word}"):
                tokens = model.tokenizer([prompt])
                with torch.no_grad():
                    total = sum_term(model, Caption(), pixels, tokens, captions=tokens)
                scores[i, j] -= float(total) / 2
    right = scores.argmax(dim=1) == torch.arange(COUNT)
    found = by_metric(outcome.scores)
    assert found["acc1"].value == pytest.approx(float(right.float().mean())) and right.float().mean() > 0.8
    assert {score.prompt_set for score in outcome.scores} == {"own"}
    (details,) = outcome.details
    assert details.task == "likelihood" and details.key[4] == "own"
    shown = details.examples[0]
    expected = scores[int(shown.picture)].softmax(dim=0).max()
    assert shown.guesses[0].probability == pytest.approx(float(expected), abs=6e-5)  # rounded
    monkeypatch.setattr(captioning, "_ROWS", 5)  # prompts and images in several parts
    again = TASKS["likelihood"].run(Subject(Encoder(model, batch_size=5), dataset), Options())
    assert [one.value for one in again.scores] == pytest.approx(
        [one.value for one in outcome.scores], abs=1e-6
    )


def test_ranks_share_the_images_and_fail_together(
    dataset: EvalDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = trained()

    def run(world: int) -> list[Any]:
        barrier, given = threading.Barrier(world), dict[int, Tensor]()
        found: list[Any] = [None] * world

        def work(rank: int) -> None:
            def gather(values: Tensor) -> Tensor:
                given[rank] = values
                barrier.wait(timeout=60)
                total = torch.stack([given[i] for i in range(world)]).sum(dim=0).to(values.dtype)
                barrier.wait(timeout=60)
                return total

            encoder = Encoder(model, ranks=Ranks(rank=rank, world=world, gather=gather))
            try:
                found[rank] = by_metric(TASKS["captioning"].run(Subject(encoder, dataset), Options()).scores)
            except DataError as error:
                found[rank] = str(error)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    (alone,), several = run(1), run(3)
    assert alone["exact_match"].value == 1.0
    for own in several:
        assert own == several[0] and own.keys() == alone.keys()
        for name, score in own.items():
            same = alone[name]
            assert (score.value, score.low) == pytest.approx((same.value, same.low), rel=1e-5)
    read = dataset.images.read
    monkeypatch.setattr(dataset.images, "read", lambda number: b"broken" if number == 4 else read(number))
    assert len({*run(3)}) == 1 and "s0000004" in run(3)[0] and "images are never skipped" in run(3)[0]


def test_captioning_command_scores_compares_and_shows_images(
    write_dataset: WriteDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: CLIP
) -> None:
    captions = [*CAPTIONS, *(f"a thing <b>{i}</b>" for i in range(50 - COUNT))]
    folder = write_dataset("things", labels=[None] * 50, captions=captions, class_names=None)
    out = tmp_path / "results.jsonl"
    for name, one in zip(("less", "more", "plain"), (*trained(), model), strict=True):
        save_model(one, tmp_path / name)
    given = ["--data", str(folder), "--out", str(out), "--features", "", "--device", "cpu"]
    names = [part for name in ("less", "more", "plain") for part in ("--model", str(tmp_path / name))]
    assert main(["captioning", *given, *names]) == 1
    said = capsys.readouterr()
    assert said.err.count("cannot describe images: train it with caption.weight above 0") == 1
    assert (
        "CIDEr-D" in said.out and "% or value" in said.out and max(map(len, said.out.splitlines()[:8])) <= 80
    )
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["metric"] for line in lines] == 2 * ["cider_d", "bleu_4", "exact_match", "perplexity"]
    assert main(["captioning", *given, *names[:4], "--skip-existing", "--beams", "1"]) == 0
    assert capsys.readouterr().out.count("skipped 4 existing") == 2
    assert main(["captioning", *given, *names[2:4], "--beams", "2"]) == 0
    capsys.readouterr()
    assert {json.loads(line)["setting"] for line in out.read_text().splitlines()} == {"", "2 beams"}

    found = compare([out], "less", "more")
    assert {one.metric for one in found.differences} == {"cider_d", "bleu_4", "exact_match", "perplexity"}
    tests = {one.metric: one.test.difference for one in found.differences if one.beyond_chance}
    assert tests["cider_d"] > 0 and tests["exact_match"] > 0
    assert tests["perplexity"] > 0  # memorizing is worse for other captions

    details, notes = read_details(out)
    assert not notes and {len(detail.descriptions) for detail in details} == {40}
    page = build_comparison([out], tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("example described") >= 40 and "CIDEr-D" in page
    assert "a thing &lt;b&gt;" in page and "<b>7</b>" not in page


def test_missing_decoder_or_captions_is_rejected(
    dataset: EvalDataset, write_dataset: WriteDataset, model: CLIP
) -> None:
    with pytest.raises(ConfigError, match="cannot describe images"):
        evaluate(model, dataset, tasks=["captioning"])
    with pytest.raises(DataError, match="has no captions, which retrieval and captioning need"):
        evaluate(model, open_dataset(write_dataset()), tasks=["captioning"])
    with pytest.raises(ConfigError, match="cannot describe images"):
        evaluate(model, open_dataset(write_dataset("others")), tasks=["likelihood"])
    assert dataset.tasks == ("retrieval",)

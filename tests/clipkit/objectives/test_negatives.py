"""Tests of hard negative captions and of several captions per image: losses, loading, settings."""

from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.config import LossConfig, load_config
from clipkit.errors import ConfigError
from clipkit.model.architectures import ARCHITECTURES
from clipkit.model.clip import create
from clipkit.model.measure import text_flops
from clipkit.model.tokenizer import ClipTokenizer
from clipkit.objectives import Targets
from clipkit.objectives.clip import Clip, clip_loss
from clipkit.objectives.siglip import siglip_loss
from clipkit.training.costs import Workload, flops_of_steps
from clipkit.training.step import batch_loss
from data.captions import CaptionRule
from data.loader import Loader, caption_hash
from data.order import Order
from data.shards.samples import Shards
from data.shards.writer import DatasetWriter, Record
from data.sources import find_shards
from tests.small_trainings import Trainings, error_of, metrics, pairs, trainings

__all__ = ["pairs", "trainings"]

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"


def features(rows: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    images, texts, wrong = (
        F.normalize(torch.randn(rows, 5, generator=random, dtype=torch.float64), dim=-1).requires_grad_()
        for _ in range(3)
    )
    return images, texts, wrong, torch.arange(rows) % 3 > 0


@pytest.mark.parametrize("scale", [3.0, 100.0])
def test_clip_loss_with_negatives_equals_plain_formula(scale: float) -> None:
    images, texts, wrong, has = features()
    t = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    logits = t * images @ texts.T
    more = (t * (images * wrong).sum(1)).masked_fill(~has, -torch.inf)
    own = torch.arange(len(images))
    by_image = F.cross_entropy(torch.cat([logits, more[:, None]], dim=1), own)
    expected = (by_image + F.cross_entropy(logits.T, own)) / 2
    inputs = (images, texts, t, wrong)
    wanted = torch.autograd.grad(expected, inputs)
    loss = clip_loss(images, texts, t, negatives=(wrong, has))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for one, other in zip(torch.autograd.grad(loss, inputs), wanted, strict=True):
        assert (one - other).abs().max() < 1e-12
    none = clip_loss(images, texts, t, negatives=(wrong, torch.zeros_like(has)))
    assert none.item() == pytest.approx(clip_loss(images, texts, t).item(), rel=1e-12)


def test_siglip_loss_with_negatives_equals_plain_formula() -> None:
    images, texts, wrong, has = features()
    t, bias = (torch.tensor(one, dtype=torch.float64, requires_grad=True) for one in (5.0, -2.0))
    logits = t * images @ texts.T + bias
    more = F.softplus(t * (images * wrong).sum(1) + bias)[has].sum()
    expected = (F.softplus(logits * (1 - 2 * torch.eye(7))).sum() + more) / 7
    inputs = (images, texts, t, bias, wrong)
    wanted = torch.autograd.grad(expected, inputs)
    loss = siglip_loss(images, texts, t, bias, negatives=(wrong, has))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for one, other in zip(torch.autograd.grad(loss, inputs), wanted, strict=True):
        assert (one - other).abs().max() < 1e-12


def test_negatives_accuracy() -> None:
    images, texts, wrong, has = features()
    numbers = torch.arange(7)[:, None]
    targets = Targets(identities=numbers, tokens=numbers, same="negatives", negatives=has)
    found = Clip().figures(images, torch.cat([texts, wrong]), targets)
    closer = ((images * texts).sum(1) > (images * wrong).sum(1))[has].double().mean()
    assert found["negatives_acc"] == pytest.approx(closer.item())
    del found["negatives_acc"]
    plain = Targets(identities=numbers, tokens=numbers, same="negatives")
    assert found == Clip().figures(images, texts, plain)


def test_wrong_captions_are_read_from_json_fields() -> None:
    rule = CaptionRule(negatives="wrong.text", prefix="a ")
    assert rule.wrong_captions({"wrong": {"text": ["b", "", 3, "c", "\udc80"]}}) == ["a b", "a c"]
    assert rule.wrong_captions({"wrong": {"text": "b"}}) == ["a b"]
    assert rule.wrong_captions({"wrong": "b"}) == rule.wrong_captions({}) == []


def test_negatives_settings_and_flops() -> None:
    for refused in ("loss.name=classes", "distill.teacher=another", "caption_templates"):
        settings = {"caption_templates": 'data.caption_templates=["a {}"]'}.get(refused, refused)
        more = ["model.text=classes:a.txt"] if "classes" in refused else []
        with pytest.raises(ConfigError, match=r"data\."):
            load_config(QUICKSTART, ["data.negatives=wrong", settings, *more])
    with pytest.raises(ConfigError, match=r"cannot be combined with caption.feed=text"):
        load_config(QUICKSTART, ["data.negatives=wrong", "caption.weight=1", "caption.feed=text"])
    model = create(ARCHITECTURES["ViT-Ti-4-16"], seed=0)
    count = flops_of_steps(Workload(model=model))
    assert count is not None
    added = count([5, 6], 16, [3, 9]) - count([5, 6], 16, [])
    assert added == sum(text_flops(model, length).both for length in (3, 9))


@pytest.mark.slow
def test_training_distinguishes_negatives(trainings: Trainings, tmp_path: Path) -> None:
    data, colors = tmp_path / "data", {"red": (255, 0, 0), "blue": (0, 0, 255)}
    with DatasetWriter(data, samples_per_shard=20) as writer:
        for i in range(40):
            name, other = ("red", "blue") if i % 2 else ("blue", "red")
            image = simplejpeg.encode_jpeg(np.full((20, 20, 3), colors[name], dtype=np.uint8))
            meta = {"wrong": [f"a {other} square"]} if i % 5 else {}
            record = Record(
                key=f"{i:04d}", image=image, extension="jpg", caption=f"a {name} square", meta=meta
            )
            writer.write("train", record)
        writer.finish({"name": "squares"})
    settings = (f"data.train={data}", "loss.same=ignored", "optim.lr=1e-3", "steps=12")
    trainings.run(tmp_path / "plain", *settings, "steps=1")  # counts the samples
    ended = trainings.start(tmp_path / "typed", *settings, "data.negatives=worng").result()
    message = (
        "data.negatives names the json field 'worng', which has text in none of 40 samples examined: did you"
    )
    assert message in error_of(ended.stderr)
    trainings.run(tmp_path / "run", *settings, "data.negatives=wrong", "data.workers=1", "accumulate=2")
    lines = metrics(tmp_path / "run")
    assert all("chance" not in line for line in lines)
    assert lines[-1]["negatives_acc"] == 1 and lines[-1]["loss"] < lines[0]["loss"]


def test_several_captions_equal_a_batch_with_repeated_images() -> None:
    images, texts, more, _ = features()
    t = torch.tensor(9.0, dtype=torch.float64)
    numbers = torch.arange(7).repeat(2)[:, None]
    targets = Targets(identities=numbers, tokens=numbers, same="positives")
    loss = batch_loss(
        *(images, torch.cat([texts, more]), t),
        objective=Clip(),
        targets=targets,
        settings=LossConfig(),
        several_captions=True,
    )
    logits = t * torch.cat([images, images]) @ torch.cat([texts, more]).T
    wanted = torch.eye(7, dtype=torch.float64).repeat(2, 2) / 2
    expected = (F.cross_entropy(logits, wanted) + F.cross_entropy(logits.T, wanted)) / 2
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["first", "random"])
def test_training_reads_several_captions(choice: str, trainings: Trainings, tmp_path: Path) -> None:
    data = tmp_path / "data"
    image = simplejpeg.encode_jpeg(np.zeros((20, 20, 3), dtype=np.uint8))
    with DatasetWriter(data, samples_per_shard=20) as writer:
        for i in range(40):
            captions = [f"{name} {i}" for name in ("one", "two", "three")[: 1 + i % 3]]
            record = Record(key=f"{i:04d}", image=image, extension="jpg", caption="", meta={"all": captions})
            writer.write("train", record)
        writer.finish({"name": "captions"})
    rule = CaptionRule(fields=("all",), choice=choice, count=2)
    shards = Shards.of(find_shards(str(data / "train")), captions=rule)
    order = Order(shards.counts, seed=2, batch_size=20)
    loader = Loader(shards=shards, order=order, image_size=16, tokenize=ClipTokenizer())
    batch, pairs = loader.batch(0), set()
    assert batch.more is not None and batch.more.shape == batch.tokens.shape == (20, batch.tokens.shape[1])
    assert batch.identities.shape == (40, 2)
    tokenize = ClipTokenizer()
    for row, number in enumerate(batch.ids.tolist()):
        captions = [f"{name} {number}" for name in ("one", "two", "three")[: 1 + number % 3]]
        known = {
            tuple(one[one > 0].tolist()): name for one, name in zip(tokenize(captions), captions, strict=True)
        }
        first, second = (known[tuple(one[row][one[row] > 0].tolist())] for one in (batch.tokens, batch.more))
        assert batch.identities[row].tolist() == [number, caption_hash(first)]
        assert batch.identities[20 + row].tolist() == [number, caption_hash(second)]
        assert (first == second) == (len(captions) == 1)
        pairs.add((first.split()[0], second.split()[0]))
    assert batch.lengths == tuple((batch.tokens.argmax(1) + 1).tolist())
    assert batch.more_lengths == tuple((batch.more.argmax(1) + 1).tolist())
    assert pairs == {("one", "one"), ("one", "two")} if choice == "first" else len(pairs) > 4
    settings = (
        f"data.train={data}", 'data.captions=["all"]', f"data.caption_choice={choice}", "data.caption_count=2",
        "loss.same=positives", "steps=3", "accumulate=2", "caption.weight=1",
    )  # fmt: skip
    trainings.run(tmp_path / "run", *settings)
    assert all(line["loss"] > 0 and "image_to_text_R@1" in line for line in metrics(tmp_path / "run"))
    refused = trainings.start(tmp_path / "refused", *settings, "loss.same=negatives").result()
    assert "loss.same = 'negatives' is invalid: expected positives or ignored" in error_of(refused.stderr)

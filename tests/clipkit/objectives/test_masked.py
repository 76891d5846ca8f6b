"""Tests of masked patch prediction: corruption, targets, loss, and rejected combinations of settings."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor

from clipkit.api import load
from clipkit.batch import Batch
from clipkit.config import load_config
from clipkit.errors import ConfigError
from clipkit.formats.checkpoint import model_hash, save_model
from clipkit.model.architectures import MASKED, Architecture, TextTower, VisionTower
from clipkit.model.clip import CLIP
from clipkit.model.masked import TARGETS, corrupt_patches
from clipkit.model.measure import image_flops
from clipkit.model.towers import VisionTransformer
from clipkit.objectives import TermBatch, select_terms
from clipkit.objectives.distill import Teaching
from clipkit.objectives.masked import Masked
from clipkit.training.build import first_model, places, shape_of
from clipkit.training.costs import Workload, measure_step, workloads_of
from tests.clipkit.term_sums import sum_term

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"
SIDE, PATCHES = 8, 16


def made(target: str | None = "color") -> CLIP:
    shape = Architecture(
        embed_dim=24,
        vision=VisionTower(image_size=32, patch_size=SIDE, width=48, layers=2, heads=2),
        text=TextTower(width=32, layers=2, heads=2, context_length=30, vocab_size=100),
        masked=target,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CLIP(shape).initialize().double()


def random_images(rows: int = 5, size: int = 32) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (rows, 3, size, size), dtype=torch.uint8, generator=random)


def chosen_in(
    images: Tensor, *, target: str = "color", fraction: float = 0.5, seed: int = 3
) -> dict[str, Tensor]:
    rows = torch.arange(len(images))
    return corrupt_patches(images, target=target, side=SIDE, fraction=fraction, seed=seed, rows=rows)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.floats(0.01, 1), st.integers(0, 2**64))
def test_patches_are_chosen_per_image_and_others_stay_visible(rows: int, fraction: float, seed: int) -> None:
    found = chosen_in(random_images(rows), fraction=fraction, seed=seed)
    chosen, sources = found["chosen"], found["sources"]
    assert chosen.shape == (rows, max(1, round(fraction * PATCHES)))
    assert (chosen.diff(dim=1) > 0).all() and chosen.min() >= 0 and chosen.max() < PATCHES
    assert sources.min() >= 0 and sources.max() <= PATCHES
    seen = torch.ones(rows, PATCHES, dtype=torch.bool).scatter(
        1, chosen, torch.zeros(chosen.shape, dtype=torch.bool)
    )
    assert torch.equal(sources[seen], torch.arange(PATCHES).repeat(rows, 1)[seen])
    part = corrupt_patches(
        random_images(rows)[-1:],
        target="color",
        side=SIDE,
        fraction=fraction,
        seed=seed,
        rows=torch.tensor([rows - 1]),
    )
    assert all(torch.equal(part[name], found[name][-1:]) for name in found)  # independent of the other rows


def test_eighty_percent_of_chosen_patches_are_masked_and_ten_percent_replaced() -> None:
    found = chosen_in(random_images(4000), fraction=1.0)
    places = torch.arange(PATCHES).expand(4000, -1)
    masked, kept = (found["sources"] == PATCHES), (found["sources"] == places)
    assert masked.double().mean() == pytest.approx(0.8, abs=0.01)
    assert kept.double().mean() == pytest.approx(0.1, abs=0.01)
    others = (found["sources"] - places)[~masked & ~kept] % PATCHES
    counts = others.bincount(minlength=PATCHES)[1:].double()
    assert (counts / counts.sum() - 1 / (PATCHES - 1)).abs().max() < 0.01  # other patches are equally likely


def test_labels_equal_numpy() -> None:
    images = random_images(3)
    for target in ("color", "small", "pixels"):
        found = chosen_in(images, target=target)
        for row, patches in enumerate(found["chosen"].tolist()):
            for place, patch in enumerate(patches):
                top, left = SIDE * (patch // 4), SIDE * (patch % 4)
                pixels = images[row, :, top : top + SIDE, left : left + SIDE].numpy().astype(np.float64)
                label = found["labels"][row, place].numpy()
                if target == "pixels":
                    values = pixels.ravel() / 255
                    expected = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-6)
                    np.testing.assert_allclose(label, expected, atol=1e-5)
                    continue
                cells = 1 if target == "color" else 4
                means = pixels.reshape(3, cells, SIDE // cells, cells, SIDE // cells).mean(axis=(2, 4))
                red, green, blue = (means // 32).astype(int)
                np.testing.assert_array_equal(label.ravel(), (64 * red + 8 * green + blue).ravel())


def test_masked_pixels_do_not_affect_tokens() -> None:
    model, images = made(), random_images()
    found = chosen_in(images)
    hidden = torch.ones(len(images), PATCHES, dtype=torch.bool)
    for row, sources in enumerate(found["sources"].tolist()):
        hidden[row, [source for source in sources if source < PATCHES]] = False
    assert hidden.sum() > 20
    grid = hidden.view(-1, 1, 4, 4).repeat_interleave(SIDE, 2).repeat_interleave(SIDE, 3)
    noise = torch.randint(0, 256, images.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(9))
    assert isinstance(model.visual, VisionTransformer) and model.masked_head is not None
    replaced = found["sources"], model.masked_head.mask_embedding
    tokens = [
        model.visual.encode_with_tokens(one, colors=model.colors, replaced=replaced)[1]
        for one in (images, torch.where(grid, noise, images), torch.where(grid, images, noise))
    ]
    assert torch.equal(tokens[0], tokens[1]) and not torch.allclose(tokens[0], tokens[2])


def test_loss_equals_beit() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BeitConfig(
        vocab_size=512, hidden_size=48, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        image_size=32, patch_size=SIDE, use_mask_token=True,
    )  # fmt: skip
    beit = transformers.BeitForMaskedImageModeling(config).double().eval()
    images = random_images()
    found = chosen_in(images)
    masks = torch.zeros(len(images), PATCHES, dtype=torch.bool).scatter(1, found["chosen"], True)
    with torch.no_grad():
        theirs = beit(images.double() / 255, bool_masked_pos=masks, labels=found["labels"].flatten())
        chosen = theirs.logits[masks]
    assert TARGETS["color"].loss(chosen, found["labels"].flatten()) / masks.sum() == pytest.approx(
        float(theirs.loss), abs=1e-12
    )


@pytest.mark.parametrize("target", MASKED)
def test_masked_term_sums_over_chosen_patches(target: str) -> None:
    model, images = made(target), random_images()
    rows = torch.arange(5)
    identities = torch.stack([rows, rows], dim=1)
    batch = Batch(images=images, tokens=torch.zeros(5, 1), lengths=(1,) * 5, ids=rows, identities=identities)

    def teach() -> Teaching:
        image, tokens = model.image_tokens(images.flip(3))
        return Teaching(
            images=image.detach(), texts=image.detach(), scale=torch.ones(()), tokens=tokens.detach()
        )

    term = Masked(weight=1, target=target)
    draw = TermBatch(batch=batch, seed=3, shape=model.architecture, teach=teach)
    found, count = term.inputs(draw)
    assert count == found["chosen"].numel() == 40
    assert isinstance(model.visual, VisionTransformer) and model.masked_head is not None
    outputs = model(images, torch.full((5, 3), 99))
    total = sum_term(model, term, images, torch.full((5, 3), 99), **found)
    assert len(outputs) == 3 and total.shape == ()
    replaced = found["sources"], model.masked_head.mask_embedding
    tokens = model.visual.encode_with_tokens(images, colors=model.colors, replaced=replaced)[1][:, 1:]
    predicted = torch.stack(
        [model.masked_head.head(token[at]) for token, at in zip(tokens, found["chosen"], strict=True)]
    )
    if target == "features":
        taught_tokens = teach().tokens
        assert taught_tokens is not None
        taught = torch.stack(
            [token[1:][at] for token, at in zip(taught_tokens, found["chosen"], strict=True)]
        )
        taught = taught - taught.mean(-1, keepdim=True)
        expected = (1 - (F.normalize(predicted, dim=-1) * F.normalize(taught, dim=-1)).sum(-1)).sum()
    elif target == "pixels":
        expected = (predicted - found["labels"]).square().mean(dim=-1).sum()
    else:
        cells = predicted.unflatten(-1, (-1, 512)).flatten(0, -2)
        expected = F.cross_entropy(cells, found["labels"].flatten()) * found["chosen"].numel()
    assert total.item() == pytest.approx(expected.item(), rel=1e-12 if target != "features" else 1e-5)
    assert torch.equal(outputs[0], model.encode_image(images))  # features are computed without corruption


def test_weights_with_and_without_a_masked_head(tmp_path: Path) -> None:
    plain = made(None)
    assert model_hash(plain) != model_hash(made()) != model_hash(made("small"))
    save_model(plain.float(), tmp_path / "plain")
    save_model(made().float(), tmp_path / "masked")
    assert load(str(tmp_path / "plain")).masked_head is None
    again = load(str(tmp_path / "masked"))
    assert again.architecture.masked == "color" and model_hash(again) == model_hash(made().float())
    assert places(again)["masked_head.mask_embedding"].tower == ""


def test_masked_settings(tmp_path: Path) -> None:
    def shape(*given: str) -> Architecture:
        config = load_config(QUICKSTART, given)
        return shape_of(config.model, config.loss, config.small, terms=select_terms(config))

    assert shape().masked is None and shape("masked.weight=1", "masked.target=pixels").masked == "pixels"
    with pytest.raises(ConfigError, match=r"masked.target = 'colour' is unknown: did you mean 'color'"):
        shape("masked.weight=1", "masked.target=colour")
    with pytest.raises(ConfigError, match=r"masked.fraction = 0.3"):
        shape("masked.fraction=0.3")
    with pytest.raises(ConfigError, match=r"masked.weight requires clipkit's own ViT .* not"):
        shape("masked.weight=1", "model.name=open_clip:RN50")
    with pytest.raises(ConfigError, match="14 pixels wide"):
        shape("masked.weight=1", "masked.target=small", "model.name=ViT-L-14")
    with pytest.raises(ConfigError, match=r"masked.target = 'features' .*optim.average"):
        shape("masked.weight=1", "masked.target=features")
    with pytest.raises(ConfigError, match="requires a term from the first step"):
        shape("masked.weight=1", "masked.after=5", "loss.name=none")
    with pytest.raises(ConfigError, match=r"masked.after = 5 .*lamb"):
        shape("masked.weight=1", "masked.after=5", "optim.name=lamb")
    late = load_config(
        QUICKSTART, ["masked.weight=1", "masked.after=900", "small.steps=600", "small.image_size=8"]
    )
    works = workloads_of(late, world=1, shard_ranks=1, bf16=False)
    found = [
        (work.steps, work.model.architecture.vision.image_size, work.model.masked_head is None)
        for work in works
    ]
    assert found == [(600, 8, True), (300, 16, True), (100, 16, False)]
    first = load_config(QUICKSTART, [])
    save_model(first_model(first, shape()), tmp_path / "start")
    config = load_config(QUICKSTART, ["masked.weight=1", f"model.weights={tmp_path / 'start'}"])
    model = first_model(config, shape("masked.weight=1"))
    assert model.masked_head is not None and model.masked_head.head.weight.std().item() == pytest.approx(
        0.02, rel=0.1
    )


def test_masked_flops() -> None:
    model = made()
    terms = {"masked": Masked(weight=1, fraction=0.5)}
    with_term, without = (measure_step(Workload(model=model, terms=one), 2).flops // 2 for one in (terms, {}))
    head = 2 * 8 * 48 * 512
    assert with_term - without - 3 * head > image_flops(made(None)).both

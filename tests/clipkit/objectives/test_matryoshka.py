"""Tests of matryoshka losses: equal to plain losses of sliced features; prefixes as embeddings."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

import clipkit
from clipkit.__main__ import dispatch
from clipkit.config import LossConfig, load_config
from clipkit.errors import ConfigError
from clipkit.formats.checkpoint import model_hash, save_model
from clipkit.model.names import create_architecture
from clipkit.objectives import Targets
from clipkit.objectives.clip import Clip, clip_loss
from clipkit.training.build import shape_of
from clipkit.training.step import batch_loss
from tests.clipkit.plain_losses import Given, given as batch_of, gradients, plain

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"


@given(
    rows=st.integers(2, 9),
    dims=st.lists(st.integers(1, 23), min_size=1, max_size=3, unique=True).map(sorted),
    weighted=st.booleans(),
    seed=st.integers(0, 99),
)
def test_prefix_loss_equals_loss_of_sliced_features(
    rows: int, dims: list[int], weighted: bool, seed: int
) -> None:
    batch, expected = batch_of(rows, seed=seed), batch_of(rows, seed=seed)
    weights = [float(1 + number) for number in range(len(dims) + 1)] if weighted else []
    settings = LossConfig(dims=tuple(dims), dim_weights=tuple(weights))
    identities = torch.arange(rows)[:, None]
    targets = Targets(identities=identities, tokens=identities, same="negatives")
    features = (batch.images, batch.texts, batch.scale)
    found = batch_loss(*features, objective=Clip(), targets=targets, settings=settings)

    def sliced(size: int) -> Given:
        parts = {name: F.normalize(getattr(expected, name)[:, :size], dim=-1) for name in ("images", "texts")}
        return Given(**{**vars(expected), **parts})

    losses = torch.stack([*(plain("clip", sliced(size)) for size in dims), plain("clip", expected)])
    share = torch.tensor(weights or [1.0] * len(losses), dtype=torch.float64)
    wanted = (share / share.sum()) @ losses
    torch.testing.assert_close(found, wanted)
    for own, other in zip(gradients(found, batch), gradients(wanted, expected), strict=True):
        torch.testing.assert_close(own, other)


def test_embeddings_are_normalized_prefixes(tmp_path: Path) -> None:
    save_model(clipkit.create("ViT-Ti-4-16", seed=0), tmp_path / "model")
    whole, short = clipkit.load(tmp_path / "model"), clipkit.load(tmp_path / "model", dim=24)
    image = torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8)
    for one, other in (
        (clipkit.encode_image(image, short), clipkit.encode_image(image, whole)),
        (clipkit.encode_text(["a", "b c"], short), clipkit.encode_text(["a", "b c"], whole)),
    ):
        torch.testing.assert_close(one, F.normalize(other[:, :24], dim=-1))
    assert clipkit.encode_image([], short).shape == clipkit.encode_text([], short).shape == (0, 24)
    assert clipkit.classify(image, ["a", "b"], short).sum().item() == pytest.approx(1)
    assert model_hash(short) != model_hash(whole)
    for dim in (-1, whole.dim + 1):
        with pytest.raises(ConfigError, match=f"dim = {dim} is invalid: expected 1 to {whole.dim}"):
            clipkit.load(tmp_path / "model", dim=dim)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["loss.dims=[0]"], "loss.dims = .* expected at least 1"),
        (["loss.dims=[8,4]"], "expected rising sizes"),
        (["loss.dims=[8.5]"], "expected a list of whole numbers"),
        (["loss.dims=8,16"], "expected a list of whole numbers"),
        (["loss.dims=[8]", "loss.dim_weights=[1]"], "expected 2 weights"),
        (["loss.dim_weights=[1]"], "has no effect unless loss.dims is set"),
        (["loss.smoothing=0.1", "loss.name=siglip"], "expected 0 with loss.name=siglip"),
        (["loss.smoothing=0.1", "loss.same=ignored"], "expected 0 with loss.same=ignored"),
        (["loss.smoothing=1"], "at least 0 and below 1"),
    ],
)
def test_invalid_settings_are_rejected(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(QUICKSTART, settings)


def test_prefixes_must_be_shorter_than_the_embedding() -> None:
    size = create_architecture("ViT-Ti-4-16").embed_dim
    config = load_config(QUICKSTART, [f"loss.dims=[8,{size}]"])
    with pytest.raises(ConfigError, match=f"expected sizes below {size}"):
        shape_of(config.model, config.loss, config.small)


def test_smoothing_moves_the_minimum_away_from_certainty() -> None:
    """A model certain of the right pairs has zero loss without smoothing, and a large one with it."""
    features, scale = torch.eye(4, dtype=torch.float64), torch.tensor(100.0, dtype=torch.float64)
    assert clip_loss(features, features, scale).item() == pytest.approx(0, abs=1e-12)
    wrong = 0.1 * 3 / 4  # probability of other pairs
    assert clip_loss(features, features, scale, smoothing=0.1).item() == pytest.approx(100 * wrong)
    best = math.log((1 - wrong) / (wrong / 3))  # logit at which softmax has the smoothed probabilities
    at_best = clip_loss(features, features, torch.tensor(best), smoothing=0.1)
    entropy = -(1 - wrong) * math.log(1 - wrong) - wrong * math.log(wrong / 3)
    assert at_best.item() == pytest.approx(entropy)
    with pytest.raises(ValueError, match="smoothing"):
        clip_loss(features, features, scale, smoothing=1.0)


def test_encode_command_accepts_dim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(clipkit.create("ViT-Ti-4-16", seed=0), tmp_path / "model")
    (tmp_path / "texts.txt").write_text("red\nblue\n")
    arguments = [
        "encode",
        str(tmp_path / "texts.txt"),
        "--text",
        "--model",
        str(tmp_path / "model"),
        "--quiet",
    ]
    assert dispatch([*arguments, "--dim", "16", "--out", str(tmp_path / "out")]) == 0
    import numpy as np

    stored = np.load(tmp_path / "out" / "text_emb" / "text_emb_0.npy")
    assert stored.shape == (2, 16)
    np.testing.assert_allclose((stored.astype(np.float32) ** 2).sum(1), 1, atol=1e-3)

"""Tests of internals against their definitions: layer similarities, filters, positions and attention."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

from clipkit.errors import ConfigError, DataError
from clipkit.formats.checkpoint import save_model
from clipkit.model.attention import encode_all_tokens, watch_attention
from clipkit.model.clip import CLIP, create
from clipkit.model.names import create_architecture
from clipkit.model.towers import Padded
from eval.__main__ import main
from eval.internals import analyze_tower, attention_distances, compare_layers, find_layers, hsic, roll_out
from tests.eval.web_page import Page


@given(st.integers(4, 9), st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
@settings(max_examples=40)
def test_hsic_equals_formula_and_ignores_rotation_and_scale(
    count: int, width: int, other: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    first, second = (
        torch.randn(count, size, generator=random, dtype=torch.float64) for size in (width, other)
    )
    q, _ = torch.linalg.qr(torch.randn(width, width, generator=random, dtype=torch.float64))
    turned = 3 * first @ q + 5
    grams = [one @ one.T for one in (first, turned, second)]
    own = hsic(grams[0], grams[0])
    if own > 1e-9:
        like = hsic(grams[0], grams[1]) / (own * hsic(grams[1], grams[1])).sqrt()
        assert like == pytest.approx(1, abs=1e-6)
    k, m = (one - one.diag().diag() for one in (grams[0], grams[2]))
    ones = torch.ones(count, dtype=torch.float64)
    wanted = (k @ m).trace() + (ones @ k @ ones) * (ones @ m @ ones) / ((count - 1) * (count - 2))
    wanted = (wanted - 2 / (count - 2) * (ones @ k @ m @ ones)) / (count * (count - 3))
    assert hsic(grams[0], grams[2]) == pytest.approx(float(wanted), rel=1e-9, abs=1e-9)


@given(st.integers(5, 7), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_mean_hsic_over_all_batches_equals_hsic_of_all_images(count: int, width: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(count, width, generator=random, dtype=torch.float64) for _ in range(2))

    def of(chosen: tuple[int, ...]) -> float:
        return float(hsic(*(one[list(chosen)] @ one[list(chosen)].T for one in (first, second))))

    batches = [of(combination) for combination in combinations(range(count), 4)]
    assert sum(batches) / len(batches) == pytest.approx(of(tuple(range(count))), rel=1e-9, abs=1e-12)


def test_layer_similarity_equals_definition_with_sums_over_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("eval.internals._BATCH", 5)
    first, second = (create("ViT-Ti-4-16", seed=seed).eval() for seed in (0, 1))
    images = torch.randint(0, 256, (10, 3, 16, 16), dtype=torch.uint8)
    found = compare_layers(first, second, images, images)

    def products(model: CLIP) -> list[list[torch.Tensor]]:
        """Return Gram matrices of the tokens after each layer, for each batch."""
        every: list[list[torch.Tensor]] = []
        for part in images.split(5):
            x, every = model.visual.stem(part, colors=model.colors), [*every, []]  # type: ignore[operator]
            for block in model.transformers["image"].blocks:
                x = block(x, Padded())
                every[-1].append(x.flatten(1).double() @ x.flatten(1).double().T)
        return every

    with torch.no_grad():
        own, other = products(first), products(second)
    for i in range(3):
        for j in range(3):
            cross, left, right = (
                sum(float(hsic(a[k], b[m])) for a, b in zip(one, two, strict=True))
                for one, two, k, m in ((own, other, i, j), (own, own, i, i), (other, other, j, j))
            )
            assert float(found[i, j]) == pytest.approx(cross / (left * right) ** 0.5, rel=1e-4, abs=1e-5)


def test_filters_and_positions_equal_numpy() -> None:
    model = create("ViT-Ti-4-16", seed=0).eval()
    inside = analyze_tower(model, torch.zeros(1, 3, 16, 16, dtype=torch.uint8))
    assert inside.filters is not None and inside.positions is not None
    weight = model.visual.get_parameter("conv1.weight").detach().flatten(1).numpy()
    wanted = np.linalg.svd(weight)[2][:28]
    same = np.abs((inside.filters.flatten(1).numpy() * wanted).sum(axis=1))  # signs are arbitrary
    np.testing.assert_allclose(same, 1, atol=1e-3)
    table = model.visual.get_parameter("positional_embedding").detach().numpy()[1:]
    norms = np.linalg.norm(table, axis=1)
    cosines = (table @ table.T / norms / norms[:, None]).reshape(4, 4, 4, 4)
    np.testing.assert_allclose(inside.positions.numpy(), cosines, atol=1e-5)


def test_attention_distances_and_rollouts_equal_loops() -> None:
    torch.manual_seed(0)
    maps = [torch.rand(2, 3, 10, 10).softmax(dim=-1) for _ in range(3)]  # one class token, then 3 × 3 patches
    wanted = torch.zeros(3)
    for head in range(3):
        for image in range(2):
            for q in range(9):
                weights = maps[0][image, head, 1 + q, 1:]
                far = [12 * np.hypot(q // 3 - k // 3, q % 3 - k % 3) for k in range(9)]
                wanted[head] += float((weights / weights.sum()) @ torch.tensor(far, dtype=torch.float32)) / 9
    torch.testing.assert_close(attention_distances(maps[0], 36), wanted)
    for image in range(2):
        total = np.eye(10)
        for one in maps:
            total = (one[image].mean(dim=0).numpy() + np.eye(10)) / 2 @ total
        row = total[0, 1:] - total[0, 1:].min()
        np.testing.assert_allclose(
            roll_out(maps)[image].flatten().numpy(), row / row.max(), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("pool", ["mean", "map"])
def test_rollout_of_pooled_patches_does_not_read_the_class_token(pool: str) -> None:
    torch.manual_seed(0)
    maps = [torch.rand(2, 3, 10, 10).softmax(dim=-1) for _ in range(2)]
    total = np.eye(10)
    for one in maps:
        total = (one[1].mean(dim=0).numpy() + np.eye(10)) / 2 @ total
    row = total[1:, 1:].mean(axis=0)
    row -= row.min()
    np.testing.assert_allclose(
        roll_out(maps, class_token=False)[1].flatten().numpy(), row / row.max(), rtol=1e-4, atol=1e-6
    )
    shape = create_architecture("ViT-Ti-4-16")
    assert shape.vision.plain is not None
    model = create(replace(shape, vision=replace(shape.vision.plain, pool=pool)), seed=0).eval()
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    own: list[torch.Tensor] = []
    with torch.no_grad(), watch_attention(model, lambda _, weights: own.append(weights)):
        encode_all_tokens(model, images)
    rollouts = analyze_tower(model, images).rollouts
    assert rollouts is not None
    torch.testing.assert_close(rollouts, roll_out(own, class_token=False))


def test_model_equals_itself_over_several_batches() -> None:
    model = create("ViT-Ti-4-16", seed=0).eval()
    images = torch.randint(0, 256, (70, 3, 16, 16), dtype=torch.uint8)  # three batches
    like = compare_layers(model, model, images, images)
    torch.testing.assert_close(like.diagonal(), torch.ones(3))
    torch.testing.assert_close(like, like.T)
    inside = analyze_tower(model, images)
    assert inside.distances is not None and inside.distances.shape == (3, 3)
    assert (inside.distances > 0).all() and (inside.distances < 16 * 2**0.5).all()
    assert inside.positions is not None
    torch.testing.assert_close(inside.positions[1, 2, 1, 2], torch.tensor(1.0))
    assert inside.filters is not None and inside.filters.shape == (28, 3, 4, 4)
    torch.testing.assert_close(inside.filters.flatten(1).norm(dim=1), torch.ones(28))


TOWERS = {
    "own": create_architecture("ViT-Ti-8-48"),
    "resnet": create_architecture("ViT-Ti-8-48", image="timm:test_resnet"),
    "timm": create_architecture("ViT-Ti-8-48", image="timm:test_vit"),
}


@pytest.mark.parametrize("kind", TOWERS)
def test_page_of_two_models_shows_available_parts(kind: str, tmp_path: Path) -> None:
    first, second = create("ViT-Ti-4-16", seed=0), create(TOWERS[kind], seed=0)
    for name, model in (("first", first), ("<b>", second)):
        save_model(model, tmp_path / name)
    out = tmp_path / "page.html"
    command = ["internals", "--data", "digits", "--images", "9", "--out", str(out)]
    assert main([*command, "--model", str(tmp_path / "first"), "--model", str(tmp_path / "<b>")]) == 0
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    assert f"{tmp_path}/&lt;b&gt;" in text
    assert all((values["src"] or "").startswith("data:") for tag, values in page.tags if tag == "img")
    heads = {"own": 4 * 3, "resnet": 0, "timm": len(find_layers(second)) * 2}[kind]
    assert text.count('title="layer ') == 3 * 3 + heads
    assert text.count('alt="heat of') == (12 if kind == "resnet" else 24)
    assert "similarity of the layers of both models" in text


def test_internals_of_deep_images_take_a_pixel_range(tmp_path: Path) -> None:
    save_model(create("ViT-Ti-4-16", seed=0), tmp_path / "m")
    random = np.random.default_rng(0)
    for number in range(4):
        folder = tmp_path / "data" / f"class {number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 4096, (16, 16), dtype=np.uint16)).save(folder / f"{number}.png")
    command = ["internals", "--data", str(tmp_path / "data"), "--model", str(tmp_path / "m")]
    command += ["--out", str(tmp_path / "page.html")]
    with pytest.raises(DataError, match=r"16-bit grayscale image .* --pixel-range"):
        main(command)
    assert main([*command, "--pixel-range", "0,4095"]) == 0


def test_invalid_arguments_raise_one_line_errors(tmp_path: Path) -> None:
    save_model(create("ViT-Ti-4-16", seed=0), tmp_path / "m")
    command = ["internals", "--data", "digits", "--model", str(tmp_path / "m")]
    with pytest.raises(ConfigError, match=r"must be a file name ending in \.html"):
        main([*command, "--out", str(tmp_path / "x.png")])
    with pytest.raises(ConfigError, match="3 models: internals shows one, or two side by side"):
        main([*command, *command[-2:], *command[-2:], "--out", str(tmp_path / "x.html")])

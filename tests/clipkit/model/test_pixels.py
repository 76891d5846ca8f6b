"""Tests of the pixel tower (Image GPT): equality with transformers, masks, completion, palette."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling

import clipkit
from clipkit.__main__ import dispatch
from clipkit.config import load_config
from clipkit.errors import CheckpointError, ConfigError
from clipkit.formats.checkpoint import save_model
from clipkit.model.clip import CLIP, create
from clipkit.model.measure import image_flops
from clipkit.model.names import create_architecture
from clipkit.model.pixels import PixelTransformer, even_palette
from clipkit.training.build import shape_of

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"


def tower(*, causal: bool = True, colors: int = 27, seed: int = 0) -> PixelTransformer:
    torch.manual_seed(seed)
    found = PixelTransformer(side=4, width=32, layers=3, heads=4, colors=colors, causal=causal, output_dim=8)
    torch.nn.init.normal_(found.proj_colors.weight)
    return found.eval()


def logits(model: PixelTransformer, colors: torch.Tensor, chosen: torch.Tensor | None = None) -> torch.Tensor:
    found: torch.Tensor = model.proj_colors(model.compute_tokens(colors, chosen)).detach()
    return found


def test_logits_equal_transformers() -> None:
    own = tower()
    config = ImageGPTConfig(
        vocab_size=28, n_positions=16, n_embd=32, n_layer=3, n_head=4, activation_function="quick_gelu",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    other = ImageGPTForCausalImageModeling(config).eval()
    state = {name: value for name, value in other.state_dict().items() if name.endswith(".bias")}
    values = {name: torch.zeros_like(value) for name, value in state.items()}  # zeros as released
    values |= {
        "transformer.wte.weight": own.color_embedding.weight,
        "transformer.wpe.weight": own.positional_embedding,
        "transformer.ln_f.weight": own.ln_post.weight,
        "lm_head.weight": own.proj_colors.weight,
    }
    for number, block in enumerate(own.blocks):
        for name, parameter in block.named_parameters():
            theirs = {
                "attn.qkv.weight": "attn.c_attn.weight", "attn.out.weight": "attn.c_proj.weight",
                "c_fc.weight": "mlp.c_fc.weight", "c_proj.weight": "mlp.c_proj.weight",
            }.get(name, name)  # fmt: skip
            turned = parameter if name.startswith("ln_") else parameter.T
            values[f"transformer.h.{number}.{theirs}"] = turned
    other.load_state_dict(values)
    colors = torch.randint(0, 27, (3, 16), generator=torch.Generator().manual_seed(1))
    seen = torch.cat([torch.full((3, 1), 27), colors[:, :-1]], dim=1)
    with torch.no_grad():
        expected = other(seen).logits
    torch.testing.assert_close(logits(own, colors), expected, rtol=1e-5, atol=1e-5)
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), colors.flatten(), reduction="sum")
    pixels = even_palette(27)[colors].transpose(1, 2).unflatten(2, (4, 4))
    _, tokens = own.encode_with_tokens(pixels)
    assert own.nll(pixels, tokens).item() == pytest.approx(loss.item(), rel=1e-5)


@given(place=st.integers(0, 15), color=st.integers(0, 26))
@settings(max_examples=20)
def test_pixel_affects_only_later_logits(place: int, color: int) -> None:
    model, colors = tower(), torch.arange(16)[None] % 27
    changed = colors.clone()
    changed[0, place] = color
    before, after = logits(model, colors), logits(model, changed)
    assert torch.equal(before[:, : place + 1], after[:, : place + 1])
    if place < 15 and color != int(colors[0, place]):
        assert not torch.equal(before[:, place + 1 :], after[:, place + 1 :])


@given(chosen=st.sets(st.integers(0, 15), min_size=1), seed=st.integers(0, 100))
@settings(max_examples=20)
def test_masked_pixels_do_not_affect_logits(chosen: set[int], seed: int) -> None:
    model, index = tower(causal=False), torch.tensor([sorted(chosen)])
    colors = torch.randint(0, 27, (1, 16), generator=torch.Generator().manual_seed(seed))
    other = colors.scatter(1, index, 3)
    assert torch.equal(logits(model, colors, index), logits(model, other, index))


@pytest.mark.parametrize("colors", [16, 27, 512])
def test_palette_colors_map_to_themselves(colors: int) -> None:
    palette = even_palette(colors)
    assert len(palette.unique(dim=0)) == colors
    model = PixelTransformer(side=4, width=8, layers=1, heads=1, colors=colors, causal=True, output_dim=8)
    image = palette[:16].T.unflatten(1, (4, 4))[None]
    assert model.quantize_colors(image).tolist() == [list(range(16))]
    stored = ((image + 1) * 127.5).round().to(torch.uint8)
    assert model.quantize_colors(stored).tolist() == [list(range(16))]


def test_completions_keep_given_pixels_and_sample_from_the_model() -> None:
    model = tower()
    with torch.no_grad():  # uniform probabilities
        model.proj_colors.weight.zero_()
    given_colors = torch.arange(6)[None].repeat(200, 1)
    done = list[int]()
    found = model.complete_pixels(given_colors, generator=torch.Generator().manual_seed(0), show=done.append)
    assert done == list(range(1, 11))
    assert found.shape == (200, 16) and torch.equal(found[:, :6], given_colors)
    counts = torch.bincount(found[:, 6:].flatten(), minlength=27)
    assert counts.min() > 0 and counts.max() < 2000 / 27 * 1.6


@pytest.fixture(scope="module")
def model() -> CLIP:
    shape = create_architecture(
        "ViT-Ti-4-16", image="pixels:Ti", image_options={"colors": 8, "causal": False}, image_size=8
    )
    return create(shape, seed=0)


def test_palette_is_stored_with_the_model(model: CLIP, tmp_path: Path) -> None:
    vision, folder = model.architecture.vision, tmp_path / "model"
    palette = torch.linspace(-1, 1, 24).view(8, 3)
    assert vision.take_weights(model.visual, {"palette": palette}, model.preprocess) == (
        model.preprocess,
        [],
    )
    assert (model.preprocess.mean, model.preprocess.std) == ((0.5,) * 3, (0.5,) * 3)
    save_model(model, folder)
    again = clipkit.load(folder)
    assert again.architecture == model.architecture
    assert torch.equal(again.visual.get_buffer("palette"), palette)
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    assert torch.equal(again.encode_image(images), model.eval().encode_image(images))
    with pytest.raises(CheckpointError, match=r"expected a palette of shape \(8, 3\), found \(7, 3\)"):
        vision.take_weights(model.visual, {"palette": palette[:7]}, model.preprocess)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["model.image=pixels:XL"], "'pixels:XL' is unknown"),
        (["model.image=pixels:Ti", 'model.image_options={"depth": 3}'], "image option 'depth' is unknown"),
        (["image_gpt.weight=1"], "unless model.image=pixels:SIZE is set"),
        (["image_gpt.fraction=0.5"], "unless image_gpt.weight is set"),
        (
            ["model.image=pixels:Ti", "image_gpt.weight=1", "lock.image=all"],
            "cannot be combined with image_gpt.weight",
        ),
        (["model.image=pixels:Ti", "model.image_size=1000"], "too large for a tower of pixels"),
    ],
)
def test_invalid_pixel_settings_are_rejected(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config = load_config(QUICKSTART, given)
        shape_of(config.model, config.loss, config.small)


def test_flops_equal_torch(model: CLIP) -> None:
    images = torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # counts no fused kernels
        model.encode_image(images)
    assert counter.get_total_flops() == image_flops(model).forward


def test_complete_keeps_the_upper_rows(tmp_path: Path) -> None:
    shape = create_architecture("ViT-Ti-4-16", image="pixels:Ti", image_options={"colors": 8}, image_size=8)
    save_model(create(shape, seed=0), tmp_path / "model")
    Image.new("RGB", (20, 20), (255, 255, 255)).save(tmp_path / "white.png")
    command = ["complete", str(tmp_path / "white.png"), "--model", str(tmp_path / "model"), "--out"]
    assert dispatch([*command, str(tmp_path / "a.png"), "--samples", "2", "--keep", "0.25"]) == 0
    assert dispatch([*command, str(tmp_path / "b.png"), "--samples", "2", "--keep", "0.25"]) == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()  # same seed
    image = Image.open(tmp_path / "a.png")
    assert image.size == (8 + 4 * 328, 356)
    for place in (2, 3):  # two of 8 rows are given, 80 of 320 pixels
        left = 8 + place * 328
        assert image.crop((left, 8, left + 320, 88)).getcolors() == [(320 * 80, (255, 255, 255))]
        assert len(image.crop((left, 88, left + 320, 328)).getcolors() or ()) > 1
    with pytest.raises(ConfigError, match="does not predict the next pixel"):
        save_model(clipkit.create("ViT-Ti-4-16", seed=0), tmp_path / "vit")
        picture, out = str(tmp_path / "white.png"), str(tmp_path / "c.png")
        dispatch(["complete", picture, "--model", str(tmp_path / "vit"), "--out", out])

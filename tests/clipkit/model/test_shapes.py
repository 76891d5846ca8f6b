"""Tests of pooling and position embeddings of clipkit's ViT, and of the sizes in [shape]."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import clipkit
from clipkit.config import Config, LossConfig, ModelConfig, OptimConfig, ShapeConfig, SmallConfig, load_config
from clipkit.errors import ConfigError
from clipkit.formats.checkpoint import model_hash, save_model
from clipkit.model import Architecture, ClassTable, TextTower, VisionTower
from clipkit.model.attention import image_representations
from clipkit.model.clip import CLIP, create
from clipkit.model.towers import AttentionPooling, average_grid, sincos_grid
from clipkit.training.build import first_model, shape_of
from clipkit.training.optim import make_optimizer

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"


def model(**vision: Any) -> CLIP:
    tower = VisionTower(image_size=32, patch_size=8, width=48, layers=2, heads=3, **vision)
    text = TextTower(width=32, layers=1, heads=2, context_length=8, vocab_size=60)
    return create(Architecture(embed_dim=24, vision=tower, text=text), seed=1)


def images(count: int = 3, side: int = 32) -> torch.Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def test_mean_pooling_equals_open_clip() -> None:
    from open_clip.model import CLIPVisionCfg, _build_vision_tower

    ours = model(pool="mean").eval()
    config = ours.architecture.vision.open_clip_config()
    assert config["pool_type"] == "avg"
    theirs = _build_vision_tower(24, CLIPVisionCfg(**config))
    theirs.load_state_dict(ours.visual.state_dict())
    torch.testing.assert_close(ours.visual(images()), theirs.eval()(images()), rtol=1e-5, atol=1e-6)


def test_attention_pooling_equals_timm() -> None:
    from timm.layers.attention_pool import AttentionPoolLatent

    ours = AttentionPooling(48, 3, mlp_ratio=4.0, quick_gelu=False)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs = AttentionPoolLatent(48, num_heads=3, mlp_ratio=4.0, norm_layer=torch.nn.LayerNorm).eval()
    (q, kv), (q_bias, kv_bias) = (
        one.split((48, 96)) for one in (ours.attn.in_proj_weight, ours.attn.in_proj_bias)
    )
    state = {f"norm.{name}": value for name, value in ours.norm.state_dict().items()}
    state |= {
        "latent": ours.probe[None, None],
        "q.weight": q,
        "q.bias": q_bias,
        "kv.weight": kv,
        "kv.bias": kv_bias,
    }
    state |= {f"proj.{name}": value for name, value in ours.attn.out_proj.state_dict().items()}
    state |= {f"mlp.fc1.{name}": value for name, value in ours.mlp.c_fc.state_dict().items()}
    state |= {f"mlp.fc2.{name}": value for name, value in ours.mlp.c_proj.state_dict().items()}
    theirs.load_state_dict(state)
    tokens = torch.randn(2, 17, 48)
    torch.testing.assert_close(ours(tokens), theirs(tokens[:, 1:]), rtol=1e-5, atol=1e-5)


class UnitLogits(torch.nn.Module):
    """Cosine similarities of projected tokens to class rows, as a head of timm's model."""

    def __init__(self, proj: torch.Tensor, rows: torch.Tensor) -> None:
        super().__init__()
        self.proj, self.rows = proj, F.normalize(rows, dim=1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.normalize(tokens @ self.proj, dim=1) @ self.rows.T


def distilled(classes: int = 7) -> CLIP:
    tower = VisionTower(image_size=32, patch_size=8, width=48, layers=2, heads=3, pool="distilled")
    head = ClassTable(names=tuple(map(str, range(classes))))
    return create(Architecture(embed_dim=24, vision=tower, text=head), seed=1)


def test_distillation_token_equals_timm(tmp_path: Path) -> None:
    from timm.models.deit import VisionTransformerDistilled

    ours = distilled().eval()
    visual = ours.visual.state_dict()
    theirs: Any = VisionTransformerDistilled(  # type: ignore[no-untyped-call]
        img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=7, pre_norm=True,
        norm_layer=partial(torch.nn.LayerNorm, eps=1e-5),
    ).eval()  # fmt: skip
    places = visual["positional_embedding"]
    state = {
        "cls_token": visual["class_embedding"].view(1, 1, -1),
        "dist_token": visual["distillation_embedding"].view(1, 1, -1),
        "pos_embed": torch.cat([places[:1], torch.zeros(1, 48), places[1:]])[None],
        "patch_embed.proj.weight": visual["conv1.weight"],
    }
    names = {
        "ln_pre": "norm_pre", "ln_post": "norm", "transformer.resblocks": "blocks", "ln_1": "norm1",
        "ln_2": "norm2", "attn.in_proj_": "attn.qkv.", "attn.out_proj": "attn.proj", "mlp.c_fc": "mlp.fc1",
        "mlp.c_proj": "mlp.fc2",
    }  # fmt: skip
    for name, value in visual.items():
        other = name
        for ours_name, theirs_name in names.items():
            other = other.replace(ours_name, theirs_name)
        if other != name:
            state[other] = value
    proj, rows = visual["proj"], ours.get_parameter("text.weight").detach()
    theirs.head, theirs.head_dist = torch.nn.Identity(), torch.nn.Identity()
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not missing and not unexpected
    theirs.head, theirs.head_dist = (
        UnitLogits(*pair) for pair in zip(proj.chunk(2, dim=1), rows.chunk(2, dim=1), strict=True)
    )
    save_model(ours, tmp_path / "model")
    again = clipkit.load(tmp_path / "model")
    assert again.architecture == ours.architecture and model_hash(again) == model_hash(ours)
    names_of_classes = [str(number) for number in range(7)]
    classes = torch.as_tensor(clipkit.encode_text(names_of_classes, again))
    logits = again.encode_image(images()) @ classes.T
    torch.testing.assert_close(logits, theirs(images()), rtol=0, atol=1e-6)
    theirs.set_distilled_training(True)
    theirs.train()
    for half, wanted in zip((slice(12), slice(12, 24)), theirs(images()), strict=True):
        features = again.encode_image(images())[:, half] @ classes[:, half].T
        torch.testing.assert_close(2 * features, wanted, rtol=0, atol=1e-6)


def test_distilled_tower_supports_patch_dropout_probing_and_resizing(tmp_path: Path) -> None:
    one = distilled().eval()
    every = torch.arange(16).expand(3, -1)
    torch.testing.assert_close(one.visual(images(), every), one.visual(images()))
    assert not torch.equal(one.visual(images(), every[:, :9]), one.visual(images()))
    found = image_representations(one, images(), layers=(1, 2))
    assert found.before_projection.shape == found.layers[2].shape == (3, 48)
    torch.testing.assert_close(found.projected.norm(dim=1), torch.ones(3))
    save_model(one, tmp_path / "model")
    larger = clipkit.load(tmp_path / "model", image_size=64)
    assert larger.encode_image(images(side=64)).shape == (3, 24)
    with pytest.raises(
        ConfigError, match="dim = 12 is invalid: the embedding has a half for the class token"
    ):
        clipkit.load(tmp_path / "model", dim=12)
    with pytest.raises(ConfigError, match=r"open_clip has no tower like this one .*distillation token"):
        one.architecture.vision.open_clip_config()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["distill.teacher=x"], "shape.distilled = True is invalid: requires loss.name=classes"),
        ([], "shape.distilled = True has no effect unless distill.teacher or model.weights is set"),
        (["shape.pool=map"], "shape.pool = 'map' is invalid: expected class with shape.distilled"),
        (
            ["loss.name=classes", "model.text=classes:x", "distill.teacher=x", "distill.weight=1"],
            "distill.weight = 1.0 is invalid: expected below 1 with shape.distilled",
        ),
        (
            ["loss.name=classes", "model.text=classes:x", "distill.teacher=x", "loss.dims=[8]"],
            "loss.dims = .* is invalid: cannot be combined with shape.distilled",
        ),
    ],
)
def test_invalid_distillation_settings_are_rejected(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(QUICKSTART, ["shape.distilled=true", *given])


def test_weights_of_another_shape_are_refused_unless_it_is_theirs(tmp_path: Path) -> None:
    (tmp_path / "names").write_text("a\nb")
    head = ModelConfig(name="ViT-Ti-4-16", text=f"classes:{tmp_path}/names")
    loss, sizes = LossConfig(name="classes"), ShapeConfig(distilled=True, image_layers=1, embed=64)
    save_model(create(shape_of(head, loss, SmallConfig(), sizes=sizes), name=head.label), tmp_path / "model")
    again = replace(head, weights=str(tmp_path / "model"))
    first = partial(first_model, Config(model=again, loss=loss))
    with pytest.raises(
        ConfigError,
        match=r"are of ViT-Ti-4-16 \+ classes, which is not that of the settings: model.name= \(empty\), without",
    ):
        first(shape_of(again, loss, SmallConfig()))
    named = replace(again, name="")
    assert first_model(
        Config(model=named, loss=loss), shape_of(named, loss, SmallConfig())
    ).architecture.distilled
    assert first(shape_of(again, loss, SmallConfig(), sizes=sizes)).architecture.distilled


def test_distillation_token_requires_a_class_head_and_even_dimension() -> None:
    with pytest.raises(ConfigError, match="requires a classification head and an even embedding dimension"):
        model(pool="distilled")
    with pytest.raises(ConfigError, match="not classification head, 7 classes and embed_dim = 25"):
        replace(distilled().architecture, embed_dim=25)


@given(side=st.integers(1, 5), quarter=st.integers(2, 6))
@settings(max_examples=20, deadline=None)
def test_fixed_positions_are_sines_and_cosines_of_row_and_column(side: int, quarter: int) -> None:
    table = sincos_grid(side, 4 * quarter).numpy()
    assert not table[0].any()
    for row in range(side):
        for column in range(side):
            omega = np.array([10_000 ** (-number / (quarter - 1)) for number in range(quarter)])
            waves = (np.sin(column * omega), np.cos(column * omega), np.sin(row * omega), np.cos(row * omega))
            assert np.allclose(table[1 + row * side + column], np.concatenate(waves), atol=1e-6)


@pytest.mark.parametrize("positions", ["sincos_2d", "none"])
def test_fixed_positions_are_not_trained(positions: str) -> None:
    one = model(positions=positions)
    before = one.visual.get_parameter("positional_embedding").clone()
    optimizer = make_optimizer(one, OptimConfig(lr=0.1, weight_decay=0.5))
    one.encode_image(images()).sum().backward()
    optimizer.step()
    assert torch.equal(one.visual.get_parameter("positional_embedding"), before)
    assert before.any() == (positions != "none")


def test_smoothed_row_and_column_positions_are_tied() -> None:
    one = model(positions="learned_2d")
    table = one.visual.get_parameter("positional_embedding")
    before = table.detach().clone()
    one.architecture.vision.smooth_positions(one.visual, 16)
    torch.testing.assert_close(average_grid(table), table)
    assert float(table.detach()[1:].std()) == pytest.approx(float(before[1:].std()), rel=0.5)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "muon", "lamb", "stable_adamw"])
def test_row_and_column_positions_stay_tied(name: str) -> None:
    one = model(positions="learned_2d")
    table = one.visual.get_parameter("positional_embedding")
    rows, columns = (torch.zeros(4, 24, requires_grad=True) for _ in range(2))
    first = table[:1].detach()
    with torch.no_grad():
        rows.copy_(table[1::4, :24])
        columns.copy_(table[1:5, 24:])
    grid = torch.cat([rows[:, None].expand(-1, 4, -1), columns.expand(4, -1, -1)], dim=-1)
    torch.testing.assert_close(torch.cat([first, grid.flatten(0, 1)]), table)
    plain = model()
    plain.load_state_dict(one.state_dict())
    torch.testing.assert_close(plain.visual(images()), one.visual(images()))

    untied = plain.visual.get_parameter("positional_embedding")
    (whole,) = torch.autograd.grad(plain.visual(images()).square().sum(), untied)
    of_each = torch.autograd.grad(grid, (rows, columns), whole[1:].unflatten(0, (4, 4)))
    optimizer = make_optimizer(one, OptimConfig(name=name, lr=0.01))
    for step in range(3):
        optimizer.zero_grad()
        one.visual(images()).square().sum().backward()
        if step == 0:  # gradients are averaged over tied entries
            assert table.grad is not None
            torch.testing.assert_close(table.grad[1::4, :24], of_each[0] / 4)
            torch.testing.assert_close(table.grad[1:5, 24:], of_each[1] / 4)
        optimizer.step()
    torch.testing.assert_close(average_grid(table), table, rtol=0, atol=1e-6)


def test_patch_order_is_irrelevant_without_positions() -> None:
    one, cut = model(positions="none", pool="mean").eval(), images()
    mirrored = cut.unflatten(3, (4, 8)).flip(3).flatten(3)  # columns of patches in reverse order
    torch.testing.assert_close(one.visual(cut), one.visual(mirrored), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pool", ["mean", "map"])
def test_keeping_all_patches_equals_no_dropout(pool: str) -> None:
    one = model(pool=pool).eval()
    every = torch.arange(16).expand(3, -1)
    torch.testing.assert_close(one.visual(images(), every), one.visual(images()))
    pooled = image_representations(one, images()).before_projection
    assert pooled.shape == (3, 48)
    torch.testing.assert_close(pooled @ one.visual.get_parameter("proj"), one.visual(images()))


@pytest.mark.parametrize("pool", ["mean", "map"])
def test_pooling_and_positions_are_stored(pool: str, tmp_path: Path) -> None:
    one = model(pool=pool, positions="sincos_2d").eval()
    save_model(one, tmp_path / "model")
    again = clipkit.load(tmp_path / "model")
    assert again.architecture == one.architecture
    assert torch.equal(again.visual(images()), one.visual(images()))
    assert model_hash(again) == model_hash(one)
    larger = clipkit.load(tmp_path / "model", image_size=64)
    assert larger.visual(images(side=64)).shape == (3, 24)


def test_pooling_changes_the_hash() -> None:
    mean, plain = model(pool="mean"), model()
    mean.load_state_dict(plain.state_dict())
    assert model_hash(mean) != model_hash(plain)


def sized(model: ModelConfig | None = None, **sizes: Any) -> Architecture:
    config = model or ModelConfig(name="ViT-B-32")
    return shape_of(config, LossConfig(), SmallConfig(), sizes=ShapeConfig(**sizes))


def test_shape_settings_replace_named_sizes() -> None:
    shape = sized(
        image_width=384, image_layers=6, image_mlp=2.0, patch=16, pool="map", text_width=256, embed=128
    )
    plain = sized()
    vision, text = plain.get_plain_towers()
    assert shape == replace(
        plain,
        embed_dim=128,
        vision=replace(vision, width=384, layers=6, heads=6, mlp_ratio=2.0, patch_size=16, pool="map"),
        text=replace(text, width=256, heads=4),
    )
    assert sized(image_width=384, image_heads=2).get_plain_towers()[0].heads == 2


def test_invalid_sizes_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"shape.image_width = 100 .*multiple of 64, the width of a head$"):
        sized(image_width=100)
    with pytest.raises(
        ConfigError, match=r"to set shape.patch and shape.pool, the image tower must be clipkit's ViT, not"
    ):
        sized(ModelConfig(name="ViT-B-32", image="timm:resnet18"), pool="mean", patch=16, embed=64)
    with pytest.raises(
        ConfigError, match=r"to set shape.text_layers, the text tower must be clipkit's transformer"
    ):
        sized(ModelConfig(name="ViT-B-32", text="cbow"), text_layers=3)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"patch": 15}, "model.image_size = 224 is not a multiple of shape.patch = 15"),
        ({"image_layers": 10**6}, "shape.image_layers = 1000000 is not an integer from 1 to 1000"),
        ({"text_layers": 1001}, "shape.text_layers = 1001 is not an integer"),
        ({"image_heads": 7}, "shape.image_width = 768 is not a multiple of shape.image_heads = 7"),
        ({"embed": 10**7}, "shape.embed = 10000000 is not"),
    ]
    for sizes, said in cases:
        with pytest.raises(ConfigError, match=f"^{said}"):
            sized(**sizes)
    pixels = ModelConfig(name="ViT-B-32", image="pixels:Ti", image_options='{"colors": 0}')
    with pytest.raises(ConfigError, match=r"^model.image_options: colors = 0 is not"):
        shape_of(pixels, LossConfig(), SmallConfig())
    with pytest.raises(ConfigError, match=r"^loss.dims = \[32, 16\] is invalid: expected rising sizes"):
        LossConfig(dims=(32, 16))
    with pytest.raises(
        ConfigError, match=r"shape.pool = 'avg' is invalid: expected .*class, mean, mean_norm or map"
    ):
        ShapeConfig(pool="avg")


def test_model_too_large_for_memory_raises_one_line_error() -> None:
    sizes = ShapeConfig(image_width=1_000_000, image_heads=1)
    shape = shape_of(ModelConfig(name="ViT-Ti-4-16"), LossConfig(), SmallConfig(), sizes=sizes)
    with pytest.raises(ConfigError, match=r"not enough memory for a model of [\d,]{16,} parameters"):
        create(shape, seed=0)

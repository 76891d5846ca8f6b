"""Tests of the CLIP model: features equal open_clip's, gradients equal a plain reference, initial weights."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.errors import ConfigError
from clipkit.model.architectures import ARCHITECTURES, Architecture, TextTower, VisionTower
from clipkit.model.clip import CLIP, create
from clipkit.model.names import from_open_clip
from clipkit.model.preprocess import OPENAI_MEAN, OPENAI_STD
from clipkit.model.tokenizer import tokenize
from clipkit.model.towers import ResidualAttentionBlock, Transformer, VisionTransformer

TEXTS = [
    "", "a cat", "a photo of two dogs on a beach", "x", "the quick brown fox jumps over the lazy dog " * 12, "ok",
    "<end_of_text> and more", "red", "a b c d e f g h i j k", "bold serif greek small letter alpha", "12", "a cat",
    "one", "two", "three", "four", "five six seven", "eight", "nine ten " * 10, "the end",
]  # fmt: skip


def random_images(count: int, size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


def normalized(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (OPENAI_MEAN, OPENAI_STD))
    return (images / 255 - mean) / std


@pytest.mark.parametrize("config", [None, "no_causal_mask"])
@pytest.mark.parametrize("shape", [(2, 12), (1, 9), (8,), (1, 1, 8)])
def test_tokens_of_another_shape_are_refused(config: str | None, shape: tuple[int, ...]) -> None:
    text = {"context_length": 8, "width": 32, "heads": 2, "layers": 1}
    vision = {"image_size": 32, "patch_size": 8, "width": 64, "head_width": 32, "layers": 1}
    if config is not None:  # a tower of open_clip
        text[config] = True
    model = create(from_open_clip({"embed_dim": 32, "vision_cfg": vision, "text_cfg": text}), seed=0)
    for encode in (model.encode_text, model.text_tokens):
        with pytest.raises(
            ConfigError, match=r"tokens must be \(B, L\) with L at most 8, the model's context"
        ):
            encode(torch.ones(shape, dtype=torch.int64))
    assert model.encode_text(torch.ones(2, 8, dtype=torch.int64)).shape == (2, 32)


# Reference: all blocks for all tokens, one dense mask over the whole context, one attention head at a time.


def plain_block(block: ResidualAttentionBlock, x: Tensor, mask: Tensor) -> Tensor:
    attention, normed = block.attn, block.ln_1(x)
    q, k, v = F.linear(normed, attention.in_proj_weight, attention.in_proj_bias).chunk(3, dim=-1)
    heads = []
    width = x.shape[-1] // attention.heads
    for h in range(attention.heads):
        own = slice(h * width, (h + 1) * width)
        weights = (q[..., own] @ k[..., own].mT / math.sqrt(width) + mask).softmax(dim=-1)
        heads.append(weights @ v[..., own])
    x = x + attention.out_proj(torch.cat(heads, dim=-1))
    hidden = block.mlp.c_fc(block.ln_2(x))
    quick = type(block.mlp.gelu).__name__ == "QuickGELU"
    activated = hidden * torch.sigmoid(1.702 * hidden) if quick else F.gelu(hidden)
    return x + F.linear(activated, block.mlp.c_proj.weight, block.mlp.c_proj.bias)


def plain_transformer(transformer: Transformer, x: Tensor, mask: Tensor) -> Tensor:
    for block in transformer.resblocks:
        assert isinstance(block, ResidualAttentionBlock)
        x = plain_block(block, x, mask)
    return x


def plain_text(model: CLIP, tokens: Tensor) -> Tensor:
    length = tokens.shape[1]
    mask = torch.full((length, length), -torch.inf, dtype=model.text_projection.dtype).triu(1)
    x = model.token_embedding(tokens) + model.positional_embedding[:length]
    x = model.ln_final(plain_transformer(model.transformer, x, mask))
    return F.normalize(x[torch.arange(len(x)), tokens.argmax(dim=-1)] @ model.text_projection, dim=-1)


def plain_image(model: CLIP, images: Tensor) -> Tensor:
    visual = model.visual
    assert isinstance(visual, VisionTransformer)
    x = F.conv2d(images, visual.conv1.weight, stride=visual.patch_size).flatten(2).mT
    x = torch.cat([visual.class_embedding.expand(len(x), 1, -1), x], dim=1) + visual.positional_embedding
    mask = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
    x = visual.ln_post(plain_transformer(visual.transformer, visual.ln_pre(x), mask))
    return F.normalize(x[:, 0] @ visual.proj, dim=-1)


def gradients(model: CLIP, features: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Gradients of a fixed linear function of the features."""
    model.zero_grad()
    output = features()
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    torch.autograd.backward((output * direction).sum())
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("quick_gelu", [False, True])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 16, len(TEXTS)])
def test_packed_text_tower_equals_reference(tiny: CLIP, count: int, quick_gelu: bool) -> None:
    model = with_activation(tiny, quick_gelu=quick_gelu)
    tokens = tokenize(TEXTS[:count])
    ours, plain = model.encode_text(tokens), plain_text(model, tokens)
    assert (ours - plain).abs().max() <= 1e-5
    assert ours.dtype == torch.float32
    own = gradients(model, lambda: model.encode_text(tokens))
    want = gradients(model, lambda: plain_text(model, tokens))
    assert own.keys() == want.keys()
    for name, gradient in own.items():
        assert (gradient - want[name]).abs().max() <= 1e-5 * max(1.0, float(want[name].abs().max())), name


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_pruned_image_tower_equals_reference(tiny: CLIP, quick_gelu: bool) -> None:
    model = with_activation(tiny, quick_gelu=quick_gelu)
    images = normalized(random_images(5, 32))
    assert (model.encode_image(images) - plain_image(model, images)).abs().max() <= 1e-5
    own = gradients(model, lambda: model.encode_image(images))
    want = gradients(model, lambda: plain_image(model, images))
    assert own.keys() == want.keys()
    for name, gradient in own.items():
        assert (gradient - want[name]).abs().max() <= 1e-5 * max(1.0, float(want[name].abs().max())), name


def with_activation(tiny: CLIP, *, quick_gelu: bool) -> CLIP:
    model = CLIP(replace(tiny.architecture, quick_gelu=quick_gelu))
    model.load_state_dict(tiny.state_dict())
    return model


def test_float64_towers_equal_reference(tiny: CLIP) -> None:
    model = tiny.double()
    tokens, images = tokenize(TEXTS), normalized(random_images(3, 32)).double()
    text, image = model.encode_text(tokens), model.encode_image(images)
    assert text.dtype == image.dtype == torch.float64
    assert (text - plain_text(model, tokens)).abs().max() <= 1e-13
    assert (image - plain_image(model, images)).abs().max() <= 1e-13


def test_tokens_after_end_of_text_are_ignored(tiny: CLIP) -> None:
    tokens = tokenize(TEXTS[:9])
    want = tiny.encode_text(tokens)
    ends = tokens.argmax(dim=-1, keepdim=True)
    noise = torch.randint(0, 49_000, tokens.shape, generator=torch.Generator().manual_seed(0))
    noisy = torch.where(torch.arange(77) > ends, noise, tokens)
    assert torch.equal(tiny.encode_text(noisy), want)
    trimmed = tokenize(TEXTS[:9], trim=True)
    assert torch.equal(tiny.encode_text(trimmed), want)


def test_text_features_are_independent_of_batch_and_order(tiny: CLIP) -> None:
    tokens = tokenize(TEXTS)
    together = tiny.encode_text(tokens)
    alone = torch.cat([tiny.encode_text(row[None]) for row in tokens])
    assert (together - alone).abs().max() <= 1e-6
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
    assert (tiny.encode_text(tokens[order]) - together[order]).abs().max() <= 1e-6
    same = tiny.encode_text(tokenize(["a cat"] * 33))
    assert (same - same[0]).abs().max() <= 1e-6


@pytest.mark.parametrize("count", [0, 1])
def test_empty_and_single_batches(tiny: CLIP, count: int) -> None:
    image, text, scale = tiny(random_images(count, 32), tokenize(TEXTS[:count]))
    assert image.shape == text.shape == (count, 48)
    assert image.dtype == text.dtype == scale.dtype == torch.float32
    assert scale.shape == ()
    assert float(scale.detach()) == pytest.approx(1 / 0.07)
    ones = torch.ones(count)
    torch.testing.assert_close(image.norm(dim=-1), ones)
    torch.testing.assert_close(text.norm(dim=-1), ones)
    torch.autograd.backward(image.sum() + text.sum())


def test_uint8_and_normalized_float_images_give_equal_features(tiny: CLIP) -> None:
    images = random_images(4, 32)
    assert (tiny.encode_image(images) - tiny.encode_image(normalized(images))).abs().max() <= 1e-6
    strided = images.contiguous(memory_format=torch.channels_last)
    assert (tiny.encode_image(images) - tiny.encode_image(strided)).abs().max() <= 1e-6
    other = CLIP(tiny.architecture, preprocess=replace(tiny.preprocess, mean=(0.0,) * 3, std=(1.0,) * 3))
    other.load_state_dict(tiny.state_dict())
    assert (other.encode_image(images) - tiny.encode_image(images / 255)).abs().max() <= 1e-6


def test_unnormalized_features_have_the_same_direction(tiny: CLIP) -> None:
    images, tokens = random_images(4, 32), tokenize(TEXTS[:4])
    image, text = tiny.encode_image(images, normalize=False), tiny.encode_text(tokens, normalize=False)
    assert (image.norm(dim=-1) - 1).abs().min() > 1e-3
    torch.testing.assert_close(F.normalize(image, dim=-1), tiny.encode_image(images))
    torch.testing.assert_close(F.normalize(text, dim=-1), tiny.encode_text(tokens))


@pytest.mark.parametrize("how", ["autocast", "bfloat16", "float16"])
def test_low_precision_towers_give_float32_features(tiny: CLIP, how: str) -> None:
    images, tokens = random_images(4, 32), tokenize(TEXTS[:9])
    want = tiny.encode_image(images), tiny.encode_text(tokens)
    model = copy.deepcopy(tiny) if how == "autocast" else copy.deepcopy(tiny).to(getattr(torch, how))
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        image, text, _ = model(images, tokens)
    for ours, theirs in zip((image, text), want, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).abs().max() < 0.03
        torch.testing.assert_close(ours.norm(dim=-1), torch.ones(len(ours)))


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B-32-quickgelu"])
def test_weights_load_from_and_into_open_clip(name: str) -> None:
    """Two layers of each tower at full width."""
    import open_clip

    config = open_clip.get_model_config(name)
    config["vision_cfg"]["layers"] = config["text_cfg"]["layers"] = 2
    theirs = open_clip.CLIP(**config).eval()
    shape = ARCHITECTURES[name]
    image_tower, text_tower = shape.get_plain_towers()
    shape = replace(shape, vision=replace(image_tower, layers=2), text=replace(text_tower, layers=2))
    images, tokens = random_images(3, 224), tokenize(TEXTS[:10])
    ours = CLIP(shape).eval()
    for source, target in ((theirs, ours), (CLIP(shape).initialize(), theirs)):
        target.load_state_dict(source.state_dict(), strict=True)
        ours.load_state_dict(target.state_dict(), strict=True)
        with torch.no_grad():
            image, text = ours.encode_image(images), ours.encode_text(tokens)
            assert (image - theirs.encode_image(normalized(images), normalize=True)).abs().max() <= 1e-5
            assert (text - theirs.encode_text(tokens, normalize=True)).abs().max() <= 1e-5
            assert torch.equal(ours.logit_scale, theirs.logit_scale)


def test_features_equal_transformers() -> None:
    from transformers import CLIPConfig, CLIPModel

    common = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}
    config = CLIPConfig(
        text_config={
            **common,
            "hidden_act": "gelu",
            "eos_token_id": 49407,
            "bos_token_id": 49406,
            "vocab_size": 49408,
        },
        vision_config={**common, "hidden_act": "gelu", "image_size": 32, "patch_size": 8},
        projection_dim=48,
    )
    theirs = CLIPModel(config).eval()
    shape = Architecture(
        embed_dim=48,
        vision=VisionTower(image_size=32, patch_size=8, width=64, layers=2, heads=4),
        text=TextTower(width=64, layers=2, heads=4),
    )
    ours = CLIP(shape).eval()
    ours.load_state_dict(from_transformers(theirs.state_dict()), strict=True)
    images, tokens = normalized(random_images(3, 32)), tokenize(TEXTS[:6])
    with torch.no_grad():
        output = theirs(pixel_values=images, input_ids=tokens)
        assert (ours.encode_image(images) - output.image_embeds).abs().max() <= 1e-5
        assert (ours.encode_text(tokens) - output.text_embeds).abs().max() <= 1e-5


def from_transformers(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "logit_scale": "logit_scale",
        "positional_embedding": "text_model.embeddings.position_embedding.weight",
        "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
        "visual.class_embedding": "vision_model.embeddings.class_embedding",
        "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
        "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    }
    for kind in ("weight", "bias"):
        names[f"ln_final.{kind}"] = f"text_model.final_layer_norm.{kind}"
        names[f"visual.ln_pre.{kind}"] = f"vision_model.pre_layrnorm.{kind}"
        names[f"visual.ln_post.{kind}"] = f"vision_model.post_layernorm.{kind}"
    ours = {own: theirs[name] for own, name in names.items()}
    ours["text_projection"] = theirs["text_projection.weight"].T
    ours["visual.proj"] = theirs["visual_projection.weight"].T
    for tower, prefix in (("text_model", ""), ("vision_model", "visual.")):
        for i in range(2):
            layer, own = f"{tower}.encoder.layers.{i}", f"{prefix}transformer.resblocks.{i}"
            for kind in ("weight", "bias"):
                joined = [theirs[f"{layer}.self_attn.{one}_proj.{kind}"] for one in "qkv"]
                ours[f"{own}.attn.in_proj_{kind}"] = torch.cat(joined)
                for ours_name, name in (
                    ("attn.out_proj", "self_attn.out_proj"), ("ln_1", "layer_norm1"), ("ln_2", "layer_norm2"),
                    ("mlp.c_fc", "mlp.fc1"), ("mlp.c_proj", "mlp.fc2"),
                ):  # fmt: skip
                    ours[f"{own}.{ours_name}.{kind}"] = theirs[f"{layer}.{name}.{kind}"]
    return ours


def initial_statistics(model: CLIP) -> dict[str, tuple[str, float]]:
    """The table of ``CLIP.initialize``: distribution and its standard deviation or half width, by name."""
    image_tower, text_tower = model.architecture.get_plain_towers()
    vision, text, patch = image_tower.width, text_tower.width, image_tower.patch_size
    out = text**-0.5 * (2 * text_tower.layers) ** -0.5
    table = {
        "visual.class_embedding": ("normal", vision**-0.5),
        "visual.positional_embedding": ("normal", vision**-0.5),
        "visual.proj": ("normal", vision**-0.5),
        "visual.conv1.weight": ("uniform", (3 * patch * patch) ** -0.5),
        "token_embedding.weight": ("normal", 0.02),
        "positional_embedding": ("normal", 0.01),
        "text_projection": ("normal", text**-0.5),
        "logit_scale": ("constant", math.log(1 / 0.07)),
    }
    block_table: dict[str, dict[str, tuple[str, float]]] = {
        "visual.transformer.": {
            "attn.in_proj_weight": ("uniform", (6 / (vision + 3 * vision)) ** 0.5),
            "attn.out_proj.weight": ("uniform", vision**-0.5),
            "mlp.c_fc.weight": ("uniform", vision**-0.5),
            "mlp.c_proj.weight": ("uniform", (4 * vision) ** -0.5),
            "mlp.c_fc.bias": ("uniform", vision**-0.5),
            "mlp.c_proj.bias": ("uniform", (4 * vision) ** -0.5),
        },
        "transformer.": {
            "attn.in_proj_weight": ("normal", text**-0.5),
            "attn.out_proj.weight": ("normal", out),
            "mlp.c_fc.weight": ("normal", (2 * text) ** -0.5),
            "mlp.c_proj.weight": ("normal", out),
            "mlp.c_fc.bias": ("uniform", text**-0.5),
            "mlp.c_proj.bias": ("uniform", (4 * text) ** -0.5),
        },
    }
    if model.architecture.small_data:
        out = vision**-0.5 * (2 * image_tower.layers) ** -0.5
        table["visual.positional_embedding"] = ("normal", 0.8)
        block_table["visual.transformer."].update(
            {
                "attn.in_proj_weight": ("normal", vision**-0.5),
                "attn.out_proj.weight": ("normal", out),
                "mlp.c_fc.weight": ("normal", (2 * vision) ** -0.5),
                "mlp.c_proj.weight": ("normal", out),
            }
        )
    for name, _ in model.named_parameters():
        for prefix, own in block_table.items():
            if name.startswith(prefix):
                kind = name.split(".", prefix.count(".") + 2)[-1]
                law = ("constant", 1.0) if kind in ("ln_1.weight", "ln_2.weight") else ("constant", 0.0)
                table[name] = own.get(kind, law)
        if name.split(".")[-2:-1] and name.split(".")[-2] in ("ln_pre", "ln_post", "ln_final"):
            table[name] = ("constant", 1.0 if name.endswith("weight") else 0.0)
    return table


@pytest.mark.parametrize("small_data", [False, True])
def test_initial_weights_follow_their_table(small_data: bool) -> None:
    torch.manual_seed(0)
    model = CLIP(replace(ARCHITECTURES["ViT-Ti-4-16"], small_data=small_data)).initialize()
    table = initial_statistics(model)
    assert table.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        law, spread = table[name]
        values = parameter.detach().double().flatten()
        if law == "constant":
            assert (values - spread).abs().max() <= 1e-6, name
            continue
        std = spread if law == "normal" else spread / 3**0.5
        slack = 5 / (2 * len(values)) ** 0.5  # five standard errors
        assert float(values.std()) == pytest.approx(std, rel=slack), name
        assert abs(float(values.mean())) <= 5 * std / len(values) ** 0.5, name
        if law == "uniform":
            assert values.abs().max() <= spread, name


@pytest.mark.parametrize("name", ["ViT-Ti-4-16", "ViT-Ti-8-48"])
def test_seed_determines_weights_and_keeps_the_global_generator(name: str) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = create(name, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    again, other = create(name, seed=3), create(name, seed=4)
    pairs = zip(first.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.text_projection, other.text_projection)
    torch.manual_seed(7)
    unseeded = create(name)
    assert not torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    assert torch.equal(create(name).text_projection, unseeded.text_projection)
    assert first.name == name
    assert first.training
    assert all(parameter.device.type == "cpu" for parameter in first.parameters())
    assert all(torch.isfinite(parameter).all() for parameter in first.parameters())


def test_model_can_be_materialized_from_meta_and_deep_copied(tiny: CLIP) -> None:
    assert not any(name.startswith("_") for name in tiny.state_dict())
    images = random_images(2, 32)
    with torch.device("meta"):
        other: Any = CLIP(tiny.architecture)
    other = other.to_empty(device="cpu")
    other.reset_constants()
    other.load_state_dict(tiny.state_dict())
    assert torch.equal(other.encode_image(images), tiny.encode_image(images))
    assert torch.equal(copy.deepcopy(tiny).encode_image(images), tiny.encode_image(images))
    assert isinstance(tiny.visual, VisionTransformer)

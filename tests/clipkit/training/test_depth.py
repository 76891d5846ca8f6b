"""Tests of the depth of parameters, in towers of all libraries."""

import pytest

from clipkit.errors import ConfigError
from clipkit.model import (
    Architecture,
    BagOfWords,
    ImageArchitecture,
    OpenClipText,
    OpenClipVision,
    TextTower,
    TimmVision,
    TransformersText,
    VisionTower,
)
from clipkit.model.clip import CLIP, create
from clipkit.training.build import Place, places, tower_of
from tests.clipkit.stored_models import TEXT, VIT

OWN_TEXT = TextTower(width=32, layers=1, heads=2, context_length=16)
OWN_VISION = VisionTower(image_size=32, patch_size=8, width=64, layers=2, heads=2)
ENCODERS = {
    "bert": {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16},
    "distilbert": {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 16},
    "t5": {"d_model": 16, "num_layers": 3, "num_heads": 2, "d_ff": 16, "d_kv": 8},
    "modernbert": {
        "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    },
}  # fmt: skip


def with_image(vision: ImageArchitecture) -> CLIP:
    return create(Architecture(embed_dim=32, vision=vision, text=OWN_TEXT), seed=0)


def with_encoder(kind: str, **values: object) -> CLIP:
    config = {"model_type": kind, "vocab_size": 50, **values}
    text = TransformersText(context_length=8, model="x", config=config)
    return create(Architecture(embed_dim=32, vision=OWN_VISION, text=text), seed=0)


def depths(model: CLIP, tower: str) -> dict[str, int]:
    return {name: place.depth for name, place in places(model).items() if place.tower == tower}


def test_depths_count_stem_blocks_and_head(tiny: CLIP) -> None:
    found = places(tiny)
    assert list(found) == [name for name, _ in tiny.named_parameters()]
    assert found.pop("logit_scale") == Place(tower="", depth=0, top=0)
    for name, place in found.items():
        assert place.tower == ("image" if name.startswith("visual.") else "text") == tower_of(name)
        assert (place.top, place.above) == (3, 3 - place.depth)
        if ".resblocks." in f".{name}":
            wanted = int(name.split("resblocks.")[1].split(".")[0]) + 1
        else:
            head = ("visual.ln_post", "visual.proj", "ln_final", "text_projection")
            wanted = 3 if name.startswith(head) else 0
        assert place.depth == wanted, name


def test_bag_of_words_has_no_blocks() -> None:
    shape = Architecture(embed_dim=16, vision=OWN_VISION, text=BagOfWords(width=8, vocab_size=40))
    text = depths(create(shape, seed=0), "text")
    assert text == {"text.token_embedding.weight": 0, "text.text_projection": 1}


def test_open_clip_towers_have_the_depths_of_own_towers() -> None:
    """The same towers have the same parameter names in both libraries."""
    theirs = Architecture(
        embed_dim=48,
        vision=OpenClipVision(image_size=32, config=VIT),
        text=OpenClipText(context_length=16, config=TEXT),
    )
    ours = Architecture(embed_dim=48, vision=OWN_VISION, text=OWN_TEXT)
    found = {name.removeprefix("text."): place for name, place in places(create(theirs, seed=0)).items()}
    assert found == places(create(ours, seed=0))


def test_resnet_depths_count_bottlenecks() -> None:
    config = {"layers": [1, 2, 1, 1], "width": 16, "patch_size": None, "head_width": 32}
    image = depths(with_image(OpenClipVision(image_size=64, config=config)), "image")
    assert image["visual.conv3.weight"] == image["visual.bn1.bias"] == 0
    assert image["visual.layer1.0.conv1.weight"] == 1
    assert (image["visual.layer2.0.bn1.weight"], image["visual.layer2.1.bn1.weight"]) == (2, 3)
    assert image["visual.layer4.0.downsample.0.weight"] == 5
    assert image["visual.attnpool.positional_embedding"] == image["visual.attnpool.c_proj.bias"] == 6


@pytest.mark.parametrize("openly", [False, True])
@pytest.mark.parametrize(
    ("name", "size", "some"),
    [
        (
            "test_vit",
            160,
            {"cls_token": 0, "pos_embed": 0, "patch_embed.proj.weight": 0, "blocks.0.attn.qkv.weight": 1,
             "blocks.5.mlp.fc2.bias": 6, "norm.weight": 7},
        ),
        (
            "test_convnext",
            64,
            {"stem.0.weight": 0, "stages.0.blocks.0.gamma": 1, "stages.1.downsample.1.weight": 2,
             "stages.1.blocks.0.gamma": 2, "stages.1.blocks.1.gamma": 3},
        ),
        ("test_efficientnet", 64, {"conv_stem.weight": 0, "blocks.0.0.conv.weight": 1, "conv_head.weight": 6}),
    ],
)  # fmt: skip
def test_timm_backbones_define_their_blocks(name: str, size: int, some: dict[str, int], openly: bool) -> None:
    config = {
        "timm_model_name": name, "timm_model_pretrained": False, "timm_pool": "", "timm_proj": "linear",
    }  # fmt: skip
    if openly:
        model = with_image(OpenClipVision(image_size=size, config=config))
    else:
        model = with_image(TimmVision(image_size=size, name=name))
    image = depths(model, "image")
    top = max(image.values())
    assert set(image.values()) == set(range(top + 1))
    assert {key: image[f"visual.trunk.{key}"] for key in some} == some
    assert {depth for key, depth in image.items() if key.startswith("visual.head.")} == {top}


@pytest.mark.parametrize(("kind", "values"), ENCODERS.items(), ids=ENCODERS)
def test_transformers_encoder_depths(kind: str, values: dict[str, object]) -> None:
    model = with_encoder(kind, **values)
    found = places(model)
    text = depths(model, "text")
    assert {found[name].top for name in text} == {4}
    assert set(text.values()) == {0, 1, 2, 3, 4}
    assert text["text.proj.weight"] == 4
    for name, depth in text.items():
        if "embeddings." in name or "shared" in name:
            assert depth == 0, name
        if "final" in name:
            assert depth == 4, name
        for number in range(3):
            if f"layer.{number}." in name.split("block.")[0] or f"block.{number}." in name:
                assert depth == number + 1, name


def test_towers_without_known_blocks_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    sharing = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
        "embedding_size": 8,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="the blocks of the text tower are not recognized"):
        places(with_encoder("albert", **sharing))  # all layers share weights
    model = with_image(TimmVision(image_size=64, name="test_convnext"))
    trunk = model.visual.get_submodule("trunk")
    monkeypatch.setattr(trunk, "group_matcher", lambda coarse: lambda name: (0,))
    with pytest.raises(ConfigError, match="the blocks of the image tower are not recognized"):
        places(model)

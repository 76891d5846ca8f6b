"""Tests of every family of towers: one optimizer step, one zero-shot evaluation and one checkpoint each.

Sizes are reduced, the code is the same; bench/parity.py compares full sizes with open_clip.
"""

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import clipkit
import eval as evaluation
from bench.parity import compare
from clipkit.config import Config, OptimConfig
from clipkit.errors import ConfigError
from clipkit.formats.checkpoint import parse_architecture, serialize_architecture
from clipkit.formats.load import load_checkpoint
from clipkit.model import ARCHITECTURES, Architecture, TimmVision, VisionTower
from clipkit.model.clip import CLIP, create
from clipkit.model.names import (
    check_names,
    create_architecture,
    from_open_clip,
    open_clip_config,
    to_open_clip,
)
from clipkit.objectives.clip import clip_loss
from clipkit.training.checkpoint import LoopState, save_checkpoint
from clipkit.training.optim import adamw
from clipkit.training.step import backward
from data.shards.writer import DatasetWriter, Record

ROOT = Path(__file__).parents[1]
COLOURS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220)}
TEXT = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
VIT = {"image_size": 32, "patch_size": 16, "width": 64, "head_width": 32, "layers": 2}
TIMM = {"timm_model_pretrained": False, "timm_pool": "", "timm_proj": "linear"}
MAP = {**TIMM, "timm_model_name": "test_vit", "image_size": 160, "timm_pool": "map", "timm_proj": "none"}
SIGLIP_TEXT = {
    **TEXT, "vocab_size": 300, "hf_tokenizer_name": "TOKENIZER", "tokenizer_kwargs": {"clean": "canonicalize"},
    "no_causal_mask": True, "proj_bias": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6},
}  # fmt: skip
# reduced model configurations of open_clip, one of each family
OPEN_CLIP: dict[str, dict[str, Any]] = {
    "ViT": {"embed_dim": 32, "vision_cfg": VIT, "text_cfg": TEXT},
    "ViT, another MLP": {
        "embed_dim": 32, "vision_cfg": {**VIT, "mlp_ratio": 3.5}, "text_cfg": {**TEXT, "mlp_ratio": 2.0},
    },
    "ViT, layer scale": {"embed_dim": 32, "vision_cfg": {**VIT, "ls_init_value": 0.1}, "text_cfg": TEXT},
    "ResNet": {
        "embed_dim": 32, "quick_gelu": True, "text_cfg": TEXT,
        "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 16, "patch_size": None, "head_width": 32},
    },
    "ConvNeXt": {
        "embed_dim": 32, "text_cfg": TEXT,
        "vision_cfg": {**TIMM, "timm_model_name": "test_convnext", "image_size": 64, "timm_drop_path": 0.1},
    },
    "CoCa": {
        "embed_dim": 64, "custom_text": True,
        "vision_cfg": {**VIT, "attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True},
        "text_cfg": {**TEXT, "embed_cls": True, "output_tokens": True},
        "multimodal_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
    },
    "SigLIP": {
        "embed_dim": 64, "init_logit_bias": -10, "custom_text": True,
        "vision_cfg": MAP,
        "text_cfg": {**SIGLIP_TEXT, "width": 64},
    },
    "SigLIP 2": {
        "embed_dim": 64, "init_logit_bias": -10, "custom_text": True,
        "vision_cfg": MAP,
        "text_cfg": {**SIGLIP_TEXT, "width": 64, "act_kwargs": {"approximate": "tanh"}},
    },
    "EVA": {
        "embed_dim": 32, "custom_text": True, "text_cfg": TEXT,
        "vision_cfg": {
            **TIMM, "timm_model_name": "eva02_tiny_patch14_224", "image_size": 224, "timm_pool": "token",
        },
    },
    "MobileCLIP": {
        "embed_dim": 32, "custom_text": True, "text_cfg": {**TEXT, "no_causal_mask": True},
        "vision_cfg": {**TIMM, "timm_model_name": "fastvit_t8", "image_size": 64, "timm_pool": "avg"},
    },
    "CLIPA": {
        "embed_dim": 32,
        "vision_cfg": {**VIT, "no_ln_pre": True, "pool_type": "avg", "final_ln_after_pool": True},
        "text_cfg": {**TEXT, "no_causal_mask": True, "pool_type": "last"},
    },
}  # fmt: skip
# backbones of timm with the options that reduce them
BACKBONES: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_base_r50_s16_224": (
        32,
        {"depth": 1, "embed_dim": 64, "num_heads": 2},
    ),  # hybrid: a ResNet before the ViT
    "test_resnet": (64, {}),
    "regnetx_002": (32, {}),
    "test_nfnet": (64, {}),
    "tresnet_m": (32, {"layers": [1, 1, 1, 1]}),
    "test_efficientnet": (64, {}),
    "swin_tiny_patch4_window7_224": (
        224,
        {"embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]},
    ),
    "deit_tiny_distilled_patch16_224": (32, {"depth": 1}),  # with its distillation token
    "cait_xxs24_224": (32, {"depth": 1}),
    "mixer_s32_224": (224, {}),
    "vit_base_patch16_siglip_224": (32, {"depth": 1, "embed_dim": 64, "num_heads": 2}),  # MAP pooling
}


def image_file(name: str, seed: int) -> bytes:
    random = np.random.default_rng(seed)
    pixels = np.clip(np.array(COLOURS[name]) + random.normal(0, 20, (40, 40, 3)), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dataset of six labelled test images and twelve training images with captions."""
    out = tmp_path_factory.mktemp("family") / "colours"
    names = list(COLOURS)
    with DatasetWriter(out) as writer:
        for split, count in (("train", 12), ("test", 6)):
            for i in range(count):
                name = names[i % 3]
                record = Record(
                    key=f"{split}{i:03d}",
                    image=image_file(name, i),
                    extension="png",
                    caption=f"the colour {name}",
                    label=i % 3,
                )
                writer.write(split, record)
        writer.finish({}, class_names=names, templates=("the colour {c}", "{c}"))
    return out


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small tokenizer of the transformers library and return its folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", "the", "colour", "of", "a", *COLOURS]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained(folder)
    return folder


def step_and_score(model: CLIP, colours: Path, tmp_path: Path) -> None:
    """Make one optimizer step, run zero-shot evaluation, and save and load a checkpoint."""
    from clipkit.model.preprocess import preprocess_images

    names = list(COLOURS) * 2
    images = preprocess_images([image_file(name, i) for i, name in enumerate(names)], model.preprocess)
    tokens = model.tokenizer([f"the colour {name}" for name in names])
    optimizer = adamw(model, OptimConfig(lr=1e-3))
    model.train()
    given = {"images": images, "tokens": tokens}
    loss = backward(model, given, loss=clip_loss, parts=1, autocast=False).loss
    assert torch.isfinite(loss)
    idle = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert idle == []  # DistributedDataParallel would wait for their gradients forever
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert {name.partition(".")[0] for name in moved} >= {"visual", "logit_scale"}
    scores = evaluation.evaluate(model.eval(), evaluation.open_dataset(colours), tasks=("zero-shot",))
    assert scores[0].metric == "acc1" and scores[0].n == 6
    folder = save_checkpoint(tmp_path, model, optimizer, LoopState(step=1, data="x"), Config(), keep=1)
    again = load_checkpoint(folder)
    assert again.architecture == model.architecture
    texts = ["the colour red", "green"]
    torch.testing.assert_close(
        clipkit.encode_text(texts, again), clipkit.encode_text(texts, model), rtol=0, atol=1e-6
    )
    blue = [image_file("blue", 1)]
    torch.testing.assert_close(
        clipkit.encode_image(blue, again), clipkit.encode_image(blue, model), rtol=0, atol=1e-6
    )


def configuration(family: str, tokenizer: Path) -> dict[str, Any]:
    config = dict(OPEN_CLIP[family])
    if "hf_tokenizer_name" in config["text_cfg"]:
        config["text_cfg"] = {**config["text_cfg"], "hf_tokenizer_name": str(tokenizer)}
    return config


@pytest.mark.parametrize("family", OPEN_CLIP)
def test_open_clip_architecture_matches_open_clip_and_trains(
    family: str, colours: Path, tokenizer: Path, tmp_path: Path
) -> None:
    config = configuration(family, tokenizer)
    found = compare(family, config, batch=3)
    assert found.image <= 1e-5 and found.text <= 1e-5
    assert found.image_cosine_bf16 >= 0.9999 and found.text_cosine_bf16 >= 0.9999
    shape = from_open_clip(config)
    assert from_open_clip(to_open_clip(shape)) == shape
    step_and_score(create(shape, seed=0), colours, tmp_path)


@pytest.mark.parametrize("name", BACKBONES)
def test_timm_backbone_trains(name: str, colours: Path, tmp_path: Path) -> None:
    size, options = BACKBONES[name]
    shape = create_architecture("ViT-Ti-4-16", image=f"timm:{name}", image_size=size)
    assert isinstance(shape.vision, TimmVision)
    shape = replace(shape, vision=replace(shape.vision, options=options))
    step_and_score(create(shape, seed=0), colours, tmp_path)


def encoder(kind: str, folder: Path) -> None:
    """Save the configuration of a transformers encoder next to the tokenizer in ``folder``."""
    from transformers import BertConfig, DistilBertConfig, M2M100Config, T5Config, XLMRobertaConfig

    small = {"vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    bert = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    layers = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    heads = {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
    }
    made = {
        "bert": lambda: BertConfig(**small, **bert),
        "distilbert": lambda: DistilBertConfig(**small, dim=32, n_layers=1, n_heads=2, hidden_dim=64),
        "t5": lambda: T5Config(**small, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2),
        "nllb": lambda: M2M100Config(**small, **layers, **heads, encoder_layerdrop=0.99),
        "xlm-roberta": lambda: XLMRobertaConfig(**small, **bert),
    }[kind]()
    made.save_pretrained(folder)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "t5", "nllb", "xlm-roberta"])
def test_transformers_encoder_trains(kind: str, colours: Path, tokenizer: Path, tmp_path: Path) -> None:
    encoder(kind, tokenizer)
    model = create(create_architecture("ViT-Ti-4-16", text=f"transformers:{tokenizer}"), seed=0)
    step_and_score(model, colours, tmp_path)
    together = clipkit.encode_text(["red", "the colour of a blue red green"], model)
    torch.testing.assert_close(together[:1], clipkit.encode_text(["red"], model), rtol=0, atol=1e-6)


@pytest.mark.parametrize("projection", ["linear", "mlp"])
def test_open_clip_architecture_with_transformers_encoder(
    projection: str, tokenizer: Path, colours: Path, tmp_path: Path
) -> None:
    """XLM-R and NLLB CLIPs: open_clip's configuration names the transformers encoder."""
    encoder("xlm-roberta", tokenizer)
    text = {
        "hf_model_name": str(tokenizer),
        "hf_tokenizer_name": str(tokenizer),
        "hf_model_pretrained": False,
    }
    config = {
        "embed_dim": 32, "vision_cfg": VIT, "custom_text": True,
        "text_cfg": {**text, "hf_proj_type": projection, "hf_pooler_type": "mean_pooler", "vocab_size": 32},
    }  # fmt: skip
    found = compare(projection, config, batch=3)
    assert found.image <= 1e-5 and found.text <= 1e-5
    step_and_score(create(from_open_clip(config), seed=0), colours, tmp_path)


def test_bag_of_words_ignores_word_order(colours: Path, tmp_path: Path) -> None:
    model = create(create_architecture("ViT-Ti-4-16", text="cbow"), seed=0)
    step_and_score(model, colours, tmp_path)
    texts = ["red green blue", "blue red green", "red green"]
    features = clipkit.encode_text(texts, model)
    torch.testing.assert_close(features[0], features[1], rtol=0, atol=1e-6)  # word order has no effect
    assert not torch.allclose(features[0], features[2], atol=1e-3)
    assert torch.isfinite(clipkit.encode_text([""], model)).all()


def test_open_clip_vits_use_own_towers() -> None:
    for name in ("ViT-B-32", "ViT-L-14-336-quickgelu", "ViT-S-16"):
        assert from_open_clip(open_clip_config(name)) == ARCHITECTURES[name]
    for name in ("ViT-g-14", "ViT-bigG-14", "ViT-e-14", "ViT-B-16-plus"):
        shape = from_open_clip(open_clip_config(name))
        assert isinstance(shape.vision, VisionTower) and shape.is_native


def test_offline_open_clip_configurations_are_supported() -> None:
    import open_clip

    understood = 0
    for name in open_clip.list_models():
        config = open_clip_config(name)
        if config["text_cfg"].get("hf_model_name"):
            continue
        shape = from_open_clip(config)
        assert isinstance(shape, Architecture) and from_open_clip(to_open_clip(shape)) == shape
        assert parse_architecture(serialize_architecture(shape)) == shape
        understood += 1
    assert understood > 120


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("RN50",), "write 'open_clip:RN50'"),
        (("open_clip:RN5",), "did you mean"),
        (("ViT-B-23",), "did you mean 'ViT-B-32'"),
        (("ViT-B-32", "resnet50"), "timm:"),
        (("ViT-B-32", "", "bert"), "transformers:"),
    ],
)
def test_invalid_model_name_raises_hint(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_names(*names)


@pytest.mark.parametrize(
    ("image", "text", "message"),
    [
        ("timm:resnet5", "", "did you mean"),
        ("timm:hf-hub:somebody/anything", "", "unknown"),
        ("", "transformers:/nowhere/at/all", "not a usable folder"),
    ],
)
def test_unavailable_tower_raises_error(image: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_architecture("ViT-Ti-4-16", image=image, text=text)


def test_configuration_with_remote_code_is_rejected(tokenizer: Path, tmp_path: Path) -> None:
    """``auto_map`` makes transformers import a file of the folder."""
    ran = tmp_path / "ran"
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}}')
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Config: pass\n")
    with pytest.raises(ConfigError):
        create_architecture("ViT-Ti-4-16", text=f"transformers:{tmp_path}")
    assert not ran.exists()


@pytest.mark.long
def test_train_py_with_other_towers_and_initial_weights(colours: Path, tmp_path: Path) -> None:
    def train(*settings: str) -> str:
        fixed = [
            f"data.train={colours}",
            "batch_size=4",
            "data.workers=0",
            "optim.warmup=1",
            "eval.every_steps=0",
        ]
        fixed += ["log.tensorboard=false", f'eval.data=["{colours}"]']
        done = subprocess.run(
            [sys.executable, "train.py", *fixed, *settings],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    first, second = tmp_path / "first", tmp_path / "second"
    towers = (
        "model.name=ViT-Ti-4-16",
        "model.image=timm:test_resnet",
        "model.text=cbow",
        "model.image_size=32",
    )
    said = train(*towers, "steps=2", f"out={first}")
    assert "ViT-Ti-4-16 + timm:test_resnet + cbow" in said
    weights = clipkit.load(first).state_dict()
    train(
        *towers,
        "steps=1",
        f"out={second}",
        f"model.weights={first}",
        "optim.lr=1e-30",
        "optim.weight_decay=0",
    )
    carried = clipkit.load(second).state_dict()
    for name, value in weights.items():
        if "running" not in name and "num_batches" not in name:  # batch norm statistics depend on the batch
            torch.testing.assert_close(carried[name], value, rtol=0, atol=1e-6)

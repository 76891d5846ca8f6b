"""Small open_clip models, and files that open_clip and other libraries write, for ``clipkit.load``."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import clipkit
from bench.parity import build_reference
from clipkit.files.open_clip import config_files
from clipkit.model.clip import CLIP

TEXT = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
VIT = {"image_size": 32, "patch_size": 8, "width": 64, "head_width": 32, "layers": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "ViT": {"embed_dim": 32, "vision_cfg": VIT, "text_cfg": TEXT},
    "ViT with QuickGELU": {"embed_dim": 32, "vision_cfg": VIT, "text_cfg": TEXT, "quick_gelu": True},
    "ResNet": {
        "embed_dim": 32, "text_cfg": TEXT,
        "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 16, "patch_size": None, "head_width": 32},
    },
    "timm's ViT": {
        "embed_dim": 32, "text_cfg": TEXT,
        "vision_cfg": {
            "timm_model_name": "test_vit", "timm_model_pretrained": False, "timm_pool": "", "timm_proj": "linear",
            "image_size": 160,
        },
    },
    "timm's ViT of one size": {
        "embed_dim": 32, "text_cfg": TEXT,
        "vision_cfg": {
            "timm_model_name": "test_vit3", "timm_model_pretrained": False, "timm_pool": "", "timm_proj": "linear",
            "image_size": 160,
        },
    },
    "ConvNeXt": {
        "embed_dim": 32, "text_cfg": TEXT,
        "vision_cfg": {
            "timm_model_name": "test_convnext", "timm_model_pretrained": False, "timm_pool": "",
            "timm_proj": "linear", "image_size": 64,
        },
    },
    "SigLIP": {
        "embed_dim": 64, "init_logit_bias": -10, "custom_text": True,
        "vision_cfg": {
            "timm_model_name": "test_vit", "timm_model_pretrained": False, "timm_pool": "map",
            "timm_proj": "none", "image_size": 160,
        },
        "text_cfg": {
            **TEXT, "width": 64, "vocab_size": 300, "hf_tokenizer_name": "somebody/somewhere",
            "tokenizer_kwargs": {"clean": "canonicalize"}, "no_causal_mask": True, "proj_bias": True,
            "pool_type": "last", "norm_kwargs": {"eps": 1e-6},
        },
    },
    "CoCa": {
        "embed_dim": 64, "custom_text": True,
        "vision_cfg": {**VIT, "attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True},
        "text_cfg": {**TEXT, "embed_cls": True, "output_tokens": True},
        "multimodal_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
    },
}  # fmt: skip
TEXTS = ("a red hat", "Two grey CATS, &amp; a dog!", "", "a photo of a very long train in the snow " * 3)


def their_model(kind: str, **changes: Any) -> Any:
    """Build open_clip's model of this kind, with random weights."""
    return build_reference({**CONFIGS[kind], **changes}, seed=0)


def random_images() -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Three random images of different shapes."""
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in ((40, 70), (90, 30), (64, 64))]


def assert_same_embeddings(
    ours: CLIP, theirs: Any, transform: Callable[[Any], Tensor], tokenizer: Callable[[list[str]], Tensor]
) -> None:
    """Assert that clipkit's embeddings of images and texts equal open_clip's, within 1e-5."""
    from PIL import Image

    with torch.no_grad():
        pixels = torch.stack([transform(Image.fromarray(image)) for image in random_images()])
        images = theirs.encode_image(pixels, normalize=True)
        texts = theirs.encode_text(tokenizer(list(TEXTS)), normalize=True)
    assert (clipkit.encode_image(random_images(), ours) - images).abs().max() <= 1e-5
    assert (clipkit.encode_text(list(TEXTS), ours) - texts).abs().max() <= 1e-5
    ids, expected = ours.tokenizer(list(TEXTS)), tokenizer(list(TEXTS))
    assert torch.equal(ids, expected[:, : ids.shape[1]]) and not expected[:, ids.shape[1] :].any()


def write_word_tokenizer(folder: Path) -> Any:
    """Write a small tokenizer of the transformers library; return open_clip's wrapper of it."""
    from open_clip.tokenizer import HFTokenizer
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", "a", "red", "hat", "photo", "of", "dog", "two", "grey", "cats"]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained(folder)
    return HFTokenizer(str(folder), 16, clean="canonicalize")


def write_hub_folder(folder: Path, kind: str, *, preprocess: Mapping[str, Any] | None = None) -> Any:
    """Write a folder as open_clip pushes it to the Hugging Face hub; return open_clip's model."""
    from open_clip.model import set_model_preprocess_cfg
    from open_clip.push_to_hf_hub import save_for_hf
    from open_clip.transform import PreprocessCfg

    theirs = their_model(kind)
    set_model_preprocess_cfg(theirs, {**vars(PreprocessCfg()), **(preprocess or {})})
    tokenizer = write_word_tokenizer(folder / "made") if kind == "SigLIP" else _NoTokenizer()
    save_for_hf(theirs, tokenizer, CONFIGS[kind], str(folder))
    return theirs


class _NoTokenizer:
    """Placeholder: CLIP's tokenizer needs no files, and open_clip would download a copy for the hub."""

    def save_pretrained(self, folder: Path) -> None:
        pass


def register(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, config: Mapping[str, Any]) -> None:
    """Add an architecture to open_clip's registry, as a file of its ``model_configs``."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    monkeypatch.setitem(config_files(), name, path)

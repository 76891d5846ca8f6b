"""Parameters and FLOPs of the architectures that open_clip has profiled, on the meta device.

Two classes of differences are explained by a formula or a rule, and everything else must be equal to 0.2%:

* clipkit's own transformers compute only the token that is read in the last block, see ``count_skipped_flops``.
* open_clip profiled encoders of transformers at ``max_position_embeddings``, with which clipkit is measured here.
"""

import csv
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from clipkit.model.architectures import Architecture, TextTower, VisionTower
from clipkit.model.clip import CLIP
from clipkit.model.measure import copy_without_values, image_flops, measuring, text_flops
from clipkit.model.names import from_open_clip, open_clip_config
from clipkit.training.build import tower_of

with Path(__file__).with_name("published_profiles.csv").open(encoding="utf-8") as file:
    PROFILES = list(csv.DictReader(islice(file, 1, None)))  # the first line states the source

# what the config.json of these encoders on the Hugging Face hub states, besides defaults of the library
_ROBERTA = {
    "model_type": "roberta",
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
}
_XLM_ROBERTA = {**_ROBERTA, "model_type": "xlm-roberta", "vocab_size": 250002}
_NLLB = {"model_type": "m2m_100", "vocab_size": 256206, "max_position_embeddings": 1024, "pad_token_id": 1}
ENCODERS: dict[str, dict[str, Any]] = {
    "roberta-base": _ROBERTA,
    "xlm-roberta-base": _XLM_ROBERTA,
    "xlm-roberta-large": {
        **_XLM_ROBERTA,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "google/mt5-base": {"model_type": "mt5", "d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12},
    "google/mt5-xl": {"model_type": "mt5", "d_model": 2048, "d_ff": 5120, "num_layers": 24, "num_heads": 32},
    "facebook/nllb-200-distilled-600M": _NLLB,
    "facebook/nllb-200-distilled-1.3B": {**_NLLB, "encoder_layers": 24, "encoder_ffn_dim": 8192},
}

# one of each kind of towers; other sizes of the same kinds are long
KINDS = {
    "ViT-S-32-alt", "RN50", "mt5-base-ViT-B-32", "vit_medium_patch16_gap_256", "coca_roberta-ViT-B-32",
    "convnext_large_d", "ViT-L-16-SigLIP-256", "ViT-L-14-CLIPA", "EVA01-g-14-plus", "nllb-clip-large-siglip",
}  # fmt: skip


def build_architecture(name: str, folder: Path) -> Architecture:
    """Build an architecture of open_clip as it was profiled; the hub's configurations are written to ``folder``."""
    config = open_clip_config(name)
    text = config["text_cfg"]
    encoder = text.get("hf_model_name")
    if encoder is None:
        return from_open_clip(config)
    from transformers import AutoConfig

    values = ENCODERS[encoder]
    AutoConfig.for_model(**values).save_pretrained(folder)
    text |= {"hf_model_name": str(folder), "hf_tokenizer_name": str(folder)}
    length = values.get("max_position_embeddings", 77)
    if "multimodal_cfg" in config:
        length = config["multimodal_cfg"]["context_length"]
    return from_open_clip({**config, "text_cfg": {**text, "context_length": length}})


def count_skipped_flops(tower: object) -> int:
    """FLOPs that clipkit's own transformers save in the last block, where only the token that is read is computed.

    Keys and values are of all T tokens. The query, the output's projection, the MLP and two products of attention
    are of one token instead of T.
    """
    if isinstance(tower, VisionTower):
        tokens = (tower.image_size // tower.patch_size) ** 2 + 1
    elif isinstance(tower, TextTower):
        tokens = tower.context_length
    else:
        return 0
    linear = 2 * (2 + 2 * tower.mlp_ratio) * tower.width**2
    return round((tokens - 1) * (linear + 4 * tokens * tower.width))


def count_decoder_flops(model: CLIP) -> int:
    """FLOPs of CoCa's decoder, as if it predicted as many tokens as it has positions."""
    shape = model.architecture
    assert shape.decoder is not None
    image_tokens = shape.vision.token_shape(shape.embed_dim)
    assert image_tokens is not None
    with measuring() as meter:
        decoder = copy_without_values(model).text_decoder
        assert decoder is not None
        x = torch.empty(1, shape.decoder.context_length, shape.decoder.width)
        decoder.logits(decoder.compute_hidden(torch.empty(1, *image_tokens), x))
        return meter.flops


@pytest.mark.parametrize(
    "profile",
    [
        pytest.param(row, id=row["model"], marks=[] if row["model"] in KINDS else [pytest.mark.long])
        for row in PROFILES
    ],
)
def test_parameters_and_flops_equal_the_published_profile(profile: dict[str, str], tmp_path: Path) -> None:
    def published(column: str) -> float:
        return float(profile[column])

    shape = build_architecture(profile["model"], tmp_path)
    with torch.device("meta"):
        model = CLIP(shape)
    parameters: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameters[tower_of(name) or "other"] += parameter.numel()
    flops = {
        "image": image_flops(model).forward + count_skipped_flops(shape.vision),
        "text": text_flops(model, shape.text.context_length).forward + count_skipped_flops(shape.text),
    }
    for tower, count in flops.items():
        assert parameters[tower] / 1e6 == pytest.approx(published(f"{tower}_mparams"), abs=0.006)
        difference = count / 1e9 - published(f"{tower}_gflops")
        assert abs(difference) < 0.006 + 0.002 * published(f"{tower}_gflops")
    total = sum(flops.values())
    if shape.decoder is not None:
        total += count_decoder_flops(model)
    elif profile["model"].startswith("coca"):
        return  # clipkit leaves out the decoder of a text tower of transformers
    assert sum(parameters.values()) / 1e6 == pytest.approx(published("mparams"), abs=0.006)
    assert total / 1e9 == pytest.approx(published("gflops"), rel=0.01)

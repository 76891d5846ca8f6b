"""Features equal those that open_clip stored in November 2022 (tests/data of its commit 8e3df0e~1).

Their inputs and weights follow from seed 0, with the initialization of later versions of open_clip too. The figures
are the first elements of the stored features, scaled to unit norm. ``bench/published_features.py`` compares all
elements of all architectures.
"""

import json
import random
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from torch import nn

import clipkit
from clipkit.model.names import open_clip_config
from clipkit.model.preprocess import pixels_and_traits

STORED = {
    "ViT-S-32-alt": {
        "image": [
            -0.1387426,
            -0.0461140,
            -0.0160359,
            -0.0369851,
            0.0909199,
            -0.0126005,
            0.0134595,
            -0.0002912,
        ],
        "text": [0.0139340, 0.1561376, 0.0591206, -0.0185387, -0.0974593, 0.0477491, 0.0512295, -0.0272892],
    },
    "RN50-quickgelu": {
        "image": [0.0570482, -0.0661615, 0.0391632, 0.0245076, -0.0059322, -0.0444008, 0.0383025, 0.0071655],
        "text": [-0.0147878, 0.0413519, -0.0032150, 0.0107472, 0.0211461, 0.0079629, -0.0225376, 0.0326901],
    },
}


def draw_text() -> str:
    """Draw 75 tokens other than the start and the end of a text, joined as strings."""
    tokenizer = open_clip.tokenizer.SimpleTokenizer()
    special = tokenizer.all_special_ids
    words = [word.replace("</w>", " ") for token, word in tokenizer.decoder.items() if token not in special]
    generator = random.Random(0)
    return "".join(generator.choices(words, k=generator.randint(75, 75)))


@pytest.mark.parametrize("name", STORED)
def test_features_equal_those_of_2022(name: str, tmp_path: Path) -> None:
    config = dict(open_clip_config(name))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = open_clip.CLIP(**config).state_dict()
    torch.save(weights, tmp_path / "open_clip_pytorch_model.bin")
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    model = clipkit.load(tmp_path)

    [text] = clipkit.encode_text(draw_text(), model)
    torch.testing.assert_close(text[:8], torch.tensor(STORED[name]["text"]), rtol=0, atol=1e-6)

    # the stored features were computed in training mode
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
    image = np.random.RandomState(0).randint(255, size=(224, 224, 3), dtype=np.uint8)
    with torch.no_grad():
        [features] = model.encode_image(pixels_and_traits(image, model.preprocess)[0][None])
    torch.testing.assert_close(features[:8], torch.tensor(STORED[name]["image"]), rtol=0, atol=1e-6)

"""Compare embeddings with open_clip's on the same weights, for architectures of every family.

    python -m bench.parity                     every architecture below at full size, random weights
    python -m bench.parity --only RN50 EVA02-B-16

open_clip initializes random weights, clipkit loads its state dict like a checkpoint, and both encode the same
images and tokens in float32 and under bfloat16 autocast. No network access is required.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.formats.load import LoadRequest, StoredModel, build_stored, convert_open_clip
from clipkit.model.clip import CLIP
from clipkit.model.names import from_open_clip, open_clip_config
from clipkit.model.preprocess import Preprocess

RESULTS = Path(__file__).with_name("results") / "parity_open_clip.json"
# plain ViTs, ResNets, ConvNeXt, other backbones of timm, CoCa, EVA, SigLIP 1 and 2, MobileCLIP 1 and 2, CLIPA,
# ViTamin, PE: all that open_clip can build without network access
FAMILIES = (
    "ViT-B-32", "ViT-B-16", "ViT-B-32-quickgelu", "ViT-L-14", "ViT-L-14-336", "ViT-B-16-plus-240", "ViT-M-16-alt",
    "ViT-S-32", "RN50", "RN50-quickgelu", "RN101", "RN50x4", "RN50x16", "convnext_tiny", "convnext_base_w",
    "convnext_large_d", "vit_medium_patch16_gap_256", "vit_relpos_medium_patch16_cls_224",
    "swin_base_patch4_window7_224", "coca_ViT-B-32", "EVA02-B-16", "ViT-B-16-SigLIP", "ViT-B-32-SigLIP2-256",
    "MobileCLIP-S1", "MobileCLIP-B", "MobileCLIP2-S0", "ViTamin-S", "PE-Core-T-16-384", "ViT-L-14-CLIPA",
    "ViT-L-14-worldwide",
)  # fmt: skip
END_OF_TEXT = 49407


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Largest absolute difference of unit-norm embeddings in float32, smallest cosine in bfloat16."""

    name: str
    image_tower: str
    text_tower: str
    image: float
    text: float
    image_cosine_bf16: float
    text_cosine_bf16: float


def compare(name: str, config: Mapping[str, Any], *, batch: int = 2, seed: int = 0) -> Parity:
    """Compare both libraries' embeddings of random images and tokens with the same random weights."""
    reference = build_reference(config, seed=seed)
    shape = from_open_clip(config)
    stored = StoredModel(
        file=Path(name),
        shape=shape,
        tensors=reference.state_dict(),
        origin=name,
        preprocess=Preprocess(image_size=shape.vision.image_size),
    )
    own = build_stored(convert_open_clip(stored), LoadRequest())
    side, length = shape.vision.image_size, shape.text.context_length
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (batch, 3, side, side), generator=generator, dtype=torch.uint8)
    tokens = random_tokens(own, batch, length, generator)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (own.preprocess.mean, own.preprocess.std))
    normalized = (images.float() / 255 - mean) / std
    differences: list[float] = []
    cosines: list[float] = []
    for bf16 in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            pairs = (
                (own.encode_image(images), reference.encode_image(normalized, normalize=True)),
                (own.encode_text(tokens), reference.encode_text(tokens, normalize=True)),
            )
        for features, expected in pairs:
            differences.append((features - expected.float()).abs().max().item())
            cosines.append(F.cosine_similarity(features, expected.float()).min().item())
    return Parity(
        name=name,
        image_tower=type(shape.vision).__name__,
        text_tower=type(shape.text).__name__,
        image=differences[0],
        text=differences[1],
        image_cosine_bf16=cosines[2],
        text_cosine_bf16=cosines[3],
    )


def build_reference(config: Mapping[str, Any], *, seed: int) -> Any:
    """Build open_clip's model of a configuration, with random weights, in evaluation mode."""
    import open_clip

    values = dict(config)
    custom = values.pop("custom_text", False)
    kind = open_clip.CoCa if "multimodal_cfg" in values else open_clip.CLIP
    if custom and kind is open_clip.CLIP:
        kind = open_clip.CustomTextCLIP
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(**values).eval()
        # the initial layer scales are so small that towers would have almost no effect
        for parameter in model.parameters():
            if parameter.ndim == 1 and parameter.numel() > 1:
                torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.1)
    return model


def random_tokens(model: CLIP, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Return (B, L) token ids: texts of several lengths for CLIP's tokenizer, full length for others."""
    text = model.architecture.text
    config = text.open_clip_config() if text.plain else getattr(text, "config", {})
    vocabulary = int(config.get("vocab_size", 49408))
    tokens = torch.randint(1, min(vocabulary, END_OF_TEXT) - 1, (batch, length), generator=generator)
    if vocabulary == END_OF_TEXT + 1:
        for row in range(batch):
            end = 1 + (row * (length - 2)) // max(1, batch - 1)
            tokens[row, end], tokens[row, end + 1 :] = END_OF_TEXT, 0
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these architectures; writes no file")
    options = parser.parse_args()
    results = []
    for name in options.only or FAMILIES:
        found = compare(name, open_clip_config(name))
        results.append(asdict(found))
        print(
            f"{name:36} {found.image_tower:14} {found.text_tower:12} image {found.image:.1e} text {found.text:.1e} "
            f"bf16 cosine {found.image_cosine_bf16:.5f} {found.text_cosine_bf16:.5f}",
            flush=True,
        )
    if not options.only:
        import open_clip

        versions = {"torch": torch.__version__, "open_clip": open_clip.__version__}
        RESULTS.write_text(json.dumps({"versions": versions, "architectures": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()

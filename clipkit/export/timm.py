"""Export the image tower to timm: ``config.json`` and ``model.safetensors``.

    timm.create_model("local-dir:OUT", pretrained=True)

The output (B, O) equals that of ``CLIP.encode_image`` with ``normalize=False``: the projection to the embedding
space becomes timm's classifier, with a bias of 0. clipkit's ViTs become timm's ``vit_*_clip_*``; backbones of timm
keep their names. Letters: B batch, D width of the tower, O embedding dimension, P patches.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from clipkit.export.checks import Samples, max_difference
from clipkit.model.architectures import Architecture
from clipkit.model.clip import CLIP
from clipkit.model.state_dicts import rename_to_timm

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_SIZES = {(384, 12, 6): "small", (768, 12, 12): "base", (1024, 24, 16): "large", (1280, 32, 16): "huge"}
_CROP_MODES = {"shortest": "center", "squash": "squash", "longest": "border"}


@dataclass(frozen=True, kw_only=True)
class _Backbone:
    """A timm model: name, arguments, width of the classifier, and state dict."""

    name: str
    arguments: dict[str, Any]
    classes: int
    tensors: dict[str, Tensor]


def find_obstacle(model: CLIP) -> str:
    """Return why timm cannot represent this image tower, or ""."""
    vision = model.architecture.vision
    if vision.is_clips:
        return ""
    if vision.timm_model() is None:
        return f"timm has no image tower like this one ({vision.description})"
    head = model.visual.get_submodule("head")
    layers = [name for name, layer in head.named_children() if not isinstance(layer, nn.Dropout)]
    linear = all(isinstance(head.get_submodule(name), nn.Linear) for name in layers)
    if layers not in ([], ["proj"]) or not linear:
        return "timm supports only image towers with one linear projection"
    backbone = _convert_library_tower(model, model.visual.state_dict())
    built = _build_backbone(backbone).state_dict()
    if {name: t.shape for name, t in built.items()} != {
        name: t.shape for name, t in backbone.tensors.items()
    }:
        return f"timm's {backbone.name} has other parameters than this image tower"
    return ""


def write_model(model: CLIP, tensors: Mapping[str, Tensor], folder: Path) -> list[str]:
    """Write the image tower with float32 weights on the CPU; return the names of the files."""
    import timm

    visual = {name.removeprefix("visual."): t for name, t in tensors.items() if name.startswith("visual.")}
    plain = model.architecture.vision.plain is not None
    backbone = _convert_plain_tower(model, visual) if plain else _convert_library_tower(model, visual)
    published = timm.get_pretrained_cfg(backbone.name)
    preprocess = model.preprocess
    size = preprocess.image_size
    config = {
        "architecture": backbone.name,
        "num_classes": backbone.classes,
        "model_args": backbone.arguments,
        "pretrained_cfg": {
            "input_size": [3, size, size],
            "fixed_input_size": bool(published and published.fixed_input_size),
            "interpolation": preprocess.interpolation,
            "crop_pct": 1.0,
            "crop_mode": _CROP_MODES[preprocess.resize_mode],
            "mean": list(preprocess.mean),
            "std": list(preprocess.std),
            "first_conv": published.first_conv if published else None,
            "classifier": published.classifier if published else None,
        },
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(backbone.tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return [CONFIG, WEIGHTS]


def select_timm_model(shape: Architecture) -> tuple[str, dict[str, Any]]:
    """Return timm's model name and arguments for an architecture's plain ViT."""
    import timm

    vision = shape.vision.plain
    assert vision is not None
    kind = "clip_quickgelu" if shape.quick_gelu else "clip"
    size = _SIZES.get((vision.width, vision.layers, vision.heads), "")
    name = f"vit_{size}_patch{vision.patch_size}_{kind}_{vision.image_size}"
    if vision.mlp_ratio == 4.0 and timm.is_model(name):
        return name, {}
    return f"vit_base_patch32_{kind}_224", {
        "img_size": vision.image_size,
        "patch_size": vision.patch_size,
        "embed_dim": vision.width,
        "depth": vision.layers,
        "num_heads": vision.heads,
        "mlp_ratio": vision.mlp_ratio,
    }


def _convert_plain_tower(model: CLIP, visual: Mapping[str, Tensor]) -> _Backbone:
    name, arguments = select_timm_model(model.architecture)
    tensors = {
        "cls_token": visual["class_embedding"].view(1, 1, -1),  # (1, 1, D)
        "pos_embed": visual["positional_embedding"].unsqueeze(0),  # (1, P + 1, D)
        "head.weight": visual["proj"].T.contiguous(),  # (O, D)
        "head.bias": torch.zeros(model.architecture.embed_dim),
    }
    for name_in_clipkit, value in visual.items():
        if name_in_clipkit not in ("class_embedding", "positional_embedding", "proj"):
            tensors[rename_to_timm(name_in_clipkit)] = value
    return _Backbone(name=name, arguments=arguments, classes=model.architecture.embed_dim, tensors=tensors)


def _convert_library_tower(model: CLIP, visual: Mapping[str, Tensor]) -> _Backbone:
    origin = model.architecture.vision.timm_model()
    assert origin is not None
    name, arguments = origin
    tensors = {key.removeprefix("trunk."): t for key, t in visual.items() if key.startswith("trunk.")}
    if arguments.get("global_pool") == "token":  # with this pooling, the norm may be applied before or after
        tensors = {key.replace("fc_norm.", "norm."): t for key, t in tensors.items()}
    if "head.proj.weight" not in visual:
        classes: int = model.visual.get_submodule("trunk").num_classes  # type: ignore[assignment]
        return _Backbone(name=name, arguments=arguments, classes=classes, tensors=tensors)
    backbone = _Backbone(
        name=name, arguments=arguments, classes=model.architecture.embed_dim, tensors=tensors
    )
    bias = visual.get("head.proj.bias", torch.zeros(backbone.classes))
    trunk = _build_backbone(backbone)
    classifier: Any = trunk.get_classifier()  # type: ignore[operator]
    # distilled models have two, averaged
    layers = list(classifier) if isinstance(classifier, tuple | list) else [classifier]
    if all(isinstance(layer, nn.Linear) and layer.bias is not None for layer in layers):
        for path, module in trunk.named_modules():
            if any(module is layer for layer in layers):
                # copied, because safetensors does not support shared memory
                tensors[f"{path}.weight"] = visual["head.proj.weight"].clone()
                tensors[f"{path}.bias"] = bias.clone()
    return backbone


def _build_backbone(backbone: _Backbone) -> nn.Module:
    import timm

    with torch.random.fork_rng(devices=[]):  # timm initializes weights
        model: nn.Module = timm.create_model(
            backbone.name, pretrained=False, num_classes=backbone.classes, **backbone.arguments
        )
    return model


@torch.no_grad()
def measure_difference(model: CLIP, folder: Path, samples: Samples) -> float:
    """Load the folder with timm as a user would; return the largest difference of features relative to the norm."""
    import timm
    from timm.data.config import resolve_model_data_config
    from timm.data.transforms_factory import create_transform

    with torch.random.fork_rng(devices=[]):  # timm initializes weights before loading them
        theirs = timm.create_model(f"local-dir:{folder}", pretrained=True)
    theirs.eval()
    config: dict[str, Any] = resolve_model_data_config(theirs)  # type: ignore[no-untyped-call]
    transform = create_transform(**config, is_training=False)
    features = theirs(torch.stack([transform(image) for image in samples.images]))
    scale = samples.image_features.norm(dim=-1).max()
    return max_difference(features / scale, samples.image_features / scale)


def format_example(model: CLIP) -> str:
    """Return code that loads the export and compares an image with texts."""
    return """
import timm, torch
from PIL import Image

model = timm.create_model("local-dir:{folder}", pretrained=True).eval()
config = timm.data.resolve_model_data_config(model)
transform = timm.data.create_transform(**config, is_training=False)
with torch.no_grad():
    features = model(transform(Image.open("cat.jpg").convert("RGB")).unsqueeze(0))
print(torch.nn.functional.normalize(features, dim=-1))  # the image's embedding
"""

"""Fit state dicts to modules: compare names and shapes, and convert those of other libraries' ViTs.

DINO, iBOT, MAE and models trained by their code, such as UNI, have timm's names. What clipkit's ViT does not have
is folded into other weights, so that features stay the same: a bias of the patch embedding into the positions, and
LayerScale (Touvron et al. 2021, https://arxiv.org/abs/2103.17239) into the layers whose outputs it scales.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.errors import CheckpointError
from clipkit.model.towers import resize_grid

_TIMM_NAMES = (  # of clipkit's ViT, of timm
    ("ln_pre.", "norm_pre."),
    ("ln_post.", "norm."),
    ("transformer.resblocks.", "blocks."),
    (".ln_1.", ".norm1."),
    (".ln_2.", ".norm2."),
    (".attn.in_proj_", ".attn.qkv."),
    (".attn.out_proj.", ".attn.proj."),
    (".mlp.c_fc.", ".mlp.fc1."),
    (".mlp.c_proj.", ".mlp.fc2."),
    ("conv1.", "patch_embed.proj."),
    ("class_embedding", "cls_token"),
    ("positional_embedding", "pos_embed"),
)
_PATCHES = "patch_embed.proj.weight"
# classifiers, heads and decoders of the pretraining, and embeddings of masked patches
_UNUSED = re.compile(r"(head|head_dist|fc|\w+_head|decoder\w*|mask_token|masked_embed)(\.|$)")
_LAYER_SCALE = re.compile(r"(blocks\.\d+\.)(?:ls([12])\.gamma|gamma_([12]))")
_REGISTERS = {"reg_token", "register_tokens", "storage_tokens"}
_MAX_NAMES = 4  # in a message, per kind


def describe_misfit(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str:
    """Describe how names, shapes and kinds of dtype differ from those of a state dict; "" if they do not.

    The expected tensors may be on the meta device.
    """
    parts = []
    misshapen = []
    for name in sorted(expected.keys() & tensors.keys()):
        value = tensors[name]
        if value.shape != expected[name].shape:
            misshapen.append(f"{name} {tuple(value.shape)} instead of {tuple(expected[name].shape)}")
        elif value.is_floating_point() != expected[name].is_floating_point():
            return f"{name} is {value.dtype}, not {expected[name].dtype}"
    if misshapen:
        parts.append(f"{len(misshapen)} with another shape ({_join_names(misshapen)})")
    for kind, names in (
        ("missing", expected.keys() - tensors.keys()),
        ("unexpected", tensors.keys() - expected.keys()),
    ):
        if names:
            parts.append(f"{len(names)} {kind} ({list_tensors(names)})")
    return "; ".join(parts)


def list_tensors(names: Iterable[str]) -> str:
    """List names of tensors, those of a layer together, and only the first ones if there are many."""
    layers: Counter[str] = Counter()
    for name in sorted(names):
        layer = re.match(r".*?\.\d+\.", name)
        layers[f"{layer[0]}*" if layer else name] += 1
    return _join_names([f"{layer} ×{count}" if count > 1 else layer for layer, count in layers.items()])


def _join_names(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (", …" if len(names) > _MAX_NAMES else "")


def rename_to_timm(name: str) -> str:
    """Return timm's name of a tensor of clipkit's ViT."""
    for ours, timms in _TIMM_NAMES:
        name = name.replace(ours, timms)
    return name


def convert_vit(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, pool: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Convert the weights of a ViT with timm's names, in any submodule, to those of clipkit's.

    Args:
        expected: the state dict of the built tower. Its projection is not in the weights, nor is attention pooling.
        pool: see ``VisionTower``.

    Returns:
        The weights, in float32, and the names of tensors that are not used. CheckpointError if they do not fit.
    """
    stems = [name.removesuffix(_PATCHES) for name in tensors if f".{name}".endswith(f".{_PATCHES}")]
    if len(stems) != 1:
        several = ", ".join(map(repr, sorted(stems)))
        cause = f"with the prefixes {several}: keep one" if stems else f"there is no {_PATCHES}"
        raise CheckpointError(f"the file has {len(stems)} ViTs with timm's names, {cause}")
    (stem,) = stems
    theirs: dict[str, Tensor] = {}
    unused = []
    for name, value in tensors.items():
        inner = name.removeprefix(stem)
        if not name.startswith(stem) or _UNUSED.match(inner):
            unused.append(name)
        else:
            theirs[inner] = value.float() if value.is_floating_point() else value
    names: dict[str, str] = {}  # by timm's name
    for name in expected:
        renamed = rename_to_timm(name)
        if pool == "mean_norm" and name.startswith("ln_post."):
            renamed = f"fc_{renamed}"
        if name != "proj" and not name.startswith("attn_pool."):
            names[renamed] = name
    _check_kind(theirs, names)
    _fold_layer_scale(theirs)
    targets = {timms: expected[name] for timms, name in names.items()}
    _fit_tokens(theirs, targets)
    misfit = describe_misfit(targets, theirs)
    if misfit:
        raise CheckpointError(f"the weights do not match the image tower: {misfit}")
    for name, value in theirs.items():
        if not value.isfinite().all():
            raise CheckpointError(f"{name} contains NaN or infinity")
    return {names[name]: value for name, value in theirs.items()}, unused


def _check_kind(theirs: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    """Check what a setting selects, or what clipkit's ViT lacks, to say more than which tensors do not fit."""
    if registers := _REGISTERS & theirs.keys():
        raise CheckpointError(
            f"clipkit's ViT has no register tokens like {min(registers)} of the file: use model.image=timm:NAME"
        )
    stored, expected = (
        {"norm_pre.weight", "fc_norm.weight"} & keys for keys in (theirs.keys(), names.keys())
    )
    for name, setting, values in (
        ("norm_pre.weight", "shape.norms", ("vit", "clip")),
        ("fc_norm.weight", "shape.pool", ("class, mean or map", "mean_norm")),
    ):
        if (name in stored) != (name in expected):
            has = "has" if name in stored else "lacks"
            raise CheckpointError(f"the file {has} {name}: set {setting}={values[name in stored]}")


def _fold_layer_scale(theirs: dict[str, Tensor]) -> None:
    for name in list(theirs):
        match = _LAYER_SCALE.fullmatch(name)
        if match is None:
            continue
        layer = match[1] + {"1": "attn.proj", "2": "mlp.fc2"}[match[2] or match[3]]
        weight, bias = theirs.get(f"{layer}.weight"), theirs.get(f"{layer}.bias")
        # what does not fit stays, and is reported
        if weight is not None and bias is not None and theirs[name].shape == bias.shape == weight.shape[:1]:
            gamma = theirs.pop(name)
            theirs[f"{layer}.weight"] = gamma[:, None] * weight
            theirs[f"{layer}.bias"] = gamma * bias


def _fit_tokens(theirs: dict[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Resize positions to the tower's grid, and add the bias of the patch embedding; what does not fit stays."""
    if "cls_token" in theirs:
        theirs["cls_token"] = theirs["cls_token"].flatten()
    positions = theirs.get("pos_embed")
    if positions is None or positions.shape[-1:] != targets["pos_embed"].shape[-1:]:
        return
    positions = positions.flatten(0, -2)  # (P + 1, D)
    if math.isqrt(len(positions)) ** 2 == len(positions):  # none for the class token
        positions = F.pad(positions, (0, 0, 1, 0))
    count = len(targets["pos_embed"]) - 1
    if math.isqrt(len(positions) - 1) ** 2 == len(positions) - 1 != count:
        positions = resize_grid(positions, math.isqrt(count))
    bias = theirs.get("patch_embed.proj.bias")
    if bias is not None and bias.shape == positions.shape[1:]:
        positions = torch.cat([positions[:1], positions[1:] + bias])
        del theirs["patch_embed.proj.bias"]
    theirs["pos_embed"] = positions

"""Check the results of a device: each check compares a difference from a reference with a limit.

The reference is float64, the CPU, or a plain implementation of the same computation.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from clipkit.errors import ConfigError
from clipkit.model.architectures import ARCHITECTURES
from clipkit.model.clip import create
from clipkit.model.tokenizer import END_OF_TEXT, START_OF_TEXT
from clipkit.model.towers import draw_patches
from clipkit.objectives.clip import clip_loss
from clipkit.objectives.siglip import siglip_loss
from clipkit.training.parallel import apply_fsdp, compile_blocks

__all__ = ["TINY", "check"]

TINY = "ViT-Ti-4-16"
FLOAT32, BFLOAT16 = 1e-4, 5e-2  # relative gradient differences explained by rounding


def check(device: torch.device, *, small: bool) -> dict[str, dict[str, Any]]:
    """Run all checks; return by name the difference, its limit, and whether it is within the limit."""
    rows = 64 if small else 4096
    model = TINY if small else "ViT-B-32"
    backend = "eager" if small else "inductor"
    generator = torch.Generator().manual_seed(0)
    features = [F.normalize(torch.randn(rows, 512, generator=generator), dim=-1).to(device) for _ in range(2)]
    checks = {
        "clip_loss against float64": judged(_loss(features, clip_loss, _plain_clip, (14.3,)), 1e-5),
        "siglip_loss against float64": judged(
            _loss(features, siglip_loss, _plain_siglip, (10.0, -10.0)), 1e-5
        ),
        "packed text against padded, bf16": judged(_packed(device, model, rows=min(rows, 256)), BFLOAT16),
        "patches kept, against the CPU's": judged(_patches(device), 0.0),
        "gradient in float32 against the CPU's in float64": judged(_gradient(device, ""), FLOAT32),
        "gradient of compiled blocks against the CPU's in float64": judged(
            _gradient(device, backend), FLOAT32
        ),
    }
    group = "NCCL" if device.type == "cuda" else "gloo"
    for kind in ("DDP", "FSDP2"):
        checks[f"gradient of one rank, {group} and {kind}"] = judged(_one_rank(device, kind), FLOAT32)
    checks |= _nvjpeg(device)
    return checks


def judged(difference: float, limit: float) -> dict[str, Any]:
    return {"difference": difference, "limit": limit, "right": difference <= limit}


def _plain_clip(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    logits, targets = scale * image @ text.T, torch.arange(len(image), device=image.device)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def _plain_siglip(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    logits = scale * image @ text.T + bias
    signs = 2 * torch.eye(len(image), dtype=logits.dtype, device=logits.device) - 1
    return -F.logsigmoid(signs * logits).sum() / len(image)


def _loss(
    features: list[Tensor],
    own: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    numbers: tuple[float, ...],
) -> float:
    """Return the largest relative difference of the value and of the gradients."""
    results = []
    for loss, dtype in ((own, torch.float32), (plain, torch.float64)):
        given = [feature.detach().to(dtype).requires_grad_() for feature in features]
        given += [
            torch.tensor(number, dtype=dtype, device=features[0].device).requires_grad_()
            for number in numbers
        ]
        value = loss(*given)
        torch.autograd.backward(value)
        results.append([value.detach(), *(tensor.grad for tensor in given)])
    return _largest(*results)


def _packed(device: torch.device, name: str, rows: int) -> float:
    """Compare features and a weight's gradient with packed and padded text, in bfloat16 on a GPU."""
    model = create(ARCHITECTURES[name], name=name, seed=0).to(device).train()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 78, (rows,), generator=generator)
    tokens = torch.randint(1, START_OF_TEXT, (rows, 77), generator=generator)
    tokens = tokens.where(torch.arange(77) < lengths[:, None], 0)
    tokens[:, 0] = START_OF_TEXT
    tokens[torch.arange(rows), lengths - 1] = END_OF_TEXT
    tokens = tokens.to(device)
    towards = torch.randn(rows, model.architecture.embed_dim, generator=generator).to(device)
    results = []
    for given in (lengths.tolist(), None):
        model.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            features = model.encode_text(tokens, lengths=given)
        torch.autograd.backward((features * towards).sum())
        weight = model.transformer.blocks[0].attn.in_proj_weight
        results.append([features.detach(), weight.grad])
    return _largest(*results)


def _patches(device: torch.device) -> float:
    """Count differing choices of patches."""
    rows = torch.arange(1000, 1256)
    drawn = [
        draw_patches(seed=7, rows=row_numbers, patches=196, keep=98).cpu()
        for row_numbers in (rows, rows.to(device))
    ]
    return float((drawn[0] != drawn[1]).sum())


def _gradient(device: torch.device, backend: str) -> float:
    """Compare gradients of a tiny model with patch dropout and packing, as in training."""
    results = []
    for where, dtype in ((torch.device("cpu"), torch.float64), (device, torch.float32)):
        model = create(ARCHITECTURES[TINY], name=TINY, seed=0).to(where, dtype).train()
        if backend and dtype == torch.float32:
            compile_blocks(model, backend=backend)
        results.append(_gradients(model, where))
    return _largest(results[1], results[0])


def _one_rank(device: torch.device, kind: str) -> float:
    """Compare gradients in a process group of one rank with those of the plain model."""
    model = create(ARCHITECTURES[TINY], name=TINY, seed=0).to(device).train()
    expected = [gradient.clone() for gradient in _gradients(model, device)]
    model.zero_grad(set_to_none=True)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        if kind == "DDP":
            gradients = _gradients(DistributedDataParallel(model), device)
        else:  # clipkit.training.parallel.shard, which refuses a single process
            mesh = init_device_mesh(device.type, (1,))
            apply_fsdp(model, mesh)
            gradients = _gradients(model, device)
    finally:
        dist.destroy_process_group()
    return _largest(gradients, expected)


def _gradients(model: nn.Module, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (16, 3, 16, 16), dtype=torch.uint8, generator=generator)
    tokens = torch.zeros(16, 20, dtype=torch.int64)
    lengths = [4 + row for row in range(16)]
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(1, START_OF_TEXT, (length,), generator=generator)
        tokens[row, 0], tokens[row, length - 1] = START_OF_TEXT, END_OF_TEXT
    patches = draw_patches(seed=0, rows=torch.arange(16), patches=16, keep=8)
    images, tokens, patches = (tensor.to(device) for tensor in (images, tokens, patches))
    loss = clip_loss(*model(images, tokens, patches=patches, lengths=lengths))
    torch.autograd.backward(loss)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [
        loss.detach(),
        *(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient for gradient in gradients),
    ]


def _largest(own: list[Any], reference: list[Any]) -> float:
    worst = 0.0
    for a, b in zip(own, reference, strict=True):
        a, b = a.cpu().double(), b.cpu().double()
        worst = max(worst, float((a - b).norm() / b.norm().clamp_min(1e-12)))
    return worst


def _nvjpeg(device: torch.device) -> dict[str, dict[str, Any]]:
    """Compare nvJPEG with libjpeg on a smooth image: the mean difference of 255 levels; empty without nvJPEG.

    nvJPEG repeats subsampled colors, as libjpeg does on request (``fastupsample``); by default libjpeg
    interpolates them.
    """
    if device.type != "cuda" or importlib.util.find_spec("simplejpeg") is None:
        return {}
    import simplejpeg
    from torchvision.io import encode_jpeg

    from data.augment import jpeg_decoder

    try:
        decode = jpeg_decoder()
    except ConfigError:
        return {}
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(1, 3, 12, 16, generator=generator)
    image = F.interpolate(coarse, size=(240, 320), mode="bicubic").clamp(0, 1)[0].mul(255).to(torch.uint8)
    data = encode_jpeg(image, quality=90)
    decoded = decode([data], mode="RGB", device=device)[0].cpu().permute(1, 2, 0).float()
    report = {}
    for name, repeats_colors, limit in (("repeated", True, 1.5), ("interpolated", False, 4.0)):
        reference = torch.tensor(simplejpeg.decode_jpeg(data.numpy().tobytes(), fastupsample=repeats_colors))
        difference = float((decoded - reference.float()).abs().mean())
        report[f"nvJPEG against libjpeg with {name} colors, mean of 255"] = judged(difference, limit)
    return report

"""Compare the speed of a training step with open_clip's, computing the same loss and gradients.

    python -m bench.train_step [--model ViT-B-32] [--batch-size 32] [--rounds 5] [--precision fp32]

Both train the same weights on the same images and captions (16 tokens on average, including start and end),
as their own trainers do: open_clip with captions padded to 77, its loss and AdamW; clipkit with its loss and
AdamW. Steps alternate, so that changes in machine load affect both. Loss and gradients of one batch are
compared first. Data loading is excluded. The ratio is a ratio of medians. With ``--precision bf16`` both compute
under autocast. On CPUs on which MKL is slow, oneDNN computes clipkit's products in float32, as in train.py.

Bound: both are matrix products. The result includes the rate of a plain product of 1,024 × 1,024 matrices in the
same run and precision, and the rate of the step in useful model FLOPs (without padding).
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
from torch import Tensor

import clipkit
from clipkit.config import OptimConfig
from clipkit.model import apply_cpu_settings
from clipkit.model.architectures import Architecture
from clipkit.model.names import create_architecture
from clipkit.model.preprocess import OPENAI_MEAN, OPENAI_STD
from clipkit.model.tokenizer import END_OF_TEXT, START_OF_TEXT
from clipkit.training.optim import adamw
from clipkit.training.step import backward

RESULTS = Path(__file__).parent / "results"
CONFIG = OptimConfig(lr=1e-5, warmup=0)
PRODUCTS: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """One batch for both: uint8 images for clipkit, normalized images as from open_clip's loader."""

    images: Tensor  # (B, 3, S, S) uint8
    normalized: Tensor  # (B, 3, S, S) float32
    tokens: Tensor  # (B, 77) int64


def make_pairs(shape: Architecture, batch_size: int) -> Pairs:
    """Generate random images and captions of 16 tokens on average, from 4 to 77."""
    random = torch.Generator().manual_seed(0)
    side = shape.vision.image_size
    images = torch.randint(0, 256, (batch_size, 3, side, side), dtype=torch.uint8, generator=random)
    spread = torch.distributions.Gamma(torch.tensor(4.0), torch.tensor(1 / 3))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lengths = (spread.sample((batch_size,)) + 4).round().clamp(4, 77).long()
    lengths += round(16 - lengths.float().mean().item())
    tokens = torch.zeros(batch_size, 77, dtype=torch.int64)
    for row, length in zip(tokens, lengths.tolist(), strict=True):
        row[:length] = torch.randint(1, START_OF_TEXT, (length,), generator=random)
        row[0], row[length - 1] = START_OF_TEXT, END_OF_TEXT
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (OPENAI_MEAN, OPENAI_STD))
    return Pairs(images=images, normalized=(images.float() / 255 - mean) / std, tokens=tokens)


def clipkit_step(
    model: clipkit.CLIP, pairs: Pairs, *, bf16: bool
) -> tuple[Callable[[], Tensor], torch.optim.Optimizer]:
    optimizer = adamw(model, CONFIG)

    def gradients() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        inputs = {"images": pairs.images, "tokens": pairs.tokens}
        return backward(model, inputs, loss=clipkit.clip_loss, parts=1, autocast=bf16).loss

    return gradients, optimizer


def open_clip_step(
    model: Any, pairs: Pairs, *, bf16: bool
) -> tuple[Callable[[], Tensor], torch.optim.Optimizer]:
    """Return a step like open_clip's trainer: the same two parameter groups, AdamW with its defaults."""
    loss_of = open_clip.ClipLoss()
    plain = [p for name, p in model.named_parameters() if p.ndim < 2 or "logit_scale" in name]
    decayed = [p for name, p in model.named_parameters() if not (p.ndim < 2 or "logit_scale" in name)]
    optimizer = torch.optim.AdamW(
        [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": CONFIG.weight_decay}],
        lr=CONFIG.lr,
        betas=(CONFIG.beta1, CONFIG.beta2),
        eps=CONFIG.eps,
    )

    def gradients() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            value: Tensor = loss_of(*model(pairs.normalized, pairs.tokens))
        torch.autograd.backward(value)
        return value.detach()

    return gradients, optimizer


def compare(own: tuple[Any, Tensor], reference: tuple[Any, Tensor]) -> dict[str, float]:
    """Return the difference of the losses, and the largest difference of a gradient relative to its norm."""
    gradients = dict(reference[0].named_parameters())
    worst = 0.0
    for name, parameter in own[0].named_parameters():
        expected = gradients[name].grad
        worst = max(worst, float((parameter.grad - expected).norm() / expected.norm().clamp_min(1e-12)))
    return {"loss": abs(float(own[1] - reference[1])), "gradient": worst}


def gemm_rate(dtype: torch.dtype) -> float:
    """Measure FLOP/s of a 1,024 × 1,024 matrix product."""
    a, b = torch.randn(2, 1024, 1024, dtype=dtype)
    times = []
    for _ in range(15):
        began = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - began)
    return 2 * 1024**3 / statistics.median(times)


def useful_flops(shape: Architecture, tokens: Tensor) -> float:
    """Return the FLOPs of one forward and backward pass over the batch, without padding."""

    def tower(width: int, layers: int, length: float) -> float:
        return layers * (24 * width**2 * length + 4 * width * length**2)

    vision, text = shape.get_plain_towers()
    patches = (vision.image_size // vision.patch_size) ** 2
    embed = 2 * patches * 3 * vision.patch_size**2 * vision.width
    lengths = tokens.argmax(dim=1) + 1
    texts = sum(tower(text.width, text.layers, float(length)) for length in lengths.tolist())
    return 3 * (len(tokens) * (tower(vision.width, vision.layers, patches + 1) + embed) + texts)


def timed(gradients: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Measure seconds of a complete step, and of its optimizer update."""
    began = time.perf_counter()
    gradients()
    middle = time.perf_counter()
    optimizer.step()
    end = time.perf_counter()
    return end - began, end - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    options = parser.parse_args()
    bf16 = options.precision == "bf16"
    shape = create_architecture(options.model)
    pairs = make_pairs(shape, options.batch_size)
    own = clipkit.create(options.model, seed=0).train()
    reference = open_clip.create_model(options.model).train()
    reference.load_state_dict(own.state_dict())
    apply_cpu_settings()
    settings = {"clipkit": PRODUCTS.fp32_precision, "open_clip": "none"}
    steps = {
        "clipkit": clipkit_step(own, pairs, bf16=bf16),
        "open_clip": open_clip_step(reference, pairs, bf16=bf16),
    }
    losses = {}
    for name, (gradients, _) in steps.items():
        PRODUCTS.fp32_precision = settings[name]
        losses[name] = gradients()
    difference = compare((own, losses["clipkit"]), (reference, losses["open_clip"]))
    for step in steps.values():
        timed(*step)  # creates the optimizer state
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    rates = []
    for i in range(options.rounds):
        PRODUCTS.fp32_precision = settings["clipkit"]
        rates.append(gemm_rate(torch.bfloat16 if bf16 else torch.float32))
        for name, step in steps.items():
            PRODUCTS.fp32_precision = settings[name]
            seconds[name].append(timed(*step))
        print(f"round {i + 1}: " + ", ".join(f"{k} {v[-1][0]:.2f} s" for k, v in seconds.items()))
    report(options, pairs, shape, difference, seconds, statistics.median(rates))


def report(
    options: argparse.Namespace,
    pairs: Pairs,
    shape: Architecture,
    difference: dict[str, float],
    seconds: dict[str, list[tuple[float, float]]],
    rate: float,
) -> None:
    """Print the result and write it as JSON."""
    medians = {name: statistics.median(whole for whole, _ in times) for name, times in seconds.items()}
    useful = useful_flops(shape, pairs.tokens)
    result = {
        "model": options.model,
        "precision": options.precision,
        "batch_size": options.batch_size,
        "mean_tokens": float((pairs.tokens.argmax(dim=1) + 1).float().mean()),
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "open_clip": open_clip.__version__,
        "largest_difference": difference,
        "samples_per_second": {name: options.batch_size / median for name, median in medians.items()},
        "optimizer_seconds": {
            name: statistics.median(part for _, part in times) for name, times in seconds.items()
        },
        "seconds": {name: [whole for whole, _ in times] for name, times in seconds.items()},
        "gemm_gflops": rate / 1e9,
        "useful_share_of_gemm_rate": {name: useful / median / rate for name, median in medians.items()},
        "ratio": medians["open_clip"] / medians["clipkit"],
        "ratio_by_round": [
            reference[0] / own[0]
            for own, reference in zip(seconds["clipkit"], seconds["open_clip"], strict=True)
        ],
    }
    RESULTS.mkdir(exist_ok=True)
    suffix = "" if options.precision == "fp32" else f"_{options.precision}"
    (RESULTS / f"train_step_{options.model}{suffix}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "seconds"}, indent=2))
    rates = result["samples_per_second"]
    assert isinstance(rates, dict)
    print(
        f"clipkit {rates['clipkit']:.2f} samples/s, open_clip {rates['open_clip']:.2f} samples/s, "
        f"ratio {medians['open_clip'] / medians['clipkit']:.2f}"
    )


if __name__ == "__main__":
    main()

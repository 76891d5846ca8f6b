"""Compare captions with open_clip's CoCa (a training step), with plain cross-entropy (memory) and with transformers
(generation, likelihood).

    python -m bench.caption [--only step vocabulary generation] [--batch-size 16] [--rounds 7] [--tokens 1024 …]

Step: both train towers of the same shapes on the same images and captions (16 tokens on average) with the
contrastive loss and a caption loss, and update with AdamW. open_clip's CoCa has a decoder as deep as its text
tower, as in its published configurations; clipkit's has half of that by default. ``whole`` has all layers, for the
part of the ratio that is due to the code. Steps alternate; a ratio is the median over rounds. Data loading is
excluded.

Vocabulary: the peak resident memory of the loss of N predicted tokens, 512 wide, over 49,408 words, above that
before the pass, in a fresh process, for clipkit and for ``cross_entropy(hidden @ weight)``. The latter is
extrapolated where it needs more than ``--most-gb``, in proportion to N.

Generation: the CPU time, in one thread, of 32 tokens for each of 32 images, with random weights, greedily and with
4 beams, against ``generate`` of transformers' BLIP, and against computing all tokens again for each token. All have
6 layers of 512 with cross-attention to 65 tokens of an image tower of one layer, and 49,408 words; ``shared`` (the
text tower is the decoder) has BLIP's layers, ``tokens`` (a decoder of its own) has a second MLP in each layer.
Likelihood: the CPU time of ``caption_likelihoods`` of 192 prompts (64 names in 3 templates) for 8 images against
``CLIP.caption_nll`` of each.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import clipkit
from bench.train_step import CONFIG, Pairs, gemm_rate, make_pairs, timed
from clipkit.model import CLIP, Architecture, TextTower, VisionTower
from clipkit.model.architectures import Decoder
from clipkit.model.decoder import caption_nll
from clipkit.model.generate import caption_likelihoods, generate_captions
from clipkit.model.tokenizer import END_OF_TEXT, START_OF_TEXT
from clipkit.objectives.caption import Caption
from clipkit.training.optim import adamw
from clipkit.training.step import LocalTerms, backward

RESULT = Path(__file__).parent / "results" / "caption.json"
WIDTH, LAYERS, HEADS = 256, 6, 4
WORDS, VOCABULARY_WIDTH = 49408, 512
SHAPE = Architecture(
    embed_dim=WIDTH,
    vision=VisionTower(image_size=64, patch_size=8, width=WIDTH, layers=LAYERS, heads=HEADS),
    text=TextTower(width=WIDTH, layers=LAYERS, heads=HEADS),
)
PARTS = ("step", "vocabulary", "generation")
COLORS = ("red", "green", "blue", "black", "white", "old", "small", "large")
THINGS = ("cat", "dog", "car", "house", "tree", "boat", "chair", "bird")
Step = tuple[Callable[[], Tensor], torch.optim.Optimizer]


def clipkit_step(pairs: Pairs, *, layers: int) -> Step:
    """Return the gradients of a step of clipkit, whose decoder reads the text tower's tokens, and its optimizer."""
    decoder = Decoder(width=WIDTH, layers=layers, heads=HEADS, context_length=76, feed="text")
    model = clipkit.create(replace(SHAPE, decoder=decoder), seed=0).train()
    optimizer = adamw(model, CONFIG)
    lengths = (pairs.tokens.argmax(dim=1) + 1).tolist()
    terms = LocalTerms(
        terms={"caption": Caption(weight=1.0)},
        inputs={"caption": {"captions": pairs.tokens, "lengths": lengths}},
        weights=torch.tensor([1.0], dtype=torch.float64),
        counts=torch.tensor([sum(lengths) - len(lengths)], dtype=torch.float64),
    )

    def gradients() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        inputs = {"images": pairs.images, "tokens": pairs.tokens, "lengths": lengths}
        return backward(model, inputs, loss=clipkit.clip_loss, parts=1, autocast=False, terms=terms).loss

    return gradients, optimizer


def open_clip_step(pairs: Pairs) -> Step:
    """Return the same of open_clip's CoCa, as its trainer computes it."""
    text = {"width": WIDTH, "layers": LAYERS, "heads": HEADS}
    model: Any = open_clip.CoCa(
        embed_dim=WIDTH,
        vision_cfg={
            "image_size": 64, "patch_size": 8, "width": WIDTH, "layers": LAYERS, "head_width": WIDTH // HEADS,
            "output_tokens": True,
        },
        text_cfg={**text, "output_tokens": True},
        multimodal_cfg={**text, "context_length": 77},
    ).train()  # fmt: skip
    loss_of = open_clip.CoCaLoss(caption_loss_weight=1.0, clip_loss_weight=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=CONFIG.lr, weight_decay=CONFIG.weight_decay)

    def gradients() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = sum(loss_of(**model(pairs.normalized, pairs.tokens)))
        torch.autograd.backward(value)
        return value.detach()

    return gradients, optimizer


def compare_steps(batch_size: int, rounds: int) -> dict[str, Any]:
    """Time steps in alternating order; return seconds and ratios to open_clip."""
    pairs = make_pairs(SHAPE, batch_size)
    steps = {
        "half": clipkit_step(pairs, layers=LAYERS // 2),
        "open_clip": open_clip_step(pairs),
        "whole": clipkit_step(pairs, layers=LAYERS),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 1):
        for name, step in steps.items() if i % 2 else reversed(steps.items()):
            found, _ = timed(*step)
            if i:  # the first is a warm-up
                seconds[name].append(found)
    result: dict[str, Any] = {
        "batch_size": batch_size,
        "seconds": seconds,
        "gemm_flops": gemm_rate(torch.float32),
    }
    for name in ("half", "whole"):
        ratios = [a / b for a, b in zip(seconds["open_clip"], seconds[name], strict=True)]
        result[name] = {"ratio": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)}
        print(
            f"{name}: {statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )
    return result


def one_loss(side: str, tokens: int) -> dict[str, float]:
    """Measure the peak memory in bytes and the seconds of one pass; run in a fresh process."""
    random = torch.Generator().manual_seed(0)
    weight = (
        torch.randn(VOCABULARY_WIDTH, WORDS, generator=random).mul_(VOCABULARY_WIDTH**-0.5).requires_grad_()
    )

    def run(count: int) -> Tensor:
        hidden = torch.randn(count, VOCABULARY_WIDTH, generator=random).requires_grad_()
        targets = torch.randint(0, WORDS, (count,), generator=random)
        if side == "clipkit":
            value = caption_nll(hidden, weight, targets)
        else:
            value = F.cross_entropy(hidden @ weight, targets, reduction="sum")
        torch.autograd.backward(value)
        weight.grad = None
        return value

    run(2)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at the current size
    before = peak_memory()
    began = time.perf_counter()
    run(tokens)
    seconds = time.perf_counter() - began
    return {"bytes": peak_memory() - before, "seconds": seconds}


def peak_memory() -> int:
    """Return the greatest resident memory of this process in bytes, since its start or ``clear_refs``."""
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) << 10


def compare_losses(counts: list[int], most: float) -> list[dict[str, Any]]:
    """Measure memory for each number of tokens; the plain formula's is extrapolated above ``most`` bytes."""
    rows: list[dict[str, Any]] = []
    for count in counts:
        row: dict[str, Any] = {"tokens": count}
        for side in ("clipkit", "plain"):
            if side == "plain" and 3 * 4 * count * WORDS > most:
                last = rows[-1]
                row["plain_bytes"] = last["plain_bytes"] * count / last["tokens"]
                row["extrapolated"] = True
                continue
            command = [sys.executable, "-m", "bench.caption", "--one", side, "--tokens", str(count)]
            found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            row |= {f"{side}_{name}": value for name, value in found.items()}
        row["memory_ratio"] = row["clipkit_bytes"] / row["plain_bytes"]
        rows.append(row)
        print(
            f"{count:,} tokens: {row['clipkit_bytes'] / 2**20:,.0f} MiB, 1/{1 / row['memory_ratio']:.0f}",
            flush=True,
        )
    return rows


DEEP, IMAGES, TOKENS, BEAMS = 512, 32, 32, 4


def generator(feed: str) -> CLIP:
    """Return a clipkit model with a decoder of 6 layers, which never ends a caption early."""
    shape = Architecture(
        embed_dim=DEEP,
        vision=VisionTower(image_size=64, patch_size=8, width=DEEP, layers=1, heads=8),
        text=TextTower(width=DEEP, layers=LAYERS, heads=8),
        decoder=Decoder(width=DEEP, layers=LAYERS, heads=8, context_length=TOKENS, feed=feed),
    )
    model = clipkit.create(shape, seed=0).eval()
    assert model.text_decoder is not None
    with torch.no_grad():
        model.text_decoder.text_projection[:, END_OF_TEXT] = 0
    return model


def recomputed(model: CLIP, pixels: Tensor) -> None:
    """Generate greedily, and compute all tokens again for each token."""
    decoder, (_, seen) = model.text_decoder, model.image_tokens(pixels)
    assert decoder is not None
    tokens = torch.full((len(pixels), 1), START_OF_TEXT)
    for _ in range(TOKENS):
        text = model.decoder_input(tokens)
        x = decoder.embed(tokens) if text is None else text.x
        logits = decoder.compute_hidden(seen, x, text=text)[:, -1] @ decoder.text_projection
        tokens = torch.cat([tokens, logits.argmax(dim=-1, keepdim=True)], dim=1)


def blip() -> Callable[[Tensor, int], None]:
    """Return generation by transformers' BLIP with layers of the same sizes."""
    sizes = {"hidden_size": DEEP, "intermediate_size": 4 * DEEP, "num_attention_heads": 8}
    text = {
        **sizes, "num_hidden_layers": LAYERS, "encoder_hidden_size": DEEP, "vocab_size": WORDS,
        "max_position_embeddings": 77, "bos_token_id": START_OF_TEXT, "eos_token_id": END_OF_TEXT,
        "sep_token_id": END_OF_TEXT, "pad_token_id": 0,
    }  # fmt: skip
    vision = {**sizes, "num_hidden_layers": 1, "image_size": 64, "patch_size": 8}
    config = transformers.BlipConfig(text_config=text, vision_config=vision)
    model: Any = transformers.BlipForConditionalGeneration(config).eval()

    def run(pixels: Tensor, beams: int) -> None:
        found = model.generate(
            pixel_values=pixels, num_beams=beams, do_sample=False, min_new_tokens=TOKENS,
            max_new_tokens=TOKENS,
        )  # fmt: skip
        assert found.shape[1] >= TOKENS, found.shape

    return run


@torch.no_grad()
def compare_generation(rounds: int) -> dict[str, Any]:
    """Time generation in alternating order, and likelihoods; return seconds and ratios."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pixels = torch.randn(IMAGES, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    models, theirs = {feed: generator(feed) for feed in ("shared", "tokens")}, blip()
    sides: dict[str, Callable[[], object]] = {}
    for feed, model in models.items():
        sides[feed] = partial(generate_captions, model, pixels)
        sides[f"{feed}, {BEAMS} beams"] = partial(generate_captions, model, pixels, beams=BEAMS)
    sides["shared, recomputed"] = partial(recomputed, models["shared"], pixels)
    sides["transformers"] = partial(theirs, pixels, 1)
    sides[f"transformers, {BEAMS} beams"] = partial(theirs, pixels, BEAMS)

    model = models["shared"]
    names = [f"{color} {thing}" for color in COLORS for thing in THINGS]
    prompts = [
        one.format(name) for one in ("a photo of a {}.", "a {}.", "a drawing of the {}.") for name in names
    ]
    captions, (_, seen) = model.tokenizer(prompts), model.image_tokens(pixels[:8])
    lengths = (captions.argmax(dim=1) + 1).tolist()

    def each() -> Tensor:
        return torch.stack(
            [
                -model.caption_nll(one.expand(len(captions), -1, -1), captions, lengths=lengths)[0]
                for one in seen
            ]
        )

    sides["likelihood"] = partial(caption_likelihoods, model, seen, captions)
    sides["likelihood of each"] = each
    difference = float((caption_likelihoods(model, seen, captions) - each()).abs().max())
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds):
        for name, side in sides.items() if i % 2 else reversed(sides.items()):
            began = time.process_time()  # of this thread alone, so other programs matter less
            side()
            seconds[name].append(time.process_time() - began)
    torch.set_num_threads(threads)
    result: dict[str, Any] = {"seconds": seconds, "likelihood_difference": difference}
    for name, other in (
        ("shared", "shared, recomputed"),
        ("shared", "transformers"),
        ("tokens", "transformers"),
        (f"shared, {BEAMS} beams", f"transformers, {BEAMS} beams"),
        (f"tokens, {BEAMS} beams", f"transformers, {BEAMS} beams"),
        ("likelihood", "likelihood of each"),
    ):
        ratios = [a / b for a, b in zip(seconds[other], seconds[name], strict=True)]
        result[f"{name} / {other}"] = {
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "greatest": max(ratios),
        }
        span = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{name} against {other}: {statistics.median(ratios):.2f} times ({span})", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--batch-size", type=int, default=16, help="of step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1024, 4096, 131_072], help="of vocabulary, ascending"
    )
    parser.add_argument("--most-gb", type=float, default=8.0)
    parser.add_argument("--one", choices=("clipkit", "plain"), help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.one:
        print(json.dumps(one_loss(parsed.one, parsed.tokens[0])))
        return
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    parts: dict[str, Callable[[], object]] = {
        "step": lambda: compare_steps(parsed.batch_size, parsed.rounds),
        "vocabulary": lambda: compare_losses(parsed.tokens, parsed.most_gb * 2**30),
        "generation": lambda: compare_generation(parsed.rounds),
    }
    result |= {part: parts[part]() for part in parsed.only}
    result["threads"] |= {
        part: 1 if part == "generation" else torch.get_num_threads() for part in parsed.only
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

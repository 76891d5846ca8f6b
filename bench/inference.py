"""Compare the speed of encoding images and prompts on a CPU with open_clip, transformers and onnxruntime.

    python -m bench.inference [--models ViT-B-32 ViT-B-16] [--images 128] [--prompts 256] [--rounds 5]
                              [--only NAME …] [--out bench/results/inference.json]

All have the same random weights and inputs, in memory. Each runs in its own process, as in a user's program.
Those of one precision take turns in alternating order, so that changes in machine load affect all.

* clipkit: as ``clipkit encode`` computes batches: one per core, reordered weights, memory that is kept; prompts as
  in zero-shot evaluation. "clipkit, one batch at a time" is the same model as a plain module, on all cores.
* open_clip and transformers: one batch at a time on all cores, in inference mode, prompts padded to 77 tokens. int8
  is torch's dynamic quantization of linear layers.
* onnxruntime: graphs of open_clip's model, and of ``clipkit export --to onnx``. int8 is its dynamic quantization.

Zero-shot evaluation encodes both; ``zero_shot_seconds`` is the sum for all images and prompts. Differences are
those of unit-norm embeddings from clipkit's plain model in fp32.

Bound on a CPU: nearly all time is spent in matrix products. ``gemm_gflops`` is the measured rate of a product with
reordered weights on all cores, and ``fraction_of_gemm`` that of each contestant, in FLOPs of the complete image
tower. It can exceed 1 where tokens are not computed that nothing reads.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipkit
from clipkit.export.onnx import write_model as write_onnx
from clipkit.export.transformers import write_model as write_transformers
from clipkit.model.cpu import PackedWeights, keep_memory, open_core_pool, run_parallel
from clipkit.model.measure import image_flops
from clipkit.model.names import create_architecture
from clipkit.model.zero_shot import encode_prompts

RESULTS = Path(__file__).parent / "results"
KINDS = ("images", "prompts")
PRECISIONS = ("fp32", "bf16", "int8")
OWN = "clipkit"
CONTESTANTS = {  # name -> precisions
    OWN: ("fp32", "bf16"),
    "clipkit, one batch at a time": ("fp32", "bf16"),
    "open_clip": ("fp32", "bf16"),
    "transformers": ("fp32", "bf16", "int8"),
    "onnxruntime": ("fp32", "int8"),
    "onnxruntime, clipkit's graph": ("fp32", "int8"),
}
PEERS = ("open_clip", "transformers", "onnxruntime")
WORDS = (
    "a photo of a",
    "a bad photo of the small",
    "a drawing of one",
    "art of the large",
    "a blurry photo of my",
)

Encode = Callable[[str], Tensor]  # kind → (N, O) unit-norm embeddings of all inputs


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What all encode, the same for a seed.

    Attributes:
        images: (N, 3, S, S) uint8.
        prompts: N texts.
        batch_size: rows of a batch.
    """

    images: Tensor
    prompts: list[str]
    batch_size: int

    @classmethod
    def of(cls, model: str, options: argparse.Namespace) -> "Inputs":
        side = create_architecture(model).vision.image_size
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(
            0, 256, (options.images, 3, side, side), dtype=torch.uint8, generator=generator
        )
        prompts = [f"{WORDS[i % len(WORDS)]} {number_name(i)}." for i in range(options.prompts)]
        return cls(images=images, prompts=prompts, batch_size=options.batch_size)


def number_name(number: int) -> str:
    """Return a class name of one to four words, different for each number."""
    names = ("red fox", "sea lion", "espresso", "fire engine", "great grey owl", "pot", "wooden spoon")
    return f"{names[number % len(names)]} {number}"


def batches(rows: Any, size: int) -> list[Any]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def own(name: str, precision: str, model: clipkit.CLIP, inputs: Inputs, folder: Path) -> Encode:
    plain = name != OWN
    if not plain:
        keep_memory()

    def encode(kind: str) -> Tensor:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            if kind == "images":
                parts = batches(inputs.images, inputs.batch_size)
                made = (
                    map(model.encode_image, parts)
                    if plain
                    else run_parallel(model, model.encode_image, parts)
                )
                return torch.cat([*made])
            if plain:
                parts = batches(inputs.prompts, inputs.batch_size)
                return torch.cat([model.encode_text(model.tokenizer(part)) for part in parts])
            return encode_prompts(model, inputs.prompts, batch_size=inputs.batch_size)

    return encode


def open_clip(name: str, precision: str, model: clipkit.CLIP, inputs: Inputs, folder: Path) -> Encode:
    reference = open_clip_model(model)
    work = {"images": reference.encode_image, "prompts": reference.encode_text}
    return encoder_of(lambda kind, rows: work[kind](rows, normalize=True), precision, model, inputs)


def transformers(name: str, precision: str, model: clipkit.CLIP, inputs: Inputs, folder: Path) -> Encode:
    from transformers import CLIPModel

    reference: Any = CLIPModel.from_pretrained(folder / "transformers").eval()
    if precision == "int8":
        reference = torch.ao.quantization.quantize_dynamic(reference, {nn.Linear}, torch.qint8)

    def encode(kind: str, rows: Tensor) -> Tensor:
        if kind == "images":
            out = reference.vision_model(rows).pooler_output
            return F.normalize(reference.visual_projection(out).float(), dim=-1)
        # end of text is the largest token; padding with it, as transformers does, changes nothing
        out = reference.text_model(rows.masked_fill(rows == 0, rows.max())).pooler_output
        return F.normalize(reference.text_projection(out).float(), dim=-1)

    return encoder_of(encode, precision, model, inputs)


def onnxruntime(name: str, precision: str, model: clipkit.CLIP, inputs: Inputs, folder: Path) -> Encode:
    import onnxruntime

    source = "clipkit" if "graph" in name else "open_clip"
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3  # errors
    settings.intra_op_num_threads = torch.get_num_threads()
    sessions = {
        kind: onnxruntime.InferenceSession(
            folder / source / f"{file}{'.int8' if precision == 'int8' else ''}.onnx", settings
        )
        for kind, file in (("images", "visual"), ("prompts", "textual"))
    }

    def encode(kind: str, rows: Tensor) -> Tensor:
        [given] = sessions[kind].get_inputs()
        return torch.from_numpy(sessions[kind].run(None, {given.name: rows.numpy()})[0])

    return encoder_of(encode, precision, model, inputs)


MAKERS = dict(zip(CONTESTANTS, (own, own, open_clip, transformers, onnxruntime, onnxruntime), strict=True))


def encoder_of(
    encode: Callable[[str, Tensor], Tensor], precision: str, model: clipkit.CLIP, inputs: Inputs
) -> Encode:
    """Return the loop of a peer: prepared float images, prompts padded to the context length."""
    mean, std = model.colors
    pixels = inputs.images.float().div_(255).sub_(mean).div_(std)
    tokens = F.pad(
        rows := model.tokenizer(inputs.prompts), (0, model.architecture.text.context_length - rows.shape[1])
    )
    given = {"images": batches(pixels, inputs.batch_size), "prompts": batches(tokens, inputs.batch_size)}

    def whole(kind: str) -> Tensor:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return torch.cat([encode(kind, rows) for rows in given[kind]])

    return whole


def open_clip_model(model: clipkit.CLIP) -> Any:
    import open_clip

    reference = open_clip.create_model(model.name).eval()
    reference.load_state_dict(model.state_dict())
    return reference


class _Graph(nn.Module):
    """One encoder of open_clip, to be exported."""

    def __init__(self, model: Any, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = getattr(self.model, f"encode_{self.kind}")(x, normalize=True)
        return out


@torch.no_grad()
def prepare(model: clipkit.CLIP, folder: Path, *, only: Sequence[str]) -> None:
    """Write the files that the contestants load."""
    if "transformers" in only:
        (folder / "transformers").mkdir()
        write_transformers(model, model.state_dict(), folder / "transformers")
    if not any(name.startswith("onnxruntime") for name in only):
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic

    for source in ("clipkit", "open_clip"):
        (folder / source).mkdir()
    write_onnx(model, model.state_dict(), folder / "clipkit")
    reference, side = open_clip_model(model), model.preprocess.image_size
    examples = {"image": torch.zeros(2, 3, side, side), "text": model.tokenizer(["a cat", "a dog"])}
    length = model.architecture.text.context_length
    examples["text"] = F.pad(examples["text"], (0, length - examples["text"].shape[1]))
    for kind, file in (("image", "visual"), ("text", "textual")):
        graph, shapes = _Graph(reference, kind).eval(), ({0: "batch"},)
        program = torch.onnx.export(
            graph, (examples[kind],), opset_version=18, dynamic_shapes=shapes, dynamo=True, verbose=False
        )
        assert program is not None
        program.save(folder / "open_clip" / f"{file}.onnx")
    for path in folder.glob("*/*al.onnx"):
        quantize_dynamic(path, path.with_suffix(".int8.onnx"), weight_type=QuantType.QInt8)


def worker(
    name: str, precision: str, model_name: str, folder: Path, options: argparse.Namespace, pipe: Connection
) -> None:
    """Encode inputs of a kind on request; send the seconds, and the first time the embeddings."""
    model = clipkit.create(model_name, seed=0).eval()
    encode = MAKERS[name](name, precision, model, Inputs.of(model_name, options), folder)
    del model  # peers have a copy
    for kind in KINDS:
        pipe.send(encode(kind).float())
    for kind in iter(pipe.recv, None):
        began = time.perf_counter()
        encode(kind)
        pipe.send(time.perf_counter() - began)


def gemm_rate() -> float:
    """Measure FLOP/s of fp32 products with reordered weights, one product on each core."""
    layer, x = nn.Linear(768, 3072), torch.randn(1600, 768)
    weights = PackedWeights(layer)

    def work(_: int) -> None:
        with torch.inference_mode(), weights.activate():
            layer(x)

    times, threads = [], torch.get_num_threads()
    with open_core_pool(threads) as pool:
        for _ in range(7):
            began = time.perf_counter()
            list(pool.map(work, range(4 * threads)))
            times.append(time.perf_counter() - began)
    return 4 * threads * 2 * 1600 * 768 * 3072 / statistics.median(times)


def measure(model_name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run all contestants in turns; return the results of one model."""
    model, inputs = clipkit.create(model_name, seed=0).eval(), Inputs.of(model_name, options)
    plain = own("", "fp32", model, inputs, Path())
    reference = {kind: plain(kind) for kind in KINDS}
    found, rates = {}, list[float]()
    with tempfile.TemporaryDirectory() as scratch:
        prepare(model, Path(scratch), only=options.only)
        flops = image_flops(model).forward
        del model, plain
        for precision in PRECISIONS:  # all at once would need more memory
            names = [name for name in options.only if precision in CONTESTANTS[name]]
            found[precision] = rounds(names, precision, model_name, Path(scratch), options, reference, rates)
    return summary(found, inputs, flops=flops, gemm=statistics.median(rates))


def rounds(
    names: Sequence[str],
    precision: str,
    model_name: str,
    folder: Path,
    options: argparse.Namespace,
    reference: dict[str, Tensor],
    rates: list[float],
) -> dict[str, Any]:
    """Run the contestants of one precision in turns, and add the measured rates of products to ``rates``."""
    spawn = multiprocessing.get_context("spawn")
    pipes, workers, found = {}, [], {}
    for name in names:
        pipes[name], there = spawn.Pipe()
        given = (name, precision, model_name, folder, options, there)
        workers.append(spawn.Process(target=worker, args=given, daemon=True))
        workers[-1].start()
        there.close()
        rows = {kind: pipes[name].recv() for kind in KINDS}
        found[name] = {
            kind: {
                "largest_difference": float((rows[kind] - reference[kind]).abs().max()),
                "lowest_cosine": float((rows[kind] * reference[kind]).sum(-1).min()),
                "seconds": list[float](),
            }
            for kind in KINDS
        }
    for turn in range(options.rounds):
        rates.append(gemm_rate())
        for name in sorted(pipes, reverse=bool(turn % 2)):
            for kind in KINDS:
                pipes[name].send(kind)
                found[name][kind]["seconds"].append(pipes[name].recv())  # type: ignore[attr-defined]
        where = f"{model_name} {precision}: round {turn + 1} of {options.rounds}"
        print(f"{where}, load {os.getloadavg()[0]:.1f}", flush=True)
    for name, process in zip(pipes, workers, strict=True):
        pipes[name].send(None)
        process.join()
    return found


def summary(found: dict[str, Any], inputs: Inputs, *, flops: float, gemm: float) -> dict[str, Any]:
    """Add rates, and ratios of clipkit to the others by round."""
    counts = {"images": len(inputs.images), "prompts": len(inputs.prompts)}
    for rows in found.values():
        for one in rows.values():
            for kind in KINDS:
                one[kind]["per_second"] = counts[kind] / statistics.median(one[kind]["seconds"])
            pairs = zip(*(one[kind]["seconds"] for kind in KINDS), strict=True)
            one["zero_shot_seconds"] = statistics.median(map(sum, pairs))
            one["images"]["fraction_of_gemm"] = one["images"]["per_second"] * flops / gemm
        for name, one in rows.items():
            if OWN in rows and name != OWN:
                ratios = {kind: ratio(rows[OWN][kind], one[kind]) for kind in KINDS}
                one["clipkit_faster"] = {kind: statistics.median(values) for kind, values in ratios.items()}
                one["clipkit_faster_by_round"] = ratios
    others = [
        one["clipkit_faster"]["images"]
        for name, one in found["fp32"].items()
        if name in PEERS and OWN in found["fp32"]
    ]
    return {
        "gemm_gflops": gemm / 1e9,
        "image_gflops": flops / 1e9,
        "ratio_to_best_of_others": min(others) if others else None,
        "by_precision": found,
    }


def ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> list[float]:
    return [b / a for a, b in zip(ours["seconds"], theirs["seconds"], strict=True)]


def report(model: str, found: dict[str, Any]) -> None:
    """Print a table of one model."""
    print(f"{model}: a product with reordered weights {found['gemm_gflops']:.0f} GFLOP/s")
    for precision, rows in found["by_precision"].items():
        for name, row in rows.items():
            faster = row.get("clipkit_faster")
            compared = (
                f", clipkit {faster['images']:.2f} and {faster['prompts']:.2f} times as fast"
                if faster
                else ""
            )
            print(
                f"  {precision} {name}: {row['images']['per_second']:.2f} images/s "
                f"(difference {row['images']['largest_difference']:.1e}), "
                f"{row['prompts']['per_second']:.1f} prompts/s{compared}"
            )
    if found["ratio_to_best_of_others"]:
        print(
            f"  fp32 images: {found['ratio_to_best_of_others']:.2f} times as fast as the best of {', '.join(PEERS)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["ViT-B-32", "ViT-B-16"])
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[*CONTESTANTS], choices=CONTESTANTS, metavar="NAME")
    parser.add_argument("--out", type=Path, default=RESULTS / "inference.json")
    options = parser.parse_args()
    packages = ("torch", "open_clip_torch", "transformers", "onnxruntime")
    result: dict[str, Any] = {
        **{name: getattr(options, name) for name in ("images", "prompts", "batch_size", "rounds")},
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "versions": {name: version(name) for name in packages},
        "models": {},
    }
    for model in options.models:
        result["models"][model] = measure(model, options)
        options.out.write_text(json.dumps(result, indent=2) + "\n")
        report(model, result["models"][model])


if __name__ == "__main__":
    main()

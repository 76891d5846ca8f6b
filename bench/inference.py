"""Compare the speed of encoding images and prompts on a CPU with open_clip, transformers, onnxruntime and OpenVINO.

    python -m bench.inference [--models ViT-B-32 ViT-B-16] [--threads 2] [--precisions fp32] [--images 128]
                              [--prompts 256] [--rounds 5] [--only NAME …] [--out bench/results/inference.json]

All have the same random weights and inputs, in memory. Each runs in its own process, on as many cores as it has
threads. Those of one precision take turns in alternating order, so that changes in machine load affect all.

* clipkit: images as ``clipkit encode`` computes them: one batch per core, weights that are reordered once where
  that helps, memory that is kept; prompts as in zero-shot evaluation, which reorders weights each time. "clipkit,
  ONNX export" and "clipkit, OpenVINO export" are results of ``clipkit export``, as ``clipkit.load`` opens them.
* open_clip and transformers (with its default attention, torch's): one batch at a time on all cores, in inference
  mode, prompts padded to 77 tokens. int8 is torch's dynamic quantization of linear layers.
* onnxruntime and OpenVINO: graphs of open_clip's model, one batch per core; prompts padded to 77 tokens. int8 is
  onnxruntime's dynamic quantization, and of OpenVINO the quantization of weights and activations by NNCF for
  transformers.

Times of one thread are its CPU time, which other programs hardly affect; of several threads those of the clock.
"One image" and "one prompt" are encoded one after the other, each on all cores. Differences are those of unit-norm
embeddings from clipkit's plain model in fp32.

Bound: most time is spent in matrix products. ``products_gflops`` is the rate of the products of the model's linear
layers alone, in bf16 or otherwise in fp32, by the faster of torch's function and oneDNN with reordered weights: a
sequence on each core for batches, one on all cores for one input. ``fraction_of_products`` is that of each
contestant, in FLOPs that clipkit computes: the last block computes only the token that is read, and prompts have no
padding.

A run adds its models and numbers of threads to the results file. OpenVINO and NNCF are not dependencies:
``pip install openvino nncf``.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import clipkit
from clipkit.cli import ENVIRONMENT
from clipkit.export.onnx import OPSET, write_model as write_onnx, write_model_int8 as write_onnx_int8
from clipkit.export.openvino import (
    write_model as write_openvino,
    write_model_int8 as write_openvino_int8,
)
from clipkit.export.transformers import write_model as write_transformers
from clipkit.formats.graph import import_openvino
from clipkit.model.cpu import PackedWeights, apply_cpu_settings, open_core_pool, run_parallel
from clipkit.model.measure import image_flops, text_flops
from clipkit.model.names import create_architecture
from clipkit.model.zero_shot import encode_prompts

RESULTS = Path(__file__).parent / "results"
KINDS = ("images", "prompts", "one image", "one prompt")
PRECISIONS = ("fp32", "bf16", "int8")
OWN = "clipkit"
EXPORT = "clipkit, ONNX export"
OPENVINO_EXPORT = "clipkit, OpenVINO export"
OURS = (OWN, OPENVINO_EXPORT, EXPORT)  # the first that runs is compared with the others
CONTESTANTS = {  # name -> precisions
    OWN: ("fp32", "bf16"),
    EXPORT: ("fp32", "int8"),
    OPENVINO_EXPORT: ("fp32", "bf16", "int8"),
    "open_clip": ("fp32", "bf16"),
    "transformers": ("fp32", "bf16", "int8"),
    "onnxruntime": ("fp32", "int8"),
    "OpenVINO": ("fp32", "bf16", "int8"),
}
SINGLES = 4  # inputs that are encoded one after the other
CALIBRATION = 8  # inputs from which NNCF takes the ranges of activations
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
        most = max(1, min(options.images, options.prompts) // options.threads)  # a batch for each core
        return cls(images=images, prompts=prompts, batch_size=min(options.batch_size, most))


def number_name(number: int) -> str:
    """Return a class name of one to four words, different for each number."""
    names = ("red fox", "sea lion", "espresso", "fire engine", "great grey owl", "pot", "wooden spoon")
    return f"{names[number % len(names)]} {number}"


def batches(rows: Any, size: int) -> list[Any]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def own_export(precision: str, model: clipkit.CLIP, inputs: Inputs, folder: Path) -> Encode:
    return own(precision, clipkit.load(folder / f"clipkit-{precision}"), inputs, folder)


def own_openvino(precision: str, model: clipkit.CLIP, inputs: Inputs, folder: Path) -> Encode:
    weights = "int8" if precision == "int8" else "fp32"
    return own(precision, clipkit.load(folder / f"clipkit-openvino-{weights}"), inputs, folder)


def own(precision: str, model: clipkit.CLIP, inputs: Inputs, folder: Path) -> Encode:
    apply_cpu_settings()
    weights = PackedWeights(model)

    def encode_images(batch: Tensor) -> Tensor:
        with weights.activate():
            return model.encode_image(batch)

    def encode(kind: str) -> Tensor:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            if kind == "images":
                parts = batches(inputs.images, inputs.batch_size)
                return torch.cat([*run_parallel(model, encode_images, parts)])
            if kind == "prompts":
                return encode_prompts(model, inputs.prompts, batch_size=inputs.batch_size)
            if kind == "one image":
                return torch.cat([model.encode_image(image[None]) for image in inputs.images[:SINGLES]])
            prompts = inputs.prompts[:SINGLES]
            return torch.cat([model.encode_text(model.tokenizer([prompt])) for prompt in prompts])

    return encode


def open_clip(precision: str, model: clipkit.CLIP, inputs: Inputs, folder: Path) -> Encode:
    reference = open_clip_model(model)
    work = {"image": reference.encode_image, "prompt": reference.encode_text}
    return encoder_of(lambda kind, rows: work[kind](rows, normalize=True), precision, model, inputs)


def transformers(precision: str, model: clipkit.CLIP, inputs: Inputs, folder: Path) -> Encode:
    from transformers import CLIPModel

    reference: Any = CLIPModel.from_pretrained(folder / "transformers").eval()
    if precision == "int8":
        reference = torch.ao.quantization.quantize_dynamic(reference, {nn.Linear}, torch.qint8)

    def encode(kind: str, rows: Tensor) -> Tensor:
        if kind == "image":
            out = reference.vision_model(rows).pooler_output
            return F.normalize(reference.visual_projection(out).float(), dim=-1)
        # end of text is the largest token; padding with it, as transformers does, changes nothing
        out = reference.text_model(rows.masked_fill(rows == 0, rows.max())).pooler_output
        return F.normalize(reference.text_projection(out).float(), dim=-1)

    return encoder_of(encode, precision, model, inputs)


def onnxruntime(precision: str, model: clipkit.CLIP, inputs: Inputs, folder: Path) -> Encode:
    import onnxruntime

    def open_graph(path: Path, threads: int) -> Callable[[Any], Any]:
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3  # errors
        settings.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(path, settings)
        [given] = session.get_inputs()
        return lambda rows: session.run(None, {given.name: rows})[0]

    suffix = ".int8.onnx" if precision == "int8" else ".onnx"
    return encoder_of_graphs(open_graph, suffix, model, inputs, folder)


def run_openvino(precision: str, model: clipkit.CLIP, inputs: Inputs, folder: Path) -> Encode:
    openvino = import_openvino()
    core = openvino.Core()
    preparing = Lock()  # threads that set inputs at once can wait for each other forever

    def open_graph(path: Path, threads: int) -> Callable[[Any], Any]:
        streams = torch.get_num_threads() // threads
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "NUM_STREAMS": streams}
        if precision != "int8":  # the default is bf16 where the CPU has its instructions
            settings["INFERENCE_PRECISION_HINT"] = "bf16" if precision == "bf16" else "f32"
        compiled = core.compile_model(path, "CPU", settings)

        def encode(rows: Any) -> Any:
            with preparing:
                request = compiled.create_infer_request()
                request.set_input_tensor(openvino.Tensor(rows))
            request.start_async()
            request.wait()
            return request.get_output_tensor().data.copy()

        return encode

    suffix = ".int8.xml" if precision == "int8" else ".onnx"
    return encoder_of_graphs(open_graph, suffix, model, inputs, folder)


MAKERS = dict(
    zip(
        CONTESTANTS,
        (own, own_export, own_openvino, open_clip, transformers, onnxruntime, run_openvino),
        strict=True,
    )
)


def encoder_of_graphs(
    open_graph: Callable[[Path, int], Callable[[Any], Any]],
    suffix: str,
    model: clipkit.CLIP,
    inputs: Inputs,
    folder: Path,
) -> Encode:
    """Return the loop of a peer that runs graphs: batches in parallel, one input on all cores."""
    graphs: dict[tuple[str, bool], Callable[[Any], Any]] = {}
    for kind, file in (("image", "visual"), ("prompt", "textual")):
        for single, threads in ((False, 1), (True, torch.get_num_threads())):
            graphs[kind, single] = open_graph(folder / "open_clip" / f"{file}{suffix}", threads)

    def encode(kind: str, rows: Tensor) -> Tensor:
        return torch.from_numpy(graphs[kind, len(rows) == 1](rows.numpy()))

    return encoder_of(encode, "fp32", model, inputs, parallel=True)


def prepare_inputs(model: clipkit.CLIP, inputs: Inputs) -> dict[str, Tensor]:
    """Return what peers encode: float images, and prompts padded to the context length."""
    mean, std = model.colors
    tokens = model.tokenizer(inputs.prompts)
    length = model.architecture.text.context_length
    return {
        "image": inputs.images.float().div_(255).sub_(mean).div_(std),
        "prompt": F.pad(tokens, (0, length - tokens.shape[1])),
    }


def encoder_of(
    encode: Callable[[str, Tensor], Tensor],
    precision: str,
    model: clipkit.CLIP,
    inputs: Inputs,
    *,
    parallel: bool = False,
) -> Encode:
    """Return the loop of a peer; ``parallel`` computes one batch per core."""
    given: dict[str, list[Tensor]] = {}
    for kind, rows in prepare_inputs(model, inputs).items():
        given[f"{kind}s"] = batches(rows, inputs.batch_size)
        given[f"one {kind}"] = batches(rows[:SINGLES], 1)
    pool = ThreadPoolExecutor(torch.get_num_threads())

    def encode_all(kind: str) -> Tensor:
        work = partial(encode, kind.removeprefix("one ").removesuffix("s"))
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            run = pool.map if parallel and kind.endswith("s") else map
            features: Iterable[Tensor] = run(work, given[kind])
            return torch.cat([*features])

    return encode_all


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
def prepare(
    model: clipkit.CLIP, inputs: Inputs, folder: Path, *, only: Sequence[str], precisions: Sequence[str]
) -> None:
    """Write the files that the contestants load."""
    if "transformers" in only:
        (folder / "transformers").mkdir()
        write_transformers(model, model.state_dict(), folder / "transformers")
    if EXPORT in only:
        for precision, write in (("fp32", write_onnx), ("int8", write_onnx_int8)):
            if precision in precisions:
                (folder / f"clipkit-{precision}").mkdir()
                write(model, model.state_dict(), folder / f"clipkit-{precision}")
    if OPENVINO_EXPORT in only:
        if {"fp32", "bf16"} & {*precisions}:
            (folder / "clipkit-openvino-fp32").mkdir()
            write_openvino(model, model.state_dict(), folder / "clipkit-openvino-fp32")
        if "int8" in precisions:
            (folder / "clipkit-openvino-int8").mkdir()
            images = inputs.images[:CALIBRATION]
            write_openvino_int8(model, model.state_dict(), folder / "clipkit-openvino-int8", images=images)
    if not {"onnxruntime", "OpenVINO"} & {*only}:
        return
    (folder / "open_clip").mkdir()
    reference = open_clip_model(model)
    for kind, rows in prepare_inputs(model, inputs).items():
        encoder = {"image": "visual", "prompt": "textual"}[kind]
        graph = _Graph(reference, "text" if kind == "prompt" else kind).eval()
        program = torch.onnx.export(
            graph,
            (rows[:2],),
            opset_version=OPSET,
            dynamic_shapes=({0: "batch"},),
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        path = folder / "open_clip" / f"{encoder}.onnx"
        program.save(path, external_data=True)
        if "int8" in precisions:
            quantize_graph(path, rows[:CALIBRATION], only=only)


def quantize_graph(path: Path, examples: Tensor, *, only: Sequence[str]) -> None:
    """Write int8 copies of a graph for onnxruntime and OpenVINO."""
    if "onnxruntime" in only:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        products = ["MatMul", "Gemm"]  # its int8 convolutions are slow
        int8 = path.with_suffix(".int8.onnx")
        quantize_dynamic(
            path,
            int8,
            op_types_to_quantize=products,
            per_channel=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=True,
        )
    if "OpenVINO" in only:
        openvino = import_openvino()
        import nncf

        calibration = nncf.Dataset([row[None].numpy() for row in examples])
        quantized = nncf.quantize(
            openvino.Core().read_model(path), calibration, model_type=nncf.ModelType.TRANSFORMER
        )
        openvino.save_model(quantized, path.with_suffix(".int8.xml"), compress_to_fp16=False)


def worker(
    name: str, precision: str, model_name: str, folder: Path, options: argparse.Namespace, pipe: Connection
) -> None:
    """Encode inputs of a kind on request; send the seconds, and the first time the embeddings."""
    use_cores(options.threads)
    model = clipkit.create(model_name, seed=0).eval()
    encode = MAKERS[name](precision, model, Inputs.of(model_name, options), folder)
    del model  # peers have a copy
    for kind in KINDS:
        pipe.send(encode(kind).float())
    for kind in iter(pipe.recv, None):
        began = read_clock()
        encode(kind)
        pipe.send(read_clock() - began)


def read_clock() -> float:
    """Return seconds: of CPU time with one thread, which other programs hardly affect, otherwise by the clock."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def use_cores(count: int) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
    torch.set_num_threads(count)


class _Products(TorchFunctionMode):
    """Records the inputs' shapes and the weights of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[int, Tensor]] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is F.linear:
            x, weight, *_ = args
            self.products.append((x.numel() // x.shape[-1], weight.detach()))
        return function(*args, **(kwargs or {}))


class Bound:
    """The products of the linear layers of a model's encoders, without anything else."""

    def __init__(self, model: clipkit.CLIP, inputs: Inputs, precision: str) -> None:
        self._dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self._products: dict[str, list[tuple[int, tuple[Any, ...]]]] = {}
        self._weights: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}  # as they are, and reordered
        prompts = inputs.prompts[: inputs.batch_size]
        for kind in KINDS:
            rows = 1 if kind.startswith("one") else inputs.batch_size
            with _Products() as recorded, torch.inference_mode():
                if "image" in kind:
                    model.encode_image(inputs.images[:rows])
                else:
                    model.encode_text(model.tokenizer(prompts[:rows]))
            self._products[kind] = [
                (count, (weight.data_ptr(), weight.shape)) for count, weight in recorded.products
            ]
            for _, weight in recorded.products:
                plain = weight.to(self._dtype)
                reordered = torch.ops.mkldnn._reorder_linear_weight(plain, None)
                self._weights[weight.data_ptr(), weight.shape] = plain, reordered

    def measure_rate(self, kind: str) -> float:
        """Return FLOP/s by torch's function or by oneDNN with reordered weights, whichever is faster."""
        products = [(rows, *self._weights[key]) for rows, key in self._products[kind]]
        flops = sum(2 * rows * weight.numel() for rows, weight, _ in products)
        inputs = {
            (rows, weight.shape[1]): torch.randn(rows, weight.shape[1], dtype=self._dtype)
            for rows, weight, _ in products
        }
        threads = torch.get_num_threads()

        def compute(is_reordered: bool) -> None:
            with torch.inference_mode():
                for rows, weight, reordered in products:
                    x = inputs[rows, weight.shape[1]]
                    if is_reordered:
                        torch.ops.mkldnn._linear_pointwise(x, reordered, None, "none", [], "")
                    else:
                        F.linear(x, weight)

        rates = []
        for is_reordered in (False, True):
            began = read_clock()
            if kind.startswith("one"):
                for _ in range(SINGLES):
                    compute(is_reordered)
                count = SINGLES
            else:
                with open_core_pool(threads) as pool:
                    list(pool.map(compute, [is_reordered] * threads))
                count = threads
            rates.append(count * flops / (read_clock() - began))
        return max(rates)


def count_flops(model: clipkit.CLIP, inputs: Inputs) -> dict[str, int]:
    """Return the FLOPs of one input of each kind, on average."""
    lengths = [int(row.argmax()) + 1 for row in model.tokenizer(inputs.prompts)]
    by_length = {length: text_flops(model, length).forward for length in {*lengths}}
    counts = [by_length[length] for length in lengths]
    image = image_flops(model).forward
    singles = counts[:SINGLES]
    return {
        "images": image,
        "prompts": sum(counts) // len(counts),
        "one image": image,
        "one prompt": sum(singles) // len(singles),
    }


def measure(model_name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run all contestants in turns; return the results of one model."""
    use_cores(options.threads)
    apply_cpu_settings()
    model, inputs = clipkit.create(model_name, seed=0).eval(), Inputs.of(model_name, options)
    found: dict[str, Any] = {}
    rates: dict[str, dict[str, float]] = {}
    precisions = [precision for precision in PRECISIONS if precision in options.precisions]
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.work / model_name if options.work else Path(scratch) / model_name
        if not folder.exists():
            folder.mkdir(parents=True)
            prepare(model, inputs, folder, only=options.only, precisions=precisions)
        if not options.rounds:
            return {}
        with torch.inference_mode():
            parts = zip(batches(inputs.images, 8), batches(inputs.prompts, 8), strict=False)
            images, prompts = zip(
                *(
                    (model.encode_image(part), model.encode_text(model.tokenizer(texts)))
                    for part, texts in parts
                ),
                strict=True,
            )
        reference = {"image": torch.cat(images), "prompt": torch.cat(prompts)}
        flops = count_flops(model, inputs)
        for precision in precisions:  # all at once would need more memory
            names = [name for name in options.only if precision in CONTESTANTS[name]]
            bound = Bound(model, inputs, precision)
            found[precision], rates[precision] = rounds(
                names, precision, model_name, folder, options, reference, bound
            )
    return summary(found, inputs, flops=flops, rates=rates)


def rounds(
    names: Sequence[str],
    precision: str,
    model_name: str,
    folder: Path,
    options: argparse.Namespace,
    reference: dict[str, Tensor],
    bound: Bound,
) -> tuple[dict[str, Any], dict[str, float]]:
    """Run the contestants of one precision in turns; return their results and the rates of products alone."""
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    spawn = multiprocessing.get_context("spawn")
    pipes, workers, found = {}, [], dict[str, Any]()
    for name in names:
        pipes[name], there = spawn.Pipe()
        given = (name, precision, model_name, folder, options, there)
        workers.append(spawn.Process(target=worker, args=given, daemon=True))
        environment = ENVIRONMENT if name in OURS else {}
        with patch.dict(os.environ, environment):
            workers[-1].start()
        there.close()
    for name in names:
        found[name] = {kind: {"seconds": list[float]()} for kind in KINDS}
        for kind in KINDS:
            rows = pipes[name].recv()
            expected = reference[kind.removeprefix("one ").removesuffix("s")]
            count = min(len(rows), len(expected))
            cosines = (rows[:count] * expected[:count]).sum(-1)
            found[name][kind] |= {
                "largest_difference": float((rows[:count] - expected[:count]).abs().max()),
                "lowest_cosine": float(cosines.min()),
                "mean_cosine": float(cosines.mean()),
            }
    for turn in range(options.rounds):
        for kind in KINDS:
            rates[kind].append(bound.measure_rate(kind))
            for name in sorted(pipes, reverse=bool(turn % 2)):
                pipes[name].send(kind)
                found[name][kind]["seconds"].append(pipes[name].recv())
        where = f"{model_name} {precision}: round {turn + 1} of {options.rounds}"
        print(f"{where}, load {os.getloadavg()[0]:.1f}", flush=True)
    for name, process in zip(pipes, workers, strict=True):
        pipes[name].send(None)
        process.join()
    return found, {kind: statistics.median(values) for kind, values in rates.items()}


def summary(
    found: dict[str, Any], inputs: Inputs, *, flops: dict[str, int], rates: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """Add rates, and ratios of clipkit to the others by round."""
    counts = {"images": len(inputs.images), "prompts": len(inputs.prompts)}
    best: dict[str, dict[str, float]] = {}
    for precision, rows in found.items():
        ours = next((name for name in OURS if name in rows), "")
        for name, row in rows.items():
            for kind in KINDS:
                row[kind]["per_second"] = counts.get(kind, SINGLES) / statistics.median(row[kind]["seconds"])
                rate = row[kind]["per_second"] * flops[kind]
                row[kind]["fraction_of_products"] = rate / rates[precision][kind]
                if ours in rows and name != ours:
                    ratios = ratio(rows[ours][kind], row[kind])
                    row[kind]["clipkit_faster"] = statistics.median(ratios)
                    row[kind]["clipkit_faster_by_round"] = ratios
        others = [row for name, row in rows.items() if name not in OURS and ours in rows]
        if others:
            best[precision] = {kind: min(row[kind]["clipkit_faster"] for row in others) for kind in KINDS}
    return {
        "products_gflops": {
            precision: {kind: rate / 1e9 for kind, rate in by_kind.items()}
            for precision, by_kind in rates.items()
        },
        "gflops": {kind: count / 1e9 for kind, count in flops.items()},
        "ratio_to_best_of_others": best,
        "by_precision": found,
    }


def ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> list[float]:
    return [b / a for a, b in zip(ours["seconds"], theirs["seconds"], strict=True)]


def report(model: str, found: dict[str, Any]) -> None:
    """Print a table of one model."""
    print(model)
    for precision, rows in found["by_precision"].items():
        rates = ", ".join(f"{kind} {rate:.0f}" for kind, rate in found["products_gflops"][precision].items())
        print(f"  {precision}: GFLOP/s of the products alone: {rates}")
        for name, row in rows.items():
            print(f"  {precision} {name}")
            for kind in KINDS:
                values = row[kind]
                line = f"{values['per_second']:.2f}/s, {values['fraction_of_products']:.2f} of products alone"
                if "clipkit_faster" in values:
                    ratios = values["clipkit_faster_by_round"]
                    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
                    line += f", clipkit {middle:.2f} ({low:.2f} to {high:.2f}) times as fast"
                cosines = f"cosine {values['mean_cosine']:.6f}, lowest {values['lowest_cosine']:.6f}"
                print(f"    {kind}: {line}, {cosines}")


def find_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["ViT-B-32", "ViT-B-16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--precisions", nargs="+", default=["fp32"], choices=PRECISIONS)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32, help="at most; each core has a batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help="folder in which exports are kept, for further runs")
    parser.add_argument("--only", nargs="+", default=[*CONTESTANTS], choices=CONTESTANTS, metavar="NAME")
    parser.add_argument("--out", type=Path, default=RESULTS / "inference.json")
    options = parser.parse_args()
    packages = ("torch", "open_clip_torch", "transformers", "onnxruntime", "openvino", "nncf")
    run = {name: getattr(options, name) for name in ("threads", "images", "prompts", "batch_size", "rounds")}
    run |= {
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "versions": {name: find_version(name) for name in packages},
    }
    result: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"models": {}}
    for model in options.models:
        found = measure(model, options)
        if not found:  # 0 rounds: only exports were written
            continue
        precisions = "+".join(found["by_precision"])
        name = f"{model}, {options.threads} threads, {precisions}"
        result["models"][name] = run | found
        options.out.write_text(json.dumps(result, indent=2) + "\n")
        report(name, found)


if __name__ == "__main__":
    main()

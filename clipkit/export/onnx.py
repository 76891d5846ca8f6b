"""Export to ONNX: ``visual.onnx``, ``textual.onnx`` and their configuration, ``onnx_config.json``.

    visual.onnx     pixel_values  float32 (B, 3, S, S), normalized    →  image_embeds  float32 (B, O), unit norm
    textual.onnx    input_ids     int64 (B, L)                        →  text_embeds   float32 (B, O), unit norm

B is dynamic. L is dynamic up to the context length, except for text towers of open_clip, where L is the context
length. Rows may be padded with 0 or with repeated end-of-text tokens. For a class head, L is 1: the index of a
class. ``onnx_config.json`` contains everything else: how to resize and normalize images, the tokenizer's file or
the class names, and exp(t), which multiplies similarities.

Weights of more than 1.5 GiB are stored in a separate file, because an ONNX file is limited to 2 GiB.

``write_model_int8`` stores the same graphs with int8 weights: onnxruntime's dynamic quantization of matrix
products, with a scale for each output, and of embedding tables. Convolutions, normalizations and the products of
attention keep float32. Activations are quantized at run time, so no images are needed for calibration.
"""

import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipkit.errors import ConfigError
from clipkit.export.checks import Samples, max_difference, select_texts
from clipkit.export.open_clip import store_tokenizer
from clipkit.export.transformers import write_clip_tokenizer
from clipkit.files.terminal import counted
from clipkit.formats.graph import open_graph
from clipkit.model.clip import CLIP
from clipkit.model.tokenizer import ClassTokenizer, ClipTokenizer
from clipkit.model.towers import Padded, normalize_halves

OPSET = 20  # the first with GELU as one node
CONFIG, VISUAL, TEXTUAL = "onnx_config.json", "visual.onnx", "textual.onnx"
FLOAT32 = ".float32"  # folder of the graphs before quantization, removed after the comparison
_INSIDE = 3 * 2**29  # maximum size of weights stored in the graph's file, in bytes
_BATCHES = (1, 3, 8)  # batch sizes used by the check
_QUANTIZED = ("MatMul", "Gemm", "Gather")
_ROUNDS = 7


def find_obstacle(model: CLIP) -> str:
    """Whether the tower of another library can be exported is only known after trying."""
    if model.architecture.vision.budget is not None:
        return "an ONNX graph has images of one size, and the image tower reads images of variable size"
    return "" if any(True for _ in model.visual.parameters()) else "its image tower has no weights"


class _Normalized(nn.Module):
    """A tower with unit-norm output; with ``halves``, those of its output have equal norms."""

    def __init__(self, tower: nn.Module, *, halves: bool = False) -> None:
        super().__init__()
        self.tower, self.halves = tower, halves

    def forward(self, x: Tensor) -> Tensor:
        """(B, …) → (B, O)."""
        out = self.tower(x)
        return F.normalize(normalize_halves(out) if self.halves else out, dim=-1)


class _OwnTextEncoder(nn.Module):
    """The text transformer of a plain CLIP without packing texts by length, which a graph cannot express."""

    def __init__(self, model: CLIP) -> None:
        super().__init__()
        self.token_embedding, self.positional_embedding = model.token_embedding, model.positional_embedding
        self.transformer, self.ln_final = model.transformer, model.ln_final
        self.text_projection = model.text_projection
        self.causal = model.architecture.text.is_causal

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, L) → (B, O)."""
        x = self.token_embedding(input_ids) + self.positional_embedding[: input_ids.shape[1]]  # (B, L, D)
        read = self.ln_final(self.transformer(x, Padded.from_texts(input_ids, causal=self.causal)))  # (B, D)
        return F.normalize(read @ self.text_projection, dim=-1)


def write_model(model: CLIP, tensors: Mapping[str, Tensor], folder: Path) -> list[str]:
    """Write the graphs, their configuration and tokenizer; return the names of the files.

    The model must be in evaluation mode, with float32 weights on the CPU.
    """
    size, shape = model.preprocess.image_size, model.architecture.text
    length, classes = shape.context_length, list(shape.classes)
    halves = model.architecture.distilled
    text = _OwnTextEncoder(model) if model.text is None else _Normalized(model.text, halves=halves)
    names = _write_graph(
        _Normalized(model.visual),
        torch.zeros(2, 3, size, size),
        {0: "batch"},
        ("pixel_values", "image_embeds"),
        folder / VISUAL,
    )
    names += _write_graph(
        text,
        model.tokenizer(select_texts(model)[:2]),
        {0: "batch", 1: "tokens"} if shape.any_length else {0: "batch"},
        ("input_ids", "text_embeds"),
        folder / TEXTUAL,
    )
    config = {
        "opset": OPSET,
        "weights": "float32",
        "image": {
            "file": VISUAL,
            "input": {"name": "pixel_values", "dtype": "float32", "shape": ["batch", 3, size, size]},
            "output": {"name": "image_embeds", "dtype": "float32"},
        },
        "text": {
            "file": TEXTUAL,
            "input": {
                "name": "input_ids",
                "dtype": "int64",
                "shape": ["batch", "tokens" if shape.any_length else length],
            },
            "output": {"name": "text_embeds", "dtype": "float32"},
        },
        "embed_dim": model.architecture.embed_dim,
        "preprocess": model.preprocess.to_dict(),
        "tokenizer": None if classes else "tokenizer.json",
        **({"classes": classes} if classes else {}),
        "context_length": length,
        "logit_scale": float(model.logit_scale.detach().exp()),
        "logit_bias": None if model.logit_bias is None else float(model.logit_bias.detach()),
    }
    tokenizer = [] if classes else store_tokenizer(model, folder) or write_clip_tokenizer(folder)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return [*names, CONFIG, *tokenizer]


@torch.no_grad()
def _write_graph(
    encoder: nn.Module, example: Tensor, dynamic: dict[int, str], names: tuple[str, str], path: Path
) -> list[str]:
    logger = logging.getLogger("onnxscript")
    level = logger.level
    logger.setLevel(logging.ERROR)  # hide messages about missed optimizations
    try:
        program = torch.onnx.export(
            encoder.eval(),
            (example,),
            input_names=names[:1],
            output_names=names[1:],
            opset_version=OPSET,
            dynamic_shapes=(dynamic,),
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        for graph in (program.model.graph, *program.model.functions.values()):
            for node in graph:
                node.metadata_props.clear()  # contains paths on this machine
        outside = sum(t.numel() * t.element_size() for t in encoder.state_dict().values()) > _INSIDE
        program.save(path, external_data=outside)
    except torch.onnx.OnnxExporterError as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(f"torch cannot export this {path.stem} tower to ONNX: {first}") from error
    finally:
        logger.setLevel(level)
    return [path.name, *([f"{path.name}.data"] if outside else [])]


def write_model_int8(model: CLIP, tensors: Mapping[str, Tensor], folder: Path) -> list[str]:
    """Write the graphs with int8 weights; otherwise as ``write_model``."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    before, written = folder / FLOAT32, []
    before.mkdir()
    names = write_model(model, tensors, before)
    for name in (VISUAL, TEXTUAL):
        outside = f"{name}.data" in names
        logging.disable(logging.WARNING)  # hide advice for static quantization
        try:
            quantize_dynamic(
                before / name,
                folder / name,
                op_types_to_quantize=list(_QUANTIZED),
                per_channel=True,
                # weights of 7 bits, because sums of products of 8 bits saturate on CPUs without VNNI
                reduce_range=True,
                weight_type=QuantType.QInt8,
                use_external_data_format=outside,
            )
        finally:
            logging.disable(logging.NOTSET)
        written += [name, f"{name}.data"] if outside else [name]
    config = json.loads((before / CONFIG).read_text(encoding="utf-8")) | {"weights": "int8"}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return [*written, CONFIG, *move_tokenizer(names, before, folder)]


def move_tokenizer(names: Sequence[str], source: Path, folder: Path) -> list[str]:
    """Move the files of an export other than the graphs and their configuration; return the names of these."""
    others = [
        name
        for name in names
        if not name.startswith(("visual.", "textual.", "onnx_config.", "openvino_config."))
    ]
    for name in others:
        (source / name).replace(folder / name)
    return others


def measure_difference(model: CLIP, folder: Path, samples: Samples, *, suffix: str = ".onnx") -> float:
    """Run the graphs at several batch sizes; return the largest difference of unit-norm embeddings."""
    largest = 0.0
    for batch in _BATCHES:
        images, texts = _run_graphs(model, folder, samples, batch, suffix)
        largest = max(largest, max_difference(images, samples.image_embeddings[:batch]))
        largest = max(largest, max_difference(texts, samples.text_embeddings[:batch]))
    return largest


def measure_difference_int8(model: CLIP, folder: Path, samples: Samples, *, suffix: str = ".onnx") -> float:
    """Run the graphs; return 1 − the lowest cosine similarity of an embedding to clipkit's, infinite for NaN."""
    images, texts = _run_graphs(model, folder, samples, len(samples.texts), suffix)
    cosines = torch.cat(
        [(images * samples.image_embeddings).sum(-1), (texts * samples.text_embeddings).sum(-1)]
    )
    return float((1 - cosines).max().nan_to_num(nan=torch.inf))


def compare_model_int8(model: CLIP, folder: Path, samples: Samples, *, suffix: str = ".onnx") -> str:
    """Describe size and speed before and after quantization, and remove the graphs in float32.

    Both graphs run in turn on the same inputs and cores; times are medians.
    """
    lines = []
    for name, kind, values in (
        ("visual", "images", samples.pixels.numpy()),
        ("textual", "texts", model.tokenizer(samples.texts).numpy()),
    ):
        folders = (folder / FLOAT32, folder)
        sizes = [sum(path.stat().st_size for path in inner.glob(f"{name}.*")) / 1e6 for inner in folders]
        graphs = [open_graph(inner / f"{name}{suffix}") for inner in folders]
        times: list[list[float]] = [[], []]
        for _ in range(_ROUNDS):
            for graph, milliseconds in zip(graphs, times, strict=True):
                begun = time.perf_counter()
                graph.run(values)
                milliseconds.append(1e3 * (time.perf_counter() - begun))
        before, after = (median(milliseconds[1:]) for milliseconds in times)  # without the first round
        speed = f"{before:.1f} → {after:.1f} ms for {len(samples.texts)} {kind}"
        lines.append(f"{name}{suffix} {sizes[0]:.1f} → {sizes[1]:.1f} MB, {speed}")
    shutil.rmtree(folder / FLOAT32)
    return f"{'; '.join(lines)} (float32 → int8, {counted(torch.get_num_threads(), 'thread')})"


def _run_graphs(
    model: CLIP, folder: Path, samples: Samples, batch: int, suffix: str
) -> tuple[Tensor, Tensor]:
    tokens = model.tokenizer(samples.texts[:batch])  # trimmed to the longest text if the tower allows it
    images = open_graph(folder / f"visual{suffix}").run(samples.pixels[:batch].numpy())
    texts = open_graph(folder / f"textual{suffix}").run(tokens.numpy())
    return torch.from_numpy(images), torch.from_numpy(texts)


_EXAMPLE = """
import json
from pathlib import Path
import numpy as np
import {runtime}
from PIL import Image
{import}
folder = Path("{folder}")
config = json.loads((folder / "{config}").read_text())
{prepare}visual, textual = (
    {open}
    for kind in ("image", "text")
)
{resize}
values = (np.asarray(image.convert("RGB"), np.float32) / 255 - how["mean"]) / how["std"]
pixels = values.transpose(2, 0, 1)[None].astype(np.float32)
{tokens}
image = {visual}[0]
text = {textual}[0]
logits = config["logit_scale"] * image @ text.T
probabilities = np.exp(logits - logits.max())
print(probabilities / probabilities.sum())
"""
ONNXRUNTIME_CODE = {  # what fills the gaps of the example
    "runtime": "onnxruntime",
    "config": CONFIG,
    "prepare": "",
    "open": 'onnxruntime.InferenceSession(folder / config[kind]["file"], providers=["CPUExecutionProvider"])',
    "visual": 'visual.run(None, {"pixel_values": pixels})',
    "textual": 'textual.run(None, {"input_ids": ids})',
}
_OPEN_IMAGE = """
image, how = Image.open("cat.jpg"), config["preprocess"]
size, resample = how["image_size"], Image.Resampling[how["interpolation"].upper()]
"""
_RESIZES = {  # by resize mode
    "shortest": """
short, (width, height) = min(image.size), image.size
wide, high = size * width // short, size * height // short
left, top = round((wide - size) / 2), round((high - size) / 2)
image = image.resize((wide, high), resample).crop((left, top, left + size, top + size))
""",
    "squash": """
image = image.resize((size, size), resample)
""",
    "longest": """
long, (width, height) = max(image.size), image.size
wide, high = max(1, round(size * width / long)), max(1, round(size * height / long))
canvas = Image.new("RGB", (size, size), (how["fill_color"],) * 3)
canvas.paste(image.resize((wide, high), resample), ((size - wide) // 2, (size - high) // 2))
image = canvas
""",
}
_CLIP_TOKENS = """
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
tokenizer.enable_truncation(config["context_length"])
tokenizer.enable_padding(pad_id=0, pad_token="!", length={length})
ids = np.array([one.ids for one in tokenizer.encode_batch(["a photo of a cat", "a photo of a dog"])])
"""
_LIBRARY_TOKENS = """
texts = ["a photo of a cat", "a photo of a dog"]
ids = AutoTokenizer.from_pretrained(folder)(
    texts, padding="max_length", truncation=True, max_length=config["context_length"], return_tensors="np"
)["input_ids"]
"""
_CLASSES = """
ids = np.arange(len(config["classes"]))[:, None]  # in the order of these names
"""


def format_example(model: CLIP, *, parts: Mapping[str, str] = ONNXRUNTIME_CODE) -> str:
    """Return code that loads the export and compares an image with texts or classes; ``parts`` fills its gaps."""
    tokens, needed = _LIBRARY_TOKENS, "from transformers import AutoTokenizer\n"
    if isinstance(model.tokenizer, ClassTokenizer):
        tokens, needed = _CLASSES, ""
    if isinstance(model.tokenizer, ClipTokenizer):
        length = "None" if model.tokenizer.trim else 'config["context_length"]'
        tokens, needed = _CLIP_TOKENS.replace("{length}", length), "from tokenizers import Tokenizer\n"
    resize = _OPEN_IMAGE.strip() + "\n" + _RESIZES[model.preprocess.resize_mode].strip()
    code = _EXAMPLE
    for gap, text in {**parts, "import": needed, "resize": resize, "tokens": tokens.strip()}.items():
        code = code.replace(f"{{{gap}}}", text)
    return code


format_example_int8 = format_example

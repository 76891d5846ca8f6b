"""Compare features with those that open_clip stored in November 2022, on the same images, texts and random weights.

    git -C open_clip archive 8e3df0e~1 tests/data src/open_clip/model_configs | tar x -C FOLDER
    pip install --no-deps --target PACKAGES open-clip-torch==2.7.0 timm==0.6.11
    python -m bench.published_features FOLDER --packages PACKAGES [--only ViT-B-32 RN50]

Until the commit above, open_clip kept regression data: random images and a text, and the features of 42
architectures with random weights of seed 0. In a process of its own, open_clip 2.7.0 builds these weights again
with the timm of that time. clipkit reads them from a folder in open_clip's layout, and encodes the stored images
and the stored text. Three differences are recorded: of open_clip 2.7.0 and of clipkit from the stored features,
and of clipkit from open_clip 2.7.0.

The stored features were computed in training mode, so batch norm uses the statistics of the single image.
Stochastic depth (Swin) draws from the generator; the third difference is without it. Text towers of the hub
(RoBERTa, XLM-RoBERTa, mT5) need tokenizers from the network: only the image towers of these five are compared.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import clipkit
from clipkit.model.preprocess import pixels_and_traits

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results") / "published_features.json"
REGRESSION_DATA = Path("tests/data")
CONFIGS = Path("src/open_clip/model_configs")
# two processes hold the parameters in float32: 20 and 37 GB
TOO_LARGE = ("ViT-bigG-14", "ViT-e-14")
KINDS = ("image", "text")
BUILT = "built "


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Largest absolute differences of unit-norm features of an image or a text; None if not compared."""

    name: str
    kind: str
    open_clip_to_stored: float | None = None
    clipkit_to_stored: float | None = None
    clipkit_to_open_clip: float | None = None
    note: str = ""


def build_reference(folder: Path, name: str, out: Path) -> None:
    """Write open_clip 2.7.0's weights of seed 0 and its features, in training mode and without stochastic depth.

    Runs in a process whose path begins with the folder of packages. The configurations are those of the commit,
    because some were added after 2.7.0.
    """
    # Python 3.11 refuses the dataclasses of this module of timm 0.6.11, which no architecture needs
    sys.modules["timm.models.maxxvit"] = ModuleType("timm.models.maxxvit")
    import open_clip

    config = json.loads((folder / CONFIGS / f"{name}.json").read_text())
    if "hf_model_name" in config["text_cfg"]:
        # the image tower is built first, so the text tower has no effect on its weights
        config["text_cfg"] = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 1}
    (out / "compared.json").write_text(json.dumps(config))
    open_clip.add_model_config(out / "compared.json")  # a second time replaces the first
    torch.manual_seed(0)
    model, _, preprocess = open_clip.create_model_and_transforms(
        "compared", pretrained=None, precision="fp32"
    )
    settings = {"model_cfg": config, "preprocess_cfg": {}}
    (out / "open_clip_config.json").write_text(json.dumps(settings))
    torch.save(rename_swin(model.state_dict()), out / "open_clip_pytorch_model.bin")
    images, texts = read_inputs(folder, config["vision_cfg"]["image_size"])
    pixels = torch.stack([preprocess(image) for image in images])
    tokens = open_clip.tokenize(texts)
    features = {}
    for mode in ("stored", "open_clip"):
        if mode == "open_clip":
            select_mode(model)
        with torch.no_grad():
            # in the order of the stored features: stochastic depth draws from the same generator
            features[f"text_{mode}"] = model.encode_text(tokens)
            features[f"image_{mode}"] = model.encode_image(pixels)
    torch.save(features, out / "features.pt")


def rename_swin(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename a Swin's tensors to those of timm since 0.9, whose stages begin, not end, with the smaller grid."""
    renamed = {}
    for name, tensor in tensors.items():
        if not name.endswith(("relative_position_index", "attn_mask")):
            number = r"(trunk\.layers\.)(\d)(?=\.downsample)"
            renamed[re.sub(number, lambda match: f"{match[1]}{int(match[2]) + 1}", name)] = tensor
    return renamed


def read_inputs(folder: Path, side: int) -> tuple[list[Image.Image], list[str]]:
    """Return the stored images of a size and the stored texts."""
    torch.serialization.add_safe_globals([Image.Image])
    inputs = folder / REGRESSION_DATA / "input"
    [images] = torch.load(inputs / f"random_image_{side}_{side}.pt", weights_only=True)
    [texts] = torch.load(inputs / "random_text.pt", weights_only=True)
    return images, texts


def select_mode(model: nn.Module) -> None:
    """Select evaluation mode, except for batch norm, whose running statistics are those of no data yet."""
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()


def build_on_request(folder: Path, out: Path) -> None:
    """Build the architecture that each line of standard input names, and print its name when done."""
    for line in sys.stdin:
        build_reference(folder, line.strip(), out)
        print(f"{BUILT}{line.strip()}", flush=True)


@contextmanager
def open_builder(folder: Path, packages: Path, out: Path) -> Iterator[Callable[[str], None]]:
    """Start a process with open_clip 2.7.0; the function builds an architecture in it."""
    command = [sys.executable, "-m", "bench.published_features", str(folder), "--build", str(out)]
    environment = {**os.environ, "PYTHONPATH": f"{packages}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        requests, answers = process.stdin, process.stdout

        def build(name: str) -> None:
            requests.write(f"{name}\n")
            requests.flush()
            if not any(line == f"{BUILT}{name}\n" for line in answers):
                sys.exit(f"open_clip 2.7.0 could not build {name}")

        yield build
        requests.close()


def compare(folder: Path, build: Callable[[str], None], work: Path, name: str) -> list[Differences]:
    """Compare an architecture's features of an image and of a text."""
    if name in TOO_LARGE:
        return [Differences(name=name, kind=kind, note="does not fit into memory") for kind in KINDS]
    config = json.loads((folder / CONFIGS / f"{name}.json").read_text())
    images, texts = read_inputs(folder, config["vision_cfg"]["image_size"])
    build(name)
    model = clipkit.load(work)
    references: dict[str, Tensor] = torch.load(work / "features.pt", weights_only=True)
    clipkit_features = {"text": clipkit.encode_text(texts, model)}
    select_mode(model)
    note = restore_heads(model) if config["vision_cfg"].get("timm_pool") == "abs_attn" else ""
    with torch.no_grad():
        pixels = torch.stack([pixels_and_traits(image, model.preprocess)[0] for image in images])
        clipkit_features["image"] = model.encode_image(pixels)
    results = []
    for kind in KINDS:
        if kind == "text" and "hf_model_name" in config["text_cfg"]:
            results.append(Differences(name=name, kind=kind, note="needs a tokenizer from the hub"))
            continue
        file = folder / REGRESSION_DATA / "output" / f"{name}_None_fp32_random_{kind}.pt"
        [stored] = torch.load(file, weights_only=True)
        results.append(
            Differences(
                name=name,
                kind=kind,
                open_clip_to_stored=measure_difference(references[f"{kind}_stored"], stored),
                clipkit_to_stored=measure_difference(clipkit_features[kind], stored),
                clipkit_to_open_clip=measure_difference(
                    clipkit_features[kind], references[f"{kind}_open_clip"]
                ),
                note=note if kind == "image" else "",
            )
        )
    return results


def restore_heads(model: nn.Module) -> str:
    """Give timm's attention pooling the 4 heads of timm 0.6.11; later versions have one per 64 elements."""
    from timm.layers.attention_pool2d import AttentionPool2d

    for module in model.modules():
        if isinstance(module, AttentionPool2d):
            note = f"4 heads of attention pooling, as in timm 0.6.11, instead of {module.num_heads}"
            module.num_heads = 4
            module.head_dim = module.embed_dim // 4
            module.scale = module.head_dim**-0.5
            return note
    raise AssertionError("the image tower has no attention pooling")


def measure_difference(features: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference of unit-norm features."""
    difference = F.normalize(features, dim=-1) - F.normalize(expected, dim=-1)
    return difference.abs().max().item()


def summarize(rows: list[Differences]) -> dict[str, Any]:
    """Count the outputs that open_clip 2.7.0 repeats to 1e-5, and state clipkit's largest difference from them."""
    compared = [row for row in rows if row.clipkit_to_open_clip is not None]
    repeated = [row for row in compared if (row.open_clip_to_stored or 0.0) < 1e-5]
    return {
        "outputs": len(rows),
        "compared": len(compared),
        "repeated_by_open_clip": len(repeated),
        "largest_open_clip_to_stored": max(
            (row.open_clip_to_stored or 0.0 for row in repeated), default=None
        ),
        "largest_clipkit_to_stored": max((row.clipkit_to_stored or 0.0 for row in repeated), default=None),
        "largest_clipkit_to_open_clip": max(
            (row.clipkit_to_open_clip or 0.0 for row in compared), default=None
        ),
    }


def write_record(rows: list[Differences]) -> None:
    """Write all figures so far, and keep those of architectures that earlier calls compared."""
    measured = {row.name for row in rows}
    if RESULTS.is_file():
        earlier = [Differences(**output) for output in json.loads(RESULTS.read_text())["outputs"]]
        rows = [*(row for row in earlier if row.name not in measured), *rows]
    versions = {"torch": torch.__version__, "timm": version("timm"), "open_clip": "2.7.0 with timm 0.6.11"}
    record = {"versions": versions, "summary": summarize(rows), "outputs": [asdict(row) for row in rows]}
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")


def get_width(folder: Path, name: str) -> int:
    """Return the width of an image tower; 64 for ResNets and backbones of timm without a width."""
    width = json.loads((folder / CONFIGS / f"{name}.json").read_text())["vision_cfg"].get("width", 64)
    assert isinstance(width, int)
    return width


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, help="tests/data and model_configs of open_clip's commit 8e3df0e~1"
    )
    parser.add_argument(
        "--packages", type=Path, help="where pip installed open-clip-torch 2.7.0 and timm 0.6.11"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these architectures")
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        build_on_request(options.folder, options.build)
        return
    if options.packages is None:
        parser.error("--packages is required")
    outputs = (options.folder / REGRESSION_DATA / "output").glob("*_None_fp32_random_image.pt")
    names = sorted(file.name.removesuffix("_None_fp32_random_image.pt") for file in outputs)
    names.sort(key=lambda name: get_width(options.folder, name))
    rows: list[Differences] = []
    with (
        tempfile.TemporaryDirectory() as work,
        open_builder(options.folder, options.packages, Path(work)) as build,
    ):
        for name in options.only or names:
            results = compare(options.folder, build, Path(work), name)
            rows += results
            for row in results:
                values = (row.open_clip_to_stored, row.clipkit_to_stored, row.clipkit_to_open_clip)
                figures = " ".join("-" if value is None else f"{value:.1e}" for value in values)
                print(f"{name:40} {row.kind:6} {figures} {row.note}", flush=True)
            write_record(rows)
    print(json.dumps(summarize(rows), indent=2))


if __name__ == "__main__":
    main()

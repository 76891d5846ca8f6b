"""Export to OpenVINO: ``visual.xml``, ``textual.xml``, their weights in ``.bin`` files, ``openvino_config.json``.

The graphs are those of the ONNX export, with the same inputs and outputs, and so is the content of the
configuration, see ``clipkit.export.onnx``.

``write_model_int8`` quantizes them with NNCF:

* images: weights and activations of matrix products and convolutions are int8. The ranges of activations are
  fixed: they are measured on images of the user, which should be like those that the model will see.
* texts: weights are int8, and ranges of activations are computed for each group of elements at run time, for which
  no texts are needed.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from clipkit.errors import CheckpointError, run_command
from clipkit.export import onnx
from clipkit.export.checks import normalize_pixels
from clipkit.formats.graph import import_openvino, open_openvino_core
from clipkit.model.clip import CLIP

CONFIG, VISUAL, TEXTUAL = "openvino_config.json", "visual.xml", "textual.xml"
_FILES = {onnx.VISUAL: VISUAL, onnx.TEXTUAL: TEXTUAL}  # by the name in an ONNX export
_GRAPH_FILES = (VISUAL, "visual.bin", TEXTUAL, "textual.bin")
# elements of an activation with one range; with 32, OpenVINO's default, texts take 1.15 times as long
_GROUP_SIZE = 128
_PIXELS = "pixels.npy"  # temporary file of normalized images to measure ranges on
_ATTEMPTS = 3
_OPENVINO_CODE = {
    "runtime": "openvino",
    "config": CONFIG,
    "prepare": "core = openvino.Core()\n",  # one for both graphs, see ``open_openvino_core``
    "open": """core.compile_model(
        folder / config[kind]["file"], "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )""",
    "visual": "visual(pixels)",
    "textual": "textual(ids)",
}

find_obstacle = onnx.find_obstacle
measure_difference = partial(onnx.measure_difference, suffix=".xml")
measure_difference_int8 = partial(onnx.measure_difference_int8, suffix=".xml")
compare_model_int8 = partial(onnx.compare_model_int8, suffix=".xml")
format_example = partial(onnx.format_example, parts=_OPENVINO_CODE)
format_example_int8 = format_example


def write_model(model: CLIP, tensors: Mapping[str, Tensor], folder: Path) -> list[str]:
    """Write the graphs, their configuration and tokenizer; return the names of the files.

    The model must be in evaluation mode, with float32 weights on the CPU.
    """
    core = open_openvino_core()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        names = onnx.write_model(model, tensors, Path(scratch))
        for source, file in _FILES.items():
            _save_graph(core.read_model(Path(scratch) / source), folder / file)
        config = json.loads((Path(scratch) / onnx.CONFIG).read_text(encoding="utf-8"))
        others = onnx.move_tokenizer(names, Path(scratch), folder)
    del config["opset"]
    for kind in ("image", "text"):
        config[kind]["file"] = _FILES[config[kind]["file"]]
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return [*_GRAPH_FILES, CONFIG, *others]


def write_model_int8(
    model: CLIP, tensors: Mapping[str, Tensor], folder: Path, *, images: Tensor
) -> list[str]:
    """Write the graphs with int8 weights; otherwise as ``write_model``.

    Args:
        images: (N, 3, S, S) uint8, preprocessed, on which the ranges of activations are measured.
    """
    before = folder / onnx.FLOAT32
    before.mkdir()
    names = write_model(model, tensors, before)
    np.save(before / _PIXELS, normalize_pixels(images, model).numpy())
    _run_quantization(before, folder)
    (before / _PIXELS).unlink()
    config = json.loads((before / CONFIG).read_text(encoding="utf-8")) | {"weights": "int8"}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return [*_GRAPH_FILES, CONFIG, *onnx.move_tokenizer(names, before, folder)]


def _run_quantization(before: Path, folder: Path) -> None:
    """Run ``_quantize_graphs`` in a process of its own, in which OpenVINO crashed once.

    NNCF also frees cores of OpenVINO, see ``open_openvino_core``.
    """
    command = [sys.executable, "-m", "clipkit.export.openvino", str(before), str(folder)]
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    status = 0
    for _ in range(_ATTEMPTS):
        process = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
        status = process.returncode
        if status > 0:
            cause = process.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
            raise CheckpointError(f"nothing was written: NNCF cannot quantize the model: {cause}")
        if status == 0:
            return
    raise CheckpointError(f"nothing was written: NNCF was ended by signal {-status} in {_ATTEMPTS} attempts")


def _quantize_graphs(before: Path, folder: Path) -> None:
    core = open_openvino_core()
    import nncf

    pixels = np.load(before / _PIXELS)
    visual = nncf.quantize(
        core.read_model(before / VISUAL),
        nncf.Dataset([image[None] for image in pixels]),
        subset_size=len(pixels),
        model_type=nncf.ModelType.TRANSFORMER,
    )
    textual = nncf.compress_weights(core.read_model(before / TEXTUAL), mode=nncf.CompressWeightsMode.INT8_SYM)
    textual.set_rt_info(str(_GROUP_SIZE), ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])
    _save_graph(visual, folder / VISUAL)
    _save_graph(textual, folder / TEXTUAL)


def _save_graph(graph: Any, path: Path) -> None:
    try:
        import_openvino().save_model(graph, path, compress_to_fp16=False)
    except RuntimeError as error:  # such as a full disk
        raise CheckpointError(f"OpenVINO cannot write {path.name}: {error}") from error


if __name__ == "__main__":
    run_command(partial(_quantize_graphs, Path(sys.argv[1]), Path(sys.argv[2])))

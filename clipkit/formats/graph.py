"""Load an ONNX or OpenVINO export of clipkit: encoders that onnxruntime or OpenVINO runs on the CPU.

They give embeddings to inference and evaluation. They have no weights to train, to interpolate or to export.

onnxruntime computes in the dtypes of the graph. OpenVINO computes graphs with float32 weights in bfloat16 under
``torch.autocast``, and otherwise in float32. In graphs with int8 weights, OpenVINO chooses the dtype of what is not
int8.

Letters in shape comments: B batch, L tokens, S image side, O embedding dimension.
"""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from clipkit.errors import CheckpointError, ConfigError
from clipkit.formats.checkpoint import read_json
from clipkit.model.architectures import Architecture, ImageArchitecture, TextArchitecture, TextTower
from clipkit.model.clip import CLIP
from clipkit.model.preprocess import Preprocess
from clipkit.model.tokenizer import ANY_END, ClipTokenizer, open_folder_tokenizer

# configuration of an export -> the runtime
_CONFIGS = {"onnx_config.json": "ONNX", "openvino_config.json": "OpenVINO"}


class _GraphConfig(msgspec.Struct):
    file: str
    input: dict[str, Any]


class _Config(msgspec.Struct):
    """The content of ``onnx_config.json`` and ``openvino_config.json``, see ``clipkit.export.onnx``."""

    image: _GraphConfig
    text: _GraphConfig
    embed_dim: int
    preprocess: dict[str, Any]
    context_length: int
    logit_scale: Annotated[float, msgspec.Meta(gt=0)]
    logit_bias: float | None = None
    weights: str = "float32"
    classes: list[str] = []


class Graph(Protocol):
    """A graph with one input and one output (B, O) of float32.

    Attributes:
        input_shape: size of each dimension; None for those of any size.
        output_shape: likewise.
    """

    input_shape: tuple[int | None, ...]
    output_shape: tuple[int | None, ...]

    def __init__(self, file: Path) -> None: ...

    def run(self, values: npt.NDArray[Any], *, in_bfloat16: bool = False) -> npt.NDArray[np.float32]:
        """Compute the output; a graph that cannot compute in bfloat16 computes as without ``in_bfloat16``."""
        ...


class _OnnxGraph:
    """A graph that onnxruntime computes, with as many threads as torch has."""

    def __init__(self, file: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        options.intra_op_num_threads = torch.get_num_threads()
        # threads that wait for work after a run would take the cores from torch
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self._session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        (feed,) = self._session.get_inputs()
        (result,) = self._session.get_outputs()
        self._feed = feed.name
        # dimensions of any size have names
        self.input_shape = tuple(size if isinstance(size, int) else None for size in feed.shape)
        self.output_shape = tuple(size if isinstance(size, int) else None for size in result.shape)

    def run(self, values: npt.NDArray[Any], *, in_bfloat16: bool = False) -> npt.NDArray[np.float32]:
        rows: npt.NDArray[np.float32]
        (rows,) = self._session.run(None, {self._feed: values})
        return rows


class _OpenVinoGraph:
    """A graph that OpenVINO computes, with as many threads as torch has; compiled when first run in a dtype."""

    def __init__(self, file: Path) -> None:
        self._core = open_openvino_core()
        with file.open("rb") as content:
            if content.read(5) != b"<?xml":  # OpenVINO would try to read it in other formats
                raise ValueError("not a graph of OpenVINO")
        self._model = self._core.read_model(file)
        self.input_shape, self.output_shape = (
            tuple(None if size.is_dynamic else size.get_length() for size in port.get_partial_shape())
            for port in (self._model.input(), self._model.output())
        )
        self._is_quantized = self._model.has_rt_info("nncf")
        self._threads = torch.get_num_threads()  # differs between Python's threads, which call ``run``
        self._requests: dict[bool, Any] = {}  # by whether in bfloat16

    def run(self, values: npt.NDArray[Any], *, in_bfloat16: bool = False) -> npt.NDArray[np.float32]:
        in_bfloat16 = in_bfloat16 and not self._is_quantized
        if in_bfloat16 not in self._requests:
            options: dict[str, Any] = {
                "INFERENCE_NUM_THREADS": self._threads,
                "NUM_STREAMS": 1,
                # several processes would be bound to the same cores
                "ENABLE_CPU_PINNING": False,
            }
            if not self._is_quantized:
                options["INFERENCE_PRECISION_HINT"] = "bf16" if in_bfloat16 else "f32"
            compiled = self._core.compile_model(self._model, "CPU", options)
            self._requests[in_bfloat16] = compiled.create_infer_request()
        rows: npt.NDArray[np.float32] = self._requests[in_bfloat16].infer([values], share_inputs=True)[0]
        return rows


def import_openvino() -> Any:
    """Import OpenVINO, which otherwise reports its use to its authors when it is imported."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # it does without this package
    import openvino

    return openvino


@cache
def open_openvino_core() -> Any:
    """Return the core of this process, which is never freed.

    The CPU plugin gives the calling thread a stack for signal handlers. If two cores are freed in the order of
    their creation, this stack is freed but stays in use, and the next signal with a handler in Python ends the
    process.
    """
    core = import_openvino().Core()
    # files may be replaced while their graphs are in use
    core.set_property({"ENABLE_MMAP": False})
    return core


# suffix of a graph's file -> the class that runs the graph, and the extra with the library
_RUNTIMES: dict[str, tuple[type[Graph], str]] = {
    ".onnx": (_OnnxGraph, "export"),
    ".xml": (_OpenVinoGraph, "openvino"),
}


def open_graph(file: Path) -> Graph:
    """Open a graph with the runtime of its suffix.

    Raises:
        ConfigError: the runtime is not installed.
        CheckpointError: the file is not a graph.
    """
    if file.suffix not in _RUNTIMES:
        raise CheckpointError(f"{file} is not a graph: expected {' or '.join(_RUNTIMES)}")
    graph, extra = _RUNTIMES[file.suffix]
    try:
        return graph(file)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{file} needs {error.name}: pip install -e '.[{extra}]'") from error
    except Exception as error:  # errors of onnxruntime have no common base
        raise CheckpointError(f"cannot read {file}: {_find_cause(error)}") from error


def _find_cause(error: Exception) -> str:
    """Return the first line of a message, or the last one of OpenVINO's, which begin with lines of its source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines[1:] and lines[0].startswith("Exception from"):
        return lines[-1]
    return lines[0] if lines else type(error).__name__


@dataclass(frozen=True, kw_only=True)
class _GraphTower:
    """A graph; its digest takes the place of weights in the model's hash."""

    digest: str
    file: str = field(repr=False, compare=False)
    has_blocks = False

    @property
    def description(self) -> str:
        return f"a graph, {Path(self.file).name}"

    def build(self, embed_dim: int, *, quick_gelu: bool) -> nn.Module:
        return _GraphModule(Path(self.file), embed_dim)


@dataclass(frozen=True, kw_only=True)
class _GraphVision(_GraphTower, ImageArchitecture):
    image_size: int


@dataclass(frozen=True, kw_only=True)
class _GraphText(_GraphTower, TextArchitecture):
    context_length: int


class _GraphModule(nn.Module):
    """A graph as a module: computes on the CPU, returns float32 on the input's device."""

    def __init__(self, file: Path, embed_dim: int) -> None:
        super().__init__()
        self.graph = open_graph(file)
        self.embed_dim = embed_dim
        self._running = Lock()

    def forward(self, values: Tensor) -> Tensor:
        """Normalized images (B, 3, S, S) or tokens (B, L) → (B, O)."""
        if self.training and torch.is_grad_enabled():
            raise ConfigError(
                "an ONNX or OpenVINO export cannot be trained: use the weights it was made from"
            )
        device = values.device.type
        in_bfloat16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
        if len(values) == 0:  # some operations refuse empty batches
            return torch.zeros(0, self.embed_dim, device=values.device)
        if values.is_floating_point():
            values = values.float()
        array = values.detach().cpu().contiguous().numpy()
        with self._running:  # batches at a time would share the graph's threads, which takes longer
            rows = self.graph.run(array, in_bfloat16=in_bfloat16)
        return torch.from_numpy(rows).to(values.device)


def find_graph_config(folder: Path) -> Path | None:
    """Return the configuration of an export to ONNX or OpenVINO in a folder, None without one."""
    return next((folder / name for name in _CONFIGS if (folder / name).is_file()), None)


def load_graphs(path: Path) -> CLIP:
    """Load a folder that ``clipkit export --to onnx`` or ``--to openvino`` wrote, by its configuration."""
    folder = path.parent
    try:
        config = msgspec.convert(read_json(path), _Config)
        image_graph = folder / Path(config.image.file).name
        vision = _GraphVision(
            image_size=int(config.preprocess["image_size"]),
            file=str(image_graph),
            digest=_hash_graph(image_graph),
        )
        text_graph = folder / Path(config.text.file).name
        text = _GraphText(
            context_length=config.context_length, file=str(text_graph), digest=_hash_graph(text_graph)
        )
        trim = isinstance(config.text.input["shape"][1], str)
    except (msgspec.ValidationError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is invalid: {error!r}") from error
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
    clips = TextTower(width=64, layers=1, heads=1, context_length=config.context_length)  # for its length
    if config.classes or not isinstance(open_folder_tokenizer(folder, clips, ANY_END), ClipTokenizer):
        raise CheckpointError(
            f"{folder}: clipkit reads ONNX and OpenVINO exports of models with CLIP's tokenizer only"
        )
    model = CLIP(
        Architecture(
            embed_dim=config.embed_dim, vision=vision, text=text, logit_bias=config.logit_bias is not None
        ),
        preprocess=Preprocess.from_dict(config.preprocess),
        tokenizer=ClipTokenizer(context_length=config.context_length, trim=trim),
    )
    side = model.preprocess.image_size
    for path_to_graph, module, shape in (
        (image_graph, model.visual, (None, 3, side, side)),
        (text_graph, model.text, (None, None if trim else config.context_length)),
    ):
        assert isinstance(module, _GraphModule)
        _check_shape(path_to_graph, "input", module.graph.input_shape, shape)
        _check_shape(path_to_graph, "output", module.graph.output_shape, (None, config.embed_dim))
    with torch.no_grad():
        model.logit_scale.fill_(config.logit_scale).log_()
        if model.logit_bias is not None:
            model.logit_bias.fill_(config.logit_bias or 0.0)
    model.origin = f"{_CONFIGS[path.name]} export {folder} ({config.weights})"
    return model.eval()


def _check_shape(file: Path, name: str, shape: Sequence[int | None], expected: Sequence[int | None]) -> None:
    is_same = len(shape) == len(expected)
    for size, expected_size in zip(shape, expected, strict=False):
        if size is not None and expected_size is not None and size != expected_size:
            is_same = False
    if not is_same:
        raise CheckpointError(
            f"{file} does not match its configuration: the {name} has the shape {_format_shape(shape)} instead of "
            f"{_format_shape(expected)}"
        )


def _format_shape(shape: Sequence[int | None]) -> str:
    sizes = ["any" if size is None else str(size) for size in shape]
    return " x ".join(sizes)


def _hash_graph(file: Path) -> str:
    digest = hashlib.sha256()
    for path in (file, file.with_name(f"{file.name}.data"), file.with_suffix(".bin")):
        if path is file or path.exists():
            with path.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:32]

"""Load an ONNX export of clipkit: encoders that onnxruntime runs on the CPU, float32 or int8.

They give embeddings to inference and evaluation. They have no weights to train, to interpolate or to export.

Letters in shape comments: B batch, L tokens, S image side, O embedding dimension.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from clipkit.errors import CheckpointError, ConfigError
from clipkit.formats.checkpoint import read_json
from clipkit.model.architectures import Architecture, ImageArchitecture, TextArchitecture, TextTower
from clipkit.model.clip import CLIP
from clipkit.model.preprocess import Preprocess
from clipkit.model.tokenizer import ANY_END, ClipTokenizer, open_folder_tokenizer

ONNX_CONFIG = "onnx_config.json"


class _Graph(msgspec.Struct):
    file: str
    input: dict[str, Any]


class _Config(msgspec.Struct):
    """What ``onnx_config.json`` says, see ``clipkit.export.onnx``."""

    image: _Graph
    text: _Graph
    embed_dim: int
    preprocess: dict[str, Any]
    context_length: int
    logit_scale: float
    logit_bias: float | None = None
    weights: str = "float32"
    classes: list[str] = []


@dataclass(frozen=True, kw_only=True)
class _OnnxTower:
    """A graph; its digest takes the place of weights in the model's hash."""

    digest: str
    file: str = field(repr=False, compare=False)
    has_blocks = False

    @property
    def description(self) -> str:
        return "an ONNX graph"

    def build(self, embed_dim: int, *, quick_gelu: bool) -> nn.Module:
        return _Session(Path(self.file))


@dataclass(frozen=True, kw_only=True)
class _OnnxVision(_OnnxTower, ImageArchitecture):
    image_size: int


@dataclass(frozen=True, kw_only=True)
class _OnnxText(_OnnxTower, TextArchitecture):
    context_length: int


class _Session(nn.Module):
    """A graph with one input and one output (B, O); runs on the CPU, returns float32 on the input's device."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        try:
            self.session = open_session(file)
            self._running = Lock()
            (self.feed,) = (entry.name for entry in self.session.get_inputs())
        except ModuleNotFoundError as error:
            raise ConfigError(f"{file} needs onnxruntime: pip install -e '.[export]'") from error
        except Exception as error:  # its errors have no common base
            cause = str(error).strip().split("\n")[0]
            raise CheckpointError(f"cannot read {file}: {cause}") from error

    def forward(self, values: Tensor) -> Tensor:
        """Normalized images (B, 3, S, S) or tokens (B, L) → (B, O)."""
        if self.training and torch.is_grad_enabled():
            raise ConfigError("an ONNX export cannot be trained: use the weights that it was made from")
        if values.is_floating_point():
            values = values.float()
        with self._running:  # batches at a time would share the session's threads, which takes longer
            (rows,) = self.session.run(None, {self.feed: values.detach().cpu().numpy()})
        return torch.from_numpy(rows).to(values.device)


def open_session(file: Path) -> Any:
    """Open a graph with onnxruntime, for as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = torch.get_num_threads()
    # threads that wait for work after a run would take the cores from torch
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def load_onnx(folder: Path) -> CLIP:
    """Load a folder that ``clipkit export --to onnx`` wrote."""
    try:
        config = msgspec.convert(read_json(folder / ONNX_CONFIG), _Config)
        image_graph = folder / Path(config.image.file).name
        vision = _OnnxVision(
            image_size=int(config.preprocess["image_size"]),
            file=str(image_graph),
            digest=_hash_graph(image_graph),
        )
        text_graph = folder / Path(config.text.file).name
        text = _OnnxText(
            context_length=config.context_length, file=str(text_graph), digest=_hash_graph(text_graph)
        )
        trim = isinstance(config.text.input["shape"][1], str)
    except (msgspec.ValidationError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / ONNX_CONFIG} is invalid: {error!r}") from error
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
    clips = TextTower(width=64, layers=1, heads=1, context_length=config.context_length)  # for its length
    if config.classes or not isinstance(open_folder_tokenizer(folder, clips, ANY_END), ClipTokenizer):
        raise CheckpointError(f"{folder}: clipkit reads ONNX exports of models with CLIP's tokenizer only")
    model = CLIP(
        Architecture(
            embed_dim=config.embed_dim, vision=vision, text=text, logit_bias=config.logit_bias is not None
        ),
        preprocess=Preprocess.from_dict(config.preprocess),
        tokenizer=ClipTokenizer(context_length=config.context_length, trim=trim),
    )
    with torch.no_grad():
        model.logit_scale.fill_(config.logit_scale).log_()
        if model.logit_bias is not None:
            model.logit_bias.fill_(config.logit_bias or 0.0)
    model.origin = f"ONNX export {folder} ({config.weights})"
    return model.eval()


def _hash_graph(file: Path) -> str:
    digest = hashlib.sha256()
    for path in (file, file.with_name(f"{file.name}.data")):
        if path is file or path.exists():
            with path.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:32]

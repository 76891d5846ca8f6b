"""The libraries to export to. Importing this module does not import torch, nor the libraries."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clipkit.export.checks import Samples
    from clipkit.model.clip import CLIP


@dataclass(frozen=True, kw_only=True)
class ExportTarget:
    """A library to export to.

    Attributes:
        display: name in the model card.
        package: import name of the package that loads the export.
        distribution: name of that package on PyPI.
        obstacle: returns why a model of RGB images cannot be exported, or "".
        write: writes a model with float32 weights on the CPU to a folder: (model, tensors, folder) → names of the
            files. If the target is ``calibrated``, its argument ``images`` is (N, 3, S, S) uint8, preprocessed.
        check: loads that folder with the library; returns the largest difference of embeddings, or 1 − their lowest
            cosine similarity if ``approximate``.
        compare: describes speed and size after the check; None for nothing.
        example: returns Python code for the model card that loads the folder ``{folder}``.
        needs: import names of packages required by ``write``.
        extra: extra of clipkit with these packages.
        apart: targets that need separate folders.
        loads: whether ``clipkit.load`` can read the folder.
        resizes: whether the library resizes images differently and does not repair texts.
        channels: whether it can represent models of other than RGB images.
        approximate: whether embeddings differ by more than rounding, because weights are quantized.
        calibrated: whether ``write`` measures ranges of values on images.
    """

    display: str
    package: str
    distribution: str
    obstacle: "Callable[[CLIP], str]"
    write: "Callable[..., list[str]]"
    check: "Callable[[CLIP, Path, Samples], float]"
    example: "Callable[[CLIP], str]"
    needs: tuple[str, ...] = ()
    extra: str = "export"
    apart: frozenset[str] = frozenset()
    default: bool = False
    texts: bool = True
    loads: bool = False
    resizes: bool = False
    approximate: bool = False
    calibrated: bool = False
    channels: bool = False
    compare: "Callable[[CLIP, Path, Samples], str] | None" = None

    def refusal(self, model: "CLIP") -> str:
        """Return why a model cannot be exported, or ""."""
        channels = model.preprocess.channels
        if channels != 3 and not self.channels:
            return f"{self.display} supports images of 3 channels, and those of this model have {channels}"
        return self.obstacle(model)

    def verdict(self, difference: float) -> str:
        """Describe the result of the check."""
        if self.approximate:
            return f"the cosine similarity of embeddings to clipkit's is at least {1 - difference:.4f}"
        return f"embeddings differ from clipkit's by at most {difference:.1e}"


def _create_target(
    module: str, display: str, *, distribution: str = "", package: str = "", suffix: str = "", **facts: Any
) -> ExportTarget:
    """Create a target with the functions of ``clipkit.export.MODULE``, which is imported on the first call."""

    def function(name: str) -> Callable[..., Any]:
        return lambda *arguments, **options: getattr(import_module(f"clipkit.export.{module}"), name)(
            *arguments, **options
        )

    package = package or module
    return ExportTarget(
        display=display,
        package=package,
        distribution=distribution or package,
        obstacle=function("find_obstacle"),
        write=function(f"write_model{suffix}"),
        check=function(f"measure_difference{suffix}"),
        compare=function(f"compare_model{suffix}") if facts.get("approximate") else None,
        example=function(f"format_example{suffix}"),
        **facts,
    )


# targets that ``clipkit.load`` reads if a folder has one of them
_GRAPH_TARGETS = frozenset({"onnx", "onnx-int8", "openvino", "openvino-int8"})
EXPORTS: dict[str, ExportTarget] = {
    "open_clip": _create_target(
        "open_clip", "open_clip", distribution="open_clip_torch", default=True, loads=True
    ),
    "transformers": _create_target(
        "transformers",
        "transformers",
        apart=frozenset({"timm"}),
        default=True,
        loads=True,
        resizes=True,
        channels=True,
    ),
    "sentence-transformers": _create_target(
        "transformers",
        "sentence-transformers",
        suffix="_sentence",
        package="sentence_transformers",
        distribution="sentence-transformers",
        apart=frozenset({"timm"}),
        loads=True,
        resizes=True,
    ),
    "timm": _create_target(
        "timm",
        "timm (the image encoder)",
        apart=frozenset({"transformers", "sentence-transformers"}),
        texts=False,
    ),
    "onnx": _create_target(
        "onnx",
        "onnxruntime",
        package="onnxruntime",
        needs=("onnx", "onnxscript"),
        apart=_GRAPH_TARGETS - {"onnx"},
    ),
    "onnx-int8": _create_target(
        "onnx",
        "onnxruntime (int8)",
        suffix="_int8",
        package="onnxruntime",
        needs=("onnx", "onnxscript", "onnxruntime"),
        apart=_GRAPH_TARGETS - {"onnx-int8"},
        approximate=True,
    ),
    "openvino": _create_target(
        "openvino",
        "OpenVINO",
        needs=("onnx", "onnxscript", "openvino"),
        extra="openvino",
        apart=_GRAPH_TARGETS - {"openvino"},
    ),
    "openvino-int8": _create_target(
        "openvino",
        "OpenVINO (int8)",
        suffix="_int8",
        needs=("onnx", "onnxscript", "openvino", "nncf"),
        extra="openvino",
        apart=_GRAPH_TARGETS - {"openvino-int8"},
        approximate=True,
        calibrated=True,
    ),
}

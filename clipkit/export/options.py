"""The commands of ``clipkit`` that write weights: their options and ``--help``. Does not import torch."""

from dataclasses import dataclass
from pathlib import Path

from clipkit.cli import MODEL, REQUIRED, Command, NameOptions, number, one_of, setting
from clipkit.export.targets import EXPORTS


@dataclass(frozen=True, kw_only=True)
class ExportOptions(NameOptions):
    """Export a model for other libraries."""

    model: str = setting(REQUIRED, MODEL, positional=True)
    out: Path = setting(REQUIRED, "a new folder, or an existing export to extend", positional=True)
    to: tuple[str, ...] = setting(
        (),
        f"library to export to: {', '.join(EXPORTS)}",
        one_of(*EXPORTS),
        metavar="LIBRARY",
        default_text=" and ".join(name for name, target in EXPORTS.items() if target.default),
    )
    quantize: str | None = setting(
        None, "with --to onnx: store int8 weights (the same as --to onnx-int8)", one_of("int8")
    )
    push: str | None = setting(
        None,
        "upload OUT to this repository of the Hugging Face hub, with the token of HF_TOKEN or `hf auth login`",
        metavar="OWNER/NAME",
    )
    public: bool = setting(False, "with --push: a new repository is public", default_text="private")


@dataclass(frozen=True, kw_only=True)
class InterpolateOptions(NameOptions):
    """Interpolate or average the weights of models (WiSE-FT, soups)."""

    first: str = setting(REQUIRED, f"{MODEL}, such as the model before fine-tuning", positional=True)
    second: str = setting(REQUIRED, "the same model after further training", positional=True)
    more: tuple[str, ...] = setting((), "further ones: the mean of all is written", positional=True)
    out: Path = setting(REQUIRED, "output folder", metavar="DIR")
    alpha: tuple[float, ...] = setting(
        (),
        "weight of SECOND, 0 to 1; several values write one model each, to DIR/alpha_A",
        number(0, 1),
        default_text="0.5",
        listed=True,
    )


COMMANDS = {
    "export": Command(
        epilog="""\
Each export is loaded with its library to check that it gives the same
embeddings.

  clipkit export runs/pets pets-clip
  clipkit export runs/pets pets-clip --push me/pets
  clipkit export runs/pets pets-onnx --to onnx
  clipkit export runs/pets pets-int8 --to onnx --quantize int8
  python -m eval zero-shot --model runs/pets --model pets-int8 --data FOLDER""",
        run="clipkit.export.write:run_export",
        options=ExportOptions,
        stopped="no file was written",
    ),
    "interpolate": Command(
        epilog="""\
The models must have the same architecture, tokenizer and preprocessing. Every
command accepts the result as a model. `python -m eval soup` averages those
models that do not lower the score on a dataset.

  clipkit interpolate open_clip:ViT-B-32/openai runs/pets --out between
  clipkit interpolate runs/a runs/b --alpha 0.25 0.5 0.75 --out between
  clipkit interpolate runs/a runs/b runs/c --out soup""",
        run="clipkit.export.interpolation:run_interpolate",
        options=InterpolateOptions,
        stopped="models finished so far were written",
    ),
}

"""``clipkit export``: a model for other libraries, with tokenizer, preprocessing, model card and known scores.

    open_clip                open_clip_config.json, open_clip_model.safetensors
    transformers             config.json, model.safetensors, preprocessor_config.json, the tokenizer's files
    sentence-transformers    those, modules.json and its like
    timm                     config.json, model.safetensors: the image tower alone
    onnx                     visual.onnx, textual.onnx, onnx_config.json, tokenizer.json (but for a head of classes)

One folder serves all of them but timm together with transformers or sentence-transformers, whose files have the
same names. ``clipkit_export.json`` records which files belong to which library and whose weights they are.

A folder is written aside, loaded back by each library, compared, and only then put in its place. An earlier export
of the same weights to other libraries stays in it, and so does what a user has added.
"""

import importlib.util
import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from clipkit.api import load
from clipkit.encode import model_hash
from clipkit.errors import CheckpointError, ConfigError
from clipkit.export import onnx, open_clip, timm, transformers
from clipkit.export.folder import CARD, NEW_CARD, complete, earlier_export, place, recover
from clipkit.export.model_card import Source, by_caller, model_card, source_of
from clipkit.export.samples import Samples, draw_samples
from clipkit.model import CLIP
from clipkit.zero_shot import evaluating

__all__ = ["TARGETS", "ExportOptions", "Exported", "export", "run"]

TOLERANCE = 1e-5  # of embeddings
# what a library of another version than clipkit was tested with may raise
_LIBRARY_ERRORS = (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError)
_DEFAULT = ("open_clip", "transformers")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A library that can be exported to.

    Attributes:
        package: what loads it back, as it is imported.
        distribution: and as it is installed.
        obstacle: why it cannot have a model, or "".
        write: writes a model with its float32 weights to a folder, returns the files' names.
        check: loads that folder back, returns the largest difference.
        apart: targets whose files have the same names.
    """

    package: str
    distribution: str
    obstacle: Callable[[CLIP], str]
    write: Callable[[CLIP, Mapping[str, Tensor], Path], list[str]]
    check: Callable[[CLIP, Path, Samples], float]
    apart: frozenset[str] = frozenset()


TARGETS: dict[str, Target] = {
    "open_clip": Target(
        package="open_clip",
        distribution="open_clip_torch",
        obstacle=open_clip.obstacle,
        write=open_clip.write,
        check=open_clip.check,
    ),
    "transformers": Target(
        package="transformers",
        distribution="transformers",
        obstacle=transformers.obstacle,
        write=transformers.write,
        check=transformers.check,
        apart=frozenset({"timm"}),
    ),
    "sentence-transformers": Target(
        package="sentence_transformers",
        distribution="sentence-transformers",
        obstacle=transformers.obstacle,
        write=transformers.write_sentence_transformers,
        check=transformers.check_sentence_transformers,
        apart=frozenset({"timm"}),
    ),
    "timm": Target(
        package="timm",
        distribution="timm",
        obstacle=timm.obstacle,
        write=timm.write,
        check=timm.check,
        apart=frozenset({"transformers", "sentence-transformers"}),
    ),
    "onnx": Target(
        package="onnxruntime",
        distribution="onnxruntime",
        obstacle=onnx.obstacle,
        write=onnx.write,
        check=onnx.check,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was done for one library.

    Attributes:
        target: its name.
        files: that it reads, relative to the folder.
        library: what loaded them back, such as "timm 1.0.31"; "" if it is not installed.
        difference: the largest one between its embeddings and clipkit's, None if it was not checked.
    """

    target: str
    files: tuple[str, ...]
    library: str
    difference: float | None


def export(model: CLIP, out: Path, *, to: Sequence[str] = (), source: Source | None = None) -> list[Exported]:
    """Write a model for other libraries, load it back by each, and compare.

    Args:
        model: what to export; it is left as it is.
        out: a folder that does not exist, is empty, or holds an earlier export.
        to: keys of ``TARGETS``; none for open_clip and transformers, or the one of them that can have the model.
        source: scores and configuration for the model card; None for those beside the checkpoint.

    Raises:
        ConfigError: a library cannot have the model, or the folder holds something else.
        CheckpointError: a library gave other embeddings than clipkit, or the folder could not be written.
    """
    wanted = _wanted(model, to)
    out = _place(out)
    if not out.name:
        raise ConfigError(f"{out} is not empty and no earlier export: give another folder")
    model = _plain(model)
    aside = out.with_name(f".{out.name}.partial")
    with evaluating(model), torch.no_grad():
        tensors = _weights(model)
        weights = model_hash(model)
        try:
            recover(out)
            earlier = earlier_export(out, wanted, weights)
            _check_apart([*earlier.kept, *wanted])
            shutil.rmtree(aside, ignore_errors=True)  # of a killed export
            inner = aside / out.name  # as some files name the folder they are in
            inner.mkdir(parents=True)
            done = _write(model, tensors, wanted, inner)
            records = {one.target: _record(one) for one in done}
            every = {**earlier.kept, **records}
            targets = {name: every[name] for name in TARGETS if name in every}
            card = model_card(model, targets, source or source_of(model), name=out.name)
            complete(inner, out, earlier, records, card=card, weights=weights)
            place(inner, out)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{out} was not written: {error}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return done


def _place(out: Path) -> Path:
    try:
        return out.expanduser().resolve()
    except RuntimeError as error:
        raise ConfigError(f"no folder can be made at {out}: there is no such user") from error
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL
        raise ConfigError(f"no folder can be made at {str(out)[:200]!r}: {error}") from error


def _record(one: Exported) -> dict[str, Any]:
    return {"files": list(one.files), "checked_by": one.library, "difference": one.difference}


def _wanted(model: CLIP, to: Sequence[str]) -> list[str]:
    """The targets, each once, that all can have the model and lie in one folder."""
    for name in to:
        if name not in TARGETS:
            raise ConfigError(f"{name!r} is no library to export to: known are {', '.join(TARGETS)}")
    if to:
        _check_apart(to)
        chosen, needed = list(dict.fromkeys(to)), list(to)
    else:
        chosen = [name for name in _DEFAULT if not TARGETS[name].obstacle(model)]
        needed = chosen or [_DEFAULT[0]]
    for name in needed:
        if obstacle := TARGETS[name].obstacle(model):
            able = [other for other, target in TARGETS.items() if not target.obstacle(model)]
            raise ConfigError(f"{obstacle}: this model can be exported by --to {', '.join(able)}")
    return chosen


def _plain(model: CLIP) -> CLIP:
    """The model itself, or a copy where it is not float32 on the CPU."""
    if all(p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters()):
        return model
    copied = deepcopy(model).float().cpu()
    copied.reset_constants()
    return copied


def _weights(model: CLIP) -> dict[str, Tensor]:
    """The state dict; what lies in one memory under two names is copied, as safetensors does not share."""
    seen: set[int] = set()
    tensors = {}
    for name, value in model.state_dict().items():
        place = value.untyped_storage().data_ptr()
        tensors[name] = (
            value.clone(memory_format=torch.contiguous_format) if place in seen else value.contiguous()
        )
        seen.add(place)
    return tensors


def _check_apart(names: Sequence[str]) -> None:
    for name in names:
        for other in TARGETS[name].apart.intersection(names):
            raise ConfigError(f"{name} and {other} name their files alike: export them to a folder each")


def _write(model: CLIP, tensors: Mapping[str, Tensor], names: Sequence[str], folder: Path) -> list[Exported]:
    """Write the files of all targets, then load them back one library after the other."""
    files = {name: TARGETS[name].write(model, tensors, folder) for name in names}
    samples = draw_samples(model)
    for what, features in (("picture", samples.image_features), ("text", samples.text_features)):
        if not features.isfinite().all():
            raise CheckpointError(
                f"nothing was written: the model's own {what} embeddings hold NaN or infinity, "
                "as its weights may do after a diverged training"
            )
    done = []
    for name in names:
        target, library, largest = TARGETS[name], "", None
        if importlib.util.find_spec(target.package) is not None:
            library = f"{target.distribution} {version(target.distribution)}"
            try:
                largest = target.check(model, folder, samples)
            except _LIBRARY_ERRORS as error:
                cause = " ".join(f"{type(error).__name__}: {error}".split())
                raise CheckpointError(
                    f"nothing was written: {library} does not load the export: {cause}"
                ) from error
            if largest == float("inf"):
                raise CheckpointError(f"nothing was written: {library} gives NaN or infinite embeddings")
            if not largest <= TOLERANCE:
                raise CheckpointError(
                    f"nothing was written: {library} gives embeddings that differ from clipkit's by {largest:.1e}"
                )
        done.append(Exported(target=name, files=tuple(files[name]), library=library, difference=largest))
    return done


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What the command line says; see ``clipkit export --help``."""

    model: str
    out: Path
    to: Sequence[str] = ()
    name: str = ""


def run(options: ExportOptions) -> int:
    """The command; returns the exit status.

    Raises:
        ClipkitError: a mistake that the user can mend.
    """
    model = load(options.model, name=options.name)
    print(model.origin)
    done = export(model, options.out, to=options.to)
    for one in done:
        print(f"{one.target}: {len(one.files)} files; {_verdict(one)}")
    if todo := by_caller(model):
        print(todo)
    if not options.to:
        for name in _DEFAULT:
            if obstacle := TARGETS[name].obstacle(model):
                print(f"{name}: not written, as {obstacle}")
    out = _place(options.out)
    card = NEW_CARD if (out / NEW_CARD).is_file() else CARD
    kept = f" ({CARD} was changed by hand, and kept)" if card == NEW_CARD else ""
    print(f"wrote {out}; before you publish it, look through {card} and fill in its license{kept}")
    return 0


def _verdict(one: Exported) -> str:
    if one.difference is None:
        package = TARGETS[one.target].distribution
        return f"not checked, as {package} is not installed: pip install -e '.[export]'"
    return f"loaded back by {one.library}, embeddings differ by at most {one.difference:.1e}"

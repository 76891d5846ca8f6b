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
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from clipkit.api import load
from clipkit.errors import CheckpointError, ConfigError
from clipkit.export import onnx, open_clip, timm, transformers
from clipkit.export.checks import (
    CARD,
    NEW_CARD,
    Samples,
    complete,
    draw_samples,
    earlier_export,
    place,
    recover,
)
from clipkit.export.model_card import Source, by_caller, model_card, source_of
from clipkit.formats.checkpoint import check_free, model_hash, save_model
from clipkit.model.clip import CLIP
from clipkit.model.tokenizer import Tokenizer
from clipkit.model.zero_shot import evaluating

__all__ = [
    "TARGETS",
    "ExportOptions",
    "Exported",
    "InterpolateOptions",
    "export",
    "interpolate",
    "run",
    "run_interpolate",
]

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


# --------------------------------------------------------------------------------------------------------------
# ``clipkit interpolate``: weights between those of two models (WiSE-FT; Wortsman et al. 2021).
#
# A model that was fine-tuned on some pictures may lose on others; for weights between it and the model that it
# began from, the paper (https://arxiv.org/abs/2109.01903) reports less of that. Not measured here: ``python -m
# eval`` tells which share serves your own data.

# on which tokenizers that are not the same differ: case, accents, numbers, signs, several scripts, length
_PROBES = (
    "a photo of a cat",
    "A  Photo, of Zürich's 1,234 cafés &amp; bars!",
    "naïve 鳥の写真 фото 🙂",
    "x" * 40,
    "of " * 300,
)


@torch.no_grad()
def interpolate(first: CLIP, second: CLIP, alpha: float) -> CLIP:
    """A model with the weights (1 − alpha) · first + alpha · second, the temperature's among them.

    Statistics of batch norms are interpolated as weights are, counts are the first model's.

    Args:
        first: its device, dtype, tokenizer and preprocessing are the new model's.
        second: of the same architecture. What its preprocessing does about transparent and rotated images, which
            fine-tuning may have changed, is the new model's.
        alpha: 0 (the first model) to 1 (the second).

    Raises:
        ConfigError: alpha is out of range, or the models differ in more than weights.
    """
    _check_alpha(alpha)
    _check_alike(first, second)
    made = deepcopy(first)
    made.preprocess = second.preprocess
    theirs = second.state_dict()
    made.load_state_dict(
        {name: _between(own, theirs[name], alpha) for name, own in first.state_dict().items()}
    )
    made.origin = (
        f"{1 - alpha:g} of {first.origin or 'a model'} and {alpha:g} of {second.origin or 'another'}"
    )
    return made


def _between(own: Tensor, other: Tensor, alpha: float) -> Tensor:
    if not own.is_floating_point():
        return own
    kind = torch.promote_types(own.dtype, torch.float32)
    return torch.lerp(own.to(kind), other.to(own.device, kind), alpha).to(own.dtype)


def _check_alpha(alpha: float) -> None:
    if not (math.isfinite(alpha) and 0 <= alpha <= 1):
        raise ConfigError(f"alpha = {alpha!r} does not fit: 0 (the first model) to 1 (the second)")


def _check_alike(first: CLIP, second: CLIP) -> None:
    what = ""
    if first.architecture != second.architecture:
        what = "architecture"
    elif replace(first.preprocess, background=None, upright=False) != replace(
        second.preprocess, background=None, upright=False
    ):
        what = "preprocessing of images"
    elif not _same_tokens(first.tokenizer, second.tokenizer):
        what = "tokenizer"
    if what:
        names = [model.origin or model.name or "a model" for model in (first, second)]
        raise ConfigError(
            f"{names[0]} and {names[1]} differ in their {what}: only weights of the same model trained further "
            "can be interpolated"
        )


def _same_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    """Of two that lie in folders of their own, what they do is compared."""
    if type(first) is not type(second):
        return False
    if first == second:
        return True
    a, b = first(_PROBES), second(_PROBES)
    return a.shape == b.shape and bool((a == b).all())


@dataclass(frozen=True, kw_only=True)
class InterpolateOptions:
    """What the command line says; see ``clipkit interpolate --help``."""

    first: str
    second: str
    out: Path
    alpha: Sequence[float] = (0.5,)
    name: str = ""


def _folder(alpha: float) -> str:
    """Different for each number: 0.5 is alpha_0.5, 1.0 alpha_1."""
    return "alpha_" + repr(float(abs(alpha))).removesuffix(".0")


def run_interpolate(options: InterpolateOptions) -> int:
    """The command; returns the exit status.

    Raises:
        ClipkitError: a mistake that the user can mend.
    """
    for alpha in options.alpha:
        _check_alpha(alpha)
    alphas = list(dict.fromkeys(options.alpha))
    out = _folder_for(options.out)
    places = [out] if len(alphas) == 1 else [out / _folder(alpha) for alpha in alphas]
    for folder in places:
        check_free(folder)
    first, second = (load(source, name=options.name) for source in (options.first, options.second))
    for model in (first, second):
        print(model.origin)
    if first.preprocess != second.preprocess:
        print("transparent and rotated images are treated as by the second model")
    for alpha, folder in zip(alphas, places, strict=True):
        made_from = {"first": first.origin, "second": second.origin, "alpha": alpha}
        save_model(interpolate(first, second, alpha), folder, made_from=made_from)
        print(f"wrote {folder}: {1 - alpha:g} of the first and {alpha:g} of the second")
    return 0


def _folder_for(out: Path) -> Path:
    try:
        return out.expanduser().resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a name with a NUL, or of a user that there is not
        raise ConfigError(f"no folder can be made at {str(out)[:200]!r}: {error}") from error

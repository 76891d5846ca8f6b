"""``clipkit export``: write a model for other libraries, load it back by each of them, and compare.

The export is written to a temporary folder and only moved to its place once each library has loaded it. An earlier
export of the same weights to other libraries stays in the folder, and so do files that a user has added.
"""

import argparse
import importlib.util
import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from clipkit.api import load
from clipkit.errors import CheckpointError, ConfigError, nearest
from clipkit.export import EXPORTS
from clipkit.export.checks import CARD, NEW_CARD, complete, draw_samples, earlier_export, place, recover
from clipkit.export.model_card import Source, by_caller, model_card, source_of
from clipkit.formats.checkpoint import model_hash
from clipkit.model.clip import CLIP
from clipkit.model.zero_shot import evaluating

__all__ = ["Exported", "export", "run"]

TOLERANCE = 1e-5  # of embeddings
# what a library of another version than clipkit was tested with may raise
_LIBRARY_ERRORS = (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The export for one library.

    Attributes:
        target: key of ``EXPORTS``.
        files: its files, relative to the folder.
        library: the library that loaded them back, such as "timm 1.0.31"; "" if it is not installed.
        difference: the largest between its embeddings and clipkit's; None if not checked.
    """

    target: str
    files: tuple[str, ...]
    library: str
    difference: float | None


def export(model: CLIP, out: Path, *, to: Sequence[str] = (), source: Source | None = None) -> list[Exported]:
    """Write a model for other libraries, load it back by each, and compare.

    Args:
        model: is not changed.
        out: a folder that does not exist, is empty, or holds an earlier export.
        to: keys of ``EXPORTS``; empty: the default ones, as far as the model has no obstacle.
        source: scores and configuration for the model card; None for those beside the checkpoint.

    Raises:
        ConfigError: the model cannot be exported to a library, or the folder holds something else.
        CheckpointError: a library gives other embeddings than clipkit, or the folder cannot be written.
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
            shutil.rmtree(aside, ignore_errors=True)  # left by a killed export
            inner = aside / out.name  # some files contain the name of their folder
            inner.mkdir(parents=True)
            done = _write(model, tensors, wanted, inner)
            records = {one.target: _record(one) for one in done}
            every = {**earlier.kept, **records}
            targets = {name: every[name] for name in EXPORTS if name in every}
            card = model_card(model, targets, source or source_of(model), name=out.name)
            complete(inner, out, earlier, records, card=card, weights=weights)
            place(inner, out)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot write {out}: {error}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return done


def _place(out: Path) -> Path:
    try:
        return out.expanduser().resolve()
    except RuntimeError as error:
        raise ConfigError(f"cannot create the folder {out}: there is no such user") from error
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL
        raise ConfigError(f"cannot create the folder {str(out)[:200]!r}: {error}") from error


def _record(one: Exported) -> dict[str, Any]:
    return {"files": list(one.files), "checked_by": one.library, "difference": one.difference}


def _wanted(model: CLIP, to: Sequence[str]) -> list[str]:
    """The targets without repetition; refuse those that cannot be exported to or not to one folder."""
    for name in to:
        if name not in EXPORTS:
            raise ConfigError(f"no export to {name!r}: {nearest(name, EXPORTS)}")
    if to:
        _check_apart(to)
        chosen, needed = list(dict.fromkeys(to)), list(to)
    else:
        default = [name for name, target in EXPORTS.items() if target.default]
        chosen = [name for name in default if not EXPORTS[name].obstacle(model)]
        needed = chosen or default[:1]
    for name in needed:
        target = EXPORTS[name]
        if missing := [package for package in target.needs if importlib.util.find_spec(package) is None]:
            raise ConfigError(f"export to {name} needs {', '.join(missing)}: pip install -e '.[export]'")
        if obstacle := target.obstacle(model):
            able = [other for other, target in EXPORTS.items() if not target.obstacle(model)]
            raise ConfigError(f"{obstacle}: this model can be exported by --to {', '.join(able)}")
    return chosen


def _plain(model: CLIP) -> CLIP:
    """The model, or a float32 copy on the CPU."""
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
        for other in EXPORTS[name].apart.intersection(names):
            raise ConfigError(f"{name} and {other} name their files alike: export them to a folder each")


def _write(model: CLIP, tensors: Mapping[str, Tensor], names: Sequence[str], folder: Path) -> list[Exported]:
    """Write the files of all targets, then load them back one library after the other."""
    files = {name: EXPORTS[name].write(model, tensors, folder) for name in names}
    samples = draw_samples(model)
    for what, features in (("image", samples.image_features), ("text", samples.text_features)):
        if not features.isfinite().all():
            raise CheckpointError(
                f"nothing was written: the model's own {what} embeddings contain NaN or infinity, "
                "as after a diverged training"
            )
    done = []
    for name in names:
        target, library, largest = EXPORTS[name], "", None
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


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit status.

    Raises:
        ClipkitError: a user error.
    """
    model = load(options.model, name=options.name)
    print(model.origin)
    done = export(model, options.out, to=options.to)
    for one in done:
        print(f"{one.target}: {len(one.files)} files; {_verdict(one)}")
    if todo := by_caller(model):
        print(todo)
    if not options.to:
        for name, target in EXPORTS.items():
            if target.default and (obstacle := target.obstacle(model)):
                print(f"{name}: not written, as {obstacle}")
    out = _place(options.out)
    card = NEW_CARD if (out / NEW_CARD).is_file() else CARD
    kept = f" ({CARD} was changed by hand, and kept)" if card == NEW_CARD else ""
    print(f"wrote {out}; before you publish it, look through {card} and fill in its license{kept}")
    return 0


def _verdict(one: Exported) -> str:
    if one.difference is None:
        package = EXPORTS[one.target].distribution
        return f"not checked, as {package} is not installed: pip install -e '.[export]'"
    return f"loaded back by {one.library}, embeddings differ by at most {one.difference:.1e}"

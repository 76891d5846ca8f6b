"""``clipkit export``: write a model for other libraries, load it with each of them, and compare embeddings.

``clipkit_export.json`` lists the files of each library and a digest of the weights, so that a folder never contains
two models. The export is written to a temporary folder and renamed after each library has loaded it. Earlier
exports of the same weights to other libraries are kept, as are files that a user has added or changed (a license,
the model card).
"""

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from clipkit import __version__
from clipkit.api import load
from clipkit.errors import CheckpointError, ConfigError, DataError, is_torchvision_mismatch, nearest
from clipkit.export.checks import draw_samples
from clipkit.export.model_card import Source, describe_caller_steps, find_source, render_card
from clipkit.export.targets import EXPORTS
from clipkit.files.hub import HUB, check_push, push_folder
from clipkit.files.terminal import counted
from clipkit.files.writing import lock_output, resolve_output
from clipkit.formats.checkpoint import collect_tensors, model_hash
from clipkit.model.architectures import HEADS
from clipkit.model.clip import CLIP
from clipkit.model.preprocess import eval_pixels
from clipkit.model.zero_shot import evaluation_mode
from clipkit.options import ExportOptions
from clipkit.samples.sources import open_samples

MANIFEST, CARD, NEW_CARD = "clipkit_export.json", "README.md", "README.new.md"
TOLERANCE = 1e-5  # largest allowed difference of embeddings
LOWEST_COSINE = 0.9  # of embeddings with quantized weights; a quantization that failed gives lower ones
_MOST_IMAGES = 300  # that ranges of activations are measured on, NNCF's default
_FEWEST_IMAGES = 10
_FORMAT = 1
_LARGEST = 2**20  # size limit of a manifest, in bytes
# exceptions that an untested version of a library may raise
_LIBRARY_ERRORS = (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The export for one library.

    Attributes:
        target: key of ``EXPORTS``.
        files: its files, relative to the folder.
        library: the library that loaded them, such as "timm 1.0.31"; "" if it is not installed.
        difference: largest difference between its embeddings and clipkit's, or 1 − their lowest cosine similarity
            if the target is ``approximate``; None if not checked.
        comparison: size and speed of quantized weights; "" for other targets.
    """

    target: str
    files: tuple[str, ...]
    library: str
    difference: float | None
    comparison: str = ""


def export(
    model: CLIP,
    out: Path,
    *,
    to: Sequence[str] = (),
    source: Source | None = None,
    images: Tensor | None = None,
) -> list[Exported]:
    """Write a model for other libraries, load it with each of them, and compare embeddings.

    Args:
        out: a folder that does not exist, is empty, or contains an earlier export.
        to: keys of ``EXPORTS``; by default the default targets to which the model can be exported.
        source: scores and configuration for the model card; None reads them from the run folder.
        images: preprocessed images, (N, 3, S, S) uint8, for targets that measure ranges of activations on images.
    """
    targets = _select_targets(model, to)
    uncalibrated = [name for name in targets if EXPORTS[name].calibrated and images is None]
    if uncalibrated:
        raise ConfigError(
            f"export to {uncalibrated[0]} measures ranges of activations on images: name some with --calibrate"
        )
    out = resolve_output(out)
    if not out.name:
        raise ConfigError(f"{out} is not empty and not an earlier export: use another folder")
    if any(p.device.type != "cpu" or p.dtype != torch.float32 for p in model.parameters()):
        model = deepcopy(model).float().cpu()
        model.reset_constants()
    aside = out.with_name(f".{out.name}.partial")
    former = out.with_name(f".{out.name}.former")
    heads = (*HEADS.values(), "image_projections.")
    # only the towers are exported
    tensors = {name: value for name, value in collect_tensors(model).items() if not name.startswith(heads)}
    weights = model_hash(model)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with (
            evaluation_mode(model),
            torch.no_grad(),
            lock_output(out, "clipkit export"),
            ExitStack() as cleanup,
        ):
            cleanup.callback(shutil.rmtree, aside, ignore_errors=True)
            if former.exists() and not out.exists():  # an export was killed between the two renames
                former.rename(out)
            shutil.rmtree(former, ignore_errors=True)
            earlier = _earlier_export(out, targets, weights)
            _check_apart([*earlier.other_targets, *targets])
            shutil.rmtree(aside, ignore_errors=True)  # left by a killed export
            inner = aside / out.name  # some files contain the folder's name
            inner.mkdir(parents=True)
            done = _write_targets(model, tensors, targets, inner, images)
            former_path, path_to_name = (json.dumps(str(path))[1:-1] for path in (inner, out))
            for file in inner.glob("*_config.json"):  # may name a folder in the export
                content = file.read_text(encoding="utf-8").replace(former_path, path_to_name)
                file.write_text(content, encoding="utf-8")
            records = dict(earlier.other_targets)
            for exported in done:
                records[exported.target] = {
                    "files": list(exported.files),
                    "checked_by": exported.library,
                    "difference": exported.difference,
                }
            in_order = {name: records[name] for name in EXPORTS if name in records}
            card = render_card(model, in_order, source or find_source(model), name=out.name)
            _add_other_files(inner, out, earlier, records, card=card, weights=weights)
            if out.exists():
                out.rename(former)
            inner.rename(out)
            shutil.rmtree(former, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {out}: {error}") from error
    return done


def _select_targets(model: CLIP, to: Sequence[str]) -> list[str]:
    for name in to:
        if name not in EXPORTS:
            raise ConfigError(f"unknown export target {name!r}: {nearest(name, EXPORTS)}")
    if to:
        _check_apart(to)
        chosen = list(dict.fromkeys(to))
    else:
        default = [name for name, target in EXPORTS.items() if target.default]
        # if there is none, the obstacle of the first one is reported
        chosen = [name for name in default if not EXPORTS[name].refusal(model)] or default[:1]
    for name in chosen:
        target = EXPORTS[name]
        missing = [package for package in target.needs if importlib.util.find_spec(package) is None]
        if missing:
            raise ConfigError(
                f"export to {name} needs {', '.join(missing)}: pip install -e '.[{target.extra}]'"
            )
        obstacle = target.refusal(model)
        if obstacle:
            able = [other for other, target in EXPORTS.items() if not target.refusal(model)]
            if able:
                raise ConfigError(f"{obstacle}: this model supports --to {', '.join(able)}")
            raise ConfigError(
                f"{obstacle}: use this model with clipkit.load, `clipkit encode` and `python -m eval`"
            )
    return chosen


def _check_apart(names: Sequence[str]) -> None:
    for name in names:
        for other in EXPORTS[name].apart.intersection(names):
            raise ConfigError(f"{name} and {other} cannot share a folder: export them to separate folders")


def _write_targets(
    model: CLIP, tensors: Mapping[str, Tensor], names: Sequence[str], folder: Path, images: Tensor | None
) -> list[Exported]:
    files = {}
    for name in names:
        options = {"images": images} if EXPORTS[name].calibrated else {}
        files[name] = EXPORTS[name].write(model, tensors, folder, **options)
    samples = draw_samples(model)
    for what, features in (("image", samples.image_features), ("text", samples.text_features)):
        if not features.isfinite().all():
            raise CheckpointError(
                f"nothing was written: the model's {what} embeddings contain NaN or infinity, "
                "as after diverged training"
            )
    done = []
    for name in names:
        target = EXPORTS[name]
        library = ""
        largest = None
        comparison = ""
        if importlib.util.find_spec(target.package) is not None:
            library = f"{target.distribution} {version(target.distribution)}"
            try:
                largest = target.check(model, folder, samples)
            except _LIBRARY_ERRORS as error:
                if is_torchvision_mismatch(error):
                    raise
                cause = " ".join(f"{type(error).__name__}: {error}".split())
                raise CheckpointError(
                    f"nothing was written: {library} cannot load the export: {cause}"
                ) from error
            if largest == float("inf"):
                raise CheckpointError(f"nothing was written: {library}'s embeddings contain NaN or infinity")
            limit = 1 - LOWEST_COSINE if target.approximate else TOLERANCE
            if not largest <= limit:
                raise CheckpointError(
                    f"nothing was written: with {library}, {target.verdict(largest)}; the limit is "
                    f"{LOWEST_COSINE if target.approximate else TOLERANCE:g}"
                )
        if target.compare:
            comparison = target.compare(model, folder, samples)
        done.append(
            Exported(
                target=name,
                files=tuple(files[name]),
                library=library,
                difference=largest,
                comparison=comparison,
            )
        )
    return done


@dataclass(frozen=True, kw_only=True)
class _Earlier:
    """An earlier export in the same folder.

    Attributes:
        other_targets: records of the targets that are not written again, by name.
        card: digest of the model card as written.
    """

    other_targets: Mapping[str, Any] = field(default_factory=dict)
    stale: frozenset[str] = frozenset()
    card: str = ""


def _earlier_export(out: Path, targets_to_write: Sequence[str], weights: str) -> _Earlier:
    """Read the manifest of ``out``, if it exists; ConfigError if the folder contains anything else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return _Earlier()
    try:
        path = out / MANIFEST
        manifest = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size <= _LARGEST else {}
        targets: dict[str, Any] = dict(manifest["targets"])
        files = {name: frozenset(map(str, record["files"])) for name, record in targets.items()}
        stored_weights = manifest["weights"]
        card = str(manifest["card"])
        ours = manifest["format"] == _FORMAT
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        ours = False
    if not ours:
        raise ConfigError(f"{out} is not empty and not an earlier export: use another folder")
    if targets and stored_weights != weights:
        raise ConfigError(
            f"{out} contains another model for {', '.join(targets)}: use another folder, or remove this one first"
        )
    others = {name: record for name, record in targets.items() if name not in targets_to_write}
    other_files = frozenset().union(*(files[name] for name in others))
    stale = frozenset().union(*files.values()) - other_files
    return _Earlier(other_targets=others, stale=stale, card=card)


def _add_other_files(
    inner: Path, out: Path, earlier: _Earlier, targets: Mapping[str, Any], *, card: str, weights: str
) -> None:
    """Add the model card, the manifest and the files to keep from ``out`` to the new files in ``inner``."""
    digest = hashlib.sha256(card.encode()).hexdigest()
    former = out / CARD
    edited = former.is_file() and hashlib.sha256(former.read_bytes()).hexdigest() != earlier.card
    (inner / (NEW_CARD if edited else CARD)).write_text(card, encoding="utf-8")
    manifest = {
        "format": _FORMAT,
        "clipkit": __version__,
        "weights": weights,
        "card": earlier.card if edited else digest,
        "targets": targets,
    }
    (inner / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    mode = (inner / MANIFEST).stat().st_mode & 0o777
    for path in inner.rglob("*"):  # safetensors creates files readable only by their owner
        if path.is_file():
            path.chmod(mode)
    for path in sorted(out.rglob("*")) if out.is_dir() else ():
        name = path.relative_to(out).as_posix()
        target = inner / name
        if path.is_dir() and not path.is_symlink():
            if not any(file.startswith(f"{name}/") for file in earlier.stale):
                target.mkdir(exist_ok=True)
        elif name not in earlier.stale and not os.path.lexists(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, target, follow_symlinks=False)
            except OSError:  # a file system without hard links
                shutil.copy2(path, target, follow_symlinks=False)


def run_export(options: ExportOptions) -> int:
    """Run the command; return the exit status."""
    to: Sequence[str] = options.to
    if options.quantize:
        quantized = {name: f"{name}-{options.quantize}" for name in to}
        if not EXPORTS.keys() & quantized.values():
            raise ConfigError(
                f"--quantize {options.quantize} needs --to onnx or --to openvino: other exports keep float32"
            )
        to = [quantized[name] if quantized[name] in EXPORTS else name for name in to]
    if options.calibrate is not None and not any(EXPORTS[name].calibrated for name in to):
        raise ConfigError("--calibrate has no effect without --to openvino --quantize int8")
    if options.public and options.push is None:
        raise ConfigError("--public has no effect without --push")
    if options.push is not None:
        check_push(options.push)  # before anything is computed
    model = load(options.model, name=options.name)
    print(model.origin)
    images = None
    if options.calibrate is not None:
        _select_targets(model, to)  # before images are read
        images, failures = read_calibration_images(options.calibrate, model)
        skipped = f"; {failures} could not be read" if failures else ""
        print(f"measuring ranges of activations on {len(images)} images of {options.calibrate}{skipped}")
    done = export(model, options.out, to=to, images=images)
    for exported in done:
        target = EXPORTS[exported.target]
        if exported.difference is None:
            verdict = (
                f"not checked because {target.distribution} is not installed: "
                f"pip install -e '.[{target.extra}]'"
            )
        else:
            verdict = f"checked with {exported.library}, {target.verdict(exported.difference)}"
        print(f"{exported.target}: {len(exported.files)} files; {verdict}")
        if exported.comparison:
            print(f"{exported.target}: {exported.comparison}")
    caller_steps = describe_caller_steps(model)
    if caller_steps:
        print(caller_steps)
    if not options.to:
        for name, target in EXPORTS.items():
            obstacle = target.refusal(model) if target.default else ""
            if obstacle:
                print(f"{name}: not written: {obstacle}")
    out = resolve_output(options.out)
    card = CARD
    note = ""
    if (out / NEW_CARD).is_file():
        card = NEW_CARD
        note = f" (the edited {CARD} was kept)"
    print(f"wrote {out}; before publishing it, check {card} and fill in the license{note}")
    if options.push is not None:
        address = push_folder(
            out,
            options.push,
            private=not options.public,
            skipped=[NEW_CARD],
            listing=MANIFEST,
            listed=_list_files,
        )
        loads = any(EXPORTS[exported.target].loads for exported in done)
        how = f": clipkit.load('{HUB}{options.push}') loads it" if loads else ""
        print(f"uploaded to {address}{how}")
    return 0


def read_calibration_images(source: str, model: CLIP) -> tuple[Tensor, int]:
    """Read at most 300 images, evenly distributed over a source.

    Returns:
        the preprocessed images, (N, C, S, S) uint8, and the number of those that could not be read.

    Raises:
        DataError: the source cannot be opened, or fewer than 10 of its images can be read.
    """
    try:
        samples = open_samples(source)
    except DataError as error:
        raise DataError(f"--calibrate {source} has no images: {error}") from error
    count = min(len(samples), _MOST_IMAGES)
    pixels = []
    cause = "it has no more"
    for index in range(count):
        i = index * len(samples) // count
        try:
            pixels.append(eval_pixels(samples.read(i, ""), model.preprocess))
        except DataError as error:
            cause = f"{samples.key(i)}: {error}"
    if len(pixels) < _FEWEST_IMAGES:
        raise DataError(
            f"{source} has {counted(len(pixels), 'image')} to measure ranges of activations on: expected at least "
            f"{_FEWEST_IMAGES} ({cause})"
        )
    return torch.stack(pixels), count - len(pixels)


def _list_files(manifest: Path) -> set[str]:
    try:
        targets = json.loads(manifest.read_text(encoding="utf-8"))["targets"]
        return {str(file) for record in targets.values() for file in record["files"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        return set()

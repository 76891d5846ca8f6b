"""``clipkit classify``: zero-shot labels of images, as a table on the terminal or as a CSV or JSON file.

Images are streamed: results are printed or written batch by batch and not kept in memory.

    .csv      one row per image: image, source, label_1, probability_1, label_2, …; names and labels that a
              spreadsheet would evaluate as formulas (starting with =, +, -, @) are prefixed with an apostrophe,
              which clipkit removes when it reads the file
    .json     an array with one line per image:
              {"image": …, "source": …, "labels": [{"label": …, "probability": …}, …]}
    .jsonl    the same objects, one per line, without the array

``--review`` writes a page of the least certain images, on which labels can be corrected. The browser saves the
corrections as a table with the columns image_path and caption, which ``python -m data pack`` reads.

With an output file, only failures and a summary are printed; otherwise the table is.

Dimensions: B batch, C classes, O embedding dimension.
"""

import csv
import heapq
import io
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import torch
from rich.cells import cell_len, set_cell_size
from torch import Tensor

from clipkit.errors import ConfigError, DataError
from clipkit.files.pages import check_page, write_page
from clipkit.files.terminal import CountProgress, counted, printable
from clipkit.files.writing import replacing, user_path
from clipkit.formats.checkpoint import model_hash
from clipkit.inference.calibrate import FOLDS, LEAST, LEAST_SCALE, Calibration, calibrate, read_calibration
from clipkit.inference.inputs import Stream, recorded_members
from clipkit.inference.stream import Failure, FeatureStream
from clipkit.model.clip import CLIP
from clipkit.model.zero_shot import DEFAULT_TEMPLATES, fill_template, zero_shot_classifier
from clipkit.options import ClassifyOptions
from clipkit.samples.folders import SPLIT_WORDS, is_hidden
from clipkit.samples.table import safe_cell
from clipkit.samples.traits import TraitCounts

# widths of the table's columns, separated by two spaces
_WIDTH = 80
_LABEL_WIDTH = 30
_PROBABILITY_WIDTH = len("probability")
_IMAGE_WIDTH = _WIDTH - _LABEL_WIDTH - _PROBABILITY_WIDTH - 4
PRECISION = 0.9  # that thresholds must reach
NONE = "none"  # the folder of images without a label
_REVIEWED = 200  # images on a page
_MAX_LIST_BYTES = 16 << 20  # size limit of a file of labels or templates


@dataclass(frozen=True, kw_only=True, slots=True)
class Classification:
    """The most probable labels of one image, in descending order; probabilities are over all labels."""

    image: str
    source: str  # the folder, file, shard or table that contains it
    labels: list[tuple[str, float]]
    accepted: int  # number of labels that reach their thresholds, which may be more than ``labels``
    margin: float  # between the two most probable labels, or to a threshold if that is nearer


def classify_images(
    stream: Stream,
    features: FeatureStream,
    labels: Sequence[str],
    weights: Tensor,
    *,
    top: int,
    calibration: Calibration | None = None,
    below: bool = True,
) -> Iterator[Classification | Failure]:
    """Classify the images of a stream.

    Args:
        labels: C names.
        weights: (O, C), see ``clipkit.zero_shot_classifier``.
        top: number of labels per image at most; with several labels, the most probable accepted ones.
        calibration: probabilities and thresholds; None for the model's own probabilities.
        below: return the most probable labels, too, if they are below their thresholds.
    """
    weights = weights.float().cpu()
    scale = features.model.logit_scale.detach().float().exp().cpu()
    if not (math.isfinite(scale.item()) and weights.isfinite().all()):
        raise DataError("the model's embeddings of the labels are not finite: its weights are damaged")
    for outcome in features.run(((0, item) for item in stream), kind="image"):
        if isinstance(outcome, Failure):
            yield outcome
            continue
        similarities = torch.from_numpy(outcome.rows) @ weights  # (B, C)
        if calibration is None:
            probabilities = (scale * similarities).softmax(dim=-1)
        else:
            probabilities = calibration.probabilities(similarities)
        two = probabilities.topk(2, dim=-1).values
        margins = two[:, 0] - two[:, 1]  # (B,)
        accepted = torch.ones_like(probabilities, dtype=torch.bool)
        if calibration is not None:
            distances = probabilities - torch.tensor(calibration.thresholds)  # (B, C)
            accepted = distances >= 0
            if calibration.several:
                margins = distances.abs().amin(dim=-1)
            else:
                best_distance = distances.gather(1, probabilities.argmax(dim=-1, keepdim=True))
                accepted = (best_distance >= 0).expand_as(probabilities)
                margins = torch.minimum(margins, best_distance[:, 0].abs())
        ranks = probabilities if below else probabilities.masked_fill(~accepted, -1)  # accepted ones first
        best = ranks.topk(min(top, len(labels)), dim=-1)
        for row, item in enumerate(outcome.items):
            named = [
                (labels[index], value)
                for index, value in zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
                if below or accepted[row, index]
            ]
            yield Classification(
                image=item.key,
                source=item.source,
                labels=named,
                accepted=int(accepted[row].sum()),
                margin=float(margins[row]),
            )


def labels_of(text: str) -> list[str]:
    """Read labels from a file, one per line, or split a comma-separated list."""
    path = user_path(text)
    if _is_file(path):
        parts = _lines(path)
    elif "," not in text:
        raise DataError(
            f"{text!r} is neither a file nor a comma-separated list of labels such as --labels 'cat,dog'"
        )
    else:
        parts = [label.strip() for label in text.split(",")]
    labels = [label for label in parts if label]
    if len(labels) < 2:
        raise DataError(f"{text!r} has {counted(len(labels), 'label')}: classification needs at least two")
    for label, count in Counter(labels).items():
        if count > 1:
            raise DataError(f"label {label!r} occurs {'twice' if count == 2 else f'{count} times'}")
        _check_text(label, "label")
    return labels


def templates_of(texts: Sequence[str]) -> list[str]:
    """Return the templates, with file names replaced by the lines of the file."""
    if not texts:
        return list(DEFAULT_TEMPLATES)
    templates: list[str] = []
    for text in texts:
        path = user_path(text)
        if "{" in text:
            templates.append(text)
        elif _is_file(path):
            templates += [line for line in _lines(path) if line]
        else:
            raise DataError(
                f"{text!r} is neither a file of templates nor a template with {{c}} for the label"
            )
    for template in templates:
        _check_text(template, "template")
        fill_template(template, "")
    if not templates:
        raise DataError("the template file is empty")
    return templates


def run_classify(options: ClassifyOptions) -> int:
    """Run the command and return its exit status: 0 if at least one image was classified."""
    labels, calibration = _labels(options)
    check_page("--review", options.review)
    templates = templates_of(options.templates) if calibration is None else list(calibration.templates)
    stream = Stream(
        options.sources, image=options.image or options.image_column or "", cache_gb=options.cache_gb
    )
    top = min(options.top, len(labels))
    below = not (options.none or options.multi_label)
    uncertain: list[tuple[float, int, Classification]] = []  # a heap whose least is the most certain one
    done = failed = cut = 0
    with _open_writer(options.out, top) as writer:
        features = FeatureStream.from_options(options)
        stream.recorded = recorded_members(features.model.origin)
        weights = zero_shot_classifier(features.model, labels, templates)
        if options.calibrate is not None:
            calibration = _calibrate_on_folder(options, features, labels, templates, weights)
            for line in features.lines(options):
                print(f"{options.calibrate}: {line}", file=sys.stderr)
            features.counts = TraitCounts()
        elif calibration is not None:
            assert options.calibration is not None
            _check_calibration(calibration, options.calibration, features.model)
        with CountProgress("classifying", total=None, shown=writer is not None) as bar:
            outcomes = classify_images(
                stream, features, labels, weights, top=top, calibration=calibration, below=below
            )
            for outcome in outcomes:
                if isinstance(outcome, Failure):
                    failed += 1
                    item = outcome.item
                    where = f" (in {item.source})" if item.source not in item.key else ""
                    print(f"failed: {printable(item.key + where)}: {outcome.cause}", file=sys.stderr)
                else:
                    done += 1
                    cut += options.multi_label and outcome.accepted > len(outcome.labels)
                    if options.review is not None:
                        keep = heapq.heappush if len(uncertain) < _REVIEWED else heapq.heappushpop
                        keep(uncertain, (-outcome.margin, -done, outcome))
                    if writer is not None:
                        writer.write(outcome)
                    else:
                        if done == 1:
                            _print(_line("image", "label", "probability"))
                        images = [outcome.image] + [""] * (len(outcome.labels) - 1)
                        for image, (label, probability) in zip(images, outcome.labels, strict=False):
                            _print(_line(image, label, f"{probability:.1%}"))
                        if not outcome.labels:
                            _print(_line(outcome.image, "none", ""))
                bar.show(done + failed, failed)
    for line in features.lines(options):
        print(line, file=sys.stderr)
    for note in stream.notes:
        print(note, file=sys.stderr)
    if failed:
        print(f"{failed:,} of {counted(done + failed, 'image')} failed", file=sys.stderr)
    if cut:
        more = f"{counted(cut, 'image')} with more than {counted(top, 'accepted label')}"
        print(f"note: {more}: --top K gives more", file=sys.stderr)
    if options.out is not None:
        _print(f"wrote {counted(done, 'image')} to {options.out}")
    if options.review is not None:
        least_certain = [classification for *_, classification in sorted(uncertain, reverse=True)]
        _print(f"wrote {_write_review(options.review, least_certain, labels)}")
    return 0 if done else 1


def _write_review(out: Path, uncertain: Sequence[Classification], labels: Sequence[str]) -> Path:
    """Write the page of the least certain images; those that cannot be read again are left out."""
    from clipkit.inference.search import TEMPLATES, Hit, embed_thumbnail  # requires the extra pack

    images = []
    for entry in uncertain:
        thumbnail = embed_thumbnail(
            Hit(id="", similarity=0.0, path=entry.image, source=entry.source, metadata={})
        )
        if thumbnail is not None:
            images.append({"found": entry, "image": thumbnail})
    page = TEMPLATES.get_template("review.html").render(
        title="Labels to review",
        lead="The least certain images first. Choose the right label where it is wrong, then save the corrections.",
        notes=[],
        images=images,
        labels=labels,
    )
    return write_page(out, page)


def _labels(options: ClassifyOptions) -> tuple[list[str], Calibration | None]:
    """Return the labels that the options name, and a calibration that is used again."""
    if options.calibrate is not None:
        if options.labels is not None:
            return labels_of(options.labels), None
        folder = options.calibrate
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder")
        names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not is_hidden(path.name))
        labels = [name for name in names if name != NONE]
        if len(labels) < 2:
            raise DataError(
                f"{folder} has {counted(len(labels), 'label')}: expected a folder for each of several"
            )
        if any((folder / labels[0]).glob("*.tar")):
            raise DataError(
                f"{folder} is a packed dataset: give the folder of images by label that it was made of"
            )
        if all(name.lower() in SPLIT_WORDS for name in labels):
            raise DataError(
                f"{folder} contains splits, not labels: choose one of them, such as {folder / labels[0]}"
            )
        return labels, None
    if options.calibration is not None:
        calibration = read_calibration(options.calibration)
        for name in ("templates", "least_precision"):
            if getattr(options, name) not in ((), None):
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"{option} has no effect: {options.calibration} has its own; add --calibrate"
                )
        if options.labels is not None and labels_of(options.labels) != list(calibration.labels):
            raise ConfigError(f"--labels differ from those of {options.calibration}: leave them out")
        if options.multi_label != calibration.several:
            which = "with" if calibration.several else "without"
            raise ConfigError(f"{options.calibration} was made {which} --multi-label: use it in the same way")
        return list(calibration.labels), calibration
    for name in ("multi_label", "none"):
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} needs thresholds: add --calibrate FOLDER, or --calibration FILE")
    if options.labels is None:
        raise ConfigError("no labels: give --labels, --calibrate FOLDER, or --calibration FILE")
    return labels_of(options.labels), None


def _check_calibration(calibration: Calibration, file: Path, model: CLIP) -> None:
    if calibration.weights == model_hash(model):
        return
    decoding = str(model.preprocess.decoding)
    if calibration.decoding is None or calibration.decoding == decoding:
        raise ConfigError(
            f"{file} is of another model, or of another background, orientation or pixel range: run --calibrate "
            "again"
        )
    raise ConfigError(
        f"{file} is of another background, orientation or pixel range ({calibration.decoding or 'the defaults'}; "
        f"now: {decoding or 'the defaults'}): set the same --background, --upright and --pixel-range, or run "
        "--calibrate again"
    )


def _calibrate_on_folder(
    options: ClassifyOptions,
    features: FeatureStream,
    labels: Sequence[str],
    templates: Sequence[str],
    weights: Tensor,
) -> Calibration:
    folder = options.calibrate
    assert folder is not None
    out = options.calibration or Path("calibration.json")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a folder: create it first")
    indices = {label: i for i, label in enumerate(labels)}
    rows: dict[str, Tensor] = {}  # by the digest of the image
    marked: dict[str, set[int]] = {}
    for outcome in features.run(((0, item) for item in Stream([str(folder)])), kind="image"):
        if isinstance(outcome, Failure):
            raise DataError(f"{outcome.item.key}: {outcome.cause}")
        for item, digest, row in zip(outcome.items, outcome.digests, outcome.rows, strict=True):
            image = Path(item.key)
            name = image.relative_to(folder).parts[0] if image.is_relative_to(folder) else ""
            if name not in indices and name != NONE:
                raise DataError(f"{item.key} is not in the folder of a label: expected {folder}/LABEL/IMAGE")
            rows[digest] = torch.from_numpy(row) @ weights.float().cpu()
            marked.setdefault(digest, set()).update({indices[name]} if name != NONE else ())
    targets = torch.zeros(len(rows), len(labels), dtype=torch.bool)
    for row, image_labels in enumerate(marked.values()):
        targets[row, sorted(image_labels)] = True
    several = int((targets.sum(dim=1) > 1).sum())
    if several and not options.multi_label:
        raise DataError(f"{counted(several, 'image')} in {folder} have several labels: add --multi-label")
    calibration = calibrate(
        torch.stack(list(rows.values())) if rows else torch.empty(0, len(labels)),
        targets,
        labels=labels,
        templates=templates,
        weights=model_hash(features.model),
        scale=float(features.model.logit_scale.detach().float().exp()),
        several=options.multi_label,
        target=PRECISION if options.least_precision is None else options.least_precision,
    )
    calibration = replace(calibration, decoding=str(features.model.preprocess.decoding))
    calibration.write(out)
    held = calibration.held_out
    accepted = (
        f"precision {held.precision:.1%} [{held.low:.1%}, {held.high:.1%}] of "
        f"{counted(held.accepted, 'accepted label')}, recall {held.recall:.1%}"
    )
    error = (
        "" if held.ece is None else f", calibration error {held.ece[0]:.1%} before, {held.ece[1]:.1%} after"
    )
    print(
        f"wrote {out}; {FOLDS}-fold cross-validation on {counted(held.images, 'image')}: "
        f"{accepted if held.accepted else 'no accepted label'}{error}",
        file=sys.stderr,
    )
    if calibration.scale <= LEAST_SCALE:
        print(
            "note: the model's similarities say nothing about these labels: use another model",
            file=sys.stderr,
        )
    counts = targets.sum(dim=0).tolist()
    few = [label for label, count in zip(labels, counts, strict=True) if count < LEAST]
    if few:
        which = f"{counted(len(few), 'label')} (such as {few[0]!r})"
        print(f"note: {which} with fewer than {LEAST} images: these share a threshold", file=sys.stderr)
    never = [label for label, least in zip(labels, calibration.thresholds, strict=True) if least > 1]
    if never:
        which = f"{counted(len(never), 'label')} (such as {never[0]!r})"
        why = "no threshold reaches the precision (stored as 2)"
        print(f"note: {which} never accepted: {why}", file=sys.stderr)
    if held.high < calibration.target or not held.accepted:
        advice = "add labelled images, or lower --least-precision"
        print(f"note: the precision of {calibration.target:.0%} is not reached: {advice}", file=sys.stderr)
    return calibration


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise DataError(f"cannot write to standard output: {error.strerror}") from error


def _line(image: str, label: str, probability: str) -> str:
    image = printable(image)
    label = printable(label)
    if cell_len(image) > _IMAGE_WIDTH:
        while cell_len(image) > _IMAGE_WIDTH - 1:
            image = image[1:]
        image = "…" + image
    if cell_len(label) > _LABEL_WIDTH:
        label = set_cell_size(label, _LABEL_WIDTH - 1).rstrip() + "…"
    image = set_cell_size(image, _IMAGE_WIDTH)
    label = set_cell_size(label, _LABEL_WIDTH)
    return f"{image}  {label}  {probability:>{_PROBABILITY_WIDTH}}".rstrip()


class _Writer:
    """Write images to a file: rows of a .csv, an array in a .json, or lines of a .jsonl."""

    def __init__(self, file: TextIO, suffix: str, top: int) -> None:
        self._file = file
        self._suffix = suffix
        self._first = True
        self._top = top
        if suffix == ".csv":
            names = (f"{name}_{i}" for i in range(1, top + 1) for name in ("label", "probability"))
            self._write_row("image", "source", *names)

    def write(self, classification: Classification) -> None:
        """Append one image."""
        if self._suffix == ".csv":
            cells = (
                cell for label, value in classification.labels for cell in (safe_cell(label), f"{value:.6f}")
            )
            missing = 2 * (self._top - len(classification.labels))  # labels below their thresholds
            self._write_row(
                safe_cell(classification.image), safe_cell(classification.source), *cells, *[""] * missing
            )
            return
        labels = [{"label": label, "probability": round(value, 6)} for label, value in classification.labels]
        record = {"image": classification.image, "source": classification.source, "labels": labels}
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
        if self._suffix == ".json":
            self._file.write(("[\n" if self._first else ",\n") + text)
        else:
            self._file.write(text + "\n")
        self._first = False

    def _write_row(self, *cells: str) -> None:
        # with lineterminator="\n", Python before 3.13 does not quote a carriage return
        row = io.StringIO()
        csv.writer(row).writerow(cells)
        self._file.write(row.getvalue().removesuffix("\r\n") + "\n")

    def end(self) -> None:
        """Append the end of the file."""
        if self._suffix == ".json":
            self._file.write("[]\n" if self._first else "\n]\n")


@contextmanager
def _open_writer(path: Path | None, top: int) -> Iterator[_Writer | None]:
    if path is None:
        yield None
        return
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".json", ".jsonl"):
        raise ConfigError(f"--out {path} must end in .csv, .json or .jsonl")
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder: use a file name")
    try:
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            writer = _Writer(file, suffix, top)
            yield writer
            writer.end()
    except BrokenPipeError:  # from the terminal
        raise
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error


def _check_text(text: str, what: str) -> None:
    """Reject text that could not be written: arguments represent invalid UTF-8 as surrogate escapes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} {text!r} is not UTF-8") from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a list of labels that is too long for a file name
        return False


def _lines(path: Path) -> list[str]:
    try:
        if path.stat().st_size > _MAX_LIST_BYTES:
            raise DataError(f"{path} is larger than {_MAX_LIST_BYTES >> 20} MiB")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path} as a list of lines: {error}") from error
    return [line.strip() for line in text.split("\n")]

"""Calibrate zero-shot labels on a few labelled images: probabilities that mean what they say, and thresholds.

Probabilities are softmax(a s + b) of the similarities s, with one a and a b for each label, or sigmoid(a s + b) if
images have several labels. A label's threshold is the lowest one above which its predictions reach the requested
precision. Thresholds are chosen on four fifths of the images and tried on the other fifth, in turn; the precision
and recall that are reported are those of the other fifths. The thresholds that are stored are chosen on all images.

Dimensions: N images, C labels.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.errors import DataError
from clipkit.files.writing import write_atomic

FOLDS = 5
_DECAY = 1e-3
LEAST_SCALE = 1e-3
_GREATEST_SCALE = 1e4
LEAST = 30  # right predictions of a label for a threshold of its own; others share one


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What thresholds do on images that they were not chosen on.

    Attributes:
        accepted: number of labels that were predicted above their thresholds.
        precision: fraction of these that are right, with its 95% interval (Wilson).
        recall: fraction of the true labels that were predicted above their thresholds.
        ece: expected calibration error of the most probable label in 15 bins, before and after calibration; None
            for several labels per image.
    """

    images: int
    accepted: int
    precision: float
    low: float
    high: float
    recall: float
    ece: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Probabilities and thresholds of labels, for one model.

    Attributes:
        labels, templates: C labels and the prompts.
        several: whether images may have several labels.
        biases: C values b.
        thresholds: by label, the probability from which it is accepted; more than 1: never.
        held_out: what the thresholds do on other images.
        decoding: how images were decoded, in words; None in files of earlier versions.
    """

    weights: str
    labels: tuple[str, ...]
    templates: tuple[str, ...]
    several: bool
    scale: float
    biases: tuple[float, ...]
    thresholds: tuple[float, ...]
    target: float
    held_out: HeldOut
    decoding: str | None = None

    def probabilities(self, similarities: Tensor) -> Tensor:
        """Return (N, C) probabilities for similarities (N, C)."""
        return _probabilities(similarities, self.scale, torch.tensor(self.biases), several=self.several)

    def write(self, path: Path) -> None:
        """Write a JSON file."""
        try:
            write_atomic(path, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            raise DataError(f"cannot write {path}: {error.strerror}") from error


def read_calibration(path: Path) -> Calibration:
    """Read a file written by ``Calibration.write``."""
    try:
        calibration = msgspec.json.decode(path.read_bytes(), type=Calibration)
        numbers = [calibration.scale, *calibration.biases, *calibration.thresholds]
        same = len(calibration.labels) == len(calibration.biases) == len(calibration.thresholds) > 1
        if not same or not all(map(math.isfinite, numbers)):
            raise ValueError("its labels, biases and thresholds do not match")
        if not LEAST_SCALE <= calibration.scale <= _GREATEST_SCALE:
            raise ValueError(f"the scale {calibration.scale:g} is out of range")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(
            f"{path} is not a calibration written by clipkit classify --calibrate: {error}"
        ) from error
    return calibration


def calibrate(
    similarities: Tensor,
    targets: Tensor,
    *,
    labels: Sequence[str],
    templates: Sequence[str],
    weights: str,
    scale: float,
    several: bool,
    target: float = 0.9,
    seed: int = 0,
) -> Calibration:
    """Fit probabilities and thresholds.

    Args:
        similarities: (N, C) float32.
        targets: (N, C) bool, the labels of each image; images without any are of none.
        labels, templates, weights: see ``Calibration``.
        scale: the model's own a, for the error before calibration.
        several: whether images may have several labels.
    """
    if len(targets) < 2 * FOLDS:
        raise DataError(
            f"{len(targets)} labelled images are too few to calibrate: expected at least {2 * FOLDS}"
        )
    for label, count in enumerate(targets.sum(dim=0).tolist()):
        if not 0 < count < len(targets):
            raise DataError(
                f"label {labels[label]!r} has {count} of {len(targets)} labelled images: add others"
            )
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    fold = torch.empty(len(targets), dtype=torch.int64)
    fold[order] = torch.arange(len(targets)) % FOLDS
    accepted = torch.zeros_like(targets)
    other = torch.zeros_like(similarities)  # probabilities of images by what was fitted to others
    for i in range(FOLDS):
        learn = fold != i
        held = fold == i
        fitted = _fit(similarities[learn], targets[learn], several=several, scale=scale)
        learned = _probabilities(similarities[learn], *fitted, several=several)
        other[held] = _probabilities(similarities[held], *fitted, several=several)
        chosen = _thresholds(learned, targets[learn], target, several=several)
        accepted[held] = _select_predicted(other[held], several=several) & (other[held] >= chosen)
    right = int((accepted & targets).sum())
    count = int(accepted.sum())
    low, high = wilson_interval(right, count)
    held_out = HeldOut(
        images=len(targets),
        accepted=count,
        precision=right / max(1, count),
        low=low,
        high=high,
        recall=right / max(1, int(targets.sum())),
        ece=None if several else (_ece((similarities * scale).softmax(dim=1), targets), _ece(other, targets)),
    )
    fitted = _fit(similarities, targets, several=several, scale=scale)
    probabilities = _probabilities(similarities, *fitted, several=several)
    return Calibration(
        weights=weights,
        labels=tuple(labels),
        templates=tuple(templates),
        several=several,
        scale=fitted[0],
        biases=tuple(fitted[1].tolist()),
        thresholds=tuple(_thresholds(probabilities, targets, target, several=several).tolist()),
        target=target,
        held_out=held_out,
    )


def _probabilities(similarities: Tensor, scale: float, biases: Tensor, *, several: bool) -> Tensor:
    logits = scale * similarities + biases
    return logits.sigmoid() if several else logits.softmax(dim=1)


def _fit(similarities: Tensor, targets: Tensor, *, several: bool, scale: float) -> tuple[float, Tensor]:
    logarithm = torch.tensor(math.log(scale), requires_grad=True)
    biases = torch.zeros(similarities.shape[1], requires_grad=True)
    if several:
        with torch.no_grad():
            biases.fill_(-scale * float(similarities.mean()))
    parameters = [logarithm, biases]
    optimizer = torch.optim.LBFGS(parameters, max_iter=200, line_search_fn="strong_wolfe")
    single_label = targets.sum(dim=1) == 1
    # as if there were one more right and one more wrong label (Platt 1999): otherwise, the scale of labels that the
    # model separates grows until all probabilities are 1
    smoothing = 1 / (len(targets) + 2)
    smooth = (1 - smoothing) * targets.float() + smoothing / (2 if several else targets.shape[1])

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = logarithm.exp() * similarities + biases
        if several:
            value = F.binary_cross_entropy_with_logits(logits, smooth)
        else:
            value = F.cross_entropy(logits[single_label], smooth[single_label])
        value = value + _DECAY * biases.var(correction=0)  # labels with few images stay near the others
        value.backward()
        return value

    optimizer.step(loss)
    return float(logarithm.detach().exp().clamp(LEAST_SCALE, _GREATEST_SCALE)), biases.detach()


def _select_predicted(probabilities: Tensor, *, several: bool) -> Tensor:
    if several:
        return torch.ones_like(probabilities, dtype=torch.bool)
    best = probabilities.argmax(dim=1, keepdim=True)
    return torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, best, True)


def _thresholds(probabilities: Tensor, targets: Tensor, target: float, *, several: bool) -> Tensor:
    predicted = _select_predicted(probabilities, several=several)
    shared = _threshold(probabilities[predicted], targets[predicted], target)
    thresholds = []
    for label in range(probabilities.shape[1]):
        rows = predicted[:, label]
        enough = int((rows & targets[:, label]).sum()) >= LEAST
        thresholds.append(
            _threshold(probabilities[rows, label], targets[rows, label], target) if enough else shared
        )
    return torch.tensor(thresholds)


def _threshold(probabilities: Tensor, right: Tensor, target: float) -> float:
    """Return the lowest probability above which predictions have the precision; 2 if there is none.

    One right and one wrong prediction are added, because the best of many thresholds looks better than it is. It is
    0 if all predictions have the precision, as nothing shows that less certain ones are wrong.
    """
    order = probabilities.argsort(descending=True)
    count = torch.arange(1, len(order) + 1, dtype=torch.float64)
    enough = ((right[order].double().cumsum(0) + 1) / (count + 2) >= target).nonzero()
    if not len(enough):
        return 2.0
    last = int(enough[-1])
    return float(probabilities[order[last]]) if last + 1 < len(order) else 0.0


def wilson_interval(hits: float, n: float, *, miss: float = 0.05) -> tuple[float, float]:
    """Compute Wilson's interval (1927) of a proportion; 0 … 1 without trials.

    Args:
        hits: 0 … n, not necessarily an integer.
        miss: probability of missing the true value, half at each end.
    """
    if not n:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(1 - miss / 2)
    fraction = hits / n
    centre = (fraction + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * math.sqrt(max(0.0, fraction * (1 - fraction)) / n + z**2 / (4 * n * n)) / (1 + z**2 / n)
    # at 0 and n the formula gives 0 and 1 up to rounding
    low = 0.0 if hits == 0 else centre - half
    high = 1.0 if hits == n else centre + half
    return low, high


def _ece(probabilities: Tensor, targets: Tensor, bins: int = 15) -> float:
    single_label = targets.sum(dim=1) == 1
    confidence, best = probabilities[single_label].max(dim=1)
    right = targets[single_label].gather(1, best[:, None])[:, 0].double()
    bin_index = (confidence * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64).index_add(0, bin_index, confidence.double() - right)
    return float(gaps.abs().sum() / max(1, len(right)))

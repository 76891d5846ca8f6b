"""Logistic regression with an L2 penalty by L-BFGS: scikit-learn's answer, from blocks of rows, on any device.

The objective is that of ``sklearn.linear_model.LogisticRegression``,

    C · Σ cross-entropy + ½ ‖W‖²,        the biases not penalized,

divided by C·N. It has one minimum, so how it is found changes nothing but the time:

* L-BFGS (Liu and Nocedal 1989) works in the directions of the features' principal components, where
  1 / (γ s + λ) is close to the inverse Hessian: s a component's variance, γ the mean of p(1 − p) of a class at
  this step, λ = 1/(C·N). A trained model's features have variances that lie decades apart, and L-BFGS that starts
  from a multiple of the identity spends its steps on that.
* Products are taken in float32, a block of rows at a time, sums of blocks in float64. What float32 cannot settle
  is settled in float64. A probability's distance from its target is computed as such, so that it keeps its digits
  where the classes are told apart without an error.
* It stops when another step would change the logits by less than ``tolerance`` of their size. scikit-learn stops
  at a gradient of 1e-4 for any number of classes, images or size of features; of many classes or with a weak
  penalty it stops well before its minimum.

Letters in shape comments: N rows, W width of a feature, K classes, P = W + 1 parameters a class.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.errors import DataError
from eval.metrics.ranks import full_float32

__all__ = [
    "LogisticFit",
    "LogisticProblem",
    "Rows",
    "carve",
    "draw_shots",
    "ridge_classifier",
    "shuffled_classes",
]


# --------------------------------------------------------------------------------------------------------------
# Rows of feature tables as one list, read in blocks, for what learns from features.
#
# Letters in shape comments: N rows, W width of a feature.

_HELD = 1 << 30  # bytes of chosen rows that are copied out of a table once; more are gathered block by block


class Rows:
    """Rows of feature tables as one list: whole tables, or chosen rows of them, perhaps memory-mapped.

    Args:
        parts: each a (N, W) table, or such a table and the (n,) int64 numbers of the rows to take of it.
    """

    def __init__(self, *parts: Tensor | tuple[Tensor, Tensor]) -> None:
        self._parts: list[tuple[Tensor, Tensor | None]] = []
        for part in parts:
            table, chosen = part if isinstance(part, tuple) else (part, None)
            if chosen is not None and chosen.numel() * table.shape[1] * 4 <= _HELD:
                table, chosen = table[chosen], None
            self._parts.append((table, chosen))
        self.width = self._parts[0][0].shape[1] if parts else 0

    def __len__(self) -> int:
        return sum(len(table if chosen is None else chosen) for table, chosen in self._parts)

    def __add__(self, other: "Rows") -> "Rows":
        """These rows, then the others."""
        both = Rows()
        both._parts, both.width = self._parts + other._parts, self.width
        return both

    def on(self, device: torch.device) -> "Rows":
        """These rows with their tables on an accelerator, if they fill at most half of what is free there."""
        if device.type != "cuda" or len(self) * self.width * 4 > torch.cuda.mem_get_info(device)[0] // 2:
            return self
        return Rows(*(_taken(table, chosen).to(device, torch.float32) for table, chosen in self._parts))

    def blocks(self, rows: int) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of at most so many rows with their places, (rows, W), as they are stored."""
        start = 0
        for table, chosen in self._parts:
            n = len(table if chosen is None else chosen)
            for first in range(0, n, rows):
                last = min(first + rows, n)
                block = table[first:last] if chosen is None else table[chosen[first:last]]
                yield slice(start + first, start + last), block
            start += n


def _taken(table: Tensor, chosen: Tensor | None) -> Tensor:
    return table if chosen is None else table[chosen]


# --------------------------------------------------------------------------------------------------------------

_BLOCK = 1 << 20  # logits (or features) at a time on a CPU, 4 MiB in float32
_DEVICE_BLOCK = 1 << 26  # and on an accelerator
_MEMORY = 10  # steps that L-BFGS remembers
_TRIES = 20  # evaluations of one line search
_FLOAT32_LIMIT = 1e-5  # a tolerance below this is not for float32 to reach
_NEVER = 1e30  # a bias that no weights make up for
_NULL = 1e-14  # a component of less of the greatest variance is rounding


@dataclass(frozen=True, kw_only=True, eq=False)
class LogisticFit:
    """A fitted classifier; its logits are ``features @ weight.T + bias``.

    Attributes:
        weight: (K, W) float64 on the CPU; zeros for a class without an image.
        bias: (K,) float64; minus infinity for a class without an image, infinity for one that every image shows.
        C: inverse strength of the penalty.
        iterations: steps taken.
        evaluations: passes over the rows, of two products each.
        objective: the value reached, of the mean cross-entropy + λ/2 ‖W‖².
        converged: whether the tolerance was reached within the allowed steps.
    """

    weight: Tensor
    bias: Tensor
    C: float
    iterations: int
    evaluations: int
    objective: float
    converged: bool

    def classifier(self) -> Tensor:
        """(W + 1, K) float32, for features with a last column of ones: finite, so that products of it are."""
        both = torch.cat([self.weight, self.bias[:, None].clamp(-_NEVER, _NEVER)], dim=1)
        return both.T.float().contiguous()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Point:
    """The objective at some parameters: value, gradient (K, P), and each class's mean of p(1 - p), (K,)."""

    at: Tensor
    value: float
    gradient: Tensor
    curvature: Tensor


class LogisticProblem:
    """Rows and what they show; fits for several C share what is computed of the rows.

    Args:
        rows: N of them.
        labels: (N,) int64 for one class a row: softmax over the classes that occur, and for two classes
            scikit-learn's binary formulation, a single logit (whose weights are penalized as one vector; softmax
            with two would give the answer of 2·C). (N, K) bool for several: one regression a class.
        classes: K; a class that no row has is never predicted.
        device: where to compute; the CPU if not given.

    Raises:
        DataError: fewer than two classes occur, or a feature is not finite.
    """

    def __init__(
        self, rows: Rows, labels: Tensor, classes: int, *, device: torch.device | None = None
    ) -> None:
        assert len(rows) == len(labels)
        self._device = device or torch.device("cpu")
        self._classes, self._n = classes, len(rows)
        self._rows = rows.on(self._device)
        self._softmax = labels.ndim == 1
        self._always = torch.zeros(classes, dtype=torch.bool)
        if self._softmax:
            self._present = torch.bincount(labels, minlength=classes).nonzero()[:, 0]
            if len(self._present) < 2:
                raise DataError(
                    f"{len(self._present)} class in the images to learn from: it takes at least two"
                )
            targets = torch.searchsorted(self._present, labels)
            if len(self._present) == 2:
                self._softmax, targets = False, targets[:, None].bool()
        else:
            positive = labels.sum(dim=0)
            self._always = positive == self._n
            self._present = ((positive > 0) & ~self._always).nonzero()[:, 0]
            if not len(self._present):
                raise DataError("no class that some images to learn from show and others do not")
            targets = labels[:, self._present]
        self._binary = labels.ndim == 1 and not self._softmax
        self._targets = targets.to(self._device)
        self._logits = 1 if self._binary else len(self._present)
        limit = _BLOCK if self._device.type == "cpu" else _DEVICE_BLOCK
        self._block = max(1, limit // max(self._logits, rows.width // 4))
        with full_float32(self._device):
            self._decompose()

    def _decompose(self) -> None:
        """The rows' mean (W,), and variances (P,) along their principal directions (W, W); the bias is the last."""
        width = self._rows.width
        mean = torch.zeros(width, dtype=torch.float64, device=self._device)
        for _, block in self._rows.blocks(self._block):
            mean += block.to(self._device, torch.float64).sum(dim=0)
        self._mean = mean / self._n
        if not bool(self._mean.isfinite().all()):
            raise DataError("features to learn from that are not finite numbers")
        covariance = torch.zeros(width, width, dtype=torch.float64, device=self._device)
        for _, block in self._rows.blocks(self._block):
            centred = block.to(self._device, torch.float64) - self._mean
            covariance.addmm_(centred.T, centred)
        variance, directions = torch.linalg.eigh(covariance / self._n)
        self._turn = {torch.float64: directions, torch.float32: directions.float()}
        self._variance = F.pad(variance.clamp(min=0), (0, 1), value=1.0)  # (P,)
        self._used = F.pad(variance > _NULL * variance[-1], (0, 1), value=True).double()  # (P,)

    def fit(
        self,
        C: float,  # the name it has everywhere
        *,
        start: LogisticFit | None = None,
        tolerance: float = 1e-4,
        max_iterations: int = 1000,
    ) -> LogisticFit:
        """Minimize for one C.

        Args:
            C: inverse strength of the penalty, above 0.
            start: a fit for another C, or of other rows, to begin from; zeros if not given.
            tolerance: largest change of the logits by another step, as a fraction of their root mean square.
            max_iterations: steps.
        """
        with full_float32(self._device):
            began = self._zero() if start is None else self._fold(start)
            descent = _Descent(self, 1 / (C * self._n), began)
            converged = descent.run(max(tolerance, _FLOAT32_LIMIT), max_iterations)
            if not descent.exhausted and (not converged or tolerance < _FLOAT32_LIMIT):
                descent.in_float64()
                converged = descent.run(tolerance, max_iterations)
        return self._fit(C, descent, converged)

    def _zero(self) -> Tensor:
        return torch.zeros(self._logits, self._rows.width + 1, dtype=torch.float64, device=self._device)

    def _fit(self, C: float, descent: "_Descent", converged: bool) -> LogisticFit:
        weight, bias = (one.cpu() for one in self._unfold(descent.point.at))
        if self._binary:  # logits of ∓ half have the probabilities of the single one
            weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
        all_weights = torch.zeros(self._classes, self._rows.width, dtype=torch.float64)
        all_biases = torch.full((self._classes,), -math.inf, dtype=torch.float64)
        all_biases[self._always] = math.inf
        all_weights[self._present], all_biases[self._present] = weight, bias
        return LogisticFit(
            weight=all_weights,
            bias=all_biases,
            C=C,
            iterations=descent.iterations,
            evaluations=descent.evaluations,
            objective=descent.point.value,
            converged=converged,
        )

    def _fold(self, fit: LogisticFit) -> Tensor:
        """(K, P) parameters of a fit, the other way round than ``_unfold``."""
        weight, bias = fit.weight[self._present], fit.bias[self._present].nan_to_num(0.0, 0.0, 0.0)
        if self._binary:
            weight, bias = weight[1:] - weight[:1], bias[1:] - bias[:1]
        weight, bias = weight.to(self._device), bias.to(self._device)
        turned = torch.cat([weight @ self._turn[torch.float64], (bias + weight @ self._mean)[:, None]], dim=1)
        return self._apart(turned) * self._used

    def _apart(self, vector: Tensor) -> Tensor:
        """(K, P) without what all classes of a softmax have in common.

        It changes no probability, and only a weak penalty would draw it to 0, where it is at the minimum.
        """
        return vector - vector.mean(dim=0) if self._softmax else vector

    def _unfold(self, at: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Weights (K, W) and float64 biases (K,) for features as they are, of (K, P) along the directions."""
        weight = at[:, :-1].to(dtype) @ self._turn[dtype].T  # (K, W)
        return weight, at[:, -1] - weight.double() @ self._mean

    def _evaluate(self, at: Tensor, penalty: float, dtype: torch.dtype) -> _Point:
        """The objective at (K, P) parameters."""
        weight, bias = self._unfold(at, dtype)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        slopes = torch.zeros_like(weight, dtype=torch.float64)  # (K, W)
        errors, curvature = torch.zeros_like(bias), torch.zeros_like(bias)  # (K,)
        transposed, shift = weight.T, bias.to(dtype)
        for block, stored in self._rows.blocks(self._block):
            features = stored.to(self._device, dtype)  # (rows, W)
            logits = torch.addmm(shift, features, transposed)  # (rows, K)
            losses, error = (_softmax if self._softmax else _sigmoid)(logits, self._targets[block])
            total += losses.sum(dtype=torch.float64)
            slopes += error.T @ features
            errors += error.sum(dim=0)
            # |p - target| - (p - target)² is p (1 - p)
            curvature += error.abs().sum(dim=0) - error.square().sum(dim=0)
        weights = at[:, :-1]
        gradient = torch.empty_like(at)
        centred = (slopes - errors[:, None] * self._mean) / self._n
        gradient[:, :-1] = centred.to(dtype) @ self._turn[dtype] + penalty * weights
        gradient[:, -1] = errors / self._n
        value = float(total) / self._n + penalty / 2 * float(weights.square().sum())
        return _Point(at=at, value=value, gradient=gradient * self._used, curvature=curvature / self._n)


def _softmax(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies (rows,), and probabilities minus targets (rows, K) in the place of the (rows, K) logits.

    The target's own share is kept apart, so that neither is a difference of numbers close to 1.
    """
    labels = labels[:, None]
    own = logits.gather(1, labels)  # (rows, 1)
    most = logits.amax(dim=1, keepdim=True)
    shares = logits.sub_(most).exp_()
    own_share = shares.gather(1, labels)
    rest = shares.scatter_(1, labels, 0.0).sum(dim=1, keepdim=True)
    total = rest + own_share
    errors = shares.div_(total).scatter_(1, labels, -rest / total)
    losses = torch.where(own_share > 1e-30, torch.log1p(rest / own_share), most - own + total.log())
    return losses, errors


def _sigmoid(logits: Tensor, shown: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies of each class on its own (rows, K), and probabilities minus targets (rows, K)."""
    sign = 1.0 - 2.0 * shown.to(logits.dtype)
    logits *= sign
    return F.softplus(logits), sign * torch.sigmoid(logits)


class _Descent:
    """L-BFGS from one point, as far as its number format goes."""

    def __init__(self, problem: LogisticProblem, penalty: float, start: Tensor) -> None:
        self._problem, self._penalty = problem, penalty
        self._dtype = torch.float32
        self._steps: list[tuple[Tensor, Tensor, float]] = []  # step, change of the gradient, their product
        self.iterations, self.evaluations = 0, 0
        self.exhausted = False  # no step is left
        self.point = self._evaluate(start)

    def in_float64(self) -> None:
        """Take products in float64 from here on."""
        self._dtype = torch.float64
        self.point = self._evaluate(self.point.at)

    def _evaluate(self, at: Tensor) -> _Point:
        self.evaluations += 1
        return self._problem._evaluate(at, self._penalty, self._dtype)

    def run(self, tolerance: float, max_iterations: int) -> bool:
        """Step until another step would not matter; whether that was reached."""
        variance = self._problem._variance
        while True:
            inverse = self._inverse()
            direction = self._direction(inverse)
            # the step may be small because the last one was; so may the plain one where curvature is far from even
            steps = (direction, self._problem._apart(self.point.gradient * inverse))
            change = max(float((one.square() * variance).sum()) for one in steps)
            if change <= tolerance**2 * float((self.point.at.square() * variance).sum()):
                return True
            if self.iterations >= max_iterations:
                self.exhausted = True
                return False
            found = self._search(direction)
            if found is None:
                if not self._steps:
                    return False
                self._steps.clear()  # once more, from the preconditioner alone
                continue
            step, turn = found.at - self.point.at, found.gradient - self.point.gradient
            product = float((step * turn).sum())
            if product > 0:
                self._steps = [*self._steps[1 - _MEMORY :], (step, turn, product)]
            self.point = found
            self.iterations += 1

    def _direction(self, inverse: Tensor) -> Tensor:
        """Where L-BFGS goes from here, (K, P), given an estimate of the inverse Hessian's diagonal, (K, P)."""
        vector = self.point.gradient
        shares = []
        for step, turn, product in reversed(self._steps):
            share = float((step * vector).sum()) / product
            vector = vector - share * turn
            shares.append(share)
        if self._steps:  # its size as the last step found it
            _, turn, product = self._steps[-1]
            inverse = inverse * (product / float((turn.square() * inverse).sum()))
        vector = self._problem._apart(vector * inverse)
        for (step, turn, product), share in zip(self._steps, reversed(shares), strict=True):
            vector = vector + (share - float((turn * vector).sum()) / product) * step
        return -vector

    def _inverse(self) -> Tensor:
        """The inverse Hessian if every class's p(1 - p) were the same for all rows, (K, P)."""
        variance = self._problem._variance
        curvature = self.point.curvature.clamp(min=1e-300)[:, None]
        floor = float(variance[:-1].max()) * torch.finfo(self._dtype).eps
        penalty = torch.full_like(variance, self._penalty)
        penalty[-1] = 0.0
        return self._problem._used / (curvature * (variance + floor) + penalty)

    def _search(self, direction: Tensor) -> _Point | None:
        """A point along the direction that meets the Wolfe conditions; none where rounding leaves none."""
        here = self.point
        slope = float((here.gradient * direction).sum())
        if not slope < 0:
            return None
        rounding = torch.finfo(self._dtype).eps * abs(here.value)
        low, high, length = 0.0, math.inf, 1.0
        low_slope, high_slope = slope, math.nan
        for _ in range(_TRIES):
            there = self._evaluate(here.at + length * direction)
            slope_there = float((there.gradient * direction).sum())
            if not there.value <= here.value + 1e-4 * length * slope + rounding or slope_there > -0.9 * slope:
                high, high_slope = length, slope_there
            elif slope_there < 0.9 * slope:
                low, low_slope = length, slope_there
            else:
                return there
            length = _between(low, high, low_slope, high_slope)
        return None


def _between(low: float, high: float, low_slope: float, high_slope: float) -> float:
    """The next length to try: where a parabola's slope is 0, away from the ends; farther where there is no end."""
    if math.isinf(high):
        return 4 * low
    if math.isfinite(high_slope) and high_slope > low_slope:
        guess = low - low_slope * (high - low) / (high_slope - low_slope)
    else:
        guess = (low + high) / 2
    margin = (high - low) / 10
    return min(max(guess, low + margin), high - margin)


# --------------------------------------------------------------------------------------------------------------
# Few-shot least squares in closed form, as in Scaling Vision Transformers (Zhai et al. 2021, arXiv 2106.04560).
#
# The details are those of the authors' published evaluation (big_vision, ``fewshot_lsr``): features before the
# head, each made mean 0 and deviation 1 over the images that are learned from; a further feature of 100 for
# the bias, which is then hardly penalized; targets 1 for an image's class and -1 for the others; L2 penalty
# 2¹⁰, fixed, on the sum of squares.
#
# Letters in shape comments: N images, W width of a feature, C classes.

PENALTY = 2.0**10
_BIAS = 100.0
_LEAST = 1e-5  # is added to deviations, since a single image a class leaves some at 0


def ridge_classifier(features: Tensor, labels: Tensor, classes: int, *, penalty: float = PENALTY) -> Tensor:
    """Least squares with an L2 penalty, from the smaller one of the two systems that give it.

    Args:
        features: (N, W), N ≥ 1.
        labels: (N,) int64.
        classes: C.
        penalty: above 0.

    Returns:
        (W + 1, C) float32 on the CPU, for features as they were given with a last column of ones.
    """
    features = features.cpu().double()
    mean = features.mean(dim=0)
    deviation = features.std(dim=0, correction=0) + _LEAST
    scaled = torch.nn.functional.pad((features - mean) / deviation, (0, 1), value=_BIAS)  # (N, W + 1)
    targets = torch.full((len(labels), classes), -1.0, dtype=torch.float64)
    targets[torch.arange(len(labels)), labels.cpu()] = 1.0
    if len(scaled) < scaled.shape[1]:
        weights = scaled.T @ _solved(scaled @ scaled.T, targets, penalty)
    else:
        weights = _solved(scaled.T @ scaled, scaled.T @ targets, penalty)  # (W + 1, C)
    slopes = weights[:-1] / deviation[:, None]
    bias = _BIAS * weights[-1] - mean @ slopes
    return torch.cat([slopes, bias[None]]).float()


def _solved(products: Tensor, right: Tensor, penalty: float) -> Tensor:
    products.diagonal().add_(penalty)
    return torch.cholesky_solve(right, torch.linalg.cholesky(products))


# --------------------------------------------------------------------------------------------------------------
# Which images a task draws from a split: a function of the split's revision and a seed, of no model.
#
# Letters in shape comments: N images, C classes.

CARVED = 5  # one image in so many is taken away to tune on


def shuffled_classes(labels: Tensor, classes: int, *, revision: str, seed: int) -> list[Tensor]:
    """The images of each class in a random order: C tensors of int64, empty for a class without images.

    The order within a class depends on its images, its number, the revision and the seed alone.
    """
    order = torch.argsort(labels, stable=True)
    ends = torch.bincount(labels, minlength=classes).cumsum(0).tolist()
    starts = [0, *ends][:-1]
    return [
        _shuffled(order[start:end], f"{revision} {seed} {label}")
        for label, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def draw_shots(shuffled: list[Tensor], k: int) -> Tensor:
    """The first k images of each shuffled class, sorted; those of a smaller k are among those of a greater."""
    return torch.cat([own[:k] for own in shuffled]).sort().values


def carve(labels: Tensor, *, revision: str, seed: int) -> tuple[Tensor, Tensor]:
    """Split a training set in four fifths to learn from and one fifth to tune on.

    Of images with one label, each class gives a fifth of its own, at least one; a class with a single image
    keeps it to learn from. Of images with several labels, (N, C) bool, it is a fifth of all.

    Returns:
        The numbers of the images, sorted, both int64; the second is empty where no class has two images.
    """
    if not len(labels):
        return torch.arange(0), torch.arange(0)
    if labels.ndim == 1:
        of = shuffled_classes(labels, int(labels.max()) + 1, revision=revision, seed=seed)
    else:
        of = [_shuffled(torch.arange(len(labels)), f"{revision} {seed}")]
    taken = [min(max(1, round(len(own) / CARVED)), max(0, len(own) - 1)) for own in of]
    learn = torch.cat([own[n:] for own, n in zip(of, taken, strict=True)])
    tune = torch.cat([own[:n] for own, n in zip(of, taken, strict=True)])
    return learn.sort().values, tune.sort().values


def _shuffled(numbers: Tensor, key: str) -> Tensor:
    digest = hashlib.sha256(key.encode()).digest()
    random = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    return numbers[torch.from_numpy(random.permutation(len(numbers)))]

"""L2-penalized logistic regression by preconditioned L-BFGS, in blocks of rows, on any device.

The objective is that of ``sklearn.linear_model.LogisticRegression`` divided by C·N,

    C · Σ cross-entropy + ½ ‖W‖²,        biases not penalized,

which has a unique minimum. L-BFGS (Liu and Nocedal 1989) runs along the principal components of the features, where
1 / (γ s + λ) is close to the inverse Hessian (s a component's variance, γ a class's mean p(1 − p) at this step,
λ = 1/(C·N)); the variances of a trained model's features span decades. Products are float32 and their sums over
blocks float64; steps below float32's resolution are finished in float64.

The fit ends when another step would change the logits by less than ``tolerance`` of their size. scikit-learn ends
at a gradient of 1e-4, far from the minimum if there are many classes or the penalty is weak.

Dimensions: N rows, W features, K classes, P = W + 1 parameters of a class.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.errors import DataError
from eval.metrics import full_float32

_HELD = 1 << 30  # bytes of selected rows that are copied once; larger selections are gathered block by block
_BLOCK = 1 << 20  # logits (or features) at a time on a CPU, 4 MiB in float32
_DEVICE_BLOCK = 1 << 26  # and on an accelerator
_MEMORY = 10  # L-BFGS history
_TRIES = 20  # evaluations of one line search
_FLOAT32_LIMIT = 1e-5  # lowest tolerance for float32
_NEVER = 1e30  # a bias that no weights compensate
_NULL = 1e-14  # a component with less than this fraction of the largest variance is rounding error

Part = tuple[Tensor, Tensor | None]  # a (N, W) table, and the (n,) int64 rows to take from it or None for all


class Rows:
    """Rows of one or more feature tables, perhaps memory-mapped, read in blocks.

    Args:
        parts: tables, or selected rows of tables.
    """

    def __init__(self, *parts: Tensor | Part) -> None:
        self._parts: list[Part] = []
        for part in parts:
            if isinstance(part, Tensor):
                part = part, None
            table, chosen = part
            if chosen is not None and chosen.numel() * table.shape[1] * 4 <= _HELD:
                part = table[chosen], None
            self._parts.append(part)
        self.width = self._parts[0][0].shape[1]

    def __len__(self) -> int:
        return sum(len(table if chosen is None else chosen) for table, chosen in self._parts)

    def __add__(self, other: "Rows") -> "Rows":
        """Concatenate."""
        return Rows(*self._parts, *other._parts)

    def on(self, device: torch.device) -> "Rows":
        """Copy the rows to a CUDA device as float32 if they fit into half of its free memory."""
        if device.type != "cuda" or len(self) * self.width * 4 > torch.cuda.mem_get_info(device)[0] // 2:
            return self
        tables = (table if chosen is None else table[chosen] for table, chosen in self._parts)
        return Rows(*(table.to(device, torch.float32) for table in tables))

    def blocks(self, rows: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of at most ``rows`` rows: their slice, and (≤ rows, W) as stored."""
        start = 0
        for table, chosen in self._parts:
            n = len(table if chosen is None else chosen)
            for first in range(0, n, rows):
                last = min(first + rows, n)
                block = table[first:last] if chosen is None else table[chosen[first:last]]
                yield slice(start + first, start + last), block
            start += n


@dataclass(frozen=True, kw_only=True, eq=False)
class LogisticFit:
    """A fitted classifier with logits ``features @ weight.T + bias``.

    Attributes:
        weight: (K, W) float64 on the CPU; zeros for a class without rows.
        bias: (K,) float64; -inf for a class without rows, inf for a class of all rows.
        C: inverse strength of the penalty.
        iterations: L-BFGS steps.
        evaluations: passes over the rows.
        objective: the minimum, mean cross-entropy + λ/2 ‖W‖².
        converged: whether the tolerance was reached.
    """

    weight: Tensor
    bias: Tensor
    C: float
    iterations: int
    evaluations: int
    objective: float
    converged: bool

    def classifier(self) -> Tensor:
        """Return a finite (W + 1, K) float32 classifier for features with a last column of ones."""
        both = torch.cat([self.weight, self.bias[:, None].clamp(-_NEVER, _NEVER)], dim=1)
        return both.T.float().contiguous()


class LogisticProblem:
    """Rows and labels, prepared for fits with several values of C.

    Args:
        rows: N rows.
        labels: (N,) int64 for a softmax over the classes that occur, or (N, K) bool for one binary regression per
            class. Two classes are fitted as scikit-learn does, with a single logit.
        classes: K; a class without rows is never predicted.
        device: of the computation.
    """

    def __init__(
        self, rows: Rows, labels: Tensor, classes: int, *, device: torch.device | None = None
    ) -> None:
        assert len(rows) == len(labels)
        self._device = device or torch.device("cpu")
        self._classes = classes
        self._n = len(rows)
        self._rows = rows.on(self._device)
        self._always = torch.zeros(classes, dtype=torch.bool)
        if labels.ndim == 1:
            self._present = torch.bincount(labels, minlength=classes).nonzero()[:, 0]
            if len(self._present) < 2:
                raise DataError(
                    f"only {len(self._present)} class in the training images: at least two are needed"
                )
            targets = torch.searchsorted(self._present, labels)
        else:
            positive = labels.sum(dim=0)
            self._always = positive == self._n
            self._present = ((positive > 0) & ~self._always).nonzero()[:, 0]
            if not len(self._present):
                raise DataError("every class is in all or none of the training images")
            targets = labels[:, self._present]
        self._binary = labels.ndim == 1 and len(self._present) == 2
        self._softmax = labels.ndim == 1 and not self._binary
        self._targets = (targets[:, None].bool() if self._binary else targets).to(self._device)
        self._logits = 1 if self._binary else len(self._present)
        limit = _BLOCK if self._device.type == "cpu" else _DEVICE_BLOCK
        self._block = max(1, limit // max(self._logits, rows.width // 4))
        with full_float32(self._device):
            self._decompose()

    def _decompose(self) -> None:
        """Compute the mean (W,), the principal directions (W, W), and the variances (P,), 1 for the bias."""
        width = self._rows.width
        mean = torch.zeros(width, dtype=torch.float64, device=self._device)
        for _, block in self._rows.blocks(self._block):
            mean += block.to(self._device, torch.float64).sum(dim=0)
        self._mean = mean / self._n
        if not bool(self._mean.isfinite().all()):
            raise DataError("the features of training images are not finite")
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
        C: float,
        *,
        start: LogisticFit | None = None,
        tolerance: float = 1e-4,
        max_iterations: int = 1000,
    ) -> LogisticFit:
        """Minimize the objective.

        Args:
            start: initial parameters, from a fit with another C or of other rows; zeros by default.
            tolerance: largest change of the logits by another step, as a fraction of their root mean square.
        """
        with full_float32(self._device):
            descent = _Descent(self, 1 / (C * self._n), self._parameters(start))
            converged = descent.minimize(max(tolerance, _FLOAT32_LIMIT), max_iterations)
            if tolerance < _FLOAT32_LIMIT if converged else descent.iterations < max_iterations:
                descent.use_float64()
                converged = descent.minimize(tolerance, max_iterations)
        weight, bias = self._classifier(descent.point.at, torch.float64)
        if self._binary:  # ∓ half of the single logit gives the same probabilities
            weight = torch.cat([-weight, weight]) / 2
            bias = torch.cat([-bias, bias]) / 2
        all_weights = torch.zeros(self._classes, self._rows.width, dtype=torch.float64)
        all_biases = torch.full((self._classes,), -math.inf, dtype=torch.float64)
        all_biases[self._always] = math.inf
        all_weights[self._present] = weight.cpu()
        all_biases[self._present] = bias.cpu()
        return LogisticFit(
            weight=all_weights,
            bias=all_biases,
            C=C,
            iterations=descent.iterations,
            evaluations=descent.evaluations,
            objective=descent.point.value,
            converged=converged,
        )

    def _parameters(self, fit: LogisticFit | None) -> Tensor:
        """Return the (K, P) parameters of a fit along the principal directions, zeros for None."""
        if fit is None:
            return torch.zeros(self._logits, len(self._variance), dtype=torch.float64, device=self._device)
        weight = fit.weight[self._present].to(self._device)
        bias = fit.bias[self._present].nan_to_num(0.0, 0.0, 0.0).to(self._device)
        if self._binary:
            weight = weight[1:] - weight[:1]
            bias = bias[1:] - bias[:1]
        turned = torch.cat([weight @ self._turn[torch.float64], (bias + weight @ self._mean)[:, None]], dim=1)
        return self._center(turned) * self._used

    def _classifier(self, at: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return weights (K, W) and float64 biases (K,), the inverse of ``_parameters``."""
        weight = at[:, :-1].to(dtype) @ self._turn[dtype].T  # (K, W)
        return weight, at[:, -1] - weight.double() @ self._mean

    def _center(self, vector: Tensor) -> Tensor:
        """Subtract the classes' mean of (K, P), which changes no softmax and is 0 at the minimum."""
        return vector - vector.mean(dim=0) if self._softmax else vector

    def _evaluate(self, at: Tensor, penalty: float, dtype: torch.dtype) -> "_Point":
        weight, bias = self._classifier(at, dtype)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        slopes = torch.zeros_like(weight, dtype=torch.float64)  # (K, W)
        errors = torch.zeros_like(bias)  # (K,)
        curvature = torch.zeros_like(bias)
        shift = bias.to(dtype)
        for block, stored in self._rows.blocks(self._block):
            features = stored.to(self._device, dtype)  # (rows, W)
            logits = torch.addmm(shift, features, weight.T)  # (rows, K)
            loss = _softmax if self._softmax else _sigmoid
            losses, error = loss(logits, self._targets[block])
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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Point:
    """The objective at (K, P) parameters: value, gradient (K, P), and each class's mean of p(1 - p), (K,)."""

    at: Tensor
    value: float
    gradient: Tensor
    curvature: Tensor


def _softmax(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return cross-entropies (rows,) and probabilities minus targets (rows, K); overwrites the logits.

    The target's probability is kept apart so that no small error is a difference of numbers close to 1.
    """
    labels = labels[:, None]
    right = logits.gather(1, labels)  # (rows, 1)
    most = logits.amax(dim=1, keepdim=True)
    powers = logits.sub_(most).exp_()
    right_power = powers.gather(1, labels)
    rest = powers.scatter_(1, labels, 0.0).sum(dim=1, keepdim=True)
    total = rest + right_power
    errors = powers.div_(total).scatter_(1, labels, -rest / total)
    losses = torch.where(right_power > 1e-30, torch.log1p(rest / right_power), most - right + total.log())
    return losses, errors


def _sigmoid(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return binary cross-entropies and probabilities minus targets, both (rows, K); overwrites the logits."""
    sign = 1.0 - 2.0 * targets.to(logits.dtype)
    logits *= sign
    return F.softplus(logits), sign * torch.sigmoid(logits)


class _Descent:
    """L-BFGS from (K, P) parameters, first in float32."""

    def __init__(self, problem: LogisticProblem, penalty: float, start: Tensor) -> None:
        self._problem = problem
        self._penalty = penalty
        self._dtype = torch.float32
        # step, change of the gradient, their product
        self._steps: list[tuple[Tensor, Tensor, float]] = []
        self.iterations = 0
        self.evaluations = 0
        self.point = self._evaluate(start)

    def use_float64(self) -> None:
        self._dtype = torch.float64
        self.point = self._evaluate(self.point.at)

    def _evaluate(self, at: Tensor) -> _Point:
        self.evaluations += 1
        return self._problem._evaluate(at, self._penalty, self._dtype)

    def minimize(self, tolerance: float, max_iterations: int) -> bool:
        """Descend until another step would not matter; return whether that was reached."""
        problem = self._problem
        variance = problem._variance
        floor = float(variance[:-1].max()) * torch.finfo(self._dtype).eps
        penalty = torch.full_like(variance, self._penalty)
        penalty[-1] = 0.0
        while True:
            # the inverse Hessian if each class had the same p(1 - p) in all rows, (K, P)
            curvature = self.point.curvature.clamp(min=1e-300)[:, None]
            inverse = problem._used / (curvature * (variance + floor) + penalty)
            direction = self._direction(inverse)
            # either step alone may be small although the minimum is far
            steps = (direction, problem._center(self.point.gradient * inverse))
            change = max(float((step.square() * variance).sum()) for step in steps)
            if change <= tolerance**2 * float((self.point.at.square() * variance).sum()):
                return True
            if self.iterations >= max_iterations:
                return False
            point = self._search(direction)
            if point is None:
                if not self._steps:
                    return False
                self._steps.clear()  # retry with the preconditioner alone
                continue
            step = point.at - self.point.at
            turn = point.gradient - self.point.gradient
            product = float((step * turn).sum())
            if product > 0:
                self._steps = [*self._steps[1 - _MEMORY :], (step, turn, product)]
            self.point = point
            self.iterations += 1

    def _direction(self, inverse: Tensor) -> Tensor:
        """Return the L-BFGS direction (K, P), given the diagonal of the inverse Hessian (K, P)."""
        vector = self.point.gradient
        factors = []
        for step, turn, product in reversed(self._steps):
            factor = float((step * vector).sum()) / product
            vector = vector - factor * turn
            factors.append(factor)
        if self._steps:  # scaled as the last step found
            _, turn, product = self._steps[-1]
            inverse = inverse * (product / float((turn.square() * inverse).sum()))
        vector = self._problem._center(vector * inverse)
        for (step, turn, product), factor in zip(self._steps, reversed(factors), strict=True):
            vector = vector + (factor - float((turn * vector).sum()) / product) * step
        return -vector

    def _search(self, direction: Tensor) -> _Point | None:
        """Find a point along the direction that meets the Wolfe conditions; None if rounding prevents it."""
        here = self.point
        slope = float((here.gradient * direction).sum())
        if not slope < 0:
            return None
        rounding = torch.finfo(self._dtype).eps * abs(here.value)
        low = 0.0
        low_slope = slope
        high = math.inf
        high_slope = math.nan
        length = 1.0
        for _ in range(_TRIES):
            there = self._evaluate(here.at + length * direction)
            slope_there = float((there.gradient * direction).sum())
            if not there.value <= here.value + 1e-4 * length * slope + rounding or slope_there > -0.9 * slope:
                high = length
                high_slope = slope_there
            elif slope_there < 0.9 * slope:
                low = length
                low_slope = slope_there
            else:
                return there
            if math.isinf(high):
                length = 4 * low
                continue
            if math.isfinite(high_slope) and high_slope > low_slope:  # where a parabola has slope 0
                length = low - low_slope * (high - low) / (high_slope - low_slope)
            else:
                length = (low + high) / 2
            margin = (high - low) / 10
            length = min(max(length, low + margin), high - margin)
        return None

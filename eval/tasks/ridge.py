"""Few-shot least squares in closed form, as in Scaling Vision Transformers (Zhai et al. 2021, arXiv 2106.04560).

The details are those of the authors' published evaluation (big_vision, ``fewshot_lsr``): features before the head,
each made mean 0 and deviation 1 over the pictures that are learned from; a further feature of 100 for the bias,
which is then hardly penalized; targets 1 for a picture's class and -1 for the others; L2 penalty 2¹⁰, fixed, on the
sum of squares.

Letters in shape comments: N pictures, W width of a feature, C classes.
"""

import torch
from torch import Tensor

__all__ = ["ridge_classifier"]

PENALTY = 2.0**10
_BIAS = 100.0
_LEAST = 1e-5  # is added to deviations, since a single picture a class leaves some at 0


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

"""What does a linear probe's whole sweep cost, beside scikit-learn's L-BFGS doing the same?

    python -m bench.linear_probe [--rows 5000] [--width 512] [--classes 100] [--rounds 1] [--exact]

Both run the CLIP paper's protocol on the same made-up features: 7 strengths of the penalty from 1e-6 to 1e6,
halving around the peak down to 8 steps a decade, at most 1,000 steps a fit; the last fit to training and validation
rows together. scikit-learn starts each fit from zeros with its own defaults, as the paper's authors say they did;
with --exact it stops at a gradient of 1e-8 instead of 1e-4, which is nearer to what ours stops at.

The features are Gaussian around a centre a class. Their variances fall as 1 / i², and some means are far from 0.

Beside the times: the C that both choose, the accuracy on test rows, how much of the objective each leaves above the
least one found at their C, and how ours divides: the two products of an evaluation by themselves, and the rest.
"""

import argparse
import json
import platform
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.tasks.feature_rows import Rows
from eval.tasks.linear_probe import halving_search, penalty_of, sweep
from eval.tasks.logistic import LogisticFit, LogisticProblem

RESULTS = Path(__file__).parent / "results"
Split = tuple[Tensor, Tensor]


def made_up(rows: int, width: int, classes: int, seed: int) -> tuple[Split, Split, Split]:
    """Training, validation (a fifth as many) and test rows (as many) with their labels; every class occurs."""
    g = torch.Generator().manual_seed(seed)
    deviation = 1.0 / torch.arange(1, width + 1)
    deviation /= deviation.square().mean().sqrt()
    turned = torch.linalg.qr(torch.randn(width, width, generator=g)).Q
    mean = torch.randn(width, generator=g) * 0.3
    mean[:2] = 9.0
    centres = 0.5 * torch.randn(classes, width, generator=g)

    def some(n: int) -> Split:
        labels = torch.cat([torch.arange(classes), torch.randint(classes, (n - classes,), generator=g)])
        features = (centres[labels] + torch.randn(n, width, generator=g)) * deviation
        return features @ turned + mean, labels

    return some(rows), some(max(classes, rows // 5)), some(rows)


def ours(train: Split, val: Split, classes: int) -> tuple[float, LogisticFit]:
    """Seconds of the whole sweep, and its classifier."""
    began = time.perf_counter()
    found = sweep(Rows(train[0]), train[1], Rows(val[0]), val[1], classes)
    return time.perf_counter() - began, found.fit


def theirs(train: Split, val: Split, *, exact: bool) -> tuple[float, Any, int]:
    """Seconds of the whole sweep, its classifier, and how many fits took all of their steps."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    options = {"tol": 1e-8} if exact else {}
    (features, labels), (held, held_labels) = ([one.numpy() for one in split] for split in (train, val))
    unconverged = 0

    def fit(C: float, x: Any, y: Any) -> Any:
        nonlocal unconverged
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = LogisticRegression(C=C, max_iter=1000, **options).fit(x, y)
        unconverged += int(model.n_iter_.max() >= 1000)
        return model

    began = time.perf_counter()
    best = halving_search(
        lambda step: float(fit(1 / penalty_of(step), features, labels).score(held, held_labels))
    )
    both = [torch.cat([one, other]).numpy() for one, other in zip(train, val, strict=True)]
    model = fit(1 / penalty_of(best), *both)
    return time.perf_counter() - began, model, unconverged


def objective(weight: Tensor, bias: Tensor, split: Split, C: float) -> float:
    """What both minimize, in float64."""
    features, labels = split[0].double(), split[1]
    loss = torch.nn.functional.cross_entropy(features @ weight.T + bias, labels)
    return float(loss + weight.square().sum() / (2 * C * len(labels)))


def compare(
    train: Split, val: Split, test: Split, classes: int, *, exact: bool, ours_first: bool
) -> dict[str, Any]:
    """One paired round."""
    if ours_first:
        seconds, fit = ours(train, val, classes)
    their_seconds, model, unconverged = theirs(train, val, exact=exact)
    if not ours_first:
        seconds, fit = ours(train, val, classes)
    their_weight, their_bias = (
        torch.from_numpy(model.coef_).double(),
        torch.from_numpy(model.intercept_).double(),
    )
    both = torch.cat([train[0], val[0]]), torch.cat([train[1], val[1]])
    problem = LogisticProblem(Rows(both[0]), both[1], classes)
    row: dict[str, Any] = {
        "seconds": seconds,
        "scikit-learn seconds": their_seconds,
        "time ratio": seconds / their_seconds,
        "scikit-learn fits that took all steps": unconverged,
    }
    for name, weight, bias, C in (
        ("", fit.weight, fit.bias, fit.C),
        ("scikit-learn ", their_weight, their_bias, float(model.C)),
    ):
        least = problem.fit(C, start=fit, tolerance=1e-7)
        predicted, best = (
            (test[0].double() @ w.T + b).argmax(1) for w, b in ((weight, bias), (least.weight, least.bias))
        )
        row[f"{name}C"] = C
        row[f"{name}test accuracy"] = float((predicted == test[1]).double().mean())
        row[f"{name}predictions unlike the minimum's"] = float((predicted != best).double().mean())
        row[f"{name}objective above the least"] = objective(weight, bias, both, C) - least.objective
    return row


def what_bounds_it(train: Split, classes: int) -> dict[str, float]:
    """An evaluation's seconds, and those of its two products alone; the best of five each."""
    problem = LogisticProblem(Rows(train[0]), train[1], classes)
    began = time.perf_counter()
    fit = problem.fit(1.0)
    each = (time.perf_counter() - began) / fit.evaluations
    weight = torch.randn(classes, train[0].shape[1])
    alone = []
    for _ in range(5):
        began = time.perf_counter()
        logits = train[0] @ weight.T
        logits.T @ train[0]
        alone.append(time.perf_counter() - began)
    return {
        "evaluation seconds": each,
        "two products seconds": min(alone),
        "evaluations of C = 1": fit.evaluations,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--exact", action="store_true", help="scikit-learn with tol=1e-8 instead of its default"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "linear_probe.json", help="where the figures go"
    )
    options = parser.parse_args()
    train, val, test = made_up(options.rows, options.width, options.classes, options.seed)
    rounds = []
    for turn in range(options.rounds):
        first = turn % 2 == 0
        rounds.append(compare(train, val, test, options.classes, exact=options.exact, ours_first=first))
        print(json.dumps(rounds[-1], indent=2), flush=True)
    bounds = what_bounds_it(train, options.classes)
    ratio = statistics.median(row["time ratio"] for row in rounds)
    print(f"\nthe sweep takes {ratio:.2f} of scikit-learn's time")
    print(", ".join(f"{name}: {value:.3g}" for name, value in bounds.items()))
    about = {name: getattr(options, name) for name in ("rows", "width", "classes", "exact", "seed")}
    about |= {"machine": platform.machine(), "threads": torch.get_num_threads(), "time ratio": ratio}
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps({**about, "rounds": rounds, "bounds": bounds}, indent=2) + "\n")


if __name__ == "__main__":
    main()

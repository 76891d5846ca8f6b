"""Compare the cost of a linear probe's complete sweep with scikit-learn's L-BFGS.

    python -m bench.linear_probe [--rows 5000] [--width 512] [--classes 100] [--rounds 1] [--exact]

Both run the CLIP paper's protocol on the same synthetic features: 7 penalty strengths from 1e-6 to 1e6,
halving around the maximum down to 8 steps per decade, at most 1,000 steps per fit, and a final fit to
training and validation rows. scikit-learn starts each fit from zeros with its defaults, as the paper's
authors describe. With --exact a second scikit-learn run stops at a gradient of 1e-8 instead of 1e-4, closer
to its minimum.

Features are Gaussian around one center per class. Their variances fall as 1 / i², and some means are far from
0.

Also reported: the selected C, the accuracy on test rows, the distance of each fit from the minimum at its own
C (in the objective and in predictions), and the time of one evaluation and of its two matrix products.
"""

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.tasks.logistic import LogisticProblem, Rows
from eval.tasks.probe import get_penalty, halving_search, sweep_penalties

RESULTS = Path(__file__).parent / "results"
Split = tuple[Tensor, Tensor]


def synthetic(rows: int, width: int, classes: int, seed: int) -> tuple[Split, Split, Split]:
    """Make training, validation (a fifth as many) and test rows with labels; every class occurs."""
    g = torch.Generator().manual_seed(seed)
    deviation = 1.0 / torch.arange(1, width + 1)
    deviation /= deviation.square().mean().sqrt()
    rotation = torch.linalg.qr(torch.randn(width, width, generator=g)).Q
    mean = torch.randn(width, generator=g) * 0.3
    mean[:2] = 9.0
    centers = 0.5 * torch.randn(classes, width, generator=g)

    def some(n: int) -> Split:
        labels = torch.cat([torch.arange(classes), torch.randint(classes, (n - classes,), generator=g)])
        features = (centers[labels] + torch.randn(n, width, generator=g)) * deviation
        return features @ rotation + mean, labels

    return some(rows), some(max(classes, rows // 5)), some(rows)


def own(train: Split, val: Split, classes: int) -> tuple[float, Tensor, Tensor, float]:
    """Run clipkit's sweep; return seconds, weights, biases, and C."""
    began = time.perf_counter()
    fit = sweep_penalties(Rows(train[0]), train[1], Rows(val[0]), val[1], classes).fit
    return time.perf_counter() - began, fit.weight, fit.bias, fit.C


def reference(train: Split, val: Split, options: dict[str, float]) -> tuple[float, Tensor, Tensor, float]:
    """Run scikit-learn's sweep; return the same."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    (features, labels), (held, held_labels) = ([one.numpy() for one in split] for split in (train, val))
    both, both_labels = (torch.cat([one, other]).numpy() for one, other in zip(train, val, strict=True))

    def fit(C: float, x: Any, y: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return LogisticRegression(C=C, max_iter=1000, **options).fit(x, y)

    def value_at(step: int) -> float:
        return float(fit(1 / get_penalty(step), features, labels).score(held, held_labels))

    began = time.perf_counter()
    model = fit(1 / get_penalty(halving_search(value_at)), both, both_labels)
    seconds = time.perf_counter() - began
    weight, bias = (torch.from_numpy(one).double() for one in (model.coef_, model.intercept_))
    return seconds, weight, bias, float(model.C)


def objective(weight: Tensor, bias: Tensor, split: Split, C: float) -> float:
    """Return the objective that both minimize, in float64."""
    features, labels = split[0].double(), split[1]
    loss = torch.nn.functional.cross_entropy(features @ weight.T + bias, labels)
    return float(loss + weight.square().sum() / (2 * C * len(labels)))


def compare(train: Split, val: Split, test: Split, classes: int, *, exact: bool, turn: int) -> dict[str, Any]:
    """Run one round; the order of the sides alternates."""
    sides: dict[str, Callable[[], tuple[float, Tensor, Tensor, float]]] = {
        "ours": lambda: own(train, val, classes),
        "scikit-learn": lambda: reference(train, val, {}),
    }
    if exact:
        sides["scikit-learn, 1e-8"] = lambda: reference(train, val, {"tol": 1e-8})
    order = list(sides)
    found = {name: sides[name]() for name in order[turn % len(order) :] + order[: turn % len(order)]}
    both = torch.cat([train[0], val[0]]), torch.cat([train[1], val[1]])
    problem = LogisticProblem(Rows(both[0]), both[1], classes)
    row: dict[str, Any] = {}
    for name in order:
        seconds, weight, bias, C = found[name]
        least = problem.fit(C, tolerance=1e-7)
        predicted, best = (
            (test[0].double() @ w.T + b).argmax(1) for w, b in ((weight, bias), (least.weight, least.bias))
        )
        row[name] = {
            "seconds": seconds,
            "our share of its time": found["ours"][0] / seconds,
            "C": C,
            "test accuracy": float((predicted == test[1]).double().mean()),
            "predictions unlike those of the minimum": float((predicted != best).double().mean()),
            "objective above the minimum": objective(weight, bias, both, C) - least.objective,
        }
    return row


def measure_bounds(train: Split, classes: int) -> dict[str, float]:
    """Measure the seconds per evaluation, and of its two matrix products alone (the best of five)."""
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
    parser.add_argument("--exact", action="store_true", help="also run scikit-learn with tol=1e-8")
    parser.add_argument("--out", type=Path, default=RESULTS / "linear_probe.json", help="output file")
    options = parser.parse_args()
    train, val, test = synthetic(options.rows, options.width, options.classes, options.seed)
    rounds = []
    for turn in range(options.rounds):
        rounds.append(compare(train, val, test, options.classes, exact=options.exact, turn=turn))
        print(json.dumps(rounds[-1], indent=2), flush=True)
    bounds = measure_bounds(train, options.classes)
    ratio = statistics.median(row["scikit-learn"]["our share of its time"] for row in rounds)
    print(f"\nthe sweep takes {ratio:.2f} of scikit-learn's time")
    print(", ".join(f"{name}: {value:.3g}" for name, value in bounds.items()))
    about = {name: getattr(options, name) for name in ("rows", "width", "classes", "exact", "seed")}
    about |= {"machine": platform.machine(), "threads": torch.get_num_threads(), "time ratio": ratio}
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps({**about, "rounds": rounds, "bounds": bounds}, indent=2) + "\n")


if __name__ == "__main__":
    main()

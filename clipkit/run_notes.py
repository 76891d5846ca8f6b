"""What a training says before its first step: whether it starts or resumes, and which settings may not be meant."""

from collections.abc import Iterator
from pathlib import Path

from clipkit.config import Config
from clipkit.optim import learning_rate

__all__ = ["beginning", "notes"]

_OFTEN = 50  # times over each pair, from where a word is said


def beginning(run: Path, step: int, config: Config, *, planned: int) -> list[str]:
    """What is about to happen; ``planned`` steps were wanted so far."""
    if step >= config.steps:
        return [f"{run} has made all its {config.steps} steps"]
    lines = [f"resuming {run} at step {step}" if step else f"starting {run}"]
    if step and config.model.weights:
        lines.append(f"all weights are its own by now: model.weights = {config.model.weights!r} is not read")
    if config.steps != planned:
        lines.append(
            f"steps = {config.steps} now, and were {planned}: the rate follows the "
            f"{'longer' if config.steps > planned else 'shorter'} run's schedule from here on, "
            f"{learning_rate(step - 1, planned, config.optim):.3g} at step {step} and "
            f"{learning_rate(step, config.steps, config.optim):.3g} at step {step + 1}"
        )
    return lines


def notes(config: Config, *, step: int, samples: int, layers: int) -> list[str]:
    """What may not be meant, a line each.

    Args:
        config: of the run.
        step: updates made so far.
        samples: pairs that an epoch has.
        layers: that ``lock.unfreeze_every`` unlocks one after the other, of the tower with the most of them.
    """
    if step >= config.steps:
        return []
    return [f"note: {one}" for one in _notes(config, step=step, samples=samples, layers=layers)]


def _notes(config: Config, *, step: int, samples: int, layers: int) -> Iterator[str]:
    steps, optim = config.steps, config.optim
    if optim.warmup >= steps:
        yield (
            f"optim.warmup = {optim.warmup} is no shorter than the run of {steps} steps: the rate ends at "
            f"{learning_rate(steps - 1, steps, optim):.2g}, and optim.lr is {optim.lr:g}"
        )
    if config.small.steps >= steps:
        yield (
            f"small.steps = {config.small.steps} is no shorter than the run of {steps} steps: none is made at the "
            "model's full size"
        )
    every = config.lock.unfreeze_every
    if every and every * (layers - 1) >= steps:
        trained = 1 + (steps - 1) // every
        yield (
            f"lock.unfreeze_every = {every} unlocks {trained} of {layers} layers in {steps} steps; the others stay "
            "as they are"
        )
    seen = steps * config.batch_size / samples
    if seen > _OFTEN and not config.data.weights and not config.data.resample:
        ten = max(1, 10 * samples // config.batch_size)
        yield f"each of the {samples:,} pairs is seen {seen:,.0f} times; steps={ten} would be 10 times"
    if config.loss.name == "siglip" and not step and not config.model.weights:
        yield "the sigmoid loss begins near 10, above the level of chance, as its bias begins at -10"

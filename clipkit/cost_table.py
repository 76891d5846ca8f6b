"""The table that ``train.py --dry-run`` prints of a run's costs: plain text, at most 80 columns wide."""

import textwrap
from collections.abc import Iterator

from clipkit.estimate import Estimate
from clipkit.run_costs import COUNTED_ON, PUBLISHED_MFU, Costs

__all__ = ["cost_table", "duration"]

_WIDTH, _NAME = 80, 16  # columns: in all, and of a row's name


def cost_table(costs: Costs) -> list[str]:
    """Parameters, FLOPs, memory, whether that fits, time, and what was not looked at."""
    rows = [*_model(costs.whole), *_memory(costs), *_fits(costs), *_time(costs)]
    rows.append(("data", "not looked at: python -m data inspect SOURCE does that"))
    return [f"{name:<{_NAME}}{text}" for name, text in rows]


Row = tuple[str, str]


def _model(found: Estimate) -> Iterator[Row]:
    image, text = found.parameters["image"], found.parameters["text"]
    whole = sum(found.parameters.values())
    both = f"image {_millions(image)}, text {_millions(text)}"
    yield "parameters", f"{both}, {_millions(whole)} in all, {_millions(found.trained)} trained"
    if found.image_flops is None or found.text_flops is None or found.step_flops is None:
        yield "FLOPs", "not known for a tower of another library"
        return
    of_text = f"{_flops(found.text_flops.both)} a caption of {found.tokens} tokens"
    yield "FLOPs", f"{_flops(found.image_flops.both)} a picture, {of_text}"
    teacher = ", a teacher's too" if found.memory.teacher else ""
    yield "", f"{_flops(found.step_flops)} a step of {found.batch_size:,} pairs, both passes{teacher}"


def _memory(costs: Costs) -> Iterator[Row]:
    memory, gpu = costs.whole.memory, costs.machine.gpu
    yield "memory per GPU" if gpu else "memory", f"{_gb(memory.weights)} weights"
    rows = [
        (memory.gradients, "gradients"),
        (memory.optimizer, "optimizer state"),
        (memory.average, "moving average of the weights"),
        (memory.teacher, "the teacher's weights"),
        (memory.activations, "activations"),
        (memory.loss, "loss"),
        (memory.pictures, "pictures"),
    ]
    for size, name in rows:
        if size is None:
            yield "", f"        {name} of another library's tower: not known"
        elif size:
            yield "", f"{_gb(size)} {name}"
    if costs.unknown_teacher:
        yield "", "        a teacher that is not on this machine: not known"
    known = "at least" if memory.activations is None or costs.unknown_teacher else "in all"
    yield "", f"{_gb(memory.total)} {known}, and what {'CUDA' if gpu else 'Python'} itself takes"


def _fits(costs: Costs) -> Iterator[Row]:
    machine = costs.machine
    if costs.fits is None or machine.memory is None:
        return
    size = machine.memory / 2**30
    answer = "yes" if costs.fits else "no"
    counted = f"{size:.0f} GB, of which {COUNTED_ON * size:.0f} are counted on"
    yield "fits", f"{answer}: {_short(machine.gpu)} has {counted}"
    if costs.fits:
        return
    if not costs.instead:
        yield "", "it might with more GPUs (--gpus), a smaller model or batch_size"
    for number, settings in enumerate(costs.instead):
        yield "", f"{'or with' if number else 'it would with'} {settings}"


def _time(costs: Costs) -> Iterator[Row]:
    found, machine = costs.whole, costs.machine
    if machine.peak is None:
        yield "time", "not known: the published rates of GPUs are of bf16"
        return
    if found.hours is None:
        yield "time", "not known: the FLOPs of another library's tower"
        return
    text = f"{duration(found.hours)} for {found.steps:,} steps, scores left out, "
    rate = f"{costs.mfu:.0%} (--mfu) of {machine.peak / 1e12:,.3g} TFLOP/s are reached"
    if machine.gpu:
        text += f"on {found.world} × {_short(machine.gpu)}: {found.hours * found.world:,.0f} GPU-hours, "
        origin = "measured just now" if machine.measured else "by its data sheet"
        text += f"if the data keep up and {rate}, the rate {origin}"
    else:
        text += f"if the data keep up and {rate}, the rate measured just now; what else runs here slows both"
    if costs.assumed and machine.gpu:
        least, most = PUBLISHED_MFU
        text += f" (published runs reached {least:.0%} to {most:.0%}, see configs/README.md)"
    for number, line in enumerate(textwrap.wrap(text, _WIDTH - _NAME, break_on_hyphens=False)):
        yield "" if number else "time", line


def duration(hours: float) -> str:
    """In the unit that suits it."""
    seconds = hours * 3600
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    if hours < 48:
        return f"{hours:,.1f} hours"
    return f"{hours:,.0f} hours ({hours / 24:,.1f} days)"


def _short(gpu: str) -> str:
    return gpu.removeprefix("NVIDIA ").removeprefix("GeForce ")[:15].rstrip()


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M"


def _flops(count: int) -> str:
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T")):
        if count >= size:
            return f"{count / size:,.3g} {letter}FLOP"
    return f"{count / 1e9:,.3g} GFLOP"


def _gb(size: int) -> str:
    return f"{size / 2**30:8.2f} GiB"

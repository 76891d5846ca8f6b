"""Judge a fine-tune: is the model better than its start weights, what has it lost, and which weights to use.

Compared are the start weights, the last and the best checkpoint, and interpolations between the start weights and
the best checkpoint, or the last one without ``checkpoint.best`` (WiSE-FT; Wortsman et al. 2022,
https://arxiv.org/abs/2109.01903). They are scored on the held-out pairs, and on guard sets, which show what the
start weights could do.

The best checkpoint and the recommended weights are chosen by the scores that they are judged by, so 95% intervals
of single differences would too often be above zero. Therefore an interval on the held-out pairs is one of as many
tests as there are models that could have been chosen: each scored checkpoint, alone and interpolated. With a
probability of 95%, all of them contain their true differences (Bonferroni), however the model is chosen.
tests/eval/test_verdict.py checks this by simulation. Intervals on guard sets are of a single difference each.
"""

import hashlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from clipkit import CLIP, load
from clipkit.errors import ConfigError, DataError
from clipkit.export import EXPORTS, interpolate
from clipkit.formats import model_hash
from eval.compare import compare_items
from eval.datasets.targets import Target
from eval.metrics import is_fraction, lower_is_better, metric_title
from eval.report.charts import format_number, format_points, format_value
from eval.results.records import (
    PREFIX,
    Details,
    Verdict,
    VerdictRow,
    read_all_details,
    read_results,
    read_verdict,
    write_verdict,
)
from eval.run import Results, run_model
from eval.tasks import TASKS

ALPHAS = (0.25, 0.5, 0.75)
_START = "start weights"


@dataclass(frozen=True, kw_only=True)
class FineTune:
    """A finished fine-tune.

    Attributes:
        run: the run folder.
        weights: the start weights, as a command names them.
        architecture: the model's name if a command needs it to load the start weights, else "".
        load_start: loads the start weights; keywords are sizes as for ``clipkit.load``.
        last: the last checkpoint.
        best: the checkpoint with the best score; None without ``checkpoint.best``, or if it is not kept.
        checkpoints: number of checkpoints among which the best one was chosen; 1 without a choice.
    """

    run: Path
    weights: str
    architecture: str = ""
    load_start: Callable[..., CLIP]
    last: Path
    best: Path | None = None
    checkpoints: int = 1

    @property
    def selected(self) -> Path:
        """The checkpoint that is interpolated: the best one, or the last."""
        return self.last if self.best is None else self.best


def judge_fine_tune(
    tune: FineTune,
    held_out: Target,
    guards: Sequence[Target],
    *,
    metric: str = "",
    batch_size: int = 256,
    bf16: bool = False,
    device: torch.device,
) -> Verdict:
    """Score the models of a fine-tune in this process, and write its verdict.

    The run folder gets ``verdict.json`` and ``verdict/results.jsonl`` with details. A verdict on the same
    checkpoints and data is read and not made again.

    Args:
        held_out: the held-out pairs.
        guards: the guard sets, scored by their primary metrics.
        metric: the metric of the held-out pairs; "" for their primary one.
        bf16: whether the towers run in bfloat16.
    """
    stamps = [(target.dataset.name, target.dataset.stamp) for target in (held_out, *guards)]
    checkpoints = [tune.last.name, tune.selected.name, tune.checkpoints]
    facts = json.dumps([tune.weights, checkpoints, metric, stamps])
    inputs = hashlib.sha256(facts.encode()).hexdigest()[:16]
    with suppress(DataError):  # it cannot be read
        earlier = read_verdict(tune.run)
        if earlier is not None and earlier.inputs == inputs:
            return earlier
    scores = _Scores(tune.run / "verdict" / "results.jsonl", held_out, guards, batch_size, bf16, device)
    trained = load(str(tune.selected))
    start = _load_start(tune, trained)
    scores.add(_START, start)
    names = {tune.selected: f"best, {_name_step(tune.selected)}"}
    names[tune.last] = f"last, {_name_step(tune.last)}"
    for checkpoint, name in names.items():
        scores.add(name, trained if checkpoint == tune.selected else load(str(checkpoint)))
    sizes = _list_sizes(trained)
    if _list_sizes(start) != sizes:
        start = _load_start(tune, trained, **sizes)
    else:
        sizes = {}
    has_export = any(target.default and not target.refusal(trained) for target in EXPORTS.values())
    commands = {}
    for checkpoint, name in names.items():
        commands[name] = _write_command(tune, checkpoint, sizes=sizes, has_export=has_export)
    notes = []
    for alpha in ALPHAS:
        try:
            model = interpolate(start, trained, alpha)
        except ConfigError as error:
            notes.append(f"Weights were not interpolated: {error}.")
            break
        name = f"alpha {alpha:g}, {_name_step(tune.selected)}"
        scores.add(name, model)
        commands[name] = _write_command(tune, tune.selected, alpha, sizes=sizes)
    tests = tune.checkpoints * (1 + len(ALPHAS))
    rows = list(scores.compare(metric, tests=tests))
    informative = [row for row in rows if row.dataset not in scores.at_chance]
    verdict = _decide(informative, held_out.dataset.name, names[tune.selected], commands, scores.at_chance)
    captions = held_out.dataset.captions or ()
    if metric.startswith("text_to_image") and max(map(len, captions), default=0) > 1:
        notes.append(
            f"The intervals of {metric} are too narrow, because an image has several captions: use mean_R@1."
        )
    notes += [
        f"On {name} no loss can be seen, because the start weights are not above chance."
        for name in scores.at_chance
    ]
    note = f"With a probability of 95%, the intervals on {held_out.dataset.name} hold for all {tests} models "
    note += "from which one is chosen (each scored checkpoint, alone and interpolated)"
    notes.append(f"{note}, and each interval on a guard set by itself." if guards else f"{note}.")
    verdict = replace(verdict, rows=tuple(rows), inputs=inputs, notes=tuple(notes))
    write_verdict(tune.run, verdict)
    return verdict


def _name_step(checkpoint: Path) -> str:
    return f"step {int(checkpoint.name.removeprefix('step_'))}"


def _list_sizes(model: CLIP) -> dict[str, int]:
    shape = model.architecture
    vision = shape.vision
    tokens = {"image_tokens": vision.image_tokens} if vision.image_tokens else {}
    return {"image_size": vision.image_size, **tokens, "context_length": shape.text.context_length}


def _load_start(tune: FineTune, trained: CLIP, **sizes: int) -> CLIP:
    """Load the start weights, which see images as the trained model does."""
    start = tune.load_start(**sizes)
    now = trained.preprocess
    start.preprocess = replace(
        start.preprocess, background=now.background, upright=now.upright, pixel_range=now.pixel_range
    )
    return start


def _write_command(
    tune: FineTune, checkpoint: Path, alpha: float = 1.0, *, sizes: Mapping[str, int], has_export: bool = True
) -> str:
    """Return the command that writes a checkpoint, interpolated with the start weights, for other programs.

    A model without an export, such as one for images of variable size, is written for clipkit.
    """
    source = str(tune.run) if checkpoint == tune.last else f"{tune.run}@best"
    out = str(tune.run / "recommended")
    if alpha == 1 and has_export:
        return shlex.join(["clipkit", "export", source, out])
    words = ["clipkit", "interpolate", tune.weights, source, "--alpha", f"{alpha:g}", "--out", out]
    if tune.architecture:
        words += ["--name", tune.architecture]
    for name, size in sizes.items():
        words += [f"--{name.replace('_', '-')}", str(size)]
    return shlex.join(words)


class _Scores:
    """The scores of several models on the held-out pairs and the guard sets.

    Attributes:
        at_chance: after ``compare``, the guard sets on which the first model is not above chance.
    """

    def __init__(
        self,
        path: Path,
        held_out: Target,
        guards: Sequence[Target],
        batch_size: int,
        bf16: bool,
        device: torch.device,
    ) -> None:
        self._path, self._held_out, self._guards = path, held_out, guards
        self._batch_size, self._bf16, self._device = batch_size, bf16, device
        self._hashes: dict[str, str] = {}  # of the models, by name
        self.at_chance: list[str] = []

    def add(self, name: str, model: CLIP) -> None:
        """Score a model, unless the file has its scores."""
        self._hashes[name] = model_hash(model)
        autocast: AbstractContextManager[Any] = nullcontext()
        if self._bf16:
            autocast = torch.autocast(self._device.type, torch.bfloat16)
        results = Results()
        try:
            model.to(self._device)
            for targets, tasks in (
                ([self._held_out], self._held_out.dataset.tasks),
                (self._guards, ()),
            ):
                with autocast:
                    run_model(
                        model,
                        targets,
                        out=self._path,
                        tasks=tasks,
                        skip_existing=True,
                        batch_size=self._batch_size,
                        origin={"model": name, "weights": self._hashes[name]},
                        results=results,
                    )
        finally:
            model.cpu()  # memory of the device for one model
        if results.errors:
            raise results.errors[0]

    def compare(self, metric: str, *, tests: int) -> Iterator[VerdictRow]:
        """Yield the score of each model on each dataset, and the difference to the first model.

        Args:
            metric: of the held-out pairs, or "".
            tests: see ``Comparison``, for the held-out pairs.
        """
        lines = read_results(self._path)
        details, _ = read_all_details([self._path])
        for target in (self._held_out, *self._guards):
            is_guard = target is not self._held_out
            first_name, *others = self._hashes
            first, first_details = self._find_score(
                lines, details, target, "" if is_guard else metric, first_name
            )
            name, start = str(first["metric"]), float(first["value"])
            if is_guard and None not in (first["low"], first["chance"]) and first["low"] <= first["chance"]:
                self.at_chance.append(target.dataset.name)
            row = VerdictRow(
                dataset=target.dataset.name,
                metric=name,
                model=first_name,
                value=start,
                text=_format_score(name, start),
            )
            yield row
            for model in others:
                line, model_details = self._find_score(lines, details, target, name, model)
                row = replace(row, model=model, value=line["value"], text=_format_score(name, line["value"]))
                test = None
                if first_details is not None and model_details is not None:
                    test = compare_items(name, first_details, model_details, tests=1 if is_guard else tests)
                if test is None:
                    yield replace(row, change="not tested", gain=_sign_gain(name, row.value - start, start))
                    continue
                ends = [_sign_gain(name, end, start) for end in (test.low, test.high)]
                yield replace(
                    row,
                    change=_format_change(name, test.difference, test.low, test.high),
                    gain=_sign_gain(name, test.difference, start),
                    low=min(ends),
                    high=max(ends),
                )

    def _find_score(
        self,
        lines: Sequence[Mapping[str, Any]],
        details: Mapping[tuple[str, ...], Details],
        target: Target,
        metric: str,
        model: str,
    ) -> tuple[Mapping[str, Any], Details | None]:
        """Find the last line of a score of a model, and its details; metric "" stands for the primary one."""
        dataset, weights = target.dataset, self._hashes[model]
        model_lines = [
            line
            for line in lines
            if (line.get("weights"), line["dataset"], line.get("split"))
            == (weights, dataset.name, dataset.split)
            and not PREFIX.fullmatch(str(line.get("setting")))
        ]
        if not metric:
            primary = (*target.metrics, TASKS[str(model_lines[0]["task"])].metric)[0]
            metric = (
                primary
                if any(line["metric"] == primary for line in model_lines)
                else str(model_lines[0]["metric"])
            )
        line = [line for line in model_lines if line["metric"] == metric][-1]
        keys = ("task", "prompt_set", "setting")
        key = (weights, dataset.name, dataset.split, *(str(line.get(name)) for name in keys))
        return line, details.get(key)


def _sign_gain(metric: str, difference: float, start: float) -> float:
    """Return a difference as a gain, above 0 if better; relative to the start if the metric is not a fraction."""
    gain = -difference if lower_is_better(metric) else difference
    return gain if is_fraction(metric) else gain / max(abs(start), 1e-9)


def _format_score(metric: str, value: float) -> str:
    return format_value(100 * value, "%") if is_fraction(metric) else format_number(value)


def _format_change(metric: str, *values: float) -> str:
    if is_fraction(metric):
        texts = [format_points(value) for value in values]
    else:
        texts = [f"{value:+.3g}".replace("-", "−") for value in values]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]"


def _decide(
    rows: Sequence[VerdictRow],
    held_out: str,
    selected: str,
    commands: Mapping[str, str],
    at_chance: Sequence[str] = (),
) -> Verdict:
    """Decide from the rows, of which the first is that of the start weights on the held-out pairs.

    Of the models that are better on the held-out pairs, that with the highest sum of the gain on these pairs and
    the mean gain on the guard sets is recommended.

    Args:
        held_out: the name of the held-out pairs.
        selected: the name of the checkpoint that is judged if no model is better.
        commands: by model other than the start weights, the command that writes it.
        at_chance: guard sets without rows, on which the start weights are not above chance.
    """
    start = rows[0]
    judged = {row.model: row for row in rows if row.dataset == held_out and row.model in commands}
    guards = {name: [row for row in rows if row.dataset != held_out and row.model == name] for name in judged}

    def weigh(model: str) -> float:
        return judged[model].gain + fmean([row.gain for row in guards[model]] or [0.0])

    better = [name for name, row in judged.items() if row.low is not None and row.low > 0]
    chosen = max(better, key=weigh) if better else selected
    row = judged[chosen]
    what = f"{metric_title(row.metric)} on {held_out}"
    told = f"{chosen}: {row.text} {what}, start weights {start.text}: {_describe_change(row)}."
    kind = "no evidence"
    if better:
        kind = "better"
    elif row.high is not None and row.high < 0:
        kind = "worse"
    else:
        highest = max(judged.values(), key=lambda row: row.gain)
        told = (
            f"no model is better than the start weights ({start.text} {what}) beyond chance; {highest.model}: "
            f"{_describe_change(highest)}."
        )
    sentences = [f"{kind.capitalize()}: {told}", *_describe_guards(chosen, guards[chosen], at_chance)]
    if not better:
        sentences.append("Recommended: the start weights.")
    elif guards[chosen]:
        reason = "the highest sum of the differences on the held-out pairs and the guard sets"
        sentences.append(f"Recommended: {chosen}, with {reason}.")
    else:
        sentences.append(f"Recommended: {chosen}.")
    command = commands[chosen] if better else ""
    return Verdict(kind=kind, sentences=tuple(sentences), rows=tuple(rows), command=command)


def _describe_change(row: VerdictRow) -> str:
    return f"{row.change} points" if is_fraction(row.metric) else row.change


def _describe_guards(model: str, rows: Sequence[VerdictRow], at_chance: Sequence[str]) -> Iterator[str]:
    """Yield a sentence on what a model lost on guard sets, and one on the others."""
    if not rows:
        cause = "eval.guard names no dataset"
        if at_chance:
            cause = f"on all datasets of eval.guard ({', '.join(at_chance)}) the start weights are not above chance"
        yield f"What the model lost is not known: {cause}."
        return
    lost: list[str] = []
    others: list[str] = []
    for row in rows:
        text = f"{row.dataset} ({metric_title(row.metric)} {_describe_change(row)})"
        is_lost = row.high is not None and row.high < 0
        (lost if is_lost else others).append(text)
    if lost:
        yield f"Lost by {model}: {', '.join(lost)}."
    if others:
        yield f"No loss beyond chance: {', '.join(others)}."


def format_verdict(verdict: Verdict) -> list[str]:
    """Return a table of the models by dataset, and the sentences, as lines to print."""
    width = max(len(row.model) for row in verdict.rows)
    lines: list[str] = []
    title = ""
    for row in verdict.rows:
        what = f"{metric_title(row.metric)} on {row.dataset}"
        if what != title:
            title = what
            lines.append(f"{what}:")
        lines.append(f"  {row.model:<{width}}  {row.text:>7}  {row.change}".rstrip())
    lines += [*verdict.notes, *verdict.sentences]
    if verdict.command:
        lines.append(f"to write the recommended model: {verdict.command}")
    return lines

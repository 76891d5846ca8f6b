"""Build the page over many models and datasets from results files and the details next to them.

One self-contained file; the same results give the same bytes.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Unpack

from markupsafe import Markup

from clipkit.errors import DataError
from clipkit.files import write_page
from eval.datasets.dataset import TEST, some
from eval.features.image_models import TIMM
from eval.metrics import is_fraction, metric_title
from eval.report.charts import (
    TEMPLATES,
    Bar,
    Chart,
    ChartLine,
    Dot,
    Headline,
    Thumbnails,
    difference_bars,
    draw,
    figure,
    macro,
    number,
    ranked_bars,
    scatter,
)
from eval.report.tables import (
    AS_TRAINED,
    PLAIN,
    Average,
    Facts,
    Line,
    ScoreTable,
    TableRow,
    read_scores,
    score_table,
    setting_name,
    task_tables,
)
from eval.results.records import Details, read_details
from eval.results.scores import PREFIX
from eval.results.table import Model, Record, ResultTable, group_by_data, is_same_data, text_of

__all__ = ["Block", "blocks_html", "build_comparison"]

_BLOCKS = 96  # models on datasets that are shown in detail
_HEADLINES = 4
_SUITES = 4  # with a ranking of the models
_TONES = 8
_SHADES = 6  # of a confusion matrix
_LISTED = 8  # mistakes and classes
_LAYERS = 13  # layer numbers that fit on an axis as wide as a phone
_MOST_GFLOPS = 1e12  # larger values are errors and would spoil the axis
_SHOTS = re.compile(r"(\d{1,4})-shot\b[ ,]*(.*)")
_LAYER = re.compile(r"layer (\d{1,4})\b[ ,]*(.*)")
_OPTION = re.compile(r"(\w+)=(\([^()]*\)|[^\s()]+)(?: |$)")
_RESNET50 = f"{TIMM}resnet50."
_SIZE = re.compile(
    r"(?i)x?[tsmblhg]|ti|big-?g|tiny|small|base|large|huge|giant|so\d+m|patch\d+|plus|\d+|quickgelu"
)
_RESOLUTION = re.compile(r"[-_](?=[2-9]\d\d)\d+")
_MARKS = re.compile(r"[()']|,(?=\))")
_OTHER_COLUMNS = (  # shown elsewhere, different by dataset, or for recognizing results scored already
    "model", "weights", "architecture", "dim", "gflops", "prompts", "prompt_count", "data_revision", "captions",
    "choices", "time", "options", "train_overlap", "equal_images", "model_hash", "inputs", "lines",
)  # fmt: skip

TEMPLATES.filters["pieces"] = lambda name: re.findall(r"[^-/_: @]*[-/_: @]|[^-/_: @]+", name)


def build_comparison(results: Sequence[Path], out: Path, **facts: Unpack[Facts]) -> Path:
    """Write the page over all models and datasets of some results files and return its path.

    Args:
        results: ``results.jsonl`` files, optionally with details next to them.
        out: the page, written atomically.
        facts: about the datasets.

    Raises:
        DataError: a results file cannot be read, there are no scores, or the page cannot be written.
    """
    found = read_scores(results)
    tables = task_tables(found, **facts)
    whole = score_table(found, **facts)  # of all tasks without training
    zero_shot = tables.get("zero-shot") or replace(whole, lines=(), averages=())
    baseline, probe = _probe(found, zero_shot, tables.get("linear-probe"), facts.get("paper", {}))
    several = len(found.models) > 1

    headlines = []
    for row in whole.main_rows[:_HEADLINES]:
        value, i = max((value, -i) for i, value in enumerate(row.values) if value is not None)
        notes = [f"best: {found.models[-i].label}"] if several else []
        cell = row.cells[-i] if row.cells else None
        if cell is not None and cell.low is not None and cell.high is not None:
            notes.append(f"95% interval {100 * cell.low:.1f}% to {100 * cell.high:.1f}%")
        notes += [row.scope] if row.scope else []
        headlines.append(Headline(what=row.title, figure=f"{100 * value:.1f}", details=notes, value=value))

    leaders = []
    for average in whole.averages[:_SUITES] if several else ():
        values = zip(found.models, average.values, strict=True)
        bars = [Bar(name=model.label, value=value) for model, value in values if value is not None]
        others = average.published.items()
        bars += [Bar(name=name, value=value, note="published", muted=True) for name, value in others]
        leaders.append(ranked_bars(_capital(average.title), bars, note=average.scope))

    details: dict[tuple[str, ...], Details] = {}
    unread: list[str] = []
    for path in dict.fromkeys(results):
        read, own = read_details(path)
        unread += own
        details.update({one.key: one for one in read})
    # every line of a task records the duration of all its settings together
    seconds = {(row.model, *row.what[:4], row.seconds): row.seconds for row in found.rows if row.seconds}
    datasets = len({row.dataset for row in found.rows})
    models = f"{len(found.models)} models" if several else found.models[0].label
    thumbnails = Thumbnails()
    page = TEMPLATES.get_template("comparison.html").render(
        title=f"{models} on {f'{datasets} datasets' if datasets > 1 else found.rows[0].dataset}",
        models=found.models,
        rows=found.rows,
        seconds=sum(seconds.values()),
        notes=[*found.notes, *unread],
        headlines=headlines,
        leaders=leaders,
        tables=tables,
        baseline=baseline,
        probe=probe,
        cost=_costs(whole, tables.get("linear-probe")),
        few_shot=_few_shot(found, zero_shot),
        layers=_layers(found),
        dims=_dims(found),
        details=_detail_sections(found, [*details.values()], thumbnails),
        all_scores=_all_scores(found),
        facts_of=_model_facts(found.models),
        options=_options(found.rows),
        revisions=_revisions(found),
        thumbnails=thumbnails,
    )
    return write_page(out, page)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _probe(
    found: ResultTable, zero_shot: ScoreTable, probe: ScoreTable | None, paper: Mapping[str, float]
) -> tuple[str, list[Markup]]:
    """Chart zero-shot minus linear probe by dataset for each model (figure 5 of the CLIP paper).

    Compares with the linear probe of a timm model if there is one, otherwise with the model's own. If it is a
    ResNet-50, the differences in the paper are marked.

    Returns:
        The label of the timm model or "", and the charts.
    """
    if probe is None:
        return "", []
    before = {(line.dataset, line.metric): line for line in zero_shot.lines if line.counted}
    counted = [line for line in probe.lines if line.counted]
    # the timm model with the most probes, of several the first
    probes = {
        i: sum(line.cells[i] is not None for line in counted)
        for i, model in enumerate(found.models)
        if model.name.startswith(TIMM)
    }
    baseline = max((i for i in probes if probes[i]), key=lambda i: (probes[i], -i), default=None)
    for other in dict.fromkeys((baseline, None)):
        if other is None or not found.models[other].name.startswith(_RESNET50):
            paper = {}
        bars: dict[str, dict[str, Bar]] = {}
        for i, model in enumerate(found.models):
            for line in counted:
                own = line.cells[i if other is None else other]
                zero = before.get((line.dataset, line.metric))
                first = zero.cells[i] if zero else None
                if own is not None and first is not None and is_same_data(first, own):
                    reference = paper.get(line.dataset)
                    bar = Bar(name=line.dataset, value=first.value - own.value, reference=reference)
                    bars.setdefault(model.label, {}).setdefault(line.dataset, bar)  # the first setting
        if bars:
            every = [bar for by_dataset in bars.values() for bar in by_dataset.values()]
            values = [bar.value for bar in every]
            values += [bar.reference for bar in every if bar.reference is not None]
            charts = []
            for label, by_dataset in bars.items():
                better = sum(bar.value > 0 for bar in by_dataset.values())
                note = f"zero-shot is better on {better} of {len(by_dataset)}"
                theirs = [bar.reference for bar in by_dataset.values() if bar.reference is not None]
                if theirs:
                    wins = sum(one > 0 for one in theirs)
                    note += f"; lines: ViT-L/14@336px in the CLIP paper, better on {wins} of {len(theirs)}"
                limits = min(values), max(values)
                charts.append(difference_bars(label, [*by_dataset.values()], limits=limits, note=note))
            return "" if other is None else found.models[other].label, charts
    return "", []


def _costs(whole: ScoreTable, probe: ScoreTable | None) -> list[Markup]:
    """Chart means over the image tower's GFLOPs: the first one, and those of linear probes.

    The latter have a line for each family of models (figure 10 of the CLIP paper).
    """
    charts = [_cost(whole.models, row) for row in whole.main_rows[:1]]
    if probe is not None:
        charts += [
            _cost(probe.models, row, families=True) for row in probe.averages[:_SUITES] if not row.setting
        ]
    return [chart for chart in charts if chart]


def _cost(models: Sequence[Model], row: Line | Average, *, families: bool = False) -> Markup:
    """Chart a row over the image tower's GFLOPs, if models differ in them."""
    dots = {
        i: Dot(name=model.label, x=model.gflops, y=value, tone=i % _TONES + 1)
        for i, (model, value) in enumerate(zip(models, row.values, strict=True))
        if model.gflops is not None and 0 < model.gflops < _MOST_GFLOPS and value is not None
    }
    if len({dot.x for dot in dots.values()}) < 2:
        return Markup()
    lines: list[tuple[Dot, Dot, bool]] = []
    if families:
        members: dict[str, list[int]] = {}
        for i in dots:
            members.setdefault(family(models[i]) or models[i].label, []).append(i)
        for number, own in enumerate(members.values()):
            dots |= {i: replace(dots[i], tone=number % _TONES + 1) for i in own}
            base: int | None = None
            shapes: dict[str, int] = {}  # the first size of an architecture
            for i in sorted(own, key=lambda i: dots[i].x):
                shape = _RESOLUTION.sub("", models[i].architecture)
                if shape in shapes:
                    lines.append((dots[shapes[shape]], dots[i], True))
                else:
                    shapes[shape] = i
                    lines += [(dots[base], dots[i], False)] if base is not None else []
                    base = i
    title = _capital(row.title) if isinstance(row, Average) else row.names[0]
    notes = ["lines join models of one family, dashed lines the same model at a higher resolution"] * bool(
        lines
    )
    if len(dots) < len(models):
        notes.append(f"{len(models) - len(dots)} of {len(models)} models not shown: their cost is unknown")
    return scatter(title, [*dots.values()], lines=lines, x_unit="GFLOPs per image", note="; ".join(notes))


def family(model: Model) -> str:
    """Return a published model's kind and training, the same for all its sizes; "" for runs.

    "open_clip:ViT-L-14/openai" and "open_clip:ViT-B-32/openai" are "ViT openai".
    """
    scheme, colon, name = model.name.partition(":")
    if not colon or not scheme.isidentifier():
        return ""
    kind, _, training = name.replace(".", "/", 1).partition("/")
    words = [re.sub(r"\d.*", "", word) for word in re.split("[-_]", kind) if not _SIZE.fullmatch(word)]
    return " ".join(filter(None, (*words, training)))


@dataclass(frozen=True, kw_only=True)
class _Curve:
    """Scores of one model and variant of a setting: by number (images per class, layer), those to average."""

    model: int
    name: str
    tone: int
    dashed: bool
    points: list[tuple[int, list[Record]]]


def _curves(
    found: ResultTable, rows: Sequence[Record], setting: re.Pattern[str], least: int = 1
) -> tuple[list[_Curve], list[int], str]:
    """Collect curves of at least ``least`` points over the datasets that all curves have, of the same data.

    Each dataset contributes its first recorded metric. A dataset with few images per class has no scores for many
    shots and contributes only to the others. If the curves share no datasets, each uses its own.

    Returns:
        The curves, all their numbers, and a description of the datasets.
    """
    every: dict[tuple[int, str], dict[int, dict[str, Record]]] = {}
    metrics: dict[str, str] = {}
    for row in rows:
        match = setting.fullmatch(row.setting)
        if not match or not is_fraction(row.metric, row.value):
            continue
        if metrics.setdefault(row.dataset, row.metric) == row.metric:
            variant = match[2] if row.task == "few-shot" else " ".join(filter(None, (row.task, match[2])))
            points = every.setdefault((row.model, variant), {})
            points.setdefault(int(match[1]), {}).setdefault(row.dataset, row)
    every = {key: points for key, points in sorted(every.items()) if len(points) >= least}
    if not every:
        return [], [], ""
    numbers = sorted({i for points in every.values() for i in points})
    datasets: list[dict[str, list[Record]]] = []  # of each curve
    for points in every.values():
        datasets.append({})
        for row in (row for own in points.values() for row in own.values()):
            datasets[-1].setdefault(row.dataset, []).append(row)
    common = set.intersection(*map(set, datasets))
    same = {name for name in common if is_same_data(*(row for own in datasets for row in own[name]))}
    shared = {i: sorted(same.intersection(*(own[i] for own in every.values() if i in own))) for i in numbers}
    any_shared = any(shared.values())
    at: dict[tuple[str, ...], list[str]] = {}
    for i, names in shared.items():
        at.setdefault(tuple(names), []).append(str(i))
    first, total = next(iter(at)), len(set().union(*datasets))
    if not any_shared:
        description = "each line's own datasets, which differ"
    elif len(at) > 1:
        parts = [f"{len(names)} at {', '.join(where)}" for names, where in at.items() if names]
        description = f"the datasets that all have: {'; '.join(parts)}"
    elif len(first) == 1:
        description = first[0]
    else:
        description = f"{total} datasets"
        if len(first) < total:
            description = f"the {len(first)} of {description} that all have"
    variants = list(dict.fromkeys(variant for _, variant in every))
    several = len({model for model, _ in every}) > 1
    curves = []
    for (model, variant), points in every.items():
        # named and colored by what differs between the curves
        label, place = found.models[model].label, variants.index(variant)
        parts = [label if several else "", (variant or PLAIN) if len(variants) > 1 else ""]
        index = model if several else place
        averaged = {
            i: [own[name] for name in (shared[i] if any_shared else sorted(own))] for i, own in points.items()
        }
        curve = _Curve(
            model=model,
            name=", ".join(filter(None, parts)) or label,
            tone=index % _TONES + 1,
            dashed=index >= _TONES or (several and place > 0),
            points=[(i, averaged[i]) for i in numbers if averaged.get(i)],
        )
        curves.append(curve)
    return curves, numbers, description


def _few_shot(found: ResultTable, zero_shot: ScoreTable) -> Markup:
    """Chart mean accuracy over images per class, zero-shot at 0 (figure 6 of the CLIP paper)."""
    rows = [row for row in found.rows if row.task == "few-shot"]
    deviations = {
        (row.model, row.dataset, row.setting, row.metric.removesuffix("_std")): row.value
        for row in rows
        if row.metric.endswith("_std")
    }
    curves, shots, names = _curves(found, [row for row in rows if not row.metric.endswith("_std")], _SHOTS)

    def spread(row: Record) -> float | None:
        half = None if row.low is None or row.high is None else (row.high - row.low) / 2
        return deviations.get((row.model, row.dataset, row.setting, row.metric), half)

    x_of = {k: float(i) for i, k in enumerate(dict.fromkeys([0, *shots]))}
    lines = []
    for curve in curves:
        points, band = [], []
        for k, own in curve.points:
            mean = fmean(row.value for row in own)
            known = [one for row in own if (one := spread(row)) is not None]
            points.append((x_of[k], 100 * mean))
            if len(known) == len(own):
                width = math.sqrt(sum(one * one for one in known)) / len(known)
                band.append((x_of[k], 100 * (mean - width), 100 * (mean + width)))
        # a ring at 0: the zero-shot score on the datasets of the first point, if all of them have one
        counted = {
            line.dataset: line.values[curve.model] for line in reversed(zero_shot.lines) if line.counted
        }
        values = [counted.get(row.dataset) for _, own in curve.points[:1] for row in own]
        rings = [value for value in values if value is not None]
        lines.append(
            ChartLine(
                name=curve.name,
                points=points,
                band=band,
                tone=curve.tone,
                dots=True,
                mark=(0.0, 100 * fmean(rings)) if rings and len(rings) == len(values) else None,
                dashed=curve.dashed,
            )
        )
    kind = "± standard deviation over seeds" if deviations else "interval"
    note = [f"mean of {names}"]
    note += [f"band: {kind} of the mean"] * any(line.band for line in lines)
    note += ["rings: zero-shot"] * any(line.mark is not None for line in lines)
    return draw(
        Chart(
            title="Accuracy by images per class",
            note="; ".join(note),
            lines=lines,
            unit="%",
            wide=True,
            x_name="images:",
            x_ticks=[(x, str(k)) for k, x in x_of.items()],
        )
    )


def _layers(found: ResultTable) -> Markup:
    """Chart the mean accuracy of a probe at each depth, if several layers were probed."""
    curves, depths, names = _curves(found, found.rows, _LAYER, least=2)
    shown = depths[::-1][:: math.ceil(len(depths) / _LAYERS) or 1]
    return draw(
        Chart(
            title="Accuracy by depth",
            note=f"mean of {names}; features before the projection, layer by layer",
            lines=_mean_lines(curves, float),
            unit="%",
            wide=True,
            x_name="layer",
            x_ticks=[(float(i), str(i)) for i in reversed(shown)],
        )
    )


def _dims(found: ResultTable) -> Markup:
    """Chart the mean score of prefixes of the embedding and of the whole over their size, on a logarithmic axis."""
    groups: dict[tuple[int | str, ...], list[Record]] = {}
    for row in found.rows:
        dim, setting = row.dim_and_setting
        same = (row.model, row.dataset, row.split, row.task, row.prompt_set, setting)
        groups.setdefault(same, []).append(replace(row, setting=f"dim {dim} {setting}".strip()))
    rows = [row for own in groups.values() if len({row.setting for row in own}) > 1 for row in own]
    curves, dims, names = _curves(found, rows, PREFIX, least=2)
    return draw(
        Chart(
            title="Score by dimension",
            note=f"mean of {names}; the first elements of the embedding",
            lines=_mean_lines(curves, math.log2),
            unit="%",
            wide=True,
            x_name="dimension",
            x_ticks=[(math.log2(dim), str(dim)) for dim in dims],
        )
    )


def _mean_lines(curves: Sequence[_Curve], place: Callable[[int], float]) -> list[ChartLine]:
    """Draw the mean score of each point of curves at ``place(number)``."""
    return [
        ChartLine(
            name=curve.name,
            points=[(place(number), 100 * fmean(row.value for row in own)) for number, own in curve.points],
            tone=curve.tone,
            dots=True,
            dashed=curve.dashed,
        )
        for curve in curves
    ]


@dataclass(frozen=True, kw_only=True)
class Block:
    """The details of one model on one dataset; ``score`` is its main score as text."""

    model: Model
    details: Details
    score: str

    @property
    def heading(self) -> str:
        """Task, prompts, setting, hyperparameters and score."""
        details = self.details
        prompts = f"prompts {details.prompt_set}" if details.prompt_set else ""
        parts = [details.task, prompts, setting_name(details.task, details.setting)]
        parts += [f"C = {number(details.chosen_c)}"] if details.chosen_c is not None else []
        parts += [f"learning rate {details.chosen_rate:g}"] if details.chosen_rate is not None else []
        text = ", ".join(filter(None, parts))
        text += f" (chosen on {details.tuned_on})" if details.tuned_on else ""
        return text + (f", {self.score}" if self.score else "")

    @property
    def recall(self) -> Markup | None:
        """For retrieval, a chart of the fraction of queries with a match among the first k; None if unreadable."""
        ranks = {}
        for direction in ("image_to_text", "text_to_image"):
            if (packed := self.details.values.get(f"{direction}_mean_rank")) is not None:
                try:
                    ranks[direction.replace("_", " ")] = sorted(packed.tensor().tolist())
                except DataError:
                    return None
        ranks = {label: own for label, own in ranks.items() if own}
        if not ranks:
            return Markup()
        last = max(own[-1] for own in ranks.values())
        steps = (factor * 10**power for power in range(8) for factor in (1, 3))
        first = [*(k for k in steps if 1.5 * k < last), last]
        lines = [
            ChartLine(
                name=label,
                points=[(float(i), 100 * bisect_right(own, k) / len(own)) for i, k in enumerate(first)],
                tone=tone,
                dots=True,
                summary=f"median rank {number(median(own))}",
            )
            for tone, (label, own) in enumerate(ranks.items(), start=1)
        ]
        return draw(
            Chart(
                title="Found among the first k",
                note="fraction of queries with a match among them",
                lines=lines,
                unit="%",
                floor=0,
                ceiling=100,
                wide=True,
                x_name="among the first",
                x_ticks=[(float(i), number(k)) for i, k in enumerate(first)],
            )
        )

    @property
    def confusions(self) -> list[dict[str, Any]]:
        """The confusion matrices of classes and superclasses; rows are true, ``counts`` None if unreadable.

        ``squares`` draws many classes: whether on the diagonal, opacity, and path of all squares of one shade.
        """
        details = self.details
        found = []
        for title, names, packed in (
            ("Confusion", details.class_names, details.matrix),
            ("By superclass", details.superclass_names, details.superclass_matrix),
        ):
            if packed is None or not names:
                continue
            try:
                counts = packed.tensor().view(len(names), len(names)).tolist()
            except (DataError, RuntimeError):
                counts = None
            paths: dict[tuple[bool, int], list[str]] = {}
            for i, row in enumerate(counts or ()):
                total = sum(row)
                for j, count in enumerate(row):
                    if count:
                        shade = min(_SHADES, 1 + int(_SHADES * count / total))
                        paths.setdefault((i == j, shade), []).append(f"M{j} {i}h1v1h-1z")
            squares = [
                (own, 0.1 + 0.9 * shade / _SHADES, "".join(path))
                for (own, shade), path in sorted(paths.items())
            ]
            diagonal = sum(row[i] for i, row in enumerate(counts or ()))
            found.append(
                {"title": title, "names": names, "counts": counts, "diagonal": diagonal, "squares": squares}
            )
        return found

    @property
    def mistakes(self) -> list[tuple[str, str, int]]:
        """The most frequent mistakes: true class, predicted class, count."""
        frequent = self.details.mistakes[:_LISTED]
        return [(self._class(label), self._class(predicted), count) for label, predicted, count in frequent]

    @property
    def weakest(self) -> list[tuple[str, float]]:
        """The classes of the lowest accuracy, if there are several classes."""
        pairs = zip(self.details.class_right, self.details.class_counts, strict=True)
        known = sorted((right / count, i) for i, (right, count) in enumerate(pairs) if count)
        worst = known[: _LISTED // 2] if len(known) > 1 else []
        return [(self._class(i), accuracy) for accuracy, i in worst]

    def _class(self, label: int) -> str:
        return self.details.class_names[label] or f"class {label}"


def blocks_html(blocks: Sequence[Block], thumbnails: Thumbnails) -> Markup:
    """Render the blocks of one dataset."""
    return macro("blocks.html", "blocks")(blocks, thumbnails)


def _detail_sections(
    found: ResultTable, details: Sequence[Details], thumbnails: Thumbnails
) -> tuple[str, list[tuple[str, str, Markup]]]:
    """Render details by dataset; of many models only the first few, so that the page stays small.

    Returns:
        An introduction, and by dataset its name, models and content.
    """
    numbers = {model.weights: i for i, model in reversed(list(enumerate(found.models)))}
    order = {name: i for i, name in enumerate(dict.fromkeys(row.dataset for row in found.rows))}
    scores = {(row.model, *row.series): row for row in reversed(found.rows)}
    of_models: dict[str, dict[int, list[Block]]] = {}
    for one in sorted(
        (one for one in details if one.weights in numbers and one.dataset in order),
        key=lambda one: (order[one.dataset], numbers[one.weights], one.task not in AS_TRAINED, one.key),
    ):
        model = numbers[one.weights]
        row = scores.get((model, one.dataset, one.split, one.task, one.prompt_set, one.setting))
        score = ""
        if row is not None:
            value = figure(100 * row.value, "%") if is_fraction(row.metric, row.value) else number(row.value)
            score = f"{metric_title(row.metric)} {value}"
        block = Block(model=found.models[model], details=one, score=score)
        of_models.setdefault(one.dataset, {}).setdefault(model, []).append(block)
    # first one task of every model, then the others
    by_dataset = {
        dataset: [own[0] for own in by_model.values()] + [one for own in by_model.values() for one in own[1:]]
        for dataset, by_model in of_models.items()
    }
    left = sum(map(len, by_dataset.values()))
    most = max(map(len, by_dataset.values()), default=0)
    while most > 1 and sum(min(most, len(blocks)) for blocks in by_dataset.values()) > _BLOCKS:
        most -= 1
    datasets = []
    for dataset, blocks in by_dataset.items():
        content = blocks_html(blocks[:most], thumbnails)
        if content.strip():
            left -= len(blocks[:most])
            labels = list(dict.fromkeys(block.model.label for block in blocks))
            datasets.append((dataset, f"{len(labels)} models" if len(labels) > 1 else labels[0], content))
    lead = []
    if any(block.details.examples for blocks in by_dataset.values() for block in blocks[:most]):
        lead.append(
            "Examples alternate between random correct and random wrong predictions, whatever the accuracy. ✓ "
            "marks correct ones."
        )
    if left:
        lead.append(
            f"The first {most} models of each dataset are shown."
            if most > 1
            else "One model of each dataset is shown."
        )
    return " ".join(lead), datasets


def _all_scores(
    found: ResultTable,
) -> list[tuple[str, int, list[tuple[TableRow, str, int | None, float | None]]]]:
    """List dataset, number of scores, and rows with description, n and chance."""
    by_dataset: dict[str, dict[tuple[str, ...], list[Record]]] = {}
    for row in found.rows:
        by_dataset.setdefault(row.dataset, {}).setdefault(row.what, []).append(row)
    sections = []
    for dataset, by_what in by_dataset.items():
        rows = []
        for (_, split, task, prompts, setting, metric), own in by_what.items():
            for group in group_by_data(own):
                of_model = {row.model: row for row in group.rows}
                cells = tuple(map(of_model.get, range(len(found.models))))
                values = tuple(None if cell is None else cell.value for cell in cells)
                parts = (
                    task,
                    setting_name(task, setting),
                    prompts and f"prompts {prompts}",
                    "" if split == TEST else split,
                    group.note,
                )
                chance = next((row.chance for row in of_model.values() if row.chance is not None), None)
                table_row = TableRow(metric=metric, values=values, cells=cells)
                rows.append((table_row, ", ".join(filter(None, parts)), group.n, chance))
        sections.append((dataset, len(by_what), rows))
    return sections


def _model_facts(models: Sequence[Model]) -> tuple[dict[str, Any], list[str]]:
    """Return the provenance that all models share, and the names of fields in which they differ."""
    shared: dict[str, Any] = {}
    own: list[str] = []
    for key in dict.fromkeys(key for model in models for key in model.provenance):
        values = [model.provenance.get(key) for model in models]
        if key in _OTHER_COLUMNS or all(value is None for value in values):
            continue
        if all(value == values[0] for value in values):
            shared[key] = values[0]
        else:
            own.append(key)
    return shared, own


def _options(rows: Sequence[Record]) -> dict[str, str]:
    """By task, the last options of each model and dataset, with datasets if they differ."""
    texts = ((row, text_of(row.line, "options")) for row in rows)
    last = {(row.task, row.dataset, row.model): text for row, text in texts if text}
    tasks: dict[str, dict[str, dict[str, None]]] = {}
    for (task, dataset, _), text in last.items():
        tasks.setdefault(task, {}).setdefault(text, {})[dataset] = None
    options = {}
    for task, by_text in tasks.items():
        shown = []
        for text, datasets in by_text.items():
            words = text
            if "".join(match[0] for match in _OPTION.finditer(text)) == text:
                values = {"True": "yes", "False": "no"}
                words = "; ".join(
                    f"{name.replace('_', ' ')} {values.get(value, _MARKS.sub('', value))}"
                    for name, value in _OPTION.findall(text)
                )
            shown.append(f"{words} ({some(list(datasets))})" if len(by_text) > 1 else words)
        options[task] = " – ".join(shown)
    return options


def _revisions(found: ResultTable) -> dict[str, str]:
    """By dataset, the revisions of its images and prompts."""
    revisions: dict[tuple[str, str], dict[str, None]] = {}
    for row in found.rows:
        seen = revisions.setdefault((row.dataset, row.split), {})
        if row.data_revision:
            seen[f"images {row.data_revision}"] = None
        if row.prompts and row.task in ("zero-shot", "likelihood"):
            seen[f"prompts {' '.join(filter(None, (row.prompt_set, row.prompts)))}"] = None
    return {
        name if split == TEST else f"{name}, {split}": "; ".join(seen)
        for (name, split), seen in revisions.items()
        if seen
    }

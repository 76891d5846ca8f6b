"""The scores of the report: the big figures at its head, the table of them all, and what each is called.

Scores make one series, such as a curve, where dataset, split, task, prompt set and setting are the same.
"""

import re
from collections.abc import Collection, Sequence
from html import escape

from eval.report.charts import figure, number
from eval.report.run_folder import Result, Series

__all__ = [
    "PLAIN",
    "chief_first",
    "headline_scores",
    "in_percent",
    "is_rank",
    "is_share",
    "lower_is_better",
    "metric_name",
    "newest",
    "of_training",
    "results_table",
    "series_name",
    "setting_name",
    "tells",
]

PLAIN = "ridge"  # the estimator of few-shot whose setting names none

_HEADLINES = 4
_OF_BOTH = "mean_R@1"  # directions of retrieval
_WORDS = {
    "acc1": "top-1",
    "acc5": "top-5",
    "superclass_acc1": "superclass top-1",
    "image_to_text_R@1": "image to text R@1",
    "text_to_image_R@1": "text to image R@1",
}
_COLUMNS = ("Dataset", "Task", "Metric", "Value", "95% interval", "Chance", "Samples", "Step")
_TEXT_COLUMNS = 3
_STD = "_std"  # behind the name of a metric, its deviation over seeds
_SHOTS = re.compile(r"\d+-shot")


def metric_name(metric: str) -> str:
    """A metric as a person says it; a deviation goes by the name of what it is of."""
    if metric.endswith(_STD):
        return f"{metric_name(metric.removesuffix(_STD))} std"
    return _WORDS.get(metric, metric.replace("_", " "))


def setting_name(task: str, setting: str) -> str:
    """A setting as a person says it: one epoch in the singular, few-shot with the estimator where that is ridge."""
    if setting == "1 epochs":
        return "1 epoch"
    return f"{setting} {PLAIN}" if task == "few-shot" and _SHOTS.fullmatch(setting) else setting


def tells(metric: str, n: int | None) -> bool:
    """Whether a score says anything: the deviation over a single seed does not."""
    return not metric.endswith(_STD) or n is None or n > 1


def is_rank(metric: str) -> bool:
    """Whether a metric counts from 1."""
    return metric.endswith("_rank")


def lower_is_better(metric: str) -> bool:
    """Whether the best model is the one of the least value."""
    return is_rank(metric) or metric == "ece"


def is_share(metric: str, *values: float | None) -> bool:
    """Whether numbers of a metric lie in 0–1 and are told in percent; the rank 1 is none of them."""
    return not is_rank(metric) and all(0 <= one <= 1 for one in values if one is not None)


def in_percent(result: Result) -> bool:
    """Whether a score and what stands beside it are told in percent."""
    return is_share(result.metric, result.value, result.low, result.high, result.chance)


def newest(results: Sequence[Result]) -> list[Result]:
    """The last score of each metric, series by series; those that the training itself scored come first."""
    last: dict[tuple[Series, str], Result] = {}
    for result in results:
        last[result.series, result.metric] = result
    own = {result.series for result in results if result.own}
    places = {series: i for i, series in enumerate(dict.fromkeys(series for series, _ in last))}
    return sorted(last.values(), key=lambda result: (result.series not in own, places[result.series]))


def of_training(results: Sequence[Result]) -> list[Result]:
    """What the training itself was scored on when it last was; of one that never was, its latest scores.

    It depends on no score that was taken of a checkpoint later.
    """
    own = [result for result in results if result.own] or list(results)
    last = max((result.step for result in own), default=0)
    return [result for result in own if result.step == last]


def chief_first(metrics: Sequence[str]) -> list[str]:
    """The metric that counts first: the mean of both directions of retrieval, else the first recorded."""
    return sorted(metrics, key=lambda metric: metric != _OF_BOTH)


def series_name(result: Result, known: Collection[Series]) -> str:
    """What a score's series is called beside its dataset.

    Args:
        result: any score of it.
        known: the series of the page; prompts are told where those of the same task and setting differ in them.
    """
    mine = (result.dataset, result.task, result.setting)
    alike = [(split, prompts) for data, split, task, prompts, own in known if (data, task, own) == mine]
    parts = (
        result.task,
        setting_name(result.task, result.setting),
        (f"prompts {result.prompt_set}" if result.prompt_set else "no prompts")
        if len({prompts for _, prompts in alike}) > 1
        else "",
        f"split {result.split}" if result.split != "test" or len({split for split, _ in alike}) > 1 else "",
    )
    return ", ".join(filter(None, parts))


def headline_scores(results: Sequence[Result], step: int | None) -> str:
    """The chief metric of what the training itself was scored on, in big figures, with its interval and chance.

    Args:
        results: all of the run.
        step: the last one of the run; scores of another say theirs.
    """
    metrics: dict[Series, dict[str, Result]] = {}
    for result in of_training(results):
        metrics.setdefault(result.series, {})[result.metric] = result
    chief = [own[chief_first(list(own))[0]] for own in metrics.values()]
    known = {result.series for result in results}
    shown = "".join(_headline(result, known, step) for result in chief[:_HEADLINES])
    return f'<div class="scores">{shown}</div>' if shown else ""


def _headline(result: Result, known: Collection[Series], step: int | None) -> str:
    details = [] if result.step == step else [f"step {number(result.step)}"]
    if result.low is not None and result.high is not None:
        details.append(f"95% interval {_told(result, result.low)} to {_told(result, result.high)}")
    if result.chance is not None:
        details.append(f"chance {_told(result, result.chance)}")
    if result.n is not None:
        details.append(f"n = {number(result.n)}")
    value, unit = _told(result, result.value), "%" if in_percent(result) else ""
    gauge = _gauge(result) if in_percent(result) else ""
    return (
        f'<div class="score"><p class="what"><b>{escape(result.dataset)}</b> '
        f"{escape(' '.join(filter(None, (series_name(result, known), metric_name(result.metric)))))}</p>"
        f'<p class="figure">{escape(value.removesuffix(unit))}<small>{unit}</small></p>{gauge}'
        f'<p class="details">{"".join(f"<span>{escape(one)}</span>" for one in details)}</p></div>'
    )


def _gauge(result: Result) -> str:
    marks = [f'<i class="bar" style="width:{result.value * 100:.2f}%"></i>']
    if result.low is not None and result.high is not None:
        width = max(0.0, result.high - result.low) * 100
        marks.append(f'<i class="interval" style="left:{result.low * 100:.2f}%;width:{width:.2f}%"></i>')
    if result.chance is not None:
        marks.append(f'<i class="chance" style="left:{result.chance * 100:.2f}%"></i>')
    return f'<div class="gauge" aria-hidden="true">{"".join(marks)}</div>'


def results_table(results: Sequence[Result]) -> str:
    """The last score of every metric; "" if there is none."""
    known = {result.series for result in results}
    rows = "".join(_row(result, known) for result in newest(results))
    if not rows:
        return ""
    heads = "".join(
        f'<th scope="col"{"" if i < _TEXT_COLUMNS else " class=n"}>{name}</th>'
        for i, name in enumerate(_COLUMNS)
    )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="All results"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(result: Result, known: Collection[Series]) -> str:
    interval = ""
    if result.low is not None and result.high is not None:
        interval = f"{_told(result, result.low)} – {_told(result, result.high)}"
    texts = (result.dataset, series_name(result, known), metric_name(result.metric))
    figures = (
        _told(result, result.value),
        interval,
        "" if result.chance is None else _told(result, result.chance),
        "" if result.n is None else number(result.n),
        number(result.step),
    )
    cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
    cells += "".join(f'<td class="n">{escape(text)}</td>' for text in figures)
    return f"<tr>{cells}</tr>"


def _told(result: Result, value: float) -> str:
    return figure(100 * value, "%") if in_percent(result) else figure(value, "")

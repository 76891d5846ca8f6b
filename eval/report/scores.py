"""The scores of the report: the big figures at its head, the table of them all, and what each is called."""

import re
from collections.abc import Sequence
from html import escape

from eval.report.charts import figure, number
from eval.report.run_folder import Result

__all__ = [
    "PLAIN",
    "headline_scores",
    "in_percent",
    "is_rank",
    "is_share",
    "lower_is_better",
    "metric_name",
    "newest",
    "results_table",
    "setting_name",
    "tells",
]

PLAIN = "ridge"  # the estimator of few-shot whose setting names none

_HEADLINES = 4
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
    """A setting as a person says it: with the estimator, which few-shot's does not say where it is ridge."""
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
    """The last score of each dataset, task and metric."""
    last: dict[tuple[str, str, str], Result] = {}
    for result in results:
        last[result.dataset, result.task, result.metric] = result
    return list(last.values())


def headline_scores(results: Sequence[Result]) -> str:
    """The first metric of each dataset and task in big figures, with its interval and chance."""
    first: dict[tuple[str, str], Result] = {}
    for result in newest(results):
        first.setdefault((result.dataset, result.task), result)
    shown = "".join(_headline(result) for result in list(first.values())[:_HEADLINES])
    return f'<div class="scores">{shown}</div>' if shown else ""


def _headline(result: Result) -> str:
    details = []
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
        f"{escape(' '.join(filter(None, (result.task, metric_name(result.metric)))))}</p>"
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
    rows = "".join(_row(result) for result in newest(results))
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


def _row(result: Result) -> str:
    interval = ""
    if result.low is not None and result.high is not None:
        interval = f"{_told(result, result.low)} – {_told(result, result.high)}"
    texts = (result.dataset, result.task, metric_name(result.metric))
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

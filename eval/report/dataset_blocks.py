"""What a model did on one dataset: calibration, confusion, its weakest classes, and example predictions."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

from clipkit.errors import DataError
from eval.details import Details, Packed
from eval.report.charts import Chart, Line, draw, figure, number
from eval.report.pictures import PictureBook, example_card
from eval.report.result_set import Model
from eval.report.scores import setting_name

__all__ = ["Block", "blocks_html"]

_LABELLED = 20  # classes: of more, the cells of a confusion matrix carry no words
_WIDE = 12  # more rows with names need more room
_SHORT = 5  # letters of names that fit above the columns of so many classes
_SHADES = 6
_LISTED = 8  # mistakes and classes
_WAYS = {"image_to_text_mean_rank": "image to text", "text_to_image_mean_rank": "text to image"}
_CAPTIONS = (
    "The captions most similar to each picture, with cosine similarities, not probabilities. The rank is that of "
    "the first of its own; equal captions are one."
)
_FIRST = tuple(factor * 10**power for power in range(8) for factor in (1, 3))  # found among so many
_PICTURES = 12 << 20  # letters of all pictures of a page


@dataclass(frozen=True, kw_only=True)
class Block:
    """One model on one dataset: its details, and its score as it is told."""

    model: Model
    details: Details
    score: str


def blocks_html(blocks: Sequence[Block], book: PictureBook) -> str:
    """The blocks of one dataset."""
    return "".join(_block(block, book) for block in blocks)


def _block(block: Block, book: PictureBook) -> str:
    details = block.details
    facts = "".join(
        filter(None, (_found(details), _calibration(details), _confusion(details), _lists(details)))
    )
    chosen = "" if details.chosen_c is None else f", C = {number(details.chosen_c)}"
    chosen += "" if details.chosen_rate is None else f", learning rate {details.chosen_rate:g}"
    chosen += f" (chosen on {escape(details.tuned_on)})" if details.tuned_on else ""
    prompts = f"prompts {details.prompt_set}" if details.prompt_set else ""
    where = ", ".join(filter(None, (details.task, prompts, setting_name(details.task, details.setting))))
    score = f", {escape(block.score)}" if block.score else ""
    head = f"<h4>{escape(block.model.label)} <small>{escape(where)}{chosen}{score}</small></h4>"
    facts = f'<div class="facets">{facts}</div>' if facts else ""
    return (
        f'<article class="block">{head}{facts}{_examples(details, book)}</article>'
        if facts or details.examples
        else ""
    )


def _examples(details: Details, book: PictureBook) -> str:
    if not details.examples:
        return ""
    if book.size > _PICTURES:
        return '<p class="lead">Its example pictures would make this page too large.</p>'
    of_captions = details.task == "retrieval"
    count = details.candidates if of_captions else len(details.class_names)
    cards = "".join(
        example_card(one, count, details.pictures, book, cosines=of_captions) for one in details.examples
    )
    lead = f'<p class="lead">{_CAPTIONS}</p>' if of_captions else ""
    return f'{lead}<div class="examples">{cards}</div>'


def _found(details: Details) -> str:
    """Of retrieval: what share of the queries has a match among the first k, for every k."""
    ranks = {}
    for name, told in _WAYS.items():
        try:
            if name in details.values:
                ranks[told] = sorted(details.values[name].tensor().tolist())
        except DataError:
            return '<p class="note">The ranks cannot be read.</p>'
    ranks = {told: own for told, own in ranks.items() if own}
    if not ranks:
        return ""
    last = max(own[-1] for own in ranks.values())
    first = [*(k for k in _FIRST if 1.5 * k < last), last]
    lines = [
        Line(
            name=told,
            points=[(float(i), 100 * bisect_right(own, k) / len(own)) for i, k in enumerate(first)],
            tone=1 + i,
            dots=True,
            summary=f"median rank {number(median(own))}",
        )
        for i, (told, own) in enumerate(ranks.items())
    ]
    return draw(
        Chart(
            title="Found among the first k",
            note="share of queries with a match there",
            lines=lines,
            unit="%",
            floor=0,
            ceiling=100,
            wide=True,
            x_name="among the first",
            x_ticks=[(float(i), number(k)) for i, k in enumerate(first)],
        )
    )


def _calibration(details: Details) -> str:
    """The reliability diagram: bars below the diagonal are surer than they are right."""
    error = details.calibration_error
    if error is None:
        return ""
    bars = []
    for one in details.bins:
        x, width = 100 * one.low, 100 * (one.high - one.low)
        right, sure = 100 * one.accuracy, 100 * one.confidence
        said = escape(f"{number(one.count)} pictures: {sure:.1f}% sure, {right:.1f}% right")
        bars.append(
            f'<g><title>{said}</title><rect x="{x + 0.4:.1f}" y="{100 - right:.1f}" width="{width - 0.8:.1f}" '
            f'height="{right:.1f}"/><path class="sure" d="M{x:.1f} {100 - sure:.1f}h{width:.1f}"/></g>'
        )
    said = f"expected calibration error {figure(100 * error, '%')}"
    return (
        f'<figure class="facet"><figcaption><b>Calibration</b> <span class="note">{said}</span></figcaption>'
        '<div class="diagram"><p class="axes up"><span>1</span><span>how often it is right</span><span>0</span></p>'
        f'<svg class="reliability" viewBox="0 0 100 100" role="img" aria-label="{said}">{"".join(bars)}'
        '<path class="diagonal" d="M0 100L100 0"/><path class="frame" d="M0 0V100H100"/></svg>'
        '<p class="axes"><span>0</span><span>how sure the model is</span><span>1</span></p></div>'
        '<p class="note">Bars: the share that is right. Lines: how sure the model was.</p></figure>'
    )


def _confusion(details: Details) -> str:
    of_classes = _matrix("Confusion", details.class_names, details.matrix, details.n)
    return of_classes + _matrix(
        "By superclass", details.superclass_names, details.superclass_matrix, details.n
    )


def _matrix(title: str, names: Sequence[str], packed: Packed | None, n: int) -> str:
    size = len(names)
    if packed is None or not size:
        return ""
    try:
        matrix = packed.tensor().view(size, size).tolist()
    except (DataError, RuntimeError):
        return '<p class="note">The confusion matrix cannot be read.</p>'
    right = sum(matrix[i][i] for i in range(size))
    said = f"{number(right)} of {number(n)} on the diagonal"
    drawn = _cells(names, matrix) if size <= _LABELLED else _drawing(matrix)
    told = f"rows are true, columns predicted; {said}"
    caption = f'<figcaption><b>{title}</b> <span class="note">{told}</span></figcaption>'
    wide = " wide" if _WIDE < size <= _LABELLED else ""
    return f'<figure class="facet confusion{wide}">{caption}{drawn}</figure>'


def _cells(names: Sequence[str], matrix: Sequence[Sequence[int]]) -> str:
    size = len(names)
    short = size <= _WIDE and all(0 < len(name) <= _SHORT for name in names)
    heads = names if short else [str(i + 1) for i in range(size)]  # numbers that the rows tell the names of
    kind = ' class="head"' if short else ""
    cells = ["<span></span>", *(f"<span{kind}>{escape(head)}</span>" for head in heads)]
    for i, row in enumerate(matrix):
        total = sum(row) or 1
        who = escape(names[i])
        told = "" if short else f" <i>{i + 1}</i>"
        cells.append(f'<span class="who" title="{who}"><span>{who or "–"}</span>{told}</span>')
        for j, count in enumerate(row):
            if not count:
                cells.append("<b></b>")
                continue
            kind = ' class="d"' if i == j else ""
            told = escape(f"{names[i]} → {names[j]}: {number(count)} ({100 * count / total:.0f}%)")
            cells.append(f'<b{kind} style="--s:{count / total:.2f}" title="{told}"></b>')
    label = f"confusion matrix of {size} classes"
    return (
        f'<div class="cells named" role="img" aria-label="{label}" style="--n:{size}">{"".join(cells)}</div>'
    )


def _drawing(matrix: Sequence[Sequence[int]]) -> str:
    """Many classes: squares in a few shades of the share of their row, the diagonal in another colour."""
    size = len(matrix)
    paths: dict[tuple[bool, int], list[str]] = {}
    for i, row in enumerate(matrix):
        total = sum(row)
        for j, count in enumerate(row):
            if count:
                shade = min(_SHADES, 1 + int(_SHADES * count / total))
                paths.setdefault((i == j, shade), []).append(f"M{j} {i}h1v1h-1z")
    drawn = "".join(
        f'<path class="{"d" if own else "off"}" fill-opacity="{0.1 + 0.9 * shade / _SHADES:.2f}" '
        f'd="{"".join(squares)}"/>'
        for (own, shade), squares in sorted(paths.items())
    )
    label = f"confusion matrix of {size} classes"
    return f'<svg class="drawn" viewBox="0 0 {size} {size}" role="img" aria-label="{label}">{drawn}</svg>'


def _lists(details: Details) -> str:
    """The most frequent mistakes, and the classes that fare worst."""
    parts = []
    names = details.class_names
    if details.mistakes:
        most = details.mistakes[0][2]
        rows = "".join(
            f"<li><span>{_quoted(names, label)} → {_quoted(names, taken)}</span><b>{number(count)}</b>"
            f'<i style="--p:{count / most:.3f}"></i></li>'
            for label, taken, count in details.mistakes[:_LISTED]
        )
        parts.append(f"<figcaption><b>Taken for another</b></figcaption><ol>{rows}</ol>")
    known = [(right / count, i) for i, (right, count) in enumerate(_pairs(details)) if count]
    if len(known) > 1:
        rows = "".join(
            f'<li><span>{_quoted(names, i)}</span><b>{100 * share:.0f}%</b><i style="--p:{share:.3f}"></i></li>'
            for share, i in sorted(known)[: _LISTED // 2]
        )
        parts.append(f"<figcaption><b>Weakest classes</b></figcaption><ol>{rows}</ol>")
    return f'<figure class="facet lists">{"".join(parts)}</figure>' if parts else ""


def _pairs(details: Details) -> list[tuple[int, int]]:
    return list(zip(details.class_right, details.class_counts, strict=True))


def _quoted(names: Sequence[str], label: int) -> str:
    return escape(names[label] or f"class {label}")

"""The parts of the report that show pictures: example predictions, similarity matrices, nearest pictures.

Each distinct picture is in the page once, as a rule of its style sheet, however often it is shown.
"""

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape

from eval.report.charts import number
from eval.snapshot_file import Example, Matrix, Picture, Query, Snapshot

__all__ = ["PictureBook", "example_card", "examples", "matrices", "queries"]

_PNG = b"\x89PNG\r\n\x1a\n"
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_TINY = 16  # pixels; a picture up to this size is shown with its pixels, not blurred
_SHOWN_LABELS = 5
_LEAST_RANGE = (
    0.2  # of cosines over the shades: before a model has learned, its noise shall not look like more
)


class PictureBook:
    """The distinct pictures of a page."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._tiny: set[str] = set()

    def show(self, pictures: Mapping[str, Picture], name: str, *, more: str = "") -> str:
        """A picture as an element; ``more`` is added to its alternative text. A missing one is an empty frame."""
        picture = pictures.get(name)
        alt = escape(f"{picture.alt if picture else 'missing picture'}{more}")
        if picture is None or not self._add(picture.png):
            return f'<i class="pic none" role="img" aria-label="{alt}" title="{alt}"></i>'
        tiny = " tiny" if picture.png in self._tiny else ""
        kind = f"pic p{self._numbers[picture.png]}{tiny}"
        return f'<i class="{kind}" role="img" aria-label="{alt}" title="{alt}"></i>'

    def _add(self, png: str) -> bool:
        """Whether this is a PNG in base64 and nothing else: it goes into a style sheet as it is."""
        if png in self._numbers:
            return True
        if not _BASE64.fullmatch(png):
            return False
        try:
            data = base64.b64decode(png, validate=True)
        except binascii.Error:
            return False
        if len(data) < 24 or not data.startswith(_PNG):
            return False
        sides = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
        if max(sides) <= _TINY:
            self._tiny.add(png)
        self._numbers[png] = len(self._numbers)
        return True

    @property
    def size(self) -> int:
        """How many letters its pictures make."""
        return sum(map(len, self._numbers))

    def style(self) -> str:
        """The rules that carry the pictures."""
        return "\n".join(
            f".p{i}{{background-image:url(data:image/png;base64,{png})}}" for png, i in self._numbers.items()
        )


def examples(snapshots: Sequence[Snapshot], book: PictureBook) -> str:
    """Predictions of the last snapshot, each with its rank through the snapshots before."""
    last = snapshots[-1]
    cards = [
        example_card(one, last.classes, last.pictures, book, ranks=_ranks(one.picture, snapshots))
        for one in last.examples
    ]
    return f'<div class="examples">{"".join(cards)}</div>' if cards else ""


def _ranks(picture: str, snapshots: Sequence[Snapshot]) -> list[tuple[int, int]]:
    return [
        (snapshot.step, one.rank)
        for snapshot in snapshots
        for one in snapshot.examples
        if one.picture == picture and one.rank is not None
    ]


def example_card(
    one: Example,
    classes: int,
    pictures: Mapping[str, Picture],
    book: PictureBook,
    *,
    ranks: Sequence[tuple[int, int]] = (),
    cosines: bool = False,
) -> str:
    """A picture with its likeliest labels and the true one's rank.

    Args:
        one: the example.
        classes: how many labels there are.
        pictures: by their names.
        book: of the page.
        ranks: (step, rank) of a training.
        cosines: whether labels are captions, and their numbers similarities rather than probabilities.
    """
    told, whose = (_cosine, "a caption of the picture") if cosines else (_percent, "the true label")
    rows = [
        _bar(guess.label, guess.probability, whose if guess.right else "", told)
        for guess in one.guesses[:_SHOWN_LABELS]
    ]
    if one.truth is not None and one.probability is not None and not any(g.right for g in one.guesses):
        last = _bar(one.truth, one.probability, whose, told)
        rows.append(f'<li class="gap" aria-hidden="true">⋯</li>{last}')
    rank = ""
    if one.rank is not None:
        rank = f'<span class="rank">rank <b>{number(one.rank)}</b> of {number(classes)}</span>'
    history = ""
    if len(ranks) > 1:
        steps = "".join(
            f'<span title="step {number(step)}"{" class=best" if value == 1 else ""}>{value}</span>'
            for step, value in ranks
        )
        history = f'<p class="history">ranks {steps}</p>'
    return (
        f'<article class="example"><header>{book.show(pictures, one.picture)}'
        f"<div><h4>{escape(one.truth or 'unlabelled')}</h4>{rank}</div></header>"
        f"<ol>{''.join(rows)}</ol>{history}</article>"
    )


def _bar(label: str, value: float, whose: str, told: Callable[[float], str]) -> str:
    """A label with its number; ``whose`` says of a right one what it is."""
    share, text = min(1.0, max(0.0, value)), escape(label)
    mark = f'<span class="tick" title="{whose}">✓</span>' if whose else ""
    return (
        f'<li class="{"right" if whose else "wrong"}"><span class="label" title="{text}">{mark}{text}</span>'
        f'<span class="p">{told(value)}</span><i style="--p:{share:.4f}"></i></li>'
    )


def _cosine(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def _percent(value: float) -> str:
    if 0 < value < 0.0005:
        return "&lt;0.1%"
    return f"{value * 100:.1f}%"


def matrices(snapshots: Sequence[Snapshot], book: PictureBook) -> str:
    """The similarity matrix at the first and at the last snapshot, on one scale of shades."""
    having = [snapshot for snapshot in snapshots if snapshot.matrix]
    if not having:
        return ""
    shown = having if len(having) == 1 else [having[0], having[-1]]
    levels = [
        value - _level(one.matrix)
        for one in shown
        if one.matrix
        for row in one.matrix.cosines
        for value in row
    ]
    low, high = min(levels), max(levels)
    high = max(high, low + _LEAST_RANGE)
    drawn = [_matrix(one, one.matrix, low, high, book) for one in shown if one.matrix]
    last = having[-1]
    assert last.matrix
    captions = "".join(
        f"<li>{book.show(last.pictures, picture)}<span>{escape(caption)}</span></li>"
        for picture, caption in zip(last.matrix.pictures, last.matrix.captions, strict=True)
    )
    scale = (
        f'<p class="shades"><span>{_signed(low)}</span><i></i><span>{_signed(high)}</span>'
        f"<span>cosine above the mean of the pairs that do not belong together"
        f"{'; one scale for both' if len(shown) > 1 else ''}</span></p>"
    )
    return f'<div class="matrices">{"".join(drawn)}</div>{scale}<ol class="captions">{captions}</ol>'


def _level(matrix: Matrix) -> float:
    """The mean cosine of pairs that do not belong together.

    It drifts during a training without any effect on the loss, so shades are told from it.
    """
    size = len(matrix.pictures)
    other = [matrix.cosines[i][j] for i in range(size) for j in range(size) if i != j]
    return sum(other) / len(other) if other else 0.0


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _matrix(snapshot: Snapshot, matrix: Matrix, low: float, high: float, book: PictureBook) -> str:
    size = len(matrix.pictures)
    level = _level(matrix)
    cells = []
    for row, picture in enumerate(matrix.pictures):
        cells.append(book.show(snapshot.pictures, picture))
        for column in range(size):
            value = matrix.cosines[row][column]
            shade = (value - level - low) / (high - low)
            kind = ' class="d"' if row == column else ""
            title = escape(f"picture {row + 1} × “{matrix.captions[column]}”: {value:.2f}")
            cells.append(f'<b{kind} style="--s:{shade:.3f}" title="{title}"></b>')
    heads = "<span></span>" + "".join(f"<span>{i + 1}</span>" for i in range(size))
    same = [matrix.cosines[i][i] for i in range(size)]
    hits = sum(matrix.cosines[i][i] >= max(matrix.cosines[i]) for i in range(size))
    said = f"{hits} of {size} pictures nearest to their own caption; mean cosine {sum(same) / size:.2f}"
    if size > 1:
        said += f" for pairs, {level:.2f} for others"
    return (
        f'<figure class="matrix"><figcaption><b>Step {number(snapshot.step)}</b></figcaption>'
        f'<div class="cells" role="img" aria-label="{escape(said)}" style="--n:{size}">'
        f"{heads}{''.join(cells)}</div><p>{said}</p></figure>"
    )


def queries(snapshots: Sequence[Snapshot], book: PictureBook) -> str:
    """The pictures nearest to each query, a frame for each snapshot."""
    texts = list(dict.fromkeys(query.text for snapshot in snapshots for query in snapshot.queries))
    strips = []
    for text in texts:
        frames = [
            _frame(snapshot, query, book)
            for snapshot in snapshots
            for query in snapshot.queries
            if query.text == text
        ]
        strips.append(
            f'<article class="strip"><h4>{escape(text)}</h4><div class="frames">{"".join(frames)}</div></article>'
        )
    return "".join(strips)


def _frame(snapshot: Snapshot, query: Query, book: PictureBook) -> str:
    hits = []
    for hit in query.hits:
        said = {True: ", right", False: ", wrong", None: ""}[hit.right]
        kind = {True: "right", False: "wrong", None: "unknown"}[hit.right]
        tick = '<span class="tick" aria-hidden="true">✓</span>' if hit.right else ""
        picture = book.show(snapshot.pictures, hit.picture, more=f" ({hit.cosine:.2f}{said})")
        hits.append(f'<li class="{kind}">{picture}{tick}</li>')
    judged = [hit.right for hit in query.hits if hit.right is not None]
    score = f"<span>{sum(judged)} of {len(judged)}</span>" if judged else ""
    return (
        f'<section class="frame"><h5>step {number(snapshot.step)}{score}</h5>'
        f'<ol class="hits">{"".join(hits)}</ol></section>'
    )

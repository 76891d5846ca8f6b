"""The findings as one HTML page that carries everything in itself: no network, no script.

All text that comes from data is escaped, and the page's own security policy forbids anything but its styles and
the pictures inside it.
"""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from data.inspect.findings import Findings, Histogram, SheetEntry, Thumbnail
from data.inspect.notes import notes
from data.inspect.shard_findings import Place
from data.inspect.told import Part, headline, parts
from data.inspect.wording import plain, size_of

__all__ = ["page_of"]

_STYLE = Path(__file__).with_name("page.css")
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page_of(found: Findings) -> str:
    """The page's HTML."""
    title = ", ".join(plain(source, 80) for source in found.sources[:3])
    sections = [_sheet(found), *(_part(part, found) for part in parts(found))]
    links = [("sheet", "As the model sees it"), *((part.name, part.title) for part in parts(found))]
    nav = "".join(f'<a href="#{name}">{escape(text)}</a>' for name, text in links)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)} – clipkit data</title>\n"
        f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style></head>\n"
        f'<body><main><header><p class="kind">clipkit data inspection</p><h1>{escape(title)}</h1>'
        f'<p class="lead">{escape(headline(found))}</p></header>{_notes(found)}'
        f'<nav aria-label="Sections">{nav}</nav>\n{"".join(sections)}'
        f"<footer>Looked into {found.shards.looked_into:,} of {found.shards.count:,} shards and decoded "
        f"{found.sampled.tried:,} samples in {found.seconds:,.0f} s.</footer></main></body></html>\n"
    )


def _notes(found: Findings) -> str:
    listed = "".join(
        f'<li class="{"grave" if note.grave else "fair"}">{escape(note.text)}</li>' for note in notes(found)
    )
    return f'<ul class="notes" aria-label="Notes">{listed or "<li>Nothing stands out.</li>"}</ul>'


def _part(part: Part, found: Findings) -> str:
    rows = "".join(
        f"<dt>{escape(row.label)}</dt><dd>{''.join(f'<div>{escape(line)}</div>' for line in row.lines)}</dd>"
        for row in part.rows
    )
    charts = "".join(_chart(chart, found) for chart in part.charts)
    charts = f'<div class="charts">{charts}</div>' if charts else ""
    shown = _shown(part, found)
    return (
        f'<section id="{part.name}"><h2>{escape(part.title)}</h2><dl>{rows}</dl>{charts}{shown}</section>\n'
    )


def _shown(part: Part, found: Findings) -> str:
    """Pictures to look at that belong to a part."""
    if part.name == "bad" and found.bad_shown:
        cells = "".join(map(_thumbnail, found.bad_shown))
        return f'<h3>Some of them</h3><ol class="bad">{cells}</ol>'
    if part.name == "pictures":
        same, alike = found.pictures.same_bytes.groups, found.pictures.same_look.groups
        return _groups("The same file", found.same, same) + _groups("Look alike", found.alike, alike)
    return ""


def _chart(chart: Histogram, found: Findings) -> str:
    """Bars from the first to the last bin that holds something."""
    there = [number for number, count in enumerate(chart.counts) if count]
    if not there:
        return ""
    most, total = max(chart.counts), sum(chart.counts)
    bars = []
    for number in range(there[0], there[-1] + 1):
        count, label = chart.counts[number], escape(chart.labels[number])
        share = f"{100 * count / total:.1f}%"
        bar = f'<i style="width:{100 * count / most:.1f}%"></i>' if count else ""
        bars.append(
            f'<span class="bin">{label}</span><span class="bar">{bar}</span>'
            f'<span class="count">{count:,} <small>{share}</small></span>'
        )
    return f"<figure><figcaption>{escape(chart.title)}</figcaption><div class=bars>{''.join(bars)}</div></figure>"


def _sheet(found: Findings) -> str:
    lead = (
        f"{len(found.sheet)} samples, spread evenly, after the training's random crop to {found.image_size} "
        f"pixels. Of a caption the model sees {found.context_length} tokens; what it does not see is struck out."
    )
    return (
        '<section id="sheet"><h2>As the model sees it</h2>'
        f'<p class="lead">{lead}</p><ol class="sheet">{"".join(map(_entry, found.sheet))}</ol></section>\n'
    )


def _entry(entry: SheetEntry) -> str:
    rest = f"<s>{escape(plain(entry.rest, 600))}</s>" if entry.rest else ""
    tokens = f"{entry.tokens}&nbsp;tokens" if entry.tokens < 1024 else "1,024 tokens or more"
    return (
        f'<li>{_picture(entry)}<p class="caption">{escape(plain(entry.caption, 600))}{rest}</p>'
        f'<p class="where">{_where(entry.place)} · {tokens}</p></li>'
    )


def _where(place: Place) -> str:
    return escape(plain(f"{place.shard.rpartition('/')[2]}: {place.key}", 80))


def _picture(entry: SheetEntry | Thumbnail) -> str:
    data = base64.b64encode(entry.picture).decode()
    return f'<img src="data:image/webp;base64,{data}" alt="{escape(plain(entry.caption, 200))}">'


def _groups(title: str, groups: Sequence[Sequence[Thumbnail]], count: int) -> str:
    rows = "".join(f'<ol class="group">{"".join(map(_thumbnail, group))}</ol>' for group in groups)
    title += f": {len(groups)} of {count:,} groups" if len(groups) < count else ""
    return f'<h3>{title}</h3><div class="groups">{rows}</div>' if rows else ""


def _thumbnail(entry: Thumbnail) -> str:
    cause = f'<p class="cause">{escape(plain(entry.cause))}</p>' if entry.cause else ""
    caption = f'<p class="caption">{escape(plain(entry.caption))}</p>' if entry.caption.strip() else ""
    begin = escape(plain(entry.beginning, 80)) or "no bytes"
    picture = _picture(entry) if entry.picture else f'<div class="nothing"><code>{begin}</code></div>'
    where = f"{_where(entry.place)} · {size_of(entry.size).replace(' ', '&nbsp;')}"
    return f'<li>{picture}{cause}{caption}<p class="where">{where}</p></li>'

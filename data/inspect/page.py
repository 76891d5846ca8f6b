"""The findings as one HTML page that carries everything in itself: no network, no script.

All text that comes from data is escaped, and the page's own security policy forbids anything but its styles and
the pictures inside it.
"""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from data.inspect.findings import Findings, Histogram, SheetEntry
from data.inspect.told import Part, headline, notes, parts, plain

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
    alike = _alike(found.alike) if part.name == "pictures" else ""
    return (
        f'<section id="{part.name}"><h2>{escape(part.title)}</h2><dl>{rows}</dl>{charts}{alike}</section>\n'
    )


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
    where = f"{entry.place.shard.rpartition('/')[2]}: {entry.place.key}"
    tokens = f"{entry.tokens} tokens" if entry.tokens < 1024 else "1,024 tokens or more"
    return (
        f'<li>{_picture(entry)}<p class="caption">{escape(plain(entry.caption, 600))}{rest}</p>'
        f'<p class="where">{escape(plain(where, 80))} · {tokens}</p></li>'
    )


def _picture(entry: SheetEntry) -> str:
    data = base64.b64encode(entry.picture).decode()
    return f'<img src="data:image/webp;base64,{data}" alt="{escape(plain(entry.caption, 200))}">'


def _alike(groups: Sequence[Sequence[SheetEntry]]) -> str:
    rows = []
    for group in groups:
        cells = "".join(
            f'<li>{_picture(entry)}<p class="where">{escape(plain(entry.place.key, 60))}</p></li>'
            for entry in group
        )
        rows.append(f'<ol class="group">{cells}</ol>')
    return f'<h3>Look alike, in grey values</h3><div class="alike">{"".join(rows)}</div>' if rows else ""

"""Report the findings of an inspection as text: rows, charts and notes for the terminal and for an HTML page.

Characters of the data that are not printable are written as escapes.
"""

import base64
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from clipkit.files.pages import templates
from clipkit.files.terminal import counted, printable
from clipkit.files.traits import TraitCounts, hex_of
from data.inspect.findings import (
    Duplicates,
    Findings,
    Histogram,
    Place,
    Stated,
    WithTrait,
    about,
    name_of,
    of_all,
    percent,
    place_of,
    repeated_of,
    size_of,
)

__all__ = ["Note", "Part", "Row", "headline", "notes", "page_of", "parts", "print_table"]

_RATES = (500, 1000, 2000, 5000)  # samples a second
_PLACES = 3


@dataclass(frozen=True, kw_only=True)
class Row:
    """A label and what is said of it, in one line or several."""

    label: str
    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A titled part of the report."""

    name: str
    title: str
    rows: tuple[Row, ...]
    charts: tuple[Histogram, ...] = ()


def headline(found: Findings) -> str:
    """All in one line."""
    shards = found.shards
    samples = f"{shards.samples:,}" if shards.samples_known else about(shards.samples)
    return f"{counted(shards.count, 'shard')}, {samples} samples, {size_of(shards.bytes)}"


def parts(found: Findings) -> list[Part]:
    """All parts in their order."""
    made = [_shards(found), _names(found), _fields(found), _bad(found), _captions(found), _pictures(found)]
    return [*made, _speed(found)]


def bins_of(chart: Histogram) -> list[tuple[str, int]]:
    """List label and count from the first bin that is not empty to the last."""
    filled = [number for number, count in enumerate(chart.counts) if count]
    return [(chart.labels[i], chart.counts[i]) for i in range(filled[0], filled[-1] + 1)] if filled else []


def _row(label: str, *lines: str) -> Row:
    return Row(label=label, lines=lines)


def _shards(found: Findings) -> Part:
    shards = found.shards
    rows = [_row("shards", f"{shards.count:,} tar files, {size_of(shards.bytes)}")]
    if shards.samples_known:
        rows.append(_row("samples", f"{shards.samples:,} pairs of picture and caption"))
    else:
        known = f"{shards.counted:,} of {shards.count:,} shards are counted"
        rows.append(_row("samples", f"{about(shards.samples)}; {known}"))
    rows += [_left(found)] if found.filtered is not None else []
    rows.append(_epoch(found))
    if shards.counted:
        spread = f"{shards.least:,} to {shards.greatest:,} samples, median {shards.median:,.0f}"
        if shards.least == shards.greatest:
            spread = counted(shards.least, "sample")
        rows.append(_row("in one shard", spread))
    if shards.stated.shards:
        rows.append(_row("_stats.json files", *_stated(shards.stated)))
    if shards.looked_into < shards.count or shards.beginnings:
        first = f"; of {shards.beginnings:,} the first samples only" if shards.beginnings else ""
        rows.append(_row("looked into", f"{shards.looked_into:,} of {shards.count:,}, spread evenly{first}"))
    if shards.ends_checked:
        whole = f"{shards.ends_checked - shards.suspicious:,} of {shards.ends_checked:,}"
        rows.append(_row("not cut short", f"{whole} have the end that a tar should have"))
    missing = ", ".join(shards.missing[:10]) + (", …" if len(shards.missing) > 10 else "")
    gaps = f"{shards.missing_count:,}: {missing}" if missing else "none: no gap in their numbers"
    rows.append(_row("missing shards", gaps))
    rows.append(_row("without any pair", ", ".join(map(name_of, shards.empty[:8])) or "none"))
    broken = [f"{name_of(one.shard)}: {printable(one.cause, 160)}" for one in shards.broken[:10]]
    more = len(shards.broken) - len(broken)
    rows.append(_row("cannot be read", *(broken or ["none"]), *([f"{more:,} more"] if more else [])))
    return Part(name="shards", title="Shards", rows=tuple(rows))


def _left(found: Findings) -> Row:
    assert found.filtered is not None
    left = f"{found.left:,}" if found.all_read else about(found.left)
    passed = percent(found.filtered.passed, found.filtered.read)
    return _row("after the filters", f"{left} samples ({passed}); the rest of this report is of all")


def _epoch(found: Findings) -> Row:
    steps = found.left // found.batch_size
    exact = found.shards.samples_known and (found.filtered is None or found.all_read)
    count = counted(steps, "step") if exact else f"{about(steps)} steps"
    return _row("one epoch", f"{count} of {found.batch_size:,} samples (--batch-size sets the batch)")


def _stated(stated: Stated) -> Sequence[str]:
    said = f"they say {stated.stated:,} samples, {stated.found:,} with a picture are there"
    differ = [f"{name_of(name)}: {says:,}, there are {there:,}" for name, says, there in stated.differ[:5]]
    more = len(stated.differ) - len(differ)
    return [said, *differ, *([f"{more:,} more differ"] if more else [])]


def _names(found: Findings) -> Part:
    names = found.names
    extensions = [f"{printable(one, 30)} {count:,}" for one, count in list(names.extensions.items())[:10]]
    forms = [f"{printable(form, 60)}  ({count:,})" for form, count in names.patterns.items()]
    digit = ["where # is a digit"] if any("#" in form for form in forms) else []
    rows = [_row("keys look like", *forms, *digit), _row("files by extension", ", ".join(extensions))]
    if names.upper_case:
        capitals = ", ".join(f"{printable(one, 30)} {n:,}" for one, n in names.upper_case.items())
        rows.append(_row("in capitals", capitals))
    rows += [
        _row("without picture", of_all(names.without_picture, names.groups)),
        _row("without caption", of_all(names.without_caption, names.groups)),
    ]
    example = f", such as {printable(names.across_example, 60)}" if names.across_example else ""
    apart = f"{names.apart:,}, such as {place_of(names.apart_example)}"
    counts = (
        (
            "second dot in name",
            names.second_dot,
            f"{counted(names.second_dot, 'file')}, not seen by a training",
        ),
        ("of no sample", names.hidden, f"{counted(names.hidden, 'file')}, hidden or without an extension"),
        ("twice in a sample", sum(names.repeated.values()), f"{repeated_of(names)}; the first one is used"),
        ("key twice in a shard", names.apart, apart),
        ("key in two shards", names.across, f"{names.across:,}{example}; does no harm in training"),
    )
    rows += [_row(label, text) for label, count, text in counts if count]
    return Part(name="samples", title="Samples and their files", rows=tuple(rows))


def _fields(found: Findings) -> Part:
    fields, filtered = found.fields, found.filtered
    spread = "" if found.all_read else ", of samples spread evenly"
    rows = [_row("samples with json", of_all(fields.with_json, fields.read) + spread)]
    for one in fields.fields:
        share = "" if one.count == fields.read else f", in {percent(one.count, fields.read)}"
        rows.append(_row(printable(one.name, 60), f"{one.kind}{share}: {printable(one.values, 160)}"))
    if fields.more:
        rows.append(_row("others", f"{fields.more:,} more fields"))
    if filtered is not None:
        left_out = [f"{count:,} left out: {printable(why, 80)}" for why, count in filtered.left_out.items()]
        passed = f"{of_all(filtered.passed, filtered.read)} pass"
        rows.append(_row("filters", *(printable(one, 80) for one in filtered.filters)))
        rows.append(_row("after the filters", passed, *left_out[:8]))
    elif fields.fields:
        rows.append(_row("to select by these", "--filters 'FIELD >= VALUE' here, data.filters in training"))
    return Part(name="fields", title="Fields of the json", rows=tuple(rows))


def _bad(found: Findings) -> Part:
    sampled = found.sampled
    interval = f"; of all, {100 * sampled.low:.2g}–{100 * sampled.high:.2g}% (95% interval)"
    every = found.all_decoded
    share = percent(sampled.bad, sampled.tried)
    tried = f"all {sampled.tried:,} samples" if every else f"{sampled.tried:,} samples, spread evenly"
    rows = [
        _row("decoded", tried),
        _row("bad", f"{sampled.bad:,} ({share}){'' if every else interval}"),
        _row("allowed", f"a training stops beyond {100 * found.max_bad:g}% (data.max_bad)"),
    ]
    for one in sampled.causes[:10]:
        where = "; ".join(map(place_of, one.first[:_PLACES]))
        rows.append(_row(counted(one.count, "sample"), printable(one.cause, 160), f"in {where}"))
    return Part(name="bad", title="Bad samples", rows=tuple(rows))


def _captions(found: Findings) -> Part:
    captions = found.captions
    not_utf8 = "; ".join(map(place_of, captions.not_utf8_at))
    longest = f"{captions.longest:,}" if captions.longest < 1024 else "1,024 or more"
    rows = [
        _row("read", f"{captions.read:,} captions" + ("" if found.all_read else ", spread evenly")),
        _row("length", f"median {captions.median:,.0f} tokens, longest {longest}"),
        _row("too long", f"{of_all(captions.cut, captions.read)} are cut at {found.context_length} tokens"),
        _row("empty", f"{captions.empty:,}"),
        *([_row("not UTF-8", f"{captions.not_utf8:,}: {not_utf8}")] if captions.not_utf8 else []),
        _row("the same again", f"{of_all(captions.repeated, captions.read)} repeat another sample's caption"),
    ]
    if captions.longest_at and captions.cut:
        rows.insert(2, _row("the longest", place_of(captions.longest_at)))
    if captions.frequent:
        frequent = (f"{count:,} × {printable(text, 100)}" for text, count in captions.frequent)
        rows.append(_row("most frequent", *frequent))
    return Part(name="captions", title="Captions", rows=tuple(rows), charts=(captions.tokens,))


def _pictures(found: Findings) -> Part:
    pictures = found.pictures
    formats = ", ".join(f"{printable(kind, 20)} {count:,}" for kind, count in pictures.formats.items())
    misnamed = ", ".join(f"{printable(what, 40)} ({count:,})" for what, count in pictures.misnamed.items())
    marks = ", ".join(f"{mark} {percent(count, pictures.read)}" for mark, count in pictures.marks.items())
    small = f"{of_all(pictures.small, pictures.read)} on their shorter side; they are enlarged"
    rows = [
        _row("decoded", f"{pictures.read:,}, median file {size_of(pictures.median_bytes)}"),
        _row("formats", formats or "none"),
        _row("wrong extension", misnamed or "none"),
        _row(f"under {found.image_size} pixels", small),
        _row("widest", _ratio(pictures.widest, "as wide as high", "wider than high", pictures.widest_at)),
        _row("tallest", _ratio(pictures.tallest, "as high as wide", "higher than wide", pictures.tallest_at)),
        _row("unusual", marks or "none is grey, CMYK or of 16 bits"),
        _trait(
            "transparent",
            pictures.transparent,
            pictures.read,
            f"laid on {hex_of(found.decoding.background)}"
            if found.decoding.background
            else "their hidden colors are used, as open_clip does; set data.background=white",
        ),
        _trait(
            "rotated by EXIF",
            pictures.rotated,
            pictures.read,
            "turned upright"
            if found.decoding.upright
            else "this is not applied, as in open_clip; set data.upright=true",
        ),
        _row("the same file", *_duplicates(pictures.same_bytes)),
        _row("look alike", *_duplicates(pictures.same_look)),
    ]
    return Part(name="pictures", title="Pictures", rows=tuple(rows), charts=(pictures.width, pictures.height))


def _trait(label: str, found: WithTrait, read: int, what: str) -> Row:
    if not found.count:
        return _row(label, "none")
    more = ["…"] if found.count > len(found.first) else []
    return _row(
        label, f"{of_all(found.count, read)}; {what}", "in " + "; ".join([*map(place_of, found.first), *more])
    )


def _ratio(ratio: float, times: str, more: str, at: Place | None) -> str:
    return f"{ratio:.3g} times {times}: {place_of(at)}" if ratio > 1 else f"none is {more}"


def _duplicates(found: Duplicates) -> Sequence[str]:
    if not found.groups:
        return ["none among those decoded"]
    shown = [" = ".join(map(place_of, group)) for group in found.shown[:3]]
    more = ["…"] if found.groups > len(shown) else []
    return [f"{found.pictures:,} pictures in {counted(found.groups, 'group')}:", *shown, *more]


def _speed(found: Findings) -> Part:
    speed = found.speed
    needed = ", ".join(f"{rate:,}/s: {speed.workers_for(rate)}" for rate in _RATES)
    network = ", over the network, without a copy on disk" if speed.remote else ""
    rows = [
        _row(
            "one CPU core",
            f"prepares {speed.per_core:,.0f} samples/s at {found.image_size} pixels: {speed.make:.2f} ms for a "
            f"picture, {speed.text:.2f} ms for a caption",
        ),
        _row("reading alone", f"{speed.read:,.0f} samples/s, {size_of(speed.read_bytes)}/s{network}"),
        _row(
            "workers needed",
            f"{counted(speed.workers, 'worker')} (data.workers) for a GPU that takes {speed.rate:,.0f} samples/s "
            "(--rate)",
        ),
        _row("for other GPUs", needed),
        _row("this machine", f"{speed.cores} cores: at most {speed.cores * speed.per_core:,.0f} samples/s"),
        _row(
            "what a GPU takes",
            "Training open_clip's LAION-400M models, an A100 took 773 samples/s for ViT-B/32, 332 for ViT-B/16 and "
            "70 for ViT-L/14. The metrics of a run tell yours.",
        ),
    ]
    return Part(name="speed", title="Speed", rows=tuple(rows))


# --------------------------------------------------------------------------------------------------------------
# What a user should mend or know first, from the findings.

_MENTIONED = 0.1  # share from which something common is worth a note


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something to know first; ``grave`` where a training would stop or be harmed."""

    text: str
    grave: bool = False


def notes(found: Findings) -> list[Note]:
    """What a user should mend or know, the gravest first."""
    told = [*_shard_notes(found), *_count_notes(found), *_sample_notes(found), *_picture_notes(found)]
    return sorted(told, key=lambda note: not note.grave)


def _shard_notes(found: Findings) -> Iterator[Note]:
    shards, names = found.shards, found.names
    for refusal in shards.refused:
        yield Note(text=f"training refuses this list of shards: {printable(refusal, 300)}", grave=True)
    if shards.broken:
        yield Note(
            text=f"{len(shards.broken):,} of {counted(shards.looked_into, 'shard')} looked into cannot be read; "
            "training refuses them: fetch them again or leave them out",
            grave=True,
        )
        if truncated := sum(one.truncated for one in shards.broken):
            yield Note(
                text=f"{counted(truncated, 'shard')} truncated: data.truncated=use trains on the intact part",
                grave=True,
            )
    if shards.suspicious > len(shards.broken):
        yield Note(
            text=f"{counted(shards.suspicious, 'shard')} not ending as a tar does: likely cut short",
            grave=True,
        )
    if shards.missing_count:
        yield Note(
            text=f"missing {counted(shards.missing_count, 'shard number')}: {', '.join(shards.missing[:6])}"
        )
    if shards.empty:
        yield Note(
            text=f"{counted(len(shards.empty), 'shard')} without a pair, among them {name_of(shards.empty[0])}"
        )
    if names.apart:
        yield Note(
            text=f"{counted(names.apart, 'key')} coming back later in the shard ({place_of(names.apart_example)}): "
            "the files of one sample must follow one another",
            grave=True,
        )
    if names.repeated:
        yield Note(
            text=f"samples with more than one file of a kind: {repeated_of(names)}; training uses the first one of "
            "each sample and ignores the others"
        )
    if names.second_dot:
        yield Note(
            text=f"{counted(names.second_dot, 'file')} with a second dot in the name; all behind the first dot is "
            "taken for the extension, so they are not seen: leave no dots in keys",
            grave=True,
        )


def _count_notes(found: Findings) -> Iterator[Note]:
    """Of how many samples there are, by ``_stats.json`` and after filters."""
    stated, filtered = found.shards.stated, found.filtered
    if stated.found != stated.stated:
        less = "fewer" if stated.found < stated.stated else "more"
        yield Note(
            text=f"{stated.found:,} samples with a picture are there, {less} than the {stated.stated:,} that "
            "_stats.json files say: were shards cut or written again?"
        )
    if filtered is not None:
        for unknown in filtered.unknown:
            yield Note(text=printable(unknown, 1000), grave=True)
        if filtered.passed:
            yield Note(text=f"the filters leave {of_all(filtered.passed, filtered.read)} of the samples read")
        elif not filtered.unknown:
            yield Note(text="no sample read passes the filters", grave=True)
    if found.left < found.batch_size and (filtered is None or filtered.passed):
        yield Note(
            text=f"{found.left:,} samples fill no batch of {found.batch_size:,}: train with a smaller batch_size",
            grave=True,
        )


def _sample_notes(found: Findings) -> Iterator[Note]:
    names, sampled, captions = found.names, found.sampled, found.captions
    left_out = names.without_caption + names.without_picture
    if left_out:
        share = percent(left_out, names.groups)
        yield Note(
            text=f"{left_out:,} of {names.groups:,} samples ({share}) lack a picture or a caption and are left out"
        )
    limit = f"training stops beyond {100 * found.max_bad:g}% (data.max_bad)"
    told = f"{percent(sampled.bad, sampled.tried)} of the samples are bad; {limit}"
    if sampled.share > found.max_bad:
        yield Note(text=told, grave=True)
    elif sampled.bad and sampled.share == found.max_bad:
        yield Note(text=f"{told}, which chance may pass", grave=True)
    elif sampled.bad and sampled.high > found.max_bad and not found.all_decoded:
        yield Note(text=f"{told}, and it may be up to {100 * sampled.high:.1f}%: look at more by --samples")
    if captions.cut > _MENTIONED * captions.read:
        yield Note(
            text=f"{percent(captions.cut, captions.read)} of the captions have more than {found.context_length} "
            "tokens: their end is not seen"
        )
    if captions.not_utf8:
        read = captions.read + captions.empty + captions.not_utf8
        yield Note(
            text=f"{of_all(captions.not_utf8, read)} captions read are not UTF-8, such as "
            f"{'; '.join(map(place_of, captions.not_utf8_at))}: training replaces these samples by others",
            grave=True,
        )
    for unknown in captions.unknown:
        yield Note(text=f"data.captions: {printable(unknown, 1000)}")
    if captions.repeated > _MENTIONED * captions.read:
        yield Note(
            text=f"{percent(captions.repeated, captions.read)} of the captions read are there already with "
            "another picture: in one batch such pairs count as wrong, unless loss.same=positives (or ignored)"
        )


def _picture_notes(found: Findings) -> Iterator[Note]:
    pictures, speed, held_out = found.pictures, found.speed, found.held_out
    if held_out is not None and held_out.trained_on:
        among = "those of train" if found.all_decoded else "the ones of train that were read"
        yield Note(
            text=f"{held_out.trained_on:,} of {counted(held_out.read, 'picture')} of the split test are the same "
            f"files as some among {among}: scores on them tell what was learnt by heart",
            grave=True,
        )
    if pictures.small > _MENTIONED * pictures.read:
        yield Note(
            text=f"{percent(pictures.small, pictures.read)} of the pictures are smaller than the model's "
            f"{found.image_size} pixels and are enlarged"
        )
    counts = TraitCounts(
        images=pictures.read, transparent=pictures.transparent.count, rotated=pictures.rotated.count
    )
    for line in counts.lines(
        found.decoding, background="data.background=white", upright="data.upright=true"
    ).values():
        yield Note(text=line)
    if speed.workers > speed.cores:
        yield Note(
            text=f"{speed.rate:,.0f} samples/s need {counted(speed.workers, 'worker')}; "
            f"this machine has {counted(speed.cores, 'core')}"
        )


# --------------------------------------------------------------------------------------------------------------
# The findings as one HTML page.


def page_of(found: Findings) -> str:
    """Render the findings as one self-contained HTML page."""
    environment = templates(Path(__file__).with_name("templates"))
    environment.filters |= {"plain": printable, "base64": lambda data: base64.b64encode(data).decode()}
    environment.filters |= {"bins": bins_of, "size": size_of}
    return environment.get_template("inspect.html").render(
        title=", ".join(printable(source, 80) for source in found.sources[:3]),
        lead=headline(found),
        notes=notes(found),
        parts=parts(found),
        found=found,
    )


# --------------------------------------------------------------------------------------------------------------
# The findings on a terminal.

_WIDTH = 80
_LABEL = 20
_BAR = 30


def print_table(found: Findings) -> None:
    """Print all parts, at most 80 columns wide; what should be mended comes last, where one looks first."""
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=False)
    console.width = min(console.width, _WIDTH) if console.is_terminal else _WIDTH
    with console.capture() as captured:
        for renderable in _report(found):
            console.print(renderable)
    for line in captured.get().splitlines():
        print(line.rstrip())


def _report(found: Findings) -> Iterator[RenderableType]:
    for part in parts(found):
        yield Text(part.title, style="bold")
        yield _rows(part)
        yield from map(_terminal_chart, part.charts)
        yield ""
    yield Text(headline(found), style="bold")
    listed = notes(found)
    for note in listed:
        line = Table.grid(padding=(0, 1))
        line.add_row(Text(" !" if note.grave else " ·", style="red" if note.grave else ""), Text(note.text))
        yield line
    if not listed:
        yield Text(" · nothing stands out")


def _rows(part: Part) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_LABEL, overflow="fold")
    table.add_column(overflow="fold")
    for row in part.rows:
        lines: list[RenderableType] = [Text(line, overflow="fold") for line in row.lines]
        table.add_row(Text(f"  {row.label}", style="dim"), Group(*lines))
    return table


def _terminal_chart(chart: Histogram) -> RenderableType:
    bins = bins_of(chart)
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_LABEL, justify="right")
    table.add_column()
    table.add_column(justify="right")
    for label, count in bins:
        bar = "█" * round(_BAR * count / max(chart.counts)) or ("▏" if count else "")
        table.add_row(Text(label, style="dim"), Text(bar.ljust(_BAR), style="cyan"), Text(f"{count:,}"))
    return Group(Text(f"  {chart.title}", style="dim"), table) if bins else Text("")

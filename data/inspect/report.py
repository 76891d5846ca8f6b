"""Report the findings of an inspection as rows, charts and notes, on the terminal and on an HTML page.

Unprintable characters of the data are escaped.
"""

import base64
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from clipkit.files import check_page, counted, format_bytes, printable, templates, write_page
from clipkit.samples import STRETCH, Decoding, color_of, parse_pixel_range
from clipkit.samples.remote import shard_cache
from data.augment import image_settings
from data.inspect.findings import DeepImages, Findings, Histogram, Names, Place
from data.inspect.survey import inspect
from data.options import InspectOptions

_MEMBERS_SHOWN = 20
_BROKEN_SHOWN = 10
_LEFT_OUT_SHOWN = 8
_CAUSES_SHOWN = 10
_TRAITS = {
    "transparent": "transparent", "rotated": "rotated by EXIF", "clamped": "outside the range",
    "deep_colors": "16 bits per color", "frames": "several frames", "cmyk": "CMYK", "pages": "several pages",
    "extra_channels": "unused channels",
}  # fmt: skip
_WIDTH = 80
_LABEL = 21


class Row(NamedTuple):
    """A label and its lines of text."""

    label: str
    lines: Sequence[str]


class Part(NamedTuple):
    """A titled part of the report."""

    name: str
    title: str
    rows: list[Row]
    charts: tuple[Histogram, ...] = ()


class Note(NamedTuple):
    """An important finding; ``grave`` if it would stop or harm training."""

    text: str
    grave: bool = False


# --------------------------------------------------------------------------------------------------------------
# Numbers and names


def _percent(part: float, total: float) -> str:
    value = 100 * part / max(1, total)
    if 0 < value < 1:
        return f"{value:.2g}%"
    return f"{value:.1f}%" if 0 < value < 100 else f"{value:.0f}%"


def _fraction(part: int, total: int) -> str:
    return f"{part:,} of {total:,} ({_percent(part, total)})"


def _format_count(value: float, is_exact: bool) -> str:
    """Return a count; an estimate with three significant digits."""
    if is_exact:
        return f"{value:,.0f}"
    return f"about {float(f'{value:.3g}'):,.0f}"


def _name(url: str) -> str:
    return printable(url.rpartition("/")[2] or url, 60)


def _format_place(place: Place) -> str:
    return f"{_name(place.shard)}: {printable(place.key, 60)}"


def _join_places(places: Sequence[Place]) -> str:
    return "; ".join(map(_format_place, places))


# --------------------------------------------------------------------------------------------------------------
# Parts


def headline(findings: Findings) -> str:
    """Summarize the shards in one line."""
    shards = findings.shards
    samples = _format_count(shards.samples, shards.samples_known)
    return f"{counted(shards.count, 'shard')}, {samples} samples, {format_bytes(shards.bytes)}"


def parts(findings: Findings) -> list[Part]:
    """Return all parts in order."""
    captions = findings.captions
    images = findings.pictures
    return [
        Part("shards", "Shards", _shard_rows(findings)),
        Part("samples", "Samples and their files", _member_rows(findings.names)),
        Part("fields", "Fields of the json", _field_rows(findings)),
        Part("bad", "Bad samples", _bad_rows(findings)),
        Part("captions", "Captions", _caption_rows(findings), (captions.tokens,)),
        Part("images", "Images", _image_rows(findings), (images.width, images.height)),
    ]


def _shard_rows(findings: Findings) -> list[Row]:
    shards = findings.shards
    filtered = findings.filtered
    rows = [
        Row("split", [f"{printable(findings.split, 60)}, and files that state no split"]),
        Row("shards", [f"{counted(shards.count, 'tar file')}, {format_bytes(shards.bytes)}"]),
    ]
    samples = _format_count(shards.samples, shards.samples_known)
    more = "; python -m data index counts all"
    if shards.samples_known:
        more = " pairs of image and caption"
    rows.append(Row("samples", [f"{samples}{more}"]))
    is_exact = shards.samples_known
    if filtered is not None:
        is_exact = findings.all_read
        passed = _percent(filtered.passed, filtered.read)
        left = _format_count(findings.left, is_exact)
        lines = [f"{left} samples ({passed}); the rest of this report covers all samples"]
        for reason, count in [*filtered.left_out.items()][:_LEFT_OUT_SHOWN]:
            lines.append(f"{count:,} left out: {printable(reason, 80)}")
        rows.append(Row("after filters", lines))
    steps = findings.left // findings.batch_size
    steps_text = counted(steps, "step") if is_exact else f"{_format_count(steps, is_exact)} steps"
    rows.append(
        Row("one epoch", [f"{steps_text} of {findings.batch_size:,} samples (--batch-size sets the batch)"])
    )
    if shards.looked_into < shards.count or shards.beginnings:
        first = ""
        if shards.beginnings:
            first = f"; only the first samples of {shards.beginnings:,}"
        rows.append(Row("scanned", [f"{shards.looked_into:,} of {shards.count:,}, spread evenly{first}"]))
    broken = [f"{_name(each.shard)}: {printable(each.cause, 160)}" for each in shards.broken[:_BROKEN_SHOWN]]
    if len(shards.broken) > _BROKEN_SHOWN:
        broken.append(f"{len(shards.broken) - _BROKEN_SHOWN:,} more")
    rows.append(Row("unreadable", broken or ["none"]))
    return rows


def _member_rows(names: Names) -> list[Row]:
    rows = []
    for member in names.members[:_MEMBERS_SHOWN]:
        line = f"{member.count:,}: {member.used_as or 'not used'}"
        if member.setting:
            line += f"; {printable(member.setting, 80)} uses them"
        if member.repeated:
            line += f"; {counted(member.repeated, 'repetition')} in a sample, ignored"
        rows.append(Row(printable(member.name, 60), [line]))
    rows.append(Row("without image", [_fraction(names.without_picture, names.groups)]))
    rows.append(Row("without caption", [_fraction(names.without_caption, names.groups)]))
    return rows


def _field_rows(findings: Findings) -> list[Row]:
    fields = findings.fields
    spread = ", among evenly spread samples"
    if findings.all_read:
        spread = ""
    rows = [Row("samples with json", [_fraction(fields.with_json, fields.read) + spread])]
    for field in fields.fields:
        part = ""
        if field.count != fields.read:
            part = f", in {_percent(field.count, fields.read)}"
        line = f"{field.kind}{part}"
        if field.values:
            line += f": {printable(field.values, 160)}"
        rows.append(Row(printable(field.name, 60), [line]))
    return rows


def _bad_rows(findings: Findings) -> list[Row]:
    sampled = findings.sampled
    spread = "all" if findings.all_decoded else "spread evenly"
    rows = [
        Row("decoded", [f"{counted(sampled.tried, 'sample')}, {spread}"]),
        Row("bad", [f"{sampled.bad:,} ({_percent(sampled.bad, sampled.tried)})"]),
    ]
    for group in sampled.causes[:_CAUSES_SHOWN]:
        lines = [printable(group.cause, 160), f"in {_join_places(group.first)}"]
        rows.append(Row(counted(group.count, "sample"), lines))
    return rows


def _caption_rows(findings: Findings) -> list[Row]:
    captions = findings.captions
    spread = "" if findings.all_read else ", spread evenly"
    cut = _fraction(captions.cut, captions.read)
    repeated = _fraction(captions.repeated, captions.read)
    rows = [
        Row("read", [f"{captions.read:,} captions{spread}"]),
        Row("length", [f"median {captions.median:,.0f} tokens, longest {captions.longest:,}"]),
        Row("too long", [f"{cut} are truncated to {findings.context_length} tokens"]),
        Row("repeated", [f"{repeated}; negatives in a batch, unless loss.same=positives (or ignored)"]),
    ]
    if captions.frequent:
        lines = [f"{count:,} × {printable(text, 100)}" for text, count in captions.frequent]
        rows.append(Row("most frequent", lines))
    return rows


def _image_rows(findings: Findings) -> list[Row]:
    images = findings.pictures
    formats = ", ".join(f"{printable(name, 20)} {count:,}" for name, count in images.formats.items())
    depths = ", ".join(f"{printable(depth, 40)} ({count:,})" for depth, count in images.depths.items())
    small = _fraction(images.small, images.read)
    rows = [
        Row("decoded", [f"{images.read:,}, median file {format_bytes(images.median_bytes)}"]),
        Row("formats", [formats]),
        Row("depth and channels", [depths]),
        Row(f"below {findings.image_size} pixels", [f"{small} on their shorter side; they are enlarged"]),
    ]
    for trait, places in images.traits_at.items():
        if places and trait in _TRAITS:
            count = getattr(images.traits, trait)
            more = "; …" if count > len(places) else ""
            line = f"{_fraction(count, images.read)}, in {_join_places(places)}{more}"
            rows.append(Row(_TRAITS[trait], [line]))
    rows += [_deep_row(deep, findings.decoding) for deep in images.deep]
    groups = [" = ".join(map(_format_place, group)) for group in images.same_groups]
    same = "none among the decoded images"
    if images.same:
        same = f"{images.same:,} images:"
    rows.append(Row("identical files", [same, *groups]))
    return rows


def _deep_row(deep: DeepImages, decoding: Decoding) -> Row:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in deep.kinds.items())
    several = len(deep.channels) > 1
    lines = [f"{kinds}; {'set' if decoding.pixel_range == STRETCH else 'settings'}\n{deep.settings}"]
    for index, channel in enumerate(deep.channels, start=1):
        prefix = f"channel {index}: " if several else ""
        percentiles = ", ".join(f"{value:g}" for value in channel.percentiles)
        lines.append(
            f"{prefix}values from {channel.low:.10g} to {channel.high:.10g}; "
            f"percentiles 1, 50 and 99: {percentiles}"
        )
    return Row(f"{len(deep.channels)} channels" if several else "deep grayscale", lines)


# --------------------------------------------------------------------------------------------------------------
# Notes


def notes(findings: Findings) -> list[Note]:
    """Return findings that a user should know or fix before training, grave ones first."""
    lines = [*_shard_notes(findings), *_sample_notes(findings), *_image_notes(findings)]
    return sorted(lines, key=lambda note: not note.grave)


def _shard_notes(findings: Findings) -> Iterator[Note]:
    shards = findings.shards
    filtered = findings.filtered
    if shards.broken:
        yield Note(
            f"{len(shards.broken):,} of {counted(shards.looked_into, 'scanned shard')} are unreadable; training "
            "rejects them: download them again or remove them",
            grave=True,
        )
    truncated = sum(shard.truncated for shard in shards.broken)
    if truncated:
        line = f"{counted(truncated, 'truncated shard')}: data.truncated=use trains on the intact part"
        yield Note(line, grave=True)
    if shards.missing_count:
        numbers = ", ".join(shards.missing[:10])
        yield Note(f"{counted(shards.missing_count, 'missing shard')}: {numbers}")
    if filtered is not None:
        for unknown in filtered.unknown:
            yield Note(printable(unknown, 1000), grave=True)
        if not filtered.passed and not filtered.unknown:
            yield Note("no sample read passes the filters", grave=True)
    if findings.left < findings.batch_size and (filtered is None or filtered.passed):
        yield Note(
            f"{findings.left:,} samples do not fill a batch of {findings.batch_size:,} (--batch-size): train with "
            "a smaller batch_size",
            grave=True,
        )


def _sample_notes(findings: Findings) -> Iterator[Note]:
    sampled = findings.sampled
    captions = findings.captions
    if sampled.bad > findings.max_bad * sampled.tried:
        bad = f"{_percent(sampled.bad, sampled.tried)} of the samples are bad"
        yield Note(f"{bad}; training stops above {100 * findings.max_bad:g}% (data.max_bad)", grave=True)
    if captions.not_utf8:
        read = captions.read + captions.empty + captions.not_utf8
        yield Note(
            f"{_fraction(captions.not_utf8, read)} captions are not UTF-8, such as "
            f"{_join_places(captions.not_utf8_at)}: training replaces these samples",
            grave=True,
        )
    for unknown in captions.unknown:
        yield Note(f"--captions: {printable(unknown, 1000)}")
    if captions.repeated > captions.read / 2:
        yield Note(
            f"{_fraction(captions.repeated, captions.read)} captions repeat another one, and are negatives in a "
            "batch unless loss.same=positives (or ignored) is set"
        )


def _image_notes(findings: Findings) -> Iterator[Note]:
    images = findings.pictures
    held_out = findings.held_out
    decoding = findings.decoding
    if held_out is not None and held_out.trained_on:
        among = "the part of the train split that was read"
        if findings.all_decoded:
            among = "the train split"
        yield Note(
            f"{held_out.trained_on:,} of {counted(held_out.read, 'image')} of the test split are identical to "
            f"images of {among}: scores on them measure memorization",
            grave=True,
        )
    for deep in images.deep:
        channels = len(deep.channels)
        lacks_range = deep.kinds.keys() != {"8-bit"} and decoding.pixel_range == STRETCH
        if channels in (1, decoding.channels) and not lacks_range:
            continue
        have = "has" if deep.count == 1 else "have"
        what = "more than 8 bits per channel"
        if channels not in (1, 3):
            what = f"{channels} channels"
        line = f"{deep.count:,} of {counted(images.read, 'image')} {have} {what}, at which training stops"
        yield Note(f"{line}: set\n{deep.settings}", grave=True)
    lines = images.traits.lines(decoding, background="pixels.background=white", upright="pixels.upright=true")
    yield from map(Note, lines.values())


# --------------------------------------------------------------------------------------------------------------
# The HTML page and the terminal


def render_page(findings: Findings) -> str:
    """Render the findings as one self-contained HTML page."""
    environment = templates(Path(__file__).with_name("templates"))
    environment.filters |= {"plain": printable, "base64": lambda data: base64.b64encode(data).decode()}
    return environment.get_template("inspect.html").render(
        title=", ".join(printable(source, 80) for source in findings.sources[:3]),
        lead=headline(findings),
        notes=notes(findings),
        parts=parts(findings),
        found=findings,
    )


def print_table(findings: Findings) -> None:
    """Print all parts without their charts, at most 80 columns wide, and the notes last."""
    for part in parts(findings):
        print(part.title)
        for row in part.rows:
            indent = f"  {row.label} ".ljust(_LABEL)
            if len(indent) > _LABEL:
                print(indent.rstrip())
                indent = " " * _LABEL
            for line in row.lines:
                _print_filled(line, indent, " " * _LABEL)
                indent = " " * _LABEL
        print()
    print(headline(findings))
    for note in notes(findings) or [Note("no problems found")]:
        mark = " ! " if note.grave else " · "
        _print_filled(note.text, mark, "   ")


def _print_filled(text: str, first: str, indent: str) -> None:
    """Print text in lines of at most 80 columns; what follows a line break are settings to copy, in one line."""
    words, _, settings = text.partition("\n")
    print(textwrap.fill(words, _WIDTH, initial_indent=first, subsequent_indent=indent))
    if settings:
        print(indent + settings)


def run_inspect(options: InspectOptions) -> int:
    """Run ``python -m data inspect``."""
    check_page("--html", options.html)
    augmentation, decoding, sources = image_settings(options.sources)
    if options.background:
        decoding = replace(decoding, background=color_of(options.background))
    if options.upright is not None:
        decoding = replace(decoding, upright=options.upright)
    if options.pixel_range is not None:
        decoding = replace(decoding, pixel_range=parse_pixel_range(options.pixel_range))
    findings = inspect(
        replace(options, sources=tuple(sources)),
        decoding=decoding,
        augmentation=augmentation,
        cache=shard_cache(sources, options.cache_gb),
    )
    print_table(findings)
    if options.json is not None:
        write_page(options.json, json.dumps(findings.to_dict(), ensure_ascii=False, indent=1) + "\n")
    if options.html is not None:
        write_page(options.html, render_page(findings))
        print(f"\nwrote {printable(str(options.html))}")
    return 0

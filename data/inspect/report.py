"""Report the findings of an inspection as rows, charts and notes, on the terminal and on an HTML page.

Unprintable characters of the data are escaped.
"""

import base64
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from clipkit.files import counted, printable, size_of, templates
from clipkit.samples import STRETCH, Decoding, format_pixel_range
from data.inspect.findings import DeepImages, Findings, Histogram, Names, Place

__all__ = ["Note", "Part", "Row", "headline", "notes", "page_of", "parts", "print_table"]


class Row(NamedTuple):
    """A label and its lines of text."""

    label: str
    lines: tuple[str, ...]


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


def _percent(part: float, whole: float) -> str:
    value = 100 * part / max(1, whole)
    return f"{value:.2g}%" if 0 < value < 1 else f"{value:.1f}%" if 0 < value < 100 else f"{value:.0f}%"


def _of_all(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({_percent(part, whole)})"


def _about(count: float) -> str:
    """An estimated count with three significant digits."""
    return f"about {float(f'{count:.3g}'):,.0f}"


def _name(url: str) -> str:
    return printable(url.rpartition("/")[2] or url, 60)


def _place(place: Place | None) -> str:
    return f"{_name(place.shard)}: {printable(place.key, 60)}" if place else ""


def _places(places: Sequence[Place]) -> str:
    return "; ".join(map(_place, places))


def _bins(chart: Histogram) -> list[tuple[str, int]]:
    """Label and count of the bins from the first to the last that is not empty."""
    filled = [number for number, count in enumerate(chart.counts) if count]
    return [(chart.labels[i], chart.counts[i]) for i in range(filled[0], filled[-1] + 1)] if filled else []


# --------------------------------------------------------------------------------------------------------------
# Parts


def headline(found: Findings) -> str:
    """Summarize the shards in one line."""
    shards = found.shards
    samples = f"{shards.samples:,}" if shards.samples_known else _about(shards.samples)
    return f"{counted(shards.count, 'shard')}, {samples} samples, {size_of(shards.bytes)}"


def parts(found: Findings) -> list[Part]:
    """Return all parts in order."""
    captions, images = found.captions, found.pictures
    return [
        Part("shards", "Shards", list(_shards(found))),
        Part("samples", "Samples and their files", list(_names(found.names))),
        Part("fields", "Fields of the json", list(_fields(found))),
        Part("bad", "Bad samples", list(_bad(found))),
        Part("captions", "Captions", list(_captions(found)), (captions.tokens,)),
        Part("images", "Images", list(_images(found)), (images.width, images.height)),
    ]


_MEMBERS_SHOWN = 20
_TRAITS = {
    "rotated": "rotated by EXIF", "clamped": "outside the range", "deep_colors": "16 bits per color",
    "frames": "several frames", "cmyk": "CMYK",
}  # fmt: skip


def _row(label: str, *lines: str) -> Row:
    return Row(label, lines)


def _shards(found: Findings) -> Iterator[Row]:
    shards, filtered = found.shards, found.filtered
    yield _row("shards", f"{counted(shards.count, 'tar file')}, {size_of(shards.bytes)}")
    if shards.samples_known:
        yield _row("samples", f"{shards.samples:,} pairs of image and caption")
    else:
        yield _row("samples", f"{_about(shards.samples)}; python -m data index counts all")
    if filtered is not None:
        left = f"{found.left:,}" if found.all_read else _about(found.left)
        passed = _percent(filtered.passed, filtered.read)
        left_out = [f"{count:,} left out: {printable(why, 80)}" for why, count in filtered.left_out.items()]
        passing = f"{left} samples ({passed}); the rest of this report covers all samples"
        yield _row("after filters", passing, *left_out[:8])
    steps = found.left // found.batch_size
    exact = shards.samples_known and (filtered is None or found.all_read)
    count = counted(steps, "step") if exact else f"{_about(steps)} steps"
    yield _row("one epoch", f"{count} of {found.batch_size:,} samples (--batch-size sets the batch)")
    if shards.looked_into < shards.count or shards.beginnings:
        first = f"; only the first samples of {shards.beginnings:,}" if shards.beginnings else ""
        yield _row("scanned", f"{shards.looked_into:,} of {shards.count:,}, spread evenly{first}")
    broken = [f"{_name(one.shard)}: {printable(one.cause, 160)}" for one in shards.broken[:10]] or ["none"]
    if len(shards.broken) > 10:
        broken.append(f"{len(shards.broken) - 10:,} more")
    yield _row("unreadable", *broken)


def _names(names: Names) -> Iterator[Row]:
    for member in names.members[:_MEMBERS_SHOWN]:
        line = f"{member.count:,}: {member.used_as or 'not used'}"
        if member.setting:
            line += f"; {printable(member.setting, 80)} uses them"
        if member.repeated:
            line += f"; {counted(member.repeated, 'repetition')} in a sample, ignored"
        yield _row(printable(member.name, 60), line)
    yield _row("without image", _of_all(names.without_picture, names.groups))
    yield _row("without caption", _of_all(names.without_caption, names.groups))


def _fields(found: Findings) -> Iterator[Row]:
    fields = found.fields
    spread = "" if found.all_read else ", among evenly spread samples"
    yield _row("samples with json", _of_all(fields.with_json, fields.read) + spread)
    for one in fields.fields:
        fraction = "" if one.count == fields.read else f", in {_percent(one.count, fields.read)}"
        yield _row(printable(one.name, 60), f"{one.kind}{fraction}: {printable(one.values, 160)}")


def _bad(found: Findings) -> Iterator[Row]:
    sampled = found.sampled
    spread = "all" if found.all_decoded else "spread evenly"
    yield _row("decoded", f"{counted(sampled.tried, 'sample')}, {spread}")
    yield _row("bad", f"{sampled.bad:,} ({_percent(sampled.bad, sampled.tried)})")
    for one in sampled.causes[:10]:
        yield _row(counted(one.count, "sample"), printable(one.cause, 160), f"in {_places(one.first)}")


def _captions(found: Findings) -> Iterator[Row]:
    captions = found.captions
    yield _row("read", f"{captions.read:,} captions" + ("" if found.all_read else ", spread evenly"))
    yield _row("length", f"median {captions.median:,.0f} tokens, longest {captions.longest:,}")
    cut = _of_all(captions.cut, captions.read)
    yield _row("too long", f"{cut} are truncated to {found.context_length} tokens")
    repeated = _of_all(captions.repeated, captions.read)
    yield _row("repeated", f"{repeated}; negatives in a batch, unless loss.same=positives (or ignored)")
    if captions.frequent:
        yield _row("most frequent", *(f"{n:,} × {printable(text, 100)}" for text, n in captions.frequent))


def _images(found: Findings) -> Iterator[Row]:
    images = found.pictures
    formats = ", ".join(f"{printable(kind, 20)} {count:,}" for kind, count in images.formats.items())
    depths = ", ".join(f"{printable(depth, 40)} ({count:,})" for depth, count in images.depths.items())
    yield _row("decoded", f"{images.read:,}, median file {size_of(images.median_bytes)}")
    yield _row("formats", formats or "none")
    yield _row("depth and channels", depths or "none")
    yield _row(
        f"below {found.image_size} pixels",
        f"{_of_all(images.small, images.read)} on their shorter side; they are enlarged",
    )
    for trait, places in images.traits_at.items():
        if places:
            count = getattr(images.traits, trait)
            more = "; …" if count > len(places) else ""
            label = _TRAITS.get(trait, trait)
            yield _row(label, f"{_of_all(count, images.read)}, in {_places(places)}{more}")
    for deep in images.deep:
        yield _deep(deep, found.decoding)
    groups = [" = ".join(map(_place, group)) for group in images.same_groups]
    same = f"{images.same:,} images:" if images.same else "none among the decoded images"
    yield _row("identical files", same, *groups)


def _deep(deep: DeepImages, decoding: Decoding) -> Row:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in deep.kinds.items())
    setting = f"set {deep.settings}"
    if decoding.pixel_range != STRETCH:
        setting = f"pixels.range={format_pixel_range(decoding.pixel_range)}"
    several = len(deep.channels) > 1
    lines = [f"{kinds}; {setting}"]
    for number, channel in enumerate(deep.channels, start=1):
        prefix = f"channel {number}: " if several else ""
        percentiles = ", ".join(f"{value:g}" for value in channel.percentiles)
        lines.append(
            f"{prefix}values from {channel.low:.10g} to {channel.high:.10g}; "
            f"percentiles 1, 50 and 99: {percentiles}"
        )
    return _row(f"{len(deep.channels)} channels" if several else "deep grayscale", *lines)


# --------------------------------------------------------------------------------------------------------------
# Notes


def notes(found: Findings) -> list[Note]:
    """Return findings that a user should know or fix before training, grave ones first."""
    found_notes = [*_shard_notes(found), *_sample_notes(found), *_image_notes(found)]
    return sorted(found_notes, key=lambda note: not note.grave)


def _shard_notes(found: Findings) -> Iterator[Note]:
    shards, names, filtered = found.shards, found.names, found.filtered
    if shards.broken:
        yield Note(
            f"{len(shards.broken):,} of {counted(shards.looked_into, 'scanned shard')} are unreadable; training "
            "rejects them: download them again or remove them",
            grave=True,
        )
        if truncated := sum(one.truncated for one in shards.broken):
            yield Note(
                f"{counted(truncated, 'truncated shard')}: data.truncated=use trains on the intact part",
                grave=True,
            )
    if shards.missing_count:
        numbers = ", ".join(shards.missing[:10])
        yield Note(f"{counted(shards.missing_count, 'missing shard')}: {numbers}")
    if names.apart:
        yield Note(
            f"{counted(names.apart, 'key')} repeated later in the shard ({_place(names.apart_example)}): the files "
            "of a sample must be consecutive",
            grave=True,
        )
    if filtered is not None:
        for unknown in filtered.unknown:
            yield Note(printable(unknown, 1000), grave=True)
        if not filtered.passed and not filtered.unknown:
            yield Note("no sample read passes the filters", grave=True)
    if found.left < found.batch_size and (filtered is None or filtered.passed):
        yield Note(
            f"{found.left:,} samples do not fill a batch of {found.batch_size:,} (--batch-size): train with a "
            "smaller batch_size",
            grave=True,
        )


def _sample_notes(found: Findings) -> Iterator[Note]:
    sampled, captions = found.sampled, found.captions
    bad = f"{_percent(sampled.bad, sampled.tried)} of the samples are bad"
    limit = f"training stops above {100 * found.max_bad:g}% (data.max_bad)"
    if sampled.bad > found.max_bad * sampled.tried:
        yield Note(f"{bad}; {limit}", grave=True)
    if captions.not_utf8:
        read = captions.read + captions.empty + captions.not_utf8
        yield Note(
            f"{_of_all(captions.not_utf8, read)} captions are not UTF-8, such as {_places(captions.not_utf8_at)}: "
            "training replaces these samples",
            grave=True,
        )
    for unknown in captions.unknown:
        yield Note(f"data.captions: {printable(unknown, 1000)}")


def _image_notes(found: Findings) -> Iterator[Note]:
    images, held_out = found.pictures, found.held_out
    if held_out is not None and held_out.trained_on:
        among = "the train split" if found.all_decoded else "the part of the train split that was read"
        yield Note(
            f"{held_out.trained_on:,} of {counted(held_out.read, 'image')} of the test split are identical to "
            f"images of {among}: scores on them measure memorization",
            grave=True,
        )
    for deep in images.deep:
        is_deep, channels = deep.kinds.keys() != {"8-bit"}, len(deep.channels)
        lacks_range = is_deep and found.decoding.pixel_range == STRETCH
        if channels in (1, found.decoding.channels) and not lacks_range:
            continue
        have = "has" if deep.count == 1 else "have"
        what = "more than 8 bits per channel" if channels in (1, 3) else f"{channels} channels"
        line = f"{deep.count:,} of {counted(images.read, 'image')} {have} {what}, at which training stops"
        yield Note(f"{line}: set {deep.settings}", grave=True)
    lines = images.traits.lines(
        found.decoding, background="pixels.background=white", upright="pixels.upright=true"
    )
    yield from map(Note, lines.values())


# --------------------------------------------------------------------------------------------------------------
# The HTML page and the terminal

_WIDTH = 80
_LABEL = 21


def page_of(found: Findings) -> str:
    """Render the findings as one self-contained HTML page."""
    environment = templates(Path(__file__).with_name("templates"))
    environment.filters |= {"plain": printable, "base64": lambda data: base64.b64encode(data).decode()}
    environment.filters |= {"bins": _bins, "size": size_of}
    return environment.get_template("inspect.html").render(
        title=", ".join(printable(source, 80) for source in found.sources[:3]),
        lead=headline(found),
        notes=notes(found),
        parts=parts(found),
        found=found,
    )


def print_table(found: Findings) -> None:
    """Print all parts without their charts, at most 80 columns wide, and the notes last."""
    for part in parts(found):
        print(part.title)
        for row in part.rows:
            indent = f"  {row.label} ".ljust(_LABEL)
            if len(indent) > _LABEL:
                print(indent.rstrip())
                indent = " " * _LABEL
            for line in row.lines:
                print(textwrap.fill(line, _WIDTH, initial_indent=indent, subsequent_indent=" " * _LABEL))
                indent = " " * _LABEL
        print()
    print(headline(found))
    for note in notes(found) or [Note("no problems found")]:
        mark = " ! " if note.grave else " · "
        print(textwrap.fill(note.text, _WIDTH, initial_indent=mark, subsequent_indent="   "))

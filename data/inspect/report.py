"""Report the findings of an inspection as rows, charts and notes, on the terminal and on an HTML page.

Unprintable characters of the data are escaped.
"""

import base64
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from clipkit.files import counted, printable, size_of, templates
from clipkit.samples import STRETCH, Decoding, TraitCounts, format_pixel_range, hex_of
from data.inspect.findings import DeepImages, Duplicates, Findings, Histogram, Names, Place, WithTrait

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


def _repeated(names: Names) -> str:
    counts = ", ".join(
        f"{count:,} more {'image' if kind == 'picture' else printable(kind, 30)}"
        for kind, count in list(names.repeated.items())[:5]
    )
    return f"{counts} (such as {_places(names.repeated_at)})" if names.repeated_at else counts


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
        Part("speed", "Speed", list(_speed(found))),
    ]


def _row(label: str, *lines: str) -> Row:
    return Row(label, lines)


def _shards(found: Findings) -> Iterator[Row]:
    shards, filtered, stated = found.shards, found.filtered, found.shards.stated
    yield _row("shards", f"{counted(shards.count, 'tar file')}, {size_of(shards.bytes)}")
    if shards.samples_known:
        yield _row("samples", f"{shards.samples:,} pairs of image and caption")
    else:
        known = f"{shards.counted:,} of {shards.count:,} shards are counted"
        yield _row("samples", f"{_about(shards.samples)}; {known}")
    if filtered is not None:
        left = f"{found.left:,}" if found.all_read else _about(found.left)
        passed = _percent(filtered.passed, filtered.read)
        yield _row("after filters", f"{left} samples ({passed}); the rest of this report covers all samples")
    steps = found.left // found.batch_size
    exact = shards.samples_known and (filtered is None or found.all_read)
    count = counted(steps, "step") if exact else f"{_about(steps)} steps"
    yield _row("one epoch", f"{count} of {found.batch_size:,} samples (--batch-size sets the batch)")
    if shards.counted:
        spread = f"{shards.least:,} to {shards.greatest:,} samples, median {shards.median:,.0f}"
        if shards.least == shards.greatest:
            spread = counted(shards.least, "sample")
        yield _row("samples per shard", spread)
    if stated.shards:
        lines = [f"{_name(name)}: {says:,}, found {there:,}" for name, says, there in stated.differ[:5]]
        if len(stated.differ) > 5:
            lines.append(f"{len(stated.differ) - 5:,} more differ")
        total = f"{stated.stated:,} samples stated, {stated.found:,} with an image found"
        yield _row("_stats.json files", total, *lines)
    if shards.looked_into < shards.count or shards.beginnings:
        first = f"; only the first samples of {shards.beginnings:,}" if shards.beginnings else ""
        yield _row("scanned", f"{shards.looked_into:,} of {shards.count:,}, spread evenly{first}")
    if shards.ends_checked:
        whole = f"{shards.ends_checked - shards.suspicious:,} of {shards.ends_checked:,}"
        yield _row("complete", f"{whole} end with a valid tar trailer")
    missing = ", ".join(shards.missing[:10]) + (", …" if len(shards.missing) > 10 else "")
    gaps = f"{shards.missing_count:,}: {missing}" if missing else "none: the shard numbers have no gaps"
    yield _row("missing", gaps)
    yield _row("without pairs", ", ".join(map(_name, shards.empty[:8])) or "none")
    broken = [f"{_name(one.shard)}: {printable(one.cause, 160)}" for one in shards.broken[:10]] or ["none"]
    if len(shards.broken) > 10:
        broken.append(f"{len(shards.broken) - 10:,} more")
    yield _row("unreadable", *broken)


def _names(names: Names) -> Iterator[Row]:
    forms = [f"{printable(form, 60)}  ({count:,})" for form, count in names.patterns.items()]
    yield _row("key patterns", *forms, *(["# is a digit"] if any("#" in form for form in forms) else []))
    extensions = [f"{printable(one, 30)} {count:,}" for one, count in list(names.extensions.items())[:10]]
    yield _row("files by extension", ", ".join(extensions))
    if names.upper_case:
        capitals = ", ".join(f"{printable(one, 30)} {n:,}" for one, n in names.upper_case.items())
        yield _row("in uppercase", capitals)
    yield _row("without image", _of_all(names.without_picture, names.groups))
    yield _row("without caption", _of_all(names.without_caption, names.groups))
    if names.second_dot:
        yield _row("second dot in name", f"{counted(names.second_dot, 'file')}, ignored by training")
    if names.hidden:
        yield _row("in no sample", f"{counted(names.hidden, 'file')}, hidden or without an extension")
    if names.repeated:
        yield _row("twice in a sample", f"{_repeated(names)}; the first one is used")
    if names.apart:
        yield _row(
            "twice in a shard", f"{counted(names.apart, 'key')}, such as {_place(names.apart_example)}"
        )
    if names.across:
        example = f", such as {printable(names.across_example, 60)}" if names.across_example else ""
        yield _row("in several shards", f"{counted(names.across, 'key')}{example}; harmless in training")


def _fields(found: Findings) -> Iterator[Row]:
    fields, filtered = found.fields, found.filtered
    spread = "" if found.all_read else ", among evenly spread samples"
    yield _row("samples with json", _of_all(fields.with_json, fields.read) + spread)
    for one in fields.fields:
        fraction = "" if one.count == fields.read else f", in {_percent(one.count, fields.read)}"
        yield _row(printable(one.name, 60), f"{one.kind}{fraction}: {printable(one.values, 160)}")
    if fields.more:
        yield _row("other fields", f"{fields.more:,}")
    if filtered is not None:
        left_out = [f"{count:,} left out: {printable(why, 80)}" for why, count in filtered.left_out.items()]
        yield _row("filters", *(printable(one, 80) for one in filtered.filters))
        yield _row("after filters", f"{_of_all(filtered.passed, filtered.read)} pass", *left_out[:8])
    elif fields.fields:
        yield _row("to filter", "--filters 'FIELD >= VALUE' here, data.filters in training")


def _bad(found: Findings) -> Iterator[Row]:
    sampled = found.sampled
    interval = f"; of all samples {100 * sampled.low:.2g}–{100 * sampled.high:.2g}% (95% interval)"
    every = found.all_decoded
    tried = f"all {sampled.tried:,} samples" if every else f"{sampled.tried:,} samples, spread evenly"
    yield _row("decoded", tried)
    yield _row("bad", f"{sampled.bad:,} ({_percent(sampled.bad, sampled.tried)}){'' if every else interval}")
    yield _row("limit", f"training stops above {100 * found.max_bad:g}% (data.max_bad)")
    for one in sampled.causes[:10]:
        yield _row(counted(one.count, "sample"), printable(one.cause, 160), f"in {_places(one.first)}")


def _captions(found: Findings) -> Iterator[Row]:
    captions = found.captions
    yield _row("read", f"{captions.read:,} captions" + ("" if found.all_read else ", spread evenly"))
    longest = f"{captions.longest:,}" if captions.longest < 1024 else "1,024 or more"
    yield _row("length", f"median {captions.median:,.0f} tokens, longest {longest}")
    if captions.longest_at and captions.cut:
        yield _row("longest", _place(captions.longest_at))
    cut = _of_all(captions.cut, captions.read)
    yield _row("too long", f"{cut} are truncated to {found.context_length} tokens")
    yield _row("empty", f"{captions.empty:,}")
    if captions.not_utf8:
        yield _row("not UTF-8", f"{captions.not_utf8:,}: {_places(captions.not_utf8_at)}")
    yield _row("repeated", f"{_of_all(captions.repeated, captions.read)} repeat another sample's caption")
    if captions.frequent:
        yield _row("most frequent", *(f"{n:,} × {printable(text, 100)}" for text, n in captions.frequent))


def _images(found: Findings) -> Iterator[Row]:
    images = found.pictures
    formats = ", ".join(f"{printable(kind, 20)} {count:,}" for kind, count in images.formats.items())
    misnamed = ", ".join(f"{printable(what, 40)} ({count:,})" for what, count in images.misnamed.items())
    marks = ", ".join(f"{mark} {_percent(count, images.read)}" for mark, count in images.marks.items())
    wide = f"{images.widest:.3g} times as wide as high: {_place(images.widest_at)}"
    high = f"{images.tallest:.3g} times as high as wide: {_place(images.tallest_at)}"
    yield _row("decoded", f"{images.read:,}, median file {size_of(images.median_bytes)}")
    yield _row("formats", formats or "none")
    yield _row("wrong extension", misnamed or "none")
    yield _row(
        f"below {found.image_size} pixels",
        f"{_of_all(images.small, images.read)} on their shorter side; they are enlarged",
    )
    yield _row("widest", wide if images.widest > 1 else "none is wider than high")
    yield _row("tallest", high if images.tallest > 1 else "none is higher than wide")
    yield _row("unusual", marks.replace("grey", "grayscale") or "none is grayscale, CMYK or 16-bit")
    background = found.decoding.background
    yield _trait(
        "transparent",
        images.transparent,
        images.read,
        f"blended onto {hex_of(background)}"
        if background
        else "their hidden colors are used, as in open_clip; set data.background=white",
    )
    yield _trait(
        "rotated by EXIF",
        images.rotated,
        images.read,
        "rotated upright"
        if found.decoding.upright
        else "not applied, as in open_clip; set data.upright=true",
    )
    if images.deep is not None:
        yield _deep(images.deep, found.decoding)
    yield _row("identical files", *_duplicates(images.same_bytes))
    yield _row("similar images", *_duplicates(images.same_look))


def _deep(deep: DeepImages, decoding: Decoding) -> Row:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in deep.kinds.items())
    percentiles = ", ".join(f"{value:g}" for value in deep.percentiles)
    setting = f"set data.pixel_range={deep.pixel_range}"
    if decoding.pixel_range != STRETCH:
        setting = f"data.pixel_range={format_pixel_range(decoding.pixel_range)}"
    return _row(
        "deep grayscale",
        f"{kinds}; {setting}",
        f"values from {deep.low:.10g} to {deep.high:.10g}; percentiles 1, 50 and 99: {percentiles}",
    )


def _trait(label: str, found: WithTrait, read: int, what: str) -> Row:
    if not found.count:
        return _row(label, "none")
    more = "; …" if found.count > len(found.first) else ""
    return _row(label, f"{_of_all(found.count, read)}; {what}", f"in {_places(found.first)}{more}")


def _duplicates(found: Duplicates) -> Sequence[str]:
    if not found.groups:
        return ["none among the decoded images"]
    shown = [" = ".join(map(_place, group)) for group in found.shown[:3]]
    more = ["…"] if found.groups > len(shown) else []
    return [f"{found.pictures:,} images in {counted(found.groups, 'group')}:", *shown, *more]


def _speed(found: Findings) -> Iterator[Row]:
    speed = found.speed
    network = ", over the network, without a copy on disk" if speed.remote else ""
    yield _row(
        "one CPU core",
        f"prepares {speed.per_core:,.0f} samples/s at {found.image_size} pixels: {speed.make:.2f} ms per image, "
        f"{speed.text:.2f} ms per caption",
    )
    yield _row("reading only", f"{speed.read:,.0f} samples/s, {size_of(speed.read_bytes)}/s{network}")
    yield _row(
        "workers needed",
        f"{counted(speed.workers, 'worker')} (data.workers) for a GPU that processes {speed.rate:,.0f} samples/s "
        "(--rate)",
    )
    rates = (500, 1000, 2000, 5000)
    yield _row("at other rates", ", ".join(f"{rate:,}/s: {speed.workers_for(rate)}" for rate in rates))
    yield _row("this machine", f"{speed.cores} cores: at most {speed.cores * speed.per_core:,.0f} samples/s")
    yield _row(
        "typical rates",
        "For open_clip's LAION-400M models, an A100 processed 773 samples/s of ViT-B/32, 332 of ViT-B/16 and 70 of "
        "ViT-L/14. The metrics of a training run show the rate of your GPU.",
    )


# --------------------------------------------------------------------------------------------------------------
# Notes

_COMMON = 0.1  # fraction above which a finding becomes a note


def notes(found: Findings) -> list[Note]:
    """Return findings that a user should know or fix before training, grave ones first."""
    found_notes = [*_shard_notes(found), *_sample_notes(found), *_image_notes(found)]
    return sorted(found_notes, key=lambda note: not note.grave)


def _shard_notes(found: Findings) -> Iterator[Note]:
    shards, names, stated, filtered = found.shards, found.names, found.shards.stated, found.filtered
    for refusal in shards.refused:
        yield Note(f"training rejects this list of shards: {printable(refusal, 300)}", grave=True)
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
    if shards.suspicious > len(shards.broken):
        suspicious = counted(shards.suspicious, "shard")
        yield Note(f"{suspicious} without a tar trailer: probably truncated", grave=True)
    if shards.missing_count:
        numbers = ", ".join(shards.missing[:6])
        yield Note(f"{counted(shards.missing_count, 'missing shard')}: {numbers}")
    if shards.empty:
        yield Note(f"{counted(len(shards.empty), 'shard')} without a pair, such as {_name(shards.empty[0])}")
    if names.apart:
        yield Note(
            f"{counted(names.apart, 'key')} repeated later in the shard ({_place(names.apart_example)}): the files "
            "of a sample must be consecutive",
            grave=True,
        )
    if names.repeated:
        yield Note(
            f"samples with several files of a kind: {_repeated(names)}; training uses the first one of each sample "
            "and ignores the others"
        )
    if names.second_dot:
        yield Note(
            f"{counted(names.second_dot, 'file')} with a second dot in the name; everything after the first dot is "
            "the extension, so they are ignored: use keys without dots",
            grave=True,
        )
    if stated.found != stated.stated:
        less = "fewer" if stated.found < stated.stated else "more"
        yield Note(
            f"{stated.found:,} samples with an image found, {less} than the {stated.stated:,} stated in "
            "_stats.json files: were shards truncated or rewritten?"
        )
    if filtered is not None:
        for unknown in filtered.unknown:
            yield Note(printable(unknown, 1000), grave=True)
        if filtered.passed:
            yield Note(f"{_of_all(filtered.passed, filtered.read)} of the samples read pass the filters")
        elif not filtered.unknown:
            yield Note("no sample read passes the filters", grave=True)
    if found.left < found.batch_size and (filtered is None or filtered.passed):
        yield Note(
            f"{found.left:,} samples do not fill a batch of {found.batch_size:,} (--batch-size): train with a "
            "smaller batch_size",
            grave=True,
        )


def _sample_notes(found: Findings) -> Iterator[Note]:
    names, sampled, captions = found.names, found.sampled, found.captions
    if left_out := names.without_caption + names.without_picture:
        yield Note(f"{_of_all(left_out, names.groups)} samples lack an image or a caption and are left out")
    bad = f"{_percent(sampled.bad, sampled.tried)} of the samples are bad"
    limit = f"training stops above {100 * found.max_bad:g}% (data.max_bad)"
    if sampled.bad_fraction > found.max_bad:
        yield Note(f"{bad}; {limit}", grave=True)
    elif sampled.bad and sampled.bad_fraction == found.max_bad:
        yield Note(f"{bad}; {limit}, which can happen by chance", grave=True)
    elif sampled.bad and sampled.high > found.max_bad and not found.all_decoded:
        yield Note(
            f"{bad}; {limit}, and it may be up to {100 * sampled.high:.1f}%: decode more with --samples"
        )
    if captions.cut > _COMMON * captions.read:
        yield Note(
            f"{_percent(captions.cut, captions.read)} of the captions have more than {found.context_length} "
            "tokens and are truncated"
        )
    if captions.not_utf8:
        read = captions.read + captions.empty + captions.not_utf8
        yield Note(
            f"{_of_all(captions.not_utf8, read)} captions are not UTF-8, such as {_places(captions.not_utf8_at)}: "
            "training replaces these samples",
            grave=True,
        )
    for unknown in captions.unknown:
        yield Note(f"data.captions: {printable(unknown, 1000)}")
    if captions.repeated > _COMMON * captions.read:
        yield Note(
            f"{_percent(captions.repeated, captions.read)} of the captions read repeat an earlier one: "
            "within a batch such pairs count as negatives, unless loss.same=positives (or ignored)"
        )


def _image_notes(found: Findings) -> Iterator[Note]:
    images, speed, held_out = found.pictures, found.speed, found.held_out
    if held_out is not None and held_out.trained_on:
        among = "the train split" if found.all_decoded else "the part of the train split that was read"
        yield Note(
            f"{held_out.trained_on:,} of {counted(held_out.read, 'image')} of the test split are identical to "
            f"images of {among}: scores on them measure memorization",
            grave=True,
        )
    if images.small > _COMMON * images.read:
        yield Note(
            f"{_percent(images.small, images.read)} of the images are smaller than {found.image_size} pixels "
            "(--image-size) and are enlarged"
        )
    counts = TraitCounts(
        images=images.read,
        transparent=images.transparent.count,
        rotated=images.rotated.count,
        clamped=images.clamped.count,
        deep_colors=images.deep_colors.count,
    )
    if images.deep is not None and found.decoding.pixel_range == STRETCH:
        have = "has" if images.deep.count == 1 else "have"
        yield Note(
            f"{images.deep.count:,} of {counted(images.read, 'image')} {have} more than 8 bits of gray, at which "
            f"training stops: set data.pixel_range={images.deep.pixel_range}, or for the values of these images "
            f"{format_pixel_range((images.deep.low, images.deep.high))}",
            grave=True,
        )
    lines = counts.lines(found.decoding, background="data.background=white", upright="data.upright=true")
    yield from map(Note, lines.values())
    if speed.workers > speed.cores:
        yield Note(
            f"{speed.rate:,.0f} samples/s need {counted(speed.workers, 'worker')}; "
            f"this machine has {counted(speed.cores, 'core')}"
        )


# --------------------------------------------------------------------------------------------------------------
# The HTML page and the terminal

_WIDTH = 80
_LABEL = 20
_BAR = 30


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
    """Print all parts, at most 80 columns wide, and the notes last."""
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=False)
    console.width = min(console.width, _WIDTH) if console.is_terminal else _WIDTH
    with console.capture() as captured:
        for part in parts(found):
            table = Table.grid(padding=(0, 1))
            table.add_column(width=_LABEL, overflow="fold")
            table.add_column(overflow="fold")
            for row in part.rows:
                lines = Group(*(Text(line, overflow="fold") for line in row.lines))
                table.add_row(Text(f"  {row.label}", style="dim"), lines)
            console.print(
                Text(part.title, style="bold"), table, *map(_terminal_chart, part.charts), "", sep="\n"
            )
        console.print(Text(headline(found), style="bold"))
        listed = notes(found)
        for note in listed:
            line = Table.grid(padding=(0, 1))
            line.add_row(
                Text(" !" if note.grave else " ·", style="red" if note.grave else ""), Text(note.text)
            )
            console.print(line)
        if not listed:
            console.print(Text(" · no problems found"))
    for text in captured.get().splitlines():
        print(text.rstrip())


def _terminal_chart(chart: Histogram) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_LABEL, justify="right")
    table.add_column()
    table.add_column(justify="right")
    for label, count in (bins := _bins(chart)):
        bar = "█" * round(_BAR * count / max(chart.counts)) or ("▏" if count else "")
        table.add_row(Text(label, style="dim"), Text(bar.ljust(_BAR), style="cyan"), Text(f"{count:,}"))
    return Group(Text(f"  {chart.title}", style="dim"), table) if bins else Text("")

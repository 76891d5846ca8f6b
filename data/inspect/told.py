"""Findings in words: the notes, rows and charts that the terminal's table and the page both show.

Text that comes from data is made harmless here: characters that are not printable are written as escapes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from data.inspect.findings import Duplicates, Findings, Histogram, Place

__all__ = ["Note", "Part", "Row", "headline", "notes", "parts", "plain", "size_of"]

_RATES = (500, 1000, 2000, 5000)  # samples a second
_MENTIONED = 0.1  # share from which something common is worth a note
_PLACES = 3
_LONG = 160  # characters of a caption or key


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something to know first; ``grave`` where a training would stop or be harmed."""

    text: str
    grave: bool = False


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


def plain(text: str, most: int = _LONG) -> str:
    """Text from data on one line, nothing in it that moves a cursor or turns the direction of writing."""
    shown = text[:most] + "…" * (len(text) > most)
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape", "backslashreplace").decode()
        for one in shown
    )


def size_of(count: float) -> str:
    """Bytes in the unit that fits."""
    for unit, worth in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= worth:
            return f"{count / worth:.3g} {unit}"
    return f"{count:.0f} bytes"


def _many(count: int, one: str) -> str:
    """A number and what it counts, in the plural that ends in s."""
    return f"{count:,} {one}" + ("" if count == 1 else "s")


def _percent(part: float, whole: float) -> str:
    share = 100 * part / max(1, whole)
    return f"{share:.2g}%" if 0 < share < 1 else f"{share:.1f}%" if 0 < share < 100 else f"{share:.0f}%"


def _of(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({_percent(part, whole)})"


def _name(url: str) -> str:
    return plain(url.rpartition("/")[2] or url, 60)


def _place(place: Place | None) -> str:
    return f"{_name(place.shard)}: {plain(place.key, 60)}" if place else ""


def _about(count: float) -> str:
    """A count that was estimated, with the digits that it deserves."""
    return f"about {float(f'{count:.3g}'):,.0f}"


def headline(found: Findings) -> str:
    """All in one line."""
    shards = found.shards
    samples = f"{shards.samples:,}" if shards.samples_known else _about(shards.samples)
    return f"{_many(shards.count, 'shard')}, {samples} samples, {size_of(shards.bytes)}"


def notes(found: Findings) -> list[Note]:
    """What a user should mend or know, the gravest first."""
    told = [*_shard_notes(found), *_sample_notes(found), *_picture_notes(found)]
    return sorted(told, key=lambda note: not note.grave)


def _shard_notes(found: Findings) -> Iterator[Note]:
    shards, names = found.shards, found.names
    for refusal in shards.refused:
        yield Note(text=f"training refuses this list of shards: {plain(refusal, 300)}", grave=True)
    if shards.broken:
        yield Note(
            text=f"{len(shards.broken):,} of {_many(shards.looked_into, 'shard')} looked into cannot be read; "
            "training refuses them: fetch them again or leave them out",
            grave=True,
        )
    if shards.suspicious > len(shards.broken):
        yield Note(
            text=f"{_many(shards.suspicious, 'shard')} not ending as a tar does: likely cut short",
            grave=True,
        )
    if shards.missing_count:
        yield Note(
            text=f"missing {_many(shards.missing_count, 'shard number')}: {', '.join(shards.missing[:6])}"
        )
    if shards.empty:
        yield Note(
            text=f"{_many(len(shards.empty), 'shard')} without a pair, among them {_name(shards.empty[0])}"
        )
    if names.apart:
        yield Note(
            text=f"{_many(names.apart, 'key')} coming back later in the shard ({_place(names.apart_example)}): "
            "the files of one sample must follow one another",
            grave=True,
        )
    if names.second_dot:
        yield Note(
            text=f"{_many(names.second_dot, 'file')} with a second dot in the name; all behind the first dot is "
            "taken for the extension, so they are not seen: leave no dots in keys",
            grave=True,
        )


def _sample_notes(found: Findings) -> Iterator[Note]:
    names, sampled, captions = found.names, found.sampled, found.captions
    left_out = names.without_caption + names.without_picture
    if left_out:
        yield Note(text=f"{_of(left_out, names.groups)} samples lack a picture or a caption and are left out")
    limit = f"training stops beyond {100 * found.max_bad:g}% (data.max_bad)"
    told = f"{_percent(sampled.bad, sampled.tried)} of the samples are bad; {limit}"
    if sampled.share > found.max_bad:
        yield Note(text=told, grave=True)
    elif sampled.bad and sampled.share == found.max_bad:
        yield Note(text=f"{told}, which chance may pass", grave=True)
    elif sampled.bad and sampled.high > found.max_bad and not _all_decoded(found):
        yield Note(text=f"{told}, and it may be up to {100 * sampled.high:.1f}%: look at more by --samples")
    if captions.cut > _MENTIONED * captions.read:
        yield Note(
            text=f"{_percent(captions.cut, captions.read)} of the captions have more than {found.context_length} "
            "tokens: their end is not seen"
        )
    if captions.repeated > _MENTIONED * captions.read:
        yield Note(
            text=f"{_percent(captions.repeated, captions.read)} of the captions read are there already with "
            "another picture: in one batch such pairs count as wrong"
        )


def _picture_notes(found: Findings) -> Iterator[Note]:
    pictures, speed = found.pictures, found.speed
    if pictures.small > _MENTIONED * pictures.read:
        yield Note(
            text=f"{_percent(pictures.small, pictures.read)} of the pictures are smaller than the model's "
            f"{found.image_size} pixels and are enlarged"
        )
    if turned := pictures.marks.get("turned by EXIF", 0):
        yield Note(
            text=f"{_percent(turned, pictures.read)} of the pictures have an EXIF tag that says to turn them; "
            "as in CLIP, nothing turns them"
        )
    if speed.workers > speed.cores:
        yield Note(
            text=f"{speed.rate:,.0f} samples/s need {_many(speed.workers, 'worker')}; "
            f"this machine has {_many(speed.cores, 'core')}"
        )


def parts(found: Findings) -> list[Part]:
    """All parts in their order."""
    return [_shards(found), _names(found), _bad(found), _captions(found), _pictures(found), _speed(found)]


def _row(label: str, *lines: str) -> Row:
    return Row(label=label, lines=lines)


def _shards(found: Findings) -> Part:
    shards = found.shards
    rows = [_row("shards", f"{shards.count:,}, {size_of(shards.bytes)}")]
    if shards.samples_known:
        rows.append(_row("samples", f"{shards.samples:,} pairs of picture and caption"))
    else:
        rows.append(
            _row(
                "samples",
                f"{_about(shards.samples)}; {shards.counted:,} of {shards.count:,} shards are counted",
            )
        )
    if shards.counted:
        rows.append(
            _row(
                "a shard has", f"{shards.least:,} to {shards.greatest:,} samples, median {shards.median:,.0f}"
            )
        )
    if shards.looked_into < shards.count or shards.beginnings:
        first = f"; of {shards.beginnings:,} the first samples only" if shards.beginnings else ""
        rows.append(_row("looked into", f"{shards.looked_into:,} of {shards.count:,}, spread evenly{first}"))
    if shards.ends_checked:
        rows.append(
            _row("ends as a tar", f"{shards.ends_checked - shards.suspicious:,} of {shards.ends_checked:,}")
        )
    missing = ", ".join(shards.missing[:10]) + (", …" if len(shards.missing) > 10 else "")
    rows.append(_row("missing numbers", f"{shards.missing_count:,}: {missing}" if missing else "none"))
    rows.append(_row("empty", ", ".join(map(_name, shards.empty[:8])) or "none"))
    broken = [f"{_name(one.shard)}: {plain(one.cause)}" for one in shards.broken[:10]]
    more = len(shards.broken) - len(broken)
    rows.append(_row("broken", *(broken or ["none"]), *([f"{more:,} more"] if more else [])))
    return Part(name="shards", title="Shards", rows=tuple(rows))


def _names(found: Findings) -> Part:
    names = found.names
    extensions = ", ".join(
        f"{plain(one, 30)} {count:,}" for one, count in list(names.extensions.items())[:10]
    )
    rows = [
        _row(
            "keys look like", *(f"{plain(form, 60)}  ({count:,})" for form, count in names.patterns.items())
        ),
        _row("files by extension", extensions),
    ]
    if names.upper_case:
        rows.append(
            _row("in capitals", ", ".join(f"{plain(one, 30)} {n:,}" for one, n in names.upper_case.items()))
        )
    rows += [
        _row("without picture", _of(names.without_picture, names.groups)),
        _row("without caption", _of(names.without_caption, names.groups)),
    ]
    across = f"{names.across:,}" + (
        f", such as {plain(names.across_example, 60)}" if names.across_example else ""
    )
    counts = (
        ("second dot in name", names.second_dot, f"{_many(names.second_dot, 'file')}"),
        ("no sample's", names.hidden, f"{_many(names.hidden, 'file')}, hidden or without an extension"),
        ("file twice", names.repeated, f"{names.repeated:,} times in one sample; the first counts"),
        ("key twice in a shard", names.apart, f"{names.apart:,}, such as {_place(names.apart_example)}"),
        ("key in two shards", names.across, f"{across}; does no harm in training"),
    )
    rows += [_row(label, text) for label, count, text in counts if count]
    return Part(name="samples", title="Samples and their files", rows=tuple(rows))


def _bad(found: Findings) -> Part:
    sampled = found.sampled
    interval = f"; of all, by 95% interval, {100 * sampled.low:.2g}–{100 * sampled.high:.2g}%"
    every = _all_decoded(found)
    share = _percent(sampled.bad, sampled.tried)
    rows = [
        _row(
            "decoded",
            f"all {sampled.tried:,} samples" if every else f"{sampled.tried:,} samples, spread evenly",
        ),
        _row("bad", f"{sampled.bad:,} ({share}){'' if every else interval}"),
        _row("training stops", f"beyond {100 * found.max_bad:g}% (data.max_bad)"),
    ]
    for one in sampled.causes[:10]:
        where = "; ".join(map(_place, one.first[:_PLACES]))
        rows.append(_row(f"{one.count:,} ×", plain(one.cause), f"in {where}"))
    return Part(name="bad", title="Samples that cannot be used", rows=tuple(rows))


def _captions(found: Findings) -> Part:
    captions = found.captions
    rows = [
        _row("read", f"{captions.read:,} captions" + ("" if _all_read(found) else ", a sample of all")),
        _row("tokens", f"median {captions.median:,.0f}, longest {_longest(captions.longest)}"),
        _row(f"over {found.context_length}", f"{_of(captions.cut, captions.read)} are cut"),
        _row("empty", f"{captions.empty:,}"),
        _row("repeated", f"{_of(captions.repeated, captions.read)}, as read"),
    ]
    if captions.longest_at and captions.cut:
        rows.insert(2, _row("the longest", _place(captions.longest_at)))
    if captions.frequent:
        rows.append(
            _row("most frequent", *(f"{count:,} × {plain(text, 100)}" for text, count in captions.frequent))
        )
    return Part(name="captions", title="Captions", rows=tuple(rows), charts=(captions.tokens,))


def _all_decoded(found: Findings) -> bool:
    return found.shards.samples_known and found.sampled.tried >= found.shards.samples


def _all_read(found: Findings) -> bool:
    read = found.captions.read + found.captions.empty
    return found.shards.samples_known and read >= found.shards.samples


def _longest(count: int) -> str:
    return f"{count:,}" if count < 1024 else "1,024 or more"


def _pictures(found: Findings) -> Part:
    pictures = found.pictures
    formats = ", ".join(f"{plain(kind, 20)} {count:,}" for kind, count in pictures.formats.items())
    misnamed = ", ".join(f"{plain(what, 40)} ({count:,})" for what, count in pictures.misnamed.items())
    marks = ", ".join(f"{mark} {_percent(count, pictures.read)}" for mark, count in pictures.marks.items())
    rows = [
        _row("decoded", f"{pictures.read:,}, median file {size_of(pictures.median_bytes)}"),
        _row("formats", formats or "none"),
        _row("misnamed", misnamed or "none"),
        _row(
            f"under {found.image_size} pixels", f"{_of(pictures.small, pictures.read)} by their shorter side"
        ),
        _row("widest", f"{pictures.widest:.3g} : 1  {_place(pictures.widest_at)}"),
        _row("tallest", f"1 : {pictures.tallest:.3g}  {_place(pictures.tallest_at)}"),
        _row("special", marks or "none is grey, CMYK, transparent, of 16 bits or turned"),
        _row("same file", *_duplicates(pictures.same_bytes)),
        _row("look alike", *_duplicates(pictures.same_look)),
    ]
    return Part(name="pictures", title="Pictures", rows=tuple(rows), charts=(pictures.width, pictures.height))


def _duplicates(found: Duplicates) -> Sequence[str]:
    if not found.groups:
        return ["none among those decoded"]
    shown = ["; ".join(map(_place, group)) for group in found.shown[:3]]
    return [f"{found.pictures:,} pictures in {_many(found.groups, 'group')}, such as", *shown]


def _speed(found: Findings) -> Part:
    speed = found.speed
    needed = ", ".join(f"{rate:,}/s: {speed.workers_for(rate)}" for rate in _RATES)
    rows = [
        _row(
            "one core makes",
            f"{speed.per_core:,.0f} samples/s at {found.image_size} pixels: {speed.make:.2f} ms for the picture, "
            f"{speed.text:.2f} ms for the caption",
        ),
        _row(
            "one reader gets",
            f"{speed.read:,.0f} samples/s, {size_of(speed.read_bytes)}/s"
            + (", over the network, without a copy on disk" if speed.remote else ""),
        ),
        _row(
            f"for {speed.rate:,.0f}/s",
            f"{_many(speed.workers, 'worker')} a GPU (data.workers; --rate sets the rate)",
        ),
        _row("for other rates", needed),
        _row("this machine", f"{speed.cores} cores: at most {speed.cores * speed.per_core:,.0f} samples/s"),
        _row(
            "what a GPU takes",
            "Training open_clip's LAION-400M models, an A100 took 773 samples/s for ViT-B/32, 332 for ViT-B/16 and "
            "70 for ViT-L/14. The metrics of a run tell yours.",
        ),
    ]
    return Part(name="speed", title="Speed", rows=tuple(rows))

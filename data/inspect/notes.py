"""What a user should mend or know first, from the findings."""

from collections.abc import Iterator
from dataclasses import dataclass

from clipkit.image_traits import TraitCounts
from data.inspect.findings import Findings
from data.inspect.wording import many, name_of, of_all, percent, place_of, plain, repeated_of

__all__ = ["Note", "notes"]

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
        yield Note(text=f"training refuses this list of shards: {plain(refusal, 300)}", grave=True)
    if shards.broken:
        yield Note(
            text=f"{len(shards.broken):,} of {many(shards.looked_into, 'shard')} looked into cannot be read; "
            "training refuses them: fetch them again or leave them out",
            grave=True,
        )
        if truncated := sum(one.truncated for one in shards.broken):
            yield Note(
                text=f"{many(truncated, 'shard')} truncated: data.truncated=use trains on the intact part",
                grave=True,
            )
    if shards.suspicious > len(shards.broken):
        yield Note(
            text=f"{many(shards.suspicious, 'shard')} not ending as a tar does: likely cut short",
            grave=True,
        )
    if shards.missing_count:
        yield Note(
            text=f"missing {many(shards.missing_count, 'shard number')}: {', '.join(shards.missing[:6])}"
        )
    if shards.empty:
        yield Note(
            text=f"{many(len(shards.empty), 'shard')} without a pair, among them {name_of(shards.empty[0])}"
        )
    if names.apart:
        yield Note(
            text=f"{many(names.apart, 'key')} coming back later in the shard ({place_of(names.apart_example)}): "
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
            text=f"{many(names.second_dot, 'file')} with a second dot in the name; all behind the first dot is "
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
            yield Note(text=plain(unknown, 1000), grave=True)
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
        yield Note(text=f"data.captions: {plain(unknown, 1000)}")
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
            text=f"{held_out.trained_on:,} of {many(held_out.read, 'picture')} of the split test are the same "
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
            text=f"{speed.rate:,.0f} samples/s need {many(speed.workers, 'worker')}; "
            f"this machine has {many(speed.cores, 'core')}"
        )

"""From what was seen of shards and samples to the values that are told."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from data.index import IMAGE_EXTENSIONS
from data.inspect.findings import BadCause, Sampled, Speed, wilson
from data.inspect.look import Look
from data.inspect.one_sample import Trial
from data.inspect.shard_findings import Broken, Names, Place, ShardsFound, Stated
from data.inspect.shard_list import ShardList

__all__ = ["bad_samples", "key_pattern", "names_of", "shards_of", "speed_of"]

_MOST_PATTERNS = 8
_MOST_EXTENSIONS = 200
_RUN = 12  # of digits or letters that are written out in a pattern
_FIRST_PLACES = 3
_MOST_CAUSES = 20
_MOST_LISTED = 50  # shards
_PART = re.compile(r"(?P<hex>(?<![^\W_])[0-9a-f]{16,}(?![^\W_]))|[0-9]+|[^\W\d_]+")  # of a key


def shards_of(
    listed: ShardList, looks: Sequence[Look], counts: npt.NDArray[np.int64], ends: tuple[int, int]
) -> ShardsFound:
    """The shards; samples that nobody counted are taken to be as large as the others."""
    sound = [look for look in looks if not look.cause]
    broken = {look.number for look in looks if look.cause}
    known = np.delete(counts, sorted(broken))
    known = known[known >= 0]
    unknown = np.flatnonzero(counts < 0)
    sizes = np.array([max(0, file.size) for file in listed.files], dtype=np.int64)
    seen, within = sum(len(look.rows) for look in sound), sum(max(0, look.bytes_seen) for look in sound)
    total = int(known.sum()) + (round(float(sizes[unknown].sum()) * seen / within) if within else 0)
    return ShardsFound(
        count=len(counts),
        bytes=int(sizes.sum()),
        looked_into=len(looks),
        beginnings=sum(look.beginning is not None for look in looks),
        ends_checked=ends[0],
        suspicious=ends[1],
        missing=listed.missing[:_MOST_LISTED],
        missing_count=listed.missing_count,
        refused=listed.refused,
        broken=tuple(
            Broken(
                shard=look.file.shown,
                cause=look.cause.removeprefix(f"shard {look.file.shown}").lstrip(": "),
                truncated=look.truncated,
            )
            for look in looks
            if look.cause
        )[:_MOST_LISTED],
        empty=tuple(look.file.shown for look in sound if not len(look.rows))[:_MOST_LISTED],
        least=int(known.min()) if len(known) else 0,
        median=float(np.median(known)) if len(known) else 0.0,
        greatest=int(known.max()) if len(known) else 0,
        samples=total,
        samples_known=len(unknown) == 0,
        counted=len(counts) - len(unknown),
        stated=_stated(sound),
    )


def _stated(looks: Sequence[Look]) -> Stated:
    """What ``_stats.json`` says of shards that were seen whole, against the samples with a picture in them."""
    both = [
        (look.file.shown, look.stated, look.groups - look.without_picture)
        for look in looks
        if look.stated is not None and look.beginning is None
    ]
    return Stated(
        shards=len(both),
        stated=sum(stated for _, stated, _ in both),
        found=sum(found for _, _, found in both),
        differ=tuple(one for one in both if one[1] != one[2])[:_MOST_LISTED],
    )


def names_of(looks: Sequence[Look]) -> Names:
    """Keys and members of the shards looked into."""
    extensions: Counter[str] = Counter()
    upper: Counter[str] = Counter()
    repeated: Counter[str] = Counter()
    for look in looks:
        extensions.update(look.names.extensions)
        upper.update(look.names.upper_case)
        repeated.update(look.names.repeated)
    known = {*IMAGE_EXTENSIONS, "txt", "json", "cls"}
    across, example = _across(looks)
    return Names(
        groups=sum(look.groups for look in looks),
        patterns=_patterns([key for look in looks for key in look.keys]),
        extensions=dict(extensions.most_common(_MOST_EXTENSIONS)),
        upper_case=dict(upper.most_common(_MOST_EXTENSIONS)),
        second_dot=sum(
            count for name, count in extensions.items() if "." in name and name.rpartition(".")[2] in known
        ),
        hidden=sum(look.names.hidden for look in looks),
        without_picture=sum(look.without_picture for look in looks),
        without_caption=sum(look.without_caption for look in looks),
        apart=sum(look.apart for look in looks),
        apart_example=next((look.apart_example for look in looks if look.apart_example), None),
        repeated=dict(repeated.most_common(_MOST_EXTENSIONS)),
        repeated_at=tuple(
            Place(shard=look.file.shown, key=key) for look in looks for key in look.names.repeated_keys
        )[:_FIRST_PLACES],
        across=across,
        across_example=example,
    )


def _patterns(keys: Sequence[str]) -> dict[str, int]:
    exact = Counter(map(key_pattern, keys))
    if len(exact) > _MOST_PATTERNS:  # words in keys: they are not told apart
        exact = Counter(key_pattern(key, words=False) for key in keys)
    return dict(exact.most_common(_MOST_PATTERNS))


def key_pattern(key: str, *, words: bool = True) -> str:
    """The form of a key: each digit as #, long runs by their length; without ``words`` letters as ``abc``."""

    def form(match: re.Match[str]) -> str:
        part = match[0]
        if part.isdecimal():
            long = f"#×{len(part)}" if words else "#…"
            return "#" * len(part) if len(part) <= _RUN and words else long
        if match["hex"]:
            return f"hex×{len(part)}"
        return part if words else "abc"

    return _PART.sub(form, key)


def _across(looks: Sequence[Look]) -> tuple[int, str]:
    """How many keys are in more than one shard, and one of them."""
    if not looks:
        return 0, ""
    values, counts = np.unique(np.concatenate([look.key_hashes for look in looks]), return_counts=True)
    twice = values[counts > 1]
    some = {key for look in looks for key in look.keys}
    repeated = set(twice.tolist())
    example = next((key for key in sorted(some) if hash(key.encode("utf-8", "replace")) in repeated), "")
    return len(twice), example


def bad_samples(tried: int, bad: Sequence[Trial]) -> Sampled:
    """Bad samples by cause; causes that differ by numbers only are one."""
    by_cause: defaultdict[str, list[Trial]] = defaultdict(list)
    for trial in bad:
        by_cause[re.sub(r"[0-9]+", "#", trial.cause)].append(trial)
    causes = [
        BadCause(
            cause=trials[0].cause,
            count=len(trials),
            first=tuple(trial.place for trial in trials[:_FIRST_PLACES]),
        )
        for trials in sorted(by_cause.values(), key=len, reverse=True)
    ]
    low, high = wilson(len(bad), tried)
    return Sampled(tried=tried, bad=len(bad), low=low, high=high, causes=tuple(causes[:_MOST_CAUSES]))


def speed_of(good: Sequence[Trial], *, read: float, read_bytes: float, remote: bool, rate: float) -> Speed:
    """How fast one core makes samples, from the time that each good sample took; there is one at least.

    Args:
        good: samples.
        read: samples a second that one reader got.
        read_bytes: bytes a second of these.
        remote: whether they came from a store.
        rate: samples a second that one GPU takes.
    """
    make, text = (sum(getattr(trial, name) for trial in good) / len(good) for name in ("make", "text"))
    speed = Speed(
        per_core=1 / max(1e-9, make + text),
        make=1000 * make,
        text=1000 * text,
        read=read,
        read_bytes=read_bytes,
        remote=remote,
        rate=rate,
        workers=0,
        cores=len(os.sched_getaffinity(0)),
    )
    return replace(speed, workers=speed.workers_for(rate))

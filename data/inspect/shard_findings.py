"""What an inspection finds of the shards themselves and of how their members are named, as plain values."""

from dataclasses import dataclass

__all__ = ["Broken", "Names", "Place", "ShardsFound", "Stated"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a sample is."""

    shard: str
    key: str


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A shard that cannot be read; ``truncated`` says whether a part of it is intact."""

    shard: str
    cause: str
    truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What ``_stats.json`` files say of the shards looked into, against what is there.

    Attributes:
        shards: how many have such a file.
        stated: samples that these say.
        found: samples with a picture that these shards hold.
        differ: the first shards where that is not the same, with both numbers.
    """

    shards: int
    stated: int
    found: int
    differ: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class ShardsFound:
    """The shards.

    Attributes:
        count: how many there are.
        bytes: of those whose size is known.
        looked_into: how many were opened.
        beginnings: of how many of these only the first samples were seen.
        ends_checked: of how many the first and last bytes were looked at.
        suspicious: how many of these do not begin or end as a tar does.
        missing: the numbers that lack between the first and the last one, as ranges.
        missing_count: how many shards these are; more than ``missing`` shows.
        refused: what a training would say of the list itself.
        broken: those among the opened ones that cannot be read.
        empty: shards without a sample that counts, among the opened sound ones.
        least, median, greatest: samples of a shard, among those that are known and sound.
        samples: that count, in all shards.
        samples_known: whether that was counted (or stated by ``_stats.json``) for every shard, not extrapolated.
        counted: shards whose samples are known.
        stated: what the ``_stats.json`` files say.
    """

    count: int
    bytes: int
    looked_into: int
    beginnings: int
    ends_checked: int
    suspicious: int
    missing: tuple[str, ...]
    missing_count: int
    refused: tuple[str, ...]
    broken: tuple[Broken, ...]
    empty: tuple[str, ...]
    least: int
    median: float
    greatest: int
    samples: int
    samples_known: bool
    counted: int
    stated: Stated


@dataclass(frozen=True, kw_only=True)
class Names:
    """Keys and members of the shards looked into.

    Attributes:
        groups: samples, whether they count or not.
        patterns: forms of keys and how many of those looked at have each; # is a digit.
        extensions: members by extension, the most frequent first.
        upper_case: extensions written in capitals, of local shards.
        second_dot: members whose file name has a dot in the key, so that their extension is not known.
        hidden: members that belong to no sample, as they are hidden or have no extension.
        without_picture: samples that have a caption but no picture.
        without_caption: samples that have a picture but no caption.
        apart: keys that come back later in their shard: files of one sample do not lie together.
        apart_example: one of them.
        repeated: members whose sample already has one of that kind ("picture", or the extension), by kind; training
            uses the first one.
        repeated_at: some of these samples.
        across: keys that are in more than one shard.
        across_example: one of them.
    """

    groups: int
    patterns: dict[str, int]
    extensions: dict[str, int]
    upper_case: dict[str, int]
    second_dot: int
    hidden: int
    without_picture: int
    without_caption: int
    apart: int
    apart_example: Place | None
    repeated: dict[str, int]
    repeated_at: tuple[Place, ...]
    across: int
    across_example: str

"""Refuses names of json fields that no sample has, before a training finds nothing but bad samples.

A field that is rare is none of these: one sample that has it is enough. So as a rule a single sample is read; only
where the first have nothing, more are, of several shards.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from clipkit.errors import DataError
from data.captions import TEXT, CaptionRule
from data.index import CAPTION, META
from data.json_fields import field_hint, leaf_fields, listed, value_at
from data.open_shard import OpenShard, meta_of, text_of
from data.selection import Selection
from data.shard_file import ShardFile

if TYPE_CHECKING:
    from data.remote.shard_cache import ShardCache

__all__ = ["no_caption", "note_texts", "refuse_unknown_caption", "refuse_unknown_fields"]

_SHARDS = 8
_FETCHED = 2  # besides the first, where each may take minutes to fetch
_SAMPLES, _REQUESTED = 1000, 32  # of each shard; where each is a request over the network


def refuse_unknown_caption(
    first: OpenShard, shards: Sequence[ShardFile], selection: Selection, cache: "ShardCache | None"
) -> None:
    """Do nothing if any sample has a caption where the selection says that captions are.

    Args:
        first: of the shards, opened.
        shards: all.
        selection: which samples count.
        cache: where remote shards are kept.

    Raises:
        DataError: none of those looked at, spread over all shards, has one.
    """
    if (
        "caption" in selection.need and selection.captions.choice != "all"
    ):  # samples without one count, as bad
        most = _FETCHED if any(one.is_remote for one in shards) else _SHARDS - 1
        others = _opened(shards[1:], selection, cache, most=most)
        _refuse_caption(chain([first], others), selection.captions, cache)


def refuse_unknown_fields(
    shards: Sequence[ShardFile], selection: Selection, cache: "ShardCache | None"
) -> None:
    """Of shards that give no sample: say so if that is as filters or captions name a field that none has.

    Raises:
        DataError: that is so.
    """
    by_json = "caption" in selection.need and TEXT not in selection.captions.fields
    if not (selection.reads_json or by_json):
        return
    plain = Selection(need=selection.need)
    looked = 0
    known: Counter[str] = Counter()
    missing = {one.name for one in selection.filters}
    for opened in _opened(shards, plain, cache):
        for _, meta in _contents(opened, cache):
            looked += 1
            known.update(name for name, _ in leaf_fields(meta))
            missing = {name for name in missing if value_at(meta, name) is None}
    if looked and missing:
        name = min(missing)
        raise DataError(
            f"data.filters names the json field {name!r}, which no sample of {looked:,} looked at has: "
            f"{field_hint(name, known)}"
        )
    if "caption" in selection.need:
        _refuse_caption(_opened(shards, plain, cache), selection.captions, cache)


def _refuse_caption(opened: Iterable[OpenShard], rule: CaptionRule, cache: "ShardCache | None") -> None:
    known: dict[str, bool] = {}
    looked = files = 0
    for one in opened:
        for text, meta in _contents(one, cache):
            if _may_have_caption(rule, text, meta):
                return
            looked, files = looked + 1, files + (text is not None)
            note_texts(known, meta)
    if looked:
        raise DataError(no_caption(rule, looked, files, known))


def _opened(
    shards: Sequence[ShardFile], selection: Selection, cache: "ShardCache | None", *, most: int = _SHARDS
) -> Iterator[OpenShard]:
    """A few of them, spread over all, as other sources may have other fields."""
    most = min(most, len(shards))
    for number in range(most):
        yield OpenShard(shards[number * len(shards) // most], selection, cache)


def _contents(opened: OpenShard, cache: "ShardCache | None") -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Caption file and json of a shard's first samples that count and can be read."""
    most = _REQUESTED if opened.file.is_remote and cache is None else _SAMPLES
    for row in opened.chosen.rows[:most].tolist():
        try:
            text, meta = opened.read(row, (CAPTION, META))
            content = text_of(text), meta_of(meta)
        except DataError:  # a bad sample, which is told of in training
            continue
        yield content


def _may_have_caption(rule: CaptionRule, text: str | None, meta: dict[str, Any]) -> bool:
    """Whether there is one; an empty caption file is a bad sample, but no wrong name."""
    return (TEXT in rule.fields and text is not None) or any(rule.by_field(text, meta))


def note_texts(known: dict[str, bool], meta: dict[str, Any]) -> None:
    """Add a json's fields to those known, with whether any sample has a text there."""
    for name, value in leaf_fields(meta):
        several = value if isinstance(value, list) else [value]
        known[name] = known.get(name, False) or any(isinstance(one, str) for one in several)


def no_caption(rule: CaptionRule, looked: int, files: int, known: dict[str, bool]) -> str:
    """The line that says which field there is not, and where captions may be.

    Args:
        rule: where they were looked for.
        looked: samples without one there.
        files: how many of these have a caption file.
        known: the fields of their json, by ``note_texts``.
    """
    names = [name for name in rule.fields if name != TEXT] or ["caption"]
    none = f"no sample of {looked:,} looked at has"
    texts = [name for name, has_text in known.items() if has_text]
    if present := [name for name in names if name in known]:
        others = listed(name for name in texts if name not in present)
        where = f"; texts are in: {others}" if others else ""
        return (
            f"{none} a text in the json field {present[0]!r}, where data.captions looks for captions{where}"
        )
    if TEXT in rule.fields:
        told = f"{none} a caption file (.txt) or the json field {names[0]!r}"
    else:
        told = f"data.captions names the json field {names[0]!r}, which {none}"
    instead = f"; {files:,} of them with a caption file: data.captions=txt takes it" if files else ""
    return f"{told}: {field_hint(names[0], texts or known)}{instead}"

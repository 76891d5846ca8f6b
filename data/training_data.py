"""Open the data of a training run, a teacher's stored features, and what ``python -m data pack`` recorded."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import msgspec

from clipkit.config import DataConfig, DistillConfig, PixelsConfig
from clipkit.errors import CheckpointError, ConfigError, DataError
from clipkit.files import CountProgress
from clipkit.model import Preprocess
from clipkit.samples import Color, TruncatedError, color_of, format_pixel_range, parse_pixel_range
from clipkit.samples.remote import is_remote, read_text, shard_cache
from data.captions import DRAW_CAPTIONS, TEXT, CaptionRule, PairFields
from data.corpora.builtin import BUILTIN
from data.scores.table import parse_scored_filters
from data.selection import Selection
from data.shards.manifest import (
    Manifest,
    check_drawn_captions,
    make_manifest,
    reject_unknown_pair_fields,
)
from data.shards.samples import Shards, find_shards
from data.shards.teacher import StoredFeatures

_CARD_BYTES = 1 << 20


def open_training_data(
    settings: DataConfig,
    recorded: Path | None,
    *,
    same_field: str = "",
    rank0: bool,
    resumed: bool,
    broadcast: Callable[[bytes], bytes],
) -> Shards:
    """Open the shards of a training run; must be called on all ranks.

    Args:
        settings: sources and selection of samples.
        recorded: file in the run folder where rank 0 stores the manifest; None to store and compare nothing.
        same_field: the setting ``loss.same_field``.
        rank0: whether this is rank 0, which reads the indexes of the shards.
        resumed: whether the run has a checkpoint; the data must then equal the recorded data.
        broadcast: returns the bytes of rank 0 on every rank.
    """
    filters, scores = parse_scored_filters(settings.filters, settings.scores)
    selection = Selection(
        filters=filters,
        scores=scores,
        captions=CaptionRule(
            fields=settings.captions,
            choice=settings.caption_choice,
            weights=settings.caption_weights,
            templates=settings.caption_templates,
            prefix=settings.caption_prefix,
            split=settings.caption_split,
            count=settings.caption_count,
            negatives=settings.negatives,
        ),
        truncated=settings.truncated,
        fraction=settings.fraction,
        image=settings.image.lower(),
        fields=PairFields(
            same=same_field,
            weight=settings.weight,
            image=tuple(settings.parse_fields("image"))[1:],
            text=tuple(settings.parse_fields("text"))[1:],
        ),
        balance=settings.balance_by[0],
    )
    cache = shard_cache(settings.sources, settings.cache_gb)
    content = b""
    notes: list[str] = []
    if rank0:
        sources = [find_shards(source) for source in settings.sources]
        with CountProgress("counting shards", total=sum(map(len, sources)), shown=True) as progress:
            try:
                manifest = make_manifest(sources, selection, cache=cache, progress=progress.show)
            except TruncatedError as error:
                raise DataError(f"{error}, or set data.truncated=use to train on its intact part") from error
        reject_unknown_pair_fields([shard for source in sources for shard in source], selection, cache)
        if recorded is not None and not resumed:
            notes = check_drawn_captions(sources, selection, cache)
        earlier = None if recorded is None else Manifest.load(recorded)
        if recorded is not None and earlier is not None and resumed:
            changes = manifest.changes_since(earlier)
            if changes:
                raise other_data(recorded.parent, "; ".join(changes))
            unknown = manifest.not_compared(earlier)
            if unknown:
                print(
                    f"note: {unknown:,} of {len(manifest):,} shards have a different or no modification time, "
                    "inode or etag, and no recorded digest of their content: only keys and sizes of their "
                    "samples were compared with the recorded data",
                    file=sys.stderr,
                )
            manifest = manifest.copy_counts(earlier)
        if recorded is not None:
            manifest.save(recorded)
        content = manifest.to_bytes()
    shared = Manifest.from_bytes(broadcast(content))
    assert shared is not None
    return Shards(shared, selection, cache=cache, notes=notes)


def teacher_features(settings: DistillConfig, shards: Shards, *, rank0: bool) -> StoredFeatures | None:
    """Open a teacher's stored features, if any are configured; rank 0 checks that samples have features."""
    if not settings.features:
        return None
    features = StoredFeatures(Path(settings.features), Path(settings.text_features))
    if not (settings.scale or features.scale):
        raise ConfigError(
            f"distill.scale = 0: {settings.features} was encoded by an earlier version, which did not store the "
            "teacher's exp(t): set distill.scale to it, such as 100 for OpenAI's CLIPs, or encode again"
        )
    if rank0:
        features.check(shards)
    return features


@dataclass(frozen=True, kw_only=True)
class Packed:
    """How ``python -m data pack`` or ``download`` processed the images of a training set, if all sources agree.

    Attributes:
        background: color behind transparent images.
        upright: whether EXIF orientations were applied.
        notes: differences between sources and captions that are not used, with the settings that change this.
    """

    background: Color | None = None
    upright: bool = False
    notes: tuple[str, ...] = ()


def packed_images(
    settings: DataConfig,
    pixels: PixelsConfig,
    manifest: Manifest,
    *,
    rank0: bool,
    broadcast: Callable[[bytes], bytes],
) -> Packed:
    """Read how ``data pack`` or ``download`` stored the images. Must be called on all ranks.

    Built-in datasets are skipped.
    """
    packed = Packed()
    if rank0:
        folders: dict[str, None] = {}  # in order, each once
        ends = accumulate(manifest.sources)
        for source, count, end in zip(settings.sources, manifest.sources, ends, strict=True):
            if source in BUILTIN:
                continue
            for shard in map(manifest.urls.__getitem__, range(end - count, end)):
                is_stream = shard.startswith("pipe:") or "?" in shard
                folder = shard.rpartition("/")[0]
                folders["" if is_stream else folder] = None
        packed = _summarize_records([_read_record(folder) for folder in folders], settings, pixels)
    return msgspec.json.decode(broadcast(msgspec.json.encode(packed)), type=Packed)


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """What ``data pack`` or ``download`` recorded about its images; the defaults are those of other shards."""

    background: str | None = None
    keep_orientation: bool = True
    captions_per_image: tuple[int, int] = (1, 1)  # the fewest and the most


def _read_record(folder: str) -> _Record:
    dataset, _, split = folder.rpartition("/")
    paths = [f"{folder}/download.json"] if folder else []
    if split in ("train", "test"):
        paths.append(f"{dataset}/card.json")
    for path in paths:
        with suppress(OSError, DataError, msgspec.DecodeError):
            text = read_text(path, limit=_CARD_BYTES) if is_remote(path) else Path(path).read_bytes()
            if text:
                return msgspec.json.decode(text, type=_Record)
    return _Record()


def _summarize_records(records: Sequence[_Record], settings: DataConfig, pixels: PixelsConfig) -> Packed:
    backgrounds = {color_of(record.background) if record.background else None for record in records}
    uprights = {not record.keep_orientation for record in records}
    most_captions = max((record.captions_per_image[1] for record in records), default=1)
    notes = []
    if len(backgrounds) > 1 and not pixels.background:
        notes.append(
            "note: the sources of data.train were packed with different backgrounds: transparent images are used "
            "unchanged, with their hidden colors; pixels.background=white blends all of them onto white"
        )
    if len(uprights) > 1 and pixels.upright == "auto":
        notes.append(
            "note: some sources of data.train were packed upright and others not: the EXIF orientation of the "
            "others is not applied; pixels.upright=true applies it"
        )
    if most_captions > 1 and settings.captions == (TEXT,):
        notes.append(
            f"note: images of data.train have up to {most_captions} captions, and training uses only the first of "
            f"each; {DRAW_CAPTIONS} draws one"
        )
    return Packed(
        background=backgrounds.pop() if len(backgrounds) == 1 else None,
        upright=uprights == {True},
        notes=tuple(notes),
    )


def trained_preprocess(preprocess: Preprocess, settings: PixelsConfig, packed: Packed) -> Preprocess:
    """Return the preprocessing that a new run trains with and records.

    Args:
        preprocess: of the initial weights.
        settings: values given here take precedence.
        packed: applied otherwise, so that other images are processed like the training images.
    """
    chosen = preprocess.replace_decoding(
        background=settings.background or None,
        upright=settings.upright if isinstance(settings.upright, bool) else None,
        pixel_range=None if settings.range == "auto" else parse_pixel_range(settings.range),
    )
    chosen = replace(chosen, mean=settings.mean or chosen.mean, std=settings.std or chosen.std)
    if not settings.background and packed.background is not None:
        chosen = replace(chosen, background=packed.background)
    if settings.upright == "auto" and packed.upright:
        chosen = replace(chosen, upright=True)
    return chosen


def resumed_preprocess(preprocess: Preprocess, settings: PixelsConfig) -> Preprocess:
    """Return the preprocessing of a resumed run, to which a pixel range may be added."""
    pixel_range = parse_pixel_range(settings.range, setting="pixels.range")
    if pixel_range in ("auto", preprocess.pixel_range):
        return preprocess
    if preprocess.pixel_range != "auto":
        raise CheckpointError(
            f"pixels.range = {format_pixel_range(pixel_range)}, but the run was trained with "
            f"{format_pixel_range(preprocess.pixel_range)}: restore it, or set out=… for a new run"
        )
    return preprocess.replace_decoding(pixel_range=pixel_range)


def other_data(run: Path, difference: str) -> CheckpointError:
    """Return the error for resuming a run with other data."""
    return CheckpointError(
        f"{run} was trained on other data: {difference}; restore the data, or set out=… for a new run"
    )


def other_teacher(run: Path, settings: DistillConfig) -> CheckpointError:
    """Return the error for resuming a run with another teacher."""
    setting = "teacher" if settings.teacher else "features"
    source = settings.teacher or settings.features
    return CheckpointError(
        f"{run} was trained with another teacher: distill.{setting} = {source!r} has changed since; restore it, or "
        "set out=… for a new run"
    )

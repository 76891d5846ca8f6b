"""What a training reads: counted once, the same on all ranks, and as it was when the run began."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from clipkit.config import DataConfig, DistillConfig
from clipkit.count_progress import CountProgress
from clipkit.errors import CheckpointError, ConfigError, DataError
from clipkit.image_traits import Color, color_of
from clipkit.preprocess import Preprocess
from clipkit.run_folder import hint_of_moved_data, manifest_file
from clipkit.tar import TruncatedError
from data.augment import Augmentation
from data.cache import shard_cache
from data.captions import CaptionRule
from data.corpora.builtin import BUILTIN
from data.manifest import Manifest, make_manifest
from data.remote.shard_cache import ShardCache
from data.selection import Filter, Selection
from data.shard_file import is_remote
from data.shards import Shards
from data.sources import find_shards
from data.stored_features import StoredFeatures

__all__ = [
    "Packed", "augmentation_of", "open_training_data", "other_data", "other_teacher", "packed_images",
    "teacher_features", "trained_preprocess",
]  # fmt: skip

_CARD_BYTES = 1 << 20
_OPEN_CLIP = (None, False)  # no background, as it lies in the file


def open_training_data(
    settings: DataConfig, run: Path, *, chief: bool, begun: bool, share: Callable[[bytes], bytes]
) -> Shards:
    """The shards of a training; all ranks call this.

    Args:
        settings: which shards, and what of them counts.
        run: the run folder, which keeps what was counted.
        chief: whether this process counts.
        begun: whether the run has trained on them before.
        share: gives the chief's bytes on every rank.

    Raises:
        DataError: there are none, or they cannot be read.
        CheckpointError: the run was begun on other data.
    """
    selection = Selection(
        filters=tuple(map(Filter.of, settings.filters)),
        captions=CaptionRule(
            fields=settings.captions,
            choice=settings.caption_choice,
            weights=settings.caption_weights,
            templates=settings.caption_templates,
            prefix=settings.caption_prefix,
        ),
        truncated=settings.truncated,
    )
    cache = shard_cache(settings.sources, settings.cache_gb)
    content = b""
    if chief:
        content = _counted(settings, selection, cache, run, begun=begun).to_bytes()
    manifest = Manifest.from_bytes(share(content))
    assert manifest is not None
    return Shards(manifest, selection, cache=cache)


def _counted(
    settings: DataConfig, selection: Selection, cache: ShardCache | None, run: Path, *, begun: bool
) -> Manifest:
    with hint_of_moved_data(run):
        sources = [find_shards(source) for source in settings.sources]
    with CountProgress("counting shards", total=sum(map(len, sources)), shown=True) as progress:
        try:
            manifest = make_manifest(sources, selection, cache=cache, progress=progress.show)
        except TruncatedError as error:
            raise DataError(f"{error}, or set data.truncated=use to train on its intact part") from error
    earlier = Manifest.load(manifest_file(run))
    if earlier is not None and begun:
        if changes := manifest.changes_since(earlier):
            raise other_data(run, "; ".join(changes))
        if unknown := manifest.not_compared(earlier):
            print(
                f"note: {unknown:,} of {len(manifest):,} shards have another time, inode or etag than before, or "
                "none, and no digest of their content was recorded: only keys and sizes of their samples were "
                "compared with those that the run began with",
                file=sys.stderr,
            )
        manifest = manifest.with_counts_of(earlier)
    manifest.save(manifest_file(run))
    return manifest


def teacher_features(settings: DistillConfig, shards: Shards, *, chief: bool) -> StoredFeatures | None:
    """A teacher's stored features, if settings name any; the chief sees that all samples have some.

    Raises:
        DataError: some have none, or the files are no such features.
    """
    if not settings.features:
        return None
    features = StoredFeatures(Path(settings.features), Path(settings.text_features))
    if chief:
        features.check(shards)
    return features


@dataclass(frozen=True, kw_only=True)
class Packed:
    """What ``python -m data pack`` did to the images of a training set, as far as all sources agree.

    Attributes:
        background: color that transparent images were laid on.
        upright: whether images were turned as an EXIF orientation says.
        notes: what the sources do not agree on, and the setting that decides.
    """

    background: Color | None = None
    upright: bool = False
    notes: tuple[str, ...] = ()


def packed_images(
    settings: DataConfig, manifest: Manifest, *, chief: bool, share: Callable[[bytes], bytes]
) -> Packed:
    """What the cards of packed sets say of their images; built-in sets need nothing. All ranks call this.

    Args:
        settings: the sources.
        manifest: their shards.
        chief: whether this process reads the cards.
        share: gives the chief's bytes on every rank.
    """
    found: list[tuple[Color | None, bool]] = []
    if chief:
        ends = list(accumulate(manifest.sources))
        folders = {
            _packed_folder(manifest.urls[number]): None  # in order, each once
            for source, count, end in zip(settings.sources, manifest.sources, ends, strict=True)
            if source not in BUILTIN
            for number in range(end - count, end)
        }
        found = [_packed(folder) for folder in folders]
    stated = json.loads(share(json.dumps(found).encode()))
    backgrounds = {None if ground is None else (ground[0], ground[1], ground[2]) for ground, _ in stated}
    uprights = {upright for _, upright in stated}
    notes = []
    if len(backgrounds) > 1 and not settings.background:
        notes.append(
            "note: the sources of data.train were packed with different backgrounds: transparent images are used "
            "as they are, with their hidden colors; data.background=white lays all of them on white"
        )
    if len(uprights) > 1 and settings.upright == "auto":
        notes.append(
            "note: some sources of data.train were packed upright and others not: an EXIF orientation is not "
            "applied to the others; data.upright=true applies it"
        )
    return Packed(
        background=backgrounds.pop() if len(backgrounds) == 1 else None,
        upright=uprights.pop() if len(uprights) == 1 else False,
        notes=tuple(notes),
    )


def _packed_folder(shard: str) -> str:
    """The folder whose card describes a shard's images; "" where there is none."""
    folder, _, split = shard.rpartition("/")[0].rpartition("/")
    named = split in ("train", "test") and not shard.startswith("pipe:") and "?" not in shard
    return folder if named else ""


def _packed(folder: str) -> tuple[Color | None, bool]:
    """Background and orientation by the card of a packed set; as open_clip elsewhere."""
    if not folder:
        return _OPEN_CLIP
    try:
        text = _card(f"{folder}/card.json")
        card: Any = json.loads(text or "{}")
        if not isinstance(card, dict) or card.get("made_by") != "python -m data pack":
            return _OPEN_CLIP
        background = card.get("background")
        return color_of(str(background)) if background else None, card.get("keep_orientation") is False
    except (OSError, ValueError, RecursionError, ConfigError, DataError):  # no card, or none that says it
        return _OPEN_CLIP


def _card(url: str) -> str | None:
    if is_remote(url):
        from data.remote.store import read_text

        return read_text(url, limit=_CARD_BYTES)
    return Path(url).read_text(encoding="utf-8")


def trained_preprocess(preprocess: Preprocess, settings: DataConfig, packed: Packed) -> Preprocess:
    """The preprocessing that a new run trains with and records.

    Args:
        preprocess: of the weights that it begins with.
        settings: a background and an orientation that are set win.
        packed: what was done to the images already comes next: it is done to other images of the model, too.
    """
    chosen = preprocess.with_decoding(
        background=settings.background or None,
        upright=settings.upright if isinstance(settings.upright, bool) else None,
    )
    if not settings.background and packed.background is not None:
        chosen = replace(chosen, background=packed.background)
    if settings.upright == "auto" and packed.upright:
        chosen = replace(chosen, upright=True)
    return chosen


def augmentation_of(settings: DataConfig) -> Augmentation:
    """How pictures are varied."""
    return Augmentation(
        crop_scale=settings.crop_scale,
        flip=settings.flip,
        color_jitter=settings.color_jitter,
        grayscale=settings.grayscale,
        scaled_decode=settings.scaled_decode,
    )


def other_data(run: Path, what: str) -> CheckpointError:
    """The error of a run that is to go on with data it was not begun on."""
    return CheckpointError(
        f"{run} was trained on other data: {what}; bring the data back, or set out=… for a new run"
    )


def other_teacher(run: Path, settings: DistillConfig) -> CheckpointError:
    """The error of a run that is to go on with a teacher it was not begun with."""
    setting = "teacher" if settings.teacher else "features"
    source = settings.teacher or settings.features
    return CheckpointError(
        f"{run} was taught by another model: distill.{setting} = {source!r} has changed since; bring back what it "
        "was, or set out=… for a new run"
    )

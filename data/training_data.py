"""What a training reads: counted once, the same on all ranks, and as it was when the run began."""

import sys
from collections.abc import Callable
from pathlib import Path

from clipkit.config import DataConfig, DistillConfig
from clipkit.count_progress import CountProgress
from clipkit.errors import CheckpointError, DataError
from clipkit.run_folder import hint_of_moved_data, manifest_file
from clipkit.tar import TruncatedError
from data.augment import Augmentation
from data.cache import shard_cache
from data.captions import CaptionRule
from data.manifest import Manifest, make_manifest
from data.remote.shard_cache import ShardCache
from data.selection import Filter, Selection
from data.shards import Shards
from data.sources import find_shards
from data.stored_features import StoredFeatures

__all__ = ["augmentation_of", "open_training_data", "other_data", "other_teacher", "teacher_features"]


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

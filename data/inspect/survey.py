"""The course of an inspection: list the shards, look into some, read samples spread evenly over them, sum up."""

import time
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from clipkit.config import Config, DataConfig
from clipkit.errors import ConfigError, DataError
from clipkit.image_traits import Decoding
from clipkit.tokenizer import CONTEXT_LENGTH
from clipkit.urls import shown
from data.captions import TEXT
from data.inspect.caption_survey import CaptionSurvey
from data.inspect.course import Course, Progress
from data.inspect.field_survey import FieldSurvey
from data.inspect.findings import Findings, HeldOut, Thumbnail
from data.inspect.gallery import some_of_each_cause, thumbnail
from data.inspect.picture_survey import PictureSurvey
from data.inspect.shard_list import list_shards
from data.inspect.sheet import sheet_entry
from data.inspect.summary import bad_samples, names_of, shards_of
from data.inspect.trials import Trials
from data.selection import Filter

if TYPE_CHECKING:
    from data.remote.shard_cache import ShardCache

__all__ = ["inspect"]


def inspect(
    sources: Sequence[str],
    *,
    split: str = "train",
    samples: int = 2000,
    shards: int = 0,
    image_size: int = 224,
    decoding: Decoding | None = None,
    rate: float = 1000.0,
    captions: Sequence[str] = ("txt",),
    filters: Sequence[str] = (),
    batch_size: int = Config.batch_size,
    max_bad: float = DataConfig.max_bad,
    cache: "ShardCache | None" = None,
    progress: Progress | None = None,
) -> Findings:
    """Look into shards as a training would read them; what it would refuse is told, and the rest is looked at.

    Which shards and samples are read follows from their number alone, so a second look sees the same.

    Args:
        sources: as ``data.train`` takes them.
        split: of a dataset folder.
        samples: how many are decoded, spread evenly over the shards looked into.
        shards: how many are looked into at most, spread evenly over all; 0 takes 64, and 32 if they are remote.
        image_size: of the model, in pixels.
        decoding: what is done about transparency and orientation; None as open_clip.
        rate: samples a second that one GPU takes.
        captions: where they are, as ``data.captions`` names it.
        filters: conditions on the json, as ``data.filters`` has them; what they leave is counted, and nothing else
            depends on them.
        batch_size: pairs of a step over all GPUs.
        max_bad: the share of bad samples beyond which a training stops.
        cache: where copies of remote shards are kept; None reads parts of them over the network.
        progress: called with what is done, how much of it so far, how much of that failed, and how much there is.

    Raises:
        ConfigError: a number does not fit, or a filter is none.
        DataError: there are no shards, or the first of them hold no pair of picture and caption.
    """
    _check(samples=samples, shards=shards, image_size=image_size, rate=rate, batch_size=batch_size)
    began = time.monotonic()
    fields = FieldSurvey([Filter.of(one) for one in filters])
    course = Course(list_shards(sources, split=split), captions, cache)
    course.look(shards, progress)
    pictures, texts = PictureSurvey(image_size), CaptionSurvey(CONTEXT_LENGTH)
    trials = Trials(course, course.spread(samples), image_size, decoding)
    _read(trials, pictures, texts, fields, progress)
    return Findings(
        sources=tuple(map(shown, sources)),
        image_size=image_size,
        decoding=decoding or Decoding(),
        context_length=CONTEXT_LENGTH,
        max_bad=max_bad,
        batch_size=batch_size,
        shards=shards_of(course.listed, course.looks, course.counts, course.ends),
        names=names_of(course.looks),
        sampled=bad_samples(trials.tried, trials.bad),
        captions=replace(texts.found(), unknown=fields.unknown([one for one in captions if one != TEXT])),
        fields=fields.found(),
        filtered=fields.filtered(),
        pictures=pictures.found(),
        held_out=_held_out(sources, split, captions, pictures.digests(), samples, image_size),
        speed=trials.speed(rate),
        sheet=tuple(map(sheet_entry, trials.sheet)),
        bad_shown=_thumbnails(
            course, [(one.shard, one.row, one.cause) for one in some_of_each_cause(trials.bad)]
        ),
        same=tuple(_thumbnails(course, group) for group in pictures.same_shown()),
        alike=tuple(_thumbnails(course, group) for group in pictures.alike_shown()),
        seconds=time.monotonic() - began,
    )


def _read(
    trials: Trials,
    pictures: PictureSurvey,
    texts: CaptionSurvey,
    fields: FieldSurvey,
    progress: Progress | None,
) -> None:
    """Hand what samples hold to those who survey it."""
    for trial in trials.run(progress):
        texts.add(trial.caption, trial.place, trial.cause)
        fields.add(trial.meta)
        pictures.add(trial)
        trial.meta = None  # many of them would take much memory
    for more in trials.course.more_texts(trials.spots):
        texts.add(more.caption, more.place, more.cause)
        fields.add(more.meta)


def _held_out(
    sources: Sequence[str],
    split: str,
    captions: Sequence[str],
    trained_on: Set[bytes],
    samples: int,
    image_size: int,
) -> HeldOut | None:
    """The split test of folders that have one, beside pictures of the split train."""
    folders = [source for source in sources if split == "train" and (Path(source) / "test").is_dir()]
    if not folders:
        return None
    try:
        course = Course(list_shards(folders, split="test"), captions, None)
        course.look(0, None)
    except DataError:  # it is not what was asked for
        return None
    tried = Trials(course, course.spread(samples), image_size).run(None)
    digests = [trial.picture.digest for trial in tried if trial.picture is not None]
    return HeldOut(read=len(digests), trained_on=sum(digest in trained_on for digest in digests))


def _thumbnails(
    course: Course, samples: Sequence[tuple[int, int] | tuple[int, int, str]]
) -> tuple[Thumbnail, ...]:
    """Pictures of samples: number of the shard, row, and why it is bad if it is."""
    rule = course.selection.captions
    return tuple(
        thumbnail(course.shard(shard), row, rule, cause="".join(cause)) for shard, row, *cause in samples
    )


def _check(*, samples: int, shards: int, image_size: int, rate: float, batch_size: int) -> None:
    for name, value, least, most in (
        ("samples", samples, 1, 1_000_000), ("shards", shards, 0, 1_000_000), ("image_size", image_size, 1, 10_000),
        ("rate", rate, 1e-3, 1e9), ("batch_size", batch_size, 1, 1 << 30),
    ):  # fmt: skip
        if not least <= value <= most:
            raise ConfigError(f"{name} = {value} does not fit: {least:g} to {most:,.0f}")

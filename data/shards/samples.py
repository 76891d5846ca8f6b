"""The shards of a source to train on, and their used samples as one random-access list.

Sources that are no shards are packed into shards in the cache first.
"""

import tempfile
import textwrap
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

from clipkit.errors import DataError
from clipkit.files import CountProgress, counted, format_bytes
from clipkit.samples import (
    FolderSamples,
    MissingSplit,
    OpenShards,
    TruncatedError,
    find_source,
    has_captions,
    refuse_remote_table,
    stored_index,
)
from clipkit.samples.remote import ShardCache, ShardFile, index_folder, shard_cache
from data.captions import CaptionRule, Filter, json_members
from data.corpora.builtin import BUILTIN, built_in
from data.options import IndexOptions
from data.selection import SelectedShard, Selection
from data.shards.manifest import Manifest, make_manifest

_FETCHING = 4  # shards that one process downloads at a time


def find_shards(source: str, *, split: str = "train") -> list[ShardFile]:
    """Return the tars of a source in order; a built-in dataset is created on first use."""
    if source in BUILTIN and not Path(source).exists():
        source = str(built_in(source))
    try:
        files = find_source(source, split=split)
    except DataError as error:
        if source.isalnum() and "no such file" in str(error):
            raise DataError(f"{error}, nor a built-in dataset ({', '.join(sorted(BUILTIN))})") from error
        raise
    if files.format == "shards":
        return list(files.files)
    if files.format == "images" and not _is_labeled(files.folder):
        if files.folder is not None:
            FolderSamples(files.folder).check_no_caption_tables()
        raise DataError(
            f"{source} has images without captions: write the captions into .txt files of the same names, or paths "
            "and captions into a table, or move the images into a folder for each class"
        )
    from data.pack import (  # imports libraries that training on shards does not need
        has_split_column,
        pack_into_cache,
    )

    packed_split = "" if files.split == "train" else files.split
    if files.folder is not None:
        folder = pack_into_cache([files.folder], packed_split)
    elif files.files[0].is_remote:
        refuse_remote_table(files.files[0])
        folder = pack_into_cache(list(files.files), packed_split)
    else:
        folder = pack_into_cache([Path(file.url) for file in files.files], packed_split)
    # rows that state no split belong to every split; they are packed as train
    if not files.split and not has_split_column(folder):
        split = "train"
    try:
        return list(find_source(str(folder), split=split).files)
    except MissingSplit as error:
        raise MissingSplit(str(error).replace(str(folder), source)) from error


def _is_labeled(folder: Path | None) -> bool:
    """Whether the images of a folder have captions, or are in a subfolder for each class."""
    return folder is not None and (has_captions(folder) or bool(FolderSamples(folder).class_names))


def find_all_shards(sources: Iterable[str], *, split: str = "train") -> list[ShardFile]:
    """Return the tars of all sources in order."""
    return list(chain.from_iterable(find_shards(source, split=split) for source in sources))


class Sample(NamedTuple):
    """One sample, not decoded.

    ``fields`` are the texts and json fields that captions may need, see ``CaptionRule.parse``. ``caption_number``
    is the index of its caption if each is a sample.
    """

    shard: str
    key: str
    image: bytes
    fields: dict[str, Any]
    caption_number: int


class Shards(OpenShards[SelectedShard]):
    """Random access to the used samples of a list of tars.

    Thread-safe; a copy in another process opens its own files. Members that are not needed are not read and
    may be damaged.

    Attributes:
        counts: (S,) int64, used samples per shard.
        first_samples: number of the first sample of each source.
        notes: lines about the samples to print before a run.
    """

    def __init__(
        self,
        manifest: Manifest,
        selection: Selection,
        *,
        cache: ShardCache | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        assert manifest.selection == selection.identity
        super().__init__(manifest.counts.tolist())
        self.manifest = manifest
        self.selection = selection
        self.cache = cache
        self.counts = manifest.counts
        shards = list(accumulate(manifest.sources, initial=0))[:-1]
        self.first_samples = tuple(int(self.counts[:first].sum()) for first in shards)
        self.notes = notes
        self._plans: dict[tuple[str, ...], list[str]] = {}  # members to read, the image first

    @classmethod
    def of(
        cls,
        files: Sequence[ShardFile],
        *,
        captions: CaptionRule | None = None,
        cache: ShardCache | None = None,
    ) -> "Shards":
        """Open the pairs of image and caption of tars."""
        selection = Selection(captions=captions or CaptionRule())
        return cls(make_manifest([files], selection, cache=cache), selection, cache=cache)

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that change with the set of samples or its order."""
        return self.manifest.fingerprint

    def find_shard_samples(self, sample_id: int) -> range:
        """Return the samples of the shard of a sample."""
        shard, within = self._position(sample_id)
        first = sample_id - within
        return range(first, first + int(self.counts[shard]))

    def locate(self, sample_id: int) -> tuple[str, str]:
        """Return shard and key of a sample without reading it; the key is empty if it is unknown."""
        shard, within = self._position(sample_id)
        file = self.manifest.shard(shard)
        try:
            opened = self.open_shard(shard)
            return file.shown, opened.index.key(opened.row(within))
        except DataError:  # the shard is gone; its index may still exist
            index = stored_index(file, truncated=self.selection.truncated)
            if index is None or self.selection.reads_json:
                return file.shown, ""
            rows = self.selection.choose(index, lambda row: {}, shard=file.name).rows
            return file.shown, index.key(int(rows[within])) if within < len(rows) else ""

    def read(self, sample_id: int) -> Sample:
        """Read sample ``sample_id`` (0 ≤ sample_id < len)."""
        shard, within = self._position(sample_id)
        opened = self.open_shard(shard)
        row = opened.row(within)
        layout = opened.index.find_layout(row)
        names = layout[1]
        plan = self._plans.get(names)
        if plan is None:
            rule = self.selection.captions
            further = [*filter(None, [rule.negatives]), *self.selection.fields.names]
            plan = [self.selection.image, *rule.select_members(names), *json_members(further, names)]
            plan = [*dict.fromkeys(plan)]
            self._plans[names] = plan
        # only the image may be missing
        members: dict[str, Any] = dict(zip(plan, opened.read(row, plan, layout=layout), strict=True))
        image = members.pop(self.selection.image)
        return Sample(
            shard=opened.shown,
            key=opened.index.key(row),
            image=image or b"",
            fields=self.selection.captions.parse(members),
            caption_number=opened.caption_number(within),
        )

    def fetch_ahead(self, shards: Sequence[int]) -> None:
        """Download these shards in the background, in this order, instead of those of an earlier call."""
        if self.cache is not None:
            remote = [file for file in map(self.manifest.shard, shards) if file.is_remote]
            if remote:
                self.cache.prefetch(remote, threads=_FETCHING)

    def _new_shard(self, index: int) -> SelectedShard:
        return SelectedShard(self.manifest.shard(index), self.selection, self.cache)


def run_index(options: IndexOptions) -> int:
    """Run ``python -m data index``."""
    began = time.monotonic()
    folder = index_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):  # an unwritable cache would be ignored
        pass
    sources = [find_shards(source, split=options.split) for source in options.sources]
    cache = shard_cache(options.sources, options.cache_gb)
    with CountProgress("indexing shards", total=sum(map(len, sources)), shown=not options.quiet) as progress:
        selection = Selection(
            filters=tuple(map(Filter.of, options.filters)),
            captions=CaptionRule(fields=options.captions),
            truncated=options.truncated,
            image=options.image,
            balance=options.balance,
        )
        try:
            manifest = make_manifest(sources, selection, cache=cache, progress=progress.show, stats=False)
        except TruncatedError as error:
            raise DataError(f"{error}, or index its intact part with --truncated use") from error
    counts = manifest.counts
    size = format_bytes(int(manifest.sizes.clip(min=0).sum()))
    seconds = time.monotonic() - began
    print(f"{counted(len(manifest), 'shard')}, {int(counts.sum()):,} samples, {size}, {seconds:.1f} s")
    print(f"  per shard   {int(counts.min()):,} to {int(counts.max()):,} samples")
    for reason, count in manifest.dropped.items():
        print(textwrap.fill(f"left out    {count:,} {reason}", 79, initial_indent="  "))
    for name, count in manifest.truncated_shards():
        print(f"  truncated   {name}: {count:,} samples kept")
    print(f"  manifest    {manifest.fingerprint}")
    print(f"  stored in   {folder}")
    return 0

"""The used samples of many shards as one random-access list."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from clipkit.errors import DataError
from clipkit.samples import OpenShards, stored_index
from clipkit.samples.remote import ShardCache, ShardFile
from data.captions import CaptionRule, json_members
from data.selection import SelectedShard, Selection
from data.shards.manifest import Manifest, make_manifest

_FETCHING = 4  # shards that one process downloads at a time


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
    """

    def __init__(self, manifest: Manifest, selection: Selection, *, cache: ShardCache | None = None) -> None:
        assert manifest.selection == selection.identity
        super().__init__(manifest.counts.tolist())
        self.manifest = manifest
        self.selection = selection
        self.cache = cache
        self.counts = manifest.counts
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
            negatives = json_members([rule.negatives], names) if rule.negatives else []
            plan = [*dict.fromkeys([self.selection.image, *rule.members(names), *negatives])]
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

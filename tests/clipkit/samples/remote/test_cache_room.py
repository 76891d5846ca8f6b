"""Test that the size limit of the shard cache holds for any sequence of uses."""

import pickle
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from clipkit.samples.remote import cache as shard_cache
from clipkit.samples.remote.cache import ShardCache
from clipkit.samples.remote.store import ShardFile


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_size_limit_holds_for_any_sequence(draws: st.DataObject) -> None:
    sizes = draws.draw(st.lists(st.integers(0, 40), min_size=1, max_size=8))
    bound = draws.draw(st.integers(max(sizes), 100))
    shards = [
        ShardFile(url=f"http://x/{number}.tar", size=size if number % 3 else -1, version="")
        for number, size in enumerate(sizes)
    ]
    model: OrderedDict[int, int] = OrderedDict()  # in order of last use
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        cache = ShardCache(Path(folder), bound, in_use_seconds=0)

        def download(shard: ShardFile, path: Path, *, reserve: Callable[[int], None]) -> int:
            number = int(shard.name.partition(".")[0])
            data = bytes([number]) * sizes[number]
            with path.open("r+b" if path.exists() else "wb") as file:
                for byte in range(len(data)):
                    reserve(byte + 1)
                    file.write(data[byte : byte + 1])
                file.flush()
                assert sum(one.stat().st_size for one in Path(folder).glob("*/*.[tp]a*")) <= bound
                file.truncate(len(data))
            return zlib.crc32(data)

        patch.setattr(shard_cache, "download", download)
        patch.setattr(shard_cache, "_STEP", draws.draw(st.sampled_from([1, 7])))
        patch.setattr(shard_cache, "_POLL_SECONDS", 0.001)
        patch.setattr(shard_cache, "sync_to_disk", lambda _: None)
        for number in draws.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=20)):
            if draws.draw(st.booleans()):
                cache = pickle.loads(pickle.dumps(cache))
            found = cache.path(shards[number])
            assert found is None or number in model
            path = cache.fetch(shards[number])
            assert path.read_bytes() == bytes([number]) * sizes[number]
            model[number] = sizes[number]
            model.move_to_end(number)
            here = [one for one in model if cache._stem(shards[one]).with_suffix(".tar").exists()]
            assert sum(sizes[one] for one in here) <= bound
            sized = [one for one in model if one in here or sizes[one]]
            assert sized[len(sized) - len(here) :] == here  # the least recently used shards were removed
            for one in list(model):
                if one not in here:
                    del model[one]


def test_full_cache_is_listed_once_for_many_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(shard: ShardFile, path: Path, *, reserve: Callable[[int], None]) -> int:
        path.write_bytes(b"x" * shard.size)
        return 0

    listed = 0
    list_folder = ShardCache._make_space_by_listing

    def count_listings(cache: ShardCache, *arguments: Any) -> bool:
        nonlocal listed
        listed += 1
        return list_folder(cache, *arguments)

    monkeypatch.setattr(shard_cache, "download", download)
    monkeypatch.setattr(ShardCache, "_make_space_by_listing", count_listings)
    caches = [ShardCache(tmp_path / "cache", 500, in_use_seconds=0) for _ in range(2)]  # of two processes
    for number in range(200):
        caches[number % 2].fetch(ShardFile(url=f"http://x/{number}.tar", size=10, version="1"))
        assert sum(path.stat().st_size for path in (tmp_path / "cache").glob("*/*.tar")) <= 500
    assert len(list((tmp_path / "cache").glob("*/*.tar"))) == 50
    assert listed < 12  # the first time, and whenever the files of a listing are removed
    (tmp_path / "cache" / "total").write_text("")  # cut short
    (tmp_path / "cache" / "ab").mkdir(exist_ok=True)
    caches[0].fetch(ShardFile(url="http://x/last.tar", size=10, version="1"))
    assert (tmp_path / "cache" / "total").read_text() == "500"

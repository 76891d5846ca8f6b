"""Test that the size limit of the shard cache holds for any sequence of uses."""

import pickle
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

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

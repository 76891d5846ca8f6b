"""Tests of counting shards in processes: errors are one line, and no process is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import pytest
import webdataset

from clipkit.errors import DataError
from clipkit.samples.index import index_path
from clipkit.samples.remote import ShardCache
from clipkit.samples.remote.store import ShardFile
from data.selection import SelectedShard, Selection
from data.shards import manifest
from data.shards.manifest import Census, make_manifest, take_census

ROOT = Path(__file__).parents[3]
SHARDS = 20


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the indexes of temporary shards out of the user's cache."""
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def shards(tmp_path: Path) -> list[ShardFile]:
    """Write twenty shards; the n-th has n pairs and a caption without image."""
    for shard in range(SHARDS):
        with webdataset.TarWriter(str(tmp_path / f"{shard}.tar"), encoder=False) as tar:
            for number in range(shard):
                tar.write({"__key__": f"{number}", "jpg": b"image", "txt": b"text"})
            tar.write({"__key__": "last", "txt": b"text"})
    return [ShardFile.at(tmp_path / f"{shard}.tar") for shard in range(SHARDS)]


def test_each_shard_is_counted_once_starting_with_the_first(shards: list[ShardFile]) -> None:
    found = list(take_census(shards, Selection()))
    assert found[0][0] == 0 and sorted(number for number, _ in found) == list(range(SHARDS))
    for number, one in found:
        members = {"jpg": number, "txt": number + 1} if number else {"txt": 1}
        expected = Census(
            count=number,
            digest=one.digest,
            content=one.content,
            dropped={"without image": 1},
            members=members,
        )
        assert one == expected and len(one.digest) == 16
    assert active_children() == []
    again = dict(take_census(shards, Selection()))
    assert again == dict(found)
    alone = {number: next(take_census([shard], Selection()))[1] for number, shard in enumerate(shards)}
    assert alone == again


def test_few_shards_are_counted_without_processes(
    shards: list[ShardFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "ProcessPoolExecutor", None)
    assert [one.count for _, one in take_census(shards[: manifest._ALONE], Selection())] == [0, 1, 2, 3]


@pytest.mark.parametrize("which", [0, 1, 13, SHARDS - 1])
@pytest.mark.parametrize("fault", ["gone", "short", "other"])
def test_broken_shard_raises_one_line_and_leaves_no_process(
    which: int, fault: str, shards: list[ShardFile]
) -> None:
    path = Path(shards[which].url)
    if fault == "gone":
        path.unlink()
    elif fault == "short":
        os.truncate(path, 700)
    else:
        path.write_bytes(b"no tar" * 300)
    with pytest.raises(DataError) as caught:
        make_manifest([shards], Selection())
    assert str(path) in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert active_children() == []


def test_abandoned_census_leaves_no_process(shards: list[ShardFile]) -> None:
    counting = take_census(shards, Selection())
    next(counting)
    next(counting)
    assert active_children()
    del counting
    assert active_children() == []


def kill_this_process(shard: ShardFile, *rest: object) -> SelectedShard:
    if shard.name == "7.tar":
        os.kill(os.getpid(), signal.SIGKILL)
    return SelectedShard(shard, *rest)  # type: ignore[arg-type]


def test_killed_process_raises_one_line(shards: list[ShardFile], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "SelectedShard", kill_this_process)
    with pytest.raises(DataError, match="a process that counts shards was killed, probably out of memory"):
        list(take_census(shards, Selection()))
    assert active_children() == []


def test_missing_shard_is_reported_early(shards: list[ShardFile]) -> None:
    """A missing shard is reported when it is reached; only a few shards are counted ahead."""
    missing = [replace(shard, url=f"{shard.url}.missing") for shard in shards * 50]
    began = time.perf_counter()
    with pytest.raises(DataError, match="No such file"):
        list(take_census([shards[0], *missing], Selection()))
    assert time.perf_counter() - began < 5


SLOW = """
import os, sys, time
from pathlib import Path
from clipkit.errors import run_command
from data.shards import manifest as census
from data.shards.manifest import make_manifest
from data.selection import SelectedShard, Selection
from clipkit.samples.index import index_path
from clipkit.samples.remote import ShardCache
from clipkit.samples.remote.store import ShardFile

program = os.getpid()

def slow(shard, *rest):
    if os.getpid() != program:
        os.write(1, b"%d\\n" % os.getpid())  # in one piece, as several write
        time.sleep(60)
    return SelectedShard(shard, *rest)

census.SelectedShard = slow
shards = [ShardFile.at(Path(name)) for name in sys.argv[1:]]
run_command(lambda: print(make_manifest([shards], Selection())))
"""


def is_running(process: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def everyone(process: subprocess.Popen[str]) -> None:
    """Signal the process group, as a terminal does on Ctrl-C."""
    os.killpg(process.pid, signal.SIGINT)


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("stop", "status", "said"),
    [
        (everyone, 130, "stopped\n"),
        (subprocess.Popen.terminate, -signal.SIGTERM, ""),
        (subprocess.Popen.kill, -signal.SIGKILL, ""),
    ],
)
def test_stopped_program_stops_its_processes(
    stop: Callable[[subprocess.Popen[str]], None], status: int, said: str, shards: list[ShardFile]
) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", SLOW, *(shard.url for shard in shards)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert program.stdout is not None and program.stderr is not None
    counting = [int(program.stdout.readline())]
    if len(os.sched_getaffinity(0)) > 1:
        counting.append(int(program.stdout.readline()))
    stop(program)
    assert program.wait(20) == status
    assert program.stderr.read() == said
    until = time.monotonic() + 5
    while any(map(is_running, counting)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_running, counting))
    program.stdout.close()
    program.stderr.close()


def test_many_remote_shards_must_be_indexed_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = [ShardFile(url=f"http://x/{number:05d}.tar", size=10, version="1") for number in range(30)]
    cache = ShardCache(tmp_path / "shards", 1000)
    stated: list[int | None] = [None]
    monkeypatch.setattr(manifest, "_MOST_UNCOUNTED", 20)
    monkeypatch.setattr(manifest, "_read_stated_count", lambda _: stated[0])

    def refuse(*_: object) -> None:
        raise LookupError  # counting begins

    monkeypatch.setattr(manifest, "SelectedShard", refuse)
    with pytest.raises(
        DataError, match=r"^30 remote shards have no index, .*`python -m data index SOURCE` once"
    ):
        make_manifest([remote], Selection(), cache=cache)
    with pytest.raises(LookupError):  # of the command
        make_manifest([remote], Selection(), cache=cache, stats=False)
    stated[0] = 7
    with pytest.raises(LookupError):
        make_manifest([remote], Selection(), cache=cache)
    stated[0] = None
    for shard in remote[:10]:
        index_path(shard).parent.mkdir(parents=True, exist_ok=True)
        index_path(shard).touch()
    with pytest.raises(LookupError):
        make_manifest([remote], Selection(), cache=cache)

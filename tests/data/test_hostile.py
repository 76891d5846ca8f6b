"""Tests of hostile tars: they give a one-line error or correct samples, in bounded time and memory."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clipkit.errors import ConfigError, DataError
from clipkit.samples.remote.store import ShardFile
from clipkit.samples.tar import list_tar_files
from data.captions import CaptionRule, Filter
from data.selection import Selection
from data.shards.manifest import make_manifest
from data.shards.samples import Shards, find_shards
from tests.data.hostile_tars import GOOD, HOSTILE, PAIRS, header, tar_of

ROOT = Path(__file__).parents[2]
SECONDS, MIB = 5, 300  # limits for any shard


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Keep the indexes of temporary shards out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def answers(own_cache: object, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Read each hostile tar in a separate process and return the results."""
    folder = tmp_path_factory.mktemp("tars")
    paths = {str(folder / f"{number}.tar"): name for number, name in enumerate(HOSTILE)}
    for path, name in paths.items():
        Path(path).write_bytes(HOSTILE[name].make())
    command = [sys.executable, "-m", "tests.data.hostile_program", *paths]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and ended.stderr == ""
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    return {paths[line["path"]]: line for line in lines}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tar_gives_error_or_correct_samples(name: str, answers: dict[str, dict[str, Any]]) -> None:
    answer, wanted = answers[name], HOSTILE[name].answer
    assert "crash" not in answer, answer["crash"]
    assert answer["seconds"] <= SECONDS and answer["growth"] <= MIB
    if isinstance(wanted, str):
        assert re.search(wanted, answer["error"]) and answer["error"].isprintable()
        return
    assert tuple(answer["keys"]) == wanted
    images = {name.removesuffix(".jpg"): data.decode() for name, data in PAIRS}
    for key, image in zip(answer["keys"], answer["images"], strict=False):
        if key in GOOD and wanted == GOOD:
            assert image == images[key]


def dangling(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def to_itself(path: Path) -> None:
    path.symlink_to(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def locked(path: Path) -> None:
    path.write_bytes(tar_of())
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("nothing is unreadable here")


PLACES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pipe": (os.mkfifo, "is not a regular file"),
    "a folder": (Path.mkdir, "is not a regular file"),
    "a link to nowhere": (dangling, "No such file or directory"),
    "a link to itself": (to_itself, "Too many levels of symbolic links|Symlink loop"),
    "a device": (device, "is not a regular file"),
    "a file that may not be read": (locked, "Permission denied"),
}


@pytest.mark.parametrize("name", PLACES)
def test_shard_that_is_not_a_file_raises_one_line(name: str, tmp_path: Path) -> None:
    make, message = PLACES[name]
    for number in (0, 2):
        (tmp_path / f"{number}.tar").write_bytes(tar_of())
    make(tmp_path / "1.tar")
    with pytest.raises(DataError, match=message) as caught:
        make_manifest([find_shards(str(tmp_path))], Selection())
    assert "1.tar" in str(caught.value) and str(caught.value).isprintable()


def test_impossible_stated_counts_are_ignored(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.tar").write_bytes(tar_of())
    (tmp_path / "1_stats.json").write_text(json.dumps({"successes": 2**70}))
    (tmp_path / "2_stats.json").write_text(json.dumps({"successes": 10**12}))
    os.mkfifo(tmp_path / "3_stats.json")  # opening it would block forever
    assert len(Shards.of(find_shards(str(tmp_path)))) == 4 * len(GOOD)


def test_tar_truncated_during_the_scan_raises_one_line(tmp_path: Path) -> None:
    """Reading a truncated memory-mapped file would kill this process."""
    path = tmp_path / "0.tar"
    path.write_bytes(b"".join(header(f"{number}.jpg") for number in range(20_000)))
    members = list_tar_files(path)
    next(members)
    os.truncate(path, 512 * 5000)
    with pytest.raises(DataError, match=f"is truncated: it has no end mark; it stops at byte {512 * 5000}"):
        list(members)


WHOLE = tar_of()
OTHER = tar_of([*PAIRS[2:], *PAIRS[:2]])  # as many bytes, with the samples in another order


def in_place(content: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.write(content)

    return change


def by_rename(content: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.with_suffix(".new").write_bytes(content)
        path.with_suffix(".new").replace(path)

    return change


def by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


# for each change of a shard: errors of reading if the shard is open and if it is not; None: no error
CHANGES: dict[str, tuple[Callable[[Path], None], str | None, str | None]] = {
    "vanishes": (Path.unlink, None, "No such file"),
    "is emptied": (lambda path: os.truncate(path, 0), "shorter", "is empty"),
    "shrinks": (lambda path: os.truncate(path, 600), "shorter", "is truncated"),
    "grows": (in_place(WHOLE + WHOLE), "has changed", "more than one archive"),
    "is written over": (in_place(OTHER), "has changed", "has changed"),
    "is replaced": (by_rename(OTHER), None, "has changed"),
    "is replaced by a pipe": (by_pipe, None, "is not a regular file"),
    "is replaced by a folder": (by_folder, None, "is not a regular file"),
    "is copied": (by_rename(WHOLE), None, None),
    "is touched": (os.utime, None, None),
}


@pytest.mark.parametrize("opened", [True, False], ids=["open", "not open"])
@pytest.mark.parametrize("name", CHANGES)
def test_tar_changed_during_training_is_detected(name: str, opened: bool, tmp_path: Path) -> None:
    change, where_open, where_not = CHANGES[name]
    path = tmp_path / "0.tar"
    path.write_bytes(WHOLE)
    os.utime(path, ns=(1, 1))
    shards = Shards.of([ShardFile.at(path)])
    if opened:
        shards.read(0)
    change(path)
    message = where_open if opened else where_not
    for number, key in enumerate(GOOD):
        assert shards.locate(number) == (str(path), key)
        if message is None:
            assert shards.read(number).image == PAIRS[2 * number][1]
            continue
        with pytest.raises(DataError, match=message + "|has changed") as caught:
            shards.read(number)
        assert str(caught.value).isprintable()


def test_oversized_caption_and_json_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(
        tar_of(
            [
                ("a.jpg", b"image"),
                ("a.txt", b"x" * (2 << 20)),
                ("b.jpg", b"image"),
                ("b.json", b"[" * (5 << 20)),
            ]
        )
    )
    shards = Shards.of([ShardFile.at(path)], captions=CaptionRule(fields=("txt", "caption")))
    for number, limit in enumerate((1 << 20, 4 << 20)):
        with pytest.raises(DataError, match=f"over the limit of {limit}"):
            shards.read(number)


@pytest.mark.parametrize(
    "text", ["width => 256", "width =< 256", "width === 256", "width >== 256", "width <> 256"]
)
def test_unknown_filter_operator_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write 'width [<>!]?=? 256|>=, <=, >, <, = or !="):
        Filter.of(text)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # of fsspec's partly constructed client
def test_unsupported_protocol_is_rejected() -> None:
    with pytest.raises(DataError, match="ftp:// is not supported; known: s3"):
        find_shards("ftp://nowhere/0.tar")

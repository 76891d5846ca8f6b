"""Tests of built-in datasets: made once, by one process, in the cache folder, and never left incomplete."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clipkit.errors import DataError
from clipkit.samples.remote.cache import cache_folder, index_folder
from data.corpora import glyphs
from data.corpora.builtin import BUILTIN, built_in

ROOT = Path(__file__).parents[3]

# a process that requests a dataset; its maker logs that it was called and is slow enough for races
ASK = """
import os, pathlib, signal, sys, time
from data.corpora.builtin import BUILTIN, BuiltIn, built_in
notes, how = pathlib.Path(sys.argv[1]), sys.argv[2]
def make(out, progress):
    with notes.open("a") as file:
        file.write(f"{os.getpid()}\\n")
    aside = out.with_name(f".{out.name}.partial-{os.getpid()}")
    aside.mkdir()
    time.sleep(1)
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    (aside / "card.json").write_text("{}")
    aside.rename(out)
BUILTIN["small"] = BuiltIn(make=make, revision="3")
print(built_in("small", progress=False))
"""


def ask(cache: Path, notes: Path, how: str = "make") -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", ASK, str(notes), how]
    environment = {"CLIPKIT_CACHE": str(cache), "PATH": "/usr/bin:/bin"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def test_concurrent_processes_make_dataset_once(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    asking = [ask(tmp_path / "cache", notes) for _ in range(2)]
    answers = {process.communicate(timeout=120)[0].strip() for process in asking}
    assert [process.returncode for process in asking] == [0, 0]
    assert len(notes.read_text().split()) == 1
    folder = tmp_path / "cache" / "small-3"
    assert answers == {str(folder)}
    assert [path.name for path in folder.iterdir()] == ["card.json"]


def test_killed_process_leaves_no_complete_folder(tmp_path: Path) -> None:
    cache, notes = tmp_path / "cache", tmp_path / "notes"
    killed = ask(cache, notes, "die")
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    folder = cache / "small-3"
    assert not folder.exists() and list(cache.glob(".small*partial*"))
    second = ask(cache, notes)
    assert second.communicate(timeout=120)[0].strip() == str(folder)
    assert folder.is_dir() and not list(cache.glob(".small*partial*"))


def test_existing_dataset_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path))
    folder = built_in("digits")
    before = (folder / "card.json").stat().st_mtime_ns
    assert built_in("digits") == folder == tmp_path / "digits-1"
    assert (folder / "card.json").stat().st_mtime_ns == before


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CLIPKIT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "clipkit"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "clipkit"
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path / "own"))
    assert cache_folder() == index_folder() == tmp_path / "own"
    monkeypatch.setenv("CLIPKIT_INDEX_CACHE", str(tmp_path / "shared"))
    assert cache_folder() == tmp_path / "own" and index_folder() == tmp_path / "shared"


def test_unknown_name_and_unusable_cache_raise_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="did you mean 'glyphs'"):
        built_in("glyph")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match="set CLIPKIT_CACHE"):
        built_in("digits")


def test_revision_equals_that_of_the_maker() -> None:
    # stored in both modules, so that finding an existing dataset imports no slow modules
    assert BUILTIN["glyphs"].revision == glyphs.REVISION

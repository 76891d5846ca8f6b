"""Tests of file locks among threads and processes, some of which are killed, and of files of JSON lines."""

import errno
import fcntl
import json
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from clipkit.files.writing import FileLock, drop_lines_after, lock_output

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def started(work: Callable[..., None], *args: Any) -> BaseProcess:
    child = multiprocessing.get_context("fork").Process(target=work, args=args, daemon=True)
    child.start()
    return child


def _hold(path: Path) -> None:
    assert FileLock(path).try_acquire()
    path.with_suffix(".held").touch()
    time.sleep(60)


def _count(path: Path, number: Path, times: int) -> None:
    for _ in range(times):
        lock = FileLock(path)
        while not lock.try_acquire():
            time.sleep(0.0005)
        number.write_text(str(int(number.read_text()) + 1))
        lock.release()


def test_lock_excludes_threads_and_processes(tmp_path: Path) -> None:
    path, number = tmp_path / "lock", tmp_path / "number"
    number.write_text("0")
    children = [started(_count, path, number, 50) for _ in range(3)]
    threads = [threading.Thread(target=_count, args=(path, number, 50)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for child in children:
        child.join(30)
    assert number.read_text() == "300"
    assert not path.exists()


def test_lock_is_released_when_its_process_dies_and_is_not_inherited(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    child = started(_hold, path)
    while not path.with_suffix(".held").exists():
        time.sleep(0.005)
    lock = FileLock(path)
    assert not lock.try_acquire()
    child.kill()
    child.join()
    assert lock.try_acquire() and not FileLock(path).try_acquire()
    child = started(time.sleep, 60)  # inherits the open file descriptor, but not the lock
    lock.release()
    assert lock.try_acquire()
    lock.release()
    child.kill()
    child.join()


def test_lock_in_missing_folder_raises(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "none" / "lock")
    for _ in range(2):  # the first attempt leaves nothing locked
        with pytest.raises(FileNotFoundError):
            lock.try_acquire()


def test_filesystem_without_locks_is_a_warning_where_a_lock_is_optional(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    for _ in range(2):
        with lock_output(tmp_path / "out", "command"):
            assert not FileLock(tmp_path / ".out.lock", optional=True).try_acquire()  # within the process
    warnings = capsys.readouterr().err.splitlines()
    assert warnings == [
        f"warning: {tmp_path} is on a filesystem without file locks: make sure that no other process writes there"
    ]
    with pytest.raises(OSError, match="not implemented"):  # the shard cache would remove files in use
        FileLock(tmp_path / "lock").try_acquire()


def test_kept_lines_are_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    kept = [
        json.dumps({"step": 5, "dataset": "line\u2028separators\x85 \x0b and é"}, ensure_ascii=False),
        json.dumps({"step": None, "dataset": "of no step"}),
        json.dumps({"dataset": "without"}),
        json.dumps({"step": 7, "value": math.inf}),
    ]
    dropped = ['{"step": 8}', "[1]", "5", '"step"', '{"step": "7"}', "{", "", "null"]
    path.write_text("\n".join([*kept, *dropped]), encoding="utf-8")
    drop_lines_after(path, 7)
    assert path.read_text(encoding="utf-8") == "".join(line + "\n" for line in kept)
    drop_lines_after(tmp_path / "missing.jsonl", 7)
    assert not (tmp_path / "missing.jsonl").exists()

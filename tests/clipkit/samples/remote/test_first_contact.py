"""Tests of first requests: a store that never responded fails within seconds, others are retried."""

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from clipkit.samples.remote import transfer
from clipkit.samples.remote.cache import ShardCache
from clipkit.samples.remote.store import ShardFile, describe_files, download, read_range
from clipkit.samples.remote.transfer import Patience
from data.shards.samples import find_shards
from tests.clipkit.samples.remote import servers
from tests.clipkit.samples.remote.servers import S3, Nginx, error_of, whole

ROOT = Path(__file__).parents[4]

impatient = servers.impatient
nginx = servers.nginx
s3 = servers.s3

# processes are forked while threads run, as in loaders
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@pytest.fixture
def closed_port() -> int:
    """A port without a server."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


# Error messages


def test_error_names_host_and_cause(closed_port: int, caplog: pytest.LogCaptureFixture) -> None:
    url = f"http://u:p-word@127.0.0.1:{closed_port}/0.tar?sig=s1gn4ture"
    message = error_of(lambda: describe_files([url]))
    assert message.startswith(
        f"http://127.0.0.1:{closed_port}/0.tar: the connection failed (Connection refused): no server"
    )
    assert "; gave up after 3 tries in 0 s" in message
    message = error_of(lambda: describe_files(["http://no-such-host.invalid/0.tar"]))
    assert message.startswith("http://no-such-host.invalid/0.tar: the host is unknown (")
    assert "a wrong name, or no network; gave up after 3 tries" in message
    assert not caplog.records


def test_wrong_s3_endpoint_raises_error(s3: S3, closed_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint, said in (
        (f"http://127.0.0.1:{closed_port}", "the connection failed (Connection refused)"),
        ("http://no-such-host.invalid", "the host is unknown"),
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setattr(transfer, "_clients", {})
        message = error_of(lambda: describe_files(["s3://pairs/0.tar"]))
        assert said in message and "gave up after 3 tries" in message


def test_failing_commands_raise_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for command, tries, said in (
        ("exit 3", 3, "the command failed with status 3; gave up after 3 tries"),
        ("kill -9 $$", 3, "the command failed by signal 9; gave up after 3 tries"),
        (
            "echo a; printf 'one\ncannot get s3://k:t0ken@b/x?sig=t0ken\n\n' >&2; exit 3",
            3,
            "failed with status 3 (cannot get s3://b/x); gave up after 3 tries",
        ),
        ("no-such-program-here t0ken", 1, "failed with status 127: a program was not found"),
        ("/dev/null", 1, "failed with status 126: a program cannot be run"),
    ):
        runs = tmp_path / "runs"
        runs.write_text("")
        url = f"pipe:echo x >> {runs}; {command}"
        assert said in error_of(partial(download, whole(url), tmp_path / "got"))
        assert len(runs.read_text().splitlines()) == tries
    assert not caplog.records


def test_program_prints_one_line_within_seconds(closed_port: int, tmp_path: Path) -> None:
    """With the default waits."""
    commands = (
        ["index", f"http://127.0.0.1:{closed_port}/{{0..99}}.tar"],
        ["index", "--cache-gb", "1", "pipe:false {0..9}.tar"],
    )
    environment = {**os.environ, "CLIPKIT_CACHE": str(tmp_path), "no_proxy": "*"}
    began = time.monotonic()
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "data", *command, "--quiet"],
            cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True,
        )
        for command in commands
    ]  # fmt: skip
    for process in started:
        _, told = process.communicate(timeout=60)
        assert process.returncode == 1
        [line] = told.splitlines()
        assert line.startswith("error: ") and "gave up after 3 tries in 4 s" in line
    assert time.monotonic() - began < 30


# Waiting


def test_starting_server_is_waited_for(nginx: Nginx, monkeypatch: pytest.MonkeyPatch) -> None:
    nginx.put("0.tar", bytes(1000))
    nginx.kill()
    monkeypatch.setattr(transfer, "PATIENCE", replace(transfer.PATIENCE, contact_waits=(0.6, 1.0)))
    threading.Timer(0.3, nginx.start).start()
    assert describe_files([nginx.url("0.tar")])[0].size == 1000
    waits = Patience().contact_waits
    assert (
        0.8 * sum(waits) > 3 and sum(waits) <= Patience().contact_seconds
    )  # seconds, with the default settings


def test_overloaded_server_is_retried_8_times_at_once(nginx: Nginx) -> None:
    nginx.busy(True)
    assert "8 tries" in error_of(lambda: describe_files([nginx.url("0.tar")]))
    # the 503 was a response: later failures are an outage
    nginx.kill()
    assert "(Connection refused)" in (message := error_of(lambda: describe_files([nginx.url("0.tar")])))
    assert "8 tries" in message


def test_outage_after_first_response_is_waited_out(nginx: Nginx, tmp_path: Path) -> None:
    data = os.urandom(1000)
    url = nginx.put("0.tar", data)
    assert "no such file" in error_of(
        lambda: describe_files([nginx.url("none.tar")])
    )  # also counts as a response
    nginx.restart_after(0.4)
    download(whole(url), tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == data


def test_known_and_prefetched_shards_are_retried_8_times(closed_port: int, tmp_path: Path) -> None:
    """A worker or another rank may use a store for the first time during an outage."""
    url = f"http://127.0.0.1:{closed_port}/0.tar"
    assert "3 tries" in error_of(lambda: read_range(whole(url), 0, 9))
    assert "8 tries" in error_of(lambda: read_range(ShardFile(url=url, size=1000, version=""), 0, 9))
    command = whole("pipe:false 0.tar")
    cache = ShardCache(tmp_path / "cache", 1 << 30)
    assert "3 tries" in error_of(lambda: cache.fetch(command))
    for were_counted, tries in ((False, "3 tries"), (True, "8 tries")):
        cache.prefetch([command], threads=1, were_counted=were_counted)
        cache.close()
        assert tries in error_of(lambda: cache.fetch(command))


def test_command_that_succeeded_before_is_retried_8_times(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    command = whole(f"pipe:test ! -e {flag} && echo all")
    download(command, tmp_path / "got")
    flag.touch()
    assert "8 tries" in error_of(lambda: download(command, tmp_path / "got"))
    # partial output is not a success
    assert "3 tries" in error_of(lambda: download(whole("pipe:echo half; exit 1"), tmp_path / "got"))
    much = "pipe:head -c 2000000 /dev/zero; exit 1"
    assert "8 tries" in error_of(lambda: download(whole(much), tmp_path / "got"))


def _says_8_tries(url: str) -> None:
    assert "8 tries" in error_of(lambda: read_range(whole(url), 0, 9))


def test_forked_process_inherits_known_stores(nginx: Nginx) -> None:
    url = nginx.put("0.tar", bytes(1000))
    describe_files([url])
    nginx.kill()
    child = multiprocessing.get_context("fork").Process(target=_says_8_tries, args=(url,))
    child.start()
    child.join(30)
    assert child.exitcode == 0


def test_unreachable_folder_is_not_searched_for_elsewhere(closed_port: int) -> None:
    message = error_of(lambda: find_shards(f"http://127.0.0.1:{closed_port}/set"))
    assert message.startswith(f"http://127.0.0.1:{closed_port}/set/: ")

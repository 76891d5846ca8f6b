"""A store that never answered fails within seconds; one that did is waited for."""

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

from data.remote import transfer
from data.remote.cache import ShardCache
from data.remote.store import ShardFile, describe, download, read_range
from data.remote.transfer import Patience
from data.shards.sources import find_shards
from tests.data.remote import servers
from tests.data.remote.servers import S3, Nginx, error_of, whole

ROOT = Path(__file__).parents[3]

impatient = servers.impatient
nginx = servers.nginx
s3 = servers.s3

# processes are forked here while threads run, as loaders do
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@pytest.fixture
def closed_port() -> int:
    """A port without a server."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


# What is told


def test_the_line_names_host_and_cause(closed_port: int, caplog: pytest.LogCaptureFixture) -> None:
    url = f"http://u:p-word@127.0.0.1:{closed_port}/0.tar?sig=s1gn4ture"
    message = error_of(lambda: describe([url]))
    assert message.startswith(
        f"http://127.0.0.1:{closed_port}/0.tar: the connection failed (refused): no server"
    )
    assert "; gave up after 3 tries in 0 s" in message
    message = error_of(lambda: describe(["http://no-such-host.invalid/0.tar"]))
    assert message.startswith("http://no-such-host.invalid/0.tar: the host is unknown (")
    assert "a wrong name, or no network; gave up after 3 tries" in message
    assert not caplog.records


def test_an_endpoint_of_s3_that_is_wrong(s3: S3, closed_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint, said in (
        (f"http://127.0.0.1:{closed_port}", "the connection failed (refused by 127.0.0.1)"),
        ("http://no-such-host.invalid", "the host no-such-host.invalid is unknown"),
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setattr(transfer, "_clients", {})
        message = error_of(lambda: describe(["s3://pairs/0.tar"]))
        assert said in message and "gave up after 3 tries" in message


def test_commands_that_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for command, tries, said in (
        ("exit 3", 3, "the command failed with status 3; gave up after 3 tries"),
        ("kill -9 $$", 3, "the command failed by signal 9; gave up after 3 tries"),
        ("no-such-program-here t0ken", 1, "failed with status 127: a program was not found"),
        ("/dev/null", 1, "failed with status 126: a program cannot be run"),
    ):
        runs = tmp_path / "runs"
        runs.write_text("")
        url = f"pipe:echo x >> {runs}; {command}"
        assert said in error_of(partial(download, whole(url), tmp_path / "got"))
        assert len(runs.read_text().splitlines()) == tries
    assert not caplog.records


def test_commands_told_by_a_program(closed_port: int, tmp_path: Path) -> None:
    """Use the default waits."""
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


# What is waited for


def test_a_server_that_is_being_started(nginx: Nginx, monkeypatch: pytest.MonkeyPatch) -> None:
    nginx.put("0.tar", bytes(1000))
    nginx.kill()
    monkeypatch.setattr(transfer, "PATIENCE", replace(transfer.PATIENCE, contact_waits=(0.6, 1.0)))
    threading.Timer(0.3, nginx.start).start()
    assert describe([nginx.url("0.tar")])[0].size == 1000
    waits = Patience().contact_waits
    assert 0.8 * sum(waits) > 3 and sum(waits) <= Patience().contact_seconds  # seconds, for users


def test_an_overloaded_server_has_the_long_patience_at_once(nginx: Nginx) -> None:
    nginx.busy(True)
    assert "8 tries" in error_of(lambda: describe([nginx.url("0.tar")]))
    # and it has answered: what comes now is an outage
    nginx.kill()
    assert "(refused)" in (message := error_of(lambda: describe([nginx.url("0.tar")])))
    assert "8 tries" in message


def test_an_outage_after_the_first_answer_is_waited_out(nginx: Nginx, tmp_path: Path) -> None:
    data = os.urandom(1000)
    url = nginx.put("0.tar", data)
    assert "no such file" in error_of(lambda: describe([nginx.url("none.tar")]))  # an answer, too
    nginx.restart_after(0.4)
    download(whole(url), tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == data


def test_what_somebody_was_told_of_is_waited_for(closed_port: int, tmp_path: Path) -> None:
    """A worker or another rank may first use a store during an outage."""
    url = f"http://127.0.0.1:{closed_port}/0.tar"
    assert "3 tries" in error_of(lambda: read_range(whole(url), 0, 9))
    assert "8 tries" in error_of(lambda: read_range(ShardFile(url=url, size=1000, version=""), 0, 9))
    command = whole("pipe:false 0.tar")
    cache = ShardCache(tmp_path / "cache", 1 << 30)
    assert "3 tries" in error_of(lambda: cache.fetch(command))
    cache.prefetch([command], threads=1)
    cache.close()
    assert "8 tries" in error_of(lambda: cache.fetch(command))


def test_a_command_that_has_come_to_its_end_once(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    command = whole(f"pipe:test ! -e {flag} && echo all")
    download(command, tmp_path / "got")
    flag.touch()
    assert "8 tries" in error_of(lambda: download(command, tmp_path / "got"))
    # half of something is no success
    assert "3 tries" in error_of(lambda: download(whole("pipe:echo half; exit 1"), tmp_path / "got"))
    much = "pipe:head -c 2000000 /dev/zero; exit 1"
    assert "8 tries" in error_of(lambda: download(whole(much), tmp_path / "got"))


def _says_8_tries(url: str) -> None:
    assert "8 tries" in error_of(lambda: read_range(whole(url), 0, 9))


def test_a_forked_process_knows_what_its_parent_knows(nginx: Nginx) -> None:
    url = nginx.put("0.tar", bytes(1000))
    describe([url])
    nginx.kill()
    child = multiprocessing.get_context("fork").Process(target=_says_8_tries, args=(url,))
    child.start()
    child.join(30)
    assert child.exitcode == 0


def test_a_folder_is_not_looked_for_in_another_place_where_nobody_answers(closed_port: int) -> None:
    message = error_of(lambda: find_shards(f"http://127.0.0.1:{closed_port}/set"))
    assert message.startswith(f"http://127.0.0.1:{closed_port}/set/train/: ")

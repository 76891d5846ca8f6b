"""Tests of server faults: retries continue at the last byte, and errors are one line without secrets."""

import hashlib
import logging
import os
import sys
import threading
import time
import tomllib
import zlib
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from clipkit.errors import DataError
from clipkit.files import redact_url
from clipkit.samples.remote import transfer
from clipkit.samples.remote.cache import ShardCache
from clipkit.samples.remote.store import ShardFile, describe_files, download, list_folder, read_range
from data.shards.samples import Shards, find_shards
from data.shards.writer import DatasetWriter, Record
from tests.clipkit.samples.remote import servers
from tests.clipkit.samples.remote.servers import S3, SECRETS, Nginx, Unruly, error_of, whole

ROOT = Path(__file__).parents[4]

impatient = servers.impatient
nginx = servers.nginx
s3 = servers.s3
unruly = servers.unruly


def test_download_continues_after_server_is_killed(nginx: Nginx, tmp_path: Path) -> None:
    data = os.urandom(5 << 20)
    nginx.put("0.tar", data)
    [shard] = describe_files([nginx.url("0.tar", of="slow/")])
    sizes: list[int] = []

    def kill(size: int) -> None:
        sizes.append(size)
        if len(sizes) in (1, 3):
            nginx.restart_after(0.1)

    assert download(shard, tmp_path / "got", reserve=kill) == zlib.crc32(data)
    assert (tmp_path / "got").read_bytes() == data
    until = time.monotonic() + 30
    while not nginx.requests() and time.monotonic() < until:
        time.sleep(0.01)  # a request is logged after its last byte has arrived
    starts = [int(request.range[6:-1]) for request in nginx.requests() if request.range.endswith("-")]
    assert starts and all(start > 0 for start in starts)  # no download started over
    assert sizes == sorted(sizes)


def test_busy_server_is_retried(nginx: Nginx, tmp_path: Path) -> None:
    nginx.put("0.tar", bytes(1000))
    nginx.busy(True)
    threading.Timer(0.2, nginx.busy, [False]).start()
    [shard] = describe_files([nginx.url("0.tar")])
    assert shard.size == 1000
    nginx.busy(True)
    message = error_of(lambda: download(shard, tmp_path / "got"))
    assert "status 503" in message and "8 tries" in message


@pytest.mark.parametrize("fault", ["short", "stall", "silent", "reset", "502", "429"])
def test_transient_faults_are_retried_at_the_last_byte(fault: str, unruly: Unruly, tmp_path: Path) -> None:
    [shard] = describe_files([unruly.url])
    unruly.requests.clear()
    unruly.script = [fault, fault]
    assert download(shard, tmp_path / "got") == zlib.crc32(unruly.data)
    assert (tmp_path / "got").read_bytes() == unruly.data
    expected = ["", "bytes=150000-", "bytes=225000-"] if fault in ("short", "stall") else ["", "", ""]
    assert unruly.requests == expected
    unruly.requests.clear()
    unruly.script = [fault]
    assert read_range(shard, 1000, 3000) == unruly.data[1000:3000]
    assert unruly.requests == [
        "bytes=1000-2999", "bytes=2000-2999" if fault in ("short", "stall") else "bytes=1000-2999"
    ]  # fmt: skip


def test_permanent_faults_raise_error(unruly: Unruly, tmp_path: Path) -> None:
    [shard] = describe_files([unruly.url])
    works = (lambda: read_range(shard, 10, 99), lambda: download(shard, tmp_path / "got"))
    for word, said in (
        ("etag", "has changed since it was indexed"),
        ("403", "credentials come from the environment"),
        ("401", "credentials come from the environment"),
        ("404", "no such file (status 404)"),
        ("418", "refused the request (status 418)"),
    ):
        for work in works:
            unruly.script = [word]
            assert said in error_of(work)
            assert unruly.script == []
    for work in works:
        began = time.monotonic()
        unruly.script = ["short", "500", "reset", "429"] * 9
        assert "gave up after" in error_of(work)
        assert time.monotonic() - began < 10
    unruly.script = ["short", "etag"]  # the rest has another etag
    assert "has changed" in error_of(lambda: download(whole(unruly.url), tmp_path / "got"))


def test_checksum_detects_wrong_bytes(
    s3: S3, unruly: Unruly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.md5(unruly.data).hexdigest()
    unruly.etag = f'"{digest}"'
    monkeypatch.setenv("AWS_ENDPOINT_URL", unruly.url.rpartition("/")[0])
    shard = ShardFile(url="s3://pairs/00000.tar", size=len(unruly.data), version=digest)
    unruly.script = ["other"]
    assert download(shard, tmp_path / "got") == zlib.crc32(unruly.data)
    unruly.script = ["short", "short"]
    assert download(shard, tmp_path / "got") == zlib.crc32(unruly.data)
    unruly.script = ["other"] * 20
    assert "checksum" in error_of(lambda: download(shard, tmp_path / "got"))


def test_restarted_download_must_make_progress(
    s3: S3, unruly: Unruly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a file of a few MiB with a wrong checksum would be downloaded forever."""
    monkeypatch.setattr(transfer, "PATIENCE", replace(transfer.PATIENCE, stall_seconds=20.0))
    unruly.data = os.urandom(3 << 19)
    unruly.etag = f'"{hashlib.md5(unruly.data).hexdigest()}"'
    unruly.script = ["other"] * 99
    monkeypatch.setenv("AWS_ENDPOINT_URL", unruly.url.rpartition("/")[0])
    message = error_of(lambda: download(whole("s3://pairs/00000.tar"), tmp_path / "got"))
    assert "the checksum differs from the one stated by the store; gave up after 8 tries" in message
    assert len(unruly.requests) == 8


def test_unreachable_host_and_invalid_urls_raise_error(tmp_path: Path) -> None:
    message = error_of(lambda: read_range(whole("http://u:p-word@127.0.0.1:9/0.tar?X-Sig=s1gn4ture"), 0, 9))
    assert message.startswith("http://127.0.0.1:9/0.tar: the connection failed")
    assert "invalid URL" in error_of(lambda: describe_files(["http://[x/0.tar"]))
    assert "gopher:// is not supported" in error_of(lambda: describe_files(["gopher://x/0.tar"]))


def test_server_without_ranges_rejects_range_reads(nginx: Nginx, tmp_path: Path) -> None:
    data = os.urandom(100_000)
    nginx.put("0.tar", data)
    [shard] = describe_files([nginx.url("0.tar", of="whole/")])
    assert shard.size == len(data)
    assert download(shard, tmp_path / "got") == zlib.crc32(data)
    for start, stop in ((0, 10), (10, 20), (0, len(data))):
        message = error_of(partial(read_range, shard, start, stop))
        assert message.startswith(f"{shard.url}: the server does not support byte ranges")
        assert message.endswith("set data.cache_gb (--cache-gb) above 0")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def test_server_without_ranges_is_reported_before_samples_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's http.server ignores ranges."""
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path / "cache"))
    with DatasetWriter(tmp_path / "set", samples_per_shard=4) as writer:
        for number in range(8):
            record = Record(key=f"{number}", image=b"image", extension="jpg", caption="text")
            writer.write("train", record)
        writer.finish({})
    handler = partial(_Quiet, directory=str(tmp_path / "set"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        shards = find_shards(f"http://127.0.0.1:{server.server_port}/train/{{0..1}}.tar")
        message = error_of(lambda: Shards.of(shards, cache=None))
        assert len(Shards.of(shards, cache=ShardCache(tmp_path / "shards", 1 << 30))) == 8
        assert (
            error_of(lambda: Shards.of(shards, cache=None)) == message
        )  # also after the samples were counted
        server.shutdown()
        thread.join()
    assert "/train/0.tar: the server does not support byte ranges" in message and "data.cache_gb" in message


def test_local_write_errors_are_not_retried(nginx: Nginx, tmp_path: Path) -> None:
    [shard] = describe_files([nginx.put("0.tar", bytes(100_000))])
    assert "No space left" in error_of(lambda: download(shard, Path("/dev/full")))
    assert "Is a directory" in error_of(lambda: download(shard, tmp_path))
    longer = tmp_path / "got"
    longer.write_bytes(bytes(200_000))
    download(shard, longer)
    assert longer.stat().st_size == 100_000


# Secrets


def test_shown_url_has_no_credentials_or_query() -> None:
    for url, wanted in (
        ("s3://pairs/set/0.tar", "s3://pairs/set/0.tar"),
        ("https://u:p-word@host:80/a/0.tar?X-Amz-Signature=s1gn4ture#t0ken", "https://host:80/a/0.tar"),
        ("https://t0ken@host/ab/0.tar", "https://host/ab/0.tar"),
        ("https://host/a@b/0.tar", "https://… 0.tar"),
        ("http://u:p-word/t0ken@host/0.tar", "http://… 0.tar"),
        ("http://u:p-word?t0ken@host/0.tar", "http://… 0.tar"),
        ("http://host?t0ken=a", "http://…"),
        ("https://[::1]:8080/0.tar", "https://[::1]:8080/0.tar"),
        ("hf://datasets/who/what@main/0.tar", "hf://datasets/who/what@main/0.tar"),
        ("pipe:curl -s -H 'Auth: t0ken' https://host/00001.tar?sig=s1gn4ture", "pipe:curl … 00001.tar"),
        ("pipe:KEY=t0ken /bin/cat 1.tar | tr a b", "pipe:cat … 1.tar"),
        ("/a/0.tar?x", "/a/0.tar?x"),
        ("https://host/a\nb.tar", "https://host/a b.tar"),
    ):
        assert redact_url(url) == wanted
    assert len(redact_url("https://host/" + "a" * 9999)) < 310


@given(
    user=st.text(st.sampled_from("a:/?#@%[].0"), max_size=5) | st.text(max_size=5),
    word=st.text(st.sampled_from("a:/?#@%[].0"), max_size=5) | st.text(max_size=9),
    path=st.from_regex(r"[a-z/]{0,9}", fullmatch=True),
    query=st.text(max_size=20),
)
def test_shown_url_never_contains_secrets(user: str, word: str, path: str, query: str) -> None:
    for url in (f"https://{user}:Zq{word}Zq@host/{path}?s=Zq{query}#Zq", f"s3://pairs/{path}?s=Zq{query}#Zq"):
        assert "Zq" not in redact_url(url)


def test_credentials_in_url_are_used_and_not_logged(
    nginx: Nginx, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    nginx.put("0.tar", bytes(1000))
    url = nginx.url("0.tar?X-Amz-Signature=s1gn4ture", of="secret/").replace("//", "//u:p-word@")
    [shard] = describe_files([url])
    assert shard.size == 1000 and shard.url == url
    folder = nginx.url("", of="secret/").replace("//", "//u:p-word@")
    assert [one.url for one in list_folder(folder)] == [url.partition("?")[0]]
    wrong = url.replace("p-word", "wrong-p-word")
    assert "status 401" in error_of(lambda: describe_files([wrong]))
    assert "status 403" in error_of(lambda: describe_files([nginx.url("0.tar?token=t0ken", of="forbidden/")]))
    nginx.busy(True)
    assert "503" in error_of(lambda: download(shard, tmp_path / "got"))
    nginx.kill()
    assert "the connection failed" in error_of(lambda: read_range(shard, 0, 9))
    assert "trying again" in caplog.text
    assert not any(secret in caplog.text for secret in SECRETS)


def test_credentials_in_netrc_are_used(nginx: Nginx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nginx.put("0.tar", bytes(1000))
    url = nginx.url("0.tar", of="secret/")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert "status 401" in error_of(lambda: describe_files([url]))
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login u password p-word\n")
    assert describe_files([url])[0].size == 1000


def test_s3_without_credentials_raises_error(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    message = error_of(lambda: describe_files(["s3://pairs/0.tar"]))
    assert message.startswith("s3://pairs/0.tar: no credentials in the environment") and "ANON" in message


@pytest.mark.parametrize(
    ("protocol", "module", "extra"),
    [
        ("s3", "s3fs", "remote"),
        ("https", "fsspec", "remote"),
        ("hf", "aiohttp", "remote"),
        ("gs", "gcsfs", "gs"),
    ],
)
def test_missing_library_names_the_extra(
    protocol: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = pytest.importorskip("fsspec.registry")
    monkeypatch.setattr(transfer, "_clients", {})
    monkeypatch.delitem(registry._registry, protocol, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    message = error_of(lambda: describe_files([f"{protocol}://datasets/who/0.tar"]))
    assert message == f"{protocol}:// needs: pip install -e '.[{extra}]'"
    assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_number_of_retries_is_bounded_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(transfer, "PATIENCE", transfer.Patience())
    attempts = transfer.Attempts("s3://pairs/0.tar")
    error = transfer.http_error(503, wait=9e9)
    with pytest.raises(DataError, match="gave up after 8 tries"):
        while True:
            attempts.failed(error)
    assert len(slept) == 7 and max(slept) <= 30.0
    attempts = transfer.Attempts("s3://pairs/0.tar")
    for _ in range(20):  # two MiB arrive between the failures
        attempts.failed(transfer.http_error(500))
        attempts.received(2 << 20)

"""Shards in stores, read from real servers that fail in every way that servers do."""

import hashlib
import io
import logging
import multiprocessing
import os
import sys
import tarfile
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipkit.errors import DataError
from clipkit.tar import tar_files, tar_files_of
from data import patience, store
from data.shard_file import ShardFile
from data.store import RangedBytes, describe, download, list_folder, read_range, read_text, shown
from tests.data import servers
from tests.data.servers import S3, Nginx, Unruly

impatient = servers.impatient
nginx = servers.nginx
s3 = servers.s3
s3_server = servers.s3_server
unruly = servers.unruly

SECRETS = ("p-word", "s1gn4ture", "secret-of-a-test", "t0ken")


def whole(url: str) -> ShardFile:
    return ShardFile(url=url, size=-1, version="")


def error_of(work: Callable[[], object]) -> str:
    """The one line that something fails with."""
    with pytest.raises(DataError) as caught:
        work()
    message = str(caught.value)
    assert "\n" not in message and not any(secret in message for secret in SECRETS), message
    return message


def tar_of(path: Path, sizes: list[int]) -> bytes:
    """A tar of samples with pictures of these sizes."""
    with tarfile.open(path, "w") as tar:
        for number, size in enumerate(sizes):
            for name, data in ((f"{number:05d}.jpg", os.urandom(size)), (f"{number:05d}.txt", b"a caption")):
                about = tarfile.TarInfo(name)
                about.size = len(data)
                tar.addfile(about, io.BytesIO(data))
    return path.read_bytes()


# What is there


def test_folder_of_a_web_server(nginx: Nginx) -> None:
    names = [f"{number}.tar" for number in range(12)]
    for number, name in enumerate(names):
        nginx.put(f"set/{name}", bytes(number))
    nginx.put("set/card.json", b"{}")
    nginx.put("set/more/0.tar", b"")
    nginx.put("set/nshards.txt", b"12\n")
    for url in (nginx.url("set"), nginx.url("set/"), nginx.url("set/?token=t0ken#part")):
        shards = list_folder(url)
        assert [shard.name for shard in shards] == names  # 10 after 9
        assert [shard.size for shard in shards] == list(range(12))
        assert all(shard.url == nginx.url(f"set/{shard.name}") and shard.version for shard in shards)
    assert list_folder(nginx.url("set/more")) == describe([nginx.url("set/more/0.tar")])
    assert list_folder(nginx.url("")) == []
    assert "no such folder" in error_of(lambda: list_folder(nginx.url("nothing")))
    assert read_text(nginx.url("set/nshards.txt"), limit=3) == "12\n"
    assert read_text(nginx.url("set/0_stats.json"), limit=3) is None
    assert read_text(nginx.url("set/0.tar"), limit=3) == ""
    assert "longer than 2 bytes" in error_of(lambda: read_text(nginx.url("set/nshards.txt"), limit=2))


def test_a_page_links_to_its_own_shards_only(nginx: Nginx) -> None:
    for name in ("a.tar", "with space.tar", "ü.tar"):
        nginx.put(f"page/{name}", b"1")
    links = [
        "a.tar",
        "./a.tar",
        "/page/a.tar",
        nginx.url("page/a.tar"),
        "../a.tar",
        "pipe:touch x.tar",
        "a.tar?x",
    ]
    links += [
        "http://example.org/page/b.tar",
        "//[/x.tar",
        "more/c.tar",
        "file:///etc/x.tar",
        "with%20space.tar",
    ]
    links += ["%C3%BC.tar", "javascript:x.tar"]
    page = "".join(f"<a class=x href='{link}'>x</a>" for link in links) + "<a>no</a><A HREF=a.tar>b.tar"
    nginx.put("page/index.html", page.encode())
    assert [shard.url for shard in list_folder(nginx.url("page"))] == [
        nginx.url(f"page/{name}") for name in ("a.tar", "%C3%BC.tar", "with%20space.tar")
    ]


def test_many_are_described_at_a_time(nginx: Nginx, tmp_path: Path) -> None:
    urls = [nginx.put(f"{number:05d}.tar", bytes(number)) for number in range(100)]
    local = tmp_path / "here.tar"
    local.write_bytes(b"123")
    shards = describe([*urls, str(local), "pipe:cat x"])
    assert [shard.size for shard in shards] == [*range(100), 3, -1]
    assert shards[-2] == ShardFile.at(local) and shards[-1].version == ""
    missing = [nginx.url(f"{number}.tar?sig=s1gn4ture") for number in range(3)]
    message = error_of(lambda: describe([*urls, *missing]))
    assert message.startswith("3 of 103 shards are missing") and message.endswith("/0.tar")
    assert "no such file" in error_of(lambda: describe(missing[:1]))
    assert describe([]) == []


def test_a_store_of_s3(s3: S3, tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    plain = s3.put("set/10.tar", data)
    for name in ("9.tar", "card.json", "more/0.tar"):
        s3.put(f"set/{name}", b"")
    parts = s3.put_in_parts("set/100.tar", [data + bytes(3 << 20), data])
    locked = s3.put("set/200.tar", data, ServerSideEncryption="aws:kms")
    shards = list_folder("s3://pairs/set/")
    assert [shard.url for shard in shards] == ["s3://pairs/set/9.tar", plain, parts, locked]
    assert shards == describe([shard.url for shard in shards])
    assert shards[1].version == hashlib.md5(data).hexdigest() and shards[1].size == len(data)
    for shard, wanted in zip(shards, [b"", data, data + bytes(3 << 20) + data, data], strict=True):
        assert download(shard, tmp_path / "got") == zlib.crc32(wanted)
        assert (tmp_path / "got").read_bytes() == wanted
        assert read_range(shard, 17, 1017) == wanted[17:1017] if wanted else True
    s3.put("set/10.tar", bytes(len(data)))
    for work in (lambda: read_range(shards[1], 0, 9), lambda: download(shards[1], tmp_path / "got")):
        assert "has changed since it was indexed" in error_of(work)
    assert read_text("s3://pairs/set/nshards.txt", limit=9) is None
    assert "no such file" in error_of(lambda: describe(["s3://pairs/none.tar"]))
    assert "no such file" in error_of(lambda: list_folder("s3://nobody/set"))


def test_files_of_other_protocols(tmp_path: Path) -> None:
    data = os.urandom(9 << 20)
    (tmp_path / "0.tar").write_bytes(data)
    (tmp_path / "more").mkdir()
    url = f"file://{tmp_path}"
    [shard] = list_folder(url)
    assert shard.url == f"{url}/0.tar" and [shard] == describe([shard.url])
    assert read_range(shard, 5 << 20, 7 << 20) == data[5 << 20 : 7 << 20]
    assert download(shard, tmp_path / "got") == zlib.crc32(data)
    assert (tmp_path / "got").read_bytes() == data


# Failures


def test_a_server_that_is_killed_in_the_middle(nginx: Nginx, tmp_path: Path) -> None:
    data = os.urandom(5 << 20)
    nginx.put("0.tar", data)
    [shard] = describe([nginx.url("0.tar", of="slow/")])
    sizes: list[int] = []

    def kill(size: int) -> None:
        sizes.append(size)
        if len(sizes) in (1, 3):
            nginx.kill()
            threading.Timer(0.1, nginx.start).start()

    assert download(shard, tmp_path / "got", room=kill) == zlib.crc32(data)
    assert (tmp_path / "got").read_bytes() == data
    starts = [int(one.range[6:-1]) for one in nginx.requests() if one.range.endswith("-")]
    assert starts and all(start > 0 for start in starts)  # none began again
    assert sizes == sorted(sizes)


def test_a_server_that_is_busy_for_a_while(nginx: Nginx, tmp_path: Path) -> None:
    nginx.put("0.tar", bytes(1000))
    nginx.busy(True)
    threading.Timer(0.2, nginx.busy, [False]).start()
    [shard] = describe([nginx.url("0.tar")])
    assert shard.size == 1000
    nginx.busy(True)
    message = error_of(lambda: download(shard, tmp_path / "got"))
    assert "status 503" in message and "8 tries" in message


@pytest.mark.parametrize("fault", ["short", "stall", "silent", "reset", "502", "429"])
def test_faults_that_pass(fault: str, unruly: Unruly, tmp_path: Path) -> None:
    [shard] = describe([unruly.url])
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


def test_faults_that_do_not_pass(unruly: Unruly, tmp_path: Path) -> None:
    [shard] = describe([unruly.url])
    works = (lambda: read_range(shard, 10, 99), lambda: download(shard, tmp_path / "got"))
    for word, said in (
        ("etag", "has changed since it was indexed"),
        ("403", "credentials come from the environment"),
        ("401", "credentials come from the environment"),
        ("404", "no such file (status 404)"),
        ("418", "refused (status 418)"),
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
    unruly.script = ["short", "etag"]  # the rest comes from another file
    assert "has changed" in error_of(lambda: download(whole(unruly.url), tmp_path / "got"))


def test_wrong_bytes_are_found_by_the_checksum(
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


def test_nobody_there(tmp_path: Path) -> None:
    message = error_of(lambda: read_range(whole("http://u:p-word@127.0.0.1:9/0.tar?X-Sig=s1gn4ture"), 0, 9))
    assert message.startswith("http://127.0.0.1:9/0.tar: the connection failed")
    assert "no URL" in error_of(lambda: describe(["http://[x/0.tar"]))
    assert "nobody can read gopher://" in error_of(lambda: describe(["gopher://x/0.tar"]))


def test_a_server_without_ranges(nginx: Nginx, tmp_path: Path) -> None:
    data = os.urandom(100_000)
    nginx.put("0.tar", data)
    [shard] = describe([nginx.url("0.tar", of="whole/")])
    assert shard.size == len(data)
    assert download(shard, tmp_path / "got") == zlib.crc32(data)
    assert read_range(shard, 0, 10) == data[:10]
    assert "use the cache" in error_of(lambda: read_range(shard, 10, 20))


def test_a_full_disk_is_no_failure_of_the_store(nginx: Nginx, tmp_path: Path) -> None:
    [shard] = describe([nginx.put("0.tar", bytes(100_000))])
    assert "No space left" in error_of(lambda: download(shard, Path("/dev/full")))
    assert "Is a directory" in error_of(lambda: download(shard, tmp_path))
    longer = tmp_path / "got"
    longer.write_bytes(bytes(200_000))
    download(shard, longer)
    assert longer.stat().st_size == 100_000


# Secrets


def test_what_is_shown_of_a_url() -> None:
    for url, wanted in (
        ("s3://pairs/set/0.tar", "s3://pairs/set/0.tar"),
        ("https://u:p-word@host:80/a/0.tar?X-Amz-Signature=s1gn4ture#t0ken", "https://host:80/a/0.tar"),
        ("https://t0ken@host/a@b/0.tar", "https://host/a@b/0.tar"),
        ("http://u:p-word/t0ken@host/0.tar", "http://…"),
        ("http://u:p-word?t0ken@host/0.tar", "http://…"),
        ("http://host?t0ken=a/0.tar", "http://…"),
        ("https://[::1]:8080/0.tar", "https://[::1]:8080/0.tar"),
        ("hf://datasets/who/what@main/0.tar", "hf://datasets/who/what@main/0.tar"),
        ("pipe:curl -s -H 'Auth: t0ken' https://host/00001.tar?sig=s1gn4ture", "pipe:curl … 00001.tar"),
        ("pipe:KEY=t0ken /bin/cat 1.tar | tr a b", "pipe:cat … 1.tar"),
        ("/a/0.tar?x", "/a/0.tar?x"),
        ("https://host/a\nb.tar", "https://host/a b.tar"),
    ):
        assert shown(url) == wanted
    assert len(shown("https://host/" + "a" * 9999)) < 310


@given(
    user=st.text(max_size=9),
    word=st.text(max_size=20),
    path=st.from_regex(r"[a-z/]{0,9}", fullmatch=True),
    query=st.text(max_size=20),
)
def test_no_secret_is_shown(user: str, word: str, path: str, query: str) -> None:
    url = f"https://{user}:Zq{word}Zq@host/{path}?s=Zq{query}#Zq"
    assert "Zq" not in shown(url)


def test_credentials_of_a_url_are_used_and_not_told(
    nginx: Nginx, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    nginx.put("0.tar", bytes(1000))
    url = nginx.url("0.tar?X-Amz-Signature=s1gn4ture", of="secret/").replace("//", "//u:p-word@")
    [shard] = describe([url])
    assert shard.size == 1000 and shard.url == url
    folder = nginx.url("", of="secret/").replace("//", "//u:p-word@")
    assert [one.url for one in list_folder(folder)] == [url.partition("?")[0]]
    wrong = url.replace("p-word", "wrong-p-word")
    assert "status 401" in error_of(lambda: describe([wrong]))
    assert "status 403" in error_of(lambda: describe([nginx.url("0.tar?token=t0ken", of="forbidden/")]))
    nginx.busy(True)
    assert "503" in error_of(lambda: download(shard, tmp_path / "got"))
    nginx.kill()
    assert "the connection failed" in error_of(lambda: read_range(shard, 0, 9))
    assert "trying again" in caplog.text
    assert not any(secret in caplog.text for secret in SECRETS)


def test_s3_without_credentials(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    message = error_of(lambda: describe(["s3://pairs/0.tar"]))
    assert message.startswith("s3://pairs/0.tar: access is denied") and "environment" in message


def test_a_library_that_is_missing(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    message = error_of(lambda: describe(["s3://pairs/0.tar"]))
    assert message == "s3:// needs pip install 'clipkit[remote]'"


# Streams


def test_the_output_of_a_command(tmp_path: Path) -> None:
    data = os.urandom(300_000)
    (tmp_path / "0.tar").write_bytes(data)
    shard = whole(f"pipe:cat {tmp_path}/0.tar")
    assert download(shard, tmp_path / "got") == zlib.crc32(data)
    assert (tmp_path / "got").read_bytes() == data
    assert "nobody knows its size" in error_of(lambda: RangedBytes(shard))
    assert "use the cache" in error_of(lambda: read_range(shard, 5, 9))
    assert "no folder" in error_of(lambda: list_folder(shard.url))
    # half of it, and a failure; then all
    flag = tmp_path / "flag"
    once = f"[ -e {flag} ] || {{ touch {flag}; head -c 999 {tmp_path}/0.tar; exit 3; }}; cat {tmp_path}/0.tar"
    assert download(whole(f"pipe:{once}"), tmp_path / "got") == zlib.crc32(data)
    assert (tmp_path / "got").read_bytes() == data
    assert "failed with status 3" in error_of(
        lambda: download(whole("pipe:echo p-word; exit 3"), tmp_path / "x")
    )
    assert "status 127" in error_of(lambda: download(whole("pipe:no-such-program s1gn4ture"), tmp_path / "x"))


def test_a_command_that_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE", replace(patience.PATIENCE, tries=2))
    message = error_of(lambda: download(whole("pipe:echo $$; exec sleep 77.7"), tmp_path / "got"))
    assert "has written nothing for" in message
    child = int((tmp_path / "got").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


# Header scans


@pytest.mark.parametrize(
    ("sizes", "requests", "share"),
    [([3000] * 2000, 9, 1.0), ([60_000] * 200, 9, 1.0), ([4 << 20] * 8, 10, 0.03), ([], 1, 1.0)],
)
def test_a_scan_of_headers(
    sizes: list[int], requests: int, share: float, nginx: Nginx, tmp_path: Path
) -> None:
    data = tar_of(tmp_path / "0.tar", sizes)
    [shard] = describe([nginx.put("0.tar", data)])
    content = RangedBytes(shard)
    assert list(tar_files_of("x", content)) == list(tar_files(tmp_path / "0.tar"))
    assert content.requests <= requests
    assert content.bytes_read <= share * len(data)


@given(st.data())
def test_ranged_bytes_are_bytes(draws: st.DataObject) -> None:
    data = os.urandom(300_000)
    content = RangedBytes(ShardFile(url="http://x/0.tar", size=len(data), version=""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "read_range", lambda _, start, stop: data[start:stop])
        patch.setattr(store, "_SMALLEST_BLOCK", draws.draw(st.integers(1, 9000)))
        for _ in range(8):
            start, length = draws.draw(st.integers(0, 310_000)), draws.draw(st.integers(0, 100_000))
            assert content[start : start + length] == data[start : start + length]
    assert len(content) == len(data)


# Processes and threads


def _read_in_child(url: str, size: int, queue: "multiprocessing.Queue[bytes]") -> None:
    queue.put(hashlib.sha256(read_range(whole(url), 0, size)).digest())


def test_forked_processes_and_threads_read_too(nginx: Nginx, s3: S3) -> None:
    data = os.urandom(2 << 20)
    urls = [nginx.put("0.tar", data), s3.put("0.tar", data)]
    expected = hashlib.sha256(data).digest()
    context = multiprocessing.get_context("fork")
    for url in urls:  # the parent has a client of its own before it forks
        assert read_range(whole(url), 0, len(data)) == data
    queue: multiprocessing.Queue[bytes] = context.Queue()
    children = [context.Process(target=_read_in_child, args=(url, len(data), queue)) for url in urls * 2]
    for child in children:
        child.start()
    with ThreadPoolExecutor(8) as pool:
        parts = pool.map(lambda start: read_range(whole(urls[start % 2]), start, start + 999), range(200))
        assert all(part == data[start : start + 999] for start, part in enumerate(parts))
    assert [queue.get(timeout=20) for _ in children] == [expected] * 4
    for child in children:
        child.join(20)
        assert child.exitcode == 0


def test_patience_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(patience, "PATIENCE", patience.Patience())
    attempts = patience.Attempts("s3://pairs/0.tar")
    error = patience.of_status(503, wait=9e9)
    with pytest.raises(DataError, match="gave up after 8 tries"):
        while True:
            attempts.failed(error)
    assert len(slept) == 7 and max(slept) <= 30.0
    attempts = patience.Attempts("s3://pairs/0.tar")
    for _ in range(20):  # much comes between the failures
        attempts.failed(patience.of_status(500))
        attempts.received(2 << 20)

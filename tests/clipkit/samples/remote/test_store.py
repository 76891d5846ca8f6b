"""Tests of shards in remote stores: listings, byte ranges, whole files and header scans."""

import hashlib
import io
import json
import multiprocessing
import os
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from clipkit.samples.remote import store, transfer
from clipkit.samples.remote.store import (
    RangedBytes,
    ShardFile,
    describe_files,
    download,
    download_all,
    list_folder,
    read_range,
    read_text,
)
from clipkit.samples.tar import list_tar_content, list_tar_files
from tests.clipkit.samples.remote import servers
from tests.clipkit.samples.remote.servers import S3, Nginx, error_of, whole

impatient = servers.impatient
nginx = servers.nginx
s3 = servers.s3


def tar_of(path: Path, sizes: list[int]) -> bytes:
    """Return a tar of samples with images of these sizes."""
    with tarfile.open(path, "w") as tar:
        for number, size in enumerate(sizes):
            for name, data in ((f"{number:05d}.jpg", os.urandom(size)), (f"{number:05d}.txt", b"a caption")):
                about = tarfile.TarInfo(name)
                about.size = len(data)
                tar.addfile(about, io.BytesIO(data))
    return path.read_bytes()


# Listings


def test_web_server_folder_is_listed(nginx: Nginx) -> None:
    names = [f"{number}.tar" for number in range(12)]
    for number, name in enumerate(names):
        nginx.put(f"set/{name}", bytes(number))
    nginx.put("set/card.json", b"{}")
    nginx.put("set/more/0.tar", b"")
    nginx.put("set/nshards.txt", b"12\n")
    for url in (nginx.url("set"), nginx.url("set/"), nginx.url("set/?token=t0ken#part")):
        shards = list_folder(url)
        assert [shard.name for shard in shards] == names  # numeric order: 10 after 9
        assert [shard.size for shard in shards] == list(range(12))
        assert all(shard.url == nginx.url(f"set/{shard.name}") and shard.version for shard in shards)
    assert list_folder(nginx.url("set/more")) == describe_files([nginx.url("set/more/0.tar")])
    assert list_folder(nginx.url("")) == []
    assert list_folder(nginx.url("nothing")) == []
    assert read_text(nginx.url("set/nshards.txt"), limit=3) == "12\n"
    assert read_text(nginx.url("set/0_stats.json"), limit=3) is None
    assert read_text(nginx.url("set/0.tar"), limit=3) == ""
    assert "longer than 2 bytes" in error_of(lambda: read_text(nginx.url("set/nshards.txt"), limit=2))


def test_listing_contains_only_shards_of_the_folder(nginx: Nginx) -> None:
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


def test_many_shards_are_described_in_one_call(nginx: Nginx, tmp_path: Path) -> None:
    urls = [nginx.put(f"{number:05d}.tar", bytes(number)) for number in range(100)]
    local = tmp_path / "here.tar"
    local.write_bytes(b"123")
    shards = describe_files([*urls, str(local), "pipe:cat x"])
    assert [shard.size for shard in shards] == [*range(100), 3, -1]
    assert shards[-2] == ShardFile.at(local) and shards[-1].version == ""
    missing = [nginx.url(f"{number}.tar?sig=s1gn4ture") for number in range(3)]
    message = error_of(lambda: describe_files([*urls, *missing]))
    assert message.startswith("3 of 103 shards are missing") and message.endswith("/0.tar")
    assert "no such file" in error_of(lambda: describe_files(missing[:1]))
    assert describe_files([]) == []


def test_s3_listing_download_and_ranges(s3: S3, tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    plain = s3.put("set/10.tar", data)
    for name in ("9.tar", "card.json", "more/0.tar"):
        s3.put(f"set/{name}", b"")
    parts = s3.put_in_parts("set/100.tar", [data + bytes(3 << 20), data])
    locked = s3.put("set/200.tar", data, ServerSideEncryption="aws:kms")
    shards = list_folder("s3://pairs/set/")
    assert [shard.url for shard in shards] == ["s3://pairs/set/9.tar", plain, parts, locked]
    assert shards == describe_files([shard.url for shard in shards])
    assert shards[1].version == hashlib.md5(data).hexdigest() and shards[1].size == len(data)
    for shard, wanted in zip(shards, [b"", data, data + bytes(3 << 20) + data, data], strict=True):
        assert download(shard, tmp_path / "got") == zlib.crc32(wanted)
        assert (tmp_path / "got").read_bytes() == wanted
        assert read_range(shard, 17, 1017) == wanted[17:1017] if wanted else True
    s3.put("set/10.tar", bytes(len(data)))
    for work in (lambda: read_range(shards[1], 0, 9), lambda: download(shards[1], tmp_path / "got")):
        assert "has changed since it was indexed" in error_of(work)
    assert read_text("s3://pairs/set/nshards.txt", limit=9) is None
    assert "no such file" in error_of(lambda: describe_files(["s3://pairs/none.tar"]))
    assert list_folder("s3://nobody/set") == []


def test_hugging_face_listing_download_and_ranges(
    nginx: Nginx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(100_000)
    digest = hashlib.sha256(data).hexdigest()
    nginx.put("blobs/0.tar", data)
    about = {"type": "file", "path": "set/0.tar", "oid": "0" * 40, "size": len(data)}
    about["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
    nginx.put(
        "about", json.dumps({"id": "who/what", "_id": "1", "sha": "1", "siblings": [], "tags": []}).encode()
    )
    nginx.put("tree", json.dumps([about, {"type": "directory", "path": "set/more", "oid": "1"}]).encode())
    nginx.add(f"""
        location = /api/datasets/who/what {{ default_type application/json; try_files /about =404; }}
        location /api/datasets/who/what/tree/main {{ default_type application/json; try_files /tree =404; }}
        location /datasets/who/what/resolve/main/set/ {{
            add_header X-Linked-ETag '"{digest}"' always;
            if ($http_authorization != "Bearer t0ken") {{ return 401; }}
            return 302 /blobs/0.tar;
        }}
    """)
    hub = nginx.url("").rstrip("/")  # HF_ENDPOINT is read only once, when the library is imported
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub)
    template = f"{hub}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transfer, "_clients", {})
    monkeypatch.setenv("HF_TOKEN", "t0ken")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login u password p-word\n")  # as git users have
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    [shard] = list_folder("hf://datasets/who/what/set")
    assert shard == ShardFile(url="hf://datasets/who/what/set/0.tar", size=len(data), version=digest)
    assert describe_files([shard.url]) == [shard]
    assert download(shard, tmp_path / "got") == zlib.crc32(data)
    assert read_range(shard, 5, 500) == data[5:500]
    nginx.put("blobs/0.tar", bytes(len(data)))
    assert "checksum" in error_of(lambda: download(shard, tmp_path / "got"))
    monkeypatch.setenv("HF_TOKEN", "other")
    assert "status 401" in error_of(lambda: describe_files([shard.url]))
    assert "not a file of a repository" in error_of(lambda: describe_files(["hf://x"]))


def test_file_protocol_listing_download_and_ranges(tmp_path: Path) -> None:
    data = os.urandom(9 << 20)
    (tmp_path / "0.tar").write_bytes(data)
    (tmp_path / "more").mkdir()
    url = f"file://{tmp_path}"
    [shard] = list_folder(url)
    assert shard.url == f"{url}/0.tar" and [shard] == describe_files([shard.url])
    assert read_range(shard, 5 << 20, 7 << 20) == data[5 << 20 : 7 << 20]
    assert download(shard, tmp_path / "got") == zlib.crc32(data)
    assert (tmp_path / "got").read_bytes() == data


def test_files_that_differ_only_in_their_query_are_downloaded_again(tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    for name in "ab":
        source = tmp_path / name / "0.tar"
        source.parent.mkdir()
        source.write_bytes(name.encode() * 9)
        file = ShardFile(url=f"pipe:cat {source}", size=9, version="")
        (path,) = download_all([file], folder)
        assert path.read_bytes() == source.read_bytes()
        assert all(str(source) not in file.read_text() for file in folder.iterdir())


# Streams


def test_command_output_is_downloaded(tmp_path: Path) -> None:
    data = os.urandom(300_000)
    (tmp_path / "0.tar").write_bytes(data)
    shard = whole(f"pipe:cat {tmp_path}/0.tar")
    assert download(shard, tmp_path / "got") == zlib.crc32(data)
    assert (tmp_path / "got").read_bytes() == data
    assert "its size is unknown" in error_of(lambda: RangedBytes(shard))
    assert "data.cache_gb" in error_of(lambda: read_range(shard, 5, 9))
    assert "not a folder" in error_of(lambda: list_folder(shard.url))
    # half of the output and a failure, then all of it
    flag = tmp_path / "flag"
    once = f"[ -e {flag} ] || {{ touch {flag}; head -c 999 {tmp_path}/0.tar; exit 3; }}; cat {tmp_path}/0.tar"
    assert download(whole(f"pipe:{once}"), tmp_path / "got") == zlib.crc32(data)
    assert (tmp_path / "got").read_bytes() == data
    assert "failed with status 3" in error_of(
        lambda: download(whole("pipe:echo p-word; exit 3"), tmp_path / "x")
    )
    assert "status 127" in error_of(lambda: download(whole("pipe:no-such-program s1gn4ture"), tmp_path / "x"))


def test_stalled_command_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PATIENCE", replace(transfer.PATIENCE, tries=2))
    message = error_of(lambda: download(whole("pipe:echo $$; exec sleep 77.7"), tmp_path / "got"))
    assert "has written nothing for" in message
    child = int((tmp_path / "got").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


# Header scans


@pytest.mark.parametrize(
    ("sizes", "requests", "share"),
    [([3000] * 2000, 9, 1.01), ([60_000] * 200, 9, 1.01), ([4 << 20] * 8, 10, 0.03), ([], 1, 1.0)],
)
def test_header_scan_uses_few_requests(
    sizes: list[int], requests: int, share: float, nginx: Nginx, tmp_path: Path
) -> None:
    data = tar_of(tmp_path / "0.tar", sizes)
    [shard] = describe_files([nginx.put("0.tar", data)])
    content = RangedBytes(shard)
    assert list(list_tar_content("x", content)) == list(list_tar_files(tmp_path / "0.tar"))
    assert content.requests <= requests
    assert content.bytes_read <= share * len(data)


@given(st.data())
def test_ranged_bytes_slice_like_bytes(draws: st.DataObject) -> None:
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


def test_forked_processes_and_threads_can_read(nginx: Nginx, s3: S3) -> None:
    data = os.urandom(2 << 20)
    urls = [nginx.put("0.tar", data), s3.put("0.tar", data)]
    expected = hashlib.sha256(data).digest()
    context = multiprocessing.get_context("fork")
    for url in urls:  # the parent has a client before it forks
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


SIGNED = "https://b.s3.amazonaws.com/0.tar?versionId=1&X-Amz-Date={0}&X-Amz-Expires=60&X-Amz-Signature=a{0}"


@pytest.mark.parametrize("url", [SIGNED, "https://storage.googleapis.com/b/0.tar?X-Goog-Signature={0}"])
def test_signatures_of_urls_do_not_name_another_file(url: str) -> None:
    def identify(url: str, version: str = "etag", size: int = 9) -> str:
        return ShardFile(url=url, size=size, version=version).identity

    first = identify(url.format(1))
    assert first == identify(url.format(2))
    others = {
        identify(url.format(1).replace("0.tar", "1.tar")),
        identify(url.format(1).replace("?", "?part=1&")),
        identify(url.format(1), version="other"),
        identify(url.format(1), size=8),
        identify(url.format(1), version=""),
        identify(url.format(2), version=""),
    }
    if "versionId" in url:
        others.add(identify(url.format(1).replace("versionId=1", "versionId=2")))
    assert len(others) == 6 + ("versionId" in url) and first not in others
    assert identify("pipe:cat 0.tar?X-Amz-Date=1", version="", size=-1).startswith(
        "pipe:cat 0.tar?X-Amz-Date=1\n"
    )

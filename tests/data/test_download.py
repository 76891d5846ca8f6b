"""Tests of downloading the images of a table from a server that fails in many ways."""

import csv
import errno
import fcntl
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clipkit.config import DataConfig, PixelsConfig
from clipkit.errors import ConfigError, DataError
from clipkit.files import FileLock
from data import web
from data.__main__ import main
from data.download import DownloadReport, download
from data.inspect.samples import missing_numbers
from data.options import DownloadOptions, FetchOptions, PackOptions
from data.pack import pack
from data.selection import Selection
from data.shards.manifest import make_manifest
from data.shards.samples import find_shards
from data.training_data import packed_images
from eval.readers import open_dataset
from tests.clipkit.samples.remote import servers
from tests.clipkit.samples.remote.servers import Nginx

pytest.importorskip("aiohttp")
parquet = pytest.importorskip("pyarrow.parquet")
nginx = servers.nginx

QUICK = FetchOptions(allow_private=True, timeout=2.0, retries=1, max_mb=1)


def jpeg(number: int, side: int = 40) -> bytes:
    noise = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "JPEG")
    return buffer.getvalue()


@dataclass
class Server:
    """A web server; the first part of the path selects the response."""

    url: str
    delay: float = 0.0  # maximum, drawn for each response
    down: set[str] = field(default_factory=set)  # names below /flaky/ that fail
    requests: Counter[str] = field(default_factory=Counter)


@pytest.fixture
def server() -> Iterator[Server]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", *, promised: int = 0, **headers: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(promised or len(body)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            with lock:
                served.requests[self.path] += 1
                count = served.requests[self.path]
            if served.delay:
                time.sleep(random.uniform(0, served.delay))
            kind, _, name = self.path[1:].partition("/")
            body = jpeg(int(name.partition(".")[0])) if name.partition(".")[0].isdigit() else b""
            match kind:
                case "img":
                    self.answer(200, body)
                case "moved":
                    self.answer(302, Location=f"/img/{name}")
                case "loop":
                    self.answer(302, Location=self.path)
                case "inside":
                    self.answer(302, Location=f"{served.url.replace('127.0.0.1', '127.0.0.2')}/img/{name}")
                case "encoded":
                    self.answer(200, body, Content_Encoding="unknown")
                case "file":
                    self.answer(302, Location="file:///etc/passwd")
                case "limited" if count == 1:
                    self.answer(429, Retry_After="1")
                case "passing" if count == 1:
                    self.answer(503)
                case "limited" | "passing":
                    self.answer(200, body)
                case "flaky" if name in served.down:
                    self.answer(503)
                case "flaky":
                    self.answer(200, body)
                case "denied":
                    self.answer(403)
                case "busy":
                    self.answer(503)
                case "refused":
                    self.answer(429, Retry_After="0.05")
                case "cut":
                    self.answer(200, body[: len(body) // 2], promised=len(body))
                    self.close_connection = True
                case "broken":
                    self.answer(200, body[: len(body) // 2])
                case "html":
                    self.answer(200, b"<html>not found</html>")
                case "empty":
                    self.answer(200)
                case "big":
                    self.send_response(200)
                    self.end_headers()
                    self.close_connection = True
                    for _ in range(40):
                        self.wfile.write(bytes(2**16))
                case "slow":
                    self.send_response(200)
                    self.end_headers()
                    self.close_connection = True
                    for at in range(100):
                        self.wfile.write(body[at : at + 1])
                        time.sleep(0.1)
                case "noai":
                    self.answer(200, body, X_Robots_Tag="noai, noarchive")
                case _:
                    self.answer(404)

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:  # if the client disconnects
            pass

    with Quiet(("", 0), Handler) as listening:
        served = Server(f"http://127.0.0.1:{listening.server_address[1]}")
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield served
        listening.shutdown()
        thread.join()


def table(path: Path, urls: list[str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["url", "caption", "lang"])
        writer.writerows([url, f"caption {i}", "en"] for i, url in enumerate(urls))
    return path


def members(tar: Path) -> dict[str, dict[str, bytes]]:
    samples: dict[str, dict[str, bytes]] = {}
    with tarfile.open(tar) as archive:
        for member in archive:
            key, _, extension = member.name.partition(".")
            content = archive.extractfile(member)
            assert content is not None
            samples.setdefault(key, {})[extension] = content.read()
    return samples


def digests(out: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.iterdir())
        if path.suffix in (".tar", ".parquet")
    }


def test_every_row_has_an_image_or_a_cause(server: Server, tmp_path: Path) -> None:
    expected = {
        "img/1.jpg": "", "moved/2.jpg": "", "limited/3.jpg": "", "passing/4.jpg": "",
        "missing/5.jpg": "HTTP 404", "busy/6.jpg": "HTTP 503", "loop/7": "too many redirects",
        "file/8": "invalid URL, or redirected to one", "cut/9.jpg": "truncated or malformed response",
        "broken/10.jpg": "broken or truncated image", "html/11": "not an image in a known format",
        "empty/12": "empty response", "big/13": "more than 1 MiB", "slow/14.jpg": "no complete response in time",
        "noai/15.jpg": "use forbidden by X-Robots-Tag", "encoded/16.jpg": "unsupported Content-Encoding",
    }  # fmt: skip
    urls = {f"{server.url}/{path}": cause for path, cause in expected.items()}
    first = server.url.replace("http", "HTTP") + "/img/1.jpg"
    urls = {first if url.endswith("/img/1.jpg") else url: cause for url, cause in urls.items()}
    urls |= {
        "": "no URL",
        "ftp://example.org/a.jpg": "not a URL that begins with http:// or https://",
        "http://[::1": "invalid URL",
        f"{server.url}/img/1.jpg#again": "image of an earlier row",
        "http://name.invalid/a.jpg": "unknown host",
    }
    rows = [*urls, first]
    out = tmp_path / "out"
    found = download(table(tmp_path / "t.csv", rows), out, DownloadOptions(resize="no"), fetch=QUICK)

    causes = [*urls.values(), "URL of an earlier row, which has the caption"]
    assert (found.rows, found.kept, found.shards) == (len(rows), 4, 1)
    assert found.failures == Counter(cause for cause in causes if cause)
    listing = parquet.read_table(out / "00000.parquet").to_pylist()
    assert [row["error_message"] or "" for row in listing] == causes
    assert [row["url"] or "" for row in listing] == rows
    samples = members(out / "00000.tar")
    assert len(samples) == 4
    for i, (key, sample) in enumerate(samples.items()):
        meta = json.loads(sample["json"])
        assert key == meta["key"] == f"{i:09d}"
        assert sample["jpg"] == jpeg(i + 1)  # the original bytes, without re-encoding
        assert sample["txt"].decode() == meta["caption"] == f"caption {i}"
        assert meta["sha256"] == hashlib.sha256(sample["jpg"]).hexdigest()
        assert {name: meta[name] for name in ("status", "width", "height", "original_width", "lang")} == {
            "status": "success", "width": 40, "height": 40, "original_width": 40, "lang": "en"
        }  # fmt: skip
    stats = json.loads((out / "00000_stats.json").read_bytes())
    assert stats["count"] == len(rows) and stats["successes"] == 4
    assert stats["failed_to_download"] + stats["failed_to_resize"] + stats["duplicates"] == len(rows) - 4
    manifest = make_manifest([find_shards(str(out))], Selection())
    assert manifest.counts.tolist() == [4]
    assert server.requests["/missing/5.jpg"] == 1 and server.requests["/busy/6.jpg"] == 2


def test_urls_one_per_line_have_no_captions(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [f"{server.url}/img/{i}.jpg?crop=1,2;3&i={i}" for i in range(3)]
    (tmp_path / "urls.txt").write_text("\n".join(urls) + "\n")
    out = tmp_path / "out"
    assert main(["download", str(tmp_path / "urls.txt"), str(out), "--allow-private", "--quiet"]) == 0
    assert "no captions: the table has no caption column" in capsys.readouterr().out
    assert [json.loads(sample["json"])["url"] for sample in members(out / "00000.tar").values()] == urls
    assert not any("txt" in sample for sample in members(out / "00000.tar").values())
    lines = ["url,caption", f"{urls[0]},a car", f'"{urls[1]}",a car']
    (tmp_path / "urls.csv").write_text("\n".join(lines))
    found = download(tmp_path / "urls.csv", tmp_path / "few", DownloadOptions(resize="no"), fetch=QUICK)
    assert found.kept == 1 and found.caption_column == "caption"
    assert found.failures == {"more cells than columns: put cells that contain ',' in quotes": 1}


def test_filesystem_without_locks_is_a_warning(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    (tmp_path / "urls.txt").write_text(f"{server.url}/img/1.jpg\n")
    assert (
        download(tmp_path / "urls.txt", tmp_path / "out", DownloadOptions(resize="no"), fetch=QUICK).kept == 1
    )
    assert f"warning: {tmp_path / 'out'} is on a filesystem without file locks" in capsys.readouterr().err


def test_host_that_always_sends_retry_after_is_given_up(server: Server, tmp_path: Path) -> None:
    urls = [f"{server.url}/refused/{i}.jpg" for i in range(60)]
    found = download(
        table(tmp_path / "t.csv", urls),
        tmp_path / "out",
        DownloadOptions(resize="no"),
        fetch=replace(QUICK, per_host=4),
    )
    assert found.failures["HTTP 429"] < 20 and sum(found.failures.values()) == 60
    assert found.failures["host refuses requests (Retry-After)"] > 40


@pytest.fixture
def many(server: Server, tmp_path: Path) -> Path:
    """Write a table of 150 rows: a tenth missing, some URLs and images repeated."""
    draw = random.Random(0)
    paths = [
        f"/img/{draw.randrange(120)}.jpg" if draw.random() < 0.9 else f"/missing/{i}" for i in range(140)
    ]
    paths += [f"/img/{number}.jpg?again" for number in range(10)]
    return table(tmp_path / "many.csv", [server.url + path for path in paths])


SMALL = DownloadOptions(resize="no", samples_per_shard=20)


def test_shards_do_not_depend_on_the_order_of_responses(server: Server, many: Path, tmp_path: Path) -> None:
    server.delay = 0.05
    reports: list[DownloadReport] = []
    for name, connections in (("one", 64), ("two", 64), ("three", 2)):
        reports.append(download(many, tmp_path / name, SMALL, fetch=replace(QUICK, connections=connections)))
    assert digests(tmp_path / "one") == digests(tmp_path / "two") == digests(tmp_path / "three")
    assert reports[0] == reports[1] == reports[2]
    images = [sample["jpg"] for tar in (tmp_path / "one").glob("*.tar") for sample in members(tar).values()]
    assert len(images) == len(set(images)) == reports[0].kept


def test_rows_with_the_same_url_become_one_image(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [
        ("/img/1.jpg", ""), ("/img/1.jpg", "first"), ("/img/2.jpg", "only"), ("/img/1.jpg ", "second"),
        ("/missing/3.jpg", "one"), ("/img/1.jpg", "first"), ("/missing/3.jpg", "two"), ("/img/1.jpg", "third"),
    ]  # fmt: skip
    lines = [f'"{server.url}{path}",{caption},{i}\n' for i, (path, caption) in enumerate(pairs)]
    table = tmp_path / "t.csv"
    table.write_text("url,caption,n\n" + "".join(lines))
    out = tmp_path / "out"
    arguments = ["--samples-per-shard", "3", "--resize", "no", "--allow-private", "--quiet"]
    assert main(["download", str(table), str(out), *arguments]) == 0
    output = capsys.readouterr().out
    added = "URL of an earlier row, which has the caption"
    assert "2  of 8 rows kept" in output and f"4  {added}" in output
    assert "training uses the first, or draws one with data.captions=captions" in output
    found = {key: sample for tar in sorted(out.glob("*.tar")) for key, sample in members(tar).items()}
    assert list(found) == ["000001", "000002"]  # the first rows that can be used
    several, single = (json.loads(sample["json"]) for sample in found.values())
    assert (found["000001"]["txt"], found["000002"]["txt"]) == (b"first", b"only")
    assert several["captions"] == ["first", "second", "third"] and "captions" not in single
    assert several["n"] == ["1", "3", "5", "7"] and single["n"] == "2"
    listing = [row for path in sorted(out.glob("*.parquet")) for row in parquet.read_table(path).to_pylist()]
    assert [row["error_message"] for row in listing] == [
        "empty caption", None, None, added, "HTTP 404", added, added, added
    ]  # fmt: skip
    assert server.requests["/img/1.jpg"] == server.requests["/missing/3.jpg"] == 1

    (out / "00002_stats.json").unlink()
    table.write_text("url,caption,n\n" + "".join(lines).replace("third", "other"))
    with pytest.raises(ConfigError, match=r"00000\.tar was made of other rows of the table"):
        main(["download", str(table), str(out), *arguments])  # the first shard has a caption of the last row


def test_retried_row_has_the_captions_of_all_rows(server: Server, tmp_path: Path) -> None:
    paths = [f"/flaky/{name}.jpg" for name in ("1", "2", "1", "2", "1")]
    rows = table(tmp_path / "t.csv", [server.url + path for path in paths])
    server.down = {"1.jpg"}
    options = DownloadOptions(resize="no", samples_per_shard=2)
    assert download(rows, tmp_path / "out", options, fetch=QUICK).kept == 1
    server.down = set()
    found = download(rows, tmp_path / "out", options, fetch=QUICK, retry_failed=True)
    assert (found.kept, found.rows, list(found.failures.values())) == (2, 5, [3])
    [sample] = members(tmp_path / "out/00000-retry1.tar").values()
    assert json.loads(sample["json"])["captions"] == ["caption 0", "caption 2", "caption 4"]


def test_url_of_more_rows_than_an_image_may_have(server: Server, tmp_path: Path) -> None:
    rows = table(tmp_path / "t.csv", [f"{server.url}/img/1.jpg"] * 103)
    found = download(rows, tmp_path / "out", DownloadOptions(resize="no"), fetch=QUICK)
    assert found.failures == {
        "URL of an earlier row, which has the caption": 99,
        "URL of more than 100 rows: the caption is left out": 3,
    }
    [sample] = members(tmp_path / "out/00000.tar").values()
    assert json.loads(sample["json"])["captions"] == [f"caption {i}" for i in range(100)]


@pytest.mark.long
def test_killed_download_resumes_with_identical_shards(server: Server, many: Path, tmp_path: Path) -> None:
    download(many, tmp_path / "whole", SMALL, fetch=QUICK)
    server.delay = 0.05
    out = tmp_path / "killed"
    program = (
        "import sys; from pathlib import Path; from tests.data.test_download import *\n"
        "download(Path(sys.argv[1]), Path(sys.argv[2]), SMALL, fetch=QUICK)"
    )
    out.mkdir()
    (out / ".00003.tar.0123abcd.partial").write_bytes(b"of an earlier process")
    draw, finished = random.Random(), 0
    while finished < 1:
        process = subprocess.Popen([sys.executable, "-c", program, str(many), str(out)])
        shards = len(list(out.glob("*_stats.json")))
        while process.poll() is None and len(list(out.glob("*_stats.json"))) < shards + 2:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        finished += process.wait() == 0
    assert digests(out) == digests(tmp_path / "whole")
    assert not [path for path in out.iterdir() if "partial" in path.name]


def test_a_download_resumes_only_with_the_rows_that_it_began_with(server: Server, tmp_path: Path) -> None:
    rows = [(f"{server.url}/img/{number}.jpg", f"caption {number}") for number in range(50)]
    out = tmp_path / "out"

    def resume(rows: list[tuple[str, str]], header: str = "url,caption") -> DownloadReport:
        path = tmp_path / f"{header[:3]}.csv"
        path.write_text("\n".join([header, *map(",".join, rows)]) + "\n")
        return download(path, out, SMALL, fetch=QUICK)

    resume(rows)
    (out / "00001_stats.json").unlink()  # as after a kill
    changed = [(url, caption.upper()) for url, caption in rows]
    for other, shard in (
        (rows[::-1], "00000"),  # a file of the same size
        (rows[:45] + rows[:44:-1], "00002"),
        (changed, "00000"),
        ([*rows, (f"{server.url}/img/50.jpg", "appended")], "00002"),
        (rows[:40], "00002"),
        ([], "00000"),
    ):
        with pytest.raises(ConfigError, match=f"{shard}.tar was made of other rows of the table"):
            resume(other)
    assert resume(rows, "link,text").kept == 50  # other names of the same columns
    (out / "00002_stats.json").unlink()
    assert resume([*rows, (f"{server.url}/img/50.jpg", "appended to a full shard")]).kept == 51


def test_captions_with_line_breaks_are_one_caption(server: Server, tmp_path: Path) -> None:
    captions: list[str | list[str] | None] = ["one\ncaption", ["two", "captions\nof an image"], "plain", None]
    captions += ["three\n\nlines", "a\rb", "a\u2028b"]
    path, out = tmp_path / "t.jsonl", tmp_path / "set" / "test"
    rows = [{"url": f"{server.url}/img/{i}.jpg", "caption": caption} for i, caption in enumerate(captions)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert download(path, out, SMALL, fetch=QUICK).failures == {"no caption": 1}
    (out.parent / "dataset_type.txt").write_text("retrieval")
    expected = [(caption,) if isinstance(caption, str) else tuple(caption) for caption in captions if caption]
    assert open_dataset(str(out.parent)).captions == tuple(expected)


def test_training_knows_that_downloaded_images_are_upright(server: Server, tmp_path: Path) -> None:
    """A mixture of packed and downloaded images, both of which are upright, needs no note."""
    download(table(tmp_path / "t.csv", [f"{server.url}/img/1.jpg"]), tmp_path / "web", SMALL, fetch=QUICK)
    images = tmp_path / "images"
    images.mkdir()
    (images / "0.jpg").write_bytes(jpeg(0))
    (images / "0.txt").write_text("caption")
    pack(images, tmp_path / "packed", progress=False)
    pack(images, tmp_path / "as_is", PackOptions(keep_orientation=True), progress=False)
    shutil.copytree(tmp_path / "web", tmp_path / "foreign", ignore=shutil.ignore_patterns("download.json"))
    for names, upright, noted in (
        (["web"], True, False),
        (["packed", "web"], True, False),
        (["foreign"], False, False),
        (["web", "foreign"], False, True),
        (["web", "as_is"], False, True),
    ):
        sources = tuple(str(tmp_path / name) for name in names)
        manifest = make_manifest([find_shards(source) for source in sources], Selection())
        packed = packed_images(
            DataConfig(train=sources), PixelsConfig(), manifest, rank0=True, broadcast=bytes
        )
        assert (packed.upright, packed.background, bool(packed.notes)) == (upright, None, noted)


def listed(out: Path) -> dict[str, str]:
    """Return the cause of the last attempt of each URL."""
    causes: dict[str, str] = {}
    keys: dict[str, str] = {}
    for path in sorted(out.glob("*.parquet"), key=lambda path: path.stat().st_mtime_ns):
        for row in parquet.read_table(path).to_pylist():
            first = row.get("retry_of") or row["key"]
            assert keys.setdefault(row["url"], first) == first
            causes[row["url"]] = row["error_message"] or ""
    return causes


@pytest.mark.parametrize("parts", [1, 2])
def test_retry_adds_only_what_had_failed(server: Server, tmp_path: Path, parts: int) -> None:
    names = [f"{i}.jpg" for i in range(90)]
    server.down = {name for name in names if int(name[:-4]) % 3 == 0 or int(name[:-4]) in range(40, 60)}
    path = table(tmp_path / "t.csv", [f"{server.url}/flaky/{name}" for name in names])
    out = tmp_path / "out"

    def run(retry_failed: bool) -> DownloadReport:
        server.requests.clear()
        for i in range(1, parts + 1):
            part = (i, parts)
            fetch = replace(QUICK, retries=0)
            found = download(path, out, SMALL, fetch=fetch, part=part, retry_failed=retry_failed)
        assert (found.rows, found.kept) == (90, 90 - len(server.down))
        assert sum(found.failures.values()) == len(server.down)
        assert {url for url, cause in listed(out).items() if cause} == {
            f"{server.url}/flaky/{name}" for name in server.down
        }
        return found

    assert run(retry_failed=True).shards == 5  # nothing had failed before
    before, failed = digests(out), set(server.down)
    assert run(retry_failed=False).written == 0 and not server.requests
    run(retry_failed=True)
    assert digests(out) == before  # none of the rows succeeded
    while server.down:
        recovered = set(sorted(server.down)[:25])
        failed, server.down = server.down, server.down - recovered
        before = digests(out)
        found = run(retry_failed=True)
        assert set(server.requests) == {f"/flaky/{name}" for name in failed}
        assert before.items() < digests(out).items()
    assert not found.failures
    samples: dict[str, dict[str, bytes]] = {}
    for tar in out.glob("*.tar"):
        for key, sample in members(tar).items():
            assert key not in samples
            samples[key] = sample
    for sample in samples.values():
        number = int(json.loads(sample["json"])["url"].rpartition("/")[2][:-4])
        assert (sample["jpg"], sample["txt"]) == (jpeg(number), f"caption {number}".encode())
    assert len(samples) == 90
    assert sum(make_manifest([find_shards(str(out))], Selection()).counts) == 90
    run(retry_failed=True)
    assert not server.requests


def test_table_with_appended_rows_is_accepted_after_retries(server: Server, tmp_path: Path) -> None:
    names = [f"{i}.jpg" for i in range(80)]
    server.down = {"3.jpg", *names[21:30], *names[62:64]}
    fetch = replace(QUICK, retries=0, keep_going=True)
    out = tmp_path / "out"

    def run(rows: int, *, retry_failed: bool) -> DownloadReport:
        path = table(tmp_path / "t.csv", [f"{server.url}/flaky/{name}" for name in names[:rows]])
        return download(path, out, SMALL, fetch=fetch, retry_failed=retry_failed)

    run(40, retry_failed=False)
    for recovered in ("22.jpg", "3.jpg", "23.jpg"):
        server.down.remove(recovered)
        run(40, retry_failed=True)
    report = run(80, retry_failed=True)
    assert (report.rows, report.kept) == (80, 80 - len(server.down))
    server.down.clear()
    assert run(80, retry_failed=True).kept == 80
    retries = {path.name for path in out.glob("*-retry*.tar")}
    assert retries == {f"0000{shard}-retry{turn}.tar" for shard in (0, 1) for turn in (1, 2)}
    assert missing_numbers([str(path) for path in out.glob("*.tar")]) == ([], 0)
    images = [sample["jpg"] for tar in out.glob("*.tar") for sample in members(tar).values()]
    assert len(images) == len(set(images)) == 80


def test_shard_of_a_killed_retry_is_removed(server: Server, tmp_path: Path) -> None:
    server.down = {"1.jpg", "2.jpg"}
    path = table(tmp_path / "t.csv", [f"{server.url}/flaky/{i}.jpg" for i in range(40)])
    out = tmp_path / "out"
    fetch = replace(QUICK, retries=0)
    download(path, out, SMALL, fetch=fetch)
    shutil.copy(out / "00001.tar", out / "00001-retry1.tar")
    download(path, out, SMALL, fetch=fetch, part=(1, 2), retry_failed=True)
    assert (out / "00001-retry1.tar").exists()  # of another part
    download(path, out, SMALL, fetch=fetch, retry_failed=True)
    assert sorted(path.name for path in out.glob("*.tar")) == ["00000.tar", "00001.tar"]


def test_a_download_does_not_resume_with_other_fields(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [f"{server.url}/img/{i}.jpg,caption {i},{i}" for i in range(40)]
    for options, refused in ((SMALL, True), (replace(SMALL, fields=()), False)):
        out = tmp_path / f"out {refused}"
        path.write_text("\n".join(["url,caption,score", *rows]) + "\n")
        download(path, out, options, fetch=QUICK)
        (out / "00001_stats.json").unlink()
        path.write_text("\n".join(["url,caption,score", *rows[:5], rows[5] + "7", *rows[6:]]) + "\n")
        if refused:
            with pytest.raises(ConfigError, match=r"00000\.tar was made of other rows"):
                download(path, out, options, fetch=QUICK)
        else:
            assert download(path, out, options, fetch=QUICK).written == 1


@pytest.mark.long
def test_killed_retry_loses_and_repeats_no_row(server: Server, tmp_path: Path) -> None:
    names = [f"{i}.jpg" for i in range(150)]
    server.down = set(names)
    path, out = table(tmp_path / "t.csv", [f"{server.url}/flaky/{name}" for name in names]), tmp_path / "out"
    download(path, out, SMALL, fetch=replace(QUICK, retries=0))
    server.down, server.delay = {name for name in names if "7" in name}, 0.05
    program = (
        "import sys; from pathlib import Path; from tests.data.test_download import *\n"
        "fetch = replace(QUICK, connections=8)\n"
        "print(download(Path(sys.argv[1]), Path(sys.argv[2]), SMALL, fetch=fetch, retry_failed=True).kept)"
    )
    finished, kills = False, 0
    while not finished:
        process = subprocess.Popen([sys.executable, "-c", program, str(path), str(out)])
        shards = len(list(out.glob("*_stats.json")))
        while process.poll() is None and len(list(out.glob("*_stats.json"))) < shards + 2:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        finished = process.wait() == 0
        kills += not finished
    found = download(path, out, SMALL, fetch=QUICK)
    assert kills > 1 and (found.rows, found.kept) == (150, 150 - len(server.down))
    images = [sample["jpg"] for tar in out.glob("*.tar") for sample in members(tar).values()]
    assert len(images) == len(set(images)) == found.kept


def test_download_stops_if_nearly_all_rows_fail(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = replace(QUICK, retries=0)

    def error_of(urls: list[str]) -> str:
        server.requests.clear()
        name = f"{hash(tuple(urls))}"
        with pytest.raises(DataError, match="stopped, because") as caught:
            download(table(tmp_path / f"{name}.csv", urls), tmp_path / name, SMALL, fetch=quick)
        assert sum(server.requests.values()) < 1400
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "no DNS")

    denied = [f"{server.url}/denied/{i}.jpg" for i in range(1400)]
    assert "with 'HTTP 403'; run the same command again" in error_of(denied)
    # a host that blocks the program later, and one of a hundred rows that succeeds nevertheless
    later = [f"{server.url}/{'img' if i < 300 or i % 100 == 0 else 'denied'}/{i}.jpg" for i in range(1400)]
    assert "'HTTP 403'" in error_of(later)
    unknown = [f"http://name{i}.invalid/a.jpg" for i in range(300)]
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert "with 'unknown host' (likely cause: this machine resolves no names" in error_of(unknown)
    monkeypatch.undo()
    closed = [f"http://127.0.0.1:9/{i}.jpg" for i in range(300)]
    assert "with 'no connection' (likely cause: the servers or a firewall refuse" in error_of(closed)
    assert "with 'no URL'" in error_of([""] * 300)
    found = download(
        table(tmp_path / "t.csv", denied[:300]),
        tmp_path / "going",
        SMALL,
        fetch=replace(quick, keep_going=True),
    )
    assert found.failures == {"HTTP 403": 300}
    # rows that fail again as before are no reason to stop, but rows that fail in another way are
    server.down = {f"{i}.jpg" for i in range(300)}
    flaky = table(tmp_path / "flaky.csv", [f"{server.url}/flaky/{i}.jpg" for i in range(300)])
    download(flaky, tmp_path / "flaky", SMALL, fetch=replace(quick, keep_going=True))
    found = download(flaky, tmp_path / "flaky", SMALL, fetch=quick, retry_failed=True)
    assert found.failures == {"HTTP 503": 300}
    server.down.clear()
    with pytest.raises(DataError, match=r"of the last 2\d\d rows failed, .* with 'more than 0 MiB'; run"):
        download(flaky, tmp_path / "flaky", SMALL, fetch=replace(quick, max_mb=0), retry_failed=True)
    assert download(flaky, tmp_path / "flaky", SMALL, fetch=quick, retry_failed=True).kept == 300


def test_unknown_names_stop_the_download(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", [f"http://name{i}.invalid/a.jpg" for i in range(300)])
    with pytest.raises(DataError, match=r"'unknown host' .likely cause: .* set HTTP_PROXY and HTTPS_PROXY"):
        download(path, tmp_path / "out", SMALL, fetch=FetchOptions(retries=0))


def test_unknown_certificates_stop_the_download(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0), backlog=300) as plain:
        port = plain.getsockname()[1]
        listening = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with suppress(OSError), connection:
                        assert isinstance(connection, ssl.SSLSocket)
                        connection.do_handshake()

        threading.Thread(target=answer, daemon=True).start()
        path = table(tmp_path / "t.csv", [f"https://127.0.0.1:{port}/{i}.jpg" for i in range(200)])
        with pytest.raises(DataError, match=r"'invalid certificate' .likely cause: .* set SSL_CERT_FILE"):
            download(path, tmp_path / "out", SMALL, fetch=replace(QUICK, timeout=20.0))
        listening.close()


def test_proxy_of_the_environment_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Proxy(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            assert self.path.startswith("http://images.invalid/")
            name = self.path.rpartition("/")[2]
            if name in ("private", "public"):
                self.send_response(302)
                self.send_header("Location", "http://169.254.169.254/1" if name == "private" else "/4")
                self.end_headers()
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(jpeg(int(name)))

    private = ["127.0.0.1/6", "2130706433/c", "127.1/d", "localhost./e", "images.invalid/private"]
    urls = [f"http://images.invalid/{i}" for i in (0, 1, 2, 3, "public")] + [
        f"http://{name}" for name in private
    ]
    public = replace(QUICK, allow_private=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02}).start()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_address[1]}")
        monkeypatch.setenv("no_proxy", "")
        found = download(table(tmp_path / "t.csv", urls), tmp_path / "out", SMALL, fetch=public)
        proxy.shutdown()
    assert found.kept == 5
    assert found.failures == {"host with a private address (--allow-private --retry-failed tries again)": 5}
    many = table(tmp_path / "many.csv", [f"http://images.invalid/{i}" for i in range(200)])
    with pytest.raises(DataError, match=r"'no connection to the proxy' .likely cause: HTTP_PROXY"):
        download(many, tmp_path / "closed", SMALL, fetch=replace(public, retries=0))


@pytest.mark.parametrize("value", ["http://127.0.0.1:port", "socks5://127.0.0.1:1080"])
def test_proxies_that_are_not_usable_are_refused(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", value)
    with pytest.raises(ConfigError, match=r"HTTP_PROXY = .* is not the URL of an HTTP proxy"):
        download(table(tmp_path / "t.csv", ["http://images.invalid/1"]), tmp_path / "out", SMALL, fetch=QUICK)


def test_download_does_not_stop_if_some_rows_succeed(server: Server, tmp_path: Path) -> None:
    """Failures are faster than downloads: the first 900 results are failures."""
    server.delay = 0.3
    urls = [f"{server.url}/img/{i}.jpg" if i % 10 == 0 else f"ftp://host/{i}.jpg" for i in range(1000)]
    found = download(
        table(tmp_path / "t.csv", urls), tmp_path / "out", DownloadOptions(resize="no"), fetch=QUICK
    )
    assert (found.rows, found.kept) == (1000, 100)


def test_parts_write_the_same_shards_as_one_download(server: Server, many: Path, tmp_path: Path) -> None:
    options = replace(SMALL, deduplicate=False)
    download(many, tmp_path / "whole", options, fetch=QUICK)
    for part in (2, 1, 3):
        found = download(many, tmp_path / "parts", options, fetch=QUICK, part=(part, 3))
    assert digests(tmp_path / "parts") == digests(tmp_path / "whole")
    assert found.rows == 150


@pytest.mark.parametrize("name", ["t.csv", ""])
def test_table_is_read_from_a_web_server(server: Server, tmp_path: Path, nginx: Nginx, name: str) -> None:
    folder = nginx.url("tables")
    for file in ("t.csv", "u.csv")[: 1 if name else 2]:
        path = table(tmp_path / file, [f"{server.url}/img/{number}.jpg" for number in range(3)])
        nginx.put(f"tables/{file}", path.read_bytes())
    nginx.put("tables/0.tar", b"")
    out = tmp_path / "out"
    found = download(f"{folder}/{name}", out, SMALL, fetch=QUICK)
    assert (found.kept, found.rows) == (3, 3 if name else 6)
    copied = (out / ".tables/t.csv").stat().st_ino
    assert download(f"{folder}/{name}", out, SMALL, fetch=QUICK).written == 0
    assert (out / ".tables/t.csv").stat().st_ino == copied
    with pytest.raises(DataError, match="there is no such file"):
        download(f"{folder}/other.csv", tmp_path / "other", SMALL, fetch=QUICK)
    with pytest.raises(DataError, match="contains no table"):
        download(nginx.url(""), tmp_path / "none", SMALL, fetch=QUICK)


def test_changed_remote_table_is_copied_again(server: Server, tmp_path: Path, nginx: Nginx) -> None:
    rows = [f"{server.url}/img/{i}.jpg,caption {i}\n" for i in range(60)]
    out = tmp_path / "out"
    seconds = 0

    def run(rows: list[str]) -> int:
        nonlocal seconds
        seconds += 1  # nginx makes ETags from size and modification time in seconds
        url = nginx.put("tables/t.csv", "".join(["url,caption\n", *rows]).encode())
        os.utime(nginx.html / "tables/t.csv", (seconds, seconds))
        return download(url, out, SMALL, fetch=QUICK).kept

    assert run(rows[:40]) == 40
    assert run(rows) == 60  # appended
    with pytest.raises(ConfigError, match=r"00002\.tar was made of other rows"):
        run([*rows[:-1], rows[-1].replace("caption", "CAPTION")])  # of equal size
    assert run(rows) == 60
    (out / ".tables/.t.csv.source").unlink()  # as after a kill
    (out / ".tables/t.csv").write_text("url\n")
    assert run(rows) == 60


def test_tables_directly_in_a_folder_are_read(
    server: Server, tmp_path: Path, nginx: Nginx, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tables"
    for number, name in enumerate(("a.csv", "B.CSV", "c.Csv", "sub/d.csv", "e.txt")):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        table(folder / name, [f"{server.url}/img/{number}.jpg"])
    (folder / "f.JSON").write_text("[]")
    (folder / "readme.md").write_text("x")
    (folder / ".hidden.csv").write_text("x")
    assert download(folder, folder / "out", SMALL, fetch=QUICK).kept == 3
    assert download(folder, folder / "out", SMALL, fetch=QUICK).rows == 3
    first, second = capsys.readouterr().err.splitlines()
    assert first == second == f"{folder}: reads the 3 tables directly in it"
    for name in ("a.csv", "B.CSV"):
        nginx.put(f"tables/{name}", (folder / name).read_bytes())
    assert download(nginx.url("tables"), tmp_path / "out", SMALL, fetch=QUICK).kept == 2


def test_missing_ray_cluster_raises_error(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    for address, message in (("127.0.0.1:1", "refused"), ("127.0.0.1:x", "invalid")):
        with pytest.raises(ConfigError, match=f"--ray {address}: no Ray cluster .*{message}"):
            download(table(tmp_path / "t.csv", []), tmp_path / "out", SMALL, fetch=QUICK, ray_address=address)


@pytest.mark.long
def test_ray_writes_the_same_shards(server: Server, many: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    download(many, tmp_path / "whole", SMALL, fetch=QUICK)
    server.delay = 0.2
    out, killed = tmp_path / "ray", 0
    program = (
        "import sys; from pathlib import Path; from tests.data.test_download import *\n"
        "download(Path(sys.argv[1]), Path(sys.argv[2]), SMALL, fetch=QUICK, ray_address='local')"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(many), str(out)])
    while process.poll() is None:
        time.sleep(0.05)
        at_work = [path for path in Path("/proc").glob("[0-9]*") if _is_ray_task(path)]
        if at_work and killed < 2:
            os.kill(int(at_work[0].name), signal.SIGKILL)
            killed += 1
            time.sleep(1)
    assert process.returncode == 0 and killed == 2
    assert digests(out) == digests(tmp_path / "whole")
    assert not [path for path in out.iterdir() if "partial" in path.name]


def _is_ray_task(process: Path) -> bool:
    try:
        return (process / "cmdline").read_bytes().startswith(b"ray::_download_shard")
    except OSError:  # the process has exited
        return False


def test_retry_may_allow_hosts_that_were_refused(server: Server, tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", [f"{server.url}/flaky/{i}.jpg" for i in range(3)])
    out = tmp_path / "out"
    refused = download(path, out, SMALL, fetch=replace(QUICK, allow_private=False))
    assert refused.failures == {"host with a private address (--allow-private --retry-failed tries again)": 3}
    assert not server.requests
    assert download(path, out, SMALL, fetch=QUICK, retry_failed=True).kept == 3


def test_report_has_the_cause_of_the_last_attempt(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", [f"http://127.0.0.1:9/{i}.jpg" for i in range(3)])
    out = tmp_path / "out"
    refused = download(path, out, SMALL, fetch=replace(QUICK, allow_private=False)).failures
    first = download(path, out, SMALL, fetch=QUICK, retry_failed=True)
    again = download(path, out, SMALL, fetch=QUICK, retry_failed=True)
    assert first.failures == again.failures != refused and sum(first.failures.values()) == 3
    assert (first.written, again.written, first.rows) == (1, 0, 3)


def test_second_process_and_changed_options_are_rejected(server: Server, many: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    server.delay = 0.2
    errors: list[DataError] = []

    def run() -> None:
        try:
            download(many, out, SMALL, fetch=QUICK)
        except DataError as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 1 and "is downloading this part" in str(errors[0])
    part = FileLock(out / ".part-2-of-3.lock")  # without a lock, the file is of a killed process
    (out / ".part-1-of-4.lock").touch()
    assert part.try_acquire()
    with pytest.raises(ConfigError, match="is downloading part 2/3: use the same number of parts"):
        download(many, out, SMALL, fetch=QUICK)
    download(many, out, SMALL, fetch=QUICK, part=(1, 3))
    part.release()
    download(many, out, SMALL, fetch=QUICK)
    assert len(list(out.glob("*.tar"))) == 8
    for changed, message in (
        (replace(SMALL, samples_per_shard=50), "(--samples-per-shard 20 → 50)"),
        (
            replace(SMALL, fields=("lang",), resize="border", image_size=32),
            '--fields null → ["lang"], --resize "no" → "border"',
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            download(many, out, changed, fetch=QUICK)
    with pytest.raises(ConfigError, match="made of other rows"):
        download(table(tmp_path / "t.csv", []), out, SMALL, fetch=QUICK)
    with pytest.raises(DataError, match="is not empty"):
        download(many, tmp_path, SMALL, fetch=QUICK)
    with pytest.raises(DataError, match="no column"):
        download(
            table(tmp_path / "t.csv", []), tmp_path / "x", replace(SMALL, url_column="nope"), fetch=QUICK
        )


def test_private_hosts_are_rejected(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = server.url.rpartition(":")[2]
    urls = [
        f"http://{host}:{port}/img/{i}.jpg"
        for i, host in enumerate(("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"))
    ]
    found = download(
        table(tmp_path / "t.csv", urls), tmp_path / "out", SMALL, fetch=replace(QUICK, allow_private=False)
    )
    refused = "host with a private address (--allow-private --retry-failed tries again)"
    assert found.failures == {refused: len(urls)}
    assert not server.requests
    # a public server redirects to a private one; both accept connections
    monkeypatch.setattr(web, "_is_public", lambda address: str(address) == "127.0.0.1")
    urls = [f"{server.url}/{kind}/1.jpg" for kind in ("inside", "img")]
    found = download(
        table(tmp_path / "t.csv", urls),
        tmp_path / "redirected",
        SMALL,
        fetch=replace(QUICK, allow_private=False),
    )
    assert (found.kept, found.failures) == (1, {refused: 1})
    assert server.requests == {"/inside/1.jpg": 1, "/img/1.jpg": 1}


def test_command_resizes_and_prints_report(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [f"{server.url}/{kind}/{i}.jpg" for i, kind in enumerate(("img", "img", "missing"))]
    path, out = table(tmp_path / "t.csv", urls), tmp_path / "out"
    options = [
        "--allow-private",
        "--resize",
        "border",
        "--image-size",
        "16",
        "--fields",
        "",
        "--exif",
        "--quiet",
    ]
    assert main(["download", str(path), str(out), *options]) == 0
    printed = capsys.readouterr().out
    assert main(["download", str(path), str(out), *options]) == 0
    assert "1 shard, 0 of them new" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--keep-duplicates false → true"):
        main(["download", str(path), str(out), *options, "--keep-duplicates"])
    assert "2  of 3 rows kept (66.7%)" in printed and "1  HTTP 404" in printed
    assert max(map(len, printed.splitlines()[1:])) < 80
    for sample in members(out / "00000.tar").values():
        meta = json.loads(sample["json"])
        assert Image.open(io.BytesIO(sample["jpg"])).size == (meta["width"], meta["height"]) == (16, 16)
        assert (meta["original_width"], meta["exif"], "lang" in meta) == (40, "{}", False)
    with pytest.raises(DataError, match=r"none of the 3 rows of .* gave an image"):
        main(["download", str(path), str(tmp_path / "none"), "--resize", "no", "--quiet"])
    with pytest.raises(ConfigError, match="expected I/N"):
        main(["download", str(path), str(out), "--part", "3/2"])
    empty = tmp_path / "empty.csv"
    empty.write_text("url,caption\n")
    with pytest.raises(DataError, match=r"none of the 0 rows of .* gave an image"):
        main(["download", str(empty), str(tmp_path / "empty"), "--quiet"])
    assert main(["download", str(empty), str(tmp_path / "empty"), "--part", "2/3", "--quiet"]) == 0


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("10.0.0.1", False), ("169.254.169.254", False),
        ("100.64.0.1", False), ("224.0.0.1", False), ("::ffff:10.0.0.1", False), ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False), ("fe80::1", False), ("fd00::1", False),
    ],
)  # fmt: skip
def test_private_addresses_are_recognized(address: str, public: bool) -> None:
    assert web._is_public(ip_address(address)) is public


@pytest.mark.parametrize(
    ("tags", "forbidden"),
    [
        ([], False), (["noarchive"], False), (["noai"], True), (["NOINDEX, nofollow"], True),
        (["otherbot: noai"], False), (["clipkit: noai"], True), (["otherbot: noarchive, noai"], False),
        (["unavailable_after: 25 Jun 2040 15:00:00 PST, noimageai"], True), (["max-snippet: 5"], False),
    ],
)  # fmt: skip
def test_robots_tags_are_respected(tags: list[str], forbidden: bool) -> None:
    assert web._forbids_training(tags) is forbidden


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("", 0), ("7", 7), ("-1", 0), ("nan", 0), ("1e9", 0), ("soon", 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)],
)
def test_retry_after_header_is_parsed(header: str, seconds: float) -> None:
    assert web._parse_retry_after(header) == seconds
    later = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 60))
    assert 50 < web._parse_retry_after(later) <= 60

"""Tests of the web page and API of ``clipkit serve``, with a real server, browser and hostile clients."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import pytest
from PIL import Image

import clipkit
from clipkit.__main__ import dispatch
from clipkit.errors import ConfigError
from clipkit.formats.checkpoint import save_model
from tests.forked import Forked

for needed in ("pyarrow", "fastapi", "uvicorn"):
    pytest.importorskip(needed)
EVIL = "<img src=x onerror=\"document.title='owned'\">"


def noise(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (20, 30, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, and a table of twelve images with captions, encoded by both."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "images").mkdir()
    rows = ["path\tcaption"]
    for number in range(12):
        noise(number).save(folder / "images" / f"{number}.png")
        rows.append(f"images/{number}.png\t{EVIL if number == 5 else f'caption {number}'}")
    (folder / "pairs.tsv").write_text("\n".join(rows) + "\n")
    for name, seed in (("one", 0), ("two", 1)):
        save_model(clipkit.create("ViT-Ti-4-16", seed=seed).eval(), folder / f"model_{name}")
        encode(folder, name, folder / "pairs.tsv")
    return folder


def encode(
    folder: Path, name: str, *sources: Path, out: Path | None = None, more: Sequence[str] = ()
) -> None:
    options = ["--model", str(folder / f"model_{name}"), "--out", str(out or folder / name), "--quiet"]
    assert dispatch(["encode", *map(str, sources), *options, *more]) == 0


Serving = Callable[..., AbstractContextManager["Address"]]


class Address(str):
    """A server's address and process ID."""

    pid: int


@contextmanager
def run_program(*arguments: str) -> Iterator[Address]:
    """Run a server on a free port as a program; yield the address, including the token."""
    command = [sys.executable, "-m", "clipkit", "serve", *arguments, "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            found = re.search(r"http://\S+", line)
            assert found, line
            address = Address(found[0])
            address.pid = server.pid
            yield address
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def address(made: Path) -> Iterator[Address]:
    with run_program(str(made / "one"), str(made / "two")) as found:
        yield found


@pytest.fixture
def serving(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Serving:
    """Return a function that runs a server on a free port in a forked process, otherwise as ``run_program``."""

    @contextmanager
    def serve(*arguments: str) -> Iterator[Address]:
        folder = tmp_path_factory.mktemp("server")
        command = ["serve", *arguments, "--port", "0"]
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(forked.run, "clipkit/__main__.py", command, {}, folder=folder, timeout=600)
            found = None
            while found is None:
                assert not ended.done(), ended.result().stderr
                time.sleep(0.02)
                out = folder / "out"
                found = re.search(r"http://\S+(?=\s)", out.read_text()) if out.exists() else None
            try:
                yield Address(found[0])
            finally:
                os.kill(int((folder / "pid").read_text()), signal.SIGTERM)

    return serve


def get(address: str, **headers: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60) as answer:
        content = answer.read()
        return json.loads(content) if "json" in answer.headers["content-type"] else content


def status(address: str, data: bytes | None = None, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data, headers), timeout=60) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(errors="replace")


def form(content: bytes) -> tuple[bytes, str]:
    body = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    return body + content + b"\r\n--edge--\r\n", "multipart/form-data; boundary=edge"


def test_text_image_and_filter_queries(made: Path, address: str) -> None:
    found = get(f"{address}api/search?text=noise&k=5")
    assert found["rows"] == 12 and [one["rank"] for one in found["results"]] == [1, 2, 3, 4, 5]
    model = clipkit.load(made / "model_one")
    best = found["results"][0]
    cosine = float(clipkit.encode_text("noise", model)[0] @ clipkit.encode_image(best["path"], model)[0])
    assert best["similarity"] == pytest.approx(cosine, abs=1e-3)
    assert get(address.rstrip("/") + best["thumbnail"]).startswith(b"\xff\xd8\xff")
    body, kind = form((made / "images" / "7.png").read_bytes())
    code, text = status(f"{address}api/search?k=1&collection=1", body, **{"Content-Type": kind})
    assert code == 200 and json.loads(text)["results"][0]["path"].endswith("/7.png")
    field = b'--edge\r\nContent-Disposition: form-data; name="k"\r\n\r\n1\r\n'
    code, text = status(f"{address}api/search", field + body, **{"Content-Type": kind})
    assert code == 400 and "form field 'k'" in json.loads(text)["detail"]
    like = get(f"{address}api/search?like={best['id']}&k=2")["results"]
    assert like[0]["path"] == best["path"] and like[0]["similarity"] == pytest.approx(1, abs=1e-3)
    other = get(f"{address}api/search?like={best['id']}&k=1&collection=1")["results"]  # of the other model
    assert other[0]["path"] == best["path"]
    not_it = get(f"{address}api/search?text=noise&unlike={best['id']}&k=12")["results"]
    assert not_it[0]["path"] != best["path"]
    kept = get(f"{address}api/search?text=noise&where={quote('caption:caption 1')}")["results"]
    assert {one["metadata"]["caption"] for one in kept} == {"caption 1", "caption 10", "caption 11"}
    described = get(f"{address}openapi.json")["paths"]["/api/search"]
    assert {"get", "post"} == described.keys()


@pytest.mark.parametrize(
    "query",
    ["", "k=3", "text=&k=2", "text=a&k=0", "text=a&k=201", "text=a&collection=2", "text=a&collection=-1", "like=1",
     "like=9-0-0-x", f"like={'9' * 5000}-0-0", "like=..%2F..%2Fetc%2Fpasswd", "text=a&where=nothing:x",
     "text=a&where=caption",
     "text=" + "a" * 10_001, "&".join(["text=a"] * 21)],
)  # fmt: skip
def test_invalid_queries_are_rejected(address: str, query: str) -> None:
    code, text = status(f"{address}api/search?{query}")
    assert code in (400, 422) and "detail" in json.loads(text)


@pytest.mark.parametrize(
    ("name", "said"), [("wher", "did you mean 'where'?"), ("unwanted", "known: "), ("%0A", "known: ")]
)
def test_unknown_parameters_are_refused(address: str, name: str, said: str) -> None:
    code, text = status(f"{address}api/search?text=a&{name}=b")
    detail = json.loads(text)["detail"]
    assert code == 400 and detail.startswith("unknown parameter") and said in detail and "\n" not in detail
    body, kind = form(b"")
    assert status(f"{address}api/search?{name}=b", body, **{"Content-Type": kind})[0] == 400


def test_only_thumbnails_of_listed_images_are_served(made: Path, address: str) -> None:
    (made / "images" / "secret.png").write_bytes((made / "images" / "1.png").read_bytes())
    for path in (
        "api/thumbnails/..%2f..%2f..%2fetc%2fpasswd", "api/thumbnails/0-0-0-00000000", "api/thumbnails/secret.png",
        "../../etc/passwd", "search.js/../../../etc/passwd", "templates/search.html", "images/1.png",
        f"api/thumbnails/{quote(str(made / 'images' / 'secret.png'), safe='')}",
    ):  # fmt: skip
        with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)) as connection:
            connection.request("GET", f"/{path}")
            answer = connection.getresponse()
            assert answer.status in (400, 404), path
            assert b"root:" not in answer.read()


def png_bomb() -> bytes:
    """Encode a PNG of 60,000 x 60,000 pixels in a few kilobytes."""
    import struct

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    lines = zlib.compress(bytes(60_001 * 100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


def test_hostile_uploads_are_rejected(address: str) -> None:
    for content, expected in ((b"no image", "400"), (png_bomb(), "400"), (b"", "400"), (b"\0" * 1000, "400")):
        body, kind = form(content)
        code, text = status(f"{address}api/search", body, **{"Content-Type": kind})
        assert str(code) == expected and "detail" in json.loads(text)
    place = urlsplit(address).netloc
    with closing(http.client.HTTPConnection(place, timeout=30)) as connection:
        connection.putrequest("POST", "/api/search")
        connection.putheader("Content-Length", str(100 << 20))
        connection.endheaders()
        assert connection.getresponse().status == 413  # before the body is sent
    with closing(http.client.HTTPConnection(place, timeout=30)) as connection:
        connection.request("POST", "/api/search", iter([b"x"] * 3), encode_chunked=True)
        assert connection.getresponse().status == 411


def test_large_upload_takes_no_memory(address: Address) -> None:
    def peak() -> int:
        lines = Path(f"/proc/{address.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    body, kind = form(bytes(100))
    status(f"{address}api/search", body, **{"Content-Type": kind})  # loads the imports of uploads
    place, before = urlsplit(address), peak()
    head = f"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: "
    for length in (100 << 20, 1000):  # the second sends more than it announces
        with socket.create_connection((place.hostname, place.port), timeout=60) as client:
            client.sendall(f"{head}{length}\r\n\r\n".encode())
            with suppress(OSError):  # the server need not read all of it
                for _ in range(100):
                    client.sendall(bytes(1 << 20))
            with suppress(OSError):
                assert client.recv(20)[9:12] in (b"413", b"400", b"")
    assert get(f"{address}api/search?text=a")["rows"] == 12
    assert peak() - before < 40 << 20


def test_forms_with_too_many_parts_are_rejected(address: str) -> None:
    one = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nx\r\n'
    for parts, expected in ((one * 9, "expected at most 8 files"), (one * 20_000, "Too many files")):
        kind = "multipart/form-data; boundary=edge"
        code, text = status(f"{address}api/search", parts + b"--edge--\r\n", **{"Content-Type": kind})
        assert code == 400 and expected in text


def test_slow_uploads_time_out(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import uvicorn

    from clipkit.inference import search, serve

    monkeypatch.setattr(serve, "_UPLOAD_SECONDS", 0.5)
    one = serve.Collection(
        name="one", embeddings=search.Embeddings(made / "one"), model=clipkit.load(made / "model_one")
    )
    server = uvicorn.Server(uvicorn.Config(serve.application([one]), port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    place = server.servers[0].sockets[0].getsockname()
    head = b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
    head += b"Content-Type: multipart/form-data; boundary=edge\r\n\r\n--edge\r\n"
    try:
        with socket.create_connection(place, timeout=60) as client:
            client.sendall(head)
            answer = b"".join(iter(lambda: client.recv(10_000), b""))  # until the server closes
        assert answer.startswith(b"HTTP/1.1 408 ") and b"within" in answer
        assert get(f"http://127.0.0.1:{place[1]}/api/search?text=a")["rows"] == 12
    finally:
        server.should_exit = True
        thread.join(60)


def test_captions_are_escaped_on_pages(made: Path, tmp_path: Path) -> None:
    page = tmp_path / "found.html"
    assert dispatch(["search", str(made / "one"), EVIL, "--html", str(page)]) == 0
    html = page.read_text(encoding="utf-8")
    assert "<img src=x" not in html and html.count("&lt;img src=x") >= 2  # title and caption


def test_slow_clients_do_not_block_others(address: str) -> None:
    place = urlsplit(address)
    assert place.hostname is not None and place.port is not None
    slow = [socket.create_connection((place.hostname, place.port)) for _ in range(60)]
    head = b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
    head += b"Content-Type: multipart/form-data; boundary=edge\r\n\r\n--edge\r\n"
    for number, client in enumerate(slow):
        client.sendall(b"GET /api/sea" if number % 2 else head)
    outcomes: list[int] = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(get(f"{address}api/search?text=x")["rows"]))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == [12] * 8
    for client in slow:
        client.close()


def test_other_host_names_are_rejected(address: str) -> None:
    assert status(address, Host="evil.example")[0] == 400
    assert status(address, Host="localhost")[0] == 200


def test_non_local_hosts_require_a_token(serving: Serving, made: Path) -> None:
    with serving(str(made / "one"), "--host", "0.0.0.0") as address:
        plain, _, token = address.partition("?token=")
        assert len(token) > 20
        for query in ("", "?token=", f"?token={token[:-1]}", "?token=%C3%A9"):
            assert status(plain + query)[0] == 401
        assert status(plain, Cookie="clipkit=wrong", Authorization="Bearer wrong")[0] == 401
        assert status(plain, Authorization=f"Bearer {token}")[0] == 200
        assert status(f"{plain}api/search?text=a&token={token}")[0] == 200
        with urllib.request.urlopen(address, timeout=30) as answer:
            cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert status(f"{plain}api/search?text=a", Cookie=cookie.partition(";")[0])[0] == 200


@pytest.mark.parametrize("indexed", [False, True])
def test_new_images_are_found_without_a_restart(
    serving: Serving, made: Path, tmp_path: Path, indexed: bool
) -> None:
    if indexed:
        pytest.importorskip("faiss")
    out, images = tmp_path / "embeddings", tmp_path / "images"
    images.mkdir()

    def add(*numbers: int) -> None:
        for number in numbers:
            noise(number).save(images / f"{number}.png")
        encode(made, "one", images, out=out, more=["--rows-per-file", "2"])

    def nearest(number: int) -> list[str]:
        body, kind = form((images / f"{number}.png").read_bytes())
        code, text = status(f"{address}api/search?k=3", body, **{"Content-Type": kind})
        assert code == 200
        return [Path(entry["path"]).name for entry in json.loads(text)["results"]]

    def index() -> None:
        if indexed:
            assert dispatch(["index", str(out), "--quiet"]) == 0

    add(50, 51, 52, 53)
    index()
    with serving(str(out)) as address:
        assert get(f"{address}api/search?text=noise")["rows"] == 4
        assert nearest(51)[0] == "51.png"
        add(54, 55, 56)
        for later in (False, True):  # first the index lacks the new images, then it includes them
            if later:
                index()
            assert get(f"{address}api/search?text=noise")["rows"] == 7
            for number in range(50, 57):
                assert nearest(number)[0] == f"{number}.png"
        (images / "50.png").write_bytes((images / "56.png").read_bytes())  # replaced
        add()
        assert set(nearest(56)[:2]) == {"50.png", "56.png"}


def test_update_during_a_search_gives_no_other_image(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastapi.testclient import TestClient

    from clipkit.inference import search, serve

    out, updated, images = tmp_path / "embeddings", tmp_path / "updated", tmp_path / "images"
    shutil.copytree(made / "images", images)
    encode(made, "one", images, out=out)
    (images / "0.png").unlink()
    encode(made, "one", images, out=updated)
    collection = serve.Collection(
        name="one", embeddings=search.Embeddings(out), model=clipkit.load(made / "model_one")
    )
    refresh = search.Embeddings.refresh

    def refresh_and_update(embeddings: search.Embeddings) -> None:
        refresh(embeddings)
        monkeypatch.undo()
        shutil.rmtree(out)
        updated.rename(out)

    monkeypatch.setattr(search.Embeddings, "refresh", refresh_and_update)
    client = TestClient(serve.application([collection]))
    files = {"file": (images / "7.png").read_bytes()}
    answer = client.post("/api/search?k=1", files=files)
    assert answer.status_code == 503
    assert answer.json()["detail"].endswith(" changed while it was read: search again")
    assert client.get("/").status_code == 200
    (result,) = client.post("/api/search?k=1", files=files).json()["results"]
    assert result["path"].endswith("/7.png")


def test_folder_of_another_model_is_refused_until_a_restart(
    serving: Serving, made: Path, tmp_path: Path
) -> None:
    """Both models have the same dimension."""
    out = shutil.copytree(made / "one", tmp_path / "out")
    with serving(str(out), str(made / "two")) as address:
        assert status(f"{address}api/search?text=a")[0] == 200
        shutil.rmtree(out)
        shutil.copytree(made / "two", out)
        for _ in range(2):
            code, text = status(f"{address}api/search?text=a")
            assert code == 503
            assert json.loads(text)["detail"].startswith(f"{out} was encoded with another model")
        assert status(f"{address}api/search?text=a&collection=1")[0] == 200
    with serving(str(out)) as address:
        assert status(f"{address}api/search?text=a")[0] == 200


def test_results_like_those_of_another_collection_are_of_the_same_image(
    serving: Serving, made: Path, tmp_path: Path
) -> None:
    """The keys of two shards are equal."""
    for number, shard in enumerate(("a", "b")):
        (tmp_path / shard).mkdir()
        with tarfile.open(tmp_path / shard / "0.tar", "w") as tar:
            for key in range(3):
                noise(100 + 10 * number + key).save(tmp_path / "image.png")
                tar.add(tmp_path / "image.png", f"{key:09d}.png")
    outs = [tmp_path / name for name in ("one", "two")]
    for out in outs:
        sources = [tmp_path / shard / "0.tar" for shard in (("b", "a") if out.name == "one" else ("a", "b"))]
        encode(made, out.name, *sources, out=out)
    with serving(*map(str, outs)) as address:
        for hit in get(f"{address}api/search?text=noise&k=6")["results"]:
            for collection in (0, 1):
                query = f"api/search?like={hit['id']}&collection={collection}&k=1"
                (best,) = get(f"{address}{query}")["results"]
                assert (best["path"], best["source"]) == (hit["path"], hit["source"])
                assert best["similarity"] == pytest.approx(1, abs=1e-3)
                images = [get(f"{address}{one['thumbnail'][1:]}") for one in (best, hit)]
                assert images[0] == images[1]
        # the files of a collection that is not searched change
        hit = get(f"{address}api/search?text=noise&k=1")["results"][0]
        os.utime(outs[0] / "img_emb" / "img_emb_0.npy")
        for request in (f"api/search?like={hit['id']}&collection=1", hit["thumbnail"][1:]):
            code, message = status(f"{address}{request}")
            assert code == 400 and "the embeddings may have changed, search again" in message


def test_server_survives_files_that_change_in_place(serving: Serving, made: Path, tmp_path: Path) -> None:
    """Files are mapped: reading beyond a new end would end the process with a bus error."""
    pytest.importorskip("faiss")
    out = tmp_path / "embeddings"
    encode(made, "one", made / "pairs.tsv", out=out)
    assert dispatch(["index", str(out), "--quiet"]) == 0
    with serving(str(out), str(made / "two")) as address:
        for pattern in ("img_emb/*.npy", "metadata/*.parquet", "index/index.json"):
            (file,) = out.glob(pattern)
            content = file.read_bytes()
            for damage in ("truncate", "empty", "remove", "overwrite"):
                (best,) = get(f"{address}api/search?text=a&k=1")["results"]
                if damage == "remove":
                    file.unlink()
                elif damage == "overwrite":
                    file.write_bytes(np.random.default_rng(0).bytes(len(content)))
                else:
                    os.truncate(file, 0 if damage == "empty" else len(content) // 3)
                for query, expected in (
                    ("api/search?text=a&k=3", {503}),
                    (f"api/search?like={best['id']}", {503}),
                    (f"api/search?unlike={best['id']}&text=a&k=3", {503}),
                    (f"api/search?like={best['id']}&collection=1", {200, 400}),
                    (best["thumbnail"][1:], {200, 400}),
                    ("api/search?text=a&collection=1", {200}),
                ):
                    code, text = status(f"{address}{query}")
                    if file.name == "index.json" and damage == "remove":  # the same as without an index
                        expected = {200}
                    assert code in expected, (file, damage, query, text)
                    if code != 200:
                        detail = json.loads(text)["detail"]
                        assert "\n" not in detail and str(out) in detail
                file.write_bytes(content)


def test_invalid_options_busy_port_and_missing_fastapi_are_rejected(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="2 models for 1 folder"):
        dispatch(["serve", str(made / "one"), "--model", "a", "--model", "b"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: "):
            dispatch(["serve", str(made / "absent"), "--port", port])  # before anything is loaded
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "clipkit.inference.serve")
    with pytest.raises(ConfigError, match=r"serve requires fastapi: pip install -e '\.\[serve\]'"):
        dispatch(["serve", str(made / "one")])


@pytest.mark.parametrize("width", [390, 1200])
def test_page_in_a_browser(serving: Serving, made: Path, width: int) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    playwright.expect.set_options(
        timeout=60_000
    )  # under load, Chromium may take more than the default of 5 s
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser_path is None:
        pytest.skip("chromium is not installed")
    with serving(str(made / "one"), str(made / "two")) as address, playwright.sync_playwright() as start:
        browser = start.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(viewport={"width": width, "height": 800})
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = context.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(address)
        hits = [page.locator("section").nth(number).locator(".hits li") for number in (0, 1)]

        def first(collection: int, name: str) -> None:
            playwright.expect(hits[collection].first).to_have_attribute("title", re.compile(f"/{name}\n"))

        page.keyboard.press("/")
        page.keyboard.type("noise")
        for each in hits:  # both models
            playwright.expect(each).to_have_count(12)
        # images load lazily: wait for the first
        playwright.expect(page.locator(".hits img").first).to_have_js_property("naturalWidth", 30)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.title() != "owned" and page.get_by_text(EVIL).count() == 2

        page.fill("#text", "")
        page.set_input_files("#file", made / "images" / "3.png")
        for collection in (0, 1):
            first(collection, "3.png")
        page.locator("#parts button").click()
        playwright.expect(hits[0]).to_have_count(0)

        page.evaluate(
            """async (address) => {
                const file = await (await fetch(address)).blob();
                const bitmap = await createImageBitmap(file);
                const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
                canvas.getContext("2d").drawImage(bitmap, 0, 0);
                const png = await canvas.convertToBlob({ type: "image/png" });
                await navigator.clipboard.write([new ClipboardItem({ "image/png": png })]);
            }""",
            get(f"{address}api/search?text=x&where=image_path:/8.png")["results"][0]["thumbnail"],
        )
        page.keyboard.press("Control+V")
        first(0, "8.png")
        page.locator("#parts button").click()

        page.fill("#text", "noise")
        playwright.expect(hits[1]).to_have_count(12)
        page.select_option("#column", "caption")
        page.fill("#filter", "CAPTION 11")
        playwright.expect(hits[0]).to_have_count(1)
        hits[0].get_by_text("more like this").click()
        page.fill("#filter", "")
        page.fill("#text", "")
        for collection in (0, 1):
            first(collection, "11.png")
        hits[0].first.get_by_text("not this").click()
        playwright.expect(page.locator("#parts .not")).to_have_count(1)
        playwright.expect(page.locator("#status")).to_have_text(re.compile("nothing is left|^$"))
        assert not [error for error in errors if "400" not in error]

        browser.close()

"""Tests that URLs are requested as they are written, by downloads of images and of shards."""

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest
from hypothesis import given, strategies as st

from clipkit.samples.remote.transfer import TransferError, encode_url, file_facts
from data.options import FetchOptions
from data.web import Fetcher, FetchError
from tests.clipkit.samples.remote import servers

impatient = servers.impatient

_UNRESERVED = "aZ09-._~:@!$&'()*+,;="
_WRITTEN = st.lists(st.sampled_from([*_UNRESERVED, "/", "%2C", "%2f", "%2F", "%25", "%e2%82%ac"])).map(
    "".join
)


@given(path=_WRITTEN, query=_WRITTEN, fragment=_WRITTEN)
def test_valid_urls_are_not_changed(path: str, query: str, fragment: str) -> None:
    target = f"/{path}?{query}" if query else f"/{path}"
    url = encode_url(f"https://example.org{target}#{fragment}")
    assert (url.scheme, url.raw_host, url.raw_path_qs) == ("https", "example.org", target)
    assert str(encode_url(str(url))) == str(url)


@given(path=st.text(st.characters(exclude_characters="%?#", exclude_categories=["Cs"])))
def test_invalid_characters_are_encoded(path: str) -> None:
    url = encode_url(f"http://example.org/{path}")
    assert re.fullmatch(r"/[A-Za-z0-9\-._~:/\[\]@!$&'()*+,;=%]*", url.raw_path_qs)
    assert unquote(url.raw_path_qs) == f"/{path}"


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("HTTP://EXAMPLE.org/A", "http://example.org/A"),
        ("http://münchen.example:81/ä%2C", "http://xn--mnchen-3ya.example:81/%C3%A4%2C"),
        ("http://u:p%40ss@[::1]:8080/a%2f", "http://u:p%40ss@[::1]:8080/a%2f"),
        ("http://example.org/100%.jpg?x=%2&y=%zz", "http://example.org/100%25.jpg?x=%252&y=%25zz"),
        ("http://example.org/a b|c?d e=[1]", "http://example.org/a%20b%7Cc?d%20e=[1]"),
        ("http://example.org/a/../b%2e%2e;p=1%3B", "http://example.org/a/../b%2e%2e;p=1%3B"),
        ("http://example.org/a%252Cb", "http://example.org/a%252Cb"),
        ("http://example.org?a=%2B+%20", "http://example.org/?a=%2B+%20"),
        ("http://example.org/\udce9", "http://example.org/%E9"),
    ],
)
def test_urls_are_sent_as_they_are_written(text: str, sent: str) -> None:
    assert str(encode_url(text)) == sent


@pytest.mark.parametrize("text", ["http://[::1", "http://h:99999/a", "http://h\\a/b", "http://h/\ud800"])
def test_what_is_not_a_url_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        encode_url(text)


@pytest.fixture
def moved() -> Iterator[tuple[str, dict[str, str], list[str]]]:
    """Serve redirects to the values of a dict, by the path; return also the paths that were requested."""
    locations, requests = dict[str, str](), list[str]()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            requests.append(self.path)
            location = locations.get(self.path)
            assert self.headers["Host"].isascii()
            self.send_response(302 if location else 200)
            if location:
                self.send_header("Location", location.encode().decode("latin-1"))
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", locations, requests
        server.shutdown()
        thread.join()


def _fetch(url: str) -> None:
    async def use(body: bytes) -> None:
        assert body == b"ok"

    async def run() -> None:
        async with Fetcher(FetchOptions(allow_private=True, retries=0)) as fetcher:
            await fetcher.fetch(url, use)

    asyncio.run(run())


@pytest.mark.parametrize("read", [_fetch, file_facts])
def test_redirects_are_followed_as_they_are_written(
    moved: tuple[str, dict[str, str], list[str]],
    read: Callable[[str], object],
) -> None:
    url, locations, requests = moved
    steps = {
        "/a%2Cb?c=%2B%2f": f"{url}/absolute%2C?sig=%2F+%2B&type=a%2Fb",
        "/absolute%2C?sig=%2F+%2B&type=a%2Fb": "/relative%27",
        "/relative%27": "../sp ace/€%2C?x=ä&y=100%#part%2C",
        "/sp%20ace/%E2%82%AC%2C?x=%C3%A4&y=100%25": "?only=%40",
    }
    locations.update(steps)
    read(f"{url}/a%2Cb?c=%2B%2f")
    assert requests == [*steps, "/sp%20ace/%E2%82%AC%2C?only=%40"]
    for location in ("file:///etc/passwd", "http://[::1"):
        locations["/bad"] = location
        with pytest.raises((FetchError, TransferError)):
            read(f"{url}/bad")
    locations["/loop%2C"] = "/loop%2C"
    with pytest.raises((FetchError, TransferError)):
        read(f"{url}/loop%2C")


def test_redirect_to_an_international_host(
    moved: tuple[str, dict[str, str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, locations, requests = moved
    port = url.rpartition(":")[2]
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *more, **named: resolve("127.0.0.1", *more, **named)
    )
    locations["/international"] = f"http://münchen.example:{port}/ä%2C"
    _fetch(f"{url}/international")
    assert requests[-1] == "/%C3%A4%2C"
    # shards are read with the logins of ~/.netrc, which aiohttp looks up by the encoded host
    with pytest.raises(TransferError, match="invalid URL"):
        file_facts(f"{url}/international")

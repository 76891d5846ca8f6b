"""Local servers for tests: nginx, an S3 server, and one that fails on request.

A test file imports the fixtures that it uses (``nginx = servers.nginx``). Tests of nginx are skipped if it is not
installed.
"""

import atexit
import os
import re
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from clipkit.errors import DataError
from clipkit.samples.remote import transfer
from clipkit.samples.remote.store import ShardFile

__all__ = [
    "S3", "SECRETS", "Nginx", "Request", "Unruly", "error_of", "impatient", "nginx", "s3", "unruly",
    "whole",
]  # fmt: skip

_CONFIG = """
daemon off;
master_process off;  # one process, so that one kill ends all
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
    log_format short '$request_method $uri $status $body_bytes_sent $http_range';
    access_log {folder}/access.log short;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        keepalive_timeout 5s;
        root {folder}/html;
        autoindex on;
        if (-f {folder}/busy) {{ return 503; }}
        location /slow/ {{ alias {folder}/html/; limit_rate 4m; }}
        location /whole/ {{ alias {folder}/html/; max_ranges 0; }}
        location /secret/ {{ alias {folder}/html/; auth_basic closed; auth_basic_user_file {folder}/users; }}
        location /forbidden/ {{ return 403; }}
        include {folder}/*.location;
    }}
}}
"""


SECRETS = ("p-word", "s1gn4ture", "secret-of-a-test", "t0ken")


def whole(url: str) -> ShardFile:
    return ShardFile(url=url, size=-1, version="")


def error_of(work: Callable[[], object]) -> str:
    """Return the one-line error of a call."""
    with pytest.raises(DataError) as caught:
        work()
    message = str(caught.value)
    assert "\n" not in message and not any(secret in message for secret in SECRETS), message
    return message


@dataclass(frozen=True, kw_only=True)
class Request:
    """One line of the access log."""

    name: str
    status: int
    sent: int
    range: str


class Nginx:
    """Serve the files in ``html``.

    The same files are under ``/slow/`` (4 MB per second), ``/whole/`` (without ranges) and ``/secret/``
    (user u, password p-word); ``/forbidden/`` returns 403.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.html = folder / "html"
        self.html.mkdir(parents=True)
        self.port = _free_port()
        (folder / "users").write_text("u:{PLAIN}p-word\n")
        (folder / "nginx.conf").write_text(_CONFIG.format(folder=folder, port=self.port))
        self._process: subprocess.Popen[bytes] | None = None
        self._timers: list[threading.Timer] = []

    def start(self) -> None:
        command = [_nginx(), "-p", str(self.folder), "-c", str(self.folder / "nginx.conf")]
        self._process = subprocess.Popen([*command, "-e", str(self.folder / "error.log")])
        _wait_for(self.port, self._process)

    def kill(self) -> None:
        """Kill the server, also during a transfer."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def add(self, location: str) -> None:
        """Add locations to the configuration."""
        (self.folder / "more.location").write_text(location)
        self.kill()
        self.start()

    def restart_after(self, seconds: float) -> None:
        """Kill the server and start it again later, unless it is already down."""
        if self._process is None:
            return
        self.kill()
        self._timers.append(threading.Timer(seconds, self.start))
        self._timers[-1].start()

    def close(self) -> None:
        for timer in self._timers:
            timer.join()
        self.kill()

    def url(self, name: str, *, of: str = "") -> str:
        return f"http://127.0.0.1:{self.port}/{of}{name}"

    def put(self, name: str, data: bytes) -> str:
        path = self.html / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return self.url(name)

    def busy(self, is_busy: bool) -> None:
        """Answer every request with 503 from now on, or stop doing so."""
        if is_busy:
            (self.folder / "busy").touch()
        else:
            (self.folder / "busy").unlink(missing_ok=True)

    def requests(self) -> list[Request]:
        """Return the finished requests."""
        log = self.folder / "access.log"
        lines = log.read_text().splitlines() if log.exists() else []
        found = [re.fullmatch(r"\S+ /(\S*) (\d+) (\d+) (\S+)", line) for line in lines]
        return [
            Request(name=one[1], status=int(one[2]), sent=int(one[3]), range=one[4]) for one in found if one
        ]


def _nginx() -> str:
    found = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip("nginx is not installed (apt-get install nginx-light)")
    return found


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"no server came up on port {port}; status {process.poll()}")


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[Nginx]:
    server = Nginx(tmp_path / "nginx")
    server.start()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> transfer.Patience:
    """Shorten all waits."""
    short = transfer.Patience(
        tries=8,
        first_wait=0.02,
        longest_wait=0.3,
        total_seconds=20.0,
        contact_waits=(0.05, 0.1),
        contact_seconds=2.0,
        connect_seconds=2.0,
        stall_seconds=0.4,
    )
    monkeypatch.setattr(transfer, "PATIENCE", short)
    monkeypatch.setattr(transfer, "_answered", set())  # ports may be reused
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return short


@dataclass
class Unruly:
    """A server of one file that follows a script, one word per request, and then works normally.

    Words of a script: "short" (half of the announced bytes), "stall" (half, then nothing), "silent"
    (no response), "reset", "502", "429", "other" (other bytes of the same length), "etag" (another version),
    "long" (more bytes than the file has), "ranged" (correct).
    """

    data: bytes
    script: list[str] = field(default_factory=list)
    etag: str = '"one"'
    requests: list[str] = field(default_factory=list)  # values of the Range header
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/00000.tar"

    def answer(self, connection: socket.socket, ended: threading.Event) -> bool:
        """Serve one request and return whether to keep the connection."""
        request = b""
        while b"\r\n\r\n" not in request:
            part = connection.recv(65536)
            if not part:
                return False
            request += part
        found = re.search(rb"(?i)\r\nrange: *bytes=(\d+)-(\d*)", request)
        self.requests.append(found[0].split(b":")[1].strip().decode() if found else "")
        act = self.script.pop(0) if self.script else "ranged"
        if act == "silent":
            ended.wait(30)
        if act in ("silent", "reset"):
            return False
        if act.isdecimal():
            connection.sendall(f"HTTP/1.1 {act} No\r\nContent-Length: 0\r\nRetry-After: 0\r\n\r\n".encode())
            return True
        start = int(found[1]) if found else 0
        stop = min(int(found[2]) + 1 if found and found[2] else len(self.data), len(self.data))
        body = self.data[start:stop]
        if act == "other":
            body = bytes(255 - byte for byte in body)
        if act == "long":
            body += b"more"
        etag = '"two"' if act == "etag" else self.etag
        head = f"HTTP/1.1 {206 if found else 200} OK\r\nContent-Length: {len(body)}\r\nETag: {etag}\r\n"
        head += f"Content-Range: bytes {start}-{stop - 1}/{len(self.data)}\r\n" if found else ""
        whole = act not in ("short", "stall")
        connection.sendall(f"{head}\r\n".encode() + (body if whole else body[: len(body) // 2]))
        if act == "stall":
            ended.wait(30)
        return whole


@pytest.fixture
def unruly() -> Iterator[Unruly]:
    script = Unruly(data=os.urandom(300_000))
    ended = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            try:
                while script.answer(self.request, ended):
                    pass
            except OSError:  # the client has disconnected
                pass

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        script.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield script
        ended.set()
        server.shutdown()
        thread.join()


@dataclass(frozen=True, kw_only=True)
class S3:
    """An S3 server with the bucket ``pairs``."""

    client: Any

    def put(self, key: str, data: bytes, **options: Any) -> str:
        self.client.put_object(Bucket="pairs", Key=key, Body=data, **options)
        return f"s3://pairs/{key}"

    def put_in_parts(self, key: str, parts: Sequence[bytes]) -> str:
        named = {"Bucket": "pairs", "Key": key}
        upload = self.client.create_multipart_upload(**named)["UploadId"]
        done = []
        for number, part in enumerate(parts, 1):
            answer = self.client.upload_part(**named, UploadId=upload, PartNumber=number, Body=part)
            done.append({"PartNumber": number, "ETag": answer["ETag"]})
        self.client.complete_multipart_upload(**named, UploadId=upload, MultipartUpload={"Parts": done})
        return f"s3://pairs/{key}"


@cache
def _moto() -> int:
    """Return the port of moto's server, which is started once because that takes seconds."""
    port = _free_port()
    code = "from moto.server import main; main()"
    command = [sys.executable, "-c", code, "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(process.kill)
    _wait_for(port, process)
    return port


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> S3:
    pytest.importorskip("moto.server")
    import boto3

    monkeypatch.setattr(transfer, "_clients", {})  # clients of other tests have other settings
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{_moto()}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-a-test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-a-test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    client = boto3.client("s3")
    client.create_bucket(Bucket="pairs")
    return S3(client=client)

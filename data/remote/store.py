"""Shards that lie in a store: what is there, ranges of them, and whole files.

s3, gs, http(s) and hf are read through fsspec; ``pipe:COMMAND`` and other streams that only begin at their start
through webdataset's programs. Failures that pass by themselves are tried again (see ``data.remote.store``), from
the byte that was reached. Credentials come from the environment or the store's standard configuration alone, and no
message holds more of a URL than ``shown`` leaves.
"""

import asyncio
import errno
import hashlib
import importlib
import logging
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies

from clipkit.errors import DataError
from clipkit.files.patterns import name_order
from clipkit.files.terminal import shown
from data.remote.shard_file import ShardFile, is_remote

__all__ = [
    "HUB_FORM",
    "PATIENCE",
    "STREAMS",
    "Attempts",
    "Patience",
    "PipeTransfer",
    "RangedBytes",
    "Transfer",
    "TransferError",
    "Unreachable",
    "ask",
    "call",
    "check_place",
    "client_of",
    "describe",
    "download",
    "facts",
    "failure_of",
    "has_answered",
    "library_errors",
    "list_folder",
    "listing",
    "of_hub",
    "of_status",
    "open_transfer",
    "protocol_of",
    "read_range",
    "read_text",
    "shown",
    "told",
]


# --------------------------------------------------------------------------------------------------------------
# How long to try to read from a store, and how its failures are told: in one line, without secrets.
#
# A failure that passes by itself (a broken connection, a timeout, a server that is overloaded) is tried again
# after a wait that doubles; one that does not (a wrong name, missing rights) ends at once. That a store cannot
# be reached is most often a mistake as long as it has never answered, and told within seconds; from then on it
# is an outage, and waited out.

_log = logging.getLogger(__name__)
_chance = random.SystemRandom()  # other after a fork, and nothing that anybody has seeded
_QUIET_FAILURES = 2  # a hiccup is not worth a line in the log
_PROGRESS = 1 << 20  # bytes that show that the store works again
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
_MEANING = {
    400: "the request is refused as wrong",
    401: "access is denied",
    403: "access is denied",
    404: "there is no such file",
    410: "there is no such file",
    416: "it is shorter than what was asked for",
    429: "too many requests",
    503: "the server is overloaded or under repair",
}
_ABOUT_CREDENTIALS = "credentials come from the environment or the standard configuration of the store"


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long to try.

    Attributes:
        tries: how often in a row something may fail, with less than a MiB read in between.
        first_wait: seconds of the first wait; each further one is twice as long.
        longest_wait: seconds of the longest wait.
        total_seconds: how long such a row of failures may last.
        contact_waits: seconds between the tries to reach a store that has never answered.
        contact_seconds: how long these may last after the first of them.
        connect_seconds: until a connection stands, and until the answer to a short question is there.
        stall_seconds: for which a transfer may stand still.
    """

    tries: int = 8
    first_wait: float = 0.5
    longest_wait: float = 30.0
    total_seconds: float = 600.0
    contact_waits: tuple[float, ...] = (1.5, 3.0)  # enough for a server that is being started
    contact_seconds: float = 5.0
    connect_seconds: float = 20.0
    stall_seconds: float = 60.0


PATIENCE = Patience()  # looked up at each use, so that a program may set another


_answered: set[str] = set()  # stores; a forked process knows what its parent has found out


def has_answered(url: str) -> None:
    """Take note that the store of a URL was right and there: if it cannot be reached now, it is out of order."""
    _answered.add(_store_of(url))


def _store_of(url: str) -> str:
    """A host, a bucket, a hub, or the program of a command."""
    protocol, _, rest = url.partition(":")
    if protocol == "pipe":
        return f"pipe:{next((word for word in rest.split() if '=' not in word), '')}"
    host = rest.lstrip("/").partition("/")[0].rpartition("@")[2]
    return "hf" if protocol == "hf" else f"{protocol}:{host.lower()}"


class Unreachable(DataError):
    """Nobody answered, however often a store was asked."""


class TransferError(Exception):
    """One failure of a store.

    Args:
        message: what happened, without the URL and without anything that the store or a library says.
        temporary: whether another try may do better.
        status: the HTTP status or its like, where there is one.
        wait: the seconds that the server asks to wait.
        unreached: whether there was nobody to ask (no such host, a closed port, a command that fails).
    """

    def __init__(
        self,
        message: str,
        *,
        temporary: bool,
        status: int | None = None,
        wait: float | None = None,
        unreached: bool = False,
    ) -> None:
        super().__init__(message)
        self.temporary = temporary
        self.status = status
        self.wait = wait
        self.unreached = unreached

    @property
    def is_missing(self) -> bool:
        """Whether there is no such file."""
        return self.status in (404, 410)


def of_status(status: int, *, wait: float | None = None) -> TransferError:
    """The failure that an HTTP status means."""
    meaning = _MEANING.get(status, "the server failed" if status >= 500 else "the request is refused")
    message = f"{meaning} (status {status})"
    if status in (401, 403):
        message += f"; {_ABOUT_CREDENTIALS}"
    return TransferError(message, temporary=status in _TEMPORARY or status > 504, status=status, wait=wait)


class Attempts:
    """Counts the failures of one piece of work and waits between them.

    Args:
        url: what is being read, for messages.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._failures = 0
        self._bytes = 0
        self._since = time.monotonic()
        self._unreached: list[float] = []  # when each such failure of the row was

    def received(self, count: int, *, new: bool = True) -> None:
        """Take note of bytes that came; enough of them begin a new row of tries, if they never came before."""
        self._bytes += count
        if enough := self._bytes >= _PROGRESS:
            self.answered()
            if new:
                self._failures = 0
        if enough or not self._failures:
            self._since = time.monotonic()

    def answered(self) -> None:
        """Take note that there is somebody who answers."""
        has_answered(self._url)
        self._unreached.clear()

    def failed(self, error: TransferError) -> None:
        """Wait before the next try.

        Raises:
            DataError: there is no use in another one; Unreachable where nobody has answered.
        """
        self._failures += 1
        self._bytes = 0
        if error.status is not None:
            self.answered()
        if not error.temporary:
            self.give_up(str(error))
        now = time.monotonic()
        if error.unreached and _store_of(self._url) not in _answered:
            wait = self._wait_for_contact(now)
            tries, since = len(self._unreached), self._unreached[0]
        else:
            self._unreached.clear()
            wait = self._wait(now, error.wait or 0.0)
            tries, since = self._failures, self._since
        if wait is None:
            message = f"{error}; gave up after {tries} tries in {now - since:.0f} s"
            if error.status is None:
                raise Unreachable(f"{shown(self._url)}: {message}") from None
            self.give_up(message)
        if self._failures > _QUIET_FAILURES:
            _log.warning("%s: %s; trying again in %.1f s", shown(self._url), error, wait)
        time.sleep(wait)

    def _wait(self, now: float, asked: float) -> float | None:
        """Seconds until the next try, None if there is to be none."""
        wait = min(PATIENCE.longest_wait, PATIENCE.first_wait * 2 ** (self._failures - 1))
        wait *= _chance.uniform(0.5, 1.0)  # many readers that failed together must not come back together
        wait = min(max(wait, asked), max(wait, PATIENCE.longest_wait))
        ended = self._failures >= PATIENCE.tries or now - self._since + wait > PATIENCE.total_seconds
        return None if ended else wait

    def _wait_for_contact(self, now: float) -> float | None:
        self._unreached.append(now)
        if len(self._unreached) > len(PATIENCE.contact_waits):
            return None
        wait = PATIENCE.contact_waits[len(self._unreached) - 1] * _chance.uniform(0.8, 1.0)
        return None if now - self._unreached[0] + wait > PATIENCE.contact_seconds else wait

    def give_up(self, message: str) -> NoReturn:
        """Raise the one line that says what was wrong."""
        # from None: what a library says of a failure may hold the signed URL
        raise DataError(f"{shown(self._url)}: {message}") from None


# --------------------------------------------------------------------------------------------------------------
# The clients of the libraries that speak with stores, and what their failures mean.
#
# Libraries are imported at the first use. Clients belong to one process: a forked one makes its own.

_MARGIN = 5.0  # seconds that a library has for its own timeout before we stop waiting for it
_EXTRAS = {"gs": "gs", "gcs": "gs"}  # of all others it is "remote"
_LIBRARY_ERRORS = (
    "aiohttp.ClientError", "botocore.exceptions.BotoCoreError", "botocore.exceptions.ClientError",
    "botocore.exceptions.HTTPClientError", "fsspec.exceptions.FSTimeoutError", "gcsfs.retry.HttpError",
    "google.auth.exceptions.GoogleAuthError", "httpx.HTTPError", "httpx2.HTTPError",
    "huggingface_hub.errors.HfHubHTTPError",
)  # fmt: skip
_PASSES = ("Timeout", "Connect", "Payload", "Disconnected", "Incomplete", "Network", "Protocol", "Stream")
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)
_DEEPEST = 8  # causes of causes

_clients: dict[tuple[int, str, Patience], Any] = {}  # never emptied: see client_of
_clients_lock = threading.Lock()


def _new_lock() -> None:
    global _clients_lock
    _clients_lock = threading.Lock()  # another thread may have held it while we were forked


os.register_at_fork(after_in_child=_new_lock)


def client_of(protocol: str) -> Any:
    """The client of this process for a protocol, or for the files ("hub") of Hugging Face.

    A client does not survive a fork, as its thread stays behind. The parent's one is kept all the same: if it were
    dropped here it would say goodbye to the server on the parent's connection.
    """
    key = (os.getpid(), protocol, PATIENCE)
    with _clients_lock:
        if key not in _clients:
            _clients[key] = _new_client(protocol)
        return _clients[key]


def _new_client(protocol: str) -> Any:
    limits = PATIENCE
    settings: dict[str, Any] = {}
    if protocol in ("http", "https"):
        settings["client_kwargs"] = {"trust_env": True, "auto_decompress": False}
    elif protocol == "hub":  # brings its own token, which an entry of ~/.netrc would contradict
        settings["client_kwargs"] = {"proxy": getproxies().get("https"), "auto_decompress": False}
    elif protocol in ("s3", "s3a"):
        timeouts = {"connect_timeout": limits.connect_seconds, "read_timeout": limits.stall_seconds}
        settings["config_kwargs"] = {**timeouts, "retries": {"max_attempts": 0}, "max_pool_connections": 64}
    try:
        fsspec = importlib.import_module("fsspec")
        importlib.import_module("fsspec.asyn")
        cls = fsspec.get_filesystem_class("https" if protocol == "hub" else protocol)
        if protocol == "hf":
            importlib.import_module("aiohttp")
        with told():
            client = cls(skip_instance_cache=True, use_listings_cache=False, **settings)
    except ImportError as error:
        extra = _EXTRAS.get(protocol, "remote")
        raise DataError(f"{protocol}:// needs: pip install -e '.[{extra}]'") from error
    except (ValueError, TypeError):  # fsspec does not know it, or wants more than a URL, as for ftp
        raise DataError(f"nobody can read {protocol}:// here; known: s3, gs, hf, http, https, pipe") from None
    if protocol in ("s3", "s3a"):
        client.retries = 1  # we count them ourselves
    return client


@contextmanager
def told() -> Iterator[None]:
    """Turn what libraries raise into a ``TransferError``."""
    try:
        yield
    except library_errors() as error:
        raise failure_of(error) from None  # what libraries say may hold the signed URL


def library_errors() -> tuple[type[BaseException], ...]:
    found: list[type[BaseException]] = [OSError, TimeoutError, asyncio.TimeoutError]
    for name in _LIBRARY_ERRORS:
        module, _, error = name.rpartition(".")
        if module in sys.modules:
            found.append(getattr(sys.modules[module], error))
    return tuple(found)


def failure_of(error: BaseException) -> TransferError:
    name = type(error).__name__
    status = _status(error)
    if status is not None:
        return of_status(status)
    if isinstance(error, FileNotFoundError):
        return of_status(404)
    if name == "NoCredentialsError":  # of botocore
        message = "no credentials in the environment or in ~/.aws; a public bucket needs FSSPEC_S3_ANON=true"
        return TransferError(message, temporary=False, status=401)
    if (
        isinstance(error, PermissionError)
        or "Credential" in name
        or name in ("ProfileNotFound", "DefaultCredentialsError")
    ):
        return of_status(401)
    if "Certificate" in name or "SSL" in name:
        return TransferError(f"no safe connection ({name})", temporary=False)
    if isinstance(error, TimeoutError) or "Timeout" in name:
        return TransferError(f"nothing came for {PATIENCE.stall_seconds:g} s", temporary=True)
    if name in ("InvalidURL", "InvalidUrlClientError", "NonHttpUrlClientError"):
        return TransferError("this is no URL", temporary=False)
    if name == "OfflineModeIsEnabled":  # of Hugging Face
        return TransferError("HF_HUB_OFFLINE forbids to ask for it: unset it", temporary=False)
    if (unreached := _unreached(error)) is not None:
        return unreached
    reason = getattr(getattr(error, "os_error", error), "strerror", None) or name
    names = " ".join(one.__name__ for one in type(error).__mro__)
    if isinstance(error, OSError) or any(part in names for part in _PASSES):
        return TransferError(f"the connection failed ({reason})", temporary=True)
    return TransferError(f"it cannot be read ({name})", temporary=False)


def _unreached(error: BaseException) -> TransferError | None:
    """The failure of one who found nobody, None where it is another one."""
    host = " the proxy" if "Proxy" in type(error).__name__ else _host(error)
    for one in _causes(error):
        if isinstance(one, socket.gaierror):
            message = f"the host{host} is not known ({one.strerror}): a wrong name, or no network"
        elif isinstance(one, OSError) and one.errno == errno.ECONNREFUSED:
            by = f" by{host}" if host else ""
            message = f"the connection failed (refused{by}): no server listens at this host and port"
        elif isinstance(one, OSError) and one.errno in _NO_WAY:
            message = f"the connection failed ({os.strerror(one.errno)}): no way to this host from here"
        else:
            continue
        return TransferError(message, temporary=True, unreached=True)
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it comes from, as each library keeps it."""
    for _ in range(_DEEPEST):
        yield error
        places = (
            getattr(error, "os_error", None),
            _of_botocore(error, "error"),
            error.__cause__,
            error.__context__,
        )
        below = next((one for one in places if isinstance(one, BaseException)), None)
        if below is None:
            return
        error = below


def _of_botocore(error: BaseException, name: str) -> Any:
    about = getattr(error, "kwargs", None)
    return about.get(name) if isinstance(about, dict) else None


def _host(error: BaseException) -> str:
    """A host that a library was told by its configuration, after a space; that of an http URL stands there."""
    try:
        url = _of_botocore(error, "endpoint_url") or getattr(getattr(error, "request", None), "url", "")
        host = urlsplit(str(url)).hostname
    except (ValueError, RuntimeError):  # no URL; httpx has no request to show
        return ""
    return f" {host}" if host else ""


def _status(error: BaseException) -> int | None:
    """The HTTP status behind what a library raised."""
    for one in (error, error.__cause__):  # s3fs keeps the cause
        response = getattr(one, "response", None)
        if isinstance(response, dict):  # botocore's
            response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        status = getattr(response, "status_code", response)
        if isinstance(status, int):
            return status
    status = getattr(error, "status", getattr(error, "code", None))
    if isinstance(status, int) and status >= 300:
        return status
    return None


def call(client: Any, function: Callable[..., Awaitable[Any]], *args: Any, **named: Any) -> Any:
    """Run a coroutine on the client's loop, which is another thread of this process."""
    from fsspec.asyn import sync

    seconds = PATIENCE.connect_seconds + PATIENCE.stall_seconds + _MARGIN
    with told():
        return sync(client.loop, function, *args, timeout=seconds, **named)


def ask(client: Any, method: str, *args: Any, **named: Any) -> Any:
    """Call a method of any client of fsspec, with a time limit where it can have one."""
    if getattr(client, "async_impl", False):
        return call(client, getattr(client, f"_{method}"), *args, **named)
    with told():
        return getattr(client, method)(*args, **named)


# --------------------------------------------------------------------------------------------------------------
# The files of Hugging Face (``hf://``): where they are fetched, and what is said of names that are none.

HUB_FORM = "hf://datasets/OWNER/NAME/PATH-{00000..00010}.tar"


def of_hub(client: Any, url: str) -> tuple[str, dict[str, str]]:
    """The https URL of a file of Hugging Face, and the headers that give access to it; raises TransferError."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    place = check_place(client, url)
    try:
        with told():
            if not hasattr(place, "repo_id"):  # a bucket
                return client.url(url), build_hf_headers()
    except (ValueError, NotImplementedError):
        raise _no_file() from None
    of_repository = {"repo_type": place.repo_type, "revision": place.revision}
    return hf_hub_url(
        place.repo_id, place.path_in_repo, endpoint=client.endpoint, **of_repository
    ), build_hf_headers()


def check_place(client: Any, url: str) -> Any:
    """What a URL names, as the library has it.

    Raises:
        TransferError: no file or folder of a repository, none that there is, or Hugging Face does not answer.
    """
    try:
        with told():
            try:
                return client.resolve_path(url)
            except FileNotFoundError as error:
                raise _no_repository(url, error) from None
    except (ValueError, NotImplementedError):
        raise _no_file() from None
    except TransferError as error:
        if not error.unreached or _is_dataset(url):
            raise
        message = f"{error}; and a data set is named {HUB_FORM}"  # a wrong name may wait behind the failure
        raise TransferError(message, temporary=True, unreached=True) from None


def _is_dataset(url: str) -> bool:
    return url.partition("://")[2].startswith(("datasets/", "buckets/"))


def _no_file() -> TransferError:
    return TransferError(f"this names no file of a repository; the form is {HUB_FORM}", temporary=False)


def _no_repository(url: str, error: FileNotFoundError) -> TransferError:
    what = "data set" if _is_dataset(url) else "model"
    if "Revision" in type(error.__cause__).__name__:
        message = f"the {what} has no such revision"
    else:
        message = f"there is no such {what} at Hugging Face, or it is private and HF_TOKEN does not open it"
    return TransferError(f"{message}; the form is {HUB_FORM}", temporary=False)


# --------------------------------------------------------------------------------------------------------------
# Streams that only begin at their start: the output of ``pipe:COMMAND``, and what webdataset reads by programs.
#
# A command is the user's own text: nothing here makes one from a listing or from data.

STREAMS = ("pipe", "ais", "htgs", "sftp", "ftps", "scp")
_CHUNK = 1 << 20
_CANNOT_RUN = {126: "a program of it cannot be run", 127: "a program of it was not found"}  # a shell's words


class PipeTransfer:
    """What a command writes; its end counts only where the command leaves with status 0.

    A ``Transfer`` of unknown size and version.
    """

    total = -1
    version = ""
    start = 0
    ranged = False
    checksum: tuple[str, str] | None = None

    def __init__(self, url: str) -> None:
        from webdataset import utils
        from webdataset.gopen import Pipe, gopen

        if utils.enforce_security:
            raise DataError(f"{shown(url)}: commands are forbidden by webdataset's settings")
        self._own_group = url.startswith("pipe:")
        try:
            if self._own_group:  # so that all that the shell has started can be ended
                command = url.removeprefix("pipe:")
                pipe = Pipe(command, mode="rb", shell=True, bufsize=_CHUNK, start_new_session=True)
            else:
                pipe = gopen(url, "rb", _CHUNK)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise TransferError(f"the command cannot be run ({reason})", temporary=False) from None
        self._pipe: Any = pipe
        self._process: subprocess.Popen[bytes] = pipe.proc
        self._descriptor: int = pipe.stream.fileno()
        self._readable = select.poll()  # not select(), which knows 1,024 descriptors only
        self._readable.register(self._descriptor, select.POLLIN)

    def read(self) -> bytes:
        seconds = PATIENCE.stall_seconds
        if not self._readable.poll(seconds * 1000):
            raise TransferError(f"the command has written nothing for {seconds:g} s", temporary=True)
        data = os.read(self._descriptor, _CHUNK)
        if not data:
            self._check_status(seconds)
        return data

    def _check_status(self, seconds: float) -> None:
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TransferError("the command does not end", temporary=True) from None
        if status in _CANNOT_RUN:
            message = f"the command failed with status {status}: {_CANNOT_RUN[status]}"
            raise TransferError(message, temporary=False)
        if status:
            how = f"with status {status}" if status > 0 else f"by signal {-status}"
            raise TransferError(f"the command failed {how}", temporary=True, unreached=True)

    def close(self) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                if self._own_group:
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    self._process.kill()
            self._process.wait()
        self._pipe.stream.close()


# --------------------------------------------------------------------------------------------------------------
# One transfer from a store: bytes that come one after the other, by whichever library speaks its protocol.
#
# http(s), s3 and hf arrive as streams, so that what came before a connection broke is kept; other protocols of
# fsspec are read in pieces; ``pipe:`` and the like are streams that only begin at their start. Whatever goes
# wrong is a ``TransferError``.

_CHUNK_SECONDS = 0.5  # after which fewer are
_PIECE = 4 << 20  # bytes of one request where a protocol has no streams


class Transfer(Protocol):
    """Bytes on their way.

    Attributes:
        total: the size of the whole file, -1 where nobody says.
        version: of the file, as in ``ShardFile``.
        start: the place in the file of the first byte that comes, which may lie before the one asked for.
        checksum: an algorithm of hashlib and the digest that the whole file must have, where the store says so.
        ranged: whether it can begin anywhere in the file.
    """

    total: int
    version: str
    start: int
    ranged: bool
    checksum: tuple[str, str] | None

    def read(self) -> bytes:
        """The next bytes, none at the end; raises TransferError."""

    def close(self) -> None:
        """End the transfer, wherever it stands."""


def protocol_of(url: str) -> str:
    """What stands before the colon."""
    return url.partition(":")[0].lower()


def open_transfer(url: str, start: int = 0, stop: int | None = None) -> Transfer:
    """Begin to read a file, from ``start`` up to ``stop``, its end if None.

    Raises:
        TransferError: the store does not give it.
        DataError: the library is missing, or nobody knows the protocol.
    """
    protocol = protocol_of(url)
    if protocol in STREAMS:
        return PipeTransfer(url)
    client = client_of(protocol)
    if protocol in ("http", "https", "hf"):
        return _of_http(client, url, _range(start, stop))
    if protocol in ("s3", "s3a"):
        return _of_s3(client, url, _range(start, stop))
    size, version = facts(url)
    return _InPieces(client, url, start, size if stop is None else stop, size, version)


def facts(url: str) -> tuple[int, str]:
    """Size and version of a file that is no stream, with one short request; raises as ``open_transfer``."""
    protocol = protocol_of(url)
    client = client_of(protocol)
    if protocol in ("http", "https", "hf"):
        # not HEAD, for which signed URLs are not valid
        transfer = _of_http(client, url, "bytes=0-0")
        transfer.close()
        return transfer.total, transfer.version
    if protocol in ("s3", "s3a"):
        about = call(client, client._call_s3, "head_object", **_s3_name(client, url))
        return int(about["ContentLength"]), about.get("ETag", "").strip('"')
    return _facts_of(ask(client, "info", url))


def listing(url: str) -> list[tuple[str, int, str]]:
    """Full URL, size and version of the files directly in a folder, by the store's own listing; raises as above."""
    protocol = protocol_of(url)
    client = client_of(protocol)
    if protocol == "hf":
        check_place(client, url)
    entries = ask(client, "ls", url.rstrip("/"), detail=True, refresh=True)
    return [
        (name if "://" in (name := entry["name"]) else f"{protocol}://{name}", *_facts_of(entry))
        for entry in entries
        if entry["type"] == "file"
    ]


def _facts_of(about: Mapping[str, Any]) -> tuple[int, str]:
    size = about.get("size")
    lfs = about.get("lfs")
    candidates = [lfs.get("sha256") if lfs else None]
    candidates += [about.get(name) for name in ("blob_id", "generation", "ETag", "etag", "mtime")]
    version = next((str(one) for one in candidates if one), "")
    return -1 if size is None else int(size), version.strip('"')


def _range(start: int, stop: int | None) -> str | None:
    if start == 0 and stop is None:
        return None
    return f"bytes={start}-" if stop is None else f"bytes={start}-{stop - 1}"


def _total(content_range: str | None, default: int) -> tuple[int, int]:
    """First byte and size of the whole file, from ``bytes 0-9/100``."""
    if not content_range:
        return 0, default
    span, _, total = content_range.removeprefix("bytes").strip().partition("/")
    first = span.partition("-")[0]
    return (int(first) if first.isdecimal() else 0), (int(total) if total.isdecimal() else -1)


class _Stream:
    """A transfer of an asynchronous client."""

    def __init__(
        self, client: Any, read: Callable[[], Awaitable[bytes]], close: Callable[[], Any],
        *, total: int, version: str, start: int, ranged: bool, checksum: tuple[str, str] | None,
    ) -> None:  # fmt: skip
        self.total = total
        self.version = version
        self.start = start
        self.ranged = ranged
        self.checksum = checksum
        self._client = client
        self._read = read
        self._close = close
        self._broke: TransferError | None = None

    def read(self) -> bytes:
        if self._broke is not None:
            raise self._broke
        data: bytes = call(self._client, self._some)
        return data

    async def _some(self) -> bytes:
        loop = asyncio.get_running_loop()
        until = loop.time() + _CHUNK_SECONDS
        parts: list[bytes] = []
        size = 0
        try:
            while size < _CHUNK and loop.time() < until:
                part = await self._read()
                if not part:
                    break
                parts.append(part)
                size += len(part)
        except library_errors() as error:
            if not parts:
                raise
            self._broke = failure_of(error)  # what has come is good
        return b"".join(parts)

    def close(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._client.loop.call_soon_threadsafe(self._close)


def _of_http(client: Any, url: str, byte_range: str | None) -> Transfer:
    headers = {"Accept-Encoding": "identity"}
    if byte_range:
        headers["Range"] = byte_range
    if protocol_of(url) == "hf":
        url, own = of_hub(client, url)
        headers |= own
        client = client_of("hub")
    response = call(client, _get, client, _as_written(url), headers)
    checksum = None
    etags = [one.headers.get("X-Linked-ETag") for one in response.history]  # of Hugging Face
    version = next(filter(None, etags), None) or response.headers.get("ETag")
    version = (version or response.headers.get("Last-Modified", "")).removeprefix("W/").strip('"')
    if any(etags) and len(version) == 64:
        checksum = ("sha256", version)
    length = response.headers.get("Content-Length", "")
    start, total = _total(response.headers.get("Content-Range"), int(length) if length.isdecimal() else -1)
    read: Callable[[], Awaitable[bytes]] = partial(_any_of, response.content)
    if response.status == 416:
        response.close()
        if total != 0 or byte_range is None or not byte_range.startswith("bytes=0-"):
            raise of_status(416)
        read = _nothing  # of an empty file even the first byte is too much
    # where all is asked for a server that knows ranges may well answer with 200
    ranged = response.status != 200 or response.headers.get("Accept-Ranges", "").lower() == "bytes"
    return _Stream(
        client, read, response.close,
        total=total, version=version, start=start, ranged=ranged, checksum=checksum,
    )  # fmt: skip


async def _nothing() -> bytes:
    return b""


def _as_written(url: str) -> Any:
    import yarl

    try:  # where it can be left as it is it must be, as its signature may be of that
        return yarl.URL(url, encoded=url.isascii() and url.isprintable() and " " not in url)
    except ValueError:
        raise TransferError("this is no URL", temporary=False) from None


async def _get(client: Any, url: Any, headers: dict[str, str]) -> Any:
    import aiohttp

    limits = PATIENCE
    session = await client.set_session()
    times = aiohttp.ClientTimeout(
        total=None, sock_connect=limits.connect_seconds, sock_read=limits.stall_seconds
    )
    response = await session.get(url, headers=headers, timeout=times, read_bufsize=_CHUNK)
    if response.status not in (200, 206, 416):
        after = response.headers.get("Retry-After", "")
        response.close()
        raise of_status(response.status, wait=float(after) if after.isdecimal() else None)
    return response


async def _any_of(content: Any) -> bytes:
    """What a stream of aiohttp holds, or else what comes next.

    When a connection breaks aiohttp withholds the bytes that came before; they are fetched all the same, as a
    server that breaks off again and again would else never bring us on.
    """
    from aiohttp import ClientError

    try:
        data: bytes = await content.readany()
    except (ClientError, OSError) as error:
        content.set_exception(None)
        data = content.read_nowait()
        content.set_exception(error)
        if not data:
            raise
    return data


def _s3_name(client: Any, url: str) -> dict[str, str]:
    bucket, key, version = client.split_path(url)
    return {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}


def _of_s3(client: Any, url: str, byte_range: str | None) -> Transfer:
    named = _s3_name(client, url)
    if byte_range:
        named["Range"] = byte_range
    answer = call(client, client._call_s3, "get_object", **named)
    body = answer["Body"]
    version = answer.get("ETag", "").strip('"')
    # the etag is no MD5 of a file that came in parts or that is encrypted with a key of its own
    plain = answer.get("ServerSideEncryption") in (None, "AES256") and "SSECustomerAlgorithm" not in answer
    checksum = ("md5", version) if plain and len(version) == 32 and version.isalnum() else None
    start, total = _total(answer.get("ContentRange"), int(answer["ContentLength"]))

    content = getattr(getattr(body, "raw_stream", None), "content", None)
    read = partial(body.read, _CHUNK) if content is None else partial(_any_of, content)
    ranged = "ContentRange" in answer or answer.get("AcceptRanges", "").lower() == "bytes"
    return _Stream(
        client, read, body.close,
        total=total, version=version, start=start, ranged=ranged, checksum=checksum,
    )  # fmt: skip


class _InPieces:
    """A transfer by one request after the other."""

    ranged = True
    checksum: tuple[str, str] | None = None

    def __init__(self, client: Any, url: str, start: int, stop: int, total: int, version: str) -> None:
        self.total = total
        self.version = version
        self.start = start
        self._client = client
        self._url = url
        self._stop = min(stop, total) if total >= 0 else stop

    def read(self) -> bytes:
        if self.start >= self._stop:
            return b""
        stop = min(self._stop, self.start + _PIECE)
        data: bytes = ask(self._client, "cat_file", self._url, start=self.start, end=stop)
        self.start = stop
        return data

    def close(self) -> None:
        pass


# --------------------------------------------------------------------------------------------------------------

_MANY = 32  # questions to a store at a time
_MAX_PAGE_BYTES = 64 << 20  # of a listing: some 500,000 links
_SMALLEST_BLOCK = 64 << 10
_LARGEST_BLOCK = 8 << 20
_FAR = (
    1 << 20
)  # bytes; where headers lie further apart, the data between them take longer than another request


def list_folder(url: str) -> list[ShardFile]:
    """The ``*.tar`` directly in a folder, by (length of the name, name); none where there are none.

    A folder of http(s) is its page of links; of these only those into the same folder count.

    Raises:
        DataError: the folder cannot be listed.
    """
    if protocol_of(url) in STREAMS:
        raise DataError(f"{shown(url)}: this is no folder that can be listed; name the shards")
    if protocol_of(url) in ("http", "https"):
        shards = describe(_links(url))
    else:
        found = _patiently(url, lambda: listing(url))
        shards = [
            ShardFile(url=name, size=size, version=version)
            for name, size, version in found
            if name.endswith(".tar")
        ]
    return sorted(shards, key=lambda shard: name_order(shard.name))


def _links(url: str) -> list[str]:
    folder = url.partition("#")[0].partition("?")[0].rstrip("/") + "/"
    text = read_text(folder, limit=_MAX_PAGE_BYTES)
    if text is None:
        raise DataError(f"{shown(folder)}: there is no such folder, or it may not be listed; name the shards")
    parser = _Links()
    parser.feed(text)
    found = dict.fromkeys(_joined(folder, link) for link in parser.links)
    return [
        link
        for link in found
        if link.startswith(folder) and link.endswith(".tar") and "/" not in link[len(folder) :]
    ]


def _joined(folder: str, link: str) -> str:
    try:
        whole = urljoin(folder, link)
        # a link of the whole address leaves out the user that we came with
        if (parts := urlsplit(whole)).netloc == urlsplit(folder).netloc.rpartition("@")[2]:
            whole = parts._replace(netloc=urlsplit(folder).netloc).geturl()
    except ValueError:  # not everything in a page is a URL
        return ""
    return whole


class _Links(HTMLParser):
    """What the links of a page point to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def describe(urls: Sequence[str]) -> list[ShardFile]:
    """Size and version of each of these, in their order; many are asked at a time.

    Paths of this machine are described too; of a stream (``pipe:``) nothing is known.

    Raises:
        DataError: some are missing (they are counted, the first is named), or the store does not answer.
    """
    failed = threading.Event()  # none but the first of a million shards is tried again and again

    def look(url: str) -> ShardFile | None:
        try:
            return None if failed.is_set() else _described(url)
        except DataError:
            failed.set()
            raise

    pool = ThreadPoolExecutor(min(_MANY, max(1, len(urls))))
    try:
        found = list(pool.map(look, urls))
    finally:
        pool.shutdown(cancel_futures=True)
    missing = [url for url, shard in zip(urls, found, strict=True) if shard is None]
    if missing:
        form = f"; the form is {HUB_FORM}" if protocol_of(missing[0]) == "hf" else ""
        if len(urls) == 1:
            raise DataError(f"{shown(missing[0])}: there is no such file{form}")
        raise DataError(
            f"{len(missing)} of {len(urls)} shards are missing, the first is {shown(missing[0])}{form}"
        )
    return [shard for shard in found if shard is not None]


def _described(url: str) -> ShardFile | None:
    if not is_remote(url):
        return ShardFile.at(Path(url)) if Path(url).exists() else None
    if protocol_of(url) in STREAMS:
        return ShardFile(url=url, size=-1, version="")
    found = _patiently(url, lambda: facts(url), (404, 410))
    return None if found is None else ShardFile(url=url, size=found[0], version=found[1])


def _patiently(url: str, work: Callable[[], Any], none_for: Sequence[int] = ()) -> Any:
    """The result of a short request, None for these statuses."""
    attempts = Attempts(url)
    while True:
        try:
            result = work()
            attempts.answered()
            return result
        except TransferError as error:
            if error.status in none_for:
                attempts.answered()
                return None
            attempts.failed(error)


def read_text(url: str, *, limit: int) -> str | None:
    """A small file beside shards; None where there is none, or where only the shards may be read.

    Raises:
        DataError: it is longer than ``limit`` bytes, or the store does not answer.
    """

    def read() -> bytes:
        with closing(open_transfer(url)) as transfer:
            data = b""
            while len(data) <= limit and (part := transfer.read()):
                data += part
            if len(data) < min(transfer.total, limit):
                raise TransferError("it ended early", temporary=True)
            return data

    # a store may say "forbidden" of what is not there to those who may not list, and a signed URL is of one file
    data = _patiently(url, read, (401, 403, 404, 410))
    if data is None:
        return None
    if len(data) > limit:
        raise DataError(f"{shown(url)} is longer than {limit} bytes")
    return str(data, "utf-8", "replace")


def read_range(shard: ShardFile, start: int, stop: int) -> bytes:
    """Exactly the bytes ``start`` to ``stop`` of a shard.

    Raises:
        DataError: the file has changed since it was indexed, its server has no ranges, or it does not answer.
    """
    if stop <= start:
        return b""
    attempts = _attempts(shard)
    data = bytearray()
    while len(data) < stop - start:
        try:
            _read_on(shard, start, stop, data, attempts)
        except TransferError as error:
            if error.status == 416:
                raise _changed(shard) from None
            attempts.failed(error)
    return bytes(data)


def _attempts(shard: ShardFile) -> Attempts:
    attempts = Attempts(shard.url)
    if shard.size >= 0 or shard.version:  # somebody has been told of it, if not this process
        attempts.answered()
    return attempts


def _read_on(shard: ShardFile, start: int, stop: int, data: bytearray, attempts: Attempts) -> None:
    here = start + len(data)
    with closing(open_transfer(shard.url, here, stop)) as transfer:
        _check_same(shard, transfer)
        if not transfer.ranged or transfer.start != here:
            attempts.give_up(
                "this server gives no ranges, only whole files: set data.cache_gb (--cache-gb) to more than 0"
            )
        while len(data) < stop - start and (part := transfer.read()):
            data += part[: stop - start - len(data)]
            attempts.received(len(part))
        if len(data) < stop - start:
            raise TransferError("it ended early", temporary=True)


def _check_same(shard: ShardFile, transfer: Transfer) -> None:
    other_size = min(shard.size, transfer.total) >= 0 and shard.size != transfer.total
    if other_size or (shard.version and transfer.version and shard.version != transfer.version):
        raise _changed(shard)


def _changed(shard: ShardFile) -> DataError:
    return DataError(f"{shown(shard.url)} has changed since it was indexed: start again, to index it anew")


def download(shard: ShardFile, path: Path, *, room: Callable[[int], None] | None = None) -> int:
    """Fetch a whole file into ``path``, going on after a failure at the byte that was reached.

    A stream (``pipe:``) begins again. The size is checked, and the checksum where the store states one: an S3
    etag that is an MD5, the SHA-256 of a large file of Hugging Face.

    Args:
        shard: what to fetch.
        path: the file to make; what it holds is overwritten. It is not synced, and stays behind after a failure.
        room: called before each write with the size that the file is going to have; what it raises ends all.

    Returns:
        The CRC-32 of the bytes.

    Raises:
        DataError: the store does not give the file, gives another one, or it cannot be written.
    """
    attempts = _attempts(shard)
    try:
        with path.open("wb") if not path.exists() else path.open("r+b") as file:
            sink = _Sink(file, room)
            while not _fetched(shard, sink, attempts):
                pass
            file.truncate(sink.size)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
    return sink.crc


class _Sink:
    """A file that is written from its start, and what is known of its bytes.

    ``version`` is that of the file whose first bytes it has; ``furthest`` the largest size that it has had.
    """

    def __init__(self, file: BinaryIO, room: Callable[[int], None] | None) -> None:
        self._file = file
        self._room = room
        self.furthest = 0
        self.restart()

    def restart(self) -> None:
        self._file.seek(0)
        self.version = ""
        self.size = 0
        self.crc = 0
        self._digests: dict[str, Any] = {}

    def write(self, data: bytes, checksum: tuple[str, str] | None) -> None:
        if self._room is not None:
            self._room(self.size + len(data))
        if checksum is not None and not self.size:
            self._digests = {checksum[0]: hashlib.new(checksum[0], usedforsecurity=False)}
        self._file.write(data)
        self.size += len(data)
        self.furthest = max(self.furthest, self.size)
        self.crc = zlib.crc32(data, self.crc)
        for digest in self._digests.values():
            digest.update(data)

    def agrees(self, checksum: tuple[str, str] | None) -> bool:
        digest = self._digests.get(checksum[0]) if checksum else None
        return digest is None or checksum is None or digest.hexdigest() == checksum[1]


def _fetched(shard: ShardFile, sink: _Sink, attempts: Attempts) -> bool:
    """Whether all has come now; False when there is more to try."""
    try:
        if protocol_of(shard.url) in STREAMS:
            sink.restart()
        with closing(open_transfer(shard.url, sink.size)) as transfer:
            if protocol_of(shard.url) not in STREAMS:  # a command that runs may still fail
                attempts.answered()
            _check_same(replace(shard, version=sink.version) if sink.version else shard, transfer)
            sink.version = transfer.version
            if not 0 <= transfer.start <= sink.size:
                attempts.give_up("its server answers with other bytes than those asked for")
            known = sink.size - transfer.start  # of a server that always begins at the start
            expected = max(transfer.total, shard.size)
            while part := transfer.read():
                new = part[known:]
                # what is begun again must come further than before, or it would begin again for ever
                attempts.received(len(part), new=sink.size + len(new) > sink.furthest)
                if new:
                    if 0 <= expected < sink.size + len(new):
                        attempts.give_up(f"more comes than its {expected} bytes")
                    sink.write(new, transfer.checksum)
                known = max(0, known - len(part))
            if sink.size < expected:
                raise TransferError(f"it ended at byte {sink.size} of {expected}", temporary=True)
            if not sink.agrees(transfer.checksum):
                sink.restart()
                raise TransferError(
                    "its bytes do not have the checksum that the store states", temporary=True
                )
    except TransferError as error:
        if error.status == 416 and sink.size:
            raise _changed(shard) from None
        attempts.failed(error)
        return False
    attempts.answered()
    return True


class RangedBytes:
    """The bytes of a shard in a store, for a scan of its headers (a ``Content`` of ``clipkit.files.tar``).

    Reads ahead. Where headers lie close together blocks double up to 8 MiB, so that a scan takes one request for
    each of these; where members are so large that their data take longer than a request, only the surroundings of
    headers are read. Not for several threads at once.

    Attributes:
        requests: how many there were.
        bytes_read: by all of these.
    """

    def __init__(self, shard: ShardFile) -> None:
        if shard.size < 0:
            raise DataError(f"{shown(shard.url)}: nobody knows its size, so it cannot be read in parts")
        self._shard = shard
        self._start = 0
        self._block = b""
        self._block_size = _SMALLEST_BLOCK
        self._served = 0  # reads of places that lie one after the other
        self.requests = 0
        self.bytes_read = 0

    def __len__(self) -> int:
        return self._shard.size

    def __getitem__(self, part: slice, /) -> bytes:
        start, stop, step = part.indices(len(self))
        assert step == 1, "bytes are read in their order"
        if stop <= start:
            return b""
        if not self._start <= start <= stop <= self._start + len(self._block):
            self._read(start, stop)
        self._served += 1
        return self._block[start - self._start : stop - self._start]

    def _read(self, start: int, stop: int) -> None:
        if self._block:
            stride = (start - self._start) / max(self._served, 1)
            close = 0 <= stride <= _FAR
            self._block_size = min(self._block_size * 2, _LARGEST_BLOCK) if close else _SMALLEST_BLOCK
        stop = min(max(stop, start + self._block_size), len(self))
        self._block = read_range(self._shard, start, stop)
        self._start, self._served = start, 0
        self.requests += 1
        self.bytes_read += len(self._block)

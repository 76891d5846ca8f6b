"""The clients of the libraries that speak with stores, and what their failures mean.

Libraries are imported at the first use. Clients belong to one process: a forked one makes its own.
"""

import asyncio
import errno
import importlib
import os
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from clipkit.errors import DataError
from data.remote import patience
from data.remote.patience import TransferError, of_status

__all__ = ["ask", "call", "client_of", "failure_of", "library_errors", "told"]

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

_clients: dict[tuple[int, str, patience.Patience], Any] = {}  # never emptied: see client_of
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
    key = (os.getpid(), protocol, patience.PATIENCE)
    with _clients_lock:
        if key not in _clients:
            _clients[key] = _new_client(protocol)
        return _clients[key]


def _new_client(protocol: str) -> Any:
    limits = patience.PATIENCE
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
        return TransferError(f"nothing came for {patience.PATIENCE.stall_seconds:g} s", temporary=True)
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

    seconds = patience.PATIENCE.connect_seconds + patience.PATIENCE.stall_seconds + _MARGIN
    with told():
        return sync(client.loop, function, *args, timeout=seconds, **named)


def ask(client: Any, method: str, *args: Any, **named: Any) -> Any:
    """Call a method of any client of fsspec, with a time limit where it can have one."""
    if getattr(client, "async_impl", False):
        return call(client, getattr(client, f"_{method}"), *args, **named)
    with told():
        return getattr(client, method)(*args, **named)

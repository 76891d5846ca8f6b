"""Download many small files from many web servers at once, within limits for each server."""

import asyncio
import ipaddress
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from types import TracebackType
from typing import Any
from urllib.request import getproxies, proxy_bypass

import aiohttp
import yarl

from clipkit.errors import ConfigError
from clipkit.files import redact_url
from clipkit.samples.remote import CLIENT_OPTIONS, encode_url
from data.options import FetchOptions

_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_MOST_REDIRECTS = 5
_REDIRECTIONS = frozenset({301, 302, 303, 307, 308})
_LONGEST_PAUSE = 60.0  # seconds; a longer Retry-After is ignored
_MOST_REFUSED = 8  # downloads, after which a host's other rows fail at once
_RESOLVERS = 64  # concurrent DNS lookups
_ENCODINGS = frozenset({"", "identity", "gzip", "deflate", "br", "zstd"})
_NO_TRAINING = frozenset({"noai", "noimageai", "noindex", "noimageindex"})
# the first word selects directives of ``X-Robots-Tag``
_USER_AGENT = "clipkit (+https://pypi.org/project/clipkit)"
_PRIVATE = "host with a private address (--allow-private --retry-failed tries again)"
_WITH_VALUE = frozenset({"unavailable_after", "max-snippet", "max-image-preview", "max-video-preview"})


class FetchError(Exception):
    """The cause of a failed download; downloads with the same cause have the same message."""

    def __init__(self, cause: str, *, temporary: bool = False, pause: float = 0.0) -> None:
        super().__init__(cause)
        self.temporary = temporary
        self.pause = pause


@dataclass
class _Host:
    slots: asyncio.Semaphore
    users: int = 0
    not_before: float = 0.0  # time.monotonic() of the next request
    refused: int = 0  # downloads in a row that failed although all waits that the host asked for were made


class Fetcher:
    """Downloads files by URL; use it as an asynchronous context manager in one event loop."""

    def __init__(self, options: FetchOptions) -> None:
        self._options = options
        self._slots = asyncio.Semaphore(options.connections)
        self._hosts: dict[str, _Host] = {}

    async def __aenter__(self) -> "Fetcher":
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_RESOLVERS, "resolve"))
        options = self._options
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # limited by _slots, so that requests waiting for one host do not block others
                ttl_dns_cache=300,
                resolver=aiohttp.ThreadedResolver(),
                socket_factory=None if options.allow_private else partial(_public_socket, _proxy_addresses()),
            ),
            timeout=aiohttp.ClientTimeout(total=options.timeout),
            headers={"User-Agent": _USER_AGENT, "Accept": "image/*,*/*;q=0.5"},
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=2**18,
            **CLIENT_OPTIONS,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def fetch(self, url: str, use: Callable[[bytes], Awaitable[None]]) -> None:
        """Download a URL and pass its body to ``use``.

        The request ends when ``use`` returns, so at most ``connections`` bodies are in memory.
        """
        try:
            target = encode_url(url)
            scheme = target.scheme
            host = target.raw_host or ""
        except ValueError:
            raise FetchError("invalid URL") from None
        if scheme not in ("http", "https"):
            raise FetchError("not a URL that begins with http:// or https://")
        if not host:
            raise FetchError("invalid URL")
        async with self._host(host) as state:
            if state.refused >= _MOST_REFUSED:
                raise FetchError("host refuses requests (Retry-After)")
            for attempt in range(self._options.retries + 1):
                while (wait := state.not_before - time.monotonic()) > 0:
                    await asyncio.sleep(wait)
                try:
                    async with self._slots:
                        await use(await self._get(target))
                    state.refused = 0
                    return
                except FetchError as error:
                    if not error.temporary or attempt == self._options.retries:
                        state.refused += error.pause > 0
                        raise
                    if error.pause:  # applies to the whole host
                        state.not_before = max(state.not_before, time.monotonic() + error.pause)
                    else:
                        await asyncio.sleep(2**attempt * random.uniform(0.5, 1.0))

    @asynccontextmanager
    async def _host(self, name: str) -> AsyncIterator[_Host]:
        state = self._hosts.setdefault(name, _Host(asyncio.Semaphore(self._options.per_host)))
        state.users += 1
        try:
            async with state.slots:
                yield state
        finally:
            state.users -= 1
            if not state.users and not state.refused and state.not_before <= time.monotonic():
                self._hosts.pop(name, None)

    async def _get(self, url: yarl.URL, redirects: int = 0) -> bytes:
        options = self._options
        max_bytes = options.max_mb * 2**20
        proxy = _find_proxy(url)
        # a proxy connects to hosts itself, so the address of each redirect is checked here
        is_checked = bool(proxy) and not options.allow_private
        if is_checked and _is_private_address(url.host or ""):
            raise FetchError(_PRIVATE)
        try:
            async with self._session.get(
                url, max_redirects=_MOST_REDIRECTS, allow_redirects=not is_checked, proxy=proxy
            ) as response:
                location = response.headers.get("Location", "")
                if is_checked and response.status in _REDIRECTIONS and location:
                    if redirects == _MOST_REDIRECTS:
                        raise FetchError("too many redirects")
                    return await self._get(url.join(yarl.URL(location)), redirects + 1)
                if response.status != 200:
                    raise FetchError(
                        f"HTTP {response.status}",
                        temporary=response.status in _RETRIED,
                        pause=_parse_retry_after(response.headers.get("Retry-After", "")),
                    )
                if not options.ignore_robots and _forbids_training(
                    response.headers.getall("X-Robots-Tag", [])
                ):
                    raise FetchError("use forbidden by X-Robots-Tag")
                if response.headers.get("Content-Encoding", "identity").lower() not in _ENCODINGS:
                    raise FetchError("unsupported Content-Encoding")
                if (response.content_length or 0) > max_bytes:
                    raise FetchError(f"more than {options.max_mb} MiB")
                body = bytearray()
                async for piece in response.content.iter_any():
                    body += piece
                    if len(body) > max_bytes:
                        raise FetchError(f"more than {options.max_mb} MiB")
                if not body:
                    raise FetchError("empty response")
                return bytes(body)
        except FetchError:
            raise
        except TimeoutError:
            raise FetchError("no complete response in time", temporary=True) from None
        except aiohttp.TooManyRedirects:
            raise FetchError("too many redirects") from None
        except aiohttp.ClientConnectorCertificateError:
            raise FetchError("invalid certificate") from None
        except aiohttp.ClientConnectorSSLError:
            raise FetchError("no TLS connection") from None
        except aiohttp.ClientProxyConnectionError:
            raise FetchError("no connection to the proxy", temporary=True) from None
        except aiohttp.ClientHttpProxyError as error:
            raise FetchError(
                f"HTTP {error.status} from the proxy", temporary=error.status in _RETRIED
            ) from None
        except aiohttp.ClientConnectorDNSError:
            raise FetchError("unknown host", temporary=True) from None
        except aiohttp.ClientConnectorError as error:
            if "is not public" in str(error.os_error):
                raise FetchError(_PRIVATE) from None
            raise FetchError("no connection", temporary=True) from None
        except (aiohttp.InvalidURL, aiohttp.RedirectClientError):
            raise FetchError("invalid URL, or redirected to one") from None
        except aiohttp.ClientPayloadError:
            raise FetchError("truncated or malformed response", temporary=True) from None
        except (aiohttp.ClientError, OSError, ValueError, EOFError) as error:
            if "content-encoding" in str(error):  # needs a library that is not installed
                raise FetchError("unsupported Content-Encoding") from None
            raise FetchError("connection lost or malformed response", temporary=True) from None


def _read_proxies() -> dict[str, yarl.URL]:
    """Return the proxy of each scheme by the variables HTTP_PROXY and HTTPS_PROXY, or ALL_PROXY."""
    proxies = {}
    variables = getproxies()
    for scheme in ("http", "https"):
        value = variables.get(scheme) or variables.get("all", "")
        if not value:
            continue
        try:
            proxy = yarl.URL(value if "://" in value else f"http://{value}")
            is_valid = proxy.scheme in ("http", "https") and bool(proxy.host and proxy.port)
        except ValueError:
            is_valid = False
        if not is_valid:
            raise ConfigError(
                f"{scheme.upper()}_PROXY = {redact_url(value)!r} is not the URL of an HTTP proxy, such as http://proxy:3128"
            )
        proxies[scheme] = proxy
    return proxies


def _find_proxy(url: yarl.URL) -> yarl.URL | None:
    """Return the proxy for a URL; None for those of NO_PROXY."""
    if proxy_bypass(f"{url.host}:{url.port}"):
        return None
    return _read_proxies().get(url.scheme)


def _proxy_addresses() -> set[tuple[str, int]]:
    """Return addresses and ports of all proxies, which may be private."""
    addresses: set[tuple[str, int]] = set()
    for proxy in _read_proxies().values():
        assert proxy.host and proxy.port
        with suppress(OSError):
            for *_, address in socket.getaddrinfo(proxy.host, proxy.port):
                addresses.add((str(address[0]), proxy.port))
    return addresses


def _is_private_address(host: str) -> bool:
    """Return whether a host is a private address in any notation, such as 127.1, or this machine by name."""
    host = host.rstrip(".").lower()
    with suppress(ValueError):
        return not _is_public(ipaddress.ip_address(host))
    with suppress(OSError):
        return not _is_public(ipaddress.IPv4Address(socket.inet_aton(host)))
    return host == "localhost" or host.endswith(".localhost")  # the proxy resolves names


def _public_socket(proxies: set[tuple[str, int]], info: Any) -> socket.socket:
    family, kind, protocol, _, address = info
    if address[:2] not in proxies and not _is_public(ipaddress.ip_address(address[0].partition("%")[0])):
        raise OSError(f"{address[0]} is not public")
    return socket.socket(family, kind, protocol)


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether an address, and any IPv4 address embedded in it, is public."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in ipaddress.ip_network("64:ff9b::/96"):  # NAT64
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if not all(_is_public(inner_address) for inner_address in inner if inner_address is not None):
            return False
        if address.ipv4_mapped is not None:
            return True
    return address.is_global and not address.is_multicast


def _parse_retry_after(retry_after: str) -> float:
    """Return the seconds in a ``Retry-After`` header; 0 if it is invalid or too long."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return seconds if 0 < seconds <= _LONGEST_PAUSE else 0.0


def _forbids_training(tags: list[str]) -> bool:
    """Return whether ``X-Robots-Tag`` headers forbid training on an image.

    A header is a list of directives; those after ``NAME:`` apply to one crawler only.
    """
    product = _USER_AGENT.split()[0]
    for tag in tags:
        addressed = True
        for directive in tag.lower().split(","):
            crawler, colon, rest = directive.partition(":")
            if colon and crawler.strip() not in _WITH_VALUE:
                addressed = crawler.strip() == product
            if addressed and (rest if colon else crawler).strip() in _NO_TRAINING:
                return True
    return False

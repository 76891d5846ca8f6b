"""How long to try to read from a store, and how its failures are told: in one line, without secrets.

A failure that passes by itself (a broken connection, a timeout, a server that is overloaded) is tried again after
a wait that doubles; one that does not (a wrong name, missing rights) ends at once. That a store cannot be reached
is most often a mistake as long as it has never answered, and told within seconds; from then on it is an outage, and
waited out.
"""

import logging
import random
import time
from dataclasses import dataclass
from typing import NoReturn

from clipkit.errors import DataError
from clipkit.urls import shown

__all__ = [
    "PATIENCE", "Attempts", "Patience", "TransferError", "Unreachable", "has_answered", "of_status", "shown",
]  # fmt: skip

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

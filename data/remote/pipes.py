"""Streams that only begin at their start: the output of ``pipe:COMMAND``, and what webdataset reads by programs.

A command is the user's own text: nothing here makes one from a listing or from data.
"""

import os
import select
import signal
import subprocess
from contextlib import suppress
from typing import Any

from clipkit.errors import DataError
from data.remote import patience
from data.remote.patience import TransferError

__all__ = ["STREAMS", "PipeTransfer"]

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
            raise DataError(f"{patience.shown(url)}: commands are forbidden by webdataset's settings")
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
        seconds = patience.PATIENCE.stall_seconds
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

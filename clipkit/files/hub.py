"""Downloads from the Hugging Face hub and by open_clip.

Failures raise a one-line error without delay; by default, the libraries would retry, wait and log each attempt.
"""

import http.client
import logging
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clipkit.errors import ConfigError
from clipkit.files.open_clip import download_weights

__all__ = ["HUB", "fetch_published", "fetch_repository", "from_hub"]

HUB = "hf-hub:"
_TIMEOUT = 10.0  # seconds
_FILES = (
    "*.json", "*.txt", "*.model", "*.safetensors", "open_clip_pytorch_model.bin", "pytorch_model*.bin",
)  # fmt: skip


def fetch_repository(source: str) -> Path:
    """Download a repository of the hub, ``hf-hub:OWNER/REPOSITORY``, and return its folder.

    Raises:
        ConfigError: it is not in the local cache, and downloading it failed.
    """
    from huggingface_hub import snapshot_download

    with _downloading(source):
        return Path(snapshot_download(source.removeprefix(HUB), allow_patterns=list(_FILES)))


def fetch_published(source: str, published: Mapping[str, Any]) -> Path:
    """Download weights from open_clip's registry; raises the same errors as ``fetch_repository``.

    Args:
        source: name for error messages.
        published: the registry's entry.
    """
    from huggingface_hub import constants, snapshot_download

    with _downloading(source):
        repository = str(published.get("hf_hub") or "").rpartition("/")[0]
        if repository and not constants.HF_HUB_OFFLINE:
            # try one request first, because the downloader would retry for a minute
            snapshot_download(repository, allow_patterns=["open_clip_config.json"])
        return download_weights(published)


@contextmanager
def _downloading(source: str) -> Iterator[None]:
    try:
        with _quiet():
            yield
    except (OSError, ValueError, RuntimeError) as error:
        cause = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{source} is not stored on this machine, and downloading it failed; check the network "
            f"connection: {cause}"
        ) from error


@contextmanager
def from_hub(name: str) -> Iterator[None]:
    """Convert errors of a library that reads a folder or a hub repository to ConfigError.

    Raises:
        ConfigError: reading failed.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        with _quiet(), _offline_if_unreachable(name):
            yield
    except (OSError, ValueError, KeyError, HfHubHTTPError, HFValidationError) as error:
        first = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{name!r} is not a usable folder, and reading it from the Hugging Face hub failed: {first}"
        ) from error


@contextmanager
def _offline_if_unreachable(name: str) -> Iterator[None]:
    """Use only the cache if the hub does not respond to a request; libraries would retry for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or Path(name).exists() or _reachable(constants.ENDPOINT):
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False


def _reachable(address: str) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_TIMEOUT).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:  # the library may use other certificates
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, http.client.HTTPException):
        return False
    except ValueError:  # an unusual address
        return True
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress log messages of the hub client."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

"""All that is fetched from the network: from the Hugging Face hub, and by open_clip's downloader.

Whatever fails there becomes one line, and soon: without a network these libraries would ask many times, wait in
between, and tell of each try.
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
_PATIENCE = 10.0  # seconds
_FILES = (
    "*.json", "*.txt", "*.model", "*.safetensors", "open_clip_pytorch_model.bin", "pytorch_model*.bin",
)  # fmt: skip


def fetch_repository(source: str) -> Path:
    """A repository of the hub, ``hf-hub:OWNER/REPOSITORY``, as a folder.

    Raises:
        ConfigError: it is not stored here, and could not be fetched.
    """
    from huggingface_hub import snapshot_download

    with _fetching(source), _few_words():
        return Path(snapshot_download(source.removeprefix(HUB), allow_patterns=list(_FILES)))


def fetch_published(source: str, published: Mapping[str, Any]) -> Path:
    """The file of weights of open_clip's registry; errors as for ``fetch_repository``.

    Args:
        source: how it was asked for, for a message.
        published: what the registry says of it.
    """
    from huggingface_hub import constants, snapshot_download

    with _fetching(source), _few_words():
        repository = str(published.get("hf_hub") or "").rpartition("/")[0]
        if repository and not constants.HF_HUB_OFFLINE:
            # one question first, as the downloader would ask many times, for a minute
            snapshot_download(repository, allow_patterns=["open_clip_config.json"])
        return download_weights(published)


@contextmanager
def _fetching(source: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        cause = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{source} is not stored on this machine, and fetching it failed; is there a network? {cause}"
        ) from error


@contextmanager
def from_hub(name: str) -> Iterator[None]:
    """Around a library's reading of a folder or of a name on the hub: its many errors become one line.

    Raises:
        ConfigError: it was not to be had.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        with _few_words(), _asking_once(name):
            yield
    except (OSError, ValueError, KeyError, HfHubHTTPError, HFValidationError) as error:
        first = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{name!r} is no usable folder, and the Hugging Face hub did not give it: {first}"
        ) from error


@contextmanager
def _asking_once(name: str) -> Iterator[None]:
    """One question ahead, as libraries repeat theirs for half a minute; unanswered, only what is stored is read."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or Path(name).exists() or _answers(constants.ENDPOINT):
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False


def _answers(address: str) -> bool:
    """Whether a server can be reached, through a proxy where the environment names one."""
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_PATIENCE).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:  # certificates are the library's affair, which may have others
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, http.client.HTTPException):
        return False
    except ValueError:  # an address of another kind
        return True
    return True


@contextmanager
def _few_words() -> Iterator[None]:
    """No remarks on each try."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

"""Downloads from the Hugging Face hub and by open_clip, and uploads to the hub.

Failures raise a one-line error without delay; by default, the libraries would retry, wait and log each attempt.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clipkit.errors import ConfigError
from clipkit.files.open_clip import download_weights

HUB = "hf-hub:"
_TIMEOUT = 10.0  # seconds
_FILES = (
    "*.json", "*.txt", "*.model", "*.safetensors", "open_clip_pytorch_model.bin", "pytorch_model*.bin",
    "visual.onnx*", "textual.onnx*", "visual.xml", "visual.bin", "textual.xml", "textual.bin",
)  # fmt: skip


def fetch_repository(source: str) -> Path:
    """Download a repository of the hub, ``hf-hub:OWNER/REPOSITORY``, and return its folder."""
    from huggingface_hub import snapshot_download

    with _convert_download_errors(source):
        return Path(snapshot_download(source.removeprefix(HUB), allow_patterns=list(_FILES)))


def fetch_published(source: str, published: Mapping[str, Any]) -> Path:
    """Download weights from open_clip's registry; raises the same errors as ``fetch_repository``."""
    from huggingface_hub import constants, snapshot_download

    with _convert_download_errors(source):
        repository = str(published.get("hf_hub") or "").rpartition("/")[0]
        if repository and not constants.HF_HUB_OFFLINE:
            # try one request first, because the downloader would retry for a minute
            snapshot_download(repository, allow_patterns=["open_clip_config.json"])
        return download_weights(published)


_LOGIN = "set HF_TOKEN to a token with write access, or run `hf auth login`"
_REFUSALS = {
    401: f"the token is invalid or expired: {_LOGIN}",
    403: f"the token may not write there: {_LOGIN}",
    404: "there is no such owner or repository, or the token gives no access",
}


def check_push(repository: str) -> None:
    """Check the name of a repository, that the hub responds, and that it accepts the token of the user.

    The token is that of the environment variable HF_TOKEN or of a login; it is never part of a message.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import validate_repo_id

    owner, slash, name = repository.partition("/")
    if not (owner and slash and name) or "/" in name:
        raise ConfigError(f"{repository!r} is not a repository: expected OWNER/NAME")
    if not get_token():
        raise ConfigError(f"cannot write {repository}: there is no token: {_LOGIN}")
    with _convert_push_errors(repository):
        validate_repo_id(repository)
        HfApi().whoami()


def push_folder(
    folder: Path,
    repository: str,
    *,
    private: bool,
    skipped: Sequence[str],
    listing: str,
    listed: Callable[[Path], set[str]],
) -> str:
    """Upload a folder to a repository of the hub, which is created if needed; return its address.

    What has been uploaded is not uploaded again, so a second call resumes an interrupted one. Files of an earlier
    folder are removed from the repository, and other files that it contains are kept.

    Args:
        private: whether a new repository is private; an existing one is not changed.
        skipped: names of files that are not uploaded.
        listing: name of the file that lists the files of a folder.
        listed: reads it.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    api = HfApi()
    with _convert_push_errors(repository):
        address = api.create_repo(repository, private=private, exist_ok=True)
        try:
            stale = listed(Path(hf_hub_download(repository, listing))) - listed(folder / listing)
        except EntryNotFoundError:
            stale = set()
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Upload by clipkit",
            ignore_patterns=list(skipped),
            delete_patterns=sorted(stale) or None,
        )
    return str(address)


@contextmanager
def _convert_push_errors(repository: str) -> Iterator[None]:
    """Convert errors of the hub client to one line without the token and without addresses, which may be signed."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    client_error = HfHubHTTPError.__mro__[
        1
    ]  # of httpx or its successor, as the version of the hub client has it
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"cannot write {repository}: HF_HUB_OFFLINE forbids it: unset it")
    if not _is_reachable(constants.ENDPOINT):
        raise ConfigError(
            f"cannot write {repository}: {constants.ENDPOINT} does not respond: check the network"
        )
    try:
        with _log_errors_only():
            yield
    except HFValidationError as error:
        raise ConfigError(
            f"{repository!r} is not a repository: {str(error).strip().splitlines()[0]}"
        ) from error
    except (client_error, OSError, ValueError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, client_error):
            cause = cause.__cause__  # an upload in another thread
        status = getattr(getattr(cause, "response", None), "status_code", None)
        refusal = _REFUSALS.get(status, f"the hub answered with status {status}") if status else ""
        why = refusal or f"the connection failed ({type(cause or error).__name__})"
        raise ConfigError(
            f"cannot write {repository}: {why}; run the same command again to resume"
        ) from error


@contextmanager
def _convert_download_errors(source: str) -> Iterator[None]:
    try:
        with _log_errors_only():
            yield
    except (OSError, ValueError, RuntimeError) as error:
        cause = str(error).strip().split("\n")[0].removeprefix("Got: ")  # of huggingface_hub
        raise ConfigError(
            f"{source} is not stored on this machine, and downloading it failed; check the network "
            "connection, or use other weights, such as a run folder (with train.py: model.weights=FOLDER "
            f"model.name=NAME; model.weights= starts with random ones): {cause}"
        ) from error


@contextmanager
def convert_hub_errors(name: str) -> Iterator[None]:
    """Convert errors of a library that reads a folder or a hub repository to ConfigError."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        with _log_errors_only(), _offline_if_unreachable(name):
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

    if constants.HF_HUB_OFFLINE or Path(name).exists() or _is_reachable(constants.ENDPOINT):
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False


def _is_reachable(address: str) -> bool:
    import ssl
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    try:
        urlopen(Request(address, method="HEAD"), timeout=_TIMEOUT).close()
    except HTTPError:
        return True
    # the library may use other certificates
    except URLError as error:
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, HTTPException):
        return False
    except ValueError:  # an unusual address
        return True
    return True


@contextmanager
def _log_errors_only() -> Iterator[None]:
    import logging

    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

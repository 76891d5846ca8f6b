"""The files of Hugging Face (``hf://``): where they are fetched, and what is said of names that are none."""

from typing import Any

from data.remote.clients import told
from data.remote.patience import TransferError

__all__ = ["HUB_FORM", "check_place", "of_hub"]

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

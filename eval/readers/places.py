"""Where published sets lie: their addresses at Hugging Face, the set of a name under a root, and their shards."""

import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from clipkit.errors import DataError
from data.remote.patience import Unreachable
from data.shard_file import ShardFile
from data.sources import find_shards
from eval.dataset import TEST, NoSplit, some
from eval.readers.image_folder import visible_folders
from eval.readers.split_names import folder_of_split
from eval.readers.text_files import beside, text_of

__all__ = ["address_of", "files_in", "find_published", "shards_of_split"]

_HUB_HOSTS = ("huggingface.co", "hf.co")
# …/datasets/OWNER/NAME, perhaps /tree/BRANCH and a folder, as a browser shows it
_HUB_PAGE = re.compile(
    r"(/datasets/[\w.-]+/[\w.-]+)(?:/(?:tree|raw|resolve|blob)/([^/]+)(/.*)?)?/?", flags=re.ASCII
)
_PROBES = (f"{TEST}/nshards.txt", "classnames.txt", "dataset_type.txt")
_REMEMBERED = 60.0  # seconds; a program that runs on may find the store mended
_unreachable: dict[str, tuple[float, str]] = {}  # by root, when nobody answered and what was said then
_MAX_COUNT = 100  # bytes of nshards.txt
_MAX_SHARDS = 1_000_000


def address_of(source: str) -> str:
    """Where the files of a source lie: a page of Hugging Face names a data set, whose files lie elsewhere.

    ``https://huggingface.co/datasets/OWNER/NAME/tree/BRANCH``, the form that CLIP_benchmark takes, is read at
    ``…/resolve/BRANCH``, which gives texts and large files alike; without a branch it is ``main``.
    """
    if not source.startswith(("https://", "http://")):
        return source
    url = urlsplit(source)
    hosts = {*_HUB_HOSTS, urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc}
    page = _HUB_PAGE.fullmatch(url.path)
    if page is None or url.netloc not in hosts:
        return source.rstrip("/")
    folder = (page[3] or "").rstrip("/")
    return f"{url.scheme}://{url.netloc}{page[1]}/resolve/{page[2] or 'main'}{folder}"


def find_published(root: str | Path, names: Sequence[str]) -> str | None:
    """The first of a dataset's names under which a set lies in a folder of sets, as a source to open.

    For the name ``vtab/dtd`` these are looked for, in this order: ``wds_vtab-dtd``, ``wds_vtab-dtd_test`` (as
    CLIP_benchmark and DataComp name their folders), ``vtab-dtd`` and ``vtab/dtd``. On this machine, and in stores
    that list their folders, other sets than published ones are found so too; and of ``sugar_crepe-swap_obj`` and
    ``aro-relation`` the files ``sugar_crepe/swap_obj.json`` (or in its ``data``) and
    ``aro/visual_genome_relation.json``.

    Args:
        root: a folder of this machine or a store, or an owner at Hugging Face (``hf://datasets/clip-benchmark``).
        names: what the set may be called, the likeliest first.

    Raises:
        DataError: the store cannot be reached; for a minute from then on that is told without asking it again, so
            that a suite of many sets does not wait for each.
    """
    when, said = _unreachable.get(str(root), (-math.inf, ""))
    if time.monotonic() - when < _REMEMBERED:
        raise Unreachable(said)
    try:
        return _found(root, names)
    except Unreachable as error:
        _unreachable[str(root)] = (time.monotonic(), str(error))
        raise


def _found(root: str | Path, names: Sequence[str]) -> str | None:
    for name in names:
        flat = name.replace("/", "-")
        published = flat if flat.startswith("wds_") else f"wds_{flat}"
        for candidate in dict.fromkeys((published, f"{published}_test", flat, name)):
            place = beside(root, candidate)
            if isinstance(place, Path):
                if place.expanduser().is_dir():
                    return str(place.expanduser())
            elif _is_set(address_of(place)):
                return place
        if (file := _json_file(root, flat)) is not None:
            return str(file)
    return None


def _json_file(root: str | Path, name: str) -> Path | None:
    """The file of a set that is one of several in a folder of their common name."""
    family, _, own = name.partition("-")
    for inside in (f"{own}.json", f"data/{own}.json", f"visual_genome_{own}.json"):
        place = beside(root, family, inside)
        if own and isinstance(place, Path) and place.expanduser().is_file():
            return place.expanduser()
    return None


def _is_set(address: str) -> bool:
    """Whether there is something; a web server, which may list nothing, is asked for a published set's files."""
    try:
        if address.startswith(("http://", "https://")):
            return any(_is_there(f"{address}/{name}") for name in _PROBES)
        return any(files_in(f"{address}{inside}") for inside in ("", f"/{TEST}", "/data"))
    except Unreachable:
        raise
    except DataError:  # there is no such bucket, data set or revision, or it is not ours to read
        return False


def _is_there(address: str) -> bool:
    """Whether a web server has a file.

    Raises:
        Unreachable: it fails, which says of no set that it is not there, and would be waited out for each anew.
    """
    try:
        return text_of(address) is not None
    except Unreachable:
        raise
    except DataError as error:  # what is not there or not ours to read is none
        raise Unreachable(str(error)) from error


def shards_of_split(name: str, root: str | Path, split: str) -> list[ShardFile]:
    """The shards of one split of a published set, all that it says there are.

    Raises:
        DataError: there is no such split, or a shard is missing.
    """
    if isinstance(root, Path):
        called = _check_has_split(root, name, split)
        found = find_shards(str(root), split=called)
    else:
        found = _remote_shards(name, root, split)
    _check_consecutive(found)
    return found


def _check_has_split(folder: Path, name: str, split: str) -> str:
    """What the split's folder is called; shards in the folder itself count as any split, asked for to test on.

    Raises:
        NoSplit: there is no such split.
        DataError: there are two.
    """
    folders = [inside for inside in visible_folders(folder) if any(inside.glob("*.tar"))]
    own, splits = folder_of_split(folders, split), [inside.name for inside in folders]
    if own is not None or (split == TEST and (not splits or any(folder.glob("*.tar")))):
        return own.name if own is not None else split
    if split != TEST or not splits:
        there = f"only {some(splits)}" if splits else "and no other"
        raise NoSplit(f"dataset {name} has no split {split!r}, {there}")
    advised = next((own for own in splits if own != "train"), splits[0])
    raise NoSplit(
        f"dataset {name} has no split {split!r} to score on, only {some(splits)}: pack it with pairs held out "
        f"(python -m data pack TABLE OUT --test 0.1), or name a split's own folder, {folder / advised}"
    )


def _remote_shards(name: str, root: str, split: str) -> list[ShardFile]:
    """As ``nshards.txt`` says: 0.tar … N-1.tar; where a store lists its folders and there is none, all tars."""
    from data.remote import store

    folders = [f"{root}/{split}"] + ([root] if split == TEST else [])
    for folder in folders:
        stated = text_of(f"{folder}/nshards.txt", limit=_MAX_COUNT)
        if stated is None:
            continue
        count = stated.strip()
        if not count.isdecimal() or not 0 < int(count) <= _MAX_SHARDS:
            raise DataError(
                f"dataset {name}: {store.shown(folder)}/nshards.txt says {count[:20]!r}, no count"
            )
        return store.describe([f"{folder}/{number}.tar" for number in range(int(count))])
    if root.startswith(("http://", "https://")):
        raise NoSplit(
            f"dataset {name}: there is no {store.shown(folders[0])}/nshards.txt, which says how many shards there "
            "are: no such split, or no published set"
        )
    for folder in folders:
        tars = [file for file in files_in(folder) if file.name.endswith(".tar")]
        if tars:
            return sorted(tars, key=lambda file: (len(file.name), file.name))
    raise NoSplit(f"dataset {name} has no split {split!r}: no tar in {store.shown(folders[0])}")


def files_in(folder: str) -> list[ShardFile]:
    """The files directly in a folder of a store that lists its folders; none where there is no such folder.

    Raises:
        DataError: there is no such bucket or data set.
        Unreachable: the store does not answer, or fails.
    """
    from data.remote.patience import Attempts, TransferError
    from data.remote.transfers import listing

    attempts = Attempts(folder)
    while True:
        try:
            return [ShardFile(url=url, size=size, version=version) for url, size, version in listing(folder)]
        except TransferError as error:
            if error.is_missing:
                return []
            try:
                attempts.failed(error)
            except DataError as fault:
                if error.temporary:  # it was waited out in vain, and would be for each set anew
                    raise Unreachable(str(fault)) from None
                raise


def _check_consecutive(shards: Sequence[ShardFile]) -> None:
    """Published shards are 0.tar … N-1.tar; a gap is a lost shard."""
    stems = [shard.name.removesuffix(".tar") for shard in shards]
    if all(stem.isdecimal() for stem in stems):
        missing = sorted(set(range(len(shards))) - {int(stem) for stem in stems})
        if missing:
            folder = shards[0].shown.rpartition("/")[0]
            raise DataError(f"shard {missing[0]}.tar is missing in {folder}; fetch the dataset again")

"""Opens datasets to score on.

A source is a built-in dataset's name; a folder in the published layout, of parquet files, or of images by class;
the URL of a folder of the first two kinds; a ``.json`` file of SugarCrepe or ARO; ``torchvision:CIFAR10``; or, if a
root is given, the name of a published dataset under it. ``READERS`` holds the readers; the first that recognises a
source opens it.

shards.py       the layout in which the field publishes its datasets: tar shards with text files beside them
parquet.py      Hugging Face's datasets, as parquet files
folders.py      ``ROOT/<class name>/*.jpg``, with class names from folder names
torchvision.py  torchvision's datasets
choices.py      SugarCrepe and ARO: a JSON file and a folder of images
files.py        images that are files, text files, and checks that the readers share
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clipkit.errors import DataError, nearest
from data.corpora.builtin import BUILTIN, built_in
from data.remote.store import is_remote, shown
from eval.datasets.dataset import TEST, EvalDataset
from eval.readers.choices import open_caption_choices
from eval.readers.files import how_to_pack, is_table, read_text_file
from eval.readers.folders import open_image_folder, utf8_name
from eval.readers.parquet import has_parquet, open_hugging_face
from eval.readers.shards import CACHE_GB, address_of, find_published, open_published
from eval.readers.torchvision import check_known, open_torchvision

__all__ = [
    "READERS",
    "OpenOptions",
    "Reader",
    "find_published",
    "open_dataset",
    "open_datasets",
    "open_hugging_face",
    "open_torchvision",
]

_SHOWN = 200  # characters of a source in a message
_TORCHVISION = "torchvision:"
_HUB_PARTS = ("https:", "http:", "hf:", "datasets", "resolve")  # parts of a URL that name nothing


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """How to open a dataset, for readers that use it; see ``open_dataset``."""

    split: str = TEST
    root: Path | str | None = None
    metadata_names: tuple[str, ...] = ()
    images: Path | str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    cache_gb: float = CACHE_GB


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A format of datasets.

    Attributes:
        summary: what it reads.
        recognises: whether a place (a path or URL, or the name of a built-in or torchvision dataset) has a split in
            this format; readers before this one have not recognised it.
        open: opens the place under the name that results go by.
    """

    summary: str
    recognises: Callable[[Path | str, str], bool]
    open: Callable[[Any, str, OpenOptions], EvalDataset]


def _is_published(place: Path | str, split: str) -> bool:
    if isinstance(place, str):
        # a web server may not list its folders
        return (
            place.startswith(("http://", "https://"))
            or read_text_file(f"{place}/{split}/nshards.txt") is not None
            or not has_parquet(place, split)
        )
    marks = ("classnames.txt", "dataset_type.txt", "card.json", "nshards.txt")
    return any((place / mark).is_file() for mark in marks) or any(
        any(place.glob(tars)) for tars in ("*.tar", "*/*.tar")
    )


def _open_published(place: Path | str, name: str, options: OpenOptions) -> EvalDataset:
    return open_published(
        place,
        name,
        split=options.split,
        metadata_names=options.metadata_names,
        cache_gb=options.cache_gb,
    )


def _open_torchvision(source: str, name: str, options: OpenOptions) -> EvalDataset:
    if options.root is None or is_remote(str(options.root)):
        raise DataError(f"dataset {name}: name the folder of torchvision's files (--data-root FOLDER)")
    kind, folder = source.removeprefix(_TORCHVISION), _expanded(str(options.root))
    return open_torchvision(kind, folder, name=name, split=options.split, arguments=options.arguments)


READERS: Mapping[str, Reader] = {
    "torchvision": Reader(
        summary="torchvision's datasets",
        recognises=lambda place, _: isinstance(place, str) and place.startswith(_TORCHVISION),
        open=_open_torchvision,
    ),
    "builtin": Reader(
        summary="datasets that are made on first use",
        recognises=lambda place, _: isinstance(place, str) and place in BUILTIN,
        open=lambda name, shown_as, options: open_published(built_in(name), shown_as, split=options.split),
    ),
    "choices": Reader(
        summary="a .json file of SugarCrepe or ARO",
        recognises=lambda place, _: isinstance(place, Path) and place.is_file(),
        open=lambda file, name, options: open_caption_choices(
            file, name, split=options.split, images=options.images
        ),
    ),
    "published": Reader(
        summary="tar shards with text files beside them, the layout in which the field publishes datasets",
        recognises=_is_published,
        open=_open_published,
    ),
    "parquet": Reader(
        summary="parquet files, as of Hugging Face's datasets",
        recognises=lambda place, split: isinstance(place, str) or has_parquet(place, split),
        open=lambda place, name, options: open_hugging_face(
            place, name, split=options.split, cache_gb=options.cache_gb
        ),
    ),
    "folder": Reader(
        summary="images in a folder for each class",
        recognises=lambda place, _: True,
        open=lambda folder, name, options: open_image_folder(folder, name, split=options.split),
    ),
}


@dataclass(frozen=True, kw_only=True)
class _Located:
    """A source, and what it is.

    Attributes:
        source: as the user says it, for messages.
        place: the folder or file, by its full path or URL; of a built-in set, and of torchvision's, the name.
        parts: of which its name is made, the last of them first taken.
    """

    source: str
    place: Path | str
    parts: tuple[str, ...]


def open_dataset(
    source: str | Path,
    *,
    split: str = TEST,
    root: Path | str | None = None,
    metadata_names: Sequence[str] = (),
    images: Path | str | None = None,
    arguments: Mapping[str, Any] | None = None,
    cache_gb: float = CACHE_GB,
) -> EvalDataset:
    """Open a dataset, wherever it lies; a built-in one is made on first use.

    Whoever keeps scores of several in one place opens them by ``open_datasets``, so that no two have one name.

    Args:
        source: what to open; see above.
        split: which part of it.
        root: a folder of this machine or a store, in which the set is looked for by its name; for torchvision's
            sets, where their files lie.
        metadata_names: of the columns that a published set's ``npy`` has beside the label, all in their order.
        images: where the images of a ``.json`` file lie, if not in ``images`` or ``val2017`` beside it.
        arguments: what torchvision's class is told besides its split.
        cache_gb: how much of remote shards this machine keeps.

    Raises:
        DataError: there is no such dataset, or it is incomplete or contradicts itself. Images are decoded
            later; one that does not decode is then an error too, so a score is never of fewer images than
            the dataset has.
    """
    options = OpenOptions(
        split=split,
        root=root,
        metadata_names=tuple(metadata_names),
        images=images,
        arguments=arguments or {},
        cache_gb=cache_gb,
    )
    return _open_all([source], options)[0]


def open_datasets(
    sources: Sequence[str | Path], *, split: str = TEST, root: Path | str | None = None
) -> tuple[EvalDataset, ...]:
    """Open several datasets, each under a name of its own, by which its results and snapshots are told apart.

    A folder is named by the last part of its path. Where two would have the same name, theirs are lengthened by
    as many parent folders as it takes: ``A/test`` and ``B/test`` become ``A-test`` and ``B-test``.

    Raises:
        DataError: as for ``open_dataset``; or a dataset is given twice.
    """
    return _open_all(sources, OpenOptions(split=split, root=root))


def _open_all(sources: Sequence[str | Path], options: OpenOptions) -> tuple[EvalDataset, ...]:
    located = [_locate(str(one), options.root) for one in sources]
    names = _distinct_names(located)
    return tuple(_open(*one, options) for one in zip(located, names, strict=True))


def _locate(source: str, root: Path | str | None) -> _Located:
    if not source:  # else it would be the folder where one is
        raise DataError("no dataset '': name a folder, a card or a built-in set")
    if source.startswith(_TORCHVISION):
        name = source.removeprefix(_TORCHVISION)
        check_known(name)
        return _Located(source=source, place=source, parts=(name,))
    if is_remote(source):
        return _remote(source)
    if source in BUILTIN and not Path(source).is_dir():
        return _Located(source=source, place=source, parts=(source,))
    path = _expanded(source)
    try:
        if path.is_dir() or (path.suffix == ".json" and path.is_file()):
            place = path.resolve()
            parts = [part for part in place.parts if part != place.anchor]
            if not place.is_dir():
                parts[-1] = place.stem
            return _Located(source=source, place=place, parts=tuple(parts))
        if is_table(path):
            raise DataError(f"{source[:_SHOWN]} is a table: {how_to_pack(path)}")
        found = find_published(_root(root), [source]) if root is not None else None
        if found is None:
            raise DataError(_no_dataset(source, path, root))
    except OSError as error:
        raise DataError(f"cannot read dataset {source[:_SHOWN]!r}: {error.strerror}") from error
    there = found if is_remote(found) else Path(found).resolve()
    return _Located(source=found, place=there, parts=(source.replace("/", "-"),))


def _no_dataset(source: str, path: Path, root: Path | str | None) -> str:
    if path.is_file():
        return f"no dataset {source[:_SHOWN]!r}: it is a file, and no .json of SugarCrepe or ARO: name its folder"
    hint = nearest(source[:_SHOWN], BUILTIN)
    under = f", nor a set under {shown(str(root))}" if root is not None else ""
    return f"no dataset {source[:_SHOWN]!r}: it is not a folder, nor built in ({hint}){under}"


def _remote(source: str) -> _Located:
    if source.startswith("pipe:"):
        raise DataError("a dataset to score on is no pipe: name a folder, here or in a store")
    address = address_of(source)
    plain = shown(address).partition("?")[0]
    if not is_remote(address) or not plain.partition("://")[2].strip("/"):
        raise DataError(
            f"no dataset {source[:_SHOWN]!r}: its address names no place, as https://HOST/FOLDER does"
        )
    parts = [part for part in plain.split("/") if part and part not in _HUB_PARTS]
    if "/resolve/" in plain:
        parts.remove(plain.partition("/resolve/")[2].partition("/")[0])  # the branch
    return _Located(source=source, place=address, parts=tuple(parts))


def _root(root: Path | str) -> Path | str:
    return root if isinstance(root, str) and is_remote(root) else _expanded(str(root))


def _expanded(source: str) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError:  # there is no such user
        return Path(source)


def _distinct_names(located: Sequence[_Located]) -> list[str]:
    lengths = [1] * len(located)
    while True:
        # joined by what may stand in a file name
        names = ["-".join(one.parts[-length:]) for one, length in zip(located, lengths, strict=True)]
        shared = {name for name, count in Counter(names).items() if count > 1}
        short = [i for i, name in enumerate(names) if name in shared and lengths[i] < len(located[i].parts)]
        if not short:
            break
        for i in short:
            lengths[i] += 1
    for name in shared:
        same = [one.place for one, own in zip(located, names, strict=True) if own == name]
        if len(set(same)) == 1:
            raise DataError(f"dataset {same[0]} is given twice: leave one out")
        raise DataError(
            f"datasets {same[0]} and {same[1]} would both be named {name}: rename one of the folders"
        )
    return names


def _open(located: _Located, name: str, options: OpenOptions) -> EvalDataset:
    # a path as the user wrote it, for messages
    place = _expanded(located.source) if isinstance(located.place, Path) else located.place
    name = utf8_name(name)
    try:
        reader = next(one for one in READERS.values() if one.recognises(place, options.split))
        return reader.open(place, name, options)
    except OSError as error:
        raise DataError(f"cannot read dataset {name}: {error.filename}: {error.strerror}") from error

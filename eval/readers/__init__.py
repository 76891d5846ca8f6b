"""Open datasets to evaluate models on.

A source is a built-in dataset's name; a folder of shards, of parquet files, or of images by class or with captions;
the URL of a folder of the first two kinds; a table of images and captions; a ``.json`` file of SugarCrepe or ARO;
a file of judgments of Flickr8k;
``torchvision:CIFAR10``; or, with a root, the name of a published dataset below it. ``READERS`` holds the readers;
the first one that recognizes a source opens it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clipkit.errors import DataError, nearest
from clipkit.files import redact_url, user_path
from clipkit.samples import (
    CACHE_GB,
    SPLIT_NAMES,
    MissingSplit,
    ParquetSamples,
    ShardSamples,
    find_split,
    is_table,
)
from clipkit.samples.remote import is_remote, shard_cache
from data.corpora.builtin import BUILTIN, built_in
from eval.datasets.card import OWN_CARD, Card, read_card
from eval.datasets.dataset import TEST, EvalDataset
from eval.readers.benchmarks import (
    JUDGMENTS,
    is_multilingual,
    is_video_frames,
    open_caption_choices,
    open_judgments,
    open_multilingual,
    open_video_frames,
)
from eval.readers.folders import lists_captions, open_image_folder, open_table
from eval.readers.parquet import PARQUET_SUFFIXES, open_hugging_face
from eval.readers.shards import (
    Members,
    files_of_split,
    find_published,
    names_files,
    open_published,
    resolve_address,
)
from eval.readers.torchvision import check_known, open_torchvision

_FETCHING = 4  # files fetched at a time
_SHOWN = 200  # characters of a source in a message
_TORCHVISION = "torchvision:"
_HUB_PARTS = ("https:", "http:", "hf:", "datasets", "resolve")  # parts of a URL that are not names


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """Options for readers; each reader uses some of them. See ``open_dataset``."""

    split: str = TEST
    root: Path | str | None = None
    metadata_names: tuple[str, ...] = ()
    members: Members = field(default_factory=Members)
    card: Card | None = None  # next to the images


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A dataset format: a file with a function that opens it, and an entry of ``READERS``.

    Attributes:
        recognizes: returns whether a place (a path or URL, or the name of a built-in or torchvision dataset) has a
            split in this format; called only if no earlier reader recognizes the place.
        open: opens a place under the dataset's name.
        test_only: whether there is no other split than "test".
    """

    recognizes: Callable[[Path | str, str], bool]
    open: Callable[[Any, str, OpenOptions], EvalDataset]
    test_only: bool = False


def _open_torchvision_source(source: str, name: str, options: OpenOptions) -> EvalDataset:
    if options.root is None or is_remote(str(options.root)):
        raise DataError(f"dataset {name}: name the folder of torchvision's files (--data-root FOLDER)")
    folder = user_path(str(options.root))
    return open_torchvision(source.removeprefix(_TORCHVISION), folder, name=name, split=options.split)


def _has_samples(place: Path | str, split: str) -> bool:
    """Return whether there are shards or Parquet files of any split; nothing else can be opened in a store."""
    if isinstance(place, str):
        return True
    if names_files(place, (".tar",)):
        return True
    if place.is_file():
        return place.suffix in PARQUET_SUFFIXES
    for name in (split, *SPLIT_NAMES):
        with suppress(MissingSplit):
            find_split(place, name, (".tar", *PARQUET_SUFFIXES))
            return True
    return any(place.glob("*/*.tar"))


def _open_samples(place: Path | str, name: str, options: OpenOptions) -> EvalDataset:
    if isinstance(place, str) and is_remote(place):
        place = resolve_address(place)
    files = files_of_split(name, place, options.split, (".tar", *PARQUET_SUFFIXES))
    cache = shard_cache([file.url for file in files], CACHE_GB)
    if cache is not None:
        cache.prefetch(files, threads=_FETCHING, were_counted=False)
    try:
        if not files[0].name.endswith(".tar"):
            return open_hugging_face(place, ParquetSamples(files, cache), name, split=options.split)
        return open_published(
            place,
            ShardSamples(files, cache),
            name,
            split=options.split,
            metadata_names=options.metadata_names,
            members=options.members,
        )
    finally:
        # everything is fetched; otherwise a suite would keep the threads of every dataset
        if cache is not None:
            cache.close()


READERS: Mapping[str, Reader] = {
    "torchvision": Reader(
        recognizes=lambda place, _: isinstance(place, str) and place.startswith(_TORCHVISION),
        open=_open_torchvision_source,
    ),
    "builtin": Reader(
        recognizes=lambda place, _: isinstance(place, str) and place in BUILTIN,
        open=lambda name, shown_as, options: _open_samples(built_in(name), shown_as, options),
    ),
    "judgments": Reader(
        recognizes=lambda place, _: isinstance(place, Path) and place.name in JUDGMENTS,
        open=lambda file, name, options: open_judgments(file),
        test_only=True,
    ),
    "table": Reader(
        recognizes=lambda place, _: isinstance(place, Path) and lists_captions(place),
        open=lambda file, name, options: open_table(file, name, split=options.split),
    ),
    "choices": Reader(
        recognizes=lambda place, _: isinstance(place, Path) and place.suffix == ".json" and place.is_file(),
        open=lambda file, name, options: open_caption_choices(file, name),
        test_only=True,
    ),
    "multilingual": Reader(
        recognizes=lambda place, _: isinstance(place, Path) and is_multilingual(place),
        open=lambda folder, name, options: open_multilingual(folder, name),
        test_only=True,
    ),
    "videos": Reader(
        recognizes=lambda place, _: isinstance(place, Path) and is_video_frames(place),
        open=lambda folder, name, options: open_video_frames(folder, name),
        test_only=True,
    ),
    "samples": Reader(recognizes=_has_samples, open=_open_samples),
    "folder": Reader(
        recognizes=lambda place, _: True,
        open=lambda folder, name, options: open_image_folder(
            folder, name, split=options.split, card=options.card
        ),
    ),
}


def open_dataset(
    source: str | Path,
    *,
    split: str = TEST,
    root: Path | str | None = None,
    metadata_names: Sequence[str] = (),
    members: Members | None = None,
) -> EvalDataset:
    """Open a dataset; a built-in one is generated on first use.

    To score several datasets together, use ``open_datasets``, which makes their names unique.

    Args:
        source: what to open; see above.
        split: the split's name.
        root: a folder, local or in a store, with datasets by name; for torchvision's datasets, the folder of their
            files.
        metadata_names: names of all columns of a published dataset's ``npy``, besides the label.
        members: where images and captions of shards are; None for the usual names.

    Raises:
        DataError: there is no such dataset, or it is incomplete or inconsistent. Images are decoded later; one that
            does not decode is then an error too, so a score never covers fewer images than the dataset has.
    """
    names = tuple(metadata_names)
    options = OpenOptions(split=split, root=root, metadata_names=names, members=members or Members())
    return _raise_first(open_each([source], options))[0]


def open_datasets(
    sources: Sequence[str | Path],
    *,
    split: str = TEST,
    root: Path | str | None = None,
    members: Members | None = None,
) -> tuple[EvalDataset, ...]:
    """Open several datasets under unique names.

    A folder's name is the last part of its path, preceded by as many parent folders as are needed to make it
    unique: ``A/test`` and ``B/test`` become ``A-test`` and ``B-test``.

    Raises:
        DataError: as for ``open_dataset``; or a dataset is given twice.
    """
    options = OpenOptions(split=split, root=root, members=members or Members())
    return tuple(_raise_first(open_each(list(map(str, sources)), options)))


def _raise_first(outcomes: Sequence[EvalDataset | DataError]) -> list[EvalDataset]:
    datasets: list[EvalDataset] = []
    for outcome in outcomes:
        if isinstance(outcome, DataError):
            raise outcome
        datasets.append(outcome)
    return datasets


@dataclass(frozen=True, kw_only=True)
class _Located:
    """A source: as the user wrote it, its full path, URL or name, and the parts that its name may be made of."""

    source: str
    place: Path | str
    parts: tuple[str, ...]


def open_each(sources: Sequence[str | Path], options: OpenOptions) -> list[EvalDataset | DataError]:
    """Open several datasets under unique names; return the error of each one that cannot be opened."""
    outcomes: list[EvalDataset | DataError | _Located] = []
    for source in map(str, sources):
        try:
            outcomes.append(_locate(source, options.root))
        except DataError as error:
            if options.root is None and not is_remote(source):
                raise
            outcomes.append(error)
        except OSError as error:
            raise DataError(f"cannot read dataset {source[:_SHOWN]!r}: {error.strerror}") from error
    names = iter(_make_unique_names([outcome for outcome in outcomes if isinstance(outcome, _Located)]))
    opened: list[EvalDataset | DataError] = []
    for outcome in outcomes:
        if not isinstance(outcome, _Located):
            opened.append(outcome)
            continue
        try:
            opened.append(_open_located(outcome, next(names), options))
        except DataError as error:
            opened.append(error)
    return opened


def _open_located(located: _Located, name: str, options: OpenOptions) -> EvalDataset:
    # in messages a path is as the user wrote it
    place = user_path(located.source) if isinstance(located.place, Path) else located.place
    try:
        own_card = place / OWN_CARD if isinstance(place, Path) else None
        if own_card is not None and own_card.is_file():
            card = read_card(own_card, name=name)
            names = options.metadata_names or card.metadata
            options = replace(options, card=card, metadata_names=names)
        reader = _find_reader(place, options)
        if reader.test_only and options.split != TEST:
            raise MissingSplit(
                f"dataset {name} has no split {options.split!r}: all of {place} is for testing"
            )
        return reader.open(place, name, options)
    except OSError as error:
        raise DataError(f"cannot read dataset {name}: {error.filename}: {error.strerror}") from error


def _find_reader(place: Path | str, options: OpenOptions) -> Reader:
    if options.card is not None and options.card.table is not None:
        return READERS["folder"]
    for reader in READERS.values():
        if reader.recognizes(place, options.split):
            return reader
    raise AssertionError("the last reader recognizes all places")


def _locate(source: str, root: Path | str | None) -> _Located:
    """Find a source; the root is searched last."""
    if not source:  # Path("") is the current folder
        raise DataError("no dataset '': name a folder, a card or a built-in dataset")
    if source.startswith(_TORCHVISION):
        name = source.removeprefix(_TORCHVISION)
        check_known(name)
        return _Located(source=source, place=source, parts=(name,))
    shortened = source[:_SHOWN]
    if is_remote(source):
        plain = redact_url(resolve_address(source)).partition("?")[0]
        if not plain.partition("://")[2].strip("/"):
            raise DataError(f"no dataset {shortened!r}: expected an address such as https://HOST/FOLDER")
        parts = [part for part in plain.split("/") if part and part not in _HUB_PARTS]
        if "/resolve/" in plain:
            parts.remove(plain.partition("/resolve/")[2].partition("/")[0])  # the branch
        return _Located(source=source, place=source, parts=tuple(parts))
    if source in BUILTIN and not Path(source).is_dir():
        return _Located(source=source, place=source, parts=(source,))
    path = user_path(source)
    if path.is_dir() or is_table(path) or names_files(path, (".tar", *JUDGMENTS)):
        full_path = path.resolve()
        stem = full_path.stem if path.is_file() else full_path.name
        if not path.exists():  # a pattern
            full_path = full_path.parent
            stem = full_path.name
        parents = [part for part in full_path.parts[:-1] if part != full_path.anchor]
        return _Located(source=source, place=path.resolve(), parts=(*parents, stem))
    under = ""
    if root is not None:
        folder = str(root) if is_remote(str(root)) else user_path(str(root))
        match = find_published(folder, [source])
        if match is not None:
            place = match if is_remote(match) else Path(match).resolve()
            return _Located(source=match, place=place, parts=(source.replace("/", "-"),))
        under = f", nor a dataset under {redact_url(str(root))}"
    hint = nearest(shortened, BUILTIN)
    raise DataError(f"no dataset {shortened!r}: it is no folder, tar or table, nor built in ({hint}){under}")


def _make_unique_names(located: Sequence[_Located]) -> list[str]:
    lengths = [1] * len(located)
    while True:
        names = ["-".join(source.parts[-length:]) for source, length in zip(located, lengths, strict=True)]
        shared = {name for name, count in Counter(names).items() if count > 1}
        short = [i for i, name in enumerate(names) if name in shared and lengths[i] < len(located[i].parts)]
        if not short:
            break
        for i in short:
            lengths[i] += 1
    for name in shared:
        same = [source.place for source, other in zip(located, names, strict=True) if other == name]
        if len(set(same)) == 1:
            raise DataError(f"dataset {same[0]} is given twice: remove one")
        raise DataError(
            f"datasets {same[0]} and {same[1]} would both be named {name}: rename one of the folders"
        )
    return names

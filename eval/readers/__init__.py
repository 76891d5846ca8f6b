"""Opens datasets to score on: by the name of a built-in one, or a folder in one of two layouts.

published.py      the layout in which the field publishes its sets: shards with text files beside them
image_folder.py   ``ROOT/<class name>/*.jpg``, whose folder names are the class names with ``_`` for a space
some_pictures.py  some of a set's pictures as a set
text_files.py     files of text, read with care
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from clipkit.errors import DataError, nearest
from data.corpora.builtin import BUILTIN, built_in
from eval.dataset import TEST, EvalDataset
from eval.readers.image_folder import open_image_folder, utf8_name
from eval.readers.published import open_published

__all__ = ["open_dataset", "open_datasets"]

_SHOWN = 200  # characters of a source in a message


def open_dataset(name_or_folder: str | Path, *, split: str = TEST) -> EvalDataset:
    """Open a built-in dataset by its name (made on first use), or a folder in one of the two layouts.

    Whoever keeps scores of several in one place opens them by ``open_datasets``, so that no two have one name.

    Raises:
        DataError: there is no such dataset, or it is incomplete or contradicts itself. Pictures are decoded
            later; one that does not decode is then an error too, so a score is never of fewer pictures than
            the dataset has.
    """
    return open_datasets([name_or_folder], split=split)[0]


def open_datasets(names_or_folders: Sequence[str | Path], *, split: str = TEST) -> tuple[EvalDataset, ...]:
    """Open several datasets, each under a name of its own, by which its results and snapshots are told apart.

    A folder is named by the last part of its path. Where two would have the same name, theirs are lengthened by
    as many parent folders as it takes: ``A/test`` and ``B/test`` become ``A-test`` and ``B-test``.

    Raises:
        DataError: as for ``open_dataset``; or a dataset is given twice.
    """
    sources = [str(one) for one in names_or_folders]
    places = [_place(source) for source in sources]
    names = _distinct_names(places)
    return tuple(_open(*one, split) for one in zip(sources, places, names, strict=True))


def _place(source: str) -> Path:
    """Where a dataset lies: the full path of a folder, or just the name of a built-in set."""
    if source in BUILTIN and not Path(source).is_dir():
        return Path(source)
    folder = _folder(source)
    try:
        if folder.is_dir():
            return folder.resolve()
    except OSError as error:
        raise DataError(f"cannot read dataset {source[:_SHOWN]!r}: {error.strerror}") from error
    hint = nearest(source[:_SHOWN], BUILTIN)
    raise DataError(f"no dataset {source[:_SHOWN]!r}: it is not a folder, nor built in ({hint})")


def _folder(source: str) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError:  # there is no such user
        return Path(source)


def _distinct_names(places: Sequence[Path]) -> list[str]:
    parts = [[part for part in place.parts if part != place.anchor] for place in places]
    lengths = [1] * len(places)
    while True:
        # joined by what may stand in a file name
        names = ["-".join(own[-length:]) for own, length in zip(parts, lengths, strict=True)]
        shared = {name for name, count in Counter(names).items() if count > 1}
        short = [i for i, name in enumerate(names) if name in shared and lengths[i] < len(parts[i])]
        if not short:
            break
        for i in short:
            lengths[i] += 1
    for name in shared:
        same = [place for place, own in zip(places, names, strict=True) if own == name]
        if len(set(same)) == 1:
            raise DataError(f"dataset {same[0]} is given twice: leave one out")
        raise DataError(
            f"datasets {same[0]} and {same[1]} would both be named {name}: rename one of the folders"
        )
    return names


def _open(source: str, place: Path, name: str, split: str) -> EvalDataset:
    name = utf8_name(name)
    try:
        if not place.is_absolute():
            return open_published(built_in(name), name, split=split)
        return _open_folder(_folder(source), name, split)  # as the user says it, for messages
    except OSError as error:
        raise DataError(f"cannot read dataset {name}: {error.filename}: {error.strerror}") from error


def _open_folder(folder: Path, name: str, split: str) -> EvalDataset:
    marks = ("classnames.txt", "dataset_type.txt", "card.json", "nshards.txt")
    if (
        any((folder / mark).is_file() for mark in marks)
        or any(folder.glob("*.tar"))
        or any(folder.glob("*/*.tar"))
    ):
        return open_published(folder, name, split=split)
    return open_image_folder(folder, name, split=split)

"""The shards of a source to train on; sources that are no shards are packed into shards in the cache first."""

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from clipkit.errors import DataError
from clipkit.samples import FolderSamples, MissingSplit, find_source, has_captions
from clipkit.samples.remote import ShardFile
from data.corpora.builtin import BUILTIN, built_in


def find_shards(source: str, *, split: str = "train") -> list[ShardFile]:
    """Return the tars of a source in order; a built-in dataset is created on first use."""
    if source in BUILTIN and not Path(source).exists():
        source = str(built_in(source))
    try:
        files = find_source(source, split=split)
    except DataError as error:
        if source.isalnum() and "no such file" in str(error):
            raise DataError(f"{error}, nor a built-in dataset ({', '.join(sorted(BUILTIN))})") from error
        raise
    if files.format == "shards":
        return list(files.files)
    if files.format == "images" and not _is_labeled(files.folder):
        raise DataError(
            f"{source} has images without captions: write the captions into .txt files of the same names, or paths "
            "and captions into a table, or move the images into a folder for each class"
        )
    from data.pack import (  # imports libraries that training on shards does not need
        has_split_column,
        pack_into_cache,
    )

    packed_split = "" if files.split == "train" else files.split
    if files.folder is not None:
        folder = pack_into_cache([files.folder], packed_split)
    elif files.files[0].is_remote:
        folder = pack_into_cache(list(files.files), packed_split)
    else:
        folder = pack_into_cache([Path(file.url) for file in files.files], packed_split)
    # rows that state no split belong to every split; they are packed as train
    if not files.split and not has_split_column(folder):
        split = "train"
    try:
        return list(find_source(str(folder), split=split).files)
    except MissingSplit as error:
        raise MissingSplit(str(error).replace(str(folder), source)) from error


def _is_labeled(folder: Path | None) -> bool:
    """Whether the images of a folder have captions, or are in a subfolder for each class."""
    return folder is not None and (has_captions(folder) or bool(FolderSamples(folder).class_names))


def find_all_shards(sources: Iterable[str], *, split: str = "train") -> list[ShardFile]:
    """Return the tars of all sources in order."""
    return list(chain.from_iterable(find_shards(source, split=split) for source in sources))

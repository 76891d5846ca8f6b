"""Reader of WebDataset shards with text files next to them, the layout in which most datasets are published.

CLIP_benchmark and DataComp publish such datasets, and data/shards/writer.py writes them. A sample has an image and

- a ``cls``, the number of its class;
- an ``npy``: a multi-hot label if ``dataset_type.txt`` says ``multilabel``, otherwise metadata columns;
- or captions, one per line.

Extensions: ``card.json`` may list ``"tasks"`` and states the number of samples; a sample's json may list its
captions as ``"captions"``, the first of which is in the caption file; with the dataset type
``image_caption_selection``, the first caption of an image is right and the others are wrong.

In shards without ``card.json``, ``dataset_type.txt`` and ``nshards.txt`` (crawled pairs), samples without a caption
are skipped and counted in the log. In all others, an incomplete sample is an error.

Letters in shape comments: N samples, C classes.
"""

import hashlib
import logging
import math
import os
import re
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.errors import DataError
from clipkit.files import counted, shown
from clipkit.samples import (
    IMAGE_EXTENSIONS,
    MissingSplit,
    ShardSamples,
    decode_text,
    find_split,
    join_place,
)
from clipkit.samples.remote import ShardFile, Unreachable, is_remote, list_folder, shard_cache
from data.captions import TEXT, CaptionRule, is_utf8
from data.shards.manifest import list_members, suggest_members
from eval.datasets.dataset import DEFAULT_TEMPLATES, TEST, EvalDataset, NoSplit
from eval.readers.files import (
    checked_set,
    lines_of,
    read_text_file,
    short_hash,
    templates_in,
    written,
)
from eval.results.records import parse_json
from eval.tasks import TASKS

__all__ = [
    "CACHE_GB",
    "Members",
    "ShardImages",
    "address_of",
    "array_of",
    "files_of_split",
    "find_published",
    "open_published",
    "versions_of",
]

CACHE_GB = 100.0  # default size of the local cache of remote shards, as in training
_FETCHING = 4  # shards fetched at a time
_MAX_NPY_BYTES = 4 << 20  # per sample: half a million classes of 8 bytes
_SET_MARKS = ("card.json", "dataset_type.txt")  # files that only a complete dataset has
_TYPES = ("classification", "multilabel", "retrieval", "image_caption_selection")
_SHOWN = 200  # characters of a value in a message
_log = logging.getLogger("eval")

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Members:
    """Where the images and captions of shards are, as ``data.image`` and ``data.captions`` of a training."""

    image: str = ""
    captions: tuple[str, ...] = (TEXT,)


def open_published(
    folder: Path | str,
    name: str,
    *,
    split: str = TEST,
    metadata_names: Sequence[str] = (),
    cache_gb: float = CACHE_GB,
    members: Members | None = None,
) -> EvalDataset:
    """Open one split of a published dataset; remote shards are downloaded now and cached.

    Args:
        folder: a local folder or URL (``https://``, ``hf://``, ``s3://``, ``gs://``, or a dataset's page at Hugging
            Face). A local folder may be a single split's; then the files in its parent describe the dataset.
        name: the dataset's name.
        split: the split's name.
        metadata_names: names of all columns of each sample's ``npy``.
        cache_gb: size of the local cache of remote shards; 0 reads samples over the network.
        members: where images and captions are; None for the usual names.

    Raises:
        DataError: there is no such split, or it is incomplete or inconsistent.
    """
    place = address_of(folder) if isinstance(folder, str) and is_remote(folder) else Path(folder)
    root, own_split = place, split
    if split == TEST and isinstance(place, Path) and any(place.glob("*.tar")):
        own, marks = place.absolute(), (*_SET_MARKS, "classnames.txt")
        described = [any((one / mark).is_file() for mark in marks) for one in (own, own.parent)]
        if described == [False, True]:
            root, own_split = own.parent, own.name
    card_file = join_place(root, "card.json")
    try:
        card = parse_json(read_text_file(card_file) or "{}")
    except ValueError as error:
        raise DataError(f"{card_file} does not parse: {error}") from error
    if not isinstance(card, dict):
        raise DataError(f"{card_file} is not a JSON object")
    kind = (*lines_of(join_place(root, "dataset_type.txt")), "")[0].lower()
    if kind not in ("", *_TYPES):
        raise DataError(f"dataset {name} is of type {kind[:40]!r}; known: {', '.join(_TYPES)}")

    files = _shards_of_split(name, place, split)
    cache = shard_cache([file.url for file in files], cache_gb)
    if cache is not None:
        cache.prefetch([file for file in files if file.is_remote], threads=_FETCHING)
    members = members or Members()
    images_in = (members.image.lower(),) if members.image else IMAGE_EXTENSIONS
    samples = ShardSamples(files, cache)
    counts = card.get("samples")
    stated = counts.get(own_split) if isinstance(counts, dict) else None
    shards = map(samples.open_shard, range(len(files)))
    complete = sum(int(shard.index.has_any(images_in).sum()) for shard in shards)
    if not complete and len(samples):
        raise _nothing_usable(name, samples, members, "an image")
    if complete < len(samples) or stated not in (None, complete):
        expected = f", its card says {str(stated)[:_SHOWN]}" if stated is not None else ""
        raise DataError(
            f"dataset {name}: split {own_split!r} has {counted(complete, 'sample')} with an image and "
            f"{len(samples) - complete} without{expected}; fetch or write it again"
        )
    class_names = tuple(lines_of(join_place(root, "classnames.txt")))
    multilabel = kind == "multilabel"
    if multilabel and metadata_names:
        raise DataError(f"dataset {name} is multilabel, so its npy is the label and has no metadata")
    numbers, all_captions, arrays = _annotations(
        name, samples, members, arrays=multilabel or bool(metadata_names)
    )
    if cache is not None:
        cache.close()  # everything is fetched; otherwise a suite would keep the threads of every dataset

    images, labels, captions = ShardImages(samples, members.image), None, None
    if multilabel:
        labels = _multi_hot(name, arrays, samples, classes=len(class_names))
    else:
        marks = (*_SET_MARKS, "nshards.txt")
        crawled = not any(
            read_text_file(join_place(one, mark)) is not None
            for one in dict.fromkeys((place, root))
            for mark in marks
        )
        known = [number for number in numbers if number is not None]
        if crawled and not known and any(all_captions) and not all(all_captions):
            kept = [number for number, own in enumerate(all_captions) if own]
            _log.warning(
                "dataset %s: %d of %d samples have no caption and are skipped",
                name,
                len(samples) - len(kept),
                len(samples),
            )
            images, all_captions = (
                ShardImages(samples, members.image, kept),
                [all_captions[number] for number in kept],
            )
            numbers = [None] * len(kept)
        for what, present in (
            ("label", [one is not None for one in numbers]),
            ("caption", list(map(bool, all_captions))),
        ):
            if any(present) and not all(present):
                raise _at(name, samples, present.index(False), f"has no {what}, others have one")
        if not known and not any(all_captions) and len(samples):
            raise _nothing_usable(name, samples, members, "a label (.cls) or a caption")
        labels = torch.tensor(known) if known else None
        captions = tuple(all_captions) if any(all_captions) else None

    tasks: tuple[str, ...] = ("zero-shot",)
    if "tasks" in card:
        if (
            not isinstance(card["tasks"], list)
            or not card["tasks"]
            or any(task not in [*TASKS] for task in card["tasks"])
        ):
            shown = repr(card["tasks"])[:_SHOWN]
            raise DataError(f"dataset {name}: card.json has tasks {shown}; known: {', '.join(TASKS)}")
        tasks = tuple(task for task in TASKS if task in card["tasks"])
    elif kind == "image_caption_selection":
        tasks = ("compositional",)
    elif kind == "retrieval" or (labels is None and captions):
        tasks = ("retrieval",)
    broken = [number for number, own in enumerate(all_captions) if not all(map(is_utf8, own))]
    if broken:
        shard, key = images.locate(broken[0])
        what = f"{counted(len(broken), 'sample')} with a caption that is not UTF-8"
        if captions and any(TASKS[task].fits != "labels" for task in tasks):
            raise DataError(
                f"dataset {name}: {what}, the first is {key} of {shard}: write the captions in UTF-8"
            )
        _log.warning("dataset %s: %s: captions are ignored", name, what)
        captions = None
    revision = images.fingerprint()
    if members.captions != (TEXT,):
        revision = short_hash(revision, members.captions)
    choices = captions if kind == "image_caption_selection" else None
    return checked_set(
        EvalDataset(
            name=name,
            split=split,
            images=images,
            revision=revision,
            tasks=tasks,
            class_names=class_names,
            templates=templates_in(root) or DEFAULT_TEMPLATES,
            labels=labels,
            captions=None if choices else captions,
            choices=choices,
            metadata=_columns(name, arrays, samples, metadata_names) if metadata_names else {},
        )
    )


class ShardImages:
    """The images of some samples of shards.

    Args:
        samples: the samples.
        member: the member with the image; "" for the first one with the extension of an image.
        numbers: which of them; all by default.
    """

    def __init__(self, samples: ShardSamples, member: str = "", numbers: Sequence[int] | None = None) -> None:
        self.samples, self.member, self.all = samples, member.lower(), numbers is None
        self.numbers = range(len(samples)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, number: int) -> bytes:
        """Return an encoded image; raise DataError if it cannot be read."""
        return self.samples.read(self.numbers[number], self.member)

    def locate(self, number: int) -> tuple[str, str]:
        """Return the shard and key of an image."""
        return self.samples.locate(self.numbers[number])

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that depend on the set of samples."""
        digest = self.samples.content_id
        if self.all and not self.member:
            return digest
        chosen = "" if self.all else ",".join(map(str, self.numbers))
        return hashlib.sha256(f"{digest}{self.member}{chosen}".encode()).hexdigest()[:16]

    def stamp(self) -> str:
        """Return a fingerprint that also depends on the versions of the shards."""
        return short_hash(self.fingerprint(), versions_of(self.samples.files))


def versions_of(files: Iterable[ShardFile]) -> list[tuple[int | str, ...]]:
    """Return what changes when files are rewritten: etags, or what ``written`` returns for local files.

    Raises:
        DataError: a local file is missing.
    """
    found: list[tuple[int | str, ...]] = []
    for file in files:
        try:
            state = () if file.is_remote else written(Path(file.url).stat())
        except OSError as error:
            raise DataError(f"shard {file.shown}: {error.strerror}") from error
        found.append((file.size, file.version, *state))
    return found


# --------------------------------------------------------------------------------------------------------------
# Labels, captions and arrays of all samples; no image is read.


def _annotations(
    name: str, samples: ShardSamples, where: Members, *, arrays: bool
) -> tuple[list[int | None], list[tuple[str, ...]], list[Array | None]]:
    """Return the ``cls``, the captions and, if requested, the ``npy`` of each sample.

    Captions are the lines of all texts that ``where`` names; with the usual names, those that a sample's json lists
    if the first one is its caption.
    """
    wanted = ("txt", "cls", "json", "npy") if arrays else ("txt", "cls", "json")
    for number in range(len(samples.files)):
        shard = samples.open_shard(number)
        for what, names in (("images", IMAGE_EXTENSIONS), *((f"{one} members", (one,)) for one in wanted)):
            count = sum(shard.index.names.get(member, 0) for member in names)
            if count > (rows := int(shard.index.has_any(names).sum())):
                raise DataError(
                    f"dataset {name}: {shard.shown} has {count:,} {what} in {counted(rows, 'sample')}: "
                    "neighbouring files with the same name up to the first dot are one sample"
                )
    labels: list[int | None] = []
    captions: list[tuple[str, ...]] = []
    found: list[Array | None] = []
    rule = CaptionRule(fields=where.captions)
    for i in range(len(samples)):
        shard, row = samples.find(i)
        try:
            members = shard.read_present(row, {*wanted, *rule.members(shard.index.members(row))})
            fields = rule.parse(members)
            texts = [text for texts in rule.by_field(fields) for text in texts]
            listed = fields.get("captions")
            if where.captions != (TEXT,) or not isinstance(listed, list) or listed[:1] != texts[:1]:
                listed = [line for text in texts for line in text.split("\n")]
            labels.append(_label_of(members["cls"]) if "cls" in members else None)
            captions.append(tuple(one.strip() for one in listed if isinstance(one, str) and one.strip()))
            found.append(array_of(members["npy"]) if "npy" in members else None)
        except DataError as error:
            raise _at(name, samples, i, str(error), separator=": ") from error
    return labels, captions, found


def _label_of(data: bytes) -> int:
    text = decode_text(data).strip()
    if not (text.isdecimal() and len(text) < 19):
        raise DataError(f"label {text[:40]!r} is not a whole number")
    return int(text)


def array_of(data: bytes) -> Array:
    """Return the array of numbers in an ``npy`` file, read-only; nothing is unpickled.

    Raises:
        DataError: it is not such a file, incomplete, or has another dtype (objects, text, records).
    """
    if len(data) > _MAX_NPY_BYTES:
        raise DataError(f"its npy of {len(data)} bytes is over the limit of {_MAX_NPY_BYTES}")
    if data[:6] != b"\x93NUMPY" or len(data) < 12 or data[6] not in (1, 2):
        raise DataError("its npy is not a numpy array")
    start = 12 if data[6] == 2 else 10
    length = int.from_bytes(data[8:start], "little")
    dtype, shape, fortran = _npy_header(data[: start + length])
    count = math.prod(shape)
    if count * dtype.itemsize != len(data) - start - length:
        raise DataError(f"its npy states {count} values of {dtype}, which does not match its size")
    flat = np.frombuffer(data, dtype, count, start + length)
    return flat.reshape(shape, order="F" if fortran else "C")


@lru_cache(maxsize=64)  # the samples of a dataset have the same header
def _npy_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    file = BytesIO(header)
    read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    try:
        with warnings.catch_warnings(action="ignore"):
            version = np.lib.format.read_magic(file)
            shape, fortran, dtype = read[version[0]](file)
    except Exception as error:  # numpy's parser raises many exception types
        raise DataError(f"its npy has an invalid header: {' '.join(str(error).split())[:100]}") from error
    if dtype.hasobject:
        raise DataError("its npy contains objects, which could execute code; only numbers are read")
    if dtype.kind not in "biuf" or len(shape) > 8 or any(side < 0 for side in shape):
        raise DataError(
            f"its npy contains {dtype} values of shape {str(shape)[:60]}; only arrays of numbers are read"
        )
    return dtype, shape, fortran


def _multi_hot(name: str, arrays: Sequence[Array | None], samples: ShardSamples, *, classes: int) -> Tensor:
    """Return multi-hot labels, (N, C) bool, from (C,) zeros and ones; ``classes`` is 0 without class names."""
    width = classes or next((array.size for array in arrays if array is not None), 0)
    rows = np.zeros((len(arrays), width), dtype=np.bool_)
    for number, array in enumerate(arrays):
        if array is None:
            raise _at(name, samples, number, "has no npy with the labels of a multilabel dataset")
        if array.size != width or array.ndim > 2 or (array.ndim == 2 and 1 not in array.shape):
            other = f"others have {width}"
            if classes:
                other = f"classnames.txt has {counted(width, 'line')}; blank lines in it count"
            raise _at(name, samples, number, f"has a multi-hot label of shape {array.shape}, {other}")
        if not ((array == 0) | (array == 1)).all():
            raise _at(name, samples, number, "has a multi-hot label with values other than 0 and 1")
        rows[number] = array.reshape(-1) == 1
    return torch.from_numpy(rows)  # (N, C)


def _columns(
    name: str, arrays: Sequence[Array | None], samples: ShardSamples, names: Sequence[str]
) -> dict[str, Tensor]:
    """Return the columns of each ``npy`` by name: (N,) int64, or float64 if some value is not an integer."""
    rows = np.zeros((len(arrays), len(names)))  # float64 is exact for integers up to 2^53
    for number, array in enumerate(arrays):
        if array is None:
            raise _at(name, samples, number, f"has no npy, expected the columns {', '.join(names)}")
        if array.size != len(names):
            stated = f"expected {len(names)} ({', '.join(names)})"
            raise _at(name, samples, number, f"has {counted(array.size, 'value')} in its npy, {stated}")
        rows[number] = array.reshape(-1)
        if not np.isfinite(rows[number]).all():
            raise _at(name, samples, number, "has a value in its npy that is not finite")
    found = {}
    for column, key in enumerate(names):
        values = torch.from_numpy(rows[:, column].copy())  # (N,)
        whole = bool((values == values.round()).all()) and bool((values.abs() < 2**53).all())
        found[key] = values.to(torch.int64) if whole else values
    return found


def _nothing_usable(name: str, samples: ShardSamples, members: Members, what: str) -> DataError:
    shard = samples.open_shard(0)
    found = suggest_members(shard, CaptionRule(fields=members.captions), members.image)
    hint = f": add {' '.join(f'--{option} {member}' for option, member in found.items())}" if found else ""
    return DataError(
        f"dataset {name}: no sample has {what}; members: {list_members(shard.index.names)}{hint}"
    )


def _at(name: str, samples: ShardSamples, number: int, what: str, *, separator: str = " ") -> DataError:
    shard, key = samples.locate(number)
    return DataError(f"dataset {name}: sample {key} of {shard}{separator}{what}")


# --------------------------------------------------------------------------------------------------------------
# Where datasets are: addresses at Hugging Face, a dataset's name below a root, the shards of a split.

_HUB_HOSTS = ("huggingface.co", "hf.co")
# …/datasets/OWNER/NAME, perhaps with /tree/BRANCH and a folder, as in a browser
_HUB_PAGE = re.compile(
    r"(/datasets/[\w.-]+/[\w.-]+)(?:/(?:tree|raw|resolve|blob)/([^/]+)(/.*)?)?/?", flags=re.ASCII
)
_PROBES = (f"{TEST}/nshards.txt", "classnames.txt", "dataset_type.txt")
_REMEMBERED = 60.0  # seconds
_unreachable: dict[str, tuple[float, str]] = {}  # by root: when it did not respond, and the message


def address_of(source: str) -> str:
    """Return where the files of a source are.

    For a dataset's page at Hugging Face, ``https://huggingface.co/datasets/OWNER/NAME/tree/BRANCH`` (as
    CLIP_benchmark takes it), that is ``…/resolve/BRANCH``; the default branch is ``main``. Other sources are
    returned unchanged.
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
    """Find a dataset below a folder of datasets by one of its names, and return it as a source to open.

    For the name ``vtab/dtd`` these folders are tried in order: ``wds_vtab-dtd``, ``wds_vtab-dtd_test`` (names of
    CLIP_benchmark and DataComp), ``vtab-dtd`` and ``vtab/dtd``; for ``sugar_crepe-swap_obj`` and ``aro-relation``
    also the files ``sugar_crepe/swap_obj.json`` (or in its ``data``) and ``aro/visual_genome_relation.json``.
    Locally and in stores that list their folders, datasets of all formats are found.

    Args:
        root: a folder, local or in a store, or an owner at Hugging Face (``hf://datasets/clip-benchmark``).
        names: possible names, the most likely first.

    Raises:
        Unreachable: the store does not respond; for the next minute the error is raised without asking it again.
    """
    when, message = _unreachable.get(str(root), (-math.inf, ""))
    if time.monotonic() - when < _REMEMBERED:
        raise Unreachable(message)
    try:
        for name in names:
            flat = name.replace("/", "-")
            published = flat if flat.startswith("wds_") else f"wds_{flat}"
            for candidate in dict.fromkeys((published, f"{published}_test", flat, name)):
                place = join_place(root, candidate)
                if isinstance(place, Path):
                    if place.expanduser().is_dir():
                        return str(place.expanduser())
                elif _is_dataset(address_of(place)):
                    return place
            family, _, own = flat.partition("-")
            for inside in (f"{own}.json", f"data/{own}.json", f"visual_genome_{own}.json"):
                file = join_place(root, family, inside)
                if own and isinstance(file, Path) and file.expanduser().is_file():
                    return str(file.expanduser())
    except Unreachable as error:
        _unreachable[str(root)] = (time.monotonic(), str(error))
        raise
    return None


def _is_dataset(address: str) -> bool:
    """Return whether there is a dataset; a web server, which may not list folders, is asked for typical files."""
    try:
        if not address.startswith(("http://", "https://")):
            return any(list_folder(f"{address}{inside}", ("",)) for inside in ("", f"/{TEST}", "/data"))
    except Unreachable:
        raise
    except DataError:  # there is no such bucket, dataset or revision, or no permission to read it
        return False
    try:
        return any(read_text_file(f"{address}/{name}") is not None for name in _PROBES)
    except Unreachable:
        raise
    except DataError as error:  # missing files are None, so the server failed: do not retry for every dataset
        raise Unreachable(str(error)) from error


def _shards_of_split(name: str, root: str | Path, split: str) -> list[ShardFile]:
    """Return all shards of one split; raise DataError if one is missing, and NoSplit if there is no such split."""
    shards = files_of_split(name, root, split, (".tar",))
    stems = [shard.name.removesuffix(".tar") for shard in shards]
    numbers = {int(stem) for stem in stems if stem.isdecimal()}
    missing = sorted(set(range(len(shards))) - numbers)
    if missing and all(map(str.isdecimal, stems)):  # published shards are 0.tar … N-1.tar
        folder = shards[0].shown.rpartition("/")[0]
        raise DataError(f"shard {missing[0]}.tar is missing in {folder}; fetch the dataset again")
    return shards


def files_of_split(name: str, place: str | Path, split: str, suffixes: tuple[str, ...]) -> list[ShardFile]:
    """Return the files of a split of a dataset; files whose names state no split are the test split.

    Raises:
        NoSplit: there are none.
    """
    try:
        stated, files = find_split(place, split, suffixes)
    except MissingSplit as error:
        advice = ""
        if split == TEST:
            advice = (
                "; pack it with held-out pairs (python -m data pack TABLE OUT --test 0.1), or name the folder of a "
                "split"
            )
        raise NoSplit(f"dataset {name}: {error}{advice}") from error
    if not stated and split != TEST:
        raise NoSplit(f"dataset {name} has no split {split!r}: all of {shown(str(place))} is for testing")
    return files

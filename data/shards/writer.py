"""Write dataset folders in the layout of published evaluation datasets, also used for training.

    ROOT/card.json                               name, counts, license, how it was made
    ROOT/classnames.txt                          one class per line; the index of the line is the label
    ROOT/zeroshot_classification_templates.txt   one prompt template per line, with {c} for the class
    ROOT/<split>/nshards.txt                     number of shards of the split
    ROOT/<split>/0.tar …                         WebDataset shards: KEY.png, KEY.txt, KEY.cls, KEY.json, KEY.npy

A folder is written under a temporary name and renamed when complete.
"""

import errno
import io
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import webdataset

from clipkit.errors import DataError
from clipkit.files import lock_output, sync_to_disk
from clipkit.samples import IMAGE_MEMBERS


@dataclass(frozen=True, kw_only=True)
class Record:
    """One sample to be written: an encoded image with its caption, its label, or both.

    ``key`` is a path without dots, because the extension starts at the first dot. ``extension`` is the name of the
    member with the image, such as "jpg" or "image.npy". An image with several captions has the first as ``caption``
    and all of them as "captions" in ``meta``, where evaluation expects them. ``columns`` are the metadata columns
    that evaluation may group by.
    """

    key: str
    image: bytes
    extension: str
    caption: str | None = None
    label: int | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    columns: Sequence[int] = ()

    def __post_init__(self) -> None:
        name = self.key.rpartition("/")[2]
        assert name and "." not in name, f"key {self.key!r} is empty or has a dot"
        assert self.extension in IMAGE_MEMBERS, f"extension {self.extension!r} is not of an image"

    def members(self) -> dict[str, Any]:
        """Return the members of this sample for WebDataset's writer."""
        members: dict[str, Any] = {"__key__": self.key, self.extension: self.image}
        if self.caption is not None:
            members["txt"] = self.caption.encode()
        if self.label is not None:
            members["cls"] = str(self.label).encode()
        if self.columns:
            np.save(file := io.BytesIO(), np.array(self.columns, np.int64))
            members["npy"] = file.getvalue()
        if self.meta:
            members["json"] = json.dumps(dict(self.meta), ensure_ascii=False, sort_keys=True).encode()
        return members


class DatasetWriter:
    """Write one dataset folder; nothing appears at ``out`` before ``finish``."""

    def __init__(self, out: Path, *, samples_per_shard: int = 10_000) -> None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise DataError(f"{out} already exists and is not empty: use a new folder, or remove it first")
        self.out = out
        self.samples_per_shard = samples_per_shard
        self.counts: dict[str, int] = {}
        self._last_keys: dict[str, str] = {}
        self._writers: dict[str, Any] = {}
        self._aside = out.with_name(f".{out.name}.partial-{os.getpid()}")
        out.parent.mkdir(parents=True, exist_ok=True)
        self._lock = ExitStack()
        # another name than that of the cache, which holds its lock while it writes a dataset
        lock = out.with_name(f".{out.name[:200]}.writing")
        self._lock.enter_context(lock_output(out, "process", lock=lock))
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir()

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._writers:
            with suppress(OSError):  # closing fails, too, on a full disk
                self._writers.popitem()[1].close()
        shutil.rmtree(self._aside, ignore_errors=True)
        self._lock.close()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DataError(f"cannot write {self.out}: {error.strerror}") from error

    def write(self, split: str, record: Record) -> None:
        """Append a sample to a split ("train", "test", …)."""
        assert self._last_keys.get(split) != record.key, f"key {record.key!r} twice in a row"
        self._last_keys[split] = record.key
        count = self.counts.get(split, 0)
        if count % self.samples_per_shard == 0:
            if split in self._writers:
                self._writers[split].close()
            folder = self._aside / split
            folder.mkdir(exist_ok=True)
            # an integer mtime keeps each header at 512 bytes and the file equal on every machine
            self._writers[split] = webdataset.TarWriter(
                str(folder / f"{count // self.samples_per_shard}.tar"),
                mtime=0,
                user="",
                group="",
                encoder=False,
            )
        self._writers[split].write(record.members())
        self.counts[split] = count + 1

    def extra_file_path(self, name: str) -> Path:
        """Return the path for an additional file of the folder; write it before ``finish``."""
        return self._aside / name

    def finish(
        self,
        card: Mapping[str, Any],
        *,
        class_names: Sequence[str] | None = None,
        templates: Sequence[str] | None = None,
    ) -> None:
        """Write card and class files, sync everything, and move the folder into place."""
        while self._writers:
            self._writers.popitem()[1].close()
        for split, count in self.counts.items():
            shards = -(-count // self.samples_per_shard)
            (self._aside / split / "nshards.txt").write_text(f"{shards}\n", encoding="utf-8")
        files = {"classnames.txt": class_names, "zeroshot_classification_templates.txt": templates}
        for name, lines in files.items():
            if lines is not None:
                for line in lines:
                    # it would shift the labels of all following lines
                    if line.splitlines() not in ([line], []):
                        raise DataError(f"{name} needs one entry per line, {line[:80]!r} has several lines")
                (self._aside / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        text = json.dumps({**card, "samples": self.counts}, indent=2, ensure_ascii=False)
        (self._aside / "card.json").write_text(text + "\n", encoding="utf-8")
        for path in (*self._aside.rglob("*"), self._aside):
            sync_to_disk(path)
        if self.out.exists():
            self.out.rmdir()  # empty
        self._aside.rename(self.out)
        sync_to_disk(self.out.parent)

"""A folder of embeddings in the layout of clip-retrieval, consistent even if its writers are killed at any moment.

    OUT/img_emb/img_emb_0.npy            (N, O) float16, unit norm, or as in ``clipkit.inference.storage``; for
                                         texts text_emb/text_emb_0.npy
    OUT/metadata/metadata_0.parquet      one row per embedding: image_path, caption if there are captions, source,
                                         digest (for texts: caption, key, source, digest)
    OUT/failures.jsonl                   items that could not be encoded: source, key, cause, digest; absent if none
    OUT/manifest.json                    the sources, model and settings of all files
    OUT/.parts/0.jsonl                   marks file 0 as complete; digest of its items, counts, failures
    OUT/.former                          outdated files of images until all files are complete
    OUT/.lock-0-of-2                     held by process 0 of 2 while it writes

Items are split into parts of equal length. Each part is written to one file, with a row for each item that did not
fail. As in clip-retrieval, file numbers are zero-padded to the same length, because its readers sort names. A part
is written to temporary files, synced and renamed; its record in ``.parts`` is written last.

Sources may change after a folder was started: parts whose items changed are first removed, then encoded again. A
part is unchanged if its items have the same names and their files have the same sizes, times and inodes. At any
time, the folder contains the embeddings described by the manifest, or some of them.

If an item is added or removed, all later items move by one row, and their parts are written again. The rows of
outdated parts of images are therefore kept until all parts are complete. If the content of an image is unchanged,
its row is copied, also if only times or inodes differ, as after a copy to another disk.
"""

import json
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clipkit.errors import ConfigError, DataError
from clipkit.files.writing import (
    lock_output,
    replacing,
    sync_to_disk,
    temporary_path,
    user_path,
    write_atomic,
)
from clipkit.inference.inputs import Kind
from clipkit.inference.storage import STORAGE, ReusableRows, storage_of
from clipkit.inference.stream import Failure, Features

_FORMAT = 2
_CHECK_SECONDS = 1.0
ROW_GROUP = 1000  # rows of metadata that are read together; ``clipkit search`` reads those of each result
# settings that must not change when a run is resumed, and their names in error messages
_SETTINGS = {
    "format": "the format", "kind": "the kind (images or texts)", "background": "the background (--background)",
    "upright": "whether the EXIF orientation is applied (--upright)",
    "pixel_range": "the pixel range (--pixel-range)", "dim": "--dim", "weights": "the model",
    "rows_per_file": "--rows-per-file", "batch_size": "--batch-size", "precision": "--precision",
    "device": "--device", "dtype": "--dtype",
}  # fmt: skip
# defaults for older manifests, which lack these settings
_EARLIER = {"background": "none", "upright": False, "pixel_range": "auto", "dtype": "float16"}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Sources, model and settings of embeddings."""

    kind: Kind
    model: str  # as given by the user
    weights: str  # ``model_hash``
    sources: Sequence[str]  # as given by the user
    items: int
    digest: str  # of all parts' digests
    captions: bool  # whether the metadata of images include captions
    rows_per_file: int
    batch_size: int
    precision: str
    device: str  # type of the device: different devices round differently
    background: str = "none"  # color behind transparent images, as #rrggbb
    upright: bool = False  # whether the EXIF orientation is applied
    pixel_range: str = "auto"  # of deep grayscale images, as "LOW,HIGH"
    dtype: str = "float16"  # key of ``clipkit.inference.storage.STORAGE``
    directory: str = ""  # that relative paths of sources begin at
    dim: int = 0  # first elements of the embeddings that are kept; 0: all
    scale: float = 0.0  # exp(t) of the model; 0: stored by an earlier version
    format: int = _FORMAT

    @property
    def files(self) -> int:
        """Number of embedding files."""
        return -(-self.items // self.rows_per_file)

    def items_of(self, part: int) -> int:
        """Return the number of items of a part."""
        return min(self.rows_per_file, self.items - part * self.rows_per_file)


def _difference(stored: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    stored = {"dim": manifest["dim"], **_EARLIER, **stored}
    changes = []
    for name, what in _SETTINGS.items():
        before = stored.get(name)
        now = manifest[name]
        if before == now:
            continue
        if name == "weights":
            before, now = (
                f"{values.get('model')} ({str(values.get(name))[:8]})" for values in (stored, manifest)
            )
        changes.append(f"{what} was {before} and is now {now}")
    if changes:
        return "; ".join(changes)
    # normalized like the stored paths: ``./photos/`` and ``photos`` are the same
    stored_sources = [str(user_path(str(source))) for source in stored.get("sources", [])]
    sources = [str(user_path(str(source))) for source in manifest["sources"]]
    missing = sorted((Counter(stored_sources) - Counter(sources)).elements())
    if not missing:
        return ""
    listed = ", ".join(sources[:3]) + (", …" if len(sources) > 3 else "")
    return f"{missing[0]} was one of the sources, which are now {listed}"


_CONTENT = ("sources", "items", "digest", "captions", "model")  # fields that may change
_NUMBERED = re.compile(r"[a-z_]*?_?([0-9]+)\.(?:npy|parquet|jsonl)")


class Part:
    """Rows and failures of one part, collected in memory until it is complete.

    Args:
        dtype: how rows are stored, a key of ``clipkit.inference.storage.STORAGE``.
        every: distance of the rows in ``sample``, which are kept in float32, except reused ones.
    """

    def __init__(self, number: int, *, dtype: str, every: int) -> None:
        self.number = number
        self.rows: list[npt.NDArray[Any]] = []
        self.sample: list[npt.NDArray[np.float32]] = []
        self._dtype = dtype
        self._every = every
        self.metadata: list[tuple[str, str | None, str, str]] = []  # key, caption, source, digest
        self.failures: list[Failure] = []
        self.reused = 0

    def __len__(self) -> int:
        return len(self.metadata) + len(self.failures)

    def add(self, outcome: Features | Failure) -> None:
        """Add features or a failure."""
        if isinstance(outcome, Failure):
            self.failures.append(outcome)
            return
        self.rows.append(STORAGE[self._dtype].pack(outcome.rows))
        sampled = slice(-len(self.metadata) % self._every, None, self._every)
        self.sample.append(outcome.rows[sampled][~outcome.reused[sampled]])
        self.reused += int(outcome.reused.sum())
        for item, caption, digest in zip(outcome.items, outcome.captions, outcome.digests, strict=True):
            self.metadata.append((item.key, caption, item.source, digest))


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Totals of a complete folder."""

    rows: int
    width: int  # O
    failures: int


@contextmanager
def only_writer(out: Path, process: int, processes: int) -> Iterator[None]:
    """Create the folder if needed, and lock it.

    Other processes with the same index are excluded, and all processes of runs with another number of processes,
    since their parts overlap.
    """
    out.mkdir(parents=True, exist_ok=True)
    with lock_output(out, "clipkit encode", lock=out / f".lock-{process}-of-{processes}"):
        for lock in sorted(out.glob(".lock-*")):
            if not lock.name.endswith(f"-of-{processes}"):
                # a process of this run may be checking the lock of a killed process at the same time
                with lock_output(out, "clipkit encode", lock=lock, timeout=_CHECK_SECONDS):
                    pass
        yield


class EmbeddingFolder:
    """A folder of embeddings written by one or more processes.

    Args:
        out: the folder, see ``only_writer``.
        manifest: its intended content.
        digests: digest of the items of each part.
        process: index of this process, which writes the parts whose number modulo ``processes`` equals it.

    Attributes:
        stale: number of this process's parts that existed but must be encoded again.
        reusable: rows of outdated parts, of all processes.
    """

    def __init__(
        self,
        out: Path,
        manifest: Manifest,
        digests: Sequence[str],
        *,
        process: int = 0,
        processes: int = 1,
        retry_failed: bool = False,
    ) -> None:
        assert len(digests) == manifest.files
        self.out = out
        self.manifest = manifest
        self._digests = digests
        self._process = process
        self._processes = processes
        self.embeddings = "img_emb" if manifest.kind == "image" else "text_emb"
        self._records = out / ".parts"
        self._folders = (out / self.embeddings, out / "metadata", self._records)
        self.reusable = ReusableRows(out / ".former")
        self._settle_manifest()
        for folder in self._folders:
            folder.mkdir(exist_ok=True)
        self.stale = 0
        self._remove_stale(retry_failed)

    def is_done(self, part: int) -> bool:
        """Check whether a part is complete on disk, readable and up to date."""
        import pyarrow.parquet

        embeddings, metadata = self._files(part)
        if not self._is_current(part, self._record(part)):
            return False
        try:
            rows = len(np.load(embeddings, mmap_mode="r"))
            table_rows = pyarrow.parquet.read_metadata(metadata).num_rows
            return bool(rows == table_rows == _counts(self._record(part))["rows"])
        except (OSError, ValueError, EOFError):  # damaged: written again
            return False

    def write(self, part: Part) -> None:
        """Write a complete part to disk; if all its items failed, its rows are (0, O)."""
        import pyarrow
        import pyarrow.parquet

        assert len(part) == self.manifest.items_of(part.number)
        array = np.concatenate(part.rows)
        keys, captions, sources, digests = zip(*part.metadata, strict=True) if part.metadata else ((),) * 4
        if self.manifest.kind == "caption":
            columns = {"caption": captions, "key": keys, "source": sources, "digest": digests}
        elif self.manifest.captions:
            columns = {"image_path": keys, "caption": captions, "source": sources, "digest": digests}
        else:
            columns = {"image_path": keys, "source": sources, "digest": digests}
        table = pyarrow.table(
            {name: pyarrow.array(column, pyarrow.string()) for name, column in columns.items()}
        )
        record = [
            {"digest": self._digests[part.number], "rows": len(array), "failures": len(part.failures)},
            *(
                {
                    "source": failure.item.source,
                    "key": failure.item.key,
                    "cause": failure.cause,
                    "digest": failure.digest,
                }
                for failure in part.failures
            ),
        ]
        with ExitStack() as stack:  # renames the record last
            temporary = [
                stack.enter_context(replacing(final, durable=True))
                for final in (self._record(part.number), *self._files(part.number))
            ]
            with temporary[0].open("wb") as file:
                file.writelines(json.dumps(line).encode() + b"\n" for line in record)
            with temporary[1].open("wb") as file:  # np.save would hide the system's error message
                header = np.lib.format.header_data_from_array_1_0(array)
                np.lib.format.write_array_header_1_0(file, header)
                file.write(array.reshape(-1).view(np.uint8).data)
            with temporary[2].open("wb") as file:
                pyarrow.parquet.write_table(table, file, row_group_size=ROW_GROUP)

    def finish(self) -> Totals | None:
        """Write the list of failures, clean up and return the totals; return None unless every part is complete.

        Of several processes, the last to finish gets the totals, or all that finish at the same time.
        """
        if any(self._stored().get(name) != getattr(self.manifest, name) for name in ("items", "digest")):
            raise DataError("the sources changed while they were being read: run the same command again")
        if not all(self.is_done(part) for part in range(self.manifest.files)):
            return None
        rows = failures = 0
        listing = self.out / "failures.jsonl"
        temporary = temporary_path(listing)
        with temporary.open("wb") as file:
            for part in range(self.manifest.files):
                with self._record(part).open("rb") as record:
                    counts = json.loads(record.readline())
                    rows += counts["rows"]
                    failures += counts["failures"]
                    file.writelines(record)
            file.flush()
            os.fsync(file.fileno())
        if failures:
            with suppress(FileNotFoundError):  # another process finished at the same time and has cleaned up
                temporary.replace(listing)
        for folder in (self.out, *self._folders):
            for leftover in folder.glob(".*.partial"):  # of killed processes
                leftover.unlink(missing_ok=True)
        shutil.rmtree(self.out / ".former", ignore_errors=True)
        sync_to_disk(self.out)
        first = np.load(self._files(0)[0], mmap_mode="r")
        width = first.shape[1] * storage_of(first).packed
        return Totals(rows=rows, width=width, failures=failures)

    def _files(self, part: int) -> tuple[Path, Path]:
        digits = self._number(part)
        return (
            self.out / self.embeddings / f"{self.embeddings}_{digits}.npy",
            self.out / "metadata" / f"metadata_{digits}.parquet",
        )

    def _record(self, part: int) -> Path:
        return self._records / f"{part}.jsonl"

    def _number(self, part: int) -> str:
        return str(part).zfill(len(str(self.manifest.files)))

    def _is_current(self, part: int, record: Path) -> bool:
        try:
            return part < len(self._digests) and bool(_counts(record)["digest"] == self._digests[part])
        except (FileNotFoundError, ValueError, KeyError):
            return False

    def _remove_stale(self, retry_failed: bool) -> None:
        """Remove and count this process's outdated parts, and adapt the zero-padding of the other names.

        A part with a record is complete, because the record is written last and removed first.
        """
        records = dict(self._list_parts(self._records))
        current = {part for part, path in records.items() if self._is_current(part, path)}
        if retry_failed:
            current = {part for part in current if not _counts(records[part])["failures"]}
        stale = records.keys() - current
        embeddings, metadata = (dict(self._list_parts(folder)) for folder in self._folders[:2])
        for part in stale:
            records[part].unlink()
            # rows of texts are not reused: they depend on the other texts of their batch
            if self.manifest.kind == "image" and part in embeddings and part in metadata:
                former = self.out / ".former"
                former.mkdir(exist_ok=True)
                name = secrets.token_hex(8)
                embeddings[part].replace(former / f"{name}.npy")
                metadata[part].replace(former / f"{name}.parquet")
        for folder in self._folders[:2]:
            for part, path in self._list_parts(folder):
                target = path.with_name(f"{folder.name}_{self._number(part)}{path.suffix}")
                if part not in current:
                    path.unlink()
                elif path != target:
                    path.replace(target)
        if stale:
            (self.out / "failures.jsonl").unlink(missing_ok=True)
        self.stale = sum(part < self.manifest.files for part in stale)

    def _list_parts(self, folder: Path) -> list[tuple[int, Path]]:
        parts = []
        for path in folder.iterdir():
            match = _NUMBERED.fullmatch(path.name)
            if match and int(match[1]) % self._processes == self._process:
                parts.append((int(match[1]), path))
        return parts

    def _settle_manifest(self) -> None:
        path = self.out / "manifest.json"
        manifest = asdict(self.manifest)
        text = json.dumps(manifest, indent=2) + "\n"
        if not path.exists():
            if any(folder.exists() for folder in self._folders):
                raise DataError(f"{self.out} contains embeddings but no manifest.json: use another --out")
            self.out.mkdir(parents=True, exist_ok=True)
            # if several processes start at the same time, the first writes the manifest and the others compare
            # theirs
            temporary = temporary_path(path)
            temporary.write_text(text, encoding="utf-8")
            sync_to_disk(temporary)
            try:
                with suppress(FileExistsError):
                    os.link(temporary, path)
                temporary.unlink()
            except OSError:  # a file system without hard links
                temporary.replace(path)
            sync_to_disk(self.out)
        stored = self._stored()
        differing = _difference(stored, manifest)
        if differing:
            raise ConfigError(
                f"{self.out} contains embeddings with other settings: {differing}; resume with the same settings, "
                "or use another --out"
            )
        if any(stored.get(name) != manifest[name] for name in _CONTENT):
            write_atomic(path, text, durable=True)

    def _stored(self) -> dict[str, Any]:
        path = self.out / "manifest.json"
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {path}: {error}; use another --out") from error
        if not isinstance(stored, dict) or not isinstance(stored.get("sources", []), list):
            raise DataError(f"cannot read {path}: it is not a manifest; use another --out")
        return stored


def _counts(record: Path) -> dict[str, Any]:
    with record.open("rb") as file:
        counts: dict[str, Any] = json.loads(file.readline())
    return counts

"""A folder of embeddings in the layout of clip-retrieval, written so that a kill at any moment does no harm.

    OUT/img_emb/img_emb_0.npy            (N, O) float16, unit norm; for texts text_emb/text_emb_0.npy
    OUT/metadata/metadata_0.parquet      a row for each embedding: image_path, caption where there are any, source
                                         (for texts: caption, key, source)
    OUT/failures.jsonl                   what could not be encoded: source, key, cause; missing if there is nothing
    OUT/manifest.json                    what all of it was made from, and how
    OUT/.parts/0.jsonl                   that file 0 is complete, with its counts and failures

Items are cut into parts of equal length; a part is a file, and has a row less for each of its failures. Numbers are
padded with zeros to the digits of how many files there are, as clip-retrieval does, because its readers sort names.
A part is written aside, synced, renamed, and only then does its record in ``.parts`` appear.
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from clipkit.errors import ConfigError, DataError
from clipkit.feature_stream import Failure, Features

__all__ = ["EmbeddingFolder", "Manifest", "Part", "Totals"]

_FORMAT = 1
# what must be the same for a run to be gone on with, and how an error names it
_SETTINGS = {
    "format": "the format", "kind": "the kind (pictures or texts)", "weights": "the model",
    "rows_per_file": "--rows-per-file", "batch_size": "--batch-size", "precision": "--precision",
    "device": "--device", "items": "the number of pictures or texts", "digest": "the sources' content",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What embeddings were made from, and how."""

    kind: str  # "image" or "caption"
    model: str  # as it was named
    weights: str  # hash of the weights and of what else makes the model
    sources: Sequence[str]  # as they were named
    items: int
    digest: str  # of the items' names
    captions: bool  # whether the metadata of pictures have captions
    rows_per_file: int
    batch_size: int
    precision: str
    device: str  # its type: other devices round differently
    format: int = _FORMAT

    @property
    def files(self) -> int:
        """How many files the items fill."""
        return -(-self.items // self.rows_per_file)

    def items_of(self, part: int) -> int:
        """How many items a part has."""
        return min(self.rows_per_file, self.items - part * self.rows_per_file)


class Part:
    """The rows and failures of one part, gathered in memory until all of its items are there."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows: list[npt.NDArray[np.float16]] = []
        self.metadata: list[tuple[str, str | None, str]] = []  # key, caption, source
        self.failures: list[Failure] = []

    def __len__(self) -> int:
        return len(self.metadata) + len(self.failures)

    def add(self, outcome: Features | Failure) -> None:
        """Take in some of the part's items."""
        if isinstance(outcome, Failure):
            self.failures.append(outcome)
            return
        self.rows.append(outcome.rows.astype(np.float16))
        for item, caption in zip(outcome.items, outcome.captions, strict=True):
            self.metadata.append((item.key, caption, item.source))


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What a complete folder holds."""

    rows: int
    width: int  # O
    failures: int


class EmbeddingFolder:
    """Embeddings that are being written, by one or more processes.

    Args:
        out: the folder; it is made if need be.
        manifest: what is to be in it.
        process: this one's number among those that write.

    Raises:
        ConfigError: the folder holds embeddings of other sources, or made by another model or setting.
        DataError: it holds embeddings without a manifest, or a damaged one.
    """

    def __init__(self, out: Path, manifest: Manifest, *, process: int = 0) -> None:
        self.out, self.manifest, self._process = out, manifest, process
        self.embeddings = "img_emb" if manifest.kind == "image" else "text_emb"
        self._records = out / ".parts"
        self._folders = (out / self.embeddings, out / "metadata", self._records)
        self._settle_manifest()
        for folder in self._folders:
            folder.mkdir(exist_ok=True)

    def is_done(self, part: int) -> bool:
        """Whether a part is complete on the disk."""
        return all(path.is_file() for path in (self._record(part), *self._files(part)))

    def write(self, part: Part) -> None:
        """Bring a complete part to the disk; one all of whose items failed has rows too, (0, O)."""
        assert len(part) == self.manifest.items_of(part.number)
        array = np.concatenate(part.rows)
        writers: list[Callable[[BinaryIO], None]] = [
            lambda file: np.save(file, array, allow_pickle=False),
            lambda file: _write_parquet(file, self._columns(part)),
            lambda file: _write_record(file, len(array), part.failures),
        ]
        finals = [*self._files(part.number), self._record(part.number)]
        # a part belongs to one process: nobody else writes under these names
        asides = [final.with_name(f".{final.name}.partial") for final in finals]
        for aside, write in zip(asides, writers, strict=True):
            with aside.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
        for aside, final in zip(asides, finals, strict=True):  # the record comes last
            aside.replace(final)
            _sync(final.parent)

    def finish(self) -> Totals | None:
        """List all failures and clean up, if every part is complete; else None.

        Of several processes the last one gets the totals; all of them do where they end at the same time.
        """
        if not all(self.is_done(part) for part in range(self.manifest.files)):
            return None
        rows = failures = 0
        listing = self.out / "failures.jsonl"
        aside = self._aside(listing)
        with aside.open("wb") as file:
            for part in range(self.manifest.files):
                with self._record(part).open("rb") as record:
                    counts = json.loads(record.readline())
                    rows, failures = rows + counts["rows"], failures + counts["failures"]
                    file.writelines(record)
            file.flush()
            os.fsync(file.fileno())
        if failures:
            with suppress(
                FileNotFoundError
            ):  # another process was as far at the same time, and has cleaned up
                aside.replace(listing)
        for left in self.out.glob(".*.partial"):  # also by processes that were killed
            left.unlink(missing_ok=True)
        _sync(self.out)
        width = np.load(self._files(0)[0], mmap_mode="r").shape[1]
        return Totals(rows=rows, width=width, failures=failures)

    def _files(self, part: int) -> tuple[Path, Path]:
        number = self._number(part)
        return (
            self.out / self.embeddings / f"{self.embeddings}_{number}.npy",
            self.out / "metadata" / f"metadata_{number}.parquet",
        )

    def _record(self, part: int) -> Path:
        return self._records / f"{self._number(part)}.jsonl"

    def _number(self, part: int) -> str:
        return str(part).zfill(len(str(self.manifest.files)))

    def _aside(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.{self._process}.partial")

    def _columns(self, part: Part) -> dict[str, list[str | None]]:
        keys, captions, sources = zip(*part.metadata, strict=True) if part.metadata else ((), (), ())
        if self.manifest.kind == "caption":
            return {"caption": list(captions), "key": list(keys), "source": list(sources)}
        middle = {"caption": list(captions)} if self.manifest.captions else {}
        return {"image_path": list(keys), **middle, "source": list(sources)}

    def _settle_manifest(self) -> None:
        path, wanted = self.out / "manifest.json", asdict(self.manifest)
        if not path.exists():
            if any(folder.exists() for folder in self._folders):
                raise DataError(f"{self.out} holds embeddings but no manifest.json: give another --out")
            self.out.mkdir(parents=True, exist_ok=True)
            aside = self._aside(path)
            aside.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
            _sync(aside)
            # of several processes that start at the same time one comes first; the others compare with it
            try:
                os.link(aside, path)
                aside.unlink()
            except FileExistsError:
                aside.unlink()
            except OSError:  # a file system without links
                aside.replace(path)
            _sync(self.out)
        self._compare(path, wanted)

    def _compare(self, path: Path, wanted: dict[str, Any]) -> None:
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            differing = [name for name in _SETTINGS if stored.get(name) != wanted[name]]
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{path} cannot be read: {error}; give another --out") from error
        if differing:
            name = differing[0]
            then, now = (str(values.get(name))[:20] for values in (stored, wanted))
            raise ConfigError(
                f"{self.out} holds embeddings of another run: {_SETTINGS[name]} was {then}, now it is {now}; "
                "give another --out"
            )


def _write_parquet(file: BinaryIO, columns: dict[str, list[str | None]]) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({name: pyarrow.array(values, pyarrow.string()) for name, values in columns.items()})
    pyarrow.parquet.write_table(table, file)


def _write_record(file: BinaryIO, rows: int, failures: Sequence[Failure]) -> None:
    file.write(json.dumps({"rows": rows, "failures": len(failures)}).encode() + b"\n")
    for one in failures:
        line = {"source": one.item.source, "key": one.item.key, "cause": one.cause}
        file.write(json.dumps(line).encode() + b"\n")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""HDF5 files as tables for ``data pack``; h5py is in the extra ``formats``.

One dataset has the images, as arrays or encoded. Columns are the datasets with a row for each image, and those of a
table in the same order. Arrays become images without loss: PNG if it stores them, otherwise .npy.

Only data in the file itself is read: it may neither link to other files nor store values in them.
"""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from clipkit.errors import DataError
from clipkit.samples.table.base import ColumnRequest, Format, Record

_CACHE = 256 << 20  # bytes of decompressed chunks of a dataset
_MAX_BYTES = 1 << 30  # of a row, and of a chunk, which is decompressed as a whole
_EXAMINED = 16  # images that decide what float values mean
_PNG_CHANNELS = (1, 3)
_ERRORS = (OSError, KeyError, ValueError, TypeError, RuntimeError, MemoryError)


class Hdf5(Format):
    """The datasets of an HDF5 file.

    Args:
        path: the file.
        requests: columns of images and captions.
        captions: a table with a row for each image.
    """

    def __init__(self, path: Path, requests: Sequence[ColumnRequest], captions: Format | None = None) -> None:
        super().__init__(path)
        self._captions = captions
        self._datasets = _open_datasets(path)
        images = [name for name, dataset in self._datasets.items() if _has_images(dataset)]
        self._image = requests[0].find_column(images)
        if not self._image and len(images) == 1 and requests[0].name is None:
            self._image = images[0]
        if not self._image:
            shapes = [f"{name} {dataset.shape}" for name, dataset in self._datasets.items()]
            raise DataError(
                f"{path}: which dataset has the images, as arrays (N, H, W), (N, H, W, C) or (N, C, H, W) of "
                f"numbers? Set --image-column; the datasets are {', '.join(shapes[:30]) or 'none'}"
            )
        self._rows = len(self._datasets[self._image])
        for request in requests:
            name = request.find_column([*self._datasets])
            if name and (rows := len(self._datasets[name])) != self._rows:
                raise DataError(
                    f"{path}: {name!r} has {rows:,} rows, and {self._image!r} has {self._rows:,} images"
                )
        self.types = {
            name: _column_type(dataset)
            for name, dataset in self._datasets.items()
            if len(dataset) == self._rows
        }
        others = [] if captions is None else [name for name in captions.names if name not in self.types]
        self.names = [*self.types, *others]
        self.guesses = {"image": self._image}
        self._are_bytes = self._have_float_bytes()

    def records(self, required: Sequence[str], others: Sequence[str]) -> Iterator[Record]:
        names = [*required, *others]
        listed = [name for name in names if name not in self.types]
        rows: Iterator[Record] = iter(())
        if self._captions is not None:
            needed = [name for name in listed if name in required] or self._captions.names[:1]
            rows = self._captions.records(needed, listed)
        count = 0
        for i in range(self._rows):
            record = next(rows, None)
            count += record is not None
            cells: dict[str, object] = {} if record is None else {**record.cells}
            cause = "" if record is None else record.cause
            for name in names:
                try:
                    if name in self.types:
                        cells[name] = self._read_cell(i, name)
                except UnicodeDecodeError:
                    cause = cause or f"not UTF-8: column {name!r}"
            yield Record(cells=cells, cause=cause, progress=(i + 1) / self._rows)
        count += sum(1 for _ in rows)
        if self._captions is not None and count != self._rows:
            raise DataError(
                f"{self._captions.path} has {count:,} rows, and {self.path} has {self._rows:,} images in "
                f"{self._image!r}: expected one row for each image, in the same order"
            )

    def read_image(self, row: int, column: str) -> bytes:
        values = self._read_row(row, column)
        if values.ndim == 1:  # an encoded image
            return bytes(values)
        if self._are_bytes:
            with np.errstate(invalid="ignore"):  # NaN
                rounded = values.astype(np.uint8)
            if not np.array_equal(rounded, values):
                raise DataError(
                    "values that are not whole numbers from 0 to 255, as in other images of the file"
                )
            values = rounded
        return _encode_array(values)

    def _have_float_bytes(self) -> bool:
        """Whether images are floats that are all whole numbers from 0 to 255, as in CheXzero's files."""
        if self._datasets[self._image].dtype.kind != "f" or not self._rows:
            return False
        greatest = 0.0
        for row in np.linspace(0, self._rows - 1, _EXAMINED).astype(np.int64).tolist():
            values = self._read_row(row, self._image)
            if not np.all((values >= 0) & (values <= 255) & (values == np.rint(values))):
                return False
            greatest = max(greatest, float(values.max()))
        return greatest > 1  # otherwise a range of 0 to 1 is as likely

    def _read_cell(self, row: int, name: str) -> object:
        value = self._read_row(row, name)
        if name == self._image:
            return value.tobytes()  # tells equal images; ``read_image`` encodes them
        if isinstance(value, bytes):
            return value.decode()
        return value.tolist()

    def _read_row(self, row: int, name: str) -> Any:
        try:
            return self._datasets[name][row]
        except _ERRORS as error:
            message = " ".join(str(error).split())[:200]
            raise DataError(f"{self.path} is damaged in {name!r}: {message}") from error


def _open_datasets(path: Path) -> Mapping[str, Any]:
    """Return the datasets with rows by name, such as "train/images"."""
    try:
        import h5py
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise DataError("HDF5 files need h5py and pyarrow: pip install -e '.[formats,pack]'") from error
    links: dict[str, Any] = {}
    items: dict[str, Any] = {}
    try:
        file = h5py.File(path, "r", locking=False, rdcc_nbytes=_CACHE)
        file.visititems_links(links.__setitem__)
        file.visititems(items.__setitem__)  # follows no links
    except _ERRORS as error:
        message = " ".join(str(error).split())[:200]
        raise DataError(f"{path} cannot be read as HDF5: {message}") from error
    outside = [name for name, link in links.items() if isinstance(link, h5py.ExternalLink)]
    datasets = {}
    for name, item in items.items():
        if not isinstance(item, h5py.Dataset) or not item.shape:
            continue
        datasets[name] = item
        if item.is_virtual or item.external:
            outside.append(name)
        if max(math.prod(item.shape[1:]), math.prod(item.chunks or ())) * item.dtype.itemsize > _MAX_BYTES:
            raise DataError(f"{path}: {name!r} has rows or chunks of more than {_MAX_BYTES >> 20:,} MiB")
    if outside:
        raise DataError(
            f"{path}: {outside[0]!r} is in another file, which is not read: copy it into this file"
        )
    return datasets


def _has_images(dataset: Any) -> bool:
    import h5py

    if len(dataset.shape) == 1:
        return bool(h5py.check_vlen_dtype(dataset.dtype) == np.uint8)
    return len(dataset.shape) in (3, 4) and dataset.dtype.kind in "uif" and min(dataset.shape[1:]) > 0


def _column_type(dataset: Any) -> Any:
    """Return pyarrow's type of the cells, binary for those that are no field."""
    import h5py
    import pyarrow as pa

    if len(dataset.shape) == 1 and h5py.check_string_dtype(dataset.dtype) is not None:
        return pa.string()
    if dataset.dtype.kind in "uifb" and len(dataset.shape) < 3:
        return pa.float64() if len(dataset.shape) == 1 else pa.list_(pa.float64())
    return pa.binary()


def _encode_array(values: npt.NDArray[Any]) -> bytes:
    """Encode an array (H, W), (H, W, C) or (C, H, W) without loss, as PNG if that is possible."""
    pixels = values = values.astype(values.dtype.newbyteorder("="))
    if values.ndim == 3 and values.shape[2] not in _PNG_CHANNELS and values.shape[0] in _PNG_CHANNELS:
        pixels = np.moveaxis(values, 0, 2)
    if pixels.shape[2:] == (1,):
        pixels = pixels[..., 0]
    file = io.BytesIO()
    if (pixels.dtype == np.uint8 and pixels.shape[2:] in ((), (3,))) or (
        pixels.dtype == np.uint16 and pixels.ndim == 2
    ):
        Image.fromarray(np.ascontiguousarray(pixels)).save(file, "png")
    else:
        np.save(file, values, allow_pickle=False)
    return file.getvalue()

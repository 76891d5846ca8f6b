"""Parquet tables."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from clipkit.errors import DataError
from clipkit.samples.table.formats import ColumnRequest, Record

_BATCH, _BATCH_WITH_BYTES = 1024, 16  # rows that are read at a time, and rows with images


class Parquet:
    """A Parquet table; pyarrow is installed by the extra ``pack``."""

    guesses: Mapping[str, str] = {}
    any_column = False

    def __init__(self, path: Path, requests: Sequence[ColumnRequest]) -> None:
        self._path = path
        schema = self._open().schema_arrow
        self.names = list(schema.names)
        self.types: dict[str, Any] = {name: schema.field(self.names.index(name)).type for name in self.names}

    def _open(self) -> Any:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise DataError("Parquet tables need pyarrow: pip install 'pyarrow>=18'") from error
        try:
            return pyarrow.parquet.ParquetFile(self._path)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self._path} cannot be read as Parquet: {error}") from error

    def records(self, required: Sequence[str], others: Sequence[str]) -> Iterator[Record]:
        """Read all rows in order, see ``Format``."""
        import pyarrow

        file = self._open()
        total = max(1, file.metadata.num_rows)
        has_bytes = any("binary" in str(self.types[name]) for name in required)
        number = 0
        try:
            for batch in file.iter_batches(
                batch_size=_BATCH_WITH_BYTES if has_bytes else _BATCH, columns=[*required, *others]
            ):
                # by position, because batch.column(name) fails for duplicate names
                columns = {name: batch.column(i) for i, name in reversed([*enumerate(batch.schema.names)])}
                values = {name: columns[name].to_pylist() for name in required}
                for i in range(batch.num_rows):
                    number += 1
                    cells = {name: values[name][i] for name in required}
                    for name in others:
                        cells[name] = _python(columns[name][i])
                    yield Record(cells=cells, progress=number / total)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self._path} is damaged after row {number}: {error}") from error


def _python(scalar: Any) -> Any:
    """Convert a pyarrow value: times in microseconds (None if out of Python's range), maps as a dict.

    Maps with keys other than strings become lists of pairs.
    """
    from pyarrow import duration, time64, timestamp, types

    kind = scalar.type
    if not scalar.is_valid:
        return None
    if types.is_map(kind):
        pairs = [(_python(one["key"]), _python(one["value"])) for one in scalar.values]
        return dict(pairs) if str(kind.key_type) in ("string", "large_string", "string_view") else pairs
    if "map<" not in str(kind) and "[ns" not in str(kind):  # with pandas, nanoseconds would be its types
        with suppress(ValueError, OverflowError):  # years beyond 9999
            return scalar.as_py()
    if types.is_struct(kind):
        return {name: _python(value) for name, value in scalar.items()}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return list(map(_python, scalar.values))
    coarser = (
        timestamp("us", kind.tz) if types.is_timestamp(kind)
        else time64("us") if types.is_time(kind)
        else duration("us") if types.is_duration(kind)
        else kind
    )  # fmt: skip
    try:
        return scalar.cast(coarser, safe=False).as_py()
    except (ValueError, OverflowError):
        return None

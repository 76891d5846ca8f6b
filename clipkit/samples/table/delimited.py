"""CSV, TSV and other delimited text, with or without a header.

A quote that is never closed would make all following rows part of one cell. A quoted cell may contain line breaks,
but if its quote is not closed correctly, or the lines in it are rows of their own, then its first line is a bad row
and the other lines are read again as rows.
"""

import csv
import io
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from clipkit.errors import DataError
from clipkit.samples.formats import ARRAY_EXTENSIONS, IMAGE_SUFFIXES
from clipkit.samples.table.base import LONGEST, ColumnRequest, Format, Record, open_text

# delimiters by suffix; of those with equally many known columns the first is used
_DELIMITERS = {".csv": ",\t;|", ".tsv": "\t", ".tab": "\t", ".token": "\t", ".txt": "\t,;|"}
_DETECTED = 2**16  # characters from which delimiter and columns are detected
_DETECTED_ROWS = 100
# first columns of the output of ``clipkit classify``, and of that of earlier versions
_CLASSIFIED = (["image", "source", "label_1"], ["picture", "source", "label_1"])
_FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")
_EXCEL_DELIMITER = re.compile(r'"?sep=(.)"?[\r\n]+', re.IGNORECASE)  # a line before the header
_URL = re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)
_CAPTION_NUMBER = re.compile(r"#([0-9]+)$")  # Flickr8k's and Flickr30k's: 1000268201_693b08cb0e.jpg#0
_OPEN_QUOTE = 'a quote (") that is not closed: close it, or double it if it is part of the text'


def safe_cell(text: str) -> str:
    """Prefix text that a spreadsheet would evaluate as a formula with an apostrophe, as OWASP recommends.

    Text that already has such a prefix gets another apostrophe, so that removing one restores the original.
    """
    return f"'{text}" if _FORMULA.match(text) else text


class Delimited(Format):
    """A delimited table.

    The delimiter is the one that yields the most known columns. If a cell of the first line is the path of an
    image, or a URL before or after a tab, there is no header: the columns are named ``column 1``, ``column 2``
    and so on.
    The delimiter is then the one with the most rows that have an image or URL in its column.
    """

    def __init__(self, path: Path, requests: Sequence[ColumnRequest]) -> None:
        super().__init__(path)
        self.names = []
        self._delimiter = ","
        self._skip = 0  # characters before the header
        suffix = Path(path.name.lower().removesuffix(".gz")).suffix
        delimiters = _DELIMITERS[suffix]
        with open_text(path) as (text, _):
            start = text.read(_DETECTED)
        match = _EXCEL_DELIMITER.match(start)
        if match:
            delimiters = match[1]
            self._skip = match.end()
        most = (-1, -1, -1)
        first_rows: list[list[str]] = []
        for delimiter in delimiters:
            rows = _first_rows(start[self._skip :], delimiter)
            names = [name.strip() for name in rows[0]] if rows else []
            columns = [request.find_column(names) for request in requests]
            guess: dict[str, str] = {}
            fits = 0
            is_header = any(request.name in names for request in requests)
            # without tabs, a .txt file may be a list of texts
            if not is_header and (suffix != ".txt" or delimiter == "\t"):
                guess, fits = _guess_columns(rows, requests[0].content, delimiter, delimiters)
            if guess:
                names = [f"column {i}" for i in range(1, len(names) + 1)]
                columns = list(guess.values())
            score = sum(map(bool, columns)), fits, len(names)
            if score > most:
                most = score
                first_rows = rows
                self.names = names
                self._delimiter = delimiter
                self.guesses = guess
        is_list = suffix != ".txt" and len(self.names) == 1 and bool(self.guesses)
        if is_list and _URL.fullmatch(first_rows[0][0].strip()):
            lines = "".join(cell for fields in first_rows for cell in fields)
            unclear = next((other for other in delimiters if other in lines), "")
            if unclear:
                raise DataError(
                    f"{path}: {unclear!r} may separate columns or be a part of the URLs: add a header line such "
                    f"as {requests[0].content}{unclear}caption, or rename a list of URLs to .txt"
                )
        self._has_header = not self.guesses
        # columns up to the last one with a name
        self._width = max((i for i, name in enumerate(self.names, 1) if name), default=0)
        # whether paths have the numbers of their captions
        self._numbered = not self._has_header and any(map(_is_numbered, first_rows[0]))
        is_quoted = start[self._skip :].lstrip().startswith('"')
        self._quotes_are_text = self._numbered and self._delimiter == "\t" and not is_quoted

    def records(self, required: Sequence[str], others: Sequence[str]) -> Iterator[Record]:
        indices = {name: i for i, name in reversed([*enumerate(self.names)])}  # the first of equal names
        fewest = 1 + max(indices[name] for name in required)
        escaped = self.names[:3] in _CLASSIFIED
        image_column = next((name for what, name in self.guesses.items() if what != "caption"), "")
        with open_text(self.path) as (text, progress):
            text.read(self._skip)
            rows = self._rows(text)
            if self._has_header:
                next(rows, None)
            cells: dict[str, object]
            for fields, cause in rows:
                cause = cause or self._check_cells(fields, fewest)
                if cause:
                    cells = {}
                    for name in required:  # reports name the image
                        if indices[name] < len(fields) and _kind_of(fields[indices[name]]) == "image":
                            cells[name] = fields[indices[name]]
                    yield Record(cells=cells, cause=cause, progress=progress())
                    continue
                if escaped:  # undo safe_cell
                    fields = [
                        cell[1:] if cell[:1] == "'" and _FORMULA.match(cell) else cell for cell in fields
                    ]
                cells = {name: fields[indices[name]] for name in required}
                caption_number = None
                if self._numbered and (match := _CAPTION_NUMBER.search(fields[indices[image_column]])):
                    cells[image_column] = match.string[: match.start()]
                    caption_number = int(match[1])
                for name in others:
                    if indices[name] < len(fields):
                        cells[name] = fields[indices[name]] or None
                yield Record(cells=cells, progress=progress(), caption_number=caption_number)

    def _rows(self, text: TextIO) -> Iterator[tuple[list[str], str]]:
        """Yield the cells of each row that is not blank, the header included, and why it cannot be read."""
        unread = deque[str]()  # lines after a quote that is not closed
        while line := unread.popleft() if unread else _read_line(text):
            if len(line) > LONGEST:
                yield [], f"a line longer than {LONGEST:,} characters"
                continue
            if self._quotes_are_text or '"' not in line:
                cells = line.rstrip("\r\n")
                if cells:
                    yield cells.split(self._delimiter), ""
                continue
            unread.appendleft(line)
            lines: list[str] = []
            reader = csv.reader(_take_lines(text, unread, lines), delimiter=self._delimiter, strict=True)
            is_open = False
            try:
                fields = next(reader)
                is_open = len(lines) > 1 and self._are_rows(lines, fields)
            except csv.Error as error:
                fields = []
                is_open = len(lines) > 1 or "end of data" in str(error)
            cause = ""
            if is_open or not fields:
                unread.extendleft(reversed(lines[1:]))
                fields, cause = self._parse_line(line, is_open)
            yield fields, cause

    def _parse_line(self, line: str, is_open: bool) -> tuple[list[str], str]:
        if '\\"' in line:  # quotes with backslashes, as Spark and MySQL write them
            reader = csv.reader(
                [line], delimiter=self._delimiter, escapechar="\\", doublequote=False, strict=True
            )
            try:
                return next(reader), ""
            except csv.Error:
                is_open = True
        if is_open:
            return line.rstrip("\r\n").split(self._delimiter), _OPEN_QUOTE
        try:  # text after a closing quote is part of the cell, as in spreadsheets
            return next(csv.reader([line], delimiter=self._delimiter)), ""
        except csv.Error:
            return [], "a field longer than 131,072 characters (a missing closing quote?)"

    def _check_cells(self, fields: Sequence[str], fewest: int) -> str:
        if len(fields) < fewest:
            return "too few columns"
        if not self._has_extra_cells(fields):
            return ""
        delimiter = "a tab"
        if self._delimiter != "\t":
            delimiter = repr(self._delimiter)
        return f"more cells than columns: put cells that contain {delimiter} in quotes"

    def _has_extra_cells(self, fields: Sequence[str]) -> bool:
        return any(cell.strip() for cell in fields[self._width :])

    def _are_rows(self, lines: Sequence[str], fields: Sequence[str]) -> bool:
        """Check whether lines that a quote joins are rows of their own.

        Joined, they have too many cells, or two lines have a cell of the same kind, such as the path of an image,
        in the same column. Numbers count only before the quote, because a caption may contain them, and only if
        the row has no image or URL. With tabs, which captions do not contain, a cell with a tab and a line break is
        enough.
        """
        if self._has_extra_cells(fields):
            return True
        if self._delimiter == "\t" and any("\n" in cell and "\t" in cell for cell in fields):
            return True
        has_location = any(_kind_of(cell) in ("image", "url") for cell in fields)
        kinds = Counter[tuple[int, str]]()
        for line_index, line in enumerate(lines):
            cells = line.rstrip("\r\n").split(self._delimiter)
            if line_index == 0 or len(cells) >= self._width:
                kinds.update((i, _kind_of(cell)) for i, cell in enumerate(cells))
        before_quote = lines[0].partition('"')[0].split(self._delimiter)[:-1]
        for (i, kind), count in kinds.items():
            is_number = kind == "number" and i < len(before_quote) and before_quote[i].isdecimal()
            if count > 1 and (kind in ("image", "url") or (is_number and not has_location)):
                return True
        return False


def _take_lines(text: TextIO, unread: deque[str], lines: list[str]) -> Iterator[str]:
    size = 0
    while size <= LONGEST:
        line = unread.popleft() if unread else _read_line(text)
        if not line:
            return
        size += len(line)
        lines.append(line)
        yield line


def _read_line(text: TextIO) -> str:
    line = rest = text.readline(LONGEST + 1)
    while len(line) > LONGEST and rest and not rest.endswith(("\n", "\r")):
        rest = text.readline(LONGEST)
    return line


def _first_rows(start: str, delimiter: str) -> list[list[str]]:
    rows: list[list[str]] = []
    with suppress(csv.Error):
        for fields in csv.reader(io.StringIO(start, newline=""), delimiter=delimiter):
            if fields:
                rows.append(fields)
            if len(rows) == _DETECTED_ROWS:
                break
    return rows


def _kind_of(cell: str) -> str:
    if cell.isdecimal():
        return "number"
    cell = cell.strip().strip('"')
    if _URL.fullmatch(cell):
        return "url"
    return "image" if _image_like(cell) else ""


def _image_like(cell: str) -> bool:
    suffix = Path(_CAPTION_NUMBER.sub("", cell.strip().lower())).suffix
    return suffix in IMAGE_SUFFIXES or suffix[1:] in ARRAY_EXTENSIONS


def _is_numbered(cell: str) -> bool:
    return _CAPTION_NUMBER.search(cell) is not None and _image_like(cell)


def _guess_columns(
    rows: Sequence[Sequence[str]], content: str, delimiter: str, delimiters: str
) -> tuple[dict[str, str], int]:
    """Guess the columns of a table without a header by their content; {} if its first line may be a header.

    The column of images or URLs is the one with the most of them in the first rows; of two columns, the other one
    has the captions. URLs may contain all delimiters but tabs, so others separate only URLs that end like images.

    Returns:
        The columns, and the number of rows with an image or URL in its column.
    """

    def is_location(cell: str) -> bool:
        cell = cell.strip(" ")  # not line ends, which another delimiter may have put into the cell
        if _URL.fullmatch(cell):
            return delimiter == "\t" or _image_like(cell)
        return content == "image" and "\n" not in cell and _image_like(cell)

    if not rows or not any(map(is_location, rows[0])):
        return {}, 0
    width = len(rows[0])
    # later lines of a list may contain the delimiter
    if width == 1 and delimiter != "\t" and "\t" in delimiters:
        return {}, 0
    counts = Counter(i for fields in rows for i, cell in enumerate(fields) if is_location(cell))
    image = max(range(width), key=lambda i: counts[i])
    columns = {content: f"column {image + 1}"}
    if width == 2:
        columns["caption"] = f"column {2 - image}"
    cells = [fields[image] for fields in rows if len(fields) >= width]
    fits = [cell for cell in cells if is_location(cell) and not set(cell).intersection(delimiters)]
    return columns, len(fits)

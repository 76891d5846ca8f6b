"""Tables of pictures and captions: what they are called, and how a dataset is made of one."""

import shlex
from pathlib import Path

__all__ = ["how_to_pack", "is_table", "tables_in"]

_TABLES = (
    ".csv",
    ".tsv",
    ".tab",
    ".jsonl",
    ".ndjson",
    ".parquet",
    ".pq",
)  # what ``python -m data pack`` reads


def is_table(path: Path) -> bool:
    """Whether a file is called like a table; its content is not looked at."""
    return path.suffix.lower() in _TABLES and path.is_file()


def tables_in(folder: Path) -> list[Path]:
    """The tables directly in a folder, in the order of their names."""
    return sorted(filter(is_table, folder.iterdir())) if folder.is_dir() else []


def how_to_pack(table: Path | None) -> str:
    """What makes a dataset of a table; of the user's, where it is not known which."""
    named = "TABLE" if table is None else shlex.quote(str(table))
    return f"python -m data pack {named} OUT --test 1.0, then --data OUT"

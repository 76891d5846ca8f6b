"""Paths, atomic writes, locks, page templates, terminals, the hub, and open_clip's package.

The command line imports this package: modules import numpy, jinja2 and HTTP clients where they are used.
"""

from clipkit.files.hub import convert_hub_errors
from clipkit.files.open_clip import load_prompts
from clipkit.files.pages import check_page, templates, write_page
from clipkit.files.processes import end_with_parent, ray_cluster
from clipkit.files.splitmix import MASK, STEP, mix, mix_array
from clipkit.files.terminal import CountProgress, counted, format_bytes, printable, redact_secrets, redact_url
from clipkit.files.writing import (
    FileLock,
    lock_output,
    name_order,
    replacing,
    resolve_output,
    sync_to_disk,
    user_path,
    write_atomic,
)  # fmt: skip

__all__ = [
    "MASK", "STEP", "CountProgress", "FileLock", "check_page", "convert_hub_errors", "counted",
    "end_with_parent", "format_bytes", "load_prompts", "lock_output", "mix", "mix_array", "name_order",
    "printable", "ray_cluster", "redact_secrets", "redact_url", "replacing", "resolve_output", "sync_to_disk",
    "templates", "user_path", "write_atomic", "write_page",
]  # fmt: skip

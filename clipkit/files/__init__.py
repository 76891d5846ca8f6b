"""Atomic writes, locks, patterns of paths, page templates, terminals, the hub, and open_clip's package.

The command line imports this package: modules import numpy, jinja2 and HTTP clients where they are used.
"""

from clipkit.files.atomic import FileLock, lock_output, replacing, sync, write_atomic
from clipkit.files.cluster import ray_cluster
from clipkit.files.hub import from_hub
from clipkit.files.open_clip import prompt_list
from clipkit.files.pages import check_page, templates, write_page
from clipkit.files.patterns import name_order, output_folder, user_path
from clipkit.files.processes import end_with_parent
from clipkit.files.splitmix import MASK, STEP, mix, mix_array
from clipkit.files.terminal import CountProgress, counted, printable, shown, size_of, without_secrets

__all__ = [
    "MASK", "STEP", "CountProgress", "FileLock", "check_page", "counted", "end_with_parent", "from_hub",
    "lock_output", "mix", "mix_array", "name_order", "output_folder", "printable", "prompt_list",
    "ray_cluster", "replacing", "shown", "size_of", "sync", "templates", "user_path", "without_secrets",
    "write_atomic", "write_page",
]  # fmt: skip

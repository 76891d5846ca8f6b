"""Read weights of all supported formats without executing code from files."""

from clipkit.formats.checkpoint import (
    best_checkpoint,
    check_free,
    is_complete,
    latest_checkpoint,
    model_hash,
    parse_step,
    resolve_checkpoint,
    save_model,
    select_best,
    serialize_architecture,
)
from clipkit.formats.open_clip import find_newest_epoch

__all__ = [
    "best_checkpoint", "check_free", "find_newest_epoch", "is_complete", "latest_checkpoint", "model_hash",
    "parse_step", "resolve_checkpoint", "save_model", "select_best", "serialize_architecture",
]  # fmt: skip

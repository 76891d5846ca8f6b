"""Read weights of all supported formats without executing code from files."""

from clipkit.formats.checkpoint import (
    check_free,
    is_complete,
    latest_checkpoint,
    model_hash,
    resolve_checkpoint,
    save_model,
    serialize_architecture,
    step_of,
)
from clipkit.formats.open_clip import newest_epoch

__all__ = [
    "check_free", "is_complete", "latest_checkpoint", "model_hash", "newest_epoch", "resolve_checkpoint",
    "save_model", "serialize_architecture", "step_of",
]  # fmt: skip

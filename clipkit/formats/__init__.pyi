from .checkpoint import (
    check_free as check_free,
    is_complete as is_complete,
    latest_checkpoint as latest_checkpoint,
    model_hash as model_hash,
    resolve_checkpoint as resolve_checkpoint,
    save_model as save_model,
    serialize_architecture as serialize_architecture,
    step_of as step_of,
)
from .open_clip import (
    newest_epoch as newest_epoch,
)

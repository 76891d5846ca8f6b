from .inputs import (
    readable as readable,
)

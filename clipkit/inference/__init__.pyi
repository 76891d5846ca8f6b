from .calibrate import (
    wilson_interval as wilson_interval,
)
from .explain import (
    enlarged as enlarged,
    heat_colors as heat_colors,
    overlay as overlay,
)
from .inputs import (
    Item as Item,
    Sample as Sample,
)
from .pairs import (
    PairEncoder as PairEncoder,
    PairFeatures as PairFeatures,
    closest as closest,
)
from .storage import (
    content_digest as content_digest,
    storage_of as storage_of,
    unpacked as unpacked,
)

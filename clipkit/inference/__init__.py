"""The commands of ``clipkit`` that run a model: encode, classify, caption, explain, search and serve."""

from clipkit.inference.calibrate import wilson_interval
from clipkit.inference.explain import enlarged, heat_colors, overlay
from clipkit.inference.inputs import Item, Sample
from clipkit.inference.storage import content_digest, storage_of, unpacked
from clipkit.inference.stream import PairEncoder, PairFeatures, closest

__all__ = [
    "Item", "PairEncoder", "PairFeatures", "Sample", "closest", "content_digest", "enlarged", "heat_colors",
    "overlay", "storage_of", "unpacked", "wilson_interval",
]  # fmt: skip

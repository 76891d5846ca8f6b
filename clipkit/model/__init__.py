"""The CLIP model: towers, architectures, tokenizer, preprocessing, and the zero-shot classifier.

``IMAGE_TOWERS`` and ``TEXT_TOWERS`` register the kinds of towers by the name that is stored with weights. An entry
is the class of the tower's architecture, which provides all that other code needs to know (``ImageArchitecture``,
``TextArchitecture``). Importing this package does not import torch.
"""

import lazy_loader

from clipkit.model.architectures import (
    BagOfWords,
    ClassTable,
    ImageArchitecture,
    PixelTower,
    TextArchitecture,
    TextTower,
    VisionTower,
    WordTable,
)
from clipkit.model.library_towers import OpenClipText, OpenClipVision, TimmVision, TransformersText

__getattr__, __dir__, _NAMES = lazy_loader.attach_stub(__name__, __file__)
__all__ = [*_NAMES, "IMAGE_TOWERS", "TEXT_TOWERS"]

IMAGE_TOWERS: dict[str, type[ImageArchitecture]] = {
    "vit": VisionTower,
    "open_clip_vision": OpenClipVision,
    "timm": TimmVision,
    "pixels": PixelTower,
}
TEXT_TOWERS: dict[str, type[TextArchitecture]] = {
    "transformer": TextTower,
    "bag_of_words": BagOfWords,
    "word_table": WordTable,
    "class_table": ClassTable,
    "open_clip_text": OpenClipText,
    "transformers": TransformersText,
}

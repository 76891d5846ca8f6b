"""The CLIP model: towers, architectures, tokenizer, preprocessing, and the zero-shot classifier.

Importing this package does not import torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Samples: every source as one list of samples, and every image as one kind of pixels."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Encode and classify images and texts: the implementation of ``clipkit encode`` and ``clipkit classify``."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

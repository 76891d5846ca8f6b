"""Files: tars, tables, images, patterns, atomic writes and locks, pages, text for terminals, downloads."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

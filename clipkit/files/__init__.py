"""Files: tars, tables, images, patterns, atomic writes and locks, pages, text for terminals, downloads."""

__all__: list[str] = []

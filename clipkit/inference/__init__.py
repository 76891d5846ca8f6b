"""Encode and classify images and texts: the implementation of ``clipkit encode`` and ``clipkit classify``."""

__all__: list[str] = []

"""Encoding and classifying images and texts: what the commands encode and classify do."""

__all__: list[str] = []

"""Reading files: tars, tables, images, the Hugging Face hub, and what of a URL may be shown."""

__all__: list[str] = []

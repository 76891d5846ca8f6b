"""The CLIP model: towers, architectures, tokenizer, preprocessing, and the zero-shot classifier."""

__all__: list[str] = []

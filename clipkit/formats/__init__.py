"""Read weights of all supported formats without executing code from files."""

__all__: list[str] = []

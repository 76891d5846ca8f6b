"""Reading weights of any format, without executing anything from a file."""

__all__: list[str] = []

"""``python -m clipkit``, for where the command ``clipkit`` is not on the path."""

from clipkit.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()

"""Text for messages and tables: printable on one line, numbers with nouns."""

__all__ = ["counted", "printable"]


def printable(text: str, most: int | None = None) -> str:
    """Return text on one line that cannot command a terminal: other characters as Python escapes them.

    Args:
        text: any, such as a key or caption from data.
        most: how many characters to keep; "…" replaces the rest.
    """
    shown = text if most is None or len(text) <= most else text[:most] + "…"
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape", "backslashreplace").decode()
        for one in shown
    )


def counted(number: int, noun: str) -> str:
    """Return a number with a noun whose plural ends in s: ``1 image``, ``2,000 images``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")

"""How numbers, names and places are written in a report; text from data cannot do more than be read."""

from data.inspect.shard_findings import Names, Place

__all__ = ["about", "many", "name_of", "of_all", "percent", "place_of", "plain", "repeated_of", "size_of"]

_LONG = 160  # characters of a caption or key


def plain(text: str, most: int = _LONG) -> str:
    """Text from data on one line, nothing in it that moves a cursor or turns the direction of writing."""
    shown = text[:most] + "…" * (len(text) > most)
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape", "backslashreplace").decode()
        for one in shown
    )


def size_of(count: float) -> str:
    """Bytes in the unit that fits."""
    for unit, worth in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= worth:
            return f"{count / worth:.3g} {unit}"
    return f"{count:.0f} bytes"


def many(count: int, one: str) -> str:
    """A number and what it counts, in the plural that ends in s."""
    return f"{count:,} {one}" + ("" if count == 1 else "s")


def percent(part: float, whole: float) -> str:
    share = 100 * part / max(1, whole)
    return f"{share:.2g}%" if 0 < share < 1 else f"{share:.1f}%" if 0 < share < 100 else f"{share:.0f}%"


def of_all(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({percent(part, whole)})"


def name_of(url: str) -> str:
    return plain(url.rpartition("/")[2] or url, 60)


def place_of(place: Place | None) -> str:
    return f"{name_of(place.shard)}: {plain(place.key, 60)}" if place else ""


def repeated_of(names: Names) -> str:
    """How many files there are beyond the first of their kind in a sample, with examples."""
    counts = ", ".join(
        f"{count:,} more {plain(kind, 30)}" for kind, count in list(names.repeated.items())[:5]
    )
    places = "; ".join(map(place_of, names.repeated_at))
    return f"{counts} (such as {places})" if places else counts


def about(count: float) -> str:
    """A count that was estimated, with the digits that it deserves."""
    return f"about {float(f'{count:.3g}'):,.0f}"

"""What is said where no pair of picture and caption turns up: which extensions were seen, what is expected."""

from collections import Counter
from collections.abc import Sequence

from data.index import IMAGE_EXTENSIONS
from data.inspect.look import Look
from data.selection import Selection

__all__ = ["no_pair", "seen"]

_TEXTS = ("txt", "json")
_OTHER_TEXTS = ("caption", "text", "cap", "captions", "tags", "description")  # what others name captions


def no_pair(looks: Sequence[Look], selection: Selection) -> str:
    """Why a training on these shards could not begin, and what would be needed."""
    sound = [look for look in looks if not look.cause]
    extensions: Counter[str] = Counter()
    hidden = 0
    for look in looks:
        extensions.update(look.names.extensions)
        hidden += look.names.hidden
    if not sound and (looks[0].truncated or not extensions):
        more = f" (and {len(looks) - 1} more cannot be read)" if len(looks) > 1 else ""
        hint = "; data.truncated=use trains on the intact part" if looks[0].truncated else ""
        return f"{looks[0].cause}{more}{hint}"
    first = looks[0].file.shown
    where = f"shard {first} holds" if len(looks) == 1 else f"the first {len(looks)} shards looked into hold"
    nameless = f"; {hidden} files have no extension" if hidden else ""
    return (
        f"{where} no pair of picture and caption; extensions seen: {seen(extensions)}{nameless}; expected are "
        f"KEY.{'/'.join(IMAGE_EXTENSIONS[:4])}/… with {_expected(selection)}{_hint(extensions)}"
    )


def seen(extensions: Counter[str]) -> str:
    """Extensions and how many files have each, on one line."""
    named = [f"{name[:40]!r} ({count:,})" for name, count in extensions.most_common(8)]
    rest = len(extensions) - len(named)
    return ", ".join(named + [f"{rest} more"] * (rest > 0)) or "none"


def _expected(selection: Selection) -> str:
    fields = selection.captions.fields
    if "txt" in fields:
        return 'KEY.txt, or KEY.json with a field "caption"'
    return f"KEY.json with {', '.join(fields)}"


def _hint(extensions: Counter[str]) -> str:
    """What the names that were seen suggest to do."""
    known = (*IMAGE_EXTENSIONS, *_TEXTS)
    for one in extensions:
        if "." in one and one.rpartition(".")[2] in known:
            return (
                f": of a name, all behind its first dot is the extension, so {one[:40]!r} is none of these: "
                "leave no other dots in names"
            )
    if other := next((one for one in _OTHER_TEXTS if one in extensions), ""):
        return f": name the .{other} files .txt"
    if not extensions.keys().isdisjoint(IMAGE_EXTENSIONS) and not extensions.keys().isdisjoint(_TEXTS):
        return ": a picture and its caption need the same name up to the dot, and to follow one another"
    return ""

"""Turns the names of icons ("network-wireless-signal-excellent") into words and captions.

Icon themes share the names of the freedesktop icon naming specification, with habits of their own on top:
prefixes of old toolkits ("gtk-", "stock_", "gnome-mime-"), MIME types ("application-x-tar"), abbreviations
("-rtl"), sizes, and the mark "-symbolic" for one-coloured drawings.
"""

import hashlib
import re

__all__ = ["CONTEXTS", "TEMPLATES", "caption", "is_symbolic", "pick", "words"]

TEMPLATES = (
    "{c}",
    "{c} icon",
    "an icon of {c}",
    "a symbol for {c}",
    "a picture of {c}",
    "a small drawing of {c}",
)

# what index.theme calls a folder of icons -> the word for one of them
CONTEXTS = {
    "actions": "action",
    "animations": "animation",
    "applications": "application",
    "apps": "application",
    "categories": "category",
    "devices": "device",
    "emblems": "emblem",
    "emotes": "face",
    "filesystems": "place",
    "international": "flag",
    "mimetypes": "file type",
    "places": "place",
    "status": "status",
    "stock": "action",
}

_PLAIN = (
    *TEMPLATES,
    "{c}",
    "{c} symbol",
    "a computer icon of {c}",
    "an icon that stands for {c}",
    "a sign that means {c}",
)
_WITH_CONTEXT = (
    "{c}, {context}",
    "an icon of {c}, {context}",
    "{context} icon: {c}",
    "{c} {context} icon",
    "a picture of the {context} {c}",
)
_WITH_COMMA = ("{head}, {rest}", "an icon of {head}, {rest}", "a symbol for {head}, {rest}")
_SYMBOLIC = ("a black symbol for {c}", "{c} in black", "a plain black icon of {c}", "{c}, one colour")

_PREFIXES = re.compile(r"^(gnome-stock-|gnome-dev-|gnome-fs-|gnome-mime-|gtk-|stock[-_])", re.IGNORECASE)
_MIME = re.compile(
    r"^(application|audio|font|image|inode|message|model|multipart|package|text|video)(?:[-_/.](.*))?$"
)
_KINDS = {
    "application": "file",
    "audio": "audio file",
    "font": "font file",
    "image": "image file",
    "inode": "",
    "message": "message",
    "model": "model file",
    "multipart": "message",
    "package": "package",
    "text": "text file",
    "video": "video file",
}
_SPLIT = re.compile(r"[-_.,:;@()\s]+|(?<!\+)\+(?=\w)|(?<=\+\+)(?=\w)")  # "svg+xml", "c++src"
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_SPOKEN = {"rtl": "right to left", "ltr": "left to right", "symbolic": ""}
_NOT_SPOKEN_IN_MIME = {"x", "vnd"}
_LONGEST_WORD = 19  # longer ones are identifiers of web applications, not words
_MOST_WORDS = 8


def is_symbolic(name: str) -> bool:
    """Whether a name is that of a one-coloured drawing."""
    return "symbolic" in re.split(r"[-.]", name)


def words(name: str, context: str) -> str | None:
    """The readable form of an icon's name, in lower case; None for a name that says nothing.

    Args:
        name: the file's name without its suffix, as in "folder-open" or "application-x-tar".
        context: the word for the icon's context, one of the values of ``CONTEXTS`` or "".
    """
    mime = context == "file type" or name.startswith("gnome-mime-")
    name = _PREFIXES.sub("", name)
    kind = ""
    if mime and (match := _MIME.match(name.lower())):
        kind, name = _KINDS[match[1]], match[2] or ""
    tokens: list[str] = []
    for token in _CAMEL.sub(" ", " ".join(_SPLIT.split(name))).lower().split():
        if re.fullmatch(r"\d+x\d+", token) or (mime and token in _NOT_SPOKEN_IN_MIME):
            continue
        if len(token) > _LONGEST_WORD:
            return None
        tokens += _spoken(token).split()
    tokens += kind.split()
    if not 0 < len(tokens) <= _MOST_WORDS or not any(re.search(r"[a-z]", token) for token in tokens):
        return None
    return " ".join(tokens)


def _spoken(token: str) -> str:
    if token.isdecimal():
        return str(int(token))  # "040" and "40" are one word
    return _SPOKEN.get(token, token)


def pick(key: str, count: int) -> int:
    """A number in [0, count) that follows from ``key`` alone, on every machine."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % count


def caption(text: str, *, context: str, symbolic: bool, key: str) -> str:
    """A caption for a picture of ``text``, in one of several phrasings, chosen by ``key``."""
    phrasings = [*_PLAIN]
    if context and not {context, "file"} & set(text.split()):  # no "emblem new, emblem"
        phrasings += _WITH_CONTEXT
    head, _, rest = text.partition(" ")
    if rest and context in ("place", "device", "status"):
        phrasings += _WITH_COMMA
    if symbolic:
        phrasings += _SYMBOLIC * 2  # twice: it is what one sees first
    return phrasings[pick(key, len(phrasings))].format(c=text, context=context, head=head, rest=rest)

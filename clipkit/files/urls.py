"""URLs as people may see them: without what opens them."""

import re

__all__ = ["shown", "without_secrets"]

_AUTHORITY = re.compile(r"[\w.\-]*(:[0-9]*)?|\[[0-9a-fA-F:.]*\](:[0-9]*)?")
_TAR_NAME = re.compile(r"[\w.\-]{1,100}\.tar(?!\w)")
_WORD = re.compile(r"[\w./\-]{1,100}")
_QUOTED = re.compile(r'"((?:[^"\\\n]|\\.)*)"')  # a string of TOML or JSON


def shown(url: str) -> str:
    """A URL as messages may show it: without user, password, query and fragment, which hold secrets.

    Little more than the name of the tar is left of a ``pipe:`` command, and where it is not plain what is what, as
    in a password with a slash.
    """
    tar = [" " + name for name in _TAR_NAME.findall(url)[-1:]]
    if url.startswith("pipe:"):
        words = [word for word in url[5:].split() if "=" not in word]
        program = words[0].rpartition("/")[2] if words and _WORD.fullmatch(words[0]) else ""
        return "".join([f"pipe:{program} …", *tar])
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    authority, slash, path = rest.partition("/")
    host = authority.rpartition("@")[2]
    strange = "@" in path and scheme != "hf"  # which has revisions behind it
    if strange or not _AUTHORITY.fullmatch(host) or "?" in authority or "#" in authority:
        return "".join([f"{scheme}://…", *tar])
    path = path.partition("?")[0].partition("#")[0]
    text = " ".join(f"{scheme}://{host}{slash}{path}".split())
    return text if len(text) <= 300 else text[:300] + "…"


def without_secrets(text: str) -> str:
    """A configuration (TOML or JSON) in which every string that is a URL or a command is as ``shown`` has it."""
    return _QUOTED.sub(lambda match: f'"{_shown_as_written(match[1])}"', text)


def _shown_as_written(text: str) -> str:
    return shown(text) if "://" in text or text.startswith("pipe:") else text

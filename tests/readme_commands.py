"""Read the shell commands that the README files document, so that tests and CI run what they show.

README.md marks commands that have a name with ``<!-- command: NAME -->`` before the code block.
``python tests/readme_commands.py NAME`` prints one.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def readme_command(name: str) -> str:
    """Return the command with this name; KeyError if README.md has none."""
    pattern = rf"<!-- command: {re.escape(name)} -->\s*```(?:bash|sh)\n(.*?)```"
    found = re.search(pattern, README.read_text(encoding="utf-8"), flags=re.DOTALL)
    if found is None:
        raise KeyError(name)
    return found[1].strip()


def code_blocks(text: str, language: str) -> Iterator[str]:
    """Yield the fenced code blocks of a language."""
    for block in re.finditer(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        yield block[1]


if __name__ == "__main__":
    print(readme_command(sys.argv[1]))

"""The commands that README.md states, by name, so that tests and CI run what a newcomer is told to run.

A command is the code block that follows ``<!-- command: NAME -->``. ``python tests/readme_commands.py NAME``
prints one.
"""

import re
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def readme_command(name: str) -> str:
    """The command of that name; KeyError if README has none."""
    pattern = rf"<!-- command: {re.escape(name)} -->\s*```(?:bash|sh)\n(.*?)```"
    found = re.search(pattern, README.read_text(encoding="utf-8"), flags=re.DOTALL)
    if found is None:
        raise KeyError(name)
    return found[1].strip()


if __name__ == "__main__":
    print(readme_command(sys.argv[1]))

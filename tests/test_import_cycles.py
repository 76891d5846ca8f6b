"""No module of the product imports itself through others: not lazily, and not for types."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# groups of modules that import each other; remove the ones that are gone, and add none
KNOWN_CYCLES: set[frozenset[str]] = set()

Imports = dict[str, set[str]]


def read_imports(root: Path) -> Imports:
    """Return the modules that each module imports anywhere: also in functions, and in stubs of packages."""
    files: dict[str, list[Path]] = {}
    for package in ("clipkit", "data", "eval"):
        for path in sorted((root / package).rglob("*.py*")):
            if path.suffix in (".py", ".pyi"):
                name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
                files.setdefault(name, []).append(path)
    imports: Imports = {}
    for name, paths in files.items():
        imports[name] = set()
        for path in paths:
            targets = set(find_targets(ast.parse(path.read_text(encoding="utf-8")), name))
            # ``from package import module`` imports the module; other names come from the package
            modules = {target if target in files else target.rpartition(".")[0] for target in targets}
            imports[name] |= (modules & files.keys()) - {name}
    return imports


def find_targets(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # stubs of packages import from their own modules
            module = f"{package}.{node.module}" if node.level else node.module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def find_cycles(imports: Imports) -> set[frozenset[str]]:
    """Return the groups of modules that reach each other: the strongly connected components."""
    reachable: Imports = {}
    for start in imports:
        reachable[start] = set()
        pending = [start]
        while pending:
            for target in imports[pending.pop()] - reachable[start]:
                reachable[start].add(target)
                pending.append(target)
    cycles = set()
    for start, targets in reachable.items():
        group = {target for target in targets if start in reachable[target]}
        if group:
            cycles.add(frozenset(group))
    return cycles


def describe(imports: Imports, cycle: frozenset[str]) -> str:
    return "\n".join(f"{name} imports {', '.join(sorted(imports[name] & cycle))}" for name in sorted(cycle))


def test_modules_do_not_import_each_other() -> None:
    imports = read_imports(ROOT)
    cycles = find_cycles(imports)
    added = "\n\n".join(describe(imports, cycle) for cycle in cycles - KNOWN_CYCLES)
    assert not added, f"modules import each other:\n\n{added}"
    assert cycles == KNOWN_CYCLES, "these cycles are gone: remove them from KNOWN_CYCLES"


def test_cycles_of_every_kind_of_import_are_found(tmp_path: Path) -> None:
    files = {
        "clipkit/__init__.py": "",
        "clipkit/lazy.py": "def use():\n    from clipkit.typed import name\n",
        "clipkit/typed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from clipkit import lazy\n",
        "data/__init__.py": "import data.user\n",
        "data/user.py": "import os\nfrom data import anything\n",
        "eval/__init__.pyi": "from .part import name as name\n",
        "eval/part.py": "from eval import other\n",
        "eval/alone.py": "from clipkit import lazy\n",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    imports = read_imports(tmp_path)
    assert find_cycles(imports) == {
        frozenset({"clipkit.lazy", "clipkit.typed"}),
        frozenset({"data", "data.user"}),
        frozenset({"eval", "eval.part"}),
    }
    assert describe(imports, frozenset({"data", "data.user"})) == (
        "data imports data.user\ndata.user imports data"
    )

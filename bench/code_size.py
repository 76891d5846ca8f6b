"""Count the product's lines and files, and how dense its code is.

    python -m bench.code_size [FOLDER ...]

Per 1,000 lines: comprehensions, conditional expressions, assignments of several values at once, and ``:=``.
In all: loops over a variable ``one``, assignments to ``found``, and functions prefixed ``of_``, ``by_``, ``in_`` or
``with_``.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("clipkit", "data", "eval", "train.py")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
PREFIXES = ("of_", "by_", "in_", "with_")


def python_files(folders: list[str]) -> list[Path]:
    files: list[Path] = []
    for folder in folders:
        path = ROOT / folder
        files += [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.pyi")])
    return files


def count_nodes(tree: ast.AST) -> Counter[str]:
    counts: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            counts["comprehensions"] += 1
            counts["loops over one"] += sum(_names_one(part.target) for part in node.generators)
        elif isinstance(node, ast.IfExp):
            counts["conditional expressions"] += 1
        elif isinstance(node, ast.NamedExpr):
            counts[":="] += 1
        elif isinstance(node, ast.For):
            counts["loops over one"] += _names_one(node.target)
        elif isinstance(node, ast.Assign):
            both_tuples = isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)
            counts["parallel assignments"] += both_tuples
            counts["assignments to found"] += any(_is_name(target, "found") for target in node.targets)
        elif isinstance(node, ast.AnnAssign):
            counts["assignments to found"] += _is_name(node.target, "found")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            counts["functions prefixed " + ", ".join(PREFIXES)] += node.name.lstrip("_").startswith(PREFIXES)
    return counts


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _names_one(target: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "one" for node in ast.walk(target))


def main() -> None:
    files = python_files(sys.argv[1:] or list(PRODUCT))
    lines = 0
    counts: Counter[str] = Counter()
    for path in files:
        source = path.read_text(encoding="utf-8")
        lines += source.count("\n")
        counts += count_nodes(ast.parse(source))
    print(f"{'files':<42}{len(files):>8,}\n{'lines':<42}{lines:>8,}")
    for name in ("comprehensions", "conditional expressions", "parallel assignments", ":="):
        print(f"{name + ' per 1,000 lines':<42}{1000 * counts[name] / lines:>8.1f}")
    for name in ("loops over one", "assignments to found", "functions prefixed " + ", ".join(PREFIXES)):
        print(f"{name:<42}{counts[name]:>8,}")


if __name__ == "__main__":
    main()

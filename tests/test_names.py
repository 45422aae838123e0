"""Names a stranger understands: one meaning for each, and none of the project's old private words."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("context", "replay", "agentloop")
OF_EACH_PACKAGE = {ROOT / package / name for package in PACKAGES for name in ("errors.py", "records.py")}
"""What a package refuses, and the rows it shares: read with the package's name."""
BANNED = re.compile(
    "told|telling|born|birth|worth|heard|speaking|spoken|recollect|owed|polite|settle"
    "|talk|twin|valuation|valued|composing|rehearsal|verdict|retired"
)
"""They stood for what the field has names for: progress, metrics, rewards, a signal, dynamic sampling, pending."""


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def words_of(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def names_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def test_names_hold_no_private_words() -> None:
    found = []
    for path in modules():
        found += [f"{path.relative_to(ROOT)}: {word}" for word in words_of(path.stem) if BANNED.fullmatch(word)]
        for name, line in names_in(tree_of(path)):
            found += [f"{path.relative_to(ROOT)}:{line}: {name}" for word in words_of(name) if BANNED.fullmatch(word)]
    assert not found, "\n".join(found)


def test_no_two_modules_and_no_two_classes_share_a_name() -> None:
    stems, classes = defaultdict(list), defaultdict(list)
    for path in modules():
        if path.name not in ("__init__.py", "__main__.py") and path not in OF_EACH_PACKAGE:
            stems[path.stem].append(str(path.relative_to(ROOT)))
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    twice = [f"{name}: {places}" for names in (stems, classes) for name, places in names.items() if len(places) > 1]
    assert not twice, "\n".join(twice)


def test_no_folder_holds_more_than_fifteen_modules() -> None:
    counts = Counter(path.parent for path in modules() if path.name not in ("__init__.py", "__main__.py"))
    assert {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > 15} == {}

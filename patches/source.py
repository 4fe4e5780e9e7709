"""Whether what is patched and what is called exists in an unpacked wheel, without importing it.

Importing Megatron takes seconds and a fitting torch; reading its syntax trees takes neither, so any
version can be checked beside the installed one.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .registry import MEGATRON, Patch, Reliance

MAX_IMPORTS = 8
"""How many re-exports a name is followed through."""


@dataclass(frozen=True)
class _Found:
    """A definition and the module whose names it sees."""

    module: str
    node: ast.AST


def check_source(item: Patch | Reliance, root: Path) -> str | None:
    """Check a patch or a reliance against the unpacked wheel at ``root``.

    Returns:
        What does not fit, in words, or None. Only what belongs to megatron-core is looked at.
    """
    if item.package != MEGATRON:
        return None
    wheel = _Wheel(root)
    if not wheel.has(item.module):
        return f"{item.name}: no module {item.module}"
    found = wheel.find(item.module, item.qualname.split("."))
    if isinstance(item, Patch) and item.kind == "add":
        return None if found is None else f"{item.name}: {item.target} exists already"
    if found is None:
        return f"{item.name}: {item.target} does not exist"
    have = wheel.parameters(found)
    if have is None:
        return None
    first = item.positional if isinstance(item, Reliance) else ()
    if tuple(have[: len(first)]) != first:
        return (
            f"{item.name}: {item.target} is called with {', '.join(first)} in this order; "
            f"it has {', '.join(have)}"
        )
    lacking = [name for name in item.requires if name not in have]
    if lacking:
        return (
            f"{item.name}: {item.target} has no parameter {', '.join(lacking)}; "
            f"it has {', '.join(have)}"
        )
    return None


@functools.cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


class _Wheel:
    """The modules of an unpacked wheel as syntax trees."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def has(self, module: str) -> bool:
        return self._path(module) is not None

    def find(self, module: str, path: Sequence[str], depth: int = 0) -> _Found | None:
        """What ``path`` names in a module, followed through imports inside of the wheel."""
        file = self._path(module)
        if file is None or depth > MAX_IMPORTS:
            return None
        name, *rest = path
        node = _binding(_parse(file).body, name)
        if isinstance(node, ast.ImportFrom):
            return self._imported(module, node, name, rest, depth)
        if node is None or not rest:
            return None if node is None else _Found(module, node)
        if not isinstance(node, ast.ClassDef):
            return None
        return self._member(_Found(module, node), rest, depth)

    def parameters(self, found: _Found) -> list[str] | None:
        """Parameters of a function, or of a class when it is called; None where nothing tells."""
        node = found.node
        if isinstance(node, ast.FunctionDef):
            a = node.args
            return [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
        if isinstance(node, ast.ClassDef):
            init = self._member(found, ["__init__"], 0)
            if init is not None:
                return (self.parameters(init) or [])[1:]
            return self._fields(found) or None
        return None

    def _path(self, module: str) -> Path | None:
        base = self.root.joinpath(*module.split("."))
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.is_file():
                return path
        return None

    def _imported(
        self, module: str, node: ast.ImportFrom, name: str, rest: list[str], depth: int
    ) -> _Found | None:
        source = self._absolute(module, node)
        if not self.has(source):
            return _Found(module, node)  # of another package: it is bound, and no more is known
        original = next(a.name for a in node.names if (a.asname or a.name) == name)
        found = self.find(source, [original, *rest], depth + 1)
        submodule = f"{source}.{original}"
        if found is None and self.has(submodule):
            return self.find(submodule, rest, depth + 1) if rest else _Found(module, node)
        return found

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        parts = module.split(".")
        file = self._path(module)
        assert file is not None
        up = node.level - (file.name == "__init__.py")
        return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])

    def _member(self, owner: _Found, path: Sequence[str], depth: int) -> _Found | None:
        """A name in a class's body, an attribute that its methods set, or one of its bases'."""
        assert isinstance(owner.node, ast.ClassDef)
        name, *rest = path
        node = _binding(owner.node.body, name) or _set_on_self(owner.node, name)
        if node is not None:
            found = _Found(owner.module, node)
            return self._member(found, rest, depth) if rest else found
        for base in self._bases(owner, depth):
            inherited = self._member(base, path, depth + 1)
            if inherited is not None:
                return inherited
        return None

    def _bases(self, owner: _Found, depth: int) -> Iterator[_Found]:
        assert isinstance(owner.node, ast.ClassDef)
        for base in owner.node.bases:
            if isinstance(base, ast.Name):
                found = self.find(owner.module, [base.id], depth + 1)
                if found is not None and isinstance(found.node, ast.ClassDef):
                    yield found

    def _fields(self, owner: _Found) -> list[str]:
        """Fields of a dataclass, its bases' first."""
        assert isinstance(owner.node, ast.ClassDef)
        inherited = [name for base in self._bases(owner, 0) for name in self._fields(base)]
        own = [
            node.target.id
            for node in owner.node.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]
        return list(dict.fromkeys(inherited + own))


def _binding(body: Sequence[ast.stmt], name: str) -> ast.AST | None:
    """The last definition, assignment or import that binds ``name`` in a module or class body."""
    found: ast.AST | None = None
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            inner = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)]
            # A fallback, such as `except ImportError: name = None`, does not hide the real one.
            found = found or _binding(inner, name)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found = node if node.name == name else found
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if any((alias.asname or alias.name).split(".")[0] == name for alias in node.names):
                found = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                found = node
    return found


def _set_on_self(owner: ast.ClassDef, name: str) -> ast.AST | None:
    """Where a method assigns ``self.<name>``."""
    for node in ast.walk(owner):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if (
                isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and (target.value.id, target.attr) == ("self", name)
            ):
                return node
    return None

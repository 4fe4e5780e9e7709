"""The one registry of every change to Megatron or torch.

A patch is a declared object: what it changes, why, and what it relies on. Installing checks the
target and the parameters that the patch relies on, so a changed Megatron is an error that names
both, never a silent no-op. Closing puts every original back.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from packaging.specifiers import SpecifierSet

logger = logging.getLogger("megatron_ft.patches")

MARK = "__megatron_ft_patch__"
MEGATRON = "megatron-core"
TORCH = "torch"
OURS = "megatron-ft"
SUPPORTED_MEGATRON = ">=0.19,<0.20"


class PatchError(RuntimeError):
    """A patch does not fit the installed package: a missing target or a changed signature."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change to one attribute of Megatron or torch."""

    name: str
    """Unique, ``area.what``."""
    target: str
    """``package.module:Qualified.name``."""
    reason: str
    """Why no native extension point serves."""
    kind: Literal["wrap", "replace", "add"]
    """``wrap`` calls the original, ``replace`` does not, ``add`` makes a missing attribute."""
    make: Callable[[Any], Any]
    """From the original (None for ``add``) to what takes its place."""
    requires: tuple[str, ...] = ()
    """Parameter names of the original that the patch relies on."""
    package: str = MEGATRON
    """The distribution that owns the target."""
    versions: str = SUPPORTED_MEGATRON
    """Versions of ``package`` for which this patch was written."""

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.partition(":")[2]


@dataclass(frozen=True, kw_only=True)
class Reliance:
    """Something of Megatron that is called or read as it is, so that it must stay as it is.

    Not installed: it is declared to be found by ``python -m megatron_ft.patches --check`` when
    Megatron changes.
    """

    name: str
    """Unique, ``area.what``."""
    target: str
    """``package.module:Qualified.name``; an attribute may be one that methods set on self."""
    reason: str
    """What it is called for."""
    positional: tuple[str, ...] = ()
    """The first parameters, in this order, as they are passed without names."""
    requires: tuple[str, ...] = ()
    """Parameters that are passed by name."""
    package: str = MEGATRON
    versions: str = SUPPORTED_MEGATRON
    kind: Literal["call"] = "call"

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.partition(":")[2]


@dataclass(frozen=True)
class Applied:
    """An installed patch and what it replaced."""

    patch: Patch
    owner: Any
    attribute: str
    original: Any
    in_owner_dict: bool


class Registry:
    """Installs patches in order, once, and takes them back in reverse."""

    def __init__(self) -> None:
        self.applied: list[Applied] = []

    def install(self, patches: Iterable[Patch]) -> None:
        """Install ``patches``; one that is in place already is left alone.

        Raises:
            PatchError: A target is missing, its signature changed, or the version is unsupported.
                Nothing of this call stays installed then.
        """
        before = len(self.applied)
        try:
            for patch in patches:
                if not any(a.patch.name == patch.name for a in self.applied):
                    self.applied.append(_install(patch))
        except BaseException:
            self._undo(before)
            raise

    def close(self) -> None:
        """Put every original back.

        Raises:
            PatchError: Somebody replaced a patched attribute after us, so that restoring it would
                undo their change.
        """
        self._undo(0)

    def remove(self, patches: Iterable[Patch]) -> None:
        """Put the originals of ``patches`` back; the others stay.

        Raises:
            PatchError: As ``close``.
        """
        names = {patch.name for patch in patches}
        for done in reversed([a for a in self.applied if a.patch.name in names]):
            _restore(done)
            self.applied.remove(done)

    def is_installed(self, name: str) -> bool:
        return any(a.patch.name == name for a in self.applied)

    def _undo(self, down_to: int) -> None:
        while len(self.applied) > down_to:
            _restore(self.applied[-1])
            self.applied.pop()


def _restore(done: Applied) -> None:
    current = inspect.getattr_static(done.owner, done.attribute, None)
    if getattr(_inner(current), MARK, None) != done.patch.name:
        raise PatchError(
            f"cannot restore {done.patch.target}: it was replaced again after patch "
            f"{done.patch.name!r}; close that one first"
        )
    if done.in_owner_dict:
        setattr(done.owner, done.attribute, done.original)
    else:
        delattr(done.owner, done.attribute)


registry = Registry()


def _inner(attribute: Any) -> Any:
    """The function inside a static- or classmethod, or a property's getter."""
    if isinstance(attribute, staticmethod | classmethod):
        return attribute.__func__
    if isinstance(attribute, property):
        return attribute.fget
    return attribute


@functools.cache
def _installed(package: str) -> str:
    """Its version; looked up once, because that reads and parses a file."""
    return importlib.metadata.version(package)


def _install(patch: Patch) -> Applied:
    version = _installed(patch.package)
    if not SpecifierSet(patch.versions).contains(version, prereleases=True):
        raise PatchError(
            f"patch {patch.name!r} of {patch.target} is written for {patch.package} "
            f"{patch.versions}, but {version} is installed"
        )
    owner, attribute = resolve_owner(patch)
    missing = object()
    original = inspect.getattr_static(owner, attribute, missing)
    if patch.kind == "add":
        if original is not missing:
            raise PatchError(f"patch {patch.name!r} adds {patch.target}, but it exists already")
        original = None
    elif original is missing:
        raise PatchError(f"patch {patch.name!r}: {patch.target} does not exist in {version}")
    else:
        have = parameter_names(_inner(original))
        lacking = [p for p in patch.requires if have is not None and p not in have]
        if lacking:
            raise PatchError(
                f"patch {patch.name!r}: the signature of {patch.target} changed: "
                f"no parameter {', '.join(lacking)}; it has {', '.join(have or ())}"
            )
    replacement = patch.make(_inner(original) if original is not None else None)
    try:
        setattr(_inner(replacement), MARK, patch.name)
    except (AttributeError, TypeError) as error:
        raise PatchError(f"patch {patch.name!r}: {replacement!r} cannot be marked") from error
    if isinstance(original, staticmethod | classmethod) and not isinstance(
        replacement, staticmethod | classmethod
    ):
        replacement = type(original)(replacement)
    in_owner_dict = attribute in vars(owner)
    setattr(owner, attribute, replacement)
    logger.debug("patched %s (%s): %s", patch.target, patch.name, patch.reason)
    return Applied(patch, owner, attribute, original, in_owner_dict)


def resolve_owner(patch: Patch) -> tuple[Any, str]:
    """The object that holds the target, and the attribute's name in it."""
    try:
        owner: Any = importlib.import_module(patch.module)
    except ModuleNotFoundError as error:
        raise PatchError(f"patch {patch.name!r}: no module {patch.module}") from error
    *path, attribute = patch.qualname.split(".")
    for name in path:
        try:
            owner = getattr(owner, name)
        except AttributeError as error:
            raise PatchError(f"patch {patch.name!r}: {patch.target} does not exist") from error
    return owner, attribute


def parameter_names(function: Any) -> tuple[str, ...] | None:
    """Names of a callable's parameters; None where Python cannot know (C functions)."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None

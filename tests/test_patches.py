"""The patch registry, and every declared target in the oldest and newest supported Megatron."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.patches import catalogue
from megatron_ft.patches.registry import (
    MEGATRON,
    OURS,
    SUPPORTED_MEGATRON,
    Patch,
    PatchError,
    Registry,
    Reliance,
)
from megatron_ft.patches.source import check_source

SUPPORTED = ("0.19.0", "0.19.2")
UNSUPPORTED = "0.18.2"


# -- the registry, on a module of our own ----------------------------------------------------------


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("patched_module")
    code = """
def double(value, scale=2):
    return value * scale

def triple(value):
    return value * 3

class Base:
    def inherited(self):
        return "base"

class Counter(Base):
    def __init__(self):
        self.count = 0

    def add(self, number):
        self.count += number
        return self.count

    @staticmethod
    def zero():
        return 0
"""
    exec(code, made.__dict__)
    monkeypatch.setitem(sys.modules, "patched_module", made)
    return made


def plus(number: int) -> Callable[[Any], Any]:
    """A wrapper that adds to the result, so that wrapping twice shows."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) + number

        return wrapped

    return make


def patch(
    target: str = "double",
    *,
    name: str | None = None,
    make: Callable[[Any], Any] | None = None,
    **fields: Any,
) -> Patch:
    settings: dict[str, Any] = {"kind": "wrap", "package": OURS, "versions": ">=0", **fields}
    return Patch(
        name=name or f"test.{target}",
        target=f"patched_module:{target}",
        reason="a test",
        make=make or plus(1),
        **settings,
    )


def test_install_twice_wraps_once(module: Any) -> None:
    registry = Registry()
    for _ in range(2):
        registry.install([patch()])
    assert module.double(5) == 11
    assert registry.is_installed("test.double")


def test_close_puts_everything_back(module: Any) -> None:
    before = dict(vars(module)), dict(vars(module.Counter))
    registry = Registry()
    registry.install(
        [
            patch(),
            patch("Counter.add", requires=("self", "number")),
            patch("Counter.zero"),
            patch("Counter.inherited", make=lambda original: lambda self: original(self) + "!"),
            patch("added", kind="add", make=lambda original: lambda: original),
        ]
    )
    counter = module.Counter()
    assert (module.double(1), counter.add(4), module.Counter.zero()) == (3, 5, 1)
    assert (counter.inherited(), module.Base().inherited()) == ("base!", "base")
    assert module.added() is None
    registry.close()
    after = dict(vars(module)), dict(vars(module.Counter))
    assert after[1] == before[1]
    # What "add" made is None again rather than gone would be a leftover.
    assert {k: v for k, v in after[0].items() if k in before[0]} == before[0]
    assert set(after[0]) == set(before[0])
    assert not registry.applied
    registry.install([patch()])
    assert module.double(1) == 3


def test_remove_leaves_the_others(module: Any) -> None:
    registry = Registry()
    registry.install([patch(), patch("triple")])
    registry.remove([patch()])
    assert (module.double(1), module.triple(1)) == (2, 4)
    registry.close()
    assert module.triple(1) == 3


def test_two_patches_of_one_target_come_off_in_reverse(module: Any) -> None:
    registry = Registry()
    original = module.double
    outer = patch(name="test.outer", make=plus(10))
    registry.install([patch(), outer])
    assert module.double(1) == 13
    with pytest.raises(PatchError, match=r"replaced again after patch 'test\.double'"):
        registry.remove([patch()])
    registry.remove([outer])
    assert module.double(1) == 3
    registry.close()
    assert module.double is original


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (patch("gone"), r"'test\.gone': patched_module:gone does not exist"),
        (patch("Gone.method"), r"patched_module:Gone\.method does not exist"),
        (
            Patch(
                name="test.module",
                target="no_such_module:f",
                reason="a test",
                kind="wrap",
                make=plus(1),
                package=OURS,
                versions=">=0",
            ),
            r"'test\.module': no module no_such_module",
        ),
        (
            patch("triple", requires=("value", "scale")),
            r"the signature of patched_module:triple changed: no parameter scale; it has value",
        ),
        (patch("triple", kind="add"), r"adds patched_module:triple, but it exists already"),
        (
            patch("triple", package=MEGATRON, versions="<0.19"),
            r"'test\.triple' of patched_module:triple is written for megatron-core <0\.19, "
            r"but 0\.19\.\d+ is installed",
        ),
        (patch("triple", make=lambda original: 3), r"'test\.triple': 3 cannot be marked"),
    ],
)
def test_a_patch_that_does_not_fit_leaves_nothing(module: Any, wrong: Patch, message: str) -> None:
    originals = module.double, module.triple
    registry = Registry()
    registry.install([patch("Counter.add")])
    with pytest.raises(PatchError, match=message):
        registry.install([patch(), wrong])
    assert (module.double, module.triple) == originals
    assert [done.patch.name for done in registry.applied] == ["test.Counter.add"]
    registry.close()


def test_restoring_over_somebody_elses_change_is_refused(module: Any) -> None:
    registry = Registry()
    registry.install([patch()])
    ours = module.double
    module.double = lambda value: -value
    with pytest.raises(PatchError, match="cannot restore patched_module:double"):
        registry.close()
    assert module.double(3) == -3
    assert registry.is_installed("test.double")
    module.double = ours
    registry.close()
    assert module.double(3) == 6


def test_versions_are_those_that_are_tried() -> None:
    declared = {item.versions for item in catalogue.everything() if item.package == MEGATRON}
    assert declared == {SUPPORTED_MEGATRON}
    names = [item.name for item in catalogue.everything()]
    assert len(set(names)) == len(names)
    assert catalogue.WHEN.keys() == catalogue.AREAS.keys()


# -- the real targets ------------------------------------------------------------------------------

INSTALL_AND_CLOSE = """
import inspect, os, sys
os.environ["TORCHDYNAMO_DISABLE"] = "1"
from megatron_ft.patches import catalogue
from megatron_ft.patches.registry import MARK, _inner, registry, resolve_owner

patches = catalogue.all_patches()
places = [resolve_owner(patch) for patch in patches]
def look():
    return [inspect.getattr_static(owner, name, None) for owner, name in places]
before = look()
registry.install(patches)
changed = look()
registry.install(patches)
assert len(registry.applied) == len(patches)
for patch, value, original in zip(patches, changed, before, strict=True):
    assert value is not original, patch.name
    assert hasattr(_inner(value), MARK), patch.name
registry.close()
assert all(a is b for a, b in zip(look(), before, strict=True))
print(len(patches), "installed and taken back")
"""


def test_every_patch_installs_and_comes_off_for_real() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INSTALL_AND_CLOSE],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == ["installed", "and", "taken", "back"]


@pytest.fixture(scope="session")
def wheel(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """The unpacked wheel of a version of megatron-core, downloaded once and kept."""
    folder = request.config.cache.mkdir("megatron-core")

    def unpacked(version: str) -> Path:
        root = folder / version
        if not (root / "complete").exists():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--only-binary", ":all:", "--dest", str(root), f"megatron-core=={version}"]
            subprocess.run(command, check=True, timeout=180, stdin=subprocess.DEVNULL)
            (archive,) = root.glob("*.whl")
            with zipfile.ZipFile(archive) as content:
                content.extractall(root)
            (root / "complete").touch()
        return root

    return unpacked


@pytest.mark.parametrize("version", SUPPORTED)
def test_supported_versions_have_what_is_relied_on(
    wheel: Callable[[str], Path], version: str
) -> None:
    root = wheel(version)
    for item in catalogue.everything():
        assert check_source(item, root) is None
    assert check(root).returncode == 0


def test_an_unsupported_version_says_what_would_have_to_change(
    wheel: Callable[[str], Path],
) -> None:
    done = check(wheel(UNSUPPORTED))
    assert done.returncode == 1
    assert "megatron.training.argument_utils:gpt_config_from_args does not exist" in done.stdout
    # pretrain() took the model's provider where it takes its type now.
    assert "model_provider, model_type" in done.stdout


def test_an_unsupported_version_is_refused_at_install(wheel: Callable[[str], Path]) -> None:
    """With the real package of that version before the installed one."""
    program = (
        "from megatron_ft.patches import wheel\n"
        "from megatron_ft.patches.registry import registry\n"
        "registry.install(wheel.PATCHES)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=180,
        env={**os.environ, "PYTHONPATH": str(wheel(UNSUPPORTED))},
    )
    assert done.returncode != 0
    assert f"is written for megatron-core {SUPPORTED_MEGATRON}" in done.stderr
    assert f"but {UNSUPPORTED} is installed" in done.stderr


def check(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_ft.patches", "--check", str(root)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=180,
    )


def test_check_of_a_folder_without_a_wheel(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 64
    assert "holds no unpacked megatron-core wheel" in done.stderr


def test_the_table_has_every_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_ft.patches"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    for area, when in catalogue.WHEN.items():
        assert f"{area}: {when}" in done.stdout
    assert done.stdout.count("│ call ") == len(catalogue.AREAS["calls"])


# -- how a wheel is read ---------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    files = {
        "pkg/__init__.py": "from .a import f as g\nfrom . import a\nfrom outside import thing\n",
        "pkg/a.py": """
import dataclasses
try:
    from fast import kernel
except ImportError:
    kernel = None

def f(x, *, y=1): ...

class Base:
    inherited: int = 0

    def __init__(self, one, two):
        self.attribute = one

class Derived(Base):
    def method(self, z): ...

@dataclasses.dataclass
class Plain:
    first: int

@dataclasses.dataclass
class Record(Plain):
    second: int = 2
""",
        "pkg/sub/__init__.py": "from ..a import Derived\nfrom ..a import f\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    yield tmp_path


@pytest.mark.parametrize(
    ("target", "positional", "requires", "problem"),
    [
        ("pkg:g", ("x",), ("y",), None),
        ("pkg:g", ("x", "z"), (), "called with x, z in this order; it has x, y"),
        ("pkg:g", (), ("z",), "has no parameter z; it has x, y"),
        ("pkg:f", (), (), "pkg:f does not exist"),
        ("pkg:thing", (), ("anything",), None),
        ("pkg.sub:f", ("x",), (), None),
        ("pkg.sub:f", ("y",), (), "in this order"),
        ("pkg.sub:Derived", ("one", "two"), (), None),
        ("pkg.sub:Derived", ("one",), ("three",), "no parameter three"),
        ("pkg.sub:Derived.method", ("self", "z"), (), None),
        ("pkg.sub:Derived.attribute", (), (), None),
        ("pkg.sub:Derived.inherited", (), (), None),
        ("pkg.sub:Derived.other", (), (), "does not exist"),
        ("pkg.a:Record", ("first", "second"), (), None),
        ("pkg.a:Record", (), ("third",), "no parameter third; it has first, second"),
        ("pkg.a:kernel", (), (), None),
        ("pkg.b:f", (), (), "no module pkg.b"),
    ],
)
def test_check_source(
    source: Path,
    target: str,
    positional: tuple[str, ...],
    requires: tuple[str, ...],
    problem: str | None,
) -> None:
    item = Reliance(
        name="test.item",
        target=target,
        reason="a test",
        positional=positional,
        requires=requires,
    )
    found = check_source(item, source)
    if problem is None:
        assert found is None
    else:
        assert found is not None and problem in found and found.startswith("test.item: ")


def test_check_source_of_an_added_attribute(source: Path) -> None:
    def added(target: str) -> str | None:
        patch = Patch(name="test.add", target=target, reason="", kind="add", make=lambda _: None)
        return check_source(patch, source)

    assert added("pkg.a:new") is None
    assert added("pkg.a:f") == "test.add: pkg.a:f exists already"


def test_the_installed_wheel() -> None:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    root = Path(str(spec.origin)).parents[2]
    problems = [check_source(item, root) for item in catalogue.everything()]
    assert set(problems) == {None}

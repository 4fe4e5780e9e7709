"""What an install contains, and what `make env` finds and says."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from importlib.metadata import entry_points, requires
from pathlib import Path

import pytest
import tiny_backend
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
TIMEOUT = 240.0


def bash(script: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", script],
        cwd=cwd,
        env={**{k: v for k, v in os.environ.items() if k != "PYTHON"}, **env},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT,
    )


def test_a_wheel_holds_every_module_and_no_package_named_patches(tmp_path: Path) -> None:
    source = tmp_path / "a copy"  # building leaves folders in the source
    source.mkdir()
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    for name in ("megatron_ft", "patches"):
        no_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=no_caches)
    build = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*build, "-w", tmp_path, source], check=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT
    )
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    wanted = {str(p.relative_to(source)) for p in (source / "megatron_ft").rglob("*.py")}
    wanted |= {f"megatron_ft/{p.relative_to(source)}" for p in (source / "patches").rglob("*.py")}
    assert held == wanted
    assert "megatron_ft/patches/registry.py" in held


def test_the_editable_install_finds_patches_from_anywhere(tmp_path: Path) -> None:
    code = (
        "import importlib.util as u, megatron_ft.patches as p;"
        "assert u.find_spec('patches') is None; print(p.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve() == ROOT / "patches" / "__init__.py"


def test_every_requirement_is_pinned_to_a_version_that_it_allows() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    for line in requires("megatron-ft") or []:
        requirement = Requirement(line)
        if requirement.marker is not None and "gpu" in str(requirement.marker):
            continue  # cannot be tested without a GPU
        assert requirement.specifier.contains(pins[requirement.name.lower()]), line


def test_the_launcher_is_installed_as_a_command() -> None:
    (script,) = entry_points(group="console_scripts", name="megatron-ft-run")
    assert script.value == "megatron_ft.launcher:main"


def test_mypy_is_strict_on_modules_that_exist() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["strict"] is True
    for name in settings["files"]:
        assert (ROOT / name).exists(), name


# --- finding a Python ----------------------------------------------------------------------------


def fake_python(folder: Path, name: str, answer: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    return program


def test_find_python_passes_over_shims_that_answer_with_an_error(tmp_path: Path) -> None:
    fake_python(tmp_path / "shims", "python3.12", "echo 'pyenv: command not found' >&2; exit 127")
    real = Path(sys._base_executable)  # type: ignore[attr-defined]
    fake_python(tmp_path / "bin dir", "python3.13", f'exec "{real}" "$@"')
    done = bash(
        "tools/find_python.sh",
        ROOT,
        PATH=f"{tmp_path}/shims:{tmp_path}/bin dir:/usr/bin:/bin",
        HOME=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    found = done.stdout.strip()
    version = subprocess.check_output([found, "-c", "import sys; print(sys.version_info[:2])"])
    assert version.strip() in (b"(3, 12)", b"(3, 13)")


def test_find_python_says_what_to_install(tmp_path: Path) -> None:
    old = fake_python(tmp_path, "old", "echo 'is Python 3.9' >&2; exit 1")
    done = bash("tools/find_python.sh", ROOT, PYTHON=str(old))
    assert done.returncode == 1 and done.stdout == ""
    assert f"{old}: is Python 3.9" in done.stderr
    assert "apt install python3.12" in done.stderr and "PYTHON=" in done.stderr


# --- making the environment ----------------------------------------------------------------------


class Checkout:
    """A tiny project with our set-up files, in a folder with a space: real venv, real pip."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("tools", "megatron_ft/patches", "megatron/core", "mpi4py", "wheels"):
            (folder / name).mkdir(parents=True)
        for name in ("tools/make_env.sh", "tools/find_python.sh"):
            shutil.copy(ROOT / name, folder / name)
        shutil.copy(Path(tiny_backend.__file__), folder)
        for name in ("setup.py", "constraints.txt", "mpi4py/MPI.py"):
            (folder / name).touch()
        (folder / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "tiny_backend"\nbackend-path = ["."]\n'
        )
        tiny_backend.write_wheel(folder / "wheels", "tinydep", {"tinydep.py": "whole = True\n"})

    def start_env(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["bash", "tools/make_env.sh"],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHON": sys.executable,
                "PIP_CONFIG_FILE": os.devnull,
                "PIP_NO_INDEX": "1",
                "PIP_FIND_LINKS": (self.folder / "wheels").as_uri(),
            },
        )

    def make_env(self) -> int:
        """Run it to its end, which must be good; returns how often pip built the project."""
        before = self.builds()
        assert self.start_env().wait(timeout=TIMEOUT) == 0
        python = self.folder / ".venv" / "bin" / "python"
        subprocess.run([python, "-c", "import tinydep; assert tinydep.whole"], check=True)
        return self.builds() - before

    def interrupt_env(self) -> None:
        """Kill it while pip is at work."""
        before = self.builds()
        (self.folder / "hang").touch()
        process = self.start_env()
        until = time.monotonic() + TIMEOUT
        while self.builds() == before and time.monotonic() < until:
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        (self.folder / "hang").unlink()

    def builds(self) -> int:
        log = self.folder / "builds"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def by_hand(self) -> Path:
        """Something in the environment that `make env` did not put there."""
        return self.folder / ".venv" / "built-by-hand"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a b")


def test_make_env_installs_once_and_again_when_the_versions_change(checkout: Checkout) -> None:
    assert checkout.make_env() == 1
    assert checkout.make_env() == 0
    checkout.by_hand().touch()
    (checkout.folder / "constraints.txt").write_text("tinydep==1.0\n")
    assert checkout.make_env() == 1
    assert checkout.make_env() == 0
    # Without its mark it may be anyone's: completed, not deleted.
    (checkout.folder / ".venv" / ".ready").unlink()
    assert checkout.make_env() == 1
    assert checkout.by_hand().exists()


def test_make_env_finishes_what_was_interrupted(checkout: Checkout) -> None:
    checkout.interrupt_env()
    checkout.by_hand().touch()
    assert checkout.make_env() == 1
    assert not checkout.by_hand().exists()  # half made: made again
    checkout.by_hand().touch()
    (checkout.folder / "constraints.txt").write_text("tinydep==1.0\n")
    checkout.interrupt_env()
    (module,) = (checkout.folder / ".venv").glob("lib/python*/site-packages/tinydep.py")
    module.write_text("whole = False\n")  # as pip may have left it
    assert checkout.make_env() == 1  # which sees that it is whole again
    assert checkout.by_hand().exists()
    assert checkout.make_env() == 0


@pytest.mark.parametrize(
    "script",
    ["pretrain_llama_ft.py", "tools/campaign_rank.py", "tests/recover_entry.py"],
)
def test_what_saving_starts_is_no_rank(script: str) -> None:
    """Megatron's torch_dist writer starts a process, in which multiprocessing imports the script.

    MPI_Init there waits for the same of all ranks, of which some may not save.
    """
    code = (
        f"import runpy, sys; runpy.run_path({script!r}, run_name='__mp_main__'); "
        "print([name for name in ('mpi4py.MPI', 'torch', 'megatron.core') if name in sys.modules])"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert said.stdout == "[]\n", said

"""A build backend that needs nothing: `make env` is tried with a project that installs in a second.

Copied beside the tiny project's pyproject.toml, and imported by test_packaging for its wheels.
"""

import time
import zipfile
from pathlib import Path

VERSION = "1.0"


def write_wheel(folder: Path, name: str, files: dict[str, str], requires: str = "") -> str:
    """Write NAME-1.0-py3-none-any.whl with these files; returns its name."""
    info = f"{name}-{VERSION}.dist-info"
    need = f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {VERSION}\n{need}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    wheel = f"{name}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(folder / wheel, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return wheel


def build_editable(
    wheel_directory: str,
    config_settings: object = None,
    metadata_directory: str | None = None,
) -> str:
    with Path("builds").open("a") as builds:
        builds.write("build\n")
    while Path("hang").exists():
        time.sleep(0.1)
    here = f"{Path.cwd()}\n"
    return write_wheel(Path(wheel_directory), "tiny", {"tiny.pth": here}, "tinydep")


# pip asks for every hook; a tiny project has the same wheel either way.
build_wheel = build_editable

"""What the documentation says can be done: its commands, flags, paths and links.

Every command in a shell block is taken apart: its script or module must be there and accept its
flags. Quick ones are run. A command that this file cannot check fails the test.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import ROOT, _one_at_a_time
from megatron_flags import parse, parser

from megatron_ft.launcher import _Parser as LauncherParser

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HARMLESS = {"tail", "kill", "source"}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_COMMAND_IN_TEXT = re.compile(r"make$|(python|make|megatron-ft-run) \S")


@dataclass(frozen=True)
class Command:
    """One simple command of a shell line: no pipe, no redirection."""

    page: str
    line: int
    environment: tuple[str, ...]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {' '.join((*self.environment, *self.words))}"[:150]


def commands_of(page: Path) -> Iterator[Command]:
    """The commands of fenced shell blocks, of indented blocks, and in the text."""
    text = page.read_text()
    for block in _FENCE.finditer(text):
        assert block[1] in ("bash", "yaml", "python", "text"), (
            f"{page.name}: a block of {block[1]!r}"
        )
        if block[1] == "bash":
            yield from _split(page.name, _line(text, block.start(2)), block[2])
    prose = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    for found in re.finditer(r"^ {4}(\S.*)$", prose, re.MULTILINE):
        if _COMMAND_IN_TEXT.match(found[1]):
            yield from _split(page.name, _line(prose, found.start()), found[1])
    for found in _INLINE.finditer(prose):
        if _COMMAND_IN_TEXT.match(found[1]):
            yield from _split(page.name, _line(prose, found.start()), found[1])


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _split(page: str, first: int, block: str) -> Iterator[Command]:
    line = first
    for logical in re.sub(r"\\\n", lambda _: " \0", block).split("\n"):
        joined = logical.count("\0")
        lexer = shlex.shlex(logical.replace("\0", ""), posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for token in [*lexer, "|"]:
            if token not in ("|", "&&", ";"):
                words.append(token)
                continue
            # `2>&1` comes as three tokens.
            plain = re.sub(r" ?2 >& 1", "", "\0".join(words).replace("\0", " "))
            if plain != " ".join(words):
                words = words[: words.index(">&") - 1]
            given = [w for w in words if _ASSIGNMENT.fullmatch(w)]
            before = given[: next((i for i, w in enumerate(words) if w not in given), len(words))]
            if words:
                yield Command(page, line, tuple(before), tuple(words[len(before) :]))
            words = []
        line += 1 + joined


ALL = [command for page in PAGES for command in commands_of(page)]


@functools.cache
def help_of(*program: str) -> str:
    done = subprocess.run(
        [sys.executable, *program, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def flags_in(words: tuple[str, ...]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def check(command: Command) -> None:
    """Fail if the command could not work as it is written."""
    if not command.words:
        return  # assignments alone
    program, *rest = command.words
    if program == "export":
        assert all(_ASSIGNMENT.fullmatch(word) for word in rest)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert all(target in targets for target in rest), f"targets are {targets}"
        if "campaign" in rest:
            assert list((ROOT / "examples" / "campaigns").glob("*.yaml"))
    elif program == "sbatch" or program.startswith("examples/"):
        script = rest[0] if program == "sbatch" else program
        _check_script(script, command.environment, rest[1:] if program == "sbatch" else rest)
    elif program == "megatron-ft-run":
        _check_launch(rest)
    elif program == "python":
        _check_python(tuple(rest))
    elif program == "pip":
        _check_pip(rest)
    else:
        assert program in HARMLESS, f"teach {Path(__file__).name} to check {program!r}"


def _check_script(script: str, environment: tuple[str, ...], flags: list[str]) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK), f"{script} cannot be run"
    text = path.read_text()
    for name in (assignment.partition("=")[0] for assignment in environment):
        assert re.search(rf"\${{{name}(:?-|}})", text), f"{script} does not read {name}"
    parse(flags)


def _check_launch(arguments: list[str]) -> None:
    if arguments == ["--mpirun", "PATH"]:
        arguments = [*arguments, "true"]
    options = LauncherParser().parse_args(arguments)
    if options.module:
        assert importlib.util.find_spec(options.script) is not None
    elif options.script.endswith(".py"):
        assert (ROOT / options.script).is_file()
        # "...": Megatron's flags, left out for the reader.
        parse([word for word in options.arguments if word != "..."])


def _check_python(arguments: tuple[str, ...]) -> None:
    if arguments[0] == "-c":
        compile(arguments[1], "documentation", "exec")
        return
    at = 2 if arguments[0] == "-m" else 1
    if arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) is not None, f"no module {arguments[1]}"
    else:
        assert (ROOT / arguments[0]).is_file(), f"no {arguments[0]}"
    if flags := flags_in(arguments[at:]):
        known = set(re.findall(r"--[a-z][a-z-]*", help_of(*arguments[:at])))
        assert set(flags) <= known, f"{set(flags) - known} is not among {sorted(known)}"


def _check_pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    for word in arguments:
        if word.endswith(".txt"):
            assert (ROOT / word).is_file()
        for extra in re.findall(r"\[(.*)\]", word):
            assert f'"{extra}": [' in (ROOT / "setup.py").read_text(), f"no extra {extra}"


@pytest.mark.parametrize("command", ALL, ids=str)
def test_every_command_could_run(command: Command) -> None:
    check(command)


def test_commands_are_found() -> None:
    """The parser of this file finds what a reader sees."""
    found = [c.words for c in ALL if c.page == "README.md"]
    assert ("make", "demo") in found and ("make", "test") in found
    (long,) = [words for words in found if words[:3] == ("megatron-ft-run", "-n", "4")]
    assert long[-4:] == ("1", "--ft-recover", "--ft-run-dir", "runs/mine")
    (tiny,) = [c for c in ALL if c.page == "README.md" and c.words[0].startswith("examples/")]
    assert tiny.environment == ("DP=4", "PP=2", "ITERS=20")
    piped = [c.words for c in ALL if c.words[:2] == ("python", "tools/show_run.py")]
    assert piped == [("python", "tools/show_run.py", "run.log", "--every", "10")]
    feeding = [c for c in ALL if c.page == "operating.md" and "pretrain_llama_ft.py" in c.words][1]
    assert feeding.words[-1] == "--ft-recover", "the redirection is no argument"


@pytest.mark.parametrize(
    "wrong",
    [
        "make dmeo",
        "python -m megatron_ft.observe.sumary runs/mine",
        "python -m megatron_ft.observe.summary --every runs/mine",
        "python tools/preprocess_data.py --inputs a --output-prefix b",
        "megatron-ft-run -n 4 pretrain_llama_ft.py --ft-recovery",
        "megatron-ft-run -n 4 pretrain_llama_ft.py --num-layer 4",
        "megatron-ft-run -n 4 pretrain_llama_ft.py --ft-recover --ft-fault kil@3:slot=1",
        "megatron-ft-run --ranks 4 pretrain_llama_ft.py",
        "TP=1 DQ=2 examples/tiny_llama.sh",
        "examples/small_llama.sh",
        "sbatch examples/llama_8b.sh",
        "pip install .[cuda]",
        "frobnicate",
    ],
)
def test_a_command_that_could_not_run_is_noticed(wrong: str) -> None:
    (command,) = _split("here", 1, wrong)
    with pytest.raises((AssertionError, SystemExit, ValueError)):
        check(command)


# --- flags, paths, links -------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_and_paths_in_the_text_exist(page: Path) -> None:
    text = page.read_text()
    known = {option for action in parser(False)._actions for option in action.option_strings}
    for flag in re.findall(r"--ft-[a-z-]*[a-z]", text):
        prefix_of_several = f"{flag}*" in text
        assert flag in known or prefix_of_several, f"{page.name}: no {flag}"
    for code in _INLINE.findall(text):
        path = code.partition("::")[0]
        if re.fullmatch(r"(megatron_ft|patches|tools|examples|tests|docs)/[\w./-]*", path):
            assert (ROOT / path).exists(), f"{page.name}: no {path}"
        if re.fullmatch(r"megatron_ft(\.\w+)+", code):
            assert _resolves(code), f"{page.name}: no {code}"


def _resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, or one of the names that its module defines."""
    path = ROOT / dotted.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    module, _, name = dotted.rpartition(".")
    source = (ROOT / module.replace(".", "/")).with_suffix(".py")
    if not source.is_file():
        source = ROOT / module.replace(".", "/") / "__init__.py"
    return source.is_file() and re.search(rf"\b{name}\b", source.read_text()) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.is_file(), f"{page.name}: no {target}"
        if anchor:
            assert anchor in _anchors(linked), f"{page.name}: {target}: {_anchors(linked)}"


def _anchors(page: Path) -> list[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def test_every_page_is_linked_from_the_readme() -> None:
    readme = PAGES[0].read_text()
    assert [p.name for p in PAGES[1:] if f"](docs/{p.name})" not in readme] == []


@pytest.mark.parametrize(
    "path", [*PAGES, *sorted((ROOT / "examples").glob("*.sh"))], ids=lambda path: path.name
)
def test_nothing_of_one_machine_is_named(path: Path) -> None:
    text = path.read_text()
    for place in (str(ROOT), str(Path.home()), "/home/", "/tmp/", "/root/", "/work/"):
        assert place not in text, f"{path.name} names {place}"


def test_the_table_of_flags_has_their_defaults() -> None:
    """docs/recover.md and docs/operating.md against the parser."""
    pages = {name: (ROOT / "docs" / name).read_text() for name in ("recover.md", "operating.md")}
    args = parse([])
    for flag, default in (
        ("policy", args.ft_recover_policy),
        ("replay", args.ft_recover_replay),
    ):
        assert f"| `--ft-recover-{flag}` | `{default}` |" in pages["recover.md"]
    for flag in ("watch", "progress", "collective"):
        default = getattr(args, f"ft_{flag}_timeout")
        assert f"| `--ft-{flag}-timeout` | {default:g} |" in pages["operating.md"]
        assert f"| `--ft-{flag}-timeout S` | {default:g} |" in pages["recover.md"]


# --- commands that are run -----------------------------------------------------------------------


def shell(
    script: str, cwd: Path, timeout: float = 120, **env: str
) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=cwd,
        env={**os.environ, "PATH": path, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


QUICK = {
    "python -m megatron_ft.patches": "compile_helpers",
    "megatron-ft-run -n 2 -m megatron_ft.world.preflight": "fault tolerance",
    "make": "make demo",
}


@pytest.mark.parametrize("script", QUICK)
def test_quick_commands_run(script: str) -> None:
    words = tuple(script.split())
    assert any(c.words == words for c in ALL), f"no page has {script!r} any more"
    done = shell(script, ROOT)
    assert done.returncode == 0, done.stderr
    assert QUICK[script] in done.stdout


def test_the_dry_run_of_the_cluster_example_runs() -> None:
    (command,) = [c for c in ALL if "DRY_RUN=1" in c.environment]
    done = shell(f"{' '.join(command.environment)} {shlex.join(command.words)}", ROOT)
    assert done.returncode == 0, done.stderr
    assert "--with-ft ulfm" in done.stdout and "--num-layers 32" in done.stdout


@pytest.mark.slow
def test_the_quick_start_of_the_readme_runs(tmp_path: Path) -> None:
    """As written, but shorter, and in the environment that the tests run in."""
    copy = tmp_path / "a copy"
    copy.mkdir()
    for name in ("megatron_ft", "patches", "tools"):
        no_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=no_caches)
    shutil.copy(ROOT / "pretrain_llama_ft.py", copy)
    texts = copy / "my_texts"
    texts.mkdir()
    for number in range(120):
        (texts / f"{number}.txt").write_text(f"Text number {number}, of some words. " * 40)

    start = [
        c for c in ALL if c.page == "README.md" and c.words[0] in ("python", "megatron-ft-run")
    ]
    assert [c.words[1] for c in start] == ["tools/preprocess_data.py", "-n", "-m"]
    for command in start:
        script = shlex.join(command.words).replace("--train-iters 200", "--train-iters 8")
        with _one_at_a_time():
            done = shell(script, copy, timeout=400)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "finished with 4 of 4 replicas, exit code 0" in " ".join(done.stdout.split())

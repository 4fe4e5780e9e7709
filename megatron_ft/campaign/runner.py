"""Runs campaigns: each fault-free run once, each case once, what is done is kept."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_ft.campaign import compare, job
from megatron_ft.campaign.checks import COMPARING, Ended, Problem, judge
from megatron_ft.campaign.doctor import blind_spots
from megatron_ft.campaign.launching import Launcher, left_behind, one_at_a_time
from megatron_ft.campaign.recorded import DUMPS, Run
from megatron_ft.campaign.results import Outcome, read_outcome, write_outcome
from megatron_ft.campaign.spec import Case, Setting

RESULT = "result.json"
REFERENCES = "fault-free"
REFERENCE_SECONDS = 300.0
CODE = ("megatron_ft", "patches")
SCRIPTS = (job.SCRIPT, job.HOOKED_SCRIPT, "tools/punisher.py")


class Runner:
    """Runs cases into a directory.

    Args:
        directory: Results go to `CAMPAIGN/CASE/`, fault-free runs to `fault-free/KEY/`.
        data_prefix: What is trained on.
        parallel: Launches at once.
        fresh: Run again what was done before.
        say: Called with every outcome as it comes.
    """

    def __init__(
        self,
        directory: Path,
        data_prefix: str,
        *,
        parallel: int = 1,
        fresh: bool = False,
        say: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        self.directory = directory.absolute()
        self.data_prefix = data_prefix
        self.parallel = parallel
        self.fresh = fresh
        self.say = say
        self.references: dict[str, Outcome] = {}
        """By key, of all settings that were needed."""
        self._code = code_digest()
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._launcher = Launcher()

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        """Run all cases; their outcomes in the same order.

        Raises:
            KeyboardInterrupt: It was interrupted; nothing is left running, and what was done is
                kept.
        """
        if self.parallel == 1:
            return [self.run_case(case) for case in cases]
        with ThreadPoolExecutor(self.parallel) as pool:
            try:
                return list(pool.map(self.run_case, cases))
            except BaseException:
                self._launcher.end_all()
                raise

    # -- one case --------------------------------------------------------------------------------

    def run_case(self, case: Case) -> Outcome:
        """Run a case, and its fault-free run first if nobody has."""
        reference = self._reference(case.setting)
        if not reference.passed:
            return self._said(
                Outcome(
                    campaign=case.campaign,
                    name=case.name,
                    passed=False,
                    fingerprint="",
                    seconds=0.0,
                    control=case.is_control,
                    problems=[f"its fault-free run failed: {reference.run_dir}"],
                )
            )
        folder = self.directory / case.campaign / case.name
        fingerprint = self._fingerprint(case)
        if (kept := self._kept(folder, fingerprint)) is not None:
            return self._said(kept)
        run_dir = _emptied(folder) / "run"
        (run_dir / DUMPS).mkdir(parents=True)
        command = job.case_command(case, run_dir, self.data_prefix)
        with self._punished(case, folder, run_dir) as kills:
            run, ended, seconds = self._launch(
                command, folder, case.timeout, job.case_environment(case, run_dir / DUMPS)
            )
        ended = dataclasses.replace(ended, kills=kills())
        wanted = Run(0, "", Path(reference.run_dir))
        outcome = conclude(case, run, ended, wanted, seconds, fingerprint)
        write_outcome(folder / RESULT, outcome)
        return self._said(outcome)

    @contextlib.contextmanager
    def _punished(self, case: Case, folder: Path, run_dir: Path) -> Iterator[Callable[[], int]]:
        """Kill from outside meanwhile; yields what counts the kills afterwards."""
        if case.punisher is None:
            yield lambda: 0
            return
        result = folder / "punisher.json"
        log = (folder / "punisher.log").open("w")
        punisher = subprocess.Popen(
            job.punisher_command(case, run_dir, result),
            cwd=job.ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield lambda: int(json.loads(result.read_text())["kills"]) if result.exists() else 0
            # Reached with the job over; it notices within a look.
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                punisher.wait(10)
            if punisher.poll() is None:
                punisher.kill()
                punisher.wait()
            log.close()

    # -- the fault-free run ----------------------------------------------------------------------

    def _reference(self, setting: Setting) -> Outcome:
        fingerprint = self._fingerprint(setting)
        key = fingerprint[:12]
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self.references:
                self.references[key] = self._run_reference(setting, key, fingerprint)
            return self.references[key]

    def _run_reference(self, setting: Setting, key: str, fingerprint: str) -> Outcome:
        folder = self.directory / REFERENCES / key
        if (kept := self._kept(folder, fingerprint)) is not None:
            return self._said(kept)
        run_dir = _emptied(folder) / "run"
        command = job.setting_command(setting, run_dir, self.data_prefix)
        case = Case(campaign=REFERENCES, name=key, setting=setting, timeout=REFERENCE_SECONDS)
        run, ended, seconds = self._launch(command, folder, case.timeout, {})
        outcome = conclude(case, run, ended, None, seconds, fingerprint)
        write_outcome(folder / RESULT, outcome)
        return self._said(outcome)

    # -- both ------------------------------------------------------------------------------------

    def _launch(
        self, command: list[str], folder: Path, timeout: float, env: dict[str, str]
    ) -> tuple[Run, Ended, float]:
        run_dir = folder / "run"
        (folder / "command.json").write_text(json.dumps(command, indent=1) + "\n")
        with one_at_a_time() if self.parallel == 1 else contextlib.nullcontext():
            started = time.monotonic()
            try:
                done = self._launcher.run(command, timeout=timeout, log=folder / "log", env=env)
            finally:
                leftovers = left_behind(run_dir)
            seconds = time.monotonic() - started
        return (
            Run(done.returncode, done.output, run_dir),
            Ended(done.timed_out, leftovers),
            seconds,
        )

    def _kept(self, folder: Path, fingerprint: str) -> Outcome | None:
        kept = None if self.fresh else read_outcome(folder / RESULT, fingerprint)
        # The directory may have been moved since.
        return kept and dataclasses.replace(kept, run_dir=str(folder / "run"))

    def _fingerprint(self, what: Case | Setting) -> str:
        fields = dataclasses.asdict(what)
        text = json.dumps([fields, self.data_prefix, self._code], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def _said(self, outcome: Outcome) -> Outcome:
        self.say(outcome)
        return outcome


def conclude(
    case: Case,
    run: Run,
    ended: Ended,
    reference: Run | None,
    seconds: float,
    fingerprint: str = "",
) -> Outcome:
    """Judge a finished case, and whether its checks could have failed."""
    found = judge(case, run, ended, reference)
    doctorings, problems = 0, [f"{problem.check}: {problem.text}" for problem in found]
    if case.is_control:
        passed, problems = _control(case, found)
    elif found:
        passed = False
        problems.append(f"the whole output: {run.directory.parent / 'log'}")
    else:
        doctorings, unnoticed = blind_spots(case, run, ended, reference)
        problems = [f"no check noticed this falsification: {name}" for name in unnoticed]
        passed = not problems
    has_summary = (run.directory / "summary.json").exists()
    difference = None
    if reference is not None and run.steps:
        measure = compare.largest_difference
        if not case.expect.end.each_step:
            measure = compare.end_difference
        difference = measure(run, reference)
    return Outcome(
        campaign=case.campaign,
        name=case.name,
        passed=passed,
        fingerprint=fingerprint,
        seconds=seconds,
        problems=problems,
        control=case.is_control,
        faults=len({e["fault"] for e in run.of_kind("fault_injected")}) + (ended.kills or 0),
        steps=len(run.steps),
        repairs=run.summary["repairs"] if has_summary else 0,
        difference=difference,
        doctorings=doctorings,
        status=run.summary["status"] if has_summary else "",
        run_dir=str(run.directory),
    )


def _control(case: Case, found: Sequence[Problem]) -> tuple[bool, list[str]]:
    """Whether a control failed where it must, and nowhere that would make this meaningless."""
    red = {problem.check for problem in found}
    told = [f"{problem.check}: {problem.text}" for problem in found]
    if green := [check for check in case.must_fail if check not in red]:
        return False, [f"must fail {', '.join(green)}, and is green there", *told]
    allowed = set(case.must_fail)
    if allowed & set(COMPARING):
        allowed |= set(COMPARING)
    if "exit" in allowed:  # a job that has ended early has not done the rest
        allowed |= {"steps", "events", "validation", "losses", "weights"}
    if other := sorted(red - allowed):
        return False, [
            f"fails {', '.join(other)} as well, so it may fail for another reason",
            *told,
        ]
    return True, told


def code_digest(root: Path = job.ROOT, more: Iterable[str] = ()) -> str:
    """Of all code that a campaign runs, and ``more`` files: a result of other code is not kept."""
    digest = hashlib.sha256()
    modules = [path for name in CODE for path in (root / name).rglob("*.py")]
    for file in sorted([*modules, *(root / name for name in (*SCRIPTS, *more))]):
        digest.update(f"{file.relative_to(root)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _emptied(folder: Path) -> Path:
    """An empty folder: events of an earlier launch would count as this one's."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder

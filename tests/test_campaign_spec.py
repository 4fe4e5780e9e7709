"""Campaign files: what is refused, with line, field and what to do; and that the ready ones fit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, data_prefix
from megatron_flags import parse

from megatron_ft.campaign.checks import CHECKS
from megatron_ft.campaign.job import HOOKED_SCRIPT, SCRIPT, case_command, setting_command
from megatron_ft.campaign.located import CampaignError
from megatron_ft.campaign.reading import CASE, read_campaign, read_campaigns
from megatron_ft.campaign.reading_expectations import KNOWN
from megatron_ft.campaign.spec import Count, End, Model
from megatron_ft.faults.spec import parse as parse_fault
from megatron_ft.topology import Topology

READY = sorted((ROOT / "examples" / "campaigns").glob("*.yaml"))

GOOD = """\
about: one
seed: 7
topology: {tp: 2, pp: 2, dp: 3}
model: {layers: 8}
iterations: 9
microbatches: 4
flags: --clip-grad 0.5
strategies: --ft-recover
expect: {status: degraded, end: {exact: 1e-6, later: {from: 5, bound: 1e-3}}}
cases:
  a:
    flags: --bf16
    strategies: --ft-recover-policy versatile
    faults: ["kill@3:slot=1:point=forward", stop@4:slot=2]
    expect: {events: {replica_dark: 2, slot_filled: {least: 1}}}
  b:
    topology: {dp: 2}
    model: {hidden: 64}
    spares: 1
    rates: [kill:0.02/iter]
    fault_seed: 5
    timeout: 20
    expect: {status: ok, drawn_faults: 1, end: {within: 0.1}, weights: equal, repair_s: 0.1}
controls:
  c:
    faults: [kill@3:slot=1]
    sabotage: [no-restore]
    must_fail: [losses]
"""


def written(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_campaign_is_read(tmp_path: Path) -> None:
    campaign = read_campaign(written(tmp_path, GOOD))
    a, b, c = campaign.cases
    assert [case.title for case in campaign.cases] == ["mine/a", "mine/b", "mine/c"]
    assert a.setting.topology == Topology(tensor=2, pipeline=2, data=3)
    assert a.setting.model == Model(layers=8)
    assert a.setting.flags == ("--clip-grad", "0.5", "--bf16"), "what a case has is added"
    assert a.strategies == ("--ft-recover", "--ft-recover-policy", "versatile")
    assert a.faults == ("kill@3:slot=1", "stop@4:slot=2"), "as the events spell them"
    assert a.expect.status == "degraded"
    assert a.expect.end == End(bound=1e-6, later_from=5, later_bound=1e-3)
    assert [a.expect.end.bound_at(i) for i in (4, 5)] == [1e-6, 1e-3]
    assert a.expect.events["replica_dark"] == Count(least=2, most=2)
    assert a.expect.events["slot_filled"] == Count(least=1)
    assert b.setting.topology == Topology(tensor=1, pipeline=1, data=2)
    assert b.setting.model == Model(layers=8, hidden=64)
    assert (b.expect.end.each_step, b.expect.status, b.timeout) == (False, "ok", 20)
    assert b.hooks == ("weights",) and not a.hooks
    assert c.is_control and c.must_fail == ("losses",) and c.hooks == ("no-restore",)


def test_a_case_becomes_a_command(tmp_path: Path) -> None:
    a, b, _ = read_campaign(written(tmp_path, GOOD)).cases
    command = case_command(a, Path("runs/a"), "data/x")
    assert command[3:6] == ["-n", "12", SCRIPT]
    flags = command[6:]
    assert flags[flags.index("--global-batch-size") + 1] == "12"
    assert flags.count("--ft-fault") == 2
    spare = case_command(b, Path("runs/b"), "data/x")
    assert spare[3:6] == ["-n", "3", HOOKED_SCRIPT]
    assert spare[-6:] == [
        *("--ft-spares", "1", "--ft-fault-rate", "kill:0.02/iter", "--ft-fault-seed", "5")
    ]
    fault_free = setting_command(a.setting, Path("runs/f"), "data/x")
    assert "--bf16" in fault_free and "--seed" in fault_free
    assert not [word for word in fault_free if word.startswith("--ft-") and word != "--ft-run-dir"]


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("iterations: 9\n", "", 10, "cases.a: iterations is not given: write it here, or"),
        ("seed: 7", "sede: 7", 2, "sede: there is no such field; did you mean seed?"),
        ("seed: 7", "seed: seven", 2, "seed: must be a whole number from 0 on, not 'seven'"),
        ("iterations: 9", "iterations: 0", 5, "iterations: must be a whole number from 1 on"),
        ("tp: 2", "tp: [2]", 3, "topology.tp: must be a whole number from 1 on, not a list"),
        ("tp: 2", "cp: 2", 3, "topology.cp: there is no such field"),
        ("{layers: 8}", "{layers: 7}", 3, "7 layers cannot be dealt evenly to 2 stages"),
        ("{layers: 8}", "{depth: 8}", 4, "model.depth: there is no such field"),
        ("flags: --bf16", "flags: --seed 3", 12, "use the field seed"),
        ("flags: --bf16", "flags: --ft-run-dir=x", 12, "--ft-run-dir is written by the campaign"),
        ("flags: --bf16", "flags: [--bf16]", 12, "cases.a.flags: must be text, not a list"),
        ("flags: --bf16", "flags: --a 'b", 12, "No closing quotation"),
        ("stop@4:slot=2", "stop@4:slot=12", 14, "cases.a.faults[1]: faults that cannot happen"),
        ("stop@4:slot=2", "stop@10:slot=2", 14, "the run ends with iteration 9"),
        ("stop@4:slot=2", "stpo@4:slot=2", 14, "unknown kind 'stpo'"),
        ("stop@4:slot=2", "kill@3:slot=1", 14, "given twice"),
        ("[kill:0.02/iter]", "[kill:2/iter]", 20, "cases.b.rates[0]"),
        ("drawn_faults: 1, ", "", 16, "rates and expect.drawn_faults"),
        ("status: degraded", "status: good", 9, "'good' is none of ok, degraded, stopped"),
        ("{exact: 1e-6, later", "{within: 1e-6, later", 9, "only the end is compared by `within`"),
        ("end: {within: 0.1}", "end: near", 23, "'near' is neither `exact` nor"),
        ("end: {within: 0.1}", "end: {within: 0}", 23, "must be a number above 0, not '0'"),
        ("replica_dark: 2", "replica_drak: 2", 15, "did you mean replica_dark?"),
        ("weights: equal", "weights: similar", 23, "'similar' is none of equal"),
        ("[no-restore]", "[no-restor]", 27, "'no-restor' is none of leak, no-restore"),
        ("[losses]", "[loss]", 28, "controls.c.must_fail[0]: 'loss' is none of exit"),
        ("    must_fail: [losses]\n", "", 25, "which checks it must fail"),
        ("  c:\n", "  a:\n", 25, "a case has this name already"),
        ("    faults: [kill@3:slot=1]\n", "", 25, "nothing strikes here"),
        ("timeout: 20", "timeout: -1", 22, "cases.b.timeout: must be a number above 0"),
        ("  b:\n", "  a:\n", 16, "cases.a: is given twice"),
        ("cases:\n", "cases: {}\nmore:\n", 11, "more: there is no such field"),
        ("about: one", "about: [one", 2, "this is no YAML"),
        ("spares: 1", "punisher: {mtbf: 3}", 19, "cases.b.punisher: needs seconds"),
    ],
)
def test_a_mistake_is_named_with_its_line(
    old: str, new: str, line: int, says: str, tmp_path: Path
) -> None:
    assert GOOD.count(old) >= 1
    path = written(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(CampaignError) as error:
        read_campaign(path)
    assert says in str(error.value)
    assert str(error.value).startswith(f"{path}:{line}: "), error.value


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CampaignError, match=r"nowhere.yaml: No such file.*give the path"):
        read_campaign(tmp_path / "nowhere.yaml")
    with pytest.raises(CampaignError, match="the file is empty"):
        read_campaign(written(tmp_path, ""))
    with pytest.raises(CampaignError, match="must be a mapping"):
        read_campaign(written(tmp_path, "- a\n"))
    with pytest.raises(CampaignError, match="a campaign needs cases"):
        read_campaign(written(tmp_path, "seed: 1\n"))
    (tmp_path / "other").mkdir()
    twins = [written(tmp_path, GOOD), written(tmp_path / "other", GOOD)]
    with pytest.raises(CampaignError, match="have the same name"):
        read_campaigns(twins)


def test_what_grows_is_counted_where_one_process_is_a_replica(tmp_path: Path) -> None:
    growth = "{growth: {process: 4, resident_mb: 24}}"
    text = GOOD.replace("{events: {replica_dark: 2, slot_filled: {least: 1}}}", growth)
    with pytest.raises(CampaignError, match=r"mine.yaml:15: cases.a.expect.growth: .* pp: 1 only"):
        read_campaign(written(tmp_path, text))


# --- those that are ready ------------------------------------------------------------------------


def test_ready_campaigns_have_flags_that_there_are() -> None:
    for campaign in read_campaigns(READY):
        for case in campaign.cases:
            parse(case_command(case, Path("runs/x"), "data/x")[6:])


@pytest.mark.slow  # some forty command lines
def test_ready_campaigns_have_flags_that_go_together(tmp_path: Path) -> None:
    """Megatron's parser and every refusal, all in one process so that Megatron is imported once."""
    asked: dict[str, list[object]] = {}
    seen = set()
    for case in (case for campaign in read_campaigns(READY) for case in campaign.cases):
        slots = case.setting.topology.num_slots
        if (alike := (case.setting, case.strategies, case.spares)) not in seen:
            asked[case.title] = [slots, case_command(case, tmp_path, data_prefix())[6:]]
        if case.setting not in seen:
            fault_free = setting_command(case.setting, tmp_path, data_prefix())
            asked[f"{case.title}, fault-free"] = [slots, fault_free[6:]]
        seen |= {alike, case.setting}
    cases, answers = tmp_path / "cases.json", tmp_path / "answers.json"
    cases.write_text(json.dumps([*asked.values(), [2, ["--ft-checkfree"]]]))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/workers/flags_worker.py"), str(cases), str(answers)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    *said, control = json.loads(answers.read_text())
    assert control is not None, "what cannot work is refused"
    assert {name: text for name, text in zip(asked, said, strict=True) if text} == {}


def test_the_example_of_the_page_can_be_read(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "campaigns.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    campaign = read_campaign(written(tmp_path, block))
    assert [case.is_control for case in campaign.cases] == [False, True]
    for check in CHECKS:
        assert f"`{check}`" in page, check
    for known in (*CASE, *KNOWN, "sabotage", "must_fail"):
        assert f"`{known}`" in page or f"{known}:" in page, known


def test_ready_campaigns_cover_what_they_should() -> None:
    campaigns = {campaign.name: campaign for campaign in read_campaigns(READY)}
    assert set(campaigns) >= {
        *("matrix", "shrink", "punisher", "stage_by_stage", "ladder", "sample")
    }
    for name, campaign in campaigns.items():
        # Every case is also falsified in all ways of doctor.py; these are launched.
        assert name == "sample" or any(case.is_control for case in campaign.cases), name
    sample = campaigns["sample"].cases
    assert len(sample) + len({case.setting for case in sample}) <= 2, "launches"
    ladder = {flag for case in campaigns["ladder"].cases for flag in case.strategies}
    ladder |= {flag for case in campaigns["ladder"].cases for flag in case.setting.flags}
    assert ladder >= {"--ft-recover", "--ft-respawn", "--ft-checkfree-plus", "--ft-spare-warm"}


def test_the_matrix_has_every_kind_at_every_point() -> None:
    (campaign,) = (c for c in read_campaigns(READY) if c.name == "matrix")
    faults = [parse_fault(fault) for case in campaign.cases for fault in case.faults]
    assert {fault.kind for fault in faults} == {
        *("kill", "stop", "exit", "exception", "loop", "hold-gil")
    }
    points = {"forward", "backward", "reduce", "reduced", "voted", "optimizer", "logging"}
    assert {fault.point for fault in faults} == points | {"eval", "repair", "pool"}
    assert {case.setting.topology.tensor for case in campaign.cases} == {1, 2}
    assert len([case for case in campaign.cases if not case.is_control]) >= 16

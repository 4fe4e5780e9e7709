"""From a YAML file to a campaign; whatever could not be run is refused before anything is."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path

from megatron_ft.campaign.checks import CHECKS
from megatron_ft.campaign.hooks import SABOTAGE
from megatron_ft.campaign.located import CampaignError, Located
from megatron_ft.campaign.reading_expectations import read_expectation
from megatron_ft.campaign.spec import (
    Campaign,
    Case,
    Model,
    Punisher,
    Setting,
)
from megatron_ft.faults import spec as fault_spec
from megatron_ft.faults.rates import parse_rate
from megatron_ft.topology import Topology

SETTING = ("seed", "topology", "model", "iterations", "microbatches", "flags")
SHARED = (*SETTING, "strategies", "timeout", "expect")
CASE = (*SHARED, "about", "spares", "faults", "rates", "fault_seed", "punisher")
CONTROL = (*CASE, "sabotage", "must_fail")
OURS = {
    "--tensor-model-parallel-size": "topology",
    "--pipeline-model-parallel-size": "topology",
    "--num-layers": "model",
    "--hidden-size": "model",
    "--ffn-hidden-size": "model",
    "--seq-length": "model",
    "--global-batch-size": "microbatches",
    "--micro-batch-size": "microbatches",
    "--train-iters": "iterations",
    "--seed": "seed",
    "--ft-fault": "faults",
    "--ft-fault-rate": "rates",
    "--ft-fault-seed": "fault_seed",
    "--ft-spares": "spares",
    "--ft-run-dir": "",
    "--data-path": "",
}
"""Flags that a campaign writes itself, and the field that says what they are."""

Fields = dict[str, Located]


def read_campaign(path: Path) -> Campaign:
    """Read a campaign.

    Raises:
        CampaignError: It cannot be run as written; names file, line and field, and what to do.
    """
    whole = Located.load(path)
    top = whole.fields(("about", *SHARED, "cases", "controls"))
    if "cases" not in top:
        whole.fail("a campaign needs cases, as in `cases: {a-kill: {faults: [kill@3:slot=0]}}`")
    shared = {name: value for name, value in top.items() if name in SHARED}
    cases = [
        _read_case(path.stem, name, value, shared, CASE)
        for name, value in top["cases"].fields().items()
    ]
    if not cases:
        top["cases"].fail("there is none; a campaign without a case proves nothing")
    controls = top["controls"].fields() if "controls" in top else {}
    for name, value in controls.items():
        if any(case.name == name for case in cases):
            value.fail("a case has this name already; give the control another one")
        cases.append(_read_case(path.stem, name, value, shared, CONTROL))
    return Campaign(path, path.stem, tuple(cases))


def read_campaigns(paths: list[Path]) -> list[Campaign]:
    """Read several; each needs a name of its own, which is that of its file."""
    campaigns = [read_campaign(path) for path in paths]
    for i, campaign in enumerate(campaigns):
        for other in campaigns[:i]:
            if other.name == campaign.name:
                raise CampaignError(
                    f"{campaign.file} and {other.file} have the same name, and so the same place "
                    "for their results: rename one"
                )
    return campaigns


def _read_case(
    campaign: str, name: str, where: Located, shared: Fields, known: tuple[str, ...]
) -> Case:
    own = where.fields(known)
    # What adds up is read from both; of anything else the case's own goes before the campaign's.
    setting = _read_setting(where, own, shared)
    spares = own["spares"].integer() if "spares" in own else 0
    strategies = _words("strategies", shared, own)
    timeout = own.get("timeout") or shared.get("timeout")
    case = Case(
        campaign=campaign,
        name=name,
        setting=setting,
        strategies=strategies,
        spares=spares,
        faults=_read_faults(own, setting),
        rates=_read_rates(own),
        fault_seed=own["fault_seed"].integer() if "fault_seed" in own else 0,
        punisher=_read_punisher(own),
        sabotage=_read_sabotage(own),
        expect=read_expectation(shared.get("expect"), own.get("expect"), setting),
        must_fail=_read_must_fail(own),
        timeout=timeout.number() if timeout else Case.timeout,
    )
    if not (case.faults or case.rates or case.punisher):
        where.fail("nothing strikes here: give faults, rates or a punisher")
    if known is CONTROL and not case.must_fail:
        where.fail("a control says which checks it must fail, as in `must_fail: [losses]`")
    if bool(case.rates) != bool(case.expect.drawn_faults):
        where.fail("rates and expect.drawn_faults, how many must strike at least, go together")
    return case


def _read_setting(where: Located, own: Fields, shared: Fields) -> Setting:
    def of(name: str) -> Located:
        found = own.get(name) or shared.get(name)
        if found is None:
            where.fail(f"{name} is not given: write it here, or for all cases at the top")
        return found

    sizes = {"tp": 1, "pp": 1, "dp": 1}
    for name, value in of("topology").fields(sizes).items():
        sizes[name] = value.integer(1)
    model: dict[str, int] = {}
    for source in (shared.get("model"), own.get("model")):
        if source is not None:
            known = [f.name for f in fields(Model)]
            model |= {name: value.integer(1) for name, value in source.fields(known).items()}
    setting = Setting(
        topology=Topology(tensor=sizes["tp"], pipeline=sizes["pp"], data=sizes["dp"]),
        model=Model(**model),
        seed=of("seed").integer(),
        iterations=of("iterations").integer(1),
        microbatches=of("microbatches").integer(1),
        flags=_words("flags", shared, own),
    )
    if setting.model.layers % sizes["pp"]:
        of("topology").fail(
            f"{setting.model.layers} layers cannot be dealt evenly to {sizes['pp']} stages: "
            "change pp, or layers in model"
        )
    return setting


def _words(name: str, shared: Fields, own: Fields) -> tuple[str, ...]:
    """Command-line words of the campaign and of the case, in this order."""
    words: list[str] = []
    for source in (shared.get(name), own.get(name)):
        if source is None:
            continue
        try:
            here = shlex.split(source.text())
        except ValueError as error:
            source.fail(f"{error}, in a text of command-line flags")
        for word in here:
            flag = word.partition("=")[0]
            if flag in OURS:
                field = OURS[flag]
                source.fail(
                    f"{flag} is written by the campaign"
                    + (f": use the field {field}" if field else "; leave it out")
                )
        words += here
    return tuple(words)


def _read_faults(own: Fields, setting: Setting) -> tuple[str, ...]:
    if "faults" not in own:
        return ()
    found: list[fault_spec.FaultSpec] = []
    for value in own["faults"].items():
        try:
            fault = fault_spec.parse(value.text())
            fault_spec.validate(
                [*found, fault],
                num_slots=setting.topology.num_slots,
                num_stages=setting.topology.pipeline,
                train_iters=setting.iterations,
            )
        except fault_spec.FaultSpecError as error:
            value.fail(f"{error} (docs/faults.md)")
        found.append(fault)
    return tuple(str(fault) for fault in found)


def _read_rates(own: Fields) -> tuple[str, ...]:
    rates = own["rates"].items() if "rates" in own else []
    for value in rates:
        try:
            parse_rate(value.text())
        except fault_spec.FaultSpecError as error:
            value.fail(f"{error} (docs/faults.md)")
    return tuple(value.text() for value in rates)


def _read_punisher(own: Fields) -> Punisher | None:
    if "punisher" not in own:
        return None
    given = own["punisher"].fields([f.name for f in fields(Punisher)])
    for name in ("mtbf", "seconds"):
        if name not in given:
            own["punisher"].fail(f"needs {name}, in seconds")
    return Punisher(
        mtbf=given["mtbf"].number(),
        seconds=given["seconds"].number(),
        seed=given["seed"].integer() if "seed" in given else Punisher.seed,
        least_kills=given["least_kills"].integer(1) if "least_kills" in given else 1,
    )


def _read_sabotage(own: Fields) -> tuple[str, ...]:
    return tuple(v.one_of(SABOTAGE) for v in own["sabotage"].items()) if "sabotage" in own else ()


def _read_must_fail(own: Fields) -> tuple[str, ...]:
    if "must_fail" not in own:
        return ()
    return tuple(v.one_of(CHECKS) for v in own["must_fail"].items())

"""The `expect` of a campaign: what must be true of a run besides the invariants."""

from __future__ import annotations

from megatron_ft.campaign.located import Located
from megatron_ft.campaign.spec import Count, End, Expectation, Growth, Setting
from megatron_ft.observe.event_table import KINDS, STATUSES

KNOWN = (
    *("exit_code", "status", "message", "end", "weights", "events", "growth", "repair_s"),
    "drawn_faults",
)


def read_expectation(shared: Located | None, own: Located | None, setting: Setting) -> Expectation:
    """That of a case: what it says itself goes before what the campaign says for all."""
    given: dict[str, Located] = {}
    for source in (shared, own):
        if source is not None:
            given |= source.fields(KNOWN)

    def of(name: str) -> Located | None:
        value = given.get(name)
        return None if value is None or value.is_empty else value

    exit_code, status, message = of("exit_code"), of("status"), of("message")
    end, weights, events = of("end"), of("weights"), of("events")
    growth, repair, drawn = of("growth"), of("repair_s"), of("drawn_faults")
    if growth is not None and setting.topology.replica_size > 1:
        growth.fail("what one process holds is counted in jobs of tp: 1 and pp: 1 only")
    return Expectation(
        exit_code=exit_code.integer() if exit_code else 0,
        status=status.one_of(STATUSES) if status else None,
        message=message.text() if message else None,
        end=_end(end) if end else End(),
        weights_equal=weights is not None and weights.one_of(["equal"]) == "equal",
        events=_events(events) if events else {},
        growth=_growth(growth, setting) if growth else None,
        repair_s=repair.number() if repair else None,
        drawn_faults=drawn.integer(1) if drawn else 0,
    )


def _end(where: Located) -> End:
    if where.value == "exact":
        return End()
    if isinstance(where.value, str):
        where.fail(f"{where.value!r} is neither `exact` nor `{{within: BOUND}}`")
    given = where.fields(("exact", "within", "later"))
    if ("exact" in given) == ("within" in given):
        where.fail("give one of `exact: BOUND`, for each step, and `within: BOUND`, for the end")
    if "within" in given:
        if "later" in given:
            given["later"].fail("only the end is compared by `within`; leave it out")
        return End(bound=given["within"].number(), each_step=False)
    if "later" not in given:
        return End(bound=given["exact"].number())
    later = given["later"].fields(("from", "bound"))
    if set(later) != {"from", "bound"}:
        given["later"].fail("needs `from`, a step, and `bound`")
    return End(
        bound=given["exact"].number(),
        later_from=later["from"].integer(1),
        later_bound=later["bound"].number(),
    )


def _events(where: Located) -> dict[str, Count]:
    counts = {}
    for kind, value in where.fields(KINDS).items():
        if isinstance(value.value, int):
            counts[kind] = Count(least=value.integer(), most=value.integer())
            continue
        if "least" not in (given := value.fields(("least",))):
            value.fail("give a number, or `{least: N}`")
        counts[kind] = Count(least=given["least"].integer())
    return counts


def _growth(where: Located, setting: Setting) -> Growth:
    given = where.fields(("process", "resident_mb"))
    if set(given) != {"process", "resident_mb"}:
        where.fail("needs `process`, one that lives through, and `resident_mb`")
    process = given["process"].integer()
    if process >= setting.topology.num_slots:
        given["process"].fail(f"the job has processes 0 to {setting.topology.num_slots - 1}")
    return Growth(process=process, resident_mb=given["resident_mb"].number())

"""The relay of mpirun's output, on text as mpirun 5.0.11 prints it."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.world.relay import Relay

RULE = b"-" * 74 + b"\n"
DEATH = (
    RULE + b"prterun noticed that process rank 1 with PID 5 on node a exited\non signal 9.\n" + RULE
)
OTHER = RULE + b"There are not enough slots available in the system.\n" + RULE
TEXT = (
    b"[1,0]<stdout>: step 1\n"
    + DEATH
    + b"[1,10]<stderr>: \n[1,2]<stdout>: no newline[1,3]<stdout>: the next\n"
    + OTHER
    + DEATH
    + b"from a spawned process\n[1,0]<stdout>: the end"
)
SHOWN = (
    b"[0] step 1\n[10] \n[2] no newline\n[3] the next\n"
    + OTHER
    + b"from a spawned process\n[0] the end\n"
)


def test_a_full_disk_does_not_end_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "wb") as full:
        relay = Relay(full)
        relay.feed(b"[1,0]<stdout>: one\n")
        relay.feed(b"[1,0]<stdout>: two\n")
    said = capfd.readouterr().err
    assert said.count("output is lost") == 1 and "No space" in said


@given(st.lists(st.integers(1, len(TEXT) - 1), max_size=8).map(sorted))
def test_pieces_of_any_size_read_the_same(cuts: list[int]) -> None:
    sink = io.BytesIO()
    relay = Relay(sink)
    for start, end in zip([0, *cuts], [*cuts, len(TEXT)], strict=True):
        if start < end:
            relay.feed(TEXT[start:end])
    relay.feed(b"")
    assert sink.getvalue() == SHOWN
    assert relay.notices == DEATH + DEATH


def test_the_top_of_a_box_is_not_swallowed_at_the_end() -> None:
    sink = io.BytesIO()
    relay = Relay(sink)
    relay.feed(RULE)
    relay.feed(b"")
    assert sink.getvalue() == RULE

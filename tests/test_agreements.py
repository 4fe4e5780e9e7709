"""Agreements while another thread is inside MPI: what comes of them, and what is done about it."""

from __future__ import annotations

import functools
import operator

import pytest
from harness import assert_faults_fired, assert_same_training, launch
from hypothesis import given
from hypothesis import strategies as st
from mpi_job import Ended, run_ranks

from megatron_ft.world.agreement import SAID, WHOLE, agreement


def agreements(*how: str) -> Ended:
    return run_ranks(3, "agreements_worker.py", *how, timeout_s=90)


def test_who_agrees_is_alone_in_mpi() -> None:
    ended = agreements()
    assert ended.output.count("0 garbled") == 2, ended.output


def test_with_another_thread_beside_it_words_are_garbled() -> None:
    """The negative control. When Open MPI no longer needs it, this fails: take it out.

    Usually within two seconds; where other work keeps the threads from running at the same time,
    the 40 seconds of one launch were once not enough.
    """
    for _ in range(4):
        ended = agreements("plain")
        if "1 garbled" in ended.output:
            return
    raise AssertionError(ended.output)


@pytest.mark.parametrize("which", ["garbled", "garbled-second"])
def test_a_word_that_comes_garbled_to_one_parts_nobody(which: str) -> None:
    """The first of two words: all say no, and vote again. The second: all know enough."""
    job = {"pp": 1, "dp": 2, "iters": 12}
    reference = launch(**job)
    run = launch(
        *("--ft-recover", "--ft-fault", "slow@5:slot=0:s=0.01"),  # one that shows that it was there
        script="tests/recover_entry.py",
        env={"RECOVER_TEST": which},
        **job,
    )
    assert run.returncode == 0, run.output[-5000:]
    assert_faults_fired(run, 1)
    assert ("came garbled: this process objects" in run.output) is (which == "garbled")
    repairs = [e for e in run.of_kind("repaired") if e["iteration"] == 5]
    assert len(repairs) == (which == "garbled")
    assert run.of_kind("fault_detected") == [] and run.of_kind("slot_filled") == []
    assert run.summary["live_replicas"] == 2
    assert_same_training(run, reference)


@pytest.mark.parametrize(
    ("come", "outcome", "heard"),
    [
        ((WHOLE | 3, WHOLE | 1), 3, True),
        ((WHOLE | 2, WHOLE | 1), 2, True),
        ((WHOLE | 3, WHOLE), 0, True),  # to another one it came garbled, or one has died
        ((3, WHOLE), 0, False),
        ((0x7F001234, 0x7F001234), 0, False),
        ((WHOLE | 1, 0x7F001234), 1, True),
        ((WHOLE, WHOLE), 0, True),
    ],
)
def test_what_is_made_of_two_words(come: tuple[int, int], outcome: int, heard: bool) -> None:
    said, words = [], list(come)

    def agree(word: int) -> int:
        said.append(word)
        return words.pop(0)

    assert agreement(agree, 3) == outcome
    assert said == [WHOLE | 3, WHOLE | heard]


@given(st.lists(st.integers(0, 255), min_size=1, max_size=5), st.data())
def test_all_decide_alike_where_one_word_comes_garbled(
    said: list[int], data: st.DataObject
) -> None:
    """Processes in turns: what each says, what all of it comes to, what one of them hears of it."""
    place = data.draw(st.tuples(st.integers(0, 1), st.integers(0, len(said) - 1)))
    garbage = data.draw(st.integers(0, 2**31 - 1).filter(lambda word: word & ~SAID != WHOLE))
    firsts = [WHOLE | bits for bits in said]
    heard = [[functools.reduce(operator.and_, firsts)] * len(said)]
    if place[0] == 0:
        heard[0] = [garbage if at == place[1] else word for at, word in enumerate(heard[0])]
    seconds: list[int] = []
    for word, first in zip(heard[0], firsts, strict=True):
        script, told = [word, WHOLE], list[int]()
        agreement(lambda w, s=script, t=told: (t.append(w), s.pop(0))[1], first & SAID)
        seconds.append(told[1])
    heard.append([functools.reduce(operator.and_, seconds)] * len(said))
    if place[0] == 1:
        heard[1][place[1]] = garbage
    outcomes = set()
    for one, two, first in zip(*heard, firsts, strict=True):
        script = [one, two]
        outcomes.add(agreement(lambda w, s=script: s.pop(0), first & SAID))
    assert len(outcomes) == 1
    if place[0] == 1:
        assert outcomes == {functools.reduce(operator.and_, said)}

"""Orders to a running job: status, drain, respawn; and what is refused."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import ROOT, Run, assert_same_training, launch, relative
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.control.orders import Order, Orders, check_drain, status
from megatron_ft.control.protocol import SOCKET, ControlError, ask
from megatron_ft.control.server import ControlServer
from megatron_ft.control.session_orders import Control
from megatron_ft.observe.rundir import RunDirectory
from megatron_ft.rejoin.refill import drainable, processes_of, release_broken
from megatron_ft.topology import Topology, initial_assignment

TOPOLOGY = {"tp": 1, "pp": 1, "dp": 3, "iters": 60}
# Steps that sleep, in the replica that stays, leave the processor to newcomers, which import and
# build for some seconds.
LINGER = ("--ft-fault", "slow@2:slot=1:s=0.15:for=58")


def ctl(run_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/ft_ctl.py", str(run_dir), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def wait_for_step(run_dir: Path, iteration: int) -> None:
    events, end = run_dir / "events.jsonl", time.monotonic() + 300
    while time.monotonic() < end:
        if events.exists() and f'"id": "0:step-{iteration}"' in events.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"no step {iteration} in {events}")


@pytest.fixture(scope="module")
def reference() -> Run:
    return launch("--ft-recover", *LINGER, **TOPOLOGY)


def test_a_replica_leaves_and_comes_back_by_hand(reference: Run, tmp_path: Path) -> None:
    said: dict[str, subprocess.CompletedProcess[str]] = {}
    wrong: list[BaseException] = []

    def operate() -> None:
        try:
            wait_for_step(tmp_path, 3)
            said["before"] = ctl(tmp_path, "--json", "status")
            # The last replica writes the events: its leaving moves the socket as well.
            said["drain"] = ctl(tmp_path, "drain", "2")
            said["again"] = ctl(tmp_path, "drain", "2")
            said["none"] = ctl(tmp_path, "drain", "7")
            said["dark"] = ctl(tmp_path, "status")
            said["second"] = ctl(tmp_path, "drain", "0")
            said["last"] = ctl(tmp_path, "drain", "1")
            said["respawn"] = ctl(tmp_path, "respawn")
        except BaseException as error:
            wrong.append(error)

    operator = threading.Thread(target=operate)
    operator.start()
    run = launch("--ft-recover", *LINGER, run_dir=tmp_path, **TOPOLOGY)
    operator.join()
    assert not wrong, wrong
    assert run.returncode == 0, run.output[-4000:]
    for name in ("before", "drain", "dark", "second", "respawn"):
        assert said[name].returncode == 0, said[name]
    before = json.loads(said["before"].stdout)
    assert [row["process"] for row in before["slots"]] == [0, 1, 2]
    assert len(set(before["pids"].values())) == 3
    assert "processes 2 end" in said["drain"].stdout
    assert "asked to leave" in said["dark"].stdout
    assert said["again"].returncode == 1 and "dark already" in said["again"].stderr
    assert said["none"].returncode == 1 and "0 to 2" in said["none"].stderr
    assert said["last"].returncode == 1 and "the last one" in said["last"].stderr

    assert [e["reason"] for e in run.of_kind("replica_dark")] == ["asked to leave"] * 2
    assert not run.of_kind("fault_detected"), "leaving as asked is no failure"
    assert {e["slot"] for e in run.of_kind("slot_filled")} == {0, 2}, run.output[-3000:]
    assert run.summary["status"] == "ok"
    # Rounding is amplified to about 1e-6 in sixty steps; one microbatch less would be 1e-4.
    assert_same_training(run, reference, bound=1e-5)
    early = [i for i in run.losses if i <= 40]
    assert all(relative(reference.losses[i], run.losses[i]) <= 1e-6 for i in early)
    assert not (tmp_path / SOCKET).exists()
    after = ctl(tmp_path, "status")
    assert after.returncode == 1 and "no job answers" in after.stderr
    listed = ctl(tmp_path, "--json", "incidents")
    assert listed.returncode == 0 and len(json.loads(listed.stdout)) == run.summary["repairs"]


# -- without a job ---------------------------------------------------------------------------------


def test_the_server_answers_refuses_and_survives_nonsense(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)  # longer than a socket's path may be
    deep.mkdir(parents=True)

    def handle(message: dict[str, Any], gone: Callable[[], bool]) -> dict[str, Any]:
        assert not gone()
        if message.get("order") != "status":
            raise ControlError("no such order")
        return {"fine": True}

    server = ControlServer(deep, handle)
    server.open()
    server.open()
    assert ask(deep, {"order": "status"}, 5) == {"fine": True}
    with pytest.raises(ControlError, match="no such order"):
        ask(deep, {"order": "x"}, 5)
    with socket.socket(socket.AF_UNIX) as rude:
        import os

        directory = os.open(deep, os.O_RDONLY)
        rude.connect(f"/proc/self/fd/{directory}/{SOCKET}")
        os.close(directory)
        rude.sendall(b"this is no JSON\n")
        assert "not JSON" in json.loads(rude.recv(1000))["error"]
    # The next elected process takes the socket over, and the first one's end leaves it alone.
    successor = ControlServer(deep, lambda message, gone: {"successor": True})
    successor.open()
    server.close(last=False)
    assert ask(deep, {"order": "status"}, 5) == {"successor": True}
    successor.close(last=True)
    with pytest.raises(ControlError, match="no job answers"):
        ask(deep, {"order": "status"}, 5)
    with pytest.raises(ControlError, match="no run directory"):
        ask(tmp_path / "nowhere", {"order": "status"}, 5)


def test_wrong_arguments_end_with_64(tmp_path: Path) -> None:
    assert ctl(tmp_path).returncode == 64
    assert ctl(tmp_path, "drain", "two").returncode == 64
    assert ctl(tmp_path, "incidents").returncode == 1


def test_orders_wait_for_the_repair_that_hears_them() -> None:
    orders = Orders()
    assert orders.tell(boundary=True) == {} and not orders.pending
    first, second = Order(replica=1), Order(respawn=True)
    orders.add(first)
    assert orders.tell(boundary=True) == {"drain": (1,), "respawn": False}
    assert orders.tell(boundary=False) == {} and orders.told() == [], "it waits again"
    assert orders.tell(boundary=True) == {"drain": (1,), "respawn": False}
    orders.add(second)
    assert orders.told() == [first], "the second came too late for this repair"
    assert orders.pending
    orders.give_up("gone")
    assert second.answer == {"error": "gone"} and second.done.is_set() and not orders.pending
    assert not first.done.is_set()


def test_an_order_that_nobody_waits_for_is_taken_back(tmp_path: Path) -> None:
    """Unless the others have been told of it."""
    session: Any = SimpleNamespace(observer=SimpleNamespace(run_dir=RunDirectory(tmp_path)))
    control = Control(session)
    control.elect(True)
    taken = []
    add = control.orders.add
    control.orders.add = lambda order: (taken.append(order), add(order))  # type: ignore
    with pytest.raises(ControlError, match="taken back unless it has begun"):
        ask(tmp_path, {"order": "respawn"}, 0.5)
    assert len(taken) == 1 and not taken[0].done.is_set()
    end = time.monotonic() + 20
    while control.orders.pending and time.monotonic() < end:
        time.sleep(0.05)
    assert not control.orders.pending
    order = Order(respawn=True)
    control.orders.add(order)
    control.orders.tell(boundary=True)
    assert not control.orders.withdraw(order)
    assert control.orders.told() == [order]
    control.close(last=True)


def test_an_order_that_somebody_waits_for_is_answered(tmp_path: Path) -> None:
    """Who asks stays connected, and the answer comes later than the first look at that."""
    session: Any = SimpleNamespace(observer=SimpleNamespace(run_dir=RunDirectory(tmp_path)))
    control = Control(session)
    control.elect(True)

    def carry_out() -> None:
        while not control.orders.pending:
            time.sleep(0.01)
        time.sleep(1.0)
        control.orders.tell(boundary=True)
        for order in control.orders.told():
            order.reply(iteration=7)

    threading.Thread(target=carry_out, daemon=True).start()
    assert ask(tmp_path, {"order": "respawn"}, 20) == {"iteration": 7}
    control.close(last=True)


@given(data=st.data())
def test_a_drain_always_leaves_a_whole_replica(data: st.DataObject) -> None:
    topology = Topology(
        tensor=data.draw(st.integers(1, 2)),
        pipeline=data.draw(st.integers(1, 3)),
        data=data.draw(st.integers(1, 5)),
    )
    before = initial_assignment(topology, range(topology.num_slots + 2))
    dead = frozenset(data.draw(st.sets(st.integers(0, topology.num_slots - 1))))
    asked = data.draw(st.sets(st.integers(0, topology.data - 1)))
    whole = set(release_broken(topology, before, dead).assignment.whole_replicas(topology))
    gone = drainable(topology, before, dead, asked)
    plan = release_broken(topology, before, dead, leaving=gone)
    left = set(plan.assignment.whole_replicas(topology))
    assert left == whole - set(gone)
    assert set(gone) <= asked & whole
    if whole:
        assert left
    else:
        assert not gone
    served = processes_of(topology, before, gone)
    assert not served & set(plan.assignment.active_processes)


def test_what_may_not_leave() -> None:
    topology = Topology(tensor=1, pipeline=2, data=2)
    whole = initial_assignment(topology, range(4))
    check_drain(topology, whole, 1)
    with pytest.raises(ControlError, match="0 to 1"):
        check_drain(topology, whole, 2)
    lost = release_broken(topology, whole, frozenset({3})).assignment
    with pytest.raises(ControlError, match="dark already"):
        check_drain(topology, lost, 1)
    with pytest.raises(ControlError, match="the last one"):
        check_drain(topology, lost, 0)
    shown = status(topology, lost)
    assert shown["dark_replicas"] == [1] and shown["pool"] == [1]
    assert [row["process"] for row in shown["slots"]] == [0, None, 2, None]

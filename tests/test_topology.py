"""Slot numbering against Megatron-Core's own, and what assignments promise."""

from __future__ import annotations

import itertools

import pytest

from megatron_ft.topology import Assignment, Coordinate, Order, Shard, Topology, initial_assignment

ORDERS: tuple[Order, ...] = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
SIZES = list(itertools.product((1, 2, 3), (1, 2), (1, 2, 4), (1, 3)))


@pytest.mark.parametrize("order", ORDERS)
def test_slots_are_numbered_as_megatron_numbers_ranks(order: Order) -> None:
    from megatron.core.parallel_state import RankGenerator

    for tensor, context, pipeline, data in SIZES:
        generator = RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order=order)
        topology = Topology(
            tensor=tensor, context=context, pipeline=pipeline, data=data, order=order
        )
        slots = range(topology.num_slots)
        assert topology.num_slots == generator.world_size
        assert {topology.peers(s) for s in slots} == set(map(tuple, generator.get_ranks("dp")))
        columns = {c for dp in range(data) for c in topology.columns(dp)}
        assert columns == set(map(tuple, generator.get_ranks("pp")))
        # Groups are ordered within; this fixes each dimension's own direction.
        for name in ("tp", "cp", "pp", "dp"):
            for group in generator.get_ranks(name):
                assert [getattr(topology.coordinate(s), name) for s in group] == list(
                    range(len(group))
                )
        replicas = {topology.replica(dp) for dp in range(data)}
        assert replicas == set(map(tuple, generator.get_ranks("tp-cp-pp")))
        stages = {topology.stage(pp) for pp in range(pipeline)}
        assert stages == set(map(tuple, generator.get_ranks("tp-cp-dp")))
        shards = {
            tuple(s for s in slots if topology.shard_of(s) == shard) for shard in topology.shards
        }
        assert shards == set(map(tuple, generator.get_ranks("dp-cp")))


@pytest.mark.parametrize("order", ORDERS)
def test_coordinates_and_slots_are_inverse(order: Order) -> None:
    for tensor, context, pipeline, data in SIZES:
        topology = Topology(
            tensor=tensor, context=context, pipeline=pipeline, data=data, order=order
        )
        for slot in range(topology.num_slots):
            at = topology.coordinate(slot)
            assert topology.slot(**at._asdict()) == slot
            assert slot in topology.replica(topology.replica_of(slot))
            assert slot in topology.stage(topology.stage_of(slot))
            assert topology.peers(slot)[at.dp] == slot
            assert len(topology.replica(at.dp)) == topology.replica_size


def test_the_two_orders_differ_where_expected() -> None:
    default = Topology(tensor=2, pipeline=2, data=2)
    mapped = Topology(tensor=2, pipeline=2, data=2, order="tp-cp-ep-pp-dp")
    assert default.coordinate(5) == Coordinate(tp=1, cp=0, pp=1, dp=0)
    assert mapped.coordinate(5) == Coordinate(tp=1, cp=0, pp=0, dp=1)
    assert default.replica(0) == (0, 1, 4, 5)
    assert mapped.replica(0) == (0, 1, 2, 3)


def test_bad_sizes_and_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="pipeline must be at least 1"):
        Topology(tensor=1, pipeline=0, data=1)
    with pytest.raises(ValueError, match="unknown order"):
        Topology(tensor=1, pipeline=1, data=1, order="dp-tp")  # type: ignore[arg-type]


def test_one_process_a_slot() -> None:
    topology = Topology(tensor=2, pipeline=2, data=2)
    assignment = initial_assignment(topology, range(8))
    assert assignment == Assignment(0, tuple(range(8)))
    assignment.check(topology)
    assert assignment.whole_replicas(topology) == (0, 1)
    assert assignment.dark_replicas(topology) == ()


def test_extra_processes_wait_in_the_pool() -> None:
    topology = Topology(tensor=1, pipeline=2, data=2)
    assignment = initial_assignment(topology, [9, 3, 5, 4, 7, 20])
    assert assignment == Assignment(0, (3, 4, 5, 7), (9, 20))


def test_a_start_with_fewer_processes_fills_whole_replicas() -> None:
    topology = Topology(tensor=2, pipeline=2, data=3)
    assignment = initial_assignment(topology, range(11))
    assignment.check(topology)
    assert assignment.whole_replicas(topology) == (0, 1)
    assert assignment.dark_replicas(topology) == (2,)
    assert assignment.pool == (8, 9, 10)
    assert assignment.active_processes == tuple(range(8))
    assert assignment.vacant_slots == topology.replica(2)


def test_a_start_needs_one_replica() -> None:
    topology = Topology(tensor=2, pipeline=2, data=2)
    with pytest.raises(ValueError, match="3 processes cannot fill one replica of 4"):
        initial_assignment(topology, range(3))
    with pytest.raises(ValueError, match="given twice"):
        initial_assignment(topology, [0, 1, 1, 2])


def test_an_adopter_serves_its_own_slot_first() -> None:
    topology = Topology(tensor=1, pipeline=3, data=1)
    assignment = Assignment(4, (7, 7, 8), (2,), adopted=(0,))
    assignment.check(topology)
    assert assignment.slots_of(7) == (1, 0)
    assert assignment.slots_of(8) == (2,)
    assert assignment.slots_of(2) == ()
    assert assignment.processes == (2, 7, 8)
    assert assignment.degraded_stages(topology) == {(0, 0), (0, 1)}


def test_joined_processes_wait_in_the_pool() -> None:
    assignment = Assignment(4, (0, None), (5,))
    assert assignment.joined([3, 9]) == Assignment(4, (0, None), (3, 5, 9))
    with pytest.raises(AssertionError, match="already in the world"):
        assignment.joined([5])


@pytest.mark.parametrize(
    "assignment",
    [
        Assignment(0, (0, 1, 2)),  # too few slots
        Assignment(0, (0, 1, 2, 3), (3,)),  # in the pool, with a slot
        Assignment(0, (0, 1, 2, 3), (9, 8)),  # pool not sorted
        Assignment(0, (0, 0, 2, 3)),  # two slots of its own
        Assignment(0, (0, 1, 2, 0), adopted=(3,)),  # adopted across replicas
        Assignment(0, (0, None, 2, 3), adopted=(1,)),  # adopted and vacant
        Assignment(0, (0, 1, 2, 3), adopted=(1,)),  # adopted without a slot of its own
        Assignment(0, (0, 1, 0, 0), adopted=(2, 3)),  # three slots
    ],
)
def test_check_finds_what_must_not_be(assignment: Assignment) -> None:
    with pytest.raises(AssertionError):
        assignment.check(Topology(tensor=1, pipeline=2, data=2))


def test_shards_are_equal_across_context_and_data() -> None:
    topology = Topology(tensor=2, context=2, pipeline=2, data=2)
    assert len(topology.shards) == 4
    slots = [s for s in range(topology.num_slots) if topology.shard_of(s) == Shard(tp=1, pp=1)]
    assert {topology.coordinate(s)[1::2] for s in slots} == {(0, 0), (0, 1), (1, 0), (1, 1)}

"""Which Split makes which communicators: pure, over random groups and vacancies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.world.derive import GroupKey, rounds

SLOTS = 6
slots = st.lists(st.integers(0, SLOTS - 1), min_size=1, unique=True).map(tuple)
groups = st.lists(st.builds(GroupKey, st.integers(0, 9), slots), max_size=12)
serving = st.lists(st.none() | st.integers(0, 9), min_size=SLOTS, max_size=SLOTS)


@given(groups, serving)
def test_each_set_of_slots_has_one_round(
    keys: list[GroupKey], process_of: list[int | None]
) -> None:
    made = rounds(keys, process_of)
    parts = [part for batch in made for part in batch.parts]
    needed = {key.slots for key in keys if len({process_of[s] for s in key.slots} - {None}) > 1}
    assert len(parts) == len(set(parts)) and set(parts) == needed
    for batch in made:
        served = [{process_of[s] for s in part} - {None} for part in batch.parts]
        assert sum(map(len, served)) == len(set().union(*served)), "no process in two parts"
        for color, part in enumerate(batch.parts):
            assert batch.color([s for s in part if process_of[s] is not None]) == color


def test_groups_of_the_same_slots_share_a_split() -> None:
    keys = [GroupKey(0, (0, 1)), GroupKey(1, (2, 3)), GroupKey(2, (0, 1)), GroupKey(3, (0, 2))]
    first, second = rounds(keys, [0, 1, 2, 3])
    assert first.parts == ((0, 1), (2, 3)) and second.parts == ((0, 2),)
    assert first.color((1,)) == 0 and first.color((3,)) == 1 and second.color((1,)) is None

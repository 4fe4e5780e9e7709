"""A campaign of drawn faults: any kind, at any point, on any replicas but one, also at once.

Each seed is one job. What it draws is in its name, so that a failure can be run again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from harness import assert_faults_fired, assert_same_training, launch
from test_recover_matrix import reference

ITERATIONS = 8
SHORT = ("--ft-watch-timeout", "3", "--ft-progress-timeout", "8", "--ft-collective-timeout", "60")
TOPOLOGIES = (
    {"tp": 1, "pp": 2, "dp": 3},
    {"tp": 2, "pp": 1, "dp": 3},
    {"tp": 1, "pp": 1, "dp": 4},
    {"tp": 2, "pp": 2, "dp": 2},
)
ARITHMETIC = (
    (),
    ("--overlap-grad-reduce", "--ddp-bucket-size", "20000"),
    ("--eval-interval", "4"),
    ("--hidden-dropout", "0.1"),
)
KINDS = ("kill",) * 6 + ("exit", "exception", "stop", "loop", "hold-gil")
POINTS = ("forward", "backward", "reduce", "reduced", "voted", "optimizer", "logging")


@dataclass(frozen=True)
class Draw:
    """One job of the campaign."""

    topology: dict[str, int]
    arithmetic: tuple[str, ...]
    policy: str
    faults: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((*self.faults, self.policy, *self.arithmetic, str(self.topology)))


def draw(seed: int) -> Draw:
    """Faults on all replicas but one, at most; every one of them strikes."""
    pick = random.Random(seed)
    topology = pick.choice(TOPOLOGIES)
    arithmetic = pick.choice(ARITHMETIC)
    tp, pp, dp = topology["tp"], topology["pp"], topology["dp"]
    replicas = pick.sample(range(dp), pick.randint(1, dp - 1))
    first = pick.randint(1, ITERATIONS)
    together = pick.random() < 0.4
    repair = together and len(replicas) > 1 and pick.random() < 0.4
    faults = []
    for i, replica in enumerate(replicas):
        iteration = first if together else pick.randint(1, ITERATIONS)
        slot = pick.randrange(pp) * tp * dp + replica * tp + pick.randrange(tp)
        point = pick.choice(POINTS)
        if repair:  # of the first one, which must be noticed in its own iteration
            point = "repair" if i else pick.choice(POINTS[:4])
        elif "--eval-interval" in arithmetic and pick.random() < 0.3:
            point, iteration = "eval", pick.choice((4, 8))
        faults.append(f"{pick.choice(KINDS)}@{iteration}:slot={slot}:point={point}")
    policy = pick.choice(("balanced", "versatile"))
    return Draw(topology, arithmetic, policy, tuple(faults))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_training_is_the_fault_free_one(seed: int) -> None:
    drawn = draw(seed)
    print(seed, drawn)
    wanted = reference(tuple(drawn.topology.items()), drawn.arithmetic)
    specs = [part for fault in drawn.faults for part in ("--ft-fault", fault)]
    policy = ("--ft-recover-policy", drawn.policy)
    run = launch("--ft-recover", *SHORT, *policy, *drawn.arithmetic, *specs, **drawn.topology)
    assert run.returncode == 0, f"{drawn}\n{run.output[-6000:]}"
    assert_faults_fired(run, len(drawn.faults))
    assert_same_training(run, wanted)

"""What an A/B has decided before its first boot: arms, order, looks, floors. Recorded once, and never changed."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.plan import ServePlan
from orchestrator.schema import ABTest
from orchestrator.stats.floor import Floor

Arm = Literal["a", "b"]
ARMS: tuple[Arm, Arm] = ("a", "b")
BOOTS_PER_BLOCK = 4
_ORDERS: tuple[tuple[Arm, ...], ...] = (("a", "b", "b", "a"), ("b", "a", "a", "b"))


@dataclass(frozen=True)
class Slot:
    """One boot to be made: `block` counts from 0, `position` is 0 to 3 within it."""

    block: int
    position: int
    arm: Arm

    def __str__(self) -> str:
        return f"block {self.block + 1}, boot {self.position + 1}, arm {self.arm}"


@dataclass(frozen=True)
class Hours:
    """What one boot of each arm takes with its suite, and where that is known from."""

    per_boot: Mapping[Arm, float]
    basis: str  # "the last 4 recorded boots", "estimated"

    @property
    def mean(self) -> float:
        return sum(self.per_boot.values()) / len(self.per_boot)

    def of(self, slots: Sequence[Slot]) -> float:
        return sum(self.per_boot[slot.arm] for slot in slots)


@dataclass(frozen=True)
class Design:
    """`order` has the boots of every block up to the gate's last look."""

    test: ABTest
    seed: int
    order: tuple[Slot, ...]
    plans: Mapping[Arm, ServePlan]
    floors: Mapping[str, Floor]
    hours: Hours


def draw_seed() -> int:
    return secrets.randbits(31)


def order(seed: int, blocks: int) -> tuple[Slot, ...]:
    """The boots: each block is ABBA or BAAB, by a bit of SHA-256 of seed and block.

    Both arms have the same mean position in a block, so that a drift linear in time cancels within each block; which
    arm is first is drawn, so that nothing that repeats with the blocks can follow an arm.
    """
    slots = []
    for block in range(blocks):
        bit = hashlib.sha256(f"{seed}/{block}".encode()).digest()[0] & 1
        slots += [Slot(block, position, arm) for position, arm in enumerate(_ORDERS[bit])]
    return tuple(slots)

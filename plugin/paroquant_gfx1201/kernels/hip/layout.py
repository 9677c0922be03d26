"""Where a wave keeps the channels of a group while it rotates them: tables without LDS bank conflicts.

A wave of 32 lanes rotates one group of g channels, R = g / 32 values to a lane. In each of the krot layers a lane owns
R / 2 pairs, at slots lane, 32 + lane, ...: reads never conflict. Each of the R store instructions of a layer moves one
value of every lane to where the next layer owns it, and conflicts unless the 32 lanes it moves to are distinct.

Which pair a lane owns, and which of the two channels comes first (swapping them negates the sine), is free, and that
is enough: order the two channels of each pair so that first channels go to distinct pairs of the next layer (channels
form even cycles of mates in both layers), then name pairs A and B so that first channels of A go to distinct lanes, and
second channels too (again even cycles). Layers are laid out from the last, whose successor is channel order.
"""

from dataclasses import dataclass

import numpy as np
import torch

from paroquant_gfx1201 import rotation
from paroquant_gfx1201.errors import PluginError

LANES = 32
BANK_WORDS = 32
"""Slots a multiple of this apart share an LDS bank."""


@dataclass(frozen=True)
class Rotations:
    """theta f16 [krot, K/2], pairs i16 [krot, K], channel_scales f16 [1, K], as a projection stores them."""

    theta: torch.Tensor
    pairs: torch.Tensor
    channel_scales: torch.Tensor
    group_size: int


def table_words(group_size: int, krot: int) -> int:
    """Words of a lane: first moves 2, channel scales R / 2, and 1 + R / 2 for each layer."""
    values = group_size // LANES
    return 2 + values // 2 + krot * (1 + values // 2)


def two_color(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """0 or 1 for each of n nodes [G, n] so that both partners of a node have the other color.

    first, second int [G, n]: perfect matchings as involutions. Their union is even cycles, walked in all G at once.
    """
    groups, nodes = first.shape
    row = np.arange(groups)
    colors = np.full((groups, nodes), -1, dtype=np.int8)
    current = np.zeros(groups, dtype=np.int64)
    for _ in range(nodes // 2):
        closed = colors[row, current] != -1
        current = np.where(closed, (colors == -1).argmax(1), current)
        colors[row, current] = 0
        other = first[row, current]
        colors[row, other] = 1
        current = second[row, other]
    return colors.astype(np.int64)


def partners(keys: np.ndarray) -> np.ndarray:
    """The other node with the same key, for keys [G, n] that occur exactly twice in a row."""
    order = keys.argsort(1, kind="stable")
    result = np.empty_like(order)
    np.put_along_axis(result, order[:, 0::2], order[:, 1::2], 1)
    np.put_along_axis(result, order[:, 1::2], order[:, 0::2], 1)
    return result


def _take(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, index, 1)


def mates_of(pairs: np.ndarray) -> np.ndarray:
    """The other channel of each channel's pair, [G, g] from pairs [G, g/2, 2]."""
    mates = np.empty((len(pairs), 2 * pairs.shape[1]), dtype=np.int64)
    np.put_along_axis(mates, pairs[..., 0], pairs[..., 1], 1)
    np.put_along_axis(mates, pairs[..., 1], pairs[..., 0], 1)
    return mates


def own(pairs: np.ndarray, next_slots: np.ndarray, next_mates: np.ndarray) -> np.ndarray:
    """Slots [G, g] of the channels in a layer, given those of the next and who shares its pairs there.

    pairs int [G, g/2, 2]: local channel numbers.
    """
    groups, count, _ = pairs.shape
    order = two_color(mates_of(pairs), next_mates)
    swapped = _take(order, pairs[..., 0]) == 1
    first = np.where(swapped, pairs[..., 1], pairs[..., 0])
    second = np.where(swapped, pairs[..., 0], pairs[..., 1])
    if count == LANES:
        place = np.broadcast_to(np.arange(LANES), (groups, LANES))
    else:
        lanes = next_slots % LANES
        name = two_color(partners(_take(lanes, first)), partners(_take(lanes, second)))
        # 0..31 the A pairs, 32..63 the B pairs: lane and position of a pair.
        place = name.argsort(1, kind="stable").argsort(1, kind="stable")
    slots = np.empty((groups, 2 * count), dtype=np.int64)
    position = place // LANES * 2 * LANES + place % LANES
    np.put_along_axis(slots, first, position, 1)
    np.put_along_axis(slots, second, position + LANES, 1)
    return slots


def first_moves(slots: np.ndarray, mates: np.ndarray) -> np.ndarray:
    """Store instruction [G, g] that brings each channel from the lane that loaded it to its slot."""
    groups, size = slots.shape
    channels = np.broadcast_to(np.arange(size), (groups, size))
    sources, lanes = channels // (size // LANES), slots % LANES
    half = two_color(channels ^ 1, mates)
    if size == 2 * LANES:
        return half
    quarter = two_color(partners(half * LANES + sources), partners(half * LANES + lanes))
    return 2 * half + quarter


def _words(fields: np.ndarray, bits: int) -> np.ndarray:
    """[..., n] unsigned fields to one uint32 word each of n fields, field 0 lowest."""
    shifts = np.arange(fields.shape[-1], dtype=np.uint64) * bits
    return (fields.astype(np.uint64) << shifts).sum(-1).astype(np.uint32)


def _by_lane(values: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """values [G, g] of channels to [G, 32, R]: those at slots lane, 32 + lane, ..."""
    ordered = np.empty_like(values)
    np.put_along_axis(ordered, slots, values, 1)
    return ordered.reshape(len(values), -1, LANES).transpose(0, 2, 1)


def _angle_words(pairs: np.ndarray, cos: np.ndarray, sin: np.ndarray, owned: np.ndarray) -> list[np.ndarray]:
    """For each of a lane's pairs, uint32 [G, 32]: f16 cosine, and f16 sine negated where the pair is swapped."""
    groups, count, _ = pairs.shape
    number = np.empty((groups, 2 * count), dtype=np.int64)
    for side in (0, 1):
        np.put_along_axis(number, pairs[..., side], np.arange(count)[None], 1)
    words = []
    for first in range(0, owned.shape[2], 2):
        pair = _take(number, owned[..., first])
        swapped = _take(pairs[..., 0], pair) != owned[..., first]
        sine = np.where(swapped, -_take(sin, pair), _take(sin, pair))
        words.append(_words(np.stack([_take(cos, pair).view(np.uint16), sine.view(np.uint16)], -1), 16))
    return words


def build(rotations: Rotations) -> torch.Tensor:
    """The producer's table int32 [G, table_words, 32].

    Words of a lane, R values of which bytes or f16 halves are ascending: slots its loaded channels go to (bytes, by
    store instruction); which of its loaded channels each instruction stores (bytes); channel scales (f16) at its slots;
    then for each layer the slots its values go to (bytes) and, for each pair, cosine and sine (f16 low and high).
    Raises PluginError for a group size other than 64 or 128.
    """
    size = rotations.group_size
    if size not in (64, 128):
        raise PluginError(f"the HIP producers rotate groups of 64 or 128 channels, not {size}")
    krot, inputs = rotations.pairs.shape
    groups, values = inputs // size, size // LANES
    pairs = rotations.pairs.long().view(krot, groups, size // 2, 2).numpy()
    cos, sin = (angle.half().view(krot, groups, -1).numpy() for angle in rotation.cosines(rotations.theta))
    channels = np.broadcast_to(np.arange(size), (groups, size)).astype(np.int64)
    slots, mates = channels, channels ^ LANES
    layers: list[np.ndarray] = []
    for layer in reversed(range(krot)):
        following = slots
        slots = own(pairs[layer], following, mates)
        angles = _angle_words(pairs[layer], cos[layer], sin[layer], _by_lane(channels, slots))
        mates = mates_of(pairs[layer])
        layers.insert(0, np.stack([_words(_by_lane(following, slots), 8), *angles], 1))
    moves = first_moves(slots, mates)
    # Channel of each lane and store instruction.
    loaded = (moves + values * (channels // values)).argsort(1).reshape(groups, LANES, values)
    start = _words(_take(slots, loaded.reshape(groups, -1)).reshape(loaded.shape), 8)
    source = _words(loaded % values, 8)
    by_group = rotations.channel_scales.view(groups, size).numpy().view(np.uint16)
    scales = _by_lane(by_group, slots)
    scale_words = [_words(scales[..., 2 * pair : 2 * pair + 2], 16) for pair in range(values // 2)]
    table = np.concatenate([np.stack([start, source, *scale_words], 1), *layers], 1)
    return torch.from_numpy(table.view(np.int32).copy())

"""Pairwise (Givens) rotations of activation groups.

A rotation acts on a group of g channels as g/2 disjoint plane rotations
``y_i = c * x_i + s * x_j``, ``y_j = c * x_j - s * x_i`` with c = cos(theta), s = sin(theta);
krot of them are applied one after the other. Source: ParoQuant (ICLR 2026), the published
checkpoint format.
"""

from functools import lru_cache

import numpy as np
import torch


def _group_matchings(group_size: int, krot: int, generator: np.random.Generator) -> list[list[tuple[int, int]]]:
    """krot disjoint perfect matchings of 0..g-1, greedy over a shuffled list of all i < j."""
    first, second = np.triu_indices(group_size, k=1)
    remaining = list(zip(first.tolist(), second.tolist(), strict=True))
    matchings: list[list[tuple[int, int]]] = []
    while len(matchings) < krot:
        shuffled = [remaining[index] for index in generator.permutation(len(remaining))]
        taken = bytearray(group_size)
        matching = []
        for i, j in shuffled:
            if not (taken[i] or taken[j]):
                taken[i] = taken[j] = 1
                matching.append((i, j))
        # Greedy can strand channels whose only free partners were used by an earlier rotation;
        # such a matching would leave channels unrotated, so it is drawn again.
        if len(matching) * 2 == group_size:
            matchings.append(matching)
            used = set(matching)
            remaining = [pair for pair in remaining if pair not in used]
    return matchings


@lru_cache(maxsize=8)
def _greedy_pairs(inputs: int, group_size: int, krot: int, seed: int) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    groups = [
        np.asarray(_group_matchings(group_size, krot, generator), dtype=np.int16).reshape(krot, -1)
        for _ in range(inputs // group_size)
    ]
    return torch.from_numpy(np.concatenate(groups, axis=1))


def greedy_pairs(inputs: int, group_size: int, krot: int, seed: int) -> torch.Tensor:
    """Pairs i16 [krot, K] for one projection; ``seed`` is the run's seed plus the layer index.

    Within a group every rotation is a perfect matching and no pair is used twice. Projections of
    one layer with equal K get equal pairs.
    """
    return _greedy_pairs(inputs, group_size, krot, seed).clone()


def cosines(theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of f16 angles, rounded to f16 and returned as float32.

    The kernels' rotation records hold both as f16, so this is what they apply.
    """
    angle = theta.double()
    return angle.cos().half().float(), angle.sin().half().float()


def block_matrices(cos: torch.Tensor, sin: torch.Tensor, pairs: torch.Tensor, group_size: int) -> torch.Tensor:
    """The krot rotations of each group multiplied together: [G, g, g] with y = R @ x.

    cos, sin [krot, K/2] of any float dtype (differentiable), pairs integer [krot, K].
    """
    krot, inputs = pairs.shape
    groups = inputs // group_size
    local = pairs.long().view(krot, groups, group_size // 2, 2)
    i, j = local[..., 0], local[..., 1]
    cos, sin = cos.view(krot, groups, -1), sin.view(krot, groups, -1)
    # Each row of a factor has one cosine (diagonal) and one signed sine (at its partner).
    rows = torch.cat([i, j], -1)
    partner = torch.cat([j, i], -1)
    factors = cos.new_zeros(krot, groups, group_size * group_size)
    factors = factors.scatter(2, rows * group_size + rows, torch.cat([cos, cos], -1))
    factors = factors.scatter(2, rows * group_size + partner, torch.cat([sin, -sin], -1))
    factors = factors.view(krot, groups, group_size, group_size)
    product = factors[0]
    for factor in factors[1:]:
        product = factor @ product
    return product


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of float32 tensors with one rounding, which torch itself does not promise.

    The product is exact in float64; its sum with c is rounded to odd there, so that rounding once
    more to float32 is correct (Boldo and Melquiond, 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = (total.view(torch.int64) & 1) == 0
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where((error != 0) & even, towards, 0)
    return (total.view(torch.int64) + odd).view(torch.float64).float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairs: torch.Tensor, group_size: int) -> torch.Tensor:
    """Apply the rotations to x [..., K] one after the other, as the formula is written.

    In float32 each output is one rounded product and one fused multiply-add, as in the HIP kernels:
    ``fma(c, x_i, s * x_j)`` and ``fma(c, x_j, -(s * x_i))``.
    """
    krot, inputs = pairs.shape
    fused = x.dtype == cos.dtype == torch.float32
    base = torch.arange(inputs // group_size).repeat_interleave(group_size) * group_size
    for r in range(krot):
        index = pairs[r].long() + base
        i, j = index[0::2], index[1::2]
        x_i, x_j = x[..., i], x[..., j]
        y = torch.empty_like(x)
        if fused:
            y[..., i] = fused_multiply_add(cos[r], x_i, sin[r] * x_j)
            y[..., j] = fused_multiply_add(cos[r], x_j, -(sin[r] * x_i))
        else:
            y[..., i] = cos[r] * x_i + sin[r] * x_j
            y[..., j] = cos[r] * x_j - sin[r] * x_i
        x = y
    return x


def rotate_groups(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """x [M, K] times each group's matrix (y = R @ x): [..., G, M, g] for matrices [..., G, g, g]."""
    groups, group_size = matrices.shape[-3:-1]
    by_group = x.view(-1, groups, group_size).transpose(0, 1)
    return torch.matmul(by_group, matrices.transpose(-1, -2))

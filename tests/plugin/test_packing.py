"""Bit packing against a per-element implementation written from the format document."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paroquant_gfx1201.formats import packing

AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def codes(levels: int, width: int) -> st.SearchStrategy[np.ndarray]:
    shape = st.tuples(st.integers(1, 5), st.integers(1, 4).map(lambda n: n * width))
    return arrays(np.uint8, shape, elements=st.integers(0, levels))


def naive_nibbles(values: np.ndarray) -> np.ndarray:
    rows, columns = values.shape
    words = np.zeros((rows, columns // 8), dtype=np.uint32)
    for row in range(rows):
        for word in range(columns // 8):
            for slot in range(8):
                value = int(values[row, 8 * word + AWQ[slot]]) & 15
                words[row, word] |= np.uint32(value << (4 * slot))
    return words.view(np.int32)


def naive_plane(values: np.ndarray) -> np.ndarray:
    rows, columns = values.shape
    words = np.zeros((rows, columns // 32), dtype=np.uint32)
    for row in range(rows):
        for n in range(columns):
            words[row, n // 32] |= np.uint32((int(values[row, n]) >> 4) << (n % 32))
    return words.view(np.int32)


@given(codes(15, 8))
def test_int4_words_hold_the_awq_order(values: np.ndarray) -> None:
    packed = packing.pack_nibbles(torch.from_numpy(values))
    assert packed.dtype == torch.int32
    np.testing.assert_array_equal(packed.numpy(), naive_nibbles(values))


@given(codes(31, 32))
def test_the_fifth_bit_lies_in_natural_order(values: np.ndarray) -> None:
    packed = packing.pack_plane(torch.from_numpy(values))
    assert packed.dtype == torch.int32
    np.testing.assert_array_equal(packed.numpy(), naive_plane(values))


@given(codes(15, 8))
def test_int4_unpack_is_the_inverse_of_pack(values: np.ndarray) -> None:
    tensor = torch.from_numpy(values)
    assert torch.equal(packing.unpack_nibbles(packing.pack_nibbles(tensor)), tensor)


@settings(max_examples=60)
@given(codes(31, 32))
def test_int5_unpack_is_the_inverse_of_pack(values: np.ndarray) -> None:
    tensor = torch.from_numpy(values)
    low = packing.unpack_nibbles(packing.pack_nibbles(tensor))
    high = packing.unpack_plane(packing.pack_plane(tensor))
    assert torch.equal(low | high, tensor)


@given(arrays(np.int32, (3, 4)))
def test_every_word_survives_unpack_and_pack(words: np.ndarray) -> None:
    tensor = torch.from_numpy(words)
    assert torch.equal(packing.pack_nibbles(packing.unpack_nibbles(tensor)), tensor)
    assert torch.equal(packing.pack_plane(packing.unpack_plane(tensor)), tensor)

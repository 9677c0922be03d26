// Weight codes of one lane as bytes for the matrix unit; weights.py has the layout.
#pragma once
#include "device.h"

// LLOYD: int4 codes that stand for 16 e4m3 values of their projection. FOLDED: MXFP4 with one scale an output, see folded.py.
enum Format { INT4, INT5, MXFP4, LLOYD, FOLDED };

template <Format FORMAT>
constexpr bool HAS_ZERO_POINTS = FORMAT == INT4 || FORMAT == INT5 || FORMAT == LLOYD;

// What the matrix unit reads: codes as they are, codes less the midpoint, or e4m3 values.
enum Bytes { UNSIGNED, SIGNED, FLOATS };

// What e4m3 weight bytes stand for: the code, or its distance from 16, times 2^-9; MXFP4's value times 2^-6; a level.
template <Format FORMAT>
constexpr float BYTE_SCALE = FORMAT == MXFP4 ? 64.0f : FORMAT == LLOYD ? 1.0f : 512.0f;

// Zero points are relative to this where bytes are e4m3.
template <Format FORMAT>
constexpr float E4M3_ORIGIN = FORMAT == INT5 ? 16.0f : FORMAT == LLOYD ? 7.5f : 0.0f;

// Fifth bits 0x01010101 of four codes, and their low nibbles, as e4m3 of code - 16: the subnormals and the first two
// binades of e4m3 are the multiples 0..16 of 2^-9, so a magnitude is its own encoding.
DEVICE u32 centre_on_16(u32 nibbles, u32 fifth) {
  u32 upper = (fifth << 8) - fifth;          // 0xff where the code is at least 16
  u32 negative = 0x90909090 - nibbles;       // sign, and 16 - nibble
  return (nibbles & upper) | (negative & ~upper);
}

// e2m1 in the low nibbles of bytes to e4m3 times 2^-6: sign to bit 7, exponent and mantissa to bits 4..2.
DEVICE u32 widen_e2m1(u32 nibbles) { return (nibbles << 2 & 0x1c1c1c1c) | (nibbles << 4 & 0x80808080); }

// FOLDED's codes of 64 inputs, blocks 2 * quad and the next, as e4m3. shifts: a byte for each block of the group.
DEVICE void unpack_folded(v4i nibbles, u32 shifts, int quad, u32* bytes) {
  using v2s = u16 __attribute__((ext_vector_type(2)));
  for (int block = 0; block < 2; block++) {
    u32 number = 2 * quad + block;
    // 0, .5, 1, 1.5, and 2, 3, 4, 6, times 2^6: only .5 ever leaves the normal numbers, to 0x04 at a shift of 12.
    u32 low = 0x6c686000 - permute_bytes(0, shifts, number * 0x01010100 + 0x0c);
    u32 high = 0x7c787470 - permute_bytes(0, shifts, number * 0x01010101);
    low = __builtin_bit_cast(u32, __builtin_elementwise_max(__builtin_bit_cast(v2s, low), v2s{0x0400, 0}));
    for (int word = 2 * block; word < 2 * block + 2; word++) {
      u32 packed = nibbles[word];
      bytes[2 * word] = permute_bytes(high, low, packed & 0x07070707) | (packed << 4 & 0x80808080);
      bytes[2 * word + 1] = permute_bytes(high, low, packed >> 4 & 0x07070707) | (packed & 0x80808080);
    }
  }
}

// The entry of a table of 16 bytes for each of four codes, which are the low nibbles of `codes`' bytes.
DEVICE u32 look_up(u32 codes, v4i table) {
  u32 place = codes & 0x07070707;
  u32 low = permute_bytes(table[1], table[0], place), high = permute_bytes(table[3], table[2], place);
  u32 upper = permute_bytes(0, 0, (codes & 0x08080808) | 0x05050505);  // selector 13 is 0xff, 5 a byte of zero
  return (high & upper) | (low & ~upper);
}

// Codes of four bytes less `midpoint`, each as a signed byte: 128 + code never borrows from the next.
DEVICE u32 centre(u32 codes, u32 midpoint) { return (codes + (128 - midpoint) * 0x01010101) ^ 0x80808080; }

// 8 words of bytes from 4 words of nibbles and one of fifth bits, in the order of the matrix instructions. table: LLOYD's.
template <Format FORMAT, Bytes BYTES>
DEVICE void unpack(v4i nibbles, u32 plane, v4i table, u32* bytes) {
  for (int word = 0; word < 4; word++) {
    u32 packed = nibbles[word];
    for (int half = 0; half < 2; half++) {
      int four = 2 * word + half;
      u32 shifted = half ? packed >> 4 : packed;
      u32 nibble = shifted & 0x0f0f0f0f;
      if constexpr (FORMAT == INT5 && BYTES != FLOATS)
        nibble |= (four < 4 ? plane << (4 - four) : plane >> (four - 4)) & 0x10101010;
      else if constexpr (FORMAT == INT5)
        nibble = centre_on_16(nibble, plane >> four & 0x01010101);
      else if constexpr (FORMAT == MXFP4)
        nibble = widen_e2m1(shifted);
      else if constexpr (FORMAT == LLOYD)
        nibble = look_up(shifted, table);
      if constexpr (BYTES == SIGNED) nibble = centre(nibble, FORMAT == INT5 ? 16 : 8);
      bytes[four] = nibble;
    }
  }
}

// 2^(exponent - 127), e8m0; 0 is the subnormal 2^-127.
DEVICE float from_e8m0(u32 exponent) {
  return __builtin_bit_cast(float, __builtin_elementwise_max(exponent << 23, 0x00400000u));
}

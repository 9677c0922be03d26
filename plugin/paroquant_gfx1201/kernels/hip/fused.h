// Producers that compute the row they quantize: what stands before a linear layer, and its producer, in one launch.
//
// Outputs as of producer.h per group. Where a formula rounds to bf16 in between, as vLLM's own modules do, so do these;
// what is left is f32 rounding before it, which moves a bf16 that lies on the edge. epsilon: the bits of an f32.
#pragma once
#include "producer.h"

DEVICE float from_bf16(u32 half) { return __builtin_bit_cast(float, half << 16); }

// A lane's VALUES channels as f32, and f32 values rounded to bf16, two to a word.
template <int VALUES>
DEVICE void load_values(const u16* x, int lane, float* values) {
  u32 words[2];
  load_channels<VALUES>(x, lane, words);
  for (int i = 0; i < VALUES; i++) values[i] = from_bf16(words[i / 2] >> 16 * (i % 2) & 0xffff);
}

template <int VALUES>
DEVICE void round_values(const float* values, u32* words) {
  for (int pair = 0; pair < VALUES / 2; pair++)
    words[pair] = encode_bf16(values[2 * pair]) | encode_bf16(values[2 * pair + 1]) << 16;
}

DEVICE float rounded(float value) { return from_bf16(encode_bf16(value)); }

// e^x: the instruction's 2^p for p = x * log2(e) rounded, times what the rounding left.
DEVICE float exponential(float x) {
  x = clamp(x, -104.0f, 89.0f);
  float power = x * 0x1.715476p+0f;
  float rest = __builtin_fmaf(x, 0x1.4ae0cp-26f, __builtin_fmaf(x, 0x1.715476p+0f, -power));
  return exp2_estimate(power) * __builtin_fmaf(rest, 0x1.62e43p-1f, 1.0f);
}

DEVICE float silu(float x) { return x / (1.0f + exponential(-x)); }

// 1 / sqrt(x), one Newton step on the instruction's estimate.
DEVICE float inverse_root(float x) {
  float estimate = inverse_root_estimate(x);
  return __builtin_fmaf(estimate * 0.5f, __builtin_fmaf(-x * estimate, estimate, 1.0f), estimate);
}

DEVICE float wave_total(float value) {
  value += __builtin_bit_cast(float, lane_xor<1>(__builtin_bit_cast(u32, value)));
  value += __builtin_bit_cast(float, lane_xor<2>(__builtin_bit_cast(u32, value)));
  value += __builtin_bit_cast(float, lane_xor<4>(__builtin_bit_cast(u32, value)));
  value += __builtin_bit_cast(float, lane_xor<8>(__builtin_bit_cast(u32, value)));
  return value + __builtin_bit_cast(float, lane_xor<16>(__builtin_bit_cast(u32, value)));
}

enum Kind { SILU_MUL, SIGMOID_GATE, GATED_NORM };

// One group of one row. SILU_MUL: x [M, 2 K] holds gates, then factors. SIGMOID_GATE: x and gate [M, K].
// GATED_NORM: x and gate [M, K] in heads of GROUP channels, weight f32 [GROUP]: RMSNorm of a head, times silu(gate).
template <Kind KIND, int GROUP>
DEVICE void combine(const u16* x, const u16* gate, const float* weight, float epsilon, int row, int group, int lane,
                    int K, u32* channels) {
  constexpr int VALUES = GROUP / WAVE;
  float values[VALUES], gates[VALUES];
  if constexpr (KIND == SILU_MUL) {
    const u16* line = x + static_cast<long>(row) * 2 * K + group * GROUP;
    load_values<VALUES>(line, lane, gates);
    load_values<VALUES>(line + K, lane, values);
    for (int i = 0; i < VALUES; i++) values[i] *= rounded(silu(gates[i]));
  } else {
    load_values<VALUES>(x + static_cast<long>(row) * K + group * GROUP, lane, values);
    load_values<VALUES>(gate + static_cast<long>(row) * K + group * GROUP, lane, gates);
    if constexpr (KIND == SIGMOID_GATE) {
      for (int i = 0; i < VALUES; i++) values[i] *= rounded(1.0f / (1.0f + exponential(-gates[i])));
    } else {
      float squares = 0.0f;
      for (int i = 0; i < VALUES; i++) squares = __builtin_fmaf(values[i], values[i], squares);
      float inverse = inverse_root(wave_total(squares) * (1.0f / GROUP) + epsilon);
      for (int i = 0; i < VALUES; i++)
        values[i] = values[i] * inverse * weight[lane * VALUES + i] * silu(gates[i]);
    }
  }
  round_values<VALUES>(values, channels);
}

// Grid (G, shares of the rows), one rotation: the linear layers behind these are not merged.
template <Kind KIND, int GROUP, int KROT, Element ELEMENT>
DEVICE void by_group_of(const u16* x, const u16* gate, const float* weight, float epsilon, const u32* table, u8* codes,
                        float* scales, float* row_sums, int M, int K, int waves, int shares) {
  SHARED(float, lds, MOST_WAVES * GROUP);
  int lane = thread_id() % WAVE, wave = thread_id() / WAVE, group = block_x();
  Rotation<GROUP, KROT> rotation;
  rotation.load(table + group * Rotation<GROUP, KROT>::WORDS * WAVE, lane);
  for (int row = block_y() * waves + wave; row < M; row += shares * waves) {
    u32 channels[2];
    combine<KIND, GROUP>(x, gate, weight, epsilon, row, group, lane, K, channels);
    produce<GROUP, KROT, ELEMENT>(rotation, channels, lds + wave * GROUP, codes, scales, row_sums, group, row, lane, M, K);
  }
}

// Residual add and RMSNorm with weight 1 + w (f32 [K]): sum bf16 [M, K] gets x + residual, hidden its norm. Grid (M,
// G / 8 rounded up, P): each workgroup reads the whole row for its norm, and rotates 8 groups, a wave each.
template <int GROUP, int KROT, Element ELEMENT>
DEVICE void add_norm(const u16* x, const u16* residual, const float* weight, int epsilon, const u32* table,
                     u16* sum, u16* hidden, u8* codes, float* scales, float* row_sums, int M, int K) {
  constexpr int VALUES = GROUP / WAVE;
  SHARED(float, lds, MOST_WAVES * GROUP);
  SHARED(float, parts, MOST_WAVES);
  int lane = thread_id() % WAVE, wave = thread_id() / WAVE, groups = K / GROUP, row = block_x();
  x += static_cast<long>(row) * K;
  residual += static_cast<long>(row) * K;
  float squares = 0.0f, own[VALUES] = {};
  int mine = block_y() * MOST_WAVES + wave;
  for (int group = wave; group < groups; group += MOST_WAVES) {
    float values[VALUES], others[VALUES];
    load_values<VALUES>(x + group * GROUP, lane, values);
    load_values<VALUES>(residual + group * GROUP, lane, others);
    for (int i = 0; i < VALUES; i++) {
      values[i] = rounded(values[i] + others[i]);
      squares = __builtin_fmaf(values[i], values[i], squares);
      if (group == mine) own[i] = values[i];
    }
  }
  squares = wave_total(squares);
  if (lane == 0) parts[wave] = squares;
  workgroup_barrier();
  float total = 0.0f;
  for (int other = 0; other < MOST_WAVES; other++) total += parts[other];
  float inverse = inverse_root(total / static_cast<float>(K) + __builtin_bit_cast(float, epsilon));
  if (mine >= groups) return;
  u32 channels[2], sums[2];
  round_values<VALUES>(own, sums);
  for (int i = 0; i < VALUES; i++) own[i] = own[i] * inverse * (1.0f + weight[mine * GROUP + lane * VALUES + i]);
  round_values<VALUES>(own, channels);
  if (block_z() == 0) {
    long place = (static_cast<long>(row) * K + mine * GROUP) / 2 + lane * (VALUES / 2);
    for (int pair = 0; pair < VALUES / 2; pair++) {
      reinterpret_cast<u32*>(sum)[place + pair] = sums[pair];
      reinterpret_cast<u32*>(hidden)[place + pair] = channels[pair];
    }
  }
  int index = block_z() * groups + mine;
  Rotation<GROUP, KROT> rotation;
  rotation.load(table + index * Rotation<GROUP, KROT>::WORDS * WAVE, lane);
  produce<GROUP, KROT, ELEMENT>(rotation, channels, lds + wave * GROUP, codes, scales, row_sums, index, row, lane, M, K);
}

#define COMBINED(KIND, kind, GROUP, ELEMENT, element)                                                                  \
  KERNEL(MOST_WAVES* WAVE)                                                                                             \
  kind##_##element##_g##GROUP(const u16* x, const u16* gate, const float* weight, int epsilon,                         \
                              const u32* table, u8* codes, float* scales, float* row_sums, int M, int K, int waves,    \
                              int shares) {                                                                            \
    by_group_of<KIND, GROUP, 8, ELEMENT>(x, gate, weight, __builtin_bit_cast(float, epsilon), table, codes, scales,    \
                                         row_sums, M, K, waves, shares);                                               \
  }                                                                                                                    \
  EXPORT(kind##_##element##_g##GROUP)

#define ADD_NORM(GROUP, ELEMENT, element)                                                                              \
  KERNEL(MOST_WAVES* WAVE)                                                                                             \
  add_norm_##element##_g##GROUP(const u16* x, const u16* residual, const float* weight, int epsilon,                   \
                                const u32* table, u16* sum, u16* hidden, u8* codes, float* scales, float* row_sums,    \
                                int M, int K) {                                                                        \
    add_norm<GROUP, 8, ELEMENT>(x, residual, weight, epsilon, table, sum, hidden, codes, scales, row_sums, M, K);      \
  }                                                                                                                    \
  EXPORT(add_norm_##element##_g##GROUP)

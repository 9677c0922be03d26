// Activation producers: rotate, scale channels, find the peak, encode, sum the codes; one launch.
//
// x bf16 [M, K]; table int32 [P, G, WORDS, 32] of layout.build; codes bytes [P, M, K], in an order of rows.h; scales f32
// [P, G, M] per group or [P, M] per token; row_sums f32 [P, G, M]. K = G * GROUP.
#pragma once
#include "encode.h"
#include "rotate.h"
#include "rows.h"

constexpr int MOST_WAVES = 8, MOST_TOKEN_WAVES = 32;

// A lane's VALUES channels, two bf16 to a word.
template <int VALUES>
DEVICE void load_channels(const u16* x, int lane, u32* words) {
  if constexpr (VALUES == 4) {
    v2i loaded = *reinterpret_cast<const v2i*>(x + lane * 4);
    words[0] = loaded[0];
    words[1] = loaded[1];
  } else {
    words[0] = *reinterpret_cast<const u32*>(x + lane * 2);
  }
}

template <int VALUES>
DEVICE void store_codes(u8* codes, u32 word) {
  if constexpr (VALUES == 4)
    *reinterpret_cast<u32*>(codes) = word;
  else
    *reinterpret_cast<u16*>(codes) = word;
}

template <int VALUES>
DEVICE u32 peak_of(const float* values) {
  u32 peak = 0;  // as bits: magnitudes compare as integers do
  for (int i = 0; i < VALUES; i++)
    peak = __builtin_elementwise_max(peak, __builtin_bit_cast(u32, values[i]) & 0x7fffffff);
  return wave_max(peak);
}

// Rotates and encodes a lane's channels of one group, `index` of P * G, of one row.
template <int GROUP, int KROT, Element ELEMENT, Order ORDER = ROW_MAJOR>
DEVICE void produce(const Rotation<GROUP, KROT>& rotation, const u32* channels, float* lds, u8* codes, float* scales,
                    float* row_sums, int index, int row, int lane, int M, int K) {
  constexpr int VALUES = GROUP / WAVE;
  int groups = K / GROUP, group = index % groups;
  float values[VALUES];
  rotation.apply(channels, lds, lane, values);
  float scale = scale_of<ELEMENT>(__builtin_bit_cast(float, peak_of<VALUES>(values)));
  int sum;
  u32 word = encode<ELEMENT, VALUES>(values, divisor_of(scale), sum);
  sum = wave_sum(sum);
  codes += static_cast<long>(index / groups) * places_of<ORDER>(M) * K;
  store_codes<VALUES>(codes + place_of<ORDER>(row, group * GROUP + lane * VALUES, K), word);
  if (lane == 0) {
    scales[static_cast<long>(index) * M + row] = scale;
    row_sums[static_cast<long>(index) * M + row] = row_sum<ELEMENT>(sum);
  }
}

// Grid (P * G, shares of the rows). Each wave keeps the group's rotation and takes every gridDim.y * waves'th row.
template <int GROUP, int KROT, Element ELEMENT, Order ORDER>
DEVICE void by_group(const u16* x, const u32* table, u8* codes, float* scales, float* row_sums, int M, int K, int waves,
                     int shares) {
  constexpr int VALUES = GROUP / WAVE;
  SHARED(float, lds, MOST_WAVES * GROUP);
  int lane = thread_id() % WAVE, wave = same_in_wave(thread_id() / WAVE), groups = K / GROUP;
  int index = block_x(), group = index % groups;
  Rotation<GROUP, KROT> rotation;
  rotation.load(table + index * Rotation<GROUP, KROT>::WORDS * WAVE, lane);
  for (int row = block_y() * waves + wave; row < M; row += shares * waves) {
    u32 channels[2];
    load_channels<VALUES>(x + static_cast<long>(row) * K + group * GROUP, lane, channels);
    produce<GROUP, KROT, ELEMENT, ORDER>(rotation, channels, lds + wave * GROUP, codes, scales, row_sums, index, row, lane,
                                         M, K);
  }
  codes += static_cast<long>(index / groups) * places_of<ORDER>(M) * K;
  for (int row = M + block_y() * waves + wave; row < places_of<ORDER>(M); row += shares * waves)
    store_codes<VALUES>(codes + place_of<ORDER>(row, group * GROUP + lane * VALUES, K), 0);
}

// Grid (places of M rows, P). The waves share the groups of one row; its rotated values wait in LDS, as bf16 [K], for the
// row's peak.
template <int GROUP, int KROT, Element ELEMENT, Order ORDER>
DEVICE void by_token(const u16* x, const u32* table, u8* codes, float* scales, float* row_sums, int M, int K, int waves) {
  constexpr int VALUES = GROUP / WAVE;
  SHARED(float, lds, MOST_TOKEN_WAVES * GROUP);
  SHARED(u32, peaks, MOST_TOKEN_WAVES);
  DYNAMIC_SHARED(u16, parked);
  int lane = thread_id() % WAVE, wave = thread_id() / WAVE, groups = K / GROUP;
  int row = block_x(), rotation_index = block_y();
  codes += static_cast<long>(rotation_index) * places_of<ORDER>(M) * K;
  if (ORDER == TILED && row >= M) {
    for (int group = wave; group < groups; group += waves)
      store_codes<VALUES>(codes + place_of<ORDER>(row, group * GROUP + lane * VALUES, K), 0);
    return;
  }
  u32 peak = 0;
  for (int group = wave; group < groups; group += waves) {
    Rotation<GROUP, KROT> rotation;
    u32 channels[2];
    float values[VALUES];
    rotation.load(table + (rotation_index * groups + group) * Rotation<GROUP, KROT>::WORDS * WAVE, lane);
    load_channels<VALUES>(x + static_cast<long>(row) * K + group * GROUP, lane, channels);
    rotation.apply(channels, lds + wave * GROUP, lane, values);
    for (int i = 0; i < VALUES; i++) {
      u32 bits = encode_bf16(values[i]);
      parked[group * GROUP + lane * VALUES + i] = bits;
      peak = __builtin_elementwise_max(peak, bits << 16 & 0x7fffffff);
    }
  }
  peak = wave_max(peak);
  if (lane == 0) peaks[wave] = peak;
  workgroup_barrier();
  for (int other = 0; other < waves; other++) peak = __builtin_elementwise_max(peak, peaks[other]);
  float scale = scale_of<ELEMENT>(__builtin_bit_cast(float, peak));
  Divisor divisor = divisor_of(scale);
  if (thread_id() == 0) scales[static_cast<long>(rotation_index) * M + row] = scale;
  for (int group = wave; group < groups; group += waves) {  // the wave's own: no barrier
    float values[VALUES];
    for (int i = 0; i < VALUES; i++)
      values[i] = __builtin_bit_cast(float, static_cast<u32>(parked[group * GROUP + lane * VALUES + i]) << 16);
    int sum;
    u32 word = encode<ELEMENT, VALUES>(values, divisor, sum);
    sum = wave_sum(sum);
    store_codes<VALUES>(codes + place_of<ORDER>(row, group * GROUP + lane * VALUES, K), word);
    if (lane == 0) row_sums[(static_cast<long>(rotation_index) * groups + group) * M + row] = row_sum<ELEMENT>(sum);
  }
}

#define BY_GROUP(GROUP, KROT, NAME, ELEMENT, ORDER, order)                                                             \
  KERNEL(MOST_WAVES* WAVE)                                                                                             \
  group_##NAME##_g##GROUP##_r##KROT##order(const u16* x, const u32* table, u8* codes, float* scales, float* row_sums,  \
                                           int M, int K, int waves, int shares) {                                      \
    by_group<GROUP, KROT, ELEMENT, ORDER>(x, table, codes, scales, row_sums, M, K, waves, shares);                     \
  }                                                                                                                    \
  EXPORT(group_##NAME##_g##GROUP##_r##KROT##order)

#define BY_TOKEN(GROUP, KROT, NAME, ELEMENT, ORDER, order)                                                             \
  KERNEL(MOST_TOKEN_WAVES* WAVE)                                                                                       \
  token_##NAME##_g##GROUP##_r##KROT##order(const u16* x, const u32* table, u8* codes, float* scales, float* row_sums,  \
                                           int M, int K, int waves) {                                                  \
    by_token<GROUP, KROT, ELEMENT, ORDER>(x, table, codes, scales, row_sums, M, K, waves);                             \
  }                                                                                                                    \
  EXPORT(token_##NAME##_g##GROUP##_r##KROT##order)

// By rows in order, and in tiles where both elements have them.
#define PRODUCERS(GROUP, KROT, NAME, ELEMENT)         \
  BY_GROUP(GROUP, KROT, NAME, ELEMENT, ROW_MAJOR, )   \
  BY_TOKEN(GROUP, KROT, NAME, ELEMENT, ROW_MAJOR, )   \
  BY_TOKEN(GROUP, KROT, NAME, ELEMENT, TILED, _tiles)

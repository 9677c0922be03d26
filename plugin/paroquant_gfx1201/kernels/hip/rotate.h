// Rotation of one group by one wave, in the ownership layout of layout.py: no LDS bank conflicts, no barriers.
#pragma once
#include "device.h"

constexpr int WAVE = 32;

DEVICE float from_f16(u32 half) { return static_cast<float>(__builtin_bit_cast(_Float16, static_cast<u16>(half))); }

// A group's rotation as one lane holds it: R = GROUP / 32 values to a lane, in registers from row to row.
template <int GROUP, int KROT>
struct Rotation {
  static constexpr int VALUES = GROUP / WAVE, PAIRS = VALUES / 2;
  static constexpr int WORDS = 2 + PAIRS + KROT * (1 + PAIRS);

  u32 selectors[VALUES];       // bytes of the loaded channels that each first store takes
  u32 start[VALUES];           // slots of the first stores
  float scales[VALUES];        // channel scales
  u32 angles[KROT][PAIRS];     // f16 cosine low, sine high
  u32 places[KROT][VALUES];    // slots of each layer's stores

  // table: a group's int32 [WORDS, 32].
  METHOD void load(const u32* table, int lane) {
    const u32* word = table + lane;
    u32 slots = word[0], sources = word[WAVE];
    for (int t = 0; t < VALUES; t++) {
      u32 source = sources >> 8 * t & 0xff;
      selectors[t] = 0x01000c0c + source * 0x02020000;  // its two bytes above two bytes of zero: the bf16 as f32
      start[t] = slots >> 8 * t & 0xff;
      scales[t] = from_f16(word[(2 + t / 2) * WAVE] >> 16 * (t & 1) & 0xffff);
    }
    word += (2 + PAIRS) * WAVE;
    for (int layer = 0; layer < KROT; layer++, word += (1 + PAIRS) * WAVE) {
      slots = word[0];
      for (int t = 0; t < VALUES; t++) places[layer][t] = slots >> 8 * t & 0xff;
      for (int pair = 0; pair < PAIRS; pair++) angles[layer][pair] = word[(1 + pair) * WAVE];
    }
  }

  // x: a lane's VALUES consecutive bf16 channels, two to a word. Leaves the same channels, rotated, in `values`.
  // wave: the wave's own GROUP floats of LDS.
  METHOD void apply(const u32* x, float* wave, int lane, float* values) const {
    for (int t = 0; t < VALUES; t++) {
      u32 high = VALUES == 4 ? x[1] : 0;
      wave[start[t]] = __builtin_bit_cast(float, permute_bytes(high, x[0], selectors[t]));
    }
    wave_sync();
    for (int layer = 0; layer < KROT; layer++) {
      float own[VALUES];
      for (int t = 0; t < VALUES; t++) own[t] = wave[t * WAVE + lane] * (layer == 0 ? scales[t] : 1.0f);
      wave_sync();
      for (int pair = 0; pair < PAIRS; pair++) {
        float cosine = from_f16(angles[layer][pair] & 0xffff), sine = from_f16(angles[layer][pair] >> 16);
        float first = own[2 * pair], second = own[2 * pair + 1];
        wave[places[layer][2 * pair]] = __builtin_fmaf(cosine, first, sine * second);
        wave[places[layer][2 * pair + 1]] = __builtin_fmaf(cosine, second, -(sine * first));
      }
      wave_sync();
    }
    for (int t = 0; t < VALUES; t++) values[t] = wave[lane * VALUES + t];
    wave_sync();  // the next row's first stores overwrite these
  }
};

// What the kernels use of a gfx1201, as clang builtins; ../simt/device.h is the same for the CPU.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using v2i = int __attribute__((ext_vector_type(2)));
using v4i = int __attribute__((ext_vector_type(4)));
using v8i = int __attribute__((ext_vector_type(8)));
using v8f = float __attribute__((ext_vector_type(8)));
using v8s = short __attribute__((ext_vector_type(8)));  // bf16, as bits
using v8h = _Float16 __attribute__((ext_vector_type(8)));

#define DEVICE static inline __attribute__((device, always_inline))
#define METHOD inline __attribute__((device, always_inline))
#define KERNEL(most_threads) \
  extern "C" __attribute__((global, amdgpu_flat_work_group_size(32, most_threads))) void
#define SHARED(type, name, count) static __attribute__((shared)) __attribute__((aligned(16))) type name[count]
#define DYNAMIC_SHARED(type, name) extern __attribute__((shared)) __attribute__((aligned(16))) type name[]
#define EXPORT(kernel)

DEVICE int thread_id() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE int block_x() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE int block_y() { return __builtin_amdgcn_workgroup_id_y(); }
DEVICE int block_z() { return __builtin_amdgcn_workgroup_id_z(); }

DEVICE void workgroup_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// LDS operations of one wave are in order: only the compiler has to be kept from moving them.
DEVICE void wave_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

// `value`, which is the same in each lane of a wave: the compiler then keeps what it computes from it in scalar registers.
DEVICE int same_in_wave(int value) { return __builtin_amdgcn_readfirstlane(value); }

template <int MASK>
DEVICE u32 lane_xor(u32 value) {
  static_assert(MASK == 1 || MASK == 2 || MASK == 4 || MASK == 8 || MASK == 16);
  if constexpr (MASK == 16)
    return __builtin_amdgcn_permlanex16(value, value, 0x76543210, 0xfedcba98, false, false);
  else
    return __builtin_amdgcn_update_dpp(0, value, 0x160 | MASK, 0xf, 0xf, true);  // row_xmask
}

DEVICE u32 convert_e4m3_pair(float first, float second) {
  return __builtin_amdgcn_cvt_pk_fp8_f32(first, second, 0, false);
}

template <int BYTE>
DEVICE float e4m3_value(u32 word) {
  return __builtin_amdgcn_cvt_f32_fp8(word, BYTE);
}

DEVICE v8f wmma_e4m3(v2i a, v2i b, v8f c) { return __builtin_amdgcn_wmma_f32_16x16x16_fp8_fp8_w32_gfx12(a, b, c); }

DEVICE v8i wmma_u8_i8(v2i a, v2i b, v8i c) {
  return __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32_gfx12(false, a, true, b, c, false);
}

DEVICE v8i wmma_i8_i8(v2i a, v2i b, v8i c) {
  return __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32_gfx12(true, a, true, b, c, false);
}

DEVICE v8f wmma_f16(v8h a, v8h b, v8f c) { return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(a, b, c); }

DEVICE v8f wmma_bf16(v8s a, v8s b, v8f c) {
#if __clang_major__ >= 20
  using v8b = __bf16 __attribute__((ext_vector_type(8)));
  return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(__builtin_bit_cast(v8b, a), __builtin_bit_cast(v8b, b), c);
#else
  return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(a, b, c);
#endif
}

DEVICE u32 permute_bytes(u32 high, u32 low, u32 selector) { return __builtin_amdgcn_perm(high, low, selector); }
DEVICE float reciprocal_estimate(float value) { return __builtin_amdgcn_rcpf(value); }
DEVICE float inverse_root_estimate(float value) { return __builtin_amdgcn_rsqf(value); }
DEVICE float exp2_estimate(float value) { return __builtin_amdgcn_exp2f(value); }
DEVICE float clamp(float value, float low, float high) { return __builtin_amdgcn_fmed3f(value, low, high); }
DEVICE int sum_of_bytes(u32 word) { return __builtin_amdgcn_sudot4(true, word, true, 0x01010101, 0, false); }

template <class Vector>
DEVICE Vector load_once(const Vector* source) {
  return __builtin_nontemporal_load(source);
}

DEVICE int arrive(int* counter) {
  return __hip_atomic_fetch_add(counter, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
DEVICE void release_to_device() { __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent"); }
DEVICE void acquire_from_device() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent"); }

// Nothing moves across.
DEVICE void keep_order() { __builtin_amdgcn_sched_barrier(0); }

// The compiler may not remember what it has computed from `value`.
template <class Value>
DEVICE void forget(Value& value) {
  asm volatile("" : "+v"(value));
}

// Loads, stores and roundings of the data types; all arithmetic is in float32.

#pragma once

#include <cstdint>

namespace curvadion {

// The codes of curvadion/ops/tensors.py.
enum DType : uint8_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// Elements a thread works on at a time: 16 bytes of the narrow types, twice 16 of float32.
constexpr int WIDTH = 8;

// An address that came in a table, which the compiler would take for possibly shared memory.
template <typename T>
__device__ inline T* global(T* address) {
    __builtin_assume(__isGlobal(address));
    return address;
}

// A narrow dtype's bits as float32. In PTX, here and below: the headers that wrap conversions take
// longer to compile than everything else.
__device__ inline float widen(uint16_t bits, DType dtype) {
    if (dtype == BFLOAT16) return __uint_as_float(uint32_t(bits) << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Two numbers rounded to nearest, ties to even, in a narrow dtype; the first in the lower half.
__device__ inline uint32_t narrow(float first, float second, DType dtype) {
    uint32_t pair;
    if (dtype == BFLOAT16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    }
    return pair;
}

__device__ inline void load_wide(const void* data, DType dtype, int64_t at, float (&values)[WIDTH]) {
    if (dtype == FLOAT32) {
        const float* start = static_cast<const float*>(data) + at;
        const float4* from = global(reinterpret_cast<const float4*>(start));
        const float4 low = from[0], high = from[1];
        values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
        values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
        return;
    }
    const uint16_t* start = static_cast<const uint16_t*>(data) + at;
    const uint4 packed = *global(reinterpret_cast<const uint4*>(start));
    const uint32_t pairs[] = {packed.x, packed.y, packed.z, packed.w};
    for (int i = 0; i < WIDTH; ++i) {
        values[i] = widen(uint16_t(pairs[i / 2] >> (i % 2 * 16)), dtype);
    }
}

__device__ inline void store_wide(void* data, DType dtype, int64_t at, const float (&values)[WIDTH]) {
    if (dtype == FLOAT32) {
        float4* to = global(reinterpret_cast<float4*>(static_cast<float*>(data) + at));
        to[0] = make_float4(values[0], values[1], values[2], values[3]);
        to[1] = make_float4(values[4], values[5], values[6], values[7]);
        return;
    }
    uint4 packed;
    packed.x = narrow(values[0], values[1], dtype);
    packed.y = narrow(values[2], values[3], dtype);
    packed.z = narrow(values[4], values[5], dtype);
    packed.w = narrow(values[6], values[7], dtype);
    *global(reinterpret_cast<uint4*>(static_cast<uint16_t*>(data) + at)) = packed;
}

__device__ inline float load(const void* data, DType dtype, int64_t at) {
    if (dtype == FLOAT32) return global(static_cast<const float*>(data))[at];
    return widen(global(static_cast<const uint16_t*>(data))[at], dtype);
}

__device__ inline void store(void* data, DType dtype, int64_t at, float value) {
    if (dtype == FLOAT32) {
        global(static_cast<float*>(data))[at] = value;
    } else {
        global(static_cast<uint16_t*>(data))[at] = uint16_t(narrow(value, 0.0f, dtype));
    }
}

// The number that dtype holds for a value.
__device__ inline float rounded(float value, DType dtype) {
    return dtype == FLOAT32 ? value : widen(uint16_t(narrow(value, 0.0f, dtype)), dtype);
}

__device__ inline uint32_t mixed(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// A float32 that is exactly one of the two bfloat16 neighbours of value, as round_stochastic of
// curvadion/ops/operations.py defines it: the noise follows from seed and place alone, so all
// replicas get the same bits.
__device__ inline float stochastically(float value, int64_t at, uint32_t seed) {
    const uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7F800000u) == 0x7F800000u) return value;
    const uint32_t noise = mixed(mixed(uint32_t(at)) ^ seed) & 0xFFFFu;
    return __uint_as_float((bits + noise) & 0xFFFF0000u);
}

}  // namespace curvadion

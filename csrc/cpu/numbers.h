// Loads, stores and roundings of the data types; all arithmetic is in float32.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// Inlined into each of a kernel's clones, so that it is compiled for that clone's vector unit.
#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

// One portable library: the loader picks the widest vectors that the machine has. GCC knows these
// levels of the architecture by name since version 12.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define VECTOR_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTOR_CLONES
#endif

namespace curvadion {

enum DType : uint8_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// Elements that are worked on at a time: small enough for the first cache, a multiple of LANES.
constexpr int64_t STRIP = 512;
// Sums run in as many lanes, because the compiler may not reorder them.
constexpr int LANES = 32;
// What weights and momenta may reach: products of such numbers stay within float32.
constexpr float LARGEST = 0x1p100f, LARGEST_FLOAT16 = 65504.0f;
// Sums of squares in float32 are exact enough between these.
constexpr float SMALLEST_SQUARES = 0x1p-90f, LARGEST_SQUARES = 0x1p120f;

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE float from_bfloat16(uint16_t half) { return float_of(uint32_t(half) << 16); }

// To nearest, ties to even; NaN stays NaN.
INLINE uint16_t to_bfloat16(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return value == value ? uint16_t(rounded) : uint16_t(0x7FC0);
}

INLINE float from_float16(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16;
    const uint32_t rest = uint32_t(half & 0x7FFF) << 13;
    // Scaling by 2^112 moves the exponent's bias and makes subnormal numbers normal.
    const uint32_t finite = bits_of(float_of(rest) * 0x1p112f);
    const uint32_t special = rest | 0x7F800000;
    return float_of(sign | (rest >= 0x0F800000 ? special : finite));
}

// To nearest, ties to even; overflow gives infinity; NaN stays NaN.
INLINE uint16_t to_float16(float value) {
    const uint32_t sign = (bits_of(value) >> 16) & 0x8000;
    const uint32_t magnitude = bits_of(value) & 0x7FFFFFFF;
    // Subnormal results: adding 1/2 lets the float32 addition round at the right bit.
    const uint32_t tiny = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000;
    const uint32_t normal = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    const uint32_t finite = magnitude < 0x38800000 ? tiny : normal;
    const uint32_t special = magnitude > 0x7F800000 ? 0x7E00 : 0x7C00;
    return uint16_t(sign | (magnitude >= 0x477FF000 ? special : finite));
}

INLINE float largest(DType dtype) { return dtype == FLOAT16 ? LARGEST_FLOAT16 : LARGEST; }

// Within [-limit, limit]; NaN stays NaN.
INLINE float saturated(float value, float limit) {
    value = value > limit ? limit : value;
    return value < -limit ? -limit : value;
}

// n elements of data from `start` as float32: in place if they are, else converted into `buffer`.
INLINE const float* load(const void* data, DType dtype, int64_t start, int64_t n, float* buffer) {
    if (dtype == FLOAT32) return static_cast<const float*>(data) + start;
    const uint16_t* from = static_cast<const uint16_t*>(data) + start;
    if (dtype == BFLOAT16) {
        for (int64_t i = 0; i < n; ++i) buffer[i] = from_bfloat16(from[i]);
    } else {
        for (int64_t i = 0; i < n; ++i) buffer[i] = from_float16(from[i]);
    }
    return buffer;
}

INLINE void store(void* data, DType dtype, int64_t start, int64_t n, const float* buffer) {
    if (dtype == FLOAT32) {
        std::memcpy(static_cast<float*>(data) + start, buffer, size_t(n) * sizeof(float));
        return;
    }
    uint16_t* to = static_cast<uint16_t*>(data) + start;
    if (dtype == BFLOAT16) {
        for (int64_t i = 0; i < n; ++i) to[i] = to_bfloat16(buffer[i]);
    } else {
        for (int64_t i = 0; i < n; ++i) to[i] = to_float16(buffer[i]);
    }
}

}  // namespace curvadion

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

enum DType : uint8_t { FLOAT32 = 0, BFLOAT16 = 1 };

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

// n elements of data from `start` as float32: in place if they are, else converted into `buffer`.
INLINE const float* load(const void* data, DType dtype, int64_t start, int64_t n, float* buffer) {
    if (dtype == FLOAT32) return static_cast<const float*>(data) + start;
    const uint16_t* from = static_cast<const uint16_t*>(data) + start;
    for (int64_t i = 0; i < n; ++i) buffer[i] = from_bfloat16(from[i]);
    return buffer;
}

// Where elements of data from `start` are computed as float32 before they are stored: in place if
// they are of that dtype, else in `buffer`.
INLINE float* place(void* data, DType dtype, int64_t start, float* buffer) {
    return dtype == FLOAT32 ? static_cast<float*>(data) + start : buffer;
}

INLINE void store(void* data, DType dtype, int64_t start, int64_t n, const float* buffer) {
    if (dtype == FLOAT32) {
        float* to = static_cast<float*>(data) + start;
        if (to != buffer) std::memcpy(to, buffer, size_t(n) * sizeof(float));
        return;
    }
    uint16_t* to = static_cast<uint16_t*>(data) + start;
    for (int64_t i = 0; i < n; ++i) to[i] = to_bfloat16(buffer[i]);
}

}  // namespace curvadion

// Blocks of 256 states in 8 bits.
//
// curvadion/ops/state_codes.py has the format and the order of the arithmetic, which gives the same
// bits on every machine. So files that include this are compiled without fused multiply-adds.

#pragma once

#include <algorithm>
#include <cmath>

#include "numbers.h"
#include "runs.h"

namespace curvadion {

// The codes of a tensor: 256 of each block, and behind them the scales of all.
struct Codes {
    int8_t* codes;
    float* scales;

    Codes(int8_t* of, int64_t numel)
        : codes(of), scales(reinterpret_cast<float*>(of + blocks_of(numel) * BLOCK)) {}
};

// How elements become codes.
struct Rounding {
    bool roots;     // codes are of the elements' roots
    bool seeded;    // elements are rounded up or down at random, else to nearest
    uint32_t seed;  // of the tensor
};

// A bijection of 32-bit integers, with outputs that look random.
INLINE uint32_t mixed(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// 16 bits that follow from a position and a seed, as a number in [0, 1).
INLINE float random(uint32_t position, uint32_t seed) {
    return float(int32_t(mixed(mixed(position) ^ seed) & 0xFFFF)) * 0x1p-16f;
}

// s = max |y| / 127, rounded to 17 bits; 0 if it is too small.
INLINE float scale_of(const float* y, bool roots) {
    // The least normal number, and the least one whose square is normal.
    constexpr float LEAST_SCALE = 0x1p-126f, LEAST_SCALE_OF_ROOTS = 0x1p-63f;
    constexpr uint32_t LOWER_BITS = 0x7F;  // a scale keeps 17 of the 24 bits of a float
    float largest = 0.0f;
    for (int i = 0; i < BLOCK; ++i) {
        const float size = std::fabs(y[i]);
        largest = size > largest ? size : largest;
    }
    const float s = float_of((bits_of(largest / 127.0f) + (LOWER_BITS + 1) / 2) & ~LOWER_BITS);
    return s >= (roots ? LEAST_SCALE_OF_ROOTS : LEAST_SCALE) ? s : 0.0f;
}

// y / s, rounded to one of its two neighbours: at random, or to the nearest one.
INLINE void codes_of(
    const float* y, float s, int64_t position, Rounding rounding, int8_t* codes
) {
    constexpr float LARGEST = 127.0f, ABOUT_LARGEST = 126.99f;
    alignas(64) float scaled[BLOCK], c[BLOCK];
    for (int i = 0; i < BLOCK; ++i) scaled[i] = y[i] / s;
    if (rounding.seeded) {
        alignas(64) float chance[BLOCK];
        const uint32_t first = uint32_t(position);
        for (uint32_t i = 0; i < BLOCK; ++i) chance[i] = random(first + i, rounding.seed);
        for (int i = 0; i < BLOCK; ++i) {
            // The floor; compilers vectorise this, but not std::floor.
            const float towards_zero = float(int32_t(scaled[i]));
            const float low = towards_zero - (towards_zero > scaled[i] ? 1.0f : 0.0f);
            c[i] = low + (scaled[i] - low > chance[i] ? 1.0f : 0.0f);
        }
    } else {
        for (int i = 0; i < BLOCK; ++i) c[i] = std::nearbyint(scaled[i]);  // ties to even
    }
    for (int i = 0; i < BLOCK; ++i) {
        float code = scaled[i] > ABOUT_LARGEST ? LARGEST : c[i];
        code = scaled[i] < -ABOUT_LARGEST ? -LARGEST : code;
        // The root of a number above zero stays above zero.
        code = rounding.roots && scaled[i] > 0.0f && code < 1.0f ? 1.0f : code;
        codes[i] = int8_t(code);
    }
}

// The codes of the block that begins at `at`, whose first n elements are in y. Changes y.
INLINE void encode_block(float* y, int64_t at, int64_t n, Codes to, Rounding rounding) {
    for (int64_t i = n; i < BLOCK; ++i) y[i] = 0.0f;
    if (rounding.roots) {
        for (int i = 0; i < BLOCK; ++i) y[i] = std::sqrt(y[i]);
    }
    const float s = scale_of(y, rounding.roots);
    to.scales[at / BLOCK] = s;
    int8_t* codes = to.codes + at;
    if (s > 0.0f) {
        codes_of(y, s, at, rounding, codes);
    } else {
        std::memset(codes, 0, BLOCK);
    }
}

// The first n elements of the block that begins at `at`.
INLINE void decode_block(Codes from, int64_t at, int64_t n, bool roots, float* y) {
    const float s = from.scales[at / BLOCK];
    const int8_t* codes = from.codes + at;
    for (int64_t i = 0; i < n; ++i) {
        const float value = float(codes[i]) * s;
        y[i] = roots ? value * value : value;
    }
}

}  // namespace curvadion

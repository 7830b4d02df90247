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

// max |y|. Numbers that are not negative are in the order of their bits, and compilers vectorise
// maxima of integers, but not of floating-point numbers.
INLINE float largest_of(const float* y) {
    int32_t largest = 0;
    for (int i = 0; i < BLOCK; ++i) {
        largest = std::max(largest, int32_t(bits_of(y[i]) & 0x7FFFFFFF));
    }
    return float_of(uint32_t(largest));
}

// s = max |y| / 127, rounded to 17 bits; 0 if it is too small.
INLINE float scale_of(const float* y, bool roots) {
    // The least normal number, and the least one whose square is normal.
    constexpr float LEAST_SCALE = 0x1p-126f, LEAST_SCALE_OF_ROOTS = 0x1p-63f;
    constexpr uint32_t LOWER_BITS = 0x7F;  // a scale keeps 17 of the 24 bits of a float
    const float exact = largest_of(y) / 127.0f;
    const float s = float_of((bits_of(exact) + (LOWER_BITS + 1) / 2) & ~LOWER_BITS);
    return s >= (roots ? LEAST_SCALE_OF_ROOTS : LEAST_SCALE) ? s : 0.0f;
}

// A number below 2^22, rounded to the nearest integer, ties to even. Compilers vectorise this on
// every machine, and std::nearbyint only on some.
INLINE int32_t nearest(float x) {
    constexpr float MIDDLE = 0x1.8p23f;  // numbers around it are integers
    return int32_t((x + MIDDLE) - MIDDLE);
}

// A number rounded up if its distance to the integer below is above `chance`, else down. Truth
// values are added to integers: where they choose between floating-point numbers, compilers may
// branch instead, at random.
INLINE int32_t up_or_down(float x, float chance) {
    const int32_t towards_zero = int32_t(x);
    const int32_t low = towards_zero - (float(towards_zero) > x);
    return low + (x - float(low) > chance);
}

// y / s, rounded to one of its two neighbours: at random, or to the nearest one.
template <bool SEEDED>
INLINE void codes_of(
    const float* y, float s, int64_t position, Rounding rounding, int8_t* __restrict codes
) {
    constexpr int32_t LARGEST = 127;
    constexpr float ABOUT_LARGEST = 126.99f;
    // The root of a number above zero stays above zero.
    const int32_t least = rounding.roots ? 1 : 0;
    const uint32_t first = uint32_t(position);
    for (uint32_t i = 0; i < BLOCK; ++i) {
        const float scaled = y[i] / s;
        int32_t code;
        if constexpr (SEEDED) {
            code = up_or_down(scaled, random(first + i, rounding.seed));
        } else {
            code = nearest(scaled);
        }
        code = scaled > 0.0f && code < least ? least : code;
        code = scaled > ABOUT_LARGEST ? LARGEST : code;
        code = scaled < -ABOUT_LARGEST ? -LARGEST : code;
        codes[i] = int8_t(code);
    }
}

// The codes of the block that begins at `at`. Its first n elements, or their roots, are in y, which
// is filled up with zeros.
INLINE void encode_block(float* y, int64_t at, int64_t n, Codes to, Rounding rounding) {
    for (int64_t i = n; i < BLOCK; ++i) y[i] = 0.0f;
    const float s = scale_of(y, rounding.roots);
    to.scales[at / BLOCK] = s;
    int8_t* codes = to.codes + at;
    if (s > 0.0f) {
        if (rounding.seeded) {
            codes_of<true>(y, s, at, rounding, codes);
        } else {
            codes_of<false>(y, s, at, rounding, codes);
        }
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

// States in 8 bits a number, with a scale for each block of 256, in one pass.
//
// curvadion/ops/state_codes.py has the format and the order of the arithmetic, which gives the same
// bits on every machine. So this file is compiled without fused multiply-adds.

#include <algorithm>
#include <cmath>

#include "numbers.h"
#include "runs.h"

namespace curvadion {
namespace {

constexpr float LARGEST = 127.0f, ABOUT_LARGEST = 126.99f;
// The least normal number, and the least one whose square is normal.
constexpr float LEAST_SCALE = 0x1p-126f, LEAST_SCALE_OF_ROOTS = 0x1p-63f;
// A scale keeps 17 of the 24 bits of a float.
constexpr uint32_t LOWER_BITS = 0x7F;

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
    float largest = 0.0f;
    for (int i = 0; i < BLOCK; ++i) {
        const float size = std::fabs(y[i]);
        largest = size > largest ? size : largest;
    }
    const float s = float_of((bits_of(largest / LARGEST) + (LOWER_BITS + 1) / 2) & ~LOWER_BITS);
    return s >= (roots ? LEAST_SCALE_OF_ROOTS : LEAST_SCALE) ? s : 0.0f;
}

// y / s, rounded to one of its two neighbours: at random, or to the nearest one.
INLINE void codes_of(
    const float* y, float s, int64_t position, bool roots, bool seeded, uint32_t seed, int8_t* codes
) {
    alignas(64) float scaled[BLOCK], c[BLOCK];
    for (int i = 0; i < BLOCK; ++i) scaled[i] = y[i] / s;
    if (seeded) {
        alignas(64) float chance[BLOCK];
        const uint32_t first = uint32_t(position);
        for (uint32_t i = 0; i < BLOCK; ++i) chance[i] = random(first + i, seed);
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
        code = roots && scaled[i] > 0.0f && code < 1.0f ? 1.0f : code;
        codes[i] = int8_t(code);
    }
}

// The codes of a tensor: 256 of each block, and behind them the scales of all.
struct Codes {
    int8_t* codes;
    float* scales;

    Codes(int8_t* of, int64_t numel)
        : codes(of), scales(reinterpret_cast<float*>(of + (numel + BLOCK - 1) / BLOCK * BLOCK)) {}
};

VECTOR_CLONES void encode_run(
    const float* x, Run run, Codes to, bool roots, bool seeded, uint32_t seed
) {
    alignas(64) float y[BLOCK];
    for (int64_t at = run.start; at < run.end; at += BLOCK) {
        const int64_t n = std::min(BLOCK, run.end - at);
        for (int64_t i = 0; i < n; ++i) y[i] = x[at + i];
        for (int64_t i = n; i < BLOCK; ++i) y[i] = 0.0f;
        if (roots) {
            for (int i = 0; i < BLOCK; ++i) y[i] = std::sqrt(y[i]);
        }
        const float s = scale_of(y, roots);
        to.scales[at / BLOCK] = s;
        int8_t* codes = to.codes + at;
        if (s > 0.0f) {
            codes_of(y, s, at, roots, seeded, seed, codes);
        } else {
            std::memset(codes, 0, BLOCK);
        }
    }
}

VECTOR_CLONES void decode_run(float* x, Run run, Codes from, bool roots) {
    for (int64_t at = run.start; at < run.end; at += BLOCK) {
        const int64_t n = std::min(BLOCK, run.end - at);
        const float s = from.scales[at / BLOCK];
        const int8_t* codes = from.codes + at;
        for (int64_t i = 0; i < n; ++i) {
            const float value = float(codes[i]) * s;
            x[at + i] = roots ? value * value : value;
        }
    }
}

}  // namespace
}  // namespace curvadion

using namespace curvadion;

extern "C" {

// The codes of X[t]. Rounded at random with seeds[t], or to nearest if seeds is null.
void curvadion_encode_states(
    int64_t count, const int64_t* numel, const float* const* X, int8_t* const* codes,
    const uint32_t* seeds, int roots, int threads
) {
    for_each_run(runs_of(count, numel), threads, [&](Run run) {
        const int64_t t = run.tensor;
        const Codes to(codes[t], numel[t]);
        encode_run(X[t], run, to, roots != 0, seeds != nullptr, seeds ? seeds[t] : 0);
    });
}

// X[t] <- what the codes stand for.
void curvadion_decode_states(
    int64_t count, const int64_t* numel, float* const* X, int8_t* const* codes, int roots,
    int threads
) {
    for_each_run(runs_of(count, numel), threads, [&](Run run) {
        const int64_t t = run.tensor;
        decode_run(X[t], run, Codes(codes[t], numel[t]), roots != 0);
    });
}

}  // extern "C"

// Codes of a few bits an element, in blocks of 256, and what is made of them in one pass.
//
// curvadion/ops/code_format.py has the format and the order of the arithmetic, which gives the same
// bits on every machine. So this file is compiled without fused multiply-adds, and sums run as
// stated there.

#include <algorithm>
#include <cmath>

#include "numbers.h"
#include "runs.h"

namespace curvadion {
namespace {

constexpr int64_t PLANE = BLOCK / 8, SCALE_BYTES = 2;

struct Format {
    int bits;
    const float* signs;
    const float* midpoints;
    const float* levels;

    INLINE_MEMBER int64_t row(int64_t block) const { return block * (PLANE * bits + SCALE_BYTES); }
};

// Two of the eight stages of the Hadamard matrix. A stage writes the sums of neighbours, then
// their differences.
INLINE void two_stages(const float* __restrict from, float* __restrict to) {
    for (int i = 0; i < BLOCK / 4; ++i) {
        const float a = from[4 * i], b = from[4 * i + 1], c = from[4 * i + 2], d = from[4 * i + 3];
        const float left = a + b, right = c + d, low = a - b, high = c - d;
        to[i] = left + right;
        to[64 + i] = low + high;
        to[128 + i] = left - right;
        to[192 + i] = low - high;
    }
}

INLINE void hadamard(float* x) {
    float other[BLOCK];
    two_stages(x, other);
    two_stages(other, x);
    two_stages(x, other);
    two_stages(other, x);
}

// How many midpoints, times `size`, lie below each number.
template <int BITS>
INLINE void count_below(const float* y, const float* midpoints, float size, uint8_t* codes) {
    constexpr int COUNT = (1 << BITS) - 1;
    float edges[COUNT];
    for (int m = 0; m < COUNT; ++m) edges[m] = midpoints[m] * size;
    // Of many midpoints every 16th is counted, and those between are searched.
    constexpr int EVERY = BITS <= 4 ? 1 : 16;
    int below[BLOCK];
    for (int i = 0; i < BLOCK; ++i) {
        int count = 0;
        for (int m = EVERY - 1; m < COUNT; m += EVERY) count += y[i] > edges[m];
        below[i] = EVERY * count;
    }
    for (int half = EVERY / 2; half > 0; half /= 2) {
        for (int i = 0; i < BLOCK; ++i) {
            below[i] += y[i] > edges[below[i] + half - 1] ? half : 0;
        }
    }
    for (int i = 0; i < BLOCK; ++i) codes[i] = uint8_t(below[i]);
}

template <int BITS>
INLINE void pack(const uint8_t* __restrict codes, uint8_t* __restrict packed) {
    for (int p = 0; p < BITS; ++p) {
        for (int j = 0; j < PLANE; ++j) {
            uint8_t byte = 0;
            for (int k = 0; k < 8; ++k) {
                byte |= uint8_t(((codes[PLANE * k + j] >> p) & 1) << k);
            }
            packed[PLANE * p + j] = byte;
        }
    }
}

template <int BITS>
INLINE void unpack(const uint8_t* __restrict packed, uint8_t* __restrict codes) {
    for (int k = 0; k < 8; ++k) {
        for (int j = 0; j < PLANE; ++j) {
            uint8_t code = 0;
            for (int p = 0; p < BITS; ++p) {
                code |= uint8_t(((packed[PLANE * p + j] >> k) & 1) << p);
            }
            codes[PLANE * k + j] = code;
        }
    }
}

// table[code], for tables so small that selections are faster than loads.
template <int BITS>
INLINE float chosen(int code, const float* table) {
    if constexpr (BITS == 0) {
        return *table;
    } else {
        constexpr int HALF = 1 << (BITS - 1);
        const float low = chosen<BITS - 1>(code, table);
        const float high = chosen<BITS - 1>(code, table + HALF);
        return code & HALF ? high : low;
    }
}

template <int BITS>
INLINE void look_up(const uint8_t* codes, const float* levels, float scale, float* y) {
    float table[1 << BITS];
    for (int l = 0; l < 1 << BITS; ++l) table[l] = levels[l] * scale;
    for (int i = 0; i < BLOCK; ++i) {
        if constexpr (BITS <= 4) {
            y[i] = chosen<BITS>(codes[i], table);
        } else {
            y[i] = table[codes[i]];
        }
    }
}

// The power of two by which the largest number gets between 1 and 2, and its inverse.
INLINE void powers_of(const float* y, float& up, float& down) {
    int32_t largest = 0;
    for (int i = 0; i < BLOCK; ++i) {
        const int32_t bits = int32_t(bits_of(y[i]) & 0x7FFFFFFF);
        largest = bits > largest ? bits : largest;
    }
    const uint32_t exponent = uint32_t(std::min(std::max(largest >> 23, 1), 253));
    up = float_of((254 - exponent) << 23);
    down = float_of(exponent << 23);
}

INLINE float sum_of_squares(const float* y) {
    float sums[BLOCK / 2];
    for (int i = 0; i < 128; ++i) sums[i] = y[i] * y[i] + y[128 + i] * y[128 + i];
    for (int i = 0; i < 64; ++i) sums[i] += sums[64 + i];
    for (int i = 0; i < 32; ++i) sums[i] += sums[32 + i];
    for (int i = 0; i < 16; ++i) sums[i] += sums[16 + i];
    for (int i = 0; i < 8; ++i) sums[i] += sums[8 + i];
    for (int i = 0; i < 4; ++i) sums[i] += sums[4 + i];
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// Codes by midpoints, packed into the planes of a row.
template <int BITS>
INLINE void quantize(const float* y, float size, const Format& f, uint8_t* codes, uint8_t* row) {
    count_below<BITS>(y, f.midpoints, size, codes);
    pack<BITS>(codes, row);
}

INLINE void quantize(const float* y, float size, const Format& f, uint8_t* codes, uint8_t* row) {
    switch (f.bits) {
        case 1: return quantize<1>(y, size, f, codes, row);
        case 2: return quantize<2>(y, size, f, codes, row);
        case 3: return quantize<3>(y, size, f, codes, row);
        case 4: return quantize<4>(y, size, f, codes, row);
        default: return quantize<8>(y, size, f, codes, row);
    }
}

INLINE void unpack(const uint8_t* row, const Format& f, uint8_t* codes) {
    switch (f.bits) {
        case 1: return unpack<1>(row, codes);
        case 2: return unpack<2>(row, codes);
        case 3: return unpack<3>(row, codes);
        case 4: return unpack<4>(row, codes);
        default: return unpack<8>(row, codes);
    }
}

INLINE void look_up(const uint8_t* codes, const Format& f, float scale, float* y) {
    switch (f.bits) {
        case 1: return look_up<1>(codes, f.levels, scale, y);
        case 2: return look_up<2>(codes, f.levels, scale, y);
        case 3: return look_up<3>(codes, f.levels, scale, y);
        case 4: return look_up<4>(codes, f.levels, scale, y);
        default: return look_up<8>(codes, f.levels, scale, y);
    }
}

// The numbers that codes and a scale stand for.
INLINE void expand(const uint8_t* codes, uint16_t scale, const Format& f, float* x) {
    look_up(codes, f, from_bfloat16(scale) * 0.0625f, x);
    hadamard(x);
    for (int i = 0; i < BLOCK; ++i) x[i] *= f.signs[i];
}

// A block -> its row; and, unless it is null, what that stands for.
INLINE void encode(const float* x, const Format& f, uint8_t* row, float* back) {
    alignas(64) float y[BLOCK];
    alignas(64) uint8_t codes[BLOCK];
    for (int i = 0; i < BLOCK; ++i) y[i] = x[i] * f.signs[i];
    hadamard(y);
    float up, down;
    powers_of(y, up, down);
    for (int i = 0; i < BLOCK; ++i) y[i] *= up;
    const float size = std::sqrt(sum_of_squares(y) * (1.0f / BLOCK));
    const uint16_t scale = to_bfloat16(size * 0.0625f * down);
    quantize(y, size, f, codes, row);
    std::memcpy(row + PLANE * f.bits, &scale, SCALE_BYTES);
    if (back != nullptr) expand(codes, scale, f, back);
}

INLINE void decode(const uint8_t* row, const Format& f, float* x) {
    alignas(64) uint8_t codes[BLOCK];
    uint16_t scale;
    std::memcpy(&scale, row + PLANE * f.bits, SCALE_BYTES);
    unpack(row, f, codes);
    expand(codes, scale, f, x);
}

// values <- rounded to a type
INLINE void round_to(DType dtype, float* values, int64_t n) {
    if (dtype == FLOAT32) return;
    uint16_t narrow[BLOCK];
    store(narrow, dtype, 0, n, values);
    load(narrow, dtype, 0, n, values);
}

// z = x - anchor + residual, where these are not null, of n elements, and zeros behind them.
INLINE void difference(
    const void* x, DType x_dtype, const float* anchor, const void* residual, DType r_dtype,
    int64_t at, int64_t n, float* z
) {
    alignas(64) float buffer[BLOCK];
    const float* numbers = load(x, x_dtype, at, n, buffer);
    if (anchor != nullptr) {
        std::memcpy(z, anchor + at, size_t(n) * sizeof *z);
        round_to(x_dtype, z, n);
        for (int64_t i = 0; i < n; ++i) z[i] = numbers[i] - z[i];
    } else {
        std::memcpy(z, numbers, size_t(n) * sizeof *z);
    }
    if (residual != nullptr) {
        const float* lost = load(residual, r_dtype, at, n, buffer);
        for (int64_t i = 0; i < n; ++i) z[i] += lost[i];
    }
    for (int64_t i = n; i < BLOCK; ++i) z[i] = 0.0f;
}

// The rows of z that are wanted in float32: as many as `count`, from `first` on.
struct Owned {
    float* z;
    int64_t first, count;

    INLINE_MEMBER void take(int64_t row, const float* block) const {
        if (row >= first && row < first + count) {
            std::memcpy(z + (row - first) * BLOCK, block, BLOCK * sizeof *z);
        }
    }
};

VECTOR_CLONES void encode_run(
    const void* x, DType x_dtype, const float* anchor, void* residual, DType r_dtype, Run run,
    Owned owned, uint8_t* codes, Format f
) {
    alignas(64) float z[BLOCK], back[BLOCK];
    int64_t row = run.row;
    for (int64_t at = run.start; at < run.end; at += BLOCK, ++row) {
        const int64_t n = std::min(BLOCK, run.end - at);
        difference(x, x_dtype, anchor, residual, r_dtype, at, n, z);
        owned.take(row, z);
        encode(z, f, codes + f.row(row), residual == nullptr ? nullptr : back);
        if (residual == nullptr) continue;
        for (int64_t i = 0; i < BLOCK; ++i) z[i] -= back[i];
        store(residual, r_dtype, at, n, z);
    }
}

// anchor <- anchor + mean, x <- anchor; without an anchor x <- mean.
VECTOR_CLONES void decode_run(
    void* x, DType x_dtype, float* anchor, Run run, const uint8_t* codes, Format f
) {
    alignas(64) float now[BLOCK];
    int64_t row = run.row;
    for (int64_t at = run.start; at < run.end; at += BLOCK, ++row) {
        const int64_t n = std::min(BLOCK, run.end - at);
        decode(codes + f.row(row), f, now);
        if (anchor != nullptr) {
            for (int64_t i = 0; i < n; ++i) now[i] += anchor[at + i];
            std::memcpy(anchor + at, now, size_t(n) * sizeof *now);
        }
        store(x, x_dtype, at, n, now);
    }
}

VECTOR_CLONES void average_run(
    uint8_t* codes, float* own, const uint8_t* received, int64_t blocks, int ranks, int rank,
    Run run, Format up, Format down
) {
    alignas(64) float total[BLOCK], block[BLOCK];
    const float count = float(ranks);
    int64_t row = run.row;
    for (int64_t at = run.start; at < run.end; at += BLOCK, ++row) {
        for (int i = 0; i < BLOCK; ++i) total[i] = 0.0f;
        for (int r = 0; r < ranks; ++r) {
            if (r == rank) {
                std::memcpy(block, own + at, sizeof block);
            } else {
                decode(received + up.row(r * blocks + row), up, block);
            }
            for (int i = 0; i < BLOCK; ++i) total[i] += block[i];
        }
        alignas(64) float mean[BLOCK];
        for (int i = 0; i < BLOCK; ++i) mean[i] = total[i] / count;
        encode(mean, down, codes + down.row(row), block);
        for (int i = 0; i < BLOCK; ++i) own[at + i] = total[i] - count * block[i];
    }
}

}  // namespace
}  // namespace curvadion

using namespace curvadion;

extern "C" {

// z = X[t] - A[t] as X's type holds it + R[t]; the codes of z, and R[t] <- z less what they stand
// for. A or R may be null. Rows [first, first + owned_count) of z go to `owned`.
void curvadion_encode_difference(
    int64_t count, const int64_t* numel, const void* const* X, const uint8_t* X_dtype,
    const float* const* A, void* const* R, const uint8_t* R_dtype, uint8_t* codes, float* owned,
    int64_t first, int64_t owned_count, int bits, const float* signs, const float* midpoints,
    const float* levels, int threads
) {
    const Format f{bits, signs, midpoints, levels};
    for_each_run(runs_of(count, numel), threads, [&](Run run) {
        const int64_t t = run.tensor;
        encode_run(
            X[t], DType(X_dtype[t]), A ? A[t] : nullptr, R ? R[t] : nullptr,
            R ? DType(R_dtype[t]) : FLOAT32, run, {owned, first, owned_count}, codes, f
        );
    });
}

// A[t] <- A[t] + what the codes stand for, X[t] <- A[t]; without A, X[t] <- what they stand for.
void curvadion_decode_add(
    int64_t count, const int64_t* numel, void* const* X, const uint8_t* X_dtype, float* const* A,
    const uint8_t* codes, int bits, const float* signs, const float* levels, int threads
) {
    const Format f{bits, signs, nullptr, levels};
    for_each_run(runs_of(count, numel), threads, [&](Run run) {
        const int64_t t = run.tensor;
        decode_run(X[t], DType(X_dtype[t]), A ? A[t] : nullptr, run, codes, f);
    });
}

// The codes of the mean over ranks of `blocks` blocks, and own <- what these lose, times the ranks.
// received (ranks, blocks, row) has codes of up_bits, and codes get down_bits; the numbers of
// `rank` are in own.
void curvadion_average_codes(
    uint8_t* codes, float* own, const uint8_t* received, int64_t blocks, int ranks, int rank,
    int up_bits, int down_bits, const float* signs, const float* up_levels,
    const float* down_midpoints, const float* down_levels, int threads
) {
    const Format up{up_bits, signs, nullptr, up_levels};
    const Format down{down_bits, signs, down_midpoints, down_levels};
    const int64_t numel = blocks * BLOCK;
    for_each_run(runs_of(1, &numel), threads, [&](Run run) {
        average_run(codes, own, received, blocks, ranks, rank, run, up, down);
    });
}

}  // extern "C"

// Momentum, norms and the local step over lists of tensors of different sizes.
//
// Work is cut into blocks of BLOCK elements, whichever tensor they belong to, so that many small
// tensors and few large ones keep the threads equally busy. A norm is the sum of its blocks in
// their order: the number of threads changes no bit.

#include <algorithm>
#include <cmath>
#include <vector>

#include "numbers.h"

namespace curvadion {
namespace {

constexpr int64_t BLOCK = 128 * STRIP;
// Below that many elements starting threads costs more than it saves.
constexpr int64_t SERIAL = 1 << 15;

struct Block {
    int64_t tensor;
    int64_t start;
    int64_t length;
};

std::vector<Block> blocks_of(int64_t count, const int64_t* numel) {
    std::vector<Block> blocks;
    blocks.reserve(count);
    for (int64_t t = 0; t < count; ++t) {
        for (int64_t start = 0; start < numel[t]; start += BLOCK) {
            blocks.push_back({t, start, std::min(BLOCK, numel[t] - start)});
        }
    }
    return blocks;
}

template <typename Work>
void for_each_block(const std::vector<Block>& blocks, int threads, Work work) {
    int64_t elements = 0;
    for (const Block& block : blocks) elements += block.length;
    const int64_t n = int64_t(blocks.size());
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && elements > SERIAL)
    for (int64_t b = 0; b < n; ++b) work(b, blocks[b]);
}

INLINE float sum_of_lanes(float (&lanes)[LANES]) {
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
    }
    return lanes[0];
}

// sums = mu m + g within +-limit for n <= STRIP numbers, and the sum of their squares, which is NaN
// if a number was not finite.
INLINE float accumulate_strip(
    const float* m, const float* g, float mu, float limit, float* sums, int64_t n, Ahead m_ahead,
    Ahead g_ahead
) {
    float lanes[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        m_ahead.fetch(i);
        g_ahead.fetch(i);
        for (int j = 0; j < LANES; ++j) {
            const float sum = mu * m[i + j] + g[i + j], held = saturated(sum, limit);
            sums[i + j] = held;
            lanes[j] += held * held + (sum - sum);
        }
    }
    for (int j = 0; i + j < n; ++j) {
        const float sum = mu * m[i + j] + g[i + j], held = saturated(sum, limit);
        sums[i + j] = held;
        lanes[j] += held * held + (sum - sum);
    }
    return sum_of_lanes(lanes);
}

INLINE float sum_of_squares(const float* x, int64_t n, Ahead ahead) {
    float lanes[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        ahead.fetch(i);
        for (int j = 0; j < LANES; ++j) lanes[j] += x[i + j] * x[i + j];
    }
    for (int j = 0; i + j < n; ++j) lanes[j] += x[i + j] * x[i + j];
    return sum_of_lanes(lanes);
}

// The sum of n squares, which is taken anew where float32 has not held it.
INLINE double exact_sum(float squares, const float* x, int64_t n) {
    if (squares != squares || (squares > SMALLEST_SQUARES && squares < LARGEST_SQUARES)) {
        return squares;
    }
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += double(x[i]) * double(x[i]);
    return sum;
}

// mu m + g of one block, written to m if `write`; returns its sum of squares, as m's type holds it.
VECTOR_CLONES double accumulate_block(
    void* m, DType m_dtype, const void* g, DType g_dtype, Block block, float mu, bool write
) {
    float m_buffer[STRIP], g_buffer[STRIP], sums[STRIP];
    uint16_t narrow[STRIP];
    double total = 0;
    for (int64_t at = block.start; at < block.start + block.length; at += STRIP) {
        const int64_t n = std::min(STRIP, block.start + block.length - at);
        const float* old = load(m, m_dtype, at, n, m_buffer);
        const float* push = load(g, g_dtype, at, n, g_buffer);
        const Ahead m_ahead(m, m_dtype, at), g_ahead(g, g_dtype, at);
        const float limit = largest(m_dtype);
        const float squares = accumulate_strip(old, push, mu, limit, sums, n, m_ahead, g_ahead);
        if (m_dtype == FLOAT32) {
            total += exact_sum(squares, sums, n);
            if (write) store(m, m_dtype, at, n, sums);
            continue;
        }
        store(narrow, m_dtype, 0, n, sums);
        const float* held = load(narrow, m_dtype, 0, n, m_buffer);
        total += squares == squares ? exact_sum(sum_of_squares(held, n, m_ahead), held, n) : squares;
        if (write) std::memcpy(static_cast<uint16_t*>(m) + at, narrow, size_t(n) * sizeof *narrow);
    }
    return total;
}

VECTOR_CLONES double norm_block(const void* x, DType dtype, Block block) {
    float buffer[STRIP];
    double total = 0;
    for (int64_t at = block.start; at < block.start + block.length; at += STRIP) {
        const int64_t n = std::min(STRIP, block.start + block.length - at);
        const float* numbers = load(x, dtype, at, n, buffer);
        total += exact_sum(sum_of_squares(numbers, n, Ahead(x, dtype, at)), numbers, n);
    }
    return total;
}

// to = a x + b y within +-limit for n <= STRIP numbers; to is a buffer of STRIP.
INLINE void combine_strip(
    float a, const float* x, float b, const float* y, float limit, float* to, int64_t n,
    Ahead x_ahead, Ahead y_ahead
) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        x_ahead.fetch(i);
        y_ahead.fetch(i);
        for (int j = 0; j < LANES; ++j) {
            to[i + j] = saturated(a * x[i + j] + b * y[i + j], limit);
        }
    }
    for (; i < n; ++i) to[i] = saturated(a * x[i] + b * y[i], limit);
}

// x <- decay x - step g, and m <- mu m + g where there is an m.
VECTOR_CLONES void local_step_block(
    void* x, DType x_dtype, const void* g, DType g_dtype, void* m, DType m_dtype, Block block,
    float step, float decay, float mu, const uint32_t* seed
) {
    float x_buffer[STRIP], g_buffer[STRIP], m_buffer[STRIP], now[STRIP];
    for (int64_t at = block.start; at < block.start + block.length; at += STRIP) {
        const int64_t n = std::min(STRIP, block.start + block.length - at);
        const float* push = load(g, g_dtype, at, n, g_buffer);
        const float* old = load(x, x_dtype, at, n, x_buffer);
        const Ahead g_ahead(g, g_dtype, at);
        const Ahead x_ahead(x, x_dtype, at);
        combine_strip(decay, old, -step, push, largest(x_dtype), now, n, x_ahead, g_ahead);
        if (seed != nullptr) {
            store_stochastic(x, x_dtype, at, n, now, *seed);
        } else {
            store(x, x_dtype, at, n, now);
        }
        if (m == nullptr) continue;
        const float* momentum = load(m, m_dtype, at, n, m_buffer);
        const Ahead m_ahead(m, m_dtype, at);
        combine_strip(mu, momentum, 1.0f, push, largest(m_dtype), now, n, m_ahead, g_ahead);
        store(m, m_dtype, at, n, now);
    }
}

void write_norms(
    const std::vector<Block>& blocks, const std::vector<double>& sums, int64_t count, float* norms
) {
    std::vector<double> totals(count, 0.0);
    for (size_t b = 0; b < blocks.size(); ++b) totals[blocks[b].tensor] += sums[b];
    for (int64_t t = 0; t < count; ++t) norms[t] = float(std::sqrt(totals[t]));
}

}  // namespace
}  // namespace curvadion

using namespace curvadion;

extern "C" {

// norms[t] = || mu[t] M[t] + G[t] || as M's type holds it, saturated; if write, M[t] becomes that sum.
void curvadion_momentum_norms(
    int64_t count, const int64_t* numel, void* const* M, const uint8_t* M_dtype,
    const void* const* G, const uint8_t* G_dtype, const float* mu, int write, float* norms,
    int threads
) {
    const std::vector<Block> blocks = blocks_of(count, numel);
    std::vector<double> sums(blocks.size());
    for_each_block(blocks, threads, [&](int64_t b, Block block) {
        const int64_t t = block.tensor;
        sums[b] = accumulate_block(
            M[t], DType(M_dtype[t]), G[t], DType(G_dtype[t]), block, mu[t], write != 0
        );
    });
    write_norms(blocks, sums, count, norms);
}

// norms[t] = || X[t] ||
void curvadion_norms(
    int64_t count, const int64_t* numel, const void* const* X, const uint8_t* X_dtype,
    float* norms, int threads
) {
    const std::vector<Block> blocks = blocks_of(count, numel);
    std::vector<double> sums(blocks.size());
    for_each_block(blocks, threads, [&](int64_t b, Block block) {
        sums[b] = norm_block(X[block.tensor], DType(X_dtype[block.tensor]), block);
    });
    write_norms(blocks, sums, count, norms);
}

// X[t] <- decay[t] X[t] - step[t] G[t]; with M also M[t] <- mu[t] M[t] + G[t]. With seeds,
// bfloat16 X are rounded stochastically.
void curvadion_local_step(
    int64_t count, const int64_t* numel, void* const* X, const uint8_t* X_dtype,
    const void* const* G, const uint8_t* G_dtype, void* const* M, const uint8_t* M_dtype,
    const float* step, const float* decay, const float* mu, const uint32_t* seeds, int threads
) {
    for_each_block(blocks_of(count, numel), threads, [&](int64_t, Block block) {
        const int64_t t = block.tensor;
        local_step_block(
            X[t], DType(X_dtype[t]), G[t], DType(G_dtype[t]), M ? M[t] : nullptr,
            M ? DType(M_dtype[t]) : FLOAT32, block, step[t], decay[t], mu ? mu[t] : 1.0f,
            seeds ? &seeds[t] : nullptr
        );
    });
}

}  // extern "C"

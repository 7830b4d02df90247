// Column norms of tall factors R (k, n, r), and the right factor Q they normalise to.

#include <algorithm>
#include <cmath>
#include <vector>

#include "numbers.h"

namespace curvadion {
namespace {

// Rows summed in float32 before float64 takes over, and columns worked on at a time.
constexpr int64_t ROWS = 128;
constexpr int64_t COLUMNS = 256;

VECTOR_CLONES void sum_columns(const float* R, int64_t n, int64_t r, int64_t width, float* sums) {
    double totals[COLUMNS] = {};
    for (int64_t top = 0; top < n; top += ROWS) {
        float partial[COLUMNS] = {};
        const int64_t bottom = std::min(n, top + ROWS);
        for (int64_t i = top; i < bottom; ++i) {
            const float* row = R + i * r;
            for (int64_t j = 0; j < width; ++j) partial[j] += row[j] * row[j];
        }
        for (int64_t j = 0; j < width; ++j) totals[j] += partial[j];
    }
    for (int64_t j = 0; j < width; ++j) sums[j] = float(totals[j]);
}

// Rows [top, bottom) of Q = R diag(inverse).
VECTOR_CLONES void scale_rows(
    void* Q, DType dtype, const float* R, int64_t r, int64_t top, int64_t bottom,
    const float* inverse
) {
    float buffer[STRIP];
    for (int64_t i = top; i < bottom; ++i) {
        for (int64_t left = 0; left < r; left += STRIP) {
            const int64_t n = std::min(STRIP, r - left);
            const float* row = R + i * r + left;
            for (int64_t j = 0; j < n; ++j) buffer[j] = row[j] * inverse[left + j];
            store(Q, dtype, i * r + left, n, buffer);
        }
    }
}

}  // namespace
}  // namespace curvadion

using namespace curvadion;

extern "C" {

// sums[t, j] = sum over i of R[t, i, j]^2; R (k, n, r) and sums (k, r) contiguous float32.
void curvadion_column_sum_of_squares(
    const float* R, int64_t k, int64_t n, int64_t r, float* sums, int threads
) {
    const int64_t strips = (r + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && k * n * r > 32768)
    for (int64_t task = 0; task < k * strips; ++task) {
        const int64_t t = task / strips, left = task % strips * COLUMNS;
        const int64_t width = std::min(COLUMNS, r - left);
        sum_columns(R + t * n * r + left, n, r, width, sums + t * r + left);
    }
}

// Q[t] = R[t] / (sqrt(sums[t]) + epsilon) per column; columns shorter than `negligible` times the
// longest become zero. Q[t] is contiguous (n, r).
void curvadion_column_normalize(
    void* const* Q, const uint8_t* Q_dtype, const float* R, const float* sums, int64_t k,
    int64_t n, int64_t r, float epsilon, float negligible, int threads
) {
    std::vector<float> inverse(size_t(k * r));
    for (int64_t t = 0; t < k; ++t) {
        float longest = 0;
        for (int64_t j = 0; j < r; ++j) longest = std::max(longest, sums[t * r + j]);
        longest = std::sqrt(longest);
        for (int64_t j = t * r; j < (t + 1) * r; ++j) {
            const float length = std::sqrt(sums[j]);
            inverse[j] = length > negligible * longest ? 1.0f / (length + epsilon) : 0.0f;
        }
    }
    const int64_t strips = (n + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && k * n * r > 32768)
    for (int64_t task = 0; task < k * strips; ++task) {
        const int64_t t = task / strips, top = task % strips * ROWS;
        scale_rows(
            Q[t], DType(Q_dtype[t]), R + t * n * r, r, top, std::min(n, top + ROWS),
            inverse.data() + t * r
        );
    }
}

}  // extern "C"

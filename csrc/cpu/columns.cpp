// Column norms of tall factors R (k, n, r), and the right factor Q they normalise to.

#include <algorithm>
#include <cmath>
#include <vector>

#include "numbers.h"

namespace curvadion {
namespace {

// Rows and columns worked on at a time.
constexpr int64_t ROWS = 128;
constexpr int64_t COLUMNS = 256;

// In float64: the squares of tiny and of large numbers do not fit into float32.
VECTOR_CLONES void sum_columns(const float* R, int64_t n, int64_t r, int64_t width, double* sums) {
    double totals[COLUMNS] = {};
    for (int64_t i = 0; i < n; ++i) {
        const float* row = R + i * r;
        for (int64_t j = 0; j < width; ++j) totals[j] += double(row[j]) * double(row[j]);
    }
    for (int64_t j = 0; j < width; ++j) sums[j] = totals[j];
}

// Rows [top, bottom) of Q = R diag(inverse).
VECTOR_CLONES void scale_rows(
    void* Q, DType dtype, const float* R, int64_t r, int64_t top, int64_t bottom,
    const double* inverse
) {
    float buffer[STRIP];
    for (int64_t i = top; i < bottom; ++i) {
        for (int64_t left = 0; left < r; left += STRIP) {
            const int64_t n = std::min(STRIP, r - left);
            const float* row = R + i * r + left;
            for (int64_t j = 0; j < n; ++j) buffer[j] = float(row[j] * inverse[left + j]);
            store(Q, dtype, i * r + left, n, buffer);
        }
    }
}

}  // namespace
}  // namespace curvadion

using namespace curvadion;

extern "C" {

// sums[t, j] = sum over i of R[t, i, j]^2; R (k, n, r) contiguous float32,
// sums (k, r) float64.
void curvadion_column_sum_of_squares(
    const float* R, int64_t k, int64_t n, int64_t r, double* sums, int threads
) {
    const int64_t strips = (r + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && k * n * r > 32768)
    for (int64_t task = 0; task < k * strips; ++task) {
        const int64_t t = task / strips, left = task % strips * COLUMNS;
        const int64_t width = std::min(COLUMNS, r - left);
        sum_columns(R + t * n * r + left, n, r, width, sums + t * r + left);
    }
}

// Q[t] = R[t] / sqrt(sums[t]) per column; columns no longer than floors[t] become zero. sums and
// floors (k, r) float64. Q[t] is contiguous (n, r).
void curvadion_column_normalize(
    void* const* Q, const uint8_t* Q_dtype, const float* R, const double* sums,
    const double* floors, int64_t k, int64_t n, int64_t r, int threads
) {
    std::vector<double> inverse(size_t(k * r));
    for (int64_t j = 0; j < k * r; ++j) {
        const double length = std::sqrt(sums[j]);
        inverse[j] = length > floors[j] ? 1.0 / length : 0.0;
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

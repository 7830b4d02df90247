// Blocks of 256 elements of a list of tensors, and the threads that work on them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace curvadion {

constexpr int64_t BLOCK = 256;
// Blocks that a thread takes at a time.
constexpr int64_t RUN = 32;
// Up to that many of these starting threads costs more than it saves.
constexpr int64_t SERIAL = 4;

// The number of blocks of n elements.
inline int64_t blocks_of(int64_t n) { return (n + BLOCK - 1) / BLOCK; }

// Consecutive blocks of one tensor. `row` is the number of the first one in the whole list, and
// `index` that of the run.
struct Run {
    int64_t tensor, start, end, row;
    size_t index;
};

inline std::vector<Run> runs_of(int64_t count, const int64_t* numel) {
    std::vector<Run> runs;
    int64_t row = 0;
    for (int64_t t = 0; t < count; ++t) {
        for (int64_t start = 0; start < numel[t]; start += RUN * BLOCK) {
            const int64_t end = std::min(start + RUN * BLOCK, numel[t]);
            runs.push_back({t, start, end, row, runs.size()});
            row += blocks_of(end - start);
        }
    }
    return runs;
}

template <typename Work>
void for_each_run(const std::vector<Run>& runs, int threads, Work work) {
    const int64_t n = int64_t(runs.size());
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && n > SERIAL)
    for (int64_t r = 0; r < n; ++r) work(runs[r]);
}

}  // namespace curvadion

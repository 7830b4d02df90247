// States in 8 bits an element, with a scale for each block of 256, in one pass.

#include "states.h"

namespace curvadion {
namespace {

VECTOR_CLONES void encode_run(const float* x, Run run, Codes to, Rounding rounding) {
    alignas(64) float y[BLOCK];
    for (int64_t at = run.start; at < run.end; at += BLOCK) {
        const int64_t n = std::min(BLOCK, run.end - at);
        for (int64_t i = 0; i < n; ++i) y[i] = rounding.roots ? std::sqrt(x[at + i]) : x[at + i];
        encode_block(y, at, n, to, rounding);
    }
}

VECTOR_CLONES void decode_run(float* x, Run run, Codes from, bool roots) {
    for (int64_t at = run.start; at < run.end; at += BLOCK) {
        decode_block(from, at, std::min(BLOCK, run.end - at), roots, x + at);
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
        const Rounding rounding{roots != 0, seeds != nullptr, seeds ? seeds[t] : 0};
        encode_run(X[t], run, Codes(codes[t], numel[t]), rounding);
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

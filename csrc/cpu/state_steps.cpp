// Steps of states in 8 bits: decoded, changed and encoded in one pass.
//
// curvadion/ops/ahead.py and curvadion/ops/adamw.py define them. Operations of lists whose states
// are all tensors are PyTorch's own.

#include <vector>

#include "states.h"

namespace curvadion {
namespace {

// Beside FLOAT32 and BFLOAT16, as the dtype of a momentum: codes.
constexpr uint8_t CODED = 255;

// Sums of squares of elements, in so many parts that they are added as vectors.
struct Squares {
    static constexpr int LANES = 16;
    double lanes[LANES] = {};

    INLINE_MEMBER void add(const float* y, int64_t n) {
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES) {
            for (int j = 0; j < LANES; ++j) lanes[j] += double(y[i + j]) * double(y[i + j]);
        }
        for (int64_t j = 0; i + j < n; ++j) lanes[j] += double(y[i + j]) * double(y[i + j]);
    }

    INLINE_MEMBER double sum() const {
        double total = 0.0;
        for (double lane : lanes) total += lane;
        return total;
    }
};

// The sums of the squares of a run.
struct Sums {
    double ahead, gradient;
};

// The sums of the squares of m + (share - 1) g with m <- mu m + g, which is not written, and of g.
VECTOR_CLONES Sums sums_of_run(
    const void* m, uint8_t m_dtype, int64_t numel, const void* g, DType g_dtype, float mu,
    float share, Run run
) {
    alignas(64) float momentum[BLOCK], ahead[BLOCK], buffer[BLOCK];
    // The gradient stands for a missing momentum, so both sums are equal.
    const bool only_gradient = m == g && mu == 0.0f && share == 1.0f;
    Squares of_ahead, of_gradient;
    for (int64_t at = run.start; at < run.end; at += BLOCK) {
        const int64_t n = std::min(BLOCK, run.end - at);
        const float* gradient = load(g, g_dtype, at, n, buffer);
        of_gradient.add(gradient, n);
        if (only_gradient) continue;
        const float* old = momentum;
        if (m_dtype == CODED) {
            int8_t* codes = static_cast<int8_t*>(const_cast<void*>(m));
            decode_block(Codes(codes, numel), at, n, false, momentum);
        } else {
            old = load(m, DType(m_dtype), at, n, momentum);
        }
        for (int64_t i = 0; i < n; ++i) ahead[i] = mu * old[i] + gradient[i];
        if (m_dtype == BFLOAT16) {
            for (int64_t i = 0; i < n; ++i) ahead[i] = from_bfloat16(to_bfloat16(ahead[i]));
        }
        for (int64_t i = 0; i < n; ++i) ahead[i] += (share - 1.0f) * gradient[i];
        of_ahead.add(ahead, n);
    }
    const double gradient = of_gradient.sum();
    return {only_gradient ? gradient : of_ahead.sum(), gradient};
}

// m <- mu m + g, and out <- scale (m + share g). Without `moved` m stays.
VECTOR_CLONES void ahead_run(
    Codes m, const void* g, DType g_dtype, void* out, DType out_dtype, float mu, float share,
    float scale, bool moved, Rounding rounding, Run run
) {
    alignas(64) float momentum[BLOCK], buffer[BLOCK], out_buffer[BLOCK];
    for (int64_t at = run.start; at < run.end; at += BLOCK) {
        const int64_t n = std::min(BLOCK, run.end - at);
        const float* gradient = load(g, g_dtype, at, n, buffer);
        float* ahead = place(out, out_dtype, at, out_buffer);
        decode_block(m, at, n, false, momentum);
        for (int64_t i = 0; i < n; ++i) {
            momentum[i] = mu * momentum[i] + gradient[i];
            ahead[i] = scale * (momentum[i] + share * gradient[i]);
        }
        store(out, out_dtype, at, n, ahead);
        if (moved) encode_block(momentum, at, n, m, rounding);
    }
}

// What an AdamW step of a tensor needs, in the order in which it is passed.
struct Adamw {
    float decay;         // 1 - lr weight_decay
    float step_size;     // lr / (1 - beta1^t)
    float beta1, gain1;  // and 1 - beta1
    float beta2, gain2;
    float inverse_root;  // 1 / sqrt(1 - beta2^t)
    float eps;
};

VECTOR_CLONES void adamw_run(
    void* x, DType x_dtype, const void* g, DType g_dtype, Codes m, Codes v, Adamw a,
    Rounding of_means, Rounding of_squares, Run run
) {
    alignas(64) float mean[BLOCK], root[BLOCK], buffer[BLOCK], x_buffer[BLOCK];
    for (int64_t at = run.start; at < run.end; at += BLOCK) {
        const int64_t n = std::min(BLOCK, run.end - at);
        const float* gradient = load(g, g_dtype, at, n, buffer);
        float* weights = place(x, x_dtype, at, x_buffer);
        load(x, x_dtype, at, n, weights);
        decode_block(m, at, n, false, mean);
        decode_block(v, at, n, true, root);
        for (int64_t i = 0; i < n; ++i) {
            // m <- beta1 m + (1 - beta1) G,   v <- beta2 v + (1 - beta2) G^2
            mean[i] = a.beta1 * mean[i] + a.gain1 * gradient[i];
            root[i] = std::sqrt(a.beta2 * root[i] + a.gain2 * gradient[i] * gradient[i]);
            // X <- (1 - lr weight_decay) X - lr / (1 - beta1^t) m / divisor
            const float divisor = root[i] * a.inverse_root + a.eps;
            weights[i] = a.decay * weights[i] - a.step_size * mean[i] / divisor;
        }
        store(x, x_dtype, at, n, weights);
        encode_block(mean, at, n, m, of_means);
        encode_block(root, at, n, v, of_squares);
    }
}

Rounding rounding_of(const uint32_t* seeds, int64_t tensor, bool roots) {
    return {roots, seeds != nullptr, seeds ? seeds[tensor] : 0};
}

}  // namespace
}  // namespace curvadion

using namespace curvadion;

extern "C" {

// lengths[t] = |M[t]' + (share[t] - 1) G[t]| with M[t]' = mu[t] M[t] + G[t], and norms[t] = |G[t]|.
// Runs are added in their order, so sums do not depend on the number of threads.
void curvadion_lengths(
    int64_t count, const int64_t* numel, const void* const* M, const uint8_t* M_dtype,
    const void* const* G, const uint8_t* G_dtype, const float* mu, const float* share,
    float* lengths, float* norms, int threads
) {
    std::vector<Run> runs = runs_of(count, numel);
    std::vector<Sums> sums(runs.size());
    for_each_run(runs, threads, [&](Run run) {
        const int64_t t = run.tensor;
        sums[run.index] = sums_of_run(
            M[t], M_dtype[t], numel[t], G[t], DType(G_dtype[t]), mu[t], share[t], run
        );
    });
    std::vector<Sums> totals(count, Sums{0.0, 0.0});
    for (const Run& run : runs) {
        totals[run.tensor].ahead += sums[run.index].ahead;
        totals[run.tensor].gradient += sums[run.index].gradient;
    }
    for (int64_t t = 0; t < count; ++t) {
        lengths[t] = float(std::sqrt(totals[t].ahead));
        norms[t] = float(std::sqrt(totals[t].gradient));
    }
}

// M[t] <- mu[t] M[t] + G[t], out[t] <- scales[t] (M[t] + share[t] G[t]). Rounded at random with
// seeds[t], or to nearest if seeds is null; without `moved` M stays.
void curvadion_ahead(
    int64_t count, const int64_t* numel, int8_t* const* M, const void* const* G,
    const uint8_t* G_dtype, void* const* out, const uint8_t* out_dtype, const float* mu,
    const float* share, const float* scales, int moved, const uint32_t* seeds, int threads
) {
    for_each_run(runs_of(count, numel), threads, [&](Run run) {
        const int64_t t = run.tensor;
        ahead_run(
            Codes(M[t], numel[t]), G[t], DType(G_dtype[t]), out[t], DType(out_dtype[t]), mu[t],
            share[t], scales[t], moved != 0, rounding_of(seeds, t, false), run
        );
    });
}

// An AdamW step of X[t] with the codes of its moments; steps[t] has its numbers.
void curvadion_adamw(
    int64_t count, const int64_t* numel, void* const* X, const uint8_t* X_dtype,
    const void* const* G, const uint8_t* G_dtype, int8_t* const* means, int8_t* const* squares,
    const Adamw* steps, const uint32_t* mean_seeds, const uint32_t* square_seeds, int threads
) {
    for_each_run(runs_of(count, numel), threads, [&](Run run) {
        const int64_t t = run.tensor;
        adamw_run(
            X[t], DType(X_dtype[t]), G[t], DType(G_dtype[t]), Codes(means[t], numel[t]),
            Codes(squares[t], numel[t]), steps[t], rounding_of(mean_seeds, t, false),
            rounding_of(square_seeds, t, true), run
        );
    });
}

}  // extern "C"

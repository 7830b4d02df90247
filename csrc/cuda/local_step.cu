// The local step over a list, in one pass and one launch.

#include "batch.cuh"

namespace curvadion {
namespace {

// X <- decay X - step G, and M <- mu M + G if there is an M. Lists: X, G, M; numbers: step, decay,
// mu.
__global__ void __launch_bounds__(THREADS, 5) local_step(
    const __grid_constant__ Batch<3, 3> batch, bool has_m, bool seeded, const bool* moves
) {
    if (moves != nullptr && !*moves) return;
    const int place = place_of(batch, blockIdx.x);
    const int64_t start = int64_t(blockIdx.x - batch.first_block[place]) * CHUNK;
    const int64_t stop = min(start + CHUNK, batch.numel[place]);
    void* x = batch.data[0][place];
    const void* g = batch.data[1][place];
    void* m = batch.data[2][place];
    const DType x_dtype = DType(batch.dtype[0][place]), g_dtype = DType(batch.dtype[1][place]),
                m_dtype = DType(batch.dtype[2][place]);
    const float step = batch.numbers[0][place], decay = batch.numbers[1][place],
                mu = batch.numbers[2][place];
    const bool round = seeded && x_dtype == BFLOAT16;
    const uint32_t seed = batch.seed[place];
    int64_t at = start;
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(g) |
                                reinterpret_cast<uintptr_t>(m);
    if (addresses % 16 == 0) {
        const int64_t whole = start + (stop - start) / WIDTH * WIDTH;
        for (at = start + threadIdx.x * WIDTH; at < whole; at += THREADS * WIDTH) {
            float weights[WIDTH], gradient[WIDTH], momentum[WIDTH];
            load_wide(x, x_dtype, at, weights);
            load_wide(g, g_dtype, at, gradient);
            if (has_m) load_wide(m, m_dtype, at, momentum);
            for (int i = 0; i < WIDTH; ++i) {
                weights[i] = decay * weights[i] - step * gradient[i];
                if (round) weights[i] = stochastically(weights[i], at + i, seed);
            }
            store_wide(x, x_dtype, at, weights);
            if (has_m) {
                for (int i = 0; i < WIDTH; ++i) momentum[i] = mu * momentum[i] + gradient[i];
                store_wide(m, m_dtype, at, momentum);
            }
        }
        at = whole;
    }
    for (at += threadIdx.x; at < stop; at += THREADS) {
        const float gradient = load(g, g_dtype, at);
        float weight = decay * load(x, x_dtype, at) - step * gradient;
        if (round) weight = stochastically(weight, at, seed);
        store(x, x_dtype, at, weight);
        if (has_m) store(m, m_dtype, at, mu * load(m, m_dtype, at) + gradient);
    }
}

}  // namespace
}  // namespace curvadion

using namespace curvadion;

extern "C" {

// moves, on the device, may be null; where it is false nothing is written. Returns a cudaError_t.
int curvadion_cuda_local_step(
    int64_t count, const int64_t* numel, void* const* X, const uint8_t* X_dtype, void* const* G,
    const uint8_t* G_dtype, void* const* M, const uint8_t* M_dtype, const float* step,
    const float* decay, const float* mu, const uint32_t* seeds, const bool* moves, int device,
    cudaStream_t stream
) {
    const cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess) return error;
    return in_batches<3, 3>(
        count, numel,
        [&](Batch<3, 3>& batch, int slot, int64_t place) {
            batch.data[0][slot] = X[place];
            batch.data[1][slot] = G[place];
            batch.data[2][slot] = M ? M[place] : nullptr;
            batch.dtype[0][slot] = X_dtype[place];
            batch.dtype[1][slot] = G_dtype[place];
            batch.dtype[2][slot] = M ? M_dtype[place] : uint8_t(FLOAT32);
            batch.numbers[0][slot] = step[place];
            batch.numbers[1][slot] = decay[place];
            batch.numbers[2][slot] = mu ? mu[place] : 1.0f;
            batch.seed[slot] = seeds ? seeds[place] : 0;
        },
        [&](const Batch<3, 3>& batch, int64_t, int64_t, int blocks) {
            local_step<<<blocks, THREADS, 0, stream>>>(
                batch, M != nullptr, seeds != nullptr, moves
            );
        }
    );
}

}  // extern "C"

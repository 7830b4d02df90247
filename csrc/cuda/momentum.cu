// Momentum and norms over a list, in one pass and one launch.

#include "batch.cuh"

namespace curvadion {
namespace {

// Sum over the block, in a fixed order; valid in thread 0.
__device__ double block_sum(double value) {
    __shared__ double warps[THREADS / 32];
    for (int offset = 16; offset > 0; offset /= 2) {
        value += __shfl_down_sync(0xFFFFFFFFu, value, offset);
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x < THREADS / 32 ? warps[threadIdx.x] : 0.0;
    for (int offset = THREADS / 64; offset > 0; offset /= 2) {
        value += __shfl_down_sync(0xFFFFFFFFu, value, offset);
    }
    __syncthreads();
    return value;
}

// The block that finishes a tensor last adds up its partial sums, in their order: the norm's bits
// do not depend on timing.
__device__ void finish_norm(
    double partial_sum, int block, int first, int blocks, float* norm, double* partial, int* ticket
) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        partial[block] = partial_sum;
        __threadfence();
        last = atomicAdd(ticket, 1) == blocks - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    double sum = 0.0;
    for (int i = threadIdx.x; i < blocks; i += THREADS) sum += __ldcg(partial + first + i);
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        *norm = float(sqrt(sum));
        *ticket = 0;
    }
}

// The square in float64: of tiny and of large numbers it does not fit into float32.
__device__ double squared(float value) { return double(value) * double(value); }

// mu m + g as dtype holds it; adds its square.
__device__ float accumulated(float mu, float m, float g, DType dtype, double& squares) {
    const float momentum = rounded(mu * m + g, dtype);
    squares += squared(momentum);
    return momentum;
}

// M <- mu M + G if write; norms of mu M + G as M's type holds it (of M, if there is no G) if
// norms.
__global__ void __launch_bounds__(THREADS) momentum(
    const __grid_constant__ Batch<2, 1> batch, bool has_g, bool write, float* norms,
    double* partial, int* tickets, const bool* moves
) {
    if (moves != nullptr && !*moves) return;
    const int place = place_of(batch, blockIdx.x);
    const int first = batch.first_block[place];
    const int64_t start = int64_t(blockIdx.x - first) * CHUNK;
    const int64_t stop = min(start + CHUNK, batch.numel[place]);
    void* m = batch.data[0][place];
    const void* g = batch.data[1][place];
    const DType m_dtype = DType(batch.dtype[0][place]), g_dtype = DType(batch.dtype[1][place]);
    const float mu = batch.numbers[0][place];
    double squares = 0.0;
    int64_t at = start;
    if ((reinterpret_cast<uintptr_t>(m) | reinterpret_cast<uintptr_t>(g)) % 16 == 0) {
        const int64_t whole = start + (stop - start) / WIDTH * WIDTH;
        for (at = start + threadIdx.x * WIDTH; at < whole; at += THREADS * WIDTH) {
            float sums[WIDTH], gradient[WIDTH];
            load_wide(m, m_dtype, at, sums);
            if (has_g) {
                load_wide(g, g_dtype, at, gradient);
                for (int i = 0; i < WIDTH; ++i) {
                    sums[i] = accumulated(mu, sums[i], gradient[i], m_dtype, squares);
                }
            } else {
                for (int i = 0; i < WIDTH; ++i) squares += squared(sums[i]);
            }
            if (write) store_wide(m, m_dtype, at, sums);
        }
        at = whole;
    }
    for (at += threadIdx.x; at < stop; at += THREADS) {
        float sum = load(m, m_dtype, at);
        if (has_g) sum = accumulated(mu, sum, load(g, g_dtype, at), m_dtype, squares);
        else squares += squared(sum);
        if (write) store(m, m_dtype, at, sum);
    }
    if (norms != nullptr) {
        finish_norm(
            block_sum(squares), blockIdx.x, first, batch.first_block[place + 1] - first,
            norms + place, partial, tickets + place
        );
    }
}

}  // namespace
}  // namespace curvadion

using namespace curvadion;

extern "C" {

// How many partial sums the norms of a list need.
int64_t curvadion_cuda_blocks(int64_t count, const int64_t* numel) {
    int64_t blocks = 0;
    for (int64_t t = 0; t < count; ++t) blocks += blocks_of(numel[t]);
    return blocks;
}

int curvadion_cuda_capacity() { return CAPACITY; }

// norms[t] = |mu[t] M[t] + G[t]|, and with write M[t] becomes that sum; without G the norms of M.
// norms may be null. On the device: norms (count), partial (curvadion_cuda_blocks), tickets
// (capacity, zero before and after), moves, which may be null: where it is false nothing is
// written. Returns a cudaError_t.
int curvadion_cuda_momentum_norms(
    int64_t count, const int64_t* numel, void* const* M, const uint8_t* M_dtype, void* const* G,
    const uint8_t* G_dtype, const float* mu, int write, float* norms, double* partial, int* tickets,
    const bool* moves, int device, cudaStream_t stream
) {
    const cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess) return error;
    return in_batches<2, 1>(
        count, numel,
        [&](Batch<2, 1>& batch, int slot, int64_t place) {
            batch.data[0][slot] = M[place];
            batch.data[1][slot] = G ? G[place] : nullptr;
            batch.dtype[0][slot] = M_dtype[place];
            batch.dtype[1][slot] = G ? G_dtype[place] : uint8_t(FLOAT32);
            batch.numbers[0][slot] = mu ? mu[place] : 1.0f;
        },
        [&](const Batch<2, 1>& batch, int64_t place, int64_t block, int blocks) {
            momentum<<<blocks, THREADS, 0, stream>>>(
                batch, G != nullptr, write != 0, norms ? norms + place : nullptr, partial + block,
                tickets, moves
            );
        }
    );
}

}  // extern "C"

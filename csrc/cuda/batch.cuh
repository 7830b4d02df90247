// Lists of tensors as kernel parameters: no table on the device to fill or to keep.

#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "numbers.cuh"

namespace curvadion {

constexpr int THREADS = 256;
// Elements per block: enough work to hide its start, and many blocks for a model.
constexpr int64_t CHUNK = int64_t(THREADS) * WIDTH * 8;

// Tensors that fit into the parameters of one launch: 32764 bytes since CUDA 12.1, else 4096.
#if CUDART_VERSION >= 12010
constexpr int CAPACITY = 512, PARAMETER_BYTES = 32764;
#else
constexpr int CAPACITY = 56, PARAMETER_BYTES = 4096;
#endif

// Up to CAPACITY places of LISTS lists, with NUMBERS float32 numbers each.
template <int LISTS, int NUMBERS>
struct Batch {
    void* data[LISTS][CAPACITY];
    int64_t numel[CAPACITY];
    float numbers[NUMBERS][CAPACITY];
    uint32_t seed[CAPACITY];
    int32_t first_block[CAPACITY + 1];
    uint8_t dtype[LISTS][CAPACITY];
    int32_t count;
};

// An empty tensor gets a block too: someone must write its norm.
inline int64_t blocks_of(int64_t numel) { return std::max<int64_t>((numel + CHUNK - 1) / CHUNK, 1); }

// The last place whose first block is not after `block`.
template <int LISTS, int NUMBERS>
__device__ inline int place_of(const Batch<LISTS, NUMBERS>& batch, int block) {
    int low = 0, high = batch.count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (batch.first_block[middle] <= block) low = middle;
        else high = middle;
    }
    return low;
}

// Calls launch(batch, first place, first block, blocks) for as many batches as the lists need.
// fill(batch, slot, place) writes addresses, dtypes, numbers and seed.
template <int LISTS, int NUMBERS, typename Fill, typename Launch>
cudaError_t in_batches(int64_t count, const int64_t* numel, Fill fill, Launch launch) {
    static_assert(sizeof(Batch<LISTS, NUMBERS>) + 64 <= PARAMETER_BYTES);
    Batch<LISTS, NUMBERS> batch;
    int64_t blocks_before = 0;
    for (int64_t start = 0; start < count; start += CAPACITY) {
        batch.count = int32_t(std::min<int64_t>(CAPACITY, count - start));
        int64_t blocks = 0;
        for (int slot = 0; slot < batch.count; ++slot) {
            batch.numel[slot] = numel[start + slot];
            batch.first_block[slot] = int32_t(blocks);
            blocks += blocks_of(numel[start + slot]);
            fill(batch, slot, start + slot);
        }
        batch.first_block[batch.count] = int32_t(blocks);
        launch(batch, start, blocks_before, int(blocks));
        const cudaError_t error = cudaGetLastError();
        if (error != cudaSuccess) return error;
        blocks_before += blocks;
    }
    return cudaSuccess;
}

}  // namespace curvadion

// As much of CUDA as csrc/cuda needs, for one CPU thread. Blocks run one after another, and the
// threads of a block in turn, each until it has to wait for the others. It shows nothing of the
// memory model, of alignment, or of how fast anything is.

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define CUDART_VERSION 12000  // with few tensors a launch, so that short lists take several
#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // of the one block that runs
#define __isGlobal(address) true
#define __builtin_assume(condition) static_cast<void>(condition)

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, DIVERGED };
inline cudaError_t last_error = cudaSuccess;

inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return last_error; }
inline const char* cudaGetErrorString(cudaError_t error) {
    return error == DIVERGED ? "threads of a block wait at different places" : "no error";
}

struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Index {
    int x;
};
inline Index threadIdx, blockIdx;

// ---------------------------------------------------------------- threads of a block

constexpr int WARP = 32, STACK = 1 << 17;
enum Place { BARRIER, SHUFFLE, END };

struct Thread {
    ucontext_t begin;
    bool has_begun = false;
    jmp_buf here;
    std::vector<char> stack = std::vector<char>(STACK);
    Place waits_at;
    double shuffled;
};
inline std::vector<Thread> threads_of_block;
inline jmp_buf scheduler;
inline std::function<void()> run_kernel;

// Waits until all threads of the block wait at such a place.
inline void wait_at(Place place) {
    Thread& self = threads_of_block[threadIdx.x];
    self.waits_at = place;
    if (_setjmp(self.here) == 0) _longjmp(scheduler, 1);
}

inline void __syncthreads() { wait_at(BARRIER); }

inline double __shfl_down_sync(uint32_t, double value, int offset) {
    const int t = threadIdx.x;
    threads_of_block[t].shuffled = value;
    wait_at(SHUFFLE);
    const double found =
        t % WARP + offset < WARP ? threads_of_block[t + offset].shuffled : value;
    wait_at(SHUFFLE);
    return found;
}

inline void thread_main() {
    for (;;) {
        run_kernel();
        wait_at(END);
    }
}

// Jumps between stacks, because each of the calls that swap contexts asks the kernel for signals.
inline void run_until_it_waits(Thread& thread) {
    if (_setjmp(scheduler) != 0) return;
    if (thread.has_begun) _longjmp(thread.here, 1);
    thread.has_begun = true;
    setcontext(&thread.begin);
}

// Lets each thread run to the place where it waits next. False if these places differ.
inline bool run_threads(bool backwards) {
    const int count = int(threads_of_block.size());
    for (int i = 0; i < count; ++i) {
        threadIdx.x = backwards ? count - 1 - i : i;
        run_until_it_waits(threads_of_block[threadIdx.x]);
    }
    return std::all_of(threads_of_block.begin(), threads_of_block.end(), [](const Thread& t) {
        return t.waits_at == threads_of_block[0].waits_at;
    });
}

// kernel<<<blocks, threads, 0, stream>>>(arguments...). Neither the order of blocks nor that of
// threads may matter: the last block comes first, and threads take turns in both directions.
template <typename Kernel, typename... Arguments>
void launch(Kernel kernel, int blocks, int threads, int, cudaStream_t, const Arguments&... given) {
    run_kernel = [&] { kernel(given...); };
    threads_of_block.resize(threads);
    for (Thread& thread : threads_of_block) {
        thread.has_begun = false;
        getcontext(&thread.begin);
        thread.begin.uc_stack.ss_sp = thread.stack.data();
        thread.begin.uc_stack.ss_size = thread.stack.size();
        makecontext(&thread.begin, thread_main, 0);
    }
    bool backwards = false;
    for (int block = blocks - 1; block >= 0; --block) {
        blockIdx.x = block;
        do {
            backwards = !backwards;
            if (!run_threads(backwards)) {
                last_error = DIVERGED;
                return;
            }
        } while (threads_of_block[0].waits_at != END);
    }
}

// ---------------------------------------------------------------- memory and numbers

inline void __threadfence() {}
inline int atomicAdd(int* address, int value) {
    const int before = *address;
    *address += value;
    return before;
}
template <typename T>
T __ldcg(const T* address) {
    return *address;
}

inline int64_t min(int64_t a, int64_t b) { return std::min(a, b); }
inline float __uint_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline uint16_t bfloat16_of(float value) {
    const uint32_t bits = __float_as_uint(value);
    return value != value ? 0x7FFF : uint16_t((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

inline uint16_t float16_of(float value) {
    const uint16_t sign = uint16_t(__float_as_uint(value) >> 16 & 0x8000u);
    const float size = std::fabs(value);
    if (value != value) return 0x7FFF;
    if (size >= 65520.0f) return sign | 0x7C00;
    int exponent;
    // Below the smallest normal number, numbers are as far apart as at it.
    std::frexp(std::max(size, 0x1p-14f), &exponent);
    --exponent;
    const float spacing = std::ldexp(1.0f, exponent - 10);
    const int steps = int(std::nearbyint(size / spacing));  // ties to even; up to 2048
    return uint16_t(sign | ((exponent + 14) * 1024 + steps));
}

// PTX instructions: asm("name %0, %1...;" : "="(result) : (arguments)) is result = name(arguments).
inline uint32_t cvt_rn_bf16x2_f32(float high, float low) {
    return uint32_t(bfloat16_of(high)) << 16 | bfloat16_of(low);
}
inline uint32_t cvt_rn_f16x2_f32(float high, float low) {
    return uint32_t(float16_of(high)) << 16 | float16_of(low);
}
inline float cvt_f32_f16(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float size = exponent ? 1024.0f + fraction : fraction;
    size = std::ldexp(size, std::max(exponent, 1) - 25);
    if (exponent == 31) size = fraction ? NAN : INFINITY;
    return bits & 0x8000 ? -size : size;
}

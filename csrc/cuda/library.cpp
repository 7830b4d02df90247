// What the library says about errors.

#include <cuda_runtime.h>

extern "C" {

const char* curvadion_cuda_error(int code) {
    return cudaGetErrorString(static_cast<cudaError_t>(code));
}

}  // extern "C"

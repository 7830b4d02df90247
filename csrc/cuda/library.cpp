// What the library says about itself and about the machine.

#include <cuda_runtime.h>

extern "C" {

// Number of CUDA devices; 0 where there is none, or no driver.
int curvadion_cuda_devices() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

const char* curvadion_cuda_error(int code) {
    return cudaGetErrorString(static_cast<cudaError_t>(code));
}

}  // extern "C"

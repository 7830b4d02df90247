// Lets FakeTensorMode make tensors on cuda:0 in a CPU build of torch, which has no device guard for
// CUDA. Nothing is allocated or launched there, so a guard that does nothing is enough.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;

c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new Guard());

}  // namespace

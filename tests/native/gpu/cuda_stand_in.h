// Stands in for the part of the CUDA runtime that our sources call, so that they run without a GPU. Memory of the
// device lies in this process, but only operations reach it: any other load or store of it ends the process. Operations
// run later, on a thread of their own, one at a time; those of different streams in a random order, as far as events
// allow. Nothing runs while Hold(true) lasts, so that a test sees whether a call waits.
//
// Where CUDA would give a wrong result or ends a process, an error comes back, at the latest by the next call:
// - a copy from or to memory that is freed, or that is neither memory of the device nor registered, when it is queued
// or
//   when it runs (CUDA makes copies of unregistered memory too, but waits in them);
// - a copy in another direction than it says;
// - a kernel one of whose arguments, or of their members, points to memory of the device that is freed, when it is
//   queued or when it runs;
// - a stream or an event that does not exist;
// - a block that is freed while another process has opened it.
// How many GPUs there are, and what joins them, is in the environment: HVD_EXT_STAND_IN_GPUS has a word for each GPU
// and in it a letter for each, such as "nnhh nnhh hhnn hhnn"; n: as NVLink does, p: as PCIe does, h: only the host's
// memory does. Without it there are two, as "nn nn".
//
// An operation reaches the blocks of memory that its arguments point to, and no others. Work in the null stream runs in
// the call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

using cudaStream_t = void*;
using cudaEvent_t = void*;
enum cudaError_t {  // the numbers are CUDA's
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidMemcpyDirection = 21,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorHostMemoryAlreadyRegistered = 712,
  cudaErrorHostMemoryNotRegistered = 713,
  cudaErrorLaunchFailure = 719
};
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
struct cudaPointerAttributes {
  int device;
};
enum cudaDeviceP2PAttr { cudaDevP2PAttrNativeAtomicSupported };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrCanUseHostPointerForRegisteredMem };
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2;
constexpr unsigned cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2;
constexpr unsigned cudaIpcMemLazyEnablePeerAccess = 1;
struct cudaIpcMemHandle_t {
  char reserved[64];
};

cudaError_t cudaGetLastError();
const char* cudaGetErrorName(cudaError_t code);
const char* cudaGetErrorString(cudaError_t code);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data);
cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr attribute, int from, int to);
cudaError_t cudaDeviceGetPCIBusId(char* name, int length, int device);
cudaError_t cudaMalloc(void** data, size_t nbytes);
cudaError_t cudaFree(void* data);
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data);
cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned flags);
cudaError_t cudaIpcCloseMemHandle(void* data);
cudaError_t cudaHostRegister(void* data, size_t nbytes, unsigned flags);
cudaError_t cudaHostUnregister(void* data);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* to, int value, size_t nbytes, cudaStream_t stream);

namespace hvd_ext::gpu {

constexpr int64_t kSharedNbytes = 4096;  // it shares each page by itself

}  // namespace hvd_ext::gpu

namespace hvd_ext::gpu::stand_in {

// Queues a kernel's work; `words` has the pointers among its arguments.
void Enqueue(cudaStream_t stream, std::function<void()> work, std::vector<const void*> words);

// No operation begins while `holds`.
void Hold(bool holds);
// All memory of the device that there is; cudaMalloc refuses more.
void Limit(int64_t nbytes);
// The multiprocessors that the device has.
inline int processors = 2;
// The next calls fail with this code, as those of a GPU that has failed; cudaSuccess: no more.
void Break(cudaError_t code);
// The next calls of cudaIpcGetMemHandle and cudaIpcOpenMemHandle fail, as in some containers.
inline bool refuses_handles = false;
// What exists and was not destroyed, such as "2 blocks 1 range 5 streams 9 events 1 opening"; a range is of host
// memory, and an opening is of a block of another process.
std::string Left();

}  // namespace hvd_ext::gpu::stand_in

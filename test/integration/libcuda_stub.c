/* What `kv_transfer/cuda_ipc/driver.py` calls of libcuda, compiled against NVIDIA's own header: so the compiler checks
   names and signatures, and the test what arrives. "Device memory" is one array. */
#include <cuda.h>
#include <string.h>

#define BASE 0x700000000000ULL
#define BYTES 65536ULL
#define SHIFT 0x1000000ULL

static __thread CUcontext current;
static void *pinned;

CUresult cuInit(unsigned flags) { return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal == 0 || ordinal == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetCount(int *count) {
    *count = 2;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    memset(uuid->bytes, 0xa0 + device, sizeof uuid->bytes);
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)(0x1000ULL + device);
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
    current = context;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = current;
    return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "some error";
    return CUDA_SUCCESS;
}
static int is_entered(void) { return current == (CUcontext)0x1001ULL; }

CUresult cuMemHostRegister(void *host, size_t bytes, unsigned flags) {
    if (!is_entered()) return CUDA_ERROR_INVALID_CONTEXT;
    if (bytes > BYTES) return CUDA_ERROR_OUT_OF_MEMORY;
    if (pinned || flags != (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP)) return CUDA_ERROR_INVALID_VALUE;
    pinned = host;
    return CUDA_SUCCESS;
}
CUresult cuMemHostGetDevicePointer(CUdeviceptr *device, void *host, unsigned flags) {
    if (!is_entered() || flags != 0 || host != pinned) return CUDA_ERROR_INVALID_VALUE;
    *device = (CUdeviceptr)host + SHIFT;
    return CUDA_SUCCESS;
}
CUresult cuMemHostUnregister(void *host) {
    if (!is_entered() || host != pinned) return CUDA_ERROR_INVALID_VALUE;
    pinned = 0;
    return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr at) {
    if (!is_entered() || attribute != CU_POINTER_ATTRIBUTE_MEMORY_TYPE) return CUDA_ERROR_INVALID_CONTEXT;
    int is_device = at >= BASE && at < BASE + BYTES;
    if (!is_device && (!pinned || (void *)at != pinned)) return CUDA_ERROR_INVALID_VALUE;
    *(CUmemorytype *)data = is_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    return CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr at) {
    if (!is_entered() || at < BASE || at >= BASE + BYTES) return CUDA_ERROR_INVALID_VALUE;
    *base = BASE;
    *bytes = BYTES;
    return CUDA_SUCCESS;
}
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr at) {
    if (at != BASE) return CUDA_ERROR_INVALID_VALUE;
    memset(handle->reserved, 7, sizeof handle->reserved);
    return CUDA_SUCCESS;
}
CUresult cuIpcOpenMemHandle(CUdeviceptr *at, CUipcMemHandle handle, unsigned flags) {
    if (!is_entered() || handle.reserved[63] != 7 || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return CUDA_ERROR_INVALID_VALUE;
    *at = BASE + SHIFT;
    return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoH(void *host, CUdeviceptr at, size_t bytes) {
    if (!is_entered() || at < BASE + SHIFT || at + bytes > BASE + SHIFT + BYTES) return CUDA_ERROR_INVALID_VALUE;
    memset(host, (int)(at & 0xff), bytes);
    return CUDA_SUCCESS;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr at) { return at == BASE + SHIFT ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

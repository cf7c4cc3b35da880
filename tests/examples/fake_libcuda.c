/* The calls of libcuda that cuda_runner.py makes, on the host's memory. Whatever the cubin holds, a launch computes row
   sums of relu; one that asks for shared memory takes 1 ms by this clock, another one 4. It refuses what a GPU would. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct { float at; } event;
static float now;

int cuInit(unsigned flags) { return flags != 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return ordinal > 0 ? 101 : 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "Pretended", size); return device != 40; }
int cuDeviceGetAttribute(int *value, int which, int device)
{
    *value = which == 75 ? 9 : 0;
    return device != 40 || which < 75 || which > 76;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &now; return device != 40; }
int cuCtxSetCurrent(void *context) { return context != &now; }
int cuModuleLoadData(void **module, const char *image) { *module = &now; return memcmp(image, "\177ELF", 4) ? 200 : 0; }
int cuModuleGetFunction(void **function, void *module, const char *name)
{
    *function = &now;
    return module != &now || strcmp(name, "kernel") ? 500 : 0;
}
int cuFuncSetAttribute(void *function, int which, int value) { return function != &now || which != 8 || value <= 49152; }
int cuMemAlloc_v2(uint64_t *at, size_t size) { *at = (uintptr_t)malloc(size); return *at == 0; }
int cuMemFree_v2(uint64_t at) { free((void *)(uintptr_t)at); return 0; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) { memcpy((void *)(uintptr_t)to, from, size); return 0; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) { memcpy(to, (void *)(uintptr_t)from, size); return 0; }
int cuMemsetD32_v2(uint64_t to, unsigned bits, size_t count)
{
    for (size_t i = 0; i < count; i++)
        ((uint32_t *)(uintptr_t)to)[i] = bits;
    return 0;
}
int cuEventCreate(void **made, unsigned flags) { *made = malloc(sizeof(event)); return flags != 0; }
int cuEventRecord(event *one, void *stream) { one->at = now; return stream != NULL; }
int cuEventSynchronize(event *one) { return one == NULL; }
int cuEventElapsedTime(float *took, event *before, event *after) { *took = after->at - before->at; return 0; }
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **words, void **extra)
{
    int n = *(int *)words[0], m = *(int *)words[1];
    float a = *(float *)words[2], b = *(float *)words[3];
    const float *x = *(float **)words[4];
    float *y = *(float **)words[6];
    if (function != &now || by != 1 || bz != 1 || bx % 32 || stream || extra || *(void **)words[7] || *(void **)words[8])
        return 1;
    if (gy != 1 || gz != 1 || gx != (unsigned)n)
        return 700; /* not the grid of row sums */
    for (int i = 0; i < n; i++) {
        y[i] = 0;
        for (int j = 0; j < m; j++) {
            float v = a * x[i * m + j] + b;
            y[i] += v > 0 ? v : 0;
        }
    }
    now += shared > 0 ? 1 : 4;
    return 0;
}

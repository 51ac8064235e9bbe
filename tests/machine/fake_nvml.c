/* Stands for libnvidia-ml.so.1 of a driver. What it says comes from the file that FAKE_NVML names, read again at each call:
 *   driver SECONDS    each call takes so long
 *   init CODE         nvmlInit returns this error
 *   gpu UUID PERCENT USED_MIB TOTAL_MIB [mig UUID USED_MIB TOTAL_MIB] [lost]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };

struct gpu {
    char uuid[96], mig[96];
    unsigned percent;
    unsigned long long used, total, mig_used, mig_total;
    int is_lost;
};
static struct gpu gpus[16];
static unsigned count;

static int look(void) {
    char line[512], word[64], more[512];
    double seconds = 0;
    int code = OK;
    FILE *file = fopen(getenv("FAKE_NVML") ? getenv("FAKE_NVML") : "/nowhere", "r");
    count = 0;
    if (!file) return DRIVER_NOT_LOADED;
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "driver %lf", &seconds) == 1 || sscanf(line, "init %d", &code) == 1) continue;
        struct gpu *one = &gpus[count];
        memset(one, 0, sizeof *one);
        more[0] = 0;
        if (sscanf(line, "gpu %95s %u %llu %llu %511[^\n]", one->uuid, &one->percent, &one->used, &one->total, more) < 4) continue;
        one->is_lost = strstr(more, "lost") != NULL;
        if (sscanf(more, "%63s %95s %llu %llu", word, one->mig, &one->mig_used, &one->mig_total) != 4 || strcmp(word, "mig")) one->mig[0] = 0;
        count++;
    }
    fclose(file);
    usleep((useconds_t)(seconds * 1e6));
    return code;
}

/* A handle is the number of a GPU, from 1 on, and 100 more for its MIG device. */
static struct gpu *of(void *handle) { return &gpus[((unsigned long)handle - 1) % 100]; }
static int is_mig(void *handle) { return (unsigned long)handle > 100; }

int nvmlInitWithFlags(unsigned flags) { (void)flags; return look(); }
int nvmlInit_v2(void) { return look(); }
const char *nvmlErrorString(int code) { return code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : "some error"; }

int nvmlDeviceGetCount_v2(unsigned *found) { look(); *found = count; return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    look();
    if (index >= count) return INVALID_ARGUMENT;
    *handle = (void *)(unsigned long)(index + 1);
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    look();
    for (unsigned number = 0; number < count; number++) {
        if (!strcmp(gpus[number].uuid, uuid)) { *handle = (void *)(unsigned long)(number + 1); return OK; }
        if (*gpus[number].mig && !strcmp(gpus[number].mig, uuid)) { *handle = (void *)(unsigned long)(number + 101); return OK; }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    look();
    snprintf(text, size, "%s", is_mig(handle) ? of(handle)->mig : of(handle)->uuid);
    return OK;
}

int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) {
    look();
    if (of(handle)->is_lost) return GPU_IS_LOST;
    if (is_mig(handle) || *of(handle)->mig) return NOT_SUPPORTED;
    rates[0] = of(handle)->percent;
    rates[1] = 0;
    return OK;
}

int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) {
    look();
    if (of(handle)->is_lost) return GPU_IS_LOST;
    memory[0] = (is_mig(handle) ? of(handle)->mig_total : of(handle)->total) << 20;
    memory[2] = (is_mig(handle) ? of(handle)->mig_used : of(handle)->used) << 20;
    memory[1] = memory[0] - memory[2];
    return OK;
}

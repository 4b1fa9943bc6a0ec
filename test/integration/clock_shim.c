/* Preloaded into a process: its wall clock is wrong. What by, the file that CLOCK_FILE names says when the process
 * starts, or a fork is told of one: a number of seconds, or `random`: every two seconds another of -3600, 0 and 3600.
 * Other clocks are right. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int (*real)(clockid_t, struct timespec *);
static pid_t known;
static int is_random;
static long offset_s;

__attribute__((constructor)) static void look(void) {
    char text[64] = "0";
    const char *path = known == getpid() ? NULL : getenv("CLOCK_FILE");
    if (!path) return;
    known = getpid();
    FILE *file = fopen(path, "r");
    if (file) {
        if (!fgets(text, sizeof text, file)) text[0] = 0;
        fclose(file);
    }
    is_random = strncmp(text, "random", 6) == 0;
    offset_s = atol(text);
}

static int read_clock(clockid_t id, struct timespec *at) {
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    return real(id, at);
}

static long offset(void) {
    struct timespec now;
    look();
    if (!is_random) return offset_s;
    read_clock(CLOCK_MONOTONIC, &now);
    unsigned long mixed = ((unsigned long)getpid() * 1000003UL + (unsigned long)now.tv_sec / 2) * 2654435761UL;
    return 3600L * ((long)(mixed >> 16) % 3 - 1);
}

int clock_gettime(clockid_t id, struct timespec *at) {
    int result = read_clock(id, at);
    if (result == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += offset();
    return result;
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    (void)zone;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return result;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

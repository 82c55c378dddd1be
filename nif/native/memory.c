/* Large zeroed memory on huge pages, and checks of kept weights. Huge pages mean fewer TLB misses for weights and KV blocks. */
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "genbatch.h"

#define HUGE_PAGE (1 << 21)

#if defined(__SANITIZE_ADDRESS__)

/* The sanitizer checks the bounds of its own allocations. */
void *memory_allocate(int64_t bytes) { return calloc((size_t)(bytes > 0 ? bytes : 1), 1); }

void memory_free(void *p, int64_t bytes)
{
    (void)bytes;
    free(p);
}

#else

static int64_t pages_for(int64_t bytes) { return padded(bytes > 0 ? bytes : 1, HUGE_PAGE); }

void *memory_allocate(int64_t bytes)
{
    /* Map one page more than needed, and unmap the parts outside an aligned range. */
    int64_t size = pages_for(bytes);
    uint8_t *p = mmap(NULL, (size_t)(size + HUGE_PAGE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    int64_t before = padded((int64_t)(uintptr_t)p, HUGE_PAGE) - (int64_t)(uintptr_t)p;
    if (before) munmap(p, (size_t)before);
    if (before < HUGE_PAGE) munmap(p + before + size, (size_t)(HUGE_PAGE - before));
    p += before;
#ifdef MADV_HUGEPAGE
    madvise(p, (size_t)size, MADV_HUGEPAGE);
#endif
    return p;
}

void memory_free(void *p, int64_t bytes)
{
    if (p) munmap(p, (size_t)pages_for(bytes));
}

#endif

/* Linux has MADV_POPULATE_READ since 5.14; the headers of older systems lack it. */
#if defined(__linux__) && !defined(MADV_POPULATE_READ)
#define MADV_POPULATE_READ 22
#endif

int64_t readable(const void *mapped, int64_t bytes)
{
#ifdef MADV_POPULATE_READ
    while (madvise((void *)mapped, (size_t)bytes, MADV_POPULATE_READ))
        if (errno == EFAULT || errno == EHWPOISON) return 0;
        else if (errno != EINTR && errno != EAGAIN) break; /* the kernel does not support it */
#else
    (void)mapped, (void)bytes;
#endif
    return 1;
}

#define LANES 16

/* Each round is a bijection of the word and of its lane, so one changed word changes the result. */
int64_t checksum(const uint64_t *words, int64_t bytes)
{
    uint64_t lanes[LANES];
    int64_t at = 0, count = bytes / 8;
    for (int i = 0; i < LANES; i++) lanes[i] = (uint64_t)i + 1;
    for (; at + LANES <= count; at += LANES)
        for (int i = 0; i < LANES; i++) {
            uint64_t mixed = (lanes[i] ^ words[at + i]) * 0x9e3779b97f4a7c15u;
            lanes[i] = mixed ^ (mixed >> 29);
        }
    uint64_t all = (uint64_t)bytes;
    for (; at < count; at++) all = ((all ^ words[at]) * 0xff51afd7ed558ccdu) ^ (all >> 31);
    for (int i = 0; i < LANES; i++) all = ((all ^ lanes[i]) * 0xff51afd7ed558ccdu) ^ (all >> 31);
    return (int64_t)all;
}

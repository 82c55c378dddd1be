/* A pool of threads that run one function together.
 *
 * OpenMP is not used, because torch brings its own libgomp, whose idle threads spin. A step has some ten phases a layer, and
 * each must cost less than a microsecond. The caller is thread 0, which does not wait for threads that have not arrived: a
 * thread that wakes late joins the run under way, or misses it. */
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "genbatch.h"

/* The number of spins before a waiting thread releases its core. It takes some 100 microseconds: longer than the imbalance
 * between two healthy threads, and much shorter than a scheduler's time slice. */
#define SPINS 5000

/* The state of a run: its number, whether threads may still join, and the number of workers inside. */
#define RUN ((uint64_t)1 << 32)
#define OVER ((uint64_t)1 << 31)

struct pool {
    int num_threads;
    pthread_t *threads;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    uint64_t runs; /* under mutex: the number of calls of pool_run */
    bool closing; /* under mutex */
    pool_function function;
    void *argument;
    _Alignas(64) _Atomic uint64_t present;
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_uint generation;
    atomic_int asleep; /* threads that wait in the kernel, or are about to */
};

typedef struct {
    pool *pool;
    int thread;
} start_argument;

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sleeps until *word differs from `seen`, or until a wake. sched_yield is not used, because it gives up the rest of a time
 * slice: beside other programs, a step that yields at every phase would get a fraction of its share of the CPU. */
static void sleep_on(pool *p, const void *word, uint32_t seen)
{
#ifdef __linux__
    /* Count before the kernel reads the word. `wake` reads the count after the word has changed. */
    atomic_fetch_add(&p->asleep, 1);
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&p->asleep, 1);
#else
    (void)p, (void)word, (void)seen;
    sched_yield();
#endif
}

/* Wakes sleepers. Call it after *word was changed by a sequentially consistent operation. */
static void wake(pool *p, const void *word)
{
#ifdef __linux__
    if (atomic_load(&p->asleep)) syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
    (void)p, (void)word;
#endif
}

void pool_add(pool *p, atomic_int *count, int enough)
{
    if (atomic_fetch_add(count, 1) + 1 == enough) wake(p, count);
}

void pool_await(pool *p, atomic_int *count, int enough)
{
    int spins = 0;
    for (int now; (now = atomic_load_explicit(count, memory_order_acquire)) < enough;)
        if (spins++ < SPINS)
            relax();
        else
            sleep_on(p, count, (uint32_t)now);
}

void pool_barrier(pool *p)
{
    unsigned generation = atomic_load_explicit(&p->generation, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel) == p->num_threads - 1) {
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
        atomic_fetch_add(&p->generation, 1);
        wake(p, &p->generation);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&p->generation, memory_order_acquire) == generation;)
        if (spins++ < SPINS)
            relax();
        else
            sleep_on(p, &p->generation, generation);
}

/* Joins the open run, at most once; returns false if it is over. `last` is the thread's previous run. */
static bool join(pool *p, uint64_t *last)
{
    uint64_t present = atomic_load_explicit(&p->present, memory_order_acquire);
    do {
        if (present & OVER || present / RUN == *last) return false;
    } while (!atomic_compare_exchange_weak_explicit(&p->present, &present, present + 1, memory_order_acq_rel,
                                                    memory_order_acquire));
    *last = present / RUN;
    return true;
}

static void *thread_main(void *argument)
{
    start_argument start = *(start_argument *)argument;
    pool *p = start.pool;
    free(argument);
    uint64_t seen = 0, last = 0;
    for (;;) {
        pthread_mutex_lock(&p->mutex);
        while (p->runs == seen && !p->closing) pthread_cond_wait(&p->wake, &p->mutex);
        seen = p->runs;
        bool closing = p->closing;
        pthread_mutex_unlock(&p->mutex);
        if (closing) return NULL;
        if (!join(p, &last)) continue;
        p->function(p->argument, start.thread);
        atomic_fetch_sub(&p->present, 1);
        wake(p, &p->present);
    }
}

pool *pool_create(int num_threads)
{
    pool *p = aligned_alloc(64, (sizeof(pool) + 63) / 64 * 64);
    if (!p) return NULL;
    *p = (pool){.num_threads = num_threads, .present = OVER};
    p->threads = calloc((size_t)num_threads, sizeof(pthread_t));
    if (!p->threads) {
        free(p);
        return NULL;
    }
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->wake, NULL);
    for (int i = 1; i < num_threads; i++) {
        start_argument *start = malloc(sizeof(*start));
        if (start) *start = (start_argument){p, i};
        if (!start || pthread_create(&p->threads[i], NULL, thread_main, start) != 0) {
            free(start);
            p->num_threads = i; /* fewer threads than requested; see pool_size */
            break;
        }
    }
    return p;
}

void pool_destroy(pool *p)
{
    pthread_mutex_lock(&p->mutex);
    p->closing = true;
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->mutex);
    for (int i = 1; i < p->num_threads; i++) pthread_join(p->threads[i], NULL);
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->mutex);
    free(p->threads);
    free(p);
}

int pool_size(const pool *p) { return p->num_threads; }

void pool_run(pool *p, pool_function function, void *argument)
{
    p->function = function;
    p->argument = argument;
    pthread_mutex_lock(&p->mutex);
    p->runs++;
    atomic_store_explicit(&p->present, p->runs * RUN, memory_order_release);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->mutex);
    function(argument, 0);
    const uint64_t over = p->runs * RUN + OVER;
    atomic_fetch_or_explicit(&p->present, OVER, memory_order_acq_rel);
    int spins = 0;
    for (uint64_t now; (now = atomic_load_explicit(&p->present, memory_order_acquire)) != over;)
        if (spins++ < SPINS)
            relax();
        else
            sleep_on(p, &p->present, (uint32_t)now); /* the low half, which counts the workers inside */
}

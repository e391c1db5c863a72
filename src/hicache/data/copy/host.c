/* Pages between two strided places in memory: a gather/scatter that runs at the speed of the memory.
 *
 * Plain C behind ctypes; nothing here knows Python or layouts. The caller describes every view (one plane of one
 * layer) by a base address and the strides of (slot, token, head, byte) on both sides, and has checked that all
 * slots lie inside.
 *
 * What makes it fast: it walks the SOURCE in address order, so that reads stream; it prefetches across the jumps
 * between runs, which the hardware cannot foresee, into the second cache level (into the first it would take the
 * buffers that stores need, and halve the speed); it stores whole lines around the cache, so that targets are not
 * read first; and helpers take units of work from an atomic counter. Each call works on its own copy and helpers
 * go to the oldest that has work left, so calls from several threads never wait for each other. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#ifndef LEAD
#define LEAD 4096 /* bytes between a prefetch and the copy that needs it: a few memory latencies */
#endif

enum { SOURCE, TARGET, AXES = 5, LINE = 64, BATCH = 128, HELPERS_MAX = 15 };

/* One loop: step i lies at index[i] * step (without an index: i * step) from where the loop begins. */
struct axis {
    int64_t count;
    int64_t step[2];
    const int64_t *index[2];
};

/* The loops over views that differ in their bases alone; outermost first, around one run of bytes. A unit is the
 * nest with two of its loops cut short: the slots, and where one page is more than a unit also the outermost other
 * loop. Both are -1 where there is no such loop. */
struct nest {
    struct axis axes[AXES];
    int depth, slots, split;
    int64_t base[2];
    int64_t run;
    int64_t slots_a_unit, steps_a_unit, splits;
    int64_t first_unit;
};

struct runs {
    int64_t count, run;
    const char *source[BATCH];
    char *target[BATCH];
};
typedef void (*copy_runs)(const struct runs *);

struct job {
    struct nest *nests;
    int64_t count, units;
    copy_runs copy;
    _Atomic int64_t next_unit;
    int helpers; /* inside it now; guarded by the pool's lock */
    struct job *next;
};

struct pool {
    pthread_mutex_t lock; /* guards all but the units of jobs */
    pthread_cond_t work, left;
    struct job *jobs; /* oldest first */
    pthread_t threads[HELPERS_MAX];
    int wanted, started, stopped;
    size_t mask_nbytes;
    const void *mask;
};

/* Where the prefetches are: LEAD bytes before the copy, in the same order. */
struct ahead {
    const struct runs *runs;
    int64_t at, offset;
};

static inline void look_ahead(struct ahead *a, int64_t nbytes) {
    const struct runs *r = a->runs;
    while (nbytes > 0 && a->at < r->count) {
        __builtin_prefetch(r->source[a->at] + a->offset, 0, 2);
        nbytes -= LINE;
        a->offset += LINE;
        if (a->offset >= r->run) {
            nbytes += a->offset - r->run; /* of the last line only what is copied counts */
            a->offset = 0;
            a->at++;
        }
    }
}

static inline void copy_part(struct ahead *a, char *to, const char *from, int64_t nbytes) {
    if (nbytes) {
        look_ahead(a, nbytes);
        memcpy(to, from, (size_t)nbytes);
    }
}

static void copy_cached(const struct runs *r) {
    struct ahead a = {r, 0, 0};
    look_ahead(&a, LEAD);
    for (int64_t i = 0; i < r->count; i++) {
        look_ahead(&a, r->run < LEAD ? r->run : 0);
        memcpy(r->target[i], r->source[i], (size_t)r->run);
    }
}

/* Whole lines of the target go around the cache; what is before and behind them goes through it. */
#define COPY_STREAMING(name, attribute, copy_line)                                                            \
    attribute static void name(const struct runs *r) {                                                        \
        struct ahead a = {r, 0, 0};                                                                           \
        look_ahead(&a, LEAD);                                                                                 \
        for (int64_t i = 0; i < r->count; i++) {                                                              \
            const char *from = r->source[i];                                                                  \
            char *to = r->target[i];                                                                          \
            int64_t left = r->run, head = (int64_t)(-(uintptr_t)to & (LINE - 1));                             \
            head = left < head + LINE ? left : head;                                                          \
            copy_part(&a, to, from, head);                                                                    \
            for (to += head, from += head, left -= head; left >= LINE; left -= LINE) {                        \
                look_ahead(&a, LINE);                                                                         \
                copy_line(to, from);                                                                          \
                to += LINE, from += LINE;                                                                     \
            }                                                                                                 \
            copy_part(&a, to, from, left);                                                                    \
        }                                                                                                     \
    }

#if defined(__x86_64__) && !defined(HICACHE_PORTABLE)
#include <immintrin.h>
#define LINE_SSE2(to, from)                                                                                   \
    for (int part = 0; part < LINE / 16; part++)                                                              \
    _mm_stream_si128((__m128i *)(to) + part, _mm_loadu_si128((const __m128i *)(from) + part))
#define LINE_AVX512(to, from) _mm512_stream_si512((__m512i *)(to), _mm512_loadu_si512(from))
COPY_STREAMING(copy_sse2, , LINE_SSE2)
COPY_STREAMING(copy_avx512, __attribute__((target("avx512f"))), LINE_AVX512)
#define STREAMING() (__builtin_cpu_supports("avx512f") ? copy_avx512 : copy_sse2)
#define FENCE() _mm_sfence()
#elif defined(__aarch64__) && !defined(HICACHE_PORTABLE)
#define LINE_STNP(to, from)                                                                                   \
    __asm__ volatile("ldp q0, q1, [%1]\n\tldp q2, q3, [%1, #32]\n\tstnp q0, q1, [%0]\n\tstnp q2, q3, [%0, #32]" \
                     : : "r"(to), "r"(from) : "v0", "v1", "v2", "v3", "memory")
COPY_STREAMING(copy_stnp, , LINE_STNP)
#define STREAMING() copy_stnp
#define FENCE() __asm__ volatile("dmb ishst" ::: "memory")
#else
#define STREAMING() copy_cached
#define FENCE() ((void)0)
#endif

static inline int64_t offset(const struct axis *a, int side, int64_t i) {
    return (a->index[side] ? a->index[side][i] : i) * a->step[side];
}

/* Make an indexed loop a plain one where its index rises evenly on both sides. */
static void straighten(struct nest *n, struct axis *a) {
    int64_t rise[2];
    for (int side = SOURCE; side <= TARGET; side++) {
        rise[side] = a->count > 1 ? a->index[side][1] - a->index[side][0] : 0;
        for (int64_t i = 2; i < a->count; i++)
            if (a->index[side][i] - a->index[side][i - 1] != rise[side])
                return;
    }
    for (int side = SOURCE; side <= TARGET; side++) {
        n->base[side] += offset(a, side, 0);
        a->step[side] *= rise[side];
        a->index[side] = NULL;
    }
}

/* Take the loops whose step equals the run on both sides into the run. What is taken, or has one step, gets count 0.
 * A run is kept shorter than a unit, but for the bytes of one item. */
static void merge(struct nest *n, struct axis *all, int64_t unit) {
    for (int i = 0; i < AXES; i++) {
        struct axis *a = &all[i];
        int follows = a->step[SOURCE] == n->run && a->step[TARGET] == n->run;
        int fits = n->run == 1 || n->run * a->count <= unit;
        if (a->index[SOURCE] || !a->count || !(a->count == 1 || (follows && fits)))
            continue;
        n->run *= a->count;
        a->count = 0;
        i = -1; /* the run is another: look at all again */
    }
}

/* Put the loops that are left in the order of the source, and say how the nest is cut. all[0] walks the slots. */
static void arrange(struct nest *n, const struct axis *all, int64_t unit, int64_t *units) {
    int64_t distances[AXES], slots = 1, page = n->run;
    n->slots = n->split = -1;
    for (int i = 0; i < AXES; i++) {
        if (!all[i].count)
            continue;
        const int64_t *bases = i == 1 ? all[1].index[SOURCE] : NULL; /* of uneven views the first two tell enough */
        int64_t far = llabs(bases ? bases[1] - bases[0] : all[i].step[SOURCE]);
        int at = n->depth++;
        for (; at > 0 && distances[at - 1] < far; at--) {
            n->axes[at] = n->axes[at - 1];
            distances[at] = distances[at - 1];
            n->slots += n->slots == at - 1;
        }
        n->axes[at] = all[i];
        distances[at] = far;
        if (i == 0)
            n->slots = at, slots = all[0].count;
        else
            page *= all[i].count;
    }
    n->slots_a_unit = page >= unit ? 1 : unit / page < slots ? unit / page : slots;
    n->splits = n->steps_a_unit = 1;
    if (page > unit && n->depth > (n->slots >= 0)) {
        n->split = n->slots == 0;
        int64_t steps = n->axes[n->split].count, parts = (page + unit - 1) / unit;
        n->steps_a_unit = parts < steps ? (steps + parts - 1) / parts : 1;
        n->splits = (steps + n->steps_a_unit - 1) / n->steps_a_unit;
    }
    if (!n->depth)
        n->axes[n->depth++].count = 1;
    n->first_unit = *units;
    *units += (slots + n->slots_a_unit - 1) / n->slots_a_unit * n->splits;
}

/* Leave of a loop its steps from part * steps on, `steps` of them at most. */
static void cut(struct nest *n, int axis, int64_t part, int64_t steps) {
    if (axis < 0)
        return;
    struct axis *a = &n->axes[axis];
    int64_t first = part * steps;
    for (int side = SOURCE; side <= TARGET; side++) {
        n->base[side] += a->index[side] ? 0 : first * a->step[side];
        a->index[side] += a->index[side] ? first : 0;
    }
    a->count = a->count - first < steps ? a->count - first : steps;
}

static void copy_unit(struct nest n, int64_t unit, copy_runs copy) {
    struct runs r = {.count = 0, .run = n.run};
    cut(&n, n.slots, unit / n.splits, n.slots_a_unit);
    cut(&n, n.split, unit % n.splits, n.steps_a_unit);
    const struct axis *inner = &n.axes[n.depth - 1];
    int64_t step[AXES] = {0};
    for (int k = 0; k >= 0;) {
        int64_t source = n.base[SOURCE], target = n.base[TARGET];
        for (k = 0; k < n.depth - 1; k++)
            source += offset(&n.axes[k], SOURCE, step[k]), target += offset(&n.axes[k], TARGET, step[k]);
        for (int64_t i = 0; i < inner->count; i++) {
            r.source[r.count] = (const char *)(uintptr_t)(source + offset(inner, SOURCE, i));
            r.target[r.count] = (char *)(uintptr_t)(target + offset(inner, TARGET, i));
            if (++r.count == BATCH)
                copy(&r), r.count = 0;
        }
        for (k = n.depth - 2; k >= 0 && ++step[k] == n.axes[k].count; k--)
            step[k] = 0;
    }
    copy(&r);
}

static void work_on(struct job *job) {
    for (;;) {
        int64_t unit = atomic_fetch_add_explicit(&job->next_unit, 1, memory_order_relaxed), at = 0;
        if (unit >= job->units)
            break;
        while (at + 1 < job->count && job->nests[at + 1].first_unit <= unit)
            at++;
        copy_unit(job->nests[at], unit - job->nests[at].first_unit, job->copy);
    }
    FENCE(); /* a lock does not order streaming stores */
}

static void *help(void *argument) {
    struct pool *p = argument;
    prctl(PR_SET_NAME, "hicache-copy");
    /* Fails when none of these CPUs is allowed any more: then we stay where our creator was. */
    (void)sched_setaffinity(0, p->mask_nbytes, p->mask);
    pthread_mutex_lock(&p->lock);
    while (!p->stopped) {
        struct job *job = p->jobs; /* the oldest that has units nobody took */
        while (job && atomic_load_explicit(&job->next_unit, memory_order_relaxed) >= job->units)
            job = job->next;
        if (job) {
            job->helpers++;
            pthread_mutex_unlock(&p->lock);
            work_on(job);
            pthread_mutex_lock(&p->lock);
            if (--job->helpers == 0)
                pthread_cond_broadcast(&p->left);
        } else {
            pthread_cond_wait(&p->work, &p->lock);
        }
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* Start the helpers that are wanted and not there; fewer do where the system gives no more. Needs the lock. */
static void start_helpers(struct pool *p) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's own threads */
    for (; p->started < p->wanted; p->started++)
        if (pthread_create(&p->threads[p->started], NULL, help, p))
            break;
    p->wanted = p->started;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Work on a job together with whoever is free; all of it is done when this returns. */
static void share(struct pool *p, struct job *job) {
    struct job **at = &p->jobs;
    pthread_mutex_lock(&p->lock);
    start_helpers(p);
    while (*at)
        at = &(*at)->next;
    *at = job;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    work_on(job);
    pthread_mutex_lock(&p->lock);
    for (at = &p->jobs; *at != job;)
        at = &(*at)->next;
    *at = job->next;
    while (job->helpers)
        pthread_cond_wait(&p->left, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

/* A pool of `helpers` threads that run on the CPUs of `mask`, which stays where it is; they start with the first
 * call that needs them. The pool is never freed: a call may use it until the process ends. */
struct pool *hicache_pool(int helpers, const void *mask, int64_t mask_nbytes) {
    struct pool *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->left, NULL);
    p->wanted = helpers > HELPERS_MAX ? HELPERS_MAX : helpers;
    p->mask = mask;
    p->mask_nbytes = (size_t)mask_nbytes;
    return p;
}

/* End and join the helpers. The pool stays usable: calls are then done by their own threads alone. */
void hicache_stop(struct pool *p) {
    pthread_mutex_lock(&p->lock);
    int started = p->started;
    p->stopped = 1;
    p->started = p->wanted = 0;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < started; i++)
        pthread_join(p->threads[i], NULL);
}

/* One side of a copy: for each view its base address and its strides of (slot, token, head, byte); and the slots. */
struct side {
    const int64_t *bases, *strides, *slots;
};

static int alike(const int64_t *rows, int64_t a, int64_t b) {
    return !memcmp(rows + 4 * a, rows + 4 * b, 4 * sizeof *rows);
}

/* Copy `pages` pages of `views` views; shapes[view] is (plane, tokens, heads, bytes). A thread takes about `unit`
 * bytes at once; without it (0) the call is a small one, and stays on its own thread and in the cache. Gives 0, or
 * -1 without memory. */
int hicache_copy(struct pool *p, const struct side *source, const struct side *target, const int64_t *shapes,
                 int64_t views, int64_t pages, int64_t unit) {
    if (views <= 0 || pages <= 0)
        return 0;
    struct job job = {.nests = calloc((size_t)views, sizeof *job.nests), .copy = unit ? STREAMING() : copy_cached};
    if (!job.nests)
        return -1;
    for (int64_t first = 0, end = 0; first < views; first = end) {
        while (++end < views && alike(shapes, first, end) && alike(source->strides, first, end)
               && alike(target->strides, first, end)) {}
        const int64_t *shape = shapes + 4 * first, *s = source->strides + 4 * first, *t = target->strides + 4 * first;
        struct axis all[AXES] = {{pages, {s[0], t[0]}, {source->slots, target->slots}},
                                 {end - first, {1, 1}, {source->bases + first, target->bases + first}}};
        for (int i = 1; i < 4; i++)
            all[i + 1] = (struct axis){shape[i], {s[i], t[i]}, {NULL, NULL}};
        struct nest *n = &job.nests[job.count++];
        n->run = 1;
        straighten(n, &all[0]);
        straighten(n, &all[1]);
        merge(n, all, unit ? unit : INT64_MAX / 2);
        arrange(n, all, unit ? unit : INT64_MAX / 2, &job.units);
    }
    if (unit && job.units > 1)
        share(p, &job);
    else
        work_on(&job);
    free(job.nests);
    return 0;
}

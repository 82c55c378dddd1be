/* One forward pass: every thread runs the whole of it and meets the others at a barrier after each phase.
 *
 * Inside a phase threads claim units of work from a counter, so a thread that lost its core for a while
 * holds up one unit and not a fixed share. Which thread computes a unit does not change its result. */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "genbatch.h"
#include "simd.h"
#include "tiles.h"

/* Most rows per unit of a linear: 20 tiles of 12. 240 rows x 576 floats are 540 KB and stay in L2 while the
 * blocks of weights pass by. */
#define PANEL_TILES 20
#define PANEL (PANEL_TILES * MAX_ROWS)
#define UNITS_PER_THREAD 3 /* of attention: with fewer, a thread waits for the last of another */
#define PHASES_PER_LAYER 10
#define PHASES_AROUND 4

typedef struct {
    float *x, *qkv, *attended, *activated, *kept; /* kept: the rows that go on after the last attention */
    void *operand;
    group_factors *factors;
    float *scratch; /* a thread's: PANEL x COLUMNS sums, then a row of hidden size */
    int64_t scratch_size;
    lane_maxima *maxima; /* a thread's: one a row of logits */
} workspace;

typedef struct engine {
    pool *pool;
    const model *model;
    const cache *caches;
    workspace work;
    family *families[MAX_GROUPS];
    int num_families[MAX_GROUPS];
    void *memory; /* holds `work` and the families */
    int64_t capacity; /* bytes */
    atomic_int *claims; /* a counter per phase */
    const step *step;
} engine;

typedef struct {
    engine *engine;
    int thread;
    int phase;
} worker;

static void phase_end(worker *w)
{
    w->phase++;
    pool_barrier(w->engine->pool);
}

/* Claims [*from, *to) of `count` units; false when none are left. */
static bool claim(worker *w, int64_t count, int64_t grain, int64_t *from, int64_t *to)
{
    *from = atomic_fetch_add_explicit(&w->engine->claims[w->phase], 1, memory_order_relaxed) * grain;
    *to = smaller(*from + grain, count);
    return *from < count;
}

/* About 8 claims a thread: fine enough to balance, coarse enough that weights stream in long runs. */
static int64_t grain_of(const worker *w, int64_t count)
{
    int64_t grain = count / (8 * pool_size(w->engine->pool));
    return grain < 1 ? 1 : grain;
}

/* Phases on rows */

static rows operand_for(const engine *e, const linear *l, int64_t count)
{
    return (rows){e->work.operand, e->work.factors, count, l->k, l->k / l->group};
}

/* operand[i] = norm(x[index[i]]) in the form that `l` multiplies; `index` and `weight` may be NULL. */
static void prepare_phase(worker *w, const linear *l, const float *x, int64_t size, const int64_t *index,
                          int64_t count, const float *weight)
{
    engine *e = w->engine;
    rows operand = operand_for(e, l, count);
    float *normed = e->work.scratch + w->thread * e->work.scratch_size + PANEL * COLUMNS;
    int64_t from, to;
    while (claim(w, count, grain_of(w, count), &from, &to)) {
        for (int64_t i = from; i < to; i++) {
            const float *row = x + (index ? index[i] : i) * size;
            if (weight) rms_norm(row, weight, e->model->norm_eps, size, normed);
            rows_put(linear_operand(l), &operand, i, weight ? normed : row, size);
        }
    }
    phase_end(w);
}

static void embed_phase(worker *w)
{
    engine *e = w->engine;
    const model *m = e->model;
    int64_t from, to, count = e->step->num_tokens;
    while (claim(w, count, grain_of(w, count), &from, &to)) {
        for (int64_t t = from; t < to; t++) {
            int64_t at = e->step->input_ids[t] * m->hidden;
            float *out = e->work.x + t * m->hidden;
            if (m->embedding_kind == WEIGHT_F32) {
                memcpy(out, (const float *)m->embedding + at, sizeof(float) * (size_t)m->hidden);
                continue;
            }
            const uint16_t *row = (const uint16_t *)m->embedding + at;
            for (int64_t i = 0; i < m->hidden; i++) {
                uint32_t bits = (uint32_t)row[i] << 16;
                memcpy(out + i, &bits, 4);
            }
        }
    }
    phase_end(w);
}

/* Rotates the two halves of a head as transformers does, after the optional norm. */
static void rope(const engine *e, float *head, const float *norm, int64_t position, float scale)
{
    int half = e->model->head_dim / 2;
    if (norm) rms_norm(head, norm, e->model->norm_eps, e->model->head_dim, head);
    const float *cosines = e->step->cosines + position * half, *sines = e->step->sines + position * half;
    for (int i = 0; i < half; i++) {
        float a = head[i], b = head[half + i];
        head[i] = (a * cosines[i] - b * sines[i]) * scale;
        head[half + i] = (b * cosines[i] + a * sines[i]) * scale;
    }
}

static void rope_and_cache_phase(worker *w, const layer *l)
{
    engine *e = w->engine;
    const model *m = e->model;
    int64_t D = m->head_dim, pitch = (m->num_heads + 2 * m->num_kv_heads) * D;
    int64_t from, to, count = (int64_t)e->step->num_tokens * m->num_kv_heads;
    int per_head = m->num_heads / m->num_kv_heads;
    while (claim(w, count, grain_of(w, count), &from, &to)) {
        for (int64_t unit = from; unit < to; unit++) {
            int64_t t = unit / m->num_kv_heads, position = e->step->positions[t];
            int head = (int)(unit % m->num_kv_heads);
            float *row = e->work.qkv + t * pitch;
            for (int h = head * per_head; h < (head + 1) * per_head; h++)
                rope(e, row + h * D, l->q_norm, position, m->score_scale);
            float *key = row + (m->num_heads + head) * D;
            rope(e, key, l->k_norm, position, 1.0f);
            kv_write(&e->caches[l->group], l->index_in_group, head, (int)D, e->step->slots[l->group][t], key,
                     key + m->num_kv_heads * D);
        }
    }
    phase_end(w);
}

/* Attention */

static int family_tiles(const family *f, int per_head)
{
    return f->chunks ? 1 : attention_tiles(f->members[0].query_len, per_head);
}

static void attention_phase(worker *w, const layer *l)
{
    engine *e = w->engine;
    const model *m = e->model;
    attention a = {.queries = e->work.qkv,
                   .out = e->work.attended,
                   .query_stride = (int64_t)(m->num_heads + 2 * m->num_kv_heads) * m->head_dim,
                   .cache = &e->caches[l->group],
                   .layer = l->index_in_group,
                   .num_heads = m->num_heads,
                   .num_kv_heads = m->num_kv_heads,
                   .head_dim = m->head_dim,
                   .window = l->window};
    const int per_head = m->num_heads / m->num_kv_heads, families = e->num_families[l->group];
    const family *all = e->families[l->group];
    int64_t tiles = 0, from, to;
    for (int i = 0; i < families; i++) tiles += family_tiles(&all[i], per_head);
    /* KV head outermost: families that share a prefix read its blocks one after another, out of L2. */
    int64_t count = tiles * m->num_kv_heads;
    while (claim(w, count, grain_of(w, count), &from, &to)) {
        int64_t tile = from % tiles;
        int i = 0;
        for (; tile >= family_tiles(&all[i], per_head); i++) tile -= family_tiles(&all[i], per_head);
        for (int64_t unit = from; unit < to; unit++) {
            const family *now = &all[i];
            const int at = (int)tile, head = (int)(unit / tiles);
            if (++tile == family_tiles(now, per_head)) tile = 0, i = (i + 1) % families;
            if (unit + 1 < to && family_tiles(&all[i], per_head) == 1)
                attention_fetch(&a, &all[i].members[0], (int)((unit + 1) / tiles), 0);
            if (now->chunks)
                attention_together(&a, now->members, now->count, now->chunks, head);
            else
                attention_tile(&a, &now->members[0], head, at);
        }
    }
    phase_end(w);
}

/* Linears */

/* out[count, pitch] from the operand's rows, and what is largest in them; either may be NULL. */
static void linear_units(worker *w, const linear *l, int64_t count, enum epilogue epilogue, float *out,
                         int64_t pitch, lane_maxima *maxima)
{
    engine *e = w->engine;
    rows operand = operand_for(e, l, count);
    float *sums = e->work.scratch + w->thread * e->work.scratch_size;
    int64_t blocks = padded(l->n, COLUMNS) / COLUMNS, tiles = tiles_for(count);
    int64_t panels = (tiles + PANEL_TILES - 1) / PANEL_TILES;
    int64_t from, to, units = blocks * panels;
    while (claim(w, units, grain_of(w, units), &from, &to)) {
        for (int64_t unit = from; unit < to; unit++) {
            int64_t block = unit % blocks, panel = unit / blocks;
            int64_t first = tile_at(count, panel * tiles / panels).start;
            int64_t size = tile_at(count, (panel + 1) * tiles / panels).start - first;
            linear_block(l, block, &operand, first, size, sums);
            if (out) linear_finish(l, block, sums, first, size, epilogue, out, pitch);
            if (maxima) largest_take(l, block, sums, size, maxima + first);
        }
    }
    phase_end(w);
}

static void linear_phase(worker *w, const linear *l, int64_t count, enum epilogue epilogue, float *out,
                         int64_t pitch)
{
    linear_units(w, l, count, epilogue, out, pitch, NULL);
}

static void head_phase(worker *w, const linear *l, int64_t count)
{
    engine *e = w->engine;
    const step *s = e->step;
    lane_maxima *all = e->work.maxima, *own = s->best ? all + w->thread * count : NULL;
    if (own) largest_clear(own, count);
    linear_units(w, l, count, STORE, s->logits, e->model->vocab_size, own);
    if (!own || w->thread > 0) return;
    for (int64_t i = 0; i < count; i++) {
        s->best[i] = (largest){-INFINITY, INT32_MAX};
        for (int thread = 0; thread < pool_size(e->pool); thread++) largest_join(all + thread * count + i, &s->best[i]);
    }
}

/* The step */

static void keep_phase(worker *w)
{
    engine *e = w->engine;
    int64_t from, to, count = e->step->num_logit_rows, hidden = e->model->hidden;
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t i = from; i < to; i++)
            memcpy(e->work.kept + i * hidden, e->work.x + e->step->logit_rows[i] * hidden,
                   sizeof(float) * (size_t)hidden);
    phase_end(w);
}

static void run(void *argument, int thread)
{
    engine *e = argument;
    const model *m = e->model;
    const step *s = e->step;
    workspace *work = &e->work;
    worker w = {e, thread, 0};
    int64_t width = (int64_t)m->num_heads * m->head_dim;
    int64_t pitch = width + 2 * (int64_t)m->num_kv_heads * m->head_dim;
    float *x = work->x;
    int64_t count = s->num_tokens;
    embed_phase(&w);
    for (int i = 0; i < m->num_layers; i++) {
        const layer *l = &m->layers[i];
        prepare_phase(&w, &l->qkv, x, m->hidden, NULL, count, l->attention_norm);
        linear_phase(&w, &l->qkv, count, STORE, work->qkv, pitch);
        rope_and_cache_phase(&w, l);
        const int64_t *index = NULL;
        if (i == m->num_layers - 1) { /* behind the last cache write only the wanted rows matter */
            if (s->num_logit_rows == 0) return;
            keep_phase(&w);
            x = work->kept;
            index = s->logit_rows;
            count = s->num_logit_rows;
        }
        attention_phase(&w, l);
        prepare_phase(&w, &l->out, work->attended, width, index, count, NULL);
        linear_phase(&w, &l->out, count, ADD, x, m->hidden);
        prepare_phase(&w, &l->gate_up, x, m->hidden, NULL, count, l->mlp_norm);
        linear_phase(&w, &l->gate_up, count, SILU, work->activated, m->intermediate);
        prepare_phase(&w, &l->down, work->activated, m->intermediate, NULL, count, NULL);
        linear_phase(&w, &l->down, count, ADD, x, m->hidden);
    }
    prepare_phase(&w, &m->head, x, m->hidden, NULL, count, m->final_norm);
    head_phase(&w, &m->head, count);
}

/* Memory */

static int64_t largest_k(const model *m)
{
    int64_t k = m->head.k;
    for (int i = 0; i < m->num_layers; i++) {
        const layer *l = &m->layers[i];
        const linear *all[] = {&l->qkv, &l->out, &l->gate_up, &l->down};
        for (int j = 0; j < 4; j++) k = all[j]->k > k ? all[j]->k : k;
    }
    return k;
}

/* Lays the buffers of a step end to end, each on its own cache lines, growing the memory if need be. */
static bool reserve(engine *e)
{
    const model *m = e->model;
    int64_t T = e->step->num_tokens, R = e->step->num_logit_rows, k = largest_k(m);
    int64_t width = (int64_t)m->num_heads * m->head_dim;
    int64_t scratch_size = PANEL * COLUMNS + padded(m->hidden, 16);
    int64_t count = T > R ? T : R; /* a row may be asked for twice */
    const int64_t factor_floats = sizeof(group_factors) / sizeof(float);
    const int64_t maxima_floats = e->step->best ? sizeof(lane_maxima) / sizeof(float) : 0;
    int64_t floats[] = {T * m->hidden, T * (width + 2 * (int64_t)m->num_kv_heads * m->head_dim), T * width,
                        count * m->intermediate, R * m->hidden, count * k, count * k / 32 * factor_floats,
                        pool_size(e->pool) * scratch_size, pool_size(e->pool) * R * maxima_floats,
                        m->num_groups * e->step->num_entries * (int64_t)sizeof(family) / 4};
    enum { NUM = sizeof(floats) / sizeof(floats[0]) };
    int64_t total = 0;
    for (int i = 0; i < NUM; i++) total += padded(floats[i], 16) + 16;
    total *= (int64_t)sizeof(float);
    if (total > e->capacity) {
        memory_free(e->memory, e->capacity);
        e->memory = memory_allocate(total);
        e->capacity = e->memory ? total : 0;
        if (!e->memory) return false;
    }
    float *at[NUM], *p = e->memory;
    for (int i = 0; i < NUM; p += padded(floats[i], 16) + 16, i++) at[i] = p;
    e->work = (workspace){at[0], at[1], at[2], at[3], at[4], at[5], (group_factors *)at[6], at[7], scratch_size,
                          (lane_maxima *)at[8]};
    for (int g = 0; g < m->num_groups; g++) e->families[g] = (family *)at[9] + (int64_t)g * e->step->num_entries;
    return true;
}

/* Families no larger than leaves every thread some units of each layer's attention. */
static void find_families(engine *e)
{
    const model *m = e->model;
    const int rows = MAX_ROWS / (m->num_heads / m->num_kv_heads);
    int32_t windows[MAX_GROUPS];
    for (int g = 0; g < m->num_groups; g++) windows[g] = INT32_MAX;
    for (int i = 0; i < m->num_layers; i++)
        if (m->layers[i].window < windows[m->layers[i].group]) windows[m->layers[i].group] = m->layers[i].window;
    const int64_t entries = e->step->num_entries, threads = pool_size(e->pool);
    const int64_t share = threads == 1 ? entries : entries * m->num_kv_heads / (UNITS_PER_THREAD * threads);
    const int64_t most = smaller(smaller(rows, MAX_FAMILY), share);
    for (int g = 0; g < m->num_groups; g++)
        e->num_families[g] = families_find(e->step, g, &e->caches[g], windows[g], (int)most, e->families[g]);
}

/* What Python calls */

int abi_version(void) { return ABI_VERSION; }

/* For the caller to compare with its own idea of the structs. */
int64_t struct_bytes(int which)
{
    const int64_t sizes[] = {sizeof(linear), sizeof(layer), sizeof(model), sizeof(cache), sizeof(step)};
    return sizes[which];
}

void engine_destroy(engine *e)
{
    if (e->pool) pool_destroy(e->pool);
    memory_free(e->memory, e->capacity);
    free(e->claims);
    free(e);
}

/* `caches` holds num_groups of them. The model and the caches must outlive the engine. */
engine *engine_create(const model *m, const cache *caches, int num_threads)
{
    engine *e = calloc(1, sizeof(*e));
    if (!e) return NULL;
    e->pool = pool_create(num_threads);
    e->model = m;
    e->caches = caches;
    e->claims = calloc((size_t)(m->num_layers * PHASES_PER_LAYER + PHASES_AROUND), sizeof(atomic_int));
    if (e->pool && e->claims) return e;
    engine_destroy(e);
    return NULL;
}

int engine_step(engine *e, const step *s, int64_t *where)
{
    e->step = s;
    enum step_error error = step_check(s, e->model, e->caches, where);
    if (error) return error;
    if (!reserve(e)) return STEP_NO_MEMORY;
    find_families(e);
    memset(e->claims, 0, sizeof(atomic_int) * (size_t)(e->model->num_layers * PHASES_PER_LAYER + PHASES_AROUND));
    pool_run(e->pool, run, e);
    return STEP_OK;
}

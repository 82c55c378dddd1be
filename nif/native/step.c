/* One forward pass: every thread runs the whole of it, phase by phase.
 *
 * Inside a phase threads claim units of work from a counter, and a phase is over when all its units are done, whoever did
 * them. A thread that lost its core, or has yet to wake, holds up the unit that it has claimed, if any; when it comes back it
 * finds nothing left in the phases that it missed. Which thread computes a unit does not change its result. How many units a
 * phase has must be the same for a thread that comes late: it follows from the step and the model alone, and where it does
 * not (experts) all threads meet before and after it changes. */
#include <math.h>
#include <stdlib.h>

#include "genbatch.h"
#include "simd.h"
#include "tiles.h"

/* Most rows per unit of a linear: 20 tiles of 12. 240 rows x 576 floats are 540 KB and stay in L2 while the
 * blocks of weights pass by. */
#define PANEL_TILES 20
#define PANEL (PANEL_TILES * MAX_ROWS)
#define UNITS_PER_THREAD 3 /* of attention: with fewer, a thread waits for the last of another */
#define FACTOR_BYTES ((int64_t)sizeof(digit_factors)) /* of a group, at most */

static int phases_of(const model *m) { return 32 * m->num_layers + 8; } /* at most */

typedef struct {
    float *x, *qkv, *attended, *activated, *kept; /* kept: the rows that go on after the last attention */
    float *branch; /* what attention gives, where it is not added to x at once */
    void *operand;
    uint8_t *factors; /* of either kind */
    float *scratch; /* a thread's: PANEL x COLUMNS sums, then a row of hidden size */
    int64_t scratch_size;
    lane_maxima *maxima; /* a thread's: one a row of logits */
    float *normed, *expert_out; /* with experts: their inputs, and their outputs row by row */
    float *inputs; /* [token, layer, layer_width]: the layers' own embeddings of the tokens */
    int64_t expert_k; /* inputs of their widest linear */
    choice choice;
    float *adapted; /* with adapters: the float rows that a linear multiplies, where they are no other buffer's */
    lora_step lora;
    lora_rows lora_tokens, lora_kept; /* the step's rows, and those that go on after the last attention */
} workspace;

/* Claims of units: how many were asked for, how many are done. */
typedef struct {
    atomic_int claimed, done;
} phase;

typedef struct engine {
    pool *pool;
    const model *model;
    const cache *caches;
    workspace work;
    family *families[MAX_GROUPS];
    int num_families[MAX_GROUPS];
    void *memory; /* holds `work` and the families */
    int64_t capacity; /* bytes */
    phase *phases;
    const step *step;
} engine;

typedef struct {
    engine *engine;
    int thread;
    int phase;
    bool claimed; /* whether it has units of this phase, to be done before the next claim */
    int claims; /* how many the phase has in all */
    const lora_rows *rows; /* those of x; NULL without adapters */
    int64_t place; /* of the linear under way, where a row has an adapter there; else -1 */
} worker;

/* Claims [*from, *to) of `count` units; false when none are left. What was claimed before is done. */
static bool claim(worker *w, int64_t count, int64_t grain, int64_t *from, int64_t *to)
{
    phase *p = &w->engine->phases[w->phase];
    w->claims = (int)((count + grain - 1) / grain);
    if (w->claimed) pool_add(w->engine->pool, &p->done, w->claims);
    *from = atomic_fetch_add_explicit(&p->claimed, 1, memory_order_relaxed) * grain;
    *to = smaller(*from + grain, count);
    w->claimed = *from < count;
    return w->claimed;
}

/* Waits for what others have claimed. */
static void phase_end(worker *w)
{
    pool_await(w->engine->pool, &w->engine->phases[w->phase++].done, w->claims);
}

/* About 8 claims a thread: fine enough to balance, coarse enough that weights stream in long runs. */
static int64_t grain_of(const worker *w, int64_t count)
{
    int64_t grain = count / (8 * pool_size(w->engine->pool));
    return grain < 1 ? 1 : grain;
}

/* Floats of a token's row that `out` reads, and of the one that `qkv` gives. */
static int64_t mixed_width(const model *m, const layer *l)
{
    return l->taps ? m->hidden : (int64_t)m->num_heads * l->value_dim;
}

static int64_t mixed_pitch(const model *m, const layer *l)
{
    const int64_t queries = (int64_t)m->num_heads * l->key_dim;
    if (l->taps) return 3 * (int64_t)m->hidden;
    if (!l->qkv.n) return 0;
    return (m->gated_attention ? 2 : 1) * queries + (l->shares ? 0 : l->num_kv_heads * (l->key_dim + l->value_dim));
}

/* The same of a recurrence. */
static int64_t state_width(const recurrence *r) { return (int64_t)r->heads * r->value_dim; }

static int64_t state_pitch(const recurrence *r) { return recurrence_kept(r) + state_width(r); }

/* Phases on rows */

static rows operand_for(const engine *e, const linear *l, int64_t count)
{
    return (rows){e->work.operand, e->work.factors, count, l->k, l->k / l->group};
}

static float *row_of_thread(const worker *w)
{
    return w->engine->work.scratch + w->thread * w->engine->work.scratch_size + PANEL * COLUMNS;
}

static const norm no_norm = {NULL, NULL};

/* What a linear's rows are made of: row i is norm(x[index[i]]), without a norm x[index[i]]; `index` may be NULL. */
typedef struct {
    const float *x;
    int64_t size;
    const int64_t *index;
    const norm *norm;
    float *kept; /* [rows, size]: the rows as floats are kept here, too; or NULL */
} source;

/* Rows of a tile lie a few bytes apart: threads that each wrote some of them would take the lines of memory from one another.
 * So a unit is a tile and a segment of the inputs, so many that every thread has as much to do. Each looks at the whole row
 * for the norm's factors, which is cheap beside what it writes. */
static int64_t segments_for(const worker *w, int64_t tiles, const linear *l, int64_t *length)
{
    const int64_t threads = pool_size(w->engine->pool), whole = l->group * ((64 + l->group - 1) / l->group);
    int64_t segments = 1;
    while (tiles * segments % threads && tiles < 8 * threads) segments++;
    *length = padded((l->k + segments - 1) / segments, whole);
    return (l->k + *length - 1) / *length;
}

/* The rows [first, first + count) of the operand, their inputs [from, to). */
static void prepare_part(worker *w, const linear *l, const rows *operand, const source *s, int64_t first, int64_t count,
                         int64_t from, int64_t to)
{
    const model *m = w->engine->model;
    const int64_t end = smaller(to, s->size);
    for (int64_t i = first; i < first + count; i++) {
        const float *row = s->x + (s->index ? s->index[i] : i) * s->size;
        float *own = s->kept ? s->kept + i * s->size : row_of_thread(w);
        if (s->norm->weight)
            norm_part(m, s->norm, norm_look(m, row, s->size), row, from, end, own);
        else if (s->kept && from < end)
            memcpy(own + from, row + from, sizeof(float) * (size_t)(end - from));
        rows_put_part(linear_operand(l), operand, i, s->norm->weight ? own : row, s->size, from, to);
    }
}

/* The rows in the form that `l` multiplies. */
static void prepare_phase(worker *w, const linear *l, int64_t count, const source *s)
{
    const rows operand = operand_for(w->engine, l, count);
    const int64_t tiles = tiles_for(count);
    int64_t length, segments = segments_for(w, tiles, l, &length), from, to;
    while (claim(w, tiles * segments, 1, &from, &to)) {
        const tile_place at = tile_at(count, from / segments);
        const int64_t start = from % segments * length;
        prepare_part(w, l, &operand, s, at.start, at.size, start, smaller(start + length, l->k));
    }
    phase_end(w);
}

/* As `prepare_phase` for a linear of a layer, and what the rows' adapters make of its input. */
static void layer_phase(worker *w, const layer *layer, enum lora_place place, const linear *l, const float *x,
                        int64_t size, const int64_t *index, int64_t count, const norm *n)
{
    engine *e = w->engine;
    const lora_step *lora = &e->work.lora;
    const int64_t at = (layer - e->model->layers) * LORA_PLACES + place;
    w->place = w->rows && lora_adapts(lora, w->rows, at) ? at : -1;
    float *kept = w->place >= 0 && n->weight ? e->work.adapted : NULL;
    prepare_phase(w, l, count, &(source){x, size, index, n, kept});
    if (w->place < 0) return;
    const lora_input input = kept ? (lora_input){kept, NULL, size} : (lora_input){x, index, size};
    int64_t from, to, units = lora_units(lora, w->rows, at);
    while (claim(w, units, grain_of(w, units), &from, &to))
        for (int64_t unit = from; unit < to; unit++) lora_shrink(lora, w->rows, at, unit, &input);
    phase_end(w);
}

/* x = scale * (x + residual_scale * norm(branch)); `branch` is overwritten. */
static void join_row(const model *m, const norm *n, float scale, float *branch, float *x)
{
    if (n->weight) norm_row(m, n, branch, m->hidden, branch);
    for (int64_t i = 0; i < m->hidden; i++) x[i] += m->residual_scale * branch[i];
    if (scale == 1.0f) return;
    for (int64_t i = 0; i < m->hidden; i++) x[i] *= scale;
}

static void join_phase(worker *w, const norm *n, float scale, float *x, int64_t count)
{
    engine *e = w->engine;
    int64_t from, to, hidden = e->model->hidden;
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t i = from; i < to; i++)
            join_row(e->model, n, scale, e->work.branch + i * hidden, x + i * hidden);
    phase_end(w);
}

static void embed_phase(worker *w)
{
    engine *e = w->engine;
    const model *m = e->model;
    int64_t from, to, count = e->step->num_tokens;
    while (claim(w, count, grain_of(w, count), &from, &to)) {
        for (int64_t t = from; t < to; t++) {
            float *out = e->work.x + t * m->hidden;
            embed_row(&m->embedding, e->step->input_ids[t], out);
            if (m->embedding_norm.weight) norm_row(m, &m->embedding_norm, out, m->hidden, out);
        }
    }
    phase_end(w);
}

static void rope_and_cache_phase(worker *w, const layer *l)
{
    engine *e = w->engine;
    const model *m = e->model;
    const int D = l->key_dim, heads = l->num_kv_heads, per_head = m->num_heads / heads;
    int64_t from, to, pitch = mixed_pitch(m, l), count = (int64_t)e->step->num_tokens * heads;
    while (claim(w, count, grain_of(w, count), &from, &to)) {
        for (int64_t unit = from; unit < to; unit++) {
            int64_t t = unit / heads, position = e->step->positions[t];
            int head = (int)(unit % heads);
            float *row = e->work.qkv + t * pitch;
            for (int h = head * per_head; h < (head + 1) * per_head; h++) {
                norm n = head_norm(m, &l->q_norm, h, D);
                rope(m, l, e->step, row + h * D, &n, position, m->score_scale);
            }
            if (l->shares) continue;
            float *key = row + (m->num_heads + head) * D;
            float *value = row + (m->num_heads + heads) * D + head * l->value_dim;
            norm n = head_norm(m, &l->k_norm, head, D);
            rope(m, l, e->step, key, &n, position, 1.0f);
            if (l->v_norm.weight) norm_row(m, &l->v_norm, value, l->value_dim, value);
            kv_write(&e->caches[l->group], l, head, e->step->slots[l->group][t], key, value);
        }
    }
    phase_end(w);
}

/* Queries and keys of all heads as one row each. */
static void whole_norm_phase(worker *w, const layer *l)
{
    engine *e = w->engine;
    const model *m = e->model;
    const int64_t queries = (int64_t)m->num_heads * l->key_dim, keys = (int64_t)l->num_kv_heads * l->key_dim;
    int64_t from, to, count = e->step->num_tokens;
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t t = from; t < to; t++) {
            float *row = e->work.qkv + t * mixed_pitch(m, l);
            norm_row(m, &l->q_norm, row, queries, row);
            norm_row(m, &l->k_norm, row + queries, keys, row + queries);
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
                   .query_stride = mixed_pitch(m, l),
                   .cache = &e->caches[l->group],
                   .sinks = l->sinks,
                   .score_cap = m->score_cap,
                   .layer = l->index_in_group,
                   .num_heads = m->num_heads,
                   .num_kv_heads = l->num_kv_heads,
                   .key_dim = l->key_dim,
                   .value_dim = l->value_dim,
                   .window = l->window,
                   .sink_tokens = l->sink_tokens};
    const int per_head = m->num_heads / l->num_kv_heads, families = e->num_families[l->group];
    const family *all = e->families[l->group];
    int64_t tiles = 0, from, to;
    for (int i = 0; i < families; i++) tiles += family_tiles(&all[i], per_head);
    /* KV head outermost: families that share a prefix read its blocks one after another, out of L2. */
    int64_t count = tiles * l->num_kv_heads;
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

/* Convolutions */

static int entry_of(const step *s, int64_t token)
{
    int low = 0, high = s->num_entries - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (s->query_starts[middle] <= token)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

static void convolution_phases(worker *w, const layer *l)
{
    engine *e = w->engine;
    const step *s = e->step;
    const cache *c = &e->caches[l->group];
    const int64_t hidden = e->model->hidden, pitch = 3 * hidden, count = s->num_tokens;
    int64_t from, to;
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t t = from; t < to; t++)
            convolution_write(c, l->index_in_group, hidden, s->slots[l->group][t], e->work.qkv + t * pitch);
    phase_end(w);
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t t = from; t < to; t++) {
            const int32_t *table = s->block_tables[l->group] + (int64_t)entry_of(s, t) * s->table_width[l->group];
            convolution_row(c, l, hidden, table, s->positions[t], e->work.qkv + t * pitch, e->work.attended + t * hidden);
        }
    phase_end(w);
}

/* Recurrences */

static void recurrence_phases(worker *w, const recurrence *r)
{
    engine *e = w->engine;
    const step *s = e->step;
    const cache *c = &e->caches[r->group];
    const int64_t pitch = state_pitch(r), width = state_width(r), count = s->num_tokens;
    float *scratch = e->work.scratch + w->thread * e->work.scratch_size;
    int64_t from, to, heads = (int64_t)s->num_entries * r->heads;
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t t = from; t < to; t++) recurrence_write(c, r, s->slots[r->group][t], e->work.qkv + t * pitch);
    phase_end(w);
    while (claim(w, heads, grain_of(w, heads), &from, &to))
        for (int64_t unit = from; unit < to; unit++)
            recurrence_head(c, r, s, (int)(unit / r->heads), (int)(unit % r->heads), scratch, e->work.attended);
    phase_end(w);
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t t = from; t < to; t++)
            recurrence_gate(r, e->work.qkv + t * pitch + pitch - width, e->work.attended + t * width);
    phase_end(w);
}

/* What attention gives times the gates that stand behind a row's values. */
static void gate_phase(worker *w, const layer *l)
{
    engine *e = w->engine;
    const int64_t pitch = mixed_pitch(e->model, l), width = mixed_width(e->model, l), count = e->step->num_tokens;
    int64_t from, to;
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t t = from; t < to; t++)
            multiply_sigmoid(e->work.qkv + t * pitch + pitch - width, width, e->work.attended + t * width);
    phase_end(w);
}

/* Linears */

/* What a linear's blocks become: written to out[count, pitch], or looked through for the largest, or both. */
typedef struct {
    enum finish finish;
    float *out; /* or NULL */
    int64_t pitch;
    lane_maxima *maxima; /* or NULL */
} target;

static void finish_block(const worker *w, const linear *l, int64_t block, float *sums, int64_t first, int64_t size,
                         const target *t)
{
    const model *m = w->engine->model;
    if (w->place >= 0) {
        int64_t width, column = linear_column(l, block, &width);
        lora_expand(&w->engine->work.lora, w->rows, w->place, column, width, first, size, sums);
    }
    if (l == &m->head) logits_finish(m, sums, size);
    if (t->maxima) largest_take(l, block, sums, size, t->maxima + first);
    if (t->out) linear_finish(l, block, sums, first, size, t->finish, m, t->out, t->pitch);
}

static void linear_units(worker *w, const linear *l, int64_t count, const target *t)
{
    engine *e = w->engine;
    rows operand = operand_for(e, l, count);
    float *sums = e->work.scratch + w->thread * e->work.scratch_size;
    int64_t blocks = linear_blocks(l), tiles = tiles_for(count);
    int64_t panels = (tiles + PANEL_TILES - 1) / PANEL_TILES;
    int64_t from, to, units = blocks * panels;
    while (claim(w, units, grain_of(w, units), &from, &to)) {
        for (int64_t unit = from; unit < to; unit++) {
            int64_t block = unit % blocks, panel = unit / blocks;
            int64_t first = tile_at(count, panel * tiles / panels).start;
            int64_t size = tile_at(count, (panel + 1) * tiles / panels).start - first;
            linear_block(l, block, &operand, first, size, sums);
            finish_block(w, l, block, sums, first, size, t);
        }
    }
    w->place = -1;
    phase_end(w);
}

static void linear_phase(worker *w, const linear *l, int64_t count, enum finish finish, float *out, int64_t pitch)
{
    linear_units(w, l, count, &(target){finish, out, pitch, NULL});
}

static void head_phase(worker *w, const linear *l, int64_t count)
{
    engine *e = w->engine;
    const step *s = e->step;
    lane_maxima *all = e->work.maxima, *own = s->best ? all + w->thread * count : NULL;
    linear_units(w, l, count, &(target){STORE, s->logits, e->model->vocab_size, own});
    if (!own || w->thread > 0) return;
    for (int64_t i = 0; i < count; i++) {
        s->best[i] = (largest){-INFINITY, INT32_MAX};
        for (int thread = 0; thread < pool_size(e->pool); thread++) largest_join(all + thread * count + i, &s->best[i]);
    }
}

/* Experts: as the phases above, on rows sorted by expert */

/* The operand of an expert's rows, which start at row `start` of all. */
static rows expert_operand(const engine *e, const linear *l, int64_t start, int64_t count)
{
    static const int64_t bytes[] = {[WEIGHT_F32] = 4, [WEIGHT_BF16] = 2, [WEIGHT_I8] = 1, [WEIGHT_I24] = DIGITS};
    const int64_t at = start * e->work.expert_k;
    return (rows){(uint8_t *)e->work.operand + at * bytes[linear_operand(l)],
                  e->work.factors + at / SMALLEST_GROUP * FACTOR_BYTES, count, l->k, l->k / l->group};
}

/* What the experts read, where the router reads something else. */
static void norm_phase(worker *w, const norm *n, const float *x, int64_t count)
{
    const model *m = w->engine->model;
    int64_t from, to, hidden = m->hidden;
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t i = from; i < to; i++)
            norm_row(m, n, x + i * hidden, hidden, w->engine->work.normed + i * hidden);
    phase_end(w);
}

static void route_phases(worker *w, const layer *l, const float *x, int64_t count)
{
    engine *e = w->engine;
    const experts *all = l->experts;
    choice *c = &e->work.choice;
    int64_t from, to;
    const bool own = all->router_norm.weight;
    const norm *n = own ? &all->router_norm : &l->mlp_norm;
    prepare_phase(w, &all->router, count, &(source){x, e->model->hidden, NULL, n, own ? NULL : e->work.normed});
    linear_phase(w, &all->router, count, STORE, c->scores, all->count);
    if (own) norm_phase(w, &all->input_norm, x, count);
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t i = from; i < to; i++) experts_choose(all, c, i);
    phase_end(w);
    pool_barrier(e->pool); /* nobody is left among the last layer's panels */
    if (w->thread == 0) experts_group(all, c, count, PANEL_TILES);
    pool_barrier(e->pool);
}

/* The operand of each expert's `gate_up` or `down`; row i is x[tokens[i]], or x[i] where `tokens` is NULL. */
static void expert_prepare_phase(worker *w, const linear *linears, const float *x, int64_t size, const int32_t *tokens)
{
    engine *e = w->engine;
    const choice *c = &e->work.choice;
    int64_t length, segments = segments_for(w, c->num_panels, linears, &length), from, to;
    while (claim(w, c->num_panels * segments, 1, &from, &to)) {
        const expert_panel *p = &c->panels[from / segments];
        const linear *l = &linears[p->expert];
        const rows operand = expert_operand(e, l, p->start, p->count);
        const int64_t start = from % segments * length, end = smaller(start + length, l->k);
        for (int64_t i = p->first; i < p->first + p->size; i++) {
            const float *row = x + (tokens ? tokens[p->start + i] : p->start + i) * size;
            rows_put_part(linear_operand(l), &operand, i, row, size, start, end);
        }
    }
    phase_end(w);
}

static void expert_linear_phase(worker *w, const linear *linears, enum finish finish, float *out, int64_t pitch)
{
    engine *e = w->engine;
    const choice *c = &e->work.choice;
    float *sums = e->work.scratch + w->thread * e->work.scratch_size;
    int64_t blocks = linear_blocks(linears), from, to, units = blocks * c->num_panels;
    while (claim(w, units, grain_of(w, units), &from, &to)) {
        for (int64_t unit = from; unit < to; unit++) {
            const expert_panel *p = &c->panels[unit / blocks];
            const linear *l = &linears[p->expert];
            rows operand = expert_operand(e, l, p->start, p->count);
            linear_block(l, unit % blocks, &operand, p->first, p->size, sums);
            linear_finish(l, unit % blocks, sums, p->start + p->first, p->size, finish, e->model, out, pitch);
        }
    }
    phase_end(w);
}

/* Of what the MLP adds to: the layer's, unless more follows. */
static float own_scale(const model *m, const layer *l) { return m->layer_width ? 1.0f : l->scale; }

static void expert_join_phase(worker *w, const layer *l, float *x, int64_t count)
{
    engine *e = w->engine;
    const choice *c = &e->work.choice;
    const int chosen = l->experts->chosen;
    int64_t from, to, hidden = e->model->hidden;
    float *sum = row_of_thread(w);
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t t = from; t < to; t++) {
            memset(sum, 0, sizeof(float) * (size_t)hidden);
            for (int n = 0; n < chosen; n++) {
                const float *out = e->work.expert_out + c->places[t * chosen + n] * hidden;
                const float weight = c->weights[t * chosen + n];
                for (int64_t i = 0; i < hidden; i++) sum[i] += weight * out[i];
            }
            if (l->experts->beside_norm.weight) {
                float *beside = e->work.branch + t * hidden;
                norm_row(e->model, &l->experts->sum_norm, sum, hidden, sum);
                norm_row(e->model, &l->experts->beside_norm, beside, hidden, beside);
                for (int64_t i = 0; i < hidden; i++) sum[i] += beside[i];
            }
            join_row(e->model, &l->mlp_post, own_scale(e->model, l), sum, x + t * hidden);
        }
    phase_end(w);
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

/* Whether what a layer's parts give can be added to x as it comes. */
static bool added_at_once(const model *m, const norm *post, float scale)
{
    return !post->weight && m->residual_scale == 1.0f && scale == 1.0f;
}

static void mlp_phases(worker *w, const layer *l, float *x, int64_t count)
{
    engine *e = w->engine;
    const model *m = e->model;
    const experts *mixed = l->experts;
    const bool at_once = !mixed && added_at_once(m, &l->mlp_post, own_scale(m, l));
    if (!mixed || mixed->beside_norm.weight) {
        layer_phase(w, l, LORA_GATE_UP, &l->gate_up, x, m->hidden, NULL, count, &l->mlp_norm);
        linear_phase(w, &l->gate_up, count, ACTIVATE, e->work.activated, l->intermediate);
        layer_phase(w, l, LORA_DOWN, &l->down, e->work.activated, l->intermediate, NULL, count, &no_norm);
        linear_phase(w, &l->down, count, at_once ? ADD : STORE, at_once ? x : e->work.branch, m->hidden);
    }
    if (mixed) {
        route_phases(w, l, x, count);
        expert_prepare_phase(w, mixed->gate_up, e->work.normed, m->hidden, e->work.choice.tokens);
        expert_linear_phase(w, mixed->gate_up, ACTIVATE, e->work.activated, mixed->intermediate);
        expert_prepare_phase(w, mixed->down, e->work.activated, mixed->intermediate, NULL);
        expert_linear_phase(w, mixed->down, STORE, e->work.expert_out, m->hidden);
        expert_join_phase(w, l, x, count);
    } else if (!at_once) {
        join_phase(w, &l->mlp_post, own_scale(m, l), x, count);
    }
}

/* Embeddings of the layers' own */

/* Each layer's embedding of a token: the table's, and one made of the token's usual embedding. */
static void inputs_phases(worker *w, int64_t count)
{
    engine *e = w->engine;
    const model *m = e->model;
    const int64_t width = m->layer_embedding.width, size = m->layer_width;
    int64_t from, to;
    prepare_phase(w, &m->inputs, count, &(source){e->work.x, m->hidden, NULL, &no_norm, NULL});
    linear_phase(w, &m->inputs, count, STORE, e->work.inputs, width);
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t t = from; t < to; t++) {
            float *own = row_of_thread(w), *row = e->work.inputs + t * width;
            embed_row(&m->layer_embedding, e->step->input_ids[t], own);
            for (int64_t i = 0; i < width; i++) row[i] *= m->inputs_scale;
            for (int64_t i = 0; i < width; i += size) norm_row(m, &m->inputs_norm, row + i, size, row + i);
            for (int64_t i = 0; i < width; i++) row[i] = (row[i] + own[i]) * m->joined_scale;
        }
    phase_end(w);
}

/* x is gated into the width of the layer's embedding, multiplied by it, and what is projected back is added to x. Row i of
 * x is of the token index[i]. */
static void input_phases(worker *w, const layer *l, float *x, const int64_t *index, int64_t count)
{
    engine *e = w->engine;
    const model *m = e->model;
    const int64_t size = m->layer_width, place = (l - m->layers) * size;
    float *gates = e->work.activated;
    int64_t from, to;
    prepare_phase(w, &l->input_gate, count, &(source){x, m->hidden, NULL, &no_norm, NULL});
    linear_phase(w, &l->input_gate, count, STORE, gates, size);
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t i = from; i < to; i++) {
            float *own = row_of_thread(w);
            memcpy(own, e->work.inputs + (index ? index[i] : i) * m->layer_embedding.width + place, sizeof(float) * size);
            multiply_activated(m, gates + i * size, size, own);
            memcpy(gates + i * size, own, sizeof(float) * size);
        }
    phase_end(w);
    prepare_phase(w, &l->input_projection, count, &(source){gates, size, NULL, &no_norm, NULL});
    linear_phase(w, &l->input_projection, count, STORE, e->work.branch, m->hidden);
    join_phase(w, &l->input_post, l->scale, x, count);
}

/* Rows that a phase writes: all tokens of the step, or those that go on after the last layer's cache writes. */
typedef struct {
    float *x;
    const int64_t *index; /* which rows of all tokens they are; NULL: all */
    int64_t count;
    const lora_rows *adapted;
} stream;

/* The state's half of a layer's mixing: added to x, or left in `branch` where attention's half follows. */
static void recur(worker *w, const layer *l, const stream *all, const stream *kept)
{
    engine *e = w->engine;
    const model *m = e->model;
    const recurrence *r = l->recurrence;
    prepare_phase(w, &r->inputs, all->count, &(source){all->x, m->hidden, NULL, &l->attention_norm, NULL});
    linear_phase(w, &r->inputs, all->count, STORE, e->work.qkv, state_pitch(r));
    recurrence_phases(w, r);
    const bool attends = l->qkv.n, at_once = !attends && !m->parallel && added_at_once(m, &l->attention_post, 1.0f);
    if (!kept->count) return;
    if (!attends && kept->index) keep_phase(w);
    prepare_phase(w, &r->out, kept->count, &(source){e->work.attended, state_width(r), kept->index, &no_norm, NULL});
    linear_phase(w, &r->out, kept->count, at_once ? ADD : STORE, at_once ? kept->x : e->work.branch, m->hidden);
    if (!at_once && !attends && !m->parallel) join_phase(w, &l->attention_post, 1.0f, kept->x, kept->count);
}

/* Attention or a short convolution; what a state has left in `branch` is added with it. */
static void attend(worker *w, const layer *l, const stream *all, const stream *kept)
{
    engine *e = w->engine;
    const model *m = e->model;
    layer_phase(w, l, LORA_QKV, &l->qkv, all->x, m->hidden, NULL, all->count, &l->attention_norm);
    linear_phase(w, &l->qkv, all->count, STORE, e->work.qkv, mixed_pitch(m, l));
    if (l->taps) {
        convolution_phases(w, l);
    } else {
        if (m->qk_norm == QK_WHOLE) whole_norm_phase(w, l);
        rope_and_cache_phase(w, l);
    }
    if (!kept->count) return;
    if (kept->index) keep_phase(w);
    if (!l->taps) attention_phase(w, l);
    if (!l->taps && m->gated_attention) gate_phase(w, l);
    const bool at_once = !m->parallel && !l->recurrence && added_at_once(m, &l->attention_post, 1.0f);
    const bool adds = at_once || l->recurrence;
    w->rows = kept->adapted;
    layer_phase(w, l, LORA_OUT, &l->out, e->work.attended, mixed_width(m, l), kept->index, kept->count, &no_norm);
    linear_phase(w, &l->out, kept->count, adds ? ADD : STORE, at_once ? kept->x : e->work.branch, m->hidden);
    if (!at_once && !m->parallel) join_phase(w, &l->attention_post, 1.0f, kept->x, kept->count);
}

static void run(void *argument, int thread)
{
    engine *e = argument;
    const model *m = e->model;
    const step *s = e->step;
    workspace *work = &e->work;
    const bool adapts = s->num_adapters;
    const stream all = {work->x, NULL, s->num_tokens, adapts ? &work->lora_tokens : NULL};
    const stream wanted = {work->kept, s->logit_rows, s->num_logit_rows, adapts ? &work->lora_kept : NULL};
    worker w = {.engine = e, .thread = thread, .rows = all.adapted, .place = -1};
    embed_phase(&w);
    if (m->layer_width) inputs_phases(&w, all.count);
    for (int i = 0; i < m->num_layers; i++) {
        const layer *l = &m->layers[i];
        const stream *kept = i == m->num_layers - 1 ? &wanted : &all; /* behind the last cache write */
        if (l->recurrence) recur(&w, l, &all, kept);
        if (l->qkv.n) attend(&w, l, &all, kept);
        if (!kept->count) return;
        w.rows = kept->adapted;
        if (kept->index && !l->recurrence && !l->qkv.n) keep_phase(&w);
        if (l->experts || l->down.n) mlp_phases(&w, l, kept->x, kept->count);
        if (m->parallel) join_phase(&w, &l->attention_post, 1.0f, kept->x, kept->count);
        if (m->layer_width) input_phases(&w, l, kept->x, kept->index, kept->count);
    }
    prepare_phase(&w, &m->head, wanted.count, &(source){wanted.x, m->hidden, NULL, &m->final_norm, NULL});
    head_phase(&w, &m->head, wanted.count);
}

/* Memory */

static int64_t largest_k(const model *m)
{
    int64_t k = m->head.k;
    for (int i = 0; i < m->num_layers; i++) {
        const layer *l = &m->layers[i];
        const recurrence *r = l->recurrence;
        const linear *all[] = {&l->qkv, &l->out, &l->gate_up, &l->down, &l->input_gate, &l->input_projection,
                               l->experts ? &l->experts->router : &l->qkv, r ? &r->inputs : &l->qkv, r ? &r->out : &l->qkv};
        for (int j = 0; j < 9; j++) k = all[j]->k > k ? all[j]->k : k;
    }
    return k;
}

/* Of one thread. */
static int64_t scratch_floats(const model *m)
{
    const int64_t row = m->layer_embedding.width > m->hidden ? m->layer_embedding.width : m->hidden;
    int64_t most = PANEL * COLUMNS + padded(row, 16);
    for (int i = 0; i < m->num_layers; i++) {
        const int64_t states = m->layers[i].recurrence ? recurrence_scratch(m->layers[i].recurrence) : 0;
        most = states > most ? states : most;
    }
    return most;
}

enum { NUM_BUFFERS = 26 };

/* How many floats each buffer of a step takes, and all of them together in bytes, each on its own cache lines. */
static int64_t buffer_floats(const model *m, const step *s, int threads, int64_t floats[NUM_BUFFERS])
{
    const int64_t T = s->num_tokens, R = s->num_logit_rows, k = largest_k(m);
    int64_t width = 0, pitch = 0;
    for (int i = 0; i < m->num_layers; i++) {
        const recurrence *r = m->layers[i].recurrence;
        const int64_t own_width = mixed_width(m, &m->layers[i]), own_pitch = mixed_pitch(m, &m->layers[i]);
        width = larger(larger(own_width, r ? state_width(r) : 0), width);
        pitch = larger(larger(own_pitch, r ? state_pitch(r) : 0), pitch);
    }
    const int64_t count = T > R ? T : R; /* a row may be asked for twice */
    const expert_sizes x = experts_sizes(m);
    const int64_t mixed = count * x.chosen, routed = x.chosen ? count : 0;
    const int64_t operand = mixed * x.k > count * k ? mixed * x.k : count * k;
    const int64_t factor_floats = FACTOR_BYTES / (int64_t)sizeof(float);
    const int64_t maxima_floats = s->best ? sizeof(lane_maxima) / sizeof(float) : 0;
    const int64_t adapters = s->num_adapters;
    const int64_t sizes[] = {
        T * m->hidden, T * pitch, T * width,
        (count > mixed ? count : mixed) * m->intermediate, R * m->hidden, operand,
        operand / SMALLEST_GROUP * factor_floats, threads * scratch_floats(m), threads * R * maxima_floats,
        m->num_groups * s->num_entries * (int64_t)sizeof(family) / 4, count * m->hidden, routed * m->hidden,
        mixed * m->hidden, routed * x.count, mixed, mixed, mixed, mixed, x.count + 1,
        (x.count + mixed) * (int64_t)sizeof(expert_panel) / 4, adapters ? count * m->hidden : 0,
        adapters ? count * s->lora_ranks : 0, adapters ? T : 0, adapters ? R : 0,
        2 * adapters * (int64_t)sizeof(lora_group) / 4, T * m->layer_embedding.width};
    _Static_assert(sizeof(sizes) / sizeof(sizes[0]) == NUM_BUFFERS, "a size for every buffer");
    int64_t total = 0;
    for (int i = 0; i < NUM_BUFFERS; i++) total += padded(floats[i] = sizes[i], 16) + 16;
    return total * (int64_t)sizeof(float);
}

/* Lays the buffers of a step end to end, growing the memory if need be. */
static bool reserve(engine *e)
{
    const model *m = e->model;
    const expert_sizes x = experts_sizes(m);
    const int64_t adapters = e->step->num_adapters;
    int64_t floats[NUM_BUFFERS];
    const int64_t total = buffer_floats(m, e->step, pool_size(e->pool), floats);
    if (total > e->capacity) {
        memory_free(e->memory, e->capacity);
        e->memory = memory_allocate(total);
        e->capacity = e->memory ? total : 0;
        if (!e->memory) return false;
    }
    float *at[NUM_BUFFERS], *p = e->memory;
    for (int i = 0; i < NUM_BUFFERS; p += padded(floats[i], 16) + 16, i++) at[i] = p;
    e->work = (workspace){.x = at[0],
                          .qkv = at[1],
                          .attended = at[2],
                          .activated = at[3],
                          .kept = at[4],
                          .operand = at[5],
                          .factors = (uint8_t *)at[6],
                          .scratch = at[7],
                          .scratch_size = scratch_floats(m),
                          .maxima = (lane_maxima *)at[8],
                          .branch = at[10],
                          .normed = at[11],
                          .expert_out = at[12],
                          .expert_k = x.k,
                          .choice = {.scores = at[13],
                                     .ids = (int32_t *)at[14],
                                     .weights = at[15],
                                     .places = (int32_t *)at[16],
                                     .tokens = (int32_t *)at[17],
                                     .starts = (int32_t *)at[18],
                                     .panels = (expert_panel *)at[19]},
                          .adapted = at[20],
                          .lora = {e->step->adapters, at[21], (int32_t)adapters, e->step->lora_ranks},
                          .lora_tokens = {(int32_t *)at[22], (lora_group *)at[24], 0},
                          .inputs = at[25],
                          .lora_kept = {(int32_t *)at[23], (lora_group *)at[24] + adapters, 0}};
    for (int g = 0; g < m->num_groups; g++) e->families[g] = (family *)at[9] + (int64_t)g * e->step->num_entries;
    return true;
}

/* Which rows have which adapter, of all tokens and of those whose logits are wanted. */
static void find_adapters(engine *e)
{
    const step *s = e->step;
    workspace *work = &e->work;
    if (!s->num_adapters) return;
    lora_sort(&work->lora, s->adapter_of, NULL, s->num_tokens, &work->lora_tokens);
    lora_sort(&work->lora, s->adapter_of, s->logit_rows, s->num_logit_rows, &work->lora_kept);
}

/* Families no larger than leaves every thread some units of each layer's attention. */
static void find_families(engine *e)
{
    const model *m = e->model;
    const int64_t entries = e->step->num_entries, threads = pool_size(e->pool);
    const layer *first[MAX_GROUPS] = {NULL}; /* of each group, whose layers are alike; NULL of states */
    for (int i = m->num_layers - 1; i >= 0; i--)
        if (m->layers[i].qkv.n) first[m->layers[i].group] = &m->layers[i];
    for (int g = 0; g < m->num_groups; g++) {
        if (!first[g]) continue; /* states meet nobody's keys */
        const int64_t heads = first[g]->num_kv_heads, rows = heads ? MAX_ROWS / (m->num_heads / heads) : 1;
        const int64_t share = threads == 1 ? entries : entries * heads / (UNITS_PER_THREAD * threads);
        const int64_t most = smaller(smaller(rows, MAX_FAMILY), share);
        e->num_families[g] = families_find(e->step, g, &e->caches[g], first[g]->window, (int)most, e->families[g]);
    }
}

/* What Python calls */

/* Bytes of the buffers of such a step, of which only the counts are read. */
int64_t step_bytes(const model *m, const step *s, int threads)
{
    int64_t floats[NUM_BUFFERS];
    return buffer_floats(m, s, threads, floats);
}

void engine_destroy(engine *e)
{
    if (e->pool) pool_destroy(e->pool);
    memory_free(e->memory, e->capacity);
    free(e->phases);
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
    e->phases = calloc((size_t)phases_of(m), sizeof(phase));
    if (e->pool && e->phases) return e;
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
    find_adapters(e);
    if (s->best) largest_clear(e->work.maxima, pool_size(e->pool) * s->num_logit_rows); /* a thread may not come at all */
    memset(e->phases, 0, sizeof(phase) * (size_t)phases_of(e->model));
    pool_run(e->pool, run, e);
    return STEP_OK;
}

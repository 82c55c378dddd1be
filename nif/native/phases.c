/* The phases that every part of a layer uses: claims of units, the rows of a linear, the linear itself, and the addition to
 * the residual. */
#include <assert.h>
#include <string.h>

#include "step.h"

bool claim(worker *w, int64_t count, int64_t grain, int64_t *from, int64_t *to)
{
    phase *p = &w->engine->phases[w->phase];
    w->claims = (int)((count + grain - 1) / grain);
    if (w->claimed) pool_add(w->engine->pool, &p->done, w->claims);
    *from = atomic_fetch_add_explicit(&p->claimed, 1, memory_order_relaxed) * grain;
    *to = smaller(*from + grain, count);
    w->claimed = *from < count;
    return w->claimed;
}

void phase_end(worker *w)
{
    pool_await(w->engine->pool, &w->engine->phases[w->phase++].done, w->claims);
    assert(w->phase < w->engine->num_phases);
}

/* Returns the units of a claim. 8 claims for each thread balance the load, and are long enough to stream weights. */
int64_t grain_of(const worker *w, int64_t count)
{
    int64_t grain = count / (8 * pool_size(w->engine->pool));
    return grain < 1 ? 1 : grain;
}

rows operand_at(const engine *e, const linear *l, int64_t at, int64_t count)
{
    static const int64_t bytes[] = {[WEIGHT_F32] = 4, [WEIGHT_BF16] = 2, [WEIGHT_I8] = 1, [WEIGHT_I24] = DIGITS};
    return (rows){(uint8_t *)e->work.operand + at * bytes[linear_operand(l)],
                  e->work.factors + at / SMALLEST_GROUP * FACTOR_BYTES, count, l->k, l->k / l->group};
}

/* A unit of work is a tile and a segment of its inputs. The rows of a tile are interleaved, so threads that wrote different
 * rows of one tile would share cache lines. There are enough segments to give every thread equal work. Each unit reads the
 * whole row for the norm's factors, which takes little time compared with the writes. */
int64_t segments_for(const worker *w, int64_t tiles, const linear *l, int64_t *length)
{
    const int64_t threads = pool_size(w->engine->pool), whole = l->group * ((64 + l->group - 1) / l->group);
    int64_t segments = 1;
    while (tiles * segments % threads && tiles < 8 * threads) segments++;
    *length = padded((l->k + segments - 1) / segments, whole);
    return (l->k + *length - 1) / *length;
}

/* Writes the inputs [from, to) of the operand's rows [first, first + count). */
static void prepare_part(worker *w, const linear *l, const rows *operand, const source *s, int64_t first, int64_t count,
                         int64_t from, int64_t to)
{
    const model *m = w->engine->model;
    const int64_t end = smaller(to, s->size);
    for (int64_t i = first; i < first + count; i++) {
        const float *row = s->x + (s->index ? s->index[i] : i) * (s->pitch ? s->pitch : s->size);
        float *own = s->kept ? s->kept + i * s->size : row_of_thread(w);
        if (s->norm->weight)
            norm_part(m, s->norm, norm_look(m, row, s->size), row, from, end, own);
        else if (s->kept && from < end)
            memcpy(own + from, row + from, sizeof(float) * (size_t)(end - from));
        rows_put_part(linear_operand(l), operand, i, s->norm->weight ? own : row, s->size, from, to);
    }
}

void prepare_phase(worker *w, const linear *l, int64_t count, const source *s)
{
    const rows operand = operand_at(w->engine, l, 0, count);
    const int64_t tiles = tiles_for(count);
    int64_t length, segments = segments_for(w, tiles, l, &length), from, to;
    while (claim(w, tiles * segments, 1, &from, &to)) {
        const tile_place at = tile_at(count, from / segments);
        const int64_t start = from % segments * length;
        prepare_part(w, l, &operand, s, at.start, at.size, start, smaller(start + length, l->k));
    }
    phase_end(w);
}

void layer_phase(worker *w, const layer *layer, enum lora_place place, const linear *l, const float *x,
                        int64_t size, const int64_t *index, int64_t count, const norm *n)
{
    engine *e = w->engine;
    const lora_step *lora = &e->work.lora;
    const int64_t at = w->rows ? (layer - e->model->layers) * LORA_PLACES + place : -1;
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

void join_row(const model *m, const norm *n, float scale, float *branch, float *x)
{
    if (n->weight) norm_row(m, n, branch, m->hidden, branch);
    for (int64_t i = 0; i < m->hidden; i++) x[i] += m->residual_scale * branch[i];
    if (scale == 1.0f) return;
    for (int64_t i = 0; i < m->hidden; i++) x[i] *= scale;
}

void join_phase(worker *w, const norm *n, float scale, float *x, int64_t count)
{
    engine *e = w->engine;
    int64_t from, to, hidden = e->model->hidden;
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t i = from; i < to; i++)
            join_row(e->model, n, scale, e->work.branch + i * hidden, x + i * hidden);
    phase_end(w);
}

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

void linear_units(worker *w, const linear *l, int64_t count, const target *t)
{
    engine *e = w->engine;
    rows operand = operand_at(e, l, 0, count);
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

void linear_phase(worker *w, const linear *l, int64_t count, enum finish finish, float *out, int64_t pitch)
{
    linear_units(w, l, count, &(target){finish, out, pitch, NULL});
}

void keep_phase(worker *w)
{
    engine *e = w->engine;
    int64_t from, to, count = e->step->num_rows, hidden = e->model->hidden;
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t i = from; i < to; i++)
            memcpy(e->work.kept + i * hidden, e->work.x + e->step->rows[i] * hidden,
                   sizeof(float) * (size_t)hidden);
    phase_end(w);
}

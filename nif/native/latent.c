/* Attention over compressed keys and values (MLA): the cache has one row for each token, its latent. The keys and values of all
 * heads are linear functions of the latent.
 *
 * score(head) = query . (K latent) = (K^T query) . latent, so each head's query is multiplied by K^T (`meet`), and scores need
 * only the latents. A head's output is V (sum of weights x latents), so one product with V (`give`) follows the sum. The cache
 * has one KV head: its key is the rotated elements and the latent, and its value is the latent. */
#include <string.h>

#include "step.h"

/* Heads within rows: head h of row i is the `size` floats from x[index[i] * pitch + h * step] on. `index` may be NULL. */
typedef struct {
    const float *x;
    int64_t pitch, step, size;
    const int64_t *index;
} head_rows;

/* Multiplies head h of each row by linears[h]; row i goes to out[i * pitch + h * step]. All linears have the same format. */
static void heads_phases(worker *w, const linear *linears, int64_t count, const head_rows *s, float *out, int64_t pitch,
                         int64_t step)
{
    engine *e = w->engine;
    const int64_t heads = e->model->num_heads, k = linears->k, tiles = tiles_for(count), blocks = linear_blocks(linears);
    const int64_t panels = (tiles + PANEL_TILES - 1) / PANEL_TILES, units = heads * panels * blocks;
    float *sums = e->work.scratch + w->thread * e->work.scratch_size;
    int64_t from, to;
    while (claim(w, heads * tiles, grain_of(w, heads * tiles), &from, &to))
        for (int64_t unit = from; unit < to; unit++) {
            const int64_t h = unit / tiles;
            const tile_place at = tile_at(count, unit % tiles);
            const rows operand = operand_at(e, &linears[h], h * count * k, count);
            for (int64_t i = at.start; i < at.start + at.size; i++) {
                const float *row = s->x + (s->index ? s->index[i] : i) * s->pitch + h * s->step;
                rows_put(linear_operand(&linears[h]), &operand, i, row, s->size);
            }
        }
    phase_end(w);
    while (claim(w, units, grain_of(w, units), &from, &to))
        for (int64_t unit = from; unit < to; unit++) {
            const int64_t h = unit / (panels * blocks), panel = unit / blocks % panels, block = unit % blocks;
            const rows operand = operand_at(e, &linears[h], h * count * k, count);
            const int64_t first = tile_at(count, panel * tiles / panels).start;
            const int64_t size = tile_at(count, (panel + 1) * tiles / panels).start - first;
            linear_block(&linears[h], block, &operand, first, size, sums);
            linear_finish(&linears[h], block, sums, first, size, STORE, e->model, out + h * step, pitch);
        }
    phase_end(w);
}

int64_t latent_k(const model *m, const latent *c) { return m->num_heads * larger(c->meet->k, c->give->k); }

int64_t latent_floats(const model *m, const layer *l)
{
    return (int64_t)m->num_heads * larger(l->key_dim, l->latent->value_dim);
}

void latent_queries(worker *w, const layer *l, const stream *kept)
{
    engine *e = w->engine;
    const model *m = e->model;
    const step *s = e->step;
    const latent *c = l->latent;
    const int64_t pitch = mixed_pitch(m, l), heads = m->num_heads, size = c->plain + c->rotated, count = kept->count;
    int64_t from, to;
    while (claim(w, s->num_tokens, grain_of(w, s->num_tokens), &from, &to))
        for (int64_t t = from; t < to; t++) {
            float *row = e->work.qkv + t * pitch, *key = row + pitch - l->key_dim;
            if (c->query_rank) norm_rms(c->query_norm.weight, c->eps, c->query_rank, row);
            norm_rms(c->norm.weight, c->eps, c->rank, key + c->rotated);
            rope(m, l, s, key, &no_norm, s->positions[t], 1.0f);
            kv_write(&e->caches[l->group], l, 0, s->slots[l->group][t], key, key + c->rotated);
        }
    phase_end(w);
    if (!count) return;
    head_rows queries = {e->work.qkv, pitch, size, c->plain, kept->index};
    if (c->query_rank) {
        prepare_phase(w, &c->queries, count, &(source){e->work.qkv, c->query_rank, kept->index, &no_norm, NULL, pitch});
        linear_phase(w, &c->queries, count, STORE, e->work.attended, heads * size);
        queries = (head_rows){e->work.attended, heads * size, size, c->plain};
    }
    heads_phases(w, c->meet, count, &queries, e->work.heads + c->rotated, heads * l->key_dim, l->key_dim);
    while (claim(w, count * heads, grain_of(w, count * heads), &from, &to))
        for (int64_t unit = from; unit < to; unit++) {
            const int64_t i = unit / heads, h = unit % heads, row = queries.index ? queries.index[i] : i;
            float *head = e->work.heads + unit * l->key_dim;
            memcpy(head, queries.x + row * queries.pitch + h * size + c->plain, sizeof(float) * (size_t)c->rotated);
            rope(m, l, s, head, &no_norm, s->positions[kept->index ? kept->index[i] : i], m->score_scale);
        }
    phase_end(w);
}

void latent_values(worker *w, const layer *l, const stream *kept)
{
    engine *e = w->engine;
    const int64_t rank = l->value_dim, size = l->latent->value_dim, heads = e->model->num_heads;
    const head_rows latents = {e->work.attended, heads * rank, rank, rank};
    heads_phases(w, l->latent->give, kept->count, &latents, e->work.heads, heads * size, size);
}

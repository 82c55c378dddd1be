/* The half of a layer that mixes tokens: attention, a short convolution or a recurrence, and the linears around them. */
#include "step.h"

int64_t mixed_width(const model *m, const layer *l)
{
    if (l->latent) return (int64_t)m->num_heads * larger(l->value_dim, l->latent->plain + l->latent->rotated);
    return l->taps ? m->hidden : (int64_t)m->num_heads * l->value_dim;
}

int64_t mixed_pitch(const model *m, const layer *l)
{
    const int64_t queries = (int64_t)m->num_heads * l->key_dim;
    if (l->taps) return 3 * (int64_t)m->hidden;
    if (!l->qkv.n || l->latent) return l->qkv.n;
    const int64_t keys_values = l->shares ? 0 : l->num_kv_heads * (l->key_dim + l->value_dim);
    return queries + keys_values + (int64_t)m->num_heads * m->head_gates;
}

int64_t state_width(const recurrence *r) { return (int64_t)r->heads * r->value_dim; }

int64_t state_pitch(const recurrence *r) { return recurrence_kept(r) + state_width(r); }

static void rope_and_cache_phase(worker *w, const layer *l, const stream *all)
{
    engine *e = w->engine;
    const model *m = e->model;
    const int D = l->key_dim, heads = l->num_kv_heads, per_head = m->num_heads / heads;
    int64_t from, to, pitch = mixed_pitch(m, l), count = all->count * heads;
    while (claim(w, count, grain_of(w, count), &from, &to)) {
        for (int64_t unit = from; unit < to; unit++) {
            int64_t t = unit / heads, position = e->step->positions[all->index ? all->index[t] : t];
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

/* Norms the queries of all heads as one row, and the keys of all heads as another. */
static void whole_norm_phase(worker *w, const layer *l, const stream *all)
{
    engine *e = w->engine;
    const model *m = e->model;
    const int64_t queries = (int64_t)m->num_heads * l->key_dim, keys = (int64_t)l->num_kv_heads * l->key_dim;
    int64_t from, to, count = all->count;
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t t = from; t < to; t++) {
            float *row = e->work.qkv + t * mixed_pitch(m, l);
            norm_row(m, &l->q_norm, row, queries, row);
            if (!l->shares) norm_row(m, &l->k_norm, row + queries, keys, row + queries);
        }
    phase_end(w);
}

/* Attention */

static int family_tiles(const family *f, int per_head)
{
    return f->chunks ? 1 : attention_tiles(f->members[0].query_len, per_head);
}

/* Attends with the rows of `kept`; their queries are rows of `all`. */
static void attention_phase(worker *w, const layer *l, const stream *all, const stream *kept)
{
    engine *e = w->engine;
    const model *m = e->model;
    attention a = {.queries = l->latent ? e->work.heads : e->work.qkv,
                   .out = e->work.attended,
                   .index = l->latent ? NULL : rows_among(all, kept),
                   .query_stride = l->latent ? (int64_t)m->num_heads * l->key_dim : mixed_pitch(m, l),
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
    const int per_head = m->num_heads / l->num_kv_heads, families = kept->families->counts[l->group];
    const family *first = kept->families->lists[l->group];
    int64_t tiles = 0, from, to;
    for (int i = 0; i < families; i++) tiles += family_tiles(&first[i], per_head);
    /* The KV head is the outermost index, so that families with a common prefix read its blocks one after another, from L2. */
    int64_t count = tiles * l->num_kv_heads;
    while (claim(w, count, grain_of(w, count), &from, &to)) {
        int64_t tile = from % tiles;
        int i = 0;
        for (; tile >= family_tiles(&first[i], per_head); i++) tile -= family_tiles(&first[i], per_head);
        for (int64_t unit = from; unit < to; unit++) {
            const family *now = &first[i];
            const int at = (int)tile, head = (int)(unit / tiles);
            if (++tile == family_tiles(now, per_head)) tile = 0, i = (i + 1) % families;
            if (unit + 1 < to && family_tiles(&first[i], per_head) == 1)
                attention_fetch(&a, &first[i].members[0], (int)((unit + 1) / tiles), 0);
            if (now->chunks)
                attention_together(&a, now->members, now->count, now->chunks, head);
            else
                attention_tile(&a, &now->members[0], head, at);
        }
    }
    phase_end(w);
}

/* Convolutions */

static void convolution_phases(worker *w, const layer *l, const stream *kept)
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
    while (claim(w, kept->count, grain_of(w, kept->count), &from, &to))
        for (int64_t i = from; i < to; i++) {
            const int64_t t = kept->index ? kept->index[i] : i;
            const int32_t *table = s->block_tables[l->group] + (int64_t)entry_of(s, t) * s->table_width[l->group];
            convolution_row(c, l, hidden, table, s->positions[t], e->work.qkv + t * pitch, e->work.attended + i * hidden);
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
    const int together = recurrence_together(r), parts = r->heads / together;
    int64_t from, to, units = (int64_t)s->num_entries * parts;
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t t = from; t < to; t++) recurrence_write(c, r, s->slots[r->group][t], e->work.qkv + t * pitch);
    phase_end(w);
    while (claim(w, units, grain_of(w, units), &from, &to))
        for (int64_t unit = from; unit < to; unit++)
            recurrence_heads(c, r, s, (int)(unit / parts), (int)(unit % parts) * together, scratch, e->work.attended);
    phase_end(w);
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t t = from; t < to; t++)
            recurrence_gate(r, e->work.qkv + t * pitch + pitch - width, e->work.attended + t * width);
    phase_end(w);
}

/* Multiplies attention's output by the sigmoid of the gates, which follow the values in a row of qkv. */
static void gate_phase(worker *w, const layer *l, const stream *all, const stream *kept)
{
    engine *e = w->engine;
    const model *m = e->model;
    const int64_t pitch = mixed_pitch(m, l), width = mixed_width(m, l), count = kept->count;
    const int64_t *index = rows_among(all, kept);
    int64_t from, to;
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t i = from; i < to; i++) {
            const int64_t row = index ? index[i] : i;
            const float *gates = e->work.qkv + (row + 1) * pitch - (int64_t)m->num_heads * m->head_gates;
            if (m->head_gates == 1)
                multiply_heads(gates, m->num_heads, l->value_dim, e->work.attended + i * width);
            else
                multiply_sigmoid(gates, width, e->work.attended + i * width);
        }
    phase_end(w);
}

/* Runs a recurrence. Its output is added to x, or left in `branch` if attention follows in the same layer. */
void recur(worker *w, const layer *l, const stream *all, const stream *kept)
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

/* Runs attention or a short convolution, and adds the output of a recurrence in the same layer, which is in `branch`. */
void attend(worker *w, const layer *l, const stream *all, const stream *kept)
{
    engine *e = w->engine;
    const model *m = e->model;
    layer_phase(w, l, LORA_QKV, &l->qkv, all->x, m->hidden, NULL, all->count, &l->attention_norm);
    linear_phase(w, &l->qkv, all->count, STORE, e->work.qkv, mixed_pitch(m, l));
    if (l->taps) {
        convolution_phases(w, l, kept);
    } else if (l->latent) {
        latent_queries(w, l, kept);
    } else {
        if (m->qk_norm == QK_WHOLE) whole_norm_phase(w, l, all);
        rope_and_cache_phase(w, l, all);
    }
    if (!kept->count) return;
    if (rows_among(all, kept)) keep_phase(w);
    if (!l->taps) attention_phase(w, l, all, kept);
    if (!l->taps && m->head_gates) gate_phase(w, l, all, kept);
    const bool at_once = !m->parallel && !l->recurrence && added_at_once(m, &l->attention_post, 1.0f);
    const bool adds = at_once || l->recurrence;
    w->rows = kept->adapted;
    if (l->latent) {
        latent_values(w, l, kept);
        const int64_t size = (int64_t)m->num_heads * l->latent->value_dim;
        layer_phase(w, l, LORA_OUT, &l->out, e->work.heads, size, NULL, kept->count, &no_norm);
    } else {
        layer_phase(w, l, LORA_OUT, &l->out, e->work.attended, mixed_width(m, l), NULL, kept->count, &no_norm);
    }
    linear_phase(w, &l->out, kept->count, adds ? ADD : STORE, at_once ? kept->x : e->work.branch, m->hidden);
    if (!at_once && !m->parallel) join_phase(w, &l->attention_post, 1.0f, kept->x, kept->count);
}

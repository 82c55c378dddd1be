/* One forward pass: every thread runs all phases in order.
 *
 * In a phase, threads claim units of work from a counter. The phase ends when all its units are done, by any thread. A thread
 * that lost its core delays only the units that it has claimed. When it returns, it finds no units left in the phases that it
 * missed. The result of a unit does not depend on the thread. A late thread must find the same number of units in a phase, so
 * the number depends only on the step and the model. The number of expert panels is an exception, so all threads meet before
 * and after it changes. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "step.h"

#define UNITS_PER_THREAD 3 /* least units of attention for each thread; with fewer, threads wait for one another's last unit */

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

/* Makes the rows of a predictor from embeddings and the model's states. */
static void pair_phases(worker *w, const pair *p)
{
    engine *e = w->engine;
    const model *m = e->model;
    const step *s = e->step;
    int64_t from, to, count = s->num_tokens, width = p->embedding.width;
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t t = from; t < to; t++) {
            float *embedding = e->work.pairs + 2 * t * width, *state = embedding + width;
            embed_row(&p->embedding, s->input_ids[t], embedding);
            memcpy(state, s->states + t * width, sizeof(float) * (size_t)width);
            if (p->embedding_norm.weight) norm_row(m, &p->embedding_norm, embedding, width, embedding);
            if (p->state_norm.weight) norm_row(m, &p->state_norm, state, width, state);
        }
    phase_end(w);
    prepare_phase(w, &p->input, count, &(source){e->work.pairs, 2 * width, NULL, &no_norm, NULL});
    linear_phase(w, &p->input, count, STORE, e->work.x, m->hidden);
}

/* Writes the head's inputs, or a predictor's outputs for them, to the step's `states_out`. */
static void states_phases(worker *w, const stream *kept)
{
    engine *e = w->engine;
    const model *m = e->model;
    const linear *output = m->pair ? &m->pair->output : NULL;
    int64_t from, to, hidden = m->hidden;
    if (output && output->n) {
        prepare_phase(w, output, kept->count, &(source){kept->x, hidden, NULL, &m->final_norm, NULL});
        linear_phase(w, output, kept->count, STORE, e->step->states_out, output->n);
        return;
    }
    while (claim(w, kept->count, grain_of(w, kept->count), &from, &to))
        for (int64_t i = from; i < to; i++)
            norm_row(m, &m->final_norm, kept->x + i * hidden, hidden, e->step->states_out + i * hidden);
    phase_end(w);
}

/* Embeddings for layers */

/* Makes a token's embedding for each layer, from a table and from the token's usual embedding. */
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

/* Projects x through a gate to the width of the layer's embedding, multiplies both, and adds the product, projected back, to x
 * (with altup to all streams but the first). */
static void input_phases(worker *w, const layer *l, const stream *kept)
{
    engine *e = w->engine;
    float *x = kept->x;
    const int64_t *index = kept->index, count = kept->count;
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
    if (l->altup)
        others_phase(w, l, kept);
    else
        join_phase(w, &l->input_post, l->scale, x, count);
}

/* The step */

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

/* Returns the last layer that writes keys or states; 0 if none does. */
static int last_writer(const model *m)
{
    int i = m->num_layers - 1;
    while (i > 0 && !m->layers[i].recurrence && (!m->layers[i].qkv.n || m->layers[i].shares)) i--;
    return i;
}

static void run(void *argument, int thread)
{
    engine *e = argument;
    const model *m = e->model;
    const step *s = e->step;
    workspace *work = &e->work;
    const bool adapts = s->num_adapters;
    const stream tokens = {work->x, NULL, s->num_tokens, adapts ? &work->lora_tokens : NULL, &work->families};
    const stream rows = {work->kept, s->rows, s->num_rows, adapts ? &work->lora_kept : NULL, &work->kept_families};
    worker w = {.engine = e, .thread = thread, .rows = tokens.adapted, .place = -1};
    if (m->pair)
        pair_phases(&w, m->pair);
    else
        embed_phase(&w);
    if (m->layer_width) inputs_phases(&w, tokens.count);
    if (m->num_streams) streams_phases(&w);
    const int last = last_writer(m); /* after the last keys and states, only the step's `rows` run on */
    for (int i = 0; i < m->num_layers; i++) {
        const layer *l = &m->layers[i];
        const stream *all = i <= last ? &tokens : &rows, *kept = i < last ? &tokens : &rows;
        if (l->altup) predict_phases(&w, l, all);
        if (l->recurrence) recur(&w, l, all, kept);
        if (l->qkv.n) attend(&w, l, all, kept);
        if (!kept->count) return;
        w.rows = kept->adapted;
        if (l->altup) laurel_phase(&w, all, kept);
        if (l->experts || l->down.n) mlp_phases(&w, l, kept->x, kept->count);
        if (m->parallel) join_phase(&w, &l->attention_post, 1.0f, kept->x, kept->count);
        if (l->altup) correct_phase(&w, l, all, kept);
        if (m->layer_width) input_phases(&w, l, kept);
    }
    if (m->num_streams) merge_phases(&w, &rows);
    if (s->states_out) states_phases(&w, &rows);
    if (m->clusters) {
        clusters_phases(&w, &rows, &m->final_norm);
        return;
    }
    prepare_phase(&w, &m->head, s->num_logit_rows, &(source){rows.x, m->hidden, NULL, &m->final_norm, NULL});
    head_phase(&w, &m->head, s->num_logit_rows);
}

/* Sorts the rows by adapter: all rows, and the rows whose logits are needed. */
static void find_adapters(engine *e)
{
    const step *s = e->step;
    workspace *work = &e->work;
    if (!s->num_adapters) return;
    lora_sort(&work->lora, s->adapter_of, NULL, s->num_tokens, &work->lora_tokens);
    lora_sort(&work->lora, s->adapter_of, s->rows, s->num_rows, &work->lora_kept);
}

/* Returns whether the step's `rows` are all tokens in order, each once. */
static bool keeps_all(const step *s)
{
    if (s->num_rows != s->num_tokens) return false;
    int64_t i = 0;
    while (i < s->num_rows && s->rows[i] == i) i++;
    return i == s->num_rows;
}

/* Finds the families of each layer group. Their size is limited so that every thread gets units of attention. */
static void find_families(engine *e)
{
    const model *m = e->model;
    const int64_t entries = e->step->num_entries, threads = pool_size(e->pool);
    const bool same = keeps_all(e->step);
    const layer *first[MAX_GROUPS] = {NULL}; /* the first attention layer of each group; NULL for states */
    for (int i = m->num_layers - 1; i >= 0; i--)
        if (m->layers[i].qkv.n) first[m->layers[i].group] = &m->layers[i];
    for (int g = 0; g < m->num_groups; g++) {
        if (!first[g]) continue; /* states have no keys */
        const int64_t heads = first[g]->num_kv_heads, rows = heads ? MAX_ROWS / (m->num_heads / heads) : 1;
        const int64_t share = threads == 1 ? entries : entries * heads / (UNITS_PER_THREAD * threads);
        const int64_t most = smaller(smaller(rows, MAX_FAMILY), share);
        families *all = &e->work.families, *kept = &e->work.kept_families;
        all->counts[g] = families_find(e->step, false, g, &e->caches[g], first[g]->window, (int)most, all->lists[g]);
        if (same)
            kept->lists[g] = all->lists[g], kept->counts[g] = all->counts[g];
        else
            kept->counts[g] = families_find(e->step, true, g, &e->caches[g], first[g]->window, (int)most, kept->lists[g]);
    }
}

/* What Python calls */

void engine_destroy(engine *e)
{
    if (e->pool) pool_destroy(e->pool);
    memory_free(e->memory, e->capacity);
    free(e->phases);
    free(e);
}

static int most_phases(const model *m) { return 40 * m->num_layers + 4 * m->num_streams + 20; }

engine *engine_create(const model *m, const cache *caches, int num_threads)
{
    engine *e = calloc(1, sizeof(*e));
    if (!e) return NULL;
    e->pool = pool_create(num_threads);
    e->whole = m;
    e->caches = caches;
    e->num_phases = (int)larger(most_phases(m), m->predictor ? most_phases(m->predictor) : 0);
    e->phases = calloc((size_t)e->num_phases, sizeof(phase));
    if (e->pool && e->phases) return e;
    engine_destroy(e);
    return NULL;
}

int engine_step(engine *e, const step *s, int64_t *where)
{
    e->step = s;
    e->model = s->states ? e->whole->predictor : e->whole;
    enum step_error error = step_check(s, e->model, e->caches, where);
    if (error) return error;
    if (!workspace_lay_out(e)) return STEP_NO_MEMORY;
    find_families(e);
    find_adapters(e);
    if (s->best) largest_clear(e->work.maxima, pool_size(e->pool) * s->num_logit_rows); /* a thread may miss the whole step */
    memset(e->phases, 0, sizeof(phase) * (size_t)e->num_phases);
    pool_run(e->pool, run, e);
    return STEP_OK;
}

/* The half of a layer that treats each token separately: an MLP, a mixture of experts, or both.
 *
 * The phases of experts work as those of phases.c, on rows sorted by expert. */
#include <string.h>

#include "step.h"

/* Returns the operand for the rows of an expert, which begin at row `start` of all experts' rows. */
static rows expert_operand(const engine *e, const linear *l, int64_t start, int64_t count)
{
    return operand_at(e, l, start * e->work.expert_k, count);
}

/* Norms the experts' input, if the router has a separate norm. */
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
    pool_barrier(e->pool); /* after it, no thread reads the last layer's panels */
    if (w->thread == 0) experts_group(all, c, count, PANEL_TILES);
    pool_barrier(e->pool);
}

/* Makes the rows for each expert's `gate_up` or `down`: row i is x[tokens[i]], or x[i] if `tokens` is NULL. */
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

/* Returns the factor of the residual after the MLP: the layer's scale, or 1 if the layer's embeddings follow. */
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

/* Applies xIELU, which has parameters for each layer. */
static void xielu_phase(worker *w, const layer *l, int64_t count)
{
    int64_t from, to;
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t i = from; i < to; i++)
            xielu_row(l, l->intermediate, w->engine->work.activated + i * l->intermediate);
    phase_end(w);
}

/* Activates the gates and ups of a sparse layer, which needs all gates of a row. */
static void sparse_phase(worker *w, const layer *l, int64_t count)
{
    const workspace *work = &w->engine->work;
    int64_t from, to, size = l->intermediate;
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t i = from; i < to; i++)
            sparse_row(w->engine->model, l, work->gates + i * 2 * size, work->activated + i * size);
    phase_end(w);
}

void mlp_phases(worker *w, const layer *l, float *x, int64_t count)
{
    engine *e = w->engine;
    const model *m = e->model;
    const experts *mixed = l->experts;
    const bool at_once = !mixed && added_at_once(m, &l->mlp_post, own_scale(m, l));
    if (!mixed || mixed->beside_norm.weight) {
        layer_phase(w, l, LORA_GATE_UP, &l->gate_up, x, m->hidden, NULL, count, &l->mlp_norm);
        const bool stored = l->sparse || m->activation == XIELU;
        linear_phase(w, &l->gate_up, count, stored ? STORE : ACTIVATE, l->sparse ? e->work.gates : e->work.activated,
                     l->sparse ? 2 * l->intermediate : l->intermediate);
        if (l->sparse) sparse_phase(w, l, count);
        if (m->activation == XIELU) xielu_phase(w, l, count);
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

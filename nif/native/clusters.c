/* A head over clusters of tokens: multiplies a row by the centroids of all clusters, then by the tokens of its best clusters. */
#include <math.h>
#include <string.h>

#include "step.h"

/* Chooses the clusters with the highest scores; overwrites their scores. */
static void choose_clusters(const clusters *c, float *scores, int32_t *ids)
{
    for (int32_t n = 0; n < c->chosen; n++) {
        int32_t best = 0;
        for (int32_t i = 1; i < c->count; i++) best = scores[i] > scores[best] ? i : best;
        ids[n] = best;
        scores[best] = -INFINITY;
    }
}

/* Writes a row's logits to the places of their tokens, and finds the largest logit: a NaN if there is one, and of equal logits
 * the one with the lowest token. */
static void finish_row(const model *m, const step *s, int64_t row, const int32_t *ids, const float *logits)
{
    const clusters *c = m->clusters;
    const int64_t size = m->vocab_size / c->count;
    float *out = s->logits ? s->logits + row * m->vocab_size : NULL, least = INFINITY;
    largest best = {-INFINITY, INT32_MAX};
    for (int64_t i = 0; i < c->chosen * size; i++) least = logits[i] < least ? logits[i] : least;
    for (int64_t i = 0; out && i < m->vocab_size; i++) out[i] = least - 1.0f;
    for (int64_t i = 0; i < c->chosen * size; i++) {
        const float value = logits[i];
        const int32_t token = c->tokens[ids[i / size] * size + i % size];
        if (out) out[token] = value;
        if (value > best.value || value != value || (value == best.value && token < best.column))
            best = (largest){value, token};
    }
    if (s->best) s->best[row] = best;
}

void clusters_phases(worker *w, const stream *kept, const norm *n)
{
    engine *e = w->engine;
    workspace *work = &e->work;
    const model *m = e->model;
    const clusters *c = m->clusters;
    const linear *head = &m->head;
    const int64_t count = e->step->num_logit_rows, size = m->vocab_size / c->count, blocks = size / COLUMNS;
    int64_t from, to;
    prepare_phase(w, &c->centroids, count, &(source){kept->x, m->hidden, NULL, n, NULL});
    linear_phase(w, &c->centroids, count, STORE, work->cluster_scores, c->count);
    /* Each row is a separate operand, because rows are multiplied by different blocks. */
    while (claim(w, count, 1, &from, &to))
        for (int64_t r = from; r < to; r++) {
            float *own = row_of_thread(w);
            const rows operand = operand_at(e, head, r * head->k, 1);
            norm_row(m, n, kept->x + r * m->hidden, m->hidden, own);
            rows_put(linear_operand(head), &operand, 0, own, m->hidden);
            choose_clusters(c, work->cluster_scores + r * c->count, work->cluster_ids + r * c->chosen);
        }
    phase_end(w);
    const int64_t units = count * c->chosen * blocks;
    float *sums = work->scratch + w->thread * work->scratch_size;
    while (claim(w, units, grain_of(w, units), &from, &to))
        for (int64_t unit = from; unit < to; unit++) {
            const int64_t chosen = unit / blocks, r = chosen / c->chosen;
            const rows operand = operand_at(e, head, r * head->k, 1);
            linear_block(head, work->cluster_ids[chosen] * blocks + unit % blocks, &operand, 0, 1, sums);
            memcpy(work->cluster_logits + unit * COLUMNS, sums, sizeof(float) * COLUMNS);
        }
    phase_end(w);
    while (claim(w, count, 1, &from, &to))
        for (int64_t r = from; r < to; r++)
            finish_row(m, e->step, r, work->cluster_ids + r * c->chosen, work->cluster_logits + r * c->chosen * size);
    phase_end(w);
}

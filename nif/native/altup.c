/* Alternating updates (AltUp) and LAuReL, as in Gemma 3n.
 *
 * The residual of a token has several streams. A layer predicts every stream as a weighted sum of all streams, computes with
 * the active stream, and corrects every stream by the difference between the active stream's result and its prediction. The
 * coefficients of both follow from a few routes: a norm, a small linear and tanh compute these from a row. The small linears
 * are float32 in every format of weights, and each row is multiplied by them separately. */
#include <math.h>
#include <string.h>

#include "simd.h"
#include "step.h"

#define LEAST_SQUARE 1e-5f

/* Writes the routes of a row; `scratch` has room for it. */
static void find_routes(const model *m, const altup *a, const float *x, float *scratch, float *routes)
{
    const int64_t hidden = m->hidden;
    norm_row(m, &a->router_norm, x, hidden, scratch);
    for (int n = 0; n < m->num_streams; n++) {
        const float *weights = a->router + n * hidden;
        vf products = {0};
        int64_t i = 0;
        for (; i + VL <= hidden; i += VL) products = vf_fma(vf_load(weights + i), vf_load(scratch + i), products);
        float sum = vf_sum(products);
        for (; i < hidden; i++) sum += weights[i] * scratch[i];
        routes[n] = tanhf(sum);
    }
}

static float coefficient(const model *m, const float *weights, const float *routes)
{
    float sum = 0;
    for (int n = 0; n < m->num_streams; n++) sum += weights[n] * routes[n];
    return sum;
}

/* Replaces a token's streams by their predictions. */
static void predict(const model *m, const altup *a, float *streams, float *scratch)
{
    const int64_t count = m->num_streams, hidden = m->hidden;
    float routes[MAX_STREAMS], coefficients[MAX_STREAMS][MAX_STREAMS];
    find_routes(m, a, streams + m->active_stream * hidden, scratch, routes);
    for (int to = 0; to < count; to++)
        for (int from = 0; from < count; from++)
            coefficients[to][from] = coefficient(m, a->predict + (to * count + from) * count, routes);
    for (int64_t i = 0; i < hidden; i++) {
        float old[MAX_STREAMS];
        for (int n = 0; n < count; n++) old[n] = streams[n * hidden + i];
        for (int to = 0; to < count; to++) {
            float sum = 0;
            for (int from = 0; from < count; from++) sum += old[from] * coefficients[to][from];
            streams[to * hidden + i] = sum + old[to];
        }
    }
}

/* Returns the streams of a row. Kept rows have separate streams, because a step may request a token's logits twice. */
static float *streams_of(const engine *e, const stream *rows, int64_t row)
{
    return (rows->index ? e->work.kept_streams : e->work.streams) + row * e->model->num_streams * e->model->hidden;
}

void streams_phases(worker *w)
{
    engine *e = w->engine;
    const model *m = e->model;
    const int64_t hidden = m->hidden, width = m->num_streams * hidden, count = e->step->num_tokens;
    int64_t from, to;
    prepare_phase(w, &m->split, count, &(source){e->work.x, hidden, NULL, &no_norm, NULL});
    linear_phase(w, &m->split, count, STORE, e->work.streams + hidden, width);
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t t = from; t < to; t++) {
            float *streams = e->work.streams + t * width;
            memcpy(streams, e->work.x + t * hidden, sizeof(float) * (size_t)hidden);
            const float size = sqrtf(mean_square(streams, hidden));
            for (int n = 1; n < m->num_streams; n++) {
                float *other = streams + n * hidden;
                const float own = sqrtf(fmaxf(mean_square(other, hidden), LEAST_SQUARE));
                for (int64_t i = 0; i < hidden; i++) other[i] = other[i] * size / own;
            }
        }
    phase_end(w);
}

void predict_phases(worker *w, const layer *l, const stream *all)
{
    engine *e = w->engine;
    const model *m = e->model;
    const altup *a = l->altup;
    const int64_t hidden = m->hidden, count = all->count;
    int64_t from, to;
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t t = from; t < to; t++) {
            float *streams = streams_of(e, all, t);
            predict(m, a, streams, row_of_thread(w));
            memcpy(all->x + t * hidden, streams + m->active_stream * hidden, sizeof(float) * (size_t)hidden);
        }
    phase_end(w);
    prepare_phase(w, &a->left, count, &(source){all->x, hidden, NULL, &l->attention_norm, NULL});
    linear_phase(w, &a->left, count, STORE, e->work.activated, a->left.n);
    prepare_phase(w, &a->right, count, &(source){e->work.activated, a->left.n, NULL, &no_norm, NULL});
    linear_phase(w, &a->right, count, STORE, e->work.laurel, hidden);
    while (claim(w, count, grain_of(w, count), &from, &to))
        for (int64_t t = from; t < to; t++) {
            float *laurel = e->work.laurel + t * hidden, *normed = row_of_thread(w);
            norm_row(m, &l->attention_norm, all->x + t * hidden, hidden, normed);
            norm_row(m, &a->post, laurel, hidden, laurel);
            for (int64_t i = 0; i < hidden; i++) laurel[i] += normed[i];
        }
    phase_end(w);
}

void laurel_phase(worker *w, const stream *all, const stream *kept)
{
    engine *e = w->engine;
    const int64_t hidden = e->model->hidden, *index = rows_among(all, kept);
    const float root = sqrtf(2.0f);
    int64_t from, to;
    while (claim(w, kept->count, grain_of(w, kept->count), &from, &to))
        for (int64_t i = from; i < to; i++) {
            const float *laurel = e->work.laurel + (index ? index[i] : i) * hidden;
            float *x = kept->x + i * hidden;
            for (int64_t j = 0; j < hidden; j++) x[j] = (x[j] + laurel[j]) / root;
        }
    phase_end(w);
}

void correct_phase(worker *w, const layer *l, const stream *all, const stream *kept)
{
    engine *e = w->engine;
    const model *m = e->model;
    const altup *a = l->altup;
    const int64_t count = m->num_streams, hidden = m->hidden, *index = rows_among(all, kept);
    int64_t from, to;
    while (claim(w, kept->count, grain_of(w, kept->count), &from, &to))
        for (int64_t row = from; row < to; row++) {
            const float *old = streams_of(e, all, index ? index[row] : row);
            float routes[MAX_STREAMS], coefficients[MAX_STREAMS], *x = kept->x + row * hidden, *out = streams_of(e, kept, row);
            find_routes(m, a, x, row_of_thread(w), routes);
            for (int n = 0; n < count; n++) coefficients[n] = coefficient(m, a->correct + n * count, routes) + 1.0f;
            for (int64_t i = 0; i < hidden; i++) {
                const float news = x[i] - old[m->active_stream * hidden + i];
                for (int n = 0; n < count; n++) out[n * hidden + i] = news * coefficients[n] + old[n * hidden + i];
                x[i] = out[m->active_stream * hidden + i] * (a->output_scale ? a->output_scale[i] : 1.0f);
            }
        }
    phase_end(w);
}

void others_phase(worker *w, const layer *l, const stream *kept)
{
    engine *e = w->engine;
    const int64_t hidden = e->model->hidden;
    int64_t from, to;
    while (claim(w, kept->count, grain_of(w, kept->count), &from, &to))
        for (int64_t row = from; row < to; row++) {
            float *branch = e->work.branch + row * hidden, *streams = streams_of(e, kept, row);
            norm_row(e->model, &l->input_post, branch, hidden, branch);
            for (int n = 1; n < e->model->num_streams; n++)
                for (int64_t i = 0; i < hidden; i++) streams[n * hidden + i] += branch[i];
        }
    phase_end(w);
}

void merge_phases(worker *w, const stream *kept)
{
    engine *e = w->engine;
    const model *m = e->model;
    const int64_t streams = m->num_streams, hidden = m->hidden, width = streams * hidden;
    int64_t from, to;
    for (int n = 1; n < streams; n++) {
        const float *own = e->work.kept_streams + n * hidden;
        prepare_phase(w, &m->merge[n], kept->count, &(source){own, hidden, NULL, &no_norm, NULL, width});
        linear_phase(w, &m->merge[n], kept->count, STORE, e->work.branch, hidden);
        while (claim(w, kept->count, grain_of(w, kept->count), &from, &to))
            for (int64_t row = from; row < to; row++) {
                const float *first = e->work.kept_streams + row * width, *branch = e->work.branch + row * hidden;
                float *x = kept->x + row * hidden;
                const float size = sqrtf(mean_square(first, hidden));
                const float other = sqrtf(fmaxf(mean_square(branch, hidden), LEAST_SQUARE));
                if (n == 1) memcpy(x, first, sizeof(float) * (size_t)hidden);
                for (int64_t i = 0; i < hidden; i++) x[i] += branch[i] * size / other;
                if (n < streams - 1) continue;
                for (int64_t i = 0; i < hidden; i++) x[i] /= (float)streams;
            }
        phase_end(w);
    }
}

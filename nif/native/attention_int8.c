/* Attention over keys and values in 8 bits. The sums over dimensions and over a chunk's keys are integers.
 *
 * For each layer and KV head, a block has
 *     keys    [key_dim / 4][padded_keys][4]    element + 128; a load has four dimensions of 16 keys
 *     factors [3][padded_keys]                 floats: the key's scale, log2 of the value's scale, the inverse of that scale
 *     values  [block_size / 4][value_dim][4]   a load has 16 dimensions of four keys
 * Each token has a scale for each KV head. The queries of a row are rounded to 8 bits relative to their largest element.
 *
 * The weight of key j, times the scale v_j of its value, is exp(s_j) v_j = 2^(s_j log2 e + log2 v_j). The largest of a chunk's
 * exponents gives a scale at which the row's 64 weights fit 8 bits. So a chunk needs one integer sum for each dimension, and
 * one product to add this sum to the float outputs. The softmax's total adds w_j / v_j in float. */
#include <math.h>

#include "attention.h"

#define LOG2_E 1.44269504f
#define LOG2_LARGEST 7.9943534f /* log2(255) */
#define SMALLEST 1e-20f /* the least scale; smaller numbers count as zero */

static void int8_locate(const attention *a, const uint8_t *head, int first, key_tile *out)
{
    const cache *c = a->cache;
    out->keys = head + 4 * first;
    out->factors = (const float *)(head + (int64_t)c->padded_keys * a->key_dim) + first;
    out->values = head + c->values_offset + first * a->value_dim;
}

static void int8_fetch(const attention *a, const key_tile *tile)
{
    const cache *c = a->cache;
    const int64_t pitch = (int64_t)c->padded_keys * 4;
    for (int i = 0; i < a->key_dim / 4; i++) __builtin_prefetch(tile->keys + i * pitch);
    for (int i = 0; i < 3; i++) __builtin_prefetch(tile->factors + i * c->padded_keys);
    for (int64_t i = 0; i < tile->count * a->value_dim; i += 64) __builtin_prefetch(tile->values + i);
}

/* Writes x in 8 bits, and returns the scale: a 127th of the largest magnitude. */
ALWAYS_INLINE float quantize(const float *x, int size, float smallest, int8_t *out)
{
    vf largest = {0};
    for (int i = 0; i < size; i += VL) largest = vf_max(largest, vf_abs(vf_load(x + i)));
    float scale = vf_largest(largest) / 127.0f;
    scale = scale > smallest ? scale : smallest;
    float inverse = 1.0f / scale;
    for (int i = 0; i < size; i += VL) vb_store(out + i, vi_round(vf_load(x + i) * inverse));
    return scale;
}

static void int8_start(const attention *a, row_state *state, int row, const float *query)
{
    const int size = padded_rows(state->used);
    int8_rows *s = &state->as_int8;
    int8_t integers[MAX_HEAD_DIM] = {0};
    s->scale[row] = query ? quantize(query, a->key_dim, SMALLEST, integers) * LOG2_E : 0;
    int32_t sum = 0;
    for (int d = 0; d < a->key_dim; d++) sum += integers[d];
    s->start[row] = -128 * sum;
    for (int d = 0; d < a->key_dim; d += 4) memcpy(s->queries + d * size + 4 * row, integers + d, 4);
    s->maximum[row] = s->chunk_maximum[row] = LOWEST;
    vf_store(s->totals + row * VL, (vf){0});
}

/* Adds a sink as a key with a zero value of the scale 1. */
static void int8_sink(row_state *state, int row, float score)
{
    float total[VL] = {255.0f};
    state->as_int8.maximum[row] = score * LOG2_E;
    memcpy(state->as_int8.totals + row * VL, total, sizeof(total));
}

static void int8_resume(row_state *state, int row, const row_state *from, int from_row)
{
    int8_rows *s = &state->as_int8;
    s->maximum[row] = from->as_int8.maximum[from_row];
    vf_store(s->totals + row * VL, vf_load(from->as_int8.totals + from_row * VL));
}

ALWAYS_INLINE vi quad(const void *p)
{
    int32_t four;
    memcpy(&four, p, 4);
    return vi_set1(four);
}

/* Computes scores[R][CHUNK_KEYS] of T key tiles. Tiles with the count 0 point to another tile and are masked later. */
ALWAYS_INLINE void score(const int R, const int T, const attention *a, const key_tile *tiles, const int8_rows *rows,
                         int32_t *scores)
{
    const int64_t pitch = (int64_t)a->cache->padded_keys * 4;
    vi s[MAX_ROWS][4 * PARTS];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int t = 0; t < T * PARTS; t++) s[r][t] = vi_set1(rows->start[r]);
    const int8_t *q = rows->queries;
    for (int line = 0; line < a->key_dim / 4; line++, q += 4 * R) {
        vi keys[4 * PARTS];
        UNROLL for (int t = 0; t < T * PARTS; t++)
            keys[t] = vi_load(tiles[t / PARTS].keys + line * pitch + t % PARTS * (4 * VL));
        UNROLL for (int r = 0; r < R; r++) {
            vi four = quad(q + 4 * r);
            UNROLL for (int t = 0; t < T * PARTS; t++) s[r][t] = vi_dot_bytes(s[r][t], keys[t], four);
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int t = 0; t < T * PARTS; t++)
        *(vi_memory *)(scores + r * CHUNK_KEYS + t * VL) = s[r][t];
}

/* Turns a chunk's scores into integer weights of its values, and sums by lane the chunk's share of the row's total. Both are
 * relative to the chunk's largest weight. `whole`: the row sees all keys of the chunk. */
ALWAYS_INLINE void weigh(row_state *state, int row, const key_tile *tiles, const attention *a, const bool whole)
{
    int8_rows *s = &state->as_int8;
    const int padded_keys = a->cache->padded_keys;
    const int32_t *scores = s->scores + row * CHUNK_KEYS;
    vf lane[CHUNK_TILES * PARTS], scale = vf_set1(s->scale[row]);
    UNROLL for (int i = 0; i < CHUNK_TILES * PARTS; i++) {
        const float *factors = tiles[i / PARTS].factors + i % PARTS * VL;
        vf scaled = vf_from_int(vi_load(scores + i * VL)) * scale;
        if (a->score_cap == 0)
            lane[i] = vf_fma(scaled, vf_load(factors), vf_load(factors + padded_keys));
        else
            lane[i] = vf_cap(scaled * vf_load(factors), a->score_cap * LOG2_E) + vf_load(factors + padded_keys);
        if (!whole)
            lane[i] = vf_select(seen_lanes(state, row, &tiles[i / PARTS], i % PARTS), lane[i], vf_set1(LOWEST));
    }
    vf largest = lane[0];
    UNROLL for (int i = 1; i < CHUNK_TILES * PARTS; i++) largest = vf_max(largest, lane[i]);
    s->chunk_maximum[row] = vf_largest(largest);
    vf reference = vf_set1(s->chunk_maximum[row] - LOG2_LARGEST), sum = {0};
    UNROLL for (int i = 0; i < CHUNK_TILES * PARTS; i++) {
        const key_tile *tile = &tiles[i / PARTS];
        vf weight = vf_exp2(lane[i] - reference);
        vf inverse = vf_load(tile->factors + i % PARTS * VL + 2 * padded_keys);
        if (!whole) {
            vi seen = seen_lanes(state, row, tile, i % PARTS);
            weight = vf_select(seen, weight, (vf){0});
            inverse = vf_select(seen, inverse, (vf){0});
        }
        vi rounded = (vi)(weight + INTEGER_ZERO); /* its low byte is the integer */
        vb_store(s->weights + row * CHUNK_KEYS + i * VL, rounded);
        sum = vf_fma(weight, inverse, sum);
    }
    vf_store(s->sums + row * VL, sum);
}

/* Joins a chunk to the rows: updates their maxima and totals, and finds the factors of earlier chunks and of this chunk. */
ALWAYS_INLINE void join(const int R, int8_rows *s)
{
    UNROLL for (int i = 0; i < R; i += VL) {
        vf old = vf_load(s->maximum + i), chunk = vf_load(s->chunk_maximum + i), now = vf_max(old, chunk);
        vf_store(s->maximum + i, now);
        vf_store(s->rescale + i, vf_exp2(old - now));
        vf_store(s->factor + i, vf_exp2(chunk - now));
    }
    UNROLL for (int r = 0; r < R; r++) {
        float *total = s->totals + r * VL;
        vf_store(total, vf_fma(vf_load(s->sums + r * VL), vf_set1(s->factor[r]), vf_load(total) * s->rescale[r]));
    }
}

/* outputs[R][C vectors of 16 dimensions] = outputs * rescale + factor * (weights x values of the chunk). */
ALWAYS_INLINE void mix(const int R, const int C, const attention *a, const key_tile *tiles, row_state *state,
                       int dimension)
{
    const int D = a->value_dim;
    const int8_rows *s = &state->as_int8;
    vi o[MAX_ROWS][4 * PARTS];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C * PARTS; c++) o[r][c] = (vi){0};
    for (int t = 0; t < CHUNK_TILES; t++) {
        const uint8_t *weights = s->weights + t * LANES;
        const uint8_t *line = tiles[t].values + dimension * 4;
        for (int j = 0; j < tiles[t].count; j += 4, line += 4 * D, weights += 4) {
            vi values[4 * PARTS];
            UNROLL for (int c = 0; c < C * PARTS; c++) values[c] = vi_load(line + c * 4 * VL);
            UNROLL for (int r = 0; r < R; r++) {
                vi four = quad(weights + r * CHUNK_KEYS);
                UNROLL for (int c = 0; c < C * PARTS; c++) o[r][c] = vi_dot_bytes(o[r][c], four, values[c]);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C * PARTS; c++) {
        float *out = state->outputs + r * D + dimension + c * VL;
        vf_store(out, vf_fma(vf_from_int(o[r][c]), vf_set1(s->factor[r]), vf_load(out) * s->rescale[r]));
    }
}

ALWAYS_INLINE void chunk(const int R, const attention *a, const key_tile *tiles, row_state *state)
{
    const int T = TILES_AT_ONCE(R), C = VECTORS_AT_ONCE(R);
    int8_rows *s = &state->as_int8;
    for (int t = 0; t < CHUNK_TILES; t += T) score(R, T, a, tiles + t, s, s->scores + t * LANES);
    for (int r = 0; r < state->used; r++) {
        if (sees_all(state, r, tiles))
            weigh(state, r, tiles, a, true);
        else
            weigh(state, r, tiles, a, false);
    }
    join(R, s);
    int d = 0;
    for (; d + C * LANES <= a->value_dim; d += C * LANES) mix(R, C, a, tiles, state, d);
    for (; d < a->value_dim; d += LANES) mix(R, 1, a, tiles, state, d);
}

static void int8_chunk(const attention *a, const key_tile *tiles, row_state *state)
{
#define CALL(R) chunk(R, a, tiles, state)
    FOR_PADDED_ROWS(state->used, CALL)
#undef CALL
}

static void int8_finish(const attention *a, const row_state *state, int row, float *out)
{
    const float total = vf_sum(vf_load(state->as_int8.totals + row * VL));
    for (int d = 0; d < a->value_dim; d++) out[d] = state->outputs[row * a->value_dim + d] / total;
}

static void int8_write(const cache *c, const layer *l, uint8_t *head, int64_t offset, const float *key,
                       const float *value)
{
    const int K = l->key_dim, V = l->value_dim;
    int8_t integers[MAX_HEAD_DIM];
    float *factors = (float *)(head + (int64_t)c->padded_keys * K) + offset;
    factors[0] = quantize(key, K, SMALLEST, integers);
    uint8_t *keys = head + 4 * offset;
    for (int d = 0; d < K; d += 4) {
        uint32_t four;
        memcpy(&four, integers + d, 4);
        four ^= 0x80808080;
        memcpy(keys + (int64_t)d * c->padded_keys, &four, 4);
    }
    float scale = quantize(value, V, SMALLEST, integers);
    factors[c->padded_keys] = log2f(scale);
    factors[2 * c->padded_keys] = 1.0f / scale;
    uint8_t *values = head + c->values_offset + offset / 4 * 4 * V + offset % 4;
    for (int d = 0; d < V; d++) values[4 * d] = (uint8_t)integers[d];
}

const key_format int8_keys = {int8_locate, int8_fetch, int8_start, int8_sink, int8_resume, int8_chunk, int8_finish, int8_write};

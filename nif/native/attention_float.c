/* Attention over keys and values in bfloat16 or float32, with products in float.
 *
 * For each layer and KV head, a block has the keys, transposed, and then the values. In bfloat16:
 *     keys   [key_dim / 2][padded_keys][2]    a load has two dimensions of 16 keys; their scores are computed together
 *     values [block_size / 2][value_dim][2]   a load has 16 dimensions of two keys
 * In float: keys [key_dim][padded_keys], values [block_size][value_dim]. VDPBF16PS is not used: it multiplies no faster than
 * two FMAs here, and would round the weights of the softmax. A score is a sum over ascending dimensions, and an output is a sum
 * over ascending keys. */
#include "attention.h"

static void float_locate(const attention *a, const uint8_t *head, int first, key_tile *out)
{
    const cache *c = a->cache;
    const int64_t size = c->kind == KV_F32 ? 4 : 2;
    out->keys = head + (c->kind == KV_F32 ? 1 : 2) * first * size;
    out->values = head + c->values_offset + first * a->value_dim * size;
}

static void float_fetch(const attention *a, const key_tile *tile)
{
    const cache *c = a->cache;
    const int64_t pitch = (int64_t)c->padded_keys * 4, bytes = (int64_t)a->value_dim * (c->kind == KV_F32 ? 4 : 2);
    const int lines = c->kind == KV_F32 ? a->key_dim : a->key_dim / 2;
    for (int i = 0; i < lines; i++) __builtin_prefetch(tile->keys + i * pitch);
    for (int64_t i = 0; i < tile->count * bytes; i += 64) __builtin_prefetch(tile->values + i);
}

static void float_start(const attention *a, row_state *state, int row, const float *query)
{
    const int size = padded_rows(state->used);
    float_rows *s = &state->as_float;
    for (int d = 0; d < a->key_dim; d++) s->queries[d * size + row] = query ? query[d] : 0;
    s->maximum[row] = LOWEST;
    s->total[row] = 0;
    s->rescale[row] = 1.0f;
}

static void float_sink(row_state *state, int row, float score)
{
    state->as_float.maximum[row] = score;
    state->as_float.total[row] = 1.0f;
}

static void float_resume(row_state *state, int row, const row_state *from, int from_row)
{
    state->as_float.maximum[row] = from->as_float.maximum[from_row];
    state->as_float.total[row] = from->as_float.total[from_row];
}

/* Computes scores[R][CHUNK_KEYS] of T key tiles. Tiles with the count 0 point to another tile and are masked later. */
ALWAYS_INLINE void score(const int R, const int T, const bool bf16, const attention *a, const key_tile *tiles,
                         const float *queries, float *scores)
{
    const int D = a->key_dim;
    const int64_t pitch = (int64_t)a->cache->padded_keys * 4; /* bytes of a dimension, or of a pair of dimensions */
    vf s[MAX_ROWS][4 * PARTS];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int t = 0; t < T * PARTS; t++) s[r][t] = (vf){0};
    for (int d = 0, line = 0; d < D; d += bf16 ? 2 : 1, line++) {
        vf even[4 * PARTS], odd[4 * PARTS];
        UNROLL for (int t = 0; t < T * PARTS; t++) {
            const uint8_t *p = tiles[t / PARTS].keys + line * pitch + t % PARTS * (4 * VL);
            even[t] = bf16 ? vf_low_bf16(vi_load(p)) : vf_load(p);
            if (bf16) odd[t] = vf_high_bf16(vi_load(p));
        }
        UNROLL for (int r = 0; r < R; r++) {
            vf q = vf_set1(queries[d * R + r]);
            UNROLL for (int t = 0; t < T * PARTS; t++) s[r][t] = vf_fma(q, even[t], s[r][t]);
            if (bf16) {
                q = vf_set1(queries[d * R + R + r]);
                UNROLL for (int t = 0; t < T * PARTS; t++) s[r][t] = vf_fma(q, odd[t], s[r][t]);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int t = 0; t < T * PARTS; t++)
        vf_store(scores + r * CHUNK_KEYS + t * VL, s[r][t]);
}
ALWAYS_INLINE void cap_scores(float *scores, float cap)
{
    for (int i = 0; i < CHUNK_KEYS; i += VL) vf_store(scores + i, vf_cap(vf_load(scores + i), cap));
}

/* Turns a chunk's scores into weights relative to the row's maximum so far. `whole`: the row sees all keys of the chunk. */
ALWAYS_INLINE void weigh(row_state *state, int row, const key_tile *tiles, const bool whole)
{
    float_rows *s = &state->as_float;
    float *weights = s->weights + row * CHUNK_KEYS;
    vf lane[CHUNK_TILES * PARTS];
    UNROLL for (int i = 0; i < CHUNK_TILES * PARTS; i++) {
        lane[i] = vf_load(weights + i * VL);
        if (!whole)
            lane[i] = vf_select(seen_lanes(state, row, &tiles[i / PARTS], i % PARTS), lane[i],
                                vf_set1(-__builtin_inff()));
    }
    vf largest = lane[0];
    UNROLL for (int i = 1; i < CHUNK_TILES * PARTS; i++) largest = vf_max(largest, lane[i]);
    float maximum = vf_largest(largest);
    maximum = maximum > s->maximum[row] ? maximum : s->maximum[row];
    vf sum = {0};
    UNROLL for (int i = 0; i < CHUNK_TILES * PARTS; i++) {
        vf weight = vf_exp(lane[i] - maximum);
        vf_store(weights + i * VL, weight);
        sum += weight;
    }
    float rescale = vf_exp(vf_set1(s->maximum[row] - maximum))[0];
    s->total[row] = s->total[row] * rescale + vf_sum(sum);
    s->maximum[row] = maximum;
    s->rescale[row] = rescale;
}
/* outputs[R][C vectors of 16 dimensions] = outputs * rescale + weights x values of the chunk. */
ALWAYS_INLINE void mix(const int R, const int C, const bool bf16, const attention *a, const key_tile *tiles,
                       row_state *state, int dimension)
{
    const int D = a->value_dim;
    vf o[MAX_ROWS][4 * PARTS];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C * PARTS; c++)
        o[r][c] = vf_load(state->outputs + r * D + dimension + c * VL) * state->as_float.rescale[r];
    for (int t = 0; t < CHUNK_TILES; t++) {
        const float *weights = state->as_float.weights + t * LANES;
        const uint8_t *line = tiles[t].values + dimension * 4;
        for (int j = 0; j < tiles[t].count; j += bf16 ? 2 : 1, line += 4 * D) {
            vf even[4 * PARTS], odd[4 * PARTS];
            UNROLL for (int c = 0; c < C * PARTS; c++) {
                even[c] = bf16 ? vf_low_bf16(vi_load(line + c * 4 * VL)) : vf_load(line + c * 4 * VL);
                if (bf16) odd[c] = vf_high_bf16(vi_load(line + c * 4 * VL));
            }
            UNROLL for (int r = 0; r < R; r++) {
                vf w = vf_set1(weights[r * CHUNK_KEYS + j]);
                UNROLL for (int c = 0; c < C * PARTS; c++) o[r][c] = vf_fma(w, even[c], o[r][c]);
            }
            if (bf16 && j + 1 < tiles[t].count) { /* memory after the last key may have any bits */
                UNROLL for (int r = 0; r < R; r++) {
                    vf w = vf_set1(weights[r * CHUNK_KEYS + j + 1]);
                    UNROLL for (int c = 0; c < C * PARTS; c++) o[r][c] = vf_fma(w, odd[c], o[r][c]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C * PARTS; c++)
        vf_store(state->outputs + r * D + dimension + c * VL, o[r][c]);
}
ALWAYS_INLINE void chunk(const int R, const bool bf16, const attention *a, const key_tile *tiles, row_state *state)
{
    const int T = TILES_AT_ONCE(R), C = VECTORS_AT_ONCE(R);
    float_rows *s = &state->as_float;
    for (int t = 0; t < CHUNK_TILES; t += T)
        score(R, T, bf16, a, tiles + t, s->queries, s->weights + t * LANES);
    for (int r = 0; r < state->used; r++) {
        if (a->score_cap != 0) cap_scores(s->weights + r * CHUNK_KEYS, a->score_cap);
        if (sees_all(state, r, tiles))
            weigh(state, r, tiles, true);
        else
            weigh(state, r, tiles, false);
    }
    int d = 0;
    for (; d + C * LANES <= a->value_dim; d += C * LANES) mix(R, C, bf16, a, tiles, state, d);
    for (; d < a->value_dim; d += LANES) mix(R, 1, bf16, a, tiles, state, d);
}

static void float_chunk(const attention *a, const key_tile *tiles, row_state *state)
{
    const bool bf16 = a->cache->kind == KV_BF16;
#define CALL(R) (bf16 ? chunk(R, true, a, tiles, state) : chunk(R, false, a, tiles, state))
    FOR_PADDED_ROWS(state->used, CALL)
#undef CALL
}

static void float_finish(const attention *a, const row_state *state, int row, float *out)
{
    const float *sums = state->outputs + row * a->value_dim;
    for (int d = 0; d < a->value_dim; d++) out[d] = sums[d] / state->as_float.total[row];
}

static void float_write(const cache *c, const layer *l, uint8_t *head, int64_t offset, const float *key,
                        const float *value)
{
    const int K = l->key_dim, V = l->value_dim;
    if (c->kind == KV_F32) {
        float *keys = (float *)head + offset;
        for (int d = 0; d < K; d++) keys[(int64_t)d * c->padded_keys] = key[d];
        memcpy(head + c->values_offset + offset * V * 4, value, (size_t)V * 4);
    } else {
        uint16_t *keys = (uint16_t *)head + 2 * offset;
        uint16_t *values = (uint16_t *)(head + c->values_offset) + offset / 2 * 2 * V + offset % 2;
        uint16_t narrow[MAX_HEAD_DIM];
        for (int d = 0; d < K; d += VL) bf16_store(narrow + d, vf_load(key + d));
        for (int d = 0; d < K; d += 2) memcpy(keys + (int64_t)d * c->padded_keys, narrow + d, 4);
        for (int d = 0; d < V; d += VL) bf16_store(narrow + d, vf_load(value + d));
        for (int d = 0; d < V; d++) values[2 * d] = narrow[d];
    }
}

const key_format float_keys = {float_locate, float_fetch, float_start,  float_sink,
                               float_resume, float_chunk, float_finish, float_write};

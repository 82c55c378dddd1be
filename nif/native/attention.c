/* Attention over the paged cache, and the cache's layout.
 *
 * A block holds, per layer and KV head, the keys transposed and then the values. With bfloat16:
 *     keys   [head_dim / 2][padded_keys][2]   16 keys' scores come at once, two dimensions a load
 *     values [block_size / 2][head_dim][2]    16 dimensions of two keys a load
 * and with float: keys [head_dim][padded_keys], values [block_size][head_dim]. Products are made in float
 * (VDPBF16PS multiplies no faster than two FMAs here and would round the weights of the softmax).
 *
 * A tile is up to MAX_ROWS (token, head) rows that share a KV head. A row meets its keys in CHUNK_KEYS pieces
 * cut at absolute positions, each score is a sum over ascending dimensions and each output a sum over ascending
 * keys: tiles, chunked prefill and neighbours change nothing in a row's result. Keys that other rows of
 * the tile need and this one may not see get weight exactly 0, which leaves its sums as they are. */
#include "genbatch.h"
#include "simd.h"
#include "tiles.h"

#define LANES 16 /* keys of one score vector */
#define PARTS (LANES / VL)
#define CHUNK_TILES (CHUNK_KEYS / LANES)
#define LOWEST (-1e30f) /* a running maximum to start from; finite, so that differences are numbers */

/* 16 consecutive keys of one block. */
typedef struct {
    const uint8_t *keys, *values; /* of the first key */
    int position; /* of the first key */
    int count; /* keys used, at most LANES; 0 outside the sequence or every row's window */
} key_tile;

typedef struct {
    float queries[MAX_ROWS * MAX_HEAD_DIM];
    float outputs[MAX_ROWS * MAX_HEAD_DIM];
    float weights[MAX_ROWS * CHUNK_KEYS];
    float maximum[MAX_ROWS], total[MAX_ROWS], rescale[MAX_ROWS];
    int first_key[MAX_ROWS], last_key[MAX_ROWS]; /* positions that the row sees */
} row_state;

static void locate(const attention *a, const uint8_t *layer, const int32_t *table, int64_t tile_index,
                   int end, key_tile *out)
{
    const cache *c = a->cache;
    int tiles_per_block = c->padded_keys / LANES;
    int64_t block = tile_index / tiles_per_block;
    int first = (int)(tile_index % tiles_per_block) * LANES;
    out->position = (int)(block * c->block_size) + first;
    int in_block = c->block_size - first < LANES ? c->block_size - first : LANES;
    int in_sequence = end - out->position;
    out->count = in_sequence < in_block ? in_sequence : in_block;
    if (out->count <= 0) {
        out->count = 0;
        return;
    }
    const uint8_t *head = layer + table[block] * c->block_stride;
    int64_t size = c->kind == KV_F32 ? 4 : 2;
    out->keys = head + (c->kind == KV_F32 ? 1 : 2) * first * size;
    out->values = head + c->values_offset + first * a->head_dim * size;
}

/* scores[R][CHUNK_KEYS] of T key tiles; those with count 0 point at a live one and are masked later. */
ALWAYS_INLINE void score(const int R, const int T, const bool bf16, const attention *a, const key_tile *tiles,
                         const float *queries, float *scores)
{
    const int D = a->head_dim;
    const int64_t pitch = (int64_t)a->cache->padded_keys * 4; /* bytes a dimension, or a pair of them */
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
            vf q = vf_set1(queries[r * D + d]);
            UNROLL for (int t = 0; t < T * PARTS; t++) s[r][t] = vf_fma(q, even[t], s[r][t]);
            if (bf16) {
                q = vf_set1(queries[r * D + d + 1]);
                UNROLL for (int t = 0; t < T * PARTS; t++) s[r][t] = vf_fma(q, odd[t], s[r][t]);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int t = 0; t < T * PARTS; t++)
        vf_store(scores + r * CHUNK_KEYS + t * VL, s[r][t]);
}

/* Turns a chunk's scores into weights relative to the row's maximum so far. */
static void weigh(row_state *s, int row, const key_tile *tiles)
{
    float *weights = s->weights + row * CHUNK_KEYS;
    vf lane[CHUNK_TILES * PARTS];
    vf largest = vf_set1(s->maximum[row]);
    for (int i = 0; i < CHUNK_TILES * PARTS; i++) {
        const key_tile *t = &tiles[i / PARTS];
        vi within = vi_lanes() + i % PARTS * VL;
        vi position = within + t->position;
        vi seen = (within < t->count) & (position >= s->first_key[row]) & (position <= s->last_key[row]);
        lane[i] = vf_select(seen, vf_load(weights + i * VL), vf_set1(-__builtin_inff()));
        largest = vf_max(largest, lane[i]);
    }
    float maximum = vf_largest(largest);
    vf sum = {0};
    for (int i = 0; i < CHUNK_TILES * PARTS; i++) {
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
    const int D = a->head_dim;
    vf o[MAX_ROWS][4 * PARTS];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C * PARTS; c++)
        o[r][c] = vf_load(state->outputs + r * D + dimension + c * VL) * state->rescale[r];
    for (int t = 0; t < CHUNK_TILES; t++) {
        const float *weights = state->weights + t * LANES;
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
            if (bf16 && j + 1 < tiles[t].count) { /* what lies behind the last key may be anything */
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

/* Few rows leave registers for several key tiles at once, which hides the latency of the sums. */
#define TILES_AT_ONCE(R) (VL < 16 ? 1 : (R) <= 3 ? 4 : (R) <= 6 ? 2 : 1)
#define VECTORS_AT_ONCE(R) (VL < 16 ? 1 : (R) <= 4 ? 4 : 2)

ALWAYS_INLINE void chunk(const int R, const bool bf16, const attention *a, int used, const key_tile *tiles,
                         row_state *state)
{
    const int T = TILES_AT_ONCE(R), C = VECTORS_AT_ONCE(R);
    for (int t = 0; t < CHUNK_TILES; t += T)
        score(R, T, bf16, a, tiles + t, state->queries, state->weights + t * LANES);
    for (int r = 0; r < used; r++) weigh(state, r, tiles);
    int d = 0;
    for (; d + C * LANES <= a->head_dim; d += C * LANES) mix(R, C, bf16, a, tiles, state, d);
    for (; d < a->head_dim; d += LANES) mix(R, 1, bf16, a, tiles, state, d);
}

#define CALL(R) (bf16 ? chunk(R, true, a, used, tiles, state) : chunk(R, false, a, used, tiles, state))
static void chunk_of_size(const attention *a, int used, const key_tile *tiles, row_state *state)
{
    const bool bf16 = a->cache->kind == KV_BF16;
    /* A few sizes serve all: rows that fill a tile up have zero queries and are dropped. */
    if (used <= 1) CALL(1);
    else if (used <= 2) CALL(2);
    else if (used <= 3) CALL(3);
    else if (used <= 4) CALL(4);
    else if (used <= 6) CALL(6);
#if MAX_ROWS > 6
    else if (used <= 8) CALL(8);
    else CALL(12);
#endif
}
#undef CALL

static int rows_in_tile(int heads_per_kv_head)
{
    return heads_per_kv_head > MAX_ROWS ? MAX_ROWS : MAX_ROWS / heads_per_kv_head * heads_per_kv_head;
}

int attention_tiles(int query_len, int heads_per_kv_head)
{
    int size = rows_in_tile(heads_per_kv_head);
    return (query_len * heads_per_kv_head + size - 1) / size;
}

static int64_t tile_of_position(const cache *c, int position)
{
    return (int64_t)(position / c->block_size) * (c->padded_keys / LANES) + position % c->block_size / LANES;
}

void attention_tile(const attention *a, int kv_head, int first_token, int query_len, int kv_len,
                    const int32_t *table, int tile)
{
    const cache *c = a->cache;
    const int D = a->head_dim, per_head = a->num_heads / a->num_kv_heads;
    const uint8_t *layer = c->base + a->layer * c->layer_stride + kv_head * c->head_stride;
    int first = tile * rows_in_tile(per_head);
    int used = query_len * per_head - first;
    if (used > rows_in_tile(per_head)) used = rows_in_tile(per_head);
    row_state state;
    memset(state.queries, 0, sizeof(float) * (size_t)(MAX_ROWS * D));
    memset(state.outputs, 0, sizeof(float) * (size_t)(MAX_ROWS * D));
    memset(state.weights, 0, sizeof(state.weights));
    for (int r = 0; r < MAX_ROWS; r++) state.rescale[r] = 1.0f;
    for (int r = 0; r < used; r++) {
        int token = first_token + (first + r) / per_head, head = kv_head * per_head + (first + r) % per_head;
        memcpy(state.queries + r * D, a->queries + token * a->query_stride + head * D, sizeof(float) * (size_t)D);
        state.maximum[r] = LOWEST;
        state.total[r] = 0;
        state.last_key[r] = kv_len - query_len + (first + r) / per_head;
        state.first_key[r] = state.last_key[r] >= a->window ? state.last_key[r] - a->window + 1 : 0;
    }
    int start = state.first_key[0], end = state.last_key[used - 1] + 1;
    int64_t first_tile = tile_of_position(c, start), last_tile = tile_of_position(c, end - 1);
    for (int64_t t = first_tile / CHUNK_TILES * CHUNK_TILES; t <= last_tile; t += CHUNK_TILES) {
        key_tile tiles[CHUNK_TILES] = {0};
        /* Tiles before the window keep count 0, since their blocks may be evicted. Tiles are read several
         * at once, so the keys of a live one stand in for them; they get no weight. */
        const uint8_t *live = NULL;
        for (int i = 0; i < CHUNK_TILES; i++) {
            if (t + i >= first_tile) locate(a, layer, table, t + i, end, &tiles[i]);
            if (tiles[i].count && !live) live = tiles[i].keys;
        }
        for (int i = 0; i < CHUNK_TILES; i++)
            if (!tiles[i].count) tiles[i].keys = live;
        chunk_of_size(a, used, tiles, &state);
    }
    for (int r = 0; r < used; r++) {
        int token = first_token + (first + r) / per_head, head = kv_head * per_head + (first + r) % per_head;
        float *out = a->out + (int64_t)token * a->num_heads * D + head * D;
        for (int d = 0; d < D; d++) out[d] = state.outputs[r * D + d] / state.total[r];
    }
}

void kv_write(const cache *c, int layer, int kv_head, int head_dim, int64_t slot, const float *key,
              const float *value)
{
    int64_t block = slot / c->block_size, offset = slot % c->block_size;
    uint8_t *head = c->base + layer * c->layer_stride + block * c->block_stride + kv_head * c->head_stride;
    if (c->kind == KV_F32) {
        float *keys = (float *)head + offset;
        for (int d = 0; d < head_dim; d++) keys[(int64_t)d * c->padded_keys] = key[d];
        memcpy(head + c->values_offset + offset * head_dim * 4, value, (size_t)head_dim * 4);
    } else {
        uint16_t *keys = (uint16_t *)head + 2 * offset;
        uint16_t *values = (uint16_t *)(head + c->values_offset) + offset / 2 * 2 * head_dim + offset % 2;
        uint16_t narrow[2 * MAX_HEAD_DIM];
        for (int d = 0; d < head_dim; d += VL) {
            bf16_store(narrow + d, vf_load(key + d));
            bf16_store(narrow + MAX_HEAD_DIM + d, vf_load(value + d));
        }
        for (int d = 0; d < head_dim; d += 2) memcpy(keys + (int64_t)d * c->padded_keys, narrow + d, 4);
        for (int d = 0; d < head_dim; d++) values[2 * d] = narrow[MAX_HEAD_DIM + d];
    }
}

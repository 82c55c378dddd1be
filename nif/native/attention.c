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
    float queries[MAX_HEAD_DIM * MAX_ROWS]; /* [head_dim][R]: one pointer serves all rows */
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

ALWAYS_INLINE vi seen_lanes(const row_state *s, int row, const key_tile *tile, int part)
{
    vi within = vi_lanes() + part * VL;
    vi position = within + tile->position;
    return (within < tile->count) & (position >= s->first_key[row]) & (position <= s->last_key[row]);
}

/* Turns a chunk's scores into weights relative to the row's maximum so far; `whole`: the row sees all its keys. */
ALWAYS_INLINE void weigh(row_state *s, int row, const key_tile *tiles, const bool whole)
{
    float *weights = s->weights + row * CHUNK_KEYS;
    vf lane[CHUNK_TILES * PARTS];
    UNROLL for (int i = 0; i < CHUNK_TILES * PARTS; i++) {
        lane[i] = vf_load(weights + i * VL);
        if (!whole)
            lane[i] = vf_select(seen_lanes(s, row, &tiles[i / PARTS], i % PARTS), lane[i],
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

static void weigh_rows(row_state *s, int used, const key_tile *tiles)
{
    const key_tile *last = &tiles[CHUNK_TILES - 1];
    int keys = 0;
    for (int t = 0; t < CHUNK_TILES; t++) keys += tiles[t].count;
    for (int r = 0; r < used; r++) {
        bool whole = keys == CHUNK_KEYS && s->first_key[r] <= tiles[0].position &&
                     s->last_key[r] >= last->position + LANES - 1;
        if (whole)
            weigh(s, r, tiles, true);
        else
            weigh(s, r, tiles, false);
    }
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
#define TILES_AT_ONCE(R) (VL < 16 ? 1 : (R) <= 3 ? 4 : 2)
#define VECTORS_AT_ONCE(R) (VL < 16 ? 1 : (R) <= 4 ? 4 : 2)

ALWAYS_INLINE void chunk(const int R, const bool bf16, const attention *a, int used, const key_tile *tiles,
                         row_state *state)
{
    const int T = TILES_AT_ONCE(R), C = VECTORS_AT_ONCE(R);
    for (int t = 0; t < CHUNK_TILES; t += T)
        score(R, T, bf16, a, tiles + t, state->queries, state->weights + t * LANES);
    weigh_rows(state, used, tiles);
    int d = 0;
    for (; d + C * LANES <= a->head_dim; d += C * LANES) mix(R, C, bf16, a, tiles, state, d);
    for (; d < a->head_dim; d += LANES) mix(R, 1, bf16, a, tiles, state, d);
}

/* A few sizes serve all: rows that fill a tile up have zero queries and are dropped. */
static int padded_rows(int used)
{
    return used <= 4 ? used : used <= 6 ? 6 : used <= 8 ? 8 : 12;
}

static void chunk_of_size(const attention *a, int used, const key_tile *tiles, row_state *state)
{
    const bool bf16 = a->cache->kind == KV_BF16;
#define CALL(R) (bf16 ? chunk(R, true, a, used, tiles, state) : chunk(R, false, a, used, tiles, state))
    switch (padded_rows(used)) {
    case 1: CALL(1); break;
    case 2: CALL(2); break;
    case 3: CALL(3); break;
    case 4: CALL(4); break;
    case 6: CALL(6); break;
#if MAX_ROWS > 6
    case 8: CALL(8); break;
    default: CALL(12); break;
#endif
    }
#undef CALL
}

/* Asks for a chunk's keys and values while the one before is worked on: decoding reads each once, from far. */
static void fetch(const attention *a, const key_tile *tiles)
{
    const int64_t pitch = (int64_t)a->cache->padded_keys * 4;
    const int lines = a->cache->kind == KV_F32 ? a->head_dim : a->head_dim / 2;
    const int64_t bytes = (int64_t)a->head_dim * (a->cache->kind == KV_F32 ? 4 : 2);
    for (int t = 0; t < CHUNK_TILES; t++) {
        if (!tiles[t].count) continue;
        for (int i = 0; i < lines; i++) __builtin_prefetch(tiles[t].keys + i * pitch);
        for (int64_t i = 0; i < tiles[t].count * bytes; i += 64) __builtin_prefetch(tiles[t].values + i);
    }
}

/* The key tiles of the chunk that starts at tile `start`, as far as they lie in [first, last]. Those before the
 * window keep count 0, since their blocks may be evicted. Tiles are read several at once, so the keys of a live one
 * stand in for them; they get no weight. */
static void locate_chunk(const attention *a, const uint8_t *layer, const int32_t *table, int64_t start,
                         int64_t first, int end, key_tile *tiles)
{
    const uint8_t *live = NULL;
    for (int i = 0; i < CHUNK_TILES; i++) {
        tiles[i] = (key_tile){0};
        if (start + i >= first) locate(a, layer, table, start + i, end, &tiles[i]);
        if (tiles[i].count && !live) live = tiles[i].keys;
    }
    for (int i = 0; i < CHUNK_TILES; i++)
        if (!tiles[i].count) tiles[i].keys = live;
}

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

static void start_rows(const attention *a, const attention_entry *entry, int kv_head, int first, int used,
                       row_state *state)
{
    const int D = a->head_dim, per_head = a->num_heads / a->num_kv_heads, size = padded_rows(used);
    memset(state->outputs, 0, sizeof(float) * (size_t)(size * D));
    for (int r = 0; r < size; r++) {
        state->maximum[r] = LOWEST;
        state->total[r] = 0;
        state->rescale[r] = 1.0f;
        if (r >= used) {
            for (int d = 0; d < D; d++) state->queries[d * size + r] = 0;
            continue;
        }
        int token = (first + r) / per_head, head = kv_head * per_head + (first + r) % per_head;
        const float *query = a->queries + (entry->first_token + token) * a->query_stride + head * D;
        for (int d = 0; d < D; d++) state->queries[d * size + r] = query[d];
        state->last_key[r] = entry->kv_len - entry->query_len + token;
        state->first_key[r] = state->last_key[r] >= a->window ? state->last_key[r] - a->window + 1 : 0;
    }
}

void attention_tile(const attention *a, const attention_entry *entry, int kv_head, int tile)
{
    const cache *c = a->cache;
    const int D = a->head_dim, per_head = a->num_heads / a->num_kv_heads;
    const uint8_t *layer = c->base + a->layer * c->layer_stride + kv_head * c->head_stride;
    const int first = tile * rows_in_tile(per_head), rows = entry->query_len * per_head;
    const int used = rows - first < rows_in_tile(per_head) ? rows - first : rows_in_tile(per_head);
    row_state state;
    start_rows(a, entry, kv_head, first, used, &state);
    int end = state.last_key[used - 1] + 1;
    int64_t first_tile = tile_of_position(c, state.first_key[0]), last_tile = tile_of_position(c, end - 1);
    int64_t at = first_tile / CHUNK_TILES * CHUNK_TILES;
    key_tile tiles[2][CHUNK_TILES];
    locate_chunk(a, layer, entry->table, at, first_tile, end, tiles[0]);
    for (int turn = 0; at <= last_tile; turn ^= 1, at += CHUNK_TILES) {
        if (at + CHUNK_TILES <= last_tile) {
            locate_chunk(a, layer, entry->table, at + CHUNK_TILES, first_tile, end, tiles[turn ^ 1]);
            if (rows == used) fetch(a, tiles[turn ^ 1]); /* other tiles of the entry will find them in L2 */
        }
        chunk_of_size(a, used, tiles[turn], &state);
    }
    for (int r = 0; r < used; r++) {
        int token = entry->first_token + (first + r) / per_head, head = kv_head * per_head + (first + r) % per_head;
        float *out = a->out + (int64_t)token * a->num_heads * D + head * D;
        for (int d = 0; d < D; d++) out[d] = state.outputs[r * D + d] / state.total[r];
    }
}

void attention_fetch(const attention *a, const attention_entry *entry, int kv_head)
{
    const cache *c = a->cache;
    const uint8_t *layer = c->base + a->layer * c->layer_stride + kv_head * c->head_stride;
    int end = entry->kv_len, from = end - entry->query_len;
    int64_t first = tile_of_position(c, from >= a->window ? from - a->window + 1 : 0);
    key_tile tiles[CHUNK_TILES];
    locate_chunk(a, layer, entry->table, first / CHUNK_TILES * CHUNK_TILES, first, end, tiles);
    fetch(a, tiles);
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

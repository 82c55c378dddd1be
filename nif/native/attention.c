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
 * the tile need and this one may not see get weight exactly 0, which leaves its sums as they are.
 *
 * Decoding sequences whose tables begin with the same blocks share those chunks: their rows make one tile as long as
 * the blocks are the same, so that a key is loaded and widened once for all, and go on alone behind them. */
#include "genbatch.h"
#include "simd.h"
#include "tiles.h"

#define LANES 16 /* keys of one score vector */
#define PARTS (LANES / VL)
#define CHUNK_TILES (CHUNK_KEYS / LANES)
#define ROW_LANES ((MAX_ROWS + VL - 1) / VL * VL) /* one float a row, in whole vectors */
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
    float maximum[ROW_LANES], rescale[ROW_LANES];
    float total[MAX_ROWS][VL]; /* sums of weights, joined at the end */
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

/* Scores that the row may not see fall to minus infinity. */
ALWAYS_INLINE void hide_unseen(row_state *s, int row, const key_tile *tiles)
{
    float *scores = s->weights + row * CHUNK_KEYS;
    UNROLL for (int i = 0; i < CHUNK_TILES * PARTS; i++)
        vf_store(scores + i * VL, vf_select(seen_lanes(s, row, &tiles[i / PARTS], i % PARTS), vf_load(scores + i * VL),
                                            vf_set1(-__builtin_inff())));
}

ALWAYS_INLINE void raise_maximum(row_state *s, int row)
{
    const float *scores = s->weights + row * CHUNK_KEYS;
    vf largest = vf_load(scores);
    UNROLL for (int i = 1; i < CHUNK_TILES * PARTS; i++) largest = vf_max(largest, vf_load(scores + i * VL));
    float maximum = vf_largest(largest);
    s->maximum[row] = maximum > s->maximum[row] ? maximum : s->maximum[row];
}

/* Turns a chunk's scores into weights relative to the row's maximum so far. */
ALWAYS_INLINE void weigh(row_state *s, int row)
{
    float *weights = s->weights + row * CHUNK_KEYS;
    vf sum = {0};
    UNROLL for (int i = 0; i < CHUNK_TILES * PARTS; i++) {
        vf weight = vf_exp(vf_load(weights + i * VL) - s->maximum[row]);
        vf_store(weights + i * VL, weight);
        sum += weight;
    }
    vf_store(s->total[row], vf_load(s->total[row]) * s->rescale[row] + sum);
}

static void weigh_rows(row_state *s, int used, const key_tile *tiles)
{
    const key_tile *last = &tiles[CHUNK_TILES - 1];
    float before[ROW_LANES];
    int keys = 0;
    for (int t = 0; t < CHUNK_TILES; t++) keys += tiles[t].count;
    memcpy(before, s->maximum, sizeof(before));
    for (int r = 0; r < used; r++) {
        bool whole = keys == CHUNK_KEYS && s->first_key[r] <= tiles[0].position &&
                     s->last_key[r] >= last->position + LANES - 1;
        if (!whole) hide_unseen(s, r, tiles);
        raise_maximum(s, r);
    }
    for (int r = 0; r < used; r += VL) vf_store(s->rescale + r, vf_exp(vf_load(before + r) - vf_load(s->maximum + r)));
    for (int r = 0; r < used; r++) weigh(s, r);
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

/* Row `r` of `size` becomes row `row` of the entry, before its first key. */
static void start_row(const attention *a, const attention_entry *entry, int kv_head, int row, int r, int size,
                      row_state *state)
{
    const int D = a->head_dim, per_head = a->num_heads / a->num_kv_heads;
    int token = row / per_head, head = kv_head * per_head + row % per_head;
    const float *query = a->queries + (entry->first_token + token) * a->query_stride + head * D;
    for (int d = 0; d < D; d++) state->queries[d * size + r] = query[d];
    state->last_key[r] = entry->kv_len - entry->query_len + token;
    state->first_key[r] = state->last_key[r] >= a->window ? state->last_key[r] - a->window + 1 : 0;
}

/* Nothing seen yet; the rows from `used` on have zero queries. */
static void clear_rows(const attention *a, int used, row_state *state)
{
    const int D = a->head_dim, size = padded_rows(used);
    memset(state->outputs, 0, sizeof(float) * (size_t)(size * D));
    memset(state->total, 0, sizeof(state->total));
    for (int r = 0; r < ROW_LANES; r++) {
        state->maximum[r] = LOWEST;
        state->rescale[r] = 1.0f;
    }
    for (int r = used; r < size; r++)
        for (int d = 0; d < D; d++) state->queries[d * size + r] = 0;
}

/* Works through the chunks from tile `at` on that have tiles in [first, last]. */
static void run_chunks(const attention *a, const uint8_t *layer, const int32_t *table, int64_t at, int64_t first,
                       int64_t last, int end, bool ahead, int used, row_state *state)
{
    key_tile tiles[2][CHUNK_TILES];
    if (at > last) return;
    locate_chunk(a, layer, table, at, first, end, tiles[0]);
    for (int turn = 0; at <= last; turn ^= 1, at += CHUNK_TILES) {
        if (at + CHUNK_TILES <= last) {
            locate_chunk(a, layer, table, at + CHUNK_TILES, first, end, tiles[turn ^ 1]);
            if (ahead) fetch(a, tiles[turn ^ 1]);
        }
        chunk_of_size(a, used, tiles[turn], state);
    }
}

static void finish_rows(const attention *a, const attention_entry *entry, int kv_head, int first, int used,
                        const row_state *state)
{
    const int D = a->head_dim, per_head = a->num_heads / a->num_kv_heads;
    for (int r = 0; r < used; r++) {
        int64_t token = entry->first_token + (first + r) / per_head;
        int head = kv_head * per_head + (first + r) % per_head;
        float *out = a->out + token * a->num_heads * D + head * D;
        float total = vf_sum(vf_load(state->total[r]));
        for (int d = 0; d < D; d++) out[d] = state->outputs[r * D + d] / total;
    }
}

static const uint8_t *layer_of(const attention *a, int kv_head)
{
    return a->cache->base + a->layer * a->cache->layer_stride + kv_head * a->cache->head_stride;
}

void attention_tile(const attention *a, const attention_entry *entry, int kv_head, int tile)
{
    const int per_head = a->num_heads / a->num_kv_heads, size = rows_in_tile(per_head);
    const int first = tile * size, rows = entry->query_len * per_head;
    const int used = rows - first < size ? rows - first : size;
    row_state state;
    clear_rows(a, used, &state);
    for (int r = 0; r < used; r++) start_row(a, entry, kv_head, first + r, r, padded_rows(used), &state);
    int end = state.last_key[used - 1] + 1;
    int64_t first_tile = tile_of_position(a->cache, state.first_key[0]), last_tile = tile_of_position(a->cache, end - 1);
    /* Other tiles of the entry will find its keys in L2. */
    run_chunks(a, layer_of(a, kv_head), entry->table, first_tile / CHUNK_TILES * CHUNK_TILES, first_tile, last_tile, end,
               rows == used, used, &state);
    finish_rows(a, entry, kv_head, first, used, &state);
}

/* Whole chunks of keys that both entries read from the same blocks, every key of them seen by every row. */
static int64_t common_chunks(const attention *a, const attention_entry *one, const attention_entry *other)
{
    const cache *c = a->cache;
    int end = one->kv_len < other->kv_len ? one->kv_len : other->kv_len;
    if (one->query_len != 1 || other->query_len != 1 || one->kv_len > a->window || other->kv_len > a->window) return 0;
    int64_t blocks = 0;
    while (blocks < end / c->block_size && one->table[blocks] == other->table[blocks]) blocks++;
    return blocks * (c->padded_keys / LANES) / CHUNK_TILES;
}

int attention_members(const attention *a, const attention_entry *entries, int count, int64_t *shared_chunks)
{
    const int per_head = a->num_heads / a->num_kv_heads;
    int members = 1;
    *shared_chunks = 0;
    for (; members < count && (members + 1) * per_head <= MAX_ROWS; members++) {
        int64_t chunks = common_chunks(a, &entries[0], &entries[members]);
        if (!chunks) break;
        if (members == 1 || chunks < *shared_chunks) *shared_chunks = chunks;
    }
    return members;
}

static void fetch_from(const attention *a, const attention_entry *entry, int kv_head, int64_t at)
{
    if (at > tile_of_position(a->cache, entry->kv_len - 1)) return;
    key_tile tiles[CHUNK_TILES];
    locate_chunk(a, layer_of(a, kv_head), entry->table, at, at, entry->kv_len, tiles);
    fetch(a, tiles);
}

void attention_shared(const attention *a, const attention_entry *entries, int members, int64_t shared_chunks,
                      int kv_head)
{
    const int D = a->head_dim, per_head = a->num_heads / a->num_kv_heads, used = members * per_head;
    const uint8_t *layer = layer_of(a, kv_head);
    const int64_t own = shared_chunks * CHUNK_TILES; /* the first tile that is a member's own */
    row_state together, alone;
    clear_rows(a, used, &together);
    for (int r = 0; r < used; r++)
        start_row(a, &entries[r / per_head], kv_head, r % per_head, r, padded_rows(used), &together);
    run_chunks(a, layer, entries[0].table, 0, 0, own - 1, entries[0].kv_len, true, used, &together);
    fetch_from(a, &entries[0], kv_head, own);
    for (int m = 0; m < members; m++) {
        const attention_entry *entry = &entries[m];
        if (m + 1 < members) fetch_from(a, &entries[m + 1], kv_head, own);
        clear_rows(a, per_head, &alone);
        for (int r = 0; r < per_head; r++) {
            start_row(a, entry, kv_head, r, r, padded_rows(per_head), &alone);
            alone.maximum[r] = together.maximum[m * per_head + r];
            vf_store(alone.total[r], vf_load(together.total[m * per_head + r]));
        }
        memcpy(alone.outputs, together.outputs + m * per_head * D, sizeof(float) * (size_t)(per_head * D));
        run_chunks(a, layer, entry->table, own, own, tile_of_position(a->cache, entry->kv_len - 1), entry->kv_len, true,
                   per_head, &alone);
        finish_rows(a, entry, kv_head, 0, per_head, &alone);
    }
}

void attention_fetch(const attention *a, const attention_entry *entry, int kv_head)
{
    int end = entry->kv_len, from = end - entry->query_len;
    int64_t first = tile_of_position(a->cache, from >= a->window ? from - a->window + 1 : 0);
    key_tile tiles[CHUNK_TILES];
    locate_chunk(a, layer_of(a, kv_head), entry->table, first / CHUNK_TILES * CHUNK_TILES, first, end, tiles);
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

/* Attention over the paged cache: tiles of rows, chunks of keys. How the keys and values of a block lie and are
 * multiplied is told in attention_float.c and attention_int8.c.
 *
 * A tile is up to MAX_ROWS (token, head) rows that share a KV head. A row meets its keys in CHUNK_KEYS pieces
 * cut at absolute positions, and its sums have one order: tiles, chunked prefill and neighbours change nothing in a
 * row's result. Keys that other rows of the tile need and this one may not see get weight exactly 0, which leaves
 * its sums as they are. */
#include "attention.h"

/* The 16 keys from `first` of the table's `block`, of which those before `end` are used. */
static void locate(const attention *a, const uint8_t *layer, const int32_t *table, int block, int first, int end,
                   key_tile *out)
{
    const cache *c = a->cache;
    out->position = block * c->block_size + first;
    int in_block = c->block_size - first < LANES ? c->block_size - first : LANES;
    int in_sequence = end - out->position;
    out->count = in_sequence < in_block ? in_sequence : in_block;
    if (out->count <= 0) {
        out->count = 0;
        return;
    }
    const uint8_t *head = layer + table[block] * c->block_stride;
    if (c->kind == KV_I8)
        int8_locate(c, a->head_dim, head, first, out);
    else
        float_locate(c, a->head_dim, head, first, out);
}

/* Asks for a chunk's keys and values while the one before is worked on: decoding reads each once, from far. */
static void fetch(const attention *a, const key_tile *tiles)
{
    for (int t = 0; t < CHUNK_TILES; t++) {
        if (!tiles[t].count) continue;
        if (a->cache->kind == KV_I8)
            int8_fetch(a->cache, a->head_dim, &tiles[t]);
        else
            float_fetch(a->cache, a->head_dim, &tiles[t]);
    }
}

/* The key tiles of the chunk that starts at tile `start`, as far as they lie in [first, last]. Those before the
 * window keep count 0, since their blocks may be evicted. Tiles are read several at once, so the keys of a live one
 * stand in for them; they get no weight. */
static void locate_chunk(const attention *a, const uint8_t *layer, const int32_t *table, int64_t start,
                         int64_t first, int end, key_tile *tiles)
{
    const key_tile *live = NULL;
    const int padded = a->cache->padded_keys, tiles_per_block = padded / LANES;
    int block = (int)(start / tiles_per_block), key = (int)(start % tiles_per_block) * LANES;
    for (int i = 0; i < CHUNK_TILES; i++) {
        tiles[i] = (key_tile){0};
        if (start + i >= first) locate(a, layer, table, block, key, end, &tiles[i]);
        if (tiles[i].count && !live) live = &tiles[i];
        key += LANES;
        if (key == padded) key = 0, block++;
    }
    for (int i = 0; i < CHUNK_TILES; i++) {
        if (tiles[i].count) continue;
        tiles[i].keys = live->keys;
        tiles[i].factors = live->factors;
    }
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
    state->used = used;
    for (int r = 0; r < size; r++) {
        const float *query = NULL;
        if (r < used) {
            int token = (first + r) / per_head, head = kv_head * per_head + (first + r) % per_head;
            query = a->queries + (entry->first_token + token) * a->query_stride + head * D;
            state->last_key[r] = entry->kv_len - entry->query_len + token;
            state->first_key[r] = state->last_key[r] >= a->window ? state->last_key[r] - a->window + 1 : 0;
        }
        if (a->cache->kind == KV_I8)
            int8_start(a, state, r, query);
        else
            float_start(a, state, r, query);
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
        if (c->kind == KV_I8)
            int8_chunk(a, tiles[turn], &state);
        else
            float_chunk(a, tiles[turn], &state);
    }
    for (int r = 0; r < used; r++) {
        int token = entry->first_token + (first + r) / per_head, head = kv_head * per_head + (first + r) % per_head;
        float *out = a->out + (int64_t)token * a->num_heads * D + head * D;
        if (c->kind == KV_I8)
            int8_finish(a, &state, r, out);
        else
            float_finish(a, &state, r, out);
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
    if (c->kind == KV_I8)
        int8_write(c, head_dim, head, offset, key, value);
    else
        float_write(c, head_dim, head, offset, key, value);
}

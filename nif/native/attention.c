/* Attention over the paged cache, by tiles of rows and chunks of keys. attention_float.c and attention_int8.c describe the
 * layout of a block's keys and values, and multiply them.
 *
 * A tile has up to MAX_ROWS (token, head) rows that share a KV head. A row reads its keys in chunks of CHUNK_KEYS, which begin
 * at fixed positions, and its sums have a fixed order. So tiles, chunked prefill and other sequences change no bit of a row's
 * result. If another row of the tile needs a key that this row may not see, the key gets the weight 0, which leaves the sums
 * unchanged. */
#include "attention.h"

static const key_format *format_of(const cache *c) { return c->kind == KV_I8 ? &int8_keys : &float_keys; }

/* Returns the 16 keys from `first` of the table's `block`; only keys before `end` are used. */
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
    format_of(c)->locate(a, layer + table[block] * c->block_stride, first, out);
}

/* Prefetches a chunk's keys and values during the previous chunk, because decoding reads each of them once, from memory. */
static void fetch(const attention *a, const key_tile *tiles)
{
    for (int t = 0; t < CHUNK_TILES; t++)
        if (tiles[t].count) format_of(a->cache)->fetch(a, &tiles[t]);
}

/* The keys that some rows read: positions [0, end) of a table, without the tiles between the sinks and `first`. */
typedef struct {
    const uint8_t *layer; /* the pool of the layer, from the KV head on */
    const int32_t *table;
    int64_t sinks; /* tiles at the beginning */
    int64_t first;
    int end;
    bool once; /* whether no other tile of rows reads these keys, so that they are not in a CPU cache yet */
} key_run;

/* Finds the key tiles of a chunk. Tiles before the window have the count 0, because their blocks may be evicted. Several tiles
 * are read at once, so such a tile points to the keys of another tile; these get no weight. */
static void locate_chunk(const attention *a, const key_run *keys, int64_t chunk, key_tile *tiles)
{
    const key_tile *live = NULL;
    const int padded = a->cache->padded_keys, tiles_per_block = padded / LANES;
    const int64_t start = chunk * CHUNK_TILES;
    int block = (int)(start / tiles_per_block), key = (int)(start % tiles_per_block) * LANES;
    for (int i = 0; i < CHUNK_TILES; i++) {
        tiles[i] = (key_tile){0};
        if (start + i < keys->sinks || start + i >= keys->first)
            locate(a, keys->layer, keys->table, block, key, keys->end, &tiles[i]);
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

static int64_t tile_of_position(const cache *c, int position)
{
    return (int64_t)(position / c->block_size) * (c->padded_keys / LANES) + position % c->block_size / LANES;
}

static int64_t chunk_of_position(const cache *c, int position) { return tile_of_position(c, position) / CHUNK_TILES; }

int attention_whole_chunks(const cache *c, int blocks) { return blocks * (c->padded_keys / LANES) / CHUNK_TILES; }

static key_run run_of(const attention *a, int kv_head, const int32_t *table, int first_key, int end, bool once)
{
    const cache *c = a->cache;
    const uint8_t *layer = c->base + a->layer * c->layer_stride + kv_head * c->head_stride;
    const int64_t sinks = a->sink_tokens ? tile_of_position(c, a->sink_tokens - 1) + 1 : 0;
    return (key_run){layer, table, sinks, tile_of_position(c, first_key), end, once};
}

static int first_key_of(const attention *a, int last_key)
{
    return last_key >= a->window ? last_key - a->window + 1 : 0;
}

static void open_rows(const attention *a, int used, row_state *state)
{
    const int size = padded_rows(used);
    memset(state->outputs, 0, sizeof(float) * (size_t)(size * a->value_dim));
    state->sink_tokens = a->sink_tokens;
    state->used = used;
    for (int r = used; r < size; r++) format_of(a->cache)->start(a, state, r, NULL);
}

static void start_row(const attention *a, int64_t token, int head, int last_key, row_state *state, int row)
{
    const float *query = a->queries + (a->index ? a->index[token] : token) * a->query_stride + head * a->key_dim;
    state->last_key[row] = last_key;
    state->first_key[row] = first_key_of(a, last_key);
    format_of(a->cache)->start(a, state, row, query);
    if (a->sinks) format_of(a->cache)->sink(state, row, a->sinks[head]);
}

static void finish_row(const attention *a, const row_state *state, int row, int64_t token, int head)
{
    float *out = a->out + token * a->num_heads * a->value_dim + head * a->value_dim;
    format_of(a->cache)->finish(a, state, row, out);
}

/* Attends to the keys of the chunks [from, to). */
static void meet(const attention *a, const key_run *keys, int64_t from, int64_t to, row_state *state)
{
    key_tile tiles[2][CHUNK_TILES];
    locate_chunk(a, keys, from, tiles[0]);
    for (int turn = 0; from < to; turn ^= 1, from++) {
        if (from + 1 < to) {
            locate_chunk(a, keys, from + 1, tiles[turn ^ 1]);
            if (keys->once) fetch(a, tiles[turn ^ 1]); /* other keys are in L2 already */
        }
        format_of(a->cache)->chunk(a, tiles[turn], state);
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

void attention_tile(const attention *a, const attention_entry *entry, int kv_head, int tile)
{
    const int per_head = a->num_heads / a->num_kv_heads, first_head = kv_head * per_head;
    const int first = tile * rows_in_tile(per_head), rows = entry->query_len * per_head;
    const int used = rows - first < rows_in_tile(per_head) ? rows - first : rows_in_tile(per_head);
    row_state state;
    open_rows(a, used, &state);
    for (int r = 0; r < used; r++) {
        int token = (first + r) / per_head, last_key = entry->kv_len - entry->query_len + token;
        start_row(a, entry->first_token + token, first_head + (first + r) % per_head, last_key, &state, r);
    }
    const int last_key = state.last_key[used - 1], first_key = state.first_key[0];
    key_run keys = run_of(a, kv_head, entry->table, first_key, last_key + 1, rows == used);
    const int64_t from = chunk_of_position(a->cache, first_key);
    if (a->sink_tokens && from) {
        int64_t sinks = chunk_of_position(a->cache, a->sink_tokens - 1) + 1;
        meet(a, &keys, 0, sinks < from ? sinks : from, &state);
    }
    meet(a, &keys, from, chunk_of_position(a->cache, last_key) + 1, &state);
    for (int r = 0; r < used; r++)
        finish_row(a, &state, r, entry->first_token + (first + r) / per_head, first_head + (first + r) % per_head);
}

void attention_together(const attention *a, const attention_entry *entries, int count, int chunks, int kv_head)
{
    const int per_head = a->num_heads / a->num_kv_heads, first_head = kv_head * per_head;
    row_state common, own;
    open_rows(a, count * per_head, &common);
    for (int r = 0; r < count * per_head; r++) {
        const attention_entry *entry = &entries[r / per_head];
        start_row(a, entry->first_token, first_head + r % per_head, entry->kv_len - 1, &common, r);
    }
    attention_fetch(a, &entries[0], kv_head, chunks);
    key_run keys = run_of(a, kv_head, entries[0].table, 0, entries[0].kv_len, true);
    meet(a, &keys, 0, chunks, &common);
    for (int i = 0; i < count; i++) {
        if (i + 1 < count) attention_fetch(a, &entries[i + 1], kv_head, chunks);
        open_rows(a, per_head, &own);
        for (int r = 0; r < per_head; r++) {
            start_row(a, entries[i].first_token, first_head + r, entries[i].kv_len - 1, &own, r);
            memcpy(own.outputs + r * a->value_dim, common.outputs + (i * per_head + r) * a->value_dim,
                   sizeof(float) * (size_t)a->value_dim);
            format_of(a->cache)->resume(&own, r, &common, i * per_head + r);
        }
        keys = run_of(a, kv_head, entries[i].table, 0, entries[i].kv_len, true);
        meet(a, &keys, chunks, chunk_of_position(a->cache, entries[i].kv_len - 1) + 1, &own);
        for (int r = 0; r < per_head; r++) finish_row(a, &own, r, entries[i].first_token, first_head + r);
    }
}

void attention_fetch(const attention *a, const attention_entry *entry, int kv_head, int chunks)
{
    int first_key = first_key_of(a, entry->kv_len - entry->query_len);
    key_run keys = run_of(a, kv_head, entry->table, first_key, entry->kv_len, true);
    int64_t chunk = a->sink_tokens ? 0 : chunk_of_position(a->cache, first_key);
    key_tile tiles[CHUNK_TILES];
    locate_chunk(a, &keys, chunk > chunks ? chunk : chunks, tiles);
    fetch(a, tiles);
}

void kv_write(const cache *c, const layer *l, int kv_head, int64_t slot, const float *key, const float *value)
{
    int64_t block = slot / c->block_size, offset = slot % c->block_size;
    uint8_t *head = c->base + l->index_in_group * c->layer_stride + block * c->block_stride + kv_head * c->head_stride;
    format_of(c)->write(c, l, head, offset, key, value);
}

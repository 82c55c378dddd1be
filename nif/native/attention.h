/* Types and helpers of attention.c, attention_float.c and attention_int8.c. */
#ifndef GENBATCH_ATTENTION_H
#define GENBATCH_ATTENTION_H

#include "genbatch.h"
#include "simd.h"
#include "tiles.h"

#define LANES 16 /* keys of one score vector */
#define PARTS (LANES / VL)
#define CHUNK_TILES (CHUNK_KEYS / LANES)
#define LOWEST (-1e30f) /* the first running maximum; finite, so that differences are not NaN */

/* 16 consecutive keys of one block. */
typedef struct {
    const uint8_t *keys, *values; /* of the first key */
    const float *factors; /* KV_I8: of the first key */
    int position; /* of the first key */
    int count; /* keys used, at most LANES; 0 outside the sequence or every row's window */
} key_tile;

typedef struct {
    float queries[MAX_HEAD_DIM * MAX_ROWS]; /* [key_dim][R]: one pointer serves all rows */
    float weights[MAX_ROWS * CHUNK_KEYS];
    float maximum[MAX_ROWS], total[MAX_ROWS], rescale[MAX_ROWS];
} float_rows;

typedef struct {
    int8_t queries[MAX_HEAD_DIM * MAX_ROWS]; /* [key_dim / 4][R][4] */
    int32_t start[MAX_ROWS]; /* -128 times the sum of a row's queries */
    float scale[MAX_ROWS]; /* of the row's queries, times log2(e) */
    int32_t scores[MAX_ROWS * CHUNK_KEYS];
    uint8_t weights[MAX_ROWS * CHUNK_KEYS];
    float totals[MAX_ROWS * VL], sums[MAX_ROWS * VL]; /* by lane: of all chunks so far, and of one chunk */
    float maximum[LANES], chunk_maximum[LANES], rescale[LANES], factor[LANES];
} int8_rows;

/* The rows of one tile of attention. */
typedef struct {
    float outputs[MAX_ROWS * MAX_HEAD_DIM];
    int first_key[MAX_ROWS], last_key[MAX_ROWS]; /* positions that the row sees */
    int sink_tokens; /* the first positions, which the row sees in addition */
    int used; /* rows of the entry; other rows pad the tile and are dropped */
    union {
        float_rows as_float;
        int8_rows as_int8;
    };
} row_state;

/* Only a few sizes are compiled. Rows that pad a tile have zero queries. */
ALWAYS_INLINE int padded_rows(int used)
{
    return used <= 4 ? used : used <= 6 ? 6 : used <= 8 ? 8 : 12;
}

#if MAX_ROWS > 6
#define FOR_PADDED_ROWS(used, CALL)                                                                            \
    switch (padded_rows(used)) {                                                                               \
    case 1: CALL(1); break;                                                                                    \
    case 2: CALL(2); break;                                                                                    \
    case 3: CALL(3); break;                                                                                    \
    case 4: CALL(4); break;                                                                                    \
    case 6: CALL(6); break;                                                                                    \
    case 8: CALL(8); break;                                                                                    \
    default: CALL(12); break;                                                                                  \
    }
#else
#define FOR_PADDED_ROWS(used, CALL)                                                                            \
    switch (padded_rows(used)) {                                                                               \
    case 1: CALL(1); break;                                                                                    \
    case 2: CALL(2); break;                                                                                    \
    case 3: CALL(3); break;                                                                                    \
    case 4: CALL(4); break;                                                                                    \
    default: CALL(6); break;                                                                                   \
    }
#endif

/* With few rows there are registers for several key tiles at once, which hides the latency of the sums. */
#define TILES_AT_ONCE(R) (VL < 16 ? 1 : (R) <= 3 ? 4 : 2)
#define VECTORS_AT_ONCE(R) (VL < 16 ? 1 : (R) <= 4 ? 4 : 2)

/* Returns a mask of a tile's keys that a row sees. */
ALWAYS_INLINE vi seen_lanes(const row_state *s, int row, const key_tile *tile, int part)
{
    vi within = vi_lanes() + part * VL;
    vi position = within + tile->position;
    vi near_or_sink = (position >= s->first_key[row]) | (position < s->sink_tokens);
    return (within < tile->count) & near_or_sink & (position <= s->last_key[row]);
}

/* Returns whether a row sees all keys of a chunk. */
ALWAYS_INLINE bool sees_all(const row_state *s, int row, const key_tile *tiles)
{
    int keys = 0;
    for (int t = 0; t < CHUNK_TILES; t++) keys += tiles[t].count;
    return keys == CHUNK_KEYS && s->first_key[row] <= tiles[0].position &&
           s->last_key[row] >= tiles[CHUNK_TILES - 1].position + LANES - 1;
}

/* The functions of a format of keys and values. attention_float.c has float32 and bfloat16, attention_int8.c has 8 bits. */
typedef struct {
    void (*locate)(const attention *, const uint8_t *head, int first, key_tile *out);
    void (*fetch)(const attention *, const key_tile *); /* prefetches a tile */
    void (*start)(const attention *, row_state *, int row, const float *query); /* query: NULL for a row that pads the tile */
    void (*sink)(row_state *, int row, float score); /* for a row that has read no key yet */
    void (*resume)(row_state *, int row, const row_state *from, int from_row);
    void (*chunk)(const attention *, const key_tile *, row_state *);
    void (*finish)(const attention *, const row_state *, int row, float *out);
    void (*write)(const cache *, const layer *, uint8_t *head, int64_t offset, const float *key, const float *value);
} key_format;
extern const key_format float_keys, int8_keys;

#endif

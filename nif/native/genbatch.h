/* The functions and types that several C files use. */
#ifndef GENBATCH_H
#define GENBATCH_H

#include <stdatomic.h>

#include "abi.h"

#define SMALLEST_GROUP 16 /* the least number of inputs that share a scale */
#define MAX_FAMILY 12 /* most sequences that share one pass over common keys */
#define CHUNK_KEYS 64 /* keys between two rescalings of the softmax; chunks begin at multiples of it */

static inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Factors of one group of integers in a row; see gemm_int8.c. */
typedef struct {
    float scale; /* of the group, with 8 significant bits as in bfloat16 */
    float minus; /* -INTEGER_ZERO * scale, exact */
    int32_t start; /* bits of INTEGER_ZERO, less 128 times the sum of the integers */
    float total; /* scale times the sum of the integers */
} group_factors;

/* Factors of one group of 24-bit integers in a row; see gemm_stored_digits.c. */
#define DIGITS 3
typedef struct {
    float scale; /* of the group, a power of two */
    float minus_total; /* -scale times the sum of the integers */
    int32_t minus_digits[DIGITS]; /* minus the sums of the digits, the lowest digit first */
} digit_factors;

/* Adding a small integer to the bits of this float adds it to the float. */
#define INTEGER_ZERO 12582912.0f /* 1.5 * 2^23: spacing 1, room for +-2^22 */
#define INTEGER_ZERO_BITS 0x4b400000

/* Rows of activations in the format that a kind of weight needs, tile by tile (tiles.h). */
typedef struct {
    void *data; /* float, bfloat16, int8, or int8 [DIGITS] */
    void *factors; /* group_factors or digit_factors: [tile][k / group][rows of the tile] */
    int64_t count; /* rows */
    int64_t k; /* elements a row */
    int64_t groups; /* factors a row */
} rows;

/* threads.c */
typedef struct pool pool;
typedef void (*pool_function)(void *argument, int thread);
pool *pool_create(int num_threads);
void pool_destroy(pool *);
int pool_size(const pool *);
/* Runs the function as thread 0, and in every other thread that arrives before thread 0 ends. Returns when all are done. */
void pool_run(pool *, pool_function, void *argument);
void pool_barrier(pool *); /* waits for all threads, including threads that have not arrived yet */
void pool_add(pool *, atomic_int *count, int enough); /* adds 1; wakes the threads that wait for `enough` */
void pool_await(pool *, atomic_int *count, int enough); /* waits for `enough`; the caller then sees all earlier writes */

/* gemm_*.c: sums[count][COLUMNS] = rows[first .. first + count) x one weight block; whole tiles */
void gemm_f32_block(const linear *, int64_t block, const rows *, int64_t first, int64_t count, float *sums);
void gemm_bf16_block(const linear *, int64_t block, const rows *, int64_t first, int64_t count, float *sums);
void gemm_i8_block(const linear *, int64_t block, const rows *, int64_t first, int64_t count, float *sums);
void gemm_u4_block(const linear *, int64_t block, const rows *, int64_t first, int64_t count, float *sums);
/* The same for the inputs [k, k + depth), with float weights [depth][COLUMNS]; k = 0 begins new sums. */
void gemm_f32_depth(const float *w, int64_t k, int64_t depth, const rows *, int64_t first, int64_t count, float *sums);
void gemm_stored_block(int kind, const uint8_t *weights, int64_t k, const rows *, int64_t first, int64_t count,
                       float *sums);
/* `size`: inputs in a group of a row, 16 or 32. */
void gemm_stored_int8_block(int kind, const uint8_t *weights, int64_t k, int size, const rows *, int64_t first,
                            int64_t count, float *sums);
void gemm_stored_digits_block(int kind, const uint8_t *weights, int64_t k, int size, const rows *, int64_t first,
                              int64_t count, float *sums);
enum weight_kind gemm_bf16_rows_kind(void); /* the format of rows that bfloat16 weights need on this machine */

/* linear.c */
int64_t linear_column(const linear *, int64_t block, int64_t *width); /* a block's first output; *width: its outputs */
enum finish { STORE, ADD, ACTIVATE }; /* ACTIVATE: see `activate` */
int64_t linear_blocks(const linear *);
enum weight_kind linear_operand(const linear *); /* the format of the linear's rows */
void linear_block(const linear *, int64_t block, const rows *, int64_t first, int64_t count, float *sums);
/* Adds the bias to `sums` [count][COLUMNS], then stores, adds or activates them into `out`, whose rows are `pitch` floats
 * apart. */
void linear_finish(const linear *, int64_t block, float *sums, int64_t first, int64_t count, enum finish, const model *,
                   float *out, int64_t pitch);

/* largest.c */
typedef struct {
    float values[COLUMNS];
    int32_t blocks[COLUMNS];
} lane_maxima; /* the largest values of a row in the blocks that one thread computed */
void largest_clear(lane_maxima *, int64_t count);
void largest_take(const linear *, int64_t block, const float *sums, int64_t count, lane_maxima *);
void largest_join(const lane_maxima *, largest *); /* `largest` begins as {-INFINITY, INT32_MAX} */

/* check.c */
enum step_error step_check(const step *, const model *, const cache *, int64_t *where);

/* rows.c */
typedef struct {
    float mean, scale;
} norm_factors;
float mean_square(const float *x, int64_t size);
norm_factors norm_look(const model *, const float *x, int64_t size); /* a row's factors, which need the whole row */
/* Writes out[from .. to) of the row's norm; `out` may be `x`. Parts and a whole row have the same bits. */
void norm_part(const model *, const norm *, norm_factors, const float *x, int64_t from, int64_t to, float *out);
void norm_row(const model *, const norm *, const float *x, int64_t size, float *out);
void embed_row(const table *, int64_t id, float *out); /* scales the embedding */
norm head_norm(const model *, const norm *, int head, int head_dim);
void norm_rms(const float *weight, float eps, int64_t size, float *x); /* in place */
void rope(const model *, const layer *, const step *, float *head, const norm *, int64_t position, float scale);
/* Writes the inputs [from, to) of a row of `size`, which are whole groups, in a format that a linear multiplies. */
void rows_put_part(int kind, const rows *, int64_t row, const float *x, int64_t size, int64_t from, int64_t to);
void rows_put(int kind, const rows *, int64_t row, const float *x, int64_t size);
/* Writes the activations of a block's sums [count][COLUMNS], at most `room` for each row, to rows `pitch` floats apart. With
 * gates, a block has COLUMNS / 2 gates and as many ups, which give COLUMNS / 2 activations. */
void activate(const model *, const float *sums, int64_t count, float *out, int64_t pitch, int64_t room);
void logits_finish(const model *, float *sums, int64_t count); /* scales and caps logits */
void xielu_row(const layer *, int64_t count, float *x); /* in place */
/* Writes a sparse layer's activations from its gates, which are changed, and from the ups after the gates. */
void sparse_row(const model *, const layer *, float *gates, float *out);
void multiply_sigmoid(const float *gates, int64_t count, float *out);
void multiply_heads(const float *gates, int64_t heads, int64_t size, float *out);
void multiply_silu(const float *gates, int64_t count, float *out);
void multiply_activated(const model *, const float *gates, int64_t count, float *out); /* out[i] *= activation(gates[i]) */

/* experts.c */
typedef struct {
    int32_t expert;
    int32_t start, count; /* the expert's rows; rows are sorted by expert */
    int64_t first, size; /* the unit's rows among them, whole tiles */
} expert_panel;

typedef struct {
    float *scores; /* [token, experts->count] */
    int32_t *ids; /* [token, chosen], ascending */
    float *weights; /* [token, chosen] */
    int32_t *places; /* [token, chosen]: the row of this pair */
    int32_t *tokens; /* [row]: the row's token */
    int32_t *starts; /* [count + 1]: an expert's first row */
    expert_panel *panels;
    int64_t num_panels;
} choice;
/* Sizes for a step's buffers: experts of a token, experts of a layer, and inputs of the widest linear. */
typedef struct {
    int64_t chosen, count, k;
} expert_sizes;

expert_sizes experts_sizes(const model *);
void experts_choose(const experts *, const choice *, int64_t token);
/* Sorts the rows of all tokens by expert, so that each expert's weights are read once, and cuts them into panels of at most
 * `most` tiles. */
void experts_group(const experts *, choice *, int64_t num_tokens, int64_t most);

/* attention.c */
typedef struct {
    const float *queries; /* [token][num_heads * key_dim] at `query_stride`, rotated and scaled */
    const int64_t *index; /* the row of queries of each token; NULL: the token's number */
    float *out; /* [token, num_heads * value_dim] */
    int64_t query_stride;
    const cache *cache;
    const float *sinks; /* [num_heads], or NULL */
    float score_cap; /* 0: no cap */
    int32_t layer, num_heads, num_kv_heads, key_dim, value_dim, window, sink_tokens;
} attention;
void kv_write(const cache *, const layer *, int kv_head, int64_t slot, const float *key, const float *value);
typedef struct {
    int64_t first_token;
    int32_t query_len, kv_len;
    const int32_t *table;
} attention_entry;
int attention_tiles(int query_len, int heads_per_kv_head);
void attention_tile(const attention *, const attention_entry *, int kv_head, int tile);
/* Computes attention of decoding sequences, at most MAX_ROWS rows, that share their first `chunks` chunks of keys. */
void attention_together(const attention *, const attention_entry *, int count, int chunks, int kv_head);
/* Prefetches the entry's first chunk at or after `chunks`. */
void attention_fetch(const attention *, const attention_entry *, int kv_head, int chunks);
int attention_whole_chunks(const cache *, int blocks);

/* convolution.c */
/* Writes a token's inputs of the convolution to the cache. `row` has gates, factors and inputs, [hidden] each. */
void convolution_write(const cache *, int layer, int64_t hidden, int64_t slot, const float *row);
/* Writes out[hidden] for the token at `position`; the blocks of `table` hold its window. */
void convolution_row(const cache *, const layer *, int64_t hidden, const int32_t *table, int64_t position,
                     const float *row, float *out);

/* recurrence.c */
int64_t recurrence_kept(const recurrence *); /* floats at the beginning of a row, which the cache stores for a position */
int64_t recurrence_scratch(const recurrence *); /* scratch floats of a thread */
void recurrence_write(const cache *, const recurrence *, int64_t slot, const float *row);
int recurrence_together(const recurrence *); /* neighbouring heads that are computed together */
/* Computes neighbouring heads of an entry: out[token][heads * value_dim] for its tokens, and the states at block ends. */
void recurrence_heads(const cache *, const recurrence *, const step *, int entry, int head, float *scratch, float *out);
/* Applies gates and norm to one token's output. */
void recurrence_gate(const recurrence *, const float *gates, float *out);

/* lora.c */
typedef struct {
    int32_t adapter, start, count; /* `count` rows from order[start] on */
} lora_group;
typedef struct {
    int32_t *order; /* [rows]: the rows with an adapter, sorted by adapter */
    lora_group *groups; /* [num_adapters] */
    int32_t num_groups;
} lora_rows;
typedef struct {
    const lora *const *adapters;
    float *h; /* [row, ranks]: rows of the current linear, multiplied by A */
    int32_t num_adapters, ranks;
} lora_step;
typedef struct {
    const float *rows; /* [size] each */
    const int64_t *index; /* the rows' numbers; NULL: all rows in order */
    int64_t size;
} lora_input;
/* Row i has the adapter owner[index[i]], or owner[i] if `index` is NULL; -1: no adapter. */
void lora_sort(const lora_step *, const int32_t *owner, const int64_t *index, int64_t count, lora_rows *);
/* `place`: layer * LORA_PLACES + place. Returns whether an adapter of these rows changes that linear. */
bool lora_adapts(const lora_step *, const lora_rows *, int64_t place);
int64_t lora_units(const lora_step *, const lora_rows *, int64_t place); /* units of `lora_shrink` */
void lora_shrink(const lora_step *, const lora_rows *, int64_t place, int64_t unit, const lora_input *);
/* Adds B times h to the sums[count][COLUMNS] of a block for the rows [first, first + count). */
void lora_expand(const lora_step *, const lora_rows *, int64_t place, int64_t column, int64_t width, int64_t first,
                 int64_t count, float *sums);

/* families.c */
typedef struct {
    attention_entry members[MAX_FAMILY];
    int32_t count;
    int32_t chunks; /* chunks of keys that the members share; 0 for a single sequence */
} family;
/* Sorts a step's sequences into families of at most `most`, in the order of their first members. Returns the number of
 * families. With `kept` it sorts the rows that run on after the last keys; `first_token` is then the first row. */
int families_find(const step *, bool kept, int group, const cache *, int window, int most, family *out);
int entry_of(const step *, int64_t token);

#endif

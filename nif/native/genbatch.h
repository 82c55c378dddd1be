/* What the C files call of one another. */
#ifndef GENBATCH_H
#define GENBATCH_H

#include <stdatomic.h>

#include "abi.h"

#define SMALLEST_GROUP 16 /* inputs of a linear that share a scale, at least */
#define MAX_FAMILY 12 /* sequences whose rows meet keys together */
#define CHUNK_KEYS 64 /* keys between two rescalings of the softmax, aligned to absolute positions */

static inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* What multiplies the integers of one group of one row; see gemm_int8.c. */
typedef struct {
    float scale; /* of the group, with the 8 significant bits of bfloat16 */
    float minus; /* -INTEGER_ZERO * scale, exact */
    int32_t start; /* bits of INTEGER_ZERO, less 128 times the sum of the integers */
    float total; /* scale times the sum of the integers */
} group_factors;

/* The same of a group in 24 bits; see gemm_stored_digits.c. */
#define DIGITS 3
typedef struct {
    float scale; /* of the group, a power of two */
    float minus_total; /* scale times the sum of the integers, with the other sign, as the next */
    int32_t minus_digits[DIGITS]; /* the sums of the digits, lowest first */
} digit_factors;

/* Adding a small integer to the bits of this float adds it to the float. */
#define INTEGER_ZERO 12582912.0f /* 1.5 * 2^23: spacing 1, room for +-2^22 */
#define INTEGER_ZERO_BITS 0x4b400000

/* Rows of activations in the form that one kind of weight multiplies, tile by tile (tiles.h). */
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
/* Runs it as thread 0, and in the others that come before it has ended there; returns when all have left. */
void pool_run(pool *, pool_function, void *argument);
void pool_barrier(pool *); /* of all threads, those included that have yet to come */
void pool_add(pool *, atomic_int *count, int enough); /* one more; wakes who waits for `enough` */
void pool_await(pool *, atomic_int *count, int enough); /* until there are `enough`, and what was written before is seen */

/* gemm_*.c: sums[count][COLUMNS] = rows[first .. first + count) x one weight block; whole tiles */
void gemm_f32_block(const linear *, int64_t block, const rows *, int64_t first, int64_t count, float *sums);
void gemm_bf16_block(const linear *, int64_t block, const rows *, int64_t first, int64_t count, float *sums);
void gemm_i8_block(const linear *, int64_t block, const rows *, int64_t first, int64_t count, float *sums);
void gemm_u4_block(const linear *, int64_t block, const rows *, int64_t first, int64_t count, float *sums);
/* The same with the inputs [k, k + depth) in float, [depth][COLUMNS]; k = 0 begins the sums. */
void gemm_f32_depth(const float *w, int64_t k, int64_t depth, const rows *, int64_t first, int64_t count, float *sums);
void gemm_stored_block(int kind, const uint8_t *weights, int64_t k, const rows *, int64_t first, int64_t count,
                       float *sums);
/* `size`: inputs of a row's group, 16 or 32. */
void gemm_stored_int8_block(int kind, const uint8_t *weights, int64_t k, int size, const rows *, int64_t first,
                            int64_t count, float *sums);
void gemm_stored_digits_block(int kind, const uint8_t *weights, int64_t k, int size, const rows *, int64_t first,
                              int64_t count, float *sums);
enum weight_kind gemm_bf16_rows_kind(void); /* whether bfloat16 weights want float or bfloat16 rows */

/* linear.c */
int64_t linear_column(const linear *, int64_t block, int64_t *width); /* a block's first output, and how many it has */
enum finish { STORE, ADD, ACTIVATE }; /* ACTIVATE: see `activate` */
int64_t linear_blocks(const linear *);
enum weight_kind linear_operand(const linear *); /* the form of rows it multiplies */
void linear_block(const linear *, int64_t block, const rows *, int64_t first, int64_t count, float *sums);
/* `sums` [count][COLUMNS] get the bias, and `out` what becomes of them; `pitch`: floats of a row of `out`; `model` tells the
 * activation. */
void linear_finish(const linear *, int64_t block, float *sums, int64_t first, int64_t count, enum finish, const model *,
                   float *out, int64_t pitch);

/* largest.c */
typedef struct {
    float values[COLUMNS];
    int32_t blocks[COLUMNS];
} lane_maxima; /* of one row, as far as one thread has seen it */
void largest_clear(lane_maxima *, int64_t count);
void largest_take(const linear *, int64_t block, const float *sums, int64_t count, lane_maxima *);
void largest_join(const lane_maxima *, largest *); /* `largest` starts at {-INFINITY, any column above all} */

/* check.c */
enum step_error step_check(const step *, const model *, const cache *, int64_t *where);

/* rows.c */
typedef struct {
    float mean, scale;
} norm_factors;
norm_factors norm_look(const model *, const float *x, int64_t size); /* what norms a row, from the whole of it */
/* out[from .. to) of the row's norm; `out` may be `x`. Parts together are, to the bit, the whole. */
void norm_part(const model *, const norm *, norm_factors, const float *x, int64_t from, int64_t to, float *out);
void norm_row(const model *, const norm *, const float *x, int64_t size, float *out);
void embed_row(const table *, int64_t id, float *out); /* scaled */
norm head_norm(const model *, const norm *, int head, int head_dim);
void norm_rms(const float *weight, float eps, int64_t size, float *x); /* in place */
void rope(const model *, const layer *, const step *, float *head, const norm *, int64_t position, float scale);
/* The inputs [from, to), whole groups, of a row of `size` in the form that a linear multiplies. */
void rows_put_part(int kind, const rows *, int64_t row, const float *x, int64_t size, int64_t from, int64_t to);
void rows_put(int kind, const rows *, int64_t row, const float *x, int64_t size);
/* A block's sums, [count][COLUMNS], to activations, at most `room` a row, rows `pitch` floats apart. With gates, COLUMNS / 2
 * gates and as many ups become half as many products. */
void activate(const model *, const float *sums, int64_t count, float *out, int64_t pitch, int64_t room);
void logits_finish(const model *, float *sums, int64_t count); /* of a head without a bias */
void multiply_sigmoid(const float *gates, int64_t count, float *out);
void multiply_silu(const float *gates, int64_t count, float *out);
void multiply_activated(const model *, const float *gates, int64_t count, float *out); /* out[i] *= activation(gates[i]) */

/* experts.c */
typedef struct {
    int32_t expert;
    int32_t start, count; /* rows of the expert, in the order of experts */
    int64_t first, size; /* rows of those that the unit takes, whole tiles */
} expert_panel;

typedef struct {
    float *scores; /* [token, experts->count] */
    int32_t *ids; /* [token, chosen], ascending */
    float *weights; /* [token, chosen] */
    int32_t *places; /* [token, chosen]: the row that computes it */
    int32_t *tokens; /* [row]: for whom */
    int32_t *starts; /* [count + 1]: an expert's rows */
    expert_panel *panels;
    int64_t num_panels;
} choice;
/* What a step needs for its experts: how many rows a token makes, experts in all, inputs of the widest linear. */
typedef struct {
    int64_t chosen, count, k;
} expert_sizes;

expert_sizes experts_sizes(const model *);
void experts_choose(const experts *, const choice *, int64_t token);
/* Sorts the rows of all tokens by expert, so that each expert's weights are read once; in panels of at most `most` tiles. */
void experts_group(const experts *, choice *, int64_t num_tokens, int64_t most);

/* attention.c */
typedef struct {
    const float *queries; /* [token][num_heads * key_dim] at `stride`, roped and scaled */
    float *out; /* [token, num_heads * value_dim] */
    int64_t query_stride;
    const cache *cache;
    const float *sinks; /* [num_heads], or NULL */
    float score_cap; /* 0: none */
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
/* Sequences that decode and share their first `chunks` of keys, at most MAX_ROWS rows. */
void attention_together(const attention *, const attention_entry *, int count, int chunks, int kv_head);
/* Asks for the entry's first chunk, at or behind `chunks`. */
void attention_fetch(const attention *, const attention_entry *, int kv_head, int chunks);
int attention_whole_chunks(const cache *, int blocks);

/* convolution.c */
/* What a layer keeps of a token, as float: `row` holds its gates, factors and inputs, [hidden] each. */
void convolution_write(const cache *, int layer, int64_t hidden, int64_t slot, const float *row);
/* out[hidden] of the token at `position`, whose window lies in the blocks of `table`. */
void convolution_row(const cache *, const layer *, int64_t hidden, const int32_t *table, int64_t position,
                     const float *row, float *out);

/* recurrence.c */
int64_t recurrence_kept(const recurrence *); /* floats that a layer keeps of a position, the first of its row */
int64_t recurrence_scratch(const recurrence *); /* floats that a thread needs */
void recurrence_write(const cache *, const recurrence *, int64_t slot, const float *row);
/* One head of an entry: out[token][heads * value_dim] of its tokens, and the states at the ends of blocks. */
void recurrence_head(const cache *, const recurrence *, const step *, int entry, int head, float *scratch, float *out);
/* What the gates and the norm make of one token's output. */
void recurrence_gate(const recurrence *, const float *gates, float *out);

/* lora.c */
typedef struct {
    int32_t adapter, start, count; /* `count` rows from order[start] on */
} lora_group;
typedef struct {
    int32_t *order; /* [rows]: those that have an adapter, by adapter */
    lora_group *groups; /* [num_adapters] */
    int32_t num_groups;
} lora_rows;
typedef struct {
    const lora *const *adapters;
    float *h; /* [row, ranks]: rows of the linear under way, multiplied by A */
    int32_t num_adapters, ranks;
} lora_step;
typedef struct {
    const float *rows; /* [size] each */
    const int64_t *index; /* which of them; NULL: one after another */
    int64_t size;
} lora_input;
/* Row i has the adapter owner[index[i]], or owner[i] where `index` is NULL; -1 is none. */
void lora_sort(const lora_step *, const int32_t *owner, const int64_t *index, int64_t count, lora_rows *);
/* `place`: layer * LORA_PLACES + place. Whether any of the rows is adapted there; units of `lora_shrink`. */
bool lora_adapts(const lora_step *, const lora_rows *, int64_t place);
int64_t lora_units(const lora_step *, const lora_rows *, int64_t place);
void lora_shrink(const lora_step *, const lora_rows *, int64_t place, int64_t unit, const lora_input *);
/* Adds to sums[count][COLUMNS] of a block what the rows [first, first + count) have in h. */
void lora_expand(const lora_step *, const lora_rows *, int64_t place, int64_t column, int64_t width, int64_t first,
                 int64_t count, float *sums);

/* families.c */
typedef struct {
    attention_entry members[MAX_FAMILY];
    int32_t count;
    int32_t chunks; /* of keys that the members have in common; 0 for one alone */
} family;
/* Sorts a step's sequences into families of at most `most`, in the order of their first members; how many. */
int families_find(const step *, int group, const cache *, int window, int most, family *out);

#endif

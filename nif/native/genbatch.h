/* The types that Python fills in (mirrored in library.py) and what the files call of one another. */
#ifndef GENBATCH_H
#define GENBATCH_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ABI_VERSION 15 /* bumped with any change to the structs below or to what Python calls; library.py compares */
#define SMALLEST_GROUP 16 /* inputs of a linear that share a scale, at least */
#define COLUMNS 32 /* output columns of one weight block */
#define MAX_GROUPS 4 /* layer groups */
#define MAX_ROPES 2 /* tables of cosines and sines */
#define MAX_HEAD_DIM 512
#define MAX_FAMILY 12 /* sequences whose rows meet keys together */
#define LORA_COLUMNS 16 /* outputs whose ranks lie together: one half of a block, gates or ups */
#define CHUNK_KEYS 64 /* keys between two rescalings of the softmax, aligned to absolute positions */

/* Those after WEIGHT_U4 keep the bits of their file: see stored.h. WEIGHT_WIDE is bfloat16 that meets float rows. */
enum weight_kind {
    WEIGHT_F32,
    WEIGHT_BF16,
    WEIGHT_I8,
    WEIGHT_U4,
    WEIGHT_F16,
    WEIGHT_WIDE,
    WEIGHT_Q4_0,
    WEIGHT_Q4_1,
    WEIGHT_Q5_0,
    WEIGHT_Q5_1,
    WEIGHT_Q8_0,
    WEIGHT_Q2_K,
    WEIGHT_Q3_K,
    WEIGHT_Q4_K,
    WEIGHT_Q5_K,
    WEIGHT_Q6_K,
    WEIGHT_IQ4_NL,
    WEIGHT_IQ4_XS,
    WEIGHT_G4_32, /* codes of 4 and of 8 bits in groups of so many inputs, as GPTQ, AWQ and compressed-tensors have them */
    WEIGHT_G4_64,
    WEIGHT_G4_128,
    WEIGHT_G8_32,
    WEIGHT_G8_128,
    WEIGHT_MXFP4,
    WEIGHT_NVFP4,
    WEIGHT_IQ1_S,
    WEIGHT_IQ1_M,
    WEIGHT_IQ2_XXS,
    WEIGHT_IQ2_XS,
    WEIGHT_IQ2_S,
    WEIGHT_IQ3_XXS,
    WEIGHT_IQ3_S,
    WEIGHT_TQ1_0,
    WEIGHT_TQ2_0,
    WEIGHT_N4_32, /* NVFP4 of safetensors: the matrix has a scale beside those of 16 inputs */
    WEIGHT_N4_128,
    WEIGHT_F8_32, /* FP8 (E4M3) with a float32 scale for so many inputs */
    WEIGHT_F8_128,
    WEIGHT_I24 /* of rows alone: floats as integers of 24 bits, see gemm_stored_digits.c */
};
enum kv_kind { KV_F32, KV_BF16, KV_I8 };

/* Outputs of a linear whose weights keep the form of their file. */
typedef struct {
    int32_t kind; /* WEIGHT_F32, or one behind WEIGHT_U4 */
    int32_t n; /* outputs */
    int32_t column; /* the first of them in the linear */
    int32_t first_block;
    const void *weights;
} part;

/* y = scales * x W^T + bias. Weights lie in blocks of COLUMNS outputs; see each gemm file for the block. */
typedef struct {
    int32_t kind; /* with parts: of the rows that they multiply */
    int32_t n; /* outputs; blocks are padded to a multiple of COLUMNS */
    int32_t k; /* inputs, padded to a multiple of `group` */
    int32_t group; /* inputs that share a scale; 1 for float kinds */
    const void *weights; /* NULL with parts */
    const float *bias; /* [padded n], or NULL */
    const float *scales; /* [padded n], of the products; or NULL */
    const part *parts; /* one for each type of the file, or NULL; two that begin at block 0: gates, and ups */
    int32_t num_parts;
    int32_t pad;
} linear;

enum norm_kind { NORM_RMS, NORM_LAYER };
enum qk_norm { QK_NONE, QK_HEAD, QK_HEADS, QK_WHOLE }; /* each head by one set of weights, by its own, all as one row */
enum activation { SILU, GELU, GELU_TANH, RELU_SQUARED, CLAMPED_SWIGLU };

typedef struct {
    const float *weight; /* NULL: no norm here */
    const float *bias; /* or NULL */
} norm;

/* An MLP of which each token takes `chosen` parts. The last `shared` of them are taken by every token. */
typedef struct {
    linear router; /* a score per expert that is chosen, then one for those that are shared, if `gated` */
    const linear *gate_up, *down; /* [count] */
    int32_t count, chosen;
    int32_t normalised; /* whether the weights of those chosen sum to 1; else they are shares of all experts' */
    int32_t shared;
    int32_t gated; /* whether the shared ones weigh the sigmoid of their score; else 1 */
    int32_t sigmoid; /* whether a score's weight is its sigmoid, and not its share */
    int32_t groups, best_groups; /* experts come from the best groups alone; 1 and 1: from all */
    const float *correction; /* [count - shared], added to weights where experts are chosen; or NULL */
    const float *scales; /* [count - shared], of each one's weight; or NULL */
    norm router_norm; /* of the router's input, where it is not the MLP's; or NULL */
    norm input_norm; /* of the experts' input, with a norm of the router's own */
    norm sum_norm, beside_norm; /* of the sum of experts, and of what the MLP beside them gives; or NULL: there is none */
    float scale; /* of the chosen ones' weights */
    int32_t intermediate; /* of one of them */
} experts;

/* Heads that each keep a matrix of keys by values, which every token decays and adds to. A token's row of the linear
 * `inputs` is queries, keys, values (the channels of a short convolution), then a step and, if it `corrects`, a strength
 * for each head, then gates. */
typedef struct {
    linear inputs, out;
    const float *taps; /* [kernel, channels] */
    const float *tap_bias; /* [channels], or NULL */
    const float *rates; /* [heads]: a state decays by exp(rate * softplus(step + its bias)) */
    const float *step_bias; /* [heads] */
    const float *skips; /* [heads]: of the value, added to the output; or NULL */
    const int32_t *places; /* [heads]: where a head's outputs stand among those of all, and its gates */
    norm gate_norm; /* [heads * value_dim], or none */
    int32_t kernel, channels, heads, key_heads, key_dim, value_dim;
    int32_t corrects; /* whether a value's error against the state is added, by norms of keys and queries; else the value */
    int32_t norm_groups; /* of the outputs, each normed by itself */
    int32_t gate_first; /* whether the gate comes before the norm */
    int32_t group, index_in_group; /* as a layer's */
    float gate_eps; /* of gate_norm */
    float strength; /* what the sigmoid of a token's strength is multiplied with */
    int32_t pad;
} recurrence;

/* A layer attends or convolves (if `qkv` has outputs), or recurs, or both, and adds the sum of both; then it has an MLP or
 * experts. Either half may be absent. */
typedef struct {
    linear qkv, out;
    linear gate_up, down; /* gate_up: the ups alone where the model has no gates; neither is used with experts */
    norm attention_norm, mlp_norm; /* of what goes in */
    norm attention_post, mlp_post; /* of what comes out, before it is added to the residual */
    norm q_norm, k_norm, v_norm;
    linear input_gate, input_projection; /* of the layer's own embedding of each token, if the model has some */
    norm input_post; /* of what the projection gives */
    const float *sinks; /* [num_heads], a score that takes weight and gives no value; or NULL */
    const float *taps; /* [window, hidden]: the layer convolves, and qkv gives gates, factors, inputs; NULL: it attends */
    const float *tap_bias; /* [hidden], or NULL */
    const recurrence *recurrence; /* or NULL */
    const experts *experts; /* or NULL */
    int32_t group; /* layer group, and this layer's place in it */
    int32_t index_in_group;
    int32_t window; /* positions attended to; INT32_MAX for all */
    int32_t rope; /* its table; -1: positions are not rotated */
    int32_t rotary_dim; /* leading elements of a head that are rotated */
    int32_t num_kv_heads, key_dim, value_dim; /* heads of keys and values, and their elements */
    int32_t shares; /* whether it reads what an earlier layer wrote at its place, and `qkv` gives queries alone */
    int32_t intermediate; /* of the MLP */
    int32_t sink_tokens; /* first positions that are attended to beside the window */
    float scale; /* of what the layer gives */
} layer;

/* Rows of embeddings: WEIGHT_F32 or WEIGHT_BF16, row-major; or blocks as in a part. */
typedef struct {
    const void *rows;
    int32_t kind;
    int32_t width; /* of a row */
    int32_t count; /* rows; an id beyond them has the first */
    float scale;
} table;

typedef struct {
    int32_t hidden, intermediate, num_heads, num_layers, vocab_size, num_groups;
    int32_t norm_kind, qk_norm, activation;
    int32_t gated; /* whether the MLP multiplies its activations with ups */
    int32_t parallel; /* whether the MLP reads what attention reads, and not what attention made of it */
    int32_t interleaved; /* whether neighbours are rotated together, or the halves of what is rotated */
    int32_t num_ropes;
    int32_t gated_attention; /* whether `qkv` gives gates too, the sigmoid of which multiplies what attention gives */
    float norm_eps, score_scale;
    float score_cap, logit_cap; /* x becomes cap * tanh(x / cap); 0: as it is */
    float residual_scale; /* of what is added to the residual */
    float logit_divisor;
    float gate_slope, gate_limit; /* of CLAMPED_SWIGLU */
    int32_t layer_width; /* of an embedding that a layer has of its own; 0: none has */
    float inputs_scale, joined_scale; /* of what `inputs` gives; of its norm and a layer's embedding together */
    table embedding, layer_embedding; /* the second: all layers' embeddings of a token in one row */
    linear inputs; /* from a token's embedding to what is added to each layer's own */
    norm inputs_norm; /* [layer_width] */
    norm embedding_norm, final_norm;
    const layer *layers;
    linear head;
} model;

/* The blocks of one layer group: [layer in group][block][kv head][keys then values]. */
typedef struct {
    uint8_t *base;
    int64_t layer_stride, block_stride, head_stride, values_offset; /* bytes */
    int32_t num_blocks;
    int32_t block_size;
    int32_t kind;
    int32_t padded_keys; /* block_size rounded up to 16: the row length of the transposed keys */
} cache;

/* Of some ranks, and of LORA_COLUMNS outputs that they give to: where b[count][LORA_COLUMNS] begins, in rows. */
typedef struct {
    int32_t first, count;
    int64_t at;
} lora_half;

/* What an adapter adds to one linear. Matrices side by side, as queries and keys are, have their ranks one after
 * another. */
typedef struct {
    const float *a; /* [ranks, inputs]; NULL: nothing is added */
    const float *scales; /* [ranks] */
    const float *b;
    const lora_half *halves; /* one for every LORA_COLUMNS outputs */
    int32_t ranks, pad;
} lora;

enum lora_place { LORA_QKV, LORA_OUT, LORA_GATE_UP, LORA_DOWN, LORA_PLACES }; /* within a layer */

/* A row's largest logit, NaN if the row holds one, and the lowest token id that has it. */
typedef struct {
    float value;
    int32_t column;
} largest;

typedef struct {
    int32_t num_tokens, num_entries, num_logit_rows, num_positions; /* the last: rows of cosines and sines */
    const int64_t *input_ids, *positions; /* [num_tokens] */
    const int32_t *query_starts, *kv_lens; /* [num_entries + 1], [num_entries] */
    const int64_t *slots[MAX_GROUPS]; /* [num_tokens] */
    const int32_t *block_tables[MAX_GROUPS]; /* [num_entries, table_width] */
    int32_t table_width[MAX_GROUPS];
    const int64_t *logit_rows; /* [num_logit_rows] */
    const float *cosines[MAX_ROPES], *sines[MAX_ROPES]; /* [num_positions, rotary_dim / 2] of the layers with the table */
    float *logits; /* [num_logit_rows, vocab_size], or NULL: not wanted */
    largest *best; /* [num_logit_rows], or NULL */
    int32_t num_adapters, lora_ranks; /* the second: most ranks of any linear */
    const lora *const *adapters; /* [num_adapters][num_layers * LORA_PLACES] */
    const int32_t *adapter_of; /* [num_tokens], -1: none; NULL without adapters */
} step;

/* What is wrong with a step; the offending index goes to *where. */
enum step_error {
    STEP_OK,
    STEP_TOKEN_ID, /* where: token */
    STEP_POSITION, /* where: token */
    STEP_SLOT, /* where: token */
    STEP_QUERY_STARTS, /* where: entry */
    STEP_KV_LEN, /* where: entry */
    STEP_BLOCK_TABLE, /* where: entry */
    STEP_LOGIT_ROW, /* where: row */
    STEP_ADAPTER, /* where: token */
    STEP_NO_MEMORY,
};

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
bool digits_pay(void); /* whether this machine multiplies bytes faster than floats */
int64_t stored_block_bytes(int kind, int64_t k); /* of COLUMNS outputs */
void stored_row(int kind, const uint8_t *weights, int64_t k, int column, float *out);
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

/* memory.c */
void *memory_allocate(int64_t bytes);
void memory_free(void *, int64_t bytes);

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
int64_t recurrence_bytes(const recurrence *, int block_size); /* of a block */
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

/* The interface between Python and C: constants, structs and functions. abi.py reads this file, so nothing is written twice.
 * It reads plain C: `#define NAME number`, `enum name { A, B };`, `typedef struct { ... } name;` and prototypes. */
#ifndef ABI_H
#define ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define COLUMNS 32 /* output columns of one weight block */
#define MAX_GROUPS 4 /* layer groups */
#define MAX_ROPES 2 /* tables of cosines and sines */
#define MAX_HEAD_DIM 576
#define MAX_STREAMS 8 /* streams of the residual */
#define LORA_COLUMNS 16 /* outputs of half a block (gates or ups), for which an adapter's ranks are stored together */

/* Formats of weights. Formats after WEIGHT_U4 keep the bits of the file: see stored.h. WEIGHT_WIDE is bfloat16 weights
 * times float rows. */
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
    WEIGHT_G4_32, /* GPTQ, AWQ, compressed-tensors: codes of 4 or 8 bits, and the inputs of a group */
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
    WEIGHT_Q1_0,
    WEIGHT_Q2_0,
    WEIGHT_N4_32, /* NVFP4 of safetensors: a scale for 16 inputs, and one for the matrix */
    WEIGHT_N4_128,
    WEIGHT_F8_32, /* FP8 (E4M3), and the inputs that share a float32 scale */
    WEIGHT_F8_128,
    WEIGHT_I24 /* a format of rows only: floats as integers of 24 bits, see gemm_stored_digits.c */
};
enum kv_kind { KV_F32, KV_BF16, KV_I8 };

/* Some outputs of a linear, with weights in the file's format. */
typedef struct {
    int32_t kind; /* WEIGHT_F32, or a kind after WEIGHT_U4 */
    int32_t n; /* outputs */
    int32_t column; /* the place of the first output in the linear */
    int32_t first_block;
    const void *weights;
} part;

/* y = scales * x W^T + bias. Weights lie in blocks of COLUMNS outputs; see each gemm file for the block. */
typedef struct {
    int32_t kind; /* a weight_kind; with parts, the format of the rows */
    int32_t n; /* outputs; blocks are padded to a multiple of COLUMNS */
    int32_t k; /* inputs, padded to a multiple of `group` */
    int32_t group; /* inputs that share a scale; 1 for float kinds */
    const void *weights; /* NULL with parts */
    const float *bias; /* [padded n], or NULL */
    const float *scales; /* [padded n], factors of the products, or NULL */
    /* a part for each format in the file, or NULL. Two parts that both begin at block 0 are gates and ups. */
    const part *parts;
    int32_t num_parts;
    int32_t pad;
} linear;

enum norm_kind { NORM_RMS, NORM_LAYER };
/* QK_HEAD: all heads share the weights; QK_HEADS: each head has its own; QK_WHOLE: all heads are one row */
enum qk_norm { QK_NONE, QK_HEAD, QK_HEADS, QK_WHOLE };
enum activation { SILU, GELU, GELU_TANH, RELU_SQUARED, CLAMPED_SWIGLU, XIELU };

typedef struct {
    const float *weight; /* NULL: no norm here */
    const float *bias; /* or NULL */
} norm;

/* A mixture of experts: each token uses `chosen` of `count`. The last `shared` experts are used by every token. */
typedef struct {
    linear router; /* a score for each expert that can be chosen, then one score for the shared experts if `gated` */
    const linear *gate_up, *down; /* [count] */
    int32_t count, chosen;
    int32_t normalised; /* whether the chosen experts' weights are scaled to the sum 1 */
    int32_t shared;
    int32_t gated; /* whether the shared experts' weight is the sigmoid of their score; else it is 1 */
    int32_t sigmoid; /* whether an expert's weight is the sigmoid of its score; else the softmax */
    int32_t groups, best_groups; /* experts are chosen from the best groups only; 1 and 1: from all experts */
    const float *correction; /* [count - shared], added to the weights when experts are chosen, or NULL */
    const float *scales; /* [count - shared], factors of the weights, or NULL */
    norm router_norm; /* of the router's input, if the router has a separate norm */
    norm input_norm; /* of the experts' input, if the router has a separate norm */
    /* of the experts' sum, and of the output of an MLP beside the experts, if the layer has one */
    norm sum_norm, beside_norm;
    float scale; /* a factor of the chosen experts' weights */
    /* If not 0, experts are chosen one after another. An expert's weight is then a softmax over the scores that are left and
     * within twice `jitter` of the highest score, relative to the larger magnitude. */
    float jitter;
    int32_t intermediate; /* an expert's inner size */
} experts;

/* Heads with a recurrent state, a matrix of keys by values. Every token decays the state and adds to it. A row of the linear
 * `inputs` has queries, keys and values (the channels of a short convolution), then for each head a step and, if
 * `corrects`, a strength, then gates. */
typedef struct {
    linear inputs, out;
    const float *taps; /* [kernel, channels] */
    const float *tap_bias; /* [channels], or NULL */
    const float *rates; /* [heads]: a state decays by exp(rate * softplus(step + step_bias)) */
    const float *step_bias; /* [heads] */
    const float *skips; /* [heads]: factors of the values that are added to the output; or NULL */
    const int32_t *places; /* [heads]: the place of a head's outputs and gates in the row of all heads */
    norm gate_norm; /* [heads * value_dim], or no weights */
    int32_t kernel, channels, heads, key_heads, key_dim, value_dim;
    int32_t corrects; /* whether the delta rule is used, with normed keys and queries; else the value itself is added */
    int32_t norm_groups; /* groups of outputs; each is normed separately */
    int32_t gate_first; /* whether outputs are gated before the norm */
    int32_t group, index_in_group; /* as in `layer` */
    float gate_eps; /* of gate_norm */
    float strength; /* a factor of the sigmoid of a token's strength */
    int32_t pad;
} recurrence;

/* Compressed keys and values: the keys and values of all heads are linear functions of a token's latent; see latent.c. A row of
 * `qkv` has the queries (or the input of `queries`), then the rotated elements of the key, then the latent. In a head's query
 * the rotated elements come last. */
typedef struct {
    linear queries; /* without outputs if `qkv` gives the queries */
    norm query_norm, norm; /* of the input of `queries`, and of the latent */
    const linear *meet, *give; /* [num_heads]: K^T, a factor of queries; V, a factor of sums of latents */
    int32_t query_rank, rank; /* elements of the input of `queries` (0: no such input), and of the latent */
    int32_t rotated, plain; /* elements of a head's query: rotated, and not rotated */
    int32_t value_dim; /* elements of a head's value */
    float eps; /* epsilon of both norms */
} latent;

/* Alternating updates (AltUp): the residual of a token has several streams. A layer predicts every stream from all streams,
 * computes the active one, and corrects all by the difference. A product of low rank (LAuReL) runs beside attention. See
 * altup.c. */
typedef struct {
    norm router_norm;
    const float *router; /* [num_streams, hidden]: gives a route for each stream */
    const float *predict; /* [to, from, route] of num_streams each */
    const float *correct; /* [to, route] */
    const float *output_scale; /* [hidden], factors of the active stream before the layer's embedding is applied; or NULL */
    linear left, right; /* to the low rank and back */
    norm post; /* of the output of `right` */
} altup;

/* The first half of a layer attends or convolves (if `qkv` has outputs), or recurs, or does both and adds both outputs. The
 * second half is an MLP or experts. Either half may be missing. */
typedef struct {
    linear qkv, out;
    linear gate_up, down; /* gate_up has only ups if the model has no gates; unused with experts */
    norm attention_norm, mlp_norm; /* of the inputs */
    norm attention_post, mlp_post; /* of the outputs, before they are added to the residual */
    norm q_norm, k_norm, v_norm;
    linear input_gate, input_projection; /* for the layer's embedding of each token; without outputs if it has none */
    norm input_post; /* of the projection's output */
    const float *sinks; /* [num_heads], scores that take part in the softmax and have no value, or NULL */
    /* [window, hidden]: the layer convolves, and qkv gives gates, factors and inputs; NULL: the layer attends */
    const float *taps;
    const float *tap_bias; /* [hidden], or NULL */
    const recurrence *recurrence; /* or NULL */
    const latent *latent; /* or NULL */
    const experts *experts; /* or NULL */
    const altup *altup; /* or NULL */
    int32_t group; /* the layer group */
    int32_t index_in_group; /* the layer's place in its group */
    int32_t window; /* positions that a token attends to; INT32_MAX: all positions */
    int32_t rope; /* the index of the table of rotations; -1: no rotation */
    int32_t rotary_dim; /* leading elements of a head that are rotated */
    int32_t num_kv_heads, key_dim, value_dim; /* heads of keys and values, and elements of a head */
    /* whether the layer reads an earlier layer's keys and values at `index_in_group`, and `qkv` gives only queries */
    int32_t shares;
    int32_t intermediate; /* the MLP's inner size */
    int32_t sink_tokens; /* first positions, to which a token attends in addition to the window */
    float scale; /* a factor of the layer's output */
    /* for XIELU: square * x^2 + slope * x above 0, curve * (exp(min(x, least)) - 1 - x) + slope * x below */
    float square, curve, slope, least;
    /* whether gates count only above their mean plus `deviations` standard deviations; then `gate_up` gives all gates
     * before all ups */
    int32_t sparse;
    float deviations;
} layer;

/* Rows of embeddings: row-major in WEIGHT_F32 or WEIGHT_BF16, or blocks as in a part. */
typedef struct {
    const void *rows;
    int32_t kind;
    int32_t width; /* elements of a row */
    int32_t count; /* rows; an id of at least `count` gets the first row */
    float scale;
} table;

/* The input of a model that predicts for another model: a token's embedding, and the input of the other model's head at the
 * position before (the state). The prediction is the token that follows. */
typedef struct {
    table embedding; /* the other model's embeddings */
    norm embedding_norm, state_norm; /* of the two halves */
    linear input; /* from both halves to a row of the predicting model */
    linear output; /* from the input of its head to the state for the next prediction; without outputs: the same row */
} pair;

/* A head over clusters of tokens: a row gets the logits of the tokens in its best clusters. All other tokens get the least of
 * these logits minus 1. The head's outputs are in the order of the clusters, which have the same size, a multiple of COLUMNS. */
typedef struct {
    linear centroids; /* a score for each cluster */
    const int32_t *tokens; /* [vocab_size]: the token of each output */
    int32_t count, chosen; /* clusters, and clusters that a row chooses */
} clusters;

typedef struct model {
    int32_t hidden, intermediate, num_heads, num_layers, vocab_size, num_groups;
    int32_t norm_kind, qk_norm, activation;
    int32_t gated; /* whether the MLP multiplies its activations with ups */
    /* whether the MLP and attention read the same row; else the MLP reads the row with attention's output added */
    int32_t parallel;
    int32_t interleaved; /* whether rotation pairs neighbours; else it pairs elements that are half a head apart */
    int32_t norms_rotated; /* whether norms of queries and keys follow the rotation */
    int32_t num_ropes;
    /* gates of a head, after the values of `qkv`: 0, 1 or value_dim; their sigmoid multiplies the head's output */
    int32_t head_gates;
    float norm_eps, score_scale;
    float score_cap, logit_cap; /* x becomes cap * tanh(x / cap); 0: no cap */
    float residual_scale; /* a factor of everything added to the residual */
    float logit_divisor;
    float gate_slope, gate_limit; /* for CLAMPED_SWIGLU */
    int32_t layer_width; /* width of a layer's embeddings; 0: layers have no embeddings */
    /* factors of the output of `inputs`, and of its norm plus the layer's embedding */
    float inputs_scale, joined_scale;
    table embedding, layer_embedding; /* layer_embedding: a row has a token's embeddings for all layers */
    linear inputs; /* from a token's embedding to addends of all layers' embeddings */
    norm inputs_norm; /* [layer_width] */
    int32_t num_streams, active_stream; /* of the residual, with altup; else 0 */
    linear split; /* from a token's embedding to all streams but the first */
    /* [num_streams]: applied to the streams before they are averaged; without outputs for the first stream */
    const linear *merge;
    norm embedding_norm, final_norm;
    const layer *layers;
    const pair *pair; /* NULL: the model reads only tokens */
    const clusters *clusters; /* of the head; NULL: each row gets every logit */
    const struct model *predictor; /* predicts for this model, over the same caches; or NULL */
    int32_t writes; /* whether layers write keys; else a step has one token of a sequence, at the position after its last key */
    int32_t pad;
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

/* The ranks [first, first + count) that reach LORA_COLUMNS outputs, and the first row of their b[count][LORA_COLUMNS]. */
typedef struct {
    int32_t first, count;
    int64_t at;
} lora_half;

/* An adapter's addend to one linear. If the linear merges several matrices, such as queries and keys, their ranks follow one
 * another. */
typedef struct {
    const float *a; /* [ranks, inputs]; NULL: nothing is added */
    const float *scales; /* [ranks] */
    const float *b;
    const lora_half *halves; /* one for every LORA_COLUMNS outputs */
    int32_t ranks, pad;
} lora;

enum lora_place { LORA_QKV, LORA_OUT, LORA_GATE_UP, LORA_DOWN, LORA_PLACES }; /* within a layer */

/* A row's largest logit, or NaN if the row has a NaN, and the lowest token id with this logit. */
typedef struct {
    float value;
    int32_t column;
} largest;

typedef struct {
    int32_t num_tokens, num_entries, num_rows, num_logit_rows, num_positions; /* num_positions: rows of cosines and sines */
    const int64_t *input_ids, *positions; /* [num_tokens] */
    const int32_t *query_starts, *kv_lens; /* [num_entries + 1], [num_entries] */
    const int64_t *slots[MAX_GROUPS]; /* [num_tokens] */
    const int32_t *block_tables[MAX_GROUPS]; /* [num_entries, table_width] */
    int32_t table_width[MAX_GROUPS];
    const int64_t *rows; /* [num_rows]: the tokens that run on after the last keys; the first num_logit_rows get logits */
    const float *cosines[MAX_ROPES], *sines[MAX_ROPES]; /* [num_positions, rotary_dim / 2] */
    float *logits; /* [num_logit_rows, vocab_size], or NULL */
    largest *best; /* [num_logit_rows], or NULL */
    float *states_out; /* [num_rows, hidden]: receives the head's inputs, or the pair's outputs; or NULL */
    const float *states; /* [num_tokens, width of the pair's embedding]: the predictor reads them; NULL: the model itself runs */
    int32_t num_adapters, lora_ranks; /* lora_ranks: the most ranks of any linear */
    const lora *const *adapters; /* [num_adapters][num_layers * LORA_PLACES] */
    const int32_t *adapter_of; /* [num_tokens], -1: no adapter; NULL without adapters */
} step;

/* Errors of a step; *where receives the wrong index. */
enum step_error {
    STEP_OK,
    STEP_TOKEN_ID, /* where: token */
    STEP_POSITION, /* where: token */
    STEP_SLOT, /* where: token */
    STEP_QUERY_STARTS, /* where: entry */
    STEP_KV_LEN, /* where: entry */
    STEP_BLOCK_TABLE, /* where: entry */
    STEP_ROW, /* where: row */
    STEP_ADAPTER, /* where: token */
    STEP_NO_MEMORY,
};

/* memory.c */
void *memory_allocate(int64_t bytes); /* zeroed; NULL: the system refused */
void memory_free(void *memory, int64_t bytes);
/* 0: the disk cannot read these pages, and a use of them would end the process (SIGBUS) */
int64_t readable(const void *mapped, int64_t bytes);
int64_t checksum(const uint64_t *words, int64_t bytes); /* detects damage, not forgery; `bytes` is a multiple of 8 */

/* step.c */
typedef struct engine engine;
/* `caches`: [num_groups]. The model and the caches must outlive the engine. NULL: no memory. */
engine *engine_create(const model *m, const cache *caches, int num_threads);
void engine_destroy(engine *e);
/* Allocates `bytes` bytes of buffers, and writes to the first ones, so that small steps wait for no pages. false: no memory. */
bool engine_reserve(engine *e, int64_t bytes);
int engine_step(engine *e, const step *s, int64_t *where); /* a step_error */
int64_t step_bytes(const model *m, const step *s, int threads); /* bytes of a step's buffers; reads only the counts of `s` */

/* recurrence.c */
int64_t recurrence_bytes(const recurrence *r, int block_size); /* bytes of a block */

/* linear.c: computes out[count][n] from x[count][size], for tests; nonzero: no memory */
int linear_probe(const linear *l, const float *x, int64_t count, int64_t size, float *out);

/* pack.c: packs the blocks [first, end) of a matrix [n, k] to their places in `out`; false: the format cannot hold the matrix */
void pack_f32(const float *matrix, int64_t n, int64_t k, int64_t first, int64_t end, float *out);
void pack_bf16(const float *matrix, int64_t n, int64_t k, int64_t first, int64_t end, uint16_t *out);
void pack_i8(const float *matrix, int64_t n, int64_t k, int64_t group, int64_t first, int64_t end, uint8_t *out);
bool pack_u4(const float *matrix, int64_t n, int64_t k, bool nearest, float tolerance, int64_t first, int64_t end,
             uint8_t *out);
/* pack_stored.c: the same for rows in a file's format; false: a scale is NaN or infinite */
bool pack_stored(int kind, const uint8_t *patterns, const uint8_t *const *rows, int64_t n, int64_t k, int64_t first,
                 int64_t end, uint8_t *out);

/* gemm_stored.c */
int64_t stored_block_bytes(int kind, int64_t k); /* bytes of COLUMNS outputs */
void stored_row(int kind, const uint8_t *weights, int64_t k, int column, float *out);
bool digits_pay(void); /* whether this machine multiplies bytes faster than floats */

#endif

/* Recurrent layers: gated delta nets and Mamba 2, head by head and block by block.
 *
 * A block has, as floats, the layer's inputs of each position, then each head's state at the end of the block. A token is
 * computed from the state at the end of the previous block and from the inputs of its own block, in order. So its bits depend
 * neither on prompt chunks nor on the batch. A state is [value_dim / PANEL][key_dim][PANEL], padded with zeros. One panel
 * stays in the L1 cache during the tokens of a block. */
#include <math.h>

#include "genbatch.h"
#include "simd.h"

#define PANEL 32 /* values */
#define VECTORS (PANEL / VL)
#define KEYS (VECTORS < 4 ? 4 : 2) /* keys at a time, so that eight sums are in flight */
#define RUN 16 /* tokens that are prepared together */
#define MOST_HEADS 4 /* heads that share the convolutions of their query and key */
#define LEAST_SQUARE 1e-6f
#define LINEAR_FROM 20.0f /* from this number on softplus(x) is x, as in torch */

static int64_t keys_of(const recurrence *r) { return padded(r->key_dim, 16); }
static int64_t values_of(const recurrence *r) { return padded(r->value_dim, PANEL); }
static int64_t state_of(const recurrence *r) { return padded(r->key_dim, KEYS) * values_of(r); }

int recurrence_together(const recurrence *r)
{
    int heads = MOST_HEADS;
    while (r->heads / r->key_heads % heads) heads--;
    return heads;
}

int64_t recurrence_kept(const recurrence *r) { return r->channels + (r->corrects ? 2 : 1) * r->heads; }

int64_t recurrence_bytes(const recurrence *r, int block_size)
{
    return (int64_t)sizeof(float) * (padded(block_size * recurrence_kept(r), 16) + r->heads * state_of(r));
}

int64_t recurrence_scratch(const recurrence *r)
{
    const int heads = recurrence_together(r);
    return padded(heads * state_of(r) + RUN * (2 * keys_of(r) + heads * values_of(r)), 16);
}

static float *block_at(const cache *c, const recurrence *r, int32_t block)
{
    return (float *)(c->base + r->index_in_group * c->layer_stride + block * c->block_stride);
}

static float *state_at(const cache *c, const recurrence *r, int32_t block, int head)
{
    return block_at(c, r, block) + padded(c->block_size * recurrence_kept(r), 16) + head * state_of(r);
}

void recurrence_write(const cache *c, const recurrence *r, int64_t slot, const float *row)
{
    const int64_t kept = recurrence_kept(r);
    float *block = block_at(c, r, (int32_t)(slot / c->block_size));
    memcpy(block + slot % c->block_size * kept, row, sizeof(float) * (size_t)kept);
}

ALWAYS_INLINE vf load_some(const float *p, int64_t count)
{
    vf x = {0};
    if (count >= VL) return vf_load(p);
    if (count > 0) memcpy(&x, p, sizeof(float) * (size_t)count);
    return x;
}

/* Computes the convolution of `count` channels and SiLU; `out` has room for a multiple of 16 and is padded with zeros.
 *
 * inputs: the inputs of each tap; NULL for positions before the text, where inputs are zeros. */
static void convolve(const recurrence *r, const float *const *inputs, int64_t channel, int64_t count, float *out)
{
    for (int64_t i = 0; i < padded(count, 16); i += VL) {
        vf sum = r->tap_bias ? load_some(r->tap_bias + channel + i, count - i) : (vf){0};
        for (int64_t tap = 0; tap < r->kernel; tap++) {
            if (!inputs[tap]) continue;
            const vf x = load_some(inputs[tap] + channel + i, count - i);
            sum = vf_fma(load_some(r->taps + tap * r->channels + channel + i, count - i), x, sum);
        }
        vf_store(out + i, sum / (vf_exp(-sum) + 1.0f));
    }
}

/* Divides a vector by its length and multiplies it by a factor. */
static void normalise(float *x, int64_t padded_count, float scale)
{
    vf squares = {0};
    for (int64_t i = 0; i < padded_count; i += VL) {
        const vf v = vf_load(x + i);
        squares = vf_fma(v, v, squares);
    }
    const float factor = scale / sqrtf(vf_sum(squares) + LEAST_SQUARE);
    for (int64_t i = 0; i < padded_count; i += VL) vf_store(x + i, vf_load(x + i) * factor);
}

/* One head's inputs for a token; query is NULL if the token's output is not needed. */
typedef struct {
    const float *query, *key;
    float *value, decay, strength;
} moment;

static float softplus(float x) { return x > LINEAR_FROM ? x : log1pf(expf(x)); }

/* Computes the inputs of neighbouring heads; `all` has one moment for each head. `asks`: whether the output is needed. */
static void prepare(const cache *c, const recurrence *r, const int32_t *table, int64_t position, int head, int heads,
                    bool asks, float *row, moment *all)
{
    const int64_t group = head / (r->heads / r->key_heads), all_keys = (int64_t)r->key_heads * r->key_dim;
    const int64_t width = recurrence_kept(r), keys = keys_of(r);
    const float *inputs[r->kernel];
    for (int64_t tap = 0; tap < r->kernel; tap++) {
        const int64_t at = position - r->kernel + 1 + tap;
        inputs[tap] = at < 0 ? NULL : block_at(c, r, table[at / c->block_size]) + at % c->block_size * width;
    }
    const float *scalars = inputs[r->kernel - 1] + r->channels;
    if (asks) convolve(r, inputs, group * r->key_dim, r->key_dim, row);
    convolve(r, inputs, all_keys + group * r->key_dim, r->key_dim, row + keys);
    if (r->corrects) {
        if (asks) normalise(row, keys, 1.0f / sqrtf((float)r->key_dim));
        normalise(row + keys, keys, 1.0f);
    }
    for (int i = 0; i < heads; i++) {
        float *value = row + 2 * keys + i * values_of(r);
        convolve(r, inputs, 2 * all_keys + (int64_t)(head + i) * r->value_dim, r->value_dim, value);
        for (int64_t j = padded(r->value_dim, 16); j < values_of(r); j++) value[j] = 0;
        const float step = softplus(scalars[head + i] + r->step_bias[head + i]);
        const float strength = r->corrects ? r->strength / (1.0f + expf(-scalars[r->heads + head + i])) : step;
        all[i] = (moment){asks ? row : NULL, row + keys, value, expf(r->rates[head + i] * step), strength};
    }
}

/* Adds sums in the same order for every caller. */
ALWAYS_INLINE void add_up(vf sums[KEYS][VECTORS], vf found[VECTORS])
{
    UNROLL for (int j = 0; j < VECTORS; j++) {
        found[j] = sums[0][j] + sums[1][j];
        if (KEYS == 4) found[j] += sums[2][j] + sums[3][j];
    }
}

/* Multiplies a panel of the state by a key. */
ALWAYS_INLINE void recall(const float *state, const float *key, int64_t key_dim, vf found[VECTORS])
{
    vf sums[KEYS][VECTORS];
    UNROLL for (int k = 0; k < KEYS; k++) UNROLL for (int j = 0; j < VECTORS; j++) sums[k][j] = (vf){0};
    for (int64_t i = 0; i < key_dim; i += KEYS, state += KEYS * PANEL)
        UNROLL for (int k = 0; k < KEYS; k++) {
            const vf x = vf_set1(key[i + k]);
            UNROLL for (int j = 0; j < VECTORS; j++)
                sums[k][j] = vf_fma(vf_load(state + k * PANEL + j * VL), x, sums[k][j]);
        }
    add_up(sums, found);
}

/* Decays a panel of the state and adds key x added. If `asks`, `found` becomes the panel times the query. */
ALWAYS_INLINE void advance(float *state, const moment *m, const vf added[VECTORS], int64_t key_dim, bool asks,
                           vf found[VECTORS])
{
    vf sums[KEYS][VECTORS];
    const vf decay = vf_set1(m->decay);
    UNROLL for (int k = 0; k < KEYS; k++) UNROLL for (int j = 0; j < VECTORS; j++) sums[k][j] = (vf){0};
    for (int64_t i = 0; i < key_dim; i += KEYS, state += KEYS * PANEL)
        UNROLL for (int k = 0; k < KEYS; k++) {
            const vf key = vf_set1(m->key[i + k]), query = asks ? vf_set1(m->query[i + k]) : key;
            UNROLL for (int j = 0; j < VECTORS; j++) {
                const vf x = vf_fma(key, added[j], vf_load(state + k * PANEL + j * VL) * decay);
                vf_store(state + k * PANEL + j * VL, x);
                if (asks) sums[k][j] = vf_fma(x, query, sums[k][j]);
            }
        }
    if (asks) add_up(sums, found);
}

/* Computes one token on one panel. The output replaces the value. */
static void pass(const recurrence *r, const moment *m, float *state, int64_t panel, int head)
{
    vf found[VECTORS], values[VECTORS], added[VECTORS];
    UNROLL for (int j = 0; j < VECTORS; j++) values[j] = vf_load(m->value + panel * PANEL + j * VL);
    if (r->corrects) {
        recall(state, m->key, r->key_dim, found);
        UNROLL for (int j = 0; j < VECTORS; j++) added[j] = (values[j] - found[j] * m->decay) * m->strength;
    } else {
        UNROLL for (int j = 0; j < VECTORS; j++) added[j] = values[j] * m->strength;
    }
    if (!m->query) {
        advance(state, m, added, r->key_dim, false, found);
        return;
    }
    advance(state, m, added, r->key_dim, true, found);
    UNROLL for (int j = 0; j < VECTORS; j++) {
        const vf past = r->skips ? vf_fma(values[j], vf_set1(r->skips[head]), found[j]) : found[j];
        vf_store(m->value + panel * PANEL + j * VL, past);
    }
}

void recurrence_heads(const cache *c, const recurrence *r, const step *s, int entry, int head, float *scratch, float *out)
{
    const int heads = recurrence_together(r);
    const int32_t *table = s->block_tables[r->group] + (int64_t)entry * s->table_width[r->group];
    const int64_t size = c->block_size, kv_len = s->kv_lens[entry], start = s->query_starts[entry];
    const int64_t past = kv_len - (s->query_starts[entry + 1] - start), first = past / size * size;
    const int64_t width = (int64_t)r->heads * r->value_dim, panel_size = padded(r->key_dim, KEYS) * PANEL;
    const int64_t row_size = 2 * keys_of(r) + heads * values_of(r);
    const size_t state_bytes = sizeof(float) * (size_t)state_of(r);
    float *rows = scratch + heads * state_of(r);
    if (first)
        memcpy(scratch, state_at(c, r, table[first / size - 1], head), heads * state_bytes);
    else
        memset(scratch, 0, heads * state_bytes);
    for (int64_t position = first, end; position < kv_len; position = end) {
        const int64_t block_end = (position / size + 1) * size;
        moment run[RUN][MOST_HEADS];
        end = smaller(smaller(position + RUN, block_end), kv_len);
        for (int64_t at = position; at < end; at++)
            prepare(c, r, table, at, head, heads, at >= past, rows + (at - position) * row_size, run[at - position]);
        for (int i = 0; i < heads; i++)
            for (int64_t panel = 0; panel < values_of(r) / PANEL; panel++)
                for (int64_t at = 0; at < end - position; at++)
                    pass(r, &run[at][i], scratch + i * state_of(r) + panel * panel_size, panel, head + i);
        for (int64_t at = position > past ? position : past; at < end; at++)
            for (int i = 0; i < heads; i++)
                memcpy(out + (start + at - past) * width + (int64_t)r->places[head + i] * r->value_dim,
                       run[at - position][i].value, sizeof(float) * (size_t)r->value_dim);
        if (end == block_end) memcpy(state_at(c, r, table[position / size], head), scratch, heads * state_bytes);
    }
}

void recurrence_gate(const recurrence *r, const float *gates, float *out)
{
    const int64_t width = (int64_t)r->heads * r->value_dim, size = width / r->norm_groups;
    if (r->gate_first) multiply_silu(gates, width, out);
    for (int64_t at = 0; at < width && r->gate_norm.weight; at += size)
        norm_rms(r->gate_norm.weight + at, r->gate_eps, size, out + at);
    if (!r->gate_first) multiply_silu(gates, width, out);
}

/* Recurrent layers: gated delta nets and Mamba 2, head by head and block by block.
 *
 * A block holds, as floats, the layer's inputs of each position, then each head's state at the end of the block. A token is
 * computed from the state at the end of the previous block and from the inputs of its own block, in order. So its bits depend
 * neither on prompt chunks nor on the batch. A state is [value_dim / PANEL][key_dim][PANEL], padded with zeros, so that one
 * panel stays in the L1 cache during the tokens of a block. */
#include <math.h>

#include "genbatch.h"
#include "simd.h"

#define PANEL 32 /* values */
#define VECTORS (PANEL / VL)
#define RUN 16 /* tokens that are prepared together */
#define LEAST_SQUARE 1e-6f
#define LINEAR_FROM 20.0f /* softplus(x) is x from here on, as in torch */

static int64_t keys_of(const recurrence *r) { return padded(r->key_dim, 16); }
static int64_t values_of(const recurrence *r) { return padded(r->value_dim, PANEL); }
static int64_t state_of(const recurrence *r) { return r->key_dim * values_of(r); }

int64_t recurrence_kept(const recurrence *r) { return r->channels + (r->corrects ? 2 : 1) * r->heads; }

int64_t recurrence_bytes(const recurrence *r, int block_size)
{
    return (int64_t)sizeof(float) * (padded(block_size * recurrence_kept(r), 16) + r->heads * state_of(r));
}

int64_t recurrence_scratch(const recurrence *r)
{
    return padded(state_of(r) + RUN * (2 * keys_of(r) + values_of(r)), 16);
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

/* The convolution of `count` channels at a position, and SiLU; `out` has room for a multiple of 16, the rest is zeros. */
static void convolve(const cache *c, const recurrence *r, const int32_t *table, int64_t position, int64_t channel,
                     int64_t count, float *out)
{
    const int64_t kept = recurrence_kept(r);
    for (int64_t i = 0; i < padded(count, 16); i++) out[i] = r->tap_bias && i < count ? r->tap_bias[channel + i] : 0.0f;
    for (int64_t tap = 0; tap < r->kernel; tap++) {
        const int64_t at = position - r->kernel + 1 + tap;
        if (at < 0) continue; /* positions before the text are zeros */
        const float *inputs = block_at(c, r, table[at / c->block_size]) + at % c->block_size * kept + channel;
        const float *taps = r->taps + tap * r->channels + channel;
        for (int64_t i = 0; i < count; i++) out[i] += taps[i] * inputs[i];
    }
    for (int64_t i = 0; i < count; i += VL) {
        const vf x = vf_load(out + i);
        vf_store(out + i, x / (vf_exp(-x) + 1.0f));
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

/* One head's inputs of a token. */
typedef struct {
    float *query, *key, *value;
    float decay, strength;
} moment;

static float softplus(float x) { return x > LINEAR_FROM ? x : log1pf(expf(x)); }

static void prepare(const cache *c, const recurrence *r, const int32_t *table, int64_t position, int head, moment *m)
{
    const int64_t group = head / (r->heads / r->key_heads), all_keys = (int64_t)r->key_heads * r->key_dim;
    const float *kept = block_at(c, r, table[position / c->block_size]) + position % c->block_size * recurrence_kept(r);
    const float *scalars = kept + r->channels, step = softplus(scalars[head] + r->step_bias[head]);
    convolve(c, r, table, position, group * r->key_dim, r->key_dim, m->query);
    convolve(c, r, table, position, all_keys + group * r->key_dim, r->key_dim, m->key);
    convolve(c, r, table, position, 2 * all_keys + (int64_t)head * r->value_dim, r->value_dim, m->value);
    for (int64_t i = padded(r->value_dim, 16); i < values_of(r); i++) m->value[i] = 0;
    m->decay = expf(r->rates[head] * step);
    m->strength = r->corrects ? r->strength / (1.0f + expf(-scalars[r->heads + head])) : step;
    if (!r->corrects) return;
    normalise(m->query, keys_of(r), 1.0f / sqrtf((float)r->key_dim));
    normalise(m->key, keys_of(r), 1.0f);
}

/* Multiplies the state by a key, with separate sums for even and odd elements. */
ALWAYS_INLINE void recall(const float *state, const float *key, int64_t key_dim, vf found[VECTORS])
{
    vf even[VECTORS], odd[VECTORS];
    UNROLL for (int j = 0; j < VECTORS; j++) even[j] = odd[j] = (vf){0};
    for (int64_t i = 0; i + 1 < key_dim; i += 2, state += 2 * PANEL) {
        const vf a = vf_set1(key[i]), b = vf_set1(key[i + 1]);
        UNROLL for (int j = 0; j < VECTORS; j++) {
            even[j] = vf_fma(vf_load(state + j * VL), a, even[j]);
            odd[j] = vf_fma(vf_load(state + PANEL + j * VL), b, odd[j]);
        }
    }
    UNROLL for (int j = 0; j < VECTORS; j++) found[j] = even[j] + odd[j];
}

/* Decays a panel of the state, adds key x added, and writes the panel times the query. */
ALWAYS_INLINE void advance(float *state, const moment *m, const vf added[VECTORS], int64_t key_dim, vf found[VECTORS])
{
    vf even[VECTORS], odd[VECTORS];
    const vf decay = vf_set1(m->decay);
    UNROLL for (int j = 0; j < VECTORS; j++) even[j] = odd[j] = (vf){0};
    for (int64_t i = 0; i + 1 < key_dim; i += 2, state += 2 * PANEL) {
        const vf key = vf_set1(m->key[i]), next_key = vf_set1(m->key[i + 1]);
        const vf query = vf_set1(m->query[i]), next_query = vf_set1(m->query[i + 1]);
        UNROLL for (int j = 0; j < VECTORS; j++) {
            const vf a = vf_fma(key, added[j], vf_load(state + j * VL) * decay);
            const vf b = vf_fma(next_key, added[j], vf_load(state + PANEL + j * VL) * decay);
            vf_store(state + j * VL, a);
            vf_store(state + PANEL + j * VL, b);
            even[j] = vf_fma(a, query, even[j]);
            odd[j] = vf_fma(b, next_query, odd[j]);
        }
    }
    UNROLL for (int j = 0; j < VECTORS; j++) found[j] = even[j] + odd[j];
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
    advance(state, m, added, r->key_dim, found);
    UNROLL for (int j = 0; j < VECTORS; j++) {
        const vf past = r->skips ? vf_fma(values[j], vf_set1(r->skips[head]), found[j]) : found[j];
        vf_store(m->value + panel * PANEL + j * VL, past);
    }
}

void recurrence_head(const cache *c, const recurrence *r, const step *s, int entry, int head, float *scratch, float *out)
{
    const int32_t *table = s->block_tables[r->group] + (int64_t)entry * s->table_width[r->group];
    const int64_t size = c->block_size, kv_len = s->kv_lens[entry], start = s->query_starts[entry];
    const int64_t past = kv_len - (s->query_starts[entry + 1] - start), first = past / size * size;
    const int64_t width = (int64_t)r->heads * r->value_dim, keys = keys_of(r), values = values_of(r);
    const size_t state_bytes = sizeof(float) * (size_t)state_of(r);
    float *state = scratch, *rows = scratch + state_of(r);
    if (first)
        memcpy(state, state_at(c, r, table[first / size - 1], head), state_bytes);
    else
        memset(state, 0, state_bytes);
    for (int64_t position = first, end; position < kv_len; position = end) {
        const int64_t block_end = (position / size + 1) * size;
        moment run[RUN];
        end = smaller(smaller(position + RUN, block_end), kv_len);
        for (int64_t at = position; at < end; at++) {
            float *row = rows + (at - position) * (2 * keys + values);
            run[at - position] = (moment){.query = row, .key = row + keys, .value = row + 2 * keys};
            prepare(c, r, table, at, head, &run[at - position]);
        }
        for (int64_t panel = 0; panel < values / PANEL; panel++)
            for (int64_t i = 0; i < end - position; i++)
                pass(r, &run[i], state + panel * r->key_dim * PANEL, panel, head);
        for (int64_t at = position > past ? position : past; at < end; at++)
            memcpy(out + (start + at - past) * width + (int64_t)r->places[head] * r->value_dim, run[at - position].value,
                   sizeof(float) * (size_t)r->value_dim);
        if (end == block_end) memcpy(state_at(c, r, table[position / size], head), state, state_bytes);
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

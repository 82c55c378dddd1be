/* Functions of a single row: embeddings, norms, rotation, activations, and the formats that weights multiply. */
#include <math.h>

#include "genbatch.h"
#include "simd.h"
#include "tiles.h"

#define MAX_GROUP 256 /* inputs; keeps 128 x 127 x group below 2^22, see INTEGER_ZERO */

float mean_square(const float *x, int64_t size)
{
    vf squares = {0};
    int64_t i = 0;
    for (; i + VL <= size; i += VL) {
        vf v = vf_load(x + i);
        squares = vf_fma(v, v, squares);
    }
    float sum = vf_sum(squares);
    for (; i < size; i++) sum += x[i] * x[i];
    return sum / (float)size;
}

static float rms_scale(const float *x, float eps, int64_t size) { return 1.0f / sqrtf(mean_square(x, size) + eps); }

static norm_factors layer_factors(const float *x, float eps, int64_t size)
{
    vf sums = {0}, squares = {0};
    int64_t i = 0;
    for (; i + VL <= size; i += VL) sums += vf_load(x + i);
    float sum = vf_sum(sums);
    for (; i < size; i++) sum += x[i];
    const float mean = sum / (float)size;
    for (i = 0; i + VL <= size; i += VL) {
        vf v = vf_load(x + i) - mean;
        squares = vf_fma(v, v, squares);
    }
    float square = vf_sum(squares);
    for (; i < size; i++) square += (x[i] - mean) * (x[i] - mean);
    return (norm_factors){mean, 1.0f / sqrtf(square / (float)size + eps)};
}

norm_factors norm_look(const model *m, const float *x, int64_t size)
{
    if (m->norm_kind == NORM_RMS) return (norm_factors){0, rms_scale(x, m->norm_eps, size)};
    return layer_factors(x, m->norm_eps, size);
}

void norm_part(const model *m, const norm *n, norm_factors f, const float *x, int64_t from, int64_t to, float *out)
{
    int64_t i = from;
    if (m->norm_kind == NORM_RMS) {
        for (; i + VL <= to; i += VL) vf_store(out + i, vf_load(x + i) * f.scale * vf_load(n->weight + i));
        for (; i < to; i++) out[i] = x[i] * f.scale * n->weight[i];
    } else {
        for (; i < to; i++) out[i] = (x[i] - f.mean) * f.scale * n->weight[i] + (n->bias ? n->bias[i] : 0.0f);
    }
}

void norm_row(const model *m, const norm *n, const float *x, int64_t size, float *out)
{
    norm_part(m, n, norm_look(m, x, size), x, 0, size, out);
}

void norm_rms(const float *weight, float eps, int64_t size, float *x)
{
    const float scale = rms_scale(x, eps, size);
    for (int64_t i = 0; i < size; i++) x[i] = x[i] * scale * weight[i];
}

/* Reads a token's embedding from a table in any format. */
void embed_row(const table *t, int64_t id, float *out)
{
    if (id >= t->count) id = 0;
    const int64_t at = id * t->width;
    if (t->kind == WEIGHT_F32) {
        memcpy(out, (const float *)t->rows + at, sizeof(float) * (size_t)t->width);
    } else if (t->kind > WEIGHT_U4) {
        const uint8_t *block = (const uint8_t *)t->rows + id / COLUMNS * stored_block_bytes(t->kind, t->width);
        stored_row(t->kind, block, t->width, (int)(id % COLUMNS), out);
    } else {
        const uint16_t *row = (const uint16_t *)t->rows + at;
        for (int64_t i = 0; i < t->width; i++) {
            uint32_t bits = (uint32_t)row[i] << 16;
            memcpy(out + i, &bits, 4);
        }
    }
    if (t->scale != 1.0f)
        for (int64_t i = 0; i < t->width; i++) out[i] *= t->scale;
}

static void rotate(const model *m, const layer *l, const step *s, float *head, int64_t position, float scale)
{
    const int D = l->key_dim, half = l->rotary_dim / 2;
    if (l->rope < 0) {
        for (int i = 0; i < D; i++) head[i] *= scale;
        return;
    }
    const float *cosines = s->cosines[l->rope] + position * half, *sines = s->sines[l->rope] + position * half;
    if (m->interleaved)
        for (int i = 0; i < half; i++) {
            float a = head[2 * i], b = head[2 * i + 1];
            head[2 * i] = (a * cosines[i] - b * sines[i]) * scale;
            head[2 * i + 1] = (b * cosines[i] + a * sines[i]) * scale;
        }
    else
        for (int i = 0; i < half; i++) {
            float a = head[i], b = head[half + i];
            head[i] = (a * cosines[i] - b * sines[i]) * scale;
            head[half + i] = (b * cosines[i] + a * sines[i]) * scale;
        }
    for (int i = 2 * half; i < D; i++) head[i] *= scale;
}

/* Rotates a head as transformers does, before or after the optional norm, and scales it. */
void rope(const model *m, const layer *l, const step *s, float *head, const norm *n, int64_t position, float scale)
{
    const bool last = n->weight && m->norms_rotated;
    if (n->weight && !last) norm_row(m, n, head, l->key_dim, head);
    rotate(m, l, s, head, position, last ? 1.0f : scale);
    if (!last) return;
    norm_row(m, n, head, l->key_dim, head);
    for (int i = 0; i < l->key_dim; i++) head[i] *= scale;
}

/* Returns the norm of one head: the norm of all heads, or the head's own; no norm if the whole row was normed before. */
norm head_norm(const model *m, const norm *n, int head, int head_dim)
{
    if (m->qk_norm == QK_WHOLE) return (norm){NULL, NULL};
    if (m->qk_norm != QK_HEADS) return *n;
    const int64_t at = (int64_t)head * head_dim;
    return (norm){n->weight + at, n->bias ? n->bias + at : NULL};
}

/* Rounds up to 8 significant bits, so that no group's largest value exceeds 127 steps. */
static float coarse_above(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits + 0xffff) & 0xffff0000;
    memcpy(&x, &bits, 4);
    return x;
}

/* Writes the integers of one group to `out` and returns their factors. Each group has its own scale, so that an outlier costs
 * precision only in its group. */
ALWAYS_INLINE group_factors put_group(const float *x, const int64_t group, int8_t *out)
{
    vf largest = {0};
    for (int64_t i = 0; i < group; i += VL) largest = vf_max(largest, vf_abs(vf_load(x + i)));
    float scale = coarse_above(vf_largest(largest) / 127.0f);
    /* Below this limit the reciprocal overflows; such activations count as zero. */
    float inverse = scale > 1e-37f ? 1.0f / scale : 0.0f;
    vi sum = {0};
    for (int64_t i = 0; i < group; i += VL) {
        vi q = vi_round(vf_load(x + i) * inverse);
        sum += q;
        vb_store(out + i, q);
    }
    int32_t total = vi_sum(sum);
    return (group_factors){scale, -INTEGER_ZERO * scale, INTEGER_ZERO_BITS - 128 * total, scale * (float)total};
}

ALWAYS_INLINE void put_groups(const rows *out, tile_place at, int64_t r, const float *x, int64_t size, int64_t from,
                              int64_t to, const int64_t group)
{
    int8_t *data = (int8_t *)out->data + at.start * out->k + 4 * r + from * at.size;
    group_factors *factors = (group_factors *)out->factors + at.start * out->groups + r + from / group * at.size;
    for (int64_t g = from; g < to; g += group, factors += at.size) {
        float part[MAX_GROUP];
        int8_t integers[MAX_GROUP];
        const float *p = x + g;
        if (size - g < group) { /* inputs after the last one count as zeros */
            memset(part, 0, (size_t)group * sizeof(float));
            if (size > g) memcpy(part, p, (size_t)(size - g) * sizeof(float));
            p = part;
        }
        *factors = put_group(p, group, integers);
        for (int64_t i = 0; i < group; i += 4, data += 4 * at.size) memcpy(data, integers + i, 4);
    }
}

static void put_int8(const rows *out, tile_place at, int64_t r, const float *x, int64_t size, int64_t from, int64_t to)
{
    switch (out->k / out->groups) { /* constant sizes make specialised code for the blocks of a file */
    case 16: put_groups(out, at, r, x, size, from, to, 16); break;
    case 32: put_groups(out, at, r, x, size, from, to, 32); break;
    default: put_groups(out, at, r, x, size, from, to, out->k / out->groups);
    }
}

/* Returns 2^exponent for exponents from -126 to 127. */
static float power_of_two(int exponent)
{
    const int32_t bits = (exponent + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return power;
}

/* Writes the integers of one group of 16 or 32 to `out` [DIGITS][group] and returns their factors. */
ALWAYS_INLINE digit_factors put_digit_group(const float *x, const int64_t group, int8_t *out)
{
    vi largest = {0};
    for (int64_t i = 0; i < group; i += VL) largest = vi_max(largest, (vi)vf_abs(vf_load(x + i)));
    const int32_t bits = vi_largest(largest); /* bits order like the floats, with infinities and NaN above all */
    float top;
    memcpy(&top, &bits, 4);
    if (bits >= 0x7f800000) { /* the group's products become NaN */
        memset(out, 0, (size_t)(DIGITS * group));
        return (digit_factors){NAN, NAN, {0}};
    }
    /* Leave some room, so that a carry cannot raise the highest digit to 128. */
    top *= 1.0078125f;
    int32_t exponent;
    memcpy(&exponent, &top, 4);
    exponent = (exponent >> 23) - 127;
    if (exponent < -100) exponent = -100; /* numbers below 2^-122 count as zero */
    const float scale = power_of_two(exponent - 22), inverse = power_of_two(22 - exponent);
    vi sums[DIGITS] = {{0}};
    for (int64_t i = 0; i < group; i += VL) {
        vi rest = vi_nearest(vf_load(x + i) * inverse);
        for (int d = 0; d < DIGITS; d++) {
            vi digit = rest << 24 >> 24;
            rest = (rest - digit) >> 8;
            sums[d] += digit;
            vb_store(out + d * group + i, digit);
        }
    }
    digit_factors f = {.scale = scale};
    int32_t total = 0;
    for (int d = 0; d < DIGITS; d++) {
        const int32_t sum = vi_sum(sums[d]);
        f.minus_digits[d] = -sum;
        total += sum * (1 << (8 * d));
    }
    f.minus_total = -scale * (float)total;
    return f;
}

ALWAYS_INLINE void put_digit_groups(const rows *out, tile_place at, int64_t r, const float *x, int64_t from, int64_t to,
                                    const int64_t group)
{
    int8_t *data = (int8_t *)out->data + DIGITS * (at.start * out->k + from * at.size) + 4 * r;
    digit_factors *factors = (digit_factors *)out->factors + at.start * out->groups + r + from / group * at.size;
    for (int64_t g = from; g < to; g += group, factors += at.size) {
        int8_t digits[DIGITS * 32];
        *factors = put_digit_group(x + g, group, digits);
        for (int64_t i = 0; i < group; i += 4)
            for (int d = 0; d < DIGITS; d++, data += 4 * at.size) memcpy(data, digits + d * group + i, 4);
    }
}

/* Writes whole groups, because blocks of a file have at least 32 inputs. */
static void put_digits(const rows *out, tile_place at, int64_t r, const float *x, int64_t from, int64_t to)
{
    if (out->k / out->groups == 16)
        put_digit_groups(out, at, r, x, from, to, 16);
    else
        put_digit_groups(out, at, r, x, from, to, 32);
}

static void put_f32(const rows *out, tile_place at, int64_t r, const float *x, int64_t from, int64_t to)
{
    float *data = (float *)out->data + at.start * out->k + r + from * at.size;
    if (at.size == 1)
        memcpy(data, x + from, (size_t)(to - from) * sizeof(float));
    else
        for (int64_t i = from; i < to; i++, data += at.size) *data = x[i];
}

static void put_bf16(const rows *out, tile_place at, int64_t r, const float *x, int64_t from, int64_t to)
{
    uint16_t *data = (uint16_t *)out->data + at.start * out->k + 2 * r + from * at.size;
    for (int64_t i = from; i < to; i += 2, data += 2 * at.size) {
        data[0] = bf16_from_float(x[i]);
        data[1] = i + 1 < to ? bf16_from_float(x[i + 1]) : 0;
    }
}

void rows_put_part(int kind, const rows *out, int64_t row, const float *x, int64_t size, int64_t from, int64_t to)
{
    const tile_place at = tile_with(out->count, row);
    const int64_t r = row - at.start;
    if (kind == WEIGHT_F32) put_f32(out, at, r, x, from, smaller(size, to));
    if (kind == WEIGHT_BF16) put_bf16(out, at, r, x, from, smaller(size, to));
    if (kind == WEIGHT_I8) put_int8(out, at, r, x, size, from, to);
    if (kind == WEIGHT_I24) put_digits(out, at, r, x, from, to);
}

void rows_put(int kind, const rows *out, int64_t row, const float *x, int64_t size)
{
    rows_put_part(kind, out, row, x, size, 0, out->k);
}

/* Activations */

/* Computes erf(x) with an absolute error below 2e-7 (Abramowitz and Stegun 7.1.26). */
ALWAYS_INLINE vf vf_erf(vf x)
{
    vf size = vf_abs(x), t = 1.0f / (size * 0.3275911f + 1.0f);
    vf p = vf_set1(1.061405429f);
    p = vf_fma(p, t, vf_set1(-1.453152027f));
    p = vf_fma(p, t, vf_set1(1.421413741f));
    p = vf_fma(p, t, vf_set1(-0.284496736f));
    p = vf_fma(p, t, vf_set1(0.254829592f));
    vf result = 1.0f - p * t * vf_exp(-size * size);
    return vf_select(x < 0.0f, -result, result);
}

ALWAYS_INLINE vf activated(const enum activation kind, vf x)
{
    switch (kind) {
    case GELU: return x * 0.5f * (vf_erf(x * 0.70710678f) + 1.0f);
    case GELU_TANH: /* (1 + tanh u) / 2 is the sigmoid of 2u */
        return x / (vf_exp((x + x * x * x * 0.044715f) * -1.5957691f) + 1.0f);
    case RELU_SQUARED: {
        vf kept = vf_max(x, (vf){0});
        return kept * kept;
    }
    default: return x / (vf_exp(-x) + 1.0f);
    }
}

ALWAYS_INLINE void activate_row(const enum activation kind, const model *m, const float *sums, float *part)
{
    const int width = m->gated ? COLUMNS / 2 : COLUMNS;
    for (int i = 0; i < width; i += VL) {
        vf x = vf_load(sums + i);
        if (kind == CLAMPED_SWIGLU) {
            vf limit = vf_set1(m->gate_limit), up = vf_load(sums + width + i);
            x = vf_select(x > limit, limit, x);
            up = vf_select(up > limit, limit, vf_select(up < -limit, -limit, up));
            vf_store(part + i, (up + 1.0f) * (x / (vf_exp(x * -m->gate_slope) + 1.0f)));
        } else if (m->gated) {
            vf_store(part + i, activated(kind, x) * vf_load(sums + width + i));
        } else {
            vf_store(part + i, activated(kind, x));
        }
    }
}

ALWAYS_INLINE void activate_as(const enum activation kind, const model *m, const float *sums, int64_t count, float *out,
                               int64_t pitch, int64_t room)
{
    const int64_t width = m->gated ? COLUMNS / 2 : COLUMNS;
    for (int64_t r = 0; r < count; r++, sums += COLUMNS, out += pitch) {
        float part[COLUMNS];
        activate_row(kind, m, sums, room < width ? part : out);
        if (room < width) memcpy(out, part, (size_t)room * sizeof(float));
    }
}

void activate(const model *m, const float *sums, int64_t count, float *out, int64_t pitch, int64_t room)
{
    switch (m->activation) {
    case SILU: activate_as(SILU, m, sums, count, out, pitch, room); break;
    case GELU: activate_as(GELU, m, sums, count, out, pitch, room); break;
    case GELU_TANH: activate_as(GELU_TANH, m, sums, count, out, pitch, room); break;
    case RELU_SQUARED: activate_as(RELU_SQUARED, m, sums, count, out, pitch, room); break;
    default: activate_as(CLAMPED_SWIGLU, m, sums, count, out, pitch, room); break;
    }
}

ALWAYS_INLINE void multiply_gates(const float *gates, int64_t count, const bool silu, float *out)
{
    for (int64_t i = 0; i < count; i += VL) {
        float gate[VL] = {0}, part[VL] = {0};
        const size_t bytes = sizeof(float) * (size_t)smaller(VL, count - i);
        memcpy(gate, gates + i, bytes);
        memcpy(part, out + i, bytes);
        const vf x = vf_load(gate), share = 1.0f / (vf_exp(-x) + 1.0f);
        vf_store(part, vf_load(part) * (silu ? x * share : share));
        memcpy(out + i, part, bytes);
    }
}

/* out[i] *= sigmoid(gates[i]) */
void multiply_sigmoid(const float *gates, int64_t count, float *out) { multiply_gates(gates, count, false, out); }

/* out[h][i] *= sigmoid(gates[h]); a head's `size` is a multiple of 16 */
void multiply_heads(const float *gates, int64_t heads, int64_t size, float *out)
{
    for (int64_t h = 0; h < heads; h++, out += size) {
        const vf share = 1.0f / (vf_exp(vf_set1(-gates[h])) + 1.0f);
        for (int64_t i = 0; i < size; i += VL) vf_store(out + i, vf_load(out + i) * share);
    }
}

/* out[i] *= gates[i] * sigmoid(gates[i]) */
void multiply_silu(const float *gates, int64_t count, float *out) { multiply_gates(gates, count, true, out); }

ALWAYS_INLINE void multiply_as(const enum activation kind, const float *gates, int64_t count, float *out)
{
    for (int64_t i = 0; i < count; i += VL) {
        float gate[VL] = {0}, part[VL] = {0};
        const size_t bytes = sizeof(float) * (size_t)smaller(VL, count - i);
        memcpy(gate, gates + i, bytes);
        memcpy(part, out + i, bytes);
        vf_store(part, vf_load(part) * activated(kind, vf_load(gate)));
        memcpy(out + i, part, bytes);
    }
}

void multiply_activated(const model *m, const float *gates, int64_t count, float *out)
{
    switch (m->activation) {
    case GELU: multiply_as(GELU, gates, count, out); break;
    case GELU_TANH: multiply_as(GELU_TANH, gates, count, out); break;
    case RELU_SQUARED: multiply_as(RELU_SQUARED, gates, count, out); break;
    default: multiply_as(SILU, gates, count, out); break;
    }
}

void sparse_row(const model *m, const layer *l, float *gates, float *out)
{
    const int64_t size = l->intermediate;
    const norm_factors f = layer_factors(gates, 0.0f, size);
    const float cutoff = f.mean + l->deviations / f.scale;
    for (int64_t i = 0; i < size; i++) gates[i] = gates[i] > cutoff ? gates[i] - cutoff : 0.0f;
    memcpy(out, gates + size, sizeof(float) * (size_t)size);
    multiply_activated(m, gates, size, out);
}

void xielu_row(const layer *l, int64_t count, float *x)
{
    for (int64_t i = 0; i < count; i += VL) {
        float part[VL] = {0};
        const size_t bytes = sizeof(float) * (size_t)smaller(VL, count - i);
        memcpy(part, x + i, bytes);
        const vf v = vf_load(part), least = vf_set1(l->least);
        const vf below = (vf_exp(vf_select(v < least, v, least)) - 1.0f - v) * l->curve;
        vf_store(part, vf_select(v > 0.0f, v * v * l->square, below) + v * l->slope);
        memcpy(x + i, part, bytes);
    }
}

/* Divides and caps a block of logits in place. */
void logits_finish(const model *m, float *sums, int64_t count)
{
    if (m->logit_divisor == 1.0f && m->logit_cap == 0) return;
    for (int64_t r = 0; r < count; r++, sums += COLUMNS)
        for (int i = 0; i < COLUMNS; i += VL) {
            vf x = vf_load(sums + i) / m->logit_divisor;
            vf_store(sums + i, m->logit_cap == 0 ? x : vf_cap(x, m->logit_cap));
        }
}

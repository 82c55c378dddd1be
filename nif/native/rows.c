/* What is done to one row at a time: RMS norm, SiLU, and the form that the next weights multiply. */
#include <math.h>

#include "genbatch.h"
#include "simd.h"
#include "tiles.h"

#define MAX_GROUP 256 /* inputs; also what keeps 128 x 127 x group below 2^22, see INTEGER_ZERO */

void rms_norm(const float *x, const float *weight, float eps, int64_t size, float *out)
{
    vf squares = {0};
    int64_t i = 0;
    for (; i + VL <= size; i += VL) {
        vf v = vf_load(x + i);
        squares = vf_fma(v, v, squares);
    }
    float sum = vf_sum(squares);
    for (; i < size; i++) sum += x[i] * x[i];
    float scale = 1.0f / sqrtf(sum / (float)size + eps);
    for (i = 0; i + VL <= size; i += VL) vf_store(out + i, vf_load(x + i) * scale * vf_load(weight + i));
    for (; i < size; i++) out[i] = x[i] * scale * weight[i];
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

/* Writes the integers of one group to `out` and returns what multiplies them. The group is scaled by its own
 * largest magnitude, so that an outlier costs precision to its group alone. */
static group_factors put_group(const float *x, int64_t group, int8_t *out)
{
    vf largest = {0};
    for (int64_t i = 0; i < group; i += VL) largest = vf_max(largest, vf_abs(vf_load(x + i)));
    float scale = coarse_above(vf_largest(largest) / 127.0f);
    /* Below this the reciprocal overflows; such activations are zero for every purpose. */
    float inverse = scale > 1e-37f ? 1.0f / scale : 0.0f;
    vi sum = {0};
    for (int64_t i = 0; i < group; i += VL) {
        vi q = vi_round(vf_load(x + i) * inverse);
        sum += q;
        *(vb_memory *)(out + i) = __builtin_convertvector(q, vb);
    }
    int32_t total = vi_sum(sum);
    return (group_factors){scale, -INTEGER_ZERO * scale, INTEGER_ZERO_BITS - 128 * total, scale * (float)total};
}

static void put_int8(const rows *out, tile_place at, int64_t r, const float *x, int64_t size)
{
    int64_t group = out->k / out->groups;
    int8_t *data = (int8_t *)out->data + at.start * out->k + 4 * r;
    group_factors *factors = out->factors + at.start * out->groups + r;
    for (int64_t g = 0; g < out->groups; g++, factors += at.size) {
        float part[MAX_GROUP];
        int8_t integers[MAX_GROUP];
        const float *p = x + g * group;
        int64_t count = size - g * group;
        if (count < group) { /* what pads the last input counts as zeros */
            memset(part, 0, (size_t)group * sizeof(float));
            if (count > 0) memcpy(part, p, (size_t)count * sizeof(float));
            p = part;
        }
        *factors = put_group(p, group, integers);
        for (int64_t i = 0; i < group; i += 4, data += 4 * at.size) memcpy(data, integers + i, 4);
    }
}

static void put_f32(const rows *out, tile_place at, int64_t r, const float *x, int64_t size)
{
    float *data = (float *)out->data + at.start * out->k + r;
    if (at.size == 1)
        memcpy(data, x, (size_t)size * sizeof(float));
    else
        for (int64_t i = 0; i < size; i++, data += at.size) *data = x[i];
}

static void put_bf16(const rows *out, tile_place at, int64_t r, const float *x, int64_t size)
{
    uint16_t *data = (uint16_t *)out->data + at.start * out->k + 2 * r;
    for (int64_t i = 0; i < size; i += 2, data += 2 * at.size) {
        data[0] = bf16_from_float(x[i]);
        data[1] = i + 1 < size ? bf16_from_float(x[i + 1]) : 0;
    }
}

void rows_put(int kind, const rows *out, int64_t row, const float *x, int64_t size)
{
    tile_place at = tile_with(out->count, row);
    if (kind == WEIGHT_F32) put_f32(out, at, row - at.start, x, size);
    if (kind == WEIGHT_BF16) put_bf16(out, at, row - at.start, x, size);
    if (kind == WEIGHT_I8) put_int8(out, at, row - at.start, x, size);
}

/* gate_up: COLUMNS / 2 gates, then as many ups; out: silu(gate) * up of the first `count`. */
void silu_multiply(const float *gate_up, float *out, int64_t count)
{
    float part[COLUMNS / 2];
    for (int i = 0; i < COLUMNS / 2; i += VL) {
        vf gate = vf_load(gate_up + i), up = vf_load(gate_up + COLUMNS / 2 + i);
        vf_store(part + i, gate / (vf_exp(-gate) + 1.0f) * up);
    }
    memcpy(out, part, (size_t)(count < COLUMNS / 2 ? count : COLUMNS / 2) * sizeof(float));
}

/* What is done to one row at a time: RMS norm, SiLU, and the form that the next weights multiply. */
#include <math.h>

#include "genbatch.h"
#include "simd.h"

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

/* Scales each group by its own largest magnitude, so an outlier costs precision to its group alone. */
static void put_int8(const rows *out, int64_t row, const float *x, int64_t size, int64_t group)
{
    int8_t *data = (int8_t *)out->data + row * out->stride;
    for (int64_t g = 0; g < out->groups; g++) {
        float part[256] = {0};
        int64_t count = size - g * group < group ? size - g * group : group;
        const float *p = x + g * group;
        if (count < group) { /* the padding that follows the last input counts as zeros */
            memcpy(part, p, (size_t)(count > 0 ? count : 0) * sizeof(float));
            p = part;
        }
        vf largest = {0};
        for (int64_t i = 0; i < group; i += VL) largest = vf_max(largest, vf_abs(vf_load(p + i)));
        float max = vf_largest(largest);
        float inverse = max > 0 ? 127.0f / max : 0.0f;
        vi sum = {0};
        for (int64_t i = 0; i < group; i += VL) {
            vi q = vi_round(vf_load(p + i) * inverse);
            sum += q;
            *(vb_memory *)(data + g * group + i) = __builtin_convertvector(q, vb);
        }
        int32_t total = 0;
        UNROLL for (int lane = 0; lane < VL; lane++) total += sum[lane];
        out->scales[row * out->groups + g] = max / 127.0f;
        out->sums[row * out->groups + g] = total;
    }
}

void rows_put(int kind, const rows *out, int64_t row, const float *x, int64_t size, int64_t group)
{
    if (kind == WEIGHT_F32) {
        float *to = (float *)out->data + row * out->stride;
        if (to != x) memcpy(to, x, (size_t)size * sizeof(float));
    } else if (kind == WEIGHT_BF16) {
        uint16_t *data = (uint16_t *)out->data + row * out->stride;
        int64_t i = 0;
        for (; i + VL <= size; i += VL) bf16_store(data + i, vf_load(x + i));
        for (; i < size; i++) data[i] = bf16_from_float(x[i]);
    } else {
        put_int8(out, row, x, size, group);
    }
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

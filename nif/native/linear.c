/* A merged linear, one weight block at a time: which gemm, which form of rows, what becomes of the sums. */
#include <stdlib.h>

#include "genbatch.h"
#include "simd.h"
#include "tiles.h"

enum weight_kind linear_operand(const linear *l)
{
    if (l->kind == WEIGHT_BF16) return gemm_bf16_rows_kind();
    return l->kind == WEIGHT_U4 ? WEIGHT_I8 : (enum weight_kind)l->kind;
}

void linear_block(const linear *l, int64_t block, const rows *a, int64_t first, int64_t count, float *sums)
{
    if (l->kind == WEIGHT_F32) gemm_f32_block(l, block, a, first, count, sums);
    if (l->kind == WEIGHT_BF16) gemm_bf16_block(l, block, a, first, count, sums);
    if (l->kind == WEIGHT_I8) gemm_i8_block(l, block, a, first, count, sums);
    if (l->kind == WEIGHT_U4) gemm_u4_block(l, block, a, first, count, sums);
}

void linear_finish(const linear *l, int64_t block, const float *sums, int64_t first, int64_t count,
                   enum finish finish, const model *m, float *out, int64_t pitch)
{
    int64_t column = block * COLUMNS, width = smaller(l->n - column, COLUMNS);
    for (int64_t r = 0; r < count; r++, sums += COLUMNS) {
        float biased[COLUMNS];
        const float *from = sums;
        if (l->bias) {
            for (int i = 0; i < COLUMNS; i++) biased[i] = sums[i] + l->bias[column + i];
            from = biased;
        }
        float *to = out + (first + r) * pitch;
        if (finish == ACTIVATE) {
            const int64_t at = m->gated ? column / 2 : column;
            activate(m, from, to + at, pitch - at);
        } else if (finish == ADD) {
            for (int i = 0; i < width; i++) to[column + i] += from[i];
        } else {
            memcpy(to + column, from, sizeof(float) * (size_t)width);
        }
    }
}

/* One linear by itself, for comparison with its twin in torch. x: [count, size]; out: [count, l->n]. */
int linear_probe(const linear *l, const float *x, int64_t count, int64_t size, float *out)
{
    int64_t groups = l->k / l->group;
    rows a = {calloc((size_t)(count * l->k), sizeof(float)), calloc((size_t)(count * groups), sizeof(group_factors)),
              count, l->k, groups};
    float *sums = calloc((size_t)count, COLUMNS * sizeof(float));
    bool enough = a.data && a.factors && sums;
    for (int64_t i = 0; enough && i < count; i++) rows_put(linear_operand(l), &a, i, x + i * size, size);
    for (int64_t block = 0; enough && block * COLUMNS < l->n; block++) {
        linear_block(l, block, &a, 0, count, sums);
        linear_finish(l, block, sums, 0, count, STORE, NULL, out, l->n);
    }
    free(a.data);
    free(a.factors);
    free(sums);
    return enough ? STEP_OK : STEP_NO_MEMORY;
}

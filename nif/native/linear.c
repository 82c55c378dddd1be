/* Computes a merged linear, one weight block at a time: selects the kernel and the rows' format, and finishes the sums. */
#include <stdlib.h>

#include "genbatch.h"
#include "simd.h"
#include "tiles.h"

#define HALVES_ROWS 96 /* 12 KB of ups; more rows take more passes over the weights */

/* Returns the part that holds a block. */
static const part *part_of(const linear *l, int64_t block)
{
    const part *p = l->parts;
    while (p + 1 < l->parts + l->num_parts && p[1].first_block <= block) p++;
    return p;
}

int64_t linear_blocks(const linear *l)
{
    if (!l->parts) return padded(l->n, COLUMNS) / COLUMNS;
    const part *last = l->parts + l->num_parts - 1;
    return last->first_block + padded(last->n, COLUMNS) / COLUMNS;
}

int64_t linear_column(const linear *l, int64_t block, int64_t *width)
{
    if (!l->parts) {
        *width = smaller(l->n - block * COLUMNS, COLUMNS);
        return block * COLUMNS;
    }
    const part *p = part_of(l, block);
    const int64_t before = (block - p->first_block) * COLUMNS;
    *width = smaller(p->n - before, COLUMNS);
    return p->column + before;
}

enum weight_kind linear_operand(const linear *l)
{
    if (l->parts) return (enum weight_kind)l->kind;
    if (l->kind == WEIGHT_BF16) return gemm_bf16_rows_kind();
    return l->kind == WEIGHT_U4 ? WEIGHT_I8 : (enum weight_kind)l->kind;
}

static void part_block(const linear *l, const part *p, int64_t block, const rows *a, int64_t first, int64_t count,
                       float *sums)
{
    if (p->kind == WEIGHT_F32) {
        const linear plain = {.k = l->k, .weights = p->weights};
        gemm_f32_block(&plain, block, a, first, count, sums);
        return;
    }
    const uint8_t *weights = (const uint8_t *)p->weights + block * stored_block_bytes(p->kind, l->k);
    if (l->kind == WEIGHT_I24)
        gemm_stored_digits_block(p->kind, weights, l->k, l->group, a, first, count, sums);
    else if (l->kind == WEIGHT_I8)
        gemm_stored_int8_block(p->kind, weights, l->k, l->group, a, first, count, sums);
    else
        gemm_stored_block(p->kind, weights, l->k, a, first, count, sums);
}

/* Multiplies gates and ups in two formats. Both parts have every block: the first part has the gates' half of the columns, the
 * second part has the ups' half. */
static void halves_block(const linear *l, int64_t block, const rows *a, int64_t first, int64_t count, float *sums)
{
    part_block(l, &l->parts[0], block, a, first, count, sums);
    _Alignas(64) float ups[HALVES_ROWS * COLUMNS];
    for (int64_t from = first, size; from < first + count; from += size) {
        size = tile_with(a->count, from).size; /* as many whole tiles as fit `ups` */
        while (from + size < first + count) {
            const int64_t more = tile_with(a->count, from + size).size;
            if (size + more > HALVES_ROWS) break;
            size += more;
        }
        part_block(l, &l->parts[1], block, a, from, size, ups);
        for (int64_t r = 0; r < size; r++)
            memcpy(sums + (from - first + r) * COLUMNS + COLUMNS / 2, ups + r * COLUMNS + COLUMNS / 2,
                   sizeof(float) * (COLUMNS / 2));
    }
}

void linear_block(const linear *l, int64_t block, const rows *a, int64_t first, int64_t count, float *sums)
{
    if (l->num_parts == 2 && l->parts[1].first_block == 0) {
        halves_block(l, block, a, first, count, sums);
        return;
    }
    if (l->parts) {
        const part *p = part_of(l, block);
        part_block(l, p, block - p->first_block, a, first, count, sums);
        return;
    }
    if (l->kind == WEIGHT_F32) gemm_f32_block(l, block, a, first, count, sums);
    if (l->kind == WEIGHT_BF16) gemm_bf16_block(l, block, a, first, count, sums);
    if (l->kind == WEIGHT_I8) gemm_i8_block(l, block, a, first, count, sums);
    if (l->kind == WEIGHT_U4) gemm_u4_block(l, block, a, first, count, sums);
}

/* Copies or adds a row: to[i] (+)= from[i]. Nearly every block has rows of COLUMNS. */
ALWAYS_INLINE void put_row(const bool add, const float *from, int64_t width, float *to)
{
    if (width == COLUMNS) {
        UNROLL for (int i = 0; i < COLUMNS; i += VL) {
            vf x = vf_load(from + i);
            vf_store(to + i, add ? vf_load(to + i) + x : x);
        }
        return;
    }
    for (int64_t i = 0; i < width; i++) to[i] = add ? to[i] + from[i] : from[i];
}

void linear_finish(const linear *l, int64_t block, float *sums, int64_t first, int64_t count, enum finish finish,
                   const model *m, float *out, int64_t pitch)
{
    int64_t width, column = linear_column(l, block, &width);
    if (l->scales)
        for (int64_t r = 0; r < count; r++)
            for (int i = 0; i < width; i++) sums[r * COLUMNS + i] *= l->scales[column + i];
    if (l->bias)
        for (int64_t r = 0; r < count; r++)
            for (int i = 0; i < COLUMNS; i++) /* zeros beyond the last column */
                sums[r * COLUMNS + i] = i < width ? sums[r * COLUMNS + i] + l->bias[column + i] : 0;
    float *to = out + first * pitch + column;
    if (finish == ACTIVATE) {
        const int64_t at = m->gated ? column / 2 : column;
        activate(m, sums, count, out + first * pitch + at, pitch, pitch - at);
    } else if (finish == ADD) {
        for (int64_t r = 0; r < count; r++) put_row(true, sums + r * COLUMNS, width, to + r * pitch);
    } else {
        for (int64_t r = 0; r < count; r++) put_row(false, sums + r * COLUMNS, width, to + r * pitch);
    }
}

/* Runs one linear, for tests. x: [count, size]; out: [count, l->n]. */
int linear_probe(const linear *l, const float *x, int64_t count, int64_t size, float *out)
{
    int64_t groups = l->k / l->group;
    rows a = {calloc((size_t)(count * l->k), sizeof(float)), calloc((size_t)(count * groups), sizeof(digit_factors)),
              count, l->k, groups};
    float *sums = calloc((size_t)count, COLUMNS * sizeof(float));
    bool enough = a.data && a.factors && sums;
    for (int64_t i = 0; enough && i < count; i++) rows_put(linear_operand(l), &a, i, x + i * size, size);
    for (int64_t block = 0; enough && block < linear_blocks(l); block++) {
        linear_block(l, block, &a, 0, count, sums);
        linear_finish(l, block, sums, 0, count, STORE, NULL, out, l->n);
    }
    free(a.data);
    free(a.factors);
    free(sums);
    return enough ? STEP_OK : STEP_NO_MEMORY;
}

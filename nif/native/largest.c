/* Finds each row's largest logit while the head's blocks are computed, so that greedy decoding reads no logits.
 *
 * A lane keeps the largest value of its column in all blocks, and the first block with this value. Blocks are in ascending
 * order, so `>` keeps the lowest column. Lanes and threads are joined by the same rule, so the result does not depend on which
 * thread computed which block. */
#include <math.h>

#include "genbatch.h"
#include "simd.h"

void largest_clear(lane_maxima *maxima, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        for (int lane = 0; lane < COLUMNS; lane++) {
            maxima[i].values[lane] = -INFINITY;
            maxima[i].blocks[lane] = 0;
        }
}

void largest_take(const linear *l, int64_t block, const float *sums, int64_t count, lane_maxima *maxima)
{
    int64_t column = block * COLUMNS, width = smaller(l->n - column, COLUMNS);
    for (int64_t r = 0; r < count; r++, sums += COLUMNS, maxima++) {
        float edited[COLUMNS];
        const float *from = sums;
        if (l->bias || width < COLUMNS) {
            for (int i = 0; i < COLUMNS; i++)
                edited[i] = i < width ? sums[i] + (l->bias ? l->bias[column + i] : 0.0f) : -INFINITY;
            from = edited;
        }
        for (int i = 0; i < COLUMNS; i += VL) {
            vf value = vf_load(from + i), best = vf_load(maxima->values + i);
            vi better = (value > best) | (value != value); /* a NaN stays, because no comparison with it is true */
            vf_store(maxima->values + i, vf_select(better, value, best));
            vi blocks = (better & vi_set1((int32_t)block)) | (~better & vi_load(maxima->blocks + i));
            *(vi_memory *)(maxima->blocks + i) = blocks;
        }
    }
}

void largest_join(const lane_maxima *maxima, largest *best)
{
    for (int lane = 0; lane < COLUMNS; lane++) {
        float value = maxima->values[lane];
        int32_t column = maxima->blocks[lane] * COLUMNS + lane;
        bool equal = value == best->value && column < best->column;
        if (value > best->value || value != value || equal) *best = (largest){value, column};
    }
}

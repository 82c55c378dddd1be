/* float rows x float weights.
 *
 * A weight block is [k][COLUMNS] floats. A tile keeps R rows x 2 vectors of sums in registers: with
 * AVX-512, 12 x 2 = 24 sums, 2 weights and a broadcast fit 32 registers, and each weight loaded is used 12
 * times. DEPTH inputs of a block are 192 x 32 x 4 = 24 KB, half of a 48 KB L1, and stay there while the tiles
 * walk down the rows. Every sum runs over k in ascending order whatever the tile: the result of a row
 * depends on nothing but the row. */
#include "genbatch.h"
#include "simd.h"
#include "tiles.h"

#define DEPTH 192

ALWAYS_INLINE void tile(const int R, const float *w, const float *x, int64_t stride, int depth, bool first,
                        float *sums)
{
    vf s[MAX_ROWS][2];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < 2; v++)
        s[r][v] = first ? (vf){0} : vf_load(sums + r * COLUMNS + v * VL);
    for (int k = 0; k < depth; k++, w += COLUMNS) {
        vf w0 = vf_load(w), w1 = vf_load(w + VL);
        __builtin_prefetch(w + 16 * COLUMNS);
        UNROLL for (int r = 0; r < R; r++) {
            vf a = vf_set1(x[r * stride + k]);
            s[r][0] = vf_fma(w0, a, s[r][0]);
            s[r][1] = vf_fma(w1, a, s[r][1]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < 2; v++)
        vf_store(sums + r * COLUMNS + v * VL, s[r][v]);
}

void gemm_f32_block(const linear *l, int64_t block, const rows *a, int64_t first, int count, float *sums)
{
    const float *weights = (const float *)l->weights + block * l->k * COLUMNS;
    const float *x = (const float *)a->data + first * a->stride;
    for (int k = 0; k < l->k; k += DEPTH) {
        int depth = l->k - k < DEPTH ? l->k - k : DEPTH;
        for (int r = 0, size; r < count; r += size) {
            size = tile_rows(count, r);
            for (int c = 0; c < COLUMNS; c += 2 * VL) {
                const float *w = weights + (int64_t)k * COLUMNS + c;
                const float *xr = x + r * a->stride + k;
                float *out = sums + r * COLUMNS + c;
#define CALL(R) tile(R, w, xr, a->stride, depth, k == 0, out)
                FOR_ROWS(size, CALL)
#undef CALL
            }
        }
    }
}

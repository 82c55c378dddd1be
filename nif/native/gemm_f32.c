/* float rows x float weights.
 *
 * A weight block is [k][COLUMNS] floats. A tile keeps R rows x 2 vectors of sums in registers. With AVX-512, 12 x 2 = 24 sums,
 * 2 weights and a broadcast fit 32 registers, and each loaded weight is used 12 times. DEPTH inputs of a block are
 * 192 x 32 x 4 = 24 KB, half of a 48 KB L1, and stay there for the tiles of all rows. In every tile a sum runs over k in
 * ascending order, so the result of a row depends only on the row. */
#include "genbatch.h"
#include "simd.h"
#include "tiles.h"

#define DEPTH 192

ALWAYS_INLINE void tile(const int R, const float *w, const float *x, int64_t depth, bool first, float *sums)
{
    vf s[MAX_ROWS][2];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < 2; v++)
        s[r][v] = first ? (vf){0} : vf_load(sums + r * COLUMNS + v * VL);
    for (int64_t k = 0; k < depth; k++, w += COLUMNS, x += R) {
        vf w0 = vf_load(w), w1 = vf_load(w + VL);
        __builtin_prefetch(w + 16 * COLUMNS);
        UNROLL for (int r = 0; r < R; r++) {
            vf a = vf_set1(x[r]);
            s[r][0] = vf_fma(w0, a, s[r][0]);
            s[r][1] = vf_fma(w1, a, s[r][1]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < 2; v++)
        vf_store(sums + r * COLUMNS + v * VL, s[r][v]);
}

void gemm_f32_depth(const float *w, int64_t k, int64_t depth, const rows *a, int64_t first, int64_t count, float *sums)
{
    tile_place at;
    for (int64_t r = first; r < first + count; r += at.size) {
        at = tile_with(a->count, r);
        const float *x = (const float *)a->data + at.start * a->k + k * at.size;
        for (int c = 0; c < COLUMNS; c += 2 * VL) {
            float *out = sums + (r - first) * COLUMNS + c;
#define CALL(R) tile(R, w + c, x, depth, k == 0, out)
            FOR_ROWS(at.size, CALL)
#undef CALL
        }
    }
}

void gemm_f32_block(const linear *l, int64_t block, const rows *a, int64_t first, int64_t count, float *sums)
{
    const float *weights = (const float *)l->weights + block * l->k * COLUMNS;
    for (int64_t k = 0; k < l->k; k += DEPTH)
        gemm_f32_depth(weights + k * COLUMNS, k, smaller(l->k - k, DEPTH), a, first, count, sums);
}

/* bfloat16 weights; sums in float.
 *
 * A weight block is [k / 2][COLUMNS][2]: the two inputs of a pair lie side by side, as VDPBF16PS wants them.
 * With AVX512-BF16 the rows are bfloat16 too and one instruction multiplies 16 pairs; elsewhere the rows stay
 * float and the pair is spread into two float vectors by a shift and a mask. DEPTH inputs of a block are
 * 384 x 32 x 2 = 24 KB, half of L1. Sums run over k in ascending order whatever the tile. */
#include "genbatch.h"
#include "simd.h"
#include "tiles.h"

#define DEPTH 384

#if VL == 16 && defined(__AVX512BF16__)

typedef uint16_t element;

enum weight_kind gemm_bf16_rows_kind(void) { return WEIGHT_BF16; }

ALWAYS_INLINE vf dot_pairs(vf sum, vi w, const element *x)
{
    int32_t pair;
    memcpy(&pair, x, 4);
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)vi_set1(pair));
}

#else

typedef float element;

enum weight_kind gemm_bf16_rows_kind(void) { return WEIGHT_F32; }

ALWAYS_INLINE vf dot_pairs(vf sum, vi w, const element *x)
{
    sum = vf_fma(vf_low_bf16(w), vf_set1(x[0]), sum);
    return vf_fma(vf_high_bf16(w), vf_set1(x[1]), sum);
}

#endif

ALWAYS_INLINE void tile(const int R, const uint16_t *w, const element *x, int64_t stride, int depth, bool first,
                        float *sums)
{
    vf s[MAX_ROWS][2];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < 2; v++)
        s[r][v] = first ? (vf){0} : vf_load(sums + r * COLUMNS + v * VL);
    for (int k = 0; k < depth; k += 2, w += 2 * COLUMNS) {
        vi w0 = vi_load(w), w1 = vi_load(w + 2 * VL);
        __builtin_prefetch(w + 32 * COLUMNS);
        UNROLL for (int r = 0; r < R; r++) {
            s[r][0] = dot_pairs(s[r][0], w0, x + r * stride + k);
            s[r][1] = dot_pairs(s[r][1], w1, x + r * stride + k);
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < 2; v++)
        vf_store(sums + r * COLUMNS + v * VL, s[r][v]);
}

void gemm_bf16_block(const linear *l, int64_t block, const rows *a, int64_t first, int count, float *sums)
{
    const uint16_t *weights = (const uint16_t *)l->weights + block * l->k * COLUMNS;
    const element *x = (const element *)a->data + first * a->stride;
    for (int k = 0; k < l->k; k += DEPTH) {
        int depth = l->k - k < DEPTH ? l->k - k : DEPTH;
        for (int r = 0, size; r < count; r += size) {
            size = tile_rows(count, r);
            for (int c = 0; c < COLUMNS; c += 2 * VL) {
                const uint16_t *w = weights + (int64_t)k * COLUMNS + 2 * c;
                const element *xr = x + r * a->stride + k;
                float *out = sums + r * COLUMNS + c;
#define CALL(R) tile(R, w, xr, a->stride, depth, k == 0, out)
                FOR_ROWS(size, CALL)
#undef CALL
            }
        }
    }
}

/* bfloat16 weights; sums in float.
 *
 * A weight block is [k / 2][COLUMNS][2], with pairs of inputs side by side. The rows stay float, and a shift and a mask turn a
 * vector of pairs into two vectors of floats. These are 4 cheap operations for 24 to 48 multiplications, and the activations
 * keep their precision. VDPBF16PS would multiply pairs directly, but Intel's cores issue so few of these instructions that two
 * FMAs are 1.7 times faster. On AMD's cores the instruction is faster: build.py defines DOT_BF16, and rows are bfloat16. DEPTH
 * inputs of a block are 384 x 32 x 2 = 24 KB, half of L1. In every tile a sum runs over k in ascending order. */
#include "genbatch.h"
#include "simd.h"
#include "tiles.h"

#define DEPTH 384

#if VL == 16 && defined(__AVX512BF16__) && defined(DOT_BF16)

typedef uint16_t element;

enum weight_kind gemm_bf16_rows_kind(void) { return WEIGHT_BF16; }

ALWAYS_INLINE void dot_pairs(const int R, const uint16_t *w, const element *x, vf s[][2])
{
    vi w0 = vi_load(w), w1 = vi_load(w + 2 * VL);
    UNROLL for (int r = 0; r < R; r++) {
        int32_t pair;
        memcpy(&pair, x + 2 * r, 4);
        s[r][0] = (vf)_mm512_dpbf16_ps((__m512)s[r][0], (__m512bh)w0, (__m512bh)vi_set1(pair));
        s[r][1] = (vf)_mm512_dpbf16_ps((__m512)s[r][1], (__m512bh)w1, (__m512bh)vi_set1(pair));
    }
}

#else

typedef float element;

enum weight_kind gemm_bf16_rows_kind(void) { return WEIGHT_F32; }

ALWAYS_INLINE void dot_pairs(const int R, const uint16_t *w, const element *x, vf s[][2])
{
    vi w0 = vi_load(w), w1 = vi_load(w + 2 * VL);
    UNROLL for (int r = 0; r < R; r++) {
        s[r][0] = vf_fma(vf_low_bf16(w0), vf_set1(x[r]), s[r][0]);
        s[r][1] = vf_fma(vf_low_bf16(w1), vf_set1(x[r]), s[r][1]);
    }
    UNROLL for (int r = 0; r < R; r++) {
        s[r][0] = vf_fma(vf_high_bf16(w0), vf_set1(x[R + r]), s[r][0]);
        s[r][1] = vf_fma(vf_high_bf16(w1), vf_set1(x[R + r]), s[r][1]);
    }
}

#endif

ALWAYS_INLINE void tile(const int R, const uint16_t *w, const element *x, int64_t depth, bool first, float *sums)
{
    vf s[MAX_ROWS][2];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < 2; v++)
        s[r][v] = first ? (vf){0} : vf_load(sums + r * COLUMNS + v * VL);
    for (int64_t k = 0; k < depth; k += 2, w += 2 * COLUMNS, x += 2 * R) {
        __builtin_prefetch(w + 32 * COLUMNS);
        dot_pairs(R, w, x, s);
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < 2; v++)
        vf_store(sums + r * COLUMNS + v * VL, s[r][v]);
}

void gemm_bf16_block(const linear *l, int64_t block, const rows *a, int64_t first, int64_t count, float *sums)
{
    const uint16_t *weights = (const uint16_t *)l->weights + block * l->k * COLUMNS;
    for (int64_t k = 0; k < l->k; k += DEPTH) {
        int64_t depth = l->k - k < DEPTH ? l->k - k : DEPTH;
        tile_place at;
        for (int64_t r = first; r < first + count; r += at.size) {
            at = tile_with(a->count, r);
            const element *x = (const element *)a->data + at.start * a->k + k * at.size;
            for (int c = 0; c < COLUMNS; c += 2 * VL) {
                const uint16_t *w = weights + k * COLUMNS + 2 * c;
                float *out = sums + (r - first) * COLUMNS + c;
#define CALL(R) tile(R, w, x, depth, k == 0, out)
                FOR_ROWS(at.size, CALL)
#undef CALL
            }
        }
    }
}

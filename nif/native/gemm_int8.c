/* int8 rows x integer weights of 8 or 4 bits. Rows and weights have a scale for every `group` inputs.
 *
 * The dot product multiplies unsigned by signed bytes. The weights are the unsigned side, and four bytes of a row are
 * broadcast. Integer sums are exact. At the end of a group they are scaled and added to float sums. These lie in memory
 * (12 x 32 x 4 = 1.5 KB, in L1), because 24 integer and 24 float sums exceed 32 registers.
 *
 * A group of an I8 block: [group / 4][COLUMNS][4] bytes, value + 128; then COLUMNS bfloat16 scales.
 *     w = scale * (byte - 128), and sum (byte - 128) a = sum byte a - 128 sum a.
 * A group of a U4 block, 32 inputs: [4][COLUMNS][4] bytes, with inputs 8j .. 8j+3 in the low nibbles and inputs 8j+4 .. 8j+7
 *     in the high nibbles; then COLUMNS float16 steps and COLUMNS float16 offsets.
 *     w = step * nibble + offset, and sum w a = step * sum nibble a + offset * sum a.
 *
 * An integer sum s starts from the bits of INTEGER_ZERO instead of 0. So its bits are those of the float INTEGER_ZERO + s, and
 * scale * (INTEGER_ZERO + s) - INTEGER_ZERO * scale is scale * s rounded once. That takes one FMA instead of a conversion and
 * a product. The row's scale has 8 significant bits, so the subtrahend is exact. The end of a group then takes 2 operations
 * for each sum of 16 dot products (I8, groups of 64), or 3 for each sum of 8 (U4). */
#include "genbatch.h"
#include "simd.h"
#include "tiles.h"

#define U4_GROUP 32
#define U4_BYTES (COLUMNS * U4_GROUP / 2 + 4 * COLUMNS)
#define DEPTH 768 /* inputs: 24 KB of a block of 8 bits, half of L1 */
#define AHEAD 2048 /* bytes of weights that are prefetched */

ALWAYS_INLINE vi quad(const int8_t *p)
{
    int32_t four;
    memcpy(&four, p, 4);
    return vi_set1(four);
}

ALWAYS_INLINE vf scaled(vi sum, const group_factors *f)
{
    return vf_fma((vf)sum, vf_set1(f->scale), vf_set1(f->minus));
}

ALWAYS_INLINE void tile_i8(const int R, const uint8_t *w, const int8_t *x, const group_factors *factors, int group,
                           int64_t num_groups, bool first, int column, float *sums)
{
    for (int64_t g = 0; g < num_groups; g++, factors += R) {
        vi s[MAX_ROWS][2];
        UNROLL for (int r = 0; r < R; r++) s[r][0] = s[r][1] = vi_set1(factors[r].start);
        for (int k = 0; k < group; k += 4, w += 4 * COLUMNS, x += 4 * R) {
            vi w0 = vi_load(w + 4 * column), w1 = vi_load(w + 4 * (column + VL));
            __builtin_prefetch(w + 4 * column + AHEAD);
            __builtin_prefetch(w + 4 * column + AHEAD + 64);
            UNROLL for (int r = 0; r < R; r++) {
                vi a = quad(x + 4 * r);
                s[r][0] = vi_dot_bytes(s[r][0], w0, a);
                s[r][1] = vi_dot_bytes(s[r][1], w1, a);
            }
        }
        const uint16_t *scales = (const uint16_t *)w + column;
        vf scale0 = vf_from_bf16(scales), scale1 = vf_from_bf16(scales + VL);
        w += 2 * COLUMNS;
        const bool fresh = first && g == 0;
        UNROLL for (int r = 0; r < R; r++) {
            float *out = sums + r * COLUMNS + column;
            vf old0 = fresh ? (vf){0} : vf_load(out), old1 = fresh ? (vf){0} : vf_load(out + VL);
            vf_store(out, vf_fma(scaled(s[r][0], &factors[r]), scale0, old0));
            vf_store(out + VL, vf_fma(scaled(s[r][1], &factors[r]), scale1, old1));
        }
    }
}

ALWAYS_INLINE void tile_u4(const int R, const uint8_t *w, const int8_t *x, const group_factors *factors,
                           int64_t num_groups, bool first, int column, float *sums)
{
    for (int64_t g = 0; g < num_groups; g++, factors += R) {
        vi s[MAX_ROWS][2];
        UNROLL for (int r = 0; r < R; r++) s[r][0] = s[r][1] = vi_set1(INTEGER_ZERO_BITS);
        for (int k = 0; k < U4_GROUP; k += 8, w += 4 * COLUMNS, x += 8 * R) {
            vi b0 = vi_load(w + 4 * column), b1 = vi_load(w + 4 * (column + VL));
            __builtin_prefetch(w + 4 * column + AHEAD);
            __builtin_prefetch(w + 4 * column + AHEAD + 64);
            vi w0 = b0 & 0x0f0f0f0f, w1 = b1 & 0x0f0f0f0f;
            UNROLL for (int r = 0; r < R; r++) {
                vi a = quad(x + 4 * r);
                s[r][0] = vi_dot_bytes(s[r][0], w0, a);
                s[r][1] = vi_dot_bytes(s[r][1], w1, a);
            }
            w0 = (b0 >> 4) & 0x0f0f0f0f, w1 = (b1 >> 4) & 0x0f0f0f0f;
            UNROLL for (int r = 0; r < R; r++) {
                vi a = quad(x + 4 * R + 4 * r);
                s[r][0] = vi_dot_bytes(s[r][0], w0, a);
                s[r][1] = vi_dot_bytes(s[r][1], w1, a);
            }
        }
        const uint16_t *steps = (const uint16_t *)w + column, *offsets = steps + COLUMNS;
        vf step0 = vf_from_f16(steps), step1 = vf_from_f16(steps + VL);
        vf offset0 = vf_from_f16(offsets), offset1 = vf_from_f16(offsets + VL);
        w += 4 * COLUMNS;
        const bool fresh = first && g == 0;
        UNROLL for (int r = 0; r < R; r++) {
            float *out = sums + r * COLUMNS + column;
            vf old0 = fresh ? (vf){0} : vf_load(out), old1 = fresh ? (vf){0} : vf_load(out + VL);
            vf total = vf_set1(factors[r].total);
            vf_store(out, vf_fma(scaled(s[r][0], &factors[r]), step0, vf_fma(total, offset0, old0)));
            vf_store(out + VL, vf_fma(scaled(s[r][1], &factors[r]), step1, vf_fma(total, offset1, old1)));
        }
    }
}

/* The inputs of a pass over some groups of a block; `k` is the first input. */
typedef struct {
    const int8_t *x;
    const group_factors *factors;
    float *sums;
} pass;

ALWAYS_INLINE pass pass_at(const rows *a, tile_place at, int64_t first, int64_t k, int64_t group, float *sums)
{
    return (pass){(const int8_t *)a->data + at.start * a->k + k * at.size,
                  (const group_factors *)a->factors + at.start * a->groups + k / group * at.size,
                  sums + (at.start - first) * COLUMNS};
}

void gemm_i8_block(const linear *l, int64_t block, const rows *a, int64_t first, int64_t count, float *sums)
{
    int64_t group_bytes = (int64_t)COLUMNS * l->group + 2 * COLUMNS;
    const uint8_t *weights = (const uint8_t *)l->weights + block * (l->k / l->group) * group_bytes;
    int64_t step = DEPTH / l->group * l->group;
    for (int64_t k = 0; k < l->k; k += step) {
        int64_t num_groups = (l->k - k < step ? l->k - k : step) / l->group;
        const uint8_t *w = weights + k / l->group * group_bytes;
        tile_place at;
        for (int64_t r = first; r < first + count; r += at.size) {
            at = tile_with(a->count, r);
            pass p = pass_at(a, at, first, k, l->group, sums);
            for (int c = 0; c < COLUMNS; c += 2 * VL) {
#define CALL(R) tile_i8(R, w, p.x, p.factors, l->group, num_groups, k == 0, c, p.sums)
                FOR_ROWS(at.size, CALL)
#undef CALL
            }
        }
    }
}

void gemm_u4_block(const linear *l, int64_t block, const rows *a, int64_t first, int64_t count, float *sums)
{
    const uint8_t *weights = (const uint8_t *)l->weights + block * (l->k / U4_GROUP) * U4_BYTES;
    for (int64_t k = 0; k < l->k; k += DEPTH) {
        int64_t num_groups = (l->k - k < DEPTH ? l->k - k : DEPTH) / U4_GROUP;
        const uint8_t *w = weights + k / U4_GROUP * U4_BYTES;
        tile_place at;
        for (int64_t r = first; r < first + count; r += at.size) {
            at = tile_with(a->count, r);
            pass p = pass_at(a, at, first, k, U4_GROUP, sums);
            for (int c = 0; c < COLUMNS; c += 2 * VL) {
#define CALL(R) tile_u4(R, w, p.x, p.factors, num_groups, k == 0, c, p.sums)
                FOR_ROWS(at.size, CALL)
#undef CALL
            }
        }
    }
}

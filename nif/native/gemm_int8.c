/* int8 rows x integer weights of 8 or 4 bits, a scale for every `group` inputs on both sides.
 *
 * The dot product takes unsigned x signed bytes, so the weights are the unsigned side and a row's byte
 * quadruple is broadcast. Integer sums are exact; at the end of a group they are scaled into float sums.
 * These lie in memory (12 x 32 x 4 = 1.5 KB, in L1) because 24 integer and 24 float sums exceed 32 registers;
 * with groups of 64 that end costs 3 vector operations for 16 dot products.
 *
 * I8 block, per group: [group / 4][COLUMNS][4] bytes, value + 128; then COLUMNS bfloat16 scales.
 *     w = scale * (byte - 128), and sum (byte - 128) a = sum byte a - 128 sum a.
 * U4 block, per group of 32: [4][COLUMNS][4] bytes, whose low nibbles are inputs 8j .. 8j+3 and whose high
 *     nibbles are 8j+4 .. 8j+7; then COLUMNS float16 steps and COLUMNS float16 offsets.
 *     w = step * nibble + offset, and sum w a = step * sum nibble a + offset * sum a. */
#include "genbatch.h"
#include "simd.h"
#include "tiles.h"

#define U4_GROUP 32
#define U4_BYTES (COLUMNS * U4_GROUP / 2 + 4 * COLUMNS)
#define DEPTH 768 /* inputs: 24 KB of a block of 8 bits, half of L1 */

typedef struct {
    const int8_t *data;
    const float *scales;
    const int32_t *sums;
    int64_t stride, groups;
} row_view;

ALWAYS_INLINE vi quad(const int8_t *p)
{
    int32_t four;
    memcpy(&four, p, 4);
    return vi_set1(four);
}

ALWAYS_INLINE void tile_i8(const int R, const uint8_t *w, row_view x, int group, int num_groups, bool first,
                           float *sums, int column)
{
    for (int g = 0; g < num_groups; g++) {
        vi s[MAX_ROWS][2];
        UNROLL for (int r = 0; r < R; r++) s[r][0] = s[r][1] = vi_set1(-128 * x.sums[r * x.groups + g]);
        for (int k = 0; k < group; k += 4, w += 4 * COLUMNS) {
            vi w0 = vi_load(w + 4 * column), w1 = vi_load(w + 4 * (column + VL));
            __builtin_prefetch(w + 4 * column + 2048);
            __builtin_prefetch(w + 4 * column + 2048 + 64);
            UNROLL for (int r = 0; r < R; r++) {
                vi a = quad(x.data + r * x.stride + g * group + k);
                s[r][0] = vi_dot_bytes(s[r][0], w0, a);
                s[r][1] = vi_dot_bytes(s[r][1], w1, a);
            }
        }
        vf scale0 = vf_from_bf16((const uint16_t *)w + column);
        vf scale1 = vf_from_bf16((const uint16_t *)w + column + VL);
        w += 2 * COLUMNS;
        UNROLL for (int r = 0; r < R; r++) {
            vf a = vf_set1(x.scales[r * x.groups + g]);
            float *out = sums + r * COLUMNS + column;
            vf old0 = first && g == 0 ? (vf){0} : vf_load(out);
            vf old1 = first && g == 0 ? (vf){0} : vf_load(out + VL);
            vf_store(out, vf_fma(vf_from_int(s[r][0]) * a, scale0, old0));
            vf_store(out + VL, vf_fma(vf_from_int(s[r][1]) * a, scale1, old1));
        }
    }
}

ALWAYS_INLINE void tile_u4(const int R, const uint8_t *w, row_view x, int num_groups, bool first, float *sums,
                           int column)
{
    for (int g = 0; g < num_groups; g++) {
        vi s[MAX_ROWS][2];
        UNROLL for (int r = 0; r < R; r++) s[r][0] = s[r][1] = (vi){0};
        UNROLL for (int k = 0; k < U4_GROUP; k += 8, w += 4 * COLUMNS) {
            vi b0 = vi_load(w + 4 * column), b1 = vi_load(w + 4 * (column + VL));
            __builtin_prefetch(w + 4 * column + 2048);
            __builtin_prefetch(w + 4 * column + 2048 + 64);
            vi w0 = b0 & 0x0f0f0f0f, w1 = b1 & 0x0f0f0f0f;
            vi w2 = (b0 >> 4) & 0x0f0f0f0f, w3 = (b1 >> 4) & 0x0f0f0f0f;
            UNROLL for (int r = 0; r < R; r++) {
                const int8_t *p = x.data + r * x.stride + g * U4_GROUP + k;
                vi a = quad(p), b = quad(p + 4);
                s[r][0] = vi_dot_bytes(vi_dot_bytes(s[r][0], w0, a), w2, b);
                s[r][1] = vi_dot_bytes(vi_dot_bytes(s[r][1], w1, a), w3, b);
            }
        }
        const uint16_t *steps = (const uint16_t *)w + column;
        vf step0 = vf_from_f16(steps), step1 = vf_from_f16(steps + VL);
        vf offset0 = vf_from_f16(steps + COLUMNS), offset1 = vf_from_f16(steps + COLUMNS + VL);
        w += 4 * COLUMNS;
        UNROLL for (int r = 0; r < R; r++) {
            float scale = x.scales[r * x.groups + g];
            vf a = vf_set1(scale), total = vf_set1(scale * (float)x.sums[r * x.groups + g]);
            float *out = sums + r * COLUMNS + column;
            vf old0 = first && g == 0 ? (vf){0} : vf_load(out);
            vf old1 = first && g == 0 ? (vf){0} : vf_load(out + VL);
            vf_store(out, vf_fma(vf_from_int(s[r][0]) * a, step0, vf_fma(total, offset0, old0)));
            vf_store(out + VL, vf_fma(vf_from_int(s[r][1]) * a, step1, vf_fma(total, offset1, old1)));
        }
    }
}

ALWAYS_INLINE row_view view(const rows *a, int64_t row, int64_t k, int group)
{
    return (row_view){(const int8_t *)a->data + row * a->stride + k, a->scales + row * a->groups + k / group,
                      a->sums + row * a->groups + k / group, a->stride, a->groups};
}

void gemm_i8_block(const linear *l, int64_t block, const rows *a, int64_t first, int count, float *sums)
{
    int64_t group_bytes = (int64_t)COLUMNS * l->group + 2 * COLUMNS;
    const uint8_t *weights = (const uint8_t *)l->weights + block * (l->k / l->group) * group_bytes;
    int step = DEPTH / l->group * l->group;
    for (int k = 0; k < l->k; k += step) {
        int num_groups = (l->k - k < step ? l->k - k : step) / l->group;
        const uint8_t *w = weights + k / l->group * group_bytes;
        for (int r = 0, size; r < count; r += size) {
            size = tile_rows(count, r);
            row_view x = view(a, first + r, k, l->group);
            for (int c = 0; c < COLUMNS; c += 2 * VL) {
                float *out = sums + r * COLUMNS;
#define CALL(R) tile_i8(R, w, x, l->group, num_groups, k == 0, out, c)
                FOR_ROWS(size, CALL)
#undef CALL
            }
        }
    }
}

void gemm_u4_block(const linear *l, int64_t block, const rows *a, int64_t first, int count, float *sums)
{
    const uint8_t *weights = (const uint8_t *)l->weights + block * (l->k / U4_GROUP) * U4_BYTES;
    for (int k = 0; k < l->k; k += DEPTH) {
        int num_groups = (l->k - k < DEPTH ? l->k - k : DEPTH) / U4_GROUP;
        const uint8_t *w = weights + (int64_t)(k / U4_GROUP) * U4_BYTES;
        for (int r = 0, size; r < count; r += size) {
            size = tile_rows(count, r);
            row_view x = view(a, first + r, k, U4_GROUP);
            for (int c = 0; c < COLUMNS; c += 2 * VL) {
                float *out = sums + r * COLUMNS;
#define CALL(R) tile_u4(R, w, x, num_groups, k == 0, out, c)
                FOR_ROWS(size, CALL)
#undef CALL
            }
        }
    }
}

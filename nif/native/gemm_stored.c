/* float rows x weights in the blocks of a GGUF file (stored.h): exact values, float products and sums.
 *
 * This file multiplies types of 16 bits, FP8, and linears that have such a type and blocks. On machines that do not multiply
 * bytes faster than floats it multiplies all blocks; on other machines gemm_stored_digits.c does. With one row, each weight is
 * converted in a register and used there. With more rows, DEPTH inputs of a block are converted once, into 16 KB of L1, and
 * the tiles of gemm_f32.c use them for all rows. Both ways add the products of an output in ascending order of the inputs, with
 * one fused operation each. So a row's result has the same bits for any number of rows. */
#include "genbatch.h"
#include "simd.h"
#include "stored.h"
#include "stored_cell.h"
#include "tiles.h"

#define AHEAD 6144 /* bytes of weights that are prefetched */
#define DEPTH 128 /* inputs: half a unit of 256, or four units of 32 */

#define LEVEL(x) x
static const float FLOAT_LEVELS[][16] = LEVEL_TABLES;
#undef LEVEL
static const float PLAIN[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Looks up the lowest 4 bits of each lane in a table of 16. */
ALWAYS_INLINE vf looked_up(const float *table, vi lanes)
{
#if VL == 16
    return (vf)_mm512_permutexvar_ps((__m512i)lanes, _mm512_loadu_ps(table));
#elif VL == 8 && defined(__AVX2__)
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)lanes);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)lanes);
    return (vf)_mm256_blendv_ps(low, high, (__m256)(lanes << 28)); /* by bit 3 */
#else
    vf out;
    for (int i = 0; i < VL; i++) out[i] = table[lanes[i] & 15];
    return out;
#endif
}

ALWAYS_INLINE int shift4(int i) { return i < 4 ? 8 * i : 8 * (i - 4) + 4; }
ALWAYS_INLINE int shift2(int j, int i) { return 8 * (i % 4) + 2 * (j % 2 * 2 + i / 4); }
ALWAYS_INLINE int shift1(int j, int i) { return 8 * (i % 4) + 2 * j + i / 4; }

/* Moves bit `from` of each lane to bit `to`; the other bits are undefined. */
ALWAYS_INLINE vi moved(vi x, int from, int to) { return from >= to ? x >> (from - to) : x << (to - from); }

/* Returns the weight of input i of eight. */
ALWAYS_INLINE vf weight_at(const stored_type t, const words w, int i, const group g)
{
    if (t.levels && t.bits == 4) return looked_up(FLOAT_LEVELS[t.levels], w.low >> shift4(i)) * g.scale;
    vf code;
    if (t.bits == 4) {
#if VL == 16
        code = looked_up(PLAIN, w.low >> shift4(i));
#else
        code = vf_from_int((w.low >> shift4(i)) & 15);
#endif
    } else if (t.bits == 5) {
        code = vf_from_int(((w.low >> shift4(i)) & 15) | (moved(w.high, shift1(w.j, i), 4) & 16));
    } else if (t.bits == 6) {
        code = vf_from_int(((w.low >> shift4(i)) & 15) | (moved(w.high, shift2(w.j, i), 4) & 48));
    } else if (t.bits == 3) {
        const vi three = ((w.low >> shift2(w.j, i)) & 3) | (moved(w.high, shift1(w.j, i), 2) & 4);
        if (t.levels) return looked_up(FLOAT_LEVELS[t.levels], three) * g.scale;
        code = vf_from_int(three);
    } else if (t.bits == 1) {
        code = vf_from_int(moved(w.high, shift1(w.j, i), 1) & 2);
    } else {
        code = vf_from_int((w.low >> shift2(w.j, i)) & 3);
    }
    return vf_fma(g.scale, code, -g.minus);
}

/* The use of weights: with `x` they are multiplied into `sums`, without `x` they are stored in `out` [inputs][COLUMNS]. */
typedef struct {
    const float *x;
    vf *sums;
    float *out;
} use;

ALWAYS_INLINE void used(const bool multiply, const use u, int64_t input, int vector, vf weight)
{
    if (multiply)
        u.sums[vector] = vf_fma(weight, vf_set1(u.x[input]), u.sums[vector]);
    else
        vf_store(u.out + input * COLUMNS + vector * VL, weight);
}

/* Uses the 32 inputs of a cell. */
ALWAYS_INLINE void use_cell(const int kind, const bool multiply, const uint8_t *head, const uint8_t *cell, const use u)
{
    const stored_type t = stored_type_of(kind);
    const uint8_t *codes = cell + scale_bytes(t);
    group g[VECTORS];
    for (int ahead = 0; ahead < scale_bytes(t) + code_bytes(t); ahead += 64) __builtin_prefetch(cell + AHEAD + ahead);
    if (t.bits == 8) {
        UNROLL for (int v = 0; v < VECTORS; v++) g[v] = group_of(t, kind, head, cell, 0, v * VL);
        for (int j = 0; j < 8; j++) {
            vi w[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) w[v] = vi_load(codes + j * WORDS + 4 * v * VL);
            UNROLL for (int i = 0; i < 4; i++) UNROLL for (int v = 0; v < VECTORS; v++)
                used(multiply, u, 4 * j + i, v,
                     t.levels == E4M3 ? from_e4m3(w[v] >> (8 * i)) * g[v].scale
                                      : vf_fma(g[v].scale, vf_from_int((w[v] >> (8 * i)) & 255), -g[v].minus));
        }
        return;
    }
    UNROLL for (int j = 0; j < 4; j++) {
        if (j == 0 || (t.scale_group == 16 && j == 2))
            UNROLL for (int v = 0; v < VECTORS; v++) g[v] = group_of(t, kind, head, cell, j / 2, v * VL);
        words w[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) w[v] = words_of(t, codes, j, v * VL);
        UNROLL for (int i = 0; i < 8; i++) UNROLL for (int v = 0; v < VECTORS; v++)
            used(multiply, u, 8 * j + i, v, weight_at(t, w[v], i, g[v]));
    }
}

/* Uses the inputs [from, from + count), whole cells, of a block with units from `weights` on. */
ALWAYS_INLINE void use_units(const int kind, const bool multiply, const uint8_t *weights, int64_t from, int64_t count,
                             use u)
{
    const stored_type t = stored_type_of(kind);
    const int64_t cell_size = scale_bytes(t) + code_bytes(t), cells = t.unit / CELL;
    for (int64_t k = from; k < from + count; k += CELL) {
        const uint8_t *head = weights + k / t.unit * unit_bytes(t);
        const uint8_t *cell = head + head_bytes(t) + k / CELL % cells * cell_size;
        use_cell(kind, multiply, head, cell, u);
        if (multiply)
            u.x += CELL;
        else
            u.out += CELL * COLUMNS;
    }
}

ALWAYS_INLINE void use_halves(const int kind, const bool multiply, const uint8_t *weights, int64_t from, int64_t count,
                              const use u)
{
    for (int64_t k = 0; k < count; k++) {
        const uint16_t *row = (const uint16_t *)weights + (from + k) * COLUMNS;
        __builtin_prefetch(row + 16 * COLUMNS);
        UNROLL for (int v = 0; v < VECTORS; v++)
            used(multiply, u, k, v, kind == WEIGHT_F16 ? vf_from_f16(row + v * VL) : vf_from_bf16(row + v * VL));
    }
}

#define FOR_KINDS(kind, CALL)                                                                                  \
    switch (kind) {                                                                                            \
    case WEIGHT_F16: CALL(use_halves, WEIGHT_F16); break;                                                      \
    case WEIGHT_WIDE: CALL(use_halves, WEIGHT_WIDE); break;                                                    \
    case WEIGHT_F8_32: CALL(use_units, WEIGHT_F8_32); break;                                                   \
    case WEIGHT_F8_128: CALL(use_units, WEIGHT_F8_128); break;                                                 \
    default: FOR_BLOCK_KINDS(kind, CALL)                                                                       \
    }

/* Converts the weights of the inputs [from, from + count) of one block to floats. Each type has separate compiled code. */
static void make(int kind, const uint8_t *weights, int64_t from, int64_t count, float *out)
{
    const use u = {.out = out};
#define CALL(HOW, KIND) HOW(KIND, false, weights, from, count, u)
    FOR_KINDS(kind, CALL)
#undef CALL
}

static void multiply_row(int kind, const uint8_t *weights, int64_t k, const float *x, float *sums)
{
    vf s[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) s[v] = (vf){0};
    const use u = {.x = x, .sums = s};
#define CALL(HOW, KIND) HOW(KIND, true, weights, 0, k, u)
    FOR_KINDS(kind, CALL)
#undef CALL
    UNROLL for (int v = 0; v < VECTORS; v++) vf_store(sums + v * VL, s[v]);
}

int64_t stored_block_bytes(int kind, int64_t k)
{
    const stored_type t = stored_type_of(kind);
    return k / t.unit * unit_bytes(t);
}

void gemm_stored_block(int kind, const uint8_t *weights, int64_t k, const rows *a, int64_t first, int64_t count,
                       float *sums)
{
    if (a->count == 1) {
        multiply_row(kind, weights, k, a->data, sums);
        return;
    }
    _Alignas(64) float made[DEPTH * COLUMNS];
    for (int64_t from = 0; from < k; from += DEPTH) {
        int64_t depth = smaller(k - from, DEPTH);
        make(kind, weights, from, depth, made);
        gemm_f32_depth(made, from, depth, a, first, count, sums);
    }
}

/* Reads one output's weights, [k]. This is a token's embedding if the embedding and the head share their blocks. */
void stored_row(int kind, const uint8_t *weights, int64_t k, int column, float *out)
{
    _Alignas(64) float made[DEPTH * COLUMNS];
    for (int64_t from = 0; from < k; from += DEPTH) {
        int64_t depth = smaller(k - from, DEPTH);
        make(kind, weights, from, depth, made);
        for (int64_t i = 0; i < depth; i++) out[from + i] = made[i * COLUMNS + column];
    }
}

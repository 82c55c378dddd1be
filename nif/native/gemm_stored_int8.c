/* int8 rows x weights in the blocks of a GGUF file (stored.h): integer dot products, a float scale for every group.
 *
 * DEPTH inputs of a block are laid out once, a byte a code, beside the scale and the minus of their groups, some 14 KB
 * of L1; the tiles then walk over all rows. The integers are exact, and
 *     sum w a = scale * (sum code a) - minus * (sum a).
 * A row's groups have 32 inputs, or 16 where some part of the linear has scales for 16. */
#include "genbatch.h"
#include "simd.h"
#include "stored.h"
#include "stored_cell.h"
#include "tiles.h"

#define DEPTH 256
#define LEAST_GROUP 16

static const uint8_t RAISED[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
#define RAISED_ZERO 128.0f /* levels of IQ4_NL, plus this */

typedef struct {
    _Alignas(64) uint8_t codes[DEPTH * COLUMNS]; /* [DEPTH / 4][COLUMNS][4] */
    _Alignas(64) float scales[DEPTH / LEAST_GROUP][COLUMNS];
    _Alignas(64) float minus[DEPTH / LEAST_GROUP][COLUMNS];
} plain;

/* The table's byte for the low 4 bits of each byte; the high bits are 0. */
ALWAYS_INLINE vi raised(vi nibbles)
{
#if VL == 16
    __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)RAISED));
    return (vi)_mm512_shuffle_epi8(table, (__m512i)nibbles);
#else
    uint8_t bytes[4 * VL];
    memcpy(bytes, &nibbles, sizeof(bytes));
    for (int i = 0; i < 4 * VL; i++) bytes[i] = RAISED[bytes[i]];
    memcpy(&nibbles, bytes, sizeof(bytes));
    return nibbles;
#endif
}

/* Four inputs from 8 * j + 4 * half on, a byte each. */
ALWAYS_INLINE vi codes_of(const stored_type t, const words w, int half)
{
    const vi one = vi_set1(0x01010101), three = vi_set1(0x03030303), nibble = vi_set1(0x0f0f0f0f);
    const int at2 = 2 * (w.j % 2 * 2 + half), at1 = 2 * w.j + half;
    if (t.bits == 2) return (w.low >> at2) & three;
    if (t.bits == 3) return ((w.low >> at2) & three) | ((w.high >> at1) & one) << 2;
    vi low = (w.low >> (4 * half)) & nibble;
    if (t.levels) return raised(low);
    if (t.bits == 5) return low | ((w.high >> at1) & one) << 4;
    if (t.bits == 6) return low | ((w.high >> at2) & three) << 4;
    return low;
}

ALWAYS_INLINE void lay_out_cell(const int kind, const uint8_t *head, const uint8_t *cell, int groups, int64_t input,
                                plain *out)
{
    const stored_type t = stored_type_of(kind);
    const uint8_t *codes = cell + scale_bytes(t);
    uint8_t *to = out->codes + input * COLUMNS;
    for (int which = 0; which < groups; which++)
        UNROLL for (int v = 0; v < VECTORS; v++) {
            group g = group_of(t, kind, head, cell, t.scale_group == 16 ? which : 0, v * VL);
            const int64_t at = input * groups / CELL + which;
            vf_store(out->scales[at] + v * VL, g.scale);
            vf_store(out->minus[at] + v * VL, t.levels ? g.scale * RAISED_ZERO : g.minus);
        }
    for (int ahead = 0; ahead < scale_bytes(t) + code_bytes(t); ahead += 64) __builtin_prefetch(cell + AHEAD + ahead);
    if (t.bits == 8) {
        memcpy(to, codes, 8 * WORDS);
        return;
    }
    UNROLL for (int j = 0; j < 4; j++) UNROLL for (int v = 0; v < VECTORS; v++) {
        const words w = words_of(t, codes, j, v * VL);
        *(vi_memory *)(to + 2 * j * WORDS + 4 * v * VL) = codes_of(t, w, 0);
        *(vi_memory *)(to + (2 * j + 1) * WORDS + 4 * v * VL) = codes_of(t, w, 1);
    }
}

ALWAYS_INLINE void lay_out(const int kind, const uint8_t *weights, int64_t from, int64_t count, int groups, plain *out)
{
    const stored_type t = stored_type_of(kind);
    const int64_t cell_size = scale_bytes(t) + code_bytes(t), cells = t.unit / CELL;
    for (int64_t k = 0; k < count; k += CELL) {
        const uint8_t *head = weights + (from + k) / t.unit * unit_bytes(t);
        lay_out_cell(kind, head, head + head_bytes(t) + (from + k) / CELL % cells * cell_size, groups, k, out);
    }
}

ALWAYS_INLINE void tile(const int R, const plain *w, const int8_t *x, const group_factors *factors, int size,
                        int64_t num_groups, bool first, int column, float *sums)
{
    const uint8_t *codes = w->codes + 4 * column;
    for (int64_t g = 0; g < num_groups; g++, factors += R) {
        vi s[MAX_ROWS][2];
        UNROLL for (int r = 0; r < R; r++) s[r][0] = s[r][1] = vi_set1(INTEGER_ZERO_BITS);
        for (int k = 0; k < size; k += 4, codes += WORDS, x += 4 * R) {
            vi w0 = vi_load(codes), w1 = vi_load(codes + 4 * VL);
            UNROLL for (int r = 0; r < R; r++) {
                int32_t four;
                memcpy(&four, x + 4 * r, 4);
                s[r][0] = vi_dot_bytes(s[r][0], w0, vi_set1(four));
                s[r][1] = vi_dot_bytes(s[r][1], w1, vi_set1(four));
            }
        }
        vf scale0 = vf_load(w->scales[g] + column), scale1 = vf_load(w->scales[g] + column + VL);
        vf minus0 = -vf_load(w->minus[g] + column), minus1 = -vf_load(w->minus[g] + column + VL);
        const bool fresh = first && g == 0;
        UNROLL for (int r = 0; r < R; r++) {
            float *out = sums + r * COLUMNS + column;
            vf old0 = fresh ? (vf){0} : vf_load(out), old1 = fresh ? (vf){0} : vf_load(out + VL);
            vf scale = vf_set1(factors[r].scale), zero = vf_set1(factors[r].minus), total = vf_set1(factors[r].total);
            vf_store(out, vf_fma(vf_fma((vf)s[r][0], scale, zero), scale0, vf_fma(total, minus0, old0)));
            vf_store(out + VL, vf_fma(vf_fma((vf)s[r][1], scale, zero), scale1, vf_fma(total, minus1, old1)));
        }
    }
}

void gemm_stored_int8_block(int kind, const uint8_t *weights, int64_t k, int size, const rows *a, int64_t first,
                            int64_t count, float *sums)
{
    plain made;
    for (int64_t from = 0; from < k; from += DEPTH) {
        const int64_t depth = smaller(k - from, DEPTH);
#define CALL(HOW, KIND) lay_out(KIND, weights, from, depth, CELL / size, &made)
        FOR_BLOCK_KINDS(kind, CALL)
#undef CALL
        tile_place at;
        for (int64_t r = first; r < first + count; r += at.size) {
            at = tile_with(a->count, r);
            const int8_t *x = (const int8_t *)a->data + at.start * a->k + from * at.size;
            const group_factors *factors = a->factors + at.start * a->groups + from / size * at.size;
            for (int c = 0; c < COLUMNS; c += 2 * VL) {
                float *out = sums + (r - first) * COLUMNS;
#define CALL(R) tile(R, &made, x, factors, size, depth / size, from == 0, c, out)
                FOR_ROWS(at.size, CALL)
#undef CALL
            }
        }
    }
}

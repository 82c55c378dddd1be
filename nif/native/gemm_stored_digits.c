/* float rows x weights in the blocks of a GGUF file (stored.h), by integer dot products.
 *
 * A row is given as 24-bit integers, with a power of two as the scale of every group of 16 or 32 inputs (rows.c). Each integer
 * has three bytes (digits): a = 65536 high + 256 middle + low. A code is a byte, so
 *     sum code a = 65536 sum(code high) + 256 sum(code middle) + sum(code low)
 * has three exact sums of bytes. Only the end of a group computes in floats, while float products round at every input. The
 * integers lose at most 2^-23 of the group's largest input, and nothing is rounded within a group. For the rows of real models
 * the result is nearer to the true sum than with float products. It takes three byte products instead of four float products,
 * and no conversion of each weight to a float.
 *
 * DEPTH inputs of a block are laid out once (stored_plain.h), and tiles of up to DIGIT_ROWS rows use them. The code that means
 * zero is subtracted within the integers. A row's sums do not depend on the other rows. */
#include "genbatch.h"
#include "simd.h"
#include "stored_plain.h"
#include "tiles.h"

#if VL == 16 || defined(__aarch64__)
#define DIGIT_ROWS 4 /* x 3 sums x 2 vectors = 24 of 32 registers */
#else
#define DIGIT_ROWS 2
#endif

#define FEW_ROWS 2 /* up to this many rows, memory is the limit */

/* This is faster than float products only if one instruction multiplies four bytes. */
bool digits_pay(void)
{
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)
    return true;
#else
    return false;
#endif
}

/* Multiplies a word's inputs by R rows, and adds to `s`: three sums of two vectors of columns for each row. Moves `of_digit` to
 * the next inputs. */
ALWAYS_INLINE void multiply_word(const int R, const code_form form, int word, const group_words *words, const vi *plane,
                                 const int8_t **of_digit, int64_t pitch, vi s[DIGIT_ROWS][DIGITS][2])
{
    const vi w0 = vi_load(words->low + word * WORDS), w1 = vi_load(words->low + word * WORDS + 4 * VL);
    UNROLL for (int half = 0; half < inputs_of_word(form) / 4; half++) {
        const vi c0 = four_codes(form, w0, plane[0], 2 * word + half), c1 = four_codes(form, w1, plane[1], 2 * word + half);
        UNROLL for (int d = 0; d < DIGITS; d++) {
            UNROLL for (int r = 0; r < R; r++) {
                int32_t four;
                memcpy(&four, of_digit[d] + 4 * r, 4);
                s[r][d][0] = vi_dot_bytes(s[r][d][0], c0, vi_set1(four));
                s[r][d][1] = vi_dot_bytes(s[r][d][1], c1, vi_set1(four));
            }
            of_digit[d] += 4 * DIGITS * pitch;
        }
    }
}

/* Multiplies R rows. `x`: [inputs / 4][DIGITS][pitch][4], from the tile's first row on; `factors`: [groups][pitch]. */
ALWAYS_INLINE void tile(const int R, const code_form form, const bool minima, int zero_shift, const plain *w, const int8_t *x,
                        const digit_factors *factors, int64_t pitch, int size, int64_t num_groups, int column,
                        float *sums)
{
    const int8_t *of_digit[DIGITS];
    UNROLL for (int d = 0; d < DIGITS; d++) of_digit[d] = x + 4 * d * pitch;
    for (int64_t g = 0; g < num_groups; g++, factors += pitch) {
        const group_words words = words_of_group(form, w, g, size, column);
        vi s[DIGIT_ROWS][DIGITS][2], plane[2] = {{0}, {0}};
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int d = 0; d < DIGITS; d++) {
            s[r][d][0] = minima ? (vi){0} : vi_set1(factors[r].minus_digits[d]) << zero_shift;
            s[r][d][1] = s[r][d][0];
        }
        if (form == SIXES) {
            plane[0] = vi_load(words.high), plane[1] = vi_load(words.high + 4 * VL);
            UNROLL for (int word = 0; word < 2; word++) {
                fetch_ahead(form, R <= FEW_ROWS, w, g * 16 + word * 8);
                multiply_word(R, form, word, &words, plane, of_digit, pitch, s);
            }
        } else {
            for (int word = 0; word < size / inputs_of_word(form); word++) {
                fetch_ahead(form, R <= FEW_ROWS, w, g * size + word * inputs_of_word(form));
                multiply_word(R, form, word, &words, plane, of_digit, pitch, s);
            }
        }
        UNROLL for (int v = 0; v < 2; v++) {
            const vf scale = vf_load(w->scales[g] + column + v * VL);
            const vf minus = minima ? vf_load(w->minus[g] + column + v * VL) : (vf){0};
            UNROLL for (int r = 0; r < R; r++) {
                float *out = sums + r * COLUMNS + column + v * VL;
                vf high = vf_from_int(s[r][2][v]), lower = vf_from_int((s[r][1][v] << 8) + s[r][0][v]);
                vf total = vf_fma(high, vf_set1(65536.0f), lower), old = vf_load(out);
                if (minima) old = vf_fma(vf_set1(factors[r].minus_total), minus, old);
                vf_store(out, vf_fma(total, scale * vf_set1(factors[r].scale), old));
            }
        }
    }
}

/* Returns the exponent of a type's zero, a power of two; -1 for a type with minima. */
static int zero_shift_of(const int kind)
{
    const stored_type t = stored_type_of(kind);
    return t.minima ? -1 : t.levels ? 7 : __builtin_ctz((unsigned)t.zero);
}

void gemm_stored_digits_block(int kind, const uint8_t *weights, int64_t k, int size, const rows *a, int64_t first,
                              int64_t count, float *sums)
{
    const int zero_shift = zero_shift_of(kind);
    const code_form form = form_of(stored_type_of(kind), a->count <= DIGIT_ROWS);
    plain made;
    memset(sums, 0, sizeof(float) * COLUMNS * (size_t)count);
    for (int64_t from = 0; from < k; from += DEPTH) {
        const int64_t depth = smaller(k - from, DEPTH);
#define CALL(HOW, KIND) lay_out(KIND, form, weights, from, depth, CELL / size, &made)
        FOR_BLOCK_KINDS(kind, CALL)
#undef CALL
        tile_place at;
        for (int64_t r = first; r < first + count; r += at.size) {
            at = tile_with(a->count, r);
            const int8_t *x = (const int8_t *)a->data + DIGITS * (at.start * a->k + from * at.size);
            const digit_factors *factors = (const digit_factors *)a->factors + at.start * a->groups + from / size * at.size;
            const int parts = (at.size + DIGIT_ROWS - 1) / DIGIT_ROWS;
            for (int part = 0, row = 0, end; part < parts; part++, row = end) {
                end = at.size * (part + 1) / parts;
                float *out = sums + (r - first + row) * COLUMNS;
                for (int c = 0; c < COLUMNS; c += 2 * VL)
#define TILE(R, FORM, MINIMA)                                                                                  \
    tile(R, FORM, MINIMA, zero_shift, &made, x + 4 * row, factors + row, at.size, size, depth / size, c, out)
#define CALL(R)                                                                                                \
    if (form == NIBBLES && zero_shift < 0)                                                                     \
        TILE(R, NIBBLES, true);                                                                                \
    else if (form == NIBBLES)                                                                                  \
        TILE(R, NIBBLES, false);                                                                               \
    else if (form == SIXES)                                                                                    \
        TILE(R, SIXES, false);                                                                                 \
    else if (zero_shift < 0)                                                                                   \
        TILE(R, BYTES, true);                                                                                  \
    else                                                                                                       \
        TILE(R, BYTES, false)
                    switch (end - row) {
                    case 1: CALL(1); break;
                    case 2: CALL(2); break;
#if DIGIT_ROWS == 4
                    case 3: CALL(3); break;
                    default: CALL(4); break;
#endif
                    }
#undef CALL
#undef TILE
            }
        }
    }
}

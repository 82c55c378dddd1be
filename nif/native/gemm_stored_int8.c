/* int8 rows x weights in the blocks of a GGUF file (stored.h): integer dot products, a float scale for every group.
 *
 * DEPTH inputs of a block are laid out once (stored_plain.h), and the tiles of all rows use them. The integers are exact, and
 *     sum w a = scale * (sum code a) - minus * (sum a).
 * A row's groups have 32 inputs, or 16 if some part of the linear has scales for 16 inputs. */
#include "genbatch.h"
#include "simd.h"
#include "stored_plain.h"
#include "tiles.h"

#define FEW_ROWS 4 /* up to this many rows, memory is the limit */

/* Multiplies a word's inputs by R rows, and adds to `s`: two vectors of columns for each row. Returns the next input of x. */
ALWAYS_INLINE const int8_t *multiply_word(const int R, const code_form form, int word, const group_words *words,
                                          const vi *plane, const int8_t *x, vi s[MAX_ROWS][2])
{
    const vi w0 = vi_load(words->low + word * WORDS), w1 = vi_load(words->low + word * WORDS + 4 * VL);
    UNROLL for (int half = 0; half < inputs_of_word(form) / 4; half++, x += 4 * R) {
        const vi c0 = four_codes(form, w0, plane[0], 2 * word + half), c1 = four_codes(form, w1, plane[1], 2 * word + half);
        UNROLL for (int r = 0; r < R; r++) {
            int32_t four;
            memcpy(&four, x + 4 * r, 4);
            s[r][0] = vi_dot_bytes(s[r][0], c0, vi_set1(four));
            s[r][1] = vi_dot_bytes(s[r][1], c1, vi_set1(four));
        }
    }
    return x;
}

ALWAYS_INLINE void tile(const int R, const code_form form, const plain *w, const int8_t *x, const group_factors *factors,
                        int size, int64_t num_groups, bool first, int column, float *sums)
{
    for (int64_t g = 0; g < num_groups; g++, factors += R) {
        const group_words words = words_of_group(form, w, g, size, column);
        vi s[MAX_ROWS][2], plane[2] = {{0}, {0}};
        UNROLL for (int r = 0; r < R; r++) s[r][0] = s[r][1] = vi_set1(INTEGER_ZERO_BITS);
        if (form == SIXES) {
            plane[0] = vi_load(words.high), plane[1] = vi_load(words.high + 4 * VL);
            UNROLL for (int word = 0; word < 2; word++) {
                fetch_ahead(form, R <= FEW_ROWS, w, g * 16 + word * 8);
                x = multiply_word(R, form, word, &words, plane, x, s);
            }
        } else {
            for (int word = 0; word < size / inputs_of_word(form); word++) {
                fetch_ahead(form, R <= FEW_ROWS, w, g * size + word * inputs_of_word(form));
                x = multiply_word(R, form, word, &words, plane, x, s);
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
    const code_form form = form_of(stored_type_of(kind), tiles_for(a->count) == 1);
    plain made;
    for (int64_t from = 0; from < k; from += DEPTH) {
        const int64_t depth = smaller(k - from, DEPTH);
#define CALL(HOW, KIND) lay_out(KIND, form, weights, from, depth, CELL / size, &made)
        FOR_BLOCK_KINDS(kind, CALL)
#undef CALL
        tile_place at;
        for (int64_t r = first; r < first + count; r += at.size) {
            at = tile_with(a->count, r);
            const int8_t *x = (const int8_t *)a->data + at.start * a->k + from * at.size;
            const group_factors *factors = (const group_factors *)a->factors + at.start * a->groups + from / size * at.size;
            for (int c = 0; c < COLUMNS; c += 2 * VL) {
                float *out = sums + (r - first) * COLUMNS;
#define TILE(R, FORM) tile(R, FORM, &made, x, factors, size, depth / size, from == 0, c, out)
#define CALL(R)                                                                                                \
    if (form == NIBBLES)                                                                                       \
        TILE(R, NIBBLES);                                                                                      \
    else if (form == SIXES)                                                                                    \
        TILE(R, SIXES);                                                                                        \
    else                                                                                                       \
        TILE(R, BYTES)
                FOR_ROWS(at.size, CALL)
#undef CALL
#undef TILE
            }
        }
    }
}

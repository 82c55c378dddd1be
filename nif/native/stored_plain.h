/* A stretch of a block of stored.h in the form for integer dot products: its codes, and the factors of each group.
 *
 * Codes of 8 and 4 bits are read in place, and so are codes of 6 bits if only one tile uses the stretch. Other codes are
 * unpacked to a byte each. */
#ifndef GENBATCH_STORED_PLAIN_H
#define GENBATCH_STORED_PLAIN_H

#include "genbatch.h"
#include "simd.h"
#include "stored.h"
#include "stored_cell.h"

#define DEPTH 256 /* inputs: some 14 KB of L1 */
#define LEAST_GROUP 16
#define STRETCHES_AHEAD 2 /* with a single row, one stretch takes less time than memory needs to answer */

#define RAISED_ZERO 128 /* the byte of the level 0 */
#define LEVEL(x) (x) + RAISED_ZERO
static const uint8_t RAISED[][16] = LEVEL_TABLES;
#undef LEVEL

typedef struct {
    _Alignas(64) uint8_t codes[DEPTH * COLUMNS]; /* [DEPTH / 4][COLUMNS][4] */
    _Alignas(64) float scales[DEPTH / LEAST_GROUP][COLUMNS];
    _Alignas(64) float minus[DEPTH / LEAST_GROUP][COLUMNS];
    const uint8_t *cells[DEPTH / CELL]; /* the address of each 32 inputs, in `codes` or in the block itself */
    const uint8_t *ahead; /* the next bytes, which are prefetched during the multiplication */
    int64_t stride; /* bytes at `ahead` for every 4 inputs */
} plain;

/* The contents of a word of codes. */
typedef enum {
    BYTES, /* 4 inputs */
    NIBBLES, /* 8 inputs, half a byte each */
    SIXES, /* as NIBBLES, and 16 inputs share a second word with two more bits of each input; groups have 16 inputs */
} code_form;

/* `once`: only one tile uses the stretch, so unpacking takes more time than it saves. */
ALWAYS_INLINE code_form form_of(const stored_type t, const bool once)
{
    if (t.bits == 6 && once) return SIXES;
    return t.bits == 4 && !t.levels ? NIBBLES : BYTES;
}

ALWAYS_INLINE int inputs_of_word(const code_form form) { return form == BYTES ? 4 : 8; }

/* Prefetches the bytes that will replace this word, a few lines at a time, because a core can have few requests in flight. With
 * few rows, memory is the limit, and more lines can be in flight to L2 than to L1. With more rows, L1 makes the loads faster. */
ALWAYS_INLINE void fetch_ahead(const code_form form, const bool few_rows, const plain *p, int64_t input)
{
    const uint8_t *at = p->ahead + input / 4 * p->stride;
    const int lines = form == SIXES ? 4 : 3; /* the last bytes of 4 inputs in 8 bits with their scale can begin a third line */
    UNROLL for (int line = 0; line < lines; line++) {
        if (few_rows)
            __builtin_prefetch(at + 64 * line, 0, 2);
        else
            __builtin_prefetch(at + 64 * line);
    }
}

/* The addresses of the words of a group, from a column on. */
typedef struct {
    const uint8_t *low, *high;
} group_words;

ALWAYS_INLINE group_words words_of_group(const code_form form, const plain *p, int64_t group, int size, int column)
{
    const uint8_t *cell = p->cells[group * size / CELL] + 4 * column;
    const int64_t input = group * size % CELL;
    return (group_words){cell + input / inputs_of_word(form) * WORDS, cell + (4 + input / 16) * WORDS};
}

/* Returns the inputs 4 * four to 4 * four + 3 of a group, a byte each; `low` is the word with these inputs. */
ALWAYS_INLINE vi four_codes(const code_form form, vi low, vi high, int four)
{
    if (form == BYTES) return low;
    const vi nibbles = (low >> (4 * (four % 2))) & 0x0f0f0f0f;
    if (form == NIBBLES) return nibbles;
    return nibbles | ((four < 2 ? high << (4 - 2 * four) : high >> (2 * four - 4)) & 0x30303030);
}

/* Looks up each byte in a table of 16 bytes; the high 4 bits of each byte must be 0. */
ALWAYS_INLINE vi raised(const uint8_t *levels, vi nibbles)
{
#if VL == 16
    __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)levels));
    return (vi)_mm512_shuffle_epi8(table, (__m512i)nibbles);
#elif VL == 8 && defined(__AVX2__)
    __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)levels));
    return (vi)_mm256_shuffle_epi8(table, (__m256i)nibbles);
#else
    uint8_t bytes[4 * VL];
    memcpy(bytes, &nibbles, sizeof(bytes));
    for (int i = 0; i < 4 * VL; i++) bytes[i] = levels[bytes[i]];
    memcpy(&nibbles, bytes, sizeof(bytes));
    return nibbles;
#endif
}

/* Returns the four inputs from 8 * j + 4 * half, a byte each. */
ALWAYS_INLINE vi codes_of(const stored_type t, const words w, int half)
{
    const vi one = vi_set1(0x01010101), three = vi_set1(0x03030303), nibble = vi_set1(0x0f0f0f0f);
    const int at2 = 2 * (w.j % 2 * 2 + half), at1 = 2 * w.j + half;
    if (t.bits == 1) return ((w.high >> at1) & one) << 1;
    if (t.bits == 2) return (w.low >> at2) & three;
    if (t.bits == 3) {
        const vi codes = ((w.low >> at2) & three) | ((w.high >> at1) & one) << 2;
        return t.levels ? raised(RAISED[t.levels], codes) : codes;
    }
    vi low = (w.low >> (4 * half)) & nibble;
    if (t.levels) return raised(RAISED[t.levels], low);
    if (t.bits == 5) return low | ((w.high >> at1) & one) << 4;
    if (t.bits == 6) return low | ((w.high >> at2) & three) << 4;
    return low;
}

ALWAYS_INLINE void lay_out_cell(const int kind, const code_form form, const uint8_t *head, const uint8_t *cell, int groups,
                                int64_t input, plain *out)
{
    const stored_type t = stored_type_of(kind);
    const uint8_t *codes = cell + scale_bytes(t);
    uint8_t *to = out->codes + input * COLUMNS;
    for (int which = 0; which < groups; which++)
        UNROLL for (int v = 0; v < VECTORS; v++) {
            group g = group_of(t, kind, head, cell, t.scale_group == 16 ? which : 0, v * VL);
            const int64_t at = input * groups / CELL + which;
            vf_store(out->scales[at] + v * VL, g.scale);
            vf_store(out->minus[at] + v * VL, t.levels ? g.scale * (float)RAISED_ZERO : g.minus);
        }
    const bool as_it_is = t.bits == 8 || form != BYTES;
    out->cells[input / CELL] = as_it_is ? codes : to;
    if (as_it_is) return;
    UNROLL for (int j = 0; j < 4; j++) UNROLL for (int v = 0; v < VECTORS; v++) {
        const words w = words_of(t, codes, j, v * VL);
        *(vi_memory *)(to + 2 * j * WORDS + 4 * v * VL) = codes_of(t, w, 0);
        *(vi_memory *)(to + (2 * j + 1) * WORDS + 4 * v * VL) = codes_of(t, w, 1);
    }
}

ALWAYS_INLINE void lay_out(const int kind, const code_form form, const uint8_t *weights, int64_t from, int64_t count,
                           int groups, plain *out)
{
    const stored_type t = stored_type_of(kind);
    const int64_t cell_size = scale_bytes(t) + code_bytes(t), cells = t.unit / CELL;
    const int64_t size = unit_bytes(t) * DEPTH / t.unit;
    out->ahead = weights + from / t.unit * unit_bytes(t) + STRETCHES_AHEAD * size;
    out->stride = size / (DEPTH / 4);
    for (int64_t k = 0; k < count; k += CELL) {
        const uint8_t *head = weights + (from + k) / t.unit * unit_bytes(t);
        lay_out_cell(kind, form, head, head + head_bytes(t) + (from + k) / CELL % cells * cell_size, groups, k, out);
    }
}

#endif

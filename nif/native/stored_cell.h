/* A cell of stored.h as both kinds of multiplication read it: its groups' factors, and its codes a word at a time. */
#ifndef GENBATCH_STORED_CELL_H
#define GENBATCH_STORED_CELL_H

#include "stored.h"

#define VECTORS (COLUMNS / VL)

/* What turns the codes of one group into weights: weight = scale * code - minus. */
typedef struct {
    vf scale, minus;
} group;

ALWAYS_INLINE vf bytes_to_floats(const uint8_t *p, const bool is_signed)
{
#if VL == 16
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    return (vf)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#else
    vi wide;
    for (int i = 0; i < VL; i++) wide[i] = is_signed ? (int8_t)p[i] : p[i];
    return vf_from_int(wide);
#endif
}

/* `head` of the unit, `scales` of the cell, which group of the cell, the first of VL columns. */
ALWAYS_INLINE group group_of(const stored_type t, const int kind, const uint8_t *head, const uint8_t *scales, int which,
                             int column)
{
    if (t.wide) {
        vf scale = vf_load((const float *)head + column);
        return (group){scale, scale * vf_from_f16((const uint16_t *)(head + 2 * HALVES) + column)};
    }
    vf d = vf_from_f16((const uint16_t *)head + column), m = {0};
    if (t.minima) m = vf_from_f16((const uint16_t *)(head + HALVES) + column);
    if (!t.scale_group) {
        if (t.minima) return (group){d, -m};
        return (group){d, d * (float)t.zero};
    }
    const uint8_t *at = scales + which * COLUMNS + column;
    if (t.packed_minima) {
        uint8_t low[VL], high[VL];
        for (int i = 0; i < VL; i++) low[i] = at[i] & 15, high[i] = at[i] >> 4;
        return (group){d * bytes_to_floats(low, false), m * bytes_to_floats(high, false)};
    }
    const bool is_signed = kind == WEIGHT_Q6_K || kind == WEIGHT_Q3_K || kind == WEIGHT_IQ4_XS;
    vf scale = d * bytes_to_floats(at, is_signed);
    if (t.minima) return (group){scale, m * bytes_to_floats(at + CELL / t.scale_group * COLUMNS, false)};
    return (group){scale, scale * (float)t.zero};
}

/* Eight inputs from 8 * j on: their planes' words, and where in them the inputs lie. */
typedef struct {
    vi low, high;
    int j;
} words;

ALWAYS_INLINE words words_of(const stored_type t, const uint8_t *codes, int j, int column)
{
    words w = {.j = j};
    const uint8_t *after = codes + (t.bits >= 4 ? 4 : 2) * WORDS; /* the second plane */
    if (t.bits >= 4) w.low = vi_load(codes + j * WORDS + 4 * column);
    if (t.bits == 2 || t.bits == 3) w.low = vi_load(codes + j / 2 * WORDS + 4 * column);
    if (t.bits == 6) w.high = vi_load(after + j / 2 * WORDS + 4 * column);
    if (t.bits == 5 || t.bits == 3) w.high = vi_load(after + 4 * column);
    return w;
}

/* CALL(use_units, KIND) with a constant, so that each type gets code of its own. */
#define FOR_BLOCK_KINDS(kind, CALL)                                                                                  \
    switch (kind) {                                                                                            \
    case WEIGHT_Q4_0: CALL(use_units, WEIGHT_Q4_0); break;                                                     \
    case WEIGHT_Q4_1: CALL(use_units, WEIGHT_Q4_1); break;                                                     \
    case WEIGHT_Q5_0: CALL(use_units, WEIGHT_Q5_0); break;                                                     \
    case WEIGHT_Q5_1: CALL(use_units, WEIGHT_Q5_1); break;                                                     \
    case WEIGHT_Q8_0: CALL(use_units, WEIGHT_Q8_0); break;                                                     \
    case WEIGHT_Q2_K: CALL(use_units, WEIGHT_Q2_K); break;                                                     \
    case WEIGHT_Q3_K: CALL(use_units, WEIGHT_Q3_K); break;                                                     \
    case WEIGHT_Q4_K: CALL(use_units, WEIGHT_Q4_K); break;                                                     \
    case WEIGHT_Q5_K: CALL(use_units, WEIGHT_Q5_K); break;                                                     \
    case WEIGHT_Q6_K: CALL(use_units, WEIGHT_Q6_K); break;                                                     \
    case WEIGHT_IQ4_NL: CALL(use_units, WEIGHT_IQ4_NL); break;                                                 \
    case WEIGHT_G4_32: CALL(use_units, WEIGHT_G4_32); break;                                                   \
    case WEIGHT_G4_64: CALL(use_units, WEIGHT_G4_64); break;                                                   \
    case WEIGHT_G4_128: CALL(use_units, WEIGHT_G4_128); break;                                                 \
    case WEIGHT_G8_32: CALL(use_units, WEIGHT_G8_32); break;                                                   \
    case WEIGHT_G8_128: CALL(use_units, WEIGHT_G8_128); break;                                                 \
    default: CALL(use_units, WEIGHT_IQ4_XS); break;                                                            \
    }

#endif

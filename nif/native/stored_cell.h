/* Reads a cell of stored.h, for float and integer products: the factors of its groups, and its codes word by word. */
#ifndef GENBATCH_STORED_CELL_H
#define GENBATCH_STORED_CELL_H

#include "stored.h"

#define VECTORS (COLUMNS / VL)

/* The factors of a group: weight = scale * code - minus. */
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

/* Converts FP8 (E4M3) in the lowest byte of each lane; the code of NaN becomes 480. */
ALWAYS_INLINE vf from_e4m3(vi lanes)
{
    const vi bits = ((lanes & 127) << 20) | ((lanes & 128) << 24);
    return (vf)bits * 0x1p120f; /* the exponents' biases are 7 and 127; this is also right for subnormal numbers */
}

ALWAYS_INLINE vi bytes_to_lanes(const uint8_t *p)
{
#if VL == 16
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#else
    vi wide;
    for (int i = 0; i < VL; i++) wide[i] = p[i];
    return wide;
#endif
}

ALWAYS_INLINE vf bytes_from_e4m3(const uint8_t *p) { return from_e4m3(bytes_to_lanes(p)); }

/* Returns 2^(e - 128), half of the scale of MXFP4's exponent e, because the levels here are twice the values of its codes. */
ALWAYS_INLINE vf half_of_e8m0(const uint8_t *p)
{
    const vi e = bytes_to_lanes(p);
    return (vf)(e << 23) * 0.5f + (vf)(vi)((e == 0) & 0x00200000);
}

/* The values of codes, times 1 / factor. The 8 values of 3-bit codes are repeated. A code that no file has gets 0. The user
 * defines LEVEL, which turns a number into a float, or into a byte with an offset. */
#define LEVEL_TABLES                                                                                                 \
    {                                                                                                                \
        [IQ4_LEVELS] = {LEVEL(-127), LEVEL(-104), LEVEL(-83), LEVEL(-65), LEVEL(-49), LEVEL(-35), LEVEL(-22),        \
                        LEVEL(-10), LEVEL(1), LEVEL(13), LEVEL(25), LEVEL(38), LEVEL(53), LEVEL(69), LEVEL(89),      \
                        LEVEL(113)},                                                                                 \
        [E2M1_LEVELS] = {LEVEL(0), LEVEL(1), LEVEL(2), LEVEL(3), LEVEL(4), LEVEL(6), LEVEL(8), LEVEL(12), LEVEL(0),  \
                         LEVEL(-1), LEVEL(-2), LEVEL(-3), LEVEL(-4), LEVEL(-6), LEVEL(-8), LEVEL(-12)},              \
        [IQ1_LEVELS] = {LEVEL(-7), LEVEL(1), LEVEL(9), LEVEL(0), LEVEL(-9), LEVEL(-1), LEVEL(7), LEVEL(0),           \
                        LEVEL(-7), LEVEL(1), LEVEL(9), LEVEL(0), LEVEL(-9), LEVEL(-1), LEVEL(7), LEVEL(0)},          \
        [IQ2_LEVELS] = {LEVEL(8), LEVEL(25), LEVEL(43), LEVEL(0), LEVEL(-8), LEVEL(-25), LEVEL(-43), LEVEL(0),       \
                        LEVEL(8), LEVEL(25), LEVEL(43), LEVEL(0), LEVEL(-8), LEVEL(-25), LEVEL(-43), LEVEL(0)},      \
        [IQ3_LEVELS] = {LEVEL(4), LEVEL(12), LEVEL(20), LEVEL(28), LEVEL(36), LEVEL(44), LEVEL(52), LEVEL(62),       \
                        LEVEL(-4), LEVEL(-12), LEVEL(-20), LEVEL(-28), LEVEL(-36), LEVEL(-44), LEVEL(-52),           \
                        LEVEL(-62)},                                                                                 \
        [ODD_LEVELS] = {LEVEL(1), LEVEL(3), LEVEL(5), LEVEL(7), LEVEL(9), LEVEL(11), LEVEL(13), LEVEL(15),           \
                        LEVEL(-1), LEVEL(-3), LEVEL(-5), LEVEL(-7), LEVEL(-9), LEVEL(-11), LEVEL(-13), LEVEL(-15)},  \
    }

/* Returns the factors of a group for VL columns from `column` on. `head`: of the unit; `scales`: of the cell; `which`: the
 * group's index in the cell. */
ALWAYS_INLINE group group_of(const stored_type t, const int kind, const uint8_t *head, const uint8_t *scales, int which,
                             int column)
{
    const uint8_t *at = scales + which * COLUMNS + column;
    if (t.head == WIDE_HEAD) {
        vf scale = vf_load((const float *)head + column);
        return (group){scale, scale * vf_from_f16((const uint16_t *)(head + 2 * HALVES) + column)};
    }
    if (t.head == E8M0) return (group){half_of_e8m0(head + column), (vf){0}};
    if (t.head == NO_HEAD) return (group){bytes_from_e4m3(at) * t.factor, (vf){0}};
    if (t.head == FLOAT) {
        vf scale = vf_load((const float *)head + column);
        return (group){t.scale_group ? scale * bytes_from_e4m3(at) * t.factor : scale, (vf){0}};
    }
    vf d = vf_from_f16((const uint16_t *)head + column), m = {0};
    if (t.minima) m = vf_from_f16((const uint16_t *)(head + HALVES) + column);
    if (!t.scale_group) {
        if (t.minima) return (group){d, -m};
        return (group){d, d * (float)t.zero};
    }
    if (t.packed_minima) {
        uint8_t low[VL], high[VL];
        for (int i = 0; i < VL; i++) low[i] = at[i] & 15, high[i] = at[i] >> 4;
        return (group){d * bytes_to_floats(low, false), m * bytes_to_floats(high, false)};
    }
    const bool is_signed = kind == WEIGHT_Q6_K || kind == WEIGHT_Q3_K || kind == WEIGHT_IQ4_XS;
    vf scale = d * bytes_to_floats(at, is_signed);
    if (t.factor != 1) scale *= t.factor;
    if (kind == WEIGHT_IQ1_S) m *= 0.125f;
    if (t.minima) return (group){scale, m * bytes_to_floats(at + CELL / t.scale_group * COLUMNS, false)};
    return (group){scale, scale * (float)t.zero};
}

/* The words of both planes for the eight inputs from 8 * j on. */
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
    if (t.bits == 1) w.high = vi_load(codes + 4 * column);
    if (t.bits == 6) w.high = vi_load(after + j / 2 * WORDS + 4 * column);
    if (t.bits == 5 || t.bits == 3) w.high = vi_load(after + 4 * column);
    return w;
}

/* Expands CALL(use_units, KIND) with a constant, so that each type has separate compiled code. */
#define FOR_BLOCK_KINDS(kind, CALL)                                                                           \
    switch (kind) {                                                                                           \
    CASE(Q4_0, CALL) CASE(Q4_1, CALL) CASE(Q5_0, CALL) CASE(Q5_1, CALL) CASE(Q8_0, CALL) CASE(Q2_K, CALL)     \
    CASE(Q3_K, CALL) CASE(Q4_K, CALL) CASE(Q5_K, CALL) CASE(Q6_K, CALL) CASE(IQ4_NL, CALL) CASE(G4_32, CALL)  \
    CASE(G4_64, CALL) CASE(G4_128, CALL) CASE(G8_32, CALL) CASE(G8_128, CALL) CASE(MXFP4, CALL)               \
    CASE(NVFP4, CALL) CASE(IQ1_S, CALL) CASE(IQ1_M, CALL) CASE(IQ2_XXS, CALL) CASE(IQ2_XS, CALL)              \
    CASE(IQ2_S, CALL) CASE(IQ3_XXS, CALL) CASE(IQ3_S, CALL) CASE(TQ1_0, CALL) CASE(TQ2_0, CALL) CASE(Q1_0, CALL)\
    CASE(Q2_0, CALL) CASE(N4_32, CALL) CASE(N4_128, CALL)                                                     \
    default: CALL(use_units, WEIGHT_IQ4_XS); break;                                                           \
    }
#define CASE(NAME, CALL) case WEIGHT_##NAME: CALL(use_units, WEIGHT_##NAME); break;

#endif

/* Weights in the block types of GGUF, and in groups as in GPTQ (G4, G8), in the layout of their multiplication: 32 outputs lie
 * side by side, and each is a lane of a vector.
 *
 * A weight block of COLUMNS outputs is a run of units. A unit has as many inputs as one block of the file (32, 64, 128 or 256),
 * and is cut into cells of 32 inputs:
 *
 *     unit:  d [COLUMNS] float16, then dmin or m [COLUMNS] float16 if the type has one, then the cells;
 *            for G4 and G8: scale [COLUMNS] float32, zero [COLUMNS] float16; for N4 and F8: scale [COLUMNS] float32;
 *            for MXFP4: exponent [COLUMNS] bytes; for NVFP4 only the cells
 *     cell:  scales [32 / scale group][COLUMNS] bytes, then as many minima, if the type has them; then the codes
 *     codes: 4 bits  [4][COLUMNS] words of 8 inputs: byte c has input c in its low and input c + 4 in its high nibble
 *            2 bits  [2][COLUMNS] words of 16 inputs: byte c has the inputs c, c + 4, c + 8, c + 12, low bits first
 *            1 bit   [COLUMNS] words of 32 inputs: byte c has the inputs c, c + 4, ... c + 28, low bits first
 *            8 bits  [8][COLUMNS] words of 4 inputs, value + 128; for F8 the file's bytes
 *
 * Codes of 5, 6 and 3 bits have two planes. A weight is scale * code - minus, with the scale and the minus of its group of 16
 * or 32 inputs. It equals the result of the package `gguf` to the last bit (only a zero may have the other sign), because the
 * products of the factors fit float32, and one fused operation rounds once. For G4 and G8 this holds if scale * zero fits
 * float32: with scales of 16 bits, and if the zero is a power of two. The bytes are those of the file, except the 6-bit scales
 * of K-quants, which take a byte each: 2 to 4 percent more. Files of IQ1, IQ2 and IQ3 have indices into a table of patterns;
 * here these types have the patterns' codes, 2, 3 or 4 bits for each input. Float types of 16 bits are [k][COLUMNS] halves. */
#ifndef GENBATCH_STORED_H
#define GENBATCH_STORED_H

#include "genbatch.h"
#include "simd.h"

#define CELL 32 /* inputs */
#define WORDS (4 * COLUMNS) /* bytes of one word of every column */
#define HALVES (2 * COLUMNS)

/* The meaning of codes: their own value, the levels of a table (stored_cell.h), or FP8. */
typedef enum { LINEAR, IQ4_LEVELS, E2M1_LEVELS, IQ1_LEVELS, IQ2_LEVELS, IQ3_LEVELS, ODD_LEVELS, E4M3 } level_table;

/* The head of a unit, in this order: d; d and dmin or m; a scale and a zero; an exponent; a scale; no head. */
typedef enum { HALF, TWO_HALVES, WIDE_HEAD, E8M0, FLOAT, NO_HEAD } head_form;

/* The layout of a type. */
typedef struct {
    int unit; /* inputs */
    int bits; /* of a code: 1, 2, 3, 4, 5, 6, 8; 16 for floats. A single bit counts as 2: with a zero of 1 it is -1 or 1 */
    int scale_group; /* inputs that share a scale byte; 0: d is the scale */
    bool minima; /* whether a minimum is subtracted (K-quants) or added (Q4_1, Q5_1) in addition to zero * scale */
    bool packed_minima; /* Q2_K: scale and minimum are nibbles of one byte */
    int zero; /* the code that means 0 */
    level_table levels;
    head_form head;
    float factor; /* a factor of the product of d and a scale's byte; a power of two */
} stored_type;

#define OF(scale_factor, ...) ((stored_type){.factor = scale_factor, __VA_ARGS__})

ALWAYS_INLINE stored_type stored_type_of(const int kind)
{
    switch (kind) {
    case WEIGHT_F16:
    case WEIGHT_WIDE: return OF(1, .unit = 1, .bits = 16);
    case WEIGHT_Q4_0: return OF(1, .unit = 32, .bits = 4, .zero = 8);
    case WEIGHT_Q4_1: return OF(1, .unit = 32, .bits = 4, .minima = true, .head = TWO_HALVES);
    case WEIGHT_Q5_0: return OF(1, .unit = 32, .bits = 5, .zero = 16);
    case WEIGHT_Q5_1: return OF(1, .unit = 32, .bits = 5, .minima = true, .head = TWO_HALVES);
    case WEIGHT_Q8_0: return OF(1, .unit = 32, .bits = 8, .zero = 128);
    case WEIGHT_Q2_K:
        return OF(1, .unit = 256, .bits = 2, .scale_group = 16, .minima = true, .packed_minima = true, .head = TWO_HALVES);
    case WEIGHT_Q3_K: return OF(1, .unit = 256, .bits = 3, .scale_group = 16, .zero = 4);
    case WEIGHT_Q4_K: return OF(1, .unit = 256, .bits = 4, .scale_group = 32, .minima = true, .head = TWO_HALVES);
    case WEIGHT_Q5_K: return OF(1, .unit = 256, .bits = 5, .scale_group = 32, .minima = true, .head = TWO_HALVES);
    case WEIGHT_Q6_K: return OF(1, .unit = 256, .bits = 6, .scale_group = 16, .zero = 32);
    case WEIGHT_IQ4_NL: return OF(1, .unit = 32, .bits = 4, .levels = IQ4_LEVELS);
    case WEIGHT_IQ4_XS: return OF(1, .unit = 256, .bits = 4, .scale_group = 32, .levels = IQ4_LEVELS);
    case WEIGHT_G4_32: return OF(1, .unit = 32, .bits = 4, .minima = true, .head = WIDE_HEAD);
    case WEIGHT_G4_64: return OF(1, .unit = 64, .bits = 4, .minima = true, .head = WIDE_HEAD);
    case WEIGHT_G4_128: return OF(1, .unit = 128, .bits = 4, .minima = true, .head = WIDE_HEAD);
    case WEIGHT_G8_32: return OF(1, .unit = 32, .bits = 8, .minima = true, .head = WIDE_HEAD);
    case WEIGHT_G8_128: return OF(1, .unit = 128, .bits = 8, .minima = true, .head = WIDE_HEAD);
    case WEIGHT_IQ1_S: return OF(1, .unit = 256, .bits = 2, .scale_group = 32, .minima = true, .head = TWO_HALVES);
    case WEIGHT_TQ1_0: return OF(1, .unit = 256, .bits = 2, .zero = 1);
    case WEIGHT_TQ2_0: return OF(1, .unit = 256, .bits = 2, .zero = 1);
    case WEIGHT_Q1_0: return OF(1, .unit = 128, .bits = 1, .zero = 1);
    case WEIGHT_Q2_0: return OF(1, .unit = 64, .bits = 2, .zero = 1);
    case WEIGHT_MXFP4: return OF(1, .unit = 32, .bits = 4, .levels = E2M1_LEVELS, .head = E8M0);
    case WEIGHT_NVFP4: return OF(0.5f, .unit = 64, .bits = 4, .scale_group = 16, .levels = E2M1_LEVELS, .head = NO_HEAD);
    case WEIGHT_IQ1_M: return OF(0.125f, .unit = 256, .bits = 3, .scale_group = 16, .levels = IQ1_LEVELS);
    case WEIGHT_IQ2_XXS: return OF(0.125f, .unit = 256, .bits = 3, .scale_group = 32, .levels = IQ2_LEVELS);
    case WEIGHT_IQ2_XS: return OF(0.125f, .unit = 256, .bits = 3, .scale_group = 16, .levels = IQ2_LEVELS);
    case WEIGHT_IQ2_S: return OF(0.125f, .unit = 256, .bits = 3, .scale_group = 16, .levels = IQ2_LEVELS);
    case WEIGHT_IQ3_XXS: return OF(0.25f, .unit = 256, .bits = 4, .scale_group = 32, .levels = IQ3_LEVELS);
    case WEIGHT_IQ3_S: return OF(1, .unit = 256, .bits = 4, .scale_group = 32, .levels = ODD_LEVELS);
    case WEIGHT_N4_32: return OF(0.5f, .unit = 32, .bits = 4, .scale_group = 16, .levels = E2M1_LEVELS, .head = FLOAT);
    case WEIGHT_N4_128: return OF(0.5f, .unit = 128, .bits = 4, .scale_group = 16, .levels = E2M1_LEVELS, .head = FLOAT);
    case WEIGHT_F8_32: return OF(1, .unit = 32, .bits = 8, .levels = E4M3, .head = FLOAT);
    case WEIGHT_F8_128: return OF(1, .unit = 128, .bits = 8, .levels = E4M3, .head = FLOAT);
    default: return OF(1, .unit = 0);
    }
}

ALWAYS_INLINE int code_bytes(const stored_type t) /* bytes of a cell's codes */
{
    return t.bits * CELL / 8 * COLUMNS;
}

ALWAYS_INLINE int scale_bytes(const stored_type t) /* bytes of a cell's scales and minima */
{
    if (!t.scale_group) return 0;
    return CELL / t.scale_group * COLUMNS * (t.minima && !t.packed_minima ? 2 : 1);
}

ALWAYS_INLINE int head_bytes(const stored_type t) /* bytes of a unit before its cells */
{
    switch (t.head) {
    case NO_HEAD: return 0;
    case E8M0: return COLUMNS;
    case HALF: return HALVES;
    case WIDE_HEAD: return 3 * HALVES;
    default: return 2 * HALVES;
    }
}

ALWAYS_INLINE int64_t unit_bytes(const stored_type t)
{
    if (t.bits == 16) return HALVES;
    return head_bytes(t) + (int64_t)t.unit / CELL * (scale_bytes(t) + code_bytes(t));
}

#endif

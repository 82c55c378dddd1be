/* Packs the blocks of a GGUF file, and the groups that nif/models/quantised_checkpoint.py makes, into the layout of stored.h:
 * a row's block becomes one lane of a unit.
 *
 * Rows are given as pointers, so that merged, interleaved and permuted matrices need no copy; a NULL row is zeros. Numbers are
 * little endian, as in GGUF. */
#include "genbatch.h"
#include "simd.h"
#include "stored.h"

static uint32_t word(const uint8_t *p)
{
    uint32_t w;
    memcpy(&w, p, 4);
    return w;
}

static void put(uint8_t *out, int at, uint32_t w) { memcpy(out + at * WORDS, &w, 4); }

/* Writes the plane of 4 bits for 32 codes: 4 bits of each byte, from bit `shift` on. */
static void put4(const uint8_t *bytes, int shift, uint8_t *out)
{
    for (int j = 0; j < 4; j++) {
        uint32_t low = word(bytes + 8 * j) >> shift & 0x0f0f0f0f, high = word(bytes + 8 * j + 4) >> shift & 0x0f0f0f0f;
        put(out, j, low | high << 4);
    }
}

/* Writes the plane of 4 bits for 32 codes in the order of the inputs, two in a byte, the first in the low half. */
static void put4_pairs(const uint8_t *bytes, uint8_t *out)
{
    for (int j = 0; j < 4; j++) {
        uint32_t w = word(bytes + 4 * j), even = w & 0x0f0f0f0f, odd = w >> 4 & 0x0f0f0f0f; /* 0 2 4 6, 1 3 5 7 */
        even |= even >> 12, odd |= odd >> 12; /* 0 and 4, 2 and 6; 1 and 5, 3 and 7 */
        put(out, j, (even & 0xff) | (odd & 0xff) << 8 | (even & 0xff00) << 8 | (odd & 0xff00) << 16);
    }
}

/* Writes the plane of 4 bits for 32 codes: the first 16 are in the low nibbles of 16 bytes, the others in the high nibbles. */
static void put4_halves(const uint8_t *bytes, uint8_t *out)
{
    for (int j = 0; j < 4; j++) {
        const uint8_t *at = bytes + 8 * (j % 2);
        int shift = j < 2 ? 0 : 4;
        put(out, j, (word(at) >> shift & 0x0f0f0f0f) | (word(at + 4) >> shift & 0x0f0f0f0f) << 4);
    }
}

/* Writes the plane of 2 bits for 32 codes: 2 bits of each byte, from bit `shift` on. */
static void put2(const uint8_t *bytes, int shift, uint8_t *out)
{
    for (int h = 0; h < 2; h++) {
        uint32_t w = 0;
        for (int s = 0; s < 4; s++) w |= (word(bytes + 16 * h + 4 * s) >> shift & 0x03030303) << (2 * s);
        put(out, h, w);
    }
}

/* Writes the plane of 1 bit for 32 codes: bit `shift` of each byte. */
static void put1(const uint8_t *bytes, int shift, uint8_t *out)
{
    uint32_t w = 0;
    for (int s = 0; s < 8; s++) w |= (word(bytes + 4 * s) >> shift & 0x01010101) << s;
    put(out, 0, w);
}

/* Writes the plane of 1 bit for 32 bits in the order of the inputs. */
static void put1_bits(const uint8_t *bytes, uint8_t *out)
{
    uint32_t bits = word(bytes), w = 0;
    for (int s = 0; s < 8; s++) w |= ((bits >> (4 * s) & 15) * 0x00204081u & 0x01010101u) << s;
    put(out, 0, w);
}

/* Unpacks the 8 scales and 8 minima of 6 bits in a block of Q4_K or Q5_K. */
static void scales_and_minima(const uint8_t *p, uint8_t *scales, uint8_t *minima)
{
    for (int i = 0; i < 4; i++) {
        scales[i] = p[i] & 63;
        minima[i] = p[4 + i] & 63;
        scales[4 + i] = (uint8_t)((p[8 + i] & 15) | (p[i] >> 6) << 4);
        minima[4 + i] = (uint8_t)(p[8 + i] >> 4 | (p[4 + i] >> 6) << 4);
    }
}

/* Types with patterns of 4 or 8 codes (IQ1, IQ2, IQ3), and other types that are unpacked to a byte for each code. */

static uint16_t half_word(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

/* Writes `count` codes of a pattern, with the sign of each in the bit `sign`. */
static void put_pattern(const uint8_t *pattern, int count, unsigned signs, int sign, uint8_t *codes)
{
    for (int i = 0; i < count; i++) codes[i] = (uint8_t)(pattern[i] | (signs >> i & 1) << sign);
}

/* Returns eight signs for seven bits: the number of minus signs is even. */
static unsigned eight_signs(unsigned seven) { return seven | (unsigned)(__builtin_popcount(seven) & 1) << 7; }

/* Unpacks codes of IQ2_XXS, IQ2_XS and IQ2_S: one of three sizes, plus 4 if it is negative; `s`: twice the scale plus 1. */
static void unpack_iq2(const int kind, const uint8_t *from, const uint8_t *patterns, uint8_t *codes, uint8_t *s)
{
    for (int i = 0; i < 32; i++) { /* eight inputs */
        unsigned at, signs;
        if (kind == WEIGHT_IQ2_XXS) {
            const uint8_t *group = from + 2 + 8 * (i / 4);
            at = group[i % 4];
            signs = eight_signs(word(group + 4) >> (7 * (i % 4)) & 127);
            s[i / 4] = (uint8_t)(2 * (group[7] >> 4) + 1);
        } else if (kind == WEIGHT_IQ2_XS) {
            at = half_word(from + 2 + 2 * i) & 511;
            signs = eight_signs(half_word(from + 2 + 2 * i) >> 9);
            s[i / 2] = (uint8_t)(2 * (from[66 + i / 4] >> (i / 2 % 2 * 4) & 15) + 1);
        } else {
            at = from[2 + i] | (from[66 + i / 4] >> (2 * (i % 4)) & 3u) << 8;
            signs = from[34 + i];
            s[i / 2] = (uint8_t)(2 * (from[74 + i / 4] >> (i / 2 % 2 * 4) & 15) + 1);
        }
        put_pattern(patterns + 8 * at, 8, signs, 2, codes + 8 * i);
    }
}

/* Unpacks codes of IQ3_XXS and IQ3_S: one of eight sizes, plus 8 if it is negative. */
static void unpack_iq3(const int kind, const uint8_t *from, const uint8_t *patterns, uint8_t *codes, uint8_t *s)
{
    for (int i = 0; i < 64; i++) { /* four inputs */
        unsigned at = from[2 + i], signs;
        if (kind == WEIGHT_IQ3_XXS) {
            const uint32_t group = word(from + 66 + 4 * (i / 8));
            signs = eight_signs(group >> (7 * (i / 2 % 4)) & 127);
            s[i / 8] = (uint8_t)(2 * (group >> 28) + 1);
        } else {
            at |= (from[66 + i / 8] >> (i % 8) & 1u) << 8;
            signs = from[74 + i / 2];
            s[i / 8] = (uint8_t)(2 * (from[106 + i / 16] >> (i / 8 % 2 * 4) & 15) + 1);
        }
        put_pattern(patterns + 4 * at, 4, signs >> (4 * (i % 2)), 3, codes + 4 * i);
    }
}

/* Unpacks codes of IQ1_S: 0, 1 or 2; `n`: the offset times the scale, in eighths. */
static void unpack_iq1_s(const uint8_t *from, const uint8_t *patterns, uint8_t *codes, uint8_t *s, uint8_t *n)
{
    for (int i = 0; i < 32; i++) {
        const uint16_t high = half_word(from + 34 + 2 * (i / 4));
        const unsigned at = from[2 + i] | (high >> (3 * (i % 4)) & 7u) << 8;
        s[i / 4] = (uint8_t)(2 * (high >> 12 & 7) + 1);
        n[i / 4] = (uint8_t)(s[i / 4] * (high & 0x8000 ? 9 : 7));
        put_pattern(patterns + 8 * at, 8, 0, 0, codes + 8 * i);
    }
}

/* Unpacks codes of IQ1_M, plus 4 if an eighth is subtracted and not added; d is in the high bits of the scales. */
static void unpack_iq1_m(const uint8_t *from, const uint8_t *patterns, uint8_t *codes, uint8_t *s, uint8_t *d)
{
    uint16_t half = 0;
    for (int i = 0; i < 4; i++) half |= (uint16_t)((half_word(from + 48 + 2 * i) >> 12) << (4 * i));
    memcpy(d, &half, 2);
    for (int i = 0; i < 32; i++) {
        const unsigned high = from[32 + i / 2] >> (i % 2 * 4);
        const unsigned at = from[i] | (high & 7u) << 8;
        s[i / 2] = (uint8_t)(2 * (half_word(from + 48 + i / 8 * 2) >> (3 * (i / 2 % 4)) & 7) + 1);
        put_pattern(patterns + 8 * at, 8, high & 8 ? 255 : 0, 2, codes + 8 * i);
    }
}

/* Unpacks codes of 0, 1 and 2, five in a byte: 160 from 32 bytes, 80 from 16 bytes, and 16 from 4 bytes with four codes each. */
static void unpack_tq1(const uint8_t *from, uint8_t *codes)
{
    static const uint8_t power[5] = {1, 3, 9, 27, 81};
    static const int start[4] = {0, 32, 48, 52}, each[3] = {5, 5, 4};
    for (int part = 0; part < 3; part++)
        for (int p = 0; p < each[part]; p++)
            for (int i = start[part]; i < start[part + 1]; i++)
                *codes++ = (uint8_t)((uint8_t)(from[i] * power[p]) * 3 >> 8);
}

/* Writes a unit's codes, a byte each, to the planes of its cells, after the scales of each cell. */
static void put_codes(const stored_type t, const uint8_t *codes, const uint8_t *s, const uint8_t *n, int c, uint8_t *cells)
{
    const int scales = scale_bytes(t), size = scales + code_bytes(t), groups = t.scale_group ? CELL / t.scale_group : 0;
    for (int g = 0; g < t.unit / CELL; g++, codes += CELL, cells += size) {
        uint8_t *out = cells + scales + 4 * c;
        for (int i = 0; i < groups; i++) cells[i * COLUMNS + c] = s[g * groups + i];
        if (t.minima) cells[COLUMNS + c] = n[g];
        if (t.bits == 4) {
            put4(codes, 0, out);
            continue;
        }
        put2(codes, 0, out);
        if (t.bits == 3) {
            uint8_t high[CELL];
            for (int i = 0; i < CELL; i++) high[i] = codes[i] >> 2;
            put1(high, 0, out + 2 * WORDS);
        }
    }
}

/* Packs a block of NVFP4, from GGUF or from safetensors. In GGUF a scale of 127 means 0, and no scale is negative. */
static void pack_nvfp4(const int kind, const uint8_t *from, int c, uint8_t *unit)
{
    const stored_type t = stored_type_of(kind);
    const int groups = t.unit / 16;
    uint8_t codes[128], s[8];
    if (t.head == FLOAT) {
        memcpy(unit + 4 * c, from, 4);
        from += 4;
    }
    for (int g = 0; g < groups; g++) {
        s[g] = kind == WEIGHT_NVFP4 ? (from[g] == 127 ? 0 : from[g] & 127) : from[g];
        for (int i = 0; i < 8; i++) {
            const uint8_t two = from[groups + 8 * g + i];
            const int low = 16 * g + (kind == WEIGHT_NVFP4 ? i : 2 * i);
            codes[low] = two & 15;
            codes[low + (kind == WEIGHT_NVFP4 ? 8 : 1)] = two >> 4;
        }
    }
    put_codes(t, codes, s, NULL, c, unit + head_bytes(t));
}

static void pack_patterns(const int kind, const uint8_t *from, const uint8_t *patterns, int c, uint8_t *unit)
{
    const stored_type t = stored_type_of(kind);
    uint8_t codes[256], s[16], n[8], *d = unit + 2 * c;
    switch (kind) {
    case WEIGHT_IQ2_XXS:
    case WEIGHT_IQ2_XS:
    case WEIGHT_IQ2_S: unpack_iq2(kind, from, patterns, codes, s); break;
    case WEIGHT_IQ3_XXS:
    case WEIGHT_IQ3_S: unpack_iq3(kind, from, patterns, codes, s); break;
    case WEIGHT_IQ1_S: unpack_iq1_s(from, patterns, codes, s, n); break;
    case WEIGHT_IQ1_M: unpack_iq1_m(from, patterns, codes, s, d); break;
    case WEIGHT_TQ1_0: unpack_tq1(from, codes); break;
    case WEIGHT_Q2_0:
        for (int i = 0; i < 64; i++) codes[i] = from[2 + i / 4] >> (i % 4 * 2) & 3;
        break;
    default: /* WEIGHT_TQ2_0 */
        for (int i = 0; i < 256; i++) codes[i] = from[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
    }
    if (kind == WEIGHT_TQ1_0) memcpy(d, from + 52, 2);
    else if (kind == WEIGHT_TQ2_0) memcpy(d, from + 64, 2);
    else if (kind != WEIGHT_IQ1_M) memcpy(d, from, 2);
    if (t.minima) memcpy(d + HALVES, from, 2);
    put_codes(t, codes, s, n, c, unit + head_bytes(t));
}

/* Packs one block of the file into lane `c` of a unit. */
static void pack_unit(const int kind, const uint8_t *from, const uint8_t *patterns, int c, uint8_t *unit)
{
    const stored_type t = stored_type_of(kind);
    uint8_t *d = unit + 2 * c, *m = d + HALVES, *cells = unit + head_bytes(t);
    const int scales = scale_bytes(t), size = scales + code_bytes(t);
    uint8_t *codes = cells + scales + 4 * c; /* of the first cell; words are four bytes of each lane */
    uint8_t s[16], n[16];
    switch (kind) {
    case WEIGHT_Q4_0:
    case WEIGHT_IQ4_NL:
        memcpy(d, from, 2);
        put4_halves(from + 2, codes);
        return;
    case WEIGHT_MXFP4:
        unit[c] = from[0];
        put4_halves(from + 1, codes);
        return;
    case WEIGHT_NVFP4:
    case WEIGHT_N4_32:
    case WEIGHT_N4_128: pack_nvfp4(kind, from, c, unit); return;
    case WEIGHT_IQ1_S:
    case WEIGHT_IQ1_M:
    case WEIGHT_IQ2_XXS:
    case WEIGHT_IQ2_XS:
    case WEIGHT_IQ2_S:
    case WEIGHT_IQ3_XXS:
    case WEIGHT_IQ3_S:
    case WEIGHT_TQ1_0:
    case WEIGHT_TQ2_0:
    case WEIGHT_Q2_0: pack_patterns(kind, from, patterns, c, unit); return;
    case WEIGHT_Q1_0:
        memcpy(d, from, 2);
        for (int g = 0; g < t.unit / CELL; g++, codes += size) put1_bits(from + 2 + 4 * g, codes);
        return;
    case WEIGHT_F8_32:
    case WEIGHT_F8_128:
        memcpy(unit + 4 * c, from, 4);
        for (int g = 0; g < t.unit / CELL; g++, codes += size)
            for (int j = 0; j < 8; j++) put(codes, j, word(from + 4 + g * CELL + 4 * j));
        return;
    case WEIGHT_Q4_1:
        memcpy(d, from, 2);
        memcpy(m, from + 2, 2);
        put4_halves(from + 4, codes);
        return;
    case WEIGHT_Q5_0:
        memcpy(d, from, 2);
        put4_halves(from + 6, codes);
        put1_bits(from + 2, codes + 4 * WORDS);
        return;
    case WEIGHT_Q5_1:
        memcpy(d, from, 2);
        memcpy(m, from + 2, 2);
        put4_halves(from + 8, codes);
        put1_bits(from + 4, codes + 4 * WORDS);
        return;
    case WEIGHT_Q8_0:
        memcpy(d, from, 2);
        for (int j = 0; j < 8; j++) put(codes, j, word(from + 2 + 4 * j) ^ 0x80808080u);
        return;
    case WEIGHT_G4_32:
    case WEIGHT_G4_64:
    case WEIGHT_G4_128:
    case WEIGHT_G8_32:
    case WEIGHT_G8_128:
        memcpy(unit + 4 * c, from, 4);
        memcpy(unit + 2 * HALVES + 2 * c, from + 4, 2);
        for (int g = 0; g < t.unit / CELL; g++, codes += size) {
            const uint8_t *cell = from + 6 + g * CELL * t.bits / 8;
            if (t.bits == 4)
                put4_pairs(cell, codes);
            else
                for (int j = 0; j < 8; j++) put(codes, j, word(cell + 4 * j));
        }
        return;
    case WEIGHT_Q4_K:
    case WEIGHT_Q5_K: {
        const uint8_t *high = from + 16, *low = kind == WEIGHT_Q5_K ? from + 48 : from + 16;
        memcpy(d, from, 2);
        memcpy(m, from + 2, 2);
        scales_and_minima(from + 4, s, n);
        for (int g = 0; g < 8; g++, codes += size) {
            cells[g * size + c] = s[g];
            cells[g * size + COLUMNS + c] = n[g];
            put4(low + 32 * (g / 2), 4 * (g % 2), codes);
            if (kind == WEIGHT_Q5_K) put1(high, g, codes + 4 * WORDS);
        }
        return;
    }
    case WEIGHT_Q6_K:
        memcpy(d, from + 208, 2);
        for (int g = 0; g < 8; g++, codes += size) {
            const int half = g / 4, part = g % 4;
            cells[g * size + c] = from[192 + 2 * g];
            cells[g * size + COLUMNS + c] = from[192 + 2 * g + 1];
            put4(from + 64 * half + 32 * (part % 2), part < 2 ? 0 : 4, codes);
            put2(from + 128 + 32 * half, 2 * part, codes + 4 * WORDS);
        }
        return;
    case WEIGHT_Q3_K:
        memcpy(d, from + 108, 2);
        for (int i = 0; i < 16; i++) {
            const uint8_t *p = from + 96;
            int low = i < 8 ? p[i] & 15 : p[i - 8] >> 4, high = p[8 + i % 4] >> (2 * (i / 4)) & 3;
            s[i] = (uint8_t)(int8_t)((low | high << 4) - 32);
        }
        for (int g = 0; g < 8; g++, codes += size) {
            cells[g * size + c] = s[2 * g];
            cells[g * size + COLUMNS + c] = s[2 * g + 1];
            put2(from + 32 + 32 * (g / 4), 2 * (g % 4), codes);
            put1(from, g, codes + 2 * WORDS);
        }
        return;
    case WEIGHT_Q2_K:
        memcpy(d, from + 80, 2);
        memcpy(m, from + 82, 2);
        for (int g = 0; g < 8; g++, codes += size) {
            cells[g * size + c] = from[2 * g];
            cells[g * size + COLUMNS + c] = from[2 * g + 1];
            put2(from + 16 + 32 * (g / 4), 2 * (g % 4), codes);
        }
        return;
    default: /* WEIGHT_IQ4_XS */
        memcpy(d, from, 2);
        for (int g = 0; g < 8; g++, codes += size) {
            int low = from[4 + g / 2] >> (4 * (g % 2)) & 15, high = (from[2] | from[3] << 8) >> (2 * g) & 3;
            cells[g * size + c] = (uint8_t)(int8_t)((low | high << 4) - 32);
            put4_halves(from + 8 + 16 * g, codes);
        }
    }
}

static int64_t file_block_bytes(int kind)
{
    static const uint8_t bytes[] = {
        [WEIGHT_Q4_0] = 18, [WEIGHT_IQ4_NL] = 18, [WEIGHT_Q1_0] = 18, [WEIGHT_Q2_0] = 18, [WEIGHT_Q4_1] = 20,
        [WEIGHT_Q5_0] = 22, [WEIGHT_Q5_1] = 24, [WEIGHT_Q8_0] = 34, [WEIGHT_Q2_K] = 84, [WEIGHT_Q3_K] = 110,
        [WEIGHT_Q4_K] = 144, [WEIGHT_Q5_K] = 176, [WEIGHT_Q6_K] = 210, [WEIGHT_G4_32] = 22, [WEIGHT_G4_64] = 38,
        [WEIGHT_G4_128] = 70, [WEIGHT_G8_32] = 38, [WEIGHT_G8_128] = 134, [WEIGHT_MXFP4] = 17,
        [WEIGHT_NVFP4] = 36, [WEIGHT_IQ1_S] = 50, [WEIGHT_IQ1_M] = 56, [WEIGHT_IQ2_XXS] = 66,
        [WEIGHT_IQ2_XS] = 74, [WEIGHT_IQ2_S] = 82, [WEIGHT_IQ3_XXS] = 98, [WEIGHT_IQ3_S] = 110,
        [WEIGHT_TQ1_0] = 54, [WEIGHT_TQ2_0] = 66, [WEIGHT_N4_32] = 22, [WEIGHT_N4_128] = 76,
        [WEIGHT_F8_32] = 36, [WEIGHT_F8_128] = 132, [WEIGHT_IQ4_XS] = 136,
    };
    return bytes[kind];
}

static bool is_finite16(const uint8_t *p, uint16_t exponent)
{
    uint16_t half;
    memcpy(&half, p, 2);
    return (half & exponent) != exponent;
}

#define EXPONENT_F16 0x7c00u
#define EXPONENT_BF16 0x7f80u
#define EXPONENT_F32 0x7f800000u

#define LARGEST_E8M0 252 /* 2^125: the largest scale for which a float can hold its product with the largest code */

/* Returns whether no FP8 number of lane `c` is NaN, in the codes or in the scales of NVFP4. */
static bool has_no_nan(const stored_type t, const uint8_t *unit, int c)
{
    const int scales = scale_bytes(t), size = scales + code_bytes(t);
    const uint8_t *cell = unit + head_bytes(t);
    bool none = true;
    for (int g = 0; g < t.unit / CELL; g++, cell += size) {
        for (int i = 0; i < scales / COLUMNS; i++) none &= (cell[i * COLUMNS + c] & 127) != 127;
        if (t.levels == E4M3)
            for (int i = 0; i < CELL; i++) none &= (cell[i / 4 * WORDS + 4 * c + i % 4] & 127) != 127;
    }
    return none;
}

/* Returns whether the factors of lane `c` of a packed unit are finite. */
static bool unit_is_finite(const stored_type t, const uint8_t *unit, int c)
{
    if (t.head == NO_HEAD) return true;
    if (t.head == E8M0) return unit[c] <= LARGEST_E8M0;
    if (t.head == WIDE_HEAD || t.head == FLOAT) {
        if ((word(unit + 4 * c) & EXPONENT_F32) == EXPONENT_F32) return false;
        return t.head == FLOAT ? has_no_nan(t, unit, c) : is_finite16(unit + 2 * HALVES + 2 * c, EXPONENT_F16);
    }
    return is_finite16(unit + 2 * c, EXPONENT_F16) && (!t.minima || is_finite16(unit + HALVES + 2 * c, EXPONENT_F16));
}

/* Fills the blocks [first, end) from rows [n] of k inputs; `out` is zeroed memory that begins with block 0. Returns false if a
 * scale, or a float of 16 or 8 bits, is NaN or infinite. `patterns`: for IQ1, IQ2 and IQ3 each pattern's codes, a byte each. */
bool pack_stored(int kind, const uint8_t *patterns, const uint8_t *const *rows, int64_t n, int64_t k, int64_t first,
                 int64_t end, uint8_t *out)
{
    const stored_type t = stored_type_of(kind);
    const int64_t units = k / t.unit, size = unit_bytes(t), from_bytes = t.bits == 16 ? 2 : file_block_bytes(kind);
    const uint16_t exponent = kind == WEIGHT_F16 ? EXPONENT_F16 : EXPONENT_BF16;
    bool finite = true;
    for (int64_t block = first; block < end; block++)
        for (int64_t c = 0; c < COLUMNS && block * COLUMNS + c < n; c++) {
            const uint8_t *from = rows[block * COLUMNS + c];
            uint8_t *unit = out + block * units * size;
            if (!from) continue;
            for (int64_t u = 0; u < units; u++, from += from_bytes, unit += size) {
                if (t.bits == 16) {
                    memcpy(unit + 2 * c, from, 2);
                    finite &= is_finite16(from, exponent);
                } else {
                    pack_unit(kind, from, patterns, (int)c, unit);
                    finite &= unit_is_finite(t, unit, (int)c);
                }
            }
        }
    return finite;
}

/* Puts the blocks of a GGUF file, and groups as nif/models/quantised_checkpoint.py lays them out, into the form of stored.h: each file's block of one row becomes one lane of a unit.
 *
 * Rows come as pointers, so that merged, interleaved and permuted matrices need no copy; a NULL row is zeros. Little
 * endian, as the format. */
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

/* 32 codes whose low 4 bits are those of `bytes`, shifted down by `shift`: the plane of 4 bits. */
static void put4(const uint8_t *bytes, int shift, uint8_t *out)
{
    for (int j = 0; j < 4; j++) {
        uint32_t low = word(bytes + 8 * j) >> shift & 0x0f0f0f0f, high = word(bytes + 8 * j + 4) >> shift & 0x0f0f0f0f;
        put(out, j, low | high << 4);
    }
}

/* 32 codes in the order of the inputs, two a byte, the first in the low half: the plane of 4 bits. */
static void put4_pairs(const uint8_t *bytes, uint8_t *out)
{
    for (int j = 0; j < 4; j++) {
        uint32_t w = word(bytes + 4 * j), even = w & 0x0f0f0f0f, odd = w >> 4 & 0x0f0f0f0f; /* 0 2 4 6, 1 3 5 7 */
        even |= even >> 12, odd |= odd >> 12; /* 0 and 4, 2 and 6; 1 and 5, 3 and 7 */
        put(out, j, (even & 0xff) | (odd & 0xff) << 8 | (even & 0xff00) << 8 | (odd & 0xff00) << 16);
    }
}

/* 32 codes: 16 in the low nibbles of 16 bytes, 16 in the high ones. */
static void put4_halves(const uint8_t *bytes, uint8_t *out)
{
    for (int j = 0; j < 4; j++) {
        const uint8_t *at = bytes + 8 * (j % 2);
        int shift = j < 2 ? 0 : 4;
        put(out, j, (word(at) >> shift & 0x0f0f0f0f) | (word(at + 4) >> shift & 0x0f0f0f0f) << 4);
    }
}

/* 2 bits of each of 32 bytes, from `shift` on: the plane of 2 bits. */
static void put2(const uint8_t *bytes, int shift, uint8_t *out)
{
    for (int h = 0; h < 2; h++) {
        uint32_t w = 0;
        for (int s = 0; s < 4; s++) w |= (word(bytes + 16 * h + 4 * s) >> shift & 0x03030303) << (2 * s);
        put(out, h, w);
    }
}

/* Bit `shift` of each of 32 bytes: the plane of 1 bit. */
static void put1(const uint8_t *bytes, int shift, uint8_t *out)
{
    uint32_t w = 0;
    for (int s = 0; s < 8; s++) w |= (word(bytes + 4 * s) >> shift & 0x01010101) << s;
    put(out, 0, w);
}

/* 32 bits in the order of the inputs: the same plane. */
static void put1_bits(const uint8_t *bytes, uint8_t *out)
{
    uint32_t bits = word(bytes), w = 0;
    for (int s = 0; s < 8; s++) w |= ((bits >> (4 * s) & 15) * 0x00204081u & 0x01010101u) << s;
    put(out, 0, w);
}

/* The 8 scales and 8 minima of 6 bits of Q4_K and Q5_K. */
static void scales_and_minima(const uint8_t *p, uint8_t *scales, uint8_t *minima)
{
    for (int i = 0; i < 4; i++) {
        scales[i] = p[i] & 63;
        minima[i] = p[4 + i] & 63;
        scales[4 + i] = (uint8_t)((p[8 + i] & 15) | (p[i] >> 6) << 4);
        minima[4 + i] = (uint8_t)(p[8 + i] >> 4 | (p[4 + i] >> 6) << 4);
    }
}

/* One block of the file to lane `c` of a unit. `out` begins at that lane's bytes nowhere: strides are whole lines. */
static void pack_unit(const int kind, const uint8_t *from, int c, uint8_t *unit)
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
    switch (kind) {
    case WEIGHT_Q4_0:
    case WEIGHT_IQ4_NL: return 18;
    case WEIGHT_Q4_1: return 20;
    case WEIGHT_Q5_0: return 22;
    case WEIGHT_Q5_1: return 24;
    case WEIGHT_Q8_0: return 34;
    case WEIGHT_Q2_K: return 84;
    case WEIGHT_Q3_K: return 110;
    case WEIGHT_Q4_K: return 144;
    case WEIGHT_Q5_K: return 176;
    case WEIGHT_Q6_K: return 210;
    case WEIGHT_G4_32: return 22;
    case WEIGHT_G4_64: return 38;
    case WEIGHT_G4_128: return 70;
    case WEIGHT_G8_32: return 38;
    case WEIGHT_G8_128: return 134;
    default: return 136; /* IQ4_XS */
    }
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

/* Whether the factors of lane `c` of a packed unit are finite numbers. */
static bool unit_is_finite(const stored_type t, const uint8_t *unit, int c)
{
    if (t.wide) return (word(unit + 4 * c) & EXPONENT_F32) != EXPONENT_F32
                       && is_finite16(unit + 2 * HALVES + 2 * c, EXPONENT_F16);
    return is_finite16(unit + 2 * c, EXPONENT_F16) && (!t.minima || is_finite16(unit + HALVES + 2 * c, EXPONENT_F16));
}

/* Fills the blocks [first, end) from rows [n] of k inputs; `out` is zeroed memory that begins with block 0. False where
 * a scale, or a float of 16 bits, is NaN or infinite. */
bool pack_stored(int kind, const uint8_t *const *rows, int64_t n, int64_t k, int64_t first, int64_t end, uint8_t *out)
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
                    pack_unit(kind, from, (int)c, unit);
                    finite &= unit_is_finite(t, unit, (int)c);
                }
            }
        }
    return finite;
}

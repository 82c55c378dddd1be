/* Puts weight matrices into the blocks that the gemm files describe; weights.py holds the twins in torch.
 *
 * Each function fills the blocks [first, end) of one matrix, so that several threads may share it. Rows and inputs
 * beyond the matrix become zeros. */
#include <math.h>

#include "genbatch.h"
#include "simd.h"

#define U4_GROUP 32
#define U4_LEVELS 16

static float at(const float *matrix, int64_t n, int64_t k, int64_t row, int64_t column)
{
    return row < n && column < k ? matrix[row * k + column] : 0.0f;
}

void pack_f32(const float *matrix, int64_t n, int64_t k, int64_t first, int64_t end, float *out)
{
    for (int64_t block = first; block < end; block++)
        for (int64_t i = 0; i < k; i++)
            for (int64_t c = 0; c < COLUMNS; c++)
                out[(block * k + i) * COLUMNS + c] = at(matrix, n, k, block * COLUMNS + c, i);
}

void pack_bf16(const float *matrix, int64_t n, int64_t k, int64_t first, int64_t end, uint16_t *out)
{
    int64_t width = padded(k, 2);
    for (int64_t block = first; block < end; block++)
        for (int64_t i = 0; i < width; i++)
            for (int64_t c = 0; c < COLUMNS; c++)
                out[(block * width + i / 2 * 2) * COLUMNS + 2 * c + i % 2] =
                    bf16_from_float(at(matrix, n, k, block * COLUMNS + c, i));
}

/* The scale is rounded first and the weights to what it then is, so rounding it costs nothing. */
static void pack_i8_group(const float *w, int64_t count, int64_t group, int64_t c, uint8_t *out)
{
    float largest = 0;
    for (int64_t i = 0; i < count; i++) largest = fabsf(w[i]) > largest ? fabsf(w[i]) : largest;
    uint16_t rounded = bf16_from_float(largest / 127.0f);
    uint32_t bits = (uint32_t)rounded << 16;
    float scale;
    memcpy(&scale, &bits, 4);
    for (int64_t i = 0; i < group; i++) {
        float q = i < count && scale > 0 ? rintf(w[i] / scale) : 0.0f;
        q = q > 127 ? 127 : q < -127 ? -127 : q;
        out[i / 4 * 4 * COLUMNS + 4 * c + i % 4] = (uint8_t)((int)q + 128);
    }
    memcpy(out + group * COLUMNS + 2 * c, &rounded, 2);
}

void pack_i8(const float *matrix, int64_t n, int64_t k, int64_t group, int64_t first, int64_t end, uint8_t *out)
{
    int64_t groups = padded(k, group) / group, group_bytes = COLUMNS * group + 2 * COLUMNS;
    for (int64_t block = first; block < end; block++)
        for (int64_t c = 0; c < COLUMNS; c++)
            for (int64_t g = 0; g < groups; g++) {
                int64_t row = block * COLUMNS + c, count = row < n ? smaller(k - g * group, group) : 0;
                pack_i8_group(matrix + row * k + g * group, count, group, c,
                              out + (block * groups + g) * group_bytes);
            }
}

/* float16 bits of x, rounded to nearest even; x in the range of float16. */
static uint16_t f16_from_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000;
    float magnitude = fabsf(x);
    if (magnitude < 6.103515625e-05f) return (uint16_t)(sign | (uint32_t)rintf(magnitude * 16777216.0f));
    bits &= 0x7fffffff;
    bits += 0xfff + (bits >> 13 & 1);
    return (uint16_t)(sign | ((bits >> 13) - (112 << 10)));
}

static float float_from_f16(uint16_t half)
{
    uint16_t lanes[VL] = {half};
    return vf_from_f16(lanes)[0];
}

/* Finds the grid of one group; false when some weight is farther from it than `tolerance` of the largest. */
static bool pack_u4_group(const float *w, float tolerance, int64_t c, uint8_t *out)
{
    float low = w[0], high = w[0];
    for (int i = 1; i < U4_GROUP; i++) {
        low = w[i] < low ? w[i] : low;
        high = w[i] > high ? w[i] : high;
    }
    float largest = fabsf(low) > fabsf(high) ? fabsf(low) : fabsf(high);
    if (!(largest < 32768.0f)) return false; /* float16 would overflow; also rejects NaN */
    uint16_t halves[2] = {f16_from_float((high - low) / (U4_LEVELS - 1)), f16_from_float(low)};
    float step = float_from_f16(halves[0]), offset = float_from_f16(halves[1]);
    for (int i = 0; i < U4_GROUP; i++) {
        float q = step > 0 ? rintf((w[i] - offset) / step) : 0.0f;
        q = q < 0 ? 0 : q > U4_LEVELS - 1 ? U4_LEVELS - 1 : q;
        if (fabsf(q * step + offset - w[i]) > tolerance * largest) return false;
        uint8_t *byte = out + i / 8 * 4 * COLUMNS + 4 * c + i % 4;
        *byte = i % 8 < 4 ? (uint8_t)q : (uint8_t)(*byte | (int)q << 4);
    }
    uint8_t *factors = out + COLUMNS * U4_GROUP / 2;
    memcpy(factors + 2 * c, &halves[0], 2);
    memcpy(factors + 2 * COLUMNS + 2 * c, &halves[1], 2);
    return true;
}

/* Whether every weight lies on a 4-bit grid; if not, `out` is partly filled. k is a multiple of 32. */
bool pack_u4(const float *matrix, int64_t n, int64_t k, float tolerance, int64_t first, int64_t end, uint8_t *out)
{
    static const float none[U4_GROUP] = {0};
    int64_t groups = k / U4_GROUP, group_bytes = COLUMNS * U4_GROUP / 2 + 4 * COLUMNS;
    for (int64_t block = first; block < end; block++)
        for (int64_t c = 0; c < COLUMNS; c++)
            for (int64_t g = 0; g < groups; g++) {
                int64_t row = block * COLUMNS + c;
                const float *w = row < n ? matrix + row * k + g * U4_GROUP : none;
                if (!pack_u4_group(w, tolerance, c, out + (block * groups + g) * group_bytes)) return false;
            }
    return true;
}

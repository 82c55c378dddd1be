/* Packs weight matrices into the blocks that the gemm files describe; tests compare them with torch.
 *
 * Each function fills the blocks [first, end) of one matrix, so that threads can share the work. Rows and inputs beyond the
 * matrix become zeros. */
#include <math.h>

#include "genbatch.h"
#include "simd.h"

#define U4_GROUP 32
#define U4_LEVELS 16
#define U4_VECTORS (U4_GROUP / VL)
#define SEARCHED 21 /* the number of grids, of 13.5 to 16 steps from end to end */
#define FEWEST_STEPS 13.5f
#define STEPS_APART 0.125f

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

/* Packs a group. The scale is rounded first, and weights are rounded to multiples of the rounded scale, so that the scale's
 * rounding adds no error. */
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

/* Returns the float16 bits of x, rounded to nearest even; x is in the range of float16. */
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

/* Finds the grid with the least squared error, among grids a little finer or coarser than the grid from the least to the
 * largest weight. A least-squares line through the codes gives the grid's levels. Large weights count more, as in llama.cpp's
 * K-quants, because large activations multiply them more often. */
static void nearest_grid(const float *w, float low, float high, float *step, float *offset)
{
    vf x[U4_VECTORS], weight[U4_VECTORS];
    vf squares = {0};
    UNROLL for (int v = 0; v < U4_VECTORS; v++) x[v] = vf_load(w + v * VL), squares += x[v] * x[v];
    const float typical = sqrtf(vf_sum(squares) / U4_GROUP);
    vf sum_w = {0}, sum_x = {0};
    UNROLL for (int v = 0; v < U4_VECTORS; v++) {
        weight[v] = vf_abs(x[v]) + typical;
        sum_w += weight[v];
        sum_x += weight[v] * x[v];
    }
    const double all_w = vf_sum(sum_w), all_x = vf_sum(sum_x);
    double best = 0;
    for (int i = 0; i < SEARCHED; i++) {
        const float scale = (FEWEST_STEPS + i * STEPS_APART) / (high - low);
        vf sum_l = {0}, sum_ll = {0}, sum_xl = {0};
        UNROLL for (int v = 0; v < U4_VECTORS; v++) {
            vf level = vf_from_int(vi_nearest((x[v] - low) * scale));
            level = vf_select(level > U4_LEVELS - 1.0f, vf_set1(U4_LEVELS - 1.0f), level);
            vf weighted = weight[v] * level;
            sum_l += weighted;
            sum_ll += weighted * level;
            sum_xl += weighted * x[v];
        }
        const double l = vf_sum(sum_l), ll = vf_sum(sum_ll), xl = vf_sum(sum_xl), spread = all_w * ll - l * l;
        if (!(spread > 0)) continue;
        const double slope = (all_w * xl - all_x * l) / spread, start = (ll * all_x - l * xl) / spread;
        const double explained = slope * xl + start * all_x; /* the explained part of the squares; the rest is the error */
        if (!(explained > best)) continue;
        best = explained;
        *step = (float)slope;
        *offset = (float)start;
    }
}

/* Finds the grid of one group: from the least to the largest weight, or with `nearest` the best grid. Returns false if a weight
 * is farther from the grid than `tolerance` times the largest weight, or if float16 cannot hold the grid. */
static bool pack_u4_group(const float *w, bool nearest, float tolerance, int64_t c, uint8_t *out)
{
    float low = w[0], high = w[0];
    for (int i = 1; i < U4_GROUP; i++) {
        low = w[i] < low ? w[i] : low;
        high = w[i] > high ? w[i] : high;
    }
    float largest = fabsf(low) > fabsf(high) ? fabsf(low) : fabsf(high);
    if (!(largest < 32768.0f)) return false; /* float16 would overflow; also rejects NaN */
    float step = (high - low) / (U4_LEVELS - 1), offset = low;
    if (nearest && high - low > 1e-30f) nearest_grid(w, low, high, &step, &offset);
    uint16_t halves[2] = {f16_from_float(step), f16_from_float(offset)};
    step = float_from_f16(halves[0]), offset = float_from_f16(halves[1]);
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

/* Packs a matrix to 4 bits. Returns whether every weight lies within `tolerance` of a 4-bit grid (with `nearest` the best grid);
 * if not, `out` is partly filled. k is a multiple of 32. */
bool pack_u4(const float *matrix, int64_t n, int64_t k, bool nearest, float tolerance, int64_t first, int64_t end,
             uint8_t *out)
{
    static const float none[U4_GROUP] = {0};
    int64_t groups = k / U4_GROUP, group_bytes = COLUMNS * U4_GROUP / 2 + 4 * COLUMNS;
    for (int64_t block = first; block < end; block++)
        for (int64_t c = 0; c < COLUMNS; c++)
            for (int64_t g = 0; g < groups; g++) {
                int64_t row = block * COLUMNS + c;
                const float *w = row < n ? matrix + row * k + g * U4_GROUP : none;
                if (!pack_u4_group(w, nearest, tolerance, c, out + (block * groups + g) * group_bytes)) return false;
            }
    return true;
}

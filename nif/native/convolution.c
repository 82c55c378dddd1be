/* Short convolutions of each channel, over a window of the inputs in the cache.
 *
 * Blocks have these inputs as floats, [block_size][hidden], so a window is read as attention reads keys. The sum always goes
 * from the oldest tap to the newest. */
#include "genbatch.h"

static float *inputs_at(const cache *c, int layer, int64_t hidden, int64_t block, int64_t offset)
{
    return (float *)(c->base + layer * c->layer_stride + block * c->block_stride) + offset * hidden;
}

void convolution_write(const cache *c, int layer, int64_t hidden, int64_t slot, const float *row)
{
    float *out = inputs_at(c, layer, hidden, slot / c->block_size, slot % c->block_size);
    const float *gates = row, *inputs = row + 2 * hidden;
    for (int64_t i = 0; i < hidden; i++) out[i] = gates[i] * inputs[i];
}

void convolution_row(const cache *c, const layer *l, int64_t hidden, const int32_t *table, int64_t position,
                     const float *row, float *out)
{
    const float *factors = row + hidden;
    for (int64_t i = 0; i < hidden; i++) out[i] = l->tap_bias ? l->tap_bias[i] : 0.0f;
    for (int64_t tap = 0; tap < l->window; tap++) {
        const int64_t at = position - l->window + 1 + tap;
        if (at < 0) continue; /* positions before the text are zeros */
        const float *inputs = inputs_at(c, l->index_in_group, hidden, table[at / c->block_size], at % c->block_size);
        const float *taps = l->taps + tap * hidden;
        for (int64_t i = 0; i < hidden; i++) out[i] += taps[i] * inputs[i];
    }
    for (int64_t i = 0; i < hidden; i++) out[i] *= factors[i];
}

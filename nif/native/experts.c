/* Mixtures of experts: which experts a token takes, and whose rows meet which expert.
 *
 * A row's result does not depend on who else chose its expert, and a token adds its experts in ascending order. */
#include <math.h>

#include "genbatch.h"
#include "tiles.h"

/* Marks the `chosen` largest scores, of equals the lowest id; the ids come out ascending. */
static void choose_largest(const experts *x, const float *scores, int32_t *ids)
{
    for (int n = 0; n < x->chosen; n++) {
        int32_t best = -1;
        for (int32_t i = 0; i < x->count; i++) {
            bool taken = false;
            for (int j = 0; j < n; j++) taken |= ids[j] == i;
            if (!taken && (best < 0 || scores[i] > scores[best])) best = i;
        }
        ids[n] = best;
    }
    for (int n = 1; n < x->chosen; n++) {
        const int32_t id = ids[n];
        int at = n;
        for (; at > 0 && ids[at - 1] > id; at--) ids[at] = ids[at - 1];
        ids[at] = id;
    }
}

void experts_choose(const experts *x, const choice *c, int64_t token)
{
    const float *scores = c->scores + token * x->count;
    int32_t *ids = c->ids + token * x->chosen;
    float *weights = c->weights + token * x->chosen, largest = scores[0], total = 0;
    choose_largest(x, scores, ids);
    for (int i = 1; i < x->count; i++) largest = scores[i] > largest ? scores[i] : largest;
    for (int n = 0; n < x->chosen; n++) weights[n] = expf(scores[ids[n]] - largest);
    if (x->normalised)
        for (int n = 0; n < x->chosen; n++) total += weights[n];
    else
        for (int i = 0; i < x->count; i++) total += expf(scores[i] - largest);
    for (int n = 0; n < x->chosen; n++) weights[n] /= total;
}

static void add_panels(choice *c, int32_t expert, int64_t most)
{
    const int32_t start = c->starts[expert], count = c->starts[expert + 1] - start;
    if (!count) return;
    const int64_t tiles = tiles_for(count), panels = (tiles + most - 1) / most;
    for (int64_t i = 0; i < panels; i++) {
        const int64_t first = tile_at(count, i * tiles / panels).start;
        const int64_t end = tile_at(count, (i + 1) * tiles / panels).start;
        c->panels[c->num_panels++] = (expert_panel){expert, start, count, first, end - first};
    }
}

void experts_group(const experts *x, choice *c, int64_t num_tokens, int64_t most)
{
    const int64_t rows = num_tokens * x->chosen;
    for (int32_t i = 0; i <= x->count; i++) c->starts[i] = 0;
    for (int64_t i = 0; i < rows; i++) c->starts[c->ids[i] + 1]++;
    for (int32_t i = 0; i < x->count; i++) c->starts[i + 1] += c->starts[i];
    for (int64_t i = 0; i < rows; i++) { /* starts[e] runs to the end of e's rows, the start of the next's */
        c->places[i] = c->starts[c->ids[i]]++;
        c->tokens[c->places[i]] = (int32_t)(i / x->chosen);
    }
    for (int32_t i = x->count; i > 0; i--) c->starts[i] = c->starts[i - 1];
    c->starts[0] = 0;
    c->num_panels = 0;
    for (int32_t i = 0; i < x->count; i++) add_panels(c, i, most);
}

expert_sizes experts_sizes(const model *m)
{
    expert_sizes s = {0, 0, 0};
    for (int i = 0; i < m->num_layers; i++) {
        const experts *x = m->layers[i].experts;
        if (!x) continue;
        s.chosen = x->chosen > s.chosen ? x->chosen : s.chosen;
        s.count = x->count > s.count ? x->count : s.count;
        for (int j = 0; j < x->count; j++) {
            s.k = x->gate_up[j].k > s.k ? x->gate_up[j].k : s.k;
            s.k = x->down[j].k > s.k ? x->down[j].k : s.k;
        }
    }
    s.k = padded(s.k, SMALLEST_GROUP);
    return s;
}

/* Mixtures of experts: chooses a token's experts, and sorts rows by expert.
 *
 * A row's result does not depend on other tokens with the same expert. A token adds its experts in ascending order. */
#include <math.h>

#include "genbatch.h"
#include "tiles.h"

#define MAX_EXPERT_GROUPS 64
#define LEAST_TOTAL 1e-20f

/* Returns the value by which experts are chosen. `closed` has a bit for each group from which no expert may be chosen. */
static float rank_of(const experts *x, const float *scores, uint64_t closed, int32_t i)
{
    if (closed >> (i / ((x->count - x->shared) / x->groups)) & 1) return -INFINITY;
    return scores[i] + (x->correction ? x->correction[i] : 0.0f);
}

/* Sorts a token's experts by id, and their weights unless `weights` is NULL. */
static void sort_chosen(int chosen, int32_t *ids, float *weights)
{
    for (int n = 1; n < chosen; n++) {
        const int32_t id = ids[n];
        const float weight = weights ? weights[n] : 0;
        int at = n;
        for (; at > 0 && ids[at - 1] > id; at--) {
            ids[at] = ids[at - 1];
            if (weights) weights[at] = weights[at - 1];
        }
        ids[at] = id;
        if (weights) weights[at] = weight;
    }
}

static bool is_among(const int32_t *ids, int count, int32_t id)
{
    for (int n = 0; n < count; n++)
        if (ids[n] == id) return true;
    return false;
}

/* Chooses the experts with the highest ranks; of equal ranks the lowest id wins. Writes the ids in ascending order. */
static void choose_largest(const experts *x, const float *scores, uint64_t closed, int32_t *ids)
{
    const int chosen = x->chosen - x->shared;
    for (int n = 0; n < chosen; n++) {
        int32_t best = -1;
        float highest = 0;
        for (int32_t i = 0; i < x->count - x->shared; i++) {
            const float rank = rank_of(x, scores, closed, i);
            if (!is_among(ids, n, i) && (best < 0 || rank > highest)) best = i, highest = rank;
        }
        ids[n] = best;
    }
    sort_chosen(chosen, ids, NULL);
}

/* Chooses experts one after another. Each weight is a softmax over the remaining scores near the expert's score (Phi-MoE's
 * SparseMixer). */
static void choose_in_turn(const experts *x, const float *scores, int32_t *ids, float *weights)
{
    const int chosen = x->chosen - x->shared;
    for (int n = 0; n < chosen; n++) {
        int32_t best = -1;
        for (int32_t i = 0; i < x->count - x->shared; i++)
            if (!is_among(ids, n, i) && (best < 0 || scores[i] > scores[best])) best = i;
        float total = 0;
        for (int32_t i = 0; i < x->count - x->shared; i++) {
            const float behind = scores[best] - scores[i];
            if (!is_among(ids, n, i) && !(behind / fmaxf(fabsf(scores[i]), scores[best]) > 2 * x->jitter))
                total += expf(-behind);
        }
        ids[n] = best;
        weights[n] = 1.0f / total;
    }
    sort_chosen(chosen, ids, weights);
}

/* Returns the bits of the groups that are not among the best. Groups compare by the sum of their two highest ranks, or by their
 * highest score if weights are a softmax over all experts. */
static uint64_t closed_groups(const experts *x, const float *scores)
{
    if (x->best_groups >= x->groups) return 0;
    const int32_t size = (x->count - x->shared) / x->groups;
    float sums[MAX_EXPERT_GROUPS];
    for (int32_t g = 0; g < x->groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int32_t i = g * size; i < (g + 1) * size; i++) {
            const float rank = rank_of(x, scores, 0, i);
            second = rank > first ? first : rank > second ? rank : second;
            first = rank > first ? rank : first;
        }
        sums[g] = x->sigmoid || x->correction ? first + second : first;
    }
    uint64_t closed = (x->groups == 64 ? 0 : (uint64_t)1 << x->groups) - 1;
    for (int32_t n = 0; n < x->best_groups; n++) {
        int32_t best = -1;
        for (int32_t g = 0; g < x->groups; g++)
            if (closed >> g & 1 && (best < 0 || sums[g] > sums[best])) best = g;
        closed &= ~((uint64_t)1 << best);
    }
    return closed;
}

static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/* Turns scores into weights: sigmoid or softmax. */
static void weigh(const experts *x, float *scores, int32_t count)
{
    float largest = scores[0], total = 0;
    if (x->sigmoid) {
        for (int32_t i = 0; i < count; i++) scores[i] = sigmoid(scores[i]);
        return;
    }
    for (int32_t i = 1; i < count; i++) largest = scores[i] > largest ? scores[i] : largest;
    for (int32_t i = 0; i < count; i++) total += scores[i] = expf(scores[i] - largest);
    if (!x->normalised || x->correction)
        for (int32_t i = 0; i < count; i++) scores[i] /= total;
}

void experts_choose(const experts *x, const choice *c, int64_t token)
{
    float *scores = c->scores + token * x->count, *weights = c->weights + token * x->chosen, total = 0;
    int32_t *ids = c->ids + token * x->chosen;
    const int32_t count = x->count - x->shared, chosen = x->chosen - x->shared;
    const float shared = x->gated ? sigmoid(scores[count]) : 1.0f;
    if (x->jitter > 0) {
        choose_in_turn(x, scores, ids, weights);
        return;
    }
    if (!x->sigmoid && !x->correction) /* by scores, because the softmax may round to equal weights */
        choose_largest(x, scores, closed_groups(x, scores), ids);
    weigh(x, scores, count);
    if (x->sigmoid || x->correction) choose_largest(x, scores, closed_groups(x, scores), ids);
    for (int n = 0; n < chosen; n++) total += weights[n] = scores[ids[n]];
    for (int n = 0; n < chosen; n++) {
        if (x->normalised) weights[n] /= total > LEAST_TOTAL ? total : LEAST_TOTAL;
        weights[n] *= x->scales ? x->scales[ids[n]] * x->scale : x->scale;
    }
    for (int n = 0; n < x->shared; n++) ids[chosen + n] = count + n, weights[chosen + n] = shared;
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
    for (int64_t i = 0; i < rows; i++) { /* starts[e] ends at the end of e's rows, which is the start of the next rows */
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

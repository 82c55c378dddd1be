/* Adapters: computes y += ((x A^T) * scale) B^T, for each row with the matrices of its own adapter.
 *
 * The rows of a step are sorted by adapter, so that each A is read once for all its rows (lora_shrink). The result has as many
 * elements as the adapter has ranks. B is multiplied and added in float, row by row, when a block of the linear is finished
 * (lora_expand). Both sums have a fixed order, so a row's result does not depend on the other rows of the step. */
#include "genbatch.h"
#include "simd.h"

#define TILE 4 /* rows and ranks that are multiplied together: 16 sums in registers */
#define UNIT_RANKS 16
#define PARTS (LORA_COLUMNS / VL)

/* Computes h[r][j] for R rows and J ranks. Lanes are summed at the end, so a sum's order depends only on its row and rank. */
ALWAYS_INLINE void dot_tile(const int R, const int J, const float *a, int64_t k, const float *const *x, const float *scale,
                            float *const *h)
{
    vf sums[TILE][TILE];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int j = 0; j < J; j++) sums[r][j] = (vf){0};
    int64_t i = 0;
    for (; i + VL <= k; i += VL) {
        vf row[TILE];
        UNROLL for (int r = 0; r < R; r++) row[r] = vf_load(x[r] + i);
        UNROLL for (int j = 0; j < J; j++) {
            vf w = vf_load(a + j * k + i);
            UNROLL for (int r = 0; r < R; r++) sums[r][j] = vf_fma(w, row[r], sums[r][j]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < J; j++) {
            float sum = vf_sum(sums[r][j]);
            for (int64_t rest = i; rest < k; rest++) sum += a[j * k + rest] * x[r][rest];
            h[r][j] = sum * scale[j];
        }
}

static void dot_rows(int rows, int ranks, const float *a, int64_t k, const float *const *x, const float *scale,
                     float *const *h)
{
#define CALL(R, J)                                                                                             \
    if (rows == R && ranks == J) dot_tile(R, J, a, k, x, scale, h);
#define RANKS(R) CALL(R, 1) CALL(R, 2) CALL(R, 3) CALL(R, 4)
    RANKS(1) RANKS(2) RANKS(3) RANKS(4)
#undef RANKS
#undef CALL
}

void lora_sort(const lora_step *s, const int32_t *owner, const int64_t *index, int64_t count, lora_rows *rows)
{
    rows->num_groups = 0;
    int32_t at = 0;
    for (int32_t adapter = 0; adapter < s->num_adapters; adapter++) {
        lora_group *group = &rows->groups[rows->num_groups];
        *group = (lora_group){adapter, at, 0};
        for (int64_t i = 0; i < count; i++)
            if (owner[index ? index[i] : i] == adapter) rows->order[at++] = (int32_t)i;
        group->count = at - group->start;
        if (group->count) rows->num_groups++;
    }
}

bool lora_adapts(const lora_step *s, const lora_rows *rows, int64_t place)
{
    for (int g = 0; g < rows->num_groups; g++)
        if (s->adapters[rows->groups[g].adapter][place].a) return true;
    return false;
}

static int64_t tiles_of(const lora_group *group) { return (group->count + TILE - 1) / TILE; }

static int64_t units_of(const lora_step *s, const lora_group *group, int64_t place)
{
    const lora *l = &s->adapters[group->adapter][place];
    return l->a ? tiles_of(group) * ((l->ranks + UNIT_RANKS - 1) / UNIT_RANKS) : 0;
}

int64_t lora_units(const lora_step *s, const lora_rows *rows, int64_t place)
{
    int64_t units = 0;
    for (int g = 0; g < rows->num_groups; g++) units += units_of(s, &rows->groups[g], place);
    return units;
}

void lora_shrink(const lora_step *s, const lora_rows *rows, int64_t place, int64_t unit, const lora_input *x)
{
    const lora_group *group = rows->groups;
    for (int64_t units; unit >= (units = units_of(s, group, place)); group++) unit -= units;
    const lora *l = &s->adapters[group->adapter][place];
    const int64_t tile = unit % tiles_of(group) * TILE;
    const int first = (int)(unit / tiles_of(group)) * UNIT_RANKS;
    const int count = (int)smaller(TILE, group->count - tile), end = (int)smaller(first + UNIT_RANKS, l->ranks);
    for (int j = first; j < end; j += TILE) {
        const float *from[TILE];
        float *to[TILE];
        for (int r = 0; r < count; r++) {
            const int32_t row = rows->order[group->start + tile + r];
            from[r] = x->rows + (x->index ? x->index[row] : row) * x->size;
            to[r] = s->h + row * s->ranks + j;
        }
        dot_rows(count, (int)smaller(TILE, end - j), l->a + (int64_t)j * x->size, x->size, from, l->scales + j, to);
    }
}

/* Adds the share of some ranks to LORA_COLUMNS outputs of R rows. */
ALWAYS_INLINE void add_half(const int R, const lora_half *half, const float *b, const float *const *h, float *const *sums)
{
    vf even[TILE][PARTS], odd[TILE][PARTS]; /* two independent sums hide the latency of additions */
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < PARTS; v++) even[r][v] = odd[r][v] = (vf){0};
    int j = 0;
    for (; j + 2 <= half->count; j += 2, b += 2 * LORA_COLUMNS) {
        UNROLL for (int v = 0; v < PARTS; v++) {
            const vf b0 = vf_load(b + v * VL), b1 = vf_load(b + LORA_COLUMNS + v * VL);
            UNROLL for (int r = 0; r < R; r++) {
                even[r][v] = vf_fma(b0, vf_set1(h[r][half->first + j]), even[r][v]);
                odd[r][v] = vf_fma(b1, vf_set1(h[r][half->first + j + 1]), odd[r][v]);
            }
        }
    }
    if (j < half->count)
        UNROLL for (int v = 0; v < PARTS; v++) {
            const vf last = vf_load(b + v * VL);
            UNROLL for (int r = 0; r < R; r++)
                even[r][v] = vf_fma(last, vf_set1(h[r][half->first + j]), even[r][v]);
        }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < PARTS; v++)
        vf_store(sums[r] + v * VL, vf_load(sums[r] + v * VL) + (even[r][v] + odd[r][v]));
}

static void add_halves(const lora *l, int rows, int64_t column, int64_t width, const float *const *h, float *const *sums)
{
    for (int64_t c = 0; c < width; c += LORA_COLUMNS) {
        const lora_half *half = &l->halves[(column + c) / LORA_COLUMNS];
        if (!half->count) continue;
        const float *b = l->b + half->at * LORA_COLUMNS;
        float *to[TILE];
        for (int r = 0; r < rows; r++) to[r] = sums[r] + c;
        switch (rows) {
        case 1: add_half(1, half, b, h, to); break;
        case 2: add_half(2, half, b, h, to); break;
        case 3: add_half(3, half, b, h, to); break;
        default: add_half(4, half, b, h, to); break;
        }
    }
}

void lora_expand(const lora_step *s, const lora_rows *rows, int64_t place, int64_t column, int64_t width, int64_t first,
                 int64_t count, float *sums)
{
    for (int g = 0; g < rows->num_groups; g++) {
        const lora_group *group = &rows->groups[g];
        const lora *l = &s->adapters[group->adapter][place];
        if (!l->a) continue;
        const float *h[TILE];
        float *to[TILE];
        int filled = 0;
        for (int32_t i = group->start; i < group->start + group->count; i++) {
            const int64_t row = rows->order[i];
            if (row < first || row >= first + count) continue;
            h[filled] = s->h + row * s->ranks;
            to[filled++] = sums + (row - first) * COLUMNS;
            if (filled < TILE) continue;
            add_halves(l, TILE, column, width, h, to);
            filled = 0;
        }
        if (filled) add_halves(l, filled, column, width, h, to);
    }
}

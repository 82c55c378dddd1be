/* The memory of a step: its buffers lie end to end in one allocation, which grows on demand. */
#include "step.h"

static int64_t largest_k(const model *m)
{
    int64_t k = larger(larger(m->head.k, m->pair ? m->pair->input.k : 0), larger(m->inputs.k, m->split.k));
    for (int i = 0; i < m->num_layers; i++) {
        const layer *l = &m->layers[i];
        const recurrence *r = l->recurrence;
        const linear *all[] = {&l->qkv, &l->out, &l->gate_up, &l->down, &l->input_gate, &l->input_projection,
                               l->experts ? &l->experts->router : &l->qkv, r ? &r->inputs : &l->qkv, r ? &r->out : &l->qkv,
                               l->latent ? &l->latent->queries : &l->qkv, l->altup ? &l->altup->left : &l->qkv,
                               l->altup ? &l->altup->right : &l->qkv};
        for (int j = 0; j < 12; j++) k = all[j]->k > k ? all[j]->k : k;
    }
    return k;
}

/* Returns the scratch floats of one thread. */
static int64_t scratch_floats(const model *m)
{
    const int64_t row = m->layer_embedding.width > m->hidden ? m->layer_embedding.width : m->hidden;
    int64_t most = PANEL * COLUMNS + padded(row, 16);
    for (int i = 0; i < m->num_layers; i++) {
        const int64_t states = m->layers[i].recurrence ? recurrence_scratch(m->layers[i].recurrence) : 0;
        most = states > most ? states : most;
    }
    return most;
}

#define LINE 64 /* bytes of a cache line */
#define SMALL_PAGE 4096 /* bytes of a page without huge pages */
/* Bytes that `engine_reserve` writes to. A huge page may take 5 ms; a step that needs more pages takes seconds itself. */
#define TOUCHED (16 << 20)

/* The place of the next buffer. If `memory` is NULL, bytes are only counted. */
typedef struct {
    uint8_t *memory;
    int64_t bytes;
} layout;

/* Returns a buffer on separate cache lines; NULL without memory. */
static void *take(layout *to, int64_t count, size_t size)
{
    void *buffer = to->memory ? to->memory + to->bytes : NULL;
    to->bytes += padded(count * (int64_t)size, LINE) + LINE;
    return buffer;
}

/* Lays out the buffers of a step from `memory` on, and returns their bytes. With NULL it only counts. */
static int64_t lay_out(const model *m, const step *s, int threads, uint8_t *memory, workspace *w)
{
    layout to = {memory, 0};
    const int64_t T = s->num_tokens, R = s->num_rows;
    const int64_t count = T > R ? T : R; /* a step may request a row's logits twice */
    int64_t width = 0, pitch = 0, heads = 0, heads_k = 0, gates = 0;
    for (int i = 0; i < m->num_layers; i++) {
        const layer *l = &m->layers[i];
        const recurrence *r = l->recurrence;
        width = larger(larger(mixed_width(m, l), r ? state_width(r) : 0), width);
        pitch = larger(larger(mixed_pitch(m, l), r ? state_pitch(r) : 0), pitch);
        heads = larger(l->latent ? latent_floats(m, l) : 0, heads);
        heads_k = larger(l->latent ? latent_k(m, l->latent) : 0, heads_k);
        gates = larger(l->sparse ? 2 * (int64_t)l->intermediate : 0, gates);
    }
    w->x = take(&to, T * m->hidden, sizeof(float));
    w->qkv = take(&to, count * pitch, sizeof(float));
    w->attended = take(&to, count * width, sizeof(float));
    w->heads = take(&to, count * heads, sizeof(float));
    w->kept = take(&to, R * m->hidden, sizeof(float));
    w->pairs = take(&to, m->pair ? 2 * T * m->pair->embedding.width : 0, sizeof(float));
    w->branch = take(&to, count * m->hidden, sizeof(float));
    w->inputs = take(&to, T * m->layer_embedding.width, sizeof(float));
    w->streams = take(&to, T * m->num_streams * m->hidden, sizeof(float));
    w->kept_streams = take(&to, R * m->num_streams * m->hidden, sizeof(float));
    w->laurel = take(&to, m->num_streams ? count * m->hidden : 0, sizeof(float));
    w->gates = take(&to, count * gates, sizeof(float));
    w->scratch_size = scratch_floats(m);
    w->scratch = take(&to, threads * w->scratch_size, sizeof(float));
    w->maxima = take(&to, s->best ? threads * s->num_logit_rows : 0, sizeof(lane_maxima));

    const clusters *c = m->clusters;
    const int64_t scored = c ? s->num_logit_rows : 0; /* rows with clusters */
    w->cluster_scores = take(&to, c ? scored * c->count : 0, sizeof(float));
    w->cluster_ids = take(&to, c ? scored * c->chosen : 0, sizeof(int32_t));
    w->cluster_logits = take(&to, c ? scored * c->chosen * (m->vocab_size / c->count) : 0, sizeof(float));

    const expert_sizes x = experts_sizes(m);
    const int64_t mixed = count * x.chosen, routed = x.chosen ? count : 0; /* rows of experts, rows with experts */
    w->activated = take(&to, larger(count, mixed) * m->intermediate, sizeof(float));
    const int64_t operand = larger(mixed * x.k, count * larger(largest_k(m), heads_k));
    w->operand = take(&to, operand, sizeof(float));
    w->factors = take(&to, operand / SMALLEST_GROUP, (size_t)FACTOR_BYTES);
    w->normed = take(&to, routed * m->hidden, sizeof(float));
    w->expert_out = take(&to, mixed * m->hidden, sizeof(float));
    w->expert_k = x.k;
    w->choice.scores = take(&to, routed * x.count, sizeof(float));
    w->choice.ids = take(&to, mixed, sizeof(int32_t));
    w->choice.weights = take(&to, mixed, sizeof(float));
    w->choice.places = take(&to, mixed, sizeof(int32_t));
    w->choice.tokens = take(&to, mixed, sizeof(int32_t));
    w->choice.starts = take(&to, x.count + 1, sizeof(int32_t));
    w->choice.panels = take(&to, x.count + mixed, sizeof(expert_panel));

    const int64_t adapters = s->num_adapters;
    w->adapted = take(&to, adapters ? count * m->hidden : 0, sizeof(float));
    w->lora = (lora_step){s->adapters, take(&to, adapters ? count * s->lora_ranks : 0, sizeof(float)), (int32_t)adapters,
                          s->lora_ranks};
    w->lora_tokens.order = take(&to, adapters ? T : 0, sizeof(int32_t));
    w->lora_tokens.groups = take(&to, adapters, sizeof(lora_group));
    w->lora_kept.order = take(&to, adapters ? R : 0, sizeof(int32_t));
    w->lora_kept.groups = take(&to, adapters, sizeof(lora_group));

    for (int g = 0; g < m->num_groups; g++) {
        w->families.lists[g] = take(&to, s->num_entries, sizeof(family));
        w->kept_families.lists[g] = take(&to, R, sizeof(family));
    }
    return to.bytes;
}

static bool grow(engine *e, int64_t bytes)
{
    if (bytes <= e->capacity) return true;
    memory_free(e->memory, e->capacity);
    e->memory = memory_allocate(bytes);
    e->capacity = e->memory ? bytes : 0;
    return e->memory != NULL;
}

bool workspace_lay_out(engine *e)
{
    workspace counted;
    const int threads = pool_size(e->pool);
    if (!grow(e, lay_out(e->model, e->step, threads, NULL, &counted))) return false;
    lay_out(e->model, e->step, threads, e->memory, &e->work);
    return true;
}

bool engine_reserve(engine *e, int64_t bytes)
{
    if (!grow(e, bytes)) return false;
    const int64_t first = smaller(bytes, TOUCHED);
    for (int64_t at = 0; at < first; at += SMALL_PAGE) ((volatile uint8_t *)e->memory)[at] = 0;
    return true;
}

int64_t step_bytes(const model *m, const step *s, int threads)
{
    workspace counted;
    return lay_out(m, s, threads, NULL, &counted);
}

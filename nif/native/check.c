/* Checks a step before anything is written, so that a wrong id never becomes an address. */
#include "genbatch.h"

static enum step_error check_entry(const step *s, const model *m, const cache *caches, int b)
{
    int first = s->query_starts[b], end = s->query_starts[b + 1];
    if (first < 0 || end <= first || end > s->num_tokens) return STEP_QUERY_STARTS;
    const int behind = m->writes ? 0 : 1; /* positions from the last key to the last token */
    if (s->kv_lens[b] < end - first || s->kv_lens[b] + behind > s->num_positions) return STEP_KV_LEN;
    for (int t = first; t < end; t++)
        if (s->positions[t] != s->kv_lens[b] - (end - t) + behind) return STEP_POSITION;
    for (int g = 0; g < m->num_groups; g++) {
        const cache *c = &caches[g];
        int blocks = (s->kv_lens[b] + c->block_size - 1) / c->block_size;
        if (blocks > s->table_width[g]) return STEP_BLOCK_TABLE;
        const int32_t *table = s->block_tables[g] + (int64_t)b * s->table_width[g];
        for (int i = 0; i < blocks; i++)
            if (table[i] < 0 || table[i] >= c->num_blocks) return STEP_BLOCK_TABLE;
    }
    return STEP_OK;
}

enum step_error step_check(const step *s, const model *m, const cache *caches, int64_t *where)
{
    if (s->num_entries < 1 || s->query_starts[0] != 0) return *where = 0, STEP_QUERY_STARTS;
    if (s->query_starts[s->num_entries] != s->num_tokens) return *where = s->num_entries, STEP_QUERY_STARTS;
    for (int64_t t = 0; t < s->num_tokens; t++) {
        *where = t;
        if (s->adapter_of && (s->adapter_of[t] < -1 || s->adapter_of[t] >= s->num_adapters)) return STEP_ADAPTER;
        if (s->input_ids[t] < 0 || s->input_ids[t] >= m->vocab_size) return STEP_TOKEN_ID;
        for (int g = 0; g < m->num_groups; g++) {
            int64_t slots = (int64_t)caches[g].num_blocks * caches[g].block_size;
            if (s->slots[g][t] < 0 || s->slots[g][t] >= slots) return STEP_SLOT;
        }
    }
    for (int b = 0; b < s->num_entries; b++) {
        enum step_error error = check_entry(s, m, caches, b);
        if (error) return *where = b, error;
    }
    if (s->num_logit_rows > s->num_rows) return *where = s->num_rows, STEP_ROW;
    for (int64_t i = 0; i < s->num_rows; i++)
        if (s->rows[i] < 0 || s->rows[i] >= s->num_tokens) return *where = i, STEP_ROW;
    return STEP_OK;
}

/* Which sequences of a step read the same keys, so that their rows can meet them together.
 *
 * Block tables alone tell: sequences that decode and whose tables begin with the same blocks are a family. A row's
 * result is the same to the bit in a family and alone. */
#include "attention.h"

/* Blocks that two tables have in common from the start. */
static int common_blocks(const int32_t *a, const int32_t *b, int most)
{
    int i = 0;
    while (i < most && a[i] == b[i]) i++;
    return i;
}

/* Chunks that the family would have in common with `entry`; 0 if it had better not join. One that shares much less
 * than the others would take from them what they share. */
static int chunks_with(const family *f, const attention_entry *entry, const cache *c)
{
    const attention_entry *first = &f->members[0];
    int shorter = first->kv_len < entry->kv_len ? first->kv_len : entry->kv_len;
    /* The block of a sequence's last key is its own. */
    /* guard: own block of a family's member */
    int chunks = attention_whole_chunks(c, common_blocks(first->table, entry->table, (shorter - 1) / c->block_size));
    if (f->count == 1) return chunks;
    return 2 * chunks < f->chunks ? 0 : chunks < f->chunks ? chunks : f->chunks;
}

/* Where a window ends inside a sequence, the blocks before it may be anything. */
static bool may_share(const attention_entry *entry, int window)
{
    /* guard: evicted blocks of a family's member */
    return entry->query_len == 1 && entry->kv_len <= window;
}

int families_find(const step *s, int group, const cache *c, int window, int most, family *out)
{
    int count = 0;
    for (int b = 0; b < s->num_entries; b++) {
        const int first = s->query_starts[b];
        const int32_t *table = s->block_tables[group] + (int64_t)b * s->table_width[group];
        const attention_entry entry = {first, s->query_starts[b + 1] - first, s->kv_lens[b], table};
        int chunks = 0, at = 0;
        for (; at < count && may_share(&entry, window); at++)
            if (may_share(&out[at].members[0], window) && out[at].count < most &&
                (chunks = chunks_with(&out[at], &entry, c)))
                break;
        if (!chunks) out[at = count++].count = 0;
        out[at].chunks = chunks;
        out[at].members[out[at].count++] = entry;
    }
    return count;
}

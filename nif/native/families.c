/* Finds the sequences of a step that read the same keys, so that one pass over these keys serves all of them.
 *
 * Decoding sequences whose block tables begin with the same blocks are a family. A row's result has the same bits in a family
 * and alone. */
#include "attention.h"

/* Returns the number of equal blocks at the beginning of two tables. */
static int common_blocks(const int32_t *a, const int32_t *b, int most)
{
    int i = 0;
    while (i < most && a[i] == b[i]) i++;
    return i;
}

/* Returns the chunks that the family would share with `entry`; 0 if `entry` should not join, because it shares much less than
 * the other members. */
static int chunks_with(const family *f, const attention_entry *entry, const cache *c)
{
    const attention_entry *first = &f->members[0];
    int shorter = first->kv_len < entry->kv_len ? first->kv_len : entry->kv_len;
    /* A sequence never shares the block of its last key. */
    /* guard: own block of a family's member */
    int chunks = attention_whole_chunks(c, common_blocks(first->table, entry->table, (shorter - 1) / c->block_size));
    if (f->count == 1) return chunks;
    return 2 * chunks < f->chunks ? 0 : chunks < f->chunks ? chunks : f->chunks;
}

/* Returns whether a sequence may join a family. Blocks before a window may be evicted, so their ids in the table mean nothing. */
static bool may_share(const attention_entry *entry, int window)
{
    /* guard: evicted blocks of a family's member */
    return entry->query_len == 1 && entry->kv_len <= window;
}

int entry_of(const step *s, int64_t token)
{
    int low = 0, high = s->num_entries - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (s->query_starts[middle] <= token)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

static const int32_t *table_of(const step *s, int group, int entry)
{
    return s->block_tables[group] + (int64_t)entry * s->table_width[group];
}

/* Returns the tokens of entry *at, and moves *at to the next entry. */
static attention_entry next_entry(const step *s, int group, int64_t *at)
{
    const int b = (int)(*at)++, first = s->query_starts[b];
    return (attention_entry){first, s->query_starts[b + 1] - first, s->kv_lens[b], table_of(s, group, b)};
}

/* Returns the kept rows from *at that are neighbours in one entry, and moves *at to the next row. */
static attention_entry next_rows(const step *s, int group, int64_t *at)
{
    const int64_t row = *at, token = s->rows[row];
    const int b = entry_of(s, token), end = s->query_starts[b + 1];
    int count = 1;
    while (row + count < s->num_rows && token + count < end && s->rows[row + count] == token + count) count++;
    *at += count;
    return (attention_entry){row, count, s->kv_lens[b] - (int32_t)(end - token - count), table_of(s, group, b)};
}

int families_find(const step *s, bool kept, int group, const cache *c, int window, int most, family *out)
{
    const int64_t end = kept ? s->num_rows : s->num_entries;
    int count = 0;
    for (int64_t next = 0; next < end;) {
        const attention_entry entry = kept ? next_rows(s, group, &next) : next_entry(s, group, &next);
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

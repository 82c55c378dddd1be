/* Types and functions that the files of a step share: the engine, a thread's place in the step, and the phases that every
 * part of a layer uses. */
#ifndef GENBATCH_STEP_H
#define GENBATCH_STEP_H

#include "genbatch.h"
#include "tiles.h"

/* The most rows in a unit of a linear: 20 tiles of 12. 240 rows of 576 floats are 540 KB, which stay in L2 while blocks of
 * weights are read. */
#define PANEL_TILES 20
#define PANEL (PANEL_TILES * MAX_ROWS)
#define FACTOR_BYTES ((int64_t)sizeof(digit_factors)) /* the most bytes of a group's factors */

/* The families of each layer group; see families_find. */
typedef struct {
    family *lists[MAX_GROUPS];
    int counts[MAX_GROUPS];
} families;

typedef struct {
    float *x, *qkv, *attended, *activated, *kept; /* kept: the rows whose logits are needed */
    float *heads; /* of latent attention: the queries of all heads, later their values */
    float *pairs; /* [token, 2 * width]: embeddings and states */
    float *cluster_scores, *cluster_logits; /* [row with logits, clusters], [row, chosen clusters, tokens of a cluster] */
    int32_t *cluster_ids; /* [row, chosen] */
    float *branch; /* the output of a layer's part, if it is not added to x at once */
    void *operand;
    uint8_t *factors; /* group_factors or digit_factors */
    float *scratch; /* for each thread PANEL x COLUMNS sums, then a row of hidden size */
    int64_t scratch_size;
    lane_maxima *maxima; /* [thread, row of logits] */
    float *normed, *expert_out; /* the experts' inputs and outputs */
    float *inputs; /* [token, layer, layer_width]: each layer's own embeddings */
    float *streams, *kept_streams; /* [token or row with logits, num_streams, hidden] */
    float *laurel; /* [token, hidden]: LAuReL's addends beside attention */
    float *gates; /* [row, 2 * intermediate]: gates and ups of a sparse layer */
    int64_t expert_k; /* inputs of the experts' widest linear */
    choice choice;
    float *adapted; /* with adapters: a linear's rows as floats, if no other buffer has these */
    lora_step lora;
    lora_rows lora_tokens, lora_kept; /* all rows; the rows whose logits are needed */
    families families, kept_families; /* of all tokens; of the rows that run on */
} workspace;

/* The numbers of claims of units that were made and that are done. */
typedef struct {
    atomic_int claimed, done;
} phase;

typedef struct engine {
    pool *pool;
    const model *whole;
    const model *model; /* the model of the step: the whole one, or its predictor */
    const cache *caches;
    workspace work;
    void *memory; /* the memory of `work` */
    int64_t capacity; /* bytes */
    phase *phases;
    int num_phases;
    const step *step;
} engine;

typedef struct {
    engine *engine;
    int thread;
    int phase;
    bool claimed; /* whether the thread has claimed units of this phase */
    int claims; /* claims of the phase by all threads */
    const lora_rows *rows; /* the rows of x; NULL without adapters */
    int64_t place; /* of the current linear, if an adapter changes it; else -1 */
} worker;

/* The source of a linear's rows: row i is norm(x[index[i]]), or x[index[i]] without a norm. `index` may be NULL. */
typedef struct {
    const float *x;
    int64_t size;
    const int64_t *index;
    const norm *norm;
    float *kept; /* [rows, size]: receives the rows as floats; or NULL */
    int64_t pitch; /* floats from one row to the next; 0: `size` */
} source;

/* The use of a linear's outputs: they are written to out[count, pitch], or searched for the largest, or both. */
typedef struct {
    enum finish finish;
    float *out; /* or NULL */
    int64_t pitch;
    lane_maxima *maxima; /* or NULL */
} target;

/* The rows that a phase reads or writes: all tokens of the step, or the kept tokens, which run on after the last keys. */
typedef struct {
    float *x;
    const int64_t *index; /* the rows' tokens; NULL: all tokens */
    int64_t count;
    const lora_rows *adapted;
    const families *families;
} stream;

/* Returns the index in `all` of each row of `kept`; NULL: both have the same rows. */
static inline const int64_t *rows_among(const stream *all, const stream *kept) { return all == kept ? NULL : kept->index; }

/* phases.c */
/* Claims [*from, *to) of `count` units; false if none are left. The thread's earlier claim of the phase counts as done. */
bool claim(worker *, int64_t count, int64_t grain, int64_t *from, int64_t *to);
void phase_end(worker *); /* waits until the claims of other threads are done */
int64_t grain_of(const worker *, int64_t count); /* units of a claim */
int64_t segments_for(const worker *, int64_t tiles, const linear *, int64_t *length);
static inline float *row_of_thread(const worker *w)
{
    return w->engine->work.scratch + w->thread * w->engine->work.scratch_size + PANEL * COLUMNS;
}
static const norm no_norm = {NULL, NULL};
/* Returns the operand of one of several linears. It begins after `at` elements, which are whole groups. */
rows operand_at(const engine *, const linear *, int64_t at, int64_t count);
void prepare_phase(worker *, const linear *, int64_t count, const source *); /* writes the rows for a linear */
/* Runs prepare_phase for a linear of a layer, and multiplies the rows by their adapters' A. */
void layer_phase(worker *, const layer *, enum lora_place, const linear *, const float *x, int64_t size,
                 const int64_t *index, int64_t count, const norm *);
void linear_units(worker *, const linear *, int64_t count, const target *);
void linear_phase(worker *, const linear *, int64_t count, enum finish, float *out, int64_t pitch);
/* x = scale * (x + residual_scale * norm(branch)); `branch` is overwritten. */
void join_row(const model *, const norm *, float scale, float *branch, float *x);
void join_phase(worker *, const norm *, float scale, float *x, int64_t count);
void keep_phase(worker *); /* copies the rows that run on */
/* Returns whether a part's output can be added to x without a further phase. */
static inline bool added_at_once(const model *m, const norm *post, float scale)
{
    return !post->weight && m->residual_scale == 1.0f && scale == 1.0f;
}

/* mixing.c */
/* Floats in a token's row: the input of `out`, and the output of `qkv`; the same for a recurrence. */
int64_t mixed_width(const model *, const layer *);
int64_t mixed_pitch(const model *, const layer *);
int64_t state_width(const recurrence *);
int64_t state_pitch(const recurrence *);
void recur(worker *, const layer *, const stream *all, const stream *kept);
void attend(worker *, const layer *, const stream *all, const stream *kept);

/* latent.c */
void latent_queries(worker *, const layer *, const stream *kept); /* writes the cache; from `qkv` to `heads` */
void latent_values(worker *, const layer *, const stream *kept); /* from `attended` to `heads` */
int64_t latent_floats(const model *, const layer *); /* floats of a token in `heads` */
int64_t latent_k(const model *, const latent *); /* inputs of all heads' linears together */

/* mlp.c */
void mlp_phases(worker *, const layer *, float *x, int64_t count);

/* clusters.c */
void clusters_phases(worker *, const stream *kept, const norm *); /* computes the logits of a head over clusters */

/* altup.c */
void streams_phases(worker *); /* makes the streams from the embeddings */
void predict_phases(worker *, const layer *, const stream *); /* predicts all streams; x becomes the active one */
void laurel_phase(worker *, const stream *all, const stream *kept); /* adds LAuReL to x after attention */
/* Corrects all streams; x becomes the active one, scaled. */
void correct_phase(worker *, const layer *, const stream *all, const stream *kept);
void others_phase(worker *, const layer *, const stream *kept); /* adds the norm of `branch` to all streams but the first */
void merge_phases(worker *, const stream *kept); /* x becomes the mean of all streams */

/* workspace.c */
bool workspace_lay_out(engine *); /* lays out the buffers of the engine's step; false: no memory */

#endif

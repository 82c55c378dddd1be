/* What the files of a step share: the engine, a thread's place in the step, and the phases that every part of a layer
 * uses. */
#ifndef GENBATCH_STEP_H
#define GENBATCH_STEP_H

#include "genbatch.h"
#include "tiles.h"

/* Most rows per unit of a linear: 20 tiles of 12. 240 rows x 576 floats are 540 KB and stay in L2 while the
 * blocks of weights pass by. */
#define PANEL_TILES 20
#define PANEL (PANEL_TILES * MAX_ROWS)
#define FACTOR_BYTES ((int64_t)sizeof(digit_factors)) /* of a group, at most */

typedef struct {
    float *x, *qkv, *attended, *activated, *kept; /* kept: the rows that go on after the last attention */
    float *branch; /* what attention gives, where it is not added to x at once */
    void *operand;
    uint8_t *factors; /* of either kind */
    float *scratch; /* a thread's: PANEL x COLUMNS sums, then a row of hidden size */
    int64_t scratch_size;
    lane_maxima *maxima; /* a thread's: one a row of logits */
    float *normed, *expert_out; /* with experts: their inputs, and their outputs row by row */
    float *inputs; /* [token, layer, layer_width]: the layers' own embeddings of the tokens */
    int64_t expert_k; /* inputs of their widest linear */
    choice choice;
    float *adapted; /* with adapters: the float rows that a linear multiplies, where they are no other buffer's */
    lora_step lora;
    lora_rows lora_tokens, lora_kept; /* the step's rows, and those that go on after the last attention */
    family *families[MAX_GROUPS]; /* of a group's sequences, and how many */
    int num_families[MAX_GROUPS];
} workspace;

/* Claims of units: how many were asked for, how many are done. */
typedef struct {
    atomic_int claimed, done;
} phase;

typedef struct engine {
    pool *pool;
    const model *model;
    const cache *caches;
    workspace work;
    void *memory; /* of `work` */
    int64_t capacity; /* bytes */
    phase *phases;
    int num_phases;
    const step *step;
} engine;

typedef struct {
    engine *engine;
    int thread;
    int phase;
    bool claimed; /* whether it has units of this phase, to be done before the next claim */
    int claims; /* how many the phase has in all */
    const lora_rows *rows; /* those of x; NULL without adapters */
    int64_t place; /* of the linear under way, where a row has an adapter there; else -1 */
} worker;

/* What a linear's rows are made of: row i is norm(x[index[i]]), without a norm x[index[i]]; `index` may be NULL. */
typedef struct {
    const float *x;
    int64_t size;
    const int64_t *index;
    const norm *norm;
    float *kept; /* [rows, size]: the rows as floats are kept here, too; or NULL */
} source;

/* What a linear's blocks become: written to out[count, pitch], or looked through for the largest, or both. */
typedef struct {
    enum finish finish;
    float *out; /* or NULL */
    int64_t pitch;
    lane_maxima *maxima; /* or NULL */
} target;

/* Rows that a phase writes: all tokens of the step, or those that go on after the last layer's cache writes. */
typedef struct {
    float *x;
    const int64_t *index; /* which rows of all tokens they are; NULL: all */
    int64_t count;
    const lora_rows *adapted;
} stream;

/* phases.c */
/* Claims [*from, *to) of `count` units; false when none are left. What was claimed before is done. */
bool claim(worker *, int64_t count, int64_t grain, int64_t *from, int64_t *to);
void phase_end(worker *); /* waits for what others have claimed */
int64_t grain_of(const worker *, int64_t count); /* units of a claim */
int64_t segments_for(const worker *, int64_t tiles, const linear *, int64_t *length);
static inline float *row_of_thread(const worker *w)
{
    return w->engine->work.scratch + w->thread * w->engine->work.scratch_size + PANEL * COLUMNS;
}
static const norm no_norm = {NULL, NULL};
void prepare_phase(worker *, const linear *, int64_t count, const source *); /* the rows in the form that it multiplies */
/* As `prepare_phase` for a linear of a layer, and what the rows' adapters make of its input. */
void layer_phase(worker *, const layer *, enum lora_place, const linear *, const float *x, int64_t size,
                 const int64_t *index, int64_t count, const norm *);
void linear_units(worker *, const linear *, int64_t count, const target *);
void linear_phase(worker *, const linear *, int64_t count, enum finish, float *out, int64_t pitch);
/* x = scale * (x + residual_scale * norm(branch)); `branch` is overwritten. */
void join_row(const model *, const norm *, float scale, float *branch, float *x);
void join_phase(worker *, const norm *, float scale, float *x, int64_t count);
void keep_phase(worker *); /* copies the rows that go on after the last layer's cache writes */
/* Whether what a layer's part gives can be added to x as it comes. */
static inline bool added_at_once(const model *m, const norm *post, float scale)
{
    return !post->weight && m->residual_scale == 1.0f && scale == 1.0f;
}

/* mixing.c */
/* Floats of a token's row that `out` reads, and of the one that `qkv` gives; the same of a recurrence. */
int64_t mixed_width(const model *, const layer *);
int64_t mixed_pitch(const model *, const layer *);
int64_t state_width(const recurrence *);
int64_t state_pitch(const recurrence *);
void recur(worker *, const layer *, const stream *all, const stream *kept);
void attend(worker *, const layer *, const stream *all, const stream *kept);

/* mlp.c */
void mlp_phases(worker *, const layer *, float *x, int64_t count);

/* workspace.c */
bool workspace_reserve(engine *); /* for the engine's step; false: no memory */

#endif

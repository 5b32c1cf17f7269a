// What the stages are called with: plain structs, mirrored in Python (see attend.py and decide.py).
#pragma once
#include <stdint.h>

enum class Memory : int64_t { single, log_linear, dynamic };  // in the order of NUMBERED in dla/ops/cpu/binding.py

// Float32 throughout. Tokens lie on one axis; those of sequence n are offset[n] ... offset[n] + length[n].
struct AttendArgs {
    Memory memory;
    int64_t tokens, sequences, heads, key_heads, dk, dv;
    int64_t q_stride, k_stride, v_stride;  // floats from a token to the next
    int64_t width;                         // of lam, 0 without
    int64_t recency;                       // whether slot 0 is the newest state
    int64_t threads;
    int64_t carried;  // states a head that `initial` has: 1, levels, or those of the dynamic memory
    int64_t states;   // states a head that `final` has room for; for the dynamic memory also: that ever live at once
    // the dynamic memory alone (see dla/ops/state/pools.py)
    int64_t longest_short, most_loose;      // rows of a state without a matrix, and beside one
    int64_t pool_matrices, pool_rows;       // how many there are in the pools of the state carried in
    int64_t places_room, final_room;        // rows a head that `places` and the final arrays have room for
    double scale;
    const int64_t *offset, *length;  // [N]
    const int64_t *position;         // [N] tokens seen before (log_linear), or null
    const int64_t *origin;           // [N] what positions in death count from (dynamic)
    const float *q, *k, *v;          // [tokens, Hk, dk], [tokens, Hk, dk], [tokens, H, dv]
    const float *lam, *g, *route;    // [tokens, H, width], [tokens, H], [tokens, H]; null where there is none
    const float *beta;               // [tokens, H] steps of the delta rule, or null
    const float *gate;               // [tokens, H] the soft gate's p (dynamic, no state carried in or out), or null
    const int32_t *death;            // [tokens, H] (dynamic)
    const int32_t *initial_death;    // [N, H, carried] (dynamic)
    const float *initial;            // [N, H, carried, dk, dv]; dynamic: the pool of matrices; or null
    const float *initial_keys;       // [N, H, carried, dk] sums of keys, or null
    const int32_t *matrix;           // [N, H, carried] which matrix of the pool, -1 for none (dynamic, as all below)
    const float *factor;             // [N, H, carried]
    const int64_t *rows;             // [N, H, carried] loose rows of each state
    const int32_t *places;           // [N, H, places_room] which rows of the pool
    const float *row_keys, *row_values, *row_coefficient;  // pools
    float *o;                        // [tokens, H, dv]
    float *final;                    // [N, H, states, dk, dv], zero (dynamic: anything), or null if nobody wants it
    float *final_keys;               // [N, H, states, dk], zero, or null
    int32_t *final_matrix;           // [N, H, states] 1 where a state has a matrix; zero
    float *final_factor;             // [N, H, states] zero
    int64_t *final_rows;             // [N, H, states] zero
    float *final_row_keys, *final_row_values, *final_row_coefficient;  // [N, H, final_room, ...]
};

// Gradients of the outputs with respect to everything. With fewer key heads than heads, those of queries and keys are
// sums over heads: each part of a key head's heads makes a sum of its own, and these are added up in their order.
struct BackwardArgs {
    int64_t parts;
    const AttendArgs *attend;  // whose o and final are not used
    const float *d_o;          // [tokens, H, dv]
    float *d_q, *d_k;          // [parts, tokens, Hk, dk]; the sums are in the first part then
    float *d_v, *d_lam;        // [tokens, H, ...]
    float *d_g, *d_beta;       // [tokens, H], or null
    float *d_route;            // [tokens, H] if there is a sharpness
    float *d_gate;             // [tokens, H] if there is a soft gate
};

struct DecideArgs {
    int64_t tokens, sequences, heads, key_heads, dk, dv;
    int64_t k_stride, v_stride;
    int64_t capacity;     // 0: never merge
    int64_t block;        // 0: boundaries by score
    int64_t state_score;  // the state with the token against without it, instead of the token against the state
    int64_t threads;
    int64_t carried;      // states a head that the arrays of the carried memory have room for
    double tau, tie, first_score;
    const int64_t *offset, *length, *origin;  // [N]
    const float *k, *v, *g, *beta;  // [tokens, Hk, dk], [tokens, H, dv], [tokens, H]; null where there is none
    const float *current;           // [N, H, dk, dv] the newest state carried in
    const int64_t *size0, *count0;  // [N, H], [N, H, carried]
    const double *info0;            // [N, H, carried]
    const int64_t *position0;       // [N]
    float *score;                   // [tokens, H]
    uint8_t *boundary;              // [tokens, H]
    int32_t *death;                 // [tokens, H] -1, or when the start at this token ended
    int32_t *initial_death;         // [N, H, carried]
};

// One token of every sequence: q, k [N, Hk, dk]; v [N, H, dv]; lam [N, H, width]; g, beta, route [N, H].
struct DecodeArgs {
    Memory memory;
    int64_t sequences, heads, key_heads, dk, dv, width, recency, threads;
    int64_t states;     // levels, or the capacity
    int64_t stored;     // of the dynamic memory: 4 for float32, 2 for bfloat16
    // the dynamic memory alone (see dla/ops/state/pools.py)
    int64_t block, state_score;
    int64_t given;      // whether score, boundary and merged are given
    int64_t longest_short, most_loose;
    int64_t pool_matrices, pool_rows, places_room;
    int64_t free_rows, free_matrices;  // how many of free_row and free_matrix are left; changed
    int64_t missing, longest;          // set: matrices that there was no place for; most rows that a head has
    int64_t wants;                     // set: what the next step cannot do without, of Wants
    double scale, tau, tie, first_score;
    const float *q, *k, *v, *lam, *g, *beta, *route;
    int64_t *length;        // [N] tokens before this one; changed
    void *matrices;         // [N, H, dk, dv], [N, H, states, dk, dv], or the pool
    int32_t *matrix;
    float *factor;
    int64_t *rows, *count;
    double *info;
    float *key_sums;
    int32_t *places;
    void *row_keys, *row_values;
    float *row_coefficient;
    double *norm;                     // [N, H] of the current state
    // transitions that the states have not been through yet, with beta alone (see pending.h)
    double *parts;                    // [N, H] squares of what the current state was made of, over that of its norm
    int32_t *pending;                 // [N, H] how many there are
    float *pending_keys;              // [N, H, PENDING, dk]
    float *pending_beta;              // [N, H, PENDING]
    float *pending_scratch;           // [N, H, PENDING + 1, dk]
    int32_t *free_row, *free_matrix;  // stacks of places in the pools that nobody uses
    const float *score;               // [N, H]
    const uint8_t *boundary;
    const int64_t *merged;
    float *o;                         // [N, H, dv]
    // scratch, [N, H]
    int32_t *new_row, *freed, *fold;
    int64_t *freed_rows;
};

// What the pools of a dynamic state lack, as the bits of a number: free rows, room for places, or that less is free.
enum Wants : int64_t { wants_rows = 1, wants_places = 2, wants_less = 4 };

static const int64_t PENDING = 16;  // most transitions that states may have before them; as in dla/ops/cpu/ground.py
static const int64_t SPARE = 4;  // rows a head that may be free however small the pools are

// Pools for a dynamic state to move to.
struct PoolArgs {
    int64_t pool_matrices, pool_rows;  // -1 where the state keeps its own
    void *matrices, *row_keys, *row_values;
    float *row_coefficient;
    int32_t *free_row, *free_matrix;
};

// The kernels of one instruction set. Heads are independent of each other, so that any number of threads gives the same
// bits. `attend` and `decide` begin with what heads of a key head share, if there is memory for it; a task is some of
// these heads, which take turns over a few chunks at a time, so that what they share stays in the cache.
struct Level {
    int64_t (*shared_floats)(const AttendArgs &);                                  // of one chunk and key head
    bool (*attend_share)(const AttendArgs &, int64_t chunk, int64_t key_head, float *shared);
    bool (*attend)(const AttendArgs &, int64_t sequence, int64_t head, int64_t heads, const float *shared);  // false: no memory
    bool (*backward)(const BackwardArgs &, int64_t sequence, int64_t head, int64_t heads, int64_t part, const float *shared);
    int64_t (*decide_floats)(const DecideArgs &);
    bool (*decide_share)(const DecideArgs &, int64_t chunk, int64_t key_head, float *shared);
    bool (*decide)(const DecideArgs &, int64_t sequence, int64_t head, int64_t heads, const float *shared);
    bool (*decode)(const DecodeArgs &, int64_t sequence, int64_t head);
    void (*decode_fold)(const DecodeArgs &, int64_t sequence, int64_t head, int32_t fresh);
    double (*decode_norm)(const DecodeArgs &, int64_t sequence, int64_t head);  // of the current state
    void (*decode_settle)(const DecodeArgs &, int64_t sequence, int64_t head);  // nothing is pending any more
};

static const int64_t CHUNK = 64;
static const int32_t ALIVE = INT32_MAX;

// What the scan is called with: a plain struct, mirrored in scan.py.
#pragma once
#include <stdint.h>

enum class Merge : int64_t { density, similarity, ward };  // in the order of MERGES in dla/ops/rules.py
enum class Score : int64_t { token, state };               // in the order of SCORES

struct ScanArgs {
    int64_t tokens, sequences, heads, key_heads, dk, dv;
    int64_t capacity;  // 0: never merge
    int64_t block;     // 0: boundaries by score
    Merge merge;
    Score score;
    int64_t decide;    // 0: score and boundary are given, and only what the soft gate needs is computed
    int64_t threads;
    int64_t carried;   // states a head that the arrays of the carried memory have room for, 0: none
    double tau;
    double tie, first_score;          // constants of dla/ops/rules.py
    const int64_t *offset, *length;   // [N] on the flat token axis
    const int64_t *origin;            // [N] the position of each sequence's first token in its call or pack
    const void *k, *v, *g, *beta;     // [T, Hk, dk], [T, H, dv], [T, H] or null, [T, H] or null
    const void *current;              // [N, H, dk, dv] the newest carried state
    const void *matrices;             // [N, H, carried, dk, dv] oldest first, for similarity and ward
    const int64_t *size0, *count0;    // [N, H], [N, H, carried]
    const double *info0;              // [N, H, carried]
    const int64_t *position0;         // [N]
    void *score_io;                   // [T, H]
    uint8_t *boundary_io;             // [T, H]
    int32_t *death;                   // [T, H] -1, or when the start at this token ended
    int32_t *initial_death;           // [N, H, carried]
    void *state_k, *state_v, *norm;   // [T, H, dv], [T, H, dk], [T, H] or null: S^T k, S v, |S| before each step,
                                      // k and v over their norms
};

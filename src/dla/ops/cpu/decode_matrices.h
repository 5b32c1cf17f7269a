// The third stage for the memories of matrices: one state, and Fenwick levels.
#pragma once
#include "attend.h"

namespace {

// S = decay S (+ k v^T); y += s q^T S: V vectors of columns
template <int V, bool writes>
INLINE void fade_columns(float *y, float s, const float *q, const float *k, const float *v, float *S, float decay,
                         int64_t dk, int64_t dv) {
    Vec value[V], total[V] = {};
#pragma GCC unroll 4
    for (int c = 0; writes && c < V; ++c) value[c] = load(v + c * LANES);
    for (int64_t d = 0; d < dk; ++d) {
        float *row = S + d * dv;
#pragma GCC unroll 4
        for (int c = 0; c < V; ++c) {
            Vec x = load(row + c * LANES) * decay;
            if (writes) x += value[c] * k[d];
            store(row + c * LANES, x);
            total[c] += x * q[d];
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < V; ++c) store(y + c * LANES, load(y + c * LANES) + total[c] * s);
}

// The same of all columns.
template <bool writes>
void fade_and_read(float *y, float s, const float *q, const float *k, const float *v, float *S, float decay, int64_t dk,
                   int64_t dv) {
    int64_t j = 0;
    for (; j + 4 * LANES <= dv; j += 4 * LANES) fade_columns<4, writes>(y + j, s, q, k, v + j, S + j, decay, dk, dv);
    for (; j + LANES <= dv; j += LANES) fade_columns<1, writes>(y + j, s, q, k, v + j, S + j, decay, dk, dv);
    for (; j < dv; ++j) {
        float total = 0;
        for (int64_t d = 0; d < dk; ++d) {
            float &x = S[d * dv + j];
            x = decay * x + (writes ? k[d] * v[j] : 0);
            total += q[d] * x;
        }
        y[j] += s * total;
    }
}

// The same with the delta rule: S = decay (S - beta k (k^T S)) (+ beta k v^T); `fit` is q . k
template <int V, bool writes>
INLINE void move_columns(float *y, float s, const float *q, const float *k, float fit, const float *v, float *S,
                         float decay, float beta, int64_t dk, int64_t dv) {
    Vec held[V] = {}, total[V] = {}, w[V];
    for (int64_t d = 0; d < dk; ++d)
#pragma GCC unroll 4
        for (int c = 0; c < V; ++c) {
            const Vec x = load(S + d * dv + c * LANES);
            held[c] += x * k[d], total[c] += x * q[d];
        }
#pragma GCC unroll 4
    for (int c = 0; c < V; ++c) {
        w[c] = ((writes ? load(v + c * LANES) : Vec{}) - held[c] * decay) * beta;
        store(y + c * LANES, load(y + c * LANES) + (total[c] * decay + w[c] * fit) * s);
    }
    for (int64_t d = 0; d < dk; ++d)
#pragma GCC unroll 4
        for (int c = 0; c < V; ++c) {
            float *x = S + d * dv + c * LANES;
            store(x, load(x) * decay + w[c] * k[d]);
        }
}

// The same of all columns: some at a time, so that they are in the cache when they are written.
template <bool writes>
void move_and_read(float *y, float s, const float *q, const float *k, const float *v, float *S, float decay, float beta,
                   int64_t dk, int64_t dv) {
    const float fit = dot(q, k, dk);
    int64_t j = 0;
    for (; j + 4 * LANES <= dv; j += 4 * LANES)
        move_columns<4, writes>(y + j, s, q, k, fit, v + j, S + j, decay, beta, dk, dv);
    for (; j + LANES <= dv; j += LANES)
        move_columns<1, writes>(y + j, s, q, k, fit, v + j, S + j, decay, beta, dk, dv);
    for (; j < dv; ++j) {
        float held = 0, total = 0;
        for (int64_t d = 0; d < dk; ++d) held += S[d * dv + j] * k[d], total += S[d * dv + j] * q[d];
        const float w = ((writes ? v[j] : 0) - held * decay) * beta;
        y[j] += s * (total * decay + w * fit);
        for (int64_t d = 0; d < dk; ++d) S[d * dv + j] = S[d * dv + j] * decay + w * k[d];
    }
}

void decode_single(const DecodeArgs &a, int64_t n, int64_t h) {
    const int64_t at = n * a.heads + h, dk = a.dk, dv = a.dv;
    const float *q = a.q + (n * a.key_heads + h * a.key_heads / a.heads) * dk, *k = a.k + (q - a.q), *v = a.v + at * dv;
    float *S = (float *)a.matrices + at * dk * dv, *o = a.o + at * dv;
    const float decay = a.g ? expf(a.g[at]) : 1;
    for (int64_t j = 0; j < dv; ++j) o[j] = 0;
    if (a.beta) move_and_read<true>(o, float(a.scale), q, k, v, S, decay, a.beta[at], dk, dv);
    else fade_and_read<true>(o, float(a.scale), q, k, v, S, decay, dk, dv);
}

// Levels [N, H, states, dk, dv]: bit i of the length says whether level i + 1 holds a block.
void decode_levels(const DecodeArgs &a, int64_t n, int64_t h) {
    const int64_t at = n * a.heads + h, dk = a.dk, dv = a.dv, size = dk * dv, length = a.length[n];
    const float *q = a.q + (n * a.key_heads + h * a.key_heads / a.heads) * dk, *k = a.k + (q - a.q), *v = a.v + at * dv;
    const float *lam = a.lam + at * a.width;
    const float decay = a.g ? expf(a.g[at]) : 1, beta = a.beta ? a.beta[at] : 1, scale = float(a.scale);
    float *levels = (float *)a.matrices + at * a.states * size, *o = a.o + at * dv;
    for (int64_t j = 0; j < dv; ++j) o[j] = 0;
    add_row(o, lam[0] * beta * dot(q, k, dk), v, dv);
    int64_t target = 0;  // the first level that is free: the token and all below become its block
    while (length >> target & 1) ++target;
    float *block = levels + target * size;
    for (int64_t d = 0; d < dk; ++d)
        for (int64_t j = 0; j < dv; ++j) block[d * dv + j] = beta * k[d] * v[j];
    for (int64_t level = 0; level < a.states; ++level) {
        if (!(length >> level & 1)) continue;
        float *S = levels + level * size;
        const int64_t column = level + 1 < a.width ? level + 1 : a.width - 1;
        float fades = decay;  // what S has not been through yet
        if (a.beta) move_and_read<false>(o, lam[column], q, k, v, S, decay, beta, dk, dv), fades = 1;
        else if (level > target && a.g) fade_and_read<false>(o, lam[column], q, k, v, S, decay, dk, dv);
        else read_matrix(o, lam[column] * decay, q, S, dk, dv, dv);
        if (level > target) continue;
        add_matrices(block, 1, S, fades, size);
        memset(S, 0, size * 4);
    }
    for (int64_t j = 0; j < dv; ++j) o[j] *= scale;
}

}  // namespace

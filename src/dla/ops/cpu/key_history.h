// Gradients of routed reads: every sum of keys that a state has had during a chunk, and what the reads say about it.
//
// A state's sum changes with every token that it gets and with every merge, so that a chunk of m tokens knows at most
// 2 m sums beside those at its start. Each of them is the sum over a run of tokens, and its gradient is the same for all
// of these: it is added at the run's first token and taken away behind its last, in an array whose running sums are the
// gradients of the keys (`d_sums` of the chunk). Tokens of states carried in are constants.
#pragma once
#include "chunk.h"
#include "rows.h"

namespace {

struct KeyHistory {
    struct Run {
        int64_t from, to;  // tokens, from the sequence's first; none for a state carried in
    };
    struct Sum {
        Run run;
        float length;  // its norm
        float turned;  // how much of its gradient goes against the sum itself
    };
    const int64_t dk, dkp, room;
    Sum *sums;            // [room + 2 CHUNK]
    float *keys, *d;      // [room + 2 CHUNK][dkp] the sums, and the rest of their gradients
    int64_t count = 0;
    Run *runs;            // [room] of each slot at the moment
    int32_t *of;          // [room] which sum that is
    int32_t *at;          // [CHUNK][room] and was at every time
    float *cos, *factor;  // [CHUNK][room] its cosine with the query, and what its weight was multiplied by
    float *d_query;       // [dkp] scratch
    bool learns = true;   // whether this walk computes gradients; if not, only the runs are followed

    KeyHistory(int64_t key_dim, int64_t states, Arena &arena) : dk(key_dim), dkp(padded(key_dim)), room(states) {
        const int64_t most = room + 2 * CHUNK;
        sums = (Sum *)arena.bytes(most * sizeof(Sum)), keys = arena.floats(most * dkp), d = arena.floats(most * dkp);
        runs = (Run *)arena.bytes(room * sizeof(Run)), of = (int32_t *)arena.bytes(room * 4);
        at = (int32_t *)arena.bytes(room * CHUNK * 4), d_query = arena.floats(dkp);
        cos = arena.floats(room * CHUNK), factor = arena.floats(room * CHUNK);
        if (runs) memset((void *)runs, 0, room * sizeof(Run));
    }

    // --- what happens to sums, in the walk over times

    void make(int64_t slot, const double *x, float length) {
        if (!learns) return;
        float *to = keys + count * dkp;
        for (int64_t i = 0; i < dkp; ++i) to[i] = i < dk ? float(x[i]) : 0;
        memset(d + count * dkp, 0, dkp * 4);
        sums[count] = {runs[slot], length, 0};
        of[slot] = int32_t(count++);
    }
    void merge(int64_t gone, int64_t alive, const double *x, float length) {
        runs[gone - 1].to = runs[gone].to;
        for (int64_t i = gone; i + 1 < alive; ++i) runs[i] = runs[i + 1], of[i] = of[i + 1];
        make(gone - 1, x, length);
    }
    void add(int64_t slot, bool opens, int64_t token, const double *x, float length) {
        if (opens) runs[slot].from = token;
        runs[slot].to = token + 1;
        make(slot, x, length);
    }
    void note(int64_t t, int64_t slot, float with_query, float times) {
        if (!learns) return;
        at[t * room + slot] = of[slot], cos[t * room + slot] = with_query, factor[t * room + slot] = times;
    }

    // --- gradients

    // From those of the weights at time t, `d_table`, those of lam, in their place, and of the sharpness, which is
    // returned; `lam` is by slot. Those of the query go to d_q.
    float learn(int64_t t, int64_t alive, const float *lam, float *d_table, float sharpness, const float *q, float norm_q,
                float *d_q) {
        float d_sharpness = 0, turned = 0;
        memset(d_query, 0, dkp * 4);
        for (int64_t i = 0; i < alive; ++i) {
            const float c = cos[t * room + i], times = factor[t * room + i], d_exponent = d_table[i] * lam[i] * times;
            d_table[i] *= times, d_sharpness += d_exponent * (c - 1);
            const float d_cos = d_exponent * sharpness;
            const int64_t which = at[t * room + i];
            Sum &sum = sums[which];
            const float by = d_cos / (fmaxf(norm_q, NONE) * fmaxf(sum.length, NONE));
            const float *key = keys + which * dkp;
            float *to = d + which * dkp;
            for (int64_t x = 0; x < dkp; x += LANES) {
                store(d_query + x, load(d_query + x) + load(key + x) * by);
                store(to + x, load(to + x) + load(q + x) * by);
            }
            if (sum.length >= NONE) sum.turned += d_cos * c;  // a shorter one is divided by a constant
            if (norm_q >= NONE) turned += d_cos * c;
        }
        add_row(d_q, 1, d_query, dk);
        if (norm_q >= NONE) add_row(d_q, -turned / (norm_q * norm_q), q, dk);
        return d_sharpness;
    }

    // All reads of the chunk are done: the gradients of the sums, to the tokens that they are sums of.
    void spread(double *d_sums) {
        for (int64_t i = 0; i < count; ++i) {
            const Sum &sum = sums[i];
            if (sum.run.from == sum.run.to) continue;
            const double against = sum.length < NONE ? 0 : double(sum.turned) / (double(sum.length) * sum.length);
            double *from = d_sums + sum.run.from * dk, *to = d_sums + sum.run.to * dk;
            for (int64_t x = 0; x < dk; ++x) {
                const double one = d[i * dkp + x] - against * keys[i * dkp + x];
                from[x] += one, to[x] -= one;
            }
        }
        count = 0;
    }
};

}  // namespace

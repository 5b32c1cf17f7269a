// The soft gate inside a chunk of one head.
//
// Token s counts with 1 - p_s in the state that was current before it, which is that of token s - 1, and with p_s in the
// state that the next boundary, at s or later, opens. Until then this part is pending, and counts like the current state,
// which is that of the token that reads. So with W[s][t] the weight of token s's state, as the hard gate has it, at time
// t, and next(s) that boundary, the weight of token s is
//     (1 - p_s) W[s - 1][t] + p_s W[min(next(s), t)][t].
// What is pending at the chunk's start is one more span behind the newest state, with the weight W[min(next(0), t)][t].
#pragma once
#include "chunk.h"

namespace {

struct Gate {
    const AttendArgs &args;
    const int64_t h;
    float *before;             // [CHUNK + 1][CHUNK] W[s - 1]: the first row is the newest state's at the chunk's start
    float *d_before;           // the same of its gradients, if they are wanted
    float p[CHUNK], rest[CHUNK];  // rest = 1 - p
    float now[CHUNK];          // W[t][t]
    int64_t next[CHUNK];       // m: none in this chunk
    // Both parts of every token: where they go at the chunk's end, what they count for there, and how they change with
    // the gate: what is read of a part, times this, is what it says about p_s, times p_s (1 - p_s).
    int32_t place[2][CHUNK];
    float coefficient[2][CHUNK], sway[2][CHUNK];
    int64_t since[2], to[2];     // the tokens whose parts go to the slot at hand

    Gate(const AttendArgs &a, int64_t head, bool learns, Arena &arena) : args(a), h(head) {
        before = arena.floats((CHUNK + 1) * CHUNK), d_before = learns ? arena.floats((CHUNK + 1) * CHUNK) : nullptr;
    }

    float *hard() const { return before + CHUNK; }    // W
    float *d_hard() const { return d_before + CHUNK; }  // and its gradients

    // The gate of a chunk's tokens; whether all of it is finite. A sequence's first token has no state before it.
    bool begin(const Chunk &c, bool first) {
        float sum = 0;
        for (int64_t t = c.m; t-- > 0;) {
            const int64_t at = (c.first + t) * args.heads + h;
            p[t] = first && !t ? 1 : args.gate[at], rest[t] = 1 - p[t], sum += p[t] * 0;
            next[t] = args.death[at] >= 0 ? t : t + 1 < c.m ? next[t + 1] : c.m;
            sway[0][t] = -p[t], sway[1][t] = rest[t];
        }
        return sum == 0;
    }

    // Weights of tokens and of what is pending, from those of the hard gate; `newest` is the newest state's, or null.
    void soften(int64_t m, const float *newest, float *own, float *pending) {
        if (newest) memcpy(before, newest, CHUNK * 4);
        else memset(before, 0, CHUNK * 4);
        for (int64_t t = 0; t < m; ++t) now[t] = hard()[t * CHUNK + t];
        for (int64_t s = 0; s < m; ++s)
            for (int64_t t = s / LANES * LANES; t < m; t += LANES)
                store(own + s * CHUNK + t, load(before + s * CHUNK + t) * rest[s] + later(s, t) * p[s]);
        for (int64_t t = 0; t < m; t += LANES) store(pending + t, later(0, t));
    }

    // W[min(next(s), t)][t] from time t on
    Vec later(int64_t s, int64_t t) const {
        if (next[s] >= t + LANES) return load(now + t);
        const Vec opened = load(hard() + next[s] * CHUNK + t);
        return choose(from(next[s], t), opened, load(now + t));
    }
    Ints from(int64_t s, int64_t t) const {  // which of the times from t on are s or later
        Ints lane;
        for (int i = 0; i < LANES; ++i) lane[i] = i;
        return lane + int32_t(t) >= int32_t(s);
    }
    static Vec choose(Ints where, Vec a, Vec b) { return (Vec)((where & (Ints)a) | (~where & (Ints)b)); }

    // From gradients of the weights of tokens (own) and of what is pending those of the hard gate's; those of the newest
    // state are added to. d_gate [m] += what they say about p, times p (1 - p).
    void harden(int64_t m, const float *d_own, const float *d_pending, float *d_newest, double *d_gate) {
        memset(d_before, 0, (CHUNK + 1) * CHUNK * 4);
        float d_now[CHUNK] = {};
        for (int64_t s = 0; s < m; ++s) {
            Vec d_p{};
            for (int64_t t = s / LANES * LANES; t < m; t += LANES) {
                const Ints seen = from(s, t) & ~from(m, t);
                const Vec d = (Vec)(seen & (Ints)load(d_own + s * CHUNK + t));
                float *last = d_before + s * CHUNK + t;
                store(last, load(last) + d * rest[s]);
                postpone(s, t, d * p[s], d_now);
                d_p += (Vec)(seen & (Ints)(d * (later(s, t) - load(before + s * CHUNK + t))));
            }
            d_gate[s] += double(p[s]) * rest[s] * sum(d_p);
        }
        for (int64_t t = 0; t < m; t += LANES) postpone(0, t, (Vec)(~from(m, t) & (Ints)load(d_pending + t)), d_now);
        for (int64_t t = 0; t < m; ++t) d_hard()[t * CHUNK + t] += d_now[t];
        for (int64_t t = 0; d_newest && t < m; ++t) d_newest[t] += d_before[t];
    }

    // The gradient of later(s, t).
    void postpone(int64_t s, int64_t t, Vec d, float *d_now) const {
        const Ints opened = from(next[s], t);
        store(d_now + t, load(d_now + t) + (Vec)(~opened & (Ints)d));
        if (next[s] >= t + LANES) return;
        float *at = d_hard() + next[s] * CHUNK + t;
        store(at, load(at) + (Vec)(opened & (Ints)d));
    }

    // Where the parts go at the chunk's end, given the slots of its tokens, what these count for, and the slot of the state
    // that was the newest at its start; slot number `after` is what is pending then. Returns the slot of what was pending
    // at the chunk's start.
    int32_t settle(int64_t m, const int32_t *slot_own, const float *tail, int32_t newest, int64_t after) {
        for (int64_t s = 0; s < m; ++s) {
            place[0][s] = s ? slot_own[s - 1] : newest;
            place[1][s] = next[s] < m ? slot_own[next[s]] : int32_t(after);
            coefficient[0][s] = tail[s] * rest[s], coefficient[1][s] = tail[s] * p[s];
        }
        to[0] = to[1] = 0;
        return place[1][0];
    }

    // The tokens whose parts go to a slot, of slots in their order; how many parts that are not zero there are.
    int64_t take(int64_t slot, int64_t m) {
        int64_t there = 0;
        for (int part = 0; part < 2; ++part)
            for (since[part] = to[part]; to[part] < m && place[part][to[part]] == slot; ++to[part])
                there += share(part, to[part]) != 0;
        return there;
    }
    float share(int part, int64_t s) const { return part ? p[s] : rest[s]; }
};

}  // namespace

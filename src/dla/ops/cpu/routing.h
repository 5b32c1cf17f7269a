// Routed reads of one head: the sums of the states' keys, and how well a query fits them.
//
// States are told apart by their slots, oldest first, as the memory (spans.h) has them: those held at the chunk's start,
// and those that live at a time inside of it.
#pragma once
#include "chunk.h"
#include "key_history.h"

namespace {

struct KeySum {
    double *keys;  // [dk] in double, since what is left after keys have cancelled decides as much as any other sum
    float length;  // its norm
    float mass;    // the norms of what it was summed up from in this chunk
};

struct Routing {
    Arena &arena;
    const int64_t dk, room;
    KeySum *held, *live;  // [room] at the chunk's start; at a time of it
    int64_t count = 0;    // of those held
    double **spare;       // sums of keys that are free
    int64_t spares = 0;
    float *fit, *sums;    // [room][CHUNK] queries with the sums of keys held; [room][dk] these, in float
    float *along;         // [room] products of a query with the sums that live
    float norm_q[CHUNK], norm_k[CHUNK];
    KeyHistory *history = nullptr;  // if gradients are wanted

    Routing(const AttendArgs &a, int64_t states, bool learns, Arena &pieces) : arena(pieces), dk(a.dk), room(states) {
        held = (KeySum *)arena.bytes(room * sizeof(KeySum)), live = (KeySum *)arena.bytes(room * sizeof(KeySum));
        spare = (double **)arena.bytes(2 * room * sizeof(double *));
        fit = arena.floats(room * CHUNK), sums = arena.floats(room * dk), along = arena.floats(room);
        if (!learns) return;
        void *at = arena.bytes(sizeof(KeyHistory));
        if (at) history = new (Here{at}) KeyHistory(dk, room, arena);
    }

    double *take() { return spares ? spare[--spares] : (double *)arena.bytes(padded(dk) * 8); }

    // One more state, carried in.
    void carry(const float *sum) {
        KeySum &s = held[count++];
        s = {take(), 0, 0};
        if (!s.keys) return;
        for (int64_t d = 0; d < padded(dk); ++d) s.keys[d] = d < dk ? sum[d] : 0;
        s.length = length_of(s.keys);
    }

    float length_of(const double *x) const {
        Wide total{};
        for (int64_t d = 0; d < dk; d += LANES / 2) total += *(LooseWide *)(x + d) * *(LooseWide *)(x + d);
        double square = 0;
        for (int i = 0; i < LANES / 2; ++i) square += total[i];
        return float(sqrt(square));
    }

    // Queries with the sums of keys as they are at the chunk's start, and norms.
    void begin(const Chunk &c) {
        for (int64_t i = 0; i < count; ++i) {
            for (int64_t d = 0; d < dk; ++d) sums[i * dk + d] = float(held[i].keys[d]);
            held[i].mass = held[i].length;
            live[i] = held[i];
            if (history) history->make(i, held[i].keys, held[i].length);
        }
        product<Into::set>(count, CHUNK, dk, sums, dk, 1, c.shared.Q, CHUNK, fit, CHUNK);
        for (int64_t t = 0; t < CHUNK; t += LANES) {
            Vec q{};
            for (int64_t d = 0; d < dk; ++d) q += load(c.shared.Q + d * CHUNK + t) * load(c.shared.Q + d * CHUNK + t);
            store(norm_q + t, q);
        }
        for (int64_t t = 0; t < c.m; ++t) {
            float square = 0;
            for (int64_t d = 0; d < dk; ++d) square += c.k(t)[d] * c.k(t)[d];
            norm_k[t] = sqrtf(square), norm_q[t] = sqrtf(norm_q[t]);
        }
    }

    void open(int64_t slot) {
        live[slot] = {take(), 0, 0};
        if (live[slot].keys) memset(live[slot].keys, 0, padded(dk) * 8);
    }

    // The state in slot `gone` joins the one before it.
    void merge(int64_t gone, int64_t alive) {
        KeySum &kept = live[gone - 1];
        if (!kept.keys || !live[gone].keys) return;  // no memory left
        for (int64_t d = 0; d < dk; ++d) kept.keys[d] += live[gone].keys[d];
        kept.length = length_of(kept.keys), kept.mass += live[gone].mass;
        spare[spares++] = live[gone].keys;
        for (int64_t i = gone; i + 1 < alive; ++i) live[i] = live[i + 1];
        if (history) history->merge(gone, alive, kept.keys, kept.length);
    }

    // The state in a slot gets the chunk's token t.
    void add(const Chunk &c, int64_t slot, int64_t t, bool opens) {
        KeySum &s = live[slot];
        if (!s.keys) return;  // no memory left
        for (int64_t d = 0; d < dk; ++d) s.keys[d] += c.k(t)[d];
        s.length = length_of(s.keys), s.mass += norm_k[t];
        if (history) history->add(slot, opens, c.token[t], s.keys, s.length);
    }

    // table *= exp(sharpness * (cos of query and sum of keys - 1)), of every state that lives at time t. The states held
    // and the chunk's own tokens are in these slots.
    void weigh(const Chunk &c, int64_t t, float sharpness, int64_t alive, const int32_t *slot, const int32_t *slot_own,
               float *table) {
        float *dot = along;
        for (int64_t i = 0; i < alive; ++i) dot[i] = 0;
        for (int64_t i = 0; i < count; ++i) dot[slot[i]] += fit[i * CHUNK + t];
        for (int64_t s = 0; s <= t; ++s) dot[slot_own[s]] += c.shared.S[s * CHUNK + t];
        for (int64_t i = 0; i < alive; ++i) {
            if (live[i].length < 0.1f * live[i].mass) dot[i] = meet(live[i].keys, c.shared.Q + t);
            const float cos = dot[i] / (fmaxf(norm_q[t], NONE) * fmaxf(live[i].length, NONE));
            const float factor = expf(sharpness * (cos - 1));
            if (history) history->note(t, i, cos, factor);
            table[i] *= factor;
        }
    }

    // A query with a sum of keys that have cancelled: the sum of their products would have lost its digits.
    float meet(const double *sum_of_keys, const float *q) const {
        double total = 0;
        for (int64_t d = 0; d < dk; ++d) total += sum_of_keys[d] * q[d * CHUNK];
        return float(total);
    }

    // All that a chunk changes, piece by piece: visit(where it is, bytes).
    template <class Visit> void remember(Visit &visit) {
        visit(&held, sizeof held), visit(&live, sizeof live), visit(&count, sizeof count), visit(&spares, sizeof spares);
        visit(held, count * sizeof(KeySum)), visit(spare, spares * sizeof(double *));
        for (int64_t i = 0; i < count; ++i) visit(held[i].keys, padded(dk) * 8);
        if (history) visit(history->runs, room * sizeof(KeyHistory::Run));
    }

    // The chunk is over: what lives is what is held.
    void settle(int64_t after) {
        KeySum *swap = held;
        held = live, live = swap, count = after;
    }
};

}  // namespace

// The second stage for one head of the dynamic memory, from the lifetimes of its starts.
//
// A state is a span of tokens: factor * matrix, for the tokens that have been folded, plus loose rows, tokens whose keys
// and values are kept as they came, each with its decay. Short states have no matrix at all. Inside a chunk nothing is
// merged: the states at its beginning and its own tokens are read one by one, each with the weight of the slot that it
// has at that time, and what belongs together at the chunk's end is put together there.
#pragma once
#include "chunk.h"

namespace {

constexpr int32_t NOBODY = INT32_MIN;
constexpr float FADED = 1.2e-38f;  // the smallest float of full precision: what has decayed below it counts as zero

struct Span {
    float *matrix;  // null: rows alone
    float factor;
    int32_t start;  // where it begins, from the sequence's first token; those carried in are below zero
    int64_t rows;   // loose ones; all states' rows stand in the order of their tokens
    double *keys;   // [dk] the sum of its keys, for routed reads: in double, since what is left after keys have cancelled
    float length;   // decides as much as any other sum; its norm
    float mass;     // the norms of what it was summed up from in this chunk
};

template <class C> struct SpanHead {
    const AttendArgs &args;
    Arena &arena;
    const int64_t n, h, dk, dkp, dvp, room;
    const bool routed;
    Span *spans;         // [room + 1] the states, oldest first
    int64_t count = 0;
    float *keys, *values, *coefficient;  // [most][dkp], [most][dvp], [most] loose rows
    int32_t *token;                      // [most] which tokens they are, from the sequence's first; below zero: carried in
    int64_t rows = 0, most;
    float **spare;                // matrices that are free
    double **spare_keys;          // and sums of keys
    int64_t spares = 0, spare_sums = 0;
    int32_t *ends;                // [length] the start whose end each step's merge is
    bool sound = true;            // all numbers so far were finite
    // of one chunk
    int32_t *slot, *slot_own;     // [room] of states, [CHUNK] of tokens
    float *weight, *weight_own;   // [room][CHUNK], [CHUNK][CHUNK]
    float *table;                 // [room] weights by slot, at one time
    float *fit, *sums;            // [room][CHUNK] queries with the sums of keys; [room][dk] these, in float
    float norm_q[CHUNK], norm_k[CHUNK];
    int32_t *slots, *slots_own;   // [room][CHUNK], [CHUNK][CHUNK] slots at every time, if gradients are wanted
    int32_t alive_at[CHUNK];
    float *d_table;               // [room]
    Scratch along;                // [states] products of a query with the sums of keys
    int64_t *many;                // [room] loose rows of each state
    Span *live;                   // [room + 1] states as they come to be during the chunk (keys and square alone)

    SpanHead(const AttendArgs &a, int64_t sequence, int64_t head, C &c, Arena &pieces)
        : args(a), arena(pieces), n(sequence), h(head), dk(a.dk), dkp(padded(a.dk)), dvp(c.dvp), room(a.states + 1), routed(a.route) {
        int64_t before = 0;
        for (int64_t i = 0; i < a.carried; ++i) before += a.rows[(n * a.heads + h) * a.carried + i];
        const int64_t tokens = a.length[n], short_ones = room * a.longest_short;
        most = (short_ones < tokens ? short_ones : tokens) + before + CHUNK;
        spans = (Span *)arena.bytes(room * sizeof(Span)), live = (Span *)arena.bytes(room * sizeof(Span));
        keys = arena.floats(most * dkp), values = arena.floats(most * dvp), coefficient = arena.floats(most);
        token = (int32_t *)arena.bytes(most * 4);
        spare = (float **)arena.bytes(2 * room * sizeof(float *));
        spare_keys = (double **)arena.bytes(2 * room * sizeof(double *));
        ends = (int32_t *)arena.bytes(a.length[n] * 4);
        slot = (int32_t *)arena.bytes(room * 4), slot_own = (int32_t *)arena.bytes(CHUNK * 4);
        many = (int64_t *)arena.bytes(room * 8);
        if (C::backward) {
            slots = (int32_t *)arena.bytes(room * CHUNK * 4), slots_own = (int32_t *)arena.bytes(CHUNK * CHUNK * 4);
            d_table = arena.floats(room);
        }
        weight = arena.floats(room * CHUNK), weight_own = arena.floats(CHUNK * CHUNK), table = arena.floats(room);
        fit = routed ? arena.floats(room * CHUNK) : nullptr, sums = routed ? arena.floats(room * dk) : nullptr;
        if (arena.failed) return;
        carry_in(c);
        find_ends();
    }

    float *take_matrix(C &c) { return spares ? spare[--spares] : c.new_matrix(arena); }
    void give_matrix(float *x) { spare[spares++] = x; }
    double *take_keys() { return spare_sums ? spare_keys[--spare_sums] : (double *)arena.bytes(padded(dk) * 8); }

    void carry_in(C &c) {
        const int64_t at = (n * args.heads + h) * args.carried;
        const int32_t *place = args.places + (n * args.heads + h) * args.places_room;
        for (int64_t i = 0; i < args.carried; ++i) {
            if (args.initial_death[at + i] < 0) continue;
            Span &s = spans[count++];
            s = {nullptr, args.factor[at + i], int32_t(i - args.carried), args.rows[at + i], nullptr, 0, 0};
            if (args.matrix[at + i] >= 0) {
                s.matrix = take_matrix(c);
                if (arena.failed) return;
                c.load_matrix(s.matrix, args.initial + args.matrix[at + i] * dk * args.dv);
            }
            for (int64_t r = 0; r < s.rows; ++r) take_row(*place++);
            if (routed) carry_keys(s, args.initial_keys + (at + i) * dk);
            if (arena.failed) return;
            // a state carried in may hold anything, and zero times anything is not always zero
            sound = sound && (!s.matrix || finite_rows(s.matrix, dvp, dk, dvp));
        }
        sound = sound && finite_rows(keys, dkp, rows, dk) && finite_rows(values, dvp, rows, dvp);
    }

    void take_row(int64_t from) {
        memset(keys + rows * dkp, 0, dkp * 4);
        memcpy(keys + rows * dkp, args.row_keys + from * dk, dk * 4);
        memset(values + rows * dvp, 0, dvp * 4);
        memcpy(values + rows * dvp, args.row_values + from * args.dv, args.dv * 4);
        token[rows] = int32_t(-1 - rows);
        coefficient[rows++] = args.row_coefficient[from];
    }

    void carry_keys(Span &s, const float *sum) {
        s.keys = take_keys();
        if (!s.keys) return;
        for (int64_t d = 0; d < padded(dk); ++d) s.keys[d] = d < dk ? sum[d] : 0;
        s.length = length_of(s.keys);
    }

    void find_ends() {
        const int64_t length = args.length[n], at = (n * args.heads + h) * args.carried;
        for (int64_t t = 0; t < length; ++t) ends[t] = NOBODY;
        for (int64_t i = 0; i < args.carried; ++i) note(args.initial_death[at + i], int32_t(i - args.carried));
        for (int64_t t = 0; t < length; ++t) note(args.death[(args.offset[n] + t) * args.heads + h], int32_t(t));
    }
    void note(int32_t death, int32_t start) {
        if (death < 0 || death == ALIVE) return;
        const int64_t step = death - args.origin[n];
        if (step >= 0 && step < args.length[n]) ends[step] = start;
    }

    float length_of(const double *x) const {
        Wide total{};
        for (int64_t d = 0; d < dk; d += LANES / 2) total += *(LooseWide *)(x + d) * *(LooseWide *)(x + d);
        double square = 0;
        for (int i = 0; i < LANES / 2; ++i) square += total[i];
        return float(sqrt(square));
    }

    void chunk(C &c, int64_t begin) {
        sound = sound && c.finite;
        if (routed) meet_keys(c);
        const int64_t after = weigh(c, begin);
        c.own(weight_own);
        for (int64_t i = 0; i < count; ++i)
            for (int64_t t = 0; t < c.m; t += LANES)
                store(weight + i * CHUNK + t, load(weight + i * CHUNK + t) * load(c.E + t));
        read(c);
        if constexpr (C::backward)
            if (c.learns) learn(c);
        c.spread();
        settle(c, begin, after);
    }

    // Queries with the sums of keys as they are at the chunk's start, and norms.
    void meet_keys(C &c) {
        for (int64_t i = 0; i < count; ++i) {
            for (int64_t d = 0; d < dk; ++d) sums[i * dk + d] = float(spans[i].keys[d]);
            spans[i].mass = spans[i].length;
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
            norm_k[t] = sqrtf(square), norm_q[t] = fmaxf(sqrtf(norm_q[t]), NONE);
        }
    }

    // The weight of every state and token at every time of the chunk; returns how many states there are at its end.
    int64_t weigh(C &c, int64_t begin) {
        int64_t alive = count;
        for (int64_t i = 0; i < count; ++i) slot[i] = int32_t(i), live[i] = spans[i];
        for (int64_t t = 0; t < c.m; ++t) {
            const int64_t at = (c.first + t) * args.heads + h;
            if (ends[begin + t] != NOBODY) alive = merge_slots(ends[begin + t], begin, t, alive);
            const bool opens = args.death[at] >= 0;
            if (opens || !alive) alive = open_slot(alive);
            slot_own[t] = int32_t(alive - 1);
            if (routed) add_key(live[alive - 1], c.k(t), norm_k[t], opens);
            fill_table(c, t, at, alive);
            for (int64_t i = 0; i < count; ++i) weight[i * CHUNK + t] = table[slot[i]];
            for (int64_t s = 0; s <= t; ++s) weight_own[s * CHUNK + t] = table[slot_own[s]];
            if constexpr (C::backward) remember_slots(t, alive);
        }
        return alive;
    }

    void remember_slots(int64_t t, int64_t alive) {
        alive_at[t] = int32_t(alive);
        for (int64_t i = 0; i < count; ++i) slots[i * CHUNK + t] = slot[i];
        for (int64_t s = 0; s <= t; ++s) slots_own[s * CHUNK + t] = slot_own[s];
    }

    // Gradients of lam: what all tokens and states of a slot say about its weight.
    void learn(C &c) {
        for (int64_t t = 0; t < c.m; ++t) {
            const int64_t alive = alive_at[t];
            for (int64_t i = 0; i < alive; ++i) d_table[i] = 0;
            for (int64_t i = 0; i < count; ++i) d_table[slots[i * CHUNK + t]] += c.d_weight[i * CHUNK + t];
            for (int64_t i = 0; i < alive; ++i) d_table[i] *= c.E[t];
            for (int64_t s = 0; s <= t; ++s) d_table[slots_own[s * CHUNK + t]] += c.d_own[s * CHUNK + t];
            float *d = c.d_lam(t);
            for (int64_t i = 0; i < alive; ++i) d[column(i, alive)] += d_table[i];
        }
    }

    int64_t column(int64_t state, int64_t alive) const {
        const int64_t slot_number = args.recency ? alive - 1 - state : state;
        return slot_number < args.width ? slot_number : args.width - 1;
    }

    int64_t open_slot(int64_t alive) {
        live[alive] = {nullptr, 0, 0, 0, routed ? take_keys() : nullptr, 0, 0};
        return alive + 1;
    }

    void add_key(Span &s, const float *k, float norm, bool opens) {
        if (!s.keys) return;  // no memory left
        if (opens) memset(s.keys, 0, padded(dk) * 8);
        for (int64_t d = 0; d < dk; ++d) s.keys[d] += k[d];
        s.length = length_of(s.keys), s.mass += norm;
    }

    // The state that begins at `start` joins the one before it.
    int64_t merge_slots(int32_t start, int64_t begin, int64_t t, int64_t alive) {
        int32_t gone;
        if (start >= begin) {
            gone = slot_own[start - begin];
        } else {
            int64_t i = 0;
            while (i < count && spans[i].start < start) ++i;
            if (i == count || spans[i].start != start) return alive;
            gone = slot[i];
        }
        if (gone < 1) return alive;
        for (int64_t i = 0; i < count; ++i) slot[i] -= slot[i] >= gone;
        for (int64_t s = 0; s < t; ++s) slot_own[s] -= slot_own[s] >= gone;
        if (routed && live[gone].keys) {
            Span &kept = live[gone - 1];
            for (int64_t d = 0; d < dk; ++d) kept.keys[d] += live[gone].keys[d];
            kept.length = length_of(kept.keys), kept.mass += live[gone].mass;
            spare_keys[spare_sums++] = live[gone].keys;
        }
        for (int64_t i = gone; i + 1 < alive; ++i) live[i] = live[i + 1];
        return alive - 1;
    }

    void fill_table(C &c, int64_t t, int64_t at, int64_t alive) {
        const float *lam = args.lam + at * args.width;
        for (int64_t i = 0; i < alive; ++i) table[i] = lam[column(i, alive)];
        if (routed) route(c, t, args.route[at], alive);
    }

    // table *= exp(sharpness * (cos of query and sum of keys - 1))
    void route(C &c, int64_t t, float sharpness, int64_t alive) {
        if (!along.fit(alive, arena)) return;
        float *dot = along.floats;
        for (int64_t i = 0; i < alive; ++i) dot[i] = 0;
        for (int64_t i = 0; i < count; ++i) dot[slot[i]] += fit[i * CHUNK + t];
        for (int64_t s = 0; s <= t; ++s) dot[slot_own[s]] += c.shared.S[s * CHUNK + t];
        for (int64_t i = 0; i < alive; ++i) {
            if (live[i].length < 0.1f * live[i].mass) dot[i] = meet(live[i].keys, c.shared.Q + t);
            const float cos = dot[i] / (norm_q[t] * fmaxf(live[i].length, NONE));
            table[i] *= expf(sharpness * (cos - 1));
        }
    }

    // A query with a sum of keys that have cancelled: the sum of their products would have lost its digits.
    float meet(const double *sum_of_keys, const float *q) const {
        double total = 0;
        for (int64_t d = 0; d < dk; ++d) total += sum_of_keys[d] * q[d * CHUNK];
        return float(total);
    }

    void read(C &c) {
        for (int64_t i = 0; i < count; ++i) many[i] = spans[i].rows;
        c.read_rows(loose(0), many, count, weight, arena);
        for (int64_t i = 0; i < count; ++i)
            if (spans[i].matrix) c.read(spans[i].matrix, weight + i * CHUNK, spans[i].factor, i);
    }

    Rows loose(int64_t row) const { return {keys + row * dkp, dkp, values + row * dvp, coefficient + row, token + row}; }

    // Put together what has become one state, at the chunk's end.
    void settle(C &c, int64_t begin, int64_t after) {
        const float fade = c.E[c.m - 1];
        for (int64_t r = 0; r < rows; ++r) coefficient[r] *= fade;
        c.move_rows(keys, rows, token, arena);
        for (int64_t j = 0; j < after; ++j) {
            Span &made = live[j];
            made.matrix = nullptr, made.factor = 0, made.rows = 0, made.start = NOBODY;
        }
        for (int64_t i = 0; i < count; ++i) join(c, live[slot[i]], spans[i], fade);
        int64_t s = 0, row = 0, kept = 0;
        for (int64_t j = 0; j < after; ++j) {
            Span &made = live[j];
            const int64_t own = s;
            while (s < c.m && slot_own[s] == j) ++s;
            if (made.start == NOBODY) made.start = int32_t(begin + own);
            const int64_t loose = made.rows + s - own, first = row;
            row += made.rows;
            if (made.matrix ? loose >= args.most_loose : loose > args.longest_short) {
                fold(c, made, first, own, s - own);
            } else {
                kept = keep_rows(first, made.rows, kept);
                if (s > own) kept = keep_own(c, own, s - own, kept);
                made.rows = loose;
            }
            if (arena.failed) return;
        }
        rows = kept;
        count = after;
        Span *swap = spans;
        spans = live, live = swap;
    }

    void join(C &c, Span &made, const Span &old, float fade) {
        if (made.start == NOBODY) made.start = old.start;
        made.rows += old.rows;
        if (!old.matrix) return;
        const float factor = old.factor * fade;
        if (factor < FADED && sound) {
            c.drop(old.matrix);  // it has faded to nothing
            give_matrix(old.matrix);
        } else if (!made.matrix) {
            made.matrix = old.matrix, made.factor = factor;
        } else {
            c.combine(made.matrix, made.factor, old.matrix, factor);
            made.factor = 1;
            give_matrix(old.matrix);
        }
    }

    void fold(C &c, Span &made, int64_t row, int64_t own, int64_t owned) {
        bool fresh = !made.matrix;
        if (fresh) made.matrix = take_matrix(c);
        if (!made.matrix) return;
        if (made.rows) {
            c.fold(made.matrix, made.factor, fresh, made.rows, loose(row));
            fresh = false, made.factor = 1;
        }
        if (owned) c.fold(made.matrix, made.factor, fresh, owned, c.own_rows(own));
        made.factor = 1, made.rows = 0;
    }

    // Rows that stay loose move up to place `to`; where the next may go.
    int64_t keep_rows(int64_t from, int64_t many, int64_t to) {
        if (from != to) {
            memmove(keys + to * dkp, keys + from * dkp, many * dkp * 4);
            memmove(values + to * dvp, values + from * dvp, many * dvp * 4);
            memmove(coefficient + to, coefficient + from, many * 4), memmove(token + to, token + from, many * 4);
        }
        return to + many;
    }
    int64_t keep_own(C &c, int64_t s, int64_t many, int64_t to) {
        const Rows own = c.own_rows(s);
        for (int64_t i = 0; i < many; ++i) {
            memcpy(keys + (to + i) * dkp, own.keys + i * own.stride, dk * 4);
            memset(keys + (to + i) * dkp + dk, 0, (dkp - dk) * 4);
        }
        memcpy(token + to, c.token + s, many * 4);
        memcpy(values + to * dvp, c.V + s * dvp, many * dvp * 4);
        memcpy(coefficient + to, c.tail + s, many * 4);
        return to + many;
    }

    // All that a chunk changes, without routed reads, piece by piece: visit(where it is, bytes).
    template <class Visit> void remember(C &, Visit &visit) {
        visit(&count, sizeof count), visit(&rows, sizeof rows), visit(&spares, sizeof spares);
        visit(&sound, sizeof sound), visit(&spans, sizeof spans), visit(&live, sizeof live);
        visit(spans, count * sizeof(Span)), visit(spare, spares * sizeof(float *));
        visit(keys, rows * dkp * 4), visit(values, rows * dvp * 4);
        visit(coefficient, rows * 4), visit(token, rows * 4);
        for (int64_t i = 0; i < count; ++i)
            if (spans[i].matrix) visit(spans[i].matrix, dk * dvp * 4);
    }

    void finish(C &c) {
        if (!args.final) return;
        const int64_t at = (n * args.heads + h) * args.states, head = (n * args.heads + h) * args.final_room;
        for (int64_t j = 0; j < count; ++j) {
            const Span &s = spans[j];
            args.final_matrix[at + j] = s.matrix != nullptr;
            args.final_rows[at + j] = s.rows;
            if (s.matrix) c.save_matrix(s.matrix, args.final + (at + j) * dk * args.dv);
            if (s.matrix) args.final_factor[at + j] = s.factor;
            for (int64_t d = 0; args.final_keys && d < dk; ++d)
                args.final_keys[(at + j) * dk + d] = float(s.keys[d]);
        }
        if (rows) memcpy(args.final_row_coefficient + head, coefficient, rows * 4);
        for (int64_t r = 0; r < rows; ++r) {
            memcpy(args.final_row_keys + (head + r) * dk, keys + r * dkp, dk * 4);
            memcpy(args.final_row_values + (head + r) * args.dv, values + r * dvp, args.dv * 4);
        }
    }
};

}  // namespace

// The second stage for one head of the dynamic memory, from the lifetimes of its starts.
//
// A state is a span of tokens: factor * matrix, for the tokens that have been folded, plus loose rows, tokens whose keys
// and values are kept as they came, each with its decay. Short states have no matrix at all. Inside a chunk nothing is
// merged: the states at its beginning and its own tokens are read one by one, each with the weight of the slot that it
// has at that time, and what belongs together at the chunk's end is put together there. With a soft gate a token is two
// rows, one of them in the span of what is pending, which becomes a state at the next boundary.
#pragma once
#include "chunk.h"
#include "gate.h"
#include "routing.h"

namespace {

constexpr int32_t NOBODY = INT32_MIN;
constexpr float FADED = 1.2e-38f;  // the smallest float of full precision: what has decayed below it counts as zero

struct Span {
    float *matrix;  // null: rows alone
    float factor;
    int32_t start;  // where it begins, from the sequence's first token; those carried in are below zero
    int64_t rows;   // loose ones; all states' rows stand in the order of their tokens
};

template <class C> struct SpanHead {
    const AttendArgs &args;
    Arena &arena;
    const int64_t n, h, dk, dkp, dvp, room;
    Routing *routing = nullptr;  // if reads are routed
    Gate *gate = nullptr;        // if it is soft; then what is pending is one more span, behind the newest
    Span *spans;         // [room] the states, oldest first
    int64_t count = 0;
    float *keys, *values, *coefficient;  // [most][dkp], [most][dvp], [most] loose rows
    float *sway = nullptr;               // [most] how they change with the gate (see gate.h), if gradients are wanted
    int32_t *token;                      // [most] which tokens they are, from the sequence's first; below zero: carried in
    int64_t rows = 0, most;
    float **spare;                // matrices that are free
    int64_t spares = 0;
    int32_t *ends;                // [length] the start whose end each step's merge is
    bool sound = true;            // all numbers so far were finite
    // of one chunk
    int32_t *slot, *slot_own;     // [room] of states, [CHUNK] of tokens
    float *weight, *weight_own;   // [room][CHUNK], [CHUNK][CHUNK]
    float *table;                 // [room] weights by slot, at one time
    int32_t *slots, *slots_own;   // [room][CHUNK], [CHUNK][CHUNK] slots at every time, if gradients are wanted
    int32_t alive_at[CHUNK];
    float *d_table;               // [room]
    int64_t *many;                // [room] loose rows of each state
    Span *live;                   // [room] states as they are at the chunk's end

    SpanHead(const AttendArgs &a, int64_t sequence, int64_t head, C &c, Arena &pieces)
        : args(a), arena(pieces), n(sequence), h(head), dk(a.dk), dkp(padded(a.dk)), dvp(c.dvp),
          room(a.states + 1 + (a.gate != nullptr)) {
        int64_t before = 0;
        for (int64_t i = 0; i < a.carried; ++i) before += a.rows[(n * a.heads + h) * a.carried + i];
        const int64_t tokens = a.length[n] * (a.gate ? 2 : 1), short_ones = room * a.longest_short;
        most = (short_ones < tokens ? short_ones : tokens) + before + CHUNK;
        const int64_t all = most + (a.gate ? 2 * CHUNK : 0);  // a chunk's own tokens behind
        spans = (Span *)arena.bytes(room * sizeof(Span)), live = (Span *)arena.bytes(room * sizeof(Span));
        keys = arena.floats(all * dkp), values = arena.floats(all * dvp), coefficient = arena.floats(all);
        token = (int32_t *)arena.bytes(all * 4);
        if (a.gate && C::backward) sway = arena.floats(all);
        spare = (float **)arena.bytes(2 * room * sizeof(float *));
        ends = (int32_t *)arena.bytes(a.length[n] * 4);
        slot = (int32_t *)arena.bytes(room * 4), slot_own = (int32_t *)arena.bytes(CHUNK * 4);
        many = (int64_t *)arena.bytes(room * 8);
        if (C::backward) {
            slots = (int32_t *)arena.bytes(room * CHUNK * 4), slots_own = (int32_t *)arena.bytes(CHUNK * CHUNK * 4);
            d_table = arena.floats(room);
        }
        weight = arena.floats(room * CHUNK), weight_own = arena.floats(CHUNK * CHUNK), table = arena.floats(room);
        if (a.route)
            if (void *at = arena.bytes(sizeof(Routing))) routing = new (Here{at}) Routing(a, room, C::backward, arena);
        if (a.gate)
            if (void *at = arena.bytes(sizeof(Gate))) gate = new (Here{at}) Gate(a, h, C::backward, arena);
        if (arena.failed) return;
        carry_in(c);
        if (gate) spans[count] = {nullptr, 0, NOBODY, 0};
        find_ends();
    }
    int64_t held() const { return count + (gate != nullptr); }  // spans at the chunk's start

    float *take_matrix(C &c) { return spares ? spare[--spares] : c.new_matrix(arena); }
    void give_matrix(float *x) { spare[spares++] = x; }

    void carry_in(C &c) {
        const int64_t at = (n * args.heads + h) * args.carried;
        const int32_t *place = args.places + (n * args.heads + h) * args.places_room;
        for (int64_t i = 0; i < args.carried; ++i) {
            if (args.initial_death[at + i] < 0) continue;
            Span &s = spans[count++];
            s = {nullptr, args.factor[at + i], int32_t(i - args.carried), args.rows[at + i]};
            if (args.matrix[at + i] >= 0) {
                s.matrix = take_matrix(c);
                if (arena.failed) return;
                c.load_matrix(s.matrix, args.initial + args.matrix[at + i] * dk * args.dv);
            }
            for (int64_t r = 0; r < s.rows; ++r) take_row(*place++);
            if (routing) routing->carry(args.initial_keys + (at + i) * dk);
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

    void chunk(C &c, int64_t begin) {
        sound = sound && c.finite;
        if constexpr (C::backward)
            if (routing) routing->history->learns = c.learns;
        if (routing) routing->begin(c);
        if (gate) sound = gate->begin(c, !count) && sound;
        const int64_t after = weigh(c, begin);
        if (arena.failed) return;
        float *newest = count ? weight + (count - 1) * CHUNK : nullptr;
        if (gate) gate->soften(c.m, newest, weight_own, weight + count * CHUNK);
        c.own(weight_own);
        for (int64_t i = 0; i < held(); ++i)
            for (int64_t t = 0; t < c.m; t += LANES)
                store(weight + i * CHUNK + t, load(weight + i * CHUNK + t) * load(c.E + t));
        read(c);
        if constexpr (C::backward)
            if (c.learns) learn(c);
        c.spread();
        settle(c, begin, after);
    }

    // The weight of every state and token at every time of the chunk; returns how many states there are at its end.
    int64_t weigh(C &c, int64_t begin) {
        int64_t alive = count;
        float *own = gate ? gate->hard() : weight_own;
        for (int64_t i = 0; i < count; ++i) slot[i] = int32_t(i);
        for (int64_t t = 0; t < c.m; ++t) {
            const int64_t at = (c.first + t) * args.heads + h;
            if (ends[begin + t] != NOBODY) alive = merge_slots(ends[begin + t], begin, t, alive);
            const bool opens = args.death[at] >= 0;
            alive += opens;
            slot_own[t] = int32_t(alive - 1);
            if (routing && opens) routing->open(alive - 1);
            if (routing) routing->add(c, alive - 1, t, opens);
            fill_table(c, t, at, alive);
            for (int64_t i = 0; i < count; ++i) weight[i * CHUNK + t] = table[slot[i]];
            for (int64_t s = 0; s <= t; ++s) own[s * CHUNK + t] = table[slot_own[s]];
            if constexpr (C::backward) remember_slots(t, alive);
        }
        return alive;
    }

    void remember_slots(int64_t t, int64_t alive) {
        alive_at[t] = int32_t(alive);
        for (int64_t i = 0; i < count; ++i) slots[i * CHUNK + t] = slot[i];
        for (int64_t s = 0; s <= t; ++s) slots_own[s * CHUNK + t] = slot_own[s];
    }

    // Gradients of lam, and of what routes: what all tokens and states of a slot say about its weight.
    void learn(C &c) {
        c.states = c.states < held() ? held() : c.states;
        for (int64_t i = 0; i < held(); ++i)
            for (int64_t t = 0; t < c.m; t += LANES)
                store(c.d_weight + i * CHUNK + t, load(c.d_weight + i * CHUNK + t) * load(c.E + t));
        const float *d_own = c.d_own;
        if (gate) {
            float *pending = c.d_weight + count * CHUNK, *newest = count ? pending - CHUNK : nullptr;
            gate->harden(c.m, c.d_own, pending, newest, c.d_gate + c.token[0]);
            d_own = gate->d_hard();
        }
        for (int64_t t = 0; t < c.m; ++t) {
            const int64_t alive = alive_at[t];
            for (int64_t i = 0; i < alive; ++i) d_table[i] = 0;
            for (int64_t i = 0; i < count; ++i) d_table[slots[i * CHUNK + t]] += c.d_weight[i * CHUNK + t];
            for (int64_t s = 0; s <= t; ++s) d_table[slots_own[s * CHUNK + t]] += d_own[s * CHUNK + t];
            if (routing) learn_routes(c, t, alive);
            float *d = c.d_lam(t);
            for (int64_t i = 0; i < alive; ++i) d[column(i, alive)] += d_table[i];
        }
        if (routing) routing->history->spread(c.d_sums);
    }

    void learn_routes(C &c, int64_t t, int64_t alive) {
        const int64_t at = (c.first + t) * args.heads + h;
        for (int64_t i = 0; i < alive; ++i) table[i] = args.lam[at * args.width + column(i, alive)];
        *c.d_route(t) += routing->history->learn(t, alive, table, d_table, args.route[at], c.Qr + t * c.dkp,
                                                 routing->norm_q[t], c.d_q(c.token[t]));
    }

    int64_t column(int64_t state, int64_t alive) const {
        const int64_t slot_number = args.recency ? alive - 1 - state : state;
        return slot_number < args.width ? slot_number : args.width - 1;
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
        if (routing) routing->merge(gone, alive);
        return alive - 1;
    }

    void fill_table(C &c, int64_t t, int64_t at, int64_t alive) {
        const float *lam = args.lam + at * args.width;
        for (int64_t i = 0; i < alive; ++i) table[i] = lam[column(i, alive)];
        if (routing) routing->weigh(c, t, args.route[at], alive, slot, slot_own, table);
    }

    void read(C &c) {
        for (int64_t i = 0; i < held(); ++i) many[i] = spans[i].rows;
        c.read_rows(loose(0), many, held(), weight, arena);
        for (int64_t i = 0; i < held(); ++i)
            if (spans[i].matrix) c.read(spans[i].matrix, weight + i * CHUNK, spans[i].factor, i);
    }

    Rows loose(int64_t row) const {
        return {keys + row * dkp, dkp, values + row * dvp, coefficient + row, token + row, sway ? sway + row : nullptr};
    }

    // Put together what has become one state, at the chunk's end.
    void settle(C &c, int64_t begin, int64_t after) {
        const float fade = c.E[c.m - 1];
        for (int64_t r = 0; r < rows; ++r) coefficient[r] *= fade;
        c.move_rows(keys, rows, token, arena);
        const int64_t made_spans = after + (gate != nullptr);
        for (int64_t j = 0; j < made_spans; ++j) live[j] = {nullptr, 0, NOBODY, 0};
        const bool lifted = gate && settle_gate(c, after);
        for (int64_t i = 0; i < held(); ++i) join(c, live[slot[i]], spans[i], fade);
        int64_t s = 0, row = 0, kept = 0;
        for (int64_t j = 0; j < made_spans; ++j) {
            Span &made = live[j];
            const int64_t own = s;
            while (s < c.m && slot_own[s] == j) ++s;
            if (made.start == NOBODY && j < after) made.start = int32_t(begin + own);
            if (lifted && j == slot[count]) row += CHUNK;
            const int64_t owned = gate ? gate->take(j, c.m) : s - own, loose = made.rows + owned, first = row;
            row += made.rows;
            if (made.matrix ? loose >= args.most_loose : loose > args.longest_short) {
                fold(c, made, first, own, owned);
            } else {
                kept = keep_rows(first, made.rows, kept);
                if (owned) kept = gate ? keep_parts(c, kept) : keep_own(c, own, owned, kept);
                made.rows = loose;
            }
            if (arena.failed) return;
        }
        if (routing) routing->settle(after);
        rows = kept;
        count = after;
        Span *swap = spans;
        spans = live, live = swap;
    }

    // Where the parts of the chunk's tokens go, and what was pending. Tokens that go to the state that was the newest
    // come before rows that were pending, if these are not its own by now: such rows make way, which is returned.
    bool settle_gate(C &c, int64_t after) {
        const int32_t newest = count ? slot[count - 1] : 0;
        slot[count] = gate->settle(c.m, slot_own, c.own_rows(0).coefficient, newest, after);
        const int64_t waiting = spans[count].rows;
        if (!waiting || slot[count] == newest) return false;
        keep_rows(rows - waiting, waiting, rows - waiting + CHUNK);
        return true;
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
        if (owned && gate) keep_parts(c, most);
        if (owned) c.fold(made.matrix, made.factor, fresh, owned, gate ? loose(most) : c.own_rows(own));
        made.factor = 1, made.rows = 0;
    }

    // Rows that stay loose move up to place `to`; where the next may go.
    int64_t keep_rows(int64_t from, int64_t many, int64_t to) {
        if (from != to) {
            memmove(keys + to * dkp, keys + from * dkp, many * dkp * 4);
            memmove(values + to * dvp, values + from * dvp, many * dvp * 4);
            memmove(coefficient + to, coefficient + from, many * 4), memmove(token + to, token + from, many * 4);
            if (sway) memmove(sway + to, sway + from, many * 4);
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

    // The same of both parts of tokens, as the gate has taken them.
    int64_t keep_parts(C &c, int64_t to) {
        const Rows own = c.own_rows(0);
        for (int part = 0; part < 2; ++part)
            for (int64_t s = gate->since[part]; s < gate->to[part]; ++s) {
                if (gate->share(part, s) == 0) continue;
                memcpy(keys + to * dkp, own.keys + s * own.stride, dk * 4);
                memset(keys + to * dkp + dk, 0, (dkp - dk) * 4);
                memcpy(values + to * dvp, own.values + s * dvp, dvp * 4);
                coefficient[to] = gate->coefficient[part][s], token[to] = own.token[s];
                if (sway) sway[to] = gate->sway[part][s];
                ++to;
            }
        return to;
    }

    // All that a chunk changes, piece by piece: visit(where it is, bytes).
    template <class Visit> void remember(C &, Visit &visit) {
        visit(&count, sizeof count), visit(&rows, sizeof rows), visit(&spares, sizeof spares);
        visit(&sound, sizeof sound), visit(&spans, sizeof spans), visit(&live, sizeof live);
        visit(spans, held() * sizeof(Span)), visit(spare, spares * sizeof(float *));
        visit(keys, rows * dkp * 4), visit(values, rows * dvp * 4);
        visit(coefficient, rows * 4), visit(token, rows * 4);
        if (sway) visit(sway, rows * 4);
        for (int64_t i = 0; i < held(); ++i)
            if (spans[i].matrix) visit(spans[i].matrix, dk * dvp * 4);
        if (routing) routing->remember(visit);
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
            for (int64_t d = 0; routing && args.final_keys && d < dk; ++d)
                args.final_keys[(at + j) * dk + d] = float(routing->held[j].keys[d]);
        }
        if (rows) memcpy(args.final_row_coefficient + head, coefficient, rows * 4);
        for (int64_t r = 0; r < rows; ++r) {
            memcpy(args.final_row_keys + (head + r) * dk, keys + r * dkp, dk * 4);
            memcpy(args.final_row_values + (head + r) * args.dv, values + r * dvp, args.dv * 4);
        }
    }
};

}  // namespace

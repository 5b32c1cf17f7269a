// Drives the decoding step: states that go on for many tokens, kept as dla/ops/cpu/decode.py keeps them and compared
// with whole matrices, and hostile calls, which must be refused before anything is touched.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "../../src/dla/ops/cpu/args.h"
#include "drive.h"

extern "C" int64_t dla_decode(DecodeArgs *);
extern "C" int64_t dla_fold(DecodeArgs *);
extern "C" int64_t dla_settle(DecodeArgs *);
extern "C" int64_t dla_ground(DecodeArgs *);
extern "C" int64_t dla_repack(DecodeArgs *, const PoolArgs *);

namespace {

typedef std::vector<uint8_t> Bytes;
typedef std::vector<double> Dense;

const double FIRST = std::sqrt(2.0), TIE = 1e-6;

float widened(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

// A copy in memory of exactly the right size: a step beyond it is seen.
template <class T> void grow(std::vector<T> &array, int64_t size, T with = T()) {
    std::vector<T> made(size, with);
    std::copy(array.begin(), array.end(), made.begin());
    array.swap(made);
}

void fill(Draw &draw, std::vector<float> &array, int64_t size, double scale = 1, double shift = 0) {
    array.resize(size);
    for (float &x : array) x = float(scale * draw.normal() + shift);
}

// A state and a token of each of its sequences.
struct Call {
    DecodeArgs args;
    Bytes matrices, row_keys, row_values, boundary;
    std::vector<float> q, k, v, lam, g, beta, route, factor, key_sums, row_coefficient, score, o;
    std::vector<float> pending_keys, pending_beta, pending_scratch;
    std::vector<int64_t> length, rows, count, merged, freed_rows;
    std::vector<int32_t> matrix, places, free_row, free_matrix, new_row, freed, fold, pending;
    std::vector<double> info, norm, parts;

    Call() { std::memset(&args, 0, sizeof args); }
    Call(const Call &other) = default;
    Call &operator=(const Call &other) = default;  // to be pointed anew
    template <class Do> void each(Do look) {
        look(matrices, args.matrices), look(row_keys, args.row_keys), look(row_values, args.row_values);
        look(boundary, args.boundary), look(q, args.q), look(k, args.k), look(v, args.v), look(lam, args.lam);
        look(g, args.g), look(route, args.route), look(factor, args.factor), look(key_sums, args.key_sums);
        look(row_coefficient, args.row_coefficient), look(score, args.score), look(o, args.o);
        look(length, args.length), look(rows, args.rows), look(count, args.count), look(merged, args.merged);
        look(freed_rows, args.freed_rows), look(matrix, args.matrix), look(places, args.places);
        look(free_row, args.free_row), look(free_matrix, args.free_matrix), look(new_row, args.new_row);
        look(freed, args.freed), look(fold, args.fold), look(info, args.info), look(norm, args.norm);
        look(beta, args.beta), look(parts, args.parts), look(pending, args.pending);
        look(pending_keys, args.pending_keys), look(pending_beta, args.pending_beta);
        look(pending_scratch, args.pending_scratch);
    }
    void point() {
        each([](auto &array, auto &pointer) { pointer = array.empty() ? nullptr : array.data(); });
    }
    // All bytes of all arrays, and of the arguments if these are asked for.
    Bytes content(bool with_args) {
        Bytes made;
        auto add = [&](const void *x, size_t size) { made.insert(made.end(), (uint8_t *)x, (uint8_t *)x + size); };
        each([&](auto &array, auto &) { add(array.data(), array.size() * sizeof array[0]); });
        if (with_args) add(&args, sizeof args);
        return made;
    }

    int64_t heads() const { return args.sequences * args.heads; }
    float stored(const Bytes &array, int64_t i) const {
        if (args.stored == 4) return ((const float *)array.data())[i];
        return widened(((const uint16_t *)array.data())[i]);
    }
    int64_t size(int64_t at) const {
        int64_t found = 0;
        while (found < args.states && count[at * args.states + found]) ++found;
        return found;
    }
    int64_t total(int64_t at) const {
        int64_t sum = 0;
        for (int64_t i = 0; i < args.states; ++i) sum += rows[at * args.states + i];
        return sum;
    }
};

// --- a state, as Python keeps it

void grow_rows(Call &call, int64_t more) {
    DecodeArgs &a = call.args;
    const int64_t start = a.pool_rows;
    a.pool_rows += more;
    grow(call.row_keys, a.pool_rows * a.dk * a.stored, uint8_t(0xff));  // what is in a free place may be anything
    grow(call.row_values, a.pool_rows * a.dv * a.stored, uint8_t(0xff));
    grow(call.row_coefficient, a.pool_rows, NAN), grow(call.free_row, a.pool_rows);
    for (int64_t i = start; i < a.pool_rows; ++i) call.free_row[a.free_rows++] = int32_t(i);
}

void grow_matrices(Call &call, int64_t more) {
    DecodeArgs &a = call.args;
    const int64_t start = a.pool_matrices;
    a.pool_matrices += more;
    grow(call.matrices, a.pool_matrices * a.dk * a.dv * a.stored, uint8_t(0xff));
    grow(call.free_matrix, a.pool_matrices);
    for (int64_t i = start; i < a.pool_matrices; ++i) call.free_matrix[a.free_matrices++] = int32_t(i);
}

// Arrays [heads, from, size] become [heads, to, size].
template <class T> void widen(std::vector<T> &array, int64_t heads, int64_t from, int64_t to, int64_t size, T with) {
    std::vector<T> made(heads * to * size, with);
    for (int64_t at = 0; at < heads; ++at)
        std::copy_n(array.begin() + at * from * size, from * size, made.begin() + at * to * size);
    array.swap(made);
}

void make_room(Draw &draw, Call &call) {
    DecodeArgs &a = call.args;
    const int64_t heads = call.heads();
    if (a.memory == Memory::log_linear) {
        int64_t longest = 0, levels = 1;
        for (int64_t length : call.length) longest = std::max(longest, length + 1);
        while (longest >> levels) ++levels;
        if (levels <= a.states) return;
        widen(call.matrices, heads, a.states, levels, a.dk * a.dv * 4, uint8_t(0)), a.states = levels;
    }
    if (a.memory != Memory::dynamic) return;
    if (a.free_rows < heads) grow_rows(call, heads - a.free_rows + draw.whole(0, 3));
    if (a.longest + 1 > a.places_room) {
        const int64_t more = draw.whole(1, 4);
        widen(call.places, heads, a.places_room, a.places_room + more, 1, -1), a.places_room += more;
    }
}

// Pools to move to.
struct Pools {
    PoolArgs args;
    Bytes matrices, row_keys, row_values;
    std::vector<float> row_coefficient;
    std::vector<int32_t> free_row, free_matrix;

    Pools(const DecodeArgs &a, int64_t many_rows, int64_t many_matrices)
        : matrices(std::max<int64_t>(many_matrices, 0) * a.dk * a.dv * a.stored, 0xff),
          row_keys(std::max<int64_t>(many_rows, 0) * a.dk * a.stored, 0xff),
          row_values(std::max<int64_t>(many_rows, 0) * a.dv * a.stored, 0xff),
          row_coefficient(std::max<int64_t>(many_rows, 0), NAN), free_row(row_coefficient.size(), -9),
          free_matrix(std::max<int64_t>(many_matrices, 0), -9) {
        args.pool_rows = many_rows, args.pool_matrices = many_matrices, args.matrices = matrices.data();
        args.row_keys = row_keys.data(), args.row_values = row_values.data();
        args.row_coefficient = row_coefficient.data();
        args.free_row = free_row.data(), args.free_matrix = free_matrix.data();
    }
};

void check_pools(const Call &call);

// What is in use moves to other pools, with as few free places as can be or some more; one of them may stay.
void repack(Draw &draw, Call &call) {
    DecodeArgs &a = call.args;
    int64_t rows = 0, matrices = 0;
    for (int64_t at = 0; at < call.heads(); ++at) rows += call.total(at);
    for (int32_t place : call.matrix) matrices += place >= 0;
    const int64_t which = draw.whole(0, 3);
    Pools to(a, which == 1 ? -1 : rows + draw.whole(0, 3), which == 2 ? -1 : matrices + draw.whole(0, 3));
    call.point();
    expect(dla_repack(&a, &to.args) == 0, "valid pools were refused");
    if (which != 1) {
        call.row_keys.swap(to.row_keys), call.row_values.swap(to.row_values);
        call.row_coefficient.swap(to.row_coefficient), call.free_row.swap(to.free_row);
    }
    if (which != 2) call.matrices.swap(to.matrices), call.free_matrix.swap(to.free_matrix);
    check_pools(call);
}

// A state whose matrices and rows have been through all transitions.
void settle(Call &call) {
    call.point();
    call.args.q = call.args.k = call.args.v = nullptr;
    expect(dla_settle(&call.args) == 0, "a valid state could not be settled");
    for (int32_t pending : call.pending) expect(pending == 0, "%d are still pending", pending);
}

// A state that no step has seen: all that steps keep is found anew.
void ground(Call &call) {
    settle(call);
    for (double &x : call.parts) x = 1;
    const int64_t rows = call.args.free_rows, matrices = call.args.free_matrices, longest = call.args.longest;
    for (double &x : call.norm) x = NAN;
    std::fill(call.free_row.begin(), call.free_row.end(), -9);
    std::fill(call.free_matrix.begin(), call.free_matrix.end(), -9);
    call.args.free_rows = call.args.free_matrices = call.args.longest = -9;
    call.args.q = call.args.k = call.args.v = nullptr;
    call.point();
    expect(dla_ground(&call.args) == 0, "a valid state was refused");
    expect(call.args.free_rows == rows && call.args.free_matrices == matrices, "other free places");
    expect(call.args.longest == longest, "another longest head");
    check_pools(call);  // and the norms are looked at after the next step
}

Call random_state(Draw &draw, Memory memory, bool large = false) {
    Call call;
    DecodeArgs &a = call.args;
    a.memory = memory, a.sequences = draw.whole(0, 8) ? draw.whole(1, 3) : 0, a.key_heads = draw.whole(1, 2);
    a.heads = a.key_heads * draw.whole(1, 3), a.threads = draw.whole(1, 4), a.scale = 0.5, a.recency = draw.whole(0, 1);
    a.dk = draw.of<int64_t>({1, 3, 8, 17, 32}), a.dv = draw.of<int64_t>({1, 4, 7, 16, 33, 70, 300});
    if (large) a.sequences = 2, a.heads = 4, a.key_heads = 2, a.dk = 200, a.dv = 700, a.threads = 3;  // for threads
    a.width = memory == Memory::single ? 0 : draw.whole(1, 8), a.stored = 4;
    const int64_t heads = call.heads(), numbers = a.dk * a.dv;
    call.length.assign(a.sequences, 0), call.o.assign(heads * a.dv, NAN);
    if (draw.chance(0.5)) call.g.resize(heads);
    if (draw.chance(0.5)) call.beta.resize(heads);
    if (memory == Memory::dynamic) {
        a.states = draw.whole(2, 5), a.stored = draw.chance(0.7) ? 4 : 2;
        a.block = draw.chance(0.2) ? draw.whole(1, 4) : 0;
        a.state_score = draw.whole(0, 1), a.given = draw.chance(0.3), a.tau = draw.of<double>({0.5, 1, 1.3, 1.42, 3});
        a.longest_short = draw.whole(1, 9), a.most_loose = draw.whole(1, a.longest_short);
        a.tie = TIE, a.first_score = FIRST;
        const int64_t states = heads * a.states;
        call.matrix.assign(states, -1), call.factor.assign(states, 0), call.rows.assign(states, 0);
        call.count.assign(states, 0), call.info.assign(states, 0), call.norm.assign(heads, 0);
        if (draw.chance(0.5)) call.key_sums.assign(states * a.dk, 0), call.route.resize(heads);
        call.new_row.assign(heads, -9), call.freed.assign(heads, -9), call.fold.assign(heads, -9);
        call.freed_rows.assign(heads, -9);
        if (!call.beta.empty()) {
            call.pending.assign(heads, 0), call.parts.assign(heads, 1), call.pending_beta.assign(heads * PENDING, NAN);
            call.pending_keys.assign(heads * PENDING * a.dk, NAN);
            call.pending_scratch.assign(heads * (PENDING + 1) * a.dk, NAN);
        }
        if (draw.chance(0.3)) grow_matrices(call, draw.whole(1, 5));
        return call;
    }
    a.states = memory == Memory::single ? 1 : 0;
    for (int64_t &length : call.length) length = draw.whole(0, 40);
    if (memory == Memory::log_linear) make_room(draw, call);
    call.matrices.assign(heads * a.states * numbers * 4, 0);
    for (int64_t i = 0; i < heads * a.states * numbers; ++i) {
        const int64_t level = i / numbers % a.states, n = i / numbers / a.states / a.heads;
        const bool holds = memory == Memory::single || call.length[n] >> level & 1;
        if (holds) ((float *)call.matrices.data())[i] = float(draw.normal());
    }
    return call;
}

// Steps from 0 to 1, of keys that are no longer than one.
void next_beta(Draw &draw, Call &call) {
    const int64_t dk = call.args.dk;
    for (float &x : call.beta) x = draw.chance(0.1) ? 0 : draw.chance(0.1) ? 1 : float(draw.whole(1, 99)) / 100;
    for (size_t first = 0; first < call.k.size(); first += dk) {
        double square = 0;
        for (int64_t d = 0; d < dk; ++d) square += double(call.k[first + d]) * call.k[first + d];
        for (int64_t d = 0; square && d < dk; ++d) call.k[first + d] = float(call.k[first + d] / std::sqrt(square));
    }
}

void next_token(Draw &draw, Call &call) {
    DecodeArgs &a = call.args;
    const int64_t heads = call.heads(), keys = a.sequences * a.key_heads * a.dk;
    const std::vector<float> k = call.k, v = call.v;
    fill(draw, call.q, keys), fill(draw, call.k, keys), fill(draw, call.v, heads * a.dv);
    const double again = draw.of<double>({0, 0, 1, 0.9, -1});  // the last token, much of it, or what cancels it
    const float noise = std::fabs(again) == 1 ? 0 : 0.3f;
    for (size_t i = 0; again && i < k.size(); ++i) call.k[i] = k[i] + noise * call.k[i];
    for (size_t i = 0; again && i < v.size(); ++i) call.v[i] = float(again * v[i]);
    if (draw.chance(0.05)) std::fill(call.k.begin(), call.k.end(), 0.0f);
    if (!call.beta.empty()) next_beta(draw, call);
    fill(draw, call.lam, heads * a.width, 0.3, 1), fill(draw, call.g, call.g.size(), 0.05, -0.1);
    fill(draw, call.route, call.route.size(), 0.1, 2), std::fill(call.o.begin(), call.o.end(), NAN);
    if (!a.given) return;
    fill(draw, call.score, heads, 0.1, 1), call.boundary.assign(heads, 0), call.merged.assign(heads, -1);
    for (int64_t at = 0; at < heads; ++at) {
        const int64_t size = call.size(at);
        call.boundary[at] = !size || draw.chance(0.4);
        if (size > 1 && (size == a.states || draw.chance(0.3))) call.merged[at] = draw.whole(0, size - 2);
    }
}

// One token, as decode.py does it.
void step(Draw &draw, Call &call) {
    DecodeArgs &a = call.args;
    make_room(draw, call);
    call.point();
    const std::vector<int64_t> before = call.length;
    const int64_t answer = dla_decode(&a);
    for (size_t n = 0; n < before.size(); ++n) expect(call.length[n] == before[n] + 1, "a step is not counted");
    expect(answer == 0, "a valid call of memory %ld was refused: %ld", long(a.memory), long(answer));
    if (a.missing) {
        expect(a.memory == Memory::dynamic && !a.free_matrices, "matrices are missing, and free");
        const int64_t missing = a.missing;
        grow_matrices(call, missing + draw.whole(0, 2));
        call.point();
        expect(dla_fold(&a) == 0 && a.missing == 0, "a valid fold was refused");
    }
    if (a.memory != Memory::dynamic || !call.heads()) return;
    expect(bool(a.wants & wants_rows) == (a.free_rows < call.heads()), "free rows are wanted, or not");
    expect(bool(a.wants & wants_places) == (a.longest >= a.places_room), "places are wanted, or not");
}

// Every place of the pools is used once or free once.
void check_pools(const Call &call) {
    const DecodeArgs &a = call.args;
    std::vector<int> rows(a.pool_rows, 0), matrices(a.pool_matrices, 0);
    for (int64_t i = 0; i < a.free_rows; ++i) ++rows.at(call.free_row[i]);
    for (int64_t i = 0; i < a.free_matrices; ++i) ++matrices.at(call.free_matrix[i]);
    for (int64_t at = 0; at < call.heads(); ++at) {
        expect(call.total(at) <= a.longest, "more rows than the longest has");
        for (int64_t r = 0; r < a.places_room; ++r) {
            const int32_t place = call.places[at * a.places_room + r];
            expect((place >= 0) == (r < call.total(at)), "place %ld is %d", long(r), place);
            if (place >= 0) ++rows.at(place);
        }
    }
    for (int32_t place : call.matrix)
        if (place >= 0) ++matrices.at(place);
    for (int times : rows) expect(times == 1, "a row was used %d times", times);
    for (int times : matrices) expect(times == 1, "a matrix was used %d times", times);
}

// --- the same with whole matrices

double inner(const Dense &x, const Dense &y) {
    double sum = 0;
    for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
    return sum;
}

struct State {
    Dense S, keys;
    double count, info, most;  // `most`: its norm if nothing cancelled
};

struct Head {
    int64_t n, h;
    std::vector<State> states;  // single: one; log_linear: all levels; dynamic: oldest first
    double off = 0;             // how far outputs and states may be, of what they are if nothing cancels

    Head(const Call &call, int64_t at) : n(at / call.args.heads), h(at % call.args.heads) {
        const DecodeArgs &a = call.args;
        off = a.stored == 4 ? 1e-4 : 0.1;
        for (int64_t i = 0; a.memory != Memory::dynamic && i < a.states; ++i) load(call, i);
    }
    void load(const Call &call, int64_t i) {
        const DecodeArgs &a = call.args;
        const float *S = (const float *)call.matrices.data() + ((n * a.heads + h) * a.states + i) * a.dk * a.dv;
        states.push_back({Dense(S, S + a.dk * a.dv), {}, 0, 0, 0});
        states.back().most = std::sqrt(inner(states.back().S, states.back().S));
    }

    void read(const Call &call, const Dense &weights) const {
        const DecodeArgs &a = call.args;
        const int64_t at = n * a.heads + h;
        const float *q = &call.q[(n * a.key_heads + h / (a.heads / a.key_heads)) * a.dk];
        double most = 1e-30, length = 0;
        for (int64_t d = 0; d < a.dk; ++d) length += double(q[d]) * q[d];
        for (size_t i = 0; i < states.size(); ++i) most += std::fabs(weights[i]) * states[i].most * std::sqrt(length);
        for (int64_t j = 0; j < a.dv; ++j) {
            double o = 0;
            for (size_t i = 0; i < states.size(); ++i)
                for (int64_t d = 0; d < a.dk; ++d) o += weights[i] * q[d] * states[i].S[d * a.dv + j];
            const double found = call.o[at * a.dv + j];
            expect(std::fabs(found - a.scale * o) <= off * most, "memory %ld: %g instead of %g", long(a.memory), found,
                   a.scale * o);
        }
    }

    // What the state holds, against what it should.
    void same(const Dense &found, const State &wanted) const {
        for (size_t i = 0; i < found.size(); ++i)
            expect(std::fabs(found[i] - wanted.S[i]) <= off * wanted.most + 1e-30, "a state has %g instead of %g",
                   found[i], wanted.S[i]);
    }

    // `before` is the state before the step.
    void follow(const Call &before, const Call &call) {
        const DecodeArgs &a = call.args;
        const int64_t at = n * a.heads + h, key = (n * a.key_heads + h / (a.heads / a.key_heads)) * a.dk;
        const float *k = &call.k[key], *v = &call.v[at * a.dv];
        const double decay = call.g.empty() ? 1 : std::exp(double(call.g[at]));
        State token{Dense(a.dk * a.dv), Dense(k, k + a.dk), 1, 0, 0};
        const double beta = call.beta.empty() ? 1 : call.beta[at];
        for (int64_t i = 0; i < a.dk * a.dv; ++i) token.S[i] = beta * k[i / a.dv] * v[i % a.dv];
        token.most = std::sqrt(inner(token.S, token.S));
        double score = 0;
        if (a.memory == Memory::dynamic) score = scored(before, call, token);
        for (State &state : states) {
            for (int64_t j = 0; !call.beta.empty() && j < a.dv; ++j) {
                double held = 0;  // S^T k
                for (int64_t d = 0; d < a.dk; ++d) held += state.S[d * a.dv + j] * k[d];
                for (int64_t d = 0; d < a.dk; ++d) state.S[d * a.dv + j] -= beta * k[d] * held;
            }
            for (double &x : state.S) x *= decay;
            state.most *= decay;
        }
        if (a.memory == Memory::single) add(states[0], token), read(call, {1});
        if (a.memory == Memory::log_linear) levels(before, call, token);
        if (a.memory == Memory::dynamic) spans(call, token, score);
        for (int64_t i = 0; a.memory != Memory::dynamic && i < a.states; ++i) {
            const float *S = (const float *)call.matrices.data() + (at * a.states + i) * a.dk * a.dv;
            same(Dense(S, S + a.dk * a.dv), states[i]);
        }
    }

    static void add(State &to, const State &from) {
        for (size_t i = 0; i < to.S.size(); ++i) to.S[i] += from.S[i];
        for (size_t i = 0; i < to.keys.size(); ++i) to.keys[i] += from.keys[i];
        to.count += from.count, to.info += from.info, to.most += from.most;
    }

    void levels(const Call &before, const Call &call, const State &token) {
        const DecodeArgs &a = call.args;
        const float *lam = &call.lam[(n * a.heads + h) * a.width];
        while (int64_t(states.size()) < a.states) states.push_back({Dense(a.dk * a.dv, 0), {}, 0, 0, 0});
        states.push_back(token);  // is read by itself, before it is in a block
        Dense weights;
        for (int64_t i = 0; i < a.states; ++i) weights.push_back(lam[std::min(i + 1, a.width - 1)]);
        weights.push_back(lam[0]);
        read(call, weights);
        states.pop_back();
        int64_t target = 0;
        while (before.length[n] >> target & 1) ++target;
        states[target] = token, states[target].keys.clear();
        for (int64_t i = 0; i < target; ++i) {
            add(states[target], states[i]);
            states[i] = {Dense(a.dk * a.dv, 0), {}, 0, 0, 0};
        }
    }

    // The score that the kernel has seen, which is about right; the current state is still as before the step.
    double scored(const Call &before, const Call &call, const State &token) const {
        const DecodeArgs &a = call.args;
        const int64_t at = n * a.heads + h, last = at * a.states + call.size(at) - 1;
        const bool opened = call.count[last] == 1;
        const double old = opened ? 0 : before.info[at * a.states + before.size(at) - 1], score = call.info[last] - old;
        if (a.given) {
            expect(std::fabs(score - call.score[at]) < 1e-6, "another score than given");
            return score;
        }
        if (states.empty()) {
            expect(opened && score == float(FIRST), "the first score is %g", score);
            return score;
        }
        const Dense &S = states.back().S;
        Dense left = token.S;
        for (size_t i = 0; a.state_score && i < S.size(); ++i) left[i] += S[i];
        const double size = std::sqrt(inner(S, S)), of_left = std::sqrt(inner(left, left));
        const double most = states.back().most + token.most;
        if (token.most == 0) {
            expect(score == 0, "an empty token has the score %g", score);
        } else if (size > 0.05 * most && (!a.state_score || of_left > 0.05 * most)) {
            const double cos = inner(left, S) / size / of_left, found = 1 - score * score / 2;
            expect(std::fabs(found - cos) <= 20 * off * most / size, "cos %g instead of %g", found, cos);
        }
        if (a.block) expect(opened == (call.length[n] % a.block == 1 % a.block), "a boundary off the blocks");
        else if (opened) expect(float(score) >= float(a.tau), "a boundary at the score %g", score);
        else expect(score < a.tau + 1e-5, "no boundary at the score %g", score);
        return score;
    }

    void spans(const Call &call, State token, double score) {
        const DecodeArgs &a = call.args;
        const int64_t at = n * a.heads + h, size = call.size(at), first = at * a.states;
        const bool opened = call.count[first + size - 1] == 1;
        if (a.given) expect(opened == bool(call.boundary[at]), "another boundary than given");
        token.info = score;
        if (opened) {
            if (size != int64_t(states.size()) + 1) merge(call, first);
            states.push_back(token);
        } else {
            add(states.back(), token);
        }
        expect(size == int64_t(states.size()), "%ld states instead of %zu", long(size), states.size());
        weigh(call, at);
        Call settled = call;  // what is pending stays so
        if (!call.pending.empty()) settle(settled);
        int64_t r = at * a.places_room;
        for (int64_t i = 0; i < size; ++i) {
            expect(double(call.count[first + i]) == states[i].count, "the count of state %ld", long(i));
            const double apart = std::fabs(call.info[first + i] - states[i].info);
            expect(apart < 1e-6 * (1 + states[i].info), "the info of state %ld", long(i));
            same(dense(settled, first + i, r), states[i]);
        }
        const double norm = std::sqrt(inner(states.back().S, states.back().S));
        expect(std::fabs(call.norm[at] - norm) <= off * states.back().most + 1e-30, "norm %g instead of %g",
               call.norm[at], norm);
    }

    // The counts say which pair was merged; it is the given one, or about the cheapest.
    void merge(const Call &call, int64_t first) {
        const DecodeArgs &a = call.args;
        size_t pair = 0;
        while (pair + 1 < states.size() && double(call.count[first + pair]) == states[pair].count) ++pair;
        expect(pair + 1 < states.size(), "nothing was merged");
        if (a.given) expect(int64_t(pair) == call.merged[n * a.heads + h], "another pair than given");
        auto cost = [&](size_t i) {
            return (states[i].info + states[i + 1].info) / (states[i].count + states[i + 1].count);
        };
        double least = INFINITY, largest = 0;
        for (size_t i = 0; i + 1 < states.size(); ++i)
            least = std::min(least, cost(i)), largest = std::max(largest, cost(i));
        expect(a.given || cost(pair) <= least + 2 * TIE * largest + 1e-9, "a dear pair: %g > %g", cost(pair), least);
        add(states[pair], states[pair + 1]);
        states.erase(states.begin() + pair + 1);
    }

    void weigh(const Call &call, int64_t at) const {
        const DecodeArgs &a = call.args;
        const float *q = &call.q[(n * a.key_heads + h / (a.heads / a.key_heads)) * a.dk];
        const Dense query(q, q + a.dk);
        Dense weights;
        for (size_t i = 0; i < states.size(); ++i) {
            const int64_t slot = a.recency ? states.size() - 1 - i : i;
            double weight = call.lam[at * a.width + std::min(slot, a.width - 1)];
            if (!call.route.empty()) {
                const double sizes = std::sqrt(inner(query, query) * inner(states[i].keys, states[i].keys));
                if (sizes < 1e-3) return;  // of keys that have cancelled: any direction
                weight *= std::exp(call.route[at] * (inner(query, states[i].keys) / sizes - 1));
            }
            weights.push_back(weight);
        }
        read(call, weights);
    }

    static Dense dense(const Call &call, int64_t i, int64_t &r) {
        const DecodeArgs &a = call.args;
        Dense made(a.dk * a.dv, 0);
        const int64_t matrix = call.matrix[i];
        for (int64_t x = 0; matrix >= 0 && x < a.dk * a.dv; ++x)
            made[x] = double(call.factor[i]) * call.stored(call.matrices, matrix * a.dk * a.dv + x);
        for (const int64_t stop = r + call.rows[i]; r < stop; ++r) {
            const int64_t place = call.places[r];
            for (int64_t x = 0; x < a.dk * a.dv; ++x)
                made[x] += double(call.row_coefficient[place]) * call.stored(call.row_keys, place * a.dk + x / a.dv) *
                           call.stored(call.row_values, place * a.dv + x % a.dv);
        }
        return made;
    }
};

void go_on(Draw &draw, Call &call, int steps) {
    std::vector<Head> heads;
    for (int64_t at = 0; at < call.heads(); ++at) heads.emplace_back(call, at);
    for (int t = 0; t < steps; ++t) {
        next_token(draw, call);
        const Call before = call;
        step(draw, call);
        for (Head &head : heads) head.follow(before, call);
        if (call.args.memory != Memory::dynamic || !call.heads()) continue;
        check_pools(call);
        if (draw.chance(0.05)) repack(draw, call);
        if (draw.chance(0.05)) ground(call);
    }
}

// --- hostile calls

struct Hostile {
    const char *name;
    std::function<void(Call &)> change;
};
#define SET(field, value) \
    { #field " = " #value, [](Call &c) { c.args.field = value; } }
#define PUT(array, value) \
    { #array " has " #value, [](Call &c) { c.array[c.array.size() / 2] = value; } }
#define GIVEN(array, value) \
    { #array " has " #value ", given", [](Call &c) { c.args.given = 1, c.array[c.array.size() / 2] = value; } }

const std::vector<Hostile> ANY = {  // must be refused whatever the memory is
    SET(memory, Memory(-1)), SET(memory, Memory(3)), SET(memory, Memory(INT64_MAX)), SET(sequences, -1),
    SET(sequences, INT64_MIN), SET(sequences, INT64_MAX), SET(heads, 0), SET(heads, -2), SET(heads, INT64_MAX),
    SET(key_heads, 0), SET(key_heads, 3), SET(key_heads, -1), SET(key_heads, INT64_MAX), SET(dk, 0), SET(dk, -3),
    SET(dk, INT64_MAX), SET(dk, int64_t(1) << 32), SET(dv, 0), SET(dv, INT64_MIN), SET(dv, INT64_MAX), SET(threads, 0),
    SET(threads, INT64_MIN), SET(threads, INT64_MAX), SET(q, nullptr), SET(k, nullptr), SET(v, nullptr),
    SET(o, nullptr), SET(length, nullptr), SET(matrices, nullptr), PUT(length, -1), PUT(length, INT64_MAX),
    PUT(length, INT64_MIN),
};
const std::vector<Hostile> LEVELS = {  // and with levels
    SET(width, 0), SET(width, -1), SET(width, INT64_MAX), SET(lam, nullptr), SET(states, 0), SET(states, -1),
    SET(states, 2), SET(states, 63), SET(states, INT64_MAX), PUT(length, 15), PUT(length, int64_t(1) << 59),
};
const std::vector<Hostile> BOTH = {  // by the decoding step and by the fold of the dynamic memory
    SET(width, 0), SET(width, INT64_MIN), SET(width, INT64_MAX), SET(lam, nullptr), SET(states, 0), SET(states, 1),
    SET(states, -1), SET(states, INT64_MAX), SET(stored, 0), SET(stored, 3), SET(stored, 8), SET(stored, INT64_MIN),
    SET(block, -1), SET(block, INT64_MIN), SET(state_score, -1), SET(state_score, 2), SET(given, -1), SET(given, 2),
    SET(longest_short, 0), SET(longest_short, INT64_MAX), SET(most_loose, 0), SET(most_loose, 5),
    SET(most_loose, INT64_MAX), SET(pool_matrices, -1), SET(pool_matrices, 0), SET(pool_matrices, INT64_MAX),
    SET(pool_rows, -1), SET(pool_rows, 0), SET(pool_rows, 5), SET(pool_rows, INT64_MAX), SET(places_room, -1),
    SET(places_room, 0), SET(places_room, 1), SET(places_room, INT64_MAX), SET(free_rows, -1),
    SET(free_rows, INT64_MIN),
    SET(free_rows, INT64_MAX), SET(free_rows, c.args.pool_rows + 1), SET(free_rows, c.args.pool_rows),
    SET(free_matrices, -1), SET(free_matrices, INT64_MAX), SET(free_matrices, c.args.pool_matrices + 1),
    SET(free_matrices, c.args.pool_matrices), SET(matrix, nullptr), SET(factor, nullptr), SET(rows, nullptr),
    SET(count, nullptr), SET(info, nullptr), SET(key_sums, nullptr), SET(places, nullptr), SET(row_keys, nullptr),
    SET(row_values, nullptr), SET(row_coefficient, nullptr), SET(norm, nullptr), SET(free_row, nullptr),
    SET(free_matrix, nullptr), SET(new_row, nullptr), SET(freed, nullptr), SET(fold, nullptr), SET(freed_rows, nullptr),
    PUT(matrix, -2), PUT(matrix, INT32_MIN), PUT(matrix, INT32_MAX), PUT(matrix, int32_t(c.args.pool_matrices)),
    PUT(rows, -1), PUT(rows, INT64_MAX), PUT(rows, INT64_MIN), PUT(rows, c.args.places_room), PUT(count, -1),
    PUT(count, INT64_MIN), PUT(count, INT64_MAX), PUT(count, 0), SET(beta, nullptr), SET(pending, nullptr),
    SET(parts, nullptr), SET(pending_keys, nullptr), SET(pending_beta, nullptr), SET(pending_scratch, nullptr),
    PUT(pending, -1), PUT(pending, int32_t(PENDING)), PUT(pending, INT32_MAX), PUT(pending, INT32_MIN),
    {"a place before the pool", [](Call &c) { c.places[0] = -1; }},
    {"a place behind the pool", [](Call &c) { c.places[0] = int32_t(c.args.pool_rows); }},
    {"more pending than rows", [](Call &c) { c.pending[0] = int32_t(c.rows[0] + c.rows[1] + c.rows[2]) + 1; }},
    {"the farthest place", [](Call &c) { c.places[0] = INT32_MAX; }},
    {"a free matrix before the pool", [](Call &c) { c.free_matrix[c.args.free_matrices - 1] = -1; }},
    {"a free matrix behind the pool",
     [](Call &c) { c.free_matrix[c.args.free_matrices - 1] = int32_t(c.args.pool_matrices); }},
    {"no score", [](Call &c) { c.args.given = 1, c.args.score = nullptr; }},
    {"no boundary", [](Call &c) { c.args.given = 1, c.args.boundary = nullptr; }},
    {"no merged", [](Call &c) { c.args.given = 1, c.args.merged = nullptr; }},
};
const std::vector<Hostile> HELD = {  // by whatever looks after the pools
    SET(sequences, -1), SET(sequences, INT64_MAX), SET(heads, 0), SET(heads, INT64_MAX), SET(dk, 0), SET(dk, INT64_MAX),
    SET(dv, 0), SET(dv, INT64_MIN), SET(states, 0), SET(states, INT64_MAX), SET(stored, 0), SET(stored, 3),
    SET(pool_matrices, -1), SET(pool_matrices, 0), SET(pool_matrices, INT64_MAX), SET(pool_rows, -1), SET(pool_rows, 0),
    SET(pool_rows, INT64_MAX), SET(places_room, -1), SET(places_room, 0), SET(places_room, 1),
    SET(places_room, INT64_MAX), SET(matrices, nullptr), SET(matrix, nullptr), SET(factor, nullptr), SET(rows, nullptr),
    SET(count, nullptr), SET(info, nullptr), SET(places, nullptr), SET(row_keys, nullptr), SET(row_values, nullptr),
    SET(row_coefficient, nullptr), SET(norm, nullptr), SET(free_row, nullptr), SET(free_matrix, nullptr),
    PUT(matrix, -2), PUT(matrix, INT32_MIN), PUT(matrix, INT32_MAX), PUT(matrix, int32_t(c.args.pool_matrices)),
    PUT(rows, -1), PUT(rows, INT64_MAX), PUT(rows, INT64_MIN), PUT(rows, c.args.places_room), PUT(count, -1),
    PUT(count, INT64_MIN), PUT(count, INT64_MAX), PUT(count, 0), SET(parts, nullptr), SET(pending_keys, nullptr),
    SET(pending_beta, nullptr), SET(pending_scratch, nullptr), PUT(pending, -1), PUT(pending, int32_t(PENDING)),
    PUT(pending, INT32_MAX), PUT(pending, INT32_MIN),
    {"a place before the pool", [](Call &c) { c.places[0] = -1; }},
    {"a place behind the pool", [](Call &c) { c.places[0] = int32_t(c.args.pool_rows); }},
    {"more pending than rows", [](Call &c) { c.pending[0] = int32_t(c.rows[0] + c.rows[1] + c.rows[2]) + 1; }},
};
const std::vector<Hostile> STEP = {  // by the decoding step alone
    SET(free_rows, 0), SET(free_rows, 3), GIVEN(merged, -2), GIVEN(merged, 2), GIVEN(merged, INT64_MAX),
    GIVEN(merged, INT64_MIN), GIVEN(merged, -1),  // where all states are taken
    {"places of no room", [](Call &c) {
         c.args.places_room = 0;
         for (int64_t at = 0; at < 4; ++at) c.args.places_room = std::max(c.args.places_room, c.total(at));
     }},
    {"a free row before the pool", [](Call &c) { c.free_row[c.args.free_rows - 1] = -1; }},
    {"a free row behind the pool", [](Call &c) { c.free_row[c.args.free_rows - 4] = int32_t(c.args.pool_rows); }},
    {"no start at all", [](Call &c) {
         c.args.given = 1;
         for (int64_t i = 0; i < c.args.states; ++i) c.count[i] = c.rows[i] = 0, c.matrix[i] = -1;
         c.boundary[0] = 0, c.merged[0] = -1;
     }},
};
const std::vector<Hostile> FOLD = {  // by the fold alone
    SET(memory, Memory::single), SET(memory, Memory::log_linear), PUT(fold, 3), PUT(fold, INT32_MAX), PUT(fold, -2),
    PUT(fold, INT32_MIN),
};

// Two sequences with two heads of a few tokens; the dynamic memory has three states, all taken, and is about to fold.
Call plain(Draw &draw, Memory memory) {
    for (;;) {
        Call call = random_state(draw, memory);
        DecodeArgs &a = call.args;
        if (a.sequences != 2 || a.heads != 2 || a.key_heads != 1) continue;
        if (memory == Memory::dynamic) {
            if (a.states != 3 || a.block || a.given || a.tau > 1 || call.route.empty() || call.beta.empty()) continue;
            a.longest_short = 4, a.most_loose = 2;
        }
        if (memory == Memory::log_linear)
            call.length.assign(2, 7), a.states = 4, call.matrices.assign(4 * 4 * a.dk * a.dv * 4, 0);
        for (int t = 0; memory == Memory::dynamic && t < 12; ++t) next_token(draw, call), step(draw, call);
        a.given = memory == Memory::dynamic;
        next_token(draw, call);  // makes what may be given, too
        a.given = 0;
        make_room(draw, call);
        if (memory != Memory::dynamic) return call.point(), call;
        bool full = a.free_matrices == 0;
        for (int64_t at = 0; at < 4; ++at) {
            full = full && call.size(at) == 3 && call.total(at) > 0, call.boundary[at] = 1;
            if (call.merged[at] < 0) call.merged[at] = 0;
        }
        if (!full) continue;
        grow_matrices(call, 2);  // that are free
        call.point();
        return call;
    }
}

void refused(Call &call, const Hostile &wrong, int64_t (*function)(DecodeArgs *)) {
    call.point();
    wrong.change(call);
    const Bytes before = call.content(true);
    const int64_t answer = function(&call.args);
    expect(answer > 0, "%s: answered %ld", wrong.name, long(answer));
    expect(call.content(true) == before, "%s: something was touched", wrong.name);
}

std::vector<Hostile> all(std::initializer_list<std::vector<Hostile>> lists) {
    std::vector<Hostile> made;
    for (const std::vector<Hostile> &list : lists) made.insert(made.end(), list.begin(), list.end());
    return made;
}

const Test fixed("decode: one state and levels, many steps, against whole matrices", [](Draw &draw) {
    for (int round = 0; round < 80; ++round) {
        Call call = random_state(draw, round % 2 ? Memory::single : Memory::log_linear, round >= 76);
        go_on(draw, call, round >= 76 ? 5 : 40);
    }
});

const Test dynamic("decode: spans, many steps, against whole matrices", [](Draw &draw) {
    for (int round = 0; round < 80; ++round) {
        Call call = random_state(draw, Memory::dynamic, round >= 78);
        go_on(draw, call, round >= 78 ? 30 : 60);
    }
});

const Test threads("decode: the same bits with any number of threads", [](Draw &draw) {
    for (int round = 0; round < 6; ++round) {
        Call call = random_state(draw, Memory(round % 3), true);
        if (round % 3 == 2) grow_matrices(call, 16);
        for (int t = 0; t < 12; ++t) {
            next_token(draw, call);
            Call other = call;
            Draw same = draw;
            call.args.threads = 1, other.args.threads = 4;
            step(draw, call), step(same, other);
            other.args.threads = 1;
            expect(call.content(false) == other.content(false), "memory %d, step %d", round % 3, t);
        }
    }
});

const Test poison("decode: NaN, infinite and extreme inputs", [](Draw &draw) {
    const std::vector<float> odd = {NAN, INFINITY, -INFINITY, 1e38f, -1e38f, 1e-44f, 0};
    for (int round = 0; round < 150; ++round) {
        Call call = random_state(draw, Memory(round % 3));
        for (int t = 0; t < 20; ++t) {
            next_token(draw, call);
            for (auto *array : {&call.q, &call.k, &call.v, &call.lam, &call.g, &call.beta, &call.route, &call.score,
                                &call.factor})
                while (!array->empty() && draw.chance(0.2)) (*array)[draw.whole(0, array->size() - 1)] = draw.of(odd);
            for (auto *array : {&call.info, &call.norm, &call.parts})
                if (!array->empty() && draw.chance(0.1)) (*array)[draw.whole(0, array->size() - 1)] = draw.of(odd);
            step(draw, call);
            if (round % 3 == 2 && call.heads()) check_pools(call);
        }
    }
});

const Test hostile("decode: hostile numbers, sizes and pointers", [](Draw &draw) {
    expect(dla_decode(nullptr) > 0 && dla_fold(nullptr) > 0, "no arguments at all");
    for (Memory memory : {Memory::single, Memory::log_linear, Memory::dynamic}) {
        const bool dynamic = memory == Memory::dynamic;
        const Call good = plain(draw, memory);
        Call tried = good;
        tried.point();
        expect(dla_decode(&tried.args) == 0, "the plain call of memory %ld was refused", long(memory));
        const std::vector<Hostile> levels = memory == Memory::log_linear ? LEVELS : std::vector<Hostile>();
        const std::vector<Hostile> wrong = dynamic ? all({ANY, BOTH, STEP}) : all({ANY, levels});
        for (const Hostile &one : wrong) {
            Call call = good;
            refused(call, one, dla_decode);
        }
        for (int round = 0; round < 300; ++round) {  // two at once
            Call call = good;
            call.point();
            const Hostile &first = draw.of(wrong), &other = draw.of(wrong);
            first.change(call);
            const DecodeArgs &a = call.args;  // the second may be one at the top of a stack
            if (dynamic && (a.free_rows < 4 || a.free_rows > int64_t(call.free_row.size()))) continue;
            if (dynamic && (a.free_matrices < 1 || a.free_matrices > int64_t(call.free_matrix.size()))) continue;
            if (a.states != good.args.states) continue;  // or look at all states
            other.change(call);
            if (dynamic && !a.beta && !a.pending) continue;  // a step without the delta rule, which may be
            const int64_t answer = dla_decode(&call.args);
            expect(answer > 0, "%s and %s: answered %ld", first.name, other.name, long(answer));
        }
    }
});

const Test folds("decode: hostile folds", [](Draw &draw) {
    Call good = plain(draw, Memory::dynamic);
    while (good.args.missing == 0 || good.args.pool_matrices == 0) {  // until states have no matrix to be folded into
        next_token(draw, good), make_room(draw, good), good.point();
        expect(dla_decode(&good.args) == 0, "a valid call was refused");
    }
    grow_matrices(good, good.args.missing);
    good.args.given = 1, next_token(draw, good), good.args.given = 0;
    Call tried = good;
    tried.point();
    expect(dla_fold(&tried.args) == 0 && tried.args.missing == 0, "the plain fold was refused");
    check_pools(tried);
    for (const Hostile &one : all({ANY, BOTH, FOLD})) {
        Call call = good;
        refused(call, one, dla_fold);
    }
});

const Test pools("decode: hostile pools", [](Draw &draw) {
    expect(dla_ground(nullptr) > 0 && dla_repack(nullptr, nullptr) > 0, "no arguments at all");
    expect(dla_settle(nullptr) > 0, "no arguments at all");
    const Call good = plain(draw, Memory::dynamic);
    int64_t rows = 0, matrices = 0;
    for (int64_t at = 0; at < 4; ++at) rows += good.total(at);
    for (int32_t place : good.matrix) matrices += place >= 0;
    for (const Hostile &one : HELD) {
        Call call = good, other = good, third = good;
        refused(call, one, dla_ground);
        refused(third, one, dla_settle);
        static const PoolArgs *to;
        const Pools pools(good.args, rows, matrices);
        to = &pools.args;
        refused(other, one, [](DecodeArgs *args) { return dla_repack(args, to); });
    }
    const int64_t huge = INT64_MAX;
    for (auto [many_rows, many_matrices] : {std::pair<int64_t, int64_t>{rows - 1, matrices}, {rows, matrices - 1},
                                            {-2, matrices}, {rows, -2}, {huge, matrices}, {rows, huge}}) {
        Call call = good;
        call.point();
        Pools pools(call.args, std::min<int64_t>(many_rows, 100), std::min<int64_t>(many_matrices, 100));
        pools.args.pool_rows = many_rows, pools.args.pool_matrices = many_matrices;
        const Bytes before = call.content(true);
        expect(dla_repack(&call.args, &pools.args) > 0, "pools of %ld and %ld", long(many_rows), long(many_matrices));
        expect(call.content(true) == before, "something was touched");
    }
    for (int missing = 0; missing < 6; ++missing) {
        Call call = good;
        call.point();
        Pools pools(call.args, rows, matrices);
        PoolArgs &to = pools.args;
        if (missing == 0) to.matrices = nullptr;
        if (missing == 1) to.row_keys = nullptr;
        if (missing == 2) to.row_values = nullptr;
        if (missing == 3) to.row_coefficient = nullptr;
        if (missing == 4) to.free_row = nullptr;
        if (missing == 5) to.free_matrix = nullptr;
        expect(dla_repack(&call.args, &to) > 0, "no tensor %d", missing);
    }
});

}  // namespace

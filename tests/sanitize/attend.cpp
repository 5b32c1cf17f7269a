// Drives outputs, final states and gradients: random calls, compared with all pairs of tokens, and hostile ones.
#include <cmath>
#include <cstring>

#include "../../src/dla/ops/cpu/args.h"
#include "drive.h"
#include "pairs.h"

extern "C" int64_t dla_attend(const AttendArgs *);
extern "C" int64_t dla_backward(const BackwardArgs *);

namespace {

// A call with all its arrays, each exactly as long as it has to be.
struct Call {
    AttendArgs args;
    std::vector<int64_t> offset, length, position, origin;
    std::vector<int64_t> rows, final_rows;
    std::vector<float> q, k, v, lam, g, route, beta, gate, initial, initial_keys, o, final, final_keys;
    std::vector<float> factor, row_keys, row_values, row_coefficient;
    std::vector<float> final_factor, final_row_keys, final_row_values, final_row_coefficient;
    std::vector<int32_t> death, initial_death, matrix, places, final_matrix;

    Call() { std::memset(&args, 0, sizeof args); }
    int64_t run() { return dla_attend(&args); }
    static const float *maybe(const std::vector<float> &array) { return array.empty() ? nullptr : array.data(); }
    void point() {
        AttendArgs &a = args;
        a.offset = offset.data(), a.length = length.data(), a.position = position.data(), a.origin = origin.data();
        a.q = q.data(), a.k = k.data(), a.v = v.data(), a.o = o.data(), a.death = death.data();
        a.lam = maybe(lam), a.g = maybe(g), a.route = maybe(route), a.gate = maybe(gate), a.initial = maybe(initial);
        a.beta = maybe(beta);
        a.initial_keys = maybe(initial_keys), a.initial_death = initial_death.data();
        a.final = const_cast<float *>(maybe(final)), a.final_keys = const_cast<float *>(maybe(final_keys));
        a.matrix = matrix.data(), a.factor = factor.data(), a.rows = rows.data(), a.places = places.data();
        a.row_keys = row_keys.data(), a.row_values = row_values.data(), a.row_coefficient = row_coefficient.data();
        a.final_matrix = final_matrix.data(), a.final_factor = final_factor.data(), a.final_rows = final_rows.data();
        a.final_row_keys = final_row_keys.data(), a.final_row_values = final_row_values.data();
        a.final_row_coefficient = final_row_coefficient.data();
    }
};

void fill(Draw &draw, std::vector<float> &array, int64_t size, double scale = 1, double shift = 0) {
    array.resize(size);
    for (float &x : array) x = float(scale * draw.normal() + shift);
}

// Lifetimes of a head that a memory of `states` states can have: a start ends at a boundary, when the list is full.
void live(Draw &draw, Call &call, int64_t n, int64_t h) {
    AttendArgs &a = call.args;
    std::vector<int32_t *> alive;
    for (int64_t s = 0; s < a.carried; ++s) {
        int32_t *ends = &call.initial_death[(n * a.heads + h) * a.carried + s];
        *ends = s < a.carried - 1 ? ALIVE : -1;
        if (*ends == ALIVE) alive.push_back(ends);
    }
    for (int64_t t = 0; t < call.length[n]; ++t) {
        int32_t *start = &call.death[(call.offset[n] + t) * a.heads + h];
        *start = -1;
        if (!alive.empty() && !draw.chance(0.3)) continue;
        if (int64_t(alive.size()) == a.states) {
            const int64_t i = a.states > 1 ? draw.whole(1, a.states - 1) : 0;
            *alive[i] = int32_t(call.origin[n] + t), alive.erase(alive.begin() + i);
        }
        *start = ALIVE, alive.push_back(start);
    }
}

// The states of a dynamic memory in pools: of each a matrix, or none, and some loose rows; the last of them is free.
void fill_pools(Draw &draw, Call &call, int64_t heads) {
    AttendArgs &a = call.args;
    a.carried = a.states, a.pool_matrices = heads * a.carried, a.places_room = 2 * a.carried;
    a.pool_rows = heads * a.places_room;
    fill(draw, call.initial, a.pool_matrices * a.dk * a.dv), fill(draw, call.factor, heads * a.carried);
    fill(draw, call.row_keys, a.pool_rows * a.dk), fill(draw, call.row_values, a.pool_rows * a.dv);
    fill(draw, call.row_coefficient, a.pool_rows), call.places.assign(a.pool_rows, 0);
    call.matrix.assign(heads * a.carried, -1), call.rows.assign(heads * a.carried, 0);
    for (int64_t i = 0; i < heads * a.carried; ++i) {
        if ((i + 1) % a.carried == 0) continue;
        if (draw.chance(0.7)) call.matrix[i] = int32_t(i);
        call.rows[i] = draw.whole(0, std::min<int64_t>(2, a.most_loose));
    }
    for (int64_t i = 0; i < a.pool_rows; ++i) call.places[i] = int32_t(draw.whole(0, a.pool_rows - 1));
}

void carry(Draw &draw, Call &call) {
    AttendArgs &a = call.args;
    const int64_t heads = a.sequences * a.heads;
    if (a.memory == Memory::dynamic) {
        fill_pools(draw, call, heads);
    } else {
        a.carried = a.memory == Memory::single ? 1 : 7;
        for (int64_t &seen : call.position) seen = a.memory == Memory::single ? 0 : draw.whole(0, 127);
        fill(draw, call.initial, heads * a.carried * a.dk * a.dv);
    }
    if (!call.route.empty()) fill(draw, call.initial_keys, heads * a.carried * a.dk);
    call.initial_death.assign(heads * a.carried, -1);
}

// Room for the state after the call.
void want_state(Call &call) {
    AttendArgs &a = call.args;
    const int64_t heads = a.sequences * a.heads, states = heads * a.states;
    call.final.assign(states * a.dk * a.dv, 0);
    if (!call.route.empty()) call.final_keys.assign(states * a.dk, 0);
    if (a.memory != Memory::dynamic) return;
    int64_t longest = 1;
    for (int64_t length : call.length) longest = std::max(longest, length);
    a.final_room = a.places_room + std::min((a.states + 1) * a.longest_short, longest);
    call.final_matrix.assign(states, 0), call.final_factor.assign(states, 0), call.final_rows.assign(states, 0);
    const int64_t rows = heads * a.final_room;
    call.final_row_keys.assign(rows * a.dk, 0), call.final_row_values.assign(rows * a.dv, 0);
    call.final_row_coefficient.assign(rows, 0);
}

// Steps of the delta rule: beta |k|^2 from 0 to 2.
void fill_steps(Draw &draw, Call &call) {
    const AttendArgs &a = call.args;
    call.beta.resize(a.tokens * a.heads);
    for (int64_t i = 0; i < a.tokens * a.heads; ++i) {
        const float *k = &call.k[i / a.heads * a.k_stride + i % a.heads / (a.heads / a.key_heads) * a.dk];
        double square = 1e-3;
        for (int64_t d = 0; d < a.dk; ++d) square += double(k[d]) * k[d];
        call.beta[i] = float(draw.whole(0, 20) / 10.0 / square);
    }
}

Call random_call(Draw &draw, bool carries) {
    Call call;
    AttendArgs &a = call.args;
    a.memory = Memory(draw.whole(0, 2)), a.sequences = draw.whole(0, 3), a.key_heads = draw.whole(1, 2);
    a.heads = a.key_heads * draw.whole(1, 3), a.threads = draw.whole(1, 4), a.scale = 0.5, a.recency = draw.whole(0, 1);
    a.dk = draw.of<int64_t>({1, 3, 8, 17, 32}), a.dv = draw.of<int64_t>({1, 4, 7, 16, 33});
    for (int64_t n = 0; n < a.sequences; ++n) {
        call.offset.push_back(a.tokens), call.length.push_back(draw.of<int64_t>({0, 1, 2, 9, 63, 64, 65, 130}));
        call.origin.push_back(draw.whole(0, 3)), a.tokens += call.length[n] + draw.whole(0, 1);
    }
    call.position.assign(a.sequences, 0);
    a.q_stride = a.k_stride = a.key_heads * a.dk, a.v_stride = a.heads * a.dv;
    const int64_t places = a.tokens * a.heads;
    fill(draw, call.q, a.tokens * a.q_stride), fill(draw, call.k, a.tokens * a.k_stride);
    fill(draw, call.v, a.tokens * a.v_stride), call.o.assign(places * a.dv, NAN);
    if (draw.chance(0.5)) fill(draw, call.g, places, 0.05, -0.1);
    if (draw.chance(0.5)) fill_steps(draw, call);
    if (a.memory != Memory::single) a.width = draw.whole(1, 10), fill(draw, call.lam, places * a.width, 0.3, 1);
    if (a.memory == Memory::dynamic && draw.chance(0.5)) fill(draw, call.route, places, 0.1, 2);
    const bool soft = !carries && a.memory == Memory::dynamic && draw.chance(0.5);
    for (int64_t i = 0; soft && i < places; ++i) call.gate.push_back(draw.chance(0.2) ? draw.whole(0, 1) : draw.share());
    a.states = a.memory == Memory::single ? 1 : a.memory == Memory::dynamic ? draw.whole(2, 5) : 9;
    if (a.memory == Memory::dynamic) a.longest_short = draw.whole(1, 9), a.most_loose = draw.whole(1, a.longest_short);
    call.death.assign(places, -1);
    if (carries) carry(draw, call);
    for (int64_t i = 0; a.memory == Memory::dynamic && i < a.sequences * a.heads; ++i)
        live(draw, call, i / a.heads, i % a.heads);
    if (!soft && draw.chance(0.5)) want_state(call);
    call.point();
    return call;
}

void compare(const Call &call, int64_t n, int64_t h) {
    const AttendArgs &a = call.args;
    Pairs pairs(a, n, h);
    for (int64_t t = 0; t < call.length[n]; ++t) {
        double size;
        const std::vector<double> o = pairs.output(t, size);
        for (int64_t j = 0; j < a.dv; ++j) {
            const float found = call.o[pairs.at(t) * a.dv + j];
            expect(std::fabs(found - o[j]) <= 1e-4 * (1 + size), "memory %ld, token %ld: %g instead of %g",
                   long(a.memory), long(t), found, o[j]);
        }
    }
}

struct Hostile {
    const char *name;
    std::function<void(Call &)> change;
};
#define SET(field, value) \
    { #field " = " #value, [](Call &c) { c.args.field = value; } }
#define PUT(array, value) \
    { #array " has " #value, [](Call &c) { c.array[c.array.size() / 2] = value; } }

const std::vector<Hostile> HOSTILE = {  // all of them must be refused
    SET(memory, Memory(-1)), SET(memory, Memory(3)), SET(tokens, -1), SET(tokens, INT64_MAX), SET(tokens, 1),
    SET(sequences, -1), SET(sequences, INT64_MAX), SET(heads, 0), SET(heads, -1), SET(heads, INT64_MAX),
    SET(key_heads, 0), SET(key_heads, 3), SET(dk, 0), SET(dk, INT64_MAX), SET(dv, -1), SET(dv, INT64_MIN),
    SET(q_stride, 0), SET(k_stride, -1), SET(v_stride, INT64_MIN), SET(width, -1), SET(width, 0),
    SET(width, INT64_MAX), SET(threads, 0), SET(threads, INT64_MIN), SET(carried, -1), SET(carried, INT64_MAX),
    SET(states, 0), SET(states, 1), SET(states, INT64_MIN), SET(offset, nullptr), SET(length, nullptr),
    SET(origin, nullptr), SET(q, nullptr), SET(k, nullptr), SET(v, nullptr), SET(lam, nullptr), SET(death, nullptr),
    SET(initial_death, nullptr), SET(initial, nullptr), SET(initial_keys, nullptr), SET(o, nullptr),
    SET(longest_short, 0), SET(longest_short, INT64_MAX), SET(most_loose, 0), SET(most_loose, INT64_MAX),
    SET(pool_matrices, -1), SET(pool_matrices, 0), SET(pool_rows, -1), SET(pool_rows, 0), SET(places_room, -1),
    SET(places_room, INT64_MAX), SET(final_room, -1), SET(final_room, 0), SET(final_room, INT64_MAX),
    SET(matrix, nullptr), SET(factor, nullptr), SET(rows, nullptr), SET(places, nullptr), SET(row_keys, nullptr),
    SET(row_values, nullptr), SET(row_coefficient, nullptr), SET(final_matrix, nullptr), SET(final_factor, nullptr),
    SET(final_rows, nullptr), SET(final_row_keys, nullptr), SET(final_row_values, nullptr),
    SET(final_row_coefficient, nullptr), PUT(matrix, -2), PUT(matrix, 12), PUT(matrix, INT32_MAX), PUT(rows, -1),
    PUT(rows, INT64_MAX), PUT(rows, 7),
    {"places outside of the pool", [](Call &c) { for (int32_t &place : c.places) place = 24; }},
    {"places before the pool", [](Call &c) { for (int32_t &place : c.places) place = -1; }},
    PUT(offset, -1), PUT(offset, INT64_MAX), PUT(offset, 71), PUT(length, -1), PUT(length, INT64_MAX),
    PUT(origin, -1), PUT(origin, INT32_MAX), PUT(origin, INT64_MAX),
    {"no start at all", [](Call &c) { for (auto *x : {&c.death, &c.initial_death}) for (int32_t &e : *x) e = -1; }},
    {"a start that ends before it begins",
     [](Call &c) { for (size_t i = 2; i < c.death.size(); ++i) c.death[i] = c.death[i] < 0 ? -1 : 0; }},
    {"an oldest start that ends", [](Call &c) { for (int32_t *ends = &c.initial_death[0]; *ends == ALIVE;) *ends = 5; }},
    {"a soft gate with states", [](Call &c) { c.args.gate = c.route.data(); }},
    {"a start at every token", [](Call &c) { for (int32_t &ends : c.death) ends = ALIVE; }},
};

// Two sequences of seventy tokens with a dynamic memory of three states, carried in and wanted after.
Call plain(Draw &draw) {
    Call call;
    AttendArgs &a = call.args;
    a.memory = Memory::dynamic, a.sequences = 2, a.tokens = 140, a.heads = 2, a.key_heads = 1, a.dk = 3, a.dv = 4;
    a.q_stride = a.k_stride = 3, a.v_stride = 8, a.width = 3, a.threads = 2, a.states = 3, a.scale = 1;
    a.longest_short = 4, a.most_loose = 2;
    call.offset = {0, 70}, call.length = {70, 70}, call.origin = {0, 0}, call.position = {0, 0};
    fill(draw, call.q, 420), fill(draw, call.k, 420), fill(draw, call.v, 1120), fill(draw, call.lam, 840);
    fill(draw, call.g, 280, 0.1, -0.2), fill(draw, call.route, 280), call.o.assign(1120, 0);
    call.death.assign(280, -1);
    carry(draw, call);
    want_state(call);
    for (int64_t i = 0; i < 4; ++i) live(draw, call, i / 2, i % 2);
    call.point();
    return call;
}

const Test valid("attend: random calls, against all pairs of tokens", [](Draw &draw) {
    for (int round = 0; round < 200; ++round) {
        Call call = random_call(draw, false);
        expect(call.run() == 0, "a valid call was refused");
        for (int64_t i = 0; i < call.args.sequences * call.args.heads; ++i)
            compare(call, i / call.args.heads, i % call.args.heads);
    }
});

const Test carried("attend: random calls that carry states in and out, with odd numbers", [](Draw &draw) {
    const std::vector<float> odd = {NAN, INFINITY, -INFINITY, 1e38f, 1e-44f, 0};
    for (int round = 0; round < 300; ++round) {
        Call call = random_call(draw, true);
        for (auto *array : {&call.q, &call.k, &call.v, &call.lam, &call.beta, &call.initial})
            while (!array->empty() && draw.chance(0.3)) (*array)[draw.whole(0, array->size() - 1)] = draw.of(odd);
        const int64_t answer = call.run();
        expect(answer == 0, "a call of memory %ld was refused: %ld", long(call.args.memory), long(answer));
    }
});

const Test hostile("attend: hostile numbers, sizes and pointers", [](Draw &draw) {
    for (const Hostile &wrong : HOSTILE) {
        Call call = plain(draw);
        expect(call.run() == 0, "the plain call was refused");
        wrong.change(call);
        expect(call.run() > 0, "%s: not refused", wrong.name);
    }
});

// Gradients of a call's outputs, with all their arrays.
struct Back {
    Call &call;
    BackwardArgs args;
    std::vector<float> d_o, d_q, d_k, d_v, d_lam, d_g, d_beta, d_route, d_gate;

    Back(Draw &draw, Call &of) : call(of) {
        AttendArgs &a = call.args;
        std::memset(&args, 0, sizeof args);
        args.attend = &a, args.parts = draw.whole(1, a.heads / a.key_heads);
        const int64_t heads = a.tokens * a.heads;
        fill(draw, d_o, heads * a.dv), d_v.assign(heads * a.dv, 0), d_lam.assign(heads * a.width, 0);
        for (auto *x : {&d_q, &d_k}) x->assign(args.parts * a.tokens * a.key_heads * a.dk, 0);
        d_g.assign(a.g ? heads : 0, 0), d_route.assign(a.route ? heads : 0, 0), d_gate.assign(a.gate ? heads : 0, 0);
        args.d_o = d_o.data(), args.d_q = d_q.data(), args.d_k = d_k.data(), args.d_v = d_v.data();
        args.d_lam = d_lam.data(), args.d_route = d_route.data(), args.d_gate = d_gate.data();
        d_beta.assign(a.beta ? heads : 0, NAN);  // all of it is written
        args.d_g = a.g ? d_g.data() : nullptr, args.d_beta = a.beta ? d_beta.data() : nullptr;
    }
    int64_t run() { return dla_backward(&args); }

    // Of one number of an array.
    void check(Pairs &pairs, const char *name, std::vector<double> &of, const std::vector<float> &found,
               int64_t at) {
        if (of.empty()) return;
        const double slope = pairs.slope(d_o, of[at]);
        expect(std::fabs(found[at] - slope) <= 2e-3 * (1 + std::fabs(slope)), "d_%s: %g instead of %g", name, found[at], slope);
    }
};

// One number of every input of a head that has its keys to itself.
void compare_gradients(Draw &draw, Back &back, int64_t n, int64_t h) {
    const AttendArgs &a = back.call.args;
    Pairs pairs(a, n, h);
    const int64_t t = draw.whole(0, a.length[n] - 1), at = pairs.at(t);
    const int64_t key = at * a.dk + draw.whole(0, a.dk - 1), value = at * a.dv + draw.whole(0, a.dv - 1);
    back.check(pairs, "q", pairs.q, back.d_q, key), back.check(pairs, "k", pairs.k, back.d_k, key);
    back.check(pairs, "v", pairs.v, back.d_v, value), back.check(pairs, "g", pairs.g, back.d_g, at);
    if (a.width) back.check(pairs, "lam", pairs.lam, back.d_lam, at * a.width + draw.whole(0, a.width - 1));
    back.check(pairs, "route", pairs.route, back.d_route, at), back.check(pairs, "beta", pairs.beta, back.d_beta, at);
    if (t && !back.d_gate.empty() && pairs.gate[at] > 0 && pairs.gate[at] < 1)
        back.check(pairs, "gate", pairs.gate, back.d_gate, at);
}

const Test slopes("backward: random calls, against differences of sums over all pairs", [](Draw &draw) {
    for (int round = 0; round < 120; ++round) {
        Call call = random_call(draw, false);
        Back back(draw, call);
        expect(back.run() == 0, "a valid call was refused");
        if (call.args.heads > call.args.key_heads || call.args.dk > 8 || call.args.dv > 16) continue;
        for (int64_t n = 0; n < call.args.sequences; ++n)
            if (call.length[n] && call.length[n] < 100) compare_gradients(draw, back, n, draw.whole(0, call.args.heads - 1));
    }
});

const Test odd_gradients("backward: random calls that carry states in, and odd numbers", [](Draw &draw) {
    const std::vector<float> odd = {NAN, INFINITY, -INFINITY, 1e38f, 1e-44f, 0, -3};
    for (int round = 0; round < 200; ++round) {
        Call call = random_call(draw, draw.chance(0.5));
        Back back(draw, call);
        for (auto *array : {&call.q, &call.k, &call.v, &call.lam, &call.route, &call.beta, &call.gate, &call.initial,
                            &back.d_o})
            while (!array->empty() && draw.chance(0.3)) (*array)[draw.whole(0, array->size() - 1)] = draw.of(odd);
        const int64_t answer = back.run();
        expect(answer == 0, "a call of memory %ld was refused: %ld", long(call.args.memory), long(answer));
    }
});

const Test hostile_gradients("backward: hostile numbers, sizes and pointers", [](Draw &draw) {
    const std::vector<std::pair<const char *, std::function<void(BackwardArgs &)>>> wrongs = {
        {"no call", [](BackwardArgs &b) { b.attend = nullptr; }},  {"parts 0", [](BackwardArgs &b) { b.parts = 0; }},
        {"parts -1", [](BackwardArgs &b) { b.parts = -1; }},       {"parts 3", [](BackwardArgs &b) { b.parts = 3; }},
        {"no d_o", [](BackwardArgs &b) { b.d_o = nullptr; }},      {"no d_q", [](BackwardArgs &b) { b.d_q = nullptr; }},
        {"no d_k", [](BackwardArgs &b) { b.d_k = nullptr; }},      {"no d_v", [](BackwardArgs &b) { b.d_v = nullptr; }},
        {"no d_lam", [](BackwardArgs &b) { b.d_lam = nullptr; }},  {"no d_route", [](BackwardArgs &b) { b.d_route = nullptr; }},
    };
    for (const auto &[name, change] : wrongs) {
        Call call = plain(draw);
        Back back(draw, call);
        expect(back.run() == 0, "the plain call was refused");
        change(back.args);
        expect(back.run() > 0, "%s: not refused", name);
    }
    for (const Hostile &wrong : HOSTILE) {
        Call call = plain(draw);
        Back back(draw, call);
        wrong.change(call);
        expect(back.run() > 0, "%s: not refused", wrong.name);
    }
    Call call = plain(draw);
    call.args.carried = call.args.places_room = 0, call.args.final = nullptr, call.args.gate = call.route.data();
    for (int64_t i = 0; i < 4; ++i) live(draw, call, i / 2, i % 2);
    Back back(draw, call);
    expect(back.run() == 0, "a soft gate was refused");
    call.args.beta = call.route.data();
    expect(back.run() > 0, "no place for the gradients of beta: not refused");
    call.args.beta = nullptr;
    back.args.d_gate = nullptr;
    expect(back.run() > 0, "no d_gate: not refused");
});

}  // namespace

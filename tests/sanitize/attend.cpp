// Drives outputs, final states and gradients: random calls, compared with all pairs of tokens, and hostile ones.
#include <cmath>
#include <cstring>

#include "../../src/dla/ops/cpu/args.h"
#include "drive.h"

extern "C" int64_t dla_attend(const AttendArgs *);
extern "C" int64_t dla_backward(const BackwardArgs *);

namespace {

// A call with all its arrays, each exactly as long as it has to be.
struct Call {
    AttendArgs args;
    std::vector<int64_t> offset, length, position, origin;
    std::vector<int64_t> rows, final_rows;
    std::vector<float> q, k, v, lam, g, route, beta, initial, initial_keys, o, final, final_keys;
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
        a.lam = maybe(lam), a.g = maybe(g), a.route = maybe(route), a.initial = maybe(initial);
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
    if (carries && a.memory == Memory::dynamic && draw.chance(0.5)) fill(draw, call.route, places, 0.1, 2);
    a.states = a.memory == Memory::single ? 1 : a.memory == Memory::dynamic ? draw.whole(2, 5) : 9;
    if (a.memory == Memory::dynamic) a.longest_short = draw.whole(1, 9), a.most_loose = draw.whole(1, a.longest_short);
    call.death.assign(places, -1);
    if (carries) carry(draw, call);
    for (int64_t i = 0; a.memory == Memory::dynamic && i < a.sequences * a.heads; ++i)
        live(draw, call, i / a.heads, i % a.heads);
    if (draw.chance(0.5)) want_state(call);
    call.point();
    return call;
}

// The weight of token s in the read of token t, both counted from the sequence's start, nothing carried in.
double weight(const Call &call, int64_t n, int64_t h, int64_t t, int64_t s) {
    const AttendArgs &a = call.args;
    if (a.memory == Memory::single) return 1;
    int64_t slot = 0, states = 0;
    if (a.memory == Memory::log_linear)
        for (int64_t apart = t ^ s; apart; apart >>= 1) ++slot;
    for (int64_t start = 0; a.memory == Memory::dynamic && start <= t; ++start) {
        const int32_t death = call.death[(call.offset[n] + start) * a.heads + h];
        if (death < 0 || (death != ALIVE && death - call.origin[n] <= t)) continue;
        if (start <= s) slot = states;  // the last start at or before s: its state
        ++states;
    }
    if (a.memory == Memory::dynamic && a.recency) slot = states - 1 - slot;
    return call.lam[((call.offset[n] + t) * a.heads + h) * a.width + std::min(slot, a.width - 1)];
}

void compare(const Call &call, int64_t n, int64_t h) {
    const AttendArgs &a = call.args;
    const int64_t key = h / (a.heads / a.key_heads);
    std::vector<std::vector<double>> keys;  // of all tokens so far, as they have become
    for (int64_t t = 0; t < call.length[n]; ++t) {
        std::vector<double> o(a.dv, 0);
        const int64_t now = call.offset[n] + t;
        const float *q = &call.q[now * a.q_stride + key * a.dk], *k = &call.k[now * a.k_stride + key * a.dk];
        const double fade = call.g.empty() ? 1 : std::exp(call.g[now * a.heads + h]);
        const double step = call.beta.empty() ? 0 : call.beta[now * a.heads + h];
        for (std::vector<double> &old : keys) {
            double there = 0;
            for (int64_t i = 0; i < a.dk; ++i) there += k[i] * old[i];
            for (int64_t i = 0; i < a.dk; ++i) old[i] = fade * (old[i] - step * there * k[i]);
        }
        keys.emplace_back(k, k + a.dk);
        for (double &x : keys.back()) x *= call.beta.empty() ? 1 : step;
        double size = 0;
        for (int64_t s = t; s >= 0; --s) {
            double product = 0, length = 0;
            for (int64_t i = 0; i < a.dk; ++i) product += q[i] * keys[s][i], length += std::fabs(q[i] * keys[s][i]);
            const double by = a.scale * weight(call, n, h, t, s);
            size += std::fabs(by) * length;
            const float *v = &call.v[(call.offset[n] + s) * a.v_stride + h * a.dv];
            for (int64_t j = 0; j < a.dv; ++j) o[j] += by * product * v[j];
        }
        for (int64_t j = 0; j < a.dv; ++j) {
            const float found = call.o[((call.offset[n] + t) * a.heads + h) * a.dv + j];
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

// Gradients by the C interface: arrays exactly as long as they have to be.
struct Gradients {
    BackwardArgs args;
    std::vector<float> d_o, q, k, v, lam, g, beta;

    Gradients(Draw &draw, Call &call) {
        std::memset(&args, 0, sizeof args);
        const AttendArgs &a = call.args;
        args.attend = &a, args.parts = draw.whole(1, a.heads / a.key_heads);
        fill(draw, d_o, a.tokens * a.heads * a.dv);
        q.assign(args.parts * a.tokens * a.key_heads * a.dk, 0), k = q, v.assign(d_o.size(), 0);
        lam.assign(call.lam.size(), 0), g.assign(call.g.size(), 0), beta.assign(call.beta.size(), NAN);
        args.d_o = d_o.data(), args.d_q = q.data(), args.d_k = k.data(), args.d_v = v.data(), args.d_lam = lam.data();
        args.d_g = g.empty() ? nullptr : g.data(), args.d_beta = beta.empty() ? nullptr : beta.data();
    }
};

double inner(const std::vector<float> &a, const std::vector<float> &b, double &size) {
    double total = 0;
    for (size_t i = 0; i < a.size(); ++i) total += double(a[i]) * b[i], size += std::fabs(double(a[i]) * b[i]);
    return total;
}

// Outputs are linear in the values, and in the weights: what both say about the loss is the loss.
const Test gradients("attend: gradients of random calls", [](Draw &draw) {
    for (int round = 0; round < 200; ++round) {
        Call call = random_call(draw, false);
        expect(call.run() == 0, "a valid call was refused");
        Gradients found(draw, call);
        expect(dla_backward(&found.args) == 0, "its gradients were refused");
        for (float &x : call.o) x = x == x ? x : 0;  // tokens of no sequence
        double size = 1;
        const double loss = inner(found.d_o, call.o, size), of_values = inner(found.v, call.v, size);
        expect(std::fabs(loss - of_values) <= 1e-5 * size, "memory %ld, values: %g instead of %g",
               long(call.args.memory), of_values, loss);
        const double of_weights = call.lam.empty() ? loss : inner(found.lam, call.lam, size);
        expect(std::fabs(loss - of_weights) <= 1e-5 * size, "weights: %g instead of %g", of_weights, loss);
        if (found.beta.empty() || !call.args.tokens) continue;
        found.args.d_beta = nullptr;
        expect(dla_backward(&found.args) > 0, "no place for the gradients of beta: not refused");
    }
    for (int round = 0; round < 100; ++round) {
        Call call = random_call(draw, true);
        if (!call.route.empty()) continue;
        Gradients found(draw, call);
        expect(dla_backward(&found.args) == 0, "gradients after a state were refused");
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

}  // namespace

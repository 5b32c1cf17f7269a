// Drives decisions by chunks: random calls, whose scores are compared with those of whole matrices, and hostile ones.
#include <cmath>
#include <cstring>

#include "../../src/dla/ops/cpu/args.h"
#include "drive.h"

extern "C" int64_t dla_decide(const DecideArgs *);

namespace {

const float FIRST = std::sqrt(2.0f);

// A call with all its arrays, each exactly as long as it has to be.
struct Call {
    DecideArgs args;
    std::vector<int64_t> offset, length, origin, size0, count0, position0;
    std::vector<float> k, v, g, beta, current, score;
    std::vector<double> info0;
    std::vector<uint8_t> boundary;
    std::vector<int32_t> death, initial_death;

    Call() { std::memset(&args, 0, sizeof args); }
    int64_t run() { return dla_decide(&args); }
    void point() {
        args.offset = offset.data(), args.length = length.data(), args.origin = origin.data();
        args.k = k.data(), args.v = v.data(), args.g = g.empty() ? nullptr : g.data(), args.current = current.data();
        args.beta = beta.empty() ? nullptr : beta.data();
        args.size0 = size0.data(), args.count0 = count0.data(), args.info0 = info0.data();
        args.position0 = position0.data(), args.score = score.data(), args.boundary = boundary.data();
        args.death = death.data(), args.initial_death = initial_death.data();
    }
};

void fill(Draw &draw, std::vector<float> &array, int64_t size, double scale = 1, double shift = 0) {
    array.resize(size);
    for (float &x : array) x = float(scale * draw.normal() + shift);
}

void carry(Draw &draw, Call &call, int64_t states) {
    DecideArgs &a = call.args;
    const int64_t heads = a.sequences * a.heads;
    a.carried = states;
    fill(draw, call.current, heads * a.dk * a.dv);
    call.count0.assign(heads * states, 0), call.info0.assign(heads * states, 0);
    call.initial_death.assign(heads * states, 77), call.size0.assign(heads, 0), call.position0.assign(a.sequences, 5);
    for (int64_t i = 0; i < heads; ++i) {
        call.size0[i] = draw.whole(0, states);
        for (int64_t s = i * states; s < i * states + call.size0[i]; ++s) call.count0[s] = 2, call.info0[s] = 0.5;
    }
}

// The delta rule, with keys of norm one and steps from 0 to 1, few of them at the ends.
void shorten(Draw &draw, Call &call) {
    const DecideArgs &a = call.args;
    for (int64_t at = 0; at < a.tokens * a.key_heads; ++at) {
        float *k = &call.k[at * a.dk];
        double square = 0;
        for (int64_t d = 0; d < a.dk; ++d) square += double(k[d]) * k[d];
        for (int64_t d = 0; d < a.dk; ++d) k[d] = float(k[d] / std::sqrt(square));
    }
    fill(draw, call.beta, a.tokens * a.heads);
    for (float &x : call.beta) x = draw.chance(0.05) ? 0 : draw.chance(0.02) ? 1 : 1 / (1 + std::exp(-x));
}

Call random_call(Draw &draw) {
    Call call;
    DecideArgs &a = call.args;
    a.sequences = draw.whole(0, 3), a.key_heads = draw.whole(1, 2), a.heads = a.key_heads * draw.whole(1, 3);
    a.dk = draw.of<int64_t>({1, 3, 8, 17, 32}), a.dv = draw.of<int64_t>({1, 4, 7, 16, 33});
    a.capacity = draw.of<int64_t>({0, 2, 3, 5}), a.block = draw.chance(0.2) ? draw.whole(1, 4) : 0;
    a.state_score = draw.whole(0, 1), a.threads = draw.whole(1, 4), a.tau = 1.2, a.tie = 1e-6, a.first_score = FIRST;
    for (int64_t n = 0; n < a.sequences; ++n) {
        call.offset.push_back(a.tokens), call.length.push_back(draw.of<int64_t>({0, 1, 2, 9, 63, 64, 65, 130}));
        call.origin.push_back(draw.whole(0, 3)), a.tokens += call.length[n] + draw.whole(0, 1);
    }
    a.k_stride = a.key_heads * a.dk, a.v_stride = a.heads * a.dv;
    const int64_t places = a.tokens * a.heads;
    fill(draw, call.k, a.tokens * a.k_stride), fill(draw, call.v, a.tokens * a.v_stride);
    if (draw.chance(0.5)) fill(draw, call.g, places, 0.1, -0.2);
    if (draw.chance(0.5)) shorten(draw, call);
    call.score.assign(places, 0), call.boundary.assign(places, 0), call.death.assign(places, -1);
    if (draw.chance(0.5)) carry(draw, call, a.capacity ? a.capacity : draw.whole(1, 4));
    call.point();
    return call;
}

// Scores of one head by whole matrices, at the boundaries that were decided, and the number of states alive.
void follow(const Call &call, int64_t n, int64_t h) {
    const DecideArgs &a = call.args;
    const int64_t at0 = n * a.heads + h, numbers = a.dk * a.dv;
    int64_t alive = a.carried ? call.size0[at0] : 0, position = a.carried ? call.position0[n] : 0;
    std::vector<double> S(numbers, 0), token(numbers);
    if (alive) S.assign(&call.current[at0 * numbers], &call.current[at0 * numbers] + numbers);
    auto inner = [](const std::vector<double> &x, const std::vector<double> &y) {
        double sum = 0;
        for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
        return sum;
    };
    for (int64_t t = call.offset[n]; t < call.offset[n] + call.length[n]; ++t, ++position) {
        const int64_t at = t * a.heads + h, key = h / (a.heads / a.key_heads);
        const float *k = &call.k[t * a.k_stride + key * a.dk], *v = &call.v[t * a.v_stride + h * a.dv];
        const double beta = call.beta.empty() ? 0 : call.beta[at];
        for (int64_t i = 0; i < numbers; ++i) token[i] = (a.beta ? beta : 1) * k[i / a.dv] * v[i % a.dv];
        std::vector<double> other = S;
        for (int64_t i = 0; a.state_score && i < numbers; ++i) other[i] += token[i];
        const std::vector<double> &left = a.state_score ? other : token;
        const double cos = inner(left, S) / std::sqrt(inner(left, left) * inner(S, S));
        const bool nothing = inner(token, token) == 0, of_nothing = inner(S, S) == 0;
        const double wanted = !alive ? FIRST : nothing ? 0 : of_nothing ? FIRST : std::sqrt(std::max(0.0, 2 - 2 * cos));
        expect(std::fabs(call.score[at] - wanted) < 5e-3, "score %g instead of %g", call.score[at], wanted);
        const bool opens = !alive || (a.block ? position % a.block == 0 : call.score[at] >= float(a.tau));
        expect(bool(call.boundary[at]) == opens, "the boundary of token %ld", long(t));
        expect((call.death[at] >= 0) == opens, "the start at token %ld", long(t));
        const double decay = call.g.empty() ? 1 : std::exp(call.g[at]);
        for (int64_t j = 0; j < a.dv; ++j) {
            double held = 0;  // S^T k
            for (int64_t d = 0; d < a.dk; ++d) held += S[d * a.dv + j] * k[d];
            for (int64_t d = 0; d < a.dk; ++d) S[d * a.dv + j] -= beta * k[d] * held;
        }
        for (int64_t i = 0; i < numbers; ++i) S[i] = (opens ? 0 : decay * S[i]) + token[i];
        alive += opens;
        if (a.capacity && alive > a.capacity) alive = a.capacity;
    }
    int64_t living = 0;
    for (int64_t s = 0; s < a.carried; ++s) living += call.initial_death[at0 * a.carried + s] == ALIVE;
    for (int64_t t = 0; t < call.length[n]; ++t) living += call.death[(call.offset[n] + t) * a.heads + h] == ALIVE;
    expect(living == alive, "%ld states live, not %ld", long(living), long(alive));
}

struct Hostile {
    const char *name;
    std::function<void(Call &)> change;
    bool refused;
};
#define SET(field, value) \
    { #field " = " #value, [](Call &c) { c.args.field = value; }, true }
#define PUT(array, value) \
    { #array " has " #value, [](Call &c) { c.array[c.array.size() / 2] = value; }, true }
#define MAY(field, value) \
    { #field " = " #value, [](Call &c) { c.args.field = value; }, false }

const std::vector<Hostile> HOSTILE = {
    SET(tokens, -1), SET(tokens, INT64_MAX), SET(tokens, 1), SET(sequences, -1), SET(sequences, INT64_MAX),
    SET(heads, 0), SET(heads, -2), SET(heads, INT64_MAX), SET(key_heads, 0), SET(key_heads, 3), SET(dk, 0),
    SET(dk, INT64_MAX), SET(dv, -1), SET(dv, INT64_MIN), SET(k_stride, 0), SET(k_stride, -1), SET(v_stride, INT64_MIN),
    SET(capacity, -1), SET(capacity, 1), SET(capacity, 2), SET(capacity, INT64_MAX), MAY(capacity, int64_t(1) << 31),
    SET(block, -1), MAY(block, INT64_MAX), SET(state_score, 2), SET(state_score, -1), SET(threads, 0),
    SET(threads, INT64_MIN), SET(carried, -1), SET(carried, 1), SET(carried, INT64_MAX), SET(offset, nullptr),
    SET(length, nullptr), SET(origin, nullptr), SET(k, nullptr), SET(v, nullptr), MAY(g, nullptr), MAY(beta, nullptr),
    SET(current, nullptr), SET(size0, nullptr), SET(count0, nullptr), SET(info0, nullptr), SET(position0, nullptr),
    SET(score, nullptr), SET(boundary, nullptr), SET(death, nullptr), SET(initial_death, nullptr),
    MAY(tau, NAN), MAY(tie, NAN), MAY(first_score, INFINITY),
    PUT(offset, -1), PUT(offset, INT64_MAX), PUT(offset, 71), PUT(length, -1), PUT(length, INT64_MAX),
    PUT(origin, -1), PUT(origin, INT32_MAX), PUT(origin, INT64_MAX), PUT(size0, -1), PUT(size0, 5),
    PUT(size0, INT64_MAX), PUT(position0, -1),
};

Call plain(Draw &draw) {
    Call call;
    DecideArgs &a = call.args;
    a.sequences = 2, a.tokens = 140, a.heads = 2, a.key_heads = 1, a.dk = 3, a.dv = 4, a.k_stride = 3, a.v_stride = 8;
    a.capacity = 4, a.threads = 2, a.tau = 0.5, a.tie = 1e-6, a.first_score = FIRST;
    call.offset = {0, 70}, call.length = {70, 70}, call.origin = {0, 0};
    fill(draw, call.k, 140 * 3), fill(draw, call.v, 140 * 8), fill(draw, call.g, 280, 0.1, -0.2);
    if (draw.chance(0.5)) fill(draw, call.beta, 280, 0.1, 0.3);
    call.score.assign(280, 0), call.boundary.assign(280, 0), call.death.assign(280, -1);
    carry(draw, call, 4);
    call.size0.assign(4, 4), call.count0.assign(16, 2);
    call.point();
    return call;
}

const Test valid("decide: random calls, against whole matrices", [](Draw &draw) {
    for (int round = 0; round < 300; ++round) {
        Call call = random_call(draw);
        expect(call.run() == 0, "a valid call was refused");
        for (int64_t i = 0; i < call.args.sequences * call.args.heads; ++i)
            follow(call, i / call.args.heads, i % call.args.heads);
    }
});

const Test hostile("decide: hostile numbers, sizes and pointers", [](Draw &draw) {
    for (const Hostile &wrong : HOSTILE) {
        Call call = plain(draw);
        expect(call.run() == 0, "the plain call was refused");
        wrong.change(call);
        const int64_t answer = call.run();
        expect(!wrong.refused || answer > 0, "%s: answered %ld", wrong.name, long(answer));
    }
});

const Test poison("decide: NaN, infinite and extreme inputs", [](Draw &draw) {
    const std::vector<float> odd = {NAN, INFINITY, -INFINITY, 1e38f, -1e38f, 1e-44f, 0};
    for (int round = 0; round < 200; ++round) {
        Call call = random_call(draw);
        for (auto *array : {&call.k, &call.v, &call.g, &call.beta, &call.current})
            while (!array->empty() && draw.chance(0.6)) (*array)[draw.whole(0, array->size() - 1)] = draw.of(odd);
        expect(call.run() == 0, "a call with odd numbers was refused");
    }
});

}  // namespace

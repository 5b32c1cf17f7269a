// Drives the scan. Its source is included, since the struct of its arguments is its own.
#include "../../src/dla/ops/cpu/scan.cpp"

#include <cstring>
#include <limits>

#include "drive.h"

namespace {

const double TIE = 1e-6, FIRST_SCORE = std::sqrt(2.0), TAU = 1.2;
const double NAN_ = std::numeric_limits<double>::quiet_NaN(), INF_ = std::numeric_limits<double>::infinity();
const int64_t HUGE_ = INT64_MAX, LARGE = int64_t(1) << 41;  // beyond all bounds, and beyond those of a size

// A call with all its arrays, each exactly as long as it has to be: a step beyond any of them is seen.
template <class T> struct Call {
    ScanArgs args;
    std::vector<int64_t> offset, length, origin, size0, count0, position0;
    std::vector<T> k, v, g, beta, current, matrices, score, state_k, state_v, norm;
    std::vector<double> info0;
    std::vector<uint8_t> boundary;
    std::vector<int32_t> death, initial_death;

    Call() { std::memset(&args, 0, sizeof args); }
    Call(const Call &other) { *this = other; }
    Call &operator=(const Call &other) {  // the pointers are to arrays of one's own
        args = other.args, offset = other.offset, length = other.length, origin = other.origin, size0 = other.size0;
        count0 = other.count0, position0 = other.position0, k = other.k, v = other.v, g = other.g, beta = other.beta;
        current = other.current, matrices = other.matrices, score = other.score, state_k = other.state_k;
        state_v = other.state_v, norm = other.norm, info0 = other.info0, boundary = other.boundary;
        death = other.death, initial_death = other.initial_death;
        point();
        return *this;
    }

    void point() {
        args.offset = offset.data(), args.length = length.data(), args.origin = origin.data();
        args.k = k.data(), args.v = v.data(), args.g = g.empty() ? nullptr : g.data();
        args.beta = beta.empty() ? nullptr : beta.data(), args.current = current.data();
        args.matrices = matrices.data(), args.size0 = size0.data(), args.count0 = count0.data();
        args.info0 = info0.data(), args.position0 = args.carried ? position0.data() : nullptr;
        args.score_io = score.data(), args.boundary_io = boundary.data(), args.death = death.data();
        args.initial_death = initial_death.data(), args.state_k = state_k.empty() ? nullptr : state_k.data();
        args.state_v = state_v.empty() ? nullptr : state_v.data(), args.norm = norm.empty() ? nullptr : norm.data();
    }

    int64_t run() const;
};
template <> int64_t Call<float>::run() const { return dla_scan_f32(&args); }
template <> int64_t Call<double>::run() const { return dla_scan_f64(&args); }

template <class T> std::vector<T> normal(Draw &draw, int64_t n, double scale = 1, double shift = 0) {
    std::vector<T> made(n);
    for (T &x : made) x = T(scale * draw.normal() + shift);
    return made;
}

// The states that every head carries in.
template <class T> void carry(Draw &draw, Call<T> &call) {
    ScanArgs &a = call.args;
    const int64_t heads = a.sequences * a.heads, numbers = a.dk * a.dv;
    a.carried = a.capacity ? a.capacity : draw.whole(1, 5);
    call.current = normal<T>(draw, heads * numbers), call.matrices = normal<T>(draw, heads * a.carried * numbers);
    call.count0.assign(heads * a.carried, 0), call.info0.assign(heads * a.carried, 0);
    call.initial_death.assign(heads * a.carried, 77);
    for (int64_t i = 0; i < heads; ++i) {
        call.size0.push_back(draw.whole(0, a.carried));
        for (int64_t s = 0; s < call.size0[i]; ++s) {
            call.count0[i * a.carried + s] = draw.whole(1, 9);
            call.info0[i * a.carried + s] = draw.whole(0, 100) / 50.0;
        }
        if (!call.size0[i]) continue;  // the newest state is the current one
        std::copy_n(&call.matrices[(i * a.carried + call.size0[i] - 1) * numbers], numbers, &call.current[i * numbers]);
    }
    for (int64_t n = 0; n < a.sequences; ++n) call.position0.push_back(draw.whole(0, 1000));
}

template <class T> Call<T> random_call(Draw &draw) {
    Call<T> call;
    ScanArgs &a = call.args;
    a.sequences = draw.whole(0, 4), a.key_heads = draw.whole(1, 3), a.heads = a.key_heads * draw.whole(1, 3);
    a.dk = draw.of<int64_t>({1, 2, 3, 5, 8, 17}), a.dv = draw.of<int64_t>({1, 2, 4, 7, 16, 65});
    a.capacity = draw.of<int64_t>({0, 2, 3, 5}), a.block = draw.chance(0.2) ? draw.whole(1, 4) : 0;
    a.merge = Merge(draw.whole(0, 2)), a.score = Score(draw.whole(0, 1)), a.decide = draw.chance(0.9);
    a.threads = draw.whole(1, 4), a.tau = TAU, a.tie = TIE, a.first_score = FIRST_SCORE;
    for (int64_t n = 0; n < a.sequences; ++n) {
        call.offset.push_back(a.tokens), call.length.push_back(draw.whole(0, 12));
        call.origin.push_back(draw.whole(0, 3)), a.tokens += call.length[n] + draw.whole(0, 1);
    }
    const int64_t places = a.tokens * a.heads;
    call.k = normal<T>(draw, a.tokens * a.key_heads * a.dk), call.v = normal<T>(draw, places * a.dv);
    if (draw.chance(0.1)) std::fill(call.k.begin(), call.k.end(), T(0));
    if (draw.chance(0.5)) call.g = normal<T>(draw, places, 0.2, -0.3);
    if (draw.chance(0.5)) call.beta = normal<T>(draw, places, 0.1, 0.2);
    call.score.assign(places, T(0.5)), call.boundary.assign(places, 0), call.death.assign(places, -1);
    for (uint8_t &given : call.boundary) given = draw.chance(0.3);
    if (draw.chance(0.5)) carry(draw, call);
    if (draw.chance(0.3))
        call.state_k.resize(places * a.dv), call.state_v.resize(places * a.dk), call.norm.resize(places);
    call.point();
    return call;
}

// The same, by the definition: whole matrices, one state after another. It follows the scan's decisions and looks
// whether each was one that the numbers allow.
struct Naive {
    const Call<double> &call;
    const ScanArgs &a;
    int64_t n, h;
    struct State {
        std::vector<double> S;
        double count, info;
        const int32_t *death;
    };
    std::vector<State> states;

    Naive(const Call<double> &made, int64_t sequence, int64_t head)
        : call(made), a(made.args), n(sequence), h(head) {
        const int64_t at = n * a.heads + h, numbers = a.dk * a.dv;
        for (int64_t s = 0; a.carried && s < call.size0[at]; ++s) {
            const double *S = &call.matrices[(at * a.carried + s) * numbers];
            states.push_back({{S, S + numbers}, double(call.count0[at * a.carried + s]),
                              call.info0[at * a.carried + s], &call.initial_death[at * a.carried + s]});
        }
    }

    static double inner(const std::vector<double> &x, const std::vector<double> &y) {
        double sum = 0;
        for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
        return sum;
    }
    static double norm(const std::vector<double> &x) { return std::sqrt(inner(x, x)); }
    static double angle(const std::vector<double> &x, const std::vector<double> &y) {
        if (norm(x) == 0 || norm(y) == 0) return FIRST_SCORE;
        return std::sqrt(2 - 2 * std::max(-1.0, std::min(1.0, inner(x, y) / norm(x) / norm(y))));
    }

    double score(const std::vector<double> &token) const {
        if (states.empty()) return FIRST_SCORE;
        if (norm(token) == 0) return 0;
        std::vector<double> sum = states.back().S;
        if (norm(sum) == 0) return FIRST_SCORE;
        if (a.score == Score::token) return angle(token, sum);
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += token[i];
        return angle(sum, states.back().S);
    }

    void transition(const double *k, double decay, double beta) {
        for (State &state : states)
            for (int64_t j = 0; j < a.dv; ++j) {
                double read = 0;
                for (int64_t i = 0; i < a.dk; ++i) read += k[i] * state.S[i * a.dv + j];
                for (int64_t i = 0; i < a.dk; ++i)
                    state.S[i * a.dv + j] = decay * (state.S[i * a.dv + j] - beta * k[i] * read);
            }
    }

    double cost(size_t i) const {
        const State &x = states[i], &y = states[i + 1];
        if (a.merge == Merge::density) return (x.info + y.info) / (x.count + y.count);
        const double nx = norm(x.S), ny = norm(y.S);
        if (a.merge == Merge::similarity) return nx == 0 || ny == 0 ? 0 : -inner(x.S, y.S) / nx / ny;
        const double gap = nx * nx / x.count / x.count + ny * ny / y.count / y.count -
                           2 * inner(x.S, y.S) / x.count / y.count;
        return std::max(gap, 0.0) * x.count * y.count / (x.count + y.count);
    }

    // Exactly one state ended at this step; its pair is about the cheapest one.
    void merge(int64_t step) {
        size_t found = 0, ended = 0;
        for (size_t i = 0; i < states.size(); ++i)
            if (*states[i].death == step) found = i, ++ended;
        expect(ended == 1 && found > 0, "%zu states ended at step %lld", ended, (long long)step);
        double least = INF_, largest = 0;
        for (size_t i = 0; i + 1 < states.size(); ++i)
            least = std::min(least, cost(i)), largest = std::max(largest, std::fabs(cost(i)));
        expect(cost(found - 1) <= least + 2 * TIE * largest + 1e-9, "a dear pair: %g > %g", cost(found - 1), least);
        State &into = states[found - 1], &from = states[found];
        for (size_t i = 0; i < into.S.size(); ++i) into.S[i] += from.S[i];
        into.count += from.count, into.info += from.info;
        states.erase(states.begin() + found);
    }

    void follow(int64_t t, int64_t position) {
        const int64_t at = t * a.heads + h, step = call.origin[n] + t - call.offset[n];
        const double *k = &call.k[(t * a.key_heads + h / (a.heads / a.key_heads)) * a.dk], *v = &call.v[at * a.dv];
        const double beta = call.beta.empty() ? 1 : call.beta[at];
        std::vector<double> token(a.dk * a.dv);
        for (int64_t i = 0; i < a.dk; ++i)
            for (int64_t j = 0; j < a.dv; ++j) token[i * a.dv + j] = beta * k[i] * v[j];
        const double wanted = score(token), given = call.score[at];
        expect(std::fabs(wanted - given) < 1e-5, "score %.9g instead of %.9g", given, wanted);
        const bool opens = states.empty() || (a.block ? position % a.block == 0 : given >= a.tau);
        expect(bool(call.boundary[at]) == opens, "the boundary of token %lld", (long long)t);
        transition(k, call.g.empty() ? 1 : std::exp(call.g[at]), call.beta.empty() ? 0 : beta);
        expect((call.death[at] >= 0) == opens, "a death without a boundary");
        if (opens) {
            if (a.capacity && int64_t(states.size()) == a.capacity) merge(step);
            states.push_back({token, 1, given, &call.death[at]});
            return;
        }
        for (size_t i = 0; i < token.size(); ++i) states.back().S[i] += token[i];
        states.back().count += 1, states.back().info += given;
    }

    void run() {
        int64_t position = a.carried ? call.position0[n] : 0;
        for (int64_t t = call.offset[n]; t < call.offset[n] + call.length[n]; ++t) follow(t, position++);
        for (const State &state : states) expect(*state.death == ALIVE, "a state that lives has ended");
    }
};

// Every number that is indexed or counted by, far from what it may be; what the scan must answer.
struct Hostile {
    const char *name;
    std::function<void(Call<float> &)> change;
    int64_t answer;
};

#define SET(field, value, answer) \
    { #field " = " #value, [](Call<float> &c) { c.args.field = value; }, answer }
#define PUT(array, value, answer) \
    { #array " has " #value, [](Call<float> &c) { c.array[c.array.size() / 2] = value; }, answer }

const std::vector<Hostile> HOSTILE = {
    SET(merge, Merge(-1), 1), SET(merge, Merge(3), 1), SET(merge, Merge(HUGE_), 1),
    SET(score, Score(-1), 2), SET(score, Score(2), 2), SET(score, Score(INT64_MIN), 2),
    SET(tokens, -1, 3), SET(tokens, INT64_MIN, 3), SET(tokens, HUGE_, 3), SET(tokens, 1, 5), SET(tokens, 0, 5),
    SET(sequences, -1, 3), SET(sequences, INT64_MIN, 3), SET(sequences, HUGE_, 3), SET(sequences, 0, 0),
    SET(heads, 0, 3), SET(heads, -2, 3), SET(heads, HUGE_, 3), SET(heads, HUGE_ / 2 + 1, 3), SET(heads, LARGE, 3),
    SET(key_heads, 0, 3), SET(key_heads, -1, 3), SET(key_heads, 5, 3), SET(key_heads, HUGE_, 3),
    SET(dk, 0, 3), SET(dk, -4, 3), SET(dk, HUGE_, 3), SET(dk, LARGE, 3), SET(dv, 0, 3), SET(dv, INT64_MIN, 3),
    SET(dv, HUGE_, 3), SET(dv, LARGE, 3), SET(threads, 0, 3), SET(threads, -1, 3), SET(threads, INT64_MIN, 3),
    SET(threads, HUGE_, 0), SET(block, -1, 3), SET(block, HUGE_, 0), SET(block, INT64_MIN, 3),
    SET(capacity, -1, 3), SET(capacity, 1, 3), SET(capacity, 2, 6), SET(capacity, HUGE_, 3),
    SET(capacity, LARGE / 2, 0), SET(carried, -1, 3), SET(carried, 1, 6), SET(carried, HUGE_, 3),
    SET(carried, LARGE, 3), SET(offset, nullptr, 4), SET(length, nullptr, 4), SET(origin, nullptr, 4),
    SET(k, nullptr, 4), SET(v, nullptr, 4), SET(current, nullptr, 4), SET(matrices, nullptr, 4),
    SET(size0, nullptr, 4), SET(count0, nullptr, 4), SET(info0, nullptr, 4), SET(position0, nullptr, 4),
    SET(score_io, nullptr, 4), SET(boundary_io, nullptr, 4), SET(death, nullptr, 4), SET(initial_death, nullptr, 4),
    SET(state_k, nullptr, 4), SET(state_v, nullptr, 4), SET(norm, nullptr, 4),
    SET(g, nullptr, 0), SET(beta, nullptr, 0), SET(tau, NAN_, 0), SET(tau, -INF_, 0), SET(tie, NAN_, 0),
    SET(first_score, INF_, 0),
    PUT(offset, -1, 5), PUT(offset, HUGE_, 5), PUT(offset, INT64_MIN, 5), PUT(offset, 10, 5),
    PUT(offset, 4, 5), PUT(offset, 0, 5),  // sequences that lie on each other
    PUT(length, -1, 5), PUT(length, HUGE_, 5), PUT(length, 11, 5), PUT(length, 0, 0),
    PUT(origin, -1, 5), PUT(origin, HUGE_, 5), PUT(origin, INT32_MAX, 5), PUT(origin, INT64_MIN, 5),
    PUT(size0, -1, 6), PUT(size0, 5, 6), PUT(size0, HUGE_, 6), PUT(size0, INT64_MIN, 6), PUT(size0, 0, 0),
    PUT(count0, -1, 6), PUT(count0, HUGE_, 6), PUT(count0, INT64_MIN, 6), PUT(count0, 0, 0),
    PUT(position0, -1, 6), PUT(position0, HUGE_, 6), PUT(info0, NAN_, 0), PUT(info0, -INF_, 0),
};

// Two sequences of five tokens, two heads, four states carried in by each.
Call<float> plain(Draw &draw) {
    Call<float> call;
    ScanArgs &a = call.args;
    a.sequences = 2, a.tokens = 10, a.heads = 2, a.key_heads = 1, a.dk = 3, a.dv = 4, a.capacity = 4, a.decide = 1;
    a.merge = Merge::ward, a.threads = 2, a.tau = 0.5, a.tie = TIE, a.first_score = FIRST_SCORE;
    call.offset = {0, 5}, call.length = {5, 5}, call.origin = {0, 0};
    call.k = normal<float>(draw, 30), call.v = normal<float>(draw, 80), call.g = normal<float>(draw, 20);
    call.beta = normal<float>(draw, 20), call.score.assign(20, 0), call.boundary.assign(20, 0);
    call.death.assign(20, -1), call.state_k.resize(80), call.state_v.resize(60), call.norm.resize(20);
    carry(draw, call);
    call.size0.assign(4, 4), call.count0.assign(16, 2);
    call.point();
    return call;
}

const Test valid("scan: random calls, against whole matrices", [](Draw &draw) {
    for (int round = 0; round < 3000; ++round) {
        Call<double> call = random_call<double>(draw);
        expect(call.run() == 0, "a valid call was refused");
        for (int64_t i = 0; call.args.decide && i < call.args.sequences * call.args.heads; ++i)
            Naive(call, i / call.args.heads, i % call.args.heads).run();
    }
});

const Test single("scan: random calls in float32, the same with any number of threads", [](Draw &draw) {
    for (int round = 0; round < 1000; ++round) {
        Call<float> one = random_call<float>(draw), other = one;
        one.args.threads = 1, other.args.threads = 4;
        expect(one.run() == 0 && other.run() == 0, "a valid call was refused");
        expect(one.death == other.death && one.boundary == other.boundary && one.score == other.score, "threads");
    }
});

const Test hostile("scan: hostile numbers, sizes and pointers", [](Draw &draw) {
    for (const Hostile &wrong : HOSTILE) {
        Call<float> call = plain(draw);
        expect(call.run() == 0, "the plain call was refused");
        wrong.change(call);
        const int64_t answer = call.run();
        expect(answer == wrong.answer, "%s: answered %lld instead of %lld", wrong.name, (long long)answer,
               (long long)wrong.answer);
    }
    expect(dla_scan_f32(nullptr) == 4 && dla_scan_f64(nullptr) == 4, "no arguments at all");
});

const Test pairs("scan: two hostile numbers at once", [](Draw &draw) {
    for (int round = 0; round < 3000; ++round) {
        Call<float> call = plain(draw);
        const Hostile &one = draw.of(HOSTILE), &other = draw.of(HOSTILE);
        one.change(call), other.change(call);
        call.run();  // no more is asked than that it ends
    }
});

const Test poison("scan: NaN, infinite and extreme inputs", [](Draw &draw) {
    const std::vector<double> odd = {NAN_, INF_, -INF_, 1e300, -1e300, 1e-320, 1e38, 0};
    for (int round = 0; round < 2000; ++round) {
        Call<double> call = random_call<double>(draw);
        for (auto *array : {&call.k, &call.v, &call.g, &call.beta, &call.current, &call.matrices, &call.info0})
            while (!array->empty() && draw.chance(0.5)) (*array)[draw.whole(0, array->size() - 1)] = draw.of(odd);
        expect(call.run() == 0, "a call with odd numbers was refused");
    }
});

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which end the program where memory ends
const Test memory("scan: more than memory holds", [](Draw &draw) {
    Call<float> call = plain(draw);
    call.args.dk = 1 << 20, call.args.dv = 1 << 19;  // no array is touched before the first state is made
    call.args.carried = 0, call.args.sequences = 1, call.args.heads = 1;
    expect(call.run() == 7, "two terabytes were found");
});
#endif

}  // namespace

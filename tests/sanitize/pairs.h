// The second stage in double, from all pairs of tokens, for sequences that begin with nothing: what kernels must agree with.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "../../src/dla/ops/cpu/args.h"

struct Pairs {
    const AttendArgs &a;
    const int64_t n, h, key;
    std::vector<double> q, k, v, lam, g, route, beta, gate;  // of all tokens, as the arguments have them; may be changed

    Pairs(const AttendArgs &args, int64_t sequence, int64_t head)
        : a(args), n(sequence), h(head), key(head / (args.heads / args.key_heads)) {
        copy(q, a.q, a.tokens * a.q_stride), copy(k, a.k, a.tokens * a.k_stride), copy(v, a.v, a.tokens * a.v_stride);
        copy(lam, a.lam, a.tokens * a.heads * a.width), copy(g, a.g, a.tokens * a.heads);
        copy(route, a.route, a.tokens * a.heads), copy(beta, a.beta, a.tokens * a.heads), copy(gate, a.gate, a.tokens * a.heads);
    }
    static void copy(std::vector<double> &to, const float *from, int64_t size) {
        if (from) to.assign(from, from + size);
    }
    int64_t at(int64_t t) const { return (a.offset[n] + t) * a.heads + h; }
    double *query(int64_t t) { return &q[(a.offset[n] + t) * a.q_stride + key * a.dk]; }
    double *keys(int64_t t) { return &k[(a.offset[n] + t) * a.k_stride + key * a.dk]; }
    double *value(int64_t t) { return &v[(a.offset[n] + t) * a.v_stride + h * a.dv]; }

    bool opens(int64_t t) const { return a.death[at(t)] >= 0; }
    bool lives(int64_t start, int64_t t) const {
        const int32_t death = a.death[at(start)];
        return death >= 0 && (death == ALIVE || death - a.origin[n] > t);
    }

    // The weight, at time t, of the state that token s is in.
    double of_state(int64_t t, int64_t s) {
        int64_t slot = -1, states = 0, from = 0, to = t + 1;
        for (int64_t start = 0; start <= t; ++start) {
            if (!lives(start, t)) continue;
            if (start <= s) slot = states, from = start;
            else to = std::min(to, start);
            ++states;
        }
        if (a.recency) slot = states - 1 - slot;
        const double weight = lam[at(t) * a.width + std::min(slot, a.width - 1)];
        return route.empty() ? weight : weight * std::exp(route[at(t)] * (cosine(t, from, to) - 1));
    }
    double cosine(int64_t t, int64_t from, int64_t to) {
        double both = 0, squares = 0, square = 0;
        for (int64_t d = 0; d < a.dk; ++d) {
            double sum = 0;
            for (int64_t s = from; s < to; ++s) sum += keys(s)[d];
            both += sum * query(t)[d], squares += sum * sum, square += query(t)[d] * query(t)[d];
        }
        return both / (std::max(std::sqrt(squares), 1e-6) * std::max(std::sqrt(square), 1e-6));
    }

    double weight(int64_t t, int64_t s) {
        if (a.memory == Memory::single) return 1;
        if (a.memory == Memory::log_linear) {
            int64_t level = 0;
            for (int64_t apart = t ^ s; apart; apart >>= 1) ++level;
            return lam[at(t) * a.width + std::min(level, a.width - 1)];
        }
        if (gate.empty()) return of_state(t, s);
        int64_t next = s;  // the boundary that what is pending waits for
        while (next < t && !opens(next)) ++next;
        const double p = s ? gate[at(s)] : 1;
        return (s ? (1 - p) * of_state(t, s - 1) : 0) + p * of_state(t, next);
    }

    // The output of token t; `size` is how large it would be if nothing cancelled. With the delta rule the query goes back
    // through the steps of the tokens that it passes.
    std::vector<double> output(int64_t t, double &size) {
        std::vector<double> o(a.dv, 0), q_back(query(t), query(t) + a.dk);
        double decay = 0;
        size = 0;
        for (int64_t s = t; s >= 0; --s) {
            double product = 0, length = 0;
            for (int64_t i = 0; i < a.dk; ++i) product += q_back[i] * keys(s)[i], length += std::fabs(q_back[i] * keys(s)[i]);
            const double step = beta.empty() ? 1 : beta[at(s)], by = step * a.scale * weight(t, s) * std::exp(decay);
            size += std::fabs(by) * length;
            for (int64_t j = 0; j < a.dv; ++j) o[j] += by * product * value(s)[j];
            for (int64_t i = 0; !beta.empty() && i < a.dk; ++i) q_back[i] -= step * product * keys(s)[i];
            if (!g.empty()) decay += g[at(s)];
        }
        return o;
    }

    // The sum of all outputs, each times its d_o.
    double loss(const std::vector<float> &d_o) {
        double total = 0, size;
        for (int64_t t = 0; t < a.length[n]; ++t) {
            const std::vector<double> o = output(t, size);
            for (int64_t j = 0; j < a.dv; ++j) total += o[j] * d_o[at(t) * a.dv + j];
        }
        return total;
    }

    // Its derivative with respect to one of the numbers.
    double slope(const std::vector<float> &d_o, double &number) {
        const double before = number, step = 1e-4;
        number = before + step;
        const double above = loss(d_o);
        number = before - step;
        const double below = loss(d_o);
        number = before;
        return (above - below) / (2 * step);
    }
};

// The first stage for one head with the delta rule, S <- e^g (I - beta k k^T) S + beta k v^T.
//
// In a state that began with a zero matrix this is S <- e^g S + k w^T with w = beta (v - e^g S^T k), so a token is
// still one row of the current state: not its value, but what was new of it. S^T k is a sum over the rows since the
// state began and, if that was before this chunk, a product with the matrix. The norm follows from the same numbers,
// |S|^2 <- e^2g |S|^2 + 2 e^g (S^T k) . w + |k|^2 |w|^2, and is measured where little is left of what there was.
#pragma once
#include "decide.h"

namespace {

constexpr double MOST_PARTS = 16;    // squares of what a state is the sum of, over its own, before it is measured
constexpr double LEAST_LEFT = 1e-3;  // of a norm that is not measured yet

struct DeltaHead : Deciding<DeltaHead> {
    float *seen;              // [dvp] S^T k_t over the norms of both
    double beta[CHUNK];
    double parts = 1;         // squares of the norms of matrix and rows, over that of their sum
    int64_t looked_from = 0;  // the token of the first row of `read`

    DeltaHead(const DecideArgs &a, int64_t sequence, int64_t head, Arena &arena) : Deciding(a, sequence, head, arena) {
        rows = arena.floats(CHUNK * dvp), seen = arena.floats(dvp);
    }

    void prepare(int64_t first) {
        for (int64_t t = 0; t < m; ++t) beta[t] = args.beta[(first + t) * args.heads + h];
    }
    void looked(int64_t t, int64_t) { looked_from = t; }
    double sign(int64_t t) const { return beta[t] < 0 ? -1 : 1; }
    double token(int64_t t) const { return fabs(beta[t]) * keys.norm[t] * norm_v[t]; }
    void started(int64_t t) {
        for (int64_t j = 0; j < dvp; j += LANES) store(rows + t * dvp + j, load(unit + t * dvp + j) * float(sign(t)));
        parts = 1;
    }
    void folded() { parts = 1; }

    double product_with_state(int64_t t) {
        float by_row[CHUNK];
        for (int64_t s = begin_own / LANES * LANES; s < t; s += LANES)
            store(by_row + s, load(weight + s) * load(keys.gram + t * CHUNK + s));
        product<Into::set>(1, dvp, t - begin_own, by_row + begin_own, 0, 1, rows + begin_own * dvp, dvp, seen, dvp);
        if (carried != 0) {
            const float *back = read + (t - looked_from) * dvp;
            for (int64_t j = 0; j < dvp; j += LANES) store(seen + j, load(seen + j) + load(back + j) * carried);
        }
        return dot_of(seen, unit + t * dvp);
    }

    // Row t becomes `written` times the token's value without `erased` times what the state holds at its key, both over
    // the larger, which is returned.
    double write_row(int64_t t, double written, double erased) {
        const double more = fabs(erased) > fabs(written) ? fabs(erased) : fabs(written);
        const double over = more == 0 ? 0 : 1 / more;
        const float a = float(written * over), b = float(erased * over);
        for (int64_t j = 0; j < dvp; j += LANES)
            store(rows + t * dvp + j, load(unit + t * dvp + j) * a - load(seen + j) * b);
        return more;
    }

    void join(int64_t t, double) {
        const double before = decay[t] * norm, written = beta[t] * keys.norm[t] * norm_v[t];
        if (norm == 0) memset(seen, 0, dvp * 4);
        const double row = write_row(t, written, beta[t] * keys.norm[t] * keys.norm[t] * before);
        const double along = dot_of(rows + t * dvp, seen);
        const double square_of_row = row * row * dot_of(rows + t * dvp, rows + t * dvp);
        const double square = before * before + 2 * before * row * along + square_of_row;
        const double apart = parts * before * before + square_of_row;  // the parts, if they were at right angles
        double after = sqrt(square < LEAST_LEFT * LEAST_LEFT * apart ? LEAST_LEFT * LEAST_LEFT * apart : square);
        if (float(after) == 0) after = 0;
        const double over = after == 0 ? 0 : 1 / after;
        reweigh(t, float(before * over), float(row * over));
        norm = after, parts = apart * over * over;
        if (parts > MOST_PARTS) rebase(t + 1);
    }
};

}  // namespace

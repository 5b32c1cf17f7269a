// The delta rule: every token first takes out of every state what that state holds at its key.
//
// With A_t = I - beta_t k_t k_t^T (decays are numbers, and stay apart as in chunk.h), a chunk of m tokens does to a state S
//
//     S <- A_m ... A_1 S + sum_s A_m ... A_(s+1) beta_s k_s v_s^T  =  S - H^T (K S) + H^T V
//
// where U = (I + L)^-1 diag(beta), L[t][s] = beta_t k_t . k_s for s < t, and row s of H = U^T K is the key that token s
// leaves at the chunk's end. What token s gives to query t is the product of (tril(Q K^T) U)[t][s], and a state at the
// chunk's start is read with the rows of Q - tril(Q K^T) U K. So all memories read and fold as without beta, with these
// in place of queries, products and keys, and only what was there before the chunk has to be moved over it.
#pragma once
#include "chunk.h"

namespace {

INLINE Ints lanes() {
    Ints made;
    for (int i = 0; i < LANES; ++i) made[i] = i;
    return made;
}

// What the transitions of one head make of a chunk's queries and keys.
struct Delta {
    const int64_t dk, dkp;
    float *U;  // [CHUNK][CHUNK] U[t][s]
    float *S;  // [CHUNK][CHUNK] products by token and query, zero for s > t
    float *Q;  // [dkp][CHUNK] queries of states at the chunk's start
    float *H;  // [CHUNK][dkp] keys at the chunk's end
    float *masked;    // [CHUNK][CHUNK] products with plain queries, zero for s > t
    float *negative;  // [CHUNK][CHUNK] -S

    Delta(const AttendArgs &a, Arena &arena) : dk(a.dk), dkp(padded(a.dk)) {
        U = arena.floats(CHUNK * CHUNK), S = arena.floats(CHUNK * CHUNK), masked = arena.floats(CHUNK * CHUNK);
        negative = arena.floats(CHUNK * CHUNK), Q = arena.floats(dkp * CHUNK), H = arena.floats(CHUNK * dkp);
        if (Q) memset(Q, 0, dkp * CHUNK * 4);
    }

    // beta: of the chunk's tokens, `stride` apart; reads: whether products and queries are wanted too. Returns whether all
    // is finite; if not, no token reaches earlier ones.
    bool fill(const Shared &shared, int64_t m, const float *beta, int64_t stride, bool reads = true) {
        solve(shared.KK, m, beta, stride);
        const bool finite = finite_rows(U, CHUNK, m, m) && *shared.finite != 0;
        if (reads) meet_queries(shared, m, finite);
        for (int64_t s = 0; s < m; s += STEP)
            product<Into::set>(m - s < STEP ? m - s : STEP, dkp, m - s, U + s * CHUNK + s, 1, CHUNK,
                               shared.K + s * dkp, dkp, H + s * dkp, dkp);
        return finite;
    }

    void meet_queries(const Shared &shared, int64_t m, bool finite) {
        const Ints lane = lanes();
        for (int64_t s = 0; s < CHUNK; ++s)
            for (int64_t t = 0; t < CHUNK; t += LANES) {
                const bool there = s < m && t >= s / STEP * STEP;
                const Vec x = there ? load(shared.S + s * CHUNK + t) : Vec{};
                store(masked + s * CHUNK + t, (Vec)((Ints)x & (lane + int32_t(t) >= int32_t(s))));
            }
        memcpy(Q, shared.Q, dk * CHUNK * 4);
        if (finite) meet(shared, m);
        else meet_apart(shared, m);
    }

    // U by forward substitution, row by row; zero above the diagonal.
    void solve(const float *KK, int64_t m, const float *beta, int64_t stride) {
        memset(U, 0, CHUNK * CHUNK * 4);
        for (int64_t t = 0; t < m; ++t) {
            float *row = U + t * CHUNK;
            row[t] = beta[t * stride];
            for (int64_t s = 0; s < t; ++s) {
                const float by = beta[t * stride] * KK[s * CHUNK + t];
                for (int64_t c = 0; c <= s; c += LANES) store(row + c, load(row + c) - load(U + s * CHUNK + c) * by);
            }
        }
    }

    // S = U^T masked and Q -= K^T S, by products of whole vectors of times
    void meet(const Shared &shared, int64_t m) {
        memset(S, 0, CHUNK * CHUNK * 4);
        for (int64_t s = 0; s < m; s += STEP)
            product<Into::set>(m - s < STEP ? m - s : STEP, CHUNK - s, m - s, U + s * CHUNK + s, 1, CHUNK,
                               masked + s * CHUNK + s, CHUNK, S + s * CHUNK + s, CHUNK);
        for (int64_t i = 0; i < m * CHUNK; i += LANES) store(negative + i, -load(S + i));
        product<Into::fade>(dk, padded(m), m, shared.K, 1, dkp, negative, CHUNK, Q, CHUNK, nullptr, 1);
    }

    // The same where zero times a number may not be zero: no token is multiplied with earlier queries.
    void meet_apart(const Shared &shared, int64_t m) {
        const Ints lane = lanes();
        for (int64_t s = 0; s < m; ++s)
            for (int64_t t = 0; t < CHUNK; t += LANES) {
                Vec total{};
                for (int64_t r = s; r < m; ++r) {
                    const Vec x = load(masked + r * CHUNK + t) * U[r * CHUNK + s];
                    total += (Vec)((Ints)x & (lane + int32_t(t) >= int32_t(r)));
                }
                store(S + s * CHUNK + t, total);
            }
        for (int64_t d = 0; d < dk; ++d)
            for (int64_t t = 0; t < padded(m); t += LANES) {
                Vec total = load(Q + d * CHUNK + t);
                for (int64_t s = 0; s < m; ++s) {
                    const Vec x = load(S + s * CHUNK + t) * shared.K[s * dkp + d];
                    total -= (Vec)((Ints)x & (lane + int32_t(t) >= int32_t(s)));
                }
                store(Q + d * CHUNK + t, total);
            }
    }

    // Keys of loose rows over the chunk: k <- k - H^T (K k); along [rows][CHUNK]: -K k
    void move_rows(const Shared &shared, int64_t m, float *keys, int64_t rows, float *along) const {
        product<Into::set>(rows, padded(m), dk, keys, dkp, 1, shared.KT, CHUNK, along, CHUNK);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t t = 0; t < m; t += LANES) store(along + r * CHUNK + t, -load(along + r * CHUNK + t));
        product<Into::fade>(rows, dkp, m, along, CHUNK, 1, H, dkp, keys, dkp, nullptr, 1);
    }
};

struct DeltaChunk : Chunk {
    static constexpr bool moves = true;
    Delta delta;

    DeltaChunk(const AttendArgs &a, int64_t head, Arena &arena) : Chunk(a, head, arena), delta(a, arena) {}

    void begin(int64_t offset, int64_t position, int64_t count, const Shared &of_keys) {
        Chunk::begin(offset, position, count, of_keys);
        finite = delta.fill(shared, m, args.beta + first * args.heads + h, args.heads) && finite;
        queries = delta.Q, products = delta.S;
    }

    void read(float *matrix, const float *weight, float factor, int64_t) { pass(matrix, weight, factor, 1, false); }

    // The one state of a memory with no other: all the chunk's tokens go there.
    void read_and_take(float *matrix, bool fresh) {
        if (fresh) fold(matrix, 0, fresh, m, own_rows(0));
        else pass(matrix, E, 1, E[m - 1], true);
    }

    // Read a matrix, and move it over the chunk; matrix <- fade (matrix - H^T K matrix), plus own tokens if it takes them.
    // Some columns at a time, so that they stay in the cache.
    void pass(float *matrix, const float *weight, float factor, float fade, bool takes) {
        float by_time[CHUNK];
        const int64_t dkp = delta.dkp;
        for (int64_t t = 0; t < m; t += LANES) store(by_time + t, load(weight + t) * factor);
        for (int64_t c = 0; c < dvp; c += PANEL * LANES) {
            const int64_t wide = dvp - c < PANEL * LANES ? dvp - c : PANEL * LANES;
            product<Into::add_weighted>(m, wide, dk, queries, 1, CHUNK, matrix + c, dvp, O + c, dvp, by_time);
            product<Into::set>(m, wide, dk, shared.K, dkp, 1, matrix + c, dvp, W + c, dvp);
            for (int64_t t = 0; t < m; ++t)
                for (int64_t j = c; j < c + wide; j += LANES) {
                    const Vec out = load(W + t * dvp + j) * -fade;
                    store(W + t * dvp + j, takes ? out + load(V + t * dvp + j) * tail[t] : out);
                }
            product<Into::fade>(dk, wide, m, delta.H, 1, dkp, W + c, dvp, matrix + c, dvp, nullptr, fade);
        }
    }

    void move_rows(float *keys, int64_t rows, const int32_t *, Arena &arena) {
        if (rows && loose.fit(rows * CHUNK, arena)) delta.move_rows(shared, m, keys, rows, loose.floats);
    }

    Rows own_rows(int64_t s) const { return {delta.H + s * delta.dkp, delta.dkp, V + s * dvp, tail + s, token + s}; }
};

}  // namespace

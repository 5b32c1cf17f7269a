// What the three memories do alike with a chunk of 64 tokens of one head.
//
// Queries and weights stand with the time of the query along the vectors, so that keys and values are taken from where
// they lie, a number at a time: S[s][t] = k_s . q_t, P[s][t] = S[s][t] * decay * weight, o_t = sum_s P[s][t] v_s.
#pragma once
#include <stdlib.h>

#include "args.h"
#include "simd.h"

namespace {

constexpr float NONE = 1e-6f;  // routed reads: shorter vectors count as this long (SHORT in dla/ops/rules.py)
constexpr int64_t STEP = 16;  // tokens of a chunk that are told apart by causality in products

// Memory of one task: gives out pieces, and gives all back at its end.
struct Arena {
    struct alignas(64) Piece {
        Piece *before;
    };
    Piece *last = nullptr;
    bool failed = false;

    void *bytes(int64_t n) {
        Piece *p = (Piece *)aligned_alloc(64, sizeof(Piece) + (n + 64) / 64 * 64);
        if (!p) return failed = true, nullptr;
        p->before = last, last = p;
        return p + 1;
    }
    float *floats(int64_t n) { return (float *)bytes(n * 4); }
    ~Arena() {
        while (last) {
            Piece *p = last;
            last = p->before;
            free(p);
        }
    }
};

// Floats that are asked for again and again, more of them every time.
struct Scratch {
    float *floats = nullptr;
    int64_t room = 0;

    bool fit(int64_t n, Arena &arena) {
        if (room < n) floats = arena.floats(n + n / 2), room = floats ? n + n / 2 : 0;
        return floats;
    }
};

INLINE int64_t sum_of(const int64_t *x, int64_t n) {
    int64_t total = 0;
    for (int64_t i = 0; i < n; ++i) total += x[i];
    return total;
}

// An array of objects in an arena, made one by one.
struct Here {
    void *at;
};

}  // namespace
inline void *operator new(size_t, Here here) noexcept { return here.at; }
inline void operator delete(void *, Here) noexcept {}
namespace {

// x [m rows of LANES] with rows as columns: stages of the perfect shuffle.
INLINE void transpose(Vec *x) {
    for (int half = 1; half < LANES; half *= 2) {
        Vec y[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES / 2; ++i) {
            const Vec a = x[i], b = x[i + LANES / 2];
#if DLA_LEVEL == 512
            y[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            y[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif DLA_LEVEL == 256
            y[2 * i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
            y[2 * i + 1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
            y[2 * i] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
            y[2 * i + 1] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) x[i] = y[i];
    }
}

// out [dim][CHUNK] = x [m][dim] with rows `stride` apart, zero past m.
void transpose_rows(const float *x, int64_t stride, int64_t m, int64_t dim, float *out) {
    for (int64_t t = 0; t < CHUNK; t += LANES) {
        const int64_t there = m - t;
        int64_t d = 0;
        for (; d + LANES <= dim && there > 0; d += LANES) {
            Vec rows[LANES];
            for (int i = 0; i < LANES; ++i) rows[i] = i < there ? load(x + (t + i) * stride + d) : Vec{};
            transpose(rows);
            for (int i = 0; i < LANES; ++i) store(out + (d + i) * CHUNK + t, rows[i]);
        }
        for (; d < dim; ++d)
            for (int64_t i = 0; i < LANES; ++i) out[d * CHUNK + t + i] = i < there ? x[(t + i) * stride + d] : 0;
    }
}

INLINE bool finite_rows(const float *x, int64_t stride, int64_t m, int64_t dim) {
    Vec seen{};
    float rest = 0;
    for (int64_t t = 0; t < m; ++t) {
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) seen += load(x + t * stride + d) * 0.0f;
        for (; d < dim; ++d) rest += x[t * stride + d] * 0.0f;
    }
    return sum(seen) + rest == 0;
}

// What the heads of a key head share of a chunk. Products are there for t >= s, and up to the vector that s is in.
struct Shared {
    float *finite;  // whether the keys are
    float *Q;       // [dk][CHUNK] queries
    float *S;       // [CHUNK][CHUNK] products with the chunk's own keys: k_s . q_t
    float *K, *KT;  // with beta: [CHUNK][dkp] and [dk][CHUNK] keys
    float *KK;      // with beta: [CHUNK][CHUNK] k_s . k_t

    static int64_t floats(const AttendArgs &a) {
        const int64_t plain = LANES + a.dk * CHUNK + CHUNK * CHUNK;
        return a.beta ? plain + CHUNK * padded(a.dk) + a.dk * CHUNK + CHUNK * CHUNK : plain;
    }
    static Shared at(float *x, const AttendArgs &a) {
        Shared made = {x, x + LANES, x + LANES + a.dk * CHUNK, nullptr, nullptr, nullptr};
        if (a.beta) made.K = made.S + CHUNK * CHUNK, made.KT = made.K + CHUNK * padded(a.dk), made.KK = made.KT + a.dk * CHUNK;
        return made;
    }

    void fill(const AttendArgs &a, int64_t first, int64_t m, int64_t key_head) {
        const float *q = a.q + first * a.q_stride + key_head * a.dk, *k = a.k + first * a.k_stride + key_head * a.dk;
        transpose_rows(q, a.q_stride, m, a.dk, Q);
        meet(k, a.k_stride, a.dk, m, Q, S);
        *finite = finite_rows(k, a.k_stride, m, a.dk);
        if (!a.beta) return;
        const int64_t dkp = padded(a.dk);
        for (int64_t t = 0; t < m; ++t) {
            memcpy(K + t * dkp, k + t * a.k_stride, a.dk * 4);
            memset(K + t * dkp + a.dk, 0, (dkp - a.dk) * 4);
        }
        transpose_rows(K, dkp, m, a.dk, KT);
        meet(K, dkp, a.dk, m, KT, KK);
    }
    static void meet(const float *k, int64_t stride, int64_t dk, int64_t m, const float *with, float *made) {
        for (int64_t s = 0; s < m; s += STEP)
            product<Into::set>(m - s < STEP ? m - s : STEP, CHUNK - s, dk, k + s * stride, stride, 1, with + s, CHUNK,
                               made + s * CHUNK + s, CHUNK);
    }
};

// Tokens outside of a matrix: keys [dk] `stride` apart, values [dvp], what each counts for, and which token each is.
struct Rows {
    const float *keys;
    int64_t stride;
    const float *values, *coefficient;
    const int32_t *token;  // from the sequence's first; below zero: carried in
    const float *sway = nullptr;  // how each changes with the soft gate (see gate.h), where gradients of that are wanted
};

// One head's chunk: scratch, and the steps that every memory takes. A memory is written for any kind of chunk: this one
// computes outputs, the one of backward.h gradients.
struct Chunk {
    static constexpr bool backward = false;
    static constexpr bool moves = false;  // whether states are more than their tokens, faded
    const AttendArgs &args;
    const int64_t h, key_head, dk, dv, dvp;
    Shared shared;
    const float *queries, *products;  // what states and own tokens are read with: Q and S of what is shared, or like them
    float *V, *W, *P, *O;  // [CHUNK][dvp] values, weighted values; [CHUNK][CHUNK]; [CHUNK][dvp] outputs
    Scratch loose;             // [rows][CHUNK] of loose rows
    int64_t first = 0, m = 0;  // the chunk's tokens
    int32_t token[CHUNK];      // these, from the sequence's first
    double G[CHUNK];           // running sums of g
    float E[CHUNK];            // exp of them: decay since the chunk's start
    float away[CHUNK];         // their inverse, if the decay is mild: then decay from s to t is E[t] * away[s]
    float tail[CHUNK];         // decay to the chunk's end
    bool mild = true;
    float ones[CHUNK];
    bool finite = true;        // whether the chunk's keys, values and decays are

    Chunk(const AttendArgs &a, int64_t head, Arena &arena)
        : args(a), h(head), key_head(head * a.key_heads / a.heads), dk(a.dk), dv(a.dv), dvp(padded(a.dv)) {
        V = arena.floats(CHUNK * dvp), W = arena.floats(CHUNK * dvp), O = arena.floats(CHUNK * dvp);
        P = arena.floats(CHUNK * CHUNK);
        for (float &x : ones) x = 1;
    }

    const float *k(int64_t t) const { return args.k + (first + t) * args.k_stride + key_head * dk; }

    // `count` tokens from `position` of a sequence on, whose first token is `offset`
    void begin(int64_t offset, int64_t position, int64_t count, const Shared &of_keys) {
        first = offset + position, m = count, shared = of_keys, queries = shared.Q, products = shared.S;
        for (int64_t t = 0; t < m; ++t) {
            token[t] = int32_t(position + t);
            const float *v = args.v + (first + t) * args.v_stride + h * dv;
            memcpy(V + t * dvp, v, dv * 4);
            for (int64_t j = dv; j < dvp; ++j) V[t * dvp + j] = 0;
        }
        const double total = decays();
        finite = *shared.finite != 0 && total == total && finite_rows(V, dvp, m, dvp);
    }

    // Running sums of g and their exponentials; the sum of all.
    double decays() {
        double total = 0;
        mild = true;
        for (int64_t t = 0; t < CHUNK; ++t) {
            const double g = t < m && args.g ? args.g[(first + t) * args.heads + h] : 0;
            total += g < -1000 ? -1000 : g;  // whose exponential is 0: more would take digits from the others
            G[t] = total;
            mild = mild && fabs(total) < 80;  // within the range of floats; NaN is not
        }
        const Wide end = Wide{} + total;
        for (int64_t t = 0; t < CHUNK; t += LANES) {
            const Wide low = *(LooseWide *)(G + t), high = *(LooseWide *)(G + t + LANES / 2);
            if (mild) {
                store(E + t, narrow(exp_wide(low), exp_wide(high)));
                store(away + t, narrow(exp_wide(-low), exp_wide(-high)));
                store(tail + t, narrow(exp_wide(end - low), exp_wide(end - high)));
            } else {
                store(E + t, exp_vec(narrow(low, high)));
                store(tail + t, exp_vec(narrow(end - low, end - high)));
            }
        }
        return total;
    }

    // The decay from token s to the tokens from t on.
    inline __attribute__((always_inline)) Vec decay(int64_t s, int64_t t) const {
        if (mild) return load(E + t) * away[s];
        const Wide from = Wide{} + G[s];
        return exp_vec(narrow(*(LooseWide *)(G + t) - from, *(LooseWide *)(G + t + LANES / 2) - from));
    }

    // O = what the chunk's own tokens give; weight [CHUNK][CHUNK] by token and query, or null for ones.
    void own(const float *weight) {
        Ints lane;
        for (int i = 0; i < LANES; ++i) lane[i] = i;
        for (int64_t s = 0; s < m; ++s) {
            for (int64_t t = s / STEP * STEP; t < m; t += LANES) {
                Vec x = load(products + s * CHUNK + t);
                if (args.g) x *= decay(s, t);
                if (weight) x *= load(weight + s * CHUNK + t);
                if (t < s + 1) x = (Vec)((Ints)x & (lane + int32_t(t) >= int32_t(s)));  // the future
                store(P + s * CHUNK + t, x);
            }
        }
        const int64_t step = finite ? STEP : 1;  // zero times NaN is NaN: then every query gets its own tokens alone
        for (int64_t t = 0; t < m; t += step) {
            const int64_t rows = m - t < step ? m - t : step;
            product<Into::set>(rows, dvp, t + rows, P + t, 1, CHUNK, V, dvp, O + t * dvp, dvp);
        }
    }

    void spread() {}  // all reads of the chunk are done
    void move_rows(float *, int64_t, const int32_t *, Arena &) {}  // keys of loose rows, as they are at the chunk's end

    // O += factor * weight[t] * q_t^T matrix; it is a part of state number `state`. The matrix is then what it is at the
    // chunk's end, but for the decay and the chunk's own tokens.
    void read(float *matrix, const float *weight, float factor, int64_t) {
        float by_time[CHUNK];
        for (int64_t t = 0; t < m; t += LANES) store(by_time + t, load(weight + t) * factor);
        product<Into::add_weighted>(m, dvp, dk, queries, 1, CHUNK, matrix, dvp, O, dvp, by_time);
    }

    // The same of loose rows: many[i] of them belong to state i, whose weight is weight[i][CHUNK].
    void read_rows(const Rows &rows, const int64_t *many, int64_t states, const float *weight, Arena &arena) {
        const int64_t total = sum_of(many, states);
        if (!total || !loose.fit(total * CHUNK, arena)) return;
        float *at = loose.floats;
        product<Into::set>(total, padded(m), dk, rows.keys, rows.stride, 1, queries, CHUNK, at, CHUNK);
        const float *coefficient = rows.coefficient;
        for (int64_t i = 0; i < states; ++i)
            for (int64_t r = 0; r < many[i]; ++r, ++coefficient, at += CHUNK)
                for (int64_t t = 0; t < m; t += LANES)
                    store(at + t, load(at + t) * load(weight + i * CHUNK + t) * *coefficient);
        product<Into::add_weighted>(m, dvp, total, loose.floats, 1, CHUNK, rows.values, dvp, O, dvp, ones);
    }

    float *new_matrix(Arena &arena) const { return arena.floats(dk * dvp); }

    // A = a A + b B, after which B is free
    void combine(float *A, float a, float *B, float b) {
        for (int64_t i = 0; i < dk * dvp; i += LANES) store(A + i, load(A + i) * a + load(B + i) * b);
    }
    void drop(float *) {}  // this matrix is free

    // matrix = fade * matrix + sum of coefficient * k v^T, over rows; `fresh`: there is nothing to fade
    void fold(float *matrix, float fade, bool fresh, int64_t many, const Rows &rows) {
        for (int64_t done = 0; done < many; done += CHUNK) {
            const int64_t n = many - done < CHUNK ? many - done : CHUNK;
            for (int64_t r = 0; r < n; ++r)
                for (int64_t j = 0; j < dvp; j += LANES)
                    store(W + r * dvp + j, load(rows.values + (done + r) * dvp + j) * rows.coefficient[done + r]);
            const float *from = rows.keys + done * rows.stride;
            if (fresh) product<Into::set>(dk, dvp, n, from, 1, rows.stride, W, dvp, matrix, dvp);
            else product<Into::fade>(dk, dvp, n, from, 1, rows.stride, W, dvp, matrix, dvp, nullptr, fade);
            fresh = false, fade = 1;
        }
    }

    // The chunk's own tokens from s on, as they stand at its end.
    Rows own_rows(int64_t s) const { return {k(s), args.k_stride, V + s * dvp, tail + s, token + s}; }

    void write_outputs() {
        for (int64_t t = 0; t < m; ++t) {
            float *o = args.o + ((first + t) * args.heads + h) * dv;
            for (int64_t j = 0; j < dv; ++j) o[j] = O[t * dvp + j] * float(args.scale);
        }
    }

    void load_matrix(float *matrix, const float *from) const {
        for (int64_t d = 0; d < dk; ++d) {
            memcpy(matrix + d * dvp, from + d * dv, dv * 4);
            for (int64_t j = dv; j < dvp; ++j) matrix[d * dvp + j] = 0;
        }
    }
    void save_matrix(const float *matrix, float *to, float factor = 1) const {
        for (int64_t d = 0; d < dk; ++d)
            for (int64_t j = 0; j < dv; ++j) to[d * dv + j] = factor * matrix[d * dvp + j];
    }
};

// The chunks of a sequence: cut where its own position is a multiple of 64 if its levels need that.
struct Cut {
    int64_t offset, length, lead;

    Cut(const AttendArgs &a, int64_t n) : offset(a.offset[n]), length(a.length[n]) {
        lead = a.position ? a.position[n] % CHUNK : 0;
    }
    Cut(const DecideArgs &a, int64_t n) : offset(a.offset[n]), length(a.length[n]), lead(0) {}
    int64_t chunks() const { return length ? (lead + length + CHUNK - 1) / CHUNK : 0; }
    int64_t begin(int64_t c) const { return c ? c * CHUNK - lead : 0; }
    int64_t end(int64_t c) const { return (c + 1) * CHUNK - lead < length ? (c + 1) * CHUNK - lead : length; }
};

// A chunk by its number among those of all sequences: where it begins in its own, and how many tokens it has.
template <class Args> Cut find_chunk(const Args &args, int64_t number, int64_t &begin, int64_t &m) {
    int64_t n = 0;
    while (number >= Cut(args, n).chunks()) number -= Cut(args, n++).chunks();
    const Cut cut(args, n);
    begin = cut.begin(number), m = cut.end(number) - begin;
    return cut;
}

// The number of a sequence's first chunk.
template <class Args> int64_t chunks_before(const Args &args, int64_t n) {
    int64_t number = 0;
    for (int64_t i = 0; i < n; ++i) number += Cut(args, i).chunks();
    return number;
}

}  // namespace

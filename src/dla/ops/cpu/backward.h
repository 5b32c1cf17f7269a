// Gradients of the second stage, head by head, in two walks over the chunks.
//
// The first goes forward like attend.h, with the same memories. Where outputs would be read, it computes what the
// gradient of the outputs says about the queries, the weights, and the tokens that are read as tokens. On its way it
// writes a tape: which matrix was read with which weights, which rows were folded into which matrix, which matrices
// were added. The second walk follows the tape backward with the gradient of every matrix, which lies right behind it.
// So no state is kept or computed again: the first walk has them when it needs them, and the second needs none.
//
// Decays: what token s gives to query t has the factor exp(g_(s+1) + ... + g_t). If x[t][s] is what that pair adds to
// the loss, to first order, the gradient of g_u is the sum of x[t][s] over s < u <= t: a running sum, from the end, of
// what each token reads less what is read of it (`net`). With a soft gate, what is read of a token's two parts also says
// how the loss changes with its gate (`d_gate`); with routed reads, what the weights say about sums of keys goes to all
// tokens of a state (`d_sums`).
#pragma once
#include "attend.h"
#include "rows.h"
#include "spans.h"
#include "tape.h"

namespace {

// x [dim][CHUNK] as rows: out [m][stride], written up to dim rounded up to whole vectors.
void rows_of(const float *x, int64_t m, int64_t dim, float *out, int64_t stride) {
    for (int64_t t = 0; t < m; t += LANES)
        for (int64_t d = 0; d < dim; d += LANES) {
            Vec part[LANES];
            for (int i = 0; i < LANES; ++i) part[i] = load(x + (d + i) * CHUNK + t);
            transpose(part);
            for (int i = 0; i < LANES && t + i < m; ++i) store(out + (t + i) * stride + d, part[i]);
        }
}

struct BackChunk : Chunk {
    static constexpr bool backward = true;
    bool learns = true;  // whether this walk computes gradients
    const BackwardArgs &back;
    const int64_t dkp, part;
    Arena &arena;
    float *D, *DT;    // [CHUNK][dvp] and [dv][CHUNK] gradients of the outputs
    float *Qr;        // [CHUNK][dkp] queries
    float *A;         // [CHUNK][CHUNK] gradients of the products with own keys; zero where no vector of a token is
    float *dQ, *X;    // [dkp][CHUNK] gradients of queries; scratch
    float *T;         // [CHUNK][dkp or dvp] scratch
    float *d_own;     // [CHUNK][CHUNK] gradients of the weights of own tokens
    float *d_weight;  // [states][CHUNK] and of states, before decay
    int64_t states = 0;  // of d_weight that are not zero
    Scratch loose_d, loose_T;
    double *net;         // [length]
    double *d_gate = nullptr;  // [length] gradients of the soft gate p, times p (1 - p): nothing has to be divided by p
    double *d_sums = nullptr;  // [length + 1][dk] whose running sums are gradients of keys, by way of sums of them
    int64_t offset = 0;  // of the sequence
    List<Event> events;
    List<float> weights, coefficients, sways;
    List<int32_t> tokens;
    List<int64_t> ends;      // of each chunk's events
    List<float *> matrices;  // all there are
    Ints lane;               // 0, 1, ...

    BackChunk(const BackwardArgs &b, int64_t n, int64_t head, int64_t which, Arena &pieces)
        : Chunk(*b.attend, head, pieces), back(b), dkp(padded(b.attend->dk)), part(which), arena(pieces) {
        const int64_t wide = dkp > dvp ? dkp : dvp, most = args.states + args.carried + 130;
        D = arena.floats(CHUNK * dvp), DT = arena.floats(dv * CHUNK), Qr = arena.floats(CHUNK * dkp);
        A = zeros(CHUNK * CHUNK), d_own = arena.floats(CHUNK * CHUNK), T = arena.floats(CHUNK * wide);
        dQ = arena.floats(dkp * CHUNK), X = arena.floats(dkp * CHUNK), d_weight = zeros(most * CHUNK);
        net = (double *)zeros(2 * args.length[n]), offset = args.offset[n];
        if (args.gate) d_gate = (double *)zeros(2 * args.length[n]);
        if (args.route) d_sums = (double *)zeros(2 * (args.length[n] + 1) * dk);
        for (int i = 0; i < LANES; ++i) lane[i] = i;
    }
    float *zeros(int64_t n) {
        float *x = arena.floats(n);
        return x ? (float *)memset(x, 0, n * 4) : x;
    }

    // --- where gradients go

    float *d_q(int64_t t) const { return back.d_q + ((part * args.tokens + offset + t) * args.key_heads + key_head) * dk; }
    float *d_k(int64_t t) const { return back.d_k + ((part * args.tokens + offset + t) * args.key_heads + key_head) * dk; }
    float *d_v(int64_t t) const { return back.d_v + ((offset + t) * args.heads + h) * dv; }
    float *d_route(int64_t t) const { return back.d_route + (first + t) * args.heads + h; }
    float *d_lam(int64_t t) const { return back.d_lam + ((first + t) * args.heads + h) * args.width; }

    // --- the walk forward

    void begin(int64_t from, int64_t position, int64_t count, const Shared &of_keys) {
        Chunk::begin(from, position, count, of_keys);
        load_gradients();
        transpose_rows(D, dvp, m, dv, DT);
        for (int64_t t = 0; t < m; ++t) {
            memcpy(Qr + t * dkp, args.q + (first + t) * args.q_stride + key_head * dk, dk * 4);
            memset(Qr + t * dkp + dk, 0, (dkp - dk) * 4);
        }
        memset(dQ, 0, dkp * CHUNK * 4), memset(d_weight, 0, states * CHUNK * 4);
        states = 0;
    }
    void load_gradients() {
        for (int64_t t = 0; t < m; ++t) {
            const float *d = back.d_o + ((first + t) * args.heads + h) * dv;
            for (int64_t j = 0; j < dv; ++j) D[t * dvp + j] = d[j] * float(args.scale);
            for (int64_t j = dv; j < dvp; ++j) D[t * dvp + j] = 0;
        }
    }

    // Of own tokens: P, its gradients with respect to products (A) and weights (d_own), and net.
    void own(const float *weight) {
        for (int64_t s = 0; s < m; s += STEP)
            product<Into::set>(m - s < STEP ? m - s : STEP, CHUNK - s, dv, V + s * dvp, dvp, 1, DT + s, CHUNK,
                               A + s * CHUNK + s, CHUNK);
        double reads[CHUNK] = {};
        for (int64_t s = 0; s < m; ++s) {
            Wide read{};  // of token s
            for (int64_t t = s / STEP * STEP; t < m; t += LANES) {
                const int64_t at = s * CHUNK + t;
                const Vec x = load(products + at), w = weight ? load(weight + at) : all(1);
                const Vec d = args.g ? decay(s, t) : all(1), dp = load(A + at) * d;
                const Ints time = lane + int32_t(t), seen = time >= int32_t(s);
                const Ints later = (time > int32_t(s)) & (time < int32_t(m));  // what weights are past m is anything
                store(P + at, (Vec)((Ints)(x * d * w) & seen));
                store(A + at, (Vec)((Ints)(dp * w) & seen));
                store(d_own + at, (Vec)((Ints)(dp * x) & seen));
                if (args.g) note((Vec)((Ints)(dp * w * x) & later), reads + t, read);
            }
            if (args.g) net[token[s]] -= total(read);
        }
        for (int64_t t = 0; t < m; ++t) net[token[t]] += reads[t];
    }
    // What queries from some time on read: to their sums, and to the sum of what they read it of.
    inline __attribute__((always_inline)) void note(Vec x, double *reads, Wide &read) {
        Half a, b;
        memcpy(&a, &x, sizeof a), memcpy(&b, (char *)&x + sizeof a, sizeof b);
        const Wide low = __builtin_convertvector(a, Wide), high = __builtin_convertvector(b, Wide);
        *(LooseWide *)reads = *(LooseWide *)reads + low;
        *(LooseWide *)(reads + LANES / 2) = *(LooseWide *)(reads + LANES / 2) + high;
        read += low + high;
    }
    inline double total(Wide x) {
        double all = 0;
        for (int i = 0; i < LANES / 2; ++i) all += x[i];
        return all;
    }

    void read(float *matrix, const float *weight, float factor, int64_t state) {
        product<Into::set>(dk, padded(m), dv, matrix, dvp, 1, DT, CHUNK, X, CHUNK);  // S dO
        float *w = weights.add(CHUNK, arena);
        Event *event = events.add(1, arena);
        if (!w || !event) return;
        *event = {Event::read, matrix, nullptr, 0, 0, weights.count - CHUNK, 0};
        float dot[CHUNK] = {};
        for (int64_t t = 0; t < m; t += LANES) {
            const Vec here = load(weight + t) * factor;
            Vec product{};
            store(w + t, here);
            for (int64_t d = 0; d < dk; ++d) {
                const Vec x = load(X + d * CHUNK + t);
                product += x * load(queries + d * CHUNK + t);
                store(dQ + d * CHUNK + t, load(dQ + d * CHUNK + t) + x * here);
            }
            store(dot + t, product);
        }
        float *d = d_weight + state * CHUNK;
        states = state < states ? states : state + 1;
        for (int64_t t = 0; t < m; ++t) d[t] += factor * dot[t], net[token[t]] += w[t] * dot[t];
    }

    // What is read of a row of a token, over all times.
    void is_read(int64_t which, double all, float sway) {
        net[which] -= all;
        if (d_gate) d_gate[which] += sway * all;
    }

    void read_rows(const Rows &rows, const int64_t *many, int64_t count, const float *weight, Arena &) {
        const int64_t total_rows = sum_of(many, count);
        if (!total_rows || !meet_rows(rows, many, count, total_rows, weight)) return;
        product<Into::set>(total_rows, dkp, m, loose_d.floats, CHUNK, 1, Qr, dkp, loose_T.floats, dkp);
        for (int64_t r = 0; r < total_rows; ++r)
            if (rows.token[r] >= 0) add_row(d_k(rows.token[r]), 1, loose_T.floats + r * dkp, dk);
    }
    // All gradients of reading rows but those of their keys: of their products with queries, in loose_d, for these.
    bool meet_rows(const Rows &rows, const int64_t *many, int64_t count, int64_t total_rows, const float *weight) {
        const int64_t wide = dkp > dvp ? dkp : dvp;
        if (!loose.fit(total_rows * CHUNK, arena) || !loose_d.fit(total_rows * CHUNK, arena)) return false;
        if (!loose_T.fit(total_rows * wide, arena)) return false;
        float *p = loose.floats, *d = loose_d.floats;
        product<Into::set>(total_rows, padded(m), dk, rows.keys, rows.stride, 1, queries, CHUNK, p, CHUNK);
        product<Into::set>(total_rows, padded(m), dv, rows.values, dvp, 1, DT, CHUNK, d, CHUNK);
        double reads[CHUNK] = {};
        for (int64_t i = 0, r = 0; i < count; ++i)
            for (const int64_t end = r + many[i]; r < end; ++r) {
                Wide read{};
                for (int64_t t = 0; t < m; t += LANES) {
                    const Vec x = load(p + r * CHUNK + t), dp = load(d + r * CHUNK + t) * rows.coefficient[r];
                    const Vec w = load(weight + i * CHUNK + t);
                    store(p + r * CHUNK + t, x * w * rows.coefficient[r]);
                    store(d + r * CHUNK + t, dp * w);
                    store(d_weight + i * CHUNK + t, load(d_weight + i * CHUNK + t) + dp * x);
                    const Ints here = lane + int32_t(t) < int32_t(m);
                    if (args.g || rows.sway) note((Vec)((Ints)(dp * x * w) & here), reads + t, read);
                }
                if (rows.token[r] >= 0) is_read(rows.token[r], total(read), rows.sway ? rows.sway[r] : 0);
            }
        states = count < states ? states : count;
        for (int64_t t = 0; t < m; ++t) net[token[t]] += reads[t];
        product<Into::fade>(dk, padded(m), total_rows, rows.keys, 1, rows.stride, d, CHUNK, dQ, CHUNK, nullptr, 1);
        product<Into::set>(total_rows, dvp, m, p, CHUNK, 1, D, dvp, loose_T.floats, dvp);
        for (int64_t r = 0; r < total_rows; ++r)
            if (rows.token[r] >= 0) add_row(d_v(rows.token[r]), 1, loose_T.floats + r * dvp, dv);
        return true;
    }

    // The gradients of own tokens and queries, when those of weights and products are complete.
    void spread() {
        spread_values();
        product<Into::fade>(dk, padded(m), m, k(0), 1, args.k_stride, A, CHUNK, dQ, CHUNK, nullptr, 1);
        for (int64_t s = 0; s < m; s += STEP) {
            const int64_t rows = m - s < STEP ? m - s : STEP, corner = s * CHUNK + s;
            product<Into::set>(rows, dkp, m - s, A + corner, CHUNK, 1, Qr + s * dkp, dkp, T, dkp);
            for (int64_t r = 0; r < rows; ++r) add_row(d_k(token[s + r]), 1, T + r * dkp, dk);
        }
        rows_of(dQ, m, dk, T, dkp);
        for (int64_t t = 0; t < m; ++t) add_row(d_q(token[t]), 1, T + t * dkp, dk);
    }
    void spread_values() {
        for (int64_t s = 0; s < m; s += STEP) {
            const int64_t rows = m - s < STEP ? m - s : STEP, corner = s * CHUNK + s;
            product<Into::set>(rows, dvp, m - s, P + corner, CHUNK, 1, D + s * dvp, dvp, T, dvp);
            for (int64_t r = 0; r < rows; ++r) add_row(d_v(token[s + r]), 1, T + r * dvp, dv);
        }
    }

    float *new_matrix(Arena &) {
        float *made = arena.floats(2 * dk * dvp), **listed = matrices.add(1, arena);
        if (listed) *listed = made;
        return made;
    }
    float *gradient(float *matrix) const { return matrix + dk * dvp; }

    void combine(float *A_, float a, float *B, float b) {
        Chunk::combine(A_, a, B, b);
        if (Event *event = events.add(1, arena)) *event = {Event::combine, A_, B, a, b, 0, 0};
    }
    void drop(float *matrix) {
        if (Event *event = events.add(1, arena)) *event = {Event::drop, matrix, nullptr, 0, 0, 0, 0};
    }
    void fold(float *matrix, float fade, bool fresh, int64_t many, const Rows &rows) {
        Chunk::fold(matrix, fade, fresh, many, rows);
        Event *event = events.add(1, arena);
        int32_t *which = tokens.add(many, arena);
        float *by = coefficients.add(many, arena), *sway = rows.sway ? sways.add(many, arena) : by;
        if (!event || !which || !by || !sway) return;
        *event = {Event::fold, matrix, nullptr, fresh ? 0 : fade, 0, tokens.count - many, many};
        memcpy(which, rows.token, many * 4), memcpy(by, rows.coefficient, many * 4);
        if (rows.sway) memcpy(sway, rows.sway, many * 4);
    }

    // --- the walk backward

    void end_chunk() {
        if (int64_t *end = ends.add(1, arena)) *end = events.count;
    }
    void turn() {
        for (int64_t i = 0; i < matrices.count; ++i) memset(gradient(matrices.items[i]), 0, dk * dvp * 4);
    }

    void back_over(int64_t chunk, int64_t position, int64_t count, const float *Q) {
        first = offset + position, m = count;
        load_gradients();
        const int64_t begin = chunk ? ends.items[chunk - 1] : 0;
        for (int64_t i = ends.items[chunk]; i-- > begin;) {
            const Event &event = events.items[i];
            float *d = gradient(event.matrix);
            switch (event.kind) {
                case Event::read: unread(d, weights.items + event.at, Q); break;
                case Event::fold: unfold(d, event); break;
                case Event::combine: split(d, event); break;
                default: memset(d, 0, dk * dvp * 4); break;
            }
        }
    }

    void unread(float *d, const float *weight, const float *Q) {
        for (int64_t t = 0; t < m; ++t)
            for (int64_t j = 0; j < dvp; j += LANES) store(W + t * dvp + j, load(D + t * dvp + j) * weight[t]);
        product<Into::fade>(dk, dvp, m, Q, CHUNK, 1, W, dvp, d, dvp, nullptr, 1);
    }

    void split(float *d, const Event &event) {
        float *other = gradient(event.other);
        for (int64_t i = 0; i < dk * dvp; i += LANES) {
            store(other + i, load(d + i) * event.b);
            store(d + i, load(d + i) * event.a);
        }
    }

    void unfold(float *d, const Event &event) {
        for (int64_t done = 0; done < event.many; done += CHUNK) {
            const int64_t n = event.many - done < CHUNK ? event.many - done : CHUNK;
            unfold_rows(d, n, event.at + done);
        }
        for (int64_t i = 0; event.a != 1 && i < dk * dvp; i += LANES) store(d + i, load(d + i) * event.a);
    }

    void unfold_rows(const float *d, int64_t n, int64_t at) {
        const int32_t *which = tokens.items + at;
        const float *coefficient = coefficients.items + at, *sway = d_gate ? sways.items + at : nullptr;
        float *values = V, *turned = DT, *keys = Qr;  // the walk forward is over: its scratch is free
        for (int64_t r = 0; r < n; ++r) {
            const int64_t from = offset + (which[r] < 0 ? 0 : which[r]);
            memcpy(values + r * dvp, args.v + from * args.v_stride + h * dv, dv * 4);
            memset(values + r * dvp + dv, 0, (dvp - dv) * 4);
            memcpy(keys + r * dkp, args.k + from * args.k_stride + key_head * dk, dk * 4);
        }
        product<Into::set>(n, dvp, dk, keys, dkp, 1, d, dvp, T, dvp);
        for (int64_t r = 0; r < n; ++r)
            if (which[r] >= 0) add_row(d_v(which[r]), coefficient[r], T + r * dvp, dv);
        transpose_rows(values, dvp, n, dv, turned);
        product<Into::set>(dk, padded(n), dv, d, dvp, 1, turned, CHUNK, X, CHUNK);
        rows_of(X, n, dk, T, dkp);
        for (int64_t r = 0; r < n; ++r) {
            if (which[r] < 0) continue;
            add_row(d_k(which[r]), coefficient[r], T + r * dkp, dk);
            if (!args.g && !sway) continue;
            is_read(which[r], double(coefficient[r]) * dot(T + r * dkp, keys + r * dkp, dk), sway ? sway[r] : 0);
        }
    }

    void finish(int64_t length) {
        double sum = 0;
        for (int64_t t = length; t-- > 0;) {
            sum += net[t];
            if (back.d_g) back.d_g[(offset + t) * args.heads + h] = float(sum);
        }
        for (int64_t t = 0; d_gate && t < length; ++t) {
            const int64_t at = (offset + t) * args.heads + h;
            const double p = args.gate[at], slope = p * (1 - p);
            back.d_gate[at] = slope == 0 ? 0 : float(d_gate[t] / slope);
        }
        for (int64_t t = 0; d_sums && t < length; ++t) {
            double *here = d_sums + t * dk;
            for (int64_t d = 0; t && d < dk; ++d) here[d] += here[d - dk];
            for (int64_t d = 0; d < dk; ++d) d_k(t)[d] += float(here[d]);
        }
    }
};

// Heads h ... h + heads of sequence n, whose gradients of queries and keys go to part number `part`.
template <class Memory>
bool walk_back(const BackwardArgs &back, int64_t n, int64_t h, int64_t heads, int64_t part, const float *shared) {
    const AttendArgs &args = *back.attend;
    const Cut cut(args, n);
    const int64_t number = chunks_before(args, n), chunks = cut.chunks(), floats = Shared::floats(args);
    for (int64_t i = h; i < h + heads; ++i) {
        Arena arena;
        BackChunk chunk(back, n, i, part, arena);
        Memory memory(args, n, i, chunk, arena);
        float *own = shared ? nullptr : arena.floats(floats);
        auto at = [&](int64_t c) {
            return Shared::at(own ? own : (float *)shared + ((number + c) * args.key_heads + chunk.key_head) * floats, args);
        };
        for (int64_t c = 0; c < chunks && !arena.failed; ++c) {
            const int64_t begin = cut.begin(c), m = cut.end(c) - begin;
            Shared here = at(c);
            if (own) here.fill(args, cut.offset + begin, m, chunk.key_head);
            chunk.begin(cut.offset, begin, m, here);
            memory.chunk(chunk, begin);
            chunk.end_chunk();
        }
        if (arena.failed) return false;
        chunk.turn();
        for (int64_t c = chunks; c-- > 0;) {
            const int64_t begin = cut.begin(c), m = cut.end(c) - begin;
            const float *q = args.q + (cut.offset + begin) * args.q_stride + chunk.key_head * args.dk;
            if (own) transpose_rows(q, args.q_stride, m, args.dk, at(c).Q);
            chunk.back_over(c, begin, m, at(c).Q);
        }
        chunk.finish(cut.length);
    }
    return true;
}

}  // namespace

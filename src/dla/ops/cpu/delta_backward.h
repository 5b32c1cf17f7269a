// Gradients with the delta rule (delta.h), head by head.
//
// A matrix is moved over every chunk, and the gradients of keys need it as it was before. So the sequence is cut into
// blocks of chunks: a first walk keeps what the memory is at the start of every block; then, from the last block to the
// first, the memory is what it was there, a walk forward over the block computes what backward.h's does and writes a
// tape that has the matrices too, and a walk backward follows the tape.
//
// Loose rows have keys that are moved over chunks as well. Their gradients wait in a row of `carried` for each token,
// which goes back over the chunks as the keys went forward, until the chunk that the token is from.
#pragma once
#include "backward.h"
#include "delta.h"

namespace {

struct DeltaBack : BackChunk {
    static constexpr bool moves = true;
    Delta delta;
    float *Qh;                       // [CHUNK][dkp] queries of states at the chunk's start
    float *HT, *dHT, *dKT;           // [dk][CHUNK] keys at the chunk's end; gradients of these, and of keys
    float *dW, *turned;              // [CHUNK][dvp] and [dv][CHUNK] scratch
    float *dK, *dU, *Y, *dS;         // [CHUNK][dkp], [CHUNK][CHUNK]
    float *carried;                  // [rows carried in + length][dkp] gradients of loose rows' keys
    int64_t before = 0;              // rows carried in
    int64_t made = 0;                // matrices in use so far, of all there are
    List<float *> copies;            // [dk][dvp] matrices before they were moved, and behind each W, [CHUNK][dvp]
    int64_t copied = 0;              // of them in use
    List<float> tape;                // keys, values and gradients of rows; gradients of own products and queries
    List<int64_t> locals;            // where a chunk's own gradients are on it
    Scratch rows_d;

    DeltaBack(const BackwardArgs &b, int64_t n, int64_t head, int64_t which, Arena &pieces)
        : BackChunk(b, n, head, which, pieces), delta(args, pieces) {
        Qh = arena.floats(CHUNK * dkp), HT = arena.floats(dk * CHUNK);
        dHT = arena.floats(dkp * CHUNK), dKT = arena.floats(dkp * CHUNK);
        dW = arena.floats(CHUNK * dvp), turned = arena.floats(dv * CHUNK), dK = arena.floats(CHUNK * dkp);
        dU = arena.floats(CHUNK * CHUNK), Y = arena.floats(CHUNK * CHUNK), dS = arena.floats(CHUNK * CHUNK);
        for (int64_t i = 0; args.memory == Memory::dynamic && i < args.carried; ++i)
            before += args.rows[(n * args.heads + h) * args.carried + i];
        carried = zeros((before + args.length[n]) * dkp);
    }
    float *d_row(int32_t which) const { return carried + (which < 0 ? -1 - which : before + which) * dkp; }
    const float *beta() const { return args.beta + first * args.heads + h; }

    // --- the walks forward

    void begin(int64_t from, int64_t position, int64_t count, const Shared &of_keys) {
        if (learns) BackChunk::begin(from, position, count, of_keys);
        else Chunk::begin(from, position, count, of_keys);
        finite = delta.fill(shared, m, beta(), args.heads, learns) && finite;
        queries = delta.Q, products = delta.S;
        if (learns) rows_of(delta.Q, m, dk, Qh, dkp);
    }

    void own(const float *weight) {
        if (learns) BackChunk::own(weight);
    }
    void read_rows(const Rows &rows, const int64_t *many, int64_t count, const float *weight, Arena &) {
        const int64_t total_rows = sum_of(many, count);
        if (!learns || !total_rows || !meet_rows(rows, many, count, total_rows, weight)) return;
        float *d = note_rows(Event::read_rows, nullptr, 0, total_rows, rows.token, dkp);
        if (d) product<Into::set>(total_rows, dkp, m, loose_d.floats, CHUNK, 1, Qh, dkp, d, dkp);
    }
    void read(float *matrix, const float *weight, float factor, int64_t state) {
        if (learns) BackChunk::read(matrix, weight, factor, state);
        move(matrix, 1, false);
    }
    void read_and_take(float *matrix, bool fresh) {
        if (learns && !fresh) BackChunk::read(matrix, E, 1, 0);
        spread();
        if (fresh) fold(matrix, 0, fresh, m, own_rows(0));
        else move(matrix, E[m - 1], true);
    }

    // matrix <- fade (matrix - H^T K matrix), plus own tokens if it takes them
    void move(float *matrix, float fade, bool takes) {
        float *copy = learns ? new_copy() : nullptr, *w = copy ? copy + dk * dvp : W;
        if (arena.failed) return;
        product<Into::set>(m, dvp, dk, shared.K, dkp, 1, matrix, dvp, w, dvp);
        for (int64_t t = 0; t < m; ++t)
            for (int64_t j = 0; j < dvp; j += LANES) {
                const Vec out = load(w + t * dvp + j) * -fade;
                store(w + t * dvp + j, takes ? out + load(V + t * dvp + j) * tail[t] : out);
            }
        if (copy) {
            memcpy(copy, matrix, dk * dvp * 4);
            if (Event *event = events.add(1, arena)) *event = {Event::move, matrix, copy, fade, 0, 0, takes ? m : 0};
        }
        product<Into::fade>(dk, dvp, m, delta.H, 1, dkp, w, dvp, matrix, dvp, nullptr, fade);
    }
    float *new_copy() {
        if (copied == copies.count) {
            float *made_now = arena.floats((dk + CHUNK) * dvp), **listed = copies.add(1, arena);
            if (!listed || !made_now) return nullptr;
            *listed = made_now;
        }
        return copies.items[copied++];
    }

    void spread() {
        if (!learns) return;
        spread_values();
        int64_t *at = locals.add(1, arena);
        float *kept = tape.add(CHUNK * CHUNK + dk * CHUNK, arena);
        if (!at || !kept) return;
        *at = tape.count - (CHUNK * CHUNK + dk * CHUNK);
        memcpy(kept, A, CHUNK * CHUNK * 4), memcpy(kept + CHUNK * CHUNK, dQ, dk * CHUNK * 4);
    }

    // Matrices keep their addresses from walk to walk.
    float *new_matrix(Arena &) {
        if (made == matrices.count) {
            float *fresh = BackChunk::new_matrix(arena);
            if (!fresh) return nullptr;
            memset(gradient(fresh), 0, dk * dvp * 4);
        }
        return matrices.items[made++];
    }

    void combine(float *A_, float a, float *B, float b) {
        if (learns) BackChunk::combine(A_, a, B, b);
        else Chunk::combine(A_, a, B, b);
    }
    void drop(float *matrix) {
        if (learns) BackChunk::drop(matrix);
    }

    void fold(float *matrix, float fade, bool fresh, int64_t many, const Rows &rows) {
        Chunk::fold(matrix, fade, fresh, many, rows);
        if (!learns) return;
        const float by = fresh ? 0 : fade;
        if (rows.keys >= delta.H && rows.keys < delta.H + CHUNK * dkp) {  // own tokens: they will be there again
            if (Event *event = events.add(1, arena))
                *event = {Event::take, matrix, nullptr, by, 0, (rows.keys - delta.H) / dkp, many};
            return;
        }
        float *copy = note_rows(Event::fold, matrix, by, many, rows.token, dkp + dvp);
        float *coefficient = coefficients.add(many, arena), *sway = rows.sway ? sways.add(many, arena) : coefficient;
        if (!copy || !coefficient || !sway) return;
        memcpy(coefficient, rows.coefficient, many * 4);
        if (rows.sway) memcpy(sway, rows.sway, many * 4);
        for (int64_t r = 0; r < many; ++r) memcpy(copy + r * dkp, rows.keys + r * rows.stride, dkp * 4);
        memcpy(copy + many * dkp, rows.values, many * dvp * 4);
    }

    void move_rows(float *keys, int64_t rows, const int32_t *which, Arena &) {
        if (!rows || !loose.fit(rows * CHUNK, arena)) return;
        if (learns) {
            float *copy = note_rows(Event::move_rows, nullptr, 0, rows, which, dkp);
            if (copy) memcpy(copy, keys, rows * dkp * 4);
        }
        delta.move_rows(shared, m, keys, rows, loose.floats);
    }

    // An event of rows, with so many floats of each; where these may be written, null without memory.
    float *note_rows(decltype(Event::kind) kind, float *matrix, float a, int64_t many, const int32_t *which,
                     int64_t each) {
        Event *event = events.add(1, arena);
        int32_t *listed = tokens.add(many, arena);
        float *copy = tape.add(many * each, arena);
        if (!event || !listed || !copy) return nullptr;
        memcpy(listed, which, many * 4);
        *event = {kind, matrix, nullptr, a, 0, tokens.count - many, many};
        event->tape = tape.count - many * each, event->coefficients = coefficients.count;
        return copy;
    }

    Rows own_rows(int64_t s) const { return {delta.H + s * dkp, dkp, V + s * dvp, tail + s, token + s}; }

    // --- the walk backward

    void new_tape() {
        events.count = weights.count = coefficients.count = sways.count = tokens.count = ends.count = tape.count = locals.count = 0;
        copied = 0;
    }

    // Chunk number `chunk` of the block, which has begun again.
    void back_over(int64_t chunk) {
        memset(dHT, 0, dkp * CHUNK * 4), memset(dKT, 0, dkp * CHUNK * 4);
        transpose_rows(delta.H, dkp, m, dk, HT);
        const int64_t from = chunk ? ends.items[chunk - 1] : 0;
        for (int64_t i = ends.items[chunk]; i-- > from;) {
            const Event &event = events.items[i];
            float *d = event.matrix ? gradient(event.matrix) : nullptr;
            switch (event.kind) {
                case Event::read: unread(d, weights.items + event.at, delta.Q); break;
                case Event::fold: unfold(d, event); break;
                case Event::combine: split(d, event); break;
                case Event::drop: memset(d, 0, dk * dvp * 4); break;
                case Event::move: unmove(d, event); break;
                case Event::take: untake(d, event); break;
                case Event::move_rows: unmove_rows(event); break;
                case Event::read_rows: unread_rows(event); break;
            }
        }
        own_keys();
        const float *kept = tape.items + locals.items[chunk];
        memcpy(A, kept, CHUNK * CHUNK * 4), memcpy(dQ, kept + CHUNK * CHUNK, dk * CHUNK * 4);
        through_products();
        through_steps();
        rows_of(dKT, m, dk, T, dkp);
        for (int64_t t = 0; t < m; ++t) {
            add_row(T + t * dkp, 1, dK + t * dkp, dk);
            add_row(d_k(token[t]), 1, T + t * dkp, dk);
        }
    }

    // Of own tokens from s on that a matrix took: their values, and (by way of `turned`) their keys.
    void of_taken(const float *d, int64_t s, int64_t many) {
        for (int64_t t = s; t < s + many; ++t) {
            add_row(d_v(token[t]), tail[t], dW + t * dvp, dv);
            if (args.g) net[token[t]] -= double(tail[t]) * dot(dW + t * dvp, V + t * dvp, dv);
        }
        product<Into::fade>(dk, padded(m), dv, d, dvp, 1, turned, CHUNK, dHT, CHUNK, nullptr, 1);
    }

    // matrix' = a matrix + H^T W, W = -a K matrix (+ tail V)
    void unmove(float *d, const Event &event) {
        const float *matrix = event.other, *w = matrix + dk * dvp;
        product<Into::set>(m, dvp, dk, delta.H, dkp, 1, d, dvp, dW, dvp);
        transpose_rows(w, dvp, m, dv, turned);
        of_taken(d, 0, event.many);
        for (int64_t i = 0; i < m * dvp; i += LANES) store(dW + i, load(dW + i) * -event.a);
        transpose_rows(dW, dvp, m, dv, turned);
        product<Into::fade>(dk, padded(m), dv, matrix, dvp, 1, turned, CHUNK, dKT, CHUNK, nullptr, 1);
        product<Into::fade>(dk, dvp, m, shared.K, 1, dkp, dW, dvp, d, dvp, nullptr, event.a);
    }

    // matrix' = a matrix + H^T tail V, over some own tokens
    void untake(float *d, const Event &event) {
        const int64_t s = event.at, many = event.many;
        product<Into::set>(many, dvp, dk, delta.H + s * dkp, dkp, 1, d, dvp, dW + s * dvp, dvp);
        memset(W, 0, m * dvp * 4);
        for (int64_t t = s; t < s + many; ++t)
            for (int64_t j = 0; j < dvp; j += LANES) store(W + t * dvp + j, load(V + t * dvp + j) * tail[t]);
        transpose_rows(W, dvp, m, dv, turned);
        of_taken(d, s, many);
        fade_gradient(d, event.a);
    }
    void fade_gradient(float *d, float by) const {
        for (int64_t i = 0; by != 1 && i < dk * dvp; i += LANES) store(d + i, load(d + i) * by);
    }

    // The same over loose rows.
    void unfold(float *d, const Event &event) {
        const float *keys = tape.items + event.tape, *values = keys + event.many * dkp;
        const float *coefficient = coefficients.items + event.coefficients;
        const float *sway = d_gate ? sways.items + event.coefficients : nullptr;
        const int32_t *which = tokens.items + event.at;
        for (int64_t done = 0; done < event.many; done += CHUNK) {
            const int64_t n = event.many - done < CHUNK ? event.many - done : CHUNK;
            product<Into::set>(n, dvp, dk, keys + done * dkp, dkp, 1, d, dvp, dW, dvp);
            transpose_rows(values + done * dvp, dvp, n, dv, turned);
            product<Into::set>(dk, padded(n), dv, d, dvp, 1, turned, CHUNK, X, CHUNK);
            rows_of(X, n, dk, T, dkp);
            for (int64_t r = 0; r < n; ++r) {
                const int32_t token_of = which[done + r];
                const float by = coefficient[done + r];
                add_row(d_row(token_of), by, T + r * dkp, dk);
                if (token_of < 0) continue;
                add_row(d_v(token_of), by, dW + r * dvp, dv);
                if (!args.g && !sway) continue;
                const double read = double(by) * dot(dW + r * dvp, values + (done + r) * dvp, dv);
                is_read(token_of, read, sway ? sway[done + r] : 0);
            }
        }
        fade_gradient(d, event.a);
    }

    void unread_rows(const Event &event) {
        for (int64_t r = 0; r < event.many; ++r)
            add_row(d_row(tokens.items[event.at + r]), 1, tape.items + event.tape + r * dkp, dk);
    }

    // k' = k - H^T (K k)
    void unmove_rows(const Event &event) {
        const int64_t n = event.many;
        const float *keys = tape.items + event.tape;
        if (!loose.fit(n * CHUNK, arena) || !loose_d.fit(n * CHUNK, arena) || !rows_d.fit(n * dkp, arena)) return;
        float *along = loose.floats, *back_along = loose_d.floats, *d = rows_d.floats;
        for (int64_t r = 0; r < n; ++r) {  // a token with two rows, by the soft gate, has one gradient: the first takes it
            float *from = d_row(tokens.items[event.at + r]);
            memcpy(d + r * dkp, from, dkp * 4), memset(from, 0, dkp * 4);
        }
        product<Into::set>(n, padded(m), dk, keys, dkp, 1, shared.KT, CHUNK, along, CHUNK);
        product<Into::set>(n, padded(m), dk, d, dkp, 1, HT, CHUNK, back_along, CHUNK);
        for (int64_t r = 0; r < n; ++r)
            for (int64_t t = 0; t < m; t += LANES) {
                const int64_t at = r * CHUNK + t;
                store(along + at, -load(along + at)), store(back_along + at, -load(back_along + at));
            }
        product<Into::fade>(dk, padded(m), n, d, 1, dkp, along, CHUNK, dHT, CHUNK, nullptr, 1);
        product<Into::fade>(dk, padded(m), n, keys, 1, dkp, back_along, CHUNK, dKT, CHUNK, nullptr, 1);
        product<Into::fade>(n, dkp, m, back_along, CHUNK, 1, shared.K, dkp, d, dkp, nullptr, 1);
        for (int64_t r = 0; r < n; ++r) add_row(d_row(tokens.items[event.at + r]), 1, d + r * dkp, dkp);
    }

    // Gradients of the keys that own tokens leave: those that stayed loose have theirs in `carried`. H = U^T K.
    void own_keys() {
        rows_of(dHT, m, dk, T, dkp);
        for (int64_t s = 0; s < m; ++s) {
            add_row(T + s * dkp, 1, d_row(token[s]), dk);
            memset(T + s * dkp + dk, 0, (dkp - dk) * 4);
        }
        transpose_rows(T, dkp, m, dk, dHT);
        product<Into::set>(m, CHUNK, dk, shared.K, dkp, 1, dHT, CHUNK, dU, CHUNK);
        product<Into::set>(m, dkp, m, delta.U, CHUNK, 1, T, dkp, dK, dkp);
    }

    // Queries Q - S^T K, products S = U^T tril(Q K^T) (by token and query): A and dQ are their gradients.
    void through_products() {
        rows_of(dQ, m, dk, T, dkp);
        for (int64_t t = 0; t < m; ++t) memset(T + t * dkp + dk, 0, (dkp - dk) * 4);
        float minus[CHUNK];
        for (float &x : minus) x = -1;
        product<Into::add_weighted>(m, dkp, m, delta.S, CHUNK, 1, T, dkp, dK, dkp, minus);
        product<Into::add_weighted>(m, CHUNK, dk, shared.K, dkp, 1, dQ, CHUNK, A, CHUNK, minus);
        upper(A, 0);
        product<Into::set>(m, CHUNK, m, delta.U, CHUNK, 1, A, CHUNK, dS, CHUNK);
        upper(dS, 0);
        product<Into::fade>(dk, padded(m), m, shared.K, 1, dkp, dS, CHUNK, dQ, CHUNK, nullptr, 1);
        product<Into::fade>(m, dkp, m, dS, CHUNK, 1, Qr, dkp, dK, dkp, nullptr, 1);
        rows_of(dQ, m, dk, T, dkp);
        for (int64_t t = 0; t < m; ++t) add_row(d_q(token[t]), 1, T + t * dkp, dk);
        transpose_rows(A, CHUNK, m, CHUNK, dS);  // by query and token
        product<Into::fade>(m, CHUNK, m, delta.masked, CHUNK, 1, dS, CHUNK, dU, CHUNK, nullptr, 1);
    }
    // x [s][t] is zero where t < s + after.
    void upper(float *x, int64_t after) const {
        for (int64_t s = 0; s < m; ++s)
            for (int64_t t = 0; t < CHUNK; t += LANES) {
                const Ints kept = (lane + int32_t(t) >= int32_t(s + after)) & (lane + int32_t(t) < int32_t(m));
                store(x + s * CHUNK + t, (Vec)((Ints)load(x + s * CHUNK + t) & kept));
            }
    }

    // U = (I + L)^-1 diag(beta), L[t][s] = beta_t k_t . k_s for s < t
    void through_steps() {
        const float *KK = shared.KK, *steps = beta();
        for (int64_t t = m; t-- > 0;) {  // Y = (I + L)^-T dU, up to the diagonal
            float *y = Y + t * CHUNK;
            memcpy(y, dU + t * CHUNK, CHUNK * 4);
            for (int64_t r = t + 1; r < m; ++r) {
                const float by = steps[r * args.heads] * KK[t * CHUNK + r];
                for (int64_t c = 0; c <= t; c += LANES) store(y + c, load(y + c) - load(Y + r * CHUNK + c) * by);
            }
        }
        transpose_rows(Y, CHUNK, m, CHUNK, dU);
        product<Into::set>(m, CHUNK, m, delta.U, CHUNK, 1, dU, CHUNK, dS, CHUNK);  // -dL, by token s and t
        upper(dS, 1);
        for (int64_t t = 0; t < m; ++t) {
            double d = Y[t * CHUNK + t];
            for (int64_t s = 0; s < t; ++s) d -= double(dS[s * CHUNK + t]) * KK[s * CHUNK + t];
            back.d_beta[(first + t) * args.heads + h] = float(d);
            for (int64_t s = 0; s < t; ++s)
                dS[t * CHUNK + s] = dS[s * CHUNK + t] = dS[s * CHUNK + t] * -steps[t * args.heads];
        }
        product<Into::fade>(m, dkp, m, dS, CHUNK, 1, shared.K, dkp, dK, dkp, nullptr, 1);
    }
};

}  // namespace

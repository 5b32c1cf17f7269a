// The third stage: one token of one head, on the carried state itself.
#pragma once
#include "args.h"
#include "attend.h"
#include "decide.h"
#include "rows.h"

namespace {

// S = decay S + k v^T; o = q^T S
void decode_single(const DecodeArgs &a, int64_t n, int64_t h) {
    const int64_t at = n * a.heads + h, dk = a.dk, dv = a.dv;
    const float *q = a.q + (n * a.key_heads + h * a.key_heads / a.heads) * dk, *k = a.k + (q - a.q), *v = a.v + at * dv;
    const float decay = a.g ? expf(a.g[at]) : 1;
    float *S = (float *)a.matrices + at * dk * dv, *o = a.o + at * dv;
    for (int64_t j = 0; j < dv; ++j) o[j] = 0;
    for (int64_t d = 0; d < dk; ++d) {
        float *row = S + d * dv;
        const float kd = k[d], qd = q[d];
        int64_t j = 0;
        for (; j + LANES <= dv; j += LANES) {
            const Vec x = load(row + j) * decay + load(v + j) * kd;
            store(row + j, x);
            store(o + j, load(o + j) + x * qd);
        }
        for (; j < dv; ++j) row[j] = decay * row[j] + kd * v[j], o[j] += qd * row[j];
    }
    for (int64_t j = 0; j < dv; ++j) o[j] *= float(a.scale);
}

// Levels [N, H, states, dk, dv]: bit i of the length says whether level i + 1 holds a block.
void decode_levels(const DecodeArgs &a, int64_t n, int64_t h) {
    const int64_t at = n * a.heads + h, dk = a.dk, dv = a.dv, size = dk * dv, length = a.length[n];
    const float *q = a.q + (n * a.key_heads + h * a.key_heads / a.heads) * dk, *k = a.k + (q - a.q), *v = a.v + at * dv;
    const float *lam = a.lam + at * a.width;
    const float decay = a.g ? expf(a.g[at]) : 1, scale = float(a.scale);
    float *levels = (float *)a.matrices + at * a.states * size, *o = a.o + at * dv;
    for (int64_t j = 0; j < dv; ++j) o[j] = 0;
    add_row(o, lam[0] * dot(q, k, dk), v, dv);
    int64_t target = 0;  // the first level that is free: the token and all below become its block
    while (length >> target & 1) ++target;
    float *block = levels + target * size;
    for (int64_t d = 0; d < dk; ++d)
        for (int64_t j = 0; j < dv; ++j) block[d * dv + j] = k[d] * v[j];
    for (int64_t level = 0; level < a.states; ++level) {
        if (!(length >> level & 1)) continue;
        float *S = levels + level * size;
        const int64_t column = level + 1 < a.width ? level + 1 : a.width - 1;
        read_matrix(o, lam[column] * decay, q, S, dk, dv);
        if (level < target) {
            add_matrices(block, 1, S, decay, size);
            memset(S, 0, size * 4);
        } else if (a.g) {
            add_matrices(S, decay, S, 0, size);
        }
    }
    for (int64_t j = 0; j < dv; ++j) o[j] *= scale;
}

constexpr int64_t STRIP = 256;  // columns of a matrix that are looked at together

template <class T> struct DecodeHead {
    const DecodeArgs &a;
    const int64_t n, h, at, dk, dv, K;
    const float *q, *k, *v;
    int32_t *matrix, *place;
    float *factor, *keys;
    int64_t *rows, *count;
    double *info, &norm;
    int64_t size = 0, total = 0;  // states; loose rows of all of them

    DecodeHead(const DecodeArgs &args, int64_t sequence, int64_t head)
        : a(args), n(sequence), h(head), at(n * args.heads + head), dk(args.dk), dv(args.dv), K(args.states),
          q(args.q + (n * args.key_heads + head * args.key_heads / args.heads) * args.dk), k(args.k + (q - args.q)),
          v(args.v + at * args.dv), matrix(args.matrix + at * K), place(args.places + at * args.places_room),
          factor(args.factor + at * K), keys(args.key_sums ? args.key_sums + at * K * args.dk : nullptr),
          rows(args.rows + at * K), count(args.count + at * K), info(args.info + at * K), norm(args.norm[at]) {
        while (size < K && count[size]) total += rows[size++];
    }
    T *matrix_at(int64_t i) const { return (T *)a.matrices + int64_t(matrix[i]) * dk * dv; }
    T *key_at(int64_t r) const { return (T *)a.row_keys + int64_t(place[r]) * dk; }
    T *value_at(int64_t r) const { return (T *)a.row_values + int64_t(place[r]) * dv; }
    float &coefficient_at(int64_t r) const { return a.row_coefficient[place[r]]; }

    // false: no memory
    bool step() {
        float *unit = (float *)malloc((dk + dv) * 4);  // the token over its norms
        if (!unit) return false;
        const double decay = a.g ? exp(double(a.g[at])) : 1;
        const double token = unit_of(k, dk, unit, dk) * unit_of(v, dv, unit + dk, dv);
        const double product = size ? product_with_current(unit, unit + dk) : 0;
        free(unit);
        const float score = a.given ? a.score[at] : size ? float(information(product, token)) : float(a.first_score);
        bool opens = a.given ? a.boundary[at] : !size || score >= float(a.tau);
        if (!a.given && a.block) opens = !size || a.length[n] % a.block == 0;
        for (int64_t i = 0; i < size; ++i) factor[i] *= float(decay);
        for (int64_t r = 0; r < total; ++r) coefficient_at(r) *= float(decay);
        a.freed[at] = -1;
        if (opens) {
            const int64_t pair = a.given ? a.merged[at] : size == K ? cheapest() : -1;
            if (pair >= 0) merge(pair);
            open_state(score), norm = token;
        } else {
            count[size - 1] += 1, info[size - 1] += score, rows[size - 1] += 1;
            join(decay, token, product);
        }
        take_in(opens);
        read();
        a.fold[at] = full();
        return true;
    }

    // cos of the token, given over its norms, and the current state
    double product_with_current(const float *unit_k, const float *unit_v) const {
        if (norm == 0) return 0;
        const int64_t i = size - 1;
        double product = 0;
        for (int64_t r = total - rows[i]; r < total; ++r)
            product += double(coefficient_at(r)) * dot(unit_k, key_at(r), dk) * dot(unit_v, value_at(r), dv);
        if (matrix[i] < 0) return product / norm;
        double along = 0;
        for (int64_t j = 0; j < dv; j += STRIP) {
            const int64_t width = dv - j < STRIP ? dv - j : STRIP;
            float y[STRIP] = {};
            for (int64_t d = 0; d < dk; ++d) add_row(y, unit_k[d], matrix_at(i) + d * dv + j, width);
            along += dot(unit_v + j, y, width);
        }
        return (product + along * factor[i]) / norm;
    }

    double information(double cos, double token) const {
        if (token == 0) return 0;
        if (norm == 0) return a.first_score;
        if (a.state_score) {
            const double largest = norm > token ? norm : token, c = norm / largest, d = token / largest;
            const double left = c * c + 2 * c * d * cos + d * d;
            cos = left <= 0 ? 0 : (c + d * cos) / sqrt(left);
        }
        cos = cos > 1 ? 1 : cos < -1 ? -1 : cos;  // keeps NaN
        return sqrt(2 - 2 * cos);
    }

    void join(double decay, double token, double cos) {
        const double before = decay * norm, square = before * before + 2 * before * token * cos + token * token;
        norm = sqrt(square < 0 ? 0 : square);
        if (float(norm) == 0) norm = 0;
        const double larger = before > token ? before : token;
        if (norm < 0.25 * larger) norm = -1;  // what is left after tokens have cancelled is measured, in take_in
    }

    int64_t cheapest() const {
        double least = INFINITY, largest = 0;
        auto cost = [&](int64_t i) { return (info[i] + info[i + 1]) / double(count[i] + count[i + 1]); };
        for (int64_t i = 0; i + 1 < size; ++i) {
            const double c = cost(i), of = fabs(c);
            if (of < INFINITY) least = c < least ? c : least, largest = of > largest ? of : largest;
        }
        for (int64_t i = 0; i + 1 < size; ++i)
            if (cost(i) < INFINITY && cost(i) <= least + a.tie * largest) return i;
        return 0;
    }

    void merge(int64_t i) {
        if (i + 1 >= size) return;
        if (matrix[i] >= 0 && matrix[i + 1] >= 0) {
            add_matrices(matrix_at(i), factor[i], matrix_at(i + 1), factor[i + 1], dk * dv);
            a.freed[at] = matrix[i + 1];
            factor[i] = 1;
        } else if (matrix[i + 1] >= 0) {
            matrix[i] = matrix[i + 1], factor[i] = factor[i + 1];
        }
        rows[i] += rows[i + 1], count[i] += count[i + 1], info[i] += info[i + 1];
        for (int64_t d = 0; keys && d < dk; ++d) keys[i * dk + d] += keys[(i + 1) * dk + d];
        const int64_t behind = size - i - 2;
        memmove(matrix + i + 1, matrix + i + 2, behind * 4), memmove(factor + i + 1, factor + i + 2, behind * 4);
        memmove(rows + i + 1, rows + i + 2, behind * 8), memmove(count + i + 1, count + i + 2, behind * 8);
        memmove(info + i + 1, info + i + 2, behind * 8);
        if (keys) memmove(keys + (i + 1) * dk, keys + (i + 2) * dk, behind * dk * 4);
        --size;
        matrix[size] = -1, factor[size] = 0, rows[size] = 0, count[size] = 0, info[size] = 0;
    }

    void open_state(float score) {
        matrix[size] = -1, factor[size] = 0, rows[size] = 1, count[size] = 1, info[size] = score;
        ++size;
    }

    // The token becomes the last row.
    void take_in(bool opens) {
        place[total] = a.new_row[at];
        for (int64_t d = 0; d < dk; ++d) put(key_at(total) + d, k[d]);
        for (int64_t j = 0; j < dv; ++j) put(value_at(total) + j, v[j]);
        coefficient_at(total) = 1;
        ++total;
        for (int64_t d = 0; keys && d < dk; ++d)
            keys[(size - 1) * dk + d] = opens ? k[d] : keys[(size - 1) * dk + d] + k[d];
        if (norm < 0) norm = measured();
    }

    // The norm of the current state, row by row of its matrix.
    double measured() const {
        const int64_t i = size - 1;
        double square = 0;
        float y[STRIP];
        for (int64_t d = 0; d < dk; ++d)
            for (int64_t j = 0; j < dv; j += STRIP) {
                const int64_t width = dv - j < STRIP ? dv - j : STRIP;
                for (int64_t c = 0; c < width; ++c)
                    y[c] = matrix[i] >= 0 ? factor[i] * number(matrix_at(i)[d * dv + j + c]) : 0;
                for (int64_t r = total - rows[i]; r < total; ++r)
                    add_row(y, coefficient_at(r) * number(key_at(r)[d]), value_at(r) + j, width);
                for (int64_t c = 0; c < width; ++c) square += double(y[c]) * y[c];
            }
        return sqrt(square);
    }

    void read() {
        float *o = a.o + at * dv;
        for (int64_t j = 0; j < dv; ++j) o[j] = 0;
        const float *lam = a.lam + at * a.width;
        const float length = a.route ? fmaxf(sqrtf(dot(q, q, dk)), NONE) : 0;
        int64_t r = 0;
        for (int64_t i = 0; i < size; ++i) {
            const int64_t column = a.recency ? size - 1 - i : i;
            float w = lam[column < a.width ? column : a.width - 1];
            if (a.route) {
                const float *c = keys + i * dk;
                const float cos = dot(q, c, dk) / (length * fmaxf(sqrtf(dot(c, c, dk)), NONE));
                w *= expf(a.route[at] * (cos - 1));
            }
            if (matrix[i] >= 0) read_matrix(o, w * factor[i], q, matrix_at(i), dk, dv);
            for (const int64_t stop = r + rows[i]; r < stop; ++r)
                add_row(o, w * coefficient_at(r) * dot(q, key_at(r), dk), value_at(r), dv);
        }
        for (int64_t j = 0; j < dv; ++j) o[j] *= float(a.scale);
    }

    // The first state with too many loose rows, -1 if there is none.
    int32_t full() const {
        for (int64_t i = 0; i < size; ++i)
            if (matrix[i] >= 0 ? rows[i] >= a.most_loose : rows[i] > a.longest_short) return int32_t(i);
        return -1;
    }

    // State a.fold[at] takes its rows into its matrix, a new one if `fresh` is not -1; the rows' places go to the end.
    void fold(int32_t fresh) {
        const int64_t i = a.fold[at];
        int64_t first = 0;
        for (int64_t s = 0; s < i; ++s) first += rows[s];
        if (fresh >= 0) matrix[i] = fresh;
        for (int64_t d = 0; d < dk; ++d) fold_row(matrix_at(i) + d * dv, fresh >= 0 ? 0 : factor[i], fresh >= 0, d, first, rows[i]);
        factor[i] = 1;
        int32_t freed[4096];
        int64_t left = rows[i];
        while (left) {  // turn the places around, some at a time
            const int64_t part = left < 4096 ? left : 4096;
            memcpy(freed, place + first, part * 4);
            memmove(place + first, place + first + part, (total - first - part) * 4);
            memcpy(place + total - part, freed, part * 4);
            left -= part;
        }
        a.freed_rows[at] = rows[i];
        rows[i] = 0;
        if (i == size - 1) {
            total -= a.freed_rows[at];
            norm = measured();
        }
    }

    void fold_row(T *row, float fade, bool fresh, int64_t d, int64_t first, int64_t many) const {
        int64_t j = 0;
        for (; j + LANES <= dv; j += LANES) {
            Vec x = fresh ? Vec{} : load_as(row + j) * fade;
            for (int64_t r = first; r < first + many; ++r)
                x += load_as(value_at(r) + j) * (coefficient_at(r) * number(key_at(r)[d]));
            store_as(row + j, x);
        }
        for (; j < dv; ++j) {
            float x = fresh ? 0 : number(row[j]) * fade;
            for (int64_t r = first; r < first + many; ++r)
                x += number(value_at(r)[j]) * (coefficient_at(r) * number(key_at(r)[d]));
            put(row + j, x);
        }
    }
};

}  // namespace

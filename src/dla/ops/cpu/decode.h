// The third stage for the dynamic memory: one token of one head, on the carried state itself.
#pragma once
#include "args.h"
#include "decide_delta.h"
#include "decode_matrices.h"
#include "pending.h"
#include "rows.h"

namespace {

constexpr int64_t BLOCK = 64;  // loose rows that are read together

template <class T> struct DecodeHead {
    const DecodeArgs &a;
    const int64_t n, h, at, dk, dv, K;
    const float *q, *k, *v;
    int32_t *matrix, *place;
    float *factor, *keys;
    int64_t *rows, *count;
    double *info, &norm;
    Pending pending;              // of its transitions those of the last steps, whose tokens are the last rows
    int64_t size = 0, total = 0;  // states; loose rows of all of them

    DecodeHead(const DecodeArgs &args, int64_t sequence, int64_t head)
        : a(args), n(sequence), h(head), at(n * args.heads + head), dk(args.dk), dv(args.dv), K(args.states),
          q(args.q ? args.q + (n * args.key_heads + head * args.key_heads / args.heads) * args.dk : nullptr),
          k(q ? args.k + (q - args.q) : nullptr), v(args.v ? args.v + at * args.dv : nullptr),
          matrix(args.matrix + at * K), place(args.places + at * args.places_room),
          factor(args.factor + at * K), keys(args.key_sums ? args.key_sums + at * K * args.dk : nullptr),
          rows(args.rows + at * K), count(args.count + at * K), info(args.info + at * K), norm(args.norm[at]),
          pending(args, at) {
        while (size < K && count[size]) total += rows[size++];
    }
    // What a state is made of: its matrix, if it has one, and loose rows.
    struct Part {
        const T *matrix;
        float factor;
        int64_t first, many;
    };

    T *matrix_at(int64_t i) const { return (T *)a.matrices + int64_t(matrix[i]) * dk * dv; }
    T *key_at(int64_t r) const { return (T *)a.row_keys + int64_t(place[r]) * dk; }
    T *value_at(int64_t r) const { return (T *)a.row_values + int64_t(place[r]) * dv; }
    float &coefficient_at(int64_t r) const { return a.row_coefficient[place[r]]; }

    // false: no memory
    bool step() {
        float *unit = (float *)malloc((dk + 2 * dv) * 4), *held = unit + dk + dv;  // the token over its norms; its S^T k
        if (!unit) return false;
        const double decay = a.g ? exp(double(a.g[at])) : 1, beta = a.beta ? a.beta[at] : 1;
        const double norm_k = unit_of(k, dk, unit, dk), norm_v = unit_of(v, dv, unit + dk, dv);
        const double token = fabs(beta) * norm_k * norm_v;
        const double product = size ? product_with_current(unit, unit + dk, held) : 0;
        const double cos = beta < 0 ? -product : product;
        const float score = a.given ? a.score[at] : size ? float(information(cos, token)) : float(a.first_score);
        bool opens = a.given ? a.boundary[at] : !size || score >= float(a.tau);
        if (!a.given && a.block) opens = !size || a.length[n] % a.block == 0;
        for (int64_t i = 0; i < size; ++i) factor[i] *= float(decay);
        for (int64_t r = 0; r < total; ++r) coefficient_at(r) *= float(decay);
        a.freed[at] = -1;
        if (opens) {
            const int64_t pair = a.given ? a.merged[at] : size == K ? cheapest() : -1;
            if (pair >= 0) merge(pair);
            open_state(score), norm = token;
            if (a.beta) a.parts[at] = 1;
        } else {
            count[size - 1] += 1, info[size - 1] += score, rows[size - 1] += 1;
            if (a.beta) join_by_delta(decay, beta * norm_k * norm_v, beta * norm_k * norm_k, unit + dk, held);
            else join(decay, token, product);
        }
        free(unit);
        take_in(opens);
        read();
        if (pending.full()) settle();
        a.fold[at] = full();
        return true;
    }

    int64_t old() const { return total - pending.many(); }  // rows from before the transitions that are pending

    // cos of the token, given over its norms, and the current state, of which `held` becomes S^T k
    double product_with_current(const float *unit_k, const float *unit_v, float *held) const {
        for (int64_t j = 0; j < dv; ++j) held[j] = 0;
        if (norm == 0) return 0;
        const int64_t i = size - 1;
        float fits[PENDING];
        const float *back = pending.carry_back(unit_k, fits);
        double product = 0;
        for (int64_t r = total - rows[i]; r < total; ++r) {
            const float fit = r < old() ? dot(back, key_at(r), dk) : fits[r - old()];
            if (a.beta) add_row(held, coefficient_at(r) * fit, value_at(r), dv);
            else product += double(coefficient_at(r)) * fit * dot(unit_v, value_at(r), dv);
        }
        if (matrix[i] >= 0) read_matrix(held, factor[i], back, matrix_at(i), dk, dv, dv);
        return (product + dot(unit_v, held, dv)) / norm;
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

    // The same with the delta rule, by which the current state gets a row along k (see decide_delta.h): `written` times
    // the unit value without `step` times what the state held.
    void join_by_delta(double decay, double written, double step, const float *unit_v, const float *held) {
        const double before = decay * norm, erased = step * before, over = norm == 0 ? 0 : 1 / norm;
        const double larger = fabs(erased) > fabs(written) ? fabs(erased) : fabs(written);
        const double share = larger == 0 ? 0 : 1 / larger;
        double along = 0, square = 0;  // of the row over `larger`, with S^T k over its norm, and with itself
        for (int64_t j = 0; j < dv; ++j) {
            const float y = float(held[j] * over), x = float(written * share) * unit_v[j] - float(erased * share) * y;
            along += double(x) * y, square += double(x) * x;
        }
        const double row = larger * larger * square, apart = a.parts[at] * before * before + row;
        const double after = before * before + 2 * before * larger * along + row;
        norm = sqrt(after < 0 ? 0 : after);
        if (float(norm) == 0) norm = 0;
        if (apart > MOST_PARTS * norm * norm) norm = -1;  // little is left of what there was: measured, in take_in
        else a.parts[at] = norm == 0 ? 1 : apart / (norm * norm);
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

    // The token becomes the last row, and its transition is pending.
    void take_in(bool opens) {
        place[total] = a.new_row[at];
        put_row(key_at(total), k, dk);
        if (a.beta) {
            for (int64_t j = 0; j < dv; ++j) put(value_at(total) + j, a.beta[at] * v[j]);
            pending.push(k, a.beta[at]);
        } else {
            put_row(value_at(total), v, dv);
        }
        coefficient_at(total) = 1;
        ++total;
        for (int64_t d = 0; keys && d < dk; ++d)
            keys[(size - 1) * dk + d] = opens ? k[d] : keys[(size - 1) * dk + d] + k[d];
        if (norm >= 0 || norm != norm) return;
        settle();
        norm = measured();
        if (a.beta) a.parts[at] = 1;
    }

    // States go through the transitions that are pending.
    void settle() {
        if (!pending.many()) return;
        pending.turn();
        for (int64_t i = 0; i < size; ++i)
            if (matrix[i] >= 0) pending.apply(matrix_at(i), dv);
        for (int64_t r = 0; r < total; ++r) pending.apply_to_row(key_at(r), r < old() ? 0 : r - old() + 1);
        *pending.count = 0;
    }

    // The norm of the current state, some rows of its matrix at a time.
    double measured() const {
        const int64_t i = size - 1;
        if (i < 0) return 0;
        const Part part = {matrix[i] >= 0 ? matrix_at(i) : nullptr, factor[i], total - rows[i], rows[i]};
        double square = 0;
        int64_t d = 0;
        for (; d + 4 <= dk; d += 4) square += square_of_rows<4>(part, d);
        for (; d < dk; ++d) square += square_of_rows<1>(part, d);
        return sqrt(square);
    }

    template <int D> double square_of_rows(const Part &part, int64_t d) const {
        double square = 0;
        int64_t j = 0;
        for (; j + PANEL * LANES <= dv; j += PANEL * LANES) square += square_of_tile<D, PANEL>(part, d, j);
        for (; j + LANES <= dv; j += LANES) square += square_of_tile<D, 1>(part, d, j);
        for (; j < dv; ++j)
            for (int e = 0; e < D; ++e) {
                const double x = entry(part, d + e, j);
                square += x * x;
            }
        return square;
    }

    template <int D, int V> double square_of_tile(const Part &part, int64_t d, int64_t j) const {
        Vec x[D][V];
        collect(x, part, d, j);
        Wide squares{};
        for (int i = 0; i < 2 * D * V; ++i) {  // in doubles, half a vector at a time
            Half half;
            memcpy(&half, (const char *)x + i * sizeof half, sizeof half);
            const Wide wide = __builtin_convertvector(half, Wide);
            squares += wide * wide;
        }
        double square = 0;
        for (int i = 0; i < LANES / 2; ++i) square += squares[i];
        return square;
    }

    void read() {
        float *o = a.o + at * dv, weights[BLOCK];
        for (int64_t j = 0; j < dv; ++j) o[j] = 0;
        const float length = a.route ? fmaxf(sqrtf(dot(q, q, dk)), NONE) : 0;
        float fits[PENDING];
        const float *back = pending.carry_back(q, fits);
        int64_t first = 0, many = 0;  // rows that have a weight and are to be read
        for (int64_t i = 0; i < size; ++i) {
            const float w = weight_of(i, length);
            if (matrix[i] >= 0) read_matrix(o, w * factor[i], back, matrix_at(i), dk, dv, dv);
            for (int64_t left = rows[i]; left; --left) {
                weights[many] = w * coefficient_at(first + many);
                if (++many < BLOCK) continue;
                read_rows(o, back, fits, first, many, weights);
                first += many, many = 0;
            }
        }
        read_rows(o, back, fits, first, many, weights);
        for (int64_t j = 0; j < dv; ++j) o[j] *= float(a.scale);
    }

    // What state i counts for; `length` is that of q, if reads are routed.
    float weight_of(int64_t i, float length) const {
        const int64_t column = a.recency ? size - 1 - i : i;
        const float w = a.lam[at * a.width + (column < a.width ? column : a.width - 1)];
        if (!a.route) return w;
        const float *c = keys + i * dk;
        const float cos = dot(q, c, dk) / (length * fmaxf(sqrtf(dot(c, c, dk)), NONE));
        return w * expf(a.route[at] * (cos - 1));
    }

    // o += the sum of weight (q . key) value over up to BLOCK rows; q is `back`, or has met the last rows (`fits`)
    void read_rows(float *o, const float *back, const float *fits, int64_t first, int64_t many, float *weights) const {
        const int64_t before = first + many < old() ? many : first < old() ? old() - first : 0;
        int64_t r = 0;
        for (; r + 4 <= before; r += 4) {
            const T *row[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) row[i] = key_at(first + r + i);
            const Four fit = four_dots(back, row, dk);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) weights[r + i] *= fit[i];
        }
        for (; r < before; ++r) weights[r] *= dot(back, key_at(first + r), dk);
        for (; r < many; ++r) weights[r] *= fits[first + r - old()];
        int64_t j = 0;
        for (; j + 4 * LANES <= dv; j += 4 * LANES) add_columns<4>(o, j, first, many, weights);
        for (; j + LANES <= dv; j += LANES) add_columns<1>(o, j, first, many, weights);
        for (; j < dv; ++j)
            for (r = 0; r < many; ++r) o[j] += weights[r] * number(value_at(first + r)[j]);
    }

    // o += the sum of weight value, of V vectors of columns from j on
    template <int V> void add_columns(float *o, int64_t j, int64_t first, int64_t many, const float *weights) const {
        Vec total[V];
#pragma GCC unroll 4
        for (int c = 0; c < V; ++c) total[c] = load(o + j + c * LANES);
        for (int64_t r = 0; r < many; ++r) {
            const T *value = value_at(first + r) + j;
#pragma GCC unroll 4
            for (int c = 0; c < V; ++c) total[c] += load_as(value + c * LANES) * weights[r];
        }
#pragma GCC unroll 4
        for (int c = 0; c < V; ++c) store(o + j + c * LANES, total[c]);
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
        if (first + rows[i] > old()) settle();  // what the last steps wrote cannot be put before their transitions
        const Part part = {fresh < 0 ? matrix_at(i) : nullptr, factor[i], first, rows[i]};
        if (fresh >= 0) matrix[i] = fresh;
        int64_t d = 0;
        for (; d + 4 <= dk; d += 4) fold_rows<4>(part, d, matrix_at(i) + d * dv);
        for (; d < dk; ++d) fold_rows<1>(part, d, matrix_at(i) + d * dv);
        factor[i] = 1;
        int32_t freed[4096];
        int64_t left = rows[i];
        while (left) {  // turn the places around, some at a time
            const int64_t some = left < 4096 ? left : 4096;
            memcpy(freed, place + first, some * 4);
            memmove(place + first, place + first + some, (total - first - some) * 4);
            memcpy(place + total - some, freed, some * 4);
            left -= some;
        }
        a.freed_rows[at] = rows[i];
        rows[i] = 0;
        if (i == size - 1) {
            total -= a.freed_rows[at];
            norm = measured();
            if (a.beta) a.parts[at] = 1;
        }
    }

    // D rows of a matrix that all of the part becomes, from row d on.
    template <int D> void fold_rows(const Part &part, int64_t d, T *to) const {
        int64_t j = 0;
        for (; j + PANEL * LANES <= dv; j += PANEL * LANES) fold_tile<D, PANEL>(part, d, j, to + j);
        for (; j + LANES <= dv; j += LANES) fold_tile<D, 1>(part, d, j, to + j);
        for (; j < dv; ++j)
            for (int e = 0; e < D; ++e) put(to + e * dv + j, entry(part, d + e, j));
    }

    template <int D, int V> void fold_tile(const Part &part, int64_t d, int64_t j, T *to) const {
        Vec x[D][V];
        collect(x, part, d, j);
#pragma GCC unroll 4
        for (int e = 0; e < D; ++e)
#pragma GCC unroll 4
            for (int c = 0; c < V; ++c) store_as(to + e * dv + c * LANES, x[e][c]);
    }

    // Entry [d][j] of the matrix that a part stands for.
    float entry(const Part &part, int64_t d, int64_t j) const {
        float x = part.matrix ? number(part.matrix[d * dv + j]) * part.factor : 0;
        for (int64_t r = part.first; r < part.first + part.many; ++r)
            x += number(value_at(r)[j]) * (coefficient_at(r) * number(key_at(r)[d]));
        return x;
    }

    // D rows and V vectors of columns of that matrix, from [d][j] on.
    template <int D, int V> void collect(Vec (&x)[D][V], const Part &part, int64_t d, int64_t j) const {
        const T *from = part.matrix ? part.matrix + d * dv + j : nullptr;
#pragma GCC unroll 4
        for (int e = 0; e < D; ++e)
#pragma GCC unroll 4
            for (int c = 0; c < V; ++c) x[e][c] = from ? load_as(from + e * dv + c * LANES) * part.factor : Vec{};
        for (int64_t r = part.first; r < part.first + part.many; ++r) {
            const T *key = key_at(r) + d, *value = value_at(r) + j;
#pragma GCC unroll 4
            for (int e = 0; e < D; ++e)
#pragma GCC unroll 4
                for (int c = 0; c < V; ++c) x[e][c] += load_as(value + c * LANES) * (coefficient_at(r) * number(key[e]));
        }
    }
};

}  // namespace

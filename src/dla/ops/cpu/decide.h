// The first stage for one head: scores, boundaries and the merges of "density".
//
// The current state is norm * (carried * matrix + sum_s weight_s k_s row_s^T): what was current before the chunk is a
// matrix, and the chunk's own tokens are rows. Keys and values are taken over their norms, and weights are relative to
// the state's norm, which is kept apart: whatever the magnitudes, all numbers stay near one. What a row is depends on
// the transition: the token's value (PlainHead below), or what the delta rule writes of it (decide_delta.h).
#pragma once
#include "chunk.h"

namespace {

struct SharedKeys {
    float *unit;   // [CHUNK][dk] keys over their norms
    float *gram;   // [CHUNK][CHUNK] their products, s < t
    double *norm;  // [CHUNK]

    static int64_t floats(int64_t dk) { return CHUNK * dk + CHUNK * CHUNK + 2 * CHUNK; }
    static SharedKeys at(float *x, int64_t dk) {
        return {x, x + CHUNK * dk, (double *)(x + CHUNK * dk + CHUNK * CHUNK)};
    }
    bool fill(const float *k, int64_t stride, int64_t m, int64_t dk);  // false: no memory
};

double norm_of(const float *x, int64_t dim) {
    Wide total[4] = {};  // sums that do not wait for each other
    double rest = 0;
    int64_t d = 0;
    for (; d + 2 * LANES <= dim; d += 2 * LANES)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            Half part;
            memcpy(&part, x + d + i * LANES / 2, sizeof part);
            const Wide wide = __builtin_convertvector(part, Wide);
            total[i] += wide * wide;
        }
    for (; d < dim; ++d) rest += double(x[d]) * double(x[d]);
    const Wide sums = (total[0] + total[1]) + (total[2] + total[3]);
    for (int i = 0; i < LANES / 2; ++i) rest += sums[i];
    return sqrt(rest);
}

// out = x over its norm, zero up to `width`; the norm.
double unit_of(const float *x, int64_t dim, float *out, int64_t width) {
    const double norm = norm_of(x, dim);
    if (norm > 1e-30 && norm < 1e30) {
        const float by = float(norm);
        for (int64_t d = 0; d < dim; ++d) out[d] = x[d] / by;
    } else {
        for (int64_t d = 0; d < dim; ++d) out[d] = float(x[d] / (norm == 0 ? 1 : norm));
    }
    for (int64_t d = dim; d < width; ++d) out[d] = 0;
    return norm;
}

// gram [t][s] of rows [m][dim, `stride` apart], for s up to the end of t's step; `turned` [dim][CHUNK] is scratch
void fill_gram(const float *rows, int64_t stride, int64_t m, int64_t dim, float *turned, float *gram) {
    transpose_rows(rows, stride, m, dim, turned);
    for (int64_t t = 0; t < m; t += STEP)
        product<Into::set>(m - t < STEP ? m - t : STEP, t + STEP, dim, rows + t * stride, stride, 1, turned, CHUNK,
                           gram + t * CHUNK, CHUNK);
}

bool SharedKeys::fill(const float *k, int64_t stride, int64_t m, int64_t dk) {
    Arena arena;
    float *turned = arena.floats(dk * CHUNK);
    if (!turned) return false;
    for (int64_t t = 0; t < m; ++t) norm[t] = unit_of(k + t * stride, dk, unit + t * dk, dk);
    fill_gram(unit, dk, m, dk, turned, gram);
    return true;
}

// The list of states, as merges see it: counts and sums of scores, oldest first, and where their ends are written.
struct Densities {
    double *count, *info, *cost;  // [capacity + 1 and a vector]
    int32_t **death;
    int64_t size = 0;

    Densities(int64_t capacity, Arena &arena) {
        const int64_t room = capacity + 1 + LANES;
        count = (double *)arena.bytes(room * 8), info = (double *)arena.bytes(room * 8);
        cost = (double *)arena.bytes(room * 8), death = (int32_t **)arena.bytes(room * sizeof(int32_t *));
    }
    void push(double tokens, double scores, int32_t *ends) {
        count[size] = tokens, info[size] = scores, death[size] = ends;
        if (++size > 2) weigh(size - 3);  // the pair that no longer has the current state
    }
    void weigh(int64_t i) { cost[i] = (info[i] + info[i + 1]) / (count[i] + count[i + 1]); }

    // The oldest pair among those that tie for the smallest finite cost.
    int64_t cheapest(double tie) {
        const int64_t pairs = size - 1;
        weigh(pairs - 1);
        for (int64_t i = pairs; i < pairs + LANES / 2; ++i) cost[i] = INFINITY;
        Wide least = Wide{} + (double)INFINITY, largest{};
        for (int64_t i = 0; i < pairs; i += LANES / 2) {
            const Wide c = *(LooseWide *)(cost + i), size_of = c < 0 ? -c : c;
            least = c < least ? c : least;
            largest = (size_of > largest) & (size_of < INFINITY) ? size_of : largest;
        }
        double low = INFINITY, high = 0;
        for (int i = 0; i < LANES / 2; ++i) low = least[i] < low ? least[i] : low, high = largest[i] > high ? largest[i] : high;
        const double limit = low + tie * high;
        for (int64_t i = 0; i < pairs; ++i)
            if (cost[i] <= limit && cost[i] < INFINITY) return i;
        return 0;
    }

    void merge(int64_t i, int32_t step) {
        *death[i + 1] = step;
        count[i] += count[i + 1], info[i] += info[i + 1];
        for (int64_t j = i + 1; j + 1 < size; ++j) {
            count[j] = count[j + 1], info[j] = info[j + 1], death[j] = death[j + 1];
            cost[j - 1] = cost[j];
        }
        --size;
        if (i > 0) weigh(i - 1);
        if (i + 1 < size) weigh(i);
    }
};

constexpr int64_t LEAST_LOOK = 4;  // tokens

// What heads of either transition do alike. Own has
//     prepare(first)                what else it needs of a chunk's tokens
//     looked(t, count)              takes in k^T matrix of some tokens, which is in `read`
//     product_with_state(t)         the cosine of token t's k v^T with the current state
//     sign(t), token(t)             of what token t writes to a new state: its direction along k v^T, and its norm
//     join(t, cos)                  token t joins the current state
//     started(t), folded()          token t alone is the current state; that is a matrix alone
template <class Own> struct Deciding {
    const DecideArgs &args;
    const int64_t n, h, key_head, dk, dv, dvp;
    SharedKeys keys;
    float *unit, *rows;     // [CHUNK][dvp] values over their norms; what the current state has of the chunk's tokens
    float *matrix, *read;   // [dk][dvp] what was current before the chunk; [STEP][dvp]
    float *scaled;          // [CHUNK][dvp]
    float weight[CHUNK];    // of the chunk's tokens in the current state, over its norm
    float carried = 0;      // of the matrix
    double norm_v[CHUNK];
    float decay[CHUNK], scores[CHUNK];
    bool opened[CHUNK];
    double norm = 0;        // of the current state
    bool open = false;
    int64_t m = 0;          // tokens of the chunk
    int64_t known = 0, ahead = 0;  // the tokens before `known` have looked back; how many the next look takes
    int64_t begin_own = 0;  // the first of the chunk's tokens that the current state has outside of its matrix
    Densities list;

    Deciding(const DecideArgs &a, int64_t sequence, int64_t head, Arena &arena)
        : args(a), n(sequence), h(head), key_head(head * a.key_heads / a.heads), dk(a.dk), dv(a.dv), dvp(padded(a.dv)),
          keys{}, list(a.capacity, arena) {
        unit = rows = arena.floats(CHUNK * dvp), scaled = arena.floats(CHUNK * dvp);
        matrix = arena.floats(dk * dvp), read = arena.floats(STEP * dvp);
        if (!arena.failed) carry_in();
    }

    Own &own() { return static_cast<Own &>(*this); }

    void carry_in() {
        if (!args.carried) return;
        const int64_t at = n * args.heads + h, size = args.size0[at];
        for (int64_t i = 0; i < args.carried; ++i) {
            int32_t *ends = args.initial_death + at * args.carried + i;
            *ends = i < size ? ALIVE : -1;
            if (i < size && args.capacity)
                list.push(double(args.count0[at * args.carried + i]), args.info0[at * args.carried + i], ends);
        }
        open = size > 0;
        if (!open) return;
        const float *current = args.current + at * dk * dv;
        norm = norm_of(current, dk * dv);
        for (int64_t d = 0; d < dk; ++d)
            for (int64_t j = 0; j < dvp; ++j)
                matrix[d * dvp + j] = j < dv && norm != 0 ? float(current[d * dv + j] / norm) : 0;
        carried = norm != 0;
    }

    void chunk(int64_t first, int64_t count, int64_t position, const SharedKeys &of_keys) {
        keys = of_keys, m = count;
        for (int64_t t = 0; t < m; ++t)
            norm_v[t] = unit_of(args.v + (first + t) * args.v_stride + h * dv, dv, unit + t * dvp, dvp);
        for (int64_t t = 0; t < m; ++t) decay[t] = args.g ? args.g[(first + t) * args.heads + h] : 0;
        for (int64_t t = 0; t < m; t += LANES) store(decay + t, exp_vec(load(decay + t)));
        own().prepare(first);
        memset(weight, 0, sizeof weight);
        begin_own = known = 0, ahead = LEAST_LOOK;
        for (int64_t t = 0; t < m; ++t) args.death[(first + t) * args.heads + h] = -1;
        for (int64_t t = 0; t < m; ++t) {
            if (carried != 0 && t == known) look_back(t);
            step(t, first + t, position + t);
        }
        for (int64_t t = 0; t < m; ++t) {  // not one by one: other threads write beside it
            args.score[(first + t) * args.heads + h] = scores[t];
            args.boundary[(first + t) * args.heads + h] = opened[t];
        }
        fold(m);
    }

    // k^T matrix for some tokens from t on: few at first, since a boundary makes it useless for those behind it
    void look_back(int64_t t) {
        const int64_t count = m - t < ahead ? m - t : ahead;
        known = t + count, ahead = ahead < STEP ? 2 * ahead : STEP;
        product<Into::set>(count, dvp, dk, keys.unit + t * dk, dk, 1, matrix, dvp, read, dvp);
        own().looked(t, count);
    }

    float dot_of(const float *x, const float *y) const {
        Vec total{};
        for (int64_t j = 0; j < dvp; j += LANES) total += load(x + j) * load(y + j);
        return sum(total);
    }

    double information(int64_t t, double &product, double token) {
        if (token == 0) return 0;
        if (norm == 0) return args.first_score;
        double cos = own().sign(t) * product;
        if (args.state_score) {  // the angle between the state with the token and without it, both over the larger
            const double largest = norm > token ? norm : token, c = norm / largest, d = token / largest;
            double left = c * c + 2 * c * d * cos + d * d;
            if (left < 0.05) {
                product = exact_product(t);
                cos = own().sign(t) * product, left = c * c + 2 * c * d * cos + d * d;
            }
            cos = left <= 0 ? 0 : (c + d * cos) / sqrt(left);
        }
        cos = cos > 1 ? 1 : cos < -1 ? -1 : cos;  // keeps NaN
        return sqrt(2 - 2 * cos);
    }

    // product_with_state where the last digits decide, since token and state nearly cancel.
    double exact_product(int64_t t) {
        rebase(t);
        look_back(t);
        own().product_with_state(t);  // so that it joins what it was compared with
        double total = 0;
        for (int64_t d = 0; d < dk; ++d) {
            double row = 0;
            for (int64_t j = 0; j < dv; ++j) row += double(matrix[d * dvp + j]) * unit[t * dvp + j];
            total += row * keys.unit[t * dk + d];
        }
        const double length = norm_of(matrix, dk * dvp);
        return length == 0 ? 0 : total / length;
    }

    // The current state becomes a matrix alone, after the chunk's first `count` tokens: what is left after tokens have
    // cancelled is not what the sums of their products say.
    void rebase(int64_t count) {
        fold(count);
        memset(weight, 0, sizeof weight);
        begin_own = known = count, ahead = LEAST_LOOK;
    }

    void step(int64_t t, int64_t token_at, int64_t position) {
        const int64_t at = token_at * args.heads + h;
        const double token = own().token(t);
        double cos = open && norm != 0 ? own().product_with_state(t) : 0;
        const float score = open ? float(information(t, cos, token)) : float(args.first_score);
        const bool opens = !open || (args.block ? position % args.block == 0 : score >= float(args.tau));
        scores[t] = score, opened[t] = opens;
        if (opens) {
            int32_t *ends = args.death + at;
            *ends = ALIVE;
            if (args.capacity) {
                if (list.size == args.capacity)
                    list.merge(list.cheapest(args.tie), int32_t(args.origin[n] + token_at - args.offset[n]));
                list.push(1, score, ends);
            }
            start(t, token);
        } else {
            if (args.capacity) list.count[list.size - 1] += 1, list.info[list.size - 1] += score;
            own().join(t, cos);
        }
    }

    // Token t alone is the current state.
    void start(int64_t t, double token) {
        for (int64_t s = 0; s < t; s += LANES) store(weight + s, Vec{});
        open = true, carried = 0, begin_own = t, norm = token, set_weight(t, token != 0);
        own().started(t);
    }

    // As a vector: a number that is written alone is not at hand when its vector is read next.
    void set_weight(int64_t t, float x) {
        Ints lane;
        for (int i = 0; i < LANES; ++i) lane[i] = i;
        const int64_t first = t / LANES * LANES;
        const Vec old = load(weight + first);
        store(weight + first, lane == int32_t(t - first) ? all(x) : old);
    }

    // The state has become `fade` of its last norm, and row t `x`, over the norm that it has now.
    void reweigh(int64_t t, float fade, float x) {
        for (int64_t s = 0; s <= t; s += LANES) store(weight + s, load(weight + s) * fade);
        set_weight(t, x);
        if (carried != 0) carried *= fade;  // none stays none
    }

    // The current state as a matrix of norm one, after the chunk's first `count` tokens.
    void fold(int64_t count) {
        const int64_t many = count - begin_own;
        if (!open || !many) return;
        for (int64_t r = 0; r < many; ++r)
            for (int64_t j = 0; j < dvp; j += LANES)
                store(scaled + r * dvp + j, load(rows + (begin_own + r) * dvp + j) * weight[begin_own + r]);
        const float *from = keys.unit + begin_own * dk;
        if (carried == 0) product<Into::set>(dk, dvp, many, from, 1, dk, scaled, dvp, matrix, dvp);
        else product<Into::fade>(dk, dvp, many, from, 1, dk, scaled, dvp, matrix, dvp, nullptr, carried);
        const double length = norm_of(matrix, dk * dvp);  // one, but for rounding
        norm *= length;
        carried = length == 0 ? 0 : float(1 / length);
        own().folded();
    }
};

// Without beta a row is the token's value, and the cosine with the state a sum over that state's tokens of
// weight * (k_t . k_s) (v_t . v_s): two tables of products, one of keys and one of values, hold all that is needed.
struct PlainHead : Deciding<PlainHead> {
    const bool may_cancel;   // whether tokens may join that point away from the state
    float *turned, *gram;    // [dv][CHUNK]; [CHUNK][CHUNK]
    float along[CHUNK];      // k_t^T matrix v_t of units

    PlainHead(const DecideArgs &a, int64_t sequence, int64_t head, Arena &arena)
        : Deciding(a, sequence, head, arena), may_cancel(a.block || a.state_score || a.tau > 1.41421356) {
        turned = arena.floats(dv * CHUNK), gram = arena.floats(CHUNK * CHUNK);
    }

    void prepare(int64_t) { fill_gram(unit, dvp, m, dv, turned, gram); }
    void looked(int64_t t, int64_t count) {
        for (int64_t i = 0; i < count; ++i) along[t + i] = dot_of(read + i * dvp, unit + (t + i) * dvp);
    }
    double sign(int64_t) const { return 1; }
    double token(int64_t t) const { return keys.norm[t] * norm_v[t]; }
    void started(int64_t) {}
    void folded() {}

    // The products of token t with the chunk's tokens, each by its weight: zero weights count nothing, whatever they
    // meet.
    double product_with_state(int64_t t) {
        Vec total{};
        for (int64_t s = 0; s <= t; s += LANES) {
            const Vec w = load(weight + s), x = load(keys.gram + t * CHUNK + s) * load(gram + t * CHUNK + s);
            total += w * (Vec)((Ints)x & (w != 0));
        }
        return sum(total) + (carried != 0 ? carried * along[t] : 0);
    }

    void join(int64_t t, double cos) {
        const double before = decay[t] * norm, own = token(t);
        double square = before * before + 2 * before * own * cos + own * own;
        double after = sqrt(square < 0 ? 0 : square);
        if (float(after) == 0) after = 0;
        const double over = after == 0 ? 0 : 1 / after;
        reweigh(t, float(before * over), float(own * over));
        norm = after;
        const double larger = before > own ? before : own;
        if (may_cancel && after < 0.25 * larger && after != 0) rebase(t + 1);
    }
};

}  // namespace

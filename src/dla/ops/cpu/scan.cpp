// The memory's decisions, token by token: scores, boundaries and merges of every head (see dla/ops/scan.py).
// Plain C interface, called through ctypes. Independent heads run on threads; each head is one sequential scan.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

// Hot loops are compiled for several instruction sets and chosen at load time.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE inline __attribute__((always_inline))

struct ScanArgs {
    int64_t sequences, heads, key_heads, dk, dv;
    int64_t capacity;  // 0: never merge
    int64_t block;     // 0: boundaries by score
    int64_t merge;     // 0 density, 1 similarity, 2 ward
    int64_t score;     // 0 token, 1 state
    int64_t decide;    // 0: score, boundary and merged are given
    int64_t threads;
    double tau;
    const int64_t *offset, *length;   // [N] on the flat token axis
    const void *k, *v, *g, *beta;     // [T, Hk, dk], [T, H, dv], [T, H] or null, [T, H] or null
    int64_t carried;                  // states a head in the carried memory (K of the arrays below), 0: none
    const void *matrices;             // [N, H, carried, dk, dv] oldest first
    const int64_t *size0, *count0, *position0;  // [N, H], [N, H, carried], [N]
    const double *info0;              // [N, H, carried]
    void *score_io;                   // [T, H]
    uint8_t *boundary_io;             // [T, H]
    int64_t *merged_io;               // [T, H]
    int64_t *size, *count;            // [N, H], [N, H, capacity]; unused without a capacity
    double *info;                     // [N, H, capacity]
    void *state_k, *state_v, *norm;   // [T, H, dv], [T, H, dk], [T, H] or null: S^T k, S v, |S| before each step,
                                      // k and v over their norms
};

template <class T> static double sum_squares(const T *x, int64_t n) {
    double total = 0;
    for (int64_t i = 0; i < n; ++i) total += double(x[i]) * double(x[i]);
    return total;
}
template <class T> INLINE double dot_body(const T *a, const T *b, int64_t n) {
    double total = 0;
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {  // short runs of lanes, summed up in double
        T lane[16] = {};
        for (int64_t j = 0; j < 64; j += 16)
            for (int64_t l = 0; l < 16; ++l) lane[l] += a[i + j + l] * b[i + j + l];
        for (int64_t l = 0; l < 16; ++l) total += lane[l];
    }
    for (; i < n; ++i) total += double(a[i]) * double(b[i]);
    return total;
}
// y = S^T k
template <class T> INLINE void read_body(const T *S, const T *k, T *y, int64_t dk, int64_t dv) {
    for (int64_t j = 0; j < dv; ++j) y[j] = 0;
    for (int64_t i = 0; i < dk; ++i) {
        const T ki = k[i];
        const T *row = S + i * dv;
        for (int64_t j = 0; j < dv; ++j) y[j] += ki * row[j];
    }
}
// S = a S + k w^T; returns |S|^2 (in double: squares of floats leave the range of float)
template <class T> INLINE double update_body(T *S, T a, const T *k, const T *w, double *square, int64_t dk, int64_t dv) {
    for (int64_t j = 0; j < dv; ++j) square[j] = 0;
    for (int64_t i = 0; i < dk; ++i) {
        const T ki = k[i];
        T *row = S + i * dv;
        for (int64_t j = 0; j < dv; ++j) {
            const T x = a * row[j] + ki * w[j];
            row[j] = x;
            square[j] += double(x) * double(x);
        }
    }
    double total = 0;
    for (int64_t j = 0; j < dv; ++j) total += square[j];
    return total;
}
// A = a A + b B
template <class T> INLINE void add_body(T *A, T a, const T *B, T b, int64_t n) {
    for (int64_t i = 0; i < n; ++i) A[i] = a * A[i] + b * B[i];
}

#define KERNELS(T)                                                                                                     \
    CLONES static double dot(const T *a, const T *b, int64_t n) { return dot_body(a, b, n); }                          \
    CLONES static void read(const T *S, const T *k, T *y, int64_t dk, int64_t dv) { read_body(S, k, y, dk, dv); }      \
    CLONES static double update(T *S, T a, const T *k, const T *w, double *q, int64_t dk, int64_t dv) {                \
        return update_body(S, a, k, w, q, dk, dv);                                                                     \
    }                                                                                                                  \
    CLONES static void add(T *A, T a, const T *B, T b, int64_t n) { add_body(A, a, B, b, n); }
KERNELS(float)
KERNELS(double)

static double clamp(double cos) { return cos > 1 ? 1 : cos < -1 ? -1 : cos; }  // keeps NaN

// The oldest pair among those that tie for the smallest finite cost.
static int64_t cheapest_pair(const std::vector<double> &cost) {
    double least = INFINITY, largest = 0;
    for (double c : cost)
        if (std::isfinite(c)) least = std::min(least, c), largest = std::max(largest, std::fabs(c));
    const double limit = least + 1e-6 * largest;
    for (size_t i = 0; i < cost.size(); ++i)
        if (std::isfinite(cost[i]) && cost[i] <= limit) return int64_t(i);
    return 0;
}

// A state that is no longer current is factor * matrix. The factor holds its decays and keeps the matrix near one, so
// that squares stay in range; the delta rule's other transitions since token `since` are pending.
struct Past {
    int64_t row;    // of the matrix store
    int64_t since;  // first token whose delta-rule transition is not yet in the matrix
    double factor;
    double square;  // |matrix|^2
    double next;    // <matrix, matrix of the next state>
};

template <class T> struct Head {
    const ScanArgs &args;
    const int64_t n, h, dk, dv, size_matrix;
    const bool wants_current, wants_pasts;
    std::vector<int64_t> count;  // per state, oldest first, the current one last
    std::vector<double> info, cost;
    std::vector<T> S, y, w, unit_k, unit_v, store;  // the current state; scratch; matrices of the past states
    std::vector<double> square;
    std::vector<Past> past;
    std::vector<int64_t> free_rows;
    double norm2 = 0, norm_k = 0, norm_v = 0;
    bool open = false;  // whether there is a current state

    Head(const ScanArgs &a, int64_t sequence, int64_t head)
        : args(a), n(sequence), h(head), dk(a.dk), dv(a.dv), size_matrix(a.dk * a.dv),
          wants_current(a.decide || a.state_k), wants_pasts(a.decide && a.capacity && a.merge != 0) {
        S.resize(wants_current ? size_matrix : 0);
        y.resize(dv), w.resize(dv), square.resize(dv), unit_k.resize(dk), unit_v.resize(dv);
        if (wants_pasts) {
            store.resize(a.capacity * size_matrix);
            for (int64_t row = a.capacity; row-- > 0;) free_rows.push_back(row);
        }
        carry_in();
    }

    const T *k(int64_t t) const { return (const T *)args.k + (t * args.key_heads + h * args.key_heads / args.heads) * dk; }
    const T *v(int64_t t) const { return (const T *)args.v + (t * args.heads + h) * dv; }
    T decay(int64_t t) const { return args.g ? std::exp(((const T *)args.g)[t * args.heads + h]) : T(1); }
    T beta(int64_t t) const { return args.beta ? ((const T *)args.beta)[t * args.heads + h] : T(1); }
    T *row(int64_t r) { return store.data() + r * size_matrix; }

    void carry_in() {
        if (!args.carried) return;
        const int64_t at = n * args.heads + h, size = args.size0[at];
        const T *matrices = (const T *)args.matrices + at * args.carried * size_matrix;
        for (int64_t i = 0; i < size; ++i) {
            count.push_back(args.count0[at * args.carried + i]);
            info.push_back(args.info0[at * args.carried + i]);
            if (i + 1 < size && wants_pasts) keep(matrices + i * size_matrix, 1, args.offset[n]);
        }
        open = size > 0;
        if (open && wants_current) {
            std::copy_n(matrices + (size - 1) * size_matrix, size_matrix, S.data());
            norm2 = sum_squares(S.data(), size_matrix);
        }
    }

    // Store factor * matrix as the newest past state, up to date with every token before `since`.
    void keep(const T *matrix, double factor, int64_t since) {
        T largest = 0;
        for (int64_t i = 0; i < size_matrix; ++i) largest = std::max(largest, std::fabs(matrix[i]));
        int exponent = 0;
        if (std::isfinite(largest)) std::frexp(largest, &exponent);
        const int64_t r = free_rows.back();
        free_rows.pop_back();
        const double shrink = std::ldexp(1.0, -exponent);
        for (int64_t i = 0; i < size_matrix; ++i) row(r)[i] = T(matrix[i] * shrink);
        if (!past.empty()) past.back().next = args.beta ? 0 : dot(row(past.back().row), row(r), size_matrix);
        past.push_back({r, since, std::ldexp(factor, exponent), args.beta ? 0 : sum_squares(row(r), size_matrix), 0});
    }

    // The token over its norms, and y = S^T k of that.
    void look(int64_t t) {
        norm_k = std::sqrt(sum_squares(k(t), dk)), norm_v = std::sqrt(sum_squares(v(t), dv));
        for (int64_t i = 0; i < dk; ++i) unit_k[i] = T(k(t)[i] / (norm_k == 0 ? 1 : norm_k));
        for (int64_t j = 0; j < dv; ++j) unit_v[j] = T(v(t)[j] / (norm_v == 0 ? 1 : norm_v));
        if (open) read(S.data(), unit_k.data(), y.data(), dk, dv);
        else std::fill(y.begin(), y.end(), T(0));
    }

    double score(int64_t t) {
        const double b = beta(t), nS = std::sqrt(norm2), token = std::fabs(b) * norm_k * norm_v;
        if (token == 0) return 0;
        if (nS == 0) return std::sqrt(2.0);
        double cos = dot(y.data(), unit_v.data(), dv) / nS * (b < 0 ? -1 : 1);
        if (args.score == 1) {  // the angle between S + token and S, both measured by the larger
            const double largest = std::max(nS, token), c = nS / largest, d = token / largest;
            const double left = c * c + 2 * c * d * cos + d * d;
            cos = left <= 0 ? 0 : (c + d * cos) / std::sqrt(left);
        }
        return std::sqrt(2 - 2 * clamp(cos));
    }

    // Bring every past matrix up to date with token t (delta rule only).
    void flush(int64_t t) {
        for (Past &p : past) {
            for (int64_t s = p.since; s <= t; ++s) {
                read(row(p.row), k(s), y.data(), dk, dv);
                for (int64_t j = 0; j < dv; ++j) w[j] = -beta(s) * y[j];
                p.square = update(row(p.row), T(1), k(s), w.data(), square.data(), dk, dv);
            }
            if (p.since > t) p.square = sum_squares(row(p.row), size_matrix);
            p.since = t + 1;
        }
        for (size_t i = 0; i + 1 < past.size(); ++i)
            past[i].next = dot(row(past[i].row), row(past[i + 1].row), size_matrix);
    }

    void pair_costs() {
        cost.resize(count.size() - 1);
        for (size_t i = 0; i + 1 < count.size(); ++i) {
            const double a = count[i], b = count[i + 1];
            if (args.merge == 0) {
                cost[i] = (info[i] + info[i + 1]) / (a + b);
                continue;
            }
            const Past &p = past[i], &q = past[i + 1];
            if (args.merge == 1) {
                const double np = std::sqrt(p.square), nq = std::sqrt(q.square);
                const bool gone = T(p.factor * np) == 0 || T(q.factor * nq) == 0;
                cost[i] = gone ? 0 : -p.next / np / nq;
            } else {
                const double fa = p.factor / a, fb = q.factor / b;
                const double gap = fa * fa * p.square + fb * fb * q.square - 2 * fa * fb * p.next;
                cost[i] = (gap < 0 ? 0 : gap) * a * b / (a + b);
            }
        }
    }

    void merge_pair(int64_t i) {
        count[i] += count[i + 1], info[i] += info[i + 1];
        count.erase(count.begin() + i + 1), info.erase(info.begin() + i + 1);
        if (!wants_pasts) return;
        Past &p = past[i], &q = past[i + 1];
        const double factor = std::max(p.factor, q.factor);
        const double share = factor == 0 ? 1 : factor;
        add(row(p.row), T(p.factor / share), row(q.row), T(q.factor / share), size_matrix);
        free_rows.push_back(q.row);
        p.factor = factor, p.square = sum_squares(row(p.row), size_matrix);
        past.erase(past.begin() + i + 1);
        if (i > 0) past[i - 1].next = dot(row(past[i - 1].row), row(past[i].row), size_matrix);
        if (i + 1 < int64_t(past.size())) past[i].next = dot(row(past[i].row), row(past[i + 1].row), size_matrix);
    }

    // Token t joins the current state, or (opening) starts it anew; y holds S^T k / |k|.
    void write(int64_t t, bool opening) {
        if (!wants_current) return;
        const T a = opening ? T(0) : decay(t), b = beta(t);
        for (int64_t j = 0; j < dv; ++j) w[j] = v(t)[j];
        if (args.beta)
            for (int64_t j = 0; j < dv; ++j) w[j] = b * (opening ? w[j] : w[j] - a * T(norm_k) * y[j]);
        if (opening) std::fill(S.begin(), S.end(), T(0));  // 0 * NaN would stay NaN
        norm2 = update(S.data(), a, k(t), w.data(), square.data(), dk, dv);
    }

    void open_state(int64_t t, double score_t) {
        int64_t &merged = args.merged_io[t * args.heads + h];
        if (args.decide) merged = -1;
        if (open && wants_pasts) {  // the current state becomes a past one, with this step's transition
            for (int64_t j = 0; args.beta && j < dv; ++j) w[j] = -beta(t) * T(norm_k) * y[j];
            if (args.beta) update(S.data(), T(1), k(t), w.data(), square.data(), dk, dv);
            keep(S.data(), decay(t), t + 1);
        }
        if (args.decide && args.capacity && int64_t(count.size()) == args.capacity) {
            if (wants_pasts && args.beta) flush(t);
            pair_costs();
            merged = cheapest_pair(cost);
        }
        if (args.capacity && merged >= 0) merge_pair(merged);
        write(t, true);
        if (args.capacity || count.empty()) count.push_back(1), info.push_back(score_t);
        open = true;
    }

    void run() {
        const int64_t first = args.offset[n], last = first + args.length[n];
        int64_t position = args.position0 ? args.position0[n] : 0;
        for (int64_t t = first; t < last; ++t, ++position) {
            const int64_t at = t * args.heads + h;
            if (wants_current) {
                look(t);
                if (args.state_k) save_reads(at);
            }
            T *scores = (T *)args.score_io;
            if (args.decide) {
                scores[at] = open ? T(score(t)) : T(std::sqrt(2.0));
                args.boundary_io[at] = !open || (args.block ? position % args.block == 0 : scores[at] >= T(args.tau));
                args.merged_io[at] = -1;
            }
            const double faded = past.empty() ? 1 : double(decay(t));
            for (Past &p : past) p.factor *= faded;
            if (args.boundary_io[at]) {
                open_state(t, scores[at]);
            } else {
                write(t, false);
                count.back() += 1, info.back() += scores[at];
            }
        }
        if (!args.capacity) return;
        const int64_t at = n * args.heads + h;
        args.size[at] = int64_t(count.size());
        std::copy(count.begin(), count.end(), args.count + at * args.capacity);
        std::copy(info.begin(), info.end(), args.info + at * args.capacity);
    }

    void save_reads(int64_t at) {
        std::copy(y.begin(), y.end(), (T *)args.state_k + at * dv);
        T *state_v = (T *)args.state_v + at * dk;
        for (int64_t i = 0; i < dk; ++i) state_v[i] = open ? T(dot(S.data() + i * dv, unit_v.data(), dv)) : T(0);
        ((T *)args.norm)[at] = open ? T(std::sqrt(norm2)) : T(0);
    }
};

template <class T> static void scan_all(const ScanArgs &args) {
    const int64_t tasks = args.sequences * args.heads;
    std::atomic<int64_t> next{0};
    auto work = [&] {
        for (int64_t i; (i = next++) < tasks;) Head<T>(args, i / args.heads, i % args.heads).run();
    };
    std::vector<std::thread> threads;
    for (int64_t i = 1; i < std::min(args.threads, tasks); ++i) threads.emplace_back(work);
    work();
    for (auto &thread : threads) thread.join();
}

// Chronological index of every item (`live` rows, newest first, then the chunk's tokens) after every step of a chunk.
static void follow(int64_t chunk, int64_t live, int64_t size, const int64_t *last, const int64_t *merged, int64_t *out) {
    const int64_t items = live + chunk;
    std::vector<int64_t> x(items, 0);
    for (int64_t r = 0; r < live; ++r) x[r] = size - 1 - r;
    for (int64_t t = 0; t < chunk; ++t, out += items) {
        if (merged[t] >= 0)
            for (int64_t i = 0; i < items; ++i) x[i] -= x[i] > merged[t];
        x[live + t] = last[t];
        std::copy(x.begin(), x.end(), out);
    }
}

// Which version of a state stands at each chronological index after each step: the rows at the chunk's start, then the
// current state after each step, then the state merged at each.
static void versions(int64_t chunk, int64_t live, int64_t slots, int64_t size, const int64_t *last,
                     const int64_t *merged, int64_t *out) {
    std::vector<int64_t> x(slots);
    for (int64_t j = 0; j < slots; ++j)
        x[j] = std::clamp<int64_t>(size - 1 - j, 0, std::max<int64_t>(live - 1, 0));
    for (int64_t t = 0; t < chunk; ++t, out += slots) {
        const int64_t pair = merged[t];
        if (pair >= 0 && pair < slots) {
            for (int64_t j = pair + 1; j + 1 < slots; ++j) x[j] = x[j + 1];
            x[pair] = live + chunk + t;
        }
        if (last[t] >= 0 && last[t] < slots) x[last[t]] = live + t;
        std::copy(x.begin(), x.end(), out);
    }
}

extern "C" {
int64_t dla_args_size() { return sizeof(ScanArgs); }  // so that a stale library is noticed
// size [n], last and merged [n, chunk] -> items [n, chunk, live + chunk]
void dla_follow(int64_t n, int64_t chunk, int64_t live, const int64_t *size, const int64_t *last, const int64_t *merged,
                int64_t *items) {
    for (int64_t i = 0; i < n; ++i)
        follow(chunk, live, size[i], last + i * chunk, merged + i * chunk, items + i * chunk * (live + chunk));
}
// the same -> out [n, chunk, slots]
void dla_versions(int64_t n, int64_t chunk, int64_t live, int64_t slots, const int64_t *size, const int64_t *last,
                  const int64_t *merged, int64_t *out) {
    for (int64_t i = 0; i < n; ++i)
        versions(chunk, live, slots, size[i], last + i * chunk, merged + i * chunk, out + i * chunk * slots);
}
void dla_scan_f32(const ScanArgs *args) { scan_all<float>(*args); }
void dla_scan_f64(const ScanArgs *args) { scan_all<double>(*args); }
}

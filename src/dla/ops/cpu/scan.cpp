// The memory's decisions, token by token: scores, boundaries and merges of every head (see scan.py).
// Plain C interface, called through ctypes. Independent heads run on threads; each head is one sequential scan.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

#include "scan_args.h"

// Hot loops are compiled for several instruction sets and chosen at load time: before ThreadSanitizer is ready to watch.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE inline __attribute__((always_inline))

static const int32_t ALIVE = INT32_MAX;
static const int64_t MOST_THREADS = 1024;

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
static int64_t cheapest_pair(const std::vector<double> &cost, double tie) {
    double least = INFINITY, largest = 0;
    for (double c : cost)
        if (std::isfinite(c)) least = std::min(least, c), largest = std::max(largest, std::fabs(c));
    const double limit = least + tie * largest;
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
    const bool wants_list, wants_pasts;  // whether merges are decided at all, and whether they look at matrices
    std::vector<int64_t> count;  // per state, oldest first, the current one last
    std::vector<int32_t *> death;  // where the end of its start is written
    std::vector<double> info, cost;
    std::vector<T> S, y, w, unit_k, unit_v, store;  // the current state; scratch; matrices of the past states
    std::vector<double> square;
    std::vector<Past> past;
    std::vector<int64_t> free_rows;
    double norm2 = 0, norm_k = 0, norm_v = 0;
    bool open = false;  // whether there is a current state

    Head(const ScanArgs &a, int64_t sequence, int64_t head)
        : args(a), n(sequence), h(head), dk(a.dk), dv(a.dv), size_matrix(a.dk * a.dv),
          wants_list(a.decide && a.capacity), wants_pasts(wants_list && a.merge != Merge::density) {
        S.resize(size_matrix), y.resize(dv), w.resize(dv), square.resize(dv), unit_k.resize(dk), unit_v.resize(dv);
        if (wants_pasts) {
            const int64_t carried = a.carried ? a.size0[n * a.heads + h] : 0;
            const int64_t rows = std::min(a.capacity, carried + a.length[n]);  // a capacity may be far beyond all need
            store.resize(rows * size_matrix);
            for (int64_t row = rows; row-- > 0;) free_rows.push_back(row);
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
        for (int64_t i = 0; i < args.carried; ++i) {
            int32_t *ends = args.initial_death + at * args.carried + i;
            *ends = i < size ? ALIVE : -1;
            if (i >= size || !wants_list) continue;
            count.push_back(args.count0[at * args.carried + i]);
            info.push_back(args.info0[at * args.carried + i]);
            death.push_back(ends);
            if (i + 1 < size && wants_pasts)
                keep((const T *)args.matrices + (at * args.carried + i) * size_matrix, 1, args.offset[n]);
        }
        open = size > 0;
        if (!open) return;
        std::copy_n((const T *)args.current + at * size_matrix, size_matrix, S.data());
        norm2 = sum_squares(S.data(), size_matrix);
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
        if (nS == 0) return args.first_score;
        double cos = dot(y.data(), unit_v.data(), dv) / nS * (b < 0 ? -1 : 1);
        if (args.score == Score::state) {  // the angle between S + token and S, both measured by the larger
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

    double pair_cost(size_t i) const {
        const double a = count[i], b = count[i + 1];
        if (args.merge == Merge::density) return (info[i] + info[i + 1]) / (a + b);
        const Past &p = past[i], &q = past[i + 1];
        if (args.merge == Merge::similarity) {
            const double np = std::sqrt(p.square), nq = std::sqrt(q.square);
            const bool gone = T(p.factor * np) == 0 || T(q.factor * nq) == 0;
            return gone ? 0 : -p.next / np / nq;
        }
        const double fa = p.factor / a, fb = q.factor / b;  // ward
        const double gap = fa * fa * p.square + fb * fb * q.square - 2 * fa * fb * p.next;
        return (gap < 0 ? 0 : gap) * a * b / (a + b);
    }

    // Merge the cheapest pair at token t.
    void make_room(int64_t t) {
        if (wants_pasts && args.beta) flush(t);
        cost.resize(count.size() - 1);
        for (size_t i = 0; i < cost.size(); ++i) cost[i] = pair_cost(i);
        const int64_t i = cheapest_pair(cost, args.tie);
        *death[i + 1] = int32_t(args.origin[n] + t - args.offset[n]);
        death.erase(death.begin() + i + 1);
        merge_pair(i);
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
        const T a = opening ? T(0) : decay(t), b = beta(t);
        for (int64_t j = 0; j < dv; ++j) w[j] = v(t)[j];
        if (args.beta)
            for (int64_t j = 0; j < dv; ++j) w[j] = b * (opening ? w[j] : w[j] - a * T(norm_k) * y[j]);
        if (opening) std::fill(S.begin(), S.end(), T(0));  // 0 * NaN would stay NaN
        norm2 = update(S.data(), a, k(t), w.data(), square.data(), dk, dv);
    }

    void open_state(int64_t t, double score_t) {
        if (open && wants_pasts) {  // the current state becomes a past one, with this step's transition
            for (int64_t j = 0; args.beta && j < dv; ++j) w[j] = -beta(t) * T(norm_k) * y[j];
            if (args.beta) update(S.data(), T(1), k(t), w.data(), square.data(), dk, dv);
            keep(S.data(), decay(t), t + 1);
        }
        if (wants_list && int64_t(count.size()) == args.capacity) make_room(t);
        write(t, true);
        int32_t *ends = args.death + t * args.heads + h;
        *ends = ALIVE;
        if (wants_list) count.push_back(1), info.push_back(score_t), death.push_back(ends);
        open = true;
    }

    void run() {
        const int64_t first = args.offset[n], last = first + args.length[n];
        int64_t position = args.position0 ? args.position0[n] : 0;
        for (int64_t t = first; t < last; ++t, ++position) {
            const int64_t at = t * args.heads + h;
            look(t);
            if (args.state_k) save_reads(at);
            T *scores = (T *)args.score_io;
            if (args.decide) {
                scores[at] = open ? T(score(t)) : T(args.first_score);
                args.boundary_io[at] = !open || (args.block ? position % args.block == 0 : scores[at] >= T(args.tau));
            }
            const double faded = past.empty() ? 1 : double(decay(t));
            for (Past &p : past) p.factor *= faded;
            if (args.boundary_io[at]) {
                open_state(t, scores[at]);
            } else {
                write(t, false);
                if (wants_list) count.back() += 1, info.back() += scores[at];
            }
        }
    }

    void save_reads(int64_t at) {
        std::copy(y.begin(), y.end(), (T *)args.state_k + at * dv);
        T *state_v = (T *)args.state_v + at * dk;
        for (int64_t i = 0; i < dk; ++i) state_v[i] = open ? T(dot(S.data() + i * dv, unit_v.data(), dv)) : T(0);
        ((T *)args.norm)[at] = open ? T(std::sqrt(norm2)) : T(0);
    }
};

// Whether the states that head i, of sequence n, carries in can be: no more of them than there is room for, and numbers
// of tokens that can be counted on from.
static bool carried_fits(const ScanArgs &a, int64_t n, int64_t i) {
    const int64_t most = int64_t(1) << 48;
    if (a.position0[n] < 0 || a.position0[n] > most) return false;
    if (a.size0[i] < 0 || a.size0[i] > a.carried || (a.capacity && a.size0[i] > a.capacity)) return false;
    int64_t seen = 0;
    for (int64_t s = 0; s < a.size0[i]; ++s) {
        const int64_t count = a.count0[i * a.carried + s];
        if (count < 0 || count > most - seen) return false;
        seen += count;
    }
    return true;
}

// 0, or what is wrong with the arguments (ERRORS in scan.py): whatever is indexed or allocated by is looked at first.
static int64_t check(const ScanArgs &a) {
    const int64_t most = int64_t(1) << 40;
    if (a.merge < Merge::density || a.merge > Merge::ward) return 1;
    if (a.score < Score::token || a.score > Score::state) return 2;
    for (int64_t size : {a.tokens, a.sequences, a.capacity, a.carried})
        if (size < 0 || size > most) return 3;
    for (int64_t size : {a.heads, a.key_heads, a.dk, a.dv})
        if (size < 1 || size > most) return 3;
    if (a.heads % a.key_heads || a.capacity == 1 || a.threads < 1 || a.block < 0) return 3;
    const double matrix = double(a.dk) * a.dv;  // products of doubles, which cannot overflow
    if (double(a.sequences) * a.heads * std::max<int64_t>(a.carried, 1) * matrix > 1e17) return 3;
    if (double(a.tokens) * a.heads * matrix > 1e17 || matrix > most) return 3;
    if (a.sequences && !(a.offset && a.length && a.origin)) return 4;
    if (a.tokens && !(a.k && a.v && a.score_io && a.boundary_io && a.death)) return 4;
    if (!!a.state_k != !!a.state_v || !!a.state_k != !!a.norm) return 4;
    if (!a.sequences) return 0;
    if (a.carried && !(a.current && a.size0 && a.count0 && a.info0 && a.position0 && a.initial_death)) return 4;
    if (a.carried && a.decide && a.capacity && a.merge != Merge::density && !a.matrices) return 4;
    int64_t end = 0;  // of the sequence before: threads write to each one's own tokens
    for (int64_t n = 0; n < a.sequences; end = a.offset[n] + a.length[n], ++n) {
        if (a.offset[n] < end || a.offset[n] > a.tokens) return 5;
        if (a.length[n] < 0 || a.length[n] > a.tokens - a.offset[n]) return 5;
        if (a.origin[n] < 0 || a.origin[n] > INT32_MAX - 1 - a.length[n]) return 5;  // deaths are 32 bits wide
        for (int64_t i = n * a.heads; a.carried && i < (n + 1) * a.heads; ++i)
            if (!carried_fits(a, n, i)) return 6;
    }
    return 0;
}

template <class T> static int64_t scan_all(const ScanArgs *given) {
    if (!given) return 4;
    const ScanArgs &args = *given;
    if (const int64_t wrong = check(args)) return wrong;
    const int64_t tasks = args.sequences * args.heads;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    auto work = [&] {
        try {
            for (int64_t i; (i = next++) < tasks;)
                if (args.carried || args.length[i / args.heads]) Head<T>(args, i / args.heads, i % args.heads).run();
        } catch (const std::exception &) {  // no memory: an exception that leaves a thread ends the process
            failed = true;
        }
    };
    std::vector<std::thread> threads;
    try {
        for (int64_t i = 1; i < std::min({args.threads, tasks, MOST_THREADS}); ++i) threads.emplace_back(work);
    } catch (const std::exception &) {  // the threads that there are do all the work
    }
    work();
    for (auto &thread : threads) thread.join();
    return failed ? 7 : 0;
}

extern "C" {
int64_t dla_version() { return 13; }  // as in library.py, so that a stale library is noticed
int64_t dla_scan_f32(const ScanArgs *args) { return scan_all<float>(args); }
int64_t dla_scan_f64(const ScanArgs *args) { return scan_all<double>(args); }
}

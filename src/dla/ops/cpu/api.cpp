// The C interface of the kernels: checks, the instruction set, threads.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "api.h"
#include "pool.h"

extern const Level dla_level_portable;
#if defined(__x86_64__) && defined(__GNUC__)
extern const Level dla_level_avx2, dla_level_avx512;
#endif

namespace {

// The best instruction set of this machine, or a lower one that is asked for.
Named choose_level(const char *asked) {
#if defined(__x86_64__) && defined(__GNUC__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512cd");
    const bool portable = asked && !strcmp(asked, "portable");
    if (avx512 && !portable && !(asked && !strcmp(asked, "avx2"))) return {"avx512", &dla_level_avx512};
    if (avx2 && !portable) return {"avx2", &dla_level_avx2};
#else
    (void)asked;
#endif
    return {"portable", &dla_level_portable};
}

}  // namespace

Named &chosen_level() {
    static Named chosen = choose_level(getenv("DLA_CPU_LEVEL"));
    return chosen;
}

namespace {

// Fresh memory comes from the system page by page, which takes as long as a fast kernel's work: ask for large pages.
void in_large_pages(void *from, uintptr_t bytes) {
#ifdef __linux__
    const uintptr_t page = uintptr_t(1) << 21, first = (uintptr_t(from) + page - 1) & ~(page - 1);
    const uintptr_t end = (uintptr_t(from) + bytes) & ~(page - 1);
    if (from && end > first) madvise((void *)first, end - first, MADV_HUGEPAGE);  // a hint: whatever it says is fine
#else
    (void)from, (void)bytes;
#endif
}

constexpr int64_t SHARED_BYTES = int64_t(256) << 20;  // of what heads share; past that each makes its own

// Sequences lie one after another within the tokens.
template <class Args> bool lie_apart(const Args &a) {
    int64_t end = 0;
    for (int64_t n = 0; n < a.sequences; ++n) {
        if (a.length[n] < 0 || a.length[n] > a.tokens || !in_range(a.offset[n], 0, a.tokens - a.length[n])) return false;
        if (a.length[n] && a.offset[n] < end) return false;
        end = std::max(end, a.offset[n] + a.length[n]);
    }
    return true;
}

int64_t check(const AttendArgs &a) {
    const int64_t most = int64_t(1) << 31;
    if (a.memory < Memory::single || a.memory > Memory::dynamic) return unknown_rule;
    for (int64_t x : {a.tokens, a.sequences, a.width, a.carried, a.states})
        if (!in_range(x, 0, most)) return sizes;
    for (int64_t x : {a.heads, a.key_heads, a.dk, a.dv, a.threads})
        if (!in_range(x, 1, most)) return sizes;
    if (a.heads % a.key_heads || a.dk > most / a.dv || a.dk > most / CHUNK || a.dv > most / CHUNK) return sizes;
    if (a.q_stride < a.key_heads * a.dk || a.k_stride < a.key_heads * a.dk || a.v_stride < a.heads * a.dv) return sizes;
    if (!a.sequences) return fine;
    if (!a.offset || !a.length) return tensors;
    if (a.tokens && !(a.q && a.k && a.v && a.o)) return tensors;
    const bool levels = a.memory == Memory::log_linear, dynamic = a.memory == Memory::dynamic;
    if ((levels || dynamic) && (a.width < 1 || (a.tokens && !a.lam))) return tensors;
    if (dynamic && ((a.tokens && !a.death) || !a.origin)) return tensors;
    if (dynamic && (a.states < 1 || a.longest_short < 1 || !in_range(a.most_loose, 1, a.longest_short))) return sizes;
    if (dynamic && a.carried && !(a.initial_death && a.matrix && a.factor && a.rows)) return tensors;
    if (dynamic && a.places_room && !a.places) return tensors;
    for (int64_t x : {a.pool_matrices, a.pool_rows, a.places_room, a.final_room, a.longest_short})
        if (!in_range(x, 0, most)) return sizes;
    if (dynamic && a.pool_matrices && !a.initial) return tensors;
    if (dynamic && a.pool_rows && !(a.row_keys && a.row_values && a.row_coefficient)) return tensors;
    if (dynamic && a.final && !(a.final_matrix && a.final_factor && a.final_rows)) return tensors;
    if (dynamic && a.final && a.final_room && !(a.final_row_keys && a.final_row_values && a.final_row_coefficient)) return tensors;
    if (a.memory == Memory::single && ((a.initial && a.carried != 1) || (a.final && a.states != 1))) return sizes;
    if (levels && (!a.position || a.carried > 62 || a.states > 62 || (a.carried && !a.initial))) return tensors;
    if (a.route && (!dynamic || (a.carried && !a.initial_keys))) return tensors;
    if (a.gate && (!dynamic || a.carried || a.final)) return states;
    if (!lie_apart(a)) return sequences;
    for (int64_t n = 0; n < a.sequences; ++n) {
        if (dynamic && !in_range(a.origin[n], 0, INT32_MAX - 1 - a.length[n])) return sequences;
        if (levels && !in_range(a.position[n], 0, int64_t(1) << 60)) return states;
        if (levels && a.position[n] >> a.carried) return states;
        if (levels && a.final && (a.position[n] + a.length[n]) >> a.states) return states;
        if (dynamic && a.states < a.carried) return states;
    }
    return fine;
}

// Whether the state that a head goes on from points into its pools, and the state after it fits.
bool held(const AttendArgs &a, int64_t n, int64_t h) {
    const int64_t at = (n * a.heads + h) * a.carried, place = (n * a.heads + h) * a.places_room;
    int64_t rows = 0;
    for (int64_t i = 0; i < a.carried; ++i) {
        if (a.initial_death[at + i] < 0) {
            if (a.rows[at + i]) return false;
            continue;
        }
        if (!in_range(a.matrix[at + i], -1, a.pool_matrices - 1) || !in_range(a.rows[at + i], 0, a.places_room)) return false;
        rows += a.rows[at + i];
    }
    if (rows > a.places_room) return false;
    for (int64_t r = 0; r < rows; ++r)
        if (!in_range(a.places[place + r], 0, a.pool_rows - 1)) return false;
    const int64_t short_ones = (a.states + 1) * a.longest_short;
    return !a.final || a.final_room >= std::min(short_ones, a.length[n]) + rows;
}

// Whether the lifetimes of a head never have more states than there is room for, and begin with one; a start ends after
// it began, and the oldest never.
bool lives(const AttendArgs &a, int64_t n, int64_t h) {
    const int64_t length = a.length[n];
    int64_t alive = 0;
    for (int64_t i = 0; i < a.carried; ++i) alive += a.initial_death[(n * a.heads + h) * a.carried + i] >= 0;
    int8_t *ending = (int8_t *)calloc(length + 1, 1);
    if (!ending) return false;
    bool good = true, oldest = true;
    auto note = [&](int32_t death, int64_t start) {
        const int64_t step = death - a.origin[n];
        const bool ends = death >= 0 && death != ALIVE && step >= 0 && step < length;
        if (ends) ending[step] = 1, good = good && step > start && !oldest;
        oldest = oldest && death < 0;
    };
    for (int64_t i = 0; i < a.carried; ++i) note(a.initial_death[(n * a.heads + h) * a.carried + i], -1);
    for (int64_t t = 0; t < length; ++t) note(a.death[(a.offset[n] + t) * a.heads + h], t);
    for (int64_t t = 0; t < length && good; ++t) {
        alive += (a.death[(a.offset[n] + t) * a.heads + h] >= 0) - ending[t];
        good = alive >= 1 && alive <= a.states;
    }
    free(ending);
    return good;
}

int64_t lead(const AttendArgs &a, int64_t n) { return a.position ? a.position[n] % CHUNK : 0; }
int64_t lead(const DecideArgs &, int64_t) { return 0; }

// What the heads of a key head share, of all chunks, if there is more than one of them and room for it.
struct SharedChunks {
    float *floats = nullptr;
    std::atomic<bool> failed{false};

    template <class Args, class Share> SharedChunks(const Args &a, int64_t each, Share share) {
        int64_t chunks = 0;
        for (int64_t n = 0; n < a.sequences; ++n)
            chunks += a.length[n] ? (lead(a, n) + a.length[n] + CHUNK - 1) / CHUNK : 0;
        if (a.heads <= a.key_heads || chunks * a.key_heads > SHARED_BYTES / 4 / each) return;
        const int64_t bytes = (chunks * a.key_heads * each * 4 + 63) / 64 * 64;
        floats = (float *)aligned_alloc(64, bytes);
        in_large_pages(floats, bytes);
        if (!floats) failed = true;
        else
            run_tasks(chunks * a.key_heads, a.threads, [&](int64_t i) {
                if (!share(a, i / a.key_heads, i % a.key_heads, floats + i * each)) failed = true;
            });
    }
    ~SharedChunks() { free(floats); }
};

// First what heads share, then every head by itself.
template <class Args, class Share, class Run>
int64_t over_heads(const Args &a, int64_t floats, Share share, Run run) {
    SharedChunks shared(a, floats, share);
    if (shared.failed) return no_memory;
    std::atomic<int64_t> failed{fine};
    const int64_t group = a.heads / a.key_heads, total = a.sequences * a.heads;
    const int64_t most = std::min(group, std::max<int64_t>(1, total / std::max<int64_t>(a.threads, 1)));
    const int64_t heads = (group + (group + most - 1) / most - 1) / ((group + most - 1) / most), parts = (group + heads - 1) / heads;
    run_tasks(a.sequences * a.key_heads * parts, a.threads, [&](int64_t i) {
        const int64_t n = i / (a.key_heads * parts), first = i % (a.key_heads * parts) / parts * group + i % parts * heads;
        const int64_t end = std::min(first + heads, first - first % group + group);
        if (const int64_t wrong = run(n, first, end - first, shared.floats)) failed = wrong;
    });
    return failed;
}

int64_t attend(const AttendArgs &a) {
    if (const int64_t wrong = check(a)) return wrong;
    in_large_pages(a.o, uintptr_t(a.tokens) * uintptr_t(a.heads) * uintptr_t(a.dv) * 4);
    const Level &kernels = *chosen_level().level;
    auto run = [&](int64_t n, int64_t first, int64_t heads, const float *shared) {
        for (int64_t h = first; a.memory == Memory::dynamic && h < first + heads; ++h)
            if (!(held(a, n, h) && lives(a, n, h))) return int64_t(states);
        return int64_t(kernels.attend(a, n, first, heads, shared) ? fine : no_memory);
    };
    return over_heads(a, kernels.shared_floats(a), kernels.attend_share, run);
}

// All gradients begin as zeros.
void clear(const BackwardArgs &b) {
    const AttendArgs &a = *b.attend;
    const int64_t keys = b.parts * a.tokens * a.key_heads * a.dk, heads = a.tokens * a.heads, piece = 1 << 18;
    const std::pair<float *, int64_t> all[] = {{b.d_q, keys},    {b.d_k, keys},     {b.d_v, heads * a.dv}, {b.d_lam, heads * a.width},
                                               {b.d_g, heads},   {b.d_beta, heads}, {b.d_route, heads},    {b.d_gate, heads}};
    for (const auto &[at, floats] : all) {
        if (!at || !floats) continue;
        in_large_pages(at, uintptr_t(floats) * 4);
        float *const from = at;
        const int64_t many = floats;
        run_tasks((many + piece - 1) / piece, a.threads,
                  [&](int64_t i) { memset(from + i * piece, 0, std::min(piece, many - i * piece) * 4); });
    }
}

// Tasks are fixed by the shapes, and so is the order in which they add up.
int64_t backward(const BackwardArgs &b) {
    if (!b.attend) return tensors;
    const AttendArgs &a = *b.attend;
    if (const int64_t wrong = check(a)) return wrong;
    const int64_t group = a.heads / a.key_heads;
    if (!in_range(b.parts, 1, group)) return sizes;
    if (a.tokens && !(b.d_o && b.d_q && b.d_k && b.d_v && (a.memory == Memory::single || b.d_lam))) return tensors;
    if (a.tokens && ((a.route && !b.d_route) || (a.gate && !b.d_gate) || (a.beta && !b.d_beta))) return tensors;
    clear(b);
    const Level &kernels = *chosen_level().level;
    const int64_t heads = (group + b.parts - 1) / b.parts, tasks = a.sequences * a.key_heads * b.parts;
    SharedChunks shared(a, kernels.shared_floats(a), kernels.attend_share);
    if (shared.failed) return no_memory;
    std::atomic<int64_t> failed{fine};
    run_tasks(tasks, a.threads, [&](int64_t i) {
        const int64_t part = i % b.parts, key_head = i / b.parts % a.key_heads, n = i / b.parts / a.key_heads;
        const int64_t first = key_head * group + part * heads, end = std::min(first + heads, (key_head + 1) * group);
        for (int64_t h = first; a.memory == Memory::dynamic && h < end; ++h)
            if (!(held(a, n, h) && lives(a, n, h))) {
                failed = states;
                return;
            }
        if (first < end && !kernels.backward(b, n, first, end - first, part, shared.floats)) failed = no_memory;
    });
    const int64_t row = a.key_heads * a.dk;
    if (b.parts > 1 && !failed)
        run_tasks((a.tokens + CHUNK - 1) / CHUNK, a.threads, [&](int64_t c) {
            for (float *d : {b.d_q, b.d_k})
                for (int64_t p = 1; p < b.parts; ++p)
                    for (int64_t x = c * CHUNK * row; x < std::min((c + 1) * CHUNK, a.tokens) * row; ++x)
                        d[x] += d[p * a.tokens * row + x];
        });
    return failed;
}

int64_t check(const DecideArgs &a) {
    const int64_t most = int64_t(1) << 31;
    for (int64_t x : {a.tokens, a.sequences, a.capacity, a.carried})
        if (!in_range(x, 0, most)) return sizes;
    for (int64_t x : {a.heads, a.key_heads, a.dk, a.dv, a.threads})
        if (!in_range(x, 1, most)) return sizes;
    if (a.capacity == 1 || a.block < 0 || !in_range(a.state_score, 0, 1)) return unknown_rule;
    if (a.heads % a.key_heads || a.dk > most / a.dv || a.dk > most / CHUNK || a.dv > most / CHUNK) return sizes;
    if (a.k_stride < a.key_heads * a.dk || a.v_stride < a.heads * a.dv) return sizes;
    if (!a.sequences) return fine;
    if (!a.offset || !a.length || !a.origin) return tensors;
    if (a.tokens && !(a.k && a.v && a.score && a.boundary && a.death)) return tensors;
    if (a.carried && !(a.current && a.size0 && a.count0 && a.info0 && a.position0 && a.initial_death)) return tensors;
    if (!lie_apart(a)) return sequences;
    for (int64_t n = 0; n < a.sequences; ++n) {
        if (!in_range(a.origin[n], 0, INT32_MAX - 1 - a.length[n])) return sequences;  // deaths are 32 bits wide
        if (a.carried && !in_range(a.position0[n], 0, int64_t(1) << 48)) return states;
        for (int64_t i = n * a.heads; a.carried && i < (n + 1) * a.heads; ++i) {
            if (!in_range(a.size0[i], 0, a.capacity ? std::min(a.carried, a.capacity) : a.carried)) return states;
            for (int64_t s = 0; s < a.size0[i]; ++s)
                if (!in_range(a.count0[i * a.carried + s], 0, int64_t(1) << 48)) return states;
        }
    }
    return fine;
}

int64_t decide(const DecideArgs &a) {
    if (const int64_t wrong = check(a)) return wrong;
    const Level &kernels = *chosen_level().level;
    auto run = [&](int64_t n, int64_t first, int64_t heads, const float *shared) {
        return int64_t(kernels.decide(a, n, first, heads, shared) ? fine : no_memory);
    };
    return over_heads(a, kernels.decide_floats(a), kernels.decide_share, run);
}

}  // namespace

extern "C" {
const char *dla_level() { return chosen_level().name; }
const char *dla_use_level(const char *asked) { return (chosen_level() = choose_level(asked)).name; }  // for tests; no call may run
int64_t dla_attend(const AttendArgs *args) { return args ? attend(*args) : tensors; }
int64_t dla_backward(const BackwardArgs *args) { return args ? backward(*args) : tensors; }
int64_t dla_decide(const DecideArgs *args) { return args ? decide(*args) : tensors; }
}

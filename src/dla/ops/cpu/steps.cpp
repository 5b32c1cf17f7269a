// The C interface of the decoding step, and the upkeep of the pools that a dynamic state is held in.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "api.h"
#include "pool.h"

namespace {

constexpr int64_t ALONE = 1 << 22;  // bytes of a state up to which waking other threads takes longer than it saves
constexpr int64_t WASTE = 10;       // one part in so many of the pools may be free

int64_t check(const DecodeArgs &a) {
    const int64_t most = int64_t(1) << 31;
    if (a.memory < Memory::single || a.memory > Memory::dynamic) return unknown_rule;
    for (int64_t x : {a.heads, a.key_heads, a.dk, a.dv, a.threads})
        if (!in_range(x, 1, most)) return sizes;
    if (!in_range(a.sequences, 0, most) || a.heads % a.key_heads || a.dk > most / a.dv) return sizes;
    if (!a.sequences) return fine;
    if (!(a.q && a.k && a.v && a.o && a.length)) return tensors;
    for (int64_t n = 0; n < a.sequences; ++n)
        if (!in_range(a.length[n], 0, int64_t(1) << 60)) return states;
    if (a.memory == Memory::single) return a.matrices ? fine : tensors;
    if (!in_range(a.width, 1, most) || !in_range(a.states, 1, most) || !a.lam) return tensors;
    if (a.memory == Memory::log_linear) {
        if (!a.matrices || a.states > 62) return tensors;
        for (int64_t n = 0; n < a.sequences; ++n)
            if ((a.length[n] + 1) >> a.states) return states;
    }
    return fine;
}

// The sizes and tensors of a dynamic state.
int64_t check_sizes(const DecodeArgs &a) {
    const int64_t most = int64_t(1) << 31;
    for (int64_t x : {a.heads, a.dk, a.dv, a.states})
        if (!in_range(x, 1, most)) return sizes;
    for (int64_t x : {a.sequences, a.pool_matrices, a.pool_rows, a.places_room})
        if (!in_range(x, 0, most)) return sizes;
    if (a.dk > most / a.dv || (a.sequences && a.heads > most / a.sequences) || (a.stored != 4 && a.stored != 2)) return sizes;
    if (!a.sequences) return fine;
    if (!(a.matrix && a.factor && a.rows && a.count && a.info && a.norm)) return tensors;
    if (a.places_room && !a.places) return tensors;
    if (a.pool_rows && !(a.row_keys && a.row_values && a.row_coefficient && a.free_row)) return tensors;
    if (a.pending && !(a.parts && a.pending_keys && a.pending_beta && a.pending_scratch)) return tensors;
    return !a.pool_matrices || (a.matrices && a.free_matrix) ? fine : tensors;
}

// What the states of a head, or of all, take of the pools.
struct Used {
    int64_t states = 0, rows = 0, matrices = 0;
};

// Whether a head's states come first and point into the pools. Without branches: every step asks it of every state.
bool sound(const DecodeArgs &a, int64_t at, Used &used) {
    const int32_t *matrix = a.matrix + at * a.states, *place = a.places + at * a.places_room;
    const int64_t *rows = a.rows + at * a.states, *count = a.count + at * a.states;
    const uint64_t room = a.places_room, most = uint64_t(1) << 48;
    const uint32_t pool_matrices = uint32_t(a.pool_matrices), pool_rows = uint32_t(a.pool_rows);
    uint64_t wrong = 0, total = 0, matrices = 0, live = 0;
    bool before = true;
    for (int64_t i = 0; i < a.states; ++i) {
        const bool lives = count[i] != 0, has = matrix[i] != -1;
        wrong |= (has & (uint32_t(matrix[i]) >= pool_matrices)) | (uint64_t(rows[i]) > room) | (uint64_t(count[i]) > most);
        wrong |= lives ? !before : has | (rows[i] != 0);
        total += uint64_t(rows[i]), matrices += has, live += lives;
        before = lives;
    }
    if (wrong || total > room) return false;
    for (uint64_t r = 0; r < total; ++r) wrong |= uint32_t(place[r]) >= pool_rows;
    used.states = int64_t(live), used.rows = int64_t(total), used.matrices = int64_t(matrices);
    return !wrong;
}

// Whether the transitions that are pending are those of a head's last rows, and there is room for one more.
bool may_pend(const DecodeArgs &a, int64_t at, const Used &used) {
    return !a.pending || in_range(a.pending[at], 0, std::min(PENDING - 1, used.rows));
}

// Whether all heads' states are sound, and what they use together.
bool all_sound(const DecodeArgs &a, Used &all) {
    for (int64_t at = 0; at < a.sequences * a.heads; ++at) {
        Used own;
        if (!sound(a, at, own) || !may_pend(a, at, own)) return false;
        all.rows += own.rows, all.matrices += own.matrices;
    }
    return true;
}

// Whether the pools hold what the states point to, with a free row for every head, or (`folds`) are as a step has left
// them, with states that are to be folded.
int64_t check_spans(const DecodeArgs &a, bool folds) {
    const int64_t most = int64_t(1) << 31;
    if (const int64_t wrong = check_sizes(a)) return wrong;
    if (a.block < 0 || !in_range(a.state_score, 0, 1) || !in_range(a.given, 0, 1)) return unknown_rule;
    if (a.states < 2 && !a.given) return unknown_rule;  // a merge needs two
    if (!in_range(a.longest_short, 1, most) || !in_range(a.most_loose, 1, a.longest_short)) return sizes;
    if (!(a.new_row && a.freed && a.fold && a.freed_rows)) return tensors;
    if ((a.given && !(a.score && a.boundary && a.merged)) || (a.route && !a.key_sums)) return tensors;
    if (!a.beta != !a.pending) return tensors;
    const int64_t heads = a.sequences * a.heads, taken = folds ? 0 : heads;
    if (!in_range(a.free_rows, taken, a.pool_rows) || !in_range(a.free_matrices, 0, a.pool_matrices)) return states;
    for (int64_t i = a.free_rows - taken; i < a.free_rows; ++i)
        if (!in_range(a.free_row[i], 0, a.pool_rows - 1)) return states;
    for (int64_t i = std::max<int64_t>(a.free_matrices - heads, 0); i < a.free_matrices; ++i)
        if (!in_range(a.free_matrix[i], 0, a.pool_matrices - 1)) return states;
    int64_t rows = 0, matrices = 0;
    for (int64_t at = 0; at < heads; ++at) {
        Used used;
        if (!sound(a, at, used) || !may_pend(a, at, used) || used.rows + !folds > a.places_room) return states;
        rows += used.rows, matrices += used.matrices;
        if (folds && !in_range(a.fold[at], -1, used.states - 1)) return states;
        if (folds || !a.given) continue;
        if (!in_range(a.merged[at], -1, std::max<int64_t>(used.states - 2, -1))) return states;
        if (a.boundary[at] ? used.states == a.states && a.merged[at] < 0 : !used.states) return states;
    }
    const bool fits = rows <= a.pool_rows - a.free_rows && matrices <= a.pool_matrices - a.free_matrices;
    return fits ? fine : states;  // what is freed has room on the stacks
}

// What the next step needs of the pools that is not so; see Wants.
int64_t wants(const DecodeArgs &a) {
    const double heads = double(a.sequences) * a.heads, matrix = double(a.dk) * a.dv, row = double(a.dk) + a.dv;
    const double free = a.free_matrices * matrix + std::max(a.free_rows - SPARE * heads, 0.0) * row;
    const bool wasteful = free * WASTE > a.pool_matrices * matrix + a.pool_rows * row;
    return wants_rows * (a.free_rows < heads) + wants_places * (a.longest >= a.places_room) + wants_less * wasteful;
}

// Loose rows of a head.
int64_t rows_of(const DecodeArgs &a, int64_t at) {
    int64_t total = 0;
    for (int64_t i = 0; i < a.states; ++i) total += a.rows[at * a.states + i];
    return total;
}

int64_t longest(const DecodeArgs &a) {
    int64_t most = 0;
    for (int64_t at = 0; at < a.sequences * a.heads; ++at) most = std::max(most, rows_of(a, at));
    return most;
}

// Matrices for the states that are to be folded, and what folding frees, in the order of the heads. States that there
// was no matrix for are counted as missing, and folded by another call.
void fold_states(DecodeArgs &a, const Level &kernels) {
    const int64_t heads = a.sequences * a.heads;
    a.missing = 0;
    std::vector<int64_t> chosen;
    std::vector<int32_t> fresh;
    for (int64_t at = 0; at < heads; ++at) {
        if (a.fold[at] < 0) continue;
        const bool has = a.matrix[at * a.states + a.fold[at]] >= 0;
        if (!has && !a.free_matrices) {
            ++a.missing;
            continue;
        }
        chosen.push_back(at), fresh.push_back(has ? -1 : a.free_matrix[--a.free_matrices]);
    }
    run_tasks(int64_t(chosen.size()), a.threads, [&](int64_t i) {
        kernels.decode_fold(a, chosen[i] / a.heads, chosen[i] % a.heads, fresh[i]);
    });
    for (int64_t at : chosen) {
        int32_t *place = a.places + at * a.places_room + rows_of(a, at);
        for (int64_t r = 0; r < a.freed_rows[at]; ++r) a.free_row[a.free_rows++] = place[r], place[r] = -1;
        a.fold[at] = -1;
    }
}

// What a step of the dynamic memory leaves behind: free matrices, and states that are to be folded.
void clear_up(DecodeArgs &a, const Level &kernels) {
    bool folds = false;
    a.missing = 0;
    for (int64_t at = 0; at < a.sequences * a.heads; ++at) {
        if (a.freed[at] >= 0) a.free_matrix[a.free_matrices++] = a.freed[at];
        folds = folds || a.fold[at] >= 0;
    }
    if (folds) fold_states(a, kernels);
    a.longest = longest(a), a.wants = wants(a);
}

int64_t decode(DecodeArgs &a) {
    if (const int64_t wrong = check(a)) return wrong;
    const Level &kernels = *chosen_level().level;
    const int64_t heads = a.sequences * a.heads;
    const bool dynamic = a.memory == Memory::dynamic && heads;
    double bytes = double(heads) * a.dk * a.dv * 4 * (a.memory == Memory::log_linear ? a.states : 1);
    if (dynamic) {
        if (const int64_t wrong = check_spans(a, false)) return wrong;
        bytes = (double(a.pool_matrices) * a.dk * a.dv + double(a.pool_rows) * (a.dk + a.dv)) * a.stored;
        for (int64_t at = 0; at < heads; ++at) a.new_row[at] = a.free_row[--a.free_rows];
    }
    std::atomic<int64_t> failed{fine};
    const int64_t threads = bytes > ALONE ? a.threads : 1;
    run_tasks(heads, threads, [&](int64_t i) {
        if (!kernels.decode(a, i / a.heads, i % a.heads)) failed = no_memory;
    });
    if (failed) return failed;
    if (dynamic) clear_up(a, kernels);
    for (int64_t n = 0; n < a.sequences; ++n) ++a.length[n];
    return fine;
}

int64_t fold(DecodeArgs &a) {
    if (const int64_t wrong = check(a)) return wrong;
    if (a.memory != Memory::dynamic) return unknown_rule;
    if (!a.sequences) return fine;
    if (const int64_t wrong = check_spans(a, true)) return wrong;
    fold_states(a, *chosen_level().level);
    a.longest = longest(a), a.wants = wants(a);
    return fine;
}

// All states go through the transitions that are pending.
int64_t settle(DecodeArgs &a) {
    if (const int64_t wrong = check_sizes(a)) return wrong;
    if (!in_range(a.threads, 1, int64_t(1) << 31)) return sizes;
    Used used;
    if (!all_sound(a, used)) return states;
    const Level &kernels = *chosen_level().level;
    run_tasks(a.sequences * a.heads, a.threads, [&](int64_t i) { kernels.decode_settle(a, i / a.heads, i % a.heads); });
    return fine;
}

// The places of a pool that nobody uses, last ones first, so that the first are taken first.
int64_t list_free(const std::vector<bool> &used, int32_t *free) {
    int64_t many = 0;
    for (int64_t i = int64_t(used.size()) - 1; i >= 0; --i)
        if (!used[i]) free[many++] = int32_t(i);
    return many;
}

// Finds what is free in the pools of a state that no step has seen, and the norms of its current states.
int64_t ground(DecodeArgs &a) {
    if (const int64_t wrong = check_sizes(a)) return wrong;
    Used used;
    if (!all_sound(a, used)) return states;
    std::vector<bool> rows(a.pool_rows, false), matrices(a.pool_matrices, false);
    for (int64_t at = 0; at < a.sequences * a.heads; ++at) {
        for (int64_t r = 0, many = rows_of(a, at); r < many; ++r) rows[a.places[at * a.places_room + r]] = true;
        for (int64_t i = at * a.states; i < (at + 1) * a.states; ++i)
            if (a.matrix[i] >= 0) matrices[a.matrix[i]] = true;
        a.norm[at] = chosen_level().level->decode_norm(a, at / a.heads, at % a.heads);
    }
    a.free_rows = list_free(rows, a.free_row), a.free_matrices = list_free(matrices, a.free_matrix);
    a.longest = longest(a), a.wants = wants(a);
    return fine;
}

int64_t free_behind(int64_t used, int64_t room, int32_t *free) {
    for (int64_t i = used; i < room; ++i) free[room - 1 - i] = int32_t(i);
    return room - used;
}

void move_matrices(DecodeArgs &a, const PoolArgs &to) {
    const int64_t size = a.dk * a.dv * a.stored;
    int32_t next = 0;
    for (int64_t i = 0; i < a.sequences * a.heads * a.states; ++i) {
        if (a.matrix[i] < 0) continue;
        memcpy((char *)to.matrices + next * size, (char *)a.matrices + a.matrix[i] * size, size);
        a.matrix[i] = next++;
    }
    if (to.pool_matrices > next) memset((char *)to.matrices + next * size, 0, (to.pool_matrices - next) * size);
    a.matrices = to.matrices, a.pool_matrices = to.pool_matrices, a.free_matrix = to.free_matrix;
    a.free_matrices = free_behind(next, to.pool_matrices, to.free_matrix);
}

void move_rows(DecodeArgs &a, const PoolArgs &to) {
    const int64_t key = a.dk * a.stored, value = a.dv * a.stored;
    int32_t next = 0;
    for (int64_t at = 0; at < a.sequences * a.heads; ++at)
        for (int32_t *place = a.places + at * a.places_room, *end = place + rows_of(a, at); place < end; ++place) {
            memcpy((char *)to.row_keys + next * key, (char *)a.row_keys + *place * key, key);
            memcpy((char *)to.row_values + next * value, (char *)a.row_values + *place * value, value);
            to.row_coefficient[next] = a.row_coefficient[*place], *place = next++;
        }
    if (const int64_t left = to.pool_rows - next) {
        memset((char *)to.row_keys + next * key, 0, left * key);
        memset((char *)to.row_values + next * value, 0, left * value);
        memset(to.row_coefficient + next, 0, left * 4);
    }
    a.row_keys = to.row_keys, a.row_values = to.row_values, a.row_coefficient = to.row_coefficient;
    a.pool_rows = to.pool_rows, a.free_row = to.free_row;
    a.free_rows = free_behind(next, to.pool_rows, to.free_row);
}

// What is in use goes to the front of other pools, in the order of the heads; the places behind it are free, and zero.
int64_t repack(DecodeArgs &a, const PoolArgs &to) {
    const int64_t most = int64_t(1) << 31;
    if (const int64_t wrong = check_sizes(a)) return wrong;
    if (!in_range(to.pool_matrices, -1, most) || !in_range(to.pool_rows, -1, most)) return sizes;
    if (to.pool_matrices > 0 && !(to.matrices && to.free_matrix)) return tensors;
    if (to.pool_rows > 0 && !(to.row_keys && to.row_values && to.row_coefficient && to.free_row)) return tensors;
    Used used;
    if (!all_sound(a, used)) return states;
    if (to.pool_matrices >= 0 && used.matrices > to.pool_matrices) return states;
    if (to.pool_rows >= 0 && used.rows > to.pool_rows) return states;
    if (to.pool_matrices >= 0) move_matrices(a, to);
    if (to.pool_rows >= 0) move_rows(a, to);
    a.wants = wants(a);
    return fine;
}

}  // namespace

extern "C" {
int64_t dla_decode(DecodeArgs *args) { return args ? decode(*args) : tensors; }
int64_t dla_fold(DecodeArgs *args) { return args ? fold(*args) : tensors; }  // right after dla_decode, with more matrices
int64_t dla_settle(DecodeArgs *args) { return args ? settle(*args) : tensors; }
int64_t dla_ground(DecodeArgs *args) { return args ? ground(*args) : tensors; }
int64_t dla_repack(DecodeArgs *args, const PoolArgs *to) { return args && to ? repack(*args, *to) : tensors; }
}

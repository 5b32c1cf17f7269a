// The C interface of the layers' kernels: checks, the instruction set, threads.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "api.h"
#include "layer_args.h"
#include "pool.h"

extern "C" int64_t dla_decode(DecodeArgs *);

extern const LayerLevel dla_layers_portable;
#if defined(__x86_64__) && defined(__GNUC__)
extern const LayerLevel dla_layers_avx2, dla_layers_avx512;
#endif

namespace {

constexpr int64_t MOST = int64_t(1) << 31;
constexpr int64_t NUMBERS = 1 << 14;  // that are worth a task of their own
constexpr int64_t STRETCH = 256;      // tokens of a convolution's task

const LayerLevel &kernels() {
#if defined(__x86_64__) && defined(__GNUC__)
    const char *name = chosen_level().name;
    if (!strcmp(name, "avx512")) return dla_layers_avx512;
    if (!strcmp(name, "avx2")) return dla_layers_avx2;
#endif
    return dla_layers_portable;
}

// Work on count things in stretches of nearly equal lengths, multiples of `grain`: for every thread a few.
template <class Work> void in_stretches(int64_t count, int64_t least, int64_t grain, int64_t threads, Work work) {
    const int64_t tasks = std::max<int64_t>(1, std::min(count / std::max<int64_t>(least, 1), threads > 1 ? 2 * threads : 1));
    const int64_t each = ((count + tasks - 1) / tasks + grain - 1) / grain * grain;
    run_tasks((count + each - 1) / std::max<int64_t>(each, 1), threads, [&](int64_t i) {
        work(i * each, std::min(count, (i + 1) * each));
    });
}

bool sized(std::initializer_list<int64_t> least_one, std::initializer_list<int64_t> any) {
    for (int64_t x : least_one)
        if (!in_range(x, 1, MOST)) return false;
    for (int64_t x : any)
        if (!in_range(x, 0, MOST)) return false;
    return true;
}

int64_t matmul(const MatmulArgs &a) {
    if (!sized({a.threads}, {a.rows, a.columns, a.depth, a.a_row, a.a_step, a.b_row, a.b_step, a.c_row})) return sizes;
    if (a.c_row < a.columns) return sizes;
    if (!a.rows || !a.columns) return fine;
    if (!a.c || (a.depth && !(a.a && a.b))) return tensors;
    std::atomic<int64_t> failed{fine};
    const LayerLevel &use = kernels();
    const int64_t work = std::max<int64_t>(1, a.columns * std::max<int64_t>(a.depth, 1));
    in_stretches(a.rows, 64 * NUMBERS / work + 1, use.tile_rows, a.threads, [&](int64_t first, int64_t last) {
        if (!use.matmul(a, first, last)) failed = no_memory;
    });
    return failed;
}

int64_t check(const ConvArgs &a) {
    if (!sized({a.channels, a.threads}, {a.tokens, a.sequences, a.x_row, a.dy_row})) return sizes;
    if (!in_range(a.size, 2, 4) || a.x_row < a.channels) return sizes;
    if (!a.length) return a.sequences ? (a.tokens % a.sequences ? sequences : fine) : (a.tokens ? sequences : fine);
    int64_t left = a.tokens;
    for (int64_t n = 0; n < a.sequences; left -= a.length[n++])
        if (!in_range(a.length[n], 0, left)) return sequences;
    return left ? sequences : fine;
}

int64_t conv(const ConvArgs &a) {
    if (const int64_t wrong = check(a)) return wrong;
    if (!a.tokens) return fine;
    if (!(a.x && a.weight && a.y)) return tensors;
    const LayerLevel &use = kernels();
    std::vector<int64_t> offset(a.sequences + 1, 0);
    int64_t longest = 0;
    for (int64_t n = 0; n < a.sequences; ++n) {
        const int64_t length = a.length ? a.length[n] : a.tokens / a.sequences;
        offset[n + 1] = offset[n] + length, longest = std::max(longest, length);
    }
    const int64_t pieces = (longest + STRETCH - 1) / STRETCH;
    run_tasks(a.sequences * pieces, a.threads, [&](int64_t i) {
        const int64_t n = i / pieces, begin = i % pieces * STRETCH, length = offset[n + 1] - offset[n];
        if (begin < length) use.conv(a, offset[n], begin, std::min(length, begin + STRETCH));
    });
    return fine;
}

int64_t conv_back(const ConvArgs &a) {
    if (const int64_t wrong = check(a)) return wrong;
    if (a.dy_row < a.channels) return sizes;
    if (!a.dweight || (a.tokens && !(a.x && a.weight && a.dy && a.dx))) return tensors;
    if (a.bias && !a.dbias) return tensors;
    const LayerLevel &use = kernels();
    run_tasks((a.channels + use.lanes - 1) / use.lanes, a.threads, [&](int64_t i) { use.conv_back(a, i * use.lanes); });
    return fine;
}

int64_t check(const NormArgs &a) {
    if (a.gated < Gate::none || a.gated > Gate::after) return unknown_rule;
    if (!sized({a.size, a.groups, a.threads}, {a.rows, a.x_row, a.gate_row, a.skip_row, a.dy_row})) return sizes;
    if (a.size % a.groups || a.x_row < a.size) return sizes;
    if (a.gated != Gate::none && (a.gate_row < a.size || (a.rows && !a.gate))) return tensors;
    if (a.skip && (a.skip_row < a.size || !a.skip_weight)) return tensors;
    if (!a.weight || (a.rows && !(a.x && a.inverse))) return tensors;
    return fine;
}

int64_t norm(const NormArgs &a) {
    if (const int64_t wrong = check(a)) return wrong;
    if (a.rows && !a.y) return tensors;
    const LayerLevel &use = kernels();
    in_stretches(a.rows, NUMBERS / a.size + 1, 1, a.threads, [&](int64_t i, int64_t j) { use.norm(a, i, j); });
    return fine;
}

int64_t norm_back(const NormArgs &a) {
    if (const int64_t wrong = check(a)) return wrong;
    if (!in_range(a.parts, 1, MOST) || a.dy_row < a.size) return sizes;
    if (!a.dweight || (a.rows && !(a.dy && a.dx))) return tensors;
    if (a.gated != Gate::none && a.rows && !a.dgate) return tensors;
    if (a.skip && !(a.dskip && a.dskip_weight)) return tensors;
    const LayerLevel &use = kernels();
    std::atomic<int64_t> failed{fine};
    run_tasks(a.parts, a.threads, [&](int64_t part) {
        if (!use.norm_back(a, part)) failed = no_memory;
    });
    return failed;
}

int64_t swiglu(const SwigluArgs &a, bool back) {
    if (!sized({a.threads}, {}) || a.count < 0) return sizes;
    if (a.count && !(a.a && a.b && (back ? a.dy && a.da && a.db : a.y != nullptr))) return tensors;
    const LayerLevel &use = kernels();
    in_stretches(a.count, NUMBERS, use.lanes, a.threads, [&](int64_t i, int64_t j) {
        if (back) use.swiglu_back(a, i, j);
        else use.swiglu(a, i, j);
    });
    return fine;
}

int64_t check(const SoftplusArgs &a) {
    if (!sized({a.size, a.threads}, {a.rows, a.x_row, a.dy_row}) || a.x_row < a.size) return sizes;
    return a.rows && !a.x ? tensors : fine;
}

int64_t softplus(const SoftplusArgs &a) {
    if (const int64_t wrong = check(a)) return wrong;
    if (a.rows && !a.y) return tensors;
    const LayerLevel &use = kernels();
    in_stretches(a.rows, NUMBERS / a.size + 1, 1, a.threads, [&](int64_t i, int64_t j) { use.softplus(a, i, j); });
    return fine;
}

int64_t softplus_back(const SoftplusArgs &a) {
    if (const int64_t wrong = check(a)) return wrong;
    if (!in_range(a.parts, 1, MOST) || a.dy_row < a.size) return sizes;
    if ((a.rows && !(a.dy && a.dx)) || (a.scale && !a.dscale) || (a.bias && !a.dbias)) return tensors;
    const LayerLevel &use = kernels();
    run_tasks(a.parts, a.threads, [&](int64_t part) { use.softplus_back(a, part); });
    return fine;
}

int64_t check(const StepArgs &a) {
    if (!sized({a.heads, a.dv, a.threads}, {a.tokens, a.x_row, a.dt_row})) return sizes;
    if (a.heads > MOST / a.dv || a.x_row < a.heads * a.dv || a.dt_row < a.heads) return sizes;
    return a.bias && a.decay && (!a.tokens || (a.x && a.step)) ? fine : tensors;
}

int64_t step(const StepArgs &a) {
    if (const int64_t wrong = check(a)) return wrong;
    if (a.tokens && !(a.dt && a.v && a.g)) return tensors;
    const LayerLevel &use = kernels();
    const int64_t least = NUMBERS / (a.heads * a.dv) + 1;
    in_stretches(a.tokens, least, 1, a.threads, [&](int64_t i, int64_t j) { use.step(a, i, j); });
    return fine;
}

int64_t step_back(const StepArgs &a) {
    if (const int64_t wrong = check(a)) return wrong;
    if (!in_range(a.parts, 1, MOST)) return sizes;
    if (!(a.d_bias && a.d_decay) || (a.tokens && !(a.d_v && a.d_g && a.dx && a.d_dt))) return tensors;
    const LayerLevel &use = kernels();
    run_tasks(a.parts, a.threads, [&](int64_t part) { use.step_back(a, part); });
    return fine;
}

int64_t entropy(const EntropyArgs &a) {
    if (!sized({a.classes, a.threads}, {a.rows})) return sizes;
    if (a.rows && !(a.logits && a.target && a.loss)) return tensors;
    for (int64_t i = 0; i < a.rows; ++i)
        if (!in_range(a.target[i], 0, a.classes - 1)) return states;
    const LayerLevel &use = kernels();
    in_stretches(a.rows, NUMBERS / a.classes + 1, 1, a.threads, [&](int64_t i, int64_t j) { use.entropy(a, i, j); });
    return fine;
}

int64_t linear(const LinearArgs &a) {
    if (!sized({a.out, a.in, a.threads}, {a.rows, a.x_row, a.plus_row})) return sizes;
    if (a.x_row < a.in || (a.plus && a.plus_row < a.out)) return sizes;
    if (a.rows && !(a.x && a.weight && a.y)) return tensors;
    const LayerLevel &use = kernels();
    in_stretches(a.out, 4 * NUMBERS / a.in + 1, use.lanes, a.threads, [&](int64_t i, int64_t j) { use.linear(a, i, j); });
    return fine;
}

int64_t next(const NextArgs &a) {
    if (!sized({a.channels}, {a.sequences, a.x_row, a.tail_row, a.tail_sequence})) return sizes;
    if (!in_range(a.size, 2, 4) || a.x_row < a.channels || a.tail_row < a.channels) return sizes;
    if (a.tail_sequence < (a.size - 2) * a.tail_row + a.channels) return sizes;
    if (a.sequences && !(a.x && a.weight && a.tail && a.y)) return tensors;
    kernels().next(a);
    return fine;
}

int64_t map(const MapArgs &a) {
    if (a.function < Function::same || a.function > Function::silu) return unknown_rule;
    if (!sized({a.size, a.each}, {a.rows, a.x_row}) || (a.x_row && a.x_row < a.size)) return sizes;
    if (a.rows && !(a.x && a.y)) return tensors;
    kernels().map(a);
    return fine;
}

int64_t piece(const Piece &p) {
    if (!p.args) return tensors;
    switch (p.kernel) {
        case Kernel::matmul: return matmul(*(const MatmulArgs *)p.args);
        case Kernel::linear: return linear(*(const LinearArgs *)p.args);
        case Kernel::norm: return norm(*(const NormArgs *)p.args);
        case Kernel::swiglu: return swiglu(*(const SwigluArgs *)p.args, false);
        case Kernel::softplus: return softplus(*(const SoftplusArgs *)p.args);
        case Kernel::step: return step(*(const StepArgs *)p.args);
        case Kernel::next: return next(*(const NextArgs *)p.args);
        case Kernel::map: return map(*(const MapArgs *)p.args);
        case Kernel::decode: return dla_decode((DecodeArgs *)p.args);
    }
    return unknown_rule;
}

int64_t program(const ProgramArgs &a) {
    if (a.count < 0) return sizes;
    if (a.count && !a.pieces) return tensors;
    for (int64_t i = 0; i < a.count; ++i)
        if (const int64_t wrong = piece(a.pieces[i])) return wrong;
    return fine;
}

}  // namespace

extern "C" {
int64_t dla_program(const ProgramArgs *args) { return args ? program(*args) : tensors; }
int64_t dla_matmul(const MatmulArgs *args) { return args ? matmul(*args) : tensors; }
int64_t dla_conv(const ConvArgs *args) { return args ? conv(*args) : tensors; }
int64_t dla_conv_back(const ConvArgs *args) { return args ? conv_back(*args) : tensors; }
int64_t dla_norm(const NormArgs *args) { return args ? norm(*args) : tensors; }
int64_t dla_norm_back(const NormArgs *args) { return args ? norm_back(*args) : tensors; }
int64_t dla_swiglu(const SwigluArgs *args) { return args ? swiglu(*args, false) : tensors; }
int64_t dla_swiglu_back(const SwigluArgs *args) { return args ? swiglu(*args, true) : tensors; }
int64_t dla_softplus(const SoftplusArgs *args) { return args ? softplus(*args) : tensors; }
int64_t dla_softplus_back(const SoftplusArgs *args) { return args ? softplus_back(*args) : tensors; }
int64_t dla_entropy(const EntropyArgs *args) { return args ? entropy(*args) : tensors; }
int64_t dla_step(const StepArgs *args) { return args ? step(*args) : tensors; }
int64_t dla_step_back(const StepArgs *args) { return args ? step_back(*args) : tensors; }
}

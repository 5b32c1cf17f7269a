// The layers' kernels: arrays that end where they must, on several threads, and arguments that cannot be.
#include "../../src/dla/ops/cpu/layer_args.h"

#include <memory>

#include "drive.h"

extern "C" {
int64_t dla_matmul(const MatmulArgs *);
int64_t dla_conv(const ConvArgs *);
int64_t dla_conv_back(const ConvArgs *);
int64_t dla_norm(const NormArgs *);
int64_t dla_norm_back(const NormArgs *);
int64_t dla_swiglu(const SwigluArgs *);
int64_t dla_swiglu_back(const SwigluArgs *);
int64_t dla_softplus(const SoftplusArgs *);
int64_t dla_softplus_back(const SoftplusArgs *);
int64_t dla_step(const StepArgs *);
int64_t dla_step_back(const StepArgs *);
int64_t dla_entropy(const EntropyArgs *);
int64_t dla_program(const ProgramArgs *);
}

namespace {

// Arrays of exactly the sizes asked for, which live as long as this.
struct Arrays {
    Draw &draw;
    std::vector<std::unique_ptr<float[]>> made;
    float *of(int64_t count) {
        made.emplace_back(new float[count]);
        for (int64_t i = 0; i < count; ++i) made.back()[i] = draw.normal();
        return made.back().get();
    }
    // rows with a gap between them, none behind the last
    float *rows(int64_t rows, int64_t size, int64_t row) { return of(rows ? (rows - 1) * row + size : 0); }
};

constexpr int ROUNDS = 40;

const Test matmul("layers: products", [](Draw &draw) {
    for (int i = 0; i < ROUNDS; ++i) {
        Arrays arrays{draw};
        MatmulArgs a{};
        a.rows = draw.whole(0, 150), a.columns = draw.whole(1, 90), a.depth = draw.whole(0, 150), a.threads = draw.whole(1, 4);
        const bool tall = draw.chance(0.5), flat = draw.chance(0.5);
        a.a_row = tall ? 1 : a.depth, a.a_step = tall ? a.rows : 1;
        a.b_row = flat ? a.columns : 1, a.b_step = flat ? 1 : a.depth;
        a.c_row = a.columns, a.add = draw.chance(0.3);
        a.a = arrays.of(a.rows * a.depth), a.b = arrays.of(a.depth * a.columns), a.c = arrays.of(a.rows * a.columns);
        expect(dla_matmul(&a) == 0, "a product was refused");
        a.c_row = a.columns - 1;
        expect(a.columns == 1 || dla_matmul(&a), "rows that overlap were not");
        a.c_row = a.columns, a.depth = -1;
        expect(dla_matmul(&a), "a depth below 0 was not");
    }
});

const Test conv("layers: convolutions", [](Draw &draw) {
    for (int i = 0; i < ROUNDS; ++i) {
        Arrays arrays{draw};
        ConvArgs a{};
        std::vector<int64_t> lengths(draw.whole(1, 5));
        for (int64_t &length : lengths) a.tokens += length = draw.of(std::vector<int64_t>{0, 1, 2, 3, 70, 300});
        a.sequences = lengths.size(), a.length = lengths.data();
        a.channels = draw.whole(1, 40), a.size = draw.whole(2, 4), a.threads = draw.whole(1, 4);
        a.x_row = a.channels + draw.whole(0, 5), a.dy_row = a.channels + draw.whole(0, 5);
        a.x = arrays.rows(a.tokens, a.channels, a.x_row), a.dy = arrays.rows(a.tokens, a.channels, a.dy_row);
        a.weight = arrays.of(a.channels * a.size), a.dweight = arrays.of(a.channels * a.size);
        if (draw.chance(0.5)) a.bias = arrays.of(a.channels), a.dbias = arrays.of(a.channels);
        a.y = arrays.of(a.tokens * a.channels), a.dx = arrays.of(a.tokens * a.channels);
        expect(dla_conv(&a) == 0 && dla_conv_back(&a) == 0, "a convolution was refused");
        lengths[0] += 1;
        expect(dla_conv(&a) && dla_conv_back(&a), "sequences past the tokens were not");
        lengths[0] -= 1, a.size = 5;
        expect(dla_conv(&a) && dla_conv_back(&a), "a window that is too long was not");
    }
});

const Test norm("layers: norms", [](Draw &draw) {
    for (int i = 0; i < ROUNDS; ++i) {
        Arrays arrays{draw};
        NormArgs a{};
        a.rows = draw.whole(0, 100), a.groups = draw.whole(1, 4), a.size = a.groups * draw.whole(1, 40);
        a.gated = (Gate)draw.whole(0, 2), a.parts = draw.whole(1, 5), a.threads = draw.whole(1, 4), a.eps = 1e-5;
        a.x_row = a.size + draw.whole(0, 5), a.gate_row = a.size + draw.whole(0, 5);
        a.skip_row = a.size + draw.whole(0, 5), a.dy_row = a.size + draw.whole(0, 5);
        const int64_t count = a.rows * a.size;
        a.x = arrays.rows(a.rows, a.size, a.x_row), a.gate = arrays.rows(a.rows, a.size, a.gate_row);
        a.dy = arrays.rows(a.rows, a.size, a.dy_row), a.weight = arrays.of(a.size), a.y = arrays.of(count);
        a.inverse = arrays.of(a.rows * a.groups), a.dx = arrays.of(count), a.dgate = arrays.of(count);
        a.dweight = arrays.of(a.parts * a.size);
        if (draw.chance(0.5)) {
            a.skip = arrays.rows(a.rows, a.size, a.skip_row), a.skip_weight = arrays.of(a.size);
            a.dskip = arrays.of(count), a.dskip_weight = arrays.of(a.parts * a.size);
        }
        expect(dla_norm(&a) == 0 && dla_norm_back(&a) == 0, "a norm was refused");
        a.groups = a.size + 1;
        expect(dla_norm(&a) && dla_norm_back(&a), "more groups than channels were not");
        a.groups = 1, a.gated = (Gate)3;
        expect(dla_norm(&a) && dla_norm_back(&a), "an unknown gate was not");
    }
});

const Test gates("layers: gates, softplus and time steps", [](Draw &draw) {
    for (int i = 0; i < ROUNDS; ++i) {
        Arrays arrays{draw};
        const int64_t threads = draw.whole(1, 4), count = draw.whole(0, 40000);
        SwigluArgs s{count, threads, arrays.of(count), arrays.of(count), arrays.of(count), arrays.of(count)};
        s.da = arrays.of(count), s.db = arrays.of(count);
        expect(dla_swiglu(&s) == 0 && dla_swiglu_back(&s) == 0, "a gate was refused");
        SoftplusArgs p{};
        p.rows = draw.whole(0, 80), p.size = draw.whole(1, 40), p.parts = draw.whole(1, 5), p.threads = threads;
        p.x_row = p.size + draw.whole(0, 3), p.dy_row = p.size + draw.whole(0, 3);
        p.x = arrays.rows(p.rows, p.size, p.x_row), p.dy = arrays.rows(p.rows, p.size, p.dy_row);
        p.y = arrays.of(p.rows * p.size), p.dx = arrays.of(p.rows * p.size);
        if (draw.chance(0.5)) p.scale = arrays.of(p.size), p.dscale = arrays.of(p.parts * p.size);
        if (draw.chance(0.5)) p.bias = arrays.of(p.size), p.dbias = arrays.of(p.parts * p.size);
        expect(dla_softplus(&p) == 0 && dla_softplus_back(&p) == 0, "a softplus was refused");
        p.x_row = p.size - 1;
        expect(dla_softplus(&p) && dla_softplus_back(&p), "rows that overlap were not");
        StepArgs t{};
        t.tokens = draw.whole(0, 80), t.heads = draw.whole(1, 20), t.dv = draw.whole(1, 40), t.parts = draw.whole(1, 5);
        t.threads = threads, t.x_row = t.heads * t.dv + draw.whole(0, 3), t.dt_row = t.heads + draw.whole(0, 3);
        const int64_t steps = t.tokens * t.heads;
        t.x = arrays.rows(t.tokens, t.heads * t.dv, t.x_row), t.dt = arrays.rows(t.tokens, t.heads, t.dt_row);
        t.bias = arrays.of(t.heads), t.decay = arrays.of(t.heads), t.v = arrays.of(steps * t.dv), t.g = arrays.of(steps);
        t.step = arrays.of(steps), t.d_v = arrays.of(steps * t.dv), t.d_g = arrays.of(steps), t.dx = arrays.of(steps * t.dv);
        t.d_dt = arrays.of(steps), t.d_bias = arrays.of(t.parts * t.heads), t.d_decay = arrays.of(t.parts * t.heads);
        expect(dla_step(&t) == 0 && dla_step_back(&t) == 0, "a time step was refused");
        t.parts = 0;
        expect(dla_step_back(&t), "no parts were not");
    }
});

// Of one token a sequence: a linear map, the convolution, a function, and what cannot be.
const Test program("layers: programs", [](Draw &draw) {
    for (int i = 0; i < ROUNDS; ++i) {
        Arrays arrays{draw};
        LinearArgs l{};
        l.rows = draw.whole(0, 9), l.out = draw.whole(1, 200), l.in = draw.whole(1, 700), l.threads = draw.whole(1, 4);
        l.x_row = l.in + draw.whole(0, 3), l.plus_row = l.out + draw.whole(0, 3);
        l.x = arrays.rows(l.rows, l.in, l.x_row), l.weight = arrays.of(l.out * l.in), l.y = arrays.of(l.rows * l.out);
        if (draw.chance(0.5)) l.bias = arrays.of(l.out);
        if (draw.chance(0.5)) l.plus = arrays.rows(l.rows, l.out, l.plus_row);
        NextArgs n{};
        n.sequences = l.rows, n.channels = l.out, n.size = draw.whole(2, 4), n.x_row = l.out;
        n.tail_row = n.channels + draw.whole(0, 5), n.tail_sequence = (n.size - 1) * n.tail_row;
        n.x = l.y, n.weight = arrays.of(n.channels * n.size), n.bias = draw.chance(0.5) ? arrays.of(n.channels) : nullptr;
        n.tail = arrays.of(n.sequences * n.tail_sequence), n.y = arrays.of(n.sequences * n.channels);
        MapArgs m{};
        m.rows = draw.whole(0, 4), m.size = draw.whole(1, 40), m.each = draw.whole(1, 5);
        m.function = (Function)draw.whole(0, 3), m.scale = 2, m.x_row = draw.chance(0.5) ? 0 : m.size + draw.whole(0, 3);
        m.x = m.x_row ? arrays.rows(m.rows, m.size, m.x_row) : arrays.of(m.size), m.y = arrays.of(m.rows * m.size * m.each);
        Piece pieces[] = {{Kernel::linear, &l}, {Kernel::next, &n}, {Kernel::map, &m}};
        const ProgramArgs p{3, pieces};
        expect(dla_program(&p) == 0, "a program was refused");
        l.x_row = l.in - 1;
        expect(dla_program(&p), "rows that overlap were not");
        l.x_row = l.in, n.size = draw.chance(0.5) ? 1 : 5;
        expect(dla_program(&p), "a window that no kernel has was not");
        n.size = 3, n.tail_sequence = 2 * n.tail_row - 1 - (n.tail_row - n.channels);
        expect(dla_program(&p), "tails that overlap were not");
        n.size = 2, n.tail_sequence = n.tail_row, m.function = (Function)4;
        expect(dla_program(&p), "an unknown function was not");
        m.function = Function::same, pieces[1].kernel = (Kernel)9;
        expect(dla_program(&p), "an unknown kernel was not");
        pieces[1] = {Kernel::next, nullptr};
        expect(dla_program(&p), "a piece without arguments was not");
    }
});

const Test entropy("layers: losses", [](Draw &draw) {
    for (int i = 0; i < ROUNDS; ++i) {
        Arrays arrays{draw};
        EntropyArgs a{};
        a.rows = draw.whole(1, 80), a.classes = draw.whole(1, 60), a.threads = draw.whole(1, 4);
        std::vector<int64_t> targets(a.rows);
        for (int64_t &target : targets) target = draw.whole(0, a.classes - 1);
        a.logits = arrays.of(a.rows * a.classes), a.target = targets.data(), a.loss = arrays.of(a.rows);
        expect(dla_entropy(&a) == 0, "a loss was refused");
        targets[draw.whole(0, a.rows - 1)] = draw.chance(0.5) ? -1 : a.classes;
        expect(dla_entropy(&a), "a target that is no class was not");
    }
});

}  // namespace

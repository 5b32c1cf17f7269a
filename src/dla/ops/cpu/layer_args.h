// What the kernels of the layers are called with: plain structs, mirrored in Python (see dla/layers/fused).
//
// Float32 throughout. A matrix of tokens and channels has its channels side by side; `_row` says how many floats lie
// between a token and the next.
#pragma once
#include <stdint.h>

// c [rows, columns] = a [rows, depth] b [depth, columns], or that added to c. Steps are those of a row's numbers.
struct MatmulArgs {
    int64_t rows, columns, depth, a_row, a_step, b_row, b_step, c_row, add, threads;
    const float *a, *b;
    float *c;
};

// y = SiLU(a causal convolution over every channel by itself), sequences one after another on the token axis.
struct ConvArgs {
    int64_t tokens, sequences, channels, size, x_row, dy_row, threads;
    const int64_t *length;     // [sequences], or null where all are equal
    const float *x;            // [tokens, channels]
    const float *weight;       // [channels, size], the last number for the token itself
    const float *bias;         // [channels] or null
    float *y;                  // [tokens, channels]
    const float *dy;           // [tokens, channels], for gradients
    float *dx, *dweight, *dbias;  // like x (but without gaps), weight and bias
};

enum class Gate : int64_t { none, before, after };  // whether SiLU(gate) multiplies what goes into the norm or comes out

// y = x / rms(x) * weight in each of `groups` equal parts of a row, gated; x is x + skip * skip_weight where there is one.
struct NormArgs {
    int64_t rows, size, groups;
    Gate gated;
    int64_t x_row, gate_row, skip_row, dy_row, parts, threads;
    double eps;
    const float *x, *gate, *skip;      // [rows, size]
    const float *weight, *skip_weight;  // [size]
    float *y;                           // [rows, size]
    float *inverse;                     // [rows, groups] 1 / rms
    const float *dy;                    // [rows, size], for gradients
    float *dx, *dgate, *dskip;          // [rows, size], without gaps
    float *dweight, *dskip_weight;      // [parts, size] sums over equal parts of the rows
};

// y = SiLU(a) b.
struct SwigluArgs {
    int64_t count, threads;
    const float *a, *b;
    float *y;
    const float *dy;
    float *da, *db;
};

// y = softplus(x scale + bias), scale and bias the same for all rows.
struct SoftplusArgs {
    int64_t rows, size, x_row, dy_row, parts, threads;
    const float *x, *scale, *bias;  // [rows, size], [size] or null, [size] or null
    float *y;
    const float *dy;
    float *dx, *dscale, *dbias;  // [rows, size], [parts, size] sums over equal parts of the rows
};

// Mamba-2's operands: step = softplus(dt + bias), v = x step, g = -step exp(A_log).
struct StepArgs {
    int64_t tokens, heads, dv, x_row, dt_row, parts, threads;
    const float *x, *dt, *bias, *decay;  // [tokens, heads, dv], [tokens, heads], [heads], exp(A_log) [heads]
    float *v, *g, *step;                 // [tokens, heads, dv], [tokens, heads] twice
    const float *d_v, *d_g;
    float *dx, *d_dt, *d_bias, *d_decay;  // like x and dt without gaps, [parts, heads] twice
};

// Cross-entropy of every row of logits, which its gradient takes the place of.
struct EntropyArgs {
    int64_t rows, classes, threads;
    float *logits;          // [rows, classes]
    const int64_t *target;  // [rows]
    float *loss;            // [rows]
};

// For decoding steps, with one row for every sequence:

// y [rows, out] = x [rows, in] weightᵀ + bias + plus, for so few rows that what counts is the weight's way from memory.
struct LinearArgs {
    int64_t rows, out, in, x_row, plus_row, threads;
    const float *x, *weight, *bias, *plus;  // [rows, in], [out, in], [out] or null, [rows, out] or null
    float *y;
};

// The convolution's next token: y [sequences, channels], and the tail of its last inputs with it.
struct NextArgs {
    int64_t sequences, channels, size, x_row, tail_row, tail_sequence;  // floats between the tail's tokens and sequences
    const float *x, *weight, *bias;
    float *tail;  // [sequences, size - 1, channels], oldest first
    float *y;
};

enum class Function : int64_t { same, exp, sigmoid, silu };

// y [rows, size * each] = scale f(x [rows, size]), each number of x standing for `each` neighbours of y; x_row 0: the same for all rows.
struct MapArgs {
    int64_t rows, size, each;
    Function function;
    int64_t x_row;
    double scale;
    const float *x;
    float *y;
};

// Kernels to be run one after another.
enum class Kernel : int64_t { matmul, linear, norm, swiglu, softplus, step, next, map, decode };
struct Piece {
    Kernel kernel;
    void *args;  // of that kernel
};
struct ProgramArgs {
    int64_t count;
    const Piece *pieces;
};

// The kernels of one instruction set. A task does the same work whoever runs it.
struct LayerLevel {
    bool (*matmul)(const MatmulArgs &, int64_t first, int64_t last);          // these rows
    void (*conv)(const ConvArgs &, int64_t offset, int64_t begin, int64_t end);  // tokens of the sequence at offset
    void (*conv_back)(const ConvArgs &, int64_t channel);                     // as many channels as a vector has
    void (*norm)(const NormArgs &, int64_t first, int64_t last);              // rows
    bool (*norm_back)(const NormArgs &, int64_t part);
    void (*swiglu)(const SwigluArgs &, int64_t first, int64_t last);
    void (*swiglu_back)(const SwigluArgs &, int64_t first, int64_t last);
    void (*softplus)(const SoftplusArgs &, int64_t first, int64_t last);
    void (*softplus_back)(const SoftplusArgs &, int64_t part);
    void (*step)(const StepArgs &, int64_t first, int64_t last);
    void (*step_back)(const StepArgs &, int64_t part);
    void (*entropy)(const EntropyArgs &, int64_t first, int64_t last);        // rows
    void (*linear)(const LinearArgs &, int64_t first, int64_t last);          // columns of y
    void (*next)(const NextArgs &);
    void (*map)(const MapArgs &);
    int64_t lanes, tile_rows;
};

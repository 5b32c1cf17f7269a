// Vectors of floats as wide as the instruction set has them, and the one product that every stage is made of.
//
// The kernels are compiled once for each instruction set (level_*.cpp), so nothing here may leave its file: all is in an
// unnamed namespace, and no template or inline function of the standard library is used, which the linker could take
// from a file for another instruction set.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

namespace {

#if DLA_LEVEL == 512
constexpr int LANES = 16, PANEL = 4, ROWS = 6;  // floats a vector; a tile's vectors a row and rows, held in registers
#elif DLA_LEVEL == 256
constexpr int LANES = 8, PANEL = 2, ROWS = 6;
#else
constexpr int LANES = 4, PANEL = 2, ROWS = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef float Half __attribute__((vector_size(LANES * 2)));
typedef double Wide __attribute__((vector_size(LANES * 4)));  // half as many doubles
typedef uint64_t Longs __attribute__((vector_size(LANES * 4)));
typedef float Loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef double LooseWide __attribute__((vector_size(LANES * 4), aligned(8), may_alias));

INLINE Vec load(const float *x) { return *(const Loose *)x; }
INLINE void store(float *x, Vec y) { *(Loose *)x = y; }
INLINE Vec all(float x) { return Vec{} + x; }

INLINE float sum(Vec x) {
#if DLA_LEVEL == 512
    x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    x += __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#elif DLA_LEVEL == 256
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
    x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
    x += __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
#else
    x += __builtin_shufflevector(x, x, 2, 3, 0, 1);
    x += __builtin_shufflevector(x, x, 1, 0, 3, 2);
#endif
    return x[0];
}

constexpr double INVERSE_FACTORIAL[13] = {1.0,           1.0,           1.0 / 2,        1.0 / 6,       1.0 / 24,
                                         1.0 / 120,     1.0 / 720,     1.0 / 5040,     1.0 / 40320,   1.0 / 362880,
                                         1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600};

// exp of numbers <= 0 (a little above does no harm), to about one rounding; below -87 it is 0.
INLINE Vec exp_vec(Vec x) {
    const Vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const Vec shifted = x * 1.44269504088896341f + magic, n = shifted - magic;
    const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Bits power = ((Bits)shifted - (Bits)magic) << 23;  // bits: what is not finite may overflow
    const Ints kept = (x > all(-87.0f)) | (x != x);          // NaN stays
    return (Vec)(((Bits)p + power) & (Bits)kept);
}

// The same for doubles, to about 1e-16, between -700 and 700.
INLINE Wide exp_wide(Wide x) {
    const Wide magic = Wide{} + 6755399441055744.0;  // 1.5 * 2^52
    const Wide shifted = x * 1.4426950408889634 + magic, n = shifted - magic;
    const Wide r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    Wide p = Wide{} + 1.0 / 6227020800.0;
#pragma GCC unroll 12
    for (int i = 12; i > 0; --i) p = p * r + INVERSE_FACTORIAL[i];
    p = p * r + 1.0;
    return (Wide)((Longs)p + (((Longs)shifted - (Longs)magic) << 52));
}

// Doubles to floats.
INLINE Vec narrow(Wide low, Wide high) {
    const Half a = __builtin_convertvector(low, Half), b = __builtin_convertvector(high, Half);
    Vec both;
    memcpy(&both, &a, sizeof a);
    memcpy((char *)&both + sizeof a, &b, sizeof b);
    return both;
}

// How the product of a tile meets what is there: C = AB, C = C + w AB (row by row) or C = fade C + AB.
enum class Into { set, add_weighted, fade };

// C [R, V vectors] from A [R, depth] with any strides and B [depth, ...] with rows of vectors.
template <int R, int V, Into into>
INLINE void tile(int64_t depth, const float *A, int64_t row, int64_t step, const float *B, int64_t ldb, float *C,
                 int64_t ldc, const float *weight, float fade) {
    Vec acc[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < V; ++c) acc[r][c] = Vec{};
    for (int64_t d = 0; d < depth; ++d) {
        Vec b[V];
#pragma GCC unroll 8
        for (int c = 0; c < V; ++c) b[c] = load(B + d * ldb + c * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vec a = all(A[r * row + d * step]);
#pragma GCC unroll 8
            for (int c = 0; c < V; ++c) acc[r][c] += a * b[c];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < V; ++c) {
            float *at = C + r * ldc + c * LANES;
            if (into == Into::set) store(at, acc[r][c]);
            if (into == Into::add_weighted) store(at, load(at) + acc[r][c] * weight[r]);
            if (into == Into::fade) store(at, load(at) * fade + acc[r][c]);
        }
}

template <int V, Into into>
INLINE void rows_of_tiles(int64_t rows, int64_t depth, const float *A, int64_t row, int64_t step, const float *B,
                          int64_t ldb, float *C, int64_t ldc, const float *weight, float fade) {
    int64_t tiles = (rows + ROWS - 1) / ROWS;
    for (int64_t r = 0; r < rows; --tiles) {  // tiles of nearly equal heights
        const int64_t height = (rows - r + tiles - 1) / tiles;
        const float *a = A + r * row, *w = weight + (into == Into::add_weighted ? r : 0);
        float *c = C + r * ldc;
        switch (height) {
#define CASE(R) \
    case R: tile<R, V, into>(depth, a, row, step, B, ldb, c, ldc, w, fade); break;
            CASE(1) CASE(2) CASE(3) CASE(4)
#if DLA_LEVEL > 0
            CASE(5) CASE(6)
#endif
#undef CASE
        }
        r += height;
    }
}

// C [rows, columns] from A [rows, depth] and B [depth, columns]; columns a multiple of LANES, C and B padded to it.
template <Into into>
void product(int64_t rows, int64_t columns, int64_t depth, const float *A, int64_t row, int64_t step, const float *B,
             int64_t ldb, float *C, int64_t ldc, const float *weight = nullptr, float fade = 0) {
    int64_t c = 0;
    for (; c + PANEL * LANES <= columns; c += PANEL * LANES)
        rows_of_tiles<PANEL, into>(rows, depth, A, row, step, B + c, ldb, C + c, ldc, weight, fade);
    switch ((columns - c) / LANES) {
        case 1: rows_of_tiles<1, into>(rows, depth, A, row, step, B + c, ldb, C + c, ldc, weight, fade); break;
#if DLA_LEVEL == 512
        case 2: rows_of_tiles<2, into>(rows, depth, A, row, step, B + c, ldb, C + c, ldc, weight, fade); break;
        case 3: rows_of_tiles<3, into>(rows, depth, A, row, step, B + c, ldb, C + c, ldc, weight, fade); break;
#endif
    }
}

INLINE int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

}  // namespace

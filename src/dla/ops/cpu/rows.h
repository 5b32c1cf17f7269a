// Rows of numbers as they lie in a state, float32 or bfloat16, of any length: the decoding step's few operations.
#pragma once
#include "simd.h"

namespace {

typedef uint16_t Shorts __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

INLINE Vec load_as(const float *x) { return load(x); }
INLINE Vec load_as(const uint16_t *x) { return (Vec)(__builtin_convertvector(*(const Shorts *)x, Bits) << 16); }
INLINE float number(float x) { return x; }
INLINE float number(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
INLINE void put(float *to, float x) { *to = x; }
INLINE void put(uint16_t *to, float x) {  // to the nearest, ties to even; NaN stays NaN
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *to = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
INLINE void store_as(float *to, Vec x) { store(to, x); }
INLINE void store_as(uint16_t *to, Vec x) {  // as `put`
    const Bits bits = (Bits)x, nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = (Bits)(x != x);
    *(Shorts *)to = __builtin_convertvector((nan & 0x7fc0) | (nearest & ~nan), Shorts);
}

// Floats as a row of a state.
template <class T> void put_row(T *to, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store_as(to + i, load(x + i));
    for (; i < n; ++i) put(to + i, x[i]);
}

// sum of a[i] b[i]
template <class T> float dot(const float *a, const T *b, int64_t n) {
    Vec total{};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) total += load(a + i) * load_as(b + i);
    float rest = sum(total);
    for (; i < n; ++i) rest += a[i] * number(b[i]);
    return rest;
}

// The sums of four vectors, side by side: fewer steps than four times `sum`.
typedef float Four __attribute__((vector_size(16)));
INLINE Four sums(Vec a, Vec b, Vec c, Vec d) {
    // within every four lanes: a0+a1 b0+b1 a2+a3 b2+b3, the same of c and d, and from both a b c d
#if DLA_LEVEL == 512
#define EVERY(i, j, k, l) \
    i, j, k, l, i + 4, j + 4, k + 4, l + 4, i + 8, j + 8, k + 8, l + 8, i + 12, j + 12, k + 12, l + 12
#elif DLA_LEVEL == 256
#define EVERY(i, j, k, l) i, j, k, l, i + 4, j + 4, k + 4, l + 4
#else
#define EVERY(i, j, k, l) i, j, k, l
#endif
#define PAIRS(x, y, first, second) __builtin_shufflevector(x, y, first) + __builtin_shufflevector(x, y, second)
    constexpr int L = LANES;
    const Vec ab = PAIRS(a, b, EVERY(0, L, 2, L + 2), EVERY(1, L + 1, 3, L + 3));
    const Vec cd = PAIRS(c, d, EVERY(0, L, 2, L + 2), EVERY(1, L + 1, 3, L + 3));
    const Vec x = PAIRS(ab, cd, EVERY(0, 1, L, L + 1), EVERY(2, 3, L + 2, L + 3));
#undef EVERY
#undef PAIRS
    Four part[LANES / 4], total{};
    memcpy(part, &x, sizeof x);
#pragma GCC unroll 4
    for (int i = 0; i < LANES / 4; ++i) total += part[i];
    return total;
}

// sums of a[i] row[i], of four rows
template <class T> INLINE Four four_dots(const float *a, const T *const row[4], int64_t n) {
    Vec total[4] = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) total[r] += load(a + i) * load_as(row[r] + i);
    Four made = sums(total[0], total[1], total[2], total[3]);
    for (; i < n; ++i) made += a[i] * Four{number(row[0][i]), number(row[1][i]), number(row[2][i]), number(row[3][i])};
    return made;
}

// y += s x
template <class T> void add_row(float *y, float s, const T *x, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(y + i, load(y + i) + load_as(x + i) * s);
    for (; i < n; ++i) y[i] += s * number(x[i]);
}

// y += s q^T M, M [dk][dv] with rows `stride` apart
template <class T>
void read_matrix(float *y, float s, const float *q, const T *M, int64_t dk, int64_t dv, int64_t stride) {
    int64_t j = 0;
    for (; j + 4 * LANES <= dv; j += 4 * LANES) {
        Vec even[4] = {}, odd[4] = {};
        int64_t d = 0;
        for (; d + 2 <= dk; d += 2) {
            const T *row = M + d * stride + j;
#pragma GCC unroll 4
            for (int c = 0; c < 4; ++c) {
                even[c] += load_as(row + c * LANES) * q[d];
                odd[c] += load_as(row + stride + c * LANES) * q[d + 1];
            }
        }
        for (; d < dk; ++d)
            for (int c = 0; c < 4; ++c) even[c] += load_as(M + d * stride + j + c * LANES) * q[d];
        for (int c = 0; c < 4; ++c) store(y + j + c * LANES, load(y + j + c * LANES) + (even[c] + odd[c]) * s);
    }
    for (; j + LANES <= dv; j += LANES) {
        Vec total{};
        for (int64_t d = 0; d < dk; ++d) total += load_as(M + d * stride + j) * q[d];
        store(y + j, load(y + j) + total * s);
    }
    for (; j < dv; ++j) {
        float total = 0;
        for (int64_t d = 0; d < dk; ++d) total += q[d] * number(M[d * stride + j]);
        y[j] += s * total;
    }
}

// A = a A + b B
template <class T> void add_matrices(T *A, float a, const T *B, float b, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store_as(A + i, load_as(A + i) * a + load_as(B + i) * b);
    for (; i < n; ++i) put(A + i, a * number(A[i]) + b * number(B[i]));
}

}  // namespace

// What stands between matrix products: SwiGLU's gate, softplus with a scale, Mamba-2's time step, functions of numbers.
#pragma once
#include "norms.h"

namespace {

void swiglu(const SwigluArgs &a, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += LANES) {
        const Vec x = load_some(a.a + i, last - i);
        store_some(a.y + i, x * sigmoid(x) * load_some(a.b + i, last - i), last - i);
    }
}

void swiglu_back(const SwigluArgs &a, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += LANES) {
        const int64_t n = last - i;
        const Vec x = load_some(a.a + i, n), s = sigmoid(x), dy = load_some(a.dy + i, n);
        store_some(a.da + i, dy * load_some(a.b + i, n) * (s * (1.0f + x * (1.0f - s))), n);
        store_some(a.db + i, dy * x * s, n);
    }
}

INLINE Vec softplus_input(const SoftplusArgs &a, Vec x, int64_t c, int64_t n) {
    if (a.scale) x *= load_some(a.scale + c, n);
    return a.bias ? x + load_some(a.bias + c, n) : x;
}

void softplus(const SoftplusArgs &a, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
        for (int64_t c = 0; c < a.size; c += LANES) {
            const int64_t n = a.size - c;
            const Vec x = softplus_input(a, load_some(a.x + row * a.x_row + c, n), c, n);
            store_some(a.y + row * a.size + c, softplus_from(x, exp_minus_abs(x)), n);
        }
}

void softplus_back(const SoftplusArgs &a, int64_t part) {
    const int64_t first = part_begin(a.rows, a.parts, part), last = part_begin(a.rows, a.parts, part + 1);
    for (int64_t c = 0; c < a.size; c += LANES) {
        const int64_t n = a.size - c;
        const Vec scale = a.scale ? load_some(a.scale + c, n) : all(1.0f);
        Vec dscale{}, dbias{};
        for (int64_t row = first; row < last; ++row) {
            const Vec x = load_some(a.x + row * a.x_row + c, n);
            const Vec dz = load_some(a.dy + row * a.dy_row + c, n) * sigmoid(softplus_input(a, x, c, n));
            dscale += dz * x;
            dbias += dz;
            store_some(a.dx + row * a.size + c, dz * scale, n);
        }
        if (a.dscale) store_some(a.dscale + part * a.size + c, dscale, n);
        if (a.dbias) store_some(a.dbias + part * a.size + c, dbias, n);
    }
}

void step(const StepArgs &a, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
        for (int64_t h = 0; h < a.heads; h += LANES) {
            const int64_t n = a.heads - h;
            const Vec z = load_some(a.dt + t * a.dt_row + h, n) + load_some(a.bias + h, n);
            const Vec made = softplus_from(z, exp_minus_abs(z));
            store_some(a.step + t * a.heads + h, made, n);
            store_some(a.g + t * a.heads + h, -made * load_some(a.decay + h, n), n);
            for (int64_t i = h; i < a.heads && i < h + LANES; ++i) {
                const float *x = a.x + t * a.x_row + i * a.dv;
                float *v = a.v + (t * a.heads + i) * a.dv;
                for (int64_t c = 0; c < a.dv; c += LANES) store_some(v + c, load_some(x + c, a.dv - c) * made[i - h], a.dv - c);
            }
        }
}

void step_back(const StepArgs &a, int64_t part) {
    const int64_t first = part_begin(a.tokens, a.parts, part), last = part_begin(a.tokens, a.parts, part + 1);
    float *d_bias = a.d_bias + part * a.heads, *d_decay = a.d_decay + part * a.heads;
    memset(d_bias, 0, a.heads * 4);
    memset(d_decay, 0, a.heads * 4);
    for (int64_t t = first; t < last; ++t)
        for (int64_t h = 0; h < a.heads; ++h) {
            const int64_t at = t * a.heads + h;
            const float made = a.step[at];
            const float *x = a.x + t * a.x_row + h * a.dv, *d_v = a.d_v + at * a.dv;
            float *dx = a.dx + at * a.dv;
            Vec along{};
            for (int64_t c = 0; c < a.dv; c += LANES) {
                const Vec d = load_some(d_v + c, a.dv - c);
                along += d * load_some(x + c, a.dv - c);
                store_some(dx + c, d * made, a.dv - c);
            }
            const float through = sum(along) - a.d_g[at] * a.decay[h];  // the gradient of the step itself
            const float dz = through * -expm1f(-made);  // softplus' slope, by its value
            a.d_dt[at] = dz;
            d_bias[h] += dz;
            d_decay[h] -= a.d_g[at] * made;
        }
}

INLINE Vec function_of(Function f, Vec x) {
    switch (f) {
        case Function::same: return x;
        case Function::sigmoid: return sigmoid(x);
        case Function::silu: return x * sigmoid(x);
        case Function::exp: break;
    }
    Vec y;
    for (int i = 0; i < LANES; ++i) y[i] = expf(x[i]);
    return y;
}

void map(const MapArgs &a) {
    for (int64_t row = 0; row < a.rows; ++row) {
        const float *x = a.x + row * a.x_row;
        float *y = a.y + row * a.size * a.each;
        for (int64_t c = 0; c < a.size; c += LANES) {
            const Vec made = (float)a.scale * function_of(a.function, load_some(x + c, a.size - c));
            if (a.each == 1) store_some(y + c, made, a.size - c);
            else
                for (int64_t i = c; i < a.size && i < c + LANES; ++i)
                    for (int64_t j = 0; j < a.each; ++j) y[i * a.each + j] = made[i - c];
        }
    }
}

}  // namespace

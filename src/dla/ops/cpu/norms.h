// Root-mean-square norms with a gate before or behind them and a skip connection, row by row.
#pragma once
#include <stdlib.h>

#include "activations.h"
#include "layer_args.h"

namespace {

#define MEMBER inline __attribute__((always_inline))

// A group of channels of a row: where they lie, and what of the norm they make.
struct NormGroup {
    const NormArgs &a;
    int64_t row, channel, width;  // channel: its first

    MEMBER Vec of(const float *x, int64_t stride, int64_t c, int64_t n) const {
        return load_some(x + row * stride + channel + c, n);
    }
    MEMBER Vec channels(const float *x, int64_t c, int64_t n) const { return load_some(x + channel + c, n); }
    MEMBER Vec gate(int64_t c, int64_t n) const { return of(a.gate, a.gate_row, c, n); }

    // What goes in: x, with its skip connection.
    MEMBER Vec input(int64_t c, int64_t n) const {
        Vec x = of(a.x, a.x_row, c, n);
        if (a.skip) x += of(a.skip, a.skip_row, c, n) * channels(a.skip_weight, c, n);
        return x;
    }
};

void norm_group(const NormArgs &a, int64_t row, int64_t group) {
    const int64_t width = a.size / a.groups;
    const NormGroup at{a, row, group * width, width};
    float *y = a.y + row * a.size + at.channel;
    Vec squares{};
    for (int64_t c = 0; c < width; c += LANES) {
        const int64_t n = width - c;
        Vec x = at.input(c, n);
        if (a.gated == Gate::before) {
            const Vec gate = at.gate(c, n);
            x *= gate * sigmoid(gate);
        }
        squares += x * x;
        store_some(y + c, x, n);
    }
    const float inverse = 1.0f / sqrtf(sum(squares) / width + (float)a.eps);
    a.inverse[row * a.groups + group] = inverse;
    for (int64_t c = 0; c < width; c += LANES) {
        const int64_t n = width - c;
        Vec x = load_some(y + c, n) * inverse * at.channels(a.weight, c, n);
        if (a.gated == Gate::after) {
            const Vec gate = at.gate(c, n);
            x *= gate * sigmoid(gate);
        }
        store_some(y + c, x, n);
    }
}

void norm(const NormArgs &a, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
        for (int64_t group = 0; group < a.groups; ++group) norm_group(a, row, group);
}

// normal, dnormal [width]: room for what is normalised, over its rms, and its gradient.
void norm_group_back(const NormArgs &a, int64_t row, int64_t group, float *dweight, float *dskip_weight, float *normal,
                     float *dnormal) {
    const int64_t width = a.size / a.groups;
    const NormGroup at{a, row, group * width, width};
    const float inverse = a.inverse[row * a.groups + group];
    const int64_t out = row * a.size + at.channel;
    Vec along{};
    for (int64_t c = 0; c < width; c += LANES) {
        const int64_t n = width - c;
        Vec x = at.input(c, n) * inverse, dy = at.of(a.dy, a.dy_row, c, n);
        const Vec weight = at.channels(a.weight, c, n);
        if (a.gated != Gate::none) {
            const Vec gate = at.gate(c, n), s = sigmoid(gate), silu = gate * s;
            if (a.gated == Gate::before) x *= silu;
            else {
                store_some(a.dgate + out + c, dy * x * weight * (s * (1.0f + gate * (1.0f - s))), n);
                dy *= silu;
            }
        }
        store_some(dweight + at.channel + c, load_some(dweight + at.channel + c, n) + dy * x, n);
        dy *= weight;
        along += dy * x;
        store_some(normal + c, x, n);
        store_some(dnormal + c, dy, n);
    }
    const float mean = sum(along) / width;
    for (int64_t c = 0; c < width; c += LANES) {
        const int64_t n = width - c;
        Vec dx = (load_some(dnormal + c, n) - load_some(normal + c, n) * mean) * inverse;
        if (a.gated == Gate::before) {
            const Vec gate = at.gate(c, n), s = sigmoid(gate);
            store_some(a.dgate + out + c, dx * at.input(c, n) * (s * (1.0f + gate * (1.0f - s))), n);
            dx *= gate * s;
        }
        store_some(a.dx + out + c, dx, n);
        if (a.skip) {
            store_some(a.dskip + out + c, dx * at.channels(a.skip_weight, c, n), n);
            float *to = dskip_weight + at.channel + c;
            store_some(to, load_some(to, n) + dx * at.of(a.skip, a.skip_row, c, n), n);
        }
    }
}

INLINE int64_t part_begin(int64_t rows, int64_t parts, int64_t part) { return rows * part / parts; }

bool norm_back(const NormArgs &a, int64_t part) {
    float *room = (float *)malloc(2 * padded(a.size / a.groups) * 4);
    if (!room) return false;
    float *dweight = a.dweight + part * a.size, *dskip_weight = a.skip ? a.dskip_weight + part * a.size : nullptr;
    memset(dweight, 0, a.size * 4);
    if (a.skip) memset(dskip_weight, 0, a.size * 4);
    for (int64_t row = part_begin(a.rows, a.parts, part); row < part_begin(a.rows, a.parts, part + 1); ++row)
        for (int64_t group = 0; group < a.groups; ++group)
            norm_group_back(a, row, group, dweight, dskip_weight, room, room + padded(a.size / a.groups));
    free(room);
    return true;
}

}  // namespace

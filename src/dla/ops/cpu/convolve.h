// The short causal convolution with its SiLU, a vector of channels at a time.
#pragma once
#include "activations.h"
#include "layer_args.h"

namespace {

constexpr int LONGEST = 4;      // windows; longer ones are left to torch
constexpr int64_t RUN = 64;     // tokens whose sums are added up before they join the others

template <int size> struct Window {
    Vec w[size], bias;

    template <class Args> INLINE Window at(const Args &a, int64_t channel, int64_t n) {
        Window made;
        for (int j = 0; j < size; ++j) {
            made.w[j] = Vec{};
            for (int64_t i = 0; i < n; ++i) made.w[j][i] = a.weight[(channel + i) * size + j];
        }
        made.bias = a.bias ? load_some(a.bias + channel, n) : Vec{};
        return made;
    }
};

template <int size> void conv_tokens(const ConvArgs &a, int64_t offset, int64_t begin, int64_t end) {
    for (int64_t channel = 0; channel < a.channels; channel += LANES) {
        const int64_t n = a.channels - channel;
        const auto window = Window<size>::at(a, channel, n < LANES ? n : LANES);
        const float *x = a.x + offset * a.x_row + channel;
        float *y = a.y + offset * a.channels + channel;
        Vec seen[size];  // the tokens of the window, oldest first
        for (int j = 0; j < size - 1; ++j) {
            const int64_t t = begin - (size - 1) + j;
            seen[j + 1] = t < 0 ? Vec{} : load_some(x + t * a.x_row, n);
        }
        for (int64_t t = begin; t < end; ++t) {
            for (int j = 0; j < size - 1; ++j) seen[j] = seen[j + 1];
            seen[size - 1] = load_some(x + t * a.x_row, n);
            Vec z = window.bias;
            for (int j = 0; j < size; ++j) z += seen[j] * window.w[j];
            store_some(y + t * a.channels, z * sigmoid(z), n);
        }
    }
}

// From the last token to the first: z anew, its gradient into the tokens of its window, and into weight and bias.
template <int size> void conv_sequence_back(const ConvArgs &a, const Window<size> &window, int64_t offset, int64_t length,
                                            int64_t channel, Vec *dw, Vec &db) {
    const int64_t n = a.channels - channel;
    const float *x = a.x + offset * a.x_row + channel, *dy = a.dy + offset * a.dy_row + channel;
    float *dx = a.dx + offset * a.channels + channel;
    Vec seen[size], ahead[size];  // inputs t - size + 1 ... t, and the gradients of z at t ... t + size - 1
    for (int j = 0; j < size; ++j) {
        const int64_t t = length - size + j;  // one before those of the last token: the loop moves on first
        seen[j] = t < 0 ? Vec{} : load_some(x + t * a.x_row, n);
        ahead[j] = Vec{};
    }
    for (int64_t end = length; end > 0; end -= RUN) {
        Vec run_w[size], run_b{};
        for (int j = 0; j < size; ++j) run_w[j] = Vec{};
        for (int64_t t = end - 1; t >= 0 && t >= end - RUN; --t) {
            Vec z = window.bias;
            for (int j = 0; j < size; ++j) z += seen[j] * window.w[j];
            const Vec s = sigmoid(z), dz = load_some(dy + t * a.dy_row, n) * (s * (1.0f + z * (1.0f - s)));
            for (int j = size - 1; j > 0; --j) ahead[j] = ahead[j - 1];
            ahead[0] = dz;
            Vec sum{};
            for (int j = 0; j < size; ++j) {
                sum += ahead[j] * window.w[size - 1 - j];
                run_w[j] += dz * seen[j];
            }
            run_b += dz;
            store_some(dx + t * a.channels, sum, n);
            for (int j = size - 1; j > 0; --j) seen[j] = seen[j - 1];
            seen[0] = t < size ? Vec{} : load_some(x + (t - size) * a.x_row, n);
        }
        for (int j = 0; j < size; ++j) dw[j] += run_w[j];
        db += run_b;
    }
}

template <int size> void conv_channels_back(const ConvArgs &a, int64_t channel) {
    const int64_t n = a.channels - channel < LANES ? a.channels - channel : LANES;
    const auto window = Window<size>::at(a, channel, n);
    Vec dw[size], db{};
    for (int j = 0; j < size; ++j) dw[j] = Vec{};
    for (int64_t i = 0, offset = 0; i < a.sequences; ++i) {
        const int64_t length = a.length ? a.length[i] : a.tokens / a.sequences;
        Vec own[size], own_b{};
        for (int j = 0; j < size; ++j) own[j] = Vec{};
        conv_sequence_back<size>(a, window, offset, length, channel, own, own_b);
        for (int j = 0; j < size; ++j) dw[j] += own[j];
        db += own_b;
        offset += length;
    }
    for (int64_t i = 0; i < n; ++i)
        for (int j = 0; j < size; ++j) a.dweight[(channel + i) * size + j] = dw[j][i];
    if (a.dbias) store_some(a.dbias + channel, db, n);
}

template <int size> void conv_next(const NextArgs &a) {
    for (int64_t channel = 0; channel < a.channels; channel += LANES) {
        const int64_t n = a.channels - channel;
        const auto window = Window<size>::at(a, channel, n < LANES ? n : LANES);
        for (int64_t i = 0; i < a.sequences; ++i) {
            float *tail = a.tail + i * a.tail_sequence + channel;
            Vec seen = load_some(tail, n), z = window.bias + seen * window.w[0];
            for (int j = 1; j < size; ++j) {
                seen = load_some(j < size - 1 ? tail + j * a.tail_row : a.x + i * a.x_row + channel, n);
                z += seen * window.w[j];
                store_some(tail + (j - 1) * a.tail_row, seen, n);
            }
            store_some(a.y + i * a.channels + channel, z * sigmoid(z), n);
        }
    }
}

void conv(const ConvArgs &a, int64_t offset, int64_t begin, int64_t end) {
    switch (a.size) {
        case 2: return conv_tokens<2>(a, offset, begin, end);
        case 3: return conv_tokens<3>(a, offset, begin, end);
        case LONGEST: return conv_tokens<LONGEST>(a, offset, begin, end);
    }
}

void next(const NextArgs &a) {
    switch (a.size) {
        case 2: return conv_next<2>(a);
        case 3: return conv_next<3>(a);
        case LONGEST: return conv_next<LONGEST>(a);
    }
}

void conv_back(const ConvArgs &a, int64_t channel) {
    switch (a.size) {
        case 2: return conv_channels_back<2>(a, channel);
        case 3: return conv_channels_back<3>(a, channel);
        case LONGEST: return conv_channels_back<LONGEST>(a, channel);
    }
}

}  // namespace

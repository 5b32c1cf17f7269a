// What the walks of backward.h write down on their way forward, and follow on their way back.
#pragma once
#include "attend.h"

namespace {

// A list that grows, in an arena.
template <class T> struct List {
    T *items = nullptr;
    int64_t count = 0, room = 0;

    T *add(int64_t many, Arena &arena) {  // room for some more, null without memory
        if (count + many > room) {
            const int64_t more = 2 * room > count + many ? 2 * room : count + many + 64;
            T *larger = (T *)arena.bytes(more * sizeof(T));
            if (!larger) return nullptr;
            if (count) memcpy((void *)larger, items, count * sizeof(T));
            items = larger, room = more;
        }
        count += many;
        return items + count - many;
    }
};

struct Event {
    enum { read, fold, combine, drop, move, take, move_rows, read_rows } kind;  // the last four: delta_backward.h
    float *matrix, *other;
    float a, b;        // fold: what the matrix was multiplied by; combine: both factors
    int64_t at, many;  // read: its weights; fold: its rows
    int64_t tape, coefficients;  // of rows, in delta_backward.h
};

}  // namespace

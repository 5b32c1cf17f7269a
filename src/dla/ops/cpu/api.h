// What the files of the C interface share.
#pragma once
#include "args.h"

struct Named {
    const char *name;
    const Level *level;
};

Named &chosen_level();  // the instruction set that is used

enum Wrong : int64_t { fine, unknown_rule, sizes, tensors, sequences, states, no_memory };

inline bool in_range(int64_t x, int64_t low, int64_t high) { return x >= low && x <= high; }

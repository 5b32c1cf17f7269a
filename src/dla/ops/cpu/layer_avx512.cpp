#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("arch=x86-64-v4"))), apply_to = function)
#else
#pragma GCC target("arch=x86-64-v4")
#endif
#define DLA_LEVEL 512
#define DLA_TABLE dla_layers_avx512
#include "layer_level.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

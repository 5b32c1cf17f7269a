// The layers' kernels of one instruction set, as a table. Included by the files layer_*.cpp, which choose it.
#include "convolve.h"
#include "entropy.h"
#include "few_rows.h"
#include "gates.h"
#include "matmul.h"
#include "norms.h"

extern const LayerLevel DLA_TABLE;
const LayerLevel DLA_TABLE = {matmul,      conv,     conv_back,     norm, norm_back, swiglu,
                              swiglu_back, softplus, softplus_back, step, step_back, entropy,
                              linear,      next,     map,           LANES, ROWS};

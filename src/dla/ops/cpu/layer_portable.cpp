#define DLA_LEVEL 0
#define DLA_TABLE dla_layers_portable
#include "layer_level.h"

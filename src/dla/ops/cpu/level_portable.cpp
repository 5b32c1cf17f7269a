#define DLA_LEVEL 0
#define DLA_TABLE dla_level_portable
#include "level.h"

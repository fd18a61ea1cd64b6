#include "p2pkv/disk/store.h"

/* How a panel of rows is cut into register tiles, and the switch to the tile compiled for a size. */
#ifndef GENBATCH_TILES_H
#define GENBATCH_TILES_H

#include "simd.h"

/* Rows of the tile that starts at `row`: as few tiles as possible, and of equal size, since a tile of
 * 11 and one of 1 would read the weights twice for little. */
static inline int tile_rows(int count, int row)
{
    int tiles_left = (count - row + MAX_ROWS - 1) / MAX_ROWS;
    return (count - row + tiles_left - 1) / tiles_left;
}

#if MAX_ROWS == 12
#define FOR_ROWS(size, CALL)                                                                                   \
    switch (size) {                                                                                            \
    case 1: CALL(1); break;                                                                                    \
    case 2: CALL(2); break;                                                                                    \
    case 3: CALL(3); break;                                                                                    \
    case 4: CALL(4); break;                                                                                    \
    case 5: CALL(5); break;                                                                                    \
    case 6: CALL(6); break;                                                                                    \
    case 7: CALL(7); break;                                                                                    \
    case 8: CALL(8); break;                                                                                    \
    case 9: CALL(9); break;                                                                                    \
    case 10: CALL(10); break;                                                                                  \
    case 11: CALL(11); break;                                                                                  \
    default: CALL(12); break;                                                                                  \
    }
#else
#define FOR_ROWS(size, CALL)                                                                                   \
    switch (size) {                                                                                            \
    case 1: CALL(1); break;                                                                                    \
    case 2: CALL(2); break;                                                                                    \
    case 3: CALL(3); break;                                                                                    \
    case 4: CALL(4); break;                                                                                    \
    case 5: CALL(5); break;                                                                                    \
    default: CALL(6); break;                                                                                   \
    }
#endif

#endif

/* Cuts rows into register tiles, and selects the code that is compiled for a tile's size.
 *
 * A tile of R rows is stored in the order of its multiplication: [k / unit][R][unit]. A unit is broadcast at once: a float, a
 * pair of bfloat16, or four bytes. So one pointer serves all rows. */
#ifndef GENBATCH_TILES_H
#define GENBATCH_TILES_H

#include "simd.h"

/* A tile's first row and its number of rows. There are as few tiles as possible, of equal size (the first tiles may have one
 * row more), because tiles of 12 rows and 1 row would read the weights twice for little. */
typedef struct {
    int64_t start;
    int size;
} tile_place;

static inline int64_t tiles_for(int64_t count) { return (count + MAX_ROWS - 1) / MAX_ROWS; }

static inline tile_place tile_at(int64_t count, int64_t tile)
{
    int64_t tiles = tiles_for(count), size = count / tiles, larger = count % tiles;
    if (tile < larger) return (tile_place){tile * (size + 1), (int)size + 1};
    return (tile_place){tile * size + larger, (int)size};
}

static inline tile_place tile_with(int64_t count, int64_t row)
{
    int64_t tiles = tiles_for(count), size = count / tiles, larger = count % tiles;
    int64_t in_larger = larger * (size + 1);
    return tile_at(count, row < in_larger ? row / (size + 1) : larger + (row - in_larger) / size);
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

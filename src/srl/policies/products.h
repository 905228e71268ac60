/* Products whose rows are put together from pieces (products.c): a window of a convolution is some rows of what the layer
 * below made. Pieces are read where they are. */
#include <stdint.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST
#endif
#define INLINE static inline __attribute__((always_inline))
#define PANEL 64 /* columns */
#define HALF 32

/* Numbers that the processor's vectors hold: 16 with AVX-512, 8 with AVX2, else 4. */
int products_lanes(void);

/* Use no wider ones than these, for tests. */
void products_limit(int64_t lanes);

/* A product of rows that consist of `pieces` pieces of `size` numbers. That of row r begins at from + places[r * all] * unit,
 * and so on. B has rows of `panel` columns, `to` rows of `across`. */
typedef struct {
    const float *from;
    const void *B;       /* floats, or, if there are scales, 16 bits in those units */
    const float *bias;   /* none: it is added to what is there */
    const float *scales; /* of the columns; applied where it ends */
    const uint32_t *places;
    int64_t pieces, size, all, unit, panel, across;
    float *to;
    int ends; /* with scales and a ReLU */
} Product;

/* So many rows and columns of it; turned: a piece's numbers are a panel apart. A sum is made in the same order however many
 * rows there are. */
void products_multiply(const Product *x, int64_t rows, int64_t columns, int turned);

/* A layer's weights, packed in panels of columns. */
typedef struct {
    int64_t pieces, size, outputs; /* a row's pieces, numbers of each, and what comes out: a multiple of 32 */
    void *packed;
    const float *bias;
    float *scales; /* of the outputs, where weights are packed in 16 bits; else none */
} Layer;

/* How many columns a panel of this layer has. */
int64_t products_panel(const Layer *layer);

/* to [rows][outputs] = what a layer and a ReLU make of rows whose pieces are at `places` [rows][pieces] of `from`. */
void products_through(const Layer *layer, const float *from, const uint32_t *places, int64_t rows, float *to);

/* to [count][rows] from [rows][across], sixteen by sixteen. */
void products_turn(const float *from, int64_t rows, int64_t across, float *to, int64_t count);

#define LANES 4
#include "tiles.h"
#define LANES 8
#include "tiles.h"
#define LANES 16
#include "tiles.h"

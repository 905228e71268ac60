/* Products of windows, see products.h. */
#include "products.h"

#include <string.h>

#define NEAR 128 /* rows of a panel that stay in the nearest cache */
#define FAR 131072 /* weights from which on they come from far away: a dozen rows go past them at once */

/* rows x (16 * vectors) of a product; a piece's numbers are `apart` from each other. coarse: B has scales. */
INLINE void tile(const int rows, const int vectors, const int64_t apart, const int coarse, const Product *x, int64_t row,
                 int64_t column) {
    const uint32_t *places = x->places + row * x->all;
    const char *B = (const char *)x->B + column * (coarse ? 2 : 4);
    float *to = x->to + row * x->across + column;
    v16 sum[12][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = *(const v16 *)((x->bias ? x->bias + column : to + r * x->across) + 16 * v);
    for (int64_t piece = 0; piece < x->pieces; piece++) {
        const float *at[12];
        for (int r = 0; r < rows; r++) at[r] = x->from + places[r * x->all + piece] * x->unit;
        for (int64_t k = 0; k < x->size; k++, B += x->panel * (coarse ? 2 : 4)) {
            v16 b[4];
            for (int v = 0; v < vectors; v++)
                b[v] = coarse ? __builtin_convertvector(((const v16s *)B)[v], v16) : ((const v16 *)B)[v];
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < vectors; v++) sum[r][v] += at[r][k * apart] * b[v];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            v16 y = sum[r][v];
            if (coarse && x->ends) y *= *(const v16 *)(x->scales + column + 16 * v);
            *(v16 *)(to + r * x->across + 16 * v) = x->ends ? (v16)((v16i)y & (y > (v16){0})) : y;
        }
}

INLINE void tiles(const int tall, const int vectors, const int64_t apart, const int coarse, const Product *x, int64_t rows,
                  int64_t columns) {
    for (int64_t column = 0; column < columns; column += 16 * vectors) {
        int64_t r = 0;
        for (; r + tall <= rows; r += tall) tile(tall, vectors, apart, coarse, x, r, column);
        if (tall > 8 && r + 8 <= rows) tile(8, vectors, apart, coarse, x, r, column), r += 8;
        if (tall > 4 && r + 4 <= rows) tile(4, vectors, apart, coarse, x, r, column), r += 4;
        for (; r + 2 <= rows; r += 2) tile(2, vectors, apart, coarse, x, r, column);
        if (r < rows) tile(1, vectors, apart, coarse, x, r, column);
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("arch=x86-64-v4"))) static void wide(const Product *x, int64_t rows, int64_t columns, int turned) {
    if (turned) tiles(6, 4, PANEL, 0, x, rows, columns);
    else if (x->scales) tiles(12, 2, 1, 1, x, rows, columns);
    else if (columns % PANEL) tiles(12, 2, 1, 0, x, rows, columns);
    else tiles(6, 4, 1, 0, x, rows, columns);
}

__attribute__((target("arch=x86-64-v3"))) static void narrow(const Product *x, int64_t rows, int64_t columns,
                                                             int turned) {
    if (turned) tiles(6, 1, PANEL, 0, x, rows, columns);
    else if (x->scales) tiles(6, 1, 1, 1, x, rows, columns);
    else tiles(6, 1, 1, 0, x, rows, columns);
}
#endif

void products_multiply(const Product *x, int64_t rows, int64_t columns, int turned) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("x86-64-v4")) wide(x, rows, columns, turned);
    else if (__builtin_cpu_supports("x86-64-v3")) narrow(x, rows, columns, turned);
    else
#endif
        if (turned) tiles(2, 1, PANEL, 0, x, rows, columns);
    else if (x->scales) tiles(2, 1, 1, 1, x, rows, columns);
    else tiles(2, 1, 1, 0, x, rows, columns);
}

int64_t products_panel(const Layer *layer) {
    return layer->outputs % PANEL || layer->pieces * layer->size * layer->outputs > FAR ? HALF : PANEL;
}

void products_through(const Layer *layer, const float *from, const uint32_t *places, int64_t rows, float *to) {
    const int64_t step = layer->size < NEAR ? NEAR / layer->size : 1, panel = products_panel(layer);
    const int64_t bytes = layer->scales ? 2 : 4;
    Product x = {.from = from, .size = layer->size, .all = layer->pieces, .unit = layer->size, .panel = panel};
    x.across = layer->outputs;
    for (int64_t column = 0; column < layer->outputs; column += panel)
        for (int64_t begin = 0; begin < layer->pieces; begin += step) {
            x.pieces = layer->pieces - begin < step ? layer->pieces - begin : step;
            x.ends = begin + x.pieces == layer->pieces;
            x.B = (const char *)layer->packed + (column * layer->pieces + begin * panel) * layer->size * bytes;
            x.scales = layer->scales ? layer->scales + column : 0;
            x.bias = begin ? 0 : layer->bias + column;
            x.places = places + begin, x.to = to + column;
            products_multiply(&x, rows, panel, 0);
        }
}

FAST void products_turn(const float *from, int64_t rows, int64_t across, float *to, int64_t count) {
    for (int64_t c = 0; c < rows; c += 16)
        for (int64_t n = 0; n < count; n += 16) {
            float block[16][16];
            for (int i = 0; i < 16; i++) memcpy(block[i], from + (c + i) * across + n, sizeof block[i]);
            for (int j = 0; j < 16; j++)
                for (int i = 0; i < 16; i++) to[(n + j) * rows + c + i] = block[i][j];
        }
}


/* Products of windows, see products.h. */
#include "products.h"

#include <string.h>

#define NEAR 128 /* rows of a panel that stay in the nearest cache */
#define FAR 131072 /* weights from which on they come from far away: a dozen rows go past them at once */

static int64_t most_lanes = 16;

void products_limit(int64_t lanes) { most_lanes = lanes; }

int products_lanes(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (most_lanes >= 16 && __builtin_cpu_supports("x86-64-v4")) return 16;
    if (most_lanes >= 8 && __builtin_cpu_supports("x86-64-v3")) return 8;
#endif
    return 4;
}

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("arch=x86-64-v4"))) static void wide(const Product *x, int64_t rows, int64_t columns, int turned) {
    if (turned) tiles16(6, 4, PANEL, 0, x, rows, columns);
    else if (x->scales) tiles16(12, 2, 1, 1, x, rows, columns);
    else if (columns % PANEL) tiles16(12, 2, 1, 0, x, rows, columns);
    else tiles16(6, 4, 1, 0, x, rows, columns);
}

__attribute__((target("arch=x86-64-v3"))) static void narrow(const Product *x, int64_t rows, int64_t columns,
                                                             int turned) {
    if (turned) tiles8(6, 2, PANEL, 0, x, rows, columns);
    else if (x->scales) tiles8(6, 2, 1, 1, x, rows, columns);
    else tiles8(6, 2, 1, 0, x, rows, columns);
}
#endif

void products_multiply(const Product *x, int64_t rows, int64_t columns, int turned) {
    const int lanes = products_lanes();
#if defined(__x86_64__) && defined(__GNUC__)
    if (lanes == 16) wide(x, rows, columns, turned);
    else if (lanes == 8) narrow(x, rows, columns, turned);
    else
#endif
        if (turned) tiles4(2, 4, PANEL, 0, x, rows, columns);
    else if (x->scales) tiles4(2, 4, 1, 1, x, rows, columns);
    else tiles4(2, 4, 1, 0, x, rows, columns);
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


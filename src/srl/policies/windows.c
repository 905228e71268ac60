/* Layers of windows, and the dense layer after them, in training (images.py). */
#include "products.h"

#include <stdlib.h>
#include <string.h>

/* ---- a layer of windows, in training ----
 *
 * A window is `pieces` rows of what the layer below made, by number; weights are [outputs][pieces * size]. */

/* out [count][outputs] = windows through the layer and a ReLU. */
int windows_forward(const float *from, const uint32_t *numbers, int64_t count, int64_t pieces, int64_t size,
                    int64_t outputs, const float *weight, const float *bias, float *out) {
    float *turned = malloc((size_t)(pieces * size * outputs) * sizeof *turned);
    if (!turned) return 0;
    products_turn(weight, outputs, pieces * size, turned, pieces * size);
    const Layer layer = {pieces, size, outputs, turned, bias};
    products_through(&layer, from, numbers, count, out);
    free(turned);
    return 1;
}

/* to [rows][16 * vectors of outputs] += numbers of a piece of `count` windows, each times the window's gradient. */
INLINE void collect(const int rows, const int vectors, const float *from, const uint32_t *numbers, int64_t pieces,
                    int64_t size, int64_t count, const float *gradient, int64_t outputs, float *to) {
    v16 sum[12][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = *(const v16 *)(to + r * outputs + 16 * v);
    for (int64_t i = 0; i < count; i++, gradient += outputs) {
        const float *at = from + numbers[i * pieces] * size;
        v16 b[4];
        for (int v = 0; v < vectors; v++) b[v] = *(const v16 *)(gradient + 16 * v);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sum[r][v] += at[r] * b[v];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) *(v16 *)(to + r * outputs + 16 * v) = sum[r][v];
}

/* The same for all pieces and outputs: to [pieces * size][outputs]. */
INLINE void collects(const int rows, const int vectors, const float *from, const uint32_t *numbers, int64_t pieces,
                     int64_t size, int64_t count, const float *gradient, int64_t outputs, float *to) {
    for (int64_t piece = 0; piece < pieces; piece++, numbers++, to += size * outputs)
        for (int64_t column = 0; column < outputs; column += 16 * vectors) {
            int64_t c = 0;
            for (; c + rows <= size; c += rows)
                collect(rows, vectors, from + c, numbers, pieces, size, count, gradient + column, outputs,
                        to + c * outputs + column);
            for (; c < size; c += 2)
                collect(2, vectors, from + c, numbers, pieces, size, count, gradient + column, outputs,
                        to + c * outputs + column);
        }
}

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("arch=x86-64-v4"))) static void collect_wide(const float *from, const uint32_t *numbers,
                                                                   int64_t pieces, int64_t size, int64_t count,
                                                                   const float *gradient, int64_t outputs, float *to) {
    if (outputs % PANEL) collects(12, 2, from, numbers, pieces, size, count, gradient, outputs, to);
    else collects(6, 4, from, numbers, pieces, size, count, gradient, outputs, to);
}

__attribute__((target("arch=x86-64-v3"))) static void collect_narrow(const float *from, const uint32_t *numbers,
                                                                     int64_t pieces, int64_t size, int64_t count,
                                                                     const float *gradient, int64_t outputs, float *to) {
    collects(6, 1, from, numbers, pieces, size, count, gradient, outputs, to);
}
#endif

static void windows_collect(const float *from, const uint32_t *numbers, int64_t pieces, int64_t size, int64_t count,
                            const float *gradient, int64_t outputs, float *to) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("x86-64-v4")) collect_wide(from, numbers, pieces, size, count, gradient, outputs, to);
    else if (__builtin_cpu_supports("x86-64-v3"))
        collect_narrow(from, numbers, pieces, size, count, gradient, outputs, to);
    else
#endif
        collects(2, 1, from, numbers, pieces, size, count, gradient, outputs, to);
}

/* to [..][size] += from [count][PANEL], of which a row is as many pieces as it has room for. */
FAST void windows_scatter(const float *restrict from, const uint32_t *numbers, int64_t pieces, int64_t size,
                          int64_t count, float *restrict to) {
    for (int64_t i = 0; i < count; i++, numbers += pieces)
        for (int64_t piece = 0; piece < PANEL / size; piece++, from += size) {
            float *at = to + numbers[piece] * size;
            for (int64_t k = 0; k < size; k++) at[k] += from[k];
        }
}

/* gradient [count][outputs] to that of the weights [pieces * size][outputs], and, unless NULL, of what windows are made of;
 * both are added to what is there. */
int windows_backward(const float *from, const uint32_t *numbers, int64_t count, int64_t pieces, int64_t size,
                     int64_t outputs, const float *weight, const float *gradient, float *to_weight, float *to_from) {
    enum { SOME = 384, FEW = 96 }; /* windows whose gradients, and whose pieces' gradients, stay near */
    static const float none[PANEL];
    const int64_t inner = pieces * size;
    float *near = malloc((PANEL * (size_t)outputs + FEW * PANEL) * sizeof *near), *back = near + PANEL * outputs;
    uint32_t each[FEW];
    if (!near) return 0;
    for (uint32_t i = 0; i < FEW; i++) each[i] = i;
    for (int64_t i = 0; i < count; i += SOME)
        windows_collect(from, numbers + i * pieces, pieces, size, count - i < SOME ? count - i : SOME,
                        gradient + i * outputs, outputs, to_weight);
    Product x = {.B = near, .bias = none, .places = each, .pieces = 1, .size = outputs, .all = 1, .unit = outputs};
    x.panel = x.across = PANEL, x.to = back;
    for (int64_t column = 0; to_from && column < inner; column += PANEL) {
        for (int64_t n = 0; n < outputs; n++) memcpy(near + n * PANEL, weight + n * inner + column, PANEL * sizeof *near);
        for (int64_t i = 0; i < count; i += FEW) {
            const int64_t rows = count - i < FEW ? count - i : FEW;
            x.from = gradient + i * outputs;
            products_multiply(&x, rows, PANEL, 0);
            windows_scatter(back, numbers + i * pieces + column / size, pieces, size, rows, to_from);
        }
    }
    free(near);
    return 1;
}

/* ---- the dense layer, in training ----
 *
 * An image's features are what PLACES pieces of PANEL numbers make. At each place few pieces of a minibatch are different;
 * each of them is multiplied once with the weights of its place, and the products are added up; backwards the gradients of
 * images that show the same there are added up first. Weights are [places][PANEL][outputs]. */

/* which [places][images]: for each place the different numbers there, and which of them an image has. `different` are they,
 * one place after the other, from starts[place] on; first is zero and of the size of all numbers. */
FAST void dense_sort(const uint32_t *numbers, int64_t images, int64_t places, uint32_t *seen, uint32_t *which,
                     uint32_t *different, int64_t *starts) {
    int64_t count = 0;
    for (int64_t place = 0; place < places; place++) {
        const int64_t begin = starts[place] = count;
        for (int64_t image = 0; image < images; image++) {
            const uint32_t number = numbers[image * places + place], old = seen[number];
            if (old > begin) { /* since this place began */
                which[place * images + image] = old - 1 - begin;
                continue;
            }
            different[count] = number;
            which[place * images + image] = count - begin;
            seen[number] = ++count;
        }
    }
    starts[places] = count;
}

/* to [images][PANEL] += the rows of from [..][PANEL] that they have. */
FAST void dense_add(const float *restrict from, const uint32_t *which, int64_t images, float *restrict to) {
    for (int64_t image = 0; image < images; image++)
        for (int64_t c = 0; c < PANEL; c++) to[image * PANEL + c] += from[which[image] * PANEL + c];
}

/* Backwards. */
FAST void dense_gather(const float *restrict from, const uint32_t *which, int64_t images, float *restrict to) {
    for (int64_t image = 0; image < images; image++)
        for (int64_t c = 0; c < PANEL; c++) to[which[image] * PANEL + c] += from[image * PANEL + c];
}

/* out [images][outputs] from pieces [..][PANEL]. */
int dense_forward(const float *pieces, const uint32_t *which, const uint32_t *different, const int64_t *starts,
                  int64_t images, int64_t places, int64_t outputs, const float *weight, const float *bias, float *out) {
    static const float none[PANEL];
    float *near = malloc((size_t)(PANEL + 2 * images) * PANEL * sizeof *near);
    if (!near) return 0;
    float *made = near + PANEL * PANEL, *sums = made + images * PANEL;
    Product x = {.from = pieces, .B = near, .bias = none, .pieces = 1, .size = PANEL, .all = 1, .unit = PANEL};
    x.panel = x.across = PANEL, x.to = made;
    for (int64_t column = 0; column < outputs; column += PANEL) {
        for (int64_t image = 0; image < images; image++) memcpy(sums + image * PANEL, bias + column, PANEL * sizeof *sums);
        for (int64_t place = 0; place < places; place++) {
            const float *from = weight + place * PANEL * outputs + column;
            for (int64_t k = 0; k < PANEL; k++) memcpy(near + k * PANEL, from + k * outputs, PANEL * sizeof *near);
            x.places = different + starts[place];
            products_multiply(&x, starts[place + 1] - starts[place], PANEL, 0);
            dense_add(made, which + place * images, images, sums);
        }
        for (int64_t image = 0; image < images; image++)
            for (int64_t c = 0; c < PANEL; c++) {
                const float sum = sums[image * PANEL + c];
                out[image * outputs + column + c] = sum > 0 ? sum : 0;
            }
    }
    free(near);
    return 1;
}

/* gradient [images][outputs] to those of the weights and of pieces; both are added to what is there. */
int dense_backward(const float *pieces, const uint32_t *which, const uint32_t *different, const int64_t *starts,
                   int64_t images, int64_t places, int64_t outputs, const float *weight, const float *gradient,
                   float *to_weight, float *to_pieces) {
    static const float none[PANEL];
    const int64_t panels = outputs / PANEL;
    float *sums = malloc((size_t)(2 * images * (outputs + PANEL) + outputs * PANEL) * sizeof *sums);
    uint32_t *each = malloc((size_t)(PANEL + images * panels) * sizeof *each), *rows = each + PANEL;
    if (!sums || !each) {
        free(sums), free(each);
        return 0;
    }
    float *slopes = sums + images * outputs, *own = slopes + images * outputs, *back = own + images * PANEL;
    float *turned = back + images * PANEL;
    for (int64_t panel = 0; panel < panels; panel++) /* slopes [panels][images][PANEL] */
        for (int64_t image = 0; image < images; image++)
            memcpy(slopes + (panel * images + image) * PANEL, gradient + image * outputs + panel * PANEL,
                   PANEL * sizeof *slopes);
    for (uint32_t c = 0; c < PANEL; c++) each[c] = c;
    for (int64_t place = 0; place < places; place++) {
        const uint32_t *here = different + starts[place];
        const int64_t count = starts[place + 1] - starts[place];
        for (int64_t i = 0; i < count; i++) memcpy(own + i * PANEL, pieces + here[i] * PANEL, PANEL * sizeof *own);
        memset(sums, 0, (size_t)(count * outputs) * sizeof *sums);
        for (int64_t panel = 0; panel < panels; panel++) { /* sums [panels][count][PANEL] */
            float *part = sums + panel * count * PANEL;
            dense_gather(slopes + panel * images * PANEL, which + place * images, images, part);
            Product x = {.from = own, .B = part, .places = each, .pieces = 1, .size = count, .all = 1};
            x.unit = 1, x.panel = PANEL, x.across = outputs, x.to = to_weight + place * PANEL * outputs + panel * PANEL;
            products_multiply(&x, PANEL, PANEL, 1);
            for (int64_t i = 0; i < count; i++) rows[i * panels + panel] = (uint32_t)(panel * count + i);
        }
        products_turn(weight + place * PANEL * outputs, PANEL, outputs, turned, outputs);
        Product x = {.from = sums, .B = turned, .bias = none, .places = rows, .pieces = panels, .size = PANEL};
        x.all = panels, x.unit = x.panel = x.across = PANEL, x.to = back;
        products_multiply(&x, count, PANEL, 0);
        for (int64_t i = 0; i < count; i++)
            for (int64_t c = 0; c < PANEL; c++) to_pieces[here[i] * PANEL + c] += back[i * PANEL + c];
    }
    free(sums), free(each);
    return 1;
}

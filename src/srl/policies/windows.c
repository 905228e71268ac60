/* Layers of windows, and the dense layer after them, in training (images.py).
 *
 * Work is divided over threads by what comes out: every number is summed up by one thread in one order, so a result does not
 * depend on how many there are. */
#include "products.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define MANY 192 /* windows that are one piece of work */

/* ---- a layer of windows, in training ----
 *
 * A window is `pieces` rows of what the layer below made, by number; weights are [outputs][pieces * size]. */

/* out [count][outputs] = windows through the layer and a ReLU. */
int windows_forward(const float *from, const uint32_t *numbers, int64_t count, int64_t pieces, int64_t size,
                    int64_t outputs, const float *weight, const float *bias, float *out, int64_t threads) {
    float *turned = malloc((size_t)(pieces * size * outputs) * sizeof *turned);
    if (!turned) return 0;
    products_turn(weight, outputs, pieces * size, turned, pieces * size);
    const Layer layer = {pieces, size, outputs, turned, bias, 0};
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < count; i += MANY)
        products_through(&layer, from, numbers + i * pieces, count - i < MANY ? count - i : MANY, out + i * outputs);
    free(turned);
    return 1;
}

/* Back through a ReLU that gave `out` [count][outputs]: to, and its sum over rows, bias [outputs]. */
FAST void windows_slopes(const float *restrict out, const float *restrict gradient, int64_t count, int64_t outputs,
                         float *restrict to, float *restrict bias) {
    memset(bias, 0, (size_t)outputs * sizeof *bias);
    for (int64_t i = 0; i < count; i++)
        for (int64_t c = 0; c < outputs; c++) {
            const float slope = out[i * outputs + c] > 0 ? gradient[i * outputs + c] : 0;
            to[i * outputs + c] = slope, bias[c] += slope;
        }
}

/* The same over all threads. New memory, for whoever calls to free; NULL if there is none. */
static float *slopes_of(const float *out, const float *gradient, int64_t count, int64_t outputs, float *bias, int64_t threads) {
    const int64_t chunks = (count + MANY - 1) / MANY;
    float *found = malloc((size_t)(count + chunks) * (size_t)outputs * sizeof *found), *parts = found + count * outputs;
    if (!found) return 0;
#pragma omp parallel for num_threads(threads)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        const int64_t i = chunk * MANY, rows = count - i < MANY ? count - i : MANY;
        windows_slopes(out + i * outputs, gradient + i * outputs, rows, outputs, found + i * outputs, parts + chunk * outputs);
    }
    memset(bias, 0, (size_t)outputs * sizeof *bias);
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int64_t c = 0; c < outputs; c++) bias[c] += parts[chunk * outputs + c];
    return found;
}

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("arch=x86-64-v4"))) static void collect_wide(const float *from, const uint32_t *numbers,
                                                                   int64_t pieces, int64_t size, int64_t many, int64_t count,
                                                                   const float *gradient, int64_t outputs, float *to) {
    if (outputs % PANEL) collects16(12, 2, from, numbers, pieces, size, many, count, gradient, outputs, to);
    else collects16(6, 4, from, numbers, pieces, size, many, count, gradient, outputs, to);
}

__attribute__((target("arch=x86-64-v3"))) static void collect_narrow(const float *from, const uint32_t *numbers,
                                                                     int64_t pieces, int64_t size, int64_t many,
                                                                     int64_t count, const float *gradient, int64_t outputs,
                                                                     float *to) {
    collects8(6, 2, from, numbers, pieces, size, many, count, gradient, outputs, to);
}
#endif

static void windows_collect(const float *from, const uint32_t *numbers, int64_t pieces, int64_t size, int64_t many,
                            int64_t count, const float *gradient, int64_t outputs, float *to) {
    const int lanes = products_lanes();
#if defined(__x86_64__) && defined(__GNUC__)
    if (lanes == 16) collect_wide(from, numbers, pieces, size, many, count, gradient, outputs, to);
    else if (lanes == 8) collect_narrow(from, numbers, pieces, size, many, count, gradient, outputs, to);
    else
#endif
        collects4(2, 4, from, numbers, pieces, size, many, count, gradient, outputs, to);
}

/* to [..][part] += from [count][HALF], of which a row is parts of as many pieces as it has room for. */
FAST void windows_scatter(const float *restrict from, const uint32_t *numbers, int64_t pieces, int64_t part, int64_t count,
                          float *restrict to) {
    for (int64_t i = 0; i < count; i++, numbers += pieces)
        for (int64_t piece = 0; piece < HALF / part; piece++, from += part) {
            float *at = to + numbers[piece] * part;
            for (int64_t k = 0; k < part; k++) at[k] += from[k];
        }
}

/* The gradient of part `which` of all pieces, of each `part` numbers, in memory of its own: who shares lines with another
 * thread waits for them. to [below][size]. 0: no memory. */
static int windows_back(const uint32_t *numbers, int64_t count, int64_t pieces, int64_t size, int64_t outputs, int64_t below,
                        int64_t part, int64_t which, const float *weight, const float *gradient, float *to) {
    enum { FEW = 96 }; /* windows whose pieces' gradients stay near */
    static const float none[PANEL];
    float *near = malloc(((size_t)(outputs + FEW) * HALF + (size_t)(below * part)) * sizeof *near);
    float *back = near + outputs * HALF, *sums = back + FEW * HALF;
    uint32_t each[FEW];
    if (!near) return 0;
    memset(sums, 0, (size_t)(below * part) * sizeof *sums);
    for (uint32_t i = 0; i < FEW; i++) each[i] = i;
    Product x = {.B = near, .bias = none, .places = each, .pieces = 1, .size = outputs, .all = 1, .unit = outputs};
    x.panel = x.across = HALF, x.to = back;
    for (int64_t piece = 0; piece < pieces; piece += HALF / part) {
        for (int64_t n = 0; n < outputs; n++)
            for (int64_t own = 0; own < HALF / part; own++)
                memcpy(near + n * HALF + own * part, weight + (n * pieces + piece + own) * size + which * part,
                       (size_t)part * sizeof *near);
        for (int64_t i = 0; i < count; i += FEW) {
            const int64_t rows = count - i < FEW ? count - i : FEW;
            x.from = gradient + i * outputs;
            products_multiply(&x, rows, HALF, 0);
            windows_scatter(back, numbers + i * pieces + piece, pieces, part, rows, sums);
        }
    }
    for (int64_t i = 0; i < below; i++) memcpy(to + i * size + which * part, sums + i * part, (size_t)part * sizeof *sums);
    free(near);
    return 1;
}

/* gradient of out [count][outputs] to that of the weights [pieces * size][outputs], which is added to what is there, of the
 * bias, and, unless NULL, of what windows are made of [below][size]. */
int windows_backward(const float *from, const uint32_t *numbers, int64_t count, int64_t pieces, int64_t size,
                     int64_t outputs, int64_t below, const float *weight, const float *out, const float *gradient,
                     float *to_weight, float *to_bias, float *to_from, int64_t threads) {
    enum { SOME = 384 }; /* windows whose gradients stay near */
    float *slopes = slopes_of(out, gradient, count, outputs, to_bias, threads);
    const int64_t part = size / 2, some = outputs % PANEL || size <= HALF ? size : HALF, each = size / some;
    const int64_t backs = to_from ? 2 : 0;
    atomic_int fine = 1;
    if (!slopes) return 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t work = 0; work < backs + pieces * each; work++) {
        if (work < backs) {
            if (!windows_back(numbers, count, pieces, size, outputs, below, part, work, weight, slopes, to_from)) fine = 0;
            continue;
        }
        const int64_t piece = (work - backs) / each, begin = (work - backs) % each * some;
        for (int64_t i = 0; i < count; i += SOME)
            windows_collect(from + begin, numbers + i * pieces + piece, pieces, size, some, count - i < SOME ? count - i : SOME,
                            slopes + i * outputs, outputs, to_weight + (piece * size + begin) * outputs);
    }
    free(slopes);
    return fine;
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

/* A panel of out [images][outputs]. 0: no memory. */
static int dense_panel(const float *pieces, const uint32_t *which, const uint32_t *different, const int64_t *starts,
                       int64_t images, int64_t places, int64_t outputs, const float *weight, const float *bias, float *out) {
    static const float none[PANEL];
    float *near = malloc((size_t)(PANEL + 2 * images) * PANEL * sizeof *near);
    if (!near) return 0;
    float *made = near + PANEL * PANEL, *sums = made + images * PANEL;
    Product x = {.from = pieces, .B = near, .bias = none, .pieces = 1, .size = PANEL, .all = 1, .unit = PANEL};
    x.panel = x.across = PANEL, x.to = made;
    for (int64_t image = 0; image < images; image++) memcpy(sums + image * PANEL, bias, PANEL * sizeof *sums);
    for (int64_t place = 0; place < places; place++) {
        const float *from = weight + place * PANEL * outputs;
        for (int64_t k = 0; k < PANEL; k++) memcpy(near + k * PANEL, from + k * outputs, PANEL * sizeof *near);
        x.places = different + starts[place];
        products_multiply(&x, starts[place + 1] - starts[place], PANEL, 0);
        dense_add(made, which + place * images, images, sums);
    }
    for (int64_t image = 0; image < images; image++)
        for (int64_t c = 0; c < PANEL; c++) {
            const float sum = sums[image * PANEL + c];
            out[image * outputs + c] = sum > 0 ? sum : 0;
        }
    free(near);
    return 1;
}

/* out [images][outputs] from pieces [..][PANEL]. */
int dense_forward(const float *pieces, const uint32_t *which, const uint32_t *different, const int64_t *starts,
                  int64_t images, int64_t places, int64_t outputs, const float *weight, const float *bias, float *out,
                  int64_t threads) {
    atomic_int fine = 1;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t column = 0; column < outputs; column += PANEL)
        if (!dense_panel(pieces, which, different, starts, images, places, outputs, weight + column, bias + column, out + column))
            fine = 0;
    return fine;
}

/* What a place adds to the gradient of its weights, and in back [count][PANEL] that of the different pieces there. slopes:
 * the gradient, [panels][images][PANEL]. 0: no memory. */
static int dense_place(const float *pieces, const uint32_t *which, const uint32_t *here, int64_t count, int64_t images,
                       int64_t outputs, const float *weight, const float *slopes, float *to_weight, float *back) {
    static const float none[PANEL];
    const int64_t panels = outputs / PANEL;
    float *sums = malloc((size_t)(images * (outputs + PANEL) + outputs * PANEL) * sizeof *sums);
    uint32_t *each = malloc((size_t)(PANEL + images * panels) * sizeof *each), *rows = each + PANEL;
    const int fine = sums && each;
    if (fine) {
        float *own = sums + images * outputs, *turned = own + images * PANEL;
        for (uint32_t c = 0; c < PANEL; c++) each[c] = c;
        for (int64_t i = 0; i < count; i++) memcpy(own + i * PANEL, pieces + here[i] * PANEL, PANEL * sizeof *own);
        memset(sums, 0, (size_t)(count * outputs) * sizeof *sums);
        for (int64_t panel = 0; panel < panels; panel++) { /* sums [panels][count][PANEL] */
            float *part = sums + panel * count * PANEL;
            dense_gather(slopes + panel * images * PANEL, which, images, part);
            Product x = {.from = own, .B = part, .places = each, .pieces = 1, .size = count, .all = 1};
            x.unit = 1, x.panel = PANEL, x.across = outputs, x.to = to_weight + panel * PANEL;
            products_multiply(&x, PANEL, PANEL, 1);
            for (int64_t i = 0; i < count; i++) rows[i * panels + panel] = (uint32_t)(panel * count + i);
        }
        products_turn(weight, PANEL, outputs, turned, outputs);
        Product x = {.from = sums, .B = turned, .bias = none, .places = rows, .pieces = panels, .size = PANEL};
        x.all = panels, x.unit = x.panel = x.across = PANEL, x.to = back;
        products_multiply(&x, count, PANEL, 0);
    }
    free(sums), free(each);
    return fine;
}

/* gradient of out [images][outputs] to those of the weights and of pieces, which are added to what is there, and of the bias. */
int dense_backward(const float *pieces, const uint32_t *which, const uint32_t *different, const int64_t *starts,
                   int64_t images, int64_t places, int64_t outputs, const float *weight, const float *out,
                   const float *gradient, float *to_weight, float *to_bias, float *to_pieces, int64_t threads) {
    float *masked = slopes_of(out, gradient, images, outputs, to_bias, threads);
    float *slopes = malloc((size_t)(images * outputs + starts[places] * PANEL) * sizeof *slopes);
    float *back = slopes + images * outputs;
    if (!masked || !slopes) {
        free(masked), free(slopes);
        return 0;
    }
    for (int64_t panel = 0; panel < outputs / PANEL; panel++)
        for (int64_t image = 0; image < images; image++)
            memcpy(slopes + (panel * images + image) * PANEL, masked + image * outputs + panel * PANEL,
                   PANEL * sizeof *slopes);
    atomic_int fine = 1;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t place = 0; place < places; place++) {
        const int64_t at = place * PANEL * outputs;
        if (!dense_place(pieces, which + place * images, different + starts[place], starts[place + 1] - starts[place], images,
                         outputs, weight + at, slopes, to_weight + at, back + starts[place] * PANEL))
            fine = 0;
    }
    for (int64_t i = 0; i < starts[places]; i++)
        for (int64_t c = 0; c < PANEL; c++) to_pieces[different[i] * PANEL + c] += back[i * PANEL + c];
    free(masked), free(slopes);
    return fine;
}

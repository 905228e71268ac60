/* What a policy sees in images: the convolutions of images.py and the dense layer after them in one call, for acting
 * (eye.py), and the dense layer by itself, for training (images.py).
 *
 * Every layer is a product whose rows are put together from pieces: a window of the second layer is sixteen rows of what
 * the first made, and so on. Pieces are read where they are. Weights are packed in panels of columns, and a sum is made in
 * the same order however many rows there are, so what is seen in an image does not depend on the others. The structures
 * are repeated in eye.py. */
#include "repeats.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST
#endif
#define INLINE static inline __attribute__((always_inline))
#define BLOCK 4
#define PANEL 64  /* columns */
#define NEAR 128  /* rows of a panel that stay in the nearest cache */
#define LAYERS REPEATS_LAYERS
#define MANY 1500 /* patches that are remembered, for each image that is seen at a time */

typedef struct {
    int64_t pieces, size, outputs; /* a row's pieces, numbers of each, and what comes out: a multiple of 32 */
    float *packed;
    const float *bias;
} Layer;

typedef struct {
    int64_t channels, height, width;
    Layer layers[LAYERS];
    Seen seen[LAYERS];   /* blocks, and the patches of the first three layers */
    float *made[LAYERS]; /* the blocks' pixels, and what layers made of patches */
    int64_t most[LAYERS];
    uint32_t *places[LAYERS]; /* what is where */
} Eye;

/* ---- products ---- */

typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t v16i __attribute__((vector_size(64), aligned(4), may_alias));

/* A product of rows that consist of `pieces` pieces of `size` numbers. That of row r begins at from + places[r * all] * unit,
 * and so on. B has rows of `panel` columns, `to` rows of `across`. */
typedef struct {
    const float *from, *B, *bias; /* no bias: it is added to what is there */
    const uint32_t *places;
    int64_t pieces, size, all, unit, panel, across;
    float *to;
    int ends; /* with a ReLU */
} Product;

/* rows x (16 * vectors) of a product; a piece's numbers are `apart` from each other. */
INLINE void tile(const int rows, const int vectors, const int64_t apart, const Product *x, int64_t row, int64_t column) {
    const uint32_t *places = x->places + row * x->all;
    const float *B = x->B + column;
    float *to = x->to + row * x->across + column;
    v16 sum[12][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = *(const v16 *)((x->bias ? x->bias + column : to + r * x->across) + 16 * v);
    for (int64_t piece = 0; piece < x->pieces; piece++) {
        const float *at[12];
        for (int r = 0; r < rows; r++) at[r] = x->from + places[r * x->all + piece] * x->unit;
        for (int64_t k = 0; k < x->size; k++, B += x->panel) {
            v16 b[4];
            for (int v = 0; v < vectors; v++) b[v] = *(const v16 *)(B + 16 * v);
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < vectors; v++) sum[r][v] += at[r][k * apart] * b[v];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            const v16 y = sum[r][v];
            *(v16 *)(to + r * x->across + 16 * v) = x->ends ? (v16)((v16i)y & (y > (v16){0})) : y;
        }
}

INLINE void tiles(const int tall, const int vectors, const int64_t apart, const Product *x, int64_t rows,
                  int64_t columns) {
    for (int64_t column = 0; column < columns; column += 16 * vectors) {
        int64_t r = 0;
        for (; r + tall <= rows; r += tall) tile(tall, vectors, apart, x, r, column);
        for (; r + 2 <= rows; r += 2) tile(2, vectors, apart, x, r, column);
        if (r < rows) tile(1, vectors, apart, x, r, column);
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("arch=x86-64-v4"))) static void wide(const Product *x, int64_t rows, int64_t columns, int turned) {
    if (turned) tiles(6, 4, PANEL, x, rows, columns);
    else if (columns % PANEL) tiles(12, 2, 1, x, rows, columns);
    else tiles(6, 4, 1, x, rows, columns);
}

__attribute__((target("arch=x86-64-v3"))) static void narrow(const Product *x, int64_t rows, int64_t columns,
                                                             int turned) {
    if (turned) tiles(6, 1, PANEL, x, rows, columns);
    else tiles(6, 1, 1, x, rows, columns);
}
#endif

/* turned: a piece's numbers are a panel apart. */
static void multiply(const Product *x, int64_t rows, int64_t columns, int turned) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("x86-64-v4")) wide(x, rows, columns, turned);
    else if (__builtin_cpu_supports("x86-64-v3")) narrow(x, rows, columns, turned);
    else
#endif
        if (turned) tiles(2, 1, PANEL, x, rows, columns);
    else tiles(2, 1, 1, x, rows, columns);
}

/* ---- acting ---- */

/* to [rows][outputs] = what a layer and a ReLU make of rows whose pieces are at `places` [rows][pieces] of `from`. */
static void through(const Layer *layer, const float *from, const uint32_t *places, int64_t rows, float *to) {
    const int64_t step = layer->size < NEAR ? NEAR / layer->size : 1, panel = layer->outputs % PANEL ? PANEL / 2 : PANEL;
    Product x = {.from = from, .size = layer->size, .all = layer->pieces, .unit = layer->size, .panel = panel};
    x.across = layer->outputs;
    for (int64_t column = 0; column < layer->outputs; column += panel)
        for (int64_t begin = 0; begin < layer->pieces; begin += step) {
            x.pieces = layer->pieces - begin < step ? layer->pieces - begin : step;
            x.ends = begin + x.pieces == layer->pieces;
            x.B = layer->packed + (column * layer->pieces + begin * panel) * layer->size;
            x.bias = begin ? 0 : layer->bias + column;
            x.places = places + begin, x.to = to + column;
            multiply(&x, rows, panel, 0);
        }
}

/* Pack weights into panels: that of output n and number k of all pieces is at n * across + at[k]. */
void eye_pack(const Layer *layer, const float *weight, const int64_t *at, int64_t across, float scale) {
    const int64_t inner = layer->pieces * layer->size, panel = layer->outputs % PANEL ? PANEL / 2 : PANEL;
    for (int64_t column = 0; column < layer->outputs; column += panel)
        for (int64_t k = 0; k < inner; k++)
            for (int64_t c = 0; c < panel; c++)
                layer->packed[column * inner + k * panel + c] = weight[(column + c) * across + at[k]] * scale;
}

/* How many different ones of each kind are remembered. */
static void sizes(const Eye *eye, int64_t images, int64_t *most) {
    repeats_sizes(images, eye->height, eye->width, most);
    for (int at = 0; at < LAYERS; at++)
        if (most[at] < images * MANY) most[at] = images * MANY;
}

/* Numbers of 32 bits that the memory of an eye for so many images takes. */
int64_t eye_room(const Eye *eye, int64_t images) {
    int64_t most[LAYERS], places[LAYERS], sum = 0;
    sizes(eye, images, most);
    repeats_sizes(images, eye->height, eye->width, places);
    for (int at = 0; at < LAYERS; at++) {
        const int64_t words = at ? eye->layers[at - 1].pieces : eye->channels * BLOCK;
        const int64_t made = at ? eye->layers[at - 1].outputs : eye->channels * BLOCK * BLOCK;
        sum += most[at] * (words + made) + (int64_t)repeats_slots(most[at]) + places[at];
    }
    return sum;
}

/* Forget all that was seen. */
void eye_forget(Eye *eye) {
    for (int at = 0; at < LAYERS; at++) {
        Seen *seen = &eye->seen[at];
        seen->count = 0, seen->last = 0;
        memset(seen->table, 0, (seen->mask + 1) * sizeof *seen->table);
    }
}

/* Use this memory. */
void eye_open(Eye *eye, int64_t images, uint32_t *room) {
    int64_t places[LAYERS];
    sizes(eye, images, eye->most);
    repeats_sizes(images, eye->height, eye->width, places);
    for (int at = 0; at < LAYERS; at++) {
        const int64_t words = at ? eye->layers[at - 1].pieces : eye->channels * BLOCK;
        const int64_t made = at ? eye->layers[at - 1].outputs : eye->channels * BLOCK * BLOCK;
        const uint64_t slots = repeats_slots(eye->most[at]);
        eye->made[at] = (float *)room, room += eye->most[at] * made;
        eye->seen[at] = (Seen){room, words, 0, 0, room + eye->most[at] * words, slots - 1, 0, 1};
        room += eye->most[at] * words + (int64_t)slots;
        eye->places[at] = memset(room, 0, (size_t)places[at] * sizeof *room), room += places[at];
    }
    eye_forget(eye);
}

/* Features of images of bytes. What has been seen before with the same weights is not worked out again. 0: they have too
 * little in common. */
int eye_see(Eye *eye, const uint8_t *images, int64_t rows, float *features) {
    int64_t before[LAYERS], places[LAYERS];
    repeats_sizes(rows, eye->height, eye->width, places);
    for (;;) {
        for (int at = 0; at < LAYERS; at++) before[at] = eye->seen[at].count, eye->seen[at].most = eye->most[at];
        if (before[0] + places[0] / 2 < eye->most[0]) eye->seen[0].most = before[0] + places[0] / 2;
        if (repeats_more(eye->seen, images, rows, eye->channels, eye->height, eye->width, eye->places)) break;
        eye_forget(eye);
        if (!before[0]) return 0;
    }
    const int64_t bytes = eye->channels * BLOCK * BLOCK;
    const uint8_t *blocks = (const uint8_t *)eye->seen[0].kept;
    for (int64_t i = before[0] * bytes; i < eye->seen[0].count * bytes; i++) eye->made[0][i] = blocks[i];
    for (int at = 1; at < LAYERS; at++) {
        const Layer *layer = &eye->layers[at - 1];
        through(layer, eye->made[at - 1], eye->seen[at].kept + before[at] * layer->pieces, eye->seen[at].count - before[at],
                eye->made[at] + before[at] * layer->outputs);
    }
    through(&eye->layers[LAYERS - 1], eye->made[LAYERS - 1], eye->places[LAYERS - 1], rows, features);
    return 1;
}

/* to [count][rows] from [rows][across], sixteen by sixteen. */
FAST void eye_turn(const float *from, int64_t rows, int64_t across, float *to, int64_t count) {
    for (int64_t c = 0; c < rows; c += 16)
        for (int64_t n = 0; n < count; n += 16) {
            float block[16][16];
            for (int i = 0; i < 16; i++) memcpy(block[i], from + (c + i) * across + n, sizeof block[i]);
            for (int j = 0; j < 16; j++)
                for (int i = 0; i < 16; i++) to[(n + j) * rows + c + i] = block[i][j];
        }
}

/* ---- a layer of windows, in training ----
 *
 * A window is `pieces` rows of what the layer below made, by number; weights are [outputs][pieces * size]. */

/* out [count][outputs] = windows through the layer and a ReLU. */
int windows_forward(const float *from, const uint32_t *numbers, int64_t count, int64_t pieces, int64_t size,
                    int64_t outputs, const float *weight, const float *bias, float *out) {
    float *turned = malloc((size_t)(pieces * size * outputs) * sizeof *turned);
    if (!turned) return 0;
    eye_turn(weight, outputs, pieces * size, turned, pieces * size);
    const Layer layer = {pieces, size, outputs, turned, bias};
    through(&layer, from, numbers, count, out);
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
            multiply(&x, rows, PANEL, 0);
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
            multiply(&x, starts[place + 1] - starts[place], PANEL, 0);
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

/* gradient [images][outputs] to those of the weights, and of pieces, which is added to what is there. */
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
            Product x = {.from = own, .B = part, .bias = none, .places = each, .pieces = 1, .size = count, .all = 1};
            x.unit = 1, x.panel = PANEL, x.across = outputs, x.to = to_weight + place * PANEL * outputs + panel * PANEL;
            multiply(&x, PANEL, PANEL, 1);
            for (int64_t i = 0; i < count; i++) rows[i * panels + panel] = (uint32_t)(panel * count + i);
        }
        eye_turn(weight + place * PANEL * outputs, PANEL, outputs, turned, outputs);
        Product x = {.from = sums, .B = turned, .bias = none, .places = rows, .pieces = panels, .size = PANEL};
        x.all = panels, x.unit = x.panel = x.across = PANEL, x.to = back;
        multiply(&x, count, PANEL, 0);
        for (int64_t i = 0; i < count; i++)
            for (int64_t c = 0; c < PANEL; c++) to_pieces[here[i] * PANEL + c] += back[i * PANEL + c];
    }
    free(sums), free(each);
    return 1;
}

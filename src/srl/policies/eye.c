/* What a policy sees in images, in one call: the convolutions of images.py and the dense layer after them, for acting.
 *
 * Every layer is a product whose rows are put together from pieces: a window of the second layer is sixteen rows of what
 * the first made, and so on. Pieces are read where they are. Weights are packed in panels of columns, and a sum is made in
 * the same order however many rows there are, so what is seen in an image does not depend on the others. The structures
 * are repeated in eye.py. */
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define BLOCK 4
#define PANEL 64  /* columns */
#define NEAR 128  /* rows of a panel that stay in the nearest cache */
#define LAYERS 4

int repeats_find(const uint8_t *from, int64_t images, int64_t channels, int64_t height, int64_t width,
                 uint32_t *const *kept, const int64_t *most, int64_t *counts, uint32_t *last);

typedef struct {
    int64_t pieces, size, outputs; /* a row's pieces, numbers of each, and what comes out: a multiple of 32 */
    float *packed;
    const float *bias;
} Layer;

typedef struct {
    int64_t channels, height, width;
    Layer layers[LAYERS];
} Eye;

typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t v16i __attribute__((vector_size(64), aligned(4), may_alias));

/* rows x (16 * vectors) of a product with `pieces` pieces, after what is in `to` or, at the beginning, the bias. */
INLINE void tile(const int rows, const int vectors, const Layer *layer, int64_t pieces, const float *from,
                 const uint32_t *places, const float *B, const int64_t panel, float *to, const float *bias, int ends) {
    v16 sum[12][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = *(const v16 *)((bias ? bias : to + r * layer->outputs) + 16 * v);
    for (int64_t piece = 0; piece < pieces; piece++) {
        const float *row[12];
        for (int r = 0; r < rows; r++) row[r] = from + places[r * layer->pieces + piece] * layer->size;
        for (int64_t k = 0; k < layer->size; k++, B += panel) {
            v16 b[4];
            for (int v = 0; v < vectors; v++) b[v] = *(const v16 *)(B + 16 * v);
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < vectors; v++) sum[r][v] += row[r][k] * b[v];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            const v16 x = sum[r][v];
            *(v16 *)(to + r * layer->outputs + 16 * v) = ends ? (v16)((v16i)x & (x > (v16){0})) : x;
        }
}

/* to [rows][outputs] = what a layer and a ReLU make of rows whose pieces are at `places` [rows][pieces] of `from`; `tall`
 * rows and `vectors` x 16 columns at a time, in panels of `panel` columns. */
INLINE void product(const int tall, const int vectors, const int64_t panel, const Layer *layer, const float *from,
                    const uint32_t *places, int64_t rows, float *to) {
    const int64_t step = layer->size < NEAR ? NEAR / layer->size : 1, width = 16 * vectors;
    for (int64_t column = 0; column < layer->outputs; column += panel)
        for (int64_t begin = 0; begin < layer->pieces; begin += step) {
            const int64_t pieces = layer->pieces - begin < step ? layer->pieces - begin : step;
            const int ends = begin + pieces == layer->pieces;
            for (int64_t at = column; at < column + panel; at += width) {
                const float *B = layer->packed + (column * layer->pieces + begin * panel) * layer->size + at - column;
                const float *bias = begin ? 0 : layer->bias + at;
                const uint32_t *where = places + begin;
                float *out = to + at;
                int64_t r = 0;
                for (; r + tall <= rows; r += tall, where += tall * layer->pieces, out += tall * layer->outputs)
                    tile(tall, vectors, layer, pieces, from, where, B, panel, out, bias, ends);
                for (; r + 2 <= rows; r += 2, where += 2 * layer->pieces, out += 2 * layer->outputs)
                    tile(2, vectors, layer, pieces, from, where, B, panel, out, bias, ends);
                if (r < rows) tile(1, vectors, layer, pieces, from, where, B, panel, out, bias, ends);
            }
        }
}

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("arch=x86-64-v4"))) static void wide(const Layer *layer, const float *from, const uint32_t *places,
                                                           int64_t rows, float *to) {
    if (layer->outputs % PANEL) product(12, 2, PANEL / 2, layer, from, places, rows, to);
    else product(6, 4, PANEL, layer, from, places, rows, to);
}

__attribute__((target("arch=x86-64-v3"))) static void narrow(const Layer *layer, const float *from,
                                                             const uint32_t *places, int64_t rows, float *to) {
    if (layer->outputs % PANEL) product(6, 1, PANEL / 2, layer, from, places, rows, to);
    else product(6, 1, PANEL, layer, from, places, rows, to);
}
#endif

static void plain(const Layer *layer, const float *from, const uint32_t *places, int64_t rows, float *to) {
    if (layer->outputs % PANEL) product(2, 1, PANEL / 2, layer, from, places, rows, to);
    else product(2, 1, PANEL, layer, from, places, rows, to);
}

static void through(const Layer *layer, const float *from, const uint32_t *places, int64_t rows, float *to) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("x86-64-v4")) wide(layer, from, places, rows, to);
    else if (__builtin_cpu_supports("x86-64-v3")) narrow(layer, from, places, rows, to);
    else
#endif
        plain(layer, from, places, rows, to);
}

/* Pack weights [outputs][...], of which number `k` of piece `p` is at p * piece + k * number, into panels. */
void eye_pack(const Layer *layer, const float *weight, const int64_t *at, float scale) {
    const int64_t inner = layer->pieces * layer->size, panel = layer->outputs % PANEL ? PANEL / 2 : PANEL;
    for (int64_t column = 0; column < layer->outputs; column += panel)
        for (int64_t k = 0; k < inner; k++)
            for (int64_t c = 0; c < panel; c++)
                layer->packed[column * inner + k * panel + c] = weight[(column + c) * inner + at[k]] * scale;
}

/* Sizes of the layers: the different blocks, then the patches, at most; the places of the last. */
static void sizes(const Eye *eye, int64_t images, int64_t *most, int64_t *places) {
    const int64_t h = eye->height / BLOCK, w = eye->width / BLOCK, h1 = h - 1, w1 = w - 1;
    const int64_t h2 = (h1 - 4) / 2 + 1, w2 = (w1 - 4) / 2 + 1;
    most[0] = images * h * w / 2, most[1] = images * h1 * w1, most[2] = images * h2 * w2;
    most[3] = *places = images * (h2 - 2) * (w2 - 2);
}

/* Numbers of 32 bits that eye_see needs room for. */
int64_t eye_room(const Eye *eye, int64_t images) {
    int64_t most[LAYERS], places;
    sizes(eye, images, most, &places);
    int64_t sum = places + most[0] * eye->channels * BLOCK * (1 + BLOCK);
    for (int at = 1; at < LAYERS; at++) sum += most[at] * (eye->layers[at - 1].pieces + eye->layers[at - 1].outputs);
    return sum;
}

/* Features of images of bytes; 0: they have too little in common. */
int eye_see(const Eye *eye, const uint8_t *images, int64_t rows, uint32_t *room, float *features) {
    int64_t most[LAYERS], counts[LAYERS], places;
    uint32_t *kept[LAYERS], *last = room;
    sizes(eye, rows, most, &places);
    const int64_t bytes = eye->channels * BLOCK * BLOCK;
    room += places;
    for (int at = 0; at < LAYERS; at++) {
        kept[at] = room;
        room += most[at] * (at ? eye->layers[at - 1].pieces : bytes / 4);
    }
    if (!repeats_find(images, rows, eye->channels, eye->height, eye->width, kept, most, counts, last)) return 0;
    float *from = (float *)room;
    const uint8_t *blocks = (const uint8_t *)kept[0];
    for (int64_t i = 0; i < counts[0] * bytes; i++) from[i] = blocks[i];
    float *to = from + most[0] * bytes;
    for (int at = 0; at < LAYERS - 1; at++) {
        through(&eye->layers[at], from, kept[at + 1], counts[at + 1], to);
        from = to, to += most[at + 1] * eye->layers[at].outputs;
    }
    through(&eye->layers[LAYERS - 1], from, last, rows, features);
    return 1;
}
